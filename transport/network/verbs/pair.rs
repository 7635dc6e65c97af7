//! A queue pair of a reliable connection: its making, and the states that it goes through.
//!
//! Place in the data path: none; building connections, and after they break. On the endpoint's thread.

use super::address::{End, NUMBERS};
use super::config::VerbsConfig;
use super::device::{Device, Route};
use super::ibverbs_sys::*;
use super::objects::{Object, refused};
use crate::base::Result;
use std::ffi::c_int;
use std::mem::zeroed;
use std::ptr::null_mut;

/// Bytes that a request carries itself, as far as the device takes it.
const INLINE: [u32; 4] = [220, 128, 64, 0];
/// 0.64 ms until a peer without a receive is tried again. Source: Min RNR NAK timer, ibv_modify_qp(3).
const RNR_TIMER: u8 = 12;
/// Without end. Source: ibv_modify_qp(3).
const RNR_RETRIES: u8 = 7;
const ADVICE: &str = "see `ibv_devinfo -v` for the device's limits";

/// Makes a queue pair with room for so many requests and receives, of a piece each, by attributes that name its queues;
/// answers how many bytes a request carries itself, too.
///
/// # Errors
/// `Transport` if the device has none left.
pub(super) fn create(
    device: &Device,
    attributes: &mut ibv_qp_init_attr,
    (requests, receives): (u32, u32),
    whose: &str,
) -> Result<(Object<ibv_qp>, u32)> {
    let library = device.library;
    let mut found = null_mut();
    for inline in INLINE {
        attributes.cap = ibv_qp_cap {
            max_send_wr: requests,
            max_recv_wr: receives,
            max_send_sge: 1,
            max_recv_sge: receives.min(1),
            max_inline_data: inline,
        };
        // SAFETY: an open domain and queues of the same device.
        found = unsafe { (library.ibv_create_qp)(device.domain.as_ptr(), attributes) };
        if !found.is_null() {
            break;
        }
    }
    let what = format!("for {whose} on {}, of at most {}", device.name, device.limits.max_qp);
    // SAFETY: just made.
    let pair = unsafe { Object::new(library, found, &what, ADVICE) }?;
    Ok((pair, attributes.cap.max_inline_data))
}

/// Connects a queue pair to a peer's, from whatever state it is in.
///
/// # Errors
/// `Transport` if the port or the way to the peer is not there, now.
pub(super) fn connect(
    device: &mut Device,
    pair: &Object<ibv_qp>,
    (own, other): (End, End),
    to: &Route,
    (salt, incarnation): (u32, u32),
    config: &VerbsConfig,
) -> Result<()> {
    let (way, pkey_index) = (device.way(to, config)?, device.pkey_index(config)?);
    let name = &device.name;
    let failed = |what: &'static str| {
        move |code| refused(&format!("{what} on {name}"), code, "see whether the link of both sides is up")
    };
    to_state(device, pair, IBV_QPS_RESET).map_err(failed("resets no queue pair"))?;
    // SAFETY: numbers.
    let mut to_init: ibv_qp_attr = unsafe { zeroed() };
    to_init.qp_state = IBV_QPS_INIT;
    to_init.port_num = device.port();
    to_init.pkey_index = pkey_index;
    // That of flushes is connected to itself, and reads.
    to_init.qp_access_flags = if own == other { IBV_ACCESS_REMOTE_READ } else { IBV_ACCESS_REMOTE_WRITE };
    let mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
    device.modify(pair, &mut to_init, mask as c_int).map_err(failed("starts no queue pair"))?;
    // SAFETY: numbers.
    let mut to_receive: ibv_qp_attr = unsafe { zeroed() };
    to_receive.qp_state = IBV_QPS_RTR;
    to_receive.path_mtu = device.mtu.min(u32::from(to.mtu));
    to_receive.dest_qp_num = other.number;
    to_receive.rq_psn = packet(other.packet ^ salt, incarnation);
    to_receive.max_dest_rd_atomic = 1;
    to_receive.min_rnr_timer = RNR_TIMER;
    to_receive.ah_attr = way;
    let mask = IBV_QP_STATE
        | IBV_QP_AV
        | IBV_QP_PATH_MTU
        | IBV_QP_DEST_QPN
        | IBV_QP_RQ_PSN
        | IBV_QP_MAX_DEST_RD_ATOMIC
        | IBV_QP_MIN_RNR_TIMER;
    device.modify(pair, &mut to_receive, mask as c_int).map_err(failed("connects no queue pair"))?;
    // SAFETY: numbers.
    let mut to_send: ibv_qp_attr = unsafe { zeroed() };
    to_send.qp_state = IBV_QPS_RTS;
    to_send.timeout = config.timeout;
    to_send.retry_cnt = config.retries;
    to_send.rnr_retry = RNR_RETRIES;
    to_send.sq_psn = packet(own.packet ^ salt, incarnation);
    to_send.max_rd_atomic = 1;
    let mask =
        IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC;
    device.modify(pair, &mut to_send, mask as c_int).map_err(failed("lets no queue pair send"))
}

/// Sets a queue pair's state, by that alone.
///
/// # Errors
/// The system's number.
pub(super) fn to_state(device: &Device, pair: &Object<ibv_qp>, state: ibv_qp_state) -> std::result::Result<(), i32> {
    // SAFETY: numbers.
    let mut attributes: ibv_qp_attr = unsafe { zeroed() };
    attributes.qp_state = state;
    device.modify(pair, &mut attributes, IBV_QP_STATE as c_int)
}

/// The number of a queue pair.
pub(super) fn number(pair: &Object<ibv_qp>) -> u32 {
    // SAFETY: open.
    unsafe { (*pair.as_ptr()).qp_num }
}

/// The number of an incarnation's first packet: far from those of the one before, so that late packets are not taken.
fn packet(first: u32, incarnation: u32) -> u32 {
    first.wrapping_add(incarnation.wrapping_mul(0x9e37_79b1)) & NUMBERS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_of_neighbouring_incarnations_are_far_from_each_other() {
        for incarnation in 0..10_000 {
            let steps = packet(5, incarnation + 1).wrapping_sub(packet(5, incarnation)) & NUMBERS;
            assert!((1 << 20..15 << 20).contains(&steps), "incarnation {incarnation}: {steps}");
        }
    }
}
