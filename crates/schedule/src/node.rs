//! [`Node`]: the layers of one machine - sweeps, weight buffers, gradients, updates, slots.
//!
//! Invariants:
//! - weights on their way or bound never exceed `Limits::weight_bytes`;
//! - gradients reserved and not yet spilled or applied never exceed `Limits::gradient_bytes`, nor
//!   inputs of stages `Limits::boundaries`;
//! - a visit reads a layer's newest version: the one the step before wrote, once it is written;
//! - an input is read back from `scratch/` only after all of its stage's have been written there;
//! - a pass is over only when all pieces of its gradient are where they wait;
//! - a step ends only after the run has told to apply it, however early its updates end;
//! - updates of a step are issued only when the step before is durable or settled, into slots that
//!   are not live, and only when the device has let go of what they write over;
//! - what is locked in a step has no gradient, is not written and keeps its version;
//! - after an abort nothing new starts until device, optimizer and store have answered that they
//!   are idle.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use model::{
    Attempt, LayerId, LayerTable, Limits, Micro, NextUse, PieceId, Slot, Stage, Step, TileId,
    TileSpec, Tiling, Wait,
};

use crate::visits::ops;
use crate::{ComputeOp, FromNode, Input, Need, ToNode, Visit, VisitId, VisitKind, sweep};

mod pass;
mod tail;
mod uses;

use pass::Pass;
use tail::Tail;
use uses::Uses;
pub use uses::Written;

/// When the optimizer runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// On each layer as soon as its gradient is complete.
    Fused,
    /// After the norm of the whole gradient is known.
    Deferred,
}

/// What a node needs to know before its first event.
#[derive(Clone, Debug)]
pub struct NodeConfig {
    pub micros: u32,
    pub limits: Limits,
    /// What a gradient waits for where the optimizer runs inside the sweep: its layer's norm, or
    /// nothing.
    pub fused_wait: Wait,
    /// Live slot of each layer.
    pub live: Vec<Slot>,
}

/// What a node hears.
#[derive(Clone, Debug, PartialEq)]
pub enum NodeEvent {
    Run(ToNode),
    /// The embedding's rows of one microbatch are in memory.
    RowsReady {
        attempt: Attempt,
        micro: Micro,
    },
    /// A visit's weights are in memory and on their way to the device.
    Streamed {
        attempt: Attempt,
        visit: VisitId,
    },
    /// The device has let go of a visit's weights.
    Unbound {
        attempt: Attempt,
        visit: VisitId,
    },
    /// A stage's input has left RAM for `scratch/`.
    Parked {
        attempt: Attempt,
        stage: Stage,
        micro: Micro,
    },
    /// A stage's input is back and on its way to the device.
    Unparked {
        attempt: Attempt,
        stage: Stage,
        micro: Micro,
    },
    Loss {
        attempt: Attempt,
        micro: Micro,
        loss: f64,
    },
    /// A piece's complete gradient is on the host (or spilled). `sum_of_squares`: of the whole
    /// layer's gradient, when its last piece is.
    Measured {
        attempt: Attempt,
        piece: PieceId,
        sum_of_squares: Option<f64>,
    },
    /// A piece has its new version, which is not synced. `weights`: when all of the layer has, the
    /// square sum of its weights, if somebody asked.
    Updated {
        attempt: Attempt,
        piece: PieceId,
        weights: Option<f64>,
    },
    /// What was to be saved is on the disk.
    Saved {
        attempt: Attempt,
    },
    Failed {
        attempt: Attempt,
        fatal: bool,
    },
    /// Nothing of an aborted attempt is in flight at any actor any more.
    Drained {
        attempt: Attempt,
    },
}

/// When the bytes that a visit reads are read again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Again {
    Never,
    /// By the optimizer, right after.
    Soon(NextUse),
    /// On the sweep's way back, by the optimizer, or in the next step.
    Later(NextUse),
}

