//! What `serve` says when it is up: where each server is, and what to paste into a client.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use serde_json::{Map, Value, json};

use super::failure::Failure;
use super::gateway::Gateway;
use super::output::Output;
use crate::config::{AuthMode, Config};

/// Tells where the servers are. Nobody reading it is no reason not to serve.
pub(super) fn announce(config: &Config, gateway: &Gateway, out: &Output) -> Result<(), Failure> {
    if out.is_json() {
        return out.document(&document(config, gateway));
    }
    out.line(&text(config, gateway))
}

fn text(config: &Config, gateway: &Gateway) -> String {
    let mut lines = vec![format!("mainstay {} serves", env!("CARGO_PKG_VERSION"))];
    let width = config.servers.keys().map(|name| name.as_str().len()).max().unwrap_or(0);
    let names = || config.servers.keys().map(|name| name.as_str());
    lines.extend(names().map(|name| format!("  {name:width$}  {}", url(gateway.mcp, name))));
    lines.push(format!("admin on http://{}, state in {}", gateway.admin, config.state_dir.display()));
    if !config.servers.is_empty() {
        lines.push("\nfor a client's configuration:".to_owned());
        lines.push(format!("{:#}", snippet(config, gateway.mcp)));
        lines.push("\nor for Claude Code:".to_owned());
        let header =
            if wants_tokens(config) { format!(" --header \"Authorization: {BEARER}\"") } else { String::new() };
        let commands = claude_names(config)
            .into_iter()
            .map(|(shown, name)| format!("claude mcp add --transport http {shown} {}{header}", url(gateway.mcp, name)));
        lines.extend(commands);
    }
    lines.join("\n")
}

fn document(config: &Config, gateway: &Gateway) -> Value {
    let urls: Map<String, Value> =
        config.servers.keys().map(|name| (name.to_string(), url(gateway.mcp, name.as_str()).into())).collect();
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "mcp": gateway.mcp,
        "admin": gateway.admin,
        "state_dir": config.state_dir,
        "servers": urls,
        "client": snippet(config, gateway.mcp),
    })
}

/// The `mcpServers` object that Claude Code, Cursor and others take.
fn snippet(config: &Config, mcp: SocketAddr) -> Value {
    let entry = |name: &str| match wants_tokens(config) {
        true => json!({ "type": "http", "url": url(mcp, name), "headers": { "Authorization": BEARER } }),
        false => json!({ "type": "http", "url": url(mcp, name) }),
    };
    let servers: Map<String, Value> =
        config.servers.keys().map(|name| (name.to_string(), entry(name.as_str()))).collect();
    json!({ "mcpServers": servers })
}

/// Each server's name as Claude Code takes it (letters, digits, `-`, `_`), no two alike, and as it is served.
fn claude_names(config: &Config) -> BTreeMap<String, &str> {
    let mut names = BTreeMap::new();
    for name in config.servers.keys().map(|name| name.as_str()) {
        let shown = name.replace('.', "-");
        let mut free = shown.clone();
        for count in 2..=config.servers.len() {
            if !names.contains_key(&free) {
                break;
            }
            free = format!("{shown}-{count}");
        }
        names.insert(free, name);
    }
    names
}

fn wants_tokens(config: &Config) -> bool {
    config.auth.mode == AuthMode::Token
}

fn url(mcp: SocketAddr, name: &str) -> String {
    format!("http://{mcp}/mcp/{name}")
}

/// What a client is to send; which token is its own is not known here.
const BEARER: &str = "Bearer TOKEN";

#[cfg(test)]
mod tests {
    use mainstay_core::id::ServerName;

    use super::*;
    use crate::config::{Reach, Server};

    fn example() -> (Config, Gateway) {
        let mut config = Config::with_defaults("/state".into());
        let reach = Reach::Http {
            url: "http://x/".parse().unwrap(),
            transport: mainstay_upstream::Transport::Auto,
            headers: std::collections::BTreeMap::new(),
        };
        config.servers.insert(ServerName::parse("tickets").unwrap(), Server::new(reach));
        let (mcp, admin) = (([127, 0, 0, 1], 7717).into(), ([127, 0, 0, 1], 7718).into());
        (config, Gateway { mcp, admin, keeper: 1, activated: Vec::new(), config: None, token_file: None })
    }

    #[test]
    fn each_server_has_its_url_and_the_snippet_is_ready_to_paste() {
        let (config, gateway) = example();
        let text = text(&config, &gateway);
        assert!(text.contains("tickets  http://127.0.0.1:7717/mcp/tickets"), "{text}");
        let from = text.find("{\n").unwrap();
        let pasted: Value = serde_json::from_str(&text[from..=text.rfind('}').unwrap()]).unwrap();
        assert_eq!(pasted["mcpServers"]["tickets"]["url"], "http://127.0.0.1:7717/mcp/tickets");
    }

    #[test]
    fn i1_where_a_token_is_wanted_the_snippet_has_its_place() {
        let (mut config, gateway) = example();
        config.auth.mode = AuthMode::Token;
        let text = text(&config, &gateway);
        assert!(text.contains("\"Authorization\": \"Bearer TOKEN\""), "{text}");
        assert!(text.contains("/mcp/tickets --header \"Authorization: Bearer TOKEN\""), "{text}");
    }

    #[test]
    fn claude_code_takes_every_name_that_it_is_told() {
        let (mut config, gateway) = example();
        let server = config.servers.values().next().unwrap().clone();
        config.servers.extend(["a-b", "a.b"].map(|name| (ServerName::parse(name).unwrap(), server.clone())));
        let text = text(&config, &gateway);
        assert!(text.contains("http a-b http://127.0.0.1:7717/mcp/a-b\n"), "{text}");
        assert!(text.contains("http a-b-2 http://127.0.0.1:7717/mcp/a.b\n"), "{text}");
    }

    #[test]
    fn programs_get_the_same_as_one_document() {
        let (config, gateway) = example();
        let document = document(&config, &gateway);
        assert_eq!(document["servers"]["tickets"], "http://127.0.0.1:7717/mcp/tickets");
        assert_eq!(document["admin"], "127.0.0.1:7718");
    }
}
