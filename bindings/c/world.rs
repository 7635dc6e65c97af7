//! Worlds: the ranks of a job, and all-gathers of the caller.
//!
//! Place in the data path: none. On the caller's thread, and waits with the world's deadline.

use super::arguments::{Out, Versioned, give_list, list, list_mut, make, object, read, reserved, text, write_struct};
use super::status::{c_string, destroy, guarded, tokenyard_status_t};
use super::values::{length, milliseconds};
use crate::base::{Error, Rank, Result};
use crate::transport::world::bootstrap::{DEFAULT_PORT, DEFAULT_TIMEOUT};
use crate::transport::{AllGather, Bootstrap, World};
use std::ffi::{c_char, c_void};
use std::time::Duration;

/// Most bytes that an all-gather of the caller's is asked for in one call.
const MOST_GATHERED: usize = 1 << 30;

/// A rank's membership in a world. Several threads may use it; collectives are made one at a time.
pub struct tokenyard_world_t(pub(super) World);

/// The caller's own all-gather of equal lengths: puts `bytes` bytes from `mine` of each rank into `all`, by rank, and
/// returns 0. Any other value is a failure, and ends the world's collectives. `what` names the step. The function keeps
/// the deadline `timeout_ms` itself, and throws nothing. One thread at a time calls it, whichever calls the library.
pub type tokenyard_all_gather_t = Option<
    unsafe extern "C" fn(
        user: *mut c_void,
        what: *const c_char,
        mine: *const c_void,
        bytes: usize,
        all: *mut c_void,
        timeout_ms: u64,
    ) -> i32,
>;

/// A function that is called with `user` once the library does not need it any more.
pub type tokenyard_release_t = Option<unsafe extern "C" fn(user: *mut c_void)>;

/// A world over the caller's all-gather; see `tokenyard_world_over`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct tokenyard_over_t {
    /// Bytes of this struct.
    pub size: u32,
    /// This rank.
    pub rank: u32,
    /// Number of ranks.
    pub ranks: u32,
    /// Index of this rank on its host, plus 1; 0: as `rank`.
    pub local_rank_plus_1: u32,
    /// The all-gather of these ranks.
    pub all_gather: tokenyard_all_gather_t,
    /// Is called when the world and all its contexts are gone, or if the world is not formed; not where the function
    /// that was given this struct returns `TOKENYARD_INVALID_ARGUMENT`. May be NULL.
    pub release: tokenyard_release_t,
    /// What both functions are called with; any thread may call them.
    pub user: *mut c_void,
}

// SAFETY: a C struct that begins with its size; NULL is a value of its pointers.
unsafe impl Versioned for tokenyard_over_t {
    const FIRST: usize = 40;
}

/// A process's place in a job, stated by the caller instead of the environment; see `tokenyard_world_join`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct tokenyard_bootstrap_t {
    /// Bytes of this struct.
    pub size: u32,
    /// This rank.
    pub rank: u32,
    /// Number of ranks.
    pub ranks: u32,
    /// Index of this rank on its host.
    pub local_rank: u32,
    /// Name or address of rank 0's host; NULL: 127.0.0.1.
    pub address: *const c_char,
    /// Secret of the job, the same on all ranks; NULL on one host: a secret file of the user takes its place.
    pub token: *const c_char,
    /// Name or address of this host for the other ranks; NULL: as its connection reaches rank 0.
    pub own_address: *const c_char,
    /// Deadline for the world to form and for each collective; 0: 30 s.
    pub timeout_ms: u64,
    /// Port on which rank 0 listens; 0: 29611.
    pub port: u32,
    /// 0.
    pub reserved: u32,
}

// SAFETY: as above.
unsafe impl Versioned for tokenyard_bootstrap_t {
    const FIRST: usize = 56;
}

/// What a world is; see `tokenyard_world_info`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct tokenyard_world_info_t {
    /// Bytes of this struct, which the caller sets.
    pub size: u32,
    /// This rank.
    pub rank: u32,
    /// Number of ranks.
    pub ranks: u32,
    /// Index of this rank on its host.
    pub local_rank: u32,
    /// How often the job has regrouped.
    pub generation: u32,
    /// This rank in the first generation.
    pub first_rank: u32,
    /// Ranks of the first generation.
    pub first_ranks: u32,
    /// Number of nodes.
    pub nodes: u32,
}