/// What a node wants done.
#[derive(Clone, Debug, PartialEq)]
pub enum NodeCommand {
    /// Read the embedding rows that a microbatch's tokens name.
    Gather {
        attempt: Attempt,
        micro: Micro,
        layer: LayerId,
        slot: Slot,
    },
    /// Read a tile's weights and bind them on the device under the visit's name.
    StreamIn {
        attempt: Attempt,
        visit: VisitId,
        layer: LayerId,
        tile: TileSpec,
        slot: Slot,
        again: Again,
    },
    /// Move a stage's input from the device to `scratch/`, once what was enqueued is done with it.
    Park {
        attempt: Attempt,
        stage: Stage,
        micro: Micro,
    },
    /// Move it back.
    Unpark {
        attempt: Attempt,
        stage: Stage,
        micro: Micro,
    },
    /// `visit` names the weights, if the operation has any.
    Compute {
        attempt: Attempt,
        visit: VisitId,
        op: ComputeOp,
    },
    Unbind {
        attempt: Attempt,
        visit: VisitId,
    },
    /// Run the optimizer on a piece of a layer, into the slot that is not live: from the other one,
    /// or in place if it has a version since the last commit. `saved`: a commit is to follow.
    Update {
        step: Step,
        attempt: Attempt,
        piece: PieceId,
        from: Slot,
        to: Slot,
        again: Written,
        saved: bool,
    },
    /// Bring versions that are to be committed to the disk.
    Save {
        attempt: Attempt,
        slots: Vec<(LayerId, Slot)>,
    },
    /// Drop everything of this attempt and later ones, wait until idle, answer `Drained`.
    Drain {
        attempt: Attempt,
    },
    Report(FromNode),
}

/// What was updated since the last commit, on its way to one.
#[derive(Debug)]
struct Saving {
    step: Step,
    attempt: Attempt,
    synced: bool,
}

/// The machine.
#[derive(Debug)]
pub struct Node {
    config: NodeConfig,
    table: LayerTable,
    /// The vocabulary tile that is scored and differentiated in one visit.
    turn: TileId,
    rows: PieceId,
    uses: Uses,
    live: Vec<Slot>,
    /// By layer: the other slot has a version since the last commit.
    ahead: Vec<bool>,
    pass: Option<Pass>,
    /// Steps being updated, oldest first; only the first one may write.
    tails: VecDeque<Tail>,
    saving: Option<Saving>,
    /// Gradients that occupy memory, by attempt.
    reserved: BTreeMap<(Attempt, PieceId), usize>,
    draining: Option<Attempt>,
}

impl Node {
    /// A node at rest.
    pub fn new(table: &LayerTable, config: NodeConfig) -> Node {
        Node {
            table: table.clone(),
            turn: last_tile(table, config.limits.tiling),
            rows: table.rows_piece(config.limits.tiling),
            uses: Uses::new(table, config.limits.tiling, config.limits.interval),
            live: config.live.clone(),
            ahead: vec![false; config.live.len()],
            config,
            pass: None,
            tails: VecDeque::new(),
            saving: None,
            reserved: BTreeMap::new(),
            draining: None,
        }
    }

    /// A visit of the attempt that is being swept.
    pub fn visit(&self, attempt: Attempt, visit: VisitId) -> Option<&Visit> {
        let pass = self.pass.as_ref().filter(|pass| pass.attempt == attempt)?;
        pass.visits.get(visit.0 as usize)
    }

    /// Takes an event in; the commands are to be carried out in order.
    pub fn on(&mut self, event: NodeEvent) -> Vec<NodeCommand> {
        let mut out = Vec::new();
        match event {
            NodeEvent::Run(message) => self.on_run(message, &mut out),
            NodeEvent::Failed { attempt, fatal } => {
                out.push(NodeCommand::Report(FromNode::Failed { attempt, fatal }));
            }
            NodeEvent::Drained { attempt } => self.drained(attempt, &mut out),
            NodeEvent::Updated { attempt, piece, weights } => self.updated(attempt, piece, weights),
            NodeEvent::Saved { attempt } => self.saved(attempt, &mut out),
            NodeEvent::Measured { attempt, piece, sum_of_squares } => {
                self.measured(attempt, piece, sum_of_squares);
            }
            other => self.on_sweep(&other),
        }
        if self.draining.is_none() {
            self.advance(&mut out);
        }
        out
    }

