//! What belongs to no call: the listening stream, notifications, and word of the link to the server.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use mainstay_core::audit::{Action, Actor};
use mainstay_core::call::{EventId, RoutedId};
use mainstay_core::code::Code;
use mainstay_core::id::SessionKey;
use mainstay_core::wire::envelope::{Envelope, Kind, escape, member, notification_message, scan, splice};
use mainstay_core::wire::method::Method;
use mainstay_store::Write;
use mainstay_upstream::{ListsChanged, Notice, Receipt};
use tokio::sync::mpsc;

use crate::engine::arriving::Said;
use crate::engine::call::take_up::event_unknown;
use crate::engine::live::Live;
use crate::engine::stream::{Message, Reader, Source, named};
use crate::engine::{Engine, ListenStream, Refused};
use crate::runtime::spawn;

/// What answers a GET.
pub enum Followed {
    /// The session's listening stream.
    Listening(Reader),
    /// A call's stream, taken up again.
    Resumed(Reader),
    /// The stream is finished and everything of it was sent: 204.
    Finished,
    /// There is no listening stream here: 405.
    NoStream,
}

impl Engine {
    /// Answers a client's GET: the listening stream, or the stream that `last_event_id` is a cursor of (R2, R5).
    ///
    /// # Errors
    /// [`Code::EventUnknown`] if the cursor is malformed or another session's, or of a stream whose call it does not
    /// name.
    pub async fn follow(self: &Arc<Self>, live: &Arc<Live>, last_event_id: Option<&str>) -> Result<Followed, Refused> {
        let Some(cursor) = last_event_id else {
            return Ok(if self.has_listening(live) {
                Followed::Listening(live.listen.read(None, None))
            } else {
                Followed::NoStream
            });
        };
        let (followed, from) = self.follow_again(live, cursor).await;
        self.metrics.stream_resumed(match &followed {
            Ok(Followed::Finished) => "finished",
            Ok(Followed::Listening(_) | Followed::Resumed(_) | Followed::NoStream) => from,
            Err(refused) if refused.code == Code::EventUnknown => "unknown",
            Err(_) => "deferred",
        });
        followed
    }

    /// The stream of a cursor, and where it was found.
    async fn follow_again(
        self: &Arc<Self>,
        live: &Arc<Live>,
        cursor: &str,
    ) -> (Result<Followed, Refused>, &'static str) {
        let Some(event) = EventId::parse(cursor).filter(|event| event.tag == live.key.tag()) else {
            return (Err(event_unknown()), JOURNAL);
        };
        if event.stream.is_listen() {
            let from = if event.stream == live.listen.id() { MEMORY } else { JOURNAL };
            return (self.listen_again(live, event, cursor.to_owned()).await.map(Followed::Listening), from);
        }
        if event.last {
            return (Ok(Followed::Finished), MEMORY);
        }
        let from = if live.stream(event.stream).is_some() { MEMORY } else { JOURNAL };
        (self.come_back(live, event, cursor.to_owned()).await.map(Followed::Resumed), from)
    }

    /// Goes on with listening behind `event`, which may be one of an earlier worker's stream, or of an earlier life of the
    /// session in this one: first comes what the journal has of that, then what has come since.
    async fn listen_again(&self, live: &Arc<Live>, event: EventId, cursor: String) -> Result<Reader, Refused> {
        if event.stream == live.listen.id() && live.listen.is_of_this_life(event.sequence) {
            return self.reader_of(live, &live.listen, &event, cursor).await;
        }
        let (mut events, _) = self.history(live, event.stream, event.sequence, false).await?;
        events.retain(|kept| event.stream != live.listen.id() || !live.listen.is_of_this_life(kept.sequence));
        let backlog = named(live.key.tag(), event.stream, None, &events);
        Ok(live.listen.read(Some(0), Some(cursor)).after(backlog))
    }

    /// Whether anything could ever be sent on the session's listening stream (R5).
    fn has_listening(&self, live: &Live) -> bool {
        let rule = self.servers.get(&live.server.name).map_or(ListenStream::Auto, |served| served.listen_stream);
        match rule {
            ListenStream::Always => true,
            ListenStream::Never => false,
            ListenStream::Auto => {
                let params = live.with_session(|session| session.record().initialize_params.clone());
                let asked_for = declares(&params, &["roots", "sampling", "elicitation"], None);
                let Some(record) = live.link.record() else { return true };
                let result = &record.initialize_result;
                asked_for
                    || declares(result, &["tools", "prompts", "resources"], Some("listChanged"))
                    || declares(result, &["resources"], Some("subscribe"))
                    || declares(result, &["logging"], None)
            }
        }
    }

