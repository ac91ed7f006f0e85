//! `x-mcp-header`: which arguments of a tool stand in headers, too (2026-07-28, Streamable HTTP, Custom Headers from Tool
//! Parameters).

use std::collections::BTreeSet;

use super::header::PARAM_PREFIX;
use super::walk;
use crate::wire::envelope::{self, Span};

/// One argument that is repeated in a header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Annotation {
    /// What the header's name has behind `Mcp-Param-`, as the schema spells it.
    pub name: Box<str>,
    /// The names of the properties that lead to the argument, outermost first.
    pub path: Box<[Box<str>]>,
}

impl Annotation {
    /// The name of the header, in lower case.
    pub fn header(&self) -> String {
        let mut header = format!("{PARAM_PREFIX}{}", self.name);
        header.make_ascii_lowercase();
        header
    }

    /// The raw value of the argument among those at `arguments` of `message`; `None` if it is absent or `null`.
    pub fn value(&self, message: &[u8], arguments: &Span) -> Option<Span> {
        let mut at = arguments.clone();
        for name in &self.path {
            at = envelope::member(message, &at, name)?;
        }
        message.get(at.clone()).is_some_and(|raw| !envelope::is_null(raw)).then_some(at)
    }
}

/// The annotations in the raw `inputSchema` of a tool, in the order in which they stand there.
///
/// # Errors
/// An annotation where none may stand, or that says what none may say: whoever speaks HTTP must not offer the tool.
pub fn read(schema: &[u8]) -> Result<Vec<Annotation>, AnnotationError> {
    let mut reader = Reader { schema, path: Vec::new(), names: BTreeSet::new(), found: Vec::new() };
    // Most tools have none, and need no walk.
    if memchr::memmem::find(schema, b"mcp-header").is_some() || schema.contains(&b'\\') {
        reader.schema(&(0..schema.len()), true)?;
    }
    Ok(reader.found)
}

/// Why a tool's annotations are not valid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AnnotationError {
    /// It does not say a token of HTTP.
    #[error("an `x-mcp-header` is not the name of a header")]
    NotAName,
    /// Two say the same, but for case.
    #[error("two `x-mcp-header` say `{name}`")]
    Repeated {
        /// What they say.
        name: Box<str>,
    },
    /// It stands at a parameter that is no string, integer or boolean.
    #[error("the `x-mcp-header` `{name}` is not at a string, an integer or a boolean")]
    NotPrimitive {
        /// What it says.
        name: Box<str>,
    },
    /// It stands where the argument can't be found by the names of properties alone.
    #[error("the `x-mcp-header` `{name}` is not reachable by properties alone")]
    Unreachable {
        /// What it says.
        name: Box<str>,
    },
    /// There are more than [`ANNOTATIONS_MAX`].
    #[error("it has more than {ANNOTATIONS_MAX} `x-mcp-header`")]
    TooMany,
}

struct Reader<'a> {
    schema: &'a [u8],
    path: Vec<Box<str>>,
    /// In lower case.
    names: BTreeSet<String>,
    found: Vec<Annotation>,
}

