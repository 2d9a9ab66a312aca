//! The `config.json` that a GGUF file's metadata describes.

use std::collections::BTreeMap;
use std::f64::consts::TAU;

use serde_json::{Map, Value as Json, json};

use super::parse::{Header, Value};

type Metadata = BTreeMap<String, Value>;

/// Llama 3.x divides its rotary frequencies by these rules; only the factor differs.
const LOW_FREQ_FACTOR: f64 = 1.0;
const HIGH_FREQ_FACTOR: f64 = 4.0;
const ORIGINAL_POSITIONS: f64 = 8192.0;
const FACTOR_TOLERANCE: f64 = 1e-5;

/// The architecture's name in the metadata's keys.
pub(crate) fn architecture(metadata: &Metadata) -> Result<&str, String> {
    match metadata.get("general.architecture") {
        Some(Value::Text(name)) => Ok(name),
        _ => Err("does not say its architecture (`general.architecture`)".into()),
    }
}

/// The text of a `config.json`. `rope_factors`: what the file divides rotary frequencies by.
pub(crate) fn build(header: &Header, rope_factors: Option<&[f32]>) -> Result<String, String> {
    let arch = architecture(&header.metadata)?;
    let class = match arch {
        "llama" => "LlamaForCausalLM",
        "qwen2" => "Qwen2ForCausalLM",
        "qwen3" => "Qwen3ForCausalLM",
        other => return Err(format!("has the unsupported architecture `{other}`")),
    };
    let meta = Meta { arch, metadata: &header.metadata };
    meta.refuse_unsupported()?;
    let heads = meta.need("attention.head_count")?;
    let hidden = meta.need("embedding_length")?;
    let head_dim = meta.head_dim(hidden, heads)?;
    let theta = meta.number("rope.freq_base")?.unwrap_or(10_000.0);
    let has = |name: &str| header.tensors.contains_key(name);
    let mut root = Map::new();
    let mut set = |key: &str, value: Json| root.insert(key.into(), value);
    set("architectures", json!([class]));
    set("model_type", json!(arch));
    set("dtype", json!("float32"));
    set("vocab_size", json!(meta.vocabulary()?));
    set("hidden_size", json!(hidden));
    set("intermediate_size", json!(meta.need("feed_forward_length")?));
    set("num_hidden_layers", json!(meta.need("block_count")?));
    set("num_attention_heads", json!(heads));
    set("num_key_value_heads", json!(meta.size("attention.head_count_kv")?.unwrap_or(heads)));
    set("head_dim", json!(head_dim));
    set("hidden_act", json!("silu"));
    set("max_position_embeddings", json!(meta.need("context_length")?));
    set("rms_norm_eps", json!(meta.need_number("attention.layer_norm_rms_epsilon")?));
    set("rope_parameters", meta.rope(theta, head_dim, rope_factors)?);
    set("tie_word_embeddings", json!(!has("output.weight")));
    set("initializer_range", json!(0.02));
    if arch != "qwen2" {
        set("attention_bias", json!(has("blk.0.attn_q.bias")));
    }
    if arch == "llama" {
        set("mlp_bias", json!(has("blk.0.ffn_gate.bias")));
    }
    if arch == "llama" && meta.size("attention.sliding_window")?.is_some() {
        set("model_type", json!("mistral"));
        set("architectures", json!(["MistralForCausalLM"]));
        set("sliding_window", json!(meta.size("attention.sliding_window")?));
    }
    for (key, name) in [("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")] {
        set(&format!("{key}_token_id"), json!(token_id(&header.metadata, name)?));
    }
    serde_json::to_string_pretty(&root).map_err(|e| e.to_string())
}

/// The id of the special token that the metadata calls `name`, checked against the vocabulary.
pub(crate) fn token_id(metadata: &Metadata, name: &str) -> Result<Option<usize>, String> {
    let key = format!("tokenizer.ggml.{name}_token_id");
    let Some(value) = metadata.get(&key) else { return Ok(None) };
    let tokens = match metadata.get("tokenizer.ggml.tokens") {
        Some(Value::Texts(tokens)) => tokens.len(),
        _ => 0,
    };
    match value.integer().and_then(|id| usize::try_from(id).ok()) {
        Some(id) if id < tokens => Ok(Some(id)),
        _ => Err(format!("has `{key}` = {value:?}, but only {tokens} tokens")),
    }
}

struct Meta<'m> {
    arch: &'m str,
    metadata: &'m Metadata,
}

