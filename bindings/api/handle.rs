//! Handles: what combine needs of a dispatch, in device memory, from a pool that is allocated when the context is built.

use super::calls::Layout;
use super::shape::Shape;
use crate::base::{Error, Result};
use crate::ffi::layout as raw;
use crate::kernels::{Device, DeviceBuffer};
use crate::proxy::wire::Direction;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The device memory of one handle.
pub(crate) struct Slot {
    _memory: DeviceBuffer,
    raw: raw::ty_handle,
}

/// Handles that are free. Held by the context and by every handle in use.
pub(crate) struct Pool {
    free: Mutex<Vec<Slot>>,
    total: usize,
}

impl Pool {
    /// Allocates `count` handles.
    pub fn new(device: &Device, shape: &Shape, waves: usize, count: usize) -> Result<Arc<Pool>> {
        let slots = (0..count).map(|_| Slot::new(device, shape, waves)).collect::<Result<Vec<_>>>()?;
        Ok(Arc::new(Pool { free: Mutex::new(slots), total: count }))
    }

    /// Takes a free handle.
    pub fn take(self: &Arc<Pool>) -> Result<Lease> {
        match self.lock().pop() {
            Some(slot) => Ok(Lease { slot: Some(slot), pool: self.clone() }),
            None => Err(Error::Argument {
                name: "handle",
                value: format!("all {} in use", self.total),
                advice: "drop handles whose combine has been enqueued, or build the context with more".into(),
            }),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Slot>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Slot {
    fn new(device: &Device, shape: &Shape, waves: usize) -> Result<Slot> {
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
        let mut offsets = [0u64; 10];
        let mut bytes = 0usize;
        for (offset, size) in offsets.iter_mut().zip(sizes) {
            *offset = bytes as u64;
            bytes += size.next_multiple_of(256);
        }
        let memory = device.alloc(bytes)?;
        memory.fill(0)?;
        let [head, rows, weights, slots, source_tokens, rank_mask, wire_row, wire_rows, rail_mask, rail_rows] =
            offsets.map(|offset| memory.view().ptr + offset);
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
        Ok(Slot { _memory: memory, raw })
    }
}

/// A handle taken from the pool; goes back when dropped. Work enqueued before that on the same stream still finds its
/// contents, since whoever takes it next enqueues later.
pub(crate) struct Lease {
    slot: Option<Slot>,
    pool: Arc<Pool>,
}

impl Lease {
    pub fn raw(&self) -> raw::ty_handle {
        self.slot.as_ref().map_or_else(raw::ty_handle::default, |slot| slot.raw)
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if let Some(slot) = self.slot.take() {
            self.pool.lock().push(slot);
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
/// only be dropped then. As with a [`Handle`], where calls go on several streams, drop it only once what was enqueued
/// has run.
#[must_use = "a dispatch that is sent must be received before the next one"]
pub struct Sent {
    pub(crate) lease: Arc<Lease>,
    pub(crate) room: usize,
    /// Input of the waves that are still to be sent.
    pub(crate) tokens: raw::ty_tokens,
    pub(crate) context: u64,
}

impl fmt::Debug for Sent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Sent(context {}, room for {} tokens)", self.context, self.room)
    }
}

/// A received dispatch: what combine needs to bring the rows back. May be combined later, also after further
/// dispatches. Keep it alive as long as a captured graph that uses it; where a context's calls go on several streams, also until
/// its combine's has passed it, since the next dispatch on another stream may take its memory.
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
