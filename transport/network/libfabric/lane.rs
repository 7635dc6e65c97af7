//! A NIC of an endpoint: a domain with its registered memory, and the endpoint in it that a reset replaces.
//!
//! Place in the data path: the last step before the library. On the endpoint's thread, which alone makes progress.
//!
//! ```text
//!  fabric ── domain ── regions …               stay over a reset
//!     └ event queue ─┐     └ completion queue, address vector, endpoint      are closed and opened anew
//! ```

use super::address::{MAX_NAME, Remote};
use super::config::LibfabricConfig;
use super::info::{Facts, Info};
use super::libfabric_sys::*;
use super::object::{Object, Origin};
use super::slab::{EMPTY, LINE, Slab};
use super::slots::{Contexts, Operation, Slots};
use crate::base::{Error, Rank, Result};
use crate::transport::network::{RegionId, Span, WriteImm};
use libc::iovec;
use std::ffi::{c_int, c_void};
use std::mem::zeroed;
use std::ptr::{null, null_mut};

const ADVICE: &str = "see the provider's manual page, and set FI_LOG_LEVEL=warn for its reasons";
/// Entries of a completion queue beyond the operations that may be under way: what has arrived and was not polled. The
/// software providers put more into lists of their own.
const ARRIVALS: usize = 16 << 10;
/// Completions that one call reads.
pub(super) const BATCH: usize = 32;

/// A write under way.
#[derive(Debug, Clone, Copy)]
pub(super) struct Flight {
    pub write: WriteImm,
    /// Where its bytes are.
    pub source: u64,
    /// The peer's endpoint that it was posted to.
    pub channel: u64,
}

/// What a reset replaces; closed in this order.
#[derive(Debug)]
struct Door {
    endpoint: Object<fid_ep>,
    completions: Object<fid_cq>,
    addresses: Object<fid_av>,
    name: Vec<u8>,
}

#[derive(Debug)]
enum Registered {
    Open(Object<fid_mr>),
    /// Taken back.
    Closed,
    /// The provider did not close it, and may go on to use it.
    Stuck(c_int),
}

/// Closed and freed in this order.
#[derive(Debug)]
pub(super) struct Lane {
    door: Option<Door>,
    /// Why the last endpoint could not be closed.
    stuck: Option<c_int>,
    regions: Vec<Registered>,
    scratch: Object<fid_mr>,
    local: Object<fid_mr>,
    domain: Object<fid_domain>,
    events: Object<fid_eq>,
    _fabric: Object<fid_fabric>,
    info: Info,
    contexts: Contexts,
    pub facts: Facts,
    pub writes: Slots<Flight>,
    /// Flags of every write.
    write_flags: u64,
    origin: Origin,
}

// SAFETY: objects of a domain of its own, which one thread at a time uses: whoever has the lane.
unsafe impl Send for Lane {}

/// A completion.
#[derive(Debug, Clone, Copy)]
pub(super) enum Done {
    Immediate(u32),
    Operation(Operation),
    /// An error of an operation; none for one that no operation is named with.
    Failed(Option<Operation>, c_int),
}

