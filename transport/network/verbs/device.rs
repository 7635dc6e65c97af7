//! A device and its port: opening, what it can do, its GID, and the events it reports.
//!
//! Place in the data path: beside it. On the endpoint's thread: `events` every so many polls, all else at the opening
//! and when connections are opened. Source of the GID's choice: the RoCE v2 annex of the InfiniBand specification, and
//! rdma-core's documentation of `gid_attrs`.

use super::config::{VerbsConfig, mtu, partition};
use super::ibverbs_sys::*;
use super::objects::{Object, last, refused};
use crate::base::{Error, Result};
use std::ffi::{CStr, c_int};
use std::mem::zeroed;
use std::ptr::null_mut;

/// The only port that devices of one port have; of those of two, the first.
const PORT: u8 = 1;
/// The port takes packets with a global header alone. Source: IBV_QPF_GRH_REQUIRED of verbs.h.
const GLOBAL_HEADERS: u8 = 1;
/// Of RoCE: the three bits of a VLAN's priority.
const MOST_PRIORITY: u8 = 7;
const ADVICE: &str = "see `ibv_devinfo -v` for the device's state";

/// An open device. Closed in this order.
pub(super) struct Device {
    pub domain: Object<ibv_pd>,
    pub context: Object<ibv_context>,
    pub library: &'static Library,
    pub name: String,
    pub limits: ibv_device_attr,
    port: ibv_port_attr,
    gid_index: Option<u8>,
    gid: [u8; 16],
    /// The GID's type, and where it was last.
    kind: u8,
    place: u8,
    /// The partition's key as the port has it, and where it was last.
    pkey: u16,
    pkey_index: u16,
    /// The MTU's number.
    pub mtu: u32,
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} with GID {:02x?}", self.name, self.gid)
    }
}

/// How a peer's port is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Route {
    pub gid: [u8; 16],
    /// On InfiniBand; 0 on RoCE.
    pub lid: u16,
    /// The MTU's number.
    pub mtu: u8,
    pub service_level: u8,
    /// The GID's type, as `ibv_gid_entry` has it; both sides use the same.
    pub kind: u8,
    /// The partition's key, with the port's membership.
    pub pkey: u16,
}

/// Of 16 bits: what the GIDs of an InfiniBand subnet begin with.
const PREFIX_WORDS: usize = 4;
/// Of a P_Key: its port is a full member, which talks to all; limited ones do not talk to each other.
const FULL_MEMBER: u16 = 1 << 15;

impl Route {
    /// Why a port does not reach another one, where both have GIDs of the same type.
    pub fn obstacle(&self, to: &Route) -> Option<String> {
        let prefix = |gid: &[u8; 16]| {
            let words = gid.chunks(2).take(PREFIX_WORDS).map(|pair| pair.iter().map(|byte| format!("{byte:02x}")));
            words.map(Iterator::collect).collect::<Vec<String>>().join(":")
        };
        let (own, other) = (prefix(&self.gid), prefix(&to.gid));
        if u32::from(self.kind) == IBV_GID_TYPE_IB && own != other {
            // Packets go to the router's LID, which the subnet manager's path records have, and libibverbs does not.
            return Some(format!("is in the InfiniBand subnet {other}, not {own}, and no router is looked up"));
        }
        // Not known of devices that have no table.
        if self.pkey == 0 || to.pkey == 0 {
            return None;
        }
        if partition(self.pkey) != partition(to.pkey) {
            return Some(format!("uses partition key {:#06x}, not {:#06x}", to.pkey, self.pkey));
        }
        let both_limited = (self.pkey | to.pkey) & FULL_MEMBER == 0;
        both_limited.then(|| format!("is a limited member of partition {:#06x}, and so is this rank", to.pkey))
    }
}

/// What a device has reported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reported {
    /// A queue pair is broken.
    Broken(u32),
    /// A queue pair takes no more receives.
    LastReceive(u32),
    /// A port went down, or its addresses changed.
    Port,
    /// Nothing of the endpoint works any more.
    Fatal(u32),
    Other,
}

/// What to do where the kernel has no verbs.
const NO_DEVICES: &str = "load the NIC's kernel driver and ib_uverbs; a container needs /dev/infiniband, too";

