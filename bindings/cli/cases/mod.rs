//! Configurations, before anything runs: words and limits, shapes, inputs, routing and links. Pure, except for reading
//! routing files.

pub mod case;
pub mod draw;
pub mod inputs;
pub mod limits;
pub mod links;
mod mixed;
pub mod presets;
mod refused;
pub mod routing;
pub mod trace_file;
pub mod words;
