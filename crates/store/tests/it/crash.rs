//! Power failures: at every sync, write and name change, with several subsets of unsynced bytes.

use std::path::Path;
use std::sync::Arc;

use store::{Faulty, Image, Io, Memory, OpKind, StoreError};

use crate::support::{
    CONFIG, DIR, assert_contents, create_store, fresh_image, open, read, train_step,
};

const STEPS: u64 = 3;
const SEEDS: u64 = 6;
const KINDS: [OpKind; 3] = [OpKind::Write, OpKind::Sync, OpKind::Namespace];

/// Opens, trains, closes; the number of steps whose commit was acknowledged.
fn run(io: &Arc<dyn Io>) -> u64 {
    let mut acknowledged = 0;
    let Ok((store, _)) = open(io, Path::new(DIR)) else { return 0 };
    for _ in 0..STEPS {
        if train_step(&store).is_err() {
            return acknowledged;
        }
        acknowledged += 1;
    }
    // A failing close changes nothing that was committed.
    let _ = store.close();
    acknowledged
}

#[test]
fn every_power_failure_leaves_the_last_or_the_next_step() {
    let image = fresh_image();
    let whole = Arc::new(Faulty::over_memory(image.clone()));
    let io: Arc<dyn Io> = whole.clone();
    assert_eq!(run(&io), STEPS);
    for kind in KINDS {
        let operations = whole.count(kind);
        assert!(operations > 4, "{operations} operations of {kind:?}");
        for nth in 1..=operations {
            let faulty = Arc::new(Faulty::over_memory(image.clone()));
            faulty.freeze_at(kind, nth);
            let io: Arc<dyn Io> = faulty.clone();
            let acknowledged = run(&io);
            assert!(faulty.is_frozen(), "{kind:?} {nth} never came");
            for seed in 0..SEEDS {
                let crashed = faulty.image_after_crash(seed * 7919 + nth);
                let place = format!("{kind:?} {nth} seed {seed}");
                check_recovery(crashed, acknowledged, &place);
            }
        }
    }
}

fn check_recovery(image: Image, acknowledged: u64, place: &str) {
    let io: Arc<dyn Io> = Arc::new(Memory::from_image(image));
    let seen = read(&io, Path::new(DIR)).unwrap_or_else(|e| panic!("{place}: {e}"));
    let step = seen.state().step.0;
    assert!(step == acknowledged || step == acknowledged + 1, "{place}: step {step}");
    assert_eq!(seen.verify(|_, _| {}).unwrap(), [], "{place}");
    drop(seen);
    let (store, recovery) = open(&io, Path::new(DIR)).unwrap_or_else(|e| panic!("{place}: {e}"));
    assert!(recovery.cut.is_none_or(|cut| !cut.rotten), "{place}: a torn append called damage");
    assert_contents(&store, step);
    train_step(&store).unwrap();
    drop(store);
    let (store, recovery) = open(&io, Path::new(DIR)).unwrap();
    assert_eq!(recovery.cut, None, "{place}");
    assert_contents(&store, step + 1);
}

#[test]
fn a_power_failure_while_creating_leaves_a_whole_store_or_a_recognised_rest() {
    let whole = Arc::new(Faulty::over_memory(Image::default()));
    let io: Arc<dyn Io> = whole.clone();
    create_store(&io, Path::new(DIR), CONFIG).unwrap();
    for kind in KINDS {
        for nth in 1..=whole.count(kind) {
            let faulty = Arc::new(Faulty::over_memory(Image::default()));
            faulty.freeze_at(kind, nth);
            let io: Arc<dyn Io> = faulty.clone();
            let created = create_store(&io, Path::new(DIR), CONFIG).is_ok();
            for seed in 0..SEEDS {
                let crashed = faulty.image_after_crash(seed);
                let io: Arc<dyn Io> = Arc::new(Memory::from_image(crashed));
                match read(&io, Path::new(DIR)) {
                    Ok(store) => assert_eq!(store.verify(|_, _| {}).unwrap(), []),
                    Err(StoreError::Invalid(_)) if !created => {}
                    Err(error) => panic!("{kind:?} {nth} seed {seed}: {error}"),
                }
            }
        }
    }
}

#[test]
fn the_imagined_disk_can_lose_unsynced_bytes() {
    // Without this the tests above would pass on a `faulty` engine that loses nothing.
    let faulty = Arc::new(Faulty::over_memory(fresh_image()));
    let io: Arc<dyn Io> = faulty.clone();
    let (store, _) = open(&io, Path::new(DIR)).unwrap();
    let synced = faulty.image_after_crash(0);
    crate::support::write_layer(&store, model::LayerId(0), model::Slot::B, 1).unwrap();
    let images: Vec<_> = (0..32).map(|seed| faulty.image_after_crash(seed)).collect();
    let path = Path::new(DIR).join("layers/embed/b/weight.safetensors");
    let written = std::iter::once(&synced).chain(&images).map(|image| &image.files[&path]);
    let distinct: std::collections::BTreeSet<_> = written.collect();
    assert!(distinct.len() > 3, "{} outcomes", distinct.len());
}
