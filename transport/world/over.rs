//! A world over an all-gather that the caller has already, as of torch.distributed, MPI or NCCL.
//!
//! Place in the data path: none. Runs on the callers, and waits in the caller's all-gather alone. It has no thread and
//! no sockets, so nobody notices who has died. The all-gather's results are not trusted: every part begins with a
//! head that names its rank, world and step.
//!
//! ```text
//!  0      3 4     5 6     7 8         11 12        15 16        19 20          27 28
//! +--------+-------+-------+------------+------------+------------+--------------+------ - -+-------- - -
//! | "TKYG" |version| name  | rank       | world      | generation | number of    | name     | payload
//! |        |       | bytes |            |            |            | the step     |          |
//! +--------+-------+-------+------------+------------+------------+--------------+------ - -+-------- - -
//! ```

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use super::collective::Failure;
use super::names::Names;
use super::socket_thread::Exclusive;
use crate::base::{Error, Rank, Result, quoted};

const MAGIC: [u8; 4] = *b"TKYG";
const VERSION: u16 = 1;
const HEAD_BYTES: usize = 28;
const ADVICE: &str =
    "see that all ranks give an all-gather of the same group, and call the same collectives in the same order";

/// The caller's own all-gather, over which a [`World`](super::World) can run: every engine has one. All ranks give an
/// all-gather of the same group, in which they have the same ranks.
///
/// Closures implement it: `|what: &str, own: &[u8], timeout: Duration| -> Result<Vec<Vec<u8>>>`.
pub trait AllGather: Send + Sync {
    /// Collective of all ranks: each rank's `own`, by rank. Lengths differ between ranks and may be 0, so an all-gather
    /// of equal lengths has to gather the lengths first. `what` names the step, for messages.
    ///
    /// A rank makes one call at a time, from whichever thread calls the library. A world makes calls only in its own
    /// collectives and in calls documented as collective, such as building a context.
    ///
    /// The implementation keeps the deadline: the library waits in this call without a deadline of its own. An
    /// implementation with its own wait loop polls [`Interrupt::is_due`](crate::Interrupt::is_due), too.
    ///
    /// # Errors
    /// The implementation's own, as from [`Error::bootstrap`] or [`Error::interrupted`]. The caller gets them as fatal
    /// ([`Error::is_fatal`]), since the world's collectives have ended on this rank.
    fn all_gather(&self, what: &str, own: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>>;
}

impl<F> AllGather for F
where
    F: Fn(&str, &[u8], Duration) -> Result<Vec<Vec<u8>>> + Send + Sync,
{
    fn all_gather(&self, what: &str, own: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        self(what, own, timeout)
    }
}

/// One rank's use of its all-gather.
pub(super) struct Over {
    gather: Box<dyn AllGather>,
    rank: Rank,
    names: Names,
    generation: u32,
    exclusive: Exclusive,
    seq: AtomicU64,
    /// Why no collective can succeed any more.
    failure: Mutex<Option<Failure>>,
}

/// The head of a part.
#[derive(PartialEq, Eq)]
struct Head<'a> {
    version: u16,
    rank: u32,
    world: u32,
    generation: u32,
    seq: u64,
    what: &'a [u8],
}

impl<'a> Head<'a> {
    fn encode(&self, payload: &[u8]) -> Vec<u8> {
        let name_bytes = self.what.len() as u16;
        [
            &MAGIC[..],
            &self.version.to_le_bytes(),
            &name_bytes.to_le_bytes(),
            &self.rank.to_le_bytes(),
            &self.world.to_le_bytes(),
            &self.generation.to_le_bytes(),
            &self.seq.to_le_bytes(),
            self.what,
            payload,
        ]
        .concat()
    }

    /// The head, and where the payload begins; `None` if the part has no valid head.
    fn decode(part: &'a [u8]) -> Option<(Head<'a>, usize)> {
        let (magic, rest) = part.split_first_chunk::<4>()?;
        let (version, rest) = rest.split_first_chunk::<2>()?;
        let (name_bytes, rest) = rest.split_first_chunk::<2>()?;
        let (rank, rest) = rest.split_first_chunk::<4>()?;
        let (world, rest) = rest.split_first_chunk::<4>()?;
        let (generation, rest) = rest.split_first_chunk::<4>()?;
        let (seq, rest) = rest.split_first_chunk::<8>()?;
        let name_bytes = usize::from(u16::from_le_bytes(*name_bytes));
        let head = Head {
            version: u16::from_le_bytes(*version),
            rank: u32::from_le_bytes(*rank),
            world: u32::from_le_bytes(*world),
            generation: u32::from_le_bytes(*generation),
            seq: u64::from_le_bytes(*seq),
            what: rest.get(..name_bytes)?,
        };
        (*magic == MAGIC).then_some((head, HEAD_BYTES + name_bytes))
    }
}

