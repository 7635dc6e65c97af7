//! A NIC of an endpoint: its device, queues and registered memory, and the calls on its queue pairs.
//!
//! Place in the data path: the last step before the library. On the endpoint's thread.
//!
//! ```text
//!  device ─ protection domain ─┬─ memory regions …
//!                              ├─ completion queue ◀── all queue pairs
//!                              ├─ receives of immediates (shared) ◀── queue pairs of writes, one a peer
//!                              ├─ receives of messages (shared) ◀──── queue pairs of messages, one a peer (first NIC)
//!                              └─ queue pair of datagrams: reports on broken connections
//! ```

use super::RETRY_NS;
use super::address::End;
use super::config::VerbsConfig;
use super::device::{Device, Route};
use super::flush::{self, Flush};
use super::ibverbs_sys::*;
use super::mark::Mark;
use super::memory::{Reached, reach, register_by, register_host};
use super::objects::{Object, all_closed, refused};
use super::pair::{self, number};
use crate::base::{Error, Rank, Result};
use crate::transport::network::encoding::Remote;
use crate::transport::network::flight::Flight;
use crate::transport::network::message::PITCH;
use crate::transport::network::reach::{Gpu, allocation};
use crate::transport::network::registration::{Nic, Registrations};
use crate::transport::network::slab::Slab;
use crate::transport::network::slots::Slots;
use crate::transport::network::{RegionId, Span, SpanMemory, WriteImm};
use std::ffi::c_int;
use std::mem::zeroed;
use std::ptr::null_mut;

/// Completions that one call reads.
pub(super) const BATCH: usize = 32;
/// Requests that one doorbell serves, at most.
pub(super) const CHAIN: usize = 16;
/// Writes of a NIC that may be under way, to all peers together.
const WRITES: u32 = 8192;
/// Reports on their way, and receives for reports: peers repeat what finds none.
pub(super) const REPORTS: u32 = 64;
const REPORT_RECEIVES: u32 = 256;
/// Reads of flushes under way.
const FLUSHES: u32 = 1;
/// Bytes that a device puts before a datagram. Source: ibv_post_recv(3).
pub(super) const GLOBAL_HEADER: usize = 40;
/// Of all datagrams: it only keeps other users' out.
const DATAGRAM_KEY: u32 = 0x7479_5642;
const ADVICE: &str = "see `ibv_devinfo -v` for the device's limits";

/// What a queue pair is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Line {
    Writes,
    Messages,
}

/// What a reset replaces; closed in this order.
#[derive(Debug)]
struct Queues {
    /// Of flushes, where immediates wait for them.
    flushes: Option<Object<ibv_qp>>,
    datagrams: Object<ibv_qp>,
    /// Receives of messages, on the NIC that they go by.
    messages: Option<Object<ibv_srq>>,
    immediates: Object<ibv_srq>,
    completions: Object<ibv_cq>,
}

/// Entries of a NIC's queues.
#[derive(Debug, Clone, Copy)]
struct Sizes {
    completions: u32,
    immediates: u32,
    messages: u32,
    has_flushes: bool,
}

/// Closed in this order.
pub(super) struct Lane {
    /// And whether the processor can read them.
    regions: Registrations<(Object<ibv_mr>, bool)>,
    queues: Queues,
    pub flush: Option<Flush>,
    /// The GPU whose memory it reaches, and how.
    pub reached: Option<Reached>,
    /// Of the messages' slab.
    message_memory: Option<Object<ibv_mr>>,
    report_memory: Object<ibv_mr>,
    pub reports: Slab,
    pub device: Device,
    sizes: Sizes,
    /// Immediates that may be under way to it.
    pub immediates: u32,
    /// The GID's place, and how often that has changed.
    gid_index: Option<u8>,
    pub changes: u32,
    /// Writes to one peer that may be outstanding.
    pub posts: u32,
    /// The queue pair of datagrams is in error.
    pub is_mute: bool,
    pub writes: Slots<Flight>,
    pub sent_reports: Slots<()>,
    /// Whose queue pair has that number, in order.
    owners: Vec<(u32, Rank, Line)>,
    /// Requests that are linked to one post.
    requests: Box<[ibv_send_wr; 2 * CHAIN]>,
    pieces: Box<[ibv_sge; 2 * CHAIN]>,
    linked: usize,
    /// What the last read gave.
    pub entries: Box<[ibv_wc; BATCH]>,
}

