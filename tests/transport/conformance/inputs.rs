//! Numbers at which conversions and sums go wrong, by bits, and many more at random.

use super::soft::{FP16, FP32, NAN};

/// SplitMix64.
pub struct Random(pub u64);

impl Random {
    pub fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, bound: usize) -> usize {
        (self.word() % bound as u64) as usize
    }

    fn bits(&mut self) -> u32 {
        (self.word() >> 32) as u32
    }

    /// A finite number of magnitude 2^-8 to 2^8, so that sums and products meet.
    fn moderate(&mut self) -> u32 {
        let exponent = 119 + self.below(16) as u32;
        (self.bits() & 0x807f_ffff) | exponent << 23
    }
}

/// Zero, subnormals, powers of two and their neighbours, the largest, infinity, NaNs; of both signs.
fn specials() -> Vec<u32> {
    let positive = [
        0x0000_0000,
        0x0000_0001,
        0x0000_0002,
        0x0040_0000,
        0x007f_ffff,
        0x0080_0000, // 2^-126
        0x0080_0001,
        0x00ff_ffff,
        0x1a00_0000, // 2^-75: its square is half the smallest subnormal
        0x1a00_0001,
        0x3380_0000, // 2^-24
        0x3380_0001,
        0x3f7f_ffff,
        0x3f80_0000, // 1
        0x3f80_0001,
        0x3f80_0800, // 1 + 2^-12: its square lies halfway between two numbers
        0x3fff_ffff,
        0x4b00_0001, // 2^23 + 1
        0x4b7f_ffff, // 2^24 - 1
        0x5f00_0000, // 2^63
        0x5f7f_ffff,
        0x7eff_ffff,
        0x7f00_0000, // 2^127
        0x7f7f_fffe,
        0x7f7f_ffff,
        0x7f80_0000, // infinity
        0x7f80_0001, // a signalling NaN
        0x7fc0_0000,
        0x7fff_ffff,
    ];
    positive.iter().flat_map(|bits| [*bits, bits | 0x8000_0000]).collect()
}

/// Every bf16 number with what lies around it and around the middle to the next one.
fn around_bf16() -> impl Iterator<Item = u32> {
    (0..=0xffffu32).flat_map(|high| [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff].map(|low| high << 16 | low))
}

/// Every fp16 number with what lies around it and around the middle to the next one, infinity counted as 2^16.
fn around_fp16() -> impl Iterator<Item = u32> {
    let value = |bits: u32| match bits {
        0x7c00 => 65536.0,
        _ => f64::from(f32::from_bits(FP32.encode(FP16.decode(bits), NAN))),
    };
    (0..0x7c00u32).flat_map(move |bits| {
        let middle = ((value(bits) + value(bits + 1)) / 2.0) as f32;
        [value(bits) as f32, middle].into_iter().flat_map(|at| {
            let around = [at.to_bits().saturating_sub(1), at.to_bits(), at.to_bits() + 1];
            around.into_iter().flat_map(|bits| [bits, bits | 0x8000_0000])
        })
    })
}

/// Every number that matters to a conversion, then `random` others.
pub fn floats(random: usize) -> Vec<u32> {
    let mut source = Random(1);
    let others = (0..random).map(|_| source.bits());
    specials().into_iter().chain(around_bf16()).chain(around_fp16()).chain(others).collect()
}

/// Three numbers whose exact x * y + z lies next to the middle of two numbers, or is what rounding x * y cut off.
fn hard_triple(source: &mut Random, kind: usize) -> [u32; 3] {
    let (x, y) = (source.moderate(), source.moderate());
    let product = f32::from_bits(x) * f32::from_bits(y);
    let sign = source.bits() & 0x8000_0000;
    let z = match kind {
        // The rounded product away again: the rest is left, exactly.
        0 => (-product).to_bits(),
        // The same, one unit beside it.
        1 => (-product).to_bits() ^ 1,
        2 => source.moderate(),
        // (1 + 2^-12)^2 * 2^k is in the middle of two numbers; a z of any size, however small, decides.
        3 => {
            let scale = source.below(60) as u32;
            let near_one = 0x3f80_0800;
            let z = (source.bits() & 0x8000_0000) | (source.bits() % 0x3000_0000);
            return [(near_one - (scale << 23)) | sign, near_one, z];
        }
        // Products among and below the subnormals.
        _ => {
            let shift = 60 + source.below(16) as u32;
            return [x - (shift << 23), y - (shift << 23), (source.bits() % 0x0100_0000) | sign];
        }
    };
    [x, y, z]
}

/// All triples of special numbers, then `hard` hard ones, then `random` others.
pub fn triples(hard: usize, random: usize) -> Vec<[u32; 3]> {
    let specials = specials();
    let mut all = Vec::new();
    for x in &specials {
        for y in &specials {
            all.extend(specials.iter().map(|z| [*x, *y, *z]));
        }
    }
    let mut source = Random(2);
    all.extend((0..hard).map(|i| hard_triple(&mut source, i % 5)));
    all.extend((0..random).map(|_| [source.bits(), source.bits(), source.bits()]));
    all
}

/// `count` of them at random; all special ones come by in enough picks.
pub fn sample<T: Copy>(all: &[T], count: usize, seed: u64) -> Vec<T> {
    let mut source = Random(seed);
    (0..count).map(|_| all[source.below(all.len())]).collect()
}
