//! [`Uses`]: when what a step reads or writes is needed again.
//!
//! Times are turns of a sweep in which every layer trains: where some are locked, what comes earlier
//! still comes earlier. They decide what memory keeps, never what is computed.

use std::collections::BTreeMap;

use model::{LayerId, LayerTable, NextUse, PieceId, Step, TileId, Tiling};

use crate::{Again, Need, Policy, Visit, VisitKind, sweep};

#[derive(Debug)]
pub(super) struct Uses {
    /// Turns in which a tile is visited: in forward, when it is made again, and in backward unless that
    /// is the same visit.
    tiles: BTreeMap<(LayerId, TileId), Vec<u32>>,
    /// The first turn that reads a layer's weights.
    first: BTreeMap<LayerId, u32>,
    /// Turn after which a piece is updated inside the sweep.
    made: BTreeMap<PieceId, u32>,
    /// Turns of a sweep.
    turns: u32,
}

/// When a piece's new version is needed again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Written {
    /// Its weights by a sweep.
    pub weights: NextUse,
    /// And all of it by the optimizer.
    pub state: NextUse,
}

impl Uses {
    pub(super) fn new(table: &LayerTable, tiling: Tiling, interval: usize) -> Uses {
        let visits = sweep(table, tiling, interval, &vec![false; table.len()]);
        let mut uses = Uses {
            tiles: BTreeMap::new(),
            first: BTreeMap::new(),
            made: BTreeMap::new(),
            turns: visits.len() as u32,
        };
        for (turn, visit) in (0..).zip(&visits) {
            let source = match &visit.need {
                Need::Nothing => None,
                Need::EmbeddingRows => Some(visit.layer),
                Need::Tile(tile) => {
                    uses.tiles.entry((visit.layer, tile.id)).or_default().push(turn);
                    Some(tile.source)
                }
            };
            source.map(|source| uses.first.entry(source).or_insert(turn));
            visit.gradient().map(|piece| uses.made.insert(piece, turn));
        }
        uses
    }

    /// When the weights that a visit reads are read again.
    pub(super) fn of_weights(&self, step: Step, policy: Policy, visit: &Visit) -> Again {
        let Need::Tile(tile) = &visit.need else { return Again::Never };
        let turns = &self.tiles[&(visit.layer, tile.id)];
        let at = |step: Step, turn| NextUse { step: step.0, turn };
        let later = |step, turn| Again::Later(at(step, turn));
        if visit.kind.is_forward() {
            let seen = if visit.kind == VisitKind::Remake { turns.len() - 1 } else { 1 };
            return match turns.get(seen) {
                Some(&turn) if visit.goes_back => later(step, turn),
                _ => later(step.next(), turns[0]),
            };
        }
        let Some(piece) = visit.gradient() else { return later(step.next(), turns[0]) };
        match policy {
            // An embedding that is tied to the head is updated last.
            Policy::Fused if piece.layer.index() > 0 => Again::Soon(at(step, self.made[&piece])),
            Policy::Fused => later(step, self.turns),
            Policy::Deferred => later(step, self.turns + self.first[&piece.layer]),
        }
    }

    /// When the version is needed again that a step's update of a piece writes.
    pub(super) fn of_written(&self, step: Step, policy: Policy, piece: PieceId) -> Written {
        let (next, first) = (step.next().0, self.first[&piece.layer]);
        let update = match policy {
            Policy::Fused => self.made[&piece],
            Policy::Deferred => self.turns + first,
        };
        Written {
            weights: NextUse { step: next, turn: first },
            state: NextUse { step: next, turn: update },
        }
    }
}

#[cfg(test)]
mod tests {
    use model::ModelConfig;

    use super::*;

    fn table(tied: bool) -> LayerTable {
        // Three tiles of vocabulary.
        let config = ModelConfig::from_json(&format!(
            r#"{{"model_type":"llama","vocab_size":20000,"hidden_size":64,"intermediate_size":128,
                "num_hidden_layers":3,"num_attention_heads":4,"tie_word_embeddings":{tied}}}"#
        ));
        LayerTable::new(&config.unwrap())
    }

    /// What a visit says of its next use is when the next visit of the same tile comes.
    #[test]
    fn weights_are_read_again_when_the_sweep_comes_back() {
        let whole = (true, Tiling::Whole);
        let blocks = (false, Tiling::Blocks);
        for ((tied, tiling), interval) in [(whole, 1), (blocks, 1), (whole, 2), (blocks, 2)] {
            let table = table(tied);
            let uses = Uses::new(&table, tiling, interval);
            for lowest in 0..4 {
                let locked: Vec<bool> = (0..table.len()).map(|l| l < lowest).collect();
                let visits = sweep(&table, tiling, interval, &locked);
                for policy in [Policy::Fused, Policy::Deferred] {
                    check(&uses, &visits, policy, interval == 1);
                }
            }
        }
    }

    fn check(uses: &Uses, visits: &[Visit], policy: Policy, in_order: bool) {
        let step = Step(7);
        let mut last = None;
        for (at, visit) in visits.iter().enumerate() {
            let Need::Tile(tile) = &visit.need else { continue };
            let same = |v: &&Visit| v.layer == visit.layer && v.need == visit.need;
            let again = visits[at + 1..].iter().find(same);
            match uses.of_weights(step, policy, visit) {
                Again::Later(next) if again.is_some() => {
                    assert_eq!(next.step, 7, "{visit:?}");
                    // What is visited later is needed sooner on the way back.
                    assert!(!in_order || last.is_none_or(|last| next < last), "{visit:?}");
                    last = Some(next);
                }
                Again::Later(next) if visit.gradient().is_none() => assert_eq!(next.step, 8),
                Again::Later(next) => {
                    assert!(policy == Policy::Deferred || tile.source == LayerId(0));
                    assert!(next.step == 7 && next.turn >= uses.turns, "{visit:?}");
                }
                Again::Soon(next) => {
                    assert!(policy == Policy::Fused && visit.trains && again.is_none());
                    assert!(next.step == 7 && next.turn < uses.turns, "{visit:?}");
                }
                Again::Never => panic!("{visit:?}"),
            }
        }
    }

    #[test]
    fn new_versions_are_needed_in_the_order_of_the_next_sweep() {
        let uses = Uses::new(&table(false), Tiling::Blocks, 1);
        let piece = |layer, part| PieceId { layer: LayerId(layer), part };
        let of = |policy, piece| uses.of_written(Step(1), policy, piece);
        let (low, high) = (piece(1, 0), piece(3, 1));
        for policy in [Policy::Fused, Policy::Deferred] {
            assert!(of(policy, low).weights < of(policy, high).weights);
            assert!(
                of(policy, low).weights.step == 2
                    && of(policy, low).weights < of(policy, low).state
            );
        }
        assert!(of(Policy::Fused, low).state > of(Policy::Fused, high).state);
        assert!(of(Policy::Deferred, low).state < of(Policy::Deferred, high).state);
    }
}
