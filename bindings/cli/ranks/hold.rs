//! Holds a GPU's stream back until the host has enqueued the timed calls.
//!
//! On the rank's thread. After the hold, a barrier on the device starts all ranks at the same time, so a slow host of
//! one rank makes no rank's times longer. The CPU device's times are coarser: there a hold does nothing.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokenyard::internals::kernels::bench;
use tokenyard::{Device, DeviceKind, Error, HostBuffer, Rank, Result, Stream};

/// The words that a held stream waits for.
pub struct Hold {
    /// The number of the last hold that was released, and of the hold that timed out.
    words: Option<HostBuffer>,
    rank: Rank,
    holds: Cell<u64>,
    timeout: Duration,
}

/// A stream that is held back; dropping this releases it.
#[must_use = "the stream continues as soon as this is dropped"]
pub struct Held<'a>(&'a Hold);

impl Hold {
    /// A held stream of `rank` continues by itself after `timeout`.
    pub fn new(device: &Device, rank: Rank, timeout: Duration) -> Result<Hold> {
        match device.kind() {
            DeviceKind::Cpu => Ok(Hold { words: None, rank, holds: Cell::new(0), timeout }),
            DeviceKind::Cuda => Hold::on_any(device, rank, timeout),
        }
    }

    fn on_any(device: &Device, rank: Rank, timeout: Duration) -> Result<Hold> {
        let words = device.alloc_host(2 * size_of::<u64>())?;
        Ok(Hold { words: Some(words), rank, holds: Cell::new(0), timeout })
    }

    /// Holds the stream at this point.
    pub fn hold(&self, stream: &Stream) -> Result<Held<'_>> {
        self.holds.set(self.holds.get() + 1);
        if let Some(words) = &self.words {
            bench::hold(stream, &words.view(), self.holds.get(), self.timeout)?;
        }
        Ok(Held(self))
    }

    /// Whether the host released the stream each time; the stream must be idle.
    ///
    /// # Errors
    /// `Timeout` if the stream continued by itself, so that the times after it mean nothing.
    pub fn check(&self) -> Result<()> {
        match self.word(1).map_or(0, |word| word.load(Ordering::Acquire)) {
            0 => Ok(()),
            hold => Err(gave_up("the host to enqueue timed calls", self.rank, self.rank, hold, self.timeout)),
        }
    }

    fn word(&self, at: usize) -> Option<&AtomicU64> {
        self.words.as_ref().and_then(|words| word(words, at))
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        if let Some(word) = self.0.word(0) {
            word.store(self.0.holds.get(), Ordering::Release);
        }
    }
}

/// A word that host and devices share; `None` beyond the buffer.
pub fn word(words: &HostBuffer, at: usize) -> Option<&AtomicU64> {
    if at >= words.len() / size_of::<u64>() {
        return None;
    }
    // SAFETY: inside the buffer, which is aligned and lives as long as the reference; devices load and store whole
    // words.
    Some(unsafe { AtomicU64::from_ptr(words.host_ptr().cast::<u64>().add(at)) })
}

/// The error of a stream that stopped waiting, by the number of the wait.
pub fn gave_up(site: &'static str, rank: Rank, peer: Rank, number: u64, timeout: Duration) -> Error {
    let waited_ms = timeout.as_millis() as u64;
    Error::Timeout { rank, site, peer, epoch: number, expected: number, seen: 0, waited_ms, advice: "" }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(60);

    #[test]
    fn a_stream_is_held_until_it_is_released() {
        let device = Device::cpu().unwrap();
        let stream = device.new_stream().unwrap();
        let hold = Hold::on_any(&device, Rank(3), PATIENCE).unwrap();
        for _ in 0..3 {
            let held = hold.hold(&stream).unwrap();
            assert!(stream.synchronize(Duration::from_millis(20)).is_err(), "it is held");
            drop(held);
            stream.synchronize(PATIENCE).unwrap();
            hold.check().unwrap();
        }
    }

    #[test]
    fn a_stream_that_was_not_released_in_time_is_reported() {
        let device = Device::cpu().unwrap();
        let stream = device.new_stream().unwrap();
        let hold = Hold::on_any(&device, Rank(3), Duration::from_millis(30)).unwrap();
        let held = hold.hold(&stream).unwrap();
        stream.synchronize(PATIENCE).unwrap();
        drop(held);
        let error = hold.check().unwrap_err().to_string();
        assert!(
            error.contains("rank 3 waited 30 ms for the host to enqueue timed calls of rank 3 in epoch 1"),
            "{error}"
        );
        let error = bench::hold(&stream, &device.alloc_host(8).unwrap().view(), 1, PATIENCE).unwrap_err().to_string();
        assert!(error.contains("8 bytes"), "{error}");
    }

    #[test]
    fn the_cpu_device_is_not_held() {
        let device = Device::cpu().unwrap();
        let stream = device.new_stream().unwrap();
        let hold = Hold::new(&device, Rank(0), PATIENCE).unwrap();
        let held = hold.hold(&stream).unwrap();
        stream.synchronize(PATIENCE).unwrap();
        drop(held);
        hold.check().unwrap();
    }
}
