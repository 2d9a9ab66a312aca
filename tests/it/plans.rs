//! `plan` against what runs do, and what it refuses.

use serde_json::Value;

use crate::lab::{FAMILIES, Lab, RAM, Tiny, ftactor, log, steps, train};

fn plan(args: &[&str]) -> Value {
    ftactor(&[&["plan", "--json"], args].concat()).expect(0).json()
}

#[test]
fn bytes_are_those_that_runs_ask_for() {
    let lab = Lab::new();
    let text = lab.text("text.txt", 60);
    let wide = Tiny { family: "llama", tied: false, layers: 3, hidden: 96 };
    let options = ["--seq-len", "32", "--batch-rows", "4", "--micro-rows", "2"];
    for (at, (model, layout, more, tight)) in [
        (FAMILIES[0], "f32", ["--clip", "none"], false),
        (FAMILIES[1], "split8", ["--compute-dtype", "bf16"], false),
        (wide, "f32", ["--update", "deferred"], true),
        (wide, "bf16sr8", ["--clip", "none"], true),
        (wide, "split", ["--update", "speculative"], false),
    ]
    .into_iter()
    .enumerate()
    {
        let config = lab.write(&format!("{at}.json"), model.config());
        let (store, line) = (lab.path(&format!("store{at}")), lab.path(&format!("{at}.jsonl")));
        ftactor(&["init", "--config", &config, "--store", &store, "--layout", layout]).expect(0);
        let options = [&options[..], &more].concat();
        let least = plan(&[&["--store", &store][..], &options].concat());
        let least = least["layouts"][0]["least_ram_bytes"].as_u64().unwrap().to_string();
        let ram = if tight { &least } else { RAM };
        let options = [&options[..], &["--ram", ram]].concat();
        let planned = plan(&[&["--store", &store][..], &options].concat());
        assert_eq!(planned["layouts"].as_array().unwrap().len(), 1);
        let step = &planned["layouts"][0]["step"];
        let mut args = [&options[..], &["--steps", "4", "--data", &text, "--log", &line]].concat();
        if more[0] != "--clip" {
            // Nothing is clipped, so that speculation succeeds.
            args.extend(["--clip", "global:1000"]);
        }
        train(&store, &args).expect(0);
        // Reads of the next step begin before a step is committed: only the sum is whole.
        let lines = log(&line);
        let sum = |field: &str| steps(&lines, field).iter().sum::<f64>();
        let planned = |field: &str| 4.0 * step[field].as_f64().unwrap();
        let (asked, written) = (planned("asked_bytes"), planned("written_bytes"));
        // Rows of the embedding are counted as if all tokens differed.
        let rows = 4.0 * 128.0 * model.hidden as f64 * 4.0;
        let read = sum("read_bytes");
        assert!((asked - rows..=asked * 1.001).contains(&read), "{at}: {read} of {asked}");
        // Chunk hashes and the log come on top.
        let (found, small) = (sum("written_bytes"), 4.0 * 8192.0);
        assert!((written..written + small).contains(&found), "{at}: {found} of {written}");
    }
}

#[test]
fn sizes_and_configs_are_planned_in_all_layouts() {
    let all = plan(&["--size", "7b", "--ram", "12G"]);
    let layouts = all["layouts"].as_array().unwrap();
    let names: Vec<_> = layouts.iter().map(|l| l["layout"].as_str().unwrap()).collect();
    assert_eq!(names, ["f32", "split", "split8", "bf16sr8"]);
    let disk = |i: usize| layouts[i]["disk_bytes"].as_u64().unwrap();
    assert_eq!(disk(0), all["parameters"].as_u64().unwrap() * 24);
    assert!(disk(2) * 2 < disk(0) * 102 / 100);
    let lab = Lab::new();
    let config = lab.write("config.json", FAMILIES[3].config());
    let one = plan(&["--config", &config, "--layout", "split8", "--ram", "64K", "--seq-len", "32"]);
    let [layout] = one["layouts"].as_array().unwrap().as_slice() else { panic!("{one}") };
    assert!(layout["refused"].as_str().unwrap().contains("too small"), "{layout}");
    assert!(layout["step"].is_null());
    let shown = ftactor(&["plan", "--config", &config, "--ram", "64K", "--seq-len", "32"]);
    assert!(shown.expect(0).stdout.contains("raise --ram"));
}

#[test]
fn what_cannot_be_planned_is_refused_by_name() {
    ftactor(&["plan"]).expect(2).says(&["--size 7b"]);
    ftactor(&["plan", "--size", "9b"]).expect(2).says(&["9b", "70b", "--config"]);
    ftactor(&["plan", "--size", "7b", "--config", "x"]).expect(2);
    ftactor(&["plan", "--config", "/nowhere.json"]).expect(2).says(&["/nowhere.json"]);
    ftactor(&["plan", "--store", "/nowhere"]).expect(2).says(&["/nowhere"]);
    ftactor(&["plan", "--size", "7b", "--layout", "f16"]).expect(2).says(&["f16"]);
}

#[test]
fn a_profile_adds_seconds_and_one_of_another_machine_is_named() {
    let lab = Lab::new();
    let profile = lab.path("profile.toml");
    let here = lab.path("");
    let quick = ["--disk-bytes", "16M", "--row-tokens", "8"];
    let bench = ["bench", "--store", &here, "--out", &profile, "--json"];
    let measured = ftactor(&[&bench[..], &quick].concat()).expect(0).json();
    let rates = &measured["rates"];
    assert_eq!(rates["compute"].as_array().unwrap().len(), 6);
    assert_eq!(rates["optimizer"].as_array().unwrap().len(), 4);
    assert!(rates["disk"]["both"].as_f64().unwrap() > 0.0);
    let ask = ["--size", "7b", "--ram", "16G", "--hardware", &profile, "--steps", "100"];
    let planned = plan(&ask);
    for layout in planned["layouts"].as_array().unwrap() {
        let seconds = &layout["step"]["seconds"];
        let of = |field: &str| seconds[field].as_f64().unwrap();
        let processor = of("compute") + of("optimizer");
        assert_eq!(of("step"), processor.max(of("disk")));
        assert_eq!(seconds["binds"] == "disk", of("disk") > processor);
        assert_eq!(of("run"), 100.0 * of("step"));
    }
    ftactor(&[&["plan"], &ask[..]].concat()).expect(0);

    let text = std::fs::read_to_string(&profile).unwrap();
    let line = text.lines().find(|line| line.starts_with("machine")).unwrap();
    let other = lab.write("other.toml", text.replace(line, "machine = \"another one\""));
    let args = ["plan", "--size", "7b", "--ram", "16G", "--hardware", &other];
    ftactor(&args).expect(0).says(&["another one"]);
    let broken = lab.write("broken.toml", "format = 1");
    ftactor(&["plan", "--size", "7b", "--hardware", &broken]).expect(2).says(&["broken.toml"]);
    ftactor(&["bench", "--store", "/nowhere"]).expect(2).says(&["/nowhere"]);
    let args = ["bench", "--store", &here, "--out", &profile, "--disk-bytes", "900000G"];
    ftactor(&args).expect(4);
}
