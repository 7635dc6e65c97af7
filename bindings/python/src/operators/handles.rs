//! Handles of operators: tensors that stand for them, int64 `[1]`, of which torch tells when nothing uses them; and
//! numbers, for calls whose handles are Python's.
//!
//! On a GPU a handle is known by its address, of memory that is there for them; on the CPU device by the number
//! that is there, below those that bindings/python/tokenyard/ops.py gives.

use super::shim::{Shim, Tensor};
use crate::arrays::{Array, Element, Place};
use crate::context::{Core, Handle, Parts};
use pyo3::prelude::*;
use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::ffi::c_void;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokenyard::{Device, DeviceBuffer};

/// Handles on a GPU that live at once; further ones are made in Python.
const SLOTS: usize = 4096;
const SLOT_BYTES: usize = 8;

/// What a tensor stands for.
pub(super) struct Kept {
    pub core: Arc<Core>,
    pub parts: Arc<Parts>,
    context: i64,
    layout: &'static str,
}

static HANDLES: Mutex<Option<HashMap<i64, Arc<Kept>>>> = Mutex::new(None);

fn handles() -> MutexGuard<'static, Option<HashMap<i64, Arc<Kept>>>> {
    HANDLES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Memory for the handles of a GPU. It stays as long as the process: to free memory of a GPU waits for its kernels,
/// among them those that wait for this rank's next call where ranks share a GPU.
pub(crate) struct Slots {
    memory: DeviceBuffer,
    free: Mutex<Vec<usize>>,
}

impl Slots {
    /// Those of a GPU; none on the CPU device.
    pub fn on(device: &Device) -> tokenyard::Result<Option<&'static Slots>> {
        static OF_GPUS: Mutex<Vec<(usize, &'static Slots)>> = Mutex::new(Vec::new());
        let Some(ordinal) = device.ordinal() else { return Ok(None) };
        let mut of_gpus = OF_GPUS.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, slots)) = of_gpus.iter().find(|(gpu, _)| *gpu == ordinal) {
            return Ok(Some(slots));
        }
        let slots = Slots { memory: device.alloc(SLOTS * SLOT_BYTES)?, free: Mutex::new((0..SLOTS).rev().collect()) };
        let slots: &'static Slots = Box::leak(Box::new(slots));
        of_gpus.push((ordinal, slots));
        Ok(Some(slots))
    }
}

/// Where a tensor's handle is to be found, and its memory: a number at its address, or a slot of a GPU's.
struct Owner {
    key: i64,
    _number: Option<Box<i64>>,
    slot: Option<(usize, &'static Slots)>,
}

impl Drop for Owner {
    fn drop(&mut self) {
        let kept = handles().as_mut().and_then(|handles| handles.remove(&self.key));
        drop(kept);
        if let Some((slot, slots)) = &self.slot {
            slots.free.lock().unwrap_or_else(PoisonError::into_inner).push(*slot);
        }
    }
}

unsafe extern "C" fn gone(_address: *mut c_void, owner: *mut c_void) {
    // SAFETY: it came of `slot`, and torch gives it back once.
    drop(unsafe { Box::from_raw(owner.cast::<Owner>()) });
}

/// A tensor that is to stand for a handle.
pub(super) struct Slot {
    tensor: Tensor,
    key: i64,
}

/// None where there is no memory left for one.
pub(super) fn slot(shim: &'static Shim, core: &Core) -> Option<Slot> {
    // Below every number of Python's.
    static NUMBERS: AtomicI64 = AtomicI64::new(-1 << 40);
    let (owner, address, place) = match (core.slots, core.ordinal()) {
        (Some(slots), Some(ordinal)) => {
            let slot = slots.free.lock().unwrap_or_else(PoisonError::into_inner).pop()?;
            let address = slots.memory.view().ptr() + (slot * SLOT_BYTES) as u64;
            let slot = Some((slot, slots));
            (Owner { key: address as i64, _number: None, slot }, address, Place::Cuda(ordinal))
        }
        _ => {
            let key = NUMBERS.fetch_sub(1, Ordering::Relaxed);
            let number = Box::new(key);
            let address = std::ptr::from_ref(&*number) as u64;
            (Owner { key, _number: Some(number), slot: None }, address, Place::Cpu)
        }
    };
    let key = owner.key;
    let owner = Box::into_raw(Box::new(owner));
    // SAFETY: the owner keeps the memory until `gone`.
    let tensor = unsafe { shim.lent(address, place, gone, owner.cast()) };
    if tensor.is_none() {
        // SAFETY: torch has not taken it.
        drop(unsafe { Box::from_raw(owner) });
    }
    Some(Slot { tensor: tensor?, key })
}

impl Slot {
    /// The tensor, which stands for this handle from now on.
    pub fn filled(self, core: Arc<Core>, context: i64, layout: &'static str, parts: Parts) -> Tensor {
        let kept = Arc::new(Kept { core, parts: Arc::new(parts), context, layout });
        handles().get_or_insert_with(HashMap::new).insert(self.key, kept);
        self.tensor
    }
}

/// What a tensor stands for.
pub(super) fn found(array: &Array) -> Option<Arc<Kept>> {
    if array.element != Element::I64 || array.shape() != [1] {
        return None;
    }
    // Of a tensor whose storage was freed it is 0.
    let address = Some(array.address()).filter(|address| *address != 0)?;
    let key = match array.place() {
        // SAFETY: the tensor has one number of this type, which nobody writes.
        Place::Cpu => unsafe { (address as *const i64).read() },
        Place::Cuda(_) => address as i64,
    };
    handles().as_ref()?.get(&key).cloned()
}

/// The number of a handle, which is found by it as long as this lives.
pub(crate) struct Number(pub i64);

static NUMBERED: Mutex<Option<HashMap<i64, Arc<Kept>>>> = Mutex::new(None);

fn by_number() -> MutexGuard<'static, Option<HashMap<i64, Arc<Kept>>>> {
    NUMBERED.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Drop for Number {
    fn drop(&mut self) {
        let kept = by_number().as_mut().and_then(|numbered| numbered.remove(&self.0));
        drop(kept);
    }
}

/// What this thread's last calls made and Python has not taken, by number: one, unless a signal's handler called, too,
/// or an exception came in between.
pub(super) struct Untaken<T>(VecDeque<(i64, T)>);
const MOST_UNTAKEN: usize = 16;

impl<T> Untaken<T> {
    pub const fn new() -> Untaken<T> {
        Untaken(VecDeque::new())
    }

