//! Bad input: the documented exit code, a message that names the file and the remedy, and nothing
//! overwritten.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::bits::number_after;
use crate::lab::{
    FAMILIES, Lab, ROWS, Ran, Tiny, command, contents, ftactor, inspect, make_pipe, ran, solo,
    soon, start_training, state, train, with_file,
};

const RUN: [&str; 6] = ["--steps", "2", "--seq-len", "32", "--batch-rows", "4"];

#[test]
fn a_pipe_is_no_data_and_no_log() {
    let lab = Lab::new();
    let (store, text) = lab.store_and_text();
    let before = state(&store);
    let refused = |args: &[&str], name: &str| {
        soon(&solo(&store, &[&RUN[..], args].concat()))
            .expect(2)
            .says(&[name, "not a regular file"]);
        assert_eq!(state(&store), before);
        assert!(!Path::new(&store).join("run.json").exists());
    };
    let pipes = ["pipe.txt", "pipe.jsonl", "pipe.npy", "log"].map(|name| lab.path(name));
    pipes.iter().for_each(|path| make_pipe(path));
    for data in &pipes[..3] {
        refused(&["--data", data], data);
        let eval = ["eval", "--store", &store, "--data", data, "--seq-len", "32"];
        soon(&eval).expect(2).says(&[data, "not a regular file"]);
    }
    refused(&["--data", &text, "--log", &pipes[3]], &pipes[3]);
    refused(&["--data", &text, "--eval-data", &pipes[0], "--eval-every", "1"], &pipes[0]);
    let socket = lab.path("socket");
    let _listening = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    refused(&["--data", &text, "--log", &socket], &socket);
    // What is open already can be written to.
    let piped = train(&store, &[&RUN[..], &["--data", &text, "--log", "/dev/stdout"]].concat());
    assert!(piped.expect(0).stdout.contains("\"grad_norm\":"));
    train(&store, &["--steps", "3", "--log", "/dev/null"]).expect(0);
}

/// Trains a fresh store, which must be refused and stay as it is.
#[track_caller]
fn training_refused(store: &str, args: &[&str], words: &[&str]) {
    let before = (state(store), contents(&format!("{store}/layers")));
    train(store, args).expect(2).says(words);
    assert_eq!((state(store), contents(&format!("{store}/layers"))), before);
    assert!(!Path::new(store).join("run.json").exists(), "a refused run is recorded: {args:?}");
}

#[test]
fn bad_data_is_refused_by_name() {
    let lab = Lab::new();
    let store = lab.store("store", FAMILIES[0], 1);
    let npy = |shape: &str, ids: &[u16]| {
        let header = format!("{{'descr': '<u2', 'fortran_order': False, 'shape': {shape}, }}");
        let mut bytes = b"\x93NUMPY\x01\x00\x76\x00".to_vec();
        bytes.extend(format!("{header:<117}\n").as_bytes());
        bytes.extend(ids.iter().flat_map(|id| id.to_le_bytes()));
        bytes
    };
    fs::create_dir(lab.path("folder")).unwrap();
    let files: [(&str, Vec<u8>, &[&str]); 10] = [
        ("empty.txt", Vec::new(), &["32"]),
        ("short.txt", b"hello".to_vec(), &["6 tokens", "32"]),
        ("latin.txt", b"caf\xe9 ".repeat(50), &["latin.txt", "UTF-8", "byte 3"]),
        ("odd.csv", b"a,b".repeat(99), &["odd.csv", ".txt", ".jsonl", ".npy"]),
        ("broken.jsonl", b"{\"text\": \"a\"}\n{\"text\": \n".to_vec(), &["broken.jsonl", "line 2"]),
        ("other.jsonl", b"{\"body\": \"a\"}\n".to_vec(), &["other.jsonl", "line 1", "text"]),
        ("cut.npy", b"\x93NUMPY\x01\x00\x76".to_vec(), &["cut.npy"]),
        ("vocabulary.npy", npy("(64,)", &[300; 64]), &["vocabulary.npy", "300", "259"]),
        ("wide.npy", npy("(2, 40)", &[1; 80]), &["wide.npy", "40", "32"]),
        ("lies.npy", npy("(9, 32)", &[1; 80]), &["lies.npy"]),
    ];
    for (name, bytes, words) in files {
        let file = lab.write(name, bytes);
        training_refused(&store, &[&RUN[..], &["--data", &file]].concat(), words);
        let args = ["eval", "--store", &store, "--data", &file, "--seq-len", "32"];
        ftactor(&args).expect(2).says(words);
    }
    let (nothing, folder) = (lab.path("nothing.txt"), lab.path("folder"));
    for (path, words) in
        [(&nothing, ["nothing.txt", "No such file"]), (&folder, ["folder", ".txt"])]
    {
        training_refused(&store, &[&RUN[..], &["--data", path]].concat(), &words);
    }
    let text = lab.text("text.txt", 60);
    train(&store, &[&RUN[..], &["--data", &text]].concat()).expect(0);
}

