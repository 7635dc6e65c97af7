//! The immediate: the 32 bits that arrive with a write and describe it.
//!
//! Place in the data path: the proxy of the sender encodes one for every write it posts; the proxy of the receiver
//! decodes and counts them. Runs on any thread. Pure arithmetic: it never allocates except for the text of an error,
//! and decoding never fails on any 32 bits but returns `None` for a kind that does not exist.
//!
//! ```text
//!   31 30 29 28 27 26 25 24 23 22 21 20 19 18 17 16 15 14 13 12 11 10 09 08 07 06 05 04 03 02 01 00
//!  +-----+-----+--------+-----+--------------------------------+-----------------------------+-----+
//!  | gen | ctx |  kind  |epoch|          source rank           |            chunk            | nic |
//!  +-----+-----+--------+-----+--------------------------------+-----------------------------+-----+
//!  | gen | ctx | 4: user|                                 payload                                  |
//!  +-----+-----+--------+--------------------------------------------------------------------------+
//!     2     2      3       2                 11                               10                2
//! ```
//!
//! Generation and epoch are their low two bits. A receiver only has to distinguish an epoch from the two around it, and
//! an immediate of a closed generation from one of the present.

use crate::base::{Error, Rank, Result};
use std::fmt;

/// The position of a field.
#[derive(Clone, Copy)]
struct Field {
    shift: u32,
    width: u32,
}

impl Field {
    const fn max(self) -> u32 {
        (1 << self.width) - 1
    }

    const fn mask(self) -> u32 {
        self.max() << self.shift
    }

    const fn of(self, bits: u32) -> u32 {
        (bits >> self.shift) & self.max()
    }

    const fn put(self, value: u32) -> u32 {
        (value & self.max()) << self.shift
    }
}

const NIC: Field = Field { shift: 0, width: 2 };
const CHUNK: Field = Field { shift: 2, width: 10 };
const SOURCE: Field = Field { shift: 12, width: 11 };
const EPOCH: Field = Field { shift: 23, width: 2 };
const KIND: Field = Field { shift: 25, width: 3 };
const CONTEXT: Field = Field { shift: 28, width: 2 };
const GENERATION: Field = Field { shift: 30, width: 2 };
/// The user kind's own bits: everything below the kind.
const PAYLOAD: Field = Field { shift: 0, width: 25 };

/// Fields from the lowest: each begins where the one below ends, and together they are the 32 bits.
const RULER: [Field; 7] = [NIC, CHUNK, SOURCE, EPOCH, KIND, CONTEXT, GENERATION];

const _: () = {
    let (mut at, mut next, mut seen) = (0, 0, 0u32);
    while at < RULER.len() {
        assert!(RULER[at].shift == next, "fields leave a gap or overlap");
        assert!(seen & RULER[at].mask() == 0, "fields share a bit");
        seen |= RULER[at].mask();
        next += RULER[at].width;
        at += 1;
    }
    assert!(next == 32 && seen == u32::MAX, "fields do not make up 32 bits");
    assert!(PAYLOAD.shift + PAYLOAD.width == KIND.shift, "the user's bits do not end at the kind");
    assert!(PAYLOAD.mask() == NIC.mask() | CHUNK.mask() | SOURCE.mask() | EPOCH.mask());
    assert!(size_of::<ImmValue>() == 4);
};

/// Most ranks of a world of several nodes: what `source rank` can name.
pub const MAX_RANKS: usize = SOURCE.max() as usize + 1;
/// Most chunks one source sends in one epoch.
pub const MAX_CHUNKS: usize = CHUNK.max() as usize + 1;
/// Most NICs of one rank.
pub const MAX_NICS: usize = NIC.max() as usize + 1;
/// Most contexts that share one endpoint.
pub const MAX_CONTEXTS: usize = CONTEXT.max() as usize + 1;
/// Values of the user kind: every `u32` below this one.
pub const USER_VALUES: u32 = PAYLOAD.max() + 1;

/// The purpose of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Kind {
    /// Routing metadata, and rows, on their way to the experts.
    Dispatch = 0,
    /// Partial sums on their way back.
    Combine = 1,
    /// Weights that are sent ahead of combine.
    Weights = 2,
    /// The proxies' own.
    Control = 3,
    /// The transfer API's: 25 bits of its own.
    User = 4,
    /// A rank's node has reached a barrier.
    Barrier = 5,
}

