//! Packs tokens into rows and writes the row file under its name only when it is complete.
//!
//! Invariants:
//! - while the writer lives, only its own `<name>.<process>-<number>.tmp` exists; a writer that is
//!   dropped before [`RowsWriter::finish`] removes it;
//! - writers of one row file do not meet: whoever finishes last replaces what is there, which is
//!   equal where their data is.

use std::fs::{self, File};
use std::hash::Hasher;
use std::io::{self, BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::process;
use std::sync::atomic::{AtomicU64, Ordering};

use twox_hash::XxHash3_64;

use crate::bits::Bits;
use crate::error::DataError;
use crate::header::{HEADER_BYTES, RowsHeader};
use crate::os;

/// What every temporary name ends in.
const TEMPORARY: &str = ".tmp";

/// Numbers the temporary files of this process.
static NUMBER: AtomicU64 = AtomicU64::new(0);

/// What is known about the data only when all of it was read.
pub(crate) struct Totals {
    pub(crate) vocab_size: u32,
    pub(crate) documents: u64,
    pub(crate) source_digest: u64,
}

pub(crate) struct RowsWriter {
    path: PathBuf,
    file: BufWriter<File>,
    /// Behind `file`, so that the file is closed when it is removed.
    temporary: Temporary,
    hash: XxHash3_64,
    row: OpenRow,
    record: Vec<u8>,
    rows: u64,
    targets: u64,
    dropped_tokens: u64,
    max_id: u32,
}

/// The row that is being filled.
struct OpenRow {
    tokens: Vec<u32>,
    starts: Bits,
    seq_len: usize,
}

/// A file of this writer only, removed when dropped unless it was renamed.
struct Temporary {
    path: PathBuf,
    renamed: bool,
}

/// Removes what killed writers left in `directory`, and says how many files that were; a directory
/// that is not there has none.
///
/// Only for who holds the store alone: the file of a living writer would go as well, and that
/// writer fail.
pub fn remove_temporaries(directory: &Path) -> Result<usize, DataError> {
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(0),
        entries => entries.map_err(DataError::io("list token rows", directory))?,
    };
    let mut removed = 0;
    for entry in entries {
        let entry = entry.map_err(DataError::io("list token rows", directory))?;
        let path = entry.path();
        let kind = entry.file_type().map_err(DataError::io("list token rows", &path))?;
        if kind.is_file() && is_temporary(&entry.file_name().to_string_lossy()) {
            fs::remove_file(&path).map_err(DataError::io("remove unfinished token rows", &path))?;
            removed += 1;
        }
    }
    Ok(removed)
}

/// Whether a name is one that [`Temporary::create`] gives: whatever else is there is somebody else's.
fn is_temporary(name: &str) -> bool {
    let number = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    let stem = name.strip_suffix(TEMPORARY).and_then(|stem| stem.rsplit_once('.'));
    let numbers = stem.and_then(|(_, numbers)| numbers.split_once('-'));
    numbers.is_some_and(|(process, at)| number(process) && number(at))
}

impl RowsWriter {
    /// `path` is where the complete file will be; its directory is made if it is missing.
    pub(crate) fn create(path: &Path, seq_len: u32) -> Result<RowsWriter, DataError> {
        let directory = directory_of(path);
        fs::create_dir_all(directory).map_err(DataError::io("make directory", directory))?;
        let (temporary, file) = Temporary::create(path)?;
        let mut writer = RowsWriter {
            path: path.to_path_buf(),
            temporary,
            file: BufWriter::with_capacity(1 << 20, file),
            hash: XxHash3_64::new(),
            row: OpenRow::new(seq_len as usize),
            record: Vec::new(),
            rows: 0,
            targets: 0,
            dropped_tokens: 0,
            max_id: 0,
        };
        writer.write(&[0; HEADER_BYTES as usize])?;
        Ok(writer)
    }

    /// Packs `tokens` behind what came before; `starts_document` marks the first of them.
    pub(crate) fn push(&mut self, tokens: &[u32], starts_document: bool) -> Result<(), DataError> {
        let mut rest = tokens;
        let mut starts = starts_document;
        while !rest.is_empty() {
            let (now, later) = rest.split_at(self.row.room().min(rest.len()));
            self.row.append(now, starts);
            if self.row.room() == 0 {
                self.write_row()?;
            }
            starts = false;
            rest = later;
        }
        Ok(())
    }

