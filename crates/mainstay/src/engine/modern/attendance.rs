//! How many stateless requests each principal has under way, and how many streams it listens to: what the caps are held
//! against (S12).
//!
//! Only this worker's are counted. Those of an earlier one end with it, or are ended when it gives way.

use std::sync::Arc;

use dashmap::DashMap;
use mainstay_core::code::Code;
use mainstay_core::limit::Limit;
use mainstay_core::principal::Principal;

use crate::engine::Refused;

/// The counts. Two principals do not wait for each other, but for the moment that a shard of the table takes.
pub struct Attendance {
    requests_max: usize,
    listens_max: usize,
    counts: Arc<DashMap<Principal, Counts>>,
}

/// What is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stay {
    /// A request, until its answer has gone out or its client has left.
    Request,
    /// A stream that is listened to, until either side ends it.
    Listen,
}

#[derive(Default)]
struct Counts {
    requests: usize,
    listens: usize,
}

impl Counts {
    const fn of(&mut self, stay: Stay) -> &mut usize {
        match stay {
            Stay::Request => &mut self.requests,
            Stay::Listen => &mut self.listens,
        }
    }
}

/// One that is counted, until it is dropped.
pub struct Attending {
    counts: Arc<DashMap<Principal, Counts>>,
    principal: Principal,
    stay: Stay,
}

impl Drop for Attending {
    fn drop(&mut self) {
        if let Some(mut counts) = self.counts.get_mut(&self.principal) {
            let count = counts.of(self.stay);
            *count = count.saturating_sub(1);
        }
        self.counts.remove_if(&self.principal, |_, counts| counts.requests == 0 && counts.listens == 0);
    }
}

impl Attendance {
    /// Nobody is there yet, and so many requests and listened streams of one principal may be.
    pub fn new(requests_max: usize, listens_max: usize) -> Self {
        Self { requests_max, listens_max, counts: Arc::default() }
    }

    /// Counts one more of `principal`.
    ///
    /// # Errors
    /// [`Code::LimitReached`], naming the limit. Nobody else's is ended for it.
    pub fn enter(&self, principal: &Principal, stay: Stay) -> Result<Attending, Refused> {
        let (limit, most) = match stay {
            Stay::Request => (Limit::StatelessRequests, self.requests_max),
            Stay::Listen => (Limit::Listens, self.listens_max),
        };
        let mut counts = self.counts.entry(principal.clone()).or_default();
        let count = counts.of(stay);
        if *count >= most {
            let what = match stay {
                Stay::Request => "requests in flight are reached; wait until one is answered",
                Stay::Listen => "streams that are listened to are reached; close one",
            };
            let text = format!("the limit `{}` of {most} {what}", limit.name());
            return Err(Refused::at_limit(Code::LimitReached, limit, text));
        }
        *count += 1;
        drop(counts);
        Ok(Attending { counts: Arc::clone(&self.counts), principal: principal.clone(), stay })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn s12_each_principal_has_its_own_caps_which_free_up_with_what_was_counted() {
        let (alice, bob) = (Principal::Agent("alice".into()), Principal::Agent("bob".into()));
        let attendance = Attendance::new(2, 1);
        let first = attendance.enter(&alice, Stay::Request).expect("one");
        let _second = attendance.enter(&alice, Stay::Request).expect("two");
        let refused = attendance.enter(&alice, Stay::Request).err().expect("two are the most");
        assert_eq!((refused.code, refused.limit), (Code::LimitReached, Some(Limit::StatelessRequests)));
        let listening = attendance.enter(&alice, Stay::Listen).expect("a stream is none of them");
        let refused = attendance.enter(&alice, Stay::Listen).err().expect("one is the most");
        assert!(refused.text.contains("limits.listens_per_principal"), "{}", refused.text);
        let others = attendance.enter(&bob, Stay::Request).expect("another principal");
        drop((first, listening));
        attendance.enter(&alice, Stay::Request).expect("there is room again");
        attendance.enter(&alice, Stay::Listen).expect("there is room again");
        drop(others);
        assert!(!attendance.counts.contains_key(&bob), "nothing is kept of who has left");
    }
}
