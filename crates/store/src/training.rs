//! [`TrainingStore`]: a store held by one trainer, which reads live slots and writes inactive ones.
//!
//! Invariants:
//! - a slot is written only if it is not live, its layer is not locked, its files have no second
//!   name, and no commit that names it is in flight;
//! - a commit names only slots whose files are synced and whose hashes are those in its state;
//! - a failed sync, a lost write or a reported mismatch poisons the store: every later call fails;
//! - no lock that a [`Done`] takes is held while an operation is submitted or a [`Done`] runs.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, OnceLock, RwLock};
use std::time::Duration;

use model::{
    Budget, HostBytes, LayerId, LayerTable, NextUse, Plane, PlaneSpec, Precision, Slot,
    StateLayout, Weights,
};
use serde_json::{Map, Value};

mod inner;
mod planes;

use inner::{Chain, Inner};

use crate::chunk::{StateChunk, gather};
use crate::drives::Drives;
use crate::error::{Done, StoreError, blocking};
use crate::files;
use crate::hashes::{self, ChunkHashes, LayerHashes, layer_hashes};
use crate::io::{
    Access, AfterUse, Guard, Handle, Io, IoCounters, IoDone, IoError, LockKind, Op, Target, fan_in,
    write_block,
};
use crate::layout::{RUN_FILE, SCRATCH_DIR, STORE_FILE};
use crate::log;
use crate::opening::{OnDamage, check_live, open_slots, remove_leftovers};
use crate::reading::write_index;
use crate::record::{RecordKind, State};
use crate::recovery::{self, Recovery};
use crate::scratch::Scratch;
use crate::slots::slot_bytes;
use crate::unsaved::Allowance;

/// A store open for training. Calls come from any thread; see [`Done`] for where they end.
#[derive(Debug)]
pub struct TrainingStore {
    pub(crate) inner: Arc<Inner>,
}

impl TrainingStore {
    /// Opens the store in `dir` for training, waiting up to `lock_wait` for its lock, and recovers
    /// it: a new log restates the last commit, durably, before anything else is written. Blocks
    /// that engines cannot bind in place are leased from `budget`.
    ///
    /// # Errors
    /// `Invalid` (not a store, unfinished, from a newer version), `Damaged` (nothing was written),
    /// `InUse`, `Io`.
    pub fn open(
        io: Arc<dyn Io>,
        dir: &Path,
        budget: Budget,
        lock_wait: Duration,
    ) -> Result<(TrainingStore, Recovery), StoreError> {
        TrainingStore::open_with(io, dir, budget, lock_wait, OnDamage::Refuse)
    }

    /// [`TrainingStore::open`] for a rollback, which may replace layers whose live version is
    /// damaged or missing. Until one has, nothing can be committed.
    pub fn open_to_heal(
        io: Arc<dyn Io>,
        dir: &Path,
        budget: Budget,
        lock_wait: Duration,
    ) -> Result<(TrainingStore, Recovery), StoreError> {
        TrainingStore::open_with(io, dir, budget, lock_wait, OnDamage::Note)
    }

    fn open_with(
        io: Arc<dyn Io>,
        dir: &Path,
        budget: Budget,
        lock_wait: Duration,
        on_damage: OnDamage,
    ) -> Result<(TrainingStore, Recovery), StoreError> {
        let lock = recovery::lock(&*io, dir, LockKind::Exclusive, lock_wait)?;
        let found = recovery::recover(&*io, dir)?;
        let mut recovery = found.recovery;
        let table = &found.layout.table;
        let drives = Drives::find(&*io, dir, table)?;
        drives.claim(&*io, dir, table)?;
        for other in &drives.paths()[1..] {
            recovery.warnings.extend(io.disk_warnings(other));
        }
        let mut open = open_slots(&io, dir, &found.layout, &found.state, on_damage)?;
        if recovery.cut.is_some() && !io.is_off(Guard::LiveBehindTear) {
            check_live(&*io, table, &mut open, &found.state, on_damage)?;
            recovery.checked = true;
        }
        recovery.warnings.extend(open.warnings);
        let (number, sequence) = (found.number + 1, found.sequence + 1);
        let log = log::start(&io, dir, number, sequence, found.before.as_ref(), &found.state)?;
        remove_leftovers(&*io, dir, log.number)?;
        let home = Handle::new(&io, io.open(&dir.join(STORE_FILE), Access::Read)?);
        let inner = Inner {
            home,
            io,
            dir: dir.to_owned(),
            drives,
            budget,
            allowance: Allowance::default(),
            copiers: OnceLock::new(),
            layout: found.layout,
            config_json: found.config_json,
            slots: RwLock::new(open.slots),
            tables: Mutex::new(open.tables),
            broken: open.broken,
            chain: Mutex::new(Chain {
                state: found.state,
                before: found.before,
                log,
                committing: None,
            }),
            readying: Mutex::default(),
            may_have_idle: AtomicBool::new(true),
            may_have_index: Mutex::new(true),
            poison: Mutex::new(None),
            _lock: lock,
        };
        Ok((TrainingStore { inner: Arc::new(inner) }, recovery))
    }

