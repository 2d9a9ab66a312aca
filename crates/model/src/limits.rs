//! [`Limits`]: what memory is for, a sum that the budget must hold.
//!
//! Invariants:
//! - `Limits` is a sum of named parts; a budget below the smallest sum is refused with the number
//!   needed, and what is left above it only ever saves time, never changes bits;
//! - nothing here grows with the model's depth except what the budget has room for.

use std::ops::Range;

use crate::{
    BudgetError, CHUNK_ELEMENTS, LayerId, LayerSpec, LayerTable, Precision, Stage, StateLayout,
    Tiling,
};

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
    /// Inner activations of one tile of the decoder and one microbatch, when they are kept.
    pub kept_bytes: usize,
    /// Logits of one vocabulary tile and one microbatch, when they are kept.
    pub logits_bytes: usize,
}

/// What a gradient waits for before the optimizer may take it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Nothing.
    None,
    /// The norm of its layer.
    Layer,
    /// The norm of the model.
    Model,
}

/// How many buffers of each kind a run has, and what waits on the disk instead.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// How decoder layers are streamed: whole where they fit.
    pub tiling: Tiling,
    /// Layers from one kept input to the next; those between are computed again on the way back.
    pub interval: usize,
    /// Stages that this makes, one of which has an input that waits.
    pub group: usize,
    /// Bytes of weights bound or on their way at once, and of one weight.
    pub weight_bytes: usize,
    pub bytes_per_weight: usize,
    /// Inputs of stages, `[micro tokens, D]` each, that are in RAM at once.
    pub boundaries: usize,
    pub boundary_bytes: usize,
    /// By stage: its inputs, if they wait for the backward sweep, do so in `scratch/`.
    pub parked: Vec<bool>,
    /// Bytes of gradients in RAM at once, in the making or waiting for the optimizer.
    pub gradient_bytes: usize,
    /// By layer: what its gradient takes in `scratch/`.
    pub layer_gradient_bytes: Vec<usize>,
    /// By layer and piece: what it takes in RAM.
    pub piece_bytes: Vec<Vec<usize>>,
    /// By layer: its gradient waits in `scratch/`, for the norm of the model or, an embedding's, for
    /// the rows that tokens touched.
    pub spilled: Vec<bool>,
    /// Microbatches of tiles of the decoder whose inner activations are kept for backward.
    pub kept: usize,
    /// Microbatches of vocabulary tiles whose logits are kept for backward, besides those of the
    /// last tile, which goes straight back and stays within `Workspace::command_bytes`.
    pub kept_logits: usize,
    /// Chunks of state the optimizer has in flight.
    pub optimizer_chunks: usize,
    /// Bytes that are left for state that is read again.
    pub spare_bytes: usize,
    /// Of these: what new versions may take that are not saved.
    pub waiting_bytes: usize,
}

/// Most bytes of one operation on the disk: a chunk of float32 values.
pub const CHUNK_BYTES: usize = 4 << 20;
/// Fewest chunks with which reading and writing overlap with arithmetic, and how many pay.
const OPTIMIZER_CHUNKS_MIN: usize = 2;
const OPTIMIZER_CHUNKS_MAX: usize = 6;
/// Tiles that pay beside the two with which the next one loads while one computes.
const EXTRA_TILES: usize = 2;
/// Tiles that stay until the optimizer, inside the sweep, has read their weights again.
const FOLLOWING_TILES: usize = 2;
/// Layers whose pieces may have met in the middle of a chunk that is not complete yet.
const OPEN_SEAMS: usize = 2;
/// Fewest inputs per microbatch: of the layer that computes, of the next one, and on its way to or
/// from `scratch/`.
const BOUNDARIES_MIN: usize = 3;
/// Other `[micro tokens, D]` tensors per microbatch: gathered rows, the normed hidden state, its
/// gradient, and the gradient that travels down.
const COMPANIONS: usize = 4;

