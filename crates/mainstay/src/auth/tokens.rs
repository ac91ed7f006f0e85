//! Named tokens: known by their SHA-256 alone, read anew when their files may have changed (I1, I6, S15).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use aws_lc_rs::constant_time::verify_slices_are_equal;
use aws_lc_rs::digest::{SHA256, digest};
use mainstay_core::time::Timestamp;
use mainstay_upstream::{Environment, Template, TemplateError};
use tokio::sync::Mutex;

use super::Denied;
use crate::config::{self, DIGEST_PREFIX, TokenUnfit, TokenValue};
use crate::runtime::Clock;

/// The tokens of the configuration.
///
/// Values that come from files are read again when an unknown token comes, at most every few seconds, and before use when
/// the last reading is half a minute old, so that a replaced token ends by itself. No token is kept, only hashes.
pub struct Tokens {
    sources: Arc<Sources>,
    clock: Clock,
    table: ArcSwap<Table>,
    /// Held while files are read: one reading at a time.
    reading: Arc<Mutex<()>>,
}

/// Where the values come from.
struct Sources {
    all: Vec<Source>,
    /// Whether a value comes from a file; everything else is fixed for the life of the process.
    can_change: bool,
    environment: Arc<dyn Environment>,
}

/// One value of one name.
struct Source {
    name: Box<str>,
    template: Template,
}

/// What the last reading gave, in the order of the sources.
struct Table {
    digests: Vec<Option<Digest>>,
    read_at: Timestamp,
}

type Digest = [u8; 32];

/// Why a token of the configuration can't be used. It names the token and its source, and never shows a value.
#[derive(Debug, thiserror::Error)]
pub enum TokenFault {
    /// A variable or a file is missing, or the value is no template.
    #[error("find the value of the token `{name}`")]
    Unresolved {
        /// The token's name.
        name: Box<str>,
        /// What is missing.
        #[source]
        cause: TemplateError,
    },
    /// What the source holds is no token.
    #[error("the token `{name}` ({origin}) does not fit")]
    Unfit {
        /// The token's name.
        name: Box<str>,
        /// The variables and files that it comes from.
        origin: Box<str>,
        /// What is wrong with it.
        #[source]
        cause: TokenUnfit,
    },
    /// Two names have it, so it proves neither.
    #[error("`{name}` and `{other}` have the same token")]
    Shared {
        /// One name.
        name: Box<str>,
        /// The other.
        other: Box<str>,
    },
}

/// Reads all tokens of `auth` once, for a start that is to fail if one can't be read.
///
/// # Errors
/// The first fault, in the order of names.
pub fn check(auth: &config::Auth, environment: Arc<dyn Environment>) -> Result<(), TokenFault> {
    let sources = Sources::new(auth, environment)?;
    sources.read().into_iter().try_for_each(|read| read.map(drop))
}

/// The hash of `token` as the configuration takes it.
pub fn written_hash(token: &str) -> String {
    let hashed = hash(token.as_bytes());
    let digits: String = hashed.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{DIGEST_PREFIX}{digits}")
}

impl Tokens {
    /// The tokens of `auth`, read once. One that can't be read at the moment is reported in the log and read again
    /// later: a worker must not fail for it, since the sessions of all others need that worker.
    ///
    /// # Errors
    /// A value that is no template, which the check of the configuration has ruled out.
    pub fn new(auth: &config::Auth, environment: Arc<dyn Environment>, clock: Clock) -> Result<Self, TokenFault> {
        let sources = Sources::new(auth, environment)?;
        let digests = sources.read().into_iter().map(|read| read.map_err(|fault| report(&fault)).ok()).collect();
        let table = ArcSwap::from_pointee(Table { digests, read_at: clock.now() });
        Ok(Self { sources: Arc::new(sources), clock, table, reading: Arc::default() })
    }

