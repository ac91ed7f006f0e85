//! The rules as tables, every crash point of every script, and properties over random histories.

use proptest::prelude::*;

use super::*;

const TERMS: Terms = Terms {
    idle_expiry: Duration::from_secs(100),
    confirm_within: Duration::from_secs(60),
    touch_interval: Duration::from_secs(5),
    tombstone_retention: Duration::from_secs(1000),
};
const CONTRACT: Contract = Contract::from_bytes([1; 32]);
const BUSY: Activity = Activity { calls: 1, streams: 0 };
const STREAMING: Activity = Activity { calls: 0, streams: 1 };
const GRACE: Duration = Duration::from_secs(5);

fn at(seconds: u64) -> Timestamp {
    Timestamp::from_unix_millis(1_000_000 + seconds * 1000)
}

fn seconds(at: Timestamp) -> u64 {
    (at.unix_millis() - 1_000_000) / 1000
}

fn owner() -> Principal {
    Principal::Token("alice".into())
}

fn opening() -> Opening {
    Opening {
        key: SessionKey::from_bytes([7; 32]),
        server: ServerName::parse("files").expect("a name"),
        principal: owner(),
        client: ClientName::new("client", "1.0"),
        agent: Some("scout".into()),
        initialize_params: Bytes::from_static(b"{}"),
        contract: CONTRACT,
        epoch: Epoch { counter: 1, nonce: 1 },
    }
}

fn opened() -> Session {
    Session::open(opening(), Version::V2025_11_25, at(0), &TERMS)
}

/// The input that a script calls `word`.
fn input(word: &str) -> Input {
    match word {
        "answered" => Input::Answered { version: Version::V2025_06_18 },
        "failed" => Input::Failed,
        "initialized" => Input::Initialized,
        "touch" => Input::Touch,
        "delete" => Input::Delete,
        "expire" => Input::Expire { activity: Activity::default() },
        "expire-busy" => Input::Expire { activity: BUSY },
        "expire-streaming" => Input::Expire { activity: STREAMING },
        "drain" => Input::Drain { grace: GRACE },
        "drained" => Input::Drained,
        "close" => Input::Close { reason: "because".into() },
        word => unreachable!("no input is called {word}"),
    }
}

fn describe(change: &Change) -> String {
    let row = |verb: &str, record: &SessionRecord| {
        format!("{verb} {} g{} deadline {}", record.state, record.generation, seconds(record.deadline))
    };
    match change {
        Change::Insert(record) => row("insert", record),
        Change::Update(record) => row("update", record),
        Change::Touch { seen_at, deadline, .. } => {
            format!("touch seen {} deadline {}", seconds(*seen_at), seconds(*deadline))
        }
        Change::End(stone) => {
            format!("end {} g{} keep {} ({})", stone.state, stone.generation, seconds(stone.keep_until), stone.reason)
        }
    }
}

fn describe_outcome(outcome: &Result<Decision, Refusal>) -> String {
    match outcome {
        Ok(decision) if *decision == Decision::default() => "nothing".into(),
        Ok(decision) => {
            let changes = decision.changes.iter().map(describe);
            let effects = decision.effects.iter().map(|effect| format!("{effect:?}"));
            changes.chain(effects).collect::<Vec<_>>().join(", ")
        }
        Err(refusal) => format!("refused: {refusal}"),
    }
}

fn lines(text: &str) -> Vec<&str> {
    text.lines().map(str::trim).filter(|line| !line.is_empty()).collect()
}

/// Runs `script` (a time in seconds and an input per line) from `session` on, and compares what each line entails.
#[track_caller]
fn check_from(mut session: Session, script: &str, expected: &str) {
    let mut actual = Vec::new();
    for line in lines(script) {
        let (time, word) = line.split_once(' ').expect("a time and an input");
        let now = at(time.parse().expect("a time"));
        let before = session.clone();
        let outcome = session.decide(now, &input(word), &TERMS);
        assert_eq!(session, before, "deciding changes nothing");
        actual.push(describe_outcome(&outcome));
        for change in outcome.iter().flat_map(|decision| &decision.changes) {
            session.apply(change);
        }
    }
    assert_eq!(actual, lines(expected));
}

