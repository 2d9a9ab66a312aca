//! A tiny model, contents that follow from the step, and a stand-in for an optimizer step.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use model::{
    Attempt, Budget, LayerId, LayerTable, ModelConfig, Plane, PlaneType, Precision, Slot,
    StateLayout, Step, Weights,
};
use store::{
    Access, AfterUse, FileId, Guard, Image, Io, IoCounters, IoDone, IoError, Lock, LockKind,
    Memory, NewStore, Op, ReadingStore, RecordKind, Recovery, Spread, StateChunk, StoreError,
    Target, TrainingStore, blocking, create,
};

pub(crate) const DIR: &str = "/disk/store";
pub(crate) const CONFIG: &str = r#"{"model_type":"llama","vocab_size":40,"hidden_size":8,
    "intermediate_size":16,"num_hidden_layers":2,"num_attention_heads":2,
    "num_key_value_heads":1,"max_position_embeddings":32}"#;

pub(crate) fn table_of(config: &str) -> LayerTable {
    LayerTable::new(&ModelConfig::from_json(config).unwrap())
}

pub(crate) fn table() -> LayerTable {
    table_of(CONFIG)
}

/// What element `i` of a plane holds after `step`: moments are zero at step 0.
pub(crate) fn value(layer: LayerId, plane: Plane, step: u64, i: usize) -> f32 {
    if step == 0 && plane != Plane::Weight {
        return 0.0;
    }
    let mixed = (i as u64 + 1)
        .wrapping_mul(0x9e37_79b9_7f4a_7c15)
        .wrapping_add(step << 40 | u64::from(layer.0) << 8 | plane as u64);
    (mixed.wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 40) as f32 / 4096.0 - 1000.0
}

/// The last step up to `step` that trained the layer: layer 1 rests in every third step.
pub(crate) fn trained(layer: LayerId, step: u64) -> u64 {
    if layer.0 == 1 && step > 0 && step.is_multiple_of(3) { step - 1 } else { step }
}

pub(crate) fn create_store(io: &Arc<dyn Io>, dir: &Path, config: &str) -> Result<(), StoreError> {
    create_store_in(StateLayout::F32, io, dir, config)
}

pub(crate) fn create_store_in(
    layout: StateLayout,
    io: &Arc<dyn Io>,
    dir: &Path,
    config: &str,
) -> Result<(), StoreError> {
    let table = table_of(config);
    let files = vec![("tokenizer.json".to_owned(), b"{}".to_vec())];
    let defaults = serde_json_map();
    let new = NewStore {
        config_json: config,
        table: &table,
        layout,
        files,
        defaults,
        spread: Spread::default(),
    };
    let mut writer = create(Arc::clone(io), dir, &new)?;
    for layer in table.layers() {
        let values: Vec<f32> =
            (0..layer.elements()).map(|i| value(layer.id, Plane::Weight, 0, i)).collect();
        let mut start = 0;
        // Odd pieces, so that pieces and chunks end at different places.
        for piece in values.chunks(900_001) {
            writer.write_weights(layer.id, start, piece)?;
            start += piece.len();
        }
    }
    writer.finish()
}

fn serde_json_map() -> serde_json::Map<String, serde_json::Value> {
    [("lr".to_owned(), serde_json::json!(1e-5))].into_iter().collect()
}

/// A memory disk with a store at step 0.
pub(crate) fn fresh_image() -> Image {
    let memory = Arc::new(Memory::from_image(Image::default()));
    let io: Arc<dyn Io> = memory.clone();
    create_store(&io, Path::new(DIR), CONFIG).unwrap();
    memory.image()
}

/// A process that a test of another thread starts has our locks too until it becomes its program.
pub(crate) const LOCK_WAIT: Duration = Duration::from_millis(300);

pub(crate) fn open(io: &Arc<dyn Io>, dir: &Path) -> Result<(TrainingStore, Recovery), StoreError> {
    TrainingStore::open(Arc::clone(io), dir, Budget::new(64 << 20), LOCK_WAIT)
}

