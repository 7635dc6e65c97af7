//! What the ranks of a world must agree on before it forms, besides its size.
//!
//! Place in the data path: none. Made on the caller's thread, compared on rank 0's bootstrap thread. Both sides send
//! text: it keeps lists short, and a refusal can quote both.

use std::fmt::Write;

use sha2::{Digest, Sha256};

use super::collective::Failure;
use crate::base::{Rank, quoted};

/// Longest list sent whole, in bytes; of a longer list, the first `MAX_LIST` bytes and a hash of all.
const MAX_LIST: usize = 512;

/// Generation, members and nodes, as one rank has them.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Terms {
    /// How often the job has regrouped.
    pub generation: u32,
    /// Ranks of the first generation that take part, as in `0-3,6`.
    pub members: String,
    /// Ranks of each node, as in `4,3`, and of each node of the first generation.
    pub nodes: String,
}

impl Terms {
    pub(super) fn new(generation: u32, members: &[Rank], nodes: &[usize], first_nodes: &[usize]) -> Terms {
        let mut sizes = sizes(nodes);
        if nodes != first_nodes {
            sizes = format!("{sizes} (of {} at first)", self::sizes(first_nodes));
        }
        Terms { generation, members: listed(members), nodes: shortened(sizes) }
    }

    /// The name of the rank that sent these terms and its index `rank` among their members.
    pub(super) fn who(&self, rank: u32) -> String {
        let mut before = u64::from(rank);
        // A run that is cut off, or of another version, ends the list.
        for run in self.members.split(',') {
            let ends = run.split_once('-').unwrap_or((run, run));
            let (Ok(first), Ok(last)) = (ends.0.parse::<u32>(), ends.1.parse::<u32>()) else { break };
            let Some(length) = u64::from(last).checked_sub(u64::from(first)).map(|more| more + 1) else { break };
            if before < length {
                return format!("rank {}", u64::from(first) + before);
            }
            before -= length;
        }
        format!("member number {rank}")
    }

    /// What differs between `theirs`, the terms of rank `who` at address `peer`, and these, the terms of rank 0, whose
    /// name is `root`.
    pub(super) fn difference(&self, theirs: &Terms, (who, peer): (&str, &str), root: Rank) -> Option<Failure> {
        let differ = |what: &str, theirs: &str, ours: &str, advice: &str| {
            let theirs = quoted(theirs.as_bytes());
            Some(Failure::new(format!("{who} at {peer} has the {what} {theirs} and rank {root} has {ours}"), advice))
        };
        if self.generation != theirs.generation {
            let (theirs, ours) = (theirs.generation.to_string(), self.generation.to_string());
            let advice = "regroup with one generation on all ranks; a generation's port is TOKENYARD_PORT plus its \
                          number, so jobs of one host need ports that differ by more than their generations";
            return differ("generation", &theirs, &ours, advice);
        }
        if self.members != theirs.members {
            return differ("members", &theirs.members, &self.members, "name the same members on all of them");
        }
        if self.nodes != theirs.nodes {
            let advice = "set the same TOKENYARD_NODES on all ranks (torchrun's LOCAL_WORLD_SIZE is used without it)";
            return differ("nodes", &theirs.nodes, &self.nodes, advice);
        }
        None
    }
}

/// Members as errors list them.
pub(super) fn listed(members: &[Rank]) -> String {
    shortened(ranges(members))
}

/// Ranks in their order, neighbours as ranges.
fn ranges(ranks: &[Rank]) -> String {
    let mut text = String::new();
    for run in ranks.chunk_by(|a, b| a.0.checked_add(1) == Some(b.0)) {
        let comma = if text.is_empty() { "" } else { "," };
        // Writing to a string cannot fail.
        let _ = match run {
            [first, .., last] => write!(text, "{comma}{first}-{last}"),
            _ => write!(text, "{comma}{}", run[0]),
        };
    }
    text
}

fn sizes(nodes: &[usize]) -> String {
    nodes.iter().map(usize::to_string).collect::<Vec<_>>().join(",")
}

/// The text, or enough of it to read and its hash to compare.
fn shortened(text: String) -> String {
    if text.len() <= MAX_LIST {
        return text;
    }
    let hash: String = Sha256::digest(text.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{}... (SHA-256 {hash})", &text[..text.floor_char_boundary(MAX_LIST)])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn terms(members: &[u32], nodes: &[usize]) -> Terms {
        let members: Vec<Rank> = members.iter().copied().map(Rank).collect();
        Terms::new(1, &members, nodes, &[4, 4])
    }

    #[test]
    fn lists_that_read_alike_but_differ() {
        assert_eq!(terms(&[0, 1, 2, 5, 7, 8], &[4, 2]).members, "0-2,5,7-8");
        assert_eq!(terms(&[], &[]).members, "");
        assert_eq!(terms(&[0], &[4, 4]).nodes, "4,4");
        assert_eq!(terms(&[0], &[1]).nodes, "1 (of 4,4 at first)");
        let even: Vec<u32> = (0..16_384).step_by(2).collect();
        let mut other = even.clone();
        other[8000] += 1;
        let [long, other] = [even, other].map(|members| terms(&members, &[1]).members);
        assert!(long != other && long.len() < 2 * MAX_LIST && long.starts_with("0,2,4,"), "{long}");
    }

    #[test]
    fn a_difference_reported_without_both_values() {
        let ours = terms(&[0, 1], &[2]);
        let differing =
            |theirs: &Terms| ours.difference(theirs, (&theirs.who(1), "there"), Rank(0)).map(|failure| failure.what);
        assert_eq!(differing(&ours), None);
        let other = Terms { generation: 7, ..ours.clone() };
        assert_eq!(differing(&other).unwrap(), "rank 1 at there has the generation 7 and rank 0 has 1");
        let other = terms(&[0, 2], &[2]);
        assert_eq!(differing(&other).unwrap(), "rank 2 at there has the members 0,2 and rank 0 has 0-1");
        let other = terms(&[0, 1], &[1, 1]);
        assert!(differing(&other).unwrap().contains("nodes 1,1 (of 4,4 at first) and rank 0 has 2 (of 4,4 at first)"));
    }

    #[test]
    fn a_rank_called_by_its_place_among_the_members() {
        let who = |terms: &Terms, rank| terms.who(rank);
        let some = terms(&[1, 2, 3, 6, 8, 9], &[1]);
        assert_eq!([0, 2, 3, 5].map(|rank| who(&some, rank)), ["rank 1", "rank 3", "rank 6", "rank 9"]);
        assert_eq!(who(&some, 6), "member number 6");
        // A list that is cut short, and what another version may send.
        let even: Vec<u32> = (0..16_384).step_by(2).collect();
        let long = terms(&even, &[1]);
        assert_eq!([who(&long, 99), who(&long, 8000)], ["rank 198", "member number 8000"]);
        for odd in ["", "x", "7-2", "0-4294967295,1", "4294967296", "-3"] {
            let name = who(&Terms { members: odd.into(), ..Terms::default() }, u32::MAX);
            assert!(["member number 4294967295", "rank 4294967295"].contains(&name.as_str()), "{odd}: {name}");
        }
    }
}
