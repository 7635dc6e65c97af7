//! Handles: what combine needs of a dispatch, in device memory, from a pool that grows with the handles in use.
//!
//! A handle is compact where a table of all choices that could come would be large: it then has an entry for each row
//! of the dispatch's output instead (`RowChoice` in kernels/common/context.cuh).

use super::again::NewRows;
use super::calls::{Rows, Tokens};
use super::counts::CountWords;
use super::formats::Kind;
use super::layout::Layout;
use super::shape::Shape;
use super::tuning::Tuning;
use crate::base::{Error, Result};
use crate::ffi::layout as raw;
use crate::kernels::{Device, DeviceBuffer, Half, HostBuffer, LastUse, Queue};
use crate::proxy::wire::Direction;
use std::fmt;
use std::mem::offset_of;
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The most bytes of a table of all choices that could come: an output row and a weight for each. Such a table is read
/// faster than lists of rows where a rank gets most choices of each token, as in small worlds. Specialised kernels of
/// one node know nothing else.
const LARGEST_TABLE: usize = 4 << 20;
/// The same in worlds of several nodes.
const LARGEST_TABLE_OF_NODES: usize = 1 << 20;

/// The device memory of one handle.
pub(crate) struct Slot {
    _memory: DeviceBuffer,
    /// Entries for output rows, in compact handles; the last is in use. Work may still use the others, which were too
    /// small for a later dispatch. Each has twice the former's rows at least, so they take less than the last.
    row_choices: Vec<DeviceBuffer>,
    /// For counts that come first, once a call asked for them; and how often they did, modulo 2^32, without 0.
    counts: Option<(Arc<HostBuffer>, NonZeroU32)>,
    raw: raw::ty_handle,
    last: Arc<LastUse>,
}

impl Slot {
    /// Output rows for which there are entries.
    fn rows(&self) -> usize {
        self.row_choices.last().map_or(0, |entries| entries.view().len() / ROW_CHOICE_BYTES)
    }

    /// Takes memory with more entries into use.
    fn give(&mut self, entries: DeviceBuffer) {
        self.raw.row_choices = entries.view().ptr();
        self.row_choices.push(entries);
    }
}

/// An entry for an output row.
const ROW_CHOICE_BYTES: usize = 8;

/// Handles that are free. Held by the context and by every handle in use.
pub(crate) struct Pool {
    device: Device,
    ordered: bool,
    size: Size,
    /// Local experts and ranks.
    counted: (usize, usize),
    free: Mutex<Free>,
    /// The number last given to a dispatch or a combine.
    numbers: AtomicU32,
}

/// Parts of a handle's memory, but for the entries of output rows.
const PARTS: usize = 10;

/// The size of a context's handles.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Size {
    /// Offsets of a handle's parts in its memory, and the memory's size in bytes.
    offsets: [u64; PARTS],
    bytes: usize,
    /// Of compact handles: output rows for which a new one has entries.
    rows: Option<usize>,
}

impl Size {
    pub fn of(shape: &Shape, rounds: usize, tuning: &Tuning) -> Size {
        let most = if shape.nodes.members().len() > 1 { LARGEST_TABLE_OF_NODES } else { LARGEST_TABLE };
        let table = 2 * table_bytes(shape);
        // Lists cost time, so they must save much. In worlds of few ranks they do not.
        let saves = 4 * usual_rows(shape) * ROW_CHOICE_BYTES <= table;
        let compact = tuning.compact_handles.unwrap_or(table > most && saves);
        let rows = compact.then(|| tuning.handle_rows.unwrap_or_else(|| usual_rows(shape)).max(1));
        let (offsets, bytes) = layout(shape, rounds, compact);
        Size { offsets, bytes, rows }
    }

    pub fn is_compact(&self) -> bool {
        self.rows.is_some()
    }

    /// Bytes of a handle that is allocated when the context is built.
    pub fn in_all(&self) -> u64 {
        (self.bytes + self.rows.unwrap_or(0) * ROW_CHOICE_BYTES) as u64
    }
}

struct Free {
    slots: Vec<Slot>,
    /// Kernels never ended: returned slots keep their memory for good.
    abandoned: bool,
}

