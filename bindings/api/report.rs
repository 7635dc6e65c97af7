//! Reads the device's reports in host memory: error records, as typed errors, and other ranks' refused dispatches.
//!
//! ```text
//!   ty_error_record [TY_RECORDS] │ uint64 [ranks]: the last dispatch that each other rank refused, 0 for none
//! ```

use crate::base::{Error, Rank, Result};
use crate::ffi::layout as raw;
use crate::kernels::{Device, HostBuffer};
use crate::transport::World;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Mutex, PoisonError};

/// The records of one context.
pub(crate) struct Reports {
    memory: HostBuffer,
    ranks: usize,
    given: Mutex<Given>,
}

/// What callers were given. Locked while one of them looks, so that an error is given once, and no caller goes on
/// beside one who is given what closed the context.
#[derive(Default)]
struct Given {
    /// Sequence of the newest error of each record.
    sequences: [u64; RECORDS],
    /// The error that closed the context.
    fatal: Option<Error>,
}

const DIRECTIONS: usize = raw::TY_CALL_DIRECTIONS as usize;
/// Records of errors that close a context follow the others, direction by direction.
const RECORDS: usize = raw::TY_RECORDS as usize;
const RECORDS_BYTES: usize = size_of::<raw::ty_error_record>() * RECORDS;

impl Reports {
    /// Reports of a world of `ranks` ranks; nothing is reported yet.
    ///
    /// # Errors
    /// As [`Device::alloc_host`].
    pub fn allocate(device: &Device, ranks: usize) -> Result<Reports> {
        let memory = device.alloc_host(RECORDS_BYTES + ranks * 8)?;
        Ok(Reports { memory, ranks, given: Mutex::default() })
    }

    /// Device address of the records.
    pub fn records_address(&self) -> u64 {
        self.memory.view().ptr()
    }

    /// Device address of the words about refused dispatches.
    pub fn refused_address(&self) -> u64 {
        self.memory.view().ptr() + RECORDS_BYTES as u64
    }

    /// Other ranks whose refusal to dispatch has arrived here, each with the last refused epoch.
    pub fn refused(&self) -> impl Iterator<Item = (Rank, u64)> {
        let words = self.memory.host_ptr().wrapping_byte_add(RECORDS_BYTES).cast::<u64>();
        let epochs = (0..self.ranks).map(move |rank| {
            // SAFETY: `ranks` words follow the records; they are 8-byte aligned, live as long as the buffer, and are
            // written atomically by the device.
            let epoch = unsafe { AtomicU64::from_ptr(words.add(rank)) }.load(Ordering::Relaxed);
            (Rank(rank as u32), epoch)
        });
        // No dispatch has the number 0.
        epochs.filter(|(_, epoch)| *epoch != 0)
    }

    /// Returns an unread error: first an error that closes the context, then direction by direction. An error that
    /// closed the context is returned every time, any other once; a record holds only its newest error. `own` is the
    /// reason why this rank's proxy cannot go on: it closes the context, too, and takes the place of a timeout that it
    /// caused. `lost` returns the other ranks that are lost, each with its cause.
    pub fn check(&self, world: &World, own: Option<Error>, lost: &dyn Fn() -> Vec<(Rank, String)>) -> Result<()> {
        let mut given = self.given.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(error) = &given.fatal {
            return Err(error.clone());
        }
        // An error that closes the context comes before all others.
        for number in (DIRECTIONS..RECORDS).chain(0..DIRECTIONS) {
            let Some(record) = self.read(number) else { continue };
            if given.sequences[number] == record.sequence {
                continue;
            }
            given.sequences[number] = record.sequence;
            let waited = matches!(record.kind, raw::TY_ERROR_TIMEOUT | raw::TY_ERROR_PEER_LOST);
            let error = own.clone().filter(|_| waited);
            let error = error.unwrap_or_else(|| describe(&record, number % DIRECTIONS, world, lost));
            if error.is_fatal() {
                given.fatal = Some(error.clone());
            }
            return Err(error);
        }
        given.fatal.clone_from(&own);
        own.map_or(Ok(()), Err)
    }

