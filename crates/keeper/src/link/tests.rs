use std::io::IoSlice;
use std::time::Duration;

use bytes::Bytes;
use tokio::runtime::{Builder, LocalOptions};
use tokio::task::{JoinHandle, spawn_local};
use tokio::time::timeout;

use super::*;
use crate::identity::ProcessIdentity;
use crate::protocol::Holding;
use crate::state::ensure_private_dir;
use crate::types::Spawn;

const BOUND: Duration = Duration::from_secs(10);

/// A worker that says whatever it is told to.
struct Mouth {
    link: Rc<Link>,
    socket: Socket,
    inbox: Inbox,
    serving: JoinHandle<Result<(), LinkError>>,
}

impl Mouth {
    fn open(keeper: &Rc<Keeper>) -> Self {
        let (near, socket) = Socket::pair().unwrap();
        let link = Rc::new(Link::new(1, near));
        let serving = spawn_local(serve(Rc::clone(keeper), Rc::clone(&link)));
        Self { link, socket, inbox: Inbox::default(), serving }
    }

    async fn say(&self, message: ToKeeper) {
        let mut outbox = Outbox::default();
        message.encode(&mut outbox);
        outbox.write_all(&self.socket).await.unwrap();
    }

    async fn hear(&mut self) -> ToWorker {
        loop {
            if let Some(message) = self.inbox.next_message().unwrap() {
                return ToWorker::decode(message).unwrap();
            }
            let filled = timeout(BOUND, self.inbox.fill(&self.socket)).await.unwrap();
            assert!(filled.unwrap() > 0, "the keeper hung up");
        }
    }

    /// Returns once everything that was said is done.
    async fn settled(&mut self) {
        self.say(ToKeeper::StderrTail { request: 9, child: ChildId::new(u64::MAX) }).await;
        while !matches!(self.hear().await, ToWorker::StderrTail { request: 9, .. }) {}
    }

    /// Attaches and returns the children that are held.
    async fn attach(&mut self) -> Vec<Holding> {
        self.say(ToKeeper::Hello { version: PROTOCOL_VERSION, pid: 1 }).await;
        let mut held = Vec::new();
        loop {
            let message = self.hear().await;
            if message == ToWorker::Begin {
                return held;
            } else if let ToWorker::Held(child) = message {
                held.push(child);
            } else {
                assert!(matches!(message, ToWorker::Welcome(_)), "{message:?}");
            }
        }
    }

    /// Closes the socket and returns how serving ended.
    async fn close(self) -> Result<(), LinkError> {
        drop(self.socket);
        timeout(BOUND, self.serving).await.unwrap().unwrap()
    }
}

/// Runs `test` with a keeper that has no process of its own.
fn with_keeper<F: Future<Output = ()>>(test: impl FnOnce(Rc<Keeper>) -> F) {
    let dir = tempfile::tempdir().unwrap();
    for name in ["", "children", "logs"] {
        ensure_private_dir(&dir.path().join(name)).unwrap();
    }
    let runtime = Builder::new_current_thread().enable_all().build_local(LocalOptions::default()).unwrap();
    let identity = ProcessIdentity::of_self().unwrap();
    runtime.block_on(test(Rc::new(Keeper::new(identity, Vec::new(), b"settings".to_vec(), dir.path()))));
}

fn cat(marker: &str) -> Spawn {
    Spawn {
        label: Vec::new(),
        name: "cat".to_owned(),
        program: "cat".into(),
        args: Vec::new(),
        env: Vec::new(),
        cwd: None,
        marker: marker.to_owned(),
    }
}

#[test]
fn c8_a_worker_that_dies_within_a_message_leaves_no_part_of_it() {
    with_keeper(|keeper| async move {
        let mut first = Mouth::open(&keeper);
        assert_eq!(first.attach().await, []);
        first.say(ToKeeper::Spawn { request: 5, spawn: cat("dies-within") }).await;
        let spawned = first.hear().await;
        let ToWorker::Spawned { request: 5, child, .. } = spawned else { panic!("{spawned:?}") };
        first.say(ToKeeper::Write { child, tag: None, frame: Bytes::from_static(b"whole") }).await;
        let mut half = Outbox::default();
        ToKeeper::Write { child, tag: None, frame: Bytes::from_static(b"half a frame") }.encode(&mut half);
        let half = half.into_bytes();
        assert_eq!(first.socket.try_send(&[IoSlice::new(&half[..half.len() - 4])]).unwrap(), Some(half.len() - 4));
        first.close().await.unwrap();

        let mut second = Mouth::open(&keeper);
        let held = second.attach().await;
        assert_eq!((held.len(), held[0].child, held[0].frames_accepted), (1, child, 1));
        let bytes = Bytes::from_static(b"whole");
        assert_eq!(second.hear().await, ToWorker::Frame { child, number: 1, bytes });
        second.say(ToKeeper::Write { child, tag: None, frame: Bytes::from_static(b"next") }).await;
        let mut heard = second.hear().await;
        if matches!(heard, ToWorker::Written { .. }) {
            heard = second.hear().await;
        }
        let bytes = Bytes::from_static(b"next");
        assert_eq!(heard, ToWorker::Frame { child, number: 2, bytes });
        second.say(ToKeeper::Forget { child }).await;
        timeout(BOUND, keeper.child_is_gone.notified()).await.unwrap();
        second.close().await.unwrap();
    });
}

