//! The NIC kernel of one endpoint, from its host side: requests in, a word for each that is carried out.
//!
//! Place: between the endpoint (transport/network/emulated), which decides what to copy and when, and nic.cuh, which
//! copies. Runs on whichever thread polls or resets, under the endpoint's lock. Posting and looking never wait;
//! draining and dropping wait until what was posted is copied.
//!
//! ```text
//!   post ─▶ requests[n], posted = n + 1 ─▶ kernel ─▶ completed[n] = n + 1
//!             └─ no launch is alive? launch        └─ idle or stopped: ended = number of the launch
//! ```

use super::budget::Budget;
use super::{Device, DeviceBuffer, DeviceKind, HostBuffer, Stream};
use crate::base::Result;
use crate::base::copies::{CopyDevice, CopyEngine};
use crate::base::wait::uninterrupted;
use crate::ffi::layout as raw;
use std::mem::{ManuallyDrop, offset_of};
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Requests that may be outstanding.
const SLOTS: u64 = raw::TY_NIC_SLOTS as u64;
/// Blocks of the kernel on a GPU: one passes requests on; the others are enough to copy chunks faster than a NIC of
/// 400 Gb/s does (docs/notebook-nodes.md, "Groups of GPUs as nodes").
const GPU_BLOCKS: u32 = 16;
/// Threads of a block. They take a good half of a multiprocessor's registers: kernels without waits fit beside them.
const GPU_THREADS: u32 = 512;
/// Blocks that carry a request out together: a chunk of 256 KiB is about what they have under way at once.
const GPU_GROUP: u32 = 5;
/// The same on the CPU device.
const CPU_BLOCKS: u32 = 6;
const CPU_THREADS: u32 = 64;
const CPU_GROUP: u32 = 2;
/// Shared memory of a block: one word.
const SHARED_BYTES: u32 = 16;
/// A launch without work ends after this time, so that whatever waits for an idle GPU (freeing memory, loading code)
/// waits no longer; the next request launches the kernel again. Long against a step, so that a step rarely launches.
const IDLE: Duration = Duration::from_millis(20);
/// How long dropping waits for the kernel, which copies what was posted and ends.
const END: Duration = Duration::from_secs(30);
/// bindgen makes it signed.
const STOP: u64 = raw::TY_NIC_STOP as u64;

const POSTED: usize = offset_of!(raw::ty_nic_host, posted) / 8;
const COMPLETED: usize = offset_of!(raw::ty_nic_host, completed) / 8;
const RELAYED: usize = offset_of!(raw::ty_nic_host, relayed) / 8;
const ENDED: usize = offset_of!(raw::ty_nic_host, ended) / 8;
const REQUESTS: usize = offset_of!(raw::ty_nic_host, requests) / 8;
const REQUEST_WORDS: usize = size_of::<raw::ty_nic_request>() / 8;

/// A ring, and the kernel that works it off.
pub struct Engine {
    stream: Stream,
    /// A `ty_nic_host`: words that host and device access atomically.
    host: ManuallyDrop<HostBuffer>,
    device: ManuallyDrop<DeviceBuffer>,
    posted: u64,
    /// Requests carried out, all before this number.
    completed: u64,
    launches: u64,
    /// Its blocks, which must be resident beside those of the GPU's contexts.
    budget: ManuallyDrop<Option<Budget<'static>>>,
}

impl Engine {
    fn new(device: &Device) -> Result<Engine> {
        let budget = Budget::take(device, "blocks", Some(GPU_BLOCKS))?;
        let host = device.alloc_host(size_of::<raw::ty_nic_host>())?;
        let memory = device.alloc(size_of::<raw::ty_nic_device>())?;
        memory.fill(0)?;
        Ok(Engine {
            stream: device.new_stream()?,
            host: ManuallyDrop::new(host),
            device: ManuallyDrop::new(memory),
            posted: 0,
            completed: 0,
            launches: 0,
            budget: ManuallyDrop::new(budget),
        })
    }

