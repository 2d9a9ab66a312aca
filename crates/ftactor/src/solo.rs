//! `ftactor solo`: opens store, data, device and metrics, runs the actors, closes cleanly.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use actors::{
    ACTOR_NAMES, Failure, FaultPlan, Forward, Observer, Patience, Shadow, Solo, SoloConfig, Summary,
};
use anyhow::Context;
use data::{Rows, Sampler, Tokenizer};
use model::{Budget, LayerSpec, Limits, ModelConfig};
use schedule::{End, SKIPS_IN_A_ROW, Updates};
use store::{ReadingStore, State, StoreError, TrainingStore, show_bytes};
use telemetry::{BlockDevice, Metrics, Server};

use crate::cli::SoloArgs;
use crate::exit::{self, Refused, refuse};
use crate::interrupt::Interrupt;
use crate::log::StepLog;
use crate::options::{GuardChoice, TrainOptions, show_ram};
use crate::out::{errln, out, outln};
use crate::progress::{ByteBar, OptimizerBytes, RunObserver, Show};
use crate::run_record::RunRecord;
use crate::run_start::{How, Run, decide, finish_rollback, limits, order, ram_bytes, settle};
use crate::{demo, effective, layers, machine, run_start, snapshots, supervise, text};

/// How long a closing run waits for threads to let go of the store.
const LET_GO: Duration = Duration::from_secs(2);
pub(crate) const METRICS_ADDRESS: &str = "127.0.0.1:9464";

pub(crate) fn run(args: &SoloArgs) -> anyhow::Result<ExitCode> {
    let options = args.options.with_file(args.options_file.as_deref())?;
    if args.print_config {
        out!("{}", effective::print_config(args, &options)?);
        return Ok(ExitCode::SUCCESS);
    }
    if args.demo {
        return demo::run(args, &options);
    }
    let Some(dir) = &args.store else { return refuse("--store DIR is missing") };
    if args.supervise {
        return supervise::run(args, dir);
    }
    supervise::follow_parent()?;
    let show = show(args);
    let ended = train(dir, &args.data, &options, args, show)?;
    Ok(ended.exit_code())
}

fn show(args: &SoloArgs) -> Show {
    match (args.quiet, args.json) {
        (_, true) => Show::Json,
        (true, false) => Show::Nothing,
        (false, false) => Show::Bar,
    }
}

/// How training ended.
pub(crate) enum Ended {
    /// The run was complete before it began.
    Already,
    Run {
        summary: Summary,
    },
}

impl Ended {
    /// All steps of the run are committed.
    pub(crate) fn is_complete(&self) -> bool {
        match self {
            Ended::Already => true,
            Ended::Run { summary } => summary.end == End::Completed,
        }
    }

    /// There was nothing left to do.
    pub(crate) fn was_complete(&self) -> bool {
        matches!(self, Ended::Already)
    }

    pub(crate) fn exit_code(&self) -> ExitCode {
        match self {
            Ended::Already => ExitCode::SUCCESS,
            Ended::Run { summary } => match (summary.end, &summary.failure) {
                (End::Completed, _) => ExitCode::SUCCESS,
                (End::Stopped, _) => ExitCode::from(exit::INTERRUPTED),
                (End::Failed, Some(failure)) => ExitCode::from(exit::failure_code(failure)),
                (End::Failed, None) => ExitCode::from(exit::FAILED),
            },
        }
    }
}

/// Everything that is open while a run lasts.
struct Session {
    store: Arc<TrainingStore>,
    config: ModelConfig,
    record: RunRecord,
    rows: Arc<Rows>,
    budget: Budget,
    limits: Limits,
    updates: Updates,
    threads: Arc<rayon::ThreadPool>,
    patience: Patience,
    shadow: Arc<Shadow>,
}

impl Session {
    fn sampler(&self) -> Sampler {
        let record = &self.record;
        let order = order(self.rows.rows(), record.seed, !record.no_shuffle);
        Sampler::new(order, record.batch_rows as u64)
    }
}