#[test]
fn bad_options_are_refused_by_name() {
    let lab = Lab::new();
    let (store, text) = lab.store_and_text();
    let unknown = lab.write("unknown.toml", "learning-rate = 1\n");
    let no_toml = lab.write("no.toml", "lr = = 1\n");
    let cases: [(&[&str], &[&str]); 22] = [
        (&["--seq-len", "65"], &["--seq-len 65", "64"]),
        (&["--seq-len", "1"], &["--seq-len", "2"]),
        (&["--batch-rows", "0"], &["--batch-rows"]),
        (&["--batch-rows", "4", "--micro-rows", "3"], &["--micro-rows 3", "4"]),
        (&["--micro-rows", "0"], &["--micro-rows 0"]),
        (&["--steps", "0"], &["--steps"]),
        (&["--steps", "x"], &["--steps"]),
        (&["--steps", "2", "--epochs", "2"], &["--steps", "--epochs"]),
        (&["--lr", "nan"], &["lr"]),
        (&["--lr=-1"], &["lr"]),
        (&["--weight-decay", "1e30"], &["--weight-decay 1", "negative"]),
        (&["--snapshot-every", "often"], &["--snapshot-every often", "500"]),
        (&["--beta1", "1"], &["beta1"]),
        (&["--clip", "norm:1"], &["--clip norm:1", "global:X"]),
        (&["--clip", "global:0"], &["--clip global:0"]),
        (&["--schedule", "square"], &["square", "cosine"]),
        (&["--update", "fused"], &["--update fused", "--clip"]),
        (&["--ram", "much"], &["much", "380M"]),
        (&["--metrics", "nowhere"], &["nowhere", "--metrics"]),
        (&["--options", &unknown], &["unknown.toml", "learning-rate"]),
        (&["--options", &no_toml], &["no.toml"]),
        (&["--fault", "cat:panic:1"], &["cat:panic:1"]),
    ];
    let before = state(&store);
    for (args, words) in cases {
        let ran = train_plain(&store, &[args, &["--data", &text]].concat());
        ran.expect(2).says(words);
        assert_eq!(state(&store), before, "{args:?}");
    }
}

/// Trains with these arguments and no defaults of the fixtures'.
fn train_plain(store: &str, args: &[&str]) -> Ran {
    ftactor(&[&["solo", "--store", store], args].concat())
}

#[test]
fn a_directory_that_is_no_store_is_refused() {
    let lab = Lab::new();
    fs::create_dir(lab.path("folder")).unwrap();
    let text = lab.text("text.txt", 10);
    for dir in [lab.path("folder"), lab.path("nowhere"), text.clone()] {
        for command in ["inspect", "verify"] {
            ftactor(&[command, "--store", &dir]).expect(2).says(&[&dir]);
        }
        train(&dir, &["--data", &text]).expect(2).says(&[&dir]);
    }
    assert!(!Path::new(&lab.path("nowhere")).exists());
    assert_eq!(contents(&lab.path("folder")), []);
}

#[test]
fn a_damaged_store_is_not_trained() {
    let lab = Lab::new();
    let (store, text) = lab.store_and_text();
    train(&store, &[&RUN[..], &["--data", &text]].concat()).expect(0);
    let file = format!("{store}/layers/1/a/weight.safetensors");
    let good = fs::read(&file).unwrap();
    let mut bad = good.clone();
    *bad.last_mut().unwrap() ^= 1;
    with_file(&file, &bad, || {
        let before = state(&store);
        train(&store, &["--steps", "4"]).expect(3).says(&["layers/1/a", "damaged"]);
        assert_eq!(state(&store), before);
    });
    with_file(&file, &good[..good.len() - 100], || {
        train(&store, &["--steps", "4"]).expect(3).says(&["layers/1/a"]);
    });
    train(&store, &["--steps", "4"]).expect(0);
    assert_eq!(state(&store).0, 4);
}

