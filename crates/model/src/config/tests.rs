//! Configs as published by the families, and what must be refused.

use proptest::prelude::*;

use super::*;

fn config(extra: &str) -> Result<ModelConfig, ConfigError> {
    ModelConfig::from_json(&format!(
        r#"{{"model_type":"llama","vocab_size":32,"hidden_size":16,"intermediate_size":24,
            "num_hidden_layers":2,"num_attention_heads":4{extra}}}"#
    ))
}

#[test]
fn defaults_follow_the_family() {
    let c = config("").unwrap();
    assert_eq!(
        (c.kv_heads, c.head_dim, c.qkv_bias, c.qk_norm, c.tied),
        (4, 4, false, false, false)
    );
    assert_eq!((c.rope_theta, c.rope_scaling), (10_000.0, RopeScaling::None));
    let qwen2 = config(r#","model_type":"qwen2""#).unwrap();
    assert!(qwen2.qkv_bias && !qwen2.output_bias);
    let qwen3 = config(r#","model_type":"qwen3""#).unwrap();
    assert!(qwen3.qk_norm && qwen3.head_dim == 128);
}

#[test]
fn rope_is_read_from_either_spelling() {
    let old = config(
        r#","rope_theta":500000.0,"rope_scaling":{"rope_type":"llama3","factor":8.0,
           "low_freq_factor":1.0,"high_freq_factor":4.0,"original_max_position_embeddings":64}"#,
    );
    let new = config(
        r#","rope_parameters":{"rope_theta":500000.0,"rope_type":"llama3","factor":8.0,
           "low_freq_factor":1.0,"high_freq_factor":4.0,"original_max_position_embeddings":64}"#,
    );
    assert_eq!(old, new);
    let frequencies = old.unwrap().rope_frequencies();
    assert_eq!(frequencies[0], 1.0);
    assert!(frequencies[1] < 500_000f64.powf(-0.5) / 7.9);
}

#[test]
fn what_is_not_computed_is_refused_by_name() {
    for (extra, named) in [
        (r#","model_type":"gpt2""#, "gpt2"),
        (r#","rope_scaling":{"type":"yarn","factor":4.0}"#, "yarn"),
        (r#","quantization_config":{"bits":4}"#, "quantised"),
        (r#","num_local_experts":8"#, "experts"),
        (r#","hidden_act":"gelu""#, "gelu"),
        (r#","model_type":"mistral","sliding_window":1024"#, "sliding"),
        (r#","layer_types":["sliding_attention","full_attention"]"#, "sliding"),
    ] {
        let error = config(extra).unwrap_err();
        assert!(matches!(error, ConfigError::Unsupported(_)), "{extra}: {error}");
        assert!(error.to_string().contains(named), "{extra}: {error}");
    }
    assert!(config(r#","model_type":"mistral","sliding_window":null"#).is_ok());
}

#[test]
fn impossible_sizes_are_refused() {
    for extra in [
        r#","num_key_value_heads":3"#,
        r#","head_dim":3"#,
        r#","head_dim":0"#,
        r#","vocab_size":99999999999"#,
        r#","rms_norm_eps":-1"#,
        r#","rope_theta":"many""#,
    ] {
        assert!(matches!(config(extra), Err(ConfigError::Invalid { .. })), "{extra}");
    }
    assert_eq!(ModelConfig::from_json("{}").unwrap_err(), ConfigError::Missing("model_type"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(20_000))]

    #[test]
    fn any_text_is_answered(text in "\\PC{0,64}") {
        let _ = ModelConfig::from_json(&text);
    }

    #[test]
    fn any_value_of_any_key_is_answered(key in 0usize..9, value in prop_oneof![
        Just("null".to_string()), Just("-1".into()), Just("1e300".into()), Just("[]".into()),
        Just("{\"rope_type\":\"llama3\"}".into()), (0u64..u64::MAX).prop_map(|n| n.to_string()),
    ]) {
        let key = ["vocab_size", "hidden_size", "num_attention_heads", "head_dim", "rope_scaling",
            "eos_token_id", "rms_norm_eps", "max_position_embeddings", "num_key_value_heads"][key];
        if let Ok(c) = config(&format!(r#","{key}":{value}"#)) {
            prop_assert!(c.heads.is_multiple_of(c.kv_heads) && c.head_dim > 0);
        }
    }
}
