//! Both machines on a virtual clock: a simulated disk, device and optimizer, faults from a seed.
//!
//! Checked at every event: a step commits once and in order; no live slot is written; nothing of
//! step s+1 is written before s is durable; a read sees a version that is completely written.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

use model::{Attempt, LayerId, LayerTable, Limits, Micro, ModelConfig, Slot, Step};
use schedule::{
    ComputeOp, End, FromNode, Node, NodeCommand, NodeConfig, NodeEvent, Policy, Run, RunCommand,
    RunConfig, RunEvent, ToNode, VisitKind,
};

mod tests;

/// Nanoseconds of the virtual clock.
type Time = u64;

/// How long things take, in nanoseconds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Costs {
    pub(crate) read: Time,
    pub(crate) update: Time,
    pub(crate) forward: Time,
    pub(crate) backward: Time,
    pub(crate) commit: Time,
    pub(crate) park: Time,
}

/// What a simulation is made of.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    pub(crate) layers: usize,
    pub(crate) tied: bool,
    pub(crate) micros: u32,
    pub(crate) policy: Policy,
    pub(crate) weight_buffers: usize,
    /// The smallest budget: inputs are parked, deferred gradients spilled.
    pub(crate) tight: bool,
    pub(crate) steps: u64,
    pub(crate) costs: Costs,
    /// Chance in a million that an operation fails.
    pub(crate) faults_per_million: u64,
    /// Durations vary by this many percent.
    pub(crate) jitter_percent: u64,
    /// The step whose rows cannot be read; 0 for none.
    pub(crate) bad_batch: u64,
    pub(crate) seed: u64,
}

#[derive(Clone, Debug, PartialEq)]
enum Happening {
    Node(NodeEvent),
    Run(RunEvent),
    /// An update reached the disk: the slot holds this step's version now.
    Wrote {
        attempt: Attempt,
        step: Step,
        layer: LayerId,
        slot: Slot,
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

/// The world around the machines.
pub(crate) struct World {
    setup: Setup,
    run: Run,
    node: Node,
    now: Time,
    number: u64,
    queue: BinaryHeap<Reverse<(Time, u64)>>,
    happenings: BTreeMap<u64, Happening>,
    busy_until: BTreeMap<Resource, Time>,
    random: u64,
    /// Version (step) that each slot of each layer holds; `None` while it is being written.
    slots: Vec<[Option<Step>; 2]>,
    live: Vec<Slot>,
    /// Inputs on their way to `scratch/`.
    parking: BTreeSet<(LayerId, Micro)>,
    durable: Step,
    /// The attempt that may write.
    writing: Option<(Step, Attempt)>,
    in_flight_until: Time,
    pub(crate) durable_at: Vec<Time>,
    pub(crate) aborts: u64,
    end: Option<End>,
}

pub(crate) fn table(layers: usize, tied: bool) -> LayerTable {
    let config = ModelConfig::from_json(&format!(
        r#"{{"model_type":"llama","vocab_size":256,"hidden_size":64,"intermediate_size":128,
            "num_hidden_layers":{layers},"num_attention_heads":4,"tie_word_embeddings":{tied}}}"#
    ));
    LayerTable::new(&config.unwrap())
}

fn limits(setup: &Setup) -> Limits {
    let layers = setup.layers + 2;
    let parks = |layer: usize| setup.tight && (1..layers - 1).contains(&layer);
    Limits {
        weight_buffers: setup.weight_buffers,
        boundaries: if setup.tight { 3 } else { layers } * setup.micros as usize,
        boundary_bytes: 0,
        parked: (0..layers).map(parks).collect(),
        // Two decoder layers beside the embedding.
        gradient_bytes: if setup.tight { 3 } else { 2 * layers },
        layer_gradient_bytes: vec![1; layers],
        spilled: (0..layers)
            .map(|l| l > 0 && setup.tight && setup.policy == Policy::Deferred)
            .collect(),
        kept: 0,
        kept_logits: 0,
        optimizer_chunks: 4,
    }
}

impl World {
    pub(crate) fn new(setup: Setup) -> World {
        let table = table(setup.layers, setup.tied);
        let live = vec![Slot::A; table.len()];
        let config = NodeConfig {
            policy: setup.policy,
            micros: setup.micros,
            limits: limits(&setup),
            live: live.clone(),
        };
        let run = RunConfig {
            committed: Step(0),
            attempt: Attempt(0),
            last_step: Step(setup.steps),
            locked: vec![false; table.len()].into(),
        };
        World {
            run: Run::new(run),
            node: Node::new(&table, config),
            now: 0,
            number: 0,
            queue: BinaryHeap::new(),
            happenings: BTreeMap::new(),
            busy_until: BTreeMap::new(),
            random: setup.seed,
            slots: vec![[Some(Step(0)), None]; table.len()],
            live,
            parking: BTreeSet::new(),
            durable: Step(0),
            writing: None,
            in_flight_until: 0,
            durable_at: Vec::new(),
            aborts: 0,
            end: None,
            setup,
        }
    }

