//! Which rows go where, by the definition of the data path: what a dispatch and its combine carry between ranks.
//!
//! Behind the data path; pure arithmetic on the routing. A token's row goes
//!
//! - within home's node once to each other rank that has one of its experts,
//! - once to the rail on each other node that has one, by wire,
//! - from there once to each other rank of that node that has one.
//!
//! Combine mirrors it: a partial row for each of the first and third kind, a node's sum for each of the second. So rows
//! count the same both ways. Every rank counts its own tokens, those that a rail passes on too: means over ranks are
//! the same, and `rows` says between whom they go.

use crate::cli::reference::{SourceRank, Spec};

/// Rows that left ranks for others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Traffic {
    nodes: Vec<std::ops::Range<usize>>,
    ranks: usize,
    /// [from][to], both of one node.
    rows: Vec<u64>,
    /// Rows by wire.
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

    /// Counts the rows of all tokens of `home`.
    pub fn count(&mut self, spec: &Spec, source: &SourceRank, home: usize) {
        for token in 0..source.tokens {
            let experts = (0..spec.top_k).filter_map(|k| source.expert(spec, token, k));
            let mut needed = vec![false; self.ranks];
            experts.filter_map(|e| spec.rank_of(e)).for_each(|rank| needed[rank] = true);
            for node in 0..self.nodes.len() {
                self.count_node(&needed, home, node);
            }
        }
    }

    fn count_node(&mut self, needed: &[bool], home: usize, node: usize) {
        let members = self.nodes[node].clone();
        if !members.clone().any(|rank| needed[rank]) {
            return;
        }
        let from = if members.contains(&home) { home } else { self.rail(home, node) };
        self.wire += u64::from(from != home);
        for to in members.filter(|&to| to != from && needed[to]) {
            self.rows[from * self.ranks + to] += 1;
        }
    }

    /// The rank of another node that takes the rows of `home`: the one at its place, counted round.
    fn rail(&self, home: usize, node: usize) -> usize {
        let own = self.nodes.iter().find(|ranks| ranks.contains(&home)).map_or(0, |ranks| ranks.start);
        let members = &self.nodes[node];
        members.start + (home - own) % members.len().max(1)
    }

    /// Rows that went to another rank of the node that they were on.
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

    /// One token of rank `home` that goes to these ranks, each of which has the expert of its number.
    fn of(nodes: &[usize], home: usize, to: &[i64]) -> Traffic {
        let world = nodes.iter().sum();
        let case = Case { world, nodes: nodes.to_vec(), experts: world, top_k: to.len(), ..Case::default() };
        let source = SourceRank { tokens: 1, topk_idx: to.to_vec(), topk_weight: vec![1.0; to.len()] };
        let mut traffic = Traffic::new(&case.spec(0));
        traffic.count(&case.spec(0), &source, home);
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
        // The rail needs it not, and passes it on all the same.
        let traffic = of(&[4, 4], 6, &[0, 1]);
        assert_eq!((pairs(&traffic), traffic.wire_rows()), (vec![(2, 0), (2, 1)], 1));
    }

    #[test]
    fn among_uneven_nodes_rails_are_counted_round() {
        // Rank 7 is the fifth of its node: its rail on a node of three is the second.
        let traffic = of(&[3, 5], 7, &[0, 1, 2]);
        assert_eq!((pairs(&traffic), traffic.wire_rows()), (vec![(1, 0), (1, 2)], 1));
        let traffic = of(&[1, 2, 3], 2, &[0, 1, 5, 4]);
        assert_eq!((pairs(&traffic), traffic.wire_rows()), (vec![(2, 1), (4, 5)], 2));
    }
}
