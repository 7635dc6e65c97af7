//! What a configuration is, before anything runs: its words and limits, shapes, inputs, routing and links. Pure, but
//! for the files of routing that it reads.

pub mod case;
pub mod draw;
pub mod inputs;
pub mod limits;
pub mod links;
pub mod presets;
pub mod routing;
pub mod trace_file;
pub mod words;
