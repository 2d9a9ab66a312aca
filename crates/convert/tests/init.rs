//! Freshly initialised stores, and their way out to a Hugging Face directory and back.

#![allow(clippy::unwrap_used)]

mod support;

use std::fs;
use std::sync::Arc;

use convert::{Destination, Dtype, ErrorKind, Init, InitTokenizer, export_hf, init};
use half::{bf16, f16};
use safetensors::SafeTensors;
use store::{Image, Memory, ReadingStore, memory_engine};
use support::*;
use tempfile::tempdir;

const TOKENIZER: &str = r#"{"added_tokens":[{"id":256,"content":"<|bos|>"}]}"#;

fn what(config: &str, seed: u64) -> Init<'_> {
    let tokenizer = InitTokenizer::Bytes(TOKENIZER.into());
    Init { config_json: config, tokenizer, tokenizer_vocab: 259, seed }
}

fn initialised(config: &str, seed: u64) -> ReadingStore {
    let io = memory_engine();
    init(&what(config, seed), &Destination::new(Arc::clone(&io), dest()), &mut |_, _| {}).unwrap();
    open(io)
}

#[test]
fn tensors_follow_the_rules() {
    let extra = r#","attention_bias":true,"mlp_bias":true,"pad_token_id":258,
        "initializer_range":0.05"#;
    let store = initialised(&config(extra), 1);
    let weights = weights(&store);
    for spec in tensors(store.table()) {
        let values = &weights[&spec.name];
        if spec.name.ends_with("norm.weight") {
            assert!(values.iter().all(|v| *v == 1.0), "{}", spec.name);
        } else if spec.name.ends_with("bias") {
            assert!(values.iter().all(|v| *v == 0.0), "{}", spec.name);
        } else {
            let n = values.len() as f64;
            let square = values.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / n;
            let slack = 5.0 / n.sqrt();
            assert!((square.sqrt() / 0.05 - 1.0).abs() < slack, "{}: {square}", spec.name);
        }
    }
    let embedding = &weights["model.embed_tokens.weight"];
    assert!(embedding[258 * 16..259 * 16].iter().all(|v| *v == 0.0));
    assert!(embedding[..258 * 16].iter().chain(&embedding[259 * 16..]).all(|v| *v != 0.0));
}

#[test]
fn the_seed_alone_decides() {
    let config = config("");
    assert_eq!(hashes(&initialised(&config, 7)), hashes(&initialised(&config, 7)));
    let (a, b) = (hashes(&initialised(&config, 7)), hashes(&initialised(&config, 8)));
    assert!(a.iter().zip(&b).all(|(a, b)| a != b));
}

#[test]
fn a_tensor_does_not_depend_on_the_others() {
    let deep = config("").replace("layers\":2", "layers\":3");
    let (a, b) = (weights(&initialised(&config(""), 3)), weights(&initialised(&deep, 3)));
    assert!(a.iter().all(|(name, values)| b[name] == *values));
}

