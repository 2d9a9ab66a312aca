//! A tile's weights in the form that the loops read.

use std::ops::Range;

use model::{Budget, HostBytes, LayerSpec, TileSpec, Weights, from_bf16, to_bf16};
use rayon::prelude::*;

use crate::DeviceError;
use crate::product::{ComputeDtype, Values};

/// Weights that one thread widens at a time.
const WIDENED: usize = 64 << 10;

/// Positions are elements of the tile.
pub(super) struct Ready {
    matrices: Matrices,
    /// Norms and biases, which are computed with in float32.
    vectors: Vec<Vector>,
}

enum Matrices {
    F32(HostBytes),
    Bf16(HostBytes),
}

/// Tensors of one dimension that lie back to back.
struct Vector {
    start: usize,
    values: Vec<f32>,
}

impl Ready {
    /// In float32 the weights as they are, widened where they lie in other planes; in bfloat16
    /// their nearest ones, of which norms and biases are widened again.
    pub(super) fn new(
        dtype: ComputeDtype,
        weights: Weights,
        tile: &TileSpec,
        source: &LayerSpec,
        budget: &Budget,
    ) -> Result<Ready, DeviceError> {
        if dtype == ComputeDtype::Bf16 {
            let vectors = vectors(&weights, tile, source);
            let matrices = match weights {
                Weights::F32(values) => Matrices::F32(values),
                Weights::Bf16(high) | Weights::Split { high, .. } => Matrices::Bf16(high),
            };
            return Ok(Ready { matrices, vectors });
        }
        let matrices = match weights {
            Weights::F32(values) => values,
            planes => {
                let mut values = budget.block(planes.len() * 4)?;
                let pieces = values.f32s_mut().par_chunks_mut(WIDENED).enumerate();
                pieces.for_each(|(i, to)| planes.copy_f32(i * WIDENED, to));
                values
            }
        };
        Ok(Ready { matrices: Matrices::F32(matrices), vectors: Vec::new() })
    }

    pub(super) fn matrix(&self, range: Range<usize>) -> Values<'_> {
        match &self.matrices {
            Matrices::F32(values) => Values::F32(&values.f32s()[range]),
            Matrices::Bf16(values) => Values::Bf16(&values.u16s()[range]),
        }
    }

    /// All of a tile that is a matrix.
    pub(super) fn whole(&self) -> Values<'_> {
        match &self.matrices {
            Matrices::F32(values) => Values::F32(values.f32s()),
            Matrices::Bf16(values) => Values::Bf16(values.u16s()),
        }
    }

    /// A norm or biases that lie back to back.
    pub(super) fn vector(&self, range: Range<usize>) -> &[f32] {
        let known = self.vectors.iter().find(|vector| {
            vector.start <= range.start && range.end <= vector.start + vector.values.len()
        });
        match (known, &self.matrices) {
            (Some(vector), _) => {
                &vector.values[range.start - vector.start..range.end - vector.start]
            }
            (None, Matrices::F32(values)) if self.vectors.is_empty() => &values.f32s()[range],
            (None, _) => panic!("elements {range:?} are no vector of the tile"),
        }
    }
}

fn vectors(weights: &Weights, tile: &TileSpec, source: &LayerSpec) -> Vec<Vector> {
    let mut vectors: Vec<Vector> = Vec::new();
    for tensor in source.tensors.iter().filter(|tensor| tensor.shape.len() == 1) {
        let range = tensor.range();
        if range.start < tile.elements.start || range.end > tile.elements.end {
            continue;
        }
        let start = range.start - tile.elements.start;
        let mut values = vec![0.0; range.len()];
        weights.copy_f32(start, &mut values);
        values.iter_mut().for_each(|value| *value = from_bf16(to_bf16(*value)));
        match vectors.last_mut() {
            Some(last) if last.start + last.values.len() == start => last.values.extend(values),
            _ => vectors.push(Vector { start, values }),
        }
    }
    vectors
}
