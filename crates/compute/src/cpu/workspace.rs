//! How much memory the CPU device's commands need.

use model::{LayerTable, ModelConfig, StateLayout, Tiling, Workspace};

use super::decoder::Sizes;
use crate::rows::partial_count;
use crate::{ComputeDtype, MicroShape};

/// Bounds of what one command allocates from the budget while it runs, of what a tile of a store in
/// `layout` becomes, and of what one microbatch keeps: activations of a decoder layer's tile, logits
/// of a vocabulary tile.
///
/// Results are not counted: tensors `[T, D]`, gradients, what is kept. Of an untied embedding,
/// taking the gradient of several microbatches copies its rows once.
pub fn workspace(
    config: &ModelConfig,
    dtype: ComputeDtype,
    layout: StateLayout,
    shape: MicroShape,
    tiling: Tiling,
) -> Workspace {
    let sizes = Sizes::new(config, shape);
    let table = LayerTable::new(config);
    let tile_rows = table.tiles(table.head(), tiling).iter().map(|t| t.vocabulary.len()).max();
    let logits = shape.tokens() * tile_rows.unwrap_or(0);
    let head_norm = shape.tokens() + partial_count(shape.tokens()) * config.hidden_size;
    let elements = sizes.forward(tiling).max(sizes.backward(tiling)).max(logits).max(head_norm);
    let widened = if layout == StateLayout::F32 { 0 } else { table.largest_tile(tiling) * 4 };
    let bound_bytes = match dtype {
        ComputeDtype::F32 => widened,
        ComputeDtype::Bf16 => 0,
    };
    Workspace {
        precision: dtype.precision(),
        bound_bytes,
        command_bytes: elements * 4,
        kept_bytes: sizes.kept(tiling) * 4,
        logits_bytes: logits * 4,
    }
}
