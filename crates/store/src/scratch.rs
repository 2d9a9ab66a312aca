//! [`Scratch`]: disposable regions on the store's disk for what does not fit in memory.
//!
//! Invariants:
//! - never synced, never read by a later run; the file goes when the value does, and a leftover at
//!   the next opening.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use model::{Budget, HostBytes, PAGE_BYTES};

use crate::error::{Done, StoreError};
use crate::io::{FileId, Io, IoError, Target, read_target, write_block};
use crate::layout::is_plain_name;

/// Regions of one size in one preallocated file.
#[derive(Debug)]
pub struct Scratch {
    io: Arc<dyn Io>,
    path: PathBuf,
    file: FileId,
    /// Distance of two regions.
    stride: u64,
    region_bytes: usize,
    regions: usize,
    budget: Budget,
}

impl Scratch {
    pub(crate) fn create(
        io: Arc<dyn Io>,
        dir: &Path,
        name: &str,
        region_bytes: usize,
        regions: usize,
        budget: Budget,
    ) -> Result<Scratch, StoreError> {
        assert!(is_plain_name(name), "scratch file `{name}`");
        let stride = region_bytes.next_multiple_of(PAGE_BYTES) as u64;
        let needed = stride * regions as u64;
        let available = io.free_bytes(dir)?;
        if needed > available {
            return Err(StoreError::NoSpace { path: dir.to_owned(), needed, available });
        }
        let path = dir.join(name);
        let file = io.create(&path, needed)?;
        Ok(Scratch { io, path, file, stride, region_bytes, regions, budget })
    }

    /// Number of regions.
    pub fn regions(&self) -> usize {
        self.regions
    }

    /// Bytes of a region.
    pub fn region_bytes(&self) -> usize {
        self.region_bytes
    }

    /// Writes a block to the start of a region; the block is dropped when it is written.
    ///
    /// # Panics
    /// On a region that does not exist or is too small: a programmer's error.
    pub fn write(&self, region: usize, bytes: HostBytes, done: Done<()>) {
        let offset = self.offset(region, bytes.len());
        let done = Box::new(move |result: Result<(), IoError>| done(result.map_err(Into::into)));
        write_block(&*self.io, self.file, offset, &Arc::new(bytes), done);
    }

    /// Reads `len` bytes from the start of a region into a writable block of the budget.
    ///
    /// # Panics
    /// As [`Scratch::write`].
    pub fn read(&self, region: usize, len: usize, done: Done<HostBytes>) {
        let offset = self.offset(region, len);
        match self.budget.block(len) {
            Err(error) => done(Err(error.into())),
            Ok(block) => {
                let done = Box::new(move |b: Result<_, IoError>| done(b.map_err(Into::into)));
                read_target(&*self.io, self.file, offset, Target::heap(block), done);
            }
        }
    }

    fn offset(&self, region: usize, len: usize) -> u64 {
        assert!(region < self.regions, "region {region} of {}", self.regions);
        assert!(len <= self.region_bytes, "{len} bytes in a region of {}", self.region_bytes);
        region as u64 * self.stride
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        self.io.close(self.file);
        // What cannot be removed now is removed by the next opening.
        let _ = self.io.unlink(&self.path);
    }
}
