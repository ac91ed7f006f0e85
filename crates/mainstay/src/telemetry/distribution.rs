//! A histogram that takes no lock: calls of all sessions end in the same one, and must not wait for each other.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use prometheus_client::encoding::{EncodeMetric, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::{MetricType, TypedMetric};

/// Counts of durations by size, and their sum. Clones count into the same.
#[derive(Clone, Debug)]
pub(super) struct Distribution(Arc<Counts>);

#[derive(Debug)]
struct Counts {
    /// The upper bounds in seconds, rising; what is above the last is counted in one more bucket.
    bounds: &'static [f64],
    buckets: Box<[AtomicU64]>,
    sum_us: AtomicU64,
}

impl Distribution {
    /// An empty one with these upper bounds in seconds, which must rise.
    pub(super) fn new(bounds: &'static [f64]) -> Self {
        let buckets = (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect();
        Self(Arc::new(Counts { bounds, buckets, sum_us: AtomicU64::new(0) }))
    }

    /// One of which somebody else has counted each bucket, the last above all bounds, and the sum in microseconds.
    pub(super) fn of(bounds: &'static [f64], counts: &[u64], sum_us: u64) -> Self {
        let buckets = counts.iter().map(|count| AtomicU64::new(*count)).collect();
        Self(Arc::new(Counts { bounds, buckets, sum_us: AtomicU64::new(sum_us) }))
    }

    /// Counts one. Costs a search among the bounds and two relaxed additions; it allocates nothing.
    pub(super) fn observe(&self, took: Duration) {
        let Counts { bounds, buckets, sum_us } = &*self.0;
        let seconds = took.as_secs_f64();
        let bucket = bounds.partition_point(|bound| *bound < seconds);
        buckets[bucket].fetch_add(1, Ordering::Relaxed);
        sum_us.fetch_add(u64::try_from(took.as_micros()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }
}

impl EncodeMetric for Distribution {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> fmt::Result {
        let Counts { bounds, buckets, sum_us } = &*self.0;
        let bounds = bounds.iter().copied().chain([f64::INFINITY]);
        let counted: Vec<_> = bounds.zip(buckets.iter().map(|bucket| bucket.load(Ordering::Relaxed))).collect();
        let count = counted.iter().map(|(_, count)| count).sum();
        let sum = Duration::from_micros(sum_us.load(Ordering::Relaxed)).as_secs_f64();
        encoder.encode_histogram::<NoLabelSet>(sum, count, &counted, None)
    }

    fn metric_type(&self) -> MetricType {
        Self::TYPE
    }
}

impl TypedMetric for Distribution {
    const TYPE: MetricType = MetricType::Histogram;
}

#[cfg(test)]
mod tests {
    use prometheus_client::encoding::text::encode;
    use prometheus_client::registry::Registry;

    use super::*;

    #[test]
    fn o3_buckets_add_up_and_a_bound_is_in_its_own_bucket() {
        let distribution = Distribution::new(&[0.01, 1.0]);
        for millis in [0, 10, 11, 1000, 5000] {
            distribution.observe(Duration::from_millis(millis));
        }
        let mut registry = Registry::default();
        registry.register("took", "How long it took", distribution);
        let mut text = String::new();
        encode(&mut text, &registry).unwrap();
        for line in [
            "took_bucket{le=\"0.01\"} 2",
            "took_bucket{le=\"1.0\"} 4",
            "took_bucket{le=\"+Inf\"} 5",
            "took_count 5",
            "took_sum 6.021",
        ] {
            assert!(text.contains(&format!("{line}\n")), "{line} is not in\n{text}");
        }
    }
}
