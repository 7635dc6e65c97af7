//! One rank's proxy as contexts use it: they register their arena, connect to their peers, and open.
//!
//! Place in the data path: none; it sets up what `driver.rs` then runs. Calls are made on the caller's thread or host
//! fiber while a context is built or dropped; they wait through `base::wait`, with deadlines.
//!
//! ```text
//!  AllToAll::build ── register arena ─▶ gather addresses ─▶ connect to all peers ─▶ open ─▶ barrier ─▶ devices ring
//!  drop            ── close ─▶ until nothing of it is under way ─▶ take the arena back: late writes are dropped (P13)
//! ```

use super::cards::{PeerCard, card, read_cards, refusal_card};
use super::driver::{Clock, ContextMemory, Driver, Kept, ProxyThread, Remote, ThreadConfig, Words, system_clock};
use super::machine::{Cause, ContextConfig, Liveness, Machine, MachineConfig, Report};
use super::wire::{ContextIdx, Direction, Wire, WordCounts};
use crate::base::wait::uninterrupted;
use crate::base::{Error, Rank, Result, quoted, wait};
use crate::ffi::layout as raw;
use crate::kernels::{Device, DeviceBuffer, DeviceKind};
use crate::transport::World;
use crate::transport::memory::gdr::{self, GdrCopy};
use crate::transport::network::imm::{MAX_CONTEXTS, generation_bits};
use crate::transport::network::{DeviceNeeds, Limits, RegionId, Span, Transport};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Any network.
pub type AnyTransport = Box<dyn Transport>;

/// The configuration of a proxy.
#[derive(Debug, Clone, Copy, Default)]
pub struct ProxyConfig {
    /// When peers count as lost.
    pub liveness: Liveness,
    /// Where its thread runs.
    pub thread: ThreadConfig,
}

/// One rank's proxy. Clones share it; its thread ends when the last one and the last context that uses it are gone.
#[derive(Clone)]
pub struct Proxy {
    shared: Arc<Inner>,
}

struct Inner {
    remote: Remote<AnyTransport>,
    /// This rank, in the first generation.
    rank: Rank,
    /// Ranks of the first generation.
    ranks: usize,
    traits: Traits,
    contexts: Mutex<Contexts>,
    _thread: Option<ProxyThread<AnyTransport>>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.remote.stop();
        // Last: a logger may panic.
        log::info!(target: crate::base::targets::PROXY, "rank {}: ends, as nobody uses it any more", self.rank);
    }
}

impl std::fmt::Debug for Proxy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Proxy(rank {}, {} NICs)", self.shared.rank, self.shared.traits.nics)
    }
}

/// The loop of a proxy, for the caller to run: on a thread of its choice, or on a host fiber of a one-thread world.
pub struct ProxyLoop {
    driver: Driver<AnyTransport>,
}

impl ProxyLoop {
    /// Runs until the proxy's last handle is dropped. When there is nothing to do, calls `idle`, which may make
    /// something happen, as letting virtual time pass, and returns whether it did; then lets others run.
    pub fn run(self, mut idle: impl FnMut() -> bool) {
        let mut driver = self.driver;
        let mut polls = 0u32;
        while !driver.is_stopped() {
            let progress = driver.poll_once() || idle();
            polls = if progress { 0 } else { polls.saturating_add(1).max(1) };
            wait::relax("proxy", polls);
        }
        driver.finish();
    }
}

impl Proxy {
    /// Starts a proxy on its own thread.
    ///
    /// # Errors
    /// `Config` for a world that is too large or a core that cannot be had; `Device` if the system cannot start a
    /// thread.
    pub fn spawn(world: &World, transport: AnyTransport, config: ProxyConfig) -> Result<Proxy> {
        let traits = Traits::of(&*transport);
        let driver = driver(world, transport, config.liveness, system_clock())?;
        let thread = ProxyThread::spawn(driver, config.thread)?;
        Ok(Proxy::new(world, thread.remote().clone(), traits, Some(thread)))
    }

    /// A proxy whose loop the caller runs, and whose time is the caller's.
    ///
    /// # Errors
    /// `Config` for a world that is too large.
    pub fn with_loop(
        world: &World,
        transport: AnyTransport,
        liveness: Liveness,
        clock: Clock,
    ) -> Result<(Proxy, ProxyLoop)> {
        let traits = Traits::of(&*transport);
        let driver = driver(world, transport, liveness, clock)?;
        Ok((Proxy::new(world, driver.remote(), traits, None), ProxyLoop { driver }))
    }

