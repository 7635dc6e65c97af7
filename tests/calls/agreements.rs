//! What ranks must agree on before they share a context: each setting, and each field of what they send each other,
//! wrong once. All ranks end with an error that names the rank and both values.

use crate::rig;
use crate::transport_outside::loopback::Loopback;

use std::collections::BTreeSet;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use rig::{EXPERTS, PATIENCE, Rig, builder, on_ranks};
use tokenyard::internals::api::Tuning;
use tokenyard::*;

/// A deadline that a test waits out on purpose.
const SHORT: Duration = Duration::from_millis(600);

type Change = fn(AllToAllBuilder) -> AllToAllBuilder;

/// A setting by its name in the configuration that ranks compare: what all ranks have, and what one has.
struct Setting {
    name: &'static str,
    all: Change,
    one: Change,
}

const fn setting(name: &'static str, one: Change) -> Setting {
    Setting { name, all: |b| b, one }
}

const SETTINGS: [Setting; 24] = [
    setting("chunk_rows", |b| b.tuning(|t| t.chunk_rows = Some(3))),
    setting("double_buffer_bytes", |b| b.tuning(|t| t.double_buffer_bytes = 0)),
    setting("ll_tokens", |b| b.tuning(|t| t.ll_tokens = Some(1))),
    setting("missing_ranks", |b| b.missing_ranks(MissingRanks::Masked)),
    Setting {
        name: "missing_ranks",
        all: |b| b.missing_ranks(MissingRanks::Masked),
        one: |b| b.missing_ranks(MissingRanks::MaskedAtDeadline),
    },
    setting("in_place", |b| b.tuning(|t| t.in_place = Some((64, 1)))),
    Setting {
        name: "in_place",
        all: |b| b.tuning(|t| t.in_place = Some((64, 1))),
        one: |b| b.tuning(|t| t.in_place = Some((64, 2))),
    },
    setting("hidden", |b| b.hidden(128)),
    setting("experts", |b| b.experts(2 * EXPERTS)),
    setting("top_k", |b| b.top_k(1)),
    setting("duplicates", |b| b.tuning(|t| t.duplicates = true)),
    setting("max_tokens", |b| b.max_tokens_per_rank(8)),
    setting("round_tokens", |b| b.tuning(|t| t.round_tokens = Some(1))),
    setting("dtype", |b| b.format(RowFormat::FP16)),
    Setting {
        name: "scales",
        all: |b| b.hidden(128).format(RowFormat::FP8_F32),
        one: |b| b.format(RowFormat::FP8_UE8M0),
    },
    Setting { name: "quantize", all: |b| b.hidden(128).format(RowFormat::FP8_F32), one: |b| b.quantize(true) },
    setting("combine_dtype", |b| b.combine_dtype(Dtype::Fp16)),
    setting("partial", |b| b.tuning(|t| t.partial = Partial::Fp32)),
    setting("weights", |b| b.weights(Weights::Combine)),
    setting("payload_words", |b| b.tuning(|t| t.payload_words = 3)),
    setting("dispatch_payload_words", |b| b.tuning(|t| t.dispatch_payload_words = 3)),
    setting("room", |b| b.room_for(CallFormat::new(256, RowFormat::BF16, 4))),
    Setting {
        name: "room",
        all: |b| b.room_for(CallFormat::new(64, RowFormat::FP32, 3)),
        one: |b| b.room_for(CallFormat::new(64, RowFormat::FP32, 3).combine_dtype(Dtype::Fp32)),
    },
    setting("first_epoch", |b| b.tuning(|t| t.first_epoch = 2)),
];

/// What else the configuration has: the world's own, the kind of network, and what differs on GPUs alone. `placement`
/// and `nodes` have tests of their own.
const OTHERS: [&str; 6] = ["generation", "ranks", "nodes", "nics", "arena", "placement"];

/// Settings in which ranks may differ.
const FREE: [&str; 9] = [
    "handles",
    "compact_handles",
    "handle_rows",
    "statistics",
    "gdrcopy",
    "meta_tile",
    "ordered",
    "replica_table",
    "detect_overlaps",
];

