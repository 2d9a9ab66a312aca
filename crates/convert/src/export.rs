//! Export of a store as a Hugging Face directory.
//!
//! Invariants:
//! - the directory is empty before, and holds either nothing of ours or everything after:
//!   files are written under temporary names, synced, then renamed;
//! - values are rounded to nearest, ties to even; a finite value that the element type cannot hold
//!   is refused by name;
//! - a tied model's projection is not written, as transformers does it.

mod layout;

use std::fs::{self, File};
use std::io::{BufWriter, ErrorKind, Write};
use std::path::{Path, PathBuf};

use model::{LayerTable, Precision};
use store::{ReadingStore, StoreError};

use crate::hf::{INDEX, MODEL_FILES};
use crate::json::with_dtype;
use crate::weights::PIECE_ELEMENTS;
use crate::{ConvertError, Dtype, Progress};
use layout::{Shard, shards};

/// What an export wrote.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Exported {
    /// Names of the files with weights.
    pub files: Vec<String>,
    /// Bytes of weights, headers not counted.
    pub weight_bytes: u64,
}

/// Writes `store`'s weights and model files to the directory `out`, which must be empty or absent.
///
/// Weights go to `model.safetensors`, or to shards of at most 5 GB with an index. `progress` gets
/// the bytes done and in all, counted in `dtype`. On failure what was written is removed; damaged
/// weights are refused before anything is written.
pub fn export_hf(
    store: &ReadingStore,
    out: &Path,
    dtype: Dtype,
    progress: &mut Progress<'_>,
) -> Result<Exported, ConvertError> {
    export_sharded(store, out, dtype, layout::SHARD_LIMIT_BYTES, progress)
}

fn export_sharded(
    store: &ReadingStore,
    out: &Path,
    dtype: Dtype,
    shard_limit_bytes: u64,
    progress: &mut Progress<'_>,
) -> Result<Exported, ConvertError> {
    let table = store.table();
    let shards = shards(table, dtype, shard_limit_bytes);
    let texts = model_files(store, dtype, table, &shards)?;
    check_destination(out)?;
    store.check_weights()?;
    let mut staging = Staging::new(out)?;
    let weight_bytes = shards.iter().map(Shard::weight_bytes).sum();
    let text_bytes: u64 = texts.iter().map(|(_, bytes)| bytes.len() as u64).sum();
    let header_bytes: u64 = shards.iter().map(|shard| shard.header().len() as u64).sum();
    check_space(out, weight_bytes + text_bytes + header_bytes)?;
    let mut done = Done { bytes: 0, total_bytes: weight_bytes, progress };
    for shard in &shards {
        let path = staging.add(&shard.name);
        write_shard(store, &path, shard, dtype, &mut done)?;
    }
    for (name, bytes) in &texts {
        let path = staging.add(name);
        let write = |mut file: File| file.write_all(bytes).and_then(|()| file.sync_all());
        File::create_new(&path).and_then(write).map_err(ConvertError::io("write", &path))?;
    }
    staging.publish()?;
    let files = shards.into_iter().map(|shard| shard.name).collect();
    Ok(Exported { files, weight_bytes })
}

struct Done<'p, 'f> {
    bytes: u64,
    total_bytes: u64,
    progress: &'p mut Progress<'f>,
}

/// The model's own files, the config adjusted, and the index of more than one shard.
fn model_files(
    store: &ReadingStore,
    dtype: Dtype,
    table: &LayerTable,
    shards: &[Shard],
) -> Result<Vec<(String, Vec<u8>)>, ConvertError> {
    let config = with_dtype(store.config_json(), dtype.config_name()).map_err(|e| {
        ConvertError::invalid(store.dir().join("config.json"), e.to_string(), "restore config.json")
    })?;
    let mut files = vec![("config.json".to_string(), config.into_bytes())];
    for name in MODEL_FILES {
        match store.read_file(name) {
            Ok(bytes) => files.push((name.to_string(), bytes)),
            Err(StoreError::Io { source, .. }) if source.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(error.into()),
        }
    }
    if shards.len() > 1 {
        files.push((INDEX.into(), layout::index(table, shards).into_bytes()));
    }
    Ok(files)
}

