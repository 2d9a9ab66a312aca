//! What is not the store's: links, other people's files, and a store that is moved away.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use store::{Io, mmap_engine};

use crate::support::{CONFIG, assert_contents, create_store, open, train_step};

/// A store on a real disk, and a directory of somebody else's with a file in it.
fn beside_somebody_else(temporary: &Path) -> (Arc<dyn Io>, PathBuf, PathBuf) {
    let (dir, other) = (temporary.join("s"), temporary.join("other"));
    let io = mmap_engine(1, true);
    create_store(&io, &dir, CONFIG).unwrap();
    std::fs::create_dir(&other).unwrap();
    for name in ["file", "thesis.tmp", "00000001.log", "spill.scratch"] {
        std::fs::write(other.join(name), "text").unwrap();
    }
    (io, dir, other)
}

#[test]
fn what_a_symbolic_link_leads_to_is_never_touched() {
    let links =
        ["snapshots/night", "snapshots", "scratch", "commit/link", "layers/link", "link.tmp"];
    for link in links {
        let temporary = tempfile::tempdir().unwrap();
        let (io, dir, other) = beside_somebody_else(temporary.path());
        let before = io.list(&other).unwrap();
        let at = dir.join(link);
        std::fs::create_dir_all(at.parent().unwrap()).unwrap();
        if at.exists() {
            std::fs::remove_dir(&at).unwrap();
        }
        std::os::unix::fs::symlink(&other, &at).unwrap();
        let (store, _) = open(&io, &dir).unwrap();
        train_step(&store).unwrap();
        let named = store.snapshot("night");
        let removed = store.remove_snapshot("night");
        if link.starts_with("snapshots") {
            assert!(named.unwrap_err().to_string().contains("symbolic link"), "{link}");
            assert!(removed.is_err(), "{link}");
        } else {
            named.and(removed).unwrap();
        }
        train_step(&store).unwrap();
        store.close().unwrap();
        open(&io, &dir).unwrap();
        assert_eq!(io.list(&other).unwrap(), before, "{link}");
        assert!(at.is_symlink(), "{link}");
    }
}

#[test]
fn what_is_somebody_elses_inside_a_store_stays() {
    let temporary = tempfile::tempdir().unwrap();
    let (io, dir, _) = beside_somebody_else(temporary.path());
    let foreign = [
        "notes.tmp",
        "x.tmp/y",
        "commit/+7.log",
        "commit/x.tmp",
        "scratch/sub/z",
        "scratch/mine",
        "snapshots/notes",
        "snapshots/dir/thesis",
        "snapshots/inner/sub/file",
    ];
    for name in foreign {
        std::fs::create_dir_all(dir.join(name).parent().unwrap()).unwrap();
        std::fs::write(dir.join(name), "text").unwrap();
    }
    std::os::unix::fs::symlink("nowhere", dir.join("dangling")).unwrap();
    std::os::unix::fs::symlink("nowhere", dir.join("snapshots/dangling")).unwrap();
    let (store, _) = open(&io, &dir).unwrap();
    train_step(&store).unwrap();
    for taken in ["notes", "dir", "inner"] {
        let error = store.snapshot(taken).unwrap_err().to_string();
        assert!(error.contains("no snapshot; choose another name"), "{error}");
        let _ = store.remove_snapshot(taken);
    }
    store.snapshot("mine").unwrap();
    train_step(&store).unwrap();
    std::fs::create_dir(dir.join("snapshots/mine/sub")).unwrap();
    store.remove_snapshot("mine").unwrap();
    assert_eq!(io.list(&dir.join("snapshots/mine")).unwrap(), ["sub"]);
    store.close().unwrap();
    open(&io, &dir).unwrap();
    for name in foreign {
        assert_eq!(std::fs::read(dir.join(name)).unwrap(), b"text", "{name}");
    }
}

/// What is told, and how the store goes.
type Departure = (&'static str, fn(&Path));

/// By rename or removal, while it is open.
#[test]
fn a_store_that_is_moved_away_is_not_made_anew_where_it_was() {
    let ways: [Departure; 3] = [
        ("moved or removed", |dir| std::fs::rename(dir, dir.with_file_name("moved")).unwrap()),
        ("moved or removed", |dir| std::fs::remove_dir_all(dir).unwrap()),
        ("its commit log was removed", |dir| {
            std::fs::remove_dir_all(dir.join("commit")).unwrap();
        }),
    ];
    for (at, (told, way)) in ways.into_iter().enumerate() {
        let temporary = tempfile::tempdir().unwrap();
        let (io, dir, _) = beside_somebody_else(temporary.path());
        let (store, _) = open(&io, &dir).unwrap();
        train_step(&store).unwrap();
        way(&dir);
        let step = train_step(&store).unwrap_err().to_string();
        assert!(step.contains(told), "{step}");
        let room = store.room().unwrap_err().to_string();
        assert!(room.contains(told), "{room}");
        drop(store);
        if at == 0 {
            assert!(!dir.exists(), "something was made where it was");
            let moved = dir.with_file_name("moved");
            let (store, _) = open(&io, &moved).unwrap();
            assert_contents(&store, 1);
            train_step(&store).unwrap();
        }
    }
    // One copy of the log is enough.
    let temporary = tempfile::tempdir().unwrap();
    let (io, dir, _) = beside_somebody_else(temporary.path());
    let (store, _) = open(&io, &dir).unwrap();
    let mirror = |name: &String| name.ends_with("mirror");
    let name = io.list(&dir.join("commit")).unwrap().into_iter().find(mirror).unwrap();
    std::fs::remove_file(dir.join("commit").join(name)).unwrap();
    train_step(&store).unwrap();
    assert!(store.room().unwrap().is_enough());
}