/// `name=value` of the error's two configurations: this rank's and the other's.
fn differing(error: &Error, other: usize) -> (String, String) {
    match error {
        Error::Config { name: "of this rank", value, advice, .. } => {
            let theirs = advice.strip_prefix(&format!("rank {other} has ")).unwrap_or_else(|| panic!("{advice}"));
            let (theirs, rest) = theirs.split_once("; ").unwrap_or_else(|| panic!("{advice}"));
            assert_eq!(rest, "give all ranks the same configuration");
            (value.clone(), theirs.to_owned())
        }
        other => panic!("{other:?}"),
    }
}

/// Both ranks' errors of a setting, of which each must have both values.
fn assert_both_values(world: &World, setting: &str, error: &Error) {
    let (own, theirs) = differing(error, 1 - world.rank().index());
    let both = world.all_gather("values", own.as_bytes()).unwrap();
    assert_eq!(both[1 - world.rank().index()], theirs.as_bytes(), "{setting}");
    assert!(own != theirs, "{setting}");
    for text in [&own, &theirs] {
        assert!(text.starts_with(&format!("{setting}=")), "{setting}: {text}");
    }
}

#[test]
fn every_setting_that_differs_is_named_with_both_values_on_both_ranks() {
    on_ranks(2, |world| {
        let device = Device::cpu().unwrap();
        let mut taken = Vec::new();
        for (at, Setting { name, all, one }) in SETTINGS.iter().enumerate() {
            let same = all(builder(&world, &device));
            let differs = world.rank().index() == at % 2;
            match if differs { one(same) } else { same }.build() {
                Ok(_) => taken.push(name),
                Err(error) => assert_both_values(&world, name, &error),
            }
        }
        assert!(taken.is_empty(), "differ unnoticed: {taken:?}");
        let table = |ranks: [u32; EXPERTS]| Placement::table(ranks.to_vec(), 2).unwrap();
        let placements = [table([0, 0, 0, 0, 1, 1, 1, 1]), table([0, 0, 0, 1, 0, 1, 1, 1])];
        let built = builder(&world, &device).placement(placements[world.rank().index()].clone()).build();
        assert_both_values(&world, "placement", &built.map(drop).unwrap_err());
        let split = if world.rank() == Rank(0) { vec![2] } else { vec![1, 1] };
        let built = builder(&world.clone().with_nodes(&split).unwrap(), &device).build();
        assert_both_values(&world, "nodes", &built.map(drop).unwrap_err());
        Rig::new(&world).good_round(1);
        world.barrier("done").unwrap();
    });
}

/// Names of the fields that the derived text of a value shows.
fn fields_of(value: &impl std::fmt::Debug) -> BTreeSet<String> {
    let text = format!("{value:#?}");
    let fields = text.lines().filter_map(|line| line.strip_prefix("    ")?.split_once(": "));
    fields.map(|(name, _)| name.to_owned()).filter(|name| !name.starts_with(' ')).collect()
}

#[test]
fn every_setting_is_compared_or_may_differ() {
    let sent = Arc::new(Mutex::new(Vec::new()));
    let seen = sent.clone();
    let gather = move |what: &str, own: &[u8], _: Duration| -> Result<Vec<Vec<u8>>> {
        if what == "configuration" {
            *seen.lock().unwrap() = own.to_vec();
        }
        Ok(vec![own.to_vec()])
    };
    let world = World::over(0, 1, None, gather).unwrap();
    builder(&world, &Device::cpu().unwrap()).build().unwrap();
    let bytes = sent.lock().unwrap().clone();
    let text = String::from_utf8_lossy(&bytes[28 + "configuration".len() + 9..]).into_owned();
    let compared: BTreeSet<&str> = text.split(' ').filter_map(|word| Some(word.split_once('=')?.0)).collect();
    let known: BTreeSet<&str> = SETTINGS.iter().map(|setting| setting.name).chain(OTHERS).collect();
    assert_eq!(compared, known, "{text}");
    for setting in fields_of(&Tuning::default()) {
        assert!(known.contains(&*setting) || FREE.contains(&&*setting), "{setting} may differ unnoticed");
    }
}