pub(crate) fn read(io: &Arc<dyn Io>, dir: &Path) -> Result<ReadingStore, StoreError> {
    ReadingStore::open(Arc::clone(io), dir, LOCK_WAIT)
}

/// What some parameters of a layer hold after `step`.
pub(crate) fn contents(
    layout: StateLayout,
    layer: LayerId,
    step: u64,
    elements: Range<usize>,
) -> StateChunk {
    let budget = Budget::new(layout.bytes(elements.len()) + (1 << 20));
    let mut chunk = StateChunk::unwritten(layout, elements.len(), &budget).unwrap();
    let weights: Vec<f32> =
        elements.clone().map(|i| value(layer, Plane::Weight, step, i)).collect();
    let mut weights = Weights::from_f32(layout, &weights).into_blocks().into_iter();
    for (spec, block) in layout.planes().iter().zip(chunk.planes_mut()) {
        let values = elements.clone().step_by(spec.block);
        let values = values.map(|i| value(layer, spec.plane, step, i));
        match (spec.plane.state(), spec.dtype) {
            (0, _) => block.bytes_mut().copy_from_slice(weights.next().unwrap().bytes()),
            (_, PlaneType::U8) => {
                let codes = values.map(|v| v.to_bits().to_le_bytes()[1]);
                block.bytes_mut().iter_mut().zip(codes).for_each(|(to, v)| *to = v);
            }
            _ => block.f32s_mut().iter_mut().zip(values).for_each(|(to, v)| *to = v),
        }
    }
    chunk
}

/// Weights as float32.
pub(crate) fn weights(
    store: &TrainingStore,
    at: (LayerId, Slot),
    elements: Range<usize>,
) -> Result<Vec<f32>, StoreError> {
    let read = blocking(|done| {
        store.read_weights(at, elements, Precision::Exact, AfterUse::Forget, done);
    });
    Ok(read?.into_f32().f32s().to_vec())
}

/// Writes the slots of the step after the last commit and commits it.
pub(crate) fn train_step(store: &TrainingStore) -> Result<(), StoreError> {
    let mut state = store.state();
    let step = state.step.next();
    let mut written = Vec::new();
    for (index, layer) in state.layers.iter_mut().enumerate() {
        let id = LayerId(index as u32);
        if layer.locked || trained(id, step.0) != step.0 {
            continue;
        }
        layer.slot = layer.slot.other();
        layer.t += 1;
        layer.hashes = write_layer(store, id, layer.slot, step.0)?;
        written.push((id, layer.slot));
    }
    blocking(|done| store.save_slots(&written, done))?;
    (state.step, state.attempt, state.index) = (step, Attempt(state.attempt.0 + 1), step.0 * 2);
    blocking(|done| store.commit(RecordKind::Committed, state, done))
}

pub(crate) fn write_layer(
    store: &TrainingStore,
    layer: LayerId,
    slot: Slot,
    step: u64,
) -> Result<[u64; 3], StoreError> {
    for chunk in 0..store.chunks(layer) {
        let bytes = contents(store.layout(), layer, step, store.chunk_elements(layer, chunk));
        let hashes = bytes.hashes();
        blocking(|done| store.write_chunk((layer, slot, chunk), (bytes, hashes), None, done))?;
    }
    blocking(|done| store.finish_layer(layer, slot, false, done))
}

/// Reads every live slot: hashes must hold and contents be those of `step`.
pub(crate) fn assert_contents(store: &TrainingStore, step: u64) {
    let state = store.state();
    assert_eq!(state.step, Step(step));
    for (index, layer) in state.layers.iter().enumerate() {
        let id = LayerId(index as u32);
        for chunk in 0..store.chunks(id) {
            let read = blocking(|done| store.read_chunk(id, layer.slot, chunk, done)).unwrap();
            store.check_chunk(id, layer.slot, chunk, read.hashes()).unwrap();
            let elements = store.chunk_elements(id, chunk);
            let expected = contents(store.layout(), id, trained(id, step), elements);
            for plane in store.layout().planes().iter().map(|spec| spec.plane) {
                let (read, expected) = (read.plane(plane), expected.plane(plane));
                assert!(read.bytes() == expected.bytes(), "layer {index} {plane:?}");
            }
        }
    }
}

