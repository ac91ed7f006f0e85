//! Values with variables: `Bearer ${TOKEN}`, `${file:/run/secrets/token}`.
//!
//! A template is configuration and may be kept; what it resolves to is a secret, made at use and stored nowhere
//! (design, section 5). Neither shows a value in `Debug`: even the literal parts of a template can be a secret that
//! somebody wrote into the file.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

/// Where variables and secret files come from. The process's own surroundings in the product, a table in tests.
pub trait Environment: Send + Sync {
    /// The value of the environment variable `name`, if it is set and valid Unicode.
    fn var(&self, name: &str) -> Option<String>;

    /// The text of the file at `path`.
    ///
    /// # Errors
    /// As reading the file says.
    fn file(&self, path: &Path) -> io::Result<String>;
}

/// A text with places for variables.
///
/// `${NAME}` stands for an environment variable, `${file:PATH}` for the text of a file without its last line end, and
/// `$${` for a plain `${`. Any other `$` is itself.
#[derive(Clone, PartialEq, Eq)]
pub struct Template(Box<[Part]>);

#[derive(Clone, PartialEq, Eq)]
enum Part {
    Text(Box<str>),
    Variable(Box<str>),
    File(PathBuf),
}

impl Template {
    /// The template written as `text`.
    ///
    /// # Errors
    /// A `${` that is never closed or holds no usable name.
    pub fn parse(text: &str) -> Result<Self, TemplateError> {
        let mut parts = Vec::new();
        let mut literal = String::new();
        let mut rest = text;
        while let Some(at) = rest.find("${") {
            if let Some(before) = rest[..at].strip_suffix('$') {
                literal.push_str(before);
                literal.push_str("${");
                rest = &rest[at + 2..];
                continue;
            }
            literal.push_str(&rest[..at]);
            let inner = &rest[at + 2..];
            let end = inner.find('}').ok_or(TemplateError::Unclosed)?;
            if !literal.is_empty() {
                parts.push(Part::Text(std::mem::take(&mut literal).into_boxed_str()));
            }
            parts.push(Self::place(&inner[..end])?);
            rest = &inner[end + 1..];
        }
        literal.push_str(rest);
        if !literal.is_empty() {
            parts.push(Part::Text(literal.into_boxed_str()));
        }
        Ok(Self(parts.into_boxed_slice()))
    }

    fn place(inner: &str) -> Result<Part, TemplateError> {
        if let Some(path) = inner.strip_prefix("file:") {
            if path.is_empty() {
                return Err(TemplateError::Name { name: inner.into() });
            }
            return Ok(Part::File(PathBuf::from(path)));
        }
        let start = inner.bytes().next().is_some_and(|byte| byte.is_ascii_alphabetic() || byte == b'_');
        if !start || !inner.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_') {
            return Err(TemplateError::Name { name: inner.into() });
        }
        Ok(Part::Variable(inner.into()))
    }

    /// The text with every variable filled in. Reads files; holds on to nothing.
    ///
    /// # Errors
    /// A variable that is not set or a file that can't be read; named, never shown.
    pub fn resolve(&self, environment: &dyn Environment) -> Result<Secret, TemplateError> {
        let mut value = String::new();
        for part in &self.0 {
            match part {
                Part::Text(text) => value.push_str(text),
                Part::Variable(name) => match environment.var(name) {
                    Some(text) => value.push_str(&text),
                    None => return Err(TemplateError::Unset { name: name.clone() }),
                },
                Part::File(path) => match environment.file(path) {
                    Ok(text) => {
                        value.push_str(text.strip_suffix('\n').map_or(&*text, |text| text.trim_end_matches('\r')))
                    }
                    Err(error) => return Err(TemplateError::Unreadable { path: path.clone(), kind: error.kind() }),
                },
            }
        }
        Ok(Secret(value))
    }

    /// Each variable and file in it, filled in by itself; what can't be is left out. Reads files; holds on to nothing.
    pub(crate) fn resolve_parts(&self, environment: &dyn Environment) -> Vec<Secret> {
        let part = |part: &Part| match part {
            Part::Text(_) => None,
            Part::Variable(_) | Part::File(_) => Self(Box::new([part.clone()])).resolve(environment).ok(),
        };
        self.0.iter().filter_map(part).collect()
    }

    /// Gives `take` each piece of how it is written; literal pieces may be confidential.
    pub(crate) fn spell(&self, take: &mut dyn FnMut(&str)) {
        for part in &self.0 {
            match part {
                Part::Text(text) => take(text),
                Part::Variable(name) => take(&format!("${{{name}}}")),
                Part::File(path) => take(&format!("${{file:{}}}", path.display())),
            }
        }
    }

    /// The names of the variables and files that it depends on, in order; files as `file:PATH`.
    pub fn sources(&self) -> Vec<String> {
        let source = |part: &Part| match part {
            Part::Text(_) => None,
            Part::Variable(name) => Some(name.to_string()),
            Part::File(path) => Some(format!("file:{}", path.display())),
        };
        self.0.iter().filter_map(source).collect()
    }
}

