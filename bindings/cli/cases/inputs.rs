//! Inputs of a run, made on demand: any row, scale or weight is a function of (seed, iteration, rank, token) and its
//! position. Nothing is stored, and the reference can make any row again.
//!
//! Before the data path, on any thread; it allocates nothing. One 64-bit mix makes eight bytes.

use tokenyard::internals::base::Dtype;

/// Step between counters: the odd number nearest to 2^64 divided by the golden ratio, so that neighbouring counters
/// differ in about half of their bits before they are mixed.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// What a stream of numbers is used for; streams of one token are unrelated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Use {
    Row = 1,
    Scale = 2,
    Weight = 3,
    Choice = 4,
    Count = 5,
    /// Old contents of an output that combine accumulates into.
    Old = 6,
    /// Powers of two of the blocks of a row.
    Power = 7,
    /// Words beside a row.
    Word = 8,
}

/// A bijective scramble of 64 bits in which each input bit reaches every output bit (xor-shift, multiply, twice).
#[inline]
fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A stream of numbers addressed by position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Counter {
    key: u64,
    next: u64,
}

impl Counter {
    pub fn new(seed: u64, purpose: Use, iteration: u64, rank: usize, token: usize) -> Counter {
        let parts = [purpose as u64, iteration, rank as u64, token as u64];
        let key =
            parts.iter().fold(mix(seed ^ STEP), |key, part| mix(key.wrapping_add(STEP) ^ mix(part.wrapping_mul(STEP))));
        Counter { key, next: 0 }
    }

    /// The number at a position.
    #[inline]
    pub fn at(&self, position: u64) -> u64 {
        mix(self.key.wrapping_add(position.wrapping_mul(STEP)))
    }

    /// The number at the next position.
    pub fn next(&mut self) -> u64 {
        self.next += 1;
        self.at(self.next - 1)
    }

    /// A number below `bound` (1 if that is 0), each equally likely up to 2^-64 · bound.
    pub fn below(&mut self, bound: usize) -> usize {
        ((u128::from(self.next()) * bound.max(1) as u128) >> 64) as usize
    }

    /// A number in the open interval (0, 1).
    pub fn unit(&mut self) -> f64 {
        ((self.next() >> 12) as f64 + 0.5) / (1u64 << 52) as f64
    }
}

/// How a row is scaled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScaleKind {
    None,
    F32,
    Ue8m0,
}

/// All inputs of one iteration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Inputs {
    pub seed: u64,
    pub iteration: u64,
    pub hidden: usize,
    pub dtype: Dtype,
    pub scales: ScaleKind,
    /// Rows are bf16 to be quantised: blocks of 128 columns differ in magnitude.
    pub uneven: bool,
}

impl ScaleKind {
    /// 4-byte words of the scales of one row.
    pub fn words(self, hidden: usize) -> usize {
        match self {
            ScaleKind::None => 0,
            ScaleKind::F32 => hidden.div_ceil(128),
            ScaleKind::Ue8m0 => hidden.div_ceil(512),
        }
    }
}

impl Inputs {
    /// Bytes of one row.
    pub fn row_bytes(&self) -> usize {
        self.hidden * self.dtype.bytes()
    }

    /// 4-byte scale words of one row.
    pub fn scale_words(&self) -> usize {
        self.scales.words(self.hidden)
    }

    /// Writes the row of a token. fp8: every finite code. Other types: either sign, magnitudes in [2^-7, 2); in uneven
    /// rows times a power of two for each block, 2^-24 to 2^7, so that the smallest blocks have the smallest possible
    /// scale.
    pub fn fill_row(&self, rank: usize, token: usize, out: &mut [u8]) {
        let counter = Counter::new(self.seed, Use::Row, self.iteration, rank, token);
        fill_elements(counter, self.dtype, out);
        if self.uneven {
            let powers = Counter::new(self.seed, Use::Power, self.iteration, rank, token);
            (0..).zip(out.chunks_mut(256)).for_each(|(i, block)| scale_bf16(block, powers.at(i)));
        }
    }

    /// Writes the old contents of the output row of a token of a rank, as [`Inputs::fill_row`] does, in the type of the
    /// output.
    pub fn fill_old(&self, dtype: Dtype, rank: usize, token: usize, out: &mut [u8]) {
        let counter = Counter::new(self.seed, Use::Old, self.iteration, rank, token);
        fill_elements(counter, dtype, out);
    }

