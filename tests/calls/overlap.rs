//! Launches of one direction that run at the same time, on streams that nothing orders: no store goes outside the
//! calls' memory, a launch ends in `Order`, and errors of other ranks name the rank. On the CPU device, whose seeded
//! schedules begin the blocks of two launches in any order; and on a GPU, if there is one, for graphs that another
//! library captures.

use std::cell::RefCell;
use std::sync::Mutex;
use std::time::Duration;

use tokenyard::internals::kernels::{SeededConfig, View, seeded_world};
use tokenyard::internals::proxy::driver::ThreadConfig;
use tokenyard::internals::proxy::machine::Liveness;
use tokenyard::internals::transport::network::sim::{Clock, Network, SimConfig};
use tokenyard::*;

const HIDDEN: usize = 8;
const PITCH: usize = HIDDEN * 2;
const TOP_K: usize = 2;
const MAX_TOKENS: usize = 96;
const PATIENCE: Duration = Duration::from_secs(60);
/// More than all rows of a call, so that no row that is misplaced by a call's counts lies beyond it.
const GUARD: usize = 4096;
const FILL: u8 = 0xA5;

/// Memory with guards around it.
struct Guarded {
    memory: DeviceBuffer,
    bytes: usize,
}

impl Guarded {
    fn new(device: &Device, bytes: usize) -> Guarded {
        let memory = device.alloc(bytes.next_multiple_of(16) + 2 * GUARD).unwrap();
        memory.fill(FILL).unwrap();
        Guarded { memory, bytes }
    }

    fn view(&self) -> View {
        self.memory.slice(GUARD, self.bytes).unwrap()
    }

    fn write(&self, bytes: &[u8]) {
        self.memory.write(GUARD, bytes).unwrap();
    }

