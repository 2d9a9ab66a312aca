//! Damage: what finds it, what tells of it, what makes good for it.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use model::{Budget, LayerId};
use store::{
    Image, Io, Memory, PREVIOUS, ReadingStore, Recovery, RollBack, StoreError, TrainingStore,
    mmap_engine,
};

use crate::history::{contents, ids, trained};
use crate::lifecycle::TWO_CHUNKS;
use crate::support::{CONFIG, DIR, assert_contents, create_store, open, read, train_step, weights};

#[test]
fn damage_in_a_live_slot_names_the_snapshot_that_heals_it() {
    let (memory, _, store) = trained(2);
    store.snapshot("two").unwrap();
    train_step(&store).unwrap();
    train_step(&store).unwrap();
    store.snapshot("four").unwrap();
    let slot = store.state().layers[1].slot;
    drop(store);
    let path = Path::new(DIR).join("layers/0").join(slot.name()).join("exp_avg.safetensors");
    let kept = Path::new(DIR).join("snapshots/four/0.exp_avg.safetensors");
    let mut image = memory.image();
    // An image has every name as a file of its own: both are hurt.
    for path in [&path, &kept] {
        *image.files.get_mut(path).unwrap().last_mut().unwrap() ^= 1;
    }
    let hurt: Arc<dyn Io> = Arc::new(Memory::from_image(image.clone()));
    let damage = read(&hurt, Path::new(DIR)).unwrap().verify(|_, _| {}).unwrap();
    let hurt_files: Vec<_> = damage.iter().map(|one| &one.file).collect();
    assert_eq!(hurt_files, [&path, &kept]);
    assert_eq!(damage[0].healed_by, ["two", PREVIOUS]);
    let (store, _) = open(&hurt, Path::new(DIR)).unwrap();
    store.rollback(RollBack::Snapshot("two"), Some(&ids(&[1])), |_, _| {}).unwrap();
    drop(store);
    // The other snapshot's file still is.
    let damage = read(&hurt, Path::new(DIR)).unwrap().verify(|_, _| {}).unwrap();
    assert_eq!((damage.len(), &damage[0].file), (1, &kept), "{damage:?}");
    assert!(damage[0].healed_by.is_empty());
    let (store, _) = open(&hurt, Path::new(DIR)).unwrap();
    let before = store.state();
    let back = store.rollback(RollBack::Snapshot("four"), Some(&ids(&[1])), |_, _| {});
    assert!(matches!(back, Err(StoreError::Damaged { .. })), "{back:?}");
    assert_eq!(store.state(), before);
    // A snapshot whose record is damaged is told of and in nobody's way.
    image.files.get_mut(&Path::new(DIR).join("snapshots/two/record")).unwrap()[30] ^= 1;
    let hurt: Arc<dyn Io> = Arc::new(Memory::from_image(image));
    let (whole, unusable) = read(&hurt, Path::new(DIR)).unwrap().snapshots().unwrap();
    assert_eq!((whole.len(), unusable.len()), (1, 1));
    assert!(unusable[0].contains("two") && unusable[0].contains("no valid record"), "{unusable:?}");
}

/// Ways to make a live slot unusable that an opening notices.
const BREAKAGES: [fn(&mut Image, &Path); 4] = [
    |image, file| drop(image.files.remove(file)),
    |image, file| image.files.get_mut(file).unwrap().truncate(100),
    |image, file| image.files.get_mut(file).unwrap()[9] = b'x',
    |image, file| drop(image.files.remove(&file.with_file_name("hashes"))),
];

