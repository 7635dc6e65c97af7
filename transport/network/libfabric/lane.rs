//! A NIC of an endpoint: a domain with its registered memory, and the endpoint in it that a reset replaces.
//!
//! Place in the data path: the last step before the library. On the endpoint's thread, which alone makes progress.
//!
//! ```text
//!  fabric ── domain ── regions …               stay over a reset
//!     └ event queue ─┐     └ completion queue, address vector, endpoint      are closed and opened anew
//! ```

use super::address::MAX_NAME;
use super::config::LibfabricConfig;
use super::contexts::{Contexts, Operation};
use super::info::{Facts, Info};
use super::libfabric_sys::*;
use super::memory::{PEER_TO_PEER, Reached, Registrar, require_peer_to_peer};
use super::object::{Object, Origin};
use super::provider::Provider;
use crate::base::{Error, Rank, Result};
use crate::transport::network::encoding::Remote;
use crate::transport::network::flight::Flight;
use crate::transport::network::held::Held;
use crate::transport::network::message::PITCH;
use crate::transport::network::reach::{Gpu, allocation};
use crate::transport::network::registration::{Nic, Registrations};
use crate::transport::network::slab::{EMPTY, LINE, Slab};
use crate::transport::network::slots::Slots;
use crate::transport::network::{Failure, Reason, RegionId, Span};
use libc::iovec;
use std::ffi::{CStr, c_int, c_void};
use std::fmt;
use std::mem::zeroed;
use std::ptr::{null, null_mut};

const ADVICE: &str = "see the provider's manual page, and set FI_LOG_LEVEL=warn for its reasons";
/// Completions that one call reads.
pub(super) const BATCH: usize = 32;
/// Reads of a flush that may fail one after the other.
const FLUSHES: u32 = 100;

/// Where a write goes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Destination {
    pub address: fi_addr_t,
    /// The region, and the place of writes without bytes.
    pub target: Remote,
    pub scratch: Remote,
}

/// A write of the bare loop, from an offset of its region to the same offset of the peer's.
#[derive(Debug, Clone, Copy)]
pub(super) struct BareWrite {
    pub offset: u64,
    pub bytes: usize,
    pub address: fi_addr_t,
    pub remote: Remote,
    pub imm: u32,
    pub number: u32,
}

/// What a reset replaces; closed in this order.
#[derive(Debug)]
struct Door {
    endpoint: Object<fid_ep>,
    completions: Object<fid_cq>,
    addresses: Object<fid_av>,
    name: Vec<u8>,
    /// Entries of the completion queue.
    room: usize,
}

/// The flush of a NIC.
#[derive(Debug)]
pub(super) struct Flush {
    /// Its endpoint's own.
    address: fi_addr_t,
    pub held: Held,
    /// Reads that have failed one after the other.
    pub failed: u32,
}

impl Default for Flush {
    fn default() -> Flush {
        Flush { address: FI_ADDR_UNSPEC, held: Held::new(0), failed: 0 }
    }
}

/// Closed and freed in this order.
#[derive(Debug)]
pub(super) struct Lane {
    door: Option<Door>,
    /// Why the last endpoint could not be closed.
    stuck: Option<c_int>,
    regions: Registrations<Object<fid_mr>>,
    scratch: Object<fid_mr>,
    local: Object<fid_mr>,
    /// The GPU whose memory it reaches, and how.
    pub reached: Option<Reached>,
    pub flush: Option<Flush>,
    domain: Object<fid_domain>,
    events: Object<fid_eq>,
    _fabric: Object<fid_fabric>,
    info: Info,
    contexts: Contexts,
    provider: Provider,
    pub facts: Facts,
    pub writes: Slots<Flight>,
    /// Writes that may be under way.
    pub room: usize,
    /// Messages that may be under way.
    pub messages: u32,
    /// Completions of receives that may be in the queue.
    receives: usize,
    /// Peers that each address stands for: a provider gives one name one address.
    addresses: Vec<(fi_addr_t, u32)>,
    /// Flags of every write.
    write_flags: u64,
    /// What the last read gave. Kept, as clearing it would take as long as an empty read.
    entries: Entries,
    origin: Origin,
}

/// Room for completions as the provider writes them.
struct Entries(Box<[fi_cq_data_entry; BATCH]>);

