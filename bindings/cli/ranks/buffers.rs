//! One rank's device buffers of a run: inputs, dispatched rows and their descriptions, experts' rows, sums.
//!
//! Beside the data path, on the rank's thread. Uploads, poison and read-back wait; nothing here is timed. Every output
//! is followed by memory that must stay untouched, and poisoned before each iteration that is compared.

use tokenyard::internals::kernels::bench::ExpertCall;
use tokenyard::{
    CallFormat, Combined, Device, DeviceBuffer, HostBuffer, InPlaceOutput, IndexType, Layout, NewRows, Output, Payload,
    Placed, Result, Rows, ScaleOrder, ScaleView, Stream, Strides, TokenCount, TokenPayload, Tokens, View,
};

use super::builder::call_format;
use crate::cli::cases::case::Case;
use crate::cli::cases::inputs::{Inputs, ScaleKind};
use crate::cli::cases::words::{IndexWord, LayoutWord, OrderWord, WeightsWord};
use crate::cli::reference::{ObservedCombine, ObservedDispatch, ObservedPayload, SourceRank};

/// Fill byte of outputs. As an int32 it is negative, so that an untouched row has no expert.
pub const POISON: u8 = 0xa5;
/// Fill byte of experts' rows: a NaN in every type, so that a row that should not be read shows in a sum.
const NAN_BYTE: u8 = 0xff;
/// Fill byte of the gaps between input rows.
const GAP_BYTE: u8 = 0xee;

/// Everything that a rank's kernels read and write.
pub struct Buffers {
    case: Case,
    /// What calls state of their format, where formats are mixed.
    format: Option<CallFormat>,
    rank: usize,
    local: usize,
    x: DeviceBuffer,
    x_scales: DeviceBuffer,
    /// Words beside `x`.
    x_words: DeviceBuffer,
    /// Rows, scales and words of a dispatch whose rows are replaced by its handle: any bytes.
    before: Option<[DeviceBuffer; 3]>,
    topk_idx: DeviceBuffer,
    topk_weight: DeviceBuffer,
    count: DeviceBuffer,
    /// Dispatched rows and their scales; with in-place output a copy, for the comparison.
    rows: DeviceBuffer,
    scales: DeviceBuffer,
    /// Words beside `rows`.
    words: DeviceBuffer,
    own: Option<InPlaceOutput>,
    expert_count: DeviceBuffer,
    expert_offset: DeviceBuffer,
    row_expert: DeviceBuffer,
    source: DeviceBuffer,
    token_experts: DeviceBuffer,
    token_weights: DeviceBuffer,
    row_count: DeviceBuffer,
    host_counts: HostBuffer,
    source_ranges: DeviceBuffer,
    total_counts: DeviceBuffer,
    global_expert: DeviceBuffer,
    y: DeviceBuffer,
    out: DeviceBuffer,
    /// Words beside `y`, and what combine makes of them.
    payload: DeviceBuffer,
    payload_out: DeviceBuffer,
    /// Contents of `out` before combine, in checked iterations that accumulate.
    old: Vec<u8>,
}

/// Bytes read back from one rank.
pub struct Observed {
    rows: Vec<u8>,
    scales: Vec<u8>,
    words: Vec<u8>,
    expert_count: Vec<u8>,
    expert_offset: Vec<u8>,
    row_expert: Vec<u8>,
    source: Vec<u8>,
    token_experts: Vec<u8>,
    token_weights: Vec<u8>,
    row_count: Vec<u8>,
    host_counts: Vec<u8>,
    source_ranges: Vec<u8>,
    total_counts: Vec<u8>,
    out: Vec<u8>,
    payload: Vec<u8>,
}

/// The first `bytes` bytes of a buffer.
fn first(buffer: &DeviceBuffer, bytes: usize) -> View {
    buffer.slice(0, bytes).unwrap_or_else(|_| buffer.view())
}

