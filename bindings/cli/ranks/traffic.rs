//! Rows that a dispatch and its combine carry between ranks, by the definition of the data path.
//!
//! After the data path; pure arithmetic on the routing. A token's row goes
//!
//! - within the source's node once to each other rank that has one of its experts,
//! - once over the wire to the rail on each other node that has such a rank,
//! - from the rail once to each other rank of that node that has one of its experts.
//!
//! Combine mirrors this: a partial row for each row of the first and third kind, a node's sum for each of the second.
//! So row counts are equal both ways. Every rank counts its own tokens, including the rows that rails forward: means
//! over ranks are the same, and `rows` has the pairs of ranks.

use crate::cli::reference::{SourceRank, Spec};

/// Rows that left ranks for others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Traffic {
    nodes: Vec<std::ops::Range<usize>>,
    ranks: usize,
    /// Rows within nodes, [from][to].
    rows: Vec<u64>,
    /// Rows over the wire.
    wire: u64,
}

impl Traffic {
    pub fn new(spec: &Spec) -> Traffic {
        Traffic {
            nodes: spec.node_ranks().collect(),
            ranks: spec.ranks,
            rows: vec![0; spec.ranks * spec.ranks],
            wire: 0,
        }
    }

    /// Counts the rows of all tokens of `source_rank`.
    pub fn count(&mut self, spec: &Spec, source: &SourceRank, source_rank: usize) {
        for token in 0..source.tokens {
            let experts = (0..spec.top_k).filter_map(|k| source.expert(spec, token, k));
            let mut needed = vec![false; self.ranks];
            experts.filter_map(|e| spec.rank_of(e)).for_each(|rank| needed[rank] = true);
            for node in 0..self.nodes.len() {
                self.count_node(&needed, source_rank, node);
            }
        }
    }

    fn count_node(&mut self, needed: &[bool], source_rank: usize, node: usize) {
        let members = self.nodes[node].clone();
        if !members.clone().any(|rank| needed[rank]) {
            return;
        }
        let from = if members.contains(&source_rank) { source_rank } else { self.rail(source_rank, node) };
        self.wire += u64::from(from != source_rank);
        for to in members.filter(|&to| to != from && needed[to]) {
            self.rows[from * self.ranks + to] += 1;
        }
    }

    /// The rank of another node that takes the rows of `source_rank`: the rank at the same place, modulo the node's
    /// size.
    fn rail(&self, source_rank: usize, node: usize) -> usize {
        let own = self.nodes.iter().find(|ranks| ranks.contains(&source_rank)).map_or(0, |ranks| ranks.start);
        let members = &self.nodes[node];
        members.start + (source_rank - own) % members.len().max(1)
    }

    /// Rows that went to another rank of the same node.
    pub fn nvlink_rows(&self) -> u64 {
        self.rows.iter().sum()
    }

    /// Rows that went to another node.
    pub fn wire_rows(&self) -> u64 {
        self.wire
    }

    /// Rows within nodes, [from][to].
    pub fn rows(&self) -> &[u64] {
        &self.rows
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::cases::case::Case;

    /// One token of rank `source_rank` that goes to the ranks `to`; rank r has expert r.
    fn of(nodes: &[usize], source_rank: usize, to: &[i64]) -> Traffic {
        let world = nodes.iter().sum();
        let case = Case { world, nodes: nodes.to_vec(), experts: world, top_k: to.len(), ..Case::default() };
        let source = SourceRank { tokens: 1, topk_idx: to.to_vec(), ..SourceRank::default() };
        let mut traffic = Traffic::new(&case.spec(0));
        traffic.count(&case.spec(0), &source, source_rank);
        traffic
    }

    fn pairs(traffic: &Traffic) -> Vec<(usize, usize)> {
        let sent = traffic.rows().iter().enumerate().filter(|(_, rows)| **rows > 0);
        sent.map(|(i, _)| (i / traffic.ranks, i % traffic.ranks)).collect()
    }

    #[test]
    fn in_one_node_a_row_goes_once_to_each_other_rank() {
        let traffic = of(&[4], 1, &[0, 1, 3]);
        assert_eq!((pairs(&traffic), traffic.wire_rows()), (vec![(1, 0), (1, 3)], 0));
        assert_eq!(of(&[4], 1, &[-1, -1]).nvlink_rows(), 0);
    }

    #[test]
    fn over_nodes_a_row_goes_once_to_each_rail_and_on_from_there() {
        // Rank 1's rail on the second node is rank 5; rank 5 itself needs the row, so do 4 and 7.
        let traffic = of(&[4, 4], 1, &[0, 5, 4, 7]);
        assert_eq!((pairs(&traffic), traffic.wire_rows()), (vec![(1, 0), (5, 4), (5, 7)], 1));
        // The rail does not need the row itself, but forwards it.
        let traffic = of(&[4, 4], 6, &[0, 1]);
        assert_eq!((pairs(&traffic), traffic.wire_rows()), (vec![(2, 0), (2, 1)], 1));
    }

    #[test]
    fn rails_of_uneven_nodes_are_at_the_same_place_modulo_the_nodes_size() {
        // Rank 7 is the fifth of its node: its rail on a node of three is the second.
        let traffic = of(&[3, 5], 7, &[0, 1, 2]);
        assert_eq!((pairs(&traffic), traffic.wire_rows()), (vec![(1, 0), (1, 2)], 1));
        let traffic = of(&[1, 2, 3], 2, &[0, 1, 5, 4]);
        assert_eq!((pairs(&traffic), traffic.wire_rows()), (vec![(2, 1), (4, 5)], 2));
    }
}
