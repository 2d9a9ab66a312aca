//! What a transformer is made of: ids, shapes, layers, tensors, and the memory they may use.
//!
//! Invariants:
//! - nothing here knows files, sockets, devices, threads or async code; of the operating system only
//!   where memory comes from;
//! - a layer's tensors lie back to back in one block, in the order of its [`LayerSpec`];
//! - what changes bits is derived from [`ModelConfig`] alone, never from a memory budget.

mod budget;
mod bytes;
mod config;
mod hash;
mod ids;
mod layers;
mod limits;
mod os;
mod planes;
mod weights;

pub use budget::{Budget, BudgetError, NextUse, Spare};
pub use bytes::{HostBytes, PAGE_BYTES};
pub use config::{ConfigError, Family, ModelConfig, RopeScaling};
pub use hash::{hex, parse_hex};
pub use ids::{Attempt, LayerId, Micro, PieceId, Slot, Stage, Step, TileId};
pub use layers::{
    LayerKind, LayerSpec, LayerTable, Role, TensorSpec, TileSpec, Tiling, VOCAB_TILE_ROWS,
};
pub use limits::{CHUNK_BYTES, Groups, Limits, RunShape, Wait, Workspace};
pub use planes::{
    CHUNK_ELEMENTS, MOMENT_BLOCK, PLANES, Plane, PlaneSpec, PlaneType, Precision, StateLayout,
    chunk_count, chunk_elements, from_bf16, from_bf16_into, join, join_into, split, split_into,
    to_bf16,
};
pub use weights::Weights;
