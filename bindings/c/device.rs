//! Devices and their memory.
//!
//! Place: before contexts. On the caller's thread; copies wait for a minute at most, the rest for nothing.

use super::arguments::{Out, Versioned, list, list_mut, object, write, write_struct};
use super::status::{destroy, guarded, tokenyard_status_t};
use super::values::tokenyard_view_t;
use crate::kernels::{Device, DeviceBuffer, DeviceKind, HostBuffer};
use std::ffi::c_void;

/// A GPU or a CPU device.
pub struct tokenyard_device_t(pub(super) Device);

/// Device memory that the library has allocated.
pub struct tokenyard_buffer_t(pub(super) DeviceBuffer);

/// Host memory that the library has allocated, and that the device can read and write, too.
pub struct tokenyard_host_buffer_t(pub(super) HostBuffer);

/// What a device is; see `tokenyard_device_info`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct tokenyard_device_info_t {
    /// Bytes of this struct, which the caller sets.
    pub size: u32,
    /// 1 for a GPU, 0 for a CPU device.
    pub is_cuda: u32,
    /// The GPU's ordinal in this process; -1 for a CPU device.
    pub ordinal: i32,
    /// Streaming multiprocessors; of a CPU device the blocks that a launch has by default.
    pub multiprocessors: u32,
}

// SAFETY: a C struct of numbers that begins with its size.
unsafe impl Versioned for tokenyard_device_info_t {
    const FIRST: usize = 16;
}

/// A CPU device of its own, which runs the kernels on threads of this process.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tokenyard_device_cpu(device: *mut *mut tokenyard_device_t) -> tokenyard_status_t {
    guarded(|| {
        // SAFETY: the caller's pointer.
        let out = unsafe { Out::new("device", device)? };
        out.give(tokenyard_device_t(Device::cpu()?));
        Ok(())
    })
}

/// GPU `ordinal`, in its primary context, with all kernels loaded.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tokenyard_device_cuda(
    ordinal: usize,
    device: *mut *mut tokenyard_device_t,
) -> tokenyard_status_t {
    guarded(|| {
        // SAFETY: the caller's pointer.
        let out = unsafe { Out::new("device", device)? };
        out.give(tokenyard_device_t(Device::cuda(ordinal)?));
        Ok(())
    })
}

/// How many GPUs are visible to this process; 0 without a driver, or in a library without its GPU part.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tokenyard_device_cuda_count(count: *mut usize) -> tokenyard_status_t {
    // SAFETY: the caller's pointer.
    guarded(|| unsafe { write("count", count, Device::cuda_count()) })
}

/// What the device is.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tokenyard_device_info(
    device: Option<&tokenyard_device_t>,
    info: *mut tokenyard_device_info_t,
) -> tokenyard_status_t {
    guarded(|| {
        let device = &object("device", device)?.0;
        let value = tokenyard_device_info_t {
            size: 0,
            is_cuda: u32::from(device.kind() == DeviceKind::Cuda),
            ordinal: device.ordinal().and_then(|ordinal| i32::try_from(ordinal).ok()).unwrap_or(-1),
            multiprocessors: device.multiprocessors(),
        };
        // SAFETY: the caller's pointer.
        unsafe { write_struct("info", info, value) }
    })
}

/// Whether the device still works: a stopped executor or a lost context is an error.
#[unsafe(no_mangle)]
pub extern "C" fn tokenyard_device_check(device: Option<&tokenyard_device_t>) -> tokenyard_status_t {
    guarded(|| object("device", device)?.0.check())
}

/// Destroys the object. The device closes once all that uses it is gone. NULL is allowed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tokenyard_device_destroy(device: *mut tokenyard_device_t) {
    // SAFETY: the caller's pointer, of one of the functions above.
    unsafe { destroy(device) }
}

/// Device memory of `bytes` bytes, 256-byte aligned, whose contents are unspecified.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tokenyard_buffer_create(
    device: Option<&tokenyard_device_t>,
    bytes: usize,
    buffer: *mut *mut tokenyard_buffer_t,
) -> tokenyard_status_t {
    guarded(|| {
        // SAFETY: the caller's pointer.
        let out = unsafe { Out::new("buffer", buffer)? };
        out.give(tokenyard_buffer_t(object("device", device)?.0.alloc(bytes)?));
        Ok(())
    })
}

