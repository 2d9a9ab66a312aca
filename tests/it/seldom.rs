//! Commits that come only every few steps: the same bits, fewer bytes, and what a crash, a stop, a
//! refused step or a failure takes back is made again.

use std::io::{BufRead, BufReader};
use std::path::Path;

use actors::{Clip, Event};
use model::LayerId;
use schedule::{AutoLock, End, Guard, Policy, Trip, Updates};

use crate::bits::least_ram;
use crate::lab::{FAMILIES, Lab, Tiny, ftactor, kill, log, start_training, state, steps, train};
use crate::rig::{Ask, Rig, Wrong, essence};

const STEPS: [&str; 10] = [
    "--steps",
    "7",
    "--seq-len",
    "32",
    "--batch-rows",
    "4",
    "--micro-rows",
    "2",
    "--weight-decay",
    "0.1",
];

/// Chunks of 4 MiB of which tiles and rows begin and end in the middle.
const WIDE: Tiny = Tiny { family: "llama", tied: true, layers: 2, hidden: 960 };

/// Options with the bytes that `some` stands for.
fn filled_in<'w>(way: &[&'w str], some: &'w str) -> Vec<&'w str> {
    way.iter().map(|word| if *word == "some" { some } else { *word }).collect()
}

#[test]
fn how_often_a_run_commits_changes_no_bits() {
    for (seed, model) in FAMILIES.into_iter().enumerate() {
        let lab = Lab::new();
        let text = lab.text("text.txt", 60);
        let common = [&STEPS[..], &["--clip", "layer:0.05", "--data", &text]].concat();
        let mut want = None;
        let runs: [&[&str]; 7] = [
            &[],
            &["--commit-every", "2"],
            &["--commit-every", "3", "--update", "deferred"],
            &["--commit-every", "7", "--update", "fused", "--io", "direct"],
            &["--commit-every", "100", "--update", "deferred", "--io", "direct"],
            // Somewhat more than least, so that some chunks wait and others do not.
            &["--commit-every", "3", "--ram", "some", "--io", "direct"],
            &["--commit-every", "3", "--ram", "some", "--io", "mmap"],
        ];
        for (at, way) in runs.into_iter().enumerate() {
            let store = lab.store(&format!("store{at}"), model, seed as u64 + 70);
            let some = (least_ram(&store, &common) + 150_000).to_string();
            let way = filled_in(way, &some);
            train(&store, &[&common[..], &way].concat()).expect(0);
            let end = state(&store);
            assert_eq!(end.0, 7);
            assert_eq!(want.get_or_insert(end.clone()), &end, "{model:?} {way:?}");
            ftactor(&["verify", "--store", &store]).expect(0);
        }
    }
}

/// Layers of several chunks, in every layout: what waits is read whole, in parts and by rows.
#[test]
fn chunks_that_wait_are_read_as_if_they_were_written() {
    for layout in ["f32", "split", "split8", "bf16sr8"] {
        let lab = Lab::new();
        let (config, text) = (lab.write("wide.json", WIDE.config()), lab.text("text.txt", 20));
        let run = ["--steps", "3", "--seq-len", "16", "--batch-rows", "1", "--data", &text];
        let mut want = None;
        for (at, way) in [
            &["--commit-every", "1"][..],
            &["--commit-every", "3", "--io", "mmap", "--update", "deferred"],
            &["--commit-every", "3", "--io", "direct", "--update", "speculative"],
            &["--commit-every", "3", "--io", "direct", "--update", "deferred", "--ram", "some"],
        ]
        .into_iter()
        .enumerate()
        {
            let store = lab.path(&format!("store{at}"));
            ftactor(&["init", "--config", &config, "--store", &store, "--layout", layout])
                .expect(0);
            let some = (least_ram(&store, &run) + (60 << 20)).to_string();
            let way = filled_in(way, &some);
            train(&store, &[&run[..], &way].concat()).expect(0);
            let end = state(&store);
            assert_eq!(end.0, 3);
            assert_eq!(want.get_or_insert(end.clone()), &end, "{layout} {way:?}");
            ftactor(&["verify", "--store", &store]).expect(0);
        }
    }
}

