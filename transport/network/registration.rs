//! What the NICs of an endpoint have registered: the same for all real networks.
//!
//! Place in the data path: beside it. On the endpoint's thread; regions come and go, and addresses are made, while a
//! context is built or closed.

use super::encoding::{Remote, Reported};
use super::reach::Gpu;
use super::regions::Regions;
use super::{RegionId, Span};
use crate::base::{Error, Result};

/// A NIC that registers memory.
pub(super) trait Nic {
    /// Registers a span as its next region.
    ///
    /// # Errors
    /// Those of its library; then nothing is registered.
    fn register(&mut self, span: Span, gpu: Option<&Gpu>) -> Result<()>;

    /// Forgets the last registration.
    fn undo(&mut self);

    /// Takes a region back.
    ///
    /// # Errors
    /// `Transport` if the library does not close it, now and each time after.
    fn release(&mut self, region: RegionId) -> Result<()>;

    /// Where peers write to a region that begins at `base`; none if it was taken back.
    fn remote(&self, region: RegionId, base: u64) -> Option<Remote>;
}

/// A NIC's registrations by region.
#[derive(Debug)]
pub(super) struct Registrations<T>(Vec<Registration<T>>);

#[derive(Debug)]
enum Registration<T> {
    Open(T),
    Closed,
    /// With the code for which the library did not close it.
    Stuck(i32),
}

impl<T> Default for Registrations<T> {
    fn default() -> Registrations<T> {
        Registrations(Vec::new())
    }
}

impl<T> Registrations<T> {
    pub fn push(&mut self, registration: T) {
        self.0.push(Registration::Open(registration));
    }

    /// Forgets the last one.
    pub fn undo(&mut self) {
        self.0.pop();
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// That of a region, as long as it is open.
    pub fn get(&self, region: RegionId) -> Option<&T> {
        match self.0.get(usize::from(region.0))? {
            Registration::Open(registration) => Some(registration),
            Registration::Closed | Registration::Stuck(_) => None,
        }
    }

    /// Closes that of a region, once.
    ///
    /// # Errors
    /// The code of `close`, now and each time after.
    pub fn close(
        &mut self,
        region: RegionId,
        close: impl FnOnce(T) -> std::result::Result<(), i32>,
    ) -> std::result::Result<(), i32> {
        let Some(place) = self.0.get_mut(usize::from(region.0)) else { return Ok(()) };
        let closed = match std::mem::replace(place, Registration::Closed) {
            Registration::Open(registration) => close(registration),
            Registration::Closed => Ok(()),
            Registration::Stuck(code) => Err(code),
        };
        closed.inspect_err(|code| *place = Registration::Stuck(*code))
    }
}

/// Registers a span with all NICs of an endpoint that may have `most` regions over its life.
///
/// # Errors
/// `Argument` if there are too many regions, or the span is none; those of the NICs. Then nothing is registered.
pub(super) fn register(
    lanes: &mut [impl Nic],
    (regions, most): (&mut Regions, u32),
    span: Span,
    gpu: Option<&Gpu>,
) -> Result<RegionId> {
    if regions.lengths().len() >= most as usize {
        let advice = "register fewer, larger spans; numbers of those taken back are not used again";
        return Err(Error::argument("regions", most + 1, advice));
    }
    let region = regions.register(span)?;
    for at in 0..lanes.len() {
        let refused = lanes.get_mut(at).and_then(|lane| lane.register(span, gpu).err());
        if let Some(why) = refused {
            lanes.iter_mut().take(at).for_each(Nic::undo);
            regions.undo(region);
            return Err(why);
        }
    }
    Ok(region)
}

/// What is registered now, as addresses name it.
pub(super) fn reported(lanes: &[impl Nic], regions: &Regions) -> Reported {
    let lengths = regions.lengths();
    let there = (0u16..).map(RegionId).zip(&lengths).filter(|(_, length)| **length > 0);
    let bases = there.filter_map(|(region, _)| Some((region, regions.base(region)?)));
    let remotes = bases.flat_map(|(region, base)| lanes.iter().filter_map(move |lane| lane.remote(region, base)));
    Reported { remotes: remotes.collect(), lengths }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::network::Released;
    use crate::transport::network::encoding::Rest;

    /// A NIC that registers so many spans.
    #[derive(Default)]
    struct Few {
        regions: Registrations<u64>,
        most: usize,
    }

    impl Nic for Few {
        fn register(&mut self, span: Span, _gpu: Option<&Gpu>) -> Result<()> {
            if self.regions.len() == self.most {
                return Err(Error::transport("it has no more", "register fewer"));
            }
            self.regions.push(span.base);
            Ok(())
        }

        fn undo(&mut self) {
            self.regions.undo();
        }

        fn release(&mut self, region: RegionId) -> Result<()> {
            self.regions.close(region, |_| Ok(())).map_err(|_| Error::transport("it does not", "wait"))
        }

        fn remote(&self, region: RegionId, base: u64) -> Option<Remote> {
            self.regions.get(region).map(|key| Remote { base, key: *key })
        }
    }

    #[test]
    fn what_one_nic_refuses_none_has_registered() {
        let mut nics = [3, 1].map(|most| Few { most, ..Few::default() });
        let mut regions = Regions::default();
        let span = |base| Span::host(base, 10);
        assert_eq!(register(&mut nics, (&mut regions, 9), span(1), None), Ok(RegionId(0)));
        assert!(register(&mut nics, (&mut regions, 9), span(2), None).is_err());
        assert_eq!((nics[0].regions.len(), nics[1].regions.len(), regions.lengths()), (1, 1, vec![10]));
        nics[1].most = 3;
        assert_eq!(register(&mut nics, (&mut regions, 2), span(3), None), Ok(RegionId(1)));
        assert!(register(&mut nics, (&mut regions, 2), span(4), None).is_err(), "a third of two");
        let there = |reported: &Reported| reported.remotes.iter().map(|remote| remote.key).collect::<Vec<u64>>();
        let now = reported(&nics, &regions);
        assert_eq!((now.lengths.clone(), there(&now)), (vec![10, 10], vec![1, 1, 3, 3]));
        assert_eq!(regions.take_back(RegionId(0)), Ok(Released::Done));
        let now = reported(&nics, &regions);
        assert_eq!((now.lengths.clone(), there(&now)), (vec![0, 10], vec![3, 3]));
        let mut bytes = Vec::new();
        now.put(&mut bytes);
        let mut rest = Rest(&bytes);
        assert_eq!((Reported::read(&mut rest, 2), rest.0.len()), (Some(now.clone()), 0));
        assert_eq!(Reported::read(&mut Rest(&bytes), 3), None, "places of three NICs are not there");
    }

    #[test]
    fn what_does_not_close_stays_stuck_and_closes_once() {
        let mut regions = Registrations::default();
        (0..2).for_each(|region| regions.push(region));
        assert_eq!(regions.close(RegionId(1), |_| Err(-16)), Err(-16));
        assert_eq!(regions.close(RegionId(1), |_| Ok(())), Err(-16), "and is not closed again");
        assert_eq!((regions.get(RegionId(0)), regions.get(RegionId(1))), (Some(&0), None));
        assert_eq!(regions.close(RegionId(0), |_| Ok(())), Ok(()));
        assert_eq!(regions.close(RegionId(0), |_| Err(-1)), Ok(()), "it is closed");
        assert_eq!(regions.close(RegionId(7), |_| Err(-1)), Ok(()), "there is none");
    }
}
