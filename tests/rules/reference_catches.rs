//! Tests of the reference itself: observations are built naively here, one thing in them is damaged, and the reference
//! must report it, with the rank, the token and the column. It must also pass right results, in every layout.

use crate::reference;

use reference::elem::{self, Elem};
use reference::*;

const RANKS: usize = 3;
const HIDDEN: usize = 256;
const EXPERTS: usize = 12;
const TOP_K: usize = 3;
const FILL: u8 = 0xa5;
/// Bytes between rows, and after everything, that nobody may touch.
const GAP: usize = 16;

/// Rows from a formula of the test's own.
struct Made;

fn noise(parts: [usize; 4]) -> u32 {
    let x = parts.iter().fold(2_166_136_261u32, |h, &p| (h ^ p as u32).wrapping_mul(16_777_619).rotate_left(13));
    (x ^ x >> 15).wrapping_mul(0x2c1b_3c6d) ^ x >> 12
}

impl RowSource for Made {
    fn row(&self, rank: usize, token: usize, out: &mut [u8]) {
        // Normal numbers of every e4m3 exponent up to 11 and both signs.
        out.iter_mut().enumerate().for_each(|(i, b)| *b = (noise([rank, token, i, 1]) >> 7) as u8 & 0xdf | 0x08);
    }
    fn scales(&self, rank: usize, token: usize, out: &mut [u32]) {
        out.iter_mut().enumerate().for_each(|(i, w)| *w = 0x3f00_0000 | noise([rank, token, i, 2]) >> 9);
    }
    fn words(&self, rank: usize, token: usize, out: &mut [u32]) {
        out.iter_mut().enumerate().for_each(|(i, w)| *w = noise([rank, token, i, 5]));
    }
}

fn spec(layout: Layout) -> Spec {
    Spec {
        ranks: RANKS,
        nodes: vec![RANKS],
        hidden: HIDDEN,
        experts: EXPERTS,
        top_k: TOP_K,
        // No rank's experts are consecutive, and no two ranks have equally many.
        expert_rank: vec![0, 1, 2, 1, 0, 2, 1, 1, 2, 1, 0, 1],
        dtype: Elem::E4m3,
        scales: Scales::F32,
        combine_dtype: Elem::Bf16,
        partial: Partial::Same,
        out_dtype: Elem::Bf16,
        weights: Weights::Dispatch,
        layout,
        scale_order: ScaleOrder::RowMajor,
        accumulate: false,
        zero_padding: true,
        drop_overflow: false,
        poison: FILL,
        duplicates: false,
        replicas: Vec::new(),
    }
}

const CONTIGUOUS: Layout = Layout::Contiguous { align: 4, capacity: 48 };

/// Rank 0 has 9 tokens, rank 1 has 6, rank 2 none. Token 4 of rank 1 goes nowhere.
fn sources() -> Vec<SourceRank> {
    let source = |rank: usize, tokens: usize| {
        let mut source = SourceRank { tokens, ..Default::default() };
        for token in 0..tokens {
            let first = noise([rank, token, 0, 3]) as usize;
            for k in 0..TOP_K {
                let none = (rank, token) == (1, 4) || noise([rank, token, k, 4]).is_multiple_of(7);
                source.topk_idx.push(if none { -1 } else { ((first + k * 5) % EXPERTS) as i64 });
                source.topk_weight.push(0.2 + 0.25 * k as f32 + (token as f32) / 64.0);
            }
        }
        source
    };
    vec![source(0, 9), source(1, 6), source(2, 0)]
}

/// Everything that a dispatch leaves on one rank.
#[derive(Clone)]
struct Dispatched {
    rows: Vec<u8>,
    scales: Vec<u8>,
    words: Vec<u8>,
    count: Vec<u8>,
    offset: Vec<u8>,
    row_expert: Vec<u8>,
    source: Vec<u8>,
    /// (source rank, token, global expert) of each row that holds a token, with its index.
    placed: Vec<(usize, usize, usize, usize)>,
}

const PITCH: usize = HIDDEN + GAP;
/// Words beside a row.
const WORDS: usize = 3;

fn put(bytes: &mut [u8], index: usize, value: i32) {
    bytes[index * 4..index * 4 + 4].copy_from_slice(&value.to_le_bytes());
}

