//! Real files: what other software sees, links, locks across processes, maps under writes.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

use model::{Budget, LayerId, Plane, Precision, Slot, Weights};
use safetensors::SafeTensors;
use store::{AfterUse, Io, StoreError, TrainingStore, blocking, mmap_engine};
use tempfile::TempDir;

use crate::support::{
    CONFIG, LOCK_WAIT, assert_contents, create_store, open, read, table, train_step, value,
    weights, write_layer,
};

/// A new store on a real disk.
fn created() -> (TempDir, PathBuf, Arc<dyn Io>) {
    let temporary = tempfile::tempdir().unwrap();
    let dir = temporary.path().join("s");
    let io = mmap_engine(1, true);
    create_store(&io, &dir, CONFIG).unwrap();
    (temporary, dir, io)
}

#[test]
fn state_files_open_in_the_safetensors_crate_bit_for_bit() {
    let (_temporary, dir, io) = created();
    let (store, _) = open(&io, &dir).unwrap();
    train_step(&store).unwrap();
    store.close().unwrap();
    for layer in table().layers() {
        for plane in [Plane::Weight, Plane::ExpAvg, Plane::ExpAvgSq] {
            let path = dir.join(format!("layers/{}/b/{}.safetensors", layer.name, plane.name()));
            let bytes = fs::read(path).unwrap();
            let file = SafeTensors::deserialize(&bytes).unwrap();
            assert_eq!(file.len(), layer.tensors.len());
            for tensor in &layer.tensors {
                let view = file.tensor(&tensor.name).unwrap();
                assert_eq!(view.shape(), tensor.shape);
                let expected =
                    tensor.range().flat_map(|i| value(layer.id, plane, 1, i).to_le_bytes());
                assert!(view.data().iter().copied().eq(expected), "{}", tensor.name);
            }
        }
    }
}

#[test]
fn no_state_file_is_sparse() {
    use std::os::unix::fs::MetadataExt;
    let temporary = tempfile::tempdir().unwrap();
    let dir = temporary.path().join("s");
    create_store(&mmap_engine(1, true), &dir, CONFIG).unwrap();
    for slot in ["a", "b"] {
        for plane in [Plane::Weight, Plane::ExpAvg, Plane::ExpAvgSq] {
            let file = format!("layers/1/{slot}/{}.safetensors", plane.name());
            let data = fs::metadata(dir.join(file)).unwrap();
            assert!(data.blocks() * 512 >= data.len(), "{slot} {plane:?}");
        }
    }
}

#[test]
fn a_directory_in_place_of_one_log_copy_is_a_missing_copy() {
    for copy in ["log", "mirror"] {
        let (_temporary, dir, io) = created();
        let (store, _) = open(&io, &dir).unwrap();
        train_step(&store).unwrap();
        store.close().unwrap();
        let name = format!("00000002.{copy}");
        let path = dir.join("commit").join(&name);
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        let named = |warnings: &[String]| {
            warnings.iter().any(|w| w.contains(&name) && w.contains("is a directory"))
        };
        assert!(named(&read(&io, &dir).unwrap().recovery().warnings), "{copy}");
        let (store, recovery) = open(&io, &dir).unwrap();
        assert!(named(&recovery.warnings), "{recovery:?}");
        assert_contents(&store, 1);
        train_step(&store).unwrap();
        store.close().unwrap();
        let (store, recovery) = open(&io, &dir).unwrap();
        assert_eq!(recovery.warnings, Vec::<String>::new());
        assert_contents(&store, 2);
    }
}

#[test]
fn directories_in_place_of_both_log_copies_are_damage() {
    let (_temporary, dir, io) = created();
    for copy in ["log", "mirror"] {
        let path = dir.join(format!("commit/00000001.{copy}"));
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
    }
    assert!(matches!(open(&io, &dir), Err(StoreError::Damaged { .. })));
}

