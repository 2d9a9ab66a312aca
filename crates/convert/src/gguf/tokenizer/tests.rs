//! Rebuilt tokenizers, loaded and used by the `tokenizers` crate.

use proptest::prelude::*;
use tokenizers::Tokenizer as Hub;

use super::*;

fn texts(tokens: &[&str]) -> Value {
    Value::Texts(tokens.iter().map(|t| (*t).to_string()).collect())
}

/// A byte-level vocabulary of 256 bytes, two merged tokens and two special ones.
fn byte_level_metadata(pre: &str) -> Metadata {
    let alphabet = Alphabet::new();
    let mut tokens: Vec<String> =
        (0..=255).map(|byte| letter(&alphabet, byte).to_string()).collect();
    tokens.extend(["Ġt", "Ġth", "<|eos|>", "<think>"].map(String::from));
    let mut kinds = vec![1; 258];
    kinds.extend([CONTROL, USER_DEFINED]);
    Metadata::from([
        ("tokenizer.ggml.model".into(), Value::Text("gpt2".into())),
        ("tokenizer.ggml.pre".into(), Value::Text(pre.into())),
        ("tokenizer.ggml.tokens".into(), Value::Texts(tokens)),
        ("tokenizer.ggml.token_type".into(), Value::Integers(kinds)),
        ("tokenizer.ggml.merges".into(), texts(&["Ġ t", "Ġt h"])),
        ("tokenizer.ggml.eos_token_id".into(), Value::Unsigned(258)),
        ("tokenizer.chat_template".into(), Value::Text("{{ messages }}".into())),
    ])
}

/// The alphabet's letter for any byte, also one that UTF-8 never has.
fn letter(alphabet: &Alphabet, byte: u8) -> char {
    let prints = |b: u8| matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    if prints(byte) {
        return char::from(byte);
    }
    let skipped = (0..byte).filter(|b| !prints(*b)).count() as u32;
    let letter = char::from_u32(0x100 + skipped).unwrap();
    assert!(alphabet.spells(&letter.to_string()));
    letter
}

fn load(metadata: &Metadata) -> Hub {
    let built = build(metadata).unwrap();
    Hub::from_bytes(&built.files[0].1).unwrap()
}

fn ids(hub: &Hub, text: &str) -> Vec<u32> {
    hub.encode(text, true).unwrap().get_ids().to_vec()
}

#[test]
fn byte_level_vocabularies_merge_split_and_keep_special_tokens_whole() {
    for pre in ["default", "smollm", "llama-bpe", "qwen2", "tekken"] {
        let hub = load(&byte_level_metadata(pre));
        assert_eq!(ids(&hub, "a the<|eos|><think>"), [97, 257, 101, 258, 259], "{pre}");
        assert_eq!(hub.decode(&ids(&hub, "ü the\n"), true).unwrap(), "ü the\n", "{pre}");
    }
}

#[test]
fn the_config_names_special_tokens_and_the_chat_template() {
    let built = build(&byte_level_metadata("default")).unwrap();
    let config: Json = serde_json::from_slice(&built.files[1].1).unwrap();
    assert_eq!(config["eos_token"], "<|eos|>");
    assert_eq!(config["chat_template"], "{{ messages }}");
    assert_eq!(config["add_bos_token"], false);
}

#[test]
fn sentencepiece_vocabularies_imply_merges_and_start_with_bos() {
    let mut tokens: Vec<String> = ["<unk>", "<s>", "</s>"].map(String::from).to_vec();
    tokens.extend((0..=255u8).map(|b| format!("<0x{b:02X}>")));
    tokens.extend(["▁", "a", "b", "▁a", "ab", "▁ab"].map(String::from));
    let mut scores = vec![0.0; 259];
    scores.extend([-9.0, -8.0, -7.0, -3.0, -2.0, -4.0]);
    let metadata = Metadata::from([
        ("tokenizer.ggml.model".into(), Value::Text("llama".into())),
        ("tokenizer.ggml.tokens".into(), Value::Texts(tokens)),
        ("tokenizer.ggml.scores".into(), Value::Floats(scores)),
        ("tokenizer.ggml.bos_token_id".into(), Value::Unsigned(1)),
        ("tokenizer.ggml.eos_token_id".into(), Value::Unsigned(2)),
    ]);
    let hub = load(&metadata);
    assert_eq!(ids(&hub, "ab a"), [1, 264, 262]);
    assert_eq!(ids(&hub, "é"), [1, 259, 3 + 0xc3, 3 + 0xa9]);
    assert_eq!(ids(&hub, "</s>"), [1, 2]);
    assert_eq!(hub.decode(&ids(&hub, "ab a"), true).unwrap(), "ab a");
}

#[test]
fn what_cannot_be_rebuilt_is_refused_by_name() {
    for (key, value, named) in [
        ("model", Value::Text("bert".into()), "bert"),
        ("pre", Value::Text("poro".into()), "poro"),
        ("merges", texts(&["Ġ q"]), "impossible merge"),
        ("merges", texts(&["Ġt"]), "impossible merge"),
        ("tokens", texts(&["a", "a"]), "twice"),
        ("eos_token_id", Value::Unsigned(260), "eos_token_id"),
    ] {
        let mut metadata = byte_level_metadata("default");
        metadata.insert(format!("tokenizer.ggml.{key}"), value);
        if key == "tokens" {
            metadata.remove("tokenizer.ggml.eos_token_id");
        }
        let error = build(&metadata).unwrap_err();
        assert!(error.contains(named), "{key}: {error}");
    }
    let mut metadata = byte_level_metadata("default");
    metadata.remove("tokenizer.ggml.pre");
    assert_eq!(build(&metadata).unwrap().warnings.len(), 1);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn any_vocabulary_is_answered(
        tokens in prop::collection::vec("[ab▁Ġ <>é]{0,4}", 0..12),
        merges in prop::collection::vec("[ab▁Ġ ]{0,4}", 0..4),
        scores in prop::collection::vec(any::<f64>(), 0..12),
        model in prop::bool::ANY,
    ) {
        let metadata = Metadata::from([
            ("tokenizer.ggml.model".into(), Value::Text(if model { "gpt2" } else { "llama" }.into())),
            ("tokenizer.ggml.tokens".into(), Value::Texts(tokens)),
            ("tokenizer.ggml.merges".into(), Value::Texts(merges)),
            ("tokenizer.ggml.scores".into(), Value::Floats(scores)),
        ]);
        let _ = build(&metadata);
        let mut scored = metadata;
        scored.remove("tokenizer.ggml.merges");
        let _ = build(&scored);
    }
}
