//! Exports in more than one file.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use super::*;
use crate::{Destination, Init, InitTokenizer, import_hf, init};

const CONFIG: &str = r#"{"model_type":"llama","vocab_size":64,"hidden_size":16,
    "intermediate_size":24,"num_hidden_layers":2,"num_attention_heads":4}"#;

#[test]
fn shards_come_back_as_the_same_store() {
    let (a, b) = (Path::new("/a"), Path::new("/b"));
    let io = store::memory_engine();
    let tokenizer = InitTokenizer::Files(vec![("tokenizer.json".into(), b"{}".to_vec())]);
    let what = Init { config_json: CONFIG, tokenizer, tokenizer_vocab: 64, seed: 2 };
    init(&what, &Destination::new(Arc::clone(&io), a), &mut |_, _| {}).unwrap();
    let store = ReadingStore::open(Arc::clone(&io), a, Duration::ZERO).unwrap();
    let out = tempfile::tempdir().unwrap();
    let mut last = (0, 0);
    let note = &mut |done, total| last = (done, total);
    let exported = export_sharded(&store, out.path(), Dtype::F32, 6_000, note).unwrap();
    assert!(exported.files.len() > 3);
    assert_eq!(last, (exported.weight_bytes, exported.weight_bytes));
    import_hf(out.path(), &Destination::new(Arc::clone(&io), b), &mut |_, _| {}).unwrap();
    let back = ReadingStore::open(io, b, Duration::ZERO).unwrap();
    for layer in store.table().layers() {
        assert_eq!(store.layer_hash(layer.id), back.layer_hash(layer.id));
    }
}

#[test]
fn a_disk_too_small_is_an_error_with_the_number() {
    let dir = tempfile::tempdir().unwrap();
    let error = check_space(dir.path(), u64::MAX).unwrap_err();
    assert_eq!(error.kind(), crate::ErrorKind::Space);
    assert!(error.to_string().contains(&store::show_bytes(u64::MAX)), "{error}");
}
