//! Whose child it is: what the keeper keeps with each child for later workers.

use mainstay_core::id::{ServerName, SessionKey};

/// The label of a child.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Label {
    /// [`Server::definition`](crate::Server::definition) of the server that it was started for.
    pub definition: [u8; 32],
    /// The session that it belongs to.
    pub session: SessionKey,
    /// The server.
    pub server: ServerName,
}

impl Label {
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
        assert_eq!(parse_label(&bytes), Some(label));
        for bad in [&b""[..], &bytes[..64], &bytes[..65], &[2; 70], &[&[2], &bytes[1..]].concat()] {
            assert_eq!(parse_label(bad), None);
        }
    }
}
