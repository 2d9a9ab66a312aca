//! Both machines on a virtual clock: a simulated disk, device and optimizer, faults from a seed.
//!
//! Checked at every event, in release builds too: steps are committed and skipped in order, none
//! later than it may be; no live slot and no locked layer is written; nothing of step s+1 is written
//! before s is durable or settled, nor over weights that the device still has; a read sees the
//! version that the step before left; what is durable equals what a run that commits every step
//! comes to without deaths, failures and delays.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::ops::Range;
use std::rc::Rc;

use model::{
    Attempt, LayerId, LayerTable, Limits, Micro, ModelConfig, PieceId, Slot, Stage, Step, Tiling,
    Wait,
};
use schedule::{
    AutoLock, ComputeOp, End, FromNode, Guard, Ledger, Node, NodeCommand, NodeConfig, NodeEvent,
    Policy, Run, RunCommand, RunConfig, RunEvent, ToNode, Updates, VisitId, VisitKind,
};

mod data;
mod disk;
mod overlap;
mod seeds;
mod works;

use data::Data;
use disk::{Disk, Record, mix};

/// Nanoseconds of the virtual clock.
type Time = u64;

/// Targets of a step.
const TARGETS: u64 = 8;

/// How long things take, in nanoseconds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Costs {
    pub(crate) read: Time,
    pub(crate) update: Time,
    pub(crate) forward: Time,
    pub(crate) backward: Time,
    pub(crate) commit: Time,
    pub(crate) park: Time,
    /// How much later than it could a device says that it has let go of weights.
    pub(crate) unbind: Time,
}

/// What a simulation is made of.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    pub(crate) layers: usize,
    pub(crate) tied: bool,
    pub(crate) tiling: Tiling,
    pub(crate) micros: u32,
    pub(crate) updates: Updates,
    pub(crate) commit_every: u64,
    /// What a fused update waits for.
    pub(crate) fused_wait: Wait,
    /// Tiles of decoder layers that fit at once.
    pub(crate) weight_buffers: usize,
    /// The smallest budget: inputs are parked, deferred gradients spilled.
    pub(crate) tight: bool,
    /// Layers from one kept input to the next.
    pub(crate) interval: usize,
    /// Inner activations that have room.
    pub(crate) kept: usize,
    pub(crate) steps: u64,
    pub(crate) costs: Costs,
    /// Chance in a million that an operation fails.
    pub(crate) faults_per_million: u64,
    /// Some failures are beyond help.
    pub(crate) fatal: bool,
    /// Chance in a million that the process dies before an event.
    pub(crate) deaths_per_million: u64,
    /// Durations vary by this many percent.
    pub(crate) jitter_percent: u64,
    /// The step whose rows cannot be read; 0 for none.
    pub(crate) bad_batch: u64,
    /// By layer; none if it is empty.
    pub(crate) locked: Vec<bool>,
    /// Counters of the record that the run starts from.
    pub(crate) counters: BTreeMap<String, u64>,
    pub(crate) guard: Guard,
    pub(crate) auto_lock: Option<AutoLock>,
    pub(crate) data: Data,
    pub(crate) seed: u64,
}

#[derive(Clone, Debug, PartialEq)]
enum Happening {
    Node(NodeEvent),
    Run(RunEvent),
    /// A piece is square-summed; it may be on its way to `scratch/`.
    Squared {
        attempt: Attempt,
        piece: PieceId,
    },
    /// A piece's update reached the disk. `digest`: it was the layer's last one, and the slot holds
    /// this step's version now.
    Wrote {
        attempt: Attempt,
        step: Step,
        piece: PieceId,
        slot: Slot,
        digest: Option<u64>,
    },
    Saved {
        attempt: Attempt,
        slots: Vec<(LayerId, Slot)>,
    },
}

/// Resources that do one thing after another.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Resource {
    Disk,
    /// Writes to `scratch/`, which reads do not queue behind.
    Writer,
    Device,
}

/// An attempt.
#[derive(Clone)]
struct Begun {
    step: Step,
    locked: std::sync::Arc<[bool]>,
    policy: Policy,
    /// Its updates are made with the factor of clipping.
    factor: bool,
}

