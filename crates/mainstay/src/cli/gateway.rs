//! How commands find a running gateway: two private files in its state directory.
//!
//! `gateway.json` says where it listens and what it was started from, `admin.token` opens the admin API.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::net::SocketAddr;
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, anyhow};
use mainstay_core::id::base64url;
use serde::{Deserialize, Serialize};

use super::failure::Failure;
use crate::config::Config;
use crate::runtime::entropy;

/// Where a gateway listens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Gateway {
    /// The MCP port.
    pub mcp: SocketAddr,
    /// The admin port.
    pub admin: SocketAddr,
    /// The keeper's process id, for people; signals go to the lock's owner.
    pub keeper: u32,
    /// Which of its ports, `mcp` and `admin`, a service manager holds for it: their addresses are no matter of its
    /// configuration.
    #[serde(default)]
    pub activated: Vec<String>,
    /// The configuration file that it was started from, links resolved; none if it was started without one.
    #[serde(default)]
    pub config: Option<PathBuf>,
    /// The file of the admin token, if it was configured at the start.
    #[serde(default)]
    pub token_file: Option<PathBuf>,
}

impl Gateway {
    /// Publishes it: complete or not at all, readable by the owner only.
    pub(super) fn write(&self, state_dir: &Path) -> anyhow::Result<()> {
        let path = state_dir.join(GATEWAY_FILE);
        let draft = state_dir.join(GATEWAY_DRAFT_FILE);
        let text = serde_json::to_vec(self).context("write the gateway's addresses")?;
        let written = remove_if_there(&draft)
            .and_then(|()| create_private(&draft))
            .and_then(|mut file| file.write_all(&text).and_then(|()| file.sync_all()))
            .and_then(|()| fs::rename(&draft, &path));
        written.with_context(|| format!("write `{}`", path.display()))
    }

    /// What the gateway of this state directory published; `None` if there is none.
    pub(super) fn read(state_dir: &Path) -> anyhow::Result<Option<Self>> {
        let path = state_dir.join(GATEWAY_FILE);
        let text = match fs::read(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(anyhow!(error).context(format!("read `{}`", path.display()))),
        };
        serde_json::from_slice(&text).map(Some).with_context(|| format!("read `{}`", path.display()))
    }

    /// Takes the publication back.
    pub(super) fn withdraw(state_dir: &Path) -> io::Result<()> {
        remove_if_there(&state_dir.join(GATEWAY_FILE))
    }
}

/// The failure of a command for a gateway that does not run.
pub(super) fn absent(state_dir: &Path) -> Failure {
    let shown = state_dir.display();
    Failure::not_running(anyhow!("no gateway runs on `{shown}`"))
        .hint("start one with `mainstay serve`, or name its directory with `--state-dir` or `--config`")
}

/// Makes sure that there is an admin token: 256 random bits in a private file. An existing one is kept, and made
/// private again if it lies in the state directory.
pub(super) fn ensure_token(config: &Config) -> Result<TokenFile, Failure> {
    let path = config.admin_token_file();
    let name = || format!("the admin token `{}`", path.display());
    match fs::metadata(&path) {
        Ok(found) => {
            read_token(config)?;
            if found.permissions().mode() & OTHERS_MODE == 0 {
                return Ok(TokenFile::Kept);
            }
            if config.admin.token_file.is_some() {
                return Ok(TokenFile::Open);
            }
            let private = fs::Permissions::from_mode(PRIVATE_MODE);
            fs::set_permissions(&path, private).with_context(|| format!("make {} private", name()))?;
            Ok(TokenFile::Mended)
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound && config.admin.token_file.is_none() => {
            let bytes: [u8; TOKEN_BYTES] = entropy().context("draw the admin token")?;
            let made = create_private(&path)
                .and_then(|mut file| writeln!(file, "{}", base64url(&bytes)).and_then(|()| file.sync_all()));
            made.with_context(|| format!("write {}", name()))?;
            Ok(TokenFile::Made)
        }
        Err(error) => {
            let failure = Failure::usage(anyhow!(error).context(format!("read {}", name())));
            Err(failure.hint("make the file, or leave `admin.token_file` out to have one made"))
        }
    }
}

/// What became of the token file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TokenFile {
    /// It was there.
    Kept,
    /// It is new.
    Made,
    /// It was there, and others could read it.
    Mended,
    /// It is the operator's own file, and others can read it.
    Open,
}

