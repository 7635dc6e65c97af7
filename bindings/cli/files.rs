//! Results in files and on the output.
//!
//! On the thread that runs the program: before a run, the check that a file can be written; after it, the writing.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use serde::Serialize;
use tokenyard::internals::base::quoted;

use super::out::Out;
use super::usage::Refusal;

/// The JSON object of one run or projection, or of a sweep; a result a line.
///
/// # Errors
/// The writer's error; none for these types.
pub fn json<T: Serialize>(results: &[T]) -> serde_json::Result<String> {
    match results {
        [one] => serde_json::to_string(one),
        _ => Ok(format!("{{\"results\": {}}}", list(results)?)),
    }
}

/// A JSON array with an element a line.
///
/// # Errors
/// As [`json`].
pub fn list<T: Serialize>(elements: &[T]) -> serde_json::Result<String> {
    let lines: Vec<String> = elements.iter().map(serde_json::to_string).collect::<serde_json::Result<_>>()?;
    Ok(format!("[\n{}\n]", lines.join(",\n")))
}

/// Refuses files that could not be written, or would be written twice, before the run and not after it. `-` as `--json`
/// is the output.
pub fn check_outputs(json: Option<&str>, others: &[(&str, Option<&str>)]) -> Result<(), Refusal> {
    let mut taken: Vec<(&str, Place)> = Vec::new();
    let json = ("--json", json.filter(|path| *path != "-"));
    for &(name, path) in std::iter::once(&json).chain(others) {
        let Some(path) = path else { continue };
        let Some(place) = place(name, path)? else { continue };
        if let Some((other, _)) = taken.iter().find(|(_, before)| *before == place) {
            return Err(Refusal::of(name, path, format!("{other} goes to the same file; give another")));
        }
        taken.push((name, place));
    }
    Ok(())
}

/// A file's identity, independent of its path.
#[derive(Debug, PartialEq, Eq)]
enum Place {
    /// Device and inode.
    There(u64, u64),
    /// A file that does not exist yet.
    New(PathBuf),
}

/// The place of a writable file; `None` for a device or pipe, to which several outputs may go.
fn place(name: &str, path: &str) -> Result<Option<Place>, Refusal> {
    let refused = |advice: &str| Refusal::of(name, path, advice);
    if path == "-" {
        return Err(refused("only --json can go to stdout; give a path"));
    }
    let unwritable = |error: io::Error| refused(&format!("it cannot be written ({error}); give another file"));
    let file = Path::new(path);
    let folder = match file.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let Some(own) = file.file_name().filter(|_| !file.is_dir() && folder.is_dir()) else {
        return Err(refused("there is no such folder, or it is one; give a file in a folder that exists"));
    };
    let Ok(about) = fs::metadata(file) else {
        let folder = folder.canonicalize().map_err(unwritable)?;
        // The target of a dangling link is created only by the write.
        if file.symlink_metadata().is_err() {
            drop(OpenOptions::new().write(true).create_new(true).open(file).map_err(unwritable)?);
            fs::remove_file(file).map_err(unwritable)?;
        }
        return Ok(Some(Place::New(folder.join(own))));
    };
    let kind = about.file_type();
    // A pipe without a name was passed to this process, as stdout or by a shell's >(…): opening it does not end it.
    let handed = kind.is_fifo() && file.canonicalize().is_err();
    if !(kind.is_file() || kind.is_char_device() || handed) {
        return Err(refused("it is a pipe with a name, a socket or a disk; give a file"));
    }
    drop(OpenOptions::new().write(true).custom_flags(libc::O_NONBLOCK).open(file).map_err(unwritable)?);
    Ok(kind.is_file().then(|| Place::There(about.dev(), about.ino())))
}

/// Writes a text to a file, or to the output where the path is `-`.
///
/// # Errors
/// A sentence that names the file. [`Out`] handles errors of the output.
pub fn write(path: &str, text: &str, out: &Out) -> Result<(), String> {
    if path == "-" {
        say!(out, "{text}");
        return Ok(());
    }
    let result = opened(path).and_then(|mut file| file.write_all(format!("{text}\n").as_bytes()));
    let name = quoted(path.as_bytes());
    result.map_err(|error| format!("{name} cannot be written ({error}); free space there, or name another file"))
}

/// Opens a file and empties it. A pipe without a reader is an error, not a wait.
fn opened(path: &str) -> io::Result<File> {
    let mut options = OpenOptions::new();
    let file = options.write(true).create(true).truncate(true).custom_flags(libc::O_NONBLOCK).open(path)?;
    // Writes do wait for room.
    fcntl(&file, FcntlArg::F_SETFL(OFlag::empty()))?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_files_name_is_shown_in_one_line() {
        let mut lines: Vec<u8> = Vec::new();
        let out = Out::new(&mut lines, None, false);
        let refused = write("/no\x1b[31m\r\n/such", "text", &out).unwrap_err();
        assert!(refused.starts_with("/no\\u{1b}[31m\\r\\n/such cannot be written ("), "{refused}");
        let refused = check_outputs(Some("/no\x1b[31m\r\n/such"), &[]).unwrap_err().to_string();
        assert!(!refused.contains(char::is_control) && refused.contains("`/no\\u{1b}[31m /such`"), "{refused}");
    }
}
