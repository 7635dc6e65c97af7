//! Taking regions back (P13): which peers may still write to a region of this endpoint, and which regions peers have
//! taken back from this endpoint.
//!
//! Place in the data path: beside it. An endpoint's thread asks [`Revocations::is_revoked`] in each `post`, and does
//! everything else in `deregister` and `poll`. Never waits; allocates only while a region is being taken back.
//!
//! ```text
//!  owner of the region                                  a peer that may write to it
//!  deregister: Busy ──────────── Revoke(region) ──────▶ later posts to it complete as Dropped;
//!                                                       its earlier ones go on until they complete
//!  deregister: Done ◀─────────── LetGo(region) ──────── the last of them has completed
//!      └── also once each peer that has not answered is gone, or `let_go_ns` have passed: these peers are cut off
//! ```

use super::RegionId;
use crate::base::Rank;
use std::collections::{BTreeSet, VecDeque};

/// How long a peer may take to let go of a region, unless configured: much longer than all writes under way take, much
/// shorter than a collective's deadline.
pub(crate) const LET_GO_NS: u64 = 200_000_000;

/// A message of one endpoint to another about a region of the owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Notice {
    /// The sender takes its region back.
    Revoke(RegionId),
    /// The sender has no write to the receiver's region under way, and will post none.
    LetGo(RegionId),
}

/// An own region that is being taken back.
#[derive(Debug)]
struct Leaving {
    region: RegionId,
    /// Peers that have not let go of it.
    waiting: Vec<Rank>,
    until_ns: u64,
}

/// An endpoint's part in taking regions back, of its own and of its peers.
#[derive(Debug, Default)]
pub(crate) struct Revocations {
    leaving: Vec<Leaving>,
    /// Regions of peers that were revoked.
    revoked: BTreeSet<(Rank, RegionId)>,
    /// Those of them that this endpoint has not let go of.
    owed: Vec<(Rank, RegionId)>,
    notices: VecDeque<(Rank, Notice)>,
}

impl Revocations {
    /// Takes an own region back, or goes on with it. `living` are the peers that may write to it: a peer that is no
    /// longer among them is not waited for, nor is any peer after `let_go_ns`. `None`: wait for a peer. Otherwise no
    /// peer may write to the region any more; the number is that of peers that had not let go in time, and the caller
    /// ends it by [`end`](Self::end).
    pub fn take_back(&mut self, region: RegionId, living: &[Rank], now_ns: u64, let_go_ns: u64) -> Option<usize> {
        let at = self.leaving.iter().position(|leaving| leaving.region == region).unwrap_or_else(|| {
            self.notices.extend(living.iter().map(|peer| (*peer, Notice::Revoke(region))));
            let until_ns = now_ns.saturating_add(let_go_ns);
            self.leaving.push(Leaving { region, waiting: living.to_vec(), until_ns });
            self.leaving.len() - 1
        });
        let leaving = self.leaving.get_mut(at)?;
        leaving.waiting.retain(|peer| living.contains(peer));
        if now_ns < leaving.until_ns && !leaving.waiting.is_empty() {
            return None;
        }
        Some(std::mem::take(&mut leaving.waiting).len())
    }

    /// The peers that have not let go of an own region.
    pub fn waiting(&self, region: RegionId) -> &[Rank] {
        self.leaving.iter().find(|leaving| leaving.region == region).map_or(&[], |leaving| &leaving.waiting)
    }

    /// Whether an own region is being taken back.
    pub fn is_leaving(&self, region: RegionId) -> bool {
        self.leaving.iter().any(|leaving| leaving.region == region)
    }

    /// An own region has been taken back.
    pub fn end(&mut self, region: RegionId) {
        self.leaving.retain(|leaving| leaving.region != region);
    }

    /// Takes in a peer's notice.
    pub fn take_in(&mut self, peer: Rank, notice: Notice) {
        match notice {
            Notice::Revoke(region) => {
                if self.revoked.insert((peer, region)) {
                    self.owed.push((peer, region));
                }
            }
            Notice::LetGo(region) => {
                if let Some(leaving) = self.leaving.iter_mut().find(|leaving| leaving.region == region) {
                    leaving.waiting.retain(|waiting| *waiting != peer);
                }
            }
        }
    }

    /// Whether a peer has revoked its region: a post to it completes as `Dropped`.
    pub fn is_revoked(&self, peer: Rank, region: RegionId) -> bool {
        !self.revoked.is_empty() && self.revoked.contains(&(peer, region))
    }

    /// Whether this endpoint has revoked regions to let go of.
    pub fn owes(&self) -> bool {
        !self.owed.is_empty()
    }