    /// One whole record; `None` while there is none or the device is writing it (a later read finds it).
    fn read(&self, number: usize) -> Option<raw::ty_error_record> {
        let record = self.memory.host_ptr().cast::<raw::ty_error_record>().cast_const();
        // SAFETY: the buffer holds RECORDS records; `number` is below that.
        let record = unsafe { record.add(number) };
        // SAFETY: the sequence is 8-byte aligned and lives as long as the buffer; the device writes it atomically.
        let sequence = unsafe { AtomicU64::from_ptr((&raw const (*record).sequence).cast_mut()) };
        let before = sequence.load(Ordering::Acquire);
        if before == 0 || before % 2 == 1 {
            return None;
        }
        // SAFETY: inside the buffer; a copy torn by a concurrent write is thrown away below.
        let mut copy = unsafe { record.read_volatile() };
        fence(Ordering::Acquire);
        copy.sequence = before;
        (sequence.load(Ordering::Relaxed) == before).then_some(copy)
    }
}

fn site_name(site: u32) -> &'static str {
    match site {
        raw::TY_SITE_METADATA => "routing metadata",
        raw::TY_SITE_ROW => "a dispatched row",
        raw::TY_SITE_COMBINE_FLAG => "the combine flag",
        raw::TY_SITE_PARTIAL => "a partial row",
        raw::TY_SITE_BARRIER => "the barrier flag",
        raw::TY_SITE_ARRIVED => "a chunk from another node",
        raw::TY_SITE_STAGING => "wire staging that the network still reads",
        raw::TY_SITE_FREE => "the free flag of a receive buffer",
        raw::TY_SITE_TILE => "routing metadata of earlier tokens",
        raw::TY_SITE_AHEAD_WEIGHTS => "weights sent ahead",
        _ => "an unknown wait",
    }
}

fn describe(
    record: &raw::ty_error_record,
    direction: usize,
    world: &World,
    lost: &dyn Fn() -> Vec<(Rank, String)>,
) -> Error {
    let rank = world.original(world.rank());
    // The proxy numbers ranks as in the first generation, kernels as in this one.
    let peer = match record.kind {
        raw::TY_ERROR_PEER_LOST => Rank(record.peer),
        _ => world.original(Rank(record.peer)),
    };
    let epoch = record.epoch;
    let routing = |problem| Error::Routing { rank, epoch, problem };
    match record.kind {
        raw::TY_ERROR_ROUTING_RANGE => routing(format!(
            "choice {} of token {} names expert {}, which does not exist (-1 means none)",
            record.b, record.a, record.c as i64
        )),
        raw::TY_ERROR_ROUTING_DUPLICATE => {
            let (choice, token, expert) = (record.b, record.a, record.c as i64);
            let problem = format!("choice {choice} of token {token} names expert {expert} a second time");
            routing(format!("{problem}, which a context with duplicates allows"))
        }
        raw::TY_ERROR_TOKEN_COUNT => {
            routing(format!("the device's token count is {}, allowed are 0 to {}", record.a as i64, record.b))
        }
        raw::TY_ERROR_OTHER_COUNT => routing(format!(
            "the call has {} tokens, and the handle's dispatch had {}, as it must",
            record.a as i64, record.b
        )),
        raw::TY_ERROR_CAPACITY => {
            let what = match record.c as u32 {
                raw::TY_LAYOUT_CONTIGUOUS => "the contiguous output",
                raw::TY_LAYOUT_MASKED => "the fullest expert of the masked output",
                _ => "the token output",
            };
            Error::Capacity { rank, epoch, what, needed: record.a, given: record.b }
        }
        raw::TY_ERROR_INCOMPLETE => Error::Incomplete { rank, epoch, peer },
        raw::TY_ERROR_ORDER => {
            let fatal = record.a as u32 == raw::TY_ORDER_ROUND;
            Error::Order { rank, problem: order_problem(record), fatal }
        }
        raw::TY_ERROR_OVERLAP => Error::Order { rank, problem: overlap_problem(record), fatal: true },
        raw::TY_ERROR_PAIRING => {
            let combines = direction == raw::TY_DIRECTION_COMBINE as usize;
            Error::Order { rank, problem: pairing_problem(record, combines, rank, peer), fatal: true }
        }
        raw::TY_ERROR_FORMAT => Error::Order { rank, problem: format_problem("dispatch", epoch, peer), fatal: true },
        raw::TY_ERROR_TIMEOUT => timeout(record, rank, peer, &lost(), other_cause(record.site, world.nodes().len())),
        raw::TY_ERROR_PEER_LOST => {
            let cause = lost().into_iter().find_map(|(gone, cause)| (gone == peer).then_some(cause));
            let cause = cause.unwrap_or_else(|| "as its proxy reports".to_owned());
            Error::PeerLost { rank, peer, cause, site: site_name(record.site), epoch }
        }
        other => Error::device(
            format!("error record {direction} has unknown kind {other}"),
            "kernels and library are of different builds; rebuild",
        )
        .ending(),
    }
}

