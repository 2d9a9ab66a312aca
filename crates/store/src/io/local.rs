//! [`Local`]: files of this machine - names, locks, open files - whatever way their contents move.

use std::collections::HashMap;
use std::fmt;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use model::{Budget, CHUNK_BYTES, HostBytes, NextUse};

use super::os::{self, FileSystem};
use super::{
    Access, AfterUse, FileId, Io, IoCounters, IoDone, IoError, Lock, LockKind, Op, Part, Target,
};
use crate::StoreError;

/// How the contents of open files move. Operations end on threads of the implementor's own.
pub(super) trait Transfer: Send + Sync + fmt::Debug + 'static {
    /// What it keeps of an open file.
    type State: Send + Sync + fmt::Debug + 'static;
    /// It wants to pass the page cache.
    const IS_DIRECT: bool = false;

    fn opened(&self, file: &Arc<File>, path: &Path, access: Access) -> Self::State;
    /// See [`Io::target`]; `range` is not empty and lies inside the file.
    fn target(
        &self,
        open: &Arc<OpenFile<Self::State>>,
        range: Range<u64>,
        budget: &Budget,
        after: AfterUse,
    ) -> Result<Target, StoreError>;
    /// See [`Io::keeping`], for blocks that are wanted again.
    fn keeping(
        &self,
        _: Arc<OpenFile<Self::State>>,
        _: Range<u64>,
        block: HostBytes,
        _: &Budget,
        _: NextUse,
    ) -> HostBytes {
        block
    }
    /// Adds to `read_bytes` what its own memory does not have.
    fn read(
        &self,
        open: Arc<OpenFile<Self::State>>,
        offset: u64,
        part: Part,
        read_bytes: &Arc<AtomicU64>,
        done: IoDone,
    );
    /// Writes `bytes[range]` at `offset`.
    fn write(
        &self,
        open: Arc<OpenFile<Self::State>>,
        offset: u64,
        bytes: Arc<HostBytes>,
        range: Range<usize>,
        done: IoDone,
    );
    fn sync(&self, open: Arc<OpenFile<Self::State>>, done: IoDone);
}

/// A file that is open.
#[derive(Debug)]
pub(super) struct OpenFile<S> {
    pub(super) file: Arc<File>,
    pub(super) path: PathBuf,
    pub(super) state: S,
}

/// The disk through a [`Transfer`].
#[derive(Debug)]
pub(super) struct Local<T: Transfer> {
    files: Mutex<HashMap<FileId, Arc<OpenFile<T::State>>>>,
    next: AtomicU64,
    counters: Counters,
    transfer: T,
}

#[derive(Debug, Default)]
struct Counters {
    read_bytes: Arc<AtomicU64>,
    written_bytes: AtomicU64,
    syncs: AtomicU64,
}

impl<T: Transfer> Local<T> {
    /// Raises the process's soft limit of open files to the hard one.
    pub(super) fn new(transfer: T) -> Local<T> {
        os::raise_open_file_limit();
        Local {
            files: Mutex::default(),
            next: AtomicU64::new(0),
            counters: Counters::default(),
            transfer,
        }
    }

    fn keep(&self, file: File, path: &Path, access: Access) -> FileId {
        let (id, file) = (FileId(self.next.fetch_add(1, Ordering::Relaxed)), Arc::new(file));
        let state = self.transfer.opened(&file, path, access);
        self.table().insert(id, Arc::new(OpenFile { file, path: path.to_owned(), state }));
        id
    }

    fn file(&self, id: FileId) -> Arc<OpenFile<T::State>> {
        match self.table().get(&id) {
            Some(file) => Arc::clone(file),
            None => panic!("{id:?} is not open"),
        }
    }

    fn table(&self) -> MutexGuard<'_, HashMap<FileId, Arc<OpenFile<T::State>>>> {
        held(&self.files)
    }
}

