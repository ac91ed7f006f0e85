//! How many live sessions there are, in all and of each principal: what the caps are held against (S12).

use std::collections::BTreeMap;

use mainstay_core::code::Code;
use mainstay_core::limit::Limit;
use mainstay_core::principal::Principal;
use parking_lot::Mutex;

use crate::engine::Refused;

/// The count of live sessions, in memory and in the ledger alike. It is touched when sessions open and end, never by a
/// call.
pub struct Census {
    sessions_max: usize,
    per_principal_max: usize,
    counts: Mutex<Counts>,
}

#[derive(Default)]
struct Counts {
    all: usize,
    of: BTreeMap<Principal, usize>,
}

impl Census {
    /// A census that begins with what the ledger holds.
    pub fn new(sessions_max: usize, per_principal_max: usize, stored: Vec<(Principal, u64)>) -> Self {
        let of: BTreeMap<_, _> = stored
            .into_iter()
            .map(|(principal, count)| (principal, usize::try_from(count).unwrap_or(usize::MAX)))
            .collect();
        let all = of.values().fold(0_usize, |all, count| all.saturating_add(*count));
        Self { sessions_max, per_principal_max, counts: Mutex::new(Counts { all, of }) }
    }

    /// Counts one more session of `principal` in, before it is opened. If it comes to nothing, let it
    /// [leave](Self::leave).
    ///
    /// # Errors
    /// [`Code::LimitReached`], naming the limit. No other session is touched for it.
    pub fn enter(&self, principal: &Principal) -> Result<(), Refused> {
        let mut counts = self.counts.lock();
        let own = counts.of.get(principal).copied().unwrap_or(0);
        let limit = if counts.all >= self.sessions_max {
            Some((Limit::Sessions, self.sessions_max))
        } else if own >= self.per_principal_max {
            Some((Limit::SessionsOfPrincipal, self.per_principal_max))
        } else {
            None
        };
        if let Some((limit, most)) = limit {
            let name = limit.name();
            let text =
                format!("the limit `{name}` of {most} live sessions is reached; end one, or wait until one expires");
            return Err(Refused::at_limit(Code::LimitReached, limit, text));
        }
        counts.all += 1;
        counts.of.insert(principal.clone(), own + 1);
        Ok(())
    }

    /// Counts a session of `principal` out.
    pub fn leave(&self, principal: &Principal) {
        let mut counts = self.counts.lock();
        counts.all = counts.all.saturating_sub(1);
        match counts.of.get_mut(principal) {
            Some(own) if *own > 1 => *own -= 1,
            Some(_) => {
                counts.of.remove(principal);
            }
            None => {}
        }
    }

    /// Live sessions in all.
    pub fn all(&self) -> usize {
        self.counts.lock().all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn s12_caps_hold_for_each_principal_and_for_all_and_free_up_again() {
        let (alice, bob) = (Principal::Agent("alice".into()), Principal::Agent("bob".into()));
        let census = Census::new(3, 2, vec![(alice.clone(), 1)]);
        assert!(census.enter(&alice).is_ok());
        let refused = census.enter(&alice).expect_err("two are the most");
        assert_eq!(refused.code, Code::LimitReached);
        assert!(refused.text.contains("max_per_principal"), "{}", refused.text);
        assert_eq!(refused.limit, Some(Limit::SessionsOfPrincipal));
        assert!(census.enter(&bob).is_ok());
        assert_eq!(census.enter(&bob).expect_err("three in all").limit, Some(Limit::Sessions));
        census.leave(&alice);
        assert!(census.enter(&bob).is_ok());
        assert_eq!(census.all(), 3);
    }
}