impl Default for Entries {
    fn default() -> Entries {
        // SAFETY: numbers and pointers that may be null.
        Entries(Box::new(unsafe { zeroed() }))
    }
}

impl fmt::Debug for Entries {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{BATCH} entries")
    }
}

// SAFETY: objects of a domain of its own, which one thread at a time uses: whoever has the lane.
unsafe impl Send for Lane {}

/// A completion.
#[derive(Debug, Clone, Copy)]
pub(super) enum Done {
    Immediate(u32),
    Operation(Operation),
    /// An error of an operation.
    Failed(Operation, Failure),
    /// An error that no operation is named with; whether it may be that of a write that arrived.
    Stray(Failure, bool),
}

impl Done {
    /// An error of which nothing is known.
    pub const NONE: Done = Done::Stray(Failure { reason: Reason::Other, code: 0 }, false);
}

impl Lane {
    /// Opens a NIC; messages go by the first.
    pub fn open(
        library: &'static Library,
        config: &LibfabricConfig,
        provider: Provider,
        slab: &Slab,
        (nic, gpu): (usize, Option<&Gpu>),
    ) -> Result<Lane> {
        let info = Info::find(library, config, provider, nic, gpu.is_some())?;
        let origin = Info::origin(library, config);
        let facts = info.facts();
        if let Some(warning) = provider.warning().filter(|_| nic == 0) {
            log::warn!(target: crate::base::targets::NETWORK, "provider {}: {warning}", facts.provider);
        }
        // SAFETY: attributes of the library's own info, a place for the answer, and no context.
        let fabric = unsafe { Object::open(&origin, ADVICE, |to| (library.fi_fabric)(info.fabric(), to, null_mut())) }?;
        let mut attributes =
            fi_eq_attr { size: 0, flags: 0, wait_obj: FI_WAIT_NONE, signaling_vector: 0, wait_set: null_mut() };
        // SAFETY: as above.
        let events = unsafe {
            Object::open(&origin, ADVICE, |to| fi_eq_open(fabric.as_ptr(), &mut attributes, to, null_mut()))
        }?;
        // SAFETY: as above.
        let domain =
            unsafe { Object::open(&origin, ADVICE, |to| fi_domain(fabric.as_ptr(), info.as_ptr(), to, null_mut())) }?;
        let own = Span::host(slab.scratch(), LINE);
        let (local, bytes) = slab.local();
        let registrar =
            Registrar { library, origin: &origin, domain: &domain, facts: &facts, advice: provider.advice_on_memory() };
        let reached = gpu.map(|gpu| registrar.reach(gpu, &info, config.flush));
        let flush = match &reached {
            Some(Reached { reach, probe }) => reach.flush && probe.is_some(),
            None => config.flush == Some(true),
        };
        // A flush without a GPU reads the scratch line.
        let reads = if flush { [FI_REMOTE_READ, FI_READ] } else { [0, 0] };
        let scratch = registrar.register_host(own, FI_REMOTE_WRITE | reads[0])?;
        let access = FI_WRITE | FI_SEND | FI_RECV | reads[1];
        let local = registrar.register_host(Span::host(local, bytes), access)?;
        let (mut messages, receives) = if nic == 0 { (slab.sends(), slab.receives()) } else { (0, 0) };
        if let Some(most) = provider.messages_of(facts.queue) {
            messages = messages.min(most as u32);
        }
        let shared = provider.messages_of(facts.queue).map_or(0, |_| messages as usize);
        let room = facts.queue.saturating_sub(shared).max(1);
        let mut lane = Lane {
            door: None,
            stuck: None,
            regions: Registrations::default(),
            scratch,
            local,
            reached,
            flush: flush.then(Flush::default),
            domain,
            events,
            _fabric: fabric,
            info,
            contexts: Contexts::new(room as u32, slab.sends(), slab.receives()),
            provider,
            receives: provider.own_receives(&facts.fabric, facts.receives).unwrap_or(receives as usize),
            facts,
            writes: Slots::new(room as u32),
            room,
            messages,
            addresses: Vec::new(),
            write_flags: FI_REMOTE_CQ_DATA | FI_COMPLETION | provider.write_flags(),
            entries: Entries::default(),
            origin,
        };
        lane.reopen()?;
        Ok(lane)
    }