impl Buffers {
    /// Allocates for the largest call of the case.
    pub fn new(case: &Case, rank: usize, device: &Device, own: Option<InPlaceOutput>) -> Result<Buffers> {
        let mine = case.local_experts(rank);
        let local = mine.len();
        let rows = case.output_rows(local);
        let choices = case.max_tokens * case.top_k;
        let inputs = case.inputs(0);
        // An empty allocation has no address.
        let alloc = |bytes: usize| device.alloc(bytes.max(16));
        let per_choice = if case.layout == LayoutWord::Token { rows * case.top_k * 4 } else { 0 };
        let buffers = Buffers {
            format: if case.mixed { Some(call_format(case)?) } else { None },
            local,
            x: alloc(case.max_tokens * x_pitch(case))?,
            x_scales: alloc(case.max_tokens * inputs.scale_words() * 4)?,
            x_words: alloc(case.max_tokens * case.dispatch_payload * 4)?,
            before: if case.again {
                let scales = alloc(case.max_tokens * inputs.scale_words() * 4)?;
                let words = alloc(case.max_tokens * case.dispatch_payload * 4)?;
                Some([alloc(case.max_tokens * x_pitch(case))?, scales, words])
            } else {
                None
            },
            topk_idx: alloc(choices * 8 + case.max_tokens * case.gap)?,
            topk_weight: alloc(choices * 4 + case.max_tokens * case.gap)?,
            count: alloc(4)?,
            // One row more than the library gets.
            rows: alloc((rows + 1) * rows_pitch(case))?,
            scales: alloc(scale_words_out(case, local) * 4 + 16)?,
            words: alloc((rows + 1) * case.dispatch_payload * 4)?,
            expert_count: alloc(local * 4)?,
            expert_offset: alloc((local + 1) * 4)?,
            row_expert: alloc(rows * 4)?,
            source: alloc(rows * 8)?,
            token_experts: alloc(per_choice)?,
            token_weights: alloc(per_choice)?,
            row_count: alloc(4)?,
            host_counts: device.alloc_host((local + 1) * 4)?,
            source_ranges: alloc(local * case.world * 8)?,
            total_counts: alloc(local * 4)?,
            global_expert: alloc(local * 4)?,
            y: alloc(rows * y_pitch(case))?,
            out: alloc((case.max_tokens + 1) * out_pitch(case))?,
            payload: alloc(rows * case.payload * 4)?,
            payload_out: alloc((case.max_tokens + 1) * case.payload_words() * 4)?,
            old: Vec::new(),
            own,
            rank,
            case: case.clone(),
        };
        let ids: Vec<u8> = mine.iter().flat_map(|e| e.to_le_bytes()).collect();
        buffers.global_expert.write(0, &ids)?;
        for buffer in buffers.poisoned() {
            buffer.fill(POISON)?;
        }
        buffers.y.fill(NAN_BYTE)?;
        buffers.before.iter().flatten().try_for_each(|buffer| buffer.fill(GAP_BYTE))?;
        Ok(buffers)
    }

    /// Outputs of dispatch and combine.
    fn poisoned(&self) -> [&DeviceBuffer; 14] {
        [
            &self.rows,
            &self.scales,
            &self.words,
            &self.expert_count,
            &self.expert_offset,
            &self.row_expert,
            &self.source,
            &self.token_experts,
            &self.token_weights,
            &self.row_count,
            &self.source_ranges,
            &self.total_counts,
            &self.out,
            &self.payload_out,
        ]
    }

    /// Overwrites what dispatch reads, in stream order.
    pub fn spoil_tokens(&self, stream: &Stream) -> Result<()> {
        let [x, scales, words] = self.sent();
        for buffer in [x, scales, words, &self.topk_idx] {
            stream.fill(&buffer.view(), POISON)?;
        }
        // A dispatch by the handle has the same count.
        if !self.case.again {
            stream.fill(&self.count.view(), POISON)?;
        }
        // Combine reads weights that come with combine.
        if self.case.weights == WeightsWord::Dispatch { stream.fill(&self.topk_weight.view(), POISON) } else { Ok(()) }
    }

    /// Overwrites what a dispatch by an earlier handle reads, in stream order.
    pub fn spoil_rows(&self, stream: &Stream) -> Result<()> {
        let read = [&self.x, &self.x_scales, &self.x_words, &self.count];
        read.into_iter().try_for_each(|buffer| stream.fill(&buffer.view(), POISON))
    }

    /// Rows, scales and words that dispatch sends.
    fn sent(&self) -> [&DeviceBuffer; 3] {
        self.before.as_ref().map_or([&self.x, &self.x_scales, &self.x_words], |before| before.each_ref())
    }

