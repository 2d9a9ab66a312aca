//! Layers on two drives, with every call to the disk failing in turn.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use model::StateLayout;
use store::{
    Injection, Io, NewStore, RollBack, Spread, StoreError, TrainingStore, create, injected_engine,
    mmap_engine,
};

use crate::support::{CONFIG, assert_contents, open, read, table, train_step, value};

struct Places {
    _dir: tempfile::TempDir,
    home: PathBuf,
    away: PathBuf,
}

impl Places {
    fn new() -> Places {
        let dir = tempfile::tempdir().unwrap();
        let (home, away) = (dir.path().join("home"), dir.path().join("away"));
        Places { _dir: dir, home, away }
    }

    fn create(&self, io: &Arc<dyn Io>) -> Result<(), StoreError> {
        let table = table();
        let spread = Spread { home: 1.0, others: vec![(self.away.clone(), 1.0)] };
        let (layout, defaults) = (StateLayout::F32, Default::default());
        let new = NewStore {
            config_json: CONFIG,
            table: &table,
            layout,
            files: vec![],
            defaults,
            spread,
        };
        let mut writer = create(Arc::clone(io), &self.home, &new)?;
        for layer in table.layers() {
            let values = (0..layer.elements()).map(|i| value(layer.id, model::Plane::Weight, 0, i));
            writer.write_weights(layer.id, 0, &values.collect::<Vec<_>>())?;
        }
        writer.finish()
    }

    /// Layers whose directories are links.
    fn links(&self) -> Vec<String> {
        let entries = fs::read_dir(self.home.join("layers")).unwrap().map(|entry| entry.unwrap());
        let links = entries.filter(|entry| entry.file_type().unwrap().is_symlink());
        let mut names: Vec<_> = links.map(|e| e.file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    /// The store, whose `nth` call after its opening fails, and whether it did.
    fn open_to_fail(&self, nth: u64) -> (TrainingStore, impl Fn() -> bool) {
        let (io, calls) = failing(0);
        drop(open(&io, &self.home).unwrap());
        let nth = calls.load(Ordering::Relaxed) + nth;
        let (io, calls) = failing(nth);
        let (store, _) = open(&io, &self.home).unwrap();
        (store, move || calls.load(Ordering::Relaxed) >= nth)
    }

    /// What snapshots keep on the other drive.
    fn kept(&self) -> usize {
        let dir = |name: &String| self.away.join(name).join("snapshots/s");
        let count = |dir: PathBuf| fs::read_dir(dir).map_or(0, Iterator::count);
        self.links().iter().map(dir).map(count).sum()
    }
}

/// An engine whose `nth` call of any kind fails, and how many there were.
fn failing(nth: u64) -> (Arc<dyn Io>, Arc<AtomicU64>) {
    let calls = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&calls);
    let fail = move |_: &str| {
        let call = counted.fetch_add(1, Ordering::Relaxed) + 1;
        (call == nth).then_some(Injection::Eio)
    };
    (injected_engine(mmap_engine(1, true), Arc::new(fail)), calls)
}

fn calm() -> Arc<dyn Io> {
    mmap_engine(1, true)
}

fn is_gone(dir: &Path) -> bool {
    !dir.exists()
}

#[test]
fn a_creation_that_fails_anywhere_leaves_nothing_on_either_drive() {
    for nth in 1.. {
        let places = Places::new();
        let (io, calls) = failing(nth);
        let made = places.create(&io);
        if calls.load(Ordering::Relaxed) < nth {
            made.unwrap();
            assert_eq!(places.links(), ["0", "head"].map(str::to_owned)[..].to_vec());
            let (store, _) = open(&calm(), &places.home).unwrap();
            assert_contents(&store, 0);
            return;
        }
        // Where the failing call was one that clears away, something stays that opening refuses.
        if made.is_err() {
            let left = !is_gone(&places.home) || !is_gone(&places.away);
            assert!(!left || read(&calm(), &places.home).is_err(), "call {nth}");
        }
    }
}

#[test]
fn a_snapshot_that_fails_anywhere_is_no_snapshot_and_can_be_taken_again() {
    let places = Places::new();
    places.create(&calm()).unwrap();
    for nth in 1.. {
        let (store, _) = open(&calm(), &places.home).unwrap();
        train_step(&store).unwrap();
        let step = store.state().step.0;
        store.close().unwrap();
        let (store, struck) = places.open_to_fail(nth);
        let taken = store.snapshot("s");
        let struck = struck();
        drop(store);
        let (store, _) = open(&calm(), &places.home).unwrap();
        let known = store.snapshots().unwrap().0.len();
        assert_eq!(known, usize::from(taken.is_ok()), "call {nth}: {taken:?}");
        assert_eq!(places.kept() > 0, taken.is_ok(), "call {nth}: {taken:?}");
        if taken.is_err() {
            store.snapshot("s").unwrap();
        }
        train_step(&store).unwrap();
        train_step(&store).unwrap();
        assert_contents(&store, step + 2);
        store.rollback(RollBack::Snapshot("s"), None, |_, _| {}).unwrap();
        assert_contents(&store, step);
        store.remove_snapshot("s").unwrap();
        assert_eq!(places.kept(), 0);
        if !struck {
            assert!(nth > 40, "{nth}");
            return;
        }
    }
}

#[test]
fn a_removal_that_fails_anywhere_is_made_again_by_the_next_opening() {
    let places = Places::new();
    places.create(&calm()).unwrap();
    for nth in 1.. {
        let (store, _) = open(&calm(), &places.home).unwrap();
        if store.snapshots().unwrap().0.is_empty() {
            store.snapshot("s").unwrap();
        }
        store.close().unwrap();
        let (store, struck) = places.open_to_fail(nth);
        let removed = store.remove_snapshot("s");
        let struck = struck();
        drop(store);
        let (store, _) = open(&calm(), &places.home).unwrap();
        let known = store.snapshots().unwrap().0.len();
        assert!(known == 0 || removed.is_err(), "call {nth}");
        assert_eq!(places.kept() > 0, known == 1, "call {nth}: {removed:?}");
        assert_contents(&store, 0);
        store.close().unwrap();
        if !struck {
            assert!(nth > 10, "{nth}");
            return;
        }
    }
}