impl Kind {
    const fn from_bits(bits: u32) -> Option<Kind> {
        match bits {
            0 => Some(Kind::Dispatch),
            1 => Some(Kind::Combine),
            2 => Some(Kind::Weights),
            3 => Some(Kind::Control),
            4 => Some(Kind::User),
            5 => Some(Kind::Barrier),
            _ => None,
        }
    }
}

/// The low bits of an epoch that an immediate carries.
pub const fn epoch_bits(epoch: u32) -> u8 {
    (epoch & EPOCH.max()) as u8
}

/// The low bits of a generation that an immediate carries.
pub const fn generation_bits(generation: u32) -> u8 {
    (generation & GENERATION.max()) as u8
}

/// The fields of an immediate of the library's own kinds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ImmFields {
    /// Low bits of the generation; see [`generation_bits`].
    pub generation: u8,
    /// Which of the endpoint's contexts.
    pub context: u8,
    /// The purpose of the write; not [`Kind::User`].
    pub kind: Kind,
    /// Low bits of the epoch; see [`epoch_bits`].
    pub epoch: u8,
    /// The rank that wrote.
    pub source: Rank,
    /// Which chunk of that rank's epoch.
    pub chunk: u16,
    /// Which NIC's shard of that chunk.
    pub nic: u8,
}

/// The fields of an immediate of any kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Decoded {
    /// One of the library's own kinds.
    Own(ImmFields),
    /// The user kind.
    User {
        /// Low bits of the generation.
        generation: u8,
        /// Which of the endpoint's contexts.
        context: u8,
        /// The user's 25 bits.
        payload: u32,
    },
}

/// An immediate. Any 32 bits can arrive, so any 32 bits are a value; not all of them decode.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(transparent)]
pub struct ImmValue(u32);

impl ImmValue {
    /// Encodes fields of the library's own kinds.
    ///
    /// # Errors
    /// `Config`, naming the first field that does not fit.
    pub fn new(fields: &ImmFields) -> Result<ImmValue> {
        if fields.kind == Kind::User {
            return Err(overflow("kind", "user".into(), "build user immediates with ImmValue::user".into()));
        }
        let bits = place(GENERATION, "generation", u32::from(fields.generation))?
            | place(CONTEXT, "context", u32::from(fields.context))?
            | place(KIND, "kind", fields.kind as u32)?
            | place(EPOCH, "epoch", u32::from(fields.epoch))?
            | place(SOURCE, "source rank", fields.source.0)?
            | place(CHUNK, "chunk", u32::from(fields.chunk))?
            | place(NIC, "nic", u32::from(fields.nic))?;
        Ok(ImmValue(bits))
    }

    /// Encodes 25 bits of the transfer API.
    ///
    /// # Errors
    /// `Config`, naming the first field that does not fit.
    pub fn user(generation: u8, context: u8, payload: u32) -> Result<ImmValue> {
        let bits = place(GENERATION, "generation", u32::from(generation))?
            | place(CONTEXT, "context", u32::from(context))?
            | place(KIND, "kind", Kind::User as u32)?
            | place(PAYLOAD, "user payload", payload)?;
        Ok(ImmValue(bits))
    }

    /// As it came off the wire.
    pub const fn from_bits(bits: u32) -> ImmValue {
        ImmValue(bits)
    }

    /// As it goes onto the wire.
    pub const fn bits(self) -> u32 {
        self.0
    }

    /// Low bits of the generation. Generation, context and kind mean the same in every immediate, so that an
    /// immediate of another generation can be dropped before its other fields are read.
    pub const fn generation(self) -> u8 {
        GENERATION.of(self.0) as u8
    }

    /// Which of the endpoint's contexts.
    pub const fn context(self) -> u8 {
        CONTEXT.of(self.0) as u8
    }

    /// The kind; `None` for bits that mean none.
    pub const fn kind(self) -> Option<Kind> {
        Kind::from_bits(KIND.of(self.0))
    }