    fn new(
        world: &World,
        remote: Remote<AnyTransport>,
        traits: Traits,
        thread: Option<ProxyThread<AnyTransport>>,
    ) -> Proxy {
        let contexts = Mutex::default();
        let (rank, ranks) = (world.original(world.rank()), world.first_size());
        let Traits { nics, limits, needs } = &traits;
        log::info!(target: crate::base::targets::PROXY, "rank {rank}: started, {nics} NICs, {limits:?}, {needs:?}");
        Proxy { shared: Arc::new(Inner { remote, rank, ranks, traits, contexts, _thread: thread }) }
    }

    /// Refuses a world in which this is another rank's proxy.
    ///
    /// # Errors
    /// `Config` with both ranks and worlds.
    pub(crate) fn check_world(&self, world: &World) -> Result<()> {
        let (own, ranks) = (world.original(world.rank()), world.first_size());
        let Inner { rank, ranks: others, .. } = &*self.shared;
        if (*rank, *others) == (own, ranks) {
            return Ok(());
        }
        let advice =
            format!("this is rank {own} of {ranks}: give each rank the proxy that was started for its own world");
        Err(Error::config("proxy", format!("that of rank {rank} of {others}"), advice))
    }

    /// NICs of this rank.
    pub fn nics(&self) -> u8 {
        self.shared.traits.nics
    }

    /// What its transport needs of GPUs.
    pub fn device_needs(&self) -> DeviceNeeds {
        self.shared.traits.needs
    }

    /// The limits of its transport; all contexts share them.
    pub fn limits(&self) -> Limits {
        self.shared.traits.limits
    }

    /// Receives per NIC for each context if there are as many contexts as possible.
    pub(crate) fn receives_of_a_context(&self) -> usize {
        self.limits().receives as usize / MAX_CONTEXTS
    }

    /// The handle for requests to the driver, which is internal, and for its reports.
    #[doc(hidden)]
    pub fn remote(&self) -> &Remote<AnyTransport> {
        &self.shared.remote
    }

    /// This rank's offer of numbers for a context of `generation`, from which all ranks choose one.
    pub(crate) fn offer(&self, generation: u32) -> Offer {
        let leaving = self.contexts().leaving();
        let gone = self.remote().ask(move |driver| {
            let freed = driver.take_back();
            // Entering a generation completes all writes of earlier ones.
            let resets = driver.generation() != generation;
            let gone = leaving.into_iter().filter(|region| resets || !driver.is_registered(*region));
            (gone.collect::<Vec<_>>(), freed)
        });
        let mut contexts = self.contexts();
        if let Ok((gone, _freed)) = gone {
            contexts.have_left(&gone);
        }
        contexts.offer()
    }

    /// Takes the number that ranks agreed on, and what a context over this wire needs of the transport.
    pub(crate) fn take_number(&self, agreed: Offer, wire: &Wire) -> Result<Number> {
        let (limits, needs) = (self.limits(), Needs::of(wire, self.shared.rank));
        let mut contexts = self.contexts();
        let index = contexts.admit(agreed, &limits, needs)?;
        Ok(Number { proxy: self.clone(), index, region: None })
    }

    fn contexts(&self) -> MutexGuard<'_, Contexts> {
        self.shared.contexts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A context's number, until dropped.
pub(crate) struct Number {
    proxy: Proxy,
    pub index: ContextIdx,
    /// The region that its writes come from, once it is registered.
    region: Option<RegionId>,
}

impl Drop for Number {
    fn drop(&mut self) {
        self.proxy.contexts().let_go(self.index, self.region);
    }
}

/// A context's needs of the transport.
#[derive(Debug, Clone, Copy)]
struct Needs {
    receives: u64,
    write_bytes: u32,
}

impl Needs {
    fn of(wire: &Wire, rank: Rank) -> Needs {
        Needs { receives: wire.receives(rank), write_bytes: wire.largest_write() }
    }
}

/// The state of a context number, which is in its context's immediates.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Slot {
    #[default]
    Free,
    /// In use, by a context with so many receives.
    Taken { receives: u64 },
    /// Of a closed context, whose writes come from this region: some may be outstanding until the region is taken
    /// back.
    Leaving { region: RegionId },
}

/// The contexts of a proxy, by number, and their shares of the transport.
#[derive(Debug, Default)]
struct Contexts {
    slots: [Slot; MAX_CONTEXTS],
    /// By number: its last context so far, counted from 1; 0 if it had none.
    last: [u32; MAX_CONTEXTS],
    /// Contexts so far, each of which has registered an arena.
    registered: u32,
}

