//! What several rounds come to: a median, and how far they lie apart.

use serde_json::{Value, json};

/// The figures of all rounds of one measurement, as one.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Spread {
    /// The one in the middle.
    pub(crate) median: f64,
    /// The lowest.
    pub(crate) low: f64,
    /// The highest.
    pub(crate) high: f64,
    /// How many there were.
    pub(crate) rounds: usize,
}

impl Spread {
    /// Of these figures; all zero if there are none.
    pub(crate) fn of(figures: &[f64]) -> Spread {
        let mut sorted: Vec<f64> = figures.iter().copied().filter(|figure| figure.is_finite()).collect();
        sorted.sort_by(f64::total_cmp);
        let at = |index: usize| sorted.get(index).copied().unwrap_or(0.0);
        let last = sorted.len().saturating_sub(1);
        Spread { median: (at(last / 2) + at(last.div_ceil(2))) / 2.0, low: at(0), high: at(last), rounds: sorted.len() }
    }

    /// One figure that was measured once.
    pub(crate) fn once(figure: f64) -> Spread {
        Spread::of(&[figure])
    }

    /// The spread of the ratio of two targets, round by round: both met the same moment of the machine.
    pub(crate) fn of_ratios(figures: &[f64], yardstick: &[f64]) -> Spread {
        let ratios: Vec<f64> = figures.iter().zip(yardstick).map(|(figure, yardstick)| figure / yardstick).collect();
        Spread::of(&ratios)
    }

    pub(crate) fn json(&self) -> Value {
        json!({"median": round(self.median), "low": round(self.low), "high": round(self.high), "rounds": self.rounds})
    }
}

/// Four digits behind the point are more than any of this is worth.
pub(crate) fn round(figure: f64) -> f64 {
    (figure * 10_000.0).round() / 10_000.0
}

#[cfg(test)]
mod tests {
    use super::Spread;

    #[test]
    fn the_median_is_the_middle_and_the_ends_are_shown() {
        let spread = Spread::of(&[3.0, 1.0, 2.0, f64::NAN]);
        assert_eq!(spread, Spread { median: 2.0, low: 1.0, high: 3.0, rounds: 3 });
        assert!((Spread::of(&[1.0, 2.0]).median - 1.5).abs() < f64::EPSILON);
        assert_eq!(Spread::of(&[]).rounds, 0);
        assert!((Spread::of_ratios(&[2.0, 9.0], &[1.0, 3.0]).median - 2.5).abs() < f64::EPSILON);
    }
}
