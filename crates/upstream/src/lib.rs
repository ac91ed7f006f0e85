//! Mainstay's way to the servers.
//!
//! This crate reaches: a [`Link`] is one client session's way to one MCP server, over HTTP or to a child that the keeper
//! holds. It recovers what can be recovered, repeats only what cannot be executed twice, and otherwise says precisely
//! what is known ([`Failure::outcome`]). It knows no store and serves nobody: what must be remembered goes out as
//! [`Notice`]s.

pub use call::{Answer, AnswerStream, Call, Incoming, Position};
pub use child::{
    ALLOWED_VARIABLES, ChildCounts, ChildEnd, ChildSeen, Holder, Label, LastFailure, OnDisk, Receipt, ServerMemory,
    Supervised, Why, dismiss, parse_label,
};
pub use contact::Contact;
pub use era::PROBE_BOUND;
pub use failure::{ExitStatus, Failure, Outcome};
pub use handshake::{Handshake, Opened};
pub use link::{Ending, Link, Listening};
pub use modern::{Forwarded, Relay, Relayed, Stateless};
pub use notice::{Frame, ListsChanged, Notice};
pub use server::{Reach, Server, Transport};
pub use settle::{SETTLE_BOUND, Settled, settle};
pub use template::{Environment, Secret, Template, TemplateError};
pub use upstreams::{Counts, Parts, Upstreams};

mod bridge;
mod call;
mod catalogue;
mod child;
mod contact;
mod dialect;
mod dual;
mod ears;
mod era;
mod failure;
mod feed;
mod flight;
mod handshake;
mod http;
mod kept;
mod link;
mod modern;
mod notice;
mod pending;
mod pool;
mod server;
mod settle;
mod task;
mod template;
mod upstreams;
mod wire;
