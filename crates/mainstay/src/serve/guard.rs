//! Who may speak to the listener at all: `Host` and `Origin` (2025-11-25, Transports, Security Warning), and the name
//! of the agent.

use http::header::{HOST, ORIGIN};
use http::{HeaderMap, Request};
use mainstay_core::code::Code;
use mainstay_core::limit::Limit;
use mainstay_core::principal::Principal;

use crate::engine::{Caller, Refused};

/// The allow-lists of a listener.
#[derive(Clone, Debug, Default)]
pub struct Guard {
    /// Host names besides loopback's, without port.
    pub allowed_hosts: Vec<String>,
    /// Origins besides loopback's, such as `https://app.example.com`.
    pub allowed_origins: Vec<String>,
    /// Whether any `Host` will do: the listener is not on loopback, and the operator gave no list.
    pub any_host: bool,
}

impl Guard {
    /// Lets a request in by its `Host` and `Origin`.
    ///
    /// # Errors
    /// [`Code::OriginRefused`]: a page of another site, or a name that was bound to this address, is speaking.
    pub fn check(&self, headers: &HeaderMap) -> Result<(), Refused> {
        if let Some(host) = headers.get(HOST).filter(|_| !self.any_host) {
            let name = host.to_str().ok().map(host_name);
            let known =
                name.is_some_and(|name| is_loopback(name) || self.allowed_hosts.iter().any(|host| host == name));
            if !known {
                let text = "the `Host` header is not allowed here; add it to `serve.allowed_hosts`";
                return Err(Refused::new(Code::OriginRefused, text));
            }
        }
        if let Some(origin) = headers.get(ORIGIN) {
            let known = origin.to_str().is_ok_and(|origin| {
                let host = origin.split_once("://").map(|(_, host)| host_name(host));
                host.is_some_and(is_loopback) || self.allowed_origins.iter().any(|allowed| allowed == origin)
            });
            if !known {
                let text = "the `Origin` header is not allowed here; add it to `serve.allowed_origins`";
                return Err(Refused::new(Code::OriginRefused, text));
            }
        }
        Ok(())
    }
}

/// Whether the first line and the headers of `request` take at most `bytes_max` on the wire.
///
/// # Errors
/// [`Code::HeadTooLarge`].
pub fn head_fits<T>(request: &Request<T>, bytes_max: usize) -> Result<(), Refused> {
    let target = request.uri().path_and_query().map_or(0, |target| target.as_str().len());
    let first_line = request.method().as_str().len() + target + FIRST_LINE_BYTES;
    let lines = request.headers().iter().map(|(name, value)| name.as_str().len() + value.len() + LINE_BYTES);
    if first_line + lines.sum::<usize>() <= bytes_max {
        return Ok(());
    }
    let text = format!("the head of the request is larger than `{}`, {bytes_max} bytes", Limit::Head.name());
    Err(Refused::at_limit(Code::HeadTooLarge, Limit::Head, text))
}

/// Who sends a request with these headers. `proven` is what it has proven to be; where nothing needs to be proven, its
/// agent's name tells principals apart, or it is nobody in particular (I1, I2).
///
/// # Errors
/// [`Code::AgentRefused`] if the agent's name is required and missing, or is no usable name.
pub fn caller(proven: Option<Principal>, headers: &HeaderMap, require_agent: bool) -> Result<Caller, Refused> {
    let agent = agent(headers, require_agent)?;
    let named = || agent.clone().map_or(Principal::Anonymous, Principal::Agent);
    Ok(Caller { principal: proven.unwrap_or_else(named), agent })
}

fn agent(headers: &HeaderMap, require_agent: bool) -> Result<Option<Box<str>>, Refused> {
    let mut values = headers.get_all(AGENT_NAME).iter();
    let refused = |reason: &'static str, text: String| {
        tracing::info!(reason, "agent refused");
        Err(Refused::new(Code::AgentRefused, text))
    };
    let Some(value) = values.next() else {
        if require_agent {
            return refused("missing", "an `X-Agent-Name` header is required here and is missing".to_owned());
        }
        return Ok(None);
    };
    let name = value.to_str().ok().map(str::trim).filter(|name| (1..=AGENT_NAME_BYTES_MAX).contains(&name.len()));
    match name.filter(|_| values.next().is_none()) {
        Some(name) => Ok(Some(name.into())),
        None => {
            let text =
                format!("`X-Agent-Name` must be one name of 1 to {AGENT_NAME_BYTES_MAX} characters of visible ASCII");
            refused("unusable", text)
        }
    }
}

