//! Contexts: building them, their errors, and what they tell of themselves.
//!
//! Place: around the calls. On the caller's thread; building and destroying a context wait, with deadlines.

use super::arguments::{Out, Versioned, give_list, list_mut, object, read, write, write_struct};
use super::config::{builder, tokenyard_config_t};
use super::flight::tokenyard_handle_t;
use super::status::{destroy, guarded, tokenyard_status_t};
use super::values::{tokenyard_layout_t, tokenyard_view_t};
use super::world::{tokenyard_world_t, waiting};
use crate::base::{Error, Rank};
use crate::bindings::api::{AllToAll, RowFormat};

/// Dispatch and combine over one world, on a device.
pub struct tokenyard_context_t {
    pub(super) all: AllToAll,
    pub(super) format: RowFormat,
    pub(super) hidden: usize,
    /// This rank in the first generation.
    first_rank: usize,
}

/// What a context is, and what it has done; see `tokenyard_context_info`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct tokenyard_context_info_t {
    /// Bytes of this struct, which the caller sets.
    pub size: u32,
    /// Thread blocks per kernel.
    pub sms: u32,
    /// Rounds of each call, one launch each.
    pub rounds: usize,
    /// Experts of this rank.
    pub local_experts: usize,
    /// Bytes of the arena.
    pub arena_bytes: u64,
    /// Bytes of a handle.
    pub handle_bytes: u64,
    /// Dispatches sent.
    pub dispatches: u64,
    /// Combines sent.
    pub combines: u64,
    /// How often `tokenyard_context_check` or a call returned an error of the device, a peer or the proxy.
    pub errors: u64,
}

// SAFETY: a C struct of numbers that begins with its size.
unsafe impl Versioned for tokenyard_context_info_t {
    const FIRST: usize = 64;
}

/// The in-place output of a context; see `tokenyard_context_in_place`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct tokenyard_in_place_t {
    /// Bytes of this struct, which the caller sets.
    pub size: u32,
    /// 0.
    pub reserved: u32,
    /// The contiguous layout of the context.
    pub layout: tokenyard_layout_t,
    /// Rows of the context's format.
    pub rows: tokenyard_view_t,
    /// Bytes from one row to the next.
    pub pitch_bytes: usize,
    /// Scales of the rows; NULL where the format has none.
    pub scales: tokenyard_view_t,
}

// SAFETY: as above.
unsafe impl Versioned for tokenyard_in_place_t {
    const FIRST: usize = 64;
}

/// A rank, and the epoch in which something became of it.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct tokenyard_rank_epoch_t {
    /// The epoch.
    pub epoch: u64,
    /// The rank in the first generation.
    pub rank: u32,
    /// Of a silent rank: the call that had waited for it, 1 for dispatch, 2 for combine, 3 for barrier; else 0.
    pub call: u32,
}

/// Builds a context. Collective: every rank of the world calls it with the same configuration. A failure on one rank is
/// an error on all. `TOKENYARD_INVALID_ARGUMENT` is the exception: the call was refused on this rank alone, and the
/// others wait for it until their deadline.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tokenyard_context_create(
    world: Option<&tokenyard_world_t>,
    config: *const tokenyard_config_t,
    context: *mut *mut tokenyard_context_t,
) -> tokenyard_status_t {
    guarded(|| {
        // SAFETY: the caller's pointer.
        let out = unsafe { Out::new("context", context)? };
        let world = &waiting(world)?;
        // SAFETY: the caller's pointer.
        let config = unsafe { read("config", config)? };
        // SAFETY: the caller's pointers.
        let (builder, format) = unsafe { builder(world, &config)? };
        let first_rank = world.original(world.rank()).index();
        out.give(tokenyard_context_t { all: builder.build()?, format, hidden: config.hidden, first_rank });
        Ok(())
    })
}

