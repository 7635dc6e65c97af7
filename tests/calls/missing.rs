//! Ranks that are missing: calls go on without those that are masked or fall silent, whatever these had sent by then,
//! and every row and sum of the others is right. Ranks that are alive are never masked.

mod nodes;
mod schedules;

use crate::rig;

use rig::{EXPERTS, HIDDEN, MAX_TOKENS, PATIENCE, Rig, TOP_K, builder, on_ranks, test_device, values};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tokenyard::internals::kernels::{SeededConfig, Stopped, seeded_world};
use tokenyard::*;

const ROW: usize = HIDDEN * 2;

/// How much of a rank's part in a call counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Came {
    Whole,
    Not,
    /// Its rows were counted and did not all come.
    InPart,
}

/// How a call is made.
#[derive(Debug, Clone, Copy)]
struct Call {
    salt: usize,
    /// Contiguous, masked, by token.
    layout: usize,
    halves: bool,
    counts_first: bool,
}

impl Call {
    fn number(salt: usize) -> Call {
        Call { salt, layout: salt % 3, halves: salt % 2 == 1, counts_first: salt % 4 == 3 }
    }
}

fn choices(rank: usize, token: usize, salt: usize) -> [i32; TOP_K] {
    let first = (rank * 3 + token * 5 + salt) % EXPERTS;
    match (rank + token + salt) % 4 {
        0 => [first as i32, -1],
        1 => [(first ^ 1) as i32, first as i32],
        _ => [first as i32, ((first + 3) % EXPERTS) as i32],
    }
}

fn weight(rank: usize, token: usize, k: usize, salt: usize) -> f32 {
    [0.5, 0.25, 1.25, 0.75][(rank + token * 2 + k + salt) % 4]
}

fn factor(expert: usize) -> f32 {
    1.0 + expert as f32 / 4.0
}

