//! The secret that a job's ranks prove to each other without sending it: the job token, or, on one host without a
//! token, a secret that only this user can read.
//!
//! Place in the data path: none. Made on the caller's thread; proofs are made and checked on bootstrap threads.
//!
//! ```text
//!   member                                              rank 0
//!     | -- Hello: nonce m ---------------------------------> |
//!     | <------------------------------ Challenge: nonce r - |
//!     | -- Join: MAC("member", m, r, fields), fields ------> |  refuses what is not proved
//!     | <----------- Accept: MAC("rank 0", m, r, fields) --- |
//! ```
//!
//! The member proves first, so that rank 0 computes nothing with the secret for strangers. The roles differ in the MAC,
//! so one side's proof is no proof of the other side.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{Error, ErrorKind, Read, Result, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};

use super::collective::Failure;
use crate::base::memory::longest_file;

/// Bytes of a nonce, of a proof and of a host's secret.
pub(super) const NONCE: usize = 32;

/// A number that a side sends once and never again.
pub(super) type Nonce = [u8; NONCE];
/// A MAC by which a side proves that it has the secret.
pub(super) type Proof = [u8; 32];

/// Which side proves.
#[derive(Debug, Clone, Copy)]
pub(super) enum Role {
    Member,
    Root,
}

/// Nonces of a handshake.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Nonces {
    pub member: Nonce,
    pub root: Nonce,
}

/// The key of proofs.
#[derive(Clone)]
pub(super) struct Secret {
    /// One block of the hash function.
    key: [u8; 64],
    /// The secret is that of this host and user, as no token was given.
    pub own_host: bool,
}

impl Secret {
    /// From a token that is set.
    pub(super) fn token(token: &str) -> Secret {
        Secret::new("token", token.as_bytes(), false)
    }

    /// From this host and user, for a job without a token.
    pub(super) fn host() -> std::result::Result<Secret, Failure> {
        let dir = format!("/tmp/tokenyard-{}", nix::unistd::geteuid());
        let secret = host_secret(Path::new(&dir)).map_err(|error| {
            let advice = format!("set TOKENYARD_TOKEN to the same random string on all ranks, or mend or remove {dir}");
            Failure::new(format!("no secret of this user can be kept in {dir} ({error})"), advice).caused_by(error)
        })?;
        Ok(Secret::new("own host", &secret, true))
    }

    fn new(kind: &str, bytes: &[u8], own_host: bool) -> Secret {
        let mut key = [0; 64];
        let hash = Sha256::new().chain_update(kind).chain_update([0]).chain_update(bytes).finalize();
        key[..hash.len()].copy_from_slice(&hash);
        Secret { key, own_host }
    }

    fn mac(&self, role: Role, nonces: &Nonces, fields: &[u8]) -> Hmac<Sha256> {
        let label: &[u8] = match role {
            Role::Member => b"tokenyard bootstrap: member",
            Role::Root => b"tokenyard bootstrap: rank 0",
        };
        Hmac::<Sha256>::new(&self.key.into())
            .chain_update(label)
            .chain_update(nonces.member)
            .chain_update(nonces.root)
            .chain_update(fields)
    }

    /// The proof for the other side; `fields` are the fields of the Join that follow its proof.
    pub(super) fn prove(&self, role: Role, nonces: &Nonces, fields: &[u8]) -> Proof {
        self.mac(role, nonces, fields).finalize().into_bytes().into()
    }

    /// Whether `proof` was made with this secret. Takes the same time whatever differs.
    pub(super) fn proved(&self, role: Role, nonces: &Nonces, fields: &[u8], proof: &Proof) -> bool {
        self.mac(role, nonces, fields).verify_slice(proof).is_ok()
    }
}

/// An unpredictable number.
pub(super) fn nonce() -> std::result::Result<Nonce, Failure> {
    random().map_err(|error| {
        Failure::new(format!("the system gives no random numbers ({error})"), "see getrandom(2)").caused_by(error)
    })
}

fn random() -> Result<Nonce> {
    let mut bytes = [0; NONCE];
    getrandom::fill(&mut bytes).map_err(|error| Error::other(error.to_string()))?;
    Ok(bytes)
}

/// The secret in a directory of this user alone; the first process makes it.
fn host_secret(dir: &Path) -> Result<Nonce> {
    match DirBuilder::new().mode(0o700).create(dir) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    own_alone(&open(dir, libc::O_DIRECTORY)?, "the directory")?;
    let path = dir.join("secret");
    match read_secret(&path) {
        Err(error) if error.kind() == ErrorKind::NotFound => make_secret(dir, &path)?,
        outcome => return outcome,
    }
    read_secret(&path)
}

fn open(path: &Path, flags: i32) -> Result<File> {
    OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK | flags).open(path)
}