    /// Closes the endpoint: its operations end without a completion.
    ///
    /// # Errors
    /// `Transport` with the library's text: then the endpoint is open for good, and so are its operations.
    pub fn shut(&mut self) -> Result<()> {
        if let Some(Door { endpoint, completions, addresses, .. }) = self.door.take()
            && let Err(code) = endpoint.close()
        {
            self.stuck = Some(code);
            // The endpoint still uses them.
            std::mem::forget((completions, addresses));
        }
        match self.stuck {
            None => Ok(()),
            Some(code) => Err(self.origin.refused("closes no endpoint", code, "end this process").ending()),
        }
    }

    /// Opens an endpoint, where there is none.
    ///
    /// # Errors
    /// `Transport` with the library's text; then the NIC has no endpoint.
    pub fn reopen(&mut self) -> Result<()> {
        self.shut()?;
        let origin = &self.origin;
        let mut queue = fi_cq_attr {
            size: self.provider.completions(self.facts.queue + self.receives),
            flags: 0,
            format: FI_CQ_FORMAT_DATA,
            wait_obj: FI_WAIT_NONE,
            signaling_vector: 0,
            wait_cond: 0,
            wait_set: null_mut(),
            room: [0; 2],
        };
        // SAFETY: an open domain, attributes, a place for the answer, and no context.
        let completions =
            unsafe { Object::open(origin, ADVICE, |to| fi_cq_open(self.domain.as_ptr(), &mut queue, to, null_mut())) }?;
        // SAFETY: numbers and pointers that may be null.
        let mut vector: fi_av_attr = unsafe { zeroed() };
        vector.type_ = FI_AV_UNSPEC;
        // SAFETY: as above.
        let addresses = unsafe {
            Object::open(origin, ADVICE, |to| fi_av_open(self.domain.as_ptr(), &mut vector, to, null_mut()))
        }?;
        // SAFETY: as above.
        let endpoint: Object<fid_ep> = unsafe {
            Object::open(origin, ADVICE, |to| fi_endpoint(self.domain.as_ptr(), self.info.as_ptr(), to, null_mut()))
        }?;
        if self.reached.as_ref().is_some_and(|reached| reached.probe.is_some()) {
            require_peer_to_peer(&endpoint).map_err(|code| origin.refused(PEER_TO_PEER, code, ADVICE))?;
        }
        let binds = [
            (self.events.fid(), 0, "event queue"),
            (addresses.fid(), 0, "address vector"),
            (completions.fid(), FI_TRANSMIT | FI_RECV, "completion queue"),
        ];
        for (object, flags, name) in binds {
            // SAFETY: open objects of one domain, the event queue of its fabric.
            let code = unsafe { fi_bind(endpoint.fid(), object, flags) };
            if code != 0 {
                return Err(origin.refused(&format!("binds no {name} to an endpoint"), code, ADVICE));
            }
        }
        // SAFETY: an endpoint with all that it needs.
        let code = unsafe { fi_control(endpoint.fid(), FI_ENABLE, null_mut()) };
        if code != 0 {
            let advice = self.provider.advice_on_enabling().unwrap_or(ADVICE);
            return Err(origin.refused("enables no endpoint", code, advice));
        }
        self.refuse_emulation(&endpoint)?;
        let mut name = vec![0; MAX_NAME];
        let mut length = name.len();
        // SAFETY: a place of as many bytes.
        let code = unsafe { fi_getname(endpoint.as_ptr(), name.as_mut_ptr().cast(), &mut length) };
        if code != 0 || length == 0 || length > name.len() {
            return Err(origin.refused("gives an endpoint no name", code, ADVICE));
        }
        name.truncate(length);
        self.door = Some(Door { endpoint, completions, addresses, name: name.clone(), room: queue.size });
        self.addresses.clear();
        if self.flush.is_some() {
            let address = self.insert(Rank(0), &name)?;
            let most = self.receives().map_or(0, |most| most as u32);
            self.flush = Some(Flush { address, held: Held::new(most), failed: 0 });
        }
        Ok(())
    }

