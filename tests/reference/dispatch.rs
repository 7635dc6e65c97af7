//! Compares what dispatch left in a rank's output buffers with what must stand there, bit for bit.
//!
//! Rules beyond the rows themselves:
//! - rows, scales and pitch gaps that nothing is written to still hold the fill byte, also beyond the capacity;
//! - entries of `row_expert`, `source` and `token_experts` for padding rows are −1; for rows after the used ones they
//!   are −1 or untouched (`token_weights`: 0 or untouched);
//! - `token_experts` keeps the top-k positions: entry k is the local index of choice k, or −1 with weight 0 where that
//!   expert lives elsewhere;
//! - where the capacity is too small, each row, index and count is either right or untouched, and nothing is written
//!   beyond it; where rows without room are left out, those before the end are there.

use super::expect::{Expected, Place, Slot, expected_dispatch};
use super::explain::Finder;
use super::report::Report;
use super::spec::{Faults, Layout, RowSource, ScaleOrder, SourceRank, Spec, Weights};

/// The bytes a run left behind on one rank. Slices may be longer than needed: the rest must be untouched.
#[derive(Debug, Clone, Copy, Default)]
pub struct ObservedDispatch<'a> {
    pub rows: &'a [u8],
    /// Bytes from one row to the next.
    pub rows_pitch: usize,
    pub scales: Option<&'a [u8]>,
    /// i32[local experts].
    pub expert_count: Option<&'a [u8]>,
    /// i32[local experts + 1]; not checked in the token layout.
    pub expert_offset: Option<&'a [u8]>,
    /// i32[M]; not checked in the token layout.
    pub row_expert: Option<&'a [u8]>,
    /// i32[M][2].
    pub source: Option<&'a [u8]>,
    /// i32[M][top_k]; token layout.
    pub token_experts: Option<&'a [u8]>,
    /// f32[M][top_k]; token layout.
    pub token_weights: Option<&'a [u8]>,
    /// u32[M][words], and how many words: those beside each row.
    pub payload: Option<(&'a [u8], usize)>,
    /// i32[1]: rows used.
    pub row_count: Option<&'a [u8]>,
    /// i32[local experts + 1]: counts, then rows used.
    pub host_counts: Option<&'a [u8]>,
    /// i64[local experts][ranks]: begin of the source's rows among the expert's, times 2^32, plus their number.
    pub source_ranges: Option<&'a [u8]>,
    /// i32[local experts]: counts, added to the fill bytes.
    pub total_counts: Option<&'a [u8]>,
    /// What the host learnt before rows were placed, also of rows for which the output has no room: rows of each local
    /// expert, and tokens of each rank that have a row here.
    pub first_counts: Option<(&'a [usize], &'a [usize])>,
}

/// Checks the output of rank `dst`.
pub fn check_dispatch(
    spec: &Spec,
    sources: &[SourceRank],
    rows: &dyn RowSource,
    faults: &Faults,
    dst: usize,
    seen: &ObservedDispatch,
) -> Report {
    let expected = expected_dispatch(spec, sources, faults, dst);
    let poison = Poison::new(spec.poison);
    let mut check = Check {
        spec,
        sources,
        rows,
        dst,
        seen,
        expected: &expected,
        faults,
        poison: &poison,
        report: Report::default(),
    };
    check.rows();
    check.scales();
    check.payload();
    check.counts();
    check.indices();
    if spec.layout == (Layout::Token { capacity: expected.given }) {
        check.token_choices();
    }
    check.report
}

/// Word index, in the scale buffer, of scale word `word` of row `row`.
pub fn scale_index(spec: &Spec, capacity: usize, row: usize, word: usize) -> usize {
    let words = spec.scale_words();
    match (spec.scale_order, spec.layout) {
        (ScaleOrder::RowMajor, _) => row * words + word,
        (ScaleOrder::ColumnMajor, Layout::Masked { per_expert }) => {
            let ld = per_expert.next_multiple_of(4);
            (row / per_expert.max(1)) * words * ld + word * ld + row % per_expert.max(1)
        }
        (ScaleOrder::ColumnMajor, _) => word * capacity.next_multiple_of(4) + row,
    }
}

