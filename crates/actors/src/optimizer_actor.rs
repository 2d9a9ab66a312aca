//! [`OptimizerActor`]: keeps gradients until they are applied, then runs AdamW chunk by chunk.
//!
//! Invariants:
//! - at most `chunks_in_flight` chunks are read, computed and written at once, over all layers;
//! - pieces are updated in the order of their requests;
//! - arithmetic runs on the shared thread pool, never on the actor's own task.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use compute::Gradient;
use kameo::prelude::*;
use model::{
    Attempt, Budget, CHUNK_BYTES, CHUNK_ELEMENTS, HostBytes, LayerId, LayerTable, PieceId,
};
use optim::NormTree;
use rayon::ThreadPool;
use store::{StateChunk, TrainingStore};

use crate::directory::Directory;
use crate::fault::{Delivery, FaultPlan};
use crate::gate::Gate;
use crate::messages::{ChunkWeights, OptimizerMessage, StoreRequest, UpdateJob, UpdatedLayer};
use crate::reply::{Failure, Reply};
use crate::scratch::ScratchMap;
use crate::watch::Watch;

mod chunk;
mod pieces;
mod rate;
mod shadow;

use chunk::{GradientPart, Rule};
use pieces::{Norms, Pieces, Section};
pub use rate::optimizer_rate;
pub use shadow::Shadow;

#[derive(Clone)]
pub(crate) struct OptimizerArgs {
    pub(crate) directory: Directory,
    pub(crate) table: Arc<LayerTable>,
    /// Only asked to compare a chunk with its hash, which it has in memory.
    pub(crate) store: Arc<TrainingStore>,
    pub(crate) budget: Budget,
    pub(crate) threads: Arc<ThreadPool>,
    pub(crate) map: Arc<ScratchMap>,
    pub(crate) chunks_in_flight: usize,
    /// New weights are square-summed.
    pub(crate) weigh: bool,
    /// Outlives the actor: its next incarnation goes on with it.
    pub(crate) shadow: Arc<Shadow>,
    /// Arithmetic on the pool, which outlives the actor.
    pub(crate) gate: Gate,
    pub(crate) watch: Watch,
    pub(crate) faults: FaultPlan,
}

pub(crate) struct OptimizerActor {
    args: OptimizerArgs,
    pieces: Pieces,
    /// Taken over, not yet applied: the chunks of each piece.
    gradients: BTreeMap<(Attempt, PieceId), VecDeque<Held>>,
    /// Rows of an embedding's gradient that tokens touched.
    rows: BTreeMap<Attempt, Arc<Gradient>>,
    summing: Option<Summing>,
    /// Chunks that wait for their state or their gradient.
    halves: BTreeMap<(Attempt, LayerId, usize), Half>,
    jobs: VecDeque<Progress>,
    /// Layers that are being written.
    layers: BTreeMap<(Attempt, LayerId), Written>,
    /// Chunks between the start of their read and the end of their write.
    in_flight: usize,
}

/// A chunk whose gradient is there.
#[derive(Clone)]
struct Held {
    chunk: usize,
    dense: Dense,
}

/// Where the values of a chunk's parameters are, beside rows.
#[derive(Clone)]
enum Dense {
    None,
    Ram(Arc<Gradient>),
    Spilled,
}

/// An embedding that is tied, while its gradient is measured with the rows that add to it.
struct Summing {
    attempt: Attempt,
    waiting: VecDeque<Held>,
    /// Chunks that are not measured.
    left: usize,
    norms: Arc<Norms>,
    /// Of the whole layer, once its last chunk is measured; answers may come in another order.
    sum: Option<f64>,
    reply: Option<Reply<Option<f64>>>,
}

/// What a chunk is computed from, as far as it has arrived.
struct Half {
    state: Option<StateChunk>,
    gradient: Option<GradientPart>,
}

/// A piece on its way.
struct Progress {
    job: UpdateJob,
    waiting: VecDeque<Held>,
    /// Chunks that are not written.
    left: usize,
    reply: Option<Reply<Option<UpdatedLayer>>>,
}

/// How far a layer is.
struct Written {
    /// Squares of the new weights by chunk.
    weights: Vec<NormTree>,
    pieces: usize,
    /// Rows that other pieces are added to, until those are written.
    rows: Option<Reply<Option<UpdatedLayer>>>,
}

impl Actor for OptimizerActor {
    type Args = OptimizerArgs;
    type Error = kameo::error::Infallible;