/// Trains until the run is complete, interrupted or failed, and closes the store.
pub(crate) fn train(
    dir: &Path,
    data: &[PathBuf],
    options: &TrainOptions,
    args: &SoloArgs,
    show: Show,
) -> anyhow::Result<Ended> {
    let ram_bytes = ram_bytes(options)?;
    let budget = Budget::new(ram_bytes);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("start the async runtime")?;
    let interrupt = runtime.block_on(async { Interrupt::listen() });
    let faults = FaultPlan::new(args.fault.clone());
    let io =
        machine::failing(machine::training_engine(options.io, machine::store_bytes(dir)), &faults);
    let (store, recovery) =
        machine::patiently(|wait| TrainingStore::open(Arc::clone(&io), dir, budget.clone(), wait))?;
    drop(io);
    machine::tell(&recovery, store.state().step);
    finish_rollback(&store)?;
    remove_temporary_rows(dir);
    let config = ModelConfig::from_json(store.config_json())
        .with_context(|| format!("config.json of {}", dir.display()))?;
    let Some(run) = decide(&store, &config, data, options, args.new_run, ram_bytes)? else {
        let step = store.state().step.0;
        store.close()?;
        if show != Show::Json {
            outln!(
                "the run is complete: {step} steps; give more --steps, or --new-run --data PATH to start again"
            );
        }
        return Ok(Ended::Already);
    };
    check_locked(&store)?;
    // Those that are locked now are compared on the way.
    if let Some(text) = &options.lock {
        store.lock(&layers::parse(text, store.table())?)?;
    }
    let mut session = open_session(store, config, run, options, budget)?;
    session.patience = args.stuck_after.map_or_else(Patience::default, Patience::of_seconds);
    if args.no_prefetch {
        let limits = &mut session.limits;
        let largest = session.store.table().largest_tile(limits.tiling);
        (limits.weight_bytes, limits.optimizer_chunks) = (largest * limits.bytes_per_weight, 1);
    }
    let summary = run_session(session, runtime, &interrupt, options, &faults, show)?;
    faults.write_record().context("write the record of faults")?;
    if let Some(Failure::NotFinite { .. } | Failure::Update { .. }) = summary.failure.as_deref() {
        // Damaged weights give such losses too, and then that is what has to be told.
        let io = machine::engine(machine::store_bytes(dir));
        ReadingStore::open(io, dir, machine::LOCK_WAIT)?.check_weights()?;
    }
    Ok(Ended::Run { summary })
}

fn check_locked(store: &TrainingStore) -> anyhow::Result<()> {
    let bar = ByteBar::new("check locked layers");
    Ok(store.check_locked(|done, total| bar.at(done, total))?)
}

/// Leftovers of processes that were killed while they tokenised; nobody else holds the store.
fn remove_temporary_rows(dir: &Path) {
    if let Err(error) = data::remove_temporaries(&dir.join("tokens")) {
        tracing::info!(%error, "leftovers in tokens/ stay");
    }
}

fn open_session(
    store: TrainingStore,
    config: ModelConfig,
    run: Run,
    options: &TrainOptions,
    budget: Budget,
) -> anyhow::Result<Session> {
    let Run { record, rows, note } = run;
    let updates = record.updates(options.update)?;
    let state = (store.table(), store.layout());
    // A new one was refused before, if it does not fit.
    let how = How { updates, interval: options.recompute_interval(), goes_on: true };
    let limits = limits(state, &config, &record, how, budget.total_bytes())?;
    let locked: Vec<bool> = store.state().layers.iter().map(|layer| layer.locked).collect();
    let when = (updates, options.commit_every());
    if let Some(why) = run_start::seldom_for_nothing(state, &record, &limits, when, &locked) {
        errln!("note: {why}");
    }
    if let Some(note) = note {
        errln!("note: {note}");
    }
    let updates = run_start::settled(updates, &limits, options.commit_every());
    Ok(Session {
        threads: machine::threads(options.threads)?,
        store: Arc::new(store),
        config,
        record,
        rows: Arc::new(rows),
        budget,
        limits,
        updates,
        patience: Patience::default(),
        shadow: Arc::default(),
    })
}

