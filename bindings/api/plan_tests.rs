//! Where buffers lie, how large they are, and what messages look like.

use super::*;
use crate::base::Rank;

fn v3(tokens: usize) -> PlanInput {
    PlanInput {
        nodes: Nodes::consecutive(&[8]).unwrap(),
        max_tokens: tokens,
        round_tokens: None,
        top_k: 8,
        row_bytes: 7168,
        scale_words: 56,
        other_slot_bytes: 0,
        slot_payload_bytes: 0,
        partial_bytes: 14336,
        max_local_experts: 32,
        weights_with_dispatch: false,
        weights_with_combine: true,
        nics: 1,
        chunk_rows: None,
        receives: usize::MAX,
        double_buffer_bytes: 256 << 20,
        ll_tokens: 256,
        few_tokens: 0,
        slot_of_rank: false,
        in_place_rows: 0,
    }
}

fn v3_of_nodes(tokens: usize, sizes: &[usize]) -> PlanInput {
    let nodes = Nodes::consecutive(sizes).unwrap();
    PlanInput { nodes, max_local_experts: 4, weights_with_dispatch: true, weights_with_combine: false, ..v3(tokens) }
}

#[test]
fn words_beside_dispatched_rows_lengthen_their_slots_and_messages_alone() {
    let plain = v3_of_nodes(128, &[4, 4]);
    let [plain, paid] =
        [plain.clone(), PlanInput { slot_payload_bytes: 32, ..plain }].map(|input| Plan::new(&input).unwrap());
    let row = 7168 + 4 * 56;
    assert_eq!([plain.slot_bytes, paid.slot_bytes], [row, row + 32]);
    assert_eq!(
        [&plain, &paid].map(|plan| plan.regions.rows.source_stride),
        [row, row + 32].map(|bytes| 128 * bytes as u64)
    );
    assert_eq!(plain.regions.partials.source_stride, paid.regions.partials.source_stride);
    let row_bytes =
        |plan: &Plan, direction: Direction| plan.wire.as_ref().unwrap().1[direction.index()].row_bytes as usize;
    assert_eq!([&plain, &paid].map(|plan| row_bytes(plan, Direction::Dispatch)), [row, row + 32]);
    assert_eq!(row_bytes(&plain, Direction::Combine), row_bytes(&paid, Direction::Combine));
    // Calls without words have messages of shorter rows.
    let call = CallBytes { slot_bytes: row, partial_bytes: 14336, weights_with_dispatch: true };
    assert_eq!(paid.message_of(Direction::Dispatch, call).unwrap().row_bytes as usize, row);
}

#[test]
fn ep64_arenas_stay_within_the_limits_of_the_design() {
    let plan = Plan::new(&v3_of_nodes(128, &[8; 8])).unwrap();
    assert!(plan.arena_bytes() <= 256 << 20, "{} MiB", plan.arena_bytes() >> 20);
    assert_ne!(plan.regions.dispatch_free.source_stride, 0, "twice they would not fit");
}

#[test]
fn rows_are_kept_twice_where_the_arena_stays_small() {
    let input = v3_of_nodes(128, &[8; 4]);
    let twice = Plan::new(&input).unwrap();
    let once = Plan::new(&PlanInput { double_buffer_bytes: twice.arena_bytes() - 1, ..input.clone() }).unwrap();
    assert!(twice.arena_bytes() <= 256 << 20 && twice.arena_bytes() > once.arena_bytes() + (64 << 20));
    let flags = [&twice, &once].map(|plan| plan.regions.dispatch_free.source_stride != 0);
    assert_eq!(flags, [false, true]);
    assert!(twice.regions.rows.parity_stride != 0 && once.regions.rows.parity_stride == 0);
    assert!(twice.explain().contains("2 x (32 ranks") && once.explain().contains("1 x (32 ranks"));
}

