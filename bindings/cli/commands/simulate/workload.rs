//! The rows of one iteration: from each rank to each node, and their ranks there.
//!
//! Before the simulated data path; pure. Everything follows from shape, seed and iteration.

use tokenyard::internals::base::{Dtype, Result};

use crate::cli::cases::inputs::{Counter, Use};
use crate::cli::cases::presets::Preset;
use crate::cli::cases::routing::{Router, Routing, RoutingShape};

/// Head of a message between nodes.
pub const HEAD_BYTES: u64 = 32;
/// Messages, headers and rows are padded to a multiple of this.
const UNIT: u64 = 16;

/// A world and its model.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    pub nodes: usize,
    pub per_node: usize,
    pub preset: &'static Preset,
    pub tokens: usize,
    pub seed: u64,
}

impl Shape {
    pub fn ranks(&self) -> usize {
        self.nodes * self.per_node
    }

    pub fn node_of(&self, rank: usize) -> usize {
        rank / self.per_node
    }

    pub fn local_of(&self, rank: usize) -> usize {
        rank % self.per_node
    }

    pub fn rank(&self, node: usize, local: usize) -> usize {
        node * self.per_node + local
    }

    /// A dispatched row with its scales.
    pub fn row_bytes(&self) -> u64 {
        let Preset { hidden, dtype, .. } = *self.preset;
        let scales = if dtype == Dtype::Fp8E4m3 { 4 * hidden.div_ceil(128) } else { 0 };
        ((hidden * dtype.bytes() + scales) as u64).next_multiple_of(UNIT)
    }

    /// A row that comes back: bf16.
    pub fn sum_bytes(&self) -> u64 {
        (self.preset.hidden as u64 * 2).next_multiple_of(UNIT)
    }

    /// Token, experts and weights of a row.
    pub fn header_bytes(&self) -> u64 {
        (4 + 8 * self.preset.top_k as u64).next_multiple_of(UNIT)
    }

    /// The rank of an expert. With more ranks than experts, ranks e, e + experts, … all hold expert e, and each token
    /// takes any of them.
    fn rank_of(&self, expert: usize, counter: &mut Counter) -> usize {
        let (ranks, experts) = (self.ranks(), self.preset.experts);
        if ranks <= experts {
            return expert * ranks / experts;
        }
        let replicas = (ranks - expert).div_ceil(experts);
        expert + experts * counter.below(replicas)
    }
}

/// A row from one rank to one node: how many of its experts each rank there has, four bits each.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Row {
    pub token: u32,
    experts: u64,
}

impl Row {
    /// Its experts on a rank of the node.
    pub fn experts_on(&self, local: usize) -> u64 {
        self.experts >> (4 * local) & 15
    }

    pub fn is_on(&self, local: usize) -> bool {
        self.experts_on(local) > 0
    }
}

/// Most experts of a token on one rank that a row can count; a node has at most 16 ranks.
const MOST_EXPERTS_ON_RANK: u64 = 15;

/// The rows of one iteration.
#[derive(Debug)]
pub struct Workload {
    pub shape: Shape,
    /// By source, then node, then token.
    rows: Vec<Row>,
    /// By source and node: its first row.
    starts: Vec<usize>,
}

impl Workload {
    /// Draws the routing of an iteration: K distinct experts for each token, uniformly.
    ///
    /// # Errors
    /// `Argument` if there are fewer experts than choices.
    pub fn draw(shape: Shape, iteration: u64) -> Result<Workload> {
        let Preset { experts, top_k, .. } = *shape.preset;
        let ranks = shape.ranks();
        let routing = RoutingShape {
            ranks,
            experts,
            top_k,
            max_tokens: shape.tokens,
            none: 0.0,
            duplicate: 0.0,
            seed: shape.seed,
        };
        let router = Router::new(&Routing::Uniform, routing)?;
        let mut workload = Workload { shape, rows: Vec::new(), starts: vec![0] };
        let mut by_node: Vec<Vec<Row>> = vec![Vec::new(); shape.nodes];
        for source in 0..ranks {
            let routed = router.draw(iteration, source, shape.tokens);
            for (token, ids) in routed.topk_idx.chunks(top_k).enumerate() {
                let mut counter = Counter::new(shape.seed, Use::Count, iteration, source, token);
                for id in ids {
                    let rank = shape.rank_of(*id as usize, &mut counter);
                    add(&mut by_node[shape.node_of(rank)], token as u32, shape.local_of(rank));
                }
            }
            for rows in &mut by_node {
                workload.rows.append(rows);
                workload.starts.push(workload.rows.len());
            }
        }
        Ok(workload)
    }

