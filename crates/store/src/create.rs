//! Creating a store: everything is allocated first, weights stream in, the first commit ends it.
//!
//! Invariants:
//! - nothing is written before the directory is known to be empty and the disk large enough for
//!   both slots;
//! - until the first log has its name the directory is an unfinished store, which every other
//!   call refuses; a failed creation removes what it made.

use std::collections::BTreeSet;
use std::fmt;
use std::hash::Hasher;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use model::{
    Attempt, CHUNK_ELEMENTS, LayerId, LayerSpec, LayerTable, PLANES, PlaneSpec, Slot, StateLayout,
    Step, Weights,
};
use serde_json::{Map, Value};
use twox_hash::XxHash3_64;

use crate::StoreError;
use crate::chunk::StateChunk;
use crate::drives::{MARK_FILE, Spread, mark_as};
use crate::files;
use crate::hashes::{self, ChunkHashes, chunk_count, hash, layer_hashes};
use crate::io::{Access, Io, IoError, Lock, LockKind, Op, fan_in, wait};
use crate::layout::{
    COMMIT_DIR, CONFIG_FILE, LAYERS_DIR, Layout, RESERVED, RUN_FILE, SCRATCH_DIR, STORE_FILE,
    TOKENS_DIR, is_plain_name, slot_path,
};
use crate::log;
use crate::reading::write_index;
use crate::record::{LayerState, State};
use crate::recovery;
use crate::slots::{SlotFiles, create_slot, slot_bytes};

/// What a store is created from.
#[derive(Debug)]
pub struct NewStore<'a> {
    /// Text of the model's `config.json`.
    pub config_json: &'a str,
    pub table: &'a LayerTable,
    /// How W, M and V are kept.
    pub layout: StateLayout,
    /// The model's other files (`tokenizer.json` ...): name and contents.
    pub files: Vec<(String, Vec<u8>)>,
    /// Options a run starts with unless told otherwise; opaque to the store.
    pub defaults: Map<String, Value>,
    /// Drives that layers go to.
    pub spread: Spread,
}

/// Room for the small files and the first logs.
const SMALL_FILES_BYTES: u64 = 16 << 20;

/// Allocates a store in `dir`, which must be empty or absent. The store exists only once
/// [`StoreWriter::finish`] returned.
///
/// # Errors
/// `Invalid` for a directory with contents, an unusable table or file name; `NoSpace` with the
/// bytes of both slots; `Io`.
pub fn create(io: Arc<dyn Io>, dir: &Path, new: &NewStore<'_>) -> Result<StoreWriter, StoreError> {
    let layout = Layout::new(new.table, new.layout, new.config_json, new.defaults.clone())?;
    check_names(new)?;
    check_empty(&*io, dir)?;
    for (other, _) in &new.spread.others {
        check_empty(&*io, other)?;
    }
    let mut writer = StoreWriter {
        io,
        dir: dir.to_owned(),
        layout,
        layers: Vec::new(),
        created: Vec::new(),
        away: BTreeSet::new(),
        lock: None,
        finished: false,
    };
    writer.create_home()?;
    let places = writer.places(new)?;
    writer.create_dirs(&new.spread, &places)?;
    writer.create_files(new)?;
    Ok(writer)
}

/// A store being filled. Dropped unfinished, it removes what it made.
pub struct StoreWriter {
    io: Arc<dyn Io>,
    dir: PathBuf,
    layout: Layout,
    layers: Vec<LayerWriter>,
    /// Files and directories made so far, oldest first.
    created: Vec<(PathBuf, Made)>,
    /// Directories on other drives that got layers.
    away: BTreeSet<PathBuf>,
    lock: Option<Lock>,
    finished: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Made {
    File,
    Dir,
}

impl fmt::Debug for StoreWriter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoreWriter").field("dir", &self.dir).finish_non_exhaustive()
    }
}

