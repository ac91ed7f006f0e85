//! The journal's numbers: what was kept of streams, what was lost, and how long appending took.

use std::sync::atomic::AtomicU64;
use std::time::Duration;

use mainstay_store::journal::{APPEND_SECONDS, Counters};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};

use super::super::distribution::Distribution;
use super::{Label, signed};

/// Registers what `counters` say.
pub(super) fn register(counters: &Counters, registry: &mut Registry) {
    let lost = Family::<[Label; 1], Counter>::default();
    for (reason, count) in [
        ("crowded", counters.lost_crowded),
        ("full", counters.lost_full),
        ("claimed", counters.lost_claimed),
        ("other", counters.lost_otherwise),
    ] {
        lost.get_or_create_owned(&[("reason", reason.into())]).inc_by(count);
    }
    registry.register("mainstay_journal_lost", "Entries of the journal that were not kept, by why", lost);
    for (name, text, value) in [
        ("mainstay_journal_events", "Events of streams that were kept", counters.events_kept),
        ("mainstay_journal_entries", "Entries that were kept, events among them", counters.entries_kept),
        ("mainstay_journal_batches", "Transactions in which entries were kept", counters.commits),
        ("mainstay_journal_trimmed", "Events that retention removed", counters.events_trimmed),
        ("mainstay_journal_replays", "Pages of events read for clients that came back", counters.replays),
        ("mainstay_journal_rows_refused", "Rows of the journal that were found unreadable", counters.rows_refused),
        ("mainstay_journal_set_aside", "Damaged journals that were set aside", counters.set_aside),
    ] {
        registry.register(name, text, counted(value));
    }
    let text = "Messages that were kept";
    registry.register_with_unit("mainstay_journal_message", text, Unit::Bytes, counted(counters.message_bytes_kept));
    let seconds = Counter::<f64, AtomicU64>::default();
    seconds.inc_by(Duration::from_micros(counters.commit_us).as_secs_f64());
    let text = "How long transactions of the journal took; divided by their number, what one costs";
    registry.register_with_unit("mainstay_journal_commit", text, Unit::Seconds, seconds);
    let text = "How long entries took from when they were handed over until they were durable";
    let appends = Distribution::of(&APPEND_SECONDS, &counters.appends, counters.append_us);
    registry.register_with_unit("mainstay_journal_append", text, Unit::Seconds, appends);
    for (name, text, unit, value) in [
        ("mainstay_journal_queue_depth", "Entries that wait for the journal's writer", None, counters.queue_entries),
        ("mainstay_journal_queue", "How much waits for the journal's writer", Some(Unit::Bytes), counters.queue_bytes),
        ("mainstay_journal_file", "How much of the journal's file is in use", Some(Unit::Bytes), counters.file_bytes),
    ] {
        let gauge = Gauge::<i64>::default();
        gauge.set(signed(value));
        match unit {
            Some(unit) => registry.register_with_unit(name, text, unit, gauge),
            None => registry.register(name, text, gauge),
        }
    }
}

fn counted(value: u64) -> Counter {
    let counter = Counter::default();
    counter.inc_by(value);
    counter
}

#[cfg(test)]
mod tests {
    use prometheus_client::encoding::text::encode_registry;

    use super::*;

    #[test]
    fn o3_the_journal_is_told_in_bounded_series() {
        let mut appends = [0; APPEND_SECONDS.len() + 1];
        (appends[2], appends[APPEND_SECONDS.len()]) = (5, 1);
        let counters = Counters {
            events_kept: 6,
            message_bytes_kept: 700,
            lost_full: 2,
            appends,
            append_us: 3_000_000,
            file_bytes: 8192,
            ..Counters::default()
        };
        let (mut registry, mut text) = (Registry::default(), String::new());
        register(&counters, &mut registry);
        encode_registry(&mut text, &registry).expect("it is written to a string");
        for line in [
            "mainstay_journal_events_total 6",
            "mainstay_journal_message_bytes_total 700",
            "mainstay_journal_lost_total{reason=\"full\"} 2",
            "mainstay_journal_lost_total{reason=\"crowded\"} 0",
            "mainstay_journal_append_seconds_bucket{le=\"0.0003\"} 0",
            "mainstay_journal_append_seconds_bucket{le=\"0.001\"} 5",
            "mainstay_journal_append_seconds_count 6",
            "mainstay_journal_append_seconds_sum 3.0",
            "mainstay_journal_file_bytes 8192",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
        }
    }
}
