//! Rules that the tree and its reference keep: layers, imports, bindings, and definitions that results are held to.

#[path = "../reference/mod.rs"]
mod reference;

mod c_header;
mod cycles;
mod ffi;
mod layers;
mod network_ffi;
mod reference_catches;
mod reference_formulas;
