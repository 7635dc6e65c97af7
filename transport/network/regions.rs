//! The registered regions of an endpoint, by number: the same table for every backend of this crate.
//!
//! Place in the data path: under `post`, which looks up addresses of places here. Runs on the endpoint's thread, or
//! under the lock of its network. Never waits; allocates in `register` and `lengths` alone.
//!
//! ```text
//!   register ──▶ Some(span) ── give_up ──▶ in no address any more ── take_back ──▶ None: for good, the number is not
//!                                                                                  used again
//! ```
//!
//! A number is never used again because peers may still have an address with the former region: a late write to the
//! former region must not reach a newer one.

use super::{Place, RegionId, Released, Span, SpanMemory, WriteImm};
use crate::base::{Error, Result};

#[derive(Debug, Clone, Default)]
pub(crate) struct Regions {
    slots: Vec<Slot>,
}

#[derive(Debug, Clone, Copy)]
struct Slot {
    /// `None`: taken back.
    span: Option<Span>,
    /// It is being taken back.
    given_up: bool,
    /// Accepted writes from it whose completion was not handed out.
    outstanding: u32,
}

/// Whether `bytes` at `offset` are inside a region of `length` bytes; a region that was taken back has length 0.
pub(crate) fn fits(length: u64, offset: u64, bytes: u32) -> bool {
    length > 0 && offset.checked_add(u64::from(bytes)).is_some_and(|end| end <= length)
}

/// Bytes that a region takes in an address.
pub(crate) const REPORTED: usize = 10;

/// Appends lengths by number as in addresses: {numbers so far u16, registered regions u16}, then for each registered
/// region {number u16, bytes u64}. So the address grows with the present regions, not with all regions so far.
pub(crate) fn report_lengths(out: &mut Vec<u8>, lengths: &[u64]) {
    let there = || (0u16..).zip(lengths).filter(|(_, length)| **length > 0);
    out.extend((lengths.len() as u16).to_le_bytes());
    out.extend((there().count() as u16).to_le_bytes());
    there().for_each(|(number, length)| {
        out.extend(number.to_le_bytes());
        out.extend(length.to_le_bytes());
    });
}

/// Decodes the bytes of `report_lengths`; `None` if they are malformed or more bytes follow.
pub(crate) fn reported_lengths(bytes: &[u8]) -> Option<Vec<u64>> {
    let ([a, b, c, d], reported) = bytes.split_first_chunk::<4>()?;
    let mut lengths = vec![0; usize::from(u16::from_le_bytes([*a, *b]))];
    let (reported, rest) = reported.as_chunks::<REPORTED>();
    if !rest.is_empty() || reported.len() != usize::from(u16::from_le_bytes([*c, *d])) {
        return None;
    }
    for [a, b, length @ ..] in reported {
        let slot = lengths.get_mut(usize::from(u16::from_le_bytes([*a, *b])))?;
        let length = u64::from_le_bytes(*length);
        if *slot != 0 || length == 0 {
            return None;
        }
        *slot = length;
    }
    Some(lengths)
}

/// The refusal of a write whose source or target, as `name` says, is not inside a region of that length.
#[cold]
pub(crate) fn outside(name: &'static str, write: &WriteImm, length: Option<u64>) -> Error {
    let (place, owner) = match name {
        "source" => (write.source, "this rank".to_owned()),
        _ => (write.target, format!("rank {}", write.peer)),
    };
    let value = format!("{} bytes at {} of region {} of {owner}", write.bytes, place.offset, place.region.0);
    let advice = match length {
        Some(length) => format!("that region has {length} bytes; stay inside it"),
        None => {
            "no such region is known, or no more; register it before the address is taken, and connect again".to_owned()
        }
    };
    Error::argument(name, value, advice)
}

impl Slot {
    /// The span, as long as addresses contain it.
    fn reported(&self) -> Option<Span> {
        self.span.filter(|_| !self.given_up)
    }
}

