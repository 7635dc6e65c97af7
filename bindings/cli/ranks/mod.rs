//! A run and its ranks: their settings, their start, and what each rank calls, times and compares.

pub mod buffers;
pub mod builder;
pub mod calls;
pub mod config;
pub mod faults;
pub mod flag;
pub mod forge;
pub mod gpus;
pub mod hold;
pub mod job;
pub mod launch;
pub mod link;
pub mod meeting;
pub mod network;
pub mod places;
mod random;
pub mod rank;
pub mod real;
pub mod sample;
pub mod slots;
pub mod steps;
pub mod team;
pub mod traffic;
pub mod wake;