#[track_caller]
fn check(script: &str, expected: &str) {
    check_from(opened(), script, expected);
}

#[test]
fn s2_the_row_comes_with_the_answer_and_not_before() {
    check("0 answered", "insert ready g1 deadline 60, AnswerInitialize");
    check("0 failed", "ReleaseInstance");
    // An `initialize` that was held for long leaves its client the whole minute.
    check("50 answered", "insert ready g1 deadline 110, AnswerInitialize");
    check("0 close", "ReleaseInstance");
    check("59 expire\n60 expire", "refused: the session is in use\nReleaseInstance");
}

#[test]
fn s1_what_makes_no_sense_is_refused_with_a_typed_error() {
    check(
        "0 touch\n0 initialized\n0 delete\n0 drain\n0 drained",
        "refused: the session is initializing, not ready
         refused: the session is initializing, not ready
         refused: the session is initializing, not ready
         refused: the session is initializing, not ready
         refused: `drained` can't happen to a session that is initializing",
    );
    check(
        "0 answered\n0 answered\n0 failed\n0 drained",
        "insert ready g1 deadline 60, AnswerInitialize
         refused: `answered` can't happen to a session that is ready
         refused: `failed` can't happen to a session that is ready
         refused: `drained` can't happen to a session that is ready",
    );
    check(
        "0 answered\n1 drain\n1 touch\n1 drain\n1 answered\n1 failed",
        "insert ready g1 deadline 60, AnswerInitialize
         update draining g2 deadline 6, RefuseNewCalls
         refused: the session is draining, not ready
         refused: the session is draining, not ready
         refused: `answered` can't happen to a session that is draining
         refused: `failed` can't happen to a session that is draining",
    );
}

#[test]
fn s5_the_store_learns_of_use_every_five_seconds() {
    check(
        "0 answered\n1 initialized\n2 touch\n5 touch\n6 touch\n10 touch\n11 touch",
        "insert ready g1 deadline 60, AnswerInitialize
         touch seen 1 deadline 101
         nothing
         nothing
         touch seen 6 deadline 106
         nothing
         touch seen 11 deadline 111",
    );
}

#[test]
fn s5_any_later_request_confirms_and_silence_expires_sooner() {
    check(
        "0 answered\n1 touch\n60 expire\n101 expire",
        "insert ready g1 deadline 60, AnswerInitialize
         touch seen 1 deadline 101
         refused: the session is in use
         end expired g2 keep 1101 (idle), ReleaseInstance",
    );
    check(
        "0 answered\n60 touch\n60 expire",
        "insert ready g1 deadline 60, AnswerInitialize
         refused: the session's deadline is over
         end expired g2 keep 1060 (the client said nothing after its `initialize` was answered), ReleaseInstance",
    );
}

#[test]
fn s5_a_call_or_a_stream_keeps_a_session_from_being_idle() {
    check(
        "0 answered\n1 touch\n101 expire-busy\n101 expire-streaming\n101 delete\n101 expire",
        "insert ready g1 deadline 60, AnswerInitialize
         touch seen 1 deadline 101
         refused: the session is in use
         refused: the session is in use
         refused: the session's deadline is over
         end expired g2 keep 1101 (idle), ReleaseInstance",
    );
    let mut session = ready();
    assert_eq!(session.admit(at(101), &owner()), Err(Refusal::Overdue));
    assert!(session.touch(at(101), &TERMS).is_some(), "the caller knows of a call in flight");
    assert_eq!(session.admit(at(101), &owner()), Ok(()));
}

#[test]
fn s6_the_first_ending_wins() {
    for (first, expected) in [
        ("delete", "end deleted g2 keep 1002 (deleted by the client), ReleaseInstance"),
        ("close", "end closed g2 keep 1002 (because), ReleaseInstance"),
    ] {
        for second in ["delete", "close", "expire", "drain", "drained", "touch", "answered", "failed", "initialized"] {
            let state = if first == "delete" { "deleted" } else { "closed" };
            check_from(
                ready(),
                &format!("2 {first}\n200 {second}"),
                &format!("{expected}\nrefused: the session has ended: {state}"),
            );
        }
    }
}

