//! What is visited, and what the device does there, for every set of locks.

use model::ModelConfig;

use super::*;

fn table(layers: usize, tied: bool) -> LayerTable {
    // Three tiles of vocabulary.
    let config = ModelConfig::from_json(&format!(
        r#"{{"model_type":"llama","vocab_size":20000,"hidden_size":64,"intermediate_size":128,
            "num_hidden_layers":{layers},"num_attention_heads":4,"tie_word_embeddings":{tied}}}"#
    ));
    LayerTable::new(&config.unwrap())
}

/// Every set of locks that leaves something to train.
fn every_lock(layers: usize) -> impl Iterator<Item = Vec<bool>> {
    (0..(1u32 << layers) - 1).map(move |bits| (0..layers).map(|l| bits >> l & 1 == 1).collect())
}

fn all_ops(visits: &[Visit], micros: u32) -> Vec<ComputeOp> {
    visits.iter().flat_map(|visit| ops(visit, micros, |_| true, |_| false)).collect()
}

/// Runs the operations on names of tensors only, as the device would.
#[derive(Default)]
struct Names {
    inputs: Vec<(Stage, Micro)>,
    /// Gradients on their way down, by the stage whose output they belong to.
    down: Vec<(Stage, Micro)>,
    dh: Vec<Micro>,
    gradients: Vec<PieceId>,
    taken: Vec<PieceId>,
}

impl Names {
    fn take<T: PartialEq + std::fmt::Debug>(from: &mut Vec<T>, what: &T) {
        let at = from.iter().position(|have| have == what);
        from.remove(at.unwrap_or_else(|| panic!("{what:?} is not there")));
    }

    fn run(&mut self, op: ComputeOp, piece: PieceId, head: Stage) {
        let below = |stage: Stage| Stage(stage.0 - 1);
        match op {
            ComputeOp::Embed { micro } => self.inputs.push((Stage(1), micro)),
            ComputeOp::Forward { stage, micro, .. } => {
                assert!(self.inputs.contains(&(stage, micro)), "{op:?}");
                self.inputs.push((stage.next(), micro));
            }
            ComputeOp::Free { stage, micro, .. } => Names::take(&mut self.inputs, &(stage, micro)),
            ComputeOp::HeadNorm { micro } => assert!(self.inputs.contains(&(head, micro))),
            ComputeOp::HeadScore { .. } | ComputeOp::HeadLoss { .. } => {}
            ComputeOp::HeadBackward { micro, gradient } => {
                if !self.dh.contains(&micro) {
                    self.dh.push(micro);
                }
                self.gradients.extend(gradient.then_some(piece));
            }
            ComputeOp::HeadNormBackward { micro, gradient, dx } => {
                Names::take(&mut self.dh, &micro);
                Names::take(&mut self.inputs, &(head, micro));
                self.gradients.extend(gradient.then_some(piece));
                self.down.extend(dx.then(|| (below(head), micro)));
            }
            ComputeOp::Backward { stage, micro, gradient, dx, .. } => {
                Names::take(&mut self.inputs, &(stage, micro));
                Names::take(&mut self.down, &(stage, micro));
                self.gradients.extend(gradient.then_some(piece));
                self.down.extend(dx.then(|| (below(stage), micro)));
            }
            ComputeOp::EmbedBackward { micro } => {
                Names::take(&mut self.down, &(Stage(0), micro));
                self.gradients.push(piece);
            }
            ComputeOp::TakeGradient { piece, .. } => {
                assert!(self.gradients.contains(&piece), "{op:?}");
                self.gradients.retain(|have| *have != piece);
                self.taken.push(piece);
            }
        }
    }
}

/// What is needed sooner on the way back ranks lower, and no two visits that are kept at once alike.
fn assert_ranked(visits: &[Visit]) {
    let mut kept = Vec::new();
    for visit in visits {
        if visit.kind == VisitKind::Backward {
            kept.retain(|(stage, _)| *stage != visit.stage);
        } else if let Some(rank) = visit.rank {
            kept.push((visit.stage, rank));
            let mut ranks: Vec<u32> = kept.iter().map(|(_, rank)| *rank).collect();
            assert!(ranks.is_sorted_by(|lower, upper| lower > upper), "{kept:?}");
            ranks.dedup();
            assert_eq!(ranks.len(), kept.len(), "{kept:?}");
        }
    }
    let ranks = visits.iter().filter_map(|visit| visit.rank);
    assert_eq!(ranks.min().unwrap_or(0), 0);
}

