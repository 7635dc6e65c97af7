//! The program, as a process and as a function, and the scripts that show its results.

#[path = "../rig/double.rs"]
mod double;
mod rig;
#[path = "../rig/wire.rs"]
mod wire_table;

#[cfg(feature = "c")]
mod c_interface;
mod cli;
mod cli_efa;
mod cli_nodes;
mod cli_run;
mod figures;
mod large_worlds;
mod pairs;
mod places;
mod plans;
mod real;
mod simulate;
mod topology;
mod values;
mod wire;