    /// Rows from a rank to a node, in token order.
    pub fn rows(&self, source: usize, node: usize) -> &[Row] {
        let at = source * self.shape.nodes + node;
        &self.rows[self.starts[at]..self.starts[at + 1]]
    }
}

/// Adds an expert to the row of a token, which is the last one or does not exist.
fn add(rows: &mut Vec<Row>, token: u32, local: usize) {
    if rows.last().is_none_or(|row| row.token != token) {
        rows.push(Row { token, experts: 0 });
    }
    if let Some(row) = rows.last_mut()
        && row.experts_on(local) < MOST_EXPERTS_ON_RANK
    {
        row.experts += 1 << (4 * local);
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::cli::cases::presets;

    pub fn v3(nodes: usize, per_node: usize) -> Shape {
        Shape { nodes, per_node, preset: &presets::PRESETS[0], tokens: 128, seed: 1 }
    }

    #[test]
    fn rows_have_the_published_sizes() {
        let shape = v3(2, 8);
        assert_eq!((shape.row_bytes(), shape.sum_bytes(), shape.header_bytes()), (7392, 14336, 80));
        let bf16 = Shape { preset: presets::find("qwen3-235b").unwrap(), ..shape };
        assert_eq!((bf16.row_bytes(), bf16.sum_bytes()), (8192, 8192));
    }

    #[test]
    fn every_choice_is_in_one_row_and_rows_are_one_a_token_and_node() {
        for (nodes, per_node) in [(1, 8), (8, 8), (3, 5), (64, 8)] {
            let shape = v3(nodes, per_node);
            let workload = Workload::draw(shape, 7).unwrap();
            let mut choices = 0;
            for source in 0..shape.ranks() {
                for node in 0..nodes {
                    let rows = workload.rows(source, node);
                    assert!(rows.windows(2).all(|two| two[0].token < two[1].token));
                    choices += rows.iter().flat_map(|row| (0..per_node).map(|l| row.experts_on(l))).sum::<u64>();
                }
            }
            assert_eq!(choices as usize, shape.ranks() * 128 * 8, "{nodes} x {per_node}");
        }
    }

    #[test]
    fn rows_are_as_many_as_uniform_routing_gives() {
        // 8 of 256 experts over 8 nodes of 32: 8 (1 - C(224, 8) / C(256, 8)) = 5.29 nodes a token, 7/8 of them others.
        let workload = Workload::draw(v3(8, 8), 0).unwrap();
        let sent: usize = (0..64)
            .flat_map(|s| (0..8).filter(move |n| *n != s / 8).map(move |n| (s, n)))
            .map(|(s, n)| workload.rows(s, n).len())
            .sum();
        let per_token = sent as f64 / (64.0 * 128.0);
        assert!((4.60..4.66).contains(&per_token), "{per_token}");
    }

    #[test]
    fn more_ranks_than_experts_share_them_evenly() {
        let shape = v3(64, 8);
        let workload = Workload::draw(shape, 1).unwrap();
        let mut load = vec![0; 512];
        for source in 0..512 {
            for node in 0..64 {
                for row in workload.rows(source, node) {
                    (0..8).for_each(|local| load[shape.rank(node, local)] += row.experts_on(local));
                }
            }
        }
        // 1024 of each on the mean, and a standard deviation of 32.
        assert!(load.iter().all(|n| (860..1200).contains(n)), "{load:?}");
    }

    #[test]
    fn routing_is_fresh_in_each_iteration_and_follows_from_the_seed() {
        let rows = |seed, iteration| {
            let shape = Shape { seed, ..v3(2, 4) };
            Workload::draw(shape, iteration).unwrap().rows
        };
        assert_eq!(rows(1, 2), rows(1, 2));
        assert_ne!(rows(1, 2), rows(1, 3));
        assert_ne!(rows(1, 2), rows(2, 2));
    }
}
