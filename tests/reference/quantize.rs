//! What a rank that quantises must send, and what is left of a partial row that travels as fp8: by the definition, at
//! f64.
//!
//! The definition is of docs/design.md, Quantisation; it follows DeepSeek-V3's 1x128 tiles of activations. Each step is
//! rounded to f32. At f64 the product of two f32 is exact, and a quotient is close enough to be rounded once more to
//! f32 without harm (53 bits are more than twice 24), so each step here is one rounding of the exact result.

use super::elem::{Elem, decode_e4m3, encode_e4m3, pow2};
use super::spec::Scales;

/// Columns of one scale.
pub(super) const BLOCK: usize = 128;
/// The least that amax can be.
const LEAST: f32 = 1e-4;
/// The largest e4m3 value.
const LARGEST: f64 = 448.0;

/// The largest magnitude of a block that is no NaN.
fn amax(block: &[u8]) -> f32 {
    amax_of((0..block.len() / 2).map(|i| Elem::Bf16.decode(Elem::Bf16.bits_at(block, i))))
}

pub(super) fn amax_of(block: impl Iterator<Item = f32>) -> f32 {
    // `max` of a number and a NaN is the number.
    block.map(f32::abs).fold(LEAST, f32::max)
}

/// The fp32 scale of a block.
fn scale(amax: f32) -> f32 {
    (f64::from(amax) / LARGEST) as f32
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
            Scales::F32 => out[i] = scale(amax).to_bits(),
            Scales::Ue8m0 => out[i / 4] |= u32::from(ue8m0(amax)) << (i % 4 * 8),
        }
    }
}

/// A partial row as the adding rank reads it: quantised with fp32 scales, then each element times its scale.
pub fn carried_by_fp8(row: &mut [f32]) {
    for block in row.chunks_mut(BLOCK) {
        let amax = amax_of(block.iter().copied());
        let (scale, inverse) = (f64::from(scale(amax)), f64::from(inverse(Scales::F32, amax)));
        for x in block {
            let code = encode_e4m3((f64::from(*x) * inverse) as f32);
            *x = (f64::from(decode_e4m3(code)) * scale) as f32;
        }
    }
}

/// The most by which [`carried_by_fp8`] changes `x` in a block of that amax, 1e-4 at least.
///
/// With u = 2^-24, t = x * inverse and the scale differ from x * 448 / amax and amax / 448 by factors of (1 +- u)^2 and
/// 1 +- u. The code nearest to t is off by t / 17 at most where t is normal (half a unit in the last of four places),
/// and by 2^-10 below 2^-6; t beyond 448 is so by rounding alone. Times the scale, rounded once more:
///
/// ```text
/// t normal      |x| * (1/17 * (1 + u)^4 + (1 + u)^4 - 1)          < |x| / 16
/// below 2^-6    2^-10 * scale * (1 + u) + |x| * ((1 + u)^4 - 1),  where |x| <= 2^-6 * scale * (1 + 3u)
///               <= 2^-10 * amax / 448 * (1 + 67u)                 < amax / 458000
/// ```
pub fn fp8_error(x: f64, amax: f32) -> f64 {
    (x.abs() / 16.0).max(f64::from(amax) / 458_000.0)
}
