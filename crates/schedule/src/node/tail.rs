//! [`Tail`]: a step on its way from gradients to new versions.

use std::collections::VecDeque;
use std::sync::Arc;

use model::{Attempt, LayerId, PieceId, Step};

use crate::Policy;

/// Pieces the optimizer works on at once: one is read while another one is written.
const UPDATES_IN_FLIGHT: usize = 2;

#[derive(Debug)]
pub(super) struct Tail {
    pub(super) step: Step,
    pub(super) attempt: Attempt,
    pub(super) policy: Policy,
    /// A commit is to follow.
    pub(super) saved: bool,
    waiting: VecDeque<PieceId>,
    in_flight: usize,
    /// By layer: not part of the step.
    locked: Arc<[bool]>,
    updated: Vec<bool>,
    /// Square sums of new weights.
    weights: Vec<f64>,
    /// The run has judged the step; before that fused updates may be made, but not become part of
    /// it.
    pub(super) applied: bool,
    /// The run knows that all layers are updated.
    reported: bool,
}

impl Tail {
    pub(super) fn new(
        (step, attempt): (Step, Attempt),
        locked: Arc<[bool]>,
        policy: Policy,
        saved: bool,
    ) -> Tail {
        Tail {
            step,
            attempt,
            policy,
            saved,
            waiting: VecDeque::new(),
            in_flight: 0,
            updated: vec![false; locked.len()],
            weights: vec![0.0; locked.len()],
            locked,
            applied: false,
            reported: false,
        }
    }

    /// The layers that the step changes, in forward order.
    pub(super) fn layers(&self) -> impl Iterator<Item = LayerId> + use<> {
        let locked = Arc::clone(&self.locked);
        (0..locked.len()).filter(move |&i| !locked[i]).map(|i| LayerId(i as u32))
    }

    pub(super) fn enqueue(&mut self, piece: PieceId) {
        let layer = piece.layer;
        assert!(!self.locked[layer.index()], "layer {layer} is locked and has a gradient");
        self.waiting.push_back(piece);
    }

    /// The next piece to update, if not too many are being updated.
    pub(super) fn next_update(&self) -> Option<PieceId> {
        if self.in_flight >= UPDATES_IN_FLIGHT {
            return None;
        }
        self.waiting.front().copied()
    }

    pub(super) fn start_update(&mut self) {
        self.in_flight += 1;
        self.waiting.pop_front();
    }

    /// `whole`: the square sum of the layer's new weights, once all its pieces are written.
    pub(super) fn updated(&mut self, layer: LayerId, whole: Option<f64>) {
        assert!(!self.updated[layer.index()], "layer {layer} was updated twice in one step");
        self.in_flight -= 1;
        if let Some(weights) = whole {
            self.updated[layer.index()] = true;
            self.weights[layer.index()] = weights;
        }
    }

    pub(super) fn weights(&self) -> Arc<[f64]> {
        self.weights.as_slice().into()
    }

    pub(super) fn is_locked(&self, layer: LayerId) -> bool {
        self.locked[layer.index()]
    }

    pub(super) fn is_updated(&self, layer: LayerId) -> bool {
        self.updated[layer.index()]
    }

    /// Whether the run wants the step and every layer has its new version.
    pub(super) fn is_over(&self) -> bool {
        self.applied && self.layers().all(|layer| self.is_updated(layer))
    }

    /// Whether it is time to tell the run so; true once.
    pub(super) fn ends(&mut self) -> bool {
        let ends = self.is_over() && !self.reported;
        self.reported |= ends;
        ends
    }
}