    fn load(&self, at: usize, order: Ordering) -> u64 {
        self.host.words().get(at).map_or(0, |word| word.load(order))
    }

    fn store(&self, at: usize, value: u64, order: Ordering) {
        if let Some(word) = self.host.words().get(at) {
            word.store(value, order);
        }
    }
}

impl CopyEngine for Engine {
    const SLOTS: u64 = SLOTS;

    /// Requests posted since the beginning.
    fn posted(&self) -> u64 {
        self.posted
    }

    /// Requests carried out since the beginning: all before this number. Their payload is in place.
    fn completed(&mut self) -> u64 {
        // The kernel released each word after the request's payload, in any order.
        while self.completed < self.posted
            && self.load(COMPLETED + (self.completed % SLOTS) as usize, Ordering::Acquire) == self.completed + 1
        {
            self.completed += 1;
        }
        self.completed
    }

    /// Posts a copy and returns its number, counted from 0; `None` if the ring is full.
    fn post(&mut self, source: u64, target: u64, bytes: u64) -> Result<Option<u64>> {
        let number = self.posted;
        if number - self.completed() >= SLOTS {
            return Ok(None);
        }
        let at = REQUESTS + (number % SLOTS) as usize * REQUEST_WORDS;
        for (word, value) in [source, target, bytes].into_iter().enumerate() {
            self.store(at + word, value, Ordering::Relaxed);
        }
        self.posted = number + 1;
        // Acquired by the kernel's relay.
        self.store(POSTED, self.posted, Ordering::Release);
        self.keep_running()?;
        Ok(Some(number))
    }

    /// Launches the kernel if there is work and no launch is alive.
    fn keep_running(&mut self) -> Result<()> {
        // Acquire: `relayed` was stored before.
        if self.load(ENDED, Ordering::Acquire) != self.launches {
            return Ok(());
        }
        let begin = self.load(RELAYED, Ordering::Relaxed);
        if begin == self.posted {
            return Ok(());
        }
        let (blocks, threads, group_blocks) = match self.stream.device().kind() {
            DeviceKind::Cpu => (CPU_BLOCKS, CPU_THREADS, CPU_GROUP),
            DeviceKind::Cuda => (GPU_BLOCKS, GPU_THREADS, GPU_GROUP),
        };
        let args = raw::ty_nic_args {
            host: self.host.view().ptr(),
            device: self.device.view().ptr(),
            launch: self.launches + 1,
            begin,
            idle_ns: IDLE.as_nanos() as u64,
            group_blocks,
            reserved: 0,
        };
        // SAFETY: both spans are this engine's, which keeps them until the kernel has ended; requests name memory
        // that the network's users registered.
        unsafe { self.stream.launch("ty_nic", blocks, threads, SHARED_BYTES, &args)? };
        self.launches += 1;
        Ok(())
    }
}

impl Drop for Engine {
    /// Ends the kernel once all that was posted is copied. If the kernel does not end, its memory is never freed.
    fn drop(&mut self) {
        let launched = self.keep_running();
        self.store(POSTED, self.posted | STOP, Ordering::Release);
        if launched.and_then(|()| uninterrupted(|| self.stream.synchronize(END))).is_ok() {
            // SAFETY: dropped once, here; the kernel has ended, and nothing of it is used below.
            unsafe {
                ManuallyDrop::drop(&mut self.host);
                ManuallyDrop::drop(&mut self.device);
                ManuallyDrop::drop(&mut self.budget);
            }
        }
    }
}

impl CopyDevice for Device {
    type Engine = Engine;

    fn ordinal(&self) -> Option<usize> {
        Device::ordinal(self)
    }

    fn engine_sms(&self) -> u32 {
        match self.kind() {
            DeviceKind::Cpu => 0,
            DeviceKind::Cuda => GPU_BLOCKS,
        }
    }

    fn engine(&self) -> Result<Engine> {
        Engine::new(self)
    }

    fn can_store_into(&self, other: &Device) -> Result<bool> {
        Device::can_store_into(self, other)
    }
}