impl Meta<'_> {
    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.arch)
    }

    fn size(&self, name: &str) -> Result<Option<u64>, String> {
        let key = self.key(name);
        let Some(value) = self.metadata.get(&key) else { return Ok(None) };
        match value.integer() {
            Some(n) if n > 0 => Ok(Some(n as u64)),
            _ => Err(format!("has `{key}` = {value:?}, expected a positive whole number")),
        }
    }

    fn need(&self, name: &str) -> Result<u64, String> {
        self.size(name)?.ok_or_else(|| format!("lacks the metadata `{}`", self.key(name)))
    }

    fn number(&self, name: &str) -> Result<Option<f64>, String> {
        let key = self.key(name);
        let Some(value) = self.metadata.get(&key) else { return Ok(None) };
        match value.float().filter(|f| f.is_finite()) {
            Some(number) => Ok(Some(number)),
            None => Err(format!("has `{key}` = {value:?}, expected a number")),
        }
    }

    fn need_number(&self, name: &str) -> Result<f64, String> {
        self.number(name)?.ok_or_else(|| format!("lacks the metadata `{}`", self.key(name)))
    }

    fn text(&self, name: &str) -> Option<&str> {
        match self.metadata.get(&self.key(name)) {
            Some(Value::Text(text)) => Some(text),
            _ => None,
        }
    }

    fn vocabulary(&self) -> Result<u64, String> {
        let tokens = match self.metadata.get("tokenizer.ggml.tokens") {
            Some(Value::Texts(tokens)) => tokens.len() as u64,
            _ => return Err("has no vocabulary (`tokenizer.ggml.tokens`)".into()),
        };
        match self.size("vocab_size")?.unwrap_or(tokens) {
            size if size >= tokens => Ok(size),
            size => Err(format!("has {tokens} tokens but a vocabulary of {size}")),
        }
    }

    fn refuse_unsupported(&self) -> Result<(), String> {
        if self.number("expert_count")?.unwrap_or(0.0) != 0.0 {
            return Err("is a mixture of experts, which is not supported".into());
        }
        for name in ["attention.scale", "logit_scale", "residual_scale", "embedding_scale"] {
            let value = self.number(name)?.unwrap_or(0.0);
            if value != 0.0 && (name == "attention.scale" || value != 1.0) {
                return Err(format!("has `{}` = {value}, which is not supported", self.key(name)));
            }
        }
        match self.metadata.get(&self.key("attention.causal")) {
            Some(Value::Bool(false)) => Err("is not causal, which is not supported".into()),
            _ => Ok(()),
        }
    }

    fn head_dim(&self, hidden: u64, heads: u64) -> Result<u64, String> {
        let rotary = self.size("rope.dimension_count")?;
        let head_dim = self.size("attention.key_length")?.or(rotary).unwrap_or(hidden / heads);
        for name in ["rope.dimension_count", "attention.value_length"] {
            let other = self.size(name)?.unwrap_or(head_dim);
            if other != head_dim {
                return Err(format!(
                    "has `{}` = {other} although a head has {head_dim} elements, which is not \
                     supported",
                    self.key(name)
                ));
            }
        }
        Ok(head_dim)
    }

    fn rope(&self, theta: f64, head_dim: u64, factors: Option<&[f32]>) -> Result<Json, String> {
        let kind = self.text("rope.scaling.type").unwrap_or("linear");
        let factor = match self.number("rope.scaling.factor")? {
            None => self.number("rope.scale_linear")?,
            factor => factor,
        };
        let scaled = factor.filter(|&f| f != 0.0 && f != 1.0);
        match (kind, scaled, factors) {
            ("none", _, None) | ("linear", None, None) => {
                Ok(json!({"rope_type": "default", "rope_theta": theta}))
            }
            ("linear", Some(factor), None) => {
                Ok(json!({"rope_type": "linear", "rope_theta": theta, "factor": factor}))
            }
            ("none" | "linear", None, Some(factors)) => llama3(theta, head_dim, factors),
            _ => Err(format!("stretches its context by `{kind}`, which is not supported")),
        }
    }
}

/// Recognises Llama 3's rule in the factors it gives.
fn llama3(theta: f64, head_dim: u64, factors: &[f32]) -> Result<Json, String> {
    let largest = factors.iter().copied().fold(1.0f32, f32::max);
    let close = |(i, &given): (usize, &f32)| {
        let expected = llama3_factor(theta, head_dim, i, f64::from(largest));
        (f64::from(given) - expected).abs() <= FACTOR_TOLERANCE * expected
    };
    if factors.len() as u64 != head_dim / 2 || !factors.iter().enumerate().all(close) {
        return Err("has rotary factors (`rope_freqs.weight`) other than Llama 3's".into());
    }
    Ok(json!({
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": largest,
        "low_freq_factor": LOW_FREQ_FACTOR,
        "high_freq_factor": HIGH_FREQ_FACTOR,
        "original_max_position_embeddings": ORIGINAL_POSITIONS as u64,
    }))
}

