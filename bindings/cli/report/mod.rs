//! Results for machines and for people. After the data path, on the thread that runs the program.

pub mod deepep;
pub mod plot;
pub mod result;
pub mod table;
pub mod tally;
pub mod trace;
