//! Checks the rules that keep the code where a newcomer looks for it: layers, top level, one file for PTX, no panics.

use std::fs;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// Files below `folder` with one of the extensions, as (path relative to the root, text).
fn files(folder: &str, extensions: &[&str]) -> Vec<(String, String)> {
    let mut found = Vec::new();
    let mut folders = vec![root().join(folder)];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap().flatten() {
            let path = entry.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().and_then(|e| e.to_str()).is_some_and(|e| extensions.contains(&e)) {
                let name = path.strip_prefix(root()).unwrap().display().to_string();
                found.push((name, fs::read_to_string(&path).unwrap()));
            }
        }
    }
    assert!(!found.is_empty(), "no {extensions:?} files below {folder}");
    found.sort();
    found
}

/// Lines of code, numbered: no comments, nothing from the test module on.
fn code(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let lines: Vec<&str> = text.lines().collect();
    let end = (0..lines.len()).find(|at| begins_tests(&lines[*at..])).unwrap_or(lines.len());
    let code = lines.into_iter().take(end).enumerate();
    code.map(|(n, line)| (n + 1, line.split("//").next().unwrap_or("")))
}

/// Whether a module of tests begins here; what else is for tests alone, or in another file, has code behind it.
fn begins_tests(lines: &[&str]) -> bool {
    let mut lines = lines.iter().map(|line| line.trim());
    let module = |line: &str| line.split(' ').any(|word| word == "mod") && line.ends_with('{');
    lines.next() == Some("#[cfg(test)]") && lines.find(|line| !line.starts_with("#[")).is_some_and(module)
}

#[test]
fn code_ends_where_a_module_of_tests_begins() {
    let text = "fn a() {\n#[cfg(test)]\nb();\n}\n#[cfg(test)]\n#[path = \"t.rs\"]\nmod t;\nfn c() {} // d\n\
                #[cfg(test)]\npub mod tests {\nfn e() {}\n}\n";
    assert_eq!(code(text).last(), Some((8, "fn c() {} ")));
}

fn assert_free_of(folder: &str, extensions: &[&str], skip: &[&str], words: &[&str]) {
    let mut found = Vec::new();
    for (name, text) in files(folder, extensions) {
        if skip.iter().any(|s| name.starts_with(s)) {
            continue;
        }
        for (number, line) in code(&text) {
            found.extend(words.iter().filter(|w| line.contains(**w)).map(|w| format!("{name}:{number} has {w}")));
        }
    }
    assert!(found.is_empty(), "{}", found.join("\n"));
}

/// Folders, and what none of their files may import. A folder imports from lower ones only: bindings/cli, bindings/api,
/// proxy, then kernels and transport side by side, then the leaves.
const DIRECTIONS: [(&str, &[&str]); 6] = [
    ("kernels/base", &["crate::kernels", "crate::transport", "crate::proxy", "crate::bindings", "crate::ffi"]),
    ("kernels/ffi", &["crate::", "super::"]),
    ("kernels", &["crate::transport", "crate::proxy", "crate::bindings", "crate::World", "crate::AllToAll"]),
    (
        "transport",
        &["crate::kernels", "crate::ffi", "crate::proxy", "crate::bindings", "crate::Device", "crate::AllToAll"],
    ),
    ("proxy", &["crate::bindings", "crate::AllToAll", "crate::Tokens", "crate::Plan", "clap", "serde"]),
    ("bindings/api", &["crate::bindings::cli", "crate::cli", "clap", "serde"]),
];

#[test]
fn folders_only_look_down() {
    for (folder, words) in DIRECTIONS {
        assert_free_of(folder, &["rs"], &[], words);
    }
    // By relative paths no file leaves its folder.
    for (folder, _) in DIRECTIONS {
        for (name, text) in files(folder, &["rs"]) {
            let depth =
                name.matches('/').count() - folder.matches('/').count() - usize::from(name.ends_with("/mod.rs"));
            let out = "super::".repeat(depth + 1);
            for (number, line) in code(&text) {
                assert!(!line.contains(&out), "{name}:{number} leaves {folder}: {}", line.trim());
            }
        }
    }
}