/// Names of the devices, in the system's order.
///
/// # Errors
/// `Transport` if the library finds none.
fn names(library: &Library) -> Result<Vec<String>> {
    let mut count = 0;
    // SAFETY: a place for the count.
    let list = unsafe { (library.ibv_get_device_list)(&mut count) };
    if list.is_null() {
        return Err(refused("lists no devices", last(), NO_DEVICES));
    }
    let names = (0..usize::try_from(count).unwrap_or(0)).map(|at| {
        // SAFETY: the list has as many devices, each with a name that ends with 0.
        unsafe { CStr::from_ptr((library.ibv_get_device_name)(*list.add(at))) }.to_string_lossy().into_owned()
    });
    let names = names.collect();
    // SAFETY: from the library, and not used again.
    unsafe { (library.ibv_free_device_list)(list) };
    Ok(names)
}

fn open(library: &'static Library, name: &str) -> Result<Object<ibv_context>> {
    let mut count = 0;
    // SAFETY: a place for the count.
    let list = unsafe { (library.ibv_get_device_list)(&mut count) };
    if list.is_null() {
        return Err(refused("lists no devices", last(), NO_DEVICES));
    }
    let found = (0..usize::try_from(count).unwrap_or(0)).find_map(|at| {
        // SAFETY: the list has as many devices.
        let device = unsafe { *list.add(at) };
        // SAFETY: a device of the list, with a name that ends with 0.
        let same = unsafe { CStr::from_ptr((library.ibv_get_device_name)(device)) }.to_bytes() == name.as_bytes();
        // SAFETY: as above.
        same.then(|| unsafe { (library.ibv_open_device)(device) })
    });
    let why = last();
    // SAFETY: from the library; the open device stays open without it.
    unsafe { (library.ibv_free_device_list)(list) };
    let Some(context) = found else {
        let there = names(library)?;
        let there = if there.is_empty() { "no device".to_owned() } else { there.join(", ") };
        return Err(Error::transport(format!("no device {name:?} for verbs"), format!("this machine has {there}")));
    };
    if context.is_null() {
        return Err(refused(&format!("opens no device {name}"), why, "allow this user /dev/infiniband/uverbs*"));
    }
    // SAFETY: just opened.
    unsafe { Object::new(library, context, name, ADVICE) }
}

impl Device {
    /// Opens the device of a NIC.
    ///
    /// # Errors
    /// `Transport` if there is none, or its port is not active or has no address.
    pub fn open(library: &'static Library, config: &VerbsConfig, name: String) -> Result<Device> {
        let context = open(library, &name)?;
        // SAFETY: an open device.
        let domain = unsafe { (library.ibv_alloc_pd)(context.as_ptr()) };
        // SAFETY: just opened.
        let domain = unsafe { Object::new(library, domain, &name, ADVICE) }?;
        // SAFETY: numbers and bytes.
        let (mut limits, port) = unsafe { (zeroed::<ibv_device_attr>(), zeroed::<ibv_port_attr>()) };
        // SAFETY: an open device and a place for the answer.
        let code = unsafe { (library.ibv_query_device)(context.as_ptr(), &mut limits) };
        if code != 0 {
            return Err(refused(&format!("does not describe device {name}"), code, ADVICE));
        }
        // SAFETY: an open device; O_NONBLOCK is a flag of its file alone.
        let file = unsafe { (*context.as_ptr()).async_fd };
        // SAFETY: fcntl on an open file.
        let flags = unsafe { libc::fcntl(file, libc::F_GETFL) };
        // SAFETY: as above.
        if flags < 0 || unsafe { libc::fcntl(file, libc::F_SETFL, flags | libc::O_NONBLOCK) } < 0 {
            return Err(refused("reads no events without waiting", last(), ADVICE));
        }
        let mut device = Device {
            domain,
            context,
            library,
            name,
            limits,
            port,
            gid_index: config.gid_index,
            gid: [0; 16],
            kind: 0,
            place: 0,
            pkey: 0,
            pkey_index: 0,
            mtu: 0,
        };
        device.look_up()?;
        if device.port.state != IBV_PORT_ACTIVE {
            let what = format!("port {PORT} of {} is not active (state {})", device.name, device.port.state);
            return Err(Error::transport(what, "bring its link up, or name another device"));
        }
        let wanted = config.mtu.and_then(mtu).unwrap_or(device.port.active_mtu);
        if wanted > device.port.active_mtu {
            let (has, wants) = (128u32 << device.port.active_mtu.min(5), 128u32 << wanted);
            let advice = "set the MTU of its net device higher, or this one lower";
            return Err(Error::config("mtu", wants, format!("port {PORT} of {} has {has}: {advice}", device.name)));
        }
        device.mtu = wanted;
        if !device.is_infiniband() && config.service_level > MOST_PRIORITY {
            let advice = format!("RoCE has priorities 0 to {MOST_PRIORITY}");
            return Err(Error::config("service_level", config.service_level, advice));
        }
        device.gid_entry()?;
        device.find_pkey(config)?;
        Ok(device)
    }