fn write_shard(
    store: &ReadingStore,
    path: &Path,
    shard: &Shard,
    dtype: Dtype,
    done: &mut Done<'_, '_>,
) -> Result<(), ConvertError> {
    let io = |e| ConvertError::io("write", path)(e);
    let file = File::create_new(path).map_err(io)?;
    let mut writer = BufWriter::with_capacity(1 << 20, file);
    writer.write_all(&shard.header()).map_err(io)?;
    let mut encoded = Vec::new();
    for (layer, spec) in &shard.tensors {
        for start in spec.range().step_by(PIECE_ELEMENTS) {
            let end = (start + PIECE_ELEMENTS).min(spec.range().end);
            let read = store.read_weights_blocking(*layer, start..end, Precision::Exact)?;
            let block = read.into_f32();
            dtype.encode(block.f32s(), &mut encoded).map_err(|i| {
                ConvertError::invalid(
                    store.dir(),
                    format!(
                        "has {} in tensor `{}` {:?} at element {}, beyond the range of {}",
                        block.f32s()[i],
                        spec.name,
                        spec.shape,
                        start - spec.offset + i,
                        dtype.name()
                    ),
                    "export as bf16 or f32",
                )
            })?;
            writer.write_all(&encoded).map_err(io)?;
            done.bytes += encoded.len() as u64;
            (done.progress)(done.bytes, done.total_bytes);
        }
    }
    let file = writer.into_inner().map_err(|e| io(e.into_error()))?;
    file.sync_all().map_err(ConvertError::io("sync", path))
}

/// Refuses what is not an empty or absent directory; whether it is there.
fn check_destination(dir: &Path) -> Result<bool, ConvertError> {
    const NEW: &str = "name a new directory, nothing is ever overwritten";
    let refuse = |what| Err(ConvertError::invalid(dir, what, NEW));
    match fs::read_dir(dir).map(|mut entries| entries.next().is_none()) {
        Ok(true) => Ok(true),
        Ok(false) => refuse("is not empty"),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        Err(error) if error.kind() == ErrorKind::NotADirectory => refuse("is or lies in a file"),
        Err(error) => Err(ConvertError::io("list", dir)(error)),
    }
}

/// A directory whose files get their names only when all are written.
struct Staging {
    dir: PathBuf,
    /// Whether the directory is ours to remove.
    created: bool,
    names: Vec<String>,
    published: bool,
}

impl Staging {
    fn new(dir: &Path) -> Result<Staging, ConvertError> {
        let created = !check_destination(dir)?;
        if created {
            fs::create_dir_all(dir).map_err(ConvertError::io("create", dir))?;
        }
        Ok(Staging { dir: dir.into(), created, names: Vec::new(), published: false })
    }

    /// The temporary path of the file `name`.
    fn add(&mut self, name: &str) -> PathBuf {
        self.names.push(name.into());
        self.temporary(name)
    }

    fn temporary(&self, name: &str) -> PathBuf {
        self.dir.join(format!("{name}.partial"))
    }

    fn publish(mut self) -> Result<(), ConvertError> {
        for name in &self.names {
            let path = self.dir.join(name);
            fs::rename(self.temporary(name), &path).map_err(ConvertError::io("rename", &path))?;
        }
        sync_dir(&self.dir)?;
        self.published = true;
        Ok(())
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if self.published {
            return;
        }
        // The error that brought us here is the one to report, not one of these.
        for name in &self.names {
            let _ = fs::remove_file(self.temporary(name));
            let _ = fs::remove_file(self.dir.join(name));
        }
        if self.created {
            let _ = fs::remove_dir(&self.dir);
        }
    }
}

fn sync_dir(dir: &Path) -> Result<(), ConvertError> {
    match File::open(dir) {
        Ok(handle) => handle.sync_all().map_err(ConvertError::io("sync", dir)),
        // Not every system can open a directory; there is nothing to sync then.
        Err(_) => Ok(()),
    }
}

fn check_space(out: &Path, needed_bytes: u64) -> Result<(), ConvertError> {
    let disk = store::mmap_engine(1, true);
    let available_bytes = disk.free_bytes(out).map_err(StoreError::from)?;
    if available_bytes < needed_bytes {
        return Err(ConvertError::NoSpace { path: out.into(), needed_bytes, available_bytes });
    }
    Ok(())
}

#[cfg(test)]
mod tests;
