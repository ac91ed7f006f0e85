//! The renewal of the keeper: another program takes its place in the same process, with everything that it holds.
//!
//! The process stays, and with it its number, its children, its place as their reaper, its limits and its directory.
//! What only the program knew is written down ([`save`]), the descriptors are put into a parcel, and the next program is
//! executed with that as its standard input ([`Saved::execute`]). There it is unpacked and checked ([`Renewed::take`]),
//! sent back to the program before if anything is wrong with it ([`Renewed::go_back`]), and served on. `RENEWAL.md` is
//! the description for people.

use std::convert::Infallible;
use std::ffi::{CString, OsString};
use std::fs::File;
use std::io::{self, BufReader, BufWriter, Seek as _, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::rc::Rc;

use nix::unistd::{execve, fexecve};
use rustix::fs::{FileType, MemfdFlags, Mode, OFlags, fcntl_getfl, fstat, memfd_create};
use rustix::net::sockopt;

use crate::child::carry::Arrived;
use crate::child::pipe::Pipe;
use crate::identity::{ProcessIdentity, Stat};
use crate::keeper::Keeper;
use crate::lock::Lock;

use codec::CodecError;
use parcel::{Envelope, Parcel};
pub(crate) use signals::HeldSignals;
pub(crate) use state::{Course, Kind, Leaving, Passed, State};

mod codec;
mod parcel;
mod signals;
pub(crate) mod state;

/// The form in which the state is written. Raised with every change; a program takes over from one of the same form.
pub const FORMAT: u32 = 1;

/// Why a keeper could not be renewed, or could not go on from what another program left it.
#[derive(Debug, thiserror::Error)]
pub enum RenewalError {
    /// The state was written in a form that this program does not know.
    #[error("the state is written in form {found}, this program knows form {FORMAT}")]
    Format {
        /// The form found.
        found: u32,
    },
    /// The state is not what a keeper writes. The text names what is wrong with it and holds nothing of it.
    #[error("the state is unusable: {0}")]
    State(String),
    /// The state is meant for another process.
    #[error("the state is that of another process")]
    Stranger,
    /// It came back from a program that could not go on from it, and the one before can't either.
    #[error("neither this program nor the one after it could go on from the state: {0}")]
    Twice(String),
    /// The operating system refused.
    #[error("could not {act}")]
    System {
        /// What was attempted.
        act: &'static str,
        /// The reason.
        #[source]
        source: io::Error,
    },
}

impl RenewalError {
    fn system<E: Into<io::Error>>(act: &'static str) -> impl FnOnce(E) -> Self {
        move |source| Self::System { act, source: source.into() }
    }
}

impl From<CodecError> for RenewalError {
    fn from(error: CodecError) -> Self {
        match error {
            CodecError::Read(source) => Self::System { act: "read the state", source },
            CodecError::CutOff | CodecError::Malformed(_) | CodecError::Contradiction(_) => {
                Self::State(error.to_string())
            }
        }
    }
}

/// What is executed in the keeper's place.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Program<'a> {
    /// The file of this name.
    Path(&'a Path),
    /// The file that is open, whatever has become of its name.
    Open(BorrowedFd<'a>),
}

/// The program that runs now, for the way back to it.
pub(crate) fn own_program() -> Result<OwnedFd, RenewalError> {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    rustix::fs::open("/proc/self/exe", flags, Mode::empty()).map_err(RenewalError::system("open the running program"))
}

/// A keeper's state, ready to be taken along.
pub(crate) struct Saved<'a> {
    parcel: Parcel,
    fds: Vec<Held<'a>>,
}

/// A descriptor that goes along.
enum Held<'a> {
    Borrowed(BorrowedFd<'a>),
    Pipe(Rc<Pipe>),
}

impl AsFd for Held<'_> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Borrowed(fd) => *fd,
            Self::Pipe(pipe) => pipe.as_fd(),
        }
    }
}

