//! [`RunActor`]: carries out what the run machine decides: data, hyperparameters, commits, reports.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use data::{Cursor, Rows, Sampler};
use kameo::prelude::*;
use model::{Attempt, Budget, LayerTable, RunShape, Step, Wait};
use optim::{AdamW, LrSchedule};
use schedule::{
    AutoLock, End, FromNode, Guard, Ledger, Policy, Reason, Run, RunCommand, RunConfig, RunEvent,
    ToNode, Updates,
};
use store::{IoCounters, LayerState, RecordKind, Room, State, TrainingStore};

use crate::directory::Directory;
use crate::fault::FaultPlan;
use crate::messages::{
    Detail, LayerReport, LoadedBatch, NodeMessage, RunMessage, StoreRequest, Work,
};
use crate::reply::{Failure, Reply};
use crate::report::{Event, LayerStep, Observer, PhaseSeconds, StepReport, Summary};
use crate::watch::Watch;
use crate::{Batch, StallSeconds};

/// How long a commit that never reached the store waits before it is asked for again.
const COMMIT_AGAIN: Duration = Duration::from_millis(20);

/// How long a step waits before it looks again whether the disk has room.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// How gradients are clipped.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Clip {
    None,
    /// By the norm of the whole gradient.
    Global(f64),
    /// Each layer by its own norm.
    Layer(f64),
}

impl Clip {
    /// What gradients wait for where the optimizer runs inside the sweep.
    pub fn fused_wait(self) -> Wait {
        match self {
            Clip::Layer(_) => Wait::Layer,
            Clip::None | Clip::Global(_) => Wait::None,
        }
    }
}

/// Everything a run computes with.
#[derive(Clone)]
pub(crate) struct RunArgs {
    pub(crate) directory: Directory,
    /// Only asked whether the disk has room for a step.
    pub(crate) store: Arc<TrainingStore>,
    pub(crate) table: Arc<LayerTable>,
    pub(crate) rows: Arc<Rows>,
    pub(crate) sampler: Sampler,
    pub(crate) shape: RunShape,
    /// `lr` is replaced by the schedule's.
    pub(crate) adamw: AdamW,
    pub(crate) schedule: LrSchedule,
    pub(crate) clip: Clip,
    pub(crate) guard: Guard,
    pub(crate) auto_lock: Option<AutoLock>,
    pub(crate) updates: Updates,
    pub(crate) commit_every: u64,
    pub(crate) state: State,
    pub(crate) counters: IoCounters,
    pub(crate) last_step: Step,
    pub(crate) budget: Budget,
    pub(crate) observer: Arc<dyn Observer>,
    pub(crate) watch: Watch,
    pub(crate) faults: FaultPlan,
}

pub(crate) struct RunActor {
    args: RunArgs,
    run: Run,
    /// Where each step that is not durable yet begins in the data.
    cursors: BTreeMap<Step, Cursor>,
    /// The step whose rows are wanted next, and those that are there.
    wanted: Option<Step>,
    loaded: Option<(Step, Arc<Batch>)>,
    /// A step waits for room on the disk.
    paused: bool,
    attempts: BTreeMap<Attempt, Facts>,
    /// The factors of clipping of steps that may have to be made again with them.
    known: BTreeMap<Step, f32>,
    /// What holds after the last settled step.
    settled: State,
    /// The step that was settled last, until it is reported, and the names of layers it locks.
    unreported: Option<(StepReport, Vec<String>)>,
    reported: Step,
    /// The attempt that is on its way to a commit, with those that were settled before.
    saving: Option<Attempt>,
    /// What is known of the attempt that a guard refused.
    refused: Option<(Facts, Arc<Failure>)>,
    /// The record that is being written.
    committing: Option<(RecordKind, Box<State>)>,
    commit_started: Instant,
    /// When the last report was made, and what had been read and written by then.
    looked: Instant,
    counters: IoCounters,
    commits: u64,
    restarts: u64,
    opened: IoCounters,
    failure: Option<Arc<Failure>>,
    /// The failure ends the run, whatever is still committed before.
    gave_up: bool,
}

