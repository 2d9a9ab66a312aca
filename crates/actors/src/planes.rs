//! Between the planes of a chunk and float32.
//!
//! Pieces are elements of a chunk that start with a block of those that share a scale.

use std::ops::Range;

use model::{HostBytes, Plane, PlaneType, StateLayout};
use optim::{Code, SIGNED, UNSIGNED};
use store::StateChunk;

/// How weights become bfloat16, where a layout has no more.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Rounding {
    Nearest,
    /// By random numbers of `key` and the element's number in its layer, `first` being the piece's.
    Stochastic {
        key: u64,
        first: u64,
    },
}

/// Whether W, M or V (0, 1, 2) lies in one plane of float32.
pub(crate) fn is_plain(layout: StateLayout, state: usize) -> bool {
    let mut planes = layout.planes().iter().filter(|spec| spec.plane.state() == state);
    planes.next().is_some_and(|spec| spec.dtype == PlaneType::F32)
}

/// The one plane that W, M or V lies in.
///
/// # Panics
/// If there are more: a programmer's error.
pub(crate) fn plain(chunk: &StateChunk, state: usize) -> &[f32] {
    assert!(is_plain(chunk.layout(), state), "a plane of float32");
    chunk.plane([Plane::Weight, Plane::ExpAvg, Plane::ExpAvgSq][state]).f32s()
}

/// The code of `exp_avg` (1) or of `exp_avg_sq` (2), with the planes of codes and scales.
fn codes(state: usize) -> (&'static Code, Plane, Plane) {
    match state {
        1 => (&SIGNED, Plane::ExpAvg, Plane::ExpAvgScale),
        _ => (&UNSIGNED, Plane::ExpAvgSq, Plane::ExpAvgSqScale),
    }
}

// The format's blocks are the codes'.
const _: () = assert!(model::MOMENT_BLOCK == optim::CODE_BLOCK);

/// Blocks of a piece that share a scale.
fn blocks(piece: &Range<usize>) -> Range<usize> {
    piece.start / optim::CODE_BLOCK..piece.end.div_ceil(optim::CODE_BLOCK)
}

/// W, M or V (0, 1, 2) of a piece as float32.
pub(crate) fn widen(chunk: &StateChunk, piece: Range<usize>, state: usize, to: &mut [f32]) {
    if is_plain(chunk.layout(), state) {
        return to.copy_from_slice(&plain(chunk, state)[piece]);
    }
    if state > 0 {
        let (code, codes, scales) = codes(state);
        let scales = &chunk.plane(scales).f32s()[blocks(&piece)];
        return code.decode(&chunk.plane(codes).bytes()[piece], scales, to);
    }
    let high = &chunk.plane(Plane::Weight).u16s()[piece.clone()];
    match chunk.get(Plane::WeightLow) {
        Some(low) => model::join_into(high, &low.u16s()[piece], to),
        None => model::from_bf16_into(high, to),
    }
}

/// Writes those of W, M and V of a piece that are not plain.
pub(crate) fn narrow(
    chunk: &mut StateChunk,
    piece: Range<usize>,
    rounding: Rounding,
    [weight, exp_avg, exp_avg_sq]: [&[f32]; 3],
) {
    match (chunk.layout(), chunk.planes_mut()) {
        (StateLayout::F32, _) => {}
        (StateLayout::Split, [high, low, ..]) => split(high, low, piece, weight),
        (StateLayout::Split8, [high, low, moments @ ..]) => {
            split(high, low, piece.clone(), weight);
            encode(moments, &piece, [exp_avg, exp_avg_sq]);
        }
        (StateLayout::Bf16Sr8, [high, moments @ ..]) => {
            let to = &mut high.u16s_mut()[piece.clone()];
            match rounding {
                Rounding::Nearest => {
                    to.iter_mut().zip(weight).for_each(|(to, v)| *to = model::to_bf16(*v));
                }
                Rounding::Stochastic { key, first } => {
                    optim::round_stochastically(key, first, weight, to);
                }
            }
            encode(moments, &piece, [exp_avg, exp_avg_sq]);
        }
        (layout, planes) => panic!("{} planes of a {layout}", planes.len()),
    }
}

fn split(high: &mut HostBytes, low: &mut HostBytes, piece: Range<usize>, values: &[f32]) {
    let high = &mut high.u16s_mut()[piece.clone()];
    model::split_into(values, high, &mut low.u16s_mut()[piece]);
}

/// `planes`: codes and scales of `exp_avg`, then those of `exp_avg_sq`.
fn encode(planes: &mut [HostBytes], piece: &Range<usize>, moments: [&[f32]; 2]) {
    for (at, (planes, values)) in planes.chunks_exact_mut(2).zip(moments).enumerate() {
        let [codes_to, scales_to] = planes else { return };
        let (code, ..) = codes(at + 1);
        let to = &mut codes_to.bytes_mut()[piece.clone()];
        code.encode(values, to, &mut scales_to.f32s_mut()[blocks(piece)]);
    }
}
