//! The keyring: what makes rows tamper-evident (S14) and upstream ids unreadable at rest.
//!
//! Every key has a number. The newest signs and seals; all of them verify and open, so rotating a key ends no session.
//! How key files are read and written is in `keys/files.rs`.

mod files;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};

use aws_lc_rs::aead::{AES_256_GCM, Aad, MAX_TAG_LEN, NONCE_LEN, Nonce, RandomizedNonceKey};
use aws_lc_rs::digest::{SHA256, digest};
use aws_lc_rs::{constant_time, hmac};
use mainstay_core::id::{SessionId, SessionKey};
use thiserror::Error;

/// What a signature or a seal is for. One made for a purpose is worth nothing for another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Purpose {
    /// A live session's row.
    Session,
    /// An ended session's row.
    Tombstone,
    /// A resume record.
    Resume,
    /// An owed delete.
    Owed,
    /// What is known of a server.
    Card,
    /// An entry of the audit trail.
    Audit,
    /// The proof that a ledger and a keyring belong together.
    Ledger,
    /// A call that is answered on a stream.
    Call,
    /// An event of a stream.
    Event,
    /// A question of a server to a client.
    Question,
    /// How far a server's own stream was read.
    Source,
    /// An answer to a question of a server.
    Answer,
    /// What is remembered of servers beyond their worker.
    Memory,
    /// What a client was handed, to be brought back.
    Handed,
}

impl Purpose {
    /// Frozen: it is part of everything signed or sealed so far.
    const fn label(self) -> &'static [u8] {
        match self {
            Self::Session => b"session",
            Self::Tombstone => b"tombstone",
            Self::Resume => b"resume",
            Self::Owed => b"owed",
            Self::Card => b"card",
            Self::Audit => b"audit",
            Self::Ledger => b"ledger",
            Self::Call => b"call",
            Self::Event => b"event",
            Self::Question => b"question",
            Self::Source => b"source",
            Self::Answer => b"answer",
            Self::Memory => b"memory",
            Self::Handed => b"handed",
        }
    }
}

/// An HMAC-SHA256, and the number of the key that made it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Signature {
    /// Which key.
    pub key_id: u32,
    /// The code.
    pub mac: [u8; 32],
}

/// Something only this keyring reads: nonce, AES-256-GCM ciphertext and tag.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sealed {
    /// Which key.
    pub key_id: u32,
    /// Nonce, ciphertext, tag.
    pub bytes: Vec<u8>,
}

/// Why a signature or a seal is not accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Rejection {
    /// No key of that number is in the keyring.
    #[error("it names key {key_id}, which is not in the keyring")]
    UnknownKey {
        /// The number.
        key_id: u32,
    },
    /// It was not made by this key, for this purpose, over these bytes.
    #[error("it does not verify")]
    Forged,
}

/// Signs, verifies, seals and opens. Shared read-only by everything that stores.
pub struct Keyring {
    newest_id: u32,
    newest: Pair,
    older: BTreeMap<u32, Pair>,
}

struct Pair {
    signing: hmac::Key,
    sealing: RandomizedNonceKey,
}

impl Keyring {
    /// The keys kept in the directory `dir`; if it has none, a first one is drawn from `entropy` and stored.
    ///
    /// The directory ends up with mode 0700 and every key file with 0600; wider ones are repaired with a warning. A
    /// caller that finds a ledger beside it uses [`load`](Self::load) instead, so that lost keys are never replaced
    /// in silence; [`Store::open`](crate::Store::open) checks that as well.
    ///
    /// # Errors
    ///
    /// Any [`KeyError`] but [`Missing`](KeyError::Missing); nothing is stored then.
    pub fn load_or_create(dir: &Path, entropy: &mut dyn FnMut(&mut [u8])) -> Result<Self, KeyError> {
        files::prepare_dir(dir)?;
        match Self::load(dir) {
            Err(KeyError::Missing { .. }) => {
                files::write(dir, FIRST_KEY_ID, &drawn(entropy)?)?;
                Self::load(dir)
            }
            outcome => outcome,
        }
    }

