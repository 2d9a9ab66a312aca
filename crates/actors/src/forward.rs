//! [`Forward`]: losses and next-token logits of a store's model, layer by layer, without training.
//!
//! Reads the next tile while the device computes the present one. Nothing is written.

use std::ops::Range;
use std::sync::Arc;

use compute::{Command, Device, MicroShape, Outcome, TensorId, WeightsId};
use model::{
    LayerId, LayerKind, LayerTable, Micro, Precision, RunShape, TileSpec, Tiling, Weights,
};
use store::{AfterUse, ReadingStore, StoreError, TrainingStore, blocking};

use crate::{Batch, Failure};

/// Where weights are read from.
pub trait WeightReader: Sync {
    fn table(&self) -> &LayerTable;
    /// Live weights of a layer.
    fn weights(&self, layer: LayerId, elements: Range<usize>) -> Result<Weights, StoreError>;
}

impl WeightReader for ReadingStore {
    fn table(&self) -> &LayerTable {
        ReadingStore::table(self)
    }

    fn weights(&self, layer: LayerId, elements: Range<usize>) -> Result<Weights, StoreError> {
        self.read_weights_blocking(layer, elements, Precision::Exact)
    }
}

impl WeightReader for TrainingStore {
    fn table(&self) -> &LayerTable {
        TrainingStore::table(self)
    }

    fn weights(&self, layer: LayerId, elements: Range<usize>) -> Result<Weights, StoreError> {
        let slot = self.state().layers[layer.index()].slot;
        let (at, after) = ((layer, slot), AfterUse::Forget);
        blocking(|done| self.read_weights(at, elements, Precision::Exact, after, done))
    }
}

const X: TensorId = TensorId(1);
const Y: TensorId = TensorId(2);
const STATS: TensorId = TensorId(3);

/// A model that is only run forward.
pub struct Forward<'r> {
    reader: &'r dyn WeightReader,
    device: Box<dyn Device>,
}

impl std::fmt::Debug for Forward<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Forward").finish_non_exhaustive()
    }
}

/// What the head is asked for.
enum Ask<'b> {
    Loss(&'b Arc<[u32]>),
    Logits { token: usize },
}

