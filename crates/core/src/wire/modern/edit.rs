//! Edits of members of an object, which leave every other byte of the message as it is.

use super::{META, walk};
use crate::wire::envelope::{self, Envelope, Span};

/// What becomes of a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change<'a> {
    /// It says this raw JSON, wherever it stood before, or at the end.
    Set(&'a [u8]),
    /// It is not there.
    Remove,
}

/// Edits for [`envelope::splice`]: ascending and apart.
pub type Edits = Vec<(Span, Vec<u8>)>;

/// The edits that make `changes`, each a member's name and what becomes of it, of the object at `object` of an already
/// scanned message. A member that stands there several times stands there once afterwards, or not at all, so that all
/// readers see the same. Empty if nothing changes, or `object` is no object.
pub fn object(message: &[u8], object: &Span, changes: &[(&str, Change<'_>)]) -> Edits {
    let mut edits = Edits::new();
    if message.get(object.start) != Some(&b'{') {
        return edits;
    }
    let mut made = vec![false; changes.len()];
    let mut last: Option<Span> = None;
    let mut any_kept = false;
    let mut members = walk::members(message, object).peekable();
    while let Some((key, value)) = members.next() {
        let found = changes.iter().position(|(name, _)| walk::says(&message[key.clone()], name));
        let change = found.map(|index| (index, changes[index].1));
        match change {
            None => any_kept = true,
            Some((index, Change::Set(raw))) if !made[index] => {
                made[index] = true;
                any_kept = true;
                if &message[value.clone()] != raw {
                    edits.push((value.clone(), raw.to_vec()));
                }
            }
            Some(_) => {
                // With what stood before it goes the comma before it, else the one behind it.
                let start = last.as_ref().filter(|_| any_kept).map_or(key.start, |last| last.end);
                let end = if any_kept { value.end } else { members.peek().map_or(value.end, |(next, _)| next.start) };
                edits.push((start..end, Vec::new()));
            }
        }
        last = Some(value);
    }
    let mut added = Vec::new();
    for ((name, change), _) in changes.iter().zip(&made).filter(|(_, made)| !**made) {
        let Change::Set(raw) = change else { continue };
        if any_kept || !added.is_empty() {
            added.push(b',');
        }
        added.extend_from_slice(&envelope::escape(name));
        added.push(b':');
        added.extend_from_slice(raw);
    }
    if !added.is_empty() {
        edits.push((object.end - 1..object.end - 1, added));
    }
    edits
}

/// The edits that make `changes` of the `_meta` in the object at `holder` of an already scanned message: params, or a
/// result. A `_meta` that is not there, or is no object, is made if anything is set. Empty if `holder` is no object.
pub fn meta(message: &[u8], holder: &Span, changes: &[(&str, Change<'_>)]) -> Edits {
    match envelope::member(message, holder, META).filter(|span| message[span.start] == b'{') {
        Some(span) => object(message, &span, changes),
        None if changes.iter().any(|(_, change)| matches!(change, Change::Set(_))) => {
            object(message, holder, &[(META, Change::Set(&made_object(changes)))])
        }
        None => Edits::new(),
    }
}

/// The edits that make `changes` of the `_meta` of the request or notification `message`; params are made, too, if they
/// are not there. Empty if the params are an array: no request of MCP has such.
pub fn request_meta(message: &[u8], envelope: &Envelope, changes: &[(&str, Change<'_>)]) -> Edits {
    match (&envelope.params, &envelope.method) {
        (Some(params), _) => meta(message, params, changes),
        (None, Some(method)) => {
            let made = [b",\"params\":{\"_meta\":", &*made_object(changes), b"}"].concat();
            vec![(method.end..method.end, made)]
        }
        (None, None) => Edits::new(),
    }
}

/// `message` with `edits` made. The edits may come from several calls, if they are apart; they are sorted here.
pub fn apply(message: &[u8], mut edits: Edits) -> Vec<u8> {
    edits.sort_by_key(|(span, _)| (span.start, span.end));
    let edits: Vec<_> = edits.iter().map(|(span, bytes)| (span.clone(), &**bytes)).collect();
    envelope::splice(message, &edits)
}

/// What a result of the modern era has and one of the legacy era has not.
pub const RESULT_MEMBERS: [(&str, Change<'_>); 3] =
    [("resultType", Change::Remove), ("ttlMs", Change::Remove), ("cacheScope", Change::Remove)];

fn made_object(changes: &[(&str, Change<'_>)]) -> Vec<u8> {
    let edits = object(b"{}", &(0..2), changes);
    apply(b"{}", edits)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    fn edited(text: &str, changes: &[(&str, Change<'_>)]) -> String {
        let edits = object(text.as_bytes(), &(0..text.len()), changes);
        String::from_utf8(apply(text.as_bytes(), edits)).unwrap()
    }

    #[test]
    fn e1_what_legacy_clients_do_not_know_is_taken_out_and_nothing_else() {
        for (result, expected) in [
            (
                r#"{ "resultType" : "complete" , "tools":[ 1.0 ] ,"ttlMs":5, "cacheScope":"public" }"#,
                r#"{ "tools":[ 1.0 ] }"#,
            ),
            (r#"{"resultType":"complete"}"#, "{}"),
            (
                r#"{"resultType":"complete","ttlMs":1,"x":0,"cacheScope":"a","y":{"ttlMs":7}}"#,
                r#"{"x":0,"y":{"ttlMs":7}}"#,
            ),
            (r#"{"resultType":1,"ttlMs":1}"#, "{}"),
            ("{ }", "{ }"),
            ("[]", "[]"),
        ] {
            assert_eq!(edited(result, &RESULT_MEMBERS), expected, "{result}");
        }
    }

    #[test]
    fn e1_a_member_that_is_set_stands_there_once() {
        let set = [("a", Change::Set(b"1")), ("b", Change::Remove), ("c", Change::Set(b"3"))];
        for (text, expected) in [
            ("{}", r#"{"a":1,"c":3}"#),
            (r#"{"b":0}"#, r#"{"a":1,"c":3}"#),
            (r#"{"a":0,"x":[1, 2],"\u0061":9,"b":7}"#, r#"{"a":1,"x":[1, 2],"c":3}"#),
            (r#"{"b":7,"b":7,"x":0}"#, r#"{"x":0,"a":1,"c":3}"#),
        ] {
            assert_eq!(edited(text, &set), expected, "{text}");
        }
    }

    #[test]
    fn e1_meta_is_made_where_there_is_none() {
        let changes = [("k", Change::Set(b"1")), ("progressToken", Change::Remove)];
        for (message, expected) in [
            (
                r#"{"jsonrpc":"2.0","method":"m","id":7}"#,
                r#"{"jsonrpc":"2.0","method":"m","params":{"_meta":{"k":1}},"id":7}"#,
            ),
            (
                r#"{"jsonrpc":"2.0","method":"m","params":{}}"#,
                r#"{"jsonrpc":"2.0","method":"m","params":{"_meta":{"k":1}}}"#,
            ),
            (
                r#"{"jsonrpc":"2.0","method":"m","params":{"_meta":null,"x":0}}"#,
                r#"{"jsonrpc":"2.0","method":"m","params":{"_meta":{"k":1},"x":0}}"#,
            ),
            (
                r#"{"jsonrpc":"2.0","method":"m","params":{"x":0,"_meta":{"progressToken":7,"o":{}}}}"#,
                r#"{"jsonrpc":"2.0","method":"m","params":{"x":0,"_meta":{"o":{},"k":1}}}"#,
            ),
            (r#"{"jsonrpc":"2.0","method":"m","params":[1]}"#, r#"{"jsonrpc":"2.0","method":"m","params":[1]}"#),
        ] {
            let scanned = envelope::scan(message.as_bytes()).unwrap();
            let edits = request_meta(message.as_bytes(), &scanned, &changes);
            assert_eq!(String::from_utf8(apply(message.as_bytes(), edits)).unwrap(), expected);
        }
    }

    proptest! {
        #[test]
        fn e1_edits_agree_with_a_tree(
            members in vec(("[a-f]", any::<i8>()), 0..8),
            set in vec(("[a-f]", any::<i8>()), 0..4),
            removed in vec("[a-f]", 0..4),
            blank in "[ \n]{0,2}",
        ) {
            // Each name once, as callers give them.
            let mut names = std::collections::BTreeSet::new();
            let set: Vec<_> = set.into_iter().filter(|(name, _)| names.insert(name.clone())).collect();
            let removed: Vec<_> = removed.into_iter().filter(|name| names.insert(name.clone())).collect();
            let mut expected = json!({});
            for (name, value) in members.iter().chain(&set) {
                expected[name] = json!(value);
            }
            for name in &removed {
                expected.as_object_mut().unwrap().remove(name);
            }
            let parts: Vec<_> = members.iter().map(|(name, value)| format!("{blank}\"{name}\":{blank}{value}{blank}")).collect();
            let text = format!("{{{}}}", parts.join(","));
            let raw: Vec<_> = set.iter().map(|(name, value)| (name, value.to_string())).collect();
            let changes: Vec<_> = raw.iter().map(|(name, raw)| (&***name, Change::Set(raw.as_bytes())))
                .chain(removed.iter().map(|name| (&**name, Change::Remove))).collect();
            let edited = edited(&text, &changes);
            let read: Value = serde_json::from_str(&edited).unwrap();
            prop_assert_eq!(read, expected, "{} -> {}", text, edited);
        }
    }
}
