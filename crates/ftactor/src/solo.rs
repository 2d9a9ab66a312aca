//! `ftactor solo`: opens store, data, device and metrics, runs the actors, closes cleanly.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use actors::{ACTOR_NAMES, Failure, FaultPlan, Forward, Observer, Solo, SoloConfig, Summary};
use anyhow::Context;
use data::{Order, Rows, Sampler, Tokenizer};
use model::{Budget, BudgetError, LayerTable, Limits, ModelConfig};
use schedule::{End, Policy};
use store::{ReadingStore, State, TrainingStore};
use telemetry::{BlockDevice, Metrics, Server};

use crate::cli::SoloArgs;
use crate::exit::{self, Refused, refuse};
use crate::interrupt::Interrupt;
use crate::log::StepLog;
use crate::options::{TrainOptions, parse_size};
use crate::out::{errln, out, outln};
use crate::progress::{RunObserver, Show, human_bytes};
use crate::run_record::{Defaults, RunRecord};
use crate::{demo, machine, new_run, text};

const LOCK_WAIT: Duration = Duration::from_secs(10);
/// How long a closing run waits for threads to let go of the store.
const LET_GO: Duration = Duration::from_secs(2);
/// Peak learning rate for a store that names none.
const LR: f64 = 1e-5;
const METRICS_ADDRESS: &str = "127.0.0.1:9464";

pub(crate) fn run(args: &SoloArgs) -> anyhow::Result<ExitCode> {
    let options = args.options.with_file(args.options_file.as_deref())?;
    if args.print_config {
        out!("{}", options.to_toml()?);
        return Ok(ExitCode::SUCCESS);
    }
    if args.demo {
        return demo::run(args, &options);
    }
    let Some(dir) = &args.store else { return refuse("--store DIR is missing") };
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
    policy: Policy,
    threads: Arc<rayon::ThreadPool>,
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
    let io = machine::engine(machine::store_bytes(dir));
    let (store, recovery) = TrainingStore::open(io, dir, budget.clone(), LOCK_WAIT)?;
    machine::tell(&recovery);
    remove_temporary_rows(dir);
    let config = ModelConfig::from_json(store.config_json())
        .with_context(|| format!("config.json of {}", dir.display()))?;
    let Some(run) = decide(&store, &config, data, options, args.new_run, ram_bytes)? else {
        let step = store.state().step.0;
        store.close()?;
        if show != Show::Json {
            outln!(
                "the run is complete: {step} steps; give more --steps, or --new-run to start again"
            );
        }
        return Ok(Ended::Already);
    };
    let mut session = open_session(store, config, run, options, budget)?;
    if args.no_prefetch {
        (session.limits.weight_buffers, session.limits.optimizer_chunks) = (1, 1);
    }
    let summary = run_session(session, runtime, &interrupt, options, args, show)?;
    if let Some(Failure::NotFinite { .. }) = summary.failure.as_deref() {
        // Damaged weights give such losses too, and then that is what has to be told.
        let io = machine::engine(machine::store_bytes(dir));
        ReadingStore::open(io, dir, LOCK_WAIT)?.check_weights()?;
    }
    Ok(Ended::Run { summary })
}

/// Leftovers of processes that were killed while they tokenised; nobody else holds the store.
fn remove_temporary_rows(dir: &Path) {
    if let Err(error) = data::remove_temporaries(&dir.join("tokens")) {
        tracing::info!(%error, "leftovers in tokens/ stay");
    }
}

/// What would otherwise show only hours into the run.
fn check_paths(store: &TrainingStore, options: &TrainOptions) -> anyhow::Result<()> {
    if !options.eval_data.is_empty() {
        data::list_sources(&options.eval_data)?;
    }
    let Some(log) = &options.log else { return Ok(()) };
    let folder = log.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let folder = folder.canonicalize().map_err(|e| {
        Refused(format!("--log {}: its directory cannot be used: {e}", log.display()))
    })?;
    let inside = store.dir().canonicalize().is_ok_and(|dir| folder.starts_with(dir));
    if inside || log.is_dir() {
        return refuse(format!("--log {}: give a file outside the store", log.display()));
    }
    Ok(())
}