    /// Writes the scale words of a token. f32: positive, in [2^-3, 2^3), no powers of two. UE8M0: exponents 2^-3 to
    /// 2^3, four in a word, little-endian, unused bytes zero.
    pub fn fill_scales(&self, rank: usize, token: usize, out: &mut [u32]) {
        let counter = Counter::new(self.seed, Use::Scale, self.iteration, rank, token);
        match self.scales {
            ScaleKind::None => {}
            ScaleKind::F32 => {
                for (i, word) in out.iter_mut().enumerate() {
                    let random = counter.at(i as u64);
                    let exponent = 124 + (random >> 32) as u32 % 6;
                    *word = exponent << 23 | (random as u32 & 0x007f_ffff) | 1;
                }
            }
            ScaleKind::Ue8m0 => {
                out.fill(0);
                for block in 0..self.hidden.div_ceil(128).min(out.len() * 4) {
                    let exponent = 124 + (counter.at(block as u64) >> 32) as u32 % 7;
                    out[block / 4] |= exponent << (block % 4 * 8);
                }
            }
        }
    }

    /// Writes the words beside the row of a token: any bits, a fifth of them those of -0 and a fifth those of NaNs.
    pub fn fill_words(&self, rank: usize, token: usize, out: &mut [u32]) {
        let counter = Counter::new(self.seed, Use::Word, self.iteration, rank, token);
        for (j, word) in out.iter_mut().enumerate() {
            let random = counter.at(j as u64);
            *word = match (random >> 32) % 5 {
                0 => 0x8000_0000,
                1 => random as u32 | 0x7f80_0001,
                _ => random as u32,
            };
        }
    }

    /// Writes the weights of a token: positive, in [1/16, 1), no two alike (up to 128), and no reason to sum to 1.
    pub fn fill_weights(&self, rank: usize, token: usize, out: &mut [f32]) {
        let counter = Counter::new(self.seed, Use::Weight, self.iteration, rank, token);
        for (k, weight) in out.iter_mut().enumerate() {
            let random = counter.at(k as u64);
            let exponent = 123 + (random >> 32) as u32 % 4;
            // The position in the lowest bits makes all significands of a token differ.
            *weight = f32::from_bits(exponent << 23 | (random as u32 & 0xffff) << 7 | (k as u32 & 127));
        }
    }
}

/// Fills a row with elements.
fn fill_elements(counter: Counter, dtype: Dtype, out: &mut [u8]) {
    match dtype {
        Dtype::Fp8E4m3 => fill_with(counter, out, finite_e4m3),
        // Sign, three exponent bits and the mantissa are random; the rest puts the exponent at -7..=0.
        Dtype::Bf16 => fill_with(counter, out, |w| w & 0x83ff_83ff_83ff_83ff | 0x3c00_3c00_3c00_3c00),
        Dtype::Fp16 => fill_with(counter, out, |w| w & 0x9fff_9fff_9fff_9fff | 0x2000_2000_2000_2000),
        Dtype::Fp32 => fill_with(counter, out, |w| w & 0x83ff_ffff_83ff_ffff | 0x3c00_0000_3c00_0000),
    }
}

#[inline]
fn fill_with(counter: Counter, out: &mut [u8], shape: impl Fn(u64) -> u64) {
    let (words, rest) = out.as_chunks_mut::<8>();
    for (i, word) in words.iter_mut().enumerate() {
        *word = shape(counter.at(i as u64)).to_le_bytes();
    }
    let last = shape(counter.at(words.len() as u64)).to_le_bytes();
    rest.copy_from_slice(&last[..rest.len()]);
}

/// Multiplies numbers of 2^-7 to 2 with a power of two, 2^-24 to 2^7.
fn scale_bf16(block: &mut [u8], random: u64) {
    let (numbers, _) = block.as_chunks_mut::<2>();
    let power = (random % 32) as u16;
    for number in numbers {
        // Exponents are at bit 7.
        *number = (u16::from_le_bytes(*number) - (24 << 7) + (power << 7)).to_le_bytes();
    }
}