/// To bf16, to nearest even.
fn rounded(value: f32) -> f32 {
    let bits = value.to_bits();
    f32::from_bits((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff_0000)
}

fn bytes_of(row: &[f32]) -> Vec<u8> {
    row.iter().flat_map(|value| ((value.to_bits() >> 16) as u16).to_ne_bytes()).collect()
}

fn read(buffer: &DeviceBuffer) -> Vec<u8> {
    let mut bytes = vec![0; buffer.len()];
    buffer.read(0, &mut bytes).unwrap();
    bytes
}

fn words(buffer: &DeviceBuffer) -> Vec<i32> {
    read(buffer).as_chunks::<4>().0.iter().map(|word| i32::from_ne_bytes(*word)).collect()
}

/// A rank with outputs of its own.
struct Member {
    rig: Rig,
    ranks: usize,
    rows: DeviceBuffer,
    row_expert: DeviceBuffer,
    source: DeviceBuffer,
    token_experts: DeviceBuffer,
    token_weights: DeviceBuffer,
    /// For the mask: an allocation waits for what runs on a GPU, which may wait for this rank.
    spare: DeviceBuffer,
    capacity: usize,
    weights: Weights,
    /// Ranks of each node.
    nodes: Vec<usize>,
}

impl Member {
    fn new(world: &World, device: Device, change: impl Fn(AllToAllBuilder) -> AllToAllBuilder) -> Member {
        let rig = Rig::on(world, device, &change);
        let local = EXPERTS / world.size();
        let capacity = world.size() * MAX_TOKENS;
        let alloc = |bytes: usize| rig.ep.device().alloc(bytes).unwrap();
        let most = (rig.capacity + EXPERTS).max(capacity * local);
        let (rows, row_expert, source) = (alloc(most * ROW), alloc(4 * most), alloc(8 * most));
        let (token_experts, token_weights) = (alloc(4 * most * TOP_K), alloc(4 * most * TOP_K));
        world.barrier("outputs").unwrap();
        let (ranks, weights, spare) = (world.size(), Weights::Dispatch, alloc(4 * world.size()));
        let nodes = world.nodes().to_vec();
        Member { rig, ranks, rows, row_expert, source, token_experts, token_weights, spare, capacity, weights, nodes }
    }

    /// Of a context whose weights come so.
    fn with_weights(self, weights: Weights) -> Member {
        Member { weights, ..self }
    }

    /// Call number `salt`, of a layout that has weights in that way.
    fn call(&self, salt: usize) -> Call {
        Call { layout: if self.weights == Weights::Combine { salt % 2 } else { salt % 3 }, ..Call::number(salt) }
    }

    fn put(&self, call: Call) {
        let routed: Vec<_> = (0..MAX_TOKENS).map(|token| choices(self.rig.rank, token, call.salt)).collect();
        self.rig.route(&routed, call.salt);
        let weights: Vec<u8> = (0..MAX_TOKENS * TOP_K)
            .flat_map(|i| weight(self.rig.rank, i / TOP_K, i % TOP_K, call.salt).to_ne_bytes())
            .collect();
        self.rig.weight.write(0, &weights).unwrap();
        for buffer in [&self.rows, &self.row_expert, &self.source, &self.token_experts, &self.rig.expert_count] {
            buffer.fill(0xEE).unwrap();
        }
    }

    fn tokens(&self) -> Tokens {
        match self.weights {
            Weights::Dispatch => self.rig.tokens(MAX_TOKENS),
            _ => Tokens::new(self.rig.x.view(), self.rig.idx.view(), TokenCount::Host(MAX_TOKENS)).pitch_bytes(ROW),
        }
    }

    fn output(&self, call: Call) -> Output {
        let capacity = self.capacity;
        let layout = match call.layout {
            0 => Layout::Contiguous { align: 2, capacity: self.rig.capacity + EXPERTS },
            1 => Layout::Masked { per_expert: capacity },
            _ => Layout::Token { capacity },
        };
        let output = Output::new(layout, self.rows.view(), self.rig.expert_count.view()).pitch_bytes(ROW);
        let output = output.row_expert(self.row_expert.view()).source(self.source.view());
        match call.layout {
            2 => output.token_experts(self.token_experts.view()).token_weights(self.token_weights.view()),
            _ => output,
        }
    }

    fn dispatch(&self, call: Call) -> Result<Handle> {
        let (ep, stream, tokens, output) = (&self.rig.ep, &self.rig.stream, self.tokens(), self.output(call));
        let handle = if call.counts_first {
            let sent = ep.dispatch_send_counts(stream, &tokens)?;
            ep.dispatch_recv(stream, sent, &output).map_err(|refused| refused.error)?
        } else if call.halves {
            let sent = ep.dispatch_send(stream, &tokens)?;
            ep.dispatch_recv(stream, sent, &output).map_err(|refused| refused.error)?
        } else {
            ep.dispatch(stream, &tokens, &output)?
        };
        stream.synchronize(PATIENCE)?;
        ep.check().map(|()| handle)
    }

    fn rows(&self) -> Rows {
        let rows = Rows::new(self.rows.view()).pitch_bytes(ROW);
        if self.weights == Weights::Combine { rows.topk_weight(self.rig.weight.view()) } else { rows }
    }

    /// The experts, and combine.
    fn combine(&self, call: Call, handle: &Handle) -> Result<()> {
        self.compute(call);
        let (ep, stream) = (&self.rig.ep, &self.rig.stream);
        if call.halves {
            let sent = ep.combine_send(stream, handle, &self.rows())?;
            ep.combine_recv(stream, sent, &self.rig.combined()).map_err(|refused| refused.error)?;
        } else {
            ep.combine(stream, handle, &self.rows(), &self.rig.combined())?;
        }
        stream.synchronize(PATIENCE)?;
        ep.check()
    }

    fn compute(&self, call: Call) {
        let (experts, sources) = (words(&self.row_expert), words(&self.source));
        let per_rank = EXPERTS / self.ranks;
        let mut rows = read(&self.rows);
        for (i, row) in rows.chunks_exact_mut(ROW).enumerate() {
            let scale = match call.layout {
                2 if sources[2 * i] >= 0 => factor(self.rig.rank),
                0 | 1 if experts[i] >= 0 => factor(self.rig.rank * per_rank + experts[i] as usize % EXPERTS),
                _ => continue,
            };
            let made: Vec<f32> = values(row).iter().map(|value| rounded(value * scale)).collect();
            row.copy_from_slice(&bytes_of(&made));
        }
        self.rows.write(0, &rows).unwrap();
    }

    /// Takes part in a call until then.
    fn play_until(&self, stop: Stop, call: Call) {
        let (ep, stream) = (&self.rig.ep, &self.rig.stream);
        match stop {
            Stop::BeforeDispatch => {}
            Stop::AfterDispatchSend => drop(ep.dispatch_send(stream, &self.tokens()).unwrap()),
            Stop::AfterDispatch => drop(self.dispatch(call).unwrap()),
            Stop::AfterCombineSend => {
                let handle = self.dispatch(call).unwrap();
                self.compute(call);
                drop(ep.combine_send(stream, &handle, &self.rows()).unwrap());
            }
            Stop::BeforeBarrier => {
                let handle = self.dispatch(call).unwrap();
                self.combine(call, &handle).unwrap();
            }
        }
        stream.synchronize(PATIENCE).unwrap();
    }

    fn round(&self, call: Call) -> Result<()> {
        self.put(call);
        let handle = self.dispatch(call)?;
        self.combine(call, &handle)
    }

    /// What is wrong with the output of a dispatch in which sources took part so. Before the experts.
    fn wrong_rows(&self, call: Call, came: &[Came]) -> Option<String> {
        let per_rank = EXPERTS / self.ranks;
        let mine = self.rig.rank * per_rank..(self.rig.rank + 1) * per_rank;
        let takes = |source: usize, token: usize, expert: usize| {
            choices(source, token, call.salt).contains(&(expert as i32)) && came[source] != Came::Not
        };
        let tokens = || (0..self.ranks).flat_map(|source| (0..MAX_TOKENS).map(move |token| (source, token)));
        let (mut wanted, mut counts) = (Vec::new(), vec![0usize; per_rank]);
        let mut row = 0usize;
        for (local, expert) in mine.clone().enumerate() {
            for (source, token) in tokens().filter(|(source, token)| takes(*source, *token, expert)) {
                wanted.push((row + counts[local], local as i32, source, token));
                counts[local] += 1;
            }
            row = if call.layout == 0 { (row + counts[local]).next_multiple_of(2) } else { row + self.capacity };
        }
        if call.layout == 2 {
            let here = |(source, token): &(usize, usize)| mine.clone().any(|expert| takes(*source, *token, expert));
            wanted = tokens().filter(here).enumerate().map(|(row, (source, token))| (row, -1, source, token)).collect();
        }
        let (found, experts, sources) = (words(&self.rig.expert_count), words(&self.row_expert), words(&self.source));
        let (rows, token_experts) = (read(&self.rows), words(&self.token_experts));
        if found[..per_rank] != counts.iter().map(|count| *count as i32).collect::<Vec<_>>() {
            return Some(format!("counts {:?}, not {counts:?}", &found[..per_rank]));
        }
        let used = match call.layout {
            0 => self.rig.capacity + EXPERTS,
            1 => self.capacity * per_rank,
            _ => self.capacity,
        };
        for row in 0..used {
            let place = wanted.iter().find(|place| place.0 == row && came[place.2] == Came::Whole);
            let (expert, source, token) = place.map_or((-1, -1, -1), |p| (p.1, p.2 as i32, p.3 as i32));
            let seen = (experts[row], sources[2 * row], sources[2 * row + 1]);
            if seen != (expert, source, token) {
                return Some(format!("row {row} is {seen:?}, not {:?}", (expert, source, token)));
            }
            if call.layout == 2 && place.is_none() && token_experts[row * TOP_K..][..TOP_K] != [-1; TOP_K] {
                return Some(format!("experts of row {row}"));
            }
            if let Some((_, _, source, token)) = place
                && rows[row * ROW..][..ROW] != Rig::row_of(*source, *token, call.salt)
            {
                return Some(format!("bytes of row {row}"));
            }
        }
        None
    }

    /// What is wrong with the sums of a combine to which these ranks have added.
    fn wrong_sums(&self, call: Call, adds: &[bool]) -> Option<String> {
        self.wrong_sums_of_any(call, &[adds.to_vec()])
    }

    /// The same, where to each token one or another set of ranks has added.
    fn wrong_sums_of_any(&self, call: Call, sets: &[Vec<bool>]) -> Option<String> {
        let seen = self.rig.sums();
        (0..MAX_TOKENS).find_map(|token| {
            let found = values(&seen[token * ROW..][..ROW]);
            let wanted: Vec<_> = sets.iter().map(|adds| self.sum(call, token, adds)).collect();
            let starts: Vec<_> = wanted.iter().map(|sum| &sum[..4]).collect();
            (!wanted.contains(&found)).then(|| format!("token {token} is {:?}.., not one of {starts:?}", &found[..4]))
        })
    }

    /// A token's sum of what these ranks add: over nodes in order, each the sum of its ranks, rounded by other nodes.
    fn sum(&self, call: Call, token: usize, adds: &[bool]) -> Vec<f32> {
        let (rank, per_rank) = (self.rig.rank, EXPERTS / self.ranks);
        let row = values(&Rig::row_of(rank, token, call.salt));
        let named = choices(rank, token, call.salt);
        let (mut sum, mut first) = (vec![0.0f32; HIDDEN], 0);
        for ranks in &self.nodes {
            let (node, mut of_node) = (first..first + ranks, vec![0.0f32; HIDDEN]);
            first += ranks;
            for owner in node.clone().filter(|owner| adds[*owner]) {
                let mut partial = vec![0.0f32; HIDDEN];
                let here = (0..TOP_K).filter(|k| named[*k] >= 0 && named[*k] as usize / per_rank == owner);
                for k in here {
                    for (column, value) in partial.iter_mut().zip(&row) {
                        let of_token = rounded(value * factor(owner));
                        let of_expert = rounded(value * factor(named[k] as usize));
                        let term = weight(rank, token, k, call.salt).mul_add(of_expert, *column);
                        *column = if call.layout == 2 { of_token } else { term };
                    }
                }
                of_node.iter_mut().zip(partial).for_each(|(sum, term)| *sum += rounded(term));
            }
            let own = node.contains(&rank);
            sum.iter_mut().zip(of_node).for_each(|(sum, term)| *sum += if own { term } else { rounded(term) });
        }
        sum.into_iter().map(rounded).collect()
    }

    fn silent(&self) -> Vec<usize> {
        self.rig.ep.silent_ranks().iter().map(|silent| silent.rank.index()).collect()
    }

    fn mask(&self) -> Vec<i32> {
        let view = self.rig.ep.rank_mask().unwrap();
        self.rig.stream.copy(&self.spare.view(), &view).unwrap();
        self.rig.stream.synchronize(PATIENCE).unwrap();
        words(&self.spare)
    }
}

fn with_masks(missing: MissingRanks, timeout: Duration) -> impl Fn(AllToAllBuilder) -> AllToAllBuilder {
    move |builder| builder.missing_ranks(missing).timeout(timeout).sms(3)
}

fn all_but(ranks: usize, without: &[usize], other: Came) -> Vec<Came> {
    (0..ranks).map(|rank| if without.contains(&rank) { other } else { Came::Whole }).collect()
}

fn adds(came: &[Came]) -> Vec<bool> {
    came.iter().map(|came| *came == Came::Whole).collect()
}

/// Rounds in which these ranks' part counts, checked.
fn good_rounds(member: &Member, salts: std::ops::Range<usize>, came: &[Came]) {
    for salt in salts {
        let call = member.call(salt);
        member.put(call);
        let handle = member.dispatch(call).unwrap();
        assert_eq!(member.wrong_rows(call, came), None, "rank {} {call:?}", member.rig.rank);
        member.combine(call, &handle).unwrap();
        assert_eq!(member.wrong_sums(call, &adds(came)), None, "rank {} {call:?}", member.rig.rank);
    }
}

const LONG: Duration = Duration::from_secs(10);

/// With nobody missing, calls are as ever; then each rank masks rank 2, by a call or by a store, and rank 2 calls no
/// more.
#[test]
fn a_masked_rank_gets_nothing_is_awaited_by_nobody_and_adds_nothing() {
    for weights in nodes::WEIGHTS {
        for missing in [MissingRanks::Masked, MissingRanks::MaskedAtDeadline] {
            on_ranks(4, |world| {
                let change = with_masks(missing, LONG);
                let member = Member::new(&world, test_device(&world), |builder| change(builder).weights(weights));
                let member = member.with_weights(weights);
                good_rounds(&member, 0..6, &[Came::Whole; 4]);
                assert_eq!(member.mask(), [0; 4]);
                world.barrier("before the mask").unwrap();
                let rank = member.rig.rank;
                let (ep, stream) = (&member.rig.ep, &member.rig.stream);
                match rank {
                    2 => return,
                    0 => ep.mask_rank(Rank(2)).unwrap(),
                    _ => {
                        member.spare.write(0, &[0i32, 0, -7, 0].map(i32::to_ne_bytes).concat()).unwrap();
                        stream.copy(&ep.rank_mask().unwrap(), &member.spare.view()).unwrap();
                    }
                }
                let without = all_but(4, &[2], Came::Not);
                good_rounds(&member, 6..18, &without);
                ep.barrier(stream).unwrap();
                stream.synchronize(PATIENCE).unwrap();
                // Nobody unmasks a rank, and nobody masks himself.
                member.spare.fill(0).unwrap();
                member.spare.write(4 * rank, &1i32.to_ne_bytes()).unwrap();
                stream.copy(&ep.rank_mask().unwrap(), &member.spare.view()).unwrap();
                good_rounds(&member, 18..24, &without);
                assert_eq!(ep.silent_ranks(), [], "rank {rank}");
            });
        }
    }
}

/// A rank's whole arena.
fn arena(ep: &AllToAll) -> Vec<u8> {
    let [base, _] = ep.addresses().unwrap();
    let bytes = ep.plan().arena_bytes() as usize;
    // SAFETY: the arena of a context that is alive; on the CPU device it is memory of this process.
    (0..bytes).map(|at| unsafe { ((base as usize + at) as *const u8).read_volatile() }).collect()
}

#[test]
fn nothing_is_stored_in_the_arena_of_a_masked_rank() {
    for weights in [Weights::Dispatch, Weights::Combine] {
        on_ranks(3, |world| {
            let change = with_masks(MissingRanks::Masked, LONG);
            let change = |builder: AllToAllBuilder| change(builder).experts(6).weights(weights);
            let rig = Rig::on(&world, Device::cpu().unwrap(), change);
            // `weight` of every choice; `combines` an earlier dispatch, or its own.
            let round = |weight: f32, combines: Option<&Handle>| {
                let choices = [[0, 2], [4, 1], [3, 5], [2, -1]];
                rig.route(&choices, 1);
                rig.weight.write(0, &weight.to_ne_bytes().repeat(MAX_TOKENS * TOP_K)).unwrap();
                let tokens = Tokens::new(rig.x.view(), rig.idx.view(), TokenCount::Host(MAX_TOKENS)).pitch_bytes(ROW);
                let (late, rows) = (weights == Weights::Combine, rig.expert_rows());
                let tokens = if late { tokens } else { tokens.topk_weight(rig.weight.view()) };
                let rows = if late { rows.topk_weight(rig.weight.view()) } else { rows };
                let handle = rig.ep.dispatch(&rig.stream, &tokens, &rig.output(rig.capacity)).unwrap();
                rig.ep.combine(&rig.stream, combines.unwrap_or(&handle), &rows, &rig.combined()).unwrap();
                rig.ep.barrier(&rig.stream).unwrap();
                rig.stream.synchronize(PATIENCE).unwrap();
                rig.ep.check().unwrap();
                handle
            };
            round(0.5, None);
            let handle = round(0.5, None);
            world.barrier("before").unwrap();
            let before = arena(&rig.ep);
            world.barrier("masked").unwrap();
            if rig.rank != 1 {
                rig.ep.mask_rank(Rank(1)).unwrap();
                round(0.25, Some(&handle));
                round(0.75, None);
            }
            world.barrier("after").unwrap();
            if rig.rank == 1 {
                let after = arena(&rig.ep);
                // It may know that it is masked.
                let signs = rig.ep.plan().buffers().iter().find(|buffer| buffer.name == "signs of life").unwrap();
                let signs = signs.offset as usize..(signs.offset + signs.bytes) as usize;
                let changed = (0..before.len()).find(|at| before[*at] != after[*at] && !signs.contains(at));
                assert_eq!(changed, None, "{weights:?}");
            }
        });
    }
}

/// Ranks whose calls are in another order wait for each other, both alive, and give signs of it: that ends, too.
#[test]
fn ranks_that_wait_for_each_other_mask_each_other_after_some_deadlines() {
    let deadline = Duration::from_millis(300);
    on_ranks(2, |world| {
        let change = with_masks(MissingRanks::MaskedAtDeadline, deadline);
        let member = Member::new(&world, test_device(&world), change);
        let (ep, stream, start) = (&member.rig.ep, &member.rig.stream, Instant::now());
        let call = Call { salt: 2, layout: 0, halves: false, counts_first: false };
        member.put(call);
        world.barrier("begin").unwrap();
        if member.rig.rank == 0 {
            ep.barrier(stream).unwrap();
            stream.synchronize(PATIENCE).unwrap();
        }
        let handle = member.dispatch(call).unwrap();
        let came: Vec<_> = (0..2).map(|rank| if rank == member.rig.rank { Came::Whole } else { Came::Not }).collect();
        assert_eq!(member.wrong_rows(call, &came), None);
        member.combine(call, &handle).unwrap();
        assert_eq!(member.wrong_sums(call, &adds(&came)), None);
        // The one that masks first lets the other know.
        assert_eq!(member.mask()[1 - member.rig.rank], 1);
        assert!(start.elapsed() > 3 * deadline, "{:?}", start.elapsed());
    });
}

/// A rank that another one has masked gets nothing of it, and so goes on without it, too, at once.
#[test]
fn who_is_masked_masks_the_other() {
    for missing in [MissingRanks::Masked, MissingRanks::MaskedAtDeadline] {
        on_ranks(3, |world| {
            let change = with_masks(missing, LONG);
            let member = Member::new(&world, test_device(&world), |builder| change(builder).experts(6));
            world.barrier("begin").unwrap();
            let rank = member.rig.rank;
            if rank == 0 {
                member.rig.ep.mask_rank(Rank(2)).unwrap();
            }
            let (start, stream) = (Instant::now(), &member.rig.stream);
            for _ in 0..4 {
                member.rig.ep.barrier(stream).unwrap();
                stream.synchronize(PATIENCE).unwrap();
                member.rig.ep.check().unwrap();
            }
            assert!(start.elapsed() < LONG / 2, "{:?}", start.elapsed());
            assert_eq!(member.mask(), [[0, 0, 1], [0; 3], [1, 0, 0]][rank]);
            assert!(member.silent().is_empty());
        });
    }
}

/// Where the victim stops taking part.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Stop {
    BeforeDispatch,
    AfterDispatchSend,
    AfterDispatch,
    AfterCombineSend,
    BeforeBarrier,
}

