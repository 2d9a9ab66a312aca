//! A run inside this process, whose device and store a test can reach.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use actors::{Clip, Event, FaultPlan, Observer, Patience, Solo, SoloConfig, StepReport, Summary};
use compute::{Command, ComputeDtype, CpuDevice, Device, Done, Gradient, MicroShape, Outcome};
use data::{Cursor, Order, Plan, Rows, Sampler, Tokenizer};
use model::{Budget, BudgetError, LayerId, Limits, ModelConfig, RunShape};
use optim::{AdamW, LrSchedule, Schedule};
use schedule::{AutoLock, Guard, Policy, Updates};
use store::{RecordKind, State, TrainingStore, blocking, mmap_engine};

use crate::lab::{Lab, Tiny};

const RAM_BYTES: usize = 64 << 20;
const SHAPE: RunShape = RunShape { batch_rows: 4, micro_rows: 2, seq_len: 16 };
const LAST_STEP: u64 = 9;

/// What the device answers wrongly.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Wrong {
    Loss,
    Gradient(LayerId),
}

/// What is asked of a run.
#[derive(Clone)]
pub(crate) struct Ask {
    pub(crate) updates: Updates,
    pub(crate) clip: Clip,
    pub(crate) last_step: u64,
    pub(crate) commit_every: u64,
    pub(crate) interval: usize,
    pub(crate) guard: Guard,
    pub(crate) auto_lock: Option<AutoLock>,
    /// The smallest memory that does.
    pub(crate) tight: bool,
    /// Steps of this process, counted from 1, and what is wrong in them.
    pub(crate) wrong: Vec<(u64, Wrong)>,
}

impl Default for Ask {
    fn default() -> Ask {
        Ask {
            updates: Policy::Deferred.into(),
            clip: Clip::None,
            last_step: LAST_STEP,
            commit_every: 1,
            interval: 1,
            guard: Guard::default(),
            auto_lock: None,
            tight: false,
            wrong: Vec::new(),
        }
    }
}

/// A run's end.
pub(crate) struct Ran {
    pub(crate) summary: Summary,
    pub(crate) state: State,
    pub(crate) steps: Vec<StepReport>,
    pub(crate) events: Vec<Event>,
}

/// A device that is wrong in some steps. Nothing may fail beside, since sweeps are counted.
struct Liar {
    inner: CpuDevice,
    wrong: Vec<(u64, Wrong)>,
    losses: Arc<AtomicU64>,
}

impl Device for Liar {
    fn enqueue(&mut self, command: Command, done: Done) {
        let micros = SHAPE.micros() as u64;
        if let Command::HeadLoss { .. } = command {
            self.losses.fetch_add(1, Ordering::Relaxed);
        }
        let step = self.losses.load(Ordering::Relaxed).div_ceil(micros);
        let wrong = |w: &Wrong| self.wrong.iter().any(|(s, x)| *s == step && same(w, x));
        let lie = match &command {
            Command::HeadLoss { .. } => wrong(&Wrong::Loss),
            Command::TakeGradient { layer, .. } => wrong(&Wrong::Gradient(*layer)),
            _ => false,
        };
        let done: Done = if lie { Box::new(|result| done(result.map(spoil))) } else { done };
        self.inner.enqueue(command, done);
    }
}

fn same(a: &Wrong, b: &Wrong) -> bool {
    match (a, b) {
        (Wrong::Loss, Wrong::Loss) => true,
        (Wrong::Gradient(a), Wrong::Gradient(b)) => a == b,
        _ => false,
    }
}

fn spoil(outcome: Outcome) -> Outcome {
    match outcome {
        Outcome::Loss(_) => Outcome::Loss(f64::NAN),
        Outcome::Gradient(Gradient::Dense { first, mut values }) => {
            if let Some(last) = values.f32s_mut().last_mut() {
                *last = f32::NAN;
            }
            Outcome::Gradient(Gradient::Dense { first, values })
        }
        other => other,
    }
}

#[derive(Default)]
struct Notes {
    steps: Mutex<Vec<StepReport>>,
    events: Mutex<Vec<Event>>,
}

impl Observer for Notes {
    fn step(&self, report: &StepReport) {
        self.steps.lock().unwrap().push(report.clone());
    }

    fn event(&self, event: &Event) {
        self.events.lock().unwrap().push(event.clone());
    }
}

/// A fresh store and its rows.
pub(crate) struct Rig {
    pub(crate) dir: String,
    rows: String,
    _lab: Lab,
}

impl Rig {
    pub(crate) fn new(model: Tiny) -> Rig {
        let lab = Lab::new();
        let (dir, rows) = (lab.store("store", model, 3), lab.path("rows.bin"));
        let tokenizer = Tokenizer::load(&dir).unwrap();
        let plan = Plan {
            paths: &[lab.text("text.txt", 80).into()],
            tokenizer: Some(&tokenizer),
            eos: None,
            seq_len: SHAPE.seq_len as u32,
            vocab_size: 259,
        };
        data::prepare(&plan, Path::new(&rows), &mut |_| {}).unwrap();
        Rig { dir, rows, _lab: lab }
    }

    fn open(&self, budget: &Budget) -> TrainingStore {
        let (engine, dir) = (mmap_engine(1, true), Path::new(&self.dir));
        // Processes that other tests start hold this one's files until they execute.
        let patience = Duration::from_secs(20);
        TrainingStore::open(engine, dir, budget.clone(), patience).unwrap().0
    }

