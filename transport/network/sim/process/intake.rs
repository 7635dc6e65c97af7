//! How fast one NIC takes in packets.
//!
//! Place in the data path: at the receiver, between a packet's arrival and its placement. Pure arithmetic.
//!
//! Packets arrive at their stamps' times, but are seen when the endpoint is polled. A sender that was held up brings
//! packets that arrived before packets seen already. Late packets use the NIC's idle time of then, so that a link is as
//! fast on a busy machine as on an idle one.

use std::collections::VecDeque;

/// Most idle times kept; the oldest are dropped.
const MAX_GAPS: usize = 64;

#[derive(Debug, Default, Clone)]
pub(super) struct Intake {
    /// When it has taken in all packets seen so far, in picoseconds.
    until_ps: u64,
    /// When it was idle before that: from, and to; the earliest first.
    gaps: VecDeque<(u64, u64)>,
}

impl Intake {
    /// When a packet has been taken in that takes `needed_ps`, and whose last byte arrives at `at_ps`.
    pub(super) fn take(&mut self, at_ps: u64, needed_ps: u64) -> u64 {
        if needed_ps == 0 {
            return at_ps;
        }
        // An idle NIC takes a packet in while it arrives: only its last byte is left then.
        let end_after = |from_ps: u64| from_ps.saturating_add(needed_ps).max(at_ps);
        let fits = |(from_ps, to_ps): &(u64, u64)| end_after(*from_ps) <= *to_ps;
        if let Some(place) = self.gaps.iter().position(fits) {
            let (from_ps, to_ps) = self.gaps[place];
            let end_ps = end_after(from_ps);
            self.gaps[place] = (from_ps, end_ps - needed_ps);
            self.remember(place + 1, (end_ps, to_ps));
            return end_ps;
        }
        let end_ps = end_after(self.until_ps);
        self.remember(self.gaps.len(), (self.until_ps, end_ps - needed_ps));
        self.until_ps = end_ps;
        end_ps
    }

    fn remember(&mut self, place: usize, gap: (u64, u64)) {
        if gap.0 < gap.1 {
            self.gaps.insert(place, gap);
        }
        if self.gaps.len() > MAX_GAPS {
            self.gaps.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::frame::tests::Dice;
    use super::*;

    /// Arrivals in order, and what each takes.
    fn packets(dice: &mut Dice) -> Vec<(u64, u64)> {
        let mut at_ps = 1000;
        let packet = |_| {
            at_ps += dice.below(200) as u64;
            (at_ps, 50 + dice.below(100) as u64)
        };
        (0..40).map(packet).collect()
    }

    #[test]
    fn two_packets_taken_in_at_once_or_before_they_arrive() {
        for seed in 1..500 {
            let mut dice = Dice(seed);
            let in_order = packets(&mut dice);
            let mut intake = Intake::default();
            let mut until = 0;
            for (at, needed) in &in_order {
                until = (until + needed).max(*at);
                assert_eq!(intake.take(*at, *needed), until, "seed {seed}, in order");
            }
            let mut seen = in_order.clone();
            (1..seen.len()).rev().for_each(|last| seen.swap(last, dice.below(last + 1)));
            let mut intake = Intake::default();
            let mut busy: Vec<(u64, u64)> = Vec::new();
            for (at, needed) in &seen {
                let end = intake.take(*at, *needed);
                assert!(end >= *at, "seed {seed}");
                busy.push((end - needed, end));
            }
            busy.sort();
            assert!(busy.windows(2).all(|pair| pair[0].1 <= pair[1].0), "seed {seed}: {busy:?}");
            // Time is lost only in pieces that are too short for any packet.
            let last = busy.last().map_or(0, |(_, end)| *end);
            assert!(last <= until + 40 * 150 / 2, "seed {seed}: {last}, not {until}");
        }
    }

    #[test]
    fn an_idle_time_used_twice() {
        let mut intake = Intake::default();
        assert_eq!(intake.take(1000, 10), 1000);
        assert_eq!(intake.take(500, 10), 500);
        assert_eq!(intake.take(500, 10), 510);
        assert_eq!(intake.take(495, 490), 1490, "no room for it before the first");
        assert_eq!(intake.take(2, 0), 2);
    }
}
