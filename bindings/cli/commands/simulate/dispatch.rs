//! The devices of a dispatch, as in docs/design.md.
//!
//! ```text
//!  source route ─▶ rows packed in token order ─▶ chunk complete ─▶ fence ─▶ Bell
//!         routing metadata ─▶ own node        own node's rows after them, over NVLink
//!  rail   Arrived ─▶ relay ─▶ (chunk 0) routing metadata ─▶ node        rows ─▶ NVLink ─▶ ranks of the node
//!  expert routing metadata of all sources ─▶ scan ─▶ rows placed as they arrive
//! ```
//!
//! Work is assumed to be spread evenly over the SMs, each part a server of its own.

use tokenyard::internals::proxy::wire::Direction;

use super::costs::{Costs, Server, at_rate};
use super::plan::Plan;
use super::result::Traffic;
use super::workload::{Row, Workload};
use super::world::{Events, Phase, What};

const D: Direction = Direction::Dispatch;

/// Rows of the own node that are pushed together.
const BLOCK_ROWS: usize = 32;

/// One rank's device.
#[derive(Debug, Clone, Default)]
struct Device {
    /// NVLink, out and in.
    push: Server,
    take: Server,
    place: Server,
    /// Routing metadata of its sources, if built one after the other.
    meta: Server,
    /// Rows that have not arrived yet.
    missing: u32,
    /// Experts' copies of rows that wait for routing metadata, and the arrival time of the last of these rows.
    waiting: u32,
    waiting_ns: u64,
    placed_ns: u64,
    end_ns: Option<u64>,
}

/// Routing metadata at one node.
#[derive(Debug, Clone, Copy)]
struct Meta {
    missing: usize,
    ready_ns: Option<u64>,
}

/// A dispatch.
#[derive(Debug)]
pub struct Dispatch<'a> {
    plan: &'a Plan,
    costs: Costs,
    workload: &'a Workload,
    start_ns: u64,
    devices: Vec<Device>,
    metas: Vec<Meta>,
    open: usize,
    pub traffic: Traffic,
}

