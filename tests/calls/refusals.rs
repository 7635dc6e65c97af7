//! Every field of a call's arguments, wrong once: refused by its name with both values. A refused call stores nothing,
//! and the next good call works.

use crate::rig;

use std::collections::BTreeSet;

use rig::{PATIENCE, test_device};
use tokenyard::*;

mod in_place;
mod payloads;

const HIDDEN: usize = 640;
const EXPERTS: usize = 4;
const TOP_K: usize = 2;
const MAX_TOKENS: usize = 4;
/// Words of a row's side payload, in both directions.
const PAYLOAD: usize = 3;
/// Experts of the tokens, and how many rows each expert gets.
const CHOICES: [[i64; TOP_K]; MAX_TOKENS] = [[0, 1], [2, 3], [1, -1], [-1, -1]];
const COUNTS: [i32; EXPERTS] = [1, 2, 1, 1];
/// Bytes between the places of two views.
const SLOT: usize = 32 << 10;
/// What memory holds that no call has written.
const UNTOUCHED: u8 = 0xee;

// ---- cases

/// A context, and what its calls are given.
#[derive(Debug, Clone, Copy)]
struct Case {
    format: RowFormat,
    quantize: bool,
    weights: Weights,
    combine_dtype: Dtype,
    out_dtype: Dtype,
    layout: Layout,
    order: ScaleOrder,
    index_type: IndexType,
    device_count: bool,
    /// Bytes between rows.
    gap: usize,
}

const CONTIGUOUS: Layout = Layout::Contiguous { align: 1, capacity: 5 };
const MASKED: Layout = Layout::Masked { per_expert: 2 };
const TOKEN: Layout = Layout::Token { capacity: 3 };

/// All formats in all layouts and orders of scales. The other settings go round, each at its own pace.
fn cases() -> Vec<Case> {
    let formats = [
        (RowFormat::BF16, false),
        (RowFormat::FP16, false),
        (RowFormat::FP32, false),
        (RowFormat::FP8, false),
        (RowFormat::FP8_F32, false),
        (RowFormat::FP8_UE8M0, false),
        (RowFormat::FP8_F32, true),
        (RowFormat::FP8_UE8M0, true),
    ];
    let floats = [Dtype::Bf16, Dtype::Fp16, Dtype::Fp32];
    let mut cases = Vec::new();
    for (format, quantize) in formats {
        for layout in [CONTIGUOUS, MASKED, TOKEN] {
            for order in [ScaleOrder::RowMajor, ScaleOrder::ColumnMajor] {
                let at = cases.len();
                // In the token layout weights never come with combine.
                let weights = match (at % 5, layout) {
                    (0 | 2, _) | (1, Layout::Token { .. }) => Weights::Dispatch,
                    (1 | 4, Layout::Contiguous { .. } | Layout::Masked { .. }) => Weights::Combine,
                    _ => Weights::None,
                };
                cases.push(Case {
                    format,
                    quantize,
                    weights,
                    combine_dtype: floats[at % 3],
                    out_dtype: floats[(at / 3 + 1) % 3],
                    layout,
                    order,
                    index_type: [IndexType::I32, IndexType::I64][at / 2 % 2],
                    device_count: at / 4 % 2 == 1,
                    gap: [0, 16][at / 3 % 2],
                });
            }
        }
    }
    cases
}

impl Case {
    /// Tokens for which views need room.
    fn room(&self) -> usize {
        if self.device_count { MAX_TOKENS } else { 3 }
    }

    fn row_bytes(&self) -> usize {
        HIDDEN * self.format.dtype().bytes()
    }

    fn x_row_bytes(&self) -> usize {
        if self.quantize { HIDDEN * 2 } else { self.row_bytes() }
    }

    /// Scale words of a row.
    fn words(&self) -> usize {
        match self.format.scales() {
            Scales::None => 0,
            Scales::F32 => 5,
            Scales::Ue8m0 => 2,
            later => panic!("{later:?} has no case"),
        }
    }

    /// Rows of the output, and what column-major scales round them up to.
    fn rows(&self) -> (usize, usize) {
        match self.layout {
            Layout::Contiguous { .. } => (5, 8),
            Layout::Masked { .. } => (8, 4 * EXPERTS),
            Layout::Token { .. } => (3, 4),
            later => panic!("{later:?} has no case"),
        }
    }

    fn combine_row_bytes(&self) -> usize {
        HIDDEN * self.combine_dtype.bytes()
    }

    fn out_row_bytes(&self) -> usize {
        HIDDEN * self.out_dtype.bytes()
    }

    fn has_input_scales(&self) -> bool {
        !self.quantize && self.words() > 0
    }

    fn is_token(&self) -> bool {
        matches!(self.layout, Layout::Token { .. })
    }

    fn build(&self, device: &Device) -> AllToAll {
        let world = World::threads(1).unwrap().remove(0);
        let builder = AllToAll::builder(&world).device(device.clone()).hidden(HIDDEN).experts(EXPERTS).top_k(TOP_K);
        let builder = builder.max_tokens_per_rank(MAX_TOKENS).sms(2).timeout(PATIENCE).format(self.format);
        let builder = builder.quantize(self.quantize).combine_dtype(self.combine_dtype).weights(self.weights);
        builder.tuning(|t| (t.payload_words, t.dispatch_payload_words) = (PAYLOAD, PAYLOAD)).build().unwrap()
    }
}