// SAFETY: as above.
unsafe impl Versioned for tokenyard_world_info_t {
    const FIRST: usize = 32;
}

/// The all-gather of a caller in C.
struct Gather {
    all_gather: unsafe extern "C" fn(*mut c_void, *const c_char, *const c_void, usize, *mut c_void, u64) -> i32,
    release: tokenyard_release_t,
    user: *mut c_void,
    rank: usize,
    ranks: usize,
}

// SAFETY: any thread may call the functions with `user` (tokenyard_over_t).
unsafe impl Send for Gather {}
// SAFETY: as above; the world makes one call at a time.
unsafe impl Sync for Gather {}

impl Drop for Gather {
    fn drop(&mut self) {
        if let Some(release) = self.release {
            // SAFETY: the caller's function, which is called once, last.
            unsafe { release(self.user) }
        }
    }
}

impl Gather {
    /// # Errors
    /// `Argument` without a function. What was given is not released then.
    fn of(over: &tokenyard_over_t) -> Result<Gather> {
        let Some(all_gather) = over.all_gather else {
            return Err(Error::argument("all_gather", "NULL", "give a function"));
        };
        let tokenyard_over_t { release, user, rank, ranks, .. } = *over;
        Ok(Gather { all_gather, release, user, rank: rank as usize, ranks: ranks as usize })
    }

    /// Each rank's `mine`, all of one length, one after the other.
    fn equal(&self, what: &str, mine: &[u8], timeout: Duration) -> Result<Vec<u8>> {
        let bytes = mine.len().checked_mul(self.ranks).filter(|bytes| *bytes <= MOST_GATHERED);
        let Some(bytes) = bytes else {
            let what = format!("\"{what}\" asks for {} bytes of each of {} ranks", mine.len(), self.ranks);
            return Err(Error::bootstrap(what, "see that all ranks give an all-gather of the same group"));
        };
        let (mut all, name) = (vec![0u8; bytes], c_string(what));
        let timeout_ms = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
        // SAFETY: the caller's function, with memory of the lengths that it is given.
        let status = unsafe {
            let (mine, all) = (mine.as_ptr().cast(), all.as_mut_ptr().cast());
            (self.all_gather)(self.user, name.as_ptr(), mine, bytes / self.ranks.max(1), all, timeout_ms)
        };
        if status == 0 {
            return Ok(all);
        }
        let what = format!("the caller's all-gather of \"{what}\" returned {status}");
        Err(Error::bootstrap(what, "see why it failed, and form a new world"))
    }
}

impl AllGather for Gather {
    fn all_gather(&self, what: &str, own: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        let lengths = self.equal(what, &(own.len() as u64).to_ne_bytes(), timeout)?;
        let lengths = lengths.as_chunks::<8>().0.iter().map(|length| u64::from_ne_bytes(*length));
        let lengths: Vec<usize> = lengths.map(|length| usize::try_from(length).unwrap_or(usize::MAX)).collect();
        let most = lengths.iter().copied().max().unwrap_or(0);
        if lengths.get(self.rank) != Some(&own.len()) || most > MOST_GATHERED / self.ranks.max(1) {
            let what = format!("the caller's all-gather of \"{what}\" gave the lengths {lengths:?}");
            let advice = format!("rank {} has {} bytes; see that parts lie by rank", self.rank, own.len());
            return Err(Error::bootstrap(what, advice));
        }
        if most == 0 {
            return Ok(vec![Vec::new(); self.ranks]);
        }
        let mut mine = own.to_vec();
        mine.resize(most, 0);
        let all = self.equal(what, &mine, timeout)?;
        Ok(all.chunks(most).zip(lengths).map(|(part, length)| part.iter().copied().take(length).collect()).collect())
    }
}

