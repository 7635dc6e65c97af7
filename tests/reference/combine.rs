//! Compares combined rows with sums formed at f64, within a bound that follows from the order of roundings, and with
//! the bits that this order gives.
//!
//! # The order
//! For one element of a token with choices k, experts on R ranks of N nodes, weights w_k and expert rows y_k (known
//! exactly here: `expert` documents their rounding), the library computes:
//!
//! 1. on each rank r, p_r = Σ w_k·y_k in top-k order, in f32, one fmaf each, from 0;
//! 2. p_r is rounded to the combine dtype, or, with fp8 partials, becomes what `carried_by_fp8` makes of its row,
//!    unless partials travel as f32;
//! 3. for each node m, s_m = Σ p_r in rank order, in f32, from 0: at the source for its own node, on a rank of m for
//!    another node;
//! 4. s_m of another node is rounded as p_r was; s_m of the source's own node is not;
//! 5. at the source, Σ s_m in node order, in f32, from 0; then old + that, when accumulating;
//! 6. the result is rounded to the out dtype.
//!
//! In the token layout the caller's row is p_r, rounded to the combine dtype already: of step 2 only fp8 is left.
//!
//! Everything is rounded to nearest even in a fixed order, so the bits are known, and the check demands them. A row
//! with other bits within the bound below is reported as summed in another order.
//!
//! # The bound
//! With S = Σ|w_k·y_k| (+ |old|), u the unit roundoffs (bf16 2^−8, fp16 2^−11, f32 2^−24; derived in `elem`), h half
//! the smallest subnormals, which bound the rounding error below the normal range, and ρ(v) the most that steps 2 and 4
//! change v by: max(u_c · |v|, h_c) of the combine dtype, 0 with f32 partials, and with fp8 max(2^−4 · |v|, amax /
//! 458000), where amax is of the block of the row that travels (`fp8_error` derives it) and u_c is 2^−4:
//!
//! ```text
//! f       = (K + R + 2) · (2^−24 · S + 2^−150)            steps 1, 3 and 5; see below
//! c       = Σ_r ρ(p_r) + u_c · f                          step 2; 0 in the token layout, unless with fp8
//! n       = Σ_m ρ(s_m) + u_c · (f + c)                    step 4, of nodes other than the source's
//! e       = f + (c + n)(1 + (K + R + 2) · 2^−24)
//! |error| ≤ e + u_out · (|exact| + e) + h_out             step 6
//! ```
//!
//! ρ is of exact sums: of a value that is off by d it is at most ρ(v) + u_c · |d|.
//!
//! f: a term passes K roundings at most in step 1, and in steps 3 and 5, on a node of G ranks, G + N additions at most
//! and one of old. The first addition to 0 of each sum is exact, so that is G + N − 1 roundings; every other node has a
//! rank, so G + N − 1 ≤ R. The 2 absorbs terms of second order.
//!
//! c and n: the input of step 2 differs from p_r by f at most, over all ranks. The input of step 4 differs from s_m by
//! the errors of the steps before in m's terms, over all nodes f + c.
//!
//! e: the f32 sums after a rounding act on values that the rounding made larger, by c + n in all.
//!
//! In the token layout K = 0 and S = Σ|p_r|. Sums that exceed the out dtype's range are outside the bound: they must
//! be the infinity that the order gives.

use super::dispatch::Poison;
use super::elem::{Elem, decode_ue8m0, pow2};
use super::expert;
use super::quantize::{BLOCK, amax_of, carried_by_fp8, fp8_error};
use super::report::Report;
use super::spec::{Faults, Layout, Partial, RowSource, Scales, SourceRank, Spec};

/// What combine left at one source rank.
#[derive(Debug, Clone, Copy, Default)]
pub struct ObservedCombine<'a> {
    pub out: &'a [u8],
    /// Bytes from one row to the next.
    pub pitch: usize,
    /// The contents of `out` before combine, with the same pitch; needed when accumulating. Rows after the last token
    /// and the gaps between rows must still hold it, or the fill byte where it is not given.
    pub old: Option<&'a [u8]>,
}

/// One term of a token's sum.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Term {
    pub expert: usize,
    pub rank: usize,
    pub weight: f32,
    /// Which of the token's choices.
    pub choice: usize,
}