impl Pool {
    /// Allocates `tuning.handles` handles.
    pub fn new(device: &Device, shape: &Shape, rounds: usize, tuning: &Tuning) -> Result<Arc<Pool>> {
        let size = Size::of(shape, rounds, tuning);
        let free = Mutex::new(Free { slots: Vec::with_capacity(tuning.handles), abandoned: false });
        let (device, ordered, numbers) = (device.clone(), tuning.ordered, AtomicU32::new(0));
        let counted = (shape.local_experts, shape.ranks);
        let pool = Pool { device, ordered, size, counted, free, numbers };
        for _ in 0..tuning.handles {
            let mut slot = pool.make()?;
            slot._memory.fill(0)?;
            if let Some(rows) = size.rows {
                slot.give(pool.device.alloc(rows * ROW_CHOICE_BYTES)?);
            }
            pool.lock().slots.push(slot);
        }
        Ok(Arc::new(pool))
    }

    /// Takes a handle for work on `queue`: a handle last used there, else one whose last use the queue can wait for,
    /// else a new one. For `recorded` work any free handle: its graph waits when it is launched. Of several the one
    /// that has room for `rows` output rows, but for the fewest.
    ///
    /// # Errors
    /// `Argument` if the stream captures and no handle is free: a capture cannot allocate. `Device` without memory.
    pub fn take(self: &Arc<Pool>, queue: &Queue, recorded: bool, rows: usize) -> Result<Lease> {
        let rows = self.size.is_compact().then_some(rows);
        let mut slot = if recorded {
            self.lock().take_fitting(rows, |_| true).ok_or_else(none_free)?
        } else {
            self.take_eager(queue, rows)?
        };
        // Combine refuses what an earlier dispatch left in this memory, if this handle's own never runs.
        slot.raw.serial = self.number();
        slot.raw.call = slot.raw.serial;
        Ok(Lease { last: slot.last.clone(), slot: Mutex::new(Some(slot)), pool: self.clone() })
    }

    /// The next number of a dispatch or a combine, modulo 2^32, never TY_HANDLE_EMPTY.
    pub fn number(&self) -> u32 {
        match self.numbers.fetch_add(1, Ordering::Relaxed).wrapping_add(1) {
            raw::TY_HANDLE_EMPTY => self.number(),
            number => number,
        }
    }

    fn take_eager(&self, queue: &Queue, rows: Option<usize>) -> Result<Slot> {
        let mut free = self.lock();
        if let Some(slot) = free.take_fitting(rows, |slot| slot.last.is_on(queue)) {
            return Ok(slot);
        }
        if queue.is_capturing()? {
            return Err(none_free());
        }
        if let Some(slot) = free.take_fitting(rows, |slot| slot.last.can_be_followed()) {
            return Ok(slot);
        }
        drop(free);
        let slot = self.make()?;
        queue.fill(slot._memory.view().span(), 0)?;
        Ok(slot)
    }

    /// Gives a compact handle entries for so many output rows, if it has fewer, and likewise all that are free: what
    /// one call needs, a capture may need for each of its calls. Entries are read only where the same dispatch wrote
    /// them.
    fn enlarge(&self, slot: &mut Slot, rows: usize, queue: &Queue, recorded: bool) -> Result<()> {
        let Some(least) = self.size.rows else { return Ok(()) };
        let had = slot.rows();
        if had >= rows.max(1) {
            return Ok(());
        }
        if rows > raw::TY_MAX_COMPACT_ROWS as usize {
            let most = raw::TY_MAX_COMPACT_ROWS;
            let advice = format!("outputs of this context have at most {most} rows; ask for fewer");
            return Err(Error::argument("layout", format!("{rows} rows"), advice));
        }
        if recorded || queue.is_capturing()? {
            return Err(too_small(had, rows));
        }
        let mut free = self.lock();
        for slot in std::iter::once(slot).chain(&mut free.slots) {
            let had = slot.rows();
            if had < rows.max(1) {
                slot.give(self.device.alloc(rows.max(least).max(2 * had) * ROW_CHOICE_BYTES)?);
            }
        }
        Ok(())
    }

