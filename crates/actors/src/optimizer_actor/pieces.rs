//! From pieces of a layer's gradient to the chunks that the optimizer works on.
//!
//! Pieces come from the layer's end down and meet anywhere inside a chunk. Such a chunk is put
//! together in a block of its own, a seam, until the lowest piece of it is there.
//!
//! Invariants:
//! - a chunk belongs to exactly one section of its layer;
//! - norms are summed by chunk and joined in the order of chunks, so that their bits do not depend
//!   on where pieces meet or on which is measured first.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use compute::Gradient;
use model::{
    Attempt, Budget, BudgetError, CHUNK_ELEMENTS, HostBytes, LayerId, chunk_count, chunk_elements,
};
use optim::NormTree;

use super::chunk::{self, GradientPart};

/// The gradient of chunks that lie together.
#[derive(Clone, Debug)]
pub(super) struct Section {
    pub(super) chunks: Range<usize>,
    pub(super) gradient: Arc<Gradient>,
}

/// A chunk that pieces share.
#[derive(Debug)]
struct Seam {
    chunk: usize,
    /// All elements of the chunk.
    values: HostBytes,
    /// Those of the layer from here on are there.
    from: usize,
}

/// What the pieces of one layer have come to.
#[derive(Debug)]
struct Layer {
    seam: Option<Seam>,
    norms: Arc<Norms>,
}

/// Layers whose pieces are arriving.
#[derive(Debug, Default)]
pub(super) struct Pieces {
    layers: BTreeMap<(Attempt, LayerId), Layer>,
}

impl Pieces {
    /// Takes the gradient of `piece` in, of a layer of so many elements, `values` being those from
    /// `first` on: the chunks that it completes, and where their norms go.
    pub(super) fn cut(
        &mut self,
        (attempt, layer, elements): (Attempt, LayerId, usize),
        piece: Range<usize>,
        (first, values): (usize, HostBytes),
        budget: &Budget,
    ) -> Result<(Vec<Section>, Arc<Norms>), BudgetError> {
        let fresh = || Layer { seam: None, norms: Arc::new(Norms::new(elements)) };
        let mut state = self.layers.remove(&(attempt, layer)).unwrap_or_else(fresh);
        let norms = Arc::clone(&state.norms);
        let sections = state.cut(elements, piece.clone(), first, values, budget)?;
        if piece.start > 0 {
            self.layers.insert((attempt, layer), state);
        }
        Ok((sections, norms))
    }

    pub(super) fn clear(&mut self) {
        self.layers.clear();
    }
}

impl Layer {
    fn cut(
        &mut self,
        elements: usize,
        Range { start, mut end }: Range<usize>,
        first: usize,
        values: HostBytes,
        budget: &Budget,
    ) -> Result<Vec<Section>, BudgetError> {
        let mut sections = Vec::new();
        let part = |range: Range<usize>| &values.f32s()[range.start - first..range.end - first];
        if let Some(mut seam) = self.seam.take() {
            assert_eq!(seam.from, end, "pieces of a layer out of order");
            let low = start.max(seam.chunk * CHUNK_ELEMENTS);
            seam.fill(part(low..end), low);
            end = low;
            match seam.complete() {
                Ok(section) => sections.push(section),
                Err(open) => self.seam = Some(open),
            }
        }
        let whole = start.div_ceil(CHUNK_ELEMENTS)..end.div_ceil(CHUNK_ELEMENTS);
        if !start.is_multiple_of(CHUNK_ELEMENTS) && start < end {
            let chunk = start / CHUNK_ELEMENTS;
            let shared = chunk_elements(elements, chunk);
            let values = budget.block(shared.len() * 4)?;
            let mut seam = Seam { chunk, values, from: shared.end };
            seam.fill(part(start..end.min(shared.end)), start);
            self.seam = Some(seam);
        }
        if !whole.is_empty() {
            let gradient = Arc::new(Gradient::Dense { first, values });
            sections.push(Section { chunks: whole, gradient });
        }
        Ok(sections)
    }
}

impl Seam {
    /// `values` end where those that are there begin; `from`: their first element in the layer.
    fn fill(&mut self, values: &[f32], from: usize) {
        let at = from - self.chunk * CHUNK_ELEMENTS;
        self.values.f32s_mut()[at..at + values.len()].copy_from_slice(values);
        self.from = from;
    }

    /// The section, if all elements are there.
    fn complete(self) -> Result<Section, Seam> {
        let first = self.chunk * CHUNK_ELEMENTS;
        if self.from > first {
            return Err(self);
        }
        let gradient = Arc::new(Gradient::Dense { first, values: self.values });
        Ok(Section { chunks: self.chunk..self.chunk + 1, gradient })
    }
}

/// Square sums of the chunks of a layer's gradient.
#[derive(Debug)]
pub(super) struct Norms {
    elements: usize,
    trees: Mutex<Vec<Option<NormTree>>>,
}

impl Norms {
    /// Of a layer of so many elements.
    pub(super) fn new(elements: usize) -> Norms {
        Norms { elements, trees: Mutex::new(vec![None; chunk_count(elements)]) }
    }

