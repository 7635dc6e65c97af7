//! Results in files and on the output.
//!
//! On the thread that runs the program: before a run, whether a file can be written; behind it, the writing.

use std::path::Path;

use serde::Serialize;

use super::out::Out;
use super::usage::Refusal;

/// The object: of one run or projection, or of a sweep.
///
/// # Errors
/// The writer's error; none for these types.
pub fn json<T: Serialize>(results: &[T]) -> serde_json::Result<String> {
    #[derive(Serialize)]
    struct Sweep<'a, T> {
        results: &'a [T],
    }
    match results {
        [one] => serde_json::to_string_pretty(one),
        _ => serde_json::to_string_pretty(&Sweep { results }),
    }
}

/// Refuses a file that could not be written, before the run and not after it. `-` is the output, where it may be that.
pub fn check_output(name: &str, path: Option<&str>, stdout_too: bool) -> Result<(), Refusal> {
    let Some(path) = path else { return Ok(()) };
    if path == "-" {
        let advice = "only --json can go to stdout; give a path";
        return if stdout_too { Ok(()) } else { Err(Refusal::of(name, path, advice)) };
    }
    let file = Path::new(path);
    let folder = match file.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    if file.file_name().is_none() || file.is_dir() || !folder.is_dir() {
        return Err(Refusal::of(
            name,
            path,
            "there is no such folder, or it is one; give a file in a folder that exists",
        ));
    }
    Ok(())
}

/// Writes a text to a file, or to the output where the path is `-`.
///
/// # Errors
/// A sentence that names the file. Those of the output are for [`Out`].
pub fn write(path: &str, text: &str, out: &Out) -> Result<(), String> {
    if path == "-" {
        say!(out, "{text}");
        return Ok(());
    }
    let result = std::fs::write(path, format!("{text}\n"));
    result.map_err(|error| format!("{path} cannot be written ({error}); free space there, or name another file"))
}
