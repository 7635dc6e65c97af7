//! The contexts by which the provider names the operations under way on a NIC.
//!
//! Place in the data path: between `post` and the completion queue. On the endpoint's thread. Nothing here allocates
//! after the opening.
//!
//! The provider may store into a context until it has handed the operation's completion out, or its endpoint is closed.
//! So contexts have an allocation of their own, which no reference covers and which outlives the endpoint.

use super::libfabric_sys::fi_context2;
use super::object::all_closed;
use std::ffi::c_void;
use std::mem::size_of;

/// The operation that a context belongs to: its number among those of its kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Operation {
    Write(u32),
    Send(u32),
    Receive(u32),
    /// The read of a flush.
    Flush,
}

/// The contexts of a NIC: of writes, then of sends, then of receives, then of a flush.
#[derive(Debug)]
pub(super) struct Contexts {
    first: *mut fi_context2,
    writes: u32,
    sends: u32,
    receives: u32,
}

// SAFETY: an allocation of its own, into which the provider alone stores, on the thread that calls it.
unsafe impl Send for Contexts {}

impl Contexts {
    pub fn new(writes: u32, sends: u32, receives: u32) -> Contexts {
        let count = writes as usize + sends as usize + receives as usize + 1;
        // SAFETY: pointers may be null.
        let contexts: Box<[fi_context2]> = (0..count).map(|_| unsafe { std::mem::zeroed() }).collect();
        Contexts { first: Box::into_raw(contexts).cast(), writes, sends, receives }
    }

    fn count(&self) -> usize {
        self.writes as usize + self.sends as usize + self.receives as usize + 1
    }

    /// As posts take it.
    pub fn of(&self, operation: Operation) -> *mut c_void {
        let at = match operation {
            Operation::Write(number) => number as usize,
            Operation::Send(number) => self.writes as usize + number as usize,
            Operation::Receive(number) => self.writes as usize + self.sends as usize + number as usize,
            Operation::Flush => self.count() - 1,
        };
        debug_assert!(at < self.count());
        self.first.wrapping_add(at).cast()
    }

    /// The operation of a context that a completion names; `None` if it is not one of these.
    pub fn operation(&self, context: *mut c_void) -> Option<Operation> {
        let bytes = (context as usize).checked_sub(self.first as usize)?;
        let at = u32::try_from(bytes / size_of::<fi_context2>()).ok()?;
        if !bytes.is_multiple_of(size_of::<fi_context2>()) || at as usize >= self.count() {
            return None;
        }
        Some(match at {
            _ if at < self.writes => Operation::Write(at),
            _ if at < self.writes + self.sends => Operation::Send(at - self.writes),
            _ if at as usize + 1 < self.count() => Operation::Receive(at - self.writes - self.sends),
            _ => Operation::Flush,
        })
    }
}

impl Drop for Contexts {
    fn drop(&mut self) {
        if !all_closed() {
            return;
        }
        // SAFETY: made by `new` from a box of as many; the endpoint that stored into it is closed.
        drop(unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(self.first, self.count())) });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contexts_name_their_operations_and_nothing_else_does() {
        let contexts = Contexts::new(3, 2, 4);
        let all = (0..3).map(Operation::Write).chain((0..2).map(Operation::Send)).chain((0..4).map(Operation::Receive));
        let all = all.chain([Operation::Flush]);
        let found: Vec<*mut c_void> = all.clone().map(|operation| contexts.of(operation)).collect();
        assert!(all.zip(&found).all(|(operation, context)| contexts.operation(*context) == Some(operation)));
        let (first, last) = (found[0], found[9]);
        let strangers =
            [std::ptr::null_mut(), first.wrapping_byte_sub(64), first.wrapping_byte_add(8), last.wrapping_byte_add(64)];
        assert!(strangers.iter().all(|stranger| contexts.operation(*stranger).is_none()));
        assert!(found.windows(2).all(|two| two[1] as usize - two[0] as usize == size_of::<fi_context2>()));
    }
}
