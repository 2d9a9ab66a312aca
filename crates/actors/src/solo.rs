//! [`Solo`]: all actors of a run in one process.

use std::sync::{Arc, mpsc};

use compute::Device;
use data::{Rows, Sampler};
use model::{Budget, LayerTable, Limits, Precision, RunShape, Slot, Step};
use optim::{AdamW, LrSchedule};
use rayon::ThreadPool;
use schedule::{AutoLock, Guard, NodeConfig, Updates};
use store::{Scratch, TrainingStore};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::compute_actor::{ComputeActor, ComputeArgs, OpenDevice};
use crate::directory::{Directory, Ended};
use crate::fault::FaultPlan;
use crate::gate::Gate;
use crate::node_actor::{NodeActor, NodeArgs};
use crate::optimizer_actor::{OptimizerActor, OptimizerArgs, Shadow};
use crate::reply::Failure;
use crate::report::{Observer, Summary};
use crate::run_actor::{Clip, RunActor, RunArgs};
use crate::scratch::ScratchMap;
use crate::store_actor::{StoreActor, StoreArgs};
use crate::supervisor::{Restart, supervise};
use crate::watch::{Patience, Watch, keep_watch};

/// Names of the actors, as in metrics, logs and fault specifications.
pub const ACTOR_NAMES: [&str; 5] = ["run", "node", "store", "compute", "optimizer"];

/// What a run needs.
pub struct SoloConfig {
    pub store: Arc<TrainingStore>,
    /// Opens the compute device; called again if its actor dies.
    pub open_device: Arc<dyn Fn() -> Box<dyn Device> + Send + Sync>,
    pub rows: Arc<Rows>,
    pub sampler: Sampler,
    /// Of the random numbers that round weights, in layouts that do.
    pub seed: u64,
    pub shape: RunShape,
    pub limits: Limits,
    /// How exactly the device wants weights.
    pub precision: Precision,
    pub budget: Budget,
    pub threads: Arc<ThreadPool>,
    pub updates: Updates,
    /// Steps from one commit to the next; at least 1.
    pub commit_every: u64,
    /// `lr` is replaced by the schedule's.
    pub adamw: AdamW,
    pub schedule: LrSchedule,
    pub clip: Clip,
    pub guard: Guard,
    pub auto_lock: Option<AutoLock>,
    pub last_step: u64,
    pub observer: Arc<dyn Observer>,
    pub patience: Patience,
    /// Goes on over the pauses of a run.
    pub shadow: Arc<Shadow>,
    pub faults: FaultPlan,
}

impl std::fmt::Debug for SoloConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SoloConfig").field("shape", &self.shape).finish_non_exhaustive()
    }
}

/// A running job.
pub struct Solo {
    directory: Directory,
    ended: oneshot::Receiver<Ended>,
    actors: Vec<JoinHandle<()>>,
    /// Its end ends the watch.
    _watched: mpsc::Sender<()>,
}

impl std::fmt::Debug for Solo {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Solo").finish_non_exhaustive()
    }
}

impl Solo {
    /// Starts all actors and the run. Must be called inside a tokio runtime.
    ///
    /// # Errors
    /// `Failure::Store` if the disk has no room for what the limits keep out of RAM,
    /// `Failure::AllLocked` if no layer trains.
    pub fn start(config: SoloConfig) -> Result<Solo, Failure> {
        if config.store.state().layers.iter().all(|layer| layer.locked) {
            return Err(Failure::AllLocked);
        }
        let waiting = if config.commit_every > 1 { config.limits.waiting_bytes } else { 0 };
        config.store.let_wait(waiting);
        let map = Arc::new(ScratchMap::new(&config.limits, config.shape.micros()));
        let scratch = match map.bytes() {
            0 => None,
            bytes => Some(Arc::new(config.store.scratch("spill", bytes)?)),
        };
        let (directory, ended) = Directory::new();
        let (watch, patience) = (Watch::default(), config.patience);
        let actors = spawn_all(&directory, config, scratch, &map, &watch);
        let starting = directory.clone();
        tokio::spawn(async move { starting.start().await });
        let (watched, closed) = mpsc::channel();
        let watching = directory.clone();
        // A thread of its own: what it watches may hold up the runtime's.
        std::thread::spawn(move || keep_watch(&watch, &watching, patience, &closed));
        Ok(Solo { directory, ended, actors, _watched: watched })
    }

    /// Finishes what is about to commit, drops the rest, ends.
    pub fn stop(&self) {
        self.directory.stop();
    }

