//! From the machine's operations to the device's commands: names of tensors and weights.

use std::collections::BTreeMap;
use std::sync::Arc;

use compute::{Command, TensorId, WeightsId};
use model::{Attempt, LayerId, LayerTable, Micro, PieceId, Stage, Tiling, Weights};
use schedule::{ComputeOp, Need, Visit, VisitId};

use crate::Batch;

/// Kinds of tensors on the device. The input of stage n is `Input` of n; the head's input is the
/// output of the last stage of the decoder.
#[derive(Clone, Copy)]
enum Kind {
    Input = 1,
    InputGradient = 2,
    Hidden = 3,
    HiddenGradient = 4,
    Stats = 5,
}

fn tensor(kind: Kind, stage: Stage, micro: Micro) -> TensorId {
    TensorId((kind as u64) << 56 | u64::from(stage.0) << 32 | u64::from(micro.0))
}

/// The device's name for the weights of a visit.
pub(super) fn weights_id(attempt: Attempt, visit: VisitId) -> WeightsId {
    WeightsId(attempt.0 << 32 | u64::from(visit.0))
}

/// The device's name for a stage's input.
pub(super) fn input(stage: Stage, micro: Micro) -> TensorId {
    tensor(Kind::Input, stage, micro)
}

pub(super) fn bind(attempt: Attempt, visit: VisitId, at: &Visit, weights: Weights) -> Command {
    let tile = match &at.need {
        Need::Tile(tile) => tile.id,
        Need::Nothing | Need::EmbeddingRows => panic!("visit {visit:?} binds no weights"),
    };
    Command::Bind { id: weights_id(attempt, visit), layer: at.layer, tile, weights }
}

/// The layer an operation belongs to, and whether it is part of the backward sweep.
pub(super) fn layer_and_sweep(op: ComputeOp, head: LayerId) -> (LayerId, bool) {
    match op {
        ComputeOp::Embed { .. } => (LayerId(0), false),
        ComputeOp::EmbedBackward { .. } => (LayerId(0), true),
        ComputeOp::Forward { layer, .. } | ComputeOp::Free { layer, .. } => (layer, false),
        ComputeOp::Backward { layer, .. } => (layer, true),
        ComputeOp::TakeGradient { piece, .. } => (piece.layer, true),
        ComputeOp::HeadNorm { .. } | ComputeOp::HeadScore { .. } | ComputeOp::HeadLoss { .. } => {
            (head, false)
        }
        ComputeOp::HeadBackward { .. } | ComputeOp::HeadNormBackward { .. } => (head, true),
    }
}

/// What operations are about.
pub(super) struct Model {
    pub(super) table: Arc<LayerTable>,
    pub(super) tiling: Tiling,
    head: Stage,
    rows: PieceId,
}

impl Model {
    pub(super) fn new(table: Arc<LayerTable>, tiling: Tiling) -> Model {
        let (head, rows) = (Stage(table.stages(tiling) as u32 - 1), table.rows_piece(tiling));
        Model { table, tiling, head, rows }
    }
}

/// The commands of one operation, in order.
pub(super) fn commands(
    op: ComputeOp,
    weights: WeightsId,
    batch: &Batch,
    model: &Model,
    rows: &mut BTreeMap<Micro, Weights>,
) -> Vec<Command> {
    let head = model.head;
    let input_gradient = |stage, micro| tensor(Kind::InputGradient, stage, micro);
    let hidden = |micro| tensor(Kind::Hidden, head, micro);
    let hidden_gradient = |micro| tensor(Kind::HiddenGradient, head, micro);
    let stats = |micro| tensor(Kind::Stats, head, micro);
    let labels = |micro| Arc::clone(&batch.micro(micro).labels);
    match op {
        ComputeOp::Embed { micro } => {
            let Some(rows) = rows.remove(&micro) else { panic!("rows of {micro:?} are missing") };
            let index = Arc::clone(&batch.micro(micro).index);
            vec![Command::Embed { rows, index, y: input(Stage(1), micro) }]
        }
        ComputeOp::Forward { stage, micro, keep, .. } => vec![Command::Forward {
            weights,
            shape: batch.shape(),
            x: input(stage, micro),
            y: input(stage.next(), micro),
            keep,
        }],
        ComputeOp::HeadNorm { micro } => {
            vec![Command::HeadNorm { weights, x: input(head, micro), h: hidden(micro) }]
        }
        ComputeOp::HeadScore { micro, keep } => vec![Command::HeadScore {
            weights,
            h: hidden(micro),
            labels: labels(micro),
            stats: stats(micro),
            keep,
        }],
        ComputeOp::HeadLoss { micro } => {
            vec![Command::HeadLoss { stats: stats(micro), labels: labels(micro) }]
        }
        ComputeOp::HeadBackward { micro, gradient } => vec![Command::HeadBackward {
            weights,
            h: hidden(micro),
            stats: stats(micro),
            labels: labels(micro),
            dh: hidden_gradient(micro),
            scale: batch.scale(),
            gradient,
        }],
        ComputeOp::HeadNormBackward { micro, gradient, dx } => vec![
            Command::HeadNormBackward {
                weights,
                x: input(head, micro),
                dh: hidden_gradient(micro),
                dx: dx.then(|| input_gradient(head, micro)),
                gradient,
            },
            Command::Free { id: hidden(micro) },
            Command::Free { id: stats(micro) },
        ],
        ComputeOp::Backward { stage, micro, gradient, dx, .. } => vec![Command::Backward {
            weights,
            shape: batch.shape(),
            x: input(stage, micro),
            dy: input_gradient(stage.next(), micro),
            dx: dx.then(|| input_gradient(stage, micro)),
            gradient,
        }],
        ComputeOp::Free { stage, micro, .. } => vec![Command::Free { id: input(stage, micro) }],
        ComputeOp::EmbedBackward { micro } => vec![Command::EmbedBackward {
            tokens: Arc::clone(&batch.micro(micro).tokens),
            dy: input_gradient(Stage(1), micro),
        }],
        ComputeOp::TakeGradient { piece, .. } if piece == model.rows => vec![Command::TakeRows],
        ComputeOp::TakeGradient { piece, .. } => {
            let elements = model.table.piece(piece, model.tiling);
            vec![Command::TakeGradient { layer: piece.layer, elements }]
        }
    }
}
