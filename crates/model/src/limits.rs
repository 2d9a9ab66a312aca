//! [`Limits`]: what memory is for, a sum that the budget must hold.
//!
//! Invariants:
//! - `Limits` is a sum of named parts; a budget below the smallest sum is refused with the number
//!   needed, and what is left above it only ever saves time, never changes bits;
//! - nothing here grows with the model's depth except what the budget has room for.

use crate::{BudgetError, CHUNK_ELEMENTS, LayerSpec, LayerTable, Precision, StateLayout};

/// How many tokens a step has and how they are cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunShape {
    pub batch_rows: usize,
    /// Rows that pass a layer together; divides `batch_rows`.
    pub micro_rows: usize,
    pub seq_len: usize,
}

impl RunShape {
    /// Microbatches of a step.
    pub fn micros(&self) -> usize {
        self.batch_rows / self.micro_rows
    }

    /// Tokens of one microbatch.
    pub fn micro_tokens(&self) -> usize {
        self.micro_rows * self.seq_len
    }

    /// Tokens of a step.
    pub fn step_tokens(&self) -> usize {
        self.batch_rows * self.seq_len
    }
}

/// What the compute device needs in host memory, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Workspace {
    /// How exactly it wants weights.
    pub precision: Precision,
    /// What it makes of the largest tile when that is bound, and keeps until it is unbound.
    pub bound_bytes: usize,
    /// Most that any single command allocates while it runs.
    pub command_bytes: usize,
    /// Inner activations of one decoder layer and one microbatch, when they are kept.
    pub kept_bytes: usize,
    /// Logits of one vocabulary tile and one microbatch, when they are kept.
    pub logits_bytes: usize,
}

/// How many buffers of each kind a run has, and what waits on the disk instead.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Tiles of weights bound or on their way at once.
    pub weight_buffers: usize,
    /// Inputs of layers, `[micro tokens, D]` each, that are in RAM at once.
    pub boundaries: usize,
    pub boundary_bytes: usize,
    /// By layer: its inputs wait for the backward sweep in `scratch/`.
    pub parked: Vec<bool>,
    /// Bytes of gradients in RAM at once, in the making or waiting for the optimizer.
    pub gradient_bytes: usize,
    /// By layer: what its gradient takes.
    pub layer_gradient_bytes: Vec<usize>,
    /// By layer: its gradient waits for the optimizer in `scratch/`.
    pub spilled: Vec<bool>,
    /// Microbatches of decoder layers whose inner activations are kept for backward.
    pub kept: usize,
    /// Microbatches of vocabulary tiles whose logits are kept for backward, besides those of the
    /// last tile, which goes straight back and stays within `Workspace::command_bytes`.
    pub kept_logits: usize,
    /// Chunks of state the optimizer has in flight.
    pub optimizer_chunks: usize,
}

/// Most bytes of one operation on the disk: a chunk of float32 values.
pub const CHUNK_BYTES: usize = 4 << 20;
/// Fewest chunks with which reading and writing overlap with arithmetic, and how many pay.
const OPTIMIZER_CHUNKS_MIN: usize = 2;
const OPTIMIZER_CHUNKS_MAX: usize = 6;
/// Fewest tiles with which the next one loads while one computes.
const WEIGHT_BUFFERS_MIN: usize = 2;
const WEIGHT_BUFFERS_MAX: usize = 4;
/// Fewest inputs per microbatch: of the layer that computes, of the next one, and on its way to or
/// from `scratch/`.
const BOUNDARIES_MIN: usize = 3;
/// Other `[micro tokens, D]` tensors per microbatch: gathered rows, the normed hidden state, its
/// gradient, and the gradient that travels down.
const COMPANIONS: usize = 4;

impl Limits {
    /// Shares `ram_bytes` out. What is left above the minimum goes to the inputs of layers, to the
    /// optimizer's chunks, to gradients (`keep_gradients`: all of them have to wait for the last
    /// one), to weight buffers, to inner activations and to logits, in that order: by what a byte
    /// saves.
    pub fn new(
        table: &LayerTable,
        layout: StateLayout,
        shape: RunShape,
        workspace: Workspace,
        keep_gradients: bool,
        ram_bytes: usize,
    ) -> Result<Limits, BudgetError> {
        let parts = Parts::new(table, layout, shape, workspace);
        let Some(mut spare) = ram_bytes.checked_sub(parts.minimum()) else {
            return Err(BudgetError::TooSmall {
                given_bytes: ram_bytes as u64,
                needed_bytes: parts.minimum() as u64,
                parts: parts.describe(),
                remedy: String::new(),
            });
        };
        let micros = shape.micros();
        let mut share = |each: usize, most: usize| {
            let count = (spare / each.max(1)).min(most);
            spare -= count * each;
            count
        };
        let wanted = (table.len() - 1).saturating_sub(BOUNDARIES_MIN);
        let kept_inputs = share(parts.boundary * micros, wanted);
        let extra_chunks = share(parts.chunk, OPTIMIZER_CHUNKS_MAX - OPTIMIZER_CHUNKS_MIN);
        let waiting = if keep_gradients { parts.waiting_gradients() } else { 0 };
        let gradient_bytes = parts.gradients() + share(1, waiting);
        let extra_buffers = share(parts.weight_buffer, WEIGHT_BUFFERS_MAX - WEIGHT_BUFFERS_MIN);
        let kept = share(workspace.kept_bytes, (table.len() - 2) * micros);
        let scored = table.tiles(table.head()).len().saturating_sub(2);
        let kept_logits = share(workspace.logits_bytes, scored * micros);
        Ok(Limits {
            weight_buffers: WEIGHT_BUFFERS_MIN + extra_buffers,
            boundaries: (BOUNDARIES_MIN + kept_inputs) * micros,
            boundary_bytes: parts.boundary,
            parked: parked(table.len(), kept_inputs),
            spilled: parts.spilled(gradient_bytes, keep_gradients),
            gradient_bytes,
            layer_gradient_bytes: parts.gradients,
            kept,
            kept_logits,
            optimizer_chunks: OPTIMIZER_CHUNKS_MIN + extra_chunks,
        })
    }
}

