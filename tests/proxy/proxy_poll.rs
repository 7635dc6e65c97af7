//! What one poll of a proxy finds.

use crate::stub;

use std::sync::atomic::Ordering;
use stub::{Carrier, Stub};
use tokenyard::internals::proxy::driver::{ContextMemory, Driver};
use tokenyard::internals::proxy::machine::{ContextConfig, Liveness, Machine, MachineConfig};
use tokenyard::internals::proxy::wire::{
    ChunkIdx, ContextIdx, Direction, LinkIdx, MessageShape, Nodes, Wire, WireInput,
};
use tokenyard::internals::transport::network::{Event, Posted, RegionId, WriteImm};
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
    let shape = MessageShape { first_bytes: 256, chunk_bytes: 192, chunks: 3 };
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
