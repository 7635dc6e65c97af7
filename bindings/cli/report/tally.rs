//! Which pairs of values a verification has covered.
//!
//! On the main thread. A pair is two values that interact in the kernels: some configuration covers each pair, and so
//! meets a defect that needs it.

use std::collections::BTreeMap;

use tokenyard::internals::base::Dtype;

use super::table::table;
use crate::cli::cases::case::Case;
use crate::cli::cases::inputs::ScaleKind;
use crate::cli::cases::words::{
    IndexWord, LayoutWord, MissingWord, Mode, OrderWord, PartialWord, SUMMED, WeightsWord, Word,
};

/// The dimensions that are paired.
const DIMENSIONS: [&str; 20] = [
    "dtype",
    "scales",
    "combine",
    "layout",
    "mode",
    "weights",
    "quantize",
    "partial",
    "nodes",
    "duplicates",
    "replicas",
    "index",
    "index order",
    "compact handles",
    "again",
    "mixed",
    "payload",
    "dispatch payload",
    "missing",
    "drop overflow",
];
/// Whether rows are quantised, tokens may name experts several times, experts have replicas, handles are compact, rows
/// go by earlier handles, rows have words beside them, and rows without room are left out.
const SUMS: &str = "sums";
const GATHERED: &str = "gathered";
const NO_YES: [&str; 2] = ["no", "yes"];
/// How a world's ranks are on nodes.
const ONE: &str = "one";
const EVEN: &str = "even";
const UNEVEN: &str = "uneven";

/// A value of one dimension with a value of another, by name.
type Pair = (usize, &'static str, usize, &'static str);

/// How often a pair ran, and how often it was refused as it must be.
#[derive(Debug, Clone, Copy, Default)]
struct Seen {
    ran: usize,
    refused: usize,
}

/// The pairs met so far.
#[derive(Debug, Default)]
pub struct Tally {
    seen: BTreeMap<Pair, Seen>,
    /// Worlds that ran, by number of nodes: all, and those whose nodes are uneven.
    nodes: BTreeMap<usize, (usize, usize)>,
}

fn names<T: Word>(words: &[T]) -> Vec<&'static str> {
    words.iter().map(|w| w.name()).collect()
}

/// The values of a dimension.
fn values(dimension: usize) -> Vec<&'static str> {
    match dimension {
        0 => names(Dtype::ALL),
        1 => names(ScaleKind::ALL),
        2 => names(SUMMED),
        3 => names(LayoutWord::ALL),
        4 => names(Mode::ALL),
        5 => names(WeightsWord::ALL),
        6 | 9 | 10 | 13 | 14 | 15 | 17 | 19 => NO_YES.to_vec(),
        7 => names(PartialWord::ALL),
        11 => names(IndexWord::ALL),
        12 => names(OrderWord::ALL),
        18 => names(MissingWord::ALL),
        16 => vec![NO_YES[0], SUMS, GATHERED],
        _ => vec![ONE, EVEN, UNEVEN],
    }
}

fn payload_of(case: &Case) -> &'static str {
    match (case.payload > 0, case.gathered) {
        (false, _) => NO_YES[0],
        (true, false) => SUMS,
        (true, true) => GATHERED,
    }
}

fn nodes_of(case: &Case) -> &'static str {
    match (case.several_nodes(), case.uneven_nodes()) {
        (false, _) => ONE,
        (true, false) => EVEN,
        (true, true) => UNEVEN,
    }
}

fn values_of(case: &Case) -> [&'static str; DIMENSIONS.len()] {
    [
        case.dtype.name(),
        case.scales.name(),
        case.combine_dtype.name(),
        case.layout.name(),
        case.mode.name(),
        case.weights.name(),
        NO_YES[usize::from(case.quantize)],
        case.partial.name(),
        nodes_of(case),
        NO_YES[usize::from(case.duplicate_percent.is_some())],
        NO_YES[usize::from(case.replicas > 1)],
        case.index.name(),
        case.index_order.name(),
        NO_YES[usize::from(case.compact_handles)],
        NO_YES[usize::from(case.again)],
        NO_YES[usize::from(case.mixed)],
        payload_of(case),
        NO_YES[usize::from(case.dispatch_payload > 0)],
        case.missing.name(),
        NO_YES[usize::from(case.drop_overflow)],
    ]
}

fn pairs_of(case: &Case) -> Vec<Pair> {
    let values = values_of(case);
    dimension_pairs().map(|(a, b)| (a, values[a], b, values[b])).collect()
}

fn dimension_pairs() -> impl Iterator<Item = (usize, usize)> {
    (0..DIMENSIONS.len()).flat_map(|a| (a + 1..DIMENSIONS.len()).map(move |b| (a, b)))
}

