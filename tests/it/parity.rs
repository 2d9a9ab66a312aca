//! Training gives what PyTorch gives: losses, norms and updates of tiny models of every family.

use std::collections::BTreeMap;

use safetensors::SafeTensors;
use serde_json::Value;

use crate::lab::{FAMILIES, Lab, Tiny, ftactor, log, steps, train};

/// From `tests/golden/training.py`, which holds the same numbers.
const GOLDEN: &str = include_str!("../golden/training.json");
const ROWS: usize = 80;
const SEQ_LEN: usize = 24;
const VOCAB: u64 = 259;
const SEED: u64 = 17;
const OPTIONS: [&str; 19] = [
    "--steps",
    "10",
    "--warmup-steps",
    "3",
    "--batch-rows",
    "8",
    "--micro-rows",
    "4",
    "--seq-len",
    "24",
    "--lr",
    "1e-2",
    "--weight-decay",
    "0.1",
    "--clip",
    "global:0.48",
    "--no-shuffle",
    "--threads",
    "2",
];

#[test]
fn losses_norms_and_updates_are_pytorch_s() {
    let golden: Value = serde_json::from_str(GOLDEN).unwrap();
    let rows = token_rows();
    let weighted = |(i, id): (usize, &u16)| (i as u64 + 1) * u64::from(*id);
    let checksum: u64 = rows.iter().enumerate().map(weighted).sum();
    assert_eq!(checksum, golden["rows_checksum"], "other rows than the golden file's");
    for model in FAMILIES {
        check(model, &rows, &golden["models"][model.name()]);
    }
}

fn check(model: Tiny, rows: &[u16], golden: &Value) {
    let name = model.name();
    let lab = Lab::new();
    let store = lab.store("store", model, SEED);
    let data = lab.write("rows.npy", npy(rows));
    let before = weights(&lab, &store, "before");
    let log_file = lab.path("log.jsonl");
    train(&store, &[&OPTIONS[..], &["--data", &data, "--log", &log_file]].concat()).expect(0);
    let after = weights(&lab, &store, "after");
    let lines = log(&log_file);
    for (ours, theirs) in steps(&lines, "loss").iter().zip(numbers(&golden["losses"])) {
        assert!((ours - theirs).abs() < 1e-5, "{name}: loss {ours}, PyTorch {theirs}");
    }
    let norms = numbers(&golden["norms"]);
    for (ours, theirs) in steps(&lines, "grad_norm").iter().zip(&norms) {
        assert!((ours / theirs - 1.0).abs() < 1e-4, "{name}: norm {ours}, PyTorch {theirs}");
    }
    let factors = steps(&lines, "clip_factor");
    assert_eq!(factors.len(), 10);
    for (factor, norm) in factors.iter().zip(&norms) {
        let theirs = (0.48 / (norm + 1e-6)).min(1.0);
        assert!((factor - theirs).abs() < 1e-4, "{name}: factor {factor}, PyTorch {theirs}");
    }
    let tensors = golden["tensors"].as_object().unwrap();
    assert!(tensors.keys().eq(after.keys()), "{name}: {:?}", after.keys());
    for (tensor, golden) in tensors {
        compare(&format!("{name} {tensor}"), &before[tensor], &after[tensor], golden);
    }
}

fn compare(what: &str, before: &[f32], after: &[f32], golden: &Value) {
    let number = |key: &str| golden[key].as_f64().unwrap();
    let start: Vec<f64> = before.iter().map(|w| f64::from(*w)).collect();
    let close = |a: f64, b: f64, part: f64| (a - b).abs() <= part * b;
    assert!(
        close(norm(&start), number("start_norm"), 1e-6),
        "{what}: `init` makes other weights than it did for the golden file; run training.py"
    );
    let update: Vec<f64> =
        before.iter().zip(after).map(|(b, a)| f64::from(*a) - f64::from(*b)).collect();
    let (ours, theirs) = (norm(&update), number("update_norm"));
    assert!(close(ours, theirs, 1e-3), "{what}: an update of {ours}, PyTorch's is {theirs}");
    let sampled: Vec<f64> =
        update.iter().step_by(golden["stride"].as_u64().unwrap() as usize).copied().collect();
    let cosine = cosine(&sampled, &numbers(&golden["update"]));
    assert!(cosine >= 0.9999, "{what}: cosine {cosine}");
}

#[test]
fn loss_and_norm_do_not_depend_on_accumulation() {
    let rows = token_rows();
    for model in [FAMILIES[0], FAMILIES[3]] {
        let lab = Lab::new();
        let data = lab.write("rows.npy", npy(&rows));
        let mut seen = Vec::new();
        for micro in ["8", "4", "2", "1"] {
            let store = lab.store(&format!("store{micro}"), model, SEED);
            let log_file = lab.path(&format!("{micro}.jsonl"));
            let mut args = OPTIONS.to_vec();
            args[7] = micro;
            args.extend(["--data", &data, "--log", &log_file]);
            train(&store, &args).expect(0);
            let lines = log(&log_file);
            seen.push([steps(&lines, "loss"), steps(&lines, "grad_norm")].concat());
        }
        for other in &seen[1..] {
            let far = other.iter().zip(&seen[0]).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert!(far < 1e-5, "{model:?}: {far}");
        }
    }
}

/// As `token_rows` of `training.py`.
fn token_rows() -> Vec<u16> {
    let mut state = 12345u64;
    let mut next = || {
        state = (state * 1_103_515_245 + 12345) % (1 << 31);
        state >> 16
    };
    let mut rows = Vec::new();
    for _ in 0..ROWS {
        let mut at = next() % VOCAB;
        for _ in 0..SEQ_LEN {
            rows.push(at as u16);
            let random = next();
            at = if random.is_multiple_of(4) { random % VOCAB } else { (at * 5 + 3) % VOCAB };
        }
    }
    rows
}

/// A two-dimensional `.npy` of u16 (NumPy enhancement proposal 1).
fn npy(rows: &[u16]) -> Vec<u8> {
    let shape = format!("({ROWS}, {SEQ_LEN})");
    let header = format!("{{'descr': '<u2', 'fortran_order': False, 'shape': {shape}, }}");
    let header = format!("{header:<117}\n");
    let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
    bytes.extend((header.len() as u16).to_le_bytes());
    bytes.extend(header.as_bytes());
    bytes.extend(rows.iter().flat_map(|id| id.to_le_bytes()));
    bytes
}

/// All weights by name, through an export.
fn weights(lab: &Lab, store: &str, name: &str) -> BTreeMap<String, Vec<f32>> {
    let out = lab.path(name);
    ftactor(&["export", "--store", store, "--out", &out]).expect(0);
    let bytes = std::fs::read(std::path::Path::new(&out).join("model.safetensors")).unwrap();
    let floats = |data: &[u8]| {
        let (values, _) = data.as_chunks::<4>();
        values.iter().map(|v| f32::from_le_bytes(*v)).collect()
    };
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    tensors.iter().map(|(name, view)| (name.to_owned(), floats(view.data()))).collect()
}

fn numbers(list: &Value) -> Vec<f64> {
    list.as_array().unwrap().iter().map(|v| v.as_f64().unwrap()).collect()
}

fn norm(values: &[f64]) -> f64 {
    values.iter().map(|v| v * v).sum::<f64>().sqrt()
}

fn cosine(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    let dot: f64 = a.iter().zip(b).map(|(a, b)| a * b).sum();
    dot / (norm(a) * norm(b))
}
