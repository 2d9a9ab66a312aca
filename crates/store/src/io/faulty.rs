//! The `faulty` engine: counts, fails and freezes the operations of another engine, and knows
//! what a disk that lost power at the freeze could hold.
//!
//! Invariants:
//! - data is on the imagined disk only after a finished sync of its file, names only after a
//!   finished sync of their directory; before that any subset may be there, data torn at
//!   [`SECTOR_BYTES`];
//! - directories themselves are durable at once (a simplification: a store never depends on it
//!   except while it is created);
//! - after the freeze nothing reaches the disk any more.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use model::Budget;

use super::memory::overlay;
use super::{
    Access, AfterUse, FileId, Guard, Image, Io, IoCounters, IoDone, IoError, Lock, LockKind,
    Memory, Op, Target,
};
use crate::StoreError;

/// What a disk writes all or nothing.
const SECTOR_BYTES: usize = 512;

/// Classes of operations, counted apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum OpKind {
    Read,
    Write,
    /// Of a file's data or of a directory.
    Sync,
    /// Create, rename, unlink.
    Namespace,
}

/// How an operation fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The device reports an error; nothing happened.
    Eio,
    /// The file system is full; nothing happened.
    NoSpace,
    /// Half of a write arrived, then the device reported an error; else as `Eio`.
    Short,
}

/// An engine that fails on command.
#[derive(Debug)]
pub struct Faulty {
    inner: Arc<dyn Io>,
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    counts: BTreeMap<OpKind, u64>,
    faults: BTreeMap<(OpKind, u64), Fault>,
    freeze: Option<(OpKind, u64)>,
    frozen: bool,
    off: Option<Guard>,
    /// Syncs of these paths report success and do nothing.
    lies: Option<fn(&Path) -> bool>,
    disk: Imagined,
    open: BTreeMap<FileId, usize>,
}

/// The disk below the caches.
#[derive(Debug, Default)]
struct Imagined {
    nodes: Vec<Node>,
    current: BTreeMap<PathBuf, usize>,
    durable: BTreeMap<PathBuf, usize>,
    pending: Vec<NameChange>,
    dirs: BTreeSet<PathBuf>,
}

#[derive(Clone, Debug, Default)]
struct Node {
    durable: Vec<u8>,
    /// Writes since the last sync, oldest first.
    pending: Vec<(usize, Vec<u8>)>,
}

#[derive(Clone, Debug)]
enum NameChange {
    Create(PathBuf, usize),
    Rename(PathBuf, PathBuf, usize),
    Unlink(PathBuf),
}

/// What to do with an operation.
enum Verdict {
    Proceed,
    Fail(Fault),
    Frozen,
}

impl Faulty {
    /// Wraps `inner`, whose present contents, all durable, are `image`.
    pub fn new(inner: Arc<dyn Io>, image: Image) -> Faulty {
        let state = State { disk: Imagined::from_image(image), ..State::default() };
        Faulty { inner, state: Arc::new(Mutex::new(state)) }
    }

    /// Wraps a fresh memory disk that holds `image`.
    pub fn over_memory(image: Image) -> Faulty {
        Faulty::new(Arc::new(Memory::from_image(image.clone())), image)
    }

    /// Lets the `nth` (from 1) operation of a kind fail.
    pub fn fail(&self, kind: OpKind, nth: u64, fault: Fault) {
        self.state().faults.insert((kind, nth), fault);
    }

    /// Lets the power fail in the `nth` (from 1) operation of a kind: it and everything after it
    /// fails, and what it was writing may or may not be on the disk.
    pub fn freeze_at(&self, kind: OpKind, nth: u64) {
        self.state().freeze = Some((kind, nth));
    }

    /// Turns a guard of the store off.
    pub fn turn_off(&self, guard: Guard) {
        self.state().off = Some(guard);
    }

    /// Lets every sync of a file or directory that `about` chooses report success and do nothing.
    pub fn lie(&self, about: fn(&Path) -> bool) {
        self.state().lies = Some(about);
    }

