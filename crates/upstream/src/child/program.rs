//! The program of a server on disk, to tell whether it was replaced since its children were started (C9).
//!
//! Many programs are only the interpreter of a script among their arguments (`node server.js`): then both are looked at.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use mainstay_core::time::Timestamp;

use crate::server::{Reach, Server};
use crate::template::Environment;

/// What a child runs, as it was on disk at some time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stamp {
    program: FileStamp,
    /// Of the script that the program was told to run, if it was.
    script: Option<FileStamp>,
}

/// A file as it was at some time. Equal ones are the same file with the same contents, as far as can be told without
/// reading it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FileStamp {
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
    /// Of the program of `server` now, and of its script; `None` if there is no program. Asks the file system, and may
    /// wait for it.
    pub(crate) fn of(server: &Server, environment: &dyn Environment) -> Option<Self> {
        let Reach::Child { program, args, env, cwd } = &server.reach else { return None };
        let named = Path::new(program);
        let from_cwd = |path: &Path| cwd.as_ref().map_or_else(|| path.to_owned(), |cwd| cwd.join(path));
        let script = script(named, args).and_then(|path| FileStamp::read(&from_cwd(path)));
        if program.as_encoded_bytes().contains(&b'/') {
            return Some(Self { program: FileStamp::read(&from_cwd(named))?, script });
        }
        let configured = env.iter().find(|(name, _)| name == "PATH");
        let path = match configured {
            Some((_, template)) => template.resolve(environment).ok()?.reveal().to_owned(),
            None => environment.var("PATH")?,
        };
        let program = path.split(':').take(PATH_FOLDERS_MAX).find_map(|folder| {
            let found: PathBuf = Path::new(folder).join(named);
            FileStamp::read(&found)
        })?;
        Some(Self { program, script })
    }

    /// When anything of it changed last.
    fn changed_at(&self) -> Timestamp {
        self.script.map_or(self.program.changed_at, |script| script.changed_at.max(self.program.changed_at))
    }
}

/// The argument that names the script which `program` runs, if one does: the first that looks like a script by its name,
/// or, for a program that is known to run scripts, the first that is no option. Files that are merely worked on, which
/// change all the time, are none.
fn script<'a>(program: &Path, args: &'a [OsString]) -> Option<&'a Path> {
    let name = program.file_name().and_then(OsStr::to_str).unwrap_or_default();
    let runs_scripts = INTERPRETERS.contains(&name.trim_end_matches(|c: char| c.is_ascii_digit() || c == '.'));
    let paths = || args.iter().take(ARGS_LOOKED_AT_MAX).map(Path::new);
    let by_name = paths().find(|path| {
        let extension = path.extension().and_then(OsStr::to_str);
        extension.is_some_and(|extension| SCRIPT_EXTENSIONS.contains(&extension))
    });
    let is_option = |path: &Path| path.as_os_str().as_encoded_bytes().starts_with(b"-");
    by_name.or_else(|| paths().find(|path| runs_scripts && !is_option(path)))
}

impl FileStamp {
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

    /// Whether `other` is the same file with the same contents. When its name or its mode changed is no matter.
    fn is_same(&self, other: &Self) -> bool {
        (self.device, self.inode, self.bytes, self.modified_at)
            == (other.device, other.inode, other.bytes, other.modified_at)
    }
}

/// Compares the program `now` with that of a child that was started `since` then; of one that another worker has started
/// only that time is known.
pub(super) fn compare(started: Option<Stamp>, since: Timestamp, now: Option<Stamp>) -> OnDisk {
    let Some(now) = now else { return OnDisk::Missing };
    let is_newer = match started {
        Some(Stamp { script: Some(_), .. }) if now.script.is_none() => return OnDisk::Missing,
        Some(started) => {
            let other_script = started.script.zip(now.script).is_some_and(|(then, now)| !then.is_same(&now));
            !started.program.is_same(&now.program) || other_script
        }
        None => now.changed_at() > since,
    };
    if is_newer { OnDisk::Newer } else { OnDisk::Same }
}

fn unix(time: SystemTime) -> Timestamp {
    let since_epoch = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    Timestamp::from_unix_millis(u64::try_from(since_epoch.as_millis()).unwrap_or(u64::MAX))
}

/// How many folders of a `PATH` are looked into.
const PATH_FOLDERS_MAX: usize = 256;

/// How many arguments are looked at for a script.
const ARGS_LOOKED_AT_MAX: usize = 64;

/// Programs that run the script which is their first argument, without digits of a version behind their names.
const INTERPRETERS: &[&str] = &[
    "ash", "bash", "bun", "dash", "deno", "ksh", "lua", "node", "nodejs", "perl", "php", "pypy", "python", "ruby",
    "sh", "zsh",
];

/// How names of scripts, and of what else is run by another program, end.
const SCRIPT_EXTENSIONS: &[&str] =
    &["cjs", "cts", "dll", "jar", "js", "lua", "mjs", "mts", "php", "pl", "py", "pyz", "rb", "sh", "ts", "wasm"];

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
            let since = first.unwrap().changed_at();
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

    #[test]
    fn c9_a_replaced_script_counts_as_its_program_does() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("python3.12"), "the interpreter").unwrap();
        let path = folder.path().join("serve.py");
        let reach = Reach::Child {
            program: "./python3.12".into(),
            args: vec!["-u".into(), "serve.py".into(), "notes.db".into()],
            env: Vec::new(),
            cwd: Some(folder.path().to_owned()),
        };
        let server = Server::new(ServerName::parse("srv").unwrap(), reach);
        fs::write(&path, "one").unwrap();
        fs::write(folder.path().join("notes.db"), "what it works on").unwrap();
        let first = Stamp::of(&server, &Nothing);
        let since = first.unwrap().changed_at();
        fs::write(folder.path().join("notes.db"), "is no program").unwrap();
        assert_eq!(compare(first, since, Stamp::of(&server, &Nothing)), OnDisk::Same);
        fs::write(folder.path().join("other"), "two").unwrap();
        fs::rename(folder.path().join("other"), &path).unwrap();
        let second = Stamp::of(&server, &Nothing);
        assert_eq!(compare(first, since, second), OnDisk::Newer);
        assert_eq!(compare(None, since.minus(std::time::Duration::from_secs(1)), second), OnDisk::Newer);
        fs::remove_file(&path).unwrap();
        assert_eq!(compare(first, since, Stamp::of(&server, &Nothing)), OnDisk::Missing);
    }

    #[test]
    fn c9_a_script_is_told_from_what_is_worked_on() {
        let of = |program: &str, args: &[&str]| {
            let args: Vec<OsString> = args.iter().map(Into::into).collect();
            script(Path::new(program), &args).map(|path| path.display().to_string())
        };
        for (program, args, expected) in [
            ("node", &["--inspect", "dist/server.js", "/srv"][..], Some("dist/server.js")),
            ("/usr/bin/python3.11", &["-m", "package"], Some("package")),
            ("bash", &["/opt/run-server"], Some("/opt/run-server")),
            ("uv", &["run", "server.py"], Some("server.py")),
            ("java", &["-jar", "server.jar"], Some("server.jar")),
            ("mcp-sqlite", &["/srv/notes.db"], None),
            ("npx", &["-y", "@scope/server"], None),
        ] {
            assert_eq!(of(program, args).as_deref(), expected, "{program} {args:?}");
        }
    }
}