    /// The keys kept in the directory `dir`, as in [`load_or_create`](Self::load_or_create).
    ///
    /// # Errors
    ///
    /// A [`KeyError`] that names the file, and what to do.
    pub fn load(dir: &Path) -> Result<Self, KeyError> {
        let mut secrets = files::read(dir)?;
        let (newest_id, newest) = secrets.pop_last().ok_or_else(|| KeyError::Missing { dir: dir.to_owned() })?;
        let older = secrets.iter().map(|(id, secret)| (*id, Pair::new(secret))).collect();
        Ok(Self { newest_id, newest: Pair::new(&newest), older })
    }

    /// The keys in `dir` and a new one, drawn from `entropy` and stored, that signs from now on.
    ///
    /// # Errors
    ///
    /// As [`load`](Self::load).
    pub fn rotate(dir: &Path, entropy: &mut dyn FnMut(&mut [u8])) -> Result<Self, KeyError> {
        let newest_id = Self::load(dir)?.newest_id;
        files::write(dir, newest_id.saturating_add(1), &drawn(entropy)?)?;
        Self::load(dir)
    }

    /// Removes the files of those older keys in `dir` that are not among `in_use`, which is what
    /// [`Store::keys_in_use`](crate::Store::keys_in_use) said after the last rotation. Their numbers. The newest key
    /// stays, and what is loaded keeps its keys until it is loaded again. A copy of the ledger from before can't be read
    /// any more.
    ///
    /// # Errors
    ///
    /// As [`load`](Self::load); some of the files may be removed then.
    pub fn retire_unused(dir: &Path, in_use: &BTreeSet<u32>) -> Result<Vec<u32>, KeyError> {
        let unused: Vec<_> = Self::load(dir)?.older.into_keys().filter(|id| !in_use.contains(id)).collect();
        unused.iter().try_for_each(|id| files::remove(dir, *id))?;
        Ok(unused)
    }

    /// A keyring of one key that is stored nowhere, for ledgers that are in memory only.
    pub fn ephemeral(entropy: &mut dyn FnMut(&mut [u8])) -> Self {
        let mut secret = [0; SECRET_BYTES];
        entropy(&mut secret);
        Self { newest_id: FIRST_KEY_ID, newest: Pair::new(&secret), older: BTreeMap::new() }
    }

    /// The key under which the session of `id` is stored: its SHA-256 (S3). The same with every keyring, so that no
    /// rotation moves a session.
    pub fn session_key(&self, id: &SessionId) -> SessionKey {
        let mut bytes = [0; 32];
        bytes.copy_from_slice(digest(&SHA256, id.reveal().as_bytes()).as_ref());
        SessionKey::from_bytes(bytes)
    }

    /// The signature of `body` as what is stored under `key`.
    pub fn sign(&self, purpose: Purpose, key: &[u8], body: &[u8]) -> Signature {
        Signature { key_id: self.newest_id, mac: mac(&self.newest.signing, purpose, key, body) }
    }

    /// Whether `signature` is that of `body` as what is stored under `key`. In constant time.
    ///
    /// # Errors
    ///
    /// The [`Rejection`] if it is not.
    pub fn verify(&self, purpose: Purpose, key: &[u8], body: &[u8], signature: &Signature) -> Result<(), Rejection> {
        let pair = self.pair(signature.key_id)?;
        let expected = mac(&pair.signing, purpose, key, body);
        constant_time::verify_slices_are_equal(&expected, &signature.mac).map_err(|_| Rejection::Forged)
    }

    /// `plain` so that only this keyring reads it, and only as what is stored under `key`.
    pub fn seal(&self, purpose: Purpose, key: &[u8], plain: &[u8]) -> Sealed {
        self.seal_joined(purpose, key, &[plain])
    }

    /// The same of `parts` one after the other. They are copied once, however large they are.
    pub(crate) fn seal_joined(&self, purpose: Purpose, key: &[u8], parts: &[&[u8]]) -> Sealed {
        let plain_bytes: usize = parts.iter().map(|part| part.len()).sum();
        let mut bytes = Vec::with_capacity(NONCE_LEN + plain_bytes + MAX_TAG_LEN);
        bytes.resize(NONCE_LEN, 0);
        parts.iter().for_each(|part| bytes.extend_from_slice(part));
        let aad = Aad::from(bound(purpose, key));
        let sealed = self.newest.sealing.seal_in_place_separate_tag(aad, &mut bytes[NONCE_LEN..]);
        let (nonce, tag) = sealed.expect("a row is far below AES-GCM's 64 GiB");
        bytes[..NONCE_LEN].copy_from_slice(nonce.as_ref());
        bytes.extend_from_slice(tag.as_ref());
        Sealed { key_id: self.newest_id, bytes }
    }

