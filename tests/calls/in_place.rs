//! Contexts with in-place output, which lies in the arena: peers store rows in their final places. On the CPU device
//! or, with `TOKENYARD_TEST_DEVICE=cuda`, on GPUs, which ranks share where there are fewer.

use crate::rig;

use rig::{EXPERTS, HIDDEN, MAX_TOKENS, PATIENCE, Rig, TOP_K, builder, on_ranks, test_device};
use std::time::Duration;
use tokenyard::*;

const RANKS: usize = 3;

fn own_rig(world: &World, rows: usize, align: usize) -> Rig {
    Rig::with(world, |builder| builder.tuning(|t| t.in_place = Some((rows, align))))
}

fn output(rig: &Rig) -> Output {
    let own = rig.ep.in_place().expect("the context was built with one");
    rig.output(0).layout(own.layout).rows(own.rows).pitch_bytes(own.pitch_bytes).scales(own.scales)
}

/// A dispatch and a combine whose experts return their rows unchanged, in place.
fn round(rig: &Rig, count: usize) -> Result<()> {
    let output = output(rig);
    let handle = rig.ep.dispatch(&rig.stream, &rig.tokens(count), &output)?;
    let rows = Rows::new(output.rows).pitch_bytes(output.pitch_bytes);
    rig.ep.combine(&rig.stream, &handle, &rows, &rig.combined())?;
    rig.stream.synchronize(PATIENCE)?;
    rig.ep.check()
}

fn good_round(rig: &Rig, salt: usize) {
    rig.route_all(salt);
    round(rig, MAX_TOKENS).unwrap();
    rig.expect_own_rows(MAX_TOKENS, salt);
}

#[test]
fn rows_are_stored_in_place_and_no_receive_buffer_is_planned() {
    on_ranks(RANKS, |world| {
        let rig = own_rig(&world, RANKS * MAX_TOKENS * TOP_K + 4 * EXPERTS, 4);
        let bytes = |name: &str| rig.ep.plan().buffers().iter().find(|b| b.name == name).map_or(0, |b| b.bytes);
        assert_eq!((bytes("dispatch rows"), bytes("output rows") > 0), (0, true));
        (0..6).for_each(|salt| good_round(&rig, salt));
        // No tokens anywhere, then all again.
        round(&rig, 0).unwrap();
        rig.out.fill(0xEE).unwrap();
        good_round(&rig, 6);
        world.barrier("done").unwrap();
    });
}

#[test]
fn another_output_and_halves_are_refused_and_the_next_call_works() {
    on_ranks(2, |world| {
        let rig = own_rig(&world, 64, 1);
        let own = output(&rig);
        let others = [
            rig.output(64),
            own.clone().layout(Layout::Contiguous { align: 2, capacity: 64 }),
            own.clone().layout(Layout::Contiguous { align: 1, capacity: 63 }),
            own.clone().pitch_bytes(own.pitch_bytes.unwrap() + 16),
            own.clone().scale_order(ScaleOrder::ColumnMajor),
        ];
        for other in others {
            let why = rig.ep.dispatch(&rig.stream, &rig.tokens(1), &other).err().map(|why| why.to_string());
            assert!(
                why.as_deref().is_some_and(|why| why.contains("give the output that in_place() returns")),
                "{why:?}"
            );
        }
        let why = rig.ep.dispatch_send(&rig.stream, &rig.tokens(1)).err().map(|why| why.to_string());
        assert!(why.as_deref().is_some_and(|why| why.contains("a call has no halves")), "{why:?}");
        good_round(&rig, 1);
        assert_eq!(Rig::new(&world).ep.in_place(), None);
        world.barrier("done").unwrap();
    });
}

