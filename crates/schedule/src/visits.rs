//! The order in which one step visits the layers' tiles, and the device's work at each visit.
//!
//! Forward over the layers, down and up over the head's vocabulary tiles (the last tile is scored
//! and differentiated in one visit), backward over the layers. All microbatches pass a tile
//! while its weights are bound.
//!
//! Invariants:
//! - a locked layer has no gradient; what a locked embedding lends to a tied head has none either;
//! - backward ends at the lowest layer that trains: nothing goes further down, and inputs of the
//!   layers below it are freed in forward.

use model::{Groups, LayerId, LayerTable, Micro, PieceId, Stage, TileSpec, Tiling};

/// Index of a visit in its sweep.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VisitId(pub u32);

/// What must be in memory before a visit can be computed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Need {
    Nothing,
    /// The rows of the embedding that the step's tokens name.
    EmbeddingRows,
    Tile(TileSpec),
}

/// What is done at a visit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VisitKind {
    Embed,
    Forward,
    HeadNorm,
    HeadScore,
    /// The last vocabulary tile: score it, take the loss, go back down.
    HeadTurn,
    HeadBackward,
    HeadNormBackward,
    /// On the way back: forward once more, for the inputs of the stages above.
    Remake,
    Backward,
    EmbedBackward,
}

impl VisitKind {
    /// Whether the visit leads to the loss and makes no gradient. The turn does both.
    pub fn is_forward(self) -> bool {
        match self {
            VisitKind::Embed
            | VisitKind::Forward
            | VisitKind::HeadNorm
            | VisitKind::HeadScore
            | VisitKind::Remake => true,
            VisitKind::HeadTurn
            | VisitKind::HeadBackward
            | VisitKind::HeadNormBackward
            | VisitKind::Backward
            | VisitKind::EmbedBackward => false,
        }
    }
}

/// One stop of a sweep.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Visit {
    pub layer: LayerId,
    pub stage: Stage,
    /// Of the gradient of the weights.
    pub piece: PieceId,
    pub need: Need,
    pub kind: VisitKind,
    /// Backward: the weights' own gradient is wanted.
    pub trains: bool,
    /// Whether a layer at or below this one trains: in forward the input is needed again, in
    /// backward a gradient goes on down (not from the lowest tile that trains).
    pub goes_back: bool,
    /// What becomes of the stage's input.
    pub input: Input,
    /// Of the decoder: how many visits like this one make what is needed sooner on the way back; `None`
    /// where inner activations are of no use.
    pub rank: Option<u32>,
}

/// What becomes of the input of a visit's stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Input {
    /// Nobody needs it after the visit.
    Consumed,
    /// It waits for the way back.
    Waits,
    /// The first visit on the way back: it has waited until now; `Consumed` after it.
    Returns { consumed: bool },
    /// It is there, and a later visit needs it.
    Stays,
}

impl Visit {
    /// The piece whose gradient the visit makes, if any.
    pub fn gradient(&self) -> Option<PieceId> {
        self.trains.then_some(self.piece)
    }

    /// Whether the stage's input is gone after the visit.
    pub fn consumes_input(&self) -> bool {
        matches!(self.input, Input::Consumed | Input::Returns { consumed: true })
    }
}

/// One command for the compute device, tensors named by stage and microbatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ComputeOp {
    Embed {
        micro: Micro,
    },
    Forward {
        layer: LayerId,
        stage: Stage,
        micro: Micro,
        keep: bool,
    },
    HeadNorm {
        micro: Micro,
    },
    HeadScore {
        micro: Micro,
        keep: bool,
    },
    HeadLoss {
        micro: Micro,
    },
    HeadBackward {
        micro: Micro,
        gradient: bool,
    },
    /// `dx`: a gradient goes on to the stage below.
    HeadNormBackward {
        micro: Micro,
        gradient: bool,
        dx: bool,
    },
    Backward {
        layer: LayerId,
        stage: Stage,
        micro: Micro,
        gradient: bool,
        dx: bool,
    },
    /// The stage's input is not needed again.
    Free {
        layer: LayerId,
        stage: Stage,
        micro: Micro,
    },
    EmbedBackward {
        micro: Micro,
    },
    /// The piece's gradient is complete: move it to the host, and on to `scratch/` if `spill`.
    TakeGradient {
        piece: PieceId,
        spill: bool,
    },
}

