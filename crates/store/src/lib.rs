//! Weights and Adam moments on disk: format, I/O engines, slots, hashes, atomic commit, recovery.
//!
//! Invariants:
//! - a live slot is never written; a step writes the inactive slots and becomes real with one
//!   log record, appended only after every slot it names is synced;
//! - the log of this opening, with a synced OPEN record that restates the whole state, exists
//!   before any slot is written;
//! - after a failed sync or a hash mismatch nothing is written until the store is opened again;
//! - everything reaches the disk through [`Io`]; nothing read from it is trusted;
//! - no file is sparse, and a state file's length and header never change after its creation.
//!
//! `README.md` beside this crate's manifest has the bytes of every file and the assumptions about
//! the disk.

mod chunk;
mod create;
mod drives;
mod error;
mod files;
mod hashes;
mod header;
mod io;
mod layout;
mod locks;
mod log;
mod measure;
mod opening;
mod reading;
mod record;
mod recovery;
mod rollback;
mod scratch;
mod slots;
mod snapshots;
mod training;
mod unsaved;

pub use chunk::{ChunkHasher, StateChunk};
pub use create::{NewStore, StoreWriter, create};
pub use drives::{MARK_FILE, Spread};
pub use error::{Done, StoreError, blocking, show_bytes};
pub use hashes::{ChunkHashes, LayerHashes, hash};
pub use io::{
    Access, AfterUse, Fault, Faulty, FileId, Guard, IO_CALLS, Image, Inject, Injection, Io,
    IoCounters, IoDone, IoError, Lock, LockKind, Memory, Op, OpKind, Part, Target, direct_engine,
    injected_engine, memory_engine, mmap_engine,
};
pub use measure::{DiskRates, measure_disk};
pub use reading::{Damage, ReadingStore, layer_hash};
pub use record::{LayerState, RecordKind, State};
pub use recovery::{Cut, Recovery};
pub use rollback::{PreparedRollback, RollBack};
pub use scratch::Scratch;
pub use snapshots::{PREVIOUS, Snapshot};
pub use training::{Room, TrainingStore, WrittenAgain};