/// What is known of an attempt.
struct Facts {
    batch: Arc<Batch>,
    learning_rate: f64,
    loss: f64,
    grad_norm: f64,
    policy: Policy,
    /// Of clipping: at first what fused updates are made with.
    factor: f32,
    layers: Vec<LayerReport>,
    phase: PhaseSeconds,
    stall: StallSeconds,
    applied: Instant,
    /// An update that is not finite.
    failed_update: Option<Failure>,
}

impl Actor for RunActor {
    type Args = RunArgs;
    type Error = kameo::error::Infallible;

    fn name() -> &'static str {
        "run"
    }

    async fn on_start(args: RunArgs, _: ActorRef<Self>) -> Result<Self, Self::Error> {
        let committed = args.state.step;
        let config = RunConfig {
            committed,
            attempt: args.state.attempt,
            last_step: args.last_step,
            ledger: Ledger {
                locked: args.state.layers.iter().map(|layer| layer.locked).collect(),
                counters: args.state.counters.clone(),
            },
            guard: args.guard,
            auto_lock: args.auto_lock,
            updates: args.updates,
            commit_every: args.commit_every,
        };
        let cursor = Cursor { epoch: args.state.epoch, index: args.state.index };
        Ok(RunActor {
            run: Run::new(config),
            cursors: BTreeMap::from([(committed.next(), cursor)]),
            wanted: None,
            loaded: None,
            paused: false,
            attempts: BTreeMap::new(),
            known: BTreeMap::new(),
            settled: args.state.clone(),
            unreported: None,
            reported: committed,
            saving: None,
            refused: None,
            committing: None,
            commit_started: Instant::now(),
            looked: Instant::now(),
            commits: 0,
            restarts: 0,
            opened: args.counters,
            counters: args.counters,
            failure: None,
            gave_up: false,
            args,
        })
    }
}

impl Message<RunMessage> for RunActor {
    type Reply = ();

    async fn handle(&mut self, message: RunMessage, _: &mut Context<Self, ()>) {
        self.args.faults.message("run", message.kind()).await;
        if let Some(event) = self.take_in(message) {
            let commands = self.run.on(event);
            commands.into_iter().for_each(|command| self.carry_out(command));
        }
    }
}

impl RunActor {
    fn take_in(&mut self, message: RunMessage) -> Option<RunEvent> {
        match message {
            RunMessage::Start => {
                let (step, last_step) = (self.run.durable().0, self.args.last_step.0);
                self.args.observer.event(&Event::Started { step, last_step });
                Some(RunEvent::Start)
            }
            // Rows of a dropped attempt may come late.
            RunMessage::BatchLoaded { step, result } => {
                self.wanted.take_if(|wanted| *wanted == step)?;
                self.batch_loaded(step, result)
            }
            RunMessage::LoadAgain { step } => {
                if self.wanted.is_none() {
                    self.load(step);
                }
                None
            }
            RunMessage::Node { report, detail } => self.node_reported(report, detail),
            RunMessage::Committed { step, result } => self.committed(step, result),
            RunMessage::CommitAgain => {
                self.send_commit();
                None
            }
            RunMessage::StopRequested => Some(RunEvent::StopRequested),
            RunMessage::Restarted { actor, reason } => {
                self.restarts += 1;
                self.args.observer.event(&Event::Restarted { actor, reason });
                None
            }
        }
    }

