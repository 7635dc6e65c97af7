//! Tests of the frames: round trips, fixed places, every truncation, and seeded random and damaged bytes.

use super::*;

const HEAD: Head = Head { key: 0x0102_0304_0506_0708, stamp_ns: 0x1112_1314_1516_1718 };

fn piece() -> Piece {
    Piece {
        number: 0x2122_2324_2526_2728,
        nic: 3,
        target: Place { region: RegionId(0x3132), offset: 0x4142_4344_4546_4748 },
        imm: ImmValue::from_bits(0x5152_5354),
        total: 1000,
        at: 700,
    }
}

fn encoded(frame: &Frame<'_>) -> Vec<u8> {
    let mut out = vec![9; 3];
    encode(&mut out, HEAD, frame);
    out
}

fn answers() -> Vec<Answer> {
    let verdicts = [Verdict::Taken, Verdict::Outside, Verdict::Unconnected, Verdict::Dropped];
    let answer = |(n, verdict)| Answer { number: n as u64 * 1000, stamp_ns: u64::MAX - n as u64, verdict };
    verdicts.into_iter().enumerate().map(answer).collect()
}

fn encoded_answers(answers: &[Answer]) -> Vec<u8> {
    let mut out = Vec::new();
    encode_answers(&mut out, HEAD, answers.iter());
    out
}

/// Frames of all kinds, and how short each may be cut before it is none.
pub(in crate::transport::network::sim::process) fn samples() -> Vec<(Vec<u8>, usize)> {
    let (rank, long) = (Rank(2047), vec![7; MAX_PIECE]);
    let hello = |token| Frame::Hello(Hello { rank, nics: 4, key: 99, token });
    let whole = Piece { total: MAX_PIECE as u32, at: 0, ..piece() };
    vec![
        (encoded(&hello(b"a token")), 24 + 16),
        (encoded(&hello(&[1; MAX_TOKEN])), 24 + 16),
        (encoded(&Frame::Write(piece(), &[8; 300])), 24 + 32 + 1),
        (encoded(&Frame::Write(whole, &long)), 24 + 32 + 1),
        (encoded(&Frame::Write(Piece { total: 0, at: 0, ..piece() }, &[])), 24 + 32),
        (encoded(&Frame::Message { number: 5, bytes: b"hello" }), 24 + 8),
        (encoded(&Frame::Message { number: 5, bytes: &[6; MAX_MESSAGE] }), 24 + 8),
        (encoded(&Frame::Notice(Notice::Revoke(RegionId(9)))), 24 + 4),
        (encoded(&Frame::Notice(Notice::LetGo(RegionId(9)))), 24 + 4),
        (encoded_answers(&answers()), 24 + 17),
        (encoded_answers(&vec![answers()[0]; MAX_ANSWERS]), 24 + 17),
    ]
}

/// xorshift64*, so that a failing case is replayed by its seed.
pub(in crate::transport::network::sim::process) struct Dice(pub(in crate::transport::network::sim::process) u64);