// SAFETY: the pointers in `requests` are to this value's own boxes; one thread at a time uses the lane.
unsafe impl Send for Lane {}

impl std::fmt::Debug for Lane {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}, {} queue pairs, {} regions", self.device, self.owners.len(), self.regions.len())
    }
}

impl Lane {
    /// Opens a NIC; messages of the slab go by it if there is one.
    pub fn open(
        library: &'static Library,
        config: &VerbsConfig,
        device: String,
        messages: Option<&Slab>,
        gpu: Option<&Gpu>,
    ) -> Result<Lane> {
        let mut device = Device::open(library, config, device)?;
        let (sends, message_receives) = messages.map_or((0, 0), |slab| (slab.sends(), slab.receives()));
        let fixed = sends + message_receives + REPORTS + REPORT_RECEIVES + FLUSHES;
        let most = |limit: c_int| u32::try_from(limit).unwrap_or(0);
        let entries = most(device.limits.max_cqe).saturating_sub(fixed);
        let immediates = config.receives.min(most(device.limits.max_srq_wr)).min(entries / 2);
        // A write that is split completes once, but both of its requests do when they are cut off.
        let requests = config.requests();
        let writes = WRITES.min(entries.saturating_sub(immediates) / requests);
        if immediates == 0 || writes == 0 {
            let (name, limits) = (&device.name, &device.limits);
            let what = format!(
                "{name} has completion queues of {} entries and shared receives of {}",
                limits.max_cqe, limits.max_srq_wr
            );
            return Err(Error::transport(what, "use another device"));
        }
        let posts = config.peer_posts.min(writes).min(most(device.limits.max_qp_wr) / requests).max(1);
        let reached = gpu.map(|gpu| reach(&device, gpu, config.flush));
        // Where the GPU's memory is not reached, all regions are in host memory.
        let has_flushes = match &reached {
            Some(Reached { reach, probe }) => reach.flush && probe.is_some(),
            None => config.flush == Some(true),
        };
        let completions = fixed + immediates + writes * requests;
        let sizes = Sizes { completions, immediates, messages: message_receives, has_flushes };
        let memory = |slab: &Slab| {
            let (base, bytes) = slab.local();
            register_host(&device, Span::host(base, bytes), IBV_ACCESS_LOCAL_WRITE)
        };
        let reports = Slab::new(REPORTS, REPORT_RECEIVES, all_closed)?;
        let (message_memory, report_memory) = (messages.map(memory).transpose()?, memory(&reports)?);
        let flush = has_flushes.then(|| {
            let probe = reached.as_ref().zip(gpu.map(|gpu| gpu.probe.base));
            Flush::new(&device, &reports, probe, immediates)
        });
        let flush = flush.transpose()?;
        let gid_index = device.gid_entry().ok();
        // SAFETY: numbers and pointers that may be null.
        let (request, piece, entry) = unsafe { (zeroed(), zeroed(), zeroed()) };
        let mut lane = Lane {
            regions: Registrations::default(),
            queues: Queues::open(&mut device, sizes, config)?,
            flush,
            reached,
            message_memory,
            report_memory,
            reports,
            device,
            sizes,
            immediates,
            gid_index,
            changes: 0,
            posts,
            is_mute: false,
            writes: Slots::new(writes),
            sent_reports: Slots::new(REPORTS),
            owners: Vec::new(),
            requests: Box::new([request; 2 * CHAIN]),
            pieces: Box::new([piece; 2 * CHAIN]),
            linked: 0,
            entries: Box::new([entry; BATCH]),
        };
        lane.fill(messages, config)?;
        Ok(lane)
    }

    /// Posts all receives, and opens the queue pair of flushes.
    fn fill(&mut self, messages: Option<&Slab>, config: &VerbsConfig) -> Result<()> {
        self.post_receives(self.sizes.immediates)?;
        if let Some(slab) = messages {
            (0..slab.receives()).try_for_each(|place| self.receive_message(place, slab.receive(place)))?;
        }
        (0..REPORT_RECEIVES).for_each(|place| self.receive_report(place));
        self.flush.iter_mut().for_each(Flush::restart);
        self.open_flushes(config)
    }

