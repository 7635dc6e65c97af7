//! Dispatch, fused and in halves, and counts that come first.
//!
//! Place in the data path: at its head. On the caller's thread; `tokenyard_dispatch_counts` alone waits.

use super::arguments::{Out, give_list, object, read, write};
use super::calls::{tokenyard_output_t, tokenyard_tokens_t};
use super::context::tokenyard_context_t;
use super::flight::{tokenyard_handle_t, tokenyard_sent_t};
use super::status::{destroy, guarded, tokenyard_status_t};
use super::stream::tokenyard_stream_t;
use super::values::tokenyard_layout_t;
use crate::base::Result;
use crate::bindings::api::{AllToAll, Counts, Sent, Tokens};
use crate::kernels::Stream;
use std::time::Duration;

/// How many rows a dispatch brings to this rank.
pub struct tokenyard_counts_t(Counts);

/// Sends this rank's tokens to the ranks of their experts and receives the tokens for its own experts, in one kernel.
/// Enqueues and returns. `handle` then is the dispatch's; what it was before is let go.
///
/// Every call first returns what `tokenyard_context_check` returns: an error of an earlier call. Then this call was not
/// enqueued. Unless the error is fatal, make it again, since the other ranks have made theirs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tokenyard_dispatch(
    context: Option<&tokenyard_context_t>,
    stream: Option<&tokenyard_stream_t>,
    tokens: *const tokenyard_tokens_t,
    output: *const tokenyard_output_t,
    handle: Option<&tokenyard_handle_t>,
) -> tokenyard_status_t {
    guarded(|| {
        let (context, stream) = (object("context", context)?, object("stream", stream)?);
        let handle = object("handle", handle)?;
        // SAFETY: the caller's pointer.
        let tokens = unsafe { read("tokens", tokens)? }.given(context)?;
        // SAFETY: the caller's pointer.
        let output = unsafe { read("output", output)? }.given(context.all.device())?;
        handle.0.set(context.all.dispatch(&stream.0, &tokens, &output)?);
        Ok(())
    })
}

/// The sending half of `tokenyard_dispatch`, which fills `sent`. The input may be reused once the stream has passed
/// this call, or in a context of several rounds once it has passed the receiving half.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tokenyard_dispatch_send(
    context: Option<&tokenyard_context_t>,
    stream: Option<&tokenyard_stream_t>,
    tokens: *const tokenyard_tokens_t,
    sent: Option<&tokenyard_sent_t>,
) -> tokenyard_status_t {
    // SAFETY: the caller's pointer.
    guarded(|| unsafe { send(context, stream, tokens, sent, AllToAll::dispatch_send) })
}

/// As `tokenyard_dispatch_send`, and `tokenyard_dispatch_counts` then has how many rows come, before they are placed.
/// Not in a capture.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tokenyard_dispatch_send_counts(
    context: Option<&tokenyard_context_t>,
    stream: Option<&tokenyard_stream_t>,
    tokens: *const tokenyard_tokens_t,
    sent: Option<&tokenyard_sent_t>,
) -> tokenyard_status_t {
    // SAFETY: the caller's pointer.
    guarded(|| unsafe { send(context, stream, tokens, sent, AllToAll::dispatch_send_counts) })
}

/// # Safety
/// `tokens` is NULL or the caller's struct.
unsafe fn send(
    context: Option<&tokenyard_context_t>,
    stream: Option<&tokenyard_stream_t>,
    tokens: *const tokenyard_tokens_t,
    sent: Option<&tokenyard_sent_t>,
    half: impl FnOnce(&AllToAll, &Stream, &Tokens) -> Result<Sent>,
) -> Result<()> {
    let (context, stream, sent) = (object("context", context)?, object("stream", stream)?, object("sent", sent)?);
    // SAFETY: as the caller says.
    let tokens = unsafe { read("tokens", tokens)? }.given(context)?;
    sent.0.send("sent", || half(&context.all, &stream.0, &tokens))
}

/// Waits for the counts of a dispatch that `tokenyard_dispatch_send_counts` sent, at most for `timeout_ms`; then
/// `TOKENYARD_DEVICE`, and the dispatch goes on. They may be asked for again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tokenyard_dispatch_counts(
    context: Option<&tokenyard_context_t>,
    sent: Option<&tokenyard_sent_t>,
    timeout_ms: u64,
    counts: *mut *mut tokenyard_counts_t,
) -> tokenyard_status_t {
    guarded(|| {
        // SAFETY: the caller's pointer.
        let out = unsafe { Out::new("counts", counts)? };
        let (context, sent) = (object("context", context)?, object("sent", sent)?);
        let timeout = Duration::from_millis(timeout_ms);
        out.give(tokenyard_counts_t(sent.0.with("sent", |sent| context.all.counts(sent, timeout))?));
        Ok(())
    })
}

/// Rows of each local expert. `*count` is how many there are; the first `capacity` of them go to `values`, which may be
/// NULL if `capacity` is 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tokenyard_counts_experts(
    counts: Option<&tokenyard_counts_t>,
    values: *mut usize,
    capacity: usize,
    count: *mut usize,
) -> tokenyard_status_t {
    guarded(|| {
        let experts = &object("counts", counts)?.0.experts;
        // SAFETY: the caller's pointers.
        unsafe { give_list(values, capacity, count, experts.iter().copied()) }
    })
}

/// Tokens of each rank that have a row here, as `tokenyard_counts_experts` gives rows.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tokenyard_counts_sources(
    counts: Option<&tokenyard_counts_t>,
    values: *mut usize,
    capacity: usize,
    count: *mut usize,
) -> tokenyard_status_t {
    guarded(|| {
        let sources = &object("counts", counts)?.0.sources;
        // SAFETY: the caller's pointers.
        unsafe { give_list(values, capacity, count, sources.iter().copied()) }
    })
}

/// `layout` with exactly the capacity that the dispatch needs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tokenyard_counts_fit(
    counts: Option<&tokenyard_counts_t>,
    layout: tokenyard_layout_t,
    fitting: *mut tokenyard_layout_t,
) -> tokenyard_status_t {
    guarded(|| {
        let layout = object("counts", counts)?.0.fit(layout.layout()?);
        // SAFETY: the caller's pointer.
        unsafe { write("fitting", fitting, tokenyard_layout_t::of(layout)) }
    })
}

/// Destroys the object. NULL is allowed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tokenyard_counts_destroy(counts: *mut tokenyard_counts_t) {
    // SAFETY: the caller's pointer, of `tokenyard_dispatch_counts`.
    unsafe { destroy(counts) }
}

/// The receiving half of `tokenyard_dispatch`, which empties `sent` and fills `handle`. After an error `sent` is as it
/// was: unless the context is closed, call again with it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tokenyard_dispatch_recv(
    context: Option<&tokenyard_context_t>,
    stream: Option<&tokenyard_stream_t>,
    sent: Option<&tokenyard_sent_t>,
    output: *const tokenyard_output_t,
    handle: Option<&tokenyard_handle_t>,
) -> tokenyard_status_t {
    guarded(|| {
        let (context, stream) = (object("context", context)?, object("stream", stream)?);
        let (sent, handle) = (object("sent", sent)?, object("handle", handle)?);
        // SAFETY: the caller's pointer.
        let output = unsafe { read("output", output)? }.given(context.all.device())?;
        handle.0.set(sent.0.receive("sent", |sent| context.all.dispatch_recv(&stream.0, sent, &output))?);
        Ok(())
    })
}
