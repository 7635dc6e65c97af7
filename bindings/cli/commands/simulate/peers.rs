//! Other systems: their messages over the same simulated network, so that projections can be compared with published
//! results.
//!
//! In virtual time, on the main thread. These systems do not use this project's proxy machine (one posts from the GPU,
//! the other has a proxy that posts when all rows are packed), so messages go to the network as in their sources:
//!
//! ```text
//!  DeepEP V1, low latency: every (token, expert) of another node is a write of its own, then a count for every expert;
//!                          in a node over NVLink; rows are copied (summed) after all counts have arrived
//!  pplx-garden:            all rows are packed, then one write to each rank of another node (combine: on each NIC);
//!                          in a node over NVLink; rows are copied (summed) after all writes have arrived
//! ```

use std::collections::VecDeque;

use tokenyard::Rank;
use tokenyard::internals::transport::network::imm::ImmValue;
use tokenyard::internals::transport::network::sim::models::Link;
use tokenyard::internals::transport::network::sim::{Clock, Network, SimConfig, SimEndpoint};
use tokenyard::internals::transport::network::{Event, Place, Posted, RegionId, Span, Transport, WriteImm};

use super::costs::{Costs, at_rate};
use super::workload::{Shape, Workload};
use super::world::Outcome;

/// A dispatched row of either system: 7168 fp8 elements, 56 scales, and 16 further bytes.
const DISPATCH_ROW: u64 = 7168 + 224 + 16;
const COMBINE_ROW: u64 = 14336;
/// A count of DeepEP.
const COUNT_BYTES: u64 = 4;
/// Bytes that a NIC sends of one queue pair before the next: some packets.
const PIECE_BYTES: u64 = 16 << 10;
/// Time between two polls for arrivals.
const POLL_NS: u64 = 100;
/// Local copies and sums of their receiving kernels, bytes per ns. One number for both systems, phases and all sizes,
/// fitted.
const COPY_RATE: f64 = 1_000.0;

/// A system whose latencies are published.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum System {
    DeepEp,
    Pplx,
}

impl System {
    /// Cost of a phase besides messages, copies and crossings, in ns: launch, casts, indices, and the spread of the
    /// ranks' starts. One number per system for all sizes and both phases, fitted.
    fn fixed_ns(self) -> u64 {
        match self {
            System::DeepEp => 20_000,
            System::Pplx => 16_000,
        }
    }
}

/// A world in which a system was measured.
#[derive(Debug, Clone, Copy)]
pub struct Site {
    pub system: System,
    pub shape: Shape,
    pub link: Link,
    /// Bytes per ns of a GPU's NVLink.
    pub nvlink_rate: f64,
    /// Rows return instead of leaving.
    pub combine: bool,
}

#[derive(Debug, Clone, Copy)]
struct Post {
    at_ns: u64,
    from: usize,
    to: usize,
    nic: u8,
    bytes: u64,
}

/// The median time of a phase over ranks, in µs.
///
/// # Errors
/// A sentence: the network refused something.
pub fn project(site: &Site) -> Outcome<f64> {
    let workload = Workload::draw(site.shape, 0).map_err(|error| error.to_string())?;
    let rows = rows_between(&workload);
    let posts = match site.system {
        System::DeepEp => deepep_posts(site, &workload),
        System::Pplx => pplx_posts(site, &rows),
    };
    let arrived_ns = if site.shape.nodes > 1 { exchange(site, posts)? } else { vec![0; site.shape.ranks()] };
    let mut times: Vec<u64> = arrived_ns.iter().enumerate().map(|(rank, ns)| end_ns(site, &rows, rank, *ns)).collect();
    times.sort_unstable();
    Ok(times[times.len() / 2] as f64 / 1e3)
}

/// By source and rank: rows, one for each expert.
fn rows_between(workload: &Workload) -> Vec<Vec<u64>> {
    let shape = workload.shape;
    let to = |source: usize, rank: usize| {
        let rows = workload.rows(source, shape.node_of(rank));
        rows.iter().map(|row| row.experts_on(shape.local_of(rank))).sum()
    };
    (0..shape.ranks()).map(|source| (0..shape.ranks()).map(|rank| to(source, rank)).collect()).collect()
}

impl Site {
    fn row_bytes(&self) -> u64 {
        if self.combine { COMBINE_ROW } else { DISPATCH_ROW }
    }

    /// Rows that go from one rank to another in this phase.
    fn rows(&self, rows: &[Vec<u64>], from: usize, to: usize) -> u64 {
        if self.combine { rows[to][from] } else { rows[from][to] }
    }

    fn is_intra_node(&self, a: usize, b: usize) -> bool {
        self.shape.node_of(a) == self.shape.node_of(b)
    }
}