/// Another cause of a timeout: another order of calls on the peer (rules 2 and 4 of the grammar). Between nodes,
/// combine-send waits for the combine-send of every rank of the node, and dispatch-receive waits for rows that ranks of
/// the node forward in their dispatch-receive.
fn other_cause(site: u32, nodes: usize) -> &'static str {
    match site {
        raw::TY_SITE_COMBINE_FLAG | raw::TY_SITE_METADATA | raw::TY_SITE_ROW if nodes > 1 => {
            "; all ranks must enqueue their calls on a stream in the same order, and all ranks of a node combine_send \
             and dispatch_recv"
        }
        raw::TY_SITE_COMBINE_FLAG
        | raw::TY_SITE_METADATA
        | raw::TY_SITE_ROW
        | raw::TY_SITE_PARTIAL
        | raw::TY_SITE_BARRIER
        | raw::TY_SITE_ARRIVED => "; all ranks must enqueue their calls on a stream in the same order",
        _ => "",
    }
}

/// A lost rank delays others, which then delay this one: the error names a lost rank even if the wait was for another.
fn timeout(
    record: &raw::ty_error_record,
    rank: Rank,
    waited_for: Rank,
    lost: &[(Rank, String)],
    advice: &'static str,
) -> Error {
    let (site, epoch) = (site_name(record.site), record.epoch);
    match lost.iter().find(|(gone, _)| *gone == waited_for).or(lost.first()) {
        Some((peer, cause)) => Error::PeerLost { rank, peer: *peer, cause: cause.clone(), site, epoch },
        None => Error::Timeout {
            rank,
            site,
            peer: waited_for,
            epoch,
            expected: record.a,
            seen: record.b,
            waited_ms: record.c / 1_000_000,
            advice,
        },
    }
}

fn overlap_problem(record: &raw::ty_error_record) -> String {
    let what = match record.a as u32 {
        raw::TY_DIRECTION_DISPATCH => "dispatch",
        raw::TY_DIRECTION_COMBINE => "combine",
        _ => "barrier",
    };
    let (sent, received) = (record.b, record.c);
    format!(
        "two launches of {what} ran at the same time ({what} {sent} was the last sent, {received} the last received), so \
         this context is closed; enqueue a context's calls, and graphs that hold them, on one stream, or order their \
         streams by events"
    )
}

fn format_problem(what: &str, number: u64, peer: Rank) -> String {
    format!(
        "{what} {number} has another format here than on rank {peer}, so this context is closed; all ranks must give a \
         call rows of the same format, dtype and hidden, quantised or not, the same weights and max_tokens, and the same \
         payload"
    )
}

/// Numbers of dispatches that differ by more than this are those of one dispatch, mixed with numbers of two formats.
const FAR: i32 = 1 << 20;

