//! Workers that have handed over: they finish what they are at, within a bound, while their successor serves.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::task::spawn_local;
use tokio::time::{Instant, sleep_until};

use crate::identity::ProcessIdentity;
use crate::keeper::Keeper;
use crate::link::Link;
use crate::worker::Worker;

/// All workers that are leaving, a task each.
pub(crate) struct Leaving {
    keeper: Rc<Keeper>,
    leavers: RefCell<Vec<Rc<Leaver>>>,
    /// One of them is gone.
    pub(crate) one_is_gone: Notify,
}

/// One of them.
pub(crate) struct Leaver {
    pub(crate) identity: ProcessIdentity,
    pub(crate) link: Rc<Link>,
    kill_at: Cell<Instant>,
    hurried: Notify,
}

impl Leaver {
    /// How long it may still take.
    pub(crate) fn kill_in(&self) -> Duration {
        self.kill_at.get().saturating_duration_since(Instant::now())
    }

    fn kill_at_latest(&self, at: Instant) {
        self.kill_at.set(self.kill_at.get().min(at));
        self.hurried.notify_one();
    }
}

impl Leaving {
    pub(crate) fn new(keeper: Rc<Keeper>) -> Rc<Self> {
        Rc::new(Self { keeper, leavers: RefCell::default(), one_is_gone: Notify::new() })
    }

    /// Sees the worker off: it is killed unless it exits within `bound`. Of too many the one that left first is killed.
    pub(crate) fn add(self: &Rc<Self>, worker: Worker, bound: Duration) {
        let mut leavers = self.leavers.borrow_mut();
        if leavers.len() >= LEAVING_MAX
            && let Some(first) = leavers.first()
        {
            tracing::warn!(worker = first.link.worker_number, "too many workers are leaving; the first is killed");
            first.kill_at_latest(Instant::now());
        }
        let leaver = Rc::new(Leaver {
            identity: worker.identity(),
            link: Rc::clone(&worker.link),
            kill_at: Cell::new(Instant::now() + bound),
            hurried: Notify::new(),
        });
        leavers.push(Rc::clone(&leaver));
        spawn_local(Rc::clone(self).see_off(worker, leaver));
    }

    async fn see_off(self: Rc<Self>, worker: Worker, leaver: Rc<Leaver>) {
        let (pidfd, mut was_killed) = (worker.pidfd(), false);
        loop {
            tokio::select! {
                biased;
                () = pidfd.ended() => break,
                () = leaver.hurried.notified() => {}
                () = sleep_until(leaver.kill_at.get()), if !was_killed => {
                    tracing::warn!(worker = worker.number(), "killing a worker that takes too long to leave");
                    worker.kill();
                    was_killed = true;
                }
            }
        }
        worker.bury(&self.keeper).await;
        self.leavers.borrow_mut().retain(|other| !Rc::ptr_eq(other, &leaver));
        self.one_is_gone.notify_one();
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.leavers.borrow().is_empty()
    }

    pub(crate) fn leavers(&self) -> Vec<Rc<Leaver>> {
        self.leavers.borrow().clone()
    }

    /// Has all of them finish, within a bound.
    pub(crate) fn drain(&self, retire: bool, bound: Duration) {
        for leaver in self.leavers() {
            leaver.link.drain(retire);
            leaver.kill_at_latest(Instant::now() + bound);
        }
    }

    /// Has all of them killed.
    pub(crate) fn kill(&self) {
        self.leavers().iter().for_each(|leaver| leaver.kill_at_latest(Instant::now()));
    }
}

/// How many workers may be leaving at a time.
const LEAVING_MAX: usize = 8;
