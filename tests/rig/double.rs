//! The EFA double (tests/doubles): a libfabric whose provider `efa` moves packets between processes, and refuses what
//! EFA refuses.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The double's path, compiled at its first use; `None` where libfabric's headers are missing, which fails under
/// TOKENYARD_STRICT=1.
pub fn efa() -> Option<&'static Path> {
    static BUILT: OnceLock<Option<PathBuf>> = OnceLock::new();
    BUILT.get_or_init(build).as_deref()
}

fn build() -> Option<PathBuf> {
    if !Path::new("/usr/include/rdma/fabric.h").exists() {
        println!("skipped: /usr/include/rdma/fabric.h is missing (Debian: libfabric-dev)");
        assert_ne!(std::env::var("TOKENYARD_STRICT").as_deref(), Ok("1"), "libfabric's headers are missing");
        return None;
    }
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/doubles");
    let parts = ["efa", "efa_objects", "efa_queues", "efa_endpoint", "efa_post", "efa_link", "efa_wire"];
    // Of this process alone until it is whole: other test programs build it, too.
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let (own, library) = (folder.join(format!("efa_double.{}", std::process::id())), folder.join("libefa_double.so"));
    let built = Command::new("gcc")
        .args(["-std=c11", "-O1", "-g", "-fvisibility=hidden", "-shared", "-fPIC", "-o"])
        .arg(&own)
        .args(parts.map(|part| sources.join(part).with_extension("c")))
        .status()
        .expect("gcc runs");
    assert!(built.success(), "gcc refuses the EFA double");
    std::fs::rename(&own, &library).unwrap();
    Some(library)
}
