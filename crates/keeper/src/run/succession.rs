//! The steps of a handover: rehearsed, ordered, handed over, and succeeded or rolled back.

use std::rc::Rc;

use bytes::Bytes;
use tokio::task::spawn_local;
use tokio::time::Instant;

use super::Stage;
use super::dispatch::Dispatcher;
use super::handover::{Step, Terms};
use super::rehearsal::rehearse;
use super::renew::NotRenewed;
use crate::keeper::{Asked, UNDER_WAY};
use crate::types::UNCHANGED;

impl Dispatcher {
    pub(super) fn is_succeeding(&self) -> bool {
        matches!(self.step, Step::Succeeding { .. })
    }

    /// Takes the handover out of the step in which a successor was started, if it is there.
    fn take_succession(&mut self) -> Option<(Bytes, Terms)> {
        match std::mem::replace(&mut self.step, Step::None) {
            Step::Succeeding { previous_settings, terms } => Some((previous_settings, terms)),
            other @ (Step::None | Step::Rehearsing { .. } | Step::Ordered { .. }) => {
                self.step = other;
                None
            }
        }
    }

    /// Takes it out of the step in which the worker in charge was told, if it is there.
    pub(super) fn take_order(&mut self) -> Option<(Bytes, Terms)> {
        match std::mem::replace(&mut self.step, Step::None) {
            Step::Ordered { settings, terms } => Some((settings, terms)),
            other @ (Step::None | Step::Rehearsing { .. } | Step::Succeeding { .. }) => {
                self.step = other;
                None
            }
        }
    }

    /// Somebody wants another program, or a worker other settings: first it is asked whether they would do.
    pub(super) fn begin_handover(&mut self, asked: Option<Asked>) {
        let upgrade = asked.as_ref().is_none_or(|asked| asked.upgrade);
        let refusal = match (&self.ended, &self.step) {
            (Some(_), _) => Some("the gateway is about to stop"),
            (None, Step::None) => None,
            (None, _) => Some(UNDER_WAY),
        };
        if let Some(reason) = refusal {
            tracing::warn!(upgrade, reason, "a handover is refused");
            if let Some(asked) = asked {
                asked.refuse(reason);
            }
            return;
        }
        tracing::info!(upgrade, "a handover is rehearsed");
        let start = self.programs.rehearsal(upgrade);
        let rehearsal = spawn_local(rehearse(Rc::clone(&self.keeper), start));
        self.step = Step::Rehearsing { rehearsal, asked, upgrade };
    }

    /// The rehearsal is over. Nothing has changed until here.
    pub(super) async fn rehearsed(&mut self, result: Result<Bytes, String>) {
        let Step::Rehearsing { asked, upgrade, .. } = std::mem::replace(&mut self.step, Step::None) else {
            return;
        };
        let terms = Terms::begin(upgrade, self.keeper.version());
        let settings = match result {
            Ok(settings) => settings,
            Err(reason) => {
                tracing::warn!(upgrade, reason, "a handover is refused; everything stays as it is");
                let is_attempt = asked.as_ref().is_none_or(|asked| !asked.rehearse_only);
                if let Some(asked) = asked {
                    asked.refuse(&reason);
                }
                if is_attempt {
                    self.keeper.set_handover(Some(terms.not_succeeded(String::new(), reason)));
                }
                return;
            }
        };
        if !upgrade && settings == self.keeper.settings() {
            tracing::info!("the settings are what they were");
            if let Some(asked) = asked {
                asked.refuse(UNCHANGED);
            }
            return;
        }
        if let Some(asked) = asked {
            asked.grant(settings.clone());
            if asked.rehearse_only {
                return;
            }
        }
        self.tell.tell(Stage::HandoverBegun);
        let Some(attended) = &mut self.worker else {
            return self.succeed(settings, terms).await;
        };
        attended.ping_at = None;
        if attended.worker.link.is_ready() {
            attended.worker.link.order_handover();
            attended.kill_at = Some(Instant::now() + self.bounds.handover);
        } else {
            // There is nothing to hand over.
            attended.kill();
        }
        self.step = Step::Ordered { settings, terms };
    }

