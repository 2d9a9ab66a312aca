//! Layers that are not trained: by command, by option, by themselves.

use std::path::Path;

use serde_json::Value;

use crate::bits::least_ram;
use crate::lab::{FAMILIES, Lab, State, Tiny, events, ftactor, inspect, log, state, steps, train};

const RUN: [&str; 11] = [
    "--steps",
    "8",
    "--seq-len",
    "32",
    "--batch-rows",
    "4",
    "--micro-rows",
    "2",
    "--lr",
    "3e-3",
    "--data",
];

fn locked(store: &str) -> Vec<String> {
    let shown = inspect(store);
    let layers = shown["layers"].as_array().unwrap().iter();
    let is_locked = |l: &&Value| l["locked"].as_bool().unwrap();
    layers.filter(is_locked).map(|l| l["name"].as_str().unwrap().to_owned()).collect()
}

/// Which layers changed between two states.
fn changed(before: &State, after: &State) -> Vec<bool> {
    before.1.iter().zip(&after.1).map(|(a, b)| a != b).collect()
}

/// Trains twins of a model that differ in `ways` only, with `lock` locked; the state they all have.
fn same_with(model: Tiny, lock: &str, ways: &[&[&str]]) -> State {
    let lab = Lab::new();
    let text = lab.text("text.txt", 60);
    let mut first = None;
    for (i, way) in ways.iter().enumerate() {
        let store = lab.store(&format!("store{i}"), model, 5);
        let before = state(&store);
        train(&store, &[&RUN[..], &[&text, "--lock", lock], way].concat()).expect(0);
        let (after, locked) = (state(&store), locked(&store));
        let names: Vec<bool> = inspect(&store)["layers"]
            .as_array()
            .unwrap()
            .iter()
            .map(|l| !locked.contains(&l["name"].as_str().unwrap().to_owned()))
            .collect();
        assert_eq!(changed(&before, &after), names, "{model:?} {lock} {way:?}");
        assert_eq!(first.get_or_insert(after.clone()), &after, "{model:?} {lock} {way:?}");
        ftactor(&["verify", "--store", &store]).expect(0);
    }
    first.unwrap()
}

#[test]
fn whatever_is_locked_stays_and_every_way_gives_the_same_bits() {
    for model in [FAMILIES[0], FAMILIES[1]] {
        let all = ["embed", "embed,0", "0", "1", "head", "embed,head", "embed,0-1", "0-head"];
        for lock in all {
            let fused = ["--clip", "none", "--update", "fused"];
            let deferred = ["--clip", "none", "--update", "deferred", "--threads", "1"];
            same_with(model, lock, &[&fused, &deferred]);
        }
    }
}

#[test]
fn every_budget_gives_the_same_bits_with_locks() {
    let lab = Lab::new();
    let (probe, text) = (lab.store("probe", FAMILIES[1], 5), lab.text("text.txt", 60));
    let args = [&RUN[..], &[&text, "--lock", "embed,1"]].concat();
    let least = least_ram(&probe, &args).to_string();
    for lock in ["embed,0", "1", "0,head"] {
        same_with(FAMILIES[1], lock, &[&["--ram", &least], &["--ram", "1G"]]);
    }
}

#[test]
fn with_the_first_layer_locked_the_loss_still_falls() {
    let lab = Lab::new();
    let model = Tiny { family: "llama", tied: true, layers: 3, hidden: 32 };
    let (store, text) = (lab.store("store", model, 2), lab.text("text.txt", 200));
    ftactor(&["lock", "--store", &store, "0"]).expect(0);
    let before = state(&store);
    let log_file = lab.path("log.jsonl");
    let args = ["--steps", "60", "--seq-len", "32", "--batch-rows", "4", "--lr", "5e-3"];
    train(&store, &[&args[..], &["--data", &text, "--log", &log_file]].concat()).expect(0);
    let losses = steps(&log(&log_file), "loss");
    let mean = |losses: &[f64]| losses.iter().sum::<f64>() / losses.len() as f64;
    assert!(mean(&losses[50..]) < mean(&losses[..10]) - 1.0, "{losses:?}");
    assert_eq!(changed(&before, &state(&store)), [true, false, true, true, true]);
}

