//! Shapes of Llama's kind, without weights.

use model::ModelConfig;
use serde_json::json;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) hidden: usize,
    pub(crate) ffn: usize,
    pub(crate) layers: usize,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) vocab: usize,
    pub(crate) tied: bool,
}

impl Shape {
    /// `heads`: of queries, then of keys and values.
    pub(crate) const fn new(
        (hidden, ffn): (usize, usize),
        layers: usize,
        (heads, kv_heads): (usize, usize),
        vocab: usize,
        tied: bool,
    ) -> Shape {
        Shape { hidden, ffn, layers, heads, kv_heads, vocab, tied }
    }

    pub(crate) fn config(&self) -> anyhow::Result<ModelConfig> {
        let config = json!({
            "model_type": "llama", "vocab_size": self.vocab, "hidden_size": self.hidden,
            "intermediate_size": self.ffn, "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads,
            "max_position_embeddings": 8192, "tie_word_embeddings": self.tied,
        });
        Ok(ModelConfig::from_json(&config.to_string())?)
    }
}
