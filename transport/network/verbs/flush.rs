//! The flush of what a NIC wrote into a GPU's memory: immediates wait until a read of that memory, which the NIC began
//! behind them, has come back (E4 in docs/design.md).
//!
//! Place in the data path: between a NIC's completions and the events of a poll, which never waits for a read.
//! Source: a read request does not pass the writes before it (PCI Express Base Specification, 2.4.1), so that its
//! answer shows that they have reached the GPU.
//!
//! ```text
//!  immediates ──▶ held … ── poll ─▶ read posted ─▶ read done ──▶ handed out: those that were held when it was posted
//! ```

use super::device::Device;
use super::ibverbs_sys::*;
use super::mark::Mark;
use super::memory::{Reached, register_host};
use super::objects::Object;
use super::pair;
use crate::base::{Error, Result};
use crate::transport::network::Span;
use crate::transport::network::slab::{LINE, Slab};
use std::collections::VecDeque;
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

/// Immediates of a NIC that wait for a flush.
#[derive(Debug)]
pub(super) struct Held {
    waiting: VecDeque<u32>,
    /// How many of them came before the read that is under way.
    covered: usize,
    is_reading: bool,
}

impl Held {
    /// Room for so many.
    pub fn new(most: u32) -> Held {
        Held { waiting: VecDeque::with_capacity(most as usize), covered: 0, is_reading: false }
    }

    /// An immediate has come.
    pub fn hold(&mut self, bits: u32) {
        self.waiting.push_back(bits);
    }

    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Whether a read is to be posted.
    pub fn wants_read(&self) -> bool {
        !self.is_reading && !self.waiting.is_empty()
    }

    /// A read was posted: one serves all that have come so far.
    pub fn read_posted(&mut self) {
        (self.is_reading, self.covered) = (true, self.waiting.len());
    }

    /// The read has ended well: what it covered may be handed out, by `next`.
    pub fn read_done(&mut self) {
        self.is_reading = false;
    }

    /// The read has failed: another must cover what waits.
    pub fn read_failed(&mut self) {
        (self.is_reading, self.covered) = (false, 0);
    }

    /// The next that may be handed out.
    pub fn next(&mut self) -> Option<u32> {
        if self.is_reading || self.covered == 0 {
            return None;
        }
        self.covered -= 1;
        self.waiting.pop_front()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(held: &mut Held) -> Vec<u32> {
        std::iter::from_fn(|| held.next()).collect()
    }

    #[test]
    fn a_read_covers_what_came_before_it_and_nothing_else() {
        let mut held = Held::new(8);
        assert!(!held.wants_read() && held.is_empty());
        held.hold(1);
        held.hold(2);
        assert!(held.wants_read() && all(&mut held).is_empty());
        held.read_posted();
        held.hold(3);
        assert!(!held.wants_read() && all(&mut held).is_empty());
        held.read_done();
        assert_eq!(all(&mut held), [1, 2]);
        assert!(held.wants_read() && !held.is_empty());
        held.read_posted();
        held.read_failed();
        assert!(held.wants_read() && all(&mut held).is_empty());
        held.read_posted();
        held.hold(4);
        held.read_done();
        assert_eq!(all(&mut held), [3]);
    }
}
