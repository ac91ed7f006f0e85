//! The variables of clients' files: `${VAR}`, `${VAR:-default}`, `${env:VAR}`, `${userHome}`, `${workspaceFolder}`.
//!
//! Where a value may be a secret (`env`, `headers`) it stays a template and is resolved at use; everywhere else it is
//! filled in when the file is read. What is not understood is a fault: no server ever gets a raw `${…}`.

use std::path::Path;

/// What the words of a client's file stand for.
pub(super) struct Words<'a> {
    /// Reads an environment variable.
    pub var: &'a dyn Fn(&str) -> Option<String>,
    /// The directory of the file.
    pub folder: &'a Path,
}

/// A text of the file after its variables were looked at.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Expanded {
    /// The text, or the template.
    pub text: String,
    /// Variables that are not set, so that their default was taken.
    pub defaulted: Vec<String>,
    /// Variables whose values became part of the text.
    pub filled: Vec<String>,
}

enum Piece {
    Text(String),
    /// `${NAME}`, or `${NAME:-default}`.
    Variable {
        name: String,
        default: Option<String>,
    },
    /// `${file:PATH}`.
    File(String),
}

impl Words<'_> {
    /// The text with everything filled in, for what is no secret.
    ///
    /// # Errors
    /// What can't be filled in, named, in words for the file's author.
    pub(super) fn fill(&self, text: &str) -> Result<Expanded, String> {
        let mut expanded = Expanded { text: String::new(), defaulted: Vec::new(), filled: Vec::new() };
        for piece in self.pieces(text)? {
            match piece {
                Piece::Text(text) => expanded.text.push_str(&text),
                Piece::Variable { name, default } => match (self.value(&name), default) {
                    (Some(value), _) => {
                        expanded.text.push_str(&value);
                        expanded.filled.push(name);
                    }
                    (None, Some(default)) => expanded.text.push_str(&default),
                    (None, None) => return Err(format!("the environment variable `{name}` is not set")),
                },
                Piece::File(path) => {
                    return Err(format!("`${{file:{path}}}` is for `env` and `headers`: anybody could read it here"));
                }
            }
        }
        Ok(expanded)
    }

    /// The template that says the same, for what may be a secret. A default holds if its variable is not set now.
    ///
    /// # Errors
    /// As [`fill`](Self::fill); a variable that is not set is none.
    pub(super) fn template(&self, text: &str) -> Result<Expanded, String> {
        let mut expanded = Expanded { text: String::new(), defaulted: Vec::new(), filled: Vec::new() };
        let mut literal = String::new();
        for piece in self.pieces(text)? {
            let reference = match piece {
                Piece::Text(text) => {
                    literal.push_str(&text);
                    continue;
                }
                Piece::Variable { name, default: Some(default) } if self.value(&name).is_none() => {
                    literal.push_str(&default);
                    expanded.defaulted.push(name);
                    continue;
                }
                Piece::Variable { name, .. } => name,
                Piece::File(path) => format!("file:{path}"),
            };
            expanded.text.push_str(&escaped(&std::mem::take(&mut literal)));
            expanded.text.push_str(&format!("${{{reference}}}"));
        }
        expanded.text.push_str(&escaped(&literal));
        Ok(expanded)
    }

    fn pieces(&self, text: &str) -> Result<Vec<Piece>, String> {
        let mut pieces = Vec::new();
        let mut rest = text;
        while let Some(at) = rest.find("${") {
            if let Some(before) = rest[..at].strip_suffix('$') {
                pieces.push(Piece::Text(format!("{before}${{")));
                rest = &rest[at + 2..];
                continue;
            }
            pieces.push(Piece::Text(rest[..at].to_owned()));
            let inner = &rest[at + 2..];
            let end = inner.find('}').ok_or("`${` is not closed")?;
            pieces.push(self.piece(&inner[..end])?);
            rest = &inner[end + 1..];
        }
        pieces.push(Piece::Text(rest.to_owned()));
        Ok(pieces)
    }

    fn piece(&self, inner: &str) -> Result<Piece, String> {
        let shown = |path: &Path| Piece::Text(path.to_string_lossy().into_owned());
        match inner {
            "userHome" => {
                return self.value("HOME").map(Piece::Text).ok_or("`${userHome}` needs HOME, which is not set".into());
            }
            "workspaceFolder" => return Ok(shown(self.workspace())),
            "workspaceFolderBasename" => {
                return Ok(shown(Path::new(self.workspace().file_name().unwrap_or_default())));
            }
            "pathSeparator" | "/" => return Ok(Piece::Text("/".into())),
            _ => {}
        }
        if let Some(path) = inner.strip_prefix("file:").filter(|path| !path.is_empty()) {
            return Ok(Piece::File(path.into()));
        }
        if inner.starts_with("input:") {
            return Err(format!(
                "`${{{inner}}}` asks a person, who is not here: put the value into a variable and write `${{NAME}}`"
            ));
        }
        let (name, default) = match inner.split_once(":-") {
            Some((name, default)) if !default.contains("${") => (name, Some(default.to_owned())),
            Some((name, _)) => return Err(format!("a variable in the default of `{name}` is not understood")),
            None => (inner.strip_prefix("env:").unwrap_or(inner), None),
        };
        match is_name(name) {
            true => Ok(Piece::Variable { name: name.into(), default }),
            // It may be part of a secret that happens to hold `${`.
            false if inner.len() > SHOWN_BYTES_MAX => Err("a `${…}` is not understood".into()),
            false => Err(format!("`${{{inner}}}` is not understood")),
        }
    }

    /// The project that the file belongs to: `.vscode` and `.cursor` are directories in it.
    fn workspace(&self) -> &Path {
        let hidden = self.folder.file_name().is_some_and(|name| name == ".vscode" || name == ".cursor");
        self.folder.parent().filter(|_| hidden).unwrap_or(self.folder)
    }

    /// An empty variable counts as absent, as `:-` of the shell has it.
    fn value(&self, name: &str) -> Option<String> {
        (self.var)(name).filter(|value| !value.is_empty())
    }
}