impl Dispatched {
    /// Naive: for each local expert, for each rank, for each of its tokens that chose the expert, the next row.
    fn build(spec: &Spec, sources: &[SourceRank], dst: usize) -> Dispatched {
        let experts: Vec<usize> = (0..EXPERTS).filter(|&e| spec.expert_rank[e] as usize == dst).collect();
        let capacity = spec.capacity_rows(experts.len());
        let fill = |bytes: usize| vec![FILL; bytes];
        let mut made = Dispatched {
            rows: fill(capacity * PITCH + GAP),
            scales: fill(scale_total_words(spec, experts.len()) * 4 + GAP),
            words: fill((capacity + 1) * WORDS * 4),
            count: fill(experts.len() * 4),
            offset: fill(experts.len() * 4 + 4),
            row_expert: fill(capacity * 4),
            source: fill(capacity * 8),
            placed: Vec::new(),
        };
        let mut row = 0;
        for (local, &expert) in experts.iter().enumerate() {
            if let Layout::Masked { per_expert } = spec.layout {
                row = local * per_expert;
            }
            put(&mut made.offset, local, row as i32);
            let start = row;
            for (rank, source) in sources.iter().enumerate() {
                for token in 0..source.tokens {
                    if source.topk_idx[token * TOP_K..][..TOP_K].contains(&(expert as i64)) {
                        made.place(spec, capacity, row, (rank, token, local));
                        made.placed.push((rank, token, expert, row));
                        row += 1;
                    }
                }
            }
            put(&mut made.count, local, (row - start) as i32);
            if let Layout::Contiguous { align, .. } = spec.layout {
                while row % align != 0 {
                    made.pad(spec, capacity, row);
                    row += 1;
                }
            }
        }
        let end = if let Layout::Masked { per_expert } = spec.layout { experts.len() * per_expert } else { row };
        put(&mut made.offset, experts.len(), end as i32);
        made
    }

    fn place(&mut self, spec: &Spec, capacity: usize, row: usize, (rank, token, local): (usize, usize, usize)) {
        Made.row(rank, token, &mut self.rows[row * PITCH..][..HIDDEN]);
        let mut words = [0u32; HIDDEN / 128];
        Made.scales(rank, token, &mut words);
        for (word, value) in words.iter().enumerate() {
            put(&mut self.scales, scale_index(spec, capacity, row, word), *value as i32);
        }
        let mut beside = [0u32; WORDS];
        Made.words(rank, token, &mut beside);
        (0..WORDS).for_each(|j| put(&mut self.words, row * WORDS + j, beside[j] as i32));
        put(&mut self.row_expert, row, local as i32);
        put(&mut self.source, row * 2, rank as i32);
        put(&mut self.source, row * 2 + 1, token as i32);
    }

    fn pad(&mut self, spec: &Spec, capacity: usize, row: usize) {
        if spec.zero_padding {
            self.rows[row * PITCH..][..HIDDEN].fill(0);
            (0..HIDDEN / 128).for_each(|word| put(&mut self.scales, scale_index(spec, capacity, row, word), 0));
            (0..WORDS).for_each(|j| put(&mut self.words, row * WORDS + j, 0));
        }
        put(&mut self.row_expert, row, -1);
        put(&mut self.source, row * 2, -1);
        put(&mut self.source, row * 2 + 1, -1);
    }

    fn check(&self, spec: &Spec, dst: usize) -> Report {
        let seen = ObservedDispatch {
            rows: &self.rows,
            rows_pitch: PITCH,
            scales: Some(&self.scales),
            expert_count: Some(&self.count),
            expert_offset: Some(&self.offset),
            row_expert: Some(&self.row_expert),
            source: Some(&self.source),
            payload: Some((&self.words, WORDS)),
            ..Default::default()
        };
        check_dispatch(spec, &sources(), &Made, &Faults::default(), dst, &seen)
    }

    fn row(&mut self, row: usize) -> &mut [u8] {
        &mut self.rows[row * PITCH..][..HIDDEN]
    }

    fn swap_rows(&mut self, a: usize, b: usize) {
        let kept = self.row(a).to_vec();
        let other = self.row(b).to_vec();
        self.row(a).copy_from_slice(&other);
        self.row(b).copy_from_slice(&kept);
    }
}

/// The report must be wrong and one of its sentences must hold all parts.
#[track_caller]
fn assert_named(report: &Report, mismatches: u64, parts: &[&str]) {
    assert_eq!(report.mismatches, mismatches, "{:#?}", report.sentences);
    let found = report.sentences.iter().any(|s| parts.iter().all(|p| s.contains(p)));
    assert!(found, "no sentence holds {parts:?}: {:#?}", report.sentences);
}

#[test]
fn right_dispatches_pass_in_every_layout() {
    for layout in [CONTIGUOUS, Layout::Contiguous { align: 1, capacity: 30 }, Layout::Masked { per_expert: 7 }] {
        for scale_order in [ScaleOrder::RowMajor, ScaleOrder::ColumnMajor] {
            for zero_padding in [false, true] {
                let spec = Spec { scale_order, zero_padding, ..spec(layout) };
                for dst in 0..RANKS {
                    let report = Dispatched::build(&spec, &sources(), dst).check(&spec, dst);
                    assert!(report.ok() && report.compared > 1000, "{layout:?} rank {dst}: {:#?}", report.sentences);
                }
            }
        }
    }
}

#[test]
fn flipped_bit_is_reported_with_its_column() {
    let spec = spec(CONTIGUOUS);
    let mut made = Dispatched::build(&spec, &sources(), 1);
    let (rank, token, expert, row) = made.placed[3];
    made.row(row)[255] ^= 0x10;
    let who = format!("rank 1 row {row} (expert {expert}, from rank {rank} token {token}): column 255 is 0x");
    assert_named(&made.check(&spec, 1), 1, &[&who, "1 of 256 columns differ"]);
}