fn ram_bytes(options: &TrainOptions) -> anyhow::Result<usize> {
    match &options.ram {
        Some(text) => parse_size(text),
        None => Ok((machine::available_ram_bytes() / 2) as usize),
    }
}

/// What a run is: its record, and the rows that the record names, verified.
struct Run {
    record: RunRecord,
    rows: Rows,
}

/// The unfinished run, or a new one; `None` if all steps are committed.
fn decide(
    store: &TrainingStore,
    config: &ModelConfig,
    data: &[PathBuf],
    options: &TrainOptions,
    new_run: bool,
    ram_bytes: usize,
) -> anyhow::Result<Option<Run>> {
    let defaults = Defaults {
        max_positions: config.max_positions,
        lr: store.defaults().get("lr").and_then(serde_json::Value::as_f64).unwrap_or(LR),
    };
    if let Some(text) = store.read_run()?.filter(|_| !new_run) {
        return resume(store, RunRecord::from_json(&text)?, data, options);
    }
    check_paths(store, options)?;
    if data.is_empty() {
        return refuse("--data PATH is missing: it says what a new run trains on");
    }
    let shape = crate::run_record::shape(options, defaults)?;
    let prepared = text::prepare_rows(store.dir(), config, data, shape.seq_len)?;
    let sampler = batches(&prepared.rows, shape.batch_rows);
    let steps = options
        .steps
        .unwrap_or_else(|| options.epochs.unwrap_or(1).saturating_mul(sampler.steps_per_epoch()));
    if steps == 0 {
        return refuse("the run has no steps: give --steps or --epochs of at least 1");
    }
    let mut record = RunRecord::new(options, defaults, steps, prepared.files, prepared.name)?;
    // What cannot run is refused before anything of the old run is gone.
    let policy = record.policy(options.update)?;
    limits(store.table(), config, &record, policy, ram_bytes)?;
    record.reset_first = store.state().step.0 > 0;
    check_rows(&prepared.rows, &record, &store.state())?;
    Ok(Some(Run { record, rows: prepared.rows }))
}

/// Makes the record the store's, and the store's state fit it. A kill anywhere in here leaves the
/// old run, or the new one with its reset still to be done.
fn settle(store: &TrainingStore, record: &mut RunRecord) -> anyhow::Result<()> {
    let text = record.to_json()?;
    if store.read_run()?.as_deref() != Some(text.as_str()) {
        store.write_run(&text)?;
    }
    if record.reset_first {
        errln!("new run: the weights stay, moments and step numbers start at zero");
        new_run::reset_moments(store)?;
        record.reset_first = false;
        store.write_run(&record.to_json()?)?;
    }
    Ok(())
}

fn resume(
    store: &TrainingStore,
    mut record: RunRecord,
    data: &[PathBuf],
    options: &TrainOptions,
) -> anyhow::Result<Option<Run>> {
    let mut differences = record.differences(options)?;
    if !data.is_empty() {
        differences.extend(data_differences(&record, data)?);
    }
    if !differences.is_empty() {
        return refuse(format!(
            "the store's run has other options:\n  {}\nleave them out to go on with it, or start again \
             from its weights with --new-run --data PATH",
            differences.join("\n  ")
        ));
    }
    let unusable =
        "the token rows of the run cannot be used; start again with --new-run --data PATH";
    let rows = Rows::open(store.dir().join(&record.rows_file)).context(unusable)?;
    let sampler = batches(&rows, record.batch_rows);
    let wanted =
        options.steps.or(options.epochs.map(|e| e.saturating_mul(sampler.steps_per_epoch())));
    if let Some(steps) = wanted.filter(|steps| *steps != record.steps) {
        if steps < record.steps {
            return refuse(format!(
                "the run was started for {} steps, of which {} are done; {steps} would change its \
                 schedule: leave --steps and --epochs out, or start again with --new-run",
                record.steps,
                store.state().step.0
            ));
        }
        errln!("note: the run now has {steps} steps instead of {}", record.steps);
        record.steps = steps;
    }
    if store.state().step.0 >= record.steps && !record.reset_first {
        return Ok(None);
    }
    check_paths(store, options)?;
    // The whole file is hashed: rot in it would be trained on.
    rows.verify().context(unusable)?;
    check_rows(&rows, &record, &store.state())?;
    Ok(Some(Run { record, rows }))
}