impl Over {
    pub(super) fn new(gather: Box<dyn AllGather>, rank: Rank, names: Names, generation: u32) -> Over {
        let (exclusive, seq, failure) = (Exclusive::default(), AtomicU64::new(0), Mutex::new(None));
        Over { gather, rank, names, generation, exclusive, seq, failure }
    }

    /// All ranks' payloads, by rank.
    pub(super) fn gather(&self, what: &'static str, payload: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        let _exclusive = self.exclusive.take(what, timeout)?;
        if let Some(failure) = &*self.failure.lock().unwrap_or_else(PoisonError::into_inner) {
            return Err(failure.ending());
        }
        let outcome = self.round(what, payload, timeout).map_err(Error::ending);
        if let Err(error) = &outcome {
            let what = format!("collective \"{what}\" failed ({error}), and with it all later ones");
            self.fail(Failure::new(what, "form a new world"));
        }
        outcome
    }

    fn round(&self, what: &'static str, payload: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        let seq = self.seq.fetch_add(1, Ordering::Relaxed);
        let own = self.head(self.rank.index(), seq, what);
        let mut parts = self.gather.all_gather(what, &own.encode(payload), timeout)?;
        let fail = |problem| Err(Failure::new(format!("collective \"{what}\": {problem}"), ADVICE).error());
        let world = self.names.size();
        if parts.len() != world {
            return fail(format!("the all-gather gave {} parts for {world} ranks", parts.len()));
        }
        for (rank, part) in parts.iter_mut().enumerate() {
            let begin = match Head::decode(part) {
                Some((head, begin)) if head == self.head(rank, seq, what) => begin,
                Some((head, _)) => return fail(self.misfit(rank, seq, &head)),
                None => {
                    let (bytes, name) = (part.len(), self.name(rank));
                    return fail(format!("{bytes} bytes that this library did not send are rank {name}'s part"));
                }
            };
            part.drain(..begin);
        }
        // It may be of another round with the same ranks and names.
        if parts.get(self.rank.index()).is_none_or(|part| part != payload) {
            return fail("this rank's own part came back with other bytes".into());
        }
        Ok(parts)
    }

    fn head(&self, rank: usize, seq: u64, what: &'static str) -> Head<'static> {
        let (world, generation) = (self.names.size() as u32, self.generation);
        let name = what.as_bytes();
        // As many bytes as the length field can count.
        let what = name.get(..usize::from(u16::MAX)).unwrap_or(name);
        Head { version: VERSION, rank: rank as u32, world, generation, seq, what }
    }

    fn name(&self, rank: usize) -> Rank {
        self.names.of(Rank(rank as u32))
    }

    /// The error text for a part that is not the part of `rank` in this round.
    fn misfit(&self, rank: usize, seq: u64, head: &Head<'_>) -> String {
        let Head { version, rank: theirs, world, generation, seq: number, what } = head;
        let (name, own, own_world) = (self.name(rank), self.names.of(self.rank), self.names.size());
        if *version != VERSION {
            return format!("rank {name} has version {version} of this protocol, and rank {own} has {VERSION}");
        }
        if (*world as usize, *generation) != (own_world, self.generation) {
            return format!(
                "rank {name} is of {world} ranks in generation {generation}, and rank {own} of {own_world} in \
                 generation {}",
                self.generation
            );
        }
        if *theirs as usize != rank {
            let theirs = self.name(*theirs as usize);
            return format!("the all-gather gave rank {theirs}'s part in the place of rank {name}'s");
        }
        let what = quoted(what);
        format!("rank {name} calls \"{what}\", its collective number {number}, during number {seq} of rank {own}")
    }

    fn fail(&self, failure: Failure) {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(failure);
    }
}

/// Checks what ranks must agree on when a world forms.
pub(super) fn check_terms(world: &super::World, what: &'static str) -> Result<()> {
    let own = format!("members {:?} of nodes {:?}", world.members(), world.family.first_nodes);
    let name = world.original(world.rank());
    // With the rank's own name: ranks that name other members count it differently.
    let all = world.all_gather(what, format!("rank {name} names {own}").as_bytes())?;
    match all.iter().find(|theirs| !theirs.ends_with(format!(" names {own}").as_bytes())) {
        None => Ok(()),
        Some(theirs) => Err(Error::bootstrap(
            format!("{}, and rank {name} {own}", quoted(theirs)),
            "name the same members on all ranks",
        )),
    }
}
