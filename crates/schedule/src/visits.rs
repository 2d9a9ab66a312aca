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

use model::{LayerId, LayerKind, LayerTable, Micro, TileSpec};

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
    Backward,
    EmbedBackward,
}

/// One stop of a sweep.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Visit {
    pub layer: LayerId,
    pub need: Need,
    pub kind: VisitKind,
    /// Backward: the weights' own gradient is wanted.
    pub trains: bool,
    /// Whether a layer at or below this one trains: in forward the input is needed again, in
    /// backward a gradient goes on down (not from the lowest layer that trains).
    pub goes_back: bool,
}

impl Visit {
    /// The layer whose gradient the visit adds to, if any.
    pub fn gradient(&self) -> Option<LayerId> {
        if !self.trains {
            return None;
        }
        match (self.kind, &self.need) {
            (VisitKind::HeadTurn | VisitKind::HeadBackward, Need::Tile(tile)) => Some(tile.source),
            (VisitKind::HeadNormBackward | VisitKind::Backward | VisitKind::EmbedBackward, _) => {
                Some(self.layer)
            }
            _ => None,
        }
    }

    /// Whether the layer's gradient is complete after the visit.
    pub fn completes_gradient(&self) -> bool {
        self.trains
            && matches!(
                self.kind,
                VisitKind::HeadNormBackward | VisitKind::Backward | VisitKind::EmbedBackward
            )
    }

    /// Whether the layer's input is gone after the visit.
    pub fn consumes_input(&self) -> bool {
        match self.kind {
            VisitKind::Forward => !self.goes_back,
            VisitKind::Backward | VisitKind::HeadNormBackward => true,
            _ => false,
        }
    }
}

/// One command for the compute device, tensors named by layer and microbatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ComputeOp {
    Embed {
        micro: Micro,
    },
    Forward {
        layer: LayerId,
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
    /// `dx`: a gradient goes on to the layer below.
    HeadNormBackward {
        micro: Micro,
        gradient: bool,
        dx: bool,
    },
    Backward {
        layer: LayerId,
        micro: Micro,
        gradient: bool,
        dx: bool,
    },
    /// The layer's input is not needed again.
    Free {
        layer: LayerId,
        micro: Micro,
    },
    EmbedBackward {
        micro: Micro,
    },
    /// The layer's gradient is complete: move it to the host, and on to `scratch/` if `spill`.
    TakeGradient {
        layer: LayerId,
        spill: bool,
    },
}

/// All visits of one step, forward then backward; `locked` by layer.
///
/// # Panics
/// If no layer trains.
pub fn sweep(table: &LayerTable, locked: &[bool]) -> Vec<Visit> {
    assert_eq!(locked.len(), table.len(), "locks of another model");
    let Some(lowest) = locked.iter().position(|locked| !locked) else {
        panic!("a step in which every layer is locked")
    };
    let decoders = || table.layers().iter().filter(|l| l.kind == LayerKind::Decoder);
    let whole = |id: LayerId| Need::Tile(table.tiles(id).remove(0));
    let trains = |id: LayerId| !locked[id.index()];
    let forward = |layer: LayerId, need, kind| {
        let goes_back = layer.index() >= lowest;
        Visit { layer, need, kind, trains: false, goes_back }
    };
    let backward = |layer: LayerId, need, kind| {
        let goes_back = layer.index() > lowest;
        Visit { layer, need, kind, trains: trains(layer), goes_back }
    };
    let (embedding, head) = (table.embedding(), table.head());

    let mut visits = vec![forward(embedding, Need::EmbeddingRows, VisitKind::Embed)];
    visits.extend(decoders().map(|l| forward(l.id, whole(l.id), VisitKind::Forward)));
    visits.push(forward(head, whole(head), VisitKind::HeadNorm));
    visits.extend(head_visits(table, &trains));
    visits.push(backward(head, whole(head), VisitKind::HeadNormBackward));
    let above = decoders().rev().filter(|l| l.id.index() >= lowest);
    visits.extend(above.map(|l| backward(l.id, whole(l.id), VisitKind::Backward)));
    if trains(embedding) {
        visits.push(backward(embedding, Need::Nothing, VisitKind::EmbedBackward));
    }
    visits
}

fn head_visits(table: &LayerTable, trains: &dyn Fn(LayerId) -> bool) -> Vec<Visit> {
    let mut tiles = table.tiles(table.head());
    let Some(last) = tiles.pop() else { return Vec::new() };
    let at = |tile: &TileSpec, kind| Visit {
        layer: table.head(),
        need: Need::Tile(tile.clone()),
        kind,
        trains: kind != VisitKind::HeadScore && trains(tile.source),
        goes_back: true,
    };
    let projection = &tiles[1..];
    let scores = projection.iter().map(|t| at(t, VisitKind::HeadScore));
    let turn = std::iter::once(at(&last, VisitKind::HeadTurn));
    let backward = projection.iter().rev().map(|t| at(t, VisitKind::HeadBackward));
    scores.chain(turn).chain(backward).collect()
}

/// The device's work at `visit`, in order. `keep` says which inner activations or logits of the
/// visit stay in memory, `spill` which gradients do not.
pub(crate) fn ops(
    visit: &Visit,
    micros: u32,
    keep: impl Fn(Micro) -> bool,
    spill: impl Fn(LayerId) -> bool,
) -> Vec<ComputeOp> {
    let mut ops: Vec<ComputeOp> =
        (0..micros).flat_map(|m| micro_ops(visit, Micro(m), &keep)).collect();
    if visit.completes_gradient() {
        ops.push(ComputeOp::TakeGradient { layer: visit.layer, spill: spill(visit.layer) });
    }
    ops
}

fn micro_ops(visit: &Visit, micro: Micro, keep: &impl Fn(Micro) -> bool) -> Vec<ComputeOp> {
    let (layer, gradient, dx) = (visit.layer, visit.trains, visit.goes_back);
    match visit.kind {
        VisitKind::Embed => vec![ComputeOp::Embed { micro }],
        VisitKind::Forward if visit.consumes_input() => {
            vec![ComputeOp::Forward { layer, micro, keep: false }, ComputeOp::Free { layer, micro }]
        }
        VisitKind::Forward => vec![ComputeOp::Forward { layer, micro, keep: keep(micro) }],
        VisitKind::HeadNorm => vec![ComputeOp::HeadNorm { micro }],
        VisitKind::HeadScore => vec![ComputeOp::HeadScore { micro, keep: keep(micro) }],
        VisitKind::HeadTurn => vec![
            ComputeOp::HeadScore { micro, keep: true },
            ComputeOp::HeadLoss { micro },
            ComputeOp::HeadBackward { micro, gradient },
        ],
        VisitKind::HeadBackward => vec![ComputeOp::HeadBackward { micro, gradient }],
        VisitKind::HeadNormBackward => vec![ComputeOp::HeadNormBackward { micro, gradient, dx }],
        VisitKind::Backward => vec![ComputeOp::Backward { layer, micro, gradient, dx }],
        VisitKind::EmbedBackward => vec![ComputeOp::EmbedBackward { micro }],
    }
}

#[cfg(test)]
mod tests;