/// Bytes of the arena and of a handle that a rank of this configuration needs, without building the context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tokenyard_context_plan(
    world: Option<&tokenyard_world_t>,
    config: *const tokenyard_config_t,
    arena_bytes: *mut u64,
    handle_bytes: *mut u64,
) -> tokenyard_status_t {
    guarded(|| {
        let world = &object("world", world)?.0;
        // SAFETY: the caller's pointer.
        let config = unsafe { read("config", config)? };
        // SAFETY: the caller's pointers.
        let plan = unsafe { builder(world, &config)? }.0.plan()?;
        // SAFETY: the caller's pointer.
        unsafe { write("arena_bytes", arena_bytes, plan.arena_bytes())? };
        // SAFETY: the caller's pointer.
        unsafe { write("handle_bytes", handle_bytes, plan.handle_bytes()) }
    })
}

/// Destroys the context: waits for its calls on all streams, for its deadline and 5 s at most. While there is a graph
/// of its calls it stays open. NULL is allowed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tokenyard_context_destroy(context: *mut tokenyard_context_t) {
    // SAFETY: the caller's pointer, of `tokenyard_context_create`.
    unsafe { destroy(context) }
}

/// Returns an error that the device, the proxy or a peer has reported since the last check. Never waits: errors of a
/// call are there once the call's stream has passed the call. Errors come one at a time, each once but for those that
/// closed the context: check until `TOKENYARD_OK` or a fatal error.
#[unsafe(no_mangle)]
pub extern "C" fn tokenyard_context_check(context: Option<&tokenyard_context_t>) -> tokenyard_status_t {
    guarded(|| object("context", context)?.all.check())
}

/// What the context is, and what it has done.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tokenyard_context_info(
    context: Option<&tokenyard_context_t>,
    info: *mut tokenyard_context_info_t,
) -> tokenyard_status_t {
    guarded(|| {
        let context = object("context", context)?;
        let (stats, plan) = (context.all.stats(), context.all.plan());
        let value = tokenyard_context_info_t {
            size: 0,
            sms: context.all.sms(),
            rounds: context.all.rounds(),
            local_experts: context.local_experts().len(),
            arena_bytes: plan.arena_bytes(),
            handle_bytes: plan.handle_bytes(),
            dispatches: stats.dispatches,
            combines: stats.combines,
            errors: stats.errors,
        };
        // SAFETY: the caller's pointer.
        unsafe { write_struct("info", info, value) }
    })
}

impl tokenyard_context_t {
    fn local_experts(&self) -> &[u32] {
        self.all.placement().local_experts(self.first_rank)
    }
}

/// The experts of this rank, ascending. `*count` is how many there are; the first `capacity` of them go to `values`,
/// which may be NULL if `capacity` is 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tokenyard_context_local_experts(
    context: Option<&tokenyard_context_t>,
    values: *mut u32,
    capacity: usize,
    count: *mut usize,
) -> tokenyard_status_t {
    guarded(|| {
        let experts = object("context", context)?.local_experts();
        // SAFETY: the caller's pointers.
        unsafe { give_list(values, capacity, count, experts.iter().copied()) }
    })
}

/// Lost ranks, as bootstrap and proxy have noticed, by their ranks in the first generation; as
/// `tokenyard_context_local_experts` gives experts.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tokenyard_context_lost_peers(
    context: Option<&tokenyard_context_t>,
    values: *mut u32,
    capacity: usize,
    count: *mut usize,
) -> tokenyard_status_t {
    guarded(|| {
        let lost = object("context", context)?.all.lost_peers();
        // SAFETY: the caller's pointers.
        unsafe { give_list(values, capacity, count, lost.iter().map(|rank| rank.0)) }
    })
}

/// Other ranks whose routing was unusable, each with the epoch of its last such dispatch; as
/// `tokenyard_context_local_experts` gives experts.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tokenyard_context_refused_sources(
    context: Option<&tokenyard_context_t>,
    values: *mut tokenyard_rank_epoch_t,
    capacity: usize,
    count: *mut usize,
) -> tokenyard_status_t {
    guarded(|| {
        let refused = object("context", context)?.all.refused_sources();
        let refused =
            refused.iter().map(|(rank, epoch)| tokenyard_rank_epoch_t { epoch: *epoch, rank: rank.0, call: 0 });
        // SAFETY: the caller's pointers.
        unsafe { give_list(values, capacity, count, refused) }
    })
}

