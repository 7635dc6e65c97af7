//! The C interface as its users have it: installed, and used by programs in C and C++ that other compilers built.
//!
//! The libraries are linked from the crate as it was built for this test, so that it is not built once more. Programs
//! are in tests/c; the guide's example is one of them.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use crate::rig::text;

/// By then every program of these tests has ended.
const PATIENCE: Duration = Duration::from_secs(180);
const WARNINGS: [&str; 4] = ["-Wall", "-Wextra", "-Werror", "-pedantic"];
const SONAME: &str = "libtokenyard.so.0";

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// Runs a command, which must succeed.
fn done(command: &mut Command) -> Output {
    let output = command.output().unwrap_or_else(|why| panic!("{command:?}: {why}"));
    assert!(output.status.success(), "{command:?}: {}{}", text(&output.stdout), text(&output.stderr));
    output
}

/// Builds of the crate beside this test, the newest first: those without the C interface do not link.
fn builds() -> Vec<PathBuf> {
    let program = std::env::current_exe().unwrap();
    let files = std::fs::read_dir(program.parent().unwrap()).unwrap().flatten();
    let mut builds: Vec<_> = files
        .filter(|file| {
            let name = file.file_name().to_string_lossy().into_owned();
            name.starts_with("libtokenyard-") && name.ends_with(".rlib")
        })
        .map(|file| (std::cmp::Reverse(file.metadata().unwrap().modified().unwrap()), file.path()))
        .collect();
    builds.sort();
    builds.into_iter().map(|(_, path)| path).collect()
}

/// Links both libraries from one build of the crate, into `folder`.
fn link(build: &Path, folder: &Path) -> Result<(), String> {
    let source = folder.join("root.rs");
    std::fs::write(&source, "extern crate tokenyard;\npub use tokenyard::c;\n").unwrap();
    let mut rustc = Command::new(std::env::var_os("RUSTC").unwrap_or("rustc".into()));
    rustc.current_dir(root()).args([
        "--edition",
        "2024",
        "--crate-name",
        "tokenyard_c",
        "--print",
        "native-static-libs",
    ]);
    rustc.args(["--crate-type", "cdylib,staticlib", "-C", &format!("link-arg=-Wl,-soname,{SONAME}")]);
    rustc.arg("-L").arg(format!("dependency={}", build.parent().unwrap().display()));
    rustc.arg("--extern").arg(format!("tokenyard={}", build.display())).arg("--out-dir").arg(folder).arg(&source);
    if std::env::var_os("LLVM_PROFILE_FILE").is_some() {
        // The crate counts lines, so its runtime is needed.
        rustc.args(["-C", "instrument-coverage"]);
    }
    let output = rustc.output().map_err(|why| format!("{rustc:?}: {why}"))?;
    let messages = text(&output.stderr);
    if !output.status.success() {
        return Err(format!("{rustc:?}: {messages}"));
    }
    let needed = messages.lines().find_map(|line| line.strip_prefix("note: native-static-libs: "));
    std::fs::write(folder.join("native-static-libs"), needed.ok_or("the compiler named no libraries")?).unwrap();
    for kind in ["a", "so"] {
        std::fs::rename(folder.join(format!("libtokenyard_c.{kind}")), folder.join(format!("libtokenyard.{kind}")))
            .unwrap();
    }
    Ok(())
}

/// Where the interface is installed.
fn installed() -> &'static Path {
    static PREFIX: OnceLock<PathBuf> = OnceLock::new();
    PREFIX.get_or_init(|| {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("c");
        let (libraries, prefix) = (folder.join("libraries"), folder.join("prefix"));
        std::fs::create_dir_all(&libraries).unwrap();
        let mut refused = Vec::new();
        let mut links = |build: &PathBuf| link(build, &libraries).map_err(|why| refused.push(why)).is_ok();
        let linked = builds().iter().take(8).any(&mut links);
        assert!(linked, "no build of the crate has the C interface: {refused:?}");
        let mut install = Command::new(root().join("bindings/c/install.sh"));
        done(install.arg("--prefix").arg(&prefix).arg("--libraries").arg(&libraries));
        std::fs::remove_dir_all(&libraries).unwrap();
        prefix
    })
}