impl fmt::Debug for Template {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Template").field(&self.sources()).finish()
    }
}

/// A resolved value. `Debug` hides it, and there is no `Display`.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// The value, for the one header or variable that carries it.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

/// Why a template can't be read or filled in. It names variables and never shows a value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TemplateError {
    /// A `${` without its `}`.
    #[error("`${{` is not closed")]
    Unclosed,
    /// Something that names neither a variable nor a file.
    #[error("`${{{name}}}` names neither a variable nor a file")]
    Name {
        /// What stands between the braces.
        name: Box<str>,
    },
    /// A variable that is not set.
    #[error("the environment variable `{name}` is not set")]
    Unset {
        /// The variable.
        name: Box<str>,
    },
    /// A file that can't be read.
    #[error("the file `{}` can't be read: {kind}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What reading it said.
        kind: io::ErrorKind,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Table;

    impl Environment for Table {
        fn var(&self, name: &str) -> Option<String> {
            (name == "TOKEN").then(|| "s3cret".to_owned())
        }

        fn file(&self, path: &Path) -> io::Result<String> {
            if path == Path::new("/run/secret") {
                Ok("from file\r\n".to_owned())
            } else {
                Err(io::ErrorKind::NotFound.into())
            }
        }
    }

    fn resolved(text: &str) -> Result<String, TemplateError> {
        Template::parse(text)?.resolve(&Table).map(|secret| secret.reveal().to_owned())
    }

    #[test]
    fn variables_and_files_are_filled_in() {
        for (text, expected) in [
            ("", ""),
            ("plain $5", "plain $5"),
            ("Bearer ${TOKEN}", "Bearer s3cret"),
            ("${TOKEN}${TOKEN}!", "s3crets3cret!"),
            ("<${file:/run/secret}>", "<from file>"),
            ("$${TOKEN}", "${TOKEN}"),
        ] {
            assert_eq!(resolved(text).as_deref(), Ok(expected), "{text:?}");
        }
    }

    #[test]
    fn what_is_missing_is_named() {
        assert_eq!(resolved("a ${OTHER}"), Err(TemplateError::Unset { name: "OTHER".into() }));
        assert_eq!(resolved("${TOKEN"), Err(TemplateError::Unclosed));
        for bad in ["${}", "${a-b}", "${1A}", "${file:}"] {
            assert!(matches!(resolved(bad), Err(TemplateError::Name { .. })), "{bad:?}");
        }
        let error = resolved("${file:/nowhere}").expect_err("there is no such file");
        assert_eq!(error.to_string(), "the file `/nowhere` can't be read: entity not found");
    }

    #[test]
    fn i6_neither_the_template_nor_its_value_shows_itself() {
        let template = Template::parse("literal-canary ${TOKEN}").expect("it is well formed");
        let value = template.resolve(&Table).expect("it is set");
        let shown = format!("{template:?} {value:?}");
        assert!(shown.contains("TOKEN"));
        assert!(!shown.contains("canary") && !shown.contains("s3cret"), "{shown}");
    }
}
