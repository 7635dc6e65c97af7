//! What the links give: the rate of bare stores, from which the floor of a phase's time follows.
//!
//! Beside the data path, on the rank's thread, before anything is timed. Collective: all ranks store at once, as they
//! do in a dispatch.

use std::time::{Duration, Instant};

use tokenyard::kernels::bench;
use tokenyard::transport::{Arena, PeerMap};
use tokenyard::{AllToAll, Device, DeviceKind, Rank, Result, Stream, View, World};

/// Bytes to each peer on a GPU: long enough that a launch does not count.
const GPU_BYTES: usize = 32 << 20;
/// Bytes copied on the CPU device: beyond any cache that a rank has for itself.
const CPU_BYTES: usize = 8 << 20;
/// Measurements; the best one counts, since a floor is what is possible.
const REPEATS: usize = 4;

/// Bytes per µs that this rank can store into its peers' memory while all ranks do; 0 without peers.
///
/// # Errors
/// Whatever the device or a peer answers.
pub fn rate(world: &World, device: &Device, ep: &AllToAll, stream: &Stream, patience: Duration) -> Result<f64> {
    if world.size() < 2 {
        return Ok(0.0);
    }
    match device.ordinal() {
        Some(ordinal) if device.kind() == DeviceKind::Cuda => gpu_rate(world, device, ordinal, ep, stream, patience),
        _ => cpu_rate(world),
    }
}

/// Ranks of the CPU device share memory, so their links are the processor's copies.
fn cpu_rate(world: &World) -> Result<f64> {
    let source = vec![1u8; CPU_BYTES];
    let mut target = vec![0u8; CPU_BYTES];
    let mut best = 0.0f64;
    for _ in 0..REPEATS {
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

fn gpu_rate(
    world: &World,
    device: &Device,
    ordinal: usize,
    ep: &AllToAll,
    stream: &Stream,
    patience: Duration,
) -> Result<f64> {
    let (rank, size) = (world.rank().index(), world.size());
    let map = PeerMap::establish(world, Arena::cuda(ordinal, GPU_BYTES * size)?)?;
    let source = device.alloc(GPU_BYTES)?;
    source.fill(1)?;
    let peers = (0..size).filter(|&peer| peer != rank);
    let slot = |peer: usize| View { ptr: map.base_of(Rank(peer as u32)) + (rank * GPU_BYTES) as u64, bytes: GPU_BYTES };
    let destinations: Vec<View> = peers.map(slot).collect();
    let bytes = vec![GPU_BYTES; destinations.len()];
    let mut best = 0.0f64;
    for _ in 0..REPEATS {
        ep.barrier(stream)?;
        let start = stream.record()?;
        bench::push(stream, source.view(), &destinations, &bytes)?;
        let end = stream.record()?;
        stream.synchronize(patience)?;
        best = best.max((GPU_BYTES * destinations.len()) as f64 / end.elapsed_us(&start)?.max(1e-3));
    }
    ep.check()?;
    // Nobody's memory goes while a peer may still store into it.
    world.barrier("link rate measured")?;
    Ok(best)
}
