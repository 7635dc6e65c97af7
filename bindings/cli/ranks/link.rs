//! Measures the links, for the floor of a phase's time: on GPUs the time of bare stores of the same bytes, measured in
//! the same way as the calls; on the CPU device the rate of the processor's copies.
//!
//! Beside the data path, on the rank's thread, before or after the timed calls. Collective: all ranks store at once, as
//! they do in a dispatch.

use std::time::{Duration, Instant};

use tokenyard::internals::kernels::bench;
use tokenyard::{Result, View, World};

use super::calls::Caller;
use super::slots::Slots;
use crate::cli::cases::words::ArenaWord;

/// Bytes copied on the CPU device: more than any cache that a rank has for itself.
const CPU_BYTES: usize = 8 << 20;
/// Copies; the fastest counts, since a floor is the best possible time.
const CPU_REPEATS: usize = 4;
/// Timed bare stores of each kind, and untimed ones before them.
const GPU_REPEATS: usize = 50;
const GPU_WARMUP: usize = 5;
/// Bytes of one store.
const QUANTUM: u64 = 16;

/// Bytes per µs that a rank of the CPU device can store into its peers' memory while all ranks do; 0 without peers.
/// They share memory, so their links are the processor's copies.
///
/// # Errors
/// Any error of a peer.
pub fn rate(world: &World) -> Result<f64> {
    if world.size() < 2 {
        return Ok(0.0);
    }
    let source = vec![1u8; CPU_BYTES];
    let mut target = vec![0u8; CPU_BYTES];
    let mut best = 0.0f64;
    for _ in 0..CPU_REPEATS {
        world.barrier("link rate")?;
        let start = Instant::now();
        target.copy_from_slice(&source);
        std::hint::black_box(&mut target);
        let us = start.elapsed().as_secs_f64() * 1e6;
        world.barrier("link rate measured")?;
        best = best.max(CPU_BYTES as f64 / us.max(1e-3));
    }
    Ok(best)
}

/// Times, in µs, of bare stores between GPUs of an iteration's bytes: the bytes of dispatch, then those of combine.
/// `rows` are the rows of this rank's tokens from each rank to each other in a mean iteration; `row_bytes` is the
/// payload of a row and of a partial row. Empty without peers in the node.
///
/// # Errors
/// Any error of the device or of a peer.
pub fn push(
    world: &World,
    caller: &Caller,
    arena: ArenaWord,
    rows: &[u64],
    row_bytes: (u64, u64),
    patience: Duration,
) -> Result<[Vec<f64>; 2]> {
    if world.size() < 2 {
        return Ok(Default::default());
    }
    let rank = world.rank().index();
    let table = gather_rows(world, rows)?;
    let bytes = |rows: u64, each: u64| (rows * each).next_multiple_of(QUANTUM) as usize;
    // Rows go from a source rank to the ranks of their experts, partial rows the other way.
    let out: Vec<usize> = table[rank].iter().map(|&rows| bytes(rows, row_bytes.0)).collect();
    let back: Vec<usize> = table.iter().map(|row| bytes(row[rank], row_bytes.1)).collect();
    let most = table.iter().flatten().copied().max().unwrap_or(0);
    let slot = bytes(most, row_bytes.0.max(row_bytes.1)).max(QUANTUM as usize);
    let slots = Slots::establish(world, caller.stream.device(), arena, slot)?;
    world.barrier("link buffers ready")?;
    let times = [time(&slots, caller, &out, patience)?, time(&slots, caller, &back, patience)?];
    // No memory is freed while a peer may still store into it.
    world.barrier("links measured")?;
    Ok(times)
}

/// The rows from every rank to every rank, of all ranks' tokens together.
fn gather_rows(world: &World, rows: &[u64]) -> Result<Vec<Vec<u64>>> {
    let own: Vec<u8> = rows.iter().flat_map(|rows| rows.to_le_bytes()).collect();
    let all = world.all_gather("rows between ranks", &own)?;
    let mut table = vec![vec![0u64; world.size()]; world.size()];
    for bytes in &all {
        let (words, _) = bytes.as_chunks::<8>();
        let cells = table.iter_mut().flatten().zip(words);
        cells.for_each(|(rows, word)| *rows += u64::from_le_bytes(*word));
    }
    Ok(table)
}

/// Times stores of `bytes[p]` bytes to each peer p of the node at once.
fn time(slots: &Slots, caller: &Caller, bytes: &[usize], patience: Duration) -> Result<Vec<f64>> {
    let (peers, destinations): (Vec<usize>, Vec<View>) = slots.peers().into_iter().unzip();
    let bytes: Vec<usize> = peers.iter().map(|&peer| bytes[peer]).collect();
    let stream = &caller.stream;
    let mut times = Vec::new();
    for repeat in 0..GPU_WARMUP + GPU_REPEATS {
        let [start, end] = caller.together(|| {
            let start = stream.record()?;
            if !destinations.is_empty() {
                bench::push(stream, &slots.source(), &destinations, &bytes)?;
            }
            Ok([start, stream.record()?])
        })?;
        stream.synchronize(patience)?;
        if repeat >= GPU_WARMUP && !destinations.is_empty() {
            times.push(end.elapsed_us(&start)?);
        }
    }
    caller.take_errors()?;
    Ok(times)
}
