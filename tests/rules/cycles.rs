//! Files do not import each other in circles, so that a reader of a file needs only the files below it.
//!
//! [`cycles`] checks a folder's files: what they `use` and other paths that begin with `crate`, `super` or `self`. A
//! parent and its child may import each other. A name that a module re-exports counts as its own file's. Test modules
//! do not count.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// The files of a folder by module, and what each imports of the others.
struct Graph {
    /// By module, its file.
    files: BTreeMap<String, String>,
    /// Module to module.
    imports: BTreeMap<String, BTreeSet<String>>,
}

/// Rust files below a folder of this repository, as (path, text): no tests, and not the program's `main`.
fn read(folder: &str) -> Vec<(String, String)> {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let (mut found, mut folders) = (Vec::new(), vec![root.join(folder)]);
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap().flatten() {
            let path = entry.path();
            let name = entry.file_name().to_string_lossy().into_owned();
            if path.is_dir() && name != "tests" {
                folders.push(path);
            } else if name.ends_with(".rs") && !["tests.rs", "main.rs"].contains(&name.as_str()) {
                let shown = path.strip_prefix(&root).unwrap().display().to_string();
                found.push((shown, fs::read_to_string(&path).unwrap()));
            }
        }
    }
    found.sort();
    assert!(!found.is_empty(), "no files below {folder}");
    found
}

/// The module of a file: `module` for the folder's own `mod.rs`.
fn module_of(folder: &str, module: &str, path: &str) -> String {
    let inside = Path::new(path).strip_prefix(folder).unwrap().with_extension("");
    let names = inside.iter().map(|name| name.to_string_lossy().into_owned()).filter(|name| name != "mod");
    std::iter::once(module.to_string()).chain(names).collect::<Vec<_>>().join("::")
}

/// The text without comments, and without what stands in strings and characters.
fn code(text: &str) -> String {
    let (mut code, mut rest) = (String::new(), text);
    while let Some(first) = rest.chars().next() {
        let length = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if let Some(raw) = rest.strip_prefix("r#\"") {
            raw.find("\"#").map_or(rest.len(), |end| end + 5)
        } else if let Some(inner) = rest.strip_prefix('"') {
            let mut escaped = false;
            let end = inner.find(|c: char| {
                let ends = c == '"' && !escaped;
                escaped = c == '\\' && !escaped;
                ends
            });
            end.map_or(rest.len(), |end| end + 2)
        } else if ["'{'", "'}'", "'\"'", "';'"].iter().any(|quoted| rest.starts_with(quoted)) {
            3
        } else {
            code.push(first);
            first.len_utf8()
        };
        rest = &rest[length..];
    }
    code
}

/// The place after the bracket that closes the first one of `text`.
fn closed(text: &str) -> usize {
    let mut depth = 0usize;
    for (at, c) in text.char_indices() {
        match c {
            '{' => depth += 1,
            '}' => depth = depth.saturating_sub(1),
            _ => continue,
        }
        if depth == 0 {
            return at + 1;
        }
    }
    text.len()
}

/// Code without its test modules.
fn without_tests(code: &str) -> String {
    let mut kept = String::new();
    let mut rest = code;
    while let Some(at) = rest.find("#[cfg(test)]") {
        kept += &rest[..at];
        let item = &rest[at..];
        let is_module = item["#[cfg(test)]".len()..].trim_start().trim_start_matches("pub ").starts_with("mod ");
        let (block, semicolon) = (item.find('{').unwrap_or(item.len()), item.find(';').unwrap_or(item.len()));
        let end = match (is_module, semicolon < block) {
            (false, _) => "#[cfg(test)]".len(),
            (true, true) => semicolon + 1,
            (true, false) => block + closed(&item[block..]),
        };
        rest = &item[end..];
    }
    kept + rest
}