#[test]
fn a_call_goes_on_without_a_rank_that_falls_silent() {
    use Stop::*;
    for stop in [BeforeDispatch, AfterDispatchSend, AfterDispatch, AfterCombineSend, BeforeBarrier] {
        for first in [3, 4, 6] {
            silence(stop, first);
        }
    }
}

fn silence(stop: Stop, first: usize) {
    use Stop::*;
    const VICTIM: usize = 1;
    let deadline = Duration::from_millis(800);
    let left = AtomicUsize::new(3);
    on_ranks(4, |world| {
        let change = with_masks(MissingRanks::MaskedAtDeadline, deadline);
        let member = Member::new(&world, test_device(&world), change);
        let (ep, stream) = (&member.rig.ep, &member.rig.stream);
        good_rounds(&member, 0..first, &[Came::Whole; 4]);
        world.barrier("silence").unwrap();
        let (all, without) = (all_but(4, &[], Came::Not), all_but(4, &[VICTIM], Came::Not));
        let call = Call::number(first);
        member.put(call);
        if member.rig.rank == VICTIM {
            member.play_until(stop, call);
            // Alive in every other respect.
            while left.load(Ordering::Acquire) != 0 {
                std::thread::sleep(Duration::from_millis(5));
            }
            return;
        }
        let times = &member.token_weights;
        times.fill(0).unwrap();
        let output = Call { layout: 0, ..call };
        let output = member.output(output).wait_times(times.view().slice(0, 32).unwrap());
        let handle = if stop == BeforeDispatch && call.layout == 0 && !call.halves {
            let handle = ep.dispatch(stream, &member.tokens(), &output).unwrap();
            stream.synchronize(PATIENCE).unwrap();
            ep.check().unwrap();
            let waited = read(times).as_chunks::<8>().0[VICTIM];
            assert!(Duration::from_nanos(u64::from_ne_bytes(waited)) >= deadline, "{waited:?}");
            handle
        } else {
            member.dispatch(call).unwrap()
        };
        let came = if stop == BeforeDispatch { &without } else { &all };
        assert_eq!(member.wrong_rows(call, came), None, "{stop:?} {call:?}");
        member.combine(call, &handle).unwrap();
        let came = if matches!(stop, AfterCombineSend | BeforeBarrier) { &all } else { &without };
        assert_eq!(member.wrong_sums(call, &adds(came)), None, "{stop:?} {call:?}");
        if stop == BeforeBarrier {
            ep.barrier(stream).unwrap();
            stream.synchronize(PATIENCE).unwrap();
            ep.check().unwrap();
        } else if stop == AfterCombineSend {
            member.put(Call::number(first + 1));
            drop(member.dispatch(Call::number(first + 1)).unwrap());
        }
        let silent: Vec<_> = ep.silent_ranks().iter().map(|s| (s.rank, s.call)).collect();
        let named = match stop {
            BeforeDispatch | AfterCombineSend => "dispatch",
            BeforeBarrier => "barrier",
            _ => "combine",
        };
        // A dispatch waits in the end for all ranks' sign that they have read what came before.
        let named = if stop == AfterDispatchSend && silent == [(Rank(1), "dispatch")] { "dispatch" } else { named };
        assert_eq!(silent, [(Rank(VICTIM as u32), named)], "{stop:?}");
        let start = Instant::now();
        good_rounds(&member, 20..32, &without);
        assert!(start.elapsed() < 10 * deadline, "{:?}", start.elapsed());
        assert_eq!(member.mask(), [0, 1, 0, 0]);
        left.fetch_sub(1, Ordering::Release);
    });
}

