//! What a wrong sum looks like: an expert missing, doubled or exchanged for another, weights swapped, a rank or a node
//! missing, a node's sum counted twice.
//!
//! Each suspicion is a changed list of terms; it is voiced if it explains every sampled wrong column. Suspicions that
//! explain little (a single wrong column) are not voiced at all.

use super::combine::{Bound, Row, Term, TokenSums, sum_at, terms_of};
use super::spec::Spec;

/// Wrong columns that a suspicion must explain.
const SAMPLE: usize = 16;
/// Fewer wrong columns than this are a damaged row and not a wrong list of terms.
const LEAST: usize = 4;
/// Other tokens of the same rank that are looked at.
const TOKENS: usize = 1024;

/// A clause that names the likely cause, or nothing.
pub(super) fn explain(row: &Row, x: &[f32], bound: &Bound, wrong: &[usize]) -> String {
    let poison = u32::from_le_bytes([row.spec.poison; 4]) >> (32 - 8 * row.spec.out_dtype.bytes());
    if wrong.iter().any(|&c| row.value(c).is_nan()) {
        return "; NaN among them".to_string();
    }
    if wrong.iter().all(|&c| row.spec.out_dtype.bits_at(row.got, c) == poison) {
        return format!("; they still hold the fill byte {:#04x}: never written", row.spec.poison);
    }
    if wrong.len() < LEAST {
        return String::new();
    }
    let stride = wrong.len().div_ceil(SAMPLE);
    let sample: Vec<usize> = wrong.iter().copied().step_by(stride).collect();
    let fits = |x: &[f32], terms: &[Term]| {
        sample.iter().all(|&column| {
            let (sum, old) = (sum_at(row.spec, x, terms, row.source_rank, column), row.old(column));
            (row.value(column) - sum.exact - old).abs() <= bound.of(sum, old)
        })
    };
    let terms = terms_of(row.spec, row.source, row.faults, row.source_rank, row.token);
    let suspicion = suspicions(row.spec, &terms).find(|(_, changed)| fits(x, changed));
    if let Some((text, _)) = suspicion {
        return format!("; as if {text}");
    }
    let mut other = TokenSums::default();
    for token in (0..row.source.tokens.min(TOKENS)).filter(|&t| t != row.token) {
        other.load(row.spec, row.rows, row.source_rank, token);
        if fits(other.x(), &terms_of(row.spec, row.source, row.faults, row.source_rank, token)) {
            return format!("; the sum of another token (token {token}) stands here");
        }
    }
    String::new()
}

/// Changed lists of terms with what they would mean, the simplest first.
fn suspicions<'a>(spec: &'a Spec, terms: &'a [Term]) -> impl Iterator<Item = (String, Vec<Term>)> + 'a {
    let n = terms.len();
    let name = |i: usize| format!("expert {} (rank {}, weight {})", terms[i].expert, terms[i].rank, terms[i].weight);
    let missing = (0..n).map(move |i| {
        let rest = (0..n).filter(|&j| j != i).map(|j| terms[j]).collect();
        (format!("{} were missing", name(i)), rest)
    });
    let doubled = (0..n).map(move |i| {
        let more = terms.iter().copied().chain([terms[i]]).collect();
        (format!("{} were counted twice", name(i)), more)
    });
    let absent = (0..spec.ranks).map(move |rank| {
        let rest = terms.iter().copied().filter(|t| t.rank != rank).collect();
        (format!("rank {rank} had contributed nothing"), rest)
    });
    let several = spec.nodes.len() > 1;
    let nodes = move || spec.node_ranks().enumerate().filter(move |_| several);
    let dropped = nodes().map(move |(node, ranks)| {
        let rest = terms.iter().copied().filter(|t| !ranks.contains(&t.rank)).collect();
        (format!("node {node} had contributed nothing"), rest)
    });
    let repeated = nodes().map(move |(node, ranks)| {
        let again = terms.iter().copied().filter(|t| ranks.contains(&t.rank));
        (format!("the sum of node {node} were counted twice"), terms.iter().copied().chain(again).collect())
    });
    let pairs = (0..n).flat_map(move |i| (i + 1..n).map(move |j| (i, j)));
    let swapped = pairs.map(move |(i, j)| {
        let mut changed = terms.to_vec();
        (changed[i].weight, changed[j].weight) = (terms[j].weight, terms[i].weight);
        (format!("the weights of {} and {} were swapped", name(i), name(j)), changed)
    });
    let unweighted = [1.0f32].into_iter().map(move |weight| {
        let changed = terms.iter().map(|t| Term { weight, ..*t }).collect();
        ("all weights were 1".to_string(), changed)
    });
    let exchanges = (0..n).flat_map(move |i| (0..spec.experts).map(move |e| (i, e)));
    let exchanged = exchanges.filter(move |&(i, e)| terms[i].expert != e).map(move |(i, e)| {
        let mut changed = terms.to_vec();
        changed[i].expert = e;
        (format!("expert {e} had answered in place of {}", name(i)), changed)
    });
    missing
        .chain(doubled)
        .chain(absent)
        .chain(dropped)
        .chain(repeated)
        .chain(swapped)
        .chain(unweighted)
        .chain(exchanged)
}
