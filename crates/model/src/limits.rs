//! Memory: the hard [`Budget`] that blocks are leased from, and [`Limits`], the sum it must hold.
//!
//! Invariants:
//! - the bytes of living and cached blocks never exceed the budget;
//! - `Limits` is a sum of named parts; a budget below the smallest sum is refused with the number
//!   needed, and what is left above it only ever saves time, never changes bits;
//! - nothing here grows with the model's depth except what the budget has room for.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::{HostBytes, LayerKind, LayerTable};

/// Why memory was refused.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum BudgetError {
    #[error(
        "the memory budget of {given_bytes} bytes is too small: this run needs at least \
         {needed_bytes} bytes ({parts}); raise --ram{remedy}"
    )]
    TooSmall { given_bytes: u64, needed_bytes: u64, parts: String, remedy: String },
    #[error(
        "a block of {wanted_bytes} bytes does not fit: {used_bytes} of {total_bytes} bytes are in use"
    )]
    Exhausted { wanted_bytes: usize, used_bytes: usize, total_bytes: usize },
}

/// A hard cap on host memory. Dropped blocks stay cached by length, because fresh pages cost
/// more than the arithmetic done on them; cached blocks make room when another length is needed.
#[derive(Clone, Debug)]
pub struct Budget {
    shared: Arc<Mutex<Account>>,
}

#[derive(Debug)]
struct Account {
    total_bytes: usize,
    /// Living and cached blocks.
    held_bytes: usize,
    living_bytes: usize,
    peak_bytes: usize,
    cached: BTreeMap<usize, Vec<HostBytes>>,
}

impl Budget {
    /// A budget of `total_bytes`.
    pub fn new(total_bytes: usize) -> Budget {
        let account = Account {
            total_bytes,
            held_bytes: 0,
            living_bytes: 0,
            peak_bytes: 0,
            cached: BTreeMap::new(),
        };
        Budget { shared: Arc::new(Mutex::new(account)) }
    }

    /// A writable block of `len` bytes whose contents are unspecified (but initialised).
    pub fn block(&self, len: usize) -> Result<HostBytes, BudgetError> {
        let inner = self.account().take(len)?;
        Ok(self.lease(inner))
    }

    /// A block that is all zero.
    pub fn zeroed(&self, len: usize) -> Result<HostBytes, BudgetError> {
        let mut block = self.block(len)?;
        block.bytes_mut().fill(0);
        Ok(block)
    }

    /// The cap in bytes.
    pub fn total_bytes(&self) -> usize {
        self.account().total_bytes
    }

    /// Bytes of living blocks.
    pub fn used_bytes(&self) -> usize {
        self.account().living_bytes
    }

    /// Highest [`Budget::used_bytes`] so far.
    pub fn peak_bytes(&self) -> usize {
        self.account().peak_bytes
    }

    fn account(&self) -> MutexGuard<'_, Account> {
        // Every change of the account is a complete one, so a panic elsewhere leaves it valid.
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[allow(unsafe_code)]
    fn lease(&self, mut inner: HostBytes) -> HostBytes {
        let len = inner.len();
        let start = std::ptr::NonNull::from(inner.bytes_mut()).cast::<u8>();
        let owner = Lease { inner: Some(inner), budget: self.clone() };
        // SAFETY: `inner` is a heap block that does not move; the lease owns it, is dropped with
        // the new block, and hands it on only then.
        unsafe { HostBytes::from_owner(start, len, true, owner) }
    }
}

impl Account {
    fn take(&mut self, len: usize) -> Result<HostBytes, BudgetError> {
        let cached = self.cached.get_mut(&len).and_then(Vec::pop);
        let block = match cached {
            Some(block) => block,
            None => {
                self.make_room(len)?;
                self.held_bytes += len;
                HostBytes::zeroed(len)
            }
        };
        self.living_bytes += len;
        self.peak_bytes = self.peak_bytes.max(self.living_bytes);
        assert!(self.living_bytes <= self.held_bytes && self.held_bytes <= self.total_bytes);
        Ok(block)
    }

