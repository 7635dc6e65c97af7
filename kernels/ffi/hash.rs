//! The hash that ties a generated file to the header it was made from. Used by build.rs and tests/rules/ffi.rs alone.

/// Marks the line of a generated file that holds its header's hash.
pub const MARK: &str = "// header hash: ";

/// FNV-1a, 64 bits.
pub fn fnv1a(bytes: &[u8]) -> u64 {
    fnv1a_more(0xcbf2_9ce4_8422_2325, bytes)
}

/// Goes on from an earlier hash.
pub fn fnv1a_more(start: u64, bytes: &[u8]) -> u64 {
    bytes.iter().fold(start, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3))
}

/// The hash line of a file generated from `header`. Comments, blank lines and line endings do not count: they do not
/// reach the bindings.
pub fn hash_line(header: &[u8]) -> String {
    let text = String::from_utf8_lossy(header);
    let code = text.lines().map(|line| line.split("//").next().unwrap_or("").trim_end());
    let sum = code.filter(|line| !line.is_empty()).fold(fnv1a(b""), |sum, line| {
        let line_sum = fnv1a_more(sum, line.as_bytes());
        fnv1a_more(line_sum, b"\n")
    });
    format!("{MARK}{sum:016x}")
}