struct LayerWriter {
    files: SlotFiles,
    /// Elements written so far.
    next: usize,
    /// Of the planes that weights lie in, in the layout's order.
    hashers: Vec<XxHash3_64>,
    chunks: Vec<ChunkHashes>,
    /// Chunks were written with theirs; otherwise they are zero.
    has_moments: bool,
}

impl StoreWriter {
    /// Writes weights of a layer. Calls for one layer must ascend without gaps; layers may
    /// alternate. Moments are zero.
    ///
    /// # Panics
    /// On values out of order or beyond the layer: a programmer's error.
    pub fn write_weights(
        &mut self,
        layer: LayerId,
        offset_elements: usize,
        values: &[f32],
    ) -> Result<(), StoreError> {
        self.layers[layer.index()].write(&*self.io, offset_elements, values)
    }

    /// Writes the next chunk of a layer, moments included. A layer gets only weights or only chunks.
    ///
    /// # Panics
    /// On more chunks than the layer has: a programmer's error.
    pub fn write_chunk(&mut self, layer: LayerId, chunk: StateChunk) -> Result<(), StoreError> {
        self.layers[layer.index()].write_chunk(&*self.io, chunk)
    }

    /// Writes the hashes, syncs everything and makes the first commit: step 0.
    ///
    /// # Errors
    /// `Invalid` if a layer is incomplete; else as the disk fails. The directory is cleared then.
    pub fn finish(self) -> Result<(), StoreError> {
        self.finish_with(first_state)
    }

    /// [`StoreWriter::finish`] for a store that goes on where another one is: the first commit says
    /// `state`, but for slots and hashes, and `run` is the text of its `run.json`.
    ///
    /// # Panics
    /// On the state of a model with other layers: a programmer's error.
    pub fn finish_as(mut self, state: &State, run: Option<&str>) -> Result<(), StoreError> {
        assert_eq!(state.layers.len(), self.layers.len(), "layers of a state");
        if let Some(run) = run {
            self.create_small(RUN_FILE, run.as_bytes())?;
        }
        self.finish_with(|mut layers| {
            for (layer, was) in layers.iter_mut().zip(&state.layers) {
                *layer = LayerState { slot: layer.slot, hashes: layer.hashes, ..was.clone() };
            }
            State { layers, ..state.clone() }
        })
    }

    fn finish_with(
        mut self,
        state: impl FnOnce(Vec<LayerState>) -> State,
    ) -> Result<(), StoreError> {
        let mut layers = Vec::with_capacity(self.layers.len());
        for (spec, writer) in self.layout.table.layers().iter().zip(&mut self.layers) {
            layers.push(writer.finish(&*self.io, spec)?);
        }
        self.sync_all()?;
        let state = state(layers);
        write_index(&*self.io, &self.dir, &self.layout, &state)?;
        self.commit(&state)?;
        self.finished = true;
        self.lock = None;
        Ok(())
    }

    fn create_home(&mut self) -> Result<(), StoreError> {
        self.create_dir(&self.dir.clone())
    }

    fn create_dir(&mut self, dir: &Path) -> Result<(), StoreError> {
        // Everything above the store's own directory stays, whatever happens.
        if !self.io.exists(dir)? {
            self.created.push((dir.to_owned(), Made::Dir));
        }
        Ok(self.io.create_dir(dir)?)
    }

    /// The directories, and links to those of layers that are away.
    fn create_dirs(&mut self, spread: &Spread, places: &[usize]) -> Result<(), StoreError> {
        let layers = self.dir.join(LAYERS_DIR);
        for name in [COMMIT_DIR, SCRATCH_DIR, TOKENS_DIR, LAYERS_DIR] {
            self.create_dir(&self.dir.join(name))?;
        }
        for (layer, &place) in self.layout.table.clone().layers().iter().zip(places) {
            let home = layers.join(&layer.name);
            match place.checked_sub(1).map(|other| &spread.others[other].0) {
                None => self.create_dir(&home)?,
                Some(other) => {
                    self.create_dir(other)?;
                    if !self.away.contains(other) {
                        let mark = other.join(MARK_FILE);
                        self.created.push((mark.clone(), Made::File));
                        mark_as(&*self.io, &mark, &self.dir)?;
                    }
                    let away = other.join(&layer.name);
                    self.create_dir(&away)?;
                    self.io.symlink(&away, &home)?;
                    self.created.push((home.clone(), Made::File));
                    self.away.insert(other.clone());
                }
            }
            for slot in [Slot::A, Slot::B] {
                self.create_dir(&self.dir.join(slot_path(layer, slot)))?;
            }
        }
        Ok(())
    }

