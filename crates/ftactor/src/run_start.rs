//! What a run is: the unfinished one or a new one, refused before anything is lost, then written
//! down.

use std::fs::FileType;
use std::io::ErrorKind;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use data::{Order, Rows, RowsError, Sampler};
use model::{BudgetError, LayerTable, Limits, ModelConfig, StateLayout, Tiling, Workspace};
use schedule::{Policy, StepPlan, Updates};
use serde_json::{Map, Value};
use store::{RollBack, State, StoreError, TrainingStore, show_bytes};

use crate::exit::{Refused, refuse};
use crate::machine;
use crate::options::{TrainOptions, parse_size};
use crate::out::errln;
use crate::run_record::{Defaults, RUN_LOST, RunRecord};
use crate::{new_run, text};

/// What to do about token rows that are lost or damaged.
const UNUSABLE: &str = "the token rows of the run cannot be used; its data makes them again: give \
    --data PATH as when it was started";

/// Peak learning rate for a store that names none.
const LR: f64 = 1e-5;

/// What a run is: its record, and the rows that the record names, verified.
pub(crate) struct Run {
    pub(crate) record: RunRecord,
    pub(crate) rows: Rows,
    /// What to know about it, once it is sure to begin.
    pub(crate) note: Option<String>,
}

/// The unfinished run, or a new one; `None` if all steps are committed.
pub(crate) fn decide(
    store: &TrainingStore,
    config: &ModelConfig,
    data: &[PathBuf],
    options: &TrainOptions,
    new_run: bool,
    ram_bytes: usize,
) -> anyhow::Result<Option<Run>> {
    let defaults = defaults(config, store.defaults());
    let before = store.read_run()?;
    if let Some(text) = before.as_ref().filter(|_| !new_run) {
        return resume(store, config, RunRecord::from_json(store.dir(), text)?, data, options);
    }
    if !new_run {
        check_untrained(store.dir(), &store.state())?;
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
    let updates = record.updates(options.update)?;
    let how = How { updates, interval: options.recompute_interval(), goes_on: false };
    limits((store.table(), store.layout()), config, &record, how, ram_bytes)?;
    record.reset_first = store.state().step.0 > 0;
    record.run = before.map_or(1, |text| RunRecord::number_in(&text) + 1);
    check_rows(&prepared.rows, &record, &store.state())?;
    Ok(Some(Run { record, rows: prepared.rows, note: None }))
}

/// What options default to for a store of this model; `stored` is what the store says.
pub(crate) fn defaults(config: &ModelConfig, stored: &Map<String, Value>) -> Defaults {
    Defaults {
        max_positions: config.max_positions,
        lr: stored.get("lr").and_then(Value::as_f64).unwrap_or(LR),
    }
}

/// Makes the record the store's, and the store's state fit it. A kill anywhere in here leaves the
/// old run, or the new one with its reset still to be done.
pub(crate) fn settle(store: &TrainingStore, record: &mut RunRecord) -> anyhow::Result<()> {
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

/// Goes back to the snapshot that `run.json` comes from, if that has not been done yet. A record that cannot
/// be read says nothing; whoever needs it says so.
pub(crate) fn finish_rollback(store: &TrainingStore) -> anyhow::Result<()> {
    let Some(text) = store.read_run()? else { return Ok(()) };
    let Ok(mut record) = RunRecord::from_json(store.dir(), &text) else { return Ok(()) };
    let Some(name) = record.rollback_first.take() else { return Ok(()) };
    store.rollback(RollBack::Snapshot(&name), None, |_, _| {})?;
    Ok(store.write_run(&record.to_json()?)?)
}

/// Refuses a store without a `run.json` that has steps behind it: its run's record is lost.
pub(crate) fn check_untrained(dir: &Path, state: &State) -> Result<(), StoreError> {
    if state.step.0 == 0 {
        return Ok(());
    }
    let what = format!("the file is missing; {RUN_LOST}");
    Err(StoreError::Damaged { file: dir.join("run.json"), what })
}

/// An error of the run's rows, with what can be done about it.
pub(crate) fn advised(error: RowsError) -> anyhow::Error {
    match error {
        RowsError::Io { path: file, source } if source.kind() == ErrorKind::NotFound => {
            StoreError::Damaged { file, what: format!("the file is missing; {UNUSABLE}") }.into()
        }
        error if error.kind() == data::ErrorKind::Damaged => {
            anyhow::Error::new(error).context(UNUSABLE)
        }
        error => error.into(),
    }
}

fn resume(
    store: &TrainingStore,
    config: &ModelConfig,
    mut record: RunRecord,
    data: &[PathBuf],
    options: &TrainOptions,
) -> anyhow::Result<Option<Run>> {
    let mut differences = record.differences(options)?;
    if !data.is_empty() {
        differences.extend(data_differences(&record, data)?);
    }
    refuse_differences(&differences)?;
    if !data.is_empty() {
        // They hold what the run has, and so give its rows, should those be lost.
        text::prepare_rows(store.dir(), config, data, record.seq_len)?;
    }
    let rows = Rows::open(store.dir().join(&record.rows_file)).map_err(advised)?;
    let sampler = batches(&rows, record.batch_rows);
    let wanted =
        options.steps.or(options.epochs.map(|e| e.saturating_mul(sampler.steps_per_epoch())));
    let mut note = None;
    if let Some(steps) = wanted.filter(|steps| *steps != record.steps) {
        if steps < record.steps {
            return refuse(format!(
                "the run was started for {} steps, of which {} are done; {steps} would change its \
                 schedule: leave --steps and --epochs out, or start again with --new-run --data PATH",
                record.steps,
                store.state().step.0
            ));
        }
        note = Some(format!(
            "the run now has {steps} steps instead of {}, and its learning rates follow",
            record.steps
        ));
        record.steps = steps;
    }
    // What a guard refuses changes no step that was committed.
    record.guard = options.guard.unwrap_or(record.guard);
    record.loss_spike = options.loss_spike.or(record.loss_spike);
    if store.state().step.0 >= record.steps && !record.reset_first {
        return Ok(None);
    }
    check_paths(store, options)?;
    // The whole file is hashed: rot in it would be trained on.
    rows.verify().map_err(advised)?;
    check_rows(&rows, &record, &store.state())?;
    Ok(Some(Run { record, rows, note }))
}

/// Refuses options that would change the bits of the store's run, each by name.
pub(crate) fn refuse_differences(differences: &[String]) -> anyhow::Result<()> {
    if differences.is_empty() {
        return Ok(());
    }
    refuse(format!(
        "the store's run has other options:\n  {}\nleave them out to go on with it, or start again \
         from its weights with --new-run --data PATH",
        differences.join("\n  ")
    ))
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

pub(crate) fn order(rows: u64, seed: u64, shuffle: bool) -> Order {
    Order { seed, rows, shuffle }
}

/// Rows, record and cursor come from different files: whoever edited one is told.
fn check_rows(rows: &Rows, record: &RunRecord, state: &State) -> anyhow::Result<()> {
    if rows.seq_len() as usize != record.seq_len {
        return refuse(format!(
            "{} of the store has rows of {} tokens, run.json says {}; start again with --new-run --data PATH",
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
        Refused(format!(
            "run.json does not fit the last commit: {error}; use --new-run --data PATH"
        ))
        .into()
    })
}

/// The cap on memory.
pub(crate) fn ram_bytes(options: &TrainOptions) -> anyhow::Result<usize> {
    match &options.ram {
        Some(text) => parse_size(text),
        None => Ok((machine::available_ram_bytes() / 2) as usize),
    }
}

/// What the device needs for the run's microbatches.
fn workspace(
    config: &ModelConfig,
    layout: StateLayout,
    record: &RunRecord,
    tiling: Tiling,
) -> Workspace {
    let shape = record.shape();
    let micro = compute::MicroShape { rows: shape.micro_rows, seq_len: shape.seq_len };
    compute::workspace(config, record.dtype(), layout, micro, tiling)
}

/// What `updates` comes to within `limits`: gradients that all have room to wait for the norm do.
pub(crate) fn settled(updates: Updates, limits: &Limits, commit_every: u64) -> Updates {
    match updates.with_commits_every(commit_every) {
        Updates::Auto if !limits.spilled.contains(&true) => Policy::Deferred.into(),
        other => other,
    }
}

/// How a run goes about its steps.
#[derive(Clone, Copy, Debug)]
pub(crate) struct How {
    pub(crate) updates: Updates,
    pub(crate) interval: usize,
    /// It has begun: the rows of a step are what they are.
    pub(crate) goes_on: bool,
}

pub(crate) fn limits(
    (table, layout): (&LayerTable, StateLayout),
    config: &ModelConfig,
    record: &RunRecord,
    how: How,
    ram_bytes: usize,
) -> anyhow::Result<Limits> {
    let How { updates, interval, goes_on } = how;
    let wait = updates.wait(record.clip_rule()?.fused_wait());
    let at = |record: &RunRecord, interval| {
        let workspace = |tiling| workspace(config, layout, record, tiling);
        Limits::new(table, layout, record.shape(), workspace, wait, interval, ram_bytes)
    };
    at(record, interval).map_err(|error| match error {
        BudgetError::TooSmall { given_bytes, needed_bytes, parts, .. } => {
            // What does not suffice even at its smallest is no advice.
            let one_row = RunRecord { batch_rows: 1, micro_rows: 1, ..record.clone() };
            let short = RunRecord { seq_len: 2, ..one_row.clone() };
            let smaller = [
                (at(record, 1).is_ok(), "--recompute-interval"),
                (!goes_on && at(&one_row, 1).is_ok(), "--batch-rows"),
                (!goes_on && at(&short, 1).is_ok(), "--batch-rows and --seq-len"),
            ];
            let remedy = smaller.into_iter().find(|(helps, _)| *helps);
            let remedy = remedy.map_or_else(String::new, |(_, option)| {
                format!(
                    ", or choose a smaller {option}: what a step's tokens need at once is in RAM"
                )
            });
            BudgetError::TooSmall { given_bytes, needed_bytes, parts, remedy }.into()
        }
        other => other.into(),
    })
}

/// What a step of the run costs, if every `commit_every`-th one is committed. `updates`: before they are
/// [`settled`].
pub(crate) fn step_plan<'a>(
    (table, layout): (&'a LayerTable, StateLayout),
    record: &RunRecord,
    limits: &'a Limits,
    (updates, commit_every): (Updates, u64),
    locked: &'a [bool],
) -> StepPlan<'a> {
    let policy = match settled(updates, limits, commit_every) {
        Updates::Always(policy) => policy,
        Updates::Speculative | Updates::Auto => Policy::Fused,
    };
    let (precision, shape) = (record.dtype().precision(), record.shape());
    StepPlan { table, layout, precision, shape, limits, policy, commit_every, locked }
}

/// Share of the bytes of a step that commits made seldom have to save to be a gain.
const GAIN: f64 = 0.02;

/// What to know about commits that are made seldom and move about as many bytes.
pub(crate) fn seldom_for_nothing(
    state: (&LayerTable, StateLayout),
    record: &RunRecord,
    limits: &Limits,
    (updates, commit_every): (Updates, u64),
    locked: &[bool],
) -> Option<String> {
    if commit_every == 1 {
        return None;
    }
    let moved = |updates, every| {
        let bytes = step_plan(state, record, limits, (updates, every), locked).bytes();
        bytes.read_from_disk() + bytes.written
    };
    let (seldom, always) = (moved(updates, commit_every), moved(updates, 1));
    if (seldom as f64) < (1.0 - GAIN) * always as f64 {
        return None;
    }
    // Speculation is dear where it fails, and is given up then.
    let clipped = moved(Policy::Deferred.into(), 1);
    let without = match settled(updates, limits, 1) {
        Updates::Auto | Updates::Speculative => {
            format!("{} while little is clipped, else {}", show_bytes(always), show_bytes(clipped))
        }
        Updates::Always(_) => show_bytes(always),
    };
    let (table, layout) = state;
    Some(format!(
        "--commit-every {commit_every} is no gain with this RAM: it moves {} a step, and without it {without}; it \
         pays where new versions have room to wait, {} for all of them beside what a step needs",
        show_bytes(seldom),
        show_bytes(layout.bytes(table.elements()) as u64)
    ))
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
    if log.is_dir() {
        return refuse(format!("--log {} is a directory: give a file", log.display()));
    }
    if machine::is_inside(&folder, store.dir()) {
        return refuse(format!("--log {}: give a file outside the store", log.display()));
    }
    if log.metadata().is_ok_and(|is| !is.is_file() && !is_open_already(log, is.file_type())) {
        return refuse(format!("--log {} is not a regular file", log.display()));
    }
    Ok(())
}

/// What writing to does not wait for: a terminal or /dev/null, and the pipe behind /dev/stdout,
/// /dev/stderr or a shell's `>(command)`. A named pipe waits for whoever reads it.
fn is_open_already(path: &Path, is: FileType) -> bool {
    is.is_char_device() || (is.is_fifo() && path.starts_with("/dev"))
}
