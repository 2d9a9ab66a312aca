//! Forward and backward of one layer at a time on a [`Device`].
//!
//! Invariants:
//! - layer code is stateless: weights are bound to a buffer for one visit, activations and
//!   gradients live on the device under names that the caller chose;
//! - only `Bind`, `Put`, `Get`, `Embed` and `TakeGradient` move bytes between host and device;
//! - the arithmetic of a command depends on its operands only, never on threads or budgets.

mod attention;
mod cpu;
// Kernels are proven before there is a device that launches them.
#[cfg(all(test, emulator))]
mod cuda;
#[cfg(all(test, not(emulator)))]
#[test]
fn kernels_are_untested_only_where_there_is_no_compiler() {
    assert!(std::env::var_os("CI").is_none(), "the emulator's kernels were not compiled");
}
mod device;
mod os;
mod product;
pub mod reference;
mod rows;
mod simd;

pub use cpu::{CpuDevice, workspace};
pub use device::{
    Command, Device, DeviceError, Done, Gradient, MicroShape, NO_TARGET, Outcome, TensorId,
    WeightsId,
};
pub use product::ComputeDtype;
