//! Which tensors go into which file of an exported checkpoint, and the files' headers.

use std::collections::BTreeMap;

use model::{LayerId, LayerTable, TensorSpec};
use serde_json::{Value, json};

use crate::Dtype;
use crate::hf::SINGLE;

/// Most bytes of weights in one file; a larger tensor has a file of its own.
pub(crate) const SHARD_LIMIT_BYTES: u64 = 5_000_000_000;

/// One file of weights.
#[derive(Debug)]
pub(crate) struct Shard {
    pub(crate) name: String,
    pub(crate) tensors: Vec<(LayerId, TensorSpec)>,
    dtype: Dtype,
}

impl Shard {
    /// Bytes of the tensors.
    pub(crate) fn weight_bytes(&self) -> u64 {
        self.tensors.iter().map(|(_, spec)| bytes(spec, self.dtype)).sum()
    }

    /// The safetensors header with its length in front, padded to a multiple of 8.
    pub(crate) fn header(&self) -> Vec<u8> {
        let mut map = serde_json::Map::new();
        map.insert("__metadata__".into(), json!({"format": "pt"}));
        let mut start = 0;
        for (_, spec) in &self.tensors {
            let end = start + bytes(spec, self.dtype);
            let (dtype, shape) = (self.dtype.name(), &spec.shape);
            let entry = json!({"dtype": dtype, "shape": shape, "data_offsets": [start, end]});
            map.insert(spec.name.clone(), entry);
            start = end;
        }
        let mut text = Value::Object(map).to_string();
        text.push_str(&" ".repeat(text.len().next_multiple_of(8) - text.len()));
        let mut header = (text.len() as u64).to_le_bytes().to_vec();
        header.extend_from_slice(text.as_bytes());
        header
    }
}

/// The files of a model, filled in the layers' order.
pub(crate) fn shards(table: &LayerTable, dtype: Dtype, limit_bytes: u64) -> Vec<Shard> {
    let mut groups: Vec<Vec<(LayerId, TensorSpec)>> = vec![Vec::new()];
    let mut group_bytes = 0;
    for layer in table.layers() {
        for spec in &layer.tensors {
            let tensor_bytes = bytes(spec, dtype);
            if group_bytes > 0 && group_bytes + tensor_bytes > limit_bytes {
                groups.push(Vec::new());
                group_bytes = 0;
            }
            group_bytes += tensor_bytes;
            let last = groups.len() - 1;
            groups[last].push((layer.id, spec.clone()));
        }
    }
    let count = groups.len();
    let name = |i: usize| match count {
        1 => SINGLE.into(),
        _ => format!("model-{:05}-of-{count:05}.safetensors", i + 1),
    };
    groups
        .into_iter()
        .enumerate()
        .map(|(i, tensors)| Shard { name: name(i), tensors, dtype })
        .collect()
}

/// The text of `model.safetensors.index.json`.
pub(crate) fn index(table: &LayerTable, shards: &[Shard]) -> String {
    let total_bytes: u64 = shards.iter().map(Shard::weight_bytes).sum();
    let map: BTreeMap<&str, &str> = shards
        .iter()
        .flat_map(|s| s.tensors.iter().map(|(_, t)| (t.name.as_str(), s.name.as_str())))
        .collect();
    let metadata = json!({"total_size": total_bytes, "total_parameters": table.elements()});
    format!("{:#}\n", json!({"metadata": metadata, "weight_map": map}))
}

fn bytes(spec: &TensorSpec, dtype: Dtype) -> u64 {
    spec.elements() as u64 * dtype.element_bytes() as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use model::ModelConfig;

    #[test]
    fn files_hold_every_tensor_once_and_stay_within_the_limit() {
        let config = ModelConfig::from_json(
            r#"{"model_type":"llama","vocab_size":256,"hidden_size":64,"intermediate_size":128,
                "num_hidden_layers":3,"num_attention_heads":4}"#,
        );
        let table = LayerTable::new(&config.unwrap());
        let all: usize = table.layers().iter().map(|l| l.tensors.len()).sum();
        for limit in [1, 40_000, 100_000, u64::MAX] {
            let shards = shards(&table, Dtype::F32, limit);
            assert_eq!(shards.iter().map(|s| s.tensors.len()).sum::<usize>(), all);
            for shard in &shards {
                assert!(shard.weight_bytes() <= limit || shard.tensors.len() == 1);
                assert_eq!(shard.header().len() % 8, 0);
            }
            let index = index(&table, &shards);
            assert_eq!(index.matches(".safetensors").count(), all);
        }
        assert_eq!(shards(&table, Dtype::BF16, u64::MAX)[0].name, "model.safetensors");
        assert_eq!(shards(&table, Dtype::BF16, 1)[0].name, "model-00001-of-00030.safetensors");
    }
}
