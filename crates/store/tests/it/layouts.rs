//! Every layout of the state on every engine: contents, hashes, snapshots, going back, damage.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use model::{Budget, LayerId, Precision, Slot, StateLayout, Weights};
use store::{
    AfterUse, Io, Memory, RollBack, StoreError, TrainingStore, blocking, direct_engine,
    memory_engine, mmap_engine,
};

use crate::support::{
    CONFIG, DIR, LOCK_WAIT, assert_contents, contents, create_store_in, open, read, train_step,
    weights,
};

/// 1,201 rows of 1,024: two chunks, the second of which ends inside a page and inside a block.
const TWO_CHUNKS: &str = r#"{"model_type":"llama","vocab_size":1201,"hidden_size":1024,
    "intermediate_size":96,"num_hidden_layers":1,"num_attention_heads":2,"num_key_value_heads":1,
    "head_dim":8,"max_position_embeddings":32}"#;

type Engine = fn() -> Arc<dyn Io>;

#[test]
fn state_comes_back_as_it_was_written() {
    let home = tempfile::tempdir().unwrap();
    let engines: [(&str, Engine); 3] = [
        ("memory", memory_engine),
        ("mmap", || mmap_engine(2, true)),
        ("direct", || direct_engine(8)),
    ];
    for layout in StateLayout::ALL {
        for (name, engine) in engines {
            let (io, dir) = (engine(), home.path().join(format!("{name}-{layout}")));
            let dir = if name == "memory" { PathBuf::from(DIR) } else { dir };
            create_store_in(layout, &io, &dir, TWO_CHUNKS).unwrap();
            let (store, _) = open(&io, &dir).unwrap();
            assert_eq!(store.layout(), layout);
            assert_contents(&store, 0);
            train_step(&store).unwrap();
            train_step(&store).unwrap();
            assert_contents(&store, 2);
            store.close().unwrap();
            let reader = read(&io, &dir).unwrap();
            assert_eq!((reader.layout(), reader.verify(|_, _| {}).unwrap()), (layout, vec![]));
            reader.check_weights().unwrap();
        }
    }
}

#[test]
fn weights_come_exact_or_as_their_bf16_plane() {
    for layout in StateLayout::ALL {
        let io = memory_engine();
        create_store_in(layout, &io, Path::new(DIR), TWO_CHUNKS).unwrap();
        let (store, _) = open(&io, Path::new(DIR)).unwrap();
        let at = (LayerId(0), Slot::A);
        let range = 1_000_003..1_100_000;
        let stored = contents(layout, at.0, 0, 0..1201 * 1024);
        let planes = layout.weight_planes(Precision::Exact).iter();
        let stored = Weights::from_planes(
            layout,
            Precision::Exact,
            planes.map(|spec| copy(stored.plane(spec.plane).bytes())),
        );
        let mut expected = vec![0.0; range.len()];
        stored.copy_f32(range.start, &mut expected);
        assert_eq!(weights(&store, at, range.clone()).unwrap(), expected);

        let rounded = blocking(|done| {
            store.read_weights(at, range.clone(), Precision::Bf16, AfterUse::Forget, done);
        });
        let rounded = rounded.unwrap();
        let bf16 = |v: &f32| model::from_bf16(model::to_bf16(*v));
        match rounded {
            Weights::F32(values) if layout == StateLayout::F32 => {
                assert_eq!(values.f32s(), expected);
            }
            Weights::Bf16(_) if layout != StateLayout::F32 => {
                let rounded = rounded.into_f32();
                assert!(rounded.f32s().iter().copied().eq(expected.iter().map(bf16)), "{layout}");
            }
            other => panic!("{layout}: {other:?}"),
        }
        let rows = blocking(|done| store.gather_rows(at, 1024, &[7, 0], Precision::Bf16, done));
        assert_eq!(rows.unwrap().len(), 2048);
    }
}

fn copy(bytes: &[u8]) -> model::HostBytes {
    let mut block = model::HostBytes::zeroed(bytes.len());
    block.bytes_mut().copy_from_slice(bytes);
    block
}