impl Reader<'_> {
    /// Reads the schema at `at`; how deep it nests was bounded when the message was scanned.
    fn schema(&mut self, at: &Span, reachable: bool) -> Result<(), AnnotationError> {
        let schema = self.schema;
        for (key, value) in walk::members(schema, at) {
            let key = &schema[key];
            let is = |name: &str| walk::says(key, name);
            if is(ANNOTATION) {
                self.take(at, &value, reachable)?;
            } else if is("properties") {
                self.properties(&value, reachable)?;
            } else if !VALUES.iter().any(|name| is(name)) {
                // A map of schemas looks like a schema whose unknown members are schemas.
                self.beyond(&value, SCHEMA_MAPS.iter().any(|name| is(name)))?;
            }
        }
        Ok(())
    }

    fn properties(&mut self, at: &Span, reachable: bool) -> Result<(), AnnotationError> {
        for (key, value) in walk::members(self.schema, at) {
            let name = envelope::unescape(&self.schema[key]).unwrap_or_default();
            self.path.push(name.into());
            self.schema(&value, reachable)?;
            self.path.pop();
        }
        Ok(())
    }

    /// Reads what can't be reached by properties alone, in which there may be no annotation.
    fn beyond(&mut self, at: &Span, is_map: bool) -> Result<(), AnnotationError> {
        if is_map {
            return self.properties(at, false);
        }
        for element in walk::elements(self.schema, at) {
            self.schema(&element, false)?;
        }
        self.schema(at, false)
    }

    fn take(&mut self, schema: &Span, value: &Span, reachable: bool) -> Result<(), AnnotationError> {
        let name = envelope::unescape(&self.schema[value.clone()]).filter(|name| is_token(name));
        let name: Box<str> = name.ok_or(AnnotationError::NotAName)?.into();
        if !reachable {
            return Err(AnnotationError::Unreachable { name });
        }
        if self.path.is_empty() || !self.is_primitive(schema) {
            return Err(AnnotationError::NotPrimitive { name });
        }
        if !self.names.insert(name.to_ascii_lowercase()) {
            return Err(AnnotationError::Repeated { name });
        }
        if self.found.len() == ANNOTATIONS_MAX {
            return Err(AnnotationError::TooMany);
        }
        self.found.push(Annotation { name, path: self.path.clone().into() });
        Ok(())
    }

    /// Whether the schema at `at` allows one primitive type only, or that or `null`.
    fn is_primitive(&self, at: &Span) -> bool {
        let Some(kind) = envelope::member(self.schema, at, "type") else { return false };
        let one = |span: &Span| PRIMITIVES.iter().any(|name| walk::says(&self.schema[span.clone()], name));
        let mut kinds =
            walk::elements(self.schema, &kind).filter(|span| !walk::says(&self.schema[span.clone()], "null"));
        one(&kind) || (kinds.next().is_some_and(|span| one(&span)) && kinds.next().is_none())
    }
}

/// Whether `text` can be part of a header's name (RFC 9110, section 5.6.2).
fn is_token(text: &str) -> bool {
    let token = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
    !text.is_empty() && text.bytes().all(token)
}

