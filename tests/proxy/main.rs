//! The proxy without devices and networks: seeded worlds of its machine, hostile input, and its doorbells.

#[path = "../transport/stub.rs"]
mod stub;

mod proxy_fuzz;
mod proxy_machine;
mod proxy_poll;
