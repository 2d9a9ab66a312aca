//! [`Shards`]: the tensors of a Hugging Face checkpoint, in one file or many.
//!
//! Invariants:
//! - all headers were read and checked before the first weight is;
//! - one file is open at a time, however many shards there are.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use super::header::{self, Entry};
use crate::ConvertError;
use crate::error::FETCH_AGAIN;
use crate::source::{Source, read_text};

/// Name of the file of an unsharded checkpoint.
pub(crate) const SINGLE: &str = "model.safetensors";
/// Name of the index of a sharded one.
pub(crate) const INDEX: &str = "model.safetensors.index.json";

/// Where a tensor lies.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    /// Index into the list of files.
    file: usize,
    pub(crate) entry: Entry,
    /// First byte of the tensor in its file.
    start: u64,
}

/// All tensors of a checkpoint.
#[derive(Debug)]
pub(crate) struct Shards {
    files: Vec<PathBuf>,
    tensors: BTreeMap<String, Place>,
    open: Option<(usize, Source)>,
}

impl Shards {
    pub(crate) fn open(dir: &Path) -> Result<Shards, ConvertError> {
        let index_path = dir.join(INDEX);
        let Some(text) = read_text(&index_path)? else {
            return Shards::single(dir);
        };
        let map = header::parse_index(&text)
            .map_err(|what| ConvertError::invalid(&index_path, what, FETCH_AGAIN))?;
        let mut shards = Shards { files: Vec::new(), tensors: BTreeMap::new(), open: None };
        for name in map.values().collect::<BTreeSet<_>>() {
            shards.add(&dir.join(name), |tensor| map.get(tensor).is_none_or(|f| f == name))?;
        }
        match map.keys().find(|tensor| !shards.tensors.contains_key(*tensor)) {
            Some(tensor) => Err(ConvertError::invalid(
                dir.join(&map[tensor]),
                format!("lacks tensor `{tensor}`, which the index puts there"),
                FETCH_AGAIN,
            )),
            None => Ok(shards),
        }
    }

    fn single(dir: &Path) -> Result<Shards, ConvertError> {
        let path = dir.join(SINGLE);
        if !path.try_exists().map_err(ConvertError::io("look for", &path))? {
            return Err(ConvertError::invalid(
                dir,
                format!("has neither {SINGLE} nor {INDEX}"),
                "other formats must be saved again with transformers' save_pretrained",
            ));
        }
        let mut shards = Shards { files: Vec::new(), tensors: BTreeMap::new(), open: None };
        shards.add(&path, |_| true)?;
        Ok(shards)
    }

    /// Adds the tensors of a file that `wanted` says the index has there (or has nowhere).
    fn add(&mut self, path: &Path, wanted: impl Fn(&str) -> bool) -> Result<(), ConvertError> {
        if !path.try_exists().map_err(ConvertError::io("look for", path))? {
            return Err(ConvertError::invalid(
                path,
                "is missing, although the index names it",
                "fetch the missing shard",
            ));
        }
        let (start, entries) = read_header(&mut Source::open(path)?)?;
        let file = self.files.len();
        self.files.push(path.to_path_buf());
        for (name, entry) in entries.into_iter().filter(|(name, _)| wanted(name)) {
            let place = Place { file, start: start + entry.bytes.start, entry };
            self.tensors.insert(name, place);
        }
        Ok(())
    }

    pub(crate) fn tensors(&self) -> &BTreeMap<String, Place> {
        &self.tensors
    }

    /// The file that holds a tensor.
    pub(crate) fn path(&self, place: &Place) -> &Path {
        &self.files[place.file]
    }

    /// Reads bytes of a tensor, counted from its first one.
    pub(crate) fn read(
        &mut self,
        place: &Place,
        offset: u64,
        out: &mut [u8],
    ) -> Result<(), ConvertError> {
        let source = match self.open.take() {
            Some((file, source)) if file == place.file => source,
            _ => Source::open(&self.files[place.file])?,
        };
        let (_, source) = self.open.insert((place.file, source));
        source.read_at(place.start + offset, out)
    }
}

/// Where a file's data starts, and its tensors.
fn read_header(source: &mut Source) -> Result<(u64, BTreeMap<String, Entry>), ConvertError> {
    let path = source.path().to_path_buf();
    let invalid = |what: String| ConvertError::invalid(&path, what, FETCH_AGAIN);
    let file_bytes = source.len_bytes();
    if file_bytes < 8 {
        return Err(invalid(format!("has only {file_bytes} bytes")));
    }
    let mut prefix = [0; 8];
    source.read_at(0, &mut prefix)?;
    let len = header::header_bytes(prefix, file_bytes).map_err(invalid)?;
    let mut text = vec![0; len as usize];
    source.read_at(8, &mut text)?;
    let entries = header::parse_header(&text, file_bytes - 8 - len).map_err(invalid)?;
    Ok((8 + len, entries))
}
