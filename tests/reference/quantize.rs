//! What a rank that quantises must send: by the definition, at f64.
//!
//! The definition is of docs/design.md, Quantisation; it follows DeepSeek-V3's 1x128 tiles of activations. Each step is
//! rounded to f32. At f64 the product of two f32 is exact, and a quotient is close enough to be rounded once more to f32
//! without harm (53 bits are more than twice 24), so each step here is one rounding of the exact result.

use super::elem::{Elem, encode_e4m3, pow2};
use super::spec::Scales;

/// Columns of one scale.
const BLOCK: usize = 128;
/// The least that amax can be.
const LEAST: f32 = 1e-4;
/// The largest e4m3 value.
const LARGEST: f64 = 448.0;

/// The largest magnitude of a block that is no NaN.
fn amax(block: &[u8]) -> f32 {
    let magnitudes = (0..block.len() / 2).map(|i| Elem::Bf16.decode(Elem::Bf16.bits_at(block, i)).abs());
    // `max` of a number and a NaN is the number.
    magnitudes.fold(LEAST, f32::max)
}

/// The exponent byte of the smallest power of two that is not below amax / 448; 255, a NaN, where there is none.
fn ue8m0(amax: f32) -> u8 {
    let not_below = |byte: &u8| pow2(i32::from(*byte) - 127) * LARGEST >= f64::from(amax);
    (0..255).find(not_below).unwrap_or(255)
}

/// The inverse of a block's scale.
fn inverse(scales: Scales, amax: f32) -> f32 {
    match scales {
        Scales::Ue8m0 => match ue8m0(amax) {
            255 => 0.0,
            byte => pow2(127 - i32::from(byte)) as f32,
        },
        _ => (LARGEST / f64::from(amax)) as f32,
    }
}

/// The e4m3 elements of a row of bf16.
pub fn quantized_row(scales: Scales, row: &[u8], out: &mut [u8]) {
    for (block, out) in row.chunks(2 * BLOCK).zip(out.chunks_mut(BLOCK)) {
        let inverse = f64::from(inverse(scales, amax(block)));
        for (i, code) in out.iter_mut().enumerate() {
            let x = f64::from(Elem::Bf16.decode(Elem::Bf16.bits_at(block, i)));
            *code = encode_e4m3((x * inverse) as f32);
        }
    }
}

/// The scale words of a row of bf16.
pub fn quantized_scales(scales: Scales, row: &[u8], out: &mut [u32]) {
    out.fill(0);
    for (i, amax) in row.chunks(2 * BLOCK).map(amax).enumerate() {
        match scales {
            Scales::None => {}
            Scales::F32 => out[i] = ((f64::from(amax) / LARGEST) as f32).to_bits(),
            Scales::Ue8m0 => out[i / 4] |= u32::from(ue8m0(amax)) << (i % 4 * 8),
        }
    }
}