/// A rank's offer, by context number: 0 if the number is in use; 255 if it was never used; otherwise 1 + how many
/// numbers were assigned since. Ranks take the minimum and choose the largest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Offer(pub [u8; MAX_CONTEXTS]);

impl Offer {
    /// The offer of a rank without restrictions.
    pub const ANY: Offer = Offer([u8::MAX; MAX_CONTEXTS]);

    /// The minimum of two ranks' offers, number by number.
    pub fn with(self, other: Offer) -> Offer {
        let mut both = self;
        both.0.iter_mut().zip(other.0).for_each(|(own, theirs)| *own = theirs.min(*own));
        both
    }

    /// The number that is free on all ranks and was assigned longest ago.
    fn choice(self) -> Option<ContextIdx> {
        let free = (0u8..).zip(self.0).filter(|(_, age)| *age > 0);
        // The first of several.
        free.min_by_key(|(_, age)| std::cmp::Reverse(*age)).map(|(index, _)| ContextIdx(index))
    }
}

impl Contexts {
    fn offer(&self) -> Offer {
        let mut offer = Offer([0; MAX_CONTEXTS]);
        for ((age, slot), last) in offer.0.iter_mut().zip(self.slots).zip(self.last) {
            let later = self.last.iter().filter(|other| **other > last).count() as u8;
            *age = match slot {
                Slot::Free if last == 0 => u8::MAX,
                Slot::Free => 1 + later,
                Slot::Taken { .. } | Slot::Leaving { .. } => 0,
            };
        }
        offer
    }

    /// Takes the agreed number and what the context needs, if the transport has that left.
    fn admit(&mut self, agreed: Offer, limits: &Limits, needs: Needs) -> Result<ContextIdx> {
        let Some(index) = agreed.choice().filter(|index| self.slots[index.index()] == Slot::Free) else {
            let advice = "a proxy serves four contexts at a time, as many as an immediate can name, and a number is free again \
                          once all ranks have closed its context and what they sent has completed: drop one, on every rank";
            return Err(Error::config("contexts", format!("{MAX_CONTEXTS} in use"), advice));
        };
        let receives = |slot: &Slot| if let Slot::Taken { receives } = slot { *receives } else { 0 };
        let others: u64 = self.slots.iter().map(receives).sum();
        if others + needs.receives > u64::from(limits.receives) {
            let value = format!("{}, and {others} of other contexts", needs.receives);
            let advice = format!(
                "the network between nodes has {} for each NIC of a rank, one for a chunk that may be on its way: give a \
                 larger chunk_rows, fewer tokens a round, or drop a context",
                limits.receives
            );
            return Err(Error::config("receives", value, advice));
        }
        if needs.write_bytes > limits.write_bytes {
            let value = format!("{} bytes", needs.write_bytes);
            let advice = format!(
                "the network between nodes writes at most {} bytes at once: give a smaller chunk_rows, or fewer max_tokens",
                limits.write_bytes
            );
            return Err(Error::config("largest chunk", value, advice));
        }
        if self.registered >= limits.regions {
            let advice = "so many arenas can be registered with an endpoint in its life: start another proxy";
            return Err(Error::config("contexts", format!("{} so far", self.registered), advice));
        }
        self.registered += 1;
        self.slots[index.index()] = Slot::Taken { receives: needs.receives };
        self.last[index.index()] = self.registered;
        Ok(index)
    }

    /// A context has gone; `region` is the source of its writes, if it was registered.
    fn let_go(&mut self, index: ContextIdx, region: Option<RegionId>) {
        if let Some(slot) = self.slots.get_mut(index.index()) {
            *slot = region.map_or(Slot::Free, |region| Slot::Leaving { region });
        }
    }

    /// Regions of contexts that have gone.
    fn leaving(&self) -> Vec<RegionId> {
        let leaving = |slot: &Slot| if let Slot::Leaving { region } = slot { Some(*region) } else { None };
        self.slots.iter().filter_map(leaving).collect()
    }

    /// No write from these regions is outstanding.
    fn have_left(&mut self, regions: &[RegionId]) {
        for slot in &mut self.slots {
            if matches!(slot, Slot::Leaving { region } if regions.contains(region)) {
                *slot = Slot::Free;
            }
        }
    }
}

/// Properties of a transport that contexts ask for.
struct Traits {
    nics: u8,
    needs: DeviceNeeds,
    limits: Limits,
}

impl Traits {
    fn of(transport: &dyn Transport) -> Traits {
        let nics = u8::try_from(transport.nics()).unwrap_or(u8::MAX);
        Traits { nics, needs: transport.device_needs(), limits: transport.limits() }
    }
}

