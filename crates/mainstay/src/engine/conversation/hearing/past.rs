//! What has changed in a conversation so far, for those who come to listen later.

use std::collections::BTreeSet;

use mainstay_core::wire::modern::hearing::{Change, Wanted};

/// The changes that were told of since a conversation has been in memory.
///
/// Who comes to listen says nothing of when it last did. So each is told all of what it wants here, once: who has heard
/// it before looks again at something that it knows, and nobody misses anything.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Past {
    Known(BTreeSet<Change>),
    /// Anything may have changed.
    Unknown,
}

impl Past {
    /// That of a conversation that begins.
    pub(super) const fn none() -> Self {
        Self::Known(BTreeSet::new())
    }

    /// Notes that there was `change`.
    pub(super) fn note(&mut self, change: Change) {
        let Self::Known(changes) = self else { return };
        let is_long = matches!(&change, Change::Resource(address) if address.len() > ADDRESS_BYTES_MAX);
        changes.insert(change);
        if is_long || changes.len() > CHANGES_MAX {
            *self = Self::Unknown;
        }
    }

    /// What of it who wants `wanted` is to be told.
    pub(super) fn of(&self, wanted: &Wanted) -> BTreeSet<Change> {
        match self {
            Self::Known(changes) => changes.iter().filter(|change| wanted.hears(change)).cloned().collect(),
            Self::Unknown => wanted.everything(),
        }
    }
}

/// How many changes are remembered apart, and the longest address among them: of more, and of longer ones, it is only
/// remembered that there were some.
const CHANGES_MAX: usize = 256;
const ADDRESS_BYTES_MAX: usize = 1024;

#[cfg(test)]
mod tests {
    use mainstay_core::wire::modern::hearing::List;

    use super::*;

    fn resource(address: &str) -> Change {
        Change::Resource(address.into())
    }

    #[test]
    fn e4_each_is_told_once_what_it_wants_of_the_past_and_all_of_it_once_that_is_too_much() {
        let mut past = Past::none();
        let (lists, resources) = (BTreeSet::from([List::Tools]), BTreeSet::from(["a:".into(), "c:".into()]));
        let wanted = Wanted { lists, resources };
        assert!(past.of(&wanted).is_empty());
        for change in [resource("a:"), resource("a:"), resource("b:"), Change::List(List::Prompts)] {
            past.note(change);
        }
        for _ in 0..2 {
            assert_eq!(past.of(&wanted), BTreeSet::from([resource("a:")]));
        }
        (0..CHANGES_MAX).for_each(|number| past.note(resource(&number.to_string())));
        assert_eq!((&past, past.of(&wanted)), (&Past::Unknown, wanted.everything()));
        let mut past = Past::none();
        past.note(resource(&"a".repeat(ADDRESS_BYTES_MAX + 1)));
        assert_eq!(past, Past::Unknown);
    }
}