fn all_pairs() -> Vec<Pair> {
    let of = |(a, b): (usize, usize)| {
        let pair = move |va: &'static str| values(b).into_iter().map(move |vb| (a, va, b, vb));
        values(a).into_iter().flat_map(pair).collect::<Vec<Pair>>()
    };
    dimension_pairs().flat_map(of).collect()
}

/// Pairs that cannot run with any other values: the library refuses them with an error.
fn must_be_refused(pair: &Pair) -> bool {
    let has = |value| pair.1 == value || pair.3 == value;
    match (DIMENSIONS[pair.0], DIMENSIONS[pair.2]) {
        ("dtype", "scales") => pair.1 != "fp8" && pair.3 != "none",
        ("layout", "weights") => has("token") && has("combine"),
        ("dtype", "quantize") => pair.1 != "fp8" && pair.3 == "yes",
        ("scales", "quantize") => pair.1 == "none" && pair.3 == "yes",
        ("layout", "payload") => has("token") && has(GATHERED),
        ("layout", "drop overflow") => has("token") && has("yes"),
        ("partial", "payload") => pair.1 != "same" && pair.3 != "no",
        ("partial", "missing") => pair.1 != "same" && pair.3 != "no",
        ("nodes", "missing") => pair.1 != ONE && pair.3 != "no",
        ("again" | "payload" | "dispatch payload", "missing") => pair.1 != "no" && pair.3 != "no",
        _ => false,
    }
}

impl Tally {
    /// Counts a configuration that ran, or was refused.
    pub fn count(&mut self, case: &Case, refused: bool) {
        for pair in pairs_of(case) {
            let seen = self.seen.entry(pair).or_default();
            if refused { seen.refused += 1 } else { seen.ran += 1 }
        }
        if !refused {
            let (all, uneven) = self.nodes.entry(case.node_sizes().len()).or_default();
            *all += 1;
            *uneven += usize::from(case.uneven_nodes());
        }
    }

    /// Number of worlds per number of nodes: "nodes: 1 in 20, 2 in 15 (7 uneven)".
    pub fn nodes_line(&self) -> String {
        let of = |(nodes, (all, uneven)): (&usize, &(usize, usize))| match uneven {
            0 => format!("{nodes} in {all}"),
            _ => format!("{nodes} in {all} ({uneven} uneven)"),
        };
        format!("nodes: {}", self.nodes.iter().map(of).collect::<Vec<_>>().join(", "))
    }

    fn is_covered(&self, pair: &Pair) -> bool {
        let seen = self.seen.get(pair).copied().unwrap_or_default();
        if must_be_refused(pair) { seen.refused > 0 } else { seen.ran > 0 }
    }

    /// Whether the configuration would cover a pair that is missing.
    pub fn is_news(&self, case: &Case) -> bool {
        let refused = case.refused_by_design().is_some();
        pairs_of(case).iter().any(|pair| must_be_refused(pair) == refused && !self.is_covered(pair))
    }

    /// The pairs that have not occurred.
    pub fn missing(&self) -> Vec<String> {
        let missing = all_pairs().into_iter().filter(|pair| !self.is_covered(pair));
        missing.map(|(a, va, b, vb)| format!("{} {va} with {} {vb}", DIMENSIONS[a], DIMENSIONS[b])).collect()
    }