/// A pipe would be waited for.
#[cfg(unix)]
#[test]
fn a_pipe_in_place_of_any_file_is_named_at_once() {
    let (temporary, dir, io) = created();
    let slot = "layers/0/a/";
    let files = ["store.json", "config.json", "commit/00000001.log", "commit/00000001.mirror"]
        .map(String::from)
        .into_iter()
        .chain(
            [Plane::Weight, Plane::ExpAvg, Plane::ExpAvgSq]
                .map(|plane| format!("{slot}{}.safetensors", plane.name())),
        )
        .chain([format!("{slot}hashes")]);
    for name in files {
        let (path, kept) = (dir.join(&name), temporary.path().join("kept"));
        fs::rename(&path, &kept).unwrap();
        assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
        let said = match read(&io, &dir) {
            Ok(store) => store.recovery().warnings.join(" "),
            Err(error) => error.to_string(),
        };
        let last = name.rsplit('/').next().unwrap();
        let trained = open(&io, &dir).map(|(store, recovery)| (store.close(), recovery.warnings));
        let trained = trained.map_or_else(|error| error.to_string(), |(_, w)| w.join(" "));
        for said in [said, trained] {
            assert!(said.contains(last) && said.contains("not a regular file"), "{name}: {said}");
        }
        fs::remove_dir_all(&dir).unwrap();
        create_store(&io, &dir, CONFIG).unwrap();
    }
}

#[test]
fn a_slot_file_with_a_second_name_is_replaced_not_written() {
    let (temporary, dir, io) = created();
    let (store, _) = open(&io, &dir).unwrap();
    let (path, kept) = (dir.join("layers/0/b/exp_avg.safetensors"), temporary.path().join("kept"));
    fs::hard_link(&path, &kept).unwrap();
    let before = fs::read(&kept).unwrap();
    write_layer(&store, LayerId(1), Slot::B, 1).unwrap();
    assert_eq!(fs::read(&kept).unwrap(), before);
    assert_ne!(fs::read(&path).unwrap(), before);
    train_step(&store).unwrap();
    assert_contents(&store, 1);
}

#[test]
fn a_mapped_range_is_not_written() {
    let (_temporary, dir, io) = created();
    let (store, _) = open(&io, &dir).unwrap();
    write_layer(&store, LayerId(0), Slot::B, 1).unwrap();
    let bound = blocking(|done| {
        let at = (LayerId(0), Slot::B);
        store.read_weights(at, 0..8, Precision::Exact, AfterUse::Forget, done);
    });
    let Ok(Weights::F32(bound)) = bound else { panic!("{bound:?}") };
    let error = write_layer(&store, LayerId(0), Slot::B, 2).unwrap_err();
    assert!(error.to_string().contains("still mapped"), "{error}");
    assert_eq!(bound.f32s()[0], value(LayerId(0), Plane::Weight, 1, 0));
    drop(bound);
    write_layer(&store, LayerId(0), Slot::B, 2).unwrap();
}

#[test]
fn maps_need_no_budget() {
    let (_temporary, dir, io) = created();
    let (store, _) =
        TrainingStore::open(Arc::clone(&io), &dir, Budget::new(16), LOCK_WAIT).unwrap();
    let at = (LayerId(0), Slot::A);
    weights(&store, at, 0..320).unwrap();
    let rows = blocking(|done| store.gather_rows(at, 8, &[1], Precision::Exact, done));
    assert!(matches!(rows, Err(StoreError::Memory(_))), "{rows:?}");
}

#[test]
fn a_store_that_cannot_be_written_can_be_read() {
    use std::os::unix::fs::PermissionsExt;
    let (_temporary, dir, io) = created();
    fs::set_permissions(dir.join("commit"), fs::Permissions::from_mode(0o500)).unwrap();
    assert_eq!(read(&io, &dir).unwrap().verify(|_, _| {}).unwrap(), []);
    // The superuser writes anywhere.
    let probe = fs::write(dir.join("commit/probe"), b"");
    if probe.is_err() {
        let error = open(&io, &dir).unwrap_err();
        assert!(matches!(error, StoreError::Io { .. }), "{error}");
    }
    fs::set_permissions(dir.join("commit"), fs::Permissions::from_mode(0o700)).unwrap();
}

