//! [`ModelConfig`]: the architecture, read from a Hugging Face `config.json`.
//!
//! Invariants:
//! - what a config asks for and ftactor does not compute exactly is refused by name here, never
//!   approximated later;
//! - every size is positive and every product of sizes that describes a tensor fits `usize`.

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Why a `config.json` cannot be used.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum ConfigError {
    #[error("config.json is not valid JSON: {0}")]
    Json(String),
    #[error("config.json lacks `{0}`")]
    Missing(&'static str),
    #[error("config.json has `{key}` = {value}, expected {expected}")]
    Invalid { key: &'static str, value: String, expected: &'static str },
    #[error(
        "config.json asks for {0}, which ftactor does not compute exactly and therefore refuses"
    )]
    Unsupported(String),
}

/// Model family: decides defaults and which optional tensors exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Family {
    Llama,
    Mistral,
    Qwen2,
    Qwen3,
}

impl Family {
    /// `model_type` of the family in a `config.json`.
    pub fn model_type(self) -> &'static str {
        match self {
            Family::Llama => "llama",
            Family::Mistral => "mistral",
            Family::Qwen2 => "qwen2",
            Family::Qwen3 => "qwen3",
        }
    }

    fn from_model_type(name: &str) -> Option<Family> {
        [Family::Llama, Family::Mistral, Family::Qwen2, Family::Qwen3]
            .into_iter()
            .find(|f| f.model_type() == name)
    }
}

/// How rotary frequencies are stretched beyond the trained context.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub enum RopeScaling {
    None,
    /// All frequencies divided by `factor`.
    Linear {
        factor: f64,
    },
    /// Llama 3.1's frequency-dependent interpolation.
    Llama3 {
        factor: f64,
        low_freq_factor: f64,
        high_freq_factor: f64,
        original_max_positions: usize,
    },
}

/// Everything about an architecture that decides shapes and arithmetic.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelConfig {
    pub family: Family,
    /// V
    pub vocab_size: usize,
    /// D
    pub hidden_size: usize,
    /// F
    pub intermediate_size: usize,
    /// Number of decoder layers.
    pub layers: usize,
    /// H
    pub heads: usize,
    /// G: key-value heads; `heads` is a multiple of it.
    pub kv_heads: usize,
    /// K: elements of one head, even.
    pub head_dim: usize,
    pub max_positions: usize,
    pub norm_eps: f64,
    pub rope_theta: f64,
    pub rope_scaling: RopeScaling,
    /// The head projects with the embedding's weights.
    pub tied: bool,
    pub qkv_bias: bool,
    pub output_bias: bool,
    pub mlp_bias: bool,
    /// RMSNorm on every query and key head.
    pub qk_norm: bool,
    /// Standard deviation of freshly initialised projections.
    pub initializer_range: f64,
    pub bos_token: Option<u32>,
    pub eos_token: Option<u32>,
}

impl ModelConfig {
    /// Reads the text of a Hugging Face `config.json`.
    pub fn from_json(text: &str) -> Result<ModelConfig, ConfigError> {
        let root: Value =
            serde_json::from_str(text).map_err(|e| ConfigError::Json(e.to_string()))?;
        let fields = Fields { root: &root };
        let model_type = fields.text("model_type")?.ok_or(ConfigError::Missing("model_type"))?;
        let family = Family::from_model_type(model_type)
            .ok_or_else(|| ConfigError::Unsupported(format!("model_type `{model_type}`")))?;
        fields.refuse_unsupported(family)?;

        let hidden_size = fields.size("hidden_size")?;
        let heads = fields.size("num_attention_heads")?;
        let attention_bias = fields.flag("attention_bias")?.unwrap_or(false);
        let (qkv_bias, output_bias) = match family {
            Family::Qwen2 => (true, false),
            Family::Mistral => (false, false),
            Family::Llama | Family::Qwen3 => (attention_bias, attention_bias),
        };
        let rope = fields.rope()?;
        let config = ModelConfig {
            family,
            vocab_size: fields.size("vocab_size")?,
            hidden_size,
            intermediate_size: fields.size("intermediate_size")?,
            layers: fields.size("num_hidden_layers")?,
            heads,
            kv_heads: fields.optional_size("num_key_value_heads")?.unwrap_or(heads),
            head_dim: fields.optional_size("head_dim")?.unwrap_or(match family {
                Family::Qwen3 => 128,
                _ => hidden_size / heads,
            }),
            max_positions: fields.optional_size("max_position_embeddings")?.unwrap_or(2048),
            norm_eps: fields.number("rms_norm_eps")?.unwrap_or(1e-6),
            rope_theta: rope.0,
            rope_scaling: rope.1,
            tied: fields.flag("tie_word_embeddings")?.unwrap_or(false),
            qkv_bias,
            output_bias,
            mlp_bias: family == Family::Llama && fields.flag("mlp_bias")?.unwrap_or(false),
            qk_norm: family == Family::Qwen3,
            initializer_range: fields.number("initializer_range")?.unwrap_or(0.02),
            bos_token: fields.token("bos_token_id")?,
            eos_token: fields.token("eos_token_id")?,
        };
        config.check()?;
        Ok(config)
    }

