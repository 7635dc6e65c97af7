//! Memory of a context besides its arena: tables, words and handles in device memory, and the `ty_context` that gives
//! kernels their addresses.
//!
//! Beside the data path: runs on the caller's thread while a context is built. A failure here is one rank's, before the
//! exchange that notifies the others.

use super::builder::AllToAllBuilder;
use super::handle::Pool;
use super::missing::Absences;
use super::placement::Placement;
use super::plan::{Message, Plan};
use super::report::Reports;
use super::shape::Shape;
use super::sms::sms_of;
use super::statistics::Statistics;
use super::tables::{
    even_experts, expert_owner_words, first_experts, inverse, nobody_left, owner_words, pack_words, reciprocal,
    state_words,
};
use super::tuning::ArenaPlace;
use crate::base::{Error, Rank, Result};
use crate::ffi::layout as raw;
use crate::kernels::budget::Budget;
use crate::kernels::{Device, DeviceBuffer};
use crate::proxy::wire::{ChunkIdx, Direction, LinkIdx, Wire};
use crate::proxy::{Number, Offer, SharedWords};
use crate::transport::memory::gdr::GdrCopy;
use crate::transport::network::DeviceNeeds;
use crate::transport::{Arena, PeerMap};
use std::sync::Arc;

/// Most tokens of a tile of routing metadata, where the caller does not choose. A smaller tile is done sooner, but its
/// block then has little work beside its fixed cost (docs/performance.md).
const METADATA_TILE: usize = 256;

/// Refuses an arena in GPU memory that the network does not reach.
fn check_reach(needs: DeviceNeeds, gpu: Option<usize>, place: ArenaPlace) -> Result<()> {
    if !needs.host_memory || gpu.is_none() || place == ArenaPlace::Host {
        return Ok(());
    }
    let advice = "the network between nodes does not reach this GPU's memory: give ArenaPlace::Auto or Host, or a proxy \
                  over a network that reaches it, opened for this GPU (`tokenyard doctor` shows what is lacking)";
    Err(Error::config("arena", "Device", advice))
}

/// Memory that a rank allocates for itself.
pub struct Local {
    pub device: Device,
    pub arena: Arena,
    pub tables: Tables,
    pub reports: Reports,
    pub statistics: Option<Statistics>,
    pub absences: Option<Absences>,
    pub pool: Arc<Pool>,
    /// With several nodes.
    pub proxied: Option<Proxied>,
    pub budget: Option<Budget<'static>>,
    pub detects_overlaps: bool,
}

/// Tables in device memory.
pub struct Tables {
    state: DeviceBuffer,
    expert_owner: DeviceBuffer,
    /// `ty_context.replicas`, if experts have any, and how many bits its slots have.
    replicas: Option<DeviceBuffer>,
    replica_bits: u32,
    logical_experts: usize,
    rank_experts: DeviceBuffer,
    even_experts: u32,
    tiling: Tiling,
    /// Tags of tiles, then their rows.
    tiles: DeviceBuffer,
    source_owner: DeviceBuffer,
    rank_names: DeviceBuffer,
    /// Target ranks of the links of dispatch.
    rails: DeviceBuffer,
    /// Source ranks of the links of dispatch.
    served: DeviceBuffer,
    /// Words that the relay passes on, and counts of packed rows.
    relay: DeviceBuffer,
}

/// Memory of a rank's kernels besides the arena.
pub struct Shared<'a> {
    pub tables: &'a Tables,
    pub reports: &'a Reports,
    pub statistics: Option<&'a Statistics>,
    pub absences: Option<&'a Absences>,
    pub proxied: Option<&'a Proxied>,
}

/// A context's number at its proxy, and the words that kernels and proxy share.
pub struct Proxied {
    pub number: Number,
    pub words: SharedWords,
}

