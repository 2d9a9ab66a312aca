//! The `mmap` engine: reads bind read-only maps in place, writes are pwrite with write-behind.
//!
//! Invariants:
//! - a range that is mapped is never written: such a write is refused;
//! - with drop-behind, pages leave the page cache after their map is dropped or their write-back
//!   is done, so that resident memory stays bounded; with [`AfterUse::Keep`] they wait, unmapped,
//!   for their next reader;
//! - reads never queue behind writes and syncs: they have threads of their own.

use std::collections::HashMap;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use model::{Budget, CHUNK_BYTES, HostBytes, PAGE_BYTES};

use super::os::{self, FileSystem};
use super::pool::Pool;
use super::{
    Access, AfterUse, FileId, Io, IoCounters, IoDone, IoError, Lock, LockKind, Op, Part, Target,
};
use crate::StoreError;

/// The disk through the page cache, with `threads` threads for reads and as many for writes and
/// syncs. `keep_cached`: leave what was read and written in the page cache.
///
/// Raises the process's soft limit of open files to the hard one.
pub fn mmap_engine(threads: usize, keep_cached: bool) -> Arc<dyn Io> {
    os::raise_open_file_limit();
    Arc::new(Mmap {
        files: Mutex::default(),
        next: AtomicU64::new(0),
        readers: Pool::new("store-read", threads),
        writers: Pool::new("store-write", threads),
        counters: Arc::default(),
        keep_cached,
    })
}

/// Write-back goes in whole pieces of this size, the largest unit in which Linux caches: one that
/// a chunk ends in is written once, after the next chunk has filled it.
const WRITE_BACK_BYTES: u64 = 2 << 20;

#[derive(Debug)]
struct Mmap {
    files: Mutex<HashMap<FileId, Arc<OpenFile>>>,
    next: AtomicU64,
    readers: Pool,
    writers: Pool,
    counters: Arc<Counters>,
    keep_cached: bool,
}

#[derive(Debug)]
struct OpenFile {
    file: File,
    path: PathBuf,
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

#[derive(Debug, Default)]
struct Counters {
    read_bytes: AtomicU64,
    written_bytes: AtomicU64,
    syncs: AtomicU64,
}

impl Io for Mmap {
    fn create(&self, path: &Path, len: u64) -> Result<FileId, IoError> {
        let fail = |source| IoError::new("create", path, source).wanting(len);
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(path);
        let file = file.map_err(fail)?;
        if let Err(error) = os::preallocate(&file, len) {
            // The caller gets the first error; a leftover is found by whoever cleans up.
            let _ = fs::remove_file(path);
            return Err(fail(error));
        }
        Ok(self.keep(file, path, false))
    }

    fn open(&self, path: &Path, access: Access) -> Result<FileId, IoError> {
        let file = os::open(path, access == Access::ReadWrite);
        let file = file.map_err(|e| IoError::new("open", path, e))?;
        let id = self.keep(file, path, access == Access::ReadDisk);
        Ok(id)
    }

    fn close(&self, file: FileId) {
        self.table().remove(&file);
    }

    fn len(&self, file: FileId) -> Result<u64, IoError> {
        let open = self.file(file);
        let data = open.file.metadata();
        Ok(data.map_err(|e| IoError::new("measure", &open.path, e))?.len())
    }

    fn rename(&self, from: &Path, to: &Path) -> Result<(), IoError> {
        fs::rename(from, to).map_err(|e| IoError::new("rename", from, e))
    }

    fn unlink(&self, path: &Path) -> Result<(), IoError> {
        fs::remove_file(path).map_err(|e| IoError::new("remove", path, e))
    }

    fn link(&self, from: &Path, to: &Path) -> Result<(), IoError> {
        fs::hard_link(from, to).map_err(|e| IoError::new("link", to, e))
    }

    fn list(&self, dir: &Path) -> Result<Vec<String>, IoError> {
        let fail = |e| IoError::new("list", dir, e);
        let mut names = Vec::new();
        for entry in fs::read_dir(dir).map_err(fail)? {
            names.push(entry.map_err(fail)?.file_name().to_string_lossy().into_owned());
        }
        names.sort();
        Ok(names)
    }

