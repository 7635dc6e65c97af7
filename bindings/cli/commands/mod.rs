//! The commands, one file each. On the thread that runs the program; ranks run on threads of their own.

pub mod bench;
pub mod doctor;
pub mod plan;
pub mod simulate;
pub mod topology;
pub mod verify;
pub mod wire;