impl Dice {
    pub(in crate::transport::network::sim::process) fn roll(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    pub(in crate::transport::network::sim::process) fn below(&mut self, bound: usize) -> usize {
        (self.roll() % bound as u64) as usize
    }

    /// Changes a few bytes, cuts some off, or adds some.
    pub(in crate::transport::network::sim::process) fn damage(&mut self, bytes: &mut Vec<u8>) {
        for _ in 0..self.below(4) {
            let at = self.below(bytes.len());
            bytes[at] = [0, 0xFF, self.roll() as u8, bytes[at] ^ (1 << self.below(8))][self.below(4)];
        }
        match self.below(4) {
            0 => bytes.truncate(bytes.len() - self.below(bytes.len())),
            1 => bytes.extend((0..self.below(40)).map(|at| at as u8)),
            _ => {}
        }
    }
}

/// Encodes a decoded frame again: decoding must keep all its bytes.
fn again(bytes: &[u8]) -> Vec<u8> {
    let (head, frame) = decode(bytes).unwrap();
    let mut out = Vec::new();
    encode(&mut out, head, &frame);
    out
}

#[test]
fn a_field_lost_or_swapped_between_encode_and_decode() {
    for (bytes, _) in samples() {
        assert_eq!(again(&bytes), bytes);
        assert_eq!(decode(&bytes).unwrap().0, HEAD);
    }
    assert_eq!(decode(&encoded(&Frame::Write(piece(), &[8; 300]))).unwrap().1, Frame::Write(piece(), &[8; 300]));
    let bytes = encoded_answers(&answers());
    let Ok((_, Frame::Answers(found))) = decode(&bytes) else { panic!("answers that do not decode") };
    assert_eq!(found.iter().collect::<Vec<_>>(), answers());
}

#[test]
fn a_field_at_another_place_than_in_the_format() {
    let bytes = encoded(&Frame::Write(piece(), &[0xEE]));
    let fields: [&[u8]; 12] = [
        b"tySP",
        &[3, 0, 2, 0],
        &HEAD.key.to_le_bytes(),
        &HEAD.stamp_ns.to_le_bytes(),
        &[0x28, 0x27, 0x26, 0x25, 0x24, 0x23, 0x22, 0x21],
        &[0x48, 0x47, 0x46, 0x45, 0x44, 0x43, 0x42, 0x41],
        &[0x54, 0x53, 0x52, 0x51],
        &1000u32.to_le_bytes(),
        &700u32.to_le_bytes(),
        &[0x32, 0x31],
        &[3, 0],
        &[0xEE],
    ];
    assert_eq!(bytes, fields.concat());
    let hello = encoded(&Frame::Hello(Hello { rank: Rank(6), nics: 2, key: 5, token: b"t" }));
    assert_eq!(hello[24..], [6, 0, 0, 0, 2, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0, b't']);
    assert_eq!(hello[..8], *b"tySP\x03\x00\x01\x00");
    assert_eq!(encoded(&Frame::Notice(Notice::Revoke(RegionId(0x3132))))[24..], [0x32, 0x31, 1, 0]);
    assert_eq!(encoded(&Frame::Notice(Notice::LetGo(RegionId(0x3132))))[24..], [0x32, 0x31, 2, 0]);
}

#[test]
fn a_truncated_frame_taken_for_whole() {
    for (bytes, least) in samples() {
        for len in 0..bytes.len().min(least) {
            assert!(decode(&bytes[..len]).is_err(), "{len} of {} bytes", bytes.len());
        }
        // A cut frame decodes to fewer bytes of payload or answers, never to more than are left.
        for len in least..bytes.len() {
            assert!(decode(&bytes[..len]).is_err() || again(&bytes[..len]) == bytes[..len]);
        }
    }
    for cut in 1..17 {
        let bytes = encoded_answers(&answers());
        assert!(matches!(decode(&bytes[..bytes.len() - cut]), Err(Malformed::Length(_))));
    }
}

#[test]
fn a_frame_of_another_format_version_or_kind() {
    for (good, _) in samples() {
        let with = |at: usize, byte: u8| {
            let mut bytes = good.clone();
            bytes[at] = byte;
            decode(&bytes).map(drop)
        };
        assert_eq!(with(0, b'T'), Err(Malformed::Magic));
        assert_eq!(with(4, 1), Err(Malformed::Version(1)));
        assert_eq!(with(5, 1), Err(Malformed::Version(0x103)));
        assert_eq!(with(6, 0), Err(Malformed::Kind(0)));
        assert_eq!(with(6, 6), Err(Malformed::Kind(6)));
        assert_eq!(with(7, 1).map_err(|error| matches!(error, Malformed::Kind(_))), Err(true));
    }
}

#[test]
fn a_field_that_cannot_be() {
    let write = |piece: Piece, bytes: usize| decode(&encoded(&Frame::Write(piece, &vec![1; bytes]))).map(drop);
    assert_eq!(write(piece(), 300), Ok(()));
    let piece_field = Err(Malformed::Field("piece"));
    assert_eq!(write(piece(), 301), piece_field, "a payload longer than its write");
    assert_eq!(write(piece(), 0), piece_field, "a piece of nothing");
    assert_eq!(write(Piece { at: u32::MAX, total: u32::MAX, ..piece() }, 1), piece_field, "a sum that wraps");
    assert_eq!(write(Piece { at: 1, total: 0, ..piece() }, 0), piece_field, "a start behind the end");
    assert_eq!(
        write(Piece { at: 0, total: u32::MAX, ..piece() }, MAX_PIECE + 1),
        Err(Malformed::Length(MAX_FRAME + 1))
    );
    let notice = encoded(&Frame::Notice(Notice::LetGo(RegionId(9))));
    for (at, byte) in [(26, 0), (26, 3), (27, 1)] {
        let mut bent = notice.clone();
        bent[at] = byte;
        assert_eq!(decode(&bent).map(drop), Err(Malformed::Field("notice")), "byte {at}");
    }
    assert_eq!(decode(&[&notice[..], &[0]].concat()).map(drop), Err(Malformed::Length(1)));
    let mut bytes = encoded(&Frame::Write(piece(), &[1]));
    bytes[24 + 31] = 1;
    assert_eq!(decode(&bytes).map(drop), Err(Malformed::Field("zero")));
    let mut bytes = encoded_answers(&answers());
    bytes[24 + 3 * 17 + 16] = 4;
    assert_eq!(decode(&bytes).map(drop), Err(Malformed::Field("verdict")), "the last of four");
}

#[test]
fn a_length_beyond_its_bound() {
    let long = |frame: &Frame<'_>| matches!(decode(&encoded(frame)), Err(Malformed::Length(_)));
    let hello = |token| Frame::Hello(Hello { rank: Rank(0), nics: 1, key: 1, token });
    assert!(!long(&hello(&[0; MAX_TOKEN])) && long(&hello(&[0; MAX_TOKEN + 1])));
    let message = |bytes| Frame::Message { number: 1, bytes };
    assert!(!long(&message(&[0; MAX_MESSAGE])) && long(&message(&[0; MAX_MESSAGE + 1])));
    let many = vec![answers()[0]; MAX_ANSWERS + 1];
    assert_eq!(encoded_answers(&many).len(), 24 + 17 * MAX_ANSWERS, "more answers than a frame may have");
    let mut bytes = encoded_answers(&many);
    bytes.extend_from_within(24..24 + 17);
    assert!(matches!(decode(&bytes), Err(Malformed::Length(_))));
}

#[test]
fn a_panic_on_random_or_damaged_bytes() {
    let (samples, mut decoded) = (samples(), 0);
    for seed in 1..=400_000u64 {
        let mut dice = Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let mut bytes = samples[[0, 2, 4, 5, 7][dice.below(5)]].0.clone();
        if dice.below(8) == 0 {
            bytes = (0..dice.below(100)).map(|_| dice.roll() as u8).collect();
            bytes.splice(..bytes.len().min(8), samples[dice.below(samples.len())].0[..8].iter().copied());
        } else {
            dice.damage(&mut bytes);
        }
        if let Ok((_, frame)) = decode(&bytes) {
            decoded += 1;
            assert_eq!(again(&bytes), bytes, "seed {seed}: {frame:?}");
        }
    }
    assert!((100_000..300_000).contains(&decoded), "{decoded} of the damaged frames decode");
}
