//! Reading foreign files: bounded, positioned, with the path in every error.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use crate::ConvertError;

/// Most bytes of a text file (config, tokenizer, index) that are read.
pub(crate) const TEXT_LIMIT_BYTES: u64 = 64 << 20;

/// Remedy for a source that is nothing of the kind.
pub(crate) const SOURCES: &str = "name a Hugging Face directory or a .gguf file";

/// What the source of an import is.
pub(crate) fn look_up(source: &Path) -> Result<fs::Metadata, ConvertError> {
    fs::metadata(source).map_err(|error| match error.kind() {
        // The second is a path that leads through a file.
        ErrorKind::NotFound | ErrorKind::NotADirectory => {
            ConvertError::invalid(source, "does not exist", SOURCES)
        }
        _ => ConvertError::io("open", source)(error),
    })
}

/// A file that is read at offsets which are checked against its length.
#[derive(Debug)]
pub(crate) struct Source {
    path: PathBuf,
    file: File,
    len_bytes: u64,
}

impl Source {
    pub(crate) fn open(path: &Path) -> Result<Source, ConvertError> {
        let (file, meta) = open_regular(path).map_err(ConvertError::io("open", path))??;
        Ok(Source { path: path.to_path_buf(), file, len_bytes: meta.len() })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    pub(crate) fn read_at(&mut self, offset: u64, out: &mut [u8]) -> Result<(), ConvertError> {
        self.file
            .seek(SeekFrom::Start(offset))
            .and_then(|_| self.file.read_exact(out))
            .map_err(ConvertError::io("read", &self.path))
    }
}

/// Opens what is a regular file, also behind a link: a pipe would be waited for, a device never end.
fn open_regular(path: &Path) -> io::Result<Result<(File, fs::Metadata), ConvertError>> {
    let irregular =
        || Err(ConvertError::invalid(path, "is not a regular file", "put the file itself there"));
    if !fs::metadata(path)?.is_file() {
        return Ok(irregular());
    }
    let file = File::open(path)?;
    let meta = file.metadata()?;
    // What was looked at and what was opened may differ.
    Ok(if meta.is_file() { Ok((file, meta)) } else { irregular() })
}

/// The whole of a small file; `None` if there is no such file.
pub(crate) fn read_small(path: &Path) -> Result<Option<Vec<u8>>, ConvertError> {
    let (file, _) = match open_regular(path) {
        Ok(opened) => opened?,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(ConvertError::io("open", path)(error)),
    };
    let mut bytes = Vec::new();
    file.take(TEXT_LIMIT_BYTES + 1)
        .read_to_end(&mut bytes)
        .map_err(ConvertError::io("read", path))?;
    if bytes.len() as u64 > TEXT_LIMIT_BYTES {
        return Err(ConvertError::invalid(
            path,
            "is larger than 64 MiB",
            "a file of this name is never that large, check the directory",
        ));
    }
    Ok(Some(bytes))
}

/// The text of a small file; `None` if there is no such file.
pub(crate) fn read_text(path: &Path) -> Result<Option<String>, ConvertError> {
    let Some(bytes) = read_small(path)? else { return Ok(None) };
    String::from_utf8(bytes)
        .map(Some)
        .map_err(|_| ConvertError::invalid(path, "is not UTF-8 text", crate::error::FETCH_AGAIN))
}