#[test]
fn s8_a_drain_is_durable_first_and_its_grace_is_not_prolonged() {
    check_from(
        ready(),
        "2 drain\n3 drained",
        "update draining g2 deadline 7, RefuseNewCalls
         end deleted g3 keep 1003 (drained), ReleaseInstance",
    );
    check_from(
        ready(),
        "2 drain\n6 expire-busy\n7 expire-busy",
        "update draining g2 deadline 7, RefuseNewCalls
         refused: the session is in use
         end deleted g3 keep 1007 (drained, with calls in flight when the grace was over), ReleaseInstance",
    );
    check_from(
        ready(),
        "2 drain\n3 delete",
        "update draining g2 deadline 7, RefuseNewCalls
         end deleted g3 keep 1003 (deleted by the client), ReleaseInstance",
    );
    check_from(
        ready(),
        "2 drain\n3 close",
        "update draining g2 deadline 7, RefuseNewCalls
         end closed g3 keep 1003 (because), ReleaseInstance",
    );
}

/// A confirmed session, last used at 1.
fn ready() -> Session {
    let mut session = opened();
    for (time, word) in [(0, "answered"), (1, "touch")] {
        let decision = session.decide(at(time), &input(word), &TERMS).expect("legal");
        decision.changes.iter().for_each(|change| session.apply(change));
    }
    session
}

/// The session after `script`, which must be legal.
fn after(script: &[&str]) -> Session {
    let mut session = ready();
    for word in script {
        let decision = session.decide(at(2), &input(word), &TERMS).expect("legal");
        decision.changes.iter().for_each(|change| session.apply(change));
    }
    session
}

#[test]
fn s4_a_stranger_learns_nothing_whatever_the_state() {
    let stranger = Principal::Token("mallory".into());
    let all: [&[&str]; 5] = [&[], &["drain"], &["delete"], &["close"], &["drain", "drained"]];
    for session in all.into_iter().map(after).chain([opened()]) {
        for now in [at(2), at(10_000)] {
            assert_eq!(session.admit(now, &stranger), Err(Refusal::OtherPrincipal), "{:?}", session.record().state);
        }
    }
}

#[test]
fn s1_only_ready_is_served() {
    let table = [
        (opened(), Err(Refusal::NotReady(State::Initializing))),
        (after(&[]), Ok(())),
        (after(&["drain"]), Err(Refusal::NotReady(State::Draining))),
        (after(&["delete"]), Err(Refusal::Ended(State::Deleted))),
        (after(&["close"]), Err(Refusal::Ended(State::Closed))),
    ];
    for (session, expected) in table {
        assert_eq!(session.admit(at(3), &owner()), expected);
        // State is said before the deadline is looked at.
        let late = expected.map_or_else(Err, |()| Err(Refusal::Overdue));
        assert_eq!(session.admit(at(10_000), &owner()), late);
    }
}

#[test]
fn s5_touch_is_decide_and_apply_of_touch() {
    let (mut touched, mut decided) = (ready(), ready());
    for time in [1, 2, 5, 6, 7, 30, 29, 31, 40, 99] {
        let change = touched.touch(at(time), &TERMS);
        let decision = decided.decide(at(time), &Input::Touch, &TERMS).expect("legal");
        decision.changes.iter().for_each(|change| decided.apply(change));
        assert_eq!(change.as_ref(), decision.changes.first(), "at {time}");
    }
    for mut session in [opened(), after(&["drain"]), after(&["delete"])] {
        let before = session.clone();
        assert_eq!(session.touch(at(3), &TERMS), None);
        assert_eq!(session, before);
    }
}

#[test]
fn s5_a_clock_that_was_put_right_brings_the_deadline_back() {
    let mut session = ready();
    assert!(session.touch(at(90), &TERMS).is_some());
    // A little late is another request overtaken on the way, not a clock.
    assert_eq!(session.touch(at(88), &TERMS), None);
    assert_eq!((session.record().seen_at, session.deadline()), (at(90), at(190)));
    let change = session.touch(at(20), &TERMS).expect("the store believes in too late a deadline");
    assert_eq!(describe(&change), "touch seen 20 deadline 120");
    // Terms that became shorter are told at once, too.
    let shorter = Terms { idle_expiry: Duration::from_secs(10), ..TERMS };
    assert_eq!(describe(&session.touch(at(21), &shorter).expect("told")), "touch seen 21 deadline 31");
}

