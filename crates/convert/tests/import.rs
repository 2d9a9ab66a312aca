//! Import of Hugging Face directories written by the `safetensors` crate.

#![allow(clippy::unwrap_used)]

mod support;

use std::fs;

use safetensors::tensor::Dtype;
use support::*;
use tempfile::tempdir;

const TIED: &str = r#","tie_word_embeddings":true"#;

fn assert_values(store: &store::ReadingStore) {
    let weights = weights(store);
    for (i, spec) in tensors(store.table()).enumerate() {
        let expected: Vec<f32> = (0..spec.elements()).map(|e| value(i, e)).collect();
        assert_eq!(weights[&spec.name], expected, "{}", spec.name);
    }
}

#[test]
fn every_type_becomes_the_same_float32() {
    let mut all = Vec::new();
    for dtype in [Dtype::F32, Dtype::BF16, Dtype::F16] {
        let dir = tempdir().unwrap();
        Checkpoint::new(config(""), dtype).write(dir.path());
        let (report, store) = import(dir.path());
        assert_eq!((report.layers, report.ignored.len()), (4, 0));
        assert_values(&store);
        all.push(hashes(&store));
    }
    assert!(all.iter().all(|h| *h == all[0]));
}

#[test]
fn sharded_checkpoints_equal_single_ones() {
    let checkpoint = Checkpoint::new(config(TIED), Dtype::BF16);
    for shards in [1, 2, 5] {
        let dir = tempdir().unwrap();
        checkpoint.write_sharded(dir.path(), shards);
        assert_values(&import(dir.path()).1);
    }
}

#[test]
fn a_store_can_be_imported_itself() {
    let dir = tempdir().unwrap();
    Checkpoint::new(config(""), Dtype::F16).write(&dir.path().join("src"));
    let io = || store::mmap_engine(1, true);
    let first = dir.path().join("store");
    convert::import_hf(
        &dir.path().join("src"),
        &convert::Destination::new(io(), &first),
        &mut |_, _| {},
    )
    .unwrap();
    assert_values(&import(&first).1);
}

