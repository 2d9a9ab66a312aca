//! What the training examples share: a text becomes rows, rows train a store, losses come back.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use actors::{Clip, Event, FaultPlan, Observer, Patience, Solo, SoloConfig, StepReport};
use anyhow::ensure;
use compute::{ComputeDtype, CpuDevice, Device, MicroShape};
use data::{Order, Plan, Rows, Sampler, Tokenizer};
use model::{Budget, Limits, ModelConfig, RunShape, Wait};
use optim::{AdamW, LrSchedule, Schedule};
use rayon::ThreadPoolBuilder;
use schedule::{End, Guard, Policy};
use store::{TrainingStore, mmap_engine};

/// Threads that wait for the disk.
const IO_THREADS: usize = 2;

/// What a training run is told.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lesson {
    pub(crate) shape: RunShape,
    pub(crate) steps: u64,
    pub(crate) learning_rate: f64,
    /// The whole budget of heap memory.
    pub(crate) ram_bytes: usize,
}

/// Trains the store in `dir` on a `.txt` file; returns the loss of every committed step, in nats.
pub(crate) fn train(dir: &Path, text: PathBuf, lesson: &Lesson) -> anyhow::Result<Vec<f64>> {
    let budget = Budget::new(lesson.ram_bytes);
    let (store, _) =
        TrainingStore::open(mmap_engine(IO_THREADS, true), dir, budget.clone(), Duration::ZERO)?;
    let config = ModelConfig::from_json(store.config_json())?;
    let rows = token_rows(dir, &config, text, lesson.shape.seq_len)?;
    let losses = Arc::new(Losses::default());
    let solo_config = configure(store, config, rows, budget, lesson, losses.clone())?;

    let store = Arc::clone(&solo_config.store);
    let runtime = tokio::runtime::Runtime::new()?;
    let summary =
        runtime.block_on(async { anyhow::Ok(Solo::start(solo_config)?.wait().await?) })?;
    // The runtime's end drops whatever task still holds the store.
    drop(runtime);
    if let Some(store) = Arc::into_inner(store) {
        store.close()?;
    }
    ensure!(summary.end == End::Completed, "the run ended as {:?}", summary.end);
    let losses = losses.0.lock().unwrap_or_else(PoisonError::into_inner);
    Ok(losses.clone())
}

fn token_rows(
    dir: &Path,
    config: &ModelConfig,
    text: PathBuf,
    seq_len: usize,
) -> anyhow::Result<Rows> {
    let tokenizer = Tokenizer::load(dir)?;
    let file = dir.join("tokens/rows.bin");
    let plan = Plan {
        paths: &[text],
        tokenizer: Some(&tokenizer),
        eos: config.eos_token,
        seq_len: seq_len as u32,
        vocab_size: config.vocab_size as u32,
    };
    data::prepare(&plan, &file, &mut |_| {})?;
    Ok(Rows::open(file)?)
}

fn configure(
    store: TrainingStore,
    config: ModelConfig,
    rows: Rows,
    budget: Budget,
    lesson: &Lesson,
    losses: Arc<Losses>,
) -> anyhow::Result<SoloConfig> {
    let shape = lesson.shape;
    let micro = MicroShape { rows: shape.micro_rows, seq_len: shape.seq_len };
    let (dtype, layout) = (ComputeDtype::F32, store.layout());
    let workspace = |tiling| compute::workspace(&config, dtype, layout, micro, tiling);
    let ram_bytes = budget.total_bytes();
    let limits = Limits::new(store.table(), layout, shape, workspace, Wait::Model, 1, ram_bytes)?;
    let order = Order { seed: 0, rows: rows.rows(), shuffle: true };
    let threads = Arc::new(ThreadPoolBuilder::new().build()?);
    let (device_budget, device_threads) = (budget.clone(), Arc::clone(&threads));
    let open_device = move || {
        let (budget, threads) = (device_budget.clone(), Arc::clone(&device_threads));
        Box::new(CpuDevice::new(&config, ComputeDtype::F32, budget, threads)) as Box<dyn Device>
    };
    Ok(SoloConfig {
        store: Arc::new(store),
        open_device: Arc::new(open_device),
        rows: Arc::new(rows),
        seed: order.seed,
        sampler: Sampler::new(order, shape.batch_rows as u64),
        shape,
        limits,
        precision: dtype.precision(),
        budget,
        threads,
        commit_every: 1,
        updates: Policy::Deferred.into(),
        adamw: AdamW {
            lr: lesson.learning_rate,
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 0.0,
        },
        schedule: LrSchedule {
            kind: Schedule::Constant,
            peak: lesson.learning_rate,
            warmup_steps: 0,
            total_steps: lesson.steps,
            min_ratio: 1.0,
        },
        clip: Clip::Global(1.0),
        guard: Guard::default(),
        auto_lock: None,
        last_step: lesson.steps,
        observer: losses,
        patience: Patience::default(),
        shadow: Arc::default(),
        faults: FaultPlan::new(Vec::new()),
    })
}

#[derive(Default)]
struct Losses(Mutex<Vec<f64>>);

impl Observer for Losses {
    fn step(&self, report: &StepReport) {
        println!(
            "step {:>3}  loss {:.4}  gradient norm {:.3}  {:.0} tokens/s",
            report.step,
            report.loss,
            report.grad_norm,
            report.tokens as f64 / report.seconds
        );
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(report.loss);
    }

    fn event(&self, event: &Event) {
        tracing::debug!(?event);
    }
}
