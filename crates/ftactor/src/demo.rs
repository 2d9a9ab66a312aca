//! `ftactor solo --demo`: from nothing to a trained model in under two minutes.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use actors::Forward;
use anyhow::Context;
use compute::ComputeDtype;
use convert::{Destination, Init, InitTokenizer};
use data::{BYTES_VOCAB_SIZE, Tokenizer};
use model::{Budget, ModelConfig};
use serde::{Deserialize, Serialize};
use store::ReadingStore;

use crate::cli::SoloArgs;
use crate::exit::refuse;
use crate::options::TrainOptions;
use crate::out::{errln, outln};
use crate::progress::Show;
use crate::text::{self, Sampling};
use crate::{corpus, machine, solo};

const DEMO_DIR: &str = "ftactor-demo";
const PROMPT: &str = "The baker ";
const SEQ_LEN: usize = 128;
const STEPS: u64 = 150;
/// How many nats per byte the demo's held-out loss has to fall by.
const LOSS_FALL: f64 = 1.0;

/// About 1.2 million parameters: small enough for two minutes, deep enough to stream.
const CONFIG: &str = r#"{
  "model_type": "llama", "vocab_size": 259, "hidden_size": 128, "intermediate_size": 384,
  "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2,
  "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
  "tie_word_embeddings": true
}"#;

pub(crate) fn run(args: &SoloArgs, options: &TrainOptions) -> anyhow::Result<ExitCode> {
    if !args.data.is_empty() {
        return refuse("--demo brings its own text: leave --data out, or leave --demo out");
    }
    let home = args.store.clone().unwrap_or_else(|| PathBuf::from(DEMO_DIR));
    if home.join("store.json").exists() {
        return refuse(format!(
            "{} is a store; --demo makes a directory of its own: leave --store out or name a new one",
            home.display()
        ));
    }
    let (store, train, held_out) =
        (home.join("store"), home.join("train.txt"), home.join("held-out.txt"));
    if !store.exists() {
        std::fs::create_dir_all(&home).with_context(|| format!("create {}", home.display()))?;
        write(&train, &corpus::sentences(1, 400_000))?;
        write(&held_out, &corpus::sentences(2, 20_000))?;
        make_store(&store)?;
        outln!("made a model of 1.2 million parameters and a corpus in {}", home.display());
    }
    let before = before(&home.join("before.json"), args.new_run, || measure(&store, &held_out))?;
    outln!("before: held-out loss {:.3} nats per byte\n  {PROMPT}{}", before.loss, before.sample);
    outln!("tip: press Ctrl-C or kill -9 this process, then run the same command: it goes on");

    let show = if args.quiet { Show::Nothing } else { Show::Bar };
    let ended = solo::train(&store, &[train], &self::options(options), args, show)?;
    if !ended.is_complete() {
        return Ok(ended.exit_code());
    }
    let after = measure(&store, &held_out)?;
    outln!("after: held-out loss {:.3} nats per byte\n  {PROMPT}{}", after.loss, after.sample);
    outln!(
        "\nThe store {} is a Hugging Face checkpoint that transformers loads as it is.\n\
         With a model of your own:\n  ftactor import ./SmolLM2-135M --store ./store\n  \
         ftactor solo --store ./store --data ./texts --steps 100",
        store.display()
    );
    // A run of another length promises nothing.
    let whole = options.steps.is_none() && options.epochs.is_none();
    if whole && !ended.was_complete() && before.loss - after.loss < LOSS_FALL {
        errln!("error: the loss fell by less than {LOSS_FALL} nats per byte");
        return Ok(ExitCode::from(crate::exit::SELFTEST_FAILED));
    }
    Ok(ExitCode::SUCCESS)
}

/// The demo's options: `given`, and its own in place of the defaults.
pub(crate) fn options(given: &TrainOptions) -> TrainOptions {
    let mut options = given.clone();
    options.seq_len.get_or_insert(SEQ_LEN);
    options.batch_rows.get_or_insert(16);
    options.lr.get_or_insert(3e-3);
    if options.epochs.is_none() {
        options.steps.get_or_insert(STEPS);
    }
    options
}

fn write(path: &Path, text: &str) -> anyhow::Result<()> {
    std::fs::write(path, text).with_context(|| format!("write {}", path.display()))
}

fn make_store(dir: &Path) -> anyhow::Result<()> {
    let what = Init {
        config_json: CONFIG,
        tokenizer: InitTokenizer::Bytes(Tokenizer::bytes_json()),
        tokenizer_vocab: BYTES_VOCAB_SIZE as usize,
        seed: 1,
    };
    convert::init(&what, &Destination::new(machine::engine(0), dir), &mut |_, _| {})?;
    Ok(())
}

/// What was measured when the run began: a resumed one compares with that.
fn before(
    file: &Path,
    new_run: bool,
    measure: impl FnOnce() -> anyhow::Result<Measured>,
) -> anyhow::Result<Measured> {
    let kept = std::fs::read(file).ok().and_then(|text| serde_json::from_slice(&text).ok());
    if let Some(kept) = kept.filter(|_| !new_run) {
        return Ok(kept);
    }
    let measured = measure()?;
    write(file, &serde_json::to_string(&measured)?)?;
    Ok(measured)
}

#[derive(Serialize, Deserialize)]
struct Measured {
    loss: f64,
    sample: String,
}

fn measure(store: &Path, held_out: &Path) -> anyhow::Result<Measured> {
    let reading = ReadingStore::open(machine::engine(0), store, Duration::from_secs(10))?;
    let config = ModelConfig::from_json(reading.config_json())?;
    let device =
        machine::cpu(&config, ComputeDtype::F32, &Budget::new(256 << 20), &machine::threads(None)?);
    let mut forward = Forward::new(&reading, device);
    let rows = text::eval_rows(store, &config, &[held_out.to_path_buf()], SEQ_LEN)?;
    let loss = text::evaluate(&mut forward, &rows, None, &|| false)?.unwrap_or_default().loss();
    let sampling =
        Sampling { max_tokens: 60, temperature: 0.5, seed: 1, max_positions: config.max_positions };
    let tokenizer = Tokenizer::load(store)?;
    let sample = text::generate(&mut forward, &tokenizer, PROMPT, &sampling, &|| false)?;
    Ok(Measured { loss, sample })
}
