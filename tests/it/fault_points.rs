//! Every point at which a tiny run can fail, taken from a record of that run, fails once; whatever
//! is left runs on to the bits of a run in which nothing failed.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::bits;
use crate::lab::{FAMILIES, Lab, Ran, State, ftactor, state, train};

const RUN: [&str; 9] =
    ["--steps", "2", "--seq-len", "16", "--batch-rows", "2", "--micro-rows", "1", "--data"];

/// A place and what happens there.
struct Blow {
    point: String,
    what: &'static str,
    nth: u64,
}

impl Blow {
    fn spec(&self) -> String {
        format!("{}:{}:{}", self.point, self.what, self.nth)
    }
}

/// What may happen at a point. Deaths of the process are everywhere; they take turns with the rest.
fn ways(point: &str) -> &'static [&'static str] {
    match point.split_once('.') {
        Some(("io", "free_bytes")) => &["enospc", "eio", "abort"],
        Some(("io", "sync" | "create" | "rename" | "unlink")) => {
            &["eio", "abort", "enospc", "exit", "delay=3", "eacces"]
        }
        Some(("io", "write")) => &["eio", "abort", "short", "enospc", "exit", "delay=3"],
        Some(("io", "read")) => &["eio", "abort", "short", "delay=3"],
        Some(("io", _)) => &["eio", "abort", "eacces"],
        Some(("run" | "node", _)) => &["panic", "abort", "exit", "delay=3"],
        Some((
            "optimizer",
            "chunk_read" | "gradient_read" | "spilled_read" | "summed" | "chunk_written",
        )) => &["panic", "abort", "delay=3"],
        _ => &["panic", "lost", "abort", "delay=3"],
    }
}

/// How often each point was reached.
pub(crate) fn points(record: &str) -> BTreeMap<String, u64> {
    let text = fs::read_to_string(record).unwrap();
    let line = |line: &str| {
        let (point, count) = line.split_once(' ').unwrap();
        (point.to_owned(), count.parse().unwrap())
    };
    text.lines().map(line).filter(|(point, _)| point.contains('.')).collect()
}

/// Each place once, each with another way than its neighbours.
fn blows(points: &BTreeMap<String, u64>) -> Vec<Blow> {
    let every_way = std::env::var_os("FTACTOR_EVERY_FAULT").is_some();
    let mut blows = Vec::new();
    for (point, &count) in points {
        let ways = ways(point);
        for nth in 1..=count {
            let turn = nth as usize % ways.len();
            let chosen = if every_way { ways } else { &ways[turn..=turn] };
            blows.extend(chosen.iter().map(|&what| Blow { point: point.clone(), what, nth }));
        }
    }
    blows
}

struct Bench {
    lab: Lab,
    text: String,
    fresh: String,
    calm: State,
    more: Vec<String>,
}

impl Bench {
    fn new(more: &[&str]) -> Bench {
        let lab = Lab::new();
        let text = lab.text("text.txt", 30);
        let (fresh, calm) = (lab.store("fresh", FAMILIES[0], 1), lab.store("calm", FAMILIES[0], 1));
        train(&calm, &[&RUN[..], &[&text], more].concat()).expect(0);
        let calm = state(&calm);
        let more = more.iter().map(|&word| word.to_owned()).collect();
        Bench { lab, text, fresh, calm, more }
    }

    fn copy(&self, name: &str) -> String {
        let store = self.lab.path(name);
        let copied = Command::new("cp").args(["-r", &self.fresh, &store]).status().unwrap();
        assert!(copied.success());
        store
    }

    fn run(&self, store: &str, faults: &[&str]) -> Ran {
        let data = [self.text.as_str()];
        let started = Path::new(store).join("run.json").exists();
        let first = if started { Vec::new() } else { [&RUN[..], &data].concat() };
        let more: Vec<&str> = self.more.iter().map(String::as_str).collect();
        train(store, &[&first[..], &more, faults].concat())
    }

    fn points(&self) -> BTreeMap<String, u64> {
        let (store, record) = (self.copy("recorded"), self.lab.path("record"));
        self.run(&store, &["--fault", &format!("record:{record}")]).expect(0);
        points(&record)
    }

    /// Strikes, recovers, compares; whether the blow landed.
    fn strike(&self, number: usize, blow: &Blow) -> bool {
        let (store, record) =
            (self.copy(&format!("s{number}")), self.lab.path(&format!("r{number}")));
        let spec = blow.spec();
        let ran = self.run(&store, &["--fault", &spec, "--fault", &format!("record:{record}")]);
        let landed =
            Path::new(&record).exists() && fs::read_to_string(&record).unwrap().contains("struck");
        let allowed: &[i32] = match blow.what {
            "abort" => &[134],
            "exit" => &[5],
            "panic" => &[0, 5],
            // A read that ends early is what a cut file gives.
            "short" => &[0, 3, 5],
            "enospc" => &[0, 4],
            _ => &[0, 5],
        };
        assert!(!landed || allowed.contains(&ran.code), "{spec}: {ran:?}");
        assert!(landed || ran.code == 0, "{spec}: {ran:?}");
        if ran.code != 0 {
            self.run(&store, &[]).expect(0);
        }
        assert_eq!(state(&store), self.calm, "{spec}");
        ftactor(&["verify", "--store", &store]).expect(0);
        fs::remove_dir_all(&store).unwrap();
        landed
    }

    /// Strikes everywhere, from two threads.
    fn strike_all(&self) {
        let blows = blows(&self.points());
        let (next, landed) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let work = || {
            while let Some(number) = Some(next.fetch_add(1, Ordering::Relaxed))
                && let Some(blow) = blows.get(number)
            {
                landed.fetch_add(usize::from(self.strike(number, blow)), Ordering::Relaxed);
            }
        };
        std::thread::scope(|scope| {
            let other = scope.spawn(work);
            work();
            other.join().unwrap();
        });
        let (landed, all) = (landed.into_inner(), blows.len());
        // How often a drain or a late answer comes depends on the moment.
        assert!(landed * 100 >= all * 97, "{landed} of {all} blows landed");
        assert!(all > 500, "only {all} points");
    }
}

/// The least memory that a run of these options needs.
fn least_ram(more: &[&str]) -> String {
    let lab = Lab::new();
    let (store, text) = (lab.store("probe", FAMILIES[0], 1), lab.text("text.txt", 30));
    bits::least_ram(&store, &[&RUN[..], &[&text], more].concat()).to_string()
}

#[test]
fn every_point_of_a_deferred_run_with_the_least_memory_may_fail() {
    // Inputs and gradients go to `scratch/`.
    Bench::new(&["--ram", &least_ram(&[])]).strike_all();
}

#[test]
fn every_point_of_a_fused_run_may_fail() {
    Bench::new(&["--clip", "none"]).strike_all();
}

/// Both steps are in one commit, and the first one's versions wait in memory.
#[test]
fn every_point_of_a_run_that_commits_seldom_may_fail() {
    Bench::new(&["--clip", "none", "--commit-every", "2", "--io", "direct"]).strike_all();
}