/// All visits of one step, forward then backward; `interval`: see `Limits::interval`; `locked` by
/// layer.
///
/// # Panics
/// If no layer trains.
pub fn sweep(table: &LayerTable, tiling: Tiling, interval: usize, locked: &[bool]) -> Vec<Visit> {
    assert_eq!(locked.len(), table.len(), "locks of another model");
    let Some(lowest) = locked.iter().position(|locked| !locked) else {
        panic!("a step in which every layer is locked")
    };
    let groups = Groups::new(table, tiling, interval, LayerId(lowest as u32));
    let decoder: Vec<(Stage, TileSpec)> =
        (1..).map(Stage).zip(table.decoder_tiles(tiling)).collect();
    let last = Stage(decoder.len() as u32 + 1);
    let stops = Stops { table, tiling, locked, lowest, groups, last };
    let embedding = table.tiles(table.embedding(), tiling).remove(0);
    let mut head = table.tiles(table.head(), tiling);
    let projection = head.split_off(1);

    let mut visits = vec![stops.at(Stage(0), &embedding, VisitKind::Embed)];
    visits.extend(decoder.iter().map(|(stage, t)| stops.at(*stage, t, VisitKind::Forward)));
    visits.extend(head.iter().map(|norm| stops.at(last, norm, VisitKind::HeadNorm)));
    visits.extend(stops.projection(last, &projection));
    visits.extend(head.iter().map(|norm| stops.at(last, norm, VisitKind::HeadNormBackward)));
    let above = decoder.iter().rev().filter(|(_, tile)| tile.source.index() >= lowest);
    for (stage, tile) in above {
        let (first, end) = groups.of(*stage);
        if *stage == end && groups.is_remade(*stage) {
            let group = &decoder[first.index() - 1..end.index() - 1];
            visits.extend(group.iter().map(|(stage, t)| stops.at(*stage, t, VisitKind::Remake)));
        }
        visits.push(stops.at(*stage, tile, VisitKind::Backward));
    }
    if lowest == 0 {
        visits.push(stops.at(Stage(0), &embedding, VisitKind::EmbedBackward));
    }
    visits
}

/// What visits follow from.
struct Stops<'a> {
    table: &'a LayerTable,
    tiling: Tiling,
    locked: &'a [bool],
    /// The lowest layer that trains.
    lowest: usize,
    groups: Groups,
    /// The head's.
    last: Stage,
}