#[test]
fn between_commits_a_model_that_fits_moves_no_bytes() {
    for engine in ["mmap", "direct"] {
        for update in ["deferred", "fused"] {
            let lab = Lab::new();
            let (line, text) = (lab.path("log.jsonl"), lab.text("text.txt", 60));
            let store = lab.store("store", FAMILIES[1], 4);
            let more =
                ["--commit-every", "3", "--clip", "none", "--io", engine, "--update", update];
            let paths = ["--data", &text, "--log", &line];
            train(&store, &[&STEPS[..], &more, &paths].concat()).expect(0);
            let lines = log(&line);
            let all = |name| steps(&lines, name).into_iter().map(|v| v as u64).collect::<Vec<_>>();
            assert_eq!(all("step"), [1, 2, 3, 4, 5, 6, 7]);
            assert_eq!(all("committed"), [0, 0, 3, 3, 3, 6, 7]);
            let written = all("written_bytes");
            let state_bytes = written[6];
            assert!(written[0] == 0 && written[1] == 0, "{engine} {update}: {written:?}");
            assert!(written[3] == 0 && written[4] == 0, "{engine} {update}: {written:?}");
            assert!(written[2] >= state_bytes - 4096 && state_bytes > 100_000, "{written:?}");
            // The first step of each group reads what was committed.
            let read = all("read_bytes");
            assert!(read[1] == 0 && read[4] == 0 && read[0] > 0, "{engine} {update}: {read:?}");
        }
    }
}

const SKIP: Guard = Guard { on_trip: Trip::Skip, spike: None };

#[test]
fn a_refused_step_leaves_what_it_leaves_when_every_step_is_committed() {
    let model = FAMILIES[1];
    let ask = |policy: Policy, wrong: Wrong, at: u64, commit_every| Ask {
        updates: policy.into(),
        commit_every,
        guard: SKIP,
        wrong: vec![(at, wrong)],
        ..Ask::default()
    };
    let by_hand = Rig::new(model);
    by_hand.run(&Ask { last_step: 4, ..Ask::default() });
    by_hand.pass_over();
    let want = essence(&by_hand.run(&Ask::default()).state);
    for policy in [Policy::Deferred, Policy::Fused] {
        for wrong in [Wrong::Loss, Wrong::Gradient(LayerId(1))] {
            for commit_every in [1, 3, 100] {
                let rig = Rig::new(model);
                let ran = rig.run(&ask(policy, wrong, 5, commit_every));
                assert_eq!(ran.summary.end, End::Completed, "{:?}", ran.summary.failure);
                assert_eq!(essence(&ran.state), want, "{policy:?} {commit_every}");
                let skips = |e: &&Event| matches!(e, Event::Skipped { step: 5, .. });
                assert_eq!(ran.events.iter().filter(skips).count(), 1);
                let told: Vec<u64> = ran.steps.iter().map(|step| step.step).collect();
                assert_eq!(told, [1, 2, 3, 4, 6, 7, 8, 9], "each step once");
                assert!(ran.steps.iter().is_sorted_by_key(|step| step.committed));
            }
        }
    }
}

/// What comes before the step that ends the run is made durable first.
#[test]
fn a_guard_that_stops_the_run_keeps_the_steps_before() {
    for policy in [Policy::Deferred, Policy::Fused] {
        let rig = Rig::new(FAMILIES[1]);
        let (updates, wrong) = (policy.into(), vec![(6, Wrong::Loss)]);
        let ran = rig.run(&Ask { updates, wrong, commit_every: 4, ..Ask::default() });
        assert_eq!((ran.summary.end, ran.summary.step, ran.state.step.0), (End::Failed, 5, 5));
        assert!(ran.summary.failure.unwrap().to_string().contains("step 6"));
        let calm = Rig::new(FAMILIES[1]).run(&Ask { updates, ..Ask::default() });
        let went_on = rig.run(&Ask { updates, commit_every: 4, ..Ask::default() });
        assert_eq!(essence(&went_on.state), essence(&calm.state));
    }
}

#[test]
fn speculation_that_fails_replays_with_what_it_knows() {
    let clip = Clip::Global(1e-3);
    let want = Rig::new(FAMILIES[0]).run(&Ask { clip, ..Ask::default() });
    let ask =
        |commit_every| Ask { updates: Updates::Speculative, clip, commit_every, ..Ask::default() };
    for commit_every in [1, 2, 4] {
        let ran = Rig::new(FAMILIES[0]).run(&ask(commit_every));
        assert_eq!(essence(&ran.state), essence(&want.state), "{commit_every}");
        let redone = ran.events.iter().filter(|e| matches!(e, Event::Redone { .. })).count();
        assert_eq!(redone, 9, "every step is clipped, and found out once");
        assert_eq!(ran.steps.len(), 9);
    }
}

