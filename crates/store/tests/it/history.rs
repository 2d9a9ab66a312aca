//! Locks, snapshots, going back; each also with power failing at every write, sync and name change.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use model::{LayerId, Slot};
use store::{
    Faulty, Image, Injection, Io, Memory, OpKind, RollBack, State, StoreError, TrainingStore,
    injected_engine, mmap_engine,
};

use crate::support::{
    CONFIG, DIR, assert_contents, create_store, fresh_image, open, read, table, train_step,
};

/// A disk in memory with a store at step `steps`, and a second look at the disk.
pub(crate) fn trained(steps: u64) -> (Arc<Memory>, Arc<dyn Io>, TrainingStore) {
    let memory = Arc::new(Memory::from_image(fresh_image()));
    let io: Arc<dyn Io> = memory.clone();
    let (store, _) = open(&io, Path::new(DIR)).unwrap();
    for _ in 0..steps {
        train_step(&store).unwrap();
    }
    (memory, io, store)
}

pub(crate) fn ids(layers: &[u32]) -> Vec<LayerId> {
    layers.iter().map(|&layer| LayerId(layer)).collect()
}

fn locked(state: &State) -> Vec<bool> {
    state.layers.iter().map(|layer| layer.locked).collect()
}

/// What a layer is, wherever it lies.
pub(crate) fn contents(state: &State) -> Vec<(u64, [u64; 3])> {
    state.layers.iter().map(|layer| (layer.t, layer.hashes)).collect()
}

fn files_of(memory: &Memory, layer: &str, slot: Slot) -> usize {
    let dir = Path::new(DIR).join("layers").join(layer).join(slot.name());
    memory.image().files.keys().filter(|path| path.parent() == Some(&dir)).count()
}

#[test]
fn a_locked_layer_gives_its_place_back_after_the_next_commit_and_gets_it_again() {
    let (memory, io, store) = trained(2);
    let before = store.state();
    store.lock(&ids(&[0])).unwrap();
    assert_eq!(locked(&store.state()), [true, false, false, false]);
    assert_eq!((contents(&store.state()), store.state().step), (contents(&before), before.step));
    let idle = before.layers[0].slot.other();
    assert_eq!(files_of(&memory, "embed", idle), 4, "only after the next commit");
    train_step(&store).unwrap();
    train_step(&store).unwrap();
    assert_eq!(files_of(&memory, "embed", idle), 0);
    assert_eq!(contents(&store.state())[0], contents(&before)[0]);
    store.close().unwrap();
    let (store, recovery) = open(&io, Path::new(DIR)).unwrap();
    assert_eq!(recovery.warnings, Vec::<String>::new());
    assert_eq!(read_verified(&memory), 4);
    train_step(&store).unwrap();
    assert_eq!(store.room().unwrap().needed, 16 << 20, "a locked layer needs no room");
    store.unlock(&ids(&[0])).unwrap();
    assert_eq!(files_of(&memory, "embed", idle), 4);
    assert_eq!(locked(&store.state()), [false; 4]);
    train_step(&store).unwrap();
    assert_ne!(contents(&store.state())[0], contents(&before)[0]);
}

/// The step that a reader finds, every byte compared.
fn read_verified(memory: &Memory) -> u64 {
    let io: Arc<dyn Io> = Arc::new(Memory::from_image(memory.image()));
    let store = read(&io, Path::new(DIR)).unwrap();
    assert_eq!(store.verify(|_, _| {}).unwrap(), []);
    store.state().step.0
}

#[test]
fn one_layer_stays_unlocked_and_unlocking_without_room_changes_nothing() {
    let (memory, _, store) = trained(1);
    let all = ids(&[0, 1, 2, 3]);
    assert!(matches!(store.lock(&all), Err(StoreError::Invalid(_))));
    store.lock(&all[..3]).unwrap();
    assert!(matches!(store.lock(&all[3..]), Err(StoreError::Invalid(_))));
    for _ in 0..2 {
        train_step(&store).unwrap();
    }
    store.close().unwrap();
    let full: Arc<dyn Io> = Arc::new(Memory::from_image(memory.image()).with_free_bytes(1000));
    let (store, _) = open(&full, Path::new(DIR)).unwrap();
    let before = store.state();
    let error = store.unlock(&all[..2]).unwrap_err();
    assert!(
        matches!(error, StoreError::NoSpace { needed, available: 1000, .. } if needed > 20_000)
    );
    assert_eq!(store.state(), before);
    train_step(&store).unwrap();
}