/// What dies with the process.
struct Process {
    run: Run,
    node: Node,
    queue: BinaryHeap<Reverse<(Time, u64)>>,
    happenings: BTreeMap<u64, Happening>,
    busy_until: BTreeMap<Resource, Time>,
    /// Inputs on their way to `scratch/`.
    parking: BTreeSet<(Stage, Micro)>,
    /// Pieces of layers that are square-summed, and those that the node knows of.
    squared: BTreeMap<(Attempt, LayerId), usize>,
    measured: BTreeMap<(Attempt, LayerId), usize>,
    /// Pieces of layers that are being written, and what the layer will have become.
    writing: BTreeMap<(Attempt, LayerId), (usize, u64)>,
    attempts: BTreeMap<Attempt, Begun>,
    /// Inputs of stages that are in memory.
    inputs: BTreeSet<(Stage, Micro)>,
    /// Inner activations that the device keeps.
    kept: BTreeSet<(Stage, Micro)>,
    /// Weights that the device has or gets.
    bound: BTreeMap<(Attempt, VisitId), (LayerId, Range<usize>)>,
    /// What has been written over in a version that its own step still reads.
    replaced: BTreeMap<LayerId, Vec<Range<usize>>>,
    /// Steps that have to be made again with the factor of clipping.
    known: BTreeSet<Step>,
    in_flight_until: Time,
    end: Option<End>,
}

/// The world around the machines.
pub(crate) struct World {
    setup: Setup,
    table: LayerTable,
    /// Inputs that have room.
    boundaries: usize,
    process: Process,
    disk: Disk,
    now: Time,
    number: u64,
    random: u64,
    /// Every record so far, the one before the first step included.
    records: Vec<Record>,
    /// The records of a run in which nothing went wrong but the data.
    calm: Option<Rc<Vec<Record>>>,
    pub(crate) durable_at: Vec<Time>,
    pub(crate) aborts: u64,
    /// Settled steps that had to be made again.
    pub(crate) again: u64,
    pub(crate) deaths: u64,
}

pub(crate) fn table(layers: usize, tied: bool) -> LayerTable {
    let config = ModelConfig::from_json(&format!(
        r#"{{"model_type":"llama","vocab_size":256,"hidden_size":64,"intermediate_size":128,
            "num_hidden_layers":{layers},"num_attention_heads":4,"tie_word_embeddings":{tied}}}"#
    ));
    LayerTable::new(&config.unwrap())
}

fn limits(setup: &Setup, table: &LayerTable) -> Limits {
    let (layers, stages) = (table.len(), table.stages(setup.tiling));
    let group = match (setup.interval, setup.tiling) {
        (1, _) => 1,
        (interval, Tiling::Whole) => interval,
        (interval, Tiling::Blocks) => 2 * interval,
    };
    // All of the uppermost group stay where groups are made again.
    let decoder = stages - 2;
    let top = if group == 1 { 0 } else { (decoder - 1) % group + 1 };
    let parks = |stage: usize| setup.tight && (1..stages - 1 - top).contains(&stage);
    let least = if group == 1 { 3 } else { 3.max(group + 1) };
    let pieces = |layer: usize| vec![1; table.pieces(LayerId(layer as u32), setup.tiling).len()];
    let pieces: Vec<Vec<usize>> = (0..layers).map(pieces).collect();
    let (defers, tied) = (setup.updates.wait(Wait::None) == Wait::Model, pieces[0].len() > 1);
    let spills = |layer: usize| setup.tight && if layer > 0 { defers } else { tied };
    let most = match setup.fused_wait {
        Wait::Layer => pieces.iter().map(Vec::len).max().unwrap(),
        Wait::None | Wait::Model => 1,
    };
    Limits {
        tiling: setup.tiling,
        weight_bytes: setup.weight_buffers * table.largest_tile(setup.tiling),
        bytes_per_weight: 1,
        interval: setup.interval,
        group,
        boundaries: if setup.tight { least } else { stages } * setup.micros as usize,
        boundary_bytes: 0,
        parked: (0..stages).map(parks).collect(),
        // Two pieces beside the embedding, or a layer.
        gradient_bytes: if setup.tight { 1 + most.max(2) } else { 2 * pieces.concat().len() },
        layer_gradient_bytes: vec![1; layers],
        piece_bytes: pieces,
        spilled: (0..layers).map(spills).collect(),
        kept: setup.kept,
        kept_logits: 0,
        optimizer_chunks: 4,
        spare_bytes: 0,
        waiting_bytes: 0,
    }
}

