//! Launches of kernels that were compiled for the host.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_void};

/// Blocks and threads of a launch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Grid {
    pub(super) blocks: [u32; 3],
    /// Of a block: whole warps.
    pub(super) threads: u32,
    pub(super) shared_bytes: u32,
}

/// What decides how threads take turns, and a barrier or shuffle that is left out (0: none).
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Turns {
    pub(super) seed: u64,
    pub(super) skipped: u32,
}

/// An argument of a kernel.
#[derive(Debug)]
pub(super) enum Arg<'a> {
    Int(i32),
    Long(i64),
    Word(u32),
    Float(f32),
    F32(&'a [f32]),
    Bf16(&'a [u16]),
    U32(&'a [u32]),
    F32Out(&'a mut [f32]),
    Bf16Out(&'a mut [u16]),
    /// A buffer that is not there.
    Absent,
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

/// Runs a kernel to its end.
///
/// # Safety
/// The arguments are of the kernel's types, in its order, and its buffers as long as it reads and writes for
/// this grid.
pub(super) unsafe fn launch(
    kernel: &'static CStr,
    grid: Grid,
    turns: Turns,
    arguments: &mut [Arg<'_>],
) -> Result<(), LaunchError> {
    let Grid { blocks, threads, shared_bytes } = grid;
    let launch = Launch { blocks, threads, shared_bytes, seed: turns.seed, skipped: turns.skipped };
    // Every argument's value in eight bytes of its own; all are little-endian and at most as long.
    let mut values: Vec<u64> = arguments.iter_mut().map(Arg::bits).collect();
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

impl Arg<'_> {
    fn bits(&mut self) -> u64 {
        match self {
            Arg::Int(value) => u64::from(value.cast_unsigned()),
            Arg::Long(value) => value.cast_unsigned(),
            Arg::Word(value) => u64::from(*value),
            Arg::Float(value) => u64::from(value.to_bits()),
            Arg::F32(values) => values.as_ptr() as u64,
            Arg::Bf16(values) => values.as_ptr() as u64,
            Arg::U32(values) => values.as_ptr() as u64,
            Arg::F32Out(values) => values.as_mut_ptr() as u64,
            Arg::Bf16Out(values) => values.as_mut_ptr() as u64,
            Arg::Absent => 0,
        }
    }
}
