//! Locking, snapshots and going back as commands, and training on afterwards.

use std::fs;
use std::path::Path;

use crate::lab::{FAMILIES, Lab, Ran, State, ftactor, inspect, start_training, state, train};

const RUN: [&str; 9] =
    ["--steps", "6", "--seq-len", "32", "--batch-rows", "4", "--lr", "3e-3", "--data"];

/// A store that has trained its six steps.
fn trained(lab: &Lab) -> (String, String) {
    let (store, text) = (lab.store("store", FAMILIES[1], 3), lab.text("text.txt", 60));
    train(&store, &[&RUN[..], &[&text]].concat()).expect(0);
    (store, text)
}

/// A store with a snapshot of its six steps, two steps on; its states at both.
fn trained_on(lab: &Lab) -> (String, State, State) {
    let (store, _) = trained(lab);
    let six = state(&store);
    on("snapshot", &store, &["six"]).expect(0);
    train(&store, &["--steps", "8"]).expect(0);
    let eight = state(&store);
    (store, six, eight)
}

fn on(command: &str, store: &str, more: &[&str]) -> Ran {
    ftactor(&[&[command, "--store", store], more].concat())
}

fn locked(store: &str) -> Vec<bool> {
    let shown = inspect(store);
    shown["layers"].as_array().unwrap().iter().map(|l| l["locked"].as_bool().unwrap()).collect()
}

#[test]
fn a_run_goes_on_from_a_snapshot_with_the_bits_it_had() {
    let lab = Lab::new();
    let (store, text) = (lab.store("store", FAMILIES[1], 3), lab.text("text.txt", 60));
    train(&store, &[&RUN[..], &[&text]].concat()).expect(0);
    let six = state(&store);
    on("snapshot", &store, &["six"]).expect(0);
    train(&store, &["--steps", "9"]).expect(0);
    let nine = state(&store);
    let back = on("rollback", &store, &["six", "--json"]).expect(0).json();
    assert_eq!(back["step"], 6);
    assert_eq!(state(&store), six);
    on("verify", &store, &[]).expect(0);
    // The longer run is kept, and the same three steps are trained again.
    train(&store, &[]).expect(0);
    assert_eq!(state(&store), nine);
    assert_eq!(inspect(&store)["snapshots"][0]["name"], "six");
    // A snapshot loads like a store's own checkpoint.
    let dir = Path::new(&store).join("snapshots/six");
    assert!(dir.join("config.json").exists() && dir.join("model.safetensors.index.json").exists());
    on("rollback", &store, &["previous"]).expect(0);
    assert_eq!(state(&store).0, 8);
    // Once more undoes it.
    on("rollback", &store, &["previous"]).expect(0);
    assert_eq!(state(&store), nine);
    on("rollback", &store, &["previous"]).expect(0);
    train(&store, &[]).expect(0);
    assert_eq!(state(&store), nine);
    on("snapshot", &store, &["nine"]).expect(0);
    // Openings that commit nothing do not matter.
    on("rollback", &store, &["none"]).expect(2);
    on("rollback", &store, &["previous"]).expect(0);
    assert_eq!(state(&store).0, 8);
    on("rollback", &store, &["previous"]).expect(0);
    assert_eq!(state(&store), nine);
    on("snapshot", &store, &["six", "--remove"]).expect(0);
    assert!(!dir.exists());
}

#[test]
fn going_back_to_an_earlier_run_brings_its_options_and_a_kill_in_between_is_finished() {
    let lab = Lab::new();
    let (store, text) = trained(&lab);
    let first = state(&store);
    on("snapshot", &store, &["first"]).expect(0);
    let again = [&RUN[..], &[&text, "--new-run", "--weight-decay", "0.1"]].concat();
    train(&store, &again).expect(0);
    let run = |store: &str| inspect(store)["run"].clone();
    assert_eq!((&run(&store)["run"], &run(&store)["weight-decay"]), (&2.into(), &0.1.into()));
    let second = lab.path("second");
    assert!(
        std::process::Command::new("cp").args(["-r", &store, &second]).status().unwrap().success()
    );
    on("rollback", &store, &["first"]).expect(0);
    assert_eq!(state(&store), first);
    assert_eq!((&run(&store)["run"], &run(&store)["weight-decay"]), (&1.into(), &0.0.into()));
    // Killed after the note was written: whoever opens next goes back first.
    let mut note = run(&store);
    note["rollback-first"] = "first".into();
    fs::write(Path::new(&second).join("run.json"), note.to_string()).unwrap();
    train(&second, &[]).expect(0);
    assert_eq!(state(&second), first);
    assert!(run(&second).get("rollback-first").is_none());
}

