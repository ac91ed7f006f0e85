//! What is measured, a file for each part.

pub(crate) mod children;
pub(crate) mod creation;
pub(crate) mod fast;
pub(crate) mod outages;
pub(crate) mod stored;
pub(crate) mod storm;
pub(crate) mod streams;