impl Local {
    pub fn allocate(
        builder: &AllToAllBuilder,
        shape: &Shape,
        placement: &Placement,
        plan: &Plan,
        numbers: Offer,
    ) -> Result<Local> {
        let device = builder.device.clone().map_or_else(Device::cpu, Ok)?;
        let detects_overlaps = builder.tuning.detects_overlaps()?;
        if let Some(proxy) = builder.proxy.as_ref().filter(|_| plan.wire.is_some()) {
            check_reach(proxy.device_needs(), device.ordinal(), shape.arena)?;
        }
        let budget = Budget::take(&device, "sms", builder.sms)?;
        let bytes = usize::try_from(plan.arena_bytes())
            .map_err(|_| Error::config("max_tokens", shape.max_tokens, "the arena exceeds the address space"))?;
        let arena = match (device.ordinal(), shape.arena) {
            (Some(ordinal), ArenaPlace::Host) => Arena::cuda_host(ordinal, bytes)?,
            (Some(ordinal), _) => Arena::cuda(ordinal, bytes)?,
            (None, _) => Arena::cpu(bytes)?,
        };
        if builder.proxy.as_ref().is_some_and(|proxy| plan.wire.is_some() && proxy.device_needs().access) {
            arena.grant_process()?;
        }
        let proxied = match (&plan.wire, &builder.proxy) {
            (None, _) => None,
            (Some((wire, _)), Some(proxy)) => Some(Proxied {
                number: proxy.take_number(numbers, wire)?,
                words: {
                    let gdrcopy = builder.tuning.gdrcopy.map_or_else(GdrCopy::from_env, Ok)?;
                    SharedWords::allocate(&device, wire.word_counts(), gdrcopy)?
                },
            }),
            (Some(_), None) => {
                let advice = "several nodes need a proxy on every rank: start one and pass it to the builder";
                return Err(Error::config("proxy", "missing", advice));
            }
        };
        let index = |rank: &Rank| shape.nodes.index_of(*rank).unwrap_or(0) as u64;
        let indices = |ranks: Vec<Rank>| pack_words(&ranks.iter().map(index).collect::<Vec<_>>());
        let names: Vec<u64> = shape.nodes.ranks().map(|rank| u64::from(rank.0)).collect();
        let blocks = sms_of(builder.sms, shape, &device, builder.proxy.as_ref());
        let tiling = Tiling::of(builder, shape);
        let replicas = replicas_of_source(builder, shape, placement);
        let slots = replicas.len() / placement.logical_experts().max(1);
        let tables = Tables {
            state: upload(&device, &state_words(builder.tuning.first_epoch, blocks))?,
            expert_owner: upload(&device, &expert_owner_words(placement, &shape.nodes))?,
            replicas: (!replicas.is_empty()).then(|| upload(&device, &pack_words(&replicas))).transpose()?,
            replica_bits: slots.checked_ilog2().unwrap_or(0),
            logical_experts: placement.logical_experts(),
            rank_experts: upload(&device, &pack_words(&first_experts(placement)))?,
            even_experts: even_experts(placement, &shape.nodes),
            tiling,
            tiles: upload(&device, &vec![0; tiling.tags() + tiling.row_words()])?,
            source_owner: upload(&device, &owner_words(&shape.nodes, shape.name))?,
            rails: upload(&device, &indices(shape.nodes.targets(Direction::Dispatch, shape.name)))?,
            served: upload(&device, &indices(shape.nodes.sources(Direction::Dispatch, shape.name)))?,
            rank_names: upload(&device, &pack_words(&names))?,
            relay: upload(&device, &vec![0; Relay::of(plan).words])?,
        };
        let reports = Reports::allocate(&device, shape.ranks)?;
        let statistics =
            builder.tuning.statistics.then(|| Statistics::allocate(&device, blocks, shape.ranks)).transpose()?;
        let absences = Absences::allocate(&device, shape.ranks, shape.missing)?;
        let pool = Pool::new(&device, shape, plan.rounds, &builder.tuning)?;
        Ok(Local { device, arena, tables, reports, statistics, absences, pool, proxied, budget, detects_overlaps })
    }
}

/// The table of replicas of this rank's tokens; empty without replicas.
fn replicas_of_source(builder: &AllToAllBuilder, shape: &Shape, placement: &Placement) -> Vec<u64> {
    if !placement.has_replicas() {
        return Vec::new();
    }
    let own = shape.nodes.node_of(shape.name);
    let class = |rank: u32| {
        let node = shape.nodes.node_of(Rank(rank))?;
        Some(if rank == shape.name.0 { 0 } else { 1 + u8::from(Some(node) != own) })
    };
    let table = builder.tuning.replica_table.clone();
    let table = table.unwrap_or_else(|| placement.replica_table(shape.name.index(), class));
    table.into_iter().map(u64::from).collect()
}

/// Tiles of a call's routing metadata: blocks of a rank build tiles of tokens in parallel.
#[derive(Debug, Clone, Copy)]
struct Tiling {
    /// Bitmap words of a tile, 32 tokens each.
    words: u32,
    /// Most tiles of a call.
    most: u32,
    /// Pairs of a source, own or served, and a rank of the node.
    pairs: usize,
    /// Counts of a tile: most experts of a rank, and one for the rank.
    counts: usize,
}

