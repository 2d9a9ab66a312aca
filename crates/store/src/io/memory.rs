//! The `memory` engine: a whole disk in RAM, its namespace included.
//!
//! Invariants:
//! - operations take effect and report before `submit` returns, in the order of the calls;
//! - the disk outlives the stores opened on it, as long as somebody holds the engine.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use model::{Budget, CHUNK_BYTES};

use super::{
    Access, AfterUse, FileId, Io, IoCounters, IoDone, IoError, Lock, LockKind, Op, Target,
};
use crate::StoreError;

/// The contents of a disk: what a [`Memory`] starts from and can be asked for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Image {
    pub files: BTreeMap<PathBuf, Vec<u8>>,
    pub dirs: BTreeSet<PathBuf>,
}

/// An empty disk in RAM.
pub fn memory_engine() -> Arc<dyn Io> {
    Arc::new(Memory::from_image(Image::default()))
}

/// A disk in RAM.
#[derive(Debug)]
pub struct Memory {
    disk: Mutex<Disk>,
    locks: Arc<Mutex<BTreeMap<PathBuf, i64>>>,
    free_bytes: u64,
}

type Node = Arc<Mutex<Vec<u8>>>;

#[derive(Debug, Default)]
struct Disk {
    names: BTreeMap<PathBuf, Node>,
    dirs: BTreeSet<PathBuf>,
    open: BTreeMap<FileId, (Node, PathBuf)>,
    next: u64,
    counters: IoCounters,
}

impl Memory {
    /// A disk that holds `image`.
    pub fn from_image(image: Image) -> Memory {
        let names = image.files.into_iter().map(|(p, b)| (p, Arc::new(Mutex::new(b)))).collect();
        let disk = Disk { names, dirs: image.dirs, ..Disk::default() };
        Memory { disk: Mutex::new(disk), locks: Arc::default(), free_bytes: u64::MAX }
    }

    /// The same disk, reporting this much free space.
    pub fn with_free_bytes(mut self, free_bytes: u64) -> Memory {
        self.free_bytes = free_bytes;
        self
    }

    /// What the disk holds now.
    pub fn image(&self) -> Image {
        let disk = self.disk();
        let files = disk.names.iter().map(|(p, node)| (p.clone(), held(node).clone())).collect();
        Image { files, dirs: disk.dirs.clone() }
    }

    fn disk(&self) -> MutexGuard<'_, Disk> {
        held(&self.disk)
    }

    fn node(&self, file: FileId) -> (Node, PathBuf) {
        match self.disk().open.get(&file) {
            Some(open) => open.clone(),
            None => panic!("{file:?} is not open"),
        }
    }

    fn perform(&self, op: Op) -> Result<(), IoError> {
        match op {
            Op::Read { file, offset, mut part } => {
                assert!(part.len() <= CHUNK_BYTES, "read of {} bytes", part.len());
                self.disk().counters.read_bytes += part.len() as u64;
                let (node, path) = self.node(file);
                let bytes = held(&node);
                let start = usize::try_from(offset).unwrap_or(usize::MAX);
                let source = bytes.get(start..start.saturating_add(part.len()));
                let eof = || IoError::new("read", &path, io::ErrorKind::UnexpectedEof.into());
                part.bytes_mut().copy_from_slice(source.ok_or_else(eof)?);
            }
            Op::Write { file, offset, bytes, range } => {
                assert!(range.len() <= CHUNK_BYTES, "write of {} bytes", range.len());
                self.disk().counters.written_bytes += range.len() as u64;
                overlay(&mut held(&self.node(file).0), offset as usize, &bytes.bytes()[range]);
            }
            Op::Sync { file } => {
                let _open = self.node(file);
                self.disk().counters.syncs += 1;
            }
        }
        Ok(())
    }
}

