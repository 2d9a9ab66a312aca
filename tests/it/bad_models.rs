//! Models that cannot be imported or made: the documented exit code, a message that names the file
//! and the remedy, and no store.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use safetensors::SafeTensors;
use safetensors::tensor::TensorView;

use crate::lab::{FAMILIES, Lab, Tiny, contents, ftactor, make_pipe, soon, with_file};

const QUERY: &str = "model.layers.0.self_attn.q_proj.weight";

/// A Hugging Face directory made by an export.
fn checkpoint(lab: &Lab, model: Tiny) -> String {
    let (store, out) = (lab.store("source", model, 1), lab.path("hf"));
    ftactor(&["export", "--store", &store, "--out", &out]).expect(0);
    out
}

/// Imports `source`, which must be refused with `code` and `words`, leaving no store.
#[track_caller]
fn import_refused(lab: &Lab, source: &str, code: i32, words: &[&str]) {
    let dest = lab.path("refused");
    let ran = ftactor(&["import", source, "--store", &dest]).expect(code).says(words);
    assert!(ran.stderr.starts_with("error: "), "{}", ran.stderr);
    assert!(!Path::new(&dest).exists(), "a store is left behind: {}", ran.stderr);
}

#[test]
fn damaged_safetensors_are_refused_before_a_store_exists() {
    let lab = Lab::new();
    let source = checkpoint(&lab, FAMILIES[1]);
    let file = format!("{source}/model.safetensors");
    let good = fs::read(&file).unwrap();
    let named = ["model.safetensors"];
    for len in [0, 7, 8, 100, good.len() / 2, good.len() - 1] {
        with_file(&file, &good[..len], || import_refused(&lab, &source, 2, &named));
    }
    let mut corrupt = good.clone();
    corrupt[9..20].fill(b'x');
    with_file(&file, &corrupt, || import_refused(&lab, &source, 2, &named));
    let mut huge = good.clone();
    huge[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    with_file(&file, &huge, || import_refused(&lab, &source, 2, &named));
    fs::remove_file(&file).unwrap();
    import_refused(&lab, &source, 2, &[&source, "safetensors"]);
}

/// Tensors by name, as shape and bytes.
type Tensors = BTreeMap<String, (Vec<usize>, Vec<u8>)>;

fn change_tensors(file: &str, change: impl FnOnce(&mut Tensors)) -> Vec<u8> {
    let bytes = fs::read(file).unwrap();
    let read = SafeTensors::deserialize(&bytes).unwrap();
    let owned = |(name, view): (&str, TensorView<'_>)| {
        (name.to_owned(), (view.shape().to_vec(), view.data().to_vec()))
    };
    let mut tensors: Tensors = read.iter().map(owned).collect();
    change(&mut tensors);
    let views = tensors.iter().map(|(name, (shape, data))| {
        (name.clone(), TensorView::new(safetensors::Dtype::F32, shape.clone(), data).unwrap())
    });
    safetensors::serialize(views.collect::<Vec<_>>(), None).unwrap()
}

#[test]
fn wrong_tensors_are_refused_by_name() {
    let lab = Lab::new();
    let source = checkpoint(&lab, FAMILIES[1]);
    let file = format!("{source}/model.safetensors");
    let refused = |words: &[&str], change: &dyn Fn(&mut Tensors)| {
        let bytes = change_tensors(&file, change);
        with_file(&file, &bytes, || import_refused(&lab, &source, 2, words));
    };
    refused(&[QUERY, "lacks"], &|t| drop(t.remove(QUERY)));
    refused(&[QUERY, "shape", "[8, 32]"], &|t| t.get_mut(QUERY).unwrap().0 = vec![8, 32]);
    refused(&[QUERY, "NaN"], &|t| {
        t.get_mut(QUERY).unwrap().1[8..12].copy_from_slice(&f32::NAN.to_le_bytes());
    });
    refused(&["model.more"], &|t| drop(t.insert("model.more".into(), (vec![1], vec![0; 4]))));
}

#[test]
fn incomplete_or_unsupported_models_are_refused_by_name() {
    let lab = Lab::new();
    import_refused(&lab, &lab.path("nowhere"), 2, &["nowhere"]);
    let source = checkpoint(&lab, FAMILIES[1]);
    let config_file = format!("{source}/config.json");
    let config = fs::read_to_string(&config_file).unwrap();
    let with = |text: &str, words: &[&str]| {
        with_file(&config_file, text.as_bytes(), || import_refused(&lab, &source, 2, words));
    };
    with("{", &["config.json"]);
    with(&config.replace("\"llama\"", "\"gpt2\""), &["config.json", "gpt2"]);
    with(&config.replacen('{', "{\"num_local_experts\": 4,", 1), &["config.json", "experts"]);
    with(&config.replace("\"hidden_size\": 16", "\"hidden_size\": 0"), &["hidden_size"]);
    with(&config.replacen('{', "{\"quantization_config\": {\"bits\": 4},", 1), &["quant"]);
    let tokenizer = format!("{source}/tokenizer.json");
    fs::remove_file(&tokenizer).unwrap();
    import_refused(&lab, &source, 2, &["tokenizer.json"]);
}

#[test]
fn a_tokenizer_that_training_could_not_load_is_refused_at_import() {
    let lab = Lab::new();
    let source = checkpoint(&lab, FAMILIES[1]);
    let file = |name: &str| format!("{source}/{name}");
    let named = ["tokenizer.json"];
    let bpe = |model: &str| format!(r#"{{"version":"1.0","added_tokens":[],"model":{model}}}"#);
    let unknown_merge = r#"{"type":"BPE","vocab":{"a":0},"merges":[["a","b"]]}"#;
    let dropout = r#"{"type":"BPE","dropout":0.5,"vocab":{"a":0},"merges":[]}"#;
    for text in ["[1, 2", "{}", r#"{"model": 1}"#, &bpe(unknown_merge), &bpe(dropout)] {
        with_file(&file(named[0]), text.as_bytes(), || import_refused(&lab, &source, 2, &named));
    }
    let config = r#"{"eos_token": "<|nowhere|>"}"#;
    with_file(&file("tokenizer_config.json"), config.as_bytes(), || {
        import_refused(&lab, &source, 2, &["tokenizer_config.json", "<|nowhere|>"]);
    });
    ftactor(&["import", &source, "--store", &lab.path("store-2")]).expect(0);
}

#[test]
fn a_pipe_in_the_place_of_a_model_s_file_is_refused_and_not_waited_for() {
    let lab = Lab::new();
    let source = checkpoint(&lab, FAMILIES[1]);
    let dest = lab.path("refused");
    let names = [
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "vocab.json",
        "model.safetensors",
    ];
    for name in names {
        let (file, aside) = (format!("{source}/{name}"), lab.path("aside"));
        let was_there = fs::rename(&file, &aside).is_ok();
        make_pipe(&file);
        let ran = soon(&["import", &source, "--store", &dest]).expect(2);
        ran.says(&[name, "not a regular file"]);
        fs::remove_file(&file).unwrap();
        if was_there {
            fs::rename(&aside, &file).unwrap();
        }
    }
    let gguf = lab.path("model.gguf");
    make_pipe(&gguf);
    soon(&["import", &gguf, "--store", &dest])
        .expect(2)
        .says(&["model.gguf", "not a regular file"]);
    let index = format!("{source}/model.safetensors.index.json");
    fs::write(&index, format!(r#"{{"weight_map":{{"{QUERY}":"shard.safetensors"}}}}"#)).unwrap();
    make_pipe(&format!("{source}/shard.safetensors"));
    let ran = soon(&["import", &source, "--store", &dest]).expect(2);
    ran.says(&["shard.safetensors", "not a regular file"]);
    assert!(!Path::new(&dest).exists());
    fs::remove_file(&index).unwrap();
    ftactor(&["import", &source, "--store", &dest]).expect(0);
}

#[test]
fn a_missing_shard_is_named() {
    let lab = Lab::new();
    let source = checkpoint(&lab, FAMILIES[1]);
    let index = format!(
        r#"{{"metadata":{{}},"weight_map":{{"{QUERY}":"model-00002-of-00002.safetensors"}}}}"#
    );
    fs::write(format!("{source}/model.safetensors.index.json"), index).unwrap();
    fs::remove_file(format!("{source}/model.safetensors")).unwrap();
    import_refused(&lab, &source, 2, &["model-00002-of-00002.safetensors"]);
}

#[test]
fn damaged_gguf_files_are_refused() {
    let lab = Lab::new();
    let mut claims = b"GGUF".to_vec();
    claims.extend(3u32.to_le_bytes());
    claims.extend(u64::MAX.to_le_bytes());
    claims.extend(u64::MAX.to_le_bytes());
    let empty = [b"GGUF\x03\x00\x00\x00".as_slice(), &[0; 16]].concat();
    for (name, bytes) in [
        ("none.gguf", Vec::new()),
        ("short.gguf", b"GGUF\x03".to_vec()),
        ("magic.gguf", b"GGML\x03\x00\x00\x00".repeat(8)),
        ("claims.gguf", claims),
        ("empty.gguf", empty),
    ] {
        let file = lab.write(name, bytes);
        import_refused(&lab, &file, 2, &[name]);
    }
}

#[test]
fn init_refuses_what_cannot_be_and_never_overwrites() {
    let lab = Lab::new();
    let config = lab.write("config.json", FAMILIES[0].config());
    let dest = lab.path("new");
    let init = |config: &str, more: &[&str]| {
        ftactor(&[&["init", "--config", config, "--store", &dest], more].concat())
    };
    init(&lab.path("no.json"), &[]).expect(2).says(&["no.json"]);
    init(&config, &["--tokenizer", &lab.path("nothing")]).expect(2).says(&["nothing"]);
    let small = lab.write("small.json", FAMILIES[0].config().replace("259", "100"));
    init(&small, &[]).expect(2).says(&["vocab_size", "100"]);
    let missing = lab.write("missing.json", r#"{"model_type":"llama"}"#);
    init(&missing, &[]).expect(2).says(&["hidden_size"]);
    assert!(!Path::new(&dest).exists());
    let store = lab.store("store", FAMILIES[0], 1);
    let before = contents(&store);
    ftactor(&["init", "--config", &config, "--store", &store]).expect(2).says(&[&store]);
    let source = lab.path("hf");
    ftactor(&["export", "--store", &store, "--out", &source]).expect(0);
    ftactor(&["import", &source, "--store", &store]).expect(2).says(&[&store]);
    ftactor(&["export", "--store", &store, "--out", &source]).expect(2).says(&[&source]);
    assert_eq!(contents(&store), before);
}