/// Writes down what the keeper holds. It stays as it is; between this and the execution nothing may await.
pub(crate) fn save<'a>(keeper: &'a Keeper, course: Course<BorrowedFd<'a>>) -> Result<Saved<'a>, RenewalError> {
    let mut fds = Vec::new();
    let state = numbered(keeper, course, &mut fds)?;
    let file = written(&state, keeper.records_dir()).map_err(RenewalError::system("write the state"))?;
    let stdin = io::stdin().as_fd().try_clone_to_owned().map_err(RenewalError::system("keep standard input"))?;
    let envelope = Envelope::new(FORMAT, keeper.identity, fds.len(), None);
    Ok(Saved { parcel: Parcel { envelope, state: file.into(), program: own_program()?, stdin }, fds })
}

/// The state with its descriptors replaced by their numbers in `fds`.
fn numbered<'a>(
    keeper: &'a Keeper,
    course: Course<BorrowedFd<'a>>,
    fds: &mut Vec<Held<'a>>,
) -> Result<State<u32>, RenewalError> {
    let mut number = |fd, _: Kind| {
        let number = u32::try_from(fds.len()).map_err(|_| RenewalError::State("too many descriptors".to_owned()))?;
        fds.push(fd);
        Ok::<u32, RenewalError>(number)
    };
    let carried = keeper.carried();
    let listeners = keeper.listeners.iter().map(|(name, fd)| (name.clone(), Held::Borrowed(fd.as_fd()))).collect();
    let mut of_pipe = |pipe, _: Kind| Ok::<_, RenewalError>(Held::Pipe(pipe));
    let children = keeper.children();
    let state = State {
        keeper: keeper.identity,
        listeners,
        children: children.iter().map(|child| child.carried().map(&mut of_pipe)).collect::<Result<_, _>>()?,
        last_child: carried.last_child,
        ended_markers: carried.ended_markers,
        shutdown: carried.shutdown,
        course: course.map(&mut |fd, _| Ok::<_, RenewalError>(Held::Borrowed(fd)))?,
    };
    state.map(&mut number)
}

/// The state in a file without a name.
fn written(state: &State<u32>, dir: &Path) -> io::Result<File> {
    let mut out = BufWriter::new(Bounded { file: nameless_file(dir)?, left: STATE_BYTES_MAX });
    codec::encode(state, &mut out)?;
    let mut file = out.into_inner().map_err(io::IntoInnerError::into_error)?.file;
    file.rewind()?;
    Ok(file)
}

/// A file without a name, in memory; in `dir` where memory has no files.
pub(crate) fn nameless_file(dir: &Path) -> io::Result<File> {
    let file = match memfd_create("mainstay", MemfdFlags::CLOEXEC) {
        Ok(file) => file,
        Err(_) => {
            let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
            rustix::fs::open(dir, flags, Mode::RUSR | Mode::WUSR)?
        }
    };
    Ok(file.into())
}

/// A file that does not grow beyond a bound.
struct Bounded {
    file: File,
    left: u64,
}

impl Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.file.write(bytes)?;
        let left = self.left.checked_sub(written as u64);
        self.left = left.ok_or_else(|| io::Error::new(io::ErrorKind::FileTooLarge, "the children hold too much"))?;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl Saved<'_> {
    /// Executes `program` in this one's place, with `args` behind its name and the environment as it is. It comes back
    /// only with the reason why that failed, and then nothing has happened.
    pub(crate) fn execute(self, program: Program<'_>, args: &[OsString], _signals: &HeldSignals) -> RenewalError {
        let fds: Vec<BorrowedFd<'_>> = self.fds.iter().map(Held::as_fd).collect();
        refused(execute(&self.parcel, &fds, program, args))
    }
}