    /// The name whose token `presented` is.
    ///
    /// # Errors
    /// [`Denied::Invalid`] if it is nobody's. While a token can't be read an unknown one may be that one, and is held;
    /// [`Denied::Undecided`] if that lasts.
    pub(super) async fn holder(&self, presented: &str) -> Result<Box<str>, Denied> {
        let presented = hash(presented.as_bytes());
        let held_until = self.clock.now().plus(HOLD_MAX);
        loop {
            let table = self.table.load_full();
            let now = self.clock.now();
            let found = self.sources.holder(&table, &presented);
            let due_after = if found.is_some() { RENEW_AFTER } else { RETRY_AFTER };
            let age = now.since(table.read_at);
            if self.sources.can_change && age >= due_after {
                self.read_again(table.read_at).await;
                continue;
            }
            match found {
                Some(name) => return Ok(name.into()),
                None if table.digests.iter().all(Option::is_some) => return Err(Denied::Invalid),
                None if !self.sources.can_change || now >= held_until => return Err(Denied::Undecided),
                None => tokio::time::sleep(RETRY_AFTER.saturating_sub(age)).await,
            }
        }
    }

    /// Reads all values again, unless somebody else has since `seen`. Files that hang leave everything as it is.
    async fn read_again(&self, seen: Timestamp) {
        let reading = async {
            let lock = Arc::clone(&self.reading).lock_owned().await;
            let before = self.table.load_full();
            if before.read_at != seen {
                return;
            }
            let sources = Arc::clone(&self.sources);
            let read = tokio::task::spawn_blocking(move || {
                // Held to the end of the reading, even if nobody waits for it any more.
                let _lock = lock;
                sources.read()
            });
            if let Ok(read) = read.await {
                self.take(&before, read);
            }
        };
        if tokio::time::timeout(READ_MAX, reading).await.is_err() {
            tracing::warn!("the files of tokens can't be read in time; the tokens read before stay valid");
            let digests = self.table.load().digests.clone();
            self.table.store(Arc::new(Table { digests, read_at: self.clock.now() }));
        }
    }

    /// Puts a reading in force, and tells what it changed.
    fn take(&self, before: &Table, read: Vec<Result<Digest, TokenFault>>) {
        let mut digests = Vec::with_capacity(read.len());
        for ((source, old), new) in self.sources.all.iter().zip(&before.digests).zip(read) {
            match &new {
                Err(fault) if old.is_some() => report(fault),
                Ok(digest) if *old != Some(*digest) => {
                    tracing::info!(name = %source.name, "a token has changed; sessions of its holder go on");
                }
                Ok(_) | Err(_) => {}
            }
            digests.push(new.ok());
        }
        self.table.store(Arc::new(Table { digests, read_at: self.clock.now() }));
    }
}

impl Sources {
    fn new(auth: &config::Auth, environment: Arc<dyn Environment>) -> Result<Self, TokenFault> {
        let mut all = Vec::new();
        for (name, values) in &auth.tokens {
            for value in values {
                let template = Template::parse(value.reveal())
                    .map_err(|cause| TokenFault::Unresolved { name: name.clone(), cause })?;
                all.push(Source { name: name.clone(), template });
            }
        }
        let from_file = |source: &Source| source.template.sources().iter().any(|origin| origin.starts_with("file:"));
        Ok(Self { can_change: all.iter().any(from_file), all, environment })
    }

    /// The name that `presented` belongs to. Takes the same time whichever it is: all values are compared.
    fn holder(&self, table: &Table, presented: &Digest) -> Option<&str> {
        let mut found = None;
        for (source, digest) in self.all.iter().zip(&table.digests) {
            let Some(digest) = digest else { continue };
            if verify_slices_are_equal(digest, presented).is_ok() {
                found = Some(&*source.name);
            }
        }
        found
    }

    /// The hash of each value, or why there is none.
    fn read(&self) -> Vec<Result<Digest, TokenFault>> {
        let mut read: Vec<_> = self.all.iter().map(|source| source.read(&*self.environment)).collect();
        let mut names: BTreeMap<Digest, &str> = BTreeMap::new();
        let mut shared: BTreeMap<Digest, (&str, &str)> = BTreeMap::new();
        for (source, digest) in self.all.iter().zip(&read) {
            let Ok(digest) = digest else { continue };
            let first = *names.entry(*digest).or_insert(&source.name);
            if first != &*source.name {
                shared.insert(*digest, (first, &source.name));
            }
        }
        for value in &mut read {
            if let Some((name, other)) = value.as_ref().ok().and_then(|digest| shared.get(digest)) {
                *value = Err(TokenFault::Shared { name: (*name).into(), other: (*other).into() });
            }
        }
        read
    }
}