impl Tiling {
    fn of(builder: &AllToAllBuilder, shape: &Shape) -> Tiling {
        let counts = shape.max_local_experts + 1;
        let asked = builder.tuning.meta_tile.unwrap_or(METADATA_TILE).div_ceil(32);
        let fits = |groups: &usize| counts * shape.bitmap_words(*groups) <= raw::TY_BITMAP_WORDS as usize;
        let words = (1..=asked).rev().find(fits).unwrap_or(1);
        let served = shape.nodes.sources(Direction::Dispatch, shape.name).len();
        // Several of one node may be half as large: tile_words of meta.cuh.
        let least = if shape.nodes.members().len() > 1 { words } else { words.div_ceil(2) };
        Tiling {
            words: words as u32,
            most: shape.max_tokens.div_ceil(32 * least) as u32,
            pairs: (1 + served) * shape.nodes.largest(),
            counts,
        }
    }

    fn tags(&self) -> usize {
        self.pairs * self.most as usize
    }

    /// 64-bit words that 32-bit counts take.
    fn row_words(&self) -> usize {
        (self.tags() * self.counts).div_ceil(2)
    }
}

/// Offsets in the relay's table, in words.
struct Relay {
    free: usize,
    counters: usize,
    words: usize,
}

impl Relay {
    fn of(plan: &Plan) -> Relay {
        let Some((wire, _)) = &plan.wire else { return Relay { free: 0, counters: 0, words: 1 } };
        let counts = wire.word_counts();
        let free = counts.arrived;
        let counters = free + counts.staging_free;
        Relay { free, counters, words: counters + counts.doorbells.div_ceil(2) + 1 }
    }
}

fn upload(device: &Device, words: &[u64]) -> Result<DeviceBuffer> {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
    let buffer = device.alloc(bytes.len())?;
    buffer.write(0, &bytes)?;
    Ok(buffer)
}

/// What launches of all formats are given; what differs between formats is zero ([`Formats`](super::formats::Formats)).
pub fn device_context(
    builder: &AllToAllBuilder,
    shape: &Shape,
    plan: &Plan,
    peers: &PeerMap,
    shared: &Shared<'_>,
    blocks: u32,
) -> raw::ty_context {
    let Shared { tables, reports, statistics, absences, proxied } = *shared;
    let node = shape.nodes.node_of(shape.name).unwrap_or(0);
    let local = shape.nodes.local_of(shape.name).unwrap_or(0);
    let node_ranks = shape.nodes.members().get(node).map_or(0, Vec::len);
    let node_first = shape.rank - local;
    let life_word = plan.wire.as_ref().map_or(0, |(wire, _)| wire.life_word() as u32);
    let mut peer_base = [0u64; raw::TY_MAX_NODE_RANKS as usize];
    for (peer, base) in peer_base.iter_mut().enumerate().take(node_ranks) {
        *base = peers.base_of(Rank((node_first + peer) as u32));
    }
    let context = raw::ty_context {
        rank: shape.rank as u32,
        ranks: shape.ranks as u32,
        local: local as u32,
        node_ranks: node_ranks as u32,
        node_first: node_first as u32,
        node: node as u32,
        nodes: shape.nodes.members().len() as u32,
        experts: shape.experts as u32,
        local_experts: shape.local_experts as u32,
        top_k: shape.top_k as u32,
        rounds: plan.rounds as u32,
        slots: plan.slots as u32,
        max_local_experts: shape.max_local_experts as u32,
        tile_words: tables.tiling.words,
        max_tiles: tables.tiling.most,
        even_experts: tables.even_experts,
        even_inverse: reciprocal(u64::from(tables.even_experts)),
        even_nodes: if shape.nodes.members().len() > 1 { reciprocal(node_ranks as u64) } else { 0 },
        ranks_inverse: inverse(shape.ranks as u32),
        counts_inverse: inverse(shape.local_experts as u32 + 3),
        choice_inverse: (1 << 16) / shape.top_k.max(1) as u32 + 1,
        free_flags: u32::from(plan.regions.dispatch_free.source_stride != 0),
        replicas: tables.replicas.as_ref().map_or(0, |table| table.view().ptr()),
        rank_experts: tables.rank_experts.view().ptr(),
        logical_experts: tables.logical_experts as u32,
        replica_bits: tables.replica_bits,
        guarded: 0, // set by each call
        bitmap_bits: shape.bitmap_bits() as u32,
        most_tokens: shape.max_tokens as u32,
        // Some waits add to it, which must not overflow.
        timeout_ns: u64::try_from(builder.timeout.as_nanos()).unwrap_or(u64::MAX).min(u64::MAX / 2),
        first_epoch: builder.tuning.first_epoch,
        state: tables.state.view().ptr(),
        errors: reports.records_address(),
        expert_owner: tables.expert_owner.view().ptr(),
        rank_names: if nobody_left(&shape.nodes) { 0 } else { tables.rank_names.view().ptr() },
        source_owner: tables.source_owner.view().ptr(),
        stats: statistics.map_or(0, Statistics::device_address),
        blocks: u64::from(blocks),
        tile_rows: tables.tiles.view().ptr() + 8 * tables.tiling.tags() as u64,
        tile_tags: tables.tiles.view().ptr(),
        refused: reports.refused_address(),
        wire: device_wire(plan, shape.name, tables, proxied),
        absences: raw::ty_absences { life_word, ..Default::default() },
        peer_base,
        ..raw::ty_context::default()
    };
    absences.map_or(context, |absences| absences.give(context))
}

