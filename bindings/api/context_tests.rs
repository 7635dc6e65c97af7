//! Calls with some launches that the driver accepts and a next one that it refuses.

use super::*;
use crate::bindings::api::{RowFormat, TokenCount};
use std::cell::Cell;

const ROUNDS: usize = 3;
const PATIENCE: Duration = Duration::from_secs(10);
const ALL: usize = usize::MAX;

thread_local! {
    /// How many more launches of this thread's calls the driver accepts.
    static TAKEN: Cell<usize> = const { Cell::new(ALL) };
}

/// Stands in for the driver, which refuses launches at will.
pub(super) fn launched() -> Result<()> {
    match TAKEN.get() {
        ALL => Ok(()),
        0 => Err(Error::device("ty_test could not be launched", "wait")),
        left => {
            TAKEN.set(left - 1);
            Ok(())
        }
    }
}

/// Makes a call; the driver accepts `launches` launches of it.
fn taking<T>(launches: usize, call: impl FnOnce() -> T) -> T {
    TAKEN.set(launches);
    let outcome = call();
    TAKEN.set(ALL);
    outcome
}

/// A world of one rank, whose calls go in three rounds.
struct Alone {
    ep: AllToAll,
    stream: Stream,
    input: Tokens,
    output: Output,
    out: Combined,
}

impl Alone {
    fn new() -> Alone {
        let (world, device) = (World::threads(1).unwrap().remove(0), Device::cpu().unwrap());
        let ep = AllToAll::builder(&world).device(device.clone()).hidden(8).experts(2).top_k(1);
        let ep = ep.max_tokens_per_rank(ROUNDS).tuning(|tuning| tuning.round_tokens = Some(1)).timeout(PATIENCE);
        let view = |bytes: usize| {
            let buffer = device.alloc(bytes).unwrap();
            buffer.fill(0).unwrap();
            buffer.view()
        };
        let input = Tokens::new(view(16 * ROUNDS), view(4 * ROUNDS), TokenCount::Host(ROUNDS));
        let layout = Layout::Contiguous { align: 1, capacity: ROUNDS };
        let (ep, stream) = (ep.build().unwrap(), device.new_stream().unwrap());
        assert_eq!(ep.rounds(), ROUNDS);
        let (input, output) = (input.topk_weight(view(4 * ROUNDS)), Output::new(layout, view(16 * ROUNDS), view(8)));
        Alone { ep, stream, input, output, out: Combined::new(view(16 * ROUNDS)) }
    }

    /// Makes the calls of number `call`; the driver accepts `launches` launches of one of them.
    fn call(&self, call: usize, launches: usize) -> Result<()> {
        let Alone { ep, stream, input, output, out } = self;
        let rows = Rows::new(output.rows.clone());
        if call == 0 {
            return taking(launches, || ep.dispatch(stream, input, output)).map(drop);
        }
        if call == 1 {
            let sent = ep.dispatch_send(stream, input)?;
            return match taking(launches, || ep.dispatch_recv(stream, sent, output)) {
                Err(refused) if !refused.error.is_fatal() => {
                    ep.dispatch_recv(stream, *refused.given, output)?;
                    Err(refused.error)
                }
                outcome => Ok(outcome.map(drop)?),
            };
        }
        let handle = ep.dispatch(stream, input, output)?;
        if call == 2 {
            return taking(launches, || ep.combine(stream, &handle, &rows, out));
        }
        let sent = ep.combine_send(stream, &handle, &rows)?;
        match taking(launches, || ep.combine_recv(stream, sent, out)) {
            Err(refused) if !refused.error.is_fatal() => {
                ep.combine_recv(stream, *refused.given, out)?;
                Err(refused.error)
            }
            outcome => Ok(outcome?),
        }
    }

    fn good_calls(&self) {
        (0..CALLS).for_each(|call| self.call(call, ALL).unwrap());
        self.stream.synchronize(PATIENCE).unwrap();
        self.ep.check().unwrap();
    }
}

/// Fused and received dispatches and combines.
const CALLS: usize = 4;