/// One write for each row, all ready at once, in an order without pattern; then the counts.
fn deepep_posts(site: &Site, workload: &Workload) -> Vec<Post> {
    let shape = site.shape;
    let mut posts = Vec::new();
    for source in 0..shape.ranks() {
        for node in (0..shape.nodes).filter(|node| *node != shape.node_of(source)) {
            for row in workload.rows(source, node) {
                for local in 0..shape.per_node {
                    let rank = shape.rank(node, local);
                    let (from, to) = if site.combine { (rank, source) } else { (source, rank) };
                    let post = Post { at_ns: 0, from, to, nic: 0, bytes: site.row_bytes() };
                    posts.extend((0..row.experts_on(local)).map(|_| post));
                }
            }
        }
    }
    shuffle(&mut posts);
    let experts = shape.preset.experts / shape.ranks();
    for from in 0..shape.ranks() {
        for to in (0..shape.ranks()).filter(|to| !site.is_intra_node(from, *to)) {
            let post = Post { at_ns: 0, from, to, nic: 0, bytes: COUNT_BYTES };
            posts.extend((0..experts).map(|_| post));
        }
    }
    posts
}

/// A fixed permutation (Fisher and Yates, by a linear congruential generator).
fn shuffle(posts: &mut [Post]) {
    let mut state = 1u64;
    for last in (1..posts.len()).rev() {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        posts.swap(last, (state >> 33) as usize % (last + 1));
    }
}

/// One write for each rank of another node, or one on each NIC, beginning with the next node. Each rank has its own
/// queue pair, and a NIC serves all queue pairs round-robin: so writes go in pieces, round-robin.
fn pplx_posts(site: &Site, rows: &[Vec<u64>]) -> Vec<Post> {
    let shape = site.shape;
    let nics = usize::from(site.link.nics);
    let mut posts = Vec::new();
    for from in 0..shape.ranks() {
        let mut at_ns = pack_ns(site, rows, from) + Costs::H200.crossing_ns;
        let others = (shape.per_node..shape.ranks()).map(|step| {
            let node = shape.node_of(from) + step / shape.per_node;
            shape.rank(node % shape.nodes, step % shape.per_node)
        });
        let mut writes = Vec::new();
        for (place, to) in others.enumerate() {
            let bytes = site.rows(rows, from, to) * site.row_bytes();
            // Dispatch gives the first part of the list to the first NIC, and so on.
            let nic = place * nics / (shape.ranks() - shape.per_node);
            let on = if site.combine { 0..nics } else { nic..nic + 1 };
            let share = bytes / on.len() as u64;
            for nic in on {
                at_ns += Costs::H200.post_ns + (site.link.nic.per_message_us * 1e3) as u64;
                writes.push(Post { at_ns, from, to, nic: nic as u8, bytes: share });
            }
        }
        posts.extend(round_robin(writes, &site.link));
    }
    posts
}

/// Cuts one rank's writes, in the order of their posts, into pieces, each posted when its NIC reaches it.
fn round_robin(writes: Vec<Post>, link: &Link) -> Vec<Post> {
    let mut pieces = Vec::new();
    for nic in 0..link.nics {
        let mut later = writes.iter().filter(|write| write.nic == nic).copied().collect::<VecDeque<Post>>();
        let mut queue: VecDeque<Post> = VecDeque::new();
        let mut now_ns = 0;
        while let Some(next_ns) = queue.front().or(later.front()).map(|write| write.at_ns) {
            now_ns = now_ns.max(if queue.is_empty() { next_ns } else { 0 });
            while later.front().is_some_and(|write| write.at_ns <= now_ns) {
                queue.extend(later.pop_front());
            }
            let Some(write) = queue.pop_front() else { continue };
            let bytes = write.bytes.min(PIECE_BYTES);
            pieces.push(Post { at_ns: now_ns, bytes, ..write });
            now_ns += at_rate(bytes * 8, link.nic.gbps);
            if write.bytes > bytes {
                queue.push_back(Post { bytes: write.bytes - bytes, ..write });
            }
        }
    }
    pieces
}

/// Time to pack the rows for other nodes.
fn pack_ns(site: &Site, rows: &[Vec<u64>], from: usize) -> u64 {
    let inter_node = (0..site.shape.ranks()).filter(|to| !site.is_intra_node(from, *to));
    let sent: u64 = inter_node.map(|to| site.rows(rows, from, to)).sum();
    at_rate(sent * site.row_bytes(), COPY_RATE)
}

