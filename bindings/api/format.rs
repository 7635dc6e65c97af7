//! Formats of rows: elements and scales.

use crate::base::{Dtype, Error, Result};
use std::fmt;

/// Scales that travel with fp8 rows: one per 128 columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Scales {
    /// None; rows are elements alone.
    None,
    /// fp32, one word per 128 columns.
    F32,
    /// UE8M0 exponents, four in a 4-byte word, in little-endian order; unused bytes are zero.
    Ue8m0,
}

/// Format in which partial rows travel. A partial row is an expert rank's sum of its rows of a token, sent back to the
/// source rank or to a rail; between nodes also the sum of a node, sent back to the source rank. A rank's partial rows
/// of its own tokens are computed and rounded in the same way. Only the sum of the source's own node is not rounded
/// before it is added to the sums of other nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Partial {
    /// The combine dtype: one rounding per level.
    #[default]
    Same,
    /// fp32: no rounding, and twice the bytes of 16-bit rows.
    Fp32,
    /// fp8 e4m3 with an fp32 scale per 128 columns: about half the bytes of 16-bit rows.
    Fp8,
}

/// Columns of one scale.
pub(crate) const SCALE_COLUMNS: usize = 128;

/// Format of a row: the type of its elements, and its scales. The constants are all formats at present; later versions
/// may add more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RowFormat {
    pub(crate) dtype: Dtype,
    pub(crate) scales: Scales,
}

impl RowFormat {
    /// bf16 elements.
    pub const BF16: RowFormat = RowFormat { dtype: Dtype::Bf16, scales: Scales::None };
    /// fp16 elements.
    pub const FP16: RowFormat = RowFormat { dtype: Dtype::Fp16, scales: Scales::None };
    /// fp32 elements.
    pub const FP32: RowFormat = RowFormat { dtype: Dtype::Fp32, scales: Scales::None };
    /// fp8 e4m3 elements without scales.
    pub const FP8: RowFormat = RowFormat { dtype: Dtype::Fp8E4m3, scales: Scales::None };
    /// fp8 e4m3 elements, and an fp32 scale per 128 columns.
    pub const FP8_F32: RowFormat = RowFormat { dtype: Dtype::Fp8E4m3, scales: Scales::F32 };
    /// fp8 e4m3 elements, and a UE8M0 exponent per 128 columns.
    pub const FP8_UE8M0: RowFormat = RowFormat { dtype: Dtype::Fp8E4m3, scales: Scales::Ue8m0 };

    /// The format with these elements and scales.
    ///
    /// # Errors
    /// `Config` if elements of that type cannot have scales.
    pub fn new(dtype: Dtype, scales: Scales) -> Result<RowFormat> {
        if dtype != Dtype::Fp8E4m3 && scales != Scales::None {
            let advice = format!("{dtype} rows carry no scales; use none, or fp8 rows");
            return Err(Error::config("scales", format!("{scales:?}"), advice));
        }
        Ok(RowFormat { dtype, scales })
    }

    /// Type of an element.
    pub fn dtype(self) -> Dtype {
        self.dtype
    }

    /// Scales of a row.
    pub fn scales(self) -> Scales {
        self.scales
    }

    /// Bytes of the elements of a row of `hidden` columns.
    pub fn row_bytes(self, hidden: usize) -> usize {
        hidden.saturating_mul(self.dtype.bytes())
    }

    /// Bytes of the scales of a row of `hidden` columns.
    pub fn scale_bytes(self, hidden: usize) -> usize {
        4 * match self.scales {
            Scales::None => 0,
            Scales::F32 => hidden.div_ceil(SCALE_COLUMNS),
            Scales::Ue8m0 => hidden.div_ceil(4 * SCALE_COLUMNS),
        }
    }
}

impl fmt::Display for RowFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.scales {
            Scales::None => write!(f, "{} rows", self.dtype),
            scales => write!(f, "{} rows with scales {scales:?}", self.dtype),
        }
    }
}
