//! The side payload of dispatch: each output row has the words of its token, with their bits, however the call is made;
//! words of rows that no token fills are as these rows are; and what cannot be asked for is refused.

use crate::rig;

use rig::{EXPERTS, HIDDEN, MAX_TOKENS, PATIENCE, Rig, TOP_K, builder, nodes, on_ranks, test_device};
use std::time::Duration;
use tokenyard::*;

/// More than a lane each.
const MOST: usize = 40;
/// Rows of the largest output.
const ROWS: usize = 64;
/// Bytes of a row of the context's own format, and of the largest.
const ROW_BYTES: usize = 2 * HIDDEN;
const LARGEST: usize = 4 * HIDDEN;
const POISON: u32 = 0xEEEE_EEEE;

/// Bits beside a token's row: any, those of -0 and of quiet and signalling NaNs among them.
fn word(source: usize, token: usize, j: usize, salt: usize) -> u32 {
    let number = (source * 104_729 + token * 1_299_709 + j * 15_485_863 + salt * 7919) as u32;
    let mixed = number.wrapping_mul(2_654_435_769);
    match (source + token + j + salt) % 5 {
        0 => 0x8000_0000,
        1 => 0x7fc0_0001 + mixed % 1000,
        2 => 0xff80_0001 + mixed % 1000,
        _ => mixed,
    }
}

/// A token's row, of up to `LARGEST` bytes.
fn row(source: usize, token: usize, salt: usize, bytes: usize) -> Vec<u8> {
    [Rig::row_of(source, token, salt), Rig::row_of(source, token, salt + 1)].concat()[..bytes].to_vec()
}

/// Choices of a rank's tokens: ranks have different numbers of tokens, and one has none. Some tokens have both choices
/// at one rank, and some have one choice.
fn choices_of(rank: usize, salt: usize) -> Vec<[i32; TOP_K]> {
    let choice = |token: usize| {
        let first = (rank * 5 + token * 3 + salt) % EXPERTS;
        match (token + salt) % 4 {
            0 => [first as i32, -1],
            1 => [first as i32, (first ^ 1) as i32],
            _ => [first as i32, ((first + 3) % EXPERTS) as i32],
        }
    };
    (0..(rank + salt + 2) % (MAX_TOKENS + 1)).map(choice).collect()
}

fn numbers(buffer: &DeviceBuffer) -> Vec<u32> {
    let mut bytes = vec![0; buffer.len()];
    buffer.read(0, &mut bytes).unwrap();
    bytes.as_chunks::<4>().0.iter().map(|word| u32::from_ne_bytes(*word)).collect()
}

/// What a rank's calls read and write beside the rig's own memory.
struct Beside<'a> {
    rig: &'a Rig,
    ranks: usize,
    x: DeviceBuffer,
    given: DeviceBuffer,
    rows: DeviceBuffer,
    words: DeviceBuffer,
    source: DeviceBuffer,
    row_count: DeviceBuffer,
}

