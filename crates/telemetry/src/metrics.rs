//! [`Metrics`]: what a run reports, as plain method calls, and the text that Prometheus scrapes.
//!
//! Invariants:
//! - every instance has a registry of its own; clones share it;
//! - every series is there from the start: per layer from [`Metrics::set_layers`], per device from
//!   [`Metrics::watch_device`]; what no step has measured yet is NaN;
//! - a layer or actor that was not announced is not counted, so labels stay bounded;
//! - durations that are negative or not finite count as zero: counters only grow.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use prometheus::{Counter, Gauge, IntCounter, Registry, TextEncoder};

use crate::block_device::{BlockDevice, DeviceSample, Unavailable};
use crate::labels::{MemoryPurpose, Phase, Resource};
use crate::process::ProcessMemory;
use crate::series::Series;

/// Scrapes closer together than this share one busy ratio: kernel ticks are too coarse for less.
const MIN_SAMPLE_INTERVAL: Duration = Duration::from_millis(100);

/// Every metric of one trainer; cheap to clone, safe to use from any thread.
#[derive(Debug, Clone)]
pub struct Metrics {
    inner: Arc<Inner>,
}

/// What a step reports.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepFacts {
    /// The last step that is durable.
    pub step: u64,
    /// Mean loss per target token, in nats.
    pub loss: f64,
    /// Gradient norm before clipping.
    pub grad_norm: f64,
    /// Learning rate of the step.
    pub learning_rate: f64,
    /// Tokens of the step: rows x sequence length.
    pub tokens: u64,
    /// Seconds since the report before.
    pub seconds: f64,
}

#[derive(Debug)]
struct Inner {
    registry: Registry,
    series: Series,
    phases: [Counter; Phase::ALL.len()],
    stalls: [Counter; Resource::ALL.len()],
    host_memory: [IntCounter; MemoryPurpose::ALL.len()],
    actors: HashMap<&'static str, ActorSeries>,
    layers: RwLock<Vec<LayerSeries>>,
    devices: Mutex<Vec<Watched>>,
}

#[derive(Debug)]
struct ActorSeries {
    restarts: IntCounter,
    mailbox_depth: Gauge,
}

#[derive(Debug)]
struct LayerSeries {
    locked: Gauge,
    grad_norm: Gauge,
    seconds: [Counter; Phase::ALL.len()],
}

#[derive(Debug)]
struct Watched {
    device: BlockDevice,
    last: DeviceSample,
    read_bytes: IntCounter,
    written_bytes: IntCounter,
    busy_ratio: Gauge,
}