    /// Where each layer goes, if there is room for all.
    fn places(&mut self, new: &NewStore<'_>) -> Result<Vec<usize>, StoreError> {
        let slots: Vec<u64> =
            new.table.layers().iter().map(|layer| 2 * slot_bytes(new.layout, layer)).collect();
        let files: u64 = new.files.iter().map(|(_, bytes)| bytes.len() as u64).sum();
        let small = files + SMALL_FILES_BYTES;
        let (mut drives, mut free) = (Vec::new(), Vec::new());
        let others = new.spread.others.iter().map(|(other, _)| other.clone());
        for dir in [self.dir.clone()].into_iter().chain(others) {
            self.create_dir(&dir)?;
            drives.push(self.io.drive(&dir)?);
            free.push(self.io.free_bytes(&dir)?);
        }
        let available: u64 = free[0];
        for (at, free) in free.iter_mut().enumerate() {
            *free = if drives[at] == drives[0] { free.saturating_sub(small) } else { *free };
        }
        let all = small + slots.iter().sum::<u64>();
        let needed = |lacking: u64| match new.spread.others.len() {
            0 => all,
            _ => available + lacking,
        };
        let path = self.dir.clone();
        let refuse = |lacking| StoreError::NoSpace { path, needed: needed(lacking), available };
        if available < small {
            return Err(refuse(small - available));
        }
        new.spread.places(&slots, &drives, &free).map_err(refuse)
    }

    fn create_files(&mut self, new: &NewStore<'_>) -> Result<(), StoreError> {
        let layout = self.layout.to_json();
        self.create_small(STORE_FILE, layout.as_bytes())?;
        self.lock =
            Some(recovery::lock(&*self.io, &self.dir, LockKind::Exclusive, Duration::ZERO)?);
        self.create_small(CONFIG_FILE, new.config_json.as_bytes())?;
        for (name, bytes) in &new.files {
            self.create_small(name, bytes)?;
        }
        for layer in new.table.layers() {
            for slot in [Slot::A, Slot::B] {
                let created = &mut self.created;
                let record = |path| created.push((path, Made::File));
                let dir = self.dir.join(slot_path(layer, slot));
                create_slot(&*self.io, new.layout, layer, |name| dir.join(name), record)?;
            }
            let files = self.open_slot(layer, Slot::A)?;
            self.layers.push(LayerWriter::new(files));
        }
        Ok(())
    }

    fn open_slot(&self, layer: &LayerSpec, slot: Slot) -> Result<SlotFiles, StoreError> {
        SlotFiles::open(&self.io, &self.dir, self.layout.state(), layer, slot, Access::ReadWrite)
    }

    fn create_small(&mut self, name: &str, bytes: &[u8]) -> Result<(), StoreError> {
        let path = self.dir.join(name);
        let file = self.io.create(&path, bytes.len() as u64)?;
        self.created.push((path, Made::File));
        let filled = files::fill(&*self.io, file, bytes);
        self.io.close(file);
        Ok(filled?)
    }

