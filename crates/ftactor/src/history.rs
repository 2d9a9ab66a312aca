//! `lock`, `unlock`, `snapshot`, `rollback`: what is done to a store that nobody trains.

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use model::{Budget, LayerId, LayerTable};
use serde_json::json;
use store::{Io, PREVIOUS, Recovery, RollBack, StoreError, TrainingStore, show_bytes};

use crate::cli::{LayersArgs, RollbackArgs, SnapshotArgs};
use crate::out::outln;
use crate::progress::ByteBar;
use crate::run_record::RunRecord;
use crate::run_start::finish_rollback;
use crate::solo::LOCK_WAIT;
use crate::{layers, machine};

pub(crate) fn lock(args: &LayersArgs) -> anyhow::Result<ExitCode> {
    let store = open(&args.store)?;
    let chosen = layers::parse(&args.layers, store.table())?;
    store.lock(&chosen)?;
    close(store, args.json)
}

pub(crate) fn unlock(args: &LayersArgs) -> anyhow::Result<ExitCode> {
    let store = open(&args.store)?;
    let chosen = layers::parse(&args.layers, store.table())?;
    store.unlock(&chosen)?;
    close(store, args.json)
}

pub(crate) fn snapshot(args: &SnapshotArgs) -> anyhow::Result<ExitCode> {
    let store = open(&args.store)?;
    if args.remove {
        store.remove_snapshot(&args.name)?;
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
        store.rollback(to, chosen.as_deref(), progress)?;
    }
    drop(bar);
    close(store, args.json)
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
    let parsed = |text: Option<String>| {
        text.map(|text| RunRecord::from_json(store.dir(), &text)).transpose()
    };
    let (then, now) = (parsed(store.run_of_snapshot(name)?)?, parsed(store.read_run()?)?);
    let Some(mut record) = other_record(then, now) else { return Ok(back.carry_out()?) };
    record.rollback_first = Some(name.to_owned());
    store.write_run(&record.to_json()?)?;
    back.carry_out()?;
    record.rollback_first = None;
    Ok(store.write_run(&record.to_json()?)?)
}

/// The record that is to take the place of `now` when the model goes back to where `then` was its
/// run's. It also does where another rollback was noted and never finished.
fn other_record(then: Option<RunRecord>, now: Option<RunRecord>) -> Option<RunRecord> {
    let noted = now.as_ref().is_some_and(|now| now.rollback_first.is_some());
    let same = then.as_ref().map(|r| r.run) == now.as_ref().map(|r| r.run);
    match then {
        Some(then) if noted || !same => Some(then),
        Some(_) => None,
        None => now.filter(|_| noted),
    }
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
    let (store, recovery) = opening(io, dir, budget, LOCK_WAIT)?;
    machine::tell(&recovery, store.state().step);
    Ok(store)
}

/// Closes the store and says what is locked now, and at which step it is.
fn close(store: TrainingStore, json: bool) -> anyhow::Result<ExitCode> {
    let (state, table) = (store.state(), store.table().clone());
    let dir = store.dir().to_owned();
    store.close()?;
    let is = |locked: bool| -> Vec<LayerId> {
        let layers = table.layers().iter().zip(&state.layers);
        layers.filter(|(_, layer)| layer.locked == locked).map(|(spec, _)| spec.id).collect()
    };
    let (locked, free) = (is(true), is(false));
    if json {
        let names = |ids: &[LayerId]| -> Vec<String> {
            ids.iter().map(|&id| table.layer(id).name.clone()).collect()
        };
        outln!(
            "{}",
            json!({"step": state.step, "locked": names(&locked), "unlocked": names(&free)})
        );
        return Ok(ExitCode::SUCCESS);
    }
    outln!("{} is at step {}; {}", dir.display(), state.step, describe(&locked, &free, &table));
    Ok(ExitCode::SUCCESS)
}

fn describe(locked: &[LayerId], free: &[LayerId], table: &LayerTable) -> String {
    if locked.is_empty() {
        return "every layer is trained".into();
    }
    let bytes: u64 = locked.iter().map(|&id| 12 * table.layer(id).elements() as u64).sum();
    format!(
        "locked: {}; trained: {}; {} of disk are given back by the next steps",
        layers::names(locked, table),
        layers::names(free, table),
        show_bytes(bytes)
    )
}
