//! Identifiers that must not be mixed up with counts or with each other.

use std::fmt;

/// A rank: one GPU, or one worker of the CPU device. Counted from 0 in the world.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Rank(pub u32);

impl Rank {
    /// The rank as an index into a per-rank table.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// The type of one element of a token row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Dtype {
    /// OCP 8-bit float, 4 exponent and 3 mantissa bits, no infinities. Rows may carry scales.
    Fp8E4m3,
    /// bfloat16.
    Bf16,
    /// IEEE binary16.
    Fp16,
    /// IEEE binary32.
    Fp32,
}

impl Dtype {
    /// Size of one element in bytes.
    pub fn bytes(self) -> usize {
        match self {
            Dtype::Fp8E4m3 => 1,
            Dtype::Bf16 | Dtype::Fp16 => 2,
            Dtype::Fp32 => 4,
        }
    }

    /// The name used on the command line and in results.
    pub fn name(self) -> &'static str {
        match self {
            Dtype::Fp8E4m3 => "fp8",
            Dtype::Bf16 => "bf16",
            Dtype::Fp16 => "fp16",
            Dtype::Fp32 => "fp32",
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
