//! The order in which one step visits the layers' tiles, and the device's work at each visit.
//!
//! Forward over the layers, down and up over the head's vocabulary tiles (the last tile is scored
//! and differentiated in one visit), backward over the layers. All microbatches pass a tile
//! while its weights are bound.

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
}

impl Visit {
    /// The layer whose gradient the visit adds to, if any.
    pub fn gradient(&self) -> Option<LayerId> {
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
        matches!(
            self.kind,
            VisitKind::HeadNormBackward | VisitKind::Backward | VisitKind::EmbedBackward
        )
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
    },
    HeadNormBackward {
        micro: Micro,
    },
    Backward {
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

/// All visits of one step, forward then backward.
pub fn sweep(table: &LayerTable) -> Vec<Visit> {
    let decoders = || table.layers().iter().filter(|l| l.kind == LayerKind::Decoder);
    let whole = |id: LayerId| Need::Tile(table.tiles(id).remove(0));
    let at = |layer, need, kind| Visit { layer, need, kind };
    let (embedding, head) = (table.embedding(), table.head());

    let mut visits = vec![at(embedding, Need::EmbeddingRows, VisitKind::Embed)];
    visits.extend(decoders().map(|l| at(l.id, whole(l.id), VisitKind::Forward)));
    visits.push(at(head, whole(head), VisitKind::HeadNorm));
    visits.extend(head_visits(table));
    visits.push(at(head, whole(head), VisitKind::HeadNormBackward));
    visits.extend(decoders().rev().map(|l| at(l.id, whole(l.id), VisitKind::Backward)));
    visits.push(at(embedding, Need::Nothing, VisitKind::EmbedBackward));
    visits
}

fn head_visits(table: &LayerTable) -> Vec<Visit> {
    let mut tiles = table.tiles(table.head());
    let Some(last) = tiles.pop() else { return Vec::new() };
    let at =
        |tile: &TileSpec, kind| Visit { layer: table.head(), need: Need::Tile(tile.clone()), kind };
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
    let layer = visit.layer;
    let each = |op: &dyn Fn(Micro) -> ComputeOp| (0..micros).map(|m| op(Micro(m))).collect();
    let mut ops: Vec<ComputeOp> = match visit.kind {
        VisitKind::Embed => each(&|micro| ComputeOp::Embed { micro }),
        VisitKind::Forward => each(&|micro| ComputeOp::Forward { layer, micro, keep: keep(micro) }),
        VisitKind::HeadNorm => each(&|micro| ComputeOp::HeadNorm { micro }),
        VisitKind::HeadScore => each(&|micro| ComputeOp::HeadScore { micro, keep: keep(micro) }),
        VisitKind::HeadTurn => (0..micros)
            .map(Micro)
            .flat_map(|micro| {
                [
                    ComputeOp::HeadScore { micro, keep: true },
                    ComputeOp::HeadLoss { micro },
                    ComputeOp::HeadBackward { micro },
                ]
            })
            .collect(),
        VisitKind::HeadBackward => each(&|micro| ComputeOp::HeadBackward { micro }),
        VisitKind::HeadNormBackward => each(&|micro| ComputeOp::HeadNormBackward { micro }),
        VisitKind::Backward => each(&|micro| ComputeOp::Backward { layer, micro }),
        VisitKind::EmbedBackward => each(&|micro| ComputeOp::EmbedBackward { micro }),
    };
    if visit.completes_gradient() {
        ops.push(ComputeOp::TakeGradient { layer, spill: spill(layer) });
    }
    ops
}