fn asked(now: Timestamp) -> Asked<'static> {
    Asked { now, contract: &CONTRACT, epoch: Epoch { counter: 2, nonce: 2 }, terms: &TERMS }
}

#[track_caller]
fn ending(restoration: Restoration) -> (&'static str, String, Epoch) {
    let (word, decision) = match restoration {
        Restoration::Resumed(_) => unreachable!("it was resumed"),
        Restoration::Refused(_, decision) => ("refused", decision),
        Restoration::Overdue(decision) => ("overdue", decision),
        Restoration::Unfinished(decision) => ("unfinished", decision),
    };
    let Some(Change::End(stone)) = decision.changes.first() else { unreachable!("it does not end") };
    assert_eq!(decision.effects, [Effect::ReleaseInstance]);
    (word, format!("{} {}", stone.state, stone.reason), stone.epoch)
}

#[test]
fn s9_a_restored_session_goes_on_under_the_new_epoch() {
    let stored = ready().record().clone();
    let Restoration::Resumed(mut session) = Session::restore(stored.clone(), &asked(at(100))) else {
        unreachable!("it lives")
    };
    assert_eq!(*session.record(), SessionRecord { epoch: asked(at(0)).epoch, ..stored });
    assert_eq!(session.admit(at(100), &owner()), Ok(()));
    assert_eq!(
        session.touch(at(100), &TERMS).map(|change| describe(&change)),
        Some("touch seen 100 deadline 200".into())
    );
    check_from(session, "101 delete", "end deleted g2 keep 1101 (deleted by the client), ReleaseInstance");
}

#[test]
fn s9_what_is_overdue_or_unfinished_ends_at_the_start() {
    let epoch = asked(at(0)).epoch;
    let overdue = Session::restore(ready().record().clone(), &asked(at(101)));
    assert_eq!(ending(overdue), ("overdue", "expired idle".into(), epoch));
    let drained = Session::restore(after(&["drain"]).record().clone(), &asked(at(2)));
    assert_eq!(ending(drained), ("unfinished", "deleted drained, cut short by a restart of the gateway".into(), epoch));
}

#[test]
fn s15_a_changed_contract_closes_and_says_why() {
    let other = Contract::from_bytes([2; 32]);
    let refused = Session::restore(ready().record().clone(), &Asked { contract: &other, ..asked(at(2)) });
    assert!(matches!(&refused, Restoration::Refused(RefusedReason::ContractChanged, _)));
    assert_eq!(ending(refused).1, "closed the auth contract changed");
}

#[test]
fn s1_a_row_that_is_no_live_session_is_never_taken_up() {
    for state in [State::Initializing, State::Deleted, State::Expired, State::Closed] {
        let row = SessionRecord { state, ..ready().record().clone() };
        let restoration = Session::restore(row, &asked(at(2)));
        assert!(matches!(&restoration, Restoration::Refused(RefusedReason::NotLive(found), _) if *found == state));
        assert_eq!(ending(restoration).0, "refused");
    }
}

#[test]
fn s5_a_row_from_the_future_is_kept() {
    let future = SessionRecord { seen_at: at(5000), deadline: at(5100), ..ready().record().clone() };
    let Restoration::Resumed(mut session) = Session::restore(future, &asked(at(10))) else { unreachable!("it lives") };
    assert_eq!(
        session.touch(at(10), &TERMS).map(|change| describe(&change)),
        Some("touch seen 10 deadline 110".into())
    );
}

#[test]
fn texts_of_others_are_bounded() {
    let long = "é".repeat(1000);
    let name = ClientName::new(&long, "1");
    assert_eq!((name.name.chars().count(), &*name.version), (ClientName::CHARS_MAX, "1"));
    let decision = ready().decide(at(2), &Input::Close { reason: long.into() }, &TERMS).expect("legal");
    let Some(Change::End(stone)) = decision.changes.first() else { unreachable!("it ends") };
    assert_eq!(stone.reason.chars().count(), Tombstone::REASON_CHARS_MAX);
}