    /// A step begins with its rows in memory, and with room on the disk for what it may write.
    fn batch_loaded(
        &mut self,
        step: Step,
        result: Result<LoadedBatch, Failure>,
    ) -> Option<RunEvent> {
        match result {
            Ok(LoadedBatch { room, .. }) if !room.is_enough() => {
                self.pause(step, &room);
                None
            }
            Ok(LoadedBatch { batch, next, .. }) => {
                if std::mem::take(&mut self.paused) {
                    self.args.observer.event(&Event::Resumed { step: step.0 });
                }
                self.cursors.insert(step.next(), next);
                let targets = batch.targets();
                self.loaded = Some((step, batch));
                Some(RunEvent::BatchLoaded { step, targets })
            }
            Err(failure) => Some(self.give_up(failure)),
        }
    }

    /// Looks again after a while; a stop is heard meanwhile.
    fn pause(&mut self, step: Step, room: &Room) {
        if !std::mem::replace(&mut self.paused, true) {
            let reason = format!("the disk is nearly full: {room}");
            self.args.observer.event(&Event::Paused { step: step.0, reason });
        }
        let directory = self.args.directory.clone();
        tokio::spawn(async move {
            tokio::time::sleep(LOOK_AGAIN).await;
            directory.run().post(RunMessage::LoadAgain { step });
        });
    }

    fn give_up(&mut self, failure: Failure) -> RunEvent {
        if !self.gave_up {
            self.failure = Some(Arc::new(failure));
        }
        self.gave_up = true;
        RunEvent::GiveUp
    }

    fn node_reported(&mut self, report: FromNode, detail: Detail) -> Option<RunEvent> {
        match (&report, detail) {
            (FromNode::Norm { step, attempt, sums, loss }, Detail::Seconds(seconds)) => {
                let facts = self.attempts.get_mut(attempt)?;
                facts.loss = loss / facts.batch.targets().max(1) as f64;
                facts.grad_norm = sums.iter().sum::<f64>().sqrt();
                (facts.phase.forward, facts.phase.backward) = (seconds.forward, seconds.backward);
                facts.stall = seconds.stall;
                return self.normed(*step, *attempt, sums, *loss);
            }
            (FromNode::NotFinite { attempt, .. }, Detail::Failure(failure)) => {
                self.attempts.get_mut(attempt)?.failed_update.get_or_insert(failure);
            }
            (FromNode::Updated { attempt, .. }, Detail::Layers(layers)) => {
                let facts = self.attempts.get_mut(attempt)?;
                facts.layers = layers;
                facts.phase.optimizer = facts.applied.elapsed().as_secs_f64();
            }
            // Whatever else was in flight fails as well: the first failure is the one to tell.
            (FromNode::Failed { attempt, fatal }, Detail::Failure(failure))
                if self.attempts.contains_key(attempt) || self.saving == Some(*attempt) =>
            {
                let step = self.run.durable().next().0;
                let reason = failure.to_string();
                let (attempt, again) = (attempt.0, !fatal);
                self.args.observer.event(&Event::Aborted { step, attempt, reason, again });
                if !self.gave_up {
                    self.failure = Some(Arc::new(failure));
                }
                self.gave_up |= *fatal;
            }
            _ => {}
        }
        Some(RunEvent::Node(report))
    }

    /// What clipping makes of a norm: updates that were made without the factor do not count.
    fn normed(
        &mut self,
        step: Step,
        attempt: Attempt,
        sums: &Arc<[f64]>,
        loss: f64,
    ) -> Option<RunEvent> {
        let factor = self.clip_factor(sums.iter().sum());
        let facts = self.attempts.get(&attempt)?;
        let clipped = factor < 1.0;
        if clipped {
            self.known.insert(step, factor);
        }
        let redo = clipped && facts.policy == Policy::Fused && facts.factor != factor;
        if redo {
            let (step, attempt) = (step.0, attempt.0);
            self.args.observer.event(&Event::Redone { step, attempt, factor });
        }
        let sums = Arc::clone(sums);
        Some(RunEvent::Norm { step, attempt, sums, loss, clipped, redo })
    }

