//! The same bits, whatever policy, threads and memory a step runs with.

use crate::lab::{FAMILIES, Lab, Tiny, events, ftactor, log, state, steps, train};

const STEPS: [&str; 10] = [
    "--steps",
    "4",
    "--seq-len",
    "32",
    "--batch-rows",
    "4",
    "--weight-decay",
    "0.1",
    "--lr",
    "3e-3",
];

/// Trains twins that differ in `ways` only; the state must be the same and not the start's.
#[track_caller]
fn same_bits(model: Tiny, seed: u64, common: &[&str], ways: &[&[&str]]) {
    let lab = Lab::new();
    let text = lab.text("text.txt", 60);
    let mut first = None;
    for (i, way) in ways.iter().enumerate() {
        let store = lab.store(&format!("store{i}"), model, seed);
        let before = state(&store);
        let args = [&STEPS, common, way, &["--data", &text]].concat();
        train(&store, &args).expect(0);
        let after = state(&store);
        assert_eq!(after.0, 4);
        assert!(after.1.iter().zip(&before.1).all(|(a, b)| a.0 != b.0 && a.1 == 4), "{after:?}");
        assert_eq!(first.get_or_insert(after.clone()), &after, "{model:?} {seed} {way:?}");
    }
}

#[test]
fn fused_equals_deferred_without_clipping() {
    for (seed, model) in FAMILIES.into_iter().enumerate() {
        let ways: &[&[&str]] = &[&["--update", "fused"], &["--update", "deferred"]];
        same_bits(model, seed as u64, &["--clip", "none", "--micro-rows", "2"], ways);
    }
}

#[test]
fn fused_equals_deferred_when_each_layer_is_clipped() {
    for (seed, model) in FAMILIES.into_iter().enumerate() {
        let ways: &[&[&str]] = &[&["--update", "fused"], &["--update", "deferred"], &[]];
        same_bits(model, seed as u64 + 10, &["--clip", "layer:0.05", "--micro-rows", "4"], ways);
    }
}

#[test]
fn speculative_equals_deferred_whatever_is_clipped() {
    for (seed, model) in FAMILIES.into_iter().enumerate() {
        let seed = seed as u64 + 40;
        let lab = Lab::new();
        let (line, text) = (lab.path("log.jsonl"), lab.text("text.txt", 60));
        let store = lab.store("store", model, seed);
        let args = [&STEPS[..], &["--micro-rows", "2", "--data", &text, "--log", &line]].concat();
        train(&store, &[&args[..], &["--clip", "global:1000"]].concat()).expect(0);
        let norms = steps(&log(&line), "grad_norm");
        let least = norms.iter().fold(f64::MAX, |a, b| a.min(*b));
        let most = norms.iter().fold(0.0f64, |a, b| a.max(*b));
        assert!(least < 0.98 * most, "{norms:?}");
        // Never, in some steps, in all.
        for (clip, some, all) in [
            (1000.0, false, false),
            ((least + most) / 2.0, true, false),
            (1e-3 * least, true, true),
        ] {
            let line = lab.path(&format!("{clip}.jsonl"));
            let clip = format!("global:{clip}");
            let ways: &[&[&str]] = &[
                &["--update", "deferred"],
                &["--update", "speculative", "--log", &line],
                &["--update", "auto"],
                &["--update", "speculative", "--io", "direct", "--threads", "1"],
            ];
            same_bits(model, seed, &["--clip", &clip, "--micro-rows", "2"], ways);
            let lines = log(&line);
            let again = events(&lines, "redo").len();
            let factors = steps(&lines, "clip_factor");
            let clipped = factors.iter().filter(|factor| **factor < 1.0).count();
            assert_eq!((again, again > 0, again == 4), (clipped, some, all), "{clip} {norms:?}");
        }
    }
}

#[test]
fn auto_with_the_least_memory_equals_deferred_with_plenty() {
    let lab = Lab::new();
    let text = lab.text("text.txt", 60);
    let model = FAMILIES[1];
    let args =
        [&STEPS[..], &["--clip", "global:1.5", "--micro-rows", "1", "--data", &text]].concat();
    let plenty = lab.store("plenty", model, 5);
    train(&plenty, &args).expect(0);
    let tight = lab.store("tight", model, 5);
    let refused = train(&tight, &[&args[..], &["--ram", "64K"]].concat()).expect(4);
    let least = refused.stderr.split("at least ").nth(1).unwrap().split(' ').next().unwrap();
    train(&tight, &[&args[..], &["--ram", least]].concat()).expect(0);
    assert_eq!(state(&tight), state(&plenty));
}

