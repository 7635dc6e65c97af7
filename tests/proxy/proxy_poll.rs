//! What one poll of a proxy finds.

use crate::stub;

use std::sync::atomic::Ordering;
use stub::{Carrier, Stub};
use tokenyard::internals::proxy::driver::{ContextMemory, Driver};
use tokenyard::internals::proxy::machine::{ContextConfig, Liveness, Machine, MachineConfig};
use tokenyard::internals::proxy::wire::{
    ChunkIdx, ContextIdx, Direction, LinkIdx, MessageShape, Nodes, Wire, WireInput,
};
use tokenyard::internals::transport::network::{Event, Failure, Posted, Reason, RegionId, WriteImm};
use tokenyard::{Rank, Result};

/// Takes every write, and completes it with the next poll.
#[derive(Default)]
struct Ledger {
    tokens: Vec<u64>,
    posts: u64,
}

impl Carrier for Ledger {
    fn post(&mut self, write: &WriteImm) -> Result<Posted> {
        self.tokens.push(write.token);
        self.posts += 1;
        Ok(Posted::Accepted)
    }

    fn poll(&mut self, on_event: &mut dyn FnMut(Event<'_>)) -> Result<usize> {
        Ok(self.tokens.drain(..).map(|token| on_event(Event::Sent { token })).count())
    }
}

#[test]
fn a_poll_finds_every_doorbell_however_many_epochs_the_links_differ() {
    const PEERS: u16 = 19;
    let shape = MessageShape { first_bytes: 256, chunk_bytes: 192, chunks: 3, rows_offset: 256 };
    let nodes = Nodes::consecutive(&[1; PEERS as usize + 1]).unwrap();
    let shapes = [
        shape,
        MessageShape { chunks: 2, ..shape },
        MessageShape { chunks: 1, ..shape },
        MessageShape { chunks: 0, ..shape },
    ];
    let wire = Wire::new(WireInput { nodes, nics: 1, shapes, staging_offset: 0, recv_buffer_offset: 1 << 20 }).unwrap();
    let world = usize::from(PEERS) + 1;
    let machine = Machine::new(&MachineConfig { rank: Rank(3), world, liveness: Liveness::default() }).unwrap();
    let mut driver = Driver::new(machine, Stub(Ledger::default()), Box::new(|| 0));
    let memory = ContextMemory::owned(wire.word_counts());
    let arenas = vec![RegionId(0); world];
    // The low half wraps on the way.
    let first_epoch = u64::from(u32::MAX) - 5;
    let config = ContextConfig { generation: 0, first_epoch, wire: &wire, arenas: &arenas };
    driver.open(ContextIdx(0), &config, memory.share()).unwrap();
    // By direction and link: the chunk that is rung next.
    let mut next = [[(first_epoch, 0u16); PEERS as usize]; 4];
    let mut draw = 0x2545_f491_4f6c_dd1du64;
    let mut rung = 0;
    for _ in 0..4000 {
        // Few in most polls, so that most groups are even, and all of one direction in some.
        draw = draw.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        let direction = [Direction::Dispatch, Direction::Combine, Direction::Barrier][(draw >> 33) as usize % 3];
        let all = draw >> 60 == 0;
        let (first, count) = if all { (0, PEERS) } else { ((draw >> 40) as u16 % PEERS, 1 + (draw >> 59) as u16 % 2) };
        for link in (first..first + count).map(|link| link % PEERS) {
            let (epoch, chunk) = &mut next[direction.index()][usize::from(link)];
            let count = wire.chunks_word(direction, *epoch, LinkIdx(link));
            let chunks = wire.shape(direction).chunks;
            memory.chunks.get(count).unwrap().store(u64::from(chunks), Ordering::Relaxed);
            let bell = wire.doorbell_word(direction, *epoch, LinkIdx(link), ChunkIdx(*chunk));
            memory.doorbells.get(bell).unwrap().store(*epoch << 32 | 16, Ordering::Release);
            (*epoch, *chunk) = if *chunk + 1 == chunks { (*epoch + 1, 0) } else { (*epoch, *chunk + 1) };
            rung += 1;
        }
        driver.poll_once();
        assert_eq!(driver.transport().0.posts, rung, "{next:?}");
    }
    assert!(next.iter().take(2).flatten().all(|(epoch, _)| *epoch > u64::from(u32::MAX)));
}

/// Keeps each write until a flush or poll, answers every other post `Full`, and can fail what it has taken.
#[derive(Default)]
struct Holder {
    tokens: Vec<u64>,
    held: usize,
    posts: usize,
    fails: bool,
}

const FAILURE: Failure = Failure { reason: Reason::Unreachable, code: 15 };

impl Carrier for Holder {
    fn post(&mut self, write: &WriteImm) -> Result<Posted> {
        self.posts += 1;
        if self.posts % 2 == 1 {
            return Ok(Posted::Full);
        }
        self.tokens.push(write.token);
        self.held += 1;
        Ok(Posted::Accepted)
    }

