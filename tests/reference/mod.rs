//! The independent reference: what dispatch and combine must produce, written down by definition.
//!
//! Place in the data path: after it. The command line and the tests give it a run's inputs and the bytes that
//! the run left, and it reports which elements are wrong and how. It runs on the caller's thread and allocates freely.
//! It imports nothing but `std`, and nothing of the library under test, so that a mistake in one cannot be repeated
//! in the other; a test searches these files for such an import.
//!
//! | file | holds |
//! |---|---|
//! | `elem` | codecs of the element types |
//! | `spec` | what was asked for, and by whom which token was routed where |
//! | `expect` | which row must stand where: a sort by (expert, source rank, token) |
//! | `expert` | the functions that stand in for experts, a different one for each |
//! | `quantize` | rows of a rank that quantises, and partial rows of fp8 |
//! | `dispatch` | comparison of dispatched buffers, bit for bit |
//! | `combine` | comparison of combined rows against sums at f64, within a derived bound, and bit for bit |
//! | `payload` | comparison of the side payload of combine, bit for bit |
//! | `explain` | what a wrong row looks like: swapped, lost, doubled, somebody else's |
//! | `explain_sum` | what a wrong sum looks like: an expert missing, doubled, exchanged, weights swapped, a node lost |
//! | `report` | counts and sentences |

// Each place that mounts this module uses a part of it.
#![allow(dead_code, unused_imports)]

mod combine;
mod dispatch;
pub mod elem;
mod expect;
pub mod expert;
mod explain;
mod explain_sum;
mod payload;
mod quantize;
mod report;
mod spec;

pub use combine::{ObservedCombine, TokenSums, check_combine};
pub use dispatch::{ObservedDispatch, check_dispatch, scale_index, scale_total_words};
pub use elem::Elem;
pub use expect::{Expected, Place, Slot, dropped_rows, expected_dispatch};
pub use payload::{ObservedPayload, check_payload};
pub use quantize::{carried_by_fp8, fp8_error, quantized_row, quantized_scales};
pub use report::Report;
pub use spec::{Faults, Layout, Partial, RowSource, ScaleOrder, Scales, SourceRank, Spec, Weights, bad_routing};
