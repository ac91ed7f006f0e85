//! What the keeper holds, shared by its tasks. They all run on one thread: whatever doesn't await is undivided.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::rc::{Rc, Weak};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::child::{Child, start};
use crate::identity::ProcessIdentity;
use crate::link::Link;
use crate::passed::Passed;
use crate::protocol::{ProtocolError, ToKeeper, ToWorker};
use crate::record::records_dir;
use crate::stderr::{Log, file_name, logs_dir};
use crate::tree::Census;
use crate::types::{ChildId, Handover, Spawn};

/// Everything that outlives workers.
pub(crate) struct Keeper {
    pub(crate) identity: ProcessIdentity,
    pub(crate) listeners: Vec<(String, TcpListener)>,
    /// What the next worker is given.
    settings: RefCell<Bytes>,
    /// The version of this program.
    version: RefCell<String>,
    /// How the last handover went.
    handover: RefCell<Option<Handover>>,
    /// Connections on their way to the next worker.
    passed: RefCell<Passed>,
    /// A worker's wish for a successor.
    succession: RefCell<Option<Asked>>,
    /// A worker has such a wish.
    pub(crate) succession_asked: Notify,
    records_dir: PathBuf,
    logs_dir: PathBuf,
    children: RefCell<BTreeMap<ChildId, Rc<Child>>>,
    last_child: Cell<u64>,
    /// Processes that this keeper started and reaps one by one.
    own_pids: RefCell<BTreeSet<u32>>,
    /// The latest markers whose trees are gone: nothing that bears one has any business any more.
    ended_markers: RefCell<VecDeque<String>>,
    /// The worker in charge.
    link: RefCell<Option<Rc<Link>>>,
    logs: RefCell<BTreeMap<String, Weak<RefCell<Log>>>>,
    census: RefCell<Option<(Instant, Rc<Census>)>>,
    scratch: RefCell<Box<[u8]>>,
    shutdown: Cell<Option<bool>>,
    /// A worker asked for the end of the gateway.
    pub(crate) shutdown_asked: Notify,
    /// A child's processes are gone.
    pub(crate) child_is_gone: Notify,
}

/// What a keeper remembers that is no child.
pub(crate) struct Carried {
    pub(crate) last_child: u64,
    /// Oldest first.
    pub(crate) ended_markers: Vec<String>,
    pub(crate) shutdown: Option<bool>,
}

impl Keeper {
    pub(crate) fn new(
        identity: ProcessIdentity,
        listeners: Vec<(String, TcpListener)>,
        settings: Vec<u8>,
        state_dir: &Path,
    ) -> Self {
        Self {
            identity,
            listeners,
            settings: RefCell::new(settings.into()),
            version: RefCell::default(),
            handover: RefCell::default(),
            passed: RefCell::default(),
            succession: RefCell::default(),
            succession_asked: Notify::new(),
            records_dir: records_dir(state_dir),
            logs_dir: logs_dir(state_dir),
            children: RefCell::default(),
            last_child: Cell::new(0),
            own_pids: RefCell::default(),
            ended_markers: RefCell::default(),
            link: RefCell::default(),
            logs: RefCell::default(),
            census: RefCell::default(),
            scratch: RefCell::new(vec![0; SCRATCH_BYTES].into()),
            shutdown: Cell::new(None),
            shutdown_asked: Notify::new(),
            child_is_gone: Notify::new(),
        }
    }

    /// What the next worker is given.
    pub(crate) fn settings(&self) -> Bytes {
        self.settings.borrow().clone()
    }

    /// Changes what the next worker is given; returns what it was.
    pub(crate) fn replace_settings(&self, settings: Bytes) -> Bytes {
        self.settings.replace(settings)
    }

    pub(crate) fn version(&self) -> String {
        self.version.borrow().clone()
    }

    pub(crate) fn set_version(&self, version: String) {
        *self.version.borrow_mut() = version;
    }

    /// How the last handover went, or goes if its successor gets ready.
    pub(crate) fn handover(&self) -> Option<Handover> {
        self.handover.borrow().clone()
    }

    pub(crate) fn set_handover(&self, handover: Option<Handover>) {
        *self.handover.borrow_mut() = handover;
    }