impl Process {
    fn new(setup: &Setup, table: &LayerTable, record: &Record) -> Process {
        let config = NodeConfig {
            micros: setup.micros,
            limits: limits(setup, table),
            fused_wait: setup.fused_wait,
            live: record.live.clone(),
        };
        let run = RunConfig {
            committed: record.step,
            attempt: record.attempt,
            last_step: Step(setup.steps),
            ledger: record.ledger.clone(),
            guard: setup.guard,
            auto_lock: setup.auto_lock,
            updates: setup.updates,
            commit_every: setup.commit_every,
        };
        Process {
            run: Run::new(run),
            node: Node::new(table, config),
            queue: BinaryHeap::new(),
            happenings: BTreeMap::new(),
            busy_until: BTreeMap::new(),
            parking: BTreeSet::new(),
            squared: BTreeMap::new(),
            measured: BTreeMap::new(),
            writing: BTreeMap::new(),
            attempts: BTreeMap::new(),
            inputs: BTreeSet::new(),
            kept: BTreeSet::new(),
            bound: BTreeMap::new(),
            replaced: BTreeMap::new(),
            known: BTreeSet::new(),
            in_flight_until: 0,
            end: None,
        }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let World { setup, disk, deaths, .. } = self;
            let step = disk.record.step;
            eprintln!("failed at step {step} after {deaths} deaths: replay({});", setup.seed);
        }
    }
}

impl World {
    pub(crate) fn new(mut setup: Setup) -> World {
        let table = table(setup.layers, setup.tied);
        setup.locked.resize(table.len(), false);
        let locked = setup.locked.as_slice().into();
        let disk = Disk::new(Ledger { locked, counters: setup.counters.clone() });
        World {
            process: Process::new(&setup, &table, &disk.record),
            boundaries: limits(&setup, &table).boundaries,
            records: vec![disk.record.clone()],
            disk,
            table,
            now: 0,
            number: 0,
            random: setup.seed,
            calm: None,
            durable_at: Vec::new(),
            aborts: 0,
            again: 0,
            deaths: 0,
            setup,
        }
    }

    /// Runs to the end; panics where an invariant breaks or nothing moves any more.
    pub(crate) fn run(&mut self) -> End {
        self.at(self.now, Happening::Run(RunEvent::Start));
        loop {
            if let Some(end) = self.process.end {
                return end;
            }
            if self.chance(self.setup.deaths_per_million) {
                self.die();
                continue;
            }
            let Some(Reverse((time, number))) = self.process.queue.pop() else {
                panic!("nothing moves at step {}", self.disk.record.step)
            };
            self.now = time;
            if let Some(happening) = self.process.happenings.remove(&number) {
                self.happen(happening);
            }
        }
    }

    /// The process dies at once and another one begins where the disk is.
    fn die(&mut self) {
        self.deaths += 1;
        let arrives = self.next_random().is_multiple_of(2);
        let before = self.disk.record.step;
        self.disk.die(arrives);
        if self.disk.record.step != before {
            self.note_record();
        }
        self.begin_again();
        self.at(self.now, Happening::Run(RunEvent::Start));
    }

    /// Fresh machines from what is durable.
    fn begin_again(&mut self) {
        self.process = Process::new(&self.setup, &self.table, &self.disk.record);
    }

    fn happen(&mut self, happening: Happening) {
        match happening {
            Happening::Wrote { attempt, step, piece, slot, digest } => {
                if let Some(digest) = digest {
                    self.process.replaced.remove(&piece.layer);
                    self.disk.finish_update(step, piece.layer, slot, digest);
                }
                let weights = digest.map(Disk::weights);
                self.tell_node(NodeEvent::Updated { attempt, piece, weights });
            }
            Happening::Saved { attempt, slots } => {
                self.disk.sync(&slots);
                self.tell_node(NodeEvent::Saved { attempt });
            }
            Happening::Squared { attempt, piece } => {
                let layer = piece.layer;
                let step = self.process.attempts[&attempt].step;
                let squared = self.process.squared.entry((attempt, layer)).or_default();
                *squared += 1;
                let last = *squared == self.pieces(layer);
                let sum_of_squares = last.then(|| self.setup.data.gradient(step, layer));
                let event = NodeEvent::Measured { attempt, piece, sum_of_squares };
                let failed = self.failed(attempt);
                let event = if self.fails() { failed } else { event };
                let time = self.random_time();
                self.after(time, Happening::Node(event));
            }
            Happening::Node(event @ NodeEvent::Measured { attempt, piece, .. }) => {
                *self.process.measured.entry((attempt, piece.layer)).or_default() += 1;
                self.tell_node(event);
            }
            Happening::Node(event) => {
                match event {
                    NodeEvent::Parked { stage, micro, .. } => {
                        self.process.parking.remove(&(stage, micro));
                        self.process.inputs.remove(&(stage, micro));
                    }
                    NodeEvent::Unbound { attempt, visit } => {
                        self.process.bound.remove(&(attempt, visit));
                    }
                    _ => {}
                }
                self.tell_node(event);
            }
            Happening::Run(event) => {
                if let RunEvent::Durable { step } = event {
                    self.disk.finish_record(step);
                    self.note_record();
                }
                self.tell_run(event);
            }
        }
    }

