//! Numbers compared by their value, whatever their spelling and length: `42.0` is `42`, and 2^60 is not 2^60 + 1.

/// A number in JSON's spelling, as what is the same for all spellings of one value.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Decimal {
    negative: bool,
    /// Without zeros at either end; empty for zero.
    digits: Vec<u8>,
    /// The power of ten of the last digit.
    exponent: i64,
}

impl Decimal {
    /// The number that `text` spells as JSON does (RFC 8259, section 6); `None` if it is none, or out of all proportion.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let (negative, rest) = text.strip_prefix('-').map_or((false, text), |rest| (true, rest));
        let (mantissa, exponent) = rest.split_once(['e', 'E']).unwrap_or((rest, "0"));
        let (whole, fraction) = mantissa.split_once('.').map_or((mantissa, None), |(whole, part)| (whole, Some(part)));
        let digits_only = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        let canonical = whole == "0" || !whole.starts_with('0');
        let exponent_digits = exponent.strip_prefix(['+', '-']).unwrap_or(exponent);
        if !digits_only(whole) || !canonical || !fraction.is_none_or(digits_only) || !digits_only(exponent_digits) {
            return None;
        }
        let exponent = i64::from(exponent.parse::<i32>().ok()?);
        let fraction = fraction.unwrap_or_default();
        let mut digits: Vec<u8> = whole.bytes().chain(fraction.bytes()).skip_while(|digit| *digit == b'0').collect();
        let significant = digits.len();
        while digits.last() == Some(&b'0') {
            digits.pop();
        }
        if digits.is_empty() {
            return Some(Self { negative: false, digits, exponent: 0 });
        }
        let dropped = i64::try_from(significant - digits.len()).ok()?;
        let exponent = exponent - i64::try_from(fraction.len()).ok()? + dropped;
        Some(Self { negative, digits, exponent })
    }

    /// The number in plain decimal digits, if it is a whole one within what JavaScript can tell apart
    /// (2026-07-28, Streamable HTTP, Schema Extension).
    pub(super) fn safe_integer(&self) -> Option<i64> {
        let zeros = usize::try_from(self.exponent).ok().filter(|zeros| self.digits.len() + zeros <= SAFE_DIGITS_MAX)?;
        let digits = self.digits.iter().copied().chain(std::iter::repeat_n(b'0', zeros));
        let magnitude = digits.fold(0_i64, |value, digit| value * 10 + i64::from(digit - b'0'));
        let value = if self.negative { -magnitude } else { magnitude };
        (magnitude <= SAFE_MAX).then_some(value)
    }
}

/// 2^53 - 1.
const SAFE_MAX: i64 = 9_007_199_254_740_991;
const SAFE_DIGITS_MAX: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn e2_numbers_are_compared_by_value() {
        for (a, b, same) in [
            ("42", "42.0", true),
            ("42", "4.2e1", true),
            ("-7", "-70E-1", true),
            ("0", "-0.00e7", true),
            ("42", "-42", false),
            ("1152921504606846976", "1152921504606846977", false),
            ("1e400", "10e399", true),
        ] {
            assert_eq!(Decimal::parse(a).unwrap() == Decimal::parse(b).unwrap(), same, "{a} {b}");
        }
        for none in ["", "-", "01", "1.", ".5", "+1", "1e", "1e+", "0x1", " 1", "1e99999999999", "NaN", "--1", "1e+-1"]
        {
            assert_eq!(Decimal::parse(none), None, "{none:?}");
        }
        for (text, integer) in [
            ("42.0", Some(42)),
            ("-9007199254740991", Some(-9_007_199_254_740_991)),
            ("9007199254740992", None),
            ("1.5", None),
            ("1e3", Some(1000)),
            ("1e17", None),
            ("-0", Some(0)),
        ] {
            assert_eq!(Decimal::parse(text).unwrap().safe_integer(), integer, "{text}");
        }
    }

    proptest! {
        #[test]
        fn e2_every_integer_reads_back(value in -9_007_199_254_740_991_i64..=9_007_199_254_740_991, zeros in 0..5_usize) {
            let plain = Decimal::parse(&value.to_string());
            let long = Decimal::parse(&format!("{value}.{}", "0".repeat(zeros + 1)));
            prop_assert_eq!(&plain, &long);
            prop_assert_eq!(plain.unwrap().safe_integer(), Some(value));
        }
    }
}