    /// A message of the server as the client sees it: progress tokens as the client spelled them, questions under an
    /// id that leads back. `None` if it is not for the client. `receipt` is that of a child's question.
    pub(crate) fn server_message(
        self: &Arc<Self>,
        live: &Arc<Live>,
        message: &Bytes,
        envelope: &Envelope,
        receipt: Option<Receipt>,
    ) -> Option<Message> {
        match envelope.kind {
            Kind::Request => self.question(live, message, envelope, receipt),
            Kind::Notification => {
                let method = Method::of(&envelope.method_name(message)?);
                if method == Method::Progress {
                    let span = member(message, envelope.params.as_ref()?, "progressToken")?;
                    let token = RoutedId::decode(&message[span.clone()])?;
                    return Some(Message::passing(splice(message, &[(span, &token.original)])));
                }
                if method == Method::Cancelled {
                    let span = member(message, envelope.params.as_ref()?, "requestId")?;
                    let asked = live.asked_as(&message[span.clone()])?;
                    let original = live.answered(asked)?.question.original;
                    let dressed = RoutedId { stream: asked, original }.encode();
                    return Some(Message::passing(splice(message, &[(span, &dressed)])));
                }
                Some(Message::passing(message.clone()))
            }
            Kind::Result | Kind::Error => None,
        }
    }

    /// A client's notification. A cancellation reaches the one call that it names (R8).
    pub async fn notification(&self, live: &Arc<Live>, message: &Bytes, envelope: &Envelope) {
        let method = envelope.method_name(message).map_or(Method::Other, |name| Method::of(&name));
        match (method, envelope.params.as_ref()) {
            (Method::Initialized, _) => {
                let link = Arc::clone(&live.link);
                shortly(async move { link.confirm().await }).await;
            }
            (Method::Cancelled, Some(params)) => {
                let Some(span) = member(message, params, "requestId") else { return };
                let original = message.slice(span.clone());
                let Some(stream) = live.in_flight(&original) else { return };
                let dressed = RoutedId { stream, original }.encode();
                let (told, message) = (Arc::clone(live), splice(message, &[(span, &dressed)]).into());
                // Neither goes with the connection that it came by, whose client may hang up in this moment.
                let telling = spawn(async move { forward(&told, message).await });
                // A server does not answer what was cancelled; the call must not stay in flight for that.
                let live = Arc::clone(live);
                spawn(async move {
                    tokio::time::sleep(CANCELLED_GRACE).await;
                    live.give_up(stream);
                });
                let _told = telling.await;
            }
            _ => forward(live, message.clone()).await,
        }
    }

    /// Puts what the server says and belongs to no call on the session's listening stream, unless it is on one already.
    pub(super) fn take_said(self: &Arc<Self>, live: &Arc<Live>, said: Said) {
        match said {
            Said::Message { message, frame } => {
                let Ok(envelope) = scan(&message) else { return };
                // A question is known by its id.
                if envelope.kind == Kind::Notification && frame.is_some_and(|frame| live.has_heard(frame)) {
                    return;
                }
                if let Some(message) = self.server_message(live, &message, &envelope, None) {
                    live.listen.push(message.from_source(frame.map(|frame| Source::Frame(frame.number))));
                }
            }
            Said::Question { message, receipt } => {
                let Ok(envelope) = scan(&message) else { return };
                let Some(message) = self.question(live, &message, &envelope, Some(receipt)) else { return };
                if live.link.runs_earlier_calls() {
                    let (engine, live) = (Arc::clone(self), Arc::clone(live));
                    spawn(async move { engine.ask_apart(&live, message).await });
                } else {
                    live.listen.push(message);
                }
            }
        }
    }

