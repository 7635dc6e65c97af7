//! The memory that a context's kernels use, and the context's slot at the proxy. Both stay open until the context and
//! every graph of its calls are dropped.
//!
//! Place: inside `context`, which makes an `Open`. It is dropped on the thread that drops the context or the last of
//! these graphs, and then waits for the context's streams with a deadline.

use super::device_memory::Tables;
use super::formats::Kind;
use super::handle::{Lease, Pool};
use super::missing::Absences;
use super::report::Reports;
use super::statistics::Statistics;
use crate::base::{Rank, Result};
use crate::ffi::layout as raw;
use crate::kernels::budget::Budget;
use crate::kernels::{Chains, Device, Enqueued, Half, Owner, Recording, Stream, View};
use crate::proxy::Opening;
use crate::transport::PeerMap;
use std::sync::{Arc, MutexGuard};
use std::time::Duration;

/// An open context.
pub(crate) struct Open {
    pub chains: Arc<Chains>,
    pub pool: Arc<Pool>,
    /// Closed before the arena is freed.
    pub opening: Option<Opening>,
    pub memory: Arc<Memory>,
    /// How long its kernels may take to end: their own deadline and 5 s.
    pub patience: Duration,
    /// The rank whose context it is, in the first generation.
    pub rank: Rank,
}

/// What kernels read and write while the context is open. On a GPU the first free of it waits for all kernels.
pub(crate) struct Memory {
    pub _tables: Tables,
    pub reports: Reports,
    pub statistics: Option<Statistics>,
    pub absences: Option<Absences>,
    /// Of an in-place output: keeps the arena for views, which may outlive the context.
    pub arena: Option<Owner>,
    pub _peers: Arc<PeerMap>,
    /// Given back after everything that waits for kernels.
    pub _budget: Option<Budget<'static>>,
}

impl Drop for Open {
    /// Waits for enqueued work, at most `patience`. Kernels that still run then keep all memory that they may touch,
    /// for good: on a GPU freeing any of it would wait for them. Of a stream that captures, the drop waits for the work
    /// enqueued before the capture. Where an engine began the capture, that work is unknown, and the memory is kept,
    /// too.
    fn drop(&mut self) {
        if !self.chains.lock().drain(self.patience) {
            self.pool.abandon();
            std::mem::forget((self.memory.clone(), self.opening.as_ref().map(Opening::words)));
        }
        // Takes the arena back from the network: later writes of peers miss it.
        self.opening = None;
        // Last: a logger may panic, and kernels would run on in memory that is freed.
        log::info!(target: crate::base::targets::CONTEXT, "rank {}: closed", self.rank);
    }
}

/// A call that is being enqueued. Until it is dropped, no other call of the context is enqueued, and no capture of its
/// stream begins or ends.
pub(crate) struct Call<'a> {
    open: &'a Open,
    stream: &'a Stream,
    _enqueued: MutexGuard<'a, Enqueued>,
    /// Whether the call's launches check for launches that overlap them.
    guarded: bool,
    /// Another library captures the stream: the call runs with that library's graph, which this crate cannot see.
    foreign: bool,
    /// Of the stream's own capture.
    recording: MutexGuard<'a, Option<Recording>>,
}

impl<'a> Call<'a> {
    /// Orders the call after the last call of its chain, or has the capture keep the context.
    pub fn begin(open: &'a Arc<Open>, stream: &'a Stream, chain: usize) -> Result<Call<'a>> {
        let (mut enqueued, mut recording) = (open.chains.lock(), stream.enter());
        let foreign = recording.is_none() && stream.is_capturing()?;
        let guarded = enqueued.guard(foreign);
        match recording.as_mut() {
            Some(recording) => recording.call(&open.chains, chain, guarded, || open.clone(), open.patience),
            None if foreign => enqueued.note(stream.queue()),
            None => {
                enqueued.follow(chain, stream.queue())?;
                enqueued.note(stream.queue());
            }
        }
        Ok(Call { open, stream, _enqueued: enqueued, guarded, foreign, recording })
    }

    /// The stream of the call.
    pub fn stream(&self) -> &Stream {
        self.stream
    }

    /// The context, as the call's launches are given it.
    #[inline(always)]
    pub fn context(&self, kind: &Kind) -> raw::ty_context {
        raw::ty_context { guarded: self.guarded.into(), ..kind.context }
    }

    /// Whether the call runs only as part of a graph.
    pub fn is_recorded(&self) -> bool {
        self.foreign || self.recording.is_some()
    }

    /// Has a capture keep the call's arguments.
    pub fn keep<'v>(&mut self, views: impl Iterator<Item = &'v View>) {
        if let Some(recording) = self.recording.as_mut() {
            views.for_each(|view| recording.keep_view(view));
        }
    }

    /// A handle for the call, with room for an output of so many rows if the call has one.
    ///
    /// # Errors
    /// As [`Pool::take`] and [`Lease::make_room`], and `Device` if the driver refuses.
    pub fn take(&mut self, rows: Option<usize>) -> Result<Arc<Lease>> {
        // A half that sends does not know the output: any may come.
        let most = rows.unwrap_or(usize::MAX);
        let lease = Arc::new(self.open.pool.take(self.stream.queue(), self.recording.is_some(), most)?);
        // First: a capture keeps what it uses.
        rows.map_or(Ok(()), |rows| self.make_room(&lease, rows))?;
        self.uses(&lease)?;
        Ok(lease)
    }

    /// Makes room in a handle for an output of so many rows.
    ///
    /// # Errors
    /// As [`Lease::make_room`].
    pub fn make_room(&self, lease: &Lease, rows: usize) -> Result<()> {
        lease.make_room(rows, self.stream.queue(), self.recording.is_some())
    }

    /// Keeps the handle until the call is over, and orders the call after the handle's last use.
    ///
    /// # Errors
    /// `Device` if the driver refuses.
    pub fn uses(&mut self, lease: &Arc<Lease>) -> Result<()> {
        match self.recording.as_mut() {
            Some(recording) => {
                recording.uses(lease.last_use());
                recording.keep(lease.clone());
                Ok(())
            }
            None if self.foreign => Ok(()),
            None => lease.last_use().follow(self.stream.queue()),
        }
    }

    /// Marks that the call's second half, with the same handle, is to come. A recorded half comes with its graph.
    pub fn half(&self, lease: &Lease) -> Option<Half> {
        (!self.is_recorded()).then(|| lease.last_use().open())
    }
}

/// Memory that freeing alone would not keep until the device's work is done.
pub(crate) struct InUse {
    device: Device,
    memory: Option<Owner>,
}

impl InUse {
    pub fn new(device: &Device, memory: Owner) -> InUse {
        InUse { device: device.clone(), memory: Some(memory) }
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        if let Some(memory) = self.memory.take() {
            self.device.retire(memory);
        }
    }
}