    fn make_room(&mut self, len: usize) -> Result<(), BudgetError> {
        while self.held_bytes + len > self.total_bytes {
            let Some(mut entry) = self.cached.last_entry() else {
                return Err(BudgetError::Exhausted {
                    wanted_bytes: len,
                    used_bytes: self.living_bytes,
                    total_bytes: self.total_bytes,
                });
            };
            match entry.get_mut().pop() {
                Some(block) => self.held_bytes -= block.len(),
                None => {
                    entry.remove();
                }
            }
        }
        Ok(())
    }
}

struct Lease {
    inner: Option<HostBytes>,
    budget: Budget,
}

impl Drop for Lease {
    fn drop(&mut self) {
        let Some(block) = self.inner.take() else { return };
        let mut account = self.budget.account();
        account.living_bytes -= block.len();
        account.cached.entry(block.len()).or_default().push(block);
    }
}

/// How many tokens a step has and how they are cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunShape {
    pub batch_rows: usize,
    /// Rows that pass a layer together; divides `batch_rows`.
    pub micro_rows: usize,
    pub seq_len: usize,
}

impl RunShape {
    /// Microbatches of a step.
    pub fn micros(&self) -> usize {
        self.batch_rows / self.micro_rows
    }

    /// Tokens of one microbatch.
    pub fn micro_tokens(&self) -> usize {
        self.micro_rows * self.seq_len
    }

    /// Tokens of a step.
    pub fn step_tokens(&self) -> usize {
        self.batch_rows * self.seq_len
    }
}

/// What the compute device needs in host memory, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Workspace {
    /// Most that any single command allocates while it runs.
    pub command_bytes: usize,
    /// Inner activations of one decoder layer and one microbatch, when they are kept.
    pub kept_bytes: usize,
}

/// How many buffers of each kind a run has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Tiles of weights bound or on their way at once.
    pub weight_buffers: usize,
    pub weight_buffer_bytes: usize,
    /// Boundary activations `[micro tokens, D]` that stay in RAM; the others go to `scratch/`.
    pub boundaries: usize,
    pub boundary_bytes: usize,
    /// Bytes of complete gradients that may wait in RAM for the optimizer.
    pub gradient_bytes: usize,
    /// Microbatches of decoder layers whose inner activations are kept for backward.
    pub kept: usize,
    pub kept_bytes: usize,
    /// Chunks of state the optimizer has in flight.
    pub optimizer_chunks: usize,
    pub workspace_bytes: usize,
    pub total_bytes: usize,
}

/// Bytes of one unit of I/O and hashing, counted from the first byte of a plane.
pub const CHUNK_BYTES: usize = 4 << 20;
/// Chunks the optimizer needs so that reading, arithmetic and writing overlap.
const OPTIMIZER_CHUNKS: usize = 4;
/// Blocks per optimizer chunk: three planes in, three out.
const CHUNK_BLOCKS: usize = 6;
/// Fewest tiles with which the next one loads while one computes.
const WEIGHT_BUFFERS_MIN: usize = 2;
const WEIGHT_BUFFERS_MAX: usize = 4;

