//! The commands: what they print, what they write, and how a run is gone on with.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Stdio;

use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

use crate::lab::{
    FAMILIES, Lab, Ran, State, command, events, ftactor, inspect, log, state, steps, train,
};

const RUN: [&str; 6] = ["--steps", "4", "--seq-len", "32", "--batch-rows", "4"];

/// A store with a completed run of four steps, and its data.
fn trained(lab: &Lab) -> (String, String) {
    let (store, text) = (lab.store("store", FAMILIES[1], 1), lab.text("text.txt", 60));
    train(&store, &[&RUN[..], &["--data", &text]].concat()).expect(0);
    (store, text)
}

#[track_caller]
fn keys(value: &Value) -> BTreeSet<&str> {
    value.as_object().unwrap().keys().map(String::as_str).collect()
}

#[track_caller]
fn has_keys(value: &Value, expected: &[&str]) {
    let keys = keys(value);
    expected.iter().for_each(|key| assert!(keys.contains(key), "no `{key}` in {value}"));
}

#[test]
fn every_command_has_help_with_an_example() {
    let top = ftactor(&["--help"]).expect(0).stdout;
    for command in [
        "solo", "init", "import", "export", "inspect", "verify", "generate", "eval", "data",
        "selftest",
    ] {
        assert!(top.contains(command), "{top}");
        let help = ftactor(&[command, "--help"]).expect(0).stdout;
        assert!(help.contains(&format!("ftactor {command}")), "no example: {help}");
    }
    let version = ftactor(&["--version"]).expect(0).stdout;
    assert_eq!(version.trim(), concat!("ftactor ", env!("CARGO_PKG_VERSION")));
    ftactor(&["pool"]).expect(2);
    ftactor(&["solo"]).expect(2).says(&["--store"]);
}

#[test]
fn init_says_what_it_made_and_repeats_itself() {
    let lab = Lab::new();
    let config = lab.write("config.json", FAMILIES[1].config());
    let stores = [("a", "1"), ("b", "1"), ("c", "2")].map(|(name, seed)| {
        let store = lab.path(name);
        let args = ["init", "--config", &config, "--store", &store, "--seed", seed];
        let said = ftactor(&args).expect(0).stdout;
        assert!(
            said.contains("3 decoder layers") && said.contains("ftactor solo --store"),
            "{said}"
        );
        store
    });
    assert_eq!(state(&stores[0]), state(&stores[1]));
    assert_ne!(state(&stores[0]), state(&stores[2]));
}

