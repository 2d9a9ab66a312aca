//! `lock`, `unlock`, `snapshot`, `rollback`: what is done to a store that nobody trains.

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use model::{Budget, LayerId, LayerTable};
use serde_json::json;
use store::{Io, PREVIOUS, Recovery, RollBack, State, StoreError, TrainingStore, show_bytes};

use crate::cli::{LayersArgs, RollbackArgs, SnapshotArgs};
use crate::exit::refuse;
use crate::out::outln;
use crate::progress::ByteBar;
use crate::run_record::RunRecord;
use crate::run_start::finish_rollback;
use crate::snapshots::AUTOMATIC;
use crate::{layers, machine};

pub(crate) fn lock(args: &LayersArgs) -> anyhow::Result<ExitCode> {
    let store = open(&args.store)?;
    let chosen = layers::parse(&args.layers, store.table())?;
    store.lock(&chosen)?;
    close(store, args.json, None)
}

pub(crate) fn unlock(args: &LayersArgs) -> anyhow::Result<ExitCode> {
    let store = open(&args.store)?;
    let chosen = layers::parse(&args.layers, store.table())?;
    store.unlock(&chosen)?;
    close(store, args.json, None)
}

pub(crate) fn snapshot(args: &SnapshotArgs) -> anyhow::Result<ExitCode> {
    let store = open(&args.store)?;
    if args.remove {
        store.remove_snapshot(&args.name)?;
    } else if args.name.starts_with(AUTOMATIC) {
        return refuse(format!(
            "{}: names that begin with {AUTOMATIC} are those of --snapshot-every, which removes them",
            args.name
        ));
    } else {
        store.snapshot(&args.name)?;
    }
    let (step, json) = (store.state().step, args.json);
    store.close()?;
    match (json, args.remove) {
        (true, _) => outln!("{}", json!({"snapshot": args.name, "step": step})),
        (false, true) => outln!("removed snapshot {}", args.name),
        (false, false) => outln!(
            "snapshot {} of step {step}; go back with: ftactor rollback --store {} {}",
            args.name,
            args.store.display(),
            args.name
        ),
    }
    Ok(ExitCode::SUCCESS)
}

pub(crate) fn rollback(args: &RollbackArgs) -> anyhow::Result<ExitCode> {
    let store = open_with(&args.store, TrainingStore::open_to_heal)?;
    let chosen = match &args.layers {
        Some(text) => Some(layers::parse(text, store.table())?),
        None => None,
    };
    let bar = ByteBar::new("compare");
    let progress = |done, total| bar.at(done, total);
    if args.name != PREVIOUS && chosen.is_none() {
        whole_run(&store, &args.name, progress)?;
    } else {
        finish_rollback(&store)?;
        let to = match args.name.as_str() {
            PREVIOUS => RollBack::Previous,
            name => RollBack::Snapshot(name),
        };
        let back = store.prepare_rollback(to, chosen.as_deref(), progress)?;
        if chosen.is_none() && is_of_another_run(&store.state(), back.target()) {
            return refuse(
                "the commit before the last one is of the run that --new-run replaced, whose options \
                 are gone; with --layers its weights can be had",
            );
        }
        back.carry_out()?;
    }
    drop(bar);
    close(store, args.json, Some(&args.name))
}

/// Whether a new run began between a commit and the one before it.
fn is_of_another_run(now: &State, before: &State) -> bool {
    now.step.0 == 0 && before.step.0 > 0
}

/// The model goes back together with the run that it was in then: steps may be more by now, but a
/// later run's options and rows do not fit. A kill in between leaves a note for whoever opens next.
fn whole_run(
    store: &TrainingStore,
    name: &str,
    progress: impl FnMut(u64, u64),
) -> anyhow::Result<()> {
    // What cannot be gone back to must leave no trace in the record.
    let back = store.prepare_rollback(RollBack::Snapshot(name), None, progress)?;
    let then = store.run_of_snapshot(name)?;
    let then = then.map(|text| RunRecord::from_json(store.dir(), &text)).transpose()?;
    let Some(mut record) = other_record(store, then)? else { return Ok(back.carry_out()?) };
    record.rollback_first = Some(name.to_owned());
    store.write_run(&record.to_json()?)?;
    back.carry_out()?;
    record.rollback_first = None;
    Ok(store.write_run(&record.to_json()?)?)
}