/// Where a life of the worker ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Crash {
    Never,
    BeforePersist,
    AfterPersist,
    AfterEffect(usize),
}

/// One id with its store, its memory, and what its client has seen.
struct World {
    now: u64,
    row: Option<SessionRecord>,
    stone: Option<Tombstone>,
    memory: Option<Session>,
    answered: bool,
    epoch: u64,
}

impl World {
    fn new() -> Self {
        Self { now: 0, row: None, stone: None, memory: Some(opened()), answered: false, epoch: 1 }
    }

    fn step(&mut self, word: &str, crash: Crash) {
        let Some(session) = self.memory.as_ref().cloned() else { return };
        if word == "touch" && session.admit(at(self.now), &owner()).is_ok() {
            self.touch(crash);
        } else if let Ok(decision) = session.decide(at(self.now), &input(word), &TERMS) {
            self.perform(&decision, crash);
        } else if crash != Crash::Never {
            self.memory = None;
        }
        self.hold();
    }

    /// The path of every request: memory first, then the hint.
    fn touch(&mut self, crash: Crash) {
        let change = self.memory.as_mut().and_then(|session| session.touch(at(self.now), &TERMS));
        if crash != Crash::BeforePersist {
            change.iter().for_each(|change| self.persist(change));
        }
        if crash != Crash::Never {
            self.memory = None;
        }
    }

    /// Persist, apply, perform: unless the life ends before.
    fn perform(&mut self, decision: &Decision, crash: Crash) {
        if crash == Crash::BeforePersist {
            self.memory = None;
            return;
        }
        decision.changes.iter().for_each(|change| self.persist(change));
        if crash == Crash::AfterPersist {
            self.memory = None;
            return;
        }
        if let Some(session) = &mut self.memory {
            decision.changes.iter().for_each(|change| session.apply(change));
        }
        for (index, effect) in decision.effects.iter().enumerate() {
            match effect {
                Effect::AnswerInitialize => {
                    assert!(self.row.is_some(), "S2: the row is durable before the answer leaves");
                    self.answered = true;
                }
                Effect::ReleaseInstance => self.memory = None,
                Effect::RefuseNewCalls => {}
            }
            if crash == Crash::AfterEffect(index) {
                self.memory = None;
            }
        }
    }

    /// What the store does: compare-and-swap on the generation, and tombstones block.
    fn persist(&mut self, change: &Change) {
        match change {
            Change::Insert(record) => {
                assert!(self.row.is_none() && self.stone.is_none(), "S7: the id is new");
                self.row = Some(record.clone());
            }
            Change::Update(record) => {
                let row = self.row.replace(record.clone()).expect("there is a row");
                assert_eq!(row.generation + 1, record.generation);
            }
            Change::Touch { seen_at, deadline, .. } => {
                let row = self.row.as_mut().expect("there is a row");
                (row.seen_at, row.deadline, row.confirmed) = (*seen_at, *deadline, true);
            }
            Change::End(stone) => {
                let row = self.row.take().expect("there is a row");
                assert_eq!(row.generation + 1, stone.generation);
                assert_eq!(self.stone.replace(stone.clone()), None, "S6: the first ending stands");
            }
        }
    }

    /// The next life.
    fn recover(&mut self) {
        self.epoch += 1;
        let Some(row) = self.row.clone() else { return };
        let epoch = Epoch { counter: self.epoch, nonce: 0 };
        match Session::restore(row, &Asked { epoch, ..asked(at(self.now)) }) {
            Restoration::Resumed(session) => self.memory = Some(session),
            Restoration::Refused(_, decision) | Restoration::Overdue(decision) | Restoration::Unfinished(decision) => {
                self.perform(&decision, Crash::Never);
            }
        }
        self.hold();
    }