    /// Names of the devices that NICs use: NIC i uses device i modulo their number.
    ///
    /// # Errors
    /// `Transport` if the machine has none with an active port.
    pub fn names(library: &'static Library, config: &VerbsConfig) -> Result<Vec<String>> {
        if !config.devices.is_empty() {
            return Ok(config.devices.clone());
        }
        let active = names(library)?.into_iter().filter(|name| {
            let state = format!("/sys/class/infiniband/{name}/ports/{PORT}/state");
            std::fs::read_to_string(state).is_ok_and(|state| state.contains("ACTIVE"))
        });
        let active: Vec<String> = active.collect();
        if active.is_empty() {
            let what = "this machine has no device for verbs with an active port";
            return Err(Error::transport(what, "see `ibv_devinfo`"));
        }
        Ok(active)
    }

    /// Looks the port and its GID up anew, for addresses that are taken from now on.
    ///
    /// # Errors
    /// As `open`.
    pub fn renew(&mut self) -> Result<()> {
        self.look_up()?;
        self.mtu = self.mtu.min(self.port.active_mtu);
        self.gid = [0; 16];
        self.gid_entry().map(drop)
    }

    /// Whether the port is up, now.
    pub fn is_active(&mut self) -> bool {
        self.look_up().is_ok() && self.port.state == IBV_PORT_ACTIVE
    }

    /// Looks the port up again.
    fn look_up(&mut self) -> Result<()> {
        // SAFETY: numbers.
        self.port = unsafe { zeroed() };
        // SAFETY: an open device, and a place for the answer; newer libraries fill what this one declares.
        let code = unsafe { (self.library.ibv_query_port)(self.context.as_ptr(), PORT, &mut self.port) };
        if code != 0 {
            return Err(refused(&format!("does not describe port {PORT} of {}", self.name), code, ADVICE));
        }
        Ok(())
    }

    fn is_infiniband(&self) -> bool {
        self.port.link_layer == IBV_LINK_LAYER_INFINIBAND
    }

    /// Bytes of the longest write.
    pub fn longest(&self) -> u32 {
        self.port.max_msg_sz
    }

    /// How peers reach it.
    pub fn route(&self, service_level: u8) -> Route {
        let lid = if self.is_infiniband() { self.port.lid } else { 0 };
        Route { gid: self.gid, lid, mtu: self.mtu as u8, service_level, kind: self.kind, pkey: self.pkey }
    }

    /// The index of the partition's key that peers know, which moves when the subnet manager changes the port's table.
    ///
    /// # Errors
    /// `Transport` if the port has lost the key.
    pub fn pkey_index(&mut self, config: &VerbsConfig) -> Result<u16> {
        if self.pkey_at(self.pkey_index) != Some(self.pkey) {
            self.find_pkey(config).map_err(|why| {
                let what = format!("{} has lost its partition key {:#06x}", self.name, self.pkey);
                Error::transport(what, "have the subnet manager give it back").caused_by(why)
            })?;
        }
        Ok(self.pkey_index)
    }

