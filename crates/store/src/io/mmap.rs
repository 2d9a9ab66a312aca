//! The `mmap` engine: reads bind read-only maps in place, writes are pwrite with write-behind.
//!
//! Invariants:
//! - a range that is mapped is never written: such a write is refused;
//! - with drop-behind, pages leave the page cache after their map is dropped or their write-back
//!   is done, so that resident memory stays bounded; with [`AfterUse::Soon`] they wait, unmapped,
//!   for their next reader;
//! - reads never queue behind writes and syncs: they have threads of their own.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use model::{Budget, HostBytes, PAGE_BYTES};

use super::local::{Local, OpenFile, Transfer, held};
use super::pool::Pool;
use super::{Access, AfterUse, Io, IoDone, IoError, Part, Target, os};
use crate::StoreError;

/// The disk through the page cache, with `threads` threads for reads and as many for writes and
/// syncs. `keep_cached`: leave what was read and written in the page cache.
///
/// Raises the process's soft limit of open files to the hard one.
pub fn mmap_engine(threads: usize, keep_cached: bool) -> Arc<dyn Io> {
    Arc::new(Local::new(Mmap {
        readers: Pool::new("store-read", threads),
        writers: Pool::new("store-write", threads),
        keep_cached,
    }))
}

/// Write-back goes in whole pieces of this size, the largest unit in which Linux caches: one that
/// a chunk ends in is written once, after the next chunk has filled it.
const WRITE_BACK_BYTES: u64 = 2 << 20;

#[derive(Debug)]
struct Mmap {
    readers: Pool,
    writers: Pool,
    keep_cached: bool,
}

/// What is known of an open file's pages.
#[derive(Debug)]
struct Pages {
    source: Source,
    mapped: Mutex<Vec<Range<u64>>>,
    behind: Mutex<Behind>,
}

/// Where reads of a file come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    Cache,
    /// Past the page cache.
    Disk,
    /// From the page cache, which forgets what it can first: the file system has no other way.
    ForgottenCache,
}

/// How far the write-back of a file has come.
#[derive(Debug, Default)]
struct Behind {
    /// Started and not waited for.
    started: Option<Range<u64>>,
    /// End of the last write.
    end: u64,
}

impl Transfer for Mmap {
    type State = Pages;

    fn opened(&self, file: &Arc<File>, _: &Path, access: Access) -> Pages {
        let source = match access {
            Access::ReadDisk if os::pass_cache(file) => Source::Disk,
            Access::ReadDisk => Source::ForgottenCache,
            Access::Read | Access::ReadWrite => Source::Cache,
        };
        Pages { source, mapped: Mutex::default(), behind: Mutex::default() }
    }

    fn target(
        &self,
        open: &Arc<OpenFile<Pages>>,
        range: Range<u64>,
        _budget: &Budget,
        after: AfterUse,
    ) -> Result<Target, StoreError> {
        if open.state.source != Source::Cache {
            return Ok(Target::heap(HostBytes::zeroed((range.end - range.start) as usize)));
        }
        let keep = self.keep_cached || matches!(after, AfterUse::Soon(_));
        open.map(range, keep).map(Target::in_place).map_err(StoreError::from)
    }

    fn read(
        &self,
        open: Arc<OpenFile<Pages>>,
        offset: u64,
        part: Part,
        read_bytes: &Arc<AtomicU64>,
        done: IoDone,
    ) {
        read_bytes.fetch_add(part.len() as u64, Ordering::Relaxed);
        let keep_cached = self.keep_cached;
        self.readers.run(move || done(open.read(offset, part, keep_cached)));
    }

    fn write(
        &self,
        open: Arc<OpenFile<Pages>>,
        offset: u64,
        bytes: Arc<HostBytes>,
        range: Range<usize>,
        done: IoDone,
    ) {
        let keep_cached = self.keep_cached;
        self.writers.run(move || {
            let result = open.write(offset, &bytes.bytes()[range], keep_cached);
            drop(bytes);
            done(result);
        });
    }

