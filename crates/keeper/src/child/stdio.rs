//! The three pipes of a child, a task each: none waits for another, nor for another child.

use std::cell::RefCell;
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Poll, ready};
use std::time::Duration;

use mainstay_core::wire::lines::{Line, LineSplitter};
use tokio::io::{AsyncRead as _, ReadBuf};
use tokio::net::unix::pipe;
use tokio::task::coop::consume_budget;
use tokio::task::{JoinHandle, spawn_local};
use tokio::time::timeout;

use super::{Child, StdinWork};
use crate::keeper::Keeper;
use crate::stderr::Log;
use crate::types::LINE_BYTES_MAX;

/// The keeper's ends of a child's pipes.
pub(crate) struct Pipes {
    pub(crate) stdin: pipe::Sender,
    pub(crate) stdout: pipe::Receiver,
    pub(crate) stderr: pipe::Receiver,
}

/// The tasks that serve them.
pub(crate) struct Streams {
    stdin: JoinHandle<()>,
    stdout: JoinHandle<()>,
    stderr: JoinHandle<()>,
}

impl Streams {
    pub(crate) fn start(keeper: &Rc<Keeper>, child: &Rc<Child>, pipes: Pipes) -> Self {
        let log = keeper.log_of(&child.name);
        Self {
            stdin: spawn_local(write_stdin(Rc::clone(keeper), Rc::clone(child), pipes.stdin)),
            stdout: spawn_local(read_stdout(Rc::clone(keeper), Rc::clone(child), pipes.stdout)),
            stderr: spawn_local(read_stderr(Rc::clone(keeper), Rc::clone(child), pipes.stderr, log)),
        }
    }

    /// Waits until everything that the child has written is in custody, which takes until there is room for it.
    pub(crate) async fn finish(self) {
        self.stdin.abort();
        for (stream, task) in [("stdout", self.stdout), ("stderr", self.stderr)] {
            if let Err(error) = task.await {
                tracing::error!(stream, error = &error as &dyn std::error::Error, "reading from a child failed");
            }
        }
    }
}

async fn write_stdin(keeper: Rc<Keeper>, child: Rc<Child>, pipe: pipe::Sender) {
    let mut line = Vec::new();
    loop {
        match child.next_stdin_work() {
            StdinWork::Close => return,
            StdinWork::Wait => {
                // An idle child holds no buffer.
                line = Vec::new();
                child.stdin_work.notified().await;
            }
            StdinWork::Frame(frame) => {
                line.clear();
                line.extend_from_slice(&frame);
                line.push(b'\n');
                if let Err(error) = write_line(&child, &pipe, &line).await {
                    tracing::info!(child = child.id.get(), %error, "the child reads no more and is ended");
                    child.order_end(BROKEN_GRACE);
                    return;
                }
                child.frame_written(frame.len());
                keeper.offer_written(&child);
            }
        }
    }
}

/// Writes `line`, however long the child takes to read it. That a part of it was written is remembered.
async fn write_line(child: &Child, pipe: &pipe::Sender, line: &[u8]) -> io::Result<()> {
    let mut rest = line;
    while !rest.is_empty() {
        match pipe.try_write(rest) {
            Ok(written) => {
                rest = &rest[written..];
                if !rest.is_empty() {
                    child.frame_begun();
                }
                consume_budget().await;
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => pipe.writable().await?,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

async fn read_stdout(keeper: Rc<Keeper>, child: Rc<Child>, mut pipe: pipe::Receiver) {
    let mut splitter = LineSplitter::new(LINE_BYTES_MAX);
    loop {
        // Lines are taken out one by one as there is room for them, and nothing more is read before: the child waits.
        while let Some(line) = next_line(&child, &mut splitter).await {
            child.push_line(line);
            keeper.offer(&child);
        }
        match read(&keeper, &child, &mut pipe, |bytes| splitter.push(bytes)).await {
            Ok(0) => break,
            Ok(_) => {}
            Err(error) => {
                tracing::warn!(child = child.id.get(), %error, "could not read the child's stdout");
                break;
            }
        }
    }
    if let Some(rest) = splitter.finish() {
        tracing::debug!(child = child.id.get(), bytes = rest.len(), "the child's last line was never ended");
    }
}

async fn next_line(child: &Child, splitter: &mut LineSplitter) -> Option<Line> {
    if splitter.buffered() == 0 {
        return None;
    }
    while !child.has_room() {
        child.room.notified().await;
    }
    splitter.next_line()
}

async fn read_stderr(keeper: Rc<Keeper>, child: Rc<Child>, mut pipe: pipe::Receiver, log: Rc<RefCell<Log>>) {
    loop {
        let taken = read(&keeper, &child, &mut pipe, |bytes| {
            child.push_stderr(bytes);
            log.borrow_mut().push(bytes);
        });
        match taken.await {
            Ok(0) => return,
            Ok(_) => {}
            Err(error) => {
                tracing::warn!(child = child.id.get(), %error, "could not read the child's stderr");
                return;
            }
        }
    }
}

/// Reads once and gives the bytes to `take`; 0 at the end of the stream.
///
/// Once the child is gone, a pipe that nobody writes to counts as ended even if a stranger still holds its other end.
async fn read(
    keeper: &Keeper,
    child: &Child,
    pipe: &mut pipe::Receiver,
    mut take: impl FnMut(&[u8]),
) -> io::Result<usize> {
    if !child.is_gone() {
        tokio::select! {
            biased;
            count = read_once(keeper, pipe, &mut take) => return count,
            () = child.gone.notified() => {}
        }
    }
    timeout(LAST_WORDS_BOUND, read_once(keeper, pipe, &mut take)).await.unwrap_or(Ok(0))
}

async fn read_once(keeper: &Keeper, pipe: &mut pipe::Receiver, take: &mut impl FnMut(&[u8])) -> io::Result<usize> {
    std::future::poll_fn(|context| {
        // One buffer for all pipes: it is empty again before anybody else runs.
        keeper.with_scratch(|scratch| {
            let mut buffer = ReadBuf::new(scratch);
            ready!(Pin::new(&mut *pipe).poll_read(context, &mut buffer))?;
            take(buffer.filled());
            Poll::Ready(Ok(buffer.filled().len()))
        })
    })
    .await
}

/// The grace of a child that has closed its stdin: it can't be served any more.
const BROKEN_GRACE: Duration = Duration::from_secs(2);

/// How long a pipe of a gone child may stay silent before it counts as ended.
const LAST_WORDS_BOUND: Duration = Duration::from_millis(200);
