//! Builds the kernels: always with the host compiler for the CPU device, and with nvcc for GPUs where it is found.
//!
//! Settings, all optional: TOKENYARD_NVCC (path of nvcc, or `none`), TOKENYARD_STRICT=1 (warnings of the host
//! compiler are errors), TOKENYARD_SANITIZE (such as `address,undefined`), TOKENYARD_LINT=1 (no kernels at all: for
//! clippy and rustdoc, which link nothing), TOKENYARD_REGENERATE=1 (stale bindings are about to be rewritten by
//! tests/rules/ffi.rs, so do not refuse them), TOKENYARD_OBJECTS (a folder by which builds of several folders share the
//! host compiler's objects).

#[path = "kernels/ffi/hash.rs"]
mod hash;

use std::collections::BTreeSet;
use std::env;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, exit};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Instant;

/// The C headers and what bindgen made of them.
const BINDINGS: [(&str, &str); 2] =
    [("kernels/ffi/layout.h", "kernels/ffi/layout.rs"), ("kernels/ffi/executor.h", "kernels/ffi/executor.rs")];
/// SASS for Hopper and for Blackwell of compute capability 10.x, PTX for what comes later. The kernels use no
/// instruction of one architecture alone (sm_90a), so that one pass of the front end, which takes two thirds of nvcc's
/// time, serves all of it.
const GPU_CODE: [&str; 1] = ["arch=compute_90,code=[sm_90,sm_100,compute_90]"];
/// The oldest nvcc that supports all of GPU_CODE.
const OLDEST_NVCC: (u32, u32) = (12, 8);

fn main() {
    for name in ["NVCC", "STRICT", "SANITIZE", "LINT", "REGENERATE"] {
        println!("cargo::rerun-if-env-changed=TOKENYARD_{name}");
    }
    println!("cargo::rustc-check-cfg=cfg(tokenyard_fatbin)");
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=kernels/ffi");
    println!("cargo::rerun-if-changed=kernels/cpu");
    let sources = device_sources();
    for source in &sources {
        println!("cargo::rerun-if-changed={}", source.display());
    }
    refuse_stale_bindings();
    if set("TOKENYARD_LINT").is_none_or(|value| value != "1") {
        // At once, as each of them leaves cores idle.
        std::thread::scope(|scope| {
            if env::var_os("CARGO_FEATURE_CUDA").is_some() {
                scope.spawn(|| build_for_gpu(&sources));
            }
            build_for_cpu(&sources);
        });
    }
    record_commit();
}

/// Ends the build with one sentence.
fn fail(sentence: &str) -> ! {
    println!("cargo::error={sentence}");
    exit(1);
}

fn read(path: &Path) -> Vec<u8> {
    fs::read(path).unwrap_or_else(|why| fail(&format!("{} cannot be read: {why}", path.display())))
}

fn set(name: &str) -> Option<String> {
    env::var(name).ok().filter(|value| !value.is_empty())
}

/// Folders of device code; `.` is kernels/ itself.
const DEVICE_FOLDERS: [&str; 7] = [".", "ffi", "common", "dispatch", "combine", "nic", "bench"];

/// Everything that nvcc reads: the C++ files of kernels/ but for the CPU device's.
fn device_sources() -> Vec<PathBuf> {
    let folders = DEVICE_FOLDERS.iter().map(|folder| Path::new("kernels").join(folder));
    folders.flat_map(|folder| files(&folder.to_string_lossy(), &["cu", "cuh", "h", "inc"])).collect()
}

fn files(folder: &str, extensions: &[&str]) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap_or_else(|why| fail(&format!("{folder} cannot be read: {why}")));
    let paths = entries.filter_map(|entry| entry.ok().map(|entry| entry.path()));
    let wanted = |path: &PathBuf| path.extension().and_then(|e| e.to_str()).is_some_and(|e| extensions.contains(&e));
    let mut found: Vec<PathBuf> = paths.filter(wanted).collect();
    found.sort();
    found
}

/// Generated bindings carry the hash of the header they were made from.
fn refuse_stale_bindings() {
    if set("TOKENYARD_REGENERATE").is_some() {
        return;
    }
    for (header, generated) in BINDINGS {
        let wanted = hash::hash_line(&read(Path::new(header)));
        let found = String::from_utf8_lossy(&read(Path::new(generated))).into_owned();
        if !found.lines().any(|line| line == wanted) {
            fail(&format!(
                "{generated} is older than {header}: run TOKENYARD_REGENERATE=1 cargo test --test rules ffi (needs libclang)"
            ));
        }
    }
}