    /// What was sealed for `purpose` and `key`.
    ///
    /// # Errors
    ///
    /// The [`Rejection`] if `sealed` is anything else.
    pub fn open(&self, purpose: Purpose, key: &[u8], sealed: &Sealed) -> Result<Vec<u8>, Rejection> {
        let pair = self.pair(sealed.key_id)?;
        let (nonce, text) = sealed.bytes.split_at_checked(NONCE_LEN).ok_or(Rejection::Forged)?;
        let nonce = Nonce::try_assume_unique_for_key(nonce).map_err(|_| Rejection::Forged)?;
        let mut text = text.to_vec();
        let aad = Aad::from(bound(purpose, key));
        let length = pair.sealing.open_in_place(nonce, aad, &mut text).map_err(|_| Rejection::Forged)?.len();
        text.truncate(length);
        Ok(text)
    }

    /// The number of a key of `older` that is not in this keyring, or is another one here. None if everything that
    /// `older` signed and sealed can be read with this one.
    pub fn lost_of(&self, older: &Self) -> Option<u32> {
        let mut ids = older.older.keys().copied().chain([older.newest_id]);
        ids.find(|id| {
            let of = |ring: &Self| ring.pair(*id).ok().map(|pair| mac(&pair.signing, Purpose::Ledger, b"", SAMPLE));
            of(self) != of(older)
        })
    }

    /// How many keys are accepted.
    pub fn key_count(&self) -> usize {
        self.older.len() + 1
    }

    fn pair(&self, key_id: u32) -> Result<&Pair, Rejection> {
        if key_id == self.newest_id {
            return Ok(&self.newest);
        }
        self.older.get(&key_id).ok_or(Rejection::UnknownKey { key_id })
    }
}

impl fmt::Debug for Keyring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let older = self.older.keys().collect::<Vec<_>>();
        f.debug_struct("Keyring").field("newest", &self.newest_id).field("older", &older).finish_non_exhaustive()
    }
}

impl Pair {
    fn new(secret: &Secret) -> Self {
        let (signing, sealing) = secret.split_at(SECRET_BYTES / 2);
        Self {
            signing: hmac::Key::new(hmac::HMAC_SHA256, signing),
            sealing: RandomizedNonceKey::new(&AES_256_GCM, sealing).expect("32 bytes are an AES-256 key"),
        }
    }
}

/// The secret of one key: 32 bytes for HMAC-SHA256, 32 bytes for AES-256-GCM.
type Secret = [u8; SECRET_BYTES];

/// A secret that is to be stored. Zeros are what a generator leaves that has failed.
fn drawn(entropy: &mut dyn FnMut(&mut [u8])) -> Result<Secret, KeyError> {
    let mut secret = [0; SECRET_BYTES];
    entropy(&mut secret);
    if secret == [0; SECRET_BYTES] { Err(KeyError::NoEntropy) } else { Ok(secret) }
}

fn mac(signing: &hmac::Key, purpose: Purpose, key: &[u8], body: &[u8]) -> [u8; 32] {
    let mut context = hmac::Context::with_key(signing);
    context.update(&bound(purpose, key));
    context.update(body);
    let mut mac = [0; 32];
    mac.copy_from_slice(context.sign().as_ref());
    mac
}

/// Purpose and key, told apart from each other and from what follows.
fn bound(purpose: Purpose, key: &[u8]) -> Vec<u8> {
    let label = purpose.label();
    let mut bytes = Vec::with_capacity(label.len() + key.len() + 9);
    bytes.extend_from_slice(label);
    bytes.push(0);
    bytes.extend_from_slice(&(key.len() as u64).to_be_bytes());
    bytes.extend_from_slice(key);
    bytes
}