fn driver(world: &World, transport: AnyTransport, liveness: Liveness, clock: Clock) -> Result<Driver<AnyTransport>> {
    let rank = world.original(world.rank());
    let machine = Machine::new(&MachineConfig { rank, world: world.first_size(), liveness })?;
    Ok(Driver::new(machine, transport, clock))
}

/// Memory of the words that a proxy writes and its device polls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FlagPlace {
    /// In host memory, which a GPU polls over PCIe.
    Host,
    /// In the GPU's own memory, which the proxy writes over PCIe by way of GDRCopy.
    Device,
}

/// The words of a context that its device and its proxy see.
pub(crate) struct SharedWords {
    pub memory: ContextMemory,
    /// As the device sees them: doorbells, chunk counts, arrived, staging free, lost.
    pub addresses: [u64; 5],
    /// Where the last three of them lie.
    pub place: FlagPlace,
}

/// Arrays begin at multiples of so many words, so that a cache line has one writer.
const LINE_WORDS: usize = 16;
/// Pitch of words that the device polls (layout.h).
const POLLED_PITCH: usize = raw::TY_POLLED_PITCH as usize;

/// Zeroed memory that a device and this process share.
struct Space {
    host: *mut u64,
    device: u64,
    place: FlagPlace,
    keep: Kept,
}

/// Memory of a GPU, mapped for this process.
struct Mapped {
    // Before the memory: it is unmapped first.
    mapping: gdr::Mapping,
    _memory: DeviceBuffer,
}

impl Space {
    fn in_host(device: &Device, words: usize) -> Result<Space> {
        let buffer = Arc::new(device.alloc_host(8 * words)?);
        let (host, device) = (buffer.host_ptr().cast(), buffer.view().ptr());
        Ok(Space { host, device, place: FlagPlace::Host, keep: buffer })
    }

    fn in_device(device: &Device, words: usize, library: gdr::Library) -> Result<Space> {
        let memory = device.alloc(gdr::room_for(8 * words))?;
        memory.fill(0)?;
        let address = gdr::page_in(memory.view().ptr());
        // SAFETY: `room_for` made room for the pages, and the buffer outlives the mapping by the order of the fields.
        let mapping = unsafe { gdr::Mapping::new(library, address, 8 * words)? };
        let mapped = Arc::new(Mapped { mapping, _memory: memory });
        let host = mapped.mapping.host_ptr().cast();
        Ok(Space { host, device: address, place: FlagPlace::Device, keep: mapped })
    }

    /// Memory for words that the proxy writes and the device polls.
    fn for_flags(device: &Device, words: usize, gdrcopy: GdrCopy) -> Result<Space> {
        if device.kind() == DeviceKind::Cpu || gdrcopy == GdrCopy::Off {
            return Space::in_host(device, words);
        }
        match gdr::Library::find().and_then(|library| Space::in_device(device, words, library)) {
            Err(error) if gdrcopy == GdrCopy::Auto => {
                log::info!(target: crate::base::targets::MEMORY, "words of proxies lie in host memory: {error}");
                Space::in_host(device, words)
            }
            outcome => outcome,
        }
    }

    /// Cuts off arrays of these lengths, each on its own lines, of every `pitch`th word, and returns their device
    /// addresses, too.
    fn cut<const N: usize>(&self, lengths: [usize; N], pitch: usize) -> Result<([Words; N], [u64; N])> {
        let mut at = 0;
        let mut addresses = [0; N];
        let mut words = Vec::with_capacity(N);
        for (length, address) in lengths.map(|length| length * pitch).into_iter().zip(&mut addresses) {
            *address = self.device + 8 * at as u64;
            // SAFETY: `length` zeroed words inside the memory of `words_of`, which `keep` holds; device and proxy
            // access them atomically and in words of this size.
            let cut = unsafe { Words::from_raw(self.host.add(at), length, self.keep.clone())? }.every(pitch);
            words.push(if self.place == FlagPlace::Device { cut.combined() } else { cut });
            at += length.next_multiple_of(LINE_WORDS);
        }
        let words = <[Words; N]>::try_from(words).map_err(|_| {
            Error::device("shared words could not be laid out", "this is a defect of the library; please report it")
        })?;
        Ok((words, addresses))
    }
}

/// Words that `Space::cut` needs for these lengths.
fn words_of<const N: usize>(lengths: [usize; N], pitch: usize) -> usize {
    lengths.into_iter().map(|length| (length * pitch).next_multiple_of(LINE_WORDS)).sum()
}

