//! GDRCopy against a stand-in for its library, which a C compiler makes for each test: it maps host memory, logs its
//! calls, and fails on request.

use super::*;
use std::ffi::{CStr, CString, c_char};
use std::mem::transmute;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::Command;

const SOURCE: &str = r#"
#include <stddef.h>
#include <stdint.h>
#include <string.h>
typedef struct { unsigned long h; } handle;
struct info { uint64_t va, mapped_size; uint32_t page_size; uint64_t tm_cycles; uint32_t cycles_per_ms;
              unsigned mapped : 1, wc_mapping : 1; int mapping_type; };
static char calls[256], failing[16];
static uint64_t before, lie, address, size;
static int note(const char *call) {
  if (*calls) strcat(calls, " ");
  strcat(calls, call);
  return strcmp(call, failing) ? 0 : 12;
}
const char *fake_calls(void) { return calls; }
void fake_fail(const char *call) { strcpy(failing, call); }
void fake_shift(uint64_t mapped_before, uint64_t untrue) { before = mapped_before; lie = untrue; }
void *gdr_open(void) { return note("open") ? NULL : calls; }
int gdr_close(void *g) { return g == calls ? note("close") : note("close?"); }
int gdr_pin_buffer(void *g, unsigned long at, size_t bytes, uint64_t token, uint32_t space, handle *h) {
  (void)g, (void)token, (void)space;
  h->h = 77, address = at, size = bytes;
  return at % 65536 || bytes % 65536 ? 22 : note("pin");
}
int gdr_unpin_buffer(void *g, handle h) { (void)g; return h.h == 77 ? note("unpin") : note("unpin?"); }
int gdr_map(void *g, handle h, void **va, size_t bytes) {
  (void)g;
  *va = (void *)(address - before);
  return h.h == 77 && bytes == size ? note("map") : note("map?");
}
int gdr_unmap(void *g, handle h, void *va, size_t bytes) {
  (void)g, (void)h;
  return va == (void *)(address - before) && bytes == size ? note("unmap") : note("unmap?");
}
int gdr_get_info_v2(void *g, handle h, struct info *info) {
  (void)g, (void)h;
  info->va = address - before + lie, info->mapped_size = size + before, info->mapped = 1;
  return note("info");
}
"#;

/// A stand-in with its own state.
pub(crate) struct Fake {
    folder: tempfile::TempDir,
    library: Library,
}

/// Compiles a library; without a compiler `None`, and a printed line.
fn compile(source: &str) -> Option<tempfile::TempDir> {
    let folder = tempfile::tempdir().unwrap();
    let (c, so) = (folder.path().join("fake.c"), folder.path().join("libfake.so"));
    std::fs::write(&c, source).unwrap();
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".into());
    match Command::new(&compiler).args(["-shared", "-fPIC", "-Wall", "-Werror", "-o"]).arg(&so).arg(&c).status() {
        Ok(status) => assert!(status.success(), "{compiler} failed"),
        Err(why) => {
            println!("skipped: {compiler} cannot be run ({why}), so there is no stand-in for GDRCopy");
            return None;
        }
    }
    Some(folder)
}

impl Fake {
    pub(crate) fn build() -> Option<Fake> {
        let folder = compile(SOURCE)?;
        let library = Library::at(&folder.path().join("libfake.so")).unwrap();
        Some(Fake { folder, library })
    }

    pub(crate) fn library(&self) -> Library {
        self.library
    }

    fn function(&self, name: &CStr) -> *mut c_void {
        let path = CString::new(self.folder.path().join("libfake.so").as_os_str().as_bytes()).unwrap();
        // SAFETY: the library is open already, and stays so; both are C strings.
        let found = unsafe { libc::dlsym(libc::dlopen(path.as_ptr(), libc::RTLD_NOW), name.as_ptr()) };
        assert!(!found.is_null());
        found
    }

    /// The calls so far, in order.
    pub(crate) fn calls(&self) -> String {
        // SAFETY: the type that the source above gives it; it answers a C string.
        unsafe {
            let calls = transmute::<*mut c_void, extern "C" fn() -> *const c_char>(self.function(c"fake_calls"));
            CStr::from_ptr(calls()).to_string_lossy().into_owned()
        }
    }

    /// Lets a call fail from now on.
    pub(crate) fn fail(&self, call: &str) {
        let call = CString::new(call).unwrap();
        // SAFETY: as above.
        let fail = unsafe { transmute::<*mut c_void, extern "C" fn(*const c_char)>(self.function(c"fake_fail")) };
        fail(call.as_ptr());
    }

    /// Lets mappings begin `before` bytes earlier, and reports an address that is off by `lie`.
    fn shift(&self, before: u64, lie: u64) {
        // SAFETY: as above.
        let shift = unsafe { transmute::<*mut c_void, extern "C" fn(u64, u64)>(self.function(c"fake_shift")) };
        shift(before, lie);
    }
}

/// Memory with whole pages in it, for `bytes` of them.
fn memory(bytes: usize) -> (Vec<u8>, u64) {
    let memory = vec![0u8; room_for(bytes)];
    let address = page_in(memory.as_ptr().expose_provenance() as u64);
    (memory, address)
}

