//! Registered memory: the only place where an endpoint touches bytes that it does not own.
//!
//! The argument for its `unsafe`, once for all uses: an address comes from a region of this endpoint, whose registrar
//! promised to keep it readable and writable until it is taken back or the endpoint dropped, and `locate` has found the
//! whole length inside. Only the endpoint's own calls copy, so they end before that: a region from which writes are
//! outstanding is not taken back, and taking one back drops all writes that would still be placed in it. The process
//! that owns the memory copies what other processes send; no address ever leaves it.

/// Appends registered memory to a buffer.
///
/// # Safety
/// The memory lies in a span of the endpoint that calls, which lives: see the module's documentation.
pub(super) unsafe fn append(out: &mut Vec<u8>, address: u64, bytes: usize) {
    out.reserve(bytes);
    let source = std::ptr::with_exposed_provenance::<u8>(address as usize);
    // SAFETY: the caller's promise for the source. The target was reserved, is no registered memory, and is initialised
    // for the whole of the new length.
    unsafe {
        std::ptr::copy_nonoverlapping(source, out.as_mut_ptr().add(out.len()), bytes);
        out.set_len(out.len() + bytes);
    }
}

/// Copies a packet into registered memory.
///
/// # Safety
/// As for [`append`], of the target.
pub(super) unsafe fn place(packet: &[u8], address: u64) {
    let target = std::ptr::with_exposed_provenance_mut::<u8>(address as usize);
    // SAFETY: the caller's promise for the target; the packet is a buffer of the endpoint's own.
    unsafe { std::ptr::copy_nonoverlapping(packet.as_ptr(), target, packet.len()) };
}