#[test]
fn a_store_in_use_is_waited_for_and_then_refused() {
    let lab = Lab::new();
    let (store, text) = lab.store_and_text();
    let endless = [&ROWS[..], &["--data", &text, "--steps", "1000000", "--quiet"]].concat();
    let mut first = start_training(&store, &endless);
    while !Path::new(&store).join("run.json").exists() {
        assert!(first.try_wait().unwrap().is_none(), "the first process ended");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    train(&store, &[]).expect(6).says(&["waiting for", &store, "in use"]);
    assert!(first.try_wait().unwrap().is_none(), "the first process did not go on");
    first.kill().unwrap();
    first.wait().unwrap();
    // The lock died with its process.
    let again = [&["--new-run", "--data", &text], &RUN[..]].concat();
    train(&store, &again).expect(0);
}

#[test]
fn too_little_memory_is_refused_with_the_number_that_suffices() {
    let lab = Lab::new();
    let text = lab.text("text.txt", 60);
    for model in FAMILIES {
        let store = lab.store(&model.name(), model, 1);
        let args = [&RUN[..], &["--data", &text]].concat();
        let refused = train(&store, &[&args[..], &["--ram", "64K"]].concat()).expect(4);
        let refused = refused.says(&["65536", "raise --ram to"]);
        let needed = number_after(&refused.stderr, "needs at least ").to_string();
        train(&store, &[&args[..], &["--ram", &needed]].concat()).expect(0);
    }
}

/// A small file system of its own, unmounted at the end.
struct Mount(String);

impl Mount {
    /// `None` where this process may not mount.
    fn new(dir: String, bytes: u64) -> Option<Mount> {
        fs::create_dir(&dir).unwrap();
        let size = format!("size={bytes}");
        let mut mount = Command::new("mount");
        let mount = mount.args(["-t", "tmpfs", "-o", &size, "tmpfs", &dir]).output();
        mount.is_ok_and(|o| o.status.success()).then(|| Mount(dir))
    }

    fn remount(&self, option: &str) -> bool {
        let option = format!("remount,{option}");
        Command::new("mount").args(["-o", &option, &self.0]).status().unwrap().success()
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        // Nothing can be done about a mount that stays, and a test may be failing already.
        let _ = Command::new("umount").args(["-l", &self.0]).status();
    }
}

#[test]
fn a_full_disk_is_refused_with_the_missing_bytes() {
    let lab = Lab::new();
    let Some(disk) = Mount::new(lab.path("disk"), 512 << 10) else {
        eprintln!("skipped: this process may not mount a file system");
        return;
    };
    let config = lab.write("config.json", Tiny { layers: 8, hidden: 32, ..FAMILIES[0] }.config());
    let store = format!("{}/store", disk.0);
    let refused = ftactor(&["init", "--config", &config, "--store", &store]).expect(4);
    refused.says(&[&store, "MB needed", "missing"]);
    assert!(!Path::new(&store).exists(), "a store that does not fit is left behind");
}

#[test]
fn a_disk_that_fills_up_while_training_keeps_the_store() {
    let lab = Lab::new();
    let Some(disk) = Mount::new(lab.path("disk"), 32 << 20) else {
        eprintln!("skipped: this process may not mount a file system");
        return;
    };
    let config = lab.write("config.json", FAMILIES[0].config());
    let (store, text) = (format!("{}/store", disk.0), lab.text("text.txt", 60));
    ftactor(&["init", "--config", &config, "--store", &store]).expect(0);
    train(&store, &[&RUN[..], &["--data", &text]].concat()).expect(0);
    let before = state(&store);
    let filler = format!("{}/filler", disk.0);
    // Fails when the disk is full, which is the point.
    let _ = fs::write(&filler, vec![1u8; 48 << 20]);
    let ran = train(&store, &["--steps", "4"]);
    assert!([0, 4].contains(&ran.code), "{ran:?}");
    if ran.code == 4 {
        assert_eq!(state(&store), before);
    }
    fs::remove_file(&filler).unwrap();
    train(&store, &["--steps", "5"]).expect(0);
    ftactor(&["verify", "--store", &store]).expect(0);
}

#[test]
fn a_read_only_disk_can_be_read_and_is_not_trained() {
    let lab = Lab::new();
    let Some(disk) = Mount::new(lab.path("disk"), 32 << 20) else {
        eprintln!("skipped: this process may not mount a file system");
        return;
    };
    let config = lab.write("config.json", FAMILIES[0].config());
    let (store, text) = (format!("{}/store", disk.0), lab.text("text.txt", 60));
    ftactor(&["init", "--config", &config, "--store", &store]).expect(0);
    let before = state(&store);
    if !disk.remount("ro") {
        eprintln!("skipped: this process may not change a mount");
        return;
    }
    let ran = train(&store, &[&RUN[..], &["--data", &text]].concat()).expect(5);
    ran.says(&[&store, "Read-only"]);
    assert_eq!(state(&store), before);
    ftactor(&["verify", "--store", &store]).expect(0);
    let out = lab.path("out");
    let export = command(&["export", "--store", &store, "--out", &out]).status().unwrap();
    assert!(export.success());
}

/// A store that was trained, and its text.
fn trained(lab: &Lab) -> (String, String) {
    let (store, text) = lab.store_and_text();
    train(&store, &[&["--data", &text], &RUN[..]].concat()).expect(0);
    (store, text)
}

#[test]
fn damaged_token_rows_are_neither_trained_on_nor_verified() {
    let lab = Lab::new();
    let (store, text) = trained(&lab);
    let name = inspect(&store)["run"]["rows-file"].as_str().unwrap().to_owned();
    let file = format!("{store}/{name}");
    let mut bytes = fs::read(&file).unwrap();
    // The lowest bit of the first token's id: still a token of the vocabulary.
    bytes[4096] ^= 1;
    let damaged = bytes.clone();
    fs::write(&file, bytes).unwrap();
    let before = state(&store);
    train(&store, &["--steps", "3"]).expect(3).says(&[&name, "give --data PATH"]);
    ftactor(&["verify", "--store", &store]).expect(3).says(&[&name]);
    assert_eq!(state(&store), before);
    // Whoever names the data gets rows that are made again.
    ftactor(&["eval", "--store", &store, "--data", &text, "--seq-len", "32"]).expect(0);
    assert_ne!(fs::read(&file).unwrap(), damaged);
    fs::remove_file(&file).unwrap();
    train(&store, &["--steps", "3"]).expect(3).says(&[&name, "missing", "give --data PATH"]);
    ftactor(&["verify", "--store", &store]).expect(3).says(&[&name, "give --data PATH"]);
    train(&store, &["--steps", "3", "--data", &text]).expect(0);
    ftactor(&["verify", "--store", &store]).expect(0);
}

#[test]
fn damaged_weights_are_not_exported_evaluated_or_blamed_on_the_run() {
    let lab = Lab::new();
    let (store, text) = trained(&lab);
    let slot = inspect(&store)["layers"][1]["slot"].as_str().unwrap().to_owned();
    let file = format!("{store}/layers/0/{slot}/weight.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    let end = bytes.len();
    bytes[end - 4..].copy_from_slice(&f32::NAN.to_le_bytes());
    fs::write(&file, bytes).unwrap();
    let out = lab.path("out");
    let named = ["weight.safetensors", "import the model again"];
    ftactor(&["export", "--store", &store, "--out", &out]).expect(3).says(&named);
    assert!(!Path::new(&out).join("model.safetensors").exists());
    ftactor(&["eval", "--store", &store, "--data", &text, "--seq-len", "32"])
        .expect(3)
        .says(&named);
    ftactor(&["generate", "--store", &store, "--prompt", "A", "--max-tokens", "2"])
        .expect(3)
        .says(&named);
    // The loss is not a number, but that is not what has to be told.
    train(&store, &["--steps", "3"]).expect(3).says(&named);
}

#[test]
fn what_cannot_work_is_refused_before_anything_is_lost() {
    let lab = Lab::new();
    let (store, text) = trained(&lab);
    let before = state(&store);
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let log = format!("{store}/run.json");
    let record = fs::read(&log).unwrap();
    let new_run = [&["--new-run", "--data", &text], &RUN[..]].concat();
    let refused = |more: &[&str], words: &[&str]| {
        train(&store, &[&new_run[..], more].concat()).expect(2).says(words);
        assert_eq!((state(&store), fs::read(&log).unwrap()), (before.clone(), record.clone()));
    };
    refused(&["--metrics", &address], &[&address]);
    refused(&["--log", &log], &["--log", "outside the store"]);
    refused(&["--log", "/nowhere/log"], &["--log /nowhere/log"]);
    refused(&["--eval-data", "nowhere.txt", "--eval-every", "9"], &["nowhere.txt"]);
    refused(&["--eval-data", &text, "--eval-every", "0"], &["--eval-every"]);
    refused(&["--threads", "0"], &["--threads"]);
    refused(&["--threads", "99999999"], &["--threads"]);
    refused(&["--lr", "1e39"], &["--lr"]);
    let eval = ["eval", "--store", &store, "--data", &text, "--max-rows", "0"];
    ftactor(&eval).expect(2).says(&["--max-rows"]);
}

#[test]
fn a_new_run_that_was_killed_while_it_began_is_begun_again() {
    let lab = Lab::new();
    let (store, text) = trained(&lab);
    let file = format!("{store}/run.json");
    let mut record = inspect(&store)["run"].clone();
    record["reset-first"] = true.into();
    fs::write(&file, record.to_string()).unwrap();
    train(&store, &[]).expect(0).says(&["start at zero"]);
    let (killed, layers) = (state(&store), inspect(&store)["layers"].clone());
    assert!(layers.as_array().unwrap().iter().all(|layer| layer["t"] == 2));
    assert!(!fs::read_to_string(&file).unwrap().contains("reset-first"));
    let lab = Lab::new();
    let (other, _) = trained(&lab);
    train(&other, &[&["--new-run", "--data", &text], &RUN[..]].concat()).expect(0);
    assert_eq!(killed, state(&other), "a new run begun twice is one begun once");
}

#[test]
fn what_never_ends_or_waits_for_somebody_is_not_read() {
    let lab = Lab::new();
    let (store, text) = trained(&lab);
    let name = inspect(&store)["run"]["rows-file"].as_str().unwrap().to_owned();
    let rows = format!("{store}/{name}");
    fs::remove_file(&rows).unwrap();
    make_pipe(&rows);
    soon(&solo(&store, &["--steps", "3"])).expect(3).says(&[&name, "no regular file"]);
    soon(&["verify", "--store", &store]).expect(3).says(&[&name, "no regular file"]);
    let zero = ["init", "--config", "/dev/zero", "--store", "x", "--tokenizer", "bytes"];
    soon(&zero).expect(2).says(&["/dev/zero", "16 MiB"]);
    let options = ["--options", "/dev/zero", "--data", &text];
    soon(&solo(&store, &options)).expect(2).says(&["/dev/zero", "16 MiB"]);
}

#[test]
fn a_store_that_is_moved_while_it_trains_stops_and_goes_on_where_it_is() {
    let lab = Lab::new();
    let text = lab.text("text.txt", 60);
    let (calm, store) = (lab.store("calm", FAMILIES[1], 1), lab.store("store", FAMILIES[1], 1));
    let args = ["--steps", "8", "--seq-len", "32", "--batch-rows", "4", "--data", &text];
    train(&calm, &args).expect(0);
    let slow = ["--fault", "run:delay=20:1+"];
    let child = start_training(&store, &[&args[..], &slow].concat());
    while !Path::new(&store).join("run.json").exists() {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    let moved = lab.path("moved");
    fs::rename(&store, &moved).unwrap();
    ran(child.wait_with_output().unwrap()).expect(5).says(&["moved or removed while it was open"]);
    assert!(!Path::new(&store).exists());
    ftactor(&["verify", "--store", &moved]).expect(0);
    train(&moved, &[]).expect(0);
    assert_eq!(state(&moved), state(&calm));
}
