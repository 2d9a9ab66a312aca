//! [`Io`]: the only way to the disk, and the engines behind it.
//!
//! Invariants:
//! - data operations carry at most [`CHUNK_BYTES`] and are owned by the engine until their
//!   [`IoDone`] ran, exactly once; a part is dropped before that;
//! - namespace operations are synchronous and durable only after [`Io::sync_dir`] of the
//!   directory; data is durable only after [`Op::Sync`].

mod direct;
mod faulty;
mod injected;
mod job;
mod kept;
mod local;
mod memory;
mod mmap;
mod os;
mod pool;
mod target;

use std::any::Any;
use std::fmt;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, mpsc};

use model::{Budget, CHUNK_BYTES, HostBytes, NextUse};

pub use direct::direct_engine;
pub use faulty::{Fault, Faulty, OpKind};
pub use injected::{IO_CALLS, Inject, Injection, injected_engine};
pub use memory::{Image, Memory, memory_engine};
pub use mmap::mmap_engine;
pub(crate) use pool::Pool;
pub use target::{Part, Target};

use crate::StoreError;

/// An open file of one engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileId(pub(crate) u64);

/// What a file is opened for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    Read,
    ReadWrite,
    /// For reading what is on the disk, whatever the page cache has.
    ReadDisk,
}

/// What becomes of the system's cached copy of a range that was bound in place, when the block is
/// dropped. An engine without such copies ignores it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AfterUse {
    /// It goes, if the engine keeps resident memory bounded.
    Forget,
    /// Somebody reads the range again right after and lets it go then.
    Soon(NextUse),
    /// Somebody reads the range again then: memory that nobody needs before may hold it.
    Later(NextUse),
}

/// Who else may hold a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LockKind {
    Exclusive,
    Shared,
}

/// A lock on a file; dropping it releases it, and so does the end of the process.
pub struct Lock {
    _held: Box<dyn Any + Send + Sync>,
}

impl Lock {
    pub(crate) fn new(held: impl Any + Send + Sync) -> Lock {
        Lock { _held: Box::new(held) }
    }
}

impl fmt::Debug for Lock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Lock")
    }
}

/// Why an operation on the disk failed.
#[derive(Debug, thiserror::Error)]
#[error("cannot {context} {}: {source}", path.display())]
pub struct IoError {
    pub context: &'static str,
    pub path: PathBuf,
    pub source: io::Error,
    /// Bytes the operation wanted to place.
    pub wanted_bytes: u64,
    /// Bytes accepted by an earlier write may be lost.
    pub lost_writes: bool,
}

impl IoError {
    pub(crate) fn new(context: &'static str, path: &Path, source: io::Error) -> IoError {
        IoError { context, path: path.to_owned(), source, wanted_bytes: 0, lost_writes: false }
    }

    pub(crate) fn wanting(mut self, bytes: u64) -> IoError {
        self.wanted_bytes = bytes;
        self
    }

    pub(crate) fn losing_writes(mut self) -> IoError {
        self.lost_writes = true;
        self
    }
}

/// A data operation on at most [`CHUNK_BYTES`].
#[derive(Debug)]
pub enum Op {
    /// Fills `part` from `offset` on; fewer bytes in the file are an error, for an empty part never.
    Read { file: FileId, offset: u64, part: Part },
    /// Writes `bytes[range]` at `offset`; past the end of the file it grows.
    Write { file: FileId, offset: u64, bytes: Arc<HostBytes>, range: Range<usize> },
    /// Makes every finished write of the file durable.
    Sync { file: FileId },
}

/// What a data operation reports to, once; see [`Done`](crate::Done).
pub type IoDone = Box<dyn FnOnce(Result<(), IoError>) + Send>;

/// Bytes moved and syncs asked for since the engine started. What the engine's own memory has is not
/// read; what the page cache has is, since nobody can tell.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IoCounters {
    pub read_bytes: u64,
    pub written_bytes: u64,
    pub syncs: u64,
}

/// What keeps a store whole, one by one. Tests turn one off to see that they notice; nothing else can.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Guard {
    /// A record is believed only with its checksum.
    RecordChecksum,
    /// A `hashes` file is believed only with its checksum.
    HashesChecksum,
    /// A `hashes` file must be the one that the record names.
    HashesOfRecord,
    /// A chunk that was read must match its hash.
    ChunkHash,
    /// Behind a torn record every live chunk is hashed.
    LiveBehindTear,
    /// `config.json` must be the one that the store was created with.
    ConfigHash,
    /// A live slot is never written.
    LiveSlot,
    /// Nor is one that a commit in flight makes live.
    PendingSlot,
    /// Nor is a file that a snapshot has a name for.
    SecondName,
    /// A commit names only slots that are finished and synced.
    FinishedSlots,
    /// After a lost write nothing is written any more.
    Poison,
}

