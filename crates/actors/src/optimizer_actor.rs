//! [`OptimizerActor`]: keeps gradients until they are applied, then runs AdamW chunk by chunk.
//!
//! Invariants:
//! - at most `chunks_in_flight` chunks are read, computed and written at once, over all layers;
//! - layers are updated in the order of their requests;
//! - arithmetic runs on the shared thread pool, never on the actor's own task.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use compute::Gradient;
use kameo::prelude::*;
use model::{Attempt, Budget, CHUNK_ELEMENTS, LayerId, LayerTable};
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
mod rate;
mod shadow;

use chunk::{GradientPart, Rule};
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
    /// Measured, not yet applied.
    gradients: BTreeMap<(Attempt, LayerId), Held>,
    /// Chunks that wait for their state or their gradient.
    halves: BTreeMap<(Attempt, LayerId, usize), Half>,
    jobs: VecDeque<Progress>,
    /// Chunks between the start of their read and the end of their write.
    in_flight: usize,
}

/// Where a measured gradient waits.
enum Held {
    Ram(Arc<Gradient>),
    Spilled,
}

/// What a chunk is computed from, as far as it has arrived.
struct Half {
    state: Option<StateChunk>,
    gradient: Option<GradientPart>,
}

/// A layer on its way.
struct Progress {
    job: UpdateJob,
    gradient: Held,
    chunks: usize,
    next: usize,
    written: usize,
    /// Squares of the new weights by chunk.
    weights: Vec<NormTree>,
    reply: Option<Reply<UpdatedLayer>>,
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
            gradients: BTreeMap::new(),
            halves: BTreeMap::new(),
            jobs: VecDeque::new(),
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
            OptimizerMessage::Measure { attempt, layer, gradient, spill, reply } => {
                let reply = watch.over(lane, reply);
                self.measure(attempt, layer, gradient, spill, reply);
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
        attempt: Attempt,
        layer: LayerId,
        gradient: Gradient,
        spill: bool,
        reply: Reply<f64>,
    ) {
        let passage = self.args.gate.enter();
        if spill {
            self.gradients.insert((attempt, layer), Held::Spilled);
            let (directory, start) = (self.args.directory.clone(), self.args.map.gradient(layer));
            self.args.threads.spawn(move || {
                spill_gradient(&directory, start, gradient, reply);
                drop(passage);
            });
            return;
        }
        let gradient = Arc::new(gradient);
        self.gradients.insert((attempt, layer), Held::Ram(Arc::clone(&gradient)));
        self.args.threads.spawn(move || {
            reply.send(Ok(chunk::sum_of_squares(&gradient)));
            drop(passage);
        });
    }

    fn enqueue(&mut self, job: UpdateJob, reply: Reply<UpdatedLayer>) {
        let Some(gradient) = self.gradients.remove(&(job.attempt, job.layer)) else {
            // It died with the incarnation before; the attempt ends.
            return reply.send(Err(Failure::Lost));
        };
        let elements = self.args.table.layer(job.layer).elements();
        let chunks = elements.div_ceil(CHUNK_ELEMENTS);
        let weights = vec![NormTree::new(); if self.args.weigh { chunks } else { 0 }];
        let reply = Some(reply);
        let (next, written) = (0, 0);
        self.jobs.push_back(Progress { job, gradient, chunks, next, written, weights, reply });
    }

    /// Starts reads while chunks are free.
    fn advance(&mut self) {
        while self.in_flight < self.args.chunks_in_flight {
            let Some(progress) = self.jobs.iter_mut().find(|p| p.next < p.chunks) else { break };
            let (job, chunk) = (progress.job, progress.next);
            let gradient = match &progress.gradient {
                Held::Ram(gradient) => Some(GradientPart::Whole(Arc::clone(gradient))),
                Held::Spilled => None,
            };
            progress.next += 1;
            self.in_flight += 1;
            self.start_chunk(job, chunk, gradient);
        }
    }

    /// `gradient`: `None` if it has to be read back.
    fn start_chunk(&mut self, job: UpdateJob, chunk: usize, gradient: Option<GradientPart>) {
        if gradient.is_none() {
            self.read_gradient(job, chunk);
        }
        let half = Half { state: None, gradient };
        self.halves.insert((job.attempt, job.layer, chunk), half);
        let directory = self.args.directory.clone();
        let reply = Reply::new(move |result| {
            directory.optimizer().post(OptimizerMessage::ChunkRead { job, chunk, result });
        });
        let (layer, slot) = (job.layer, job.from);
        self.args.directory.store().post(StoreRequest::ReadChunk { layer, slot, chunk, reply });
    }

    fn read_gradient(&self, job: UpdateJob, chunk: usize) {
        let directory = self.args.directory.clone();
        let reply = Reply::new(move |result| {
            directory.optimizer().post(OptimizerMessage::GradientRead { job, chunk, result });
        });
        let elements = self.args.store.chunk_elements(job.layer, chunk);
        let start = self.args.map.gradient(job.layer) + elements.start as u64 * 4;
        let len = elements.len() * 4;
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
        let key = (job.attempt, job.layer, chunk);
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
        let progress = &mut self.jobs[at];
        if let Some(weights) = weights {
            progress.weights[chunk] = *weights;
        }
        progress.written += 1;
        if progress.written < progress.chunks {
            return;
        }
        let Some(Progress { weights, reply: Some(reply), .. }) = self.jobs.remove(at) else {
            return;
        };
        let (layer, slot) = (job.layer, job.to);
        let drift = self.args.shadow.drift(layer);
        let reply = Reply::new(move |result: Result<_, Failure>| {
            let whole = |hashes| UpdatedLayer { hashes, weights: chunk::join(&weights), drift };
            reply.send(result.map(whole));
        });
        self.args.directory.store().post(StoreRequest::FinishLayer { layer, slot, reply });
    }

    fn position(&self, job: UpdateJob) -> Option<usize> {
        self.jobs.iter().position(|p| (p.job.attempt, p.job.layer) == (job.attempt, job.layer))
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
        self.gradients.clear();
        self.halves.clear();
        self.in_flight = 0;
        self.args.gate.when_empty(reply);
    }
}

/// Runs on the pool: measures a gradient and hands it to the disk.
fn spill_gradient(directory: &Directory, start: u64, gradient: Gradient, reply: Reply<f64>) {
    let sum = chunk::sum_of_squares(&gradient);
    let Gradient::Dense(bytes) = gradient else {
        panic!("rows of an embedding's gradient are never spilled")
    };
    let reply = Reply::new(move |result: Result<(), Failure>| reply.send(result.map(|()| sum)));
    directory.store().post(StoreRequest::WriteScratch { start, bytes, reply });
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
    let layer = args.table.layer(job.layer);
    let UpdateJob { prepared, t, rounding, .. } = job;
    let rule = Rule { prepared, t, shadow: &args.shadow, rounding, weigh: args.weigh };
    let updated = chunk::update(layer, chunk, &rule, &state, &gradient, &args.budget);
    drop((state, gradient));
    let result = updated.and_then(|output| {
        // What was read damaged comes to anything: that is to be told first.
        args.store.check_chunk(job.layer, job.from, chunk, output.read_hashes)?;
        let refused = || Failure::Update { step: job.step.0, layer: layer.name.clone() };
        if output.finite { Ok(output) } else { Err(refused()) }
    });
    match result {
        Ok(chunk::ChunkOutput { bytes, hashes, weights, .. }) => {
            let (layer, slot) = (job.layer, job.to);
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
