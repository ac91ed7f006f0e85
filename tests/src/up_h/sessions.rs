//! The sessions that UP-H knows, until it is told to forget them.

use super::events::EventLog;
use crate::server::{Conversation, Outlet, World};
use std::collections::{BTreeMap, HashMap};
use std::io::Read as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// One session with its streams.
#[derive(Debug)]
pub(super) struct Session {
    /// The id that its client holds; [`Session::STATELESS`] if none was issued.
    pub id: String,
    /// The session at work.
    pub conversation: Arc<Conversation>,
    /// The stream of what belongs to no request.
    pub listening: Arc<EventLog>,
    streams: Mutex<BTreeMap<u64, Arc<EventLog>>>,
    next_stream: AtomicU64,
}

impl Session {
    /// The key of the one session of a server that issues no ids.
    pub(super) const STATELESS: &str = "";

    fn new(world: &Arc<World>, id: String) -> Arc<Session> {
        let listening = EventLog::new(LISTENING_STREAM);
        let outlet = Outlet::Log(Arc::clone(&listening));
        let conversation = Conversation::new(world, id.clone(), outlet);
        let next_stream = AtomicU64::new(LISTENING_STREAM + 1);
        Arc::new(Session { id, conversation, listening, streams: Mutex::default(), next_stream })
    }

    /// A stream for the answer to one POST. Of more than [`STREAMS_MAX`] the oldest can no longer be resumed.
    pub(super) fn open_stream(&self) -> Arc<EventLog> {
        let number = self.next_stream.fetch_add(1, Ordering::SeqCst);
        let log = EventLog::new(number);
        let mut streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        streams.insert(number, Arc::clone(&log));
        if streams.len() > STREAMS_MAX {
            streams.pop_first();
        }
        log
    }

    /// The stream with this number, if it is still kept.
    pub(super) fn stream(&self, number: u64) -> Option<Arc<EventLog>> {
        if number == LISTENING_STREAM {
            return Some(Arc::clone(&self.listening));
        }
        self.streams.lock().unwrap_or_else(PoisonError::into_inner).get(&number).cloned()
    }
}

/// All sessions.
#[derive(Debug, Default)]
pub(super) struct Sessions {
    known: Mutex<HashMap<String, Arc<Session>>>,
}

impl Sessions {
    /// Opens a session under a new id, or under `id` if one is given.
    ///
    /// # Errors
    /// If the system gives no random bytes.
    pub(super) fn open(&self, world: &Arc<World>, id: Option<&str>) -> std::io::Result<Arc<Session>> {
        let id = match id {
            Some(id) => id.to_owned(),
            None => random_id()?,
        };
        let session = Session::new(world, id.clone());
        self.lock().insert(id, Arc::clone(&session));
        Ok(session)
    }

    /// The session with this id.
    pub(super) fn find(&self, id: &str) -> Option<Arc<Session>> {
        self.lock().get(id).cloned()
    }

    /// Ends one session, with its listening stream.
    pub(super) fn close(&self, id: &str) {
        let session = self.lock().remove(id);
        if let Some(session) = session {
            session.listening.end();
        }
    }

    /// Forgets all sessions, as a restarted process would. Open listening streams end.
    pub(super) fn forget(&self) -> usize {
        let forgotten: Vec<Arc<Session>> = self.lock().drain().map(|(_, session)| session).collect();
        for session in &forgotten {
            session.listening.end();
        }
        forgotten.len()
    }

    /// Forgets all sessions, and leaves their listening streams open: nothing comes on them any more.
    pub(super) fn forget_quietly(&self) -> usize {
        self.lock().drain().count()
    }

    /// All sessions, in no order.
    pub(super) fn all(&self) -> Vec<Arc<Session>> {
        self.lock().values().cloned().collect()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Arc<Session>>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn random_id() -> std::io::Result<String> {
    let mut bytes = [0_u8; ID_BYTES];
    std::fs::File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes.iter().fold("up-".to_owned(), |id, byte| format!("{id}{byte:02x}")))
}

const ID_BYTES: usize = 16;
const LISTENING_STREAM: u64 = 0;
const STREAMS_MAX: usize = 1000;