    fn sampler(&self, rows: &Rows) -> Sampler {
        let order = Order { seed: 0, rows: rows.rows(), shuffle: true };
        Sampler::new(order, SHAPE.batch_rows as u64)
    }

    pub(crate) fn layers(&self) -> usize {
        self.open(&Budget::new(RAM_BYTES)).table().len()
    }

    /// Commits the state that `change` makes of the last one.
    pub(crate) fn restate(&self, kind: RecordKind, change: impl FnOnce(&mut State)) {
        let store = self.open(&Budget::new(RAM_BYTES));
        let mut state = store.state();
        change(&mut state);
        blocking(|done| store.commit(kind, state, done)).unwrap();
    }

    pub(crate) fn lock(&self, layers: &[usize]) {
        self.restate(RecordKind::Locked, |state| {
            layers.iter().for_each(|&layer| state.layers[layer].locked = true);
        });
    }

    /// Leaves the rows of the next step out, by hand.
    pub(crate) fn pass_over(&self) {
        let sampler = self.sampler(&Rows::open(&self.rows).unwrap());
        self.restate(RecordKind::Skipped, |state| {
            let (_, next) = sampler.batch(Cursor { epoch: state.epoch, index: state.index });
            (state.epoch, state.index) = (next.epoch, next.index);
            state.step = state.step.next();
            state.attempt.0 += 1;
            state.tokens_total += SHAPE.step_tokens() as u64;
        });
    }

    pub(crate) fn run(&self, ask: &Ask) -> Ran {
        let budget = Budget::new(RAM_BYTES);
        let notes = Arc::new(Notes::default());
        let config = self.configure(self.open(&budget), ask, budget, notes.clone());
        let store = Arc::clone(&config.store);
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let summary = runtime.block_on(async { Solo::start(config).unwrap().wait().await });
        drop(runtime);
        let state = store.state();
        close(store);
        let steps = std::mem::take(&mut *notes.steps.lock().unwrap());
        let events = std::mem::take(&mut *notes.events.lock().unwrap());
        Ran { summary: summary.unwrap(), state, steps, events }
    }

    fn configure(
        &self,
        store: TrainingStore,
        ask: &Ask,
        budget: Budget,
        observer: Arc<dyn Observer>,
    ) -> SoloConfig {
        let config = ModelConfig::from_json(store.config_json()).unwrap();
        let micro = MicroShape { rows: SHAPE.micro_rows, seq_len: SHAPE.seq_len };
        let limits = |ram_bytes| {
            let (dtype, layout) = (ComputeDtype::F32, store.layout());
            let workspace = |tiling| compute::workspace(&config, dtype, layout, micro, tiling);
            let wait = ask.updates.wait(ask.clip.fused_wait());
            Limits::new(store.table(), layout, SHAPE, workspace, wait, ask.interval, ram_bytes)
        };
        let limits = match limits(0) {
            Err(BudgetError::TooSmall { needed_bytes, .. }) if ask.tight => {
                limits(needed_bytes as usize)
            }
            _ => limits(RAM_BYTES),
        };
        let threads = Arc::new(rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap());
        let (losses, wrong) = (Arc::new(AtomicU64::new(0)), ask.wrong.clone());
        let (device_budget, device_threads) = (budget.clone(), Arc::clone(&threads));
        let open_device = move || {
            let (budget, threads) = (device_budget.clone(), Arc::clone(&device_threads));
            let inner = CpuDevice::new(&config, ComputeDtype::F32, budget, threads);
            let (wrong, losses) = (wrong.clone(), Arc::clone(&losses));
            Box::new(Liar { inner, wrong, losses }) as Box<dyn Device>
        };
        let rows = Rows::open(&self.rows).unwrap();
        SoloConfig {
            store: Arc::new(store),
            open_device: Arc::new(open_device),
            sampler: self.sampler(&rows),
            seed: 0,
            precision: ComputeDtype::F32.precision(),
            rows: Arc::new(rows),
            shape: SHAPE,
            limits: limits.unwrap(),
            budget,
            threads,
            updates: ask.updates,
            commit_every: ask.commit_every,
            adamw: AdamW { lr: 0.0, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.01 },
            schedule: LrSchedule {
                kind: Schedule::Linear,
                peak: 5e-3,
                warmup_steps: 0,
                total_steps: LAST_STEP + 1,
                min_ratio: 0.1,
            },
            clip: ask.clip,
            guard: ask.guard,
            auto_lock: ask.auto_lock,
            last_step: ask.last_step,
            observer,
            patience: Patience::default(),
            shadow: Arc::default(),
            faults: FaultPlan::new(Vec::new()),
        }
    }
}

/// Closes a store once the last thread of the run has let go of it.
fn close(mut store: Arc<TrainingStore>) {
    loop {
        match Arc::try_unwrap(store) {
            Ok(store) => return store.close().unwrap(),
            Err(shared) => store = shared,
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// What has to be equal, whatever it took to get there: cursor, weights, Adam steps, locks.
pub(crate) fn essence(state: &State) -> impl PartialEq + std::fmt::Debug + use<> {
    let layers = state.layers.iter().map(|l| (l.t, l.locked, l.hashes));
    let layers: Vec<_> = layers.collect();
    (state.step, state.epoch, state.index, state.tokens_total, layers)
}
