//! [`Run`]: which step is attempted, when its update may be applied, when it is committed.
//!
//! Invariants:
//! - steps commit in order, each exactly once; attempts only grow;
//! - step s+1 begins as soon as s has been swept, so that the commit of s overlaps the next
//!   forward, but at most one step is swept and at most one is on its way to its commit;
//! - after any failure the run goes on from the last durable step.

use std::sync::Arc;

use model::{Attempt, Step};

use crate::{FromNode, ToNode};

/// Attempts of one step without a commit in between, after which the run gives up.
const ATTEMPTS_PER_STEP: u32 = 3;

/// Where a run starts and ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunConfig {
    /// Last committed step.
    pub committed: Step,
    /// Last attempt that was ever used.
    pub attempt: Attempt,
    /// The run is complete when this step is durable.
    pub last_step: Step,
    /// By layer: not trained.
    pub locked: Arc<[bool]>,
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
    /// The step's token rows are in memory.
    BatchLoaded {
        step: Step,
    },
    Node(FromNode),
    /// The commit record is on the disk, in both copies.
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
    LoadBatch { step: Step },
    Node(ToNode),
    Commit { step: Step, attempt: Attempt },
    Finish(End),
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Phase {
    Sweeping,
    /// Swept, waiting for the step before to become durable.
    Swept {
        sum_of_squares: f64,
    },
    Updating,
    Committing,
}

#[derive(Clone, Copy, Debug)]
struct InFlight {
    step: Step,
    attempt: Attempt,
    phase: Phase,
}