/// A view of `bytes` bytes from `offset` on. It does not keep the memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tokenyard_buffer_view(
    buffer: Option<&tokenyard_buffer_t>,
    offset: usize,
    bytes: usize,
    view: *mut tokenyard_view_t,
) -> tokenyard_status_t {
    guarded(|| {
        let part = object("buffer", buffer)?.0.slice(offset, bytes)?;
        // SAFETY: the caller's pointer.
        unsafe { write("view", view, tokenyard_view_t::of(&part)) }
    })
}

/// Copies `bytes` bytes of the host to the buffer's byte `offset` and waits, in no order with any stream.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tokenyard_buffer_write(
    buffer: Option<&tokenyard_buffer_t>,
    offset: usize,
    data: *const c_void,
    bytes: usize,
) -> tokenyard_status_t {
    guarded(|| {
        let buffer = object("buffer", buffer)?;
        // SAFETY: the caller's pointer.
        buffer.0.write(offset, unsafe { list("data", data.cast::<u8>(), bytes)? })
    })
}

/// Copies `bytes` bytes of the buffer from byte `offset` on to the host and waits, in no order with any stream.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tokenyard_buffer_read(
    buffer: Option<&tokenyard_buffer_t>,
    offset: usize,
    data: *mut c_void,
    bytes: usize,
) -> tokenyard_status_t {
    guarded(|| {
        let buffer = object("buffer", buffer)?;
        // Before `list_mut` clears the caller's memory: a length that is refused may be beyond it.
        buffer.0.slice(offset, bytes)?;
        // SAFETY: the caller's pointer.
        buffer.0.read(offset, unsafe { list_mut("data", data.cast::<u8>(), bytes)? })
    })
}

/// Sets every byte and waits, in no order with any stream.
#[unsafe(no_mangle)]
pub extern "C" fn tokenyard_buffer_fill(buffer: Option<&tokenyard_buffer_t>, byte: u8) -> tokenyard_status_t {
    guarded(|| object("buffer", buffer)?.0.fill(byte))
}

/// Frees the memory, once the device's work that may use it is done. Graphs whose capture was given views of it must be
/// gone. NULL is allowed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tokenyard_buffer_destroy(buffer: *mut tokenyard_buffer_t) {
    // SAFETY: the caller's pointer, of one of the functions above.
    unsafe { destroy(buffer) }
}

/// Host memory of `bytes` bytes, zeroed, that the device can read and write, too.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tokenyard_host_buffer_create(
    device: Option<&tokenyard_device_t>,
    bytes: usize,
    buffer: *mut *mut tokenyard_host_buffer_t,
) -> tokenyard_status_t {
    guarded(|| {
        // SAFETY: the caller's pointer.
        let out = unsafe { Out::new("buffer", buffer)? };
        out.give(tokenyard_host_buffer_t(object("device", device)?.0.alloc_host(bytes)?));
        Ok(())
    })
}

/// The whole of it as a view for calls. It does not keep the memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tokenyard_host_buffer_view(
    buffer: Option<&tokenyard_host_buffer_t>,
    view: *mut tokenyard_view_t,
) -> tokenyard_status_t {
    guarded(|| {
        let whole = object("buffer", buffer)?.0.view();
        // SAFETY: the caller's pointer.
        unsafe { write("view", view, tokenyard_view_t::of(&whole)) }
    })
}

/// Its first byte, in the host's addresses.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tokenyard_host_buffer_pointer(
    buffer: Option<&tokenyard_host_buffer_t>,
    pointer: *mut *mut c_void,
) -> tokenyard_status_t {
    guarded(|| {
        let begin = object("buffer", buffer)?.0.host_ptr();
        // SAFETY: the caller's pointer.
        unsafe { write("pointer", pointer, begin.cast()) }
    })
}

/// `count` int32 numbers from number `first` on, as `host_counts` are. Never waits: what a call wrote is there once its
/// stream has passed it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tokenyard_host_buffer_read_i32(
    buffer: Option<&tokenyard_host_buffer_t>,
    first: usize,
    numbers: *mut i32,
    count: usize,
) -> tokenyard_status_t {
    guarded(|| {
        let buffer = object("buffer", buffer)?;
        // As in `tokenyard_buffer_read`.
        buffer.0.words_i32(first, count)?;
        // SAFETY: the caller's pointer.
        buffer.0.read_i32(first, unsafe { list_mut("numbers", numbers, count)? })
    })
}

/// As `tokenyard_buffer_destroy`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tokenyard_host_buffer_destroy(buffer: *mut tokenyard_host_buffer_t) {
    // SAFETY: the caller's pointer, of one of the functions above.
    unsafe { destroy(buffer) }
}
