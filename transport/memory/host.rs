//! Host memory that other processes can map: an anonymous file.
//!
//! Place: used by `memory` for the CPU device. Runs on the caller's thread and never waits. The file is sealed
//! against shrinking, and an importer insists on that seal: nobody can take pages away from under a mapping.

use crate::base::memory::{available_bytes, longest_file};
use crate::base::{Error, Result};
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};
use nix::unistd::ftruncate;
use std::ffi::c_void;
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

/// A mapped file, unmapped when dropped.
#[derive(Debug)]
pub(super) struct HostMemory {
    // Before the file: it is unmapped first.
    mapping: Mapping,
    file: OwnedFd,
}

#[derive(Debug)]
struct Mapping {
    base: NonNull<c_void>,
    bytes: usize,
}

// SAFETY: it owns its mapping and hands out the address alone.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl HostMemory {
    /// Zeroed memory.
    pub(super) fn create(bytes: usize) -> Result<HostMemory> {
        if let Some(free) = available_bytes().filter(|free| *free < bytes as u64) {
            return Err(Error::device(
                format!("an arena of {bytes} bytes was asked for and {free} bytes of host memory are free"),
                "plan for fewer tokens, free memory, or raise the limit of its control group",
            ));
        }
        if let Some(longest) = longest_file().filter(|longest| *longest < bytes as u64) {
            return Err(Error::device(
                format!("an arena of {bytes} bytes was asked for and a file of this process may have {longest} bytes"),
                "raise its limit on the size of files (ulimit -f, or LimitFSIZE of its unit), or plan for fewer tokens",
            ));
        }
        let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
        let file =
            memfd_create(c"tokenyard-arena", flags).map_err(|e| failure("making an anonymous file", bytes, e))?;
        let length = i64::try_from(bytes).unwrap_or(i64::MAX);
        ftruncate(&file, length).map_err(|e| failure("sizing an anonymous file", bytes, e))?;
        let seals = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL;
        fcntl(&file, FcntlArg::F_ADD_SEALS(seals)).map_err(|e| failure("sealing an anonymous file", bytes, e))?;
        let mapping = Mapping::of(&file, bytes)?;
        Ok(HostMemory { mapping, file })
    }

    /// A peer's memory, by its descriptor.
    pub(super) fn import(file: OwnedFd, bytes: usize) -> Result<HostMemory> {
        let length = nix::sys::stat::fstat(&file).map_err(|e| failure("measuring a peer's arena", bytes, e))?.st_size;
        let seals = fcntl(&file, FcntlArg::F_GET_SEALS).map_err(|e| failure("asking a peer's seals", bytes, e))?;
        let sealed = SealFlag::from_bits_truncate(seals).contains(SealFlag::F_SEAL_SHRINK);
        if u64::try_from(length).unwrap_or(0) < bytes as u64 || !sealed {
            return Err(Error::device(
                format!("a peer passed a file of {length} bytes, sealed: {sealed}, as an arena of {bytes}"),
                "run the same version of tokenyard on all ranks",
            ));
        }
        let mapping = Mapping::of(&file, bytes)?;
        Ok(HostMemory { mapping, file })
    }

    pub(super) fn base(&self) -> u64 {
        self.mapping.base.as_ptr() as u64
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Mapping {
    fn of(file: &OwnedFd, bytes: usize) -> Result<Mapping> {
        let length = NonZeroUsize::new(bytes).unwrap_or(NonZeroUsize::MIN);
        let access = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice; the file cannot shrink (sealed).
        let base = unsafe { mmap(None, length, access, MapFlags::MAP_SHARED, file, 0) };
        let base = base.map_err(|e| failure("mapping an arena", bytes, e))?;
        Ok(Mapping { base, bytes: length.get() })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped in `of` with this length, unmapped once; maps that hold it are gone.
        let _ = unsafe { munmap(self.base, self.bytes) };
    }
}

fn failure(what: &str, bytes: usize, why: nix::errno::Errno) -> Error {
    Error::device(
        format!("{what} of {bytes} bytes failed: {why}"),
        "plan for fewer tokens, or raise the limits of memory and open files",
    )
    .caused_by(why)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_mappings_of_one_file_are_one_memory() {
        let own = HostMemory::create(10_000).unwrap();
        let peer = HostMemory::import(own.fd().try_clone_to_owned().unwrap(), 10_000).unwrap();
        assert_ne!(own.base(), peer.base());
        // SAFETY: both mappings have 10000 bytes, and only this thread uses them.
        unsafe {
            assert_eq!(*(own.base() as *const u8).add(9_999), 0);
            *(peer.base() as *mut u8).add(9_999) = 7;
            assert_eq!(*(own.base() as *const u8).add(9_999), 7);
        }
    }

    #[test]
    fn a_file_that_is_short_or_could_shrink_is_refused() {
        let own = HostMemory::create(4096).unwrap();
        assert!(HostMemory::import(own.fd().try_clone_to_owned().unwrap(), 8192).is_err());
        let unsealed = memfd_create(c"unsealed", MFdFlags::MFD_ALLOW_SEALING).unwrap();
        ftruncate(&unsealed, 4096).unwrap();
        let why = HostMemory::import(unsealed, 4096).unwrap_err();
        assert!(why.to_string().contains("sealed: false"), "{why}");
    }
}
