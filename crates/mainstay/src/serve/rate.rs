//! How often one peer may open sessions (S12): a token bucket for each, looked at by `initialize` alone.
//!
//! The buckets are this worker's and in memory: its successor begins with full ones.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use mainstay_core::time::Timestamp;
use parking_lot::Mutex;

/// The buckets of all peers. Each holds as many openings as a peer may make within a minute, and fills up at that rate.
#[derive(Debug)]
pub struct Rate {
    /// How long a bucket takes to gain one opening, in microseconds; zero if nothing is limited.
    gain_us: u64,
    /// How long an empty bucket takes to be full.
    fill_us: u64,
    buckets: Mutex<Buckets>,
}

/// When each bucket is full, in microseconds of Unix time; by peer, and by time, so that the idlest is found at once.
#[derive(Debug, Default)]
struct Buckets {
    full_at: BTreeMap<Peer, u64>,
    idlest: BTreeSet<(u64, Peer)>,
}

/// Who counts as one: an IPv4 address, or the network of an IPv6 address, since a host may take any address within.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Peer {
    V4(Ipv4Addr),
    /// The upper half: a /64.
    V6(u64),
}

impl Rate {
    /// Buckets of `per_minute` openings; 0 limits nothing.
    pub fn new(per_minute: u32) -> Self {
        let gain_us = MINUTE_US.checked_div(u64::from(per_minute)).unwrap_or(0);
        Self { gain_us, fill_us: gain_us * u64::from(per_minute), buckets: Mutex::default() }
    }

    /// Takes one opening out of the bucket of `address`. A peer that was never seen has a full one, however many others
    /// there are: past `PEERS_MAX` the bucket that is nearest to being full is forgotten.
    ///
    /// # Errors
    /// How long it is until there is one, if the bucket is empty.
    pub fn take(&self, address: IpAddr, now: Timestamp) -> Result<(), Duration> {
        if self.gain_us == 0 {
            return Ok(());
        }
        let (peer, now_us) = (Peer::of(address), now.unix_millis().saturating_mul(1000));
        let mut buckets = self.buckets.lock();
        let before = buckets.full_at.get(&peer).copied();
        let full_at = before.unwrap_or(0).max(now_us).saturating_add(self.gain_us);
        let short_us = full_at.saturating_sub(now_us).saturating_sub(self.fill_us);
        if short_us > 0 {
            return Err(Duration::from_micros(short_us));
        }
        buckets.set(peer, before, full_at);
        Ok(())
    }
}

impl Buckets {
    fn set(&mut self, peer: Peer, before: Option<u64>, full_at: u64) {
        if let Some(before) = before {
            self.idlest.remove(&(before, peer));
        } else if self.full_at.len() >= PEERS_MAX
            && let Some((_, idlest)) = self.idlest.pop_first()
        {
            self.full_at.remove(&idlest);
        }
        self.full_at.insert(peer, full_at);
        self.idlest.insert((full_at, peer));
    }
}

impl Peer {
    fn of(address: IpAddr) -> Self {
        match address.to_canonical() {
            IpAddr::V4(address) => Self::V4(address),
            IpAddr::V6(address) => {
                let [a, b, c, d, ..] = address.segments();
                Self::V6([a, b, c, d].into_iter().fold(0, |bits, segment| bits << 16 | u64::from(segment)))
            }
        }
    }
}

const MINUTE_US: u64 = 60_000_000;
/// How many peers are told apart at a time. One takes about 100 bytes.
const PEERS_MAX: usize = 65_536;

#[cfg(test)]
mod tests {
    use super::*;

    /// One line a request: peer, time in milliseconds, and after how many milliseconds it may come again, 0 if at once.
    fn check(per_minute: u32, script: &[(&str, u64, u64)]) {
        let rate = Rate::new(per_minute);
        for (line, (peer, at, wait)) in script.iter().enumerate() {
            let taken = rate.take(peer.parse().unwrap(), Timestamp::from_unix_millis(1_000_000 + at));
            let expected = if *wait == 0 { Ok(()) } else { Err(Duration::from_millis(*wait)) };
            assert_eq!(taken, expected, "line {line}: {peer} at {at}");
        }
    }

    #[test]
    fn s12_a_bucket_gives_what_it_holds_and_then_one_after_the_other() {
        check(
            3,
            &[
                ("192.0.2.1", 0, 0),
                ("192.0.2.1", 0, 0),
                ("192.0.2.1", 0, 0),
                ("192.0.2.1", 0, 20_000),
                // Being refused costs nothing.
                ("192.0.2.1", 5_000, 15_000),
                ("192.0.2.1", 19_999, 1),
                ("192.0.2.1", 20_000, 0),
                ("192.0.2.1", 20_000, 20_000),
                // It is full after a minute, and never holds more.
                ("192.0.2.1", 500_000, 0),
                ("192.0.2.1", 500_000, 0),
                ("192.0.2.1", 500_000, 0),
                ("192.0.2.1", 500_000, 20_000),
            ],
        );
    }

    #[test]
    fn s12_peers_have_buckets_of_their_own_and_one_network_is_one_peer() {
        check(
            1,
            &[
                ("192.0.2.1", 0, 0),
                ("192.0.2.2", 0, 0),
                ("::ffff:192.0.2.1", 0, 60_000),
                ("2001:db8:0:1::1", 0, 0),
                ("2001:db8:0:1:ffff::2", 0, 60_000),
                ("2001:db8:0:2::1", 0, 0),
                ("192.0.2.1", 59_999, 1),
                ("192.0.2.1", 60_000, 0),
            ],
        );
    }

    #[test]
    fn s12_zero_limits_nothing_and_a_clock_that_stands_still_gives_no_more_than_the_bucket() {
        let at = Timestamp::from_unix_millis(1);
        let peer = IpAddr::V4(Ipv4Addr::LOCALHOST);
        let open = Rate::new(0);
        assert!((0..1000).all(|_| open.take(peer, at).is_ok()));
        for per_minute in [1, 7, 59, 60, 1000, 60_000, 1_000_000] {
            let rate = Rate::new(per_minute);
            let taken = (0..per_minute.min(70_000) + 10).filter(|_| rate.take(peer, at).is_ok()).count();
            assert_eq!(taken, (per_minute.min(70_000) + if per_minute > 70_000 { 10 } else { 0 }) as usize);
        }
    }

    #[test]
    fn s12_a_full_table_forgets_the_idlest_and_refuses_no_stranger() {
        let rate = Rate::new(2);
        let at = Timestamp::from_unix_millis;
        let greedy: IpAddr = "192.0.2.1".parse().unwrap();
        assert!(rate.take(greedy, at(0)).is_ok() && rate.take(greedy, at(0)).is_ok());
        let stranger = |number: usize| IpAddr::V4(Ipv4Addr::from_bits(0x0a00_0000 + u32::try_from(number).unwrap()));
        for number in 0..2 * PEERS_MAX {
            assert_eq!(rate.take(stranger(number), at(1)), Ok(()));
        }
        let buckets = rate.buckets.lock();
        assert_eq!((buckets.full_at.len(), buckets.idlest.len()), (PEERS_MAX, PEERS_MAX));
        drop(buckets);
        assert!(rate.take(greedy, at(2)).is_err(), "whoever took the most is remembered");
    }
}
