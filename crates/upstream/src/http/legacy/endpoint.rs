//! Where messages go: the URL that the `endpoint` event names.

use http::Uri;
use http::uri::{Parts, PathAndQuery};

/// Why messages can't go where the event says. What it says is not repeated: it names the session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Unfit {
    /// It is no URL.
    #[error("its `endpoint` event names no url")]
    Malformed,
    /// It leads to somebody else, who must get neither the messages nor the credentials of this server.
    #[error("its `endpoint` event names another origin than its url has")]
    OtherOrigin,
}

/// The URL that `reference` means on the event stream at `base` (RFC 3986, section 5.2). It is of the same origin.
pub(super) fn resolve(base: &Uri, reference: &str) -> Result<Uri, Unfit> {
    let reference = reference.trim_ascii();
    let reference = reference.split_once('#').map_or(reference, |(before, _)| before);
    if reference.is_empty() {
        return Err(Unfit::Malformed);
    }
    let uri = if has_scheme(reference) {
        reference.parse().map_err(|_| Unfit::Malformed)?
    } else if reference.starts_with("//") {
        let scheme = base.scheme_str().ok_or(Unfit::Malformed)?;
        format!("{scheme}:{reference}").parse().map_err(|_| Unfit::Malformed)?
    } else {
        relative(base, reference)?
    };
    let origin = origin(&uri).ok_or(Unfit::Malformed)?;
    if Some(origin) == self::origin(base) { Ok(uri) } else { Err(Unfit::OtherOrigin) }
}

fn relative(base: &Uri, reference: &str) -> Result<Uri, Unfit> {
    let (path, query) = match reference.split_once('?') {
        Some((path, query)) => (path, Some(query)),
        None => (reference, None),
    };
    let folder = || base.path().rsplit_once('/').map_or("", |(folder, _)| folder);
    let mut target = match path {
        "" => base.path().to_owned(),
        _ if path.starts_with('/') => without_dots(path),
        _ => without_dots(&format!("{}/{path}", folder())),
    };
    if let Some(query) = query {
        target.push('?');
        target.push_str(query);
    }
    let mut parts = Parts::default();
    parts.scheme = base.scheme().cloned();
    parts.authority = base.authority().cloned();
    parts.path_and_query = Some(PathAndQuery::try_from(target).map_err(|_| Unfit::Malformed)?);
    Uri::from_parts(parts).map_err(|_| Unfit::Malformed)
}

/// The path without `.` and `..` (RFC 3986, section 5.2.4).
fn without_dots(path: &str) -> String {
    let mut kept: Vec<&str> = Vec::new();
    let mut segments = path.split('/').skip(1).peekable();
    while let Some(segment) = segments.next() {
        let last = segments.peek().is_none();
        match segment {
            "." => {}
            ".." => {
                kept.pop();
            }
            _ => {
                kept.push(segment);
                continue;
            }
        }
        // What the dots lead to is a folder.
        if last {
            kept.push("");
        }
    }
    format!("/{}", kept.join("/"))
}

fn has_scheme(reference: &str) -> bool {
    let Some(end) = reference.find([':', '/', '?']).filter(|&end| reference.as_bytes()[end] == b':') else {
        return false;
    };
    reference.starts_with(|first: char| first.is_ascii_alphabetic())
        && reference[..end].bytes().all(|byte| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte))
}

/// Scheme, host and port, if it is the URL of a web server and holds no credentials.
fn origin(uri: &Uri) -> Option<(&'static str, String, u16)> {
    let (scheme, default) = match uri.scheme_str()? {
        "http" => ("http", 80),
        "https" => ("https", 443),
        _ => return None,
    };
    let authority = uri.authority().filter(|authority| !authority.as_str().contains('@'))?;
    Some((scheme, authority.host().to_ascii_lowercase(), authority.port_u16().unwrap_or(default)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolved(base: &str, reference: &str) -> Result<String, Unfit> {
        resolve(&base.parse().expect("a url"), reference).map(|uri| uri.to_string())
    }

    #[test]
    fn the_endpoint_is_relative_to_the_stream() {
        for (base, reference, expected) in [
            ("http://h:8/sse", "/message?sessionId=1", "http://h:8/message?sessionId=1"),
            ("http://h:8/a/sse", "messages/?session_id=1", "http://h:8/a/messages/?session_id=1"),
            ("http://h:8/a/b/sse?x=1", "../messages?s", "http://h:8/a/messages?s"),
            ("http://h/a/sse?x=1", "?s=1", "http://h/a/sse?s=1"),
            ("http://h/a/", "./m/.", "http://h/a/m/"),
            ("http://h/sse", "/../../m#part", "http://h/m"),
            ("http://h/sse", " http://H:80/m?s ", "http://H:80/m?s"),
            ("https://h/sse", "//h:443/m", "https://h:443/m"),
            ("http://h", "m:n", "malformed"),
            ("http://h/sse", "m/a:b", "http://h/m/a:b"),
        ] {
            let outcome = resolved(base, reference).unwrap_or_else(|unfit| match unfit {
                Unfit::Malformed => "malformed".into(),
                Unfit::OtherOrigin => "other origin".into(),
            });
            assert_eq!(outcome, expected, "{base} {reference}");
        }
    }

    #[test]
    fn u11_an_endpoint_at_another_origin_is_refused() {
        for reference in ["http://other/m", "http://h:9/m", "https://h:8/m", "//other/m", "http://h.other:8/m"] {
            assert_eq!(resolved("http://h:8/sse", reference), Err(Unfit::OtherOrigin), "{reference}");
        }
        for reference in ["", "  ", "#x", "http://", "http://u@h:8/m", "mailto:h", "ftp://h:8/m", "/a b", "/\u{7}"] {
            assert_eq!(resolved("http://h:8/sse", reference), Err(Unfit::Malformed), "{reference}");
        }
    }
}
