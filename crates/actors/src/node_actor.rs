//! [`NodeActor`]: carries out what the node machine decides about this machine's layers.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use compute::{Command, Gradient, Outcome};
use kameo::prelude::*;
use model::{
    Attempt, HostBytes, LayerId, LayerTable, Micro, PieceId, Precision, Slot, Stage, Step, Weights,
};
use schedule::{
    Again, ComputeOp, FromNode, Node, NodeCommand, NodeConfig, NodeEvent, ToNode, VisitId, Written,
};
use store::{AfterUse, WrittenAgain};

use crate::Clip;
use crate::directory::Directory;
use crate::fault::FaultPlan;
use crate::messages::{
    ComputeRequest, Detail, DrainStage, LayerReport, NodeMessage, OptimizerMessage, RunMessage,
    StoreRequest, SweepSeconds, UpdateJob, UpdatedLayer, Work,
};
use crate::policy::{Verdict, judge};
use crate::reply::{Failure, Reply};
use crate::scratch::ScratchMap;

mod clock;
mod translate;

use clock::{DeviceClock, Load, StallClock};

/// How long a drain that was lost with its actor waits before it is asked for again.
const DRAIN_AGAIN: Duration = Duration::from_millis(20);

#[derive(Clone)]
pub(crate) struct NodeArgs {
    pub(crate) directory: Directory,
    pub(crate) table: Arc<LayerTable>,
    pub(crate) config: NodeConfig,
    pub(crate) map: Arc<ScratchMap>,
    /// Adam steps that each layer has behind it, in the last commit.
    pub(crate) adam_steps: Vec<u64>,
    /// How exactly the device wants weights.
    pub(crate) precision: Precision,
    /// The run's.
    pub(crate) seed: u64,
    pub(crate) faults: FaultPlan,
}

pub(crate) struct NodeActor {
    directory: Directory,
    model: translate::Model,
    node: Node,
    map: Arc<ScratchMap>,
    input_bytes: usize,
    /// Adam steps that each layer has behind it: after the last settled step, and in the last commit.
    adam_steps: Vec<u64>,
    committed_adam_steps: Vec<u64>,
    /// The attempt whose versions, and those of steps before it, are on their way to a commit.
    saving: Option<Attempt>,
    precision: Precision,
    seed: u64,
    /// What the attempts in flight compute with, and what they reported so far.
    works: BTreeMap<Attempt, InWork>,
    /// Embedding rows that wait for their lookup.
    rows: BTreeMap<Micro, Weights>,
    clock: StallClock,
    device: DeviceClock,
    load: Load,
    /// When the updates in flight began.
    updates: BTreeMap<PieceId, Instant>,
    faults: FaultPlan,
}

struct InWork {
    work: Work,
    /// By layer.
    locked: Arc<[bool]>,
    factor: f32,
    layers: Vec<LayerReport>,
    begun: Instant,
    forward_seconds: f64,
}

impl Actor for NodeActor {
    type Args = NodeArgs;
    type Error = kameo::error::Infallible;

    fn name() -> &'static str {
        "node"
    }

    async fn on_start(args: NodeArgs, _: ActorRef<Self>) -> Result<Self, Self::Error> {
        Ok(NodeActor {
            directory: args.directory,
            map: args.map,
            precision: args.precision,
            seed: args.seed,
            model: translate::Model::new(Arc::clone(&args.table), args.config.limits.tiling),
            input_bytes: args.config.limits.boundary_bytes,
            node: Node::new(&args.table, args.config),
            committed_adam_steps: args.adam_steps.clone(),
            adam_steps: args.adam_steps,
            saving: None,
            works: BTreeMap::new(),
            rows: BTreeMap::new(),
            clock: StallClock::new(Instant::now()),
            device: DeviceClock::new(Instant::now()),
            load: Load::default(),
            updates: BTreeMap::new(),
            faults: args.faults,
        })
    }
}

impl Message<NodeMessage> for NodeActor {
    type Reply = ();

    async fn handle(&mut self, message: NodeMessage, _: &mut Context<Self, ()>) {
        self.faults.message("node", message.kind()).await;
        self.clock.tick(Instant::now(), &self.load);
        if let Some(event) = self.take_in(message) {
            let commands = self.node.on(event);
            commands.into_iter().for_each(|command| self.carry_out(command));
        }
    }
}