    fn make(&self) -> Result<Slot> {
        let memory = self.device.alloc(self.size.bytes)?;
        let [head, rows, weights, slots, source_tokens, rank_mask, wire_row, wire_rows, rail_mask, rail_rows] =
            self.size.offsets.map(|offset| memory.view().ptr() + offset);
        let raw = raw::ty_handle {
            head,
            rows,
            weights,
            slots,
            row_choices: 0,
            output_rows: 0,
            source_tokens,
            rank_mask,
            wire_row,
            wire_rows,
            rail_mask,
            rail_rows,
            serial: raw::TY_HANDLE_EMPTY,
            call: 0,
        };
        let last = Arc::new(LastUse::new(self.ordered));
        Ok(Slot { _memory: memory, row_choices: Vec::new(), counts: None, raw, last })
    }

    /// Keeps the memory of all handles for good, also of handles in use when they come back: kernels that do not end
    /// may use it.
    pub fn abandon(&self) {
        let mut free = self.lock();
        free.abandoned = true;
        std::mem::forget(std::mem::take(&mut free.slots));
    }

    fn lock(&self) -> MutexGuard<'_, Free> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Free {
    /// Of the handles that `may` be taken one with room for `rows` output rows, but for the fewest; else the largest.
    /// None: handles are not compact, and all alike.
    fn take_fitting(&mut self, rows: Option<usize>, may: impl Fn(&Slot) -> bool) -> Option<Slot> {
        let Some(rows) = rows else {
            let at = self.slots.iter().rposition(may)?;
            return Some(self.slots.swap_remove(at));
        };
        let places = self.slots.iter().enumerate().rev().filter(|(_, slot)| may(slot));
        let key = |has: usize| if has >= rows { (0, has) } else { (1, usize::MAX - has) };
        let (at, _) = places.min_by_key(|(_, slot)| key(slot.rows()))?;
        Some(self.slots.swap_remove(at))
    }
}

/// Words of device memory.
fn read_words(memory: &DeviceBuffer, offset: usize, count: usize) -> Result<Vec<u32>> {
    let mut bytes = vec![0; 4 * count];
    memory.read(offset, &mut bytes)?;
    Ok(bytes.as_chunks::<4>().0.iter().map(|word| u32::from_ne_bytes(*word)).collect())
}

/// Bytes of a word for each choice that could come.
fn table_bytes(shape: &Shape) -> usize {
    shape.ranks * shape.max_tokens * shape.top_k * size_of::<u32>()
}

/// Output rows that a rank gets of the most tokens, if all experts get as many, and an eighth more.
fn usual_rows(shape: &Shape) -> usize {
    let rows = shape.ranks * shape.max_tokens * shape.top_k * shape.local_experts / shape.experts.max(1);
    (rows + rows / 8).clamp(1, raw::TY_MAX_COMPACT_ROWS as usize)
}

fn too_small(had: usize, rows: usize) -> Error {
    Error::argument(
        "handle",
        format!("room for {had} rows while the stream captures, where the output has {rows}"),
        "build the context with handle_rows of the output's rows, or dispatch into it once before capturing",
    )
}

fn none_free() -> Error {
    Error::argument(
        "handle",
        "none free while the stream captures",
        "allocate before capturing, e.g. build the context with more handles, or drop handles that are no longer used",
    )
}

fn layout(shape: &Shape, rounds: usize, compact: bool) -> ([u64; PARTS], usize) {
    let tokens = shape.ranks * shape.max_tokens;
    let links = shape.nodes.members().len() - 1;
    let served = shape.nodes.sources(Direction::Dispatch, shape.name).len();
    let table = if compact { 0 } else { table_bytes(shape) };
    let node = shape.nodes.node_of(shape.name).and_then(|node| shape.nodes.members().get(node));
    let mask = if node.is_some_and(|ranks| ranks.len() <= raw::TY_NARROW_RANKS as usize) { 1 } else { 8 };
    let sizes = [
        size_of::<raw::ty_handle_head>(),
        table,
        table,
        tokens * 4,
        shape.ranks * (rounds + 1) * 4,
        shape.max_tokens * 8,
        links * shape.max_tokens * 4,
        links * (rounds + 1) * 4,
        served * shape.max_tokens * mask,
        served * (rounds + 1) * 4,
    ];
    let mut offsets = [0u64; PARTS];
    let mut bytes = 0usize;
    for (offset, size) in offsets.iter_mut().zip(sizes) {
        *offset = bytes as u64;
        bytes += size.next_multiple_of(256);
    }
    (offsets, bytes)
}

