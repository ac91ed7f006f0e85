//! The wire as bytes: scanners and encoders that never build a tree and never lose a byte.

pub mod envelope;
pub mod lines;
pub mod method;
pub mod modern;
pub mod sse;