fn data_differences(record: &RunRecord, data: &[PathBuf]) -> anyhow::Result<Vec<String>> {
    let mut now = Vec::new();
    for path in data::list_sources(data)? {
        let (bytes, hash) = data::hash_file(&path)?;
        now.push((bytes, model::hex(hash)));
    }
    let then = record.data.iter().map(|f| (f.bytes, f.hash.clone()));
    if then.eq(now.iter().cloned()) {
        return Ok(Vec::new());
    }
    let names: Vec<&str> = record.data.iter().map(|f| f.path.as_str()).collect();
    Ok(vec![format!("--data: the run was started with {} whose contents differ", names.join(", "))])
}

/// How many batches there are and where each begins, which no order of the rows changes.
fn batches(rows: &Rows, batch_rows: usize) -> Sampler {
    Sampler::new(order(rows.rows(), 0, true), batch_rows as u64)
}

fn order(rows: u64, seed: u64, shuffle: bool) -> Order {
    Order { seed, rows, shuffle }
}

/// Rows, record and cursor come from different files: whoever edited one is told.
fn check_rows(rows: &Rows, record: &RunRecord, state: &State) -> anyhow::Result<()> {
    if rows.seq_len() as usize != record.seq_len {
        return refuse(format!(
            "{} of the store has rows of {} tokens, run.json says {}; start again with --new-run",
            record.rows_file,
            rows.seq_len(),
            record.seq_len
        ));
    }
    if record.reset_first {
        return Ok(());
    }
    let sampler = batches(rows, record.batch_rows);
    let cursor = data::Cursor { epoch: state.epoch, index: state.index };
    sampler.check(cursor).map_err(|error| {
        Refused(format!("run.json does not fit the last commit: {error}; use --new-run")).into()
    })
}

fn open_session(
    store: TrainingStore,
    config: ModelConfig,
    run: Run,
    options: &TrainOptions,
    budget: Budget,
) -> anyhow::Result<Session> {
    let Run { record, rows } = run;
    let policy = record.policy(options.update)?;
    let limits = limits(store.table(), &config, &record, policy, budget.total_bytes())?;
    Ok(Session {
        threads: machine::threads(options.threads)?,
        store: Arc::new(store),
        config,
        record,
        rows: Arc::new(rows),
        budget,
        limits,
        policy,
    })
}

fn limits(
    table: &LayerTable,
    config: &ModelConfig,
    record: &RunRecord,
    policy: Policy,
    ram_bytes: usize,
) -> anyhow::Result<Limits> {
    let shape = record.shape();
    let micro = compute::MicroShape { rows: shape.micro_rows, seq_len: shape.seq_len };
    let workspace = compute::workspace(config, micro);
    let deferred = policy == Policy::Deferred;
    let at = |shape| Limits::new(table, shape, workspace, deferred, ram_bytes);
    at(shape).map_err(|error| match error {
        BudgetError::TooSmall { given_bytes, needed_bytes, parts, .. } if record.micro_rows > 1 => {
            let remedy = String::from(" or choose a smaller --micro-rows");
            BudgetError::TooSmall { given_bytes, needed_bytes, parts, remedy }.into()
        }
        other => other.into(),
    })
}