#[test]
fn a_live_slot_that_cannot_be_opened_is_told_of_and_healed() {
    for breakage in BREAKAGES {
        let (memory, _, store) = trained(2);
        store.snapshot("two").unwrap();
        train_step(&store).unwrap();
        train_step(&store).unwrap();
        let now = store.state();
        drop(store);
        let file = |layer: &str, at: usize| {
            let slot = now.layers[at].slot.name();
            Path::new(DIR).join("layers").join(layer).join(slot).join("weight.safetensors")
        };
        let mut image = memory.image();
        breakage(&mut image, &file("0", 1));
        for (name, layers) in
            [("two", None), (PREVIOUS, None), ("two", Some(ids(&[1]))), (PREVIOUS, Some(ids(&[1])))]
        {
            let hurt: Arc<dyn Io> = Arc::new(Memory::from_image(image.clone()));
            let refused = open(&hurt, Path::new(DIR)).map(drop);
            assert!(matches!(refused, Err(StoreError::Damaged { .. })), "{refused:?}");
            let (reading, wait) = (Arc::clone(&hurt), Duration::ZERO);
            let found = ReadingStore::open_to_verify(reading, Path::new(DIR), wait).unwrap();
            let damage = found.verify(|_, _| {}).unwrap();
            assert_eq!((damage.len(), damage[0].layer), (1, Some(LayerId(1))), "{damage:?}");
            assert_eq!(damage[0].healed_by, ["two", PREVIOUS]);
            assert!(matches!(found.check_weights(), Err(StoreError::Damaged { .. })));
            drop(found);
            let (store, _) = open_to_heal(&hurt).unwrap();
            let to = if name == PREVIOUS { RollBack::Previous } else { RollBack::Snapshot(name) };
            // What leaves the layer as it is is refused, and nothing else can be committed.
            let other = store.rollback(to, Some(&ids(&[2])), |_, _| {});
            assert!(matches!(other, Err(StoreError::Damaged { .. })), "{other:?}");
            let locked = store.lock(&ids(&[0]));
            assert!(matches!(locked, Err(StoreError::Damaged { .. })), "{locked:?}");
            assert_eq!(store.state(), now);
            store.rollback(to, layers.as_deref(), |_, _| {}).unwrap();
            let step = if name == PREVIOUS { 3 } else { 2 };
            match layers {
                None => assert_contents(&store, step),
                Some(_) => assert_eq!(contents(&store.state())[0], contents(&now)[0]),
            }
            drop(store);
            assert_eq!(read(&hurt, Path::new(DIR)).unwrap().verify(|_, _| {}).unwrap(), []);
            let (store, _) = open(&hurt, Path::new(DIR)).unwrap();
            train_step(&store).unwrap();
            assert_contents(&store, if layers.is_some() { 5 } else { step + 1 });
        }
    }
}

/// Only locked layers are compared when they are read for the sweeps.
#[test]
fn a_locked_layer_that_rots_while_the_store_is_open_is_not_handed_out() {
    let temporary = tempfile::tempdir().unwrap();
    let dir = temporary.path().join("s");
    let io = mmap_engine(1, true);
    create_store(&io, &dir, TWO_CHUNKS).unwrap();
    let (store, _) = open(&io, &dir).unwrap();
    train_step(&store).unwrap();
    let layer = LayerId(0);
    store.lock(&[layer]).unwrap();
    store.check_locked(|_, _| {}).unwrap();
    let slot = store.state().layers[0].slot;
    let elements = store.table().layer(layer).elements();
    let read =
        |elements: std::ops::Range<usize>| weights(&store, (layer, slot), elements).map(drop);
    read(0..elements).unwrap();
    let file = dir.join("layers/embed").join(slot.name()).join("weight.safetensors");
    let bytes = std::fs::OpenOptions::new().write(true).open(file).unwrap();
    let last = bytes.metadata().unwrap().len() - 1;
    std::os::unix::fs::FileExt::write_all_at(&bytes, &[0x55], last).unwrap();
    // Chunks that are read in part cannot be compared, nor need others be.
    read(0..elements - 1).unwrap();
    let found = read(0..elements);
    assert!(matches!(found, Err(StoreError::Damaged { .. })), "{found:?}");
    assert!(matches!(store.check(), Err(StoreError::Poisoned { damaged: true, .. })));
    drop(store);
    let (store, _) = open(&io, &dir).unwrap();
    assert!(matches!(store.check_locked(|_, _| {}), Err(StoreError::Damaged { .. })));
    // Nor is a rotten layer locked.
    drop(store);
    let (store, _) = open(&io, &dir).unwrap();
    store.unlock(&[layer]).unwrap();
    assert!(matches!(store.lock(&[layer]), Err(StoreError::Damaged { .. })));
}

