//! Somebody who never answers ends the process, and only then.

use std::time::Duration;

use crate::fault_points::points;
use crate::lab::{FAMILIES, Lab, kill, ran, solo, soon, start_training, state, train};

const RUN: [&str; 9] =
    ["--steps", "14", "--seq-len", "32", "--batch-rows", "4", "--micro-rows", "1", "--data"];

#[test]
fn a_stuck_actor_ends_the_process_with_its_name_and_the_next_one_goes_on() {
    let lab = Lab::new();
    let text = lab.text("text.txt", 60);
    let (calm, record) = (lab.store("calm", FAMILIES[0], 4), lab.path("record"));
    let recorded = format!("record:{record}");
    train(&calm, &[&RUN[..], &[&text, "--fault", &recorded]].concat()).expect(0);
    let reads = points(&record)["io.read"] * 5 / 6;
    // In the ninth step or later: by then everybody has a history.
    for (i, (fault, words)) in [
        ("compute.backward:delay=3600000:180", ["compute", "message"]),
        ("store.read_chunk:delay=3600000:44", ["store", "message"]),
        ("optimizer.chunk_read:delay=3600000:44", ["optimizer", "update"]),
        (&format!("io.read:delay=3600000:{reads}"), ["store", "no "]),
        ("io.write:delay=3600000:200", ["store", "commit"]),
    ]
    .into_iter()
    .enumerate()
    {
        let store = lab.store(&format!("store{i}"), FAMILIES[0], 4);
        let args = [&RUN[..], &[&text, "--stuck-after", "2", "--fault", fault]].concat();
        let ended = soon(&solo(&store, &args)).expect(5);
        ended.says(&[&format!("actor {} is stuck", words[0]), words[1], "go on with: ftactor"]);
        assert!((7..14).contains(&state(&store).0), "{fault}: {:?}", state(&store).0);
        train(&store, &[]).expect(0);
        assert_eq!(state(&store), state(&calm), "{fault}");
    }
}

#[test]
fn a_process_that_was_stopped_for_a_while_is_not_stuck() {
    let lab = Lab::new();
    let text = lab.text("text.txt", 60);
    let calm = lab.store("calm", FAMILIES[0], 4);
    train(&calm, &[&RUN[..], &[&text]].concat()).expect(0);
    let store = lab.store("store", FAMILIES[0], 4);
    let slow = ["--stuck-after", "3", "--fault", "run:delay=30:1+"];
    let child = start_training(&store, &[&RUN[..], &[&text], &slow].concat());
    std::thread::sleep(Duration::from_millis(250));
    kill(&child, "-STOP");
    std::thread::sleep(Duration::from_millis(6000));
    kill(&child, "-CONT");
    ran(child.wait_with_output().unwrap()).expect(0);
    assert_eq!(state(&store), state(&calm));
}
