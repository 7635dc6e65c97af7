//! Registration of memory with a domain: the host's, and a GPU's by the best way that works.
//!
//! Place in the data path: beside it, when memory is registered.

use super::info::{Facts, Info};
use super::libfabric_sys::*;
use super::object::{Object, Origin};
use crate::base::{Error, Result};
use crate::transport::memory::DmaBufMapping;
use crate::transport::network::keys::random;
use crate::transport::network::reach::{Gpu, Reach, Way, choose};
use crate::transport::network::{Allocation, Span, SpanMemory};
use libc::iovec;
use std::ffi::{c_int, c_void};
use std::mem::zeroed;
use std::os::fd::AsRawFd;
use std::ptr::{null, null_mut};

const WAYS: [Way; 2] = [Way::DmaBuf, Way::Provider];
/// The oldest library that takes dma-bufs: `FI_MR_DMABUF` of fi_mr(3).
const OLDEST_DMA_BUF: Version = Version::new(1, 20);

/// What an endpoint without it is said to do.
pub(super) const PEER_TO_PEER: &str = "reaches GPUs by copies alone";

/// Makes an endpoint reach GPUs' memory by the NIC, never by copies: `FI_OPT_FI_HMEM_P2P` of fi_endpoint(3).
///
/// # Errors
/// The library's number: it cannot.
pub(super) fn require_peer_to_peer(endpoint: &Object<fid_ep>) -> std::result::Result<(), c_int> {
    let value = FI_HMEM_P2P_REQUIRED;
    let bytes = size_of_val(&value);
    // SAFETY: an open endpoint, and a value of that size.
    match unsafe { fi_setopt(endpoint.as_ptr(), FI_OPT_ENDPOINT, FI_OPT_FI_HMEM_P2P, (&raw const value).cast(), bytes) }
    {
        0 => Ok(()),
        code => Err(code),
    }
}

/// What memory is registered with.
pub(super) struct Registrar<'a> {
    pub library: &'static Library,
    pub origin: &'a Origin,
    pub domain: &'a Object<fid_domain>,
    pub facts: &'a Facts,
    pub advice: &'static str,
}

/// A NIC's way to a GPU's memory.
#[derive(Debug)]
pub(super) struct Reached {
    pub reach: Reach,
    /// The memory that flushes read, and where it begins; `None`: the NIC does not reach the GPU.
    pub probe: Option<(Object<fid_mr>, u64)>,
}

impl Registrar<'_> {
    /// Finds the best way to a GPU's memory, by registering some for flushes.
    pub fn reach(&self, gpu: &Gpu, info: &Info, flush: Option<bool>) -> Reached {
        let name = &self.facts.domain;
        let (chosen, lacking) = match (gpu.probe.memory, self.peer_to_peer(info)) {
            (SpanMemory::Gpu { allocation, .. }, Ok(())) => choose(&WAYS, |way| {
                self.register_gpu(way, gpu, (&gpu.probe, allocation), FI_READ | FI_WRITE | FI_REMOTE_READ)
            }),
            (_, Err(what)) => (None, WAYS.map(|way| (way, what.clone())).to_vec()),
            (SpanMemory::Host, Ok(())) => (None, Vec::new()),
        };
        let (way, probe) = chosen.map_or((None, None), |(way, probe)| (Some(way), Some((probe, gpu.probe.base))));
        // Names of EFA's domains are those of devices, with what they are for behind.
        let device = name.split('-').next().unwrap_or_default();
        let flush = flush.unwrap_or_else(|| gpu.needs_flush(device));
        Reached { reach: Reach { device: name.clone(), gpu: gpu.ordinal, way, lacking, flush }, probe }
    }

    /// Whether the NIC itself reaches GPUs' memory: fabrics that copy by CUDA offer it, too.
    fn peer_to_peer(&self, info: &Info) -> std::result::Result<(), String> {
        if !self.facts.reaches_gpus {
            return Err(format!("{} offers no memory of GPUs (FI_HMEM)", self.facts.provider));
        }
        // SAFETY: an open domain, its info, a place for the answer, and no context.
        let opened: Result<Object<fid_ep>> = unsafe {
            Object::open(self.origin, self.advice, |to| {
                fi_endpoint(self.domain.as_ptr(), info.as_ptr(), to, null_mut())
            })
        };
        let required = opened.map_err(|why| why.to_string())?;
        require_peer_to_peer(&required)
            .map_err(|code| format!("{} {PEER_TO_PEER}: {}", self.facts.fabric, self.library.strerror(code)))
    }

    /// Registers the whole allocation of a span of a GPU's memory. Addresses are the GPU's.
    ///
    /// # Errors
    /// `Transport` or `Device` with what the way lacks.
    pub fn register_gpu(
        &self,
        way: Way,
        gpu: &Gpu,
        (span, Allocation { base, bytes }): (&Span, Allocation),
        access: u64,
    ) -> Result<Object<fid_mr>> {
        let of_gpu = |attributes: &mut fi_mr_attr| {
            (attributes.iface, attributes.device) = (FI_HMEM_CUDA, gpu.ordinal as u64);
        };
        if way != Way::DmaBuf {
            let piece = iovec { iov_base: base as *mut c_void, iov_len: bytes };
            return self.open(&piece, access, 0, of_gpu);
        }
        if self.library.version() < OLDEST_DMA_BUF {
            let what = format!("libfabric {} takes no dma-bufs", self.library.version());
            return Err(Error::transport(what, format!("install {OLDEST_DMA_BUF} or later")));
        }
        let buffer = (gpu.export)(span, DmaBufMapping::Usual)?;
        // Versions differ in what an offset means; of a whole allocation it is 0.
        let whole = fi_mr_dmabuf { fd: buffer.fd.as_raw_fd(), offset: 0, len: bytes, base_addr: base as *mut c_void };
        self.open((&raw const whole).cast(), access, FI_MR_DMABUF, of_gpu)
    }

    /// Registers host memory.
    ///
    /// # Errors
    /// `Transport` with the library's text.
    pub fn register_host(&self, span: Span, access: u64) -> Result<Object<fid_mr>> {
        let piece = iovec { iov_base: span.base as *mut c_void, iov_len: span.bytes };
        self.open(&piece, access, 0, |attributes| attributes.iface = FI_HMEM_SYSTEM)
    }

    /// Keys that this side chooses are drawn at random, so that nobody reaches a later region by a former key.
    fn open(
        &self,
        piece: *const iovec,
        access: u64,
        flags: u64,
        describe: impl FnOnce(&mut fi_mr_attr),
    ) -> Result<Object<fid_mr>> {
        let Facts { chooses_keys, key_bytes, .. } = self.facts;
        let key = if *chooses_keys { 0 } else { random()? };
        let key = if *key_bytes >= 8 { key } else { key & ((1 << (8 * key_bytes)) - 1) };
        // SAFETY: numbers and pointers that may be null.
        let mut attributes: fi_mr_attr = unsafe { zeroed() };
        (attributes.mr_iov, attributes.iov_count) = (piece, 1);
        (attributes.access, attributes.requested_key) = (access, key);
        attributes.base_mr = null();
        describe(&mut attributes);
        // SAFETY: an open domain, attributes that are read during the call, and a place for the answer; the memory
        // stays until the region is closed.
        unsafe {
            Object::open(self.origin, self.advice, |to| fi_mr_regattr(self.domain.as_ptr(), &attributes, flags, to))
        }
    }
}