impl Limits {
    /// Shares `ram_bytes` out. Decoder layers are streamed in blocks only if they do not fit whole;
    /// `workspace` says what the device needs either way. What is left above the minimum goes to the
    /// gradient of an embedding that is tied, to the inputs of stages, to the optimizer's chunks, to
    /// gradients that wait for the norm of the model, to weights that the optimizer reads again, to
    /// weights ahead, to inner activations and to logits, in that order: by what a byte saves. The
    /// rest is for state that is read again. `interval`: see [`Limits::interval`]; at least 1.
    pub fn new(
        table: &LayerTable,
        layout: StateLayout,
        shape: RunShape,
        workspace: impl Fn(Tiling) -> Workspace,
        wait: Wait,
        interval: usize,
        ram_bytes: usize,
    ) -> Result<Limits, BudgetError> {
        let parts = |tiling| {
            let workspace = workspace(tiling);
            Parts::new(table, layout, shape, workspace, (tiling, interval), wait)
        };
        let (whole, blocks) = (parts(Tiling::Whole), parts(Tiling::Blocks));
        let fits = whole.minimum() <= ram_bytes || whole.minimum() <= blocks.minimum();
        let parts = if fits { whole } else { blocks };
        let Some(spare) = ram_bytes.checked_sub(parts.minimum()) else {
            return Err(BudgetError::TooSmall {
                given_bytes: ram_bytes as u64,
                needed_bytes: parts.minimum() as u64,
                parts: parts.describe(),
                remedy: String::new(),
            });
        };
        Ok(parts.share(spare))
    }
}

impl Limits {
    /// The first stage of each group whose input waits in `scratch/`, with the stages of the group:
    /// which one of them that is depends on what is locked.
    pub fn parked_groups(&self) -> impl Iterator<Item = Range<usize>> {
        let inputs = self.parked.len();
        let groups = (1..inputs).step_by(self.group);
        let groups = groups.map(move |start| start..(start + self.group).min(inputs));
        groups.filter(|group| self.parked[group.start])
    }
}

/// Stages that go back together, in a group whose first one's input is kept.
///
/// With an interval of one every stage is a group of its own, otherwise so many layers are. The uppermost
/// group has just been computed when the sweep turns: all its inputs stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Groups {
    /// Stages of a group.
    size: usize,
    /// The first stage that goes back, and the last one of the decoder.
    first: usize,
    last: usize,
}

impl Groups {
    /// `lowest`: the lowest layer that trains.
    pub fn new(table: &LayerTable, tiling: Tiling, interval: usize, lowest: LayerId) -> Groups {
        let last = table.stages(tiling) - 2;
        let each = last / (table.len() - 2).max(1);
        let size = if interval == 1 { 1 } else { interval.min(table.len()) * each.max(1) };
        Groups { size, first: 1 + lowest.index().saturating_sub(1) * each, last }
    }

    fn start(&self, stage: usize) -> usize {
        stage - stage.saturating_sub(self.first) % self.size
    }

    /// The first and the last stage of a stage's group.
    pub fn of(&self, stage: Stage) -> (Stage, Stage) {
        let start = self.start(stage.index());
        let end = (start + self.size - 1).min(self.last);
        (Stage(start as u32), Stage(end as u32))
    }

    /// Whether a group is made again on the way back.
    pub fn is_remade(&self, stage: Stage) -> bool {
        self.size > 1 && self.of(stage).1.index() < self.last
    }

    /// Whether a stage's input, once made, waits for the way back.
    pub fn keeps(&self, stage: Stage) -> bool {
        !self.is_remade(stage) || self.of(stage).0 == stage
    }

    /// Inputs that wait below the uppermost group.
    fn waiting(&self) -> usize {
        (self.start(self.last) - self.first).div_ceil(self.size)
    }
}

/// Inputs of the lowest stages wait longest, so they are the ones that leave RAM. Those of
/// `kept_inputs` groups stay besides those that are being worked on.
fn parked(stages: usize, groups: Groups, kept_inputs: usize) -> Vec<bool> {
    let inputs = stages - 1;
    // One more than the highest stage whose input may leave.
    let above = match groups.size {
        1 => {
            let staying = kept_inputs + BOUNDARIES_MIN;
            if inputs > staying { (stages - 1).saturating_sub(kept_inputs) } else { 0 }
        }
        size => groups.start(groups.last).saturating_sub(kept_inputs * size),
    };
    (0..stages).map(|stage| stage >= 1 && stage < above).collect()
}

