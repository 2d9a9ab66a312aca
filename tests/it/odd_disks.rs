//! File systems that lack what a store is built on: said once, done without, the same bits.

use std::process::Command;

use crate::lab::{FAMILIES, Lab, Ran, ran, state, train};

const STEPS: [&str; 9] =
    ["--steps", "4", "--seq-len", "32", "--batch-rows", "4", "--micro-rows", "2", "--quiet"];

/// Runs a script with a ramfs - no direct I/O, no allocation ahead, no free space to be told - at `$1` and
/// the command as `$0`; `None` where this user may not mount.
fn on_ramfs(at: &str, script: &str, more: &[&str]) -> Option<Ran> {
    let whole = format!("mount -t ramfs none \"$1\" || exit 99; {script}");
    let command = env!("CARGO_BIN_EXE_ftactor");
    let words = ["-Urm", "sh", "-ec", &whole, command, at];
    let done = Command::new("unshare").args(words).args(more).output().ok()?;
    let done = ran(done);
    let may = done.code != 99 && !done.stderr.contains("unshare");
    if !may {
        eprintln!("skipped: no mounts for this user: {}", done.stderr);
    }
    may.then_some(done)
}

#[test]
fn without_direct_io_and_allocation_a_run_goes_on_and_says_so() {
    let lab = Lab::new();
    let text = lab.text("text.txt", 60);
    let config = lab.write("config.json", FAMILIES[1].config());
    let at = lab.path("mount");
    std::fs::create_dir(&at).unwrap();
    let script = format!(
        "\"$0\" init --config \"$2\" --store \"$1/store\" --seed 7
         \"$0\" solo --store \"$1/store\" --metrics off --io direct --data \"$3\" {}
         \"$0\" verify --store \"$1/store\"
         \"$0\" inspect --store \"$1/store\" --json",
        STEPS.join(" ")
    );
    let Some(ran) = on_ramfs(&at, &script, &[&config, &text]) else { return };
    let ran = ran.expect(0).says(&["without direct I/O", "allocates no space ahead"]);
    let store = lab.path("store");
    let init = ["init", "--config", &config, "--store", &store, "--seed", "7"];
    crate::lab::ftactor(&init).expect(0);
    train(&store, &[&STEPS[..], &["--data", &text]].concat()).expect(0);
    for (hash, _) in state(&store).1 {
        assert!(ran.stdout.contains(&hash), "{}", ran.stdout);
    }
}
