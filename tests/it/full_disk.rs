//! A disk without room: a step waits before it begins, and goes on or is stopped.

use std::io::Write;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::lab::{
    FAMILIES, Lab, command, events, kill, kill_pid, log, ran, solo, start_training, state, train,
};

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

/// A small file system in memory; only root may mount one.
struct Disk {
    dir: String,
}

impl Disk {
    fn mount(lab: &Lab) -> Option<Disk> {
        let dir = lab.path("disk");
        std::fs::create_dir(&dir).unwrap();
        let mount = ["-t", "tmpfs", "-o", "size=40m", "tmpfs", &dir];
        let mounted = Command::new("mount").args(mount).output();
        if mounted.is_ok_and(|mounted| mounted.status.success()) {
            return Some(Disk { dir });
        }
        eprintln!("skipped: this user may not mount a file system");
        None
    }

    fn ballast(&self) -> String {
        format!("{}/ballast", self.dir)
    }

    /// Leaves `free` bytes; as many as fit are taken first.
    fn fill(&self, free: u64) {
        let mut file = std::fs::File::create(self.ballast()).unwrap();
        while file.write(&[1; 4096]).is_ok_and(|count| count > 0) {}
        file.set_len(file.metadata().unwrap().len() - free).unwrap();
    }

    fn free(&self) {
        std::fs::remove_file(self.ballast()).unwrap();
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        assert!(Command::new("umount").arg(&self.dir).status().unwrap().success());
    }
}

fn wait_for(said: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !said() {
        assert!(Instant::now() < deadline, "nothing is said");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_file_system_that_is_full_holds_the_run_up_and_harms_nothing() {
    let lab = Lab::new();
    let Some(disk) = Disk::mount(&lab) else { return };
    let text = lab.text("text.txt", 60);
    let store = lab.store("disk/store", FAMILIES[0], 1);
    disk.fill(1 << 20);
    let log_file = lab.path("log.jsonl");
    let paused = || std::fs::read_to_string(&log_file).is_ok_and(|text| text.contains("pause"));
    let child = start_training(&store, &[&RUN[..], &[&text, "--log", &log_file]].concat());
    wait_for(paused);
    // Not a byte is left when it is told to stop: the index can wait.
    disk.free();
    disk.fill(0);
    kill(&child, "-INT");
    let stopped = ran(child.wait_with_output().unwrap()).expect(130);
    stopped.says(&["every step is kept", "ftactor inspect"]);
    disk.free();
    disk.fill(1 << 20);
    std::fs::remove_file(&log_file).unwrap();
    let child = start_training(&store, &["--log", &log_file]);
    wait_for(paused);
    disk.free();
    ran(child.wait_with_output().unwrap()).expect(0);
    assert_eq!(state(&store).0, 4);
}

#[test]
fn a_supervised_run_that_finds_no_room_when_it_starts_again_waits_for_it() {
    let lab = Lab::new();
    let Some(disk) = Disk::mount(&lab) else { return };
    let (calm, text) = (lab.store("calm", FAMILIES[0], 1), lab.text("text.txt", 60));
    train(&calm, &[&RUN[..], &[&text]].concat()).expect(0);
    let (store, said) = (lab.store("disk/store", FAMILIES[0], 1), lab.path("said.txt"));
    let slow = ["--supervise", "--fault", "store.commit:delay=300:1+"];
    let args = solo(&store, &[&RUN[..], &[&text], &slow].concat());
    let errors = std::fs::File::create(&said).unwrap();
    let mut parent = command(&args).stderr(errors).spawn().unwrap();
    wait_for(|| std::fs::read_dir(format!("{store}/commit")).is_ok_and(|d| d.count() == 2));
    wait_for(|| std::path::Path::new(&store).join("run.json").exists());
    disk.fill(0);
    let child = std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", parent.id()));
    kill_pid(child.unwrap().trim(), "-KILL");
    let waits = || std::fs::read_to_string(&said).is_ok_and(|text| text.contains("trying again"));
    wait_for(waits);
    disk.free();
    assert_eq!(parent.wait().unwrap().code(), Some(0));
    assert_eq!(state(&store), state(&calm));
}