    /// Whether the power failed.
    pub fn is_frozen(&self) -> bool {
        self.state().frozen
    }

    /// Operations of a kind so far, failed ones included.
    pub fn count(&self, kind: OpKind) -> u64 {
        self.state().counts.get(&kind).copied().unwrap_or(0)
    }

    /// A disk as it may be found after power failed now: every synced byte, and of the others a
    /// subset that follows from `seed`.
    pub fn image_after_crash(&self, seed: u64) -> Image {
        self.state().disk.after_crash(&mut Random(seed))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A panic inside is a programmer's error reported where it happened.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Decides on and runs a namespace operation, then records what it changed.
    fn name_op<T>(
        &self,
        context: &'static str,
        path: &Path,
        run: impl FnOnce() -> Result<T, IoError>,
        record: impl FnOnce(&mut State, Option<&T>),
    ) -> Result<T, IoError> {
        let mut state = self.state();
        match state.judge(OpKind::Namespace) {
            Verdict::Proceed => {
                let value = run()?;
                record(&mut state, Some(&value));
                Ok(value)
            }
            Verdict::Fail(fault) => Err(fault.error(context, path)),
            Verdict::Frozen if state.just_froze(OpKind::Namespace) => {
                record(&mut state, None);
                Err(Fault::Eio.error(context, path))
            }
            Verdict::Frozen => Err(Fault::Eio.error(context, path)),
        }
    }

    fn alive(&self, context: &'static str, path: &Path) -> Result<(), IoError> {
        if self.is_frozen() { Err(Fault::Eio.error(context, path)) } else { Ok(()) }
    }

    fn submit_write(&self, op: Op, done: IoDone) {
        let Op::Write { file, offset, ref bytes, ref range } = op else {
            unreachable!("the caller matched a write")
        };
        let data = bytes.bytes()[range.clone()].to_vec();
        let mut state = self.state();
        let verdict = state.judge(OpKind::Write);
        let arrived = match verdict {
            Verdict::Proceed => data.len(),
            Verdict::Fail(Fault::Short) => data.len() / 2,
            Verdict::Frozen if state.just_froze(OpKind::Write) => data.len(),
            Verdict::Fail(_) | Verdict::Frozen => 0,
        };
        let path = state.path(file);
        state.write(file, offset as usize, &data[..arrived]);
        drop(state);
        match verdict {
            Verdict::Proceed => self.inner.submit(op, done),
            Verdict::Fail(Fault::Short) => {
                let (bytes, range) = (Arc::clone(bytes), range.start..range.start + arrived);
                let half = Op::Write { file, offset, bytes, range };
                let failed = move |_| done(Err(Fault::Short.error("write", &path)));
                self.inner.submit(half, Box::new(failed));
            }
            Verdict::Fail(fault) => done(Err(fault.error("write", &path))),
            Verdict::Frozen => done(Err(Fault::Eio.error("write", &path))),
        }
    }

    fn submit_sync(&self, op: Op, done: IoDone) {
        let Op::Sync { file } = op else { unreachable!("the caller matched a sync") };
        let mut state = self.state();
        let path = state.path(file);
        match state.judge(OpKind::Sync) {
            Verdict::Proceed if state.lies_about(&path) => {
                drop(state);
                done(Ok(()));
            }
            Verdict::Proceed => {
                drop(state);
                let shared = Arc::clone(&self.state);
                let synced = move |result: Result<(), IoError>| {
                    if result.is_ok() {
                        shared.lock().unwrap_or_else(PoisonError::into_inner).synced(file);
                    }
                    done(result);
                };
                self.inner.submit(op, Box::new(synced));
            }
            Verdict::Fail(fault) => {
                // The system lets go of what it could not write: a later sync succeeds without it.
                state.lose(file);
                drop(state);
                done(Err(fault.error("sync", &path).losing_writes()));
            }
            Verdict::Frozen => {
                drop(state);
                done(Err(Fault::Eio.error("sync", &path).losing_writes()));
            }
        }
    }
}

impl Io for Faulty {
    fn create(&self, path: &Path, len: u64) -> Result<FileId, IoError> {
        let record = |state: &mut State, file: Option<&FileId>| {
            let node = state.disk.create(path, len);
            if let Some(&file) = file {
                state.open.insert(file, node);
            }
        };
        self.name_op("create", path, || self.inner.create(path, len), record)
    }