// ---- what others sent

/// An all-gather of threads, in which what rank 1 sends in one step reaches the others changed.
struct Table {
    meeting: Mutex<Meeting>,
    over: Condvar,
    step: &'static str,
    part: Part,
    change: Bytes,
}

/// What is changed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    /// All of a part, head included.
    Whole,
    /// What follows its head.
    Payload,
}

type Bytes = fn(&mut Vec<u8>);

struct Meeting {
    number: u64,
    parts: Vec<Option<Vec<u8>>>,
    last: Vec<Vec<u8>>,
}

/// Bytes of a part before its step's name.
const HEAD: usize = 28;

impl Table {
    fn new(ranks: usize, step: &'static str, part: Part, change: Bytes) -> Arc<Table> {
        let meeting = Meeting { number: 0, parts: vec![None; ranks], last: Vec::new() };
        Arc::new(Table { meeting: Mutex::new(meeting), over: Condvar::new(), step, part, change })
    }

    fn meet(&self, rank: usize, what: &str, own: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        let mut meeting = self.meeting.lock().unwrap();
        let number = meeting.number;
        meeting.parts[rank] = Some(own.to_vec());
        if meeting.parts.iter().all(Option::is_some) {
            meeting.last = meeting.parts.iter_mut().filter_map(Option::take).collect();
            meeting.number += 1;
            self.over.notify_all();
        }
        let open = |meeting: &mut Meeting| meeting.number == number;
        let (meeting, _) = self.over.wait_timeout_while(meeting, timeout, open).unwrap();
        if meeting.number == number {
            return Err(Error::bootstrap(format!("nobody else came to \"{what}\""), "of this test"));
        }
        let mut parts = meeting.last.clone();
        if what == self.step && rank != 1 {
            let kept = if self.part == Part::Whole { 0 } else { HEAD + what.len() };
            let mut rest = parts[1].split_off(kept);
            (self.change)(&mut rest);
            parts[1].extend(rest);
        }
        Ok(parts)
    }
}

