//! Which running gateway a command is for.
//!
//! A command for a gateway that runs needs its state directory and nothing else of its configuration. So a file that is
//! wrong by now keeps nobody from looking after the gateway that was started with it.

use std::fs;
use std::path::{Path, PathBuf};

use super::Place;
use super::config::with_surroundings;
use super::failure::Failure;
use super::gateway::Gateway;
use crate::config::{Config, Overrides, Source};

/// The configuration that names the state directory of the gateway that `place` means, and the file of its admin token.
///
/// # Errors
/// Exit code 2: the file is wrong, and no gateway is known to run with it.
pub(super) fn config_of(place: &Place) -> Result<Config, Failure> {
    let overrides = Overrides { state_dir: place.state_dir.clone(), ..Overrides::default() };
    let file = match (&place.state_dir, &place.config) {
        // Told outright, nothing else needs to be read, nor be right.
        (Some(_), _) | (None, None) => None,
        (None, Some(file)) => Some(file),
    };
    let nowhere = || with_surroundings(&Source::Nothing, &overrides).map(|loaded| loaded.config);
    let Some(file) = file else { return Ok(as_published(nowhere()?)) };
    match with_surroundings(&Source::File(file.clone()), &overrides) {
        Ok(loaded) => Ok(loaded.config),
        Err(failure) => {
            let usual = nowhere().ok().map(|config| config.state_dir);
            found(file, usual).ok_or_else(|| unusable(failure))
        }
    }
}

/// The same with the token file that the gateway there says it uses, if it says so.
fn as_published(mut config: Config) -> Config {
    if let Ok(Some(Gateway { token_file: Some(file), .. })) = Gateway::read(&config.state_dir) {
        config.admin.token_file = Some(file);
    }
    config
}

/// A gateway that was started with `file`, which can't be read as a configuration now: in the directory that the file
/// still names, or in the `usual` one.
fn found(file: &Path, usual: Option<PathBuf>) -> Option<Config> {
    let file = fs::canonicalize(file).ok()?;
    let candidates = named(&file).into_iter().chain(usual);
    let published = candidates.filter_map(|folder| Some((Gateway::read(&folder).ok()??, folder)));
    let of_file = published.filter(|(gateway, _)| gateway.config.as_ref() == Some(&file));
    of_file.map(|(_, folder)| as_published(Config::with_defaults(folder))).next()
}

/// The state directory that `file` names, if it is TOML at all.
fn named(file: &Path) -> Option<PathBuf> {
    let bytes = fs::read(file).ok().filter(|bytes| bytes.len() <= FILE_BYTES_MAX)?;
    let table: toml::Table = toml::from_str(&String::from_utf8(bytes).ok()?).ok()?;
    Some(file.parent()?.join(table.get("state_dir")?.as_str()?))
}

fn unusable(failure: Failure) -> Failure {
    if failure.faults().is_none() {
        return failure;
    }
    failure.hint("mend the file; or, for a gateway that runs, name its state directory instead: `--state-dir DIR`")
}

/// The longest file that is looked into for its state directory.
const FILE_BYTES_MAX: usize = 16 * 1024 * 1024;

#[cfg(test)]
mod tests {
    use super::*;

    fn published(folder: &Path, config: Option<&Path>) {
        fs::create_dir_all(folder).unwrap();
        let port = |port| ([127, 0, 0, 1], port).into();
        let config = config.map(|file| fs::canonicalize(file).unwrap());
        let token_file = Some(PathBuf::from("/run/token"));
        let gateway = Gateway { mcp: port(1), admin: port(2), keeper: 1, activated: Vec::new(), config, token_file };
        gateway.write(folder).unwrap();
    }

    #[test]
    fn a_gateway_is_found_by_its_file_though_that_is_wrong_by_now_and_no_other_one_is() {
        let dir = tempfile::tempdir().unwrap();
        let (file, other) = (dir.path().join("m.toml"), dir.path().join("other.toml"));
        let [own, usual] = ["own", "usual"].map(|name| dir.path().join(name));
        fs::write(&file, "state_dir = \"own\"\ncolour = \"red\"\n").unwrap();
        fs::write(&other, "not toml").unwrap();
        let of = |file: &Path| found(file, Some(usual.clone())).map(|config| config.state_dir);
        assert_eq!((of(&file), of(&other)), (None, None), "nothing runs");
        published(&usual, Some(&other));
        assert_eq!((of(&file), of(&other)), (None, Some(usual.clone())), "it runs with another file");
        published(&own, Some(&file));
        assert_eq!(of(&file).map(|found| fs::canonicalize(found).unwrap()), Some(fs::canonicalize(&own).unwrap()));
        assert_eq!(found(&file, None).unwrap().admin.token_file, Some("/run/token".into()));
        published(&own, None);
        assert_eq!(of(&file), None, "it was started without a file");
    }
}
