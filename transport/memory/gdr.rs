//! GPU memory that the processor writes: mapped through GDRCopy, whose library is opened at run time
//! (`gdrcopy_sys.rs`).
//!
//! Place in the data path: under the words that a proxy writes and its GPU polls. In pinned host memory each poll of
//! the GPU crosses PCIe and comes back; here it stays on the GPU, and the proxy's store crosses once. Only the words'
//! addresses differ. Mapped while a context is built, on the caller's thread; stored to by the proxy's
//! thread.
//!
//! **It has not run on hardware**: where it was written there is no GDRCopy. Its calls, errors and unwinding are tested
//! against a stand-in for the library that maps host memory.
//!
//! The mapping combines writes: a store may wait in the processor for others to the same line, and pass or be passed by
//! stores to other memory. So a word is written between two [`write_barrier`]s: the first orders all earlier stores
//! before the word, the second sends the word off (without it GDRCopy's authors saw a millisecond go by). GDRCopy
//! promises nothing about words torn or reordered on their way to a running kernel. This module relies on an aligned
//! store of 8 bytes arriving whole, and needs no order between words. For a NIC's payload, the NIC's backend ensures
//! that the GPU has it before its immediate is handed out (P1).
//!
//! ```text
//!   gdr_open ─▶ gdr_pin_buffer ─▶ gdr_map ─▶ gdr_get_info: where is it?
//!       ▲ close ◀── unpin ◀────────── unmap ◀── dropped, or a later step failed
//! ```

pub use super::gdrcopy_sys::Library;
use super::gdrcopy_sys::{GPU_PAGE_SIZE as GPU_PAGE, gdr_info_v2_t, gdr_mh_t, gdr_t};
use crate::base::{Error, Result};
use std::ffi::{OsString, c_int, c_ulong, c_void};
use std::sync::atomic::{AtomicU64, Ordering};

/// Whether the words that a proxy writes lie in GPU memory, mapped by GDRCopy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum GdrCopy {
    /// Never: in pinned host memory.
    Off,
    /// Where it works; in pinned host memory elsewhere.
    #[default]
    Auto,
    /// Where it does not work, building a context is an error.
    Require,
}

impl GdrCopy {
    /// The variable that [`from_env`](Self::from_env) reads.
    pub const VARIABLE: &'static str = "TOKENYARD_GDRCOPY";

    /// `TOKENYARD_GDRCOPY`: off, auto (also where it is not set) or require.
    ///
    /// # Errors
    /// `Config` for anything else.
    pub fn from_env() -> Result<GdrCopy> {
        GdrCopy::of(std::env::var_os(GdrCopy::VARIABLE))
    }

    fn of(value: Option<OsString>) -> Result<GdrCopy> {
        let Some(value) = value else { return Ok(GdrCopy::Auto) };
        match value.to_str() {
            Some("off") => Ok(GdrCopy::Off),
            Some("auto" | "") => Ok(GdrCopy::Auto),
            Some("require") => Ok(GdrCopy::Require),
            _ => Err(Error::config(GdrCopy::VARIABLE, format!("{value:?}"), "set it to off, auto or require")),
        }
    }
}

fn error(what: String, advice: &str) -> Error {
    Error::device(what, advice)
}

/// Bytes to allocate on a GPU so that [`page_in`] finds `bytes` of whole pages in them.
pub fn room_for(bytes: usize) -> usize {
    bytes.next_multiple_of(GPU_PAGE as usize) + GPU_PAGE as usize
}

/// The first page of an allocation of [`room_for`].
pub fn page_in(address: u64) -> u64 {
    address.next_multiple_of(GPU_PAGE)
}

/// An open library; closed when dropped.
struct Session {
    library: Library,
    gdr: gdr_t,
}

impl Drop for Session {
    fn drop(&mut self) {
        // SAFETY: opened in `Mapping::new`, and closed once; nothing is pinned any more.
        unsafe { (self.library.gdr_close)(self.gdr) };
    }
}

/// Pinned memory; unpinned when dropped.
struct Pinned {
    session: Session,
    handle: gdr_mh_t,
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: pinned in `Mapping::new` by the same `gdr_t`, unpinned once, and not mapped any more.
        unsafe { (self.session.library.gdr_unpin_buffer)(self.session.gdr, self.handle) };
    }
}

/// GPU memory, mapped for this process to write; unmapped when dropped, which must be before the memory is freed.
pub struct Mapping {
    pin: Pinned,
    va: *mut c_void,
    bytes: usize,
    host: *mut u8,
}