    fn on_run(&mut self, message: ToNode, out: &mut Vec<NodeCommand>) {
        match message {
            ToNode::Begin { step, attempt, locked, policy, saved } => {
                self.begin((step, attempt), locked, policy, saved);
            }
            ToNode::Apply { attempt, .. } => self.apply(attempt),
            ToNode::Settled { step, attempt } => self.settle(step, attempt),
            ToNode::Save { step, attempt } => self.save(step, attempt, out),
            ToNode::Committed { step, attempt } => self.committed(step, attempt),
            ToNode::Abort { attempt } => self.abort(attempt, out),
        }
    }

    fn on_sweep(&mut self, event: &NodeEvent) {
        let Some(pass) = self.pass.as_mut() else { return };
        match *event {
            NodeEvent::RowsReady { attempt, micro } if attempt == pass.attempt => {
                pass.rows_ready(micro);
            }
            NodeEvent::Streamed { attempt, visit } if attempt == pass.attempt => {
                pass.streamed(visit);
            }
            NodeEvent::Unbound { attempt, visit: id } if attempt == pass.attempt => {
                let visit = &pass.visits[id.0 as usize];
                let weights = weight_bytes(&self.config.limits, visit).unwrap_or(0);
                let inputs = if visit.consumes_input() { self.config.micros as usize } else { 0 };
                pass.unbound(id, weights, inputs);
            }
            NodeEvent::Parked { attempt, stage, .. } if attempt == pass.attempt => {
                pass.parked(stage);
            }
            NodeEvent::Unparked { attempt, stage, .. } if attempt == pass.attempt => {
                pass.unparked(stage);
            }
            NodeEvent::Loss { attempt, micro, loss } if attempt == pass.attempt => {
                pass.loss(micro, loss);
            }
            _ => {}
        }
    }

    fn begin(
        &mut self,
        (step, attempt): (Step, Attempt),
        locked: Arc<[bool]>,
        policy: Policy,
        saved: bool,
    ) {
        assert!(self.pass.is_none(), "step {step} begins while another one is swept");
        assert!(self.draining.is_none(), "step {step} begins while an attempt is dropped");
        assert!(self.tails.len() <= 1, "step {step} begins two steps ahead of the disk");
        let limits = &self.config.limits;
        let visits = sweep(&self.table, limits.tiling, limits.interval, &locked);
        let pass = Pass::new((step, attempt), policy, self.config.micros, visits, &locked);
        self.pass = Some(pass);
        self.tails.push_back(Tail::new((step, attempt), locked, policy, saved));
    }

    fn apply(&mut self, attempt: Attempt) {
        let pieces = &self.config.limits.piece_bytes;
        let Some(tail) = self.tails.iter_mut().find(|t| t.attempt == attempt) else { return };
        tail.applied = true;
        if tail.policy == Policy::Deferred {
            // In forward order, so that the next step can begin with the first layers.
            let all = tail.layers().flat_map(|layer| pieces_of(pieces, layer));
            all.for_each(|piece| tail.enqueue(piece));
        }
    }

    /// The step's versions are the newest ones; the next step may write.
    fn settle(&mut self, step: Step, attempt: Attempt) {
        let Some(tail) = self.tails.pop_front() else { panic!("step {step} was not updated") };
        assert_eq!((tail.step, tail.attempt, tail.is_over()), (step, attempt, true));
        tail.layers().for_each(|layer| self.ahead[layer.index()] = true);
    }

    /// The step may have been settled before, with nothing begun since then.
    fn save(&mut self, step: Step, attempt: Attempt, out: &mut Vec<NodeCommand>) {
        if self.tails.front().is_some_and(|tail| tail.attempt == attempt) {
            self.settle(step, attempt);
        }
        let ahead = self.live.iter().zip(&self.ahead).enumerate().filter(|(_, (_, ahead))| **ahead);
        let slots = ahead.map(|(layer, (live, _))| (LayerId(layer as u32), live.other())).collect();
        self.saving = Some(Saving { step, attempt, synced: false });
        out.push(NodeCommand::Save { attempt, slots });
    }

    fn committed(&mut self, step: Step, attempt: Attempt) {
        let Some(saving) = self.saving.take() else { panic!("step {step} was not prepared") };
        assert_eq!((saving.step, saving.attempt, saving.synced), (step, attempt, true));
        for (slot, ahead) in self.live.iter_mut().zip(&mut self.ahead) {
            *slot = if std::mem::take(ahead) { slot.other() } else { *slot };
        }
    }