/// Inputs of the lowest layers wait longest, so they are the ones that leave RAM. `kept_inputs`
/// layers stay besides those that are being worked on.
fn parked(layers: usize, kept_inputs: usize) -> Vec<bool> {
    let inputs = layers - 1;
    let staying = kept_inputs + BOUNDARIES_MIN;
    let parks = |layer: usize| inputs > staying && layer >= 1 && layer < layers - 1 - kept_inputs;
    (0..layers).map(parks).collect()
}

struct Parts {
    weight_buffer: usize,
    boundary: usize,
    micros: usize,
    layers: usize,
    /// By layer.
    gradients: Vec<usize>,
    /// Rows of several microbatches are brought together in a copy.
    gathered_rows: usize,
    workspace: usize,
    /// What the optimizer needs for the largest chunk: all planes and a gradient in, all planes out.
    chunk: usize,
}

impl Parts {
    fn new(
        table: &LayerTable,
        layout: StateLayout,
        shape: RunShape,
        workspace: Workspace,
    ) -> Parts {
        let hidden = table.layer(table.head()).tensors[0].elements();
        let mut gradients: Vec<usize> = table.layers().iter().map(|l| l.elements() * 4).collect();
        if !table.tied() {
            // Only rows that a step's tokens name.
            gradients[0] = gradients[0].min(shape.step_tokens() * hidden * 4);
        }
        let largest = table.layers().iter().map(LayerSpec::elements).max().unwrap_or(0);
        let chunk = largest.min(CHUNK_ELEMENTS);
        let planes = layout.weight_planes(workspace.precision);
        let tile = table.largest_tile();
        Parts {
            weight_buffer: planes.iter().map(|spec| spec.bytes(tile)).sum(),
            boundary: shape.micro_tokens() * hidden * 4,
            micros: shape.micros(),
            layers: table.len(),
            gathered_rows: if table.tied() || shape.micros() == 1 { 0 } else { gradients[0] },
            gradients,
            workspace: workspace.command_bytes + workspace.bound_bytes,
            chunk: 2 * layout.bytes(chunk) + chunk * 4,
        }
    }

    /// In the making: the embedding's, which lives through the whole backward sweep, and the
    /// head's or two decoder layers'.
    fn gradients(&self) -> usize {
        let decoder = self.gradients[1..self.layers - 1].iter().max().copied().unwrap_or(0);
        let head = self.gradients[self.layers - 1];
        self.gradients[0] + self.gathered_rows + (2 * decoder).max(head)
    }

    /// All but the embedding's.
    fn waiting_gradients(&self) -> usize {
        self.gradients[1..].iter().sum()
    }

    /// Gradients that have no room to wait beside those in the making, from the head down.
    fn spilled(&self, gradient_bytes: usize, keep_gradients: bool) -> Vec<bool> {
        let mut room = gradient_bytes - self.gradients();
        let mut spilled = vec![false; self.layers];
        for layer in (1..self.layers).rev().filter(|_| keep_gradients) {
            let bytes = self.gradients[layer];
            spilled[layer] = bytes > room;
            room -= if spilled[layer] { 0 } else { bytes };
        }
        spilled
    }

    fn boundaries(&self) -> usize {
        let inputs = BOUNDARIES_MIN.min(self.layers - 1);
        (inputs + COMPANIONS) * self.micros * self.boundary
    }

    fn optimizer(&self) -> usize {
        OPTIMIZER_CHUNKS_MIN * self.chunk
    }

    fn minimum(&self) -> usize {
        WEIGHT_BUFFERS_MIN * self.weight_buffer
            + self.boundaries()
            + self.gradients()
            + self.workspace
            + self.optimizer()
    }

    fn describe(&self) -> String {
        format!(
            "weights {}, activations {}, gradients {}, compute {}, optimizer {}",
            WEIGHT_BUFFERS_MIN * self.weight_buffer,
            self.boundaries(),
            self.gradients(),
            self.workspace,
            self.optimizer(),
        )
    }
}

#[cfg(test)]
mod tests;