    /// Opens new queues, where the queue pairs of all peers have been closed: what the former ones took is gone.
    ///
    /// # Errors
    /// `Transport` if the device opens none; then the former ones stay.
    pub fn renew(&mut self, messages: Option<&Slab>, config: &VerbsConfig) -> Result<()> {
        self.device.renew()?;
        self.queues = Queues::open(&mut self.device, self.sizes, config)?;
        self.is_mute = false;
        self.owners.clear();
        self.sent_reports = Slots::new(REPORTS);
        self.fill(messages, config)
    }

    // ---- memory

    fn region(&self, region: RegionId) -> Option<(&Object<ibv_mr>, bool)> {
        self.regions.get(region).map(|(object, is_host)| (object, *is_host))
    }

    /// The key by which requests name a region of their own side, and whether the processor can read it.
    fn local_key(&self, region: RegionId) -> Option<(u32, bool)> {
        // SAFETY: open.
        self.region(region).map(|(object, is_host)| (unsafe { (*object.as_ptr()).lkey }, is_host))
    }

    /// As `local_key`, of the messages' memory.
    pub fn message_key(&self) -> u32 {
        // SAFETY: open.
        self.message_memory.as_ref().map_or(0, |memory| unsafe { (*memory.as_ptr()).lkey })
    }

    // ---- queue pairs

    /// Makes a queue pair for a peer, which `connect` opens; answers how many bytes a request carries itself, too.
    ///
    /// # Errors
    /// `Transport` if the device has none left.
    pub fn pair(&mut self, peer: Rank, line: Line, requests: u32) -> Result<(Object<ibv_qp>, u32)> {
        let queues = &self.queues;
        let receives = queues.messages.as_ref().filter(|_| line == Line::Messages).unwrap_or(&queues.immediates);
        // SAFETY: numbers and pointers that may be null.
        let mut attributes: ibv_qp_init_attr = unsafe { zeroed() };
        attributes.send_cq = queues.completions.as_ptr();
        attributes.recv_cq = queues.completions.as_ptr();
        attributes.srq = receives.as_ptr();
        attributes.qp_type = IBV_QPT_RC;
        let (pair, inline) = pair::create(&self.device, &mut attributes, (requests, 0), &format!("rank {peer}"))?;
        let number = number(&pair);
        let at = self.owners.partition_point(|(other, ..)| *other < number);
        self.owners.insert(at, (number, peer, line));
        Ok((pair, inline))
    }

    /// The queue pair is closed now, or about to be.
    pub fn disown(&mut self, number: u32) {
        self.owners.retain(|(other, ..)| *other != number);
    }

    /// Whose queue pair has that number.
    pub fn owner(&self, number: u32) -> Option<(Rank, Line)> {
        let at = self.owners.binary_search_by_key(&number, |(number, ..)| *number).ok()?;
        self.owners.get(at).map(|(_, rank, line)| (*rank, *line))
    }

    /// Opens a queue pair towards a peer's, from whatever state it is in.
    ///
    /// # Errors
    /// `Transport` if the port or the way to the peer is not there, now.
    pub fn open_pair(
        &mut self,
        pair: &Object<ibv_qp>,
        (own, other): (End, End),
        to: &Route,
        (salt, incarnation): (u32, u32),
        config: &VerbsConfig,
    ) -> Result<()> {
        pair::connect(&mut self.device, pair, (own, other), to, (salt, incarnation), config)
    }

    /// Closes a queue pair: it takes nothing more, and what it sends is cut off.
    pub fn break_pair(&self, pair: &Object<ibv_qp>) -> std::result::Result<(), i32> {
        pair::to_state(&self.device, pair, IBV_QPS_ERR)
    }

    /// As `break_pair`, and its requests are forgotten.
    pub fn shut_pair(&self, pair: &Object<ibv_qp>) -> std::result::Result<(), i32> {
        pair::to_state(&self.device, pair, IBV_QPS_RESET)
    }

    // ---- requests

