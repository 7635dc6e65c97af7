//! How much memory this process can still have, and how long its files may be.
//!
//! Place: asked before arenas and buffers in host memory are made, since the system grants more than there is and later
//! ends the process. Reads a few small files; never waits.
//!
//! A container's limit is that of its control group or of any group around it, whichever leaves least. File pages that
//! only cache a disk count as used there, but are dropped when memory is asked for: they are counted as free, as
//! `MemAvailable` counts them.

use nix::sys::resource::{Resource, getrlimit};
use std::path::{Component, Path};

/// The names of a control group's files, by version.
struct Files {
    limit: &'static str,
    used: &'static str,
    /// The line of memory.stat that counts file pages not used of late.
    cached: &'static str,
}

const V1: Files =
    Files { limit: "memory.limit_in_bytes", used: "memory.usage_in_bytes", cached: "total_inactive_file " };
const V2: Files = Files { limit: "memory.max", used: "memory.current", cached: "inactive_file " };

/// Bytes that can be had without swapping, by the system and by the control groups of this process, whichever is less;
/// `None` where neither is known.
pub fn available_bytes() -> Option<u64> {
    available_under(Path::new("/"))
}

/// Bytes that a file of this process may have, anonymous files included; `None` where no limit is known. Making a
/// longer file raises a signal that ends the process.
pub fn longest_file() -> Option<u64> {
    getrlimit(Resource::RLIMIT_FSIZE).ok().map(|(soft, _)| soft)
}

/// As `available_bytes`, of the machine whose files lie under `root`.
fn available_under(root: &Path) -> Option<u64> {
    system_bytes(root).into_iter().chain(group_bytes(root)).min()
}

fn system_bytes(root: &Path) -> Option<u64> {
    let text = std::fs::read_to_string(root.join("proc/meminfo")).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// The least that a control group of this process has left.
fn group_bytes(root: &Path) -> Option<u64> {
    let text = std::fs::read_to_string(root.join("proc/self/cgroup")).ok()?;
    text.lines().filter_map(|line| least_of_line(root, line)).min()
}

/// Of a line `number:controllers:path`: version 2 has no controllers, and of version 1 the one named memory matters.
fn least_of_line(root: &Path, line: &str) -> Option<u64> {
    let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
    let (files, top) = match controllers {
        "" => (V2, root.join("sys/fs/cgroup")),
        _ if controllers.split(',').any(|name| name == "memory") => (V1, root.join("sys/fs/cgroup/memory")),
        _ => return None,
    };
    // A container may see its own group as the top, and the path as its host sees it: folders that are not there are
    // skipped.
    let names = Path::new(path).components().filter(|part| matches!(part, Component::Normal(_)));
    let mut folder = top.clone();
    let inner = names.map(|name| {
        folder.push(name);
        left(&folder, &files)
    });
    inner.chain([left(&top, &files)]).flatten().min()
}

/// What one group has left; `None` if it has no limit, for which version 2 has the word `max`.
fn left(group: &Path, files: &Files) -> Option<u64> {
    let number = |name| std::fs::read_to_string(group.join(name)).ok()?.trim().parse::<u64>().ok();
    let (limit, used) = (number(files.limit)?, number(files.used)?);
    let stat = std::fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
    let cached = stat.lines().find_map(|line| line.strip_prefix(files.cached)?.trim().parse().ok()).unwrap_or(0);
    Some(limit.saturating_sub(used.saturating_sub(cached)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// What is available on a machine that has only these files.
    fn available(files: &[(&str, &str)]) -> Option<u64> {
        let folder = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = folder.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        available_under(folder.path())
    }

    const SYSTEM: (&str, &str) = ("proc/meminfo", "MemTotal: 9000 kB\nMemAvailable:    8192 kB\n");

    #[test]
    fn without_control_groups_the_systems_word_counts() {
        assert_eq!(available(&[]), None);
        assert_eq!(available(&[SYSTEM]), Some(8 * MIB));
        assert_eq!(available(&[SYSTEM, ("proc/self/cgroup", "0::/\n")]), Some(8 * MIB));
        assert!(available_bytes().is_some());
    }

    #[test]
    fn a_containers_limit_counts_where_it_leaves_less() {
        let group = |limit| {
            let files = [
                SYSTEM,
                ("proc/self/cgroup", "0::/\n"),
                ("sys/fs/cgroup/memory.max", limit),
                ("sys/fs/cgroup/memory.current", "1048576\n"),
            ];
            available(&files)
        };
        assert_eq!(group("4194304\n"), Some(3 * MIB));
        assert_eq!(group("67108864\n"), Some(8 * MIB), "the system has less");
        assert_eq!(group("max\n"), Some(8 * MIB));
        assert_eq!(group("1000\n"), Some(0), "over its limit");
    }

    #[test]
    fn the_narrowest_of_nested_groups_counts_and_pages_of_files_are_free() {
        let nested = [
            SYSTEM,
            ("proc/self/cgroup", "0::/pod/../app\n"),
            ("sys/fs/cgroup/pod/memory.max", "5242880\n"),
            ("sys/fs/cgroup/pod/memory.current", "4194304\n"),
            ("sys/fs/cgroup/pod/memory.stat", "anon 7\ninactive_file 1048576\nactive_file 9\n"),
            ("sys/fs/cgroup/pod/app/memory.max", "4194304\n"),
            ("sys/fs/cgroup/pod/app/memory.current", "1048576\n"),
        ];
        assert_eq!(available(&nested), Some(2 * MIB));
        // The path on the host, which the container does not see.
        let bare = [SYSTEM, nested[1], ("sys/fs/cgroup/memory.max", "2097152"), ("sys/fs/cgroup/memory.current", "0")];
        assert_eq!(available(&bare), Some(2 * MIB));
    }

    #[test]
    fn groups_of_the_first_version_are_heeded() {
        let files = [
            SYSTEM,
            ("proc/self/cgroup", "4:cpu,cpuacct:/a\n3:memory:/a\n0::/\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "5242880\n"),
            ("sys/fs/cgroup/memory/a/memory.limit_in_bytes", "5242880\n"),
            ("sys/fs/cgroup/memory/a/memory.usage_in_bytes", "3145728\n"),
            ("sys/fs/cgroup/memory/a/memory.stat", "inactive_file 4096\ntotal_inactive_file 1048576\n"),
        ];
        assert_eq!(available(&files), Some(3 * MIB));
    }
}
