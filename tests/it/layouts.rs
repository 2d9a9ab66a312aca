//! Layouts of the state: equal bits where nothing is rounded, killed and not, converted and back.

use serde_json::Value;

use crate::lab::{
    FAMILIES, Lab, Tiny, ftactor, inspect, kill, log, start_training, state, steps, train,
};

const LAYOUTS: [&str; 4] = ["f32", "split", "split8", "bf16sr8"];

const STEPS: [&str; 8] = ["--steps", "6", "--seq-len", "32", "--batch-rows", "4", "--lr", "3e-3"];

fn store(lab: &Lab, name: &str, model: Tiny, layout: &str) -> String {
    let config = lab.write(&format!("{name}.json"), model.config());
    let store = lab.path(name);
    let args = ["init", "--config", &config, "--store", &store, "--layout", layout];
    ftactor(&args).expect(0);
    assert_eq!(inspect(&store)["layout"], layout);
    store
}

/// The store's state in another layout; its path.
fn converted(lab: &Lab, store: &str, layout: &str, name: &str) -> String {
    let out = lab.path(name);
    ftactor(&["convert", "--store", store, "--layout", layout, "--out", &out]).expect(0);
    out
}

#[test]
fn split_trains_as_f32_bit_for_bit() {
    split_equals_f32("f32", &FAMILIES);
}

#[test]
fn split_trains_as_f32_bit_for_bit_where_products_are_of_bf16() {
    let wide = Tiny { family: "llama", tied: true, layers: 2, hidden: 96 };
    split_equals_f32("bf16", &[FAMILIES[1], FAMILIES[2], FAMILIES[3], wide]);
}

fn split_equals_f32(dtype: &str, models: &[Tiny]) {
    let lab = Lab::new();
    let text = lab.text("text.txt", 60);
    for (at, model) in models.iter().enumerate() {
        let name = format!("{}{at}", model.name());
        let ends: Vec<_> = [("f32", "mmap"), ("split", "mmap"), ("split", "direct")]
            .into_iter()
            .map(|(layout, engine)| {
                let store = store(&lab, &format!("{name}-{layout}-{engine}"), *model, layout);
                let numbers = ["--compute-dtype", dtype, "--micro-rows", "2"];
                let ways = [&numbers[..], &["--io", engine, "--data", &text]].concat();
                train(&store, &[&STEPS[..], &ways].concat()).expect(0);
                ftactor(&["verify", "--store", &store]).expect(0);
                let whole = converted(&lab, &store, "f32", &format!("{name}-{layout}-{engine}-f"));
                state(&whole)
            })
            .collect();
        assert_eq!(ends[0].0, 6);
        assert!(ends.iter().all(|end| *end == ends[0]), "{name}");
    }
}

#[test]
fn every_layout_learns_and_its_bits_survive_kills_policies_threads_and_budgets() {
    let lab = Lab::new();
    let text = lab.text("text.txt", 60);
    let model = FAMILIES[1];
    for layout in LAYOUTS {
        let once = store(&lab, &format!("{layout}-once"), model, layout);
        let line = lab.path(&format!("{layout}.jsonl"));
        let args = [&STEPS[..], &["--clip", "none", "--data", &text]].concat();
        train(&once, &[&args[..], &["--log", &line]].concat()).expect(0);
        let lines = log(&line);
        let losses = steps(&lines, "loss");
        assert!(losses[5] < losses[0], "{layout}: {losses:?}");
        let drifts: Vec<_> = lines.iter().filter_map(|line| line["drift"].as_f64()).collect();
        let rounds = ["split8", "bf16sr8"].contains(&layout);
        assert_eq!(drifts.len(), if rounds { 6 } else { 0 }, "{layout}");
        assert!(drifts.iter().all(|drift| (0.0..1.0).contains(drift)), "{drifts:?}");
        let want = state(&once);

        let other = store(&lab, &format!("{layout}-other"), model, layout);
        let ways = ["--update", "deferred", "--threads", "1", "--io", "direct"];
        let low = ["--ram", "64K"];
        let refused = train(&other, &[&args[..], &ways, &low].concat()).expect(4);
        let least = refused.stderr.split("at least ").nth(1).unwrap().split(' ').next().unwrap();
        train(&other, &[&args[..], &ways, &["--ram", least]].concat()).expect(0);
        assert_eq!(state(&other), want, "{layout}");

        let killed = store(&lab, &format!("{layout}-killed"), model, layout);
        for millis in [15, 30, 50] {
            let mut child = start_training(&killed, &[&args[..], &["--json"]].concat());
            std::thread::sleep(std::time::Duration::from_millis(millis));
            kill(&child, "-KILL");
            child.wait().unwrap();
        }
        let more: &[&str] = if inspect(&killed)["run"] == Value::Null { &args } else { &[] };
        train(&killed, more).expect(0);
        assert_eq!(state(&killed), want, "{layout}");
    }
}