    /// H * K: width of the concatenated query heads.
    pub fn query_width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// G * K: width of the concatenated key (or value) heads.
    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Rotary angle per position of each of the K/2 pairs of a head, in float64.
    ///
    /// Formulas: RoFormer (Su et al. 2021), `theta^(-2i/K)`; Llama 3.1's wavelength-dependent
    /// interpolation for [`RopeScaling::Llama3`].
    pub fn rope_frequencies(&self) -> Vec<f64> {
        let half = self.head_dim / 2;
        (0..half)
            .map(|i| {
                let exponent = (2 * i) as f64 / self.head_dim as f64;
                self.scale_frequency(1.0 / self.rope_theta.powf(exponent))
            })
            .collect()
    }

    fn scale_frequency(&self, frequency: f64) -> f64 {
        match self.rope_scaling {
            RopeScaling::None => frequency,
            RopeScaling::Linear { factor } => frequency / factor,
            RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_positions,
            } => {
                let turns = original_max_positions as f64 * frequency / std::f64::consts::TAU;
                if turns < low_freq_factor {
                    frequency / factor
                } else if turns > high_freq_factor {
                    frequency
                } else {
                    let smooth = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
                    (1.0 - smooth) * frequency / factor + smooth * frequency
                }
            }
        }
    }

    fn check(&self) -> Result<(), ConfigError> {
        let invalid = |key, value: usize, expected| {
            Err(ConfigError::Invalid { key, value: value.to_string(), expected })
        };
        if !self.heads.is_multiple_of(self.kv_heads) {
            return invalid(
                "num_key_value_heads",
                self.kv_heads,
                "a divisor of num_attention_heads",
            );
        }
        if !self.head_dim.is_multiple_of(2) || self.head_dim == 0 {
            return invalid("head_dim", self.head_dim, "an even number");
        }
        if !(self.norm_eps > 0.0 && self.norm_eps < 1.0) {
            return Err(ConfigError::Invalid {
                key: "rms_norm_eps",
                value: self.norm_eps.to_string(),
                expected: "a number between 0 and 1",
            });
        }
        if !(self.rope_theta.is_finite() && self.rope_theta > 1.0) {
            return Err(ConfigError::Invalid {
                key: "rope_theta",
                value: self.rope_theta.to_string(),
                expected: "a number above 1",
            });
        }
        Ok(())
    }
}

/// Upper bound of any single size in a config: keeps every tensor product far below `usize::MAX`.
const SIZE_LIMIT: u64 = 1 << 24;

struct Fields<'v> {
    root: &'v Value,
}