/// The rest of a line of the file for pkg-config.
fn field(name: &str) -> Vec<String> {
    let file = std::fs::read_to_string(installed().join("lib/pkgconfig/tokenyard.pc")).unwrap();
    let line = file.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": ")).unwrap().to_owned();
    line.split_whitespace().map(str::to_owned).collect()
}

/// How programs are built.
#[derive(Clone, Copy)]
struct Way {
    name: &'static str,
    /// The compiler of C and the compiler of C++.
    compilers: [&'static str; 2],
    statically: bool,
    flags: &'static [&'static str],
}

const SHARED: Way = Way { name: "gcc", compilers: ["gcc", "g++"], statically: false, flags: &["-O1"] };
const STATIC: Way = Way { name: "clang", compilers: ["clang", "clang++"], statically: true, flags: &["-O1"] };
const CHECKED: Way = Way {
    name: "asan",
    compilers: ["gcc", "g++"],
    statically: true,
    flags: &["-O1", "-g", "-fsanitize=address", "-fno-omit-frame-pointer"],
};

/// Whether there is a compiler; prints it otherwise, or fails where nothing may be skipped.
fn has(compiler: &str) -> bool {
    let found = Command::new(compiler).arg("--version").output().is_ok_and(|output| output.status.success());
    if !found {
        println!("skipped: {compiler} is missing");
        assert_ne!(std::env::var("TOKENYARD_STRICT").as_deref(), Ok("1"), "{compiler} is missing");
    }
    found
}

/// Builds a program; `None` without the compiler.
fn built(way: Way, source: &Path, standard: &str) -> Option<PathBuf> {
    let compiler = way.compilers[usize::from(source.extension().is_some_and(|e| e == "cpp"))];
    if !has(compiler) {
        return None;
    }
    let (prefix, name) = (installed(), source.file_stem().unwrap().to_string_lossy().into_owned());
    let program = prefix.parent().unwrap().join(format!("{name}-{}-{}", way.name, standard.replace('+', "p")));
    let lib = prefix.join("lib");
    let mut compile = Command::new(compiler);
    compile.arg(format!("-std={standard}")).args(WARNINGS).args(way.flags);
    compile.arg("-I").arg(prefix.join("include")).arg("-I").arg(root().join("tests/c"));
    compile.arg("-o").arg(&program).arg(source).arg("-pthread");
    if way.statically {
        compile.arg(lib.join("libtokenyard.a")).args(field("Libs.private"));
    } else {
        compile.arg("-L").arg(&lib).arg("-ltokenyard").arg(format!("-Wl,-rpath,{}", lib.display()));
    }
    done(&mut compile);
    Some(program)
}

/// Ends a program that is late, and whatever holds it up.
struct Running(Child);

impl Running {
    fn outcome(mut self, since: Instant) -> (Option<i32>, String) {
        while self.0.try_wait().unwrap().is_none() && since.elapsed() < PATIENCE {
            std::thread::sleep(Duration::from_millis(20));
        }
        let _ = self.0.kill();
        let status = self.0.wait().unwrap();
        let mut said = String::new();
        for pipe in [
            self.0.stdout.take().map(|out| Box::new(out) as Box<dyn std::io::Read>),
            self.0.stderr.take().map(|err| Box::new(err) as _),
        ] {
            let _ = pipe.map(|mut pipe| pipe.read_to_string(&mut said));
        }
        (status.code(), said)
    }
}

fn start(program: &Path, arguments: &[&str], environment: &[(&str, String)]) -> Running {
    let mut command = Command::new(program);
    for name in ["TOKENYARD_NODES", "LOCAL_WORLD_SIZE", "TOKENYARD_TOKEN", "TORCHELASTIC_RUN_ID"] {
        command.env_remove(name);
    }
    command.args(arguments).envs(environment.iter().map(|(name, value)| (name, value)));
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    Running(command.spawn().unwrap())
}

/// Runs a program as one process.
fn alone(program: &Path) {
    let (status, said) = start(program, &[], &[]).outcome(Instant::now());
    assert_eq!(status, Some(0), "{}: {said}", program.display());
    assert!(said.contains("all right"), "{said}");
}

