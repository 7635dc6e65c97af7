//! Element codecs, from the formats' definitions: value = integer significand × power of two.
//!
//! Pure functions on any thread. They never round twice: every f32 and every product of a short significand with a
//! power of two is exact at f64.

/// The type of one element.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Elem {
    /// OCP 8-bit float, 4 exponent bits (bias 7), 3 mantissa bits, no infinities, NaN = all ones.
    E4m3,
    /// 8 exponent bits, 7 mantissa bits.
    Bf16,
    /// 5 exponent bits, 10 mantissa bits.
    Fp16,
    /// 8 exponent bits, 23 mantissa bits.
    Fp32,
}

/// The NaN that a GPU's conversion produces, for both 16-bit types.
pub const CANONICAL_NAN_16: u16 = 0x7fff;

impl Elem {
    /// Bytes of one element.
    pub fn bytes(self) -> usize {
        match self {
            Elem::E4m3 => 1,
            Elem::Bf16 | Elem::Fp16 => 2,
            Elem::Fp32 => 4,
        }
    }

    /// Unit roundoff u: rounding to nearest changes a normal value x by at most u·|x|.
    ///
    /// With p significand bits, the hidden one included, neighbours in [1, 2) are 2^(1−p) apart and the nearest is at
    /// most half of that, 2^−p, away; so u = 2^−p. bf16 stores 7 bits, so p = 8 and u = 2^−8. fp16: p = 11; fp32: 24.
    pub fn unit_roundoff(self) -> f64 {
        match self {
            Elem::E4m3 => pow2(-4),
            Elem::Bf16 => pow2(-8),
            Elem::Fp16 => pow2(-11),
            Elem::Fp32 => pow2(-24),
        }
    }

    /// The largest finite value: all significand bits set, at the largest exponent; e4m3 gives its last code to NaN.
    pub fn largest(self) -> f64 {
        match self {
            Elem::E4m3 => 448.0,
            Elem::Bf16 => (2.0 - pow2(-7)) * pow2(127),
            Elem::Fp16 => 65504.0,
            Elem::Fp32 => (2.0 - pow2(-23)) * pow2(127),
        }
    }

    /// Half of the smallest subnormal: what rounding may change below the normal range, whatever the value.
    pub fn half_subnormal(self) -> f64 {
        match self {
            Elem::E4m3 => pow2(-10),
            Elem::Bf16 => pow2(-134),
            Elem::Fp16 => pow2(-25),
            Elem::Fp32 => pow2(-150),
        }
    }

    /// The bits of element `index` of a row of bytes, in the low end; bytes that are not there read as zero.
    pub fn bits_at(self, row: &[u8], index: usize) -> u32 {
        let start = index * self.bytes();
        let mut le = [0u8; 4];
        if let Some(bytes) = row.get(start..start + self.bytes()) {
            le[..self.bytes()].copy_from_slice(bytes);
        }
        u32::from_le_bytes(le)
    }

    /// The value of the bits of one element.
    pub fn decode(self, bits: u32) -> f32 {
        match self {
            Elem::E4m3 => decode_e4m3(bits as u8),
            Elem::Bf16 => f32::from_bits(bits << 16),
            Elem::Fp16 => decode_fp16(bits as u16),
            Elem::Fp32 => f32::from_bits(bits),
        }
    }

    /// The bits of the value nearest to `x`, ties to even.
    pub fn encode(self, x: f32) -> u32 {
        match self {
            Elem::E4m3 => u32::from(encode_e4m3(x)),
            Elem::Bf16 => u32::from(encode_bf16(x)),
            Elem::Fp16 => u32::from(encode_fp16(x)),
            Elem::Fp32 => x.to_bits(),
        }
    }

    /// `x` rounded to the nearest value of this type, ties to even.
    #[inline]
    pub fn round(self, x: f32) -> f32 {
        match self {
            Elem::E4m3 => decode_e4m3(encode_e4m3(x)),
            Elem::Bf16 => round_bf16(x),
            Elem::Fp16 => round_fp16(x),
            Elem::Fp32 => x,
        }
    }
}

/// 2^n for every n of f64's normal range.
pub fn pow2(n: i32) -> f64 {
    f64::from_bits(((n + 1023) as u64) << 52)
}

