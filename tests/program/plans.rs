//! `tokenyard plan` for named devices, on machines without them: each buffer's bytes, computed by hand from the shape
//! as docs/design.md has it, and every sentence.

use crate::rig;

use rig::{object, run, text};
use serde_json::{Value, json};

/// A buffer: how often it is kept, its parts, and the bytes of a part, which begins at a line of 128 bytes.
type Part = (u64, u64, u64);

/// The buffers of a world, in order; the last two only if there are several nodes.
fn buffers(parts: [Part; 21], wire: Option<[u64; 2]>) -> Vec<(&'static str, u64)> {
    let names = [
        "dispatch rows",
        "dispatch row tags",
        "metadata flags",
        "routing metadata counts",
        "routing metadata tokens",
        "routing metadata source tokens",
        "routing metadata choices",
        "routing metadata weights",
        "partial rows",
        "partial row tags",
        "combine flags",
        "weights sent ahead",
        "flags of weights sent ahead",
        "barrier flags",
        "free flags of dispatch",
        "free flags of combine",
        "signs of life",
        "output rows",
        "output scales",
        "routing metadata counts of all ranks",
        "routing metadata own choices",
    ];
    let size = |(copies, of, bytes): Part| copies * of * bytes.next_multiple_of(128);
    let wire = wire.map(|[staging, arrived]| [("wire staging", staging), ("wire receive buffer", arrived)]);
    names.into_iter().zip(parts.map(size)).chain(wire.into_iter().flatten()).collect()
}

/// The choice of multiprocessors for few tokens.
fn few(tokens: usize) -> String {
    format!(
        "a GPU's kernels take 132 of 132 multiprocessors unless sms is given: calls of up to {tokens} tokens wait for \
         memory latency, not for bytes"
    )
}

/// The plan as an object and as text must be these buffers and sentences.
fn assert_plan(options: &str, buffers: &[(&str, u64)], mib: &str, handle: &[u64], sentences: [&str; 3]) {
    let mut offset = 0;
    let mut listed = Vec::new();
    for (name, bytes) in buffers {
        listed.push(json!({"name": name, "offset": offset, "bytes": bytes}));
        offset += bytes;
    }
    let handle: u64 = handle.iter().map(|part| part.next_multiple_of(256)).sum();
    let planned = json!({"arena_bytes": offset, "handle_bytes": handle, "buffers": listed});
    let mut found = object(&format!("plan {options} --json -"));
    // The formulas have a test of their own.
    let hints = found.as_object_mut().unwrap().remove("deepep").unwrap();
    let low_latency = hints["low_latency_bytes"].as_u64().unwrap();
    assert_eq!(found, planned);
    let output = run(&format!("plan {options}"));
    assert!(output.status.success() && output.stderr.is_empty(), "{}", text(&output.stderr));
    let shown = text(&output.stdout);
    let lines: Vec<&str> = shown.lines().collect();
    let cells = |line: &str| {
        let cells = line.split("  ").map(str::trim).filter(|cell| !cell.is_empty());
        cells.map(str::to_string).collect::<Vec<String>>()
    };
    assert_eq!(cells(lines[0]), ["buffer", "offset", "bytes"]);
    let of = |buffer: &Value, field: &str| buffer[field].to_string().trim_matches('"').to_string();
    for (line, buffer) in lines[2..].iter().zip(&listed) {
        assert_eq!(cells(line), ["name", "offset", "bytes"].map(|field| of(buffer, field)));
    }
    let arena = format!("arena of a rank: {offset} bytes ({mib} MiB)");
    let handle = format!("each handle: {handle} bytes ({:.2} MiB)", handle as f64 / 1048576.0);
    let (own, rest) = lines[2 + buffers.len()..].split_at(2);
    assert_eq!(own, [arena.as_str(), &handle], "{shown}");
    let deepep = format!("DeepEP for the same: its low-latency mode asks for {low_latency} bytes (");
    assert!(rest[0].starts_with(&deepep) && rest[0].contains("), its normal mode "), "{shown}");
    assert_eq!(rest[1..], sentences, "{shown}");
}