#[test]
fn exactly_the_unlocked_layers_have_gradients_and_nothing_is_left_over() {
    let tilings = [Tiling::Whole, Tiling::Blocks];
    let models =
        [(1, true, 1, 1), (1, false, 2, 3), (3, true, 2, 1), (3, false, 1, 2), (5, true, 1, 2)];
    for ((layers, tied, micros, interval), tiling) in
        models.into_iter().flat_map(|model| tilings.map(|tiling| (model, tiling)))
    {
        let table = table(layers, tied);
        let head = Stage(table.stages(tiling) as u32 - 1);
        for locked in every_lock(table.len()) {
            let visits = sweep(&table, tiling, interval, &locked);
            assert_ranked(&visits);
            let mut names = Names::default();
            for visit in &visits {
                for op in ops(visit, micros, |_| true, |_| false) {
                    names.run(op, visit.piece, head);
                }
            }
            // Of each layer its pieces in their order; what the head gives a tied embedding early.
            names.taken.sort_by_key(|piece| piece.layer);
            let unlocked = (0..table.len()).filter(|&l| !locked[l]);
            let of = |l: usize| {
                let layer = LayerId(l as u32);
                let count = table.pieces(layer, tiling).len() as u32;
                (0..count).map(move |part| PieceId { layer, part })
            };
            let unlocked: Vec<_> = unlocked.flat_map(of).collect();
            assert_eq!(names.taken, unlocked, "{locked:?}");
            let left = (&names.inputs, &names.down, &names.dh, &names.gradients);
            assert!(left.0.is_empty() && left.1.is_empty(), "{locked:?}: {left:?}");
            assert!(left.2.is_empty() && left.3.is_empty(), "{locked:?}: {left:?}");
        }
    }
}

#[test]
fn backward_ends_at_the_lowest_layer_that_trains() {
    let table = table(4, true);
    for locked in every_lock(table.len()) {
        let lowest = locked.iter().position(|l| !l).unwrap();
        let visits = sweep(&table, Tiling::Whole, 1, &locked);
        let backward = |v: &&Visit| matches!(v.kind, VisitKind::Backward);
        let visited: Vec<usize> = visits.iter().filter(backward).map(|v| v.layer.index()).collect();
        let wanted: Vec<usize> = (lowest.max(1)..table.len() - 1).rev().collect();
        assert_eq!(visited, wanted, "{locked:?}");
        let embeds = visits.iter().any(|v| v.kind == VisitKind::EmbedBackward);
        assert_eq!(embeds, lowest == 0);
        for op in all_ops(&visits, 1) {
            if let ComputeOp::Backward { layer, dx, .. } = op {
                assert_eq!(dx, layer.index() > lowest, "{locked:?}");
            }
            if let ComputeOp::Free { layer, .. } = op {
                assert!(layer.index() < lowest, "{locked:?}");
            }
        }
    }
}

#[test]
fn a_tied_projection_locks_with_the_embedding() {
    let head_gradients = |tied: bool, locked: [bool; 3]| {
        let ops = all_ops(&sweep(&table(1, tied), Tiling::Whole, 1, &locked), 1);
        let of = |op: &ComputeOp| match op {
            ComputeOp::HeadBackward { gradient, .. } => Some(*gradient),
            _ => None,
        };
        let projection: Vec<bool> = ops.iter().filter_map(of).collect();
        assert!(projection.len() == 3 && projection.windows(2).all(|w| w[0] == w[1]));
        let norm =
            |op: &ComputeOp| matches!(op, ComputeOp::HeadNormBackward { gradient: true, .. });
        (projection[0], ops.iter().any(norm))
    };
    assert_eq!(head_gradients(true, [true, false, false]), (false, true));
    assert_eq!(head_gradients(true, [false, false, true]), (true, false));
    assert_eq!(head_gradients(false, [true, false, false]), (true, true));
    assert_eq!(head_gradients(false, [false, false, true]), (false, false));
}

#[test]
#[should_panic(expected = "every layer is locked")]
fn a_step_without_a_layer_to_train_is_a_programmers_error() {
    sweep(&table(1, true), Tiling::Whole, 1, &[true; 3]);
}