#[test]
fn the_number_of_threads_changes_nothing() {
    let wide = Tiny { family: "llama", tied: true, layers: 2, hidden: 96 };
    for (seed, model) in FAMILIES.into_iter().chain([wide]).enumerate() {
        let ways: &[&[&str]] = &[&["--threads", "1"], &["--threads", "2"], &["--threads", "3"]];
        same_bits(model, seed as u64 + 20, &["--micro-rows", "2"], ways);
    }
}

#[test]
fn every_engine_gives_the_same_bits() {
    let wide = Tiny { family: "llama", tied: true, layers: 2, hidden: 96 };
    for (seed, model) in FAMILIES.into_iter().chain([wide]).enumerate() {
        let mmap = ["--io", "mmap", "--update", "deferred"];
        let direct = ["--io", "direct", "--update", "deferred"];
        let fused = ["--io", "direct", "--update", "fused"];
        let ways: &[&[&str]] = &[&mmap, &direct, &fused];
        same_bits(model, seed as u64 + 30, &["--clip", "none", "--micro-rows", "2"], ways);
    }
}

#[test]
fn every_budget_that_fits_gives_the_same_bits() {
    for model in [FAMILIES[0], FAMILIES[3]] {
        let lab = Lab::new();
        let text = lab.text("text.txt", 60);
        let probe = lab.store("probe", model, 3);
        let args = [&STEPS[..], &["--micro-rows", "1", "--data", &text]].concat();
        let needed = least_ram(&probe, &args);
        let too_small = (needed - 1).to_string();
        train(&probe, &[&args[..], &["--ram", &too_small]].concat()).expect(4);
        let least = needed.to_string();
        let little_more = (needed + 50_000).to_string();
        let micro = ["--micro-rows", "1"];
        let ways: &[&[&str]] = &[
            &["--ram", &least],
            &["--ram", &little_more],
            &["--ram", "1G"],
            &["--ram", &least, "--io", "direct"],
            &["--ram", "1G", "--io", "direct"],
        ];
        same_bits(model, 3, &micro, ways);
    }
}

/// Pieces of gradients that meet inside chunks: of layers that do not fit whole into the least
/// budget, of a head of several tiles, and of one that is tied, whose gradient waits on the disk for
/// the embedding's.
#[test]
fn layers_in_blocks_and_heads_in_tiles_give_the_bits_of_whole_layers() {
    const PLENTY: Option<&str> = Some("1G");
    let lab = Lab::new();
    let text = lab.text("text.txt", 20);
    let shape = "--steps 2 --seq-len 16 --batch-rows 2 --micro-rows 1 --lr 1e-3".split(' ');
    let shape: Vec<&str> = shape.chain(["--data", &text]).collect();
    let models = [
        (6000, 300, false, "layer:0.05"),
        (64, 17_000, false, "none"),
        (64, 17_000, true, "layer:0.05"),
    ];
    for (ffn, vocabulary, tied, clip) in models {
        let config = format!(
            r#"{{"model_type":"llama","vocab_size":{vocabulary},"hidden_size":256,
                "intermediate_size":{ffn},"num_hidden_layers":2,"num_attention_heads":4,
                "num_key_value_heads":2,"max_position_embeddings":64,
                "tie_word_embeddings":{tied}}}"#
        );
        let config = lab.write("config.json", config);
        let mut want = None;
        for (update, io, ram) in [
            ("deferred", "mmap", PLENTY),
            ("deferred", "mmap", None),
            ("fused", "direct", None),
            ("fused", "mmap", PLENTY),
        ] {
            let store = lab.path("store");
            ftactor(&["init", "--config", &config, "--store", &store]).expect(0);
            let args = [&shape[..], &["--clip", clip, "--update", update, "--io", io]].concat();
            let refused = train(&store, &[&args[..], &["--ram", "64K"]].concat()).expect(4);
            let least = number_after(&refused.stderr, "needs at least ").to_string();
            train(&store, &[&args[..], &["--ram", ram.unwrap_or(&least)]].concat()).expect(0);
            let after = state(&store);
            assert_eq!(want.get_or_insert(after.clone()), &after, "{ffn} {update} {io} {ram:?}");
            std::fs::remove_dir_all(&store).unwrap();
        }
    }
}

