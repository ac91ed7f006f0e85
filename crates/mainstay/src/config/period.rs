//! Durations as people write them: `20ms`, `5s`, `30m`, `24h`, `7d`, `0`, `never`.

use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{Deserialize, Deserializer, Unexpected, Visitor};
use serde::{Serialize, Serializer};

/// A duration of the configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Period {
    /// It does not end.
    Never,
    /// It ends.
    Of(Duration),
}

impl Period {
    /// The duration, `None` for never.
    pub(super) const fn finite(self) -> Option<Duration> {
        match self {
            Self::Never => None,
            Self::Of(duration) => Some(duration),
        }
    }
}

impl From<Option<Duration>> for Period {
    fn from(finite: Option<Duration>) -> Self {
        finite.map_or(Self::Never, Self::Of)
    }
}

impl FromStr for Period {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "never" => return Ok(Self::Never),
            "0" => return Ok(Self::Of(Duration::ZERO)),
            _ => {}
        }
        let unit_at = text.find(|symbol: char| !symbol.is_ascii_digit()).unwrap_or(text.len());
        let (digits, unit) = text.split_at(unit_at);
        let millis_each = UNITS.iter().find(|(name, _)| *name == unit).map(|(_, millis)| *millis);
        let millis = digits.parse::<u64>().ok().zip(millis_each).and_then(|(count, each)| count.checked_mul(each));
        match millis {
            Some(millis) if millis <= PERIOD_MILLIS_MAX => Ok(Self::Of(Duration::from_millis(millis))),
            _ => Err(format!("`{text}` is no duration ({EXPECTED})")),
        }
    }
}

impl fmt::Display for Period {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self::Of(duration) = self else {
            return f.write_str("never");
        };
        let millis = duration.as_millis();
        if millis == 0 {
            return f.write_str("0");
        }
        let largest = UNITS.iter().rev().find(|(_, each)| millis.is_multiple_of(u128::from(*each)));
        let (unit, each) = largest.copied().unwrap_or(("ms", 1));
        write!(f, "{}{unit}", millis / u128::from(each))
    }
}

impl Serialize for Period {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Period {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(PeriodVisitor)
    }
}

struct PeriodVisitor;

impl Visitor<'_> for PeriodVisitor {
    type Value = Period;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(EXPECTED)
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Period, E> {
        text.parse().map_err(E::custom)
    }

    fn visit_i64<E: serde::de::Error>(self, number: i64) -> Result<Period, E> {
        match number {
            0 => Ok(Period::Of(Duration::ZERO)),
            other => Err(E::invalid_type(Unexpected::Signed(other), &self)),
        }
    }
}

impl JsonSchema for Period {
    fn schema_name() -> Cow<'static, str> {
        "Period".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "type": "string",
            "description": "A duration: `20ms`, `5s`, `30m`, `24h`, `7d`, `0` or `never`.",
            "pattern": "^([0-9]+(ms|s|m|h|d)|0|never)$",
        })
    }
}

/// Ascending, so that the last one that divides a duration is the largest.
const UNITS: &[(&str, u64)] = &[("ms", 1), ("s", 1000), ("m", 60_000), ("h", 3_600_000), ("d", 86_400_000)];
/// A century: longer ones are mistakes, and deadlines stay far from overflow.
const PERIOD_MILLIS_MAX: u64 = 100 * 366 * 86_400_000;
const EXPECTED: &str = "a duration such as \"20ms\", \"5s\", \"30m\", \"24h\", \"7d\", \"0\" or \"never\"";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_spellings_of_the_design_are_read_and_written_alike() {
        for (text, millis) in
            [("20ms", 20), ("5s", 5000), ("30m", 1_800_000), ("24h", 86_400_000), ("7d", 604_800_000), ("0", 0)]
        {
            let period: Period = text.parse().unwrap();
            assert_eq!(period, Period::Of(Duration::from_millis(millis)), "{text}");
        }
        assert_eq!("never".parse::<Period>().unwrap(), Period::Never);
        for text in ["20ms", "5s", "30m", "23h", "7d", "0", "never", "90s"] {
            assert_eq!(text.parse::<Period>().unwrap().to_string(), text);
        }
        assert_eq!("24h".parse::<Period>().unwrap().to_string(), "1d");
    }

    #[test]
    fn what_is_no_duration_is_refused_with_examples() {
        for text in ["", "5", "s", "5 s", "-5s", "5w", "1.5h", "99999999999999999999d", "40000d", "ever"] {
            let refusal = text.parse::<Period>().unwrap_err();
            assert!(refusal.contains("\"20ms\""), "{text}: {refusal}");
        }
    }
}
