//! Registered memory: the only place where the simulation touches bytes that it does not own.
//!
//! The argument for its `unsafe`, once for all: an address comes from a span that a caller of `Transport::register`
//! promised to keep readable and writable until its endpoint is dropped. Every copy happens under the network's lock.
//! Dropping, killing or resetting an endpoint takes the same lock and removes everything on the way that would still
//! read or write its spans. So no copy meets memory whose endpoint is gone.

use crate::transport::link::{Place, Span};

/// The address of `bytes` at a place of one of the spans; `None` if they are not all inside.
pub(super) fn locate(spans: &[Span], place: Place, bytes: u32) -> Option<u64> {
    let span = spans.get(usize::from(place.region.0))?;
    fits(span.bytes as u64, place.offset, bytes).then(|| span.base + place.offset)
}

/// Whether `bytes` at `offset` are inside a span of `length`.
pub(super) fn fits(length: u64, offset: u64, bytes: u32) -> bool {
    offset.checked_add(u64::from(bytes)).is_some_and(|end| end <= length)
}

/// Where a write's payload comes from.
#[derive(Debug)]
pub(super) enum Source {
    /// Registered memory, read when each packet lands: what its owner changes too early shows at the target.
    Memory(u64),
    /// Read already; the owner was told that it may reuse its memory.
    Taken(Box<[u8]>),
}

impl Source {
    /// Reads a payload now.
    ///
    /// # Safety
    /// As for [`Source::copy`], of the source.
    pub(super) unsafe fn take(address: u64, bytes: u32) -> Source {
        let mut taken = vec![0; bytes as usize].into_boxed_slice();
        // SAFETY: the caller's, and the target was just made for it.
        unsafe { Source::Memory(address).copy(0, taken.as_mut_ptr() as u64, bytes) };
        Source::Taken(taken)
    }

    /// Copies `bytes` from `offset` of the payload to an address.
    ///
    /// # Safety
    /// Both ends lie in spans of endpoints that live (or own the bytes), for the whole length, and the caller holds the
    /// network's lock: see the module's documentation.
    pub(super) unsafe fn copy(&self, offset: u32, target: u64, bytes: u32) {
        let target = std::ptr::with_exposed_provenance_mut::<u8>(target as usize);
        let source = match self {
            Source::Memory(base) => std::ptr::with_exposed_provenance::<u8>((base + u64::from(offset)) as usize),
            Source::Taken(payload) => payload[offset as usize..].as_ptr(),
        };
        // SAFETY: the caller's promise. A rank may write to itself, so the two may overlap.
        unsafe { std::ptr::copy(source, target, bytes as usize) };
    }
}
