//! The hash that ties a generated file to the header it was made from. Used by build.rs and tests/ffi.rs alone.

/// Marks the line of a generated file that holds its header's hash.
pub const MARK: &str = "// header hash: ";

/// FNV-1a, 64 bits. Carriage returns are skipped, so that a checkout's line endings do not matter.
pub fn fnv1a(bytes: &[u8]) -> u64 {
    fnv1a_more(0xcbf2_9ce4_8422_2325, bytes)
}

/// Goes on from an earlier hash.
pub fn fnv1a_more(start: u64, bytes: &[u8]) -> u64 {
    let kept = bytes.iter().filter(|byte| **byte != b'\r');
    kept.fold(start, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3))
}

/// The hash line of a file generated from `header`.
pub fn hash_line(header: &[u8]) -> String {
    format!("{MARK}{:016x}", fnv1a(header))
}
