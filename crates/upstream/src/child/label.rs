//! Whose child it is: what the keeper keeps with each child for later workers.

use aws_lc_rs::digest;
use mainstay_core::id::{ServerName, SessionKey};

/// The label of a child.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Label {
    /// [`Server::definition`](crate::Server::definition) of the server that it was started for.
    pub definition: [u8; 32],
    /// The session that it belongs to; of a child that belongs to none, what stands for its [holder](Self::holder).
    pub session: SessionKey,
    /// The server.
    pub server: ServerName,
}

/// Whose a child is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holder {
    /// A session's.
    Session,
    /// That of all clients of its server, which is modern.
    Everybody,
    /// Nobody's: it was started to be asked for its era, and serves no one.
    Nobody,
}

impl Label {
    /// Whose the child is.
    pub fn holder(&self) -> Holder {
        match self.session {
            key if key == shared_key(&self.server) => Holder::Everybody,
            key if key == sibling_key(&self.server) => Holder::Nobody,
            _ => Holder::Session,
        }
    }

    /// The bytes that the keeper keeps.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(FIXED_BYTES + 64);
        bytes.push(VERSION);
        bytes.extend_from_slice(&self.definition);
        bytes.extend_from_slice(self.session.as_bytes());
        bytes.extend_from_slice(self.server.as_str().as_bytes());
        bytes
    }
}

/// What stands in the label of the child of `server` that everybody shares: the same in every worker, and no session's,
/// since those are digests of their ids.
pub(super) fn shared_key(server: &ServerName) -> SessionKey {
    key_of(b"mainstay shared child\0", server)
}

/// The same for a child of `server` that is asked for its era.
pub(super) fn sibling_key(server: &ServerName) -> SessionKey {
    key_of(b"mainstay sibling child\0", server)
}

fn key_of(prefix: &[u8], server: &ServerName) -> SessionKey {
    let mut bytes = [0; 32];
    let text = [prefix, server.as_str().as_bytes()].concat();
    bytes.copy_from_slice(digest::digest(&digest::SHA256, &text).as_ref());
    SessionKey::from_bytes(bytes)
}

/// Reads a label back. `None` if a version that is not known wrote it, or something else did.
pub fn parse_label(bytes: &[u8]) -> Option<Label> {
    let (version, rest) = bytes.split_first()?;
    let (definition, rest) = rest.split_first_chunk()?;
    let (session, name) = rest.split_first_chunk()?;
    let server = ServerName::parse(std::str::from_utf8(name).ok()?)?;
    (*version == VERSION).then_some(Label {
        definition: *definition,
        session: SessionKey::from_bytes(*session),
        server,
    })
}

/// The version of the encoding. A changed one gets another number.
const VERSION: u8 = 1;
const FIXED_BYTES: usize = 1 + 32 + 32;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_label_reads_back_and_junk_does_not() {
        let server = ServerName::parse("files").expect("a name");
        let label = Label { definition: [7; 32], session: SessionKey::from_bytes([9; 32]), server };
        let bytes = label.encode();
        assert_eq!(bytes[..2], [1, 7]);
        assert_eq!(parse_label(&bytes), Some(label.clone()));
        assert_eq!(label.holder(), Holder::Session);
        let of = |session| Label { session, ..label.clone() }.holder();
        assert_eq!(of(shared_key(&label.server)), Holder::Everybody);
        assert_eq!(of(sibling_key(&label.server)), Holder::Nobody);
        assert_eq!(of(shared_key(&ServerName::parse("other").expect("a name"))), Holder::Session);
        for bad in [&b""[..], &bytes[..64], &bytes[..65], &[2; 70], &[&[2], &bytes[1..]].concat()] {
            assert_eq!(parse_label(bad), None);
        }
    }
}
