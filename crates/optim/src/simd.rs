//! Run-time choice of the instruction set: one source per kernel, compiled once per set.
//!
//! Invariants:
//! - a kernel is plain Rust in an `#[inline(always)]` body, so the portable build of the same
//!   source is the twin that the others are tested against;
//! - Rust never contracts a multiplication and an addition into one rounding and never reorders
//!   float arithmetic, so all builds of a kernel give equal bits (payloads of NaNs excepted);
//! - the fields of [`InstructionSet`] are private: a value naming a set exists only where the
//!   processor has it.
#![allow(unsafe_code)]

use std::fmt;

/// An instruction set that this processor has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InstructionSet(Level);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Level {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl InstructionSet {
    /// The build that runs everywhere (SSE2 on x86-64, NEON on AArch64).
    pub const PORTABLE: Self = Self(Level::Portable);

    /// The widest set of this processor. Cheap: detection is cached by the standard library.
    #[cfg(target_arch = "x86_64")]
    pub fn best() -> Self {
        if is_x86_feature_detected!("avx512f") {
            Self(Level::Avx512)
        } else if is_x86_feature_detected!("avx2") {
            Self(Level::Avx2)
        } else {
            Self::PORTABLE
        }
    }

    /// The widest set of this processor.
    #[cfg(not(target_arch = "x86_64"))]
    pub fn best() -> Self {
        Self::PORTABLE
    }

    /// All sets of this processor, narrowest first.
    pub fn available() -> Vec<Self> {
        let mut sets = vec![Self::PORTABLE];
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx2") {
                sets.push(Self(Level::Avx2));
            }
            if is_x86_feature_detected!("avx512f") {
                sets.push(Self(Level::Avx512));
            }
        }
        sets
    }

    /// Runs `kernel` as compiled for this set.
    #[inline]
    pub(crate) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        match self.0 {
            Level::Portable => kernel.run(),
            // SAFETY: a value with this level is only made, in this file, after `avx2` was
            // detected on the running processor.
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => unsafe { run_avx2(kernel) },
            // SAFETY: a value with this level is only made, in this file, after `avx512f` was
            // detected on the running processor.
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => unsafe { run_avx512(kernel) },
        }
    }
}

impl fmt::Display for InstructionSet {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self.0 {
            Level::Portable => "portable",
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => "avx512",
        })
    }
}

/// A loop over slices that is compiled once per instruction set.
pub(crate) trait Kernel {
    type Output;

    /// Must be `#[inline(always)]`, as must what it calls in its loops: code that stays a function
    /// of its own is compiled for the portable set.
    fn run(self) -> Self::Output;
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn run_avx2<K: Kernel>(kernel: K) -> K::Output {
    kernel.run()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn run_avx512<K: Kernel>(kernel: K) -> K::Output {
    kernel.run()
}