impl Regions {
    /// # Errors
    /// `Argument` for a span that is empty or wraps, or one too many.
    pub fn register(&mut self, span: Span) -> Result<RegionId> {
        if span.base == 0 || span.bytes == 0 || span.base.checked_add(span.bytes as u64).is_none() {
            return Err(Error::argument("span", format!("{span:?}"), "give memory that exists"));
        }
        let number = u16::try_from(self.slots.len()).unwrap_or(u16::MAX);
        if number == u16::MAX {
            let advice = "register fewer, larger spans; numbers of those taken back are not used again";
            return Err(Error::argument("regions", number, advice));
        }
        self.slots.push(Slot { span: Some(span), given_up: false, outstanding: 0 });
        Ok(RegionId(number))
    }

    /// As `register`, for networks that reach host memory only.
    ///
    /// # Errors
    /// As `register`; `Argument` for any other memory than the host's.
    pub fn register_host(&mut self, span: Span) -> Result<RegionId> {
        if let SpanMemory::Gpu { ordinal, .. } = span.memory {
            let advice = "this network reaches host memory alone: register that, or use a network that reaches GPUs";
            return Err(Error::argument("span", format!("memory of GPU {ordinal}"), advice));
        }
        self.register(span)
    }

    /// Gives a region up: no address contains it from now on. Returns whether writes from it are outstanding.
    ///
    /// # Errors
    /// `Argument` if there is no such region, or it was taken back.
    pub fn give_up(&mut self, region: RegionId) -> Result<bool> {
        let slot = self.slots.get_mut(usize::from(region.0)).filter(|slot| slot.span.is_some());
        let refused = || Error::argument("region", region.0, "take back what is registered, and once");
        let slot = slot.ok_or_else(refused)?;
        slot.given_up = true;
        Ok(slot.outstanding > 0)
    }

    /// Takes a region back, unless writes from it are outstanding.
    ///
    /// # Errors
    /// As `give_up`.
    pub fn take_back(&mut self, region: RegionId) -> Result<Released> {
        if self.give_up(region)? {
            return Ok(Released::Busy);
        }
        if let Some(slot) = self.slots.get_mut(usize::from(region.0)) {
            slot.span = None;
        }
        Ok(Released::Done)
    }

    /// A write from a region was accepted.
    pub fn posted(&mut self, region: RegionId) {
        if let Some(slot) = self.slots.get_mut(usize::from(region.0)) {
            slot.outstanding += 1;
        }
    }

    /// The completion of a write from a region is handed out.
    pub fn completed(&mut self, region: RegionId) {
        if let Some(slot) = self.slots.get_mut(usize::from(region.0)) {
            slot.outstanding = slot.outstanding.saturating_sub(1);
        }
    }

    fn span(&self, region: RegionId) -> Option<Span> {
        self.slots.get(usize::from(region.0))?.span
    }

    /// Forgets the last region, which was never used.
    pub fn undo(&mut self, region: RegionId) {
        if self.slots.len() == usize::from(region.0) + 1 {
            self.slots.pop();
        }
    }

    /// Where a registered region begins.
    pub fn base(&self, region: RegionId) -> Option<u64> {
        self.span(region).map(|span| span.base)
    }

    /// The length of a registered region.
    pub fn length(&self, region: RegionId) -> Option<u64> {
        self.span(region).map(|span| span.bytes as u64)
    }

    /// Whether a region was registered and taken back.
    pub fn is_gone(&self, region: RegionId) -> bool {
        self.slots.get(usize::from(region.0)).is_some_and(|slot| slot.span.is_none())
    }

    /// The address of `bytes` at a place; `None` if they are not all inside a registered region.
    pub fn locate(&self, place: Place, bytes: u32) -> Option<u64> {
        let span = self.span(place.region)?;
        fits(span.bytes as u64, place.offset, bytes).then(|| span.base + place.offset)
    }

    /// Lengths by number, as in addresses: 0 for a region that was given up.
    pub fn lengths(&self) -> Vec<u64> {
        self.slots.iter().map(|slot| slot.reported().map_or(0, |span| span.bytes as u64)).collect()
    }

