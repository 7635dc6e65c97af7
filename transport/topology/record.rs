//! A machine's facts as text: written on one machine, read on another, where nothing in it is trusted.
//!
//! The first line is `tokenyard-topology 1`. Each further line is empty, or a comment after `#`, or one of these:
//!
//! ```text
//! allowed 0-191                  CPUs that the process may use; once
//! cores 0-47 96-143              hyperthreads: the first CPUs of all lists are one core, and so on; on any lines
//! node 0 0-47,96-143             a NUMA node and its CPUs
//! pci 0000:46:01.0 0604 1d0f:0200 node=0 under=0000:45:00.0
//! pci 0000:55:00.0 0200 1d0f:efa2 node=0 under=0000:46:01.0 rdma=rdmap85s0 link=other rate=200 port=active
//! ```
//!
//! A `pci` line has an address, a class, and ids of vendor and device, all in hexadecimal digits; then, in any order,
//! what is known: `node` (left out where the kernel says −1), `under` (the bridge above; on any line of the record),
//! `cpus` (local ones, unless they are the node's), and of an RDMA device `rdma` (its name), `link` (`infiniband`,
//! `ethernet` or `other`), `rate` (Gb/s), `port` (`active` or `down`), `bond=yes`, and `verbs` (`yes` or `no`: whether
//! the process has its device node). CPUs that no `cores` line names are cores of their own.

use super::cpus::Cpus;
use super::machine::{Device, Link, MAX_DEPTH, MAX_DEVICES, Machine, Misplaced, Rdma};
use super::pci::{PciAddress, hex};
use crate::base::{Error, Result, quoted};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// The first line.
const HEAD: &str = "tokenyard-topology 1";
/// With which the first line of any version begins.
const KIND: &[u8] = b"tokenyard-topology ";
/// Longest record, in bytes: a host of 8 GPUs takes some 4 KiB.
pub const MAX_BYTES: usize = 1 << 20;
/// Longest name of an RDMA device, in bytes; the kernel's limit is 63.
const MAX_NAME: usize = 63;
/// Most NUMA nodes: the kernel's limit.
const MAX_NODES: u32 = 1024;
/// Longest part of a line that an error quotes, in characters.
const SHOWN: usize = 60;

/// Reads a record from a file.
///
/// # Errors
/// `Config` if the file cannot be read, is no regular file or is longer than [`MAX_BYTES`]; and as [`parse`].
pub fn read(path: &Path) -> Result<Machine> {
    let bytes = bytes_of(path)?;
    let Ok(text) = std::str::from_utf8(&bytes) else {
        return Err(refused("not text", "give a file that tokenyard topology --record wrote"));
    };
    parse(text)
}

/// Whether a file is a record, of this version or another, by its first line.
///
/// # Errors
/// `Config` if the file cannot be read, is no regular file or is longer than [`MAX_BYTES`].
pub fn is_record(path: &Path) -> Result<bool> {
    let bytes = bytes_of(path)?;
    let mut lines = bytes.split(|byte| *byte == b'\n').map(<[u8]>::trim_ascii);
    let first = lines.find(|line| !line.is_empty() && !line.starts_with(b"#"));
    Ok(first.is_some_and(|line| line.starts_with(KIND)))
}

/// The bytes of a small regular file.
pub(super) fn bytes_of(path: &Path) -> Result<Vec<u8>> {
    let unreadable = |error: std::io::Error| refused("unreadable", format!("{error}; give another file"));
    // Looked at before it is opened: opening a pipe would wait for its writer.
    if !std::fs::metadata(path).map_err(unreadable)?.is_file() {
        return Err(refused("no regular file", "give a file"));
    }
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(unreadable)?;
    file.take(MAX_BYTES as u64 + 1).read_to_end(&mut bytes).map_err(unreadable)?;
    if bytes.len() > MAX_BYTES {
        return Err(refused(format!("longer than {MAX_BYTES} bytes"), "give a record of one machine"));
    }
    Ok(bytes)
}