    fn abort(&mut self, attempt: Attempt, out: &mut Vec<NodeCommand>) {
        self.pass.take_if(|p| p.attempt >= attempt);
        self.tails.retain(|t| t.attempt < attempt);
        self.saving.take_if(|saving| saving.attempt >= attempt);
        if self.saving.is_none() {
            self.ahead.fill(false);
        }
        self.reserved.retain(|(a, _), _| *a < attempt);
        self.draining = Some(attempt);
        out.push(NodeCommand::Drain { attempt });
    }

    fn drained(&mut self, attempt: Attempt, out: &mut Vec<NodeCommand>) {
        if self.draining == Some(attempt) {
            self.draining = None;
            out.push(NodeCommand::Report(FromNode::Aborted { attempt }));
        }
    }

    fn measured(&mut self, attempt: Attempt, piece: PieceId, sum_of_squares: Option<f64>) {
        let Some(pass) = self.pass.as_mut().filter(|p| p.attempt == attempt) else { return };
        let policy = pass.policy;
        pass.measured(piece.layer, sum_of_squares);
        if self.spills(policy, piece) {
            self.reserved.remove(&(attempt, piece));
        }
        if policy == Policy::Deferred {
            return;
        }
        let Some(tail) = self.tails.iter_mut().find(|t| t.attempt == attempt) else { return };
        let piece_bytes = &self.config.limits.piece_bytes;
        // Rows add to the other pieces of the embedding.
        let waits = self.config.fused_wait == Wait::Layer || piece.layer == self.rows.layer;
        match sum_of_squares {
            None if waits => {}
            Some(_) if waits => {
                pieces_of(piece_bytes, piece.layer).for_each(|piece| tail.enqueue(piece));
            }
            _ => tail.enqueue(piece),
        }
    }

    /// Whether a gradient waits in `scratch/`. Of the embedding's what the head's tiles gave does so
    /// whatever the policy: it lives through the whole sweep.
    fn spills(&self, policy: Policy, piece: PieceId) -> bool {
        let waits = policy == Policy::Deferred || piece.layer == self.rows.layer;
        self.config.limits.spilled[piece.layer.index()] && waits && piece != self.rows
    }

    fn updated(&mut self, attempt: Attempt, piece: PieceId, weights: Option<f64>) {
        let Some(tail) = self.tails.iter_mut().find(|t| t.attempt == attempt) else { return };
        tail.updated(piece.layer, weights);
        self.reserved.remove(&(attempt, piece));
    }

    fn saved(&mut self, attempt: Attempt, out: &mut Vec<NodeCommand>) {
        let saving = self.saving.as_mut().filter(|saving| saving.attempt == attempt);
        let Some(Saving { step, attempt, synced }) = saving else { return };
        *synced = true;
        let (step, attempt) = (*step, *attempt);
        out.push(NodeCommand::Report(FromNode::Prepared { step, attempt }));
    }

    fn advance(&mut self, out: &mut Vec<NodeCommand>) {
        self.stream(out);
        self.compute(out);
        self.finish_pass(out);
        self.update(out);
    }

    /// The slot that holds the newest version of a layer for the step being swept; `None` while
    /// the step before still has to write it.
    fn newest(&self, step: Step, layer: LayerId) -> Option<Slot> {
        let live = self.live[layer.index()];
        match self.tails.iter().find(|t| t.step.next() == step) {
            Some(before) if !before.is_locked(layer) => {
                before.is_updated(layer).then(|| live.other())
            }
            _ => Some(self.settled(layer)),
        }
    }

    /// The slot of the version that the last settled step left.
    fn settled(&self, layer: LayerId) -> Slot {
        let live = self.live[layer.index()];
        if self.ahead[layer.index()] { live.other() } else { live }
    }

    fn stream(&mut self, out: &mut Vec<NodeCommand>) {
        while let Some(command) = self.next_stream() {
            out.extend(command);
        }
    }

