//! A new run on trained weights: moments, Adam steps and step numbers go back to zero.

use std::collections::BTreeMap;

use model::Step;
use store::{LayerState, RecordKind, State, StoreError, TrainingStore, blocking};

/// Commits the last state as step 0 of a new run. Nothing is rewritten: the moments of a layer with
/// no Adam step behind it count as zero, a locked one's too.
pub(crate) fn reset_moments(store: &TrainingStore) -> Result<(), StoreError> {
    let state = fresh(&store.state());
    blocking(|done| store.commit(RecordKind::Committed, state, done))
}

/// The state of a run that has not begun; contents, locks and attempts as they are.
fn fresh(state: &State) -> State {
    let untrained = |layer: &LayerState| LayerState { t: 0, ..layer.clone() };
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
        layers: state.layers.iter().map(untrained).collect(),
        ..state.clone()
    }
}
