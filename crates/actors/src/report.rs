//! What a run tells whoever watches it.

use std::sync::Arc;

use schedule::End;

/// Seconds of a step in which the pipeline waited for one resource.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StallSeconds {
    /// The device was idle because weights or rows were still being read, or for `commit`.
    pub storage: f64,
    /// Of these: nothing was in flight but the syncs and the record of the step before.
    pub commit: f64,
    /// The device was busy and nothing else was in flight.
    pub compute: f64,
    /// The device was idle because a layer's update or room for a gradient was awaited.
    pub optimizer: f64,
    /// The device was idle because a peer was awaited.
    pub network: f64,
}

/// Seconds of a step by phase. Phases of neighbouring steps overlap.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PhaseSeconds {
    pub forward: f64,
    pub backward: f64,
    pub optimizer: f64,
    pub commit: f64,
}

/// Seconds that one layer took in a step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LayerSeconds {
    /// At the device.
    pub forward: f64,
    /// At the device.
    pub backward: f64,
    /// From the start of its update to the end of its writes.
    pub optimizer: f64,
}

/// One layer of a committed step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayerStep {
    /// Before clipping; zero for a locked layer.
    pub grad_norm: f64,
    /// It is not trained.
    pub locked: bool,
    /// Of a sample of its weights: the distance from what they would be without rounding since the
    /// run was opened, as a share of the way those have gone. `None` where nothing is rounded.
    pub drift: Option<f64>,
    pub seconds: LayerSeconds,
}

/// One step that counts. It is reported once, when it is durable or, where steps are committed
/// together, as soon as a later one may follow: should it have to be made again, its bits will be the
/// same.
#[derive(Clone, Debug)]
pub struct StepReport {
    pub step: u64,
    /// Last durable step.
    pub committed: u64,
    pub attempt: u64,
    /// Mean over the step's targets, in nats.
    pub loss: f64,
    /// Before clipping.
    pub grad_norm: f64,
    pub clip_factor: f32,
    pub learning_rate: f64,
    /// Rows times row length.
    pub tokens: u64,
    pub tokens_total: u64,
    /// Since the report before, or since the start.
    pub seconds: f64,
    pub read_bytes: u64,
    pub written_bytes: u64,
    pub stall: StallSeconds,
    pub phase: PhaseSeconds,
    pub layers: Vec<LayerStep>,
    /// Messages waiting in each actor's mailbox.
    pub mailbox_depths: Vec<(&'static str, usize)>,
    pub ram_used_bytes: usize,
    pub ram_peak_bytes: usize,
}

/// Something that is not a step.
#[derive(Clone, Debug)]
pub enum Event {
    Started {
        step: u64,
        last_step: u64,
    },
    /// An attempt was dropped; `again`: the step will be tried again.
    Aborted {
        step: u64,
        attempt: u64,
        reason: String,
        again: bool,
    },
    /// A step was updated as if nothing had to be clipped, and something has to: it is made again
    /// with the factor.
    Redone {
        step: u64,
        attempt: u64,
        factor: f32,
    },
    /// A step waits to begin until a reason is gone.
    Paused {
        step: u64,
        reason: String,
    },
    Resumed {
        step: u64,
    },
    /// An actor died and was started anew.
    Restarted {
        actor: &'static str,
        reason: String,
    },
    /// A guard refused a step and its rows were passed over.
    Skipped {
        step: u64,
        reason: String,
    },
    /// Layers that are not trained any more, from the step after this one on.
    Locked {
        step: u64,
        layers: Vec<String>,
    },
    Ended {
        step: u64,
        end: End,
    },
}

/// Watches a run. Called on the run's own task: must not block for long.
pub trait Observer: Send + Sync + 'static {
    fn step(&self, report: &StepReport);
    fn event(&self, event: &Event);
}

impl<O: Observer + ?Sized> Observer for Arc<O> {
    fn step(&self, report: &StepReport) {
        (**self).step(report);
    }

    fn event(&self, event: &Event) {
        (**self).event(event);
    }
}

/// How a run ended.
#[derive(Clone, Debug)]
pub struct Summary {
    pub end: End,
    /// Last durable step.
    pub step: u64,
    /// Commits of steps since the run was opened.
    pub commits: u64,
    pub read_bytes: u64,
    pub written_bytes: u64,
    pub ram_peak_bytes: usize,
    pub restarts: u64,
    /// The failure that ended the run, with all its causes.
    pub failure: Option<Arc<crate::Failure>>,
}
