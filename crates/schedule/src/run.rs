//! [`Run`]: which step is attempted, whether its update may be applied, when it is committed.
//!
//! Invariants:
//! - steps are settled or skipped in order; attempts only grow;
//! - what is settled is committed every so many steps, at the end, and before a step is skipped;
//! - step s+1 begins as soon as s has been swept, so that the commit of s overlaps the next
//!   forward, but at most one step is swept and at most one is on its way to its record;
//! - a step is judged when the step before is settled and no record is on its way, by what holds
//!   after that step;
//! - after any failure the run goes on from the last durable step, and what was decided about the
//!   steps since then is decided again: their bits are the same.

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
    /// Steps from one commit to the next; at least 1.
    pub commit_every: u64,
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
    /// The step counts; `ledger`: what holds after it. Its record follows, or a later step's.
    Settle {
        step: Step,
        attempt: Attempt,
        ledger: Ledger,
    },
    /// Write the record of the step that was settled last; what was saved is live then.
    Commit {
        step: Step,
        attempt: Attempt,
    },
    /// A guard refuses the step. Its attempt is dropped, and once the steps before are durable, which
    /// may take attempts of theirs, `Skip` follows if it `skips`, otherwise the run ends.
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
    /// It failed beyond help.
    doomed: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Phase {
    Updating,
    /// Settled, and so is what comes before: it is being synced.
    Saving,
    Committing,
    /// Refused: its attempt is being dropped.
    Draining,
    Skipping,
}

/// The step on its way to being settled, or to its record.
#[derive(Clone, Debug)]
struct Tail {
    step: Step,
    attempt: Attempt,
    phase: Phase,
    /// What holds after it.
    ledger: Ledger,
}

/// A step that a guard refused, while the steps before it are made again.
#[derive(Clone, Copy, Debug)]
struct Refused {
    step: Step,
    skips: bool,
}

/// The machine.
#[derive(Debug)]
pub struct Run {
    last_step: Step,
    rules: Rules,
    updates: Updates,
    recent: Recent,
    commit_every: u64,
    /// The last durable step, and what its record says.
    durable: Step,
    recorded: Ledger,
    /// The last step that is settled, of which attempt, and what holds after it.
    settled: Step,
    settled_attempt: Attempt,
    ledger: Ledger,
    refused: Option<Refused>,
    /// The last step that was ever settled.
    reached: Step,
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
            updates: config.updates.with_commits_every(config.commit_every),
            recent: Recent::default(),
            rules: Rules { guard: config.guard, auto_lock: config.auto_lock },
            commit_every: config.commit_every,
            durable: config.committed,
            recorded: config.ledger.clone(),
            settled: config.committed,
            settled_attempt: config.attempt,
            ledger: config.ledger,
            refused: None,
            reached: config.committed,
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
            FromNode::Updated { step, attempt, weights } => {
                self.updated(step, attempt, &weights, out);
            }
            FromNode::Prepared { step, attempt } => self.prepared(step, attempt, out),
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

    fn updated(
        &mut self,
        step: Step,
        attempt: Attempt,
        weights: &[f64],
        out: &mut Vec<RunCommand>,
    ) {
        let swept = self.front.as_ref().is_none_or(|front| front.attempt != attempt);
        assert!(swept, "step {step} is updated before it may be applied");
        let Some(mut tail) = self.tail.take_if(|t| t.attempt == attempt) else { return };
        assert_eq!((tail.step, tail.phase), (step, Phase::Updating));
        tail.ledger.weigh(&self.rules, weights, &self.ledger);
        (self.settled, self.settled_attempt) = (step, attempt);
        self.ledger = tail.ledger;
        if step > self.reached {
            self.reached = step;
            self.failures = 0;
        }
        let ledger = self.ledger.clone();
        out.push(RunCommand::Settle { step, attempt, ledger });
        if self.is_committed(step) {
            self.save(out);
        } else {
            out.push(RunCommand::Node(ToNode::Settled { step, attempt }));
        }
    }