    /// All its fields; `None` if its kind does not exist.
    pub const fn decode(self) -> Option<Decoded> {
        let (generation, context) = (self.generation(), self.context());
        match self.kind() {
            None => None,
            Some(Kind::User) => Some(Decoded::User { generation, context, payload: PAYLOAD.of(self.0) }),
            Some(kind) => Some(Decoded::Own(ImmFields {
                generation,
                context,
                kind,
                epoch: EPOCH.of(self.0) as u8,
                source: Rank(SOURCE.of(self.0)),
                chunk: CHUNK.of(self.0) as u16,
                nic: NIC.of(self.0) as u8,
            })),
        }
    }
}

impl fmt::Debug for ImmValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ImmValue({:#010x}", self.0)?;
        match self.decode() {
            Some(Decoded::Own(fields)) => write!(f, ", {fields:?})"),
            Some(user) => write!(f, ", {user:?})"),
            None => write!(f, ", no such kind)"),
        }
    }
}

/// Refuses at construction what immediates could not name later; every number is a count.
///
/// # Errors
/// `Config`, naming the first count that does not fit.
pub fn check_counts(ranks: usize, chunks: usize, nics: usize, contexts: usize) -> Result<()> {
    let counts = [
        ("ranks", ranks, MAX_RANKS, "split the job into smaller worlds"),
        ("chunks", chunks, MAX_CHUNKS, "use larger chunks, or fewer tokens a call"),
        ("nics", nics, MAX_NICS, "use fewer NICs a rank"),
        ("contexts", contexts, MAX_CONTEXTS, "share contexts between layers"),
    ];
    match counts.into_iter().find(|(_, count, most, _)| count > most) {
        None => Ok(()),
        Some((name, count, most, advice)) => {
            Err(overflow(name, count.to_string(), format!("an immediate can name {most}; {advice}")))
        }
    }
}

fn place(field: Field, name: &'static str, value: u32) -> Result<u32> {
    if value <= field.max() {
        return Ok(field.put(value));
    }
    let advice = format!("an immediate has {} bits for it; keep it at most {}", field.width, field.max());
    Err(overflow(name, value.to_string(), advice))
}