/// A disk. Namespace operations are synchronous, data operations submit and complete.
pub trait Io: Send + Sync + fmt::Debug + 'static {
    /// Creates a file of `len` zero bytes, open for writing: exclusive, its blocks allocated in
    /// one piece where the file system can.
    fn create(&self, path: &Path, len: u64) -> Result<FileId, IoError>;
    fn open(&self, path: &Path, access: Access) -> Result<FileId, IoError>;
    fn close(&self, file: FileId);
    fn len(&self, file: FileId) -> Result<u64, IoError>;
    /// Replaces `to` if it exists.
    fn rename(&self, from: &Path, to: &Path) -> Result<(), IoError>;
    fn unlink(&self, path: &Path) -> Result<(), IoError>;
    /// Gives a file a second name, `to`, which must be free.
    fn link(&self, from: &Path, to: &Path) -> Result<(), IoError>;
    /// Names in a directory, sorted.
    fn list(&self, dir: &Path) -> Result<Vec<String>, IoError>;
    /// Creates a directory and its parents; an existing one is fine. Files in it are overwritten
    /// in place (no copy-on-write) where the file system offers the choice.
    fn create_dir(&self, dir: &Path) -> Result<(), IoError>;
    fn remove_dir(&self, dir: &Path) -> Result<(), IoError>;
    fn sync_dir(&self, dir: &Path) -> Result<(), IoError>;
    /// Whether there is something at `path`. What cannot be looked at is an error, not absent.
    fn exists(&self, path: &Path) -> Result<bool, IoError>;
    /// Whether `path` itself is a symbolic link.
    fn is_link(&self, path: &Path) -> Result<bool, IoError>;
    /// Makes `path` a symbolic link to `target`.
    fn symlink(&self, target: &Path, path: &Path) -> Result<(), IoError>;
    /// Where a symbolic link leads, for messages.
    fn link_target(&self, _path: &Path) -> Option<PathBuf> {
        None
    }
    /// A number that tells file systems apart: of the one that `path` leads to.
    fn drive(&self, path: &Path) -> Result<u64, IoError>;
    /// Whether two names are of one file; no if either is missing.
    fn is_same(&self, one: &Path, other: &Path) -> Result<bool, IoError>;
    /// Whether an open file still has this name: no if it was moved, removed or replaced.
    fn is_at(&self, file: FileId, path: &Path) -> Result<bool, IoError>;
    /// Number of names the file has.
    fn link_count(&self, path: &Path) -> Result<u64, IoError>;
    /// Bytes this process may still allocate on the disk that holds `path`.
    fn free_bytes(&self, path: &Path) -> Result<u64, IoError>;
    /// What about this disk will hurt a store in `dir`, in sentences for the user.
    fn disk_warnings(&self, dir: &Path) -> Vec<String>;
    /// Tries to lock an existing file; `None` while somebody else holds it.
    fn lock(&self, path: &Path, kind: LockKind) -> Result<Option<Lock>, IoError>;
    /// Where a read of `offset..offset + len` will land: a map of that very range, or a block
    /// leased from `budget`, as the engine prefers. Unread until its parts are submitted.
    fn target(
        &self,
        file: FileId,
        offset: u64,
        len: usize,
        budget: &Budget,
        after: AfterUse,
    ) -> Result<Target, StoreError>;
    /// The block that a read of all of its range has filled or that is to be written there, so that
    /// its contents outlast its use as `after` says, if the engine has a way. `budget` is the one it
    /// was leased from.
    fn keeping(
        &self,
        _file: FileId,
        _offset: u64,
        block: HostBytes,
        _budget: &Budget,
        _after: AfterUse,
    ) -> HostBytes {
        block
    }
    /// Starts a data operation.
    ///
    /// # Panics
    /// On more than [`CHUNK_BYTES`] or a file that is not open: a programmer's error.
    fn submit(&self, op: Op, done: IoDone);
    fn counters(&self) -> IoCounters;
    /// Whether a test has turned a guard off.
    fn is_off(&self, _guard: Guard) -> bool {
        false
    }
}

/// An open file that is closed when this drops.
#[derive(Debug)]
pub(crate) struct Handle {
    io: Arc<dyn Io>,
    file: FileId,
}

impl Handle {
    pub(crate) fn new(io: &Arc<dyn Io>, file: FileId) -> Handle {
        Handle { io: Arc::clone(io), file }
    }

    pub(crate) fn id(&self) -> FileId {
        self.file
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.io.close(self.file);
    }
}

/// Gathers `count` results into one: `done` runs after the last, with the first error.
pub(crate) fn fan_in(count: usize, done: IoDone) -> FanIn {
    let done = if count == 0 {
        done(Ok(()));
        None
    } else {
        Some(done)
    };
    FanIn { shared: Arc::new(Mutex::new(FanState { left: count, error: None, done })) }
}