fn run_session(
    mut session: Session,
    runtime: tokio::runtime::Runtime,
    interrupt: &Interrupt,
    options: &TrainOptions,
    faults: &FaultPlan,
    show: Show,
) -> anyhow::Result<Summary> {
    let metrics = metrics(&session);
    let server = runtime.block_on(serve_metrics(options, &metrics))?;
    let log = options.log.as_deref().map(StepLog::open).transpose()?;
    settle(&session.store, &mut session.record)?;
    let first = session.store.state().step.0;
    let (table, layout) = (session.store.table(), session.store.layout());
    let moved = |layer: &LayerSpec| OptimizerBytes::of(layer.elements(), layout);
    let layers = table.layers().iter().map(moved).collect();
    let last = session.record.steps;
    let observer = RunObserver::new(show, first, last, layers, log, metrics);
    let observer = Arc::new(observer);
    if first > 0 {
        observer.say(&format!("goes on behind step {first} of {last}"));
    }
    let result = run_segments(&runtime, interrupt, &session, options, faults, &observer);
    observer.finish();
    if let Some(server) = server {
        runtime.block_on(server.shutdown());
    }
    let summary = result?;
    // The runtime's end drops whatever blocking task still holds the store.
    drop(runtime);
    close(session, &summary, show)?;
    Ok(summary)
}

fn metrics(session: &Session) -> Metrics {
    let metrics = Metrics::new(env!("CARGO_PKG_VERSION"), &ACTOR_NAMES);
    let names: Vec<String> =
        session.store.table().layers().iter().map(|l| l.name.clone()).collect();
    metrics.set_layers(&names);
    let state = session.store.state();
    metrics.run_opened(state.step.0, state.tokens_total);
    metrics.ram_budget(session.budget.total_bytes() as u64);
    for drive in session.store.drives() {
        let device = BlockDevice::behind(drive);
        if let Err(why) = device.and_then(|device| metrics.watch_device(device)) {
            tracing::info!(%why, drive = %drive.display(), "no block-device metrics");
        }
    }
    metrics
}

async fn serve_metrics(
    options: &TrainOptions,
    metrics: &Metrics,
) -> anyhow::Result<Option<Server>> {
    let wanted = options.metrics.as_deref();
    if wanted == Some("off") {
        return Ok(None);
    }
    match telemetry::serve(wanted.unwrap_or(METRICS_ADDRESS), metrics.clone()).await {
        Ok(server) => Ok(Some(server)),
        // Only an address that was asked for is worth ending the run for.
        Err(error) if wanted.is_none() => {
            errln!("warning: {error}");
            Ok(None)
        }
        Err(error) => Err(Refused(error.to_string()).into()),
    }
}

/// Runs to the next measurement or sample, takes it, goes on.
fn run_segments(
    runtime: &tokio::runtime::Runtime,
    interrupt: &Interrupt,
    session: &Session,
    options: &TrainOptions,
    faults: &FaultPlan,
    observer: &Arc<RunObserver>,
) -> anyhow::Result<Summary> {
    let snapshot_every = snapshots::interval(options, &session.sampler())?;
    let mut total: Option<Summary> = None;
    loop {
        let step = session.store.state().step.0;
        let until = next_pause(step, options, snapshot_every).min(session.record.steps);
        let config = solo_config(session, options, until, observer, faults)?;
        let summary = runtime
            .block_on(async {
                let solo = Solo::start(config)?;
                interrupt.stops(solo.stopper());
                solo.wait().await
            })
            .map_err(|failure| failed(failure, session))?;
        let summary = add(total.take(), summary);
        if summary.end == End::Completed
            && let Err(error) = measure(session, options, observer, interrupt, summary.step)
        {
            // A measurement is worth less than the run.
            observer.warn(&format!("step {}: not measured: {error:#}", summary.step));
        }
        if summary.end == End::Completed
            && snapshot_every.is_some_and(|every| summary.step.is_multiple_of(every))
        {
            snapshots::take(&session.store, session.record.run, options.keep_snapshots, observer);
        }
        if summary.end != End::Completed || summary.step >= session.record.steps {
            return Ok(summary);
        }
        total = Some(summary);
    }
}

/// A run that ended without a summary. After [`Failure::Stuck`] a thread of this process never ends,
/// so the process does, as if it were killed.
fn failed(failure: Failure, session: &Session) -> anyhow::Error {
    if let Failure::Stuck { .. } = failure {
        errln!("error: {failure}");
        errln!("{}", go_on(session.store.dir()));
        std::process::exit(i32::from(exit::FAILED));
    }
    anyhow::Error::new(failure)
}