/// The host in `host`, `host:port`, `[v6]` or `[v6]:port`.
fn host_name(host: &str) -> &str {
    match host.strip_prefix('[') {
        Some(rest) => rest.split_once(']').map_or(host, |(name, _)| name),
        None => host.split_once(':').map_or(host, |(name, _)| name),
    }
}

fn is_loopback(name: &str) -> bool {
    name.eq_ignore_ascii_case("localhost")
        || name.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// What a first line has besides method and target: spaces, version, end.
const FIRST_LINE_BYTES: usize = "  HTTP/1.1\r\n".len();
/// What a line of the head has besides name and value.
const LINE_BYTES: usize = ": \r\n".len();
/// Names the agent.
const AGENT_NAME: &str = "x-agent-name";
const AGENT_NAME_BYTES_MAX: usize = 128;

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        pairs.iter().map(|(name, value)| (name.parse().expect("name"), value.parse().expect("value"))).collect()
    }

    #[test]
    fn s17_foreign_hosts_and_origins_are_refused() {
        let guard = Guard { allowed_origins: vec!["https://app.example.com".into()], ..Guard::default() };
        for (name, value, allowed) in [
            ("host", "localhost:7717", true),
            ("host", "127.0.0.1", true),
            ("host", "[::1]:80", true),
            ("host", "evil.example.com", false),
            ("host", "localhost.evil.example.com", false),
            ("host", "127.0.0.1.evil.example.com:80", false),
            ("origin", "http://localhost:5173", true),
            ("origin", "https://app.example.com", true),
            ("origin", "http://evil.example.com", false),
            ("origin", "null", false),
        ] {
            assert_eq!(guard.check(&headers(&[(name, value)])).is_ok(), allowed, "{name}: {value}");
        }
        assert!(guard.check(&HeaderMap::new()).is_ok());
    }

    #[test]
    fn s12_a_head_is_measured_as_it_is_on_the_wire() {
        let head = "POST /mcp/files?a=b HTTP/1.1\r\nhost: localhost\r\nx-agent-name: builder\r\n";
        let request = Request::post("/mcp/files?a=b").header("host", "localhost").header("x-agent-name", "builder");
        let request = request.body(()).expect("a request");
        assert_eq!(head_fits(&request, head.len()), Ok(()));
        let refused = head_fits(&request, head.len() - 1).expect_err("one byte too many");
        assert_eq!((refused.code, refused.limit), (Code::HeadTooLarge, Some(Limit::Head)));
    }

    #[test]
    fn i1_what_is_proven_outweighs_what_is_said() {
        let named = headers(&[("x-agent-name", "builder")]);
        let nothing = HeaderMap::new();
        let of = |proven, headers| caller(proven, headers, false).map(|caller| caller.principal);
        let alice = || Principal::Token("alice".into());
        assert_eq!(of(None, &named), Ok(Principal::Agent("builder".into())));
        assert_eq!(of(None, &nothing), Ok(Principal::Anonymous));
        assert_eq!(of(Some(alice()), &named), Ok(alice()));
        assert_eq!(of(Some(alice()), &nothing), Ok(alice()));
    }

    #[test]
    fn i2_a_required_agent_name_must_be_usable() {
        let good = headers(&[("x-agent-name", "builder")]);
        assert_eq!(caller(None, &good, true).map(|caller| caller.agent), Ok(Some("builder".into())));
        let long = "x".repeat(AGENT_NAME_BYTES_MAX + 1);
        for bad in [headers(&[]), headers(&[("x-agent-name", " ")]), headers(&[("x-agent-name", &long)])] {
            assert_eq!(caller(None, &bad, true).map_err(|refused| refused.code), Err(Code::AgentRefused));
        }
        let mut twice = good;
        twice.append(AGENT_NAME, "other".parse().expect("value"));
        assert_eq!(caller(None, &twice, false).map_err(|refused| refused.code), Err(Code::AgentRefused));
    }
}
