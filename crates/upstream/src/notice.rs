//! What a link says unasked.

use std::time::Duration;

use bytes::Bytes;
use mainstay_core::id::SessionKey;
use mainstay_core::resume::{OwedDelete, ResumeRecord};
use mainstay_keeper::ChildId;
use tokio::sync::{mpsc, oneshot};

use crate::child::Receipt;
use crate::handshake::Opened;

/// Something that a session must hear although it asked nothing.
#[derive(Debug)]
pub enum Notice {
    /// A message of the server that belongs to no call: for the session's listening stream.
    Message {
        /// The message.
        message: Bytes,
        /// The frame that it came in, if a child wrote it: the keeper gives that again to the next worker, unless this one
        /// lives a second or two longer.
        frame: Option<Frame>,
    },
    /// The same of a child, and the client is to answer it.
    Question {
        /// The question.
        message: Bytes,
        /// To be dropped once it is dealt with.
        receipt: Receipt,
    },
    /// What a later worker needs has changed. A hint; only the newest one counts.
    Record(Box<ResumeRecord>),
    /// A DELETE that is owed from now on.
    Owed(OwedDelete),
    /// The server's session or process was made again, and its state is lost (U6).
    Remade {
        /// Why.
        reason: Box<str>,
        /// Whether its lists are still what the client was told.
        lists: ListsChanged,
        /// To be dropped once that is noted: no answer of the new session or process comes before.
        noted: oneshot::Sender<()>,
    },
    /// The link is open for the first time. Of interest to a session whose `initialize` was answered for the server (U8).
    Opened(Opened),
}

/// A line that a child wrote.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame {
    /// The child, over all workers of a keeper.
    pub child: ChildId,
    /// The line's number, over all workers.
    pub number: u64,
}

impl Notice {
    /// A message that came in no frame.
    pub(crate) fn message(message: Bytes) -> Self {
        Self::Message { message, frame: None }
    }
}

/// How a server's tools compare with those that the client was told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ListsChanged {
    /// They are the same.
    Same,
    /// They differ.
    Changed,
    /// Nobody asked before, or the server did not answer in time.
    Unknown,
}

/// The sending side of a link's notices; one channel serves all sessions of a worker, and each notice names its own.
/// The receiver's absence is no fault: the worker may be on its way out.
#[derive(Debug)]
pub(crate) struct Notices {
    key: SessionKey,
    sender: mpsc::Sender<(SessionKey, Notice)>,
}

impl Notices {
    pub(crate) fn new(key: SessionKey, sender: mpsc::Sender<(SessionKey, Notice)>) -> Self {
        Self { key, sender }
    }

    /// The session that all of them are of.
    pub(crate) fn key(&self) -> SessionKey {
        self.key
    }

    /// Hands over what must arrive. Waits for room up to a bound, so that a receiver which waits for this very link
    /// can't hang with it. False if it did not get there.
    pub(crate) async fn tell(&self, notice: Notice) -> bool {
        match self.sender.try_send((self.key, notice)) {
            Ok(()) => true,
            Err(mpsc::error::TrySendError::Closed(_)) => false,
            Err(mpsc::error::TrySendError::Full(notice)) => {
                self.sender.send_timeout(notice, NOTICE_WAIT_MAX).await.is_ok()
            }
        }
    }

    /// Hands over that the server's session or process was made again, and waits up to a bound until that is noted: the
    /// first answer that comes after it says so (U6).
    pub(crate) async fn tell_remade(&self, reason: Box<str>, lists: ListsChanged) {
        let (noted, is_noted) = oneshot::channel();
        if self.tell(Notice::Remade { reason, lists, noted }).await {
            let _ = tokio::time::timeout(NOTICE_WAIT_MAX, is_noted).await;
        }
    }

    /// Hands over what may be lost. False if there was no room.
    pub(crate) fn offer(&self, notice: Notice) -> bool {
        self.sender.try_send((self.key, notice)).is_ok()
    }
}

/// How long a notice may wait for room, and then until it is noted.
const NOTICE_WAIT_MAX: Duration = Duration::from_secs(2);