/// Eight e4m3 codes without NaN: where the low seven bits are all ones, the lowest is cleared.
#[inline]
fn finite_e4m3(word: u64) -> u64 {
    const LOW: u64 = 0x7f7f_7f7f_7f7f_7f7f;
    const ONE: u64 = 0x0101_0101_0101_0101;
    // Adding 1 to seven ones sets bit 7; no carry leaves a byte.
    word ^ (((word & LOW) + ONE) >> 7 & ONE)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn inputs(dtype: Dtype, scales: ScaleKind) -> Inputs {
        Inputs { seed: 1, iteration: 2, hidden: 7168, dtype, scales, uneven: false }
    }

    #[test]
    fn fp8_rows_hold_every_finite_code_and_no_nan() {
        let made = inputs(Dtype::Fp8E4m3, ScaleKind::F32);
        let mut seen = [0u32; 256];
        let mut row = vec![0u8; made.row_bytes()];
        for token in 0..16 {
            made.fill_row(3, token, &mut row);
            row.iter().for_each(|&code| seen[usize::from(code)] += 1);
        }
        assert_eq!((seen[0x7f], seen[0xff]), (0, 0));
        assert_eq!(seen.iter().filter(|&&n| n == 0).count(), 2, "{seen:?}");
    }

    #[test]
    fn wide_rows_are_moderate_and_of_both_signs() {
        for (dtype, decode) in [
            (Dtype::Bf16, (|b| f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16)) as fn(&[u8]) -> f32),
            (Dtype::Fp32, |b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])),
            (Dtype::Fp16, |b| {
                let bits = u16::from_le_bytes([b[0], b[1]]);
                let magnitude = (1024 + u32::from(bits & 1023)) as f32 * 2f32.powi(i32::from(bits >> 10 & 31) - 25);
                if bits >> 15 == 1 { -magnitude } else { magnitude }
            }),
        ] {
            let made = inputs(dtype, ScaleKind::None);
            let mut row = vec![0u8; made.row_bytes()];
            made.fill_row(0, 0, &mut row);
            let values: Vec<f32> = row.chunks(dtype.bytes()).map(decode).collect();
            assert!(values.iter().all(|v| (2f32.powi(-7)..2.0).contains(&v.abs())), "{dtype}");
            let negative = values.iter().filter(|v| **v < 0.0).count();
            assert!((2000..5000).contains(&negative), "{dtype}: {negative}");
        }
    }

    #[test]
    fn uneven_rows_are_those_rows_with_a_power_for_each_block() {
        let even = inputs(Dtype::Bf16, ScaleKind::None);
        let row = |inputs: Inputs| {
            let mut out = vec![0u8; inputs.row_bytes()];
            inputs.fill_row(0, 3, &mut out);
            let number = |b: &[u8]| f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16);
            out.chunks(2).map(number).collect::<Vec<f32>>()
        };
        let (unscaled, scaled) = (row(even), row(Inputs { uneven: true, ..even }));
        let powers: Vec<f32> = unscaled.iter().zip(&scaled).map(|(unscaled, scaled)| scaled / unscaled).collect();
        for block in powers.chunks(128) {
            assert!(block.iter().all(|p| p == &block[0] && (2f32.powi(-24)..=128.0).contains(p)), "{block:?}");
        }
        let quiet = powers.iter().step_by(128).filter(|p| **p < 2f32.powi(-15)).count();
        assert!((5..30).contains(&quiet), "{quiet} of 56 blocks have the smallest scale");
    }

    #[test]
    fn rows_differ_between_tokens_ranks_iterations_and_seeds() {
        let made = inputs(Dtype::Bf16, ScaleKind::None);
        let row = |inputs: Inputs, rank, token| {
            let mut out = vec![0u8; 64];
            inputs.fill_row(rank, token, &mut out);
            out
        };
        let rows = [
            row(made, 0, 0),
            row(made, 0, 1),
            row(made, 1, 0),
            row(Inputs { iteration: 3, ..made }, 0, 0),
            row(Inputs { seed: 2, ..made }, 0, 0),
        ];
        for i in 0..rows.len() {
            assert!(rows[i + 1..].iter().all(|other| *other != rows[i]));
        }
        assert_eq!(row(made, 1, 0), rows[2]);
    }

    #[test]
    fn scales_and_weights_keep_their_promises() {
        let made = inputs(Dtype::Fp8E4m3, ScaleKind::F32);
        let mut words = vec![0u32; made.scale_words()];
        made.fill_scales(1, 2, &mut words);
        for word in &words {
            let value = f32::from_bits(*word);
            assert!((0.125..8.0).contains(&value) && word & 0x007f_ffff != 0, "{value}");
        }
        let odd = Inputs { hidden: 640, ..inputs(Dtype::Fp8E4m3, ScaleKind::Ue8m0) };
        let mut packed = vec![0xffff_ffffu32; odd.scale_words()];
        odd.fill_scales(1, 2, &mut packed);
        assert_eq!((packed.len(), packed[1] >> 8), (2, 0), "bytes 5, 6 and 7 are unused");
        assert!(packed[0].to_le_bytes().iter().all(|b| (124..=130).contains(b)));
        let mut weights = [0f32; 8];
        for token in 0..200 {
            made.fill_weights(1, token, &mut weights);
            assert!(weights.iter().all(|w| (0.0625..1.0).contains(w)));
            assert!((0..8).all(|i| !weights[..i].contains(&weights[i])));
            assert!((weights.iter().sum::<f32>() - 1.0).abs() > 1e-6);
        }
    }
}