#[test]
fn config_and_tokenizer_files_are_complete() {
    let store = initialised(&config(""), 0);
    let root: serde_json::Value = serde_json::from_str(store.config_json()).unwrap();
    assert_eq!(root["architectures"][0], "LlamaForCausalLM");
    assert_eq!((root["dtype"].as_str(), root.get("torch_dtype")), (Some("float32"), None));
    assert_eq!((&root["bos_token_id"], &root["eos_token_id"]), (&256.into(), &257.into()));
    assert_eq!(store.read_file("tokenizer.json").unwrap(), TOKENIZER.as_bytes());
    let config = String::from_utf8(store.read_file("tokenizer_config.json").unwrap()).unwrap();
    assert!(config.contains(r#""bos_token":"<|bos|>""#), "{config}");
    assert_eq!(store.defaults()["lr"], 3e-4);
}

#[test]
fn impossible_models_are_refused_before_anything_is_written() {
    let small = config("").replace("300", "258");
    let deep = config("").replace("layers\":2", "layers\":16000000");
    let wide = config("").replace("\"hidden_size\":16", "\"hidden_size\":16777216");
    for (config, named) in [
        (small, "vocab_size"),
        (deep, "layers"),
        (wide.replace("24", "16777216").replace("300", "16777216"), "beyond any disk"),
        (config(r#","initializer_range":-1"#), "initializer_range"),
        (config(r#","pad_token_id":300"#), "pad_token_id"),
        ("{".into(), "JSON"),
    ] {
        let io = memory_engine();
        let error =
            init(&what(&config, 0), &Destination::new(Arc::clone(&io), dest()), &mut |_, _| {})
                .unwrap_err();
        assert_clean(&*io, &error);
        assert!(error.to_string().contains(named), "{named}: {error}");
    }
    let config = config("");
    let files = InitTokenizer::Files(vec![("vocab.json".into(), b"{}".to_vec())]);
    let what = Init { tokenizer: files, ..what(&config, 0) };
    let io = memory_engine();
    let error =
        init(&what, &Destination::new(Arc::clone(&io), dest()), &mut |_, _| {}).unwrap_err();
    assert_clean(&*io, &error);
}

#[test]
fn an_export_comes_back_as_the_same_store() {
    for extra in ["", r#","tie_word_embeddings":true"#] {
        let store = initialised(&config(extra), 5);
        let dir = tempdir().unwrap();
        let out = dir.path().join("new/out");
        let exported = export_hf(&store, &out, Dtype::F32, &mut |_, _| {}).unwrap();
        assert_eq!(exported.files, ["model.safetensors"]);
        assert_eq!(exported.weight_bytes, store.table().elements() as u64 * 4);
        let (_, back) = import(&out);
        assert_eq!(hashes(&back), hashes(&store));
        let names = ["tokenizer.json", "tokenizer_config.json"];
        assert!(names.iter().all(|n| back.read_file(n).unwrap() == store.read_file(n).unwrap()));
        assert!(fs::read_dir(&out).unwrap().count() == 4, "temporary files are left");
    }
}

#[test]
fn halves_are_rounded_to_nearest_even() {
    let store = initialised(&config(""), 6);
    let weights = weights(&store);
    for (dtype, name) in [(Dtype::BF16, "bfloat16"), (Dtype::F16, "float16")] {
        let dir = tempdir().unwrap();
        export_hf(&store, dir.path(), dtype, &mut |_, _| {}).unwrap();
        let bytes = fs::read(dir.path().join("model.safetensors")).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(tensors.len(), weights.len());
        for (name, values) in &weights {
            let round = |v: &f32| match dtype {
                Dtype::BF16 => bf16::from_f32(*v).to_le_bytes(),
                _ => f16::from_f32(*v).to_le_bytes(),
            };
            let expected: Vec<u8> = values.iter().flat_map(round).collect();
            assert!(tensors.tensor(name).unwrap().data() == expected, "{name}");
        }
        let config = fs::read_to_string(dir.path().join("config.json")).unwrap();
        assert!(config.contains(&format!("\"dtype\": \"{name}\"")), "{config}");
    }
}

#[test]
fn values_beyond_the_type_are_refused_by_name_and_leave_nothing() {
    let dir = tempdir().unwrap();
    let mut checkpoint = Checkpoint::new(config(""), safetensors::Dtype::F32);
    let tensor = checkpoint.tensors.get_mut("model.layers.1.mlp.up_proj.weight").unwrap();
    tensor.2[4 * 9..4 * 10].copy_from_slice(&1e6f32.to_le_bytes());
    checkpoint.write(dir.path());
    let (_, store) = import(dir.path());
    let out = dir.path().join("out");
    let error = export_hf(&store, &out, Dtype::F16, &mut |_, _| {}).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    let text = error.to_string();
    assert!(text.contains("1.mlp.up_proj.weight") && text.contains("element 9,"), "{text}");
    assert!(!out.exists());
    export_hf(&store, &out, Dtype::BF16, &mut |_, _| {}).unwrap();
}

#[test]
fn a_directory_with_contents_is_refused_and_kept() {
    let store = initialised(&config(""), 0);
    let dir = tempdir().unwrap();
    fs::write(dir.path().join("mine"), "mine").unwrap();
    let error = export_hf(&store, dir.path(), Dtype::F32, &mut |_, _| {}).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
}

#[test]
fn damaged_weights_are_refused_before_anything_is_written() {
    let memory = Arc::new(Memory::from_image(Image::default()));
    init(&what(&config(""), 4), &Destination::new(memory.clone(), dest()), &mut |_, _| {}).unwrap();
    let mut image = memory.image();
    let path = dest().join("layers/1/a/weight.safetensors");
    *image.files.get_mut(&path).unwrap().last_mut().unwrap() ^= 1;
    let dir = tempdir().unwrap();
    let out = dir.path().join("out");
    let store = open(Arc::new(Memory::from_image(image)));
    let error = export_hf(&store, &out, Dtype::F32, &mut |_, _| {}).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Damaged, "{error}");
    assert!(error.to_string().contains("layers/1/a/weight.safetensors"), "{error}");
    assert!(!out.exists());
}

#[test]
fn an_export_into_a_file_is_refused() {
    let store = initialised(&config(""), 0);
    let dir = tempdir().unwrap();
    let file = dir.path().join("mine");
    fs::write(&file, "mine").unwrap();
    for out in [file.clone(), file.join("out")] {
        let error = export_hf(&store, &out, Dtype::F32, &mut |_, _| {}).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        assert!(error.to_string().contains("name a new directory"), "{error}");
    }
    assert_eq!(fs::read(&file).unwrap(), b"mine");
}

#[test]
fn errors_of_a_config_do_not_invent_its_name() {
    let io = memory_engine();
    let small = config("").replace("300", "258");
    for (config, expected) in [
        ("{}", "the config: lacks `model_type`"),
        (&small, "the config: has `vocab_size` = 258, but"),
    ] {
        let error =
            init(&what(config, 0), &Destination::new(Arc::clone(&io), dest()), &mut |_, _| {})
                .unwrap_err();
        let text = error.to_string();
        assert!(text.starts_with(expected) && !text.contains("config.json"), "{text}");
        // Whoever prints the causes as well must not repeat it under another name.
        assert!(std::error::Error::source(&error).is_none());
    }
}