/// `a::{b, c::{d, e}}` as `a::b`, `a::c::d` and `a::c::e`; names that are given to them are left out.
fn expanded(tree: &str) -> Vec<String> {
    let tree = tree.trim();
    let Some(open) = tree.find('{') else {
        let path = tree.split(" as ").next().unwrap_or("").trim();
        return if path.is_empty() { Vec::new() } else { vec![path.to_string()] };
    };
    let (prefix, inner) = (&tree[..open], &tree[open + 1..open + closed(&tree[open..]) - 1]);
    let (mut parts, mut depth, mut start) = (Vec::new(), 0usize, 0);
    for (at, c) in inner.char_indices() {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(&inner[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&inner[start..]);
    parts.into_iter().flat_map(expanded).map(|path| format!("{prefix}{path}")).collect()
}

/// A path that a file mentions: in which module, whether by `use`, and whether that is public.
struct Mention {
    module: String,
    path: String,
    is_use: bool,
    is_public: bool,
}

/// All paths of some code, which is of `module`; inline modules are modules of their own.
fn mentions(module: &str, code: &str) -> Vec<Mention> {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let mut found = Vec::new();
    let (mut at, mut before, mut public) = (0, ' ', false);
    while let Some(c) = code[at..].chars().next() {
        let rest = &code[at..];
        let length = rest.find(|c: char| !is_word(c)).unwrap_or(rest.len());
        let word = if is_word(before) { "" } else { &rest[..length] };
        let mention = |path: &str, is_use| Mention {
            module: module.to_string(),
            path: path.to_string(),
            is_use,
            is_public: public,
        };
        let step = match word {
            "use" => {
                let end = rest.find(';').unwrap_or(rest.len());
                found.extend(expanded(&rest[length..end]).iter().map(|path| mention(path, true)));
                end
            }
            "mod" => {
                let name = rest[length..].split(['{', ';']).next().unwrap_or("").trim();
                let open = rest.find('{').unwrap_or(rest.len());
                if rest.find(';').unwrap_or(rest.len()) < open {
                    length
                } else {
                    let end = open + closed(&rest[open..]);
                    found.extend(mentions(&format!("{module}::{name}"), &rest[open + 1..end.max(open + 2) - 1]));
                    end
                }
            }
            "crate" | "super" | "self" | "tokenyard" if rest[length..].starts_with("::") && before != ':' => {
                let end = rest.find(|c: char| !is_word(c) && c != ':').unwrap_or(rest.len());
                found.push(mention(rest[..end].trim_end_matches(':'), false));
                end
            }
            "" => c.len_utf8(),
            _ => length,
        };
        public = if word == "pub" { true } else { public && (word.is_empty() && c.is_whitespace()) };
        at += step;
        before = code[..at].chars().next_back().unwrap_or(' ');
    }
    found
}

impl Graph {
    fn new(folder: &str, module: &str, texts: &[(String, String)]) -> Graph {
        let mut files: BTreeMap<String, String> =
            texts.iter().map(|(path, _)| (module_of(folder, module, path), path.clone())).collect();
        // Modules that are mounted from elsewhere import nothing of these.
        for (path, text) in texts {
            let mounts = text.split("#[path = \"").skip(1).filter_map(|behind| behind.split_once("\"]"));
            for (elsewhere, item) in mounts {
                let name = item.trim_start().trim_start_matches("pub ").strip_prefix("mod ").unwrap_or("");
                let name = name.split([';', ' ']).next().unwrap_or("");
                files.insert(format!("{}::{name}", module_of(folder, module, path)), elsewhere.to_string());
            }
        }
        let all: Vec<Mention> = texts
            .iter()
            .flat_map(|(path, text)| mentions(&module_of(folder, module, path), &without_tests(&code(text))))
            .collect();
        // What a module re-exports, by name.
        let mut exports: BTreeMap<(String, String), String> = BTreeMap::new();
        for export in all.iter().filter(|mention| mention.is_use && mention.is_public) {
            let absolute = absolute(export, &files);
            if let Some((_, name)) = absolute.rsplit_once("::") {
                exports.insert((export.module.clone(), name.to_string()), absolute.clone());
            }
        }
        let mut imports: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for mention in &all {
            let Some(from) = known(&mention.module, &files) else { continue };
            let mut path = absolute(mention, &files);
            let mut target = known(&path, &files);
            for _ in 0..8 {
                let Some(module) = &target else { break };
                let name = path[module.len()..].trim_start_matches("::").split("::").next().unwrap_or("");
                let Some(elsewhere) = exports.get(&(module.clone(), name.to_string())) else { break };
                path = elsewhere.clone();
                target = known(&path, &files);
            }
            let Some(to) = target else { continue };
            let is_family = from.rsplit_once("::").is_some_and(|(parent, _)| parent == to)
                || to.rsplit_once("::").is_some_and(|(parent, _)| parent == from);
            if from != to && !is_family {
                imports.entry(from).or_default().insert(to);
            }
        }
        Graph { files, imports }
    }

    /// All modules that a module reaches by one import or more.
    fn reached(&self, from: &str) -> BTreeSet<String> {
        let (mut reached, mut waiting) = (BTreeSet::new(), vec![from.to_string()]);
        while let Some(module) = waiting.pop() {
            for next in self.imports.get(&module).into_iter().flatten() {
                if reached.insert(next.clone()) {
                    waiting.push(next.clone());
                }
            }
        }
        reached
    }

    /// The files of each circle, with the imports that make it.
    fn cycles(&self) -> Vec<String> {
        let reached: BTreeMap<&String, BTreeSet<String>> =
            self.files.keys().map(|module| (module, self.reached(module))).collect();
        let mut shown: BTreeSet<&String> = BTreeSet::new();
        let mut cycles = Vec::new();
        for (&module, ahead) in reached.iter().filter(|(module, ahead)| ahead.contains(**module)) {
            if !shown.insert(module) {
                continue;
            }
            let circle: Vec<&String> =
                reached.keys().copied().filter(|m| ahead.contains(*m) && reached[m].contains(module)).collect();
            shown.extend(&circle);
            let edges = circle.iter().flat_map(|from| self.imports[*from].iter().map(move |to| (*from, to)));
            let edges = edges.filter(|(_, to)| circle.contains(to));
            let edges = edges.map(|(from, to)| format!("  {} imports {}", self.files[from], self.files[to]));
            let edges: Vec<String> = edges.collect();
            cycles.push(format!("{} files in one circle:\n{}", circle.len(), edges.join("\n")));
        }
        cycles
    }
}

/// A path from the crate's root.
fn absolute(mention: &Mention, files: &BTreeMap<String, String>) -> String {
    let mut names: Vec<&str> = mention.module.split("::").collect();
    let mut path = mention.path.split("::").map(str::trim).peekable();
    match path.peek().copied() {
        Some("crate" | "tokenyard") => {
            names = vec!["crate"];
            path.next();
        }
        Some("self" | "super") => {
            while let Some(&name) = path.peek().filter(|name| ["self", "super"].contains(*name)) {
                if name == "super" {
                    names.pop();
                }
                path.next();
            }
        }
        // A child, or another crate.
        first => {
            let child = format!("{}::{}", mention.module, first.unwrap_or_default());
            if !files.contains_key(&child) {
                return mention.path.clone();
            }
        }
    }
    names.into_iter().chain(path.filter(|name| !["self", "*"].contains(name))).collect::<Vec<_>>().join("::")
}

/// The innermost module with a file that a path goes through.
fn known(path: &str, files: &BTreeMap<String, String>) -> Option<String> {
    let mut path = path;
    loop {
        if files.contains_key(path) {
            return Some(path.to_string());
        }
        (path, _) = path.rsplit_once("::")?;
    }
}

/// The circles of imports among the files of a folder, which is mounted as `module`, as in `crate::cli`.
fn cycles(folder: &str, module: &str) -> Vec<String> {
    Graph::new(folder, module, &read(folder)).cycles()
}

#[test]
fn files_import_each_other_in_one_direction() {
    // Between these folders tests/rules/layers.rs holds the direction.
    for (folder, module) in [
        ("bindings/api", "crate::bindings::api"),
        ("bindings/c", "crate::bindings::c"),
        ("bindings/cli", "crate::cli"),
        ("proxy", "crate::proxy"),
        ("kernels", "crate::kernels"),
        ("transport", "crate::transport"),
    ] {
        let cycles = cycles(folder, module);
        assert!(cycles.is_empty(), "{}", cycles.join("\n"));
    }
}

/// Parts of the program; each uses only later lines. Parts on one line do not use each other, except files of one
/// folder.
const LEVELS: [&[&str]; 6] = [
    &["commands"],
    &["report"],
    &["ranks"],
    &["args", "progress", "files", "logging"],
    &["cases"],
    &["out", "usage", "status", "reference"],
];

#[test]
fn the_program_s_folders_use_what_stands_below_them() {
    let graph = Graph::new("bindings/cli", "crate::cli", &read("bindings/cli"));
    let place = |module: &str| module.split("::").nth(2).map(str::to_string);
    let level = |place: &str| LEVELS.iter().position(|level| level.contains(&place));
    let mut wrong = Vec::new();
    for (from, to) in graph.imports.iter().flat_map(|(from, all)| all.iter().map(move |to| (from, to))) {
        let (Some(above), Some(below)) = (place(from), place(to)) else { continue };
        let (Some(a), Some(b)) = (level(&above), level(&below)) else { panic!("{above} or {below} has no level") };
        if above != below && (a > b || a == b && below != "status") {
            wrong.push(format!("{} imports {}", graph.files[from], graph.files[to]));
        }
    }
    assert!(graph.imports.len() > 20 && wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The circles among some files of `src`, whose texts are given.
fn of(texts: &[(&str, &str)]) -> Vec<String> {
    let texts: Vec<(String, String)> = texts.iter().map(|(path, text)| (path.to_string(), text.to_string())).collect();
    Graph::new("src", "crate::top", &texts).cycles()
}

#[test]
fn circles_are_found_however_they_are_written() {
    let direct = [("src/a.rs", "use super::b::{self, X};"), ("src/b.rs", "use crate::top::a::Y;")];
    assert_eq!(of(&direct).len(), 1);
    assert!(of(&direct)[0].contains("src/a.rs imports src/b.rs"), "{:?}", of(&direct));
    let by_path = [("src/a.rs", "fn f() { super::b::g() }"), ("src/b.rs", "fn g() { tokenyard::top::a::f() }")];
    assert_eq!(of(&by_path).len(), 1);
    let three = [
        ("src/a.rs", "use super::{\n    c::{Z, d::W},\n    e,\n};"),
        ("src/c/mod.rs", "use crate::top::{e::E};"),
        ("src/e.rs", "use crate::top::a;"),
    ];
    assert!(of(&three)[0].contains("3 files"), "{:?}", of(&three));
    let re_exported = [
        ("src/mod.rs", "mod a;\nmod b;\npub use b::Z;"),
        ("src/a.rs", "use super::Z;"),
        ("src/b.rs", "use super::a::f;"),
    ];
    assert_eq!(of(&re_exported).len(), 1);
    let by_grandparent = [("src/mod.rs", "use a::b::f;"), ("src/a/b.rs", "use crate::top::S;"), ("src/a.rs", "")];
    assert_eq!(of(&by_grandparent).len(), 1);
    let inline = [("src/a.rs", "mod m {\n    use super::super::b::X;\n}"), ("src/b.rs", "use super::a::Y;")];
    assert_eq!(of(&inline).len(), 1);
}

#[test]
fn what_is_no_circle_is_none() {
    let family = [("src/a.rs", "mod b;\nuse b::X;"), ("src/a/b.rs", "use super::Y;")];
    assert!(of(&family).is_empty());
    let in_tests = [
        ("src/a.rs", "use super::b::X;"),
        (
            "src/b.rs",
            "// use super::a;\nconst T: &str = \"super::a::Y\";\n#[cfg(test)]\nmod tests {\n  use crate::top::a::Y;\n}",
        ),
    ];
    assert!(of(&in_tests).is_empty());
    let quoted = [("src/a.rs", "const T: &str = r#\"say \" super::b::X\"#;"), ("src/b.rs", "use super::a::T;")];
    assert!(of(&quoted).is_empty());
    let behind_tests = [("src/a.rs", "use super::b::X;"), ("src/b.rs", "#[cfg(test)]\nmod tests;\nuse super::a::Y;")];
    assert_eq!(of(&behind_tests).len(), 1);
    let mounted = [
        ("src/mod.rs", "#[path = \"../elsewhere.rs\"]\nmod e;\nuse a::b::X;"),
        ("src/a/b.rs", "use crate::top::e::E;"),
    ];
    assert!(of(&mounted).is_empty());
    let others = [("src/a.rs", "use std::b::X;\nuse crate::b::Y;"), ("src/b.rs", "use super::a::Y;")];
    assert!(of(&others).is_empty());
}
