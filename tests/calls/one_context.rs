//! One context, calls of several formats: they alternate, their handles stay apart, and what does not fit, or differs
//! between ranks, is refused.

use crate::rig;

use rig::{EXPERTS, MAX_TOKENS, PATIENCE, TOP_K, builder, nodes, on_ranks, test_device};
use std::time::Duration;
use tokenyard::*;

const WIDEST: usize = 128;
const CAPACITY: usize = 64;

/// One rank's buffers, with room for calls of any of the formats.
struct Side {
    ep: AllToAll,
    stream: Stream,
    rank: usize,
    x: DeviceBuffer,
    idx: DeviceBuffer,
    weight: DeviceBuffer,
    rows: DeviceBuffer,
    count: DeviceBuffer,
    out: DeviceBuffer,
    /// Whether its combines have payloads, and the words beside rows, and beside sums.
    pays: bool,
    payload: DeviceBuffer,
    words: DeviceBuffer,
}

/// Words of a token's payload in a context that has some.
const WORDS: usize = 7;

/// The words that a combine has beside each row, and whether they are gathered: other ones in each call.
fn payload_of(salt: usize) -> (usize, bool) {
    [(2, false), (0, false), (3, true), (1, true), (0, false), (7, false)][salt % 6]
}

fn bytes_of(dtype: Dtype, value: f32) -> Vec<u8> {
    let bits = value.to_bits();
    if dtype == Dtype::Fp32 { bits.to_ne_bytes().to_vec() } else { ((bits >> 16) as u16).to_ne_bytes().to_vec() }
}

/// A row of a rank's token: small whole numbers, exact in every type, a zero among them.
fn row(rank: usize, token: usize, salt: usize, format: &CallFormat, factor: f32) -> Vec<u8> {
    let value = |column: usize| ((rank * 5 + token * 3 + column + salt) % 8) as f32 * factor;
    (0..format.hidden).flat_map(|column| bytes_of(format.rows.dtype(), value(column))).collect()
}

impl Side {
    fn new(world: &World, change: impl Fn(AllToAllBuilder) -> AllToAllBuilder) -> Side {
        let device = test_device(world);
        let ep = change(builder(world, &device)).build().unwrap();
        let alloc = |bytes: usize| device.alloc(bytes).unwrap();
        Side {
            stream: device.new_stream().unwrap(),
            rank: world.rank().index(),
            x: alloc(MAX_TOKENS * WIDEST * 4),
            idx: alloc(MAX_TOKENS * TOP_K * 4),
            weight: alloc(MAX_TOKENS * TOP_K * 4),
            rows: alloc(CAPACITY * WIDEST * 4),
            count: alloc(EXPERTS * 4),
            out: alloc(MAX_TOKENS * WIDEST * 4),
            pays: false,
            payload: alloc(CAPACITY * WORDS * 4),
            words: alloc(MAX_TOKENS * WORDS * 4),
            ep,
        }
    }

    fn tokens(&self, format: &CallFormat, salt: usize) -> Tokens {
        let count = format.max_tokens;
        let rows: Vec<u8> = (0..count).flat_map(|token| row(self.rank, token, salt, format, 1.0)).collect();
        self.x.write(0, &rows).unwrap();
        let choice = |i: usize| ((self.rank * 3 + i + i / TOP_K + salt) % EXPERTS) as i32;
        let choices: Vec<u8> = (0..count * TOP_K).flat_map(|i| choice(i).to_ne_bytes()).collect();
        self.idx.write(0, &choices).unwrap();
        self.weight.write(0, &0.5f32.to_ne_bytes().repeat(MAX_TOKENS * TOP_K)).unwrap();
        let tokens = Tokens::new(self.x.view(), self.idx.view(), TokenCount::Host(count)).of(format);
        tokens.topk_weight((format.weights == Weights::Dispatch).then(|| self.weight.view()))
    }

    fn output(&self) -> Output {
        let layout = Layout::Contiguous { align: 1, capacity: CAPACITY };
        Output::new(layout, self.rows.view(), self.count.view())
    }

    fn dispatch(&self, format: &CallFormat, salt: usize) -> Handle {
        self.rows.fill(0xEE).unwrap();
        self.ep.dispatch(&self.stream, &self.tokens(format, salt), &self.output()).unwrap()
    }

