//! Times for people.

use std::time::Duration;

use mainstay_core::time::Timestamp;

use crate::runtime::Clock;

/// How long ago the RFC 3339 time `at` was, as `42s`, `7m`, `3h` or `12d`; `-` if it is no time.
pub(super) fn ago(at: &str) -> String {
    match unix_millis(at) {
        Some(millis) => short(Clock::system().now().since(Timestamp::from_unix_millis(millis))),
        None => "-".to_owned(),
    }
}

/// How long it is until the RFC 3339 time `at`, as `in 42s`; `now` if it is over, `-` if it is no time.
pub(super) fn until(at: &str) -> String {
    let Some(millis) = unix_millis(at) else { return "-".to_owned() };
    let left = Timestamp::from_unix_millis(millis).since(Clock::system().now());
    if left.is_zero() { "now".to_owned() } else { format!("in {}", short(left)) }
}

/// The largest whole unit.
fn short(duration: Duration) -> String {
    let seconds = duration.as_secs();
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{}m", seconds / 60),
        3600..86_400 => format!("{}h", seconds / 3600),
        _ => format!("{}d", seconds / 86_400),
    }
}

/// Milliseconds since the Unix epoch of a time as `Timestamp` displays it: `2026-11-30T12:34:56.789Z`.
fn unix_millis(text: &str) -> Option<u64> {
    let (date, time) = text.strip_suffix('Z')?.split_once('T')?;
    let mut date = date.splitn(3, '-').map(|part| part.parse::<u64>().ok());
    let (year, month, day) = (date.next()??, date.next()??, date.next()??);
    let mut time = time.splitn(3, ':');
    let (hour, minute): (u64, u64) = (time.next()?.parse().ok()?, time.next()?.parse().ok()?);
    let (second, millis) = time.next()?.split_once('.')?;
    let (second, millis): (u64, u64) = (second.parse().ok()?, millis.parse().ok()?);
    let days = days_before(year, month, day)?;
    Some((((days * 24 + hour) * 60 + minute) * 60 + second) * 1000 + millis)
}

/// Days from 1970-01-01 to a Gregorian date that is not before it.
fn days_before(year: u64, month: u64, day: u64) -> Option<u64> {
    if !(1970..=9999).contains(&year) || !(1..=12).contains(&month) || !(1..=31).contains(&day) {
        return None;
    }
    // Years that begin in March have their leap day at the end.
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let days = year * 365 + year / 4 - year / 100 + year / 400 + (153 * month + 2) / 5 + day - 1;
    days.checked_sub(719_468)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_timestamp_displays_is_read_back() {
        for millis in [0, 951_782_400_000, 1_796_083_199_999, 1_709_164_800_123] {
            let shown = Timestamp::from_unix_millis(millis).to_string();
            assert_eq!(unix_millis(&shown), Some(millis), "{shown}");
        }
        for text in ["", "2026", "2026-13-01T00:00:00.000Z", "1969-12-31T00:00:00.000Z", "x"] {
            assert_eq!(unix_millis(text), None, "{text}");
        }
        assert_eq!(ago("never"), "-");
        assert_eq!((until("never").as_str(), until("1970-01-01T00:00:00.000Z").as_str()), ("-", "now"));
    }

    #[test]
    fn durations_have_one_unit() {
        for (seconds, text) in [(0, "0s"), (59, "59s"), (60, "1m"), (7199, "1h"), (200_000, "2d")] {
            assert_eq!(short(Duration::from_secs(seconds)), text);
        }
    }
}
