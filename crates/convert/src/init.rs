//! Freshly initialised models, by transformers' rules.
//!
//! Invariants:
//! - element `i` of a tensor depends on the seed, the tensor's name and `i` only: not on the order
//!   of generation, the number of threads or the model's other tensors;
//! - the stored config names every value that transformers would otherwise choose by itself.
//!
//! Rules (`PreTrainedModel._init_weights`): matrices normal(0, initializer_range), biases 0, norms
//! 1, the embedding's row of `pad_token_id` 0.

mod config;
mod random;

use std::path::{Path, PathBuf};

use model::{ModelConfig, Role, TensorSpec};

use crate::weights::{
    Checkpoint, Destination, INITIAL_LEARNING_RATE, WeightSource, layer_table, write_store,
};
use crate::{ConvertError, Progress, Report};

/// Most tensors of a decoder layer.
const TENSORS_PER_LAYER: usize = 18;

/// The tokenizer of a new model.
#[derive(Clone, Debug)]
pub enum InitTokenizer {
    /// The byte tokenizer (ids 0-255, 256 BOS, 257 EOS, 258 PAD), as the text of its
    /// `tokenizer.json`. BOS and EOS become the config's where it has none.
    Bytes(String),
    /// `(name, contents)` of `tokenizer.json` and whatever belongs to it.
    Files(Vec<(String, Vec<u8>)>),
}

/// What to initialise.
#[derive(Clone, Debug)]
pub struct Init<'a> {
    /// The text of a Hugging Face `config.json`; only `model_type` and sizes are needed.
    pub config_json: &'a str,
    pub tokenizer: InitTokenizer,
    /// One more than the tokenizer's largest id.
    pub tokenizer_vocab: usize,
    pub seed: u64,
}

/// Makes a store at `dest` with random weights.
///
/// `progress` gets the bytes done and in all, counted as float32.
pub fn init(
    what: &Init<'_>,
    to: &Destination<'_>,
    progress: &mut Progress<'_>,
) -> Result<Report, ConvertError> {
    let config_path = PathBuf::from(config::NAME);
    let bytes = matches!(what.tokenizer, InitTokenizer::Bytes(_));
    let completed = config::complete(what.config_json, bytes)?;
    let config = completed.config;
    if config.vocab_size < what.tokenizer_vocab {
        return Err(ConvertError::invalid(
            &config_path,
            format!(
                "has `vocab_size` = {}, but the tokenizer has {} ids",
                config.vocab_size, what.tokenizer_vocab
            ),
            "raise `vocab_size` to the tokenizer's number of ids at least",
        ));
    }
    let tensors = config.layers.saturating_mul(TENSORS_PER_LAYER);
    let table = layer_table(&config, tensors, &config_path)?;
    let files = match &what.tokenizer {
        InitTokenizer::Files(files) => files.clone(),
        InitTokenizer::Bytes(json) => vec![
            ("tokenizer.json".into(), json.clone().into_bytes()),
            ("tokenizer_config.json".into(), config::tokenizer_config(json, &config)?),
        ],
    };
    if !files.iter().any(|(name, _)| name == "tokenizer.json") {
        return Err(ConvertError::invalid(
            "tokenizer.json",
            "is missing",
            "name a directory with a tokenizer.json, or `bytes`",
        ));
    }
    let checkpoint = Checkpoint {
        config_path,
        config_json: completed.json,
        table,
        files,
        learning_rate: INITIAL_LEARNING_RATE,
    };
    let mut weights = RandomWeights { seed: what.seed, pad: completed.pad, config };
    write_store(to, &checkpoint, &mut weights, progress)
}

struct RandomWeights {
    seed: u64,
    pad: Option<usize>,
    config: ModelConfig,
}

impl WeightSource for RandomWeights {
    fn path(&self, _spec: &TensorSpec) -> &Path {
        Path::new(config::NAME)
    }

    fn read(
        &mut self,
        spec: &TensorSpec,
        start: usize,
        out: &mut [f32],
    ) -> Result<(), ConvertError> {
        match spec.role {
            Role::AttentionNorm
            | Role::FeedForwardNorm
            | Role::FinalNorm
            | Role::QueryNorm
            | Role::KeyNorm => out.fill(1.0),
            Role::QueryBias
            | Role::KeyBias
            | Role::ValueBias
            | Role::OutputBias
            | Role::GateBias
            | Role::UpBias
            | Role::DownBias => out.fill(0.0),
            Role::Embedding
            | Role::Query
            | Role::Key
            | Role::Value
            | Role::Output
            | Role::Gate
            | Role::Up
            | Role::Down
            | Role::Projection => {
                let stream = random::Stream::new(self.seed, &spec.name);
                stream.fill_normal(start as u64, self.config.initializer_range, out);
            }
        }
        if spec.role == Role::Embedding {
            self.clear_padding(start, out);
        }
        Ok(())
    }
}

impl RandomWeights {
    /// Zeroes the row of the padding token, as `torch.nn.Embedding(padding_idx)` does.
    fn clear_padding(&self, start: usize, out: &mut [f32]) {
        let Some(pad) = self.pad else { return };
        let width = self.config.hidden_size;
        let from = (pad * width).max(start);
        let to = ((pad + 1) * width).min(start + out.len());
        if from < to {
            out[from - start..to - start].fill(0.0);
        }
    }
}
