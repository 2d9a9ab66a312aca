//! Every message between actors. Requests carry a [`Reply`]; what belongs to an attempt says so.

use std::ops::Range;
use std::sync::Arc;

use compute::{Command, Gradient, Outcome};
use model::{Attempt, HostBytes, LayerId, Micro, PieceId, Precision, Slot, Stage, Step, Weights};
use optim::{AdamW, NormTree};
use schedule::{ComputeOp, FromNode, ToNode, VisitId};
use store::{
    AfterUse, ChunkHashes, IoCounters, LayerHashes, RecordKind, Room, State, StateChunk,
    WrittenAgain,
};

use crate::{Batch, Clip, Failure, LayerSeconds, Reply, StallSeconds};

/// What a step computes with: travels with `Begin`.
#[derive(Clone, Debug)]
pub(crate) struct Work {
    pub(crate) batch: Arc<Batch>,
    pub(crate) adamw: AdamW,
    pub(crate) clip: Clip,
}

/// To the store actor.
#[derive(Debug)]
pub(crate) enum StoreRequest {
    ReadWeights {
        at: (LayerId, Slot),
        elements: Range<usize>,
        precision: Precision,
        after: AfterUse,
        reply: Reply<Weights>,
    },
    GatherRows {
        at: (LayerId, Slot),
        width: usize,
        ids: Vec<u32>,
        precision: Precision,
        reply: Reply<Weights>,
    },
    ReadChunk {
        layer: LayerId,
        slot: Slot,
        chunk: usize,
        reply: Reply<StateChunk>,
    },
    WriteChunk {
        layer: LayerId,
        slot: Slot,
        chunk: usize,
        bytes: StateChunk,
        hashes: ChunkHashes,
        again: WrittenAgain,
        reply: Reply<()>,
    },
    FinishLayer {
        layer: LayerId,
        slot: Slot,
        waits: bool,
        reply: Reply<LayerHashes>,
    },
    Save {
        slots: Vec<(LayerId, Slot)>,
        reply: Reply<()>,
    },
    Commit {
        kind: RecordKind,
        state: Box<State>,
        reply: Reply<IoCounters>,
    },
    /// Writes `range` of a block.
    WriteScratch {
        start: u64,
        bytes: Arc<HostBytes>,
        range: Range<usize>,
        reply: Reply<()>,
    },
    ReadScratch {
        start: u64,
        len: usize,
        reply: Reply<HostBytes>,
    },
    /// Answered when nothing is in flight.
    Drain {
        reply: Reply<()>,
    },
}

/// To the compute actor.
#[derive(Debug)]
pub(crate) struct ComputeRequest {
    pub(crate) command: Command,
    pub(crate) reply: Reply<Outcome>,
}

/// The optimizer's run over a piece of a layer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct UpdateJob {
    pub(crate) step: Step,
    pub(crate) attempt: Attempt,
    pub(crate) piece: PieceId,
    /// How many the layer has.
    pub(crate) pieces: usize,
    pub(crate) from: Slot,
    pub(crate) to: Slot,
    pub(crate) again: WrittenAgain,
    pub(crate) prepared: optim::Prepared,
    /// The number of the layer's update, from 1 on.
    pub(crate) t: u64,
    /// Key of this step's and layer's random numbers.
    pub(crate) rounding: u64,
}

/// Squares of a chunk's new weights, if they were asked for.
pub(crate) type ChunkWeights = Option<Box<NormTree>>;

/// What an update came to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct UpdatedLayer {
    pub(crate) hashes: LayerHashes,
    /// Square sum of the new weights; zero if nobody asked.
    pub(crate) weights: f64,
    /// See [`LayerStep::drift`](crate::LayerStep::drift).
    pub(crate) drift: Option<f64>,
}