// ---- fields

/// Everything that a dispatch and its combine are given.
#[derive(Clone)]
struct Given {
    tokens: Tokens,
    output: Output,
    rows: Rows,
    out: Combined,
}

/// The argument that a field belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Of {
    Tokens,
    Output,
    Rows,
    Combined,
}

/// A view among the arguments.
struct Part {
    of: Of,
    field: &'static str,
    /// Its name in errors.
    name: &'static str,
    /// What the call needs of it.
    bytes: usize,
    align: usize,
    set: fn(Given, View) -> Given,
}

/// Bytes from the first to the last of `rows` rows.
fn span(rows: usize, row_bytes: usize, gap: usize) -> usize {
    (rows - 1) * (row_bytes + gap) + row_bytes
}

/// All views of the case.
fn parts(case: &Case) -> Vec<Part> {
    let part = |of, field, name, bytes, align, set| Part { of, field, name, bytes, align, set };
    let (room, (rows, leading), words) = (case.room(), case.rows(), case.words());
    let index = case.index_type.bytes();
    let scale_rows = if case.order == ScaleOrder::RowMajor { rows } else { leading };
    let mut parts = vec![
        part(Of::Tokens, "x", "x", span(room, case.x_row_bytes(), case.gap), 16, |g, v| Given {
            tokens: g.tokens.x(v),
            ..g
        }),
        part(Of::Tokens, "topk_idx", "topk_idx", room * TOP_K * index, index, |g, v| Given {
            tokens: g.tokens.topk_idx(v),
            ..g
        }),
        part(Of::Output, "rows", "rows", span(rows, case.row_bytes(), case.gap), 16, |g, v| Given {
            output: g.output.rows(v),
            ..g
        }),
        part(Of::Output, "expert_count", "expert_count", 4 * EXPERTS, 4, |g, v| Given {
            output: g.output.expert_count(v),
            ..g
        }),
        part(Of::Output, "expert_offset", "expert_offset", 4 * (EXPERTS + 1), 4, |g, v| Given {
            output: g.output.expert_offset(v),
            ..g
        }),
        part(Of::Output, "row_expert", "row_expert", 4 * rows, 4, |g, v| Given { output: g.output.row_expert(v), ..g }),
        part(Of::Output, "source", "source", 8 * rows, 4, |g, v| Given { output: g.output.source(v), ..g }),
        part(Of::Output, "row_count", "row_count", 4, 4, |g, v| Given { output: g.output.row_count(v), ..g }),
        part(Of::Output, "host_counts", "host_counts", 4 * (EXPERTS + 1), 4, |g, v| Given {
            output: g.output.host_counts(v),
            ..g
        }),
        part(Of::Output, "source_ranges", "source_ranges", 8 * EXPERTS, 8, |g, v| Given {
            output: g.output.source_ranges(v),
            ..g
        }),
        part(Of::Output, "total_counts", "total_counts", 4 * EXPERTS, 4, |g, v| Given {
            output: g.output.total_counts(v),
            ..g
        }),
        part(Of::Output, "wait_times", "wait_times", 8, 8, |g, v| Given { output: g.output.wait_times(v), ..g }),
        part(Of::Rows, "rows", "rows", span(rows, case.combine_row_bytes(), case.gap), 16, |g, v| Given {
            rows: g.rows.rows(v),
            ..g
        }),
        part(Of::Tokens, "payload", "payload", 4 * room * PAYLOAD, 4, |g, v| Given {
            tokens: g.tokens.payload(TokenPayload { view: v, words: PAYLOAD }),
            ..g
        }),
        part(Of::Output, "payload", "payload of output", 4 * rows * PAYLOAD, 4, |g, v| Given {
            output: g.output.payload(v),
            ..g
        }),
        part(Of::Rows, "payload", "payload", 4 * rows * PAYLOAD, 4, |g, v| Given {
            rows: g.rows.payload(Payload { view: v, words: PAYLOAD, gathered: false }),
            ..g
        }),
        part(Of::Combined, "payload", "payload of out", 4 * room * PAYLOAD, 4, |g, v| Given {
            out: g.out.payload(v),
            ..g
        }),
        part(Of::Combined, "wait_times", "wait_times", 8, 8, |g, v| Given { out: g.out.wait_times(v), ..g }),
        part(Of::Combined, "out", "out", span(room, case.out_row_bytes(), case.gap), 16, |g, v| Given {
            out: g.out.out(v),
            ..g
        }),
    ];
    if case.device_count {
        parts.push(part(Of::Tokens, "count", "count", 4, 4, |g, v| Given {
            tokens: g.tokens.count(TokenCount::Device(v)),
            ..g
        }));
    }
    if case.has_input_scales() {
        parts.push(part(Of::Tokens, "scales", "scales", 4 * room * words, 4, |g, v| Given {
            tokens: with_scales(g.tokens, |scales| scales.view = v),
            ..g
        }));
    }
    if words > 0 {
        parts.push(part(Of::Output, "scales", "output scales", 4 * scale_rows * words, 4, |g, v| Given {
            output: g.output.scales(v),
            ..g
        }));
    }
    match case.weights {
        Weights::Dispatch => parts.push(part(Of::Tokens, "topk_weight", "topk_weight", 4 * room * TOP_K, 4, |g, v| {
            Given { tokens: g.tokens.topk_weight(v), ..g }
        })),
        Weights::Combine => parts.push(part(Of::Rows, "topk_weight", "topk_weight", 4 * room * TOP_K, 4, |g, v| {
            Given { rows: g.rows.topk_weight(v), ..g }
        })),
        Weights::None => {}
        later => panic!("{later:?} have no case"),
    }
    if case.is_token() {
        parts.push(part(Of::Output, "token_experts", "token_experts", 4 * rows * TOP_K, 4, |g, v| Given {
            output: g.output.token_experts(v),
            ..g
        }));
        parts.push(part(Of::Output, "token_weights", "token_weights", 4 * rows * TOP_K, 4, |g, v| Given {
            output: g.output.token_weights(v),
            ..g
        }));
    }
    parts
}