    /// Of a gradient with this square sum.
    fn clip_factor(&self, sum_of_squares: f64) -> f32 {
        match self.args.clip {
            Clip::Global(max) => optim::clip_factor(max, sum_of_squares.sqrt()),
            Clip::None | Clip::Layer(_) => 1.0,
        }
    }

    fn committed(&mut self, step: Step, result: Result<IoCounters, Failure>) -> Option<RunEvent> {
        match result {
            Ok(counters) => {
                self.record(step, counters);
                Some(RunEvent::Durable { step })
            }
            // The store never saw the request, so nothing is uncertain.
            Err(Failure::Lost) => {
                let directory = self.args.directory.clone();
                tokio::spawn(async move {
                    tokio::time::sleep(COMMIT_AGAIN).await;
                    directory.run().post(RunMessage::CommitAgain);
                });
                None
            }
            Err(failure) => {
                self.failure = Some(Arc::new(failure));
                Some(RunEvent::CommitFailed { step })
            }
        }
    }

    /// Takes a durable step over and reports it.
    fn record(&mut self, step: Step, counters: IoCounters) {
        let Some((kind, state)) = self.committing.take() else { return };
        self.args.state = *state;
        self.saving = None;
        self.settled.clone_from(&self.args.state);
        self.cursors = self.cursors.split_off(&step.next());
        self.known = self.known.split_off(&step.next());
        if !self.gave_up {
            self.failure = None;
        }
        if kind == RecordKind::Skipped {
            if let Some((_, why)) = self.refused.take() {
                let reason = why.to_string();
                self.args.observer.event(&Event::Skipped { step: step.0, reason });
            }
            return;
        }
        self.commits += 1;
        if let Some((report, _)) = &mut self.unreported {
            report.phase.commit = self.commit_started.elapsed().as_secs_f64();
        }
        self.report_step(counters);
        self.counters = counters;
    }

    /// Reports the step that was settled last, unless it was before an earlier attempt of it was
    /// dropped. `counters`: what has been read and written by now.
    fn report_step(&mut self, counters: IoCounters) {
        let Some((report, layers)) = self.unreported.take() else { return };
        if report.step <= self.reported.0 {
            return;
        }
        let report = StepReport {
            seconds: self.looked.elapsed().as_secs_f64(),
            read_bytes: counters.read_bytes - self.counters.read_bytes,
            written_bytes: counters.written_bytes - self.counters.written_bytes,
            committed: self.args.state.step.0,
            ..report
        };
        (self.looked, self.counters) = (Instant::now(), counters);
        self.reported = Step(report.step);
        self.args.observer.step(&report);
        if !layers.is_empty() {
            self.args.observer.event(&Event::Locked { step: report.step, layers });
        }
    }

    fn carry_out(&mut self, command: RunCommand) {
        match command {
            RunCommand::LoadBatch { step } => self.load(step),
            RunCommand::Node(message) => self.tell_node(message),
            RunCommand::Settle { step, attempt, ledger } => self.settle(step, attempt, &ledger),
            RunCommand::Commit { .. } => {
                self.send_record(RecordKind::Committed, self.settled.clone());
            }
            RunCommand::Refuse { step, attempt, reason, skips } => {
                self.refuse(step, attempt, reason, skips);
            }
            RunCommand::Skip { step, attempt, ledger } => self.skip(step, attempt, &ledger),
            RunCommand::Finish(end) => self.finish(end),
        }
    }

    fn load(&mut self, step: Step) {
        let Some(&cursor) = self.cursors.get(&step) else {
            panic!("step {step} is loaded before the one before it")
        };
        self.wanted = Some(step);
        let (directory, rows) = (self.args.directory.clone(), Arc::clone(&self.args.rows));
        let (sampler, shape) = (self.args.sampler, self.args.shape);
        let store = Arc::clone(&self.args.store);
        // Answers Lost if reading panics.
        let reply = Reply::new(move |result| {
            directory.run().post(RunMessage::BatchLoaded { step, result });
        });
        let reply = self.args.watch.over(("run", "batch"), reply);
        tokio::task::spawn_blocking(move || {
            reply.send(read_batch(&store, &rows, &sampler, cursor, shape));
        });
    }

