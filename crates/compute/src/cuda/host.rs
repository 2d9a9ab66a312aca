//! Launches of kernels that were compiled for the host.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_void};

use super::driver::Grid;

/// What decides how threads take turns, and a barrier or shuffle that is left out (0: none).
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Turns {
    pub(super) seed: u64,
    pub(super) skipped: u32,
}

/// Why a launch came to nothing.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum LaunchError {
    #[error("threads of a block wait for each other in different places")]
    Apart,
    #[error("no memory for the threads' stacks")]
    Memory,
    #[error("there is no kernel {0:?}")]
    Unknown(&'static CStr),
    #[error("another number of arguments than {0:?} has")]
    Arguments(&'static CStr),
}

/// `Launch` of `host.h`.
#[repr(C)]
struct Launch {
    blocks: [u32; 3],
    threads: u32,
    shared_bytes: u32,
    seed: u64,
    skipped: u32,
}

unsafe extern "C" {
    fn ftactor_launch(
        name: *const c_char,
        launch: *const Launch,
        arguments: *mut *mut c_void,
        count: usize,
    ) -> u32;
}

/// Runs a kernel to its end. Each argument's value is in eight bytes of its own: all are little-endian and at
/// most as long.
///
/// # Safety
/// The arguments are of the kernel's types, in its order, and its buffers as long as it reads and writes for
/// this grid.
pub(super) unsafe fn launch(
    kernel: &'static CStr,
    grid: Grid,
    turns: Turns,
    mut values: Vec<u64>,
) -> Result<(), LaunchError> {
    let Grid { blocks, threads, shared_bytes } = grid;
    let launch = Launch { blocks, threads, shared_bytes, seed: turns.seed, skipped: turns.skipped };
    let mut pointers: Vec<*mut c_void> =
        values.iter_mut().map(|value| std::ptr::from_mut(value).cast()).collect();
    // SAFETY: the caller's promise; all pointers outlive the call, which ends before it returns.
    let outcome =
        unsafe { ftactor_launch(kernel.as_ptr(), &launch, pointers.as_mut_ptr(), pointers.len()) };
    match outcome {
        0 => Ok(()),
        1 => Err(LaunchError::Apart),
        2 => Err(LaunchError::Memory),
        3 => Err(LaunchError::Unknown(kernel)),
        _ => Err(LaunchError::Arguments(kernel)),
    }
}
