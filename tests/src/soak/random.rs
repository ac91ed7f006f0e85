//! Random numbers that a seed repeats.

use std::time::Duration;

/// A sequence of numbers that depends on its seed alone (SplitMix64).
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// The sequence of this seed.
    #[must_use]
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }

    /// A number of the range, which must not be empty.
    pub fn within(&mut self, range: std::ops::Range<u64>) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        range.start + (mixed ^ (mixed >> 31)) % (range.end - range.start)
    }

    /// A duration of whole milliseconds between two.
    pub fn millis(&mut self, range: std::ops::Range<u64>) -> Duration {
        Duration::from_millis(self.within(range))
    }
}

#[cfg(test)]
mod tests {
    use super::Random;

    #[test]
    fn a_seed_repeats_its_sequence_and_stays_within_the_range() {
        let (mut one, mut same) = (Random::new(7), Random::new(7));
        for _ in 0..1000 {
            let number = one.within(5..25);
            assert_eq!(number, same.within(5..25));
            assert!((5..25).contains(&number));
        }
        assert_ne!(Random::new(8).within(0..u64::MAX), Random::new(9).within(0..u64::MAX));
    }
}
