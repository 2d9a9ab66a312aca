//! [`ReadingStore`]: the last commit of a store, read by any number of readers at once.

use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use model::{LayerId, LayerSpec, LayerTable, Plane, Precision, StateLayout, Weights};
use serde_json::{Map, Value, json};

use crate::StoreError;
use crate::chunk::StateChunk;
use crate::drives::Drives;
use crate::files;
use crate::hashes::{ChunkHashes, LayerHashes, chunk_count, hash};
use crate::io::{Access, Io, Lock, LockKind};
use crate::layout::{
    CONFIG_FILE, INDEX_FILE, Layout, RUN_FILE, plane_file, slot_path, state_bytes, weight_bytes,
};
use crate::opening::{Broken, OnDamage};
use crate::record::{LayerState, State};
use crate::recovery::{self, Recovery};
use crate::slots::SlotFiles;
use crate::snapshots::{self, PREVIOUS, Snapshot};
use crate::training::read_run;

/// A place where bytes on disk contradict their hash.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Damage {
    pub file: PathBuf,
    /// The first tensor the damaged chunk holds; empty for the `hashes` file.
    pub tensor: String,
    /// First byte of the damaged chunk inside the file.
    pub offset: u64,
    /// The layer whose live version is damaged; not for a snapshot's.
    pub layer: Option<LayerId>,
    /// The snapshot whose version is damaged, where it is not the live one.
    pub snapshot: Option<String>,
    /// What to go back to for an intact version of the layer, newest last: snapshots, and
    /// [`PREVIOUS`] if its version is still there.
    pub healed_by: Vec<String>,
}

/// A store open for reading: nothing is written except by [`ReadingStore::write_index`].
pub struct ReadingStore {
    io: Arc<dyn Io>,
    dir: PathBuf,
    layout: Layout,
    config_json: String,
    state: State,
    recovery: Recovery,
    /// The state before the last commit, if the log still tells.
    before: Option<State>,
    /// The live slot of every layer, and why it cannot be used.
    slots: Vec<Result<SlotFiles, Broken>>,
    _lock: Lock,
}

impl fmt::Debug for ReadingStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReadingStore").field("dir", &self.dir).finish_non_exhaustive()
    }
}

impl ReadingStore {
    /// Opens the store in `dir`, waiting up to `lock_wait` for a trainer to leave.
    ///
    /// # Errors
    /// As [`TrainingStore::open`](crate::TrainingStore::open).
    pub fn open(
        io: Arc<dyn Io>,
        dir: &Path,
        lock_wait: Duration,
    ) -> Result<ReadingStore, StoreError> {
        ReadingStore::open_with(io, dir, lock_wait, OnDamage::Refuse)
    }

    /// [`ReadingStore::open`] for [`ReadingStore::verify`], which tells of missing files as well.
    pub fn open_to_verify(
        io: Arc<dyn Io>,
        dir: &Path,
        lock_wait: Duration,
    ) -> Result<ReadingStore, StoreError> {
        ReadingStore::open_with(io, dir, lock_wait, OnDamage::Note)
    }

    fn open_with(
        io: Arc<dyn Io>,
        dir: &Path,
        lock_wait: Duration,
        on_damage: OnDamage,
    ) -> Result<ReadingStore, StoreError> {
        let lock = recovery::lock(&*io, dir, LockKind::Shared, lock_wait)?;
        let found = recovery::recover(&*io, dir)?;
        Drives::find(&*io, dir, &found.layout.table)?;
        let layout = found.layout.state();
        let live = found.layout.table.layers().iter().zip(&found.state.layers);
        let slots = live
            .map(|(layer, state)| {
                let opened = SlotFiles::open(&io, dir, layout, layer, state.slot, Access::Read);
                match opened.map_err(|error| Broken::note(layer.id, error, on_damage)) {
                    Ok(files) => Ok(Ok(files)),
                    Err(broken) => broken.map(Err),
                }
            })
            .collect::<Result<_, _>>()?;
        Ok(ReadingStore {
            io,
            dir: dir.to_owned(),
            layout: found.layout,
            config_json: found.config_json,
            state: found.state,
            before: found.before,
            recovery: found.recovery,
            slots,
            _lock: lock,
        })
    }

    /// The last commit.
    pub fn state(&self) -> &State {
        &self.state
    }