    fn name() -> &'static str {
        "optimizer"
    }

    async fn on_start(args: OptimizerArgs, _: ActorRef<Self>) -> Result<Self, Self::Error> {
        Ok(OptimizerActor {
            args,
            pieces: Pieces::default(),
            gradients: BTreeMap::new(),
            rows: BTreeMap::new(),
            summing: None,
            halves: BTreeMap::new(),
            jobs: VecDeque::new(),
            layers: BTreeMap::new(),
            in_flight: 0,
        })
    }
}

impl Message<OptimizerMessage> for OptimizerActor {
    type Reply = ();

    async fn handle(&mut self, message: OptimizerMessage, _: &mut Context<Self, ()>) {
        if self.args.faults.message("optimizer", message.kind()).await == Delivery::Lost {
            return;
        }
        let lane = ("optimizer", message.kind());
        let watch = self.args.watch.clone();
        match message {
            OptimizerMessage::Measure { attempt, piece, elements, gradient, spill, reply } => {
                let reply = watch.over(lane, reply);
                self.measure((attempt, piece), elements, gradient, spill, reply);
            }
            OptimizerMessage::Update { job, reply } => self.enqueue(job, watch.over(lane, reply)),
            OptimizerMessage::ChunkRead { job, chunk, result } => {
                self.arrived(job, chunk, result, |half, state| half.state = Some(state));
            }
            OptimizerMessage::GradientRead { job, chunk, result } => {
                let rows = self.rows_of(job.attempt, job.piece.layer);
                let keep = |bytes| GradientPart { dense: Some(read_back(chunk, bytes)), rows };
                self.arrived(job, chunk, result, |half, b| half.gradient = Some(keep(b)));
            }
            OptimizerMessage::SpilledRead { attempt, chunk, result } => {
                self.spilled_read(attempt, chunk, result);
            }
            OptimizerMessage::Summed { attempt, sum } => self.summed(attempt, sum),
            OptimizerMessage::ChunkWritten { job, chunk, result } => {
                self.written(job, chunk, result);
            }
            OptimizerMessage::Drain { reply } => self.drain(watch.over(lane, reply)),
        }
        self.advance();
    }
}

impl OptimizerActor {
    fn measure(
        &mut self,
        (attempt, piece): (Attempt, PieceId),
        elements: Range<usize>,
        gradient: Gradient,
        spill: bool,
        reply: Reply<Option<f64>>,
    ) {
        let Gradient::Dense { first, values } = gradient else {
            return self.measure_rows((attempt, piece), Arc::new(gradient), reply);
        };
        let layer = (attempt, piece.layer, self.args.table.layer(piece.layer).elements());
        let cut = self.pieces.cut(layer, elements, (first, values), &self.args.budget);
        let (sections, norms) = match cut {
            Ok(cut) => cut,
            Err(error) => return reply.send(Err(error.into())),
        };
        let held = |section: &Section| {
            let dense = match spill {
                true => Dense::Spilled,
                false => Dense::Ram(Arc::clone(&section.gradient)),
            };
            let held = move |chunk| Held { chunk, dense: dense.clone() };
            section.chunks.clone().map(held).collect::<Vec<_>>()
        };
        self.gradients.insert((attempt, piece), sections.iter().flat_map(held).collect());
        let measured_now = piece.layer != self.args.table.embedding();
        let passage = self.args.gate.enter();
        let (directory, start) = (self.args.directory.clone(), self.args.map.gradient(piece.layer));
        self.args.threads.spawn(move || {
            let now = sections.iter().filter(|_| measured_now);
            // Whoever measures the layer's last section knows its sum.
            let sum = now.map(|section| norms.measure(section)).fold(None, Option::or);
            if spill {
                spill_sections(&directory, start, sections, sum, reply);
            } else {
                reply.send(Ok(sum));
            }
            drop(passage);
        });
    }