impl Metrics {
    /// All series of a trainer of this `version` with these `actors`.
    pub fn new(version: &str, actors: &[&'static str]) -> Metrics {
        let registry = Registry::new();
        let series = Series::register(&registry, ProcessMemory::sample().rss_bytes().is_some());
        series.build_info.with_label_values(&[version]).set(1.0);
        for unknown in [&series.loss, &series.grad_norm, &series.learning_rate] {
            unknown.set(f64::NAN);
        }
        let inner = Inner {
            phases: Phase::ALL.map(|phase| series.phase_seconds.with_label_values(&[phase.name()])),
            stalls: Resource::ALL
                .map(|resource| series.stall_seconds.with_label_values(&[resource.name()])),
            host_memory: MemoryPurpose::ALL
                .map(|purpose| series.host_memory_bytes.with_label_values(&[purpose.name()])),
            actors: actors.iter().map(|actor| (*actor, ActorSeries::new(&series, actor))).collect(),
            layers: RwLock::default(),
            devices: Mutex::default(),
            registry,
            series,
        };
        Metrics { inner: Arc::new(inner) }
    }

    /// Announces the layers, in order; replaces those announced before.
    pub fn set_layers(&self, names: &[String]) {
        let series = &self.inner.series;
        let mut layers = self.inner.layers.write().unwrap_or_else(PoisonError::into_inner);
        series.layer_locked.reset();
        series.layer_grad_norm.reset();
        series.layer_seconds.reset();
        *layers = names.iter().map(|name| LayerSeries::new(series, name)).collect();
    }

    /// A run opened at its last committed `step`, after `tokens_total` tokens.
    pub fn run_opened(&self, step: u64, tokens_total: u64) {
        self.inner.series.step.set(step as f64);
        advance(&self.inner.series.tokens, tokens_total);
    }

    /// A step is durable, or will be with a later one.
    pub fn step_committed(&self, facts: &StepFacts) {
        let series = &self.inner.series;
        series.step.set(facts.step as f64);
        series.loss.set(facts.loss);
        series.grad_norm.set(facts.grad_norm);
        series.learning_rate.set(facts.learning_rate);
        series.tokens.inc_by(facts.tokens);
        series.step_seconds.observe(countable(facts.seconds));
    }

    /// A step spent `seconds` in `phase`.
    pub fn phase(&self, phase: Phase, seconds: f64) {
        self.inner.phases[phase as usize].inc_by(countable(seconds));
    }

    /// A step waited `seconds` for `resource`.
    pub fn stall(&self, resource: Resource, seconds: f64) {
        self.inner.stalls[resource as usize].inc_by(countable(seconds));
    }

    /// The store read `bytes`.
    pub fn store_read(&self, bytes: u64) {
        self.inner.series.store_read_bytes.inc_by(bytes);
    }

    /// The store wrote `bytes`.
    pub fn store_written(&self, bytes: u64) {
        self.inner.series.store_written_bytes.inc_by(bytes);
    }

    /// Making a step durable took `seconds`.
    pub fn store_commit(&self, seconds: f64) {
        self.inner.series.store_commit_seconds.observe(countable(seconds));
    }

    /// Kernels moved `bytes` through host memory.
    pub fn host_memory(&self, purpose: MemoryPurpose, bytes: u64) {
        self.inner.host_memory[purpose as usize].inc_by(bytes);
    }

    /// Layer number `layer` is locked or not; a locked one has no gradient norm (NaN).
    pub fn layer_locked(&self, layer: usize, locked: bool) {
        self.with_layer(layer, |series| {
            series.locked.set(f64::from(u8::from(locked)));
            if locked {
                series.grad_norm.set(f64::NAN);
            }
        });
    }

    /// The gradient norm of layer number `layer`, before clipping.
    pub fn layer_grad_norm(&self, layer: usize, norm: f64) {
        self.with_layer(layer, |series| series.grad_norm.set(norm));
    }

    /// Layer number `layer` spent `seconds` in `phase`.
    pub fn layer_phase(&self, layer: usize, phase: Phase, seconds: f64) {
        self.with_layer(layer, |series| series.seconds[phase as usize].inc_by(countable(seconds)));
    }

    /// The memory the run may use.
    pub fn ram_budget(&self, bytes: u64) {
        self.inner.series.ram_budget_bytes.set(bytes as f64);
    }

    /// The memory of the budget in use.
    pub fn ram_used(&self, bytes: u64) {
        self.inner.series.ram_used_bytes.set(bytes as f64);
    }

    /// An actor was started again after a failure.
    pub fn actor_restarted(&self, actor: &str) {
        if let Some(series) = self.inner.actors.get(actor) {
            series.restarts.inc();
        }
    }

    /// Messages waiting for an actor.
    pub fn mailbox_depth(&self, actor: &str, messages: usize) {
        if let Some(series) = self.inner.actors.get(actor) {
            series.mailbox_depth.set(messages as f64);
        }
    }

    /// Counts the traffic of `device` from now on, at each scrape; a device already watched is
    /// left as it is.
    ///
    /// # Errors
    /// [`Unavailable::Counters`] when its counters cannot be read.
    pub fn watch_device(&self, device: BlockDevice) -> Result<(), Unavailable> {
        let mut devices = self.inner.devices.lock().unwrap_or_else(PoisonError::into_inner);
        if devices.iter().all(|watched| watched.device.name() != device.name()) {
            devices.push(Watched::new(&self.inner.series, device)?);
        }
        Ok(())
    }

    /// Samples `/sys` and `/proc`, then prints every series in Prometheus' text format 0.0.4.
    pub fn render(&self) -> String {
        self.sample();
        let families = self.inner.registry.gather();
        // Encoding to a string fails only on a family without samples, which gathering leaves out.
        TextEncoder::new().encode_to_string(&families).unwrap_or_default()
    }

    fn sample(&self) {
        let mut devices = self.inner.devices.lock().unwrap_or_else(PoisonError::into_inner);
        devices.iter_mut().for_each(Watched::sample);
        let resident = &self.inner.series.process_resident_bytes;
        if let (Some(gauge), Some(bytes)) = (resident, ProcessMemory::sample().rss_bytes()) {
            gauge.set(bytes as f64);
        }
    }

    fn with_layer(&self, layer: usize, act: impl FnOnce(&LayerSeries)) {
        let layers = self.inner.layers.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(series) = layers.get(layer) {
            act(series);
        }
    }
}

impl ActorSeries {
    fn new(series: &Series, actor: &str) -> ActorSeries {
        ActorSeries {
            restarts: series.actor_restarts.with_label_values(&[actor]),
            mailbox_depth: series.mailbox_depth.with_label_values(&[actor]),
        }
    }
}

impl LayerSeries {
    fn new(series: &Series, name: &str) -> LayerSeries {
        let grad_norm = series.layer_grad_norm.with_label_values(&[name]);
        grad_norm.set(f64::NAN);
        LayerSeries {
            locked: series.layer_locked.with_label_values(&[name]),
            grad_norm,
            seconds: Phase::ALL
                .map(|phase| series.layer_seconds.with_label_values(&[name, phase.name()])),
        }
    }
}

impl Watched {
    fn new(series: &Series, device: BlockDevice) -> Result<Watched, Unavailable> {
        let last = device.sample()?;
        let name = &[device.name()];
        let watched = Watched {
            read_bytes: series.nvme_read_bytes.with_label_values(name),
            written_bytes: series.nvme_written_bytes.with_label_values(name),
            busy_ratio: series.nvme_busy_ratio.with_label_values(name),
            device,
            last,
        };
        watched.count(&last);
        Ok(watched)
    }

    fn sample(&mut self) {
        match self.device.sample() {
            Ok(now) => {
                self.count(&now);
                self.rate(now);
            }
            Err(error) => {
                tracing::debug!(%error, "sample block device");
                self.busy_ratio.set(f64::NAN);
            }
        }
    }

    fn count(&self, now: &DeviceSample) {
        advance(&self.read_bytes, now.read_bytes);
        advance(&self.written_bytes, now.written_bytes);
    }

    fn rate(&mut self, now: DeviceSample) {
        if now.taken_at.duration_since(self.last.taken_at) < MIN_SAMPLE_INTERVAL {
            return;
        }
        if let Some(rates) = now.rates_since(&self.last) {
            self.busy_ratio.set(rates.busy_ratio);
        }
        self.last = now;
    }
}

/// Brings a counter to a total kept elsewhere; one that went back starts again, as scrapers expect.
fn advance(counter: &IntCounter, total: u64) {
    if total < counter.get() {
        counter.reset();
    }
    counter.inc_by(total - counter.get());
}

fn countable(seconds: f64) -> f64 {
    if seconds.is_finite() { seconds.max(0.0) } else { 0.0 }
}
