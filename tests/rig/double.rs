//! The doubles (tests/doubles): a libfabric whose provider `efa` moves packets between processes, and refuses what EFA
//! refuses; a libibverbs, and a libmlx5, whose NICs register memory and refuse what kernel and device refuse.
//!
//! `TOKENYARD_TEST_EFA` names another libfabric, whose devices then take the place of the EFA double.

#![allow(dead_code)]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The EFA double's path, compiled at its first use; `None` where libfabric's headers are missing, which fails under
/// TOKENYARD_STRICT=1.
pub fn efa() -> Option<&'static Path> {
    static BUILT: OnceLock<Option<PathBuf>> = OnceLock::new();
    let parts = ["efa", "efa_objects", "efa_regions", "efa_queues", "efa_endpoint", "efa_post", "efa_link", "efa_wire"];
    let build = || build("libefa_double", &["rdma/fabric.h"], "libfabric-dev", &parts, &[]);
    let given = || std::env::var_os("TOKENYARD_TEST_EFA").map(PathBuf::from);
    BUILT.get_or_init(|| given().or_else(build)).as_deref()
}

const IBVERBS: [&str; 3] = ["ibverbs", "ibverbs_regions", "ibverbs_queues"];

/// The libibverbs double's path, for TOKENYARD_LIBIBVERBS; `None` as for [`efa`], with libibverbs' headers.
pub fn ibverbs() -> Option<&'static Path> {
    static BUILT: OnceLock<Option<PathBuf>> = OnceLock::new();
    BUILT.get_or_init(|| build_verbs("libibverbs_double", &IBVERBS, &[])).as_deref()
}

/// Its libmlx5.
pub fn mlx5() -> Option<&'static Path> {
    static BUILT: OnceLock<Option<PathBuf>> = OnceLock::new();
    BUILT.get_or_init(|| build_verbs("libmlx5_double", &["ibverbs_mlx5"], &[])).as_deref()
}

/// The libibverbs double without what came after its first versions, such as registration of dma-bufs.
pub fn first_ibverbs() -> Option<&'static Path> {
    static BUILT: OnceLock<Option<PathBuf>> = OnceLock::new();
    BUILT.get_or_init(|| build_verbs("libibverbs_first_double", &IBVERBS, &["-DIBVERBS_1_1"])).as_deref()
}

/// Its libmlx5 without data direct.
pub fn first_mlx5() -> Option<&'static Path> {
    static BUILT: OnceLock<Option<PathBuf>> = OnceLock::new();
    BUILT.get_or_init(|| build_verbs("libmlx5_first_double", &["ibverbs_mlx5"], &["-DMLX5_BEFORE_54"])).as_deref()
}

/// What the libibverbs double wrote to the file of TOKENYARD_IBVERBS_LOG so far: an object for each event.
pub fn ibverbs_log(path: &Path) -> Vec<serde_json::Value> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|why| panic!("{line}: {why}"))).collect()
}

fn build_verbs(name: &str, parts: &[&str], flags: &[&str]) -> Option<PathBuf> {
    build(name, &["infiniband/verbs.h", "infiniband/mlx5dv.h"], "libibverbs-dev", parts, flags)
}

/// The folder that TOKENYARD_DOUBLES names has them, where they cannot be compiled.
fn build(name: &str, headers: &[&str], package: &str, parts: &[&str], flags: &[&str]) -> Option<PathBuf> {
    if let Some(folder) = std::env::var_os("TOKENYARD_DOUBLES") {
        return Some(Path::new(&folder).join(format!("{name}.so")));
    }
    for header in headers.iter().map(|header| Path::new("/usr/include").join(header)) {
        if !header.exists() {
            println!("skipped: {} is missing (Debian: {package})", header.display());
            assert_ne!(std::env::var("TOKENYARD_STRICT").as_deref(), Ok("1"), "{} is missing", header.display());
            return None;
        }
    }
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/doubles");
    if !sources.exists() {
        println!("skipped: the double's sources are not on this machine, and TOKENYARD_DOUBLES names no folder");
        assert_ne!(std::env::var("TOKENYARD_STRICT").as_deref(), Ok("1"), "no {}", sources.display());
        return None;
    }
    // Of this process alone until it is whole: other test programs build it, too.
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let (own, library) = (folder.join(format!("{name}.{}", std::process::id())), folder.join(format!("{name}.so")));
    let built = Command::new("gcc")
        .args(["-std=c11", "-O1", "-g", "-fvisibility=hidden", "-shared", "-fPIC", "-o"])
        .arg(&own)
        .args(flags)
        .args(parts.iter().map(|part| sources.join(part).with_extension("c")))
        .status()
        .expect("gcc runs");
    assert!(built.success(), "gcc refuses the double {name}");
    std::fs::rename(&own, &library).unwrap();
    Some(library)
}