/// The tokens with other scales, if they have any.
fn with_scales(tokens: Tokens, change: impl FnOnce(&mut ScaleView)) -> Tokens {
    let mut scales = tokens.scales.clone();
    if let Some(scales) = &mut scales {
        change(scales);
    }
    tokens.scales(scales)
}

/// A pitch among the arguments.
struct Pitch {
    of: Of,
    /// The name of its rows in errors, which is that of their field.
    rows_name: &'static str,
    name: &'static str,
    row_bytes: usize,
    rows: usize,
    set: fn(Given, usize) -> Given,
}

fn pitches(case: &Case) -> [Pitch; 4] {
    let pitch = |of, rows_name, name, row_bytes, rows, set| Pitch { of, rows_name, name, row_bytes, rows, set };
    let (room, (rows, _)) = (case.room(), case.rows());
    [
        pitch(Of::Tokens, "x", "pitch_bytes of x", case.x_row_bytes(), room, |g, p| Given {
            tokens: g.tokens.pitch_bytes(p),
            ..g
        }),
        pitch(Of::Output, "rows", "pitch_bytes of rows", case.row_bytes(), rows, |g, p| Given {
            output: g.output.pitch_bytes(p),
            ..g
        }),
        pitch(Of::Rows, "rows", "pitch_bytes of rows", case.combine_row_bytes(), rows, |g, p| Given {
            rows: g.rows.pitch_bytes(p),
            ..g
        }),
        pitch(Of::Combined, "out", "pitch_bytes of out", case.out_row_bytes(), room, |g, p| Given {
            out: g.out.pitch_bytes(p),
            ..g
        }),
    ]
}

// ---- what is wrong with them

/// Arguments with one wrong field, and the error that they must get.
struct Fault {
    of: Of,
    field: &'static str,
    given: Given,
    name: &'static str,
    value: String,
    advice: String,
}

/// The device of a view, as errors name it.
fn device_of(view: &View) -> String {
    let text = format!("{view:?}");
    text.rsplit(" of ").next().unwrap_or_default().trim_end_matches(')').to_owned()
}

/// Every view a byte short, misaligned, null, and of another device.
fn faults_of_views(memory: &Memory, case: &Case, good: &Given) -> Vec<Fault> {
    let mut faults = Vec::new();
    for (at, part) in parts(case).iter().enumerate() {
        let (own, foreign) = (memory.view(at, part.bytes, part.align), memory.foreign.slice(0, part.bytes).unwrap());
        let mut add = |view: View, value: String, advice: String| {
            let given = (part.set)(good.clone(), view);
            faults.push(Fault { of: part.of, field: part.field, given, name: part.name, value, advice });
        };
        let needed = format!("{} bytes are needed", part.bytes);
        add(own.slice(0, part.bytes - 1).unwrap(), format!("{} bytes", part.bytes - 1), needed.clone());
        add(own.slice(0, 0).unwrap(), "0 bytes".to_owned(), needed.clone());
        let odd = memory.view(at, part.bytes, part.align / 2);
        let address = format!("address {:#x}", odd.ptr());
        add(odd, address, format!("align it to {} bytes", part.align));
        let (theirs, ours) = (device_of(&foreign), device_of(&own));
        add(foreign, format!("of {theirs}"), format!("give one of {ours}"));
        // SAFETY: calls refuse it.
        let null = unsafe { View::from_raw(&memory.device, 0, part.bytes) };
        add(null, "a null pointer".to_owned(), needed);
    }
    faults
}