#[test]
fn wrong_words_beside_rows_are_named() {
    let spec = spec(CONTIGUOUS);
    let right = Dispatched::build(&spec, &sources(), 1);
    let (rank, token, expert, row) = right.placed[3];
    let who = format!("rank 1 row {row} (expert {expert}, from rank {rank} token {token}): word 2 beside it is 0x");
    let mut made = right.clone();
    made.words[(row * WORDS + 2) * 4 + 3] ^= 0x80;
    assert_named(&made.check(&spec, 1), 1, &[&who]);
    let mut made = right.clone();
    let behind = made.words.len() - 5;
    made.words[behind] ^= 1;
    assert_named(&made.check(&spec, 1), 1, &["behind the words of 48 rows was written"]);
    let mut made = right;
    made.words.truncate((row * WORDS + 2) * 4);
    assert!(made.check(&spec, 1).sentences.iter().any(|sentence| sentence.contains("beside it is missing")));
}

#[test]
fn swapped_rows_are_recognised() {
    let spec = spec(CONTIGUOUS);
    let mut made = Dispatched::build(&spec, &sources(), 1);
    let (a, b) = (made.placed[0], made.placed[1]);
    assert_eq!(a.2, b.2, "both rows are of one expert");
    made.swap_rows(a.3, b.3);
    let report = made.check(&spec, 1);
    let here = format!("the row of another token (rank {}, token {}) stands here", b.0, b.1);
    let there = format!("stands at row {}: swapped", b.3);
    assert_named(&report, report.mismatches, &["rank 1 row 0", "column ", &here, &there]);
    assert!(report.mismatches > HIDDEN as u64);
}

#[test]
fn swapped_experts_are_reported() {
    let spec = spec(CONTIGUOUS);
    let mut made = Dispatched::build(&spec, &sources(), 0);
    let a = made.placed[0];
    let b = *made.placed.iter().find(|p| p.2 != a.2 && (p.0, p.1) != (a.0, a.1)).unwrap();
    made.swap_rows(a.3, b.3);
    let who = format!("rank 0 row {} (expert {}, from rank {} token {})", a.3, a.2, a.0, a.1);
    let report = made.check(&spec, 0);
    assert_named(&report, report.mismatches, &[&who, &format!("(rank {}, token {})", b.0, b.1), "column "]);

    let mut made = Dispatched::build(&spec, &sources(), 0);
    put(&mut made.row_expert, a.3, 1);
    assert_named(&made.check(&spec, 0), 1, &[&who, "row_expert is 1, expected 0"]);
}

#[test]
fn lost_row_is_called_lost_wherever_the_gap_shows() {
    let spec = spec(CONTIGUOUS);
    let mut made = Dispatched::build(&spec, &sources(), 1);
    let (rank, token, expert, row) = made.placed[2];
    made.row(row).fill(FILL);
    let who = format!("rank 1 row {row} (expert {expert}, from rank {rank} token {token}): column 0 is 0xa5");
    assert_named(&made.check(&spec, 1), 256, &[&who, "never written", "lost"]);

    // The rows of the expert after the lost one moved up.
    let mut made = Dispatched::build(&spec, &sources(), 1);
    let (lost, next) = (made.placed[0], made.placed[1]);
    made.swap_rows(lost.3, next.3);
    made.row(next.3).fill(FILL);
    let report = made.check(&spec, 1);
    assert_named(&report, report.mismatches, &[&format!("rank 1 row {}", lost.3), "another token", "lost", "column"]);
}

#[test]
fn doubled_row_is_called_doubled() {
    let spec = spec(CONTIGUOUS);
    let mut made = Dispatched::build(&spec, &sources(), 1);
    let (a, b) = (made.placed[0], made.placed[1]);
    let copy = made.row(a.3).to_vec();
    made.row(b.3).copy_from_slice(&copy);
    let doubled = format!("also at row {} where it belongs: doubled", a.3);
    let report = made.check(&spec, 1);
    let who = format!("rank 1 row {} (expert {}, from rank {} token {})", b.3, b.2, b.0, b.1);
    assert_named(&report, report.mismatches, &[&who, &doubled, "lost", "column"]);
}

#[test]
fn stale_output_is_never_taken_for_a_result() {
    let spec = spec(CONTIGUOUS);
    let mut made = Dispatched::build(&spec, &sources(), 2);
    let tokens = made.placed.len() as u64;
    for part in [&mut made.rows, &mut made.scales, &mut made.count, &mut made.offset, &mut made.row_expert] {
        part.fill(FILL);
    }
    let report = made.check(&spec, 2);
    assert_named(&report, report.mismatches, &["rank 2 row 0", "token", "column 0 is 0xa5", "never written"]);
    assert!(report.mismatches >= tokens * 256);
}

