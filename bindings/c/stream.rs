//! Streams, events and graphs.
//!
//! Place: what calls are enqueued on. On the caller's thread; `tokenyard_stream_synchronize` alone waits.

use super::arguments::{Out, object, write};
use super::device::tokenyard_device_t;
use super::status::{destroy, guarded, tokenyard_status_t};
use super::values::tokenyard_view_t;
use crate::base::Result;
use crate::kernels::{Event, Graph, Stream};
use std::ffi::c_void;
use std::time::Duration;

/// A queue of a device.
pub struct tokenyard_stream_t(pub(super) Stream);

/// A time stamp that a stream passes.
pub struct tokenyard_event_t(Event);

/// Recorded work.
pub struct tokenyard_graph_t(Graph);

/// A new stream, which waits for no other.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tokenyard_stream_create(
    device: Option<&tokenyard_device_t>,
    stream: *mut *mut tokenyard_stream_t,
) -> tokenyard_status_t {
    guarded(|| {
        // SAFETY: the caller's pointer.
        let out = unsafe { Out::new("stream", stream)? };
        out.give(tokenyard_stream_t(object("device", device)?.0.new_stream()?));
        Ok(())
    })
}

/// The engine's `cudaStream_t`, borrowed: it is not destroyed here, and must outlive this object, contexts that were
/// used on it, and graphs that were launched on it. NULL is the legacy default stream. Where another library captures
/// the stream, whoever captures keeps every buffer, handle and context that was used until the last replay is over, and
/// orders replays against other calls of their contexts: dispatches must not overlap each other, nor combines, nor a
/// dispatch the combines of its handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tokenyard_stream_from_raw(
    device: Option<&tokenyard_device_t>,
    cu_stream: *mut c_void,
    stream: *mut *mut tokenyard_stream_t,
) -> tokenyard_status_t {
    guarded(|| {
        // SAFETY: the caller's pointer.
        let out = unsafe { Out::new("stream", stream)? };
        // SAFETY: the caller vouches for the stream, as stated above.
        let borrowed = unsafe { object("device", device)?.0.stream_from_raw(cu_stream as u64)? };
        out.give(tokenyard_stream_t(borrowed));
        Ok(())
    })
}

/// Waits until all work enqueued so far is done, at most for `timeout_ms`; then `TOKENYARD_DEVICE`, and the work goes
/// on. Errors of calls come from `tokenyard_context_check`.
#[unsafe(no_mangle)]
pub extern "C" fn tokenyard_stream_synchronize(
    stream: Option<&tokenyard_stream_t>,
    timeout_ms: u64,
) -> tokenyard_status_t {
    // A copy, as in `waiting`.
    guarded(|| object("stream", stream)?.0.clone().synchronize(Duration::from_millis(timeout_ms)))
}

/// Sets every byte of `view`, in stream order.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tokenyard_stream_fill(
    stream: Option<&tokenyard_stream_t>,
    view: tokenyard_view_t,
    byte: u8,
) -> tokenyard_status_t {
    guarded(|| {
        let stream = &object("stream", stream)?.0;
        stream.fill(&view.needed("view", stream.device())?, byte)
    })
}

/// Copies `src` to `dst`, of equal length, in stream order.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tokenyard_stream_copy(
    stream: Option<&tokenyard_stream_t>,
    dst: tokenyard_view_t,
    src: tokenyard_view_t,
) -> tokenyard_status_t {
    guarded(|| {
        let stream = &object("stream", stream)?.0;
        stream.copy(&dst.needed("dst", stream.device())?, &src.needed("src", stream.device())?)
    })
}

/// The `cudaStream_t`, or a number that identifies a stream of a CPU device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tokenyard_stream_raw(
    stream: Option<&tokenyard_stream_t>,
    raw: *mut *mut c_void,
) -> tokenyard_status_t {
    guarded(|| {
        let number = object("stream", stream)?.0.raw();
        // SAFETY: the caller's pointer.
        unsafe { write("raw", raw, number as *mut c_void) }
    })
}

/// `*capturing` is 1 if work is being recorded, be it for this library or for an engine, and else 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tokenyard_stream_is_capturing(
    stream: Option<&tokenyard_stream_t>,
    capturing: *mut u32,
) -> tokenyard_status_t {
    guarded(|| {
        let is = object("stream", stream)?.0.is_capturing()?;
        // SAFETY: the caller's pointer.
        unsafe { write("capturing", capturing, u32::from(is)) }
    })
}

/// From here on work is recorded, not run, until `tokenyard_stream_end_capture`.
#[unsafe(no_mangle)]
pub extern "C" fn tokenyard_stream_begin_capture(stream: Option<&tokenyard_stream_t>) -> tokenyard_status_t {
    guarded(|| object("stream", stream)?.0.begin_capture())
}

/// What was recorded, ready to be launched any number of times. The graph keeps handles and contexts; the caller keeps
/// the memory of views.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tokenyard_stream_end_capture(
    stream: Option<&tokenyard_stream_t>,
    graph: *mut *mut tokenyard_graph_t,
) -> tokenyard_status_t {
    guarded(|| {
        // SAFETY: the caller's pointer.
        let out = unsafe { Out::new("graph", graph)? };
        out.give(tokenyard_graph_t(object("stream", stream)?.0.end_capture()?));
        Ok(())
    })
}

/// Destroys the object; enqueued work goes on. NULL is allowed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tokenyard_stream_destroy(stream: *mut tokenyard_stream_t) {
    // SAFETY: the caller's pointer, of one of the functions above.
    unsafe { destroy(stream) }
}

/// Enqueues the recorded work once more, on a stream that does not capture.
#[unsafe(no_mangle)]
pub extern "C" fn tokenyard_graph_launch(
    graph: Option<&tokenyard_graph_t>,
    stream: Option<&tokenyard_stream_t>,
) -> tokenyard_status_t {
    guarded(|| object("graph", graph)?.0.launch(&object("stream", stream)?.0))
}

/// Destroys the graph, after its replays: that waits at most for the longest deadline of its contexts and 5 s, or for
/// 30 s if that is longer. NULL is allowed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tokenyard_graph_destroy(graph: *mut tokenyard_graph_t) {
    // SAFETY: the caller's pointer, of `tokenyard_stream_end_capture`.
    unsafe { destroy(graph) }
}

/// A time stamp in stream order. In a capture each replay stamps it anew.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tokenyard_stream_record(
    stream: Option<&tokenyard_stream_t>,
    event: *mut *mut tokenyard_event_t,
) -> tokenyard_status_t {
    guarded(|| {
        // SAFETY: the caller's pointer.
        let out = unsafe { Out::new("event", event)? };
        out.give(tokenyard_event_t(object("stream", stream)?.0.record()?));
        Ok(())
    })
}

/// Microseconds from `since` to `event`, both of which their streams have passed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tokenyard_event_elapsed_us(
    event: Option<&tokenyard_event_t>,
    since: Option<&tokenyard_event_t>,
    microseconds: *mut f64,
) -> tokenyard_status_t {
    let elapsed = || -> Result<f64> { object("event", event)?.0.elapsed_us(&object("since", since)?.0) };
    // SAFETY: the caller's pointer.
    guarded(|| unsafe { write("microseconds", microseconds, elapsed()?) })
}

/// Destroys the object. NULL is allowed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tokenyard_event_destroy(event: *mut tokenyard_event_t) {
    // SAFETY: the caller's pointer, of `tokenyard_stream_record`.
    unsafe { destroy(event) }
}