    /// Links a write to the next post. Two requests if it is split.
    pub fn link_write(
        &mut self,
        mark: Mark,
        flight: &Flight,
        target: Remote,
        inline: u32,
        split_bytes: Option<u32>,
    ) -> bool {
        let WriteImm { source, target: place, bytes, imm, .. } = flight.write;
        let local = self.local_key(source.region).filter(|_| self.linked + 2 <= self.requests.len());
        let Some((key, is_host)) = local else { return false };
        // The processor copies what a request carries itself.
        let inline = if is_host { inline } else { 0 };
        let piece = ibv_sge { addr: flight.source, length: bytes, lkey: key };
        let to = ibv_send_wr__bindgen_ty_2__bindgen_ty_1 {
            remote_addr: target.base.wrapping_add(place.offset),
            rkey: target.key as u32,
        };
        let split = split_bytes.is_some_and(|most| bytes > most);
        if split {
            self.link(IBV_WR_RDMA_WRITE, mark, (piece, inline), 0, to);
            self.link(IBV_WR_RDMA_WRITE_WITH_IMM, mark, (ibv_sge { length: 0, ..piece }, 0), imm.bits(), to);
        } else {
            self.link(IBV_WR_RDMA_WRITE_WITH_IMM, mark, (piece, inline), imm.bits(), to);
        }
        true
    }

    /// Links a message to the next post.
    pub fn link_message(&mut self, mark: Mark, address: u64, bytes: u32, inline: u32) -> bool {
        if self.linked >= self.requests.len() {
            return false;
        }
        let piece = ibv_sge { addr: address, length: bytes, lkey: self.message_key() };
        let nowhere = ibv_send_wr__bindgen_ty_2__bindgen_ty_1 { remote_addr: 0, rkey: 0 };
        self.link(IBV_WR_SEND, mark, (piece, inline), 0, nowhere);
        true
    }

    fn link(
        &mut self,
        opcode: ibv_wr_opcode,
        mark: Mark,
        (piece, inline): (ibv_sge, u32),
        imm: u32,
        rdma: ibv_send_wr__bindgen_ty_2__bindgen_ty_1,
    ) {
        let at = self.linked;
        let (Some(request), Some(place)) = (self.requests.get_mut(at), self.pieces.get_mut(at)) else { return };
        *place = piece;
        request.wr_id = mark.encode();
        request.next = null_mut();
        request.sg_list = place;
        request.num_sge = c_int::from(piece.length > 0);
        request.opcode = opcode;
        request.send_flags = if piece.length > 0 && piece.length <= inline { IBV_SEND_INLINE } else { 0 };
        request.__bindgen_anon_1.imm_data = imm.to_be();
        request.wr.rdma = rdma;
        let request: *mut ibv_send_wr = request;
        if let Some(before) = at.checked_sub(1).and_then(|before| self.requests.get_mut(before)) {
            before.next = request;
        }
        self.linked += 1;
    }

    /// Posts what was linked, with one doorbell; the last of it is completed, and with it all before.
    ///
    /// # Errors
    /// The system's number; some of it may have been posted.
    pub fn post(&mut self, pair: &Object<ibv_qp>) -> std::result::Result<(), i32> {
        let linked = std::mem::take(&mut self.linked);
        let Some(last) = linked.checked_sub(1).and_then(|last| self.requests.get_mut(last)) else { return Ok(()) };
        last.send_flags |= IBV_SEND_SIGNALED;
        let mut bad = null_mut();
        // SAFETY: an open queue pair; requests and pieces of memory that stay where they are, and whose keys and
        // addresses the endpoint has checked.
        match unsafe { ibv_post_send(pair.as_ptr(), self.requests.as_mut_ptr(), &mut bad) } {
            0 => Ok(()),
            code => Err(code),
        }
    }

    // ---- receives and completions

    /// Posts receives of immediates.
    ///
    /// # Errors
    /// `Transport`: the queue takes none, so that immediates would be lost.
    pub fn post_receives(&mut self, count: u32) -> Result<()> {
        let mut left = count as usize;
        // SAFETY: numbers and pointers that may be null.
        let mut chain: [ibv_recv_wr; BATCH] = unsafe { zeroed() };
        while left > 0 {
            let some = left.min(BATCH);
            let mut next = null_mut();
            for receive in chain.iter_mut().take(some).rev() {
                receive.wr_id = Mark::Immediate.encode();
                receive.next = next;
                next = receive;
            }
            let mut bad = null_mut();
            // SAFETY: an open queue, and a chain on the stack that the call has read when it returns.
            let code = unsafe { ibv_post_srq_recv(self.queues.immediates.as_ptr(), next, &mut bad) };
            if code != 0 {
                return Err(refused("takes no receive of an immediate", code, "open another endpoint").ending());
            }
            left -= some;
        }
        Ok(())
    }

