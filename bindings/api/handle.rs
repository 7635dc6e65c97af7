//! Handles: what combine needs of a dispatch, in device memory, from a pool that grows by what is in use at once.

use super::calls::{Layout, Rows, Tokens};
use super::shape::Shape;
use crate::base::{Error, Result};
use crate::ffi::layout as raw;
use crate::kernels::{Device, DeviceBuffer, Half, LastUse, Queue};
use crate::proxy::wire::Direction;
use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The device memory of one handle.
pub(crate) struct Slot {
    _memory: DeviceBuffer,
    raw: raw::ty_handle,
    last: Arc<LastUse>,
}

/// Handles that are free. Held by the context and by every handle in use.
pub(crate) struct Pool {
    device: Device,
    ordered: bool,
    /// Where the parts of a handle lie in its memory, and the memory's length.
    offsets: [u64; PARTS],
    bytes: usize,
    free: Mutex<Free>,
    /// What was last given to a dispatch or a combine.
    numbers: AtomicU32,
}

/// Parts of a handle's memory.
const PARTS: usize = 10;

struct Free {
    slots: Vec<Slot>,
    /// Kernels never ended: slots that come back are kept as they are.
    abandoned: bool,
}

impl Pool {
    /// Allocates `count` handles.
    pub fn new(device: &Device, shape: &Shape, waves: usize, (count, ordered): (usize, bool)) -> Result<Arc<Pool>> {
        let (offsets, bytes) = layout(shape, waves);
        let free = Mutex::new(Free { slots: Vec::with_capacity(count), abandoned: false });
        let pool = Pool { device: device.clone(), ordered, offsets, bytes, free, numbers: AtomicU32::new(0) };
        for _ in 0..count {
            let slot = pool.make()?;
            slot._memory.fill(0)?;
            pool.lock().slots.push(slot);
        }
        Ok(Arc::new(pool))
    }

    /// Takes a handle for work on `queue`: one that was used there last, or else one whose last use the queue can wait
    /// for, or a new one. Where work is `recorded`, any that is free: its graph waits as it is launched.
    ///
    /// # Errors
    /// `Argument` where the stream captures and no handle is free: memory is allocated before. `Device` if there is
    /// none.
    pub fn take(self: &Arc<Pool>, queue: &Queue, recorded: bool) -> Result<Lease> {
        let mut slot = if recorded { self.lock().slots.pop().ok_or_else(none_free)? } else { self.take_eager(queue)? };
        // Combine refuses what an earlier dispatch left in this memory, if this handle's own never runs.
        slot.raw.serial = self.number();
        slot.raw.call = slot.raw.serial;
        Ok(Lease { last: slot.last.clone(), slot: Some(slot), pool: self.clone() })
    }

    /// Of a dispatch or a combine: another one each time, modulo 2^32, and not TY_HANDLE_EMPTY.
    pub fn number(&self) -> u32 {
        match self.numbers.fetch_add(1, Ordering::Relaxed).wrapping_add(1) {
            raw::TY_HANDLE_EMPTY => self.number(),
            number => number,
        }
    }

    fn take_eager(&self, queue: &Queue) -> Result<Slot> {
        let mut free = self.lock();
        if let Some(at) = free.slots.iter().rposition(|slot| slot.last.is_on(queue)) {
            return Ok(free.slots.swap_remove(at));
        }
        if queue.is_capturing()? {
            return Err(none_free());
        }
        if let Some(at) = free.slots.iter().position(|slot| slot.last.can_be_followed()) {
            return Ok(free.slots.swap_remove(at));
        }
        drop(free);
        let slot = self.make()?;
        queue.fill(slot._memory.view().span(), 0)?;
        Ok(slot)
    }

    fn make(&self) -> Result<Slot> {
        let memory = self.device.alloc(self.bytes)?;
        let [head, rows, weights, slots, source_tokens, rank_mask, wire_row, wire_rows, rail_mask, rail_rows] =
            self.offsets.map(|offset| memory.view().ptr() + offset);
        let raw = raw::ty_handle {
            head,
            rows,
            weights,
            slots,
            source_tokens,
            rank_mask,
            wire_row,
            wire_rows,
            rail_mask,
            rail_rows,
            serial: raw::TY_HANDLE_EMPTY,
            call: 0,
        };
        Ok(Slot { _memory: memory, raw, last: Arc::new(LastUse::new(self.ordered)) })
    }

    /// Has all handles keep their memory for good, those in use as they come back: kernels that do not end may use it.
    pub fn abandon(&self) {
        let mut free = self.lock();
        free.abandoned = true;
        std::mem::forget(std::mem::take(&mut free.slots));
    }

    fn lock(&self) -> MutexGuard<'_, Free> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn none_free() -> Error {
    Error::argument(
        "handle",
        "none free while the stream captures",
        "allocate before capturing, e.g. by Tuning::handles, or drop handles that are no longer used",
    )
}