    fn note_record(&mut self) {
        let record = self.disk.record.clone();
        if let Some(calm) = &self.calm {
            let same = calm.iter().find(|calm| calm.step == record.step);
            let same = same.unwrap_or_else(|| panic!("beyond the calm run: {record:?}"));
            assert!(record.agrees(same), "{record:?}\ninstead of\n{same:?}");
        }
        let before = self.records.last().map_or(0, |record| record.step.0);
        assert!(record.step.0 > before, "a step twice");
        assert!(record.step.0 - before <= self.setup.commit_every, "too much at once: {record:?}");
        self.records.push(record);
        self.durable_at.push(self.now);
    }

    fn tell_run(&mut self, event: RunEvent) {
        for command in self.process.run.on(event) {
            match command {
                RunCommand::LoadBatch { step } => {
                    let bad = step.0 == self.setup.bad_batch;
                    let loaded = RunEvent::BatchLoaded { step, targets: TARGETS };
                    self.after(1, Happening::Run(if bad { RunEvent::GiveUp } else { loaded }));
                }
                RunCommand::Node(message) => {
                    if let ToNode::Abort { .. } = message {
                        self.aborts += 1;
                        self.again += self.disk.rewind();
                    }
                    if let ToNode::Begin { step, attempt, locked, policy, .. } = &message {
                        let (step, policy, locked) = (*step, *policy, locked.clone());
                        let factor = match policy {
                            Policy::Fused => self.process.known.contains(&step),
                            Policy::Deferred => self.setup.data.clipped(step),
                        };
                        let begun = Begun { step, locked, policy, factor };
                        self.process.attempts.insert(*attempt, begun);
                    }
                    self.tell_node(NodeEvent::Run(message));
                }
                RunCommand::Settle { step, attempt, ledger } => {
                    let begun = &self.process.attempts[&attempt];
                    let clipped = self.setup.data.clipped(step);
                    self.disk.settle((step, attempt), ledger, &begun.locked, clipped);
                }
                RunCommand::Commit { step, .. } | RunCommand::Skip { step, .. } => {
                    self.disk.start_record(&command);
                    let time = self.vary(self.setup.costs.commit);
                    self.after(time, Happening::Run(RunEvent::Durable { step }));
                }
                RunCommand::Refuse { step, .. } => {
                    assert_eq!(step, self.disk.settled.step.next(), "refused out of turn");
                }
                RunCommand::Finish(end) => self.process.end = Some(end),
            }
        }
    }

    fn tell_node(&mut self, event: NodeEvent) {
        for command in self.process.node.on(event) {
            self.carry_out(command);
        }
    }

    /// Puts work behind what the resource has to do; its result or its failure comes then.
    fn occupy(&mut self, resource: Resource, time: Time, attempt: Attempt, event: NodeEvent) {
        let end = self.start_of(resource) + self.vary(time);
        self.process.busy_until.insert(resource, end);
        self.process.in_flight_until = self.process.in_flight_until.max(end);
        let failed = self.failed(attempt);
        let event = if self.fails() { failed } else { event };
        self.at(end, Happening::Node(event));
    }

    fn start_of(&self, resource: Resource) -> Time {
        self.process.busy_until.get(&resource).copied().unwrap_or(0).max(self.now)
    }

    fn after(&mut self, time: Time, happening: Happening) {
        self.at(self.now + time, happening);
    }

    fn at(&mut self, time: Time, happening: Happening) {
        self.number += 1;
        self.process.queue.push(Reverse((time, self.number)));
        self.process.happenings.insert(self.number, happening);
    }

    fn failed(&mut self, attempt: Attempt) -> NodeEvent {
        let fatal = self.setup.fatal && self.next_random().is_multiple_of(4);
        NodeEvent::Failed { attempt, fatal }
    }

    fn fails(&mut self) -> bool {
        self.chance(self.setup.faults_per_million)
    }

    fn chance(&mut self, per_million: u64) -> bool {
        per_million > 0 && self.next_random() % 1_000_000 < per_million
    }

    fn vary(&mut self, time: Time) -> Time {
        let percent = self.setup.jitter_percent;
        if percent == 0 {
            return time;
        }
        time * (100 + self.next_random() % percent) / 100
    }

    /// How much later somebody is who answers in no order.
    fn random_time(&mut self) -> Time {
        let most = self.setup.costs.update * u64::from(self.setup.jitter_percent > 0);
        let time = self.next_random() % (most + 1);
        self.process.in_flight_until = self.process.in_flight_until.max(self.now + time);
        time
    }

    fn next_random(&mut self) -> u64 {
        self.random =
            self.random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        self.random >> 33
    }
}
