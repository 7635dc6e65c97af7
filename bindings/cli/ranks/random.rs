//! Random numbers of the system: for tokens by which ranks know each other, and for ports.

/// Bytes that nobody can guess.
pub(super) fn random_bytes<const N: usize>() -> Result<[u8; N], String> {
    let mut bytes = [0u8; N];
    getrandom::fill(&mut bytes)
        .map_err(|error| format!("the system gives no random numbers ({error}); see getrandom(2)"))?;
    Ok(bytes)
}
