//! The C interface: `tokenyard.h`, which cbindgen makes of this folder, and the functions behind it.
//!
//! Place in the data path: before `api`. A function looks at its pointers, makes the Rust arguments of them, and calls
//! `api`. Runs on the caller's thread. Calls that enqueue work allocate nothing beyond what Rust's calls allocate, and
//! make texts of errors alone.
//!
//! Rules that hold for every function:
//!
//! - A function that can fail returns a status. [`tokenyard_last_error`](status::tokenyard_last_error) has the text of
//!   the last failure of the calling thread. No panic leaves a function: it becomes `TOKENYARD_INTERNAL`.
//! - A pointer to an object is NULL or comes from the function that made the object. NULL is refused by name, except
//!   by functions that destroy. A destroyed object is gone: nothing can find that out. Waits for other ranks and for
//!   streams hold copies, though, so that they outlast their objects.
//! - A struct that the caller fills in begins with its size, and 0 in any other field stands for the default. So a
//!   later version can add fields at the end: programs that were built before leave them 0.
//! - The child of a fork may only destroy its copies of objects, which does nothing. Nothing else finds a copy out.
//! - The caller keeps the memory of views until the work that uses them is done: [`View::from_raw`] has the terms.
//!
//! | what | file |
//! |---|---|
//! | statuses, the last error of a thread | `status` |
//! | pointers and structs of the caller | `arguments` |
//! | numbers that stand for choices, and views | `values` |
//! | worlds, and all-gathers of the caller | `world` |
//! | devices, memory | `device` |
//! | networks between nodes | `proxy` |
//! | streams, events, graphs | `stream` |
//! | contexts: their configuration, errors and state | `config`, `context` |
//! | structs of calls | `calls` |
//! | dispatch and combine, and what is under way | `dispatch`, `again`, `combine`, `flight` |
//! | ends of waits before their deadlines | `interrupt` |
//!
//! Left out: networks of the caller's own and emulated ones, and most settings of networks; `AllToAll::flag_place`,
//! `dispatch_statistics`, `combine_statistics` and `dispatched_bytes`; `Plan::explain` and `buffers`;
//! `Tuning::gdrcopy`, for which there is `TOKENYARD_GDRCOPY`; `World::agree` and `exchange_fds`; joining a later
//! generation from outside; topology; the program.
//!
//! [`View::from_raw`]: crate::kernels::View::from_raw

#![allow(
    non_camel_case_types,
    clippy::missing_safety_doc,
    clippy::enum_variant_names,
    reason = "names are those of the header, and the head of this module has the terms of all functions"
)]

pub mod again;
mod arguments;
pub mod calls;
pub mod combine;
pub mod config;
pub mod context;
pub mod device;
pub mod dispatch;
pub mod flight;
pub mod interrupt;
pub mod proxy;
pub mod status;
pub mod stream;
pub mod values;
pub mod world;

#[cfg(test)]
mod tests {
    use super::arguments::Versioned;

    fn has_not_grown<T: Versioned>() {
        assert_eq!(size_of::<T>(), T::FIRST, "{}", std::any::type_name::<T>());
    }

    /// A struct that grows leaves this list. Its first version stays as it was.
    #[test]
    fn structs_of_the_first_version_have_its_sizes() {
        has_not_grown::<super::status::tokenyard_error_info_t>();
        has_not_grown::<super::world::tokenyard_over_t>();
        has_not_grown::<super::world::tokenyard_bootstrap_t>();
        has_not_grown::<super::world::tokenyard_world_info_t>();
        has_not_grown::<super::device::tokenyard_device_info_t>();
        has_not_grown::<super::proxy::tokenyard_proxy_config_t>();
        has_not_grown::<super::config::tokenyard_tuning_t>();
        has_not_grown::<super::config::tokenyard_config_t>();
        has_not_grown::<super::context::tokenyard_context_info_t>();
        has_not_grown::<super::context::tokenyard_in_place_t>();
        has_not_grown::<super::calls::tokenyard_tokens_t>();
        has_not_grown::<super::calls::tokenyard_output_t>();
        has_not_grown::<super::calls::tokenyard_rows_t>();
        has_not_grown::<super::calls::tokenyard_combined_t>();
        has_not_grown::<super::calls::tokenyard_new_rows_t>();
        has_not_grown::<super::calls::tokenyard_placed_t>();
    }
}
