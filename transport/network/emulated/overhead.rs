//! The emulator's own cost: the time of a small write over a link without a model.
//!
//! Place: beside the data path, before a run; on the caller's thread, which polls both ends.

use super::{GpuNetwork, GpuNicEndpoint};
use crate::base::copies::CopyDevice;
use crate::base::{Error, Rank, Result};
use crate::transport::Arena;
use crate::transport::network::imm::ImmValue;
use crate::transport::network::sim::LinkModel;
use crate::transport::network::{Event, Place, RegionId, Transport, WriteImm};
use std::time::{Duration, Instant};

/// Writes that are timed; as many are made before them.
const WRITES: u32 = 200;
const WARMUP: u32 = 20;
/// A head without rows.
const BYTES: u32 = 32;
const ARENA_BYTES: usize = 4096;
/// How long one write may take.
const PATIENCE: Duration = Duration::from_secs(10);

/// The median, in µs, of the time from posting a small write from `source` to `target` until its immediate.
///
/// # Errors
/// `Device` where memory is lacking; `Transport` if the devices cannot reach each other or a write does not arrive.
pub fn overhead<D: CopyDevice>(source: &D, target: &D) -> Result<f64> {
    let network = GpuNetwork::new(2, LinkModel::FREE, 1)?;
    let arenas = [arena(source)?, arena(target)?];
    // Dropped before the arenas, which they use.
    let mut ends = [network.endpoint(Rank(0), source)?, network.endpoint(Rank(1), target)?];
    for (end, arena) in ends.iter_mut().zip(&arenas) {
        // SAFETY: the arena outlives the endpoint, and nobody else uses it.
        unsafe { end.register(arena.span())? };
    }
    let addresses = [ends[0].address(Rank(1))?, ends[1].address(Rank(0))?];
    ends[0].connect(Rank(1), &addresses[1])?;
    ends[1].connect(Rank(0), &addresses[0])?;
    let mut times = Vec::new();
    for number in 0..WARMUP + WRITES {
        let us = time(&mut ends, number)?;
        if number >= WARMUP {
            times.push(us);
        }
    }
    times.sort_unstable_by(f64::total_cmp);
    Ok(times.get(times.len() / 2).copied().unwrap_or(0.0))
}

fn arena<D: CopyDevice>(device: &D) -> Result<Arena> {
    let Some(ordinal) = device.ordinal() else { return Arena::cpu(ARENA_BYTES) };
    let arena = Arena::cuda(ordinal, ARENA_BYTES)?;
    arena.grant_process()?;
    Ok(arena)
}

/// One write, in µs.
fn time<D: CopyDevice>(ends: &mut [GpuNicEndpoint<D>; 2], number: u32) -> Result<f64> {
    let place = Place { region: RegionId(0), offset: 0 };
    let imm = ImmValue::user(0, 0, number)?;
    let write =
        WriteImm { nic: 0, peer: Rank(1), source: place, target: place, bytes: BYTES, imm, token: u64::from(number) };
    let [from, to] = ends;
    let start = Instant::now();
    // The ring is empty: the last write was waited for.
    let _ = from.post(&write)?;
    let (mut arrived, mut completed, mut us) = (false, false, 0.0);
    while !arrived || !completed {
        from.poll(&mut |event| {
            completed |= matches!(event, Event::Sent { .. } | Event::Failed { .. } | Event::Dropped { .. })
        })?;
        to.poll(&mut |event| {
            if matches!(event, Event::Imm { .. }) {
                (arrived, us) = (true, start.elapsed().as_secs_f64() * 1e6);
            }
        })?;
        if start.elapsed() > PATIENCE {
            return Err(Error::transport(
                format!("write {number} of the emulated NIC did not arrive within {} s", PATIENCE.as_secs()),
                "see whether other work holds all multiprocessors of its GPU",
            ));
        }
        // The CPU device's kernels need a core, too.
        if from.device.ordinal().is_some() { std::hint::spin_loop() } else { std::thread::yield_now() }
    }
    Ok(us)
}
