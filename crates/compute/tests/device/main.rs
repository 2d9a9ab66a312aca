//! The CPU device against PyTorch, the float64 reference, itself, and its memory bounds.

// A failed step of a test's preparation is a failed test.
#![allow(clippy::unwrap_used)]

mod bits;
mod errors;
mod golden;
mod harness;
mod layers;
mod locks;
mod memory;
