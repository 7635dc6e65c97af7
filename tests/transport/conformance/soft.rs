//! Floating point in integers: exact values, rounded once. Does not use the machine's floating-point arithmetic.

/// The NaN of an arithmetic result.
pub const NAN: u32 = 0x7fff_ffff;

/// A binary format with subnormals and NaNs.
#[derive(Clone, Copy)]
pub struct Format {
    exponent_bits: u32,
    mantissa_bits: u32,
    /// The code of numbers that are too large: infinity, or the largest number in formats without one.
    beyond: u32,
}

pub const FP32: Format = Format { exponent_bits: 8, mantissa_bits: 23, beyond: 0x7f80_0000 };
pub const BF16: Format = Format { exponent_bits: 8, mantissa_bits: 7, beyond: 0x7f80 };
pub const FP16: Format = Format { exponent_bits: 5, mantissa_bits: 10, beyond: 0x7c00 };
/// Here it is encoded alone: its largest exponent is that of numbers.
pub const E4M3: Format = Format { exponent_bits: 4, mantissa_bits: 3, beyond: 0x7e };

/// The finite value `magnitude * 2^exponent`, with a sign, which zero has too. Magnitudes stay below 2^110.
#[derive(Clone, Copy)]
pub struct Exact {
    negative: bool,
    magnitude: u128,
    exponent: i32,
}

#[derive(Clone, Copy)]
pub enum Number {
    Nan,
    Infinite { negative: bool },
    Finite(Exact),
}

impl Format {
    fn bias(self) -> i32 {
        (1 << (self.exponent_bits - 1)) - 1
    }

    fn infinity(self) -> u32 {
        ((1 << self.exponent_bits) - 1) << self.mantissa_bits
    }

    fn sign(self, negative: bool) -> u32 {
        u32::from(negative) << (self.exponent_bits + self.mantissa_bits)
    }

    pub fn decode(self, bits: u32) -> Number {
        let negative = bits & self.sign(true) != 0;
        let fraction = bits & ((1 << self.mantissa_bits) - 1);
        let biased = (bits & self.infinity()) >> self.mantissa_bits;
        if bits & self.infinity() == self.infinity() {
            return if fraction == 0 { Number::Infinite { negative } } else { Number::Nan };
        }
        let hidden = if biased == 0 { 0 } else { 1 << self.mantissa_bits };
        let exponent = biased.max(1) as i32 - self.bias() - self.mantissa_bits as i32;
        Number::Finite(Exact { negative, magnitude: u128::from(fraction | hidden), exponent })
    }

    /// To nearest, ties to even; `nan` stands for what is no number.
    pub fn encode(self, number: Number, nan: u32) -> u32 {
        match number {
            Number::Nan => nan,
            Number::Infinite { negative } => self.sign(negative) | self.beyond,
            Number::Finite(value) => self.sign(value.negative) | self.round(value),
        }
    }

    fn round(self, value: Exact) -> u32 {
        if value.magnitude == 0 {
            return 0;
        }
        let lowest = 1 - self.bias();
        // The exponent of the leading bit, or of the smallest normal number, below which the unit stays the same.
        let leading = (value.top() + value.exponent).max(lowest);
        let unit = leading - self.mantissa_bits as i32;
        let units = value.in_units_of(unit);
        // A carry out of the mantissa goes where it belongs: into the exponent.
        let bits = (((leading - lowest) as u128) << self.mantissa_bits) + units;
        bits.min(u128::from(self.beyond)) as u32
    }
}

impl Exact {
    /// Place of the leading bit.
    fn top(self) -> i32 {
        127 - self.magnitude.leading_zeros() as i32
    }

    /// The magnitude divided by 2^unit, to nearest, ties to even.
    fn in_units_of(self, unit: i32) -> u128 {
        let shift = unit - self.exponent;
        if shift <= 0 {
            return self.magnitude << -shift;
        }
        if shift > self.top() + 1 {
            return 0;
        }
        let (floor, rest, half) = (self.magnitude >> shift, self.magnitude & ((1 << shift) - 1), 1 << (shift - 1));
        floor + u128::from(rest > half || (rest == half && floor % 2 == 1))
    }

    /// The same value with its leading bit at 108.
    fn lifted(self) -> Exact {
        let by = 108 - self.top();
        Exact { magnitude: self.magnitude << by, exponent: self.exponent - by, ..self }
    }

    /// The magnitude in units of 2^exponent; what is cut off below leaves a 1 in the last place.
    fn at(self, exponent: i32) -> u128 {
        let cut = exponent - self.exponent;
        match cut {
            ..=0 => self.magnitude << -cut,
            1..=127 => (self.magnitude >> cut) | u128::from(self.magnitude & ((1 << cut) - 1) != 0),
            _ => u128::from(self.magnitude != 0),
        }
    }
}