    fn check(&self, what: &str) {
        let mut seen = vec![0; self.memory.len()];
        self.memory.read(0, &mut seen).unwrap();
        let stored =
            (0..seen.len()).filter(|at| !(GUARD..GUARD + self.bytes).contains(at)).find(|at| seen[*at] != FILL);
        let place = stored.map(|at| at as i64 - GUARD as i64);
        assert_eq!(place, None, "a store outside of {what}, which has {} bytes", self.bytes);
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Shape {
    Contiguous,
    Masked,
    Token,
    InPlace,
}

/// Everything that one call is given, with guards.
struct Call {
    tokens: usize,
    capacity: usize,
    x: Guarded,
    idx: Guarded,
    weights: Guarded,
    rows: Guarded,
    counts: Guarded,
    offsets: Guarded,
    described: [Guarded; 4],
    out: Guarded,
}

impl Call {
    /// So many tokens, whose experts follow from `salt`, into an output of so many rows.
    fn new(device: &Device, ranks: usize, tokens: usize, capacity: usize, masked: bool, salt: usize) -> Call {
        let experts = LOCAL_EXPERTS;
        let rows = if masked { capacity * experts } else { capacity };
        let new = |bytes| Guarded::new(device, bytes);
        let call = Call {
            tokens,
            capacity,
            x: new(tokens * PITCH),
            idx: new(tokens * TOP_K * 4),
            weights: new(tokens * TOP_K * 4),
            rows: new(rows * PITCH),
            counts: new(experts * 4),
            offsets: new((experts + 1) * 4),
            described: [4, 8, 4 * TOP_K, 4 * TOP_K].map(|bytes| new(rows * bytes)),
            out: new(tokens * PITCH),
        };
        let choices = |token: usize| [0, 1].map(|k| ((token + salt) * (1 + salt % 3) + k) % (ranks * experts));
        let idx: Vec<u8> = (0..tokens).flat_map(choices).flat_map(|e| (e as i32).to_ne_bytes()).collect();
        call.x.write(&vec![0x3f; tokens * PITCH]);
        call.idx.write(&idx);
        call.weights.write(&0.5f32.to_ne_bytes().repeat(tokens * TOP_K));
        call
    }

    fn tokens(&self) -> Tokens {
        self.counted(TokenCount::Host(self.tokens))
    }

    fn counted(&self, count: TokenCount) -> Tokens {
        Tokens::new(self.x.view(), self.idx.view(), count).pitch_bytes(PITCH).topk_weight(self.weights.view())
    }

    fn output(&self, ep: &AllToAll, shape: Shape) -> Output {
        let capacity = self.capacity;
        let layout = match shape {
            Shape::Masked => Layout::Masked { per_expert: capacity },
            Shape::Token => Layout::Token { capacity },
            _ => Layout::Contiguous { align: 1, capacity },
        };
        let token = shape == Shape::Token;
        let [row_expert, source, experts, weights] = &self.described;
        let output = Output::new(layout, self.rows.view(), self.counts.view())
            .pitch_bytes(PITCH)
            .expert_offset((!token).then(|| self.offsets.view()))
            .row_expert((!token).then(|| row_expert.view()))
            .source(source.view())
            .token_experts(token.then(|| experts.view()))
            .token_weights(token.then(|| weights.view()));
        match ep.in_place() {
            Some(own) => output.layout(own.layout).rows(own.rows).pitch_bytes(own.pitch_bytes),
            None => output,
        }
    }

    fn dispatch(&self, ep: &AllToAll, stream: &Stream, shape: Shape) -> Result<Handle> {
        ep.dispatch(stream, &self.tokens(), &self.output(ep, shape))
    }

    fn combine(&self, ep: &AllToAll, stream: &Stream, handle: &Handle, shape: Shape) -> Result<()> {
        let output = self.output(ep, shape);
        let rows = Rows::new(output.rows).pitch_bytes(output.pitch_bytes);
        let out = Combined::new(self.out.view()).pitch_bytes(PITCH);
        ep.combine(stream, handle, &rows, &out)
    }

    fn check(&self, what: &str) {
        let named = [
            ("tokens", &self.x),
            ("choices", &self.idx),
            ("weights", &self.weights),
            ("rows", &self.rows),
            ("counts", &self.counts),
            ("offsets", &self.offsets),
            ("sums", &self.out),
        ];
        named.iter().for_each(|(name, memory)| memory.check(&format!("{name} of {what}")));
        self.described.iter().for_each(|memory| memory.check(&format!("descriptions of {what}")));
    }
}

const LOCAL_EXPERTS: usize = 2;
const TOKENS: [usize; 3] = [40, 96, 7];

fn contexts(world: &World, device: &Device, shape: Shape, salt: usize, rounds: bool) -> AllToAll {
    let builder = AllToAll::builder(world)
        .device(device.clone())
        .hidden(HIDDEN)
        .experts(world.size() * LOCAL_EXPERTS)
        .top_k(TOP_K)
        .max_tokens_per_rank(MAX_TOKENS)
        .sms(4)
        .timeout(Duration::from_secs(2))
        .tuning(|t| (t.meta_tile, t.handles, t.ordered) = (Some(32), 4, false));
    let compact = (salt / 2).is_multiple_of(2);
    let builder = builder.tuning(|t| (t.compact_handles, t.handle_rows) = (Some(compact), Some(4096)));
    let builder = if rounds { builder.tuning(|t| t.round_tokens = Some(MAX_TOKENS / 3)) } else { builder };
    let builder = if shape == Shape::InPlace {
        builder.tuning(|t| t.in_place = Some((capacity_of(shape, TOKENS[0]), 1)))
    } else {
        builder
    };
    let proxied = PROXY
        .with(|own| own.borrow().as_ref().map(|proxy| builder.clone().proxy(proxy).tuning(|t| t.chunk_rows = Some(8))));
    proxied.unwrap_or(builder).build().unwrap()
}

thread_local! {
    /// The proxy of this thread's rank, between nodes.
    static PROXY: RefCell<Option<Proxy>> = const { RefCell::new(None) };
}

/// Room for so many tokens of each rank: fewer than what some calls have, and without a row to spare.
fn capacity_of(shape: Shape, tokens: usize) -> usize {
    if shape == Shape::Masked { tokens } else { 2 * tokens }
}

/// The outcomes of a rank's calls.
type Outcomes = Mutex<Vec<(usize, Vec<Error>)>>;

/// All errors that a context reports, each once.
fn errors(ep: &AllToAll) -> Vec<Error> {
    let mut all: Vec<Error> = Vec::new();
    while let Err(error) = ep.check() {
        if all.contains(&error) {
            break;
        }
        all.push(error);
    }
    all
}

/// Asserts that a rank's errors are allowed: they are of its own launches, or name rank 0, or report an output that is
/// too small, as without an overlap.
fn expect_allowed(rank: usize, errors: &[Error]) {
    for error in errors {
        let allowed = match error {
            // Rank 0's launches may have gone in another order than those of its peers.
            Error::Order { rank: own, problem, .. } => {
                (rank == 0 && own.index() == 0) || problem.contains(" on rank 0,")
            }
            // Rank 0 forwards rows of rank 2, of another node, to rank 1: a wait for these names the source.
            Error::Timeout { peer, .. } => rank != 0 && (peer.index() == 0 || (rank, peer.index()) == (1, 2)),
            Error::Capacity { .. } | Error::Incomplete { .. } => true,
            _ => false,
        };
        assert!(allowed, "rank {rank}: {error}");
    }
}

fn has_order(errors: &[Error]) -> bool {
    errors.iter().any(|error| matches!(error, Error::Order { problem, .. } if problem.contains("at the same time")))
}

/// The errors of refused calls, then those that the context reports once all enqueued work is over. Nothing may be
/// stored outside of the calls' memory.
fn settle(ep: &AllToAll, streams: &[Stream], calls: &[Call], mut found: Vec<Error>, what: &str) -> Vec<Error> {
    streams.iter().for_each(|stream| stream.synchronize(PATIENCE).unwrap());
    found.extend(errors(ep));
    calls.iter().for_each(|call| call.check(what));
    found
}

/// Calls of rank 0 at once on streams of their own, and of the other rank one after the other.
fn dispatches(world: &World, device: &Device, shape: Shape, salt: usize, rounds: bool) -> Vec<Error> {
    let rank = world.rank().index();
    let ep = contexts(world, device, shape, salt, rounds);
    let calls: Vec<Call> = TOKENS
        .iter()
        .enumerate()
        .map(|(i, tokens)| {
            let (tokens, capacity) = if rank == 0 { (*tokens, *tokens) } else { (TOKENS[0], TOKENS[0]) };
            let capacity = capacity_of(shape, if shape == Shape::InPlace { TOKENS[0] } else { capacity });
            Call::new(device, world.size(), tokens, capacity, shape == Shape::Masked, salt + i)
        })
        .collect();
    let streams: Vec<Stream> = calls.iter().map(|_| device.new_stream().unwrap()).collect();
    let mut handles = Vec::new();
    let mut found = Vec::new();
    for (call, stream) in calls.iter().zip(&streams) {
        match call.dispatch(&ep, stream, shape) {
            Ok(handle) => handles.push(handle),
            Err(error) => found.push(error),
        }
        if rank != 0 {
            stream.synchronize(PATIENCE).unwrap();
        }
    }
    settle(&ep, &streams, &calls, found, &format!("rank {rank}, {shape:?}, salt {salt}"))
}

/// Dispatches of all ranks one after the other; then combines of rank 0 at once.
fn combines(world: &World, device: &Device, shape: Shape, salt: usize, rounds: bool) -> Vec<Error> {
    let rank = world.rank().index();
    let ep = contexts(world, device, shape, salt, rounds);
    let calls: Vec<Call> = TOKENS
        .iter()
        .enumerate()
        .map(|(i, tokens)| {
            let tokens = if rank == 0 { *tokens } else { TOKENS[0] };
            let capacity = capacity_of(shape, MAX_TOKENS) * 2;
            Call::new(device, world.size(), tokens, capacity, shape == Shape::Masked, salt + i)
        })
        .collect();
    let streams: Vec<Stream> = calls.iter().map(|_| device.new_stream().unwrap()).collect();
    let first = &streams[0];
    let handles: Vec<Handle> = calls.iter().map(|call| call.dispatch(&ep, first, shape).unwrap()).collect();
    first.synchronize(PATIENCE).unwrap();
    assert_eq!(errors(&ep), [], "rank {rank}");
    let mut found = Vec::new();
    for ((call, handle), stream) in calls.iter().zip(&handles).zip(&streams) {
        found.extend(call.combine(&ep, stream, handle, shape).err());
        if rank != 0 {
            stream.synchronize(PATIENCE).unwrap();
        }
    }
    settle(&ep, &streams, &calls, found, &format!("rank {rank}, combine of {shape:?}, salt {salt}"))
}

/// A graph of a dispatch and its combine, launched on two streams at once by rank 0, and one after the other by the
/// other.
fn graphs(world: &World, device: &Device, shape: Shape, salt: usize, rounds: bool) -> Vec<Error> {
    let rank = world.rank().index();
    let ep = contexts(world, device, shape, salt, rounds);
    let capacity = capacity_of(shape, MAX_TOKENS) * 2;
    let call = Call::new(device, world.size(), TOKENS[rank.min(1)], capacity, shape == Shape::Masked, salt);
    let streams = [device.new_stream().unwrap(), device.new_stream().unwrap()];
    streams[0].begin_capture().unwrap();
    let handle = call.dispatch(&ep, &streams[0], shape).unwrap();
    call.combine(&ep, &streams[0], &handle, shape).unwrap();
    let graph = streams[0].end_capture().unwrap();
    for stream in &streams {
        graph.launch(stream).unwrap();
        if rank != 0 {
            stream.synchronize(PATIENCE).unwrap();
        }
    }
    settle(&ep, &streams, &[call], Vec::new(), &format!("rank {rank}, graph of {shape:?}, salt {salt}"))
}

type Scenario = fn(&World, &Device, Shape, usize, bool) -> Vec<Error>;

/// Runs a scenario under so many schedules; returns in how many rank 0 found an overlap.
fn schedules(scenario: Scenario, shape: Shape, rounds: bool, seeds: std::ops::Range<u64>) -> usize {
    let mut overlaps = 0;
    for seed in seeds {
        let worlds = World::threads(2).unwrap();
        let outcomes = Outcomes::default();
        let config = SeededConfig { seed, hold_stores: seed % 2 == 1, stopped: None };
        let report = seeded_world(config, 2, |rank, device| {
            let found = scenario(&worlds[rank], &device, shape, seed as usize, rounds);
            outcomes.lock().unwrap().push((rank, found));
        });
        assert_eq!(report.failure, None, "seed {seed}: {:?}", report.hang_report);
        let outcomes = outcomes.into_inner().unwrap();
        assert_eq!(outcomes.len(), 2, "seed {seed}");
        let order = outcomes.iter().any(|(_, errors)| has_order(errors));
        for (rank, errors) in &outcomes {
            expect_allowed(*rank, errors);
        }
        // Ranks were held up only by an overlap.
        let closed = outcomes.iter().flat_map(|(_, errors)| errors).any(|error| matches!(error, Error::Timeout { .. }));
        assert!(order || !closed, "seed {seed}: {outcomes:?}");
        overlaps += usize::from(order);
    }
    overlaps
}

/// Most schedules begin a launch while another one runs.
fn expect_most(overlaps: usize, of: usize) {
    println!("{overlaps} of {of} schedules had an overlap");
    assert!(overlaps * 2 > of, "{overlaps} of {of} schedules had an overlap: are calls ordered by something?");
}

#[test]
fn dispatches_that_overlap_store_nothing_elsewhere() {
    for (i, shape) in [Shape::Contiguous, Shape::Masked, Shape::Token, Shape::InPlace].into_iter().enumerate() {
        let first = 100 * i as u64;
        expect_most(schedules(dispatches, shape, false, first..first + 40), 40);
    }
}

#[test]
fn dispatches_of_several_rounds_that_overlap_store_nothing_elsewhere() {
    expect_most(schedules(dispatches, Shape::Contiguous, true, 500..540), 40);
}

#[test]
fn combines_that_overlap_store_nothing_elsewhere() {
    expect_most(schedules(combines, Shape::Contiguous, false, 600..630), 30);
    expect_most(schedules(combines, Shape::Token, true, 700..715), 15);
}

#[test]
fn graphs_that_overlap_store_nothing_elsewhere() {
    expect_most(schedules(graphs, Shape::Contiguous, false, 800..830), 30);
    expect_most(schedules(graphs, Shape::Masked, true, 900..915), 15);
}

/// Rank 0 launches graphs of a dispatch and of its combine, and then that dispatch once more, of another number of
/// tokens and other choices: it writes the handle while the combine reads it. The other rank has a handle for each.
fn recounted(world: &World, device: &Device, shape: Shape, salt: usize, rounds: bool) -> Vec<Error> {
    let rank = world.rank().index();
    let ep = contexts(world, device, shape, salt, rounds);
    let capacity = 2 * capacity_of(shape, MAX_TOKENS);
    let [call, changed] =
        [salt, salt + 1].map(|salt| Call::new(device, world.size(), MAX_TOKENS, capacity, false, salt));
    // Some of the same number of tokens, of other ranks.
    let fewer = if salt.is_multiple_of(2) { 1 } else { 96 };
    let counts = [96i32, fewer].map(|count| {
        let word = Guarded::new(device, 4);
        word.write(&count.to_ne_bytes());
        word
    });
    let streams = [device.new_stream().unwrap(), device.new_stream().unwrap()];
    let dispatch = |stream: &Stream| {
        let tokens = call.counted(TokenCount::Device(counts[0].view()));
        ep.dispatch(stream, &tokens, &call.output(&ep, shape))
    };
    let change = |stream: &Stream| {
        stream.copy(&counts[0].view(), &counts[1].view()).unwrap();
        stream.copy(&call.idx.view(), &changed.idx.view()).unwrap();
    };
    let mut found = Vec::new();
    if rank == 0 {
        streams[0].begin_capture().unwrap();
        let handle = dispatch(&streams[0]).unwrap();
        let first = streams[0].end_capture().unwrap();
        streams[0].begin_capture().unwrap();
        call.combine(&ep, &streams[0], &handle, shape).unwrap();
        let second = streams[0].end_capture().unwrap();
        first.launch(&streams[1]).unwrap();
        streams[1].synchronize(PATIENCE).unwrap();
        change(&streams[1]);
        first.launch(&streams[1]).unwrap();
        second.launch(&streams[0]).unwrap();
        streams.iter().for_each(|stream| stream.synchronize(PATIENCE).unwrap());
        second.launch(&streams[0]).unwrap();
    } else {
        // Kept: nothing here has calls on one stream wait for those on the other.
        let mut handles = Vec::new();
        for _ in 0..2 {
            let called = dispatch(&streams[0]).and_then(|handle| {
                streams[0].synchronize(PATIENCE).unwrap();
                handles.push(handle);
                call.combine(&ep, &streams[1], &handles[handles.len() - 1], shape)
            });
            found.extend(called.err());
            change(&streams[0]);
        }
        streams.iter().for_each(|stream| stream.synchronize(PATIENCE).unwrap());
    }
    let [counts, other] = counts;
    let found = settle(&ep, &streams, &[call], found, &format!("rank {rank}, another count, salt {salt}"));
    [counts, other].iter().for_each(|word| word.check("a count"));
    found
}

/// Its blocks may use the heads of two dispatches, and then wait until their deadline for rows that none of these
/// sends; but threads of a block do not wait for each other.
#[test]
fn threads_of_a_combine_go_by_one_head() {
    // Seed 479 finds lanes of a warp that go by masks of their own.
    for seed in (0..150).chain(440..500) {
        let worlds = World::threads(2).unwrap();
        let config = SeededConfig { seed, hold_stores: seed % 2 == 1, stopped: None };
        let report = seeded_world(config, 2, |rank, device| {
            for error in recounted(&worlds[rank], &device, Shape::Contiguous, seed as usize, false) {
                let allowed = matches!(&error, Error::Timeout { peer, .. } if rank == 0 || peer.index() == 0)
                    || matches!(&error, Error::Order { .. });
                assert!(allowed, "seed {seed}, rank {rank}: {error}");
            }
        });
        assert_eq!(report.failure, None, "seed {seed}: {:?}", report.hang_report);
    }
}

/// Barriers are launches of one direction, too.
#[test]
fn barriers_that_overlap_are_refused() {
    let barriers: Scenario = |world, device, shape, _, rounds| {
        let ep = contexts(world, device, shape, 0, rounds);
        let streams = [device.new_stream().unwrap(), device.new_stream().unwrap()];
        let mut found = Vec::new();
        for stream in &streams {
            found.extend(ep.barrier(stream).err());
            if world.rank().index() != 0 {
                stream.synchronize(PATIENCE).unwrap();
            }
        }
        streams.iter().for_each(|stream| stream.synchronize(PATIENCE).unwrap());
        found.extend(errors(&ep));
        found
    };
    expect_most(schedules(barriers, Shape::Contiguous, false, 0..40), 40);
}

/// A dispatch concurrent with a combine is allowed, and the next calls work.
#[test]
fn a_dispatch_beside_a_combine_is_none() {
    let beside: Scenario = |world, device, shape, salt, rounds| {
        let ep = contexts(world, device, shape, salt, rounds);
        let capacity = 2 * capacity_of(shape, MAX_TOKENS);
        let calls: Vec<Call> =
            (0..4).map(|i| Call::new(device, world.size(), TOKENS[i % 3], capacity, false, salt + i)).collect();
        let (dispatching, combining) = (device.new_stream().unwrap(), device.new_stream().unwrap());
        let mut handles: Vec<Handle> = Vec::new();
        for (i, call) in calls.iter().enumerate() {
            dispatching.synchronize(PATIENCE).unwrap();
            if let Some(handle) = handles.last() {
                calls[i - 1].combine(&ep, &combining, handle, shape).unwrap();
            }
            handles.push(call.dispatch(&ep, &dispatching, shape).unwrap());
        }
        [&dispatching, &combining].iter().for_each(|stream| stream.synchronize(PATIENCE).unwrap());
        errors(&ep)
    };
    assert_eq!(schedules(beside, Shape::Contiguous, false, 0..20), 0);
}

/// The crate takes a capture of `owner` that is recorded through a borrowed stream for another library's.
#[test]
fn graphs_of_another_library_are_guarded() {
    if Device::cuda_count() == 0 {
        println!("no GPU: the host's part is tested beside `recording`, the device's part above");
        return;
    }
    let device = Device::cuda(0).unwrap();
    let world = World::threads(1).unwrap().remove(0);
    let builder = AllToAll::builder(&world).device(device.clone()).hidden(HIDDEN).experts(LOCAL_EXPERTS).top_k(TOP_K);
    // Few blocks, so that two launches fit side by side.
    let builder = builder.max_tokens_per_rank(MAX_TOKENS).sms(4).timeout(Duration::from_secs(2));
    let ep = builder.tuning(|t| t.detect_overlaps = Some(true)).build().unwrap();
    let call = Call::new(&device, 1, MAX_TOKENS, 2 * MAX_TOKENS, false, 1);
    let record = |owner: &Stream, stream: &Stream| {
        owner.begin_capture().unwrap();
        let handle = call.dispatch(&ep, stream, Shape::Contiguous).unwrap();
        call.combine(&ep, stream, &handle, Shape::Contiguous).unwrap();
        (owner.end_capture().unwrap(), handle)
    };
    let streams = [device.new_stream().unwrap(), device.new_stream().unwrap()];
    let (own, own_handle) = record(&streams[0], &streams[0]);
    own.launch(&streams[0]).unwrap();
    streams[0].synchronize(PATIENCE).unwrap();
    // SAFETY: live streams of the primary context, which outlive the borrowers; all that is recorded lives as long.
    let borrowed = streams.each_ref().map(|owner| unsafe { device.stream_from_raw(owner.raw()).unwrap() });
    let recorded = [0, 1].map(|i| record(&streams[i], &borrowed[i]));
    let refused = own.launch(&streams[0]).unwrap_err();
    assert!(refused.to_string().contains("record it again"), "{refused}");
    // One after the other they work, beside calls and the crate's own graphs that are recorded now.
    let (again, again_handle) = record(&streams[0], &streams[0]);
    for _ in 0..20 {
        recorded.iter().for_each(|(graph, _)| graph.launch(&streams[0]).unwrap());
        again.launch(&streams[0]).unwrap();
        let handle = call.dispatch(&ep, &streams[0], Shape::Contiguous).unwrap();
        call.combine(&ep, &streams[0], &handle, Shape::Contiguous).unwrap();
    }
    streams[0].synchronize(PATIENCE).unwrap();
    assert_eq!(errors(&ep), []);
    for _ in 0..500 {
        recorded.iter().zip(&streams).for_each(|((graph, _), stream)| graph.launch(stream).unwrap());
    }
    streams.iter().for_each(|stream| stream.synchronize(PATIENCE).unwrap());
    let found = errors(&ep);
    assert!(has_order(&found) && found.len() == 1, "{found:?}");
    call.check("calls of another library's graphs");
    drop((own_handle, again_handle));
}

/// Ranks as threads, one of which is a rail of the other two. A host that pauses between its calls orders them, so a
/// scenario is repeated until its calls overlap.
#[test]
fn calls_between_nodes_that_overlap_store_nothing_elsewhere() {
    for (round, scenario) in [dispatches as Scenario, combines, graphs].into_iter().enumerate() {
        for sizes in [&[1, 1][..], &[2, 1]] {
            let overlapped = (0..10).any(|_| overlaps_between_nodes(scenario, sizes, round));
            assert!(overlapped, "scenario {round}, {sizes:?}: are calls ordered by something?");
        }
    }
}

/// Whether calls of rank 0 overlapped.
fn overlaps_between_nodes(scenario: Scenario, sizes: &[usize], round: usize) -> bool {
    let ranks = sizes.iter().sum();
    let config = SimConfig { clock: Clock::Real, ..SimConfig::hostile(round as u64) };
    let network = Network::new(ranks, config).unwrap();
    let outcomes = Outcomes::default();
    std::thread::scope(|scope| {
        for world in World::threads(ranks).unwrap() {
            let (network, outcomes) = (&network, &outcomes);
            scope.spawn(move || {
                let world = world.with_nodes(sizes).unwrap();
                let rank = world.rank().index();
                let thread = ThreadConfig { core: None, spinners: 64 };
                let liveness = Liveness { silence_ns: 30_000_000_000, ..Liveness::default() };
                let endpoint = network.endpoint(world.rank()).unwrap();
                let config = ProxyConfig { liveness, thread };
                let proxy = Proxy::spawn(&world, Box::new(endpoint), config).unwrap();
                PROXY.with(|own| *own.borrow_mut() = Some(proxy));
                let device = Device::cpu().unwrap();
                let found = scenario(&world, &device, Shape::Contiguous, round, false);
                outcomes.lock().unwrap().push((rank, found));
                world.barrier("all have ended").unwrap();
                PROXY.with(|own| *own.borrow_mut() = None);
            });
        }
    });
    let outcomes = outcomes.into_inner().unwrap();
    assert_eq!(outcomes.len(), ranks, "a rank has failed");
    // A rank whose output was too small makes no further call, for which others wait.
    let too_small = |errors: &[Error]| errors.iter().any(|error| matches!(error, Error::Capacity { .. }));
    let refused: Vec<usize> = outcomes.iter().filter(|(_, errors)| too_small(errors)).map(|(rank, _)| *rank).collect();
    for (rank, errors) in &outcomes {
        let waits = |error: &Error| matches!(error, Error::Timeout { peer, .. } if refused.contains(&peer.index()));
        let others: Vec<Error> = errors.iter().filter(|error| !waits(error)).cloned().collect();
        expect_allowed(*rank, &others);
    }
    outcomes.iter().any(|(_, errors)| has_order(errors))
}

// ---- input that changes ------------------------------------------------------------------------------------------

/// Choices that a copy on another stream overwrites while the dispatch reads them; then a combine. Calls may come to
/// nothing, but store nothing elsewhere.
fn changing(world: &World, device: &Device, shape: Shape, salt: usize, rounds: bool) -> Vec<Error> {
    let ep = contexts(world, device, shape, salt, rounds);
    let capacity = capacity_of(shape, TOKENS[0]);
    let [call, other] =
        [salt, salt + 1].map(|salt| Call::new(device, world.size(), TOKENS[0], capacity, shape == Shape::Masked, salt));
    let [stream, beside] = [device.new_stream().unwrap(), device.new_stream().unwrap()];
    let handle = call.dispatch(&ep, &stream, shape).unwrap();
    beside.copy(&call.idx.view(), &other.idx.view()).unwrap();
    let found = call.combine(&ep, &stream, &handle, shape).err().into_iter().collect();
    let what = format!("rank {}, changing choices of {shape:?}, salt {salt}", world.rank());
    settle(&ep, &[stream, beside], &[call, other], found, &what)
}

#[test]
fn choices_that_change_while_they_are_read_lead_to_no_row_outside_of_an_output() {
    for (i, shape) in [Shape::Contiguous, Shape::Masked, Shape::Token, Shape::InPlace].into_iter().enumerate() {
        for seed in 0..60 {
            let worlds = World::threads(2).unwrap();
            let config = SeededConfig { seed: 1000 * i as u64 + seed, hold_stores: seed % 2 == 1, stopped: None };
            let report = seeded_world(config, 2, |rank, device| {
                for error in changing(&worlds[rank], &device, shape, seed as usize, false) {
                    let allowed =
                        matches!(error, Error::Timeout { .. } | Error::Routing { .. } | Error::Capacity { .. })
                            || matches!(error, Error::Incomplete { .. } | Error::PeerLost { .. });
                    assert!(allowed, "seed {seed}, {shape:?}, rank {rank}: {error}");
                }
            });
            assert_eq!(report.failure, None, "seed {seed}, {shape:?}: {:?}", report.hang_report);
        }
    }
}

// ---- words of calls that overlap, forged ---------------------------------------------------------------------

/// A word of memory that kernels on the CPU device read.
fn forge<T>(address: u64, word: T) {
    // SAFETY: within the arena or the state of a context that is alive, at an aligned address; kernels look at such
    // words while others write them.
    unsafe { (address as *mut T).write_volatile(word) };
}

/// The bytes of `ty_state`, the offsets of `closed` and `ended` in it, the bytes of a block's words, and the offset of
/// `begun` in a block's words.
const STATE: [u64; 5] = [128, 92, 96, 32, 28];

/// A launch that has not ended on another block, and one that runs on the same.
#[test]
fn a_launch_under_way_on_any_block_is_seen() {
    let [size, closed, ended, per_block, begun] = STATE;
    // As many as contexts begin with, and blocks of them.
    let launches = u32::MAX - 1;
    let blocks = launches.wrapping_mul(4);
    for (at, word) in [(ended, blocks - 1), (size + 2 * per_block + begun, launches + 1), (ended, blocks)] {
        let device = Device::cpu().unwrap();
        let world = World::threads(1).unwrap().remove(0);
        let ep = contexts(&world, &device, Shape::Contiguous, 0, false);
        let [_, state] = ep.addresses().unwrap();
        forge(state + at, word);
        let call = Call::new(&device, 1, 8, 32, false, 0);
        let stream = device.new_stream().unwrap();
        call.dispatch(&ep, &stream, Shape::Contiguous).unwrap();
        stream.synchronize(PATIENCE).unwrap();
        let found = errors(&ep);
        assert_eq!(has_order(&found), word != blocks, "{found:?}");
        assert_eq!(found.len(), usize::from(word != blocks), "{found:?}");
        // SAFETY: a word of the state of a context that is alive; its stream is idle.
        let is_closed = unsafe { ((state + closed) as *const u32).read_volatile() };
        assert_eq!(is_closed, u32::from(word != blocks), "launches that wait for nobody any more would wait on");
        call.check("the call");
        // The context stays closed.
        assert_eq!(call.dispatch(&ep, &stream, Shape::Contiguous).err(), found.first().cloned());
    }
}

/// Rank 0's words in the arena of rank 1, at known addresses.
struct Forger<'a> {
    plan: &'a Plan,
    arena: u64,
}

impl Forger<'_> {
    /// Word `index` of rank 0, of a region that is kept twice.
    fn place(&self, region: &str, source: u64, epoch: u64, index: u64) -> u64 {
        let buffer = self.plan.buffers().iter().find(|buffer| buffer.name == region).unwrap();
        let parity = buffer.bytes / 2;
        self.arena + buffer.offset + (epoch & 1) * parity + source * (parity / 2) + 8 * index
    }

