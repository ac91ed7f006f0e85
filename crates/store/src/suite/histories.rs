//! S1 as a property: the machine and the ledger together, through random histories of acts, refused commits and ends of
//! the process. On memory, where thousands of them take a moment; `life` does the same on the real ledger step by step.

use mainstay_core::session::{Activity, Asked, Decision, Input, Opening, Restoration, Session, Terms};
use proptest::prelude::*;

use super::*;
use crate::mishap::{self, Mishap};
use crate::{CommitError, Stored};

const TERMS: Terms = Terms {
    idle_expiry: Duration::from_secs(100),
    confirm_within: Duration::from_secs(60),
    touch_interval: Duration::from_secs(5),
    tombstone_retention: Duration::from_secs(200),
};

/// What befalls a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Trouble {
    None,
    /// The ledger can't be written.
    Refused,
    DeathBefore,
    DeathAfter,
}

const TROUBLES: [Trouble; 4] = [Trouble::None, Trouble::Refused, Trouble::DeathBefore, Trouble::DeathAfter];
const WORDS: [&str; 8] = ["touch", "delete", "expire", "drain", "drained", "close", "suspend", "purge"];

fn input(word: &str) -> Option<Input> {
    match word {
        "touch" => Some(Input::Touch),
        "delete" => Some(Input::Delete),
        "expire" => Some(Input::Expire { activity: Activity::default() }),
        "drain" => Some(Input::Drain { grace: Duration::from_secs(5) }),
        "drained" => Some(Input::Drained),
        "close" => Some(Input::Close { reason: "because".into() }),
        _ => None,
    }
}

/// One session with its ledger, and what memory has of it.
struct World {
    store: Store,
    epoch: Epoch,
    now: u64,
    memory: Option<Session>,
    /// The first ending that was ever seen.
    stone: Option<Tombstone>,
}

impl World {
    async fn new() -> Self {
        let store = Store::open(Place::Memory, ring()).unwrap();
        let epoch = store.begin_epoch(at(0), 0).await.unwrap();
        let model = record(1);
        let opening = Opening {
            key: model.key,
            server: model.server,
            principal: model.principal,
            client: model.client,
            agent: model.agent,
            initialize_params: model.initialize_params,
            contract: model.contract,
            epoch,
        };
        let mut session = Session::open(opening, model.version, at(0), &TERMS);
        let decision = session.decide(at(0), &Input::Answered { version: model.version }, &TERMS).unwrap();
        let mut writes: Vec<_> = decision.changes.iter().cloned().map(Write::Session).collect();
        writes.push(Write::Resume(resume(1)));
        store.commit(writes).await.unwrap();
        decision.changes.iter().for_each(|change| session.apply(change));
        Self { store, epoch, now: 0, memory: Some(session), stone: None }
    }

    async fn step(&mut self, word: &str, trouble: Trouble) {
        self.wake(trouble).await;
        if let Some(input) = input(word) {
            let decided = self.memory.as_ref().map(|session| session.decide(at(self.now), &input, &TERMS));
            if let Some(Ok(decision)) = decided {
                self.perform(&decision, trouble).await;
            }
        } else if word == "purge" {
            self.commit(vec![Write::Purge { now: at(self.now) }], trouble).await;
        } else {
            // The instance is let go, and the record says where to go on.
            let record = ResumeRecord { saved_at: at(self.now), ..resume(1) };
            if self.memory.take().is_some() {
                self.commit(vec![Write::Resume(record)], trouble).await;
            }
        }
        self.hold().await;
    }

    /// Takes the session up again, as any request would.
    async fn wake(&mut self, trouble: Trouble) {
        if self.memory.is_some() {
            return;
        }
        let Stored::Live(record) = self.store.find(key(1)).await.unwrap() else { return };
        let contract = record.contract;
        let asked = Asked { now: at(self.now), contract: &contract, epoch: self.epoch, terms: &TERMS };
        match Session::restore(*record, &asked) {
            Restoration::Resumed(session) => self.memory = Some(session),
            Restoration::Refused(_, decision) | Restoration::Overdue(decision) | Restoration::Unfinished(decision) => {
                self.perform(&decision, trouble).await;
            }
        }
    }