    /// What holds at every moment.
    fn hold(&self) {
        assert!(self.row.is_none() || self.stone.is_none(), "a session is live or ended");
        let Some(session) = &self.memory else { return };
        let admitted = session.admit(at(self.now), &owner()).is_ok();
        assert!(!(admitted && self.stone.is_some()), "S1: an ended id is never served");
        assert!(!(admitted && self.row.is_none()), "what is served is stored");
        assert!(!(admitted && at(self.now) >= session.deadline()), "S10: what is overdue is never served");
        let Some(row) = &self.row else { return };
        assert_eq!((row.state, row.generation), (session.record().state, session.record().generation));
        assert!(row.deadline <= session.deadline(), "S5: a restored deadline is never late");
        assert!(session.deadline().since(row.deadline) <= TERMS.touch_interval, "S5: nor early by more than 5 s");
        assert_eq!(row.confirmed, session.record().confirmed);
    }
}

const WORDS: [&str; 11] = [
    "answered",
    "failed",
    "initialized",
    "touch",
    "delete",
    "expire",
    "expire-busy",
    "expire-streaming",
    "drain",
    "drained",
    "close",
];
const CRASHES: [Crash; 5] =
    [Crash::Never, Crash::BeforePersist, Crash::AfterPersist, Crash::AfterEffect(0), Crash::AfterEffect(1)];

#[test]
fn s1_every_crash_point_of_every_script_leaves_a_session_live_or_ended() {
    let scripts: [&[&str]; 7] = [
        &["answered", "initialized", "touch", "delete", "touch"],
        &["answered", "touch", "drain", "drained", "delete"],
        &["answered", "touch", "drain", "expire-busy", "close"],
        &["answered", "close", "delete", "expire"],
        &["answered", "expire", "touch"],
        &["failed"],
        &["touch", "close"],
    ];
    for (script, step, crash, pace) in scripts.into_iter().flat_map(|script| {
        let points = (0..script.len()).flat_map(|step| CRASHES.map(|crash| (step, crash)));
        points.flat_map(move |(step, crash)| [1, 4, 6, 120].map(|pace| (script, step, crash, pace)))
    }) {
        let mut world = World::new();
        let mut ended = None;
        for (index, word) in script.iter().enumerate() {
            world.step(word, if index == step { crash } else { Crash::Never });
            if world.memory.is_none() {
                world.recover();
            }
            if let Some(stone) = &ended {
                assert_eq!(world.stone.as_ref(), Some(stone), "{script:?} {step} {crash:?}");
            }
            ended = world.stone.clone();
            world.now += pace;
        }
        let live = world.memory.is_some_and(|session| session.admit(at(world.now), &owner()).is_ok());
        assert!(!(live && ended.is_some()), "{script:?} {step} {crash:?}");
    }
}

proptest! {
    #[test]
    fn s1_no_history_makes_an_ended_id_live_again(
        history in prop::collection::vec((0..WORDS.len(), 0..CRASHES.len(), 0_u64..40, any::<bool>()), 1..60),
    ) {
        let mut world = World::new();
        let mut first = None;
        for (word, crash, pause, often) in history {
            // Crashes are rarer than inputs, so that histories get somewhere.
            let crash = if often { Crash::Never } else { CRASHES[crash] };
            world.step(WORDS[word], crash);
            if world.memory.is_none() {
                world.recover();
            }
            if let Some(stone) = &first {
                prop_assert_eq!(world.stone.as_ref(), Some(stone));
                prop_assert!(world.memory.is_none());
            }
            first = world.stone.clone();
            world.now += pause;
        }
        prop_assert!(!world.answered || world.row.is_some() || world.stone.is_some(), "what was answered is on record");
    }

    #[test]
    fn s9_restoring_the_row_gives_the_live_session(pauses in prop::collection::vec(0_u64..30, 1..30)) {
        let mut world = World::new();
        world.step("answered", Crash::Never);
        for pause in pauses {
            world.now += pause;
            world.step("touch", Crash::Never);
            let (Some(row), Some(live)) = (world.row.clone(), world.memory.as_ref()) else { return Ok(()) };
            let asked = Asked { epoch: row.epoch, ..asked(at(world.now)) };
            if let Restoration::Resumed(restored) = Session::restore(row, &asked) {
                let mark = Mark::of(live.record());
                let same = SessionRecord { seen_at: mark.seen_at, deadline: mark.deadline, ..restored.record().clone() };
                prop_assert_eq!(&same, live.record());
            }
        }
    }
}