/// The admin token. A secret.
pub(super) fn read_token(config: &Config) -> Result<String, Failure> {
    let path = config.admin_token_file();
    let text = fs::read_to_string(&path).with_context(|| format!("read the admin token `{}`", path.display()))?;
    let token = text.trim();
    let usable = token.len() >= TOKEN_CHARS_MIN && token.bytes().all(|byte| byte.is_ascii_graphic());
    if !usable {
        let cause = anyhow!("the admin token `{}` is too short or has blanks in it", path.display());
        return Err(Failure::usage(cause).hint("remove the file to have a new one made at the next start"));
    }
    Ok(token.to_owned())
}

fn create_private(path: &Path) -> io::Result<File> {
    OpenOptions::new().write(true).create_new(true).mode(PRIVATE_MODE).open(path)
}

fn remove_if_there(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

const GATEWAY_FILE: &str = "gateway.json";
const GATEWAY_DRAFT_FILE: &str = "gateway.json.draft";
const PRIVATE_MODE: u32 = 0o600;
const OTHERS_MODE: u32 = 0o077;
const TOKEN_BYTES: usize = 32;
const TOKEN_CHARS_MIN: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o777
    }

    #[test]
    fn the_publication_is_private_replaced_whole_and_can_be_taken_back() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(Gateway::read(dir.path()).unwrap(), None);
        for keeper in [1, 2] {
            let gateway = Gateway {
                mcp: ([127, 0, 0, 1], 1).into(),
                admin: ([127, 0, 0, 1], 2).into(),
                keeper,
                activated: Vec::new(),
                config: None,
                token_file: Some("/run/token".into()),
            };
            gateway.write(dir.path()).unwrap();
            assert_eq!(Gateway::read(dir.path()).unwrap(), Some(gateway));
        }
        assert_eq!(mode(&dir.path().join(GATEWAY_FILE)), 0o600);
        Gateway::withdraw(dir.path()).unwrap();
        Gateway::withdraw(dir.path()).unwrap();
        assert_eq!(Gateway::read(dir.path()).unwrap(), None);
    }

    #[test]
    fn the_token_is_made_once_and_stays_private() {
        let dir = tempfile::tempdir().unwrap();
        let config = Config::with_defaults(dir.path().into());
        assert_eq!(ensure_token(&config).unwrap(), TokenFile::Made);
        let token = read_token(&config).unwrap();
        assert_eq!((token.len(), mode(&config.admin_token_file())), (43, 0o600));
        assert_eq!(ensure_token(&config).unwrap(), TokenFile::Kept);
        fs::set_permissions(config.admin_token_file(), fs::Permissions::from_mode(0o644)).unwrap();
        assert_eq!(ensure_token(&config).unwrap(), TokenFile::Mended);
        assert_eq!((read_token(&config).unwrap(), mode(&config.admin_token_file())), (token, 0o600));
    }

    #[test]
    fn a_configured_token_is_never_made_up_and_a_short_one_refused() {
        let dir = tempfile::tempdir().unwrap();
        let mut config = Config::with_defaults(dir.path().into());
        let path = dir.path().join("mine");
        config.admin.token_file = Some(path.clone());
        assert!(ensure_token(&config).is_err());
        fs::write(&path, "long enough for a token\n").unwrap();
        assert!(ensure_token(&config).is_err());
        fs::write(&path, "long-enough-for-a-token\n").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        assert_eq!((ensure_token(&config).unwrap(), mode(&path)), (TokenFile::Open, 0o640));
        fs::write(&path, "short\n").unwrap();
        assert!(ensure_token(&config).is_err());
    }
}