impl SharedWords {
    /// Zeroed words of the lengths that the wire asks for.
    ///
    /// # Errors
    /// `Device` where memory is lacking, or GDRCopy where it is required.
    pub fn allocate(device: &Device, counts: WordCounts, gdrcopy: GdrCopy) -> Result<SharedWords> {
        let flags = Space::for_flags(device, words_of(flag_lengths(counts), POLLED_PITCH), gdrcopy)?;
        SharedWords::with_flags(device, counts, &flags)
    }

    fn with_flags(device: &Device, counts: WordCounts, flags: &Space) -> Result<SharedWords> {
        let bells = [counts.doorbells, counts.chunks];
        let ([doorbells, chunks], [bell, chunk]) = Space::in_host(device, words_of(bells, 1))?.cut(bells, 1)?;
        let ([arrived, staging_free, lost], [arrivals, free, loss]) = flags.cut(flag_lengths(counts), POLLED_PITCH)?;
        let memory = ContextMemory { doorbells, chunks, arrived, staging_free, lost };
        Ok(SharedWords { memory, addresses: [bell, chunk, arrivals, free, loss], place: flags.place })
    }
}

fn flag_lengths(counts: WordCounts) -> [usize; 3] {
    [counts.arrived, counts.staging_free, counts.lost]
}

/// How long dropping a context waits for its own writes, and for its peers to let go of its arena. Writes to living
/// peers complete much sooner, and these peers let go much sooner; writes to dead peers may never complete.
const REST: Duration = Duration::from_secs(1);

/// How long peers whose queues are full may delay a long request.
const NOTIFY: Duration = Duration::from_millis(100);

/// While it lives, the proxy's thread runs a long request, and its peers are notified of that.
struct Busy<'a> {
    remote: &'a Remote<AnyTransport>,
}

impl Busy<'_> {
    fn begin(remote: &Remote<AnyTransport>) -> Busy<'_> {
        // A proxy that does not answer returns an error for the next request, too.
        let _ = remote.ask(Driver::begin_busy);
        wait::poll("peers to be notified", NOTIFY, || {
            remote.ask(Driver::has_notified).map_or(Some(()), |notified| notified.then_some(()))
        });
        Busy { remote }
    }
}

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        let _ = uninterrupted(|| self.remote.ask(Driver::end_busy));
    }
}

/// A registered arena; taken back when dropped.
struct Registered {
    remote: Remote<AnyTransport>,
    region: RegionId,
}

impl Drop for Registered {
    /// If writes stay outstanding, the proxy keeps the arena, and takes it back when a later context comes or goes.
    fn drop(&mut self) {
        uninterrupted(|| {
            let region = self.region;
            let _busy = Busy::begin(&self.remote);
            // Without an answer, as a proxy that is busy for long must release it all the same.
            self.remote.tell(move |driver| driver.release(region));
            wait::poll("writes of a closed context", REST, || {
                let asked = self.remote.ask(move |driver| (driver.take_back(), driver.is_leaving(region)));
                // Freed memory is dropped here, on the caller's thread.
                asked.map_or(Some(()), |(_freed, leaving)| (!leaving).then_some(()))
            });
        });
    }
}

/// A context's registration at the proxy; closed when dropped.
pub(crate) struct Opening {
    // Dropped after the closing, and before the number is free again.
    _registered: Registered,
    // Freed here and not by the proxy's thread: freeing may wait for kernels, which may wait for the proxy.
    _words: ContextMemory,
    number: Number,
    /// Number of reports before it opened, which are not about it.
    earlier: usize,
}