/// A rotten layer behind a torn record is found when the store opens.
#[test]
fn rot_behind_a_torn_record_is_healed() {
    let (memory, _, store) = trained(2);
    store.snapshot("two").unwrap();
    train_step(&store).unwrap();
    train_step(&store).unwrap();
    let slot = store.state().layers[1].slot.name();
    drop(store);
    let mut image = memory.image();
    let live = Path::new(DIR).join("layers/0").join(slot).join("exp_avg.safetensors");
    *image.files.get_mut(&live).unwrap().last_mut().unwrap() ^= 1;
    for (_, log) in
        image.files.iter_mut().filter(|(path, _)| path.starts_with("/disk/store/commit"))
    {
        log.extend([7; 30]);
    }
    let hurt: Arc<dyn Io> = Arc::new(Memory::from_image(image));
    let refused = open(&hurt, Path::new(DIR)).map(drop);
    assert!(matches!(refused, Err(StoreError::Damaged { .. })), "{refused:?}");
    let (store, _) = open_to_heal(&hurt).unwrap();
    store.rollback(RollBack::Snapshot("two"), None, |_, _| {}).unwrap();
    assert_contents(&store, 2);
    train_step(&store).unwrap();
    assert_contents(&store, 3);
}

fn open_to_heal(io: &Arc<dyn Io>) -> Result<(TrainingStore, Recovery), StoreError> {
    let budget = Budget::new(1 << 30);
    TrainingStore::open_to_heal(Arc::clone(io), Path::new(DIR), budget, Duration::ZERO)
}

/// Training is deterministic: a run that went back comes to the same hashes in other files.
#[test]
fn equal_contents_in_two_files_are_two_versions() {
    for hurt_live in [true, false] {
        let temporary = tempfile::tempdir().unwrap();
        let dir = temporary.path().join("s");
        let io = mmap_engine(1, true);
        create_store(&io, &dir, CONFIG).unwrap();
        let (store, _) = open(&io, &dir).unwrap();
        train_step(&store).unwrap();
        store.snapshot("one").unwrap();
        train_step(&store).unwrap();
        store.snapshot("two").unwrap();
        store.rollback(RollBack::Snapshot("one"), None, |_, _| {}).unwrap();
        train_step(&store).unwrap();
        let (now, slot) = (store.state(), store.state().layers[1].slot);
        drop(store);
        let live = dir.join("layers/0").join(slot.name()).join("exp_avg.safetensors");
        let kept = dir.join("snapshots/two/0.exp_avg.safetensors");
        assert!(!io.is_same(&live, &kept).unwrap());
        let hurt = if hurt_live { &live } else { &kept };
        let mut bytes = std::fs::read(hurt).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        std::fs::write(hurt, bytes).unwrap();
        let damage = read(&io, &dir).unwrap().verify(|_, _| {}).unwrap();
        assert_eq!((damage.len(), &damage[0].file), (1, hurt), "{damage:?}");
        let (store, _) = open(&io, &dir).unwrap();
        let back = store.rollback(RollBack::Snapshot("two"), Some(&ids(&[1])), |_, _| {});
        assert_eq!(contents(&store.state()), contents(&now));
        drop(store);
        if hurt_live {
            back.unwrap();
            assert_eq!(damage[0].healed_by, ["one", "two", PREVIOUS]);
            assert_eq!(read(&io, &dir).unwrap().verify(|_, _| {}).unwrap(), []);
        } else {
            assert!(matches!(back, Err(StoreError::Damaged { .. })), "{back:?}");
        }
    }
}