    /// Whether a commit follows the step.
    fn is_committed(&self, step: Step) -> bool {
        let refused = self.refused.is_some_and(|refused| refused.step == step.next());
        let last = step == self.last_step || !self.wants_more();
        step.0.is_multiple_of(self.commit_every) || refused || last
    }

    /// What is settled goes to the disk.
    fn save(&mut self, out: &mut Vec<RunCommand>) {
        let (step, attempt, ledger) = (self.settled, self.settled_attempt, self.ledger.clone());
        self.tail = Some(Tail { step, attempt, phase: Phase::Saving, ledger });
        out.push(RunCommand::Node(ToNode::Save { step, attempt }));
    }

    fn prepared(&mut self, step: Step, attempt: Attempt, out: &mut Vec<RunCommand>) {
        let Some(tail) = self.tail.as_mut().filter(|t| t.attempt == attempt) else { return };
        assert_eq!((tail.step, tail.phase), (step, Phase::Saving));
        tail.phase = Phase::Committing;
        out.push(RunCommand::Commit { step, attempt });
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

    /// Drops the step after the last settled one, and what follows it.
    fn refuse(&mut self, step: Step, attempt: Attempt, reason: Reason, out: &mut Vec<RunCommand>) {
        assert_eq!(step, self.settled.next(), "a step is judged in its turn");
        let skips = self.ledger.skips(&self.rules);
        (self.front, self.tail) = (None, None);
        self.refused = Some(Refused { step, skips });
        out.push(RunCommand::Refuse { step, attempt, reason, skips });
        self.abort(attempt, out);
        if step == self.durable.next() {
            self.pass_over(Phase::Draining);
        }
    }

    /// What comes before the refused step is durable.
    fn pass_over(&mut self, phase: Phase) {
        let Some(Refused { step, skips }) = self.refused.take() else { return };
        self.fatal |= !skips;
        self.tail = skips.then(|| {
            let (attempt, ledger) = (self.attempt, self.ledger.after_skip());
            Tail { step, attempt, phase, ledger }
        });
    }

    fn aborted(&mut self, attempt: Attempt, out: &mut Vec<RunCommand>) {
        if self.aborting != Some(attempt) {
            return;
        }
        self.aborting = None;
        if let Some(tail) = self.tail.as_mut().filter(|t| t.phase == Phase::Draining) {
            tail.phase = Phase::Skipping;
            skip(tail, out);
        }
    }

    /// Drops everything that is not already being committed. A step whose record is on its way
    /// is never dropped: its commit decides.
    fn fail(&mut self, attempt: Attempt, fatal: bool, out: &mut Vec<RunCommand>) {
        let front = self.front.as_mut().filter(|f| f.attempt == attempt);
        let known = front.is_some() || self.tail.as_ref().is_some_and(|t| t.attempt == attempt);
        let sweeping = front.filter(|f| f.swept.is_none());
        if self.aborting.is_some() || !known || (fatal && sweeping.is_some()) {
            // A sweep that is beyond help is dropped when the step before has been updated.
            sweeping.into_iter().for_each(|front| front.doomed |= fatal);
            self.fatal |= fatal;
            return;
        }
        self.failures += 1;
        self.fatal |= fatal || self.failures >= ATTEMPTS_PER_STEP;
        let droppable = |t: &mut Tail| matches!(t.phase, Phase::Updating | Phase::Saving);
        let tail = self.tail.take_if(droppable).map(|t| t.attempt);
        let swept = self.front.take().map(|f| f.attempt);
        if let Some(dropped) = tail.or(swept) {
            self.abort(dropped, out);
        }
    }

    /// Drops the attempt and later ones; what is settled and not being committed goes as well, and
    /// is made again.
    fn abort(&mut self, attempt: Attempt, out: &mut Vec<RunCommand>) {
        if self.tail.is_none() {
            self.settled = self.durable;
            self.ledger.clone_from(&self.recorded);
        }
        self.aborting = Some(attempt);
        out.push(RunCommand::Node(ToNode::Abort { attempt }));
    }

    fn on_durable(&mut self, step: Step, out: &mut Vec<RunCommand>) {
        let Some(tail) = self.tail.take_if(|t| t.step == step) else {
            panic!("step {step} became durable without a record on its way")
        };
        assert!(step > self.durable, "step {step} became durable twice");
        (self.durable, self.settled) = (step, step);
        self.recorded.clone_from(&tail.ledger);
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
    /// before is being updated: dropping an attempt drains every resource, and that step is good. A
    /// sweep that can take settled steps to a commit is brought to its end.
    fn drop_sweep(&mut self, out: &mut Vec<RunCommand>) {
        let busy = |t: &Tail| matches!(t.phase, Phase::Updating | Phase::Saving);
        let ends = self.stopping || self.fatal;
        if !ends || self.finished || self.aborting.is_some() || self.tail.as_ref().is_some_and(busy)
        {
            return;
        }
        let carries = self.is_unsaved();
        let dropped = |f: &mut Front| f.swept.is_none() && (f.doomed || !carries);
        if let Some(sweeping) = self.front.take_if(dropped) {
            self.abort(sweeping.attempt, out);
        }
    }

    /// Whether steps are settled of which no record is on its way.
    fn is_unsaved(&self) -> bool {
        self.settled > self.durable && self.tail.is_none()
    }

    /// What nobody takes along is saved by itself, and a refused step is passed over in its turn.
    fn conclude(&mut self, out: &mut Vec<RunCommand>) {
        if self.front.is_some() || self.tail.is_some() || self.aborting.is_some() {
            return;
        }
        if self.is_unsaved() {
            if !self.wants_more() {
                self.save(out);
            }
        } else if self.refused.is_some_and(|refused| refused.step == self.durable.next()) {
            // A record has an attempt of its own.
            self.attempt = Attempt(self.attempt.0 + 1);
            self.pass_over(Phase::Skipping);
            self.tail.iter().for_each(|tail| skip(tail, out));
        }
    }

    fn advance(&mut self, out: &mut Vec<RunCommand>) {
        self.promote(out);
        self.drop_sweep(out);
        self.conclude(out);
        self.load(out);
        self.begin(out);
        self.end_if_done(out);
    }

    /// A swept step is judged once the step before is settled, and goes on to its update.
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
        front.or(self.tail.as_ref().map(|t| t.step)).unwrap_or(self.settled).next()
    }

    fn wants_more(&self) -> bool {
        !self.stopping && !self.fatal && !self.finished
    }

    /// Whether the step is one to be swept.
    fn is_wanted(&self, step: Step) -> bool {
        let refused = self.refused.is_some_and(|refused| refused.step == step);
        self.wants_more() && step <= self.last_step && !refused
    }

    fn load(&mut self, out: &mut Vec<RunCommand>) {
        let step = self.next_step();
        let loaded = self.loaded.is_some_and(|(loaded, _)| loaded == step);
        let known = loaded || self.loading == Some(step);
        if known || !self.is_wanted(step) {
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
        if self.front.is_some() || blocked || !self.is_wanted(step) {
            return;
        }
        let Some((_, targets)) = self.loaded.take_if(|(loaded, _)| *loaded == step) else { return };
        self.attempt = Attempt(self.attempt.0 + 1);
        let attempt = self.attempt;
        let before = self.tail.as_ref().map_or(&self.ledger, |tail| &tail.ledger);
        let locked = Arc::clone(&before.locked);
        let swept = None;
        self.front = Some(Front { step, attempt, targets, swept, redo: false, doomed: false });
        let policy = self.updates.policy(self.recent);
        let saved = self.is_committed(step);
        out.push(RunCommand::Node(ToNode::Begin { step, attempt, locked, policy, saved }));
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

fn skip(tail: &Tail, out: &mut Vec<RunCommand>) {
    let (step, attempt, ledger) = (tail.step, tail.attempt, tail.ledger.clone());
    out.push(RunCommand::Skip { step, attempt, ledger });
}
