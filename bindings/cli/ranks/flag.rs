//! How long a kernel takes that does nothing but raise a flag in host memory: the least time after which a host can
//! learn anything from a device.
//!
//! Beside the data path, on the rank's thread, after the timed calls.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use tokenyard::internals::kernels::bench;
use tokenyard::{Error, Result};

use super::calls::Caller;
use super::hold::word;

/// Untimed flags before those that are timed.
const WARMUP: u64 = 5;

/// Times of `repeats` flags from before a launch to the look that sees the flag, in µs.
///
/// # Errors
/// Any error of the device, or a flag that is not seen after `patience`.
pub fn times(caller: &Caller, repeats: usize, patience: Duration) -> Result<Vec<f64>> {
    let stream = &caller.stream;
    // A meeting of one rank: its word is the flag.
    let words = stream.device().alloc_host(2 * size_of::<u64>())?;
    let mut times = Vec::new();
    for number in 1..=WARMUP + repeats as u64 {
        stream.synchronize(patience)?;
        let began = Instant::now();
        bench::meet(stream, &words.view(), (0, 1), number, patience)?;
        while word(&words, 0).is_none_or(|flag| flag.load(Ordering::Acquire) < number) {
            if began.elapsed() > patience {
                return Err(Error::device(
                    format!("flag {number} was not seen after {patience:?}"),
                    "is the GPU well?",
                ));
            }
            std::hint::spin_loop();
        }
        if number > WARMUP {
            times.push(began.elapsed().as_secs_f64() * 1e6);
        }
    }
    stream.synchronize(patience)?;
    Ok(times)
}