#[test]
fn wrong_scale_count_offset_and_source_are_reported() {
    for scale_order in [ScaleOrder::RowMajor, ScaleOrder::ColumnMajor] {
        let spec = Spec { scale_order, ..spec(CONTIGUOUS) };
        let good = Dispatched::build(&spec, &sources(), 1);
        let (rank, token, expert, row) = good.placed[4];
        let who = format!("rank 1 row {row} (expert {expert}, from rank {rank} token {token})");
        let mut made = good.clone();
        made.scales[scale_index(&spec, 48, row, 1) * 4] ^= 1;
        assert_named(&made.check(&spec, 1), 1, &[&who, "scale word 1 is 0x"]);
        let mut made = good.clone();
        put(&mut made.count, 2, 77);
        assert_named(&made.check(&spec, 1), 1, &["rank 1: expert_count of expert 6 (local 2) is 77, expected"]);
        let mut made = good.clone();
        put(&mut made.offset, 1, 3);
        assert_named(&made.check(&spec, 1), 1, &["rank 1: expert_offset[1] is 3, expected"]);
        let mut made = good.clone();
        put(&mut made.source, row * 2 + 1, 99);
        assert_named(&made.check(&spec, 1), 1, &[&who, "source token is 99, expected"]);
    }
}

#[test]
fn writes_where_nothing_belongs_are_reported() {
    let spec = spec(CONTIGUOUS);
    let good = Dispatched::build(&spec, &sources(), 1);
    let (last, end) = (good.placed[good.placed.len() - 1].3, 48);
    for (at, what) in [
        (last * PITCH + HIDDEN, format!("rank 1 row {last} (expert 11")),
        ((end - 1) * PITCH + 5, format!("rank 1 row {} (behind the rows used): column 5 must be untouched", end - 1)),
        (end * PITCH + 1, format!("rank 1 row {end} (behind the capacity): written behind the capacity")),
    ] {
        let mut made = good.clone();
        made.rows[at] = 0;
        assert_named(&made.check(&spec, 1), 1, &[&what]);
    }
    let padding = good.row_expert.chunks(4).position(|e| e == [255; 4]).unwrap();
    let mut made = good.clone();
    made.row(padding)[7] = 1;
    assert_named(&made.check(&spec, 1), 1, &[&format!("rank 1 row {padding} (padding): column 7 must be zero")]);
}

#[test]
fn too_small_output_must_stay_untouched() {
    let small = spec(Layout::Contiguous { align: 4, capacity: 8 });
    let expected = expected_dispatch(&small, &sources(), &Faults::default(), 1);
    assert!(expected.overflow() && expected.given == 8, "{expected:?}");
    let rows = vec![FILL; 8 * PITCH];
    let check = |rows: &[u8]| {
        let seen = ObservedDispatch { rows, rows_pitch: PITCH, ..Default::default() };
        check_dispatch(&small, &sources(), &Made, &Faults::default(), 1, &seen)
    };
    assert!(check(&rows).ok());
    let mut wrong = rows.clone();
    wrong[0] ^= 1;
    assert!(!check(&wrong).ok());
    let mut behind = rows;
    behind.extend([0; 4]);
    assert_named(&check(&behind), 1, &["rank 1 row 8 (behind the capacity)"]);
}

#[test]
fn silent_rank_sends_nothing() {
    let (spec, mut routed) = (spec(CONTIGUOUS), sources());
    assert_eq!(bad_routing(&spec, &routed[0]), None);
    routed[0].topk_idx[4] = EXPERTS as i64;
    assert_eq!(bad_routing(&spec, &routed[0]).as_deref(), Some("token 1, choice 1: there is no expert 12"));
    let faults = Faults { silent: vec![true], ..Default::default() };
    let expected = expected_dispatch(&spec, &routed, &faults, 1);
    assert!(expected.slots.iter().all(|s| !matches!(s, Slot::Token(p) if p.source == 0)));
    assert!(expected.counts.iter().sum::<usize>() > 0);
}

#[test]
fn token_layout_keeps_choices_and_weights() {
    let spec = spec(Layout::Token { capacity: 16 });
    let routed = sources();
    let (mut rows, mut experts, mut weights) = (vec![FILL; 16 * PITCH], vec![FILL; 16 * 12], vec![FILL; 16 * 12]);
    let local = [1i64, 3, 6, 7, 9, 11];
    let (mut row, mut first_choice) = (0, None);
    for (rank, source) in routed.iter().enumerate() {
        for token in 0..source.tokens {
            let ids = &source.topk_idx[token * TOP_K..][..TOP_K];
            if !ids.iter().any(|id| local.contains(id)) {
                continue;
            }
            Made.row(rank, token, &mut rows[row * PITCH..][..HIDDEN]);
            for (k, id) in ids.iter().enumerate() {
                let here = local.iter().position(|l| l == id);
                let weight = if here.is_some() { source.topk_weight[token * TOP_K + k] } else { 0.0 };
                put(&mut experts, row * TOP_K + k, here.map_or(-1, |e| e as i32));
                put(&mut weights, row * TOP_K + k, weight.to_bits() as i32);
                first_choice = first_choice.or(here.map(|_| (row, rank, token, k)));
            }
            row += 1;
        }
    }
    let check = |experts: &[u8], weights: &[u8], row_count: i32| {
        let count = row_count.to_le_bytes();
        let seen = ObservedDispatch {
            rows: &rows,
            rows_pitch: PITCH,
            token_experts: Some(experts),
            token_weights: Some(weights),
            row_count: Some(&count),
            ..Default::default()
        };
        check_dispatch(&spec, &routed, &Made, &Faults::default(), 1, &seen)
    };
    let row_count = row as i32;
    let report = check(&experts, &weights, row_count);
    assert!(report.ok(), "{:#?}", report.sentences);
    assert_named(&check(&experts, &weights, 3), 1, &["rank 1: row_count[0] is 3"]);
    let (row, rank, token, k) = first_choice.unwrap();
    let who = format!("rank 1 row {row} (from rank {rank} token {token})");
    let (mut wrong_experts, mut wrong_weights) = (experts.clone(), weights.clone());
    put(&mut wrong_experts, row * TOP_K + k, 5);
    put(&mut wrong_weights, row * TOP_K + k, 2.0f32.to_bits() as i32);
    assert_named(&check(&wrong_experts, &weights, row_count), 1, &[&who, &format!("local expert of choice {k} is 5")]);
    assert_named(
        &check(&experts, &wrong_weights, row_count),
        1,
        &[&who, &format!("weight of choice {k} is 2, expected 0.")],
    );
}

