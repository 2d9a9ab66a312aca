//! A run that is stopped or killed, again and again, ends with the bits of one that was not.

use std::io::{BufRead, BufReader};
use std::process::Child;
use std::time::Duration;

use crate::lab::{FAMILIES, Lab, Ran, Tiny, ftactor, kill, ran, start_training, state, train};

/// Steps long enough to be hit.
const MODEL: Tiny = Tiny { family: "llama", tied: true, layers: 4, hidden: 64 };
const RUN: [&str; 10] =
    ["--steps", "30", "--seq-len", "64", "--batch-rows", "8", "--micro-rows", "4", "--lr", "3e-3"];

/// A deterministic choice below `bound` (an LCG: quality does not matter here).
struct Places(u64);

impl Places {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.0 >> 33) % bound
    }
}

/// Starts or resumes the run and lets it commit `steps` steps, then waits a little.
fn run_until(store: &str, more: &[&str], steps: u64, wait: Duration) -> Child {
    let mut child = start_training(store, &[&["--json"], more].concat());
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut seen = 0;
    while seen < steps {
        let Some(line) = lines.next() else { break };
        seen += u64::from(line.unwrap().contains("\"loss\":"));
    }
    std::thread::sleep(wait);
    // The pipe must stay readable, or the process would die of its own output.
    std::thread::spawn(move || lines.for_each(drop));
    child
}

fn uninterrupted(lab: &Lab, model: Tiny, text: &str) -> crate::lab::State {
    let store = lab.store("calm", model, 11);
    train(&store, &[&RUN[..], &["--data", text]].concat()).expect(0);
    let state = state(&store);
    assert_eq!(state.0, 30);
    state
}

fn end(child: Child) -> Ran {
    ran(child.wait_with_output().unwrap())
}

#[test]
fn ctrl_c_anywhere_loses_no_committed_step_and_changes_no_bits() {
    let lab = Lab::new();
    let text = lab.text("text.txt", 200);
    let calm = uninterrupted(&lab, MODEL, &text);
    let store = lab.store("store", MODEL, 11);
    let (mut places, mut interrupted) = (Places(1), 0);
    for turn in 0..9 {
        let data: &[&str] = if turn == 0 { &["--data", &text] } else { &[] };
        let more = if turn == 0 { [&RUN[..], data].concat() } else { Vec::new() };
        let wait = Duration::from_micros(places.below(15_000));
        let seen = 1 + places.below(2);
        let child = run_until(&store, &more, seen, wait);
        kill(&child, if turn % 2 == 0 { "-INT" } else { "-TERM" });
        let before = end(child).expect(130);
        assert!(before.stderr.contains("stopping"), "{}", before.stderr);
        interrupted += 1;
        // A clean stop leaves a store that other software can read.
        assert!(std::path::Path::new(&store).join("model.safetensors.index.json").exists());
        ftactor(&["verify", "--store", &store]).expect(0);
    }
    assert!(state(&store).0 < 30, "the run ended before {interrupted} interruptions");
    train(&store, &[]).expect(0);
    assert_eq!(state(&store), calm);
}

#[test]
fn kill_9_at_twenty_places_changes_no_bits() {
    for model in [MODEL, Tiny { family: "qwen3", tied: false, hidden: 32, ..FAMILIES[3] }] {
        let lab = Lab::new();
        let text = lab.text("text.txt", 200);
        let calm = uninterrupted(&lab, model, &text);
        let store = lab.store("store", model, 11);
        let (mut places, mut killed, mut inside) = (Places(model.hidden as u64), 0, 0);
        let mut more = [&RUN[..], &["--data", &text]].concat();
        while killed < 20 {
            let seen = places.below(3);
            let mut child =
                run_until(&store, &more, seen, Duration::from_micros(places.below(25_000)));
            child.kill().unwrap();
            let ended = end(child);
            assert!([137, 0].contains(&ended.code), "{ended:?}");
            killed += 1;
            inside += u64::from(ended.code == 137);
            if std::path::Path::new(&store).join("run.json").exists() {
                more.clear();
            }
            if state(&store).0 == 30 {
                break;
            }
        }
        assert!(inside >= 10, "{inside} of {killed} kills hit the run");
        train(&store, &more).expect(0);
        assert_eq!(state(&store), calm, "{model:?}");
        ftactor(&["verify", "--store", &store]).expect(0);
    }
}

#[test]
fn a_second_signal_stops_at_once_and_loses_nothing_committed() {
    let lab = Lab::new();
    let text = lab.text("text.txt", 200);
    let calm = uninterrupted(&lab, MODEL, &text);
    let store = lab.store("store", MODEL, 11);
    let child = run_until(&store, &[&RUN[..], &["--data", &text]].concat(), 2, Duration::ZERO);
    kill(&child, "-INT");
    kill(&child, "-INT");
    end(child).expect(130);
    let reached = state(&store).0;
    assert!((2..30).contains(&reached), "{reached}");
    train(&store, &[]).expect(0);
    assert_eq!(state(&store), calm);
}
