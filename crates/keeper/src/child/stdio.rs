//! The three pipes of a child, a task each: none waits for another, nor for another child.
//!
//! The tasks keep nothing of their own: whatever is on its way is the child's, so that it can be carried over a renewal
//! of the keeper whenever no task runs.

use std::cell::RefCell;
use std::io::{self, IoSlice};
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::task::ready;
use std::time::Duration;

use mainstay_core::wire::lines::Line;
use tokio::task::coop::consume_budget;
use tokio::task::{JoinHandle, spawn_local};
use tokio::time::timeout;

use super::pipe::Pipe;
use super::{Child, StdinWork};
use crate::keeper::Keeper;
use crate::stderr::Log;

/// The keeper's ends of a child's pipes, as far as they are open.
#[derive(Debug, Default)]
pub(crate) struct Pipes {
    pub(crate) stdin: Option<Rc<Pipe>>,
    pub(crate) stdout: Option<Rc<Pipe>>,
    pub(crate) stderr: Option<Rc<Pipe>>,
}

impl Pipes {
    /// Has the runtime watch what is there.
    pub(crate) fn watch(stdin: Option<OwnedFd>, stdout: Option<OwnedFd>, stderr: Option<OwnedFd>) -> io::Result<Self> {
        let shared = |pipe: Option<io::Result<Pipe>>| pipe.transpose().map(|pipe| pipe.map(Rc::new));
        Ok(Self {
            stdin: shared(stdin.map(Pipe::of_writer))?,
            stdout: shared(stdout.map(Pipe::of_reader))?,
            stderr: shared(stderr.map(Pipe::of_reader))?,
        })
    }
}

/// The tasks that serve them.
pub(crate) struct Streams {
    stdin: Option<JoinHandle<()>>,
    stdout: Option<JoinHandle<()>>,
    stderr: Option<JoinHandle<()>>,
}

impl Streams {
    /// Starts a task for each pipe that the child has.
    pub(crate) fn start(keeper: &Rc<Keeper>, child: &Rc<Child>) -> Self {
        let pipes = child.pipes.borrow();
        let shared = || (Rc::clone(keeper), Rc::clone(child));
        let stdin = pipes.stdin.clone().map(|pipe| spawn_local(write_stdin(shared(), pipe)));
        let stdout = pipes.stdout.clone().map(|pipe| spawn_local(read_stdout(shared(), pipe)));
        let log_and_pipe = pipes.stderr.clone().map(|pipe| (keeper.log_of(&child.name), pipe));
        let stderr = log_and_pipe.map(|(log, pipe)| spawn_local(read_stderr(shared(), pipe, log)));
        Self { stdin, stdout, stderr }
    }

    /// Waits until everything that the child has written is in custody, which takes until there is room for it.
    pub(crate) async fn finish(self, child: &Child) {
        if let Some(stdin) = self.stdin {
            stdin.abort();
        }
        child.pipes.borrow_mut().stdin = None;
        for (stream, task) in [("stdout", self.stdout), ("stderr", self.stderr)] {
            if let Some(task) = task
                && let Err(error) = task.await
            {
                tracing::error!(stream, error = &error as &dyn std::error::Error, "reading from a child failed");
            }
        }
    }
}

type Shared = (Rc<Keeper>, Rc<Child>);

async fn write_stdin((keeper, child): Shared, pipe: Rc<Pipe>) {
    loop {
        match child.next_stdin_work() {
            StdinWork::Close => break,
            StdinWork::Wait => child.stdin_work.notified().await,
            StdinWork::Write { frame, from } => {
                // However long the child takes to read it. What of it was written is remembered at once.
                let rest = &frame[from.min(frame.len())..];
                match pipe.write(&[IoSlice::new(rest), IoSlice::new(b"\n")]).await {
                    Ok(written) => {
                        if child.input_written(written) {
                            keeper.offer_written(&child);
                        }
                    }
                    Err(error) => {
                        tracing::info!(child = child.id.get(), %error, "the child reads no more and is ended");
                        child.order_end(BROKEN_GRACE);
                        break;
                    }
                }
                consume_budget().await;
            }
        }
    }
    child.pipes.borrow_mut().stdin = None;
}

async fn read_stdout((keeper, child): Shared, pipe: Rc<Pipe>) {
    loop {
        // Lines are taken out one by one as there is room for them, and nothing more is read before: the child waits.
        while let Some(line) = next_line(&child).await {
            child.push_line(line);
            keeper.offer(&child);
        }
        match read(&keeper, &child, &pipe, |bytes| child.push_output(bytes)).await {
            Ok(0) => break,
            Ok(_) => {}
            Err(error) => {
                tracing::warn!(child = child.id.get(), %error, "could not read the child's stdout");
                break;
            }
        }
    }
    if let Some(rest) = child.end_output() {
        tracing::debug!(child = child.id.get(), bytes = rest.len(), "the child's last line was never ended");
    }
    child.pipes.borrow_mut().stdout = None;
}

/// The next line, as soon as there is room for one. It is taken out and pushed without anybody in between.
async fn next_line(child: &Child) -> Option<Line> {
    if !child.has_output_buffered() {
        return None;
    }
    while !child.has_room() {
        child.room.notified().await;
    }
    child.next_output_line()
}

async fn read_stderr((keeper, child): Shared, pipe: Rc<Pipe>, log: Rc<RefCell<Log>>) {
    loop {
        let taken = read(&keeper, &child, &pipe, |bytes| {
            child.push_stderr(bytes);
            log.borrow_mut().push(bytes);
        });
        match taken.await {
            Ok(0) => break,
            Ok(_) => {}
            Err(error) => {
                tracing::warn!(child = child.id.get(), %error, "could not read the child's stderr");
                break;
            }
        }
    }
    child.pipes.borrow_mut().stderr = None;
}

/// Reads once and gives the bytes to `take`; 0 at the end of the stream.
///
/// Once the child is gone, a pipe that nobody writes to counts as ended even if a stranger still holds its other end.
async fn read(keeper: &Keeper, child: &Child, pipe: &Pipe, mut take: impl FnMut(&[u8])) -> io::Result<usize> {
    if !child.is_gone() {
        tokio::select! {
            biased;
            count = read_once(keeper, pipe, &mut take) => return count,
            () = child.gone.notified() => {}
        }
    }
    timeout(LAST_WORDS_BOUND, read_once(keeper, pipe, &mut take)).await.unwrap_or(Ok(0))
}

async fn read_once(keeper: &Keeper, pipe: &Pipe, take: &mut impl FnMut(&[u8])) -> io::Result<usize> {
    std::future::poll_fn(|context| {
        // One buffer for all pipes: it is empty again before anybody else runs.
        keeper.with_scratch(|scratch| {
            let count = ready!(pipe.poll_read(context, scratch))?;
            take(&scratch[..count]);
            std::task::Poll::Ready(Ok(count))
        })
    })
    .await
}

/// The grace of a child that has closed its stdin: it can't be served any more.
const BROKEN_GRACE: Duration = Duration::from_secs(2);

/// How long a pipe of a gone child may stay silent before it counts as ended.
const LAST_WORDS_BOUND: Duration = Duration::from_millis(200);
