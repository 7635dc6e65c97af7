//! The least that a program does with libfabric: what `tokenyard wire` compares [`LibfabricEndpoint`] with.
//!
//! Place in the data path: none. One peer and one region, by the same objects and with the same flags as the backend.
//! It keeps no credits, takes nothing back, and sends no messages.
//!
//! [`LibfabricEndpoint`]: super::LibfabricEndpoint

use super::address::{Address, Port};
use super::config::LibfabricConfig;
use super::lane::{BareWrite, Lane};
use super::libfabric_sys::*;
use crate::base::{Error, Rank, Result};
use crate::transport::network::encoding::{Remote, Reported};
use crate::transport::network::registration::Nic;
use crate::transport::network::slab::Slab;
use crate::transport::network::{RegionId, Span};
use std::ffi::c_int;

const REGION: RegionId = RegionId(0);
/// Completions that one call reads, as the backend does.
const BATCH: usize = 32;

/// An endpoint with one peer and one region.
#[derive(Debug)]
pub struct Bare {
    rank: Rank,
    span: Span,
    peer: Option<(fi_addr_t, Remote)>,
    /// Numbers the writes.
    next: u32,
    /// Writes that have not completed; each has a context, and the provider tcp is never full.
    under_way: usize,
    /// Before the slab, which its provider uses.
    lane: Lane,
    slab: Slab,
}

impl Bare {
    /// Opens the first NIC, and registers the span.
    ///
    /// # Errors
    /// As [`LibfabricEndpoint::open`](super::LibfabricEndpoint::open).
    ///
    /// # Safety
    /// The span outlives the endpoint, and is accessed through raw addresses alone.
    pub unsafe fn open(rank: Rank, config: &LibfabricConfig, span: Span) -> Result<Bare> {
        let provider = config.check()?;
        let library = config.library.as_deref().map_or_else(Library::open, Library::at)?;
        let slab = Slab::new(1, 1, super::object::all_closed)?;
        let mut lane = Lane::open(library, config, provider, &slab, (0, None))?;
        lane.register(span, None)?;
        Ok(Bare { rank, span, peer: None, next: 0, under_way: 0, lane, slab })
    }

    /// The address for the peer.
    ///
    /// # Errors
    /// `Transport` if the endpoint is closed.
    pub fn address(&self) -> Result<Vec<u8>> {
        let port = Port { name: self.lane.name(self.rank)?.to_vec(), scratch: self.lane.scratch(&self.slab) };
        let address = Address {
            key: 0,
            rank: self.rank,
            virtual_addresses: self.lane.facts.virtual_addresses,
            provider: self.lane.facts.kind(),
            ports: vec![port],
            regions: Reported {
                lengths: vec![self.span.bytes as u64],
                remotes: self.lane.remote(REGION, self.span.base).into_iter().collect(),
            },
        };
        Ok(address.encode())
    }

    /// Connects to the peer's address; its region has as many bytes as this one.
    ///
    /// # Errors
    /// `Transport` if the address is unusable.
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
        self.peer = Some((self.lane.insert(self.rank, &port.name)?, *remote));
        Ok(())
    }

    /// Posts a write with an immediate, from an offset of the span to the same offset; false if the provider is full.
    ///
    /// # Errors
    /// `Argument` if the write is outside of the span, or there is no peer; `Transport` with the library's text.
    pub fn post(&mut self, offset: usize, bytes: usize, imm: u32) -> Result<bool> {
        let Some((address, remote)) =
            self.peer.filter(|_| offset.checked_add(bytes).is_some_and(|end| end <= self.span.bytes))
        else {
            return Err(Error::argument("bytes", bytes, "stay within the region of a peer that is connected"));
        };
        if self.under_way >= self.lane.room {
            return Ok(false);
        }
        let write = BareWrite { offset: offset as u64, bytes, address, remote, imm, number: self.next };
        match self.lane.write_bare(REGION, self.span.base, &write) {
            0 => {
                (self.under_way, self.next) = (self.under_way + 1, self.next.wrapping_add(1));
                Ok(true)
            }
            code if code == -FI_EAGAIN => Ok(false),
            code => Err(self.failed(code)),
        }
    }

    /// Hands out each arrived immediate as `Some`, and each completed write as `None`.
    ///
    /// # Errors
    /// `Transport` with the library's text, if a write failed, too.
    pub fn poll(&mut self, mut on_event: impl FnMut(Option<u32>)) -> Result<()> {
        // SAFETY: numbers and pointers that may be null.
        let mut entries: [fi_cq_data_entry; BATCH] = unsafe { std::mem::zeroed() };
        let count = self.lane.read_bare(&mut entries);
        match usize::try_from(count) {
            Ok(count) => {
                for entry in entries.iter().take(count) {
                    let arrived = entry.flags & FI_REMOTE_CQ_DATA != 0;
                    self.under_way -= usize::from(!arrived && self.under_way > 0);
                    on_event(arrived.then_some(entry.data as u32));
                }
                Ok(())
            }
            Err(_) if count as c_int == -FI_EAGAIN => Ok(()),
            Err(_) => Err(self.failed(count as c_int)),
        }
    }

    fn failed(&self, code: c_int) -> Error {
        let what = format!("bare loop over libfabric fails: {}", self.lane.explain(code.unsigned_abs()));
        Error::transport(what, "see whether the peer still runs, and start again")
    }
}
