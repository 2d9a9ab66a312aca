//! Gradients while they are summed over microbatches.
//!
//! Invariant: an element is overwritten by its first contribution and added to by the later ones, in
//! the order of the commands: gradient blocks are never zeroed first.

use std::collections::BTreeMap;
use std::ops::Range;

use model::{Budget, CHUNK_ELEMENTS, HostBytes};

use crate::product::Accum;
use crate::simd::{self, Kernel};
use crate::{DeviceError, Gradient};

/// One value per parameter of a piece of a layer.
#[derive(Debug)]
pub(super) struct Dense {
    /// Elements of the layer.
    elements: Range<usize>,
    /// From the start of the chunk on that the piece begins in.
    block: HostBytes,
    /// What the next contribution does.
    accum: Accum,
}

impl Dense {
    /// A gradient of `elements` of a layer that has no contribution yet.
    pub(super) fn new(budget: &Budget, elements: Range<usize>) -> Result<Dense, DeviceError> {
        let block = budget.block((elements.end - first(&elements)) * 4)?;
        Ok(Dense { elements, block, accum: Accum::Replace })
    }

    /// The elements of the layer that it is the gradient of.
    pub(super) fn elements(&self) -> &Range<usize> {
        &self.elements
    }

    /// All elements, and whether a contribution replaces or adds.
    pub(super) fn contribute(&mut self) -> (&mut [f32], Accum) {
        let values = &mut self.block.f32s_mut()[self.elements.start - first(&self.elements)..];
        (values, std::mem::replace(&mut self.accum, Accum::Add))
    }

    pub(super) fn take(self) -> Gradient {
        Gradient::Dense { first: first(&self.elements), values: self.block }
    }
}

/// The first element of the chunk that a piece begins in.
fn first(elements: &Range<usize>) -> usize {
    elements.start / CHUNK_ELEMENTS * CHUNK_ELEMENTS
}

/// The rows of an embedding's gradient that tokens touched.
#[derive(Debug)]
pub(super) struct RowGradient {
    width: usize,
    /// One block per microbatch with the rows it touched first.
    pieces: Vec<HostBytes>,
    /// Piece and row of each token.
    places: BTreeMap<u32, (usize, usize)>,
}

impl RowGradient {
    pub(super) fn new(width: usize) -> RowGradient {
        RowGradient { width, pieces: Vec::new(), places: BTreeMap::new() }
    }

    /// Adds `dy[t]` to row `tokens[t]`, in the order of the tokens.
    pub(super) fn add(
        &mut self,
        budget: &Budget,
        tokens: &[u32],
        dy: &[f32],
    ) -> Result<(), DeviceError> {
        let mut new: Vec<u32> = tokens.to_vec();
        new.sort_unstable();
        new.dedup();
        new.retain(|token| !self.places.contains_key(token));
        let piece = self.pieces.len();
        self.pieces.push(budget.block(new.len() * self.width * 4)?);
        self.places.extend(new.iter().enumerate().map(|(row, &token)| (token, (piece, row))));
        let mut empty = vec![true; new.len()];
        for (token, dy) in tokens.iter().zip(dy.chunks_exact(self.width)) {
            let (at, row) = self.places[token];
            let y = &mut self.pieces[at].f32s_mut()[row * self.width..][..self.width];
            if at == piece && std::mem::take(&mut empty[row]) {
                y.copy_from_slice(dy);
            } else {
                simd::run(Add { y, x: dy });
            }
        }
        Ok(())
    }

    pub(super) fn take(mut self, budget: &Budget) -> Result<Gradient, DeviceError> {
        let ids: Vec<u32> = self.places.keys().copied().collect();
        let width = self.width;
        // The rows of a single piece are in order already.
        let values = match self.pieces.pop() {
            Some(only) if self.pieces.is_empty() => only,
            last => {
                self.pieces.extend(last);
                self.gather(budget)?
            }
        };
        Ok(Gradient::Rows { ids, width, values })
    }

    fn gather(&self, budget: &Budget) -> Result<HostBytes, DeviceError> {
        let mut values = budget.block(self.places.len() * self.width * 4)?;
        let rows = values.f32s_mut().chunks_exact_mut(self.width);
        for (to, &(piece, row)) in rows.zip(self.places.values()) {
            to.copy_from_slice(&self.pieces[piece].f32s()[row * self.width..][..self.width]);
        }
        Ok(values)
    }
}

struct Add<'a> {
    y: &'a mut [f32],
    x: &'a [f32],
}

impl Kernel for Add<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        self.y.iter_mut().zip(self.x).for_each(|(y, x)| *y += x);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(gradient: &Gradient) -> Vec<f32> {
        match gradient {
            Gradient::Dense { values, .. } | Gradient::Rows { values, .. } => {
                values.f32s().to_vec()
            }
        }
    }

    #[test]
    fn a_piece_lies_where_its_chunks_do_and_is_replaced_once() {
        let budget = Budget::new(16 << 20);
        let start = CHUNK_ELEMENTS + 7;
        let mut dense = Dense::new(&budget, start..start + 3).unwrap();
        for want in [Accum::Replace, Accum::Add, Accum::Add] {
            let (values, accum) = dense.contribute();
            assert_eq!((values.len(), accum), (3, want));
            values.fill(1.0);
        }
        let Gradient::Dense { first, values } = dense.take() else { panic!("rows") };
        assert_eq!(first, CHUNK_ELEMENTS);
        assert_eq!(values.f32s()[7..], [1.0, 1.0, 1.0]);
    }

    #[test]
    fn rows_of_several_microbatches_ascend() {
        let budget = Budget::new(1 << 20);
        let mut rows = RowGradient::new(1);
        rows.add(&budget, &[7, 3, 7], &[1.0, 2.0, 4.0]).unwrap();
        rows.add(&budget, &[5, 3], &[8.0, 16.0]).unwrap();
        let gradient = rows.take(&budget).unwrap();
        assert_eq!(values(&gradient), [18.0, 8.0, 5.0]);
        assert!(matches!(gradient, Gradient::Rows { ids, .. } if ids == [3, 5, 7]));
    }
}