fn map(fake: &Fake, address: u64, bytes: usize) -> Result<Mapping> {
    // SAFETY: host memory of the test that calls, which outlives the mapping; the stand-in maps nothing.
    unsafe { Mapping::new(fake.library(), address, bytes) }
}

#[test]
fn a_mapping_that_begins_before_its_memory() {
    let Some(fake) = Fake::build() else { return };
    let (_memory, address) = memory(100_000);
    for before in [0, GPU_PAGE, 3 * GPU_PAGE] {
        fake.shift(before, 0);
        let mapping = map(&fake, address, 100_000).unwrap();
        assert_eq!(mapping.host_ptr() as u64, address);
        // SAFETY: aligned, and inside the memory.
        let word = unsafe { AtomicU64::from_ptr(mapping.host_ptr().cast::<u64>()) };
        store(word, before + 1);
        assert_eq!(word.load(Ordering::Acquire), before + 1);
    }
    assert_eq!(fake.calls().replace("open pin map info unmap unpin close", "all"), "all all all");
}

#[test]
fn a_step_that_fails_and_leaves_the_earlier_ones_done() {
    let cases = [
        ("open", "no driver", "open"),
        ("pin", "gdr_pin_buffer", "open pin close"),
        ("map", "gdr_map", "open pin map unpin close"),
        ("info", "gdr_get_info", "open pin map info unmap unpin close"),
    ];
    for (step, named, calls) in cases {
        let Some(fake) = Fake::build() else { return };
        fake.fail(step);
        let (_memory, address) = memory(8);
        let error = map(&fake, address, 8).map(drop).unwrap_err();
        assert!(matches!(&error, Error::Device { .. }) && error.to_string().contains(named), "{error}");
        assert_eq!(fake.calls(), calls);
    }
    // A step that cannot be undone is left, and the rest is undone.
    let Some(fake) = Fake::build() else { return };
    fake.fail("unmap");
    let (_memory, address) = memory(8);
    map(&fake, address, 8).map(drop).unwrap();
    assert_eq!(fake.calls(), "open pin map info unmap unpin close");
}

#[test]
fn memory_mapped_at_another_place() {
    for (before, lie) in [(0, GPU_PAGE), (GPU_PAGE, 2 * GPU_PAGE), (0, (!0u64) << 20)] {
        let Some(fake) = Fake::build() else { return };
        fake.shift(before, lie);
        let (_memory, address) = memory(8);
        let error = map(&fake, address, 8).map(drop).unwrap_err().to_string();
        assert!(error.contains("mapped"), "{error}");
        assert_eq!(fake.calls(), "open pin map info unmap unpin close");
    }
}

#[test]
fn addresses_that_cannot_be_mapped() {
    let Some(fake) = Fake::build() else { return };
    for (address, bytes) in [(0, 8), (GPU_PAGE + 256, 8), (GPU_PAGE, 0)] {
        assert!(matches!(map(&fake, address, bytes), Err(Error::Argument { .. })), "{bytes} at {address:#x}");
    }
    assert_eq!(fake.calls(), "");
    for bytes in [1, GPU_PAGE as usize, GPU_PAGE as usize + 1] {
        for start in [GPU_PAGE, GPU_PAGE + 256, 2 * GPU_PAGE - 256] {
            let end = page_in(start) + bytes.next_multiple_of(GPU_PAGE as usize) as u64;
            assert!(page_in(start).is_multiple_of(GPU_PAGE) && page_in(start) >= start);
            assert!(end <= start + room_for(bytes) as u64, "{bytes} at {start:#x}");
        }
    }
}

#[test]
fn a_library_that_is_none() {
    let error = Library::at(Path::new("/nowhere/libgdrapi.so.2")).map(drop).unwrap_err().to_string();
    assert!(error.contains("cannot be opened") && error.contains("/nowhere"), "{error}");
    let Some(folder) = compile("void *gdr_open(void) { return 0; }") else { return };
    let error = Library::at(&folder.path().join("libfake.so")).map(drop).unwrap_err().to_string();
    assert!(error.contains("has no gdr_close"), "{error}");
}

#[test]
fn a_setting_misread() {
    let of = |text: &str| GdrCopy::of(Some(text.into()));
    assert_eq!([GdrCopy::of(None), of(""), of("auto")], [Ok(GdrCopy::Auto), Ok(GdrCopy::Auto), Ok(GdrCopy::Auto)]);
    assert_eq!([of("off"), of("require")], [Ok(GdrCopy::Off), Ok(GdrCopy::Require)]);
    for wrong in ["on", "OFF", "1", "required"] {
        assert!(matches!(of(wrong), Err(Error::Config { name: GdrCopy::VARIABLE, .. })), "{wrong}");
    }
    let text = of("off\x1b[31m\r\n").unwrap_err().to_string();
    assert!(!text.contains(char::is_control) && text.contains(r"off\u{1b}[31m\r\n"), "{text:?}");
}