#[test]
fn single_layers_go_back_and_only_they() {
    let lab = Lab::new();
    let (store, six, eight) = trained_on(&lab);
    on("rollback", &store, &["six", "--layers", "embed,1"]).expect(0);
    let mixed = state(&store);
    assert_eq!(mixed.0, 8);
    for (layer, now) in mixed.1.iter().enumerate() {
        let expected = if [0, 2].contains(&layer) { &six } else { &eight };
        assert_eq!(*now, expected.1[layer], "layer {layer}");
    }
    train(&store, &["--steps", "9"]).expect(0);
    on("verify", &store, &[]).expect(0);
}

#[test]
fn what_cannot_be_is_refused_and_changes_nothing() {
    let lab = Lab::new();
    let (store, _) = trained(&lab);
    let before = state(&store);
    let refused = |command: &str, more: &[&str], words: &[&str]| {
        on(command, &store, more).expect(2).says(words);
        assert_eq!(state(&store), before, "{command} {more:?}");
        assert!(locked(&store).iter().all(|locked| !locked));
    };
    refused("lock", &["embed-head"], &["no layer to train"]);
    refused("lock", &["7"], &["no layer `7`", "0 to 2"]);
    refused("unlock", &["x"], &["no layer `x`"]);
    refused("rollback", &["none"], &["no snapshot `none`"]);
    refused("rollback", &["../.."], &["cannot name a snapshot"]);
    refused("snapshot", &["previous"], &["cannot name a snapshot"]);
    refused("snapshot", &["a", "--remove"], &["no snapshot `a`"]);
}

#[test]
fn a_lost_file_is_told_of_and_healed_as_told() {
    let lab = Lab::new();
    let (store, six, eight) = trained_on(&lab);
    let slot = inspect(&store)["layers"][1]["slot"].as_str().unwrap().to_owned();
    let lost = Path::new(&store).join("layers/0").join(slot).join("weight.safetensors");
    fs::remove_file(&lost).unwrap();
    train(&store, &["--steps", "9"]).expect(3).says(&["weight.safetensors", "ftactor verify"]);
    let told = on("verify", &store, &[]).expect(3);
    told.says(&["weight.safetensors", "previous --layers 0"]);
    on("rollback", &store, &["six", "--layers", "1"]).expect(3).says(&["weight.safetensors"]);
    on("rollback", &store, &["previous", "--layers", "0"]).expect(0);
    on("verify", &store, &[]).expect(0);
    let healed = state(&store);
    for (layer, now) in healed.1.iter().enumerate() {
        assert_eq!(*now == eight.1[layer], layer != 1, "layer {layer}");
    }
    on("rollback", &store, &["six"]).expect(0);
    assert_eq!(state(&store), six);
    train(&store, &[]).expect(0);
    assert_eq!(state(&store), eight);
}

#[test]
fn a_damaged_snapshot_of_another_run_changes_nothing() {
    let lab = Lab::new();
    let (store, text) = trained(&lab);
    on("snapshot", &store, &["first"]).expect(0);
    on("snapshot", &store, &["second"]).expect(0);
    let again = [&RUN[..], &[&text, "--new-run", "--weight-decay", "0.1"]].concat();
    train(&store, &again).expect(0);
    let (before, run) = (state(&store), inspect(&store)["run"].clone());
    let kept = Path::new(&store).join("snapshots/first/0.exp_avg.safetensors");
    let mut bytes = fs::read(&kept).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::remove_file(&kept).unwrap();
    fs::write(&kept, bytes).unwrap();
    on("rollback", &store, &["first"]).expect(3).says(&["first/0.exp_avg.safetensors"]);
    assert_eq!((state(&store), &inspect(&store)["run"]), (before, &run));
    // A rollback that was noted and can never be finished is in the way until another one is made.
    let mut note = run;
    note["rollback-first"] = "first".into();
    fs::write(Path::new(&store).join("run.json"), note.to_string()).unwrap();
    train(&store, &[]).expect(3).says(&["first/0.exp_avg.safetensors"]);
    on("rollback", &store, &["second"]).expect(0);
    let run = inspect(&store)["run"].clone();
    assert_eq!((&run["run"], &run["weight-decay"]), (&1.into(), &0.0.into()));
    train(&store, &["--steps", "7"]).expect(0);
}

