//! The arithmetic on one chunk of a layer: update and hash; and the norm of a gradient.

use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;

use compute::Gradient;
use model::{Budget, LayerSpec, StateLayout};
use optim::{Input, NormTree, Output, Prepared};
use rayon::prelude::*;
use store::{ChunkHasher, ChunkHashes, StateChunk};

use crate::planes::{self, Rounding};
use crate::reply::Failure;

use super::shadow::{Shadow, Version, sample};

/// Elements that are hashed and computed at a time: 7 x 64 KiB, in the second-level cache.
const PIECE: usize = 16 << 10;

/// What the moments of a layer's first update count as, whatever its files hold: a new run need not
/// rewrite them.
static NO_MOMENTS: [f32; PIECE] = [0.0; PIECE];

/// Elements that one thread square-sums at a time: a power of two of the norm tree's blocks.
const NORM_PIECE: usize = 64 * optim::BLOCK_ELEMENTS;

/// How a layer is updated.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rule<'s> {
    pub(super) prepared: Prepared,
    /// The number of the layer's update, from 1 on.
    pub(super) t: u64,
    /// Trained along, where the layout rounds.
    pub(super) shadow: &'s Shadow,
    /// Where weights are rounded stochastically: of this step and layer alone.
    pub(super) rounding: u64,
    /// New weights are square-summed, before they are rounded.
    pub(super) weigh: bool,
}

/// New state of a chunk and its hashes.
pub(super) struct ChunkOutput {
    pub(super) bytes: StateChunk,
    pub(super) hashes: ChunkHashes,
    /// Of the state that it was computed from, to be compared before anything is written.
    pub(super) read_hashes: ChunkHashes,
    /// Nothing in the new state is infinite or not a number.
    pub(super) finite: bool,
    /// Squares of the new weights, if they were asked for.
    pub(super) weights: Option<NormTree>,
}

/// The gradient of a chunk: one value for each parameter, or rows that are not zero, or both, which
/// add up.
#[derive(Clone, Debug)]
pub(super) struct GradientPart {
    pub(super) dense: Option<Arc<Gradient>>,
    pub(super) rows: Option<Arc<Gradient>>,
}

impl GradientPart {
    /// The dense values of `part`, elements of the layer.
    fn dense(&self, part: Range<usize>) -> Option<&[f32]> {
        match self.dense.as_deref()? {
            Gradient::Dense { first, values } => {
                Some(&values.f32s()[part.start - first..part.end - first])
            }
            Gradient::Rows { .. } => None,
        }
    }

    fn rows(&self) -> Option<Rows<'_>> {
        match self.rows.as_deref()? {
            Gradient::Rows { ids, width, values } => {
                Some(Rows { ids, width: *width, values: values.f32s() })
            }
            Gradient::Dense { .. } => None,
        }
    }

    /// Both, of `part`, in `room`; `None` where one of them is enough.
    fn added<'r>(&self, part: Range<usize>, room: &'r mut Vec<f32>) -> Option<&'r [f32]> {
        let (dense, rows) = (self.dense(part.clone())?, self.rows()?);
        room.clear();
        room.extend_from_slice(dense);
        rows.touched(&part, |at, values| {
            let to = &mut room[at.start - part.start..at.end - part.start];
            to.iter_mut().zip(values).for_each(|(to, value)| *to += value);
        });
        Some(room)
    }
}

/// Square sum of rows over a fixed tree, independent of the number of threads.
pub(super) fn sum_of_rows(rows: &Gradient) -> f64 {
    let (Gradient::Rows { values, .. } | Gradient::Dense { values, .. }) = rows;
    let pieces: Vec<NormTree> = values.f32s().par_chunks(NORM_PIECE).map(square_sum).collect();
    join(&pieces)
}

/// Square sums of the elements `chunk` of a layer, over a fixed tree, independent of the number of
/// threads.
pub(super) fn square_sums(gradient: &GradientPart, chunk: Range<usize>) -> NormTree {
    let pieces: Vec<usize> = chunk.clone().step_by(NORM_PIECE).collect();
    let of_piece = |start: usize| {
        let piece = start..(start + NORM_PIECE).min(chunk.end);
        let mut room = Vec::new();
        let added = gradient.added(piece.clone(), &mut room);
        square_sum(added.or_else(|| gradient.dense(piece)).unwrap_or_default())
    };
    let pieces: Vec<NormTree> = pieces.into_par_iter().map(of_piece).collect();
    append(&pieces)
}