    /// Looks the partition's key up: of a partition that the table has twice, that of a full member.
    ///
    /// # Errors
    /// `Config` with the keys that there are.
    fn find_pkey(&mut self, config: &VerbsConfig) -> Result<()> {
        let Some(wanted) = config.pkey else {
            (self.pkey, self.pkey_index) = (self.pkey_at(0).unwrap_or(0), 0);
            return Ok(());
        };
        let keys = (0..self.port.pkey_tbl_len).filter_map(|index| Some((self.pkey_at(index)?, index)));
        let keys: Vec<(u16, u16)> = keys.collect();
        let found = keys.iter().filter(|(key, _)| partition(*key) == partition(wanted)).max_by_key(|(key, _)| *key);
        let Some((key, index)) = found else {
            let there: Vec<String> = keys.iter().map(|(key, _)| format!("{key:#06x}")).collect();
            let there = if there.is_empty() { "none".to_owned() } else { there.join(", ") };
            let advice = format!("port {PORT} of {} has {there}; ask the subnet manager's owner for others", self.name);
            return Err(Error::config("pkey", format!("{wanted:#06x}"), advice));
        };
        (self.pkey, self.pkey_index) = (*key, *index);
        Ok(())
    }

    /// A key of the port's table; none at places that are not set.
    fn pkey_at(&self, index: u16) -> Option<u16> {
        let mut key = 0;
        // SAFETY: an open device, and a place for the answer.
        let code = unsafe { (self.library.ibv_query_pkey)(self.context.as_ptr(), PORT, c_int::from(index), &mut key) };
        Some(u16::from_be(key)).filter(|key| code == 0 && partition(*key) != 0)
    }

    /// The index of the GID that peers know, which moves when the port goes down and comes up.
    ///
    /// # Errors
    /// `Transport` if the port has no GID, or not the one that peers know.
    pub fn gid_entry(&mut self) -> Result<u8> {
        if self.gid != [0; 16] {
            if self.gid_at(self.place).is_some_and(|entry| raw(&entry.gid) == self.gid) {
                return Ok(self.place);
            }
            // A port that is down has lost its GIDs, and to look at each place takes long.
            let found = self.is_active().then(|| self.gids().find(|(_, entry)| raw(&entry.gid) == self.gid)).flatten();
            let (place, _) = found.ok_or_else(|| {
                let what = format!("{} has lost its GID {:02x?}", self.name, self.gid);
                Error::transport(what, "bring its link up, with the same address as before")
            })?;
            self.place = place;
            return Ok(place);
        }
        let own = self.gids().next().map_or(0, |(_, entry)| entry.ndev_ifindex);
        let worth = |entry: &ibv_gid_entry| {
            let gid = raw(&entry.gid);
            let roce = [IBV_GID_TYPE_IB, IBV_GID_TYPE_ROCE_V2, IBV_GID_TYPE_ROCE_V1];
            let kind = roce.iter().position(|kind| *kind == entry.gid_type).unwrap_or(roce.len());
            let local = gid[..2] == [0xfe, 0x80];
            let mapped = gid[..12] == [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff];
            (kind, local, entry.ndev_ifindex != own, !mapped)
        };
        let found = match self.gid_index {
            Some(index) => self.gids().find(|(at, _)| *at == index),
            None if self.is_infiniband() => self.gids().next(),
            None => self.gids().min_by_key(|(_, entry)| worth(entry)),
        };
        let (index, entry) = found.ok_or_else(|| {
            let which = self.gid_index.map_or_else(|| "no GID".to_owned(), |index| format!("no GID at index {index}"));
            Error::transport(format!("{} has {which}", self.name), "give its net device an address")
        })?;
        (self.gid, self.kind, self.place) = (raw(&entry.gid), entry.gid_type as u8, index);
        Ok(index)
    }

