//! Stores whose layers are spread over several drives: /dev/shm is another file system.

use std::fs;
use std::path::{Path, PathBuf};

use crate::lab::{FAMILIES, Lab, Ran, ftactor, state, train};

const STEPS: [&str; 8] =
    ["--steps", "6", "--seq-len", "32", "--batch-rows", "4", "--micro-rows", "2"];

/// A directory on another file system where there is one, which goes in the end.
struct Other(tempfile::TempDir);

impl Other {
    fn new() -> Other {
        let memory = Path::new("/dev/shm");
        let dir = tempfile::tempdir_in(if memory.is_dir() { memory } else { Path::new("/tmp") });
        Other(dir.unwrap())
    }

    fn path(&self, name: &str) -> String {
        self.0.path().join(name).to_str().unwrap().to_owned()
    }
}

fn init(lab: &Lab, name: &str, more: &[&str]) -> (String, Ran) {
    let config = lab.write(&format!("{name}.json"), FAMILIES[1].config());
    let store = lab.path(name);
    let made =
        ftactor(&[&["init", "--config", &config, "--store", &store, "--seed", "3"], more].concat());
    (store, made)
}

/// A store with a drive beside its own, and a text; the other drive's directory.
fn on_two(lab: &Lab, other: &Other) -> (String, String, String) {
    let (text, second) = (lab.text("text.txt", 60), other.path("second"));
    let (store, made) = init(lab, "store", &["--spread", &second]);
    made.expect(0);
    (store, text, second)
}

/// Names of layers whose directories are links, and where those lead.
fn away(store: &str) -> Vec<(String, PathBuf)> {
    let mut all: Vec<_> = fs::read_dir(format!("{store}/layers"))
        .unwrap()
        .map(|entry| entry.unwrap())
        .filter(|entry| entry.file_type().unwrap().is_symlink())
        .map(|e| (e.file_name().into_string().unwrap(), fs::read_link(e.path()).unwrap()))
        .collect();
    all.sort();
    all
}

fn files_below(dir: &str) -> usize {
    let mut count = 0;
    crate::lab::walk(Path::new(dir), &mut |path| count += usize::from(path.is_file()));
    count
}

#[test]
fn layers_on_two_drives_train_to_the_same_bits() {
    let (lab, other) = (Lab::new(), Other::new());
    let text = lab.text("text.txt", 60);
    let (calm, made) = init(&lab, "calm", &[]);
    made.expect(0);
    train(&calm, &[&STEPS[..], &["--data", &text]].concat()).expect(0);
    for (engine, update) in [("mmap", "deferred"), ("direct", "speculative")] {
        let (second, third) =
            (other.path(&format!("{engine}2")), other.path(&format!("{engine}3")));
        let (store, made) = init(&lab, engine, &["--spread", &second, &third]);
        let made = made.expect(0);
        assert!(made.stderr.matches("read and written at once").count() == 3, "{}", made.stderr);
        assert!(made.stderr.contains("on one file system"), "{}", made.stderr);
        let links = away(&store);
        // How many follows from the rates.
        assert!(!links.is_empty(), "all layers stayed at home");
        for (name, dir) in &links {
            assert!(dir.starts_with(&second) || dir.starts_with(&third));
            assert!(dir.join("a/weight.safetensors").exists() && dir.ends_with(name));
        }
        let way = ["--io", engine, "--update", update, "--data", &text];
        train(&store, &[&STEPS[..], &way].concat()).expect(0);
        assert_eq!(state(&store), state(&calm), "{engine}");
        ftactor(&["verify", "--store", &store]).expect(0);
        let out = lab.path(&format!("{engine}-out"));
        ftactor(&["export", "--store", &store, "--out", &out]).expect(0);
        let copy = lab.path(&format!("{engine}-copy"));
        let fourth = other.path(&format!("{engine}4"));
        let args =
            ["convert", "--store", &store, "--layout", "f32", "--out", &copy, "--spread", &fourth];
        ftactor(&args).expect(0);
        assert_eq!(state(&copy), state(&calm));
        assert!(!away(&copy).is_empty());
    }
}

#[test]
fn snapshots_stay_on_the_layers_drive() {
    let (lab, other) = (Lab::new(), Other::new());
    let (store, text, second) = on_two(&lab, &other);
    let before = files_below(&second);
    let three = [&STEPS[..], &["--steps", "3", "--data", &text]].concat();
    train(&store, &three[2..]).expect(0);
    let then = state(&store);
    ftactor(&["snapshot", "--store", &store, "then"]).expect(0);
    assert!(files_below(&second) > before, "nothing of the snapshot is on the other drive");
    // The snapshot is a checkpoint of its own, through links.
    let weights = format!("{store}/snapshots/then/1.weight.safetensors");
    assert!(fs::metadata(&weights).unwrap().len() > 1000);
    train(&store, &["--steps", "6"]).expect(0);
    assert_ne!(state(&store), then);
    ftactor(&["verify", "--store", &store]).expect(0);
    ftactor(&["rollback", "--store", &store, "then"]).expect(0);
    assert_eq!(state(&store), then);
    train(&store, &[]).expect(0);
    ftactor(&["rollback", "--store", &store, "then", "--layers", "0-2"]).expect(0);
    ftactor(&["verify", "--store", &store]).expect(0);
    ftactor(&["snapshot", "--store", &store, "then", "--remove"]).expect(0);
    assert!(!Path::new(&format!("{store}/snapshots/then")).exists());
    let named = away(&store).into_iter().map(|(_, dir)| dir.join("snapshots/then"));
    assert!(named.into_iter().all(|dir| !dir.exists()));
    ftactor(&["verify", "--store", &store]).expect(0);
}

