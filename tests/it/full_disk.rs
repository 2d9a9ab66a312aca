//! A disk without room: a step waits before it begins, and goes on or is stopped.

use std::process::Command;

use crate::lab::{FAMILIES, Lab, events, kill, log, ran, start_training, state, train};

const RUN: [&str; 7] = ["--steps", "4", "--seq-len", "32", "--batch-rows", "4", "--data"];

#[test]
fn a_step_waits_for_room_and_goes_on_with_the_same_bits() {
    let lab = Lab::new();
    let text = lab.text("text.txt", 60);
    let (calm, store) = (lab.store("calm", FAMILIES[0], 1), lab.store("store", FAMILIES[0], 1));
    train(&calm, &[&RUN[..], &[&text]].concat()).expect(0);
    let log_file = lab.path("log.jsonl");
    // One look a step.
    let fault = ["--fault", "io.free_bytes:enospc:3", "--log", &log_file];
    let done = train(&store, &[&RUN[..], &[&text], &fault].concat()).expect(0);
    done.says(&["step 3 waits: the disk is nearly full", "available"]);
    let lines = log(&log_file);
    assert_eq!((events(&lines, "pause").len(), events(&lines, "resume").len()), (1, 1));
    assert_eq!(events(&lines, "abort").len(), 0);
    assert_eq!(state(&store), state(&calm));
}

#[test]
fn a_run_that_waits_can_be_stopped() {
    let lab = Lab::new();
    let (store, text) = (lab.store("store", FAMILIES[0], 1), lab.text("text.txt", 60));
    let log_file = lab.path("log.jsonl");
    let fault = ["--fault", "io.free_bytes:enospc:3+", "--log", &log_file];
    let child = start_training(&store, &[&RUN[..], &[&text], &fault].concat());
    while !std::fs::read_to_string(&log_file).is_ok_and(|text| text.contains("pause")) {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    kill(&child, "-INT");
    ran(child.wait_with_output().unwrap()).expect(130);
    // The step before was being swept when the next one was asked for: a stop may drop it.
    assert!((1..=2).contains(&state(&store).0));
    train(&store, &[]).expect(0);
}

/// On a file system of its own that is really full; only root may mount one.
#[test]
fn a_file_system_that_is_full_holds_the_run_up_and_harms_nothing() {
    let lab = Lab::new();
    let disk = lab.path("disk");
    std::fs::create_dir(&disk).unwrap();
    let mount = ["-t", "tmpfs", "-o", "size=40m", "tmpfs", &disk];
    if !Command::new("mount").args(mount).output().is_ok_and(|mounted| mounted.status.success()) {
        return eprintln!("skipped: this user may not mount a file system");
    }
    let text = lab.text("text.txt", 60);
    let store = lab.store("disk/store", FAMILIES[0], 1);
    std::fs::write(format!("{disk}/ballast"), vec![1; 30 << 20]).unwrap();
    let log_file = lab.path("log.jsonl");
    let child = start_training(&store, &[&RUN[..], &[&text, "--log", &log_file]].concat());
    while !std::fs::read_to_string(&log_file).is_ok_and(|text| text.contains("pause")) {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    std::fs::remove_file(format!("{disk}/ballast")).unwrap();
    let done = ran(child.wait_with_output().unwrap());
    let reached = state(&store).0;
    assert!(Command::new("umount").arg(&disk).status().unwrap().success());
    done.expect(0);
    assert_eq!(reached, 4);
}
