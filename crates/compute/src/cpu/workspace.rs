//! How much memory the CPU device's commands need.

use model::{LayerTable, ModelConfig, Precision, StateLayout, Workspace};

use super::decoder::Sizes;
use crate::rows::partial_count;
use crate::{ComputeDtype, MicroShape};

/// Bounds of what one command allocates from the budget while it runs, of what a tile of a store in
/// `layout` becomes, and of what one microbatch keeps: activations of a decoder layer, logits of a vocabulary tile.
///
/// Results are not counted: tensors `[T, D]`, gradients, what is kept. Of an untied embedding,
/// taking the gradient of several microbatches copies its rows once.
pub fn workspace(
    config: &ModelConfig,
    dtype: ComputeDtype,
    layout: StateLayout,
    shape: MicroShape,
) -> Workspace {
    let sizes = Sizes::new(config, shape);
    let table = LayerTable::new(config);
    let tile_rows = table.tiles(table.head()).iter().map(|t| t.vocabulary.len()).max();
    let logits = shape.tokens() * tile_rows.unwrap_or(0);
    let head_norm = shape.tokens() + partial_count(shape.tokens()) * config.hidden_size;
    let elements = sizes.forward().max(sizes.backward()).max(logits).max(head_norm);
    let widened = if layout == StateLayout::F32 { 0 } else { table.largest_tile() * 4 };
    let (precision, bound_bytes) = match dtype {
        ComputeDtype::F32 => (Precision::Exact, widened),
        ComputeDtype::Bf16 => (Precision::Bf16, 0),
    };
    Workspace {
        precision,
        bound_bytes,
        command_bytes: elements * 4,
        kept_bytes: sizes.kept() * 4,
        logits_bytes: logits * 4,
    }
}