/// A rank's kernels stand still somewhere in a call, for ever or until the others have gone on without it. Its part in
/// each call counts or does not, whole, and nobody takes one for dead who only waits for it.
fn stop_somewhere(seed: u64, after: u64, seen: &mut Vec<&'static str>) {
    const RANKS: usize = 4;
    let deadline = Duration::from_secs(60);
    let victim = (seed % 4) as usize;
    // Some go on while the others' blocks find the deadline passed, which they do not at once.
    let pause = match seed / 4 % 4 {
        0 | 1 => deadline + Duration::from_secs(seed % 41),
        2 => deadline * 3,
        _ => deadline * 12,
    };
    let stopped = Some(Stopped { rank: victim as u32, after, pause });
    let worlds = World::threads(RANKS).unwrap();
    let found = std::sync::Mutex::new(Vec::new());
    let config = SeededConfig { seed, hold_stores: seed.is_multiple_of(2), stopped };
    let report = seeded_world(config, RANKS, |rank, device| {
        let change = with_masks(MissingRanks::MaskedAtDeadline, deadline);
        let member = Member::new(&worlds[rank], device, |builder| {
            change(builder).tuning(|tuning| tuning.compact_handles = Some(seed.is_multiple_of(5)))
        });
        for round in 0..4 {
            let call = Call::number(seed as usize + round);
            if rank == victim {
                if member.round(call).is_err() {
                    return;
                }
                continue;
            }
            member.put(call);
            let handle = member.dispatch(call).unwrap();
            let ways = [Came::Whole, Came::Not, Came::InPart];
            let fits = |came: &Came| member.wrong_rows(call, &all_but(RANKS, &[victim], *came));
            let Some(came) = ways.into_iter().find(|came| fits(came).is_none()) else {
                let silent = member.rig.ep.silent_ranks();
                panic!(
                    "seed {seed}, after {after}, rank {rank}, {call:?}, {silent:?}: {:?}",
                    ways.map(|came| fits(&came))
                );
            };
            member.combine(call, &handle).unwrap();
            let ways = [Came::Whole, Came::Not];
            let fits = |came: &Came| member.wrong_sums(call, &adds(&all_but(RANKS, &[victim], *came)));
            let Some(added) = ways.into_iter().find(|came| fits(came).is_none()) else {
                let silent = member.rig.ep.silent_ranks();
                panic!(
                    "seed {seed}, after {after}, rank {rank}, {call:?}, {silent:?}: {:?}",
                    ways.map(|came| fits(&came))
                );
            };
            assert!(
                member.silent().iter().all(|silent| *silent == victim),
                "seed {seed}, {after}: {:?}",
                member.silent()
            );
            let is_silent = !member.silent().is_empty();
            assert!(is_silent || (came, added) == (Came::Whole, Came::Whole), "seed {seed}, {after}: {call:?}");
            found.lock().unwrap().push(match (came, added) {
                (Came::Whole, Came::Whole) => "whole",
                (Came::Whole, _) => "no sums",
                (Came::Not, _) => "absent",
                _ => "in part",
            });
        }
    });
    assert_eq!(report.failure, None, "seed {seed}, after {after}: {:?}", report.hang_report);
    seen.extend(found.into_inner().unwrap());
}

