//! Tests of the bootstrap codec: round trips, every truncation, and seeded random bytes.

use super::*;

fn terms() -> Terms {
    Terms { generation: 9, members: "0-7".into(), nodes: "4,4".into() }
}

fn samples() -> Vec<Message> {
    vec![
        Message::Hello { nonce: [7; NONCE], own_host: true },
        Message::Hello { nonce: [8; NONCE], own_host: false },
        Message::Challenge { nonce: [9; NONCE] },
        Message::Join { proof: [1; NONCE], rank: 3, world: 8, host: "node-3".into(), terms: terms() },
        Message::Join { proof: [2; NONCE], rank: 0, world: 1, host: String::new(), terms: Terms::default() },
        Message::Accept { proof: [3; NONCE] },
        Message::Fail { what: "it broke".into(), advice: "mend it, à la carte".into() },
        Message::Progress { absent: 40, first: vec![1, 2, 9] },
        Message::Welcome { hosts: vec![String::new(), "10.0.0.2".into(), "fe80::1".into()] },
        Message::Welcome { hosts: Vec::new() },
        Message::Gather { seq: 7, what: "plan".into(), payload: vec![1, 2, 3] },
        Message::Gathered { seq: u64::MAX, payloads: vec![vec![], vec![5; 300], vec![0]] },
        Message::GiveUp { seq: 1, waited_ms: 30_000 },
        Message::Lost { rank: 5 },
        Message::Left { rank: 6 },
        Message::Goodbye,
    ]
}

/// xorshift64*, so that a failing case is replayed by its seed.
struct Dice(u64);

impl Dice {
    fn roll(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.roll() % bound as u64) as usize
    }
}

fn only_frame(bytes: &[u8]) -> Frame {
    let mut reader = FrameReader::new(MAX_BODY);
    reader.push(bytes);
    reader.next_frame().unwrap().unwrap()
}

#[test]
fn a_field_lost_or_swapped_between_encode_and_decode() {
    for message in samples() {
        assert_eq!(decode(&only_frame(&encode(&message).unwrap())).unwrap(), message);
    }
}

#[test]
fn frames_torn_or_joined_by_tcp() {
    let all: Vec<u8> = samples().iter().flat_map(|m| encode(m).unwrap()).collect();
    for step in [1, 2, 3, 7, 11, 12, 13, 64, all.len()] {
        let mut reader = FrameReader::new(MAX_BODY);
        let mut seen = Vec::new();
        for piece in all.chunks(step) {
            reader.push(piece);
            while let Some(frame) = reader.next_frame().unwrap() {
                seen.push(decode(&frame).unwrap());
            }
        }
        assert_eq!(seen, samples(), "in pieces of {step} bytes");
    }
}

#[test]
fn small_frames_that_cost_the_square_of_their_number() {
    let goodbye = encode(&Message::Goodbye).unwrap();
    let mut reader = FrameReader::new(MAX_HELLO_BODY);
    reader.push(&goodbye.repeat(400_000));
    let start = std::time::Instant::now();
    for number in 0..400_000 {
        assert_eq!(reader.next_frame().unwrap().map(|frame| frame.kind), Some(10), "frame {number}");
        // Moving all later bytes once per frame would take a quarter of a minute.
        assert!(start.elapsed() < std::time::Duration::from_secs(2), "only {number} frames after 2 s");
    }
    assert_eq!((reader.next_frame(), reader.held()), (Ok(None), 0));
    reader.push(&goodbye);
    assert_eq!(reader.next_frame().unwrap().map(|frame| frame.kind), Some(10), "what was taken is not what came");
}

#[test]
fn a_truncated_or_padded_body_taken_for_whole() {
    for message in samples() {
        let frame = only_frame(&encode(&message).unwrap());
        for cut in 0..frame.body.len() {
            let short = Frame { body: frame.body[..cut].to_vec(), ..frame.clone() };
            assert!(decode(&short).is_err(), "{message:?} cut to {cut} bytes");
        }
        let mut long = frame.clone();
        long.body.push(0);
        assert!(decode(&long).is_err(), "{message:?} with a byte more");
    }
}

#[test]
fn a_huge_length_or_count_allocated_before_it_is_checked() {
    let mut reader = FrameReader::new(MAX_HELLO_BODY);
    let mut bytes = encode(&Message::Goodbye).unwrap();
    bytes[8..12].copy_from_slice(&u32::MAX.to_le_bytes());
    reader.push(&bytes);
    assert_eq!(reader.next_frame(), Err(Malformed::Length { announced: u32::MAX as usize, limit: MAX_HELLO_BODY }));
    for kind in [3u16, 4, 6] {
        let mut body = vec![0; 8];
        body[..4].copy_from_slice(&1u32.to_le_bytes());
        body.extend_from_slice(&[0xff; 4]);
        assert!(decode(&Frame { version: VERSION, kind, body }).is_err());
    }
}

#[test]
fn a_foreign_stream_recognised_only_after_twelve_bytes() {
    let mut reader = FrameReader::new(MAX_BODY);
    reader.push(b"GE");
    assert_eq!(reader.next_frame(), Err(Malformed::Magic));
}

#[test]
fn an_overlong_text_cut_inside_a_character() {
    let message = Message::Fail { what: "é".repeat(MAX_TEXT), advice: "x".repeat(70_000) };
    let Message::Fail { what, advice } = decode(&only_frame(&encode(&message).unwrap())).unwrap() else {
        panic!("another kind");
    };
    assert_eq!((what.len(), advice.len()), (MAX_TEXT, MAX_TEXT));
}

#[test]
fn a_body_beyond_the_limit_sent_and_then_refused_by_the_receiver() {
    let message = Message::Gathered { seq: 0, payloads: vec![vec![0; MAX_BODY / 2]; 2] };
    assert!(matches!(encode(&message), Err(Malformed::Length { .. })));
}

#[test]
fn a_panic_on_random_bytes() {
    for seed in 1..=3000u64 {
        let mut dice = Dice(seed);
        let body: Vec<u8> = (0..dice.below(64)).map(|_| dice.roll() as u8).collect();
        let frame = Frame { version: VERSION, kind: dice.below(15) as u16, body };
        let _ = decode(&frame);
        let _ = (hello_nonce(&frame.body), first_bytes(&frame.body));
        let mut reader = FrameReader::new(MAX_HELLO_BODY);
        reader.push(&frame.body);
        let _ = reader.next_frame();
    }
}

#[test]
fn a_panic_on_damaged_frames() {
    for seed in 1..=5000u64 {
        let mut dice = Dice(seed);
        let messages = samples();
        let mut bytes = encode(&messages[dice.below(messages.len())]).unwrap();
        for _ in 0..=dice.below(3) {
            let at = dice.below(bytes.len());
            bytes[at] = dice.roll() as u8;
        }
        bytes.truncate(bytes.len() - dice.below(3));
        let mut reader = FrameReader::new(MAX_HELLO_BODY);
        reader.push(&bytes);
        if let Ok(Some(frame)) = reader.next_frame() {
            let _ = decode(&frame);
        }
    }
}
