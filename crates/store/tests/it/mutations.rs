//! Guards and kinds of syncs are turned off one by one: the freeze campaign notices each, for the right
//! reason.

use std::path::Path;

use store::Guard;

use crate::campaign::{Rig, run};

/// Whether a path ends so: the names of its last components, `*` for any.
fn ends(path: &Path, names: &[&str]) -> bool {
    let mut path = path.components().rev();
    names
        .iter()
        .rev()
        .all(|name| path.next().is_some_and(|part| *name == "*" || part.as_os_str() == *name))
}

fn named(path: &Path, part: &str) -> bool {
    path.file_name().is_some_and(|name| name.to_string_lossy().ends_with(part))
}

/// A kind of sync, which files or directories it is of, and a part of what must be noticed.
type Lie = (&'static str, fn(&Path) -> bool, &'static str);

const LIES: [Lie; 17] = [
    (
        "weights of a slot",
        |p| ends(p, &["layers", "*", "*", "weight.safetensors"]),
        "/weight.safetensors is damaged",
    ),
    (
        "first moments of a slot",
        |p| ends(p, &["layers", "*", "*", "exp_avg.safetensors"]),
        "/exp_avg.safetensors is damaged",
    ),
    (
        "second moments of a slot",
        |p| ends(p, &["layers", "*", "*", "exp_avg_sq.safetensors"]),
        "/exp_avg_sq.safetensors is damaged",
    ),
    ("hashes of a slot", |p| ends(p, &["layers", "*", "*", "hashes"]), "/hashes is damaged"),
    ("the log behind a record", |p| named(p, ".log"), "without .mirror: step"),
    ("the mirror behind a record", |p| named(p, ".mirror"), "without .log: step"),
    ("a new log", |p| named(p, ".log.tmp"), ".log is damaged"),
    ("a new mirror", |p| named(p, ".mirror.tmp"), "without .log"),
    ("the directory of logs", |p| ends(p, &["store", "commit"]), "power failures"),
    ("the store's directory", |p| ends(p, &["disk", "store"]), "the index does not point"),
    ("the run's record", |p| named(p, "run.json.tmp"), "run.json:"),
    ("the index", |p| ends(p, &["store", "model.safetensors.index.json.tmp"]), "the index:"),
    (
        "the directory of a slot that was made anew",
        |p| ends(p, &["layers", "*", "*"]),
        "is damaged",
    ),
    ("a snapshot's record", |p| named(p, "record.tmp"), "record is damaged"),
    ("a snapshot's directory", |p| ends(p, &["snapshots", "*"]), "/snapshots/new/"),
    ("the directory of snapshots", |p| ends(p, &["store", "snapshots"]), ""),
    ("everything", |_| true, "power failures"),
];

/// Syncs whose absence nothing here can notice, and why.
const HARMLESS: [(&str, &str); 1] = [(
    "the directory of snapshots",
    "the imagined disk keeps directories at once; on a real one a snapshot could be lost whole",
)];

#[test]
fn the_campaign_finds_nothing_when_nothing_is_off() {
    run(&Rig::default()).unwrap();
}

#[test]
fn the_campaign_notices_every_guard_that_is_off() {
    use Guard::*;
    for (guard, expected) in [
        (RecordChecksum, "a rotten record: a record that says step 3 is believed"),
        (HashesChecksum, "the checksum of a hashes file is not noticed"),
        (HashesOfRecord, "another version of a layer is not noticed"),
        (ChunkHash, "a weight is not noticed"),
        (LiveBehindTear, "a torn record: damage in a live slot is not looked for"),
        (ConfigHash, "a config of the same shape is not noticed"),
        (LiveSlot, "a write into a live slot is not refused"),
        (PendingSlot, "a commit in flight is not refused"),
        (SecondName, "/snapshots/new/"),
        (FinishedSlots, "a commit of slots that are not synced is not refused"),
        (Poison, "a step was committed after sync"),
    ] {
        let noticed = run(&Rig { off: Some(guard), lies: None });
        match noticed {
            Err(what) => assert!(what.contains(expected), "{guard:?}: {what}"),
            Ok(()) => panic!("{guard:?} is off and nothing is noticed"),
        }
    }
}

#[test]
fn the_campaign_notices_every_sync_that_does_nothing() {
    for (name, about, expected) in LIES {
        let noticed = run(&Rig { off: None, lies: Some(about) });
        let harmless = HARMLESS.iter().find(|(known, _)| *known == name);
        match (&noticed, harmless) {
            (Err(what), None) => assert!(what.contains(expected), "{name}: {what}"),
            (Ok(()), Some(_)) => {}
            (Ok(()), None) => panic!("nobody notices that {name} is not synced"),
            (Err(what), Some(_)) => panic!("{name} matters: {what}"),
        }
    }
}