/// Words of the whole scale buffer of a rank with `local` experts.
pub fn scale_total_words(spec: &Spec, local: usize) -> usize {
    let (rows, words) = (spec.capacity_rows(local), spec.scale_words());
    match (spec.scale_order, spec.layout) {
        (ScaleOrder::RowMajor, _) => rows * words,
        (ScaleOrder::ColumnMajor, Layout::Masked { per_expert }) => local * words * per_expert.next_multiple_of(4),
        (ScaleOrder::ColumnMajor, _) => words * rows.next_multiple_of(4),
    }
}

/// The fill byte, and fast comparison with it.
pub(super) struct Poison {
    pub byte: u8,
    block: [u8; 4096],
}

impl Poison {
    pub fn new(byte: u8) -> Poison {
        Poison { byte, block: [byte; 4096] }
    }

    pub fn word(&self) -> u32 {
        u32::from_le_bytes([self.byte; 4])
    }

    /// Index of the first byte that is not the fill byte.
    pub fn first_touched(&self, bytes: &[u8]) -> Option<usize> {
        for (block, chunk) in bytes.chunks(self.block.len()).enumerate() {
            if chunk != &self.block[..chunk.len()] {
                let within = chunk.iter().position(|&b| b != self.byte)?;
                return Some(block * self.block.len() + within);
            }
        }
        None
    }
}

/// Entry `index` of an array of 4-byte words.
pub(super) fn word_at(bytes: &[u8], index: usize) -> Option<u32> {
    let four = bytes.get(index * 4..index * 4 + 4)?;
    four.try_into().ok().map(u32::from_le_bytes)
}

struct Check<'a> {
    spec: &'a Spec,
    sources: &'a [SourceRank],
    rows: &'a dyn RowSource,
    dst: usize,
    seen: &'a ObservedDispatch<'a>,
    expected: &'a Expected,
    faults: &'a Faults,
    poison: &'a Poison,
    report: Report,
}