    fn open(&self, path: &Path, access: Access) -> Result<FileId, IoError> {
        self.alive("open", path)?;
        let file = self.inner.open(path, access)?;
        let mut state = self.state();
        if let Some(&node) = state.disk.current.get(path) {
            state.open.insert(file, node);
        }
        Ok(file)
    }

    fn close(&self, file: FileId) {
        self.state().open.remove(&file);
        self.inner.close(file);
    }

    fn len(&self, file: FileId) -> Result<u64, IoError> {
        self.inner.len(file)
    }

    fn rename(&self, from: &Path, to: &Path) -> Result<(), IoError> {
        let record = |state: &mut State, _: Option<&()>| state.disk.rename(from, to);
        self.name_op("rename", from, || self.inner.rename(from, to), record)
    }

    fn unlink(&self, path: &Path) -> Result<(), IoError> {
        let record = |state: &mut State, _: Option<&()>| state.disk.unlink(path);
        self.name_op("remove", path, || self.inner.unlink(path), record)
    }

    fn link(&self, from: &Path, to: &Path) -> Result<(), IoError> {
        let record = |state: &mut State, _: Option<&()>| state.disk.link(from, to);
        self.name_op("link", from, || self.inner.link(from, to), record)
    }

    fn list(&self, dir: &Path) -> Result<Vec<String>, IoError> {
        self.alive("list", dir)?;
        self.inner.list(dir)
    }

    fn create_dir(&self, dir: &Path) -> Result<(), IoError> {
        self.alive("create directory", dir)?;
        self.inner.create_dir(dir)?;
        self.state().disk.dirs.extend(dir.ancestors().map(Path::to_owned));
        Ok(())
    }

    fn remove_dir(&self, dir: &Path) -> Result<(), IoError> {
        self.alive("remove directory", dir)?;
        self.inner.remove_dir(dir)?;
        self.state().disk.dirs.remove(dir);
        Ok(())
    }

    fn sync_dir(&self, dir: &Path) -> Result<(), IoError> {
        let mut state = self.state();
        match state.judge(OpKind::Sync) {
            Verdict::Proceed if state.lies_about(dir) => Ok(()),
            Verdict::Proceed => {
                self.inner.sync_dir(dir)?;
                state.disk.sync_dir(dir);
                Ok(())
            }
            Verdict::Fail(fault) => Err(fault.error("sync directory", dir).losing_writes()),
            Verdict::Frozen => Err(Fault::Eio.error("sync directory", dir).losing_writes()),
        }
    }

    fn exists(&self, path: &Path) -> Result<bool, IoError> {
        self.inner.exists(path)
    }

    fn is_link(&self, path: &Path) -> Result<bool, IoError> {
        self.inner.is_link(path)
    }

    fn symlink(&self, target: &Path, path: &Path) -> Result<(), IoError> {
        self.alive("make the symbolic link", path)?;
        self.inner.symlink(target, path)
    }

    fn link_target(&self, path: &Path) -> Option<PathBuf> {
        self.inner.link_target(path)
    }

    fn drive(&self, path: &Path) -> Result<u64, IoError> {
        self.inner.drive(path)
    }

    fn is_same(&self, one: &Path, other: &Path) -> Result<bool, IoError> {
        self.alive("compare the names of", one)?;
        self.inner.is_same(one, other)
    }

    fn is_at(&self, file: FileId, path: &Path) -> Result<bool, IoError> {
        self.alive("look for", path)?;
        self.inner.is_at(file, path)
    }