/// One term of a token's sum: expert, rank, weight.
type Term = (usize, usize, f32);

fn terms(spec: &Spec, source: &SourceRank, token: usize) -> Vec<Term> {
    let ids = source.topk_idx[token * TOP_K..][..TOP_K].iter().zip(&source.topk_weight[token * TOP_K..]);
    let real = ids.filter(|(id, _)| **id >= 0);
    real.map(|(&e, &w)| (e as usize, spec.expert_rank[e as usize] as usize, w)).collect()
}

/// A row of sums as it arrives elsewhere; `already`: it is of the combine dtype.
fn carried(spec: &Spec, row: Vec<f32>, already: bool) -> Vec<f32> {
    match spec.partial {
        Partial::Same if !already => row.iter().map(|&v| spec.combine_dtype.round(v)).collect(),
        Partial::Same | Partial::Fp32 => row,
        Partial::Fp8 => row.chunks(128).flat_map(in_fp8).collect(),
    }
}

/// A block of 128 columns, in f32.
fn in_fp8(block: &[f32]) -> Vec<f32> {
    let amax = block.iter().fold(1e-4f32, |most, x| most.max(x.abs()));
    let code = |x: &f32| elem::encode_e4m3(x * (448.0 / amax));
    block.iter().map(|x| elem::decode_e4m3(code(x)) * (amax / 448.0)).collect()
}

/// The sum of one rank's rows of a token, or the row that its caller gives in the token layout.
fn rank_row(spec: &Spec, x: &[f32], terms: &[Term], rank: usize) -> Vec<f32> {
    let token_layout = matches!(spec.layout, Layout::Token { .. });
    let sum_at = |column: usize| {
        let mut partial = 0.0f32;
        for &(expert, _, weight) in terms.iter().filter(|t| t.1 == rank) {
            let y = expert::factor(expert) * x[(column + expert::shift(expert, HIDDEN)) % HIDDEN];
            partial = weight.mul_add(if token_layout { y } else { spec.combine_dtype.round(y) }, partial);
        }
        if token_layout { spec.combine_dtype.round(partial) } else { partial }
    };
    (0..HIDDEN).map(sum_at).collect()
}

/// The sums of nodes that reach rank `source_rank`, in f32, in the documented order, rounded where documented.
fn node_sums(spec: &Spec, source_rank: usize, x: &[f32], terms: &[Term]) -> Vec<Vec<f32>> {
    let token_layout = matches!(spec.layout, Layout::Token { .. });
    let (mut sums, mut rank) = (Vec::new(), 0);
    for &size in &spec.nodes {
        let (mut node, first) = (vec![0.0f32; HIDDEN], rank);
        while rank < first + size {
            let partial = carried(spec, rank_row(spec, x, terms, rank), token_layout);
            node.iter_mut().zip(partial).for_each(|(node, partial)| *node += partial);
            rank += 1;
        }
        let own = (first..rank).contains(&source_rank);
        sums.push(if own { node } else { carried(spec, node, false) });
    }
    sums
}

fn dequantised(rank: usize, token: usize) -> Vec<f32> {
    let (mut row, mut words) = (vec![0u8; HIDDEN], [0u32; HIDDEN / 128]);
    Made.row(rank, token, &mut row);
    Made.scales(rank, token, &mut words);
    (0..HIDDEN).map(|i| elem::decode_e4m3(row[i]) * f32::from_bits(words[i / 128])).collect()
}

/// What combine leaves at rank `source_rank`, with terms changed by `change(token, terms)`.
fn combine(spec: &Spec, source_rank: usize, old: &[u8], change: impl Fn(usize, &mut Vec<Term>)) -> Vec<u8> {
    combine_nodes(spec, source_rank, old, change, |_, _, _| {})
}