/// Reads a record.
///
/// # Errors
/// `Config` that names the line, if the text is no record of this version, has facts twice or beyond their limits, or
/// devices under bridges that are missing or that are in a circle.
pub fn parse(text: &str) -> Result<Machine> {
    if text.len() > MAX_BYTES {
        return Err(refused(format!("longer than {MAX_BYTES} bytes"), "give a record of one machine"));
    }
    let mut reader = Reader::default();
    let mut headed = false;
    for (at, line) in text.lines().enumerate() {
        let content = line.split('#').next().unwrap_or_default().trim();
        if content.is_empty() {
            continue;
        }
        let taken = match headed {
            true => reader.line(at + 1, content),
            false if content == HEAD => Ok(()),
            false => Err(format!("the first line of this version is `{HEAD}`")),
        };
        headed = true;
        taken.map_err(|advice| refused(shown(at + 1, content), advice))?;
    }
    if !headed {
        return Err(refused("empty", format!("the first line of a record is `{HEAD}`")));
    }
    reader.finish()
}

fn refused(value: impl ToString, advice: impl Into<String>) -> Error {
    Error::config("topology record", value, advice)
}

/// "line 7, `pci 0000:5`".
fn shown(line: usize, content: &str) -> String {
    let short: String = content.chars().take(SHOWN).collect();
    let cut = if short.len() < content.len() { "..." } else { "" };
    format!("line {line}, `{}{cut}`", quoted(short.as_bytes()))
}

/// What has been read so far.
#[derive(Default)]
struct Reader {
    allowed: Option<Cpus>,
    cores: Vec<Cpus>,
    /// CPUs in `cores`.
    threads: BTreeSet<u32>,
    nodes: BTreeMap<u32, Cpus>,
    /// CPUs in `nodes`.
    placed: BTreeSet<u32>,
    devices: BTreeMap<PciAddress, Device>,
    /// The line of each device.
    lines: BTreeMap<PciAddress, usize>,
    names: BTreeSet<String>,
}

type Taken<T = ()> = std::result::Result<T, String>;

impl Reader {
    fn line(&mut self, at: usize, content: &str) -> Taken {
        let mut words = content.split_whitespace();
        match words.next() {
            Some("allowed") => self.allowed(words.next(), words.next()),
            Some("cores") => self.cores(&words.map(cpus).collect::<Taken<Vec<Cpus>>>()?),
            Some("node") => self.node(words.next(), words.next(), words.next()),
            Some("pci") => self.pci(at, words),
            _ => Err("a line begins with allowed, cores, node or pci".to_string()),
        }
    }

    fn allowed(&mut self, list: Option<&str>, more: Option<&str>) -> Taken {
        match (list, more) {
            (Some(list), None) if self.allowed.is_none() => self.allowed = Some(cpus(list)?),
            (Some(_), None) => return Err("there is such a line before; give one".to_string()),
            _ => return Err("give one list of CPUs".to_string()),
        }
        Ok(())
    }

    fn cores(&mut self, lists: &[Cpus]) -> Taken {
        let length = lists.first().map_or(0, Cpus::len);
        if length == 0 || lists.iter().any(|list| list.len() != length) {
            return Err("give lists of CPUs that are equally long".to_string());
        }
        for cpu in lists.iter().flat_map(Cpus::iter) {
            if !self.threads.insert(cpu) {
                return Err(format!("CPU {cpu} is in a core already; name each CPU once"));
            }
        }
        if lists.len() > 1 {
            let lists: Vec<Vec<u32>> = lists.iter().map(|list| list.iter().collect()).collect();
            let core = |nth: usize| lists.iter().filter_map(|list| list.get(nth).copied()).collect::<Cpus>();
            self.cores.extend((0..length).map(core));
        }
        Ok(())
    }

    fn node(&mut self, node: Option<&str>, list: Option<&str>, more: Option<&str>) -> Taken {
        let (Some(node), Some(list), None) = (node, list, more) else {
            return Err("give a node's number and a list of CPUs".to_string());
        };
        let (node, cpus) = (number(node, MAX_NODES)?, cpus(list)?);
        if let Some(twice) = cpus.iter().find(|cpu| self.placed.contains(cpu)) {
            return Err(format!("CPU {twice} is in another node; name each CPU once"));
        }
        self.placed.extend(cpus.iter());
        match cpus.is_empty() || self.nodes.insert(node, cpus).is_some() {
            true => Err("give each node once, with CPUs".to_string()),
            false => Ok(()),
        }
    }