struct Parts {
    tiling: Tiling,
    interval: usize,
    groups: Groups,
    wait: Wait,
    bytes_per_weight: usize,
    /// Of the two tiles that are largest together and follow one another, and of the largest one.
    pair_of_tiles: usize,
    largest_tile: usize,
    boundary: usize,
    micros: usize,
    stages: usize,
    vocabulary_tiles: usize,
    /// By layer, in `scratch/`.
    gradients: Vec<usize>,
    /// By layer and piece, in RAM; of the embedding only the rows that tokens touch.
    pieces: Vec<Vec<usize>>,
    /// The other pieces of an embedding that is tied.
    tied: Vec<usize>,
    /// Of what two pieces share.
    seam: usize,
    /// Rows of several microbatches are brought together in a copy.
    gathered_rows: usize,
    workspace: Workspace,
    /// What the optimizer needs for the largest chunk: all planes and a gradient in, all planes out.
    chunk: usize,
}

impl Parts {
    fn new(
        table: &LayerTable,
        layout: StateLayout,
        shape: RunShape,
        workspace: Workspace,
        (tiling, interval): (Tiling, usize),
        wait: Wait,
    ) -> Parts {
        let hidden = table.layer(table.head()).tensors[0].elements();
        let mut gradients: Vec<usize> = table.layers().iter().map(|l| l.elements() * 4).collect();
        let mut pieces: Vec<_> = table.layers().iter().map(|l| pieces(table, l, tiling)).collect();
        // Only those that a step's tokens name.
        let rows = gradients[0].min(shape.step_tokens() * hidden * 4);
        pieces[0].pop();
        let tied = std::mem::replace(&mut pieces[0], vec![rows]);
        if !table.tied() {
            gradients[0] = rows;
        }
        let largest = table.layers().iter().map(LayerSpec::elements).max().unwrap_or(0);
        let chunk = largest.min(CHUNK_ELEMENTS);
        let planes = layout.weight_planes(workspace.precision).iter();
        let bytes_per_weight = planes.map(|spec| spec.bytes(1)).sum();
        let tiles = table.streamed(tiling).map(|tile| tile.elements.len() * bytes_per_weight);
        let tiles: Vec<usize> = tiles.collect();
        Parts {
            tiling,
            interval,
            groups: Groups::new(table, tiling, interval, LayerId(0)),
            wait,
            bytes_per_weight,
            pair_of_tiles: largest_pair(&tiles),
            largest_tile: tiles.iter().max().copied().unwrap_or(0),
            boundary: shape.micro_tokens() * hidden * 4,
            micros: shape.micros(),
            stages: table.stages(tiling),
            vocabulary_tiles: table.tiles(table.head(), tiling).len() - 1,
            gathered_rows: if shape.micros() == 1 { 0 } else { rows },
            seam: if pieces.iter().chain([&tied]).any(|of| of.len() > 1) { chunk * 4 } else { 0 },
            gradients,
            tied,
            pieces,
            workspace,
            chunk: 2 * layout.bytes(chunk) + chunk * 4,
        }
    }

    /// In the making: the rows of the embedding, and two pieces - or all of a layer, where its norm
    /// has to be known first.
    fn gradients(&self) -> usize {
        let layers = self.pieces[1..].iter().rev().flatten();
        let in_order: Vec<usize> = self.tied.iter().chain(layers).copied().collect();
        let layer = match self.wait {
            Wait::Layer => self.pieces[1..].iter().map(|of| of.iter().sum()).max().unwrap_or(0),
            Wait::None | Wait::Model => 0,
        };
        let embedding = self.pieces[0].iter().sum::<usize>() + self.gathered_rows;
        embedding + largest_pair(&in_order).max(layer) + OPEN_SEAMS * self.seam
    }

    /// All but the embedding's, where they wait for the norm of the model.
    fn waiting_gradients(&self) -> usize {
        match self.wait {
            Wait::Model => self.pieces[1..].iter().flatten().sum(),
            Wait::None | Wait::Layer => 0,
        }
    }

    /// Gradients that have no room to wait beside those in the making, from the head down.
    fn spilled(&self, mut room: usize) -> Vec<bool> {
        let mut spilled = vec![false; self.pieces.len()];
        for layer in (1..spilled.len()).rev().filter(|_| self.wait == Wait::Model) {
            let bytes: usize = self.pieces[layer].iter().sum();
            spilled[layer] = bytes > room;
            room -= if spilled[layer] { 0 } else { bytes };
        }
        spilled
    }

    /// Inputs per microbatch that are worked on at once: where groups are made again, all of one and
    /// the next stage's.
    fn inputs(&self) -> usize {
        match self.groups.size {
            1 => BOUNDARIES_MIN,
            size => BOUNDARIES_MIN.max(size + 1),
        }
    }