fn pairing_problem(record: &raw::ty_error_record, combines: bool, rank: Rank, peer: Rank) -> String {
    let (number, own) = (record.epoch, record.a);
    // The number with the peer's 31 low bits that is nearest to the own number.
    let ahead = ((record.b as u32).wrapping_sub(own as u32) << 1) as i32 >> 1;
    let theirs = own.wrapping_add_signed(ahead.into());
    // Where choices were given here, no dispatch later than this one was.
    let later = own == 0 && theirs > number + FAR as u64;
    let is_far = later || (own != 0 && record.b != 0 && !(-FAR..=FAR).contains(&ahead));
    if is_far {
        return format_problem(if combines { "combine" } else { "dispatch" }, number, peer);
    }
    if !combines {
        // No dispatch has the number 0.
        let of = |number: u64| match number {
            0 => "choices".to_owned(),
            number => format!("the handle of dispatch {number}"),
        };
        let theirs = if record.b == 0 { 0 } else { theirs };
        return format!(
            "dispatch {number} was given {} here and {} on rank {peer}, so this context is closed; all ranks must give \
             handles of the same dispatch, or all must give choices",
            of(own),
            of(theirs)
        );
    }
    if peer == rank {
        return format!(
            "the handle of combine {number}, whose dispatch was {own}, was dispatched into again before the combine was \
             over, so this context is closed; launch graphs that hold the dispatch after the combine"
        );
    }
    format!(
        "combine {number} was given the handle of dispatch {own} here and that of dispatch {theirs} on rank {peer}, so \
         this context is closed; all ranks must combine the same dispatches in the same order"
    )
}

