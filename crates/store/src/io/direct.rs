//! The `direct` engine: whole pages move past the page cache, by io_uring, many at a time.
//!
//! Invariants:
//! - what is not whole pages - small files, rows, the last bytes of a plane - goes through the page
//!   cache, which the system keeps coherent with the rest;
//! - a file system without direct I/O is served through the cache, and a kernel without io_uring by
//!   threads: neither is refused.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use model::{Budget, HostBytes};

use super::job::{Flying, Job, Moves};
use super::local::{Local, OpenFile, Transfer};
use super::pool::Pool;
use super::{Access, AfterUse, Io, IoDone, IoError, Part, Target, os};
use crate::StoreError;

/// Threads of an engine without io_uring.
const THREADS_MAX: u32 = 16;

/// The disk past the page cache, with at most `depth` requests at the kernel. Blocks that are read
/// into are leased from the caller's budget.
///
/// Raises the process's soft limit of open files to the hard one.
pub fn direct_engine(depth: u32) -> Arc<dyn Io> {
    let carriers = Carriers::ring(depth.max(1)).unwrap_or_else(|| Carriers::threads(depth));
    Arc::new(Local::new(Direct { carriers }))
}

#[derive(Debug)]
struct Direct {
    carriers: Carriers,
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
}

impl Handles {
    fn direct(&self) -> Option<Arc<File>> {
        let open = || os::open_direct(&self.cached).map(Arc::new);
        self.direct.get_or_init(open).clone()
    }
}

impl Direct {
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
        self.carriers.send(Job { moves, direct, cached, offset, done });
    }
}

impl Transfer for Direct {
    type State = Handles;

    fn opened(&self, file: &Arc<File>, _: &Path, _: Access) -> Handles {
        os::expect_no_order(file);
        Handles { cached: Arc::clone(file), direct: OnceLock::new() }
    }

    fn target(
        &self,
        _: &Arc<OpenFile<Handles>>,
        range: Range<u64>,
        budget: &Budget,
        _: AfterUse,
    ) -> Result<Target, StoreError> {
        Ok(Target::heap(budget.block((range.end - range.start) as usize)?))
    }

    fn read(&self, open: Arc<OpenFile<Handles>>, offset: u64, part: Part, done: IoDone) {
        let fail = |open: &OpenFile<Handles>, e| IoError::new("read", &open.path, e);
        self.start(open, Moves::Into(part), offset, fail, done);
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
        let done: IoDone =
            Box::new(move |result| done(result.map_err(|e: IoError| e.wanting(wanted))));
        let fail = |open: &OpenFile<Handles>, e| IoError::new("write", &open.path, e);
        self.start(open, Moves::From(bytes, range), offset, fail, done);
    }

    fn sync(&self, open: Arc<OpenFile<Handles>>, done: IoDone) {
        let fail =
            |open: &OpenFile<Handles>, e| IoError::new("sync", &open.path, e).losing_writes();
        self.start(open, Moves::Nothing, 0, fail, done);
    }
}

#[cfg(test)]
pub(super) fn direct_engine_of_threads(depth: u32) -> Arc<dyn Io> {
    Arc::new(Local::new(Direct { carriers: Carriers::threads(depth) }))
}