fn multiply_exact(x: Exact, y: Exact) -> Exact {
    Exact {
        negative: x.negative != y.negative,
        magnitude: x.magnitude * y.magnitude,
        exponent: x.exponent + y.exponent,
    }
}

fn add_exact(x: Exact, y: Exact) -> Exact {
    if x.magnitude == 0 || y.magnitude == 0 {
        let other = if x.magnitude == 0 { y } else { x };
        let negative = if other.magnitude == 0 { x.negative && y.negative } else { other.negative };
        return Exact { negative, ..other };
    }
    let (high, low) = if x.top() + x.exponent >= y.top() + y.exponent { (x, y) } else { (y, x) };
    // An operand has 48 bits at the most. Bits of `low` are cut off only where it is 2^60 times smaller than `high`,
    // so no cancellation brings the cut into sight.
    let high = high.lifted();
    let (a, b) = (high.magnitude, low.at(high.exponent));
    if high.negative == low.negative {
        return Exact { magnitude: a + b, ..high };
    }
    Exact { negative: if a == b { false } else { (a < b) != high.negative }, magnitude: a.abs_diff(b), ..high }
}

/// The quotient's first bits, 85 or more, and a 1 after them if there is a remainder; `y` is not zero.
fn divide_exact(x: Exact, y: Exact) -> Exact {
    let negative = x.negative != y.negative;
    if x.magnitude == 0 {
        return Exact { negative, ..x };
    }
    let x = x.lifted();
    let (quotient, rest) = (x.magnitude / y.magnitude, x.magnitude % y.magnitude);
    Exact { negative, magnitude: quotient << 1 | u128::from(rest != 0), exponent: x.exponent - y.exponent - 1 }
}

pub fn divide(x: Number, y: Number) -> Number {
    match (x, y) {
        (Number::Nan, _) | (_, Number::Nan) | (Number::Infinite { .. }, Number::Infinite { .. }) => Number::Nan,
        (Number::Infinite { negative }, Number::Finite(y)) => Number::Infinite { negative: negative != y.negative },
        (Number::Finite(x), Number::Infinite { negative }) => {
            Number::Finite(Exact { negative: negative != x.negative, magnitude: 0, exponent: 0 })
        }
        (Number::Finite(x), Number::Finite(y)) if y.magnitude == 0 => {
            if x.magnitude == 0 {
                Number::Nan
            } else {
                Number::Infinite { negative: x.negative != y.negative }
            }
        }
        (Number::Finite(x), Number::Finite(y)) => Number::Finite(divide_exact(x, y)),
    }
}

pub fn multiply(x: Number, y: Number) -> Number {
    let infinite = |a: bool, b: bool| Number::Infinite { negative: a != b };
    match (x, y) {
        (Number::Nan, _) | (_, Number::Nan) => Number::Nan,
        (Number::Infinite { negative: a }, Number::Infinite { negative: b }) => infinite(a, b),
        (Number::Infinite { negative }, Number::Finite(other))
        | (Number::Finite(other), Number::Infinite { negative }) => {
            if other.magnitude == 0 {
                Number::Nan
            } else {
                infinite(negative, other.negative)
            }
        }
        (Number::Finite(x), Number::Finite(y)) => Number::Finite(multiply_exact(x, y)),
    }
}

pub fn add(x: Number, y: Number) -> Number {
    match (x, y) {
        (Number::Nan, _) | (_, Number::Nan) => Number::Nan,
        (Number::Infinite { negative: a }, Number::Infinite { negative: b }) if a != b => Number::Nan,
        (infinite @ Number::Infinite { .. }, _) | (_, infinite @ Number::Infinite { .. }) => infinite,
        (Number::Finite(x), Number::Finite(y)) => Number::Finite(add_exact(x, y)),
    }
}

/// The magnitude of a single-precision number, by bits; a NaN's is 0.
pub fn magnitude(bits: u32) -> u32 {
    let magnitude = bits & 0x7fff_ffff;
    if magnitude > FP32.infinity() { 0 } else { magnitude }
}

/// fma(x, y, z), x + y, x * y, x / y and the larger magnitude of x and y, of single-precision numbers, by bits.
pub fn arithmetic([x, y, z]: [u32; 3]) -> [u32; 5] {
    let larger = magnitude(x).max(magnitude(y));
    let [x, y, z] = [x, y, z].map(|bits| FP32.decode(bits));
    let rounded = |number| FP32.encode(number, NAN);
    [rounded(add(multiply(x, y), z)), rounded(add(x, y)), rounded(multiply(x, y)), rounded(divide(x, y)), larger]
}