/// A handle taken from the pool; goes back when dropped. Work enqueued with it may then still use it, so the next call
/// that takes it waits for its last use.
pub(crate) struct Lease {
    slot: Mutex<Option<Slot>>,
    last: Arc<LastUse>,
    pool: Arc<Pool>,
}

impl Lease {
    pub fn raw(&self) -> raw::ty_handle {
        self.lock().as_ref().map_or_else(raw::ty_handle::default, |slot| slot.raw)
    }

    /// Makes room for an output of so many rows, before the launches on `queue` that write it.
    ///
    /// # Errors
    /// `Argument` for more rows than a handle can have, or if memory is needed while the stream captures (`recorded`
    /// for a capture of this crate's own). `Device` without memory.
    pub fn make_room(&self, rows: usize, queue: &Queue, recorded: bool) -> Result<()> {
        self.lock().as_mut().map_or(Ok(()), |slot| self.pool.enlarge(slot, rows, queue, recorded))
    }

    /// For each source rank of a received dispatch: its tokens that have a row here.
    ///
    /// # Errors
    /// `Argument` if the dispatch has not been received. As [`DeviceBuffer::read`].
    pub fn tokens_of_sources(&self, max_tokens: usize, rounds: usize) -> Result<Vec<u32>> {
        let slot = self.lock();
        let Some(slot) = slot.as_ref() else { return Ok(Vec::new()) };
        let [head, _, _, slots, source_tokens, ..] = self.pool.size.offsets.map(|offset| offset as usize);
        let state = offset_of!(raw::ty_handle_head, state);
        if read_words(&slot._memory, head + state, 1)? != [slot.raw.serial] {
            let advice = "receive its dispatch, and let the stream pass it, before you ask for its rows";
            return Err(Error::argument("handle", "of a dispatch that has not been received", advice));
        }
        let ranks = self.pool.counted.1;
        let ends = read_words(&slot._memory, source_tokens, ranks * (rounds + 1))?;
        let slots = read_words(&slot._memory, slots, ranks * max_tokens)?;
        let of = |(starts, slots): (&[u32], &[u32])| {
            let tokens = starts.last().map_or(0, |end| *end as usize);
            slots.iter().take(tokens).filter(|slot| (**slot as i32) >= 0).count() as u32
        };
        Ok(ends.chunks(rounds + 1).zip(slots.chunks(max_tokens)).map(of).collect())
    }

    /// The words for the counts of the handle's dispatch, in host memory. Call it once for a dispatch.
    ///
    /// # Errors
    /// As [`Device::alloc_host`].
    pub fn counts(&self) -> Result<Option<CountWords>> {
        let (experts, ranks) = self.pool.counted;
        let mut slot = self.lock();
        let Some(slot) = slot.as_mut() else { return Ok(None) };
        let (words, uses) = match &slot.counts {
            Some((words, uses)) => (words.clone(), uses.checked_add(1).unwrap_or(NonZeroU32::MIN)),
            None => {
                let words = self.pool.device.alloc_host(CountWords::bytes(experts, ranks))?;
                (Arc::new(words), NonZeroU32::MIN)
            }
        };
        slot.counts = Some((words.clone(), uses));
        Ok(Some(CountWords::new(words, experts, uses.get())))
    }

    fn lock(&self) -> MutexGuard<'_, Option<Slot>> {
        self.slot.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn last_use(&self) -> &Arc<LastUse> {
        &self.last
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let Some(slot) = self.lock().take() else { return };
        let mut free = self.pool.lock();
        if free.abandoned {
            std::mem::forget(slot);
        } else {
            free.slots.push(slot);
        }
    }
}

