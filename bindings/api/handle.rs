//! Handles: what combine needs of a dispatch, in device memory, from a pool that grows by what is in use at once.

use super::calls::{Layout, Rows, Tokens};
use super::shape::Shape;
use crate::base::{Error, Result};
use crate::ffi::layout as raw;
use crate::kernels::{Device, DeviceBuffer, Queue, Recording};
use crate::proxy::wire::Direction;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The device memory of one handle.
pub(crate) struct Slot {
    _memory: DeviceBuffer,
    raw: raw::ty_handle,
    /// Streams whose work may use it still.
    used: Vec<Queue>,
}

/// Handles that are free. Held by the context and by every handle in use.
pub(crate) struct Pool {
    device: Device,
    /// Where the parts of a handle lie in its memory, and the memory's length.
    offsets: [u64; PARTS],
    bytes: usize,
    free: Mutex<Free>,
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
    pub fn new(device: &Device, shape: &Shape, waves: usize, count: usize) -> Result<Arc<Pool>> {
        let (offsets, bytes) = layout(shape, waves);
        let free = Mutex::new(Free { slots: Vec::with_capacity(count), abandoned: false });
        let pool = Pool { device: device.clone(), offsets, bytes, free };
        for _ in 0..count {
            let slot = pool.make()?;
            slot._memory.fill(0)?;
            pool.lock().slots.push(slot);
        }
        Ok(Arc::new(pool))
    }

    /// Takes a handle for work on `queue`: one that was used there alone, or else one that the queue then waits for, or a
    /// new one. What a capture records waits as its graph is first launched.
    ///
    /// # Errors
    /// `Argument` where the stream captures and no handle is free: memory is allocated before. `Device` if there is none.
    pub fn take(self: &Arc<Pool>, queue: &Queue, recording: Option<&mut Recording>) -> Result<Lease> {
        let mut slot = match recording {
            Some(recording) => {
                let slot = self.lock().slots.pop();
                slot.iter().flat_map(|slot| &slot.used).for_each(|used| recording.come_after(used));
                // It is still used there: the graph may never be launched.
                slot.ok_or_else(none_free)?
            }
            None => {
                let mut slot = self.take_eager(queue)?;
                slot.used.clear();
                slot
            }
        };
        let used = std::mem::take(&mut slot.used);
        Ok(Lease { slot: Some(slot), pool: self.clone(), first: AtomicU64::new(0), used: Mutex::new(used) })
    }

    fn take_eager(&self, queue: &Queue) -> Result<Slot> {
        let mut free = self.lock();
        if let Some(at) = free.slots.iter().rposition(|slot| slot.used.iter().all(|used| used.same(queue))) {
            return Ok(free.slots.swap_remove(at));
        }
        if queue.is_capturing()? {
            return Err(none_free());
        }
        let waited_for = |slot: &Slot| !slot.used.iter().any(|used| used.is_capturing().unwrap_or(true));
        if let Some(at) = free.slots.iter().position(waited_for) {
            let slot = free.slots.swap_remove(at);
            let ordered = slot.used.iter().filter(|used| !used.same(queue)).try_for_each(|used| queue.wait_for(used));
            if let Err(why) = ordered {
                free.slots.push(slot);
                return Err(why);
            }
            return Ok(slot);
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
        };
        Ok(Slot { _memory: memory, raw, used: Vec::new() })
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
        "allocate before capturing, e.g. by AllToAllBuilder::handles, or drop handles that are no longer used",
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

/// A handle taken from the pool; goes back when dropped, with the streams whose work may use it still.
pub(crate) struct Lease {
    slot: Option<Slot>,
    pool: Arc<Pool>,
    /// One more than the first stream's number, or 0: most handles are used on one stream, without the lock.
    first: AtomicU64,
    used: Mutex<Vec<Queue>>,
}

impl Lease {
    pub fn raw(&self) -> raw::ty_handle {
        self.slot.as_ref().map_or_else(raw::ty_handle::default, |slot| slot.raw)
    }

    /// Remembers where work that uses it is enqueued.
    pub fn used_on(&self, queue: &Queue) {
        let number = queue.raw().wrapping_add(1);
        if self.first.load(Ordering::Relaxed) == number {
            return;
        }
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        if !used.iter().any(|known| known.same(queue)) {
            used.push(queue.clone());
        }
        // Relaxed: who sees it saw the queue pushed, or pushes it again under the lock.
        let _ = self.first.compare_exchange(0, number, Ordering::Relaxed, Ordering::Relaxed);
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let Some(mut slot) = self.slot.take() else { return };
        slot.used = std::mem::take(self.used.get_mut().unwrap_or_else(PoisonError::into_inner));
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

/// A received dispatch: what combine needs to bring the rows back. May be combined later, also after further
/// dispatches. Its memory is used again once it was dropped and what was enqueued with it has run; a graph that was
/// captured with it keeps it.
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

/// A combine whose rows are under way: [`AllToAll::combine_recv`](super::AllToAll::combine_recv) takes it. It owns what it
/// refers to, the handle's memory included. Dropping it abandons the combine, as with [`Sent`].
#[must_use = "a combine that is sent must be received before the next one"]
pub struct CombineSent {
    pub(crate) handle: Handle,
    /// Rows of the waves that are still to be sent.
    pub(crate) rows: SentRows,
    /// The same as views, which keep them; only where there are such waves.
    pub(crate) views: Option<Rows>,
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
}