/// The executor and the kernels, by the host compiler.
fn build_for_cpu(device_sources: &[PathBuf]) {
    let mut build = cc::Build::new();
    // Less where cargo builds with opt-level 0, as for mutants and sanitizers: g++ takes half as long then, and what
    // runs takes as long (docs/notebook-host.md, "What else is built for the tests").
    let level = if env::var("OPT_LEVEL").is_ok_and(|level| level == "0") { "g" } else { "2" };
    build.cpp(true).std("c++20").opt_level_str(level).warnings(true).extra_warnings(true);
    build.flag("-ffp-contract=off").include("kernels").include("kernels/cpu");
    build.warnings_into_errors(set("TOKENYARD_STRICT").is_some_and(|value| value == "1"));
    // Line tables alone, as Cargo.toml asks of rustc: else g++ takes a third longer, for an object thrice as large. In
    // every build, so that builds share objects.
    build.debug(false).flag("-g1");
    if let Some(kinds) = set("TOKENYARD_SANITIZE") {
        build.flag(format!("-fsanitize={kinds}")).flag("-fno-omit-frame-pointer");
        // rustc links without the compiler's default libraries. The sanitizers' runtimes must come first.
        for library in kinds.split(',').filter_map(sanitizer_runtime) {
            println!("cargo::rustc-link-lib=dylib={library}");
        }
    }
    // The compiler does not recognise the extension .cu; every input is C++.
    build.flag("-x").flag("c++").cargo_metadata(false);
    for name in ["CXX", "CXXFLAGS", "AR"] {
        println!("cargo::rerun-if-env-changed={name}");
    }
    let out = PathBuf::from(env::var_os("OUT_DIR").unwrap_or_default());
    let units: Vec<PathBuf> = files("kernels/cpu", &["cpp"]).into_iter().chain(kernel_units(device_sources)).collect();
    let version = version_of(build.get_compiler().path());
    let made = on_all(&units, |unit| object_of(&build, &version, unit, &out));
    let (objects, keys): (Vec<_>, Vec<_>) = made.into_iter().unzip();
    let (archive, key, key_file) = (out.join("libtokenyard_cpu.a"), keys.join(" "), out.join("cpu.key"));
    if !archive.exists() || fs::read_to_string(&key_file).ok().as_deref() != Some(&key) {
        // A new one: into an old one objects are only added.
        let _ = (fs::remove_file(&key_file), fs::remove_file(&archive));
        cc::Build::new().cargo_metadata(false).objects(objects).compile("tokenyard_cpu");
        write(&key_file, &key);
    }
    println!("cargo::rustc-link-search=native={}", out.display());
    println!("cargo::rustc-link-lib=static=tokenyard_cpu");
    println!("cargo::rustc-link-lib=stdc++");
}

/// The object of a unit and its key: compiled unless it was from the same sources in the same way, by any build that
/// shares objects with this one. `version`: the compiler's.
fn object_of(build: &cc::Build, version: &str, unit: &Path, out: &Path) -> (PathBuf, String) {
    let (object, key_file) = (out.join(flat_name(unit, "o")), out.join(flat_name(unit, "key")));
    let mut build = build.clone();
    let compiler = build.get_compiler();
    // Warnings change no object.
    let ways: Vec<_> = compiler.args().iter().filter(|way| *way != "-Werror").collect();
    let key = key_of(&format!("{:?} {version} {ways:?}", compiler.path()), sources_of(unit).iter());
    if !object.exists() || fs::read_to_string(&key_file).ok().as_deref() != Some(&key) {
        let _ = fs::remove_file(&key_file);
        let mut compile = || {
            for made in build.file(unit).compile_intermediates() {
                if let Err(why) = fs::rename(&made, &object) {
                    fail(&format!("{} cannot be renamed: {why}", made.display()));
                }
            }
        };
        match set("TOKENYARD_OBJECTS") {
            Some(folder) => {
                shared(&Path::new(&folder).join(format!("{key}-{}", flat_name(unit, "o"))), &object, compile)
            }
            None => compile(),
        }
        write(&key_file, &key);
    }
    (object, key)
}