#[test]
fn a_lost_record_of_the_run_is_told_of_and_a_snapshot_brings_it_back() {
    let lab = Lab::new();
    let (store, text) = trained(&lab);
    let six = state(&store);
    on("snapshot", &store, &["six"]).expect(0);
    let run = Path::new(&store).join("run.json");
    for damage in [None, Some("{"), Some("[]")] {
        fs::remove_file(&run).unwrap();
        if let Some(text) = damage {
            fs::write(&run, text).unwrap();
        }
        train(&store, &["--data", &text, "--steps", "9"]).expect(3).says(&["run.json"]);
        on("verify", &store, &[]).expect(3).says(&["run.json"]);
        assert_eq!(state(&store), six);
        on("rollback", &store, &["six"]).expect(0);
        on("verify", &store, &[]).expect(0);
    }
    train(&store, &["--steps", "7"]).expect(0);
    // The way out without a snapshot.
    let new = [&RUN[..], &[&text, "--new-run"]].concat();
    let lose = || fs::remove_file(&run).unwrap();
    for lose in [&lose as &dyn Fn(), &|| fs::write(&run, "{").unwrap()] {
        lose();
        train(&store, &[]).expect(3).says(&["rollback NAME", "--new-run --data PATH"]);
        train(&store, &new).expect(0);
        assert_eq!(state(&store).0, 6);
    }
}

#[test]
fn a_rollback_that_unlocks_makes_room_first() {
    let lab = Lab::new();
    let (store, _) = trained(&lab);
    on("snapshot", &store, &["six"]).expect(0);
    let said = on("lock", &store, &["embed,0"]).expect(0).stdout;
    assert!(said.contains("are given back"), "{said}");
    train(&store, &["--steps", "9"]).expect(0);
    let said = on("lock", &store, &["embed,0"]).expect(0).stdout;
    assert!(!said.contains("given back"), "{said}");
    let files = |layer: &str| {
        let of = |slot| fs::read_dir(Path::new(&store).join("layers").join(layer).join(slot));
        ["a", "b"].map(|slot| of(slot).map_or(0, Iterator::count)).iter().sum::<usize>()
    };
    assert_eq!((files("embed"), files("1")), (4, 8));
    let back = on("rollback", &store, &["six", "--json"]).expect(0).json();
    assert_eq!(back["rolled_back_to"], "six");
    assert_eq!((files("embed"), files("1")), (8, 8));
    let calm = train(&store, &[]).expect(0);
    assert!(!calm.stderr.contains("damaged"), "{calm:?}");
    on("verify", &store, &[]).expect(0);
}

#[test]
fn a_run_keeps_its_newest_snapshots_and_nobody_elses_go() {
    let lab = Lab::new();
    let (store, text) = (lab.store("store", FAMILIES[1], 3), lab.text("text.txt", 60));
    let names = || -> Vec<String> {
        let shown = inspect(&store);
        let all = shown["snapshots"].as_array().unwrap().iter();
        all.map(|s| s["name"].as_str().unwrap().to_owned()).collect()
    };
    let keep = ["--snapshot-every", "2", "--keep-snapshots", "2"];
    train(&store, &[&RUN[..], &[&text], &keep].concat()).expect(0);
    assert_eq!(names(), ["auto-1-4", "auto-1-6"]);
    on("snapshot", &store, &["auto-best"]).expect(2).says(&["--snapshot-every"]);
    on("snapshot", &store, &["autumn"]).expect(0);
    // Steps go back with a rollback and a new run: the newest stay, not those of the highest steps.
    on("rollback", &store, &["auto-1-4"]).expect(0);
    let two =
        ["--new-run", "--seq-len", "32", "--batch-rows", "4", "--steps", "2", "--data", &text];
    train(&store, &[&two[..], &keep].concat()).expect(0);
    assert_eq!(names(), ["auto-2-2", "auto-1-6", "autumn"]);
    on("snapshot", &store, &["auto-1-6", "--remove"]).expect(0);
    // As a file's number, too.
    let options = lab.write("options.toml", "snapshot-every = 1\nkeep-snapshots = 1\n");
    train(&store, &["--steps", "3", "--options", &options]).expect(0);
    assert_eq!(names(), ["auto-2-3", "autumn"]);
}

#[test]
fn the_commit_before_a_new_run_has_options_that_are_gone() {
    let lab = Lab::new();
    let (store, text) = trained(&lab);
    let six = state(&store);
    let new = [&RUN[..], &[&text, "--new-run", "--fault", "run.start:abort:1"]].concat();
    start_training(&store, &new).wait_with_output().unwrap();
    assert_eq!(state(&store).0, 0);
    on("rollback", &store, &["previous"]).expect(2).says(&["--new-run", "--layers"]);
    on("rollback", &store, &["previous", "--layers", "embed-head"]).expect(0);
    assert_eq!(state(&store).1, six.1);
}