    /// Emulated writes use a small pool of buffers and stall beyond it, and do not bypass the peer's processor.
    fn refuse_emulation(&self, endpoint: &Object<fid_ep>) -> Result<()> {
        let Some(option) = self.provider.emulation().filter(|_| !self.facts.batches(self.provider)) else {
            return Ok(());
        };
        let (mut emulated, mut bytes) = (true, size_of::<bool>());
        // SAFETY: an open endpoint, and a place for a bool and its size.
        let code =
            unsafe { fi_getopt(endpoint.as_ptr(), FI_OPT_ENDPOINT, option, (&raw mut emulated).cast(), &mut bytes) };
        match code {
            0 if !emulated => Ok(()),
            0 => Err(Error::transport(
                format!("libfabric emulates the writes of NIC {}", self.facts.domain),
                "use a device with RDMA writes, and leave FI_EFA_USE_DEVICE_RDMA unset",
            )),
            code => Err(self.origin.refused("does not tell whether it emulates writes", code, ADVICE)),
        }
    }

    /// Immediates that may be under way to this NIC; no bound where the queue keeps what does not fit.
    pub fn receives(&self) -> Option<usize> {
        let room = self.door.as_ref().map_or(0, |door| door.room);
        let flushes = usize::from(self.flush.is_some());
        self.provider.overruns().then(|| room.saturating_sub(self.facts.queue + self.receives + flushes))
    }

    fn door(&self, rank: Rank) -> Result<&Door> {
        self.door.as_ref().ok_or_else(|| {
            Error::transport(format!("endpoint of rank {rank} could not be opened again"), "open another").ending()
        })
    }

    // ---- memory

    /// Whether a region can be written from.
    pub fn has(&self, region: RegionId) -> bool {
        self.regions.get(region).is_some()
    }

    /// Where peers' empty writes go.
    pub fn scratch(&self, slab: &Slab) -> Remote {
        self.place(&self.scratch, slab.scratch())
    }

    fn place(&self, object: &Object<fid_mr>, base: u64) -> Remote {
        // SAFETY: open.
        let key = unsafe { (*object.as_ptr()).key };
        Remote { base: if self.facts.virtual_addresses { base } else { 0 }, key }
    }

    fn descriptor(object: &Object<fid_mr>) -> *mut c_void {
        // SAFETY: open.
        unsafe { (*object.as_ptr()).mem_desc }
    }

    // ---- peers

    pub fn name(&self, rank: Rank) -> Result<&[u8]> {
        Ok(&self.door(rank)?.name)
    }

    /// Whether bytes can be the name of an endpoint of this kind: the provider reads as many as its own names have.
    /// shm's names are text, others are socket addresses.
    fn resembles(&self, own: &[u8], name: &[u8]) -> bool {
        if self.provider == Provider::Shm {
            name.iter().position(|byte| *byte == 0) == name.len().checked_sub(1)
        } else {
            name.len() == own.len() && name.get(..2) == own.get(..2)
        }
    }

    /// Adds a peer's endpoint. A name that is there already has the same address.
    pub fn insert(&mut self, rank: Rank, name: &[u8]) -> Result<fi_addr_t> {
        let door = self.door(rank)?;
        let mut found = FI_ADDR_UNSPEC;
        let refused = || Error::transport("names no endpoint that the provider knows", ADVICE);
        if !self.resembles(&door.name, name) {
            return Err(refused());
        }
        // SAFETY: a name as long and of the same kind as fi_getname's, and a place for the answer.
        let count =
            unsafe { fi_av_insert(door.addresses.as_ptr(), name.as_ptr().cast(), 1, &mut found, 0, null_mut()) };
        if count != 1 || found == FI_ADDR_UNSPEC {
            return Err(refused());
        }
        match self.addresses.iter_mut().find(|(address, _)| *address == found) {
            Some((_, peers)) => *peers += 1,
            None => self.addresses.push((found, 1)),
        }
        Ok(found)
    }

    /// Removes a peer's endpoint, to which nothing is under way, unless another peer has the same.
    pub fn remove(&mut self, mut address: fi_addr_t) {
        let Some(door) = &self.door else { return };
        let Some(at) = self.addresses.iter().position(|(known, _)| *known == address) else { return };
        if let Some((_, peers)) = self.addresses.get_mut(at).filter(|(_, peers)| *peers > 1) {
            *peers -= 1;
            return;
        }
        self.addresses.swap_remove(at);
        // SAFETY: an address that `insert` gave.
        let code = unsafe { fi_av_remove(door.addresses.as_ptr(), &mut address, 1, 0) };
        if code != 0 {
            log::debug!(target: crate::base::targets::NETWORK, "libfabric removes no address: error {code}");
        }
    }