/// Why there is no keyring.
#[derive(Debug, Error)]
pub enum KeyError {
    /// The directory has no key.
    #[error("`{dir}` has no key: restore the key files from a backup, or move the ledger away and begin a new one")]
    Missing {
        /// The directory.
        dir: PathBuf,
    },
    /// A key file is short, changed, or no key file.
    #[error("key file `{path}` is damaged: restore it from a backup; rows signed with it can't be read without it")]
    Damaged {
        /// The file.
        path: PathBuf,
    },
    /// A file or the directory belongs to another user, who could read and change the keys.
    #[error("`{path}` belongs to user {owner}: it must belong to the user that runs the gateway")]
    Foreign {
        /// The file or directory.
        path: PathBuf,
        /// Its owner's number.
        owner: u32,
    },
    /// The generator gave nothing but zeros.
    #[error("no random numbers for a new key")]
    NoEntropy,
    /// The operating system refused.
    #[error("can't {attempt} `{path}`")]
    Io {
        /// What was attempted.
        attempt: &'static str,
        /// On which file or directory.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
}

/// What two keys are told apart by.
const SAMPLE: &[u8] = b"which key is this";
const FIRST_KEY_ID: u32 = 1;
const SECRET_BYTES: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    /// Entropy that differs from call to call.
    fn entropy() -> impl FnMut(&mut [u8]) {
        let mut next = 0_u8;
        move |bytes| {
            next += 1;
            bytes.fill(next);
        }
    }

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).expect("it exists").permissions().mode() & 0o777
    }

    #[test]
    fn s3_a_session_key_is_the_sha_256_of_the_id() {
        let id = SessionId::parse("abc").expect("an id");
        let expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        let actual: String = Keyring::ephemeral(&mut entropy())
            .session_key(&id)
            .as_bytes()
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        assert_eq!(actual, expected);
    }

    #[test]
    fn s14_a_signature_holds_for_its_purpose_key_and_body_only() {
        let ring = Keyring::ephemeral(&mut entropy());
        let signature = ring.sign(Purpose::Session, b"key", b"body");
        assert_eq!(ring.verify(Purpose::Session, b"key", b"body", &signature), Ok(()));
        for (purpose, key, body) in [
            (Purpose::Tombstone, b"key".as_slice(), b"body".as_slice()),
            (Purpose::Session, b"kez", b"body"),
            (Purpose::Session, b"key", b"bodz"),
            (Purpose::Session, b"keyb", b"ody"),
        ] {
            assert_eq!(ring.verify(purpose, key, body, &signature), Err(Rejection::Forged));
        }
        let unknown = Signature { key_id: 9, ..signature };
        assert_eq!(ring.verify(Purpose::Session, b"key", b"body", &unknown), Err(Rejection::UnknownKey { key_id: 9 }));
    }

    #[test]
    fn u1_what_is_sealed_is_unreadable_and_bound() {
        let ring = Keyring::ephemeral(&mut entropy());
        let sealed = ring.seal(Purpose::Resume, b"key", b"upstream-secret");
        assert!(!sealed.bytes.windows(8).any(|window| window == b"upstream"));
        assert_eq!(ring.open(Purpose::Resume, b"key", &sealed).as_deref(), Ok(b"upstream-secret".as_slice()));
        assert_eq!(ring.open(Purpose::Owed, b"key", &sealed), Err(Rejection::Forged));
        assert_eq!(ring.open(Purpose::Resume, b"other", &sealed), Err(Rejection::Forged));
        assert_ne!(ring.seal(Purpose::Resume, b"key", b"upstream-secret"), sealed, "a nonce is used once");
        for length in 0..sealed.bytes.len() {
            let short = Sealed { bytes: sealed.bytes[..length].to_vec(), ..sealed };
            assert_eq!(ring.open(Purpose::Resume, b"key", &short), Err(Rejection::Forged));
        }
        for index in 0..sealed.bytes.len() {
            let mut flipped = sealed.clone();
            flipped.bytes[index] ^= 1;
            assert_eq!(ring.open(Purpose::Resume, b"key", &flipped), Err(Rejection::Forged));
        }
    }

    #[test]
    fn s14_keys_rotate_and_old_signatures_hold() {
        let home = tempfile::tempdir().expect("a directory");
        let dir = home.path().join("keys");
        let mut entropy = entropy();
        let old = Keyring::load_or_create(&dir, &mut entropy).expect("made");
        let signature = old.sign(Purpose::Session, b"key", b"body");
        let sealed = old.seal(Purpose::Resume, b"key", b"text");
        let new = Keyring::rotate(&dir, &mut entropy).expect("rotated");
        assert_eq!((old.key_count(), new.key_count()), (1, 2));
        assert_eq!(new.verify(Purpose::Session, b"key", b"body", &signature), Ok(()));
        assert_eq!(new.open(Purpose::Resume, b"key", &sealed).as_deref(), Ok(b"text".as_slice()));
        let newer = new.sign(Purpose::Session, b"key", b"body");
        assert_eq!((newer.key_id, newer.mac == signature.mac), (2, false));
        let again = Keyring::load_or_create(&dir, &mut entropy).expect("loaded");
        assert_eq!(again.verify(Purpose::Session, b"key", b"body", &newer), Ok(()));
    }

    #[test]
    fn i6_key_files_are_private_and_wider_ones_are_repaired() {
        let home = tempfile::tempdir().expect("a directory");
        let dir = home.path().join("state").join("keys");
        let ring = Keyring::load_or_create(&dir, &mut entropy()).expect("made");
        let file = dir.join("0001.key");
        assert_eq!((mode(&dir), mode(&file)), (0o700, 0o600));
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o755)).expect("set");
        fs::set_permissions(&file, fs::Permissions::from_mode(0o644)).expect("set");
        let again = Keyring::load(&dir).expect("repaired");
        assert_eq!((mode(&dir), mode(&file)), (0o700, 0o600));
        assert_eq!(again.sign(Purpose::Card, b"", b""), ring.sign(Purpose::Card, b"", b""));
        assert_eq!(format!("{ring:?}"), "Keyring { newest: 1, older: [], .. }");
    }

    #[test]
    fn s14_lost_and_damaged_keys_are_named_and_never_replaced() {
        let home = tempfile::tempdir().expect("a directory");
        let dir = home.path().join("keys");
        Keyring::load_or_create(&dir, &mut entropy()).expect("made");
        let file = dir.join("0001.key");
        let whole = fs::read(&file).expect("readable");
        for index in 0..whole.len() {
            let mut flipped = whole.clone();
            flipped[index] ^= 1;
            fs::write(&file, flipped).expect("written");
            assert!(matches!(Keyring::load(&dir), Err(KeyError::Damaged { path }) if path == file));
        }
        for length in 0..whole.len() {
            fs::write(&file, &whole[..length]).expect("written");
            let error = Keyring::load_or_create(&dir, &mut entropy()).expect_err("damaged");
            assert!(matches!(&error, KeyError::Damaged { path } if *path == file));
        }
        fs::remove_file(&file).expect("removed");
        assert!(matches!(Keyring::load(&dir), Err(KeyError::Missing { .. })));
        assert!(!file.exists());
    }

    #[test]
    fn s14_a_key_of_zeros_is_never_stored() {
        let home = tempfile::tempdir().expect("a directory");
        let dir = home.path().join("keys");
        assert!(matches!(Keyring::load_or_create(&dir, &mut |_| {}), Err(KeyError::NoEntropy)));
        assert!(matches!(Keyring::load(&dir), Err(KeyError::Missing { .. })));
    }

    #[test]
    fn s14_a_keyring_knows_which_key_of_another_it_lacks() {
        let home = tempfile::tempdir().expect("a directory");
        let dir = home.path().join("keys");
        let mut entropy = entropy();
        let old = Keyring::load_or_create(&dir, &mut entropy).expect("made");
        let new = Keyring::rotate(&dir, &mut entropy).expect("rotated");
        assert_eq!((new.lost_of(&old), new.lost_of(&new), old.lost_of(&new)), (None, None, Some(2)));
        assert_eq!(new.lost_of(&Keyring::ephemeral(&mut entropy)), Some(1), "the same number, another key");
    }

    #[test]
    fn what_is_no_key_file_is_left_alone() {
        let home = tempfile::tempdir().expect("a directory");
        let dir = home.path().join("keys");
        Keyring::load_or_create(&dir, &mut entropy()).expect("made");
        fs::write(dir.join("README"), "hands off").expect("written");
        fs::write(dir.join("0002.key.new"), "half").expect("written");
        assert_eq!(Keyring::load(&dir).expect("loaded").key_count(), 1);
        assert_eq!(Keyring::rotate(&dir, &mut entropy()).expect("rotated").key_count(), 2);
    }
}
