//! The flush of a device: a queue pair that is connected to itself, and its reads.
//!
//! Place in the data path: between a NIC's completions and the events of a poll, which never waits for a read.

use super::device::Device;
use super::ibverbs_sys::*;
use super::mark::Mark;
use super::memory::{Reached, register_host};
use super::objects::Object;
use super::pair;
use crate::base::{Error, Result};
use crate::transport::network::Span;
use crate::transport::network::held::Held;
use crate::transport::network::slab::{LINE, Slab};
use std::mem::zeroed;
use std::ptr::null_mut;

/// Bytes that a flush reads.
const BYTES: u32 = 8;

/// The flush of a NIC.
#[derive(Debug)]
pub(super) struct Flush {
    /// Of the slab's scratch line: what is read goes to its second half.
    into: Object<ibv_mr>,
    into_base: u64,
    from_base: u64,
    from_key: u32,
    most: u32,
    pub held: Held,
    /// Since when the queue pair is broken; 0: it works.
    pub broken_ns: u64,
    /// When it is to be opened again, while it is broken.
    pub retry_ns: u64,
}

impl Flush {
    /// The flush of the memory that `reached` has registered, or of host memory without it. At most so many immediates
    /// wait for it.
    ///
    /// # Errors
    /// `Transport` if the device registers no memory.
    pub fn new(device: &Device, slab: &Slab, reached: Option<(&Reached, u64)>, most: u32) -> Result<Flush> {
        let access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ;
        let into = register_host(device, Span::host(slab.scratch(), LINE), access)?;
        let probe = reached.and_then(|(reached, base)| reached.probe.as_ref().map(|probe| (probe, base)));
        let (from, from_base) = probe.unwrap_or((&into, slab.scratch()));
        // SAFETY: open.
        let from_key = unsafe { (*from.as_ptr()).rkey };
        let into_base = slab.scratch() + LINE as u64 / 2;
        Ok(Flush { into, into_base, from_base, from_key, most, held: Held::new(most), broken_ns: 0, retry_ns: 0 })
    }

    /// The queue pair has been opened anew after a reset: nothing is under way.
    pub fn restart(&mut self) {
        (self.held, self.broken_ns, self.retry_ns) = (Held::new(self.most), 0, 0);
    }

    /// The read has come back.
    pub fn succeed(&mut self) {
        (self.broken_ns, self.retry_ns) = (0, 0);
        self.held.read_done();
    }

    /// The queue pair is broken: it is opened again.
    pub fn fail(&mut self, now_ns: u64) {
        self.held.read_failed();
        if self.broken_ns == 0 {
            self.broken_ns = now_ns.max(1);
        }
    }

    /// Posts a read by the queue pair.
    ///
    /// # Errors
    /// The system's number.
    pub fn post(&mut self, pair: &Object<ibv_qp>) -> std::result::Result<(), i32> {
        // SAFETY: open.
        let key = unsafe { (*self.into.as_ptr()).lkey };
        let mut piece = ibv_sge { addr: self.into_base, length: BYTES, lkey: key };
        // SAFETY: numbers and pointers that may be null.
        let mut request: ibv_send_wr = unsafe { zeroed() };
        request.wr_id = Mark::Flush.encode();
        request.sg_list = &mut piece;
        request.num_sge = 1;
        request.opcode = IBV_WR_RDMA_READ;
        request.send_flags = IBV_SEND_SIGNALED;
        request.wr.rdma = ibv_send_wr__bindgen_ty_2__bindgen_ty_1 { remote_addr: self.from_base, rkey: self.from_key };
        let mut bad = null_mut();
        // SAFETY: an open queue pair, a request that the call has read when it returns, and memory of the slab.
        match unsafe { ibv_post_send(pair.as_ptr(), &mut request, &mut bad) } {
            0 => {
                self.held.read_posted();
                Ok(())
            }
            code => Err(code),
        }
    }
}

/// A queue pair for flushes, which is connected to itself.
///
/// # Errors
/// `Transport` if the device has none left.
pub(super) fn create(device: &Device, completions: &Object<ibv_cq>) -> Result<Object<ibv_qp>> {
    // SAFETY: numbers and pointers that may be null.
    let mut attributes: ibv_qp_init_attr = unsafe { zeroed() };
    attributes.send_cq = completions.as_ptr();
    attributes.recv_cq = completions.as_ptr();
    attributes.qp_type = IBV_QPT_RC;
    pair::create(device, &mut attributes, (1, 1), "flushes").map(|(pair, _)| pair)
}

/// The error of flushes that do not work again in time.
pub(super) fn lost(device: &Device) -> Error {
    let what = format!("{} flushes no writes into the GPU's memory any more", device.name);
    Error::transport(what, "see whether its link is up, then open another endpoint").ending()
}
