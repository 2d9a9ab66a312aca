//! [`ConvertError`]: why a model could not be imported, initialised or exported.

use std::io;
use std::path::{Path, PathBuf};

use model::ConfigError;
use store::{StoreError, show_bytes};

/// Why a conversion failed. Every text says which file, what about it, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum ConvertError {
    /// The source (or an option) cannot be used as it is.
    #[error("{}: {what}; {remedy}", path.display())]
    Invalid { path: PathBuf, what: String, remedy: &'static str },
    /// The architecture cannot be used. Whoever reads one config calls it by its path, which need
    /// not end in the name that `what` starts with.
    #[error("{}: {}", path.display(), without_name(what))]
    Config { path: PathBuf, what: ConfigError },
    /// The operating system refused to read or write.
    #[error("cannot {action} {}: {source}", path.display())]
    Io { action: &'static str, path: PathBuf, source: io::Error },
    /// The destination's disk is too small.
    #[error(
        "{}: {} needed but only {} free; free at least {} more or choose another disk",
        path.display(),
        show_bytes(*needed_bytes),
        show_bytes(*available_bytes),
        show_bytes(needed_bytes.saturating_sub(*available_bytes))
    )]
    NoSpace { path: PathBuf, needed_bytes: u64, available_bytes: u64 },
    /// The store refused.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// What kind of failure an error is: decides the exit code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// Usage, unsupported or invalid model: exit code 2.
    Invalid,
    /// A damaged store: exit code 3.
    Damaged,
    /// Not enough disk: exit code 4.
    Space,
    /// Reading or writing failed: exit code 5.
    Io,
    /// The store is in use: exit code 6.
    InUse,
}

impl ConvertError {
    /// What kind of failure this is.
    pub fn kind(&self) -> ErrorKind {
        match self {
            ConvertError::Invalid { .. } | ConvertError::Config { .. } => ErrorKind::Invalid,
            ConvertError::NoSpace { .. } => ErrorKind::Space,
            ConvertError::Io { source, .. } => match source.kind() {
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => ErrorKind::Space,
                io::ErrorKind::NotFound
                | io::ErrorKind::NotADirectory
                | io::ErrorKind::IsADirectory => ErrorKind::Invalid,
                _ => ErrorKind::Io,
            },
            ConvertError::Store(error) => store_kind(error),
        }
    }

    pub(crate) fn invalid(
        path: impl AsRef<Path>,
        what: impl Into<String>,
        remedy: &'static str,
    ) -> ConvertError {
        ConvertError::Invalid { path: path.as_ref().to_path_buf(), what: what.into(), remedy }
    }

    /// For `map_err`: an I/O error while doing `action` to `path`.
    pub(crate) fn io(
        action: &'static str,
        path: impl AsRef<Path>,
    ) -> impl FnOnce(io::Error) -> ConvertError {
        move |source| ConvertError::Io { action, path: path.as_ref().to_path_buf(), source }
    }
}

fn without_name(what: &ConfigError) -> String {
    let text = what.to_string();
    text.strip_prefix("config.json ").map_or(text.clone(), str::to_owned)
}

/// Remedy for a file whose bytes cannot be right.
pub(crate) const FETCH_AGAIN: &str = "the file is damaged or incomplete, fetch it again";

fn store_kind(error: &StoreError) -> ErrorKind {
    match error {
        StoreError::Invalid(_) => ErrorKind::Invalid,
        StoreError::Damaged { .. } | StoreError::Poisoned { damaged: true, .. } => {
            ErrorKind::Damaged
        }
        StoreError::NoSpace { .. } | StoreError::Memory(_) => ErrorKind::Space,
        StoreError::Io { .. } | StoreError::Poisoned { .. } => ErrorKind::Io,
        StoreError::InUse { .. } => ErrorKind::InUse,
    }
}
