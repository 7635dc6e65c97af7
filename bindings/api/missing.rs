//! Ranks that are missing, in contexts whose calls go on without them.
//!
//! ```text
//!   device: ty_absence [ranks], beside int32 [ranks], the mask that callers read and write
//!   host:   uint64 [ranks], when a deadline masked a rank
//! ```

use crate::base::{Rank, Result};
use crate::ffi::layout as raw;
use crate::kernels::{Device, DeviceBuffer, HostBuffer, View};
use std::sync::atomic::{AtomicU64, Ordering};

/// What calls of a context do about ranks that are missing ([`AllToAllBuilder::missing_ranks`]).
///
/// [`AllToAllBuilder::missing_ranks`]: super::AllToAllBuilder::missing_ranks
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum MissingRanks {
    /// Every rank takes part in every call. A rank that is silent until the deadline closes the context with `Timeout`.
    #[default]
    Fatal,
    /// Ranks can be [masked](super::AllToAll::rank_mask). A rank that is not masked and is silent until the deadline
    /// closes the context.
    Masked,
    /// Ranks can be masked, and a deadline masks the rank that is silent: the call ends well without that rank.
    MaskedAtDeadline,
}

/// A rank that a deadline masked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SilentRank {
    /// The rank in the first generation.
    pub rank: Rank,
    /// The call that had waited for it: "dispatch", "combine" or "barrier".
    pub call: &'static str,
    /// That call's [epoch](crate::Error#epochs).
    pub epoch: u64,
}

/// The words of a context about missing ranks.
pub(crate) struct Absences {
    words: DeviceBuffer,
    mask: DeviceBuffer,
    silences: HostBuffer,
    ranks: usize,
    masks_silent: bool,
}

impl Absences {
    /// Of a world of `ranks` ranks; none if missing ranks are fatal.
    ///
    /// # Errors
    /// As [`Device::alloc`] and [`Device::alloc_host`].
    pub fn allocate(device: &Device, ranks: usize, missing: MissingRanks) -> Result<Option<Absences>> {
        let masks_silent = missing == MissingRanks::MaskedAtDeadline;
        if missing == MissingRanks::Fatal {
            return Ok(None);
        }
        let words = device.alloc(ranks * size_of::<raw::ty_absence>())?;
        let (mask, silences) = (device.alloc(4 * ranks)?, device.alloc_host(8 * ranks)?);
        words.fill(0)?;
        mask.fill(0)?;
        Ok(Some(Absences { words, mask, silences, ranks, masks_silent }))
    }

    /// What launches are given.
    pub fn give(&self, context: raw::ty_context) -> raw::ty_context {
        let absences = raw::ty_absences {
            ranks: self.words.view().ptr(),
            mask: self.mask.view().ptr(),
            silences: self.silences.view().ptr(),
            masks_silent: u32::from(self.masks_silent),
            ..context.absences
        };
        raw::ty_context { absences, ..context }
    }

    /// int32 `[ranks]`.
    pub fn mask(&self) -> View {
        self.mask.view()
    }

    /// Masks a rank of this generation.
    ///
    /// # Errors
    /// As [`DeviceBuffer::write`].
    pub fn set(&self, rank: usize) -> Result<()> {
        self.mask.write(4 * rank, &1i32.to_ne_bytes())
    }

    /// The ranks of this generation that a deadline masked, each with the call and its epoch.
    pub fn silent(&self) -> impl Iterator<Item = (Rank, &'static str, u64)> {
        let words = self.silences.host_ptr().cast::<u64>();
        let read = move |rank: usize| {
            // SAFETY: the buffer has `ranks` words; they are 8-byte aligned, live as long as the buffer, and the device
            // writes them atomically.
            unsafe { AtomicU64::from_ptr(words.add(rank)) }.load(Ordering::Relaxed)
        };
        (0..self.ranks).filter_map(move |rank| {
            let word = read(rank);
            let call = match u32::try_from(word & 3).unwrap_or(0).checked_sub(1)? {
                raw::TY_DIRECTION_DISPATCH => "dispatch",
                raw::TY_DIRECTION_COMBINE => "combine",
                _ => "barrier",
            };
            Some((Rank(rank as u32), call, word >> 2))
        })
    }
}
