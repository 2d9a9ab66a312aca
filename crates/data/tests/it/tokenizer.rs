//! Token ids against those of transformers, and what a model directory says about its tokenizer.

use std::fs;
use std::path::{Path, PathBuf};

use data::{ErrorKind, Tokenizer, TokenizerError};

pub(crate) fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

fn golden_ids(name: &str) -> Vec<u32> {
    serde_json::from_slice(&fs::read(golden(&format!("{name}.ids.json"))).unwrap()).unwrap()
}

#[test]
fn ids_equal_those_of_transformers() {
    let sample = fs::read_to_string(golden("sample.txt")).unwrap();
    for name in ["gpt2_style", "smollm_style", "llama3_style", "llama2_style"] {
        let tokenizer = Tokenizer::from_file(golden(&format!("{name}.json"))).unwrap();
        assert!(tokenizer.encode(&sample).unwrap() == golden_ids(name), "{name}");
    }
}

#[test]
fn byte_ids_equal_those_of_transformers() {
    let sample = fs::read_to_string(golden("sample.txt")).unwrap();
    let sample: String = sample.chars().take(1500).collect();
    assert!(sample.contains("<|eos|>"));
    assert!(Tokenizer::bytes().encode(&sample).unwrap() == golden_ids("bytes"));
}

#[test]
fn byte_level_text_survives() {
    let sample = fs::read_to_string(golden("sample.txt")).unwrap();
    for name in ["bytes", "gpt2_style", "smollm_style"] {
        let tokenizer = Tokenizer::from_file(golden(&format!("{name}.json"))).unwrap();
        let ids = tokenizer.encode(&sample).unwrap();
        assert!(ids.iter().all(|id| *id < tokenizer.vocab_size()));
        assert!(tokenizer.decode(&ids).unwrap() == sample, "{name}");
    }
}

#[test]
fn decoding_is_lossy_and_skips_what_is_no_token() {
    let tokenizer = Tokenizer::bytes();
    assert_eq!(tokenizer.decode(&[0xff, 97, 257, 4000]).unwrap(), "\u{fffd}a<|eos|>");
    assert_eq!(tokenizer.decode_text(&[0xff, 97, 257, 4000]).unwrap(), "\u{fffd}a");
}

#[test]
fn the_end_of_sequence_is_found_where_models_name_it() {
    let cases = [
        ("tokenizer_config.json", r#"{"eos_token": "<|end|>"}"#, Some(0)),
        (
            "tokenizer_config.json",
            r#"{"eos_token": {"content": "<|end|>", "lstrip": false}}"#,
            Some(0),
        ),
        ("tokenizer_config.json", r#"{"eos_token": null}"#, None),
        ("special_tokens_map.json", r#"{"eos_token": "<|end|>"}"#, Some(0)),
        ("config.json", r#"{"eos_token_id": 17}"#, Some(17)),
        ("config.json", r#"{"eos_token_id": [18, 19]}"#, Some(18)),
        ("config.json", r#"{"eos_token_id": null}"#, None),
    ];
    for (name, content, expected) in cases {
        let directory = tempfile::tempdir().unwrap();
        fs::copy(golden("gpt2_style.json"), directory.path().join("tokenizer.json")).unwrap();
        fs::write(directory.path().join(name), content).unwrap();
        let tokenizer = Tokenizer::load(directory.path()).unwrap();
        assert_eq!(tokenizer.eos(), expected, "{name} {content}");
    }
}

#[test]
fn the_byte_tokenizer_survives_its_files() {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("tokenizer.json"), Tokenizer::bytes_json()).unwrap();
    let config = directory.path().join("tokenizer_config.json");
    fs::write(config, Tokenizer::bytes_config_json()).unwrap();
    let tokenizer = Tokenizer::load(directory.path()).unwrap();
    assert!(tokenizer.is_bytes());
    assert_eq!(tokenizer.eos(), Some(257));
    assert_eq!(tokenizer.digest(), Tokenizer::bytes().digest());
    let resaved = Tokenizer::bytes_json()
        .replace(r#""post_processor": null"#, r#""post_processor": {"type": "ByteLevel"}"#);
    let path = directory.path().join("tokenizer.json");
    fs::write(&path, &resaved).unwrap();
    assert!(Tokenizer::from_file(&path).unwrap().is_bytes());
    fs::write(&path, resaved.replace(r#""Ā": 0"#, r#""Ā": 1"#)).unwrap();
    assert!(!Tokenizer::from_file(&path).is_ok_and(|tokenizer| tokenizer.is_bytes()));
}

#[test]
fn what_is_no_tokenizer_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("tokenizer.json");
    let missing = Tokenizer::load(directory.path()).unwrap_err();
    assert!(missing.to_string().contains("tokenizer.json"));
    assert_eq!(missing.kind(), ErrorKind::Invalid);
    let whole = fs::read(golden("gpt2_style.json")).unwrap();
    for content in [&b""[..], b"{}", b"[1]", b"\xff", &whole[..whole.len() / 2]] {
        fs::write(&path, content).unwrap();
        let error = Tokenizer::load(directory.path()).unwrap_err();
        assert!(matches!(error, TokenizerError::Parse { .. }), "{error}");
    }
    let random = String::from_utf8(whole.clone()).unwrap();
    fs::write(&path, random.replace(r#""dropout":null"#, r#""dropout":0.1"#)).unwrap();
    assert!(matches!(Tokenizer::load(directory.path()), Err(TokenizerError::Dropout { .. })));
    fs::write(&path, whole).unwrap();
    fs::write(directory.path().join("tokenizer_config.json"), r#"{"eos_token": "</s>"}"#).unwrap();
    assert!(matches!(Tokenizer::load(directory.path()), Err(TokenizerError::UnknownEos { .. })));
}