    /// The port's GIDs that are set, by index.
    fn gids(&self) -> impl Iterator<Item = (u8, ibv_gid_entry)> + '_ {
        let count = u8::try_from(self.port.gid_tbl_len).unwrap_or(u8::MAX);
        (0..count).filter_map(|index| Some((index, self.gid_at(index)?)))
    }

    fn gid_at(&self, index: u8) -> Option<ibv_gid_entry> {
        // SAFETY: numbers and bytes.
        let mut entry: ibv_gid_entry = unsafe { zeroed() };
        let context = self.context.as_ptr();
        let code = match self.library.ibv_query_gid_ex {
            // SAFETY: an open device, and a place of that size for the answer.
            Some(query) => unsafe {
                query(context, u32::from(PORT), u32::from(index), &mut entry, 0, size_of::<ibv_gid_entry>())
            },
            // SAFETY: as above.
            None => unsafe { (self.library.ibv_query_gid)(context, PORT, c_int::from(index), &mut entry.gid) },
        };
        if self.library.ibv_query_gid_ex.is_none() && !self.is_infiniband() {
            let kind = format!("/sys/class/infiniband/{}/ports/{PORT}/gid_attrs/types/{index}", self.name);
            let second = std::fs::read_to_string(kind).is_ok_and(|kind| kind.contains("v2"));
            entry.gid_type = if second { IBV_GID_TYPE_ROCE_V2 } else { IBV_GID_TYPE_ROCE_V1 };
        }
        (code == 0 && raw(&entry.gid) != [0; 16]).then_some(entry)
    }

    /// The way to a peer's port.
    ///
    /// # Errors
    /// As `gid_entry`.
    pub fn way(&mut self, to: &Route, config: &VerbsConfig) -> Result<ibv_ah_attr> {
        let sgid_index = self.gid_entry()?;
        // SAFETY: numbers.
        let mut way: ibv_ah_attr = unsafe { zeroed() };
        way.sl = config.service_level;
        way.port_num = PORT;
        way.dlid = to.lid;
        // Over RoCE all packets have a global header, and over InfiniBand those of ports that ask for it.
        let required = self.port.flags & GLOBAL_HEADERS != 0;
        way.is_global = u8::from(!self.is_infiniband() || required);
        way.grh.dgid = ibv_gid { raw: to.gid };
        way.grh.sgid_index = sgid_index;
        way.grh.hop_limit = 64;
        way.grh.traffic_class = config.traffic_class;
        Ok(way)
    }

    /// Sets a queue pair's state.
    ///
    /// # Errors
    /// The system's number.
    pub fn modify(
        &self,
        qp: &Object<ibv_qp>,
        attributes: &mut ibv_qp_attr,
        mask: c_int,
    ) -> std::result::Result<(), i32> {
        // SAFETY: an open queue pair, and attributes of which the mask names those that are set.
        match unsafe { (self.library.ibv_modify_qp)(qp.as_ptr(), attributes, mask) } {
            0 => Ok(()),
            code => Err(code),
        }
    }

    /// The library's text of a failure's code.
    pub fn explain(&self, code: u32) -> String {
        // SAFETY: the library has a text of its own for each number, which stays.
        let text = unsafe { CStr::from_ptr((self.library.ibv_wc_status_str)(code & 0xff)) }.to_string_lossy();
        match code >> 8 {
            0 => text.into_owned(),
            vendor => format!("{text}, vendor's error {vendor:#x}"),
        }
    }

    /// The number of the port that queue pairs use.
    pub fn port(&self) -> u8 {
        PORT
    }

    /// The next event that the device reports; `None`: no more for now.
    pub fn event(&self) -> Option<Reported> {
        // SAFETY: numbers and pointers that may be null.
        let mut event: ibv_async_event = unsafe { zeroed() };
        event.element.qp = null_mut();
        // SAFETY: an open device whose events are read without waiting, and a place for one.
        if unsafe { (self.library.ibv_get_async_event)(self.context.as_ptr(), &mut event) } != 0 {
            let code = last();
            // Nothing to read, or a device that is gone.
            return (code != libc::EAGAIN && code != libc::EINTR).then_some(Reported::Fatal(code as u32));
        }
        // SAFETY: the union has a queue pair for these events, which is not destroyed before its events are answered.
        let number = || unsafe { (*event.element.qp).qp_num };
        let reported = match event.event_type {
            IBV_EVENT_QP_FATAL | IBV_EVENT_QP_REQ_ERR | IBV_EVENT_QP_ACCESS_ERR => Reported::Broken(number()),
            IBV_EVENT_QP_LAST_WQE_REACHED => Reported::LastReceive(number()),
            IBV_EVENT_PORT_ACTIVE | IBV_EVENT_PORT_ERR | IBV_EVENT_LID_CHANGE | IBV_EVENT_GID_CHANGE => Reported::Port,
            IBV_EVENT_CQ_ERR | IBV_EVENT_SRQ_ERR | IBV_EVENT_DEVICE_FATAL => Reported::Fatal(event.event_type),
            _ => Reported::Other,
        };
        // SAFETY: an event that was read and is answered once.
        unsafe { (self.library.ibv_ack_async_event)(&mut event) };
        Some(reported)
    }
}

fn raw(gid: &ibv_gid) -> [u8; 16] {
    // SAFETY: sixteen bytes, whichever way they are looked at.
    unsafe { gid.raw }
}
