//! Dispatches of new rows by an earlier handle, fused and in halves.
//!
//! Place in the data path: at its head. On the caller's thread; never waits.

use super::arguments::{object, read};
use super::calls::{tokenyard_new_rows_t, tokenyard_placed_t};
use super::context::tokenyard_context_t;
use super::flight::{tokenyard_handle_t, tokenyard_sent_again_t};
use super::status::{guarded, tokenyard_status_t};
use super::stream::tokenyard_stream_t;

/// Sends new rows of the tokens that the handle's dispatch sent, to the places that the tokens' rows had in its output:
/// in training, the backward of a combine. All ranks give handles of the same dispatch.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tokenyard_dispatch_again(
    context: Option<&tokenyard_context_t>,
    stream: Option<&tokenyard_stream_t>,
    handle: Option<&tokenyard_handle_t>,
    tokens: *const tokenyard_new_rows_t,
    output: *const tokenyard_placed_t,
) -> tokenyard_status_t {
    guarded(|| {
        let (context, stream) = (object("context", context)?, object("stream", stream)?);
        let handle = object("handle", handle)?;
        // SAFETY: the caller's pointer.
        let tokens = unsafe { read("tokens", tokens)? }.given(context.all.device())?;
        // SAFETY: the caller's pointer.
        let output = unsafe { read("output", output)? }.given(context.all.device())?;
        handle.0.with("handle", |handle| context.all.dispatch_again(&stream.0, handle, &tokens, &output))
    })
}

/// The sending half of `tokenyard_dispatch_again`, which fills `sent`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tokenyard_dispatch_again_send(
    context: Option<&tokenyard_context_t>,
    stream: Option<&tokenyard_stream_t>,
    handle: Option<&tokenyard_handle_t>,
    tokens: *const tokenyard_new_rows_t,
    sent: Option<&tokenyard_sent_again_t>,
) -> tokenyard_status_t {
    guarded(|| {
        let (context, stream) = (object("context", context)?, object("stream", stream)?);
        let (handle, sent) = (object("handle", handle)?, object("sent", sent)?);
        // SAFETY: the caller's pointer.
        let tokens = unsafe { read("tokens", tokens)? }.given(context.all.device())?;
        let send = || handle.0.with("handle", |handle| context.all.dispatch_again_send(&stream.0, handle, &tokens));
        sent.0.send("sent", send)
    })
}

/// The receiving half of `tokenyard_dispatch_again`, which empties `sent`. After an error `sent` is as it was.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tokenyard_dispatch_again_recv(
    context: Option<&tokenyard_context_t>,
    stream: Option<&tokenyard_stream_t>,
    sent: Option<&tokenyard_sent_again_t>,
    output: *const tokenyard_placed_t,
) -> tokenyard_status_t {
    guarded(|| {
        let (context, stream) = (object("context", context)?, object("stream", stream)?);
        let sent = object("sent", sent)?;
        // SAFETY: the caller's pointer.
        let output = unsafe { read("output", output)? }.given(context.all.device())?;
        sent.0.receive("sent", |sent| context.all.dispatch_again_recv(&stream.0, sent, &output))
    })
}