    fn create_dir(&self, dir: &Path) -> Result<(), IoError> {
        fs::create_dir_all(dir).map_err(|e| IoError::new("create directory", dir, e))?;
        if matches!(os::file_system(dir), Ok(FileSystem::Btrfs)) {
            // Refused on some set-ups; `disk_warnings` then says what follows from it.
            let _ = os::disable_copy_on_write(dir);
        }
        Ok(())
    }

    fn remove_dir(&self, dir: &Path) -> Result<(), IoError> {
        fs::remove_dir(dir).map_err(|e| IoError::new("remove directory", dir, e))
    }

    fn sync_dir(&self, dir: &Path) -> Result<(), IoError> {
        self.counters.syncs.fetch_add(1, Ordering::Relaxed);
        os::sync_dir(dir).map_err(|e| IoError::new("sync directory", dir, e).losing_writes())
    }

    fn exists(&self, path: &Path) -> Result<bool, IoError> {
        match path.try_exists() {
            // A path through a file leads nowhere.
            Err(error) if error.kind() == io::ErrorKind::NotADirectory => Ok(false),
            found => found.map_err(|e| IoError::new("look for", path, e)),
        }
    }

    fn is_link(&self, path: &Path) -> Result<bool, IoError> {
        let data = fs::symlink_metadata(path);
        Ok(data.map_err(|e| IoError::new("look at", path, e))?.is_symlink())
    }

    fn is_same(&self, one: &Path, other: &Path) -> Result<bool, IoError> {
        match os::is_same(one, other) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            found => found.map_err(|e| IoError::new("compare the names of", one, e)),
        }
    }

    fn is_at(&self, file: FileId, path: &Path) -> Result<bool, IoError> {
        match os::is_at(&self.file(file).file, path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            found => found.map_err(|e| IoError::new("look for", path, e)),
        }
    }

    fn link_count(&self, path: &Path) -> Result<u64, IoError> {
        os::link_count(path).map_err(|e| IoError::new("count the links of", path, e))
    }

    fn free_bytes(&self, path: &Path) -> Result<u64, IoError> {
        os::free_bytes(path).map_err(|e| IoError::new("measure the free space at", path, e))
    }

    fn disk_warnings(&self, dir: &Path) -> Vec<String> {
        let warning = match os::file_system(dir) {
            Ok(FileSystem::Tmpfs) => "is on tmpfs, which is memory: nothing survives a reboot",
            Ok(FileSystem::Nfs) => {
                "is on NFS: locks and syncs may not hold, and maps stall with the network"
            }
            Ok(FileSystem::Plan9) => {
                "is on 9p/drvfs (a Windows folder seen from WSL2?): slow, and syncs may not hold; \
                 move it into the Linux file system"
            }
            Ok(FileSystem::Btrfs) => {
                "is on btrfs: no-copy-on-write was asked for; a mount that refuses it fragments"
            }
            Ok(FileSystem::Ordinary) | Err(_) => return Vec::new(),
        };
        vec![format!("{} {warning}", dir.display())]
    }

