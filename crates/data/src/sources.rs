//! The files behind the paths that a user gives, and reading them while hashing.

use std::fs::{self, File, Metadata};
use std::hash::Hasher;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use twox_hash::XxHash3_64;

use crate::error::DataError;

/// Bytes read from a source at a time.
pub(crate) const READ_BYTES: usize = 1 << 20;

/// What a file's name says about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    Text,
    Jsonl,
    Npy,
}

impl Format {
    pub(crate) fn of(path: &Path) -> Option<Format> {
        let extension = path.extension()?.to_str()?.to_ascii_lowercase();
        match extension.as_str() {
            "txt" => Some(Format::Text),
            "jsonl" => Some(Format::Jsonl),
            "npy" => Some(Format::Npy),
            _ => None,
        }
    }
}

/// The files that `paths` mean: a file is itself; a directory is every `.txt` and `.jsonl` in it
/// and below it, sorted by name (directories that are symbolic links are not entered).
///
/// `.npy` files are given by name; a directory that has some is refused, so that none is left out
/// unnoticed. So is what is not a regular file, also behind a symbolic link: a pipe or a device may
/// never end.
pub fn list_sources(paths: &[PathBuf]) -> Result<Vec<PathBuf>, DataError> {
    let mut files = Vec::new();
    for path in paths {
        let metadata = fs::metadata(path).map_err(DataError::io("open data", path))?;
        if !metadata.is_dir() {
            check_regular(path, &metadata)?;
            Format::of(path).ok_or_else(|| DataError::UnknownFormat { path: path.clone() })?;
            files.push(path.clone());
            continue;
        }
        let (before, mut npy) = (files.len(), None);
        list_directory(path, &mut files, &mut npy)?;
        if files.len() == before {
            return Err(DataError::EmptyDirectory { path: path.clone() });
        }
        if let Some(npy) = npy {
            return Err(DataError::MixedDirectory { path: path.clone(), npy });
        }
    }
    if files.is_empty() { Err(DataError::NoSources) } else { Ok(files) }
}

/// Size in bytes and xxh3-64 of a file's content, as [`crate::SourceFile`] records them.
pub fn hash_file(path: &Path) -> Result<(u64, u64), DataError> {
    SourceReader::open(path)?.finish()
}

/// A source, read once from front to end, hashed on the way.
pub(crate) struct SourceReader {
    path: PathBuf,
    inner: BufReader<Hashing>,
    file_bytes: u64,
}

struct Hashing {
    file: File,
    hash: XxHash3_64,
    read_bytes: u64,
}

impl SourceReader {
    pub(crate) fn open(path: &Path) -> Result<SourceReader, DataError> {
        // Before opening, which waits for a pipe's other end; and after, for what was opened.
        check_regular(path, &fs::metadata(path).map_err(DataError::io("open data", path))?)?;
        let file = File::open(path).map_err(DataError::io("open data", path))?;
        let metadata = file.metadata().map_err(DataError::io("open data", path))?;
        check_regular(path, &metadata)?;
        let hashing = Hashing { file, hash: XxHash3_64::new(), read_bytes: 0 };
        Ok(SourceReader {
            path: path.to_path_buf(),
            inner: BufReader::with_capacity(READ_BYTES, hashing),
            file_bytes: metadata.len(),
        })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Size when it was opened.
    pub(crate) fn file_bytes(&self) -> u64 {
        self.file_bytes
    }

    /// Bytes read so far.
    pub(crate) fn read_bytes(&self) -> u64 {
        self.inner.get_ref().read_bytes
    }

    /// Appends at most `limit` bytes to `bytes`; says how many, 0 at the end.
    pub(crate) fn append(&mut self, bytes: &mut Vec<u8>, limit: usize) -> Result<usize, DataError> {
        let mut limited = (&mut self.inner).take(limit as u64);
        limited.read_to_end(bytes).map_err(DataError::io("read data", &self.path))
    }

    /// Appends up to and with the next newline; says how many bytes, 0 at the end.
    pub(crate) fn append_line(&mut self, bytes: &mut Vec<u8>) -> Result<usize, DataError> {
        self.inner.read_until(b'\n', bytes).map_err(DataError::io("read data", &self.path))
    }

    /// Fills `bytes`, or says that the file changed when it ends before.
    pub(crate) fn fill(&mut self, bytes: &mut [u8]) -> Result<(), DataError> {
        self.inner.read_exact(bytes).map_err(|source| match source.kind() {
            io::ErrorKind::UnexpectedEof => DataError::Changed { path: self.path.clone() },
            _ => DataError::io("read data", &self.path)(source),
        })
    }

    /// Reads what is left; size and hash of the whole file, which must be as long as at the start.
    pub(crate) fn finish(mut self) -> Result<(u64, u64), DataError> {
        io::copy(&mut self.inner, &mut io::sink())
            .map_err(DataError::io("read data", &self.path))?;
        let hashing = self.inner.get_ref();
        if hashing.read_bytes != self.file_bytes {
            return Err(DataError::Changed { path: self.path });
        }
        Ok((hashing.read_bytes, hashing.hash.finish()))
    }
}

impl Read for Hashing {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let count = self.file.read(bytes)?;
        self.hash.write(&bytes[..count]);
        self.read_bytes += count as u64;
        Ok(count)
    }
}

/// `metadata` is of what `path` leads to.
fn check_regular(path: &Path, metadata: &Metadata) -> Result<(), DataError> {
    if metadata.is_file() {
        return Ok(());
    }
    Err(DataError::NotRegular { path: path.to_path_buf() })
}

/// Appends to `files`; `npy` becomes the first `.npy` file.
fn list_directory(
    directory: &Path,
    files: &mut Vec<PathBuf>,
    npy: &mut Option<PathBuf>,
) -> Result<(), DataError> {
    let listing = fs::read_dir(directory).and_then(Iterator::collect::<io::Result<Vec<_>>>);
    let mut entries = listing.map_err(DataError::io("list data directory", directory))?;
    entries.sort_by_key(fs::DirEntry::file_name);
    for entry in entries {
        let path = entry.path();
        let kind = entry.file_type().map_err(DataError::io("list data directory", &path))?;
        if kind.is_dir() {
            list_directory(&path, files, npy)?;
            continue;
        }
        let Some(format) = Format::of(&path) else { continue };
        let metadata = fs::metadata(&path).map_err(DataError::io("open data", &path))?;
        if metadata.is_dir() {
            continue;
        }
        check_regular(&path, &metadata)?;
        match format {
            Format::Text | Format::Jsonl => files.push(path),
            Format::Npy => {
                npy.get_or_insert(path);
            }
        }
    }
    Ok(())
}