/// Edges that docs/design.md, "Ordering edges", names: the first word of each row of its table.
fn edges() -> Vec<String> {
    let text = fs::read_to_string(root().join("docs/design.md")).unwrap();
    let (_, section) = text.split_once("## Ordering edges").unwrap();
    let table = section.lines().skip_while(|line| !line.starts_with("|---")).skip(1);
    let rows = table.take_while(|line| line.starts_with('|'));
    rows.filter_map(|row| row.trim_start_matches("| ").split(' ').next().map(str::to_owned)).collect()
}

#[test]
fn every_release_and_acquire_of_a_kernel_names_its_edge() {
    const ORDERS: [&str; 7] = [
        "store_release_",
        "load_acquire_",
        "fence_acq_rel_",
        "atomic_add_gpu(",
        "atomic_count_block(",
        "atomic_cas_gpu(",
        "named_arrive(hand_over",
    ];
    let edges = edges();
    assert!(edges.len() > 15 && edges.contains(&"N14".to_owned()), "{edges:?}");
    let names = |line: &str| {
        let words = line.split(|c: char| !c.is_ascii_alphanumeric());
        words.filter(|word| edges.iter().any(|edge| edge == word)).map(str::to_owned).collect::<Vec<_>>()
    };
    let (mut unnamed, mut named) = (Vec::new(), Vec::new());
    for folder in ["kernels/common", "kernels/dispatch", "kernels/combine", "kernels/nic"] {
        for (name, text) in files(folder, &["cuh"]) {
            let lines: Vec<&str> = text.lines().collect();
            for (number, line) in code(&text).filter(|_| !name.ends_with("prim.cuh")) {
                if !ORDERS.iter().any(|order| line.contains(order)) {
                    continue;
                }
                // On the line, or in what stands before it.
                let found: Vec<String> =
                    lines[number.saturating_sub(5)..number].iter().flat_map(|l| names(l)).collect();
                if found.is_empty() {
                    unnamed.push(format!("{name}:{number} names no edge of docs/design.md: {}", line.trim()));
                }
                named.extend(found);
            }
        }
    }
    assert!(unnamed.is_empty(), "{}", unnamed.join("\n"));
    for edge in ["N1", "N2", "N3", "N4", "N6", "N7", "N8", "N9", "N10", "N12", "N13", "N14", "E1", "E6", "E10", "C1"] {
        assert!(named.iter().any(|name| name == edge), "no release or acquire names {edge}");
    }
}

#[test]
fn every_kernel_stands_in_the_one_list() {
    let list = fs::read_to_string(root().join("kernels/kernels.inc")).unwrap();
    let entries = list.lines().filter_map(|line| line.strip_prefix("TY_KERNEL_ENTRY(")?.strip_suffix(')'));
    let mut listed: Vec<&str> = entries.collect();
    let sources = files("kernels", &["cuh"]);
    let mut defined: Vec<&str> = Vec::new();
    for (_, text) in sources.iter().filter(|(name, _)| !name.ends_with("prim.cuh")) {
        defined.extend(text.lines().filter_map(|line| line.strip_prefix("TY_KERNEL(")?.split(',').next()));
    }
    listed.sort_unstable();
    defined.sort_unstable();
    assert_eq!(listed, defined);
    // What launches name.
    for (name, text) in
        ["kernels", "bindings/api", "proxy", "transport"].iter().flat_map(|folder| files(folder, &["rs"]))
    {
        for (number, line) in code(&text).filter(|_| !name.starts_with("kernels/ffi")) {
            let quoted = line.split('"').skip(1).step_by(2);
            let known =
                |word: &&str| word.starts_with("ty_") && !word.contains(|c: char| !c.is_alphanumeric() && c != '_');
            for kernel in quoted.filter(known) {
                assert!(listed.contains(&kernel), "{name}:{number} launches {kernel}, which kernels.inc does not list");
            }
        }
    }
}

