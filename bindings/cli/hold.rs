//! Holds a GPU's stream back until the host has enqueued what is timed.
//!
//! On the rank's thread. Behind it, a barrier on the device lets all ranks go together, and only then; so a rank whose
//! host is slow makes nobody's times longer. The CPU device's times are not so fine: there it does nothing.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokenyard::kernels::bench;
use tokenyard::{Device, DeviceKind, HostBuffer, Result, Stream};

/// The word that a held stream waits for.
pub struct Hold {
    flag: Option<HostBuffer>,
    turn: Cell<u64>,
    timeout: Duration,
}

/// A stream that is held back; dropping this lets it go.
#[must_use = "the stream goes on at once where this is dropped"]
pub struct Held<'a>(&'a Hold);

impl Hold {
    /// A held stream goes on by itself after `timeout`.
    pub fn new(device: &Device, timeout: Duration) -> Result<Hold> {
        let flag = match device.kind() {
            DeviceKind::Cpu => None,
            DeviceKind::Cuda => Some(device.alloc_host(size_of::<u64>())?),
        };
        Ok(Hold { flag, turn: Cell::new(0), timeout })
    }

    /// Holds the stream at this point.
    pub fn hold(&self, stream: &Stream) -> Result<Held<'_>> {
        self.turn.set(self.turn.get() + 1);
        if let Some(flag) = &self.flag {
            bench::hold(stream, flag.view(), self.turn.get(), self.timeout)?;
        }
        Ok(Held(self))
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        if let Some(flag) = &self.0.flag {
            // SAFETY: the buffer holds one aligned word, which lives as long as it; the device only reads it, as a whole.
            let word = unsafe { AtomicU64::from_ptr(flag.host_ptr().cast()) };
            word.store(self.0.turn.get(), Ordering::Release);
        }
    }
}
