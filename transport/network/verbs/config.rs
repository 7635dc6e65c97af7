//! Settings of an endpoint over verbs.

use crate::base::{Error, Result};
use crate::transport::network::imm::MAX_NICS;
use crate::transport::network::revoke::LET_GO_NS;
use std::path::PathBuf;
use std::time::Duration;

/// Most writes of one NIC to one peer that may be outstanding, unless configured: enough to fill a link of 400 Gb/s
/// with writes of 8 KiB over 40 µs.
const PEER_POSTS: u32 = 256;
const MAX_PEER_POSTS: u32 = 4096;
/// Immediates that may be under way to a NIC, unless configured; each takes an entry of two queues, which have no
/// memory of their own to write to.
const RECEIVES: u32 = 8192;
const LEAST_RECEIVES: u32 = 64;
/// Least time for a peer to let go of a region: threads that poll may be descheduled for some milliseconds, and clocks
/// are read to 10 ms.
const LEAST_LET_GO: Duration = Duration::from_millis(50);
/// Longer than a switch takes to bring a port up, shorter than a collective's deadline.
const RESUME_WITHIN: Duration = Duration::from_secs(8);
const LEAST_RESUME_WITHIN: Duration = Duration::from_millis(100);
/// 4.096 µs × 2^14 = 67 ms for an answer. Source: Timeout in the InfiniBand specification, 9.7.6.1.3.
const TIMEOUT: u8 = 14;
/// 7 is allowed, too; the kernel's soft-RoCE never gives up with it.
const RETRIES: u8 = 6;

/// Settings of a [`VerbsEndpoint`](super::VerbsEndpoint). All ranks give as many NICs, the same service level,
/// and keys of the same partition.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct VerbsConfig {
    /// Devices, as `ibv_devices` lists them: NIC i uses device i modulo their number. Empty: all with an active port.
    pub devices: Vec<String>,
    /// NICs of this rank, as its peers see them.
    pub nics: usize,
    /// The GPU whose memory may be registered, as this process counts them; `None`: host memory alone.
    pub gpu: Option<usize>,
    /// Whether immediates wait until a read has flushed what the NIC wrote into the GPU's memory; `None`: where the
    /// GPU's attributes and the NIC's place ask for it.
    pub flush: Option<bool>,
    /// Writes of one NIC to one peer that may be outstanding.
    pub peer_posts: u32,
    /// Immediates that may be under way to one NIC; fewer where the device has fewer.
    pub receives: u32,
    /// How long a peer may take to let go of a region that is taken back.
    pub let_go: Duration,
    /// How long a connection may stay broken, or its peer silent, until the writes over it fail.
    pub resume_within: Duration,
    /// Index of the GID; `None`: RoCE v2 with the IPv4 address of the port's own net device, if there is one.
    pub gid_index: Option<u8>,
    /// The partition: a P_Key that the port's table has, whichever membership it has there; the top bit, which stands
    /// for full membership, does not count. `None`: the key at index 0.
    pub pkey: Option<u16>,
    /// Service level (InfiniBand) or priority (RoCE), 0 to 15.
    pub service_level: u8,
    /// Traffic class of RoCE: the differentiated services field of each packet.
    pub traffic_class: u8,
    /// A packet that is not answered in 4.096 µs × 2^`timeout` is sent again; 1 to 31.
    pub timeout: u8,
    /// How often a packet is sent again, 1 to 7.
    pub retries: u8,
    /// Most bytes of a packet: 256, 512, 1024, 2048 or 4096; `None`: what the ports of both sides have.
    pub mtu: Option<u32>,
    /// Writes of more bytes go as a write and an empty write with the immediate, since InfiniBand's adaptive routing
    /// leaves packets with immediates alone; `None`: no write does.
    pub split_bytes: Option<u32>,
    /// The library's path; `None`: the one that `TOKENYARD_LIBIBVERBS` names, else the system's.
    pub library: Option<PathBuf>,
}

impl Default for VerbsConfig {
    fn default() -> VerbsConfig {
        VerbsConfig {
            devices: Vec::new(),
            nics: 1,
            gpu: None,
            flush: None,
            peer_posts: PEER_POSTS,
            receives: RECEIVES,
            let_go: Duration::from_nanos(LET_GO_NS),
            resume_within: RESUME_WITHIN,
            gid_index: None,
            pkey: None,
            service_level: 0,
            traffic_class: 0,
            timeout: TIMEOUT,
            retries: RETRIES,
            mtu: None,
            split_bytes: None,
            library: None,
        }
    }
}

impl VerbsConfig {
    pub(super) fn resume_within_ns(&self) -> u64 {
        u64::try_from(self.resume_within.as_nanos()).unwrap_or(u64::MAX)
    }

    /// Requests that a write takes at most.
    pub(super) fn requests(&self) -> u32 {
        if self.split_bytes.is_some() { 2 } else { 1 }
    }

    pub(super) fn check(&self) -> Result<()> {
        if !(1..=MAX_NICS).contains(&self.nics) {
            return Err(Error::config("nics", self.nics, format!("use 1 to {MAX_NICS}")));
        }
        if !(1..=MAX_PEER_POSTS).contains(&self.peer_posts) {
            return Err(Error::config("peer_posts", self.peer_posts, format!("allow 1 to {MAX_PEER_POSTS}")));
        }
        if self.receives < LEAST_RECEIVES {
            return Err(Error::config("receives", self.receives, format!("allow at least {LEAST_RECEIVES}")));
        }
        let times = [("let_go", self.let_go, LEAST_LET_GO), ("resume_within", self.resume_within, LEAST_RESUME_WITHIN)];
        if let Some((name, value, least)) = times.into_iter().find(|(_, value, least)| value < least) {
            return Err(Error::config(name, format!("{value:?}"), format!("give peers at least {least:?}")));
        }
        let numbers = [
            ("service_level", self.service_level, 0..=15),
            ("timeout", self.timeout, 1..=31),
            ("retries", self.retries, 1..=7),
        ];
        if let Some((name, value, range)) = numbers.into_iter().find(|(_, value, range)| !range.contains(value)) {
            return Err(Error::config(name, value, format!("give {} to {}", range.start(), range.end())));
        }
        if let Some(key) = self.pkey.filter(|key| partition(*key) == 0) {
            let advice = "a partition's key has a number other than 0 in its low 15 bits";
            return Err(Error::config("pkey", format!("{key:#06x}"), advice));
        }
        if let Some(bytes) = self.mtu.filter(|bytes| mtu(*bytes).is_none()) {
            return Err(Error::config("mtu", bytes, "give 256, 512, 1024, 2048 or 4096"));
        }
        Ok(())
    }
}

/// The partition of a P_Key: all but the top bit, which is set for full members.
pub(super) fn partition(key: u16) -> u16 {
    key & 0x7fff
}

/// The number of an MTU, as `ibv_mtu` counts them.
pub(super) fn mtu(bytes: u32) -> Option<u32> {
    (1..=5).find(|number| 128 << number == bytes)
}