#[test]
fn layers_lock_themselves_between_commits_as_they_do_at_them() {
    let auto_lock = Some(AutoLock { threshold: 1e3, steps: 2, floor: 2 });
    let ask = |policy: Policy, commit_every, last_step| Ask {
        updates: policy.into(),
        commit_every,
        auto_lock,
        last_step,
        ..Ask::default()
    };
    let want = Rig::new(FAMILIES[1]).run(&ask(Policy::Deferred, 1, 9));
    for policy in [Policy::Deferred, Policy::Fused] {
        for commit_every in [2, 5, 100] {
            for pause in [4, 9] {
                let rig = Rig::new(FAMILIES[1]);
                let first = rig.run(&ask(policy, commit_every, pause));
                let locks = |e: &&Event| matches!(e, Event::Locked { step: 3, .. });
                assert_eq!(first.events.iter().filter(locks).count(), 1);
                let ran = rig.run(&ask(policy, commit_every, 9));
                assert_eq!(essence(&ran.state), essence(&want.state), "{policy:?} {commit_every}");
                assert_eq!(ran.state.counters, want.state.counters);
            }
        }
    }
}

const LONG: [&str; 12] = [
    "--steps",
    "40",
    "--seq-len",
    "64",
    "--batch-rows",
    "8",
    "--micro-rows",
    "4",
    "--lr",
    "3e-3",
    "--clip",
    "global:1000",
];

/// Starts or goes on, and waits until `count` steps are told; the last one told, and how many of
/// them are durable.
fn seen(child: &mut std::process::Child, count: usize) -> (u64, u64) {
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let (mut last, mut told) = ((0, 0), 0);
    while told < count {
        let Some(line) = lines.next() else { break };
        let line: serde_json::Value = serde_json::from_str(&line.unwrap()).unwrap();
        if let (Some(step), Some(committed)) = (line["step"].as_u64(), line["committed"].as_u64()) {
            (last, told) = ((step, committed), told + 1);
        }
    }
    // The pipe must stay readable, or the process would die of its own output.
    std::thread::spawn(move || lines.for_each(drop));
    last
}

/// As under `nohup`, which children inherit.
fn ignores_hangup() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap();
    u64::from_str_radix(mask.trim(), 16).unwrap() & 1 == 1
}

#[test]
fn a_stop_loses_nothing_and_a_kill_what_is_not_committed() {
    let model = Tiny { family: "llama", tied: true, layers: 4, hidden: 64 };
    let lab = Lab::new();
    let text = lab.text("text.txt", 200);
    let (calm, store) = (lab.store("calm", model, 11), lab.store("store", model, 11));
    train(&calm, &[&LONG[..], &["--data", &text]].concat()).expect(0);
    let mut partial = 0;
    for turn in 0..10 {
        let started = Path::new(&store).join("run.json").exists();
        let first = if started { Vec::new() } else { [&LONG[..], &["--data", &text]].concat() };
        let update = ["deferred", "speculative"][turn % 2];
        let more = ["--json", "--commit-every", "7", "--update", update];
        let mut child = start_training(&store, &[&first[..], &more].concat());
        let (told, committed) = seen(&mut child, 1 + turn % 4);
        if turn % 3 == 0 {
            child.kill().unwrap();
            child.wait().unwrap();
            let reached = state(&store).0;
            assert!(reached >= committed, "{reached} after {committed} were durable");
            // It may have been killed later than it was seen.
            assert!(reached.is_multiple_of(7) || reached >= told, "{reached}");
        } else {
            let closed = if ignores_hangup() { "-TERM" } else { "-HUP" };
            kill(&child, ["-INT", closed, "-TERM"][turn % 3]);
            let ended = crate::lab::ran(child.wait_with_output().unwrap()).expect(130);
            let reached = state(&store).0;
            assert!(reached >= told, "{reached} of {told}: {}", ended.stderr);
            partial += u64::from(!reached.is_multiple_of(7));
        }
        ftactor(&["verify", "--store", &store]).expect(0);
    }
    assert!(partial > 0, "no stop came between two commits");
    assert!(state(&store).0 < 40, "the run ended too early");
    train(&store, &["--commit-every", "3"]).expect(0);
    assert_eq!(state(&store), state(&calm));
}