/// What to do after a failure that may not come again.
fn go_on(dir: &Path) -> String {
    format!("every committed step is kept; go on with: ftactor solo --store {}", dir.display())
}

fn next_pause(step: u64, options: &TrainOptions, snapshot_every: Option<u64>) -> u64 {
    let every = [options.eval_every, options.sample_every, snapshot_every];
    let next = every.into_iter().flatten().filter(|n| *n > 0).map(|n| (step / n + 1) * n);
    next.min().unwrap_or(u64::MAX)
}

fn add(before: Option<Summary>, now: Summary) -> Summary {
    let Some(before) = before else { return now };
    Summary {
        commits: before.commits + now.commits,
        read_bytes: before.read_bytes + now.read_bytes,
        written_bytes: before.written_bytes + now.written_bytes,
        restarts: before.restarts + now.restarts,
        ..now
    }
}

fn solo_config(
    session: &Session,
    options: &TrainOptions,
    last_step: u64,
    observer: &Arc<RunObserver>,
    faults: &FaultPlan,
) -> anyhow::Result<SoloConfig> {
    let record = &session.record;
    let (config, budget) = (session.config.clone(), session.budget.clone());
    let threads = Arc::clone(&session.threads);
    let dtype = record.dtype();
    let open_device = Arc::new(move || machine::cpu(&config, dtype, &budget, &threads));
    let observer: Arc<dyn Observer> = observer.clone();
    Ok(SoloConfig {
        store: Arc::clone(&session.store),
        open_device,
        rows: Arc::clone(&session.rows),
        sampler: session.sampler(),
        seed: record.seed,
        shape: record.shape(),
        limits: session.limits.clone(),
        precision: record.dtype().precision(),
        budget: session.budget.clone(),
        threads: Arc::clone(&session.threads),
        updates: session.updates,
        commit_every: options.commit_every(),
        adamw: record.adamw(),
        schedule: record.lr_schedule()?,
        clip: record.clip_rule()?,
        guard: record.guard(),
        auto_lock: record.auto_lock(session.store.table().len())?,
        last_step,
        observer,
        patience: session.patience,
        shadow: Arc::clone(&session.shadow),
        faults: faults.clone(),
    })
}

/// Loss on the evaluation data and a sample, if it is time.
fn measure(
    session: &Session,
    options: &TrainOptions,
    observer: &RunObserver,
    interrupt: &Interrupt,
    step: u64,
) -> anyhow::Result<()> {
    let stop = || interrupt.is_requested();
    let due =
        |every: Option<u64>| every.is_some_and(|n| n > 0 && step > 0 && step.is_multiple_of(n));
    let forward = || {
        let device = machine::cpu(
            &session.config,
            session.record.dtype(),
            &session.budget,
            &session.threads,
        );
        Forward::new(&*session.store, device)
    };
    if due(options.eval_every) {
        let rows = text::eval_rows(
            session.store.dir(),
            &session.config,
            &options.eval_data,
            session.record.seq_len,
        )?;
        let Some(result) = text::evaluate(&mut forward(), &rows, None, &stop)? else {
            return Ok(());
        };
        observer.say(&format!("step {step}: eval loss {:.4}", result.loss()));
        observer.record(&serde_json::json!({"event": "eval", "step": step, "loss": result.loss(), "targets": result.targets}));
    }
    if let (true, Some(prompt)) = (due(options.sample_every), &options.sample_prompt) {
        let tokenizer = Tokenizer::load(session.store.dir())?;
        let sampling = text::Sampling {
            max_tokens: 48,
            temperature: 0.8,
            seed: step,
            max_positions: session.config.max_positions,
        };
        let sample = text::generate(&mut forward(), &tokenizer, prompt, &sampling, &stop)?;
        observer.say(&format!("step {step}: {prompt}{sample}"));
        observer.record(
            &serde_json::json!({"event": "sample", "step": step, "prompt": prompt, "text": sample}),
        );
    }
    Ok(())
}

