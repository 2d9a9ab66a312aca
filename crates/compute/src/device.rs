//! The [`Device`] trait: commands are enqueued, run in order, and answer through a completion.
//!
//! Letters: B rows, S sequence, T = B*S tokens of the microbatch, D hidden, V vocabulary.

use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::channel;

use model::{BudgetError, HostBytes, LayerId, TileId, Weights};

/// Label of a position that predicts nothing.
pub const NO_TARGET: u32 = u32::MAX;

/// Name of an activation, or of an activation's gradient, on the device: chosen by the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TensorId(pub u64);

/// Name of a bound tile of weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WeightsId(pub u64);

/// Rows and length of the sequences of a microbatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MicroShape {
    /// B
    pub rows: usize,
    /// S
    pub seq_len: usize,
}

impl MicroShape {
    /// T = B * S
    pub fn tokens(&self) -> usize {
        self.rows * self.seq_len
    }
}

/// One unit of work. Tensors are float32 `[T, D]` unless noted.
///
/// "Consumes" means that the tensor is gone afterwards. A command that names a tensor, weights
/// or kept activations that do not exist fails with [`DeviceError::Unknown`].
#[derive(Debug)]
pub enum Command {
    /// Makes a tile usable under `id` until `Unbind`. What the device computes with as it is, is
    /// dropped then, not earlier.
    Bind {
        id: WeightsId,
        layer: LayerId,
        tile: TileId,
        weights: Weights,
    },
    Unbind {
        id: WeightsId,
    },
    /// Moves a host block to the device.
    Put {
        id: TensorId,
        bytes: HostBytes,
    },
    /// Moves a tensor to the host; consumes it. Outcome: `Bytes`.
    Get {
        id: TensorId,
    },
    Free {
        id: TensorId,
    },
    /// Looks tokens up: `y[t] = rows[index[t]]`; `rows` is `[U, D]`, the distinct rows.
    Embed {
        rows: Weights,
        index: Arc<[u32]>,
        y: TensorId,
    },
    /// A decoder layer, or the residual block of one that is bound. `keep`: inner activations stay for `Backward`, which needs no recompute
    /// then and produces the same bits.
    Forward {
        weights: WeightsId,
        shape: MicroShape,
        x: TensorId,
        y: TensorId,
        keep: bool,
    },
    /// Backward of what `Forward` does. Consumes `x`, `dy` and kept activations; adds to the layer's
    /// gradient if `gradient`; produces `dx` if asked for.
    Backward {
        weights: WeightsId,
        shape: MicroShape,
        x: TensorId,
        dy: TensorId,
        dx: Option<TensorId>,
        gradient: bool,
    },
    /// Final norm: `h = rmsnorm(x)`.
    HeadNorm {
        weights: WeightsId,
        x: TensorId,
        h: TensorId,
    },
    /// Logits of one vocabulary tile, folded into `stats` (per token: running maximum, running
    /// sum of exponentials, logit of the label). Tiles come in ascending order; the first one
    /// creates `stats`. `keep`: the logits stay for `HeadBackward`, which needs no recompute then
    /// and produces the same bits.
    HeadScore {
        weights: WeightsId,
        h: TensorId,
        labels: Arc<[u32]>,
        stats: TensorId,
        keep: bool,
    },
    /// Sum over labelled tokens of `logsumexp - logit of the label`. Outcome: `Loss`.
    HeadLoss {
        stats: TensorId,
        labels: Arc<[u32]>,
    },
    /// Gradients of one vocabulary tile of `scale * loss`: adds to `dh` (the first tile creates
    /// it) and, if `gradient`, to the gradient of the tile's source layer. Consumes kept logits.
    HeadBackward {
        weights: WeightsId,
        h: TensorId,
        stats: TensorId,
        labels: Arc<[u32]>,
        dh: TensorId,
        scale: f32,
        gradient: bool,
    },
    /// Backward of the final norm. Consumes `x` and `dh`; adds to the head's gradient.
    HeadNormBackward {
        weights: WeightsId,
        x: TensorId,
        dh: TensorId,
        dx: Option<TensorId>,
        gradient: bool,
    },
    /// Logits of one vocabulary tile at one token. Outcome: `Logits`.
    HeadLogits {
        weights: WeightsId,
        h: TensorId,
        token: usize,
    },
    /// Adds `dy[t]` to row `tokens[t]` of the rows of the embedding's gradient that tokens touch.
    /// Consumes `dy`.
    EmbedBackward {
        tokens: Arc<[u32]>,
        dy: TensorId,
    },
    /// Moves the complete gradient of a tile to the host, `elements` of its source layer. Outcome:
    /// `Gradient::Dense`.
    TakeGradient {
        layer: LayerId,
        elements: Range<usize>,
    },
    /// Moves the rows of the embedding's gradient to the host that tokens touched; where it is tied,
    /// they add to those of the head's tiles. Outcome: `Gradient::Rows`.
    TakeRows,
    /// Drops every tensor, weight, kept activation and gradient: an attempt was aborted.
    Clear,
}

