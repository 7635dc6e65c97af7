//! Combine, fused and in halves, and barriers.
//!
//! Place in the data path: behind the experts. On the caller's thread; never waits.

use super::arguments::{object, read};
use super::calls::{tokenyard_combined_t, tokenyard_rows_t};
use super::context::tokenyard_context_t;
use super::flight::{tokenyard_combine_sent_t, tokenyard_handle_t};
use super::status::{guarded, tokenyard_status_t};
use super::stream::tokenyard_stream_t;

/// Brings the experts' rows back to the tokens' source ranks and sums them there, in one kernel. All ranks combine the
/// same dispatches in the same order. Enqueues and returns. The handle stays as it is.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tokenyard_combine(
    context: Option<&tokenyard_context_t>,
    stream: Option<&tokenyard_stream_t>,
    handle: Option<&tokenyard_handle_t>,
    rows: *const tokenyard_rows_t,
    combined: *const tokenyard_combined_t,
) -> tokenyard_status_t {
    guarded(|| {
        let (context, stream) = (object("context", context)?, object("stream", stream)?);
        let handle = object("handle", handle)?;
        // SAFETY: the caller's pointer.
        let rows = unsafe { read("rows", rows)? }.given(context.all.device())?;
        // SAFETY: the caller's pointer.
        let combined = unsafe { read("combined", combined)? }.given(context.all.device())?;
        handle.0.with("handle", |handle| context.all.combine(&stream.0, handle, &rows, &combined))
    })
}

/// The sending half of `tokenyard_combine`, which fills `sent`. The rows may be reused once the stream has passed this
/// call, or in a context of several rounds once it has passed the receiving half.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tokenyard_combine_send(
    context: Option<&tokenyard_context_t>,
    stream: Option<&tokenyard_stream_t>,
    handle: Option<&tokenyard_handle_t>,
    rows: *const tokenyard_rows_t,
    sent: Option<&tokenyard_combine_sent_t>,
) -> tokenyard_status_t {
    guarded(|| {
        let (context, stream) = (object("context", context)?, object("stream", stream)?);
        let (handle, sent) = (object("handle", handle)?, object("sent", sent)?);
        // SAFETY: the caller's pointer.
        let rows = unsafe { read("rows", rows)? }.given(context.all.device())?;
        let send = || handle.0.with("handle", |handle| context.all.combine_send(&stream.0, handle, &rows));
        sent.0.send("sent", send)
    })
}

/// The receiving half of `tokenyard_combine`, which empties `sent`. After an error `sent` is as it was.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tokenyard_combine_recv(
    context: Option<&tokenyard_context_t>,
    stream: Option<&tokenyard_stream_t>,
    sent: Option<&tokenyard_combine_sent_t>,
    combined: *const tokenyard_combined_t,
) -> tokenyard_status_t {
    guarded(|| {
        let (context, stream) = (object("context", context)?, object("stream", stream)?);
        let sent = object("sent", sent)?;
        // SAFETY: the caller's pointer.
        let combined = unsafe { read("combined", combined)? }.given(context.all.device())?;
        sent.0.receive("sent", |sent| context.all.combine_recv(&stream.0, sent, &combined))
    })
}

/// A barrier of all ranks on their streams: later work of a stream runs only after every rank's stream came here.
#[unsafe(no_mangle)]
pub extern "C" fn tokenyard_barrier(
    context: Option<&tokenyard_context_t>,
    stream: Option<&tokenyard_stream_t>,
) -> tokenyard_status_t {
    guarded(|| object("context", context)?.all.barrier(&object("stream", stream)?.0))
}