/// As [`combine`], with the sums of nodes changed by `twist(token, sums, old contents)` before the source adds them.
fn combine_nodes(
    spec: &Spec,
    source_rank: usize,
    old: &[u8],
    change: impl Fn(usize, &mut Vec<Term>),
    twist: impl Fn(usize, &mut Vec<f32>, f32),
) -> Vec<u8> {
    let (source, size) = (&sources()[source_rank], spec.out_dtype.bytes());
    let mut out = old.to_vec();
    for token in 0..source.tokens {
        let (mut list, x) = (terms(spec, source, token), dequantised(source_rank, token));
        change(token, &mut list);
        let rows = node_sums(spec, source_rank, &x, &list);
        let start = token * (HIDDEN * size + GAP);
        for column in 0..HIDDEN {
            let at = start + column * size;
            let before = spec.out_dtype.decode(spec.out_dtype.bits_at(&old[at..], 0));
            let mut sums = rows.iter().map(|row| row[column]).collect();
            twist(token, &mut sums, before);
            let sum = sums.iter().fold(0.0f32, |source_rank, node| source_rank + node);
            let bits = spec.out_dtype.encode(if spec.accumulate { before + sum } else { sum });
            out[at..at + size].copy_from_slice(&bits.to_le_bytes()[..size]);
        }
    }
    out
}

fn check(spec: &Spec, source_rank: usize, out: &[u8], old: &[u8]) -> Report {
    let pitch = HIDDEN * spec.out_dtype.bytes() + GAP;
    let seen = ObservedCombine { out, pitch, old: spec.accumulate.then_some(old) };
    check_combine(spec, &sources(), &Made, &Faults::default(), source_rank, &seen)
}

/// An output of rank `source_rank` before combine: room for two tokens more than there are.
fn blank(spec: &Spec, source_rank: usize) -> Vec<u8> {
    vec![FILL; (sources()[source_rank].tokens + 2) * (HIDDEN * spec.out_dtype.bytes() + GAP)]
}

/// Every way to cut three ranks into nodes.
const NODES: [&[usize]; 4] = [&[3], &[1, 2], &[2, 1], &[1, 1, 1]];

#[test]
fn right_combines_pass_within_the_bound_in_every_type_and_on_any_nodes() {
    let dtypes = [Elem::Bf16, Elem::Fp16, Elem::Fp32];
    for (combine_dtype, out_dtype) in dtypes.into_iter().flat_map(|c| dtypes.map(|o| (c, o))) {
        let token = Layout::Token { capacity: 9 };
        for (layout, partial, accumulate) in [
            (CONTIGUOUS, Partial::Same, false),
            (CONTIGUOUS, Partial::Fp32, true),
            (CONTIGUOUS, Partial::Fp8, false),
            (token, Partial::Same, true),
            (token, Partial::Fp8, false),
        ] {
            for (nodes, source_rank) in
                NODES.iter().flat_map(|nodes| (0..RANKS).map(move |source_rank| (nodes.to_vec(), source_rank)))
            {
                let spec = Spec { combine_dtype, out_dtype, partial, accumulate, nodes, ..spec(layout) };
                let old = blank(&spec, source_rank);
                let report = check(&spec, source_rank, &combine(&spec, source_rank, &old, |_, _| {}), &old);
                assert!(report.ok(), "{spec:?}: {:#?}", report.sentences);
                let rounded = if partial == Partial::Fp8 { Elem::E4m3 } else { combine_dtype };
                let rough = out_dtype.unit_roundoff() + rounded.unit_roundoff() * 9.0;
                assert!(report.max_rel_err <= rough, "{spec:?}: {}", report.max_rel_err);
            }
        }
    }
}

/// Experts on three ranks, so that every node has a part in the sum; of rank 0.
fn spread_token(spec: &Spec) -> usize {
    let on = |token: usize, rank: usize| terms(spec, &sources()[0], token).iter().any(|t| t.1 == rank);
    (0..9).find(|&token| (0..RANKS).all(|rank| on(token, rank))).unwrap()
}

#[test]
fn a_node_that_is_lost_or_comes_twice_is_named() {
    for layout in [CONTIGUOUS, Layout::Token { capacity: 9 }] {
        let spec = Spec { nodes: vec![1, 2], ..spec(layout) };
        let (token, old) = (spread_token(&spec), blank(&spec, 0));
        type Twist = fn(&mut Vec<f32>);
        // The sum never came; the source's own sum was forgotten; a row came by two rails.
        let mistakes: [(&str, Twist); 3] = [
            ("node 1 had contributed nothing", |sums| sums[1] = 0.0),
            ("rank 0, weight", |sums| sums[0] = 0.0),
            ("the sum of node 1 were counted twice", |sums| sums.push(sums[1])),
        ];
        for (cause, twist) in mistakes {
            let out = combine_nodes(
                &spec,
                0,
                &old,
                |_, _| {},
                |t, sums, _| {
                    if t == token {
                        twist(sums)
                    }
                },
            );
            let report = check(&spec, 0, &out, &old);
            assert!(report.mismatches > 100, "{cause}: {}", report.mismatches);
            assert_named(&report, report.mismatches, &[&format!("rank 0 token {token}: column "), cause]);
        }
    }
}

