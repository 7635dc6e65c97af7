//! Calls that send new rows of an earlier dispatch's tokens.

use super::super::again::{NewRows, Placed};
use super::super::call_format::CallFormat;
use super::super::calls::TokenCount;
use super::super::formats::Kind;
use super::super::handle::{Handle, Refused, SentAgain};
use super::super::needs::Needs;
use super::super::payload::TokenPayload;
use super::super::pick::BOTH_PHASES;
use super::{AllToAll, DISPATCHES, dispatch_args};
use crate::base::{Error, Result};
use crate::ffi::layout as raw;
use crate::kernels::Stream;
use std::sync::Arc;
use std::sync::atomic::Ordering;

impl AllToAll {
    /// Sends new rows of the tokens that an earlier dispatch sent, to the places that the tokens' rows had in its
    /// output: in training, the backward of a combine. The routing is the handle's, so nothing is announced and nothing
    /// waits for counts; `output` needs the layout and capacity of the handle's dispatch, whose padding stays as it is.
    /// What described that output describes this one, and the handle's combines stay as they were. All ranks give
    /// handles of the same dispatch.
    ///
    /// # Errors
    /// As for [`dispatch`](Self::dispatch). `Argument` for another number of tokens than the handle's dispatch had; if
    /// one of the two was counted on the device, the call ends in [`Routing`](Error::Routing), and this rank's rows
    /// stay away. If ranks give handles of different dispatches, the context is closed by an [`Order`](Error::Order),
    /// or by a `Timeout` that may come first. A handle that has not been received, or whose dispatch ended in
    /// `Capacity`, ends in an `Order` that is not fatal; with the latter this rank sends its rows and places none.
    /// `Config` in a context with [`in_place`](crate::Tuning::in_place).
    pub fn dispatch_again(&self, stream: &Stream, handle: &Handle, tokens: &NewRows, output: &Placed) -> Result<()> {
        let kind = self.kind_again(handle, tokens)?;
        let mut needs = self.needs(&kind);
        let input = self.check_again(handle, tokens, &mut needs)?;
        let out = self.check_placed(handle, output, &mut needs)?;
        let mut call = self.begin_call(stream, DISPATCHES)?;
        call.uses(&handle.lease)?;
        call.keep(tokens.views().chain(output.views()));
        let mut args =
            dispatch_args(&call, &kind, Self::handle_again(handle, self.open.pool.number()), input, out, None);
        self.in_rounds(&call, |round| self.launch_dispatch(&call, BOTH_PHASES, round, &mut args, true))?;
        self.counters.dispatches.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// The sending half of [`dispatch_again`](Self::dispatch_again). The rows may be reused as those of
    /// [`dispatch_send`](Self::dispatch_send).
    ///
    /// # Errors
    /// As for [`dispatch_again`](Self::dispatch_again).
    pub fn dispatch_again_send(&self, stream: &Stream, handle: &Handle, tokens: &NewRows) -> Result<SentAgain> {
        let kind = self.kind_again(handle, tokens)?;
        let input = self.check_again(handle, tokens, &mut self.needs(&kind))?;
        let mut call = self.begin_call(stream, DISPATCHES)?;
        call.uses(&handle.lease)?;
        call.keep(tokens.views());
        let number = self.open.pool.number();
        let mut args =
            dispatch_args(&call, &kind, Self::handle_again(handle, number), input, raw::ty_output::default(), None);
        self.launch_dispatch(&call, raw::TY_PHASE_SEND, 0, &mut args, true)?;
        self.counters.dispatches.fetch_add(1, Ordering::Relaxed);
        let views = (self.plan.rounds > 1).then(|| tokens.clone());
        let (handle, _half) = (handle.clone(), call.half(&handle.lease));
        Ok(SentAgain { handle, kind, call: number, tokens: input, views, _half })
    }

    /// The receiving half of [`dispatch_again`](Self::dispatch_again).
    ///
    /// # Errors
    /// As for [`dispatch_again`](Self::dispatch_again). The error returns `sent`: unless the context is closed, call
    /// again with it.
    pub fn dispatch_again_recv(
        &self,
        stream: &Stream,
        sent: SentAgain,
        output: &Placed,
    ) -> std::result::Result<(), Refused<SentAgain>> {
        let received = self.receive_again(stream, &sent, output);
        received.map_err(|error| Refused { error, given: Box::new(sent) })
    }

    fn receive_again(&self, stream: &Stream, sent: &SentAgain, output: &Placed) -> Result<()> {
        self.check()?;
        self.own("sent", sent.handle.context)?;
        let mut needs = self.needs(&sent.kind);
        // The input of a call of one round has been read.
        if let Some(tokens) = &sent.views {
            tokens.check(&mut needs)?;
        }
        let out = self.check_placed(&sent.handle, output, &mut needs)?;
        let mut call = self.begin_call(stream, DISPATCHES)?;
        call.uses(&sent.handle.lease)?;
        call.keep(sent.views.iter().flat_map(NewRows::views).chain(output.views()));
        let mut args =
            dispatch_args(&call, &sent.kind, Self::handle_again(&sent.handle, sent.call), sent.tokens, out, None);
        self.in_rounds(&call, |round| {
            let phases = if round == 0 { raw::TY_PHASE_RECEIVE } else { BOTH_PHASES };
            self.launch_dispatch(&call, phases, round, &mut args, true)
        })
    }

    /// Checks what a dispatch by an earlier handle sends.
    fn check_again(&self, handle: &Handle, tokens: &NewRows, needs: &mut Needs<'_>) -> Result<raw::ty_tokens> {
        if needs.shape.in_place.is_some() {
            let advice = "handles of in-place outputs do not have the places of rows on other ranks; dispatch with the \
                          choices again, or build a context without in_place";
            return Err(Error::config("in_place", "of a dispatch by an earlier handle", advice));
        }
        match (handle.tokens, &tokens.count) {
            (Some(own), TokenCount::Host(count)) if own != *count => {
                let advice = format!("the handle's dispatch had {own} tokens; give as many");
                return Err(Error::argument("count", count, advice));
            }
            _ => {}
        }
        tokens.check(needs)
    }

    /// `needs` has the call's inputs.
    fn check_placed(&self, handle: &Handle, output: &Placed, needs: &mut Needs<'_>) -> Result<raw::ty_output> {
        needs.begin_written();
        let out = output.check(handle.layout, needs)?;
        needs.check_apart()?;
        Ok(out)
    }

    fn handle_again(handle: &Handle, call: u32) -> raw::ty_handle {
        raw::ty_handle { call, ..handle.lease.raw() }
    }

    /// A dispatch of a handle's tokens again. After `check`, since no call of a closed context is looked at further.
    fn kind_again(&self, handle: &Handle, tokens: &NewRows) -> Result<Arc<Kind>> {
        self.check()?;
        self.own("handle", handle.context)?;
        if self.open.memory.absences.is_some() {
            let advice = "the ranks that take part may have changed since; dispatch with choices, or use a context \
                          without missing_ranks";
            return Err(Error::config("missing_ranks", "of a dispatch by a handle", advice));
        }
        let token_words = TokenPayload::words_of(tokens.payload.as_ref(), &self.own_kind().shape)?;
        self.formats.of(&CallFormat { token_words, ..tokens.call_format(&handle.kind.format) }, &self.plan)
    }
}