    /// Syncs the files of both slots and every directory, the store's parent included.
    fn sync_all(&self) -> Result<(), StoreError> {
        for (layer, writer) in self.layout.table.layers().iter().zip(&self.layers) {
            sync_files(&*self.io, &writer.files.files())?;
            sync_files(&*self.io, &self.open_slot(layer, Slot::B)?.files())?;
        }
        for relative in dirs(&self.layout.table).iter().rev() {
            self.io.sync_dir(&self.dir.join(relative))?;
        }
        self.away.iter().try_for_each(|dir| self.io.sync_dir(dir))?;
        for dir in self.away.iter().chain([&self.dir]) {
            if let Some(parent) = dir.parent().filter(|p| !p.as_os_str().is_empty()) {
                self.io.sync_dir(parent)?;
            }
        }
        Ok(())
    }

    fn commit(&mut self, state: &State) -> Result<(), StoreError> {
        for copy in log::COPIES {
            self.created.push((log::path(&self.dir, 1, copy), Made::File));
        }
        log::start(&self.io, &self.dir, 1, 1, None, state)?;
        Ok(())
    }
}

impl Drop for StoreWriter {
    fn drop(&mut self) {
        if self.finished {
            return;
        }
        let index = self.dir.join(crate::layout::INDEX_FILE);
        // The error that led here is the one to report; what cannot be removed stays recognisable
        // as an unfinished store.
        let _ = self.io.unlink(&index);
        for (path, made) in self.created.iter().rev() {
            let _ = match made {
                Made::File => self.io.unlink(path),
                Made::Dir => self.io.remove_dir(path),
            };
        }
    }
}

impl LayerWriter {
    fn new(files: SlotFiles) -> LayerWriter {
        let chunks = Vec::with_capacity(files.chunks());
        let mut writer =
            LayerWriter { files, next: 0, hashers: Vec::new(), chunks, has_moments: false };
        writer.begin_chunk();
        writer
    }

    fn begin_chunk(&mut self) {
        self.hashers = self.files.weight_planes().map(|_| XxHash3_64::new()).collect();
    }

    fn write(&mut self, io: &dyn Io, offset: usize, values: &[f32]) -> Result<(), StoreError> {
        assert_eq!(offset, self.next, "weights must ascend without gaps");
        assert!(values.len() <= self.files.elements - offset, "weights beyond the layer");
        let mut rest = values;
        while !rest.is_empty() {
            let room = CHUNK_ELEMENTS - self.next % CHUNK_ELEMENTS;
            let (piece, after) = rest.split_at(room.min(rest.len()));
            self.write_piece(io, piece)?;
            rest = after;
        }
        Ok(())
    }

    fn write_chunk(&mut self, io: &dyn Io, chunk: StateChunk) -> Result<(), StoreError> {
        let elements = self.files.chunk_elements(self.chunks.len());
        assert_eq!(self.next, elements.start, "a whole chunk behind whole ones");
        self.chunks.push(chunk.hashes());
        for (plane, block) in self.files.planes.iter().zip(chunk.into_planes()) {
            let range = plane.range(elements.clone());
            assert_eq!(block.len() as u64, range.end - range.start, "bytes of a chunk");
            files::write(io, plane.file.id(), range.start, &Arc::new(block))?;
        }
        (self.next, self.has_moments) = (elements.end, true);
        Ok(())
    }

    /// Writes values that stay inside one chunk.
    fn write_piece(&mut self, io: &dyn Io, values: &[f32]) -> Result<(), StoreError> {
        let elements = self.next..self.next + values.len();
        let weights = Weights::from_f32(self.files.layout, values).into_blocks();
        let planes = self.files.weight_planes().zip(&mut self.hashers);
        for ((plane, hasher), block) in planes.zip(weights) {
            hasher.write(block.bytes());
            let offset = plane.range(elements.clone()).start;
            files::write(io, plane.file.id(), offset, &Arc::new(block))?;
        }
        self.next = elements.end;
        if self.next == self.files.elements || self.next.is_multiple_of(CHUNK_ELEMENTS) {
            let mut hashes = [0; PLANES];
            for (plane, hasher) in self.files.weight_planes().zip(&self.hashers) {
                hashes[plane.spec.plane as usize] = hasher.finish();
            }
            self.chunks.push(hashes);
            self.begin_chunk();
        }
        Ok(())
    }

