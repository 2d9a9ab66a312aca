//! Freezes the lower layers of a model and trains the upper ones with all their weights: the embedding
//! and the lower half are read, never written, and give half of their disk space back.
//!
//! `cargo run --release --example freeze_base` (some seconds; works in a temporary directory)

mod training;

use std::path::Path;
use std::time::Duration;

use anyhow::ensure;
use convert::{Destination, Init, InitTokenizer};
use data::{BYTES_VOCAB_SIZE, Tokenizer};
use model::{Budget, LayerId, RunShape};
use store::{ReadingStore, TrainingStore, mmap_engine, show_bytes};
use training::Lesson;

const CONFIG: &str = r#"{"model_type": "llama", "vocab_size": 259, "hidden_size": 96,
  "intermediate_size": 192, "num_hidden_layers": 6, "num_attention_heads": 4,
  "num_key_value_heads": 2, "max_position_embeddings": 128, "tie_word_embeddings": false}"#;

/// The embedding and the first three decoder layers.
const BASE: [LayerId; 4] = [LayerId(0), LayerId(1), LayerId(2), LayerId(3)];

fn main() -> anyhow::Result<()> {
    let dir = std::env::temp_dir().join(format!("ftactor-freeze-base-{}", std::process::id()));
    std::fs::create_dir_all(&dir)?;
    let shown = show(&dir);
    std::fs::remove_dir_all(&dir)?;
    shown
}

fn show(dir: &Path) -> anyhow::Result<()> {
    let (store, text) = (dir.join("store"), dir.join("text.txt"));
    let sentences = (0..2000).map(|i| format!("The {} mends lantern {i}. ", ["fox", "owl"][i % 2]));
    std::fs::write(&text, sentences.collect::<String>())?;
    let init = Init {
        config_json: CONFIG,
        tokenizer: InitTokenizer::Bytes(Tokenizer::bytes_json()),
        tokenizer_vocab: BYTES_VOCAB_SIZE as usize,
        seed: 3,
    };
    convert::init(&init, &Destination::new(mmap_engine(2, true), &store), &mut |_, _| {})?;

    // A base, trained whole; then its lower half is locked.
    let lesson = Lesson {
        shape: RunShape { batch_rows: 8, micro_rows: 8, seq_len: 64 },
        steps: 20,
        learning_rate: 3e-3,
        ram_bytes: 256 << 20,
    };
    training::train(&store, text.clone(), &lesson)?;
    let whole = disk_bytes(&store)?;
    lock_base(&store)?;
    let base = hashes(&store)?;

    println!("-- the base is locked --");
    let losses = training::train(&store, text, &Lesson { steps: 50, ..lesson })?;
    let tuned = hashes(&store)?;
    for (layer, (before, after)) in base.iter().zip(&tuned).enumerate() {
        let locked = BASE.contains(&LayerId(layer as u32));
        ensure!((before == after) == locked, "layer {layer} is not as it should be");
    }
    ensure!(losses.last() < losses.first(), "the loss does not fall: {losses:?}");
    println!(
        "the base is what it was, bit for bit; the upper layers went from loss {:.3} to {:.3}; \
         {} on disk instead of {}",
        losses[0],
        losses[losses.len() - 1],
        show_bytes(disk_bytes(&store)?),
        show_bytes(whole)
    );
    Ok(())
}

fn lock_base(store: &Path) -> anyhow::Result<()> {
    let budget = Budget::new(64 << 20);
    let (store, _) =
        TrainingStore::open(mmap_engine(1, true), store, budget, Duration::from_secs(5))?;
    store.lock(&BASE)?;
    Ok(store.close()?)
}

fn hashes(store: &Path) -> anyhow::Result<Vec<u64>> {
    let store = ReadingStore::open(mmap_engine(1, true), store, Duration::from_secs(5))?;
    Ok(store.table().layers().iter().map(|layer| store.layer_hash(layer.id)).collect())
}

/// Bytes of all files of all layers.
fn disk_bytes(store: &Path) -> anyhow::Result<u64> {
    let mut bytes = 0;
    for layer in std::fs::read_dir(store.join("layers"))? {
        let layer = layer?.path();
        for slot in ["a", "b"] {
            for file in std::fs::read_dir(layer.join(slot))? {
                bytes += file?.metadata()?.len();
            }
        }
    }
    Ok(bytes)
}