impl Limits {
    /// Shares `ram_bytes` out. Gradients come first (`keep_gradients`: all of them should wait in
    /// RAM), then kept activations.
    pub fn new(
        table: &LayerTable,
        shape: RunShape,
        workspace: Workspace,
        keep_gradients: bool,
        ram_bytes: usize,
    ) -> Result<Limits, BudgetError> {
        let parts = Parts::new(table, shape, workspace);
        let needed = parts.minimum();
        if needed > ram_bytes {
            return Err(BudgetError::TooSmall {
                given_bytes: ram_bytes as u64,
                needed_bytes: needed as u64,
                parts: parts.describe(),
                remedy: String::new(),
            });
        }
        let mut spare = ram_bytes - needed;
        let wanted = if keep_gradients { parts.all_gradients } else { parts.gradients };
        let gradient_bytes = parts.gradients + spare.min(wanted.saturating_sub(parts.gradients));
        spare -= gradient_bytes - parts.gradients;
        let extra_buffers =
            (spare / parts.weight_buffer.max(1)).min(WEIGHT_BUFFERS_MAX - WEIGHT_BUFFERS_MIN);
        spare -= extra_buffers * parts.weight_buffer;
        let decoders = table.len() - 2;
        let kept = (spare / workspace.kept_bytes.max(1)).min(decoders * shape.micros());
        Ok(Limits {
            weight_buffers: WEIGHT_BUFFERS_MIN + extra_buffers,
            weight_buffer_bytes: parts.weight_buffer,
            boundaries: parts.boundary_count,
            boundary_bytes: parts.boundary,
            gradient_bytes,
            kept,
            kept_bytes: workspace.kept_bytes,
            optimizer_chunks: OPTIMIZER_CHUNKS,
            workspace_bytes: workspace.command_bytes,
            total_bytes: ram_bytes,
        })
    }
}

struct Parts {
    weight_buffer: usize,
    boundary: usize,
    boundary_count: usize,
    /// Two gradients of the largest decoder layer, the embedding's, and the head's.
    gradients: usize,
    all_gradients: usize,
    workspace: usize,
}

impl Parts {
    fn new(table: &LayerTable, shape: RunShape, workspace: Workspace) -> Parts {
        let hidden = table.layer(table.head()).tensors[0].elements();
        let boundary = shape.micro_tokens() * hidden * 4;
        // Inputs of every layer, and per microbatch: gathered rows, normed hidden state, its
        // gradient, and the gradient that travels down.
        let boundary_count = (table.len() + 4) * shape.micros();
        Parts {
            weight_buffer: largest_tile_bytes(table),
            boundary,
            boundary_count,
            gradients: resident_gradients(table, shape, hidden),
            all_gradients: gradient_total(table, shape, hidden),
            workspace: workspace.command_bytes,
        }
    }

    fn minimum(&self) -> usize {
        WEIGHT_BUFFERS_MIN * self.weight_buffer
            + self.boundary_count * self.boundary
            + self.gradients
            + self.workspace
            + optimizer_bytes()
    }

    fn describe(&self) -> String {
        format!(
            "weights {}, boundary activations {}, gradients {}, compute {}, optimizer {}",
            WEIGHT_BUFFERS_MIN * self.weight_buffer,
            self.boundary_count * self.boundary,
            self.gradients,
            self.workspace,
            optimizer_bytes(),
        )
    }
}

fn optimizer_bytes() -> usize {
    OPTIMIZER_CHUNKS * CHUNK_BLOCKS * CHUNK_BYTES
}

fn largest_tile_bytes(table: &LayerTable) -> usize {
    table
        .layers()
        .iter()
        .filter(|l| l.kind != LayerKind::Embedding)
        .flat_map(|l| table.tiles(l.id))
        .map(|t| t.f32_bytes())
        .max()
        .unwrap_or(0)
}

/// Gradient of the embedding: all rows when tied, else the rows a step can touch.
fn embedding_gradient_bytes(table: &LayerTable, shape: RunShape, hidden: usize) -> usize {
    let all = table.layer(table.embedding()).elements() * 4;
    if table.tied() { all } else { all.min(shape.step_tokens() * hidden * 4) }
}

fn resident_gradients(table: &LayerTable, shape: RunShape, hidden: usize) -> usize {
    let decoder = table.layers()[1..table.len() - 1].iter().map(|l| l.elements() * 4).max();
    let head = table.layer(table.head()).elements() * 4;
    2 * decoder.unwrap_or(0) + head + embedding_gradient_bytes(table, shape, hidden)
}

fn gradient_total(table: &LayerTable, shape: RunShape, hidden: usize) -> usize {
    let above: usize = table.layers()[1..].iter().map(|l| l.elements() * 4).sum();
    above + embedding_gradient_bytes(table, shape, hidden)
}

#[cfg(test)]
mod tests;