#[test]
fn large_calls_over_nodes_go_in_rounds() {
    let input = v3_of_nodes(4096, &[8; 8]);
    let plan = Plan::new(&input).unwrap();
    assert!(plan.arena_bytes() <= 2 << 30, "{} MiB", plan.arena_bytes() >> 20);
    assert!(plan.rounds > 1 && plan.rounds * plan.round_tokens >= 4096);
    assert!(plan.explain().contains(&format!("{} rounds of {} tokens", plan.rounds, plan.round_tokens)));
    let whole = Plan::new(&PlanInput { round_tokens: Some(4096), ..input }).unwrap();
    assert!(whole.rounds == 1 && whole.arena_bytes() > 4 << 30);
}

#[test]
fn chunks_are_larger_where_the_network_has_few_receives() {
    let input = v3_of_nodes(256, &[8; 8]);
    let rank = Rank(9);
    let of = |input: &PlanInput| Plan::new(input).unwrap().wire.unwrap().0.receives(rank);
    let unbounded = of(&input);
    // 7 peers, 2 epochs: head and rows of dispatch, rows of combine, the barrier; no weights.
    let least = 2 * 7 * (2 + 1 + 1);
    for receives in [unbounded as usize - 1, 300, 100, 60] {
        assert!((least..=receives as u64).contains(&of(&PlanInput { receives, ..input.clone() })), "{receives}");
    }
    // Too few receives give the fewest chunks, which the proxy refuses; given chunk_rows are kept.
    assert_eq!(of(&PlanInput { receives: 0, ..input.clone() }), least);
    let asked = PlanInput { receives: 60, chunk_rows: Some(8), ..input };
    assert_eq!(of(&asked), 2 * 7 * (1 + 32 + 32 + 1));
}

#[test]
fn ll_rows_have_no_tags() {
    let tags = |input: &PlanInput| Plan::new(input).unwrap().regions.partial_tags.source_stride;
    assert_eq!(tags(&v3(256)), 0);
    assert_ne!(tags(&v3(257)), 0);
    assert_ne!(tags(&PlanInput { ll_tokens: 0, ..v3(1) }), 0);
    assert_eq!(tags(&PlanInput { round_tokens: Some(256), ..v3(4096) }), 0);
    assert_ne!(tags(&v3_of_nodes(1, &[8; 2])), 0, "partial rows for a rail are tagged");
}

#[test]
fn small_calls_have_ll_rows_of_their_own_beside_tagged_rows() {
    let few = |input: &PlanInput| {
        let plan = Plan::new(input).unwrap();
        let named = plan.buffers().iter().find(|buffer| buffer.name == "partial rows of few tokens");
        assert_eq!(named.map(|buffer| buffer.offset), plan.few_partials.map(|region| region.offset));
        let tagged = plan.regions.partial_tags.source_stride != 0;
        assert_eq!(plan.explain().contains("tokens of small calls"), plan.few_partials.is_some());
        (named.map_or(0, |buffer| buffer.bytes), tagged, [1, 100, 101].map(|tokens| plan.are_few(tokens)))
    };
    let some = PlanInput { few_tokens: 100, ..v3(4096) };
    assert_eq!(few(&some), (2 * 100 * 8 * 14_336, true, [true, true, false]));
    // All rows are LL rows.
    assert_eq!(few(&PlanInput { few_tokens: 50, ..v3(100) }), (0, false, [false; 3]));
    for none in
        [PlanInput { ll_tokens: 99, ..some.clone() }, PlanInput { few_tokens: 100, ..v3_of_nodes(4096, &[4, 4]) }]
    {
        assert_eq!(few(&none), (0, true, [false; 3]));
    }
}