/// What `text`, whose variables are known by name, should be written as.
pub(super) const HINT: &str = "known are `${NAME}`, `${NAME:-default}`, `${env:NAME}`, `${userHome}` and \
                               `${workspaceFolder}`, in `env` and `headers` also `${file:PATH}`; `$${` is a plain `${`";

/// Whether a variable of this name usually holds a secret.
pub(super) fn sounds_secret(name: &str) -> bool {
    let name = name.to_ascii_uppercase();
    ["TOKEN", "SECRET", "PASSWORD", "PASSWD", "KEY", "CREDENTIAL"].iter().any(|word| name.contains(word))
}

/// A path that may begin with `~/`, which is the home directory.
///
/// # Errors
/// There is no home directory.
pub(super) fn at_home(text: &str, var: &dyn Fn(&str) -> Option<String>) -> Result<String, String> {
    let Some(rest) = text.strip_prefix('~').filter(|rest| rest.is_empty() || rest.starts_with('/')) else {
        return Ok(text.to_owned());
    };
    let home = var("HOME").filter(|home| home.starts_with('/'));
    home.map(|home| format!("{}{rest}", home.trim_end_matches('/')))
        .ok_or(format!("`{text}` needs HOME, which is not set"))
}

fn escaped(literal: &str) -> String {
    literal.replace("${", "$${")
}

fn is_name(name: &str) -> bool {
    let start = name.bytes().next().is_some_and(|byte| byte.is_ascii_alphabetic() || byte == b'_');
    start && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
}

/// A name that nobody would write is not repeated.
const SHOWN_BYTES_MAX: usize = 40;

#[cfg(test)]
mod tests {
    use super::*;

    fn var(name: &str) -> Option<String> {
        match name {
            "HOME" => Some("/home/u".into()),
            "SET" => Some("value".into()),
            "EMPTY" => Some(String::new()),
            _ => None,
        }
    }

    fn words(folder: &str) -> Words<'_> {
        Words { var: &var, folder: Path::new(folder) }
    }

    #[test]
    fn what_is_no_secret_is_filled_in() {
        for (text, filled) in [
            ("plain $5", "plain $5"),
            ("${SET}/x", "value/x"),
            ("${env:SET}", "value"),
            ("${UNSET:-d e}${SET:-d}${EMPTY:-f}", "d evaluef"),
            ("${userHome}${/}a", "/home/u/a"),
            ("${workspaceFolder}/x:${workspaceFolderBasename}", "/srv/x:srv"),
            ("$${SET}", "${SET}"),
        ] {
            assert_eq!(words("/srv").fill(text).unwrap().text, filled, "{text}");
            assert_eq!(words("/srv/.vscode").fill(text).unwrap().text, filled, "{text}");
        }
        assert_eq!(words("/srv").fill("${SET}").unwrap().filled, ["SET"]);
    }

    #[test]
    fn i6_what_may_be_a_secret_stays_a_template() {
        for (text, template, defaulted) in [
            ("Bearer ${SET}", "Bearer ${SET}", 0),
            ("${env:UNSET}", "${UNSET}", 0),
            ("${SET:-d}${UNSET:-d}", "${SET}d", 1),
            ("${file:/run/t}", "${file:/run/t}", 0),
            ("${userHome}/x $${A}", "/home/u/x $${A}", 0),
            ("${UNSET:-$}{A}", "$${A}", 1),
        ] {
            let expanded = words("/srv").template(text).unwrap();
            assert_eq!((expanded.text.as_str(), expanded.defaulted.len()), (template, defaulted), "{text}");
        }
    }

    #[test]
    fn what_is_not_understood_is_named_and_never_passed_on() {
        for (text, named) in [
            ("${UNSET}", "`UNSET`"),
            ("${file:/run/t}", "`${file:/run/t}`"),
            ("${input:key}", "`${input:key}`"),
            ("${a-b}", "`${a-b}`"),
            ("${}", "`${}`"),
            ("${A:-${B}}", "`A`"),
            ("${SET", "not closed"),
            ("${config:x}", "`${config:x}`"),
        ] {
            let told = words("/srv").fill(text).unwrap_err();
            assert!(told.contains(named), "{text}: {told}");
        }
        assert!(!words("/srv").template(&format!("${{{}-}}", "CANARY".repeat(9))).unwrap_err().contains("CANARY"));
    }

    #[test]
    fn a_tilde_is_the_home_directory_at_the_beginning_only() {
        for (text, path) in [("~/x", "/home/u/x"), ("~", "/home/u"), ("~user/x", "~user/x"), ("a~/x", "a~/x")] {
            assert_eq!(at_home(text, &var).unwrap(), path);
        }
        assert!(at_home("~/x", &|_| None).is_err());
    }
}
