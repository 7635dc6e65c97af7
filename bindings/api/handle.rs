//! Handles: what combine needs of a dispatch, in device memory, from a pool that grows with the handles in use.

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
    /// Offsets of a handle's parts in its memory, and the memory's size in bytes.
    offsets: [u64; PARTS],
    bytes: usize,
    free: Mutex<Free>,
    /// The number last given to a dispatch or a combine.
    numbers: AtomicU32,
}

/// Parts of a handle's memory.
const PARTS: usize = 10;

struct Free {
    slots: Vec<Slot>,
    /// Kernels never ended: returned slots keep their memory for good.
    abandoned: bool,
}

impl Pool {
    /// Allocates `count` handles.
    pub fn new(device: &Device, shape: &Shape, rounds: usize, (count, ordered): (usize, bool)) -> Result<Arc<Pool>> {
        let (offsets, bytes) = layout(shape, rounds);
        let free = Mutex::new(Free { slots: Vec::with_capacity(count), abandoned: false });
        let pool = Pool { device: device.clone(), ordered, offsets, bytes, free, numbers: AtomicU32::new(0) };
        for _ in 0..count {
            let slot = pool.make()?;
            slot._memory.fill(0)?;
            pool.lock().slots.push(slot);
        }
        Ok(Arc::new(pool))
    }

    /// Takes a handle for work on `queue`: a handle last used there, else one whose last use the queue can wait for,
    /// else a new one. For `recorded` work any free handle: its graph waits when it is launched.
    ///
    /// # Errors
    /// `Argument` if the stream captures and no handle is free: a capture cannot allocate. `Device` without memory.
    pub fn take(self: &Arc<Pool>, queue: &Queue, recorded: bool) -> Result<Lease> {
        let mut slot = if recorded { self.lock().slots.pop().ok_or_else(none_free)? } else { self.take_eager(queue)? };
        // Combine refuses what an earlier dispatch left in this memory, if this handle's own never runs.
        slot.raw.serial = self.number();
        slot.raw.call = slot.raw.serial;
        Ok(Lease { last: slot.last.clone(), slot: Some(slot), pool: self.clone() })
    }

    /// The next number of a dispatch or a combine, modulo 2^32, never TY_HANDLE_EMPTY.
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

    /// Keeps the memory of all handles for good, also of handles in use when they come back: kernels that do not end
    /// may use it.
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

fn layout(shape: &Shape, rounds: usize) -> ([u64; PARTS], usize) {
    let tokens = shape.ranks * shape.max_tokens;
    let links = shape.nodes.members().len() - 1;
    let served = shape.nodes.sources(Direction::Dispatch, shape.name).len();
    let sizes = [
        size_of::<raw::ty_handle_head>(),
        tokens * shape.top_k * 4,
        tokens * shape.top_k * 4,
        tokens * 4,
        shape.ranks * (rounds + 1) * 4,
        shape.max_tokens * 8,
        links * shape.max_tokens * 4,
        links * (rounds + 1) * 4,
        served * shape.max_tokens * 8,
        served * (rounds + 1) * 4,
    ];
    let mut offsets = [0u64; PARTS];
    let mut bytes = 0usize;
    for (offset, size) in offsets.iter_mut().zip(sizes) {
        *offset = bytes as u64;
        bytes += size.next_multiple_of(256);
    }
    (offsets, bytes)
}

/// A handle taken from the pool; goes back when dropped. Work enqueued with it may then still use it, so the next call
/// that takes it waits for its last use.
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

/// A refused receiving half: the reason, and the [`Sent`] or [`CombineSent`] that the call was given, for another try.
/// Converts into [`Error`], so that `?` works where it is not needed again.
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

/// A dispatch in flight: [`AllToAll::dispatch_recv`](super::AllToAll::dispatch_recv) takes it. It owns the memory it
/// refers to. Dropping a `Sent` abandons the dispatch: the rank never receives it, so every later send of a dispatch of
/// the context ends in `Order`, and peers that wait for this rank reach their deadlines. The context can then only be
/// dropped. A `Sent` can be received once:
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
    /// Input of the later rounds.
    pub(crate) tokens: raw::ty_tokens,
    /// The same input as views, which keep its memory; only if there are later rounds.
    pub(crate) views: Option<Tokens>,
    pub(crate) context: u64,
}

impl fmt::Debug for Sent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Sent(context {}, room for {} tokens)", self.context, self.room)
    }
}

/// A received dispatch: what combine needs to bring the rows back. A handle may be combined any number of times, the
/// same on all ranks, and also after further dispatches. Its memory is reused once the handle is dropped and the work
/// enqueued with it has run; a graph that was captured with it keeps it.
///
/// The handle of a captured dispatch refers to that dispatch of the newest replay. Before the first replay a combine of
/// the handle is enqueued, returns `Ok`, does nothing, and ends in an [`Error::Order`] that is not fatal and comes from
/// [`check`](super::AllToAll::check).
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

/// A combine in flight: [`AllToAll::combine_recv`](super::AllToAll::combine_recv) takes it. It owns the memory it
/// refers to, the handle's memory included. Until the combine is received, the launch of a graph that dispatches into
/// the same handle, or combines that handle, is refused. Dropping a `CombineSent` abandons the combine, as with
/// [`Sent`]. It is received once:
///
/// ```compile_fail,E0382
/// # use tokenyard::{AllToAll, CombineSent, Combined, Stream};
/// fn receive(ep: &AllToAll, stream: &Stream, sent: CombineSent, out: &Combined) {
///     let first = ep.combine_recv(stream, sent, out);
///     let second = ep.combine_recv(stream, sent, out);
/// }
/// ```
#[must_use = "a combine that is sent must be received before the next one"]
pub struct CombineSent {
    pub(crate) handle: Handle,
    /// Rows of the later rounds.
    pub(crate) rows: SentRows,
    /// The same rows as views, which keep their memory; only if there are later rounds.
    pub(crate) views: Option<Rows>,
    /// `None` if the call was recorded.
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
