//! Holds a GPU's stream back until the host has enqueued what is timed.
//!
//! On the rank's thread, before each timed call. A barrier alone lets a rank go while its host still launches the next
//! kernel; so behind a first barrier, which brings the hosts together, come copies that take longer than enqueueing an
//! iteration, and then the barrier from which all ranks go. The CPU device's times are not so fine: there it does nothing.

use tokenyard::kernels::bench;
use tokenyard::{AllToAll, Device, DeviceBuffer, DeviceKind, Result, Stream};

/// Bytes of one copy: about 50 µs of an H100's memory.
const BYTES: usize = 64 << 20;
/// Copies: together some 200 µs, several times what eight threads need to launch an iteration.
const COPIES: usize = 4;

/// What is copied in the meantime.
pub struct Hold {
    scratch: Option<[DeviceBuffer; 2]>,
}

impl Hold {
    /// Allocates, on a GPU, what is copied.
    pub fn new(device: &Device) -> Result<Hold> {
        let scratch = match device.kind() {
            DeviceKind::Cpu => None,
            DeviceKind::Cuda => Some([device.alloc(BYTES)?, device.alloc(BYTES)?]),
        };
        Ok(Hold { scratch })
    }

    /// Enqueues the wait, and the barrier behind which all ranks go together.
    pub fn enqueue(&self, ep: &AllToAll, stream: &Stream) -> Result<()> {
        if let Some([from, to]) = &self.scratch {
            ep.barrier(stream)?;
            for _ in 0..COPIES {
                bench::push(stream, from.view(), &[to.view()], &[BYTES])?;
            }
        }
        ep.barrier(stream)
    }
}
