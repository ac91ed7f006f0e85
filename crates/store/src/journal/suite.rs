//! What every journal must do: one suite, run in memory and on a file.

use mainstay_core::call::StreamId;
use mainstay_core::time::Timestamp;

pub(super) fn at(seconds: u64) -> Timestamp {
    Timestamp::from_unix_millis(1_700_000_000_000 + seconds * 1000)
}

pub(super) fn stream(number: u64) -> StreamId {
    StreamId { epoch: 3, number }
}

pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