/// How many annotations a tool may have.
pub const ANNOTATIONS_MAX: usize = 64;
const ANNOTATION: &str = "x-mcp-header";
const PRIMITIVES: [&str; 3] = ["string", "integer", "boolean"];
/// Members of a schema whose values are data.
const VALUES: [&str; 5] = ["const", "default", "enum", "example", "examples"];
/// Members of a schema whose values are schemas by name.
const SCHEMA_MAPS: [&str; 4] = ["$defs", "definitions", "patternProperties", "dependentSchemas"];

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn shown(schema: &str) -> Result<Vec<String>, String> {
        let found = read(schema.as_bytes()).map_err(|error| error.to_string())?;
        Ok(found.iter().map(|annotation| format!("{}={}", annotation.header(), annotation.path.join("."))).collect())
    }

    fn property(schema: &str) -> String {
        format!(r#"{{"type":"object","properties":{{"a":{schema}}}}}"#)
    }

    #[test]
    fn e2_annotations_are_found_by_properties_alone() {
        let schema = r#"{"type":"object","properties":{
            "region":{"type":"string","x-mcp-header":"Region"},
            "x-mcp-header":{"type":"object","properties":{"n":{"type":["integer","null"],"x-mcp-header":"n\u002d1"}}},
            "plain":{"type":"string","default":{"x-mcp-header":7},"enum":[{"x-mcp-header":""}]}},
            "$defs":{"x-mcp-header":{"type":"string"}},"required":["region"]}"#;
        assert_eq!(shown(schema).unwrap(), ["mcp-param-region=region", "mcp-param-n-1=x-mcp-header.n"]);
        assert_eq!(shown("{}").unwrap(), [""; 0]);
        assert_eq!(shown("true").unwrap(), [""; 0]);
    }

    #[test]
    fn e2_invalid_annotations_are_named() {
        for (schema, problem) in [
            (property(r#"{"type":"string","x-mcp-header":""}"#), "an `x-mcp-header` is not the name of a header"),
            (property(r#"{"type":"string","x-mcp-header":"a b"}"#), "an `x-mcp-header` is not the name of a header"),
            (property(r#"{"type":"string","x-mcp-header":"a\r\nb"}"#), "an `x-mcp-header` is not the name of a header"),
            (property(r#"{"type":"string","x-mcp-header":7}"#), "an `x-mcp-header` is not the name of a header"),
            (
                property(r#"{"type":"string","x-mcp-header":"A"},"b":{"type":"string","x-mcp-header":"a"}"#),
                "two `x-mcp-header` say `a`",
            ),
            (
                property(r#"{"type":"number","x-mcp-header":"A"}"#),
                "the `x-mcp-header` `A` is not at a string, an integer or a boolean",
            ),
            (
                property(r#"{"type":["string","integer"],"x-mcp-header":"A"}"#),
                "the `x-mcp-header` `A` is not at a string, an integer or a boolean",
            ),
            (property(r#"{"x-mcp-header":"A"}"#), "the `x-mcp-header` `A` is not at a string, an integer or a boolean"),
            (
                r#"{"type":"string","x-mcp-header":"A"}"#.to_owned(),
                "the `x-mcp-header` `A` is not at a string, an integer or a boolean",
            ),
            (
                property(r#"{"type":"array","items":{"type":"string","x-mcp-header":"A"}}"#),
                "the `x-mcp-header` `A` is not reachable by properties alone",
            ),
            (
                property(r#"{"oneOf":[{"properties":{"b":{"type":"string","x\u002dmcp-header":"A"}}}]}"#),
                "the `x-mcp-header` `A` is not reachable by properties alone",
            ),
            (
                r#"{"$defs":{"d":{"type":"string","x-mcp-header":"A"}}}"#.to_owned(),
                "the `x-mcp-header` `A` is not reachable by properties alone",
            ),
            (
                r#"{"if":{"properties":{"b":{"type":"string","x-mcp-header":"A"}}}}"#.to_owned(),
                "the `x-mcp-header` `A` is not reachable by properties alone",
            ),
        ] {
            assert_eq!(shown(&schema), Err(problem.to_owned()), "{schema}");
        }
        let many: Vec<_> =
            (0..=ANNOTATIONS_MAX).map(|n| format!(r#""p{n}":{{"type":"string","x-mcp-header":"h{n}"}}"#)).collect();
        let many = format!(r#"{{"properties":{{{}}}}}"#, many.join(","));
        assert_eq!(read(many.as_bytes()), Err(AnnotationError::TooMany));
    }

    #[test]
    fn e2_an_argument_is_found_by_its_path() {
        let annotation = Annotation { name: "A".into(), path: ["a".into(), "b".into()].into() };
        for (arguments, found) in [
            (r#"{"b":1,"a":{"b":2}}"#, Some("2")),
            (r#"{"a":{"b":null}}"#, None),
            (r#"{"a":[{"b":1}]}"#, None),
            (r#"{"a":"b"}"#, None),
            ("{}", None),
        ] {
            let value = annotation.value(arguments.as_bytes(), &(0..arguments.len()));
            assert_eq!(value.map(|span| &arguments[span]), found, "{arguments}");
        }
    }

    proptest! {
        #[test]
        fn e2_no_schema_upsets_the_reader(name in any::<String>(), property_name in any::<String>(), kind in "[a-z]{0,7}") {
            let schema = serde_json::json!({"properties": {
                &property_name: {"type": kind, "x-mcp-header": name}, "other": {"type": "string", "x-mcp-header": "Other"}}});
            let found = read(schema.to_string().as_bytes());
            let valid = is_token(&name) && PRIMITIVES.contains(&&*kind) && !name.eq_ignore_ascii_case("other");
            if property_name != "other" {
                prop_assert_eq!(found.is_ok(), valid);
            }
        }
    }
}
