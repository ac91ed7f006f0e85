//! The black-box harness of Mainstay and its scriptable servers.
//!
//! Everything here is a real process behind a real socket or pipe. The two servers ([`up_h`], [`up_s`]) share what they
//! serve ([`server`]); nothing here depends on the product's crates: the gateway is known by its binary alone.

pub mod flags;
pub mod server;
pub mod up_h;
pub mod up_s;
