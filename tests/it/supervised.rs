//! `--supervise`: the run is killed, aborted, failed; the parent starts it again, or says why not.

use std::fs;
use std::process::Child;
use std::time::{Duration, Instant};

use crate::lab::{
    FAMILIES, Lab, Tiny, command, ftactor, kill, kill_pid, ran, solo, soon, start_training, state,
    train,
};

const MODEL: Tiny = Tiny { family: "llama", tied: true, layers: 3, hidden: 48 };
const RUN: [&str; 9] =
    ["--steps", "12", "--seq-len", "64", "--batch-rows", "4", "--lr", "3e-3", "--data"];

/// The process that a supervisor started, as soon as there is one after `last`.
fn child_of(parent: &Child, last: u32) -> u32 {
    let path = format!("/proc/{0}/task/{0}/children", parent.id());
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        let children = fs::read_to_string(&path).unwrap_or_default();
        let mut pids = children.split_whitespace().map(|pid| pid.parse().unwrap());
        if let Some(pid) = pids.find(|pid| *pid != last) {
            return pid;
        }
        assert!(Instant::now() < deadline, "the supervisor has no child");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn is_alive(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // A zombie is dead, but nobody has asked for its end yet.
    stat.rsplit(')').next().is_some_and(|rest| !rest.trim_start().starts_with(['Z', 'X']))
        && !stat.is_empty()
}

fn calm(lab: &Lab, text: &str) -> crate::lab::State {
    let store = lab.store("calm", MODEL, 4);
    train(&store, &[&RUN[..], &[text]].concat()).expect(0);
    state(&store)
}

#[test]
fn a_run_that_aborts_again_and_again_is_finished_with_the_same_bits() {
    let lab = Lab::new();
    let text = lab.text("text.txt", 60);
    let (calm, store) = (calm(&lab, &text), lab.store("store", MODEL, 4));
    // Every life commits two steps.
    let fault = ["--supervise", "--fault", "store.commit:abort:3"];
    let done = train(&store, &[&RUN[..], &[&text], &fault].concat()).expect(0);
    assert!(done.stderr.matches("ended by signal 6; starting again").count() >= 4, "{done:?}");
    assert_eq!(state(&store), calm);
}

#[test]
fn a_failed_disk_is_opened_again() {
    let lab = Lab::new();
    let text = lab.text("text.txt", 60);
    let (calm, store) = (calm(&lab, &text), lab.store("store", MODEL, 4));
    // Lives of some steps each: a failed sync poisons the store until it is opened again.
    let fault = ["--supervise", "--fault", "io.sync:eio:150"];
    let done = train(&store, &[&RUN[..], &[&text], &fault].concat()).expect(0);
    assert!(done.stderr.contains("exit code 5; starting again"), "{done:?}");
    assert_eq!(state(&store), calm);
}

#[test]
fn sigkill_is_answered_with_a_new_start_and_a_new_run_is_not_begun_twice() {
    let lab = Lab::new();
    let text = lab.text("text.txt", 60);
    let store = lab.store("store", MODEL, 4);
    let first = calm(&lab, &text);
    let again = [&RUN[..], &[&text, "--new-run"]].concat();
    train(&lab.path("calm"), &again).expect(0);
    let second = state(&lab.path("calm"));
    for (new_run, calm) in [(false, first), (true, second)] {
        let mut args = [&RUN[..], &[&text, "--supervise", "--fault", "run:delay=4:1+"]].concat();
        args.extend(new_run.then_some("--new-run"));
        let parent = start_training(&store, &args);
        let mut last = 0;
        for _ in 0..3 {
            let pid = child_of(&parent, last);
            std::thread::sleep(Duration::from_millis(60));
            kill_pid(pid, "-KILL");
            last = pid;
        }
        let done = ran(parent.wait_with_output().unwrap()).expect(0);
        assert!(done.stderr.contains("signal 9"), "{done:?}");
        assert_eq!(state(&store), calm, "new run: {new_run}");
    }
}

#[test]
fn a_run_that_gets_nowhere_is_given_up_with_the_reason() {
    let lab = Lab::new();
    let (store, text) = (lab.store("store", FAMILIES[0], 4), lab.text("text.txt", 60));
    let before = state(&store);
    let fault = ["--supervise", "--fault", "store.commit:abort:1"];
    let ended = train(&store, &[&RUN[..], &[&text], &fault].concat()).expect(5);
    let ended = ended.says(&["gave up after 5 restarts", "signal 6"]);
    assert_eq!(ended.stderr.matches("starting again").count(), 5);
    assert_eq!(state(&store), before);
}

#[test]
fn sigterm_stops_the_child_cleanly_and_so_does_the_supervisors_death() {
    let lab = Lab::new();
    let (store, text) = (lab.store("store", MODEL, 4), lab.text("text.txt", 60));
    let args = [&RUN[..], &[&text, "--supervise", "--fault", "run:delay=40:1+"]].concat();
    let parent = start_training(&store, &args);
    let pid = child_of(&parent, 0);
    while !std::path::Path::new(&store).join("run.json").exists() {
        std::thread::sleep(Duration::from_millis(2));
    }
    kill(&parent, "-TERM");
    let ended = ran(parent.wait_with_output().unwrap()).expect(130);
    assert!(!ended.stderr.contains("starting again"), "{ended:?}");
    assert!(!is_alive(pid));
    let mut parent = start_training(&store, &["--supervise", "--fault", "run:delay=40:1+"]);
    let pid = child_of(&parent, 0);
    parent.kill().unwrap();
    parent.wait().unwrap();
    let deadline = Instant::now() + Duration::from_secs(30);
    while is_alive(pid) {
        assert!(Instant::now() < deadline, "the child outlives its parent");
        std::thread::sleep(Duration::from_millis(5));
    }
    ftactor(&["verify", "--store", &store]).expect(0);
}

#[test]
fn what_another_try_cannot_change_is_passed_on() {
    let lab = Lab::new();
    let (store, text) = (lab.store("store", FAMILIES[0], 4), lab.text("text.txt", 60));
    let refused = |more: &[&str], code: i32| {
        let ended = soon(&solo(&store, &[more, &["--supervise"]].concat())).expect(code);
        assert!(!ended.stderr.contains("starting again"), "{ended:?}");
    };
    refused(&[], 2);
    refused(&["--data", &text, "--ram", "1K"], 4);
    refused(&["--data", &text, "--seq-len", "32", "--batch-rows", "4"], 0);
    refused(&[], 0);
}

/// What a first thread's panic ends a process with is a crash like any other.
#[test]
fn a_panic_before_the_actors_run_is_answered_with_a_new_start() {
    let lab = Lab::new();
    let (store, text) = (lab.store("store", FAMILIES[0], 4), lab.text("text.txt", 60));
    let fault = ["--supervise", "--fault", "io.list:panic:1"];
    let ended = train(&store, &[&RUN[..], &[&text], &fault].concat()).expect(5);
    let ended = ended.says(&["gave up after 5 restarts", "exit code 101"]);
    assert_eq!(ended.stderr.matches("starting again").count(), 5);
}

#[test]
fn a_finished_run_whose_words_are_lost_is_not_started_again() {
    let lab = Lab::new();
    let (store, text) = (lab.store("store", FAMILIES[0], 4), lab.text("text.txt", 60));
    let args = solo(&store, &[&RUN[..], &[&text, "--supervise", "--json"]].concat());
    let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let ended = command(&args).stdout(full).output().unwrap();
    let said = String::from_utf8(ended.stderr).unwrap();
    assert_eq!(ended.status.code(), Some(5), "{said}");
    assert!(said.contains("cannot be written") && !said.contains("starting again"), "{said}");
    assert_eq!(state(&store).0, 12);
}
