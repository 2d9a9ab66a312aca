//! The CUDA kernels, so far on the emulator only: `kernels/` has them, written once for cards and for it.
//!
//! Invariants:
//! - a kernel's result depends on its operands only, never on the order in which threads run;
//! - whatever a kernel reads of shared memory, it wrote before;
//! - work on the device goes through [`driver::Driver`], and only `emulator` knows that there is no card.

mod driver;
mod emulator;
mod host;
mod tests;
