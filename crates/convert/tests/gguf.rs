//! GGUF files made by the Python package `gguf`, compared with what transformers reads from them.

#![allow(clippy::unwrap_used)]

mod support;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use convert::{ConvertError, Destination, Report, import_gguf};
use proptest::prelude::*;
use safetensors::SafeTensors;
use store::{Io, ReadingStore, memory_engine};
use support::*;

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

fn import_file(file: &Path, io: Arc<dyn Io>) -> Result<Report, ConvertError> {
    import_gguf(file, &Destination::new(io, dest()), &mut |_, _| {})
}

fn import_golden(arch: &str) -> ReadingStore {
    let io = memory_engine();
    let report = import_file(&golden(&format!("{arch}.gguf")), Arc::clone(&io)).unwrap();
    assert!(report.warnings.is_empty(), "{report:?}");
    open(io)
}

#[test]
fn weights_equal_transformers_bit_for_bit() {
    for arch in ["llama", "qwen2", "qwen3", "gpt2", "sentencepiece"] {
        let store = import_golden(arch);
        let bytes = fs::read(golden(&format!("{arch}.safetensors"))).unwrap();
        let expected = SafeTensors::deserialize(&bytes).unwrap();
        let weights = weights(&store);
        assert_eq!(weights.len(), expected.len(), "{arch}");
        for (name, values) in &weights {
            let tensor = expected.tensor(name).unwrap();
            let ours: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
            assert!(ours == tensor.data(), "{arch}: {name}");
        }
    }
}

#[test]
fn configs_say_what_the_files_say() {
    for (arch, tied, bias) in
        [("llama", true, false), ("qwen2", false, true), ("qwen3", true, false)]
    {
        let config = model::ModelConfig::from_json(import_golden(arch).config_json()).unwrap();
        assert_eq!(config.family.model_type(), arch);
        assert_eq!((config.tied, config.qkv_bias, config.rope_theta), (tied, bias, 50_000.0));
        assert_eq!((config.bos_token, config.eos_token), (Some(269), Some(270)));
    }
}

#[test]
fn token_ids_equal_transformers() {
    type Golden = BTreeMap<String, Vec<(String, Vec<u32>)>>;
    let text = fs::read_to_string(golden("ids.json")).unwrap();
    let all: Golden = serde_json::from_str(&text).unwrap();
    assert_eq!(all.len(), 5);
    for (name, texts) in &all {
        let json = import_golden(name).read_file("tokenizer.json").unwrap();
        let tokenizer = tokenizers::Tokenizer::from_bytes(json).unwrap();
        for (text, expected) in texts {
            let ids = tokenizer.encode(text.as_str(), true).unwrap();
            assert_eq!(ids.get_ids(), expected, "{name}: {text:?}");
        }
    }
}

#[test]
fn a_file_cut_anywhere_is_refused() {
    let bytes = fs::read(golden("llama.gguf")).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("cut.gguf");
    for len in (0..bytes.len() - 64).step_by(211) {
        fs::write(&path, &bytes[..len]).unwrap();
        let io = memory_engine();
        let error = import_file(&path, Arc::clone(&io)).unwrap_err();
        assert_clean(&*io, &error);
        assert!(error.to_string().contains("cut.gguf"), "{error}");
    }
}

#[test]
fn weights_that_are_not_numbers_are_refused() {
    let mut bytes = fs::read(golden("llama.gguf")).unwrap();
    let len = bytes.len();
    bytes[len - 6 * 34..].fill(0xff);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("nan.gguf");
    fs::write(&path, &bytes).unwrap();
    let io = memory_engine();
    let error = import_file(&path, Arc::clone(&io)).unwrap_err();
    assert_clean(&*io, &error);
    assert!(error.to_string().contains("NaN in tensor `model.layers.1.mlp.down_proj"), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn a_changed_file_is_imported_or_refused(
        changes in prop::collection::vec((0usize..9_000, any::<u8>()), 1..8),
    ) {
        let mut bytes = fs::read(golden("qwen2.gguf")).unwrap();
        for (at, byte) in changes {
            bytes[at] = byte;
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("changed.gguf");
        fs::write(&path, &bytes).unwrap();
        let io = memory_engine();
        if let Err(error) = import_file(&path, Arc::clone(&io)) {
            assert_clean(&*io, &error);
        }
    }
}
