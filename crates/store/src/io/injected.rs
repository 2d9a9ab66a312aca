//! The `injected` engine: another engine, each call of which may be made to fail, or to come late.
//!
//! Invariants:
//! - every call of [`Io`] asks first, by its name in [`IO_CALLS`], `close` and `counters` excepted;
//! - a data operation still reports exactly once, whatever was injected.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use model::{Budget, HostBytes};

use super::{
    Access, AfterUse, FileId, Guard, Io, IoCounters, IoDone, IoError, Lock, LockKind, Op, Target,
};
use crate::StoreError;

/// Names under which an injected engine asks.
pub const IO_CALLS: [&str; 22] = [
    "create",
    "create_dir",
    "drive",
    "exists",
    "free_bytes",
    "is_at",
    "is_link",
    "is_same",
    "len",
    "link",
    "link_count",
    "list",
    "lock",
    "map",
    "open",
    "read",
    "remove_dir",
    "rename",
    "symlink",
    "sync",
    "unlink",
    "write",
];

/// What happens to a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Injection {
    /// The device reports an error; nothing was done.
    Eio,
    /// The disk is full; nothing was done.
    NoSpace,
    /// The right to do it is gone; nothing was done.
    Access,
    /// Half of a write arrives, a read ends early; elsewhere as [`Injection::Eio`].
    Short,
    /// It is carried out this much later.
    Delay(Duration),
}

/// Asked once for each call, by name; it may also panic or end the process.
pub type Inject = Arc<dyn Fn(&'static str) -> Option<Injection> + Send + Sync>;

/// `inner`, whose calls `inject` decides on.
pub fn injected_engine(inner: Arc<dyn Io>, inject: Inject) -> Arc<dyn Io> {
    Arc::new(Injected { inner, inject })
}

struct Injected {
    inner: Arc<dyn Io>,
    inject: Inject,
}

impl std::fmt::Debug for Injected {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Injected").field("inner", &self.inner).finish_non_exhaustive()
    }
}

impl Injected {
    /// Lets a synchronous call through, late or not at all.
    fn pass(&self, call: &'static str, path: &Path) -> Result<(), IoError> {
        match (self.inject)(call) {
            None => Ok(()),
            Some(Injection::Delay(time)) => {
                thread::sleep(time);
                Ok(())
            }
            Some(fault) => Err(IoError::new(call, path, fault.source())),
        }
    }
}

impl Injection {
    fn source(self) -> io::Error {
        io::Error::from_raw_os_error(match self {
            Injection::NoSpace => libc::ENOSPC,
            Injection::Access => libc::EACCES,
            Injection::Eio | Injection::Short | Injection::Delay(_) => libc::EIO,
        })
    }
}

/// A failed data operation's error, which names no file: the engine below knows which it is.
fn failed(call: &'static str, source: io::Error) -> IoError {
    let error = IoError::new(call, &PathBuf::from("(injected)"), source);
    if call == "sync" { error.losing_writes() } else { error }
}

fn call_of(op: &Op) -> &'static str {
    match op {
        Op::Read { .. } => "read",
        Op::Write { .. } => "write",
        Op::Sync { .. } => "sync",
    }
}

/// The half of a write that arrives.
fn half(op: Op) -> Option<Op> {
    match op {
        Op::Write { file, offset, bytes, range } => {
            let range = range.start..range.start + range.len() / 2;
            Some(Op::Write { file, offset, bytes, range })
        }
        Op::Read { .. } | Op::Sync { .. } => None,
    }
}

fn short(call: &'static str) -> io::Error {
    match call {
        "read" => io::ErrorKind::UnexpectedEof.into(),
        "write" => io::ErrorKind::WriteZero.into(),
        _ => Injection::Short.source(),
    }
}

impl Io for Injected {
    fn create(&self, path: &Path, len: u64) -> Result<FileId, IoError> {
        self.pass("create", path).map_err(|error| error.wanting(len))?;
        self.inner.create(path, len)
    }

    fn open(&self, path: &Path, access: Access) -> Result<FileId, IoError> {
        self.pass("open", path)?;
        self.inner.open(path, access)
    }

    fn close(&self, file: FileId) {
        self.inner.close(file);
    }

    fn len(&self, file: FileId) -> Result<u64, IoError> {
        self.pass("len", Path::new("(injected)"))?;
        self.inner.len(file)
    }

    fn rename(&self, from: &Path, to: &Path) -> Result<(), IoError> {
        self.pass("rename", from)?;
        self.inner.rename(from, to)
    }

    fn unlink(&self, path: &Path) -> Result<(), IoError> {
        self.pass("unlink", path)?;
        self.inner.unlink(path)
    }

    fn link(&self, from: &Path, to: &Path) -> Result<(), IoError> {
        self.pass("link", from)?;
        self.inner.link(from, to)
    }

    fn list(&self, dir: &Path) -> Result<Vec<String>, IoError> {
        self.pass("list", dir)?;
        self.inner.list(dir)
    }

    fn create_dir(&self, dir: &Path) -> Result<(), IoError> {
        self.pass("create_dir", dir)?;
        self.inner.create_dir(dir)
    }

    fn remove_dir(&self, dir: &Path) -> Result<(), IoError> {
        self.pass("remove_dir", dir)?;
        self.inner.remove_dir(dir)
    }

    fn sync_dir(&self, dir: &Path) -> Result<(), IoError> {
        self.pass("sync", dir).map_err(IoError::losing_writes)?;
        self.inner.sync_dir(dir)
    }

    fn exists(&self, path: &Path) -> Result<bool, IoError> {
        self.pass("exists", path)?;
        self.inner.exists(path)
    }

