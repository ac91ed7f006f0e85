//! Figures, and breaches of promises.

use super::course::{Event, Mark};
use super::growth::Growth;
use super::load::{Call, Fate};
use super::stand::{Server, is_excused};
use serde_json::Value;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Times without an answered call, one for each disturbance.
#[derive(Debug, Clone, Default)]
pub struct Pauses(Vec<Duration>);

/// What a soak has shown.
#[derive(Debug, Default)]
pub struct Report {
    /// Calls by server, tool and fate.
    pub fates: BTreeMap<(Server, &'static str, Fate), u64>,
    /// How many answers came on streams.
    pub streamed: u64,
    /// Every call that was not answered, for people.
    pub unanswered: Vec<String>,
    /// The longest pause around each disturbance.
    pub pauses: BTreeMap<Event, Pauses>,
    /// The longest pause in each two seconds without any disturbance.
    pub quiet: Pauses,
    /// Of the calls of unknown outcome: how many ran, and how many did not.
    pub undecided: (u64, u64),
    /// Memory, descriptors and zombies.
    pub growth: Growth,
    /// Lines of level WARN and ERROR in the log, without what differs, and how often.
    pub complaints: BTreeMap<String, u64>,
    /// Every breach of a promise.
    pub faults: Vec<String>,
}

impl Report {
    pub(super) fn of(calls: &[Call], marks: &[Mark], growth: Growth) -> Report {
        let mut report = Report { growth, ..Report::default() };
        for call in calls {
            *report.fates.entry((call.server, call.tool, call.fate.clone())).or_default() += 1;
            report.streamed += u64::from(call.streamed && call.fate == Fate::Answered);
            if call.fate != Fate::Answered {
                report.judge(call, marks);
            }
        }
        report.same("zombies that stayed", 0, report.growth.zombies as u64);
        report.pauses(calls, marks);
        report
    }

    /// A call may go unanswered only if a kill met it, and only as its server allows (R4).
    fn judge(&mut self, call: &Call, marks: &[Mark]) {
        let those: Vec<&Mark> = marks.iter().filter(|mark| met(call, mark)).collect();
        let events: Vec<Event> = those.iter().map(|mark| mark.event).collect();
        let by_kill = events.iter().any(|event| matches!(event, Event::Kill | Event::KillAgain));
        let since = marks.iter().rev().find(|mark| mark.from <= call.sent);
        let since = since.map(|mark| (mark.event, call.sent - mark.from));
        let took = call.ended - call.sent;
        let (server, tool, tag) = (call.server.name(), call.tool, &call.tag);
        let age = those.first().map_or(Duration::ZERO, |mark| mark.from.saturating_duration_since(call.sent));
        let line = format!(
            "{tag} `{tool}` on `{server}`: {:?} after {took:.0?}, {age:.0?} old when met by {events:?}, sent after {since:.0?}",
            call.fate
        );
        if !(by_kill && is_excused(call, age)) {
            self.fault(line.clone());
        }
        self.unanswered.push(line);
    }

    fn pauses(&mut self, calls: &[Call], marks: &[Mark]) {
        let answers: Vec<Instant> =
            calls.iter().filter(|call| call.fate == Fate::Answered).map(|call| call.ended).collect();
        let longest = |from: Instant, until: Instant| {
            let first = answers.partition_point(|answer| *answer < from);
            let mut last = from;
            let mut longest = Duration::ZERO;
            for answer in &answers[first..] {
                longest = longest.max(*answer - last);
                last = *answer;
                if last > until {
                    break;
                }
            }
            longest
        };
        for mark in marks {
            let pause = longest(mark.from, mark.until + PAUSE_AFTER);
            self.pauses.entry(mark.event).or_default().0.push(pause);
        }
        let (Some(first), Some(last)) = (answers.first(), answers.last()) else {
            return;
        };
        let mut from = *first;
        while from + QUIET < *last {
            if !marks.iter().any(|mark| mark.from < from + QUIET + PAUSE_AFTER && from < mark.until + QUIET) {
                self.quiet.0.push(longest(from, from + QUIET));
            }
            from += QUIET;
        }
    }

    /// Every session is what it was: the same child, the same session at the server (C8, T2).
    pub(super) fn identities(&mut self, before: &[(Value, Value)], after: &[(Value, Value)]) {
        for (number, (before, after)) in before.iter().zip(after).enumerate() {
            if before != after {
                self.fault(format!("client {number} was at {before:?} and is at {after:?}"));
            }
        }
    }

    /// Compares for each call how often it ran with what its client was told: answered once, unknown at most once, refused
    /// never.
    pub(super) fn ran(&mut self, server: Server, what: &str, calls: &[&Call], ran: &BTreeMap<String, u64>) {
        let mut known = 0;
        for call in calls {
            let times = ran.get(&call.tag).copied().unwrap_or(0);
            known += times;
            let least = u64::from(call.fate.is_answered());
            let most = least.max(u64::from(call.fate.is_undecided()));
            if call.fate.is_undecided() && what == "incr" {
                self.undecided.0 += times;
                self.undecided.1 += u64::from(times == 0);
            }
            if times < least || times > most {
                self.fault(format!(
                    "{} `{}` on `{}` ran {times} times: {:?}",
                    call.tag,
                    call.tool,
                    server.name(),
                    call.fate
                ));
            }
        }
        self.same(&format!("runs of {what} on `{}` by these clients", server.name()), known, ran.values().sum());
    }

