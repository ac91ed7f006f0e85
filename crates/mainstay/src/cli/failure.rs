//! How a command fails: an error chain, a hint and an exit code.

use std::fmt;
use std::io;
use std::process::ExitCode;
use std::time::Duration;

use mainstay_core::time::Timestamp;
use serde::Serialize;

use super::exit;
use super::output::Output;
use crate::config::{Diagnostic, Faults};
use crate::runtime::Clock;

/// Why a command did not do what it was asked.
#[derive(Debug)]
pub(super) struct Failure {
    code: u8,
    cause: anyhow::Error,
    hint: Option<String>,
}

impl Failure {
    /// The command line or the configuration is wrong.
    pub(super) fn usage(cause: impl Into<anyhow::Error>) -> Self {
        Self { code: exit::USAGE, cause: cause.into(), hint: None }
    }

    /// There is no running gateway.
    pub(super) fn not_running(cause: impl Into<anyhow::Error>) -> Self {
        Self { code: exit::NOT_RUNNING, cause: cause.into(), hint: None }
    }

    /// The gateway has nothing of that name.
    pub(super) fn not_found(cause: impl Into<anyhow::Error>) -> Self {
        Self { code: exit::NOT_FOUND, cause: cause.into(), hint: None }
    }

    /// The same with what to do about it.
    #[must_use]
    pub(super) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// The same, saying what it happened to.
    #[must_use]
    pub(super) fn about(mut self, what: &impl fmt::Display) -> Self {
        self.cause = self.cause.context(what.to_string());
        self
    }

    /// What is wrong with the configuration, if that is what it is.
    pub(super) fn faults(&self) -> Option<&Faults> {
        self.cause.downcast_ref::<Faults>()
    }

    /// Whether there is no running gateway.
    pub(super) fn is_not_running(&self) -> bool {
        self.code == exit::NOT_RUNNING
    }

    /// Whether the gateway has nothing of that name.
    pub(super) fn is_not_found(&self) -> bool {
        self.code == exit::NOT_FOUND
    }

    /// Whether the reader of our output has gone away.
    pub(super) fn is_closed_pipe(&self) -> bool {
        self.cause.chain().any(|cause| {
            cause.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
        })
    }

    /// Tells it on standard error, and gives the exit code. A reader that closed our output is no failure to tell of.
    pub(super) fn report(&self, out: &Output) -> ExitCode {
        if self.is_closed_pipe() {
            return exit::OK.into();
        }
        if out.is_json() {
            let causes: Vec<String> = self.cause.chain().skip(1).map(ToString::to_string).collect();
            let faults = self.faults();
            let faults: Vec<Fault<'_>> = faults.into_iter().flat_map(|faults| &faults.0).map(Fault::of).collect();
            let messages: Vec<&str> = faults.iter().map(|fault| fault.message).collect();
            let error = if faults.is_empty() { self.cause.to_string() } else { messages.join("; ") };
            let hints: Vec<&str> = faults.iter().filter_map(|fault| fault.hint).chain(self.hint.as_deref()).collect();
            let hint = Some(hints.join("; ")).filter(|hint| !hint.is_empty());
            let hint = hint.as_deref();
            out.note_json(&Report { error: &error, causes: &causes, hint, exit_code: self.code, faults });
        } else {
            out.note(&self.to_text());
        }
        self.code.into()
    }

    /// `error:`, the chain of causes, `hint:`.
    fn to_text(&self) -> String {
        let hint = self.hint.as_ref().map(|hint| format!("\nhint: {hint}")).unwrap_or_default();
        if let Some(Faults(faults)) = self.faults() {
            let told = faults.iter().map(|fault| {
                let hint = fault.hint.as_ref().map(|hint| format!("\nhint: {hint}")).unwrap_or_default();
                format!("error: {fault}{hint}")
            });
            return told.collect::<Vec<_>>().join("\n") + &hint;
        }
        let mut text = format!("error: {}", self.cause);
        for cause in self.cause.chain().skip(1) {
            text.push_str(&format!("\n  caused by: {cause}"));
        }
        text + &hint
    }
}

/// What became of several things that were to be done one after the other.
pub(super) struct Outcome<T> {
    /// What was done.
    pub(super) done: Vec<T>,
    failures: Vec<Failure>,
}

/// Does `one` to each of `items`; one that fails keeps none of the others from its turn. With more than one item, each
/// failure is told at once, and from the second second on how far it has come.
pub(super) fn settle_all<I, T>(items: &[I], out: &Output, one: impl Fn(&I) -> Result<T, Failure>) -> Outcome<T>
where
    I: fmt::Display,
{
    let mut outcome = Outcome { done: Vec::new(), failures: Vec::new() };
    let mut pace = Pace::new();
    for (item, before) in items.iter().zip(0..) {
        if before > 0 && pace.is_due() {
            tell_progress(before, items.len(), out);
        }
        match one(item) {
            Ok(done) => outcome.done.push(done),
            Err(failure) if items.len() > 1 => {
                let failure = failure.about(item);
                let _ = failure.report(out);
                outcome.failures.push(failure);
            }
            Err(failure) => {
                outcome.failures.push(failure);
            }
        }
    }
    outcome
}