    fn link_count(&self, path: &Path) -> Result<u64, IoError> {
        self.alive("count the links of", path)?;
        self.inner.link_count(path)
    }

    fn free_bytes(&self, path: &Path) -> Result<u64, IoError> {
        self.inner.free_bytes(path)
    }

    fn disk_warnings(&self, dir: &Path) -> Vec<String> {
        self.inner.disk_warnings(dir)
    }

    fn lock(&self, path: &Path, kind: LockKind) -> Result<Option<Lock>, IoError> {
        self.inner.lock(path, kind)
    }

    fn target(
        &self,
        file: FileId,
        offset: u64,
        len: usize,
        budget: &Budget,
        after: AfterUse,
    ) -> Result<Target, StoreError> {
        self.inner.target(file, offset, len, budget, after)
    }

    fn submit(&self, op: Op, done: IoDone) {
        match op {
            Op::Write { .. } => self.submit_write(op, done),
            Op::Sync { .. } => self.submit_sync(op, done),
            Op::Read { file, .. } => {
                let mut state = self.state();
                let (verdict, path) = (state.judge(OpKind::Read), state.path(file));
                drop(state);
                match verdict {
                    Verdict::Proceed => self.inner.submit(op, done),
                    Verdict::Fail(fault) => {
                        drop(op);
                        done(Err(fault.error("read", &path)));
                    }
                    Verdict::Frozen => {
                        drop(op);
                        done(Err(Fault::Eio.error("read", &path)));
                    }
                }
            }
        }
    }

    fn counters(&self) -> IoCounters {
        self.inner.counters()
    }

    fn is_off(&self, guard: Guard) -> bool {
        self.state().off == Some(guard)
    }
}

impl State {
    fn judge(&mut self, kind: OpKind) -> Verdict {
        let count = self.counts.entry(kind).or_default();
        *count += 1;
        let this = (kind, *count);
        if self.freeze == Some(this) {
            self.frozen = true;
        }
        match self.faults.get(&this) {
            _ if self.frozen => Verdict::Frozen,
            Some(&fault) => Verdict::Fail(fault),
            None => Verdict::Proceed,
        }
    }

    /// Whether the operation of `kind` judged last is the one the power failed in.
    fn just_froze(&self, kind: OpKind) -> bool {
        self.freeze == Some((kind, self.counts.get(&kind).copied().unwrap_or(0)))
    }

    fn path(&self, file: FileId) -> PathBuf {
        let node = self.open.get(&file);
        let name = self.disk.current.iter().find(|(_, n)| Some(*n) == node);
        name.map_or_else(|| PathBuf::from("a removed file"), |(path, _)| path.clone())
    }

    fn write(&mut self, file: FileId, offset: usize, bytes: &[u8]) {
        if let (Some(&node), false) = (self.open.get(&file), bytes.is_empty()) {
            self.disk.nodes[node].pending.push((offset, bytes.to_vec()));
        }
    }

    fn lies_about(&self, path: &Path) -> bool {
        self.lies.is_some_and(|about| about(path))
    }

    /// Unsynced writes of a file never reach the disk.
    fn lose(&mut self, file: FileId) {
        if let Some(&node) = self.open.get(&file) {
            self.disk.nodes[node].pending.clear();
        }
    }

    fn synced(&mut self, file: FileId) {
        let frozen = self.frozen;
        if let (Some(&node), false) = (self.open.get(&file), frozen) {
            self.disk.nodes[node].sync();
        }
    }
}

impl Node {
    fn sync(&mut self) {
        for (offset, bytes) in std::mem::take(&mut self.pending) {
            overlay(&mut self.durable, offset, &bytes);
        }
    }