#[test]
fn comments_end_at_120_columns() {
    // The formatters hold code to that, where it can be broken.
    let folders = ["bindings", "kernels", "proxy", "transport", "tests", "benches"];
    let mut long = Vec::new();
    for (name, text) in folders.iter().flat_map(|folder| files(folder, &["rs", "cuh", "cu", "cpp", "h"])) {
        if name.starts_with("kernels/ffi/") && name.ends_with(".rs") {
            continue;
        }
        let is_long = |line: &str| line.trim_start().starts_with("//") && line.chars().count() > 120;
        let wide = text.lines().enumerate().filter(|(_, line)| is_long(line));
        long.extend(wide.map(|(at, line)| format!("{name}:{} has {} columns", at + 1, line.chars().count())));
    }
    assert!(long.is_empty(), "{}", long.join("\n"));
}

#[test]
fn the_reference_imports_nothing_but_std() {
    assert_free_of("tests/reference", &["rs"], &[], &["tokenyard", "crate::base", "crate::proxy", "extern crate"]);
    for (name, text) in files("tests/reference", &["rs"]) {
        for (number, line) in code(&text) {
            let Some(path) = line.trim().strip_prefix("use ").or_else(|| line.trim().strip_prefix("pub use ")) else {
                continue;
            };
            let first = path.split("::").next().unwrap_or("");
            let own = Path::new("tests/reference").join(format!("{first}.rs"));
            let known = ["std", "super", "self", "core"].contains(&first) || root().join(own).exists();
            assert!(known, "{name}:{number} imports {path}");
        }
    }
}

#[test]
fn asm_and_compiler_conditionals_live_in_one_header() {
    let words =
        ["asm", "#if", "#ifdef", "<<<", "cooperative_groups", "threadIdx", "blockIdx", "__syncthreads", "__ldg"];
    assert_free_of("kernels", &["cuh", "cu"], &["kernels/common/prim.cuh"], &words);
}

#[test]
fn nothing_that_input_can_reach_panics() {
    // A panic that no input, peer or device can reach is marked by a comment on its line or the one before.
    for folder in ["kernels", "proxy", "transport", "bindings"] {
        for (name, text) in files(folder, &["rs"]) {
            if name.contains("tests") || name.starts_with("kernels/ffi") {
                continue;
            }
            let lines: Vec<&str> = text.lines().collect();
            for (number, line) in code(&text) {
                let panics = [".unwrap()", ".expect(", "panic!(", "unreachable!(", "todo!(", "unimplemented!("];
                if !panics.iter().any(|word| line.contains(word)) {
                    continue;
                }
                let excused = lines[number.saturating_sub(2)..number].iter().any(|l| l.contains("// Unreachable:"));
                assert!(excused, "{name}:{number} may panic: {}", line.trim());
            }
        }
    }
}

#[test]
fn the_top_level_is_the_one_of_the_design() {
    let folders = ["kernels", "proxy", "transport", "bindings", "benches", "tests", "docs", "target"];
    for entry in fs::read_dir(root()).unwrap().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let is_folder = entry.path().is_dir();
        assert!(!is_folder || name.starts_with('.') || folders.contains(&name.as_str()), "{name}/ has no place here");
    }
}

#[test]
fn files_stay_small_enough_to_find_things_in() {
    for folder in ["kernels", "proxy", "transport", "bindings", "tests"] {
        for (name, text) in files(folder, &["rs", "cuh", "cpp", "h"]) {
            let limit = if name.starts_with("kernels/ffi") { usize::MAX } else { 900 };
            assert!(text.lines().count() <= limit, "{name} has {} lines", text.lines().count());
        }
    }
}

/// Names of waits in a line of code: literals after a call that waits.
fn waits(line: &str) -> Vec<&str> {
    let calls = ["poll(\"", "poll_unless(\"", "relax(\""];
    let behind = calls.iter().flat_map(|call| line.match_indices(call).map(|(at, _)| &line[at + call.len()..]));
    behind.filter_map(|rest| rest.split('"').next()).collect()
}

