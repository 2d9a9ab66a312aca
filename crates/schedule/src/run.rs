//! [`Run`]: which step is attempted, whether its update may be applied, when it is committed.
//!
//! Invariants:
//! - steps are committed or skipped in order, each exactly once; attempts only grow;
//! - step s+1 begins as soon as s has been swept, so that the commit of s overlaps the next
//!   forward, but at most one step is swept and at most one is on its way to its record;
//! - a step is judged when the step before is durable, by what that step's record says;
//! - after any failure the run goes on from the last durable step.

use std::sync::Arc;

use model::{Attempt, Step};

use crate::ledger::{Rules, Swept};
use crate::updates::Recent;
use crate::{AutoLock, FromNode, Guard, Ledger, Reason, ToNode, Updates};

/// Attempts of one step without a commit in between, after which the run gives up.
const ATTEMPTS_PER_STEP: u32 = 3;

/// Where a run starts and ends.
#[derive(Clone, Debug, PartialEq)]
pub struct RunConfig {
    /// Last durable step.
    pub committed: Step,
    /// Last attempt that was ever used.
    pub attempt: Attempt,
    /// The run is complete when this step is durable.
    pub last_step: Step,
    /// What the last record says.
    pub ledger: Ledger,
    pub guard: Guard,
    pub auto_lock: Option<AutoLock>,
    pub updates: Updates,
}

/// Why a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    Completed,
    Stopped,
    Failed,
}

/// What a run hears.
#[derive(Clone, Debug, PartialEq)]
pub enum RunEvent {
    Start,
    /// The step's token rows are in memory; so many of their positions are targets.
    BatchLoaded {
        step: Step,
        targets: u64,
    },
    Node(FromNode),
    /// [`FromNode::Norm`], and what clipping makes of it. `clipped`: the gradient is too long.
    /// `redo`: updates of the attempt have been made without the factor that it needs.
    Norm {
        step: Step,
        attempt: Attempt,
        sums: Arc<[f64]>,
        loss: f64,
        clipped: bool,
        redo: bool,
    },
    /// The step's record is on the disk, in both copies.
    Durable {
        step: Step,
    },
    /// Whether the record is on the disk is unknown: nothing may be written any more.
    CommitFailed {
        step: Step,
    },
    /// Finish what is about to commit, drop the rest, end.
    StopRequested,
    /// Going on is pointless: what is being swept is dropped, what has been swept still commits.
    GiveUp,
}

/// What a run wants done.
#[derive(Clone, Debug, PartialEq)]
pub enum RunCommand {
    LoadBatch {
        step: Step,
    },
    Node(ToNode),
    /// Write the step's record; the slots it wrote are live then.
    Commit {
        step: Step,
        attempt: Attempt,
        ledger: Ledger,
    },
    /// A guard refuses the step. Its attempt is dropped; if it `skips`, `Skip` follows, otherwise
    /// the run ends.
    Refuse {
        step: Step,
        attempt: Attempt,
        reason: Reason,
        skips: bool,
    },
    /// Write a record by which the step is passed over: no slot changes.
    Skip {
        step: Step,
        attempt: Attempt,
        ledger: Ledger,
    },
    Finish(End),
}