#[test]
fn a_rank_that_stops_anywhere_in_a_call_counts_whole_or_not_at_all() {
    let mut seen = Vec::new();
    for seed in 0..240u64 {
        stop_somewhere(seed, 20_000 + seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) % 60_000, &mut seen);
    }
    let count = |what: &str| seen.iter().filter(|seen| **seen == what).count();
    let counts = ["whole", "no sums", "absent", "in part"].map(count);
    println!("{counts:?}");
    assert!(counts.iter().all(|count| *count >= 3), "{counts:?}");
}

/// The words of who takes part hold 30 bits of an epoch, and begin as 0.
#[test]
fn any_first_epoch_will_do() {
    for first in [(1u64 << 30) - 1, 1 << 30, 3 << 30, (1 << 40) + (1 << 30), (1 << 32) - 3] {
        on_ranks(2, |world| {
            let change = with_masks(MissingRanks::Masked, LONG);
            let change = |builder: AllToAllBuilder| change(builder).tuning(|tuning| tuning.first_epoch = first);
            let member = Member::new(&world, test_device(&world), change);
            good_rounds(&member, 0..4, &[Came::Whole; 2]);
            world.barrier("done").unwrap();
        });
    }
}

/// One rank is late for one other alone, which masks it: the late one then masks that one, and nobody else masks
/// anybody. Otherwise the late one would wait for the first, the third for the late one, and the first for the third.
#[test]
fn a_rank_that_is_late_for_one_rank_alone_splits_nobody_else() {
    let deadline = Duration::from_millis(800);
    let masked = AtomicUsize::new(0);
    on_ranks(3, |world| {
        let change = with_masks(MissingRanks::MaskedAtDeadline, deadline);
        let member = Member::new(&world, test_device(&world), |builder| change(builder).experts(6));
        let (ep, stream, rank) = (&member.rig.ep, &member.rig.stream, member.rig.rank);
        world.barrier("begin").unwrap();
        let begun = Instant::now();
        if rank == 2 {
            // In time for the first one, which waits for both.
            std::thread::sleep(deadline / 2);
        }
        while rank == 1 && masked.load(Ordering::Acquire) == 0 && begun.elapsed() < PATIENCE {
            std::thread::sleep(Duration::from_millis(1));
        }
        ep.barrier(stream).unwrap();
        while rank == 0 && ep.silent_ranks().is_empty() && begun.elapsed() < PATIENCE {
            std::thread::sleep(Duration::from_millis(1));
        }
        masked.fetch_add(usize::from(rank == 0), Ordering::Release);
        for _ in 0..5 {
            stream.synchronize(PATIENCE).unwrap();
            ep.check().unwrap();
            ep.barrier(stream).unwrap();
        }
        stream.synchronize(PATIENCE).unwrap();
        assert_eq!(member.mask(), [[0, 1, 0], [1, 0, 0], [0; 3]][rank], "rank {rank}");
    });
}