    /// Overwrites what combine reads, in stream order.
    pub fn spoil_expert_rows(&self, stream: &Stream) -> Result<()> {
        stream.fill(&self.y.view(), NAN_BYTE)?;
        stream.fill(&self.payload.view(), NAN_BYTE)?;
        if self.case.weights == WeightsWord::Combine { stream.fill(&self.topk_weight.view(), POISON) } else { Ok(()) }
    }

    /// Fills every output before an iteration that is compared, in stream order.
    pub fn poison(&mut self, stream: &Stream, inputs: &Inputs) -> Result<()> {
        for buffer in self.poisoned() {
            stream.fill(&buffer.view(), POISON)?;
        }
        for view in self.own.iter().flat_map(|own| [Some(&own.rows), own.scales.as_ref()]).flatten() {
            stream.fill(view, POISON)?;
        }
        stream.fill(&self.y.view(), NAN_BYTE)?;
        write_host(&self.host_counts, POISON);
        if self.case.accumulate {
            let pitch = out_pitch(&self.case);
            let row = self.case.hidden * self.case.out_dtype.bytes();
            self.old.clear();
            self.old.resize(self.out.len(), POISON);
            for (token, place) in self.old.chunks_exact_mut(pitch).take(self.case.max_tokens).enumerate() {
                inputs.fill_old(self.case.out_dtype, self.rank, token, &mut place[..row]);
            }
        }
        Ok(())
    }

    /// Writes the old contents that combine adds to; the stream must be idle.
    pub fn write_old(&self) -> Result<()> {
        if self.case.accumulate && !self.old.is_empty() { self.out.write(0, &self.old) } else { Ok(()) }
    }

    /// Writes the rows and scales of this rank's tokens.
    pub fn upload_rows(&self, inputs: &Inputs, tokens: usize) -> Result<()> {
        let (pitch, bytes) = (x_pitch(&self.case), inputs.row_bytes());
        let mut x = vec![GAP_BYTE; tokens * pitch];
        for (token, place) in x.chunks_exact_mut(pitch).enumerate() {
            inputs.fill_row(self.rank, token, &mut place[..bytes]);
        }
        self.x.write(0, &x)?;
        let words = inputs.scale_words();
        let (row_stride, column_stride) = self.input_strides(words);
        let mut scales = vec![0u32; self.case.max_tokens * words];
        let mut of_token = vec![0u32; words];
        for token in 0..tokens {
            inputs.fill_scales(self.rank, token, &mut of_token);
            for (word, &scale) in of_token.iter().enumerate() {
                scales[token * row_stride + word * column_stride] = scale;
            }
        }
        self.x_scales.write(0, &words_to_bytes(&scales))?;
        let mut beside = vec![0u32; tokens * self.case.dispatch_payload];
        for (token, words) in beside.chunks_exact_mut(self.case.dispatch_payload.max(1)).enumerate() {
            inputs.fill_words(self.rank, token, words);
        }
        self.x_words.write(0, &words_to_bytes(&beside))
    }

    /// Writes this rank's routing, weights and token count.
    pub fn upload_routing(&self, source: &SourceRank) -> Result<()> {
        match self.case.index {
            IndexWord::I32 => self.write_choices(&self.topk_idx, &source.topk_idx, |id| (id as i32).to_le_bytes()),
            IndexWord::I64 => self.write_choices(&self.topk_idx, &source.topk_idx, i64::to_le_bytes),
            IndexWord::Ranks => self.write_choices(&self.topk_idx, &source.topk_idx, |rank| [u8::from(rank >= 0)]),
        }?;
        if self.case.weights == WeightsWord::Combine {
            // Always without gaps, with as many columns as the context's tokens have choices.
            let weights: Vec<u8> = source.topk_weight.iter().flat_map(|w| w.to_le_bytes()).collect();
            self.topk_weight.write(0, &weights)?;
        } else {
            self.write_choices(&self.topk_weight, &source.topk_weight, f32::to_le_bytes)?;
        }
        self.count.write(0, &(source.tokens as i32).to_le_bytes())
    }