/// Every pitch too small, misaligned, larger than its view has room for, and beyond 64 bits.
fn faults_of_pitches(case: &Case, good: &Given) -> Vec<Fault> {
    let mut faults = Vec::new();
    for pitch in pitches(case) {
        let Pitch { of, row_bytes, rows, set, .. } = pitch;
        let fits = format!("use a multiple of 16 that is at least {row_bytes}");
        let bytes = span(rows, row_bytes, case.gap);
        let wider = span(rows, row_bytes, case.gap + 16);
        let cases = [
            (0, pitch.name, "0 bytes".to_owned(), fits.clone()),
            (row_bytes - 16, pitch.name, format!("{} bytes", row_bytes - 16), fits.clone()),
            (row_bytes - 1, pitch.name, format!("{} bytes", row_bytes - 1), fits.clone()),
            (row_bytes + 8, pitch.name, format!("{} bytes", row_bytes + 8), fits),
            (row_bytes + case.gap + 16, pitch.rows_name, format!("{bytes} bytes"), format!("{wider} bytes are needed")),
            (usize::MAX - 15, pitch.rows_name, "beyond 64 bits".to_owned(), "ask for fewer rows".to_owned()),
        ];
        for (bytes, name, value, advice) in cases {
            faults.push(Fault { of, field: "pitch_bytes", given: set(good.clone(), bytes), name, value, advice });
        }
    }
    faults
}

/// Strides of scales that are no whole words, or go beyond their view.
fn faults_of_strides(case: &Case, good: &Given) -> Vec<Fault> {
    type Set = fn(&mut ScaleView, usize);
    let Some(scales) = good.tokens.scales.as_ref().filter(|_| case.has_input_scales()) else { return Vec::new() };
    let (row, column) = (scales.row_stride_bytes, scales.col_stride_bytes);
    let bytes = 4 * case.room() * case.words();
    let mut faults = Vec::new();
    let strides: [(&str, usize, usize, Set); 2] = [
        ("row_stride_bytes of scales", row, case.room(), |scales, bytes| scales.row_stride_bytes = bytes),
        ("col_stride_bytes of scales", column, case.words(), |scales, bytes| scales.col_stride_bytes = bytes),
    ];
    for (name, own, steps, set) in strides {
        let mut add = |stride: usize, name: &'static str, value: String, advice: String| {
            let tokens = with_scales(good.tokens.clone(), |scales| set(scales, stride));
            let given = Given { tokens, ..good.clone() };
            faults.push(Fault { of: Of::Tokens, field: "scales", given, name, value, advice });
        };
        for odd in [own - 1, own - 2, own - 3] {
            let words = "use a multiple of 4: scales are words";
            add(odd, name, format!("{odd} bytes"), words.to_owned());
        }
        let needed = format!("{} bytes are needed", bytes + 4 * (steps - 1));
        add(own + 4, "scales", format!("{bytes} bytes"), needed);
        add(usize::MAX - 3, "scales", "beyond 64 bits".to_owned(), "ask for fewer rows".to_owned());
    }
    faults
}

/// Strides of choices and weights that are no whole elements, or too large for a kernel.
fn faults_of_choices(case: &Case, good: &Given) -> Vec<Fault> {
    let mut faults = Vec::new();
    let index = case.index_type.bytes();
    type Set = fn(Tokens, Strides) -> Tokens;
    let tables: [(&str, usize, Set); 2] = [
        ("topk_idx_strides", index, |tokens, strides| tokens.topk_idx_strides(strides)),
        ("topk_weight_strides", 4, |tokens, strides| tokens.topk_weight_strides(strides)),
    ];
    for (field, size, set) in tables {
        let advice = format!("use multiples of {size}, the size of an element, below 2^32");
        for wrong in [size - 1, size / 2, size + 1, 1 << 32] {
            for (token_bytes, choice_bytes) in [(wrong, size), (size, wrong)] {
                let tokens = set(good.tokens.clone(), Strides { token_bytes, choice_bytes });
                let given = Given { tokens, ..good.clone() };
                let (value, advice) = (format!("{wrong} bytes"), advice.clone());
                faults.push(Fault { of: Of::Tokens, field, given, name: field, value, advice });
            }
        }
    }
    faults
}