impl NodeActor {
    /// From a message to what the machine hears; bytes are kept or passed on here.
    fn take_in(&mut self, message: NodeMessage) -> Option<NodeEvent> {
        match message {
            NodeMessage::Run { message, work, factor } => {
                Some(self.told_by_run(message, work, factor))
            }
            NodeMessage::Rows { attempt, micro, result } => {
                self.load.reads -= 1;
                let rows = self.accept(attempt, result)?;
                self.rows.insert(micro, rows);
                Some(NodeEvent::RowsReady { attempt, micro })
            }
            NodeMessage::Weights { attempt, visit, result } => {
                self.load.reads -= 1;
                let weights = self.accept(attempt, result)?;
                self.bind(attempt, visit, weights);
                Some(NodeEvent::Streamed { attempt, visit })
            }
            NodeMessage::Fetched { attempt, stage, micro, result } => {
                if let Outcome::Bytes(bytes) = self.accept(attempt, result)? {
                    self.write_input(attempt, stage, micro, bytes);
                }
                None
            }
            NodeMessage::Parked { attempt, stage, micro, result } => {
                self.accept(attempt, result)?;
                Some(NodeEvent::Parked { attempt, stage, micro })
            }
            NodeMessage::Unparked { attempt, stage, micro, result } => {
                self.load.reads -= 1;
                let bytes = self.accept(attempt, result)?;
                self.put_input(stage, micro, bytes);
                Some(NodeEvent::Unparked { attempt, stage, micro })
            }
            NodeMessage::Computed { attempt, op, result } => {
                self.load.computing -= 1;
                let seconds = self.device.finished(Instant::now());
                let outcome = self.accept(attempt, result)?;
                self.note_seconds(attempt, op, seconds);
                self.outcome(attempt, op, outcome)
            }
            NodeMessage::Unbound { attempt, visit, result } => {
                self.accept(attempt, result)?;
                Some(NodeEvent::Unbound { attempt, visit })
            }
            NodeMessage::Measured { attempt, piece, result } => {
                self.load.optimizing -= 1;
                let sum_of_squares = self.accept(attempt, result)?;
                if let Some(sum) = sum_of_squares {
                    self.note(attempt, piece.layer, |report| report.sum_of_squares = sum);
                }
                Some(NodeEvent::Measured { attempt, piece, sum_of_squares })
            }
            NodeMessage::Updated { attempt, piece, result } => {
                self.load.optimizing -= 1;
                let layer = self.accept(attempt, result)?;
                if let Some(begun) = self.updates.remove(&piece) {
                    let seconds = begun.elapsed().as_secs_f64();
                    self.note(attempt, piece.layer, |report| report.seconds.optimizer += seconds);
                }
                let whole = |UpdatedLayer { hashes, weights, drift }| {
                    self.note(attempt, piece.layer, |report| {
                        (report.hashes, report.drift) = (hashes, drift);
                    });
                    weights
                };
                let weights = layer.map(whole);
                Some(NodeEvent::Updated { attempt, piece, weights })
            }
            NodeMessage::Saved { attempt, result } => {
                self.load.syncing -= 1;
                self.accept(attempt, result)?;
                Some(NodeEvent::Saved { attempt })
            }
            NodeMessage::Drained { attempt, stage, result } => {
                self.drained(attempt, stage, result.is_ok())
            }
            NodeMessage::DrainAgain { attempt, stage } => {
                self.drain(attempt, stage);
                None
            }
        }
    }

    fn told_by_run(&mut self, message: ToNode, work: Option<Work>, factor: f32) -> NodeEvent {
        match message {
            ToNode::Begin { attempt, ref locked, .. } => {
                if let Some(work) = work {
                    let locked = Arc::clone(locked);
                    let layers = vec![LayerReport::default(); self.model.table.len()];
                    let (begun, forward_seconds) = (Instant::now(), 0.0);
                    let in_work = InWork { work, locked, factor, layers, begun, forward_seconds };
                    self.works.insert(attempt, in_work);
                }
            }
            ToNode::Apply { attempt, .. } => {
                if let Some(in_work) = self.works.get_mut(&attempt) {
                    in_work.factor = factor;
                }
            }
            ToNode::Settled { attempt, .. } => self.settle(attempt),
            ToNode::Save { attempt, .. } => {
                self.settle(attempt);
                self.saving = Some(attempt);
            }
            ToNode::Committed { .. } => {
                (self.load.recording, self.saving) = (None, None);
                self.committed_adam_steps.clone_from(&self.adam_steps);
            }
            ToNode::Abort { attempt } => {
                self.load.recording.take_if(|recording| *recording >= attempt);
                self.saving.take_if(|saving| *saving >= attempt);
                if self.saving.is_none() {
                    self.adam_steps.clone_from(&self.committed_adam_steps);
                }
                self.works.retain(|a, _| *a < attempt);
                self.rows.clear();
            }
        }
        NodeEvent::Run(message)
    }