#[test]
fn every_wait_of_the_host_is_in_the_table_of_waits() {
    let design = fs::read_to_string(root().join("docs/design.md")).unwrap();
    let table = design.split("\n## Waits\n").nth(1).and_then(|rest| rest.split("\n## ").next()).unwrap();
    let mut named = 0;
    for (name, text) in
        ["kernels", "bindings/api", "proxy", "transport"].iter().flat_map(|folder| files(folder, &["rs"]))
    {
        if name.contains("tests") {
            continue;
        }
        for (number, line) in code(&text) {
            for wait in waits(line) {
                named += 1;
                assert!(table.contains(&format!("\"{wait}\"")), "{name}:{number}: \"{wait}\" is not in the table");
            }
        }
    }
    assert!(named >= 12, "{named} waits found");
}

#[test]
fn the_oldest_rust_is_the_one_that_is_documented() {
    let manifest = fs::read_to_string(root().join("Cargo.toml")).unwrap();
    let version = manifest.split("rust-version = \"").nth(1).and_then(|rest| rest.split('"').next()).unwrap();
    let crate_docs = fs::read_to_string(root().join("lib.rs")).unwrap();
    assert!(crate_docs.contains(&format!("crate is {version} (`rust-version`")), "lib.rs does not name {version}");
}

/// Words that others have taken the place of (docs/design.md, "Glossary"), also as parts of names.
const GONE: &str = "home homes landed landing landings inbox inboxes wave waves seat seats station hub beat beats told \
                    heard turn turns reckon reckons reckoned META";
/// Likewise, of several words.
const GONE_TOGETHER: [&str; 4] = ["OwnOutput", "own_output", "own-output", "rows that arrive "];
/// Where old names are answered with the new ones, or were recorded.
const ANSWERED: [&str; 4] =
    ["bindings/cli/usage.rs", "bindings/cli/cases/case.rs", "docs/figures.md", "tests/rules/layers.rs"];

/// Words of a line, parts of names among them: `LandedRow` and `landed_row` are landed and row.
fn words(line: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut before = ' ';
    for c in line.chars() {
        if !c.is_ascii_alphabetic() || c.is_ascii_uppercase() && before.is_ascii_lowercase() {
            words.push(String::new());
        }
        if let Some(word) = words.last_mut().filter(|_| c.is_ascii_alphabetic()) {
            word.push(c);
        }
        before = c;
    }
    // META was a word of its own; meta is the beginning of metadata. HOME is the environment's.
    words.retain(|word| word != "HOME");
    words.into_iter().map(|word| if word == "META" { word } else { word.to_ascii_lowercase() }).collect()
}

#[test]
fn words_that_gave_way_to_others_do_not_come_back() {
    let mut texts = Vec::new();
    for folder in ["bindings", "proxy", "kernels", "transport", "tests", "benches", "docs"] {
        texts.extend(files(folder, &["rs", "cuh", "h", "cu", "cpp", "inc", "py", "sh", "md"]));
    }
    for name in ["lib.rs", "build.rs", "README.md"] {
        texts.push((name.to_owned(), fs::read_to_string(root().join(name)).unwrap()));
    }
    let gone: Vec<&str> = GONE.split_whitespace().collect();
    assert!(gone.iter().all(|word| words(&format!("{word}_of(Row)")).contains(&(*word).to_owned())));
    let mut found = Vec::new();
    for (name, text) in texts.iter().filter(|(name, _)| !ANSWERED.contains(&name.as_str())) {
        for (number, line) in text.lines().enumerate() {
            // A recorded file's name.
            let words = words(&line.replace("builds-by-turns", ""));
            let alone = gone.iter().filter(|gone| words.iter().any(|word| word == *gone));
            let together = GONE_TOGETHER.iter().filter(|gone| line.contains(**gone));
            found.extend(alone.chain(together).map(|gone| format!("{name}:{} has «{gone}»", number + 1)));
        }
    }
    assert!(found.is_empty(), "{}", found.join("\n"));
}