#[test]
fn inspect_shows_run_step_and_layers() {
    let lab = Lab::new();
    let fresh = lab.store("fresh", FAMILIES[0], 1);
    assert_eq!(inspect(&fresh)["run"], Value::Null);
    let (store, _) = trained(&lab);
    let shown = inspect(&store);
    let of_store = ["run", "layout", "step", "loss", "tokens_total", "layers", "snapshots"];
    assert_eq!(keys(&shown), BTreeSet::from(of_store));
    assert_eq!((&shown["step"], &shown["run"]["steps"]), (&4.into(), &4.into()));
    let layers = shown["layers"].as_array().unwrap();
    let names: Vec<_> = layers.iter().map(|l| l["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["embed", "0", "1", "2", "head"]);
    let fields = ["name", "parameters", "bytes", "slot", "t", "locked", "grad_norm", "hash"];
    for layer in layers {
        assert_eq!(keys(layer), BTreeSet::from(fields));
        assert_eq!(layer["bytes"].as_u64(), layer["parameters"].as_u64().map(|p| p * 12));
        assert_eq!((&layer["t"], &layer["locked"]), (&4.into(), &false.into()));
        assert!(layer["grad_norm"].as_f64().unwrap() > 0.0);
    }
    let text = ftactor(&["inspect", "--store", &store]).expect(0).stdout;
    assert!(layers.iter().all(|l| text.contains(l["hash"].as_str().unwrap())), "{text}");
    assert!(Path::new(&store).join("model.safetensors.index.json").exists());
}

#[test]
fn a_clean_close_leaves_an_index_into_the_live_slots() {
    let lab = Lab::new();
    for seed in 0..8 {
        let text = lab.text("text.txt", 60);
        let store = lab.store(&format!("store{seed}"), FAMILIES[0], seed);
        train(&store, &["--steps", "3", "--seq-len", "32", "--data", &text]).expect(0);
        let index = fs::read(Path::new(&store).join("model.safetensors.index.json"))
            .expect("the index of a closed store");
        let index: Value = serde_json::from_slice(&index).unwrap();
        for (tensor, file) in index["weight_map"].as_object().unwrap() {
            let file = file.as_str().unwrap();
            assert!(file.contains("/b/"), "step 3 is in slot b: {tensor} in {file}");
            let bytes = fs::read(Path::new(&store).join(file)).unwrap();
            SafeTensors::deserialize(&bytes).unwrap().tensor(tensor).unwrap();
        }
    }
}

#[test]
fn nothing_is_exported_into_the_store() {
    let lab = Lab::new();
    let (store, _) = trained(&lab);
    for out in [store.clone(), format!("{store}/layers/new"), format!("{store}/./new/deeper")] {
        ftactor(&["export", "--store", &store, "--out", &out])
            .expect(2)
            .says(&[&out, "outside the store"]);
    }
}

#[test]
fn a_damaged_run_record_is_named() {
    let lab = Lab::new();
    let (store, _) = trained(&lab);
    let file = format!("{store}/run.json");
    let record = fs::read(&file).unwrap();
    for damaged in [&b""[..], &record[..record.len() / 2], b"{}"] {
        fs::write(&file, damaged).unwrap();
        train(&store, &["--steps", "5"]).expect(3).says(&[&file, "damaged"]);
        ftactor(&["verify", "--store", &store]).expect(3).says(&[&file]);
    }
    fs::write(&file, br#"{"format": 2, "of-tomorrow": 1}"#).unwrap();
    train(&store, &["--steps", "5"]).expect(2).says(&["format 2"]);
}

#[cfg(target_os = "linux")]
#[test]
fn output_that_a_full_disk_swallows_is_a_failure_and_a_closed_pipe_is_none() {
    let lab = Lab::new();
    let (store, _) = trained(&lab);
    for arguments in [&["inspect", "--store", &store][..], &["solo", "--print-config"]] {
        let full = fs::File::options().write(true).open("/dev/full").unwrap();
        let ran = command(arguments).stdout(full).output().unwrap();
        assert_eq!(ran.status.code(), Some(5), "{arguments:?}");
        assert!(String::from_utf8_lossy(&ran.stderr).contains("standard output"));
        let mut child = command(arguments).stdout(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take());
        assert!(child.wait().unwrap().success(), "{arguments:?}");
    }
}

#[test]
fn an_export_holds_the_store_s_weights() {
    let lab = Lab::new();
    let (store, _) = trained(&lab);
    let out = lab.path("out");
    let said = ftactor(&["export", "--store", &store, "--out", &out]).expect(0).stdout;
    assert!(said.contains("step 4"), "{said}");
    let bytes = fs::read(Path::new(&out).join("model.safetensors")).unwrap();
    let exported = SafeTensors::deserialize(&bytes).unwrap();
    let mut compared = 0;
    for (file, slot) in live_files(&store) {
        let bytes = fs::read(&file).unwrap();
        let live = SafeTensors::deserialize(&bytes).unwrap();
        for (name, tensor) in live.tensors() {
            let ours = exported.tensor(&name).unwrap();
            assert_eq!(ours.shape(), tensor.shape(), "{name} {slot}");
            assert_eq!(ours.data(), tensor.data(), "{name} {slot}");
            compared += 1;
        }
    }
    assert_eq!(compared, exported.len());
    for (dtype, kind) in [("bf16", Dtype::BF16), ("f16", Dtype::F16)] {
        let out = lab.path(dtype);
        ftactor(&["export", "--store", &store, "--out", &out, "--dtype", dtype]).expect(0);
        let half = fs::read(Path::new(&out).join("model.safetensors")).unwrap();
        assert!(SafeTensors::deserialize(&half).unwrap().iter().all(|(_, t)| t.dtype() == kind));
    }
    let again = lab.path("again");
    ftactor(&["import", &out, "--store", &again]).expect(0);
    let losses = [&store, &again].map(|s| eval(s, &lab.text("held.txt", 20)));
    assert_eq!(losses[0], losses[1], "an imported export is another model");
}

/// The weight file of every layer's live slot.
fn live_files(store: &str) -> Vec<(std::path::PathBuf, String)> {
    let shown = inspect(store);
    let file = |layer: &Value| {
        let (name, slot) = (layer["name"].as_str().unwrap(), layer["slot"].as_str().unwrap());
        let path = Path::new(store).join("layers").join(name).join(slot);
        (path.join("weight.safetensors"), slot.to_owned())
    };
    shown["layers"].as_array().unwrap().iter().map(file).collect()
}

fn eval(store: &str, data: &str) -> f64 {
    let args = ["eval", "--store", store, "--data", data, "--seq-len", "32", "--json"];
    ftactor(&args).expect(0).json()["loss"].as_f64().unwrap()
}

#[test]
fn verify_finds_one_flipped_bit_in_any_plane() {
    let lab = Lab::new();
    let (store, _) = trained(&lab);
    let clean = ftactor(&["verify", "--store", &store, "--json"]).expect(0).json();
    assert_eq!((&clean["step"], &clean["damage"]), (&4.into(), &Value::Array(vec![])));
    let (weight, _) = live_files(&store).swap_remove(1);
    for plane in ["weight", "exp_avg", "exp_avg_sq"] {
        let file = weight.with_file_name(format!("{plane}.safetensors"));
        let good = fs::read(&file).unwrap();
        let mut bad = good.clone();
        let at = good.len() - 7;
        bad[at] ^= 4;
        fs::write(&file, bad).unwrap();
        let said = ftactor(&["verify", "--store", &store]).expect(3);
        let name = file.strip_prefix(&store).unwrap().to_str().unwrap();
        said.says(&["damaged", name, "model.layers.0.", "byte "]);
        let found = ftactor(&["verify", "--store", &store, "--json"]).expect(3).json();
        let damage = found["damage"].as_array().unwrap();
        assert_eq!(damage.len(), 1, "{found}");
        assert_eq!(keys(&damage[0]), BTreeSet::from(["file", "tensor", "offset", "healed_by"]));
        assert!(damage[0]["offset"].as_u64().unwrap() <= at as u64);
        fs::write(&file, good).unwrap();
    }
    ftactor(&["verify", "--store", &store]).expect(0);
}

#[test]
fn eval_data_and_generate_print_facts() {
    let lab = Lab::new();
    let (store, text) = trained(&lab);
    let common = ["--store", &store, "--data", &text, "--seq-len", "32"];
    let eval = ftactor(&[&["eval"], &common[..], &["--json"]].concat()).expect(0).json();
    has_keys(&eval, &["loss", "perplexity", "rows", "targets"]);
    let loss = eval["loss"].as_f64().unwrap();
    assert!((eval["perplexity"].as_f64().unwrap().ln() - loss).abs() < 1e-9);
    let one = ftactor(&[&["eval"], &common[..], &["--json", "--max-rows", "1"]].concat());
    assert_eq!(one.expect(0).json()["targets"], 31);
    let said = ftactor(&[&["eval"], &common[..]].concat()).expect(0).stdout;
    assert!(said.contains(&format!("{loss:.6}")), "{said}");

    let data = ftactor(&[&["data"], &common[..], &["--json"]].concat()).expect(0).json();
    has_keys(&data, &["documents", "rows", "tokens", "targets", "dropped_tokens", "first_rows"]);
    let (rows, dropped) = (&data["rows"], data["dropped_tokens"].as_u64().unwrap());
    let text_bytes = fs::metadata(&text).unwrap().len();
    assert_eq!((&eval["rows"], &data["documents"]), (rows, &1.into()));
    // Bytes are tokens here; one more ends the document.
    assert_eq!(rows.as_u64().unwrap() * 32 + dropped, text_bytes + 1);
    assert_eq!(data["first_rows"][0]["text"], &crate::lab::text(60)[..32]);

    let generate = |more: &[&str]| {
        let args = ["generate", "--store", &store, "--prompt", "The fox", "--max-tokens", "6"];
        ftactor(&[&args, more].concat()).expect(0)
    };
    has_keys(&generate(&["--json"]).json(), &["prompt", "text"]);
    assert!(generate(&[]).stdout.starts_with("The fox"));
    let sampled = |seed| generate(&["--json", "--temperature", "5", "--seed", seed]).json();
    assert_eq!(sampled("1"), sampled("1"));
    assert_ne!(sampled("1"), sampled("2"));
}

#[test]
fn selftest_passes_and_is_json_when_asked() {
    let lines = ftactor(&["selftest", "--json"]).expect(0).json_lines();
    let checks: Vec<_> = lines.iter().map(|l| l["check"].as_str().unwrap()).collect();
    for check in ["equivalence", "persistence", "convergence"] {
        assert!(checks.contains(&check), "{checks:?}");
    }
    assert!(lines.iter().all(|l| l["passed"] == true), "{lines:?}");
    assert!(lines[0]["detail"].as_str().unwrap().contains("[0.985, 1.97, 2.955]"));
}

#[test]
fn flags_win_over_the_options_file_and_print_config_shows_the_result() {
    let lab = Lab::new();
    let file = lab.write("run.toml", "lr = 0.5\nsteps = 7\nclip = \"none\"\nno-shuffle = true\n");
    let args = ["solo", "--print-config", "--options", &file, "--lr", "0.25", "--epochs", "2"];
    let shown = ftactor(&args).expect(0).stdout;
    for line in ["lr = 0.25", "epochs = 2", "clip = \"none\"", "no-shuffle = true"] {
        assert!(shown.lines().any(|l| l == line), "no `{line}` in {shown}");
    }
    assert!(!shown.lines().any(|l| l.starts_with("steps")), "{shown}");
    let again = lab.write("again.toml", &shown);
    let repeated = ftactor(&["solo", "--print-config", "--options", &again]).expect(0).stdout;
    assert_eq!(repeated, shown);

    let (store, text) = lab.store_and_text();
    let file = lab.write("train.toml", "seq-len = 16\nbatch-rows = 2\nsteps = 5\nlr = 0.01\n");
    train(&store, &["--options", &file, "--steps", "2", "--data", &text]).expect(0);
    let run = &inspect(&store)["run"];
    assert_eq!((&run["steps"], &run["seq-len"], &run["lr"]), (&2.into(), &16.into(), &0.01.into()));
}

#[test]
fn print_config_shows_every_option_and_is_taken_again() {
    let lab = Lab::new();
    let (store, text) = lab.store_and_text();
    let shown = |more: &[&str]| {
        let text = ftactor(&[&["solo", "--print-config"], more].concat()).expect(0).stdout;
        let file = lab.write("shown.toml", &text);
        let again = [&["solo", "--print-config", "--options", &file], more].concat();
        assert_eq!(ftactor(&again).expect(0).stdout, text, "{more:?}");
        text
    };
    let has = |text: &str, line: &str| {
        assert!(text.lines().any(|l| l == line), "no `{line}` in {text}");
    };
    let bare = shown(&[]);
    for line in [
        "batch-rows = 8",
        "epochs = 1",
        "schedule = \"cosine\"",
        "min-lr-ratio = 0.1",
        "weight-decay = 0.0",
        "beta1 = 0.9",
        "beta2 = 0.999",
        "eps = 0.00000001",
        "clip = \"global:1.0\"",
        "update = \"auto\"",
        "seed = 0",
        "no-shuffle = false",
        "device = \"auto\"",
        "compute-dtype = \"f32\"",
        "io = \"auto\"",
    ] {
        has(&bare, line);
    }
    // Only a model, data or the machine can say these.
    for name in ["seq-len", "micro-rows", "lr", "warmup-steps", "ram", "threads", "metrics", "log"]
    {
        assert!(bare.lines().any(|l| l.starts_with(&format!("# {name}"))), "{name}: {bare}");
    }

    let of_store = shown(&["--store", &store, "--steps", "200"]);
    for line in ["seq-len = 64", "micro-rows = 8", "lr = 0.0003", "warmup-steps = 6"] {
        has(&of_store, line);
    }
    let file = lab.write("run.toml", shown(&["--store", &store, "--steps", "2"]));
    train(&store, &["--options", &file, "--data", &text]).expect(0);
    let run = inspect(&store)["run"].clone();
    assert_eq!((&run["steps"], &run["lr"]), (&2.into(), &0.0003.into()));
    // A run that goes on has its own values; others are refused as training refuses them.
    let of_run = shown(&["--store", &store]);
    for line in ["steps = 2", "warmup-steps = 0", "lr = 0.0003"] {
        has(&of_run, line);
    }
    let other = ftactor(&["solo", "--print-config", "--store", &store, "--lr", "0.5"]);
    other.expect(2).says(&["--lr", "0.5"]);
    has(&shown(&["--store", &store, "--new-run", "--lr", "0.5"]), "epochs = 1");
    has(&shown(&["--demo"]), "seq-len = 128");
    ftactor(&["solo", "--print-config", "--clip", "up"]).expect(2).says(&["--clip up"]);
}

#[test]
fn the_log_has_every_field_and_event() {
    let lab = Lab::new();
    let (store, text) = lab.store_and_text();
    let file = lab.path("log.jsonl");
    let args = [
        "--data",
        &text,
        "--log",
        &file,
        "--eval-data",
        &text,
        "--eval-every",
        "2",
        "--sample-prompt",
        "The",
        "--sample-every",
        "4",
    ];
    train(&store, &[&RUN[..], &args].concat()).expect(0);
    let lines = log(&file);
    assert_eq!(steps(&lines, "step"), [1.0, 2.0, 3.0, 4.0]);
    for line in lines.iter().filter(|l| l.get("event").is_none()) {
        has_keys(
            line,
            &[
                "step",
                "loss",
                "grad_norm",
                "clip_factor",
                "lr",
                "tokens",
                "tokens_total",
                "seconds",
                "tokens_per_second",
                "read_bytes",
                "written_bytes",
                "stall_seconds",
                "rss_bytes",
            ],
        );
        has_keys(&line["stall_seconds"], &["storage", "compute", "optimizer", "network"]);
    }
    assert_eq!(steps(&lines, "tokens_total"), [128.0, 256.0, 384.0, 512.0]);
    assert_eq!(events(&lines, "eval").len(), 2);
    assert_eq!(events(&lines, "sample").len(), 1);
    assert!(!events(&lines, "start").is_empty() && !events(&lines, "stop").is_empty());
    let loss = events(&lines, "eval")[1]["loss"].as_f64().unwrap();
    assert!((loss - eval(&store, &text)).abs() < 1e-9, "{loss}");
}

#[test]
fn pauses_for_measuring_change_no_bits() {
    let lab = Lab::new();
    let text = lab.text("text.txt", 60);
    let (plain, paused) = (lab.store("plain", FAMILIES[2], 1), lab.store("paused", FAMILIES[2], 1));
    train(&plain, &[&RUN[..], &["--data", &text]].concat()).expect(0);
    let pauses = ["--data", &text, "--eval-data", &text, "--eval-every", "1"];
    train(&paused, &[&RUN[..], &pauses].concat()).expect(0);
    assert_eq!(state(&paused), state(&plain));
}

#[test]
fn a_finished_run_says_so_and_more_steps_go_on() {
    let lab = Lab::new();
    let (store, _) = trained(&lab);
    let before = state(&store);
    let said = train(&store, &[]).expect(0).stdout;
    assert!(said.contains("complete") && said.contains("--steps"), "{said}");
    assert_eq!(state(&store), before);
    train(&store, &["--steps", "3"]).expect(2).says(&["started for 4 steps", "--new-run"]);
    assert_eq!(state(&store), before);
    train(&store, &["--steps", "6"]).expect(0);
    assert_eq!(state(&store).0, 6);
    assert_eq!(inspect(&store)["run"]["steps"], 6);
    assert!(state(&store).1.iter().all(|layer| layer.1 == 6));
}

#[test]
fn other_options_are_refused_with_the_difference() {
    let lab = Lab::new();
    let (store, text) = trained(&lab);
    let other = lab.text("other.txt", 61);
    let before = state(&store);
    for (given, words) in [
        (["--lr", "0.5"], ["--lr", "0.0003", "0.5"]),
        (["--seq-len", "16"], ["--seq-len", "32", "16"]),
        (["--micro-rows", "1"], ["--micro-rows", "4", "1"]),
        (["--clip", "none"], ["--clip", "global:1.0", "none"]),
        (["--seed", "9"], ["--seed", "0", "9"]),
        (["--schedule", "linear"], ["--schedule", "cosine", "linear"]),
        (["--data", &other], ["--data", "text.txt", "differ"]),
    ] {
        let said = train(&store, &[&given[..], &["--steps", "9"]].concat()).expect(2);
        said.says(&words).says(&["--new-run"]);
    }
    assert_eq!(state(&store), before);
    assert_eq!(inspect(&store)["run"]["steps"], 4, "a refused command changed the run");
    // What changes no bits, and what is the same, may be given.
    train(&store, &["--steps", "5", "--threads", "1", "--lr", "3e-4", "--data", &text]).expect(0);
    assert_eq!(state(&store).0, 5);
}

#[test]
fn a_new_run_keeps_the_weights_and_starts_at_zero() {
    let lab = Lab::new();
    let (store, text) = trained(&lab);
    let trained_loss = eval(&store, &text);
    let untouched = |ran: Ran, code, before: &State| {
        ran.expect(code);
        assert_eq!(&state(&store), before, "a refused new run changed the store");
    };
    let before = state(&store);
    let new = |more: &[&str]| train(&store, &[&["--new-run"], more].concat());
    untouched(new(&[]), 2, &before);
    untouched(new(&["--data", "/no/such/file.txt"]), 2, &before);
    untouched(new(&["--data", &text, "--seq-len", "65"]), 2, &before);
    untouched(new(&["--data", &text, "--lr=-1"]), 2, &before);
    untouched(new(&["--data", &text, "--ram", "64K"]), 4, &before);
    assert_eq!(inspect(&store)["run"]["steps"], 4);
    let file = lab.path("log.jsonl");
    let said = new(&[
        "--data",
        &text,
        "--seq-len",
        "16",
        "--batch-rows",
        "2",
        "--steps",
        "3",
        "--lr",
        "0",
        "--log",
        &file,
    ])
    .expect(0);
    said.says(&["new run"]);
    assert_eq!(steps(&log(&file), "step"), [1.0, 2.0, 3.0]);
    assert!(state(&store).1.iter().all(|layer| layer.1 == 3));
    assert_eq!(eval(&store, &text), trained_loss, "a learning rate of 0 changed weights");
    assert_eq!(inspect(&store)["run"]["seq-len"], 16);
}

#[test]
fn a_refused_start_leaves_no_run_behind() {
    let lab = Lab::new();
    let (store, text) = lab.store_and_text();
    train(&store, &[&RUN[..], &["--data", &text, "--ram", "64K"]].concat()).expect(4);
    train(&store, &[&RUN[..], &["--data", &text, "--update", "fused"]].concat()).expect(2);
    assert_eq!(inspect(&store)["run"], Value::Null);
    let remedy = ["--data", &text, "--micro-rows", "1"];
    train(&store, &[&RUN[..], &remedy].concat()).expect(0);
}