/// Runs a program as ranks of a job, as torchrun starts them; gives the outcome of each.
fn ranks(program: &Path, argument: &str, ranks: usize, address: &str) -> Vec<(Option<i32>, String)> {
    let port = TcpListener::bind((address, 0)).unwrap().local_addr().unwrap().port();
    let rank = |rank: usize| {
        let environment = [
            ("RANK", rank.to_string()),
            ("LOCAL_RANK", rank.to_string()),
            ("WORLD_SIZE", ranks.to_string()),
            ("MASTER_ADDR", address.to_owned()),
            ("TOKENYARD_PORT", port.to_string()),
        ];
        start(program, &[argument], &environment)
    };
    let running: Vec<Running> = (0..ranks).map(rank).collect();
    let since = Instant::now();
    running.into_iter().map(|running| running.outcome(since)).collect()
}

/// An address of this job alone: all of 127/8 is this host.
fn address(number: u32) -> String {
    let pid = std::process::id();
    format!("127.{}.{}.{number}", 1 + pid / 251 % 250, 1 + pid % 251)
}

fn program(name: &str) -> PathBuf {
    root().join("tests/c").join(name)
}

/// All programs, built in one way.
fn run_all(way: Way, number: u32) {
    let [Some(of_ranks), Some(errors), Some(threads)] =
        [("ranks.c", "c99"), ("errors.c", "c99"), ("threads.cpp", "c++11")]
            .map(|(name, standard)| built(way, &program(name), standard))
    else {
        return;
    };
    alone(&errors);
    alone(&threads);
    for what in ["layer", "nodes"] {
        for (rank, (status, said)) in ranks(&of_ranks, what, 3, &address(number)).into_iter().enumerate() {
            assert_eq!((status, said), (Some(0), format!("rank {rank} of 3: all right\n")), "{what}");
        }
    }
}

#[test]
fn programs_of_gcc_with_the_shared_library() {
    run_all(SHARED, 1);
}

#[test]
fn programs_of_clang_with_the_static_library() {
    run_all(STATIC, 2);
}

#[test]
fn programs_under_the_address_sanitizer() {
    run_all(CHECKED, 3);
}

#[test]
fn a_rank_that_dies_is_reported_to_a_program_in_c() {
    let Some(of_ranks) = built(SHARED, &program("ranks.c"), "c11") else { return };
    let mut outcomes = ranks(&of_ranks, "dies", 3, &address(4));
    let (status, said) = outcomes.pop().unwrap();
    assert_eq!(status, None, "killed by itself: {said}");
    for (rank, (status, said)) in outcomes.into_iter().enumerate() {
        assert_eq!((status, said), (Some(0), format!("rank {rank} of 3: all right\n")));
    }
}

#[test]
fn the_header_compiles_by_itself_in_every_standard() {
    let folder = installed().parent().unwrap();
    for (extension, standards) in [("c", &["c99", "c11", "c17"]), ("cpp", &["c++11", "c++17", "c++20"])] {
        let source = folder.join(format!("header.{extension}"));
        std::fs::write(&source, "#include <tokenyard.h>\n#include <tokenyard.h>\nint main(void) { return 0; }\n")
            .unwrap();
        // What engines compile with, which have the header's functions with _init in their own code.
        let flags: &[&str] = match extension {
            "c" => &["-Wconversion", "-Wshadow", "-Wundef", "-Wstrict-prototypes"],
            _ => &["-Wconversion", "-Wshadow", "-Wundef", "-Wold-style-cast"],
        };
        let ways = [SHARED, STATIC].map(|way| Way { flags, ..way });
        for (standard, way) in standards.iter().flat_map(|standard| ways.map(|way| (standard, way))) {
            built(way, &source, standard);
        }
    }
}

#[test]
fn the_pages_example_in_c_runs() {
    let page = std::fs::read_to_string(root().join("docs/c.md")).unwrap();
    let examples: Vec<&str> = page.split("\n```c\n").skip(1).filter_map(|rest| rest.split("\n```").next()).collect();
    assert_eq!(examples.len(), 1);
    let source = installed().parent().unwrap().join("page.c");
    std::fs::write(&source, format!("{}\n", examples[0])).unwrap();
    let Some(program) = built(SHARED, &source, "c99") else { return };
    let (status, said) = start(&program, &[], &[]).outcome(Instant::now());
    assert_eq!((status, said.as_str()), (Some(0), "sums 0.5 and 4\n"));
}