    /// Posts the receive of a message into its place, which begins at `at`.
    ///
    /// # Errors
    /// `Transport`: the queue takes none.
    pub fn receive_message(&mut self, place: u32, at: u64) -> Result<()> {
        let Some(receives) = &self.queues.messages else { return Ok(()) };
        let mut piece = ibv_sge { addr: at, length: PITCH as u32, lkey: self.message_key() };
        // SAFETY: numbers and pointers that may be null.
        let mut receive: ibv_recv_wr = unsafe { zeroed() };
        receive.wr_id = Mark::Message(place).encode();
        receive.sg_list = &mut piece;
        receive.num_sge = 1;
        let mut bad = null_mut();
        // SAFETY: an open queue, a request that the call has read when it returns, and memory of the slab.
        match unsafe { ibv_post_srq_recv(receives.as_ptr(), &mut receive, &mut bad) } {
            0 => Ok(()),
            code => Err(refused("takes no receive of a message", code, "open another endpoint").ending()),
        }
    }

    /// Reads completions into `entries`.
    ///
    /// # Errors
    /// `Transport` if the queue is broken.
    pub fn poll(&mut self) -> Result<usize> {
        // SAFETY: an open queue, and room for as many.
        let count = unsafe { ibv_poll_cq(self.queues.completions.as_ptr(), BATCH as c_int, self.entries.as_mut_ptr()) };
        usize::try_from(count).map_err(|_| {
            let what = format!("the completion queue of {} is broken ({count})", self.device.name);
            Error::transport(what, "open another endpoint").ending()
        })
    }

    // ---- flushes

    /// Opens the queue pair of flushes, where there is one.
    ///
    /// # Errors
    /// `Transport` if the port is not there, now.
    fn open_flushes(&mut self, config: &VerbsConfig) -> Result<()> {
        let Some(pair) = &self.queues.flushes else { return Ok(()) };
        let (own, to) = (End { number: number(pair), packet: 0 }, self.device.route(config.service_level));
        pair::connect(&mut self.device, pair, (own, own), &to, (0, 0), config)
    }

    /// Whether immediates wait for a flush.
    pub fn is_holding(&self) -> bool {
        self.flush.as_ref().is_some_and(|flush| !flush.held.is_empty())
    }

    /// Posts the read of a flush, if immediates wait for one.
    ///
    /// # Errors
    /// `Transport` if flushes have not worked for too long.
    pub fn flush(&mut self, config: &VerbsConfig, now_ns: fn() -> u64) -> Result<()> {
        let Some(flush) = self.flush.as_mut().filter(|flush| flush.held.wants_read()) else { return Ok(()) };
        if flush.broken_ns != 0 {
            let now_ns = now_ns();
            if now_ns.saturating_sub(flush.broken_ns) > config.resume_within_ns() {
                return Err(flush::lost(&self.device));
            }
            if now_ns < flush.retry_ns {
                return Ok(());
            }
            flush.retry_ns = now_ns.saturating_add(RETRY_NS);
            if self.open_flushes(config).is_err() {
                return Ok(());
            }
        }
        let (Some(flush), Some(pair)) = (&mut self.flush, &self.queues.flushes) else { return Ok(()) };
        if flush.post(pair).is_err() {
            flush.fail(now_ns());
        }
        Ok(())
    }

    // ---- reports

    /// The number of the queue pair that takes reports.
    pub fn datagrams(&self) -> u32 {
        number(&self.queues.datagrams)
    }

    /// The port went down or up, or its addresses changed: ways to peers are made anew if the GID has another place.
    pub fn port_changed(&mut self) {
        let before = self.gid_index;
        self.gid_index = self.device.gid_entry().ok().or(before);
        self.changes = self.changes.wrapping_add(u32::from(self.gid_index != before));
    }

    /// Makes the queue pair of datagrams work again: reports on their way are lost, and repeated.
    pub fn revive_datagrams(&mut self, config: &VerbsConfig) -> Result<()> {
        let pair = &self.queues.datagrams;
        let failed = |code| refused("resets no datagrams", code, ADVICE);
        self.shut_pair(pair).map_err(failed)?;
        let key = self.device.pkey_index(config)?;
        start_datagrams(&self.device, pair, key)?;
        self.is_mute = false;
        self.sent_reports = Slots::new(REPORTS);
        (0..REPORT_RECEIVES).for_each(|place| self.receive_report(place));
        Ok(())
    }