    /// Measures a section; the whole layer's sum of squares when it is the last one.
    pub(super) fn measure(&self, section: &Section) -> Option<f64> {
        let gradient = GradientPart { dense: Some(Arc::clone(&section.gradient)), rows: None };
        let sums = section.chunks.clone().map(|chunk| self.measure_chunk(chunk, &gradient));
        sums.fold(None, Option::or)
    }

    /// Measures a chunk; the whole layer's sum of squares when it is the last one.
    pub(super) fn measure_chunk(&self, chunk: usize, gradient: &GradientPart) -> Option<f64> {
        let tree = chunk::square_sums(gradient, chunk_elements(self.elements, chunk));
        // Trees are put in whole.
        let mut trees = self.trees.lock().unwrap_or_else(PoisonError::into_inner);
        trees[chunk] = Some(tree);
        let all: Option<Vec<NormTree>> = trees.iter().cloned().collect();
        all.map(|trees| chunk::join(&trees))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ELEMENTS: usize = 3 * CHUNK_ELEMENTS + 70_000;

    fn value(at: usize) -> f32 {
        ((at * 2_654_435_761) % 1_000_003) as f32 * 1e-3 - 400.0
    }

    /// As the device lays a piece out.
    fn dense(piece: &Range<usize>, budget: &Budget) -> (usize, HostBytes) {
        let first = piece.start / CHUNK_ELEMENTS * CHUNK_ELEMENTS;
        let mut values = budget.block((piece.end - first) * 4).unwrap();
        values.f32s_mut().iter_mut().enumerate().for_each(|(i, v)| {
            *v = if first + i < piece.start { f32::NAN } else { value(first + i) };
        });
        (first, values)
    }

    /// The layer's sum of squares, and every chunk's values, from pieces that begin at `starts`.
    fn cut(starts: &[usize]) -> (f64, Vec<Vec<f32>>) {
        let budget = Budget::new(64 << 20);
        let key = (Attempt(1), LayerId(3), ELEMENTS);
        let mut pieces = Pieces::default();
        let (mut end, mut sum) = (ELEMENTS, None);
        let mut chunks = vec![Vec::new(); 4];
        for &start in starts {
            let gradient = dense(&(start..end), &budget);
            let (sections, norms) = pieces.cut(key, start..end, gradient, &budget).unwrap();
            for section in &sections {
                assert!(sum.is_none(), "known before the last section");
                sum = norms.measure(section);
                let Gradient::Dense { first, values } = &*section.gradient else { panic!() };
                for chunk in section.chunks.clone() {
                    let at = chunk * CHUNK_ELEMENTS;
                    let range = at - first..(at + CHUNK_ELEMENTS).min(ELEMENTS) - first;
                    assert!(chunks[chunk].is_empty(), "chunk {chunk} twice");
                    chunks[chunk] = values.f32s()[range].to_vec();
                }
            }
            end = start;
        }
        assert!(pieces.layers.is_empty(), "nothing is left over");
        drop(pieces);
        assert_eq!(budget.used_bytes(), 0);
        (sum.expect("all pieces are there"), chunks)
    }

    #[test]
    fn rows_add_to_what_is_dense_in_norms() {
        let budget = Budget::new(64 << 20);
        let elements = CHUNK_ELEMENTS + 5000;
        let (width, ids) = (1000, vec![0, 7, 1048, 1052]);
        let mut values = budget.block(ids.len() * width * 4).unwrap();
        values.f32s_mut().iter_mut().enumerate().for_each(|(i, v)| *v = value(i + 3));
        let (first, mut whole) = dense(&(0..elements), &budget);
        let part = |dense, rows| GradientPart { dense: Some(Arc::new(dense)), rows };
        let (_, copy) = dense(&(0..elements), &budget);
        for (id, row) in ids.iter().zip(values.f32s().chunks(width)) {
            let to = &mut whole.f32s_mut()[*id as usize * width..][..width];
            to.iter_mut().zip(row).for_each(|(to, v)| *to += v);
        }
        let rows = Some(Arc::new(Gradient::Rows { ids, width, values }));
        let sum = |part: &GradientPart| {
            let norms = Norms::new(elements);
            assert_eq!(norms.measure_chunk(1, part), None);
            norms.measure_chunk(0, part).unwrap().to_bits()
        };
        let want = sum(&part(Gradient::Dense { first, values: whole }, None));
        assert_eq!(sum(&part(Gradient::Dense { first, values: copy }, rows)), want);
    }

    #[test]
    fn chunks_and_norm_do_not_depend_on_where_pieces_meet() {
        let whole = cut(&[0]);
        let all: Vec<f32> = whole.1.concat();
        assert!(all.iter().enumerate().all(|(at, v)| *v == value(at)) && all.len() == ELEMENTS);
        const C: usize = CHUNK_ELEMENTS;
        for starts in [
            vec![2 * C, C, 0],
            vec![3 * C + 10, 3 * C + 5, 2 * C + 1, C + 7, C + 6, 100, 0],
            vec![3 * C, 2 * C + 4096, 2 * C, 577, 576, 0],
            vec![1, 0],
        ] {
            let parts = cut(&starts);
            assert_eq!(parts.0.to_bits(), whole.0.to_bits(), "{starts:?}");
            assert!(parts.1 == whole.1, "{starts:?}");
        }
    }
}