fn square_sum(values: &[f32]) -> NormTree {
    let mut tree = NormTree::new();
    tree.feed(values);
    tree
}

/// Sum of squares of a layer from those of its chunks, in their order; zero without any.
pub(super) fn join(chunks: &[NormTree]) -> f64 {
    append(chunks).sum()
}

fn append(pieces: &[NormTree]) -> NormTree {
    let mut whole = NormTree::new();
    pieces.iter().for_each(|piece| whole.append(piece));
    whole
}

/// New state of a chunk: piece by piece, so that what is read is hashed, computed on, hashed again
/// and on its way out while it is in the caches.
pub(super) fn update(
    layer: &LayerSpec,
    chunk: usize,
    rule: &Rule<'_>,
    state: &StateChunk,
    gradient: &GradientPart,
    budget: &Budget,
) -> Result<ChunkOutput, Failure> {
    let layout = state.layout();
    let Range { start: first, end } = model::chunk_elements(layer.elements(), chunk);
    let mut new = StateChunk::unwritten(layout, end - first, budget)?;
    let (mut read, mut written) = (ChunkHasher::default(), ChunkHasher::default());
    let (mut finite, mut weights) = (true, rule.weigh.then(NormTree::new));
    WIDE.with_borrow_mut(|wide| {
        for start in (first..end).step_by(PIECE) {
            let piece = start..(start + PIECE).min(end);
            let local = piece.start - first..piece.end - first;
            read.feed(state, local.clone());
            let Wide { old, new: out } = wide;
            let old = read_piece(state, local.clone(), rule, old);
            let mut out = new_piece(&mut new, local.clone(), out);
            update_piece(layer, &piece, rule, gradient, old, &mut out);
            let shadow = shadowed(layer, layout, &piece, first, rule, gradient, old);
            finite &= out.iter().all(|values| optim::is_finite(values));
            weights.iter_mut().for_each(|tree| tree.feed(out[0]));
            let rounding = Rounding::Stochastic { key: rule.rounding, first: piece.start as u64 };
            planes::narrow(&mut new, local.clone(), rounding, wide.new.each_ref().map(|w| &w[..]));
            if let Some((version, sample)) = shadow {
                let mut rounded = vec![0.0; sample.len()];
                planes::widen(&new, sample, 0, &mut rounded);
                rule.shadow.after(layer.id, version, &rounded);
            }
            written.feed(&new, local);
        }
    });
    let (hashes, read_hashes) = (written.finish(layout), read.finish(layout));
    Ok(ChunkOutput { bytes: new, hashes, read_hashes, finite, weights })
}

/// The layer's sample after the update, if the piece has it, and where it lies in the chunk.
fn shadowed(
    layer: &LayerSpec,
    layout: StateLayout,
    piece: &Range<usize>,
    first: usize,
    rule: &Rule<'_>,
    gradient: &GradientPart,
    old: [&[f32]; 3],
) -> Option<(Version, Range<usize>)> {
    let sample = sample(layer.elements());
    if !Shadow::is_wanted(layout) || sample.start != piece.start {
        return None;
    }
    let old = old.map(|values| &values[..sample.len()]);
    let mut version = rule.shadow.before(layer.id, rule.t, old);
    let old = version.state.clone();
    let mut new = version.state.each_mut().map(|values| &mut values[..]);
    let old = old.each_ref().map(|values| &values[..]);
    update_piece(layer, &sample, rule, gradient, old, &mut new);
    Some((version, sample.start - first..sample.end - first))
}

/// W, M and V of a piece in float32, for planes that hold something else.
struct Wide {
    old: [Vec<f32>; 3],
    new: [Vec<f32>; 3],
}

thread_local! {
    /// Outside the budget, 384 KiB a thread.
    static WIDE: RefCell<Wide> = const {
        RefCell::new(Wide { old: [const { Vec::new() }; 3], new: [const { Vec::new() }; 3] })
    };
}

/// W, M and V of a piece, `local` inside its chunk: from the planes themselves, or widened.
fn read_piece<'a>(
    state: &'a StateChunk,
    local: Range<usize>,
    rule: &Rule<'_>,
    wide: &'a mut [Vec<f32>; 3],
) -> [&'a [f32]; 3] {
    let mut at = 0;
    wide.each_mut().map(|wide| {
        let which = at;
        at += 1;
        if which > 0 && rule.prepared.is_first() {
            return &NO_MOMENTS[..local.len()];
        }
        if planes::is_plain(state.layout(), which) {
            return &planes::plain(state, which)[local.clone()];
        }
        wide.resize(local.len(), 0.0);
        planes::widen(state, local.clone(), which, wide);
        &wide[..]
    })
}