    /// Runs to the end; panics where an invariant breaks or nothing moves any more.
    pub(crate) fn run(&mut self) -> End {
        self.at(0, Happening::Run(RunEvent::Start));
        while self.end.is_none() {
            let Some(Reverse((time, number))) = self.queue.pop() else {
                panic!("seed {}: nothing moves at step {}", self.setup.seed, self.durable)
            };
            self.now = time;
            if let Some(happening) = self.happenings.remove(&number) {
                self.happen(happening);
            }
        }
        self.end.unwrap()
    }

    fn happen(&mut self, happening: Happening) {
        match happening {
            Happening::Wrote { attempt, step, layer, slot } => {
                self.slots[layer.index()][slot as usize] = Some(step);
                self.tell_node(NodeEvent::Updated { attempt, layer });
            }
            Happening::Node(event) => {
                if let NodeEvent::Parked { layer, micro, .. } = event {
                    self.parking.remove(&(layer, micro));
                }
                self.tell_node(event);
            }
            Happening::Run(event) => {
                if let RunEvent::Durable { step } = event {
                    self.become_durable(step);
                }
                self.tell_run(event);
            }
        }
    }

    fn become_durable(&mut self, step: Step) {
        assert_eq!(step, self.durable.next(), "seed {}: out of order", self.setup.seed);
        for (layer, live) in self.live.iter_mut().enumerate() {
            *live = live.other();
            assert_eq!(self.slots[layer][*live as usize], Some(step), "layer {layer}");
        }
        self.durable = step;
        self.writing = None;
        self.durable_at.push(self.now);
    }

    fn tell_run(&mut self, event: RunEvent) {
        for command in self.run.on(event) {
            match command {
                RunCommand::LoadBatch { step } => {
                    let bad = step.0 == self.setup.bad_batch;
                    let event = if bad { RunEvent::GiveUp } else { RunEvent::BatchLoaded { step } };
                    self.after(1, Happening::Run(event));
                }
                RunCommand::Node(message) => {
                    self.aborts += u64::from(matches!(message, ToNode::Abort { .. }));
                    self.tell_node(NodeEvent::Run(message));
                }
                RunCommand::Commit { step, .. } => {
                    let time = self.vary(self.setup.costs.commit);
                    self.after(time, Happening::Run(RunEvent::Durable { step }));
                }
                RunCommand::Finish(end) => self.end = Some(end),
            }
        }
    }

    fn tell_node(&mut self, event: NodeEvent) {
        for command in self.node.on(event) {
            self.carry_out(command);
        }
    }

    fn carry_out(&mut self, command: NodeCommand) {
        let costs = self.setup.costs;
        match command {
            NodeCommand::Gather { attempt, micro, layer, slot } => {
                self.check_read(attempt, layer, slot);
                let event = NodeEvent::RowsReady { attempt, micro };
                self.occupy(Resource::Disk, 1, attempt, event);
            }
            NodeCommand::StreamIn { attempt, visit, layer, slot, .. } => {
                self.check_read(attempt, layer, slot);
                let decoder = matches!(
                    self.node.visit(attempt, visit).unwrap().kind,
                    VisitKind::Forward | VisitKind::Backward
                );
                let time = if decoder { costs.read } else { 1 };
                self.occupy(Resource::Disk, time, attempt, NodeEvent::Streamed { attempt, visit });
            }
            NodeCommand::Park { attempt, layer, micro } => {
                self.parking.insert((layer, micro));
                let event = NodeEvent::Parked { attempt, layer, micro };
                self.occupy(Resource::Writer, self.setup.costs.park, attempt, event);
            }
            NodeCommand::Unpark { attempt, layer, micro } => {
                let seed = self.setup.seed;
                assert!(
                    !self.parking.contains(&(layer, micro)),
                    "seed {seed}: read before written"
                );
                let event = NodeEvent::Unparked { attempt, layer, micro };
                self.occupy(Resource::Disk, 1, attempt, event);
            }
            NodeCommand::Compute { attempt, op, .. } => self.compute(attempt, op),
            NodeCommand::Unbind { attempt, visit } => {
                self.occupy(Resource::Device, 0, attempt, NodeEvent::Unbound { attempt, visit });
            }
            NodeCommand::Update { step, attempt, layer, from, to } => {
                self.update(step, attempt, layer, from, to);
            }
            NodeCommand::Sync { attempt, slots } => {
                for (layer, slot) in slots {
                    assert!(self.slots[layer.index()][slot as usize].is_some(), "sync too early");
                }
                self.occupy(Resource::Disk, 1, attempt, NodeEvent::Synced { attempt });
            }
            NodeCommand::Drain { attempt } => {
                // A drained optimizer forgets every update, an older attempt's too.
                self.happenings.retain(|_, h| !matches!(h, Happening::Wrote { .. }));
                self.parking.clear();
                let until = self.in_flight_until.max(self.now) + 1;
                self.writing = None;
                self.at(until, Happening::Node(NodeEvent::Drained { attempt }));
            }
            NodeCommand::Report(report) => self.report(report),
        }
    }

