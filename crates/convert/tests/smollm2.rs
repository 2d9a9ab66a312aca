//! SmolLM2-135M from GGUF and from the Hugging Face directory that transformers made of it.
//!
//! Runs where `FTACTOR_SMOLLM2` names a directory with `smollm2-135m.Q4_1.gguf` and `hf/`, and
//! `FTACTOR_TEXT` a text file; passes with a message elsewhere.

use std::path::{Path, PathBuf};
use std::time::Duration;

use convert::{Destination, Report, import_gguf, import_hf};
use store::{ReadingStore, mmap_engine};
use tokenizers::Tokenizer;

const TEXT_BYTES: usize = 1 << 20;

fn sources() -> Option<(PathBuf, String)> {
    let dir = std::env::var_os("FTACTOR_SMOLLM2").map(PathBuf::from)?;
    let text = std::env::var_os("FTACTOR_TEXT").map(PathBuf::from)?;
    let mut text = std::fs::read_to_string(text).expect("FTACTOR_TEXT names a text file");
    let end = (0..=TEXT_BYTES.min(text.len())).rev().find(|&at| text.is_char_boundary(at));
    text.truncate(end.unwrap_or_default());
    Some((dir, text))
}

fn imported(
    work: &Path,
    name: &str,
    import: impl FnOnce(&Path) -> Result<Report, convert::ConvertError>,
) -> ReadingStore {
    let dest = work.join(name);
    let report = import(&dest).expect(name);
    assert_eq!((report.layers, report.parameters), (32, 134_515_008));
    ReadingStore::open(mmap_engine(2, true), &dest, Duration::ZERO).expect(name)
}

#[test]
fn gguf_and_hugging_face_imports_agree() {
    let Some((dir, text)) = sources() else {
        eprintln!("skipped: FTACTOR_SMOLLM2 and FTACTOR_TEXT are not set");
        return;
    };
    let work = tempfile::tempdir().unwrap();
    let io = || mmap_engine(2, true);
    let hf = imported(work.path(), "hf", |dest| {
        import_hf(&dir.join("hf"), &Destination::new(io(), dest), &mut |_, _| {})
    });
    let gguf = imported(work.path(), "gguf", |dest| {
        import_gguf(
            &dir.join("smollm2-135m.Q4_1.gguf"),
            &Destination::new(io(), dest),
            &mut |_, _| {},
        )
    });
    for layer in hf.table().layers() {
        assert_eq!(hf.layer_hash(layer.id), gguf.layer_hash(layer.id), "{}", layer.name);
    }
    let config = |store: &ReadingStore| model::ModelConfig::from_json(store.config_json()).unwrap();
    assert_eq!(config(&hf), config(&gguf));
    let tokenizer = |store: &ReadingStore| {
        Tokenizer::from_bytes(store.read_file("tokenizer.json").unwrap()).unwrap()
    };
    let ids = |store| tokenizer(store).encode(text.as_str(), true).unwrap().get_ids().to_vec();
    let (a, b) = (ids(&hf), ids(&gguf));
    assert!(a.len() > 1000, "only {} tokens", a.len());
    assert_eq!(a, b);
    let special = "<|im_start|>user\nHi  42 'twas<|im_end|>\n\n\t<jupyter_script> x";
    let ids = |store| tokenizer(store).encode(special, true).unwrap().get_ids().to_vec();
    assert_eq!(ids(&hf), ids(&gguf));
}