/// A refused receiving half: the reason, and the [`Sent`] or [`CombineSent`] that the call was given, for another try.
/// Converts into [`Error`], so that `?` works where it is not needed again.
pub struct Refused<T> {
    /// Why.
    pub error: Error,
    /// What the call was given.
    pub given: Box<T>,
}

impl<T> fmt::Debug for Refused<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Refused").field("error", &self.error).finish_non_exhaustive()
    }
}

impl<T> fmt::Display for Refused<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl<T> std::error::Error for Refused<T> {}

impl<T> From<Refused<T>> for Error {
    fn from(refused: Refused<T>) -> Error {
        refused.error
    }
}

/// A dispatch in flight: [`AllToAll::dispatch_recv`](super::AllToAll::dispatch_recv) takes it. It owns the memory it
/// refers to. Dropping a `Sent` abandons the dispatch: the rank never receives it, so every later send of a dispatch of
/// the context ends in `Order`, and peers that wait for this rank reach their deadlines. The context can then only be
/// dropped. A `Sent` can be received once:
///
/// ```compile_fail,E0382
/// # use tokenyard::{AllToAll, Output, Sent, Stream};
/// fn receive(ep: &AllToAll, stream: &Stream, sent: Sent, output: &Output) {
///     let first = ep.dispatch_recv(stream, sent, output);
///     let second = ep.dispatch_recv(stream, sent, output);
/// }
/// ```
#[must_use = "a dispatch that is sent must be received before the next one"]
pub struct Sent {
    pub(crate) lease: Arc<Lease>,
    pub(crate) room: usize,
    /// Input of the later rounds.
    pub(crate) tokens: raw::ty_tokens,
    /// The same input as views, which keep its memory; only if there are later rounds.
    pub(crate) views: Option<Tokens>,
    /// Where the counts come to, if they come first.
    pub(crate) counts: Option<CountWords>,
    /// Of the call.
    pub(crate) kind: Arc<Kind>,
    pub(crate) context: u64,
}

impl fmt::Debug for Sent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Sent(context {}, room for {} tokens)", self.context, self.room)
    }
}

/// A received dispatch: what combine needs to bring the rows back. A handle may be combined any number of times, the
/// same on all ranks, and also after further dispatches. A clone is the same handle. The memory is reused once the last
/// clone is dropped and the work enqueued with it has run; a graph that was captured with it keeps it.
///
/// The handle of a captured dispatch refers to that dispatch of the newest replay. Before the first replay a combine of
/// the handle is enqueued, returns `Ok`, does nothing, and ends in an [`Error::Order`] that is not fatal and comes from
/// [`check`](super::AllToAll::check).
#[derive(Clone)]
pub struct Handle {
    pub(crate) lease: Arc<Lease>,
    /// Own tokens for which combine's output must have room.
    pub(crate) room: usize,
    /// Tokens of the dispatch, if the host knows them.
    pub(crate) tokens: Option<usize>,
    /// Rows of the dispatch's output.
    pub(crate) rows: usize,
    pub(crate) layout: Layout,
    /// Of the dispatch.
    pub(crate) kind: Arc<Kind>,
    pub(crate) context: u64,
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Handle(context {}, {:?}, {} rows)", self.context, self.layout, self.rows)
    }
}

/// A dispatch by an earlier handle in flight: [`AllToAll::dispatch_again_recv`](super::AllToAll::dispatch_again_recv)
/// takes it. It owns the memory it refers to, the handle's memory included. Until it is received, the launch of a graph
/// that uses the same handle is refused. Dropping it abandons the dispatch, as with [`Sent`].
#[must_use = "a dispatch that is sent must be received before the next one"]
pub struct SentAgain {
    pub(crate) handle: Handle,
    /// Of the call.
    pub(crate) kind: Arc<Kind>,
    /// A number of its own, which the halves' launches have in common.
    pub(crate) call: u32,
    /// Input of the later rounds.
    pub(crate) tokens: raw::ty_tokens,
    /// The same input as views, which keep its memory; only if there are later rounds.
    pub(crate) views: Option<NewRows>,
    pub(crate) _half: Option<Half>,
}