impl<'a> Beside<'a> {
    fn new(rig: &'a Rig, world: &World) -> Beside<'a> {
        let alloc = |bytes: usize| rig.ep.device().alloc(bytes).unwrap();
        let beside = Beside {
            rig,
            ranks: world.size(),
            x: alloc(MAX_TOKENS * LARGEST),
            given: alloc(MAX_TOKENS * MOST * 4),
            rows: alloc(ROWS * LARGEST),
            words: alloc((ROWS + 1) * MOST * 4),
            source: alloc(ROWS * 8),
            row_count: alloc(4),
        };
        world.barrier("buffers").unwrap();
        beside
    }

    fn layouts(&self) -> [Layout; 3] {
        [
            Layout::Contiguous { align: 4, capacity: ROWS },
            Layout::Masked { per_expert: MAX_TOKENS * self.ranks },
            Layout::Token { capacity: ROWS },
        ]
    }

    /// Rows and words of so many tokens; untouched outputs.
    fn put(&self, tokens: usize, bytes: usize, words: usize, salt: usize) -> Option<TokenPayload> {
        let rank = self.rig.rank;
        let rows: Vec<u8> = (0..tokens).flat_map(|token| row(rank, token, salt, bytes)).collect();
        self.x.write(0, &rows).unwrap();
        let given = (0..tokens).flat_map(|token| (0..words).map(move |j| word(rank, token, j, salt)));
        let given: Vec<u8> = given.flat_map(u32::to_ne_bytes).collect();
        self.given.write(0, &given).unwrap();
        self.rows.fill(0xEE).unwrap();
        self.words.fill(0xEE).unwrap();
        (words > 0).then(|| TokenPayload { view: self.given.view(), words })
    }

    fn tokens(&self, count: usize, payload: Option<TokenPayload>) -> Tokens {
        self.rig.tokens(count).x(self.x.view()).pitch_bytes(None).payload(payload)
    }

    /// `words` as the tokens have.
    fn output(&self, layout: Layout, words: usize) -> Output {
        Output::new(layout, self.rows.view(), self.rig.expert_count.view())
            .source(self.source.view())
            .row_count(self.row_count.view())
            .zero_padding(true)
            .payload((words > 0).then(|| self.words.view()))
    }

    /// Every row has its token's row and words; padding is 0 where it is `zeroed`, and what is left is untouched.
    fn expect(&self, layout: Layout, (bytes, words, salt): (usize, usize, usize), zeroed: bool, what: &str) {
        let (rows, source, used) = (numbers(&self.rows), numbers(&self.source), numbers(&self.row_count)[0] as usize);
        let count = layout.rows(self.rig.ep.placement().local_experts(self.rig.rank).len()).unwrap();
        let padded = matches!(layout, Layout::Contiguous { .. }) && zeroed;
        let mut wanted = vec![POISON; (ROWS + 1) * MOST];
        let mut filled = 0;
        for (at, name) in source.as_chunks::<2>().0.iter().enumerate().take(count) {
            let seen: Vec<u8> =
                rows[at * bytes / 4..][..bytes / 4].iter().flat_map(|word| word.to_ne_bytes()).collect();
            let there = (name[0] as i32) >= 0;
            let rest = if padded && at < used { 0 } else { POISON };
            let (from, token) = (name[0] as usize, name[1] as usize);
            let row = if there { row(from, token, salt, bytes) } else { rest.to_ne_bytes().repeat(bytes / 4) };
            assert_eq!(seen, row, "rank {}, row {at}, {what}", self.rig.rank);
            for j in 0..words {
                wanted[at * words + j] = if there { word(from, token, j, salt) } else { rest };
            }
            filled += usize::from(there);
        }
        let seen = numbers(&self.words);
        let wrong = seen.iter().zip(&wanted).position(|(seen, wanted)| seen != wanted);
        let at = wrong.map(|at| (at, format!("{:#x} in place of {:#x}", seen[at], wanted[at])));
        assert_eq!(at, None, "rank {}, {words} words, {layout:?}, {filled} rows, {what}", self.rig.rank);
    }

    fn settle(&self, what: &str) {
        self.rig.stream.synchronize(PATIENCE).unwrap();
        self.rig.ep.check().unwrap_or_else(|error| panic!("{what}: {error}"));
    }
}

/// Dispatches with payloads of several sizes and without: fused, in halves, with counts first, and in a graph; in every
/// layout; and dispatches by their handles with other words.
fn bring(world: &World, rig: &Rig) {
    let beside = Beside::new(rig, world);
    let stream = &rig.stream;
    for salt in 0..3 {
        let choices = choices_of(rig.rank, salt);
        let count = choices.len();
        rig.route(&choices, salt);
        for (number, words) in [1, 0, 5, MOST, 33].into_iter().enumerate() {
            for way in 0..4 {
                let mut layout = beside.layouts()[(number + way + salt) % 3];
                let what = format!("salt {salt}, way {way}, {words} words");
                let mut new = salt + 10 * number;
                let tokens = beside.tokens(count, beside.put(count, ROW_BYTES, words, new));
                let handle = match way {
                    0 => rig.ep.dispatch(stream, &tokens, &beside.output(layout, words)).unwrap(),
                    1 => {
                        let sent = rig.ep.dispatch_send(stream, &tokens).unwrap();
                        rig.ep.dispatch_recv(stream, sent, &beside.output(layout, words)).unwrap()
                    }
                    2 => {
                        let sent = rig.ep.dispatch_send_counts(stream, &tokens).unwrap();
                        layout = rig.ep.counts(&sent, PATIENCE).unwrap().fit(layout);
                        rig.ep.dispatch_recv(stream, sent, &beside.output(layout, words)).unwrap()
                    }
                    _ => {
                        stream.begin_capture().unwrap();
                        let captured = rig.ep.dispatch(stream, &tokens, &beside.output(layout, words));
                        let graph = stream.end_capture().unwrap();
                        graph.launch(stream).unwrap();
                        beside.settle(&what);
                        beside.expect(layout, (ROW_BYTES, words, new), true, &what);
                        new += 100;
                        drop(beside.put(count, ROW_BYTES, words, new));
                        graph.launch(stream).unwrap();
                        captured.unwrap()
                    }
                };
                beside.settle(&what);
                beside.expect(layout, (ROW_BYTES, words, new), true, &what);
                if way == 3 {
                    continue;
                }
                if !matches!(layout, Layout::Token { .. }) {
                    let rows = Rows::new(beside.rows.view());
                    rig.ep.combine(stream, &handle, &rows, &rig.combined()).unwrap();
                    beside.settle(&what);
                    for (token, choices) in choices.iter().enumerate() {
                        let factor = if choices[1] < 0 { 0.5 } else { 1.0 };
                        assert_eq!(rig.sum(token), rig.scaled_row(token, new, factor), "{what}, {token}");
                    }
                }
                for (split, words) in [(false, 2), (true, 0), (true, 36)] {
                    let (new, what) = (new + 1000 + words, format!("{what}, again: {words} words"));
                    let tokens = NewRows::new(beside.x.view(), TokenCount::Host(count));
                    let tokens = tokens.payload(beside.put(count, ROW_BYTES, words, new));
                    let placed = Placed::new(beside.rows.view()).payload((words > 0).then(|| beside.words.view()));
                    if split {
                        let sent = rig.ep.dispatch_again_send(stream, &handle, &tokens).unwrap();
                        rig.ep.dispatch_again_recv(stream, sent, &placed).unwrap();
                    } else {
                        rig.ep.dispatch_again(stream, &handle, &tokens, &placed).unwrap();
                    }
                    beside.settle(&what);
                    beside.expect(layout, (ROW_BYTES, words, new), false, &what);
                }
            }
        }
    }
}

fn with_room(builder: AllToAllBuilder) -> AllToAllBuilder {
    builder.tuning(|tuning| tuning.dispatch_payload_words = MOST)
}

#[test]
fn every_row_has_the_words_of_its_token() {
    for (ranks, compact) in [(1, false), (2, true), (4, false), (3, true)] {
        on_ranks(ranks, |world| {
            let rig = Rig::with(&world, |b| with_room(b).tuning(|t| t.compact_handles = Some(compact)));
            bring(&world, &rig);
            world.barrier("all are done").unwrap();
        });
    }
    on_ranks(2, |world| bring(&world, &Rig::with(&world, |b| with_room(b).tuning(|t| t.round_tokens = Some(1)))));
    // Dedicated senders: few blocks, many ranks.
    on_ranks(6, |world| bring(&world, &Rig::with(&world, |b| with_room(b).sms(3))));
}

#[test]
fn words_go_between_nodes_with_their_rows() {
    for (sizes, chunk_rows, round_tokens) in [(&[1, 1][..], 1, 4), (&[2, 2], 3, 4), (&[1, 2, 1], 2, 4), (&[2, 1], 2, 1)]
    {
        nodes::on_nodes(sizes, |world, network| {
            let proxy = nodes::proxy(network, &world, 1500);
            let rig = Rig::with(&world, |builder| {
                let builder = with_room(builder).proxy(&proxy).timeout(nodes::DEADLINE).sms(3);
                builder.tuning(|t| (t.chunk_rows, t.round_tokens) = (Some(chunk_rows), Some(round_tokens)))
            });
            bring(&world, &rig);
            world.barrier("all are done").unwrap();
        });
    }
}

/// Calls of three formats, one after the other, with and without words.
fn alternate(world: &World, rig: &Rig) {
    let beside = Beside::new(rig, world);
    let formats = [
        (CallFormat::new(HIDDEN, RowFormat::BF16, MAX_TOKENS), ROW_BYTES),
        (CallFormat::new(HIDDEN, RowFormat::FP32, MAX_TOKENS), LARGEST),
        (CallFormat::new(HIDDEN / 2, RowFormat::BF16, MAX_TOKENS), HIDDEN),
    ];
    for (call, words) in [3, 0, 40, 1, 0, 0, 17, 2, 40, 5].into_iter().enumerate() {
        let ((format, bytes), layout) = (formats[call % 3], beside.layouts()[call / 2 % 3]);
        let (choices, what) = (choices_of(rig.rank, call), format!("call {call} of {format:?}"));
        rig.route(&choices, call);
        let tokens = beside.tokens(choices.len(), beside.put(choices.len(), bytes, words, call)).of(&format);
        drop(rig.ep.dispatch(&rig.stream, &tokens, &beside.output(layout, words)).unwrap());
        beside.settle(&what);
        beside.expect(layout, (bytes, words, call), true, &what);
    }
}

#[test]
fn formats_and_words_alternate_in_one_context() {
    let room =
        |builder: AllToAllBuilder| with_room(builder).room_for(CallFormat::new(HIDDEN, RowFormat::FP32, MAX_TOKENS));
    on_ranks(3, |world| alternate(&world, &Rig::with(&world, room)));
    nodes::on_nodes(&[2, 1], |world, network| {
        let proxy = nodes::proxy(network, &world, 1500);
        let rig = Rig::with(&world, |builder| {
            room(builder).proxy(&proxy).timeout(nodes::DEADLINE).sms(3).tuning(|t| t.chunk_rows = Some(2))
        });
        alternate(&world, &rig);
        world.barrier("all are done").unwrap();
    });
}

#[test]
fn words_without_room_or_place_are_refused() {
    let world = World::threads(1).unwrap().remove(0);
    let device = test_device(&world);
    let room = |words| format!("this context has room for {words}; build it with dispatch_payload_words");
    let none = Rig::new(&world);
    none.route_all(1);
    let payload = |view: View, words| TokenPayload { view, words };
    let tokens = none.tokens(MAX_TOKENS).payload(payload(none.x.view(), 1));
    let error = none.ep.dispatch(&none.stream, &tokens, &none.output(none.capacity)).map(drop).unwrap_err().to_string();
    assert!(error.contains("payload is 1 words of a token") && error.contains(&room(0)), "{error}");
    let handle = none.ep.dispatch(&none.stream, &none.tokens(MAX_TOKENS), &none.output(none.capacity)).unwrap();
    let rows = NewRows::new(none.x.view(), TokenCount::Host(MAX_TOKENS)).payload(payload(none.x.view(), 1));
    let placed = Placed::new(none.rows.view());
    let error = none.ep.dispatch_again(&none.stream, &handle, &rows, &placed).unwrap_err().to_string();
    assert!(error.contains("payload is 1 words of a token") && error.contains(&room(0)), "{error}");
    none.stream.synchronize(PATIENCE).unwrap();
    none.ep.check().unwrap();

    let rig = Rig::with(&world, with_room);
    rig.route_all(1);
    let send = |tokens: &Tokens, output: &Output| rig.ep.dispatch(&rig.stream, tokens, output).map(drop);
    let output = rig.output(rig.capacity);
    for words in [MOST + 1, 1 << 32, 1 << 62, 1 << 63, usize::MAX] {
        let tokens = rig.tokens(MAX_TOKENS).payload(payload(rig.x.view(), words));
        let error = send(&tokens, &output).unwrap_err();
        assert!(matches!(error, Error::Argument { name: "payload", .. }), "{error}");
        assert!(error.to_string().contains(&room(MOST)), "{error}");
    }
    let error = send(&rig.tokens(MAX_TOKENS).payload(payload(rig.x.view(), 0)), &output).unwrap_err();
    assert!(matches!(error, Error::Argument { name: "words of payload", .. }), "{error}");
    // A view that is too small, words that have no place, and a place for no words.
    let short = rig.x.slice(0, 4 * MAX_TOKENS * 2 - 4).unwrap();
    let tokens = rig.tokens(MAX_TOKENS).payload(payload(short, 2));
    let error = send(&tokens, &output).unwrap_err().to_string();
    assert!(error.contains("payload is 28 bytes") && error.contains("32 bytes are needed"), "{error}");
    let words = rig.ep.device().alloc(4 * rig.capacity * 2).unwrap();
    let tokens = rig.tokens(MAX_TOKENS).payload(payload(rig.x.view(), 2));
    let error = send(&tokens, &output).unwrap_err().to_string();
    assert!(error.contains("payload of output is missing"), "{error}");
    let small = words.slice(0, words.len() - 4).unwrap();
    let error = send(&tokens, &output.clone().payload(small)).unwrap_err().to_string();
    assert!(error.contains("payload of output is") && error.contains("bytes are needed"), "{error}");
    let error = send(&rig.tokens(MAX_TOKENS), &output.clone().payload(words.view())).unwrap_err().to_string();
    assert!(error.contains("payload of output is given"), "{error}");
    send(&tokens, &output.payload(words.view())).unwrap();
    rig.stream.synchronize(PATIENCE).unwrap();
    rig.ep.check().unwrap();

    let built = |change: &dyn Fn(&mut Tuning)| builder(&world, &device).tuning(change).build().map(drop);
    let error = built(&|t| t.dispatch_payload_words = 4097).unwrap_err().to_string();
    assert!(error.contains("dispatch_payload_words is 4097"), "{error}");
    let error = built(&|t| (t.dispatch_payload_words, t.in_place) = (1, Some((64, 1)))).unwrap_err().to_string();
    assert!(error.contains("in_place is") && error.contains("leave dispatch_payload_words out"), "{error}");
    // The two payloads are apart: sums of any kind go with words in dispatch.
    let both = |t: &mut Tuning| (t.dispatch_payload_words, t.partial) = (1, Partial::Fp32);
    built(&both).unwrap();
}

#[test]
fn ranks_that_differ_in_their_words_find_it() {
    on_ranks(2, |world| {
        let rig = Rig::with(&world, |builder| with_room(builder).timeout(Duration::from_millis(900)));
        rig.route_all(1);
        let words = rig.ep.device().alloc(4 * rig.capacity * MOST).unwrap();
        let given = rig.ep.device().alloc(4 * MAX_TOKENS * MOST).unwrap();
        world.barrier("buffers").unwrap();
        let tokens = rig.tokens(MAX_TOKENS).payload(TokenPayload { view: given.view(), words: 1 + rig.rank });
        let output = rig.output(rig.capacity).payload(words.view());
        drop(rig.ep.dispatch(&rig.stream, &tokens, &output).unwrap());
        rig.stream.synchronize(PATIENCE).unwrap();
        // A rank that finds it first closes its context, and may leave the other without metadata.
        let error = rig.ep.check().unwrap_err();
        let found = error.to_string().contains("another format here than on rank");
        let both = world.all_gather("both ended", &[u8::from(found)]).unwrap();
        assert!(found || matches!(error, Error::Timeout { .. }), "{error}");
        assert!(both.iter().any(|found| found == &[1]), "{error}");
    });
}