    /// Whether no report is on its way.
    pub fn reports_are_sent(&self) -> bool {
        self.sent_reports.flying().next().is_none()
    }

    /// Most completions that can be in the queue.
    pub fn most_completions(&self) -> usize {
        self.sizes.completions as usize
    }

    /// An address handle of a peer's port.
    ///
    /// # Errors
    /// `Transport` if it cannot be reached, now.
    pub fn handle(&mut self, to: &Route, config: &VerbsConfig) -> Result<Object<ibv_ah>> {
        let mut way = self.device.way(to, config)?;
        let library = self.device.library;
        // SAFETY: an open domain, and a way that is set.
        unsafe {
            let handle = (library.ibv_create_ah)(self.device.domain.as_ptr(), &mut way);
            Object::new(library, handle, &format!("to {:02x?}", to.gid), "see whether there is a route to the peer")
        }
    }

    /// Sends a report of so many bytes from its place, which begins at `at`.
    pub fn send_report(&mut self, place: u32, bytes: usize, handle: &Object<ibv_ah>, to: u32) -> bool {
        // SAFETY: open.
        let key = unsafe { (*self.report_memory.as_ptr()).lkey };
        let mut piece = ibv_sge { addr: self.reports.send(place), length: bytes as u32, lkey: key };
        // SAFETY: numbers and pointers that may be null.
        let mut request: ibv_send_wr = unsafe { zeroed() };
        request.wr_id = Mark::SentReport(place).encode();
        request.sg_list = &mut piece;
        request.num_sge = 1;
        request.opcode = IBV_WR_SEND;
        request.send_flags = IBV_SEND_SIGNALED;
        request.wr.ud =
            ibv_send_wr__bindgen_ty_2__bindgen_ty_3 { ah: handle.as_ptr(), remote_qpn: to, remote_qkey: DATAGRAM_KEY };
        let mut bad = null_mut();
        // SAFETY: an open queue pair, a request that the call has read when it returns, and memory of the slab.
        unsafe { ibv_post_send(self.queues.datagrams.as_ptr(), &mut request, &mut bad) == 0 }
    }

    /// Posts the receive of a report. Where the queue takes none, reports that find no receive are repeated.
    pub fn receive_report(&mut self, place: u32) {
        // SAFETY: open.
        let key = unsafe { (*self.report_memory.as_ptr()).lkey };
        let mut piece = ibv_sge { addr: self.reports.receive(place), length: PITCH as u32, lkey: key };
        // SAFETY: numbers and pointers that may be null.
        let mut receive: ibv_recv_wr = unsafe { zeroed() };
        receive.wr_id = Mark::Report(place).encode();
        receive.sg_list = &mut piece;
        receive.num_sge = 1;
        let mut bad = null_mut();
        // SAFETY: as for messages.
        let code = unsafe { ibv_post_recv(self.queues.datagrams.as_ptr(), &mut receive, &mut bad) };
        if code != 0 {
            log::debug!(target: crate::base::targets::NETWORK, "no receive of a report: error {code}");
        }
    }
}

impl Queues {
    fn open(device: &mut Device, sizes: Sizes, config: &VerbsConfig) -> Result<Queues> {
        let key = device.pkey_index(config)?;
        let device = &*device;
        let entries = sizes.completions as c_int;
        // SAFETY: an open device; no channel.
        let completions = unsafe {
            let queue = (device.library.ibv_create_cq)(device.context.as_ptr(), entries, null_mut(), null_mut(), 0);
            Object::new(device.library, queue, &format!("{entries} entries on {}", device.name), ADVICE)
        }?;
        let messages = (sizes.messages > 0).then(|| shared_receives(device, sizes.messages)).transpose()?;
        Ok(Queues {
            flushes: sizes.has_flushes.then(|| flush::create(device, &completions)).transpose()?,
            datagrams: datagrams(device, &completions, key)?,
            messages,
            immediates: shared_receives(device, sizes.immediates)?,
            completions,
        })
    }
}

