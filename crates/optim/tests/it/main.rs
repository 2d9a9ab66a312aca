//! The optimizer's arithmetic against PyTorch, against plain twins, and against its own promises.
// Everything here is a test, the functions they share included.
#![allow(clippy::unwrap_used)]

mod codes;
mod finite;
mod golden;
mod lr;
mod norm;
mod update;
