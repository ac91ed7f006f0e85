//! Latencies by the million in a fixed space: buckets that grow with what they hold, as in an HDR histogram.

use std::time::Duration;

/// Counts of durations. No value is off by more than one part in 128, whatever its size.
#[derive(Debug, Clone)]
pub(crate) struct Histogram {
    counts: Vec<u64>,
    total: u64,
}

impl Default for Histogram {
    fn default() -> Histogram {
        Histogram { counts: vec![0; BUCKETS], total: 0 }
    }
}

impl Histogram {
    /// Adds one duration.
    pub(crate) fn record(&mut self, taken: Duration) {
        let nanos = u64::try_from(taken.as_nanos()).unwrap_or(u64::MAX);
        if let Some(count) = self.counts.get_mut(bucket(nanos)) {
            *count += 1;
            self.total += 1;
        }
    }

    /// Adds everything that another one holds.
    pub(crate) fn merge(&mut self, other: &Histogram) {
        for (count, more) in self.counts.iter_mut().zip(&other.counts) {
            *count += more;
        }
        self.total += other.total;
    }

    /// How many durations there are.
    pub(crate) fn total(&self) -> u64 {
        self.total
    }

    /// The duration in microseconds that so many of a thousand do not exceed; 0 if there is none.
    pub(crate) fn micros_at(&self, per_mille: u64) -> f64 {
        let wanted = (self.total * per_mille).div_ceil(1000).max(1);
        let mut seen = 0;
        for (bucket, count) in self.counts.iter().enumerate() {
            seen += count;
            if seen >= wanted {
                return middle(bucket) / 1000.0;
            }
        }
        0.0
    }
}

/// Values below 128 have a bucket each; from there on each doubling has 128 of them.
fn bucket(nanos: u64) -> usize {
    let magnitude = (u64::BITS - 1).saturating_sub(nanos.leading_zeros()).saturating_sub(SUB_BITS);
    let within = usize::try_from(nanos >> magnitude).unwrap_or(usize::MAX);
    (magnitude as usize) * SUB_BUCKETS + within
}

/// The middle of what a bucket holds, in nanoseconds.
fn middle(bucket: usize) -> f64 {
    let magnitude = (bucket / SUB_BUCKETS).saturating_sub(1);
    let within = bucket - magnitude * SUB_BUCKETS;
    let width = 2_f64.powi(i32::try_from(magnitude).unwrap_or(i32::MAX));
    if magnitude == 0 { within as f64 } else { (within as f64 + 0.5) * width }
}

const SUB_BITS: u32 = 7;
const SUB_BUCKETS: usize = 1 << SUB_BITS;
/// The largest magnitude is 64 - 1 - 7; its values lie below twice the sub-buckets.
const BUCKETS: usize = (u64::BITS - SUB_BITS + 1) as usize * SUB_BUCKETS;

#[cfg(test)]
mod tests {
    use super::{BUCKETS, Histogram, bucket, middle};
    use std::time::Duration;

    #[test]
    fn every_duration_finds_a_bucket_that_is_close_to_it() {
        let mut nanos = 1_u64;
        while nanos < u64::MAX / 3 {
            for value in [nanos - 1, nanos, nanos + 1] {
                let at = bucket(value);
                assert!(at < BUCKETS, "{value}");
                let off = (middle(at) - value as f64).abs();
                assert!(off <= (value as f64 / 128.0).max(0.5), "{value} is taken for {}", middle(at));
            }
            nanos = nanos * 3 / 2 + 1;
        }
        assert!(bucket(u64::MAX) < BUCKETS);
    }

    #[test]
    fn quantiles_are_those_of_what_was_recorded() {
        let mut one = Histogram::default();
        let mut other = Histogram::default();
        for micros in 1..=500 {
            one.record(Duration::from_micros(micros));
            other.record(Duration::from_micros(500 + micros));
        }
        one.merge(&other);
        assert_eq!(one.total(), 1000);
        for (per_mille, micros) in [(500, 500.0), (990, 990.0), (1000, 1000.0)] {
            let off = (one.micros_at(per_mille) - micros).abs();
            assert!(off < micros / 100.0, "{} for {micros}", one.micros_at(per_mille));
        }
        assert!(Histogram::default().micros_at(500).abs() < f64::EPSILON);
    }
}