fn layout(shape: &Shape, waves: usize) -> ([u64; PARTS], usize) {
    let tokens = shape.ranks * shape.max_tokens;
    let links = shape.nodes.members().len() - 1;
    let served = shape.nodes.sources(Direction::Dispatch, shape.name).len();
    let sizes = [
        size_of::<raw::ty_handle_head>(),
        tokens * shape.top_k * 4,
        tokens * shape.top_k * 4,
        tokens * 4,
        shape.ranks * (waves + 1) * 4,
        shape.max_tokens * 8,
        links * shape.max_tokens * 4,
        links * (waves + 1) * 4,
        served * shape.max_tokens * 8,
        served * (waves + 1) * 4,
    ];
    let mut offsets = [0u64; PARTS];
    let mut bytes = 0usize;
    for (offset, size) in offsets.iter_mut().zip(sizes) {
        *offset = bytes as u64;
        bytes += size.next_multiple_of(256);
    }
    (offsets, bytes)
}

/// A handle taken from the pool; goes back when dropped. Work that was enqueued with it before may use it still, and
/// whoever takes it next follows its last use.
pub(crate) struct Lease {
    slot: Option<Slot>,
    last: Arc<LastUse>,
    pool: Arc<Pool>,
}

impl Lease {
    pub fn raw(&self) -> raw::ty_handle {
        self.slot.as_ref().map_or_else(raw::ty_handle::default, |slot| slot.raw)
    }

    pub fn last_use(&self) -> &Arc<LastUse> {
        &self.last
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let Some(slot) = self.slot.take() else { return };
        let mut free = self.pool.lock();
        if free.abandoned {
            std::mem::forget(slot);
        } else {
            free.slots.push(slot);
        }
    }
}

/// A call that took what is under way and was refused: the reason, and what it was given, which may be given again.
/// Converts into [`Error`], so that `?` works where nobody wants it back.
pub struct Refused<T> {
    /// Why.
    pub error: Error,
    /// What the call was given.
    pub given: Box<T>,
}

impl<T> fmt::Debug for Refused<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Refused").field("error", &self.error).finish_non_exhaustive()
    }
}

impl<T> fmt::Display for Refused<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl<T> std::error::Error for Refused<T> {}

impl<T> From<Refused<T>> for Error {
    fn from(refused: Refused<T>) -> Error {
        refused.error
    }
}

/// A dispatch whose rows are under way: [`AllToAll::dispatch_recv`](super::AllToAll::dispatch_recv) takes it. It owns
/// what it refers to. Whoever drops it abandons the dispatch: the rank never receives it, so every later send of a
/// dispatch of the context ends in `Order`, and peers that wait for this rank run into their deadlines. The context can
/// only be dropped then. It can be received once:
///
/// ```compile_fail,E0382
/// # use tokenyard::{AllToAll, Output, Sent, Stream};
/// fn receive(ep: &AllToAll, stream: &Stream, sent: Sent, output: &Output) {
///     let first = ep.dispatch_recv(stream, sent, output);
///     let second = ep.dispatch_recv(stream, sent, output);
/// }
/// ```
#[must_use = "a dispatch that is sent must be received before the next one"]
pub struct Sent {
    pub(crate) lease: Arc<Lease>,
    pub(crate) room: usize,
    /// Input of the waves that are still to be sent.
    pub(crate) tokens: raw::ty_tokens,
    /// The same as views, which keep it; only where there are such waves.
    pub(crate) views: Option<Tokens>,
    pub(crate) context: u64,
}

impl fmt::Debug for Sent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Sent(context {}, room for {} tokens)", self.context, self.room)
    }
}

/// A received dispatch: what combine needs to bring the rows back. A handle may be combined any number of times, the
/// same on all ranks, and also after further dispatches. Its memory is used again once the handle was dropped and what
/// was enqueued with it has run; a graph that was captured with it keeps it.
///
/// The handle of a captured dispatch stands for that dispatch of the newest replay. Before the first replay there is
/// none: a combine of the handle is enqueued, returns `Ok`, does nothing, and ends in an [`Error::Order`] that is not
/// fatal and comes from [`check`](super::AllToAll::check).
pub struct Handle {
    pub(crate) lease: Arc<Lease>,
    /// Own tokens for which combine's output must have room.
    pub(crate) room: usize,
    /// Rows of the dispatch's output.
    pub(crate) rows: usize,
    pub(crate) layout: Layout,
    pub(crate) context: u64,
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Handle(context {}, {:?}, {} rows)", self.context, self.layout, self.rows)
    }
}

impl Handle {
    /// Another owner of the same memory.
    pub(crate) fn share(&self) -> Handle {
        Handle { lease: self.lease.clone(), ..*self }
    }
}

/// A combine whose rows are under way: [`AllToAll::combine_recv`](super::AllToAll::combine_recv) takes it. It owns what
/// it refers to, the handle's memory included. Until the combine is received, launching a graph that dispatches into
/// the same handle, or combines that handle, is refused. Dropping a `CombineSent` abandons the combine, as with
/// [`Sent`].
#[must_use = "a combine that is sent must be received before the next one"]
pub struct CombineSent {
    pub(crate) handle: Handle,
    /// Rows of the waves that are still to be sent.
    pub(crate) rows: SentRows,
    /// The same as views, which keep them; only where there are such waves.
    pub(crate) views: Option<Rows>,
    /// Unless it was recorded.
    pub(crate) _half: Option<Half>,
}

impl fmt::Debug for CombineSent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CombineSent({:?})", self.handle)
    }
}

/// The experts' rows and their weights, as kernels take them.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct SentRows {
    pub rows: u64,
    pub pitch: u64,
    pub topk_weight: u64,
    /// The call's number: see `ty_handle.call`.
    pub call: u32,
}
