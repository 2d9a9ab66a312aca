//! Creating, training, reading, closing: on both engines, with equal bytes.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use model::{Budget, LayerId, Plane, Precision, Slot, StateLayout};
use store::{
    Image, Io, Memory, NewStore, ReadingStore, RecordKind, Spread, StoreError, TrainingStore,
    blocking, create, direct_engine, memory_engine, mmap_engine,
};

use crate::support::{
    CONFIG, DIR, HeldSyncs, assert_contents, create_store, fresh_image, open, read, table,
    train_step, value, weights, write_layer,
};

/// Layers above one chunk, in both an even and an odd number of bytes past it.
pub(crate) const TWO_CHUNKS: &str = r#"{"model_type":"llama","vocab_size":1201,"hidden_size":1024,
    "intermediate_size":8,"num_hidden_layers":1,"num_attention_heads":8,
    "num_key_value_heads":1,"tie_word_embeddings":false,"max_position_embeddings":32}"#;

fn train_and_reopen(io: &Arc<dyn Io>, dir: &Path, config: &str, steps: u64) {
    create_store(io, dir, config).unwrap();
    let (store, recovery) = open(io, dir).unwrap();
    assert_eq!(recovery.cut, None);
    assert_contents(&store, 0);
    for step in 1..=steps {
        train_step(&store).unwrap();
        assert_contents(&store, step);
    }
    store.close().unwrap();
    let (store, recovery) = open(io, dir).unwrap();
    assert_eq!((recovery.cut, recovery.warnings), (None, vec![]));
    assert_contents(&store, steps);
}

#[test]
fn trains_commits_and_reopens_in_memory() {
    train_and_reopen(&memory_engine(), Path::new(DIR), CONFIG, 4);
}

#[test]
fn trains_commits_and_reopens_on_disk() {
    for io in [mmap_engine(2, true), mmap_engine(2, false), direct_engine(8)] {
        let dir = tempfile::tempdir().unwrap();
        train_and_reopen(&io, &dir.path().join("s"), TWO_CHUNKS, 2);
    }
}

#[test]
fn engines_leave_the_same_bytes() {
    let temporary = tempfile::tempdir().unwrap();
    let dir = temporary.path().join("s");
    let use_it = |io: &Arc<dyn Io>| {
        create_store(io, &dir, CONFIG).unwrap();
        let (store, _) = open(io, &dir).unwrap();
        train_step(&store).unwrap();
        store.write_run("{\"seed\":0}").unwrap();
        store.close().unwrap();
    };
    let memory = Arc::new(Memory::from_image(Image::default()));
    let io: Arc<dyn Io> = memory.clone();
    use_it(&io);
    let image = memory.image();
    assert!(image.files.len() > 30);
    for io in [mmap_engine(1, false), direct_engine(8)] {
        use_it(&io);
        for (path, bytes) in &image.files {
            assert!(std::fs::read(path).unwrap() == *bytes, "{}", path.display());
        }
        std::fs::remove_dir_all(&dir).unwrap();
    }
}

#[test]
fn weights_and_rows_are_read_where_they_are() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let engines = [
        (memory_engine(), DIR.into()),
        (mmap_engine(2, true), at("mmap")),
        (direct_engine(8), at("direct")),
    ];
    for (io, dir) in engines {
        create_store(&io, &dir, TWO_CHUNKS).unwrap();
        let (store, _) = open(&io, &dir).unwrap();
        let layer = LayerId(0);
        let range = 1_000_000..1_150_001;
        let at = (layer, Slot::A);
        let read = weights(&store, at, range.clone()).unwrap();
        assert!(read.into_iter().eq(range.map(|i| value(layer, Plane::Weight, 0, i))));

        let ids = [1200, 0, 7, 7];
        let gather =
            |ids: &[u32]| blocking(|done| store.gather_rows(at, 1024, ids, Precision::Exact, done));
        let rows = gather(&ids).unwrap().into_f32();
        let expected = ids.iter().flat_map(|&id| {
            (0..1024).map(move |i| value(layer, Plane::Weight, 0, id as usize * 1024 + i))
        });
        assert!(rows.f32s().iter().copied().eq(expected));
        let beyond = gather(&[1201]);
        assert!(matches!(beyond, Err(StoreError::Invalid(_))), "{beyond:?}");
    }
}