impl Opening {
    /// Collective: registers the arena, exchanges addresses, connects all linked pairs and opens the context. The first
    /// context of a generation resets the transport, so that writes of earlier generations touch nothing.
    ///
    /// # Errors
    /// `Transport` and `Config` of this rank; `Bootstrap` that names the rank that failed.
    pub fn establish(
        world: &World,
        mut number: Number,
        arena: (Span, Kept),
        wire: &Wire,
        words: ContextMemory,
        first_epoch: u64,
    ) -> Result<Opening> {
        let remote = number.proxy.remote().clone();
        let (span, keep) = arena;
        let generation = world.generation();
        let busy = Busy::begin(&remote);
        let rank = world.original(world.rank());
        let linked = linked(wire, rank);
        let register = move |driver: &mut Driver<AnyTransport>| {
            driver.enter_generation(generation)?;
            let freed = driver.take_back();
            // SAFETY: the arena lives as long as what keeps it; kernels and transports access it through raw addresses
            // alone.
            let region = unsafe { driver.register(span, keep) }?;
            let address = |peer| Ok((peer, driver.transport().address(peer)?));
            Ok((region, linked.into_iter().map(address).collect::<Result<Vec<_>>>(), freed))
        };
        // Pinning a large arena may take longer than this rank waits.
        let registered = remote.ask_or_undo(register, |driver, late: Result<_>| {
            if let Ok((region, _, freed)) = late {
                driver.release(region);
                // Not on the proxy's thread: freeing may wait for kernels, which may wait for the proxy.
                let _ = std::thread::Builder::new().spawn(move || drop::<Vec<Kept>>(freed));
            }
        });
        let registered = registered.and_then(|inner| inner).and_then(|(region, addresses, _freed)| {
            number.region = Some(region);
            let registered = Registered { remote: remote.clone(), region };
            Ok((registered, card(rank, region, number.index, &addresses?)?))
        });
        let refusal = registered.as_ref().err().map(refusal_card).unwrap_or_default();
        let card = registered.as_ref().map_or(&refusal, |(_, card)| card);
        let cards = world.all_gather("proxy addresses", card)?;
        let (registered, _) = registered?;
        let peers = read_cards(world, &cards, number.index)?;
        let earlier = remote.reported();
        let shared = words.share();
        let mut arenas = vec![RegionId(0); world.first_size()];
        for (peer, member) in peers.iter().zip(world.members()) {
            if let Some(region) = arenas.get_mut(member.index()) {
                *region = peer.region;
            }
        }
        let outcome = connect(world, &remote, wire, peers).and_then(|()| {
            let (wire, index) = (wire.clone(), number.index);
            let generation = generation_bits(generation);
            let open = move |driver: &mut Driver<AnyTransport>| {
                let config = ContextConfig { generation, first_epoch, wire: &wire, arenas: &arenas };
                // All ranks offered this number, so their writes under it have completed; this discards the last of
                // them.
                driver.drain();
                driver.open(index, &config, shared)
            };
            remote.ask(open)?
        });
        drop(busy);
        let opening = Opening { _registered: registered, _words: words, number, earlier };
        agree_all(world, outcome)?;
        Ok(opening)
    }
}

impl Opening {
    /// A second handle of the words that device and proxy share.
    pub fn words(&self) -> ContextMemory {
        self._words.share()
    }

    /// Ranks that the proxy has lost, and how each loss was noticed.
    pub fn losses(&self) -> Vec<(Rank, String)> {
        let remote = self.number.proxy.remote();
        let lost = remote.reports_since(self.earlier).into_iter().filter_map(|report| match report {
            Report::PeerLost { peer, cause: Cause::Refused } => {
                let why = remote.failure().map(|error| format!(" ({error})"));
                Some((peer, format!("{}{}", Cause::Refused, why.unwrap_or_default())))
            }
            Report::PeerLost { peer, cause: cause @ Cause::WriteFailed { .. } } => {
                let words =
                    remote.explanation(peer).map(|words| format!("; the network says: {}", quoted(words.as_bytes())));
                Some((peer, format!("{cause}{}", words.unwrap_or_default())))
            }
            Report::PeerLost { peer, cause } => Some((peer, cause.to_string())),
            Report::BadDoorbell { .. } => None,
        });
        lost.collect()
    }

    /// Why this rank's proxy cannot go on with the context, if so.
    pub fn failure(&self) -> Option<Error> {
        let remote = self.number.proxy.remote();
        remote.end().or_else(|| remote.reports_since(self.earlier).into_iter().find_map(|report| self.stopped(report)))
    }

    /// The error for a report on this rank's own device.
    fn stopped(&self, report: Report) -> Option<Error> {
        let Report::BadDoorbell { context, direction, peer, epoch, chunk, problem } = report else { return None };
        (context == self.number.index).then(|| {
            Error::device(
                format!("a doorbell of {direction:?} {epoch} to rank {peer}, chunk {}, shows {problem}", chunk.0),
                "something overwrote the context's memory, or this is a defect of the library; please report it",
            )
            .ending()
        })
    }
}

impl Drop for Opening {
    /// Posts first what the device has rung, since peers wait for it: its kernels have ended, but a queue may have been
    /// full. Writes under way complete before the arena is taken back.
    fn drop(&mut self) {
        let (remote, index) = (self.number.proxy.remote(), self.number.index);
        uninterrupted(|| {
            wait::poll("messages of a closing context", REST, || {
                let settled = remote.ask(move |driver| driver.settle(index));
                settled.map_or(Some(()), |settled| settled.then_some(()))
            });
            let _ = remote.ask(move |driver| driver.close(index));
        });
    }
}