    fn pci<'a>(&mut self, at: usize, mut words: impl Iterator<Item = &'a str>) -> Taken {
        let (address, class, ids) = (words.next(), words.next(), words.next());
        let id = |text: &str| hex(text, 4..=4).and_then(|id| u16::try_from(id).ok());
        let (vendor, device) = ids.and_then(|ids| ids.split_once(':')).unwrap_or_default();
        let known = (address.and_then(PciAddress::parse), class.and_then(id), id(vendor), id(device));
        let (Some(address), Some(class), Some(vendor), Some(device)) = known else {
            return Err("give an address, a class and two ids, as in pci 0000:55:00.0 0200 1d0f:efa2".to_string());
        };
        if self.devices.len() == MAX_DEVICES {
            return Err(format!("there are more than {MAX_DEVICES} devices"));
        }
        let mut device = Device { class, vendor, device, ..Device::bridge(None) };
        let mut rdma = Rdma::default();
        let mut given = BTreeSet::new();
        for word in words {
            let (key, value) = word.split_once('=').unwrap_or((word, ""));
            if !given.insert(key) {
                return Err(format!("{} is given twice", quoted(key.as_bytes())));
            }
            fact(&mut device, &mut rdma, key, value)?;
        }
        let of_nic = ["link", "rate", "port", "bond", "verbs"].iter().any(|key| given.contains(key));
        match rdma.name.is_empty() {
            true if of_nic => {
                return Err("link, rate, port, bond and verbs are of an RDMA device; give rdma=NAME".into());
            }
            true => {}
            false if self.names.insert(rdma.name.clone()) => device.rdma = Some(rdma),
            false => return Err("another device has that RDMA device; name each once".to_string()),
        }
        if self.devices.insert(address, device).is_some() {
            let before = self.lines.get(&address).copied().unwrap_or_default();
            return Err(format!("line {before} has the same address; give each device once"));
        }
        self.lines.insert(address, at);
        Ok(())
    }

    fn finish(self) -> Result<Machine> {
        let Reader { allowed, cores, nodes, devices, lines, .. } = self;
        let Some(allowed) = allowed else {
            return Err(refused("without allowed CPUs", "give a line such as allowed 0-7"));
        };
        let line = |address: &PciAddress| {
            format!("line {}, device {address}", lines.get(address).copied().unwrap_or_default())
        };
        let mut cores = cores;
        cores.sort();
        Machine { allowed, cores, nodes, devices }.placed().map_err(|misplaced| match misplaced {
            Misplaced::Missing(address, parent) => {
                refused(line(&address), format!("no line has the bridge {parent}, which is above it; give one"))
            }
            Misplaced::Deep(address) => refused(
                line(&address),
                format!("it is under more than {MAX_DEPTH} bridges, or under itself; name the bridge right above it"),
            ),
        })
    }
}

/// Takes one `key=value` of a device.
fn fact(device: &mut Device, rdma: &mut Rdma, key: &str, value: &str) -> Taken {
    let yes_or_no = |value: &str, yes: &str, no: &str| match value {
        _ if value == yes => Ok(true),
        _ if value == no => Ok(false),
        _ => Err(format!("{} is {yes} or {no}", quoted(key.as_bytes()))),
    };
    match key {
        "node" => device.node = Some(number(value, MAX_NODES)?),
        "under" => device.parent = Some(PciAddress::parse(value).ok_or("under is an address, as in 0000:46:01.0")?),
        "cpus" => device.local = cpus(value)?,
        "rdma" if is_name(value) => rdma.name = value.to_string(),
        "rdma" => return Err(format!("rdma is a name of at most {MAX_NAME} letters, digits, _, - and .")),
        "link" => rdma.link = Some(link(value)?),
        "rate" => rdma.rate_gbps = Some(number(value, 100_000)?),
        "port" => rdma.active = Some(yes_or_no(value, "active", "down")?),
        "bond" => rdma.bond = yes_or_no(value, "yes", "no")?,
        "verbs" => rdma.node = Some(yes_or_no(value, "yes", "no")?),
        _ => return Err("facts are node, under, cpus, rdma, link, rate, port, bond and verbs".to_string()),
    }
    Ok(())
}