/// Makes a file by a copy of one that other builds share, or by `make`, and then shares it. Builds that want it
/// meanwhile wait for that. Where the folder cannot be used, nothing is shared.
fn shared(place: &Path, file: &Path, make: impl FnOnce()) {
    let _ = place.parent().map(fs::create_dir_all);
    let lock = fs::File::create(place.with_extension("lock"));
    let _ = lock.as_ref().map(fs::File::lock);
    if fs::copy(place, file).is_ok() {
        return;
    }
    make();
    let whole = place.with_extension("new");
    if fs::copy(file, &whole).and_then(|_| fs::rename(&whole, place)).is_err() {
        let _ = fs::remove_file(&whole);
    }
}

/// A unit and everything of the repository that it includes, in whatever way it is built.
fn sources_of(unit: &Path) -> BTreeSet<PathBuf> {
    let mut found = BTreeSet::from([unit.to_path_buf()]);
    let mut waiting = vec![unit.to_path_buf()];
    while let Some(source) = waiting.pop() {
        let places = [source.parent().unwrap_or(Path::new("")), Path::new("kernels"), Path::new("kernels/cpu")];
        let text = String::from_utf8_lossy(&read(&source)).into_owned();
        for name in text.lines().filter_map(|line| line.trim().strip_prefix("#include \"")?.split('"').next()) {
            let included = places.iter().map(|place| place.join(name)).find(|path| path.exists());
            waiting.extend(included.filter(|path| found.insert(path.clone())));
        }
    }
    found
}

/// What `work` makes of each, in their order, for as many at once as cargo has jobs.
fn on_all<T: Sync, R: Send>(items: &[T], work: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let jobs = env::var("NUM_JOBS").ok().and_then(|jobs| jobs.parse().ok()).unwrap_or(1);
    let (next, done) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..items.len().min(jobs) {
            scope.spawn(|| {
                loop {
                    let at = next.fetch_add(1, Relaxed);
                    let Some(item) = items.get(at) else { return };
                    let result = work(item);
                    if let Ok(mut done) = done.lock() {
                        done.push((at, result));
                    }
                }
            });
        }
    });
    let mut done = done.into_inner().unwrap_or_default();
    done.sort_by_key(|(at, _)| *at);
    done.into_iter().map(|(_, result)| result).collect()
}

/// The key of what was built of these sources in a way: with another key it must be built again. Cargo also runs this
/// script for other reasons, such as a new commit.
fn key_of<'a>(way: &str, sources: impl Iterator<Item = &'a PathBuf>) -> String {
    let mut sum = hash::fnv1a(way.as_bytes());
    for source in sources.map(PathBuf::as_path).chain([Path::new("build.rs")]) {
        sum = hash::fnv1a_more(sum, source.as_os_str().as_encoded_bytes());
        sum = hash::fnv1a_more(sum, &read(source));
    }
    format!("{sum:016x}")
}

/// What a host compiler says of its version: another one under the same name makes other objects.
fn version_of(compiler: &Path) -> String {
    match Command::new(compiler).arg("--version").output() {
        Ok(said) if said.status.success() => String::from_utf8_lossy(&said.stdout).into_owned(),
        Ok(said) => fail(&format!("{} --version ended with {}", compiler.display(), said.status)),
        Err(why) => fail(&format!("{} cannot be run: {why}; install a C++ compiler, or set CXX", compiler.display())),
    }
}

/// GCC's runtime of a sanitizer.
fn sanitizer_runtime(kind: &str) -> Option<&'static str> {
    match kind {
        "address" => Some("asan"),
        "thread" => Some("tsan"),
        "leak" => Some("lsan"),
        "undefined" => Some("ubsan"),
        _ => None,
    }
}

/// The translation units of kernels, which both compilers build.
fn kernel_units(sources: &[PathBuf]) -> Vec<PathBuf> {
    sources.iter().filter(|source| source.extension().is_some_and(|extension| extension == "cu")).cloned().collect()
}