    /// What opening found.
    pub fn recovery(&self) -> &Recovery {
        &self.recovery
    }

    /// The store's layers.
    pub fn table(&self) -> &LayerTable {
        &self.layout.table
    }

    /// How W, M and V are kept.
    pub fn layout(&self) -> StateLayout {
        self.layout.state()
    }

    /// Text of the model's `config.json`.
    pub fn config_json(&self) -> &str {
        &self.config_json
    }

    /// Options the store was created with; opaque here.
    pub fn defaults(&self) -> &Map<String, Value> {
        &self.layout.defaults
    }

    /// The store's directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Text of `run.json`, if there is one.
    pub fn read_run(&self) -> Result<Option<String>, StoreError> {
        read_run(&*self.io, &self.dir)
    }

    /// Contents of one of the model's own files.
    pub fn read_file(&self, name: &str) -> Result<Vec<u8>, StoreError> {
        files::read(&*self.io, &self.dir.join(name))
    }

    /// Names and contents of the model's own files, but for `config.json`.
    pub fn model_files(&self) -> Result<Vec<(String, Vec<u8>)>, StoreError> {
        let mut names = snapshots::own_files(&*self.io, &self.dir)?;
        names.retain(|name| ![CONFIG_FILE, RUN_FILE].contains(&name.as_str()));
        names.into_iter().map(|name| self.read_file(&name).map(|bytes| (name, bytes))).collect()
    }

    /// Live weights of a layer. Not verified: see [`ReadingStore::check_weights`].
    ///
    /// # Panics
    /// On a range beyond the layer: a programmer's error.
    pub fn read_weights_blocking(
        &self,
        layer: LayerId,
        elements: Range<usize>,
        precision: Precision,
    ) -> Result<Weights, StoreError> {
        assert!(elements.start <= elements.end, "{elements:?}");
        assert!(elements.end <= self.table().layer(layer).elements(), "{elements:?}");
        let files = self.files(layer)?;
        let planes = files.planes.iter().take(files.layout.weight_planes(precision).len());
        let read = |plane| files.read_now(&*self.io, plane, elements.clone());
        let blocks = planes.map(read).collect::<Result<Vec<_>, _>>()?;
        Ok(Weights::from_planes(files.layout, precision, blocks))
    }

    /// Number of chunks of a layer.
    pub fn chunks(&self, layer: LayerId) -> usize {
        chunk_count(self.table().layer(layer).elements())
    }

    fn files(&self, layer: LayerId) -> Result<&SlotFiles, StoreError> {
        self.slots[layer.index()].as_ref().map_err(Broken::error)
    }

    /// Chunk hashes of a layer's live slot, confirmed by the last commit.
    pub fn chunk_hashes(&self, layer: LayerId) -> Result<Vec<ChunkHashes>, StoreError> {
        let state = &self.state.layers[layer.index()];
        self.files(layer)?.read_hashes(&*self.io, state)
    }

    /// One chunk of a live slot, compared with `expected`, its entry in
    /// [`ReadingStore::chunk_hashes`].
    pub fn read_chunk(
        &self,
        layer: LayerId,
        chunk: usize,
        expected: &ChunkHashes,
    ) -> Result<StateChunk, StoreError> {
        let files = self.files(layer)?;
        let mut blocks = Vec::with_capacity(files.planes.len());
        for plane in &files.planes {
            let block = files.read_now(&*self.io, plane, files.chunk_elements(chunk))?;
            if hash(block.bytes()) != expected[plane.spec.plane as usize] {
                return Err(files.mismatch(plane, chunk));
            }
            blocks.push(block);
        }
        Ok(StateChunk::from_planes(files.layout, blocks))
    }

    /// Hash over the contents of a layer's W, M and V, never of names, slots or times.
    pub fn layer_hash(&self, layer: LayerId) -> u64 {
        layer_hash(&self.state.layers[layer.index()].hashes)
    }

    /// The store's snapshots, oldest step first, and why others cannot be used.
    pub fn snapshots(&self) -> Result<(Vec<Snapshot>, Vec<String>), StoreError> {
        snapshots::list(&*self.io, &self.dir, self.layout(), self.table())
    }

