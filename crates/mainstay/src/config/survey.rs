//! What a right configuration still lacks on this machine: programs, directories, variables, files.
//!
//! None of it keeps a gateway from starting, and all of it may be there later; so these are warnings.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use super::check::Fault;
use super::{Config, Reach, Surroundings, Template};

/// Everything that is missing now.
pub(super) fn survey(config: &Config, around: &Surroundings<'_>) -> Vec<Fault> {
    let mut missing = Vec::new();
    if config.servers.is_empty() {
        let hint = "name some under `[servers]`, or in the `mcpServers` of a client's file";
        missing.push(Fault::new(&["servers"], "no servers are configured", Some(hint)));
    }
    for (name, server) in &config.servers {
        let name = name.as_str();
        match &server.reach {
            Reach::Child { command, env, cwd, .. } => {
                program(name, command, cwd.as_deref().filter(|cwd| cwd.is_dir()), env.contains_key("PATH"), around)
                    .into_iter()
                    .for_each(|fault| missing.push(fault));
                if let Some(cwd) = cwd.as_ref().filter(|cwd| !cwd.is_dir()) {
                    let message = format!("the directory `{}` is not there", cwd.display());
                    missing.push(Fault::new(&["servers", name, "cwd"], message, None));
                }
                for (key, template) in env {
                    missing.extend(sources(&["servers", name, "env", key], template, around));
                }
            }
            Reach::Http { headers, .. } => {
                for (key, template) in headers {
                    missing.extend(sources(&["servers", name, "headers", key], template, around));
                }
            }
        }
    }
    for (name, template) in config.auth.tokens.iter().flat_map(|(name, all)| all.iter().map(move |one| (name, one))) {
        missing.extend(sources(&["auth", "tokens", name], template, around));
    }
    missing
}

/// The variables that the configuration asks for.
pub(super) fn references(config: &Config) -> BTreeSet<String> {
    let of_servers = config.servers.values().flat_map(|server| match &server.reach {
        Reach::Child { env: values, .. } | Reach::Http { headers: values, .. } => values.values(),
    });
    of_servers.chain(config.auth.tokens.values().flatten()).flat_map(named).collect()
}

/// Whether the program can't be found.
fn program(name: &str, command: &str, cwd: Option<&Path>, own_path: bool, around: &Surroundings<'_>) -> Option<Fault> {
    let key = ["servers", name, "command"];
    if command.contains('/') {
        let path = cwd.unwrap_or(&around.working_dir).join(command);
        return (!is_program(&path))
            .then(|| Fault::new(&key, format!("`{command}` is no program that can be run"), None));
    }
    let folders = (around.var)("PATH").unwrap_or_default();
    let found = own_path || std::env::split_paths(&folders).any(|folder| is_program(&folder.join(command)));
    (!found).then(|| {
        let hint = "install it, or write its whole path";
        Fault::new(&key, format!("the program `{command}` is not found on PATH"), Some(hint))
    })
}

fn is_program(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|found| found.is_file() && found.permissions().mode() & ANY_EXECUTE_MODE != 0)
}

/// The variables and files of a template that are not there.
fn sources(key: &[&str], template: &Template, around: &Surroundings<'_>) -> Vec<Fault> {
    let missing = |source: String| match source.strip_prefix("file:").map(PathBuf::from) {
        Some(path) if fs::metadata(around.working_dir.join(&path)).is_ok() => None,
        Some(path) => Some(Fault::new(key, format!("the file `{}` is not there", path.display()), None)),
        None if (around.var)(&source).is_some() => None,
        None => Some(Fault::new(key, format!("the environment variable `{source}` is not set"), None)),
    };
    named(template).into_iter().filter_map(missing).collect()
}

fn named(template: &Template) -> Vec<String> {
    mainstay_upstream::Template::parse(template.reveal()).map(|parsed| parsed.sources()).unwrap_or_default()
}

const ANY_EXECUTE_MODE: u32 = 0o111;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Overrides, Source, load};

    #[test]
    fn what_is_missing_is_a_warning_with_its_place() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("m.toml");
        let var = |name: &str| match name {
            "PATH" => Some("/usr/bin:/bin".to_owned()),
            "HOME" => Some("/home/u".to_owned()),
            _ => None,
        };
        let around = Surroundings { var: &var, names: &[], root: false, working_dir: dir.path().into() };
        for (text, told) in [
            ("#\n", &["no servers"][..]),
            ("[servers.a]\ncommand = \"sh\"\nenv = { A = \"${HOME}\" }\n", &[]),
            (
                "[servers.a]\ncommand = \"no-such-program\"\ncwd = \"gone\"\n",
                &["`no-such-program` is not found", "gone"],
            ),
            ("[servers.a]\ncommand = \"./x\"\n", &["`./x` is no program"]),
            (
                "[servers.a]\ncommand = \"sh\"\nenv = { A = \"${NO}${file:/no/file}\" }\n",
                &["`NO` is not", "`/no/file`"],
            ),
            ("[servers.a]\nurl = \"http://h/\"\nheaders = { A = \"${NO}\" }\n", &["`NO` is not set"]),
        ] {
            fs::write(&file, text).unwrap();
            let warnings = load(&Source::File(file.clone()), &Overrides::default(), &around).unwrap().warnings;
            assert_eq!(warnings.len(), told.len(), "{text}: {warnings:?}");
            for (warning, told) in warnings.iter().zip(told) {
                assert!(warning.message.contains(told), "{warning}");
                assert!(warning.location.is_some() || text == "#\n", "{warning}");
            }
        }
    }
}
