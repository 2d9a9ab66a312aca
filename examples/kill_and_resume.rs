//! Kills a training run with SIGKILL again and again, and shows that what it comes to has the very
//! bits of a run that nobody disturbed.
//!
//! `cargo run --release --example kill_and_resume` (half a minute; works in a temporary directory)

mod training;

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use convert::{Destination, Init, InitTokenizer};
use data::{BYTES_VOCAB_SIZE, Tokenizer};
use model::RunShape;
use store::{ReadingStore, mmap_engine};
use training::Lesson;

const CONFIG: &str = r#"{"model_type": "llama", "vocab_size": 259, "hidden_size": 96,
  "intermediate_size": 192, "num_hidden_layers": 6, "num_attention_heads": 4,
  "num_key_value_heads": 2, "max_position_embeddings": 128, "tie_word_embeddings": true}"#;

const LESSON: Lesson = Lesson {
    shape: RunShape { batch_rows: 8, micro_rows: 4, seq_len: 128 },
    steps: 30,
    learning_rate: 1e-3,
    ram_bytes: 256 << 20,
};

const KILLS: u32 = 12;

fn main() -> anyhow::Result<()> {
    // The program starts itself: a child trains, its parent kills it.
    if let [store, text] = &std::env::args().skip(1).map(PathBuf::from).collect::<Vec<_>>()[..] {
        training::train(store, text.clone(), &LESSON)?;
        return Ok(());
    }
    let dir = std::env::temp_dir().join(format!("ftactor-kill-and-resume-{}", std::process::id()));
    std::fs::create_dir_all(&dir)?;
    let shown = show(&dir);
    std::fs::remove_dir_all(&dir)?;
    shown
}

fn show(dir: &Path) -> anyhow::Result<()> {
    let text = dir.join("text.txt");
    let sentences = (0..2000).map(|i| format!("Lantern {i} stands beside boat {}. ", i * i % 97));
    std::fs::write(&text, sentences.collect::<String>())?;
    let calm = fresh_store(&dir.join("calm"))?;
    let started = Instant::now();
    ensure!(train(&calm, &text)?.wait()?.success(), "the undisturbed run failed");
    let undisturbed = started.elapsed();
    println!("undisturbed: step {}, {:.1} s", step(&calm)?, undisturbed.as_secs_f64());

    let disturbed = fresh_store(&dir.join("disturbed"))?;
    let mut kills = 0;
    let mut lot = 7u32;
    loop {
        let mut child = train(&disturbed, &text)?;
        if kills < KILLS {
            // Anywhere within a few steps, the start of the process included.
            lot = lot.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let part = f64::from(lot >> 8) / f64::from(1 << 24);
            std::thread::sleep(undisturbed.mul_f64(0.02 + 0.15 * part));
            child.kill()?;
        }
        if child.wait()?.success() {
            break;
        }
        kills += 1;
        println!("kill -9 number {kills}: the last committed step is {}", step(&disturbed)?);
    }
    let (a, b) = (hashes(&calm)?, hashes(&disturbed)?);
    for ((name, hash), (_, other)) in a.iter().zip(&b) {
        println!("{name:<6} {hash:016x} {other:016x}");
    }
    ensure!(a == b, "the bits differ");
    println!("after {kills} kills every layer's weights and moments are the same, bit for bit");
    Ok(())
}

fn fresh_store(dir: &Path) -> anyhow::Result<PathBuf> {
    let init = Init {
        config_json: CONFIG,
        tokenizer: InitTokenizer::Bytes(Tokenizer::bytes_json()),
        tokenizer_vocab: BYTES_VOCAB_SIZE as usize,
        seed: 11,
    };
    convert::init(&init, &Destination::new(mmap_engine(2, true), dir), &mut |_, _| {})?;
    Ok(dir.to_owned())
}

fn train(store: &Path, text: &Path) -> anyhow::Result<Child> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args([store, text]).stdout(Stdio::null());
    command.spawn().context("start the training process")
}

fn open(store: &Path) -> anyhow::Result<ReadingStore> {
    Ok(ReadingStore::open(mmap_engine(1, true), store, Duration::from_secs(5))?)
}

fn step(store: &Path) -> anyhow::Result<u64> {
    Ok(open(store)?.state().step.0)
}

fn hashes(store: &Path) -> anyhow::Result<Vec<(String, u64)>> {
    let store = open(store)?;
    let layers = store.table().layers().iter();
    Ok(layers.map(|layer| (layer.name.clone(), store.layer_hash(layer.id))).collect())
}
