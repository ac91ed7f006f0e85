//! Who may speak to the listener at all: `Host` and `Origin` (2025-11-25, Transports, Security Warning), and the name
//! of the agent.

use http::HeaderMap;
use http::header::{HOST, ORIGIN};
use mainstay_core::code::Code;
use mainstay_core::principal::Principal;

use crate::engine::Refused;

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

/// Who sends a request, in mode `none`: the agent that `X-Agent-Name` names, or nobody in particular (I1, I2).
///
/// # Errors
/// [`Code::AgentRefused`] if the name is required and missing, or is no usable name.
pub fn principal(headers: &HeaderMap, require_agent: bool) -> Result<Principal, Refused> {
    match headers.get(AGENT_NAME) {
        None if require_agent => {
            Err(Refused::new(Code::AgentRefused, "an `X-Agent-Name` header is required here and is missing"))
        }
        None => Ok(Principal::Anonymous),
        Some(value) => {
            let name = value.to_str().ok().map(str::trim);
            let name = name.filter(|name| (1..=AGENT_NAME_BYTES_MAX).contains(&name.len()));
            name.map(|name| Principal::Agent(name.into())).ok_or_else(|| {
                let text = format!("`X-Agent-Name` must be 1 to {AGENT_NAME_BYTES_MAX} characters of visible ASCII");
                Refused::new(Code::AgentRefused, text)
            })
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

/// Names the agent in mode `none`.
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
    fn i2_a_required_agent_name_must_be_usable() {
        assert_eq!(principal(&headers(&[("x-agent-name", "builder")]), true), Ok(Principal::Agent("builder".into())));
        assert_eq!(principal(&HeaderMap::new(), false), Ok(Principal::Anonymous));
        for bad in [headers(&[]), headers(&[("x-agent-name", " ")])] {
            assert_eq!(principal(&bad, true).map_err(|refused| refused.code), Err(Code::AgentRefused));
        }
    }
}