/// Value of an e4m3 code.
pub fn decode_e4m3(code: u8) -> f32 {
    let sign = if code & 0x80 != 0 { -1.0 } else { 1.0 };
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f64::from(code & 7));
    let magnitude = match (exponent, code & 0x7f) {
        (_, 0x7f) => return f32::NAN,
        (0, _) => mantissa * pow2(-6 - 3),
        _ => (8.0 + mantissa) * pow2(exponent - 7 - 3),
    };
    (sign * magnitude) as f32
}

/// Nearest e4m3 code. There are no infinities: what is above the largest value, 448, becomes that; a NaN becomes 0x7f,
/// whatever its sign.
pub fn encode_e4m3(x: f32) -> u8 {
    // Adding 1.5 · 2^52 leaves no bits below 1 in an f64 and rounds to nearest even on the way.
    const WHOLE: f64 = 6_755_399_441_055_744.0;
    if x.is_nan() {
        return 0x7f;
    }
    let sign = if x.is_sign_negative() { 0x80 } else { 0 };
    let magnitude = f64::from(x.abs()).min(448.0);
    let exponent = ((magnitude as f32).to_bits() >> 23) as i32 - 127;
    // Values are 2^(exponent − 3) apart, and 2^−9 below 2^−6.
    let exponent = exponent.max(-6);
    let quanta = (magnitude * pow2(3 - exponent) + WHOLE) - WHOLE;
    // From 8 quanta on the hidden bit is there, which counts as one more of the exponent field; 16 carry into the next.
    sign | ((exponent + 6) * 8 + quanta as i32) as u8
}

/// Value of an fp16 code.
pub fn decode_fp16(code: u16) -> f32 {
    let sign = if code & 0x8000 != 0 { -1.0 } else { 1.0 };
    let (exponent, mantissa) = (i32::from(code >> 10 & 31), f64::from(code & 1023));
    let magnitude = match exponent {
        31 if mantissa == 0.0 => f64::INFINITY,
        31 => return f32::NAN,
        0 => mantissa * pow2(-14 - 10),
        _ => (1024.0 + mantissa) * pow2(exponent - 15 - 10),
    };
    (sign * magnitude) as f32
}

/// Value of a UE8M0 scale byte: 2^(byte − 127); 255 is NaN.
pub fn decode_ue8m0(byte: u8) -> f32 {
    if byte == 255 { f32::NAN } else { pow2(i32::from(byte) - 127) as f32 }
}

/// Nearest bf16 code. A bf16 is the upper half of an f32, so the dropped half decides: up beyond a half, and at a half
/// when the kept half is odd. A carry runs into the exponent, up to infinity, as it must.
pub fn encode_bf16(x: f32) -> u16 {
    if x.is_nan() { CANONICAL_NAN_16 } else { (round_bf16(x).to_bits() >> 16) as u16 }
}

/// See [`encode_bf16`]; a NaN stays one.
#[inline]
fn round_bf16(x: f32) -> f32 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) & 0xffff_0000;
    f32::from_bits(if x.is_nan() { 0x7fff_0000 } else { rounded })
}

/// `x` as a whole number of fp16 quanta: the spacing of fp16 values at the magnitude of `x`.
#[inline]
fn round_fp16(x: f32) -> f32 {
    // Adding 1.5 · 2^52 leaves no bits below 1 in an f64 and rounds to nearest even on the way.
    const WHOLE: f64 = 6_755_399_441_055_744.0;
    let exponent = ((x.to_bits() >> 23 & 255) as i32 - 127).max(-14);
    let quantum = pow2(exponent - 10);
    let rounded = ((f64::from(x) * pow2(10 - exponent) + WHOLE) - WHOLE) * quantum;
    if x.is_nan() {
        f32::NAN
    } else if rounded.abs() > 65504.0 {
        f32::INFINITY.copysign(x)
    } else {
        (rounded as f32).copysign(x)
    }
}

/// Nearest fp16 code.
pub fn encode_fp16(x: f32) -> u16 {
    if x.is_nan() {
        return CANONICAL_NAN_16;
    }
    let sign = if x.is_sign_negative() { 0x8000u16 } else { 0 };
    let magnitude = f64::from(round_fp16(x).abs());
    if magnitude.is_infinite() {
        return sign | 0x7c00;
    }
    if magnitude < pow2(-14) {
        return sign | (magnitude * pow2(24)) as u16;
    }
    let exponent = (magnitude.to_bits() >> 52) as i32 - 1023;
    let mantissa = (magnitude * pow2(10 - exponent)) as u16 - 1024;
    sign | ((exponent + 15) as u16) << 10 | mantissa
}
