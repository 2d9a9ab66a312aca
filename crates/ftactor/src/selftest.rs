//! `ftactor selftest`: equivalence, persistence and convergence, on the user's machine.

use std::path::Path;
use std::process::ExitCode;

use anyhow::Context;
use clap::Parser;
use convert::{Destination, Init, InitTokenizer};
use data::{BYTES_VOCAB_SIZE, Tokenizer};
use serde_json::json;

use crate::cli::{Cli, Command, SelftestArgs, SoloArgs};
use crate::exit;
use crate::out::outln;
use crate::progress::Show;
use crate::{corpus, machine, solo};

/// A check: its name and what it found, or what is wrong.
type Check = (&'static str, fn(&Path) -> anyhow::Result<String>);

const CHECKS: [Check; 3] =
    [("equivalence", equivalence), ("persistence", persistence), ("convergence", convergence)];

pub(crate) fn run(args: &SelftestArgs) -> anyhow::Result<ExitCode> {
    let dir = scratch_dir()?;
    let mut failed = 0;
    for (name, check) in CHECKS {
        let result = check(&dir);
        failed += usize::from(result.is_err());
        let (passed, text) = match &result {
            Ok(text) => (true, text.clone()),
            Err(error) => (false, format!("{error:#}")),
        };
        if args.json {
            outln!("{}", json!({"check": name, "passed": passed, "detail": text}));
        } else {
            outln!("{} {name}: {text}", if passed { "ok    " } else { "FAILED" });
        }
    }
    std::fs::remove_dir_all(&dir).with_context(|| format!("remove {}", dir.display()))?;
    Ok(if failed == 0 { ExitCode::SUCCESS } else { ExitCode::from(exit::SELFTEST_FAILED) })
}

fn scratch_dir() -> anyhow::Result<std::path::PathBuf> {
    let dir = std::env::temp_dir().join(format!("ftactor-selftest-{}", std::process::id()));
    std::fs::create_dir_all(&dir).with_context(|| format!("create {}", dir.display()))?;
    Ok(dir)
}

/// W + (-lr * g) written to a file's bytes equals W - lr * g, bit for bit.
fn equivalence(dir: &Path) -> anyhow::Result<String> {
    let (weights, gradients, lr) = ([1.0, 2.0, 3.0], [0.15, 0.3, 0.45], 0.1);
    let direct: Vec<f64> = weights.iter().zip(gradients).map(|(w, g)| w - lr * g).collect();
    let file = dir.join("accumulate");
    write_floats(&file, &weights)?;
    add_to_file(&file, &gradients.map(|g| -lr * g))?;
    let accumulated = read_floats(&file)?;
    anyhow::ensure!(accumulated == direct, "accumulated {accumulated:?}, direct {direct:?}");
    anyhow::ensure!(accumulated == [0.985, 1.970, 2.955], "got {accumulated:?}");
    Ok(format!("frozen accumulation {accumulated:?} equals direct assignment"))
}

/// What was flushed and closed is there, twice.
fn persistence(dir: &Path) -> anyhow::Result<String> {
    let file = dir.join("persist");
    write_floats(&file, &[1.0, 2.0])?;
    add_to_file(&file, &[0.5, 0.3])?;
    let read = read_floats(&file)?;
    anyhow::ensure!(read == [1.5, 2.3], "read {read:?}, expected [1.5, 2.3]");
    Ok(format!("[1, 2] += [0.5, 0.3] over two file handles reads {read:?}"))
}

fn write_floats(path: &Path, values: &[f64]) -> anyhow::Result<()> {
    use std::io::Write;
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    let mut file = std::fs::File::create(path)?;
    file.write_all(&bytes)?;
    file.sync_all()?;
    Ok(())
}

fn add_to_file(path: &Path, deltas: &[f64]) -> anyhow::Result<()> {
    let old = read_floats(path)?;
    let new: Vec<f64> = old.iter().zip(deltas).map(|(v, d)| v + d).collect();
    write_floats(path, &new)
}

fn read_floats(path: &Path) -> anyhow::Result<Vec<f64>> {
    let bytes = std::fs::read(path)?;
    let (values, rest) = bytes.as_chunks::<8>();
    anyhow::ensure!(rest.is_empty(), "{} has {} bytes", path.display(), bytes.len());
    Ok(values.iter().map(|v| f64::from_le_bytes(*v)).collect())
}

const EPOCHS: usize = 5;
const CONFIG: &str = r#"{"model_type": "llama", "vocab_size": 259, "hidden_size": 64,
  "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
  "num_key_value_heads": 2, "max_position_embeddings": 128, "tie_word_embeddings": true}"#;

/// A small transformer, trained from its store: the mean loss falls every epoch.
fn convergence(dir: &Path) -> anyhow::Result<String> {
    let (store, text, log) = (dir.join("store"), dir.join("text.txt"), dir.join("log.jsonl"));
    std::fs::write(&text, corpus::sentences(3, 16_000))?;
    let what = Init {
        config_json: CONFIG,
        tokenizer: InitTokenizer::Bytes(Tokenizer::bytes_json()),
        tokenizer_vocab: BYTES_VOCAB_SIZE as usize,
        seed: 5,
    };
    let to = Destination::new(machine::engine(0), &store);
    convert::init(&what, &to, &mut |_, _| {})?;
    let args = training_args(&store, &text, &log)?;
    solo::train(&store, &args.data, &args.options, &args, Show::Silent)?;
    let losses = epoch_losses(&log)?;
    let shown: Vec<String> = losses.iter().map(|l| format!("{l:.4}")).collect();
    let falls = losses.len() == EPOCHS && losses.windows(2).all(|pair| pair[1] < pair[0]);
    anyhow::ensure!(falls, "the loss does not fall every epoch: {shown:?}");
    Ok(format!("loss by epoch {}", shown.join(", ")))
}

fn training_args(store: &Path, text: &Path, log: &Path) -> anyhow::Result<SoloArgs> {
    let epochs = EPOCHS.to_string();
    let words = [
        "ftactor".as_ref(),
        "solo".as_ref(),
        "--store".as_ref(),
        store.as_os_str(),
        "--data".as_ref(),
        text.as_os_str(),
        "--log".as_ref(),
        log.as_os_str(),
        "--epochs".as_ref(),
        epochs.as_ref(),
        "--seq-len".as_ref(),
        "64".as_ref(),
        "--lr".as_ref(),
        "1e-3".as_ref(),
        "--metrics".as_ref(),
        "off".as_ref(),
        "--ram".as_ref(),
        "256M".as_ref(),
    ];
    match Cli::try_parse_from(words.map(std::ffi::OsStr::to_os_string))?.command {
        Command::Solo(args) => Ok(*args),
        _ => anyhow::bail!("not a solo command"),
    }
}

/// Mean loss of each epoch, from the step log.
fn epoch_losses(log: &Path) -> anyhow::Result<Vec<f64>> {
    let text = std::fs::read_to_string(log)?;
    let losses: Vec<f64> = text
        .lines()
        .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
        .filter_map(|line| line.get("loss")?.as_f64())
        .collect();
    let steps = (losses.len() / EPOCHS).max(1);
    Ok(losses.chunks(steps).map(|epoch| epoch.iter().sum::<f64>() / epoch.len() as f64).collect())
}
