//! What a step costs: bytes of the disk and operations of the device, from what the machines will do.
//!
//! Counted from the visits of a sweep, so that a plan and a run cannot disagree about the order of work.

use model::{LayerId, LayerTable, Limits, Precision, RunShape, Stage, StateLayout};

use crate::{Input, Need, Policy, Visit, VisitKind, sweep};

/// What a step is made of.
#[derive(Clone, Copy, Debug)]
pub struct StepPlan<'a> {
    pub table: &'a LayerTable,
    pub layout: StateLayout,
    /// How exactly the device wants weights.
    pub precision: Precision,
    pub shape: RunShape,
    pub limits: &'a Limits,
    /// When its optimizer runs; speculation that succeeds is [`Policy::Fused`].
    pub policy: Policy,
    /// Steps from one commit to the next.
    pub commit_every: u64,
    /// By layer.
    pub locked: &'a [bool],
}

/// Bytes that a step asks of the store, small files left out; the mean of the steps of a commit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepBytes {
    /// At most: the rows of the embedding that tokens name are counted as if all were different.
    pub read: u64,
    /// Of these: what comes from memory, because the sweep has just read it or spare memory holds it.
    pub read_again: u64,
    pub written: u64,
}

impl StepBytes {
    /// What the disk itself has to read at most.
    pub fn read_from_disk(&self) -> u64 {
        self.read - self.read_again
    }
}

impl StepPlan<'_> {
    /// Bytes of the step.
    pub fn bytes(&self) -> StepBytes {
        let mut bytes = StepBytes::default();
        for visit in self.sweep() {
            bytes.read += self.weights_read(&visit);
        }
        let trained = self.table.layers().iter().filter(|l| !self.locked[l.id.index()]);
        for layer in trained {
            let elements = layer.elements();
            let state = self.layout.bytes(elements) as u64;
            bytes.read += state;
            bytes.written += self.saved(state);
            match self.policy {
                Policy::Fused if self.is_read_before(layer.id) => {
                    bytes.read_again += self.weight_bytes(elements);
                }
                Policy::Fused | Policy::Deferred => {}
            }
            let (embedding, spilled) =
                (layer.id == self.table.embedding(), self.limits.spilled[layer.id.index()]);
            if spilled && (self.policy == Policy::Deferred || embedding) {
                let gradient = self.limits.layer_gradient_bytes[layer.id.index()] as u64;
                // Rows are added twice, for the norm and for the update.
                bytes.read += gradient * if embedding { 2 } else { 1 };
                bytes.written += gradient;
            }
        }
        bytes.read_again += self.held(bytes);
        let inputs = self.parked() * self.shape.micros() as u64;
        bytes.read += inputs * self.limits.boundary_bytes as u64;
        bytes.written += inputs * self.limits.boundary_bytes as u64;
        bytes
    }

    /// What is written of new versions: where they have room to wait, only those that are committed.
    fn saved(&self, state: u64) -> u64 {
        let whole = self.layout.bytes(self.table.elements()).max(1) as f64;
        let waits = (self.limits.waiting_bytes as f64 / whole).min(1.0);
        let between = 1.0 - 1.0 / self.commit_every as f64;
        (state as f64 * (1.0 - waits * between)) as u64
    }

    /// What spare memory saves of the state's reads: the share of the state that it has room for.
    fn held(&self, bytes: StepBytes) -> u64 {
        let state = self.layout.bytes(self.table.elements()).max(1) as f64;
        let share = (self.limits.spare_bytes as f64 / state).min(1.0);
        (share * bytes.read_from_disk() as f64) as u64
    }

    /// Multiplications and additions of products with weights.
    pub fn product_flops(&self) -> f64 {
        let sweep = self.sweep();
        let each = |visit: &Visit| {
            let Need::Tile(tile) = &visit.need else { return 0.0 };
            let product = 2.0 * self.shape.step_tokens() as f64 * tile.elements.len() as f64;
            let gradient = f64::from(u8::from(visit.trains));
            let onward = f64::from(u8::from(visit.goes_back));
            product
                * match visit.kind {
                    VisitKind::Forward | VisitKind::Remake | VisitKind::HeadScore => 1.0,
                    VisitKind::HeadTurn => 2.0 + gradient,
                    VisitKind::HeadBackward => 1.0 + gradient + self.rescored(tile.id.0),
                    VisitKind::Backward => gradient + onward + self.recomputed(&sweep, visit.stage),
                    VisitKind::Embed
                    | VisitKind::HeadNorm
                    | VisitKind::HeadNormBackward
                    | VisitKind::EmbedBackward => 0.0,
                }
        };
        sweep.iter().map(each).sum()
    }

    fn sweep(&self) -> Vec<Visit> {
        sweep(self.table, self.limits.tiling, self.limits.interval, self.locked)
    }

    fn weights_read(&self, visit: &Visit) -> u64 {
        match &visit.need {
            Need::Nothing => 0,
            Need::Tile(tile) => self.weight_bytes(tile.elements.len()),
            Need::EmbeddingRows => {
                let rows = self.table.layer(visit.layer).tensors[0].shape[0];
                let width = self.table.layer(visit.layer).tensors[0].shape[1];
                let named = self.shape.micro_tokens().min(rows) * self.shape.micros();
                self.weight_bytes(named * width)
            }
        }
    }

    fn weight_bytes(&self, elements: usize) -> u64 {
        let planes = self.layout.weight_planes(self.precision).iter();
        planes.map(|plane| plane.bytes(elements) as u64).sum()
    }

    /// Whether the sweep passes a layer's weights right before its update.
    fn is_read_before(&self, layer: LayerId) -> bool {
        layer != self.table.embedding()
    }

    /// Stages whose inputs wait in `scratch/`.
    fn parked(&self) -> u64 {
        let waits = |visit: &&Visit| visit.input == Input::Waits;
        let parked = |visit: &&Visit| self.limits.parked[visit.stage.index()];
        self.sweep().iter().filter(waits).filter(parked).count() as u64
    }

    /// Share of a stage's microbatches that are computed again in backward.
    fn recomputed(&self, sweep: &[Visit], stage: Stage) -> f64 {
        let micros = self.shape.micros();
        let mut ranks = sweep.iter().filter(|v| v.stage == stage).filter_map(|v| v.rank);
        let Some(above) = ranks.next().map(|rank| rank as usize) else { return 1.0 };
        let kept = self.limits.kept.saturating_sub(above * micros).min(micros);
        1.0 - kept as f64 / micros as f64
    }

    /// Share of a vocabulary tile's microbatches that are scored again on the way back.
    fn rescored(&self, tile: u32) -> f64 {
        let micros = self.shape.micros();
        let turn = self.table.tiles(self.table.head(), self.limits.tiling).len() as u32 - 1;
        let above = (turn - 1 - tile) as usize;
        let kept = self.limits.kept_logits.saturating_sub(above * micros).min(micros);
        1.0 - kept as f64 / micros as f64
    }
}

