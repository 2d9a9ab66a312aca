//! [`Batch`]: the token rows of one step, cut into microbatches.

use std::collections::BTreeMap;
use std::sync::Arc;

use compute::{MicroShape, NO_TARGET};
use model::{Micro, RunShape};

/// One microbatch. T = B * S tokens, rows back to back.
#[derive(Clone, Debug)]
pub(crate) struct MicroBatch {
    /// `[T]`
    pub(crate) tokens: Arc<[u32]>,
    /// `[T]`: the token that position t predicts, or [`NO_TARGET`].
    pub(crate) labels: Arc<[u32]>,
    /// Distinct tokens, ascending.
    pub(crate) ids: Vec<u32>,
    /// `[T]`: index of each token in `ids`.
    pub(crate) index: Arc<[u32]>,
}

/// The rows of one step.
#[derive(Clone, Debug)]
pub struct Batch {
    micros: Vec<MicroBatch>,
    shape: MicroShape,
    targets: u64,
}

impl Batch {
    /// Cuts rows into microbatches. `tokens` and `is_target` are `[rows, S]`; `is_target[r, j]`
    /// says that token j of row r is predicted from the tokens before it.
    pub fn new(tokens: &[u32], is_target: &[bool], shape: RunShape) -> Batch {
        assert_eq!(tokens.len(), shape.step_tokens());
        assert_eq!(is_target.len(), tokens.len());
        let size = shape.micro_tokens();
        let pieces = tokens.chunks(size).zip(is_target.chunks(size));
        let micros: Vec<MicroBatch> =
            pieces.map(|(t, m)| micro_batch(t, m, shape.seq_len)).collect();
        let targets = micros.iter().flat_map(|m| m.labels.iter()).filter(|&&l| l != NO_TARGET);
        Batch {
            targets: targets.count() as u64,
            shape: MicroShape { rows: shape.micro_rows, seq_len: shape.seq_len },
            micros,
        }
    }

    pub(crate) fn micro(&self, micro: Micro) -> &MicroBatch {
        &self.micros[micro.0 as usize]
    }

    pub(crate) fn shape(&self) -> MicroShape {
        self.shape
    }

    /// Predicted tokens of the whole step.
    pub fn targets(&self) -> u64 {
        self.targets
    }

    /// Tokens of the whole step.
    pub fn tokens(&self) -> u64 {
        (self.micros.len() * self.shape.tokens()) as u64
    }

    /// What a token's loss is multiplied by: one over the step's number of targets.
    pub(crate) fn scale(&self) -> f32 {
        1.0 / self.targets.max(1) as f32
    }
}

fn micro_batch(tokens: &[u32], is_target: &[bool], seq_len: usize) -> MicroBatch {
    let distinct: BTreeMap<u32, ()> = tokens.iter().map(|&t| (t, ())).collect();
    let ids: Vec<u32> = distinct.into_keys().collect();
    let place = |t: &u32| ids.binary_search(t).map_or(0, |i| i as u32);
    let label = |t: usize| {
        let predicts = !(t + 1).is_multiple_of(seq_len) && is_target[t + 1];
        if predicts { tokens[t + 1] } else { NO_TARGET }
    };
    MicroBatch {
        tokens: tokens.into(),
        labels: (0..tokens.len()).map(label).collect(),
        index: tokens.iter().map(place).collect(),
        ids,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_stay_inside_their_row_and_follow_the_mask() {
        let shape = RunShape { batch_rows: 2, micro_rows: 1, seq_len: 3 };
        let is_target = [false, true, true, false, false, true];
        let batch = Batch::new(&[5, 9, 5, 7, 1, 2], &is_target, shape);
        assert_eq!(batch.micro(Micro(0)).labels[..], [9, 5, NO_TARGET]);
        assert_eq!(batch.micro(Micro(1)).labels[..], [NO_TARGET, 2, NO_TARGET]);
        assert_eq!((batch.targets(), batch.tokens()), (3, 6));
        let micro = batch.micro(Micro(0));
        assert_eq!((&micro.ids[..], &micro.index[..]), (&[5, 9][..], &[0, 1, 0][..]));
    }
}
