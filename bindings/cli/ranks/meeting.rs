//! Lets GPUs of different nodes, which share this process, go on at the same time.
//!
//! Where ranks of different nodes meet by the library's barrier alone, each leaves it as the last message reaches it:
//! the first to come leaves a network's latency behind the last, and what is timed next takes that much longer on one
//! side and less on the other. So all of them then meet once more in host memory, which every GPU of the process reads
//! within a microsecond.
//!
//! On the rank's thread, behind the barrier and ahead of what is timed. It enqueues and never waits. Nothing of it
//! reaches what is measured: payload, doorbells and flags go by the NIC.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokenyard::internals::kernels::bench;
use tokenyard::{Device, HostBuffer, Rank, Result, Stream, View};

use super::hold::{gone_on, word};

/// Two words a rank, which it came with and which it gave up; clones share them.
#[derive(Clone)]
pub struct Meeting {
    words: Arc<HostBuffer>,
    ranks: usize,
}

/// A rank's place in it.
pub struct Seat {
    meeting: Meeting,
    rank: usize,
    turn: Cell<u64>,
    timeout: Duration,
}

impl Meeting {
    /// Of all ranks of a world; any device of the process will do.
    ///
    /// # Errors
    /// `Device` where memory is lacking.
    pub fn new(device: &Device, ranks: usize) -> Result<Meeting> {
        let words = Arc::new(device.alloc_host(2 * ranks * size_of::<u64>())?);
        // Freeing waits for the work of its own device, not for that of the other ranks': a few words are kept for
        // good.
        std::mem::forget(words.clone());
        Ok(Meeting { words, ranks })
    }

    /// The place of a rank, which waits for the others no longer than `timeout`.
    pub fn seat(&self, rank: usize, timeout: Duration) -> Seat {
        Seat { meeting: self.clone(), rank, turn: Cell::new(0), timeout }
    }
}

impl Seat {
    /// Has the stream wait until the streams of all ranks are here, for as many times as this one.
    ///
    /// # Errors
    /// `Device` if the launch fails.
    pub fn meet(&self, stream: &Stream) -> Result<()> {
        self.turn.set(self.turn.get() + 1);
        let Meeting { words, ranks } = &self.meeting;
        // SAFETY: memory that the devices of all ranks reach and that is never freed.
        let words = unsafe { View::from_raw(stream.device(), words.view().ptr(), words.len()) };
        bench::meet(stream, &words, (self.rank, *ranks), self.turn.get(), self.timeout)
    }

    /// Whether all meetings came about; the stream must be idle.
    ///
    /// # Errors
    /// `Timeout` where the stream went on alone, so that what was timed behind says nothing.
    pub fn check(&self) -> Result<()> {
        let Meeting { words, ranks } = &self.meeting;
        match word(words, ranks + self.rank).map_or(0, |given_up| given_up.load(Ordering::Acquire)) {
            0 => Ok(()),
            seen => {
                let (rank, peer) = (Rank(self.rank as u32), Rank(seen as u32));
                Err(gone_on("the meeting before what is timed", rank, peer, seen >> 32, self.timeout))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(60);

    #[test]
    fn no_stream_goes_on_before_all_are_there() {
        let device = Device::cpu().unwrap();
        let meeting = Meeting::new(&device, 3).unwrap();
        // Each on a device of its own, so that all can wait at once.
        let ranks: Vec<_> = (0..3)
            .map(|rank| {
                let device = Device::cpu().unwrap();
                (meeting.seat(rank, PATIENCE), device.new_stream().unwrap())
            })
            .collect();
        for _ in 0..3 {
            for (seat, stream) in &ranks[..2] {
                seat.meet(stream).unwrap();
                assert!(stream.synchronize(Duration::from_millis(20)).is_err(), "the third is not there");
            }
            ranks[2].0.meet(&ranks[2].1).unwrap();
            for (seat, stream) in &ranks {
                stream.synchronize(PATIENCE).unwrap();
                seat.check().unwrap();
            }
        }
    }

    #[test]
    fn a_meeting_that_nobody_comes_to_ends_by_its_timeout_and_is_told_of() {
        let device = Device::cpu().unwrap();
        let stream = device.new_stream().unwrap();
        let start = Instant::now();
        let seat = Meeting::new(&device, 2).unwrap().seat(0, Duration::from_millis(30));
        seat.meet(&stream).unwrap();
        stream.synchronize(PATIENCE).unwrap();
        assert!(start.elapsed() >= Duration::from_millis(30));
        let error = seat.check().unwrap_err().to_string();
        assert!(
            error.contains("rank 0 waited 30 ms for the meeting before what is timed of rank 1 in epoch 1"),
            "{error}"
        );
        let words = device.alloc_host(24).unwrap();
        let error = bench::meet(&stream, &words.view(), (0, 2), 1, PATIENCE).unwrap_err().to_string();
        assert!(error.contains("24 bytes for rank 0 of 2"), "{error}");
    }
}
