//! Names of the kinds of messages, as fault specifications give them.

use compute::Command;

use crate::messages::{ComputeRequest, NodeMessage, OptimizerMessage, RunMessage, StoreRequest};

/// The kinds of messages an actor gets.
pub(crate) struct Messages {
    pub(crate) actor: &'static str,
    /// They carry a reply.
    pub(crate) requests: &'static [&'static str],
    pub(crate) others: &'static [&'static str],
}

/// By actor.
pub(crate) const MESSAGES: [Messages; 5] = [
    Messages {
        actor: "run",
        requests: &[],
        others: &[
            "start",
            "batch_loaded",
            "load_again",
            "node",
            "committed",
            "commit_again",
            "stop_requested",
            "restarted",
        ],
    },
    Messages {
        actor: "node",
        requests: &[],
        others: &[
            "run",
            "rows",
            "weights",
            "fetched",
            "parked",
            "unparked",
            "computed",
            "unbound",
            "measured",
            "updated",
            "saved",
            "drained",
            "drain_again",
        ],
    },
    Messages {
        actor: "store",
        requests: &[
            "read_weights",
            "gather_rows",
            "read_chunk",
            "write_chunk",
            "finish_layer",
            "save",
            "commit",
            "write_scratch",
            "read_scratch",
            "drain",
        ],
        others: &[],
    },
    Messages {
        actor: "compute",
        requests: &["bind", "unbind", "move", "forward", "backward", "take_gradient", "clear"],
        others: &[],
    },
    Messages {
        actor: "optimizer",
        requests: &["measure", "update", "drain"],
        others: &["chunk_read", "gradient_read", "spilled_read", "summed", "chunk_written"],
    },
];

impl RunMessage {
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            RunMessage::Start => "start",
            RunMessage::BatchLoaded { .. } => "batch_loaded",
            RunMessage::Node { .. } => "node",
            RunMessage::Committed { .. } => "committed",
            RunMessage::LoadAgain { .. } => "load_again",
            RunMessage::CommitAgain => "commit_again",
            RunMessage::StopRequested => "stop_requested",
            RunMessage::Restarted { .. } => "restarted",
        }
    }
}

impl NodeMessage {
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            NodeMessage::Run { .. } => "run",
            NodeMessage::Rows { .. } => "rows",
            NodeMessage::Weights { .. } => "weights",
            NodeMessage::Fetched { .. } => "fetched",
            NodeMessage::Parked { .. } => "parked",
            NodeMessage::Unparked { .. } => "unparked",
            NodeMessage::Computed { .. } => "computed",
            NodeMessage::Unbound { .. } => "unbound",
            NodeMessage::Measured { .. } => "measured",
            NodeMessage::Updated { .. } => "updated",
            NodeMessage::Saved { .. } => "saved",
            NodeMessage::Drained { .. } => "drained",
            NodeMessage::DrainAgain { .. } => "drain_again",
        }
    }
}

impl StoreRequest {
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            StoreRequest::ReadWeights { .. } => "read_weights",
            StoreRequest::GatherRows { .. } => "gather_rows",
            StoreRequest::ReadChunk { .. } => "read_chunk",
            StoreRequest::WriteChunk { .. } => "write_chunk",
            StoreRequest::FinishLayer { .. } => "finish_layer",
            StoreRequest::Save { .. } => "save",
            StoreRequest::Commit { .. } => "commit",
            StoreRequest::WriteScratch { .. } => "write_scratch",
            StoreRequest::ReadScratch { .. } => "read_scratch",
            StoreRequest::Drain { .. } => "drain",
        }
    }
}

impl ComputeRequest {
    /// Commands of a kind that fail alike share a name.
    pub(crate) fn kind(&self) -> &'static str {
        match self.command {
            Command::Bind { .. } => "bind",
            Command::Unbind { .. } => "unbind",
            Command::Put { .. } | Command::Get { .. } | Command::Free { .. } => "move",
            Command::Embed { .. }
            | Command::Forward { .. }
            | Command::HeadNorm { .. }
            | Command::HeadScore { .. }
            | Command::HeadLoss { .. }
            | Command::HeadLogits { .. } => "forward",
            Command::Backward { .. }
            | Command::HeadBackward { .. }
            | Command::HeadNormBackward { .. }
            | Command::EmbedBackward { .. } => "backward",
            Command::TakeGradient { .. } | Command::TakeRows => "take_gradient",
            Command::Clear => "clear",
        }
    }
}

impl OptimizerMessage {
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            OptimizerMessage::Measure { .. } => "measure",
            OptimizerMessage::Update { .. } => "update",
            OptimizerMessage::Drain { .. } => "drain",
            OptimizerMessage::ChunkRead { .. } => "chunk_read",
            OptimizerMessage::GradientRead { .. } => "gradient_read",
            OptimizerMessage::SpilledRead { .. } => "spilled_read",
            OptimizerMessage::Summed { .. } => "summed",
            OptimizerMessage::ChunkWritten { .. } => "chunk_written",
        }
    }
}