/// Refuses what another user owns, may read or may write.
fn own_alone(file: &File, what: &str) -> Result<()> {
    let (about, own) = (file.metadata()?, nix::unistd::geteuid().as_raw());
    if about.uid() != own {
        return Err(Error::other(format!("{what} is of user {}, not of {own}", about.uid())));
    }
    match about.mode() & 0o077 {
        0 => Ok(()),
        _ => Err(Error::other(format!("{what} is open to other users: its mode is {:o}", about.mode() & 0o777))),
    }
}

fn read_secret(path: &Path) -> Result<Nonce> {
    let mut file = open(path, 0)?;
    own_alone(&file, "its file")?;
    let bytes = file.metadata()?.len();
    if bytes != NONCE as u64 {
        return Err(Error::other(format!("its file has {bytes} bytes, not {NONCE}")));
    }
    let mut secret = [0; NONCE];
    file.read_exact(&mut secret)?;
    Ok(secret)
}

/// Puts a whole secret in its place, unless another process was first.
fn make_secret(dir: &Path, path: &Path) -> Result<()> {
    if let Some(longest) = longest_file().filter(|longest| *longest < NONCE as u64) {
        let what = format!("a file of this process may have {longest} bytes (ulimit -f), and a secret has {NONCE}");
        return Err(Error::other(what));
    }
    let [secret, name] = [random()?, random()?];
    let unfinished = dir.join(format!("unfinished-{:032x}", name.iter().fold(0u128, |n, b| n << 8 | u128::from(*b))));
    let write = || {
        OpenOptions::new().write(true).create_new(true).mode(0o600).open(&unfinished)?.write_all(&secret)?;
        fs::hard_link(&unfinished, path)
    };
    let outcome = write();
    let _ = fs::remove_file(&unfinished);
    match outcome {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(()),
        outcome => outcome,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

    #[test]
    fn a_proof_taken_for_one_of_another_role_nonce_or_word() {
        let (ours, other) = (Secret::token("ours"), Secret::token("other"));
        let nonces = Nonces { member: [1; NONCE], root: [2; NONCE] };
        let proof = ours.prove(Role::Member, &nonces, b"rank 1");
        assert!(ours.proved(Role::Member, &nonces, b"rank 1", &proof));
        assert!(!other.proved(Role::Member, &nonces, b"rank 1", &proof));
        assert!(!ours.proved(Role::Root, &nonces, b"rank 1", &proof), "a member's proof proves rank 0");
        assert!(!ours.proved(Role::Member, &nonces, b"rank 2", &proof));
        for nonces in [Nonces { member: [3; NONCE], ..nonces }, Nonces { root: [3; NONCE], ..nonces }] {
            assert!(!ours.proved(Role::Member, &nonces, b"rank 1", &proof), "an old proof is good again");
        }
        assert!(nonce().unwrap() != nonce().unwrap());
        assert!(Secret::new("token", b"x", false).key != Secret::new("own host", b"x", true).key);
    }

    #[test]
    fn processes_of_one_user_with_different_secrets() {
        let place = tempfile::tempdir().unwrap();
        let dir = place.path().join("own");
        let secrets: Vec<Nonce> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(|| host_secret(&dir).unwrap())).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(secrets.iter().all(|secret| *secret == secrets[0] && *secret != [0; NONCE]));
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 1, "an unfinished file is left");
        assert_eq!(fs::metadata(&dir).unwrap().mode() & 0o777, 0o700);
        assert_eq!(fs::metadata(dir.join("secret")).unwrap().mode() & 0o777, 0o600);
    }

    #[test]
    fn a_secret_that_another_user_has_planted_or_can_read() {
        let place = tempfile::tempdir().unwrap();
        let dir = place.path().join("own");
        let file = dir.join("secret");
        let why = || host_secret(&dir).unwrap_err().to_string();
        let mode = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        host_secret(&dir).unwrap();
        mode(&file, 0o640);
        assert!(why().contains("its mode is 640"), "{}", why());
        mode(&file, 0o600);
        mode(&dir, 0o755);
        assert!(why().contains("its mode is 755"), "{}", why());
        mode(&dir, 0o700);
        fs::write(&file, b"short").unwrap();
        assert!(why().contains("5 bytes"), "{}", why());
        // A link to a file that would be valid, and a link to a directory.
        fs::rename(&file, place.path().join("real")).unwrap();
        fs::write(place.path().join("real"), [7; NONCE]).unwrap();
        symlink(place.path().join("real"), &file).unwrap();
        assert!(host_secret(&dir).is_err());
        fs::remove_file(&file).unwrap();
        host_secret(&dir).unwrap();
        let link = place.path().join("link");
        symlink(&dir, &link).unwrap();
        assert!(host_secret(&link).is_err());
        // Only root can give files away.
        if nix::unistd::geteuid().is_root() {
            std::os::unix::fs::chown(&file, Some(12_345), None).unwrap();
            assert!(why().contains("is of user 12345"), "{}", why());
        }
    }
}
