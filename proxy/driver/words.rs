//! Words that device and proxy share: in host memory; the words that the proxy writes may be in GPU memory.

use crate::base::{Error, Result};
use crate::proxy::wire::WordCounts;
use crate::transport::memory::gdr;
use std::any::Any;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// An array of shared 64-bit words, and what keeps its memory alive.
pub struct Words {
    base: NonNull<AtomicU64>,
    /// Words of the memory; every `pitch`th of them belongs to the array.
    len: usize,
    pitch: usize,
    /// The processor combines writes to them; see `transport/memory/gdr.rs`.
    combined: bool,
    _memory: Arc<dyn Any + Send + Sync>,
}

// SAFETY: the words are atomic, and the memory lives as long as its owner, which may be shared and sent.
unsafe impl Send for Words {}
// SAFETY: as above.
unsafe impl Sync for Words {}

impl Words {
    /// Zeroed words of this process alone.
    pub fn owned(len: usize) -> Words {
        let memory: Arc<Vec<AtomicU64>> = Arc::new((0..len).map(|_| AtomicU64::new(0)).collect());
        let base = NonNull::new(memory.as_ptr().cast_mut()).unwrap_or(NonNull::dangling());
        Words { base, len, pitch: 1, combined: false, _memory: memory }
    }

    /// Words at `base`, kept alive by `memory`.
    ///
    /// # Errors
    /// `Argument` if `base` is null or not aligned to 8 bytes.
    ///
    /// # Safety
    /// `len` words at `base` must stay valid and zeroed or written by words of this size, as long as `memory` lives,
    /// and be accessed atomically by everyone.
    pub unsafe fn from_raw(base: *mut u64, len: usize, memory: Arc<dyn Any + Send + Sync>) -> Result<Words> {
        match NonNull::new(base.cast::<AtomicU64>()) {
            Some(base) if base.is_aligned() => Ok(Words { base, len, pitch: 1, combined: false, _memory: memory }),
            _ => Err(Error::argument(
                "base",
                format!("{base:p}"),
                "shared words need an address that is aligned to 8 bytes",
            )),
        }
    }

    /// The same words, to which the processor combines writes.
    pub fn combined(self) -> Words {
        Words { combined: true, ..self }
    }

    /// Every `pitch`th of the same words alone, from the first on.
    pub fn every(self, pitch: usize) -> Words {
        Words { pitch: self.pitch.saturating_mul(pitch.max(1)), ..self }
    }

    /// A second handle of the same words.
    pub fn share(&self) -> Words {
        Words { _memory: Arc::clone(&self._memory), ..*self }
    }

    /// Writes a word that the device polls (Release): everything that this thread wrote or saw before is visible first.
    pub fn publish(&self, at: usize, value: u64) {
        match self.get(at) {
            Some(word) if self.combined => gdr::store(word, value),
            Some(word) => word.store(value, Ordering::Release),
            None => {}
        }
    }

    /// Their number.
    pub fn len(&self) -> usize {
        self.len / self.pitch
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// One word.
    pub fn get(&self, at: usize) -> Option<&AtomicU64> {
        self.all().get(at.checked_mul(self.pitch)?)
    }

    /// All words of the memory, those between the array's included.
    pub fn all(&self) -> &[AtomicU64] {
        // SAFETY: `len` words at `base` are valid as long as `_memory`, which `self` holds; they are atomic.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.len) }
    }
}

/// The words of one context, with the lengths that `Wire::word_counts` asks for.
pub struct ContextMemory {
    /// Written by the device: a chunk is packed.
    pub doorbells: Words,
    /// Written by the device: how many chunks a message has; last, how many signs of life it has given.
    pub chunks: Words,
    /// Written by the proxy: arrivals, in the order in which chunks arrive.
    pub arrived: Words,
    /// Written by the proxy: staging may be packed again.
    pub staging_free: Words,
    /// Written by the proxy: one more than the rank that was lost last; then for each rank all ones
    /// if it is lost, else how many signs of life its device has given.
    pub lost: Words,
}

impl ContextMemory {
    /// Zeroed words of this process alone.
    pub fn owned(counts: WordCounts) -> ContextMemory {
        ContextMemory {
            doorbells: Words::owned(counts.doorbells),
            chunks: Words::owned(counts.chunks),
            arrived: Words::owned(counts.arrived),
            staging_free: Words::owned(counts.staging_free),
            lost: Words::owned(counts.lost),
        }
    }

    /// A second handle of the same words.
    pub fn share(&self) -> ContextMemory {
        ContextMemory {
            doorbells: self.doorbells.share(),
            chunks: self.chunks.share(),
            arrived: self.arrived.share(),
            staging_free: self.staging_free.share(),
            lost: self.lost.share(),
        }
    }

    /// Lengths.
    pub fn counts(&self) -> WordCounts {
        WordCounts {
            doorbells: self.doorbells.len(),
            chunks: self.chunks.len(),
            arrived: self.arrived.len(),
            staging_free: self.staging_free.len(),
            lost: self.lost.len(),
        }
    }
}