    /// Combines what lies in the output, and compares the sums: rows of the handle's tokens with that salt.
    fn combine(&self, handle: &Handle, format: &CallFormat, salt: usize) {
        self.out.fill(0xEE).unwrap();
        let late = format.weights == Weights::Combine;
        // The dispatch has stated the dtype.
        let rows = Rows::new(self.rows.view());
        let rows = rows.topk_weight(late.then(|| self.weight.view()));
        let out = Combined::new(self.out.view()).dtype(format.rows.dtype());
        let (words, gathered) = if self.pays { payload_of(salt) } else { (0, false) };
        // All rows have the same words.
        let word = |j: usize| (1 + salt * 16 + j) as f32;
        let each: Vec<u8> = (0..words).flat_map(|j| word(j).to_ne_bytes()).collect();
        self.payload.write(0, &each.repeat(CAPACITY)).unwrap();
        self.words.fill(0xEE).unwrap();
        let payload = (words > 0).then(|| Payload { view: self.payload.view(), words, gathered });
        let (rows, out) = (rows.payload(payload), out.payload((words > 0).then(|| self.words.view())));
        self.ep.combine(&self.stream, handle, &rows, &out).unwrap();
        self.stream.synchronize(PATIENCE).unwrap();
        self.ep.check().unwrap_or_else(|error| panic!("{format:?}: {error}"));
        let factor = if format.weights == Weights::None { TOP_K as f32 } else { 1.0 };
        let mut seen = vec![0; self.out.len()];
        self.out.read(0, &mut seen).unwrap();
        let wanted: Vec<u8> =
            (0..format.max_tokens).flat_map(|token| row(self.rank, token, salt, format, factor)).collect();
        assert_eq!(&seen[..wanted.len()], wanted, "rank {} of {format:?}", self.rank);
        assert!(seen[wanted.len()..].iter().all(|byte| *byte == 0xEE), "rank {} beyond {format:?}", self.rank);
        let of_token: Vec<u8> = match gathered {
            true => each.repeat(TOP_K),
            false => (0..words).flat_map(|j| (TOP_K as f32 * word(j)).to_ne_bytes()).collect(),
        };
        let mut seen = vec![0; self.words.len()];
        self.words.read(0, &mut seen).unwrap();
        let mut wanted = vec![0xEE; seen.len()];
        wanted[..format.max_tokens * of_token.len()].copy_from_slice(&of_token.repeat(format.max_tokens));
        assert_eq!(seen, wanted, "words of rank {} of {format:?}, {words}, gathered: {gathered}", self.rank);
    }
}

fn of(hidden: usize, rows: RowFormat, tokens: usize) -> CallFormat {
    CallFormat::new(hidden, rows, tokens).combine_dtype(rows.dtype())
}

/// Formats for which `roomy` makes room.
fn formats(late: bool) -> Vec<CallFormat> {
    let mut formats = vec![
        of(64, RowFormat::BF16, MAX_TOKENS),
        of(WIDEST, RowFormat::FP32, MAX_TOKENS),
        of(8, RowFormat::BF16, MAX_TOKENS),
        // Between nodes chunks of the largest rows have room for two and a half of these.
        of(48, RowFormat::FP32, MAX_TOKENS),
        of(WIDEST, RowFormat::BF16, 1),
        of(32, RowFormat::FP32, 2).weights(Weights::None),
    ];
    if late {
        formats.push(of(64, RowFormat::FP32, 3).weights(Weights::Combine));
    }
    formats
}

fn roomy(builder: AllToAllBuilder, late: bool) -> AllToAllBuilder {
    formats(late).iter().fold(builder, |builder, format| builder.room_for(*format))
}