/// Whether a text may be an RDMA device's name.
pub(super) fn is_name(text: &str) -> bool {
    let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-' | b'.');
    (1..=MAX_NAME).contains(&text.len()) && text.bytes().all(plain)
}

fn link(text: &str) -> Taken<Link> {
    match text {
        "infiniband" => Ok(Link::InfiniBand),
        "ethernet" => Ok(Link::Ethernet),
        "other" => Ok(Link::Other),
        _ => Err("link is infiniband, ethernet or other".to_string()),
    }
}

fn cpus(list: &str) -> Taken<Cpus> {
    Cpus::parse(list).ok_or_else(|| format!("give CPUs below {} as in 0-3,8", super::MAX_CPUS))
}

fn number(text: &str, below: u32) -> Taken<u32> {
    let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    let number = text.parse().ok().filter(|&number| digits && number < below);
    number.ok_or_else(|| format!("give a number below {below}"))
}

/// The record of a machine, which [`parse`] reads.
pub fn write(machine: &Machine) -> String {
    let mut text = format!("{HEAD}\nallowed {}\n", machine.allowed);
    // Writing to a string cannot fail, here and below.
    for lists in zipped(&machine.cores) {
        let lists: Vec<String> = lists.into_iter().map(|list| list.into_iter().collect::<Cpus>().to_string()).collect();
        let _ = writeln!(text, "cores {}", lists.join(" "));
    }
    for (node, cpus) in &machine.nodes {
        let _ = writeln!(text, "node {node} {cpus}");
    }
    for (address, device) in &machine.devices {
        let _ = write!(text, "pci {address} {:04x} {:04x}:{:04x}", device.class, device.vendor, device.device);
        let mut fact = |key: &str, value: Option<String>| {
            let _ = value.map(|value| write!(text, " {key}={value}"));
        };
        fact("node", device.node.map(|node| node.to_string()));
        fact("under", device.parent.map(|parent| parent.to_string()));
        fact("cpus", Some(device.local.to_string()).filter(|list| !list.is_empty()));
        if let Some(rdma) = &device.rdma {
            let link = |link| match link {
                Link::InfiniBand => "infiniband",
                Link::Ethernet => "ethernet",
                Link::Other => "other",
            };
            let which = |is: bool, yes: &str, no: &str| if is { yes.to_string() } else { no.to_string() };
            fact("rdma", Some(rdma.name.clone()));
            fact("link", rdma.link.map(|of| link(of).to_string()));
            fact("rate", rdma.rate_gbps.map(|rate| rate.to_string()));
            fact("port", rdma.active.map(|active| which(active, "active", "down")));
            fact("bond", rdma.bond.then(|| "yes".to_string()));
            fact("verbs", rdma.node.map(|node| which(node, "yes", "no")));
        }
        text.push('\n');
    }
    text
}

/// Cores as lists of first, second and further hyperthreads. All lists of a group are equally long and ascending.
fn zipped(cores: &[Cpus]) -> Vec<Vec<Vec<u32>>> {
    let mut groups: Vec<Vec<Vec<u32>>> = Vec::new();
    for core in cores.iter().filter(|core| !core.is_empty()) {
        let fits = |lists: &Vec<Vec<u32>>| {
            lists.len() == core.len() && lists.iter().zip(core.iter()).all(|(list, cpu)| list.last() < Some(&cpu))
        };
        match groups.last_mut().filter(|lists| fits(lists)) {
            Some(lists) => lists.iter_mut().zip(core.iter()).for_each(|(list, cpu)| list.push(cpu)),
            None => groups.push(core.iter().map(|cpu| vec![cpu]).collect()),
        }
    }
    groups
}