    /// Persist, apply, perform; the ending with all that belongs to it in one commit.
    async fn perform(&mut self, decision: &Decision, trouble: Trouble) {
        let mut writes: Vec<_> = decision.changes.iter().cloned().map(Write::Session).collect();
        if decision.changes.iter().any(|change| matches!(change, Change::End(_))) {
            writes.extend([Write::Owe(owed()), Write::ForgetResume(key(1))]);
        }
        if !self.commit(writes, trouble).await {
            return;
        }
        if let Some(session) = &mut self.memory {
            decision.changes.iter().for_each(|change| session.apply(change));
            if session.record().state.is_ended() {
                self.memory = None;
            }
        }
    }

    /// Whether it was acknowledged to somebody who lived to hear it.
    async fn commit(&mut self, writes: Vec<Write>, trouble: Trouble) -> bool {
        match trouble {
            Trouble::None => {}
            Trouble::Refused => mishap::arm(Some((0, Mishap::Full))),
            Trouble::DeathBefore => {
                self.next_life().await;
                return false;
            }
            Trouble::DeathAfter => {
                self.store.commit(writes).await.unwrap();
                self.next_life().await;
                return false;
            }
        }
        let empty = writes.is_empty();
        let outcome = self.store.commit(writes).await;
        mishap::disarm();
        assert!(outcome.is_ok() == (empty || trouble == Trouble::None), "{outcome:?}");
        outcome.is_ok()
    }

    async fn next_life(&mut self) {
        self.memory = None;
        self.store = self.store.reopen().unwrap();
        self.epoch = self.store.begin_epoch(at(self.now), 0).await.unwrap();
    }

    /// What holds at every moment.
    async fn hold(&mut self) {
        let stored = self.store.find(key(1)).await.unwrap();
        let owed = self.store.owed_all(10).await.unwrap().len();
        if let (None, Stored::Ended(stone)) = (&self.stone, &stored) {
            self.stone = Some(stone.clone());
        }
        let served =
            self.memory.as_ref().is_some_and(|session| session.admit(at(self.now), &record(1).principal).is_ok());
        let rows = self.store.count().await.unwrap();
        assert_eq!(rows, u64::from(self.stone.is_none()), "a session is live or ended, never both");
        let Some(first) = &self.stone else {
            assert!(matches!(&stored, Stored::Live(_)), "what was answered is on record: {stored:?}");
            assert_eq!(owed, 0, "nothing is owed for a session that lives");
            assert!(self.store.resume_record(key(1)).await.unwrap().is_some());
            return;
        };
        assert!(!served, "S1: an ended id is never served");
        assert_eq!(owed, 1, "U7: its upstream is owed one DELETE");
        assert_eq!(self.store.resume_record(key(1)).await.unwrap(), None);
        if stored == Stored::Absent {
            assert!(at(self.now) >= first.keep_until, "S7: only after its time");
            return;
        }
        assert_eq!(stored, Stored::Ended(first.clone()), "S6: the first ending stands");
        let again = self.store.commit(vec![insert(1)]).await;
        assert!(matches!(again, Err(CommitError::Conflict { .. })), "S7: {again:?}");
    }
}

proptest! {
    #[test]
    fn s1_no_history_of_acts_failures_and_crashes_makes_an_ended_id_live_again(
        history in prop::collection::vec((0..WORDS.len(), 0..TROUBLES.len(), 0_u64..60, any::<bool>()), 1..40),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let mut world = World::new().await;
            for (word, trouble, pause, smooth) in history {
                // Trouble is rarer than not, so that histories get somewhere.
                let trouble = if smooth { Trouble::None } else { TROUBLES[trouble] };
                world.step(WORDS[word], trouble).await;
                world.now += pause;
            }
        });
    }
}