/// The step that is swept.
#[derive(Clone, Debug)]
struct Front {
    step: Step,
    attempt: Attempt,
    targets: u64,
    /// Set when it waits for the step before to become durable.
    swept: Option<Swept>,
    /// It has to be made again, see [`RunEvent::Norm`].
    redo: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Phase {
    Updating,
    Committing,
    /// Refused: its attempt is being dropped.
    Draining,
    Skipping,
}

/// The step on its way to its record.
#[derive(Clone, Debug)]
struct Tail {
    step: Step,
    attempt: Attempt,
    phase: Phase,
    /// What its record will say.
    ledger: Ledger,
}

/// The machine.
#[derive(Debug)]
pub struct Run {
    last_step: Step,
    rules: Rules,
    updates: Updates,
    recent: Recent,
    durable: Step,
    /// What the record of the last durable step says.
    ledger: Ledger,
    attempt: Attempt,
    front: Option<Front>,
    tail: Option<Tail>,
    /// The step whose rows are there, and its targets.
    loaded: Option<(Step, u64)>,
    loading: Option<Step>,
    /// Attempt from which on everything is being dropped.
    aborting: Option<Attempt>,
    failures: u32,
    stopping: bool,
    fatal: bool,
    finished: bool,
}

impl Run {
    /// A run that has not started.
    pub fn new(config: RunConfig) -> Run {
        Run {
            last_step: config.last_step,
            updates: config.updates,
            recent: Recent::default(),
            rules: Rules { guard: config.guard, auto_lock: config.auto_lock },
            durable: config.committed,
            ledger: config.ledger,
            attempt: config.attempt,
            front: None,
            tail: None,
            loaded: None,
            loading: None,
            aborting: None,
            failures: 0,
            stopping: false,
            fatal: false,
            finished: false,
        }
    }

    /// Last durable step.
    pub fn durable(&self) -> Step {
        self.durable
    }

    /// Takes an event in; the commands are to be carried out in order.
    pub fn on(&mut self, event: RunEvent) -> Vec<RunCommand> {
        let mut out = Vec::new();
        if self.finished {
            return out;
        }
        match event {
            RunEvent::Start => {}
            RunEvent::BatchLoaded { step, targets } => self.batch_loaded(step, targets),
            RunEvent::Node(message) => self.on_node(message, &mut out),
            RunEvent::Norm { step, attempt, sums, loss, clipped, redo } => {
                if self.swept(step, attempt, sums, loss, redo) && !redo {
                    self.recent = self.recent.with(clipped);
                }
            }
            RunEvent::Durable { step } => self.on_durable(step, &mut out),
            RunEvent::CommitFailed { .. } => self.end(End::Failed, &mut out),
            RunEvent::StopRequested => self.stopping = true,
            RunEvent::GiveUp => self.fatal = true,
        }
        self.advance(&mut out);
        out
    }

    fn batch_loaded(&mut self, step: Step, targets: u64) {
        if self.loading == Some(step) {
            self.loading = None;
            self.loaded = Some((step, targets));
        }
    }

    fn on_node(&mut self, message: FromNode, out: &mut Vec<RunCommand>) {
        match message {
            FromNode::Norm { step, attempt, sums, loss } => {
                self.swept(step, attempt, sums, loss, false);
            }
            FromNode::Prepared { step, attempt, weights } => {
                self.prepared(step, attempt, &weights, out);
            }
            FromNode::NotFinite { step, attempt } => self.update_failed(step, attempt, out),
            FromNode::Failed { attempt, fatal } => self.fail(attempt, fatal, out),
            FromNode::Aborted { attempt } => self.aborted(attempt, out),
        }
    }

    /// Whether the attempt is still wanted.
    fn swept(
        &mut self,
        step: Step,
        attempt: Attempt,
        sums: Arc<[f64]>,
        loss: f64,
        redo: bool,
    ) -> bool {
        let Some(front) = self.front.as_mut().filter(|f| f.attempt == attempt) else {
            return false;
        };
        assert_eq!(front.step, step, "norm of another step");
        let loss = loss / front.targets.max(1) as f64;
        front.swept = Some(Swept { loss, sums, targets: front.targets });
        front.redo = redo;
        true
    }

    fn prepared(
        &mut self,
        step: Step,
        attempt: Attempt,
        weights: &[f64],
        out: &mut Vec<RunCommand>,
    ) {
        let swept = self.front.as_ref().is_none_or(|front| front.attempt != attempt);
        assert!(swept, "step {step} is prepared before it may be applied");
        let Some(tail) = self.tail.as_mut().filter(|t| t.attempt == attempt) else { return };
        assert_eq!((tail.step, tail.phase), (step, Phase::Updating));
        tail.phase = Phase::Committing;
        tail.ledger.weigh(&self.rules, weights, &self.ledger);
        out.push(RunCommand::Commit { step, attempt, ledger: tail.ledger.clone() });
    }

