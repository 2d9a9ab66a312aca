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
    let tight = ["plan", "--config", &config, "--ram", "64K", "--seq-len", "32"];
    let one = ftactor(&[&tight[..], &["--layout", "split8", "--json"]].concat()).expect(4).json();
    let [layout] = one["layouts"].as_array().unwrap().as_slice() else { panic!("{one}") };
    assert!(layout["refused"].as_str().unwrap().contains("too small"), "{layout}");
    assert!(layout["step"].is_null());
    let shown = ftactor(&tight).expect(4).stdout;
    let refusals = shown.matches("raise --ram to ").count();
    assert_eq!((refusals, shown.contains("smaller")), (4, false), "nothing helps: {shown}");
    // What is advised suffices when it is followed.
    let least = |rows: &str| {
        let asked =
            ["--config", &config, "--layout", "f32", "--seq-len", "32", "--batch-rows", rows];
        plan(&asked)["layouts"][0]["least_ram_bytes"].to_string()
    };
    let (one, eight) = (least("1"), least("8"));
    let within = |ram: &str, rows: &str| {
        let asked = ["plan", "--config", &config, "--layout", "f32", "--seq-len", "32"];
        ftactor(&[&asked[..], &["--ram", ram, "--batch-rows", rows]].concat())
    };
    let shown = within(&one, "8").expect(4).stdout;
    assert!(shown.contains("choose a smaller --batch-rows"), "{shown}");
    within(&one, "1").expect(0);
    let mib = crate::bits::number_after(&shown, "raise --ram to ");
    assert!(mib << 20 >= eight.parse().unwrap(), "{mib}");
    within(&format!("{mib}M"), "8").expect(0);
}

#[test]
fn layers_to_lock_are_planned_as_locked() {
    let written = |more: &[&str]| {
        let args = [&["--size", "135m", "--layout", "f32", "--ram", "2G"][..], more].concat();
        plan(&args)["layouts"][0]["step"]["written_bytes"].as_u64().unwrap()
    };
    assert!(written(&["--lock", "embed,0-14"]) * 2 < written(&[]) + (200 << 20));
    let refused = |layers| ftactor(&["plan", "--size", "135m", "--lock", layers]).expect(2);
    refused("embed,0-29,head").says(&["nothing would be trained"]);
    refused("0-99").says(&["99"]);
    ftactor(&["plan", "--size", "135m", "--tbw", "nan"]).expect(2).says(&["--tbw"]);
}

/// What is given wins; what a run froze comes next; a run that goes on has its rows.
#[test]
fn a_store_is_planned_and_measured_as_its_run_goes() {
    let lab = Lab::new();
    let (store, text) = lab.store_and_text();
    let of_run = ["--seq-len", "48", "--batch-rows", "6", "--micro-rows", "3", "--steps", "4"];
    train(&store, &[&of_run[..], &["--data", &text]].concat()).expect(0);
    let here = ["plan", "--store", &store];
    let tokens = |more: &[&str]| plan(&[&here[1..], more].concat())["tokens_per_step"].clone();
    assert_eq!((tokens(&[]), tokens(&["--batch-rows", "5"])), (288.into(), 240.into()));
    let rows = |args: &[&str]| {
        let args = [args, &["--store", &store, "--data", &text, "--json"]].concat();
        ftactor(&args).expect(0).json()
    };
    let seen = rows(&["data"]);
    assert_eq!(seen["seq_len"], 48);
    assert_eq!(rows(&["eval"])["rows"], seen["rows"]);
    assert_eq!(rows(&["data", "--seq-len", "16"])["seq_len"], 16);

    let one = plan(&["--store", &store, "--batch-rows", "1"]);
    let ram = one["layouts"][0]["least_ram_bytes"].to_string();
    let refused = |args: &[&str]| {
        let refused = ftactor(&[args, &["--ram", &ram]].concat()).expect(4);
        refused.stdout + &refused.stderr
    };
    let goes_on = refused(&here);
    assert!(goes_on.contains("raise --ram to") && !goes_on.contains("--batch-rows"), "{goes_on}");
    assert!(refused(&[&here[..], &["--lr", "1"]].concat()).contains("--batch-rows"));
    let begun = ["solo", "--store", &store, "--metrics", "off", "--steps", "9"];
    let goes_on = refused(&begun);
    assert!(goes_on.contains("raise --ram to") && !goes_on.contains("--batch-rows"), "{goes_on}");
}

/// Gradients that wait on the disk for their norm move more than is saved, unless there is room.
#[test]
fn commits_that_are_seldom_for_nothing_are_told() {
    let lab = Lab::new();
    let wide = Tiny { family: "llama", tied: false, layers: 3, hidden: 96 };
    let (config, text) = (lab.write("wide.json", wide.config()), lab.text("text.txt", 30));
    let store = lab.path("store");
    ftactor(&["init", "--config", &config, "--store", &store]).expect(0);
    let run = ["--seq-len", "32", "--batch-rows", "2", "--steps", "2", "--commit-every", "2"];
    let of_run = plan(&[&["--store", &store][..], &run].concat());
    let least = of_run["layouts"][0]["least_ram_bytes"].to_string();
    let seldom = |ram: &str| {
        let step = [&["--store", &store, "--ram", ram][..], &run].concat();
        plan(&step)["layouts"][0]["note"].clone()
    };
    assert!(seldom(RAM).is_null());
    assert!(seldom(&least).as_str().unwrap().contains("--commit-every 2 is no gain"));
    let tight = [&run[..], &["--ram", &least, "--data", &text]].concat();
    train(&store, &tight).expect(0).says(&["--commit-every 2 is no gain"]);
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