    fn is_link(&self, path: &Path) -> Result<bool, IoError> {
        self.pass("is_link", path)?;
        self.inner.is_link(path)
    }

    fn symlink(&self, target: &Path, path: &Path) -> Result<(), IoError> {
        self.pass("symlink", path)?;
        self.inner.symlink(target, path)
    }

    fn link_target(&self, path: &Path) -> Option<PathBuf> {
        self.inner.link_target(path)
    }

    fn drive(&self, path: &Path) -> Result<u64, IoError> {
        self.pass("drive", path)?;
        self.inner.drive(path)
    }

    fn is_same(&self, one: &Path, other: &Path) -> Result<bool, IoError> {
        self.pass("is_same", one)?;
        self.inner.is_same(one, other)
    }

    fn is_at(&self, file: FileId, path: &Path) -> Result<bool, IoError> {
        self.pass("is_at", path)?;
        self.inner.is_at(file, path)
    }

    fn link_count(&self, path: &Path) -> Result<u64, IoError> {
        self.pass("link_count", path)?;
        self.inner.link_count(path)
    }

    /// Without room it reports none instead of failing.
    fn free_bytes(&self, path: &Path) -> Result<u64, IoError> {
        match self.pass("free_bytes", path) {
            Err(error) if error.source.raw_os_error() == Some(libc::ENOSPC) => Ok(0),
            passed => passed.and_then(|()| self.inner.free_bytes(path)),
        }
    }

    fn disk_warnings(&self, dir: &Path) -> Vec<String> {
        self.inner.disk_warnings(dir)
    }

    fn lock(&self, path: &Path, kind: LockKind) -> Result<Option<Lock>, IoError> {
        self.pass("lock", path)?;
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
        self.pass("map", Path::new("(injected)"))?;
        self.inner.target(file, offset, len, budget, after)
    }

    fn keeping(
        &self,
        file: FileId,
        offset: u64,
        block: HostBytes,
        budget: &Budget,
        after: AfterUse,
    ) -> HostBytes {
        self.inner.keeping(file, offset, block, budget, after)
    }

    fn submit(&self, op: Op, done: IoDone) {
        let call = call_of(&op);
        match (self.inject)(call) {
            None => self.inner.submit(op, done),
            Some(Injection::Delay(time)) => {
                let inner = Arc::clone(&self.inner);
                thread::spawn(move || {
                    thread::sleep(time);
                    inner.submit(op, done);
                });
            }
            Some(Injection::Short) => {
                let error = failed(call, short(call));
                match half(op) {
                    Some(half) => self.inner.submit(half, Box::new(move |_| done(Err(error)))),
                    None => done(Err(error)),
                }
            }
            Some(fault) => {
                // Parts go before the report, as every engine does it.
                drop(op);
                done(Err(failed(call, fault.source())));
            }
        }
    }

    fn counters(&self) -> IoCounters {
        self.inner.counters()
    }

    fn is_off(&self, guard: Guard) -> bool {
        self.inner.is_off(guard)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use model::HostBytes;

    use super::*;
    use crate::io::{memory_engine, read_now, wait, write_block};

    fn engine(call: &'static str, what: Injection) -> Arc<dyn Io> {
        let armed = Mutex::new(true);
        let inject: Inject = Arc::new(move |asked| {
            let hit = asked == call && std::mem::take(&mut *armed.lock().unwrap());
            hit.then_some(what)
        });
        let memory = memory_engine();
        memory.create_dir(Path::new("/")).unwrap();
        injected_engine(memory, inject)
    }

    #[test]
    fn the_calls_are_sorted_and_differ() {
        assert!(IO_CALLS.is_sorted_by(|a, b| a < b));
    }

    #[test]
    fn half_of_a_short_write_arrives_and_the_next_one_is_whole() {
        let io = engine("write", Injection::Short);
        let file = io.create(Path::new("/f"), 4).unwrap();
        let mut block = HostBytes::zeroed(4);
        block.bytes_mut().fill(7);
        let block = Arc::new(block);
        let write = || wait(|done| write_block(&*io, file, 0, &block, done));
        assert_eq!(write().unwrap_err().source.kind(), io::ErrorKind::WriteZero);
        assert_eq!(read_now(&*io, file, 0, 4).unwrap().bytes(), [7, 7, 0, 0]);
        write().unwrap();
        assert_eq!(read_now(&*io, file, 0, 4).unwrap().bytes(), [7, 7, 7, 7]);
    }

    #[test]
    fn every_kind_of_failure_reports_once_and_a_failed_sync_loses_writes() {
        for (call, what) in [
            ("sync", Injection::Eio),
            ("sync", Injection::Short),
            ("read", Injection::Short),
            ("read", Injection::Eio),
        ] {
            let io = engine(call, what);
            let file = io.create(Path::new("/f"), 4).unwrap();
            let sync = || wait(|done| io.submit(Op::Sync { file }, done));
            let read = || read_now(&*io, file, 0, 4).map(drop);
            let first = if call == "sync" { sync() } else { read() };
            assert_eq!(first.unwrap_err().lost_writes, call == "sync", "{call} {what:?}");
            sync().unwrap();
            read().unwrap();
        }
    }

    #[test]
    fn a_full_disk_reports_no_room() {
        let io = engine("free_bytes", Injection::NoSpace);
        assert_eq!(io.free_bytes(Path::new("/")).unwrap(), 0);
        assert!(io.free_bytes(Path::new("/")).unwrap() > 0);
    }

    #[test]
    fn a_late_operation_is_carried_out() {
        let io = engine("read", Injection::Delay(Duration::from_millis(1)));
        let file = io.create(Path::new("/f"), 4).unwrap();
        assert_eq!(read_now(&*io, file, 0, 4).unwrap().len(), 4);
    }
}