/// A fatbin of each translation unit, by nvcc, embedded by kernels/device/cuda.rs.
fn build_for_gpu(sources: &[PathBuf]) {
    let Some((nvcc, version)) = find_nvcc() else {
        if set("TOKENYARD_NVCC").is_some_and(|value| value == "none") {
            return;
        }
        println!(
            "cargo::warning=nvcc was not found, so the GPU part is left out and only the CPU device works; to have it: \
             python3 -m venv .venv && .venv/bin/pip install 'cuda-toolkit[nvcc,cudart,cccl]==13.0.*', touch build.rs, build again"
        );
        return;
    };
    let out = PathBuf::from(env::var_os("OUT_DIR").unwrap_or_default());
    let units: Vec<Unit> = kernel_units(sources).into_iter().map(|source| Unit::of(source, &out)).collect();
    let key = format!("{} {}", key_of(&format!("{version} {GPU_CODE:?}"), sources.iter()), nvcc.display());
    let key_file = out.join("kernels.key");
    let exist = units.iter().all(|unit| unit.fatbin.exists());
    if !exist || fs::read_to_string(&key_file).ok().as_deref() != Some(&key) {
        // A build that fails leaves some units newer than others.
        let _ = fs::remove_file(&key_file);
        let report = run_nvcc_on_all(&nvcc, &units).unwrap_or_else(|sentence| fail(&sentence));
        write(&out.join("ptxas.txt"), &report);
        write(&key_file, &key);
    }
    let images = units.iter().map(|unit| format!("image!({:?})", unit.fatbin)).collect::<Vec<_>>().join(", ");
    write(&out.join("images.rs"), &format!("[{images}]\n"));
    let report = fs::read_to_string(out.join("ptxas.txt")).unwrap_or_default();
    for line in report.lines().filter(|line| spills(line)) {
        println!("cargo::warning=ptxas spilled registers: {line}");
    }
    println!("cargo::rustc-cfg=tokenyard_fatbin");
}

fn write(path: &Path, text: &str) {
    if let Err(why) = fs::write(path, text) {
        fail(&format!("{} cannot be written: {why}", path.display()));
    }
}

/// A translation unit of kernels, and what nvcc makes of it.
struct Unit {
    source: PathBuf,
    fatbin: PathBuf,
}

impl Unit {
    fn of(source: PathBuf, out: &Path) -> Unit {
        let fatbin = out.join(flat_name(&source, "fatbin"));
        Unit { source, fatbin }
    }
}

/// A file's name with those of its folders, as folders' files may have the same name.
fn flat_name(source: &Path, extension: &str) -> String {
    let parts: Vec<_> = source.with_extension("").iter().map(|part| part.to_string_lossy().into_owned()).collect();
    format!("{}.{extension}", parts.join("_"))
}

/// Runs nvcc on all units and waits for all. Returns the table of kernels, and the seconds; or why one is not built.
fn run_nvcc_on_all(nvcc: &Path, units: &[Unit]) -> Result<String, String> {
    let start = Instant::now();
    let mut tables = on_all(units, |unit| run_nvcc(nvcc, unit)).into_iter().collect::<Result<Vec<String>, String>>()?;
    tables.sort();
    let columns = "kernel arch registers stack spill_stores spill_loads";
    Ok(format!("{columns}\n{}nvcc_seconds {:.1}\n", tables.concat(), start.elapsed().as_secs_f64()))
}

fn run_nvcc(nvcc: &Path, unit: &Unit) -> Result<String, String> {
    let mut command = Command::new(nvcc);
    for code in GPU_CODE {
        command.args(["-gencode", code]);
    }
    command.args(["-std=c++20", "-O3", "--fmad=false", "-Xptxas", "-v", "--fatbin", "-I", "kernels"]);
    // All architectures in parallel. By default fatbins of this size are not compressed.
    command.args(["--threads", "0", "--compress-mode=size"]);
    command.arg("-o").arg(&unit.fatbin).arg(&unit.source);
    let refused = |why| format!("{} cannot be run: {why}; set TOKENYARD_NVCC, or to none", nvcc.display());
    let output = command.output().map_err(refused)?;
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    if !output.status.success() {
        eprintln!("{command:?}\n{}{text}", String::from_utf8_lossy(&output.stdout));
        return Err(format!("{} refused {}; its messages are above", nvcc.display(), unit.source.display()));
    }
    Ok(ptxas_table(&text))
}

/// One line per kernel and architecture, from the output of `ptxas -v`.
fn ptxas_table(text: &str) -> String {
    let mut table = String::new();
    let (mut kernel, mut frame) = (String::new(), [0u64; 3]);
    for line in text.lines() {
        if let Some(rest) = line.split("Compiling entry function '").nth(1) {
            let mut quoted = rest.split('\'');
            kernel = format!("{} {}", quoted.next().unwrap_or("?"), quoted.nth(1).unwrap_or("?"));
        } else if line.contains("bytes stack frame") {
            let numbers: Vec<u64> = line.split_whitespace().filter_map(|word| word.parse().ok()).collect();
            frame = numbers.try_into().unwrap_or([0; 3]);
        } else if let Some(rest) = line.split("Used ").nth(1) {
            let registers = rest.split(' ').next().unwrap_or("?");
            let [stack, stores, loads] = frame;
            // Writing to a String cannot fail.
            let _ = writeln!(table, "{kernel} {registers} {stack} {stores} {loads}");
        }
    }
    table
}