    /// The store's layers.
    pub fn table(&self) -> &LayerTable {
        &self.inner.layout.table
    }

    /// How W, M and V are kept.
    pub fn layout(&self) -> StateLayout {
        self.inner.layout.state()
    }

    /// Text of the model's `config.json`.
    pub fn config_json(&self) -> &str {
        &self.inner.config_json
    }

    /// Options the store was created with; opaque here.
    pub fn defaults(&self) -> &Map<String, Value> {
        &self.inner.layout.defaults
    }

    /// The store's directory.
    pub fn dir(&self) -> &Path {
        &self.inner.dir
    }

    /// How many bytes of new chunks may wait in memory until they are saved. What waits of dropped
    /// attempts is forgotten. Not while a step is in flight.
    pub fn let_wait(&self, bytes: usize) {
        self.inner.forget_waiting();
        let planes = self.layout().planes().iter().filter(|spec| spec.plane.state() == 0);
        let of = |elements: usize| planes.clone().map(|spec| spec.bytes(elements)).sum::<usize>();
        let weight_bytes = self.table().layers().iter().map(|layer| of(layer.elements())).sum();
        self.inner.allowance.grant(bytes, weight_bytes);
    }

    /// The last commit.
    pub fn state(&self) -> State {
        self.inner.chain().state.clone()
    }

    /// Bytes and syncs of the engine since it started.
    pub fn counters(&self) -> IoCounters {
        self.inner.io.counters()
    }

    /// Reads weights of a slot, which may be the live one or one whose layer is finished but not
    /// committed yet. Their blocks may be maps, during whose life the slot must not be written.
    /// Verified only for locked layers, which no optimizer reads: their whole chunks.
    pub fn read_weights(
        &self,
        (layer, slot): (LayerId, Slot),
        elements: Range<usize>,
        precision: Precision,
        after: AfterUse,
        done: Done<Weights>,
    ) {
        let inner = &self.inner;
        let files = inner.files(layer, slot);
        assert!(elements.start <= elements.end && elements.end <= files.elements, "{elements:?}");
        let done = self.guarding_locked(layer, slot, elements.start, done);
        let reads = weight_reads(files.layout, precision, done);
        for (plane, read) in files.planes.iter().zip(reads) {
            inner.read_plane(plane, elements.clone(), after, read);
        }
    }

    /// Reads rows of `width` elements of a layer's first tensor: `[ids.len(), width]`, in blocks
    /// leased from the budget. Not verified.
    ///
    /// # Errors
    /// `Invalid` for a row beyond the tensor.
    pub fn gather_rows(
        &self,
        (layer, slot): (LayerId, Slot),
        width: usize,
        ids: &[u32],
        precision: Precision,
        done: Done<Weights>,
    ) {
        if let Err(error) = self.inner.check_poison() {
            return done(Err(error));
        }
        let rows = self.table().layer(layer).tensors[0].elements() / width.max(1);
        if let Some(id) = ids.iter().find(|&&id| id as usize >= rows) {
            return done(Err(StoreError::Invalid(format!("row {id} of a table of {rows}"))));
        }
        let files = self.inner.files(layer, slot);
        let reads = weight_reads(files.layout, precision, done);
        for (plane, read) in files.planes.iter().zip(reads) {
            let row_bytes = plane.spec.bytes(width);
            let target = match self.inner.budget.block(ids.len() * row_bytes) {
                Ok(block) => Target::heap(block),
                Err(error) => {
                    read(Err(error.into()));
                    continue;
                }
            };
            let row = |&id: &u32| id as usize * width..(id as usize + 1) * width;
            let rows: Vec<_> = ids.iter().map(row).collect();
            let read = move |block: Result<_, IoError>| read(block.map_err(Into::into));
            self.inner.fill(plane, &rows, target, read);
        }
    }