/// The change to a row of sums on its way.
#[derive(Clone, Copy)]
enum Way {
    /// Rounded to a type; f32 changes nothing.
    Rounded(Elem),
    Fp8,
}

impl Way {
    /// Of a node's sum.
    fn of_node(spec: &Spec) -> Way {
        match spec.partial {
            Partial::Same => Way::Rounded(spec.combine_dtype),
            Partial::Fp32 => Way::Rounded(Elem::Fp32),
            Partial::Fp8 => Way::Fp8,
        }
    }

    /// Of a rank's; the rows of the token layout are of the combine dtype already.
    fn of_rank(spec: &Spec) -> Way {
        match (spec.layout, Way::of_node(spec)) {
            (Layout::Token { .. }, Way::Rounded(_)) => Way::Rounded(Elem::Fp32),
            (_, way) => way,
        }
    }

    fn carry(self, row: &mut [f32]) {
        match self {
            Way::Rounded(Elem::Fp32) => {}
            Way::Rounded(elem) => row.iter_mut().for_each(|x| *x = elem.round(*x)),
            Way::Fp8 => carried_by_fp8(row),
        }
    }

    /// u_c of the module's bound.
    fn unit(self) -> f64 {
        match self {
            Way::Rounded(Elem::Fp32) => 0.0,
            Way::Rounded(elem) => elem.unit_roundoff(),
            Way::Fp8 => Elem::E4m3.unit_roundoff(),
        }
    }

    /// ρ of the module's bound, in a block of that amax.
    #[inline]
    fn error(self, x: f64, amax: f32) -> f64 {
        match self {
            Way::Rounded(Elem::Fp32) => 0.0,
            Way::Rounded(elem) => (elem.unit_roundoff() * x.abs()).max(elem.half_subnormal()),
            Way::Fp8 => fp8_error(x, amax),
        }
    }

    /// Adds to `errors` the possible changes of a row with the sums `exact`, computed as `row`.
    fn add_errors(self, errors: &mut [f64], exact: &[f64], row: &[f32]) {
        let blocks = errors.chunks_mut(BLOCK).zip(exact.chunks(BLOCK)).zip(row.chunks(BLOCK));
        for ((errors, exact), row) in blocks {
            let amax = if matches!(self, Way::Fp8) { amax_of(row.iter().copied()) } else { 0.0 };
            errors.iter_mut().zip(exact).for_each(|(error, &x)| *error += self.error(x, amax));
        }
    }
}

/// Exact sum; sum of the magnitudes of terms; possible changes on the way: of ranks' partials, and of the sums of nodes
/// other than the source's.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Sum {
    pub exact: f64,
    pub terms: f64,
    pub partials: f64,
    pub others: f64,
}

/// The sums of one token, for every column; its vectors are reused from token to token.
#[derive(Debug, Default)]
pub struct TokenSums {
    x: Vec<f32>,
    exact: Vec<f64>,
    terms: Vec<f64>,
    partials: Vec<f64>,
    others: Vec<f64>,
    /// Of one rank, and of one node.
    partial: Vec<f64>,
    node: Vec<f64>,
    /// As the library computes them: of one rank, of one node, and all.
    fused: Vec<f32>,
    fused_node: Vec<f32>,
    fused_source: Vec<f32>,
    bytes: Vec<u8>,
    words: Vec<u32>,
}

impl TokenSums {
    /// Exact sums of the token's columns after [`TokenSums::evaluate`], without what stood there before.
    pub fn exact(&self) -> &[f64] {
        &self.exact
    }

    pub(super) fn x(&self) -> &[f32] {
        &self.x
    }

    /// Loads a token's row and forms its sums.
    pub fn evaluate(
        &mut self,
        spec: &Spec,
        source: &SourceRank,
        rows: &dyn RowSource,
        faults: &Faults,
        source_rank: usize,
        token: usize,
    ) {
        self.load(spec, rows, source_rank, token);
        let terms = terms_of(spec, source, faults, source_rank, token);
        for sums in [&mut self.exact, &mut self.terms, &mut self.partials, &mut self.others] {
            sums.clear();
            sums.resize(spec.hidden, 0.0);
        }
        self.fused_source.clear();
        self.fused_source.resize(spec.hidden, 0.0);
        for ranks in spec.node_ranks() {
            if terms.iter().all(|t| !ranks.contains(&t.rank)) {
                continue;
            }
            self.node.clear();
            self.node.resize(spec.hidden, 0.0);
            self.fused_node.clear();
            self.fused_node.resize(spec.hidden, 0.0);
            for rank in ranks.clone().filter(|rank| terms.iter().any(|t| t.rank == *rank)) {
                self.add_rank(spec, terms.iter().filter(|t| t.rank == rank));
            }
            self.close_node(spec, ranks.contains(&source_rank));
        }
    }