    /// Rows are the embedding's last piece, and add to the others where it has any.
    fn measure_rows(
        &mut self,
        (attempt, piece): (Attempt, PieceId),
        rows: Arc<Gradient>,
        reply: Reply<Option<f64>>,
    ) {
        self.rows.insert(attempt, Arc::clone(&rows));
        let others = (0..piece.part).map(|part| (attempt, PieceId { part, ..piece }));
        let others: Option<Vec<_>> = others.map(|key| self.gradients.get(&key)).collect();
        let Some(others) = others else { return reply.send(Err(Failure::Lost)) };
        let waiting: VecDeque<Held> = others.into_iter().flatten().cloned().collect();
        let elements = self.args.table.layer(piece.layer).elements();
        if piece.part > 0 {
            self.gradients.insert((attempt, piece), VecDeque::new());
            let (norms, reply) = (Arc::new(Norms::new(elements)), Some(reply));
            let (left, sum) = (waiting.len(), None);
            self.summing = Some(Summing { attempt, waiting, left, norms, sum, reply });
            return;
        }
        let all = (0..self.args.store.chunks(piece.layer))
            .map(|chunk| Held { chunk, dense: Dense::None });
        self.gradients.insert((attempt, piece), all.collect());
        let passage = self.args.gate.enter();
        self.args.threads.spawn(move || {
            reply.send(Ok(Some(chunk::sum_of_rows(&rows))));
            drop(passage);
        });
    }

    fn enqueue(&mut self, job: UpdateJob, reply: Reply<Option<UpdatedLayer>>) {
        let Some(waiting) = self.gradients.remove(&(job.attempt, job.piece)) else {
            // It died with the incarnation before; the attempt ends.
            return reply.send(Err(Failure::Lost));
        };
        let left = waiting.len();
        if left == 0 {
            // Its chunks belong to other pieces.
            return self.done(job, reply);
        }
        self.jobs.push_back(Progress { job, waiting, left, reply: Some(reply) });
    }

    /// Starts reads while chunks are free; measuring, which holds the norm up, goes first.
    fn advance(&mut self) {
        while self.in_flight < self.args.chunks_in_flight {
            if let Some((attempt, held)) = self.next_sum() {
                self.in_flight += 1;
                self.start_sum(attempt, held);
                continue;
            }
            let next = |p: &mut Progress| Some((p.job, p.waiting.pop_front()?));
            let Some((job, held)) = self.jobs.iter_mut().find_map(next) else { break };
            self.in_flight += 1;
            self.start_chunk(job, held);
        }
    }

    fn next_sum(&mut self) -> Option<(Attempt, Held)> {
        let summing = self.summing.as_mut()?;
        Some((summing.attempt, summing.waiting.pop_front()?))
    }

    fn start_sum(&mut self, attempt: Attempt, Held { chunk, dense }: Held) {
        let layer = self.args.table.embedding();
        if let Dense::Ram(dense) = dense {
            return self.sum(attempt, chunk, dense);
        }
        let directory = self.args.directory.clone();
        let reply = Reply::new(move |result| {
            let read = OptimizerMessage::SpilledRead { attempt, chunk, result };
            directory.optimizer().post(read);
        });
        self.read_scratch(layer, chunk, reply);
    }

    fn spilled_read(&mut self, attempt: Attempt, chunk: usize, result: Result<HostBytes, Failure>) {
        let Some(summing) = self.summing.as_mut().filter(|s| s.attempt == attempt) else { return };
        match result {
            Ok(bytes) => self.sum(attempt, chunk, read_back(chunk, bytes)),
            // The abort that follows clears the rest.
            Err(failure) => {
                if let Some(reply) = summing.reply.take() {
                    reply.send(Err(failure));
                }
            }
        }
    }

    /// Measures a chunk with its rows on the pool.
    fn sum(&mut self, attempt: Attempt, chunk: usize, dense: Arc<Gradient>) {
        let Some(summing) = self.summing.as_ref().filter(|s| s.attempt == attempt) else { return };
        let (norms, directory) = (Arc::clone(&summing.norms), self.args.directory.clone());
        let rows = self.rows_of(attempt, self.args.table.embedding());
        let passage = self.args.gate.enter();
        self.args.threads.spawn(move || {
            let part = GradientPart { dense: Some(dense), rows };
            let sum = norms.measure_chunk(chunk, &part);
            drop(part);
            directory.optimizer().post(OptimizerMessage::Summed { attempt, sum });
            drop(passage);
        });
    }

    fn summed(&mut self, attempt: Attempt, sum: Option<f64>) {
        let Some(summing) = self.summing.as_mut().filter(|s| s.attempt == attempt) else { return };
        self.in_flight -= 1;
        summing.left -= 1;
        summing.sum = summing.sum.or(sum);
        if summing.left == 0 {
            let sum = summing.sum;
            if let Some(reply) = summing.reply.take() {
                reply.send(Ok(sum));
            }
            self.summing = None;
        }
    }