/// Optional views that are left out where they are needed, and given where they are not.
fn faults_of_presence(memory: &Memory, case: &Case, good: &Given) -> Vec<Fault> {
    let mut faults = Vec::new();
    let mut add = |of, field, name, given, value: &str, why: &str| {
        let advice = if value == "missing" { format!("{why}, so give it") } else { format!("{why}, so leave it out") };
        faults.push(Fault { of, field, given, name, value: value.to_owned(), advice });
    };
    let any = memory.view(0, 4096, 16);
    let scales = ScaleView::new(any.clone(), 4, 4);
    let (tokens, output, rows) = (|| good.tokens.clone(), || good.output.clone(), || good.rows.clone());
    let of_tokens = |tokens: Tokens| Given { tokens, ..good.clone() };
    let of_output = |output: Output| Given { output, ..good.clone() };
    let of_rows = |rows: Rows| Given { rows, ..good.clone() };
    let weights = match case.weights {
        Weights::Dispatch => "this call takes weights with dispatch",
        Weights::Combine => "this call takes weights with combine",
        Weights::None => "this call has no weights",
        later => panic!("{later:?} have no case"),
    };
    let name = "topk_weight";
    if case.weights == Weights::Dispatch {
        add(Of::Tokens, name, name, of_tokens(tokens().topk_weight(None)), "missing", weights);
    } else {
        add(Of::Tokens, name, name, of_tokens(tokens().topk_weight(any.clone())), "given", weights);
    }
    if case.weights == Weights::Combine {
        add(Of::Rows, name, name, of_rows(rows().topk_weight(None)), "missing", weights);
    } else {
        add(Of::Rows, name, name, of_rows(rows().topk_weight(any.clone())), "given", weights);
    }
    let (has, has_none) = ("rows of this call have scales", "rows of this call have no scales");
    let name = "scales";
    if case.has_input_scales() {
        add(Of::Tokens, name, name, of_tokens(tokens().scales(None)), "missing", has);
    } else {
        let why = if case.quantize { "this call makes the scales as it quantises bf16 rows" } else { has_none };
        add(Of::Tokens, name, name, of_tokens(tokens().scales(scales)), "given", why);
    }
    if case.words() > 0 {
        add(Of::Output, name, "output scales", of_output(output().scales(None)), "missing", has);
    } else {
        add(Of::Output, name, "output scales", of_output(output().scales(any.clone())), "given", has_none);
    }
    let (name, why) = ("payload", "the call's tokens have a payload");
    add(Of::Output, name, "payload of output", of_output(output().payload(None)), "missing", why);
    if !case.is_token() {
        let why = "only the token layout has it";
        let [experts, weights] = ["token_experts", "token_weights"];
        add(Of::Output, experts, experts, of_output(output().token_experts(any.clone())), "given", why);
        add(Of::Output, weights, weights, of_output(output().token_weights(any.clone())), "given", why);
    } else {
        let (name, why) = ("drop_overflow", "a row of the token layout is for several experts");
        add(Of::Output, name, name, of_output(output().drop_overflow(true)), "set", why);
    }
    faults
}

/// Counts, layouts and kinds of rows that the context was not built for.
fn faults_of_kinds(case: &Case, good: &Given) -> Vec<Fault> {
    let mut faults = Vec::new();
    let mut add = |of, field, given, name, value: String, advice: String| {
        faults.push(Fault { of, field, given, name, value, advice });
    };
    let of_tokens = |tokens: Tokens| Given { tokens, ..good.clone() };
    let of_output = |output: Output| Given { output, ..good.clone() };
    let many = of_tokens(good.tokens.clone().count(TokenCount::Host(MAX_TOKENS + 1)));
    let most = format!("this call has at most {MAX_TOKENS} tokens a rank");
    add(Of::Tokens, "count", many, "count", (MAX_TOKENS + 1).to_string(), most);
    let row = case.row_bytes() + 4 * case.words();
    let with_words = |bytes: usize| (bytes + 4 * PAYLOAD).next_multiple_of(16);
    let slot = row.next_multiple_of(16) + 16;
    let room = "build the context with room_for such calls";
    if with_words(HIDDEN * 4) > slot {
        let given = of_tokens(good.tokens.clone().format(RowFormat::FP32));
        let value = format!("fp32 rows of {HIDDEN} columns, {} bytes a row", with_words(HIDDEN * 4));
        add(Of::Tokens, "format", given, "format", value, format!("rows of this arena have {slot}; {room}"));
    }
    let given = of_tokens(good.tokens.clone().hidden(2 * HIDDEN));
    let twice = with_words(2 * row);
    let value = format!("{} of {} columns, {twice} bytes a row", case.format, 2 * HIDDEN);
    add(Of::Tokens, "hidden", given, "format", value, format!("rows of this arena have {slot}; {room}"));
    let odd_bytes = (HIDDEN + 1) * case.format.dtype().bytes();
    let odd = format!("a row of {odd_bytes} bytes is no multiple of 16; pad the hidden size");
    for (hidden, advice) in [
        (0, "use 1 to 1048576 columns".to_owned()),
        ((1 << 20) + 1, "use 1 to 1048576 columns".to_owned()),
        (HIDDEN + 1, odd),
    ] {
        let given = of_tokens(good.tokens.clone().hidden(hidden));
        add(Of::Tokens, "hidden", given, "hidden", hidden.to_string(), advice);
    }
    for tokens in [0, MAX_TOKENS + 1] {
        let given = of_tokens(good.tokens.clone().max_tokens(tokens));
        let advice = format!("use 1 to {MAX_TOKENS}, the most of this context");
        add(Of::Tokens, "max_tokens", given, "max_tokens", tokens.to_string(), advice);
    }
    if case.weights != Weights::Combine {
        let given = of_tokens(good.tokens.clone().weights(Weights::Combine));
        add(Of::Tokens, "weights", given, "weights", "Combine".to_owned(), room.to_owned());
    }
    for other in [0, TOP_K + 1] {
        let advice = format!("this context was built for 1 to {TOP_K} choices of a token");
        add(Of::Tokens, "top_k", of_tokens(good.tokens.clone().top_k(other)), "top_k", other.to_string(), advice);
    }
    if case.words() == 0 {
        let given = of_tokens(good.tokens.clone().quantize(true));
        let made = "it makes fp8 rows with scales, and these are";
        let (dtype, scales) = (case.format.dtype(), case.format.scales());
        let advice = format!("{made} {dtype} with scales {scales:?}; use fp8 with F32 or Ue8m0");
        add(Of::Tokens, "quantize", given, "quantize", "true".to_owned(), advice);
    }
    let given = Given { rows: good.rows.clone().dtype(Dtype::Fp8E4m3), ..good.clone() };
    let floats = "use bf16, fp16 or fp32".to_owned();
    add(Of::Rows, "dtype", given, "dtype of rows", Dtype::Fp8E4m3.to_string(), floats);
    if case.combine_dtype != Dtype::Fp32 {
        let given = Given { rows: good.rows.clone().dtype(Dtype::Fp32), ..good.clone() };
        let value = format!("fp32 of {HIDDEN} columns, {} bytes with its payload", 4 * HIDDEN + 32);
        let advice = format!("partial rows of this arena have {}; {room}", case.combine_row_bytes() + 32);
        add(Of::Rows, "dtype", given, "dtype of rows", value, advice);
    }
    let given = Given { out: good.out.clone().dtype(Dtype::Fp8E4m3), ..good.clone() };
    let (fp8, floats) = (Dtype::Fp8E4m3.to_string(), "use bf16, fp16 or fp32".to_owned());
    add(Of::Combined, "dtype", given, "dtype of out", fp8, floats);
    let unaligned = Layout::Contiguous { align: 0, capacity: 5 };
    let given = of_output(good.output.clone().layout(unaligned).token_experts(None).token_weights(None));
    add(Of::Output, "layout", given, "align", "0".to_owned(), "use 1 for no alignment".to_owned());
    let (rows, row_bytes) = (case.rows().0, case.row_bytes());
    let (longer, more) = match case.layout {
        Layout::Contiguous { align, capacity } => (Layout::Contiguous { align, capacity: capacity + 1 }, rows + 1),
        Layout::Masked { per_expert } => (Layout::Masked { per_expert: per_expert + 1 }, rows + EXPERTS),
        Layout::Token { capacity } => (Layout::Token { capacity: capacity + 1 }, rows + 1),
        later => panic!("{later:?} has no case"),
    };
    let [had, needed] = [rows, more].map(|rows| format!("{} bytes", span(rows, row_bytes, case.gap)));
    let given = of_output(good.output.clone().layout(longer));
    add(Of::Output, "layout", given, "rows", had, format!("{needed} are needed"));
    let uncounted = match case.layout {
        Layout::Contiguous { align, .. } => Layout::Contiguous { align, capacity: 1 << 31 },
        Layout::Masked { .. } => Layout::Masked { per_expert: 1 << 29 },
        Layout::Token { .. } => Layout::Token { capacity: 1 << 31 },
        later => panic!("{later:?} has no case"),
    };
    let int32 = "rows are counted in int32, padding for alignment included; ask for fewer".to_owned();
    let given = of_output(good.output.clone().layout(uncounted));
    add(Of::Output, "layout", given, "layout", format!("{uncounted:?}"), int32);
    faults
}