impl Stops<'_> {
    fn at(&self, stage: Stage, tile: &TileSpec, kind: VisitKind) -> Visit {
        let layer = self.table.layer_of(tile);
        let forward = kind.is_forward();
        // Below a tile that is not its layer's first one, that layer goes on.
        let above = layer.index() > self.lowest || (tile.elements.start > 0 && !forward);
        Visit {
            layer,
            stage,
            piece: match kind {
                VisitKind::Embed | VisitKind::EmbedBackward => self.table.rows_piece(self.tiling),
                _ => self.table.piece_of(tile, self.tiling),
            },
            need: match kind {
                VisitKind::Embed => Need::EmbeddingRows,
                VisitKind::EmbedBackward => Need::Nothing,
                _ => Need::Tile(tile.clone()),
            },
            kind,
            trains: !forward && !self.locked[tile.source.index()],
            goes_back: above || (forward && layer.index() == self.lowest),
            input: self.input(stage, layer, kind),
            rank: self.rank(stage, layer, kind),
        }
    }

    fn input(&self, stage: Stage, layer: LayerId, kind: VisitKind) -> Input {
        let goes_back = layer.index() >= self.lowest;
        let alone = || !self.groups.is_remade(stage);
        match kind {
            VisitKind::Forward if !goes_back || !self.groups.keeps(stage) => Input::Consumed,
            VisitKind::Forward => Input::Waits,
            VisitKind::Remake if self.groups.of(stage).0 == stage => {
                Input::Returns { consumed: false }
            }
            VisitKind::Backward if alone() => Input::Returns { consumed: true },
            VisitKind::Backward | VisitKind::HeadNormBackward => Input::Consumed,
            VisitKind::Embed
            | VisitKind::HeadNorm
            | VisitKind::HeadScore
            | VisitKind::HeadTurn
            | VisitKind::HeadBackward
            | VisitKind::Remake
            | VisitKind::EmbedBackward => Input::Stays,
        }
    }

    fn rank(&self, stage: Stage, layer: LayerId, kind: VisitKind) -> Option<u32> {
        match kind {
            VisitKind::Forward if layer.index() < self.lowest || self.groups.is_remade(stage) => {
                None
            }
            VisitKind::Forward => Some(self.last.0 - 1 - stage.0),
            // The last one of a group goes straight back.
            VisitKind::Remake => Some(self.groups.of(stage).1.0 - 1 - stage.0),
            _ => None,
        }
    }

    /// Down and up over the tiles of the vocabulary.
    fn projection(&self, stage: Stage, tiles: &[TileSpec]) -> Vec<Visit> {
        let Some((last, before)) = tiles.split_last() else { return Vec::new() };
        // What goes on down from here is the gradient of the normed hidden state.
        let at = |tile, kind| Visit { goes_back: true, ..self.at(stage, tile, kind) };
        let scores = before.iter().map(|tile| at(tile, VisitKind::HeadScore));
        let turn = std::iter::once(at(last, VisitKind::HeadTurn));
        let backward = before.iter().rev().map(|tile| at(tile, VisitKind::HeadBackward));
        scores.chain(turn).chain(backward).collect()
    }
}

/// The device's work at `visit`, in order. `keep` says which inner activations or logits of the
/// visit stay in memory, `spill` which gradients do not.
pub(crate) fn ops(
    visit: &Visit,
    micros: u32,
    keep: impl Fn(Micro) -> bool,
    spill: impl Fn(PieceId) -> bool,
) -> Vec<ComputeOp> {
    let mut ops: Vec<ComputeOp> =
        (0..micros).flat_map(|m| micro_ops(visit, Micro(m), &keep)).collect();
    if let Some(piece) = visit.gradient() {
        ops.push(ComputeOp::TakeGradient { piece, spill: spill(piece) });
    }
    ops
}

fn micro_ops(visit: &Visit, micro: Micro, keep: &impl Fn(Micro) -> bool) -> Vec<ComputeOp> {
    let (layer, stage) = (visit.layer, visit.stage);
    let (gradient, dx) = (visit.trains, visit.goes_back);
    match visit.kind {
        VisitKind::Embed => vec![ComputeOp::Embed { micro }],
        VisitKind::Forward if visit.consumes_input() => vec![
            ComputeOp::Forward { layer, stage, micro, keep: false },
            ComputeOp::Free { layer, stage, micro },
        ],
        VisitKind::Forward | VisitKind::Remake => {
            vec![ComputeOp::Forward { layer, stage, micro, keep: keep(micro) }]
        }
        VisitKind::HeadNorm => vec![ComputeOp::HeadNorm { micro }],
        VisitKind::HeadScore => vec![ComputeOp::HeadScore { micro, keep: keep(micro) }],
        VisitKind::HeadTurn => vec![
            ComputeOp::HeadScore { micro, keep: true },
            ComputeOp::HeadLoss { micro },
            ComputeOp::HeadBackward { micro, gradient },
        ],
        VisitKind::HeadBackward => vec![ComputeOp::HeadBackward { micro, gradient }],
        VisitKind::HeadNormBackward => vec![ComputeOp::HeadNormBackward { micro, gradient, dx }],
        VisitKind::Backward => vec![ComputeOp::Backward { layer, stage, micro, gradient, dx }],
        VisitKind::EmbedBackward => vec![ComputeOp::EmbedBackward { micro }],
    }
}

#[cfg(test)]
mod tests;
