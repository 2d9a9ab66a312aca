//! Every guard and every kind of sync is turned off in turn: the freeze campaign notices each.

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

/// A kind of sync, and which files or directories it is of.
type Lie = (&'static str, fn(&Path) -> bool);

const LIES: [Lie; 17] = [
    ("weights of a slot", |p| ends(p, &["layers", "*", "*", "weight.safetensors"])),
    ("first moments of a slot", |p| ends(p, &["layers", "*", "*", "exp_avg.safetensors"])),
    ("second moments of a slot", |p| ends(p, &["layers", "*", "*", "exp_avg_sq.safetensors"])),
    ("hashes of a slot", |p| ends(p, &["layers", "*", "*", "hashes"])),
    ("the log behind a record", |p| named(p, ".log")),
    ("the mirror behind a record", |p| named(p, ".mirror")),
    ("a new log", |p| named(p, ".log.tmp")),
    ("a new mirror", |p| named(p, ".mirror.tmp")),
    ("the directory of logs", |p| ends(p, &["store", "commit"])),
    ("the store's directory", |p| ends(p, &["disk", "store"])),
    ("the run's record", |p| named(p, "run.json.tmp")),
    ("the index", |p| ends(p, &["store", "model.safetensors.index.json.tmp"])),
    ("the directory of a slot that was made anew", |p| ends(p, &["layers", "*", "*"])),
    ("a snapshot's record", |p| named(p, "record.tmp")),
    ("a snapshot's directory", |p| ends(p, &["snapshots", "*"])),
    ("the directory of snapshots", |p| ends(p, &["store", "snapshots"])),
    ("everything", |_| true),
];

/// Syncs whose absence nothing notices, and why.
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
    for guard in [
        RecordChecksum,
        HashesChecksum,
        HashesOfRecord,
        ChunkHash,
        LiveBehindTear,
        ConfigHash,
        LiveSlot,
        PendingSlot,
        SecondName,
        FinishedSlots,
        Poison,
    ] {
        let noticed = run(&Rig { off: Some(guard), lies: None });
        match noticed {
            Err(what) => println!("{guard:?}: {what}"),
            Ok(()) => panic!("{guard:?} is off and nothing is noticed"),
        }
    }
}

#[test]
fn the_campaign_notices_every_sync_that_does_nothing() {
    for (name, about) in LIES {
        let noticed = run(&Rig { off: None, lies: Some(about) });
        let harmless = HARMLESS.iter().find(|(known, _)| *known == name);
        match (&noticed, harmless) {
            (Err(what), None) => println!("{name}: {what}"),
            (Ok(()), Some((_, why))) => println!("{name}: harmless, {why}"),
            (Ok(()), None) => panic!("nobody notices that {name} is not synced"),
            (Err(what), Some(_)) => panic!("{name} matters: {what}"),
        }
    }
}