/// Where W, M and V of a piece go: the planes themselves, or room for what is narrowed then.
fn new_piece<'a>(
    new: &'a mut StateChunk,
    local: Range<usize>,
    wide: &'a mut [Vec<f32>; 3],
) -> [&'a mut [f32]; 3] {
    let layout = new.layout();
    let mut out = wide.each_mut().map(|wide| {
        wide.resize(local.len(), 0.0);
        &mut wide[..]
    });
    for (spec, block) in layout.planes().iter().zip(new.planes_mut()) {
        let which = spec.plane.state();
        if planes::is_plain(layout, which) {
            out[which] = &mut block.f32s_mut()[local.clone()];
        }
    }
    out
}

thread_local! {
    /// A piece of a gradient that adds up: outside the budget, 64 KiB a thread.
    static SUM: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Updates `piece` (elements of the layer) from `old` to `new`.
fn update_piece(
    layer: &LayerSpec,
    piece: &Range<usize>,
    rule: &Rule<'_>,
    gradient: &GradientPart,
    old: [&[f32]; 3],
    new: &mut [&mut [f32]; 3],
) {
    let mut at = Piece { start: piece.start, prepared: &rule.prepared, old, new };
    for tensor in &layer.tensors {
        let part = overlap(&tensor.range(), piece);
        if part.is_empty() {
            continue;
        }
        let decay = tensor.decays();
        SUM.with_borrow_mut(|room| {
            let added = gradient.added(part.clone(), room);
            match (added.or_else(|| gradient.dense(part.clone())), gradient.rows()) {
                (Some(values), _) => at.update(decay, part, values),
                (None, Some(rows)) => rows.update(&mut at, decay, part),
                (None, None) => panic!("a chunk without a gradient"),
            }
        });
    }
}

/// A piece of a layer that is being updated.
struct Piece<'a, 'n> {
    /// Its first element in the layer.
    start: usize,
    prepared: &'a Prepared,
    old: [&'a [f32]; 3],
    new: &'a mut [&'n mut [f32]; 3],
}

impl Piece<'_, '_> {
    /// `part`: elements of the layer, all of them in the piece.
    fn update(&mut self, decay: bool, part: Range<usize>, grad: &[f32]) {
        let (prepared, (input, output)) = (*self.prepared, self.slices(part, grad));
        optim::update(&prepared, decay, input, output);
    }

    /// [`Piece::update`] with a gradient of zeros.
    fn update_zero_grad(&mut self, decay: bool, part: Range<usize>) {
        let (prepared, (input, output)) = (*self.prepared, self.slices(part, &[]));
        optim::update_zero_grad(&prepared, decay, input, output);
    }

    fn slices<'s>(&'s mut self, part: Range<usize>, grad: &'s [f32]) -> (Input<'s>, Output<'s>) {
        let local = part.start - self.start..part.end - self.start;
        let [weight, exp_avg, exp_avg_sq] = self.old.map(|values| &values[local.clone()]);
        let input = Input { weight, exp_avg, exp_avg_sq, grad };
        let [weight, exp_avg, exp_avg_sq] =
            self.new.each_mut().map(|values| &mut values[local.clone()]);
        (input, Output { weight, exp_avg, exp_avg_sq })
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
    fn update(&self, piece: &mut Piece<'_, '_>, decay: bool, part: Range<usize>) {
        let mut at = part.start;
        self.touched(&part, |touched, values| {
            piece.update_zero_grad(decay, at..touched.start);
            piece.update(decay, touched.clone(), values);
            at = touched.end;
        });
        piece.update_zero_grad(decay, at..part.end);
    }

    /// Those elements of `part` that lie in rows, run by run, with their values.
    fn touched(&self, part: &Range<usize>, mut each: impl FnMut(Range<usize>, &[f32])) {
        let first = self.ids.partition_point(|&id| (id as usize + 1) * self.width <= part.start);
        for (i, &id) in self.ids.iter().enumerate().skip(first) {
            let row = id as usize * self.width;
            let touched = overlap(&(row..row + self.width), part);
            if touched.is_empty() {
                break;
            }
            let offset = i * self.width + (touched.start - row);
            let values = &self.values[offset..offset + touched.len()];
            each(touched, values);
        }
    }
}

fn overlap(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    let start = a.start.max(b.start);
    start..a.end.min(b.end).max(start)
}