/// Ranks that a deadline has masked here, each with the call and its epoch; as `tokenyard_context_local_experts` gives
/// experts.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tokenyard_context_silent_ranks(
    context: Option<&tokenyard_context_t>,
    values: *mut tokenyard_rank_epoch_t,
    capacity: usize,
    count: *mut usize,
) -> tokenyard_status_t {
    guarded(|| {
        let silent = object("context", context)?.all.silent_ranks();
        let silent = silent.iter().map(|silent| {
            let call = match silent.call {
                "dispatch" => 1,
                "combine" => 2,
                _ => 3,
            };
            tokenyard_rank_epoch_t { epoch: silent.epoch, rank: silent.rank.0, call }
        });
        // SAFETY: the caller's pointers.
        unsafe { give_list(values, capacity, count, silent) }
    })
}

/// The ranks that calls of this rank go on without: int32 `[ranks]` in device memory, good as long as the context. An
/// entry that is not 0 masks its rank from the next call on, for good. Needs `missing_ranks`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tokenyard_context_rank_mask(
    context: Option<&tokenyard_context_t>,
    mask: *mut tokenyard_view_t,
) -> tokenyard_status_t {
    guarded(|| {
        let view = object("context", context)?.all.rank_mask()?;
        // SAFETY: the caller's pointer.
        unsafe { write("mask", mask, tokenyard_view_t::of(&view)) }
    })
}

/// Masks a rank, by its number in the first generation; also while a call waits for it. Needs `missing_ranks`.
#[unsafe(no_mangle)]
pub extern "C" fn tokenyard_context_mask_rank(context: Option<&tokenyard_context_t>, rank: u32) -> tokenyard_status_t {
    guarded(|| object("context", context)?.all.mask_rank(Rank(rank)))
}

/// The in-place output in the arena, to which every dispatch of a context with `in_place_rows` writes. Its rows stay
/// until the next dispatch begins, and the memory as long as the context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tokenyard_context_in_place(
    context: Option<&tokenyard_context_t>,
    output: *mut tokenyard_in_place_t,
) -> tokenyard_status_t {
    guarded(|| {
        let Some(own) = object("context", context)?.all.in_place() else {
            let advice = "build it with in_place_rows of tokenyard_tuning_t";
            return Err(Error::argument("context", "without in-place output", advice));
        };
        let value = tokenyard_in_place_t {
            size: 0,
            reserved: 0,
            layout: tokenyard_layout_t::of(own.layout),
            rows: tokenyard_view_t::of(&own.rows),
            pitch_bytes: own.pitch_bytes,
            scales: own.scales.as_ref().map_or(tokenyard_view_t::NONE, tokenyard_view_t::of),
        };
        // SAFETY: the caller's pointer.
        unsafe { write_struct("output", output, value) }
    })
}

/// Tokens of each source that a dispatch sent to each destination, `[source][destination]` in `matrix`, which has room
/// for `count` numbers, the square of the number of ranks. For tests and tools. Collective; the streams have passed the
/// dispatch.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tokenyard_context_row_matrix(
    context: Option<&tokenyard_context_t>,
    handle: Option<&tokenyard_handle_t>,
    matrix: *mut usize,
    count: usize,
) -> tokenyard_status_t {
    guarded(|| {
        let (context, handle) = (object("context", context)?, object("handle", handle)?);
        // Of a copy: an all-gather of the caller's may use the handle.
        let handle = handle.0.with("handle", |handle| Ok(handle.clone()))?;
        let rows = context.all.row_matrix(&handle)?;
        let cells: Vec<usize> = rows.into_iter().flatten().collect();
        if count != cells.len() {
            let advice = format!("give {}, the square of the number of ranks", cells.len());
            return Err(Error::argument("count", count, advice));
        }
        // SAFETY: the caller's pointer.
        unsafe { list_mut("matrix", matrix, count)? }.copy_from_slice(&cells);
        Ok(())
    })
}
