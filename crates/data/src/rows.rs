//! Reading a row file: any row at a computed offset.
//!
//! Invariants:
//! - opening checks the header and that the file is exactly as long as the header says;
//! - every row that is handed out was checked: ids below the vocabulary, no stray bits, and its
//!   first token is not a target.

use std::fs::File;
use std::hash::Hasher;
use std::io;
use std::path::{Path, PathBuf};

use twox_hash::XxHash3_64;

use crate::bits::Bits;
use crate::error::ErrorKind;
use crate::header::{HEADER_BYTES, RowsHeader};
use crate::os::read_exact_at;

const VERIFY_BYTES: u64 = 1 << 20;

/// One training sequence of S tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// Token ids, (S).
    pub tokens: Vec<u32>,
    /// Bit j: token j is predicted, from the tokens before it; never bit 0.
    pub targets: Bits,
    /// Bit j: token j is the first of a document. Documents in a row see each other.
    pub starts: Bits,
}

/// An open row file; reads from any thread.
#[derive(Debug)]
pub struct Rows {
    path: PathBuf,
    file: File,
    header: RowsHeader,
}

/// Why a row file or a row of it cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RowsError {
    #[error("read token rows {}", path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error("{}: {reason}", path.display())]
    Header { path: PathBuf, reason: String },
    #[error("{}: {found} bytes long; its header means {expected}", path.display())]
    Length { path: PathBuf, found: u64, expected: u64 },
    #[error("{}, row {row}: {reason}", path.display())]
    Row { path: PathBuf, row: u64, reason: String },
    #[error("{}: there is no row {row}; it has {rows}", path.display())]
    NoSuchRow { path: PathBuf, row: u64, rows: u64 },
    #[error("{}: content hash {found:016x}, written as {expected:016x}", path.display())]
    Hash { path: PathBuf, found: u64, expected: u64 },
}

impl RowsError {
    /// `Invalid` when asked for a row that is not there; else the file is damaged or unreadable.
    pub fn kind(&self) -> ErrorKind {
        match self {
            // It is the store's own file.
            RowsError::Io { source, .. } if source.kind() == io::ErrorKind::PermissionDenied => {
                ErrorKind::Io
            }
            RowsError::Io { source, .. } => ErrorKind::of(source),
            RowsError::NoSuchRow { .. } => ErrorKind::Invalid,
            _ => ErrorKind::Damaged,
        }
    }
}

impl Rows {
    /// [`Rows::open`] and [`Rows::verify`]: no row of it can be other than it was written.
    ///
    /// Costs reading the whole file once, from front to end, and hashing it; memory is 1 MiB.
    pub fn open_verified(path: impl AsRef<Path>) -> Result<Rows, RowsError> {
        let rows = Rows::open(path)?;
        rows.verify()?;
        Ok(rows)
    }

    /// Opens and checks a file that [`crate::prepare`] wrote; of its rows only those that are read
    /// are looked at.
    pub fn open(path: impl AsRef<Path>) -> Result<Rows, RowsError> {
        let path = path.as_ref().to_path_buf();
        let io = |source| RowsError::Io { path: path.clone(), source };
        // Opening a pipe would wait for its other end.
        if !path.metadata().map_err(io)?.is_file() {
            let reason = String::from("it is no regular file");
            return Err(RowsError::Header { path, reason });
        }
        let file = File::open(&path).map_err(io)?;
        let found = file.metadata().map_err(io)?.len();
        if found < HEADER_BYTES {
            return Err(RowsError::Length { path, found, expected: HEADER_BYTES });
        }
        let mut page = [0; HEADER_BYTES as usize];
        read_exact_at(&file, &mut page, 0).map_err(io)?;
        let header = RowsHeader::parse(&page)
            .map_err(|reason| RowsError::Header { path: path.clone(), reason })?;
        match header.file_bytes() {
            Some(expected) if expected == found => Ok(Rows { path, file, header }),
            expected => {
                let expected = expected.unwrap_or(u64::MAX);
                Err(RowsError::Length { path, found, expected })
            }
        }
    }

    pub fn header(&self) -> &RowsHeader {
        &self.header
    }

    /// Number of rows.
    pub fn rows(&self) -> u64 {
        self.header.rows
    }

    /// S: tokens of a row.
    pub fn seq_len(&self) -> u32 {
        self.header.seq_len
    }

    /// Row `row`, counted from 0.
    pub fn row(&self, row: u64) -> Result<Row, RowsError> {
        let mut record = self.record_buffer();
        self.read_record(row, &mut record)?;
        let (tokens, targets, starts) = self.split(&record);
        let mut ids = Vec::with_capacity(self.header.seq_len as usize);
        self.append_tokens(row, tokens, &mut ids)?;
        let (targets, starts) = (self.targets(row, targets)?, self.bits(row, starts)?);
        Ok(Row { tokens: ids, targets, starts })
    }