    /// Number of chunks of a layer.
    pub fn chunks(&self, layer: LayerId) -> usize {
        hashes::chunk_count(self.table().layer(layer).elements())
    }

    /// Elements of a chunk inside its layer's block.
    pub fn chunk_elements(&self, layer: LayerId, chunk: usize) -> Range<usize> {
        hashes::chunk_elements(self.table().layer(layer).elements(), chunk)
    }

    /// Reads one chunk of all planes. Not verified: the caller does that while the bytes
    /// are in its cache, with [`TrainingStore::check_chunk`].
    pub fn read_chunk(&self, layer: LayerId, slot: Slot, chunk: usize, done: Done<StateChunk>) {
        let files = self.inner.files(layer, slot);
        let layout = files.layout;
        let whole = move |blocks| StateChunk::from_planes(layout, blocks);
        let reads = gather(files.planes.len(), Box::new(move |blocks| done(blocks.map(whole))));
        for (plane, read) in files.planes.iter().zip(reads) {
            self.inner.read_plane(plane, files.chunk_elements(chunk), AfterUse::Forget, read);
        }
    }

    /// The hashes a chunk must have.
    ///
    /// # Panics
    /// If the slot is neither live nor written: a programmer's error.
    pub fn chunk_hashes(&self, layer: LayerId, slot: Slot, chunk: usize) -> ChunkHashes {
        let hashes = self.inner.tables()[layer.index()][slot as usize].chunks[chunk];
        let Some(hashes) = hashes else {
            panic!("chunk {chunk} of layer {layer} in slot {} is not written", slot.name())
        };
        hashes
    }

    /// Compares the hashes of a chunk that was read with those it must have; a mismatch poisons the
    /// store.
    pub fn check_chunk(
        &self,
        layer: LayerId,
        slot: Slot,
        chunk: usize,
        found: ChunkHashes,
    ) -> Result<(), StoreError> {
        if self.inner.io.is_off(Guard::ChunkHash) {
            return Ok(());
        }
        let expected = self.chunk_hashes(layer, slot, chunk);
        let planes = self.layout().planes().iter().map(|spec| spec.plane);
        let wrong = planes.into_iter().find(|&p| expected[p as usize] != found[p as usize]);
        wrong.map_or(Ok(()), |plane| Err(self.report_mismatch(layer, slot, plane, chunk)))
    }

    /// Poisons the store because a chunk's contents contradict its hash; returns the error to
    /// report.
    pub fn report_mismatch(
        &self,
        layer: LayerId,
        slot: Slot,
        plane: Plane,
        chunk: usize,
    ) -> StoreError {
        let files = self.inner.files(layer, slot);
        let Some(file) = files.planes.iter().find(|file| file.spec.plane == plane) else {
            panic!("a store in {} has no {}", self.layout(), plane.name())
        };
        let error = files.mismatch(file, chunk);
        self.inner.poison(error.to_string(), true);
        error
    }

    /// Writes one chunk of all planes into an inactive slot. `hashes` are those of `bytes`,
    /// computed by the caller while they are in its cache. `again`: when the planes are read next;
    /// until they are saved they may wait in memory if it says so.
    ///
    /// The first write after a commit replaces a slot that is missing or that a snapshot has a name
    /// for, and blocks while it does.
    ///
    /// # Errors
    /// `NoSpace` for a slot that is to be replaced; `Io`, `Poisoned`.
    ///
    /// # Panics
    /// On a live slot, a locked layer or wrong lengths: a programmer's error.
    pub fn write_chunk(
        &self,
        (layer, slot, chunk): (LayerId, Slot, usize),
        (bytes, hashes): (StateChunk, ChunkHashes),
        again: Option<WrittenAgain>,
        done: Done<()>,
    ) {
        let inner = &self.inner;
        let elements = self.chunk_elements(layer, chunk);
        assert_eq!(bytes.layout(), self.layout(), "the layout of a chunk");
        if let Err(error) = inner.check_poison() {
            return done(Err(error));
        }
        inner.assert_inactive(layer, slot);
        let files = match inner.remove_index().and_then(|()| inner.ready_slot(layer, slot)) {
            Ok(files) => files,
            Err(error) => return done(Err(error)),
        };
        inner.tables()[layer.index()][slot as usize].start_write(chunk);
        let shared = Arc::clone(inner);
        let fan = fan_in(
            files.planes.len(),
            inner.finish(done, move || {
                let written = &mut shared.tables()[layer.index()][slot as usize];
                written.chunks[chunk] = Some(hashes);
            }),
        );
        for (plane, block) in files.planes.iter().zip(bytes.into_planes()) {
            let at = (chunk, elements.clone());
            inner.write_plane(plane, at, block, again, fan.branch());
        }
    }