fn run_session(
    mut session: Session,
    runtime: tokio::runtime::Runtime,
    interrupt: &Interrupt,
    options: &TrainOptions,
    args: &SoloArgs,
    show: Show,
) -> anyhow::Result<Summary> {
    let metrics = metrics(&session);
    let server = runtime.block_on(serve_metrics(options, &metrics))?;
    let log = options.log.as_deref().map(StepLog::open).transpose()?;
    settle(&session.store, &mut session.record)?;
    let first = session.store.state().step.0;
    let (last, parameters) = (session.record.steps, session.store.table().elements() as u64);
    let observer = RunObserver::new(show, first, last, parameters, log, metrics);
    let observer = Arc::new(observer);
    let result = run_segments(&runtime, interrupt, &session, options, args, &observer);
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
    let device = BlockDevice::behind(session.store.dir());
    if let Err(why) = device.and_then(|device| metrics.watch_device(device)) {
        tracing::info!(%why, "no block-device metrics");
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
    args: &SoloArgs,
    observer: &Arc<RunObserver>,
) -> anyhow::Result<Summary> {
    let faults = FaultPlan::new(args.fault.clone());
    let mut total: Option<Summary> = None;
    loop {
        let step = session.store.state().step.0;
        let until = next_pause(step, options).min(session.record.steps);
        let config = solo_config(session, until, observer, &faults)?;
        let summary = runtime
            .block_on(async {
                let solo = Solo::start(config)?;
                interrupt.stops(solo.stopper());
                solo.wait().await
            })
            .map_err(machine::failed)?;
        let summary = add(total.take(), summary);
        if summary.end == End::Completed
            && let Err(error) = measure(session, options, observer, interrupt, summary.step)
        {
            // A measurement is worth less than the run.
            observer.warn(&format!("step {}: not measured: {error:#}", summary.step));
        }
        if summary.end != End::Completed || summary.step >= session.record.steps {
            return Ok(summary);
        }
        total = Some(summary);
    }
}

fn next_pause(step: u64, options: &TrainOptions) -> u64 {
    let every = [options.eval_every, options.sample_every];
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
    last_step: u64,
    observer: &Arc<RunObserver>,
    faults: &FaultPlan,
) -> anyhow::Result<SoloConfig> {
    let record = &session.record;
    let order = order(session.rows.rows(), record.seed, !record.no_shuffle);
    let (config, budget) = (session.config.clone(), session.budget.clone());
    let threads = Arc::clone(&session.threads);
    let open_device = Arc::new(move || machine::cpu(&config, &budget, &threads));
    let observer: Arc<dyn Observer> = observer.clone();
    Ok(SoloConfig {
        store: Arc::clone(&session.store),
        open_device,
        rows: Arc::clone(&session.rows),
        sampler: Sampler::new(order, record.batch_rows as u64),
        shape: record.shape(),
        limits: session.limits.clone(),
        budget: session.budget.clone(),
        threads: Arc::clone(&session.threads),
        policy: session.policy,
        adamw: record.adamw(),
        schedule: record.lr_schedule()?,
        clip: record.clip_rule()?,
        last_step,
        observer,
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
        let device = machine::cpu(&session.config, &session.budget, &session.threads);
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
    let state_bytes = 12 * session.store.table().elements() as u64;
    let dir = session.store.dir().to_path_buf();
    match sole_owner(session.store) {
        Some(store) => store.close().or_else(|error| match summary.end {
            // A failed run has its own error to tell.
            End::Failed => Ok(()),
            End::Completed | End::Stopped => Err(error),
        })?,
        None => tracing::warn!("the store is still used; its index is not rewritten"),
    }
    match show {
        Show::Json => outln!("{}", summary_json(summary, &state)),
        Show::Bar | Show::Nothing => print_summary(summary, &state, state_bytes, &dir),
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

fn print_summary(summary: &Summary, state: &State, state_bytes: u64, dir: &Path) {
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
        human_bytes(summary.read_bytes),
        human_bytes(summary.written_bytes),
        human_bytes(summary.ram_peak_bytes as u64),
        human_bytes(state_bytes),
    );
    if let Some(failure) = summary.failure.as_ref().filter(|_| summary.end == End::Failed) {
        errln!("error: {failure}");
    }
    let store = dir.display();
    match summary.failure.as_deref().filter(|_| summary.end == End::Failed) {
        None if summary.end == End::Completed => {}
        Some(Failure::NotFinite { .. }) => outln!(
            "committed steps are kept; start again from their weights with a lower --lr: \
             ftactor solo --store {store} --new-run --data PATH --lr X"
        ),
        Some(failure) if exit::failure_code(failure) == exit::DAMAGED => {
            errln!("{}", exit::DAMAGE_REMEDY);
        }
        _ => outln!("every committed step is kept; go on with: ftactor solo --store {store}"),
    }
}