/// To the optimizer actor.
#[derive(Debug)]
pub(crate) enum OptimizerMessage {
    /// Take the gradient of a piece over, `elements` of its layer, to `scratch/` if `spill`; the
    /// last piece of a layer to be measured answers the layer's sum of squares. What an embedding
    /// that is tied gets from the head is measured with the rows that tokens touched.
    Measure {
        attempt: Attempt,
        piece: PieceId,
        elements: Range<usize>,
        gradient: Gradient,
        spill: bool,
        reply: Reply<Option<f64>>,
    },
    /// Apply a measured gradient. The last piece of a layer to be written answers what the layer came
    /// to; rows that add to other pieces wait for those.
    Update {
        job: UpdateJob,
        reply: Reply<Option<UpdatedLayer>>,
    },
    /// Forget everything; answered when no arithmetic is running.
    Drain {
        reply: Reply<()>,
    },
    ChunkRead {
        job: UpdateJob,
        chunk: usize,
        result: Result<StateChunk, Failure>,
    },
    /// A spilled gradient's part of a chunk.
    GradientRead {
        job: UpdateJob,
        chunk: usize,
        result: Result<HostBytes, Failure>,
    },
    /// A spilled gradient's part of a chunk, to be measured with the rows that add to it.
    SpilledRead {
        attempt: Attempt,
        chunk: usize,
        result: Result<HostBytes, Failure>,
    },
    /// A chunk is measured with its rows. `sum`: of the squares of the whole layer.
    Summed {
        attempt: Attempt,
        sum: Option<f64>,
    },
    /// Computed and written, or one of the two failed.
    ChunkWritten {
        job: UpdateJob,
        chunk: usize,
        result: Result<ChunkWeights, Failure>,
    },
}

/// What a layer of a prepared step adds to the record.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LayerReport {
    pub(crate) hashes: LayerHashes,
    pub(crate) sum_of_squares: f64,
    pub(crate) drift: Option<f64>,
    pub(crate) seconds: LayerSeconds,
}

/// To the node actor.
#[derive(Debug)]
pub(crate) enum NodeMessage {
    Run {
        message: ToNode,
        work: Option<Work>,
        factor: f32,
    },
    Rows {
        attempt: Attempt,
        micro: Micro,
        result: Result<Weights, Failure>,
    },
    Weights {
        attempt: Attempt,
        visit: VisitId,
        result: Result<Weights, Failure>,
    },
    /// A stage's input has left the device for `scratch/`.
    Fetched {
        attempt: Attempt,
        stage: Stage,
        micro: Micro,
        result: Result<Outcome, Failure>,
    },
    Parked {
        attempt: Attempt,
        stage: Stage,
        micro: Micro,
        result: Result<(), Failure>,
    },
    Unparked {
        attempt: Attempt,
        stage: Stage,
        micro: Micro,
        result: Result<HostBytes, Failure>,
    },
    Computed {
        attempt: Attempt,
        op: ComputeOp,
        result: Result<Outcome, Failure>,
    },
    Unbound {
        attempt: Attempt,
        visit: VisitId,
        result: Result<Outcome, Failure>,
    },
    Measured {
        attempt: Attempt,
        piece: PieceId,
        result: Result<Option<f64>, Failure>,
    },
    Updated {
        attempt: Attempt,
        piece: PieceId,
        result: Result<Option<UpdatedLayer>, Failure>,
    },
    Saved {
        attempt: Attempt,
        result: Result<(), Failure>,
    },
    /// One of the three stages of a drain is done (or was lost).
    Drained {
        attempt: Attempt,
        stage: DrainStage,
        result: Result<(), Failure>,
    },
    /// A lost drain is asked for again.
    DrainAgain {
        attempt: Attempt,
        stage: DrainStage,
    },
}

/// Order in which a node comes to rest: nobody may produce work for a later stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DrainStage {
    Compute,
    Optimizer,
    Store,
}

/// To the run actor.
#[derive(Debug)]
pub(crate) enum RunMessage {
    Start,
    BatchLoaded {
        step: Step,
        result: Result<LoadedBatch, Failure>,
    },
    Node {
        report: FromNode,
        detail: Detail,
    },
    Committed {
        step: Step,
        result: Result<IoCounters, Failure>,
    },
    /// A step that waited for room on the disk looks again.
    LoadAgain {
        step: Step,
    },
    CommitAgain,
    StopRequested,
    Restarted {
        actor: &'static str,
        reason: String,
    },
}

/// What comes with a node's report.
#[derive(Debug)]
pub(crate) enum Detail {
    None,
    Layers(Vec<LayerReport>),
    Seconds(SweepSeconds),
    Failure(Failure),
}

/// Where the time of both sweeps went.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SweepSeconds {
    pub(crate) forward: f64,
    pub(crate) backward: f64,
    pub(crate) stall: StallSeconds,
}

/// The rows of a step.
#[derive(Debug)]
pub(crate) struct LoadedBatch {
    pub(crate) batch: Arc<Batch>,
    /// Where the next step goes on: epoch and index.
    pub(crate) next: data::Cursor,
    pub(crate) room: Room,
}
