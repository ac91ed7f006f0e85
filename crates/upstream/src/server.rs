//! A configured server: how it is reached and what it may take.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use aws_lc_rs::digest;
use http::{HeaderName, Uri};
use mainstay_core::id::ServerName;
use mainstay_core::wire::modern::Era;

use crate::template::Template;

/// The definition of one MCP server. Immutable; a changed configuration makes a new one.
#[derive(Clone, Debug)]
pub struct Server {
    /// Its name.
    pub name: ServerName,
    /// How it is reached.
    pub reach: Reach,
    /// How long a call waits for a server that is down before it fails (U8).
    pub patience: Duration,
    /// The largest message that is taken from it; a larger one fails the call that it answers (AC-08).
    pub message_bytes_max: usize,
    /// The longest that its handshake may take, whatever it sends meanwhile (AC-07).
    pub handshake_bound: Duration,
    /// Tools that the operator says may be repeated (U5).
    pub safe_tools: Vec<Box<str>>,
    /// How long a child that was asked to end has until it is killed (C1).
    pub stop_grace: Duration,
    /// The era of the protocol that it speaks, if the operator says so (E5).
    pub era: Option<Era>,
    /// How long the calls of a child may go on whose server was defined anew meanwhile (T4).
    pub calls_grace: Duration,
}

/// The two ways to a server.
#[derive(Clone, Debug)]
pub enum Reach {
    /// HTTP.
    Http {
        /// Its endpoint.
        url: Uri,
        /// Which of the two transports over HTTP it speaks.
        transport: Transport,
        /// Headers of every request to it. Nothing of the client's own goes there (U11).
        headers: Vec<(HeaderName, Template)>,
    },
    /// A child process that speaks over its standard streams.
    Child {
        /// The executable, looked up in the child's `PATH`.
        program: OsString,
        /// Its arguments.
        args: Vec<OsString>,
        /// Variables on top of the short allow-list (C7).
        env: Vec<(String, Template)>,
        /// Its working directory; the keeper's if none.
        cwd: Option<PathBuf>,
    },
}

/// How MCP is spoken over HTTP.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Transport {
    /// Streamable HTTP, or HTTP+SSE if the server turns out to be of that time (2025-11-25, Transports, Backwards
    /// Compatibility).
    #[default]
    Auto,
    /// Streamable HTTP, whatever the server says.
    Streamable,
    /// HTTP+SSE of 2024-11-05, which later revisions deprecate: the URL is that of the event stream.
    Sse,
}

impl Server {
    /// The default of [`patience`](Self::patience).
    pub const PATIENCE: Duration = Duration::from_secs(10);
    /// The default of [`message_bytes_max`](Self::message_bytes_max).
    pub const MESSAGE_BYTES_MAX: usize = 16 * 1024 * 1024;
    /// The default of [`handshake_bound`](Self::handshake_bound).
    pub const HANDSHAKE_BOUND: Duration = Duration::from_secs(30);
    /// The default of [`stop_grace`](Self::stop_grace).
    pub const STOP_GRACE: Duration = Duration::from_secs(2);
    /// The default of [`calls_grace`](Self::calls_grace).
    pub const CALLS_GRACE: Duration = Duration::from_secs(5);

    /// A server with the default bounds.
    pub fn new(name: ServerName, reach: Reach) -> Self {
        Self {
            name,
            reach,
            patience: Self::PATIENCE,
            message_bytes_max: Self::MESSAGE_BYTES_MAX,
            handshake_bound: Self::HANDSHAKE_BOUND,
            safe_tools: Vec::new(),
            stop_grace: Self::STOP_GRACE,
            era: None,
            calls_grace: Self::CALLS_GRACE,
        }
    }

    /// The era that it is known to speak by what the operator says, and that is never asked for: HTTP+SSE is of 2024-11-05.
    pub fn fixed_era(&self) -> Option<Era> {
        let old = matches!(self.reach, Reach::Http { transport: Transport::Sse, .. });
        self.era.or(old.then_some(Era::Legacy))
    }

    /// What an upstream session depends on (U2): URL, or program, arguments and directory, and the *names* of headers,
    /// variables and their sources; that it speaks HTTP+SSE, if that is configured. No value, no bound, no order of
    /// headers. Equal definitions give equal digests in every version of the program.
    pub fn fingerprint(&self) -> [u8; 32] {
        let mut fields = Fields(digest::Context::new(&digest::SHA256));
        match &self.reach {
            Reach::Http { url, transport, headers } => {
                // Whether a server that speaks streamable HTTP was asked for its transport makes no other session.
                fields.add(match transport {
                    Transport::Auto | Transport::Streamable => b"http",
                    Transport::Sse => b"http+sse",
                });
                fields.add(url.to_string().as_bytes());
                fields.add_names(headers.iter().map(|(name, template)| (name.as_str(), template)));
            }
            Reach::Child { program, args, env, cwd } => {
                fields.add(b"child");
                fields.add(program.as_encoded_bytes());
                fields.add(&args.len().to_be_bytes());
                args.iter().for_each(|arg| fields.add(arg.as_encoded_bytes()));
                fields.add_names(env.iter().map(|(name, template)| (name.as_str(), template)));
                fields.add(cwd.as_ref().map_or(&b""[..], |cwd| cwd.as_os_str().as_encoded_bytes()));
            }
        }
        fields.finish()
    }