    /// Writes values `[tokens, top_k]` where `choice_strides` has them; those beyond the columns are left out.
    fn write_choices<T: Copy, const SIZE: usize>(
        &self,
        to: &DeviceBuffer,
        values: &[T],
        bytes: impl Fn(T) -> [u8; SIZE],
    ) -> Result<()> {
        let Strides { token_bytes, choice_bytes } = self.choice_strides(SIZE);
        let mut all = vec![GAP_BYTE; to.len()];
        for (token, choices) in values.chunks(self.case.top_k).enumerate() {
            for (k, &value) in choices.iter().take(self.case.columns()).enumerate() {
                all[token * token_bytes + k * choice_bytes..][..SIZE].copy_from_slice(&bytes(value));
            }
        }
        to.write(0, &all)
    }

    /// Where choices of `size` bytes lie.
    fn choice_strides(&self, size: usize) -> Strides {
        match self.case.index_order {
            OrderWord::Row => Strides { token_bytes: self.case.columns() * size + self.case.gap, choice_bytes: size },
            OrderWord::Column => Strides { token_bytes: size, choice_bytes: self.case.max_tokens * size },
        }
    }

    fn input_strides(&self, words: usize) -> (usize, usize) {
        match self.case.input_scales {
            OrderWord::Row => (words, 1),
            OrderWord::Column => (1, self.case.max_tokens),
        }
    }

    /// Dispatch's input.
    pub fn tokens(&self, tokens: usize) -> Tokens {
        let case = &self.case;
        let [x, scales, words] = self.sent();
        let index = match case.index {
            IndexWord::I32 => IndexType::I32,
            IndexWord::I64 => IndexType::I64,
            IndexWord::Ranks => IndexType::Ranks,
        };
        let gaps = case.index_order == OrderWord::Column || case.gap > 0;
        let tokens = Tokens::new(x.view(), self.topk_idx.view(), self.count(tokens));
        let tokens = self.format.iter().fold(tokens, |tokens, format| tokens.of(format));
        tokens
            .pitch_bytes(x_pitch(case))
            .scales(self.scale_view(scales))
            .index_type(index)
            .top_k(case.call_top_k)
            .topk_idx_strides(gaps.then(|| self.choice_strides(index.bytes())))
            .topk_weight_strides(gaps.then(|| self.choice_strides(4)))
            .topk_weight((case.weights == WeightsWord::Dispatch).then(|| self.topk_weight.view()))
            .payload(self.token_payload(words))
    }

    /// The rows of a dispatch by an earlier handle.
    pub fn new_rows(&self, tokens: usize) -> NewRows {
        let scales = self.scale_view(&self.x_scales);
        let rows = NewRows::new(self.x.view(), self.count(tokens)).pitch_bytes(x_pitch(&self.case)).scales(scales);
        rows.payload(self.token_payload(&self.x_words))
    }

    /// Words beside the rows that dispatch sends.
    fn token_payload(&self, given: &DeviceBuffer) -> Option<TokenPayload> {
        let words = self.case.dispatch_payload;
        (words > 0).then(|| TokenPayload { view: given.view(), words })
    }

    /// Where they go.
    fn words_view(&self) -> Option<View> {
        (self.case.dispatch_payload > 0).then(|| self.words.view())
    }

    fn count(&self, tokens: usize) -> TokenCount {
        if self.case.device_count { TokenCount::Device(self.count.view()) } else { TokenCount::Host(tokens) }
    }

    fn scale_view(&self, scales: &DeviceBuffer) -> Option<ScaleView> {
        let words = self.case.inputs(0).scale_words();
        let (row_stride, col_stride) = self.input_strides(words);
        (words > 0).then(|| ScaleView::new(scales.view(), 4 * row_stride, 4 * col_stride))
    }

    /// Where they go: dispatch's output.
    pub fn placed(&self) -> Placed {
        let (rows, scales) = self.row_views();
        let placed = Placed::new(rows).pitch_bytes(rows_pitch(&self.case)).scales(scales);
        placed.scale_order(self.scale_order()).payload(self.words_view())
    }

    fn scale_order(&self) -> ScaleOrder {
        match self.case.scale_order {
            OrderWord::Row => ScaleOrder::RowMajor,
            OrderWord::Column => ScaleOrder::ColumnMajor,
        }
    }

    /// Views to which dispatch writes rows and scales.
    fn row_views(&self) -> (View, Option<View>) {
        let rows = self.case.output_rows(self.local);
        let scales = (self.case.scale_words() > 0).then(|| self.scales.view());
        match &self.own {
            Some(own) => (own.rows.clone(), own.scales.clone()),
            None => (first(&self.rows, rows * rows_pitch(&self.case)), scales),
        }
    }

