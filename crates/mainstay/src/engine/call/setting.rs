//! What a session has set at its server: its log level and its subscriptions, to be set again after a loss (C5, U4).

use std::sync::Arc;

use bytes::Bytes;
use mainstay_core::call::{RoutedId, StreamId};
use mainstay_core::id::SessionKey;
use mainstay_core::wire::envelope::{escape, request_message};
use mainstay_core::wire::method::Method;
use mainstay_upstream::Call;

use super::Request;
use crate::engine::Engine;
use crate::engine::live::Live;
use crate::runtime::spawn;

/// A session setting that a request changes, to be remembered once the server agreed to it (C5, U4).
#[derive(Clone)]
pub(crate) enum Setting {
    Level(Box<str>),
    Subscribe(Box<str>),
    Unsubscribe(Box<str>),
}

impl Setting {
    /// The one that a request of `method` changes to `value`; `None` if it changes none.
    pub(crate) fn of(method: Method, value: Option<&str>) -> Option<Self> {
        let make: fn(Box<str>) -> Self = if method == Method::SetLevel {
            Self::Level
        } else if method == Method::Subscribe {
            Self::Subscribe
        } else if method == Method::Unsubscribe {
            Self::Unsubscribe
        } else {
            return None;
        };
        value.map(|value| make(value.into()))
    }

    /// Whether requests of `method` change one.
    pub(super) const fn is_changed_by(method: Method) -> bool {
        matches!(method, Method::SetLevel | Method::Subscribe | Method::Unsubscribe)
    }

    /// Has the way to the server remember it: the server has agreed.
    pub(super) fn remember(self, live: &Live) {
        match self {
            Self::Level(level) => live.link.remember_level(level),
            Self::Subscribe(uri) => live.link.remember_subscription(uri),
            Self::Unsubscribe(uri) => live.link.forget_subscription(&uri),
        }
    }

    /// The request that changes it, under the raw id `id`.
    fn request(&self, id: Bytes) -> Call {
        let (method, name, key, value) = match self {
            Self::Level(level) => (Method::SetLevel, "logging/setLevel", "level", level),
            Self::Subscribe(uri) => (Method::Subscribe, "resources/subscribe", "uri", uri),
            Self::Unsubscribe(uri) => (Method::Unsubscribe, "resources/unsubscribe", "uri", uri),
        };
        let params = [b"{\"", key.as_bytes(), b"\":", &escape(value), b"}"].concat();
        Call { message: request_message(&id, name, Some(&params)).into(), id, method, name: None }
    }

    /// What `request` names: a tool, a prompt, or the value of a setting.
    pub(super) fn named_by(request: &Request) -> Option<Box<str>> {
        let keys = [
            (Method::ToolsCall, "name"),
            (Method::PromptsGet, "name"),
            (Method::SetLevel, "level"),
            (Method::Subscribe, "uri"),
            (Method::Unsubscribe, "uri"),
        ];
        let (_, key) = keys.into_iter().find(|(method, _)| *method == request.method)?;
        request.param(key)
    }
}

impl Engine {
    /// Remembers a setting of the session to which the server has agreed at an earlier worker.
    pub(crate) fn adopt_setting(self: &Arc<Self>, live: &Arc<Live>, setting: Setting) {
        setting.clone().remember(live);
        if !live.link.is_connection() {
            return;
        }
        // This worker's connection is another session of the server's, which was opened before that was known.
        let id = RoutedId { stream: self.next_streams(1), original: Bytes::from_static(b"0") };
        let (live, call) = (Arc::clone(live), setting.request(id.encode().into()));
        spawn(async move {
            if let Err(failure) = live.link.call(call).await {
                tracing::debug!(session = %live.key.session_ref(), failure = %failure, "a setting could not be set again");
            }
        });
    }

    /// Notes that the server has agreed to the setting that the call `stream` changes, while this worker gives way: the next
    /// one is told.
    pub(super) fn note_agreed(&self, session: SessionKey, stream: StreamId) {
        if self.hands_over() {
            self.agreed.lock().insert((session, stream));
        }
    }
}
