//! Completing the config of a new model, so that transformers reads it as ftactor does.

use model::{ConfigError, Family, ModelConfig, RopeScaling};
use serde_json::{Map, Value, json};

use crate::ConvertError;

/// What errors call the config: it comes as text, and its file may have any name.
pub(crate) const NAME: &str = "the config";

const BYTES_BOS: u32 = 256;
const BYTES_EOS: u32 = 257;

/// A config with nothing left to the reader's defaults.
pub(crate) struct Completed {
    pub(crate) json: String,
    pub(crate) config: ModelConfig,
    pub(crate) pad: Option<usize>,
}

/// Fills what `text` leaves out; `bytes` says that the tokenizer is the byte tokenizer.
pub(crate) fn complete(text: &str, bytes: bool) -> Result<Completed, ConvertError> {
    let failed = |what| ConvertError::Config { path: NAME.into(), what };
    let json_error = |e: serde_json::Error| failed(ConfigError::Json(e.to_string()));
    let mut config = ModelConfig::from_json(text).map_err(failed)?;
    let mut root: Map<String, Value> = serde_json::from_str(text).map_err(json_error)?;
    root.retain(|_, value| !value.is_null());
    if bytes {
        config.bos_token = config.bos_token.or(Some(BYTES_BOS));
        config.eos_token = config.eos_token.or(Some(BYTES_EOS));
    }
    check_deviation(&config).map_err(failed)?;
    let pad = padding(&root, &config).map_err(failed)?;
    fill(&mut root, &config);
    let json = serde_json::to_string_pretty(&root).map_err(json_error)?;
    Ok(Completed { json, config, pad })
}

/// A `tokenizer_config.json` that names the special tokens of `tokenizer`, the text of a
/// `tokenizer.json`.
pub(crate) fn tokenizer_config(
    tokenizer: &str,
    config: &ModelConfig,
) -> Result<Vec<u8>, ConvertError> {
    let root: Value = serde_json::from_str(tokenizer).map_err(|e| {
        ConvertError::invalid("tokenizer.json", format!("is not valid: {e}"), "correct it")
    })?;
    let added = root.get("added_tokens").and_then(Value::as_array);
    let named = |id: u32| {
        let token = added?.iter().find(|t| t["id"].as_u64() == Some(u64::from(id)))?;
        token.get("content").cloned()
    };
    let mut map = Map::new();
    map.insert("tokenizer_class".into(), json!("PreTrainedTokenizerFast"));
    map.insert("model_max_length".into(), json!(config.max_positions));
    for (key, id) in [("bos_token", config.bos_token), ("eos_token", config.eos_token)] {
        if let Some(content) = id.and_then(named) {
            map.insert(key.into(), content);
        }
    }
    Ok(Value::Object(map).to_string().into_bytes())
}

fn check_deviation(config: &ModelConfig) -> Result<(), ConfigError> {
    let range = config.initializer_range;
    if (0.0..=1e6).contains(&range) {
        return Ok(());
    }
    Err(ConfigError::Invalid {
        key: "initializer_range",
        value: range.to_string(),
        expected: "a standard deviation, e.g. 0.02",
    })
}

/// The padding token's row. A negative id counts from the end, as in `torch.nn.Embedding`.
fn padding(root: &Map<String, Value>, config: &ModelConfig) -> Result<Option<usize>, ConfigError> {
    let Some(value) = root.get("pad_token_id") else { return Ok(None) };
    let vocab = config.vocab_size as i64;
    match value.as_i64() {
        Some(id) if (0..vocab).contains(&id) => Ok(Some(id as usize)),
        Some(id) if (-vocab..0).contains(&id) => Ok(Some((id + vocab) as usize)),
        _ => Err(ConfigError::Invalid {
            key: "pad_token_id",
            value: value.to_string(),
            expected: "a token id below vocab_size",
        }),
    }
}

fn fill(root: &mut Map<String, Value>, c: &ModelConfig) {
    let defaults = json!({
        "architectures": [architecture(c.family)],
        "hidden_act": "silu",
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "max_position_embeddings": c.max_positions,
        "rms_norm_eps": c.norm_eps,
        "tie_word_embeddings": c.tied,
        "initializer_range": c.initializer_range,
        "use_cache": true,
    });
    let mut set = |key: &str, value: Value| {
        root.entry(key).or_insert(value);
    };
    if let Value::Object(defaults) = defaults {
        for (key, value) in defaults {
            set(&key, value);
        }
    }
    for (key, id) in [("bos_token_id", c.bos_token), ("eos_token_id", c.eos_token)] {
        set(key, json!(id));
    }
    set("pad_token_id", Value::Null);
    match c.family {
        Family::Llama => {
            set("attention_bias", json!(false));
            set("mlp_bias", json!(false));
        }
        Family::Qwen3 => set("attention_bias", json!(false)),
        Family::Mistral => set("sliding_window", Value::Null),
        Family::Qwen2 => {}
    }
    if c.rope_scaling == RopeScaling::None {
        let rope = json!({"rope_type": "default", "rope_theta": c.rope_theta});
        root.insert("rope_parameters".into(), rope);
        root.remove("rope_scaling");
        root.remove("rope_theta");
    }
    root.remove("torch_dtype");
    root.insert("dtype".into(), json!("float32"));
}

fn architecture(family: Family) -> &'static str {
    match family {
        Family::Llama => "LlamaForCausalLM",
        Family::Mistral => "MistralForCausalLM",
        Family::Qwen2 => "Qwen2ForCausalLM",
        Family::Qwen3 => "Qwen3ForCausalLM",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: &str = r#"{"model_type":"mistral","vocab_size":300,"hidden_size":16,
        "intermediate_size":24,"num_hidden_layers":2,"num_attention_heads":4}"#;

    #[test]
    fn a_completed_config_means_the_same_and_leaves_nothing_open() {
        let completed = complete(SMALL, true).unwrap();
        assert_eq!(ModelConfig::from_json(&completed.json).unwrap(), completed.config);
        let again = complete(&completed.json, true).unwrap();
        assert_eq!(again.json, completed.json);
        let root: Value = serde_json::from_str(&completed.json).unwrap();
        assert_eq!(root["architectures"][0], "MistralForCausalLM");
        assert_eq!((&root["num_key_value_heads"], &root["bos_token_id"]), (&json!(4), &json!(256)));
        assert_eq!(root["dtype"], "float32");
        assert!(root["sliding_window"].is_null());
    }

    #[test]
    fn padding_ids_are_checked_against_the_vocabulary() {
        let pad = |id: &str| {
            complete(&SMALL.replacen('{', &format!("{{\"pad_token_id\":{id},"), 1), false)
        };
        assert_eq!(pad("299").unwrap().pad, Some(299));
        assert_eq!(pad("-1").unwrap().pad, Some(299));
        assert_eq!(pad("null").unwrap().pad, None);
        for id in ["300", "-301", "\"a\"", "1.5"] {
            assert!(pad(id).is_err(), "{id}");
        }
    }

    #[test]
    fn special_tokens_are_named_from_the_tokenizer() {
        let config = complete(SMALL, true).unwrap().config;
        let json = r#"{"added_tokens":[{"id":256,"content":"<b>"},{"id":257,"content":"<e>"}]}"#;
        let text = String::from_utf8(tokenizer_config(json, &config).unwrap()).unwrap();
        assert!(text.contains(r#""bos_token":"<b>""#) && text.contains(r#""eos_token":"<e>""#));
        assert!(tokenizer_config("{", &config).is_err());
    }
}