    fn report(&mut self, report: FromNode) {
        self.after(1, Happening::Run(RunEvent::Node(report)));
    }

    fn compute(&mut self, attempt: Attempt, op: ComputeOp) {
        let micros = u64::from(self.setup.micros);
        let time = match op {
            ComputeOp::Forward { .. } => self.setup.costs.forward / micros,
            ComputeOp::Backward { .. } => self.setup.costs.backward / micros,
            _ => 0,
        };
        let event = match op {
            ComputeOp::HeadLoss { micro } => NodeEvent::Loss { attempt, micro, loss: 1.0 },
            ComputeOp::TakeGradient { layer, .. } => {
                NodeEvent::Measured { attempt, layer, sum_of_squares: 1.0 }
            }
            _ => return self.occupy_silently(time),
        };
        self.occupy(Resource::Device, time, attempt, event);
    }

    /// Device work that nobody waits for by itself.
    fn occupy_silently(&mut self, time: Time) {
        let end = self.start_of(Resource::Device) + self.vary(time);
        self.busy_until.insert(Resource::Device, end);
        self.in_flight_until = self.in_flight_until.max(end);
    }

    fn update(&mut self, step: Step, attempt: Attempt, layer: LayerId, from: Slot, to: Slot) {
        assert_eq!(from, self.live[layer.index()], "seed {}: reads a dead slot", self.setup.seed);
        assert_ne!(to, self.live[layer.index()], "seed {}: writes a live slot", self.setup.seed);
        assert_eq!(step, self.durable.next(), "seed {}: writes ahead", self.setup.seed);
        let writing = self.writing.get_or_insert((step, attempt));
        assert_eq!(*writing, (step, attempt), "seed {}: two attempts write", self.setup.seed);
        self.slots[layer.index()][to as usize] = None;
        let end = self.start_of(Resource::Disk) + self.vary(self.setup.costs.update);
        self.busy_until.insert(Resource::Disk, end);
        self.in_flight_until = self.in_flight_until.max(end);
        if self.fails() {
            self.at(end, Happening::Node(NodeEvent::Failed { attempt, fatal: false }));
        } else {
            self.at(end, Happening::Wrote { attempt, step, layer, slot: to });
        }
    }

    /// A read for the step after the newest complete one.
    fn check_read(&self, attempt: Attempt, layer: LayerId, slot: Slot) {
        let version = self.slots[layer.index()][slot as usize];
        let newest = self.slots[layer.index()].iter().flatten().max();
        assert!(version.is_some(), "{attempt:?} reads a slot that is being written");
        assert!(version >= Some(self.durable) && version <= newest.copied(), "{attempt:?}");
    }

    /// Puts work behind what the resource has to do; its result or its failure comes then.
    fn occupy(&mut self, resource: Resource, time: Time, attempt: Attempt, event: NodeEvent) {
        let end = self.start_of(resource) + self.vary(time);
        self.busy_until.insert(resource, end);
        self.in_flight_until = self.in_flight_until.max(end);
        let event = if self.fails() { NodeEvent::Failed { attempt, fatal: false } } else { event };
        self.at(end, Happening::Node(event));
    }

    fn start_of(&self, resource: Resource) -> Time {
        self.busy_until.get(&resource).copied().unwrap_or(0).max(self.now)
    }

    fn after(&mut self, time: Time, happening: Happening) {
        self.at(self.now + time, happening);
    }

    fn at(&mut self, time: Time, happening: Happening) {
        self.number += 1;
        self.queue.push(Reverse((time, self.number)));
        self.happenings.insert(self.number, happening);
    }

    fn fails(&mut self) -> bool {
        self.setup.faults_per_million > 0
            && self.next_random() % 1_000_000 < self.setup.faults_per_million
    }

    fn vary(&mut self, time: Time) -> Time {
        let percent = self.setup.jitter_percent;
        if percent == 0 {
            return time;
        }
        time * (100 + self.next_random() % percent) / 100
    }

    fn next_random(&mut self) -> u64 {
        self.random =
            self.random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        self.random >> 33
    }
}
