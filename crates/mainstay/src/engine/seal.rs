//! What the gateway hands to clients to be brought back: opaque, and worth something only to whom, and for what, it was
//! made (2026-07-28, Multi Round-Trip Requests, Request State).
//!
//! A sealed text is kept by nobody but its client, so it outlives any worker. It is encrypted with the ledger's keyring and
//! bound to its [`Binding`]; whatever does not open under the very same binding is refused, and what is wrong with it is
//! told to nobody.

use std::collections::BTreeMap;

use aws_lc_rs::digest::{Context, SHA256};
use mainstay_core::id::{ServerName, base64url, from_base64url};
use mainstay_core::principal::Principal;
use mainstay_core::time::Timestamp;
use mainstay_core::wire::envelope::Envelope;
use mainstay_store::keys::{Keyring, Purpose, Sealed};
use serde_json::value::RawValue;
use thiserror::Error;

/// What a sealed text holds. One made for one kind opens as no other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A modern server's own `requestState`.
    ServerState,
    /// Where a call waits for answers of its client.
    Parked,
    /// Where a task runs.
    Task,
    /// A modern server's own `taskId`.
    ServerTask,
}

impl Kind {
    /// Frozen: clients hold texts sealed under it.
    const fn label(self) -> &'static [u8] {
        match self {
            Self::ServerState => b"server-state",
            Self::Parked => b"parked",
            Self::Task => b"task",
            Self::ServerTask => b"server-task",
        }
    }
}

/// Whose a sealed text is, and what it is good for.
#[derive(Clone, Copy, Debug)]
pub struct Binding<'a> {
    /// What it holds.
    pub kind: Kind,
    /// The only one who may bring it back.
    pub principal: &'a Principal,
    /// The only server that it is for.
    pub server: &'a ServerName,
    /// What else must be the same, such as [`about`] of the request. Empty for nothing.
    pub about: &'a [u8],
}

impl Binding<'_> {
    fn bytes(&self) -> Vec<u8> {
        let (issuer, name, variant) = match self.principal {
            Principal::Anonymous => ("", "", 0),
            Principal::Agent(name) => ("", &**name, 1),
            Principal::Token(name) => ("", &**name, 2),
            Principal::Subject { issuer, subject } => (&**issuer, &**subject, 3),
        };
        let parts = [self.kind.label(), &[variant], issuer.as_bytes(), name.as_bytes()];
        let mut bytes = Vec::with_capacity(BINDING_BYTES);
        for part in parts.into_iter().chain([self.server.as_str().as_bytes(), self.about]) {
            bytes.extend_from_slice(&(part.len() as u64).to_be_bytes());
            bytes.extend_from_slice(part);
        }
        bytes
    }
}

/// Why a text that a client brought is not opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Unsealed {
    /// It is no text of this gateway's, or was made for somebody or something else. Which of the two is not told.
    #[error("it was not given out for this request, or was changed")]
    Foreign,
    /// Its time is over.
    #[error("it has expired")]
    Expired,
}

/// `state` as a text of base64url that is good until `until`. Its length is that of `state` times 4/3, and 60 characters.
pub fn seal(ring: &Keyring, binding: &Binding<'_>, until: Timestamp, state: &[u8]) -> String {
    let mut plain = Vec::with_capacity(UNTIL_BYTES + state.len());
    plain.extend_from_slice(&until.unix_millis().to_be_bytes());
    plain.extend_from_slice(state);
    let sealed = ring.seal(Purpose::Handed, &binding.bytes(), &plain);
    base64url(&[&[FORMAT][..], &sealed.key_id.to_be_bytes(), &sealed.bytes].concat())
}