    /// Copies an in-place output out of the arena, in stream order, for [`read`](Self::read).
    pub fn pull(&self, stream: &Stream) -> Result<()> {
        let Some(own) = &self.own else { return Ok(()) };
        stream.copy(&first(&self.rows, own.rows.len()), &own.rows)?;
        own.scales.as_ref().map_or(Ok(()), |scales| stream.copy(&first(&self.scales, scales.len()), scales))
    }

    /// Dispatch's output, which claims room for `capacity` rows (masked: of each expert).
    pub fn output(&self, capacity: usize) -> Output {
        let case = &self.case;
        let (rows, scales) = self.row_views();
        let token_layout = case.layout == LayoutWord::Token;
        let only_token = |buffer: &DeviceBuffer| token_layout.then(|| buffer.view());
        let layout = match case.layout {
            LayoutWord::Contiguous => Layout::Contiguous { align: case.align, capacity },
            LayoutWord::Masked => Layout::Masked { per_expert: capacity },
            LayoutWord::Token => Layout::Token { capacity },
        };
        Output::new(layout, rows, self.expert_count.view())
            .pitch_bytes(rows_pitch(case))
            .scales(scales)
            .scale_order(self.scale_order())
            .payload(self.words_view())
            .expert_offset(self.expert_offset.view())
            .row_expert(self.row_expert.view())
            .source(self.source.view())
            .token_experts(only_token(&self.token_experts))
            .token_weights(only_token(&self.token_weights))
            .row_count(self.row_count.view())
            .zero_padding(case.zero_padding)
            .drop_overflow(case.drop_overflow)
            .host_counts(case.host_counts.then(|| self.host_counts.view()))
            .source_ranges(case.host_counts.then(|| self.source_ranges.view()))
            .total_counts(case.host_counts.then(|| self.total_counts.view()))
    }

    /// Input of the benchmark's experts, for an output that claimed room for `capacity` rows.
    pub fn experts(&self, capacity: usize) -> ExpertCall {
        let case = &self.case;
        let column = case.scale_order == OrderWord::Column;
        let token_layout = case.layout == LayoutWord::Token;
        let (rows, scales) = self.row_views();
        ExpertCall {
            rows,
            rows_pitch: rows_pitch(case),
            scales,
            scale_words: case.scale_words(),
            scale_leading: if column { capacity.next_multiple_of(4) } else { 0 },
            rows_per_block: if column && case.layout == LayoutWord::Masked { capacity } else { 0 },
            ue8m0: case.scales == ScaleKind::Ue8m0,
            row_expert: (!token_layout).then(|| self.row_expert.view()),
            token_experts: token_layout.then(|| self.token_experts.view()),
            token_weights: token_layout.then(|| self.token_weights.view()),
            global_expert: self.global_expert.view(),
            y: self.y.view(),
            y_pitch: y_pitch(case),
            row_total: if case.layout == LayoutWord::Masked { capacity * self.local } else { capacity },
            hidden: case.hidden,
            top_k: case.top_k,
            dtype: case.dtype,
            combine_dtype: case.combine_dtype,
            payload: (case.payload > 0).then(|| (self.payload.view(), case.payload, case.gathered)),
        }
    }

    /// Combine's input.
    pub fn expert_rows(&self) -> Rows {
        Rows::new(self.y.view())
            .pitch_bytes(y_pitch(&self.case))
            .dtype(self.format.map(|format| format.combine_dtype))
            .payload(self.row_payload())
            .topk_weight((self.case.weights == WeightsWord::Combine).then(|| self.topk_weight.view()))
    }

    /// Combine's output.
    pub fn combined(&self) -> Combined {
        let pitch = out_pitch(&self.case);
        Combined::new(first(&self.out, self.case.max_tokens * pitch))
            .pitch_bytes(pitch)
            .dtype(self.case.out_dtype)
            .accumulate(self.case.accumulate)
            .payload((self.case.payload > 0).then(|| self.payload_out.view()))
    }

    /// The experts' words beside their rows.
    fn row_payload(&self) -> Option<Payload> {
        let Case { payload, gathered, .. } = self.case;
        (payload > 0).then(|| Payload { view: self.payload.view(), words: payload, gathered })
    }