impl<T: Transfer> Io for Local<T> {
    fn create(&self, path: &Path, len: u64) -> Result<FileId, IoError> {
        let fail = |source| IoError::new("create", path, source).wanting(len);
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(path);
        let file = file.map_err(fail)?;
        if let Err(error) = os::preallocate(&file, len) {
            // The caller gets the first error; a leftover is found by whoever cleans up.
            let _ = fs::remove_file(path);
            return Err(fail(error));
        }
        Ok(self.keep(file, path, Access::ReadWrite))
    }

    fn open(&self, path: &Path, access: Access) -> Result<FileId, IoError> {
        let file = os::open(path, access == Access::ReadWrite);
        let file = file.map_err(|e| IoError::new("open", path, e))?;
        Ok(self.keep(file, path, access))
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

    fn symlink(&self, target: &Path, path: &Path) -> Result<(), IoError> {
        os::symlink(target, path).map_err(|e| IoError::new("make the symbolic link", path, e))
    }

    fn link_target(&self, path: &Path) -> Option<PathBuf> {
        fs::read_link(path).ok()
    }

    fn drive(&self, path: &Path) -> Result<u64, IoError> {
        os::drive(path).map_err(|e| IoError::new("look for the drive of", path, e))
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
        let kind = match os::file_system(dir) {
            Ok(FileSystem::Tmpfs) => {
                Some("is on tmpfs, which is memory: nothing survives a reboot")
            }
            Ok(FileSystem::Nfs) => {
                Some("is on NFS: locks and syncs may not hold, and maps stall with the network")
            }
            Ok(FileSystem::Plan9) => Some(
                "is on 9p/drvfs (a Windows folder seen from WSL2?): slow, and syncs may not hold; \
                 move it into the Linux file system",
            ),
            Ok(FileSystem::Btrfs) => Some(
                "is on btrfs: no-copy-on-write was asked for; a mount that refuses it fragments",
            ),
            Ok(FileSystem::Ordinary) | Err(_) => None,
        };
        let lacks = os::lacks(dir).ok();
        let direct = lacks.filter(|lacks| lacks.direct && T::IS_DIRECT).map(|_| {
            "is on a file system without direct I/O: --io direct goes through the page cache there"
        });
        let allocation = lacks.filter(|lacks| lacks.allocation).map(|_| {
            "is on a file system that allocates no space ahead: files are filled with zeroes, and a \
             full disk may show in the middle of a step"
        });
        let warnings = [kind, direct, allocation].into_iter().flatten();
        warnings.map(|warning| format!("{} {warning}", dir.display())).collect()
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
        budget: &Budget,
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
        self.transfer.target(&open, offset..end, budget, after)
    }

    fn keeping(
        &self,
        file: FileId,
        offset: u64,
        block: HostBytes,
        budget: &Budget,
        after: AfterUse,
    ) -> HostBytes {
        let next_use = match after {
            AfterUse::Forget => return block,
            AfterUse::Soon(next_use) | AfterUse::Later(next_use) => next_use,
        };
        if block.is_empty() {
            return block;
        }
        let range = offset..offset + block.len() as u64;
        self.transfer.keeping(self.file(file), range, block, budget, next_use)
    }

    fn submit(&self, op: Op, done: IoDone) {
        let add = |counter: &AtomicU64, n: usize| counter.fetch_add(n as u64, Ordering::Relaxed);
        match op {
            Op::Read { file, offset, part } => {
                assert!(part.len() <= CHUNK_BYTES, "read of {} bytes", part.len());
                let read_bytes = &self.counters.read_bytes;
                self.transfer.read(self.file(file), offset, part, read_bytes, done);
            }
            Op::Write { file, offset, bytes, range } => {
                assert!(range.len() <= CHUNK_BYTES, "write of {} bytes", range.len());
                add(&self.counters.written_bytes, range.len());
                self.transfer.write(self.file(file), offset, bytes, range, done);
            }
            Op::Sync { file } => {
                add(&self.counters.syncs, 1);
                self.transfer.sync(self.file(file), done);
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

pub(super) fn held<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Every change under these locks is a single complete one.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