fn tell_progress(handled: usize, all: usize, out: &Output) {
    if out.is_json() {
        out.note_json(&serde_json::json!({ "handled": handled, "of": all }));
    } else {
        out.note(&format!("{handled} of {all} so far"));
    }
}

/// How often people hear of what takes long: after a second first, then every few.
pub(super) struct Pace {
    clock: Clock,
    due_at: Timestamp,
}

impl Pace {
    /// From now on.
    pub(super) fn new() -> Self {
        let clock = Clock::system();
        Self { clock, due_at: clock.started_at().plus(TELL_FIRST) }
    }

    /// Whether something should be told now. If so, not again for a while.
    pub(super) fn is_due(&mut self) -> bool {
        let now = self.clock.now();
        if now < self.due_at {
            return false;
        }
        self.due_at = now.plus(TELL_EVERY);
        true
    }

    /// How long it has taken so far.
    pub(super) fn elapsed(&self) -> Duration {
        self.clock.now().since(self.clock.started_at())
    }
}

impl<T> Outcome<T> {
    /// The end of the command: the failure itself if there was but one thing to do.
    pub(super) fn ended(mut self) -> Result<(), Failure> {
        let (done, failed) = (self.done.len(), self.failures.len());
        match (self.failures.pop(), done + failed) {
            (None, _) => Ok(()),
            (Some(failure), 1) => Err(failure),
            (Some(_), all) => Err(anyhow::anyhow!("{failed} of {all} failed").into()),
        }
    }
}

/// What is told with `--json`.
#[derive(Serialize)]
struct Report<'a> {
    error: &'a str,
    causes: &'a [String],
    hint: Option<&'a str>,
    exit_code: u8,
    /// What is wrong with the configuration, if that is what it is.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    faults: Vec<Fault<'a>>,
}

/// A fault of the configuration, or a warning, for programs.
#[derive(Serialize)]
pub(super) struct Fault<'a> {
    /// The file, if it is in one.
    file: Option<&'a str>,
    line: Option<usize>,
    column: Option<usize>,
    /// The file, variable or flag.
    origin: &'a str,
    message: &'a str,
    hint: Option<&'a str>,
}

impl<'a> Fault<'a> {
    /// The same as `told`.
    pub(super) fn of(told: &'a Diagnostic) -> Self {
        let Diagnostic { origin, location, message, hint } = told;
        let place = location.as_ref();
        Self {
            file: place.map(|_| origin.as_str()),
            line: place.map(|place| place.line),
            column: place.map(|place| place.column),
            origin,
            message,
            hint: hint.as_deref(),
        }
    }
}

impl From<anyhow::Error> for Failure {
    fn from(cause: anyhow::Error) -> Self {
        let denied = cause.chain().any(|cause| {
            cause.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::PermissionDenied)
        });
        Self { code: exit::FAILED, cause, hint: denied.then(|| DENIED_HINT.to_owned()) }
    }
}

const TELL_FIRST: Duration = Duration::from_secs(1);
const TELL_EVERY: Duration = Duration::from_secs(5);
const DENIED_HINT: &str = "run it as the user whose gateway it is, or name another directory with `--state-dir`";

impl From<io::Error> for Failure {
    fn from(cause: io::Error) -> Self {
        Self::from(anyhow::Error::new(cause))
    }
}

impl From<Faults> for Failure {
    fn from(faults: Faults) -> Self {
        // Each has its own hint.
        Self::usage(faults)
    }
}

#[cfg(test)]
mod tests {
    use anyhow::anyhow;

    use super::*;

    #[test]
    fn a_failure_is_told_as_error_causes_and_hint() {
        let failure = Failure::usage(anyhow!("inner").context("outer")).hint("try this");
        assert_eq!(failure.to_text(), "error: outer\n  caused by: inner\nhint: try this");
    }

    #[test]
    fn each_fault_of_a_configuration_keeps_its_own_hint() {
        let faults = Faults(vec![Diagnostic::new("f", "a").with_hint("b"), Diagnostic::new("f", "c")]);
        assert_eq!(Failure::from(faults).to_text(), "error: f: a\nhint: b\nerror: f: c");
    }

    #[test]
    fn who_may_not_is_told_what_to_do() {
        let failure = Failure::from(anyhow!(io::Error::from(io::ErrorKind::PermissionDenied)).context("read `x`"));
        assert!(failure.to_text().contains("hint: run it as the user"), "{}", failure.to_text());
    }

    #[test]
    fn a_closed_pipe_ends_quietly() {
        let failure = Failure::from(io::Error::from(io::ErrorKind::BrokenPipe));
        assert_eq!(failure.report(&Output::new(false)), exit::OK.into());
    }
}