/// The wire between nodes, as kernels take it.
fn device_wire(plan: &Plan, rank: Rank, tables: &Tables, proxied: Option<&Proxied>) -> raw::ty_wire {
    let (Some((wire, messages)), Some(proxied)) = (&plan.wire, proxied) else { return raw::ty_wire::default() };
    let relay = Relay::of(plan);
    let table = |word: usize| tables.relay.view().ptr() + 8 * word as u64;
    let mut first_counter = 0;
    let layouts = Direction::ALL.map(|direction| {
        let layout = wire_layout(wire, &messages[direction.index()], direction, rank, first_counter);
        first_counter += layout.links * layout.chunks;
        layout
    });
    let [doorbells, chunk_counts, host_arrivals, host_free, host_lost] = proxied.words.addresses;
    raw::ty_wire {
        layouts,
        doorbells,
        chunk_counts,
        host_arrivals,
        host_free,
        host_lost,
        arrived: table(0),
        free: table(relay.free),
        counters: table(relay.counters),
        rails: tables.rails.view().ptr(),
        served: tables.served.view().ptr(),
    }
}

fn wire_layout(
    wire: &Wire,
    message: &Message,
    direction: Direction,
    rank: Rank,
    first_counter: u32,
) -> raw::ty_wire_layout {
    let (staging, recv_buffer, shape) = (wire.staging(direction), wire.recv_buffer(direction), wire.shape(direction));
    if shape.chunks == 0 {
        return raw::ty_wire_layout::default();
    }
    let (link, chunk) = (LinkIdx(0), ChunkIdx(0));
    raw::ty_wire_layout {
        staging: staging.base,
        staging_parity: staging.parity,
        staging_link: staging.slot,
        recv_buffer: recv_buffer.base,
        recv_buffer_parity: recv_buffer.parity,
        recv_buffer_source: recv_buffer.slot,
        rows_offset: message.shape.rows_offset,
        chunk_rows: message.chunk_rows,
        chunk_shift: message.chunk_shift,
        header_bytes: message.header_bytes,
        row_bytes: message.row_bytes,
        chunks: u32::from(shape.chunks),
        targets: wire.targets(direction, rank).len() as u32,
        sources: wire.sources(direction, rank).len() as u32,
        links: wire.links(direction) as u32,
        recv_buffers: wire.recv_buffers(direction) as u32,
        first_doorbell: wire.doorbell_word(direction, 0, link, chunk) as u32,
        first_link_word: wire.chunks_word(direction, 0, link) as u32,
        first_arrived: wire.arrival_word(direction, 0, 0) as u32,
        first_counter,
        chunk_inverse: inverse(message.chunk_rows),
        reserved: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arenas_that_the_network_does_not_reach_are_refused() {
        let processor = DeviceNeeds { host_memory: true, ..DeviceNeeds::default() };
        let error = check_reach(processor, Some(0), ArenaPlace::Device).unwrap_err().to_string();
        assert!(error.contains("arena") && error.contains("ArenaPlace::Auto"), "{error}");
        for (needs, gpu, place) in [
            (processor, None, ArenaPlace::Device),
            (processor, Some(0), ArenaPlace::Host),
            (DeviceNeeds::default(), Some(0), ArenaPlace::Device),
        ] {
            check_reach(needs, gpu, place).unwrap();
        }
    }
}
