//! Views: spans of device memory that keep their memory alive, each with its device.
//!
//! Place: beside `device`, which makes views of its buffers. On any thread; nothing here waits or allocates.

use super::Device;
use crate::base::{Error, Result};
use std::any::Any;
use std::fmt;
use std::sync::Arc;

/// Keeps memory alive: the memory lives as long as its owner.
pub(crate) type Owner = Arc<dyn Any + Send + Sync>;

/// Identifies a device for calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// A CPU device, by its executor's number in this process.
    Cpu(u64),
    /// A GPU, by its ordinal.
    Gpu(usize),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Cpu(number) => write!(f, "CPU device {number}"),
            Place::Gpu(ordinal) => write!(f, "GPU {ordinal}"),
        }
    }
}

impl Place {
    pub(crate) fn must_be(self, name: &'static str, wanted: Place) -> Result<()> {
        if self == wanted {
            return Ok(());
        }
        Err(Error::argument(name, format!("of {self}"), format!("give one of {wanted}")))
    }
}

/// A bare span of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Span {
    pub ptr: u64,
    pub bytes: usize,
}

impl Span {
    pub fn slice(self, offset: usize, bytes: usize) -> Result<Span> {
        match offset.checked_add(bytes) {
            Some(end) if end <= self.bytes => Ok(Span { ptr: self.ptr + offset as u64, bytes }),
            _ => Err(Error::argument(
                "offset",
                format!("{offset} with {bytes} bytes"),
                format!("stay within the buffer's {} bytes", self.bytes),
            )),
        }
    }
}

/// A span of memory that one device can read and write. A view of a buffer keeps the buffer's memory even after the
/// buffer is dropped; so does a graph whose capture was given the view. Clones are the same span.
///
/// There is no view of an address that is made up in safe code:
///
/// ```compile_fail,E0451
/// let view = tokenyard::View { span: todo!(), place: todo!(), owner: None };
/// ```
///
/// ```compile_fail,E0133
/// # let device = tokenyard::Device::cpu().unwrap();
/// let view = tokenyard::View::from_raw(&device, 4096, 16);
/// ```
#[derive(Clone)]
pub struct View {
    span: Span,
    place: Place,
    /// None where the caller vouches for the memory.
    owner: Option<Owner>,
}

impl View {
    /// A view of foreign memory, such as a tensor of an engine.
    ///
    /// # Safety
    /// `device` can read and write the `bytes` from `ptr` on, each byte of which has a value, until all work that was
    /// given this view or a part of it is done. That is the work of calls, also on other ranks where the call hands
    /// rows to peers in place, and of every replay of graphs whose capture was given it. Until then nothing else writes
    /// these bytes, or reads what that work writes, except before or after it in stream order.
    pub unsafe fn from_raw(device: &Device, ptr: u64, bytes: usize) -> View {
        View { span: Span { ptr, bytes }, place: device.place(), owner: None }
    }

    pub(crate) fn owned(place: Place, span: Span, owner: Owner) -> View {
        View { span, place, owner: Some(owner) }
    }

    /// Device-visible address.
    pub fn ptr(&self) -> u64 {
        self.span.ptr
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.span.bytes
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.span.bytes == 0
    }

    /// The `bytes` from `offset` on, if they lie inside.
    ///
    /// # Errors
    /// `Argument` if they do not.
    pub fn slice(&self, offset: usize, bytes: usize) -> Result<View> {
        Ok(View { span: self.span.slice(offset, bytes)?, ..self.clone() })
    }

    /// The owner of the memory; `None` where the caller vouches for it.
    pub(crate) fn owner(&self) -> Option<&Owner> {
        self.owner.as_ref()
    }

    pub(crate) fn span(&self) -> Span {
        self.span
    }

    /// Refuses a view of another device than that of `place`.
    pub(crate) fn of(&self, name: &'static str, place: Place) -> Result<()> {
        self.place.must_be(name, place)
    }
}

/// The same span of the same device.
impl PartialEq for View {
    fn eq(&self, other: &View) -> bool {
        (self.span, self.place) == (other.span, other.place)
    }
}

impl Eq for View {}

impl fmt::Debug for View {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "View({} bytes at {:#x} of {})", self.span.bytes, self.span.ptr, self.place)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_of_another_device_is_refused_by_name() {
        let places = [Place::Cpu(1), Place::Cpu(2), Place::Gpu(0), Place::Gpu(1)];
        for (given, wanted) in places.iter().flat_map(|given| places.iter().map(move |wanted| (*given, *wanted))) {
            let outcome = given.must_be("stream", wanted);
            if given == wanted {
                outcome.unwrap();
            } else {
                let error = outcome.unwrap_err().to_string();
                assert_eq!(error, format!("argument stream is of {given}: give one of {wanted}"));
            }
        }
        // Memory of another CPU device can be reached, and is freed without regard to this one's work.
        let (device, other) = (Device::cpu().unwrap(), Device::cpu().unwrap());
        device.expect_own("stream", &device.clone()).unwrap();
        device.expect_own("stream", &other).unwrap_err();
    }
}