impl<'v> Fields<'v> {
    fn get(&self, key: &str) -> Option<&'v Value> {
        self.root.get(key).filter(|v| !v.is_null())
    }

    fn optional_size(&self, key: &'static str) -> Result<Option<usize>, ConfigError> {
        self.get(key).map(|value| positive(key, value)).transpose()
    }

    fn size(&self, key: &'static str) -> Result<usize, ConfigError> {
        self.optional_size(key)?.ok_or(ConfigError::Missing(key))
    }

    fn number(&self, key: &'static str) -> Result<Option<f64>, ConfigError> {
        self.get(key).map(|v| v.as_f64().ok_or_else(|| wrong(key, v, "a number"))).transpose()
    }

    fn flag(&self, key: &'static str) -> Result<Option<bool>, ConfigError> {
        self.get(key).map(|v| v.as_bool().ok_or_else(|| wrong(key, v, "true or false"))).transpose()
    }

    fn text(&self, key: &'static str) -> Result<Option<&'v str>, ConfigError> {
        self.get(key).map(|v| v.as_str().ok_or_else(|| wrong(key, v, "a string"))).transpose()
    }

    /// A token id; of a list (Llama 3's end tokens) the first one.
    fn token(&self, key: &'static str) -> Result<Option<u32>, ConfigError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let value = value.as_array().and_then(|a| a.first()).unwrap_or(value);
        let id = value.as_u64().and_then(|id| u32::try_from(id).ok());
        id.map(Some).ok_or_else(|| wrong(key, value, "a token id"))
    }

    fn refuse_unsupported(&self, family: Family) -> Result<(), ConfigError> {
        let refuse = |what: String| Err(ConfigError::Unsupported(what));
        if self.get("quantization_config").is_some() {
            return refuse("quantised weights (quantization_config)".into());
        }
        for key in ["num_experts", "num_local_experts", "n_routed_experts"] {
            if self.get(key).and_then(Value::as_u64).unwrap_or(0) > 0 {
                return refuse(format!("a mixture of experts (`{key}`)"));
            }
        }
        match self.text("hidden_act")?.unwrap_or("silu") {
            "silu" | "swish" => {}
            other => return refuse(format!("activation `{other}`")),
        }
        if self.number("attention_dropout")?.unwrap_or(0.0) != 0.0 {
            return refuse("attention dropout".into());
        }
        for key in ["partial_rotary_factor", "pretraining_tp"] {
            if self.number(key)?.unwrap_or(1.0) != 1.0 {
                return refuse(format!("`{key}` other than 1"));
            }
        }
        self.refuse_sliding_window(family)
    }

    /// A window that no row can reach beyond is harmless; an active one is refused.
    fn refuse_sliding_window(&self, family: Family) -> Result<(), ConfigError> {
        let sliding_layer = self
            .get("layer_types")
            .and_then(Value::as_array)
            .is_some_and(|types| types.iter().any(|t| t.as_str() != Some("full_attention")));
        let window = self.optional_size("sliding_window")?;
        let positions = self.optional_size("max_position_embeddings")?.unwrap_or(2048);
        let switched_on = match family {
            Family::Mistral => true,
            Family::Qwen2 | Family::Qwen3 => self.flag("use_sliding_window")?.unwrap_or(false),
            Family::Llama => false,
        };
        let active = window.is_some_and(|w| w < positions) && switched_on;
        if active || sliding_layer {
            return Err(ConfigError::Unsupported(
                "sliding-window attention (`sliding_window`)".into(),
            ));
        }
        Ok(())
    }

    /// Base and scaling, from `rope_theta` + `rope_scaling` or the newer `rope_parameters`.
    fn rope(&self) -> Result<(f64, RopeScaling), ConfigError> {
        let parameters = self.get("rope_parameters");
        let scaling = parameters.or_else(|| self.get("rope_scaling"));
        let inner = scaling.map(|root| Fields { root });
        let theta = match &inner {
            Some(fields) => fields.number("rope_theta")?,
            None => None,
        };
        let theta = theta.or(self.number("rope_theta")?).unwrap_or(10_000.0);
        let Some(fields) = inner else { return Ok((theta, RopeScaling::None)) };
        if fields.number("partial_rotary_factor")?.unwrap_or(1.0) != 1.0 {
            return Err(ConfigError::Unsupported("`partial_rotary_factor` other than 1".into()));
        }
        let kind = fields.text("rope_type")?.or(fields.text("type")?).unwrap_or("default");
        let need = |key| fields.number(key)?.ok_or(ConfigError::Missing(key));
        let scaling = match kind {
            "default" => RopeScaling::None,
            "linear" => RopeScaling::Linear { factor: need("factor")? },
            "llama3" => RopeScaling::Llama3 {
                factor: need("factor")?,
                low_freq_factor: need("low_freq_factor")?,
                high_freq_factor: need("high_freq_factor")?,
                original_max_positions: fields.size("original_max_position_embeddings")?,
            },
            other => return Err(ConfigError::Unsupported(format!("rope type `{other}`"))),
        };
        check_scaling(scaling)?;
        Ok((theta, scaling))
    }
}

fn check_scaling(scaling: RopeScaling) -> Result<(), ConfigError> {
    let valid = match scaling {
        RopeScaling::None => true,
        RopeScaling::Linear { factor } => factor >= 1.0,
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, .. } => {
            factor >= 1.0 && low_freq_factor > 0.0 && high_freq_factor > low_freq_factor
        }
    };
    if valid {
        return Ok(());
    }
    Err(ConfigError::Invalid {
        key: "rope_scaling",
        value: format!("{scaling:?}"),
        expected: "a factor of at least 1 and 0 < low_freq_factor < high_freq_factor",
    })
}

fn positive(key: &'static str, value: &Value) -> Result<usize, ConfigError> {
    match value.as_u64() {
        Some(n) if (1..=SIZE_LIMIT).contains(&n) => Ok(n as usize),
        _ => Err(wrong(key, value, "a positive whole number below 2^24")),
    }
}

fn wrong(key: &'static str, value: &Value, expected: &'static str) -> ConfigError {
    ConfigError::Invalid { key, value: value.to_string(), expected }
}

#[cfg(test)]
mod tests;