fn spills(line: &str) -> bool {
    let mut numbers = line.split(' ').skip(4);
    numbers.any(|word| word.parse::<u64>().is_ok_and(|bytes| bytes > 0))
}

/// The first nvcc that is new enough, and the text of its `--version`.
fn find_nvcc() -> Option<(PathBuf, String)> {
    for name in ["CUDA_HOME", "VIRTUAL_ENV"] {
        println!("cargo::rerun-if-env-changed={name}");
    }
    match set("TOKENYARD_NVCC") {
        Some(none) if none == "none" => return None,
        Some(path) => {
            let path = PathBuf::from(path);
            let version = usable(&path);
            let version = version.unwrap_or_else(|why| fail(&format!("TOKENYARD_NVCC={}: {why}", path.display())));
            return Some((path, version));
        }
        None => {}
    }
    candidates().into_iter().find_map(|path| match usable(&path) {
        Ok(version) => Some((path, version)),
        Err(why) => {
            println!("cargo::warning={} is not used: {why}", path.display());
            None
        }
    })
}

fn candidates() -> Vec<PathBuf> {
    let mut folders: Vec<PathBuf> = Vec::new();
    folders.extend(set("CUDA_HOME").map(|cuda| Path::new(&cuda).join("bin")));
    let path: Vec<PathBuf> = env::var_os("PATH").iter().flat_map(env::split_paths).collect();
    folders.extend(path.iter().cloned());
    // Of Python: one that is active, those of PATH, in which pip puts what a build requires, and the repository's.
    let active = set("VIRTUAL_ENV").map(PathBuf::from);
    let of_path = path.iter().filter(|folder| folder.ends_with("bin")).filter_map(|folder| folder.parent());
    let environments = active.into_iter().chain(of_path.map(Path::to_path_buf)).chain([PathBuf::from(".venv")]);
    folders.extend(environments.flat_map(|environment| wheel_folders(&environment)));
    folders.into_iter().map(|folder| folder.join("nvcc")).filter(|path| path.is_file()).collect()
}

/// Where PyPI's wheels put nvcc: lib/python3.*/site-packages/nvidia/cu13/bin.
fn wheel_folders(environment: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(environment.join("lib")) else { return Vec::new() };
    let pythons = entries.filter_map(|entry| entry.ok().map(|entry| entry.path()));
    let pythons = pythons.filter(|path| path.file_name().is_some_and(|n| n.to_string_lossy().starts_with("python3.")));
    pythons.map(|path| path.join("site-packages/nvidia/cu13/bin")).collect()
}

/// The text of nvcc's `--version`, if the version is new enough.
fn usable(nvcc: &Path) -> Result<String, String> {
    let output = Command::new(nvcc).arg("--version").output().map_err(|why| format!("it cannot be run: {why}"))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let release = text.split("release ").nth(1).and_then(|rest| rest.split(',').next()).unwrap_or("").to_string();
    let mut numbers = release.split('.').map(|part| part.trim().parse::<u32>().unwrap_or(0));
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    if version >= OLDEST_NVCC {
        return Ok(text);
    }
    let (major, minor) = OLDEST_NVCC;
    Err(format!("it is release {release:?}, and {major}.{minor} is the oldest that supports these GPUs"))
}

/// The commit that results are reported with.
fn record_commit() {
    let commit = git_commit().unwrap_or_else(|| "unknown".into());
    println!("cargo::rustc-env=TOKENYARD_COMMIT={commit}");
}

fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").args(arguments).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?.trim().to_string();
    (output.status.success() && !text.is_empty()).then_some(text)
}

fn git_commit() -> Option<String> {
    // A copy inside another project's repository has no commit of its own.
    let top = fs::canonicalize(git(&["rev-parse", "--show-toplevel"])?).ok()?;
    if top != fs::canonicalize(".").ok()? {
        return None;
    }
    for name in ["HEAD", "logs/HEAD"] {
        let path = git(&["rev-parse", "--git-path", name])?;
        if Path::new(&path).exists() {
            println!("cargo::rerun-if-changed={path}");
        }
    }
    git(&["rev-parse", "--short=12", "HEAD"])
}