pub(crate) struct FanIn {
    shared: Arc<Mutex<FanState>>,
}

struct FanState {
    left: usize,
    error: Option<IoError>,
    done: Option<IoDone>,
}

impl FanIn {
    /// One of the results; every one of the `count` must be reported.
    pub(crate) fn branch(&self) -> IoDone {
        let shared = Arc::clone(&self.shared);
        Box::new(move |result| {
            let last = {
                let mut state = shared.lock().unwrap_or_else(PoisonError::into_inner);
                state.left -= 1;
                if let Err(error) = result {
                    let worse = error.lost_writes || state.error.is_none();
                    if worse {
                        state.error = Some(error);
                    }
                }
                state.take_if_last()
            };
            if let Some((done, outcome)) = last {
                done(outcome);
            }
        })
    }
}

impl FanState {
    fn take_if_last(&mut self) -> Option<(IoDone, Result<(), IoError>)> {
        if self.left > 0 {
            return None;
        }
        let outcome = self.error.take().map_or(Ok(()), Err);
        self.done.take().map(|done| (done, outcome))
    }
}

/// Submits the reads that fill all of `target` from `offset` on; `done` gets the whole block.
pub(crate) fn read_target(
    io: &dyn Io,
    file: FileId,
    offset: u64,
    target: Target,
    done: Box<dyn FnOnce(Result<HostBytes, IoError>) + Send>,
) {
    let pieces = piece_lengths(target.len());
    let reads: Vec<_> = pieces
        .iter()
        .scan(offset, |at, &len| {
            *at += len as u64;
            Some((file, *at - len as u64))
        })
        .collect();
    read_scattered(io, &reads, &pieces, target, done);
}

/// Submits one read per `(file, offset)`, the i-th filling the next `lengths[i]` bytes.
pub(crate) fn read_scattered(
    io: &dyn Io,
    reads: &[(FileId, u64)],
    lengths: &[usize],
    target: Target,
    done: Box<dyn FnOnce(Result<HostBytes, IoError>) + Send>,
) {
    let (landing, parts) = target.split(lengths);
    let fan = fan_in(reads.len(), Box::new(move |result| done(result.map(|()| landing.join()))));
    for (&(file, offset), part) in reads.iter().zip(parts) {
        io.submit(Op::Read { file, offset, part }, fan.branch());
    }
}

/// Submits the writes that place all of `bytes` at `offset`.
pub(crate) fn write_block(
    io: &dyn Io,
    file: FileId,
    offset: u64,
    bytes: &Arc<HostBytes>,
    done: IoDone,
) {
    write_range(io, file, offset, (bytes, 0..bytes.len()), done);
}

/// [`write_block`] for a part of one.
pub(crate) fn write_range(
    io: &dyn Io,
    file: FileId,
    offset: u64,
    (bytes, range): (&Arc<HostBytes>, Range<usize>),
    done: IoDone,
) {
    let pieces = piece_lengths(range.len());
    let fan = fan_in(pieces.len(), done);
    let mut start = 0;
    for len in pieces {
        let part = range.start + start..range.start + start + len;
        let op = Op::Write {
            file,
            offset: offset + start as u64,
            bytes: Arc::clone(bytes),
            range: part,
        };
        io.submit(op, fan.branch());
        start += len;
    }
}

pub(crate) fn piece_lengths(len: usize) -> Vec<usize> {
    (0..len).step_by(CHUNK_BYTES).map(|start| CHUNK_BYTES.min(len - start)).collect()
}

/// Runs one data operation to its end; not from inside an [`IoDone`].
pub(crate) fn wait(start: impl FnOnce(IoDone)) -> Result<(), IoError> {
    let (sender, receiver) = mpsc::sync_channel(1);
    start(Box::new(move |result| {
        // The receiver waits below until this arrives.
        let _ = sender.send(result);
    }));
    receiver.recv().unwrap_or_else(|_| {
        let source = io::Error::other("the operation was dropped unfinished");
        Err(IoError::new("finish an operation on", Path::new("the disk"), source))
    })
}

/// Reads `len` bytes at `offset`, waiting for them.
pub(crate) fn read_now(
    io: &dyn Io,
    file: FileId,
    offset: u64,
    len: usize,
) -> Result<HostBytes, IoError> {
    let (sender, receiver) = mpsc::sync_channel(1);
    let done = Box::new(move |result| {
        // Received after `wait`, which ends only when this was sent.
        let _ = sender.send(result);
    });
    read_target(io, file, offset, Target::heap(HostBytes::zeroed(len)), done);
    receiver.recv().unwrap_or_else(|_| {
        let source = io::Error::other("the read was dropped unfinished");
        Err(IoError::new("read", Path::new("the disk"), source))
    })
}

#[cfg(test)]
mod tests;
