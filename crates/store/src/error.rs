//! [`StoreError`]: every way a store operation fails, one variant per exit code.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc;

use model::BudgetError;

use crate::io::IoError;

/// What an asynchronous call reports to, once. It may run on an engine's thread or before the
/// call returns, so it must neither block nor wait for another call of the store.
pub type Done<T> = Box<dyn FnOnce(Result<T, StoreError>) + Send>;

/// Why a store operation failed.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// Not a store, or one this version cannot use; nothing was changed.
    #[error("{0}")]
    Invalid(String),
    /// Bytes on disk contradict their hash or their format.
    #[error("{} is damaged: {what}", file.display())]
    Damaged { file: PathBuf, what: String },
    /// The disk is too small. `needed` counts all the operation wants to allocate.
    /// Neither is known where 0.
    #[error("{}", no_space(path, *needed, *available))]
    NoSpace { path: PathBuf, needed: u64, available: u64 },
    #[error("cannot {context} {}: {source}{}", path.display(), remedy(source))]
    Io { context: &'static str, path: PathBuf, source: io::Error },
    #[error("the store {} is in use by another process", dir.display())]
    InUse { dir: PathBuf },
    /// An earlier failure made this opening unusable; nothing was written since.
    #[error("{}", poisoned(cause, *damaged))]
    Poisoned {
        cause: String,
        /// The cause was [`StoreError::Damaged`].
        damaged: bool,
    },
    #[error(transparent)]
    Memory(#[from] BudgetError),
}

impl StoreError {
    pub(crate) fn damaged(file: impl Into<PathBuf>, what: impl Into<String>) -> StoreError {
        StoreError::Damaged { file: file.into(), what: what.into() }
    }
}

impl From<IoError> for StoreError {
    fn from(error: IoError) -> StoreError {
        let full = matches!(
            error.source.kind(),
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded
        );
        if full {
            let needed = error.wanted_bytes;
            return StoreError::NoSpace { path: error.path, needed, available: 0 };
        }
        if let (Some(what), "open" | "read" | "map") = (unlike_a_file(&error), error.context) {
            return StoreError::damaged(error.path, what);
        }
        StoreError::Io { context: error.context, path: error.path, source: error.source }
    }
}

/// What is wrong with a file whose reading failed in a way that no device causes.
fn unlike_a_file(error: &IoError) -> Option<&'static str> {
    match error.source.kind() {
        io::ErrorKind::UnexpectedEof => Some("it ends early"),
        io::ErrorKind::IsADirectory => Some("it is a directory"),
        io::ErrorKind::NotSeekable => Some("it is not a regular file"),
        _ => None,
    }
}

/// What the user can do about an error that is no fault of the disk.
fn remedy(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EMFILE) => "; raise the limit with `ulimit -n`",
        Some(libc::ENFILE) => {
            "; the whole system has too many: end other programs or raise fs.file-max, and see \
             `ulimit -n`"
        }
        _ => "",
    }
}

/// Several operations may be in flight when damage is found: each tells of it.
fn poisoned(cause: &str, damaged: bool) -> String {
    match damaged {
        true => cause.to_owned(),
        false => format!(
            "the store was stopped by an earlier failure ({cause}); open it again to recover"
        ),
    }
}

fn no_space(path: &Path, needed: u64, available: u64) -> String {
    let path = path.display();
    match (needed, available) {
        (0, _) => format!("the disk at {path} is full"),
        (_, 0) => format!("the disk at {path} is full: {} needed", show_bytes(needed)),
        _ => format!(
            "not enough disk at {path}: {} needed, {} available, {} missing",
            show_bytes(needed),
            show_bytes(available),
            show_bytes(needed.saturating_sub(available))
        ),
    }
}

/// `12.3 GB`, `380.0 MB`: decimal, as disks are sold.
pub fn show_bytes(bytes: u64) -> String {
    if bytes < 1000 {
        return format!("{bytes} bytes");
    }
    let mut value = bytes as f64 / 1e3;
    for unit in ["kB", "MB", "GB"] {
        // What would be rounded to 1000.0 belongs to the next unit.
        if value < 999.95 {
            return format!("{value:.1} {unit}");
        }
        value /= 1e3;
    }
    format!("{value:.1} TB")
}

/// Runs an asynchronous call to its end. Must not be called from inside a [`Done`].
pub fn blocking<T: Send + 'static>(start: impl FnOnce(Done<T>)) -> Result<T, StoreError> {
    let (sender, receiver) = mpsc::sync_channel(1);
    start(Box::new(move |result| {
        // The receiver waits below until this arrives.
        let _ = sender.send(result);
    }));
    receiver.recv().unwrap_or_else(|_| {
        let cause = "an operation was dropped unfinished".into();
        Err(StoreError::Poisoned { cause, damaged: false })
    })
}

#[cfg(test)]
mod tests;