/// The record that is to take the place of the store's when the model goes back to where `then` was
/// its run's: if that is another run, or the store's record is lost, or says that another rollback
/// is still to be done.
fn other_record(
    store: &TrainingStore,
    then: Option<RunRecord>,
) -> anyhow::Result<Option<RunRecord>> {
    let now = store.read_run()?.map(|text| RunRecord::from_json(store.dir(), &text));
    let sound = now.and_then(Result::ok);
    let noted = sound.as_ref().is_none_or(|now| now.rollback_first.is_some());
    let same = then.as_ref().map(|r| r.run) == sound.as_ref().map(|r| r.run);
    Ok(match then {
        Some(then) if noted || !same => Some(then),
        Some(_) => None,
        None => sound.filter(|_| noted),
    })
}

fn open(dir: &Path) -> anyhow::Result<TrainingStore> {
    let store = open_with(dir, TrainingStore::open)?;
    finish_rollback(&store)?;
    Ok(store)
}

/// A way to open a store for training.
type Opening =
    fn(Arc<dyn Io>, &Path, Budget, Duration) -> Result<(TrainingStore, Recovery), StoreError>;

fn open_with(dir: &Path, opening: Opening) -> anyhow::Result<TrainingStore> {
    let io = machine::engine(machine::store_bytes(dir));
    // Only what is compared with its hash is read, a chunk at a time.
    let budget = Budget::new(64 << 20);
    let (store, recovery) =
        machine::patiently(|wait| opening(Arc::clone(&io), dir, budget.clone(), wait))?;
    machine::tell(&recovery, store.state().step);
    Ok(store)
}

/// Closes the store and says what is locked now, and at which step it is. `back_to`: where a rollback
/// went.
fn close(store: TrainingStore, json: bool, back_to: Option<&str>) -> anyhow::Result<ExitCode> {
    let (state, table) = (store.state(), store.table().clone());
    let (dir, idle_bytes) = (store.dir().to_owned(), store.idle_bytes());
    store.close()?;
    let names = |locked: bool| -> Vec<LayerId> {
        let layers = table.layers().iter().zip(&state.layers);
        layers.filter(|(_, layer)| layer.locked == locked).map(|(spec, _)| spec.id).collect()
    };
    let (locked, free) = (names(true), names(false));
    if json {
        let names = |ids: &[LayerId]| -> Vec<String> {
            ids.iter().map(|&id| table.layer(id).name.clone()).collect()
        };
        let mut said =
            json!({"step": state.step, "locked": names(&locked), "unlocked": names(&free)});
        if let Some(version) = back_to {
            said["rolled_back_to"] = json!(version);
        }
        outln!("{said}");
        return Ok(ExitCode::SUCCESS);
    }
    let back = back_to.map(|version| format!("went back to {version}; ")).unwrap_or_default();
    let layers = describe(&locked, &free, &table, idle_bytes);
    outln!("{back}{} is at step {}; {layers}", dir.display(), state.step);
    Ok(ExitCode::SUCCESS)
}

fn describe(locked: &[LayerId], free: &[LayerId], table: &LayerTable, idle_bytes: u64) -> String {
    if locked.is_empty() {
        return "every layer is trained".into();
    }
    let (locked, free) = (layers::names(locked, table), layers::names(free, table));
    let room = match idle_bytes {
        0 => String::new(),
        bytes => format!("; {} of disk are given back by the next steps", show_bytes(bytes)),
    };
    format!("locked: {locked}; trained: {free}{room}")
}