/// The errors of a build of ranks in such nodes, of which rank 1 sends a changed part.
fn errors(nodes: &[usize], part: Part, step: &'static str, change: Bytes) -> Vec<String> {
    let ranks = nodes.iter().sum();
    let (table, network) = (Table::new(ranks, step, part, change), Loopback::default());
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..ranks)
            .map(|rank| {
                let (own, network) = (table.clone(), &network);
                scope.spawn(move || {
                    let gather = move |what: &str, part: &[u8], timeout: Duration| own.meet(rank, what, part, timeout);
                    let world = World::over(rank, ranks, None, gather).unwrap().with_nodes(nodes).unwrap();
                    let world = world.with_timeout(SHORT);
                    let several = nodes.len() > 1;
                    let proxy = several.then(|| {
                        let thread = ThreadConfig { core: None, spinners: 8 };
                        let config = ProxyConfig { liveness: Liveness::default(), thread };
                        Proxy::spawn(&world, Box::new(network.endpoint(world.rank())), config).unwrap()
                    });
                    let mut building = builder(&world, &Device::cpu().unwrap());
                    building = proxy.iter().fold(building, |building, proxy| building.proxy(proxy));
                    let start = Instant::now();
                    let built = building.build().map(drop);
                    assert!(start.elapsed() < PATIENCE / 2, "rank {rank} waited for {:?}", start.elapsed());
                    built.map_or_else(|error| error.to_string(), |()| "no error".to_owned())
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Each change gets the text in the errors of all ranks but rank 1, and rank 1 an error of its own. All at once, as
/// each waits for a deadline.
fn assert_refused(nodes: &[usize], part: Part, cases: &[(&'static str, Bytes, &str)]) {
    let mut problems = Vec::new();
    std::thread::scope(|scope| {
        let run =
            |&(step, change, _): &(&'static str, Bytes, &str)| scope.spawn(move || errors(nodes, part, step, change));
        let runs: Vec<_> = cases.iter().map(run).collect();
        for (run, (step, _, expected)) in runs.into_iter().zip(cases) {
            for (rank, text) in run.join().unwrap().into_iter().enumerate() {
                if (rank != 1 && !text.contains(expected)) || text == "no error" || text.contains(char::is_control) {
                    problems.push(format!("rank {rank}, {step}: «{text}» lacks «{expected}»"));
                }
            }
        }
    });
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

#[test]
fn every_field_of_an_arenas_card_that_is_wrong_is_named_on_every_other_rank() {
    const UNKNOWN: &str = "rank 1 described its arena in an unknown form";
    assert_refused(
        &[3],
        Part::Payload,
        &[
            (
                "arena cards",
                |card| card[0] = 9,
                "rank 1 described its arena in version 9 of the form, and this rank has 1",
            ),
            ("arena cards", |card| card[4] = 7, UNKNOWN),
            ("arena cards", |card| card[6] = 1, UNKNOWN),
            ("arena cards", |card| card[15] = 1, UNKNOWN),
            ("arena cards", |card| card.truncate(card.len() - 1), UNKNOWN),
            ("arena cards", |card| card.push(0), UNKNOWN),
            ("arena cards", |card| card[4] = 1, "rank 1 is on GPU 0 () and rank 0 on the CPU device"),
            ("arena cards", |card| card[5] = 0, "the memory of rank 1, on the CPU device, cannot be shared"),
            ("arena cards", |card| card[22] = 1, "the arena of rank 1 has 28147"),
            (
                "arenas mapped",
                |why| why.extend(b"no\x1b[31m\r\nroom"),
                r"rank 1 could not map the arenas: no\u{1b}[31m\r\nroom",
            ),
        ],
    );
}

#[test]
fn every_field_of_an_offer_of_descriptors_that_is_wrong_ends_the_exchange_with_the_rank() {
    /// A byte after the end of the socket's name; the key before the name is random.
    fn behind_name(offer: &mut [u8], bytes: usize) -> &mut u8 {
        let end = 32 + offer[32..].iter().position(|byte| *byte == b'\n').unwrap();
        &mut offer[end + bytes]
    }
    assert_refused(
        &[3],
        Part::Payload,
        &[
            ("exchange_fds", |offer| offer.truncate(31), "rank 1 could not open a socket ("),
            ("exchange_fds", |offer| *offer = b"no\x1b[31m\r\nroom".to_vec(), r"socket (no\u{1b}[31m\r\nroom)"),
            ("exchange_fds", |offer| *behind_name(offer, 0) = b' ', "rank 1 could not open a socket ("),
            ("exchange_fds", |offer| offer[40] = 0xff, "rank 1 could not open a socket ("),
            // The socket's name, the host, and the network's namespace.
            ("exchange_fds", |offer| offer[32] ^= 1, "sending to rank 1: "),
            ("exchange_fds", |offer| *behind_name(offer, 1) ^= 1, "rank 1 is on another host or in another network"),
            (
                "exchange_fds",
                |offer| offer.truncate(offer.len() - 1),
                "rank 1 is on another host or in another network",
            ),
            // The key: rank 1 takes no descriptor from the others.
            ("exchange_fds", |offer| offer[0] ^= 1, "rank 1 could not exchange file descriptors: after 450 ms"),
            (
                "exchange_fds outcome",
                |why| why.extend(b"no\x1b[31m\r\nroom"),
                r"rank 1 could not exchange file descriptors: no\u{1b}[31m\r\nroom",
            ),
        ],
    );
}

#[test]
fn every_field_of_a_proxys_card_that_is_wrong_is_named_on_every_other_rank() {
    const NONE: &str = "rank 1 sent no address of its endpoint";
    const TABLE: &str = "rank 1 sent a malformed table of addresses";
    assert_refused(
        &[1, 1],
        Part::Payload,
        &[
            ("proxy addresses", |card| card.truncate(7), NONE),
            ("proxy addresses", |card| card.clear(), NONE),
            ("proxy addresses", |card| card[0] = 2, "rank 1 opens context 2 where this rank opens 0"),
            ("proxy addresses", |card| card[3] = 1, "rank 1 opens context 16777216 where this rank opens 0"),
            (
                "proxy addresses",
                |card| *card = [&[0xff; 4][..], &[0; 4], b"no\x1b[31m\r\nroom"].concat(),
                r"rank 1 has no arena on the network: no\u{1b}[31m\r\nroom",
            ),
            ("proxy addresses", |card| card[6] = 1, TABLE),
            ("proxy addresses", |card| card[7] = 1, TABLE),
            ("proxy addresses", |card| card[8] = 9, TABLE),
            ("proxy addresses", |card| card.truncate(card.len() - 1), TABLE),
            ("proxy addresses", |card| card[12] = 9, "no address of rank 1"),
            ("proxy addresses", |card| card.truncate(12 + usize::from(card[8])), "rank 1 sent no address for rank 0"),
            (
                "proxies connected",
                |why| why.extend(b"no\x1b[31m\r\nroom"),
                r"the proxy of rank 1 could not connect: no\u{1b}[31m\r\nroom",
            ),
        ],
    );
}

#[test]
fn a_configuration_that_came_cut_or_garbled_is_refused_with_the_rank() {
    assert_refused(
        &[3],
        Part::Payload,
        &[
            (
                "configuration of a context",
                |why| why.extend(b"no\x1b[31m"),
                r"rank 1 failed in configuration of a context: no\u{1b}[31m",
            ),
            ("configuration", |text| text.clear(), "rank 1 has ; give all ranks the same configuration"),
            ("configuration", |text| text.truncate(8), "rank 1 has ; give all ranks the same configuration"),
            ("configuration", |text| text.truncate(9), "rank 1 has ; give all ranks the same configuration"),
            ("configuration", |text| text.truncate(text.len() - 1), "rank 1 has first_epoch=; give all"),
            ("configuration", |text| text.push(b'7'), "rank 1 has first_epoch=17; give all"),
            ("configuration", |text| text[10] = 0x1b, r"rank 1 has t\u{1b}kenyard; give all"),
            ("configuration", |text| text[10] = 0xff, "rank 1 has t\u{fffd}kenyard; give all"),
            ("memory of a context", |why| why.extend(b"no room"), "rank 1 failed in memory of a context: no room"),
        ],
    );
}

#[test]
fn every_field_of_a_parts_head_that_is_wrong_is_named_with_both_values() {
    const STEP: &str = "configuration";
    const FOREIGN: &str = "bytes that this library did not send are rank 1's part";
    assert_refused(
        &[2],
        Part::Whole,
        &[
            (STEP, |part| part[0] = 0, FOREIGN),
            (STEP, |part| part.truncate(HEAD - 1), "27 bytes that this library did not send are rank 1's part"),
            (STEP, |part| part[4] = 9, "rank 1 has version 9 of this protocol, and rank 0 has 1"),
            (STEP, |part| part[7] = 0xff, FOREIGN),
            (
                STEP,
                |part| part[6] -= 1,
                "rank 1 calls \"configuratio\", its collective number 2, during number 2 of rank 0",
            ),
            (STEP, |part| part[8] = 0, "the all-gather gave rank 0's part in the place of rank 1's"),
            (STEP, |part| part[12] = 3, "rank 1 is of 3 ranks in generation 0, and rank 0 of 2 in generation 0"),
            (STEP, |part| part[16] = 4, "rank 1 is of 2 ranks in generation 4, and rank 0 of 2 in generation 0"),
            (STEP, |part| part[20] = 9, "its collective number 9, during number 2 of rank 0"),
            (STEP, |part| part[HEAD] = 0x1b, r#"rank 1 calls "\u{1b}onfiguration", its collective number 2"#),
            (STEP, |part| part[HEAD] = 0xff, "rank 1 calls \"\u{fffd}onfiguration\", its collective number 2"),
        ],
    );
}
