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
use model::{Attempt, Budget, LayerId, LayerTable};
use rayon::ThreadPool;
use store::{StateChunk, TrainingStore};

use crate::directory::Directory;
use crate::fault::FaultPlan;
use crate::gate::Gate;
use crate::messages::{OptimizerMessage, StoreRequest, UpdateJob};
use crate::reply::{Failure, Reply};

mod chunk;

#[derive(Clone)]
pub(crate) struct OptimizerArgs {
    pub(crate) directory: Directory,
    pub(crate) table: Arc<LayerTable>,
    /// Only asked to compare a chunk with its hash, which it has in memory.
    pub(crate) store: Arc<TrainingStore>,
    pub(crate) budget: Budget,
    pub(crate) threads: Arc<ThreadPool>,
    pub(crate) chunks_in_flight: usize,
    /// Arithmetic on the pool, which outlives the actor.
    pub(crate) gate: Gate,
    pub(crate) faults: FaultPlan,
}

pub(crate) struct OptimizerActor {
    args: OptimizerArgs,
    gradients: BTreeMap<(Attempt, LayerId), Arc<Gradient>>,
    jobs: VecDeque<Progress>,
    /// Chunks between the start of their read and the end of their write.
    in_flight: usize,
}

/// A layer on its way.
struct Progress {
    job: UpdateJob,
    chunks: usize,
    next: usize,
    written: usize,
    reply: Option<Reply<[u64; 3]>>,
}

impl Actor for OptimizerActor {
    type Args = OptimizerArgs;
    type Error = kameo::error::Infallible;

    fn name() -> &'static str {
        "optimizer"
    }

    async fn on_start(args: OptimizerArgs, _: ActorRef<Self>) -> Result<Self, Self::Error> {
        Ok(OptimizerActor { args, gradients: BTreeMap::new(), jobs: VecDeque::new(), in_flight: 0 })
    }
}

impl Message<OptimizerMessage> for OptimizerActor {
    type Reply = ();

    async fn handle(&mut self, message: OptimizerMessage, _: &mut Context<Self, ()>) {
        self.args.faults.message("optimizer");
        match message {
            OptimizerMessage::Measure { attempt, layer, gradient, reply } => {
                self.measure(attempt, layer, gradient, reply);
            }
            OptimizerMessage::Update { job, reply } => self.enqueue(job, reply),
            OptimizerMessage::ChunkRead { job, chunk, result } => self.read(job, chunk, result),
            OptimizerMessage::ChunkWritten { job, result } => self.written(job, result),
            OptimizerMessage::Drain { reply } => self.drain(reply),
        }
        self.advance();
    }
}

impl OptimizerActor {
    fn measure(&mut self, attempt: Attempt, layer: LayerId, gradient: Gradient, reply: Reply<f64>) {
        let gradient = Arc::new(gradient);
        self.gradients.insert((attempt, layer), Arc::clone(&gradient));
        let passage = self.args.gate.enter();
        self.args.threads.spawn(move || {
            reply.send(Ok(chunk::sum_of_squares(&gradient)));
            drop(passage);
        });
    }

    fn enqueue(&mut self, job: UpdateJob, reply: Reply<[u64; 3]>) {
        let elements = self.args.table.layer(job.layer).elements();
        let chunks = elements.div_ceil(chunk::ELEMENTS);
        self.jobs.push_back(Progress { job, chunks, next: 0, written: 0, reply: Some(reply) });
    }

    /// Starts reads while chunks are free.
    fn advance(&mut self) {
        while self.in_flight < self.args.chunks_in_flight {
            let Some(progress) = self.jobs.iter_mut().find(|p| p.next < p.chunks) else { break };
            let (job, chunk) = (progress.job, progress.next);
            progress.next += 1;
            self.in_flight += 1;
            let directory = self.args.directory.clone();
            let reply = Reply::new(move |result| {
                directory.optimizer().post(OptimizerMessage::ChunkRead { job, chunk, result });
            });
            let (layer, slot) = (job.layer, job.from);
            self.args.directory.store().post(StoreRequest::ReadChunk { layer, slot, chunk, reply });
        }
    }

    fn read(&mut self, job: UpdateJob, chunk: usize, result: Result<StateChunk, Failure>) {
        let Some(gradient) = self.gradients.get(&(job.attempt, job.layer)).cloned() else {
            return;
        };
        let state = match result {
            Ok(state) => state,
            Err(failure) => return self.fail(job, failure),
        };
        let args = self.args.clone();
        let passage = self.args.gate.enter();
        self.args.threads.spawn(move || {
            compute_and_write(&args, job, chunk, state, gradient);
            drop(passage);
        });
    }

    fn written(&mut self, job: UpdateJob, result: Result<(), Failure>) {
        if !self.is_current(job) {
            return;
        }
        if let Err(failure) = result {
            return self.fail(job, failure);
        }
        self.in_flight -= 1;
        let Some(at) = self.position(job) else { return };
        self.jobs[at].written += 1;
        if self.jobs[at].written < self.jobs[at].chunks {
            return;
        }
        let finished = self.jobs.remove(at);
        self.gradients.remove(&(job.attempt, job.layer));
        if let Some(reply) = finished.and_then(|p| p.reply) {
            let (layer, slot) = (job.layer, job.to);
            self.args.directory.store().post(StoreRequest::FinishLayer { layer, slot, reply });
        }
    }

    fn position(&self, job: UpdateJob) -> Option<usize> {
        self.jobs.iter().position(|p| (p.job.attempt, p.job.layer) == (job.attempt, job.layer))
    }

    /// False for answers that belong to a dropped attempt.
    fn is_current(&self, job: UpdateJob) -> bool {
        self.position(job).is_some()
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
        self.in_flight = 0;
        self.args.gate.when_empty(reply);
    }
}

/// Runs on the pool: the new state goes straight to the store, the actor hears of the write.
fn compute_and_write(
    args: &OptimizerArgs,
    job: UpdateJob,
    chunk: usize,
    state: StateChunk,
    gradient: Arc<Gradient>,
) {
    let directory = args.directory.clone();
    let reply = Reply::new(move |result| {
        directory.optimizer().post(OptimizerMessage::ChunkWritten { job, result });
    });
    // The bytes are hashed right before they are computed on, while they are in cache.
    let checked = args.store.check_chunk(job.layer, job.from, chunk, &state);
    let layer = args.table.layer(job.layer);
    let result = checked
        .map_err(Failure::from)
        .and_then(|()| chunk::update(layer, chunk, &job.prepared, &state, &gradient, &args.budget));
    drop((state, gradient));
    match result {
        Ok(chunk::ChunkOutput { bytes, hashes }) => {
            let (layer, slot) = (job.layer, job.to);
            let request = StoreRequest::WriteChunk { layer, slot, chunk, bytes, hashes, reply };
            args.directory.store().post(request);
        }
        Err(failure) => reply.send(Err(failure)),
    }
}
