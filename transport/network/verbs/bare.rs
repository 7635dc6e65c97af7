//! The least that a program does with verbs: what `tokenyard wire` compares [`VerbsEndpoint`] with.
//!
//! Place in the data path: none. One peer, one region and one queue pair with receives of its own, by the same objects
//! and with the same flags as the backend. Each write has its own doorbell and completion. It keeps no credits, takes
//! nothing back, resumes nothing, and sends no messages.
//!
//! [`VerbsEndpoint`]: super::VerbsEndpoint

use super::address::{Address, End, NUMBERS, Port};
use super::config::VerbsConfig;
use super::device::Device;
use super::ibverbs_sys::*;
use super::lane::BATCH;
use super::memory::register_host;
use super::objects::{Object, prepare_for_forks, refused};
use super::pair;
use crate::base::{Error, Rank, Result};
use crate::transport::network::Span;
use crate::transport::network::encoding::Remote;
use crate::transport::network::encoding::Reported;
use crate::transport::network::keys::random;
use std::ffi::c_int;
use std::mem::zeroed;
use std::ptr::null_mut;

/// What a completion is of.
const WRITE: u64 = 0;
const RECEIVE: u64 = 1;
const ACCESS: ibv_access_flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_RELAXED_ORDERING;
const ADVICE: &str = "see `ibv_devinfo -v` for the device's limits";

/// An endpoint with one peer and one region. Closed in this order.
#[derive(Debug)]
pub struct Bare {
    pair: Object<ibv_qp>,
    completions: Object<ibv_cq>,
    region: Object<ibv_mr>,
    device: Device,
    config: VerbsConfig,
    rank: Rank,
    span: Span,
    own: End,
    peer: Option<Remote>,
    /// Bytes that a request carries itself.
    inline: u32,
    /// Receives that are posted.
    receives: u32,
    /// Writes that may be under way, and those that are.
    room: usize,
    under_way: usize,
}

impl Bare {
    /// Opens the first device, and registers the span.
    ///
    /// # Errors
    /// As [`VerbsEndpoint::open`](super::VerbsEndpoint::open).
    ///
    /// # Safety
    /// The span outlives the endpoint, and is accessed through raw addresses alone.
    pub unsafe fn open(rank: Rank, config: &VerbsConfig, span: Span) -> Result<Bare> {
        config.check()?;
        let library = config.library.as_deref().map_or_else(Library::open, Library::at)?;
        prepare_for_forks(library)?;
        let name = Device::names(library, config)?.into_iter().next().unwrap_or_default();
        let device = Device::open(library, config, name)?;
        let most = |limit: c_int| u32::try_from(limit).unwrap_or(0);
        let (requests, entries) = (most(device.limits.max_qp_wr), most(device.limits.max_cqe));
        let room = config.peer_posts.min(requests).min(entries / 2);
        let receives = config.receives.min(requests).min(entries.saturating_sub(room));
        let entries = (room + receives) as c_int;
        let region = register_host(&device, span, ACCESS)?;
        // SAFETY: an open device; no channel.
        let completions = unsafe {
            let queue = (library.ibv_create_cq)(device.context.as_ptr(), entries, null_mut(), null_mut(), 0);
            Object::new(library, queue, &format!("{entries} entries on {}", device.name), ADVICE)
        }?;
        // SAFETY: numbers and pointers that may be null.
        let mut attributes: ibv_qp_init_attr = unsafe { zeroed() };
        (attributes.send_cq, attributes.recv_cq) = (completions.as_ptr(), completions.as_ptr());
        (attributes.qp_type, attributes.sq_sig_all) = (IBV_QPT_RC, 1);
        let (pair, inline) = pair::create(&device, &mut attributes, (room, receives), "a bare loop")?;
        let own = End { number: pair::number(&pair), packet: random()? as u32 & NUMBERS };
        let config = config.clone();
        let (peer, room, under_way) = (None, room as usize, 0);
        Ok(Bare { pair, completions, region, device, config, rank, span, own, peer, inline, receives, room, under_way })
    }

    /// The address for the peer.
    pub fn address(&self) -> Vec<u8> {
        // SAFETY: open.
        let key = u64::from(unsafe { (*self.region.as_ptr()).rkey });
        let address = Address {
            key: 0,
            rank: self.rank,
            peer: self.rank,
            messages: End { number: 0, packet: 0 },
            ports: vec![Port { route: self.device.route(self.config.service_level), datagrams: 0, writes: self.own }],
            regions: Reported {
                lengths: vec![self.span.bytes as u64],
                remotes: vec![Remote { base: self.span.base, key }],
            },
        };
        address.encode()
    }