    /// Rows in the order given: `tokens` becomes (B, S), `targets` (B, S), what was in them goes.
    pub fn read(
        &self,
        rows: &[u64],
        tokens: &mut Vec<u32>,
        targets: &mut Vec<bool>,
    ) -> Result<(), RowsError> {
        tokens.clear();
        targets.clear();
        let mut record = self.record_buffer();
        for &row in rows {
            self.read_record(row, &mut record)?;
            let (ids, target_bits, _) = self.split(&record);
            self.append_tokens(row, ids, tokens)?;
            targets.extend(self.targets(row, target_bits)?.iter());
        }
        Ok(())
    }

    /// How many tokens of these rows are predicted: what the loss of a step is divided by.
    pub fn count_targets(&self, rows: &[u64]) -> Result<u64, RowsError> {
        let mut bits = vec![0; Bits::disk_bytes(self.header.seq_len) as usize];
        let mut targets = 0;
        for &row in rows {
            let offset = self.offset(row)? + u64::from(self.header.seq_len) * 4;
            self.read_at(&mut bits, offset)?;
            targets += self.targets(row, &bits)?.count_ones();
        }
        Ok(targets)
    }

    /// Reads the whole file and compares its hash with the header's.
    pub fn verify(&self) -> Result<(), RowsError> {
        let mut hash = XxHash3_64::new();
        let mut left = self.header.rows * self.header.row_bytes();
        let mut offset = HEADER_BYTES;
        let mut bytes = vec![0; VERIFY_BYTES.min(left) as usize];
        while left > 0 {
            bytes.truncate(left.min(VERIFY_BYTES) as usize);
            self.read_at(&mut bytes, offset)?;
            hash.write(&bytes);
            offset += bytes.len() as u64;
            left -= bytes.len() as u64;
        }
        let (found, expected) = (hash.finish(), self.header.data_hash);
        if found == expected {
            return Ok(());
        }
        Err(RowsError::Hash { path: self.path.clone(), found, expected })
    }

    /// Its size is bounded by the file's, which was compared when it was opened.
    fn record_buffer(&self) -> Vec<u8> {
        vec![0; self.header.row_bytes() as usize]
    }

    fn offset(&self, row: u64) -> Result<u64, RowsError> {
        if row >= self.header.rows {
            let (path, rows) = (self.path.clone(), self.header.rows);
            return Err(RowsError::NoSuchRow { path, row, rows });
        }
        Ok(HEADER_BYTES + row * self.header.row_bytes())
    }

    fn read_record(&self, row: u64, record: &mut [u8]) -> Result<(), RowsError> {
        self.read_at(record, self.offset(row)?)
    }

    fn read_at(&self, bytes: &mut [u8], offset: u64) -> Result<(), RowsError> {
        read_exact_at(&self.file, bytes, offset)
            .map_err(|source| RowsError::Io { path: self.path.clone(), source })
    }

    /// The three parts of a record: ids, target bits, start bits.
    fn split<'a>(&self, record: &'a [u8]) -> (&'a [u8], &'a [u8], &'a [u8]) {
        let (tokens, bits) = record.split_at(self.header.seq_len as usize * 4);
        let (targets, starts) = bits.split_at(bits.len() / 2);
        (tokens, targets, starts)
    }

    fn append_tokens(&self, row: u64, bytes: &[u8], ids: &mut Vec<u32>) -> Result<(), RowsError> {
        let before = ids.len();
        ids.extend(bytes.as_chunks::<4>().0.iter().map(|id| u32::from_le_bytes(*id)));
        let vocab_size = self.header.vocab_size;
        match ids[before..].iter().find(|&&id| id >= vocab_size) {
            None => Ok(()),
            Some(id) => {
                let reason = format!("token id {id} is beyond the vocabulary of {vocab_size}");
                Err(self.damaged(row, reason))
            }
        }
    }

    fn targets(&self, row: u64, bytes: &[u8]) -> Result<Bits, RowsError> {
        let bits = self.bits(row, bytes)?;
        if bits.get(0) {
            return Err(self.damaged(row, "its first token is marked as predicted".to_owned()));
        }
        Ok(bits)
    }

    fn bits(&self, row: u64, bytes: &[u8]) -> Result<Bits, RowsError> {
        Bits::parse(bytes, self.header.seq_len as usize)
            .ok_or_else(|| self.damaged(row, "marks beyond its last token".to_owned()))
    }

    fn damaged(&self, row: u64, reason: String) -> RowsError {
        RowsError::Row { path: self.path.clone(), row, reason }
    }
}