impl Lane {
    /// Opens a NIC. `messages`: whether messages go by it.
    pub fn open(library: &'static Library, config: &LibfabricConfig, slab: &Slab, messages: bool) -> Result<Lane> {
        let info = Info::find(library, config)?;
        let origin = Info::origin(library, config);
        let facts = info.facts();
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
        let scratch = register(&origin, &domain, &facts, own, FI_REMOTE_WRITE)?;
        let local = register(&origin, &domain, &facts, Span::host(local, bytes), FI_WRITE | FI_SEND | FI_RECV)?;
        let writes = facts.queue as u32;
        let (sends, receives) = if messages { (slab.sends(), slab.receives()) } else { (0, 0) };
        let delivery = if facts.provider.starts_with("tcp") { FI_DELIVERY_COMPLETE } else { 0 };
        let mut lane = Lane {
            door: None,
            stuck: None,
            regions: Vec::new(),
            scratch,
            local,
            domain,
            events,
            _fabric: fabric,
            info,
            contexts: Contexts::new(writes, sends, receives),
            facts,
            writes: Slots::new(writes),
            write_flags: FI_REMOTE_CQ_DATA | FI_COMPLETION | delivery,
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
        let size = self.facts.queue + ARRIVALS;
        let mut queue = fi_cq_attr {
            size,
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
            return Err(origin.refused("enables no endpoint", code, ADVICE));
        }
        let mut name = vec![0; MAX_NAME];
        let mut length = name.len();
        // SAFETY: a place of as many bytes.
        let code = unsafe { fi_getname(endpoint.as_ptr(), name.as_mut_ptr().cast(), &mut length) };
        if code != 0 || length == 0 || length > name.len() {
            return Err(origin.refused("gives an endpoint no name", code, ADVICE));
        }
        name.truncate(length);
        self.door = Some(Door { endpoint, completions, addresses, name });
        Ok(())
    }

    fn door(&self, rank: Rank) -> Result<&Door> {
        self.door.as_ref().ok_or_else(|| {
            Error::transport(format!("endpoint of rank {rank} could not be opened again"), "open another").ending()
        })
    }

    // ---- memory

    /// Registers memory by the next number.
    pub fn register(&mut self, span: Span) -> Result<()> {
        let region = register(&self.origin, &self.domain, &self.facts, span, FI_WRITE | FI_REMOTE_WRITE)?;
        self.regions.push(Registered::Open(region));
        Ok(())
    }

    /// Forgets the last registration.
    pub fn undo(&mut self) {
        self.regions.pop();
    }

    /// Takes a region back.
    ///
    /// # Errors
    /// `Transport` if the provider does not close it, now and each time after.
    pub fn release(&mut self, region: RegionId) -> Result<()> {
        let Some(place) = self.regions.get_mut(usize::from(region.0)) else { return Ok(()) };
        let closed = match std::mem::replace(place, Registered::Closed) {
            Registered::Open(object) => object.close(),
            Registered::Closed => Ok(()),
            Registered::Stuck(code) => Err(code),
        };
        closed.map_err(|code| {
            *place = Registered::Stuck(code);
            let what = format!("closes no memory region: region {} stays registered", region.0);
            self.origin.refused(&what, code, ADVICE)
        })
    }

    fn region(&self, region: RegionId) -> Option<&Object<fid_mr>> {
        match self.regions.get(usize::from(region.0))? {
            Registered::Open(object) => Some(object),
            Registered::Closed | Registered::Stuck(_) => None,
        }
    }

    /// Where peers write to a region that begins at `base`.
    pub fn remote(&self, region: RegionId, base: u64) -> Option<Remote> {
        Some(self.place(self.region(region)?, base))
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
        if self.facts.provider == "shm" {
            name.iter().position(|byte| *byte == 0) == name.len().checked_sub(1)
        } else {
            name.len() == own.len() && name.get(..2) == own.get(..2)
        }
    }

    /// Adds a peer's endpoint.
    pub fn insert(&self, rank: Rank, name: &[u8]) -> Result<fi_addr_t> {
        let door = self.door(rank)?;
        let mut found = FI_ADDR_UNSPEC;
        let refused = || Error::transport("names no endpoint that the provider knows", ADVICE);
        if !self.resembles(&door.name, name) {
            return Err(refused());
        }
        // SAFETY: a name as long and of the same kind as fi_getname's, and a place for the answer.
        let count =
            unsafe { fi_av_insert(door.addresses.as_ptr(), name.as_ptr().cast(), 1, &mut found, 0, null_mut()) };
        if count == 1 && found != FI_ADDR_UNSPEC { Ok(found) } else { Err(refused()) }
    }

    /// Removes a peer's endpoint, to which nothing is under way.
    pub fn remove(&self, mut address: fi_addr_t) {
        let Some(door) = &self.door else { return };
        // SAFETY: an address that `insert` gave.
        let code = unsafe { fi_av_remove(door.addresses.as_ptr(), &mut address, 1, 0) };
        if code != 0 {
            log::debug!(target: crate::base::targets::NETWORK, "libfabric removes no address: error {code}");
        }
    }

    // ---- operations

    /// Posts the write of a number: 0, or the library's error.
    pub fn write(
        &self,
        number: u32,
        flight: &Flight,
        to: fi_addr_t,
        target: Remote,
        scratch: Remote,
        slab: &Slab,
    ) -> c_int {
        let Some(door) = &self.door else { return -FI_ENODATA };
        let write = &flight.write;
        let (source, bytes, place, object) = if write.bytes > 0 {
            let Some(region) = self.region(write.source.region) else { return -FI_EINVAL };
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
            addr: to,
            rma_iov: &remote,
            rma_iov_count: 1,
            context: self.contexts.of(Operation::Write(number)),
            data: u64::from(write.imm.bits()),
        };
        // SAFETY: an enabled endpoint; the source is registered and stays until the completion, and so does the
        // context. The rest is read during the call.
        unsafe { fi_writemsg(door.endpoint.as_ptr(), &message, self.write_flags) as c_int }
    }

    /// Sends the message of a number: 0, or the library's error.
    pub fn send(&self, number: u32, to: fi_addr_t, slab: &Slab, bytes: usize) -> c_int {
        self.message(Operation::Send(number), slab.send(number), to, bytes)
    }

    /// Posts a receive: 0, or the library's error.
    pub fn receive(&self, number: u32, slab: &Slab) -> c_int {
        self.message(Operation::Receive(number), slab.receive(number), FI_ADDR_UNSPEC, super::message::PITCH)
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

    /// Makes progress, and reads completions; answers how many are in `found`.
    ///
    /// # Errors
    /// `Transport` if the queue is broken.
    pub fn poll(&self, found: &mut [Done; BATCH]) -> Result<usize> {
        let Some(door) = &self.door else { return Ok(0) };
        // SAFETY: numbers and pointers that may be null.
        let mut entries: [fi_cq_data_entry; BATCH] = unsafe { zeroed() };
        // SAFETY: an open queue of this format, and room for as many entries.
        let count = unsafe { fi_cq_read(door.completions.as_ptr(), entries.as_mut_ptr().cast(), BATCH) };
        if count > 0 {
            let count = (count as usize).min(BATCH);
            for (entry, done) in entries.iter().zip(found.iter_mut()).take(count) {
                let operation = self.contexts.operation(entry.op_context);
                // Some providers name a receive with a write, and some name nothing; a message may carry data, too.
                let own = matches!(operation, Some(Operation::Write(_) | Operation::Send(_)));
                let is_write = entry.flags & FI_REMOTE_CQ_DATA != 0 && entry.flags & FI_RECV == 0 && !own;
                *done = match operation {
                    _ if is_write => Done::Immediate(entry.data as u32),
                    Some(operation) => Done::Operation(operation),
                    None => Done::Failed(None, 0),
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
        found[0] = Done::Failed(self.contexts.operation(entry.op_context), entry.err);
        1
    }

    /// The library's text of a failure's code.
    pub fn explain(&self, code: u32) -> String {
        self.origin.library.strerror(code.min(c_int::MAX as u32) as c_int)
    }
}

/// Registers memory. Keys that this side chooses are drawn at random, so that nobody reaches a later region by a former
/// key.
fn register(
    origin: &Origin,
    domain: &Object<fid_domain>,
    facts: &Facts,
    span: Span,
    access: u64,
) -> Result<Object<fid_mr>> {
    let advice = "raise the limit on locked memory (ulimit -l), or register less";
    let piece = iovec { iov_base: span.base as *mut c_void, iov_len: span.bytes };
    let key = if facts.chooses_keys { 0 } else { random()? };
    let key = if facts.key_bytes >= 8 { key } else { key & ((1 << (8 * facts.key_bytes)) - 1) };
    // SAFETY: numbers and pointers that may be null.
    let mut attributes: fi_mr_attr = unsafe { zeroed() };
    attributes.mr_iov = &piece;
    attributes.iov_count = 1;
    attributes.access = access;
    attributes.requested_key = key;
    attributes.iface = FI_HMEM_SYSTEM;
    attributes.base_mr = null();
    // SAFETY: an open domain, attributes that are read during the call, and a place for the answer; the memory stays
    // until the region is closed.
    unsafe { Object::open(origin, advice, |to| fi_mr_regattr(domain.as_ptr(), &attributes, 0, to)) }
}

/// A random number.
pub(super) fn random() -> Result<u64> {
    let lack = |error| Error::transport(format!("the system gives no random numbers ({error})"), "see getrandom(2)");
    getrandom::u64().map_err(lack)
}
