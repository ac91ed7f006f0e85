//! What a modern client listens for, out of what a legacy server says unasked (2026-07-28, Subscriptions).

use std::collections::BTreeSet;

use super::SUBSCRIPTION_ID;
use super::edit;
use crate::wire::envelope::{self, Envelope, Kind, walk};

/// A list that may change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum List {
    /// Of tools.
    Tools,
    /// Of prompts.
    Prompts,
    /// Of resources.
    Resources,
}

impl List {
    const ALL: [Self; 3] = [Self::Tools, Self::Prompts, Self::Resources];

    /// The capability of a server that has it.
    const fn capability(self) -> &'static str {
        match self {
            Self::Tools => "tools",
            Self::Prompts => "prompts",
            Self::Resources => "resources",
        }
    }

    /// The member by which a client asks for word of its changes.
    const fn wish(self) -> &'static str {
        match self {
            Self::Tools => "toolsListChanged",
            Self::Prompts => "promptsListChanged",
            Self::Resources => "resourcesListChanged",
        }
    }

    /// The notification of its change.
    const fn notification(self) -> &'static str {
        match self {
            Self::Tools => "notifications/tools/list_changed",
            Self::Prompts => "notifications/prompts/list_changed",
            Self::Resources => "notifications/resources/list_changed",
        }
    }
}

/// A change that a server tells of unasked.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Change {
    /// Of a list.
    List(List),
    /// Of a resource, by its address.
    Resource(Box<str>),
}

impl Change {
    /// The one that the server's notification `message` tells of; `None` if it tells of something else.
    pub fn of(message: &[u8], envelope: &Envelope) -> Option<Self> {
        let method = envelope.method_name(message).filter(|_| envelope.kind == Kind::Notification)?;
        if method == UPDATED {
            let address = envelope.params.as_ref().and_then(|params| envelope::member(message, params, "uri"));
            let address = address.and_then(|span| envelope::unescape(&message[span])).unwrap_or_default();
            return Some(Self::Resource(address.into()));
        }
        List::ALL.into_iter().find(|list| list.notification() == method).map(Self::List)
    }

    /// The notification of it.
    pub fn notification(&self) -> Vec<u8> {
        match self {
            Self::List(list) => envelope::notification_message(list.notification(), None),
            Self::Resource(address) => {
                let params = [b"{\"uri\":".as_slice(), &envelope::escape(address), b"}"].concat();
                envelope::notification_message(UPDATED, Some(&params))
            }
        }
    }
}

/// What a client wants to hear, or is to hear of that.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wanted {
    /// The lists whose changes.
    pub lists: BTreeSet<List>,
    /// The resources whose updates, by their addresses.
    pub resources: BTreeSet<Box<str>>,
}

impl Wanted {
    /// What the request `message` asks for; `None` if it does not say so as it must. What is not known is not honoured.
    pub fn of(message: &[u8], envelope: &Envelope) -> Option<Self> {
        let asked = envelope::member(message, envelope.params.as_ref()?, "notifications")?;
        if message.get(asked.start) != Some(&b'{') {
            return None;
        }
        let mut wanted = Self::default();
        for (key, value) in walk::members(message, &asked) {
            let key = &message[key];
            let list = List::ALL.into_iter().find(|list| walk::says(key, list.wish()));
            wanted.lists.extend(list.filter(|_| &message[value.clone()] == b"true"));
            if walk::says(key, RESOURCES) {
                let texts = walk::elements(message, &value).filter_map(|span| envelope::unescape(&message[span]));
                wanted.resources.extend(texts.map(|text| text.into_owned().into_boxed_str()));
            }
        }
        Some(wanted)
    }

    /// What of it a server can say that has answered `initialize` with `initialized`.
    #[must_use]
    pub fn offered_by(mut self, initialized: &[u8]) -> Self {
        let has = |capability: &str, flag: &str| {
            let at = ["capabilities", capability, flag]
                .iter()
                .try_fold(0..initialized.len(), |at, name| envelope::member(initialized, &at, name));
            at.is_some_and(|span| &initialized[span] == b"true")
        };
        self.lists.retain(|list| has(list.capability(), "listChanged"));
        if !has("resources", "subscribe") {
            self.resources.clear();
        }
        self
    }

    /// The first message of the stream of the request `id`: what it will hear.
    pub fn acknowledgement(&self, id: &[u8]) -> Vec<u8> {
        let mut changes: Vec<_> = self.lists.iter().map(|list| (list.wish(), edit::Change::Set(b"true"))).collect();
        let addresses: Vec<_> = self.resources.iter().map(|address| envelope::escape(address)).collect();
        let addresses = [b"[".as_slice(), &addresses.join(&b","[..]), b"]"].concat();
        if !self.resources.is_empty() {
            changes.push((RESOURCES, edit::Change::Set(&addresses)));
        }
        let empty = b"{}";
        let honoured = edit::apply(empty, edit::object(empty, &(0..empty.len()), &changes));
        let params = [b"{\"notifications\":".as_slice(), &honoured, b"}"].concat();
        tagged(&envelope::notification_message("notifications/subscriptions/acknowledged", Some(&params)), id)
    }