fn execute(
    parcel: &Parcel,
    fds: &[BorrowedFd<'_>],
    program: Program<'_>,
    args: &[OsString],
) -> Result<Infallible, RenewalError> {
    let own_name = std::env::args_os().next().unwrap_or_else(|| OsString::from("mainstay"));
    let args: Vec<CString> = [&own_name].into_iter().chain(args).map(text).collect::<Result<_, _>>()?;
    let variables = std::env::vars_os().map(|(name, value)| {
        let mut entry = name;
        entry.push("=");
        entry.push(value);
        text(&entry)
    });
    let environment: Vec<CString> = variables.collect::<Result<_, _>>()?;
    let posted = parcel.post(fds).map_err(RenewalError::system("put the descriptors into a parcel"))?;
    let executed = match program {
        Program::Path(path) => execve(&text(&path.as_os_str().to_owned())?, &args, &environment),
        Program::Open(file) => fexecve(file, &args, &environment),
    };
    drop(posted);
    executed.map_err(RenewalError::system("execute the program"))
}

fn text(text: &OsString) -> Result<CString, RenewalError> {
    CString::new(text.as_bytes()).map_err(RenewalError::system("pass an argument on"))
}

fn refused(executed: Result<Infallible, RenewalError>) -> RenewalError {
    match executed {
        Ok(never) => match never {},
        Err(error) => error,
    }
}

/// What the program before this one left it: a keeper that is to go on. Its signals wait until that is so.
pub struct Renewed {
    parcel: Parcel,
    fds: Vec<OwnedFd>,
    state: State<u32>,
    signals: HeldSignals,
}

/// What the program before left, but nothing that this one can go on from.
pub struct Unusable {
    error: RenewalError,
    left: Option<Box<Left>>,
}

/// What can be sent back.
struct Left {
    parcel: Parcel,
    fds: Vec<OwnedFd>,
    _signals: HeldSignals,
}

/// A keeper that goes on, and what its run loop has to know.
pub(crate) struct Restored {
    pub(crate) keeper: Rc<Keeper>,
    pub(crate) course: Course<OwnedFd>,
    /// The program before, for the way back to it.
    pub(crate) program: OwnedFd,
    /// Why the next program could not go on, if that is why this one does again.
    pub(crate) came_back: Option<String>,
    /// To be dropped once there are handlers, and before anything is started.
    pub(crate) signals: HeldSignals,
}

impl Renewed {
    /// Takes what the program before left on standard input, and checks all of it. `None` if this process was started in
    /// the ordinary way. To be called before anything else is done with standard input, and before any thread is started.
    ///
    /// # Errors
    /// What is there is none of what this program can go on from: [`Unusable::go_back`].
    pub fn take() -> Result<Option<Self>, Unusable> {
        let received = Parcel::receive().map_err(RenewalError::system("unpack the descriptors"));
        let Some((parcel, fds)) = received.map_err(|error| Unusable { error, left: None })? else {
            return Ok(None);
        };
        name_process();
        // They wait already: the program before saw to that.
        let signals = match HeldSignals::hold() {
            Ok(signals) => signals,
            Err(source) => {
                return Err(Unusable { error: RenewalError::System { act: "hold signals", source }, left: None });
            }
        };
        match open(&parcel, &fds) {
            Ok(state) => Ok(Some(Self { parcel, fds, state, signals })),
            Err(error @ RenewalError::Stranger) => Err(Unusable { error, left: None }),
            Err(error) => {
                let left = Left { parcel, fds, _signals: signals };
                Err(Unusable { error, left: Some(Box::new(left)) })
            }
        }
    }

    /// The settings for the next worker.
    #[must_use]
    pub fn settings(&self) -> &[u8] {
        &self.state.course.settings
    }

    /// The lock on the state directory, which came along.
    ///
    /// # Errors
    /// There is no descriptor left for it.
    pub fn lock(&self) -> Result<Lock, RenewalError> {
        let index = usize::try_from(self.state.course.lock).unwrap_or(usize::MAX);
        let held = self.fds.get(index).ok_or_else(|| RenewalError::State("the lock is missing".to_owned()))?;
        let own = held.try_clone().map_err(RenewalError::system("keep the lock"))?;
        Ok(Lock::from_descriptor(own))
    }

    /// Why the next program could not go on, if that is why this one does again.
    #[must_use]
    pub fn came_back(&self) -> Option<&str> {
        self.parcel.envelope.came_back.as_deref()
    }

    /// Gives everything back to the program before, which goes on as if nothing had happened and tells `reason`.
    /// It comes back only with the reason why that failed; then the children are lost, as if the keeper had been killed.
    #[must_use]
    pub fn go_back(self, reason: &str) -> RenewalError {
        refused(go_back(self.parcel, &self.fds, reason))
    }

    /// The keeper and all its children, served from now on. Must be called within the keeper's runtime.
    ///
    /// # Errors
    /// Nothing was served yet, but what the program before left is lost.
    pub(crate) fn restore(self, state_dir: &Path) -> Result<Restored, RenewalError> {
        let Self { parcel, fds, state, signals } = self;
        let mut fds: Vec<Option<OwnedFd>> = fds.into_iter().map(Some).collect();
        let state = state.map(&mut |number, _| taken(&mut fds, number))?;
        let listeners = state.listeners.into_iter().map(|(name, listener)| (name, listener.into())).collect();
        let keeper = Rc::new(Keeper::new(state.keeper, listeners, state.course.settings.to_vec(), state_dir));
        keeper.go_on_from(crate::keeper::Carried {
            last_child: state.last_child,
            ended_markers: state.ended_markers,
            shutdown: state.shutdown,
        });
        let arrived: io::Result<Vec<Arrived>> =
            state.children.into_iter().map(|child| Arrived::of(&keeper, child)).collect();
        for child in arrived.map_err(RenewalError::system("watch the children"))? {
            child.go_on(&keeper);
        }
        for worker in &state.course.leaving {
            keeper.own(worker.identity.pid());
        }
        let Parcel { envelope, program, .. } = parcel;
        Ok(Restored { keeper, course: state.course, program, came_back: envelope.came_back, signals })
    }
}

impl Unusable {
    /// What is wrong.
    #[must_use]
    pub fn error(&self) -> &RenewalError {
        &self.error
    }

    /// Gives everything back to the program before, which goes on as if nothing had happened. It comes back only with
    /// the reason why that failed; then the children are lost, as if the keeper had been killed.
    #[must_use]
    pub fn go_back(self) -> RenewalError {
        match self.left {
            Some(left) => {
                let Left { parcel, fds, _signals } = *left;
                refused(go_back(parcel, &fds, &self.error.to_string()))
            }
            None => self.error,
        }
    }
}

impl std::fmt::Debug for Renewed {
    /// Without anything that it holds.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Renewed").field("children", &self.state.children.len()).finish_non_exhaustive()
    }
}