    /// Returns the oldest, if there are too many.
    pub fn put(&mut self, number: i64, made: T) -> Option<T> {
        self.0.push_back((number, made));
        if self.0.len() > MOST_UNTAKEN { self.0.pop_front().map(|(_, made)| made) } else { None }
    }

    pub fn take_newest(&mut self) -> Option<T> {
        self.0.pop_back().map(|(_, made)| made)
    }

    pub fn get(&self, number: i64) -> Option<&T> {
        self.0.iter().rev().find(|(untaken, _)| *untaken == number).map(|(_, made)| made)
    }

    pub fn take(&mut self, number: i64) -> Option<T> {
        let place = self.0.iter().rposition(|(untaken, _)| *untaken == number)?;
        self.0.remove(place).map(|(_, made)| made)
    }
}

thread_local! {
    static UNTAKEN: RefCell<Untaken<Handle>> = const { RefCell::new(Untaken::new()) };
}

/// From 1.
pub(super) fn next_number() -> i64 {
    static NUMBERS: AtomicI64 = AtomicI64::new(1);
    NUMBERS.fetch_add(1, Ordering::Relaxed)
}

/// A handle that operators find by its number.
pub(super) fn numbered(core: Arc<Core>, context: i64, layout: &'static str, parts: Parts) -> Handle {
    let (parts, number) = (Arc::new(parts), next_number());
    let kept = Arc::new(Kept { core, parts: parts.clone(), context, layout });
    by_number().get_or_insert_with(HashMap::new).insert(number, kept);
    Handle::numbered(parts, Number(number))
}

/// A number for a call's handle, until `taken_handle` takes it on this thread.
pub(super) fn number(handle: Handle) -> i64 {
    let number = handle.number().unwrap_or(0);
    let oldest = UNTAKEN.with_borrow_mut(|untaken| untaken.put(number, handle));
    drop(oldest);
    number
}

/// What a number stands for.
pub(super) fn of_number(number: i64) -> Option<Arc<Kept>> {
    by_number().as_ref()?.get(&number).cloned()
}

/// The handle of a number that a call of this thread returned; once, and None after as many calls as are kept whose
/// handles nobody took.
#[pyfunction]
pub(crate) fn taken_handle(number: i64) -> Option<Handle> {
    UNTAKEN.with_borrow_mut(|untaken| untaken.take(number))
}

/// The context's number, handle and layout of a tensor that stands for one, by its number or address.
#[pyfunction]
pub(crate) fn operator_handle(key: i64) -> Option<(i64, Handle, &'static str)> {
    let kept = handles().as_ref()?.get(&key).cloned()?;
    Some((kept.context, Handle::new(kept.parts.clone()), kept.layout))
}

/// How many handles of operators live.
#[pyfunction]
pub(crate) fn operator_handles() -> usize {
    handles().as_ref().map_or(0, HashMap::len) + by_number().as_ref().map_or(0, HashMap::len)
}