    // ---- operations

    /// Posts the write of a number: 0, or the library's error. `more`: whether another one is posted next, in which
    /// case the doorbell may wait for that; a post that is refused rings for those before it.
    pub fn write(&self, number: u32, flight: &Flight, to: &Destination, slab: &Slab, more: bool) -> c_int {
        let Some(door) = &self.door else { return -FI_ENODATA };
        let write = &flight.write;
        let Destination { address, target, scratch } = *to;
        let (source, bytes, place, object) = if write.bytes > 0 {
            let Some(region) = self.regions.get(write.source.region) else { return -FI_EINVAL };
            let place = Remote { base: target.base.wrapping_add(write.target.offset), key: target.key };
            (flight.source, write.bytes as usize, place, region)
        } else {
            (slab.empty(), EMPTY, scratch, &self.local)
        };
        let piece = iovec { iov_base: source as *mut c_void, iov_len: bytes };
        let remote = fi_rma_iov { addr: place.base, len: bytes, key: place.key };
        let mut descriptor = Lane::descriptor(object);
        let message = fi_msg_rma {
            msg_iov: &piece,
            desc: &mut descriptor,
            iov_count: 1,
            addr: address,
            rma_iov: &remote,
            rma_iov_count: 1,
            context: self.contexts.of(Operation::Write(number)),
            data: u64::from(write.imm.bits()),
        };
        let more = if more && self.facts.batches(self.provider) { FI_MORE } else { 0 };
        // SAFETY: an enabled endpoint; the source is registered and stays until the completion, and so does the
        // context. The rest is read during the call.
        unsafe { fi_writemsg(door.endpoint.as_ptr(), &message, self.write_flags | more) as c_int }
    }

    /// Posts a write of the bare loop, whose region begins at `base`: 0, or the library's error.
    pub fn write_bare(&self, region: RegionId, base: u64, write: &BareWrite) -> c_int {
        let (Some(door), Some(object)) = (&self.door, self.regions.get(region)) else { return -FI_ENODATA };
        let piece = iovec { iov_base: (base + write.offset) as *mut c_void, iov_len: write.bytes };
        let Remote { base: to, key } = write.remote;
        let remote = fi_rma_iov { addr: to.wrapping_add(write.offset), len: write.bytes, key };
        let mut descriptor = Lane::descriptor(object);
        let message = fi_msg_rma {
            msg_iov: &piece,
            desc: &mut descriptor,
            iov_count: 1,
            addr: write.address,
            rma_iov: &remote,
            rma_iov_count: 1,
            context: self.contexts.of(Operation::Write(write.number % self.room as u32)),
            data: u64::from(write.imm),
        };
        // SAFETY: an enabled endpoint and a registered source. The bare loop has far fewer writes under way than there
        // are contexts.
        unsafe { fi_writemsg(door.endpoint.as_ptr(), &message, self.write_flags) as c_int }
    }

    /// Reads completions for the bare loop; answers how many, or the library's error.
    pub fn read_bare<const N: usize>(&self, entries: &mut [fi_cq_data_entry; N]) -> isize {
        let Some(door) = &self.door else { return -(FI_ENODATA as isize) };
        // SAFETY: an open queue of this format, and room for as many entries.
        unsafe { fi_cq_read(door.completions.as_ptr(), entries.as_mut_ptr().cast(), N) }
    }

    /// Sends the message of a number: 0, or the library's error.
    pub fn send(&self, number: u32, to: fi_addr_t, slab: &Slab, bytes: usize) -> c_int {
        self.message(Operation::Send(number), slab.send(number), to, bytes)
    }

    /// Posts a receive: 0, or the library's error.
    pub fn receive(&self, number: u32, slab: &Slab) -> c_int {
        self.message(Operation::Receive(number), slab.receive(number), FI_ADDR_UNSPEC, PITCH)
    }