#[test]
fn a_snapshot_stays_what_it_was_and_the_store_goes_on() {
    let (memory, io, store) = trained(3);
    let before = store.state();
    store.write_run("{\"n\":1}").unwrap();
    store.snapshot("first").unwrap();
    assert!(matches!(store.snapshot("first"), Err(StoreError::Invalid(_))));
    for name in ["", ".x", "previous", "a/b", "a b", "ä"] {
        assert!(matches!(store.snapshot(name), Err(StoreError::Invalid(_))), "{name}");
    }
    // The next step but one writes what the snapshot has a name for.
    assert!(store.room().unwrap().needed > 16 << 20);
    store.write_run("{\"n\":2}").unwrap();
    for step in 4..=7 {
        train_step(&store).unwrap();
        assert_contents(&store, step);
    }
    assert_eq!(store.room().unwrap().needed, 16 << 20);
    let (snapshots, unusable) = store.snapshots().unwrap();
    assert_eq!((snapshots.len(), unusable), (1, Vec::new()));
    assert_eq!((snapshots[0].name.as_str(), &snapshots[0].state), ("first", &before));
    assert_eq!(store.run_of_snapshot("first").unwrap().as_deref(), Some("{\"n\":1}"));
    assert_eq!(read_verified(&memory), 7);
    store.rollback(RollBack::Snapshot("first"), None, |_, _| {}).unwrap();
    assert_contents(&store, 3);
    assert_eq!(contents(&store.state()), contents(&before));
    assert!(store.state().attempt.0 >= 7);
    for step in 4..=6 {
        train_step(&store).unwrap();
        assert_contents(&store, step);
    }
    // It can be gone back to again, and in another opening.
    drop(store);
    let (store, _) = open(&io, Path::new(DIR)).unwrap();
    store.rollback(RollBack::Snapshot("first"), None, |_, _| {}).unwrap();
    assert_contents(&store, 3);
    let error = store.rollback(RollBack::Snapshot("second"), None, |_, _| {}).unwrap_err();
    assert!(error.to_string().contains("there are: first"), "{error}");
    store.remove_snapshot("first").unwrap();
    assert!(store.snapshots().unwrap().0.is_empty());
    assert_contents(&store, 3);
    train_step(&store).unwrap();
    assert_contents(&store, 4);
}

#[test]
fn chosen_layers_go_back_alone() {
    let (_, _, store) = trained(1);
    store.snapshot("one").unwrap();
    let then = store.state();
    for _ in 0..3 {
        train_step(&store).unwrap();
    }
    store.lock(&ids(&[2])).unwrap();
    let now = store.state();
    store.rollback(RollBack::Snapshot("one"), Some(&ids(&[0, 2])), |_, _| {}).unwrap();
    let after = store.state();
    let expected = [&then, &now, &then, &now].map(contents);
    for (layer, expected) in expected.iter().enumerate() {
        assert_eq!(contents(&after)[layer], expected[layer], "layer {layer}");
    }
    assert_eq!((after.step, after.index, locked(&after)), (now.step, now.index, locked(&now)));
    store.close().unwrap();
}

#[test]
fn the_previous_commit_can_be_gone_back_to_until_it_is_overwritten() {
    let (memory, io, store) = trained(4);
    drop(store);
    // As the command does it: in an opening of its own, and after a refusal.
    open(&io, Path::new(DIR)).unwrap();
    let (store, _) = open(&io, Path::new(DIR)).unwrap();
    let mut seen = (0, 0);
    store.rollback(RollBack::Previous, None, |done, all| seen = (done, all)).unwrap();
    assert!(seen.0 == seen.1 && seen.0 > 0);
    assert_contents(&store, 3);
    drop(store);
    assert_eq!(read_verified(&memory), 3);
    let (store, _) = open(&io, Path::new(DIR)).unwrap();
    train_step(&store).unwrap();
    assert_contents(&store, 4);
    crate::support::write_layer(&store, LayerId(0), store.state().layers[0].slot.other(), 9)
        .unwrap();
    drop(store);
    let (store, _) = open(&io, Path::new(DIR)).unwrap();
    let error = store.rollback(RollBack::Previous, None, |_, _| {}).unwrap_err();
    assert!(error.to_string().contains("is gone: layer embed was written again"), "{error}");
    assert_contents(&store, 4);
    drop(store);
    let (_, _, fresh) = trained(0);
    let error = fresh.rollback(RollBack::Previous, None, |_, _| {}).unwrap_err();
    assert!(error.to_string().contains("is gone: there was none"), "{error}");
}