#[test]
fn sums_in_another_order_are_recognised_by_their_bits() {
    let three = Spec { nodes: vec![1, 1, 1], out_dtype: Elem::Fp32, partial: Partial::Fp32, ..spec(CONTIGUOUS) };
    let (token, old) = (spread_token(&three), blank(&three, 0));
    let assert_order_named = |report: &Report| {
        assert!(report.mismatches > 20, "{report:?}");
        assert_named(
            report,
            report.mismatches,
            &[&format!("rank 0 token {token}: column "), "in the documented order"],
        );
    };
    let right = combine(&three, 0, &old, |_, _| {});
    // The source adds the last node first; a rank takes its choices in another order.
    assert_order_named(&check(
        &three,
        0,
        &combine_nodes(&three, 0, &old, |_, _| {}, |_, sums, _| sums.reverse()),
        &old,
    ));
    assert!(!check(&three, 0, &combine(&three, 0, &old, |_, list| list.reverse()), &old).ok());
    // Old is added first and not last.
    let adding = Spec { accumulate: true, ..three.clone() };
    let out = combine_nodes(&three, 0, &right, |_, _| {}, |_, sums, before| sums.insert(0, before));
    assert_order_named(&check(&adding, 0, &out, &right));
}

#[test]
fn sums_rounded_where_they_must_not_be_or_not_rounded_are_recognised_by_their_bits() {
    for out_dtype in [Elem::Fp32, Elem::Bf16] {
        let spec = Spec { nodes: vec![2, 1], out_dtype, ..spec(CONTIGUOUS) };
        let (old, round) = (blank(&spec, 0), |v: f32| Elem::Bf16.decode(Elem::Bf16.encode(v)));
        let own_too = combine_nodes(&spec, 0, &old, |_, _| {}, |_, sums, _| sums[0] = round(sums[0]));
        assert_named(
            &check(&spec, 0, &own_too, &old),
            check(&spec, 0, &own_too, &old).mismatches,
            &["documented order"],
        );
        // As if all ranks were on one node: nothing is rounded between ranks and source. And as if each were alone.
        let uneven = Spec { nodes: vec![1, 2], ..spec.clone() };
        for nodes in [vec![3], vec![1, 1, 1]] {
            let out = combine(&Spec { nodes, ..spec.clone() }, 0, &old, |_, _| {});
            let report = check(&uneven, 0, &out, &old);
            assert!(report.mismatches > 20, "{report:?}");
            assert_named(&report, report.mismatches, &["rank 0 token ", "documented order", "within the bound"]);
        }
    }
}

#[test]
fn fp8_partials_made_otherwise_are_recognised_by_their_bits() {
    for out_dtype in [Elem::Fp32, Elem::Bf16] {
        let spec = Spec { nodes: vec![2, 1], out_dtype, partial: Partial::Fp8, ..spec(CONTIGUOUS) };
        let old = blank(&spec, 0);
        let assert_order_named = |out: &[u8], checked: &Spec| {
            let report = check(checked, 0, out, &old);
            assert!(report.mismatches > 20, "{report:?}");
            assert_named(&report, report.mismatches, &["rank 0 token ", "documented order", "within the bound"]);
        };
        // Not quantised at all, and by the source's node, too, or by no node.
        assert_order_named(&combine(&Spec { partial: Partial::Fp32, ..spec.clone() }, 0, &old, |_, _| {}), &spec);
        let uneven = Spec { nodes: vec![1, 2], ..spec.clone() };
        for nodes in [vec![3], vec![1, 1, 1]] {
            assert_order_named(&combine(&Spec { nodes, ..spec.clone() }, 0, &old, |_, _| {}), &uneven);
        }
    }
    // A scale that is twice what it should be, of one block of one rank: beyond the bound.
    let spec = Spec { nodes: vec![3], out_dtype: Elem::Fp32, partial: Partial::Fp8, ..spec(CONTIGUOUS) };
    let (token, old) = (spread_token(&spec), blank(&spec, 0));
    let mut out = combine(&spec, 0, &old, |_, _| {});
    let partial = in_fp8(&rank_row(&spec, &dequantised(0, token), &terms(&spec, &sources()[0], token), 1)[128..]);
    for (column, more) in (128..).zip(partial) {
        let at = token * (HIDDEN * 4 + GAP) + column * 4;
        let sum = f32::from_le_bytes(out[at..at + 4].try_into().unwrap()) + more;
        out[at..at + 4].copy_from_slice(&sum.to_le_bytes());
    }
    let report = check(&spec, 0, &out, &old);
    assert_named(&report, report.mismatches, &[&format!("rank 0 token {token}: column "), "within", "columns differ"]);
    assert!(report.mismatches > 64, "{report:?}");
}