    /// A layer's update is not finite. Fused, the step may still be swept.
    fn update_failed(&mut self, step: Step, attempt: Attempt, out: &mut Vec<RunCommand>) {
        let updating = |t: &Tail| t.phase == Phase::Updating && t.attempt == attempt;
        let tail = self.tail.as_ref().is_some_and(updating);
        let front = self.front.as_ref().is_some_and(|f| f.attempt == attempt);
        if self.aborting.is_some() || !(tail || front) {
            return;
        }
        assert!(tail || self.tail.is_none(), "step {step} was updated before its time");
        self.refuse(step, attempt, Reason::Update, out);
    }

    /// Drops the step after the last durable one, and what follows it.
    fn refuse(&mut self, step: Step, attempt: Attempt, reason: Reason, out: &mut Vec<RunCommand>) {
        assert_eq!(step, self.durable.next(), "a step is judged in its turn");
        let skips = self.ledger.skips(&self.rules);
        self.front = None;
        self.tail = skips.then(|| {
            let ledger = self.ledger.after_skip();
            Tail { step, attempt, phase: Phase::Draining, ledger }
        });
        self.fatal |= !skips;
        self.aborting = Some(attempt);
        out.push(RunCommand::Refuse { step, attempt, reason, skips });
        out.push(RunCommand::Node(ToNode::Abort { attempt }));
    }

    fn aborted(&mut self, attempt: Attempt, out: &mut Vec<RunCommand>) {
        if self.aborting != Some(attempt) {
            return;
        }
        self.aborting = None;
        if let Some(tail) = self.tail.as_mut().filter(|t| t.phase == Phase::Draining) {
            tail.phase = Phase::Skipping;
            let (step, ledger) = (tail.step, tail.ledger.clone());
            out.push(RunCommand::Skip { step, attempt, ledger });
        }
    }

    /// Drops everything that is not already being committed. A step whose record is on its way
    /// is never dropped: its commit decides.
    fn fail(&mut self, attempt: Attempt, fatal: bool, out: &mut Vec<RunCommand>) {
        let front = self.front.as_ref().filter(|f| f.attempt == attempt);
        let sweeping = front.is_some_and(|f| f.swept.is_none());
        let known = front.is_some() || self.tail.as_ref().is_some_and(|t| t.attempt == attempt);
        if self.aborting.is_some() || !known || (fatal && sweeping) {
            // A sweep that is beyond help is dropped when the step before has been updated.
            self.fatal |= fatal;
            return;
        }
        self.failures += 1;
        self.fatal |= fatal || self.failures >= ATTEMPTS_PER_STEP;
        let updating = self.tail.take_if(|t| t.phase == Phase::Updating).map(|t| t.attempt);
        let swept = self.front.take().map(|f| f.attempt);
        if let Some(dropped) = updating.or(swept) {
            self.abort(dropped, out);
        }
    }

    fn abort(&mut self, attempt: Attempt, out: &mut Vec<RunCommand>) {
        self.aborting = Some(attempt);
        out.push(RunCommand::Node(ToNode::Abort { attempt }));
    }

    fn on_durable(&mut self, step: Step, out: &mut Vec<RunCommand>) {
        let Some(tail) = self.tail.take_if(|t| t.step == step) else {
            panic!("step {step} became durable without a record on its way")
        };
        assert_eq!(self.durable.next(), step);
        self.durable = step;
        self.ledger = tail.ledger;
        self.failures = 0;
        match tail.phase {
            Phase::Committing => {
                out.push(RunCommand::Node(ToNode::Committed { step, attempt: tail.attempt }));
            }
            Phase::Skipping => {}
            early => panic!("step {step} became durable while {early:?}"),
        }
    }