    fn tell_node(&mut self, message: ToNode) {
        let (mut work, mut factor) = (None, 1.0);
        match message {
            ToNode::Begin { step, attempt, policy, .. } => {
                factor = self.known.get(&step).copied().unwrap_or(1.0);
                work = self.begin(step, attempt, policy, factor);
            }
            ToNode::Apply { attempt, sum_of_squares, .. } => {
                factor = self.clip_factor(sum_of_squares);
                if let Some(facts) = self.attempts.get_mut(&attempt) {
                    (facts.applied, facts.factor) = (Instant::now(), factor);
                }
            }
            ToNode::Settled { .. } => self.report_step(self.args.store.counters()),
            ToNode::Abort { attempt } => {
                self.attempts.retain(|a, _| *a < attempt);
                if self.committing.is_none() {
                    self.settled.clone_from(&self.args.state);
                    self.saving = None;
                }
            }
            ToNode::Save { attempt, .. } => self.saving = Some(attempt),
            ToNode::Committed { .. } => {}
        }
        self.args.directory.node().post(NodeMessage::Run { message, work, factor });
    }

    fn begin(&mut self, step: Step, attempt: Attempt, policy: Policy, factor: f32) -> Option<Work> {
        let (_, batch) = self.loaded.take_if(|(loaded, _)| *loaded == step)?;
        let learning_rate = self.args.schedule.at(step.0);
        let facts = Facts {
            batch: Arc::clone(&batch),
            learning_rate,
            loss: f64::NAN,
            grad_norm: f64::NAN,
            policy,
            factor,
            layers: Vec::new(),
            phase: PhaseSeconds::default(),
            stall: StallSeconds::default(),
            applied: Instant::now(),
            failed_update: None,
        };
        self.attempts.insert(attempt, facts);
        let adamw = AdamW { lr: learning_rate, ..self.args.adamw };
        Some(Work { batch, adamw, clip: self.args.clip })
    }

    fn refuse(&mut self, step: Step, attempt: Attempt, reason: Reason, skips: bool) {
        let Some(mut facts) = self.attempts.remove(&attempt) else { return };
        let step = step.0;
        let failure = match (reason, facts.failed_update.take()) {
            (Reason::Spike { loss, bound }, _) => Failure::Spike { step, loss, bound },
            (Reason::Update, Some(failure)) => failure,
            (Reason::NotFinite { .. } | Reason::Update, _) => {
                Failure::NotFinite { step, loss: facts.loss, grad_norm: facts.grad_norm }
            }
        };
        let failure = Arc::new(failure);
        if !self.gave_up {
            self.failure = Some(Arc::clone(&failure));
        }
        self.gave_up |= !skips;
        self.refused = Some((facts, failure));
    }

    fn skip(&mut self, step: Step, attempt: Attempt, ledger: &Ledger) {
        let Some((facts, _)) = &self.refused else { return };
        let Some(mut state) = self.advanced(step, attempt, facts) else { return };
        state.counters.clone_from(&ledger.counters);
        self.send_record(RecordKind::Skipped, state);
    }

    /// The state after a step, but for its layers.
    fn advanced(&self, step: Step, attempt: Attempt, facts: &Facts) -> Option<State> {
        let next = self.cursors.get(&step.next())?;
        let before = &self.settled;
        Some(State {
            step,
            attempt,
            epoch: next.epoch,
            index: next.index,
            tokens_total: before.tokens_total + facts.batch.tokens(),
            loss: facts.loss,
            grad_norm: facts.grad_norm,
            clip_factor: facts.factor,
            learning_rate: facts.learning_rate,
            ..before.clone()
        })
    }

