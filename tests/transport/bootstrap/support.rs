//! Shared by the bootstrap tests: places to meet, ranks as threads or processes, frames put together by hand.

use std::fs::File;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};
use tokenyard::internals::base::{Error, Rank, wait};
use tokenyard::internals::transport::{Bootstrap, World};

pub const CHILD: &str = "TOKENYARD_TEST_CHILD";
pub const TOKEN: &str = "token of this test";
/// Long enough for a loaded machine; a test that waits it out has found a hang.
pub const PATIENCE: Duration = Duration::from_secs(20);
/// A deadline that a test waits out on purpose.
pub const SHORT: Duration = Duration::from_millis(400);

/// A process that starts holds all descriptors for a moment; no listener of `place` may be among them.
static FORKING: Mutex<()> = Mutex::new(());

/// An address of this test alone (all of 127/8 is this host) and a port free there.
pub fn place() -> (String, u16) {
    places(1).remove(0)
}

/// An address of this test alone, with as many ports that are free there.
pub fn places(count: usize) -> Vec<(String, u16)> {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    let (pid, next) = (std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    let addr = format!("127.{}.{}.{}", 1 + pid / 251 % 250, 1 + pid % 251, next);
    let _guard = FORKING.lock().unwrap_or_else(PoisonError::into_inner);
    let listeners: Vec<_> = (0..count).map(|_| TcpListener::bind((addr.as_str(), 0)).unwrap()).collect();
    listeners.iter().map(|listener| (addr.clone(), listener.local_addr().unwrap().port())).collect()
}

pub fn bootstrap(place: &(String, u16), rank: u32, world: usize) -> Bootstrap {
    Bootstrap {
        rank: Rank(rank),
        world,
        local_rank: rank as usize,
        addr: place.0.clone(),
        port: place.1,
        token: TOKEN.into(),
        timeout: PATIENCE,
        nodes: None,
        generation: 0,
        members: None,
        first_nodes: None,
        own_addr: None,
    }
}

/// Runs `body` as each rank of a world whose ranks join over TCP from threads.
pub fn joined<T: Send>(size: usize, body: impl Fn(World) -> T + Sync) -> Vec<T> {
    let place = place();
    std::thread::scope(|scope| {
        let run = |rank| {
            scope.spawn({
                let (place, body) = (&place, &body);
                move || body(World::join(&bootstrap(place, rank, size)).unwrap())
            })
        };
        let threads: Vec<_> = (0..size as u32).map(run).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Runs `body` as each rank of a world of threads.
pub fn threaded<T: Send>(size: usize, body: impl Fn(World) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let body = &body;
        let threads: Vec<_> =
            World::threads(size).unwrap().into_iter().map(|world| scope.spawn(move || body(world))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

pub fn bootstrap_text<T: std::fmt::Debug>(outcome: Result<T, Error>) -> String {
    bootstrap_error(outcome).to_string()
}

pub fn bootstrap_error<T: std::fmt::Debug>(outcome: Result<T, Error>) -> Error {
    match outcome {
        Err(error @ Error::Bootstrap { .. }) => error,
        other => panic!("a Bootstrap error was due, not {other:?}"),
    }
}

pub fn exchange_many(world: World) {
    for round in 0..20usize {
        let payload = vec![world.rank().0 as u8; round * (world.rank().index() + 1)];
        let parts = world.all_gather("parts", &payload).unwrap();
        let expected: Vec<Vec<u8>> = (0..world.size()).map(|r| vec![r as u8; round * (r + 1)]).collect();
        assert_eq!(parts, expected);
    }
    world.barrier("end").unwrap();
}

pub fn memfd(text: &str) -> OwnedFd {
    // SAFETY: the name is a C string; the result is checked and owned by nobody else.
    let mut file = unsafe {
        let raw = libc::memfd_create(c"tokenyard-test".as_ptr(), libc::MFD_CLOEXEC);
        assert!(raw >= 0);
        File::from_raw_fd(raw)
    };
    file.write_all(text.as_bytes()).unwrap();
    file.into()
}

pub fn exchange_memfds(world: World) {
    let own = memfd(&format!("memory of rank {}", world.rank()));
    for _ in 0..2 {
        let fds = world.exchange_fds(own.as_fd()).unwrap();
        assert_eq!(fds.len(), world.size());
        for (rank, fd) in fds.into_iter().enumerate() {
            assert_eq!(fd.is_none(), rank == world.rank().index());
            if let Some(fd) = fd {
                // By position: duplicates of one descriptor share their cursor.
                let mut text = [0; 64];
                let bytes = File::from(fd).read_at(&mut text, 0).unwrap();
                assert_eq!(String::from_utf8_lossy(&text[..bytes]), format!("memory of rank {rank}"));
            }
        }
    }
}

/// The version that wire.rs speaks.
pub const VERSION: u16 = 3;

/// A frame as wire.rs documents it, put together by hand.
pub fn frame(version: u16, kind: u16, body: &[u8]) -> Vec<u8> {
    let length = (body.len() as u32).to_le_bytes();
    [b"TKYD", &version.to_le_bytes()[..], &kind.to_le_bytes(), &length, body].concat()
}

/// A Hello with a nonce of sevens, of a member with or without a token.
pub fn hello(version: u16, own_host: bool) -> Vec<u8> {
    frame(version, 1, &[&[32, 0][..], &[7; 32], &[u8::from(own_host)]].concat())
}

/// The proof of a role to or by a member whose nonce is of sevens.
pub fn proof(token: &str, role: &str, root: &[u8], fields: &[u8]) -> Vec<u8> {
    proof_of(token, role, [&[7; 32], root], fields)
}

/// The proof of a role as documented in secret.rs, made with `token` and the nonces of member and rank 0.
pub fn proof_of(token: &str, role: &str, nonces: [&[u8]; 2], fields: &[u8]) -> Vec<u8> {
    let mut key = [0; 64];
    key[..32].copy_from_slice(&Sha256::digest([b"token\0", token.as_bytes()].concat()));
    let mac = Hmac::<Sha256>::new(&key.into()).chain_update(format!("tokenyard bootstrap: {role}"));
    let [member, root] = nonces;
    mac.chain_update(member).chain_update(root).chain_update(fields).finalize().into_bytes().to_vec()
}

/// The fields of a member's Join: no host, and all ranks as members, in one node.
pub fn join_fields(rank: u32, world: u32) -> Vec<u8> {
    let text = |text: String| [&(text.len() as u16).to_le_bytes()[..], text.as_bytes()].concat();
    let (members, nodes) = (text(format!("0-{}", world - 1)), text(world.to_string()));
    [&rank.to_le_bytes()[..], &world.to_le_bytes(), &[0, 0], &[0; 4], &members, &nodes].concat()
}

/// Sends a Hello and answers the challenge with a proof and `fields`.
pub fn asking(place: &(String, u16), version: u16, token: &str, fields: &[u8], own_host: bool) -> TcpStream {
    let mut stream = dial(place);
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.write_all(&hello(version, own_host)).unwrap();
    let mut challenge = [0; 44];
    stream.read_exact(&mut challenge).unwrap();
    let join = [&proof(token, "member", &challenge[12..], fields)[..], fields].concat();
    stream.write_all(&frame(version, 12, &join)).unwrap();
    stream
}

/// The same, and all that comes back until the other side closes.
pub fn ask(place: &(String, u16), version: u16, token: &str, rank: u32, world: u32) -> String {
    rest_of(asking(place, version, token, &join_fields(rank, world), false))
}

pub fn rest_of(mut stream: TcpStream) -> String {
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8_lossy(&answer).into_owned()
}

pub fn dial(place: &(String, u16)) -> TcpStream {
    wait::poll("listener", PATIENCE, || TcpStream::connect((place.0.as_str(), place.1)).ok()).unwrap()
}

/// Sends and returns all that comes back until the other side closes.
pub fn talk(place: &(String, u16), bytes: &[u8]) -> String {
    let mut stream = dial(place);
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.write_all(bytes).unwrap();
    rest_of(stream)
}

/// Kills its process when dropped, so that a failing test leaves none behind.
pub struct Rig(pub Vec<Child>);

impl Drop for Rig {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Starts this program as rank `rank`, running only the test `test`.
pub fn child(test: &str, place: &(String, u16), rank: u32, world: usize) -> Child {
    let _guard = FORKING.lock().unwrap_or_else(PoisonError::into_inner);
    Command::new(std::env::current_exe().unwrap())
        .args([&format!("bootstrap::{test}"), "--exact", "--nocapture", "--test-threads=1"])
        .env(CHILD, test)
        .env("RANK", rank.to_string())
        .env("WORLD_SIZE", world.to_string())
        .env("MASTER_ADDR", &place.0)
        .env("TOKENYARD_PORT", place.1.to_string())
        .env("TOKENYARD_TOKEN", TOKEN)
        .env("TOKENYARD_TIMEOUT_MS", PATIENCE.as_millis().to_string())
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}

pub fn is_child() -> bool {
    std::env::var_os(CHILD).is_some()
}

/// Plays a child that takes part in one barrier and then waits to be killed.
pub fn sit_until_killed() {
    let world = World::from_env().unwrap();
    world.barrier("up").unwrap();
    std::thread::sleep(PATIENCE);
}

pub fn wait_lost(world: &World, expected: &[Rank]) -> Duration {
    let start = Instant::now();
    wait::poll("loss", PATIENCE, || (world.lost_peers() == expected).then_some(())).expect("the loss went unnoticed");
    start.elapsed()
}