fn faults(memory: &Memory, case: &Case, good: &Given) -> Vec<Fault> {
    let mut faults = faults_of_views(memory, case, good);
    faults.extend(faults_of_pitches(case, good));
    faults.extend(faults_of_strides(case, good));
    faults.extend(faults_of_choices(case, good));
    faults.extend(faults_of_presence(memory, case, good));
    faults.extend(faults_of_kinds(case, good));
    faults.extend(payloads::faults(case, good));
    faults
}

// ---- running them

/// Memory for all views of a call, and some of another device.
struct Memory {
    device: Device,
    own: DeviceBuffer,
    foreign: DeviceBuffer,
}

/// Most views of all arguments together.
const VIEWS: usize = 24;

impl Memory {
    fn new(device: &Device) -> Memory {
        let own = device.alloc(VIEWS * SLOT).unwrap();
        Memory { device: device.clone(), own, foreign: Device::cpu().unwrap().alloc(SLOT).unwrap() }
    }

    /// Exactly so many bytes, at an address that is a multiple of `align` and of nothing larger.
    fn view(&self, at: usize, bytes: usize, align: usize) -> View {
        self.own.slice(at * SLOT + align, bytes).unwrap()
    }

    /// Good arguments, with the inputs in place and the outputs untouched.
    fn good(&self, case: &Case) -> Given {
        self.own.fill(UNTOUCHED).unwrap();
        let any = self.view(0, 0, 16);
        let mut tokens = Tokens::new(any.clone(), any.clone(), TokenCount::Host(case.room()));
        tokens = tokens.index_type(case.index_type);
        if case.has_input_scales() {
            // By column in every other layout.
            let (row, column) = if case.is_token() { (4, 4 * case.room()) } else { (4 * case.words(), 4) };
            tokens = tokens.scales(ScaleView::new(any.clone(), row, column));
        }
        let output = Output::new(case.layout, any.clone(), any.clone()).scale_order(case.order);
        let out = Combined::new(any.clone()).dtype(case.out_dtype);
        let mut good = Given { tokens, output, rows: Rows::new(any), out };
        for (at, part) in parts(case).iter().enumerate() {
            let begin = at * SLOT + part.align;
            match (part.of, part.field) {
                (Of::Tokens, "topk_idx") => self.own.write(begin, &indices(case)).unwrap(),
                (Of::Tokens, "count") => self.own.write(begin, &3i32.to_ne_bytes()).unwrap(),
                (Of::Tokens | Of::Rows, _) => self.own.write(begin, &vec![0; part.bytes]).unwrap(),
                (Of::Output | Of::Combined, _) => {}
            }
            good = (part.set)(good, self.view(at, part.bytes, part.align));
        }
        if case.gap > 0 {
            for Pitch { row_bytes, set, .. } in pitches(case) {
                good = set(good, row_bytes + case.gap);
            }
        }
        good
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.own.len()];
        self.own.read(0, &mut bytes).unwrap();
        bytes
    }

    /// The contents of one view.
    fn of(&self, case: &Case, of: Of, field: &str) -> Vec<u8> {
        let parts = parts(case);
        let at = parts.iter().position(|part| (part.of, part.field) == (of, field)).unwrap();
        let mut bytes = vec![0; parts[at].bytes];
        self.own.read(at * SLOT + parts[at].align, &mut bytes).unwrap();
        bytes
    }
}