    fn flush(&mut self) -> Result<()> {
        self.held = 0;
        Ok(())
    }

    fn poll(&mut self, on_event: &mut dyn FnMut(Event<'_>)) -> Result<usize> {
        self.held = 0;
        let failed = |token| Event::Failed { token, peer: Rank(1), failure: FAILURE };
        let event = |token| if self.fails { failed(token) } else { Event::Sent { token } };
        Ok(self.tokens.drain(..).map(|token| on_event(event(token))).count())
    }

    fn explain(&self, failure: Failure) -> String {
        format!("status {} of the vendor", failure.code)
    }
}

#[test]
fn what_is_posted_in_a_pass_is_flushed_in_it_and_a_failure_comes_with_the_networks_words() {
    let shape = MessageShape { first_bytes: 256, chunk_bytes: 192, chunks: 1, rows_offset: 256 };
    let shapes = [
        shape,
        MessageShape { chunks: 0, ..shape },
        MessageShape { chunks: 0, ..shape },
        MessageShape { chunks: 0, ..shape },
    ];
    let nodes = Nodes::consecutive(&[1; 2]).unwrap();
    let wire = Wire::new(WireInput { nodes, nics: 1, shapes, staging_offset: 0, recv_buffer_offset: 1 << 20 }).unwrap();
    let machine = Machine::new(&MachineConfig { rank: Rank(0), world: 2, liveness: Liveness::default() }).unwrap();
    let mut driver = Driver::new(machine, Stub(Holder::default()), Box::new(|| 0));
    let memory = ContextMemory::owned(wire.word_counts());
    let arenas = vec![RegionId(0); 2];
    let config = ContextConfig { generation: 0, first_epoch: 1, wire: &wire, arenas: &arenas };
    driver.open(ContextIdx(0), &config, memory.share()).unwrap();
    let remote = driver.remote();
    let mut ring = |epoch: u64, fails: bool| {
        let count = wire.chunks_word(Direction::Dispatch, epoch, LinkIdx(0));
        memory.chunks.get(count).unwrap().store(1, Ordering::Relaxed);
        let bell = wire.doorbell_word(Direction::Dispatch, epoch, LinkIdx(0), ChunkIdx(0));
        memory.doorbells.get(bell).unwrap().store(epoch << 32 | 16, Ordering::Release);
        driver.transport().0.fails = fails;
        // The first post finds a full queue, so the pass posts again at its end.
        for _ in 0..4 {
            driver.poll_once();
            assert_eq!(driver.transport().0.held, 0, "epoch {epoch}: a write waits for the next pass");
        }
    };
    ring(1, false);
    assert_eq!((remote.lost_peers(), remote.explanation(Rank(1))), (vec![], None));
    ring(2, true);
    assert_eq!(remote.lost_peers(), [Rank(1)]);
    assert_eq!(remote.explanation(Rank(1)).as_deref(), Some("status 15 of the vendor"));
}