#[test]
fn a_pending_slot_is_readable_before_its_commit() {
    let io: Arc<dyn Io> = Arc::new(Memory::from_image(fresh_image()));
    let (store, _) = open(&io, Path::new(DIR)).unwrap();
    let layer = LayerId(2);
    write_layer(&store, layer, Slot::B, 1).unwrap();
    let written = weights(&store, (layer, Slot::B), 3..9).unwrap();
    assert!(written.into_iter().eq((3..9).map(|i| value(layer, Plane::Weight, 1, i))));
    let live = weights(&store, (layer, Slot::A), 3..4).unwrap();
    assert_eq!(live, [value(layer, Plane::Weight, 0, 3)]);
}

#[test]
#[should_panic(expected = "a live slot is never written")]
fn a_live_slot_is_never_written() {
    let io: Arc<dyn Io> = Arc::new(Memory::from_image(fresh_image()));
    let (store, _) = open(&io, Path::new(DIR)).unwrap();
    let _ = write_layer(&store, LayerId(0), Slot::A, 1);
}

#[test]
#[should_panic(expected = "commit in flight")]
fn a_slot_of_a_commit_in_flight_is_never_written() {
    let io: Arc<dyn Io> = Arc::new(Memory::from_image(fresh_image()));
    let held: Arc<HeldSyncs> = Arc::new(HeldSyncs::new(io));
    let io: Arc<dyn Io> = held.clone();
    let (store, _) = open(&io, Path::new(DIR)).unwrap();
    let mut state = store.state();
    let layer = LayerId(3);
    state.layers[3].hashes = write_layer(&store, layer, Slot::B, 1).unwrap();
    state.layers[3].slot = Slot::B;
    blocking(|done| store.save_slots(&[(layer, Slot::B)], done)).unwrap();
    held.hold();
    store.commit(RecordKind::Committed, state, Box::new(|_| ()));
    let _ = write_layer(&store, layer, Slot::B, 2);
}

#[test]
#[should_panic(expected = "is not synced")]
fn an_unsynced_slot_is_never_committed() {
    let io: Arc<dyn Io> = Arc::new(Memory::from_image(fresh_image()));
    let (store, _) = open(&io, Path::new(DIR)).unwrap();
    let mut state = store.state();
    state.layers[0].hashes = write_layer(&store, LayerId(0), Slot::B, 1).unwrap();
    state.layers[0].slot = Slot::B;
    let _ = blocking(|done| store.commit(RecordKind::Committed, state, done));
}

#[test]
fn layer_hashes_see_contents_only() {
    let hashes = |io: &Arc<dyn Io>| {
        let store = read(io, Path::new(DIR)).unwrap();
        (0..4).map(|l| store.layer_hash(LayerId(l))).collect::<Vec<_>>()
    };
    let io: Arc<dyn Io> = Arc::new(Memory::from_image(fresh_image()));
    let before = hashes(&io);
    let (store, _) = open(&io, Path::new(DIR)).unwrap();
    // The same contents again, in the other slots.
    let mut state = store.state();
    let mut written = Vec::new();
    for (index, layer) in state.layers.iter_mut().enumerate() {
        let id = LayerId(index as u32);
        layer.slot = Slot::B;
        layer.hashes = write_layer(&store, id, Slot::B, 0).unwrap();
        layer.t = 7;
        written.push((id, Slot::B));
    }
    blocking(|done| store.save_slots(&written, done)).unwrap();
    blocking(|done| store.commit(RecordKind::Committed, state, done)).unwrap();
    drop(store);
    assert_eq!(hashes(&io), before);
    let (store, _) = open(&io, Path::new(DIR)).unwrap();
    train_step(&store).unwrap();
    drop(store);
    assert!(hashes(&io).iter().zip(&before).all(|(a, b)| a != b));
}