impl<'r> Forward<'r> {
    /// Runs the reader's model on `device`, which must be idle.
    pub fn new(reader: &'r dyn WeightReader, device: Box<dyn Device>) -> Forward<'r> {
        Forward { reader, device }
    }

    /// Sum of the losses of all targets of rows `[rows, S]`, in nats, and their number.
    pub fn loss(
        &mut self,
        tokens: &[u32],
        is_target: &[bool],
        seq_len: usize,
    ) -> Result<(f64, u64), Failure> {
        let rows = tokens.len() / seq_len;
        let shape = RunShape { batch_rows: rows, micro_rows: rows, seq_len };
        let batch = Batch::new(tokens, is_target, shape);
        let labels = Arc::clone(&batch.micro(Micro(0)).labels);
        match self.run(&batch, &Ask::Loss(&labels))? {
            Answer::Loss(sum) => Ok((sum, batch.targets())),
            Answer::Logits(_) => Ok((f64::NAN, 0)),
        }
    }

    /// Logits `[V]` of the token after `tokens`.
    pub fn next_logits(&mut self, tokens: &[u32]) -> Result<Vec<f32>, Failure> {
        let shape = RunShape { batch_rows: 1, micro_rows: 1, seq_len: tokens.len() };
        let batch = Batch::new(tokens, &vec![false; tokens.len()], shape);
        match self.run(&batch, &Ask::Logits { token: tokens.len() - 1 })? {
            Answer::Logits(logits) => Ok(logits),
            Answer::Loss(_) => Ok(Vec::new()),
        }
    }

    fn run(&mut self, batch: &Batch, ask: &Ask<'_>) -> Result<Answer, Failure> {
        let result = self.sweep(batch, ask);
        if result.is_err() {
            // Whatever the failed sweep left behind.
            let _ = self.compute(Command::Clear);
        }
        result
    }

    fn sweep(&mut self, batch: &Batch, ask: &Ask<'_>) -> Result<Answer, Failure> {
        let table = self.reader.table();
        self.embed(batch)?;
        let tiles: Vec<TileSpec> = table.streamed(Tiling::Blocks).collect();
        let mut logits = Vec::new();
        let reader = self.reader;
        std::thread::scope(|scope| {
            let (sender, next) = std::sync::mpsc::sync_channel(1);
            let tiles_to_read = &tiles;
            scope.spawn(move || {
                for tile in tiles_to_read {
                    let bytes = reader.weights(tile.source, tile.elements.clone());
                    if sender.send(bytes).is_err() {
                        return;
                    }
                }
            });
            for (at, tile) in tiles.iter().enumerate() {
                let weights = next.recv().map_err(|_| Failure::Lost)??;
                let (id, layer) = (WeightsId(at as u64), table.layer_of(tile));
                self.compute(Command::Bind { id, layer, tile: tile.id, weights })?;
                self.visit(id, layer, tile, batch, ask, &mut logits)?;
                self.compute(Command::Unbind { id })?;
            }
            Ok::<(), Failure>(())
        })?;
        self.answer(ask, logits)
    }

    fn embed(&mut self, batch: &Batch) -> Result<(), Failure> {
        let embedding = self.reader.table().layer(LayerId(0));
        let width = embedding.tensors[0].shape[1];
        let micro = batch.micro(Micro(0));
        let mut rows = model::HostBytes::zeroed(micro.ids.len() * width * 4);
        for (row, &id) in rows.f32s_mut().chunks_exact_mut(width).zip(&micro.ids) {
            let start = id as usize * width;
            let read = self.reader.weights(embedding.id, start..start + width)?;
            read.copy_f32(0, row);
        }
        let index = Arc::clone(&micro.index);
        let rows = Weights::F32(rows);
        self.compute(Command::Embed { rows, index, y: X }).map(|_| ())
    }

    fn visit(
        &mut self,
        weights: WeightsId,
        layer: LayerId,
        tile: &TileSpec,
        batch: &Batch,
        ask: &Ask<'_>,
        logits: &mut Vec<f32>,
    ) -> Result<(), Failure> {
        let head = self.reader.table().layer(layer).kind == LayerKind::Head;
        if !head {
            return self.decoder(weights, batch.shape());
        }
        if tile.vocabulary.is_empty() {
            self.compute(Command::HeadNorm { weights, x: X, h: Y })?;
            return Ok(());
        }
        match ask {
            Ask::Loss(labels) => {
                let labels = Arc::clone(labels);
                self.compute(Command::HeadScore {
                    weights,
                    h: Y,
                    labels,
                    stats: STATS,
                    keep: false,
                })?;
            }
            Ask::Logits { token } => {
                let command = Command::HeadLogits { weights, h: Y, token: *token };
                if let Outcome::Logits(part) = self.compute(command)? {
                    logits.extend(part);
                }
            }
        }
        Ok(())
    }

    fn decoder(&mut self, weights: WeightsId, shape: MicroShape) -> Result<(), Failure> {
        self.compute(Command::Forward { weights, shape, x: X, y: Y, keep: false })?;
        // The output takes the input's name for the next layer.
        self.compute(Command::Free { id: X })?;
        if let Outcome::Bytes(bytes) = self.compute(Command::Get { id: Y })? {
            self.compute(Command::Put { id: X, bytes })?;
        }
        Ok(())
    }

    fn answer(&mut self, ask: &Ask<'_>, logits: Vec<f32>) -> Result<Answer, Failure> {
        let answer = match ask {
            Ask::Loss(labels) => {
                let labels = Arc::clone(labels);
                let outcome = self.compute(Command::HeadLoss { stats: STATS, labels })?;
                let Outcome::Loss(sum) = outcome else { return Err(Failure::Lost) };
                Answer::Loss(sum)
            }
            Ask::Logits { .. } => Answer::Logits(logits),
        };
        self.compute(Command::Clear)?;
        Ok(answer)
    }

    fn compute(&mut self, command: Command) -> Result<Outcome, Failure> {
        Ok(self.device.run(command)?)
    }
}

enum Answer {
    Loss(f64),
    Logits(Vec<f32>),
}