/// The number that follows `words` in `text`.
#[test]
fn how_many_inputs_are_kept_changes_no_bits() {
    for (model, micro) in [
        (Tiny { family: "llama", tied: true, layers: 7, hidden: 16 }, "1"),
        (Tiny { family: "qwen3", tied: false, layers: 6, hidden: 16 }, "2"),
    ] {
        let lab = Lab::new();
        let text = lab.text("text.txt", 60);
        let micro = ["--micro-rows", micro];
        // Whole layers, blocks of them, and what the least memory takes to the disk.
        let least = |interval: &str| {
            let store = lab.store(&format!("probe{interval}"), model, 3);
            let more = ["--recompute-interval", interval, "--data", &text];
            least_ram(&store, &[&STEPS[..], &micro, &more].concat()).to_string()
        };
        let (two, three) = (least("2"), least("3"));
        let ways: &[&[&str]] = &[
            &[],
            &["--recompute-interval", "2"],
            &["--recompute-interval", "2", "--ram", &two],
            &["--recompute-interval", "3", "--ram", &three, "--io", "direct"],
            &["--recompute-interval", "3", "--update", "speculative", "--io", "direct"],
            &["--recompute-interval", "100", "--commit-every", "2"],
        ];
        same_bits(model, 50, &micro, ways);
        // With a locked prefix groups begin higher up.
        let mut want = None;
        for (at, way) in ways.iter().enumerate() {
            let store = lab.store(&format!("locked{at}"), model, 51);
            let locks = ["--lock", "embed,0-1", "--data", &text];
            train(&store, &[&STEPS[..], &micro, &locks, way].concat()).expect(0);
            let end = state(&store);
            assert_eq!(want.get_or_insert(end.clone()), &end, "{way:?}");
        }
    }
}

/// Each pays for something else first: inputs, chunks, tiles, inner activations, logits, state.
#[test]
fn every_budget_between_the_least_and_plenty_suffices() {
    let model = Tiny { family: "llama", tied: true, layers: 6, hidden: 16 };
    let lab = Lab::new();
    let text = lab.text("text.txt", 60);
    let run = [&STEPS[..], &["--micro-rows", "4", "--data", &text]].concat();
    let mut want = None;
    for interval in ["1", "2"] {
        let store = lab.store(&format!("probe{interval}"), model, 3);
        let how = ["--recompute-interval", interval, "--io", "direct"];
        let mut ram = least_ram(&store, &[&run[..], &how].concat());
        for at in 0..8 {
            let store = lab.store(&format!("store{interval}-{at}"), model, 3);
            let budget = ["--ram", &ram.to_string()];
            let ran = train(&store, &[&run[..], &how, &budget].concat()).expect(0);
            assert!(!ran.stderr.contains("tried again"), "{ram}: {}", ran.stderr);
            let end = state(&store);
            assert_eq!(want.get_or_insert(end.clone()), &end, "{ram}");
            ram += ram / 4;
        }
    }
}

/// The bytes that a run of these options asks for at least.
#[track_caller]
pub(crate) fn least_ram(store: &str, args: &[&str]) -> u64 {
    let refused = train(store, &[args, &["--ram", "1K"]].concat()).expect(4);
    number_after(&refused.stderr, "needs at least ")
}

pub(crate) fn number_after(text: &str, words: &str) -> u64 {
    let at = text.find(words).unwrap_or_else(|| panic!("no `{words}` in {text}")) + words.len();
    let digits: String = text[at..].chars().take_while(char::is_ascii_digit).collect();
    digits.parse().unwrap()
}

#[test]
fn microbatches_change_bits_but_hardly_the_loss() {
    let lab = Lab::new();
    let text = lab.text("text.txt", 60);
    let mut seen = Vec::new();
    for micro in ["4", "2", "1"] {
        let store = lab.store(&format!("store{micro}"), FAMILIES[1], 7);
        let log_file = lab.path(&format!("{micro}.jsonl"));
        let args = ["--micro-rows", micro, "--data", &text, "--log", &log_file];
        train(&store, &[&STEPS[..], &args].concat()).expect(0);
        seen.push((state(&store), steps(&log(&log_file), "loss")));
    }
    assert_ne!(seen[0].0, seen[1].0, "microbatches have no effect at all");
    for (_, losses) in &seen {
        assert_eq!(losses.len(), 4);
        let far = losses.iter().zip(&seen[0].1).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(far < 1e-5, "{losses:?} {:?}", seen[0].1);
    }
}