    /// Whether who wants this is to hear of `change`.
    pub fn hears(&self, change: &Change) -> bool {
        match change {
            Change::List(list) => self.lists.contains(list),
            // A server may name a part of what was subscribed to.
            Change::Resource(address) => self.resources.iter().any(|wanted| {
                address.strip_prefix(&**wanted).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
            }),
        }
    }

    /// That everything that is wanted has changed: for who can't know what it has missed.
    pub fn everything(&self) -> BTreeSet<Change> {
        let lists = self.lists.iter().copied().map(Change::List);
        lists.chain(self.resources.iter().cloned().map(Change::Resource)).collect()
    }
}

/// The notification `message` as one on the stream of the request `id`.
pub fn tagged(message: &[u8], id: &[u8]) -> Vec<u8> {
    let Ok(envelope) = envelope::scan(message) else { return message.to_vec() };
    edit::apply(message, edit::request_meta(message, &envelope, &[(SUBSCRIPTION_ID, edit::Change::Set(id))]))
}

/// The result by which the stream of the request `id` ends in order.
pub fn end(id: &[u8]) -> Vec<u8> {
    let key = envelope::escape(SUBSCRIPTION_ID);
    let result = [b"{\"resultType\":\"complete\",\"_meta\":{".as_slice(), &key, b":", id, b"}}"].concat();
    envelope::result_message(id, &result)
}

const RESOURCES: &str = "resourceSubscriptions";
const UPDATED: &str = "notifications/resources/updated";

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn wanted(notifications: &str) -> Option<Wanted> {
        let message = format!(
            r#"{{"jsonrpc":"2.0","id":1,"method":"subscriptions/listen","params":{{"notifications":{notifications}}}}}"#
        );
        Wanted::of(message.as_bytes(), &envelope::scan(message.as_bytes()).expect("a message"))
    }

    #[test]
    fn e3_only_what_the_server_can_say_is_honoured() {
        let all = wanted(r#"{"toolsListChanged":true,"promptsListChanged":false,"resourcesListChanged":true,"resourceSubscriptions":["a:\u002f","b"],"x":1}"#).expect("wishes");
        let tools = br#"{"capabilities":{"tools":{"listChanged":true},"resources":{"subscribe":true}}}"#;
        let some = all.clone().offered_by(tools);
        let read: Value = serde_json::from_slice(&some.acknowledgement(b"\"i\"")).expect("json");
        assert_eq!(
            read["params"],
            json!({"notifications": {"toolsListChanged": true, "resourceSubscriptions": ["a:/", "b"]}, "_meta": {SUBSCRIPTION_ID: "i"}})
        );
        let none = all.offered_by(b"{}");
        assert_eq!(none, Wanted::default());
        let read: Value = serde_json::from_slice(&none.acknowledgement(b"7")).expect("json");
        assert_eq!(read["params"]["notifications"], json!({}));
        assert_eq!((wanted("[]"), wanted("1")), (None, None));
    }

    #[test]
    fn e3_each_listener_hears_what_it_wants_under_its_own_mark() {
        let wanted = wanted(r#"{"toolsListChanged":true,"resourceSubscriptions":["a:b"]}"#).expect("wishes");
        for (method, params, heard) in [
            ("tools/list_changed", "", true),
            ("prompts/list_changed", "", false),
            ("resources/updated", r#","params":{"uri":"a:b"}"#, true),
            ("resources/updated", r#","params":{"uri":"a:b/c"}"#, true),
            ("resources/updated", r#","params":{"uri":"a:bc"}"#, false),
            ("message", "", false),
        ] {
            let message = format!(r#"{{"jsonrpc":"2.0","method":"notifications/{method}"{params}}}"#);
            let envelope = envelope::scan(message.as_bytes()).expect("a message");
            let change = Change::of(message.as_bytes(), &envelope);
            assert_eq!(change.is_some_and(|change| wanted.hears(&change)), heard, "{message}");
            let read: Value = serde_json::from_slice(&tagged(message.as_bytes(), b"7")).expect("json");
            assert_eq!(read["params"]["_meta"][SUBSCRIPTION_ID], 7);
        }
        let everything = wanted.everything();
        assert_eq!(everything.len(), 2);
        for change in everything {
            let message = change.notification();
            let envelope = envelope::scan(&message).expect("a message");
            assert!(wanted.hears(&change));
            assert_eq!(Change::of(&message, &envelope), Some(change));
        }
        let read: Value = serde_json::from_slice(&end(b"\"i\"")).expect("json");
        assert_eq!(read["result"], json!({"resultType": "complete", "_meta": {SUBSCRIPTION_ID: "i"}}));
    }
}
