//! What servers are called that nobody has named, or not in a way that every client takes.

use std::path::Path;

use mainstay_core::id::ServerName;

/// The name of the server started by `words`: the program's file stem, or for a package runner the package.
pub(in crate::config) fn name_of_command(words: &[String]) -> String {
    let stem = |word: &str| {
        let path = Path::new(word);
        path.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default().to_owned()
    };
    let program = words.first().map(|word| stem(word)).unwrap_or_default();
    if !PACKAGE_RUNNERS.contains(&program.as_str()) {
        return as_name(&program);
    }
    let mut rest = words.iter().skip(1);
    while let Some(word) = rest.next() {
        if VALUE_FLAGS.contains(&word.as_str()) {
            rest.next();
        } else if !word.starts_with('-') {
            let unscoped = word.rsplit('/').next().unwrap_or(word);
            let unversioned = unscoped.split(['@', '=', '[', '<', '>', '~']).next().unwrap_or(unscoped);
            return as_name(unversioned);
        }
    }
    as_name(&program)
}

/// The name of the server at `url`: its host.
pub(in crate::config) fn name_of_url(url: &str) -> String {
    let uri = url.parse::<http::Uri>().ok();
    match uri.as_ref().and_then(http::Uri::host).unwrap_or_default() {
        "[::1]" => "localhost".to_owned(),
        host => as_name(host),
    }
}

/// The nearest name that a server may have and that every client takes: letters, digits, `-` and `_`.
pub(in crate::config) fn as_name(text: &str) -> String {
    let mut name = String::with_capacity(text.len());
    for symbol in text.chars() {
        match symbol {
            symbol if symbol.is_ascii_alphanumeric() || symbol == '_' || symbol == '-' => name.push(symbol),
            // Several in a row are one.
            _ if name.ends_with('-') => {}
            _ => name.push('-'),
        }
    }
    let mut name = name.trim_matches('-').to_owned();
    name.truncate(SERVER_NAME_CHARS_MAX);
    if ServerName::parse(&name).is_some() { name } else { SERVER_NAME_FALLBACK.to_owned() }
}

const PACKAGE_RUNNERS: &[&str] = &["npx", "uvx", "bunx", "pnpx", "pipx"];
/// Flags of the runners that take a value as the next word.
const VALUE_FLAGS: &[&str] = &["-p", "--package", "--from", "--with", "--python", "-c", "--call", "run", "--spec"];
const SERVER_NAME_CHARS_MAX: usize = 64;
const SERVER_NAME_FALLBACK: &str = "server";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_names_its_server() {
        for (words, name) in [
            ("/usr/bin/my-server.py --x", "my-server"),
            ("npx -y @modelcontextprotocol/server-filesystem@2026.1.0 /srv", "server-filesystem"),
            ("npx --package=x -- tool", "tool"),
            ("uvx --from mcp-git mcp-server-git==1.0", "mcp-server-git"),
            ("npx", "npx"),
            ("./ü", "server"),
        ] {
            let words: Vec<String> = words.split(' ').map(str::to_owned).collect();
            assert_eq!(name_of_command(&words), name);
        }
    }

    #[test]
    fn a_derived_name_is_one_that_every_client_takes() {
        for (url, name) in [
            ("https://mcp.example.com/x", "mcp-example-com"),
            ("http://127.0.0.1:9/mcp", "127-0-0-1"),
            ("http://[::1]:9/mcp", "localhost"),
            ("http://[2001:db8::7]/mcp", "2001-db8-7"),
            ("nonsense", "nonsense"),
            ("", "server"),
        ] {
            assert_eq!(name_of_url(url), name, "{url}");
        }
        assert_eq!((as_name("a.b: c").as_str(), as_name("a--b").as_str()), ("a-b-c", "a--b"));
    }
}