    fn boundaries(&self) -> usize {
        let inputs = self.inputs().min(self.stages - 1);
        (inputs + COMPANIONS) * self.micros * self.boundary
    }

    fn optimizer(&self) -> usize {
        OPTIMIZER_CHUNKS_MIN * self.chunk
    }

    fn compute(&self) -> usize {
        self.workspace.command_bytes + self.workspace.bound_bytes
    }

    fn minimum(&self) -> usize {
        self.pair_of_tiles
            + self.boundaries()
            + self.gradients()
            + self.compute()
            + self.optimizer()
    }

    fn describe(&self) -> String {
        format!(
            "weights {}, activations {}, gradients {}, compute {}, optimizer {}",
            self.pair_of_tiles,
            self.boundaries(),
            self.gradients(),
            self.compute(),
            self.optimizer(),
        )
    }

    fn share(self, mut spare: usize) -> Limits {
        let mut share = |each: usize, most: usize| {
            let count = (spare / each.max(1)).min(most);
            spare -= count * each;
            count
        };
        let tied_bytes: usize = self.tied.iter().sum();
        let keeps_tied = tied_bytes == 0 || share(tied_bytes, 1) == 1;
        let wanted = match self.groups.size {
            1 => (self.stages - 1).saturating_sub(BOUNDARIES_MIN),
            _ => self.groups.waiting(),
        };
        let kept_inputs = share(self.boundary * self.micros, wanted);
        let extra_chunks = share(self.chunk, OPTIMIZER_CHUNKS_MAX - OPTIMIZER_CHUNKS_MIN);
        let waiting = share(1, self.waiting_gradients());
        let mut spilled = self.spilled(waiting);
        spilled[0] = !keeps_tied;
        let following = share(self.largest_tile, FOLLOWING_TILES);
        let extra_tiles = share(self.largest_tile, EXTRA_TILES);
        let stages = self.stages - 2;
        let keeping = if self.groups.size == 1 { stages } else { self.groups.size.min(stages) };
        let kept = share(self.workspace.kept_bytes, keeping * self.micros);
        let scored = self.vocabulary_tiles.saturating_sub(1);
        let kept_logits = share(self.workspace.logits_bytes, scored * self.micros);
        let spare_bytes = spare + following * self.largest_tile;
        let tied_kept = if keeps_tied { tied_bytes } else { 0 };
        let gradient_bytes = self.gradients() + tied_kept + waiting;
        let inputs = self.inputs();
        let mut piece_bytes = self.pieces;
        piece_bytes[0].splice(0..0, self.tied);
        Limits {
            tiling: self.tiling,
            interval: self.interval,
            group: self.groups.size,
            weight_bytes: self.pair_of_tiles + extra_tiles * self.largest_tile,
            bytes_per_weight: self.bytes_per_weight,
            boundaries: (inputs + kept_inputs) * self.micros,
            boundary_bytes: self.boundary,
            parked: parked(self.stages, self.groups, kept_inputs),
            spilled,
            gradient_bytes,
            layer_gradient_bytes: self.gradients,
            piece_bytes,
            kept,
            kept_logits,
            optimizer_chunks: OPTIMIZER_CHUNKS_MIN + extra_chunks,
            spare_bytes,
            waiting_bytes: spare,
        }
    }
}

/// What each piece of a layer's gradient takes in RAM: its chunks, and a copy of each one that it
/// shares with another piece.
fn pieces(table: &LayerTable, layer: &LayerSpec, tiling: Tiling) -> Vec<usize> {
    let chunk = layer.elements().min(CHUNK_ELEMENTS);
    let shared = |at: usize| usize::from(!at.is_multiple_of(CHUNK_ELEMENTS));
    let bytes = |piece: Range<usize>| {
        let block = piece.end - piece.start / CHUNK_ELEMENTS * CHUNK_ELEMENTS;
        let above = if piece.end == layer.elements() { 0 } else { shared(piece.end) };
        (block + (shared(piece.start) + above) * chunk) * 4
    };
    table.pieces(layer.id, tiling).into_iter().map(bytes).collect()
}

/// Most bytes of two that follow one another, or of the only one.
fn largest_pair(bytes: &[usize]) -> usize {
    let pairs = bytes.windows(2).map(|pair| pair[0] + pair[1]);
    pairs.max().unwrap_or_else(|| bytes.iter().sum())
}

#[cfg(test)]
mod tests;