impl Command {
    /// The weights that the command computes with.
    pub fn weights(&self) -> Option<WeightsId> {
        match self {
            Command::Forward { weights, .. }
            | Command::Backward { weights, .. }
            | Command::HeadNorm { weights, .. }
            | Command::HeadScore { weights, .. }
            | Command::HeadBackward { weights, .. }
            | Command::HeadNormBackward { weights, .. }
            | Command::HeadLogits { weights, .. } => Some(*weights),
            Command::Bind { .. }
            | Command::Unbind { .. }
            | Command::Put { .. }
            | Command::Get { .. }
            | Command::Free { .. }
            | Command::Embed { .. }
            | Command::HeadLoss { .. }
            | Command::EmbedBackward { .. }
            | Command::TakeGradient { .. }
            | Command::TakeRows
            | Command::Clear => None,
        }
    }
}

/// The gradient of a piece of a layer, on the host.
#[derive(Debug)]
pub enum Gradient {
    /// One value for each parameter, in the order of the layer's block, whose element `first` is
    /// the first one: it starts a chunk. Values before the piece mean nothing.
    Dense { first: usize, values: HostBytes },
    /// Only the rows that tokens touched: `values` is `[ids.len(), width]`, ids ascend strictly;
    /// every other row's gradient is zero.
    Rows { ids: Vec<u32>, width: usize, values: HostBytes },
}

/// What a command answers.
#[derive(Debug)]
pub enum Outcome {
    Done,
    Bytes(HostBytes),
    /// Sum of the losses of all labelled tokens, in nats.
    Loss(f64),
    Logits(Vec<f32>),
    Gradient(Gradient),
}

/// Why a command failed. The device stays usable after `Clear`.
#[derive(Clone, Debug, thiserror::Error)]
pub enum DeviceError {
    #[error("{what} {id} is not on the device")]
    Unknown { what: &'static str, id: u64 },
    #[error("{what} has {got} bytes, expected {expected}")]
    Shape { what: &'static str, got: usize, expected: usize },
    #[error("token {token} is beyond the vocabulary of {vocab_size}")]
    Token { token: u32, vocab_size: usize },
    #[error(transparent)]
    Memory(#[from] BudgetError),
    #[error("the device's thread is gone")]
    Gone,
    #[error("the device's thread panicked: {0}")]
    Panicked(String),
}

/// Called once, on the device's thread, when the command has finished.
pub type Done = Box<dyn FnOnce(Result<Outcome, DeviceError>) + Send>;

/// A place where layers are computed.
pub trait Device: Send {
    /// Enqueues `command`; commands run in the order of their calls.
    fn enqueue(&mut self, command: Command, done: Done);

    /// Enqueues `command` and waits until it, and with it all before it, has finished; blocks the
    /// thread. A device that never answers is [`DeviceError::Gone`].
    fn run(&mut self, command: Command) -> Result<Outcome, DeviceError> {
        let (sender, answer) = channel();
        // The receiver waits below until this arrives.
        self.enqueue(command, Box::new(move |result| drop(sender.send(result))));
        answer.recv().unwrap_or(Err(DeviceError::Gone))
    }
}
