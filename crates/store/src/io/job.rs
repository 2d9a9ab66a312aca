//! [`Job`]: bytes on their way between memory and a file, in whole pages past the cache as far as
//! possible, whoever carries them.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use model::{HostBytes, PAGE_BYTES};

use super::{Part, os};

/// What moves; it belongs to whoever moves it.
pub(super) enum Moves {
    Into(Part),
    From(Arc<HostBytes>, Range<usize>),
    /// What has moved is made durable.
    Nothing,
}

impl Moves {
    pub(super) fn len(&self) -> usize {
        match self {
            Moves::Into(part) => part.len(),
            Moves::From(_, range) => range.len(),
            Moves::Nothing => 0,
        }
    }

    fn is_aligned(&self) -> bool {
        let start = match self {
            Moves::Into(part) => part.bytes().as_ptr(),
            Moves::From(bytes, range) => bytes.bytes()[range.clone()].as_ptr(),
            Moves::Nothing => return false,
        };
        (start as usize).is_multiple_of(PAGE_BYTES)
    }

    /// Bytes from the start on that can pass the cache when they move to or from `offset`.
    pub(super) fn direct_bytes(&self, offset: u64) -> usize {
        let on_grid = offset.is_multiple_of(PAGE_BYTES as u64) && self.is_aligned();
        if on_grid { self.len() / PAGE_BYTES * PAGE_BYTES } else { 0 }
    }
}

/// What is to be done, and who hears of it.
pub(super) struct Job {
    pub(super) moves: Moves,
    /// The file past the page cache, if anything can go there.
    pub(super) direct: Option<Arc<File>>,
    pub(super) cached: Arc<File>,
    pub(super) offset: u64,
    pub(super) done: Box<dyn FnOnce(io::Result<()>) + Send>,
}

/// A job that has begun.
pub(super) struct Flying {
    job: Job,
    direct_bytes: usize,
    moved: usize,
}

pub(super) enum Progress {
    More,
    End(io::Result<()>),
}

impl Flying {
    pub(super) fn new(job: Job) -> Flying {
        let direct_bytes = job.direct.as_ref().map_or(0, |_| job.moves.direct_bytes(job.offset));
        Flying { job, direct_bytes, moved: 0 }
    }

    fn is_direct(&self) -> bool {
        self.moved < self.direct_bytes
    }

    /// Where the next request goes.
    pub(super) fn next_file(&self) -> &Arc<File> {
        self.job.direct.as_ref().filter(|_| self.is_direct()).unwrap_or(&self.job.cached)
    }

    pub(super) fn next_offset(&self) -> u64 {
        self.job.offset + self.moved as u64
    }

    /// The next request's part of the job's memory.
    pub(super) fn next_range(&self) -> Range<usize> {
        self.moved..if self.is_direct() { self.direct_bytes } else { self.job.moves.len() }
    }

    pub(super) fn moves(&mut self) -> &mut Moves {
        &mut self.job.moves
    }

    /// Takes in what the last request came to: bytes that moved, or an error.
    pub(super) fn moved_more(&mut self, result: io::Result<usize>) -> Progress {
        let count = match result {
            Ok(count) => count,
            Err(error) if is_transient(&error) => return Progress::More,
            // A file system, or a disk with larger blocks, that takes no such request.
            Err(error) if self.is_direct() && error.kind() == io::ErrorKind::InvalidInput => {
                self.direct_bytes = 0;
                return Progress::More;
            }
            Err(error) => return Progress::End(Err(error)),
        };
        self.moved += count;
        if self.moved >= self.job.moves.len() {
            return Progress::End(Ok(()));
        }
        if count == 0 {
            let kind = match self.job.moves {
                Moves::Into(_) => io::ErrorKind::UnexpectedEof,
                Moves::From(..) | Moves::Nothing => io::ErrorKind::WriteZero,
            };
            return Progress::End(Err(kind.into()));
        }
        if !self.moved.is_multiple_of(PAGE_BYTES) {
            // What came short has left the grid: the rest goes through the cache.
            self.direct_bytes = self.direct_bytes.min(self.moved);
        }
        Progress::More
    }

    /// Gives the memory back, then tells.
    pub(super) fn finish(self, result: io::Result<()>) {
        let Job { moves, done, .. } = self.job;
        drop(moves);
        // A panic in somebody's completion is theirs; this thread serves everybody else.
        let _ = catch_unwind(AssertUnwindSafe(|| done(result)));
    }

    /// Tells of an error after which somebody else may still use the memory, which is never given
    /// back.
    pub(super) fn abandon(self, error: io::Error) {
        let Job { moves, done, .. } = self.job;
        std::mem::forget(moves);
        let _ = catch_unwind(AssertUnwindSafe(|| done(Err(error))));
    }

    /// Moves everything on the calling thread.
    pub(super) fn run(mut self) {
        loop {
            let result = self.request();
            if let Progress::End(result) = self.moved_more(result) {
                return self.finish(result);
            }
        }
    }

    fn request(&mut self) -> io::Result<usize> {
        let (range, at) = (self.next_range(), self.next_offset());
        let file = Arc::clone(self.next_file());
        match &mut self.job.moves {
            Moves::Into(part) => os::read_some_at(&file, &mut part.bytes_mut()[range], at),
            Moves::From(bytes, within) => {
                os::write_some_at(&file, &bytes.bytes()[within.clone()][range], at)
            }
            Moves::Nothing => file.sync_data().map(|()| 0),
        }
    }
}

pub(super) fn is_transient(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY))
}