#[test]
fn a_drive_that_is_not_there_is_named_and_nothing_is_touched() {
    let (lab, other) = (Lab::new(), Other::new());
    let (store, text, second) = on_two(&lab, &other);
    train(&store, &[&STEPS[..], &["--data", &text]].concat()).expect(0);
    let (then, unplugged) = (state(&store), other.path("unplugged"));
    fs::rename(&second, &unplugged).unwrap();
    for command in ["solo", "inspect", "verify", "snapshot"] {
        let mut args = vec![command, "--store", &store];
        args.extend((command == "snapshot").then_some("name"));
        ftactor(&args).expect(5).says(&["layers/", &second, "is that drive mounted?"]);
    }
    fs::rename(&unplugged, &second).unwrap();
    assert_eq!(state(&store), then);
    train(&store, &["--steps", "8"]).expect(0);
}

#[test]
fn a_place_that_will_not_do_is_refused_and_nothing_is_left() {
    let (lab, other) = (Lab::new(), Other::new());
    let full = other.path("full");
    fs::create_dir(&full).unwrap();
    fs::write(format!("{full}/photo"), "x").unwrap();
    let inside = lab.path("store/inside");
    let twice = other.path("twice");
    let file = lab.write("file", "x");
    let (dangling, around) = (lab.path("dangling"), lab.path("around"));
    std::os::unix::fs::symlink(lab.path("nothing"), &dangling).unwrap();
    std::os::unix::fs::symlink(Path::new(&twice).parent().unwrap(), &around).unwrap();
    let around = format!("{around}/twice");
    for (spread, words) in [
        (vec![full.as_str()], "it is not empty"),
        (vec![&inside], "outside the store"),
        (vec![&twice, &twice], "outside the store and the others"),
        (vec![&file], "it is a file"),
        (vec![&lab.path("nowhere/../x")], "not there"),
        (vec!["/proc/x"], "/proc/x"),
        (vec![&dangling], "leads nowhere"),
        (vec![&twice, &around], "outside the store and the others"),
    ] {
        let (store, made) = init(&lab, "store", &[&["--spread"], &spread[..]].concat());
        made.expect(2).says(&[words]);
        assert!(!Path::new(&store).exists(), "{spread:?}");
    }
    assert!(!Path::new(&twice).exists());
    assert_eq!(fs::read_dir(&full).unwrap().count(), 1);
}

/// A copy has links to the very same layers: training on them would destroy the original.
#[test]
fn a_copy_of_a_store_never_trains_on_its_layers_and_a_moved_one_takes_them_along() {
    let (lab, other) = (Lab::new(), Other::new());
    let (store, text, second) = on_two(&lab, &other);
    train(&store, &[&STEPS[..], &["--data", &text]].concat()).expect(0);
    let then = state(&store);
    let copy = lab.path("copy");
    let copied = std::process::Command::new("cp").args(["-r", &store, &copy]).status().unwrap();
    assert!(copied.success());
    let copied = fs::read_link(format!("{copy}/layers/embed")).is_ok() || !away(&copy).is_empty();
    assert!(copied, "links were copied");
    train(&copy, &["--steps", "9"]).expect(2).says(&[
        &second,
        &store,
        "is a copy",
        "ftactor convert",
    ]);
    ftactor(&["verify", "--store", &store]).expect(0);
    assert_eq!(state(&store), then);
    // Reading is fine, and the way to a copy of its own.
    let out = lab.path("out");
    ftactor(&["convert", "--store", &copy, "--layout", "f32", "--out", &out]).expect(0);
    assert_eq!(state(&out), then);
    // The original goes on wherever it is moved to.
    fs::remove_dir_all(&copy).unwrap();
    let moved = lab.path("moved");
    fs::rename(&store, &moved).unwrap();
    train(&moved, &["--steps", "9"]).expect(0);
    let mark = fs::read_to_string(format!("{second}/ftactor-store")).unwrap();
    assert_eq!(mark.trim_end(), moved);
    // Nothing is made among its layers.
    let (_, made) = init(&lab, "inside", &["--spread", &format!("{second}/more")]);
    made.expect(2).says(&["has the layers of a store"]);
}
