//! The program of a server on disk, to tell whether it was replaced since its children were started (C9).

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use mainstay_core::time::Timestamp;

use crate::server::{Reach, Server};
use crate::template::Environment;

/// A program file as it was at some time. Equal ones are the same file with the same contents, as far as can be told
/// without reading it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stamp {
    device: u64,
    inode: u64,
    bytes: u64,
    modified_at: Timestamp,
    /// When anything of the file changed last, its name included.
    changed_at: Timestamp,
}

/// How the program on disk compares with the one that a child runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnDisk {
    /// It is the same.
    Same,
    /// It was replaced or changed since; the next start uses it.
    Newer,
    /// It is not there any more, or can't be looked at.
    Missing,
}

impl Stamp {
    /// Of the program of `server` now; `None` if there is none. Asks the file system, and may wait for it.
    pub(crate) fn of(server: &Server, environment: &dyn Environment) -> Option<Self> {
        let Reach::Child { program, env, cwd, .. } = &server.reach else { return None };
        let named = Path::new(program);
        if program.as_encoded_bytes().contains(&b'/') {
            return Self::read(&cwd.as_ref().map_or_else(|| named.to_owned(), |cwd| cwd.join(named)));
        }
        let configured = env.iter().find(|(name, _)| name == "PATH");
        let path = match configured {
            Some((_, template)) => template.resolve(environment).ok()?.reveal().to_owned(),
            None => environment.var("PATH")?,
        };
        path.split(':').take(PATH_FOLDERS_MAX).find_map(|folder| {
            let found: PathBuf = Path::new(folder).join(named);
            Self::read(&found)
        })
    }

    fn read(path: &Path) -> Option<Self> {
        let found = fs::metadata(path).ok().filter(fs::Metadata::is_file)?;
        let seconds = u64::try_from(found.ctime()).unwrap_or_default();
        let millis =
            seconds.saturating_mul(1000).saturating_add(u64::try_from(found.ctime_nsec()).unwrap_or(0) / 1_000_000);
        Some(Self {
            device: found.dev(),
            inode: found.ino(),
            bytes: found.size(),
            modified_at: found.modified().map_or(Timestamp::default(), unix),
            changed_at: Timestamp::from_unix_millis(millis),
        })
    }
}

/// Compares the program `now` with that of a child that was started `since` then; of one that another worker has started
/// only that time is known.
pub(super) fn compare(started: Option<Stamp>, since: Timestamp, now: Option<Stamp>) -> OnDisk {
    let Some(now) = now else { return OnDisk::Missing };
    let is_newer = match started {
        Some(started) => {
            (started.device, started.inode, started.bytes, started.modified_at)
                != (now.device, now.inode, now.bytes, now.modified_at)
        }
        None => now.changed_at > since,
    };
    if is_newer { OnDisk::Newer } else { OnDisk::Same }
}

fn unix(time: SystemTime) -> Timestamp {
    let since_epoch = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    Timestamp::from_unix_millis(u64::try_from(since_epoch.as_millis()).unwrap_or(u64::MAX))
}

/// How many folders of a `PATH` are looked into.
const PATH_FOLDERS_MAX: usize = 256;

#[cfg(test)]
mod tests {
    use std::io;

    use mainstay_core::id::ServerName;

    use super::*;
    use crate::template::Template;

    struct Nothing;

    impl Environment for Nothing {
        fn var(&self, _: &str) -> Option<String> {
            None
        }

        fn file(&self, _: &Path) -> io::Result<String> {
            Err(io::ErrorKind::NotFound.into())
        }
    }

    #[test]
    fn c9_a_replaced_program_is_newer_wherever_it_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("srv");
        let env = vec![("PATH".to_owned(), Template::parse(&format!("/nowhere:{}", folder.path().display())).unwrap())];
        for (program, cwd) in [("srv".into(), None), ("./srv".into(), Some(folder.path().to_owned()))] {
            let reach = Reach::Child { program, args: Vec::new(), env: env.clone(), cwd };
            let server = Server::new(ServerName::parse("srv").unwrap(), reach);
            fs::write(&path, "one").unwrap();
            let first = Stamp::of(&server, &Nothing);
            let since = first.unwrap().changed_at;
            assert_eq!(compare(first, since, Stamp::of(&server, &Nothing)), OnDisk::Same);
            fs::write(folder.path().join("other"), "two").unwrap();
            fs::rename(folder.path().join("other"), &path).unwrap();
            let second = Stamp::of(&server, &Nothing);
            assert_eq!(compare(first, since, second), OnDisk::Newer);
            assert_eq!(compare(None, since.minus(std::time::Duration::from_secs(1)), second), OnDisk::Newer);
            assert_eq!(compare(None, since.plus(std::time::Duration::from_secs(60)), second), OnDisk::Same);
            fs::remove_file(&path).unwrap();
            assert_eq!(compare(first, since, Stamp::of(&server, &Nothing)), OnDisk::Missing);
        }
    }
}