/// Closes the store and says what was done.
fn close(session: Session, summary: &Summary, show: Show) -> anyhow::Result<()> {
    let state = session.store.state();
    let state_bytes = session.store.layout().bytes(session.store.table().elements()) as u64;
    let (dir, guard) = (session.store.dir().to_path_buf(), session.record.guard);
    match sole_owner(session.store) {
        Some(store) => store.close().or_else(|error| match (summary.end, error) {
            // A failed run has its own error to tell.
            (End::Failed, _) => Ok(()),
            (_, error @ StoreError::NoSpace { .. }) => {
                errln!(
                    "warning: {error}; every step is kept, and with some room `ftactor inspect --store \
                     {}` lets other software load the store",
                    dir.display()
                );
                Ok(())
            }
            (End::Completed | End::Stopped, error) => Err(error),
        })?,
        None => tracing::warn!("the store is still used; its index is not rewritten"),
    }
    match show {
        Show::Json => outln!("{}", summary_json(summary, &state)),
        Show::Bar | Show::Nothing => print_summary(summary, &state, state_bytes, &dir, guard),
        Show::Silent => {}
    }
    Ok(())
}

/// The store, once nobody else holds it: an engine's thread lets go just after its last answer.
fn sole_owner(mut store: Arc<TrainingStore>) -> Option<TrainingStore> {
    let deadline = Instant::now() + LET_GO;
    loop {
        store = match Arc::try_unwrap(store) {
            Ok(store) => return Some(store),
            Err(shared) => shared,
        };
        if Instant::now() >= deadline {
            return None;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn summary_json(summary: &Summary, state: &State) -> serde_json::Value {
    serde_json::json!({
        "event": "summary",
        "end": format!("{:?}", summary.end).to_lowercase(),
        "step": summary.step,
        "loss": state.loss,
        "commits": summary.commits,
        "read_bytes": summary.read_bytes,
        "written_bytes": summary.written_bytes,
        "ram_peak_bytes": summary.ram_peak_bytes,
        "restarts": summary.restarts,
        "failure": summary.failure.as_ref().map(ToString::to_string),
    })
}

fn print_summary(
    summary: &Summary,
    state: &State,
    state_bytes: u64,
    dir: &Path,
    guard: GuardChoice,
) {
    let ended = match summary.end {
        End::Completed => "done",
        End::Stopped => "stopped",
        End::Failed => "failed",
    };
    outln!(
        "{ended} at step {}, loss {:.4}: {} commits, {} read, {} written, {} of RAM for {} of state",
        summary.step,
        state.loss,
        summary.commits,
        show_bytes(summary.read_bytes),
        show_bytes(summary.written_bytes),
        show_ram(summary.ram_peak_bytes as u64),
        show_bytes(state_bytes),
    );
    if let Some(failure) = summary.failure.as_ref().filter(|_| summary.end == End::Failed) {
        errln!("error: {failure}");
    }
    let store = dir.display();
    match summary.failure.as_deref().filter(|_| summary.end == End::Failed) {
        None if summary.end == End::Completed => {}
        Some(Failure::NotFinite { .. } | Failure::Update { .. } | Failure::Spike { .. })
            if guard == GuardChoice::Skip =>
        {
            outln!(
                "committed steps are kept; {SKIPS_IN_A_ROW} steps in a row were refused, so that passing \
                 over more is no way out: go back to a snapshot, or start again from the weights with a \
                 lower --lr: ftactor solo --store {store} --new-run --data PATH --lr X"
            );
        }
        Some(Failure::NotFinite { .. } | Failure::Update { .. }) => outln!(
            "committed steps are kept; pass such steps over with --guard skip, or start again from \
             their weights with a lower --lr: ftactor solo --store {store} --new-run --data PATH --lr X"
        ),
        Some(Failure::Spike { .. }) => outln!(
            "committed steps are kept; pass such steps over with --guard skip, or let more pass with a \
             higher --loss-spike: ftactor solo --store {store} --guard skip"
        ),
        Some(failure) if exit::failure_code(failure) == exit::DAMAGED => {
            errln!("{}", exit::DAMAGE_REMEDY);
        }
        _ => outln!("{}", go_on(dir)),
    }
}