    /// The connections on their way to the next worker.
    pub(crate) fn passed(&self) -> std::cell::RefMut<'_, Passed> {
        self.passed.borrow_mut()
    }

    /// A worker's wish for a successor that nobody has taken up yet.
    pub(crate) fn take_succession(&self) -> Option<Asked> {
        self.succession.borrow_mut().take()
    }

    pub(crate) fn records_dir(&self) -> &Path {
        &self.records_dir
    }

    /// Lends the buffer that all pipes are read with.
    pub(crate) fn with_scratch<T>(&self, using: impl FnOnce(&mut [u8]) -> T) -> T {
        using(&mut self.scratch.borrow_mut())
    }

    /// The log of all children of this name.
    pub(crate) fn log_of(&self, name: &str) -> Rc<RefCell<Log>> {
        let mut logs = self.logs.borrow_mut();
        logs.retain(|_, log| log.strong_count() > 0);
        let name = file_name(name);
        if let Some(log) = logs.get(&name).and_then(Weak::upgrade) {
            return log;
        }
        let log = Rc::new(RefCell::new(Log::open(&self.logs_dir, &name)));
        logs.insert(name, Rc::downgrade(&log));
        log
    }

    // Processes.

    /// The process is reaped by whoever started it.
    pub(crate) fn own(&self, pid: u32) {
        self.own_pids.borrow_mut().insert(pid);
    }

    /// The process is reaped.
    pub(crate) fn disown(&self, pid: u32) {
        self.own_pids.borrow_mut().remove(&pid);
    }

    pub(crate) fn is_own(&self, pid: u32) -> bool {
        self.own_pids.borrow().contains(&pid)
    }

    /// Whether the tree that bore this marker is gone for good.
    pub(crate) fn has_ended(&self, marker: &[u8]) -> bool {
        self.ended_markers.borrow().iter().any(|ended| ended.as_bytes() == marker)
    }

    /// The descendants of the keeper, as they are at some moment after the call. Callers that come together share one.
    pub(crate) async fn census(&self) -> Rc<Census> {
        let asked_at = Instant::now();
        loop {
            let latest = self.census.borrow().clone();
            let now = Instant::now();
            match latest {
                Some((taken_at, census)) if taken_at >= asked_at => return census,
                Some((taken_at, _)) if now < taken_at + CENSUS_INTERVAL => {
                    tokio::time::sleep_until(taken_at + CENSUS_INTERVAL).await;
                }
                _ => {
                    let census = Rc::new(Census::of_descendants().unwrap_or_else(|error| {
                        tracing::error!(%error, "the keeper can't look at its processes");
                        Census::empty()
                    }));
                    *self.census.borrow_mut() = Some((now, Rc::clone(&census)));
                    return census;
                }
            }
        }
    }

    // Children.

    pub(crate) fn children(&self) -> Vec<Rc<Child>> {
        self.children.borrow().values().cloned().collect()
    }

    pub(crate) fn children_len(&self) -> usize {
        self.children.borrow().len()
    }

    pub(crate) fn child(&self, id: ChildId) -> Option<Rc<Child>> {
        self.children.borrow().get(&id).cloned()
    }

    pub(crate) fn next_child_id(&self) -> ChildId {
        self.last_child.set(self.last_child.get() + 1);
        ChildId::new(self.last_child.get())
    }

    pub(crate) fn add_child(&self, child: &Rc<Child>) {
        self.children.borrow_mut().insert(child.id, Rc::clone(child));
    }

    /// Nothing of the child lives any more.
    pub(crate) fn child_gone(&self, child: &Child) {
        let mut ended = self.ended_markers.borrow_mut();
        if ended.len() == ENDED_MARKERS_MAX {
            ended.pop_front();
        }
        ended.push_back(child.marker.clone());
        self.child_is_gone.notify_one();
    }

    /// The child is gone and everything it wrote is in custody.
    pub(crate) fn child_ended(&self, child: &Child) {
        if child.is_forgotten() {
            self.children.borrow_mut().remove(&child.id);
        } else {
            self.offer(child);
        }
    }

    // What is taken along when another program goes on in this one's place, beside children.

    pub(crate) fn carried(&self) -> Carried {
        let ended_markers = self.ended_markers.borrow().iter().cloned().collect();
        Carried { last_child: self.last_child.get(), ended_markers, shutdown: self.shutdown.get() }
    }

    /// Goes on where another was.
    pub(crate) fn go_on_from(&self, carried: Carried) {
        self.last_child.set(carried.last_child);
        *self.ended_markers.borrow_mut() = carried.ended_markers.into();
        self.shutdown.set(carried.shutdown);
        if carried.shutdown.is_some() {
            self.shutdown_asked.notify_one();
        }
    }

    // The worker in charge.

    /// `link` is the worker that children belong to from now on.
    pub(crate) fn put_in_charge(&self, link: Rc<Link>) {
        *self.link.borrow_mut() = Some(link);
    }

    /// The worker behind `link` is not in charge any more, if it was.
    pub(crate) fn dismiss(&self, link: &Rc<Link>) {
        let mut in_charge = self.link.borrow_mut();
        if in_charge.as_ref().is_some_and(|known| Rc::ptr_eq(known, link)) {
            *in_charge = None;
        }
    }

    /// There is something to tell of the child.
    pub(crate) fn offer(&self, child: &Child) {
        if let Some(link) = &*self.link.borrow() {
            link.offer(child.id);
        }
    }

    /// The child's stdin got on.
    pub(crate) fn offer_written(&self, child: &Child) {
        if let Some(link) = &*self.link.borrow() {
            link.offer_written(child);
        }
    }

    /// What a worker that asked for the gateway's end wants; once.
    pub(crate) fn take_shutdown(&self) -> Option<bool> {
        self.shutdown.take()
    }

    /// Does what a worker says.
    pub(crate) fn handle(self: &Rc<Self>, link: &Rc<Link>, message: ToKeeper) -> Result<(), ProtocolError> {
        match message {
            // Children are its successor's, and it has said its last word.
            _ if link.is_leaving() => {}
            ToKeeper::Hello { .. } => return Err(ProtocolError::Order),
            ToKeeper::Ready => link.set_ready(),
            ToKeeper::Waiting => link.waiting_said.notify_one(),
            ToKeeper::Pong => link.set_answered(),
            ToKeeper::Spawn { request, spawn } => link.reply(self.spawn(request, &spawn))?,
            ToKeeper::Write { child, tag, frame } => {
                if let Some(child) = self.child(child) {
                    child.accept_frame(tag, frame)?;
                }
            }
            ToKeeper::Acknowledge { child, from, through } => {
                if let Some(child) = self.child(child) {
                    child.acknowledge(from..=through);
                }
            }
            ToKeeper::Settle { child, tags } => {
                if let Some(child) = self.child(child) {
                    child.settle(&tags);
                }
            }
            ToKeeper::Stop { child, grace } => {
                if let Some(child) = self.child(child) {
                    child.order_end(grace);
                }
            }
            ToKeeper::Forget { child } => {
                tracing::debug!(child = child.get(), "the worker forgets a child");
                if self.child(child).is_some_and(|child| child.forget()) {
                    self.children.borrow_mut().remove(&child);
                }
            }
            ToKeeper::StderrTail { request, child } => {
                let bytes = self.child(child).map(|child| child.stderr_tail()).unwrap_or_default();
                link.reply(ToWorker::StderrTail { request, bytes })?;
            }
            ToKeeper::Shutdown { retire } => {
                self.shutdown.set(Some(retire));
                self.shutdown_asked.notify_one();
            }
            ToKeeper::Succeed { request, upgrade, rehearse_only } => {
                let asked = Asked { link: Rc::clone(link), request, upgrade, rehearse_only };
                match &mut *self.succession.borrow_mut() {
                    Some(_) => asked.refuse(UNDER_WAY),
                    slot => *slot = Some(asked),
                }
                self.succession_asked.notify_one();
            }
            // Its descriptor is taken where it arrives.
            ToKeeper::Connection(_) => return Err(ProtocolError::Order),
            ToKeeper::HandedOver => {
                if !link.is_handing_over() {
                    return Err(ProtocolError::Order);
                }
                self.dismiss(link);
                link.leave();
            }
        }
        Ok(())
    }

    fn spawn(self: &Rc<Self>, request: u64, spawn: &Spawn) -> ToWorker {
        match start::start(self, spawn) {
            Ok(child) => ToWorker::Spawned { request, child: child.id, identity: child.identity },
            Err((failure, detail)) => {
                tracing::warn!(name = spawn.name, %failure, detail, "a child could not be started");
                ToWorker::SpawnFailed { request, failure, detail }
            }
        }
    }
}