impl std::fmt::Debug for Unusable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Unusable").field("error", &self.error).finish_non_exhaustive()
    }
}

fn go_back(mut parcel: Parcel, fds: &[OwnedFd], reason: &str) -> Result<Infallible, RenewalError> {
    if let Some(first_reason) = parcel.envelope.came_back {
        return Err(RenewalError::Twice(first_reason));
    }
    parcel.envelope = Envelope::new(parcel.envelope.format, parcel.envelope.keeper, fds.len(), Some(reason));
    let fds: Vec<BorrowedFd<'_>> = fds.iter().map(OwnedFd::as_fd).collect();
    let args: Vec<OsString> = std::env::args_os().skip(1).collect();
    execute(&parcel, &fds, Program::Open(parcel.program.as_fd()), &args)
}

/// Reads the state and checks that everything it tells of is there.
fn open(parcel: &Parcel, fds: &[OwnedFd]) -> Result<State<u32>, RenewalError> {
    let envelope = &parcel.envelope;
    let own = ProcessIdentity::of_self().map_err(RenewalError::system("read the keeper's own identity"))?;
    if envelope.keeper != own {
        return Err(RenewalError::Stranger);
    }
    if envelope.format != FORMAT {
        return Err(RenewalError::Format { found: envelope.format });
    }
    let file = parcel.state.try_clone().map_err(RenewalError::system("read the state"))?;
    let mut file = File::from(file);
    file.rewind().map_err(RenewalError::system("read the state"))?;
    let state = codec::decode(&mut BufReader::new(file))?;
    if state.keeper != own {
        return Err(RenewalError::Stranger);
    }
    let mut used = vec![false; fds.len()];
    let state = state.map(&mut |number, kind| {
        let index = usize::try_from(number).unwrap_or(usize::MAX);
        match (fds.get(index), used.get_mut(index)) {
            (Some(fd), Some(is_used)) if !*is_used && is_of_kind(fd, kind) => *is_used = true,
            _ => return Err(RenewalError::State(format!("descriptor {number} is not the {kind:?} it should be"))),
        }
        Ok(number)
    })?;
    let expected = usize::try_from(envelope.fds).unwrap_or(usize::MAX);
    if fds.len() != expected || used.contains(&false) {
        return Err(RenewalError::State(format!("{} descriptors came, {expected} were sent", fds.len())));
    }
    check_processes(&state)?;
    Ok(state)
}