// SAFETY: it hands out an address alone, and the library is called again in drop only, with a session of its own.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl std::fmt::Debug for Mapping {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Mapping({} bytes at {:p})", self.bytes, self.host)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        let session = &self.pin.session;
        // SAFETY: mapped in `new` with this length, and unmapped once; whoever had the address is gone.
        unsafe { (session.library.gdr_unmap)(session.gdr, self.pin.handle, self.va, self.bytes) };
    }
}

impl Mapping {
    /// Maps whole pages of GPU memory from `address` on, so that the first `bytes` of them can be written.
    ///
    /// # Errors
    /// `Argument` if the address is not a page's; `Device` that names the step that failed. Earlier steps are undone.
    ///
    /// # Safety
    /// The pages are memory of a GPU of this process, which outlives the mapping.
    pub unsafe fn new(library: Library, address: u64, bytes: usize) -> Result<Mapping> {
        if address == 0 || !address.is_multiple_of(GPU_PAGE) || bytes == 0 {
            return Err(Error::argument(
                "address",
                format!("{bytes} bytes at {address:#x}"),
                format!("give some bytes that begin at a multiple of {GPU_PAGE}"),
            ));
        }
        barrier_is_known()?;
        let bytes = bytes.next_multiple_of(GPU_PAGE as usize);
        let failed = |step: &str, code: c_int| {
            let why = std::io::Error::from_raw_os_error(code);
            let what = format!("GDRCopy's {step} of {bytes} bytes of GPU memory failed: {why}");
            error(what, "see the kernel's log and the GPU's free BAR1 memory, or set TOKENYARD_GDRCOPY=off")
                .caused_by(why)
        };
        // SAFETY: takes nothing.
        let gdr = unsafe { (library.gdr_open)() };
        if gdr.is_null() {
            let advice = "load its kernel module and see who may open /dev/gdrdrv, or set TOKENYARD_GDRCOPY=off";
            return Err(error("GDRCopy's library is there and finds no driver".into(), advice));
        }
        // From here on, dropping undoes each step.
        let session = Session { library, gdr };
        let mut handle = gdr_mh_t { h: 0 };
        // SAFETY: a live session; memory of a GPU by the caller's promise; the handle outlives the call.
        let code = unsafe { (library.gdr_pin_buffer)(gdr, address as c_ulong, bytes, 0, 0, &mut handle) };
        if code != 0 {
            return Err(failed("gdr_pin_buffer", code));
        }
        let pin = Pinned { session, handle };
        let mut va = std::ptr::null_mut();
        // SAFETY: pinned above with that length; the pointer outlives the call.
        let code = unsafe { (library.gdr_map)(gdr, handle, &mut va, bytes) };
        if code != 0 || va.is_null() {
            return Err(failed("gdr_map", code));
        }
        let mut mapping = Mapping { pin, va, bytes, host: std::ptr::null_mut() };
        let mut info = gdr_info_v2_t::default();
        // SAFETY: mapped above; the struct is longer than what a library of this interface fills.
        let code = unsafe { (library.gdr_get_info_v2)(gdr, handle, &mut info) };
        if code != 0 {
            return Err(failed("gdr_get_info", code));
        }
        // The driver may have mapped more, from an earlier address on.
        let before = address.checked_sub(info.va).filter(|before| before + bytes as u64 <= info.mapped_size);
        let Some(before) = before else {
            let what = format!("GDRCopy mapped {} bytes at {:#x}, not {address:#x}", info.mapped_size, info.va);
            return Err(error(what, "update GDRCopy, or set TOKENYARD_GDRCOPY=off"));
        };
        mapping.host = va.cast::<u8>().wrapping_add(before as usize);
        Ok(mapping)
    }

    /// This process's address of the first byte. To be written only by aligned words, between two [`write_barrier`]s.
    pub fn host_ptr(&self) -> *mut u8 {
        self.host
    }
}

/// An error on processors for which no instruction to send off combined writes is known.
fn barrier_is_known() -> Result<()> {
    if cfg!(target_arch = "x86_64") {
        return Ok(());
    }
    let what = format!("writes to mapped GPU memory cannot be ordered on {}", std::env::consts::ARCH);
    Err(error(what, "leave TOKENYARD_GDRCOPY at auto or off: words then lie in pinned host memory"))
}

/// A barrier that no store passes, to whatever kind of memory; it sends off combined writes.
pub fn write_barrier() {
    // SAFETY: every x86-64 processor has it, and it touches no memory of ours.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

/// Writes a word that lies in a mapping: everything that this thread wrote or saw before is visible first, and the word
/// is on its way when this returns.
pub fn store(word: &AtomicU64, value: u64) {
    write_barrier();
    word.store(value, Ordering::Release);
    write_barrier();
}

#[cfg(test)]
#[path = "gdr_tests.rs"]
pub(crate) mod tests;