    /// Connects to the peer's address; its region has as many bytes as this one.
    ///
    /// # Errors
    /// `Transport` if the address is unusable, or the device refuses the connection.
    pub fn connect(&mut self, address: &[u8]) -> Result<()> {
        let unusable = |why: &str| Error::transport(format!("address of the peer {why}"), "exchange addresses anew");
        let address = Address::decode(address).map_err(unusable)?;
        let Reported { lengths, remotes } = &address.regions;
        let (Some(port), Some(remote), [length]) = (address.ports.first(), remotes.first(), lengths.as_slice()) else {
            return Err(unusable("has no region"));
        };
        if *length < self.span.bytes as u64 {
            return Err(unusable("has a smaller region"));
        }
        if let Some(why) = self.device.route(self.config.service_level).obstacle(&port.route) {
            return Err(unusable(&why));
        }
        let ends = (self.own, port.writes);
        pair::connect(&mut self.device, &self.pair, ends, &port.route, (0, 0), &self.config)?;
        self.peer = Some(*remote);
        // A queue pair takes receives once it has left the state in which it was made.
        self.receive(self.receives as usize)
    }

    /// Posts a write with an immediate, from an offset of the span to the same offset; false if the queue is full.
    ///
    /// # Errors
    /// `Argument` if the write is outside of the span, or there is no peer; `Transport` with the library's text.
    pub fn post(&mut self, offset: usize, bytes: usize, imm: u32) -> Result<bool> {
        let within = offset.checked_add(bytes).is_some_and(|end| end <= self.span.bytes);
        let (Some(remote), Ok(length), true) = (self.peer, u32::try_from(bytes), within) else {
            return Err(Error::argument("bytes", bytes, "stay within the region of a peer that is connected"));
        };
        if self.under_way >= self.room {
            return Ok(false);
        }
        // SAFETY: open.
        let key = unsafe { (*self.region.as_ptr()).lkey };
        let mut piece = ibv_sge { addr: self.span.base + offset as u64, length, lkey: key };
        // SAFETY: numbers and pointers that may be null.
        let mut request: ibv_send_wr = unsafe { zeroed() };
        request.wr_id = WRITE;
        request.sg_list = &mut piece;
        request.num_sge = c_int::from(bytes > 0);
        request.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
        let inline = bytes > 0 && piece.length <= self.inline;
        request.send_flags = IBV_SEND_SIGNALED | if inline { IBV_SEND_INLINE } else { 0 };
        request.__bindgen_anon_1.imm_data = imm.to_be();
        request.wr.rdma = ibv_send_wr__bindgen_ty_2__bindgen_ty_1 {
            remote_addr: remote.base.wrapping_add(offset as u64),
            rkey: remote.key as u32,
        };
        let mut bad = null_mut();
        // SAFETY: an open queue pair, a request and a piece that the call has read when it returns, and memory of the
        // span.
        match unsafe { ibv_post_send(self.pair.as_ptr(), &mut request, &mut bad) } {
            0 => {
                self.under_way += 1;
                Ok(true)
            }
            code => Err(refused("takes no write of the bare loop", code, "see whether the peer still runs")),
        }
    }

    /// Hands out each arrived immediate as `Some`, and each completed write as `None`.
    ///
    /// # Errors
    /// `Transport` with the library's text, if a write failed, too.
    pub fn poll(&mut self, mut on_event: impl FnMut(Option<u32>)) -> Result<()> {
        // SAFETY: numbers.
        let mut entries: [ibv_wc; BATCH] = unsafe { zeroed() };
        // SAFETY: an open queue, and room for as many.
        let count = unsafe { ibv_poll_cq(self.completions.as_ptr(), BATCH as c_int, entries.as_mut_ptr()) };
        let Ok(count) = usize::try_from(count) else {
            let what = format!("the completion queue of {} is broken ({count})", self.device.name);
            return Err(Error::transport(what, "start again"));
        };
        let mut taken = 0;
        for entry in entries.iter().take(count) {
            if entry.status != IBV_WC_SUCCESS {
                let what = format!("bare loop over verbs fails: {}", self.device.explain(entry.status));
                return Err(Error::transport(what, "see whether the peer still runs, and start again"));
            }
            if entry.wr_id == RECEIVE {
                taken += 1;
                // SAFETY: the completion of a receive by a write with an immediate.
                on_event(Some(u32::from_be(unsafe { entry.__bindgen_anon_1.imm_data })));
            } else {
                self.under_way = self.under_way.saturating_sub(1);
                on_event(None);
            }
        }
        self.receive(taken)
    }

    /// Posts so many receives, which have no memory of their own.
    fn receive(&mut self, count: usize) -> Result<()> {
        // SAFETY: numbers and pointers that may be null.
        let mut chain: [ibv_recv_wr; BATCH] = unsafe { zeroed() };
        let mut left = count;
        while left > 0 {
            let some = left.min(BATCH);
            let mut next = null_mut();
            for receive in chain.iter_mut().take(some).rev() {
                (receive.wr_id, receive.next) = (RECEIVE, next);
                next = receive;
            }
            let mut bad = null_mut();
            // SAFETY: an open queue pair, and a chain on the stack that the call has read when it returns.
            let code = unsafe { ibv_post_recv(self.pair.as_ptr(), next, &mut bad) };
            if code != 0 {
                return Err(refused("takes no receive of the bare loop", code, "start again"));
            }
            left -= some;
        }
        Ok(())
    }
}
