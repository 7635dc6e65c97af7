//! How a broken connection is taken up again: what both of its sides know of each other.
//!
//! Place in the data path: beside it. A connection that works asks [`Resumption::may_post`] before posts; all else is
//! for those that broke. Nothing here waits, allocates, or knows of queue pairs, so that the tests can lose, double and
//! delay every report.
//!
//! A queue pair that breaks leaves its sender in the dark: a write that is not acknowledged may have arrived or not.
//! Its receiver knows, as it counts the immediates that it takes, and a reliable connection delivers in order: what it
//! took is how far the sender came. So both sides close the queue pair, report their counts, open it again with other
//! packet numbers, and post again from there: each write once.
//!
//! ```text
//!  side A, incarnation i                                  side B, incarnation i
//!  a completion with an error
//!  close: no packet is taken any more, count what was taken
//!  Closed(i), took 40 ──────────────────────────────────▶ close, count
//!       ◀────────────────────────────────────────────────  Closed(i), took 17
//!  the first 17 arrived; open i + 1                         the first 40 arrived; open i + 1
//!  Open(i + 1) ─────────────────────────────────────────▶ post the rest
//!  post the rest ◀──────────────────────────────────────── Open(i + 1)
//! ```
//!
//! Reports are datagrams: they may be lost, doubled, late. Each side repeats its own until it has no need of an answer,
//! and a report contains all that an earlier one did. One of an older incarnation is answered with what its sender
//! missed; one that cannot be is ignored.

/// What a side reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Report {
    pub incarnation: u32,
    /// Whether it has opened that incarnation and not closed it.
    pub open: bool,
    /// Whether it knows that the other side has opened that incarnation.
    pub confirmed: bool,
    /// What it has taken from the other side, in this incarnation and those before: all of it, once closed.
    pub taken: u64,
}

/// Where a side is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Open,
    /// Its queue pair takes nothing more; what it took is still being counted.
    Closing,
    Closed,
}

/// What to do behind a report. More than one may be due.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Due {
    /// Close the queue pair.
    pub close: bool,
    /// Answer with a report.
    pub answer: bool,
}

/// One side's knowledge of a connection.
#[derive(Debug, Clone)]
pub(super) struct Resumption {
    incarnation: u32,
    phase: Phase,
    /// The other side has opened this incarnation.
    confirmed: bool,
    taken: u64,
    /// What the other side took up to the close of this incarnation.
    count: Option<u64>,
    /// The other side has opened the incarnation behind this one.
    ahead: bool,
}

impl Resumption {
    /// A new connection, which both sides open before either posts.
    pub fn new() -> Resumption {
        Resumption { incarnation: 0, phase: Phase::Open, confirmed: true, taken: 0, count: None, ahead: false }
    }

    pub fn incarnation(&self) -> u32 {
        self.incarnation
    }

    pub fn is_open(&self) -> bool {
        self.phase == Phase::Open
    }

    pub fn is_closing(&self) -> bool {
        self.phase == Phase::Closing
    }

    /// Whether posts may go out, and the other side is open, too.
    pub fn may_post(&self) -> bool {
        self.phase == Phase::Open && self.confirmed
    }

    /// Takes an arrival; false if it is one of a closed queue pair, which the other side posts again.
    pub fn take(&mut self) -> bool {
        let counts = self.phase != Phase::Closed;
        self.taken += u64::from(counts);
        counts
    }

    /// The queue pair takes nothing more, and what it took is being counted.
    pub fn close(&mut self) {
        if self.phase == Phase::Open {
            self.phase = Phase::Closing;
        }
    }

    /// All that it took has been counted.
    pub fn closed(&mut self) {
        if self.phase == Phase::Closing {
            self.phase = Phase::Closed;
        }
    }

    /// What the other side has taken, once the queue pair can be opened again.
    pub fn ready(&self) -> Option<u64> {
        self.count.filter(|_| self.phase == Phase::Closed)
    }

    /// The queue pair is open again.
    pub fn opened(&mut self) {
        self.incarnation = self.incarnation.wrapping_add(1);
        self.phase = Phase::Open;
        self.confirmed = std::mem::take(&mut self.ahead);
        self.count = None;
    }

    /// What to report; nothing while it is being counted.
    pub fn report(&self) -> Option<Report> {
        let Resumption { incarnation, phase, confirmed, taken, .. } = *self;
        (phase != Phase::Closing).then_some(Report { incarnation, open: phase == Phase::Open, confirmed, taken })
    }

