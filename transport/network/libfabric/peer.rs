//! A peer's endpoint as this one knows it.
//!
//! Place in the data path: under `post`, `submit` and what messages bring. On the endpoint's thread.

use super::address::Address;
use super::libfabric_sys::fi_addr_t;
use crate::transport::network::encoding::Remote;
use crate::transport::network::remote::RemoteRegions;
use std::collections::VecDeque;

/// A peer's endpoint.
#[derive(Debug)]
pub(super) struct Peer {
    pub key: u64,
    /// Distinguishes it from earlier endpoints of the same rank.
    pub channel: u64,
    pub paths: Vec<Path>,
    pub regions: RemoteRegions,
    /// Numbers of messages to it that have not ended, in order.
    under_way: Vec<u64>,
    /// Messages that the provider has not taken.
    pub unsent: VecDeque<u32>,
    /// The number of the last message to it. A peer that is connected to again may know this endpoint still: its
    /// numbers go on above those of earlier channels.
    pub sent: u64,
    /// Messages from it that have come.
    pub come: Window,
    pub notices: Notices,
    /// The latest question to it.
    pub question: u16,
    /// Regions that this endpoint has taken back from the peer, and the peer from this endpoint.
    pub taken_back: u16,
    pub lost: u16,
    /// Since when its notices are not known, and when it was last asked.
    pub doubted_ns: u64,
    pub asked_ns: u64,
}

/// Numbers of messages that a window holds.
const WINDOW: u64 = 64;

/// Numbers of messages that have come: the highest, and which of the 64 up to it. A sender goes no further above a
/// message that has not ended.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Window {
    highest: u64,
    seen: u64,
}

impl Window {
    /// Takes a number in, counted from 1; false if it has come before, or is too old to tell.
    pub fn take(&mut self, number: u64) -> bool {
        if number > self.highest {
            let steps = number - self.highest;
            self.seen = if steps < WINDOW { self.seen << steps } else { 0 };
            self.highest = number;
        }
        let bit = 1u64.checked_shl((self.highest - number).min(WINDOW) as u32).unwrap_or(0);
        let fresh = bit != 0 && self.seen & bit == 0 && number > 0;
        self.seen |= bit;
        fresh
    }
}

/// Whether notices of a peer may have been missed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Notices {
    Known,
    /// This endpoint was silent for long.
    Missed,
    /// And has asked the peer.
    Asked,
    /// The peer has answered that it has taken so many regions back; their notices are on their way.
    Behind(u16),
}

/// The way to a peer by one NIC.
#[derive(Debug)]
pub(super) struct Path {
    pub address: fi_addr_t,
    pub scratch: Remote,
    pub outstanding: u32,
    /// Writes that the provider has not taken.
    pub unsent: VecDeque<u32>,
}

impl Peer {
    /// A peer that was just connected to, with its paths.
    pub fn new(address: &Address, channel: u64, paths: Vec<Path>, messages: usize) -> Peer {
        Peer {
            key: address.key,
            channel,
            paths,
            regions: RemoteRegions::default(),
            under_way: Vec::with_capacity(messages),
            unsent: VecDeque::with_capacity(messages),
            sent: channel << 32,
            come: Window::default(),
            notices: Notices::Known,
            question: 0,
            taken_back: 0,
            lost: 0,
            doubted_ns: 0,
            asked_ns: 0,
        }
    }

    /// Takes the number of the next message to the peer; `None` if as many as `most` have not ended, or one has not
    /// that would be too old for the peer's window.
    pub fn number(&mut self, most: usize) -> Option<u64> {
        let (number, oldest) = (self.sent + 1, self.under_way.first().copied());
        if self.under_way.len() >= most || oldest.is_some_and(|oldest| number - oldest >= WINDOW) {
            return None;
        }
        self.sent = number;
        self.under_way.push(number);
        Some(number)
    }

    /// A message to the peer has ended.
    pub fn ended(&mut self, number: u64) {
        self.under_way.retain(|other| *other != number);
    }

    /// The peer has answered a question: by then it had taken so many regions back. An answer to an old question says
    /// nothing of what came after it, and one that took longer than `patience_ns` nothing of now.
    pub fn answered(&mut self, question: u16, taken_back: u16, now_ns: u64, patience_ns: u64) {
        if (self.notices, self.question) == (Notices::Asked, question) {
            let fresh = now_ns.saturating_sub(self.asked_ns) <= patience_ns;
            self.notices = if fresh { Notices::Behind(taken_back) } else { Notices::Missed };
            self.catch_up();
        }
    }