/// A worker asks for a successor.
pub(crate) struct Asked {
    link: Rc<Link>,
    request: u64,
    /// Of another program, rather than with other settings alone.
    pub(crate) upgrade: bool,
    /// Whether it is only to be said what would come of it.
    pub(crate) rehearse_only: bool,
}

impl Asked {
    /// Nothing has changed, and why.
    pub(crate) fn refuse(&self, reason: &str) {
        let reason = reason.to_owned();
        self.answer(ToWorker::NotSucceeding { request: self.request, reason });
    }

    /// Nothing stands against it, and with these settings the next worker would serve.
    pub(crate) fn grant(&self, settings: Bytes) {
        self.answer(ToWorker::Succeeding { request: self.request, settings });
    }

    fn answer(&self, reply: ToWorker) {
        if let Err(error) = self.link.reply(reply) {
            tracing::warn!(%error, "a worker that asked for a successor does not listen");
        }
    }
}

/// Why a second handover is refused while there is one.
pub(crate) const UNDER_WAY: &str = "another handover is under way";

/// The size of the buffer that all pipes are read with, in bytes: what a pipe holds.
const SCRATCH_BYTES: usize = 64 * 1024;

/// The least time between two looks at all processes.
const CENSUS_INTERVAL: Duration = Duration::from_millis(20);

/// How many markers of ended children are remembered.
const ENDED_MARKERS_MAX: usize = 1024;