    fn notice(self: &Arc<Self>, key: SessionKey, notice: Notice) {
        // What is known of sessions is the next worker's to write.
        if self.has_left() && matches!(notice, Notice::Record(_) | Notice::Remade { .. } | Notice::Opened(_)) {
            return;
        }
        if let Notice::Record(record) = notice {
            self.store.hint(Write::Resume(*record));
            return;
        }
        if let Notice::Owed(owed) = notice {
            self.owe(owed);
            return;
        }
        let there = || self.live.get(&key).map(|live| Arc::clone(&live));
        match notice {
            Notice::Message { message, frame } => self.pass_on(key, Said::Message { message, frame }),
            Notice::Question { message, receipt } => self.pass_on(key, Said::Question { message, receipt }),
            Notice::Remade { reason, lists, noted } => {
                let Some(live) = there() else { return };
                tracing::info!(session = %key.session_ref(), server = %live.server.name, reason = %reason, "upstream session made again");
                self.metrics.remade(&live.server.name);
                let entry = self.audit_entry(Actor::Gateway, Action::Remade, Some(key), &live.server.name, &reason);
                self.store.hint(Write::Audit(entry));
                live.leave_notice(remade_notice(&live, &reason));
                drop(noted);
                self.tell_of_gap(&live);
                if lists != ListsChanged::Same {
                    say_lists_changed(&live);
                }
            }
            Notice::Opened(opened) => {
                let Some(live) = there() else { return };
                self.note_card(&live.server, &opened);
                if live.was_answered_for() {
                    tracing::info!(session = %key.session_ref(), server = %live.server.name, "server is up");
                    say_lists_changed(&live);
                }
            }
            Notice::Record(_) | Notice::Owed(_) => {}
        }
    }
}

/// Passes a notification or a refusal on to the server. Nobody waits for what becomes of it.
pub(super) async fn forward(live: &Arc<Live>, message: Bytes) {
    let live = Arc::clone(live);
    shortly(async move {
        if let Err(failure) = live.link.send(message).await {
            tracing::debug!(session = %live.key.session_ref(), failure = %failure, "a message did not reach the server");
        }
    })
    .await;
}

/// Waits a moment for `task`, so that what the client sends next comes after it; a server that hangs does not make the
/// client hang, and the task goes on.
pub(super) async fn shortly(task: impl Future<Output = ()> + Send + 'static) {
    let _ = tokio::time::timeout(SHORTLY, spawn(task)).await;
}

/// Reads what the links have to say, for as long as the worker lives.
pub async fn attend(engine: Arc<Engine>, mut notices: mpsc::Receiver<(SessionKey, Notice)>) {
    while let Some((key, notice)) = notices.recv().await {
        engine.notice(key, notice);
    }
}

/// Tells the client to list again what the server says can change.
fn say_lists_changed(live: &Arc<Live>) {
    let Some(record) = live.link.record() else { return };
    for list in ["tools", "prompts", "resources"] {
        if declares(&record.initialize_result, &[list], Some("listChanged")) {
            let method = format!("notifications/{list}/list_changed");
            live.listen.push(Message::passing(notification_message(&method, None)));
        }
    }
}

/// What a client is told of an upstream session that was made again: precisely what is lost (U6).
fn remade_notice(live: &Live, reason: &str) -> Bytes {
    let mut notice = br#"{"event":"remade","server":"#.to_vec();
    notice.extend_from_slice(&escape(live.server.name.as_str()));
    notice.extend_from_slice(br#","reason":"#);
    notice.extend_from_slice(&escape(reason));
    notice.extend_from_slice(br#","lost":"state that the server kept in its own session"}"#);
    notice.into()
}

/// Whether `capabilities` in a raw `initialize` params or result has one of `names`, with `flag` true in it if given.
fn declares(message: &[u8], names: &[&str], flag: Option<&str>) -> bool {
    let Some(capabilities) = member(message, &(0..message.len()), "capabilities") else { return false };
    names.iter().any(|name| match (member(message, &capabilities, name), flag) {
        (Some(_), None) => true,
        (Some(span), Some(flag)) => member(message, &span, flag).is_some_and(|span| &message[span] == b"true"),
        (None, _) => false,
    })
}

/// Where a stream was found that a client came back to.
const MEMORY: &str = "memory";
const JOURNAL: &str = "journal";
/// How long a server may still answer a call that was cancelled.
const CANCELLED_GRACE: Duration = Duration::from_secs(5);
/// How long a client waits for a one-way message to be passed on.
pub(super) const SHORTLY: Duration = Duration::from_secs(2);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r5_a_listening_stream_is_offered_where_something_could_be_sent() {
        let result = br#"{"capabilities":{"tools":{"listChanged":true},"logging":{}},"x":1}"#;
        assert!(declares(result, &["tools"], Some("listChanged")));
        assert!(declares(result, &["logging"], None));
        assert!(!declares(result, &["prompts", "resources"], Some("listChanged")));
        assert!(!declares(br#"{"capabilities":{"tools":{}}}"#, &["tools"], Some("listChanged")));
        assert!(!declares(b"{}", &["tools"], None));
    }
}