/// A rank stops in a combine after its flag, before its weights or its rows, and another comes to the combine later:
/// its own rows are behind its wait for those weights.
#[test]
fn own_rows_come_behind_weights_that_do_not() {
    let deadline = Duration::from_secs(60);
    let mut silent = 0;
    for (seed, after) in (0..12).flat_map(|seed| (0..25).map(move |at| (seed, 8_000 + 90 * at))) {
        let worlds = World::threads(2).unwrap();
        let stopped = Some(Stopped { rank: 1, after, pause: 3 * deadline });
        let config = SeededConfig { seed, hold_stores: false, stopped };
        let (begun, found) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let report = seeded_world(config, 2, |rank, device| {
            let change = with_masks(MissingRanks::MaskedAtDeadline, deadline);
            let member = Member::new(&worlds[rank], device, |b| change(b).sms(2).weights(Weights::Combine))
                .with_weights(Weights::Combine);
            let (ep, stream) = (&member.rig.ep, &member.rig.stream);
            let call = Call { salt: 2, layout: 0, halves: false, counts_first: false };
            member.put(call);
            let Ok(handle) = member.dispatch(call) else { return };
            member.compute(call);
            if rank == 1 {
                begun.store(1, Ordering::Release);
                let _ = ep.combine(stream, &handle, &member.rows(), &member.rig.combined());
                let _ = stream.synchronize(PATIENCE);
                return;
            }
            for looks in 0.. {
                if looks > 60 && begun.load(Ordering::Acquire) != 0 || looks > 600 {
                    break;
                }
                stream.copy(&member.spare.view(), &ep.rank_mask().unwrap()).unwrap();
                stream.synchronize(PATIENCE).unwrap();
            }
            ep.combine(stream, &handle, &member.rows(), &member.rig.combined()).unwrap();
            stream.synchronize(PATIENCE).unwrap();
            ep.check().unwrap_or_else(|error| panic!("seed {seed}, after {after}: {error}"));
            let wrong = [true, false].map(|adds| member.wrong_sums(call, &[true, adds]));
            assert!(wrong.contains(&None), "seed {seed}, after {after}: {wrong:?}");
            found.store(member.silent().len(), Ordering::Release);
        });
        assert_eq!(report.failure, None, "seed {seed}, after {after}: {:?}", report.hang_report);
        silent += found.into_inner();
    }
    assert!(silent > 20, "{silent}");
}