    /// The whole of what a child is started with: its [fingerprint](Self::fingerprint), and how the values of its variables
    /// are written, which may be confidential. So the digest never gets a name on a disk: it is part of the child's
    /// [label](crate::Label), which the keeper keeps in memory. When the keeper is renewed in place, the label travels in a
    /// file without a name: in memory (memfd), or, where memory has no files, in the state directory (`O_TMPFILE`), which
    /// is gone with its descriptor. In the ledger, with what is remembered of the server
    /// ([`ServerMemory`](crate::ServerMemory)), it is sealed.
    pub fn definition(&self) -> [u8; 32] {
        let mut fields = Fields(digest::Context::new(&digest::SHA256));
        fields.add(&self.fingerprint());
        if let Reach::Child { env, .. } = &self.reach {
            let sorted: BTreeMap<&str, &Template> =
                env.iter().map(|(name, template)| (name.as_str(), template)).collect();
            for (name, template) in sorted {
                fields.add(name.as_bytes());
                template.spell(&mut |piece| fields.add(piece.as_bytes()));
            }
        }
        fields.finish()
    }

    /// Whether it is reached by HTTP.
    pub fn is_http(&self) -> bool {
        self.url().is_some()
    }

    /// The transport over HTTP.
    pub(crate) fn transport(&self) -> Transport {
        match &self.reach {
            Reach::Http { transport, .. } => *transport,
            Reach::Child { .. } => Transport::Auto,
        }
    }

    /// The endpoint, if it is reached by HTTP.
    pub fn url(&self) -> Option<&Uri> {
        match &self.reach {
            Reach::Http { url, .. } => Some(url),
            Reach::Child { .. } => None,
        }
    }
}

/// A digest over fields, each with its length so that no two lists of fields look alike.
struct Fields(digest::Context);

impl Fields {
    fn add(&mut self, field: &[u8]) {
        self.0.update(&(field.len() as u64).to_be_bytes());
        self.0.update(field);
    }

    fn add_names<'a>(&mut self, named: impl Iterator<Item = (&'a str, &'a Template)>) {
        let sorted: BTreeMap<&str, Vec<String>> = named.map(|(name, template)| (name, template.sources())).collect();
        self.add(&sorted.len().to_be_bytes());
        for (name, sources) in sorted {
            self.add(name.as_bytes());
            self.add(sources.join("\0").as_bytes());
        }
    }

    fn finish(self) -> [u8; 32] {
        let mut digest = [0; 32];
        digest.copy_from_slice(self.0.finish().as_ref());
        digest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn http(url: &'static str, headers: &[(&'static str, &str)]) -> [u8; 32] {
        let header = |(name, value): &(&'static str, &str)| {
            (HeaderName::from_static(name), Template::parse(value).expect("well formed"))
        };
        reached(url, Transport::Auto, headers.iter().map(header).collect())
    }

    fn reached(url: &'static str, transport: Transport, headers: Vec<(HeaderName, Template)>) -> [u8; 32] {
        let reach = Reach::Http { url: Uri::from_static(url), transport, headers };
        Server::new(ServerName::parse("any").expect("a name"), reach).fingerprint()
    }

    fn child(args: &[&str], env: &[(&str, &str)]) -> [u8; 32] {
        let variable =
            |(name, value): &(&str, &str)| ((*name).to_owned(), Template::parse(value).expect("well formed"));
        let reach = Reach::Child {
            program: "srv".into(),
            args: args.iter().map(Into::into).collect(),
            env: env.iter().map(variable).collect(),
            cwd: None,
        };
        Server::new(ServerName::parse("any").expect("a name"), reach).fingerprint()
    }

    #[test]
    fn u2_the_fingerprint_covers_names_and_never_values() {
        let base = http("http://a/mcp", &[("authorization", "Bearer ${T}"), ("x-team", "red")]);
        assert_eq!(base, http("http://a/mcp", &[("x-team", "blue"), ("authorization", "Token ${T}")]));
        assert_ne!(base, http("http://b/mcp", &[("authorization", "Bearer ${T}"), ("x-team", "red")]));
        assert_ne!(base, http("http://a/mcp", &[("authorization", "Bearer ${U}"), ("x-team", "red")]));
        assert_ne!(base, http("http://a/mcp", &[("authorization", "Bearer ${T}")]));
        assert_eq!(http("http://a/mcp", &[]), reached("http://a/mcp", Transport::Streamable, Vec::new()));
        assert_ne!(http("http://a/mcp", &[]), reached("http://a/mcp", Transport::Sse, Vec::new()));
        assert_eq!(child(&["a"], &[("K", "1")]), child(&["a"], &[("K", "2")]));
        assert_ne!(child(&["a"], &[("K", "1")]), child(&["a"], &[("L", "1")]));
        assert_ne!(child(&["ab"], &[]), child(&["a", "b"], &[]));
        assert_ne!(child(&["a b"], &[]), child(&["a", "b"], &[]));
    }
}