impl fmt::Debug for SentAgain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SentAgain(by {:?})", self.handle)
    }
}

/// A combine in flight: [`AllToAll::combine_recv`](super::AllToAll::combine_recv) takes it. It owns the memory it
/// refers to, the handle's memory included. Until the combine is received, the launch of a graph that dispatches into
/// the same handle, or combines that handle, is refused. Dropping a `CombineSent` abandons the combine, as with
/// [`Sent`]. It is received once:
///
/// ```compile_fail,E0382
/// # use tokenyard::{AllToAll, CombineSent, Combined, Stream};
/// fn receive(ep: &AllToAll, stream: &Stream, sent: CombineSent, out: &Combined) {
///     let first = ep.combine_recv(stream, sent, out);
///     let second = ep.combine_recv(stream, sent, out);
/// }
/// ```
#[must_use = "a combine that is sent must be received before the next one"]
pub struct CombineSent {
    pub(crate) handle: Handle,
    /// Of the call.
    pub(crate) kind: Arc<Kind>,
    /// Rows of the later rounds.
    pub(crate) rows: SentRows,
    /// The same rows as views, which keep their memory; only if there are later rounds.
    pub(crate) views: Option<Rows>,
    /// `None` if the call was recorded.
    pub(crate) _half: Option<Half>,
}

impl fmt::Debug for CombineSent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CombineSent({:?})", self.handle)
    }
}

/// The experts' rows and their weights, as kernels take them.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct SentRows {
    pub rows: u64,
    pub pitch: u64,
    pub topk_weight: u64,
    pub payload: u64,
    /// The call's number: see `ty_handle.call`.
    pub call: u32,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bindings::api::AllToAll;
    use crate::transport::world::World;

    #[test]
    fn a_compact_handle_takes_no_more_rows_than_its_entries_name() {
        let (world, device) = (World::threads(1).unwrap().remove(0), Device::cpu().unwrap());
        let builder = AllToAll::builder(&world).device(device.clone()).hidden(8).experts(2).top_k(1);
        let builder = builder.max_tokens_per_rank(5).tuning(|t| (t.handles, t.compact_handles) = (1, Some(true)));
        let (shape, _) = builder.check().unwrap();
        let tuning = Tuning { handles: 3, compact_handles: Some(true), ..Tuning::default() };
        let (pool, stream) = (Pool::new(&device, &shape, 1, &tuning).unwrap(), device.new_stream().unwrap());
        let take = |rows| pool.take(stream.queue(), true, rows).unwrap();
        let (lease, other) = (take(0), take(0));
        let entries = |lease: &Lease| lease.lock().as_ref().unwrap().rows();
        // 5 rows of uniform routing; an eighth of that is none.
        assert_eq!(entries(&lease), 5);
        let most = raw::TY_MAX_COMPACT_ROWS as usize;
        for rows in [most + 1, usize::MAX] {
            let text = lease.make_room(rows, stream.queue(), false).unwrap_err().to_string();
            assert!(text.contains(&format!("{rows} rows")) && text.contains("at most 67108863 rows"), "{text}");
        }
        let before = lease.raw().row_choices;
        lease.make_room(5, stream.queue(), true).unwrap();
        assert_eq!((entries(&lease), lease.raw().row_choices), (5, before));
        // Work may use the smaller memory for as long as the pool lives.
        for (rows, has) in [(6, 10), (10, 10), (11, 20), (100, 100)] {
            lease.make_room(rows, stream.queue(), false).unwrap();
            assert_eq!(entries(&lease), has);
        }
        assert_eq!(lease.lock().as_ref().unwrap().row_choices.len(), 4);
        // The third, which was free, grew, too.
        drop((lease, other));
        assert_eq!([6, 0].map(take).each_ref().map(entries), [100, 5]);
        assert_eq!([usize::MAX, 1000].map(take).each_ref().map(entries), [100, 100]);
        let few = take(3);
        assert_eq!(entries(&few), 5);
        few.make_room(7, stream.queue(), false).unwrap();
        drop(few);
        assert_eq!([7, 0, 500].map(take).each_ref().map(entries), [10, 100, 100]);
    }
}
