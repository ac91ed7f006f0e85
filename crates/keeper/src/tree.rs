//! Process trees: who belongs to a child, and how all of them are reached.
//!
//! A child's processes are found three ways, because each alone can be escaped: by the process group, by the marker in
//! their environment (which survives `setsid`), and by descent from those found (which survives a cleaned environment).
//! Only a process that left its group, cleaned its environment and lost its parent before anybody looked is not found.

use std::collections::BTreeSet;
use std::fs;
use std::io;

use rustix::process::Signal;

use crate::identity::{BootId, ProcessIdentity, SignalError, Stat, signal};
use crate::types::MARKER_VARIABLE;

/// How the processes of one child are recognised.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Tree {
    /// The process that was started.
    pub(crate) leader: Option<ProcessIdentity>,
    /// Whose group and descendants belong to it too: not those of a worker, which answers for itself alone.
    pub(crate) has_members: bool,
    /// The marker in the environment, unless it is empty.
    pub(crate) marker: String,
    /// Processes that were found to belong to it before, and do so whatever has become of their parents.
    pub(crate) known: BTreeSet<ProcessIdentity>,
}

/// All processes that were there at one moment, more or less.
#[derive(Debug)]
pub(crate) struct Census {
    seen: Vec<Seen>,
}

/// One of them.
#[derive(Debug, Clone)]
pub(crate) struct Seen {
    pub(crate) identity: ProcessIdentity,
    pub(crate) parent: u32,
    pub(crate) group: u32,
    pub(crate) is_zombie: bool,
    /// The value of the marker variable in its environment, as far as that can be read.
    pub(crate) marker: Option<Vec<u8>>,
}

impl Census {
    /// Everybody on the machine, the caller excepted.
    pub(crate) fn of_everybody() -> io::Result<Self> {
        let mut census = Self::without_markers()?;
        census.seen.iter_mut().for_each(Seen::read_marker);
        Ok(census)
    }

    /// The descendants of the calling process.
    pub(crate) fn of_descendants() -> io::Result<Self> {
        let mut census = Self::without_markers()?;
        let mut family = BTreeSet::from([std::process::id()]);
        census.close_over_children(&mut family);
        census.seen.retain(|seen| family.contains(&seen.identity.pid()));
        census.seen.iter_mut().for_each(Seen::read_marker);
        Ok(census)
    }

    /// Nobody.
    pub(crate) fn empty() -> Self {
        Self { seen: Vec::new() }
    }

    fn without_markers() -> io::Result<Self> {
        let (boot, own_pid) = (BootId::current()?, std::process::id());
        let mut seen = Vec::new();
        for entry in fs::read_dir("/proc")? {
            let Some(pid) = entry?.file_name().to_str().and_then(|name| name.parse().ok()) else {
                continue;
            };
            // A process that ended meanwhile, or that may not be looked at, is nobody to us.
            let Ok(Some(stat)) = Stat::read(pid) else {
                continue;
            };
            let identity = ProcessIdentity::from_parts(pid, stat.started_ticks, boot);
            if let (Some(identity), true) = (identity, pid != own_pid) {
                let (parent, group) = (stat.parent, stat.group);
                seen.push(Seen { identity, parent, group, is_zombie: stat.is_zombie, marker: None });
            }
        }
        Ok(Self { seen })
    }

    pub(crate) fn seen(&self) -> &[Seen] {
        &self.seen
    }

    /// The living processes of `tree`. Somebody else who was given a recorded pid is not among them.
    pub(crate) fn members(&self, tree: &Tree) -> Vec<Seen> {
        // As long as the leader is there, if only as a zombie, its pid can't be the group of anybody else.
        let leader = tree.leader.filter(|leader| self.seen.iter().any(|seen| seen.identity == *leader));
        let belongs = |seen: &Seen| {
            let is_led = leader
                .is_some_and(|leader| seen.identity == leader || (tree.has_members && seen.group == leader.pid()));
            let is_marked = !tree.marker.is_empty()
                && seen.marker.as_deref().is_some_and(|marker| marker == tree.marker.as_bytes());
            is_led || is_marked || tree.known.contains(&seen.identity)
        };
        let mut pids: BTreeSet<u32> =
            self.seen.iter().filter(|seen| belongs(seen)).map(|seen| seen.identity.pid()).collect();
        if tree.has_members {
            self.close_over_children(&mut pids);
        }
        let is_member = |seen: &&Seen| !seen.is_zombie && pids.contains(&seen.identity.pid());
        self.seen.iter().filter(is_member).cloned().collect()
    }

    /// The pids of the processes that are `chosen`, and of those below them.
    pub(crate) fn with_descendants(&self, chosen: impl Fn(&Seen) -> bool) -> BTreeSet<u32> {
        let mut pids = self.seen.iter().filter(|seen| chosen(seen)).map(|seen| seen.identity.pid()).collect();
        self.close_over_children(&mut pids);
        pids
    }