    fn settle(&mut self, step: Step, attempt: Attempt, ledger: &Ledger) {
        let Some(facts) = self.attempts.remove(&attempt) else { return };
        let Some(mut state) = self.advanced(step, attempt, &facts) else { return };
        state.counters.clone_from(&ledger.counters);
        let committed = &self.args.state.layers;
        for ((layer, report), committed) in
            state.layers.iter_mut().zip(&facts.layers).zip(committed)
        {
            layer.grad_norm = report.sum_of_squares.sqrt();
            if !layer.locked {
                layer.slot = committed.slot.other();
                layer.t += 1;
                layer.hashes = report.hashes;
            }
        }
        let before = state.layers.iter().map(|layer| layer.locked);
        let specs = self.args.table.layers().iter().zip(before.zip(&*ledger.locked));
        let new = specs.filter(|(_, (before, now))| **now && !before);
        let locks = new.map(|(spec, _)| spec.name.clone()).collect();
        self.unreported = Some((self.step_report(&state, &facts), locks));
        // In force from the next step on.
        state.layers.iter_mut().zip(&*ledger.locked).for_each(|(l, &locked)| l.locked = locked);
        self.settled = state;
    }

    /// The report of a step, but for what is known only when it is made.
    fn step_report(&self, state: &State, facts: &Facts) -> StepReport {
        StepReport {
            step: state.step.0,
            committed: 0,
            attempt: state.attempt.0,
            loss: facts.loss,
            grad_norm: facts.grad_norm,
            clip_factor: facts.factor,
            learning_rate: facts.learning_rate,
            tokens: facts.batch.tokens(),
            tokens_total: state.tokens_total,
            seconds: 0.0,
            read_bytes: 0,
            written_bytes: 0,
            stall: facts.stall,
            phase: facts.phase,
            layers: state.layers.iter().zip(&facts.layers).map(layer_step).collect(),
            mailbox_depths: self.args.directory.mailbox_depths(),
            ram_used_bytes: self.args.budget.used_bytes(),
            ram_peak_bytes: self.args.budget.peak_bytes(),
        }
    }

    fn send_record(&mut self, kind: RecordKind, state: State) {
        self.committing = Some((kind, Box::new(state)));
        self.commit_started = Instant::now();
        self.send_commit();
    }

    fn send_commit(&self) {
        let Some((kind, state)) = self.committing.clone() else { return };
        let step = state.step;
        let directory = self.args.directory.clone();
        let reply = Reply::new(move |result| {
            directory.run().post(RunMessage::Committed { step, result });
        });
        self.args.directory.store().post(StoreRequest::Commit { kind, state, reply });
    }

    fn finish(&mut self, end: End) {
        let step = self.run.durable().0;
        self.args.observer.event(&Event::Ended { step, end });
        let summary = Summary {
            end,
            step,
            commits: self.commits,
            read_bytes: self.counters.read_bytes - self.opened.read_bytes,
            written_bytes: self.counters.written_bytes - self.opened.written_bytes,
            ram_peak_bytes: self.args.budget.peak_bytes(),
            restarts: self.restarts,
            failure: self.failure.take(),
        };
        self.args.directory.end(Ok(summary));
    }
}

fn layer_step((state, report): (&LayerState, &LayerReport)) -> LayerStep {
    let grad_norm = report.sum_of_squares.sqrt();
    let LayerReport { drift, seconds, .. } = *report;
    LayerStep { grad_norm, locked: state.locked, drift, seconds }
}

fn read_batch(
    store: &TrainingStore,
    rows: &Rows,
    sampler: &Sampler,
    cursor: Cursor,
    shape: RunShape,
) -> Result<LoadedBatch, Failure> {
    let (ids, next) = sampler.batch(cursor);
    let (mut tokens, mut targets) = (Vec::new(), Vec::new());
    rows.read(&ids, &mut tokens, &mut targets)?;
    let batch = Arc::new(Batch::new(&tokens, &targets, shape));
    Ok(LoadedBatch { batch, next, room: store.room()? })
}
