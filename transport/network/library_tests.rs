//! Stand-ins for libraries, which a C compiler makes for each test, and what is said of libraries that are none.

use super::*;
use std::process::Command;

/// Prints why a test cannot run; fails where nothing may be skipped.
pub(crate) fn skip(why: &str) {
    assert!(std::env::var_os("TOKENYARD_STRICT").is_none_or(|strict| strict != "1"), "{why}");
    println!("skipped: {why}");
}

/// Compiles a library; its path holds as long as the folder. Without a compiler `None`.
pub(crate) fn compile(source: &str) -> Option<(tempfile::TempDir, PathBuf)> {
    let folder = tempfile::tempdir().unwrap();
    let (c, so) = (folder.path().join("fake.c"), folder.path().join("libfake.so"));
    std::fs::write(&c, source).unwrap();
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".into());
    match Command::new(&compiler).args(["-shared", "-fPIC", "-Wall", "-Werror", "-o"]).arg(&so).arg(&c).status() {
        Ok(status) => assert!(status.success(), "{compiler} failed"),
        Err(why) => {
            skip(&format!("{compiler} cannot be run ({why}), so there is no stand-in for a library"));
            return None;
        }
    }
    Some((folder, so))
}

#[test]
fn a_library_is_opened_once_and_a_failure_again() {
    static KNOWN: Registry<u32> = Registry::new();
    let fails = |_: &Path| Err(Error::transport("nothing there", "look again"));
    assert!(KNOWN.get(Path::new("a"), fails).is_err());
    let first = KNOWN.get(Path::new("a"), |_| Ok(1)).unwrap();
    let again = KNOWN.get(Path::new("a"), |_| Ok(2)).unwrap();
    let other = KNOWN.get(Path::new("b"), |_| Ok(3)).unwrap();
    assert!(std::ptr::eq(first, again));
    assert_eq!((*first, *other), (1, 3));
}

#[test]
fn a_function_is_found_and_the_file_that_has_it() {
    let Some((_folder, path)) = compile("int there(void) { return 7; }") else { return };
    let library = Opened::at(&path, "advice").unwrap();
    assert_eq!(library.file_of(library.function(c"there").unwrap()), path);
    assert!(library.optional(c"absent").is_none());
    let error = library.function(c"absent").unwrap_err().to_string();
    assert!(error.contains("has no absent") && error.ends_with("advice"), "{error}");
}

#[test]
fn paths_and_the_loaders_reasons_are_shown_in_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let odd = folder.path().join("odd\x1b[31m\r\nname");
    let why = Opened::at(&odd, "advice").unwrap_err().to_string();
    assert_eq!(why.matches("odd\\u{1b}[31m\\r\\nname").count(), 2, "{why}");
    assert!(why.contains(" cannot be opened: ") && !why.contains(char::is_control), "{why}");
}