fn indices(case: &Case) -> Vec<u8> {
    let chosen = CHOICES.iter().take(case.room()).flatten();
    match case.index_type {
        IndexType::I32 => chosen.flat_map(|expert| (*expert as i32).to_ne_bytes()).collect(),
        IndexType::I64 => chosen.flat_map(|expert| expert.to_ne_bytes()).collect(),
        IndexType::Ranks => unreachable!("tests/calls/routing.rs has these"),
    }
}

/// Name, value and advice of an error of arguments.
fn refusal(error: &Error) -> (&'static str, String, String) {
    match error {
        Error::Argument { name, value, advice, .. } | Error::Config { name, value, advice, .. }
            if !error.is_fatal() =>
        {
            (*name, value.clone(), advice.clone())
        }
        other => ("another error", other.to_string(), String::new()),
    }
}

/// A context under test, and what went wrong so far.
struct Judge<'a> {
    case: &'a Case,
    ep: AllToAll,
    stream: Stream,
    memory: &'a Memory,
    good: Given,
    problems: Vec<String>,
}

impl Judge<'_> {
    /// Makes a call with every fault of an argument; each must be refused, and none may store anything.
    fn refuse(
        &mut self,
        call: &str,
        of: &[Of],
        faults: &[Fault],
        mut make: impl FnMut(&Judge<'_>, &Given) -> Result<()>,
    ) {
        let (before, stats) = (self.memory.bytes(), self.ep.stats());
        for fault in faults.iter().filter(|fault| of.contains(&fault.of)) {
            let expected = (fault.name, fault.value.clone(), fault.advice.clone());
            let got = make(self, &fault.given).map_err(|error| refusal(&error));
            if got != Err(expected.clone()) {
                let (of, field) = (fault.of, fault.field);
                self.problems
                    .push(format!("{call}, {of:?}::{field}: {got:?} in place of {expected:?}: {:?}", self.case));
            }
        }
        self.settle();
        if self.memory.bytes() != before || self.ep.stats() != stats {
            self.problems.push(format!("{call}: a refused call was made: {:?}", self.case));
        }
    }

    fn settle(&mut self) {
        self.stream.synchronize(PATIENCE).unwrap();
        if let Err(error) = self.ep.check() {
            self.problems.push(format!("{error}: {:?}", self.case));
        }
    }

    fn expect_dispatched(&mut self, call: &str) {
        self.settle();
        let counts = self.memory.of(self.case, Of::Output, "expert_count");
        if counts != COUNTS.map(i32::to_ne_bytes).concat() {
            self.problems.push(format!("{call}: counts {counts:?} after refused calls: {:?}", self.case));
        }
    }

    /// Zeros for the tokens; nothing behind them.
    fn expect_combined(&mut self, call: &str) {
        self.settle();
        let out = self.memory.of(self.case, Of::Combined, "out");
        let (row_bytes, pitch) = (self.case.out_row_bytes(), self.case.out_row_bytes() + self.case.gap);
        let is_summed = out.chunks(pitch).take(3).all(|row| row.iter().take(row_bytes).all(|byte| *byte == 0));
        let is_kept = out.iter().skip(3 * pitch).all(|byte| *byte == UNTOUCHED);
        if !is_summed || !is_kept {
            self.problems.push(format!("{call}: no sums after refused calls: {:?}", self.case));
        }
    }

    /// Untouched outputs again.
    fn again(&mut self) {
        self.good = self.memory.good(self.case);
    }

    fn fused_calls(&mut self, faults: &[Fault]) {
        let dispatch =
            |judge: &Judge<'_>, given: &Given| judge.ep.dispatch(&judge.stream, &given.tokens, &given.output);
        self.refuse("dispatch", &[Of::Tokens, Of::Output], faults, |judge, given| dispatch(judge, given).map(drop));
        let handle = dispatch(self, &self.good).unwrap();
        self.expect_dispatched("dispatch");
        let combine =
            |judge: &Judge<'_>, given: &Given| judge.ep.combine(&judge.stream, &handle, &given.rows, &given.out);
        self.refuse("combine", &[Of::Rows, Of::Combined], faults, combine);
        combine(self, &self.good).unwrap();
        self.expect_combined("combine");
    }

    fn halves(&mut self, faults: &[Fault]) {
        let send = |judge: &Judge<'_>, given: &Given| judge.ep.dispatch_send(&judge.stream, &given.tokens);
        self.refuse("dispatch_send", &[Of::Tokens], faults, |judge, given| send(judge, given).map(drop));
        let mut sent = Some(send(self, &self.good).unwrap());
        let mut handle = None;
        // Once a faulty call has taken what was sent, nothing is left for the next.
        let mut receive = |judge: &Judge<'_>, given: &Given| {
            let Some(given_sent) = sent.take() else { return Ok(()) };
            match judge.ep.dispatch_recv(&judge.stream, given_sent, &given.output) {
                Ok(received) => {
                    handle = Some(received);
                    Ok(())
                }
                Err(refused) => {
                    sent = Some(*refused.given);
                    Err(refused.error)
                }
            }
        };
        self.refuse("dispatch_recv", &[Of::Output], faults, &mut receive);
        receive(self, &self.good).unwrap();
        self.expect_dispatched("dispatch_recv");
        let handle = handle.unwrap();
        let send = |judge: &Judge<'_>, given: &Given| judge.ep.combine_send(&judge.stream, &handle, &given.rows);
        self.refuse("combine_send", &[Of::Rows], faults, |judge, given| send(judge, given).map(drop));
        let mut sent = Some(send(self, &self.good).unwrap());
        let mut receive = |judge: &Judge<'_>, given: &Given| {
            let Some(given_sent) = sent.take() else { return Ok(()) };
            let received = judge.ep.combine_recv(&judge.stream, given_sent, &given.out);
            received.map_err(|refused| {
                sent = Some(*refused.given);
                refused.error
            })
        };
        self.refuse("combine_recv", &[Of::Combined], faults, &mut receive);
        receive(self, &self.good).unwrap();
        self.expect_combined("combine_recv");
    }
}