/// Whether the processes are there, as themselves: nobody but the keeper reaps them.
fn check_processes(state: &State<u32>) -> Result<(), RenewalError> {
    let children = state.children.iter().filter(|child| !child.ending.is_gone).map(|child| child.identity);
    for identity in children.chain(state.course.leaving.iter().map(|worker| worker.identity)) {
        let found = ProcessIdentity::of(identity.pid()).map_err(RenewalError::system("look at the children"))?;
        let stat = Stat::read(identity.pid()).map_err(RenewalError::system("look at the children"))?;
        let is_own = stat.is_some_and(|stat| stat.parent == state.keeper.pid());
        if found != Some(identity) || !is_own {
            return Err(RenewalError::State(format!("process {identity} is not the keeper's")));
        }
    }
    Ok(())
}

fn is_of_kind(fd: &OwnedFd, kind: Kind) -> bool {
    let is_a = |file_type| fstat(fd).is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == file_type);
    let opened_for = |access| fcntl_getfl(fd).is_ok_and(|flags| flags & OFlags::ACCMODE == access);
    match kind {
        Kind::File => is_a(FileType::RegularFile),
        Kind::Listener => is_a(FileType::Socket) && sockopt::socket_acceptconn(fd) == Ok(true),
        Kind::Connection => is_a(FileType::Socket),
        Kind::PipeReader => is_a(FileType::Fifo) && opened_for(OFlags::RDONLY),
        Kind::PipeWriter => is_a(FileType::Fifo) && opened_for(OFlags::WRONLY),
    }
}

fn taken(fds: &mut [Option<OwnedFd>], number: u32) -> Result<OwnedFd, RenewalError> {
    let index = usize::try_from(number).unwrap_or(usize::MAX);
    let fd = fds.get_mut(index).and_then(Option::take);
    fd.ok_or_else(|| RenewalError::State(format!("descriptor {number} is missing")))
}

/// A program that is executed by its descriptor is listed under a number; it is to be listed under its name.
fn name_process() {
    let name = std::env::args_os().next();
    let Some(name) = name.as_deref().map(Path::new).and_then(Path::file_name) else {
        return;
    };
    if let Err(error) = std::fs::write("/proc/self/comm", name.as_bytes()) {
        tracing::debug!(%error, "the process could not be named");
    }
}

/// The largest state, in bytes. It is in memory twice while it is taken along.
const STATE_BYTES_MAX: u64 = 4 * 1024 * 1024 * 1024;

#[cfg(test)]
mod tests;