    /// Lets go of the revoked regions to which no write is outstanding.
    pub fn settle(&mut self, is_outstanding: impl Fn(Rank, RegionId) -> bool) {
        let notices = &mut self.notices;
        self.owed.retain(|(peer, region)| {
            let outstanding = is_outstanding(*peer, *region);
            if !outstanding {
                notices.push_back((*peer, Notice::LetGo(*region)));
            }
            outstanding
        });
    }

    /// The next notice to send.
    pub fn next_notice(&mut self) -> Option<(Rank, Notice)> {
        self.notices.pop_front()
    }

    /// A peer's endpoint was replaced: what the former one revoked means nothing any more.
    pub fn forget(&mut self, peer: Rank) {
        self.revoked.retain(|(other, _)| *other != peer);
        self.owed.retain(|(other, _)| *other != peer);
        self.notices.retain(|(other, _)| *other != peer);
        self.leaving.iter_mut().for_each(|leaving| leaving.waiting.retain(|waiting| *waiting != peer));
    }

    /// A reset: all peers are forgotten.
    pub fn clear(&mut self) {
        self.revoked.clear();
        self.owed.clear();
        self.notices.clear();
        self.leaving.iter_mut().for_each(|leaving| leaving.waiting.clear());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: RegionId = RegionId(4);
    const LET_GO: u64 = 100;

    fn notices(revocations: &mut Revocations) -> Vec<(u32, Notice)> {
        std::iter::from_fn(|| revocations.next_notice()).map(|(peer, notice)| (peer.0, notice)).collect()
    }

    #[test]
    fn a_region_is_free_once_all_peers_have_let_go() {
        let (mut own, peers) = (Revocations::default(), [Rank(1), Rank(2)]);
        let asked = |own: &mut Revocations| own.take_back(OWN, &peers, 99, LET_GO);
        assert_eq!([own.take_back(OWN, &peers, 0, LET_GO), asked(&mut own)], [None; 2]);
        assert_eq!(notices(&mut own), [(1, Notice::Revoke(OWN)), (2, Notice::Revoke(OWN))], "each is notified once");
        own.take_in(Rank(1), Notice::LetGo(OWN));
        own.take_in(Rank(1), Notice::LetGo(OWN));
        assert_eq!([own.waiting(OWN), own.waiting(RegionId(5))], [&[Rank(2)][..], &[]]);
        own.take_in(Rank(2), Notice::LetGo(RegionId(5)));
        assert_eq!(asked(&mut own), None, "rank 2 has let go of another region");
        own.take_in(Rank(2), Notice::LetGo(OWN));
        assert_eq!([asked(&mut own), asked(&mut own)], [Some(0); 2]);
        own.end(OWN);
        assert_eq!(notices(&mut own), []);
        assert_eq!(Revocations::default().take_back(OWN, &[], 0, LET_GO), Some(0), "nobody to wait for");
    }

    #[test]
    fn who_is_gone_or_late_is_not_waited_for() {
        let mut own = Revocations::default();
        let all = [1, 2, 3].map(Rank);
        assert_eq!(own.take_back(OWN, &all, 7, LET_GO), None);
        assert_eq!(own.take_back(OWN, &all[1..], 106, LET_GO), None);
        assert_eq!(own.take_back(OWN, &all[1..], 107, LET_GO), Some(2), "rank 1 is gone, the others are late");
        assert_eq!(own.take_back(OWN, &all[1..], 107, LET_GO), Some(0));
        for how in [|own: &mut Revocations| own.forget(Rank(2)), Revocations::clear] {
            own.end(OWN);
            assert_eq!(own.take_back(OWN, &[Rank(2)], 8, LET_GO), None);
            how(&mut own);
            assert_eq!(own.take_back(OWN, &[Rank(2)], 8, LET_GO), Some(0), "another endpoint of rank 2");
        }
    }

    #[test]
    fn a_peer_lets_go_once_its_writes_have_completed() {
        let mut peer = Revocations::default();
        assert!(!peer.owes() && !peer.is_revoked(Rank(0), OWN));
        peer.take_in(Rank(0), Notice::Revoke(OWN));
        peer.take_in(Rank(0), Notice::Revoke(OWN));
        assert!(peer.owes() && peer.is_revoked(Rank(0), OWN));
        assert!(!peer.is_revoked(Rank(1), OWN) && !peer.is_revoked(Rank(0), RegionId(5)));
        peer.settle(|_, _| true);
        assert_eq!(notices(&mut peer), []);
        peer.settle(|rank, region| (rank, region) != (Rank(0), OWN));
        peer.settle(|_, _| false);
        assert_eq!(notices(&mut peer), [(0, Notice::LetGo(OWN))], "once");
        assert!(!peer.owes() && peer.is_revoked(Rank(0), OWN), "for good");
        peer.forget(Rank(0));
        assert!(!peer.is_revoked(Rank(0), OWN));
    }
}