    /// Re-hashes every live slot, and what snapshots hold besides, from the disk, past the page
    /// cache; `progress` gets bytes done and in all.
    pub fn verify(&self, mut progress: impl FnMut(u64, u64)) -> Result<Vec<Damage>, StoreError> {
        let (snapshots, _) = self.snapshots()?;
        let versions = self.versions(&snapshots)?;
        let total: u64 = versions.iter().map(|v| state_bytes(v.layer, self.layout())).sum();
        let (mut done, mut found) = (0, Vec::new());
        for version in &versions {
            let damage = self.verify_version(version, |bytes| {
                done += bytes;
                progress(done, total);
            })?;
            found.push((version, damage));
        }
        let mut all = Vec::new();
        for damage in found.iter().flat_map(|(_, damage)| damage) {
            let healed_by = damage.layer.map_or(Ok(Vec::new()), |id| self.healers(id, &found))?;
            all.push(Damage { healed_by, ..damage.clone() });
        }
        Ok(all)
    }

    /// What has an intact version of a layer whose live one is damaged.
    fn healers(
        &self,
        layer: LayerId,
        found: &[(&Version<'_>, Vec<Damage>)],
    ) -> Result<Vec<String>, StoreError> {
        let sound = found.iter().filter(|(v, damage)| v.layer.id == layer && damage.is_empty());
        let mut healers: Vec<String> =
            sound.filter_map(|(v, _)| v.snapshot.map(|snapshot| snapshot.name.clone())).collect();
        if self.has_previous(layer)? {
            healers.push(PREVIOUS.to_owned());
        }
        Ok(healers)
    }

    /// Whether the inactive slot still holds what the commit before the last says.
    fn has_previous(&self, layer: LayerId) -> Result<bool, StoreError> {
        let Some(before) = &self.before else { return Ok(false) };
        let (was, now) = (&before.layers[layer.index()], &self.state.layers[layer.index()]);
        if was.slot == now.slot {
            return Ok(false);
        }
        let spec = self.table().layer(layer);
        let opened =
            SlotFiles::open(&self.io, &self.dir, self.layout(), spec, was.slot, Access::ReadDisk);
        match opened.and_then(|files| files.check(&*self.io, was, |_| ())) {
            Ok(_) => Ok(true),
            Err(StoreError::Damaged { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Every version of every layer that is to be kept, each file once.
    fn versions<'s>(&'s self, snapshots: &'s [Snapshot]) -> Result<Vec<Version<'s>>, StoreError> {
        let mut versions: Vec<Version<'_>> = Vec::new();
        for (layer, state) in self.table().layers().iter().zip(&self.state.layers) {
            versions.push(Version { layer, state, snapshot: None });
        }
        for snapshot in snapshots {
            for (layer, state) in self.table().layers().iter().zip(&snapshot.state.layers) {
                let mut known = false;
                for version in versions.iter().filter(|version| version.layer.id == layer.id) {
                    known |= version.state.hashes == state.hashes
                        && snapshot
                            .shares(&*self.io, layer, |name| version.path(&self.dir, name))?;
                }
                if !known {
                    versions.push(Version { layer, state, snapshot: Some(snapshot) });
                }
            }
        }
        Ok(versions)
    }

    /// Re-hashes the weights of every live slot from the disk: for whoever is about to use them
    /// with [`ReadingStore::read_weights_blocking`], which does not.
    ///
    /// # Errors
    /// `Damaged` for the first chunk, or `hashes` file, that is not what was committed.
    pub fn check_weights(&self) -> Result<(), StoreError> {
        for layer in self.table().layers() {
            let files = self.files(layer.id)?;
            for (chunk, expected) in self.chunk_hashes(layer.id)?.iter().enumerate() {
                for plane in files.weight_planes() {
                    let (found, _) = files.hash_chunk(&*self.io, plane, chunk)?;
                    if found != expected[plane.spec.plane as usize] {
                        return Err(files.mismatch(plane, chunk));
                    }
                }
            }
        }
        Ok(())
    }

    /// Writes `model.safetensors.index.json`: other software then sees the last commit.
    pub fn write_index(&self) -> Result<(), StoreError> {
        write_index(&*self.io, &self.dir, &self.layout, &self.state)
    }

    fn verify_version(
        &self,
        version: &Version<'_>,
        mut progress: impl FnMut(u64),
    ) -> Result<Vec<Damage>, StoreError> {
        let layer = version.layer;
        let whole = state_bytes(layer, self.layout());
        let at = |file: PathBuf, tensor: String, offset: u64| {
            let snapshot = version.snapshot.map(|snapshot| snapshot.name.clone());
            let layer = snapshot.is_none().then_some(layer.id);
            Damage { file, tensor, offset, layer, snapshot, healed_by: Vec::new() }
        };
        let opened = version.open(&self.io, &self.dir, self.layout()).and_then(|files| {
            let hashes = files.read_hashes(&*self.io, version.state)?;
            Ok((files, hashes))
        });
        let (files, hashes) = match opened {
            Ok(opened) => opened,
            Err(StoreError::Damaged { file, .. }) => {
                progress(whole);
                return Ok(vec![at(file, String::new(), 0)]);
            }
            Err(error) => return Err(error),
        };
        let mut damage = Vec::new();
        for plane in &files.planes {
            for (chunk, expected) in hashes.iter().enumerate() {
                let (found, bytes) = files.hash_chunk(&*self.io, plane, chunk)?;
                if found != expected[plane.spec.plane as usize] {
                    let elements = files.chunk_elements(chunk);
                    let tensor = tensor_at(layer, elements.start);
                    damage.push(at(plane.path.clone(), tensor, plane.range(elements).start));
                }
                progress(bytes);
            }
        }
        Ok(damage)
    }
}

/// One version of a layer: the live one, or a snapshot's.
struct Version<'s> {
    layer: &'s LayerSpec,
    state: &'s LayerState,
    snapshot: Option<&'s Snapshot>,
}

impl Version<'_> {
    /// Path of a file by its name in a slot; `dir` is the store's.
    fn path(&self, dir: &Path, name: &str) -> PathBuf {
        match self.snapshot {
            Some(snapshot) => snapshot.path(self.layer, name),
            None => dir.join(slot_path(self.layer, self.state.slot)).join(name),
        }
    }

    fn open(
        &self,
        io: &Arc<dyn Io>,
        dir: &Path,
        layout: StateLayout,
    ) -> Result<SlotFiles, StoreError> {
        match self.snapshot {
            Some(snapshot) => snapshot.open(io, self.layer, Access::ReadDisk),
            None => SlotFiles::open(io, dir, layout, self.layer, self.state.slot, Access::ReadDisk),
        }
    }
}

/// One hash of a layer's contents from those of its W, M and V.
pub fn layer_hash(hashes: &LayerHashes) -> u64 {
    let bytes: Vec<u8> = hashes.iter().flat_map(|hash| hash.to_le_bytes()).collect();
    hash(&bytes)
}

fn tensor_at(layer: &LayerSpec, element: usize) -> String {
    let tensor = layer.tensors.iter().find(|tensor| tensor.range().contains(&element));
    tensor.map_or_else(String::new, |tensor| tensor.name.clone())
}

/// Writes the index that points other software into the live slots of `state`.
pub(crate) fn write_index(
    io: &dyn Io,
    dir: &Path,
    layout: &Layout,
    state: &State,
) -> Result<(), StoreError> {
    let in_slot = |layer: &LayerSpec, index: usize| {
        let file = slot_path(layer, state.layers[index].slot).join(plane_file(Plane::Weight));
        // The format wants slashes on every system.
        file.to_string_lossy().replace('\\', "/")
    };
    let text = index(layout.state(), &layout.table, in_slot);
    Ok(files::replace(io, &dir.join(INDEX_FILE), text.as_bytes())?)
}

/// The text of an index that lets other software load a directory; `file` says where a layer's weights
/// lie in it, by the layer and its place in the table.
pub(crate) fn index(
    layout: StateLayout,
    table: &LayerTable,
    file: impl Fn(&LayerSpec, usize) -> String,
) -> String {
    let mut map = Map::new();
    for (at, layer) in table.layers().iter().enumerate() {
        let file = file(layer, at);
        map.extend(layer.tensors.iter().map(|tensor| (tensor.name.clone(), json!(file))));
    }
    let total_size: u64 = table.layers().iter().map(|layer| weight_bytes(layer, layout)).sum();
    format!("{:#}\n", json!({"metadata": {"total_size": total_size}, "weight_map": map}))
}
