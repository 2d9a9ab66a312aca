//! Trains a tiny model from its store with the library: no command line, no configuration files.
//!
//! `cargo run --release --example tiny_train`

use anyhow::ensure;
use convert::{Destination, Init, InitTokenizer};
use data::{BYTES_VOCAB_SIZE, Tokenizer};
use model::RunShape;
use store::mmap_engine;

mod training;

use training::Lesson;

const CONFIG: &str = r#"{
  "model_type": "llama", "vocab_size": 259, "hidden_size": 64, "intermediate_size": 192,
  "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
  "max_position_embeddings": 128, "tie_word_embeddings": true
}"#;
const SENTENCE: &str = "The miller counted seven apples before breakfast and smiled. ";

fn main() -> anyhow::Result<()> {
    let home = tempfile::tempdir()?;
    let (store, text) = (home.path().join("store"), home.path().join("text.txt"));
    std::fs::write(&text, SENTENCE.repeat(200))?;

    let what = Init {
        config_json: CONFIG,
        tokenizer: InitTokenizer::Bytes(Tokenizer::bytes_json()),
        tokenizer_vocab: BYTES_VOCAB_SIZE as usize,
        seed: 1,
    };
    let report =
        convert::init(&what, &Destination::new(mmap_engine(2, true), &store), &mut |_, _| {})?;
    println!("{} layers, {} parameters", report.layers, report.parameters);

    let lesson = Lesson {
        shape: RunShape { batch_rows: 8, micro_rows: 4, seq_len: 64 },
        steps: 30,
        learning_rate: 3e-3,
        ram_bytes: 256 << 20,
    };
    let losses = training::train(&store, text, &lesson)?;
    let (first, last) = (losses[0], losses[losses.len() - 1]);
    ensure!(last < 0.7 * first, "the loss fell from {first} to {last} only");
    println!("the loss fell from {first:.3} to {last:.3}");
    Ok(())
}