    fn finish(&mut self, io: &dyn Io, spec: &LayerSpec) -> Result<LayerState, StoreError> {
        if self.next != self.files.elements {
            return Err(StoreError::Invalid(format!(
                "layer `{}` got {} of its {} weights",
                spec.name, self.next, self.files.elements
            )));
        }
        let layout = self.files.layout;
        let unwritten = |spec: &&PlaneSpec| spec.plane.state() > 0 && !self.has_moments;
        for spec in layout.planes().iter().filter(unwritten) {
            let zeroes = zero_hashes(&self.files, spec);
            for (hashes, zero) in self.chunks.iter_mut().zip(zeroes) {
                hashes[spec.plane as usize] = zero;
            }
        }
        let file = Arc::new(files::block(&hashes::encode(layout, &self.chunks)));
        files::write(io, self.files.hashes.id(), 0, &file)?;
        Ok(LayerState {
            slot: Slot::A,
            t: 0,
            locked: false,
            hashes: layer_hashes(layout, &self.chunks),
            grad_norm: 0.0,
        })
    }
}

/// Hashes of the chunks of an all-zero plane: all but the last one are alike.
fn zero_hashes(files: &SlotFiles, plane: &PlaneSpec) -> Vec<u64> {
    let of = |chunk: usize| hash(&vec![0; plane.bytes(files.chunk_elements(chunk).len())]);
    let last = chunk_count(files.elements) - 1;
    let mut hashes = vec![of(0); last];
    hashes.push(of(last));
    hashes
}

fn first_state(layers: Vec<LayerState>) -> State {
    State {
        step: Step(0),
        attempt: Attempt(0),
        layers,
        epoch: 0,
        index: 0,
        tokens_total: 0,
        loss: 0.0,
        grad_norm: 0.0,
        clip_factor: 1.0,
        learning_rate: 0.0,
        counters: std::collections::BTreeMap::new(),
    }
}

/// Every directory of a store below its own, parents before children.
fn dirs(table: &LayerTable) -> Vec<PathBuf> {
    let mut dirs = vec![PathBuf::new()];
    dirs.extend([COMMIT_DIR, SCRATCH_DIR, TOKENS_DIR, LAYERS_DIR].map(PathBuf::from));
    for layer in table.layers() {
        dirs.push(Path::new(LAYERS_DIR).join(&layer.name));
        dirs.extend([Slot::A, Slot::B].map(|slot| slot_path(layer, slot)));
    }
    dirs
}

fn sync_files(io: &dyn Io, files: &[crate::io::FileId]) -> Result<(), IoError> {
    wait(|done| {
        let fan = fan_in(files.len(), done);
        for &file in files {
            io.submit(Op::Sync { file }, fan.branch());
        }
    })
}

fn check_names(new: &NewStore<'_>) -> Result<(), StoreError> {
    let mut seen = std::collections::BTreeSet::new();
    for (name, _) in &new.files {
        if !is_plain_name(name) || RESERVED.contains(&name.as_str()) || !seen.insert(name) {
            return Err(StoreError::Invalid(format!("a model file may not be called `{name}`")));
        }
    }
    Ok(())
}

fn check_empty(io: &dyn Io, dir: &Path) -> Result<(), StoreError> {
    if !io.exists(dir)? {
        return Ok(());
    }
    let names = io.list(dir).map_err(|error| match error.source.kind() {
        ErrorKind::NotADirectory => {
            let what = format!("{} is a file; choose another directory", dir.display());
            StoreError::Invalid(what)
        }
        _ => error.into(),
    })?;
    if names.is_empty() {
        return Ok(());
    }
    let what = if io.exists(&dir.join(STORE_FILE))? {
        "holds a store (or an unfinished one) already; choose another directory or remove it"
    } else {
        "is not empty (what is left of a store that is gone can be removed); choose another directory"
    };
    Err(StoreError::Invalid(format!("{} {what}", dir.display())))
}