#[test]
fn damaged_combines_are_reported_with_their_cause() {
    type Change = fn(&mut Vec<Term>);
    let damages: [(&str, Change); 6] = [
        ("were missing", |t| _ = t.remove(1)),
        ("were counted twice", |t| t.push(t[0])),
        ("were swapped", |t| (t[0].2, t[2].2) = (t[2].2, t[0].2)),
        ("all weights were 1", |t| t.iter_mut().for_each(|t| t.2 = 1.0)),
        ("had answered in place of expert", |t| t[1].0 = (t[1].0 + 2) % EXPERTS),
        ("", |t| (t[0].0, t[1].0, t[2].0) = (t[1].0, t[2].0, t[0].0)),
    ];
    let layouts = [CONTIGUOUS, Layout::Token { capacity: 9 }];
    for (layout, partial) in layouts.into_iter().flat_map(|l| [(l, Partial::Same), (l, Partial::Fp8)]) {
        let spec = Spec { partial, ..spec(layout) };
        let token = (0..9).find(|&t| terms(&spec, &sources()[0], t).len() == 3).unwrap();
        for (cause, damage) in &damages {
            let old = blank(&spec, 0);
            let out = combine(&spec, 0, &old, |t, list| {
                if t == token {
                    damage(list)
                }
            });
            let report = check(&spec, 0, &out, &old);
            assert!(report.mismatches > 100, "{cause}: {}", report.mismatches);
            assert_named(&report, report.mismatches, &[&format!("rank 0 token {token}: column "), cause]);
        }
    }
}

#[test]
fn swapped_tokens_and_stale_rows_of_combine_are_recognised() {
    let spec = spec(CONTIGUOUS);
    let (old, pitch) = (blank(&spec, 1), HIDDEN * 2 + GAP);
    let good = combine(&spec, 1, &old, |_, _| {});
    let mut swapped = good.clone();
    swapped[..HIDDEN * 2].copy_from_slice(&good[pitch..][..HIDDEN * 2]);
    let report = check(&spec, 1, &swapped, &old);
    assert_named(
        &report,
        report.mismatches,
        &["rank 1 token 0: column", "the sum of another token (token 1) stands here"],
    );
    let report = check(&spec, 1, &old, &old);
    assert_named(
        &report,
        report.mismatches,
        &["rank 1 token 4: column 0 is", "0xa5a5", "expected 0e0", "never written"],
    );
    let mut behind = good;
    behind[6 * pitch] = 0;
    assert_named(&check(&spec, 1, &behind, &old), 1, &["rank 1: byte 0 of the rows behind the last token was written"]);
}

#[test]
fn nan_and_wrong_last_column_never_pass() {
    for out_dtype in [Elem::Bf16, Elem::Fp16, Elem::Fp32] {
        let spec = Spec { out_dtype, ..spec(CONTIGUOUS) };
        let (old, size) = (blank(&spec, 0), out_dtype.bytes());
        let good = combine(&spec, 0, &old, |_, _| {});
        let at = 2 * (HIDDEN * size + GAP) + 255 * size;
        for (value, clause) in [(f32::NAN, "NaN among them"), (f32::INFINITY, "inf"), (1.0e4, "column 255 is")] {
            let mut out = good.clone();
            out[at..at + size].copy_from_slice(&out_dtype.encode(value).to_le_bytes()[..size]);
            let report = check(&spec, 0, &out, &old);
            assert_named(&report, 1, &["rank 0 token 2: column 255 is", clause, "1 of 256 columns differ"]);
            assert!(report.max_rel_err > 0.1);
        }
    }
}

#[test]
fn faulty_ranks_drop_out_of_sums() {
    let spec = spec(CONTIGUOUS);
    let old = blank(&spec, 0);
    let zeros = combine(&spec, 0, &old, |_, list| list.clear());
    fn seen(out: &[u8]) -> ObservedCombine<'_> {
        ObservedCombine { out, pitch: HIDDEN * 2 + GAP, old: None }
    }
    let overflowed = Faults { overflowed: vec![false, true], ..Default::default() };
    let silent = Faults { silent: vec![true], ..Default::default() };
    for nodes in NODES {
        let spec = Spec { nodes: nodes.to_vec(), ..spec.clone() };
        let without = combine(&spec, 0, &old, |_, list| list.retain(|t| t.1 != 1));
        assert!(check_combine(&spec, &sources(), &Made, &overflowed, 0, &seen(&without)).ok());
        assert!(check_combine(&spec, &sources(), &Made, &silent, 0, &seen(&zeros)).ok());
        assert!(!check(&spec, 0, &without, &old).ok());
    }
}

#[test]
fn short_buffers_are_reported_and_not_indexed() {
    let spec = spec(CONTIGUOUS);
    let seen = ObservedDispatch { rows: &[0; 100], rows_pitch: PITCH, expert_count: Some(&[]), ..Default::default() };
    let report = check_dispatch(&spec, &sources(), &Made, &Faults::default(), 0, &seen);
    assert_named(&report, report.mismatches, &["rank 0: 100 bytes with pitch 272 cannot hold 48 rows"]);
    assert_named(&report, report.mismatches, &["expert_count of expert 0 (local 0) is missing"]);
    let report = check(&spec, 0, &[0; 10], &[]);
    assert_named(&report, 1, &["rank 0: 10 bytes", "cannot hold 9 rows"]);
}
