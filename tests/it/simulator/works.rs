//! What a node's commands do to the world.

use super::*;

impl World {
    pub(super) fn carry_out(&mut self, command: NodeCommand) {
        let costs = self.setup.costs;
        match command {
            NodeCommand::Gather { attempt, micro, layer, slot } => {
                self.check_read(attempt, layer, slot, 0..usize::MAX);
                let event = NodeEvent::RowsReady { attempt, micro };
                self.occupy(Resource::Disk, 1, attempt, event);
            }
            NodeCommand::StreamIn { attempt, visit, layer, tile, slot, .. } => {
                self.check_read(attempt, layer, slot, tile.elements.clone());
                self.process.bound.insert((attempt, visit), (layer, tile.elements));
                let decoder = matches!(
                    self.process.node.visit(attempt, visit).unwrap().kind,
                    VisitKind::Forward | VisitKind::Remake | VisitKind::Backward
                );
                let time = if decoder { costs.read } else { 1 };
                self.occupy(Resource::Disk, time, attempt, NodeEvent::Streamed { attempt, visit });
            }
            NodeCommand::Park { attempt, stage, micro } => {
                self.process.parking.insert((stage, micro));
                let event = NodeEvent::Parked { attempt, stage, micro };
                self.occupy(Resource::Writer, self.setup.costs.park, attempt, event);
            }
            NodeCommand::Unpark { attempt, stage, micro } => {
                let away = !self.process.parking.contains(&(stage, micro));
                assert!(away, "an input is read before it is written");
                self.add_input(stage, micro);
                let event = NodeEvent::Unparked { attempt, stage, micro };
                self.occupy(Resource::Disk, 1, attempt, event);
            }
            NodeCommand::Compute { attempt, op, .. } => self.compute(attempt, op),
            NodeCommand::Unbind { attempt, visit } => {
                let (end, late) = (self.start_of(Resource::Device), self.setup.costs.unbind);
                let end = end + self.vary(late);
                self.process.in_flight_until = self.process.in_flight_until.max(end);
                self.at(end, Happening::Node(NodeEvent::Unbound { attempt, visit }));
            }
            NodeCommand::Update { step, attempt, piece, from, to, .. } => {
                self.update((step, attempt), piece, from, to);
            }
            NodeCommand::Save { attempt, slots } => {
                let end = self.start_of(Resource::Disk) + 1;
                self.process.busy_until.insert(Resource::Disk, end);
                let failed = Happening::Node(self.failed(attempt));
                let happening =
                    if self.fails() { failed } else { Happening::Saved { attempt, slots } };
                self.at(end, happening);
            }
            NodeCommand::Drain { attempt } => {
                // A drained optimizer forgets every update, an older attempt's too.
                let forgotten = |h: &Happening| {
                    matches!(
                        h,
                        Happening::Wrote { .. }
                            | Happening::Saved { .. }
                            | Happening::Squared { .. }
                    )
                };
                self.process.happenings.retain(|_, h| !forgotten(h));
                self.process.parking.clear();
                self.process.writing.clear();
                self.process.replaced.clear();
                self.process.bound.clear();
                self.process.kept.clear();
                self.process.inputs.clear();
                let until = self.process.in_flight_until.max(self.now) + 1;
                self.disk.drained();
                self.at(until, Happening::Node(NodeEvent::Drained { attempt }));
            }
            NodeCommand::Report(report) => self.report(report),
        }
    }

    fn report(&mut self, report: FromNode) {
        let event = match report {
            FromNode::Norm { step, attempt, sums, loss } => {
                let begun = &self.process.attempts[&attempt];
                let clipped = self.setup.data.clipped(step);
                let redo = clipped && begun.policy == Policy::Fused && !begun.factor;
                if redo {
                    self.process.known.insert(step);
                }
                RunEvent::Norm { step, attempt, sums, loss, clipped, redo }
            }
            other => RunEvent::Node(other),
        };
        self.after(1, Happening::Run(event));
    }

    fn compute(&mut self, attempt: Attempt, op: ComputeOp) {
        let micros = u64::from(self.setup.micros);
        let time = match op {
            ComputeOp::Forward { .. } => self.setup.costs.forward / micros,
            ComputeOp::Backward { .. } => self.setup.costs.backward / micros,
            _ => 0,
        };
        self.remember(op);
        let Begun { step, locked, .. } = self.process.attempts[&attempt].clone();
        let data = &self.setup.data;
        let event = match op {
            ComputeOp::HeadLoss { micro } => {
                let loss = data.loss(step) * TARGETS as f64 / micros as f64;
                NodeEvent::Loss { attempt, micro, loss }
            }
            ComputeOp::TakeGradient { piece, .. } => {
                let layer = piece.layer;
                assert!(!locked[layer.index()], "layer {layer} is locked and has a gradient");
                if layer == self.table.embedding() && piece.part > 0 {
                    let others = self.process.measured.get(&(attempt, layer)).copied();
                    assert_eq!(others, Some(piece.part as usize), "rows before what they add to");
                }
                return self.measure(attempt, piece);
            }
            _ => return self.occupy_silently(time),
        };
        self.occupy(Resource::Device, time, attempt, event);
    }