#[test]
fn every_field_of_a_call_that_is_wrong_is_refused_by_name_with_both_values() {
    let device = test_device(&World::threads(1).unwrap()[0]);
    let memory = Memory::new(&device);
    let mut problems = Vec::new();
    for case in &cases() {
        assert!(parts(case).len() <= VIEWS, "{case:?}");
        let (ep, stream, good) = (case.build(&device), device.new_stream().unwrap(), memory.good(case));
        let faults = faults(&memory, case, &good);
        let mut judge = Judge { case, ep, stream, memory: &memory, good, problems: Vec::new() };
        judge.fused_calls(&faults);
        judge.again();
        judge.halves(&faults);
        problems.append(&mut judge.problems);
    }
    assert!(problems.is_empty(), "{} problems:\n{}", problems.len(), problems.join("\n"));
}

// ---- no field without a fault

/// Names of the fields that the derived text of a value shows.
fn fields_of(value: &impl std::fmt::Debug) -> BTreeSet<String> {
    let text = format!("{value:#?}");
    let fields = text.lines().filter_map(|line| line.strip_prefix("    ")?.split_once(": "));
    fields.map(|(name, _)| name.to_owned()).filter(|name| !name.starts_with([' ', '}', ')'])).collect()
}

/// Fields of which every value is good.
const FREE: [(Of, &str); 5] = [
    // Decides what views need, as other cases show.
    (Of::Tokens, "index_type"),
    // Looked at by combine.
    (Of::Tokens, "combine_dtype"),
    (Of::Output, "scale_order"),
    (Of::Output, "zero_padding"),
    (Of::Combined, "accumulate"),
];

#[test]
fn no_field_of_a_calls_arguments_is_left_out() {
    let device = test_device(&World::threads(1).unwrap()[0]);
    let memory = Memory::new(&device);
    let mut faulty: Vec<(Of, &'static str)> = Vec::new();
    let mut shown = Vec::new();
    for case in &cases() {
        let good = memory.good(case);
        faulty.extend(faults(&memory, case, &good).iter().map(|fault| (fault.of, fault.field)));
        shown = vec![
            (Of::Tokens, fields_of(&good.tokens)),
            (Of::Output, fields_of(&good.output)),
            (Of::Rows, fields_of(&good.rows)),
            (Of::Combined, fields_of(&good.out)),
        ];
    }
    for (of, fields) in shown {
        let known = faulty.iter().chain(&FREE).filter(|(other, _)| *other == of).map(|(_, field)| *field);
        let known: BTreeSet<String> = known.map(str::to_owned).collect();
        assert_eq!(fields, known, "fields of {of:?}, and those that this test makes wrong");
    }
}