#[cfg(test)]
mod tests {
    use model::{ModelConfig, Wait, Workspace};

    use super::*;

    const SHAPE: RunShape = RunShape { batch_rows: 4, micro_rows: 2, seq_len: 32 };

    fn table(tied: bool) -> LayerTable {
        let config = ModelConfig::from_json(&format!(
            r#"{{"model_type":"llama","vocab_size":8192,"hidden_size":64,"intermediate_size":128,
                "num_hidden_layers":6,"num_attention_heads":4,"tie_word_embeddings":{tied}}}"#
        ));
        LayerTable::new(&config.unwrap())
    }

    /// Bytes per parameter of the decoder layers alone, as DESIGN counts them.
    fn per_parameter(layout: StateLayout, precision: Precision, policy: Policy) -> (f64, f64) {
        let table = table(true);
        let workspace = Workspace { precision, ..Workspace::default() };
        let limits = Limits::new(&table, layout, SHAPE, |_| workspace, Wait::None, 1, 1 << 30);
        let limits = Limits { spare_bytes: 0, ..limits.unwrap() };
        let bytes = |locked: &[bool]| {
            let shape = SHAPE;
            let limits = &limits;
            let (table, commit_every) = (&table, 1);
            let plan =
                StepPlan { table, layout, precision, shape, limits, policy, commit_every, locked };
            plan.bytes()
        };
        let mut locked = vec![false; table.len()];
        let all = bytes(&locked);
        // What a layer costs shows when the others stay as they are: locked above a trained one.
        locked[3] = true;
        let without = bytes(&locked);
        let elements = table.layer(LayerId(3)).elements() as f64;
        let weights: usize = layout.weight_planes(precision).iter().map(|p| p.bytes(1)).sum();
        let sweeps = 2.0 * weights as f64;
        let read = (all.read_from_disk() - without.read_from_disk()) as f64 / elements + sweeps;
        (read, (all.written - without.written) as f64 / elements)
    }

    #[test]
    fn bytes_per_parameter_are_the_designs() {
        use Precision::{Bf16, Exact};
        use StateLayout::{Bf16Sr8, F32, Split, Split8};
        for (layout, precision, fused, deferred, written) in [
            (F32, Exact, 16.0, 20.0, 12.0),
            (Split, Exact, 16.0, 20.0, 12.0),
            (Split, Bf16, 14.0, 16.0, 12.0),
            (Split8, Exact, 10.0, 14.0, 6.0),
            (Split8, Bf16, 8.0, 10.0, 6.0),
            (Bf16Sr8, Bf16, 6.0, 8.0, 4.0),
        ] {
            for (policy, read) in [(Policy::Fused, fused), (Policy::Deferred, deferred)] {
                let found = per_parameter(layout, precision, policy);
                // Scales of 8-bit moments are 1/32 of a byte each way.
                let near = |a: f64, b: f64| (a - b).abs() < 0.04;
                assert!(near(found.0, read) && near(found.1, written), "{layout} {found:?}");
            }
        }
    }

    #[test]
    fn what_spare_memory_holds_is_not_read_from_the_disk() {
        let table = table(true);
        let (layout, precision) = (StateLayout::F32, Precision::Exact);
        let locked = vec![false; table.len()];
        let read = |spare: f64| {
            let workspace = Workspace::default();
            let limits = Limits::new(&table, layout, SHAPE, |_| workspace, Wait::None, 1, 1 << 30);
            let spare_bytes = (spare * layout.bytes(table.elements()) as f64) as usize;
            let limits = &Limits { spare_bytes, ..limits.unwrap() };
            let (shape, policy, locked) = (SHAPE, Policy::Fused, &locked[..]);
            let (table, commit_every) = (&table, 1);
            let plan =
                StepPlan { table, layout, precision, shape, limits, policy, commit_every, locked };
            plan.bytes()
        };
        let (none, half, all) = (read(0.0), read(0.5), read(2.0));
        assert!(half.read_from_disk().abs_diff(none.read_from_disk() / 2) < 100);
        assert_eq!((all.read_from_disk(), all.read), (0, none.read));
    }

    #[test]
    fn what_waits_is_written_when_it_is_committed() {
        let table = table(true);
        let (layout, precision) = (StateLayout::F32, Precision::Exact);
        let locked = vec![false; table.len()];
        let limits =
            Limits::new(&table, layout, SHAPE, |_| Workspace::default(), Wait::None, 1, 1 << 30);
        let (limits, all) = (limits.unwrap(), layout.bytes(table.elements()));
        let written = |waiting_bytes, commit_every| {
            let limits = &Limits { waiting_bytes, ..limits.clone() };
            let (shape, policy, locked) = (SHAPE, Policy::Fused, &locked[..]);
            let table = &table;
            let plan =
                StepPlan { table, layout, precision, shape, limits, policy, commit_every, locked };
            plan.bytes().written
        };
        let whole = written(0, 10);
        assert_eq!(whole, all as u64);
        assert_eq!((written(all, 1), written(all / 2, 1)), (whole, whole));
        let near = |a: u64, b: u64| a.abs_diff(b) < 100;
        assert!(near(written(2 * all, 10), whole / 10) && near(written(all / 2, 4), whole * 5 / 8));
    }

    #[test]
    fn a_step_is_six_operations_a_parameter_and_token_and_recomputing_two_more() {
        let table = table(true);
        let locked = vec![false; table.len()];
        let workspace =
            Workspace { kept_bytes: 1 << 20, logits_bytes: 1 << 20, ..Workspace::default() };
        for (ram, factor) in [(1 << 30, 6.0), (0, 8.0)] {
            let limits = |ram| {
                Limits::new(&table, StateLayout::F32, SHAPE, |_| workspace, Wait::None, 1, ram)
            };
            let limits = match limits(ram) {
                Err(model::BudgetError::TooSmall { needed_bytes, .. }) => {
                    limits(needed_bytes as usize)
                }
                fits => fits,
            };
            let plan = StepPlan {
                table: &table,
                layout: StateLayout::F32,
                precision: Precision::Exact,
                shape: SHAPE,
                limits: &limits.unwrap(),
                policy: Policy::Fused,
                commit_every: 1,
                locked: &locked,
            };
            let tokens = SHAPE.step_tokens() as f64;
            let matrices: f64 = table.layers()[1..7].iter().map(|l| l.elements() as f64).sum();
            let head = 8192.0 * 64.0;
            // The head's one tile turns at once: nothing is scored twice.
            let want = tokens * (factor * matrices + 6.0 * head);
            assert!((plan.product_flops() / want - 1.0).abs() < 1e-9, "{factor}");
        }
    }
}