    /// What an operation brings into being, and what it uses up.
    fn remember(&mut self, op: ComputeOp) {
        match op {
            ComputeOp::Embed { micro } => self.add_input(Stage(1), micro),
            ComputeOp::Forward { stage, micro, keep, .. } => {
                self.add_input(stage.next(), micro);
                if keep {
                    self.process.kept.insert((stage, micro));
                    assert!(self.process.kept.len() <= self.setup.kept, "{:?}", self.process.kept);
                }
            }
            ComputeOp::Free { stage, micro, .. } => {
                self.process.inputs.remove(&(stage, micro));
            }
            ComputeOp::Backward { stage, micro, .. } => {
                self.process.kept.remove(&(stage, micro));
                let there = self.process.inputs.remove(&(stage, micro));
                assert!(there, "{stage:?} goes back without its input");
            }
            ComputeOp::HeadNormBackward { micro, .. } => {
                let head = Stage(self.table.stages(self.setup.tiling) as u32 - 1);
                self.process.inputs.remove(&(head, micro));
            }
            _ => {}
        }
    }

    fn add_input(&mut self, stage: Stage, micro: Micro) {
        assert!(self.process.inputs.insert((stage, micro)), "{stage:?} has its input already");
        let count = self.process.inputs.len();
        assert!(count <= self.boundaries, "{count} inputs at once");
    }

    /// Measuring takes its time, and pieces overtake one another.
    fn measure(&mut self, attempt: Attempt, piece: PieceId) {
        let end = self.start_of(Resource::Device) + self.random_time();
        // The sum is told later still.
        let until = end + self.setup.costs.update;
        self.process.in_flight_until = self.process.in_flight_until.max(until);
        self.at(end, Happening::Squared { attempt, piece });
    }

    /// Device work that nobody waits for by itself.
    fn occupy_silently(&mut self, time: Time) {
        let end = self.start_of(Resource::Device) + self.vary(time);
        self.process.busy_until.insert(Resource::Device, end);
        self.process.in_flight_until = self.process.in_flight_until.max(end);
    }

    /// Pieces that a layer's gradient comes in.
    pub(super) fn pieces(&self, layer: LayerId) -> usize {
        self.table.pieces(layer, self.setup.tiling).len()
    }

    fn update(&mut self, (step, attempt): (Step, Attempt), piece: PieceId, from: Slot, to: Slot) {
        let (layer, pieces) = (piece.layer, self.pieces(piece.layer));
        if self.process.attempts[&attempt].policy == Policy::Deferred {
            assert_eq!(self.process.measured[&(attempt, layer)], pieces, "updated too early");
        }
        if from == to {
            self.replace(piece);
        }
        let factor = self.process.attempts[&attempt].factor;
        let key = (attempt, layer);
        let begun = self.process.writing.remove(&key);
        let (done, digest) = begun.unwrap_or_else(|| {
            (0, self.disk.start_update((step, attempt), layer, (from, to), factor))
        });
        let last = done + 1 == pieces;
        if !last {
            self.process.writing.insert(key, (done + 1, digest));
        }
        let end =
            self.start_of(Resource::Disk) + self.vary(self.setup.costs.update / pieces as u64);
        self.process.busy_until.insert(Resource::Disk, end);
        self.process.in_flight_until = self.process.in_flight_until.max(end);
        let happening = if self.fails() {
            Happening::Node(self.failed(attempt))
        } else if !self.setup.data.update_is_finite(step, layer) {
            Happening::Run(RunEvent::Node(FromNode::NotFinite { step, attempt }))
        } else {
            Happening::Wrote { attempt, step, piece, slot: to, digest: last.then_some(digest) }
        };
        self.at(end, happening);
    }

    /// A piece is updated in place, which nobody reads any more.
    fn replace(&mut self, piece: PieceId) {
        let elements = self.table.piece(piece, self.setup.tiling);
        let meet = |bound: &(LayerId, Range<usize>)| {
            bound.0 == piece.layer && bound.1.start < elements.end && elements.start < bound.1.end
        };
        let bound = self.process.bound.iter().find(|(_, bound)| meet(bound));
        assert_eq!(bound, None, "{piece:?} is written over while the device has it");
        self.process.replaced.entry(piece.layer).or_default().push(elements);
    }

    fn check_read(&self, attempt: Attempt, layer: LayerId, slot: Slot, elements: Range<usize>) {
        let step = self.process.attempts[&attempt].step;
        self.disk.check_read(step, layer, slot);
        let replaced = self.process.replaced.get(&layer).into_iter().flatten();
        let meets = |r: &Range<usize>| r.start < elements.end && elements.start < r.end;
        let gone = replaced.into_iter().any(meets) && step == self.disk.settled.step.next();
        assert!(!gone, "layer {layer}: {elements:?} is written over and read");
    }
}