impl<'a> Dispatch<'a> {
    pub fn new(plan: &'a Plan, costs: Costs, workload: &'a Workload) -> Dispatch<'a> {
        let ranks = plan.shape.ranks();
        Dispatch {
            plan,
            costs,
            workload,
            start_ns: 0,
            devices: vec![Device::default(); ranks],
            metas: vec![Meta { missing: ranks, ready_ns: None }; plan.shape.nodes],
            open: ranks,
            traffic: Traffic::new(ranks),
        }
    }

    /// Time of each rank.
    pub fn times_us(&self) -> impl Iterator<Item = f64> {
        self.devices.iter().filter_map(|device| Some((device.end_ns? - self.start_ns) as f64 / 1e3))
    }

    /// Packs a rank's rows for other nodes; returns when the last row is packed.
    fn pack(&mut self, source: usize, events: &mut Events) -> u64 {
        let (shape, costs) = (self.plan.shape, self.costs);
        let begin_ns = self.start_ns + costs.launch_ns + if shape.nodes > 1 { costs.route_ns } else { 0 };
        let own = shape.node_of(source);
        let others = || (0..shape.nodes).filter(move |node| *node != own);
        let mut rows_of_token = vec![0u64; shape.tokens];
        for row in others().flat_map(|node| self.workload.rows(source, node)) {
            rows_of_token[row.token as usize] += 1;
        }
        let mut rows_so_far = 0;
        let packed_ns: Vec<u64> = rows_of_token
            .iter()
            .map(|rows| {
                rows_so_far += rows;
                begin_ns + costs.pack_ns + at_rate(rows_so_far * shape.row_bytes(), costs.stream_rate)
            })
            .collect();
        for (link, node) in others().enumerate() {
            let rows = self.workload.rows(source, node);
            let chunks = self.plan.chunks(D, rows.len());
            for chunk in 0..chunks {
                let last = self.plan.rows_in(D, rows.len(), chunk).last();
                let packed_ns = last.map_or(0, |row| packed_ns[rows[row].token as usize]);
                // Headers come from the same choices as routing metadata of the own node.
                let head_ns = if chunk == 0 { begin_ns + self.counts_ns(rows.len()) } else { 0 };
                let at_ns = packed_ns.max(head_ns);
                let bytes = self.plan.chunk_bytes(D, rows.len(), chunk);
                self.traffic.wire(source, shape.rank(node, shape.local_of(source)), bytes);
                let what = What::Bell {
                    rank: source as u32,
                    link: link as u16,
                    chunk: chunk as u16,
                    chunks: chunks as u16,
                    bytes,
                };
                events.at(at_ns + costs.fence_ns + costs.crossing_ns, what);
            }
        }
        if rows_so_far > 0 { packed_ns.last().copied().unwrap_or(begin_ns) } else { begin_ns }
    }

    /// Sends routing metadata and rows of a rank to its own node.
    fn own_node(&mut self, source: usize, ready_ns: u64, events: &mut Events) {
        let (shape, costs) = (self.plan.shape, self.costs);
        let node = shape.node_of(source);
        self.send_counts(node, self.start_ns + costs.launch_ns + self.counts_ns(shape.tokens), events);
        for rows in self.workload.rows(source, node).chunks(BLOCK_ROWS) {
            self.forward(source, rows, ready_ns, events);
        }
    }

    /// Time to build the counts of a source from its tokens.
    fn counts_ns(&self, tokens: usize) -> u64 {
        self.costs.meta_ns + self.costs.meta_token_ns * tokens as u64
    }

    /// Sends routing metadata of one source, whose counts are ready at `counted_ns`, to all ranks of a node.
    fn send_counts(&self, node: usize, counted_ns: u64, events: &mut Events) {
        events.at(counted_ns + self.costs.nvlink_ns, What::Meta { node: node as u32 });
    }

    /// Sends rows to all ranks of the sender's node that need them.
    fn forward(&mut self, sender: usize, rows: &[Row], ready_ns: u64, events: &mut Events) {
        let (shape, costs) = (self.plan.shape, self.costs);
        for step in 0..shape.per_node {
            let local = (shape.local_of(sender) + step) % shape.per_node;
            let there = rows.iter().filter(|row| row.is_on(local)).count() as u32;
            let copies = rows.iter().map(|row| row.experts_on(local) as u32).sum();
            if there == 0 {
                continue;
            }
            let bytes = u64::from(there) * shape.row_bytes();
            let pushed = step > 0;
            let at_ns = if pushed {
                self.traffic.nvlink += bytes;
                let push = &mut self.devices[sender].push;
                push.serve(ready_ns, at_rate(bytes, costs.push_rate)) + costs.nvlink_ns
            } else {
                ready_ns
            };
            let rank = shape.rank(shape.node_of(sender), local) as u32;
            events.at(at_ns, What::Rows { rank, rows: there, copies, pushed });
        }
    }

    fn arrived(&mut self, rank: usize, source: usize, chunk: usize, now_ns: u64, events: &mut Events) {
        let (shape, costs) = (self.plan.shape, self.costs);
        let node = shape.node_of(rank);
        let from = source + usize::from(source >= node);
        let source = shape.rank(from, shape.local_of(rank));
        let workload = self.workload;
        let rows = workload.rows(source, node);
        let seen_ns = now_ns + self.plan.relay_ns(D, &costs);
        if chunk == 0 {
            let (counts_ns, words_ns) = (self.counts_ns(rows.len()), costs.words_ns);
            let counted_ns = if self.plan.order.spread_metadata {
                seen_ns + counts_ns
            } else {
                self.devices[rank].meta.serve(seen_ns, counts_ns + words_ns) - words_ns
            };
            self.send_counts(node, counted_ns, events);
        }
        let here = self.plan.rows_in(D, rows.len(), chunk);
        // A rank that is alone in its node places rows from where they arrived.
        let copied_ns = if shape.per_node == 1 { 0 } else { costs.row_ns };
        self.forward(rank, &rows[here], seen_ns + copied_ns, events);
    }

    fn meta(&mut self, node: usize, now_ns: u64) {
        let shape = self.plan.shape;
        let meta = &mut self.metas[node];
        meta.missing -= 1;
        if meta.missing > 0 {
            return;
        }
        // Segments are planned from counts while words arrive.
        let scan_ns = self.costs.scan_ns + self.costs.scan_source_ns * shape.ranks() as u64;
        let ready_ns = now_ns + scan_ns.max(self.costs.words_ns);
        meta.ready_ns = Some(ready_ns);
        for local in 0..shape.per_node {
            self.place(shape.rank(node, local), ready_ns);
        }
    }

    fn rows_arrived(&mut self, rank: usize, rows: u32, copies: u32, pushed: bool, now_ns: u64) {
        let bytes = u64::from(rows) * self.plan.shape.row_bytes();
        let device = &mut self.devices[rank];
        let at_ns = if pushed { device.take.absorb(now_ns, at_rate(bytes, self.costs.push_rate)) } else { now_ns };
        device.missing -= rows;
        device.waiting += copies;
        device.waiting_ns = device.waiting_ns.max(at_ns);
        if let Some(ready_ns) = self.metas[self.plan.shape.node_of(rank)].ready_ns {
            self.place(rank, ready_ns);
        }
    }

    /// Places the waiting rows, now that the starts of segments are known.
    fn place(&mut self, rank: usize, ready_ns: u64) {
        let row_bytes = self.plan.shape.row_bytes();
        let device = &mut self.devices[rank];
        if device.waiting > 0 {
            let for_ns = at_rate(u64::from(device.waiting) * row_bytes, self.costs.place_rate);
            let placed_ns = device.place.serve(ready_ns.max(device.waiting_ns), for_ns) + self.costs.row_ns;
            device.placed_ns = device.placed_ns.max(placed_ns);
            device.waiting = 0;
        }
        if device.missing == 0 && device.end_ns.is_none() {
            device.end_ns = Some(device.placed_ns.max(ready_ns) + self.costs.pad_ns + self.costs.end_ns);
            self.open -= 1;
        }
    }
}

impl Phase for Dispatch<'_> {
    fn direction(&self) -> Direction {
        D
    }

    fn begin(&mut self, now_ns: u64, events: &mut Events) {
        let shape = self.plan.shape;
        self.start_ns = now_ns;
        for source in 0..shape.ranks() {
            for node in 0..shape.nodes {
                for row in self.workload.rows(source, node) {
                    for local in (0..shape.per_node).filter(|local| row.is_on(*local)) {
                        self.devices[shape.rank(node, local)].missing += 1;
                    }
                }
            }
        }
        for source in 0..shape.ranks() {
            let packed_ns = self.pack(source, events);
            self.own_node(source, packed_ns, events);
        }
    }

    fn happen(&mut self, what: What, now_ns: u64, events: &mut Events) {
        match what {
            What::Bell { .. } => {}
            What::Arrived { rank, source, chunk } => {
                self.arrived(rank as usize, usize::from(source), usize::from(chunk), now_ns, events);
            }
            What::Meta { node } => self.meta(node as usize, now_ns),
            What::Rows { rank, rows, copies, pushed } => self.rows_arrived(rank as usize, rows, copies, pushed, now_ns),
        }
    }

    fn is_over(&self) -> bool {
        self.open == 0
    }
}