#[test]
fn one_trainer_or_many_readers() {
    let dir = tempfile::tempdir().unwrap();
    let engines = [(memory_engine(), DIR.into()), (mmap_engine(1, true), dir.path().join("s"))];
    for (io, dir) in engines {
        create_store(&io, &dir, CONFIG).unwrap();
        let (trainer, _) = open(&io, &dir).unwrap();
        assert!(matches!(open(&io, &dir), Err(StoreError::InUse { .. })));
        assert!(matches!(read(&io, &dir), Err(StoreError::InUse { .. })));
        drop(trainer);
        let readers = [read(&io, &dir).unwrap(), read(&io, &dir).unwrap()];
        assert!(matches!(open(&io, &dir), Err(StoreError::InUse { .. })));
        drop(readers);
        open(&io, &dir).unwrap();
    }
}

#[test]
fn a_waiting_trainer_gets_the_lock() {
    let io: Arc<dyn Io> = Arc::new(Memory::from_image(fresh_image()));
    let (first, _) = open(&io, Path::new(DIR)).unwrap();
    let waiting = std::thread::spawn({
        let io = Arc::clone(&io);
        move || {
            let wait = Duration::from_secs(60);
            TrainingStore::open(io, Path::new(DIR), Budget::new(1 << 20), wait).map(|_| ())
        }
    });
    drop(first);
    waiting.join().unwrap().unwrap();
}

#[test]
fn run_json_is_replaced_whole() {
    let io: Arc<dyn Io> = Arc::new(Memory::from_image(fresh_image()));
    let (store, _) = open(&io, Path::new(DIR)).unwrap();
    assert_eq!(store.read_run().unwrap(), None);
    for text in ["{\"a\":1}", "{}"] {
        store.write_run(text).unwrap();
        assert_eq!(store.read_run().unwrap().as_deref(), Some(text));
    }
    drop(store);
    assert_eq!(read(&io, Path::new(DIR)).unwrap().read_run().unwrap().as_deref(), Some("{}"));
}

#[test]
fn scratch_keeps_places_apart_and_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let engines = [(memory_engine(), DIR.into()), (mmap_engine(2, false), dir.path().join("s"))];
    for (io, dir) in engines {
        create_store(&io, &dir, CONFIG).unwrap();
        let (store, _) = open(&io, &dir).unwrap();
        let (len, stride) = ((4 << 20) + 100, (4 << 20) + 4096);
        let scratch = store.scratch("boundaries", 2 * stride).unwrap();
        for place in 0..2u8 {
            let mut block = model::HostBytes::zeroed(len);
            block.bytes_mut().fill(place + 1);
            let whole = (&Arc::new(block), 0..len);
            blocking(|done| scratch.write(u64::from(place) * stride, whole, done)).unwrap();
        }
        for place in 0..2u8 {
            let start = u64::from(place) * stride;
            let block = blocking(|done| scratch.read(start, len, done)).unwrap();
            assert!(block.is_writable() && block.bytes().iter().all(|&b| b == place + 1));
        }
        assert_eq!(io.list(&dir.join("scratch")).unwrap(), ["boundaries.scratch"]);
        drop(scratch);
        assert!(io.list(&dir.join("scratch")).unwrap().is_empty());
        std::mem::forget(store.scratch("left", 4096).unwrap());
        drop(store);
        let (_store, _) = open(&io, &dir).unwrap();
        assert!(io.list(&dir.join("scratch")).unwrap().is_empty());
    }
}