/// Writes `bytes` at `offset`, growing the file with zeroes as needed.
pub(super) fn overlay(file: &mut Vec<u8>, offset: usize, bytes: &[u8]) {
    let end = offset + bytes.len();
    if file.len() < end {
        file.resize(end, 0);
    }
    file[offset..end].copy_from_slice(bytes);
}

impl Io for Memory {
    fn create(&self, path: &Path, len: u64) -> Result<FileId, IoError> {
        let fail = |kind: io::ErrorKind| IoError::new("create", path, kind.into());
        let mut disk = self.disk();
        if disk.names.contains_key(path) {
            return Err(fail(io::ErrorKind::AlreadyExists));
        }
        if path.parent().is_none_or(|dir| !disk.dirs.contains(dir)) {
            return Err(fail(io::ErrorKind::NotFound));
        }
        let node = Arc::new(Mutex::new(vec![0; len as usize]));
        disk.names.insert(path.to_owned(), Arc::clone(&node));
        Ok(disk.keep(node, path))
    }

    fn open(&self, path: &Path, _access: Access) -> Result<FileId, IoError> {
        let mut disk = self.disk();
        if disk.dirs.contains(path) {
            return Err(IoError::new("open", path, io::ErrorKind::IsADirectory.into()));
        }
        let node = disk.names.get(path).cloned();
        let node = node.ok_or_else(|| not_found("open", path))?;
        Ok(disk.keep(node, path))
    }

    fn close(&self, file: FileId) {
        self.disk().open.remove(&file);
    }

    fn len(&self, file: FileId) -> Result<u64, IoError> {
        Ok(held(&self.node(file).0).len() as u64)
    }

    fn rename(&self, from: &Path, to: &Path) -> Result<(), IoError> {
        let mut disk = self.disk();
        let node = disk.names.get(from).cloned().ok_or_else(|| not_found("rename", from))?;
        if disk.names.get(to).is_some_and(|other| Arc::ptr_eq(other, &node)) {
            // Two names of one file: POSIX leaves both.
            return Ok(());
        }
        disk.names.remove(from);
        disk.names.insert(to.to_owned(), node);
        Ok(())
    }

    fn unlink(&self, path: &Path) -> Result<(), IoError> {
        let removed = self.disk().names.remove(path);
        removed.map(|_| ()).ok_or_else(|| not_found("remove", path))
    }

    fn link(&self, from: &Path, to: &Path) -> Result<(), IoError> {
        let mut disk = self.disk();
        let node = disk.names.get(from).cloned().ok_or_else(|| not_found("link", from))?;
        if disk.names.contains_key(to) {
            return Err(IoError::new("link", to, io::ErrorKind::AlreadyExists.into()));
        }
        disk.names.insert(to.to_owned(), node);
        Ok(())
    }

    fn list(&self, dir: &Path) -> Result<Vec<String>, IoError> {
        let disk = self.disk();
        if !disk.dirs.contains(dir) {
            return Err(not_found("list", dir));
        }
        Ok(disk.children(dir))
    }

    fn create_dir(&self, dir: &Path) -> Result<(), IoError> {
        let ancestors = dir.ancestors().map(Path::to_owned);
        self.disk().dirs.extend(ancestors);
        Ok(())
    }

    fn remove_dir(&self, dir: &Path) -> Result<(), IoError> {
        let mut disk = self.disk();
        if !disk.children(dir).is_empty() {
            let source = io::ErrorKind::DirectoryNotEmpty.into();
            return Err(IoError::new("remove directory", dir, source));
        }
        disk.dirs.remove(dir);
        Ok(())
    }

    fn sync_dir(&self, _dir: &Path) -> Result<(), IoError> {
        self.disk().counters.syncs += 1;
        Ok(())
    }

    fn exists(&self, path: &Path) -> Result<bool, IoError> {
        let disk = self.disk();
        Ok(disk.names.contains_key(path) || disk.dirs.contains(path))
    }

    fn is_link(&self, _path: &Path) -> Result<bool, IoError> {
        Ok(false)
    }