#[test]
fn damage_of_every_plane_is_named_and_healed_by_a_snapshot() {
    for layout in StateLayout::ALL {
        for spec in layout.planes() {
            let memory = Arc::new(Memory::from_image(store::Image::default()));
            let io: Arc<dyn Io> = memory.clone();
            create_store_in(layout, &io, Path::new(DIR), CONFIG).unwrap();
            let (store, _) = open(&io, Path::new(DIR)).unwrap();
            train_step(&store).unwrap();
            store.snapshot("one").unwrap();
            train_step(&store).unwrap();
            store.close().unwrap();
            let mut image = memory.image();
            let file = format!("layers/0/a/{}.safetensors", spec.plane.name());
            let path = Path::new(DIR).join(&file);
            let last = image.files[&path].len() - 1;
            image.files.get_mut(&path).unwrap()[last] ^= 1;

            let io: Arc<dyn Io> = Arc::new(Memory::from_image(image));
            let found = read(&io, Path::new(DIR)).unwrap().verify(|_, _| {}).unwrap();
            let [damage] = found.as_slice() else { panic!("{layout} {file}: {found:?}") };
            assert!(damage.file.ends_with(&file) && damage.tensor.contains("norm"), "{damage:?}");
            assert!(damage.healed_by.contains(&"one".to_owned()), "{damage:?}");

            let (store, _) = open(&io, Path::new(DIR)).unwrap();
            let chunk = blocking(|done| store.read_chunk(LayerId(1), Slot::A, 0, done)).unwrap();
            let error = store.check_chunk(LayerId(1), Slot::A, 0, chunk.hashes()).unwrap_err();
            assert!(matches!(&error, StoreError::Damaged { file: f, .. } if f.ends_with(&file)));
            drop(store);
            let (store, _) = open(&io, Path::new(DIR)).unwrap();
            store.rollback(RollBack::Snapshot("one"), None, |_, _| {}).unwrap();
            assert_contents(&store, 1);
        }
    }
}

#[test]
fn rot_in_a_locked_layer_is_found_in_the_plane_that_is_read() {
    let home = tempfile::tempdir().unwrap();
    for plane in ["weight", "weight_low"] {
        let (io, dir) = (mmap_engine(1, true), home.path().join(plane));
        create_store_in(StateLayout::Split8, &io, &dir, TWO_CHUNKS).unwrap();
        let (store, _) = open(&io, &dir).unwrap();
        store.lock(&[LayerId(0)]).unwrap();
        let file = dir.join(format!("layers/embed/a/{plane}.safetensors"));
        let mut bytes = fs::read(&file).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        fs::write(&file, bytes).unwrap();
        let read = |precision| {
            let at = (LayerId(0), Slot::A);
            let all = 0..1201 * 1024;
            blocking(|done| store.read_weights(at, all, precision, AfterUse::Forget, done))
        };
        let high = read(Precision::Bf16).map(drop);
        assert_eq!(high.is_err(), plane == "weight", "{high:?}");
        let exact = read(Precision::Exact).map(drop);
        assert!(exact.unwrap_err().to_string().contains(plane));
    }
}

#[test]
fn a_store_of_another_layout_needs_the_bytes_it_says() {
    for layout in StateLayout::ALL {
        let home = tempfile::tempdir().unwrap();
        let (io, dir) = (mmap_engine(1, true), home.path().join("s"));
        create_store_in(layout, &io, &dir, TWO_CHUNKS).unwrap();
        let (store, _): (TrainingStore, _) =
            TrainingStore::open(Arc::clone(&io), &dir, Budget::new(1 << 20), LOCK_WAIT).unwrap();
        let elements = store.table().elements();
        let on_disk: u64 =
            walk(&dir.join("layers")).iter().map(|f| f.metadata().unwrap().len()).sum();
        let state = 2 * layout.bytes(elements) as u64;
        let files = 2 * store.table().len() as u64 * (layout.planes().len() as u64 + 1);
        assert!((state..state + files * 4200).contains(&on_disk), "{layout}: {on_disk} of {state}");
    }
}

fn walk(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    entries.flat_map(|path| if path.is_dir() { walk(&path) } else { vec![path] }).collect()
}