    /// What combine brought of them, for the reference.
    pub fn payload<'a>(&self, seen: &'a Observed) -> Option<ObservedPayload<'a>> {
        let Case { payload, gathered, .. } = self.case;
        (payload > 0).then_some(ObservedPayload { out: &seen.payload, words: payload, gathered })
    }

    /// Copies every output to the host; the stream must be idle.
    pub fn read(&self) -> Result<Observed> {
        Ok(Observed {
            rows: read_all(&self.rows)?,
            scales: read_all(&self.scales)?,
            words: read_all(&self.words)?,
            expert_count: read_all(&self.expert_count)?,
            expert_offset: read_all(&self.expert_offset)?,
            row_expert: read_all(&self.row_expert)?,
            source: read_all(&self.source)?,
            token_experts: read_all(&self.token_experts)?,
            token_weights: read_all(&self.token_weights)?,
            row_count: read_all(&self.row_count)?,
            host_counts: read_host(&self.host_counts),
            source_ranges: read_all(&self.source_ranges)?,
            total_counts: read_all(&self.total_counts)?,
            out: read_all(&self.out)?,
            payload: read_all(&self.payload_out)?,
        })
    }

    /// Dispatch's outputs, for the reference.
    pub fn dispatched<'a>(&self, seen: &'a Observed) -> ObservedDispatch<'a> {
        let token_layout = self.case.layout == LayoutWord::Token;
        ObservedDispatch {
            rows: &seen.rows,
            rows_pitch: rows_pitch(&self.case),
            scales: (self.case.scales != ScaleKind::None).then_some(seen.scales.as_slice()),
            expert_count: Some(&seen.expert_count),
            expert_offset: Some(&seen.expert_offset),
            row_expert: Some(&seen.row_expert),
            source: Some(&seen.source),
            token_experts: token_layout.then_some(seen.token_experts.as_slice()),
            token_weights: token_layout.then_some(seen.token_weights.as_slice()),
            payload: (self.case.dispatch_payload > 0).then_some((&seen.words, self.case.dispatch_payload)),
            row_count: Some(&seen.row_count),
            host_counts: self.case.host_counts.then_some(seen.host_counts.as_slice()),
            source_ranges: self.case.host_counts.then_some(seen.source_ranges.as_slice()),
            total_counts: self.case.host_counts.then_some(seen.total_counts.as_slice()),
            first_counts: None,
        }
    }

    /// What `source` and `row_expert` say of rows, where an index is neither of this world nor -1, and was written.
    pub fn strays(&self, seen: &Observed) -> Vec<String> {
        let Case { world, max_tokens, .. } = self.case;
        let unwritten = i32::from_ne_bytes([POISON; 4]);
        let strays = |index: i32, bound: usize| !(-1..bound as i32).contains(&index);
        let mut sentences = Vec::new();
        for (row, &[source, token]) in words(&seen.source).as_chunks::<2>().0.iter().enumerate() {
            if (strays(source, world) || strays(token, max_tokens)) && [source, token] != [unwritten; 2] {
                sentences.push(format!(
                    "row {row} of rank {} is said to be token {token} of rank {source}, where {world} ranks have {max_tokens} \
                     tokens at the most",
                    self.rank
                ));
            }
        }
        for (row, &expert) in words(&seen.row_expert).iter().enumerate() {
            if strays(expert, self.local) && expert != unwritten {
                sentences.push(format!(
                    "row {row} of rank {} is said to be for its expert {expert}, of {}",
                    self.rank, self.local
                ));
            }
        }
        sentences
    }

    /// Combine's output, for the reference.
    pub fn summed<'a>(&'a self, seen: &'a Observed) -> ObservedCombine<'a> {
        let old = (self.case.accumulate && !self.old.is_empty()).then_some(self.old.as_slice());
        ObservedCombine { out: &seen.out, pitch: out_pitch(&self.case), old }
    }
}

/// The integers of a table.
fn words(bytes: &[u8]) -> Vec<i32> {
    bytes.as_chunks::<4>().0.iter().map(|word| i32::from_ne_bytes(*word)).collect()
}

/// Bytes from one input row to the next.
fn x_pitch(case: &Case) -> usize {
    case.inputs(0).row_bytes() + case.gap
}