    fn rows_of(&self, attempt: Attempt, layer: LayerId) -> Option<Arc<Gradient>> {
        let rows = self.rows.get(&attempt).filter(|_| layer == self.args.table.embedding());
        rows.map(Arc::clone)
    }

    fn start_chunk(&mut self, job: UpdateJob, Held { chunk, dense }: Held) {
        let rows = self.rows_of(job.attempt, job.piece.layer);
        let gradient = match dense {
            Dense::None => Some(GradientPart { dense: None, rows }),
            Dense::Ram(dense) => Some(GradientPart { dense: Some(dense), rows }),
            Dense::Spilled => {
                self.read_gradient(job, chunk);
                None
            }
        };
        let half = Half { state: None, gradient };
        self.halves.insert((job.attempt, job.piece.layer, chunk), half);
        let directory = self.args.directory.clone();
        let reply = Reply::new(move |result| {
            directory.optimizer().post(OptimizerMessage::ChunkRead { job, chunk, result });
        });
        let (layer, slot) = (job.piece.layer, job.from);
        self.args.directory.store().post(StoreRequest::ReadChunk { layer, slot, chunk, reply });
    }

    fn read_gradient(&self, job: UpdateJob, chunk: usize) {
        let directory = self.args.directory.clone();
        let reply = Reply::new(move |result| {
            directory.optimizer().post(OptimizerMessage::GradientRead { job, chunk, result });
        });
        self.read_scratch(job.piece.layer, chunk, reply);
    }

    fn read_scratch(&self, layer: LayerId, chunk: usize, reply: Reply<HostBytes>) {
        let start = self.args.map.gradient(layer) + (chunk * CHUNK_BYTES) as u64;
        let len = self.args.store.chunk_elements(layer, chunk).len() * 4;
        self.args.directory.store().post(StoreRequest::ReadScratch { start, len, reply });
    }

    /// One of the two halves of a chunk; with both, it is computed and written on the pool.
    fn arrived<T>(
        &mut self,
        job: UpdateJob,
        chunk: usize,
        result: Result<T, Failure>,
        keep: impl FnOnce(&mut Half, T),
    ) {
        let key = (job.attempt, job.piece.layer, chunk);
        let Some(half) = self.halves.get_mut(&key) else { return };
        match result {
            Ok(value) => keep(half, value),
            Err(failure) => return self.fail(job, failure),
        }
        if half.state.is_none() || half.gradient.is_none() {
            return;
        }
        let Some(Half { state: Some(state), gradient: Some(gradient) }) = self.halves.remove(&key)
        else {
            return;
        };
        let args = self.args.clone();
        let passage = self.args.gate.enter();
        self.args.threads.spawn(move || {
            compute_and_write(&args, job, chunk, state, gradient);
            drop(passage);
        });
    }

    fn written(&mut self, job: UpdateJob, chunk: usize, result: Result<ChunkWeights, Failure>) {
        // Answers may belong to a dropped attempt.
        let Some(at) = self.position(job) else { return };
        let weights = match result {
            Ok(weights) => weights,
            Err(failure) => return self.fail(job, failure),
        };
        self.in_flight -= 1;
        if let Some(weights) = weights {
            self.layer(job).weights[chunk] = *weights;
        }
        self.jobs[at].left -= 1;
        if self.jobs[at].left > 0 {
            return;
        }
        if let Some(Progress { reply: Some(reply), .. }) = self.jobs.remove(at) {
            self.done(job, reply);
        }
    }

    fn layer(&mut self, job: UpdateJob) -> &mut Written {
        let chunks = if self.args.weigh { self.args.store.chunks(job.piece.layer) } else { 0 };
        let weights = || vec![NormTree::new(); chunks];
        let fresh = || Written { pieces: 0, weights: weights(), rows: None };
        self.layers.entry((job.attempt, job.piece.layer)).or_insert_with(fresh)
    }

    /// A piece's chunks are written.
    fn done(&mut self, job: UpdateJob, reply: Reply<Option<UpdatedLayer>>) {
        let (layer, key) = (job.piece.layer, (job.attempt, job.piece.layer));
        let is_rows =
            layer == self.args.table.embedding() && job.piece.part as usize + 1 == job.pieces;
        let written = self.layer(job);
        written.pieces += 1;
        if written.pieces < job.pieces {
            match is_rows {
                true => written.rows = Some(reply),
                false => reply.send(Ok(None)),
            }
            return;
        }
        let Some(Written { weights, rows, .. }) = self.layers.remove(&key) else { return };
        if layer == self.args.table.embedding() {
            self.rows.remove(&job.attempt);
        }
        let reply = match rows {
            None => reply,
            Some(rows) => {
                reply.send(Ok(None));
                rows
            }
        };
        self.finish(job, chunk::join(&weights), reply);
    }

