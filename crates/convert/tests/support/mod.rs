//! Small checkpoints on disk, and what a store holds.
#![allow(clippy::unwrap_used, dead_code, unreachable_pub)]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use convert::{ConvertError, Destination, ErrorKind, Report, import_hf};
use half::{bf16, f16};
use model::{LayerTable, ModelConfig, Precision, TensorSpec};
use safetensors::tensor::{Dtype, TensorView};
use store::{Io, ReadingStore, memory_engine};

/// A tiny Llama, untied unless `extra` says otherwise.
pub fn config(extra: &str) -> String {
    format!(
        r#"{{"model_type":"llama","vocab_size":300,"hidden_size":16,"intermediate_size":24,
            "num_hidden_layers":2,"num_attention_heads":4,"num_key_value_heads":2,
            "rms_norm_eps":9.999999747378752e-06,"torch_dtype":"bfloat16"{extra}}}"#
    )
}

pub fn table(config: &str) -> LayerTable {
    LayerTable::new(&ModelConfig::from_json(config).unwrap())
}

pub fn tensors(table: &LayerTable) -> impl Iterator<Item = &TensorSpec> {
    table.layers().iter().flat_map(|layer| &layer.tensors)
}

/// A value that bf16 and f16 hold exactly, different for neighbouring tensors and elements.
pub fn value(tensor: usize, element: usize) -> f32 {
    ((tensor * 37 + element * 11) % 255) as f32 / 64.0 - 2.0
}

/// A checkpoint directory in the making: tensors by name, as (type, shape, bytes).
#[derive(Clone)]
pub struct Checkpoint {
    pub config: String,
    pub tensors: BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>,
}

impl Checkpoint {
    pub fn new(config: String, dtype: Dtype) -> Checkpoint {
        let table = table(&config);
        let tensor = |(i, spec): (usize, &TensorSpec)| {
            let values: Vec<f32> = (0..spec.elements()).map(|e| value(i, e)).collect();
            (spec.name.clone(), (dtype, spec.shape.clone(), encode(dtype, &values)))
        };
        let tensors = tensors(&table).enumerate().map(tensor).collect();
        Checkpoint { config, tensors }
    }

    pub fn write(&self, dir: &Path) {
        self.write_files(dir);
        save(dir.join("model.safetensors"), self.tensors.iter());
    }

    /// Writes the tensors alternately into `shards` files with an index.
    pub fn write_sharded(&self, dir: &Path, shards: usize) {
        self.write_files(dir);
        let name = |i: usize| format!("model-{i}.safetensors");
        for shard in 0..shards {
            let own = self.tensors.iter().enumerate().filter(|(i, _)| i % shards == shard);
            save(dir.join(name(shard)), own.map(|(_, tensor)| tensor));
        }
        let map: BTreeMap<_, _> =
            self.tensors.keys().enumerate().map(|(i, t)| (t, name(i % shards))).collect();
        let index = serde_json::json!({"metadata": {}, "weight_map": map});
        fs::write(dir.join("model.safetensors.index.json"), index.to_string()).unwrap();
    }

    fn write_files(&self, dir: &Path) {
        fs::create_dir_all(dir).unwrap();
        fs::write(dir.join("config.json"), &self.config).unwrap();
        fs::write(dir.join("tokenizer.json"), r#"{"version":"1.0"}"#).unwrap();
        fs::write(dir.join("merges.txt"), "a b").unwrap();
    }
}

fn save<'a>(
    path: PathBuf,
    tensors: impl Iterator<Item = (&'a String, &'a (Dtype, Vec<usize>, Vec<u8>))>,
) {
    let views = tensors.map(|(name, (dtype, shape, bytes))| {
        (name.clone(), TensorView::new(*dtype, shape.clone(), bytes).unwrap())
    });
    let bytes = safetensors::serialize(views.collect::<Vec<_>>(), None).unwrap();
    fs::write(path, bytes).unwrap();
}

pub fn encode(dtype: Dtype, values: &[f32]) -> Vec<u8> {
    match dtype {
        Dtype::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        Dtype::BF16 => values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect(),
        Dtype::F16 => values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect(),
        other => panic!("{other:?}"),
    }
}

/// Imports `src` into a disk in memory and opens the result.
pub fn import(src: &Path) -> (Report, ReadingStore) {
    let io = memory_engine();
    let report =
        import_hf(src, &Destination::new(Arc::clone(&io), dest()), &mut |_, _| {}).unwrap();
    (report, open(io))
}

/// The error of an import, after checking its kind and that nothing is left behind.
pub fn refused(src: &Path) -> String {
    let io = memory_engine();
    let error =
        import_hf(src, &Destination::new(Arc::clone(&io), dest()), &mut |_, _| {}).unwrap_err();
    assert_clean(&*io, &error);
    error.to_string()
}

pub fn assert_clean(io: &dyn Io, error: &ConvertError) {
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    assert!(!io.exists(dest()).unwrap(), "left behind after: {error}");
}

pub fn dest() -> &'static Path {
    Path::new("/models/store")
}

pub fn open(io: Arc<dyn Io>) -> ReadingStore {
    ReadingStore::open(io, dest(), Duration::ZERO).unwrap()
}

/// All weights by name.
pub fn weights(store: &ReadingStore) -> BTreeMap<String, Vec<f32>> {
    let mut all = BTreeMap::new();
    for layer in store.table().layers() {
        for spec in &layer.tensors {
            let read = store.read_weights_blocking(layer.id, spec.range(), Precision::Exact);
            let block = read.unwrap().into_f32();
            all.insert(spec.name.clone(), block.f32s().to_vec());
        }
    }
    all
}

pub fn hashes(store: &ReadingStore) -> Vec<u64> {
    store.table().layers().iter().map(|layer| store.layer_hash(layer.id)).collect()
}