/// What Llama 3 divides its frequency number `i` by (transformers'
/// `_compute_llama3_parameters`).
fn llama3_factor(theta: f64, head_dim: u64, i: usize, factor: f64) -> f64 {
    let frequency = theta.powf(-((2 * i) as f64) / head_dim as f64);
    let turns = ORIGINAL_POSITIONS * frequency / TAU;
    if turns > HIGH_FREQ_FACTOR {
        1.0
    } else if turns < LOW_FREQ_FACTOR {
        factor
    } else {
        let smooth = (turns - LOW_FREQ_FACTOR) / (HIGH_FREQ_FACTOR - LOW_FREQ_FACTOR);
        1.0 / ((1.0 - smooth) / factor + smooth)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use model::{ModelConfig, RopeScaling};

    fn header(extra: &[(&str, Value)]) -> Header {
        let mut metadata = Metadata::new();
        let tokens = (0..32).map(|i| i.to_string()).collect();
        metadata.insert("general.architecture".into(), Value::Text("llama".into()));
        metadata.insert("tokenizer.ggml.tokens".into(), Value::Texts(tokens));
        for (key, value) in [
            ("block_count", 2),
            ("context_length", 64),
            ("embedding_length", 16),
            ("feed_forward_length", 24),
            ("attention.head_count", 4),
        ] {
            metadata.insert(format!("llama.{key}"), Value::Unsigned(value));
        }
        let eps = Value::Float(1e-5);
        metadata.insert("llama.attention.layer_norm_rms_epsilon".into(), eps);
        metadata.extend(extra.iter().map(|(key, value)| ((*key).to_string(), value.clone())));
        Header { metadata, tensors: BTreeMap::new() }
    }

    fn config(extra: &[(&str, Value)], factors: Option<&[f32]>) -> Result<ModelConfig, String> {
        let text = build(&header(extra), factors)?;
        ModelConfig::from_json(&text).map_err(|e| e.to_string())
    }

    #[test]
    fn metadata_becomes_a_config() {
        let c = config(&[("tokenizer.ggml.eos_token_id", Value::Unsigned(3))], None).unwrap();
        assert_eq!((c.vocab_size, c.layers, c.kv_heads, c.head_dim), (32, 2, 4, 4));
        assert_eq!((c.eos_token, c.bos_token, c.tied), (Some(3), None, true));
    }

    #[test]
    fn llama_3_is_recognised_by_its_factors() {
        let factor = |i| llama3_factor(500_000.0, 128, i, 32.0) as f32;
        let mut factors: Vec<f32> = (0..64).map(factor).collect();
        let extra = [
            ("llama.rope.freq_base", Value::Float(500_000.0)),
            ("llama.rope.dimension_count", Value::Unsigned(128)),
        ];
        let scaling = config(&extra, Some(&factors)).unwrap().rope_scaling;
        assert!(matches!(scaling, RopeScaling::Llama3 { factor: 32.0, .. }), "{scaling:?}");
        factors[40] *= 1.01;
        assert!(config(&extra, Some(&factors)).unwrap_err().contains("rope_freqs"));
    }

    #[test]
    fn what_is_not_computed_is_refused_by_name() {
        for (key, value, named) in [
            ("general.architecture", Value::Text("gemma".into()), "gemma"),
            ("llama.expert_count", Value::Unsigned(8), "experts"),
            ("llama.rope.scaling.type", Value::Text("yarn".into()), "yarn"),
            ("llama.rope.dimension_count", Value::Unsigned(2), "supported"),
            ("llama.attention.value_length", Value::Unsigned(8), "value_length"),
            ("llama.vocab_size", Value::Unsigned(31), "vocabulary"),
            ("llama.attention.sliding_window", Value::Unsigned(8), "sliding"),
            ("llama.block_count", Value::Text("two".into()), "block_count"),
            ("llama.logit_scale", Value::Float(2.0), "logit_scale"),
            ("tokenizer.ggml.bos_token_id", Value::Unsigned(32), "bos_token_id"),
        ] {
            let extra = [(key, value), ("llama.attention.key_length", Value::Unsigned(4))];
            let error = config(&extra, None).unwrap_err();
            assert!(error.contains(named), "{key}: {error}");
        }
    }
}