    /// The layer's hashes for the [`State`], once all chunks of a slot are written. Unless it
    /// `waits` for later chunks, they go to the slot's `hashes` file.
    ///
    /// # Panics
    /// On a live slot or one with unwritten chunks: a programmer's error.
    pub fn finish_layer(&self, layer: LayerId, slot: Slot, waits: bool, done: Done<LayerHashes>) {
        let inner = &self.inner;
        if let Err(error) = inner.check_poison() {
            return done(Err(error));
        }
        inner.assert_inactive(layer, slot);
        let files = inner.files(layer, slot);
        let hashes = layer_hashes(files.layout, &inner.written_chunks(layer, slot));
        if waits {
            return done(Ok(hashes));
        }
        let written = Box::new(move |result: Result<(), _>| done(result.map(|()| hashes)));
        let result = inner.finish(written, || ());
        inner.write_hashes(layer, slot, result);
    }

    /// Brings what waits of these slots to their files, and syncs those. A failed sync poisons the
    /// store.
    ///
    /// # Panics
    /// On a live slot or one with unwritten chunks: a programmer's error.
    pub fn save_slots(&self, slots: &[(LayerId, Slot)], done: Done<()>) {
        let inner = &self.inner;
        if let Err(error) = inner.check_poison() {
            return done(Err(error));
        }
        let syncing = Arc::clone(inner);
        let synced = slots.to_vec();
        let written: IoDone = Box::new(move |result| match result {
            Ok(()) => syncing.sync_slots(synced, done),
            Err(error) => {
                syncing.poison_if_lost(&error);
                done(Err(error.into()));
            }
        });
        inner.write_waiting(slots, written);
    }

    /// Makes `state` durable: one record of `kind` in both copies of the log, synced. Then it is
    /// [`TrainingStore::state`]. A failure poisons the store. Blocks while a long log gives way to a
    /// new one.
    ///
    /// # Panics
    /// If the state names a slot that is not finished and synced, or while another commit is in
    /// flight: a programmer's error.
    pub fn commit(&self, kind: RecordKind, state: State, done: Done<()>) {
        let inner = &self.inner;
        if let Err(error) = inner.check_poison().and_then(|()| inner.check_whole(&state)) {
            return done(Err(error));
        }
        inner.assert_committable(&state);
        if let Err(error) = inner.begin_log_if_long() {
            return done(Err(error));
        }
        let (record, files, offset) = {
            let mut chain = inner.chain();
            assert!(chain.committing.is_none(), "two commits at once");
            chain.committing = Some(state.layers.iter().map(|layer| layer.slot).collect());
            let record = chain.log.next_record(kind, &state);
            (Arc::new(record), chain.log.file_ids(), chain.log.end)
        };
        let (shared, record_bytes) = (Arc::clone(inner), record.len() as u64);
        let committed = inner.finish_or_poison(done, move || {
            shared.now_true(state, record_bytes);
        });
        let io = Arc::clone(&inner.io);
        let written: IoDone = Box::new(move |result| match result {
            Err(error) => committed(Err(error)),
            Ok(()) => {
                let fan = fan_in(files.len(), committed);
                for file in files {
                    io.submit(Op::Sync { file }, fan.branch());
                }
            }
        });
        let fan = fan_in(files.len(), written);
        for file in files {
            write_block(&*inner.io, file, offset, &record, fan.branch());
        }
    }