/// Joins the job that the environment describes: RANK, WORLD_SIZE, LOCAL_RANK and MASTER_ADDR, as torchrun sets them,
/// and TOKENYARD_*. Returns when all ranks have joined, or an error on each within the deadline.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tokenyard_world_from_env(world: *mut *mut tokenyard_world_t) -> tokenyard_status_t {
    guarded(|| {
        // SAFETY: the caller's pointer.
        let out = unsafe { Out::new("world", world)? };
        out.give(tokenyard_world_t(World::from_env()?));
        Ok(())
    })
}

/// Joins the job that `bootstrap` describes, in one node.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tokenyard_world_join(
    bootstrap: *const tokenyard_bootstrap_t,
    world: *mut *mut tokenyard_world_t,
) -> tokenyard_status_t {
    guarded(|| {
        // SAFETY: the caller's pointer.
        let out = unsafe { Out::new("world", world)? };
        // SAFETY: the caller's pointers, strings among them.
        let bootstrap = unsafe { place(&read("bootstrap", bootstrap)?)? };
        out.give(tokenyard_world_t(World::join(&bootstrap)?));
        Ok(())
    })
}

/// # Safety
/// Its strings are NULL or end with 0.
unsafe fn place(given: &tokenyard_bootstrap_t) -> Result<Bootstrap> {
    // SAFETY: as the caller says.
    let [addr, token, own_addr] = unsafe {
        [text("address", given.address)?, text("token", given.token)?, text("own_address", given.own_address)?]
    };
    reserved(given.reserved)?;
    let Ok(port) = u16::try_from(given.port) else {
        return Err(Error::argument("port", given.port, "give a port up to 65535, or 0 for 29611"));
    };
    Ok(Bootstrap {
        rank: Rank(given.rank),
        world: given.ranks as usize,
        local_rank: given.local_rank as usize,
        addr: addr.unwrap_or("127.0.0.1").to_owned(),
        port: if port == 0 { DEFAULT_PORT } else { port },
        token: token.unwrap_or("").to_owned(),
        timeout: milliseconds(given.timeout_ms).unwrap_or(DEFAULT_TIMEOUT),
        nodes: None,
        generation: 0,
        members: None,
        first_nodes: None,
        own_addr: own_addr.map(str::to_owned),
    })
}

/// `ranks` ranks in this process, by rank, in one node; each is to be used by a thread of its own. `worlds` has room
/// for as many.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tokenyard_world_threads(
    ranks: usize,
    worlds: *mut *mut tokenyard_world_t,
) -> tokenyard_status_t {
    guarded(|| {
        let made = World::threads(ranks)?;
        // SAFETY: the caller's pointers.
        let places = unsafe { list_mut("worlds", worlds, made.len())? };
        for (place, world) in places.iter_mut().zip(made) {
            *place = make(tokenyard_world_t(world));
        }
        Ok(())
    })
}

/// Collective: a world over the caller's own all-gather, as engines have one. Ranks of a node are processes (or
/// threads) of one host and user, each with its own device. Nobody watches the peers: a rank that has gone shows as an
/// error of the all-gather, or as the deadline of calls.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tokenyard_world_over(
    over: *const tokenyard_over_t,
    world: *mut *mut tokenyard_world_t,
) -> tokenyard_status_t {
    guarded(|| {
        // SAFETY: the caller's pointer.
        let out = unsafe { Out::new("world", world)? };
        // SAFETY: the caller's pointer.
        let over = unsafe { read("over", over)? };
        let gather = Gather::of(&over)?;
        let local_rank = length(over.local_rank_plus_1 as usize).map(|plus_1| plus_1 - 1);
        out.give(tokenyard_world_t(World::over(gather.rank, gather.ranks, local_rank, gather)?));
        Ok(())
    })
}

