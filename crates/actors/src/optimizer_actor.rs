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
use model::{Attempt, Budget, CHUNK_BYTES, CHUNK_ELEMENTS, LayerId, LayerTable, PieceId};
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
use pieces::{Pieces, Section};
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
    /// Chunks that wait for their state or their gradient.
    halves: BTreeMap<(Attempt, LayerId, usize), Half>,
    jobs: VecDeque<Progress>,
    /// Layers that are being written.
    layers: BTreeMap<(Attempt, LayerId), Written>,
    /// Chunks between the start of their read and the end of their write.
    in_flight: usize,
}

/// A chunk whose gradient is there: in RAM, or else in `scratch/`.
struct Held {
    chunk: usize,
    gradient: Option<Arc<Gradient>>,
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
    chunks: usize,
    /// Squares of the new weights by chunk.
    weights: Vec<NormTree>,
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
                let keep = |bytes| GradientPart::Read(bytes);
                self.arrived(job, chunk, result, |half, b| half.gradient = Some(keep(b)));
            }
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
        let layer = (attempt, piece.layer, self.args.table.layer(piece.layer).elements());
        let (sections, norms) = match self.pieces.cut(layer, elements, gradient, &self.args.budget)
        {
            Ok(cut) => cut,
            Err(error) => return reply.send(Err(error.into())),
        };
        let keep = |section: &Section| (!spill).then(|| Arc::clone(&section.gradient));
        let chunks = |section: &Section| {
            let gradient = keep(section);
            let held = move |chunk| Held { chunk, gradient: gradient.clone() };
            section.chunks.clone().map(held).collect::<Vec<_>>()
        };
        let held = sections.iter().flat_map(chunks).collect();
        self.gradients.insert((attempt, piece), held);
        let passage = self.args.gate.enter();
        let (directory, start) = (self.args.directory.clone(), self.args.map.gradient(piece.layer));
        self.args.threads.spawn(move || {
            let sums = sections.iter().map(|section| norms.measure(section));
            // Whoever measures the layer's last section knows its sum.
            let sum = sums.fold(None, Option::or);
            if spill {
                spill_sections(&directory, start, sections, sum, reply);
            } else {
                reply.send(Ok(sum));
            }
            drop(passage);
        });
    }

    fn enqueue(&mut self, job: UpdateJob, reply: Reply<Option<UpdatedLayer>>) {
        let Some(waiting) = self.gradients.remove(&(job.attempt, job.piece)) else {
            // It died with the incarnation before; the attempt ends.
            return reply.send(Err(Failure::Lost));
        };
        if waiting.is_empty() {
            // All of it lies in a chunk that belongs to a lower piece.
            return reply.send(Ok(None));
        }
        let left = waiting.len();
        self.jobs.push_back(Progress { job, waiting, left, reply: Some(reply) });
    }

    /// Starts reads while chunks are free.
    fn advance(&mut self) {
        while self.in_flight < self.args.chunks_in_flight {
            let next = |p: &mut Progress| Some((p.job, p.waiting.pop_front()?));
            let Some((job, Held { chunk, gradient })) = self.jobs.iter_mut().find_map(next) else {
                break;
            };
            self.in_flight += 1;
            self.start_chunk(job, chunk, gradient.map(GradientPart::Whole));
        }
    }

    /// `gradient`: `None` if it has to be read back.
    fn start_chunk(&mut self, job: UpdateJob, chunk: usize, gradient: Option<GradientPart>) {
        if gradient.is_none() {
            self.read_gradient(job, chunk);
        }
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
        let layer = job.piece.layer;
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
        let layer = self.written_to(job, chunk, weights);
        self.jobs[at].left -= 1;
        if self.jobs[at].left > 0 {
            return;
        }
        let Some(Progress { reply: Some(reply), .. }) = self.jobs.remove(at) else { return };
        match layer {
            None => reply.send(Ok(None)),
            Some(weights) => self.finish(job, weights, reply),
        }
    }

    /// The square sum of the layer's new weights once all its chunks are written, zero if nobody
    /// asked.
    fn written_to(&mut self, job: UpdateJob, chunk: usize, weights: ChunkWeights) -> Option<f64> {
        let layer = job.piece.layer;
        let chunks = self.args.store.chunks(layer);
        let trees = vec![NormTree::new(); if self.args.weigh { chunks } else { 0 }];
        let key = (job.attempt, layer);
        let fresh = Written { chunks: 0, weights: trees };
        let written = self.layers.entry(key).or_insert(fresh);
        written.chunks += 1;
        if let Some(weights) = weights {
            written.weights[chunk] = *weights;
        }
        if written.chunks < chunks {
            return None;
        }
        self.layers.remove(&key).map(|written| chunk::join(&written.weights))
    }

    fn finish(&self, job: UpdateJob, weights: f64, reply: Reply<Option<UpdatedLayer>>) {
        let (layer, slot) = (job.piece.layer, job.to);
        let drift = self.args.shadow.drift(layer);
        let reply = Reply::new(move |result: Result<_, Failure>| {
            let whole = |hashes| Some(UpdatedLayer { hashes, weights, drift });
            reply.send(result.map(whole));
        });
        self.args.directory.store().post(StoreRequest::FinishLayer { layer, slot, reply });
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
        self.halves.clear();
        self.in_flight = 0;
        self.args.gate.when_empty(reply);
    }
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
            let request = StoreRequest::WriteChunk { layer, slot, chunk, bytes, hashes, reply };
            args.directory.store().post(request);
        }
        Err(failure) => reply.send(Err(failure)),
    }
}
