//! Clients' connections between two workers: the keeper holds them, and looks at none of them.

use std::os::fd::OwnedFd;

use bytes::Bytes;
use rustix::process::{Resource, getrlimit};

use crate::protocol::Passing;

/// Connections that one worker has passed on and the next one is to get.
#[derive(Default)]
pub(crate) struct Passed {
    connections: Vec<Held>,
    read_bytes: usize,
    closed: usize,
}

/// A connection that is held.
pub(crate) struct Held {
    pub(crate) listener: String,
    pub(crate) socket: OwnedFd,
    /// What was read of its next request.
    pub(crate) read: Bytes,
}

impl Passed {
    /// Holds a connection, or closes it if there are too many. One whose socket could not arrive is gone already.
    pub(crate) fn hold(&mut self, passing: Passing, socket: Option<OwnedFd>) {
        let Passing { listener, read } = passing;
        let has_room = self.connections.len() < connections_max()
            && self.read_bytes + read.len() <= READ_BYTES_MAX
            && listener.len() <= LISTENER_BYTES_MAX;
        match socket {
            Some(socket) if has_room => {
                self.read_bytes += read.len();
                self.connections.push(Held { listener, socket, read });
            }
            Some(_) | None => self.closed += 1,
        }
    }

    /// Everything that is held, in the order in which it came.
    pub(crate) fn take(&mut self) -> Vec<Held> {
        self.closed = 0;
        self.read_bytes = 0;
        std::mem::take(&mut self.connections)
    }

    pub(crate) fn connections(&self) -> &[Held] {
        &self.connections
    }

    /// How many are held, and how many there was no room for.
    pub(crate) fn count(&self) -> (usize, usize) {
        (self.connections.len(), self.closed)
    }
}

/// The keeper needs descriptors for children, too.
fn connections_max() -> usize {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    CONNECTIONS_MAX.min(usize::try_from(limit / 2).unwrap_or(usize::MAX))
}

/// How many connections are held at most.
const CONNECTIONS_MAX: usize = 100_000;

/// How much may have been read of all their next requests, in bytes.
const READ_BYTES_MAX: usize = 64 * 1024 * 1024;

/// The longest name of a listener that a connection came in by, in bytes.
const LISTENER_BYTES_MAX: usize = 256;

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    fn passing(read: usize) -> Passing {
        Passing { listener: "mcp".to_owned(), read: Bytes::from(vec![b'x'; read]) }
    }

    #[test]
    fn t1_connections_beyond_what_can_be_held_are_closed_and_counted() {
        let mut passed = Passed::default();
        let socket = || Some(OwnedFd::from(UnixStream::pair().unwrap().0));
        passed.hold(passing(READ_BYTES_MAX), socket());
        passed.hold(passing(1), socket());
        passed.hold(passing(0), None);
        passed.hold(Passing { listener: "x".repeat(LISTENER_BYTES_MAX + 1), read: Bytes::new() }, socket());
        assert_eq!(passed.count(), (1, 3));
        assert_eq!(passed.take().len(), 1);
        passed.hold(passing(1), socket());
        assert_eq!(passed.count(), (1, 0));
    }
}