    /// Something that stops the run from anywhere.
    pub fn stopper(&self) -> impl Fn() + Send + Sync + 'static {
        let directory = self.directory.clone();
        move || directory.stop()
    }

    /// Waits for the end of the run and of every actor, unless one is stuck: after
    /// [`Failure::Stuck`] the process has to end.
    pub async fn wait(self) -> Result<Summary, Failure> {
        let ended = self.ended.await.unwrap_or(Err(Failure::Lost));
        self.directory.close();
        if matches!(ended, Err(Failure::Stuck { .. })) {
            return ended;
        }
        for actor in self.actors {
            // A supervisor that panicked has no actor left to wait for.
            let _ = actor.await;
        }
        ended
    }
}

fn spawn_all(
    directory: &Directory,
    config: SoloConfig,
    scratch: Option<Arc<Scratch>>,
    map: &Arc<ScratchMap>,
    watch: &Watch,
) -> Vec<JoinHandle<()>> {
    let table = Arc::new(config.store.table().clone());
    // No machine has more than this in flight: a few visits of all microbatches.
    let capacity = 1024 + 64 * config.shape.micros();
    let here = || directory.clone();
    let store = supervise::<StoreActor, _>(
        here(),
        Directory::store,
        capacity,
        store_args(&config, scratch, watch),
        Restart::Always,
    );
    let compute = supervise::<ComputeActor, _>(
        here(),
        Directory::compute,
        capacity,
        compute_args(&config, watch),
        Restart::Always,
    );
    let optimizer = supervise::<OptimizerActor, _>(
        here(),
        Directory::optimizer,
        capacity,
        optimizer_args(directory, &config, &table, map, watch),
        Restart::Always,
    );
    let node = supervise::<NodeActor, _>(
        here(),
        Directory::node,
        capacity,
        node_args(directory, &config, &table, map),
        Restart::Never,
    );
    let run = supervise::<RunActor, _>(
        here(),
        Directory::run,
        capacity,
        run_args(directory, config, &table, watch),
        Restart::Never,
    );
    vec![
        tokio::spawn(store),
        tokio::spawn(compute),
        tokio::spawn(optimizer),
        tokio::spawn(node),
        tokio::spawn(run),
    ]
}

fn store_args(config: &SoloConfig, scratch: Option<Arc<Scratch>>, watch: &Watch) -> StoreArgs {
    StoreArgs {
        store: Arc::clone(&config.store),
        scratch,
        gate: Gate::default(),
        watch: watch.clone(),
        faults: config.faults.clone(),
    }
}

fn compute_args(config: &SoloConfig, watch: &Watch) -> ComputeArgs {
    let open: OpenDevice = Arc::clone(&config.open_device);
    ComputeArgs { open, watch: watch.clone(), faults: config.faults.clone() }
}

fn optimizer_args(
    directory: &Directory,
    config: &SoloConfig,
    table: &Arc<LayerTable>,
    map: &Arc<ScratchMap>,
    watch: &Watch,
) -> OptimizerArgs {
    OptimizerArgs {
        directory: directory.clone(),
        table: Arc::clone(table),
        store: Arc::clone(&config.store),
        budget: config.budget.clone(),
        threads: Arc::clone(&config.threads),
        map: Arc::clone(map),
        chunks_in_flight: config.limits.optimizer_chunks,
        weigh: config.auto_lock.is_some(),
        shadow: Arc::clone(&config.shadow),
        gate: Gate::default(),
        watch: watch.clone(),
        faults: config.faults.clone(),
    }
}

fn node_args(
    directory: &Directory,
    config: &SoloConfig,
    table: &Arc<LayerTable>,
    map: &Arc<ScratchMap>,
) -> NodeArgs {
    let state = config.store.state();
    let live: Vec<Slot> = state.layers.iter().map(|l| l.slot).collect();
    NodeArgs {
        directory: directory.clone(),
        table: Arc::clone(table),
        config: NodeConfig {
            micros: config.shape.micros() as u32,
            limits: config.limits.clone(),
            fused_wait: config.clip.fused_wait(),
            live,
        },
        map: Arc::clone(map),
        adam_steps: state.layers.iter().map(|l| l.t).collect(),
        precision: config.precision,
        seed: config.seed,
        faults: config.faults.clone(),
    }
}

fn run_args(
    directory: &Directory,
    config: SoloConfig,
    table: &Arc<LayerTable>,
    watch: &Watch,
) -> RunArgs {
    RunArgs {
        directory: directory.clone(),
        counters: config.store.counters(),
        state: config.store.state(),
        store: config.store,
        table: Arc::clone(table),
        rows: config.rows,
        sampler: config.sampler,
        shape: config.shape,
        adamw: config.adamw,
        schedule: config.schedule,
        clip: config.clip,
        guard: config.guard,
        auto_lock: config.auto_lock,
        updates: config.updates,
        commit_every: config.commit_every,
        last_step: Step(config.last_step),
        budget: config.budget,
        observer: config.observer,
        watch: watch.clone(),
        faults: config.faults,
    }
}