impl Check<'_> {
    /// "rank 3 row 17 (expert 5, from rank 1 token 9)".
    fn name(&self, row: usize) -> String {
        let what = match self.expected.slots.get(row) {
            Some(Slot::Token(Place { source, token, local: Some(e) })) => {
                format!("(expert {}, from rank {source} token {token})", self.expected.experts[*e])
            }
            Some(Slot::Token(Place { source, token, local: None })) => format!("(from rank {source} token {token})"),
            Some(Slot::Padding) => "(padding)".to_string(),
            Some(Slot::Free) => "(behind the rows used)".to_string(),
            None => "(behind the capacity)".to_string(),
        };
        format!("rank {} row {row} {what}", self.dst)
    }

    fn rows(&mut self) {
        let (bytes, pitch, slots) = (self.spec.row_bytes(), self.seen.rows_pitch, self.expected.slots.len());
        let needed = slots.saturating_sub(1) * pitch + if slots > 0 { bytes } else { 0 };
        if pitch < bytes || self.seen.rows.len() < needed {
            let (dst, len) = (self.dst, self.seen.rows.len());
            self.report.miss(1, || {
                format!("rank {dst}: {len} bytes with pitch {pitch} cannot hold {slots} rows of {bytes} bytes")
            });
            return;
        }
        let mut wanted = vec![0u8; bytes];
        let mut finder = Finder::new(self.spec, self.sources, self.rows, self.expected, self.seen);
        for row in 0..slots {
            let start = row * pitch;
            let got = &self.seen.rows[start..start + bytes];
            self.report.compared += self.spec.hidden as u64;
            match self.expected.slots[row] {
                Slot::Token(place) => {
                    self.rows.row(place.source, place.token, &mut wanted);
                    if got != wanted {
                        self.wrong_row(row, place, got, &wanted, &mut finder);
                    }
                }
                Slot::Padding if self.spec.zero_padding => {
                    if got.iter().any(|&b| b != 0) {
                        self.wrong_bytes(row, got, 0, "must be zero");
                    }
                }
                Slot::Padding | Slot::Free => self.untouched(row, got),
            }
            let gap_end = (start + pitch).min(self.seen.rows.len());
            if let Some(at) = self.poison.first_touched(&self.seen.rows[start + bytes..gap_end]) {
                let name = self.name(row);
                self.report.miss(1, || format!("{name}: byte {} of the gap behind the row was written", at));
            }
        }
        if let Some(at) = self.poison.first_touched(self.seen.rows.get(slots * pitch..).unwrap_or(&[])) {
            let name = self.name(slots + at / pitch.max(1));
            self.report.miss(1, || format!("{name}: written behind the capacity of {slots} rows, at byte {at}"));
        }
    }

    fn wrong_row(&mut self, row: usize, place: Place, got: &[u8], wanted: &[u8], finder: &mut Finder) {
        let (elem, hidden) = (self.spec.dtype, self.spec.hidden);
        let differs = |c: &usize| elem.bits_at(got, *c) != elem.bits_at(wanted, *c);
        let columns = (0..hidden).filter(differs).count() as u64;
        let (name, poison) = (self.name(row), self.poison);
        self.report.miss(columns, || {
            let first = (0..hidden).find(differs).unwrap_or(0);
            let digits = elem.bytes() * 2 + 2;
            let (a, b) = (elem.bits_at(got, first), elem.bits_at(wanted, first));
            let text = format!(
                "{name}: column {first} is {a:#0digits$x}, expected {b:#0digits$x}; {columns} of {hidden} columns differ"
            );
            let why = if poison.first_touched(got).is_none() {
                format!("; still holds the fill byte {:#04x}: never written{}", poison.byte, finder.lost(place, wanted))
            } else {
                finder.explain(row, place, got, wanted)
            };
            text + &why
        });
    }

    /// Reports the bytes of a row that are not `wanted`.
    fn wrong_bytes(&mut self, row: usize, got: &[u8], wanted: u8, rule: &str) {
        let wrong = got.iter().filter(|&&b| b != wanted).count() as u64;
        let at = got.iter().position(|&b| b != wanted).unwrap_or(0);
        let (name, elem) = (self.name(row), self.spec.dtype);
        self.report.miss(wrong.div_ceil(elem.bytes() as u64), || {
            format!("{name}: column {} {rule}, but byte {at} is {:#04x}", at / elem.bytes(), got[at])
        });
    }

    fn untouched(&mut self, row: usize, got: &[u8]) {
        if self.poison.first_touched(got).is_some() {
            self.wrong_bytes(row, got, self.poison.byte, "must be untouched");
        }
    }

    fn scales(&mut self) {
        let words = self.spec.scale_words();
        let Some(seen) = self.seen.scales.filter(|_| words > 0) else { return };
        let (slots, total) = (self.expected.slots.len(), scale_total_words(self.spec, self.expected.experts.len()));
        if seen.len() < total * 4 {
            let (dst, len) = (self.dst, seen.len());
            self.report.miss(1, || format!("rank {dst}: {len} bytes cannot hold {total} scale words"));
            return;
        }
        let mut wanted = vec![0u32; words];
        for row in 0..slots {
            let slot = self.expected.slots[row];
            match slot {
                Slot::Token(place) => self.rows.scales(place.source, place.token, &mut wanted),
                Slot::Padding if self.spec.zero_padding => wanted.fill(0),
                Slot::Padding | Slot::Free => wanted.fill(self.poison.word()),
            }
            self.report.compared += words as u64;
            for (word, &expected) in wanted.iter().enumerate() {
                let index = scale_index(self.spec, slots, row, word);
                let got = word_at(seen, index).unwrap_or(0);
                if got != expected {
                    let name = self.name(row);
                    self.report
                        .miss(1, || format!("{name}: scale word {word} is {got:#010x}, expected {expected:#010x}"));
                }
            }
        }
        self.scale_gaps(seen, total);
    }

    /// Column-major scales have unused entries at the end of each column; nothing writes them, nor the bytes after
    /// them.
    fn scale_gaps(&mut self, seen: &[u8], total: usize) {
        let per_block = match self.spec.layout {
            Layout::Masked { per_expert } => per_expert,
            _ => self.expected.slots.len(),
        };
        let ld = per_block.next_multiple_of(4);
        let gaps = self.spec.scale_order == ScaleOrder::ColumnMajor;
        let unused = (0..total).filter(|index| gaps && index % ld.max(1) >= per_block);
        for index in unused.chain(total..seen.len() / 4) {
            let got = word_at(seen, index).unwrap_or(0);
            if got != self.poison.word() {
                let dst = self.dst;
                self.report.miss(1, || format!("rank {dst}: scale entry {index} is {got:#010x}, must be untouched"));
            }
        }
    }

    /// Words as rows: those of the token, 0 in padding that is zeroed, and else untouched.
    fn payload(&mut self) {
        let Some((seen, words)) = self.seen.payload else { return };
        let slots = self.expected.slots.len();
        let mut wanted = vec![0u32; words];
        for row in 0..slots {
            match self.expected.slots[row] {
                Slot::Token(place) => self.rows.words(place.source, place.token, &mut wanted),
                Slot::Padding if self.spec.zero_padding => wanted.fill(0),
                Slot::Padding | Slot::Free => wanted.fill(self.poison.word()),
            }
            self.report.compared += words as u64;
            for (j, &expected) in wanted.iter().enumerate() {
                let got = word_at(seen, row * words + j);
                if got != Some(expected) {
                    let name = self.name(row);
                    let got = got.map_or("missing".to_string(), |got| format!("{got:#010x}"));
                    self.report.miss(1, || format!("{name}: word {j} beside it is {got}, expected {expected:#010x}"));
                }
            }
        }
        let behind = self.poison.first_touched(seen.get(slots * words * 4..).unwrap_or(&[]));
        if let Some(at) = behind {
            let dst = self.dst;
            self.report.miss(1, || format!("rank {dst}: byte {at} behind the words of {slots} rows was written"));
        }
    }

    fn counts(&mut self) {
        let (expected, seen) = (self.expected, self.seen);
        let counts = &expected.counts;
        self.numbers("expert_count", seen.expert_count, counts, true);
        if !expected.offsets.is_empty() {
            self.numbers("expert_offset", seen.expert_offset, &expected.offsets, false);
        }
        self.numbers("row_count", seen.row_count, &[expected.used], false);
        let with_used: Vec<usize> = counts.iter().copied().chain([expected.used]).collect();
        self.numbers("host_counts", seen.host_counts, &with_used, true);
        let fill = self.poison.word();
        let totals: Vec<usize> = counts.iter().map(|&rows| fill.wrapping_add(rows as u32) as usize).collect();
        self.numbers("total_counts", seen.total_counts, &totals, true);
        let halves: Vec<usize> = self.ranges().into_iter().flat_map(|(begin, rows)| [rows, begin]).collect();
        self.numbers("half word of source_ranges", seen.source_ranges, &halves, false);
        self.first_counts();
    }

    fn first_counts(&mut self) {
        let Some((experts, sources)) = self.seen.first_counts else { return };
        let (spec, dst) = (self.spec, self.dst);
        let local_of = |source: &SourceRank, token: usize| -> Vec<usize> {
            let experts = (0..spec.top_k).filter_map(|k| source.expert(spec, token, k));
            experts.filter_map(|e| self.expected.experts.binary_search(&e).ok()).collect()
        };
        let mut wanted = (vec![0; self.expected.experts.len()], vec![0; self.sources.len()]);
        let loud = self.sources.iter().enumerate().filter(|(rank, _)| !self.faults.is_silent(*rank));
        for (rank, source) in loud {
            for token in 0..source.tokens {
                let local = local_of(source, token);
                local.iter().for_each(|&e| wanted.0[e] += 1);
                wanted.1[rank] += usize::from(!local.is_empty());
            }
        }
        self.report.compared += (experts.len() + sources.len()) as u64;
        if (experts, sources) != (wanted.0.as_slice(), wanted.1.as_slice()) {
            let text = || format!("rank {dst}: first counts are {experts:?} and {sources:?}, expected {wanted:?}");
            self.report.miss(1, text);
        }
    }

    /// Begin and number of each source's rows for each local expert that are there, expert by expert; nothing for
    /// experts without rows, as all are where the output is too small.
    fn ranges(&self) -> Vec<(usize, usize)> {
        let (spec, expected) = (self.spec, self.expected);
        let of = |expert: usize, source: &SourceRank| {
            let choices = (0..source.tokens).flat_map(|token| (0..spec.top_k).map(move |k| (token, k)));
            choices.filter(|&(token, k)| source.expert(spec, token, k) == Some(expert)).count()
        };
        let mut ranges = Vec::new();
        for (&expert, &rows) in expected.experts.iter().zip(&expected.counts) {
            let mut begin = 0;
            for (rank, source) in self.sources.iter().enumerate() {
                let sent = if rows == 0 || self.faults.is_silent(rank) { 0 } else { of(expert, source) };
                // Of rows that are left out none.
                let sent = sent.min(rows - begin);
                ranges.push((begin, sent));
                begin += sent;
            }
        }
        ranges
    }

    /// Compares an array of i32 that stands once per rank.
    fn numbers(&mut self, what: &str, seen: Option<&[u8]>, wanted: &[usize], per_expert: bool) {
        let Some(seen) = seen else { return };
        self.report.compared += wanted.len() as u64;
        for (i, &expected) in wanted.iter().enumerate() {
            let got = word_at(seen, i);
            if got == Some(expected as u32) {
                continue;
            }
            let dst = self.dst;
            let of = match self.expected.experts.get(i) {
                Some(e) if per_expert => format!("{what} of expert {e} (local {i})"),
                _ => format!("{what}[{i}]"),
            };
            let got = got.map_or("missing".to_string(), |g| format!("{}", g as i32));
            self.report.miss(1, || format!("rank {dst}: {of} is {got}, expected {expected}"));
        }
    }

    fn indices(&mut self) {
        let (expected, seen) = (self.expected, self.seen);
        let token_layout = matches!(self.spec.layout, Layout::Token { .. });
        for (row, slot) in expected.slots.iter().enumerate() {
            if let (Some(bytes), false) = (seen.row_expert, token_layout) {
                let local = if let Slot::Token(place) = slot { place.local } else { None };
                self.index("row_expert", bytes, row, row, local.map_or(-1, |e| e as i32));
            }
            if let Some(bytes) = seen.source {
                let (rank, token) =
                    if let Slot::Token(p) = slot { (p.source as i32, p.token as i32) } else { (-1, -1) };
                self.index("source rank", bytes, row, row * 2, rank);
                self.index("source token", bytes, row, row * 2 + 1, token);
            }
        }
    }

    /// Compares one entry of a per-row array of i32; -1 may be untouched instead where the row is not used.
    fn index(&mut self, what: &str, bytes: &[u8], row: usize, index: usize, wanted: i32) {
        self.word(what, bytes, row, index, wanted as u32, |bits| format!("{}", bits as i32));
    }

    fn word(&mut self, what: &str, bytes: &[u8], row: usize, index: usize, wanted: u32, show: fn(u32) -> String) {
        self.report.compared += 1;
        let got = word_at(bytes, index);
        let may_be_alone = self.expected.slots[row] == Slot::Free;
        if got == Some(wanted) || (may_be_alone && got == Some(self.poison.word())) {
            return;
        }
        let (name, got) = (self.name(row), got.map_or("missing".to_string(), show));
        self.report.miss(1, || format!("{name}: {what} is {got}, expected {}", show(wanted)));
    }

    fn token_choices(&mut self) {
        let (spec, expected, seen) = (self.spec, self.expected, self.seen);
        for (row, slot) in expected.slots.iter().enumerate() {
            for k in 0..spec.top_k {
                let (mut local, mut weight) = (-1, 0.0f32);
                if let Slot::Token(place) = slot {
                    let source = &self.sources[place.source];
                    let chosen = source.expert(spec, place.token, k);
                    if let Some(e) = chosen.and_then(|e| expected.experts.binary_search(&e).ok()) {
                        (local, weight) = (e as i32, source.weight(spec, place.token, k));
                    }
                }
                let index = row * spec.top_k + k;
                if let Some(bytes) = seen.token_experts {
                    self.index(&format!("local expert of choice {k}"), bytes, row, index, local);
                }
                if let (Some(bytes), true) = (seen.token_weights, spec.weights != Weights::Combine) {
                    let what = format!("weight of choice {k}");
                    self.word(&what, bytes, row, index, weight.to_bits(), |bits| format!("{}", f32::from_bits(bits)));
                }
            }
        }
    }
}
