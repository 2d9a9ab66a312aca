//! [`Scratch`]: disposable room on the store's disk for what does not fit in memory.
//!
//! Invariants:
//! - never synced, never read by a later run; the file goes when the value does, and a leftover at
//!   the next opening.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use model::{Budget, HostBytes, PAGE_BYTES};

use crate::error::{Done, StoreError};
use crate::io::{FileId, Io, IoError, Target, read_target, write_range};
use crate::layout::is_plain_name;

/// What the name of every scratch file ends in.
const SUFFIX: &str = ".scratch";

/// Whether a name is that of a scratch file.
pub(crate) fn is_scratch(name: &str) -> bool {
    name.ends_with(SUFFIX)
}

/// One preallocated file; who writes where is the caller's business.
#[derive(Debug)]
pub struct Scratch {
    io: Arc<dyn Io>,
    path: PathBuf,
    file: FileId,
    bytes: u64,
    budget: Budget,
}

impl Scratch {
    pub(crate) fn create(
        io: Arc<dyn Io>,
        dir: &Path,
        name: &str,
        bytes: u64,
        budget: Budget,
    ) -> Result<Scratch, StoreError> {
        assert!(is_plain_name(name), "scratch file `{name}`");
        let available = io.free_bytes(dir)?;
        if bytes > available {
            return Err(StoreError::NoSpace { path: dir.to_owned(), needed: bytes, available });
        }
        let path = dir.join(format!("{name}{SUFFIX}"));
        let file = io.create(&path, bytes)?;
        Ok(Scratch { io, path, file, bytes, budget })
    }

    /// Writes `range` of a block, which begins at a page of it, at `start`, a multiple of a page.
    ///
    /// # Panics
    /// Beyond the file's end: a programmer's error.
    pub fn write(
        &self,
        start: u64,
        (bytes, range): (&Arc<HostBytes>, Range<usize>),
        done: Done<()>,
    ) {
        self.check(start, range.len());
        let done = Box::new(move |result: Result<(), IoError>| done(result.map_err(Into::into)));
        write_range(&*self.io, self.file, start, (bytes, range), done);
    }

    /// Reads `len` bytes from `start` on into a writable block of the budget.
    ///
    /// # Panics
    /// As [`Scratch::write`].
    pub fn read(&self, start: u64, len: usize, done: Done<HostBytes>) {
        self.check(start, len);
        match self.budget.block(len) {
            Err(error) => done(Err(error.into())),
            Ok(block) => {
                let done = Box::new(move |b: Result<_, IoError>| done(b.map_err(Into::into)));
                read_target(&*self.io, self.file, start, Target::heap(block), done);
            }
        }
    }

    fn check(&self, start: u64, len: usize) {
        assert!(start.is_multiple_of(PAGE_BYTES as u64), "scratch offset {start} inside a page");
        let end = start + len as u64;
        assert!(end <= self.bytes, "byte {end} of a scratch file of {}", self.bytes);
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        self.io.close(self.file);
        // What cannot be removed now is removed by the next opening.
        let _ = self.io.unlink(&self.path);
    }
}