    fn lock(&self, path: &Path, kind: LockKind) -> Result<Option<Lock>, IoError> {
        let file = os::open(path, false).map_err(|e| IoError::new("open", path, e))?;
        let locked = match kind {
            LockKind::Exclusive => file.try_lock(),
            LockKind::Shared => file.try_lock_shared(),
        };
        match locked {
            Ok(()) => Ok(Some(Lock::new(file))),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(e)) => Err(IoError::new("lock", path, e)),
        }
    }

    fn target(
        &self,
        file: FileId,
        offset: u64,
        len: usize,
        _budget: &Budget,
        after: AfterUse,
    ) -> Result<Target, StoreError> {
        if len == 0 {
            return Ok(Target::heap(HostBytes::zeroed(0)));
        }
        let open = self.file(file);
        let end = offset + len as u64;
        // Touching a map past the end of its file is a signal, not an error.
        if end > self.len(file)? {
            let source = io::ErrorKind::UnexpectedEof.into();
            return Err(IoError::new("map", &open.path, source).into());
        }
        if open.source != Source::Cache {
            return Ok(Target::heap(HostBytes::zeroed(len)));
        }
        let keep = self.keep_cached || after == AfterUse::Keep;
        open.map(offset..end, keep).map(Target::in_place).map_err(StoreError::from)
    }

    fn submit(&self, op: Op, done: IoDone) {
        let keep_cached = self.keep_cached;
        let counters = Arc::clone(&self.counters);
        match op {
            Op::Read { file, offset, part } => {
                assert!(part.len() <= CHUNK_BYTES, "read of {} bytes", part.len());
                let open = self.file(file);
                self.readers.run(move || {
                    counters.read_bytes.fetch_add(part.len() as u64, Ordering::Relaxed);
                    done(open.read(offset, part, keep_cached));
                });
            }
            Op::Write { file, offset, bytes, range } => {
                assert!(range.len() <= CHUNK_BYTES, "write of {} bytes", range.len());
                let open = self.file(file);
                self.writers.run(move || {
                    counters.written_bytes.fetch_add(range.len() as u64, Ordering::Relaxed);
                    let result = open.write(offset, &bytes.bytes()[range], keep_cached);
                    drop(bytes);
                    done(result);
                });
            }
            Op::Sync { file } => {
                let open = self.file(file);
                self.writers.run(move || {
                    counters.syncs.fetch_add(1, Ordering::Relaxed);
                    done(open.sync(keep_cached));
                });
            }
        }
    }

    fn counters(&self) -> IoCounters {
        IoCounters {
            read_bytes: self.counters.read_bytes.load(Ordering::Relaxed),
            written_bytes: self.counters.written_bytes.load(Ordering::Relaxed),
            syncs: self.counters.syncs.load(Ordering::Relaxed),
        }
    }
}

impl Mmap {
    fn keep(&self, file: File, path: &Path, from_disk: bool) -> FileId {
        let id = FileId(self.next.fetch_add(1, Ordering::Relaxed));
        let open = OpenFile {
            source: match from_disk {
                true if os::pass_cache(&file) => Source::Disk,
                true => Source::ForgottenCache,
                false => Source::Cache,
            },
            file,
            path: path.to_owned(),
            mapped: Mutex::default(),
            behind: Mutex::default(),
        };
        self.table().insert(id, Arc::new(open));
        id
    }

    fn file(&self, id: FileId) -> Arc<OpenFile> {
        match self.table().get(&id) {
            Some(file) => Arc::clone(file),
            None => panic!("{id:?} is not open"),
        }
    }

    fn table(&self) -> MutexGuard<'_, HashMap<FileId, Arc<OpenFile>>> {
        held(&self.files)
    }
}

impl OpenFile {
    fn map(
        self: &Arc<OpenFile>,
        range: Range<u64>,
        keep_cached: bool,
    ) -> Result<HostBytes, IoError> {
        held(&self.mapped).push(range.clone());
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
        let mut mapped = held(&self.mapped);
        if let Some(i) = mapped.iter().position(|m| m == range) {
            mapped.swap_remove(i);
        }
    }

    fn read(&self, offset: u64, mut part: Part, keep_cached: bool) -> Result<(), IoError> {
        let range = offset..offset + part.len() as u64;
        let result = if part.is_in_place() {
            os::prefetch(&self.file, &range);
            os::populate(part.bytes())
        } else if self.source == Source::Disk {
            os::read_pages_at(&self.file, part.bytes_mut(), offset)
        } else {
            if self.source == Source::ForgottenCache {
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
        if held(&self.mapped).iter().any(overlaps) {
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
            let mut behind = held(&self.behind);
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
        let behind = std::mem::take(&mut *held(&self.behind));
        if !keep_cached {
            let start = behind.started.map_or(0, |range| range.start);
            os::drop_cached(&self.file, &(start..behind.end.max(start)));
        }
        result.map_err(|e| IoError::new("sync", &self.path, e).losing_writes())
    }
}

fn held<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Every change under these locks is a single complete one.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
