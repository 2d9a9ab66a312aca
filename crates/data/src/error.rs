//! What can be wrong with the data that a user gives.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use crate::tokenizer::TokenizerError;

/// What an error asks of the caller, independent of its text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// The user's data, tokenizer or options do not fit: nothing to retry.
    Invalid,
    /// A file that we wrote ourselves is not as we wrote it.
    Damaged,
    /// The file system is full.
    NoSpace,
    /// Reading or writing failed.
    Io,
}

impl ErrorKind {
    /// A file that is not there or may not be read is the user's to mend, not the disk's.
    pub(crate) fn of(error: &io::Error) -> ErrorKind {
        match error.kind() {
            io::ErrorKind::NotFound
            | io::ErrorKind::PermissionDenied
            | io::ErrorKind::IsADirectory
            | io::ErrorKind::NotADirectory => ErrorKind::Invalid,
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => ErrorKind::NoSpace,
            _ => ErrorKind::Io,
        }
    }
}

/// Where in a source a token stands. Lines count from 1; tokens, rows and columns from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    Token(u64),
    Line(u64),
    Row { row: u64, column: u64 },
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Token(token) => write!(f, "token {token}"),
            Place::Line(line) => write!(f, "line {line}"),
            Place::Row { row, column } => write!(f, "row {row}, column {column}"),
        }
    }
}

/// Why data could not be listed or turned into rows; [`DataError::kind`] says what to do about it.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    #[error("{action} {}", path.display())]
    Io { action: &'static str, path: PathBuf, source: io::Error },
    #[error("{}: not a .txt, .jsonl or .npy file", path.display())]
    UnknownFormat { path: PathBuf },
    #[error("{} is not a regular file", path.display())]
    NotRegular { path: PathBuf },
    #[error(
        "{}: no .txt or .jsonl file in this directory; .npy files are given by name",
        path.display()
    )]
    EmptyDirectory { path: PathBuf },
    #[error(
        "{}: text and .npy files ({}) in one directory; .npy files are given by name: name each file",
        path.display(),
        npy.display()
    )]
    MixedDirectory { path: PathBuf, npy: PathBuf },
    #[error("no data files given")]
    NoSources,
    #[error("{}: not valid UTF-8 at byte {offset}", path.display())]
    Utf8 { path: PathBuf, offset: u64 },
    #[error("{}, line {line}: {reason}", path.display())]
    Jsonl { path: PathBuf, line: u64, reason: String },
    #[error("{}: {reason}", path.display())]
    Npy { path: PathBuf, reason: String },
    #[error("{}: rows of {width} tokens, but the sequence length is {seq_len}", path.display())]
    RowWidth { path: PathBuf, width: u64, seq_len: u32 },
    #[error("{}, {place}: token id {id} is beyond the vocabulary of {vocab_size}", path.display())]
    IdBeyondVocabulary { path: PathBuf, place: Place, id: i64, vocab_size: u32 },
    #[error("{}: text needs a tokenizer, and there is none", path.display())]
    NoTokenizer { path: PathBuf },
    #[error("{}: text needs an end-of-sequence token; the tokenizer names none", path.display())]
    NoEos { path: PathBuf },
    #[error("the end-of-sequence id {eos} is beyond the vocabulary of {vocab_size}")]
    EosBeyondVocabulary { eos: u32, vocab_size: u32 },
    #[error("{}, {place}: encode text", path.display())]
    Encode { path: PathBuf, place: Place, source: TokenizerError },
    #[error("a sequence length of {seq_len} leaves nothing to predict; the smallest is 2")]
    SeqLen { seq_len: u32 },
    /// `path` is the first of `files`, of which `empty` have no bytes.
    #[error("{}{}", path.display(), too_short(*files, *empty, *tokens, *seq_len))]
    TooShort { path: PathBuf, files: usize, empty: usize, tokens: u64, seq_len: u32 },
    #[error("{}: the file changed while it was read", path.display())]
    Changed { path: PathBuf },
}

impl DataError {
    /// Everything is `Invalid` but failed reads and writes.
    pub fn kind(&self) -> ErrorKind {
        match self {
            DataError::Io { source, .. } => ErrorKind::of(source),
            _ => ErrorKind::Invalid,
        }
    }

    /// For `map_err`: what was done to which file.
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> DataError {
        let path = path.to_path_buf();
        move |source| DataError::Io { action, path, source }
    }
}

/// What follows the first file's name: of how many, what is in them, what to do.
fn too_short(files: usize, empty: usize, tokens: u64, seq_len: u32) -> String {
    let which = match (files, empty) {
        (1, 0) => String::new(),
        (1, _) => ", an empty file".to_owned(),
        (_, 0) => format!(", the first of {files} files"),
        _ => format!(", the first of {files} files ({empty} of them empty)"),
    };
    let plural = if tokens == 1 { "" } else { "s" };
    // A row of one token has nothing to predict.
    let shorter = match tokens {
        0 | 1 => String::new(),
        _ => format!(" or a smaller --seq-len (at most {tokens})"),
    };
    format!(
        "{which}: {tokens} token{plural}, end-of-sequence tokens included; one row needs \
         {seq_len}: give more data{shorter}"
    )
}
