//! What a completion is of, in the number that a request or receive gives to the device.
//!
//! Place in the data path: between a request and its completion.

/// What a completion is of: kept in the number that the device returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mark {
    /// A request of a connection: which opening of its queue pair, and its place in the sequence.
    Request {
        opening: u32,
        sequence: u64,
    },
    Immediate,
    /// A message, in that place.
    Message(u32),
    /// A report that was sent from that place.
    SentReport(u32),
    /// A report that came to that place.
    Report(u32),
    /// The read of a flush.
    Flush,
}

const KIND: u32 = 61;
const OPENING: u32 = 48;
/// The highest number of an opening.
pub(super) const OPENINGS: u32 = (1 << (KIND - OPENING)) - 1;

impl Mark {
    pub fn encode(self) -> u64 {
        let of = |kind: u64, number: u32| kind << KIND | u64::from(number);
        match self {
            Mark::Request { opening, sequence } => {
                u64::from(opening & OPENINGS) << OPENING | sequence & ((1 << OPENING) - 1)
            }
            Mark::Immediate => of(1, 0),
            Mark::Message(place) => of(2, place),
            Mark::SentReport(place) => of(3, place),
            Mark::Report(place) => of(4, place),
            Mark::Flush => of(5, 0),
        }
    }

    pub fn decode(number: u64) -> Option<Mark> {
        let place = number as u32;
        Some(match number >> KIND {
            0 => {
                let opening = (number >> OPENING) as u32;
                Mark::Request { opening, sequence: number & ((1 << OPENING) - 1) }
            }
            1 => Mark::Immediate,
            2 => Mark::Message(place),
            3 => Mark::SentReport(place),
            4 => Mark::Report(place),
            5 => Mark::Flush,
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_survive_the_device() {
        let far = Mark::Request { opening: OPENINGS, sequence: (1 << 48) - 1 };
        let near = Mark::Request { opening: 0, sequence: 0 };
        let places = [Mark::Message(7), Mark::SentReport(63), Mark::Report(u32::MAX)];
        let marks = [far, near, Mark::Immediate, Mark::Flush, places[0], places[1], places[2]];
        assert_eq!(marks.map(|mark| Mark::decode(mark.encode())), marks.map(Some));
        assert_eq!([6, 7].map(|kind| Mark::decode(kind << KIND)), [None; 2]);
    }
}