/// Recorded calls see a mask that was set after they were recorded.
#[test]
fn replays_honour_the_mask() {
    on_ranks(4, |world| {
        let change = with_masks(MissingRanks::Masked, LONG);
        let member = Member::new(&world, test_device(&world), change);
        let (ep, stream, call) =
            (&member.rig.ep, &member.rig.stream, Call { salt: 5, layout: 0, halves: false, counts_first: false });
        member.put(call);
        stream.begin_capture().unwrap();
        let handle = ep.dispatch(stream, &member.tokens(), &member.output(call)).unwrap();
        ep.combine(stream, &handle, &member.rows(), &member.rig.combined()).unwrap();
        let graph = stream.end_capture().unwrap();
        for masked in [false, true] {
            let came = all_but(4, if masked { &[0] } else { &[] }, Came::Not);
            world.barrier("replays").unwrap();
            if masked && member.rig.rank == 0 {
                return;
            }
            if masked {
                ep.mask_rank(Rank(0)).unwrap();
            }
            for _ in 0..3 {
                member.put(call);
                graph.launch(stream).unwrap();
                stream.synchronize(PATIENCE).unwrap();
                ep.check().unwrap();
                assert_eq!(member.wrong_rows(call, &came), None);
            }
        }
    });
}

/// While a call waits, a host masks the rank that is awaited.
#[test]
fn a_mask_ends_a_wait() {
    on_ranks(2, |world| {
        let change = with_masks(MissingRanks::Masked, LONG);
        let member = Member::new(&world, test_device(&world), change);
        let call = Call { salt: 1, layout: 0, halves: false, counts_first: false };
        member.put(call);
        world.barrier("begin").unwrap();
        if member.rig.rank == 1 {
            return;
        }
        let (ep, stream) = (&member.rig.ep, &member.rig.stream);
        let start = Instant::now();
        let _handle = ep.dispatch(stream, &member.tokens(), &member.output(call)).unwrap();
        std::thread::sleep(Duration::from_millis(50));
        ep.mask_rank(Rank(1)).unwrap();
        stream.synchronize(PATIENCE).unwrap();
        assert!(start.elapsed() < LONG / 2);
        ep.check().unwrap();
        assert_eq!(member.wrong_rows(call, &[Came::Whole, Came::Not]), None);
    });
}