#[test]
fn a_run_keeps_what_it_computes_with() {
    let lab = Lab::new();
    let text = lab.text("text.txt", 60);
    let mut ends = Vec::new();
    for dtype in ["f32", "bf16"] {
        let store = store(&lab, dtype, FAMILIES[0], "split8");
        let args = [&STEPS[..], &["--compute-dtype", dtype, "--data", &text]].concat();
        train(&store, &args).expect(0);
        assert_eq!(inspect(&store)["run"]["compute-dtype"], dtype);
        let other = if dtype == "f32" { "bf16" } else { "f32" };
        let refused = train(&store, &["--steps", "9", "--compute-dtype", other]).expect(2);
        refused.says(&["--compute-dtype", dtype]);
        train(&store, &["--steps", "9"]).expect(0);
        ends.push(state(&store));
    }
    assert_ne!(ends[0].1, ends[1].1);
}

#[test]
fn a_converted_store_goes_on_with_the_run() {
    let lab = Lab::new();
    let text = lab.text("text.txt", 60);
    let start = store(&lab, "start", FAMILIES[0], "f32");
    let half = [&STEPS[..], &["--data", &text]].concat();
    train(&start, &half).expect(0);
    let split = converted(&lab, &start, "split", "split");
    let back = converted(&lab, &split, "f32", "back");
    assert_eq!(state(&back), state(&start));
    for store in [&start, &split, &back] {
        train(store, &["--steps", "9"]).expect(0);
    }
    assert_eq!(state(&back), state(&start));
    assert_eq!(state(&converted(&lab, &split, "f32", "whole")), state(&start));
    for layout in ["split8", "bf16sr8"] {
        let small = converted(&lab, &start, layout, layout);
        ftactor(&["verify", "--store", &small]).expect(0);
        train(&small, &["--steps", "12"]).expect(0);
        assert_eq!(state(&small).0, 12);
        ftactor(&["convert", "--store", &small, "--layout", "f32", "--out", &start]).expect(2);
    }
    let args = ["convert", "--store", &split, "--layout", "f16", "--out", &lab.path("no")];
    ftactor(&args).expect(2).says(&["f16", "bf16sr8"]);
}

#[test]
fn exports_of_a_layout_are_what_its_weights_are() {
    let lab = Lab::new();
    let text = lab.text("text.txt", 60);
    let start = store(&lab, "start", FAMILIES[2], "f32");
    train(&start, &[&STEPS[..], &["--data", &text]].concat()).expect(0);
    let export = |store: &str, name: &str| {
        let out = lab.path(name);
        ftactor(&["export", "--store", store, "--out", &out]).expect(0);
        std::fs::read(format!("{out}/model.safetensors")).unwrap()
    };
    let whole = export(&start, "whole");
    for layout in ["split", "split8"] {
        let other = converted(&lab, &start, layout, layout);
        assert!(export(&other, &format!("{layout}-out")) == whole, "{layout}");
        let config = std::fs::read_to_string(format!("{other}/config.json")).unwrap();
        assert!(config.contains("bfloat16"), "{config}");
    }
    let rounded = converted(&lab, &start, "bf16sr8", "rounded");
    assert!(export(&rounded, "rounded-out") != whole);
}