#[test]
fn a_locked_layer_gives_half_of_its_disk_back_and_is_trained_again_when_unlocked() {
    let lab = Lab::new();
    let (store, text) = (lab.store("store", FAMILIES[1], 5), lab.text("text.txt", 60));
    train(&store, &[&RUN[..], &[&text]].concat()).expect(0);
    let said = ftactor(&["lock", "--store", &store, "embed,0-1"]).expect(0).stdout;
    assert!(said.contains("locked: embed,0,1; trained: 2,head"), "{said}");
    let eight = state(&store);
    let slots = |layer: &str| {
        let files = |slot: &str| {
            let dir = Path::new(&store).join("layers").join(layer).join(slot);
            std::fs::read_dir(dir).map_or(0, Iterator::count)
        };
        [files("a"), files("b")]
    };
    train(&store, &["--steps", "11"]).expect(0);
    assert_eq!(changed(&eight, &state(&store)), [false, false, false, true, true]);
    for (layer, files) in [("embed", 4), ("0", 4), ("1", 4), ("2", 8), ("head", 8)] {
        assert_eq!(slots(layer).iter().sum::<usize>(), files, "{layer}: {:?}", slots(layer));
    }
    ftactor(&["unlock", "--store", &store, "embed,1"]).expect(0);
    assert_eq!(slots("embed").iter().sum::<usize>(), 8);
    let eleven = state(&store);
    train(&store, &["--steps", "12"]).expect(0);
    let twelve = state(&store);
    assert_eq!(changed(&eleven, &twelve), [true, false, true, true, true]);
    // Its own Adam step stood still.
    assert_eq!([0, 1, 3].map(|layer| twelve.1[layer].1), [9, 8, 12]);
}

#[test]
fn layers_that_hardly_learn_are_locked_and_a_killed_run_locks_the_same() {
    let lab = Lab::new();
    let text = lab.text("text.txt", 60);
    let rule = ["--auto-lock", "1e9:3:2"];
    let (calm, store) = (lab.store("calm", FAMILIES[1], 5), lab.store("store", FAMILIES[1], 5));
    let log_file = lab.path("log.jsonl");
    let args = [&RUN[..], &[&text], &rule].concat();
    train(&calm, &[&args[..], &["--log", &log_file]].concat()).expect(0);
    let lines = log(&log_file);
    let events = events(&lines, "lock");
    // Nothing is known of the weights before the first update: steps 2, 3 and 4 are quiet.
    assert_eq!((events.len(), &events[0]["step"]), (1, &4.into()), "{events:?}");
    assert_eq!(events[0]["layers"].as_array().unwrap().len(), 3);
    assert_eq!(locked(&calm).len(), 3);
    let killed = ["--supervise", "--fault", "store.commit:abort:2"];
    train(&store, &[&args[..], &killed].concat()).expect(0);
    assert_eq!((state(&store), locked(&store)), (state(&calm), locked(&calm)));
    train(&calm, &["--steps", "9", "--auto-lock", "1e-4:3"]).expect(2).says(&["--auto-lock"]);
}

/// Moments of a new run count as zero, those of locked layers too, whatever their files hold.
#[test]
fn a_new_run_starts_as_on_imported_weights_with_layers_locked_and_unlocked_again() {
    let lab = Lab::new();
    let (store, text) = (lab.store("store", FAMILIES[1], 5), lab.text("text.txt", 60));
    let (out, twin) = (lab.path("out"), lab.path("twin"));
    train(&store, &[&RUN[..], &[&text]].concat()).expect(0);
    ftactor(&["lock", "--store", &store, "0"]).expect(0);
    let again = [&RUN[..], &[&text, "--new-run"]].concat();
    let eight = state(&store);
    train(&store, &[&again[..], &["--lock", "embed"]].concat()).expect(0);
    assert_eq!(changed(&eight, &state(&store)), [true, true, true, true, true], "all have t = 0");
    let kept = |layer: usize| state(&store).1[layer].0 == eight.1[layer].0;
    assert_eq!([0, 1, 2].map(kept), [true, true, false]);
    ftactor(&["verify", "--store", &store]).expect(0);
    ftactor(&["unlock", "--store", &store, "embed,0"]).expect(0);
    ftactor(&["export", "--store", &store, "--out", &out]).expect(0);
    ftactor(&["import", &out, "--store", &twin]).expect(0);
    train(&store, &again).expect(0);
    train(&twin, &[&RUN[..], &[&text]].concat()).expect(0);
    assert_eq!(state(&store), state(&twin));
}

#[test]
fn rot_in_a_locked_layer_is_never_trained_on() {
    let lab = Lab::new();
    let (store, text) = (lab.store("store", FAMILIES[1], 5), lab.text("text.txt", 60));
    train(&store, &[&RUN[..], &[&text]].concat()).expect(0);
    let live = |layer: usize, name: &str| {
        let slot = inspect(&store)["layers"][layer]["slot"].as_str().unwrap().to_owned();
        Path::new(&store).join("layers").join(name).join(slot).join("weight.safetensors")
    };
    let flip = |file: &Path| {
        let mut bytes = std::fs::read(file).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        std::fs::write(file, bytes).unwrap();
    };
    let (first, second) = (live(1, "0"), live(2, "1"));
    ftactor(&["lock", "--store", &store, "0"]).expect(0);
    flip(&first);
    let more = ["--steps", "9"];
    train(&store, &more).expect(3).says(&["0/", "weight.safetensors", "ftactor verify"]);
    flip(&first);
    flip(&second);
    ftactor(&["lock", "--store", &store, "1"]).expect(3).says(&["weight.safetensors"]);
    train(&store, &["--lock", "1", "--steps", "9"]).expect(3).says(&["weight.safetensors"]);
    flip(&second);
    train(&store, &more).expect(0);
}
