//! The libibverbs double (tests/doubles) by the bindings that the verbs network opens it with.

use crate::double;
use std::ffi::{CStr, c_int};
use std::path::Path;
use std::process::Command;
use tokenyard::internals::transport::network::verbs::ibverbs_sys::{
    IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_REMOTE_WRITE, Library,
};

#[test]
fn the_bindings_find_what_each_version_has() {
    let (Some(double), Some(first)) = (double::ibverbs(), double::first_ibverbs()) else { return };
    assert_eq!(Library::at(double).unwrap().offers(), "dma-buf, relaxed ordering, types of GIDs");
    assert_eq!(Library::at(first).unwrap().offers(), "nothing optional");
}

/// Set in the process of its own that registers memory, since the double's settings are of its whole process.
const ALONE: &str = "TOKENYARD_TEST_ALONE";

#[test]
fn a_registration_is_read_from_the_log_by_another_process() {
    let Some(library) = double::ibverbs() else { return };
    if std::env::var_os(ALONE).is_some() {
        return register(library);
    }
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("log");
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["ibverbs::a_registration_is_read_from_the_log_by_another_process", "--exact", "--nocapture"])
        .envs([(ALONE, "1"), ("TOKENYARD_IBVERBS_DEVICES", "mlx5_7"), ("TOKENYARD_IBVERBS_MEMLOCK", "4096")])
        .env("TOKENYARD_IBVERBS_LOG", &log)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let events = double::ibverbs_log(&log);
    let seen: Vec<_> = events.iter().map(|e| (e["event"].as_str().unwrap(), e["device"].as_str().unwrap())).collect();
    assert_eq!(seen, [("register", "mlx5_7"), ("refuse", "mlx5_7"), ("deregister", "mlx5_7")]);
    assert_eq!((&events[0]["kind"], &events[0]["length"]), (&"plain".into(), &4096.into()));
    assert_eq!((&events[1]["rule"], &events[1]["errno"]), (&"memlock".into(), &libc::ENOMEM.into()));
    assert_eq!(events[2]["lkey"], events[0]["lkey"]);
}

/// Registers a page, fails to register two, and closes what it opened.
fn register(library: &Path) {
    let library = Library::at(library).unwrap();
    let access = (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE) as c_int;
    let page = std::alloc::Layout::from_size_align(8192, 4096).unwrap();
    let mut count = 0;
    // SAFETY: the library's calls in their order, with objects that it gave and memory that lives as long as its
    // regions.
    unsafe {
        let memory = std::alloc::alloc_zeroed(page);
        let devices = (library.ibv_get_device_list)(&mut count);
        assert_eq!((count, CStr::from_ptr((library.ibv_get_device_name)(*devices))), (1, c"mlx5_7"));
        let context = (library.ibv_open_device)(*devices);
        (library.ibv_free_device_list)(devices);
        let pd = (library.ibv_alloc_pd)(context);
        let region = (library.ibv_reg_mr)(pd, memory.cast(), 4096, access);
        assert!(!region.is_null());
        assert!((library.ibv_reg_mr)(pd, memory.cast(), 8192, access).is_null());
        assert_eq!((library.ibv_dereg_mr)(region), 0);
        assert_eq!((library.ibv_dealloc_pd)(pd), 0);
        assert_eq!((library.ibv_close_device)(context), 0);
        std::alloc::dealloc(memory, page);
    }
}