    /// Whether `lengths` can be an earlier report of this table, before more regions were registered or taken back.
    pub fn have_reported(&self, lengths: &[u64]) -> bool {
        let reported = |(slot, length): (&Slot, &u64)| slot.reported().is_none_or(|span| span.bytes as u64 == *length);
        lengths.len() <= self.slots.len() && self.slots.iter().zip(lengths).all(reported)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(region: u16, offset: u64) -> Place {
        Place { region: RegionId(region), offset }
    }

    #[test]
    fn a_region_that_is_gone_is_nowhere_and_its_number_is_not_used_again() {
        let mut regions = Regions::default();
        let span = |bytes| Span::host(4096, bytes);
        assert_eq!([regions.register(span(10)), regions.register(span(20))], [Ok(RegionId(0)), Ok(RegionId(1))]);
        let reported = regions.lengths();
        regions.posted(RegionId(0));
        assert_eq!(regions.take_back(RegionId(0)), Ok(Released::Busy));
        assert_eq!(regions.locate(place(0, 10), 0), Some(4106), "busy is not gone");
        assert_eq!((regions.lengths(), regions.give_up(RegionId(0))), (vec![0, 20], Ok(true)), "and in no address");
        assert!(regions.have_reported(&reported) && regions.have_reported(&[0, 20]));
        regions.completed(RegionId(0));
        assert_eq!(regions.take_back(RegionId(0)), Ok(Released::Done));
        assert_eq!([regions.locate(place(0, 0), 0), regions.locate(place(1, 0), 20)], [None, Some(4096)]);
        assert!(regions.is_gone(RegionId(0)) && !regions.is_gone(RegionId(1)) && !regions.is_gone(RegionId(2)));
        assert!(regions.take_back(RegionId(0)).is_err() && regions.take_back(RegionId(2)).is_err());
        assert_eq!(regions.register(span(30)), Ok(RegionId(2)));
        assert_eq!((regions.lengths(), regions.length(RegionId(0))), (vec![0, 20, 30], None));
        assert!(regions.have_reported(&reported) && regions.have_reported(&[0]) && regions.have_reported(&[0, 20, 30]));
        assert!(
            !regions.have_reported(&[0, 0])
                && !regions.have_reported(&[10, 21])
                && !regions.have_reported(&[0, 20, 30, 1])
        );
    }

    #[test]
    fn addresses_are_as_long_as_what_is_registered_now() {
        let mut regions = Regions::default();
        let reported = |regions: &Regions| {
            let mut bytes = Vec::new();
            report_lengths(&mut bytes, &regions.lengths());
            bytes
        };
        let kept = regions.register(Span::host(4096, 50)).unwrap();
        for context in 1..1000 {
            let region = regions.register(Span::host(4096, context)).unwrap();
            let bytes = reported(&regions);
            assert_eq!(bytes.len(), 4 + 2 * REPORTED, "context {context}");
            assert_eq!(reported_lengths(&bytes), Some(regions.lengths()));
            assert_eq!(regions.take_back(region), Ok(Released::Done));
        }
        assert_eq!(regions.take_back(kept), Ok(Released::Done));
        assert_eq!(reported_lengths(&reported(&regions)), Some(vec![0; 1000]));
        for bad in [&[][..], &[1, 0, 0], &[1, 0, 0, 0, 7], &[1, 0, 1, 0]] {
            assert_eq!(reported_lengths(bad), None, "{bad:?}");
        }
        let bad = |number: u8, length: u8| [[1, 0, 1, 0, number, 0, length].to_vec(), vec![0; 7]].concat();
        assert_eq!(
            [bad(0, 9), bad(1, 9), bad(0, 0)].map(|bytes| reported_lengths(&bytes)),
            [Some(vec![9]), None, None]
        );
    }

    #[test]
    fn numbers_end() {
        let mut regions = Regions::default();
        let taken = (0..u16::MAX).filter(|_| regions.register(Span::host(1, 1)).is_ok()).count();
        assert_eq!(taken, usize::from(u16::MAX));
        assert!(regions.register(Span::host(1, 1)).is_err());
        assert!(fits(5, 5, 0) && !fits(0, 0, 0) && !fits(5, u64::MAX, 1));
    }
}