#[test]
fn a_call_that_is_half_enqueued_closes_its_context() {
    for (call, launches) in (0..CALLS).flat_map(|call| (1..ROUNDS).map(move |launches| (call, launches))) {
        let rank = Alone::new();
        rank.good_calls();
        let before = rank.ep.stats();
        let error = rank.call(call, launches).unwrap_err();
        assert!(error.is_fatal(), "call {call}: {error}");
        let (text, launch) = (error.to_string(), format!("(launch {} of the 3 of a call", launches + 1));
        assert!(text.contains("ty_test could not be launched") && text.contains(&launch), "{text}");
        assert!(text.contains("build a new context on all ranks"), "{text}");
        let closed = [rank.ep.check(), rank.call(0, ALL), rank.ep.barrier(&rank.stream)];
        closed.into_iter().for_each(|later| assert_eq!(later, Err(error.clone()), "call {call}"));
        assert_eq!(rank.ep.stats().errors, before.errors + 4);
        rank.stream.synchronize(PATIENCE).unwrap();
    }
}

#[test]
fn a_call_of_which_nothing_was_enqueued_leaves_the_context_open() {
    for call in 0..CALLS {
        let rank = Alone::new();
        rank.good_calls();
        let error = rank.call(call, 0).unwrap_err();
        assert_eq!(error, Error::device("ty_test could not be launched", "wait"));
        rank.good_calls();
    }
}

#[test]
fn a_call_that_is_half_recorded_leaves_the_context_open() {
    let rank = Alone::new();
    rank.good_calls();
    rank.stream.begin_capture().unwrap();
    let error = rank.call(0, 1).unwrap_err();
    drop(rank.stream.end_capture().unwrap());
    assert!(!error.is_fatal(), "{error}");
    rank.good_calls();
}

/// LL rows, of which a word has arrived once it is not 0, lie where no tagged row is ever left.
#[test]
fn ll_rows_of_small_calls_lie_apart_from_tagged_rows() {
    let world = World::threads(1).unwrap().remove(0);
    let builder = AllToAll::builder(&world).hidden(64).experts(2).top_k(2).max_tokens_per_rank(9);
    let few = CallFormat::new(64, RowFormat::BF16, 4);
    let ep = builder.room_for(few).tuning(|tuning| (tuning.ll_tokens, tuning.payload_words) = (Some(5), 3));
    let ep = ep.build().unwrap();
    let regions = |format: &CallFormat| ep.formats.of(format, &ep.plan).unwrap().context.regions;
    let (own, small) = (ep.own_kind().context.regions, regions(&few));
    assert_eq!(ep.plan.few_partials.map(|region| region.offset), Some(small.partials.offset));
    assert!(small.partials.offset != own.partials.offset && small.partial_tags.source_stride == 0);
    assert!(own.partials.offset == ep.plan.regions.partials.offset && own.partial_tags.source_stride > 0);
    let with = Payload { view: ep.device().alloc(64).unwrap().view(), words: 3, gathered: false };
    let payload = Some(with.size(false, &ep.own_kind().shape).unwrap());
    let paid = regions(&CallFormat { payload, ..few });
    assert!(paid.partials.offset == small.partials.offset && paid.partial_tags.source_stride == 0);
    // More tokens than the room was made for have tagged rows.
    assert_eq!(regions(&CallFormat { max_tokens: 5, ..few }).partials.offset, own.partials.offset);
}

/// Calls of few tokens go in the rounds of the others, which are as long.
#[test]
fn rounds_are_as_long_in_calls_of_few_tokens() {
    let world = World::threads(1).unwrap().remove(0);
    let lengths = |round_tokens| {
        let builder = AllToAll::builder(&world).hidden(64).experts(2).top_k(2).max_tokens_per_rank(4);
        let ep = builder.tuning(|tuning| tuning.round_tokens = round_tokens).build().unwrap();
        [1, 3, 4].map(|tokens| {
            let kind = ep.formats.of(&CallFormat::new(64, RowFormat::BF16, tokens), &ep.plan).unwrap();
            (kind.context.rounds, kind.context.round_tokens, kind.context.max_tokens)
        })
    };
    assert_eq!(lengths(Some(2)), [(2, 2, 1), (2, 2, 3), (2, 2, 4)]);
    assert_eq!(lengths(None), [(1, 1, 1), (1, 3, 3), (1, 4, 4)]);
}