fn shared_receives(device: &Device, count: u32) -> Result<Object<ibv_srq>> {
    let mut attributes =
        ibv_srq_init_attr { srq_context: null_mut(), attr: ibv_srq_attr { max_wr: count, max_sge: 1, srq_limit: 0 } };
    // SAFETY: an open domain.
    unsafe {
        let queue = (device.library.ibv_create_srq)(device.domain.as_ptr(), &mut attributes);
        Object::new(device.library, queue, &format!("{count} receives on {}", device.name), ADVICE)
    }
}

/// The queue pair of datagrams, ready to send and receive.
fn datagrams(device: &Device, completions: &Object<ibv_cq>, pkey_index: u16) -> Result<Object<ibv_qp>> {
    // SAFETY: numbers and pointers that may be null.
    let mut attributes: ibv_qp_init_attr = unsafe { zeroed() };
    attributes.send_cq = completions.as_ptr();
    attributes.recv_cq = completions.as_ptr();
    attributes.qp_type = IBV_QPT_UD;
    attributes.cap = ibv_qp_cap {
        max_send_wr: REPORTS,
        max_recv_wr: REPORT_RECEIVES,
        max_send_sge: 1,
        max_recv_sge: 1,
        max_inline_data: 0,
    };
    let library = device.library;
    // SAFETY: an open domain and queue of the same device.
    let pair = unsafe {
        let pair = (library.ibv_create_qp)(device.domain.as_ptr(), &mut attributes);
        Object::new(library, pair, &format!("for datagrams on {}", device.name), ADVICE)
    }?;
    start_datagrams(device, &pair, pkey_index)?;
    Ok(pair)
}

/// Makes the queue pair of datagrams ready to send and receive, from no state.
fn start_datagrams(device: &Device, pair: &Object<ibv_qp>, pkey_index: u16) -> Result<()> {
    let failed = |code| refused(&format!("starts no datagrams on {}", device.name), code, ADVICE);
    // SAFETY: numbers.
    let mut to_init: ibv_qp_attr = unsafe { zeroed() };
    to_init.qp_state = IBV_QPS_INIT;
    to_init.port_num = device.port();
    to_init.pkey_index = pkey_index;
    to_init.qkey = DATAGRAM_KEY;
    let mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY;
    device.modify(pair, &mut to_init, mask as c_int).map_err(failed)?;
    // SAFETY: numbers.
    let mut to_receive: ibv_qp_attr = unsafe { zeroed() };
    to_receive.qp_state = IBV_QPS_RTR;
    device.modify(pair, &mut to_receive, IBV_QP_STATE as c_int).map_err(failed)?;
    // SAFETY: numbers.
    let mut to_send: ibv_qp_attr = unsafe { zeroed() };
    to_send.qp_state = IBV_QPS_RTS;
    device.modify(pair, &mut to_send, (IBV_QP_STATE | IBV_QP_SQ_PSN) as c_int).map_err(failed)
}

impl Nic for Lane {
    /// Of a GPU's memory the whole allocation.
    ///
    /// # Errors
    /// `Argument` for a GPU's memory that it does not reach; `Transport` if the device refuses.
    fn register(&mut self, span: Span, gpu: Option<&Gpu>) -> Result<()> {
        // Nothing here is inferred from the order in which bytes arrive, so that the device may store them in any.
        let access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_RELAXED_ORDERING;
        let way = self.reached.as_ref().and_then(|reached| reached.reach.way);
        let reached = gpu.zip(way);
        let region = match (allocation(&span, reached.map(|(gpu, _)| gpu.ordinal))?, reached) {
            (Some(whole), Some((gpu, way))) => register_by(way, &self.device, gpu, (&span, whole), access)?,
            _ => register_host(&self.device, span, access)?,
        };
        self.regions.push((region, span.memory == SpanMemory::Host));
        Ok(())
    }

    fn undo(&mut self) {
        self.regions.undo();
    }

    fn release(&mut self, region: RegionId) -> Result<()> {
        self.regions.close(region, |(object, _)| object.close()).map_err(|code| {
            refused(&format!("closes no memory region: region {} stays registered", region.0), code, ADVICE)
        })
    }

    fn remote(&self, region: RegionId, base: u64) -> Option<Remote> {
        // SAFETY: open.
        self.region(region).map(|(object, _)| Remote { base, key: u64::from(unsafe { (*object.as_ptr()).rkey }) })
    }
}
