//! The arithmetic on one chunk of a layer: update and hash; and the norm of a gradient.

use std::ops::Range;
use std::sync::Arc;

use compute::Gradient;
use model::{Budget, CHUNK_BYTES, HostBytes, LayerSpec};
use optim::{Input, NormTree, Output, Prepared};
use rayon::prelude::*;
use store::{ChunkHasher, StateChunk};

use crate::reply::Failure;

/// Parameters of one chunk.
pub(super) const ELEMENTS: usize = CHUNK_BYTES / 4;

/// Elements that are hashed and computed at a time: 7 x 64 KiB, in the second-level cache.
const PIECE: usize = 16 << 10;

/// What the moments of a layer's first update count as, whatever its files hold: a new run need not
/// rewrite them.
static NO_MOMENTS: [f32; PIECE] = [0.0; PIECE];

/// Elements that one thread square-sums at a time: a power of two of the norm tree's blocks.
const NORM_PIECE: usize = 64 * optim::BLOCK_ELEMENTS;

/// New state of a chunk and its hashes by plane.
pub(super) struct ChunkOutput {
    pub(super) bytes: StateChunk,
    pub(super) hashes: [u64; 3],
    /// Of the state that it was computed from, to be compared before anything is written.
    pub(super) read_hashes: [u64; 3],
    /// Nothing in the new state is infinite or not a number.
    pub(super) finite: bool,
    /// Squares of the new weights, if they were asked for.
    pub(super) weights: Option<NormTree>,
}

/// The gradient a chunk is updated with.
pub(super) enum GradientPart {
    Whole(Arc<Gradient>),
    /// The chunk's own elements, read back from `scratch/`.
    Read(HostBytes),
}

/// Sum of squares over a fixed tree, independent of the number of threads.
pub(super) fn sum_of_squares(gradient: &Gradient) -> f64 {
    let values = match gradient {
        Gradient::Dense(values) => values.f32s(),
        Gradient::Rows { values, .. } => values.f32s(),
    };
    let pieces: Vec<NormTree> = values
        .par_chunks(NORM_PIECE)
        .map(|piece| {
            let mut tree = NormTree::new();
            tree.feed(piece);
            tree
        })
        .collect();
    join(&pieces)
}

/// Sum of squares of a layer from those of its chunks, in their order; zero without any.
pub(super) fn join(chunks: &[NormTree]) -> f64 {
    let mut whole = NormTree::new();
    chunks.iter().for_each(|chunk| whole.append(chunk));
    whole.sum()
}

/// New state of a chunk: piece by piece, so that what is read is hashed, computed on, hashed again
/// and looked at while it is in cache. `weigh`: the new weights are square-summed.
pub(super) fn update(
    layer: &LayerSpec,
    chunk: usize,
    prepared: &Prepared,
    state: &StateChunk,
    gradient: &GradientPart,
    budget: &Budget,
    weigh: bool,
) -> Result<ChunkOutput, Failure> {
    let block = || budget.block(state.weight.len());
    let mut new = StateChunk { weight: block()?, exp_avg: block()?, exp_avg_sq: block()? };
    let (mut read, mut written) = (ChunkHasher::default(), ChunkHasher::default());
    let (mut finite, mut weights) = (true, weigh.then(NormTree::new));
    let first = chunk * ELEMENTS;
    let end = first + state.weight.len() / 4;
    for start in (first..end).step_by(PIECE) {
        let piece = start..(start + PIECE).min(end);
        let local = piece.start - first..piece.end - first;
        let bytes = local.start * 4..local.end * 4;
        read.feed(state, bytes.clone());
        update_piece(layer, first, &piece, prepared, state, gradient, &mut new);
        written.feed(&new, bytes);
        let planes = [&new.weight, &new.exp_avg, &new.exp_avg_sq];
        finite &= planes.iter().all(|plane| optim::is_finite(&plane.f32s()[local.clone()]));
        weights.iter_mut().for_each(|tree| tree.feed(&new.weight.f32s()[local.clone()]));
    }
    let (hashes, read_hashes) = (written.finish(), read.finish());
    Ok(ChunkOutput { bytes: new, hashes, read_hashes, finite, weights })
}

/// Updates `piece` (elements of the layer) of the chunk that starts at `first`.
fn update_piece(
    layer: &LayerSpec,
    first: usize,
    piece: &Range<usize>,
    prepared: &Prepared,
    state: &StateChunk,
    gradient: &GradientPart,
    new: &mut StateChunk,
) {
    for tensor in &layer.tensors {
        let part = overlap(&tensor.range(), piece);
        if part.is_empty() {
            continue;
        }
        let local = part.start - first..part.end - first;
        let decay = tensor.decays();
        let dense = match gradient {
            GradientPart::Read(values) => &values.f32s()[local.clone()],
            GradientPart::Whole(whole) => match &**whole {
                Gradient::Dense(values) => &values.f32s()[part],
                Gradient::Rows { ids, width, values } => {
                    let rows = Rows { ids, width: *width, values: values.f32s() };
                    rows.update(prepared, decay, state, new, part, first);
                    continue;
                }
            },
        };
        let (input, output) = slices(prepared, state, new, local, dense);
        optim::update(prepared, decay, input, output);
    }
}

/// A gradient of which only some rows are not zero.
struct Rows<'g> {
    ids: &'g [u32],
    width: usize,
    values: &'g [f32],
}

impl Rows<'_> {
    /// Updates `part` (elements of the layer) run by run: touched rows, and what lies between.
    fn update(
        &self,
        prepared: &Prepared,
        decay: bool,
        state: &StateChunk,
        new: &mut StateChunk,
        part: Range<usize>,
        start: usize,
    ) {
        let mut at = part.start;
        let first = self.ids.partition_point(|&id| (id as usize + 1) * self.width <= part.start);
        for (i, &id) in self.ids.iter().enumerate().skip(first) {
            let row = id as usize * self.width;
            let touched = overlap(&(row..row + self.width), &part);
            if touched.is_empty() {
                break;
            }
            let (input, output) =
                slices(prepared, state, new, at - start..touched.start - start, &[]);
            optim::update_zero_grad(prepared, decay, input, output);
            let offset = i * self.width + (touched.start - row);
            let grad = &self.values[offset..offset + touched.len()];
            let local = touched.start - start..touched.end - start;
            let (input, output) = slices(prepared, state, new, local, grad);
            optim::update(prepared, decay, input, output);
            at = touched.end;
        }
        let (input, output) = slices(prepared, state, new, at - start..part.end - start, &[]);
        optim::update_zero_grad(prepared, decay, input, output);
    }
}

fn slices<'a>(
    prepared: &Prepared,
    state: &'a StateChunk,
    new: &'a mut StateChunk,
    range: Range<usize>,
    grad: &'a [f32],
) -> (Input<'a>, Output<'a>) {
    let old = |block: &'a HostBytes| &block.f32s()[range.clone()];
    let moments = |block: &'a HostBytes| match prepared.is_first() {
        true => &NO_MOMENTS[..range.len()],
        false => old(block),
    };
    let input = Input {
        weight: old(&state.weight),
        exp_avg: moments(&state.exp_avg),
        exp_avg_sq: moments(&state.exp_avg_sq),
        grad,
    };
    let output = Output {
        weight: &mut new.weight.f32s_mut()[range.clone()],
        exp_avg: &mut new.exp_avg.f32s_mut()[range.clone()],
        exp_avg_sq: &mut new.exp_avg_sq.f32s_mut()[range],
    };
    (input, output)
}

fn overlap(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    let start = a.start.max(b.start);
    start..a.end.min(b.end).max(start)
}