    /// A run that stops or gives up drops the sweep in flight, but only once nothing of the step
    /// before is being updated: dropping an attempt drains every resource, and that step is good.
    fn drop_sweep(&mut self, out: &mut Vec<RunCommand>) {
        let updating = self.tail.as_ref().is_some_and(|t| t.phase == Phase::Updating);
        let ends = self.stopping || self.fatal;
        if !ends || self.finished || self.aborting.is_some() || updating {
            return;
        }
        if let Some(sweeping) = self.front.take_if(|f| f.swept.is_none()) {
            self.abort(sweeping.attempt, out);
        }
    }

    fn advance(&mut self, out: &mut Vec<RunCommand>) {
        self.promote(out);
        self.drop_sweep(out);
        self.load(out);
        self.begin(out);
        self.end_if_done(out);
    }

    /// A swept step is judged once the step before is durable, and goes on to its update.
    fn promote(&mut self, out: &mut Vec<RunCommand>) {
        if self.tail.is_some() {
            return;
        }
        let Some(Front { step, attempt, swept: Some(swept), redo, .. }) = &self.front else {
            return;
        };
        let (step, attempt) = (*step, *attempt);
        if let Some(reason) = self.ledger.judge(&self.rules, swept) {
            return self.refuse(step, attempt, reason, out);
        }
        if *redo {
            self.front = None;
            return self.abort(attempt, out);
        }
        // In forward order.
        let sum_of_squares = swept.sums.iter().sum();
        let ledger = self.ledger.after(&self.rules, swept);
        self.front = None;
        self.tail = Some(Tail { step, attempt, phase: Phase::Updating, ledger });
        out.push(RunCommand::Node(ToNode::Apply { step, attempt, sum_of_squares }));
    }

    fn next_step(&self) -> Step {
        let front = self.front.as_ref().map(|f| f.step);
        front.or(self.tail.as_ref().map(|t| t.step)).unwrap_or(self.durable).next()
    }

    fn wants_more(&self) -> bool {
        !self.stopping && !self.fatal && !self.finished
    }

    fn load(&mut self, out: &mut Vec<RunCommand>) {
        let step = self.next_step();
        let loaded = self.loaded.is_some_and(|(loaded, _)| loaded == step);
        let known = loaded || self.loading == Some(step);
        if known || step > self.last_step || !self.wants_more() {
            return;
        }
        self.loading = Some(step);
        out.push(RunCommand::LoadBatch { step });
    }

    fn begin(&mut self, out: &mut Vec<RunCommand>) {
        let step = self.next_step();
        // A skipped step writes nothing, so nobody would hold the next one's updates up.
        let skips = |t: &Tail| matches!(t.phase, Phase::Draining | Phase::Skipping);
        let blocked = self.aborting.is_some() || self.tail.as_ref().is_some_and(skips);
        if self.front.is_some() || blocked || !self.wants_more() || step > self.last_step {
            return;
        }
        let Some((_, targets)) = self.loaded.take_if(|(loaded, _)| *loaded == step) else { return };
        self.attempt = Attempt(self.attempt.0 + 1);
        let attempt = self.attempt;
        let before = self.tail.as_ref().map_or(&self.ledger, |tail| &tail.ledger);
        let locked = Arc::clone(&before.locked);
        self.front = Some(Front { step, attempt, targets, swept: None, redo: false });
        let policy = self.updates.policy(self.recent);
        out.push(RunCommand::Node(ToNode::Begin { step, attempt, locked, policy }));
        self.load(out);
    }

    fn end_if_done(&mut self, out: &mut Vec<RunCommand>) {
        let idle = self.front.is_none() && self.tail.is_none() && self.aborting.is_none();
        if !idle || self.finished {
            return;
        }
        if self.durable >= self.last_step {
            self.end(End::Completed, out);
        } else if self.fatal {
            self.end(End::Failed, out);
        } else if self.stopping {
            self.end(End::Stopped, out);
        }
    }

    fn end(&mut self, end: End, out: &mut Vec<RunCommand>) {
        self.finished = true;
        out.push(RunCommand::Finish(end));
    }
}