/// Without a deadline that masks, silence closes the context.
#[test]
fn a_silent_rank_that_nobody_masks_is_an_error() {
    on_ranks(2, |world| {
        let change = with_masks(MissingRanks::Masked, Duration::from_millis(300));
        let member = Member::new(&world, test_device(&world), change);
        world.barrier("begin").unwrap();
        if member.rig.rank == 1 {
            return;
        }
        let call = Call::number(0);
        member.put(call);
        let error = member.dispatch(call).unwrap_err();
        assert!(matches!(error, Error::Timeout { peer: Rank(1), .. }), "{error}");
    });
}

/// A wait of the own rank alone, and what contexts and calls refuse.
#[test]
fn what_does_not_go_with_missing_ranks_is_refused_with_advice() {
    on_ranks(1, |world| {
        let device = test_device(&world);
        let refused = |change: &dyn Fn(AllToAllBuilder) -> AllToAllBuilder, word: &str| {
            let error = change(builder(&world, &device).missing_ranks(MissingRanks::Masked)).build().err().unwrap();
            let text = error.to_string();
            assert!(text.contains("missing_ranks") && text.contains(word), "{text}");
        };
        refused(&|b| b.tuning(|t| t.in_place = Some((8, 1))), "in-place output");
        refused(&|b| b.tuning(|t| t.round_tokens = Some(2)), "round_tokens");
        refused(&|b| b.tuning(|t| t.payload_words = 2), "payload_words");
        refused(&|b| b.tuning(|t| t.dispatch_payload_words = 2), "dispatch_payload_words");
        refused(&|b| b.tuning(|t| t.partial = Partial::Fp32), "leave partial out");
        let member = Member::new(&world, device.clone(), with_masks(MissingRanks::Masked, LONG));
        let call = Call { salt: 0, layout: 0, halves: false, counts_first: false };
        member.put(call);
        let handle = member.dispatch(call).unwrap();
        let (ep, stream) = (&member.rig.ep, &member.rig.stream);
        let error = ep.combine(stream, &handle, &member.rows(), &member.rig.combined().accumulate(true)).unwrap_err();
        assert!(matches!(error, Error::Argument { name: "accumulate", .. }), "{error}");
        let rows = NewRows::new(member.rig.x.view(), TokenCount::Host(MAX_TOKENS)).pitch_bytes(ROW);
        let error = ep.dispatch_again_send(stream, &handle, &rows).err().unwrap();
        assert!(matches!(error, Error::Config { name: "missing_ranks", .. }), "{error}");
        for rank in [Rank(0), Rank(1), Rank(u32::MAX)] {
            let error = ep.mask_rank(rank).unwrap_err();
            assert!(matches!(error, Error::Argument { name: "rank", .. }), "{error}");
        }
        member.combine(call, &handle).unwrap();
        assert_eq!(member.wrong_sums(call, &[true]), None);
        let plain = Rig::with(&world, |b| b);
        let errors = [plain.ep.rank_mask().err(), plain.ep.mask_rank(Rank(1)).err()];
        for error in errors {
            assert!(error.unwrap().to_string().contains("AllToAllBuilder::missing_ranks"));
        }
        assert_eq!(plain.ep.silent_ranks(), []);
    });
}
