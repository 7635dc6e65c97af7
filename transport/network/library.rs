//! Shared libraries that are opened at run time, so that nothing needs them to build or to start.
//!
//! Place in the data path: none; a backend's raw bindings use it when they are opened, on the caller's thread. A
//! library is opened once a process and path and never closed: its threads and its functions' addresses
//! outlive every user.

use crate::base::{Error, Result, quoted};
use std::ffi::{CStr, CString, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// An open shared library.
#[derive(Debug)]
pub(super) struct Opened {
    handle: *mut c_void,
    path: PathBuf,
    advice: &'static str,
}

// SAFETY: the handle is only given to dlsym, which any thread may call.
unsafe impl Send for Opened {}
// SAFETY: as above.
unsafe impl Sync for Opened {}

/// The text of `dlerror` for the last call.
fn reason() -> String {
    // SAFETY: answers null or a C string that lives until this thread's next call.
    let text = unsafe { libc::dlerror() };
    if text.is_null() {
        return "no reason given".into();
    }
    // SAFETY: as above.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

impl Opened {
    /// The library of that path, or of that name where it has no slash. `advice` goes into every error about it.
    ///
    /// # Errors
    /// `Transport` with the loader's reason.
    pub(super) fn at(path: &Path, advice: &'static str) -> Result<Opened> {
        let closed = |why: &str| {
            let (path, why) = (quoted(path.as_os_str().as_bytes()), quoted(why.as_bytes()));
            Error::transport(format!("{path} cannot be opened: {why}"), advice)
        };
        let name = CString::new(path.as_os_str().as_bytes());
        let name = name.map_err(|_| Error::transport(format!("{path:?} is no path of a library"), advice))?;
        // The loader would wait for the writer of a pipe.
        let piped = |about: std::fs::Metadata| !about.is_file() && !about.is_dir();
        if name.as_bytes().contains(&b'/') && std::fs::metadata(path).is_ok_and(piped) {
            return Err(closed("it is no file"));
        }
        let handlers = Handlers::now();
        // SAFETY: a C string; initialisers run that the caller asked for by the library's name.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        handlers.put_back();
        if handle.is_null() {
            return Err(closed(&reason()));
        }
        Ok(Opened { handle, path: path.to_owned(), advice })
    }

    /// A function's address, if the library has it.
    pub(super) fn optional(&self, name: &CStr) -> Option<*mut c_void> {
        // SAFETY: an open library and a C string.
        let found = unsafe { libc::dlsym(self.handle, name.as_ptr()) };
        (!found.is_null()).then_some(found)
    }

    /// A function's address.
    ///
    /// # Errors
    /// `Transport` that names the function, if the library lacks it.
    pub(super) fn function(&self, name: &CStr) -> Result<*mut c_void> {
        let lack = || {
            let path = quoted(self.path.as_os_str().as_bytes());
            Error::transport(format!("{path} has no {}", name.to_string_lossy()), self.advice)
        };
        self.optional(name).ok_or_else(lack)
    }

    /// The file that a function of this library came from; the path it was opened by where the loader does not tell.
    pub(super) fn file_of(&self, function: *mut c_void) -> PathBuf {
        // SAFETY: plain data; dladdr fills it.
        let mut found: libc::Dl_info = unsafe { std::mem::zeroed() };
        // SAFETY: any address may be asked for.
        let known = unsafe { libc::dladdr(function, &mut found) } != 0 && !found.dli_fname.is_null();
        if !known {
            return self.path.clone();
        }
        // SAFETY: a C string of the loader, which lives as long as the library, and that is never closed.
        let name = unsafe { CStr::from_ptr(found.dli_fname) };
        PathBuf::from(std::ffi::OsStr::from_bytes(name.to_bytes()))
    }
}

/// The process's handlers of the signals that end it. Initialisers of libraries set handlers of their own: libfabric
/// loads libpsm2 and libinfinipath, whose handlers of SIGINT and SIGTERM end the process with status 1 and no word, in
/// place of Ctrl-C's and of an engine's.
struct Handlers(Vec<(libc::c_int, libc::sigaction)>);

impl Handlers {
    const OF: [libc::c_int; 9] = [
        libc::SIGHUP,
        libc::SIGINT,
        libc::SIGQUIT,
        libc::SIGTERM,
        libc::SIGABRT,
        libc::SIGBUS,
        libc::SIGFPE,
        libc::SIGILL,
        libc::SIGSEGV,
    ];

    fn now() -> Handlers {
        let of = |signal: &libc::c_int| {
            // SAFETY: plain data; sigaction fills it.
            let mut found: libc::sigaction = unsafe { std::mem::zeroed() };
            // SAFETY: reads the handler alone, into memory of this frame.
            let known = unsafe { libc::sigaction(*signal, std::ptr::null(), &mut found) } == 0;
            known.then_some((*signal, found))
        };
        Handlers(Handlers::OF.iter().filter_map(of).collect())
    }

    fn put_back(&self) {
        for (signal, handler) in &self.0 {
            // SAFETY: a handler that the process had.
            unsafe { libc::sigaction(*signal, handler, std::ptr::null_mut()) };
        }
    }
}

/// The libraries of a kind that this process has opened, by the path that was asked for.
#[derive(Debug)]
pub(super) struct Registry<T: 'static>(Mutex<Vec<(PathBuf, &'static T)>>);

impl<T> Registry<T> {
    pub(super) const fn new() -> Registry<T> {
        Registry(Mutex::new(Vec::new()))
    }

    /// The library of that path, which `open` opens the first time. A failure is not kept: the next call tries again.
    pub(super) fn get(&self, path: &Path, open: impl FnOnce(&Path) -> Result<T>) -> Result<&'static T> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, library)) = known.iter().find(|(other, _)| other == path) {
            return Ok(library);
        }
        let library: &'static T = Box::leak(Box::new(open(path)?));
        known.push((path.to_owned(), library));
        Ok(library)
    }
}

/// The path that a variable of the environment names, else the library's usual name.
pub(super) fn path_of(variable: &str, usual: &str) -> PathBuf {
    std::env::var_os(variable).filter(|path| !path.is_empty()).map_or_else(|| PathBuf::from(usual), PathBuf::from)
}

#[cfg(test)]
#[path = "library_tests.rs"]
pub(crate) mod tests;
