//! Types of libibverbs that only the library looks into or that grow, numbers that rdma-core brought later, and the
//! few calls of libmlx5 and libefa. `tests/rules/network_ffi.rs` compares them with the installed headers.
//!
//! Source: libibverbs/verbs.h, providers/mlx5/mlx5dv.h and providers/efa/efadv.h of rdma-core 44 and later.

use core::ffi::{c_int, c_uint};
use std::mem::offset_of;

/// A type that only the library looks into.
macro_rules! opaque {
    ($($name:ident)*) => { $(
        #[repr(C)]
        pub struct $name {
            _private: [u8; 0],
        }
    )* };
}

opaque!(_compat_ibv_port_attr ibv_comp_channel ibv_ah ibv_mw ibv_mw_bind);

pub type ibv_mw_type = c_uint;

/// Two functions of the past.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct _ibv_device_ops {
    _private: [usize; 2],
}

/// A port. The exported `ibv_query_port` fills it up to `flags`; the rest is to be 0 before.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_port_attr {
    pub state: c_uint,
    pub max_mtu: c_uint,
    pub active_mtu: c_uint,
    pub gid_tbl_len: c_int,
    pub port_cap_flags: u32,
    pub max_msg_sz: u32,
    pub bad_pkey_cntr: u32,
    pub qkey_viol_cntr: u32,
    pub pkey_tbl_len: u16,
    pub lid: u16,
    pub sm_lid: u16,
    pub lmc: u8,
    pub max_vl_num: u8,
    pub sm_sl: u8,
    pub subnet_timeout: u8,
    pub init_type_reply: u8,
    pub active_width: u8,
    pub active_speed: u8,
    pub phys_state: u8,
    pub link_layer: u8,
    pub flags: u8,
    pub port_cap_flags2: u16,
    /// For what later versions append.
    pub room: [u32; 5],
}

pub const IBV_PORT_DOWN: c_uint = 1;
pub const IBV_PORT_ACTIVE: c_uint = 4;
pub const IBV_LINK_LAYER_INFINIBAND: u8 = 1;
pub const IBV_LINK_LAYER_ETHERNET: u8 = 2;
pub const IBV_GID_TYPE_IB: u32 = 0;
pub const IBV_GID_TYPE_ROCE_V1: u32 = 1;
pub const IBV_GID_TYPE_ROCE_V2: u32 = 2;

/// `mlx5dv_reg_dmabuf_mr` by data direct: the NIC reaches the GPU past the processor's link.
pub const MLX5DV_REG_DMABUF_ACCESS_DATA_DIRECT: c_int = 1;

/// What an EFA device can do. The library fills as many bytes as the caller passes.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct efadv_device_attr {
    pub comp_mask: u64,
    pub max_sq_wr: u32,
    pub max_rq_wr: u32,
    pub max_sq_sge: u16,
    pub max_rq_sge: u16,
    pub inline_buf_size: u16,
    pub reserved: [u8; 2],
    pub device_caps: u32,
    pub max_rdma_size: u32,
}

pub const EFADV_DEVICE_ATTR_CAPS_RDMA_READ: u32 = 1 << 0;
pub const EFADV_DEVICE_ATTR_CAPS_RNR_RETRY: u32 = 1 << 1;
/// From rdma-core 46 on.
pub const EFADV_DEVICE_ATTR_CAPS_RDMA_WRITE: u32 = 1 << 3;

const _: () = {
    assert!(size_of::<_ibv_device_ops>() == 16);
    assert!(offset_of!(ibv_port_attr, pkey_tbl_len) == 32 && offset_of!(ibv_port_attr, link_layer) == 46);
    assert!(offset_of!(ibv_port_attr, room) == 52);
    assert!(offset_of!(efadv_device_attr, device_caps) == 24 && size_of::<efadv_device_attr>() == 32);
};
