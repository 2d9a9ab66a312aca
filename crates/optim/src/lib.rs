//! The optimizer's arithmetic: AdamW, 8-bit moments, stochastic rounding, gradient norms, clipping
//! and learning rates, on slices.
//!
//! Invariants:
//! - nothing here knows files, layers, devices or threads: the caller cuts the work into pieces;
//! - every result is a function of values and their order alone: not of how a tensor is cut into
//!   pieces, of how many threads work on them, or of the instruction set ([`InstructionSet`]);
//! - one step's scalars are rounded once ([`Prepared`]), so that every piece uses the same ones.

mod adamw;
mod codes;
mod error;
mod finite;
mod lr;
mod norm;
mod rounding;
mod simd;

pub use adamw::{AdamW, Input, Output, Prepared, update, update_zero_grad};
pub use codes::{CODE_BLOCK, Code, SIGNED, UNSIGNED};
pub use error::HyperparameterError;
pub use finite::is_finite;
pub use lr::{LrSchedule, Schedule, WSD_DECAY_DIVISOR};
pub use norm::{BLOCK_ELEMENTS, NormTree, clip_factor, sum_of_squares};
pub use rounding::{round_stochastically, rounding_key};
pub use simd::InstructionSet;
