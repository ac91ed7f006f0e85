//! What is done to the gateway while its clients call.

use super::Plan;
use super::load::Load;
use super::random::Random;
use super::stand::Stand;
use crate::procs::{Proc, children};
use crate::wait::wait_until;
use anyhow::{Context as _, Result};
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// One kind of disturbance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Event {
    /// SIGKILL of the worker.
    Kill,
    /// Another SIGKILL shortly after one.
    KillAgain,
    /// A changed configuration.
    Reload,
    /// Another program.
    Upgrade,
}

/// When something was done.
#[derive(Debug, Clone, Copy)]
pub struct Mark {
    /// What.
    pub event: Event,
    /// When it began.
    pub from: Instant,
    /// When it was over: the next worker was ready, and the worker that gave way had left.
    pub until: Instant,
}

/// All disturbances of a plan, one after the other.
pub(super) struct Course<'a> {
    plan: &'a Plan,
    stand: &'a mut Stand,
    random: Random,
    marks: Vec<Mark>,
    /// The latest starts of workers, oldest first.
    starts: VecDeque<Instant>,
}

impl<'a> Course<'a> {
    pub(super) fn new(plan: &'a Plan, stand: &'a mut Stand) -> Course<'a> {
        let random = Random::new(plan.seed);
        Course { plan, stand, random, marks: Vec::new(), starts: VecDeque::from([Instant::now()]) }
    }

    /// Does them all, and sees calls go on after the last.
    pub(super) async fn run(mut self, load: &Load) -> Result<Vec<Mark>> {
        for kill in 1..=self.plan.kills {
            let deaths = 1 + usize::from(kill % BURST_EVERY == BURST_EVERY / 2);
            self.go_on(load, deaths).await?;
            self.kill(deaths).await?;
            for (event, every) in [(Event::Reload, self.plan.reload_every), (Event::Upgrade, self.plan.upgrade_every)] {
                if kill.is_multiple_of(every) {
                    self.go_on(load, 1).await?;
                    self.hand_over(event).await.with_context(|| format!("{event:?} after kill {kill}"))?;
                }
            }
            self.stand.gateway.look_around();
        }
        self.go_on(load, 1).await?;
        Ok(self.marks)
    }

    /// Waits for a random while, and until calls are answered again and so many workers may die without a back-off.
    async fn go_on(&mut self, load: &Load, deaths: usize) -> Result<()> {
        let answered = load.answered() + self.stand.clients.len() as u64;
        let apart = |duration: Duration| u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
        let (shortest, longest) = (apart(self.plan.apart.0), apart(self.plan.apart.1));
        tokio::time::sleep(self.random.millis(shortest..longest)).await;
        wait_until("calls to be answered", GO_ON_BOUND, async || load.answered() >= answered).await?;
        if self.plan.spare_back_off && self.starts.len() == BACK_OFF_STARTS {
            let spared = self.starts[deaths - 1] + BACK_OFF_WINDOW;
            tokio::time::sleep(spared.saturating_duration_since(Instant::now())).await;
        }
        Ok(())
    }

    async fn kill(&mut self, deaths: usize) -> Result<()> {
        let from = Instant::now();
        let mut killed = self.kill_worker().await?;
        let mut again = None;
        if deaths > 1 {
            tokio::time::sleep(self.random.millis(BURST_MS)).await;
            let from = Instant::now();
            killed = self.kill_worker().await?;
            again = Some(from);
        }
        self.ready(killed).await?;
        let until = Instant::now();
        let parts = std::iter::once((Event::Kill, from)).chain(again.map(|from| (Event::KillAgain, from)));
        self.marks.extend(parts.map(|(event, from)| Mark { event, from, until }));
        Ok(())
    }

    /// Kills the worker that was started last, whether it is ready or not.
    async fn kill_worker(&mut self) -> Result<Proc> {
        let keeper = self.stand.gateway.keeper_pid()?;
        let mut killed = None;
        wait_until("a worker to kill", GO_ON_BOUND, async || {
            killed = workers(keeper).into_iter().max_by_key(|worker| (worker.start, worker.pid)).filter(|w| w.kill());
            killed.is_some()
        })
        .await?;
        self.started();
        killed.context("a worker")
    }

    async fn ready(&mut self, former: Proc) -> Result<()> {
        let gateway = &self.stand.gateway;
        let another = async || gateway.worker().await.is_ok_and(|worker| worker.pid != former.pid);
        wait_until("another worker", GO_ON_BOUND, another).await
    }

    async fn hand_over(&mut self, event: Event) -> Result<()> {
        let keeper = self.stand.gateway.keeper_pid()?;
        let from = Instant::now();
        match event {
            Event::Upgrade => self.stand.upgrade().await?,
            Event::Kill | Event::KillAgain | Event::Reload => self.stand.reload().await?,
        }
        self.started();
        wait_until("the former worker to leave", GO_ON_BOUND, async || workers(keeper).len() == 1).await?;
        self.marks.push(Mark { event, from, until: Instant::now() });
        Ok(())
    }

    fn started(&mut self) {
        if self.starts.len() == BACK_OFF_STARTS {
            self.starts.pop_front();
        }
        self.starts.push_back(Instant::now());
    }
}

/// The workers of a keeper, those that are giving way included.
pub(super) fn workers(keeper: u32) -> Vec<Proc> {
    let is_worker = |process: &Proc| process.arguments().get(1).is_some_and(|argument| argument == "worker");
    children(keeper).into_iter().filter(|process| process.is_alive() && is_worker(process)).collect()
}

/// There is a second kill after the fourth and after every so many more.
const BURST_EVERY: usize = 8;
const BURST_MS: std::ops::Range<u64> = 5..600;
/// So many starts in [`BACK_OFF_WINDOW`] make the keeper wait before the next.
const BACK_OFF_STARTS: usize = 5;
/// A little longer than the keeper's own.
const BACK_OFF_WINDOW: Duration = Duration::from_secs(31);
const GO_ON_BOUND: Duration = Duration::from_secs(60);