    /// The attempt's step counts, if it has not been settled before.
    fn settle(&mut self, attempt: Attempt) {
        let Some(in_work) = self.works.remove(&attempt) else { return };
        let layers = self.adam_steps.iter_mut().zip(&*in_work.locked);
        layers.filter(|(_, locked)| !**locked).for_each(|(t, _)| *t += 1);
    }

    /// The result of an attempt that is still alive; a failure is reported and ends it.
    fn accept<T>(&mut self, attempt: Attempt, result: Result<T, Failure>) -> Option<T> {
        if !self.works.contains_key(&attempt) && self.saving != Some(attempt) {
            return None;
        }
        match result {
            Ok(value) => Some(value),
            Err(failure @ Failure::Update { step, .. }) => {
                let step = Step(step);
                self.report(FromNode::NotFinite { step, attempt }, Detail::Failure(failure));
                None
            }
            Err(failure) => {
                let fatal = judge(&failure) == Verdict::StopNode;
                tracing::info!(%attempt, %failure, "attempt failed");
                self.report(FromNode::Failed { attempt, fatal }, Detail::Failure(failure));
                None
            }
        }
    }

    fn outcome(&mut self, attempt: Attempt, op: ComputeOp, outcome: Outcome) -> Option<NodeEvent> {
        match (op, outcome) {
            (ComputeOp::HeadLoss { micro }, Outcome::Loss(loss)) => {
                if let Some(in_work) = self.works.get_mut(&attempt) {
                    in_work.forward_seconds = in_work.begun.elapsed().as_secs_f64();
                }
                Some(NodeEvent::Loss { attempt, micro, loss })
            }
            (ComputeOp::TakeGradient { piece, spill }, Outcome::Gradient(gradient)) => {
                self.measure(attempt, piece, gradient, spill);
                None
            }
            _ => None,
        }
    }

    fn measure(&mut self, attempt: Attempt, piece: PieceId, gradient: Gradient, spill: bool) {
        let directory = self.directory.clone();
        let reply = Reply::new(move |result| {
            directory.node().post(NodeMessage::Measured { attempt, piece, result });
        });
        self.load.optimizing += 1;
        let elements = self.model.table.piece(piece, self.model.tiling);
        let request =
            OptimizerMessage::Measure { attempt, piece, elements, gradient, spill, reply };
        self.directory.optimizer().post(request);
    }

    fn note_seconds(&mut self, attempt: Attempt, op: ComputeOp, seconds: f64) {
        let (layer, backward) = translate::layer_and_sweep(op, self.model.table.head());
        self.note(attempt, layer, |report| {
            let sweep = &mut report.seconds;
            *(if backward { &mut sweep.backward } else { &mut sweep.forward }) += seconds;
        });
    }

    fn note(&mut self, attempt: Attempt, layer: LayerId, change: impl FnOnce(&mut LayerReport)) {
        if let Some(in_work) = self.works.get_mut(&attempt) {
            change(&mut in_work.layers[layer.index()]);
        }
    }