#[test]
fn another_version_is_refused_in_so_many_words() {
    with_keeper(|keeper| async move {
        let mut worker = Mouth::open(&keeper);
        worker.say(ToKeeper::Hello { version: PROTOCOL_VERSION + 1, pid: 1 }).await;
        assert_eq!(worker.hear().await, ToWorker::Refused { version: PROTOCOL_VERSION });
        let ended = worker.close().await;
        assert!(matches!(ended, Err(LinkError::Version { worker }) if worker == PROTOCOL_VERSION + 1));
    });
}

#[test]
fn a_worker_that_talks_nonsense_is_dropped() {
    with_keeper(|keeper| async move {
        let hello = ToKeeper::Hello { version: PROTOCOL_VERSION, pid: 1 };
        let connection = ToKeeper::Connection(Passing { listener: "mcp".to_owned(), read: Bytes::new() });
        for nonsense in [
            vec![hello.clone(), hello.clone()],
            vec![ToKeeper::Ready],
            // Nobody has ordered it to hand over.
            vec![hello.clone(), ToKeeper::HandedOver],
            vec![hello.clone(), connection],
        ] {
            let worker = Mouth::open(&keeper);
            for message in nonsense {
                worker.say(message).await;
            }
            let ended = timeout(BOUND, worker.serving).await.unwrap().unwrap();
            let order = ProtocolError::Order;
            let refused = [order, ProtocolError::Field("descriptor")];
            assert!(matches!(ended, Err(LinkError::Protocol(error)) if refused.contains(&error)));
        }
        let worker = Mouth::open(&keeper);
        worker.socket.try_send(&[IoSlice::new(&[255; 64])]).unwrap();
        let ended = timeout(BOUND, worker.serving).await.unwrap().unwrap();
        assert!(matches!(ended, Err(LinkError::Protocol(ProtocolError::Length(_)))));
    });
}

#[test]
fn a_worker_that_answers_is_asked_for_ever_and_one_that_does_not_is_given_up() {
    with_keeper(|keeper| async move {
        let mut worker = Mouth::open(&keeper);
        assert_eq!(worker.attach().await, []);
        let link = Rc::clone(&worker.link);
        for _ in 0..3 * PINGS_UNANSWERED_MAX {
            assert!(link.ping());
            assert_eq!(worker.hear().await, ToWorker::Ping);
            worker.say(ToKeeper::Pong).await;
            worker.settled().await;
        }
        for _ in 0..PINGS_UNANSWERED_MAX {
            assert!(link.ping());
        }
        assert!(!link.ping());
        worker.say(ToKeeper::Pong).await;
        worker.settled().await;
        assert!(link.ping());
        worker.close().await.unwrap();
    });
}

#[test]
fn c8_what_a_leaving_worker_says_of_children_concerns_nobody() {
    with_keeper(|keeper| async move {
        let mut worker = Mouth::open(&keeper);
        assert_eq!(worker.attach().await, []);
        worker.say(ToKeeper::Spawn { request: 1, spawn: cat("leaving-says") }).await;
        let ToWorker::Spawned { child, .. } = worker.hear().await else { panic!("not spawned") };
        let link = Rc::clone(&worker.link);
        link.order_handover();
        assert_eq!(worker.hear().await, ToWorker::HandOver);
        worker.say(ToKeeper::Write { child, tag: None, frame: Bytes::from_static(b"in time") }).await;
        worker.say(ToKeeper::HandedOver).await;
        worker.say(ToKeeper::Write { child, tag: None, frame: Bytes::from_static(b"too late") }).await;
        worker.say(ToKeeper::Forget { child }).await;
        timeout(BOUND, link.handed_over_said.notified()).await.unwrap();
        // It can still be told to finish.
        link.drain(false);
        let mut heard = worker.hear().await;
        while heard != (ToWorker::Drain { retire: false }) {
            assert!(matches!(heard, ToWorker::Written { .. } | ToWorker::Frame { .. }), "{heard:?}");
            heard = worker.hear().await;
        }
        let mut next = Mouth::open(&keeper);
        let held = next.attach().await;
        assert_eq!((held.len(), held[0].frames_accepted), (1, 1));
        assert_eq!(next.hear().await, ToWorker::Frame { child, number: 1, bytes: Bytes::from_static(b"in time") });
        // The one before ends; the next one stays in charge.
        worker.close().await.unwrap();
        next.say(ToKeeper::Write { child, tag: None, frame: Bytes::from_static(b"next") }).await;
        let mut heard = next.hear().await;
        if matches!(heard, ToWorker::Written { .. }) {
            heard = next.hear().await;
        }
        assert_eq!(heard, ToWorker::Frame { child, number: 2, bytes: Bytes::from_static(b"next") });
        next.say(ToKeeper::Forget { child }).await;
        timeout(BOUND, keeper.child_is_gone.notified()).await.unwrap();
        next.close().await.unwrap();
    });
}
