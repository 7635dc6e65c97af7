//! The commands, a file each. On the thread that runs the program; what they start runs on threads of its own.

pub mod bench;
pub mod doctor;
pub mod plan;
pub mod simulate;
pub mod verify;
