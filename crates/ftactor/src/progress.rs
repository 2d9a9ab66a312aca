//! What a user sees while something long runs, on a terminal and without one.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use actors::{Event, Observer, StepReport};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use model::StateLayout;
use telemetry::{MemoryPurpose, Metrics, Phase, ProcessMemory, Resource, StepFacts};

use crate::log::{StepLog, event_line, step_line};
use crate::out::{errln, outln};

/// Where a run is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Show {
    Bar,
    Json,
    /// The closing summary only.
    Nothing,
    Silent,
}

/// Passes reports on: terminal, step log, metrics.
pub(crate) struct RunObserver {
    show: Show,
    bar: ProgressBar,
    log: Option<Mutex<StepLog>>,
    metrics: Metrics,
    last_step: u64,
    /// By layer: what the optimizer goes through every step, unless it is locked.
    layers: Vec<OptimizerBytes>,
    pace: Mutex<Pace>,
}

/// Seconds a step, smoothed. The first one, with its cold caches, counts until there is a second.
#[derive(Debug, Default)]
struct Pace {
    steps: u64,
    seconds: f64,
}

impl Pace {
    fn add(&mut self, seconds: f64) -> f64 {
        self.steps += 1;
        let newest = if self.steps <= 2 { 1.0 } else { 0.2 };
        self.seconds += newest * (seconds - self.seconds);
        self.seconds
    }
}

impl RunObserver {
    pub(crate) fn new(
        show: Show,
        first_step: u64,
        last_step: u64,
        layers: Vec<OptimizerBytes>,
        log: Option<StepLog>,
        metrics: Metrics,
    ) -> RunObserver {
        let bar = ProgressBar::new(last_step);
        if show != Show::Bar {
            bar.set_draw_target(ProgressDrawTarget::hidden());
        }
        let style = ProgressStyle::with_template("{bar:24} step {pos}/{len} {msg}");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        bar.set_position(first_step);
        RunObserver {
            show,
            bar,
            log: log.map(Mutex::new),
            metrics,
            last_step,
            layers,
            pace: Mutex::default(),
        }
    }

    /// Leaves the terminal as it was.
    pub(crate) fn finish(&self) {
        self.bar.finish_and_clear();
    }

    /// A line of its own, above the bar.
    pub(crate) fn say(&self, line: &str) {
        match self.show {
            Show::Nothing | Show::Silent | Show::Json => {}
            Show::Bar if self.bar.is_hidden() => errln!("{line}"),
            Show::Bar => self.bar.println(line),
        }
    }

    /// A line that is shown whatever the run shows.
    pub(crate) fn warn(&self, line: &str) {
        self.bar.suspend(|| errln!("warning: {line}"));
    }

    /// A line for the step log, and for standard output if that is JSON.
    pub(crate) fn record(&self, line: &serde_json::Value) {
        if let Some(log) = &self.log {
            log.lock().unwrap_or_else(PoisonError::into_inner).write(line);
        }
        if self.show == Show::Json {
            outln!("{line}");
        }
    }

    fn show_step(&self, report: &StepReport) {
        let mut pace = self.pace.lock().unwrap_or_else(PoisonError::into_inner);
        let seconds = pace.add(report.seconds);
        let left = self.last_step.saturating_sub(report.step);
        let message = step_message(report, seconds * left as f64);
        self.bar.set_position(report.step);
        self.bar.set_message(message.clone());
        if self.bar.is_hidden() {
            self.say(&format!("step {}/{} {message}", report.step, self.last_step));
        }
    }

    fn measure(&self, report: &StepReport) {
        let m = &self.metrics;
        m.step_committed(&StepFacts {
            step: report.committed,
            loss: report.loss,
            grad_norm: report.grad_norm,
            learning_rate: report.learning_rate,
            tokens: report.tokens,
            seconds: report.seconds,
        });
        m.phase(Phase::Forward, report.phase.forward);
        m.phase(Phase::Backward, report.phase.backward);
        m.phase(Phase::Optimizer, report.phase.optimizer);
        m.phase(Phase::Commit, report.phase.commit);
        m.stall(Resource::Storage, report.stall.storage);
        m.stall(Resource::Compute, report.stall.compute);
        m.stall(Resource::Optimizer, report.stall.optimizer);
        m.stall(Resource::Network, report.stall.network);
        m.store_read(report.read_bytes);
        m.store_written(report.written_bytes);
        if report.committed == report.step {
            m.store_commit(report.phase.commit);
        }
        m.ram_used(report.ram_used_bytes as u64);
        let layers = report.layers.iter().zip(&self.layers);
        for (_, bytes) in layers.filter(|(layer, _)| !layer.locked) {
            m.host_memory(MemoryPurpose::Optimizer, bytes.moved);
            m.host_memory(MemoryPurpose::Hash, bytes.hashed);
        }
        for (layer, facts) in report.layers.iter().enumerate() {
            m.layer_locked(layer, facts.locked);
            m.layer_grad_norm(layer, facts.grad_norm);
            m.layer_phase(layer, Phase::Forward, facts.seconds.forward);
            m.layer_phase(layer, Phase::Backward, facts.seconds.backward);
            m.layer_phase(layer, Phase::Optimizer, facts.seconds.optimizer);
        }
        for (actor, depth) in &report.mailbox_depths {
            m.mailbox_depth(actor, *depth);
        }
    }
}

