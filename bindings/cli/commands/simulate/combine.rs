//! The devices of a combine, as in docs/design.md.
//!
//! ```text
//!  expert flags ─▶ partial rows for other nodes, chunk by chunk ─▶ NVLink ─▶ rail        own node's after them
//!  rail   all partial rows of a chunk arrived ─▶ added ─▶ fence ─▶ Bell
//!  source Arrived ─▶ relay ─▶ rows added; the own node's, too ─▶ the last additions
//! ```
//!
//! No bell depends on the network, so all bells are known when the phase begins.

use std::ops::Range;

use tokenyard::internals::proxy::wire::Direction;

use super::costs::{Costs, Server, at_rate};
use super::plan::Plan;
use super::result::Traffic;
use super::workload::Workload;
use super::world::{Events, Phase, What};

/// The device of a source rank.
#[derive(Debug, Clone, Default)]
struct SourceRank {
    /// Chunks that have not arrived.
    missing: usize,
    add: Server,
    /// When the last partial row of its own node has arrived.
    own_ns: u64,
    /// When the last rows of other nodes are added.
    inter_node_ns: u64,
    end_ns: Option<u64>,
}

/// The ranks of one node while they sum.
struct Node {
    /// By rank: its SMs and NVLink port.
    sum: Vec<Server>,
    /// By rail: additions of partial rows.
    add: Vec<Server>,
}

/// A chunk of sums on a rail.
struct Staged {
    at_ns: u64,
    rail: usize,
    source: usize,
    chunk: usize,
}

/// A combine.
#[derive(Debug)]
pub struct Combine<'a> {
    plan: &'a Plan,
    costs: Costs,
    workload: &'a Workload,
    start_ns: u64,
    sources: Vec<SourceRank>,
    open: usize,
    pub traffic: Traffic,
}

const C: Direction = Direction::Combine;

impl<'a> Combine<'a> {
    pub fn new(plan: &'a Plan, costs: Costs, workload: &'a Workload) -> Combine<'a> {
        let ranks = plan.shape.ranks();
        let sources = vec![SourceRank::default(); ranks];
        Combine { plan, costs, workload, start_ns: 0, sources, open: ranks, traffic: Traffic::new(ranks) }
    }

    /// Time of each rank.
    pub fn times_us(&self) -> impl Iterator<Item = f64> {
        self.sources.iter().filter_map(|source| Some((source.end_ns? - self.start_ns) as f64 / 1e3))
    }

    /// Every rank of a node sends partial rows to each owner in the node, beginning with itself: the owner takes the
    /// rows of some tokens of one source. Returns, by owner, when the last row has arrived.
    fn push(&mut self, node: usize, ranks: &mut Node, parts: &[(usize, Range<usize>)]) -> Vec<u64> {
        let (shape, costs) = (self.plan.shape, self.costs);
        let ready_ns = self.start_ns + costs.launch_ns + costs.sum_ns;
        let mut there_ns = vec![0; parts.len()];
        for (local, sum) in ranks.sum.iter_mut().enumerate() {
            for step in 0..parts.len() {
                let owner = (local + step) % parts.len();
                let (source, rows) = parts[owner].clone();
                let here = self.workload.rows(source, node)[rows].iter().filter(|row| row.is_on(local)).count();
                if here == 0 {
                    continue;
                }
                let bytes = here as u64 * shape.sum_bytes();
                let local_ns = at_rate(bytes, costs.stream_rate);
                let at_ns = if step == 0 {
                    sum.serve(ready_ns, local_ns)
                } else {
                    self.traffic.nvlink += bytes;
                    sum.serve(ready_ns, at_rate(bytes, costs.partial_rate)) + costs.nvlink_ns
                };
                there_ns[owner] = there_ns[owner].max(at_ns);
            }
        }
        there_ns
    }

    /// All sums that a node sends to source ranks of other nodes.
    fn sums_of_node(&mut self, node: usize, ranks: &mut Node) -> Vec<Staged> {
        let shape = self.plan.shape;
        let mut staged = Vec::new();
        for chunk in 0..self.plan.chunks(C, shape.tokens) {
            for step in 1..shape.nodes {
                let to = (node + step) % shape.nodes;
                let part = |rail| {
                    let source = shape.rank(to, rail);
                    (source, self.plan.rows_in(C, self.workload.rows(source, node).len(), chunk))
                };
                let parts: Vec<(usize, Range<usize>)> = (0..shape.per_node).map(part).collect();
                let there_ns = self.push(node, ranks, &parts);
                for (rail, (source, rows)) in parts.into_iter().enumerate() {
                    if chunk < self.plan.chunks(C, self.workload.rows(source, node).len()) {
                        let at_ns = self.add(node, &mut ranks.add[rail], source, rows, there_ns[rail]);
                        staged.push(Staged { at_ns, rail, source, chunk });
                    }
                }
            }
        }
        staged
    }

    /// A rail adds up a chunk's partial rows; returns when the sums are staged.
    fn add(&self, node: usize, server: &mut Server, source: usize, rows: Range<usize>, there_ns: u64) -> u64 {
        let (shape, costs) = (self.plan.shape, self.costs);
        // A rank that is alone in its node puts partial rows into the message at once.
        if shape.per_node == 1 {
            return there_ns.max(self.start_ns + costs.launch_ns + costs.sum_ns);
        }
        let rows = &self.workload.rows(source, node)[rows];
        let parts: usize = rows.iter().map(|row| (0..shape.per_node).filter(|l| row.is_on(*l)).count()).sum();
        let bytes = (parts + rows.len()) as u64 * shape.sum_bytes();
        let ready_ns = there_ns.max(self.start_ns + costs.launch_ns + costs.sum_ns) + costs.rail_ns;
        server.serve(ready_ns, at_rate(bytes, costs.stream_rate))
    }

    fn ring(&mut self, node: usize, staged: &Staged, events: &mut Events) {
        let shape = self.plan.shape;
        let &Staged { at_ns, rail, source, chunk } = staged;
        let (rank, to) = (shape.rank(node, rail), shape.node_of(source));
        let rows = self.workload.rows(source, node).len();
        let (chunks, bytes) = (self.plan.chunks(C, rows) as u16, self.plan.chunk_bytes(C, rows, chunk));
        self.sources[source].missing += 1;
        self.traffic.wire(rank, source, bytes);
        let link = (to - usize::from(to > node)) as u16;
        let what = What::Bell { rank: rank as u32, link, chunk: chunk as u16, chunks, bytes };
        events.at(at_ns + self.costs.fence_ns + self.costs.crossing_ns, what);
    }

    /// The partial rows that stay in a node.
    fn own_rows(&mut self, node: usize, ranks: &mut Node) {
        let shape = self.plan.shape;
        let part = |local| {
            let source = shape.rank(node, local);
            (source, 0..self.workload.rows(source, node).len())
        };
        let parts: Vec<(usize, Range<usize>)> = (0..shape.per_node).map(part).collect();
        let first_ns = self.start_ns + self.costs.launch_ns + self.costs.sum_ns + self.costs.nvlink_ns;
        for (local, there_ns) in self.push(node, ranks, &parts).into_iter().enumerate() {
            self.sources[shape.rank(node, local)].own_ns = there_ns.max(first_ns);
        }
    }

    fn arrived(&mut self, rank: usize, source: usize, chunk: usize, now_ns: u64) {
        let (shape, costs) = (self.plan.shape, self.costs);
        let node = shape.node_of(rank);
        let from = source + usize::from(source >= node);
        let rows = self.workload.rows(rank, from).len();
        let bytes = self.plan.rows_in(C, rows, chunk).len() as u64 * shape.sum_bytes();
        let seen_ns = now_ns + self.plan.relay_ns(C, &costs);
        let source = &mut self.sources[rank];
        let loaded_ns = source.add.serve(seen_ns, at_rate(bytes, costs.stream_rate));
        if bytes > 0 {
            source.inter_node_ns = source.inter_node_ns.max(loaded_ns + costs.inter_node_add_ns);
        }
        source.missing -= 1;
        self.finish(rank);
    }

    /// Ends a rank that has all its rows.
    fn finish(&mut self, rank: usize) {
        let costs = self.costs;
        let source = &mut self.sources[rank];
        if source.missing == 0 && source.end_ns.is_none() {
            let own_ns = source.add.serve(source.own_ns, 0) + costs.add_ns;
            source.end_ns = Some(own_ns.max(source.inter_node_ns) + costs.end_ns);
            self.open -= 1;
        }
    }
}