#[test]
fn the_shared_library_has_its_soname_and_exports_nothing_else() {
    let lib = installed().join("lib");
    assert_eq!(std::fs::read_link(lib.join("libtokenyard.so")).unwrap(), Path::new(SONAME));
    let file = std::fs::read_link(lib.join(SONAME)).unwrap();
    assert_eq!(file.to_str(), Some(concat!("libtokenyard.so.", env!("CARGO_PKG_VERSION"))));
    let dynamic = text(&done(Command::new("readelf").arg("-d").arg(lib.join(&file))).stdout);
    assert!(dynamic.contains(&format!("soname: [{SONAME}]")), "{dynamic}");
    let symbols = text(&done(Command::new("nm").args(["-D", "--defined-only"]).arg(lib.join(&file))).stdout);
    let names: Vec<&str> = symbols.lines().filter_map(|line| line.split(' ').nth(2)).collect();
    // A build that counts lines has symbols of its runtime.
    let strange: Vec<_> =
        names.iter().filter(|name| !name.starts_with("tokenyard_") && !name.contains("llvm")).collect();
    assert!(strange.is_empty(), "{strange:?}");
    let header = std::fs::read_to_string(installed().join("include/tokenyard.h")).unwrap();
    let missing: Vec<_> =
        names.iter().filter(|name| name.starts_with("tokenyard_") && !header.contains(&format!("{name}("))).collect();
    assert!(names.len() > 60 && missing.is_empty(), "{missing:?}");
}

#[test]
fn pkg_config_finds_the_library() {
    if !has("pkg-config") {
        return;
    }
    let mut ask = Command::new("pkg-config");
    ask.env("PKG_CONFIG_PATH", installed().join("lib/pkgconfig")).args(["--cflags", "--libs", "--static", "tokenyard"]);
    let flags = text(&done(&mut ask).stdout);
    for flag in ["include", "-ltokenyard", "-lstdc++"] {
        assert!(flags.contains(flag), "{flags}");
    }
}

/// The installation asks cargo for the libraries; a script stands in for cargo, as a build of its own takes minutes.
/// As in a new checkout the target folder does not exist, and folders are relative to the caller's.
#[test]
fn the_installation_has_cargo_build_both_libraries() {
    let folder = installed().parent().unwrap().join("stub");
    let (bin, target, prefix) = (folder.join("bin"), folder.join("target"), folder.join("prefix"));
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&bin).unwrap();
    let script = format!(
        "#!/bin/sh\necho \"$@\" >{0}/asked\nsleep 0.2\nmkdir -p {1}/release\n\
         touch {1}/release/libtokenyard.a {1}/release/libtokenyard.so\n\
         echo 'note: native-static-libs: -lone -ltwo' >&2\n",
        folder.display(),
        target.display()
    );
    let stub = bin.join("cargo");
    std::fs::write(&stub, script).unwrap();
    std::fs::set_permissions(&stub, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap());
    let mut install = Command::new(root().join("bindings/c/install.sh"));
    install.current_dir(&folder).env("PATH", path);
    install.args(["--prefix", "prefix", "--target-dir", "target", "--features", "c"]);
    done(&mut install);
    let asked = std::fs::read_to_string(folder.join("asked")).unwrap();
    for words in [
        "rustc --release --lib --no-default-features --features c ",
        " --crate-type cdylib,staticlib -- ",
        &format!("-Wl,-soname,{SONAME}"),
        "--print native-static-libs",
    ] {
        assert!(asked.contains(words), "{asked}");
    }
    let file = std::fs::read_to_string(prefix.join("lib/pkgconfig/tokenyard.pc")).unwrap();
    assert!(file.contains(&format!("prefix={}\n", prefix.display())), "{file}");
    assert!(file.contains("Libs.private: -lone -ltwo\n"), "{file}");
}

#[test]
fn options_of_the_installation_that_are_unusable_are_refused() {
    for (arguments, sentence) in [
        (&[][..], "give --prefix DIR"),
        (&["--prefix"], "--prefix needs a value"),
        (&["--predix", "/x"], "unknown option"),
    ] {
        let output = Command::new(root().join("bindings/c/install.sh")).args(arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(2));
        assert!(text(&output.stderr).contains(sentence), "{}", text(&output.stderr));
    }
}