    /// The reads of the next visit, if there is room for them and the weights are written.
    fn next_stream(&mut self) -> Option<Vec<NodeCommand>> {
        let pass = self.pass.as_ref()?;
        let (step, attempt) = (pass.step, pass.attempt);
        let id = VisitId(pass.next_stream as u32);
        let visit = pass.visits.get(pass.next_stream)?;
        let micros = self.config.micros;
        let unparks = self.unparks(visit);
        let room = pass.inputs + if unparks { micros as usize } else { 0 };
        // What is still on its way to `scratch/` must not be read back yet.
        if room > self.config.limits.boundaries || (unparks && !pass.is_parked(visit.stage)) {
            return None;
        }
        let weights = weight_bytes(&self.config.limits, visit);
        if pass.weight_bytes + weights.unwrap_or(0) > self.config.limits.weight_bytes {
            return None;
        }
        let mut commands = match &visit.need {
            Need::Nothing => Vec::new(),
            Need::EmbeddingRows => {
                let layer = visit.layer;
                let slot = self.newest(step, layer)?;
                let gather = |m| NodeCommand::Gather { attempt, micro: Micro(m), layer, slot };
                (0..micros).map(gather).collect()
            }
            Need::Tile(tile) => {
                let (layer, slot) = (tile.source, self.newest(step, tile.source)?);
                let again = self.uses.of_weights(step, pass.policy, visit);
                let (visit, tile) = (id, tile.clone());
                vec![NodeCommand::StreamIn { attempt, visit, layer, tile, slot, again }]
            }
        };
        if unparks {
            let stage = visit.stage;
            let unpark = |m| NodeCommand::Unpark { attempt, stage, micro: Micro(m) };
            commands.extend((0..micros).map(unpark));
        }
        self.pass.as_mut()?.stream_issued(weights, if unparks { micros as usize } else { 0 });
        Some(commands)
    }

    /// Whether the visit's input waits in `scratch/` for its way back.
    fn parks(&self, visit: &Visit) -> bool {
        visit.input == Input::Waits && self.config.limits.parked[visit.stage.index()]
    }

    /// Whether the visit's input has to come back from `scratch/`.
    fn unparks(&self, visit: &Visit) -> bool {
        let returns = matches!(visit.input, Input::Returns { .. });
        returns && self.config.limits.parked[visit.stage.index()]
    }

    /// Inputs of the next stage that the visit brings into being.
    fn new_inputs(&self, visit: &Visit) -> usize {
        match visit.kind {
            VisitKind::Embed | VisitKind::Forward | VisitKind::Remake => {
                self.config.micros as usize
            }
            _ => 0,
        }
    }

    fn compute(&mut self, out: &mut Vec<NodeCommand>) {
        while self.next_visit(out).is_some() {}
    }

    /// Enqueues the next visit's work, if its weights and inputs are there and what it brings
    /// into being has room. The device runs in order, so what it needs of earlier visits is done
    /// by then.
    fn next_visit(&mut self, out: &mut Vec<NodeCommand>) -> Option<()> {
        let pass = self.pass.as_ref()?;
        let attempt = pass.attempt;
        let id = VisitId(pass.next_compute as u32);
        let visit = pass.visits.get(pass.next_compute)?.clone();
        let streamed = match visit.need {
            Need::Nothing => true,
            Need::EmbeddingRows => pass.all_rows_ready(),
            Need::Tile(_) => pass.is_streamed(id),
        };
        let unparked = !self.unparks(&visit) || pass.is_unparked(visit.stage);
        // Rows are measured with the embedding's other pieces, which may be on their way to `scratch/`.
        let alone = visit.kind != VisitKind::EmbedBackward || pass.missing(visit.layer) == 1;
        let new_inputs = self.new_inputs(&visit);
        let room = pass.inputs + new_inputs <= self.config.limits.boundaries;
        if !(streamed && unparked && alone && room && self.reserve(attempt, &visit)) {
            return None;
        }
        let pass = self.pass.as_mut()?;
        pass.next_compute += 1;
        pass.inputs += new_inputs;
        let policy = pass.policy;
        self.enqueue((attempt, policy), id, &visit, out);
        Some(())
    }