    /// The worker that was in charge has said its last word on children.
    pub(super) async fn handed_over(&mut self) {
        if self.ended.is_some() {
            // It is to exit anyway.
            return;
        }
        let Some((settings, terms)) = self.take_order() else {
            return;
        };
        if let Some(attended) = self.worker.take() {
            let (connections, closed) = self.keeper.passed().count();
            tracing::info!(worker = attended.worker.number(), connections, closed, "worker has handed over");
            self.leaving.add(attended.worker, self.bounds.leave);
        }
        self.succeed(settings, terms).await;
    }

    /// Nobody is in charge: now the successor is.
    pub(super) async fn succeed(&mut self, settings: Bytes, terms: Terms) {
        if terms.upgrade {
            let not_renewed = self.renew(settings, &terms).await;
            self.not_succeeded(&terms, String::new(), reason_of(&not_renewed));
            self.start_at = self.ended.is_none().then(Instant::now);
            return;
        }
        let previous_settings = self.keeper.replace_settings(settings);
        self.await_successor(previous_settings, terms);
    }

    /// The next worker is the successor.
    pub(super) fn await_successor(&mut self, previous_settings: Bytes, terms: Terms) {
        // What it is told comes true by its getting ready.
        self.keeper.set_handover(Some(terms.succeeded(self.keeper.version())));
        self.step = Step::Succeeding { previous_settings, terms };
        self.start_at = Some(Instant::now());
    }

    /// The successor serves.
    pub(super) fn succeeded(&mut self) {
        let Some((_, terms)) = self.take_succession() else {
            return;
        };
        self.programs.forget_previous();
        let (from, to) = (&terms.from_version, self.keeper.version());
        let ms = terms.lasted().as_millis();
        tracing::info!(upgrade = terms.upgrade, from, to, nobody_accepted_ms = ms, "the handover succeeded");
        self.tell.tell(Stage::HandoverEnded);
    }

    /// The successor does not get ready: everything is put back, once. Should that fail too, workers are tried again
    /// and again, as after a crash.
    pub(super) async fn roll_back(&mut self, reason: String) {
        let Some((previous_settings, terms)) = self.take_succession() else {
            return;
        };
        self.not_succeeded(&terms, self.keeper.version(), reason);
        let settings = self.keeper.replace_settings(previous_settings);
        if terms.upgrade {
            match self.go_back().await {
                NotRenewed::Stopping => {}
                NotRenewed::Failed(error) => {
                    let error = &error as &dyn std::error::Error;
                    tracing::error!(error, "the program before can't be brought back; workers of this one are tried");
                    self.keeper.replace_settings(settings);
                }
            }
        }
        self.start_at = self.ended.is_none().then(Instant::now);
    }

    pub(super) fn not_succeeded(&mut self, terms: &Terms, to_version: String, reason: String) {
        let upgrade = terms.upgrade;
        tracing::warn!(upgrade, reason, "the handover did not succeed; what was before is put back");
        self.keeper.set_handover(Some(terms.not_succeeded(to_version, reason)));
        self.tell.tell(Stage::HandoverEnded);
    }

    pub(super) fn give_up_handover(&mut self, reason: &str) {
        match std::mem::replace(&mut self.step, Step::None) {
            Step::None => {}
            Step::Rehearsing { rehearsal, asked, .. } => {
                rehearsal.abort();
                if let Some(asked) = asked {
                    asked.refuse(reason);
                }
            }
            Step::Ordered { terms, .. } | Step::Succeeding { terms, .. } => {
                self.not_succeeded(&terms, String::new(), reason.to_owned());
            }
        }
    }
}

/// The whole chain in one line.
fn reason_of(error: &NotRenewed) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        text.push_str(&format!(": {error}"));
        cause = error.source();
    }
    text
}
