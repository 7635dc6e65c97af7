//! Registered memory: the only place where the simulation touches bytes that it does not own.
//!
//! The argument for its `unsafe`, once for all uses: an address comes from a span that a caller of
//! `Transport::register` promised to keep readable and writable until it is taken back or its endpoint dropped. Every
//! copy happens under the network's lock. Taking a span back, and dropping, killing or resetting an endpoint, takes the
//! same lock and removes all flights that would still write there; a span with writes from it outstanding is not taken
//! back. So no copy touches memory that is gone.

use crate::base::checksum::{fnv1a, fnv1a_more};

/// Where a write's payload comes from.
#[derive(Debug)]
pub(super) enum Source {
    /// Registered memory, read when each packet is placed, and once more at completion where sources are watched: a
    /// change that is too early shows at the target, or fails the write.
    Memory(u64),
    /// Read already; the owner was notified that it may reuse its memory.
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

    /// A checksum over `bytes` from `offset` of a payload in registered memory; 0 for a payload that was read already.
    ///
    /// # Safety
    /// As for [`Source::copy`], of the source.
    pub(super) unsafe fn sum(&self, offset: u32, bytes: u32) -> u64 {
        if matches!(self, Source::Taken(_)) {
            return 0;
        }
        let mut read = vec![0u8; bytes as usize];
        // SAFETY: the caller's, and the target was just made for it.
        unsafe { self.copy(offset, read.as_mut_ptr() as u64, bytes) };
        fnv1a_more(fnv1a(&offset.to_le_bytes()), &read)
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