impl Source {
    fn read(&self, environment: &dyn Environment) -> Result<Digest, TokenFault> {
        let value = self
            .template
            .resolve(environment)
            .map_err(|cause| TokenFault::Unresolved { name: self.name.clone(), cause })?;
        match TokenValue::parse(value.reveal()) {
            Ok(TokenValue::Plain(token)) => Ok(hash(token.as_bytes())),
            Ok(TokenValue::Digest(digest)) => Ok(digest),
            Err(cause) => {
                let origin = self.template.sources().join(", ").into();
                Err(TokenFault::Unfit { name: self.name.clone(), origin, cause })
            }
        }
    }
}

fn report(fault: &TokenFault) {
    let cause = std::error::Error::source(fault).map(ToString::to_string).unwrap_or_default();
    tracing::warn!(fault = %fault, cause, "a token can't be used now; requests that may carry it wait");
}

fn hash(bytes: &[u8]) -> Digest {
    let mut hashed = [0; 32];
    hashed.copy_from_slice(digest(&SHA256, bytes).as_ref());
    hashed
}

/// An unknown token makes the files be read at most this often.
const RETRY_AFTER: Duration = Duration::from_secs(2);
/// A token that was replaced in its file is not taken for longer than this.
const RENEW_AFTER: Duration = Duration::from_secs(30);
/// How long reading all files may take.
const READ_MAX: Duration = Duration::from_secs(1);
/// How long a request is held while its token may be one that can't be read: real clients give up at 60 s (S13a).
const HOLD_MAX: Duration = Duration::from_secs(50);

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::io;
    use std::path::Path;

    use super::*;
    use crate::config::{AuthMode, Template as Written};

    /// Variables and files that a test can change.
    #[derive(Default)]
    struct Surroundings(parking_lot::Mutex<BTreeMap<String, String>>);

    impl Surroundings {
        fn with(pairs: &[(&str, &str)]) -> Arc<Self> {
            let around = Arc::new(Self::default());
            pairs.iter().for_each(|(name, text)| around.set(name, Some(text)));
            around
        }

        fn set(&self, name: &str, text: Option<&str>) {
            match text {
                Some(text) => self.0.lock().insert(name.to_owned(), text.to_owned()),
                None => self.0.lock().remove(name),
            };
        }
    }

    impl Environment for Surroundings {
        fn var(&self, name: &str) -> Option<String> {
            self.0.lock().get(name).cloned()
        }

        fn file(&self, path: &Path) -> io::Result<String> {
            self.var(&path.display().to_string()).ok_or_else(|| io::ErrorKind::NotFound.into())
        }
    }

    fn auth(tokens: &[(&str, &[&str])]) -> config::Auth {
        let values = |values: &[&str]| values.iter().map(|value| Written::new(value)).collect();
        let tokens = tokens.iter().map(|(name, list)| ((*name).into(), values(list))).collect();
        config::Auth { mode: AuthMode::Token, require_agent: false, tokens }
    }

    fn tokens(auth: &config::Auth, around: &Arc<Surroundings>) -> Tokens {
        Tokens::new(auth, Arc::<Surroundings>::clone(around), Clock::system()).unwrap()
    }

    fn checked(auth: &config::Auth, around: &Arc<Surroundings>) -> Result<(), String> {
        check(auth, Arc::<Surroundings>::clone(around)).map_err(|fault| {
            let cause = std::error::Error::source(&fault).map(ToString::to_string);
            format!("{fault}: {}", cause.unwrap_or_default())
        })
    }

    /// Makes the last reading old enough for another one.
    fn age(tokens: &Tokens, by: Duration) {
        let table = tokens.table.load();
        let read_at = table.read_at.minus(by);
        tokens.table.store(Arc::new(Table { digests: table.digests.clone(), read_at }));
    }

    const OLD: &str = "old-0123456789abcdef";
    const NEW: &str = "new-0123456789abcdef";

    #[tokio::test]
    async fn i1_a_token_a_hash_and_several_at_once_prove_a_name() {
        let around = Surroundings::with(&[("A", "variable-token-of-alice"), ("/b", "file-token-of-bob-00\n")]);
        let hash = written_hash("hashed-token-of-alice");
        let tokens = tokens(&auth(&[("alice", &["${A}", &hash]), ("bob", &["${file:/b}"])]), &around);
        for (token, name) in [
            ("variable-token-of-alice", Ok("alice")),
            ("hashed-token-of-alice", Ok("alice")),
            ("file-token-of-bob-00", Ok("bob")),
            (hash.as_str(), Err(Denied::Invalid)),
            ("variable-token-of-alicE", Err(Denied::Invalid)),
            ("", Err(Denied::Invalid)),
        ] {
            assert_eq!(tokens.holder(token).await.as_deref(), name.as_deref(), "{token}");
        }
    }

    #[tokio::test]
    async fn s15_a_rotated_file_is_read_again_and_the_old_token_ends_by_itself() {
        let around = Surroundings::with(&[("/t", OLD)]);
        let tokens = tokens(&auth(&[("ci", &["${file:/t}"])]), &around);
        around.set("/t", Some(NEW));
        assert_eq!(tokens.holder(NEW).await, Err(Denied::Invalid), "junk does not make us read at once");
        assert_eq!(tokens.holder(OLD).await.as_deref(), Ok("ci"));
        age(&tokens, RETRY_AFTER);
        assert_eq!(tokens.holder(OLD).await.as_deref(), Ok("ci"), "a known token does not make us read so soon");
        assert_eq!(tokens.holder(NEW).await.as_deref(), Ok("ci"));
        assert_eq!(tokens.holder(OLD).await, Err(Denied::Invalid));
        around.set("/t", Some(OLD));
        age(&tokens, RENEW_AFTER);
        assert_eq!(
            tokens.holder(NEW).await,
            Err(Denied::Invalid),
            "nobody presented the newer one, and it is in force"
        );
    }

    #[tokio::test]
    async fn s13a_while_a_token_can_not_be_read_an_unknown_one_waits_and_known_ones_do_not() {
        let around = Surroundings::with(&[("/t", OLD), ("A", "variable-token-of-alice")]);
        let tokens = tokens(&auth(&[("alice", &["${A}"]), ("ci", &["${file:/t}"])]), &around);
        around.set("/t", None);
        age(&tokens, RENEW_AFTER);
        assert_eq!(tokens.holder("variable-token-of-alice").await.as_deref(), Ok("alice"));
        let held = tokio::time::timeout(Duration::from_millis(50), tokens.holder(OLD)).await;
        assert!(held.is_err(), "neither admitted nor refused");
        around.set("/t", Some(OLD));
        age(&tokens, RETRY_AFTER);
        assert_eq!(tokens.holder(OLD).await.as_deref(), Ok("ci"));
    }

    #[tokio::test]
    async fn one_token_of_two_names_proves_neither() {
        let around = Surroundings::with(&[("A", OLD), ("B", OLD), ("C", NEW)]);
        let auth = auth(&[("alice", &["${A}", "${C}"]), ("bob", &["${B}"])]);
        assert_eq!(checked(&auth, &around), Err("`alice` and `bob` have the same token: ".to_owned()));
        let tokens = tokens(&auth, &around);
        assert_eq!(tokens.holder(OLD).await, Err(Denied::Undecided));
        assert_eq!(tokens.holder(NEW).await.as_deref(), Ok("alice"));
    }

    #[test]
    fn i1_i6_a_start_names_what_is_missing_and_shows_no_value() {
        let around = Surroundings::with(&[("SHORT", "canary"), ("BLANK", "canary canary canary")]);
        for (value, told) in [
            ("${NONE}", "find the value of the token `a`: the environment variable `NONE` is not set"),
            ("${file:/none}", "find the value of the token `a`: the file `/none` can't be read: entity not found"),
            ("${SHORT}", "the token `a` (SHORT) does not fit: it has less than 16 characters"),
            (
                "${BLANK}",
                "the token `a` (BLANK) does not fit: it has blanks, line ends or characters that are not ASCII",
            ),
        ] {
            assert_eq!(checked(&auth(&[("a", &[value])]), &around), Err(told.to_owned()));
        }
        assert_eq!(checked(&auth(&[("a", &["in-plain-text-0123"])]), &around), Ok(()));
    }
}
