//! Addresses of PCI devices and of root buses.

use std::fmt;

/// Address of a PCI function, as in `0000:59:00.0`. Ordered as sysfs lists them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PciAddress {
    domain: u32,
    bus: u8,
    device: u8,
    function: u8,
}

impl PciAddress {
    /// Reads `domain:bus:device.function` in hexadecimal digits, of either case. The domain has 4 to 8 digits:
    /// nvidia-smi writes 8, and some virtual machines need more than 4. `None` for any other text.
    pub fn parse(text: &str) -> Option<PciAddress> {
        let (domain, rest) = text.split_once(':')?;
        let (bus, rest) = rest.split_once(':')?;
        let (device, function) = rest.split_once('.')?;
        let device = u8::try_from(hex(device, 2..=2)?).ok().filter(|&device| device < 32)?;
        let function = u8::try_from(hex(function, 1..=1)?).ok().filter(|&function| function < 8)?;
        let bus = u8::try_from(hex(bus, 2..=2)?).ok()?;
        Some(PciAddress { domain: hex(domain, 4..=8)?, bus, device, function })
    }

    /// The bus that the device is on. For a device without a bridge above it, this is a root bus.
    pub fn bus(self) -> PciBus {
        PciBus { domain: self.domain, bus: self.bus }
    }
}

/// A number of so many hexadecimal digits, without a sign.
pub(super) fn hex(text: &str, digits: std::ops::RangeInclusive<usize>) -> Option<u32> {
    let all = digits.contains(&text.len()) && text.bytes().all(|b| b.is_ascii_hexdigit());
    if all { u32::from_str_radix(text, 16).ok() } else { None }
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}:{:02x}:{:02x}.{:x}", self.domain, self.bus, self.device, self.function)
    }
}

/// A PCI bus, as in `0000:10`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PciBus {
    domain: u32,
    bus: u8,
}

impl fmt::Display for PciBus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}:{:02x}", self.domain, self.bus)
    }
}
