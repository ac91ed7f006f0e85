//! Keeping what a child was given in confidence out of what is told of its last words.

use mainstay_keeper::{Exit, STDERR_TAIL_BYTES_MAX};

use crate::server::{Reach, Server};
use crate::template::Environment;

/// The values that a server was given by its configuration, to be replaced wherever its words are shown.
///
/// Whatever the operator wrote there counts, since nothing tells a secret from a setting: each whole value, and each
/// variable and file in it by itself. Shorter ones than [`MASKED_BYTES_MIN`] would be found everywhere, and stay.
#[derive(Clone, Default)]
pub(crate) struct Mask {
    values: Vec<Box<str>>,
    /// Whether it is not known what to look for, so that nothing may be shown of last words.
    hides_all: bool,
}

impl Mask {
    /// Of what `server` is given now. What can't be resolved now is not known.
    pub(crate) fn of(server: &Server, environment: &dyn Environment) -> Self {
        let templates: Vec<_> = match &server.reach {
            Reach::Child { env, .. } => env.iter().map(|(_, template)| template).collect(),
            Reach::Http { headers, .. } => headers.iter().map(|(_, template)| template).collect(),
        };
        let mut values: Vec<Box<str>> = Vec::new();
        for template in templates {
            let whole = template.resolve(environment).ok();
            for secret in whole.into_iter().chain(template.resolve_parts(environment)) {
                // A program may write a value of several lines in as many pieces.
                let lines = secret.reveal().lines().filter(|line| *line != secret.reveal());
                values.extend(lines.chain([secret.reveal()]).map(Box::from));
            }
        }
        values.retain(|value| value.len() >= MASKED_BYTES_MIN);
        // A value that holds another one must be found first.
        values.sort_by(|a, b| b.len().cmp(&a.len()).then_with(|| a.cmp(b)));
        values.dedup();
        Self { values, hides_all: false }
    }

    /// Of a child that was given something that nobody knows any more: of its last words nothing is shown.
    pub(super) fn of_everything() -> Self {
        Self { values: Vec::new(), hides_all: true }
    }

    /// `text` without the values.
    pub(crate) fn apply(&self, text: &str) -> String {
        self.values.iter().fold(text.to_owned(), |text, value| {
            if text.contains(&**value) { text.replace(&**value, MASKED) } else { text }
        })
    }

    /// The exit without what the child was given in confidence: its words go to clients and operators (I6).
    pub(super) fn apply_to_exit(&self, exit: Exit) -> Exit {
        let shown = if self.hides_all { String::new() } else { self.apply_to_tail(&exit.stderr_tail) };
        Exit { stderr_tail: shown.into(), ..exit }
    }

    /// The end of a longer text without the values: it may begin in the middle of one.
    pub(crate) fn apply_to_tail(&self, tail: &[u8]) -> String {
        let text = String::from_utf8_lossy(tail);
        if tail.len() < STDERR_TAIL_BYTES_MAX { self.apply(&text) } else { self.apply_to_part(&text) }
    }

    /// A part of a longer text without the values: it may begin and end in the middle of one.
    pub(crate) fn apply_to_part(&self, text: &str) -> String {
        let ends = self.values.iter().flat_map(|value| ends_of(value));
        let begun = ends.filter(|end| text.starts_with(end)).map(str::len).max();
        // First the whole ones: a whole value at the end is none that goes on.
        let masked = self.apply(&text[begun.unwrap_or(0)..]);
        let beginnings = self.values.iter().flat_map(|value| beginnings_of(value));
        let open = beginnings.filter(|beginning| masked.ends_with(beginning)).map(str::len).max();
        let kept = &masked[..masked.len() - open.unwrap_or(0)];
        let mark = |is_cut: bool| if is_cut { MASKED } else { "" };
        format!("{}{kept}{}", mark(begun.is_some()), mark(open.is_some()))
    }
}

/// The proper ends of a value, as far as they could be recognised.
fn ends_of(value: &str) -> impl Iterator<Item = &str> {
    let ends = value.char_indices().skip(1).map(|(at, _)| &value[at..]);
    ends.take_while(|end| end.len() >= MASKED_BYTES_MIN)
}

/// The proper beginnings of a value, as far as they could be recognised.
fn beginnings_of(value: &str) -> impl Iterator<Item = &str> {
    let beginnings = value.char_indices().map(|(at, _)| &value[..at]);
    beginnings.skip_while(|beginning| beginning.len() < MASKED_BYTES_MIN)
}

/// The shortest value that is masked.
const MASKED_BYTES_MIN: usize = 6;
const MASKED: &str = "***";

#[cfg(test)]
mod tests {
    use std::io;
    use std::path::Path;

    use mainstay_core::id::ServerName;

    use super::*;
    use crate::template::Template;

    struct Table;

    impl Environment for Table {
        fn var(&self, name: &str) -> Option<String> {
            (name == "TOKEN").then(|| "s3cret-token".to_owned())
        }

        fn file(&self, _: &Path) -> io::Result<String> {
            Ok("first-line\nsecond-line\n".to_owned())
        }
    }

    fn mask() -> Mask {
        let value = |text: &str| Template::parse(text).unwrap();
        let env = [
            ("A", "Bearer ${TOKEN}"),
            ("B", "${file:/x}"),
            ("C", "${UNSET}-and-more"),
            ("D", "literal-secret"),
            ("E", "debug"),
        ];
        let env = env.map(|(name, text)| (name.to_owned(), value(text))).to_vec();
        let reach = Reach::Child { program: "srv".into(), args: Vec::new(), env, cwd: None };
        Mask::of(&Server::new(ServerName::parse("srv").unwrap(), reach), &Table)
    }

    #[test]
    fn i6_what_a_child_was_given_is_masked_whole_in_parts_and_in_lines() {
        for (said, shown) in [
            ("A=Bearer s3cret-token!", "A=***!"),
            ("token s3cret-token", "token ***"),
            ("second-line", "***"),
            ("x first-line\nsecond-line y", "x *** y"),
            ("literal-secret literal-secret", "*** ***"),
            ("LOG=debug", "LOG=debug"),
            ("nothing", "nothing"),
        ] {
            assert_eq!(mask().apply(said), shown);
        }
    }

    #[test]
    fn i6_a_value_that_the_beginning_of_the_tail_cuts_is_masked_too() {
        let tail = |begins: &str| {
            let mut tail = begins.as_bytes().to_vec();
            tail.resize(STDERR_TAIL_BYTES_MAX, b'.');
            mask().apply_to_tail(&tail)
        };
        assert!(tail("cret-token and so on").starts_with("*** and so on"));
        assert!(tail("and so on").starts_with("and so on"));
        assert_eq!(mask().apply_to_tail(b"cret-token"), "cret-token");
        for (part, shown) in [
            ("eral-secret\nx literal-s", "***\nx ***"),
            ("x literal-secret", "x ***"),
            ("x literal-secret\n", "x ***\n"),
            ("s3cret-token", "***"),
            ("lit", "lit"),
            ("", ""),
        ] {
            assert_eq!(mask().apply_to_part(part), shown);
        }
    }
}
