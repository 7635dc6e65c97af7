//! Waits end where an interrupt is raised, and leave the state that their error states; destructors wait on.

use crate::rig;

use std::net::TcpListener;
use std::sync::{Barrier, Mutex};
use std::time::{Duration, Instant};

use rig::{MAX_TOKENS, PATIENCE, Rig, on_ranks, test_device};
use tokenyard::{Bootstrap, Error, Interrupt, Rank, Result, World};

/// When an interrupt is raised: the wait is under way then.
const SOON: Duration = Duration::from_millis(50);

/// Raises an interrupt soon, while `work` runs under it, and demands that it ends long before its deadline.
fn interrupted<T: std::fmt::Debug>(work: impl FnOnce() -> Result<T>) -> String {
    let interrupt = Interrupt::new();
    let raiser = interrupt.clone();
    let start = Instant::now();
    let outcome = std::thread::scope(|scope| {
        scope.spawn(move || {
            std::thread::sleep(SOON);
            raiser.raise();
        });
        interrupt.during(work)
    });
    assert!(start.elapsed() < PATIENCE / 2, "{:?}", start.elapsed());
    match outcome {
        // A collective takes the world with it, unless the world was only there for that call.
        Err(error @ Error::Interrupted { left, .. }) => {
            assert_eq!(error.is_fatal(), left.contains("the world's collectives end"), "{error:?}");
            error.to_string()
        }
        other => panic!("an interrupt was due, not {other:?}"),
    }
}

#[test]
fn a_stream_is_synchronized_again_after_an_interrupt() {
    let begun = Barrier::new(2);
    on_ranks(2, |world| {
        let rig = Rig::new(&world);
        rig.route_all(0);
        if rig.rank == 1 {
            begun.wait();
        }
        let handle = rig.enqueue(&rig.tokens(MAX_TOKENS), rig.capacity).unwrap();
        if rig.rank == 0 {
            let message = interrupted(|| rig.stream.synchronize(PATIENCE));
            assert!(message.contains("\"stream\"") && message.contains("goes on"), "{message}");
            begun.wait();
        }
        rig.stream.synchronize(PATIENCE).unwrap();
        rig.ep.check().unwrap();
        rig.expect_own_rows(MAX_TOKENS, 0);
        drop(handle);
        world.barrier("done").unwrap();
    });
}

#[test]
fn an_interrupt_that_a_check_finds_is_one() {
    let worlds = World::threads(2).unwrap();
    let start = Instant::now();
    let interrupt = Interrupt::asking(move || start.elapsed() > SOON);
    let outcome = interrupt.during(|| worlds[0].barrier("gate"));
    assert!(matches!(outcome, Err(Error::Interrupted { what: "gate", .. })), "{outcome:?}");
    assert!(interrupt.is_raised() && start.elapsed() < PATIENCE / 2);
}

/// The errors of rank 0 of two when it is interrupted, and of rank 1.
fn in_a_collective(worlds: Vec<World>) {
    let message = interrupted(|| worlds[0].barrier("gate"));
    assert!(message.contains("\"gate\"") && message.contains("form a new world"), "{message}");
    let expected = "rank 0 was interrupted in collective \"gate\" while rank 1 has not arrived";
    for world in &worlds {
        let later = world.barrier("gate").unwrap_err();
        assert!(later.to_string().contains(expected), "{later}");
    }
}

fn joining(port: u16, rank: u32) -> Bootstrap {
    Bootstrap {
        rank: Rank(rank),
        world: 2,
        local_rank: rank as usize,
        addr: "127.0.0.1".into(),
        port,
        token: "of this test".into(),
        timeout: PATIENCE,
        nodes: None,
        generation: 0,
        members: None,
        first_nodes: None,
        own_addr: None,
    }
}

/// A free port below those that Linux gives to outgoing connections: one of those could be taken before it is used.
fn free_port() -> u16 {
    let first = 10_000 + (std::process::id() % 10_000) as u16;
    let mut ports = (first..32_768).filter(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok());
    static TAKEN: Mutex<u16> = Mutex::new(0);
    let mut taken = TAKEN.lock().unwrap();
    *taken = ports.find(|port| *port > *taken).unwrap();
    *taken
}

#[test]
fn an_interrupted_collective_ends_on_all_ranks() {
    in_a_collective(World::threads(2).unwrap());
    let port = free_port();
    let other = std::thread::spawn(move || World::join(&joining(port, 1)).unwrap());
    let first = World::join(&joining(port, 0)).unwrap();
    in_a_collective(vec![first, other.join().unwrap()]);
}

#[test]
fn joining_is_interrupted_and_can_be_tried_again() {
    let port = free_port();
    for rank in [0, 1] {
        let message = interrupted(|| World::join(&joining(port, rank)));
        assert!(message.contains("world formed") && message.contains("join again"), "{message}");
    }
    let other = std::thread::spawn(move || World::join(&joining(port, 1)).unwrap());
    let first = World::join(&joining(port, 0)).unwrap();
    let other = other.join().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| other.barrier("both").unwrap());
        first.barrier("both").unwrap();
    });
}

#[test]
fn building_a_context_whose_peer_does_not_come_is_interrupted() {
    let worlds = World::threads(2).unwrap();
    let device = test_device(&worlds[0]);
    let message = interrupted(|| rig::builder(&worlds[0], &device).build().map(drop));
    assert!(message.contains("configuration of a context"), "{message}");
}

#[test]
fn a_dropped_context_waits_for_its_kernels_whatever_is_raised() {
    const LATE: Duration = Duration::from_millis(300);
    let begun = Barrier::new(2);
    on_ranks(2, |world| {
        let rig = Rig::new(&world);
        rig.route_all(0);
        if rig.rank == 0 {
            let handle = rig.enqueue(&rig.tokens(MAX_TOKENS), rig.capacity).unwrap();
            begun.wait();
            let (start, interrupt) = (Instant::now(), Interrupt::new());
            interrupt.raise();
            let waited = interrupt.during(|| rig.stream.synchronize(PATIENCE));
            assert!(waited.is_err(), "no kernel waits for rank 1");
            interrupt.during(|| drop((handle, rig)));
            assert!(start.elapsed() >= LATE, "memory went after {:?}, under a kernel", start.elapsed());
        } else {
            begun.wait();
            std::thread::sleep(LATE);
            rig.round(MAX_TOKENS, rig.capacity).unwrap();
            rig.expect_own_rows(MAX_TOKENS, 0);
        }
        world.barrier("done").unwrap();
    });
}