/// When a rank is done, if its last write from another node arrived at `arrived_ns`.
fn end_ns(site: &Site, rows: &[Vec<u64>], rank: usize, arrived_ns: u64) -> u64 {
    let intra_node = |other: &usize| *other != rank && site.is_intra_node(rank, *other);
    let pushed: u64 = (0..site.shape.ranks()).filter(intra_node).map(|to| site.rows(rows, rank, to)).sum();
    let taken: u64 = (0..site.shape.ranks()).map(|from| site.rows(rows, from, rank)).sum();
    let pushed_ns = at_rate(pushed * site.row_bytes(), site.nvlink_rate);
    let flag_ns = if site.system == System::Pplx && site.shape.nodes > 1 { Costs::H200.crossing_ns } else { 0 };
    let there_ns = pushed_ns.max(arrived_ns + flag_ns);
    site.system.fixed_ns() + there_ns + at_rate(taken * site.row_bytes(), COPY_RATE)
}

/// Sends everything; returns, by rank, when the last write arrived.
fn exchange(site: &Site, mut posts: Vec<Post>) -> Outcome<Vec<u64>> {
    let ranks = site.shape.ranks();
    let sentence = |error: tokenyard::Error| error.to_string();
    let (network, mut endpoints) = connect(site).map_err(sentence)?;
    let mut missing = vec![0usize; ranks];
    posts.iter().for_each(|post| missing[post.to] += 1);
    posts.sort_by_key(|post| post.at_ns);
    let mut arrived_ns = vec![0; ranks];
    let mut posts = posts.into_iter().peekable();
    while missing.iter().any(|missing| *missing > 0) {
        let now_ns = network.now_ns();
        while let Some(post) = posts.next_if(|post| post.at_ns <= now_ns) {
            let posted = endpoints[post.from].post(&write(&post).map_err(sentence)?).map_err(sentence)?;
            if posted == Posted::Full {
                return Err("a queue of the simulated network is too short".into());
            }
        }
        for (rank, endpoint) in endpoints.iter_mut().enumerate() {
            let mut arrived = 0;
            while endpoint
                .poll(&mut |event| arrived += usize::from(matches!(event, Event::Imm { .. })))
                .map_err(sentence)?
                > 0
            {}
            if arrived > 0 {
                missing[rank] -= arrived;
                arrived_ns[rank] = now_ns;
            }
        }
        if posts.peek().is_none() && network.next_due_ns().is_none() && missing.iter().any(|missing| *missing > 0) {
            return Err("the simulated network lost a write".into());
        }
        network.advance_ns(POLL_NS);
    }
    Ok(arrived_ns)
}

fn connect(site: &Site) -> tokenyard::Result<(Network, Vec<SimEndpoint>)> {
    let mut nics = site.link.models();
    if site.system == System::Pplx {
        // Its posts are already spaced by the cost of a message; pieces are not messages.
        nics.iter_mut().for_each(|nic| nic.per_message_us = 0.0);
    }
    let config = SimConfig {
        clock: Clock::Virtual { tick_ns: 0 },
        nics,
        nic_queue: u32::MAX,
        peer_queue: u32::MAX,
        poll_batch: 1 << 20,
        payload: false,
        ..SimConfig::calm()
    };
    let ranks = site.shape.ranks();
    let network = Network::new(ranks, config)?;
    let mut endpoints =
        (0..ranks).map(|rank| network.endpoint(Rank(rank as u32))).collect::<tokenyard::Result<Vec<_>>>()?;
    for endpoint in &mut endpoints {
        // SAFETY: this network moves no payload, so nothing ever reads or writes the span.
        unsafe { endpoint.register(Span::host(1 << 16, 1 << 32))? };
    }
    // All peers are given the same address.
    let addresses = endpoints.iter_mut().map(|end| end.address(Rank(0))).collect::<tokenyard::Result<Vec<_>>>()?;
    for (rank, endpoint) in endpoints.iter_mut().enumerate() {
        for peer in (0..ranks).filter(|peer| !site.is_intra_node(rank, *peer)) {
            endpoint.connect(Rank(peer as u32), &addresses[peer])?;
        }
    }
    Ok((network, endpoints))
}

fn write(post: &Post) -> tokenyard::Result<WriteImm> {
    let place = Place { region: RegionId(0), offset: 0 };
    let imm = ImmValue::user(0, 0, 0)?;
    let bytes = u32::try_from(post.bytes).unwrap_or(u32::MAX);
    Ok(WriteImm { nic: post.nic, peer: Rank(post.to as u32), source: place, target: place, bytes, imm, token: 0 })
}

#[cfg(test)]
mod tests {
    use super::super::workload::tests::v3;
    use super::*;
    use tokenyard::internals::transport::network::sim::models;

    /// Without latency, nothing is due any more once the last write has arrived.
    #[test]
    fn the_last_write_taken_for_lost() {
        let link = models::parse("400:0:0").unwrap();
        let site = Site { system: System::DeepEp, shape: v3(2, 1), link, nvlink_rate: 1.0, combine: false };
        let post = Post { at_ns: 0, from: 0, to: 1, nic: 0, bytes: 64 };
        assert_eq!(exchange(&site, vec![post]).map(|arrived_ns| arrived_ns.len()), Ok(2));
    }
}