/// The machine.
#[derive(Debug)]
pub struct Run {
    config: RunConfig,
    durable: Step,
    attempt: Attempt,
    /// The step that is swept.
    front: Option<InFlight>,
    /// The step that is updated and committed.
    tail: Option<InFlight>,
    loaded: Option<Step>,
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
            durable: config.committed,
            attempt: config.attempt,
            config,
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
            RunEvent::BatchLoaded { step } => self.batch_loaded(step),
            RunEvent::Node(message) => self.on_node(message, &mut out),
            RunEvent::Durable { step } => self.on_durable(step, &mut out),
            RunEvent::CommitFailed { .. } => self.end(End::Failed, &mut out),
            RunEvent::StopRequested => self.stopping = true,
            RunEvent::GiveUp => self.fatal = true,
        }
        self.advance(&mut out);
        out
    }

    fn batch_loaded(&mut self, step: Step) {
        if self.loading == Some(step) {
            self.loading = None;
            self.loaded = Some(step);
        }
    }

    fn on_node(&mut self, message: FromNode, out: &mut Vec<RunCommand>) {
        match message {
            FromNode::Norm { step, attempt, sums, .. } => {
                if let Some(front) = self.front.as_mut().filter(|f| f.attempt == attempt) {
                    assert_eq!(front.step, step, "norm of another step");
                    // In forward order.
                    front.phase = Phase::Swept { sum_of_squares: sums.iter().sum() };
                }
            }
            FromNode::Prepared { step, attempt } => {
                if let Some(tail) = self.tail.as_mut().filter(|t| t.attempt == attempt) {
                    assert_eq!((tail.step, tail.phase), (step, Phase::Updating));
                    tail.phase = Phase::Committing;
                    out.push(RunCommand::Commit { step, attempt });
                }
            }
            FromNode::Failed { attempt, fatal } => self.fail(attempt, fatal, out),
            FromNode::Aborted { attempt } => {
                if self.aborting == Some(attempt) {
                    self.aborting = None;
                }
            }
        }
    }

    /// Drops everything that is not already being committed. A step whose record is on its way
    /// is never dropped: its commit decides.
    fn fail(&mut self, attempt: Attempt, fatal: bool, out: &mut Vec<RunCommand>) {
        let known = |f: &Option<InFlight>| f.is_some_and(|f| f.attempt == attempt);
        let sweeping = self.front.is_some_and(|f| f.phase == Phase::Sweeping && known(&self.front));
        let known = known(&self.front) || known(&self.tail);
        if self.aborting.is_some() || !known || (fatal && sweeping) {
            // A sweep that is beyond help is dropped when the step before has been updated.
            self.fatal |= fatal;
            return;
        }
        self.failures += 1;
        self.fatal |= fatal || self.failures >= ATTEMPTS_PER_STEP;
        self.abort(out);
    }

    fn abort(&mut self, out: &mut Vec<RunCommand>) {
        let droppable = |f: &InFlight| f.phase != Phase::Committing;
        let tail = self.tail.take_if(|t| droppable(t));
        let front = self.front.take();
        if let Some(dropped) = tail.or(front) {
            self.aborting = Some(dropped.attempt);
            out.push(RunCommand::Node(ToNode::Abort { attempt: dropped.attempt }));
        }
    }

    fn on_durable(&mut self, step: Step, out: &mut Vec<RunCommand>) {
        let Some(tail) = self.tail.take_if(|t| t.step == step) else {
            panic!("step {step} became durable without being committed")
        };
        assert_eq!((tail.phase, self.durable.next()), (Phase::Committing, step));
        self.durable = step;
        self.failures = 0;
        out.push(RunCommand::Node(ToNode::Committed { step, attempt: tail.attempt }));
    }

    /// A run that stops or gives up drops the sweep in flight, but only once nothing of the step
    /// before is being updated: dropping an attempt drains every resource, and that step is good.
    fn drop_sweep(&mut self, out: &mut Vec<RunCommand>) {
        let updating = self.tail.is_some_and(|t| t.phase == Phase::Updating);
        let ends = self.stopping || self.fatal;
        if !ends || self.finished || self.aborting.is_some() || updating {
            return;
        }
        let sweeping = self.front.take_if(|f| f.phase == Phase::Sweeping);
        if let Some(dropped) = sweeping {
            self.aborting = Some(dropped.attempt);
            out.push(RunCommand::Node(ToNode::Abort { attempt: dropped.attempt }));
        }
    }

    fn advance(&mut self, out: &mut Vec<RunCommand>) {
        self.promote(out);
        self.drop_sweep(out);
        self.load(out);
        self.begin(out);
        self.end_if_done(out);
    }

    /// A swept step goes on to its update once the step before is durable.
    fn promote(&mut self, out: &mut Vec<RunCommand>) {
        if self.tail.is_some() {
            return;
        }
        let Some(InFlight { step, attempt, phase: Phase::Swept { sum_of_squares } }) = self.front
        else {
            return;
        };
        self.front = None;
        self.tail = Some(InFlight { step, attempt, phase: Phase::Updating });
        out.push(RunCommand::Node(ToNode::Apply { step, attempt, sum_of_squares }));
    }

    fn next_step(&self) -> Step {
        self.front.or(self.tail).map_or(self.durable, |f| f.step).next()
    }

    fn wants_more(&self) -> bool {
        !self.stopping && !self.fatal && !self.finished
    }

    fn load(&mut self, out: &mut Vec<RunCommand>) {
        let step = self.next_step();
        let known = self.loaded == Some(step) || self.loading == Some(step);
        if known || step > self.config.last_step || !self.wants_more() {
            return;
        }
        self.loading = Some(step);
        out.push(RunCommand::LoadBatch { step });
    }

    fn begin(&mut self, out: &mut Vec<RunCommand>) {
        let step = self.next_step();
        if self.front.is_some() || self.aborting.is_some() || !self.wants_more() {
            return;
        }
        if step > self.config.last_step || self.loaded != Some(step) {
            return;
        }
        self.loaded = None;
        self.attempt = Attempt(self.attempt.0 + 1);
        self.front = Some(InFlight { step, attempt: self.attempt, phase: Phase::Sweeping });
        out.push(RunCommand::Node(ToNode::Begin {
            step,
            attempt: self.attempt,
            locked: Arc::clone(&self.config.locked),
        }));
        self.load(out);
    }

    fn end_if_done(&mut self, out: &mut Vec<RunCommand>) {
        let idle = self.front.is_none() && self.tail.is_none() && self.aborting.is_none();
        if !idle || self.finished {
            return;
        }
        if self.durable >= self.config.last_step {
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