#[test]
fn the_config_becomes_float32_and_keeps_every_other_value() {
    let dir = tempdir().unwrap();
    Checkpoint::new(config(r#","dtype":"bfloat16""#), Dtype::F32).write(dir.path());
    let (_, store) = import(dir.path());
    let expected = config(r#","dtype":"float32""#).replace("\"bfloat16\"", "\"float32\"");
    let parse = |t: &str| serde_json::from_str::<serde_json::Value>(t).unwrap();
    assert_eq!(parse(store.config_json()), parse(&expected));
    assert!(store.config_json().contains("9.999999747378752e-06"));
    assert_eq!(store.read_file("merges.txt").unwrap(), b"a b");
    assert_eq!(store.read_file("tokenizer.json").unwrap(), br#"{"version":"1.0"}"#);
}

#[test]
fn names_of_a_base_model_are_accepted() {
    let dir = tempdir().unwrap();
    let mut checkpoint = Checkpoint::new(config(TIED), Dtype::F32);
    let bare = |name: String| name.trim_start_matches("model.").to_string();
    checkpoint.tensors = checkpoint.tensors.into_iter().map(|(n, t)| (bare(n), t)).collect();
    checkpoint.write(dir.path());
    assert_values(&import(dir.path()).1);
}

#[test]
fn redundant_tensors_are_ignored_by_name() {
    let dir = tempdir().unwrap();
    let mut checkpoint = Checkpoint::new(config(TIED), Dtype::BF16);
    let embedding = checkpoint.tensors["model.embed_tokens.weight"].clone();
    checkpoint.tensors.insert("lm_head.weight".into(), embedding);
    let name = "model.layers.0.self_attn.rotary_emb.inv_freq";
    checkpoint.tensors.insert(name.into(), (Dtype::F32, vec![2], vec![0; 8]));
    checkpoint.write(dir.path());
    let (report, store) = import(dir.path());
    assert_eq!(report.ignored, ["lm_head.weight", name]);
    assert_values(&store);
    let projection = checkpoint.tensors.get_mut("lm_head.weight").unwrap();
    projection.2[2 * 4321] ^= 1;
    checkpoint.write(dir.path());
    let error = refused(dir.path());
    assert!(error.contains("element 4321") && error.contains("tie_word_embeddings"), "{error}");
}

#[test]
fn wrong_tensors_are_refused_by_name() {
    let query = "model.layers.1.self_attn.q_proj.weight";
    let good = Checkpoint::new(config(""), Dtype::F32);
    let check = |named: &[&str], change: &dyn Fn(&mut Checkpoint)| {
        let dir = tempdir().unwrap();
        let mut wrong = good.clone();
        change(&mut wrong);
        wrong.write(dir.path());
        let error = refused(dir.path());
        assert!(named.iter().all(|n| error.contains(n)), "{named:?}: {error}");
    };
    check(&["lacks", query], &|c| drop(c.tensors.remove(query)));
    check(&["lacks", "lm_head.weight"], &|c| drop(c.tensors.remove("lm_head.weight")));
    check(&["shape", query, "[8, 32]"], &|c| c.tensors.get_mut(query).unwrap().1 = vec![8, 32]);
    check(&["I32", query], &|c| c.tensors.get_mut(query).unwrap().0 = Dtype::I32);
    check(&["model.extra", "not ask"], &|c| {
        c.tensors.insert("model.extra".into(), (Dtype::F32, vec![1], vec![0; 4]));
    });
    for (bad, text) in [(f32::NAN, "NaN"), (f32::NEG_INFINITY, "-inf")] {
        check(&[query, text, "element 77"], &|c| {
            let bytes = &mut c.tensors.get_mut(query).unwrap().2;
            bytes[77 * 4..78 * 4].copy_from_slice(&bad.to_le_bytes());
        });
    }
    check(&["mixture"], &|c| c.config = config(r#","num_local_experts":8"#));
    check(&["layers"], &|c| c.config = c.config.replace("layers\":2", "layers\":9999999"));
}

#[test]
fn missing_files_are_named_with_the_remedy() {
    let dir = tempdir().unwrap();
    assert!(refused(dir.path()).contains("config.json"));
    let checkpoint = Checkpoint::new(config(""), Dtype::F32);
    checkpoint.write_sharded(dir.path(), 3);
    fs::remove_file(dir.path().join("tokenizer.json")).unwrap();
    assert!(refused(dir.path()).contains("AutoTokenizer"));
    fs::write(dir.path().join("tokenizer.json"), "[]").unwrap();
    assert!(refused(dir.path()).contains("tokenizer.json"));
    fs::write(dir.path().join("tokenizer.json"), "{}").unwrap();
    fs::remove_file(dir.path().join("model-1.safetensors")).unwrap();
    assert!(refused(dir.path()).contains("model-1.safetensors"));
    fs::remove_file(dir.path().join("model.safetensors.index.json")).unwrap();
    assert!(refused(dir.path()).contains("neither"));
}

#[test]
fn a_file_cut_anywhere_is_refused() {
    let dir = tempdir().unwrap();
    Checkpoint::new(config(TIED), Dtype::BF16).write(dir.path());
    let path = dir.path().join("model.safetensors");
    let bytes = fs::read(&path).unwrap();
    for len in (0..bytes.len()).step_by(97).chain([7, 8, 9, bytes.len() - 1]) {
        fs::write(&path, &bytes[..len]).unwrap();
        assert!(refused(dir.path()).contains("model.safetensors"), "{len}");
    }
    let mut long = bytes.clone();
    long.push(0);
    fs::write(&path, long).unwrap();
    assert!(refused(dir.path()).contains("bytes of data"));
}

#[test]
fn an_index_that_lies_is_refused() {
    let dir = tempdir().unwrap();
    Checkpoint::new(config(""), Dtype::F32).write_sharded(dir.path(), 2);
    let path = dir.path().join("model.safetensors.index.json");
    let text = fs::read_to_string(&path).unwrap();
    let swapped = text.replacen("model-0", "model-1", 1);
    fs::write(&path, swapped).unwrap();
    assert!(refused(dir.path()).contains("which the index puts there"));
    fs::write(&path, &text[..text.len() / 2]).unwrap();
    assert!(refused(dir.path()).contains("not valid"));
}

#[test]
fn an_existing_store_is_not_overwritten() {
    let dir = tempdir().unwrap();
    Checkpoint::new(config(""), Dtype::F32).write(dir.path());
    let io = store::memory_engine();
    convert::import_hf(dir.path(), &convert::Destination::new(io.clone(), dest()), &mut |_, _| {})
        .unwrap();
    let before = hashes(&open(io.clone()));
    let error = convert::import_hf(
        dir.path(),
        &convert::Destination::new(io.clone(), dest()),
        &mut |_, _| {},
    )
    .unwrap_err();
    assert_eq!(error.kind(), convert::ErrorKind::Invalid);
    assert_eq!(hashes(&open(io)), before);
}

#[test]
fn progress_ends_at_the_total() {
    let dir = tempdir().unwrap();
    Checkpoint::new(config(""), Dtype::F32).write(dir.path());
    let mut seen = Vec::new();
    let note = &mut |done, total| seen.push((done, total));
    let report = convert::import_hf(
        dir.path(),
        &convert::Destination::new(store::memory_engine(), dest()),
        note,
    )
    .unwrap();
    let total = report.parameters * 4;
    assert_eq!((seen.first(), seen.last()), (Some(&(0, total)), Some(&(total, total))));
    assert!(seen.is_sorted());
}

#[test]
fn a_source_that_is_a_file_or_nothing_is_refused() {
    let dir = tempdir().unwrap();
    let file = dir.path().join("model.bin");
    fs::write(&file, "x").unwrap();
    for source in [file.clone(), file.join("below"), dir.path().join("none")] {
        let error = refused(&source);
        assert!(error.contains("a Hugging Face directory or a .gguf file"), "{error}");
    }
    for source in [file.join("below.gguf"), dir.path().join("none.gguf"), dir.path().into()] {
        let io = store::memory_engine();
        let made = convert::import_gguf(
            &source,
            &convert::Destination::new(io.clone(), dest()),
            &mut |_, _| {},
        );
        let error = made.unwrap_err();
        assert_clean(&*io, &error);
        assert!(error.to_string().contains("a Hugging Face directory or a .gguf file"), "{error}");
    }
}
