//! A step that must not be kept: the run ends before it, or passes its rows over.

use crate::lab::{FAMILIES, Lab, events, log, state, train};

const RUN: [&str; 12] = [
    "--batch-rows",
    "2",
    "--schedule",
    "constant",
    "--warmup-steps",
    "0",
    "--lr",
    "1e-2",
    "--no-shuffle",
    "--loss-spike",
    "4",
    "--steps",
];
const LENGTH: usize = 32;
const BEFORE: usize = 40;
const AFTER: usize = 3;

/// A `.npy` of ready rows, one step's after another: the same letter again and again, and where
/// `odd`, in between, a step of noise.
fn rows(odd: bool) -> Vec<u8> {
    let quiet = |steps: usize| vec![97u16; steps * 2 * LENGTH];
    let noise = (0..2 * LENGTH).map(|i| (i * i * 37 + i * 11) as u16 % 256);
    let mut tokens = quiet(BEFORE);
    tokens.extend(noise.filter(|_| odd));
    tokens.extend(quiet(AFTER));
    let rows = tokens.len() / LENGTH;
    let header =
        format!("{{'descr': '<u2', 'fortran_order': False, 'shape': ({rows}, {LENGTH}), }}");
    let header = format!("{header:<117}\n");
    let mut file = b"\x93NUMPY\x01\x00".to_vec();
    file.extend((header.len() as u16).to_le_bytes());
    file.extend(header.as_bytes());
    file.extend(tokens.iter().flat_map(|token| token.to_le_bytes()));
    file
}

#[test]
fn a_spike_is_passed_over_as_if_its_rows_had_not_been_there() {
    let lab = Lab::new();
    let (with, without) =
        (lab.write("with.npy", rows(true)), lab.write("without.npy", rows(false)));
    let steps = [(BEFORE + AFTER).to_string(), (BEFORE + 1 + AFTER).to_string()];
    let calm = lab.store("calm", FAMILIES[1], 4);
    let length = LENGTH.to_string();
    let run = |steps: &str, data: &str| -> Vec<String> {
        let words = [&RUN[..], &[steps, "--seq-len", &length, "--data", data]].concat();
        words.into_iter().map(str::to_owned).collect()
    };
    let train = |store: &str, run: &[String], more: &[&str]| {
        let words: Vec<&str> = run.iter().map(String::as_str).collect();
        train(store, &[&words[..], more].concat())
    };
    for (i, policy) in [&["--clip", "none"][..], &["--clip", "layer:1"], &[]].iter().enumerate() {
        let (calm, store) = (format!("calm{i}"), format!("store{i}"));
        let (calm, store) = (lab.store(&calm, FAMILIES[1], 4), lab.store(&store, FAMILIES[1], 4));
        train(&calm, &run(&steps[0], &without), policy).expect(0);
        let log_file = lab.path(&format!("log{i}"));
        let more = [policy, &["--guard", "skip", "--log", &log_file][..]].concat();
        train(&store, &run(&steps[1], &with), &more).expect(0);
        let lines = log(&log_file);
        let skips = events(&lines, "skip");
        assert_eq!((skips.len(), &skips[0]["step"]), (1, &(BEFORE + 1).into()), "{policy:?}");
        let (skipped, calm) = (state(&store), state(&calm));
        assert_eq!((skipped.0, skipped.1), (calm.0 + 1, calm.1), "{policy:?}");
    }
    train(&calm, &run(&steps[0], &without), &[]).expect(0);
    // By default the run ends there, and can go on the other way.
    let store = lab.store("stopped", FAMILIES[1], 4);
    let ended = train(&store, &run(&steps[1], &with), &[]).expect(7);
    ended.says(&[&format!("step {}", BEFORE + 1)]);
    assert_eq!(state(&store).0, BEFORE as u64);
    let again = train(&store, &[], &[]).expect(7).stdout;
    assert!(again.contains("--guard skip") && again.contains("--loss-spike"), "{again}");
    train(&store, &[], &["--guard", "skip"]).expect(0);
    assert_eq!(state(&store).1, state(&calm).1);
    let store = lab.store("raised", FAMILIES[1], 4);
    train(&store, &run(&steps[1], &with), &[]).expect(7);
    train(&store, &[], &["--loss-spike", "1e9"]).expect(0);
    assert_ne!(state(&store).1, state(&calm).1);
    // A run that is killed at every commit, the skip's included, comes to the same.
    let store = lab.store("killed", FAMILIES[1], 4);
    let killed = ["--guard", "skip", "--supervise", "--fault", "store.commit:abort:12"];
    train(&store, &run(&steps[1], &with), &killed).expect(0);
    assert_eq!(state(&store).1, state(&calm).1);
}