    fn message(&self, operation: Operation, place: u64, to: fi_addr_t, bytes: usize) -> c_int {
        let Some(door) = &self.door else { return -FI_ENODATA };
        let piece = iovec { iov_base: place as *mut c_void, iov_len: bytes };
        let mut descriptor = Lane::descriptor(&self.local);
        let message = fi_msg {
            msg_iov: &piece,
            desc: &mut descriptor,
            iov_count: 1,
            addr: to,
            context: self.contexts.of(operation),
            data: 0,
        };
        let endpoint = door.endpoint.as_ptr();
        // SAFETY: as in `write`.
        (unsafe {
            match operation {
                Operation::Receive(_) => fi_recvmsg(endpoint, &message, FI_COMPLETION),
                _ => fi_sendmsg(endpoint, &message, FI_COMPLETION),
            }
        }) as c_int
    }

    // ---- flushes

    /// Whether immediates wait for a flush.
    pub fn is_holding(&self) -> bool {
        self.flush.as_ref().is_some_and(|flush| !flush.held.is_empty())
    }

    /// Posts the read of a flush, if immediates wait for one: of the GPU's memory, into the line of empty writes.
    ///
    /// # Errors
    /// `Transport` if flushes have failed too often.
    pub fn flush(&mut self, slab: &Slab) -> Result<()> {
        let (Some(door), Some(flush)) = (&self.door, &self.flush) else { return Ok(()) };
        if !flush.held.wants_read() {
            return Ok(());
        }
        if flush.failed > FLUSHES {
            let what = format!("NIC {} flushes no writes into the GPU's memory any more", self.facts.domain);
            return Err(Error::transport(what, "open another endpoint").ending());
        }
        let probe = self.reached.as_ref().and_then(|reached| reached.probe.as_ref());
        let from = probe.map_or_else(|| self.scratch(slab), |(object, base)| self.place(object, *base));
        let piece = iovec { iov_base: (slab.empty() + LINE as u64 / 2) as *mut c_void, iov_len: EMPTY };
        let remote = fi_rma_iov { addr: from.base, len: EMPTY, key: from.key };
        let mut descriptor = Lane::descriptor(&self.local);
        let message = fi_msg_rma {
            msg_iov: &piece,
            desc: &mut descriptor,
            iov_count: 1,
            addr: flush.address,
            rma_iov: &remote,
            rma_iov_count: 1,
            context: self.contexts.of(Operation::Flush),
            data: 0,
        };
        // SAFETY: an enabled endpoint; both places are registered and stay, as the context does. The rest is read
        // during the call.
        let code = unsafe { fi_readmsg(door.endpoint.as_ptr(), &message, FI_COMPLETION) } as c_int;
        let Some(flush) = &mut self.flush else { return Ok(()) };
        match code {
            0 => flush.held.read_posted(),
            code if code == -FI_EAGAIN => {}
            _ => flush.failed += 1,
        }
        Ok(())
    }

    /// Makes progress, and reads completions; answers how many are in `found`.
    ///
    /// # Errors
    /// `Transport` if the queue is broken.
    pub fn poll(&mut self, found: &mut [Done; BATCH]) -> Result<usize> {
        let Some(door) = &self.door else { return Ok(0) };
        // SAFETY: an open queue of this format, and room for as many entries.
        let count = unsafe { fi_cq_read(door.completions.as_ptr(), self.entries.0.as_mut_ptr().cast(), BATCH) };
        if count > 0 {
            let count = (count as usize).min(BATCH);
            for (entry, done) in self.entries.0.iter().zip(found.iter_mut()).take(count) {
                let operation = self.contexts.operation(entry.op_context);
                // Some providers name a receive with a write, and some name nothing; a message may carry data, too.
                let own = matches!(operation, Some(Operation::Write(_) | Operation::Send(_) | Operation::Flush));
                let is_write = entry.flags & FI_REMOTE_CQ_DATA != 0 && entry.flags & FI_RECV == 0 && !own;
                *done = match operation {
                    _ if is_write => Done::Immediate(entry.data as u32),
                    Some(operation) => Done::Operation(operation),
                    None => Done::NONE,
                };
            }
            return Ok(count);
        }
        match count as c_int {
            0 => Ok(0),
            code if code == -FI_EAGAIN || code == -FI_EINTR => Ok(0),
            code if code == -FI_EAVAIL => Ok(self.read_error(door, found)),
            code => Err(self.origin.refused("reads no completions", code, "open another endpoint").ending()),
        }
    }

