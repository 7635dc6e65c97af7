//! What a wrong row looks like: another token's row, two rows swapped, a row lost or standing twice.
//!
//! Work is done only once something is wrong: then all rows that exist and all rows observed are hashed, once.

use std::collections::HashMap;
use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};

use super::dispatch::ObservedDispatch;
use super::expect::{Expected, Place, Slot};
use super::spec::{RowSource, SourceRank, Spec};

pub(super) struct Finder<'a> {
    spec: &'a Spec,
    sources: &'a [SourceRank],
    rows: &'a dyn RowSource,
    expected: &'a Expected,
    seen: &'a ObservedDispatch<'a>,
    index: Option<Index>,
}

/// Where each row comes from, and where it stands.
struct Index {
    tokens: HashMap<u64, (usize, usize)>,
    observed: HashMap<u64, Vec<usize>>,
}

fn hash_of(row: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    row.hash(&mut hasher);
    hasher.finish()
}

impl<'a> Finder<'a> {
    pub fn new(
        spec: &'a Spec,
        sources: &'a [SourceRank],
        rows: &'a dyn RowSource,
        expected: &'a Expected,
        seen: &'a ObservedDispatch<'a>,
    ) -> Finder<'a> {
        Finder { spec, sources, rows, expected, seen, index: None }
    }

    /// What stands in `row` instead of the row of `place`, if it can be recognised.
    pub fn explain(&mut self, row: usize, place: Place, got: &[u8], wanted: &[u8]) -> String {
        let (here, wanted) = (hash_of(got), hash_of(wanted));
        let index = self.index();
        let Some(&(rank, token)) = index.tokens.get(&here) else { return String::new() };
        let stands = index.observed.get(&here).cloned().unwrap_or_default();
        let ours = index.observed.get(&wanted).cloned().unwrap_or_default();
        let text = format!("; the row of another token (rank {rank}, token {token}) stands here");
        let belongs = |at: &usize, whose: (usize, usize)| matches!(self.expected.slots.get(*at), Some(Slot::Token(p)) if (p.source, p.token) == whose);
        let swapped = ours.iter().find(|&at| *at != row && belongs(at, (rank, token)));
        if let Some(at) = swapped {
            return format!("{text}, and this token's row stands at row {at}: swapped");
        }
        let proper = stands.iter().find(|&at| *at != row && belongs(at, (rank, token)));
        let doubled = match proper {
            Some(at) if stands.len() > self.expected_times(rank, token) => {
                format!(", and also at row {at} where it belongs: doubled")
            }
            _ => String::new(),
        };
        text + &doubled + &self.whereabouts(place, &ours)
    }

    /// A clause if the row of `place` stands fewer times than it should.
    pub fn lost(&mut self, place: Place, wanted: &[u8]) -> String {
        let ours = self.index().observed.get(&hash_of(wanted)).cloned().unwrap_or_default();
        self.whereabouts(place, &ours)
    }

    fn whereabouts(&self, place: Place, ours: &[usize]) -> String {
        let times = self.expected_times(place.source, place.token);
        match ours {
            [] => "; this token's row stands nowhere: lost".to_string(),
            _ if ours.len() < times => format!("; this token's row stands {} of {times} times: lost", ours.len()),
            _ => format!("; this token's row stands at {ours:?}"),
        }
    }

    /// How many rows of the output a token must fill.
    fn expected_times(&self, rank: usize, token: usize) -> usize {
        let of_token = |s: &&Slot| matches!(s, Slot::Token(p) if (p.source, p.token) == (rank, token));
        self.expected.slots.iter().filter(of_token).count()
    }

    fn index(&mut self) -> &Index {
        let bytes = self.spec.row_bytes();
        self.index.get_or_insert_with(|| {
            let mut row = vec![0u8; bytes];
            let mut tokens = HashMap::new();
            for (rank, source) in self.sources.iter().enumerate() {
                for token in 0..source.tokens {
                    self.rows.row(rank, token, &mut row);
                    tokens.entry(hash_of(&row)).or_insert((rank, token));
                }
            }
            let mut observed: HashMap<u64, Vec<usize>> = HashMap::new();
            for (at, chunk) in self.seen.rows.chunks(self.seen.rows_pitch.max(1)).enumerate() {
                if let Some(row) = chunk.get(..bytes) {
                    observed.entry(hash_of(row)).or_default().push(at);
                }
            }
            Index { tokens, observed }
        })
    }
}