    fn sync(&self, open: Arc<OpenFile<Pages>>, done: IoDone) {
        let keep_cached = self.keep_cached;
        self.writers.run(move || done(open.sync(keep_cached)));
    }
}

impl OpenFile<Pages> {
    fn map(
        self: &Arc<OpenFile<Pages>>,
        range: Range<u64>,
        keep_cached: bool,
    ) -> Result<HostBytes, IoError> {
        held(&self.state.mapped).push(range.clone());
        let (open, mapped) = (Arc::clone(self), range.clone());
        let released = move || {
            open.forget_map(&mapped);
            if !keep_cached {
                os::drop_cached(&open.file, &mapped);
            }
        };
        let len = (range.end - range.start) as usize;
        os::map(&self.file, range.start, len, released).map_err(|e| {
            self.forget_map(&range);
            IoError::new("map", &self.path, e)
        })
    }

    fn forget_map(&self, range: &Range<u64>) {
        let mut mapped = held(&self.state.mapped);
        if let Some(i) = mapped.iter().position(|m| m == range) {
            mapped.swap_remove(i);
        }
    }

    fn read(&self, offset: u64, mut part: Part, keep_cached: bool) -> Result<(), IoError> {
        let range = offset..offset + part.len() as u64;
        let result = if part.is_in_place() {
            os::prefetch(&self.file, &range);
            os::populate(part.bytes())
        } else if self.state.source == Source::Disk {
            os::read_pages_at(&self.file, part.bytes_mut(), offset)
        } else {
            if self.state.source == Source::ForgottenCache {
                os::drop_cached(&self.file, &range);
            }
            let read = os::read_at(&self.file, part.bytes_mut(), offset);
            if !keep_cached && part.len() >= 16 * PAGE_BYTES {
                os::drop_cached(&self.file, &range);
            }
            read
        };
        result.map_err(|e| IoError::new("read", &self.path, e))
    }

    fn write(&self, offset: u64, bytes: &[u8], keep_cached: bool) -> Result<(), IoError> {
        let range = offset..offset + bytes.len() as u64;
        let overlaps = |m: &Range<u64>| m.start < range.end && range.start < m.end;
        if held(&self.state.mapped).iter().any(overlaps) {
            let source = io::Error::other("the range is still mapped for reading");
            return Err(IoError::new("write", &self.path, source));
        }
        os::write_at(&self.file, bytes, offset)
            .map_err(|e| IoError::new("write", &self.path, e).wanting(bytes.len() as u64))?;
        self.write_behind(range, keep_cached)
            .map_err(|e| IoError::new("write back", &self.path, e).losing_writes())
    }

    fn write_behind(&self, range: Range<u64>, keep_cached: bool) -> io::Result<()> {
        let whole = |at: u64| at / WRITE_BACK_BYTES * WRITE_BACK_BYTES;
        let last = range.end == self.file.metadata()?.len();
        let ready = whole(range.start)..if last { range.end } else { whole(range.end) };
        let previous = {
            let mut behind = held(&self.state.behind);
            behind.end = range.end;
            if ready.is_empty() { None } else { behind.started.replace(ready.clone()) }
        };
        if !ready.is_empty() {
            os::start_writeback(&self.file, &ready)?;
        }
        let Some(previous) = previous.filter(|_| !keep_cached) else { return Ok(()) };
        os::finish_writeback(&self.file, &previous)?;
        os::drop_cached(&self.file, &previous);
        Ok(())
    }

    fn sync(&self, keep_cached: bool) -> Result<(), IoError> {
        let result = self.file.sync_data();
        let behind = std::mem::take(&mut *held(&self.state.behind));
        if !keep_cached {
            let start = behind.started.map_or(0, |range| range.start);
            os::drop_cached(&self.file, &(start..behind.end.max(start)));
        }
        result.map_err(|e| IoError::new("sync", &self.path, e).losing_writes())
    }
}
