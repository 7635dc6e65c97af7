//! A peer's regions as this endpoint knows them: the same for all real networks.
//!
//! Place in the data path: under `post`, which looks up where a write goes. On the endpoint's thread. Allocates in
//! `update` alone, which `connect` calls.

use super::encoding::{Remote, Reported};
use super::regions::{Regions, fits, outside};
use super::{RegionId, WriteImm};
use crate::base::Error;

/// The regions of a peer, from its addresses.
#[derive(Debug, Clone, Default)]
pub(super) struct RemoteRegions {
    /// By number; 0: taken back.
    lengths: Vec<u64>,
    /// By region, then by NIC; of regions that are gone what they were.
    places: Vec<Remote>,
}

impl RemoteRegions {
    /// The length of a region; 0 of one that was taken back.
    pub fn length(&self, region: RegionId) -> Option<u64> {
        self.lengths.get(usize::from(region.0)).copied()
    }

    /// Where a region begins, for one of `nics` NICs.
    pub fn place(&self, region: RegionId, nic: usize, nics: usize) -> Option<Remote> {
        self.places.get(usize::from(region.0) * nics + nic).copied()
    }

    /// Takes in what an address says. Either of two addresses may be the older one: a region that is gone in one of
    /// them is gone.
    ///
    /// # Errors
    /// What is wrong with the address; then nothing has changed.
    pub fn update(&mut self, reported: &Reported, nics: usize) -> Result<(), String> {
        let mut there = reported.remotes.chunks_exact(nics);
        let (mut lengths, mut known_places) = (self.lengths.clone(), self.places.clone());
        let none = Remote { base: 0, key: 0 };
        for (number, reported) in reported.lengths.iter().enumerate() {
            let places = if *reported > 0 { there.next() } else { None };
            if places.is_some_and(|places| places.iter().any(|place| place.base.checked_add(*reported).is_none())) {
                return Err("has a region that wraps".into());
            }
            match lengths.get_mut(number) {
                Some(known) => {
                    let contradicts = *known != *reported && *known != 0 && *reported != 0;
                    let moved = *known != 0
                        && places.is_some_and(|places| {
                            known_places.get(number * nics..).is_none_or(|known| !known.starts_with(places))
                        });
                    if contradicts || moved {
                        return Err("contradicts an earlier one of the same endpoint".into());
                    }
                    *known = (*known).min(*reported);
                }
                None => {
                    lengths.push(*reported);
                    match places {
                        Some(places) => known_places.extend_from_slice(places),
                        None => known_places.extend(std::iter::repeat_n(none, nics)),
                    }
                }
            }
        }
        (self.lengths, self.places) = (lengths, known_places);
        Ok(())
    }
}

/// The address of a write's source, if the write is valid for an endpoint of so many NICs, whose writes have at most so
/// many bytes. The peer's regions are asked for once the NIC and the length are known to be good.
///
/// # Errors
/// `Argument` for what is outside (P8), and those of `remote`.
pub(super) fn admit<'a>(
    write: &WriteImm,
    (nics, most): (usize, u32),
    own: &Regions,
    remote: impl FnOnce() -> crate::base::Result<&'a RemoteRegions>,
) -> crate::base::Result<u64> {
    if usize::from(write.nic) >= nics {
        return Err(Error::argument("nic", write.nic, format!("there are {nics} NICs, counted from 0")));
    }
    if write.bytes > most {
        return Err(Error::argument("bytes", write.bytes, format!("a write has at most {most}; cut it")));
    }
    let remote = remote()?;
    let Some(source) = own.locate(write.source, write.bytes) else {
        return Err(outside("source", write, own.length(write.source.region)));
    };
    let length = remote.length(write.target.region);
    if length.is_none_or(|length| !fits(length, write.target.offset, write.bytes)) {
        return Err(outside("target", write, length.filter(|length| *length > 0)));
    }
    Ok(source)
}