#[test]
fn an_actor_that_panics_costs_no_bits() {
    let lab = Lab::new();
    let text = lab.text("text.txt", 60);
    let args = [&STEPS[..], &["--micro-rows", "2", "--data", &text]].concat();
    let calm = lab.store("calm", FAMILIES[0], 5);
    train(&calm, &args).expect(0);
    for (i, fault) in [
        "compute:panic:1",
        "compute:panic:40",
        "store:panic:1",
        "store:panic:23",
        "store:panic:24",
        "store:panic:25",
        "store:panic:41",
        "optimizer:panic:1",
        "optimizer:panic:10",
        "optimizer:panic:33",
    ]
    .into_iter()
    .enumerate()
    {
        let actor = fault.split(':').next().unwrap();
        let store = lab.store(&format!("store{i}"), FAMILIES[0], 5);
        let log_file = lab.path(&format!("{i}.jsonl"));
        train(&store, &[&args[..], &["--fault", fault, "--log", &log_file]].concat()).expect(0);
        let lines = log(&log_file);
        let restarts = events(&lines, "restart");
        assert_eq!(restarts.len(), 1, "{fault}: {lines:?}");
        assert_eq!(restarts[0]["actor"], actor);
        assert_eq!(state(&store), state(&calm), "{fault}");
    }
}

#[test]
fn several_panics_in_one_run_cost_no_bits() {
    let lab = Lab::new();
    let text = lab.text("text.txt", 60);
    let args = [&STEPS[..], &["--micro-rows", "2", "--data", &text]].concat();
    let (calm, store) = (lab.store("calm", FAMILIES[3], 6), lab.store("store", FAMILIES[3], 6));
    train(&calm, &args).expect(0);
    let log_file = lab.path("log.jsonl");
    // One a step: a step that fails again and again ends the run.
    let faults = [
        "--fault",
        "store:panic:12",
        "--fault",
        "compute:panic:90",
        "--fault",
        "optimizer:panic:75",
        "--fault",
        "compute:panic:190",
        "--log",
        &log_file,
    ];
    train(&store, &[&args[..], &faults].concat()).expect(0);
    assert_eq!(events(&log(&log_file), "restart").len(), 4);
    assert_eq!(state(&store), state(&calm));
}

#[test]
fn a_machine_that_panics_ends_the_run_and_leaves_the_store_whole() {
    let lab = Lab::new();
    let text = lab.text("text.txt", 60);
    let args = [&STEPS[..], &["--micro-rows", "2", "--data", &text]].concat();
    let calm = lab.store("calm", FAMILIES[0], 5);
    train(&calm, &args).expect(0);
    for (i, fault) in
        ["node:panic:5", "node:panic:90", "run:panic:5", "run:panic:9"].into_iter().enumerate()
    {
        let store = lab.store(&format!("store{i}"), FAMILIES[0], 5);
        let ended = train(&store, &[&args[..], &["--fault", fault]].concat()).expect(5);
        ended.says(&["error: ", fault.split(':').next().unwrap(), "injected fault"]);
        assert!(state(&store).0 < 4, "{fault} came too late");
        ftactor(&["verify", "--store", &store]).expect(0);
        train(&store, &[]).expect(0);
        assert_eq!(state(&store), state(&calm), "{fault}");
    }
}

#[test]
fn an_actor_that_dies_again_and_again_ends_the_run() {
    let lab = Lab::new();
    let text = lab.text("text.txt", 60);
    let store = lab.store("store", FAMILIES[0], 5);
    let before = state(&store);
    let faults: Vec<String> = (1..40).map(|n| format!("compute:panic:{n}")).collect();
    let mut args = [&STEPS[..], &["--data", &text]].concat();
    faults.iter().for_each(|fault| args.extend(["--fault", fault.as_str()]));
    train(&store, &args).expect(5).says(&["error: ", "compute"]);
    assert_eq!(state(&store), before);
    train(&store, &[]).expect(0);
}
