//! Opens a store read-only and prints its layers with their hashes; makes a tiny one if not given any.
//!
//! `cargo run --release --example inspect_store [STORE]`

use std::path::{Path, PathBuf};
use std::time::Duration;

use convert::{Destination, Init, InitTokenizer};
use data::{BYTES_VOCAB_SIZE, Tokenizer};
use model::Precision;
use store::{ReadingStore, mmap_engine};

const CONFIG: &str = r#"{
  "model_type": "qwen3", "vocab_size": 259, "hidden_size": 32, "intermediate_size": 64,
  "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8
}"#;

fn main() -> anyhow::Result<()> {
    if let Some(dir) = std::env::args_os().nth(1) {
        return inspect(&PathBuf::from(dir));
    }
    let home = tempfile::tempdir()?;
    let dir = home.path().join("store");
    let what = Init {
        config_json: CONFIG,
        tokenizer: InitTokenizer::Bytes(Tokenizer::bytes_json()),
        tokenizer_vocab: BYTES_VOCAB_SIZE as usize,
        seed: 1,
    };
    convert::init(&what, &Destination::new(mmap_engine(2, true), &dir), &mut |_, _| {})?;
    inspect(&dir)
}

fn inspect(dir: &Path) -> anyhow::Result<()> {
    let store = ReadingStore::open(mmap_engine(2, true), dir, Duration::ZERO)?;
    let state = store.state();
    println!("{} at step {}", dir.display(), state.step.0);
    for (layer, live) in store.table().layers().iter().zip(&state.layers) {
        println!(
            "{:<6} slot {}  Adam step {}  hash {}",
            layer.name,
            live.slot.name(),
            live.t,
            model::hex(store.layer_hash(layer.id))
        );
        for tensor in &layer.tensors {
            let read = store.read_weights_blocking(layer.id, tensor.range(), Precision::Exact)?;
            let block = read.into_f32();
            let sum: f64 = block.f32s().iter().map(|&w| f64::from(w).powi(2)).sum();
            let rms = (sum / tensor.elements() as f64).sqrt();
            println!("       {} {:?}, root mean square {rms:.5}", tensor.name, tensor.shape);
        }
    }
    let damage = store.verify(|_, _| {})?;
    anyhow::ensure!(damage.is_empty(), "{damage:?}");
    println!("every byte matches its hash");
    Ok(())
}
