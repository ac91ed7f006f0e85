//! A keeper that is renewed, with real processes. This test binary plays the keeper: [`probe`] starts it again, and
//! [`play`] executes it in its own place.

mod course;
mod play;
mod probe;
mod refused;
