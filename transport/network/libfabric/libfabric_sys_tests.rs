//! The opening of libfabric: the system's, and stand-ins that lack something.

use super::*;
use crate::transport::network::library::tests::{compile, skip};

const FUNCTIONS: &str = "int fi_getinfo(void) { return -61; } void fi_freeinfo(void *i) { (void)i; }\
                         void *fi_dupinfo(void *i) { return i; } int fi_fabric(void) { return 0; }\
                         const char *fi_strerror(int e) { return e == 61 ? \"no data\" : 0; }";

fn version(major: u32, minor: u32) -> String {
    format!("unsigned fi_version(void) {{ return {major}u << 16 | {minor}u; }}")
}

#[test]
fn a_libfabric_that_is_not_there_is_named_with_the_packages() {
    let error = Library::at(Path::new("/nowhere/libfabric.so.1")).unwrap_err();
    assert!(matches!(&error, Error::Transport { fatal: false, .. }));
    let text = error.to_string();
    for part in ["/nowhere/libfabric.so.1 cannot be opened", "libfabric1", VARIABLE] {
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn a_libfabric_that_is_too_old_is_refused_and_no_other() {
    for ((major, minor), taken) in [((1, 16), false), ((1, 17), true), ((2, 0), true), ((0, 99), false)] {
        let Some((_folder, path)) = compile(&format!("{}{FUNCTIONS}", version(major, minor))) else { return };
        match Library::at(&path) {
            Ok(library) => assert!(taken && library.version() == Version::new(major as u16, minor as u16)),
            Err(error) => {
                let text = error.to_string();
                assert!(!taken && text.contains(&format!("libfabric {major}.{minor}, and 1.17 is wanted")), "{text}");
            }
        }
    }
}

#[test]
fn a_libfabric_that_lacks_a_function() {
    for name in ["fi_getinfo", "fi_freeinfo", "fi_dupinfo", "fi_fabric", "fi_strerror", "fi_version"] {
        let source = format!("{}{FUNCTIONS}", version(2, 1)).replace(name, "fi_other");
        let Some((_folder, path)) = compile(&source) else { return };
        let text = Library::at(&path).unwrap_err().to_string();
        assert!(text.contains(&format!("has no {name}")) && text.contains("libfabric1"), "{text}");
    }
}

#[test]
fn the_version_asked_for_is_never_newer_than_either_side() {
    for ((major, minor), asked) in [((1, 20), (1, 20)), ((2, 6), (2, 6)), ((2, 7), (2, 6)), ((3, 0), (2, 6))] {
        let Some((_folder, path)) = compile(&format!("{}{FUNCTIONS}", version(major, minor))) else { return };
        let library = Library::at(&path).unwrap();
        assert_eq!(library.asked(), Version::new(asked.0, asked.1));
        assert_eq!(library.path(), path);
        assert!(std::ptr::eq(library, Library::at(&path).unwrap()));
        assert_eq!(library.providers().unwrap(), Vec::<String>::new());
        assert_eq!((library.strerror(-61), library.strerror(5)), ("no data".into(), "error 5".into()));
    }
    assert_eq!(NEWEST.to_string(), "2.6");
}

#[test]
fn the_systems_libfabric_lists_its_providers() {
    match Library::at(Path::new(USUAL)) {
        Ok(library) => {
            let providers = library.providers().unwrap();
            for name in ["tcp", "shm"] {
                assert!(providers.iter().any(|provider| provider.split(';').any(|part| part == name)), "{providers:?}");
            }
            assert!(library.path().is_absolute() && library.strerror(-FI_EAGAIN).contains("temporarily"));
        }
        Err(error) => skip(&error.to_string()),
    }
}

#[test]
fn a_field_of_a_later_version_is_not_read_of_an_earlier_library() {
    // As long as an earlier library makes it: the field would lie behind its end.
    let early = [0xffu64; 24];
    let late = [0u64; 26];
    // SAFETY: the second is as long as the struct; of the first nothing is read.
    unsafe {
        assert_eq!(fi_domain_attr::max_ep_auth_key(early.as_ptr().cast(), Version::new(1, 19)), None);
        assert_eq!(fi_domain_attr::max_ep_auth_key(late.as_ptr().cast(), Version::new(1, 20)), Some(0));
    }
}

/// A read that answers how many entries it was asked for.
unsafe extern "C" fn read(_: *mut fid_cq, _: *mut c_void, count: usize) -> libc::ssize_t {
    count as libc::ssize_t
}

#[test]
fn a_table_that_lacks_a_function_answers_enosys() {
    // SAFETY: objects of plain data, whose tables are null or lie on this stack; no entry is written.
    unsafe {
        let mut made: fi_ops_cq = std::mem::zeroed();
        let table = &raw mut made;
        let mut cq: fid_cq = std::mem::zeroed();
        let lacking = -FI_ENOSYS as libc::ssize_t;
        assert_eq!(fi_cq_read(&mut cq, std::ptr::null_mut(), 3), lacking, "no table");
        cq.ops = table;
        (*table).read = Some(read);
        (*table).size = std::mem::offset_of!(fi_ops_cq, read);
        assert_eq!(fi_cq_read(&mut cq, std::ptr::null_mut(), 3), lacking, "a table that ends before it");
        (*table).size = size_of::<fi_ops_cq>();
        assert_eq!(fi_cq_read(&mut cq, std::ptr::null_mut(), 3), 3);
        assert_eq!(fi_cq_readerr(&mut cq, std::ptr::null_mut(), 0), lacking, "no function");
        assert!(fi_cq_strerror(&mut cq, 1, std::ptr::null(), std::ptr::null_mut(), 0).is_null());
    }
}