/// What was sealed as `text` under the very same binding.
///
/// # Errors
/// Any [`Unsealed`].
pub fn unseal(ring: &Keyring, binding: &Binding<'_>, now: Timestamp, text: &str) -> Result<Vec<u8>, Unsealed> {
    let bytes = from_base64url(text).ok_or(Unsealed::Foreign)?;
    let (&FORMAT, rest) = bytes.split_first().ok_or(Unsealed::Foreign)? else { return Err(Unsealed::Foreign) };
    let (key_id, rest) = rest.split_first_chunk().ok_or(Unsealed::Foreign)?;
    let sealed = Sealed { key_id: u32::from_be_bytes(*key_id), bytes: rest.to_vec() };
    let mut plain = ring.open(Purpose::Handed, &binding.bytes(), &sealed).map_err(|_| Unsealed::Foreign)?;
    let until = *plain.first_chunk::<UNTIL_BYTES>().ok_or(Unsealed::Foreign)?;
    if now > Timestamp::from_unix_millis(u64::from_be_bytes(until)) {
        return Err(Unsealed::Expired);
    }
    plain.drain(..UNTIL_BYTES);
    Ok(plain)
}

/// A digest of what must be the same in all rounds of a request: its method and its parameters, but for what each round
/// brings. In which order a client writes the members does not matter, nor how it escapes its strings; numbers are compared
/// as they are written, since no type holds them all.
pub fn about(message: &[u8], envelope: &Envelope) -> [u8; 32] {
    let mut context = Context::new(&SHA256);
    context.update(envelope.method_name(message).unwrap_or_default().as_bytes());
    context.update(&[0]);
    // What was scanned is valid JSON in UTF-8.
    let params = envelope.params.clone().and_then(|span| std::str::from_utf8(message.get(span)?).ok());
    if let Some(params) = params {
        digest_value(params, &OF_ONE_ROUND, &mut context);
    }
    let mut digest = [0; 32];
    digest.copy_from_slice(context.finish().as_ref());
    digest
}

/// Adds the value `json` to a digest, without its members of these names.
fn digest_value(json: &str, without: &[&str], context: &mut Context) {
    match json.as_bytes().first() {
        Some(b'{') => {
            if let Ok(members) = serde_json::from_str::<BTreeMap<String, &RawValue>>(json) {
                context.update(b"{");
                for (name, value) in members.iter().filter(|(name, _)| !without.contains(&name.as_str())) {
                    digest_text(name, context);
                    digest_value(value.get(), &[], context);
                }
                return context.update(b"}");
            }
        }
        Some(b'[') => {
            if let Ok(elements) = serde_json::from_str::<Vec<&RawValue>>(json) {
                context.update(b"[");
                for element in elements {
                    digest_value(element.get(), &[], context);
                }
                return context.update(b"]");
            }
        }
        Some(b'"') => {
            if let Ok(text) = serde_json::from_str::<String>(json) {
                return digest_text(&text, context);
            }
        }
        _ => {}
    }
    context.update(b"=");
    digest_text(json, context);
}

fn digest_text(text: &str, context: &mut Context) {
    context.update(&(text.len() as u64).to_be_bytes());
    context.update(text.as_bytes());
}

/// The members of `params` that differ from round to round.
const OF_ONE_ROUND: [&str; 3] = ["_meta", "inputResponses", "requestState"];
/// The first byte of what is sealed. Another format gets another one.
const FORMAT: u8 = 1;
/// The time of expiry before the state.
const UNTIL_BYTES: usize = 8;
/// About how long a binding is.
const BINDING_BYTES: usize = 160;

#[cfg(test)]
mod tests {
    use mainstay_core::wire::envelope::scan;

    use super::*;

    fn ring(seed: u8) -> Keyring {
        Keyring::ephemeral(&mut |bytes: &mut [u8]| bytes.fill(seed))
    }

    fn at(millis: u64) -> Timestamp {
        Timestamp::from_unix_millis(millis)
    }

    fn server(name: &str) -> ServerName {
        ServerName::parse(name).expect("a name")
    }