/// An engine that can keep syncs from ending.
#[derive(Debug)]
pub(crate) struct HeldSyncs {
    inner: Arc<dyn Io>,
    holding: AtomicBool,
}

impl HeldSyncs {
    pub(crate) fn new(inner: Arc<dyn Io>) -> HeldSyncs {
        HeldSyncs { inner, holding: AtomicBool::new(false) }
    }

    /// No sync that is submitted from now on ever ends.
    pub(crate) fn hold(&self) {
        self.holding.store(true, Ordering::Relaxed);
    }
}

impl Io for HeldSyncs {
    fn create(&self, path: &Path, len: u64) -> Result<FileId, IoError> {
        self.inner.create(path, len)
    }

    fn open(&self, path: &Path, access: Access) -> Result<FileId, IoError> {
        self.inner.open(path, access)
    }

    fn close(&self, file: FileId) {
        self.inner.close(file);
    }

    fn len(&self, file: FileId) -> Result<u64, IoError> {
        self.inner.len(file)
    }

    fn rename(&self, from: &Path, to: &Path) -> Result<(), IoError> {
        self.inner.rename(from, to)
    }

    fn unlink(&self, path: &Path) -> Result<(), IoError> {
        self.inner.unlink(path)
    }

    fn link(&self, from: &Path, to: &Path) -> Result<(), IoError> {
        self.inner.link(from, to)
    }

    fn list(&self, dir: &Path) -> Result<Vec<String>, IoError> {
        self.inner.list(dir)
    }

    fn create_dir(&self, dir: &Path) -> Result<(), IoError> {
        self.inner.create_dir(dir)
    }

    fn remove_dir(&self, dir: &Path) -> Result<(), IoError> {
        self.inner.remove_dir(dir)
    }

    fn sync_dir(&self, dir: &Path) -> Result<(), IoError> {
        self.inner.sync_dir(dir)
    }

    fn exists(&self, path: &Path) -> Result<bool, IoError> {
        self.inner.exists(path)
    }

    fn is_link(&self, path: &Path) -> Result<bool, IoError> {
        self.inner.is_link(path)
    }

    fn symlink(&self, target: &Path, path: &Path) -> Result<(), IoError> {
        self.inner.symlink(target, path)
    }

    fn link_target(&self, path: &Path) -> Option<PathBuf> {
        self.inner.link_target(path)
    }

    fn drive(&self, path: &Path) -> Result<u64, IoError> {
        self.inner.drive(path)
    }

    fn is_same(&self, one: &Path, other: &Path) -> Result<bool, IoError> {
        self.inner.is_same(one, other)
    }

    fn is_at(&self, file: FileId, path: &Path) -> Result<bool, IoError> {
        self.inner.is_at(file, path)
    }

    fn link_count(&self, path: &Path) -> Result<u64, IoError> {
        self.inner.link_count(path)
    }

    fn free_bytes(&self, path: &Path) -> Result<u64, IoError> {
        self.inner.free_bytes(path)
    }

    fn disk_warnings(&self, dir: &Path) -> Vec<String> {
        self.inner.disk_warnings(dir)
    }

    fn lock(&self, path: &Path, kind: LockKind) -> Result<Option<Lock>, IoError> {
        self.inner.lock(path, kind)
    }

    fn target(
        &self,
        file: FileId,
        offset: u64,
        len: usize,
        budget: &Budget,
        after: AfterUse,
    ) -> Result<Target, StoreError> {
        self.inner.target(file, offset, len, budget, after)
    }

    fn submit(&self, op: Op, done: IoDone) {
        let held = self.holding.load(Ordering::Relaxed) && matches!(op, Op::Sync { .. });
        if !held {
            self.inner.submit(op, done);
        }
    }

    fn counters(&self) -> IoCounters {
        self.inner.counters()
    }

    fn is_off(&self, guard: Guard) -> bool {
        self.inner.is_off(guard)
    }
}