    /// [`TrainingStore::commit`], waited for.
    pub(crate) fn commit_now(&self, kind: RecordKind, state: State) -> Result<(), StoreError> {
        blocking(|done| self.commit(kind, state, done))
    }

    /// What the coming steps may still allocate, and what the disk has: a step that begins with too
    /// little ends as a failure.
    pub fn room(&self) -> Result<Room, StoreError> {
        let inner = &self.inner;
        inner.check_place()?;
        let mut needed = Vec::new();
        for (spec, layer) in self.table().layers().iter().zip(&self.state().layers) {
            for slot in [Slot::A, Slot::B] {
                if !layer.locked && !inner.is_own(spec.id, slot)? {
                    needed.push((spec.id.index(), slot_bytes(self.layout(), spec)));
                }
            }
        }
        inner.drives.room(&*inner.io, &needed, RESERVE_BYTES)
    }

    /// A directory on each drive that the store is on, its own first.
    pub fn drives(&self) -> &[PathBuf] {
        self.inner.drives.paths()
    }

    /// Fails with the cause if the store is poisoned.
    pub fn check(&self) -> Result<(), StoreError> {
        self.inner.check_poison()
    }

    /// Text of `run.json`, if there is one.
    pub fn read_run(&self) -> Result<Option<String>, StoreError> {
        read_run(&*self.inner.io, &self.inner.dir)
    }

    /// Replaces `run.json` atomically and durably. Blocks; not from inside a [`Done`].
    pub fn write_run(&self, text: &str) -> Result<(), StoreError> {
        self.inner.check_poison()?;
        let path = self.inner.dir.join(RUN_FILE);
        let written = files::replace(&*self.inner.io, &path, text.as_bytes());
        written.map_err(|error| self.inner.explained(error))
    }

    /// Allocates a file of `bytes` in `scratch/`. Blocks.
    pub fn scratch(&self, name: &str, bytes: u64) -> Result<Scratch, StoreError> {
        let io = Arc::clone(&self.inner.io);
        let dir = self.inner.dir.join(SCRATCH_DIR);
        Scratch::create(io, &dir, name, bytes, self.inner.budget.clone())
    }

    /// Ends a run cleanly: the directory is a Hugging Face checkpoint of the last commit. Blocks.
    pub fn close(self) -> Result<(), StoreError> {
        self.inner.check_poison()?;
        self.inner.check_place()?;
        self.inner.remove_idle()?;
        let state = self.state();
        write_index(&*self.inner.io, &self.inner.dir, &self.inner.layout, &state)
    }
}

/// What becomes of a chunk that is written.
#[derive(Clone, Copy, Debug)]
pub struct WrittenAgain {
    /// In which a sweep reads weights.
    pub precision: Precision,
    /// By a sweep.
    pub weights: NextUse,
    /// All planes, by the optimizer.
    pub state: NextUse,
    /// Until [`TrainingStore::save_slots`] they may stay in memory.
    pub waits: bool,
}

impl WrittenAgain {
    fn of(self, layout: StateLayout, spec: PlaneSpec) -> AfterUse {
        let swept = layout.weight_planes(self.precision).contains(&spec);
        AfterUse::Later(if swept { self.weights } else { self.state })
    }
}

/// One completion per plane that weights are read from; the last to come passes them on.
fn weight_reads(
    layout: StateLayout,
    precision: Precision,
    done: Done<Weights>,
) -> Vec<Done<HostBytes>> {
    let whole = move |blocks| Weights::from_planes(layout, precision, blocks);
    let count = layout.weight_planes(precision).len();
    gather(count, Box::new(move |blocks| done(blocks.map(whole))))
}

/// Bytes that the log and small files may take between two looks at the disk.
const RESERVE_BYTES: u64 = 16 << 20;

/// Bytes that are needed on a drive and those that are there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Room {
    /// A directory on it.
    pub path: PathBuf,
    pub needed: u64,
    pub available: u64,
}

/// Text of `run.json` in `dir`, if there is one.
pub(crate) fn read_run(io: &dyn Io, dir: &Path) -> Result<Option<String>, StoreError> {
    let path = dir.join(RUN_FILE);
    if io.exists(&path)? { files::read_text(io, &path).map(Some) } else { Ok(None) }
}