    fn after_crash(&self, random: &mut Random) -> Vec<u8> {
        let mut file = self.durable.clone();
        // A disk may take them in any order.
        let mut pending: Vec<&(usize, Vec<u8>)> = self.pending.iter().collect();
        for i in (1..pending.len()).rev() {
            pending.swap(i, (random.next() % (i as u64 + 1)) as usize);
        }
        // Whole-write survival is drawn per write, so that "all" and "none" are common as well.
        for (offset, bytes) in pending {
            let odds = random.next() % 4;
            let mut at = 0;
            while at < bytes.len() {
                let sector_end = ((offset + at) / SECTOR_BYTES + 1) * SECTOR_BYTES - offset;
                let end = sector_end.min(bytes.len());
                if random.next() % 3 < odds {
                    overlay(&mut file, offset + at, &bytes[at..end]);
                }
                at = end;
            }
        }
        file
    }
}

impl Imagined {
    fn from_image(image: Image) -> Imagined {
        let mut disk = Imagined { dirs: image.dirs, ..Imagined::default() };
        for (path, durable) in image.files {
            disk.current.insert(path, disk.nodes.len());
            disk.nodes.push(Node { durable, pending: Vec::new() });
        }
        disk.durable = disk.current.clone();
        disk
    }

    fn create(&mut self, path: &Path, len: u64) -> usize {
        let node = self.nodes.len();
        let zeroes = if len > 0 { vec![(0, vec![0; len as usize])] } else { Vec::new() };
        self.nodes.push(Node { durable: Vec::new(), pending: zeroes });
        self.current.insert(path.to_owned(), node);
        self.pending.push(NameChange::Create(path.to_owned(), node));
        node
    }

    fn rename(&mut self, from: &Path, to: &Path) {
        if let Some(node) = self.current.remove(from) {
            self.current.insert(to.to_owned(), node);
            self.pending.push(NameChange::Rename(from.to_owned(), to.to_owned(), node));
        }
    }

    fn link(&mut self, from: &Path, to: &Path) {
        if let Some(&node) = self.current.get(from) {
            self.current.insert(to.to_owned(), node);
            self.pending.push(NameChange::Create(to.to_owned(), node));
        }
    }

    fn unlink(&mut self, path: &Path) {
        self.current.remove(path);
        self.pending.push(NameChange::Unlink(path.to_owned()));
    }

    fn sync_dir(&mut self, dir: &Path) {
        let pending = std::mem::take(&mut self.pending);
        let (synced, left) =
            pending.into_iter().partition(|change| change.path().parent() == Some(dir));
        self.pending = left;
        let synced: Vec<NameChange> = synced;
        synced.iter().for_each(|change| change.apply(&mut self.durable));
    }

    fn after_crash(&self, random: &mut Random) -> Image {
        let mut names = self.durable.clone();
        for change in &self.pending {
            if random.next().is_multiple_of(2) {
                change.apply(&mut names);
            }
        }
        let node = |index: usize, random: &mut Random| self.nodes[index].after_crash(random);
        let files = names.into_iter().map(|(path, index)| (path, node(index, random))).collect();
        Image { files, dirs: self.dirs.clone() }
    }
}

impl NameChange {
    fn path(&self) -> &Path {
        match self {
            NameChange::Create(path, _)
            | NameChange::Rename(path, _, _)
            | NameChange::Unlink(path) => path,
        }
    }

    fn apply(&self, names: &mut BTreeMap<PathBuf, usize>) {
        match self {
            NameChange::Create(path, node) => {
                names.insert(path.clone(), *node);
            }
            NameChange::Rename(from, to, node) => {
                if names.get(from) == Some(node) {
                    names.remove(from);
                }
                names.insert(to.clone(), *node);
            }
            NameChange::Unlink(path) => {
                names.remove(path);
            }
        }
    }
}

impl Fault {
    fn error(self, context: &'static str, path: &Path) -> IoError {
        let source = match self {
            Fault::Eio => io::Error::other("injected input/output error"),
            Fault::NoSpace => io::ErrorKind::StorageFull.into(),
            Fault::Short => io::ErrorKind::WriteZero.into(),
        };
        IoError::new(context, path, source)
    }
}

/// SplitMix64 (Steele, Lea and Flood 2014).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}
