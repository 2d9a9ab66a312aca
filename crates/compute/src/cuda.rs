//! The CUDA kernels, so far on the emulator only: `kernels/` has them, written once for cards and for it.
//!
//! Invariants:
//! - a kernel's result depends on its operands only, never on the order in which threads run;
//! - whatever a kernel reads of shared memory, it wrote before.

mod host;
mod tests;