#[test]
fn the_index_points_into_live_slots_and_goes_while_training() {
    let io: Arc<dyn Io> = Arc::new(Memory::from_image(fresh_image()));
    let index = Path::new(DIR).join("model.safetensors.index.json");
    let text = || {
        let memory = read(&io, Path::new(DIR)).unwrap();
        String::from_utf8(memory.read_file("model.safetensors.index.json").unwrap()).unwrap()
    };
    assert!(text().contains("layers/embed/a/weight.safetensors"));
    let (store, _) = open(&io, Path::new(DIR)).unwrap();
    assert!(io.exists(&index).unwrap(), "opening changes nothing that the index points to");
    train_step(&store).unwrap();
    assert!(!io.exists(&index).unwrap());
    store.close().unwrap();
    assert!(text().contains("layers/embed/b/weight.safetensors"));
    assert!(text().contains("\"model.layers.1.mlp.up_proj.weight\""));
}

#[test]
fn too_little_disk_is_refused_before_anything_is_written() {
    let memory = Arc::new(Memory::from_image(Image::default()).with_free_bytes(1000));
    let io: Arc<dyn Io> = memory.clone();
    let error = create_store(&io, Path::new(DIR), CONFIG).unwrap_err();
    let StoreError::NoSpace { needed, available: 1000, .. } = error else {
        panic!("{error}");
    };
    // Two slots of three planes, 4 bytes each.
    assert!(needed > 2 * 3 * 4 * table().elements() as u64);
    let missing = store::show_bytes(needed - 1000);
    assert!(missing.ends_with(" MB") && error.to_string().contains(&missing), "{error}");
    assert!(memory.image().files.is_empty());
}

#[test]
fn a_directory_with_contents_is_refused() {
    let io: Arc<dyn Io> = Arc::new(Memory::from_image(fresh_image()));
    let error = create_store(&io, Path::new(DIR), CONFIG).unwrap_err();
    assert!(matches!(&error, StoreError::Invalid(text) if text.contains("already")), "{error}");
    let error = create_store(&io, Path::new("/disk"), CONFIG).unwrap_err();
    assert!(matches!(&error, StoreError::Invalid(text) if text.contains("not empty")), "{error}");
}

#[test]
fn a_dropped_writer_removes_what_it_made() {
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("s");
    let table = table();
    let new = NewStore {
        config_json: CONFIG,
        table: &table,
        layout: StateLayout::F32,
        files: vec![],
        defaults: Default::default(),
        spread: Spread::default(),
    };
    let io = mmap_engine(1, true);
    let mut writer = create(Arc::clone(&io), &target, &new).unwrap();
    writer.write_weights(LayerId(0), 0, &[1.0]).unwrap();
    let error = writer.finish().unwrap_err();
    assert!(error.to_string().contains("got 1 of its 320 weights"), "{error}");
    assert!(!target.exists());
}

#[test]
fn bad_file_names_are_refused() {
    let table = table();
    for name in ["../x", "store.json", "a/b", "", ".", "/etc/x"] {
        let files = vec![(name.to_owned(), vec![])];
        let (layout, defaults) = (StateLayout::F32, Default::default());
        let new = NewStore {
            config_json: CONFIG,
            table: &table,
            layout,
            files,
            defaults,
            spread: Spread::default(),
        };
        let made = create(memory_engine(), Path::new(DIR), &new);
        assert!(matches!(made, Err(StoreError::Invalid(_))), "{name}");
    }
}

#[test]
fn what_is_no_store_is_named() {
    let io = memory_engine();
    let error = ReadingStore::open(Arc::clone(&io), Path::new("/none"), Duration::ZERO);
    assert!(error.unwrap_err().to_string().contains("is not a store"));
    let mut image = fresh_image();
    image.files.retain(|path, _| path.extension().is_none_or(|e| e != "log" && e != "mirror"));
    let io: Arc<dyn Io> = Arc::new(Memory::from_image(image));
    let error = open(&io, Path::new(DIR)).unwrap_err();
    assert!(matches!(&error, StoreError::Invalid(text) if text.contains("unfinished")), "{error}");
}