#[test]
fn messages_of_smaller_rows_have_chunks_of_no_more_bytes() {
    let plan = Plan::new(&PlanInput { weights_with_dispatch: true, other_slot_bytes: 768, ..uneven() }).unwrap();
    let [dispatch, combine, ..] = plan.wire.as_ref().unwrap().1;
    assert_eq!((dispatch.row_bytes, combine.row_bytes, dispatch.shape.chunk_bytes), (768, 768, 16 * 768));
    let of = |direction, slot_bytes, partial_bytes, weights_with_dispatch| {
        let call = CallBytes { slot_bytes, partial_bytes, weights_with_dispatch };
        plan.message_of(direction, call).unwrap()
    };
    let own = of(Direction::Dispatch, 768, 0, true);
    assert_eq!(own, dispatch);
    // 12 288 bytes hold 24 rows of 512, and 13 of 912 would hold too much: the rows left over are a chunk more.
    for (bytes, rows) in [(512, 24), (16, 100), (752, 16), (400, 30)] {
        let small = of(Direction::Dispatch, bytes, 0, false);
        let wanted = Message { row_bytes: bytes as u32, chunk_rows: rows, chunk_shift: rows, header_bytes: 32, ..own };
        assert_eq!(small, wanted);
        let sums = of(Direction::Combine, 0, bytes, true);
        assert_eq!(sums, Message { row_bytes: bytes as u32, chunk_rows: rows, ..combine });
    }
    assert!(plan.has_headers_of(CallBytes { slot_bytes: 0, partial_bytes: 0, weights_with_dispatch: true }));
    let without = Plan::new(&uneven()).unwrap();
    assert!(!without.has_headers_of(CallBytes { slot_bytes: 0, partial_bytes: 0, weights_with_dispatch: true }));
}

#[test]
fn buffers_neither_overlap_nor_leave_the_arena() {
    let plan = Plan::new(&v3(128)).unwrap();
    let mut next = 0;
    for buffer in plan.buffers() {
        assert_eq!(buffer.offset, next, "{} leaves a gap or overlaps", buffer.name);
        assert_eq!(buffer.offset % ALIGN, 0);
        next += buffer.bytes.next_multiple_of(ALIGN);
    }
    assert_eq!(next, plan.arena_bytes());
}

#[test]
fn v3_arenas_stay_within_the_limits_of_the_design() {
    assert!(Plan::new(&v3(128)).unwrap().arena_bytes() <= 256 << 20);
    assert!(Plan::new(&v3(4096)).unwrap().arena_bytes() <= 2 << 30);
}

#[test]
fn an_arena_beyond_64_bits_is_refused() {
    let error = Plan::new(&PlanInput { max_tokens: usize::MAX / 2, ..v3(1) }).unwrap_err();
    assert!(error.to_string().contains("max_tokens_per_rank"), "{error}");
}

/// A region as the design has it: copies, parts, and bytes of a part.
type Part<'a> = (&'a str, raw::ty_region, u64, u64, u64);

/// The regions of a plan in their order. `parts` are those that depend on the shape, by their names.
fn named(r: &raw::ty_regions, parts: [(u64, u64, u64); 21]) -> Vec<Part<'static>> {
    let names = [
        ("dispatch rows", r.rows),
        ("dispatch row tags", r.row_tags),
        ("metadata flags", r.meta_flags),
        ("routing metadata counts", r.meta_counts),
        ("routing metadata tokens", r.meta_tokens),
        ("routing metadata source tokens", r.meta_source_tokens),
        ("routing metadata choices", r.meta_choices),
        ("routing metadata weights", r.meta_weights),
        ("partial rows", r.partials),
        ("partial row tags", r.partial_tags),
        ("combine flags", r.combine_flags),
        ("weights sent ahead", r.ahead_weights),
        ("flags of weights sent ahead", r.ahead_flags),
        ("barrier flags", r.barrier_flags),
        ("free flags of dispatch", r.dispatch_free),
        ("free flags of combine", r.combine_free),
        ("signs of life", r.signs),
        ("output rows", r.in_place_rows),
        ("output scales", r.in_place_scales),
        ("routing metadata counts of all ranks", r.all_counts),
        ("routing metadata own choices", r.in_place_choices),
    ];
    names
        .into_iter()
        .zip(parts)
        .map(|((name, region), (copies, of, bytes))| (name, region, copies, of, bytes))
        .collect()
}