    fn carry_out(&mut self, command: NodeCommand) {
        match command {
            NodeCommand::Gather { attempt, micro, layer, slot } => {
                self.gather(attempt, micro, layer, slot);
            }
            NodeCommand::StreamIn { attempt, visit, layer, tile, slot, again } => {
                self.load.reads += 1;
                let directory = self.directory.clone();
                let reply = Reply::new(move |result| {
                    directory.node().post(NodeMessage::Weights { attempt, visit, result });
                });
                let elements = tile.elements;
                let after = match again {
                    Again::Never => AfterUse::Forget,
                    Again::Soon(next_use) => AfterUse::Soon(next_use),
                    Again::Later(next_use) => AfterUse::Later(next_use),
                };
                let at = (layer, slot);
                let precision = self.precision;
                let request = StoreRequest::ReadWeights { at, elements, precision, after, reply };
                self.directory.store().post(request);
            }
            NodeCommand::Compute { attempt, visit, op } => self.compute(attempt, visit, op),
            NodeCommand::Unbind { attempt, visit } => {
                let directory = self.directory.clone();
                let reply = Reply::new(move |result| {
                    directory.node().post(NodeMessage::Unbound { attempt, visit, result });
                });
                let command = Command::Unbind { id: translate::weights_id(attempt, visit) };
                self.directory.compute().post(ComputeRequest { command, reply });
            }
            NodeCommand::Park { attempt, stage, micro } => self.park(attempt, stage, micro),
            NodeCommand::Unpark { attempt, stage, micro } => self.unpark(attempt, stage, micro),
            NodeCommand::Update { step, attempt, piece, from, to, again, saved } => {
                self.update((step, attempt), piece, (from, to), (again, saved));
            }
            NodeCommand::Save { attempt, slots } => {
                self.load.syncing += 1;
                let directory = self.directory.clone();
                let reply = Reply::new(move |result| {
                    directory.node().post(NodeMessage::Saved { attempt, result });
                });
                self.directory.store().post(StoreRequest::Save { slots, reply });
            }
            NodeCommand::Drain { attempt } => self.drain(attempt, DrainStage::Compute),
            NodeCommand::Report(report) => self.report_with_detail(report),
        }
    }

    fn gather(&mut self, attempt: Attempt, micro: Micro, layer: LayerId, slot: Slot) {
        let Some(in_work) = self.works.get(&attempt) else { return };
        self.load.reads += 1;
        let directory = self.directory.clone();
        let reply = Reply::new(move |result| {
            directory.node().post(NodeMessage::Rows { attempt, micro, result });
        });
        let ids = in_work.work.batch.micro(micro).ids.clone();
        let width = self.model.table.layer(layer).tensors[0].shape[1];
        let (at, precision) = ((layer, slot), self.precision);
        let request = StoreRequest::GatherRows { at, width, ids, precision, reply };
        self.directory.store().post(request);
    }

    fn bind(&mut self, attempt: Attempt, visit: VisitId, weights: Weights) {
        let Some(at) = self.node.visit(attempt, visit) else { return };
        let command = translate::bind(attempt, visit, at, weights);
        // A failed bind shows in the commands that need the weights.
        let reply = Reply::new(|_| {});
        self.directory.compute().post(ComputeRequest { command, reply });
    }

    fn park(&self, attempt: Attempt, stage: Stage, micro: Micro) {
        let directory = self.directory.clone();
        let reply = Reply::new(move |result| {
            directory.node().post(NodeMessage::Fetched { attempt, stage, micro, result });
        });
        let command = Command::Get { id: translate::input(stage, micro) };
        self.directory.compute().post(ComputeRequest { command, reply });
    }

    fn write_input(&self, attempt: Attempt, stage: Stage, micro: Micro, bytes: HostBytes) {
        let directory = self.directory.clone();
        let reply = Reply::new(move |result| {
            directory.node().post(NodeMessage::Parked { attempt, stage, micro, result });
        });
        let (start, range) = (self.map.input(stage, micro), 0..bytes.len());
        let bytes = Arc::new(bytes);
        self.directory.store().post(StoreRequest::WriteScratch { start, bytes, range, reply });
    }

    fn unpark(&mut self, attempt: Attempt, stage: Stage, micro: Micro) {
        self.load.reads += 1;
        let directory = self.directory.clone();
        let reply = Reply::new(move |result| {
            directory.node().post(NodeMessage::Unparked { attempt, stage, micro, result });
        });
        let (start, len) = (self.map.input(stage, micro), self.input_bytes);
        self.directory.store().post(StoreRequest::ReadScratch { start, len, reply });
    }

    fn put_input(&self, stage: Stage, micro: Micro, bytes: HostBytes) {
        // A failed put shows in the command that needs the input.
        let reply = Reply::new(|_| {});
        let command = Command::Put { id: translate::input(stage, micro), bytes };
        self.directory.compute().post(ComputeRequest { command, reply });
    }

    fn compute(&mut self, attempt: Attempt, visit: VisitId, op: ComputeOp) {
        let Some(in_work) = self.works.get(&attempt) else { return };
        let weights = translate::weights_id(attempt, visit);
        let batch = &in_work.work.batch;
        let commands = translate::commands(op, weights, batch, &self.model, &mut self.rows);
        for command in commands {
            self.device.enqueued(Instant::now(), self.load.computing == 0);
            self.load.computing += 1;
            let directory = self.directory.clone();
            let reply = Reply::new(move |result| {
                directory.node().post(NodeMessage::Computed { attempt, op, result });
            });
            self.directory.compute().post(ComputeRequest { command, reply });
        }
    }

