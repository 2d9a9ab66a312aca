//! Failing disks: what is retried, what poisons, what is reported.

use std::path::Path;
use std::sync::Arc;

use model::{LayerId, Slot};
use store::{Fault, Faulty, Io, OpKind, StoreError, blocking};

use crate::support::{DIR, assert_contents, fresh_image, open, train_step, weights, write_layer};

fn faulty() -> (Arc<Faulty>, Arc<dyn Io>) {
    let faulty = Arc::new(Faulty::over_memory(fresh_image()));
    let io: Arc<dyn Io> = faulty.clone();
    (faulty, io)
}

#[test]
fn a_failed_sync_poisons_until_the_store_is_opened_again() {
    let (faulty, io) = faulty();
    let (store, _) = open(&io, Path::new(DIR)).unwrap();
    faulty.fail(OpKind::Sync, faulty.count(OpKind::Sync) + 3, Fault::Eio);
    assert!(matches!(train_step(&store), Err(StoreError::Io { context: "sync", .. })));
    let syncs = faulty.count(OpKind::Sync);
    let writes = faulty.count(OpKind::Write);
    assert!(matches!(train_step(&store), Err(StoreError::Poisoned { .. })));
    let read = weights(&store, (LayerId(0), Slot::A), 0..1);
    assert!(matches!(read, Err(StoreError::Poisoned { .. })));
    assert!(matches!(store.write_run("{}"), Err(StoreError::Poisoned { .. })));
    assert!(matches!(store.close(), Err(StoreError::Poisoned { .. })));
    assert_eq!((faulty.count(OpKind::Sync), faulty.count(OpKind::Write)), (syncs, writes));
    let (store, _) = open(&io, Path::new(DIR)).unwrap();
    assert_contents(&store, 0);
    train_step(&store).unwrap();
}

#[test]
fn a_log_copy_that_cannot_be_read_is_a_missing_one() {
    // store.json is read first, then the two copies.
    for (copy, read) in [("log", 2), ("mirror", 3)] {
        let (faulty, io) = faulty();
        faulty.fail(OpKind::Read, read, Fault::Eio);
        let (store, recovery) = open(&io, Path::new(DIR)).unwrap();
        assert_contents(&store, 0);
        let named = |w: &&String| w.contains(&format!(".{copy} cannot be read"));
        assert_eq!(recovery.warnings.iter().filter(named).count(), 1, "{recovery:?}");
    }
}

#[test]
fn a_failed_write_fails_the_attempt_and_the_next_one_succeeds() {
    for fault in [Fault::Eio, Fault::Short] {
        let (faulty, io) = faulty();
        let (store, _) = open(&io, Path::new(DIR)).unwrap();
        faulty.fail(OpKind::Write, faulty.count(OpKind::Write) + 2, fault);
        assert!(matches!(train_step(&store), Err(StoreError::Io { context: "write", .. })));
        train_step(&store).unwrap();
        assert_contents(&store, 1);
    }
}

#[test]
fn a_failed_log_write_poisons_and_leaves_the_last_step() {
    let (faulty, io) = faulty();
    let (store, _) = open(&io, Path::new(DIR)).unwrap();
    let before = faulty.count(OpKind::Write);
    train_step(&store).unwrap();
    let per_step = faulty.count(OpKind::Write) - before;
    faulty.fail(OpKind::Write, before + 2 * per_step, Fault::NoSpace);
    assert!(matches!(train_step(&store), Err(StoreError::NoSpace { .. })));
    assert!(matches!(store.check(), Err(StoreError::Poisoned { .. })));
    drop(store);
    // One copy got the record, so the step is there; both would agree on it after a reopening.
    let (store, _) = open(&io, Path::new(DIR)).unwrap();
    assert_contents(&store, 2);
}

#[test]
fn a_failed_read_is_reported_and_can_be_repeated() {
    let (faulty, io) = faulty();
    let (store, _) = open(&io, Path::new(DIR)).unwrap();
    faulty.fail(OpKind::Read, faulty.count(OpKind::Read) + 1, Fault::Eio);
    let read = || weights(&store, (LayerId(0), Slot::A), 0..1);
    assert!(matches!(read(), Err(StoreError::Io { context: "read", .. })));
    read().unwrap();
}

#[test]
fn a_mismatch_poisons() {
    let (_, io) = faulty();
    let (store, _) = open(&io, Path::new(DIR)).unwrap();
    let mut chunk = blocking(|done| store.read_chunk(LayerId(1), Slot::A, 0, done)).unwrap();
    chunk.planes_mut()[1].bytes_mut()[3] ^= 1;
    let error = store.check_chunk(LayerId(1), Slot::A, 0, chunk.hashes()).unwrap_err();
    assert!(
        matches!(error, StoreError::Damaged { ref file, .. }
        if file.ends_with("layers/0/a/exp_avg.safetensors")),
        "{error}"
    );
    assert!(matches!(
        write_layer(&store, LayerId(1), Slot::B, 1),
        Err(StoreError::Poisoned { .. })
    ));
}

#[test]
fn a_full_disk_while_creating_leaves_nothing() {
    for nth in [1, 5, 20] {
        let faulty = Arc::new(Faulty::over_memory(store::Image::default()));
        faulty.fail(OpKind::Namespace, nth, Fault::NoSpace);
        let io: Arc<dyn Io> = faulty.clone();
        let made = crate::support::create_store(&io, Path::new(DIR), crate::support::CONFIG);
        assert!(matches!(made, Err(StoreError::NoSpace { .. })), "{made:?}");
        assert!(!io.exists(Path::new(DIR)).unwrap(), "{nth}: {:?}", io.list(Path::new(DIR)));
    }
}
