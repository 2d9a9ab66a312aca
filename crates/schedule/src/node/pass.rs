//! [`Pass`]: how far the two sweeps of one attempt have come.

use std::collections::BTreeSet;
use std::sync::Arc;

use model::{Attempt, LayerId, Micro, PieceId, Stage, Step};

use crate::{Policy, Visit, VisitId};

#[derive(Debug)]
pub(super) struct Pass {
    pub(super) step: Step,
    pub(super) attempt: Attempt,
    pub(super) policy: Policy,
    /// What the sweeps consist of, which follows from what is locked.
    pub(super) visits: Vec<Visit>,
    /// Index of the next visit whose weights are read.
    pub(super) next_stream: usize,
    /// Index of the next visit whose work is enqueued at the device.
    pub(super) next_compute: usize,
    /// Bytes of weights on their way or bound, and their visits.
    pub(super) weight_bytes: usize,
    bound: BTreeSet<VisitId>,
    /// Inputs of stages in RAM: made or on their way back, not yet used up or parked.
    pub(super) inputs: usize,
    streamed: Vec<VisitId>,
    /// Microbatches of each stage whose input has left RAM, and has come back.
    parked: Vec<u32>,
    unparked: Vec<u32>,
    rows_ready: Vec<bool>,
    losses: Vec<Option<f64>>,
    /// Square sums of gradients; zero for locked layers.
    sums: Vec<Option<f64>>,
    /// Pieces of each layer's gradient that are still to come.
    pieces: Vec<u32>,
}

impl Pass {
    pub(super) fn new(
        (step, attempt): (Step, Attempt),
        policy: Policy,
        micros: u32,
        visits: Vec<Visit>,
        locked: &[bool],
    ) -> Pass {
        let mut pieces = vec![0; locked.len()];
        let made = visits.iter().filter_map(Visit::gradient);
        made.for_each(|piece| pieces[piece.layer.index()] += 1);
        let stages = visits.iter().map(|visit| visit.stage.index() + 1).max().unwrap_or(0);
        Pass {
            step,
            attempt,
            policy,
            visits,
            next_stream: 0,
            next_compute: 0,
            weight_bytes: 0,
            bound: BTreeSet::new(),
            inputs: 0,
            streamed: Vec::new(),
            parked: vec![0; stages],
            unparked: vec![0; stages],
            rows_ready: vec![false; micros as usize],
            losses: vec![None; micros as usize],
            pieces,
            sums: locked.iter().map(|&locked| locked.then_some(0.0)).collect(),
        }
    }

    /// `weights`: bytes of the visit's tile, if it has one.
    pub(super) fn stream_issued(&mut self, weights: Option<usize>, inputs: usize) {
        let visit = VisitId(self.next_stream as u32);
        self.next_stream += 1;
        self.weight_bytes += weights.unwrap_or(0);
        self.bound.extend(weights.map(|_| visit));
        self.inputs += inputs;
    }

    pub(super) fn streamed(&mut self, visit: VisitId) {
        self.streamed.push(visit);
    }

    pub(super) fn is_streamed(&self, visit: VisitId) -> bool {
        self.streamed.contains(&visit)
    }

    /// The device is done with a visit's weights and has used `inputs` up.
    pub(super) fn unbound(&mut self, visit: VisitId, weights: usize, inputs: usize) {
        assert!(self.bound.remove(&visit), "weights were returned twice");
        self.weight_bytes -= weights;
        self.free_inputs(inputs);
        let computed = self.next_compute as u32;
        self.streamed.retain(|v| v.0 >= computed);
    }

    /// Whether the device may still have weights that a piece's update writes over.
    pub(super) fn holds(&self, piece: PieceId) -> bool {
        let made = self.visits.iter().position(|visit| visit.gradient() == Some(piece));
        made.is_some_and(|made| self.bound.first().is_some_and(|first| first.0 as usize <= made))
    }

    pub(super) fn free_inputs(&mut self, inputs: usize) {
        assert!(self.inputs >= inputs, "an input was returned twice");
        self.inputs -= inputs;
    }

    pub(super) fn parked(&mut self, stage: Stage) {
        self.parked[stage.index()] += 1;
        self.free_inputs(1);
    }

    pub(super) fn is_parked(&self, stage: Stage) -> bool {
        self.parked[stage.index()] as usize == self.losses.len()
    }

    pub(super) fn unparked(&mut self, stage: Stage) {
        self.unparked[stage.index()] += 1;
    }

    pub(super) fn is_unparked(&self, stage: Stage) -> bool {
        self.unparked[stage.index()] as usize == self.losses.len()
    }

    pub(super) fn rows_ready(&mut self, micro: Micro) {
        self.rows_ready[micro.0 as usize] = true;
    }

    pub(super) fn all_rows_ready(&self) -> bool {
        self.rows_ready.iter().all(|&ready| ready)
    }

    pub(super) fn loss(&mut self, micro: Micro, loss: f64) {
        self.losses[micro.0 as usize] = Some(loss);
    }

    /// A piece is there. Pieces of a layer come in any order, with the last one its sum.
    pub(super) fn measured(&mut self, layer: LayerId, sum_of_squares: Option<f64>) {
        self.pieces[layer.index()] -= 1;
        if sum_of_squares.is_some() {
            self.sums[layer.index()] = sum_of_squares;
        }
    }

    /// Pieces of a layer's gradient that are still to come.
    pub(super) fn missing(&self, layer: LayerId) -> u32 {
        self.pieces[layer.index()]
    }

    /// Done with its arithmetic, and with every buffer: the next pass has them all. What waits in
    /// `scratch/` is there.
    pub(super) fn is_finished(&self) -> bool {
        let computed = self.losses.iter().all(Option::is_some);
        let measured = self.pieces.iter().all(|&missing| missing == 0);
        computed && measured && self.sums.iter().all(Option::is_some) && self.bound.is_empty()
    }

    /// Sum over microbatches, in their order.
    pub(super) fn loss_sum(&self) -> f64 {
        self.losses.iter().flatten().sum()
    }

    /// By layer.
    pub(super) fn sums(&self) -> Arc<[f64]> {
        self.sums.iter().map(|sum| sum.unwrap_or(0.0)).collect()
    }
}