    fn update(
        &mut self,
        (step, attempt): (Step, Attempt),
        piece: PieceId,
        (from, to): (Slot, Slot),
        (again, saved): (Written, bool),
    ) {
        let Some(in_work) = self.works.get(&attempt) else { return };
        let layer = piece.layer;
        let factor = match in_work.work.clip {
            Clip::Layer(max) => {
                let sum = in_work.layers[layer.index()].sum_of_squares;
                optim::clip_factor(max, sum.sqrt())
            }
            Clip::None | Clip::Global(_) => in_work.factor,
        };
        let t = self.adam_steps[layer.index()] + 1;
        let prepared = in_work.work.adamw.prepare(t, factor);
        let rounding = optim::rounding_key(self.seed, u64::from(layer.0), t);
        let pieces = self.model.table.pieces(layer, self.model.tiling).len();
        let (precision, Written { weights, state }) = (self.precision, again);
        let again = WrittenAgain { precision, weights, state, waits: !saved };
        let job =
            UpdateJob { step, attempt, piece, pieces, from, to, again, prepared, t, rounding };
        self.load.optimizing += 1;
        self.updates.insert(piece, Instant::now());
        let directory = self.directory.clone();
        let reply = Reply::new(move |result| {
            directory.node().post(NodeMessage::Updated { attempt, piece, result });
        });
        self.directory.optimizer().post(OptimizerMessage::Update { job, reply });
    }

    fn drain(&mut self, attempt: Attempt, stage: DrainStage) {
        let directory = self.directory.clone();
        let told = move |result| {
            directory.node().post(NodeMessage::Drained { attempt, stage, result });
        };
        match stage {
            DrainStage::Compute => {
                let reply = Reply::new(move |r: Result<Outcome, _>| told(r.map(|_| ())));
                let command = Command::Clear;
                self.directory.compute().post(ComputeRequest { command, reply });
            }
            DrainStage::Optimizer => {
                let reply = Reply::new(told);
                self.directory.optimizer().post(OptimizerMessage::Drain { reply });
            }
            DrainStage::Store => {
                let reply = Reply::new(told);
                self.directory.store().post(StoreRequest::Drain { reply });
            }
        }
    }

    fn drained(&mut self, attempt: Attempt, stage: DrainStage, idle: bool) -> Option<NodeEvent> {
        if !idle {
            self.drain_later(attempt, stage);
            return None;
        }
        match stage {
            DrainStage::Compute => self.drain(attempt, DrainStage::Optimizer),
            DrainStage::Optimizer => self.drain(attempt, DrainStage::Store),
            DrainStage::Store => return Some(NodeEvent::Drained { attempt }),
        }
        None
    }

    fn drain_later(&self, attempt: Attempt, stage: DrainStage) {
        let directory = self.directory.clone();
        tokio::spawn(async move {
            tokio::time::sleep(DRAIN_AGAIN).await;
            directory.node().post(NodeMessage::DrainAgain { attempt, stage });
        });
    }

    fn report_with_detail(&mut self, report: FromNode) {
        let detail = match &report {
            FromNode::Norm { attempt, .. } => self.seconds(*attempt),
            FromNode::Updated { attempt, .. } => {
                let in_work = self.works.get(attempt);
                in_work.map_or(Detail::None, |w| Detail::Layers(w.layers.clone()))
            }
            FromNode::Prepared { attempt, .. } => {
                self.load.recording = Some(*attempt);
                Detail::None
            }
            FromNode::NotFinite { .. } | FromNode::Failed { .. } | FromNode::Aborted { .. } => {
                Detail::None
            }
        };
        self.report(report, detail);
    }

    fn seconds(&mut self, attempt: Attempt) -> Detail {
        let Some(in_work) = self.works.get(&attempt) else { return Detail::None };
        let total = in_work.begun.elapsed().as_secs_f64();
        Detail::Seconds(SweepSeconds {
            forward: in_work.forward_seconds,
            backward: total - in_work.forward_seconds,
            stall: self.clock.take(),
        })
    }

    fn report(&self, report: FromNode, detail: Detail) {
        self.directory.run().post(RunMessage::Node { report, detail });
    }
}