#[test]
fn directories_in_the_place_of_files_are_damage_on_disk_too() {
    for name in ["layers/0/a/weight.safetensors", "layers/0/a/hashes"] {
        let (_temporary, dir, io) = created();
        fs::remove_file(dir.join(name)).unwrap();
        fs::create_dir(dir.join(name)).unwrap();
        let read = read(&io, &dir).and_then(|store| store.check_weights());
        for error in [read.unwrap_err(), open(&io, &dir).unwrap_err()] {
            assert!(matches!(error, StoreError::Damaged { .. }), "{name}: {error}");
        }
    }
}

#[test]
fn what_cannot_be_looked_at_is_not_missing() {
    let (temporary, dir, io) = created();
    // A link to itself cannot be followed by anybody, the superuser included.
    for name in ["layers/0/a/weight.safetensors", "config.json", "store.json"] {
        let path = dir.join(name);
        fs::rename(&path, temporary.path().join("kept")).unwrap();
        std::os::unix::fs::symlink(&path, &path).unwrap();
        assert!(io.exists(&path).is_err());
        let error = read(&io, &dir).unwrap_err();
        assert!(matches!(error, StoreError::Io { .. }), "{name}: {error}");
        fs::remove_file(&path).unwrap();
        fs::rename(temporary.path().join("kept"), &path).unwrap();
    }
    assert!(!io.exists(&dir.join("store.json/below")).unwrap());
}

#[test]
fn links_in_slots_are_refused_by_training() {
    let (temporary, dir, io) = created();
    for (name, target) in [
        ("layers/0/b", "a"),
        ("layers/1/b/weight.safetensors", "../a/weight.safetensors"),
        ("layers/1/b/hashes", "../a/hashes"),
        ("layers/1/a/exp_avg.safetensors", "../b/exp_avg.safetensors"),
    ] {
        let (path, kept) = (dir.join(name), temporary.path().join("kept"));
        fs::rename(&path, &kept).unwrap();
        std::os::unix::fs::symlink(target, &path).unwrap();
        let error = open(&io, &dir).unwrap_err();
        assert!(
            matches!(&error, StoreError::Invalid(text) if text.contains(name)
                && text.contains("symbolic link")),
            "{error}"
        );
        read(&io, &dir).unwrap();
        fs::remove_file(&path).unwrap();
        fs::rename(&kept, &path).unwrap();
    }
    open(&io, &dir).unwrap();
}

#[test]
fn a_store_is_not_created_over_a_file() {
    let temporary = tempfile::tempdir().unwrap();
    let path = temporary.path().join("file");
    fs::write(&path, "mine").unwrap();
    let error = create_store(&mmap_engine(1, true), &path, CONFIG).unwrap_err();
    assert!(matches!(&error, StoreError::Invalid(text) if text.contains("is a file")), "{error}");
}

const HOLD: &str = "STORE_TEST_HOLD";

#[test]
fn the_lock_dies_with_the_process() {
    if let Some(dir) = std::env::var_os(HOLD) {
        hold_until_killed(Path::new(&dir));
    }
    let (_temporary, dir, io) = created();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "disk::the_lock_dies_with_the_process", "--nocapture"])
        .env(HOLD, &dir)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let held = lines.any(|line| line.unwrap().contains("the child holds it"));
    let refused = open(&io, &dir);
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(held, "the child never got the lock");
    assert!(matches!(refused, Err(StoreError::InUse { .. })), "{refused:?}");
    let (store, _) = open(&io, &dir).unwrap();
    assert_contents(&store, 1);
}

fn hold_until_killed(dir: &Path) -> ! {
    let (store, _) = open(&mmap_engine(1, true), dir).unwrap();
    train_step(&store).unwrap();
    println!("the child holds it");
    std::io::stdout().flush().unwrap();
    loop {
        std::thread::park();
    }
}