/// The world with nodes of `sizes` ranks, the same on all ranks: ranks of different nodes never map each other's
/// memory. The old object is as good as before.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tokenyard_world_with_nodes(
    world: Option<&tokenyard_world_t>,
    sizes: *const usize,
    count: usize,
    split: *mut *mut tokenyard_world_t,
) -> tokenyard_status_t {
    guarded(|| {
        // SAFETY: the caller's pointer.
        let out = unsafe { Out::new("split", split)? };
        let world = &object("world", world)?.0;
        at_most("nodes", count, world.size())?;
        // SAFETY: the caller's pointer.
        let sizes = unsafe { list("sizes", sizes, count)? };
        out.give(tokenyard_world_t(world.clone().with_nodes(sizes)?));
        Ok(())
    })
}

/// The same world, whose collectives have a deadline of `timeout_ms`, at least 1. One that passes ends the collectives
/// of all.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tokenyard_world_with_timeout(
    world: Option<&tokenyard_world_t>,
    timeout_ms: u64,
    other: *mut *mut tokenyard_world_t,
) -> tokenyard_status_t {
    guarded(|| {
        // SAFETY: the caller's pointer.
        let out = unsafe { Out::new("other", other)? };
        let Some(timeout) = milliseconds(timeout_ms) else {
            let advice = "give at least 1: a deadline that passes ends the collectives of all ranks";
            return Err(Error::argument("timeout_ms", 0, advice));
        };
        let world = object("world", world)?.0.clone().with_timeout(timeout);
        out.give(tokenyard_world_t(world));
        Ok(())
    })
}

/// Collective of `members` alone: the world of a later generation, without ranks that were lost. All members name the
/// same members, ranks of the first generation in ascending order. Contexts of older worlds then answer every call with
/// `TOKENYARD_GENERATION`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tokenyard_world_regroup(
    world: Option<&tokenyard_world_t>,
    generation: u32,
    members: *const u32,
    count: usize,
    regrouped: *mut *mut tokenyard_world_t,
) -> tokenyard_status_t {
    guarded(|| {
        // SAFETY: the caller's pointer.
        let out = unsafe { Out::new("regrouped", regrouped)? };
        let world = waiting(world)?;
        at_most("members", count, world.first_size())?;
        // SAFETY: the caller's pointer.
        let members = ranks(unsafe { list("members", members, count)? });
        out.give(tokenyard_world_t(world.regroup(generation, &members)?));
        Ok(())
    })
}

/// As `tokenyard_world_regroup`, over an all-gather of the members alone, in which a member's rank is its index in
/// `members`; `over->rank`, `ranks` and `local_rank_plus_1` are not read.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tokenyard_world_regroup_over(
    world: Option<&tokenyard_world_t>,
    generation: u32,
    members: *const u32,
    count: usize,
    over: *const tokenyard_over_t,
    regrouped: *mut *mut tokenyard_world_t,
) -> tokenyard_status_t {
    guarded(|| {
        // SAFETY: the caller's pointer.
        let out = unsafe { Out::new("regrouped", regrouped)? };
        let world = waiting(world)?;
        // SAFETY: the caller's pointer.
        let members = unsafe { list("members", members, count)? };
        // SAFETY: the caller's pointer.
        let over = unsafe { read("over", over)? };
        // From here on a failure releases what was given, and has another status than those before.
        let mut gather = Gather::of(&over)?;
        at_most("members", count, world.first_size())?;
        let members = ranks(members);
        let own = world.original(world.rank());
        gather.rank = members.iter().position(|member| *member == own).unwrap_or(0);
        gather.ranks = members.len();
        out.give(tokenyard_world_t(world.regroup_over(generation, &members, gather)?));
        Ok(())
    })
}

/// A world that a collective waits in: a copy, as a thread that cannot wait for it may destroy the object meanwhile.
pub(super) fn waiting(world: Option<&tokenyard_world_t>) -> Result<World> {
    object("world", world).map(|world| world.0.clone())
}

/// Refuses a list that is longer than any of its kind, before it is read.
fn at_most(name: &'static str, count: usize, ranks: usize) -> Result<()> {
    if count > ranks {
        return Err(Error::config(
            name,
            format!("{count} entries"),
            format!("give at most {ranks}, one for each rank"),
        ));
    }
    Ok(())
}

fn ranks(numbers: &[u32]) -> Vec<Rank> {
    numbers.iter().copied().map(Rank).collect()
}