    #[test]
    fn e2_a_sealed_state_opens_for_whom_and_what_it_was_made_and_until_then() {
        let (principal, files) = (Principal::Token("amy".into()), server("files"));
        let binding = Binding { kind: Kind::Parked, principal: &principal, server: &files, about: b"x" };
        let text = seal(&ring(1), &binding, at(10), b"where it waits");
        assert_eq!(unseal(&ring(1), &binding, at(10), &text).as_deref(), Ok(&b"where it waits"[..]));
        assert_eq!(unseal(&ring(1), &binding, at(11), &text), Err(Unsealed::Expired));
        assert_eq!(unseal(&ring(2), &binding, at(1), &text), Err(Unsealed::Foreign), "another keyring");

        let (agent, mail) = (Principal::Agent("amy".into()), server("mail"));
        for (other, what) in [
            (Binding { principal: &Principal::Anonymous, ..binding }, "nobody in particular"),
            (Binding { principal: &agent, ..binding }, "an agent of the same name"),
            (Binding { server: &mail, ..binding }, "another server"),
            (Binding { kind: Kind::Task, ..binding }, "another kind"),
            (Binding { about: b"y", ..binding }, "another request"),
        ] {
            assert_eq!(unseal(&ring(1), &other, at(1), &text), Err(Unsealed::Foreign), "{what}");
        }
    }

    #[test]
    fn e2_no_changed_or_cut_state_opens() {
        let (principal, files) = (Principal::Anonymous, server("files"));
        let binding = Binding { kind: Kind::ServerState, principal: &principal, server: &files, about: b"" };
        let text = seal(&ring(1), &binding, at(10), b"state");
        for at_byte in 0..text.len() {
            let mut changed = text.clone().into_bytes();
            changed[at_byte] = if changed[at_byte] == b'A' { b'B' } else { b'A' };
            let changed = String::from_utf8(changed).expect("text");
            assert_eq!(unseal(&ring(1), &binding, at(1), &changed), Err(Unsealed::Foreign), "byte {at_byte}");
            assert_eq!(unseal(&ring(1), &binding, at(1), &text[..at_byte]), Err(Unsealed::Foreign), "cut at {at_byte}");
        }
        assert_eq!(unseal(&ring(1), &binding, at(1), "no base64url!"), Err(Unsealed::Foreign));
    }

    #[test]
    fn e2_two_principals_whose_names_join_to_the_same_are_told_apart() {
        let files = server("files");
        let of = |issuer: &str, subject: &str| Principal::Subject { issuer: issuer.into(), subject: subject.into() };
        let (one, other) = (of("a", "bc"), of("ab", "c"));
        let binding = |principal| Binding { kind: Kind::Task, principal, server: &files, about: b"" }.bytes();
        assert_ne!(binding(&one), binding(&other));
    }

    #[test]
    fn e2_rounds_of_one_request_are_about_the_same_and_other_requests_are_not() {
        let about = |body: &str| {
            let envelope = scan(body.as_bytes()).expect("a message");
            super::about(body.as_bytes(), &envelope)
        };
        let call = |method: &str, params: &str| {
            about(&format!(r#"{{"jsonrpc":"2.0","id":1,"method":"{method}","params":{params}}}"#))
        };
        let first = call("tools/call", r#"{"name":"t","arguments":{"a":1,"b":[{"c":2,"d":3}]},"_meta":{"x":1}}"#);
        let next =
            r#"{"requestState":"s","arguments":{"b":[{"d":3,"c":2}],"a":1},"inputResponses":{"k":{}},"name":"t"}"#;
        assert_eq!(first, call("tools/call", next));
        assert_ne!(first, call("prompts/get", next), "another method");
        for other in [r#"{"name":"u","arguments":{}}"#, r#"{"name":"t","arguments":{"a":1,"b":[]}}"#, "{}"] {
            assert_ne!(first, call("tools/call", other), "{other}");
        }
        let argument = |value: &str| call("tools/call", &format!(r#"{{"name":"t","arguments":{{"a":{value}}}}}"#));
        for (one, other) in [
            ("1e999", "2e999"),
            ("123456789012345678901", "123456789012345678902"),
            ("1", "\"1\""),
            ("null", "\"null\""),
            (r#"["a","b"]"#, r#"["ab"]"#),
            ("[[1],2]", "[[1,2]]"),
            (r#"{"b":1}"#, r#"["b",1]"#),
        ] {
            assert_ne!(argument(one), argument(other), "{one} and {other}");
        }
        assert_eq!(argument(r#""\u0061/""#), argument(r#""a\/""#), "escapes");
        assert_ne!(argument(r#"{"_meta":1}"#), argument("{}"), "only the outermost differ from round to round");
    }
}