    /// For each two dimensions: how many pairs of values ran, how often the rarest did, and which are refused.
    pub fn table(&self) -> String {
        let all = all_pairs();
        let row = |(a, b): (usize, usize)| {
            let pairs: Vec<&Pair> = all.iter().filter(|p| (p.0, p.2) == (a, b)).collect();
            let (refused, run): (Vec<&Pair>, Vec<&Pair>) = pairs.into_iter().partition(|p| must_be_refused(p));
            let times = |pair: &Pair| self.seen.get(pair).map_or(0, |seen| seen.ran);
            let rarest = run.iter().map(|pair| times(pair)).min().unwrap_or(0);
            let ran = run.iter().filter(|pair| times(pair) > 0).count();
            let checked = refused.iter().filter(|pair| self.is_covered(pair)).count();
            vec![
                format!("{} x {}", DIMENSIONS[a], DIMENSIONS[b]),
                format!("{ran} of {}", run.len()),
                rarest.to_string(),
                if refused.is_empty() { "-".to_string() } else { format!("{checked} of {}", refused.len()) },
            ]
        };
        let rows: Vec<Vec<String>> = dimension_pairs().map(row).collect();
        table(&["pairs of values", "ran", "rarest", "refused by design"], &rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_are_of_all_dimensions() {
        // 4 dtypes with 4 modes, these with the dimensions of 3 values, those with each other, and all of them with
        // those of 2, which are paired, too.
        let (twos, threes) = (9, DIMENSIONS.len() - 11);
        let of_two = twos * 2 * (2 * 4 + 3 * threes) + twos * (twos - 1) / 2 * 4;
        assert_eq!(all_pairs().len(), 4 * 4 + 2 * 4 * 3 * threes + threes * (threes - 1) / 2 * 9 + of_two);
        assert_eq!(
            all_pairs().iter().filter(|p| must_be_refused(p)).count(),
            6 + 1 + 3 + 1 + 1 + 1 + 4 + 4 + 4 + 2 + 4 + 2
        );
    }

    #[test]
    fn worlds_are_counted_by_their_nodes() {
        let mut tally = Tally::default();
        let of = |nodes: &[usize]| Case { world: 4, nodes: nodes.to_vec(), ..Case::default() };
        for case in [of(&[]), of(&[2, 2]), of(&[1, 3]), of(&[3, 1]), of(&[1, 1, 1, 1])] {
            tally.count(&case, false);
        }
        tally.count(&of(&[]), true);
        assert_eq!(tally.nodes_line(), "nodes: 1 in 1, 2 in 3 (2 uneven), 4 in 1");
    }

    #[test]
    fn a_refused_run_covers_only_what_must_be_refused() {
        let mut tally = Tally::default();
        let case = Case { layout: LayoutWord::Token, weights: WeightsWord::Combine, ..Case::default() };
        assert!(tally.is_news(&case));
        tally.count(&case, true);
        assert!(!tally.is_news(&case));
        assert_eq!(tally.missing().len(), all_pairs().len() - 1);
    }

    #[test]
    fn the_table_counts_the_pairs_that_ran_the_rarest_and_those_refused() {
        let mut tally = Tally::default();
        let fp8 = |scales| Case { dtype: Dtype::Fp8E4m3, scales, ..Case::default() };
        // Every type without scales, the rarest twice; fp8 with one kind of scales.
        for (dtype, times) in Dtype::ALL.iter().zip([2, 3, 4, 5]) {
            (0..times).for_each(|_| tally.count(&Case { dtype: *dtype, ..Case::default() }, false));
        }
        tally.count(&fp8(ScaleKind::F32), false);
        // Of the six refusals by design one is seen; a refusal that need not be counts for nothing.
        tally.count(&Case { scales: ScaleKind::Ue8m0, ..Case::default() }, true);
        tally.count(&fp8(ScaleKind::Ue8m0), true);
        let table = tally.table();
        let row = |name: &str| {
            let line = table.lines().find(|line| line.starts_with(&format!("{name}  "))).unwrap();
            line.split("  ").map(str::trim).filter(|cell| !cell.is_empty()).map(str::to_string).collect::<Vec<_>>()
        };
        assert_eq!(row("pairs of values"), ["pairs of values", "ran", "rarest", "refused by design"]);
        assert_eq!(row("dtype x scales"), ["dtype x scales", "5 of 6", "0", "1 of 6"]);
        assert_eq!(row("dtype x combine"), ["dtype x combine", "4 of 12", "0", "-"]);
        assert_eq!(row("dtype x quantize"), ["dtype x quantize", "4 of 5", "0", "0 of 3"]);
        assert_eq!(row("layout x weights"), ["layout x weights", "1 of 8", "0", "0 of 1"]);
        assert_eq!(table.lines().count(), 2 + DIMENSIONS.len() * (DIMENSIONS.len() - 1) / 2);
        tally.count(&fp8(ScaleKind::Ue8m0), false);
        let line = tally.table().lines().find(|line| line.starts_with("dtype x scales")).unwrap().to_string();
        assert_eq!(line.split_whitespace().collect::<Vec<_>>().join(" "), "dtype x scales 6 of 6 1 1 of 6");
    }

    #[test]
    fn a_missing_pair_is_named_by_both_values() {
        let all = all_pairs().len();
        let mut tally = Tally::default();
        assert_eq!(tally.missing().len(), all);
        let named = "quantize yes with nodes uneven".to_string();
        assert!(tally.missing().contains(&named));
        let case = Case { quantize: true, world: 3, nodes: vec![1, 2], ..Case::default() };
        let case = Case { dtype: Dtype::Fp8E4m3, scales: ScaleKind::F32, ..case };
        tally.count(&case, false);
        // One value of each dimension: a pair for every two of them.
        assert_eq!(tally.missing().len(), all - DIMENSIONS.len() * (DIMENSIONS.len() - 1) / 2);
        assert!(!tally.missing().contains(&named));
    }
}
