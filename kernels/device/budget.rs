//! The multiprocessors of each GPU that are promised to contexts and emulated NICs of this process.
//!
//! Blocks of a kernel wait for blocks on other ranks. So where calls of several contexts overlap, all of their blocks
//! must be resident at once: a block that waits for a multiprocessor may wait for the very kernel that waits for it.
//! Beside the data path: used while a context, or an emulated NIC, is built, and when it is dropped, on the caller's
//! thread. The lock is held for a few additions.

use super::Device;
use crate::base::{Error, Result};
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The budgets of this process. Other processes' contexts on the same GPU are not counted.
static BUDGETS: Budgets = Budgets::new();

/// Multiprocessors promised, by GPU.
struct Budgets(Mutex<BTreeMap<usize, u64>>);

/// Multiprocessors of a GPU that one context, or NIC, was promised; given back when dropped.
pub(crate) struct Budget<'a> {
    budgets: &'a Budgets,
    gpu: usize,
    sms: u64,
}

impl Budget<'static> {
    /// Takes what a context was given explicitly, or what a NIC takes; `name` says which of the two. None for a context
    /// without a budget, whose calls are meant to follow the others', and on the CPU device, whose blocks are fibers
    /// and always fit.
    ///
    /// # Errors
    /// `Config` if the GPU has fewer left.
    pub fn take(device: &Device, name: &'static str, sms: Option<u32>) -> Result<Option<Budget<'static>>> {
        let (Some(gpu), Some(sms)) = (device.ordinal(), sms) else { return Ok(None) };
        BUDGETS.take(gpu, device.multiprocessors(), name, sms).map(Some)
    }
}

impl Budgets {
    const fn new() -> Budgets {
        Budgets(Mutex::new(BTreeMap::new()))
    }

    fn promised(&self) -> MutexGuard<'_, BTreeMap<usize, u64>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes `sms` of the `all` multiprocessors of a GPU.
    fn take(&self, gpu: usize, all: u32, name: &'static str, sms: u32) -> Result<Budget<'_>> {
        let mut promised = self.promised();
        let others = promised.get(&gpu).copied().unwrap_or(0);
        let sum = others + u64::from(sms);
        if sum > u64::from(all) {
            return Err(Error::config(name, sms, advice(gpu, all, others, sum)));
        }
        promised.insert(gpu, sum);
        Ok(Budget { budgets: self, gpu, sms: u64::from(sms) })
    }
}

fn advice(gpu: usize, all: u32, others: u64, sum: u64) -> String {
    if others == 0 {
        return format!("GPU {gpu} has {all} multiprocessors; give at most that");
    }
    format!(
        "with {others} of other contexts and emulated NICs in this process it makes {sum}, and GPU {gpu} has {all} \
         multiprocessors; give contexts less, drop one first, or have fewer ranks a GPU"
    )
}

impl Drop for Budget<'_> {
    fn drop(&mut self) {
        if let Some(sum) = self.budgets.promised().get_mut(&self.gpu) {
            *sum = sum.saturating_sub(self.sms);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(budgets: &Budgets, gpu: usize, sms: u32) -> String {
        let error = budgets.take(gpu, 132, "sms", sms).map(drop).unwrap_err();
        assert!(matches!(error, Error::Config { name: "sms", .. }), "{error:?}");
        error.to_string()
    }

    #[test]
    fn budgets_that_fit_are_promised_and_the_one_beyond_is_named() {
        let budgets = Budgets::new();
        let _first = budgets.take(0, 132, "sms", 100).unwrap();
        let _second = budgets.take(0, 132, "sms", 32).unwrap();
        let sentence = refused(&budgets, 0, 1);
        for word in
            ["sms is 1", "with 132 of other contexts and emulated NICs", "makes 133", "GPU 0 has 132", "drop one first"]
        {
            assert!(sentence.contains(word), "«{sentence}» lacks «{word}»");
        }
    }

    #[test]
    fn one_context_alone_can_exceed_its_gpu() {
        let budgets = Budgets::new();
        assert!(refused(&budgets, 3, 133).contains("GPU 3 has 132 multiprocessors; give at most that"));
        assert!(refused(&budgets, 3, u32::MAX).contains("sms is 4294967295"));
        assert!(budgets.take(3, 132, "sms", 132).is_ok(), "what was refused was not taken");
    }

    #[test]
    fn gpus_do_not_share_budgets() {
        let budgets = Budgets::new();
        let _held = budgets.take(0, 132, "sms", 132).unwrap();
        assert!(budgets.take(1, 132, "sms", 132).is_ok());
    }

    #[test]
    fn dropped_budgets_return() {
        let budgets = Budgets::new();
        let first = budgets.take(0, 132, "sms", 100).unwrap();
        assert!(refused(&budgets, 0, 33).contains("makes 133"));
        drop(first);
        let (a, b) = (budgets.take(0, 132, "sms", 66).unwrap(), budgets.take(0, 132, "sms", 66).unwrap());
        drop(a);
        assert!(refused(&budgets, 0, 67).contains("with 66 of"));
        drop(b);
        assert!(budgets.take(0, 132, "sms", 132).is_ok());
    }

    #[test]
    fn threads_that_ask_at_once_never_get_more_than_there_is() {
        let budgets = Budgets::new();
        let all_asked = std::sync::Barrier::new(8);
        let ask = || {
            let budget = budgets.take(0, 132, "sms", 33).ok();
            all_asked.wait();
            budget.is_some()
        };
        let granted = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(ask)).collect();
            threads.into_iter().filter_map(|thread| thread.join().ok()).filter(|&granted| granted).count()
        });
        assert_eq!(granted, 4);
        assert!(budgets.take(0, 132, "sms", 132).is_ok());
    }

    #[test]
    fn the_cpu_device_and_contexts_without_a_budget_are_not_counted() {
        let device = Device::cpu().unwrap();
        assert!(Budget::take(&device, "sms", Some(1000)).is_ok_and(|budget| budget.is_none()));
        assert!(Budget::take(&device, "sms", None).is_ok_and(|budget| budget.is_none()));
    }
}
