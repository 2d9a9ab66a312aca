//! What only the operating system can grant.
#![allow(unsafe_code)]

/// Whether this process may use tile registers (AMX): Linux saves them only for processes that asked.
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
pub(crate) fn may_use_tiles() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_int = 0x1023;
    const TILE_DATA: libc::c_ulong = 18;
    // SAFETY: the call takes two numbers and touches none of our memory.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0 }
}

/// Whether this process may use tile registers (AMX).
#[cfg(not(all(target_os = "linux", target_arch = "x86_64")))]
pub(crate) fn may_use_tiles() -> bool {
    false
}