/// Calls of all formats, one after the other and their combines later, by earlier handles and in graphs.
fn alternate(world: &World, side: &Side, formats: &[CallFormat]) {
    for salt in 0..8 {
        let at = |step: usize| &formats[(salt * 5 + step) % formats.len()];
        let (first, second) = (at(0), at(1));
        let handle = side.dispatch(first, salt);
        side.combine(&handle, first, salt);
        // The first handle's combine comes after a dispatch of another format, whose rows it finds in the output.
        let other = side.dispatch(second, salt + 1);
        side.combine(&other, second, salt + 1);
        // New rows of the first tokens, in the second's type and columns; their experts return them.
        let again = CallFormat::new(second.hidden, second.rows, first.max_tokens);
        side.rows.fill(0xEE).unwrap();
        let _ = side.tokens(&again, salt + 2);
        let rows = NewRows::new(side.x.view(), TokenCount::Host(first.max_tokens));
        let rows = rows.format(again.rows).hidden(again.hidden);
        side.ep.dispatch_again(&side.stream, &handle, &rows, &Placed::new(side.rows.view())).unwrap();
        side.stream.synchronize(PATIENCE).unwrap();
        side.ep.check().unwrap();
        let mut placed = vec![0; side.rows.len()];
        side.rows.read(0, &mut placed).unwrap();
        let bytes = again.hidden * again.rows.dtype().bytes();
        let all: Vec<Vec<u8>> = (0..world.size())
            .flat_map(|rank| (0..first.max_tokens).map(move |token| (rank, token)))
            .map(|(rank, token)| row(rank, token, salt + 2, &again, 1.0))
            .collect();
        let used = placed.chunks(bytes).take(CAPACITY).filter(|row| row.iter().any(|byte| *byte != 0xEE));
        assert!(used.clone().all(|row| all.iter().any(|one| one == row)), "rank {} of {again:?}", side.rank);
        // A captured call keeps its format.
        let third = at(2);
        let tokens = side.tokens(third, salt + 3);
        side.stream.begin_capture().unwrap();
        let captured = side.ep.dispatch(&side.stream, &tokens, &side.output());
        let graph = side.stream.end_capture().unwrap();
        let captured = captured.unwrap();
        for _ in 0..2 {
            side.rows.fill(0xEE).unwrap();
            graph.launch(&side.stream).unwrap();
            side.combine(&captured, third, salt + 3);
            let between = side.dispatch(first, salt + 4);
            side.combine(&between, first, salt + 4);
            let _ = side.tokens(third, salt + 3);
        }
        drop(graph);
    }
}

#[test]
fn calls_of_several_formats_alternate() {
    for ranks in [1, 3] {
        // Without LL rows, with LL rows in all calls, and in small calls alone.
        for ll_tokens in [0, MAX_TOKENS, 2] {
            on_ranks(ranks, |world| {
                let with = |words: usize| {
                    let tuned = |builder: AllToAllBuilder| {
                        builder.tuning(|t| (t.ll_tokens, t.payload_words) = (Some(ll_tokens), words))
                    };
                    Side { pays: words > 0, ..Side::new(&world, |builder| tuned(roomy(builder, true))) }
                };
                for words in [0, WORDS] {
                    alternate(&world, &with(words), &formats(true));
                    world.barrier("all are done").unwrap();
                }
            });
        }
    }
    for (sizes, chunk_rows) in [(&[1, 1][..], 1), (&[2, 1], 2), (&[1, 1, 2], 4)] {
        nodes::on_nodes(sizes, |world, network| {
            let proxy = nodes::proxy(network, &world, 1500);
            let side = Side::new(&world, |builder| {
                let builder = roomy(builder, false).proxy(&proxy).timeout(nodes::DEADLINE).sms(3);
                builder.tuning(|t| t.chunk_rows = Some(chunk_rows))
            });
            alternate(&world, &side, &formats(false));
            world.barrier("all are done").unwrap();
        });
    }
}

/// Calls of more formats than a context keeps.
#[test]
fn any_number_of_formats_may_be_called() {
    on_ranks(2, |world| {
        let side = Side::new(&world, |builder| roomy(builder, true));
        let kept = side.dispatch(&of(16, RowFormat::BF16, 2), 3);
        side.stream.synchronize(PATIENCE).unwrap();
        let mut first = vec![0; side.rows.len()];
        side.rows.read(0, &mut first).unwrap();
        for hidden in (8..=WIDEST).step_by(8) {
            for tokens in 1..=MAX_TOKENS {
                for rows in [RowFormat::BF16, RowFormat::FP32] {
                    let format = of(hidden, rows, tokens);
                    let handle = side.dispatch(&format, hidden + tokens);
                    side.combine(&handle, &format, hidden + tokens);
                }
            }
        }
        // An old handle stays of its format.
        side.rows.write(0, &first).unwrap();
        side.combine(&kept, &of(16, RowFormat::BF16, 2), 3);
        world.barrier("all are done").unwrap();
    });
}