/// Bytes of a rank's largest buffers: rows in and out.
pub fn bytes(case: &Case) -> usize {
    let local = case.local_counts().into_iter().max().unwrap_or(0);
    let tokens = case.max_tokens.saturating_mul(x_pitch(case) + out_pitch(case));
    case.output_rows(local).saturating_mul(rows_pitch(case) + y_pitch(case)).saturating_add(tokens)
}

/// Bytes from one dispatched row to the next.
fn rows_pitch(case: &Case) -> usize {
    case.hidden * case.dtype.bytes() + case.gap
}

fn y_pitch(case: &Case) -> usize {
    case.hidden * case.combine_dtype.bytes() + case.gap
}

fn out_pitch(case: &Case) -> usize {
    case.hidden * case.out_dtype.bytes() + case.gap
}

/// 4-byte words of the dispatched scales.
fn scale_words_out(case: &Case, local: usize) -> usize {
    let capacity = case.capacity();
    let rows = match (case.scale_order, case.layout) {
        (OrderWord::Row, _) => case.output_rows(local),
        (OrderWord::Column, LayoutWord::Masked) => capacity.next_multiple_of(4) * local,
        (OrderWord::Column, _) => capacity.next_multiple_of(4),
    };
    rows * case.scale_words()
}

fn words_to_bytes(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn read_all(buffer: &DeviceBuffer) -> Result<Vec<u8>> {
    let mut bytes = vec![0; buffer.len()];
    buffer.read(0, &mut bytes)?;
    Ok(bytes)
}

fn write_host(buffer: &HostBuffer, byte: u8) {
    // SAFETY: the pointer is valid for `len` bytes while the buffer lives; no kernel that writes them is enqueued yet.
    unsafe { std::ptr::write_bytes(buffer.host_ptr(), byte, buffer.len()) }
}

fn read_host(buffer: &HostBuffer) -> Vec<u8> {
    let mut bytes = vec![0; buffer.len()];
    // SAFETY: both spans are valid for `len` bytes and do not overlap; the stream is idle, so nothing writes them.
    unsafe { std::ptr::copy_nonoverlapping(buffer.host_ptr(), bytes.as_mut_ptr(), bytes.len()) }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokenyard::internals::base::Dtype;

    #[test]
    fn the_memory_of_a_rank_is_that_of_its_rows_in_and_out() {
        // 10 tokens of 3 choices; 8 experts on 2 ranks.
        let case = Case { world: 2, hidden: 256, experts: 8, top_k: 3, max_tokens: 10, gap: 16, ..Case::default() };
        let case = Case { combine_dtype: Dtype::Fp32, out_dtype: Dtype::Fp16, dtype: Dtype::Fp8E4m3, ..case };
        // Rows of 256 and 1024 bytes for each of 60 choices, and of 256 and 512 for each of 10 tokens, 16 bytes apart.
        assert_eq!(bytes(&case), 60 * (272 + 1040) + 10 * (272 + 528));
        // Rows to be quantised are bf16.
        let quantised = Case { quantize: true, scales: ScaleKind::F32, ..case.clone() };
        assert_eq!(bytes(&quantised), 60 * (272 + 1040) + 10 * (528 + 528));
        // 20 rows for each of a rank's four experts; or as many as are given.
        let masked = Case { layout: LayoutWord::Masked, ..case };
        assert_eq!(bytes(&masked), 4 * 20 * (272 + 1040) + 10 * (272 + 528));
        assert_eq!(bytes(&Case { capacity: Some(7), ..masked }), 4 * 7 * (272 + 1040) + 10 * (272 + 528));
    }

    #[test]
    fn tables_of_scales_have_a_word_for_each_row_or_columns_in_units_of_four_rows() {
        let fp8 = Case { dtype: Dtype::Fp8E4m3, hidden: 640, capacity: Some(6), ..Case::default() };
        for (scales, words) in [(ScaleKind::None, 0), (ScaleKind::F32, 5), (ScaleKind::Ue8m0, 2)] {
            let rows = Case { scales, ..fp8.clone() };
            let columns = Case { scale_order: OrderWord::Column, ..rows.clone() };
            let masked = |case: &Case| Case { layout: LayoutWord::Masked, ..case.clone() };
            let found = [&rows, &columns, &masked(&rows), &masked(&columns)].map(|case| scale_words_out(case, 3));
            assert_eq!(found, [6, 8, 3 * 6, 3 * 8].map(|rows| rows * words), "{scales:?}");
        }
    }
}
