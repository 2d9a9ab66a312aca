//! `lock`, `unlock`, `snapshot`, `rollback`: what is done to a store that nobody trains.

use std::path::Path;
use std::process::ExitCode;

use model::{Budget, LayerId, LayerTable};
use serde_json::json;
use store::{RollBack, TrainingStore, show_bytes};

use crate::cli::{LayersArgs, RollbackArgs, SnapshotArgs};
use crate::out::outln;
use crate::progress::ByteBar;
use crate::run_record::RunRecord;
use crate::solo::LOCK_WAIT;
use crate::{layers, machine, run_start};

/// What `rollback` calls the commit before the last.
const PREVIOUS: &str = "previous";

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
    let store = open(&args.store)?;
    let chosen = match &args.layers {
        Some(text) => Some(layers::parse(text, store.table())?),
        None => None,
    };
    let bar = ByteBar::new("compare");
    let progress = |done, total| bar.at(done, total);
    if args.name == PREVIOUS {
        store.rollback(RollBack::Previous, chosen.as_deref(), progress)?;
    } else if let Some(chosen) = &chosen {
        store.rollback(RollBack::Snapshot(&args.name), Some(chosen), progress)?;
    } else {
        whole_run(&store, &args.name, progress)?;
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
    let then = store.run_of_snapshot(name)?;
    let now = store.read_run()?;
    match then {
        Some(then)
            if now.as_deref().map(RunRecord::number_in) != Some(RunRecord::number_in(&then)) =>
        {
            let mut record = RunRecord::from_json(store.dir(), &then)?;
            record.rollback_first = Some(name.to_owned());
            store.write_run(&record.to_json()?)?;
            run_start::finish_rollback(store, progress)
        }
        _ => Ok(store.rollback(RollBack::Snapshot(name), None, progress)?),
    }
}

fn open(dir: &Path) -> anyhow::Result<TrainingStore> {
    let io = machine::engine(machine::store_bytes(dir));
    // Only what is compared with its hash is read, a chunk at a time.
    let budget = Budget::new(64 << 20);
    let (store, recovery) = TrainingStore::open(io, dir, budget, LOCK_WAIT)?;
    machine::tell(&recovery, store.state().step);
    run_start::finish_rollback(&store, |_, _| {})?;
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