#[test]
fn a_snapshot_may_be_taken_while_steps_go_on() {
    let memory = Arc::new(Memory::from_image(fresh_image()));
    // Links so slow that whole steps fit between two of them.
    let slow = |call| (call == "link").then_some(Injection::Delay(Duration::from_millis(2)));
    let io = injected_engine(memory.clone(), Arc::new(slow));
    let (store, _) = open(&io, Path::new(DIR)).unwrap();
    std::thread::scope(|scope| {
        let training = scope.spawn(|| (0..400).try_for_each(|_| train_step(&store)));
        for nth in 0.. {
            if training.is_finished() {
                break;
            }
            let name = format!("s{}", nth % 8);
            if nth >= 8 {
                store.remove_snapshot(&name).unwrap();
            }
            store.snapshot(&name).unwrap();
        }
        training.join().unwrap().unwrap();
    });
    assert_eq!(read_verified(&memory), 400);
}

#[test]
fn naming_a_layer_twice_asks_for_its_room_once() {
    let (memory, _, store) = trained(1);
    store.lock(&ids(&[0])).unwrap();
    for _ in 0..2 {
        train_step(&store).unwrap();
    }
    store.close().unwrap();
    let needed = |layers: &[u32]| {
        let full: Arc<dyn Io> = Arc::new(Memory::from_image(memory.image()).with_free_bytes(0));
        let (store, _) = open(&full, Path::new(DIR)).unwrap();
        match store.unlock(&ids(layers)) {
            Err(StoreError::NoSpace { needed, .. }) => needed,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(needed(&[0, 0]), needed(&[0]));
}

#[test]
fn a_long_log_gives_way_to_a_new_one() {
    let (memory, io, store) = trained(0);
    let logs = || {
        let image = memory.image();
        let logs = image.files.keys().filter(|path| path.starts_with("/disk/store/commit"));
        logs.map(|path| path.file_name().unwrap().to_string_lossy().into_owned())
            .collect::<Vec<_>>()
    };
    let mut state = store.state();
    // Records of a megabyte.
    state.counters = (0..40_000).map(|i| (format!("a counter of many {i:020}"), i)).collect();
    for _ in 0..5 {
        state.step = state.step.next();
        store::blocking(|done| {
            store.commit(store::RecordKind::Skipped, state.clone(), done);
        })
        .unwrap();
    }
    assert_eq!(logs(), ["00000004.log", "00000004.mirror"]);
    assert_eq!(store.state().step.0, 5);
    drop(store);
    let (store, recovery) = open(&io, Path::new(DIR)).unwrap();
    assert_eq!((store.state(), recovery.cut), (state, None));
    assert_eq!(logs(), ["00000005.log", "00000005.mirror"]);
    // What was before the last record outlives its log.
    store.rollback(RollBack::Previous, None, |_, _| {}).unwrap();
    assert_eq!(store.state().step.0, 4);
}

/// What is done to a store at step 2 that has a snapshot of step 1.
type Deed = (&'static str, fn(&TrainingStore) -> Result<(), StoreError>);

const DEEDS: [Deed; 6] = [
    ("lock", |store| store.lock(&ids(&[0, 3]))),
    ("unlock", |store| store.unlock(&ids(&[1]))),
    ("snapshot", |store| store.snapshot("new")),
    ("rollback", |store| store.rollback(RollBack::Snapshot("old"), None, |_, _| {})),
    ("rollback of layers", |store| {
        store.rollback(RollBack::Snapshot("old"), Some(&ids(&[0, 2])), |_, _| {})
    }),
    ("previous", |store| store.rollback(RollBack::Previous, None, |_, _| {})),
];

fn prepared() -> Image {
    let (memory, _, store) = trained(1);
    store.snapshot("old").unwrap();
    train_step(&store).unwrap();
    store.lock(&ids(&[1])).unwrap();
    drop(store);
    memory.image()
}

/// Opens and does the deed; the states before and after, as far as it came.
fn run(io: &Arc<dyn Io>, deed: &Deed) -> Option<(State, Option<State>)> {
    let (store, _) = open(io, Path::new(DIR)).ok()?;
    let before = store.state();
    let done = (deed.1)(&store).is_ok();
    let after = done.then(|| store.state());
    // A failing close changes nothing that was committed.
    let _ = store.close();
    Some((before, after))
}

#[test]
fn power_may_fail_anywhere_in_a_change() {
    let image = prepared();
    for deed in &DEEDS {
        let whole = Arc::new(Faulty::over_memory(image.clone()));
        let io: Arc<dyn Io> = whole.clone();
        let (before, after) = run(&io, deed).unwrap();
        let after = after.unwrap_or_else(|| panic!("{} does not work", deed.0));
        for kind in [OpKind::Write, OpKind::Sync, OpKind::Namespace] {
            for nth in 1..=whole.count(kind) {
                let faulty = Arc::new(Faulty::over_memory(image.clone()));
                faulty.freeze_at(kind, nth);
                let io: Arc<dyn Io> = faulty.clone();
                let done = run(&io, deed).is_some_and(|(_, after)| after.is_some());
                for seed in 0..4 {
                    let place = format!("{} {kind:?} {nth} seed {seed}", deed.0);
                    let crashed = faulty.image_after_crash(seed * 7919 + nth);
                    check(crashed, [&before, &after], done, &place);
                }
            }
        }
    }
}

/// One of two states, whole, and it can be trained; snapshots are whole or not there.
fn check(image: Image, [before, after]: [&State; 2], done: bool, place: &str) {
    let io: Arc<dyn Io> = Arc::new(Memory::from_image(image));
    let seen = read(&io, Path::new(DIR)).unwrap_or_else(|e| panic!("{place}: {e}"));
    let is = |state: &State| {
        (contents(seen.state()), locked(seen.state()), seen.state().step)
            == (contents(state), locked(state), state.step)
    };
    assert!(is(after) || (!done && is(before)), "{place}");
    assert_eq!(seen.verify(|_, _| {}).unwrap(), [], "{place}");
    let (snapshots, unusable) = seen.snapshots().unwrap();
    assert_eq!(unusable, Vec::<String>::new(), "{place}");
    assert_eq!(snapshots[0].name, "old", "{place}");
    let step = seen.state().step.0;
    drop(seen);
    let (store, _) = open(&io, Path::new(DIR)).unwrap_or_else(|e| panic!("{place}: {e}"));
    train_step(&store).unwrap_or_else(|e| panic!("{place}: {e}"));
    train_step(&store).unwrap_or_else(|e| panic!("{place}: {e}"));
    assert_eq!(store.state().step.0, step + 2, "{place}");
    store.rollback(RollBack::Snapshot("old"), None, |_, _| {}).unwrap();
    assert_contents(&store, 1);
}

#[test]
fn snapshots_on_a_real_disk_are_links() {
    use std::os::unix::fs::MetadataExt;
    let temporary = tempfile::tempdir().unwrap();
    let dir = temporary.path().join("s");
    let io = mmap_engine(1, true);
    create_store(&io, &dir, CONFIG).unwrap();
    let (store, _) = open(&io, &dir).unwrap();
    train_step(&store).unwrap();
    store.snapshot("s1").unwrap();
    let links = |path: &str| std::fs::metadata(dir.join(path)).unwrap().nlink();
    let inode = |path: &str| std::fs::metadata(dir.join(path)).unwrap().ino();
    let (live, kept) = ("layers/1/b/weight.safetensors", "snapshots/s1/1.weight.safetensors");
    assert_eq!((links(live), inode(live)), (2, inode(kept)));
    train_step(&store).unwrap();
    train_step(&store).unwrap();
    assert_eq!((links(live), links(kept)), (1, 1));
    store.rollback(RollBack::Snapshot("s1"), None, |_, _| {}).unwrap();
    assert_contents(&store, 1);
    store.close().unwrap();
    assert_eq!(read(&io, &dir).unwrap().verify(|_, _| {}).unwrap(), []);
    // The snapshot is a checkpoint of its own.
    let index = std::fs::read_to_string(dir.join("snapshots/s1/model.safetensors.index.json"));
    let index: serde_json::Value = serde_json::from_str(&index.unwrap()).unwrap();
    for layer in table().layers() {
        let file = index["weight_map"][&layer.tensors[0].name].as_str().unwrap();
        assert!(dir.join("snapshots/s1").join(file).exists(), "{file}");
    }
    for name in ["config.json", "tokenizer.json"] {
        assert!(dir.join("snapshots/s1").join(name).exists(), "{name}");
    }
}