    /// Takes a report of the other side in.
    pub fn hear(&mut self, report: Report) -> Due {
        let steps = report.incarnation.wrapping_sub(self.incarnation);
        let mut due = Due::default();
        match steps {
            0 if report.open => {
                let open = self.phase == Phase::Open;
                self.confirmed |= open;
                due.answer = open && !report.confirmed;
            }
            0 => {
                due.close = self.phase == Phase::Open;
                self.close();
                self.count = Some(report.taken);
            }
            // It knows that this side has closed, and has taken nothing since, as this side has not opened.
            1 if self.phase == Phase::Closed => {
                self.count = Some(report.taken);
                // If it has closed again by now, its reports say so once this side has opened.
                self.ahead = report.open;
            }
            u32::MAX => due.answer = true,
            _ => {}
        }
        due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A side with what it sends, in order, and what it has in mind.
    struct Side {
        resumption: Resumption,
        /// Numbers that were not confirmed, the first of them being number `done`.
        posted: Vec<u64>,
        done: u64,
        next: u64,
        arrived: Vec<u64>,
    }

    struct Draw(u64);

    impl Draw {
        fn below(&mut self, bound: u64) -> u64 {
            self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (self.0 >> 33) % bound
        }
    }

    fn side() -> Side {
        Side { resumption: Resumption::new(), posted: Vec::new(), done: 0, next: 0, arrived: Vec::new() }
    }

    impl Side {
        fn open_again(&mut self) {
            if let Some(count) = self.resumption.ready() {
                self.confirm(count);
                self.resumption.opened();
            }
        }

        fn confirm(&mut self, count: u64) {
            assert!((self.done..=self.done + self.posted.len() as u64).contains(&count));
            self.posted.drain(..(count - self.done) as usize);
            self.done = count;
        }
    }

    /// Packets that are under way from a side in an incarnation, in order.
    type Wire = std::collections::VecDeque<(u32, u64)>;

    #[test]
    fn everything_arrives_once_and_in_order_however_reports_and_connections_fare() {
        for seed in 0..2000 {
            let mut draw = Draw(seed);
            let mut sides = [side(), side()];
            let mut wires = [Wire::new(), Wire::new()];
            let mut reports: Vec<(usize, Report)> = Vec::new();
            let mut breaks = 0;
            for step in 0..6000 {
                let at = draw.below(2) as usize;
                let disturbed = step < 4000;
                match draw.below(8) {
                    // Posts: all that is not under way in this incarnation.
                    0 | 1 => {
                        let Side { resumption, posted, next, .. } = &mut sides[at];
                        if resumption.may_post() {
                            if *next < 60 {
                                posted.push(*next);
                                *next += 1;
                            }
                            let incarnation = resumption.incarnation();
                            let under_way = wires[at].iter().filter(|(of, _)| *of == incarnation).count();
                            wires[at].extend(posted.iter().skip(under_way).map(|number| (incarnation, *number)));
                        }
                    }
                    // A packet arrives, is lost with its connection, or is acknowledged.
                    2 | 3 => {
                        let other = 1 - at;
                        if let Some((incarnation, number)) = wires[at].pop_front() {
                            let fits = sides[other].resumption.incarnation() == incarnation;
                            if fits && sides[other].resumption.take() {
                                sides[other].arrived.push(number);
                                let sender = &mut sides[at];
                                if (!disturbed || draw.below(3) > 0) && sender.resumption.incarnation() == incarnation {
                                    let done = sender.done + 1;
                                    let acknowledged = sender.posted.first() == Some(&number);
                                    if acknowledged {
                                        sender.confirm(done);
                                    } else {
                                        wires[at].clear();
                                        sender.resumption.close();
                                    }
                                } else {
                                    wires[at].clear();
                                    sender.resumption.close();
                                }
                            }
                        }
                    }
                    4 if disturbed && draw.below(20) == 0 => {
                        sides[at].resumption.close();
                        wires[at].clear();
                        breaks += 1;
                    }
                    5 => sides[at].resumption.closed(),
                    6 => {
                        sides[at].open_again();
                        let report = sides[at].resumption.report().filter(|_| !sides[at].resumption.may_post());
                        reports.extend(report.map(|report| (1 - at, report)));
                    }
                    _ => {
                        // Any report that was ever sent may come, or come again.
                        if !reports.is_empty() {
                            let old = disturbed && draw.below(4) == 0;
                            let last = draw.below(if old { reports.len() as u64 } else { 4 }) as usize;
                            let which = (reports.len() - 1).saturating_sub(last);
                            let (to, report) = reports[which];
                            let due = sides[to].resumption.hear(report);
                            if due.close {
                                wires[to].clear();
                            }
                            let answer = sides[to].resumption.report().filter(|_| due.answer);
                            reports.extend(answer.map(|report| (1 - to, report)));
                        }
                    }
                }
            }
            for (at, side) in sides.iter().enumerate() {
                let sent = sides[1 - at].next;
                assert!(
                    side.arrived.iter().copied().eq(0..side.arrived.len() as u64),
                    "seed {seed}: {:?}",
                    side.arrived
                );
                assert_eq!((side.arrived.len() as u64, sent), (60, 60), "seed {seed}, {breaks} breaks");
            }
        }
    }

    #[test]
    fn a_late_report_of_an_older_incarnation_is_answered_and_believed_by_nobody() {
        let (mut a, mut b) = (Resumption::new(), Resumption::new());
        assert!(b.take() && b.take());
        a.close();
        a.closed();
        let late = a.report().unwrap();
        assert_eq!(b.hear(late), Due { close: true, answer: false });
        b.closed();
        assert_eq!((b.ready(), a.ready()), (Some(0), None));
        b.opened();
        assert!(!b.may_post(), "the other side may not be open yet");
        assert_eq!(a.hear(b.report().unwrap()), Due::default());
        assert_eq!(a.ready(), Some(2), "from the incarnation that it missed");
        a.opened();
        assert!(a.may_post());
        assert_eq!(b.hear(a.report().unwrap()), Due::default());
        assert!(b.may_post() && b.is_open());
        assert_eq!(b.hear(late), Due { close: false, answer: true });
        assert!(b.may_post() && b.ready().is_none());
        let absurd = Report { incarnation: 7, open: false, confirmed: false, taken: 99 };
        assert_eq!((b.hear(absurd), a.hear(absurd)), (Due::default(), Due::default()));
        assert!(a.may_post() && b.may_post());
    }
}