    /// Adds the partial of one rank to its node's sum.
    fn add_rank<'a>(&mut self, spec: &Spec, terms: impl Iterator<Item = &'a Term>) {
        self.partial.clear();
        self.partial.resize(spec.hidden, 0.0);
        self.fused.clear();
        self.fused.resize(spec.hidden, 0.0);
        if matches!(spec.layout, Layout::Token { .. }) {
            terms.for_each(|t| self.add_fused(t, |y| y));
            self.round_fused(spec.combine_dtype);
        } else {
            terms.for_each(|t| self.add_term(spec.combine_dtype, t));
        }
        self.close_partial(Way::of_rank(spec));
    }

    /// Dequantises the row of a token into `x`: one f32 multiplication where there are scales.
    pub(super) fn load(&mut self, spec: &Spec, rows: &dyn RowSource, rank: usize, token: usize) {
        self.bytes.resize(spec.row_bytes(), 0);
        self.words.resize(spec.scale_words(), 0);
        self.x.resize(spec.hidden, 0.0);
        rows.row(rank, token, &mut self.bytes);
        match spec.dtype {
            Elem::E4m3 => {
                let table: [f32; 256] = std::array::from_fn(|code| Elem::E4m3.decode(code as u32));
                self.x.iter_mut().zip(&self.bytes).for_each(|(x, &code)| *x = table[usize::from(code)]);
            }
            elem => (0..spec.hidden).for_each(|i| self.x[i] = elem.decode(elem.bits_at(&self.bytes, i))),
        }
        if spec.scales == Scales::None {
            return;
        }
        rows.scales(rank, token, &mut self.words);
        for (block, chunk) in self.x.chunks_mut(128).enumerate() {
            let scale = match spec.scales {
                Scales::F32 => f32::from_bits(self.words[block]),
                _ => decode_ue8m0((self.words[block / 4] >> (block % 4 * 8)) as u8),
            };
            chunk.iter_mut().for_each(|x| *x *= scale);
        }
    }

    /// Adds w·y of one expert to the rank's partial; y is rounded to the combine dtype.
    fn add_term(&mut self, dtype: Elem, term: &Term) {
        match dtype {
            Elem::Bf16 => self.add_rounded(term, |y| Elem::Bf16.round(y)),
            Elem::Fp32 => self.add_rounded(term, |y| y),
            other => self.add_rounded(term, |y| other.round(y)),
        }
    }

    fn add_rounded(&mut self, term: &Term, round: impl Fn(f32) -> f32 + Copy) {
        self.add_fused(term, round);
        let (factor, weight) = (expert::factor(term.expert), f64::from(term.weight));
        let shift = expert::shift(term.expert, self.x.len());
        // Column i reads x[(i + shift) mod H]: the row from `shift` on, then its beginning.
        let rest = self.x.len() - shift;
        let (first, second) = self.partial.split_at_mut(rest);
        let (first_terms, second_terms) = self.terms.split_at_mut(rest);
        let halves = [(first, first_terms, &self.x[shift..]), (second, second_terms, &self.x[..shift])];
        for (partial, terms, x) in halves {
            for ((p, s), &x) in partial.iter_mut().zip(terms).zip(x) {
                let value = weight * f64::from(round(factor * x));
                *p += value;
                *s += value.abs();
            }
        }
    }

    /// Sends the rank's partial and adds it to its node's sum.
    fn close_partial(&mut self, way: Way) {
        way.add_errors(&mut self.partials, &self.partial, &self.fused);
        self.node.iter_mut().zip(&self.partial).for_each(|(node, p)| *node += p);
        way.carry(&mut self.fused);
        self.fused_node.iter_mut().zip(&self.fused).for_each(|(node, &p)| *node += p);
    }

    /// One fmaf, in f32, onto the rank's partial; in the token layout that is the row that the caller hands to combine.
    fn add_fused(&mut self, term: &Term, round: impl Fn(f32) -> f32) {
        let (factor, shift) = (expert::factor(term.expert), expert::shift(term.expert, self.x.len()));
        let x = self.x[shift..].iter().chain(&self.x[..shift]);
        self.fused.iter_mut().zip(x).for_each(|(acc, &x)| *acc = term.weight.mul_add(round(factor * x), *acc));
    }

    /// The row that the caller hands to combine in the token layout is the rank's partial, and its only term.
    fn round_fused(&mut self, dtype: Elem) {
        self.fused.iter_mut().for_each(|row| *row = dtype.round(*row));
        for ((partial, sum), &row) in self.partial.iter_mut().zip(&mut self.terms).zip(&self.fused) {
            *partial = f64::from(row);
            *sum += partial.abs();
        }
    }

    /// Adds a node's sum; the sum of another node than the source's changes on its way.
    fn close_node(&mut self, spec: &Spec, own: bool) {
        self.exact.iter_mut().zip(&self.node).for_each(|(exact, s)| *exact += s);
        if !own {
            let way = Way::of_node(spec);
            way.add_errors(&mut self.others, &self.node, &self.fused_node);
            way.carry(&mut self.fused_node);
        }
        self.fused_source.iter_mut().zip(&self.fused_node).for_each(|(sum, &s)| *sum += s);
    }

    /// The bits that must stand in a column.
    fn bits(&self, spec: &Spec, column: usize, old: f64) -> u32 {
        let sum = self.fused_source[column];
        spec.out_dtype.encode(if spec.accumulate { old as f32 + sum } else { sum })
    }

    fn sum(&self, column: usize) -> Sum {
        Sum {
            exact: self.exact[column],
            terms: self.terms[column],
            partials: self.partials[column],
            others: self.others[column],
        }
    }
}