    fn meta(&self, region: &str, index: u64, value: u32) {
        forge(self.place(region, 0, 1, index), 1u64 << 32 | u64::from(value.wrapping_add(1)));
    }
}

/// Rank 1 dispatches `tokens`. Rank 0 does not dispatch: `forged` writes words in its name before, and it raises the
/// flags by which rank 1 goes on.
fn against_forged(shape: Shape, rounds: bool, tokens: usize, forged: impl Fn(&Forger<'_>) + Sync) {
    let place = Mutex::new(None);
    std::thread::scope(|scope| {
        for world in World::threads(2).unwrap() {
            let (place, forged) = (&place, &forged);
            scope.spawn(move || {
                let device = Device::cpu().unwrap();
                let ep = contexts(&world, &device, shape, 2, rounds);
                let [arena, _] = ep.addresses().unwrap();
                let own = Forger { plan: ep.plan(), arena };
                if world.rank().index() == 1 {
                    forged(&own);
                    *place.lock().unwrap() = Some(arena);
                    world.barrier("words are forged").unwrap();
                    let capacity = if shape == Shape::InPlace { capacity_of(shape, TOKENS[0]) } else { 16 };
                    let call = Call::new(&device, 2, tokens, capacity, shape == Shape::Masked, 0);
                    let stream = device.new_stream().unwrap();
                    call.dispatch(&ep, &stream, shape).unwrap();
                    stream.synchronize(PATIENCE).unwrap();
                    assert_eq!(errors(&ep), [], "{shape:?}");
                    call.check(&format!("{shape:?}"));
                } else {
                    world.barrier("words are forged").unwrap();
                    let arena = place.lock().unwrap().unwrap();
                    let peer = Forger { plan: ep.plan(), arena };
                    for epoch in 1..=ep.rounds() as u64 {
                        let came = own.place("metadata flags", 1, epoch, 0) as *const u64;
                        // SAFETY: a word of the own arena, which the peer's kernel writes.
                        let came = || (unsafe { came.read_volatile() } == epoch << 32).then_some(());
                        tokenyard::internals::base::wait::poll("the peer's flag", PATIENCE, came).unwrap();
                        forge(peer.place("metadata flags", 0, epoch, 0), epoch << 32);
                    }
                }
                world.barrier("done").unwrap();
            });
        }
    });
}

/// Counts of a call of one token, and tokens, choices and positions of one of eight.
#[test]
fn rows_that_lie_outside_of_an_output_by_their_metadata_are_not_stored() {
    for shape in [Shape::Contiguous, Shape::Masked, Shape::Token] {
        against_forged(shape, false, 0, |forger| {
            [1, 1, 1, 8]
                .iter()
                .enumerate()
                .for_each(|(i, value)| forger.meta("routing metadata counts", i as u64, *value));
            for token in 0..8u32 {
                let at = u64::from(token);
                forger.meta("routing metadata tokens", at, 1 + ((20 * token) << 5));
                forger.meta("routing metadata choices", 2 * at, 1 + (((20 * token) << 11) | 1));
                forger.meta("routing metadata choices", 2 * at + 1, 0);
                (0..2).for_each(|k| forger.meta("routing metadata weights", 2 * at + k, 0x3f00_0000));
                (0..8).for_each(|slice| forge(forger.place("dispatch row tags", 0, 1, 8 * at + slice), 1u64));
            }
        });
    }
}

/// Rounds 1 and 2 end before they begin, and later than a round may.
#[test]
fn rounds_of_two_calls_have_no_tokens() {
    against_forged(Shape::Contiguous, true, 0, |forger| {
        [0, 0, 0, 32, 7, 96]
            .iter()
            .enumerate()
            .for_each(|(i, value)| forger.meta("routing metadata counts", i as u64, *value));
        (0..96).for_each(|token| forger.meta("routing metadata tokens", token, 0));
    });
}

/// Rows of rank 1 begin far beyond the output of rank 0, which has room for all.
#[test]
fn rows_are_not_stored_beyond_a_peers_output() {
    against_forged(Shape::InPlace, false, 8, |forger| {
        [0, 0, 0, 0].iter().enumerate().for_each(|(i, value)| forger.meta("routing metadata counts", i as u64, *value));
        for (i, value) in [0u32.wrapping_sub(64), 64, 0, 0, 0, 0].iter().enumerate() {
            forger.meta("routing metadata counts of all ranks", i as u64, *value);
        }
    });
}