fn order_problem(record: &raw::ty_error_record) -> String {
    let (sent, received) = (record.b, record.c);
    match record.a as u32 {
        raw::TY_ORDER_DISPATCH_SEND => format!("dispatch {sent} was sent and not received, so another cannot be sent"),
        raw::TY_ORDER_DISPATCH_RECEIVE => format!("dispatch {received} was the last sent, so none can be received"),
        raw::TY_ORDER_COMBINE_SEND => format!("combine {sent} was sent and not received, so another cannot be sent"),
        raw::TY_ORDER_COMBINE_RECEIVE => format!("combine {received} was the last sent, so none can be received"),
        raw::TY_ORDER_DISPATCH_CALL => format!(
            "dispatch {sent} was sent by another call than the one to be received; give dispatch_recv what dispatch_send \
             returned last, and launch graphs of halves as their calls were made"
        ),
        raw::TY_ORDER_COMBINE_CALL => format!(
            "combine {sent} was sent by another call than the one to be received; give combine_recv what combine_send \
             returned last, and launch graphs of halves as their calls were made"
        ),
        raw::TY_ORDER_ROUND => {
            format!("launch {sent} was not the last of its call, and one has failed")
        }
        raw::TY_ORDER_HANDLE_INCOMPLETE => {
            "a dispatch was given the handle of one whose output was too small, so no row \
                                            was placed; give a handle whose dispatch had room"
                .to_owned()
        }
        _ => "a combine, or a dispatch again, was given a handle whose dispatch has not been received".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Writes a record as a device does.
    fn write(reports: &Reports, number: usize, kind: u32) {
        write_with(reports, number, kind, 0);
    }

    fn write_with(reports: &Reports, number: usize, kind: u32, a: u32) {
        let record = reports.memory.host_ptr().cast::<raw::ty_error_record>().wrapping_add(number);
        // SAFETY: the buffer holds RECORDS records, `number` is below that, and nothing else looks at them meanwhile.
        unsafe { record.write(raw::ty_error_record { sequence: 2, kind, a: a.into(), ..Default::default() }) };
    }

    #[test]
    fn a_call_that_was_cut_short_is_named() {
        let round = raw::ty_error_record { a: raw::TY_ORDER_ROUND.into(), b: 7, c: 7, ..Default::default() };
        let problem = order_problem(&round);
        assert!(problem.contains("launch 7 ") && problem.contains("one has failed"), "{problem}");
    }

    #[test]
    fn launches_that_overlap_are_named_with_what_to_do() {
        let combine = raw::TY_DIRECTION_COMBINE.into();
        let problem = overlap_problem(&raw::ty_error_record { a: combine, b: 7, c: 6, ..Default::default() });
        let words = ["two launches of combine", "combine 7 was the last sent, 6 the", "closed", "by events"];
        words.iter().for_each(|word| assert!(problem.contains(word), "«{problem}» lacks «{word}»"));
    }

    #[test]
    fn dispatches_that_do_not_pair_are_named_by_their_whole_numbers() {
        for (own, theirs) in
            [(1, 2), (2, 1), ((1 << 31) - 1, 1 << 31), (1 << 31, (1 << 31) - 1), ((5 << 31) + 9, 5 << 31)]
        {
            let record = raw::ty_error_record { epoch: 3, a: own, b: theirs & 0x7fff_ffff, ..Default::default() };
            let problem = pairing_problem(&record, true, Rank(0), Rank(4));
            let words = format!("the handle of dispatch {own} here and that of dispatch {theirs} on rank 4, so");
            assert!(problem.contains(&words), "«{problem}» lacks «{words}»");
        }
        let record = raw::ty_error_record { epoch: 3, a: 9, b: 8, ..Default::default() };
        assert!(pairing_problem(&record, true, Rank(4), Rank(4)).contains("dispatched into again"));
        let again = pairing_problem(&record, false, Rank(0), Rank(4));
        assert!(
            again.contains("dispatch 3 was given the handle of dispatch 9 here") && again.contains("dispatch 8 on")
        );
        let record = raw::ty_error_record { epoch: 3, a: 0, b: 8, ..Default::default() };
        let mixed = pairing_problem(&record, false, Rank(0), Rank(4));
        assert!(mixed.contains("given choices here and the handle of dispatch 8 on rank 4"), "{mixed}");
        let record = raw::ty_error_record { epoch: 3, a: 9, b: 0, ..Default::default() };
        assert!(pairing_problem(&record, false, Rank(0), Rank(4)).contains("dispatch 9 here and choices on rank 4"));
    }

    #[test]
    fn an_error_that_closed_the_context_is_returned_every_time_and_before_any_other() {
        let world = World::threads(1).unwrap().remove(0);
        let reports = Reports::allocate(&Device::cpu().unwrap(), 1).unwrap();
        let check = || reports.check(&world, None, &Vec::new);
        check().unwrap();
        let combine = raw::TY_DIRECTION_COMBINE as usize;
        write(&reports, combine, raw::TY_ERROR_INCOMPLETE);
        write(&reports, DIRECTIONS + combine, raw::TY_ERROR_TIMEOUT);
        for _ in 0..3 {
            assert!(matches!(check(), Err(Error::Timeout { .. })));
        }
    }

    #[test]
    fn a_call_that_stays_unfinished_closes_the_context_and_any_other_mistake_in_order_does_not() {
        let world = World::threads(1).unwrap().remove(0);
        for (kind, a, closes) in [
            (raw::TY_ERROR_ORDER, raw::TY_ORDER_ROUND, true),
            (raw::TY_ERROR_ORDER, raw::TY_ORDER_DISPATCH_SEND, false),
            (raw::TY_ERROR_OVERLAP, raw::TY_DIRECTION_DISPATCH, true),
            (raw::TY_ERROR_PAIRING, 1, true),
        ] {
            let reports = Reports::allocate(&Device::cpu().unwrap(), 1).unwrap();
            write_with(&reports, 0, kind, a);
            let check = || reports.check(&world, None, &Vec::new);
            assert_eq!(
                check().map_err(|error| (error.is_fatal(), matches!(error, Error::Order { .. }))),
                Err((closes, true))
            );
            assert_eq!(check().is_err(), closes);
        }
    }

    #[test]
    fn an_error_that_a_context_survives_is_returned_once() {
        let world = World::threads(1).unwrap().remove(0);
        let reports = Reports::allocate(&Device::cpu().unwrap(), 1).unwrap();
        write(&reports, raw::TY_DIRECTION_COMBINE as usize, raw::TY_ERROR_INCOMPLETE);
        assert!(matches!(reports.check(&world, None, &Vec::new), Err(Error::Incomplete { .. })));
        reports.check(&world, None, &Vec::new).unwrap();
    }

    /// The device writes while several threads look: each error that one of them is given is another one.
    #[test]
    fn threads_that_look_together_are_given_an_error_once() {
        const ERRORS: u64 = 20_000;
        let reports = Reports::allocate(&Device::cpu().unwrap(), 1).unwrap();
        let record = reports.memory.host_ptr().cast::<raw::ty_error_record>();
        // SAFETY: the buffer's first record, whose sequence is 8-byte aligned and lives as long as the buffer.
        let sequence = unsafe { AtomicU64::from_ptr(&raw mut (*record).sequence) };
        write(&reports, 0, raw::TY_ERROR_CAPACITY);
        let (reports, given) = (&reports, &AtomicU64::new(0));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                let world = World::threads(1).unwrap().remove(0);
                scope.spawn(move || {
                    let mut over = false;
                    while !over {
                        over = sequence.load(Ordering::Relaxed) == 2 * ERRORS;
                        given.fetch_add(u64::from(reports.check(&world, None, &Vec::new).is_err()), Ordering::Relaxed);
                    }
                });
            }
            for number in 2..=ERRORS {
                sequence.store(2 * number, Ordering::Release);
                std::thread::yield_now();
            }
        });
        let given = given.load(Ordering::Relaxed);
        assert!((1..=ERRORS).contains(&given), "{given} errors of {ERRORS}");
    }

    #[test]
    fn the_end_of_the_own_proxy_is_returned_and_no_peer_blamed() {
        let world = World::threads(1).unwrap().remove(0);
        let ended = Error::transport("gone", "restart").ending();
        let lost = || vec![(Rank(0), "which is slow".to_owned())];
        for kind in [raw::TY_ERROR_TIMEOUT, raw::TY_ERROR_PEER_LOST] {
            let reports = Reports::allocate(&Device::cpu().unwrap(), 1).unwrap();
            write(&reports, DIRECTIONS, kind);
            assert_eq!(reports.check(&world, Some(ended.clone()), &lost), Err(ended.clone()));
            assert_eq!(reports.check(&world, None, &lost), Err(ended.clone()), "the context is closed");
        }
        // Also before any call waited for the proxy; an error that a context survives comes first.
        let reports = Reports::allocate(&Device::cpu().unwrap(), 1).unwrap();
        write(&reports, 0, raw::TY_ERROR_INCOMPLETE);
        assert!(matches!(reports.check(&world, Some(ended.clone()), &lost), Err(Error::Incomplete { .. })));
        assert_eq!(reports.check(&world, Some(ended.clone()), &lost), Err(ended.clone()));
        assert_eq!(reports.check(&world, None, &lost), Err(ended));
    }

    #[test]
    fn a_lost_peer_is_named_with_its_cause() {
        let world = World::threads(1).unwrap().remove(0);
        let lost = || vec![(Rank(3), "which left".to_owned()), (Rank(0), "which is slow".to_owned())];
        for (kind, waited_for, expected) in [
            (raw::TY_ERROR_TIMEOUT, 0, "lost rank 0, which is slow, "),
            (raw::TY_ERROR_PEER_LOST, 3, "lost rank 3, which left, "),
        ] {
            let record = raw::ty_error_record { kind, peer: waited_for, ..Default::default() };
            let text = describe(&record, 0, &world, &lost).to_string();
            assert!(text.contains(expected), "{text}");
        }
        let text = timeout(&raw::ty_error_record::default(), Rank(0), Rank(7), &lost(), "").to_string();
        assert!(text.contains("lost rank 3, which left, "), "a lost rank delays the others: {text}");
    }
}