#[test]
fn an_output_that_is_too_small_is_known_before_anything_is_stored_there() {
    on_ranks(RANKS, |world| {
        // All tokens go to two experts of rank 0, which has room for one fewer.
        let rig = own_rig(&world, RANKS * MAX_TOKENS * TOP_K - 1, 1);
        good_round(&rig, 1);
        let own = output(&rig);
        rig.route(&[[0, 1]; MAX_TOKENS], 2);
        rig.stream.fill(&own.rows, 0xAB).unwrap();
        let error = round(&rig, MAX_TOKENS).unwrap_err();
        match (rig.rank, &error) {
            (0, Error::Capacity { needed, given, .. }) => assert_eq!((*needed, *given), (24, 23)),
            (0, _) => panic!("{error}"),
            // Its sums are not whole.
            (_, Error::Incomplete { .. }) => {}
            _ => panic!("{error}"),
        }
        let copy = rig.ep.device().alloc(own.rows.len()).unwrap();
        rig.stream.copy(&copy.view(), &own.rows).unwrap();
        rig.stream.synchronize(PATIENCE).unwrap();
        let mut seen = vec![0; own.rows.len()];
        copy.read(0, &mut seen).unwrap();
        assert!(seen.iter().all(|byte| *byte == 0xAB), "something was stored in an output without room");
        // Rank 0 has two records of it: the capacity, and its own incomplete sums.
        while rig.ep.check().is_err() {}
        world.barrier("all are notified").unwrap();
        good_round(&rig, 3);
        world.barrier("done").unwrap();
    });
}

#[test]
fn bad_routing_sends_nothing_and_the_others_go_on() {
    on_ranks(RANKS, |world| {
        let rig = own_rig(&world, 64, 1);
        good_round(&rig, 1);
        rig.route_all(2);
        if rig.rank == 1 {
            rig.route(&[[0, 1], [2, 3], [4, 4], [5, 6]], 2);
        }
        let outcome = round(&rig, MAX_TOKENS);
        if rig.rank == 1 {
            assert!(matches!(outcome, Err(Error::Routing { .. })), "{outcome:?}");
        } else {
            outcome.unwrap();
            rig.expect_own_rows(MAX_TOKENS, 2);
        }
        good_round(&rig, 3);
        world.barrier("done").unwrap();
    });
}

/// Sums of so many aligned rows would wrap, and rows go beyond the output.
#[test]
fn starts_that_are_aligned_beyond_int32_are_refused_in_any_output() {
    on_ranks(1, |world| {
        let rig = Rig::new(&world);
        let output = rig.output(8).layout(Layout::Contiguous { align: 1 << 29, capacity: 8 });
        let why = rig.ep.dispatch(&rig.stream, &rig.tokens(1), &output).err().map(|why| why.to_string());
        assert!(why.as_deref().is_some_and(|why| why.contains("counted in int32")), "{why:?}");
        rig.good_round(1);
    });
}

#[test]
fn what_cannot_have_one_is_refused_with_the_reason() {
    let why = |change: &dyn Fn(AllToAllBuilder) -> AllToAllBuilder| {
        let world = World::threads(1).unwrap().remove(0);
        let device = test_device(&world);
        let built = change(builder(&world, &device).tuning(|t| t.in_place = Some((64, 1)))).build();
        built.err().map(|why| why.to_string()).unwrap_or_default()
    };
    let no_rows = why(&|builder| builder.tuning(|t| t.in_place = Some((0, 1))));
    assert!(no_rows.contains("in_place rows is 0"), "{no_rows}");
    let no_align = why(&|builder| builder.tuning(|t| t.in_place = Some((64, 0))));
    assert!(no_align.contains("in_place align is 0"), "{no_align}");
    let wide = why(&|builder| builder.tuning(|t| t.in_place = Some((64, 1 << 30))));
    assert!(wide.contains("in_place align") && wide.contains("counted in int32"), "{wide}");
    let rounds = why(&|builder| builder.tuning(|t| t.round_tokens = Some(2)));
    assert!(rounds.contains("leave round_tokens out"), "{rounds}");
    let quantised = why(&|b| b.hidden(2 * HIDDEN).format(RowFormat::FP8_F32).quantize(true));
    assert!(quantised.contains("quantised"), "{quantised}");
    let whole = why(&|builder| builder.timeout(Duration::from_secs(5)));
    assert!(whole.is_empty(), "{whole}");
    // Ranks that differ in it do not build.
    on_ranks(2, |world| {
        let device = test_device(&world);
        let align = 1 + world.rank().index();
        let why = builder(&world, &device)
            .tuning(|t| t.in_place = Some((64, align)))
            .build()
            .err()
            .map(|why| why.to_string());
        assert!(why.as_deref().is_some_and(|why| why.contains("in_place=64:1")), "{why:?}");
    });
}