/// The terms of a token's sum in top-k order.
pub(super) fn terms_of(
    spec: &Spec,
    source: &SourceRank,
    faults: &Faults,
    source_rank: usize,
    token: usize,
) -> Vec<Term> {
    let mut terms: Vec<Term> = Vec::new();
    for k in (0..spec.top_k).filter(|_| !faults.is_silent(source_rank)) {
        let Some(expert) = source.expert(spec, token, k) else { continue };
        let Some(rank) = spec.rank_of(expert).filter(|&r| !faults.is_overflowed(r)) else { continue };
        if let Some(&left_out) = faults.dropped.get(&(expert, source_rank, token)) {
            let rows = (0..spec.top_k).filter(|&k| source.expert(spec, token, k) == Some(expert)).count();
            if terms.iter().filter(|term| term.expert == expert).count() + left_out >= rows {
                continue;
            }
        }
        terms.push(Term { expert, rank, weight: source.weight(spec, token, k), choice: k });
    }
    terms
}

/// The sum of one column straight from the definition; what the vectors above compute faster. Largest magnitudes are
/// taken of exact sums here, and those of nodes enlarged by what their terms may have changed.
pub(super) fn sum_at(spec: &Spec, x: &[f32], terms: &[Term], source_rank: usize, column: usize) -> Sum {
    let (rank_way, node_way) = (Way::of_rank(spec), Way::of_node(spec));
    let start = column / BLOCK * BLOCK;
    let block = start..(start + BLOCK).min(x.len());
    let amax = |way: Way, of: &dyn Fn(usize) -> f64| match way {
        Way::Fp8 => amax_of(block.clone().map(|column| of(column) as f32)),
        Way::Rounded(_) => 0.0,
    };
    let mut sum = Sum::default();
    for ranks in spec.node_ranks() {
        let partial_at = |rank, column| partial_at(spec, x, terms, rank, column);
        let node_at = |column| ranks.clone().map(|rank| partial_at(rank, column).0).sum::<f64>();
        for rank in ranks.clone().filter(|rank| terms.iter().any(|t| t.rank == *rank)) {
            let (partial, magnitudes) = partial_at(rank, column);
            sum.terms += magnitudes;
            sum.partials += rank_way.error(partial, amax(rank_way, &|column| partial_at(rank, column).0));
        }
        let node = node_at(column);
        sum.exact += node;
        if !ranks.contains(&source_rank) {
            sum.others += node_way.error(node, amax(node_way, &node_at) * 1.125);
        }
    }
    sum
}