/// What the optimizer moves through memory for a layer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OptimizerBytes {
    moved: u64,
    hashed: u64,
}

impl OptimizerBytes {
    /// W, M, V and a float32 gradient in, W, M, V out; both versions of the state are hashed.
    pub(crate) fn of(parameters: usize, layout: StateLayout) -> OptimizerBytes {
        let state = layout.bytes(parameters) as u64;
        OptimizerBytes { moved: 2 * state + 4 * parameters as u64, hashed: 2 * state }
    }
}

/// The line behind the bar. `left` is the time to the end, in seconds.
fn step_message(report: &StepReport, left: f64) -> String {
    let rate = report.tokens as f64 / report.seconds;
    let moved = (report.read_bytes + report.written_bytes) as f64 / report.seconds / 1e9;
    let stall = &report.stall;
    let waits = [
        ("disk", stall.storage),
        ("compute", stall.compute),
        ("optimizer", stall.optimizer),
        ("network", stall.network),
    ];
    let (name, seconds) = waits.into_iter().fold(waits[0], |a, b| if b.1 > a.1 { b } else { a });
    // The waits are those of the sweep, which overlaps the commit before.
    let share = (100.0 * seconds / report.seconds).min(100.0);
    format!(
        "loss {:.4}  norm {:.3}  {rate:.0} tok/s  {moved:.2} GB/s of state  {share:.0} % waiting for {name}  ETA {}",
        report.loss,
        report.grad_norm,
        indicatif::HumanDuration(Duration::from_secs_f64(left.clamp(0.0, 1e9))),
    )
}

impl Observer for RunObserver {
    fn step(&self, report: &StepReport) {
        self.measure(report);
        self.record(&step_line(report, ProcessMemory::sample().rss_bytes()));
        if self.show == Show::Bar {
            self.show_step(report);
        }
    }

    fn event(&self, event: &Event) {
        self.record(&event_line(event));
        match event {
            Event::Aborted { step, reason, again: true, .. } => {
                self.say(&format!("step {step} is tried again: {reason}"));
            }
            Event::Restarted { actor, reason } => {
                self.metrics.actor_restarted(actor);
                self.say(&format!("actor {actor} was restarted: {reason}"));
            }
            Event::Redone { .. } => {}
            Event::Paused { step, reason } => {
                self.warn(&format!("step {step} waits: {reason}; it begins when there is room"));
            }
            Event::Resumed { step } => self.say(&format!("step {step} begins: there is room")),
            Event::Skipped { step, reason } => {
                self.say(&format!("step {step} was skipped: {reason}"));
            }
            Event::Locked { step, layers } => {
                self.say(&format!("locked from step {} on: {}", step + 1, layers.join(", ")));
            }
            // The closing summary has the reason.
            Event::Aborted { .. } | Event::Started { .. } | Event::Ended { .. } => {}
        }
    }
}

/// A bar for work counted in bytes.
pub(crate) struct ByteBar {
    bar: ProgressBar,
}

impl ByteBar {
    pub(crate) fn new(what: &str) -> ByteBar {
        // Nothing is drawn before there is something to do.
        let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::hidden());
        let style = ProgressStyle::with_template(
            "{msg} {bar:24} {bytes}/{total_bytes} {bytes_per_sec} ETA {eta}",
        );
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        bar.set_message(what.to_owned());
        ByteBar { bar }
    }

    pub(crate) fn at(&self, done: u64, total: u64) {
        if self.bar.length() == Some(0) && total > 0 {
            self.bar.set_draw_target(ProgressDrawTarget::stderr());
        }
        self.bar.set_length(total);
        self.bar.set_position(done);
    }
}

impl Drop for ByteBar {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