#[test]
fn a_decode_step_of_v3_on_one_node_of_gpus() {
    // 8 ranks of 32 experts; 128 tokens of 8 choices; a row is 7168 bytes and 56 scales.
    let parts = [
        (2, 8, 128 * (7168 + 4 * 56)),
        (2, 8, 128 * 8 * 8),
        (2, 8, 8),
        (2, 8, (32 + 1 + 1) * 8),
        (2, 8, 128 * 8),
        (2, 8, 0),
        (2, 8, 128 * 8 * 8),
        (2, 8, 128 * 8 * 8),
        (2, 1, 128 * 8 * 2 * 7168),
        (2, 1, 0), // LL rows have no tags
        (2, 8, 8),
        (2, 8, 0),
        (2, 8, 0),
        (2, 8, 8),
        (1, 8, 0),
        (1, 8, 0),
        (1, 8, 0),
        (1, 1, 0),
        (1, 1, 0),
        (2, 0, 0),
        (1, 0, 0),
    ];
    let sentences = [
        "one node, any routing: 2 parities x 128 tokens x (8 ranks x 7392 B a row + min(top-k 8, ranks of a node 8) x \
         14336 B a partial row), plus flags, tags and routing metadata; one round",
        &few(128),
        "8 ranks in one node",
    ];
    // A head; for 8 ranks 128 tokens of 8 choices, twice; their slots; starts of rounds; masks of own tokens.
    let handle = [32, 8 * 128 * 8 * 4, 8 * 128 * 8 * 4, 8 * 128 * 4, 8 * 2 * 4, 128 * 8];
    assert_plan("--device cuda --world 8", &buffers(parts, None), "42.8", &handle, sentences);
}

#[test]
fn a_prefill_of_v3_leaves_multiprocessors_to_others() {
    // As above, with 4096 tokens.
    let parts = [
        (2, 8, 4096 * (7168 + 4 * 56)),
        (2, 8, 4096 * 8 * 8),
        (2, 8, 8),
        (2, 8, (32 + 1 + 1) * 8),
        (2, 8, 4096 * 8),
        (2, 8, 0),
        (2, 8, 4096 * 8 * 8),
        (2, 8, 4096 * 8 * 8),
        (2, 1, 4096 * 8 * 2 * 7168),
        (2, 1, 4096 * 8 * 8),
        (2, 8, 8),
        (2, 8, 0),
        (2, 8, 0),
        (2, 8, 8),
        (1, 8, 0),
        (1, 8, 0),
        (1, 8, 0),
        (1, 1, 0),
        (1, 1, 0),
        (2, 0, 0),
        (1, 0, 0),
    ];
    let sentences = [
        "one node, any routing: 2 parities x 4096 tokens x (8 ranks x 7392 B a row + min(top-k 8, ranks of a node 8) \
         x 14336 B a partial row), plus flags, tags and routing metadata; one round",
        "a GPU's kernels take 80 of 132 multiprocessors unless sms is given: by the model dispatch and combine take \
         428 and 806 us with them, 425 and 803 us with all",
        "8 ranks in one node",
    ];
    let handle = [32, 8 * 4096 * 8 * 4, 8 * 4096 * 8 * 4, 8 * 4096 * 4, 8 * 2 * 4, 4096 * 8];
    assert_plan("--device cuda --world 8 --tokens 4096", &buffers(parts, None), "1371.0", &handle, sentences);
}