    #[cold]
    fn read_error(&self, door: &Door, found: &mut [Done; BATCH]) -> usize {
        // SAFETY: numbers and pointers that may be null.
        let mut entry: fi_cq_err_entry = unsafe { zeroed() };
        // SAFETY: an open queue, and an entry as long as that of any version.
        let count = unsafe { fi_cq_readerr(door.completions.as_ptr(), &mut entry, 0) };
        if count != 1 {
            return 0;
        }
        let failure = self.provider.failure(entry.err, entry.prov_errno);
        // The provider's own operations, such as handshakes, have flags of what they are.
        let of_arrival = entry.flags == 0 || entry.flags & (FI_REMOTE_WRITE | FI_REMOTE_CQ_DATA) != 0;
        found[0] = match self.contexts.operation(entry.op_context) {
            Some(operation) => Done::Failed(operation, failure),
            None => Done::Stray(failure, of_arrival && self.provider.overruns()),
        };
        1
    }

    /// Reads the event queue. Errors of handshakes with peers that have gone are theirs; after others the endpoint is
    /// broken.
    ///
    /// # Errors
    /// `Transport` with the provider's text.
    pub fn check_events(&self) -> Result<()> {
        if !self.provider.overruns() {
            return Ok(());
        }
        let (mut event, mut room) = (0, [0u64; 8]);
        // SAFETY: an open queue, and a place for an event.
        let code =
            unsafe { fi_eq_read(self.events.as_ptr(), &mut event, room.as_mut_ptr().cast(), size_of_val(&room), 0) };
        if code as c_int != -FI_EAVAIL {
            return Ok(());
        }
        // SAFETY: numbers and pointers that may be null.
        let mut entry: fi_eq_err_entry = unsafe { zeroed() };
        // SAFETY: an open queue, and a place for the entry.
        if unsafe { fi_eq_readerr(self.events.as_ptr(), &mut entry, 0) } < 0 {
            return Ok(());
        }
        let failure = self.provider.failure(entry.err, entry.prov_errno);
        let why = self.explain(failure.code);
        if failure.reason == Reason::Unreachable {
            log::debug!(target: crate::base::targets::NETWORK, "NIC {}: a peer has gone: {why}", self.facts.domain);
            return Ok(());
        }
        let what = format!("libfabric reports an error of NIC {}: {why}", self.facts.domain);
        Err(Error::transport(what, "open another endpoint").ending())
    }

    /// The library's text of a failure's code, or the provider's where the code is its own.
    pub fn explain(&self, code: u32) -> String {
        let Some(status) = self.provider.status(code) else {
            return self.origin.library.strerror(self.provider.error_number(code));
        };
        let Some(door) = self.door.as_ref().filter(|_| status != 0) else { return format!("status {status}") };
        // SAFETY: an open queue; the provider has a text of its own, which stays.
        let text = unsafe { fi_cq_strerror(door.completions.as_ptr(), status, null(), null_mut(), 0) };
        if text.is_null() {
            return format!("status {status}");
        }
        // SAFETY: a C string of the provider's.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }
}

impl Nic for Lane {
    /// Of a GPU's memory the whole allocation.
    ///
    /// # Errors
    /// `Argument` for a GPU's memory that it does not reach; `Transport` if the provider refuses.
    fn register(&mut self, span: Span, gpu: Option<&Gpu>) -> Result<()> {
        let registrar = Registrar {
            library: self.origin.library,
            origin: &self.origin,
            domain: &self.domain,
            facts: &self.facts,
            advice: self.provider.advice_on_memory(),
        };
        let access = FI_WRITE | FI_REMOTE_WRITE;
        let reached = gpu.zip(self.reached.as_ref().and_then(|reached| reached.reach.way));
        let region = match (allocation(&span, reached.map(|(gpu, _)| gpu.ordinal))?, reached) {
            (Some(whole), Some((gpu, way))) => registrar.register_gpu(way, gpu, (&span, whole), access)?,
            _ => registrar.register_host(span, access)?,
        };
        self.regions.push(region);
        Ok(())
    }

    fn undo(&mut self) {
        self.regions.undo();
    }

    fn release(&mut self, region: RegionId) -> Result<()> {
        self.regions.close(region, Object::close).map_err(|code| {
            let what = format!("closes no memory region: region {} stays registered", region.0);
            self.origin.refused(&what, code, ADVICE)
        })
    }

    fn remote(&self, region: RegionId, base: u64) -> Option<Remote> {
        Some(self.place(self.regions.get(region)?, base))
    }
}
