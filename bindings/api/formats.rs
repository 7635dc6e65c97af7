//! Calls of different formats in one context: what a call's format is, what it must fit into, and what its launches are
//! given.
//!
//! ```text
//!   AllToAllBuilder: own format, room_for(others) ──▶ Plan: slots of the largest rows
//!   Tokens, NewRows, Rows: format of a call ──▶ Formats::of ──▶ Kind { shape, ty_context }, made once and kept
//! ```
//!
//! Regions of the arena, their strides, epochs and words are the same for all formats; a call with smaller rows fills a
//! part of each slot. Place: before anything is enqueued, on the caller's thread.

use super::call_format::CallFormat;
use super::plan::{Message, Plan};
use super::shape::Shape;
use super::tables::inverse;
use crate::base::{Error, Result};
use crate::ffi::layout as raw;
use crate::proxy::wire::Direction;
use std::sync::{Arc, Mutex, PoisonError};

/// Calls of one format: what they are checked against, and what their launches are given.
pub(crate) struct Kind {
    pub format: CallFormat,
    pub shape: Shape,
    pub context: raw::ty_context,
    /// Whether such calls can be combined; a dispatch by an earlier handle need not be.
    pub combines: Result<()>,
}

/// The most formats, besides the context's own, of which a context keeps what their launches are given.
const MOST_KEPT: usize = 64;

/// The formats of a context's calls.
pub(crate) struct Formats {
    /// The context's own.
    own: Arc<Kind>,
    /// The others that calls have had; the last was made last.
    others: Mutex<Vec<Arc<Kind>>>,
}

impl Formats {
    /// With the context's own, whose `context` has everything but what differs between formats.
    pub fn new(shape: Shape, plan: &Plan, context: &raw::ty_context) -> Formats {
        let (format, context) = (shape.call_format(), context_of(&shape, plan, context, 0));
        let own = Kind { format, context, combines: Ok(()), shape };
        Formats { own: Arc::new(own), others: Mutex::default() }
    }

    pub fn own(&self) -> &Arc<Kind> {
        &self.own
    }

    /// Calls of a format.
    ///
    /// # Errors
    /// `Argument` for a format that the context's arena has no room for, or that no context has.
    pub fn of(&self, format: &CallFormat, plan: &Plan) -> Result<Arc<Kind>> {
        if *format == self.own.format {
            return Ok(self.own.clone());
        }
        let mut others = self.others.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kind) = others.iter().find(|kind| kind.format == *format) {
            return Ok(kind.clone());
        }
        let shape = self.own.shape.of_format(format);
        check_fits(&self.own.shape, &shape, plan)?;
        let context = context_of(&shape, plan, &self.own.context, format.number() << 1);
        let combines = check_combines(&shape, plan);
        let kind = Arc::new(Kind { format: *format, shape, context, combines });
        if others.len() == MOST_KEPT {
            others.remove(0);
        }
        others.push(kind.clone());
        Ok(kind)
    }
}

/// What to try where an arena is too small for calls of a format.
const ROOM: &str = "build the context with room_for such calls";

/// Refuses a call's format that a context does not take.
fn check_fits(own: &Shape, shape: &Shape, plan: &Plan) -> Result<()> {
    let dispatches_alike = shape.call_format().dispatch() == own.call_format().dispatch();
    if own.in_place.is_some() && !dispatches_alike {
        let advice = "a context with in-place output takes calls of its own format alone; build one without in_place";
        return Err(Error::argument("format", format!("{} of {} columns", shape.format, shape.hidden), advice));
    }
    if !(1..=own.max_tokens).contains(&shape.max_tokens) {
        let advice = format!("use 1 to {}, the most of this context", own.max_tokens);
        return Err(Error::argument("max_tokens", shape.max_tokens, advice));
    }
    shape.check_rows().map_err(as_argument)?;
    if shape.slot_bytes() > plan.slot_bytes {
        let value = format!("{} of {} columns, {} bytes a row", shape.format, shape.hidden, shape.slot_bytes());
        return Err(Error::argument("format", value, format!("rows of this arena have {}; {ROOM}", plan.slot_bytes)));
    }
    let ahead = plan.regions.ahead_weights.source_stride > 0;
    if shape.nodes.members().len() > 1 && shape.weights_with_combine() != own.weights_with_combine() {
        let advice = "between nodes all calls of a context have weights with combine, or none has";
        return Err(Error::argument("weights", format!("{:?}", shape.weights), advice));
    }
    let missing = (shape.weights_with_combine() && !ahead) || !plan.has_headers_of(shape.call_bytes());
    if missing { Err(Error::argument("weights", format!("{:?}", shape.weights), ROOM)) } else { Ok(()) }
}

/// Refuses combines of a call's format that a context does not take.
fn check_combines(shape: &Shape, plan: &Plan) -> Result<()> {
    shape.check_sums("dtype of rows").map_err(as_argument)?;
    if shape.partial_bytes() <= plan.partial_bytes {
        return Ok(());
    }
    let with = if shape.payload.is_some() { " with its payload" } else { "" };
    let value = format!("{} of {} columns, {} bytes{with}", shape.combine_dtype, shape.hidden, shape.partial_bytes());
    let advice = format!("partial rows of this arena have {}; {ROOM}", plan.partial_bytes);
    Err(Error::argument("dtype of rows", value, advice))
}

/// A refused setting of a context as a refused argument of a call.
fn as_argument(error: Error) -> Error {
    match error {
        Error::Config { name, value, advice } => Error::Argument { name, value, advice },
        other => other,
    }
}

/// What launches of a format's calls are given: `context`, but for what is the format's.
fn context_of(shape: &Shape, plan: &Plan, context: &raw::ty_context, number: u32) -> raw::ty_context {
    let mut regions = plan.regions;
    if let Some(partials) = plan.few_partials.filter(|_| plan.are_few(shape.max_tokens)) {
        regions.partials = partials;
        regions.partial_tags.source_stride = 0;
    }
    raw::ty_context {
        max_tokens: shape.max_tokens as u32,
        round_tokens: if plan.rounds > 1 { plan.round_tokens } else { shape.max_tokens } as u32,
        hidden: shape.hidden as u32,
        weights: shape.weights_code(),
        row_bytes: shape.row_bytes as u32,
        scale_words: shape.scale_words as u32,
        scale_shift: shape.scale_shift(),
        slot_bytes: shape.slot_bytes() as u32,
        partial_bytes: shape.partial_bytes() as u32,
        quantize: shape.quantize_code(),
        format: number,
        regions,
        wire: raw::ty_wire { layouts: wire_layouts(&context.wire.layouts, plan, shape), ..context.wire },
        ..*context
    }
}

/// The layouts of messages in calls of a format: those of the context, but for what depends on rows and headers.
fn wire_layouts(
    own: &[raw::ty_wire_layout; raw::TY_DIRECTIONS as usize],
    plan: &Plan,
    shape: &Shape,
) -> [raw::ty_wire_layout; raw::TY_DIRECTIONS as usize] {
    Direction::ALL.map(|direction| {
        let layout = own[direction.index()];
        match plan.message_of(direction, shape.call_bytes()).filter(|_| layout.chunks > 0) {
            Some(Message { header_bytes, row_bytes, chunk_rows, chunk_shift, .. }) => raw::ty_wire_layout {
                chunk_rows,
                chunk_shift,
                header_bytes,
                row_bytes,
                chunk_inverse: inverse(chunk_rows),
                ..layout
            },
            None => layout,
        }
    })
}