    /// The same where a server counts runs of a tool and not of a call.
    pub(super) fn ran_in_all(&mut self, server: Server, tool: &str, calls: &[&Call], ran: u64) {
        let count = |wanted: fn(&Fate) -> bool| calls.iter().filter(|call| wanted(&call.fate)).count() as u64;
        let (answered, undecided) = (count(Fate::is_answered), count(Fate::is_undecided));
        if ran < answered || ran > answered + undecided {
            let name = server.name();
            self.fault(format!("`{tool}` on `{name}` ran {ran} times: {answered} answered, {undecided} undecided"));
        }
    }

    pub(super) fn same(&mut self, what: &str, wanted: u64, found: u64) {
        if wanted != found {
            self.fault(format!("{what}: {wanted} expected, {found} found"));
        }
    }

    pub(super) fn fault(&mut self, fault: String) {
        self.faults.push(fault);
    }

    /// Counts complaints in the log, and takes panics for breaches.
    pub(super) fn log(&mut self, log: &str) {
        for line in log.lines() {
            if line.contains("panicked at") {
                self.fault(line.to_owned());
            }
            let mut words = line.split_whitespace();
            if words.by_ref().take(LEVEL_WORDS).any(|word| word == "WARN" || word == "ERROR") {
                let text: Vec<&str> = words.filter(|word| !word.contains('=')).collect();
                *self.complaints.entry(text.join(" ")).or_default() += 1;
            }
        }
    }

    fn count(&self, wanted: impl Fn(Server, &Fate) -> bool) -> u64 {
        let calls = self.fates.iter().filter(|((server, tool, fate), _)| *tool != "GET" && wanted(*server, fate));
        calls.map(|(_, count)| count).sum()
    }
}

/// Whether a call was under way when something happened, or was sent before its client could know of it.
fn met(call: &Call, mark: &Mark) -> bool {
    let until = match mark.event {
        Event::Kill | Event::KillAgain => mark.from + KILL_LASTS,
        Event::Reload | Event::Upgrade => mark.until,
    };
    call.sent <= until && mark.from <= call.ended
}

impl Pauses {
    /// How many there were.
    #[must_use]
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// The pause that so many of a hundred do not exceed.
    #[must_use]
    pub fn at(&self, percent: usize) -> Duration {
        let mut sorted = self.0.clone();
        sorted.sort_unstable();
        sorted.get((sorted.len().saturating_sub(1)) * percent / 100).copied().unwrap_or_default()
    }
}

impl std::fmt::Display for Pauses {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (median, high, highest) = (self.at(50), self.at(99), self.at(100));
        write!(f, "{} times: p50 {median:.0?}, p99 {high:.0?}, max {highest:.0?}", self.0.len())
    }
}

impl std::fmt::Display for Report {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let answered = self.count(|_, fate| fate.is_answered());
        writeln!(f, "calls: {}, answered {answered}, {} of them on streams", self.count(|_, _| true), self.streamed)?;
        for server in Server::ALL {
            let of = |wanted: &dyn Fn(&Fate) -> bool| self.count(|at, fate| at == server && wanted(fate));
            writeln!(
                f,
                "  {:7} {} calls, {} cut before any head, {} outcome_unknown, {} without all progress, {} otherwise not answered",
                server.name(),
                of(&|_| true),
                of(&|fate| *fate == Fate::CutBeforeHead),
                of(&|fate| matches!(fate, Fate::Told(outcome) if outcome == "outcome_unknown")),
                of(&|fate| matches!(fate, Fate::Incomplete(_))),
                of(&|fate| !matches!(fate, Fate::Answered | Fate::Incomplete(_) | Fate::CutBeforeHead)
                    && !matches!(fate, Fate::Told(outcome) if outcome == "outcome_unknown")),
            )?;
        }
        writeln!(f, "connections refused: {}", self.count(|_, fate| *fate == Fate::Refused))?;
        let (ran, not) = self.undecided;
        writeln!(f, "`incr` of unknown outcome: {ran} ran, {not} did not")?;
        for (event, pauses) in &self.pauses {
            writeln!(f, "longest time without an answer, {event:?}: {pauses}")?;
        }
        writeln!(f, "the same in quiet times of 2 s: {}", self.quiet)?;
        let growth = &self.growth;
        writeln!(f, "thirds: keeper MiB {}; keeper descriptors {}", growth.keeper_mib, growth.keeper_files)?;
        writeln!(
            f,
            "thirds over {} workers: MiB {}; descriptors {}",
            growth.workers, growth.worker_mib, growth.worker_files
        )?;
        for (complaint, count) in &self.complaints {
            writeln!(f, "log: {count} × {complaint}")?;
        }
        writeln!(f, "faults: {}", self.faults.len())?;
        self.faults.iter().take(FAULTS_SHOWN_MAX).try_for_each(|fault| writeln!(f, "  {fault}"))
    }
}

/// How long after SIGKILL was sent a request may still reach the sockets of the process that dies.
const KILL_LASTS: Duration = Duration::from_millis(250);
/// A pause that begins this long after something was over is not counted to it.
const PAUSE_AFTER: Duration = Duration::from_secs(1);
const QUIET: Duration = Duration::from_secs(2);
/// The time may be one word or two.
const LEVEL_WORDS: usize = 3;
const FAULTS_SHOWN_MAX: usize = 100;
