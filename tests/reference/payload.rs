//! Comparison of the side payload that combine brings: bit for bit, since its sums are fp32 sums in a fixed order.
//!
//! Word j of what an expert's row brings is made of a word of the dispatched row and of the expert, in 32-bit unsigned
//! arithmetic:
//!
//! ```text
//! m     =  (row word[j mod words of the row] + j) · 2654435769  xor  (expert + 1) · 2246822507
//! word  =  gathered: m, or the bits of -0 where m is a multiple of 5
//!          summed:   f32(i32(m) >> 8) / 4096
//! ```
//!
//! In the token layout the expert is the first at that rank, in top-k order.

use super::combine::terms_of;
use super::report::Report;
use super::spec::{Faults, Layout, RowSource, SourceRank, Spec};

/// A rank's output for payloads, and what was asked for.
pub struct ObservedPayload<'a> {
    /// `[tokens, words]`, or `[tokens, top_k, words]` if gathered; then untouched memory.
    pub out: &'a [u8],
    /// Words of each row.
    pub words: usize,
    /// Whether words are gathered choice by choice, or summed.
    pub gathered: bool,
}

/// Bits that an expert's row brings.
fn word(row: &[u8], expert: usize, j: usize, gathered: bool) -> u32 {
    let words = row.as_chunks::<4>().0;
    let of_row = words.get(j % words.len().max(1)).map_or(0, |word| u32::from_le_bytes(*word));
    let mixed = of_row.wrapping_add(j as u32).wrapping_mul(2_654_435_769)
        ^ (expert as u32).wrapping_add(1).wrapping_mul(2_246_822_507);
    match gathered {
        true if mixed.is_multiple_of(5) => 0x8000_0000,
        true => mixed,
        false => (((mixed as i32) >> 8) as f32 / 4096.0).to_bits(),
    }
}

/// What a token's payload must be.
fn expected(
    spec: &Spec,
    source: &SourceRank,
    row: &[u8],
    faults: &Faults,
    (source_rank, token): (usize, usize),
    seen: &ObservedPayload<'_>,
) -> Vec<u32> {
    let terms = terms_of(spec, source, faults, source_rank, token);
    let one_row = matches!(spec.layout, Layout::Token { .. });
    if seen.gathered {
        let mut all = vec![0; spec.top_k * seen.words];
        for term in &terms {
            for j in 0..seen.words {
                all[term.choice * seen.words + j] = word(row, term.expert, j, true);
            }
        }
        return all;
    }
    let sum = |j: usize| {
        let of_rank = |rank: usize| {
            let experts = terms.iter().filter(|term| term.rank == rank).map(|term| term.expert);
            let most = if one_row { 1 } else { usize::MAX };
            experts.take(most).fold(0.0f32, |sum, expert| sum + f32::from_bits(word(row, expert, j, false)))
        };
        let of_node = |ranks: std::ops::Range<usize>| ranks.map(of_rank).fold(0.0f32, |sum, rank| sum + rank);
        spec.node_ranks().map(of_node).fold(0.0f32, |sum, node| sum + node).to_bits()
    };
    (0..seen.words).map(sum).collect()
}

/// Compares what a rank's tokens got.
pub fn check_payload(
    spec: &Spec,
    sources: &[SourceRank],
    rows: &dyn RowSource,
    faults: &Faults,
    source_rank: usize,
    seen: &ObservedPayload<'_>,
) -> Report {
    let mut report = Report::default();
    let empty = SourceRank::default();
    let source = sources.get(source_rank).unwrap_or(&empty);
    let words = if seen.gathered { spec.top_k * seen.words } else { seen.words };
    let found: Vec<u32> = seen.out.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)).collect();
    if found.len() < source.tokens * words {
        report.miss(1, || format!("rank {source_rank}: {} words of payload, of {} tokens", found.len(), source.tokens));
        return report;
    }
    let mut row = vec![0; spec.row_bytes()];
    for (token, found) in found.chunks(words.max(1)).take(source.tokens).enumerate() {
        rows.row(source_rank, token, &mut row);
        let wanted = expected(spec, source, &row, faults, (source_rank, token), seen);
        let wrong = found.iter().zip(&wanted).position(|(found, wanted)| found != wanted);
        match wrong {
            None => report.compared += words as u64,
            Some(at) => report.miss(1, || {
                format!(
                    "rank {source_rank}, token {token}: word {at} of the payload is {:#010x}, not {:#010x}",
                    found[at], wanted[at]
                )
            }),
        }
    }
    let poison = u32::from_ne_bytes([spec.poison; 4]);
    if let Some(at) = found.iter().skip(source.tokens * words).position(|word| *word != poison) {
        report.miss(1, || format!("rank {source_rank}: word {at} behind the last token's payload was written"));
    }
    report
}