/// What the world is.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tokenyard_world_info(
    world: Option<&tokenyard_world_t>,
    info: *mut tokenyard_world_info_t,
) -> tokenyard_status_t {
    guarded(|| {
        let world = &object("world", world)?.0;
        let value = tokenyard_world_info_t {
            size: 0,
            rank: world.rank().0,
            ranks: world.size() as u32,
            local_rank: world.local_rank() as u32,
            generation: world.generation(),
            first_rank: world.original(world.rank()).0,
            first_ranks: world.first_size() as u32,
            nodes: world.nodes().len() as u32,
        };
        // SAFETY: the caller's pointer.
        unsafe { write_struct("info", info, value) }
    })
}

/// By rank of this world, its rank in the first generation. `*count` is how many there are; the first `capacity` of
/// them go to `values`, which may be NULL if `capacity` is 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tokenyard_world_members(
    world: Option<&tokenyard_world_t>,
    values: *mut u32,
    capacity: usize,
    count: *mut usize,
) -> tokenyard_status_t {
    guarded(|| {
        let members = object("world", world)?.0.members().iter().map(|rank| rank.0);
        // SAFETY: the caller's pointers.
        unsafe { give_list(values, capacity, count, members) }
    })
}

/// Ranks of each node, as `tokenyard_world_members` gives members.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tokenyard_world_nodes(
    world: Option<&tokenyard_world_t>,
    values: *mut usize,
    capacity: usize,
    count: *mut usize,
) -> tokenyard_status_t {
    guarded(|| {
        // SAFETY: the caller's pointers.
        unsafe { give_list(values, capacity, count, object("world", world)?.0.nodes().iter().copied()) }
    })
}

/// Peers whose process has gone, as seen now, by their ranks in this world; as `tokenyard_world_members` gives members.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tokenyard_world_lost_peers(
    world: Option<&tokenyard_world_t>,
    values: *mut u32,
    capacity: usize,
    count: *mut usize,
) -> tokenyard_status_t {
    guarded(|| {
        let lost = object("world", world)?.0.lost_peers();
        // SAFETY: the caller's pointers.
        unsafe { give_list(values, capacity, count, lost.iter().map(|rank| rank.0)) }
    })
}

/// Collective: returns when all ranks have called it.
#[unsafe(no_mangle)]
pub extern "C" fn tokenyard_world_barrier(world: Option<&tokenyard_world_t>) -> tokenyard_status_t {
    guarded(|| waiting(world)?.barrier("barrier of the C interface"))
}

/// Collective: `bytes` bytes from `mine` of each rank into `all`, by rank; as many bytes on all ranks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tokenyard_world_all_gather(
    world: Option<&tokenyard_world_t>,
    mine: *const c_void,
    bytes: usize,
    all: *mut c_void,
) -> tokenyard_status_t {
    guarded(|| {
        let world = waiting(world)?;
        // SAFETY: the caller's pointer.
        let mine = unsafe { list("mine", mine.cast::<u8>(), bytes)? };
        let room = bytes.saturating_mul(world.size());
        if all.is_null() && room > 0 {
            return Err(Error::argument("all", "NULL", "give a valid pointer"));
        }
        let parts = world.all_gather("all-gather of the C interface", mine)?;
        // SAFETY: the caller's pointer; `mine` is not read any more.
        let all = unsafe { list_mut("all", all.cast::<u8>(), room)? };
        for (rank, (place, part)) in all.chunks_mut(bytes.max(1)).zip(&parts).enumerate() {
            if part.len() != place.len() {
                let value = format!("{} bytes, where rank {rank} has {}", place.len(), part.len());
                return Err(Error::argument("bytes", value, "give as many on all ranks"));
            }
            place.copy_from_slice(part);
        }
        Ok(())
    })
}

/// Destroys the object. The rank leaves the world once its contexts are destroyed, too. NULL is allowed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tokenyard_world_destroy(world: *mut tokenyard_world_t) {
    // SAFETY: the caller's pointer, of one of the functions above.
    unsafe { destroy(world) }
}