    /// This endpoint was silent for long: what is known of notices may be old.
    pub fn doubt(&mut self, now_ns: u64) {
        match self.notices {
            Notices::Known => (self.notices, self.doubted_ns) = (Notices::Missed, now_ns),
            Notices::Behind(_) => self.notices = Notices::Missed,
            Notices::Missed | Notices::Asked => {}
        }
    }

    /// The peer is not waited for any longer: notices that it counts and that have not come are lost.
    pub fn give_up(&mut self) {
        if let Notices::Behind(taken_back) = self.notices {
            self.lost = taken_back;
        }
        self.notices = Notices::Known;
    }

    /// The peer has taken a region back.
    pub fn lose_region(&mut self) {
        self.lost = self.lost.wrapping_add(1);
        self.catch_up();
    }

    /// Messages overtake each other: an answer counts once all notices before it have come.
    fn catch_up(&mut self) {
        // Numbers that wrap: at most half of all are between them.
        if matches!(self.notices, Notices::Behind(taken_back) if taken_back.wrapping_sub(self.lost) as i16 <= 0) {
            self.notices = Notices::Known;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::Rank;
    use crate::transport::network::encoding::Reported;

    fn peer() -> Peer {
        let address = Address {
            key: 1,
            rank: Rank(1),
            virtual_addresses: false,
            provider: String::new(),
            ports: Vec::new(),
            regions: Reported { lengths: Vec::new(), remotes: Vec::new() },
        };
        Peer { notices: Notices::Asked, question: 7, asked_ns: 100, ..Peer::new(&address, 1, Vec::new(), 1) }
    }

    #[test]
    fn an_answer_counts_once_the_notices_before_it_have_come() {
        let mut ahead = peer();
        ahead.lose_region();
        ahead.answered(7, 3, 110, 10);
        assert_eq!(ahead.notices, Notices::Behind(3), "two of three notices are on their way");
        ahead.lose_region();
        assert_eq!(ahead.notices, Notices::Behind(3));
        ahead.lose_region();
        assert_eq!(ahead.notices, Notices::Known);
        let mut overtaken = Peer { lost: u16::MAX, ..peer() };
        overtaken.lose_region();
        overtaken.lose_region();
        overtaken.answered(7, 0, 110, 10);
        assert_eq!(overtaken.notices, Notices::Known, "more came than the answer counts");
    }

    #[test]
    fn a_message_that_comes_again_counts_once() {
        let mut window = Window::default();
        let come = [1, 3, 2, 3, 1, 66, 2, 3, 66, 200, 137, 136, 199, 0].map(|number| window.take(number));
        let (yes, no) = (true, false);
        assert_eq!(come, [yes, yes, yes, no, no, yes, no, no, no, yes, yes, no, yes, no]);
    }

    #[test]
    fn a_message_that_others_overtake_still_counts() {
        let (mut sender, mut window) = (peer(), Window::default());
        let held = sender.number(2).unwrap();
        let mut overtaking = 0;
        while let Some(number) = sender.number(2).filter(|_| overtaking < 100) {
            assert!(sender.number(2).is_none(), "two have not ended");
            assert!(window.take(number));
            sender.ended(number);
            overtaking += 1;
        }
        assert_eq!((overtaking, window.take(held)), (63, true));
        sender.ended(held);
        assert!(sender.number(2).is_some_and(|number| window.take(number)));
    }

    #[test]
    fn messages_after_another_connection_are_not_taken_for_earlier_ones() {
        let (mut before, mut window) = (peer(), Window::default());
        let mut after = Peer { sent: 2 << 32, ..peer() };
        assert!((0..9).all(|_| before.number(16).is_some_and(|number| window.take(number))));
        assert!((0..9).all(|_| after.number(16).is_some_and(|number| window.take(number))));
        assert_eq!((before.sent, peer().sent), ((1 << 32) + 9, 1 << 32), "numbers are of a channel");
    }

    #[test]
    fn a_second_silence_is_doubted_and_what_is_lost_is_not_waited_for_twice() {
        let mut silent = peer();
        silent.answered(7, 3, 110, 10);
        silent.doubt(500);
        assert_eq!((silent.notices, silent.doubted_ns), (Notices::Missed, 0), "since the first silence");
        silent.notices = Notices::Behind(3);
        silent.give_up();
        (silent.notices, silent.question) = (Notices::Asked, 8);
        silent.answered(8, 3, 110, 10);
        assert_eq!(silent.notices, Notices::Known);
    }

    #[test]
    fn old_and_slow_answers_say_nothing() {
        let (mut old, mut slow) = (peer(), peer());
        old.answered(6, 0, 110, 10);
        slow.answered(7, 0, 111, 10);
        assert_eq!([old.notices, slow.notices], [Notices::Asked, Notices::Missed]);
    }
}
