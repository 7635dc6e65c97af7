//! The expected results of quantisation, computed with integers from its definition in docs/design.md; and rows on
//! which quantisation is likely to go wrong.

use super::inputs::Random;
use super::soft::{self, E4M3, FP32, NAN};

pub const COLUMNS: usize = 640;
const BLOCK: usize = 128;
/// Words of a row: elements, and room for a scale of each block.
pub const WORDS: usize = COLUMNS / 4 + COLUMNS / BLOCK;
/// 1e-4 and 448 in single precision.
const LEAST: u32 = 0x38d1_b717;
const LARGEST: u32 = 0x43e0_0000;
const INFINITY: u32 = 0x7f80_0000;

pub type Row = [u16; COLUMNS];

#[derive(Clone, Copy, PartialEq)]
pub enum Kind {
    F32,
    Ue8m0,
}

/// Bits of amax of a block: those of magnitudes are in their order.
fn amax(block: &[u16]) -> u32 {
    block.iter().map(|bits| soft::magnitude(u32::from(*bits) << 16)).fold(LEAST, u32::max)
}

fn divide(x: u32, y: u32) -> u32 {
    FP32.encode(soft::divide(FP32.decode(x), FP32.decode(y)), NAN)
}

fn multiply(x: u32, y: u32) -> u32 {
    FP32.encode(soft::multiply(FP32.decode(x), FP32.decode(y)), NAN)
}

/// The scale, or its exponent, and the inverse.
fn scale(kind: Kind, amax: u32) -> (u32, u32) {
    if kind == Kind::F32 {
        return (divide(amax, LARGEST), divide(LARGEST, amax));
    }
    // 448 times a power of two is exact, until it is infinite.
    match (1..255).find(|exponent| multiply(LARGEST, exponent << 23) >= amax) {
        Some(exponent) if amax < INFINITY => (exponent, (254 - exponent) << 23),
        _ => (255, 0),
    }
}

/// A row of [`WORDS`]; `blank` stands where nothing is written.
pub fn expected(kind: Kind, row: &Row, blank: u32) -> Vec<u32> {
    let mut bytes = Vec::new();
    let mut scales = vec![blank; COLUMNS / BLOCK];
    if kind == Kind::Ue8m0 {
        scales[..COLUMNS.div_ceil(4 * BLOCK)].fill(0);
    }
    for (i, block) in row.chunks(BLOCK).enumerate() {
        let (bits, inverse) = scale(kind, amax(block));
        match kind {
            Kind::F32 => scales[i] = bits,
            Kind::Ue8m0 => scales[i / 4] |= bits << (i % 4 * 8),
        }
        let code = |x: &u16| E4M3.encode(FP32.decode(multiply(u32::from(*x) << 16, inverse)), 0x7f) as u8;
        bytes.extend(block.iter().map(code));
    }
    let (words, _) = bytes.as_chunks::<4>();
    words.iter().map(|word| u32::from_le_bytes(*word)).chain(scales).collect()
}

/// A block whose amax is at a place where something changes, the rest below it.
fn block(source: &mut Random, kind: usize) -> Vec<u16> {
    let sign = |source: &mut Random| (source.word() as u16) & 0x8000;
    let mut block: Vec<u16> = match kind {
        // All zeros, of both signs.
        0 => (0..BLOCK).map(|_| sign(source)).collect(),
        // All bits.
        1 => (0..BLOCK).map(|_| source.word() as u16).collect(),
        // Subnormals and their neighbours.
        2 => (0..BLOCK).map(|_| (source.word() as u16) & 0x81ff).collect(),
        // About 1e-4, on both sides.
        3 => (0..BLOCK).map(|_| (0x38c8 + source.below(16) as u16) | sign(source)).collect(),
        // One number of the largest exponents.
        4 => (0..BLOCK).map(|_| (0x7f00 + source.below(128) as u16) | sign(source)).collect(),
        // Numbers whose exact quotient with amax is in the middle of two codes: 3/64 of amax becomes 21, and 21
        // has five bits. The last bit of the inverse decides.
        5 => {
            let amax = (1 + 2 * source.below(43)) as f32 * 2f32.powi(source.below(60) as i32 - 10);
            let number = |source: &mut Random| 3.0 * amax / (64 << source.below(8)) as f32;
            let bits = |x: f32| (x.to_bits() >> 16) as u16;
            (0..BLOCK).map(|i| if i == 0 { bits(amax) } else { bits(number(source)) | sign(source) }).collect()
        }
        // Up to eight powers of two apart.
        _ => {
            let top = 16 + source.below(230) as u16;
            (0..BLOCK).map(|_| (top - source.below(8) as u16) << 7 | (source.word() as u16) & 0x807f).collect()
        }
    };
    // amax about 1.75 times a power of two, which decides the power that is taken.
    if kind == 6 || kind == 7 {
        let top = 16 + source.below(239) as u16;
        block.iter_mut().for_each(|x| *x = (*x & 0x807f) | (top - 1) << 7);
        let place = source.below(BLOCK);
        block[place] = (top << 7 | (0x5e + source.below(5) as u16)) | sign(source);
    }
    // A NaN or an infinity somewhere.
    if kind == 8 || kind == 9 {
        let place = source.below(BLOCK);
        let odd = if kind == 8 { 0x7f81 + source.below(0x7f) as u16 } else { 0x7f80 };
        block[place] = odd | sign(source);
    }
    block
}

/// Rows of blocks of every kind.
pub fn rows(count: usize) -> Vec<Row> {
    let mut source = Random(3);
    let mut row = |i: usize| {
        let blocks: Vec<u16> = (0..COLUMNS / BLOCK).flat_map(|b| block(&mut source, (i + b * 3) % 11)).collect();
        blocks.try_into().unwrap()
    };
    (0..count).map(&mut row).collect()
}