/// Buffers must stand one after the other, with the sizes and strides of their parts in lines of 128 bytes.
fn assert_parts(plan: &Plan, parts: &[Part<'_>]) {
    let mut next = 0;
    for (buffer, (name, region, copies, of, bytes)) in plan.buffers().iter().zip(parts) {
        let stride = bytes.div_ceil(128) * 128;
        assert_eq!((buffer.name.as_str(), buffer.offset, buffer.bytes), (*name, next, copies * of * stride));
        let parity_stride = if *copies == 1 { 0 } else { of * stride };
        let found = (region.offset, region.parity_stride, region.source_stride);
        assert_eq!(found, (next, parity_stride, stride), "{name}");
        next += buffer.bytes;
    }
}

#[test]
fn a_node_has_rows_of_a_round_and_metadata_of_a_call_from_each_rank_twice() {
    // 8 ranks, 300 tokens of 8 choices in rounds of 100; 29 experts a rank, one word more than lines have room for;
    // weights come with combine.
    let input = PlanInput { round_tokens: Some(100), ll_tokens: 64, max_local_experts: 29, ..v3(300) };
    let plan = Plan::new(&input).unwrap();
    let parts = [
        (2, 8, 100 * (7168 + 4 * 56)),
        // A tag for each of 8 slices.
        (2, 8, 100 * 8 * 8),
        (2, 8, 8),
        // Rows for each expert, of all of them, and in each of 3 rounds.
        (2, 8, (29 + 1 + 3) * 8),
        (2, 8, 300 * 8),
        (2, 8, 0),
        (2, 8, 300 * 8 * 8),
        (2, 8, 300 * 8 * 8),
        // Own tokens: a place for each rank that a token goes to.
        (2, 1, 100 * 8 * 14_336),
        (2, 1, 100 * 8 * 8),
        (2, 8, 8),
        (2, 8, 300 * 8 * 4),
        (2, 8, 8),
        (2, 8, 8),
        (1, 8, 0),
        (1, 8, 0),
        (1, 8, 0),
        (1, 1, 0),
        (1, 1, 0),
        (2, 0, 8 * (29 + 1) * 8),
        (1, 0, 300 * 8 * 8),
    ];
    assert_parts(&plan, &named(&plan.regions, parts));
    assert_eq!(plan.buffers().len(), 21);
    assert_eq!((plan.slot_bytes, plan.slots, plan.round_tokens, plan.rounds), (7392, 8, 100, 3));
    assert_eq!(
        plan.explain(),
        "one node, any routing: 2 parities x 100 tokens x (8 ranks x 7392 B a row + min(top-k 8, ranks of a node 8) \
         x 14336 B a partial row), plus flags, tags and routing metadata; 3 rounds of 100 tokens"
    );
    // Weights with dispatch are not sent ahead, and fewer choices than ranks need fewer places.
    let few = Plan::new(&PlanInput { weights_with_combine: false, top_k: 3, ..input }).unwrap();
    let bytes = |name: &str| few.buffers().iter().find(|buffer| buffer.name == name).unwrap().bytes;
    assert_eq!([bytes("weights sent ahead"), bytes("flags of weights sent ahead")], [0, 0]);
    assert_eq!(
        [bytes("partial rows"), bytes("partial row tags")],
        [2 * 100 * 3 * 14_336, 2 * (100 * 3 * 8_u64).next_multiple_of(128)]
    );
}

#[test]
fn an_in_place_output_takes_the_place_of_received_rows() {
    let input = PlanInput { in_place_rows: 500, top_k: 2, weights_with_combine: false, ..v3(300) };
    let plan = Plan::new(&input).unwrap();
    let parts = [
        (2, 8, 0),
        (2, 8, 300 * 8 * 8),
        (2, 8, 8),
        (2, 8, (32 + 1 + 1) * 8),
        (2, 8, 300 * 8),
        (2, 8, 0),
        (2, 8, 300 * 2 * 8),
        (2, 8, 300 * 2 * 8),
        (2, 1, 300 * 2 * 14_336),
        (2, 1, 300 * 2 * 8),
        (2, 8, 8),
        (2, 8, 0),
        (2, 8, 0),
        (2, 8, 8),
        (1, 8, 0),
        (1, 8, 0),
        (1, 8, 0),
        (1, 1, 500 * 7168),
        (1, 1, 500 * 4 * 56),
        // Counts that each rank of the node has of each.
        (2, 8, 8 * (32 + 1) * 8),
        (1, 1, 300 * 2 * 8),
    ];
    assert_parts(&plan, &named(&plan.regions, parts));
    assert_eq!(
        plan.explain(),
        "one node, in-place output and no receive buffer: 500 rows x 7392 B + 2 parities x 300 tokens x min(top-k 2, \
         ranks of a node 8) x 14336 B a partial row, plus flags, tags and routing metadata; one round"
    );
}

#[test]
fn where_ranks_may_be_missing_a_token_has_a_slot_for_each_of_the_node() {
    let input = PlanInput { slot_of_rank: true, top_k: 3, ll_tokens: 0, ..v3(100) };
    let plan = Plan::new(&input).unwrap();
    let bytes = |name: &str| plan.buffers().iter().find(|buffer| buffer.name == name).unwrap().bytes;
    assert_eq!(plan.slots, 8);
    assert_eq!(
        ["partial rows", "partial row tags", "signs of life"].map(bytes),
        [2 * 100 * 8 * 14_336, 2 * (100 * 8 * 8_u64).next_multiple_of(128), 8 * 128]
    );
    assert!(plan.explain().contains(" + ranks of a node 8 x 14336 B a partial row"), "{}", plan.explain());
}

/// 3 + 2 ranks, 100 tokens of 4 choices, rows of 512 bytes both ways without scales; weights come with combine.
fn uneven() -> PlanInput {
    PlanInput {
        top_k: 4,
        row_bytes: 512,
        scale_words: 0,
        partial_bytes: 768,
        chunk_rows: Some(16),
        double_buffer_bytes: 0,
        weights_with_dispatch: false,
        weights_with_combine: true,
        ..v3_of_nodes(100, &[3, 2])
    }
}

#[test]
fn nodes_have_partial_rows_for_served_ranks_and_free_flags_where_rows_are_kept_once() {
    let plan = Plan::new(&uneven()).unwrap();
    // Rank 3 is the rail of ranks 0 and 2, so partial rows have three owners.
    let parts = |copies, free| {
        [
            (copies, 5, 100 * 512),
            (copies, 5, 100 * 8 * 8),
            (2, 3, 8),
            (2, 5, (4 + 1 + 1) * 8),
            (2, 5, 100 * 8),
            (2, 5, 100 * 8),
            (2, 5, 100 * 4 * 8),
            (2, 5, 100 * 4 * 8),
            (copies, 3, 100 * 3 * 768),
            (copies, 3, 100 * 3 * 8),
            (2, 3, 8),
            (2, 5, 100 * 4 * 4),
            (2, 5, 8),
            (2, 3, 8),
            (1, 3, free),
            (1, 3, free),
            (1, 3, 0),
            (1, 1, 0),
            (1, 1, 0),
            (2, 0, 3 * (4 + 1) * 8),
            (1, 0, 100 * 4 * 8),
        ]
    };
    assert_parts(&plan, &named(&plan.regions, parts(1, 8)));
    assert_eq!(plan.slots, 3);
    assert_eq!(
        plan.explain(),
        "2 nodes, any routing: 100 tokens x (2 parities x 2 peers x 2 sides x (512 + 768) B on the wire + 1 x (5 \
         ranks x 512 B a row + 3 parts x min(top-k 4, ranks of a node 3) x 768 B a partial row)), plus flags, tags, \
         routing metadata and headers; one round"
    );
    // A message for each link goes out and one for each source comes in, twice by parity: dispatch 1 and 2, combine
    // 2 and 1, barrier and weights as dispatch. Messages are rounded up to 128 bytes.
    let [dispatch, combine, barrier, weights] =
        [3232 + 7 * 8192, 32 + 7 * 12_288, 32, 32 + 100 * 16].map(|bytes: u64| bytes.next_multiple_of(128));
    let wire: Vec<(&str, u64)> = plan.buffers()[21..].iter().map(|b| (b.name.as_str(), b.bytes)).collect();
    let staging = 2 * (dispatch + 2 * combine + barrier + weights);
    let arrived = 2 * (2 * dispatch + combine + 2 * barrier + 2 * weights);
    assert_eq!(wire, [("wire staging", staging), ("wire receive buffer", arrived)]);
    let end = plan.buffers()[21].offset;
    assert_eq!((plan.buffers()[22].offset, plan.arena_bytes()), (end + staging, end + staging + arrived));
    // Twice: no free flags.
    let twice = Plan::new(&PlanInput { double_buffer_bytes: 4 << 20, ..uneven() }).unwrap();
    assert_parts(&twice, &named(&twice.regions, parts(2, 0)));
}

#[test]
fn messages_have_a_head_headers_and_chunks_of_rows() {
    let messages = |input: &PlanInput| Plan::new(input).unwrap().wire.unwrap().1;
    let of = |(first_bytes, chunk_bytes, chunks), header_bytes, row_bytes, rows_offset, chunk_rows, chunk_shift| {
        let shape = MessageShape { first_bytes, chunk_bytes, chunks, rows_offset };
        Message { shape, header_bytes, row_bytes, chunk_rows, chunk_shift }
    };
    // By direction: dispatch, combine, barrier, weights. A header of dispatch is a token and its 4 experts, 20
    // bytes in units of 16; a chunk has 16 of 100 rows, so the rows are 7 chunks.
    assert_eq!(
        messages(&uneven()),
        [
            of((32 + 100 * 32, 16 * 512, 1 + 7), 32, 512, 32 + 100 * 32, 16, 16),
            of((32 + 16 * 768, 16 * 768, 7), 0, 768, 32, 16, 0),
            of((32, 16, 1), 0, 0, 32, 1, 0),
            of((32 + 100 * 16, 16, 1), 16, 0, 32 + 100 * 16, 1, 1),
        ]
    );
    // Weights with dispatch are in its headers, 36 bytes, and nothing goes ahead.
    let with = PlanInput { weights_with_dispatch: true, weights_with_combine: false, ..uneven() };
    let [dispatch, _, _, ahead] = messages(&with);
    assert_eq!((dispatch.header_bytes, dispatch.shape.rows_offset, ahead.shape.chunks), (48, 32 + 100 * 48, 0));
    // By default a chunk has 128 KiB, or 640 KiB of combine over several NICs; and not more rows than a round.
    let chunk_rows = |input: PlanInput| {
        let [dispatch, combine, ..] = messages(&PlanInput { chunk_rows: None, ..input });
        (dispatch.chunk_rows, combine.chunk_rows)
    };
    let many = PlanInput { round_tokens: Some(2000), ..v3_of_nodes(2000, &[2, 2]) };
    // 131 072 / 7392 and / 14 336, rounded up; 655 360 / 14 336.
    assert_eq!(chunk_rows(many.clone()), (18, 10));
    assert_eq!(chunk_rows(PlanInput { nics: 2, ..many }), (18, 46));
    assert_eq!(chunk_rows(uneven()), (100, 100));
}