/// Ranks with a link to or from `own`.
fn linked(wire: &Wire, own: Rank) -> Vec<Rank> {
    let mut linked: Vec<Rank> =
        Direction::ALL.iter().flat_map(|d| [wire.targets(*d, own), wire.sources(*d, own)]).flatten().collect();
    linked.sort_unstable();
    linked.dedup();
    linked
}

/// Connects to all linked ranks: one per request, so that the proxy's loop goes on in between.
fn connect(world: &World, remote: &Remote<AnyTransport>, wire: &Wire, mut peers: Vec<PeerCard>) -> Result<()> {
    let own = world.original(world.rank());
    for rank in linked(wire, own) {
        let card = wire.nodes().index_of(rank).and_then(|at| peers.get_mut(at));
        let Some(address) = card.and_then(|card| card.address.take()) else {
            return Err(Error::bootstrap(
                format!("rank {rank} sent no address for rank {own}"),
                "run the same version of tokenyard on all ranks",
            ));
        };
        remote.ask(move |driver| driver.transport().connect(rank, &address))??;
    }
    Ok(())
}

/// Collective: all succeed, or all fail: the failed rank with its own error, the others with one that names it.
fn agree_all(world: &World, outcome: Result<()>) -> Result<()> {
    let reason = outcome.as_ref().err().map(Error::text_for_peers).unwrap_or_default();
    let all = world.all_gather("proxies connected", reason.as_bytes())?;
    outcome?;
    match all.iter().position(|text| !text.is_empty()) {
        None => Ok(()),
        Some(rank) => {
            let name = world.original(Rank(rank as u32));
            Err(Error::bootstrap(
                format!("the proxy of rank {name} could not connect: {}", quoted(&all[rank])),
                format!("mend rank {name} and build again on every rank"),
            ))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::memory::gdr::tests::Fake;
    use std::sync::atomic::{AtomicU64, Ordering};

    const COUNTS: WordCounts = WordCounts { doorbells: 40, chunks: 3, arrived: 33, staging_free: 5, lost: 1 };

    /// A word as the device, here the CPU device, sees it.
    fn seen(address: u64) -> u64 {
        let word = std::ptr::with_exposed_provenance_mut::<u64>(address as usize);
        // SAFETY: an address of live words of the test that calls.
        unsafe { AtomicU64::from_ptr(word) }.load(Ordering::Acquire)
    }

    #[test]
    fn contexts_that_a_transport_has_no_room_for_are_refused_and_change_nothing() {
        let limits = Limits { posts: 1, receives: 100, regions: 5, write_bytes: 4096 };
        let mut contexts = Contexts::default();
        let admit = |contexts: &mut Contexts, receives, write_bytes| {
            contexts.admit(contexts.offer(), &limits, Needs { receives, write_bytes })
        };
        for (index, needs) in (0..).zip([(60, 4096), (40, 1), (0, 0)]) {
            assert_eq!(admit(&mut contexts, needs.0, needs.1), Ok(ContextIdx(index)));
        }
        for (receives, write_bytes, name) in [(1, 1, "receives"), (0, 4097, "largest chunk")] {
            let refused = admit(&mut contexts, receives, write_bytes);
            let Err(Error::Config { name: refused, value, .. }) = refused else { panic!("{name}") };
            assert_eq!(refused, name);
            assert!(name != "receives" || value == "1, and 100 of other contexts", "{value}");
        }
        contexts.let_go(ContextIdx(1), None);
        assert_eq!(admit(&mut contexts, 40, 1), Ok(ContextIdx(3)));
        assert_eq!(admit(&mut contexts, 0, 1), Ok(ContextIdx(1)));
        contexts.let_go(ContextIdx(0), None);
        let full = admit(&mut contexts, 1, 1).unwrap_err().to_string();
        assert!(full.contains("5 so far") && full.contains("another proxy"), "{full}");
    }

    #[test]
    fn numbers_go_round_and_are_given_again_once_nobody_writes_under_them() {
        let needs = Needs { receives: 0, write_bytes: 0 };
        let mut ranks = [Contexts::default(), Contexts::default()];
        fn agreed(ranks: &[Contexts; 2]) -> Offer {
            ranks[0].offer().with(ranks[1].offer())
        }
        let take = |ranks: &mut [Contexts; 2]| {
            let agreed = agreed(ranks);
            let [one, other] = ranks.each_mut().map(|rank| rank.admit(agreed, &Limits::NONE, needs).map(|i| i.0).ok());
            assert_eq!(one, other);
            one
        };
        // A context at a time: all numbers one after the other.
        for round in 0..9 {
            let index = take(&mut ranks).unwrap();
            assert_eq!(index, round % 4);
            ranks.iter_mut().for_each(|rank| rank.let_go(ContextIdx(index), None));
        }
        // The oldest is 1; one of the ranks has not closed its context, or writes under it have not completed.
        let alone = Offer([0, 1, 0, 0]);
        assert_eq!(ranks[1].admit(alone, &Limits::NONE, needs), Ok(ContextIdx(1)));
        assert_eq!(take(&mut ranks), Some(2));
        ranks[1].let_go(ContextIdx(1), Some(RegionId(7)));
        assert_eq!((take(&mut ranks), take(&mut ranks), take(&mut ranks)), (Some(3), Some(0), None));
        assert_eq!(ranks[1].leaving(), [RegionId(7)]);
        ranks[1].have_left(&[RegionId(6)]);
        assert_eq!(take(&mut ranks), None);
        ranks[1].have_left(&[RegionId(7)]);
        assert_eq!(take(&mut ranks), Some(1));
        // A new rank offers all numbers alike; the number that the others assigned last is assigned last.
        let mut ranks = [Contexts::default(), Contexts::default()];
        let first = ranks[0].admit(ranks[0].offer(), &Limits::NONE, needs).unwrap();
        ranks[0].let_go(first, None);
        assert_eq!((first.0, take(&mut ranks)), (0, Some(1)));
    }

    fn check(words: &SharedWords) {
        let ContextMemory { doorbells, chunks, arrived, staging_free, lost } = &words.memory;
        let arrays = [doorbells, chunks, arrived, staging_free, lost];
        let pitches = [1, 1, POLLED_PITCH, POLLED_PITCH, POLLED_PITCH].map(|words| 8 * words as u64);
        let places = || arrays.into_iter().zip(words.addresses).zip(pitches).enumerate();
        let mut lines: Vec<u64> = Vec::new();
        for (number, ((array, address), pitch)) in places() {
            for at in 0..array.len() {
                assert_eq!(seen(address + pitch * at as u64), 0, "array {number} is not zeroed");
                array.publish(at, (number * 100 + at) as u64);
            }
            array.publish(array.len(), 7);
            let touched = |at| (address + pitch * at) / 128;
            lines.extend((0..array.len() as u64).map(touched).collect::<std::collections::BTreeSet<_>>());
        }
        let all = lines.len();
        lines.sort_unstable();
        lines.dedup();
        assert_eq!(lines.len(), all, "two arrays share a line");
        for (number, ((array, address), pitch)) in places() {
            for at in 0..array.len() {
                assert_eq!(seen(address + pitch * at as u64), (number * 100 + at) as u64);
            }
        }
    }

    #[test]
    fn words_of_the_cpu_device_lie_in_host_memory_whatever_is_asked() {
        for gdrcopy in [GdrCopy::Off, GdrCopy::Auto, GdrCopy::Require] {
            let words = SharedWords::allocate(&Device::cpu().unwrap(), COUNTS, gdrcopy).unwrap();
            assert_eq!((words.place, words.memory.counts()), (FlagPlace::Host, COUNTS));
            check(&words);
        }
    }

    #[test]
    fn mapped_flags_are_seen_by_the_device_and_unmapped_with_the_last_words() {
        let Some(fake) = Fake::build() else { return };
        let device = Device::cpu().unwrap();
        let flags = Space::in_device(&device, words_of(flag_lengths(COUNTS), POLLED_PITCH), fake.library()).unwrap();
        let words = SharedWords::with_flags(&device, COUNTS, &flags).unwrap();
        drop(flags);
        assert_eq!(words.place, FlagPlace::Device);
        check(&words);
        let kept = words.memory.share();
        drop(words);
        assert_eq!(fake.calls(), "open pin map info");
        drop(kept);
        assert_eq!(fake.calls(), "open pin map info unmap unpin close");
    }

    #[test]
    fn gdrcopy_that_fails_leaves_nothing_behind() {
        let Some(fake) = Fake::build() else { return };
        let device = Device::cpu().unwrap();
        fake.fail("map");
        let error = Space::in_device(&device, 100, fake.library()).map(|space| space.place).unwrap_err();
        assert!(error.to_string().contains("gdr_map"), "{error}");
        assert_eq!(fake.calls(), "open pin map unpin close");
    }
}
