//! The black-box harness of Mainstay and its scriptable servers.
//!
//! Everything here is behind a real socket or pipe, and a real process but for [`up_m`] and [`up_v`]. The servers ([`up_h`],
//! [`up_l`], [`up_s`]) share what they serve ([`server`]); nothing here depends on the product's crates: the gateway is known
//! by its binary alone.
//!
//! A test starts upstreams ([`UpH`], [`UpL`], [`UpM`], [`UpP`], [`UpS`], [`UpV`]) and a [`Gateway`] in front of them, and speaks to it
//! as a [`RawClient`], of which every byte is known, or as an [`SdkClient`], a program on a real SDK in a process of its own.

mod binaries;
mod database;
pub mod flags;
mod gateway;
mod ports;
mod procs;
mod programs;
mod proxy;
mod raw;
mod sdk;
pub mod server;
pub mod soak;
mod stateless;
pub mod suite;
pub mod up_h;
pub mod up_l;
pub mod up_m;
pub mod up_p;
pub mod up_s;
pub mod up_v;
mod upstreams;
mod wait;
mod wrapped;

pub use binaries::{mainstay, repository, up_h as up_h_binary, up_p as up_p_binary, up_s as up_s_binary};
pub use database::{Locked, age_streams};
pub use gateway::{Gateway, Setup, Worker};
pub use ports::lasting_port;
pub use procs::{Proc, children, descendants, zombies};
pub use programs::write_program;
pub use proxy::Proxy;
pub use raw::{Ended, Exchange, Outcome, RawClient, SseEvent, SseItem, SseParser};
pub use sdk::{RustClient, SdkClient, SdkKind, SdkSession};
pub use stateless::{Incoming, StatelessClient};
pub use up_l::UpL;
pub use up_m::UpM;
pub use up_p::UpP;
pub use up_v::UpV;
pub use upstreams::{StdioPeer, UpH, UpS};
pub use wait::{stretched, wait_blocking, wait_until, within};
pub use wrapped::Wrapped;