#[test]
fn uneven_nodes_have_messages_for_every_rank_that_a_rail_serves() {
    // Ranks 0 to 2 and 3 to 4, with 4 experts each. Rank 3 is the rail of ranks 0 and 2. 100 tokens of 4 choices; bf16
    // rows of 512 bytes both ways, kept once; weights go ahead of combine.
    let parts = [
        (1, 5, 100 * 512),
        (1, 5, 100 * 8 * 8),
        (2, 3, 8),
        (2, 5, (4 + 1 + 1) * 8),
        (2, 5, 100 * 8),
        (2, 5, 100 * 8),
        (2, 5, 100 * 4 * 8),
        (2, 5, 100 * 4 * 8),
        // For the node's own tokens and those of two sources; at most 3 ranks of a node have a token's experts.
        (1, 3, 100 * 3 * 512),
        (1, 3, 100 * 3 * 8),
        (2, 3, 8),
        (2, 5, 100 * 4 * 4),
        (2, 5, 8),
        (2, 3, 8),
        (1, 3, 8),
        (1, 3, 8),
        (1, 3, 0),
        (1, 1, 0),
        (1, 1, 0),
        (2, 0, 0),
        (1, 0, 0),
    ];
    // A head of 32 bytes; 100 headers of a token and its 4 experts, in units of 16 bytes; chunks of 16 rows, the last
    // one as large as the others. Sums have no headers, weights no rows, a barrier only the head.
    let [dispatch, combine, weights, barrier] = [32 + 100 * 32 + 7 * 16 * 512, 32 + 7 * 16 * 512, 32 + 100 * 16, 32]
        .map(|bytes: u64| bytes.next_multiple_of(128));
    // Twice by parity: what goes to one other node, with sums for two served ranks; and what comes from there.
    let staging = 2 * (dispatch + 2 * combine + weights + barrier);
    let arrived = 2 * (2 * dispatch + combine + 2 * weights + 2 * barrier);
    let sentences = [
        "2 nodes, any routing: 100 tokens x (2 parities x 2 peers x 2 sides x (512 + 512) B on the wire + 1 x (5 \
         ranks x 512 B a row + 3 parts x min(top-k 4, ranks of a node 3) x 512 B a partial row)), plus flags, tags, \
         routing metadata and headers; one round",
        &few(100),
        "5 ranks in nodes of 3,2",
    ];
    let options = "--device cuda --world 5 --ranks-per-node 3,2 --hidden 256 --experts 20 --top-k 4 --tokens 100 \
                   --dtype bf16 --weights combine --chunk-rows 16 --single-buffer";
    // As above; then a row of the message to the other node for each token, starts of rounds; the masks of the rows of
    // up to 2 served sources, a byte each, and starts of their rounds.
    let handle =
        [32, 5 * 100 * 4 * 4, 5 * 100 * 4 * 4, 5 * 100 * 4, 5 * 2 * 4, 100 * 8, 100 * 4, 2 * 4, 2 * 100, 2 * 2 * 4];
    assert_plan(options, &buffers(parts, Some([staging, arrived])), "1.5", &handle, sentences);
}

#[test]
fn an_in_place_output_is_part_of_the_arena() {
    // 4 ranks of 8 experts; 64 tokens of 2 choices; 300 rows of 1024 bytes with 8 scales in two words.
    let parts = [
        (2, 4, 0),
        (2, 4, 64 * 8 * 8),
        (2, 4, 8),
        (2, 4, (8 + 1 + 1) * 8),
        (2, 4, 64 * 8),
        (2, 4, 0),
        (2, 4, 64 * 2 * 8),
        (2, 4, 64 * 2 * 8),
        (2, 1, 64 * 2 * 2 * 1024),
        (2, 1, 0),
        (2, 4, 8),
        (2, 4, 0),
        (2, 4, 0),
        (2, 4, 8),
        (1, 4, 0),
        (1, 4, 0),
        (1, 4, 0),
        (1, 1, 300 * 1024),
        (1, 1, 300 * 2 * 4),
        (2, 4, 4 * (8 + 1) * 8),
        (1, 1, 64 * 2 * 8),
    ];
    let sentences = [
        "one node, in-place output and no receive buffer: 300 rows x 1032 B + 2 parities x 64 tokens x min(top-k 2, \
         ranks of a node 4) x 2048 B a partial row, plus flags, tags and routing metadata; one round",
        &few(64),
        "4 ranks in one node",
    ];
    let options = "--device cuda --world 4 --hidden 1024 --experts 32 --top-k 2 --tokens 64 --in-place --align 16 \
                   --capacity 300 --scales ue8m0";
    let handle = [32, 4 * 64 * 2 * 4, 4 * 64 * 2 * 4, 4 * 64 * 4, 4 * 2 * 4, 64 * 8];
    assert_plan(options, &buffers(parts, None), "0.9", &handle, sentences);
}

