//! What each thread must have written about itself, its warp, its block and the grid.

use super::{BLOCK, THREADS};

pub const WORDS: usize = 39;
const WARP: u32 = 32;

/// A number of bytes of the input, little end first, as the unaligned loads of a thread see them.
fn load(input: &[u8; 64], bytes: u32, t: u32) -> u64 {
    let from = (bytes * t % 64) as usize;
    (0..bytes as usize).map(|i| u64::from(input[from + i]) << (8 * i)).sum()
}

/// Words of thread `t` of the grid; `None` where any schedule may put another number.
fn expected(t: u32, input: &[u8; 64]) -> [Option<u32>; WORDS] {
    let (block, thread) = (t / BLOCK, t % BLOCK);
    let (warp, lane) = (thread / WARP, thread % WARP);
    let first = warp * WARP;
    let of_lane = |lane: u32| first + lane % WARP;
    let ballot = (0..WARP).filter(|l| (7 * (first + l) + block).is_multiple_of(3)).fold(0, |bits, l| bits | 1u32 << l);
    let wide = (u64::from(of_lane(lane ^ 1)) << 33) + u64::from(3 * block + 1);
    let (word, long) = (load(input, 4, t), load(input, 8, t));
    [
        Some(thread),
        Some(BLOCK),
        Some(block),
        Some(THREADS / BLOCK),
        Some(lane),
        Some(warp),
        Some(BLOCK / WARP),
        Some(ballot),
        Some(1000 * of_lane(lane + 5) + block),
        Some(wide as u32),
        Some((wide >> 32) as u32),
        Some((of_lane(31 - lane) as f32 + 0.5).to_bits()),
        Some(block),
        Some(0),
        Some(3 * ((thread + 33) % BLOCK) + 1),
        Some(5 * of_lane(lane + 1) + 2),
        None,
        None,
        Some(BLOCK),
        Some(u32::MAX),
        None,
        None,
        Some(load(input, 1, t) as u32),
        Some(load(input, 2, t) as u32),
        Some(word as u32),
        Some(long as u32),
        Some((long >> 32) as u32),
        Some(word.count_ones()),
        Some(long.count_ones()),
        Some(1),
        Some(5),
        Some(u32::from(warp == 1)),
        Some(7 * (lane ^ 1) + 3),
        Some((0..WARP).fold(0, |bits, l| bits | (3 * (first + l) + block) << (l / 2))),
        Some((0..WARP).fold(0, |sum: u32, l| sum.wrapping_add(0xf000_0000 + 5 * (first + l) + block))),
        (0..WARP).map(|l| (first + l).wrapping_mul(0x9e37_79b9) ^ block).max(),
        None,
        Some(if warp == 0 { 0 } else { 11 * (lane ^ 1) + 4 }),
        Some(0x00c0_ffee),
    ]
}

fn sorted(mut values: Vec<u32>) -> Vec<u32> {
    values.sort_unstable();
    values
}

/// Checks all rows; `label` names the run.
pub fn check(label: &str, words: &[u32], input: &[u8; 64]) {
    let (rows, []) = words.as_chunks::<WORDS>() else { panic!("{label}: rows are cut off") };
    assert_eq!(rows.len(), THREADS as usize);
    for (t, row) in rows.iter().enumerate() {
        for (word, (seen, wanted)) in row.iter().zip(expected(t as u32, input)).enumerate() {
            let wanted = wanted.unwrap_or(*seen);
            assert_eq!(*seen, wanted, "{label}: word {word} of thread {t}: {seen:#x}, not {wanted:#x}");
        }
    }
    for (block, rows) in rows.chunks(BLOCK as usize).enumerate() {
        let olds = sorted(rows.iter().map(|row| row[16]).collect());
        assert!(olds.iter().copied().eq(0..BLOCK), "{label}: atomic_add_block of block {block} gave {olds:?}");
    }
    for (warp, rows) in rows.chunks(WARP as usize).enumerate() {
        check_ors(&format!("{label}: atomic_or_block of warp {warp}"), rows);
    }
    for (name, word, step) in [("atomic_add_gpu", 20, 2), ("atomic_next_gpu", 36, 3)] {
        let olds = sorted(rows.iter().map(|row| row[word]).collect());
        assert!(olds.iter().copied().eq((0..THREADS).map(|t| step * t)), "{label}: {name} gave {olds:?}");
    }
    let swaps: Vec<u32> = rows.iter().map(|row| row[21]).collect();
    let winner = swaps.iter().position(|old| *old == 0).unwrap_or_else(|| panic!("{label}: no swap won: {swaps:?}"));
    let wanted = |t: usize| if t == winner { 0 } else { winner as u32 + 1 };
    assert!(swaps.iter().enumerate().all(|(t, old)| *old == wanted(t)), "{label}: atomic_cas_gpu gave {swaps:?}");
}

/// The olds of a warp's lanes, each of which sets its own bit: in some order, each is the one before and one bit more.
fn check_ors(label: &str, rows: &[[u32; WORDS]]) {
    let mut olds: Vec<(u32, usize)> = rows.iter().enumerate().map(|(lane, row)| (row[17], lane)).collect();
    olds.sort_unstable_by_key(|(old, _)| old.count_ones());
    let mut bits = 0;
    for (old, lane) in olds {
        assert_eq!(old, bits, "{label}: lane {lane} found {old:#x} after {bits:#x}");
        bits |= 1 << lane;
    }
}
