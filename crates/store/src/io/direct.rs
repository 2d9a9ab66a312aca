//! The `direct` engine: whole pages move past the page cache, by io_uring, many at a time.
//!
//! Invariants:
//! - what is not whole pages - small files, rows, the last bytes of a plane - goes through the page
//!   cache, which the system keeps coherent with the rest;
//! - what is read again stays in the budget's spare memory, for as long as nobody else needs it;
//! - a file system without direct I/O is served through the cache, and a kernel without io_uring by
//!   threads: neither is refused.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use model::{Budget, HostBytes, NextUse};

use super::job::{Flying, Job, Moves};
use super::kept::Kept;
use super::local::{Local, OpenFile, Transfer};
use super::pool::Pool;
use super::{Access, AfterUse, Io, IoDone, IoError, Part, Target, os};
use crate::StoreError;

/// Threads of an engine without io_uring.
const THREADS_MAX: u32 = 16;
/// Threads that copy what memory still holds.
const COPIERS: usize = 2;

/// The disk past the page cache, with at most `depth` requests at the kernel. Blocks that are read
/// into are leased from the caller's budget.
///
/// Raises the process's soft limit of open files to the hard one.
pub fn direct_engine(depth: u32) -> Arc<dyn Io> {
    let carriers = Carriers::ring(depth.max(1)).unwrap_or_else(|| Carriers::threads(depth));
    Arc::new(Local::new(Direct::new(carriers)))
}

#[derive(Debug)]
struct Direct {
    carriers: Arc<Carriers>,
    copiers: Pool,
}

/// Whoever does the jobs.
#[derive(Debug)]
enum Carriers {
    #[cfg(target_os = "linux")]
    Ring(os::ring::Ring),
    /// Those that read, and those that write and sync: reads never wait behind a sync.
    Threads { readers: Pool, writers: Pool },
}

impl Carriers {
    #[cfg(target_os = "linux")]
    fn ring(depth: u32) -> Option<Carriers> {
        os::ring::Ring::start(depth).map(Carriers::Ring).ok()
    }

    #[cfg(not(target_os = "linux"))]
    fn ring(_: u32) -> Option<Carriers> {
        None
    }

    fn threads(depth: u32) -> Carriers {
        let threads = depth.clamp(1, THREADS_MAX) as usize;
        let (readers, writers) =
            (Pool::new("store-read", threads), Pool::new("store-write", threads));
        Carriers::Threads { readers, writers }
    }

    fn send(&self, job: Job) {
        match self {
            #[cfg(target_os = "linux")]
            Carriers::Ring(ring) => ring.send(job),
            Carriers::Threads { readers, writers } => {
                let pool = if let Moves::Into(_) = job.moves { readers } else { writers };
                pool.run(move || Flying::new(job).run());
            }
        }
    }
}

/// A file's handles.
#[derive(Debug)]
struct Handles {
    cached: Arc<File>,
    /// Opened when it is first of use.
    direct: OnceLock<Option<Arc<File>>>,
    kept: Kept,
}

impl Handles {
    fn direct(&self) -> Option<Arc<File>> {
        let open = || os::open_direct(&self.cached).map(Arc::new);
        self.direct.get_or_init(open).clone()
    }
}

impl Direct {
    fn new(carriers: Carriers) -> Direct {
        Direct { carriers: Arc::new(carriers), copiers: Pool::new("store-copy", COPIERS) }
    }
}

impl Carriers {
    fn start(
        &self,
        open: Arc<OpenFile<Handles>>,
        moves: Moves,
        offset: u64,
        fail: fn(&OpenFile<Handles>, io::Error) -> IoError,
        done: IoDone,
    ) {
        let direct = if moves.direct_bytes(offset) > 0 { open.state.direct() } else { None };
        let cached = Arc::clone(&open.state.cached);
        let done = Box::new(move |result: io::Result<()>| done(result.map_err(|e| fail(&open, e))));
        self.send(Job { moves, direct, cached, offset, done });
    }

    fn read(&self, open: Arc<OpenFile<Handles>>, offset: u64, part: Part, done: IoDone) {
        let fail = |open: &OpenFile<Handles>, e| IoError::new("read", &open.path, e);
        self.start(open, Moves::Into(part), offset, fail, done);
    }
}

impl Transfer for Direct {
    type State = Handles;
    const IS_DIRECT: bool = true;

    fn opened(&self, file: &Arc<File>, _: &Path, _: Access) -> Handles {
        os::expect_no_order(file);
        Handles { cached: Arc::clone(file), direct: OnceLock::new(), kept: Kept::default() }
    }

    fn target(
        &self,
        open: &Arc<OpenFile<Handles>>,
        range: Range<u64>,
        budget: &Budget,
        _: AfterUse,
    ) -> Result<Target, StoreError> {
        match open.state.kept.take(&range) {
            Some(block) => Ok(Target::in_place(block)),
            None => Ok(Target::heap(budget.block((range.end - range.start) as usize)?)),
        }
    }

    fn keeping(
        &self,
        open: Arc<OpenFile<Handles>>,
        range: Range<u64>,
        block: HostBytes,
        budget: &Budget,
        next_use: NextUse,
    ) -> HostBytes {
        let budget = budget.clone();
        block.released_to(move |block| open.state.kept.keep(range, block, (&budget, next_use)))
    }

    fn read(
        &self,
        open: Arc<OpenFile<Handles>>,
        offset: u64,
        part: Part,
        read_bytes: &Arc<AtomicU64>,
        done: IoDone,
    ) {
        if part.is_in_place() {
            return self.copiers.run(move || finish(part, done));
        }
        let (carriers, read_bytes) = (Arc::clone(&self.carriers), Arc::clone(read_bytes));
        let range = offset..offset + part.len() as u64;
        let kept = open.state.kept.find(&range);
        let from_disk = move |part: Part, done| {
            read_bytes.fetch_add(part.len() as u64, Ordering::Relaxed);
            carriers.read(open, offset, part, done);
        };
        match kept {
            None => from_disk(part, done),
            Some(kept) => self.copiers.run(move || {
                let mut part = part;
                match kept.fill(&mut part) {
                    true => finish(part, done),
                    false => from_disk(part, done),
                }
            }),
        }
    }

    fn write(
        &self,
        open: Arc<OpenFile<Handles>>,
        offset: u64,
        bytes: Arc<HostBytes>,
        range: Range<usize>,
        done: IoDone,
    ) {
        let wanted = range.len() as u64;
        open.state.kept.forget(&(offset..offset + wanted));
        let done: IoDone =
            Box::new(move |result| done(result.map_err(|e: IoError| e.wanting(wanted))));
        let fail = |open: &OpenFile<Handles>, e| IoError::new("write", &open.path, e);
        self.carriers.start(open, Moves::From(bytes, range), offset, fail, done);
    }

    fn sync(&self, open: Arc<OpenFile<Handles>>, done: IoDone) {
        let fail =
            |open: &OpenFile<Handles>, e| IoError::new("sync", &open.path, e).losing_writes();
        self.carriers.start(open, Moves::Nothing, 0, fail, done);
    }
}

/// The part goes before anybody is told.
fn finish(part: Part, done: IoDone) {
    drop(part);
    done(Ok(()));
}

#[cfg(test)]
pub(super) fn direct_engine_of_threads(depth: u32) -> Arc<dyn Io> {
    Arc::new(Local::new(Direct::new(Carriers::threads(depth))))
}