#[test]
fn rounds_of_the_cpu_device_have_room_for_their_tokens_only() {
    // 3 ranks of at most 3 experts; 10 tokens of 3 choices in rounds of 4; rows of 128 bytes and one scale, in units of
    // 16; fp8 partial rows with one scale.
    let parts = [
        (2, 3, 4 * 144),
        (2, 3, 4 * 8 * 8),
        (2, 3, 8),
        (2, 3, (3 + 1 + 3) * 8),
        (2, 3, 10 * 8),
        (2, 3, 0),
        (2, 3, 10 * 3 * 8),
        (2, 3, 10 * 3 * 8),
        (2, 1, 4 * 3 * 144),
        // LL rows.
        (2, 1, 0),
        (2, 3, 8),
        (2, 3, 0),
        (2, 3, 0),
        (2, 3, 8),
        (1, 3, 0),
        (1, 3, 0),
        (1, 3, 0),
        (1, 1, 0),
        (1, 1, 0),
        (2, 0, 0),
        (1, 0, 0),
    ];
    let sentences = [
        "one node, any routing: 2 parities x 4 tokens x (3 ranks x 144 B a row + min(top-k 3, ranks of a node 3) x \
         144 B a partial row), plus flags, tags and routing metadata; 3 rounds of 4 tokens",
        &few(10),
        "3 ranks in one node",
    ];
    let options = "--device cpu --world 3 --ranks-per-node 3 --hidden 128 --experts 7 --top-k 3 --tokens 10 \
                   --round-tokens 4 --partial fp8 --ll-tokens 4";
    let handle = [32, 3 * 10 * 3 * 4, 3 * 10 * 3 * 4, 3 * 10 * 4, 3 * 4 * 4, 10 * 8];
    assert_plan(options, &buffers(parts, None), "0.0", &handle, sentences);
}

/// A table of 64 ranks' tokens and choices would take 18 MiB.
#[test]
fn handles_of_large_worlds_are_compact() {
    // A head; the slot of each token of each rank; starts of rounds; masks of own tokens; an entry for each of the rows
    // that uniform routing brings, and an eighth more.
    let one_node = [32u64, 64 * 4096 * 4, 64 * 2 * 4, 4096 * 8, 4096 * 8 * 9 / 8 * 8];
    // In nodes of 8 also rows in messages to 7 nodes, and masks of the rows of 7 sources. 4 rounds.
    let nodes = [32u64, 64 * 4096 * 4, 64 * 5 * 4, 4096 * 8, 7 * 4096 * 4, 7 * 5 * 4, 7 * 4096, 7 * 5 * 4, one_node[4]];
    for (options, handle) in [
        ("", &one_node[..]),
        ("--ranks-per-node 8", &nodes),
        ("--compact-handles", &one_node),
        ("--mode graph --capacity 12345", &[&one_node[..4], &[12345 * 8]].concat()),
    ] {
        let plan = object(&format!("plan --device cuda --world 64 --tokens 4096 {options} --json -"));
        let bytes = handle.iter().map(|part| part.next_multiple_of(256)).sum::<u64>();
        assert_eq!(plan["handle_bytes"], bytes - (256 - handle.last().unwrap() % 256) % 256, "{options}");
        assert!(bytes <= 3 << 19, "{bytes} bytes are more than 1.5 MiB");
    }
    // Lists of two ranks would not be much smaller than tables, and take longer.
    for (options, handle) in [
        ("--world 2 --tokens 65536", 2 * (2 * 65536 * 8 * 4) + 2 * 65536 * 4 + 65536 * 8),
        ("--world 5 --experts 255 --tokens 16384", 5 * 16384 * 4 + 16384 * 8 + 16384 * 8 * 9 / 8 * 8),
    ] {
        let plan = object(&format!("plan --device cuda {options} --json -"));
        let bytes = plan["handle_bytes"].as_u64().unwrap();
        assert!((handle..handle + 1024).contains(&bytes), "{options}: {bytes}, {handle}");
    }
}

#[test]
fn worlds_are_described_by_their_nodes() {
    for (options, world) in [
        ("--world 1", "one rank"),
        ("--world 3", "3 ranks in one node"),
        ("--world 8 --ranks-per-node 4", "8 ranks in 2 nodes of 4"),
        ("--world 8 --ranks-per-node 3,5", "8 ranks in nodes of 3,5"),
    ] {
        let shown = text(&run(&format!("plan --device cuda --hidden 128 --tokens 4 {options}")).stdout);
        assert_eq!(shown.lines().last(), Some(world));
    }
}

#[test]
fn a_run_takes_the_arena_that_was_planned() {
    for options in [
        "--world 3 --ranks-per-node 3",
        "--world 3 --ranks-per-node 2,1 --weights combine --chunk-rows 2 --round-tokens 3",
        "--world 2 --ranks-per-node 2 --in-place --capacity 40",
    ] {
        let shape = format!("--device cpu --hidden 128 --experts 7 --top-k 3 --tokens 5 {options} --json -");
        let planned = object(&format!("plan {shape}"))["arena_bytes"].clone();
        assert_eq!(object(&format!("bench {shape} --iters 1 --warmup 0"))["arena_bytes"], planned, "{options}");
    }
}