    fn enqueue(
        &self,
        (attempt, policy): (Attempt, Policy),
        id: VisitId,
        visit: &Visit,
        out: &mut Vec<NodeCommand>,
    ) {
        let (stage, micros) = (visit.stage, self.config.micros);
        let keep = |micro| self.keeps(visit, micro);
        let compute = |op| NodeCommand::Compute { attempt, visit: id, op };
        let spill = |piece| self.spills(policy, piece);
        out.extend(ops(visit, micros, keep, spill).into_iter().map(compute));
        if self.parks(visit) {
            let park = |m| NodeCommand::Park { attempt, stage, micro: Micro(m) };
            out.extend((0..micros).map(park));
        }
        if matches!(visit.need, Need::Tile(_)) {
            out.push(NodeCommand::Unbind { attempt, visit: id });
        }
    }

    /// Of tiles, of the decoder and of the vocabulary, those needed soonest are kept: all cost the same to
    /// recompute, these are held shortest.
    fn keeps(&self, visit: &Visit, micro: Micro) -> bool {
        let limits = &self.config.limits;
        let (above, most) = match (&visit.need, visit.kind) {
            (Need::Tile(tile), VisitKind::HeadScore) => {
                (self.turn.0 - 1 - tile.id.0, limits.kept_logits)
            }
            _ => match visit.rank {
                Some(rank) => (rank, limits.kept),
                None => return false,
            },
        };
        ((above * self.config.micros + micro.0) as usize) < most
    }

    fn reserve(&mut self, attempt: Attempt, visit: &Visit) -> bool {
        let Some(piece) = visit.gradient() else { return true };
        if self.reserved.contains_key(&(attempt, piece)) {
            return true;
        }
        let of_layer = &self.config.limits.piece_bytes[piece.layer.index()];
        let bytes = of_layer[piece.part as usize];
        let used: usize = self.reserved.values().sum();
        if used + bytes > self.config.limits.gradient_bytes {
            return false;
        }
        self.reserved.insert((attempt, piece), bytes);
        true
    }

    fn finish_pass(&mut self, out: &mut Vec<NodeCommand>) {
        let Some(pass) = self.pass.take_if(|p| p.is_finished()) else { return };
        out.push(NodeCommand::Report(FromNode::Norm {
            step: pass.step,
            attempt: pass.attempt,
            sums: pass.sums(),
            loss: pass.loss_sum(),
        }));
    }

    fn update(&mut self, out: &mut Vec<NodeCommand>) {
        if self.saving.is_some() {
            return;
        }
        while let Some(update) = self.next_update() {
            out.push(update);
        }
        let Some(tail) = self.tails.front_mut() else { return };
        if tail.ends() {
            let (step, attempt, weights) = (tail.step, tail.attempt, tail.weights());
            out.push(NodeCommand::Report(FromNode::Updated { step, attempt, weights }));
        }
    }

    fn next_update(&mut self) -> Option<NodeCommand> {
        let tail = self.tails.front()?;
        let (step, attempt, policy, saved) = (tail.step, tail.attempt, tail.policy, tail.saved);
        let piece = tail.next_update()?;
        let (from, to) = (self.settled(piece.layer), self.live[piece.layer.index()].other());
        let pass = self.pass.as_ref().filter(|pass| pass.attempt == attempt);
        if from == to && pass.is_some_and(|pass| pass.holds(piece)) {
            return None;
        }
        self.tails.front_mut()?.start_update();
        let again = self.uses.of_written(step, policy, piece);
        Some(NodeCommand::Update { step, attempt, piece, from, to, again, saved })
    }
}

fn last_tile(table: &LayerTable, tiling: Tiling) -> TileId {
    table.tiles(table.head(), tiling).last().map_or(TileId(0), |tile| tile.id)
}

/// The pieces of a layer, in the order in which they are complete.
fn pieces_of(piece_bytes: &[Vec<usize>], layer: LayerId) -> impl Iterator<Item = PieceId> + use<> {
    let count = piece_bytes[layer.index()].len() as u32;
    (0..count).map(move |part| PieceId { layer, part })
}

/// Bytes of the visit's tile, if it has one.
fn weight_bytes(limits: &Limits, visit: &Visit) -> Option<usize> {
    match &visit.need {
        Need::Tile(tile) => Some(tile.elements.len() * limits.bytes_per_weight),
        Need::Nothing | Need::EmbeddingRows => None,
    }
}
