//! What the device asks of a driver, whether a card is behind it or the emulator.
//!
//! Invariants:
//! - work of one stream is done in the order of its calls; between streams only events order it;
//! - host memory that a call names belongs to it until the work is done;
//! - nothing here waits: whether work is done is asked of an event.

use std::any::Any;
use std::ffi::CStr;
use std::ops::Range;
use std::sync::Arc;

use model::HostBytes;

/// Queues of work that go on beside each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stream {
    /// Weights and inputs from the host.
    In,
    Compute,
    /// Gradients and outputs to the host.
    Out,
}

impl Stream {
    pub(super) const ALL: [Stream; 3] = [Stream::In, Stream::Compute, Stream::Out];

    pub(super) fn index(self) -> usize {
        self as usize
    }
}

/// A block of the device's memory.
#[derive(Debug)]
pub(super) struct Memory {
    pub(super) id: u64,
    pub(super) bytes: usize,
}

impl Memory {
    pub(super) fn span(&self) -> Span {
        self.part(0..self.bytes)
    }

    /// # Panics
    /// If `bytes` are not inside the block.
    pub(super) fn part(&self, bytes: Range<usize>) -> Span {
        assert!(bytes.start <= bytes.end && bytes.end <= self.bytes, "{bytes:?} of {self:?}");
        Span { id: self.id, bytes }
    }
}

/// Bytes of a block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Span {
    pub(super) id: u64,
    pub(super) bytes: Range<usize>,
}

/// An argument of a kernel.
#[derive(Clone, Debug)]
pub(super) enum Arg {
    Int(i32),
    Long(i64),
    Word(u32),
    Float(f32),
    /// A buffer that is read.
    Read(Span),
    /// A buffer that is written and may be read.
    Write(Span),
    /// A buffer that is not there.
    Absent,
}

/// Blocks and threads of a launch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Grid {
    pub(super) blocks: [u32; 3],
    /// Of a block: whole warps.
    pub(super) threads: u32,
    pub(super) shared_bytes: u32,
}

/// What a matrix holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Element {
    F32,
    Bf16,
}

impl Element {
    pub(super) fn bytes(self) -> usize {
        match self {
            Element::F32 => 4,
            Element::Bf16 => 2,
        }
    }
}

/// Which operands are transposed: N as it lies, T transposed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// `C [m, n] = A [m, k] * B [n, k]^T`
    Nt,
    /// `C [m, n] = A [m, k] * B [k, n]`
    Nn,
    /// `C [m, n] = A [k, m]^T * B [k, n]`
    Tn,
}

/// A product of row-major matrices, summed in float32.
#[derive(Clone, Debug)]
pub(super) struct Product {
    pub(super) form: Form,
    /// m, n, k
    pub(super) sizes: [usize; 3],
    pub(super) a: Span,
    pub(super) b: Span,
    pub(super) c: Span,
    /// Of A and B, and of C.
    pub(super) operands: Element,
    pub(super) result: Element,
    /// Adds to what C holds.
    pub(super) add: bool,
}

/// A moment in a stream, in the form that its driver knows.
#[derive(Clone, Debug)]
pub(super) struct Event(pub(super) Arc<dyn Any + Send + Sync>);

/// Why work failed. All that is enqueued later fails as well.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum DriverError {
    #[error("{wanted_bytes} bytes of device memory are asked for, {free_bytes} are free")]
    Memory { wanted_bytes: usize, free_bytes: usize },
    /// Of the emulator: a call that a card would have let pass.
    #[error("{0}")]
    Misuse(String),
}

/// A device's memory and streams.
pub(super) trait Driver: Send + Sync {
    fn allocate(&self, bytes: usize) -> Result<Memory, DriverError>;
    /// All work that uses the block is known to be done: an event behind it was seen.
    fn free(&self, memory: Memory);
    /// `bytes` of `from` to the device.
    fn copy_in(&self, on: Stream, from: Arc<HostBytes>, bytes: Range<usize>, to: Span);
    /// To the host: `done` gets the block back, filled from its start.
    fn copy_out(
        &self,
        on: Stream,
        from: Span,
        to: HostBytes,
        done: Box<dyn FnOnce(HostBytes) + Send>,
    );
    fn fill(&self, on: Stream, to: Span, byte: u8);
    fn launch(&self, on: Stream, kernel: &'static CStr, grid: Grid, arguments: Vec<Arg>);
    fn multiply(&self, on: Stream, product: Product);
    fn record(&self, on: Stream) -> Event;
    /// What is enqueued on the stream from now on is done after the event.
    fn wait(&self, on: Stream, event: &Event);
    /// Whether the event has been reached, or what failed before.
    fn query(&self, event: &Event) -> Result<bool, DriverError>;
}