impl Phase for Combine<'_> {
    fn direction(&self) -> Direction {
        C
    }

    fn begin(&mut self, now_ns: u64, events: &mut Events) {
        let shape = self.plan.shape;
        self.start_ns = now_ns;
        for node in 0..shape.nodes {
            let servers = || vec![Server::default(); shape.per_node];
            let mut ranks = Node { sum: servers(), add: servers() };
            let mut staged = if self.plan.order.early_sums { self.sums_of_node(node, &mut ranks) } else { Vec::new() };
            self.own_rows(node, &mut ranks);
            if !self.plan.order.early_sums {
                // In token order over all sources, so that the last partial rows of every chunk come close to the end.
                staged = self.sums_of_node(node, &mut ranks);
                let all_ns = ranks.sum.iter_mut().map(|sum| sum.serve(0, 0)).max().unwrap_or(0);
                staged.iter_mut().for_each(|chunk| chunk.at_ns = chunk.at_ns.max(all_ns + self.costs.rail_ns));
            }
            staged.iter().for_each(|chunk| self.ring(node, chunk, events));
        }
        (0..shape.ranks()).for_each(|rank| self.finish(rank));
    }

    fn happen(&mut self, what: What, now_ns: u64, _events: &mut Events) {
        if let What::Arrived { rank, source, chunk } = what {
            self.arrived(rank as usize, usize::from(source), usize::from(chunk), now_ns);
        }
    }

    fn is_over(&self) -> bool {
        self.open == 0
    }
}

#[cfg(test)]
mod tests {
    use super::super::plan::Order;
    use super::super::workload::tests::v3;
    use super::*;

    #[test]
    fn a_message_without_rows_that_leaves_before_the_kernel_runs() {
        let shape = v3(2, 1);
        let plan = Plan::new(shape, 1, Order::DESIGN, None);
        let workload = Workload::draw(shape, 0).unwrap();
        let combine = Combine::new(&plan, Costs::H200, &workload);
        let (launch_ns, sum_ns) = (Costs::H200.launch_ns, Costs::H200.sum_ns);
        assert_eq!(combine.add(0, &mut Server::default(), 1, 0..0, 0), launch_ns + sum_ns);
    }
}