#[test]
fn what_has_no_room_is_refused_and_other_calls_go_on() {
    on_ranks(2, |world| {
        let side = Side::new(&world, |builder| builder.room_for(of(64, RowFormat::BF16, 2)));
        let own = of(64, RowFormat::BF16, MAX_TOKENS);
        let dispatch = |format: &CallFormat| side.ep.dispatch(&side.stream, &side.tokens(format, 1), &side.output());
        for (format, words) in [
            (of(64, RowFormat::FP32, MAX_TOKENS), "256 bytes a row"),
            (of(WIDEST, RowFormat::BF16, MAX_TOKENS), "256 bytes a row"),
            (own.weights(Weights::Combine), "weights is Combine"),
        ] {
            let error = dispatch(&format).unwrap_err();
            assert!(matches!(error, Error::Argument { .. }), "{error}");
            assert!(error.to_string().contains(words) && error.to_string().contains("room_for"), "{error}");
        }
        let handle = side.dispatch(&own, 1);
        let rows = Rows::new(side.rows.view()).dtype(Dtype::Fp32);
        let refused = side.ep.combine(&side.stream, &handle, &rows, &Combined::new(side.out.view())).unwrap_err();
        assert!(refused.to_string().contains("partial rows of this arena have 128"), "{refused}");
        side.combine(&handle, &own, 1);
        world.barrier("all are done").unwrap();
    });
    on_ranks(1, |world| {
        // Calls of few tokens go in as many rounds as the others.
        let side = Side::new(&world, |builder| builder.tuning(|t| t.round_tokens = Some(2)));
        let few = of(64, RowFormat::BF16, 1);
        let handle = side.dispatch(&few, 1);
        side.combine(&handle, &few, 1);
        let format = of(8, RowFormat::FP32, MAX_TOKENS);
        let handle = side.dispatch(&format, 2);
        side.combine(&handle, &format, 2);
        // With in-place output all have the same format.
        let device = test_device(&world);
        let ep = builder(&world, &device).tuning(|t| t.in_place = Some((CAPACITY, 1))).build().unwrap();
        let error = ep.dispatch(&side.stream, &side.tokens(&of(8, RowFormat::BF16, 4), 1), &side.output());
        assert!(error.unwrap_err().to_string().contains("in-place output takes calls of its own format alone"));
        for (change, words) in [
            (of(64, RowFormat::BF16, MAX_TOKENS + 1), "max_tokens is 5: use 1 to 4"),
            (of(64, RowFormat::BF16, 0), "max_tokens is 0: use 1 to 4"),
            (of(0, RowFormat::BF16, 1), "hidden is 0"),
            (of(64, RowFormat::FP8, 1), "hidden is 64"),
            (of(64, RowFormat::BF16, 1).quantize(true), "quantize is true"),
            (of(4, RowFormat::FP32, 1).combine_dtype(Dtype::Bf16), "combine_dtype is bf16: "),
            (of(64, RowFormat::BF16, 1).combine_dtype(Dtype::Fp8E4m3), "combine_dtype is fp8: "),
        ] {
            let error = builder(&world, &device).room_for(change).build().map(drop).unwrap_err().to_string();
            assert!(error.contains("room_for is CallFormat") && error.contains(words), "{error}");
        }
        let in_place = builder(&world, &device).tuning(|t| t.in_place = Some((CAPACITY, 1)));
        let error = in_place.room_for(of(8, RowFormat::BF16, 1)).build().map(drop).unwrap_err().to_string();
        assert!(error.contains("in-place output are of the context's own format"), "{error}");
    });
    nodes::on_nodes(&[1, 1], |world, network| {
        let proxy = nodes::proxy(network, &world, 1500);
        let late = of(64, RowFormat::BF16, 2).weights(Weights::Combine);
        let built = builder(&world, &test_device(&world)).proxy(&proxy).room_for(late).build();
        let error = built.map(drop).unwrap_err().to_string();
        assert!(error.contains("weights: Combine") && error.contains("between nodes all calls"), "{error}");
        let side = Side::new(&world, |builder| builder.proxy(&proxy).timeout(nodes::DEADLINE));
        let error = side.ep.dispatch(&side.stream, &side.tokens(&late, 1), &side.output()).unwrap_err().to_string();
        assert!(error.contains("weights is Combine") && error.contains("between nodes all calls"), "{error}");
        world.barrier("all are done").unwrap();
    });
}

/// One rank's call has another format: every rank's context is closed, by an error that says so where it is found.
fn differ(world: &World, side: &Side, own: &CallFormat, other: &CallFormat, combines: bool) {
    let odd = side.rank == 0;
    let format = if odd && !combines { other } else { own };
    let handle = side.ep.dispatch(&side.stream, &side.tokens(format, 1), &side.output()).unwrap();
    if combines {
        let dtype = if odd { other.combine_dtype } else { own.combine_dtype };
        let out = Combined::new(side.out.view());
        side.ep.combine(&side.stream, &handle, &Rows::new(side.rows.view()).dtype(dtype), &out).unwrap();
    }
    side.stream.synchronize(PATIENCE).unwrap();
    let error = side.ep.check().unwrap_err();
    assert!(error.is_fatal(), "{error}");
    let found = matches!(error, Error::Order { .. });
    let text = error.to_string();
    assert_eq!(found, text.contains("another format here than on rank"), "{text}");
    assert!(found || matches!(error, Error::Timeout { .. }), "{text}");
    let all = world.all_gather("found", &[u8::from(found)]).unwrap();
    assert!(all.iter().any(|found| found == &[1]), "no rank found it: {text}");
}