    /// Ends the packed stream: a partial row is dropped and counted.
    pub(crate) fn end_stream(&mut self) {
        self.dropped_tokens += self.row.tokens.len() as u64;
        self.row.clear();
    }

    pub(crate) fn rows(&self) -> u64 {
        self.rows
    }

    pub(crate) fn dropped_tokens(&self) -> u64 {
        self.dropped_tokens
    }

    /// Writes the header, syncs, renames, syncs the directory.
    pub(crate) fn finish(mut self, totals: &Totals) -> Result<RowsHeader, DataError> {
        let header = RowsHeader {
            seq_len: self.row.seq_len as u32,
            vocab_size: totals.vocab_size,
            rows: self.rows,
            documents: totals.documents,
            targets: self.targets,
            dropped_tokens: self.dropped_tokens,
            max_id: self.max_id,
            source_digest: totals.source_digest,
            data_hash: self.hash.finish(),
        };
        self.file
            .seek(SeekFrom::Start(0))
            .and_then(|_| self.file.write_all(&header.encode()))
            .and_then(|()| self.file.flush())
            .and_then(|()| self.file.get_ref().sync_all())
            .map_err(DataError::io("write token rows", &self.temporary.path))?;
        self.temporary
            .rename(&self.path)
            .and_then(|()| os::sync_directory(directory_of(&self.path)))
            .map_err(DataError::io("rename token rows to", &self.path))?;
        Ok(header)
    }

    fn write_row(&mut self) -> Result<(), DataError> {
        let targets = Bits::all_but_first(self.row.seq_len);
        self.record.clear();
        for token in &self.row.tokens {
            self.record.extend_from_slice(&token.to_le_bytes());
            self.max_id = self.max_id.max(*token);
        }
        targets.append_to(&mut self.record);
        self.row.starts.append_to(&mut self.record);
        self.hash.write(&self.record);
        let record = std::mem::take(&mut self.record);
        self.write(&record)?;
        self.record = record;
        self.rows += 1;
        self.targets += targets.count_ones();
        self.row.clear();
        Ok(())
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), DataError> {
        let failed = DataError::io("write token rows", &self.temporary.path);
        self.file.write_all(bytes).map_err(failed)
    }
}

impl OpenRow {
    fn new(seq_len: usize) -> OpenRow {
        OpenRow { tokens: Vec::new(), starts: Bits::zeros(seq_len), seq_len }
    }

    fn room(&self) -> usize {
        self.seq_len - self.tokens.len()
    }

    fn append(&mut self, tokens: &[u32], starts_document: bool) {
        if starts_document {
            self.starts.set(self.tokens.len());
        }
        self.tokens.extend_from_slice(tokens);
    }

    fn clear(&mut self) {
        self.tokens.clear();
        self.starts.clear();
    }
}

impl Temporary {
    /// A new file beside `path`. Process ids recur (in containers nearly always), so a name that
    /// exists is somebody's: the next number is tried.
    fn create(path: &Path) -> Result<(Temporary, File), DataError> {
        loop {
            let number = NUMBER.fetch_add(1, Ordering::Relaxed);
            let mut name = path.as_os_str().to_owned();
            name.push(format!(".{}-{number}{TEMPORARY}", process::id()));
            let path = PathBuf::from(name);
            match File::create_new(&path) {
                Ok(file) => return Ok((Temporary { path, renamed: false }, file)),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(DataError::io("write token rows", &path)(error)),
            }
        }
    }

    fn rename(&mut self, path: &Path) -> io::Result<()> {
        fs::rename(&self.path, path)?;
        self.renamed = true;
        Ok(())
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        // After the rename the name may be another's; before it, a leftover is only untidy.
        if !self.renamed {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// The directory that holds `path`.
fn directory_of(path: &Path) -> &Path {
    match path.parent() {
        Some(directory) if !directory.as_os_str().is_empty() => directory,
        _ => Path::new("."),
    }
}