#[cold]
fn overflow(name: &'static str, value: String, advice: String) -> Error {
    Error::config(name, value, advice)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A seeded generator (splitmix64), so that a failing case can be replayed.
    struct Draw(u64);

    impl Draw {
        fn below(&mut self, bound: u32) -> u32 {
            self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut z = self.0;
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            ((((z ^ (z >> 31)) >> 32) * u64::from(bound)) >> 32) as u32
        }

        /// Uniform, but often at an end of the range, where shifts and masks go wrong.
        fn edge(&mut self, max: u32) -> u32 {
            match self.below(4) {
                0 => 0,
                1 => max,
                _ => self.below(max + 1),
            }
        }

        fn fields(&mut self) -> ImmFields {
            let kinds = [Kind::Dispatch, Kind::Combine, Kind::Weights, Kind::Control];
            ImmFields {
                generation: self.edge(3) as u8,
                context: self.edge(3) as u8,
                kind: kinds[self.below(4) as usize],
                epoch: self.edge(3) as u8,
                source: Rank(self.edge(2047)),
                chunk: self.edge(1023) as u16,
                nic: self.edge(3) as u8,
            }
        }
    }

    fn refusal(result: Result<ImmValue>) -> &'static str {
        match result.unwrap_err() {
            Error::Config { name, .. } => name,
            other => panic!("{other}"),
        }
    }

    #[test]
    fn a_field_lost_or_mixed_with_its_neighbour() {
        let mut draw = Draw(1);
        for _ in 0..200_000 {
            let fields = draw.fields();
            let imm = ImmValue::new(&fields).unwrap();
            assert_eq!(imm.decode(), Some(Decoded::Own(fields)), "{imm:?}");
            assert_eq!(ImmValue::from_bits(imm.bits()), imm);
            assert_eq!(
                (imm.generation(), imm.context(), imm.kind()),
                (fields.generation, fields.context, Some(fields.kind))
            );
        }
    }

    #[test]
    fn a_field_at_another_place_than_in_the_format() {
        let zero =
            ImmFields { generation: 0, context: 0, kind: Kind::Dispatch, epoch: 0, source: Rank(0), chunk: 0, nic: 0 };
        let bits = |fields: ImmFields| ImmValue::new(&fields).unwrap().bits();
        assert_eq!(bits(zero), 0);
        assert_eq!(bits(ImmFields { generation: 3, ..zero }), 3 << 30);
        assert_eq!(bits(ImmFields { context: 3, ..zero }), 3 << 28);
        assert_eq!(bits(ImmFields { kind: Kind::Control, ..zero }), 3 << 25);
        assert_eq!(bits(ImmFields { epoch: 3, ..zero }), 3 << 23);
        assert_eq!(bits(ImmFields { source: Rank(2047), ..zero }), 2047 << 12);
        assert_eq!(bits(ImmFields { chunk: 1023, ..zero }), 1023 << 2);
        assert_eq!(bits(ImmFields { nic: 3, ..zero }), 3);
        assert_eq!(ImmValue::user(0, 0, (1 << 25) - 1).unwrap().bits(), (4 << 25) | ((1 << 25) - 1));
    }

    #[test]
    fn user_bits_that_reach_into_the_kind() {
        let mut draw = Draw(2);
        for _ in 0..100_000 {
            let (generation, context) = (draw.edge(3) as u8, draw.edge(3) as u8);
            let payload = draw.edge(USER_VALUES - 1);
            let imm = ImmValue::user(generation, context, payload).unwrap();
            assert_eq!(imm.decode(), Some(Decoded::User { generation, context, payload }), "{imm:?}");
        }
        assert_eq!(refusal(ImmValue::user(0, 0, USER_VALUES)), "user payload");
        assert_eq!(refusal(ImmValue::user(4, 0, 0)), "generation");
        assert_eq!(refusal(ImmValue::user(0, 4, 0)), "context");
    }

    #[test]
    fn a_value_too_large_that_is_cut_in_silence() {
        let mut draw = Draw(3);
        for _ in 0..20_000 {
            let good = draw.fields();
            let over = |draw: &mut Draw, max: u32, limit: u32| max + 1 + draw.below(limit - max);
            let cases = [
                ("generation", ImmFields { generation: over(&mut draw, 3, 255) as u8, ..good }),
                ("context", ImmFields { context: over(&mut draw, 3, 255) as u8, ..good }),
                ("kind", ImmFields { kind: Kind::User, ..good }),
                ("epoch", ImmFields { epoch: over(&mut draw, 3, 255) as u8, ..good }),
                ("source rank", ImmFields { source: Rank(over(&mut draw, 2047, u32::MAX)), ..good }),
                ("chunk", ImmFields { chunk: over(&mut draw, 1023, 65535) as u16, ..good }),
                ("nic", ImmFields { nic: over(&mut draw, 3, 255) as u8, ..good }),
            ];
            for (name, fields) in cases {
                assert_eq!(refusal(ImmValue::new(&fields)), name, "{fields:?}");
            }
        }
    }

    #[test]
    fn bits_from_the_wire_that_panic_or_decode_to_another_value() {
        let mut draw = Draw(4);
        for _ in 0..200_000 {
            let imm = ImmValue::from_bits(draw.below(u32::MAX));
            let again = match imm.decode() {
                Some(Decoded::Own(fields)) => ImmValue::new(&fields).unwrap(),
                Some(Decoded::User { generation, context, payload }) => {
                    ImmValue::user(generation, context, payload).unwrap()
                }
                None => {
                    assert!((imm.bits() >> 25) & 7 > 4, "{imm:?}");
                    assert!(format!("{imm:?}").contains("no such kind"));
                    continue;
                }
            };
            assert_eq!(again, imm);
        }
    }

    #[test]
    fn counts_beyond_the_fields_found_only_when_they_overflow() {
        assert_eq!(check_counts(2048, 1024, 4, 4), Ok(()));
        for (counts, name) in [
            ((2049, 1, 1, 1), "ranks"),
            ((1, 1025, 1, 1), "chunks"),
            ((1, 1, 5, 1), "nics"),
            ((1, 1, 1, 5), "contexts"),
        ] {
            let error = check_counts(counts.0, counts.1, counts.2, counts.3).unwrap_err();
            assert!(matches!(&error, Error::Config { name: found, .. } if *found == name), "{error}");
        }
    }

    #[test]
    fn epochs_that_do_not_wrap_with_their_field() {
        assert_eq!((epoch_bits(u32::MAX), epoch_bits(u32::MAX.wrapping_add(1)), epoch_bits(6)), (3, 0, 2));
        assert_eq!((generation_bits(4), generation_bits(7)), (0, 3));
    }
}