    /// Adds the descendants of `pids` to them.
    fn close_over_children(&self, pids: &mut BTreeSet<u32>) {
        loop {
            let before = pids.len();
            for seen in &self.seen {
                if pids.contains(&seen.parent) {
                    pids.insert(seen.identity.pid());
                }
            }
            if pids.len() == before {
                return;
            }
        }
    }
}

impl Seen {
    fn read_marker(&mut self) {
        let Ok(environment) = fs::read(format!("/proc/{}/environ", self.identity.pid())) else {
            return;
        };
        self.marker = marker_in(&environment).map(<[u8]>::to_vec);
    }
}

fn marker_in(environment: &[u8]) -> Option<&[u8]> {
    environment
        .split(|byte| *byte == 0)
        .find_map(|entry| entry.strip_prefix(MARKER_VARIABLE.as_bytes())?.strip_prefix(b"="))
}

/// Sends `how` to each of `members`; those that have ended meanwhile are fine.
pub(crate) fn signal_all(members: &[ProcessIdentity], how: Signal) {
    for member in members {
        match signal(*member, how) {
            Ok(()) | Err(SignalError::NotRunning { .. }) => {}
            Err(error @ (SignalError::NotPermitted { .. } | SignalError::Refused { .. })) => {
                tracing::warn!(error = &error as &dyn std::error::Error, "a process of a child can't be ended");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(pid: u32, parent: u32, group: u32, marker: Option<&str>) -> Seen {
        let identity = ProcessIdentity::from_parts(pid, 1000 + u64::from(pid), boot()).unwrap();
        Seen { identity, parent, group, is_zombie: false, marker: marker.map(|marker| marker.into()) }
    }

    fn boot() -> BootId {
        BootId::from_bytes([1; 16])
    }

    fn pids(census: &Census, tree: &Tree) -> Vec<u32> {
        census.members(tree).iter().map(|seen| seen.identity.pid()).collect()
    }

    fn tree(leader: ProcessIdentity, marker: &str) -> Tree {
        Tree { leader: Some(leader), has_members: true, marker: marker.to_owned(), known: BTreeSet::new() }
    }

    #[test]
    fn c1_group_marker_and_descent_are_all_followed() {
        let leader = seen(10, 2, 10, Some("m"));
        let census = Census {
            seen: vec![
                leader.clone(),
                seen(11, 10, 10, None),      // in the group, environment cleaned
                seen(12, 1, 12, Some("m")),  // left by `setsid`, orphaned
                seen(13, 12, 13, None),      // its child, environment cleaned, own group
                seen(14, 1, 14, Some("mm")), // somebody else's marker
                seen(15, 2, 15, None),
            ],
        };
        assert_eq!(pids(&census, &tree(leader.identity, "m")), [10, 11, 12, 13]);
    }

    #[test]
    fn c1_a_known_process_stays_a_member_when_its_parents_are_gone() {
        let leader = seen(10, 2, 10, Some("m"));
        let mut tree = tree(leader.identity, "m");
        let escaped = seen(13, 10, 13, None);
        let census = Census { seen: vec![leader, escaped.clone()] };
        tree.known.extend(census.members(&tree).iter().map(|seen| seen.identity));
        let census = Census { seen: vec![Seen { parent: 1, ..escaped }, seen(14, 13, 14, None)] };
        assert_eq!(pids(&census, &tree), [13, 14]);
    }

    #[test]
    fn c6_the_group_of_a_recycled_leader_is_left_alone() {
        let recorded = ProcessIdentity::from_parts(10, 5, boot()).unwrap();
        let census = Census { seen: vec![seen(10, 1, 10, None), seen(11, 10, 10, None), seen(12, 1, 12, Some("m"))] };
        assert_eq!(pids(&census, &tree(recorded, "m")), [12]);
    }

    #[test]
    fn a_zombie_leader_vouches_for_its_group_but_is_no_member() {
        let mut leader = seen(10, 2, 10, None);
        leader.is_zombie = true;
        let census = Census { seen: vec![leader.clone(), seen(11, 1, 10, None)] };
        assert_eq!(pids(&census, &tree(leader.identity, "m")), [11]);
    }

    #[test]
    fn a_worker_stands_for_itself_alone() {
        let leader = seen(10, 2, 10, None);
        let census = Census { seen: vec![leader.clone(), seen(11, 10, 10, None)] };
        let alone = Tree { has_members: false, ..tree(leader.identity, "") };
        assert_eq!(pids(&census, &alone), [10]);
    }

    #[test]
    fn the_marker_is_an_entry_of_its_own_and_exact() {
        assert_eq!(marker_in(b"A=1\0MAINSTAY_CHILD=x-1\0B=2\0"), Some(&b"x-1"[..]));
        assert_eq!(marker_in(b"A=MAINSTAY_CHILD=x\0XMAINSTAY_CHILD=y\0MAINSTAY_CHILDREN=z\0"), None);
    }

    #[test]
    fn the_caller_is_never_counted() {
        let own = std::process::id();
        assert!(Census::of_everybody().unwrap().seen().iter().all(|seen| seen.identity.pid() != own));
    }
}