    fn finish(&self, job: UpdateJob, weights: f64, reply: Reply<Option<UpdatedLayer>>) {
        let (layer, slot, waits) = (job.piece.layer, job.to, job.again.waits);
        let drift = self.args.shadow.drift(layer);
        let reply = Reply::new(move |result: Result<_, Failure>| {
            let whole = |hashes| Some(UpdatedLayer { hashes, weights, drift });
            reply.send(result.map(whole));
        });
        self.args.directory.store().post(StoreRequest::FinishLayer { layer, slot, waits, reply });
    }

    fn position(&self, job: UpdateJob) -> Option<usize> {
        self.jobs.iter().position(|p| (p.job.attempt, p.job.piece) == (job.attempt, job.piece))
    }

    /// Tells whoever asked; the abort that follows clears the rest.
    fn fail(&mut self, job: UpdateJob, failure: Failure) {
        let at = self.position(job);
        if let Some(reply) = at.and_then(|at| self.jobs[at].reply.take()) {
            reply.send(Err(failure));
        }
    }

    fn drain(&mut self, reply: Reply<()>) {
        self.jobs.clear();
        self.layers.clear();
        self.pieces.clear();
        self.gradients.clear();
        self.rows.clear();
        self.summing = None;
        self.halves.clear();
        self.in_flight = 0;
        self.args.gate.when_empty(reply);
    }
}

/// A chunk's own gradient, read back from `scratch/`.
fn read_back(chunk: usize, values: HostBytes) -> Arc<Gradient> {
    Arc::new(Gradient::Dense { first: chunk * CHUNK_ELEMENTS, values })
}

/// Runs on the pool: hands sections to the disk; `sum` is the answer when all are written.
fn spill_sections(
    directory: &Directory,
    start: u64,
    sections: Vec<Section>,
    sum: Option<f64>,
    reply: Reply<Option<f64>>,
) {
    let replies = reply.after(sections.len(), sum);
    for (Section { chunks, gradient }, reply) in sections.into_iter().zip(replies) {
        let Ok(Gradient::Dense { first, values }) = Arc::try_unwrap(gradient) else {
            panic!("rows of an embedding's gradient are never spilled")
        };
        let from = (chunks.start * CHUNK_ELEMENTS - first) * 4;
        let range = from..values.len().min(from + chunks.len() * CHUNK_BYTES);
        let start = start + (chunks.start * CHUNK_BYTES) as u64;
        let bytes = Arc::new(values);
        directory.store().post(StoreRequest::WriteScratch { start, bytes, range, reply });
    }
}

/// Runs on the pool: the new state goes straight to the store, the actor hears of the write.
fn compute_and_write(
    args: &OptimizerArgs,
    job: UpdateJob,
    chunk: usize,
    state: StateChunk,
    gradient: GradientPart,
) {
    let directory = args.directory.clone();
    let reply = Reply::new(move |result| {
        directory.optimizer().post(OptimizerMessage::ChunkWritten { job, chunk, result });
    });
    let layer = args.table.layer(job.piece.layer);
    let UpdateJob { prepared, t, rounding, .. } = job;
    let rule = Rule { prepared, t, shadow: &args.shadow, rounding, weigh: args.weigh };
    let updated = chunk::update(layer, chunk, &rule, &state, &gradient, &args.budget);
    drop((state, gradient));
    let result = updated.and_then(|output| {
        // What was read damaged comes to anything: that is to be told first.
        args.store.check_chunk(layer.id, job.from, chunk, output.read_hashes)?;
        let refused = || Failure::Update { step: job.step.0, layer: layer.name.clone() };
        if output.finite { Ok(output) } else { Err(refused()) }
    });
    match result {
        Ok(chunk::ChunkOutput { bytes, hashes, weights, .. }) => {
            let (layer, slot) = (layer.id, job.to);
            let weights = weights.map(Box::new);
            let reply = Reply::new(move |result: Result<(), _>| {
                reply.send(result.map(|()| weights));
            });
            let again = job.again;
            let request =
                StoreRequest::WriteChunk { layer, slot, chunk, bytes, hashes, again, reply };
            args.directory.store().post(request);
        }
        Err(failure) => reply.send(Err(failure)),
    }
}