/// The partial of one rank, and the magnitudes of its terms.
fn partial_at(spec: &Spec, x: &[f32], terms: &[Term], rank: usize, column: usize) -> (f64, f64) {
    let of_rank = || terms.iter().filter(|t| t.rank == rank);
    if matches!(spec.layout, Layout::Token { .. }) {
        let row = of_rank().fold(0.0f32, |acc, t| t.weight.mul_add(expert::product(t.expert, x, column), acc));
        let row = f64::from(spec.combine_dtype.round(row));
        return (row, row.abs());
    }
    let value =
        |t: &Term| f64::from(t.weight) * f64::from(spec.combine_dtype.round(expert::product(t.expert, x, column)));
    (of_rank().map(value).sum(), of_rank().map(|t| value(t).abs()).sum())
}

/// Rounding constants of one spec: the module's bound with everything that does not depend on the element.
pub(super) struct Bound {
    steps: f64,
    /// Of ranks' partials, and of other nodes' sums.
    u_c: f64,
    u_n: f64,
    u_out: f64,
    h_out: f64,
}

impl Bound {
    pub fn new(spec: &Spec) -> Bound {
        let k = if matches!(spec.layout, Layout::Token { .. }) { 0 } else { spec.top_k };
        Bound {
            steps: (k + spec.ranks + 2) as f64,
            u_c: Way::of_rank(spec).unit(),
            u_n: if spec.nodes.len() > 1 { Way::of_node(spec).unit() } else { 0.0 },
            u_out: spec.out_dtype.unit_roundoff(),
            h_out: spec.out_dtype.half_subnormal(),
        }
    }

    /// Largest error that the documented roundings explain.
    #[inline]
    pub fn of(&self, sum: Sum, old: f64) -> f64 {
        let f = self.steps * (pow2(-24) * (sum.terms + old.abs()) + pow2(-150));
        let c = sum.partials + self.u_c * f;
        let n = sum.others + self.u_n * (f + c);
        let sums = f + (c + n) * (1.0 + self.steps * pow2(-24));
        sums + self.u_out * ((sum.exact + old).abs() + sums) + self.h_out
    }
}

/// Checks what combine left at rank `source_rank`.
pub fn check_combine(
    spec: &Spec,
    sources: &[SourceRank],
    rows: &dyn RowSource,
    faults: &Faults,
    source_rank: usize,
    seen: &ObservedCombine,
) -> Report {
    let mut report = Report::default();
    let row_bytes = spec.hidden * spec.out_dtype.bytes();
    let empty = SourceRank::default();
    let source = sources.get(source_rank).unwrap_or(&empty);
    let needed = source.tokens.saturating_sub(1) * seen.pitch + if source.tokens > 0 { row_bytes } else { 0 };
    let old_fits = !spec.accumulate || seen.old.is_some_and(|old| old.len() >= needed);
    if seen.pitch < row_bytes || seen.out.len() < needed || !old_fits {
        let (len, pitch, tokens) = (seen.out.len(), seen.pitch, source.tokens);
        report.miss(1, || {
            format!(
                "rank {source_rank}: {len} bytes (and what stood there) with pitch {pitch} cannot hold {tokens} rows"
            )
        });
        return report;
    }
    let mut sums = TokenSums::default();
    for token in 0..source.tokens {
        let start = token * seen.pitch;
        let got = &seen.out[start..start + row_bytes];
        let old = if spec.accumulate { seen.old.and_then(|old| old.get(start..start + row_bytes)) } else { None };
        sums.evaluate(spec, source, rows, faults, source_rank, token);
        let row = Row { spec, source, rows, faults, source_rank, token, got, old };
        row.check(&sums, &mut report);
        let gap = start + row_bytes..(start + seen.pitch).min(seen.out.len());
        untouched(spec, seen, gap, source_rank, &format!("gap behind token {token}"), &mut report);
    }
    let behind = (source.tokens * seen.pitch).min(seen.out.len())..seen.out.len();
    untouched(spec, seen, behind, source_rank, "rows behind the last token", &mut report);
    report
}