    fn symlink(&self, _target: &Path, path: &Path) -> Result<(), IoError> {
        Err(IoError::new("make the symbolic link", path, io::ErrorKind::Unsupported.into()))
    }

    fn drive(&self, _path: &Path) -> Result<u64, IoError> {
        Ok(0)
    }

    fn is_same(&self, one: &Path, other: &Path) -> Result<bool, IoError> {
        let disk = self.disk();
        let nodes = disk.names.get(one).zip(disk.names.get(other));
        Ok(nodes.is_some_and(|(one, other)| Arc::ptr_eq(one, other)))
    }

    fn is_at(&self, file: FileId, path: &Path) -> Result<bool, IoError> {
        let node = self.node(file).0;
        Ok(self.disk().names.get(path).is_some_and(|named| Arc::ptr_eq(named, &node)))
    }

    fn link_count(&self, path: &Path) -> Result<u64, IoError> {
        let disk = self.disk();
        let node = disk.names.get(path).ok_or_else(|| not_found("count the links of", path))?;
        Ok(disk.names.values().filter(|other| Arc::ptr_eq(other, node)).count() as u64)
    }

    fn free_bytes(&self, _path: &Path) -> Result<u64, IoError> {
        Ok(self.free_bytes)
    }

    fn disk_warnings(&self, _dir: &Path) -> Vec<String> {
        Vec::new()
    }

    fn lock(&self, path: &Path, kind: LockKind) -> Result<Option<Lock>, IoError> {
        if !self.disk().names.contains_key(path) {
            return Err(not_found("lock", path));
        }
        Ok(HeldLock::take(&self.locks, path, kind).map(Lock::new))
    }

    fn target(
        &self,
        _file: FileId,
        _offset: u64,
        len: usize,
        budget: &Budget,
        _after: AfterUse,
    ) -> Result<Target, StoreError> {
        Ok(Target::heap(budget.block(len)?))
    }

    fn submit(&self, op: Op, done: IoDone) {
        let result = self.perform(op);
        done(result);
    }

    fn counters(&self) -> IoCounters {
        self.disk().counters
    }
}

impl Disk {
    fn keep(&mut self, node: Node, path: &Path) -> FileId {
        let id = FileId(self.next);
        self.next += 1;
        self.open.insert(id, (node, path.to_owned()));
        id
    }

    fn children(&self, dir: &Path) -> Vec<String> {
        let all = self.names.keys().chain(&self.dirs);
        let inside = all.filter(|path| path.parent() == Some(dir));
        let names = inside.filter_map(|path| path.file_name());
        let mut names: Vec<_> = names.map(|n| n.to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }
}

/// Readers count up, the one writer is -1.
struct HeldLock {
    locks: Arc<Mutex<BTreeMap<PathBuf, i64>>>,
    path: PathBuf,
    exclusive: bool,
}

impl HeldLock {
    fn take(
        locks: &Arc<Mutex<BTreeMap<PathBuf, i64>>>,
        path: &Path,
        kind: LockKind,
    ) -> Option<HeldLock> {
        let exclusive = kind == LockKind::Exclusive;
        let mut table = held(locks);
        let holders = table.entry(path.to_owned()).or_default();
        if *holders < 0 || (exclusive && *holders > 0) {
            return None;
        }
        *holders += if exclusive { -1 } else { 1 };
        Some(HeldLock { locks: Arc::clone(locks), path: path.to_owned(), exclusive })
    }
}

impl Drop for HeldLock {
    fn drop(&mut self) {
        if let Some(holders) = held(&self.locks).get_mut(&self.path) {
            *holders -= if self.exclusive { -1 } else { 1 };
        }
    }
}

fn not_found(context: &'static str, path: &Path) -> IoError {
    IoError::new(context, path, io::ErrorKind::NotFound.into())
}

fn held<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic inside is a programmer's error reported where it happened.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
