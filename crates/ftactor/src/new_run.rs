//! A new run on trained weights: moments, Adam steps and step numbers go back to zero.

use std::collections::BTreeMap;

use model::{HostBytes, Step};
use store::{RecordKind, State, StateChunk, StoreError, TrainingStore, blocking};

/// Rewrites every layer with its weights and zero moments, and commits that as step 0.
pub(crate) fn reset_moments(store: &TrainingStore) -> Result<(), StoreError> {
    let mut state = fresh(store.state());
    let mut slots = Vec::new();
    for layer in store.table().layers() {
        let from = store.state().layers[layer.id.index()].slot;
        let to = from.other();
        for chunk in 0..store.chunks(layer.id) {
            let old = blocking(|done| store.read_chunk(layer.id, from, chunk, done))?;
            store.check_chunk(layer.id, from, chunk, old.hashes())?;
            let zero = || HostBytes::zeroed(old.weight.len());
            let (exp_avg, exp_avg_sq) = (zero(), zero());
            let new = StateChunk { weight: old.weight, exp_avg, exp_avg_sq };
            let hashes = new.hashes();
            blocking(|done| store.write_chunk(layer.id, to, chunk, new, hashes, done))?;
        }
        let of_layer = &mut state.layers[layer.id.index()];
        of_layer.hashes = blocking(|done| store.finish_layer(layer.id, to, done))?;
        of_layer.slot = to;
        of_layer.t = 0;
        slots.push((layer.id, to));
    }
    blocking(|done| store.sync_slots(slots, done))?;
    blocking(|done| store.commit(RecordKind::Committed, state, done))
}

/// The state of a run that has not begun; layers and attempts as they are.
fn fresh(state: State) -> State {
    State {
        step: Step(0),
        epoch: 0,
        index: 0,
        tokens_total: 0,
        loss: f64::NAN,
        grad_norm: f64::NAN,
        clip_factor: 1.0,
        learning_rate: 0.0,
        counters: BTreeMap::new(),
        ..state
    }
}