#[test]
fn ranks_that_differ_in_a_calls_format_find_it() {
    let own = of(64, RowFormat::BF16, MAX_TOKENS);
    let short = Duration::from_millis(700);
    for (other, combines) in [
        (of(32, RowFormat::BF16, MAX_TOKENS), false),
        (of(64, RowFormat::FP16, MAX_TOKENS).combine_dtype(Dtype::Bf16), false),
        (of(64, RowFormat::BF16, 3), false),
        (own.combine_dtype(Dtype::Fp16), true),
    ] {
        on_ranks(3, |world| {
            let side = Side::new(&world, |builder| builder.timeout(short));
            differ(&world, &side, &own, &other, combines);
        });
        for sizes in [&[1, 1][..], &[2, 1], &[1, 3]] {
            nodes::on_nodes(sizes, |world, network| {
                let proxy = nodes::proxy(network, &world, 1500);
                let side = Side::new(&world, |builder| builder.proxy(&proxy).timeout(short).sms(3));
                differ(&world, &side, &own, &other, combines);
            });
        }
    }
}

/// The same of dispatches by an earlier handle: a rank to which a rail passes rows on has no other word of them.
#[test]
fn ranks_that_differ_in_the_format_of_new_rows_find_it() {
    let own = of(64, RowFormat::BF16, MAX_TOKENS);
    let again = |world: &World, side: &Side| {
        let handle = side.dispatch(&own, 1);
        side.stream.synchronize(PATIENCE).unwrap();
        side.ep.check().unwrap();
        let rows = NewRows::new(side.x.view(), TokenCount::Host(MAX_TOKENS));
        let rows = if side.rank == 0 { rows.format(RowFormat::FP16) } else { rows };
        side.ep.dispatch_again(&side.stream, &handle, &rows, &Placed::new(side.rows.view())).unwrap();
        side.stream.synchronize(PATIENCE).unwrap();
        let error = side.ep.check().unwrap_err();
        assert!(error.is_fatal(), "{error}");
        world.barrier("all found it").unwrap();
    };
    let short = Duration::from_millis(700);
    on_ranks(3, |world| again(&world, &Side::new(&world, |builder| builder.timeout(short))));
    for sizes in [&[1, 1][..], &[2, 1], &[1, 3]] {
        nodes::on_nodes(sizes, |world, network| {
            let proxy = nodes::proxy(network, &world, 1500);
            again(&world, &Side::new(&world, |builder| builder.proxy(&proxy).timeout(short).sms(3)));
        });
    }
}

/// What is made room for can be called as it is, whatever the context's own format.
#[test]
fn a_format_that_was_made_room_for_is_taken() {
    let wide = of(WIDEST, RowFormat::BF16, MAX_TOKENS);
    let narrow = of(4, RowFormat::FP32, MAX_TOKENS);
    on_ranks(2, |world| {
        let sums = |builder: AllToAllBuilder| builder.combine_dtype(Dtype::Fp32).room_for(wide).room_for(narrow);
        let side = Side::new(&world, sums);
        for (salt, format) in [wide, narrow].iter().enumerate() {
            let handle = side.dispatch(format, salt);
            side.combine(&handle, format, salt);
        }
        world.barrier("all are done").unwrap();
    });
    // New rows need no room for sums that nobody makes of them.
    on_ranks(1, |world| {
        let side = Side::new(&world, |builder| builder.format(RowFormat::FP32));
        let own = of(64, RowFormat::FP32, MAX_TOKENS).combine_dtype(Dtype::Bf16);
        let handle = side.ep.dispatch(&side.stream, &side.tokens(&own, 1), &side.output()).unwrap();
        let rows = NewRows::new(side.x.view(), TokenCount::Host(MAX_TOKENS)).format(RowFormat::BF16).hidden(WIDEST);
        side.ep.dispatch_again(&side.stream, &handle, &rows, &Placed::new(side.rows.view())).unwrap();
        side.stream.synchronize(PATIENCE).unwrap();
        side.ep.check().unwrap();
    });
}
