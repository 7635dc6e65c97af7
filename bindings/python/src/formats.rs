//! Formats of calls.

use super::calls;
use super::numbers::number;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use tokenyard::{CallFormat, Dtype, RowFormat, Scales, Weights};

/// What the rows of a call are, and how many tokens a rank may have in it: `tokenyard.Format`. A context has one, makes
/// room for others (`room_for`), and each dispatch may state one, the same on all ranks.
///
/// `hidden`: columns of a row. `max_tokens`: most tokens of a rank in such a call. `dtype` ("bf16", "fp16", "fp32",
/// "fp8") and `scales` (None, "fp32", "ue8m0"): of dispatched rows. `quantize`: dispatch takes bf16, and makes them.
/// `combine_dtype`: of the experts' outputs. `weights`: where they come from ("dispatch", "combine", "none").
#[pyclass(frozen, eq, hash, module = "tokenyard")]
#[derive(Clone, PartialEq, Eq, Hash)]
pub(super) struct Format {
    pub inner: CallFormat,
}

#[pymethods]
impl Format {
    #[new]
    #[pyo3(signature = (
        hidden, max_tokens, *, dtype="bf16", scales=None, quantize=false, combine_dtype="bf16", weights="dispatch"
    ))]
    // The parameters are Python's keywords.
    #[allow(clippy::too_many_arguments)]
    pub fn new(
        py: Python<'_>,
        hidden: &Bound<'_, PyAny>,
        max_tokens: &Bound<'_, PyAny>,
        dtype: &str,
        scales: Option<&str>,
        quantize: bool,
        combine_dtype: &str,
        weights: &str,
    ) -> PyResult<Format> {
        let (hidden, max_tokens) = (number("hidden", hidden)?, number("max_tokens", max_tokens)?);
        let inner = CallFormat::new(hidden, calls::row_format(py, dtype, scales)?, max_tokens)
            .quantize(quantize)
            .combine_dtype(calls::dtype("combine_dtype", combine_dtype)?)
            .weights(calls::weights(weights)?);
        Ok(Format { inner })
    }

    #[getter]
    fn hidden(&self) -> usize {
        self.inner.hidden
    }

    #[getter]
    fn max_tokens(&self) -> usize {
        self.inner.max_tokens
    }

    #[getter]
    fn dtype(&self) -> &'static str {
        name(self.inner.rows.dtype())
    }

    #[getter]
    fn scales(&self) -> Option<&'static str> {
        scales(self.inner.rows)
    }

    #[getter]
    fn quantize(&self) -> bool {
        self.inner.quantize
    }

    #[getter]
    fn combine_dtype(&self) -> &'static str {
        name(self.inner.combine_dtype)
    }

    #[getter]
    fn weights(&self) -> &'static str {
        match self.inner.weights {
            Weights::Combine => "combine",
            Weights::None => "none",
            _ => "dispatch",
        }
    }

    /// The arguments that make it again, for pickle and copy.
    fn __getnewargs_ex__<'py>(&self, py: Python<'py>) -> PyResult<((usize, usize), Bound<'py, PyDict>)> {
        let keywords = PyDict::new(py);
        keywords.set_item("dtype", self.dtype())?;
        keywords.set_item("scales", self.scales())?;
        keywords.set_item("quantize", self.quantize())?;
        keywords.set_item("combine_dtype", self.combine_dtype())?;
        keywords.set_item("weights", self.weights())?;
        Ok(((self.hidden(), self.max_tokens()), keywords))
    }

    fn __repr__(&self) -> String {
        let scales = self.scales().map_or("None".to_owned(), |scales| format!("'{scales}'"));
        format!(
            "Format({}, {}, dtype='{}', scales={scales}, quantize={}, combine_dtype='{}', weights='{}')",
            self.inner.hidden,
            self.inner.max_tokens,
            self.dtype(),
            if self.inner.quantize { "True" } else { "False" },
            self.combine_dtype(),
            self.weights()
        )
    }
}

impl Format {
    /// Dtype of what dispatch reads.
    pub fn input(&self) -> Dtype {
        if self.inner.quantize { Dtype::Bf16 } else { self.inner.rows.dtype() }
    }

    /// Words of a row's scales; None without scales.
    pub fn scale_words(&self) -> Option<usize> {
        self.scales().map(|_| self.inner.rows.scale_bytes(self.inner.hidden) / 4)
    }
}

/// What Python calls a dtype.
fn name(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::Bf16 => "bf16",
        Dtype::Fp16 => "fp16",
        Dtype::Fp32 => "fp32",
        _ => "fp8",
    }
}

fn scales(rows: RowFormat) -> Option<&'static str> {
    match rows.scales() {
        Scales::F32 => Some("fp32"),
        Scales::Ue8m0 => Some("ue8m0"),
        _ => None,
    }
}