fn untouched(
    spec: &Spec,
    seen: &ObservedCombine,
    range: std::ops::Range<usize>,
    source_rank: usize,
    what: &str,
    r: &mut Report,
) {
    let now = &seen.out[range.clone()];
    let touched = match seen.old.and_then(|old| old.get(range)) {
        Some(before) if before == now => None,
        Some(before) => before.iter().zip(now).position(|(a, b)| a != b),
        None => Poison::new(spec.poison).first_touched(now),
    };
    if let Some(at) = touched {
        r.miss(1, || format!("rank {source_rank}: byte {at} of the {what} was written"));
    }
}

/// One combined row and all that is needed to judge it.
pub(super) struct Row<'a> {
    pub spec: &'a Spec,
    pub source: &'a SourceRank,
    pub rows: &'a dyn RowSource,
    pub faults: &'a Faults,
    pub source_rank: usize,
    pub token: usize,
    pub got: &'a [u8],
    pub old: Option<&'a [u8]>,
}

impl Row<'_> {
    pub fn value(&self, column: usize) -> f64 {
        let elem = self.spec.out_dtype;
        f64::from(elem.decode(elem.bits_at(self.got, column)))
    }

    /// What stood in a column before; 0 unless accumulating.
    pub fn old(&self, column: usize) -> f64 {
        let elem = self.spec.out_dtype;
        self.old.map_or(0.0, |old| f64::from(elem.decode(elem.bits_at(old, column))))
    }

    fn check(&self, sums: &TokenSums, report: &mut Report) {
        let (bound, elem) = (Bound::new(self.spec), self.spec.out_dtype);
        let (mut wrong, mut reordered) = (Vec::new(), Vec::new());
        let mut worst = 0.0f64;
        for column in 0..self.spec.hidden {
            let (sum, old) = (sums.sum(column), self.old(column));
            let exact = sum.exact + old;
            let bits = sums.bits(self.spec, column, old);
            let value = self.value(column);
            if value.is_infinite() && exact.abs() > elem.largest() && elem.bits_at(self.got, column) == bits {
                continue;
            }
            let error = (value - exact).abs();
            // Nothing compares as below a bound that is NaN, nor does a NaN below any: neither is right.
            let right = error <= bound.of(sum, old) && exact.is_finite();
            if !right {
                wrong.push(column);
            } else if elem.bits_at(self.got, column) != bits {
                reordered.push(column);
            }
            let scale = exact.abs().max((sum.terms + old.abs()) / 8.0);
            if error > worst * scale {
                worst = error / scale;
            } else if error.is_nan() {
                worst = f64::INFINITY;
            }
        }
        report.compared += self.spec.hidden as u64;
        report.max_rel_err = report.max_rel_err.max(worst);
        if !wrong.is_empty() {
            report.miss(wrong.len() as u64, || self.describe(sums, &bound, &wrong));
        }
        if !reordered.is_empty() {
            report.miss(reordered.len() as u64, || self.describe_order(sums, &reordered));
        }
    }

    fn describe_order(&self, sums: &TokenSums, columns: &[usize]) -> String {
        let (elem, column) = (self.spec.out_dtype, columns[0]);
        let digits = elem.bytes() * 2 + 2;
        format!(
            "rank {} token {}: column {column} is {:#0digits$x}, and {:#0digits$x} in the documented order of sums and \
             roundings; {} of {} columns differ, all within the bound",
            self.source_rank,
            self.token,
            elem.bits_at(self.got, column),
            sums.bits(self.spec, column, self.old(column)),
            columns.len(),
            self.spec.hidden,
        )
    }

    fn describe(&self, sums: &TokenSums, bound: &Bound, wrong: &[usize]) -> String {
        let (elem, column) = (self.spec.out_dtype, wrong[0]);
        let (sum, old, digits) = (sums.sum(column), self.old(column), elem.bytes() * 2 + 2);
        let text = format!(
            "rank {} token {}: column {column} is {:e} ({:#0digits$x}), expected {:e} within {:.3e}; {} of {} columns differ",
            self.source_rank,
            self.token,
            self.value(column),
            elem.bits_at(self.got, column),
            sum.exact + old,
            bound.of(sum, old),
            wrong.len(),
            self.spec.hidden,
        );
        text + &super::explain_sum::explain(self, sums.x(), bound, wrong)
    }
}
