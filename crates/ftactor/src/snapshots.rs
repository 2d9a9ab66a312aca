//! `--snapshot-every`: snapshots that a run takes by itself, and how many of them stay.

use data::Sampler;
use store::{LayerState, Snapshot, StoreError, TrainingStore};

use crate::options::{Every, TrainOptions, parse_every};
use crate::progress::RunObserver;

/// Names of snapshots that a run took by itself begin so, and nobody else's; others are never removed.
pub(crate) const AUTOMATIC: &str = "auto-";
const KEPT: usize = 2;

/// Steps between two snapshots.
pub(crate) fn interval(options: &TrainOptions, sampler: &Sampler) -> anyhow::Result<Option<u64>> {
    let Some(text) = &options.snapshot_every else { return Ok(None) };
    Ok(Some(match parse_every(text)? {
        Every::Steps(steps) => steps,
        Every::Epochs(epochs) => epochs.saturating_mul(sampler.steps_per_epoch()).max(1),
    }))
}

/// Takes a snapshot of the last commit. One that cannot be is worth less than the run: it is told.
pub(crate) fn take(store: &TrainingStore, run: u64, kept: Option<usize>, observer: &RunObserver) {
    let step = store.state().step;
    let name = format!("{AUTOMATIC}{run}-{step}");
    match try_take(store, &name, kept.unwrap_or(KEPT)) {
        Ok(true) => {
            observer.say(&format!("step {step}: snapshot {name}"));
            let line = serde_json::json!({"event": "snapshot", "step": step.0, "name": name});
            observer.record(&line);
        }
        Ok(false) => {}
        Err(error) => observer.warn(&format!("step {step}: no snapshot: {error}")),
    }
}

/// False if there was one of this step already.
fn try_take(store: &TrainingStore, name: &str, kept: usize) -> Result<bool, StoreError> {
    let (all, _) = store.snapshots()?;
    let now = store.state();
    if let Some(known) = all.iter().find(|snapshot| snapshot.name == name) {
        let same = |(a, b): (&LayerState, &LayerState)| a.hashes == b.hashes;
        if known.state.layers.iter().zip(&now.layers).all(same) {
            return Ok(false);
        }
        // The run went back since then and came here another way.
        store.remove_snapshot(name)?;
    }
    let mut automatic: Vec<Snapshot> = all;
    automatic.retain(|known| known.name.starts_with(AUTOMATIC) && known.name != name);
    // Attempts only grow over a store's life; steps go back.
    automatic.sort_by_key(|snapshot| snapshot.state.attempt);
    let before: Vec<String> = automatic.into_iter().map(|snapshot| snapshot.name).collect();
    // A kill in between leaves one too many, never one too few.
    store.snapshot(name)?;
    let surplus = (before.len() + 1).saturating_sub(kept);
    for old in before.iter().take(surplus) {
        store.remove_snapshot(old)?;
    }
    let room = store.room()?;
    if room.is_enough() {
        return Ok(true);
    }
    // The next steps would wait for the space that it keeps.
    store.remove_snapshot(name)?;
    let (needed, available) = (room.needed, room.available);
    Err(StoreError::NoSpace { path: store.dir().to_owned(), needed, available })
}
