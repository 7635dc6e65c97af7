//! Lets GPUs of different nodes, which share this process, continue at the same time.
//!
//! A rank leaves the library's barrier when the last message reaches it. Between nodes the first rank to come leaves
//! a network latency after the last, and the next timed call takes that much longer on one side and less on the other.
//! So all ranks meet once more in host memory, which every GPU of the process reads within a microsecond.
//!
//! On the rank's thread, after the barrier and before the timed calls. It enqueues and never waits. A meeting does not
//! affect the measured calls: their payload, doorbells and flags go through the NIC.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokenyard::internals::kernels::bench;
use tokenyard::{Device, HostBuffer, Rank, Result, Stream, View};

use super::hold::{gave_up, word};

/// Two words per rank: the last meeting that it came to, and the meeting that it gave up; clones share them.
#[derive(Clone)]
pub struct Meeting {
    words: Arc<HostBuffer>,
    ranks: usize,
}

/// A rank's place in a meeting.
pub struct Attendee {
    meeting: Meeting,
    rank: usize,
    meetings: Cell<u64>,
    timeout: Duration,
}

impl Meeting {
    /// A meeting of all ranks of a world; `device` may be any device of the process.
    ///
    /// # Errors
    /// `Device` without memory.
    pub fn new(device: &Device, ranks: usize) -> Result<Meeting> {
        let words = Arc::new(device.alloc_host(2 * ranks * size_of::<u64>())?);
        // Freeing waits for the work of its own device, not for the work of other ranks' devices: these few words are
        // kept for good.
        std::mem::forget(words.clone());
        Ok(Meeting { words, ranks })
    }

    /// The place of a rank, which waits for the others no longer than `timeout`.
    pub fn attendee(&self, rank: usize, timeout: Duration) -> Attendee {
        Attendee { meeting: self.clone(), rank, meetings: Cell::new(0), timeout }
    }
}

impl Attendee {
    /// Makes the stream wait until the streams of all ranks have come to the meeting of this number.
    ///
    /// # Errors
    /// `Device` if the launch fails.
    pub fn meet(&self, stream: &Stream) -> Result<()> {
        self.meetings.set(self.meetings.get() + 1);
        let Meeting { words, ranks } = &self.meeting;
        // SAFETY: memory that the devices of all ranks reach and that is never freed.
        let words = unsafe { View::from_raw(stream.device(), words.view().ptr(), words.len()) };
        bench::meet(stream, &words, (self.rank, *ranks), self.meetings.get(), self.timeout)
    }

    /// Whether all meetings were complete; the stream must be idle.
    ///
    /// # Errors
    /// `Timeout` if the stream continued alone, so that the times after it mean nothing.
    pub fn check(&self) -> Result<()> {
        let Meeting { words, ranks } = &self.meeting;
        match word(words, ranks + self.rank).map_or(0, |given_up| given_up.load(Ordering::Acquire)) {
            0 => Ok(()),
            seen => {
                let (rank, peer) = (Rank(self.rank as u32), Rank(seen as u32));
                Err(gave_up("the meeting before timed calls", rank, peer, seen >> 32, self.timeout))
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
    fn no_stream_continues_before_all_are_there() {
        let device = Device::cpu().unwrap();
        let meeting = Meeting::new(&device, 3).unwrap();
        // Each rank on its own device, so that all can wait at once.
        let ranks: Vec<_> = (0..3)
            .map(|rank| {
                let device = Device::cpu().unwrap();
                (meeting.attendee(rank, PATIENCE), device.new_stream().unwrap())
            })
            .collect();
        for _ in 0..3 {
            for (attendee, stream) in &ranks[..2] {
                attendee.meet(stream).unwrap();
                assert!(stream.synchronize(Duration::from_millis(20)).is_err(), "the third is not there");
            }
            ranks[2].0.meet(&ranks[2].1).unwrap();
            for (attendee, stream) in &ranks {
                stream.synchronize(PATIENCE).unwrap();
                attendee.check().unwrap();
            }
        }
    }

    #[test]
    fn a_meeting_that_nobody_comes_to_ends_by_its_timeout_and_is_reported() {
        let device = Device::cpu().unwrap();
        let stream = device.new_stream().unwrap();
        let start = Instant::now();
        let attendee = Meeting::new(&device, 2).unwrap().attendee(0, Duration::from_millis(30));
        attendee.meet(&stream).unwrap();
        stream.synchronize(PATIENCE).unwrap();
        assert!(start.elapsed() >= Duration::from_millis(30));
        let error = attendee.check().unwrap_err().to_string();
        assert!(
            error.contains("rank 0 waited 30 ms for the meeting before timed calls of rank 1 in epoch 1"),
            "{error}"
        );
        let words = device.alloc_host(24).unwrap();
        let error = bench::meet(&stream, &words.view(), (0, 2), 1, PATIENCE).unwrap_err().to_string();
        assert!(error.contains("24 bytes for rank 0 of 2"), "{error}");
    }
}
