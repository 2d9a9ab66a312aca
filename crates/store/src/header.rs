//! The safetensors header of a state file, padded so that data starts at a multiple of 4096.
//!
//! Format: <https://github.com/huggingface/safetensors#format>: a little-endian u64 header length,
//! that many bytes of JSON (trailing spaces allowed), then the data without holes.

use std::collections::BTreeMap;

use model::{LayerSpec, PAGE_BYTES, PlaneSpec};
use serde::{Deserialize, Serialize};

/// safetensors' own limit of a header.
const HEADER_BYTES_MAX: u64 = 100_000_000;
const LENGTH_BYTES: usize = 8;

#[derive(Serialize, Deserialize, PartialEq, Debug)]
struct Entry {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: [u64; 2],
}

/// The first bytes of a state file of `layer`, length field and padding included.
pub(crate) fn encode(layer: &LayerSpec, plane: &PlaneSpec) -> Vec<u8> {
    let mut json = String::from(r#"{"__metadata__":{"format":"pt"}"#);
    for (name, entry) in entries(layer, plane) {
        let (name, entry) = (serde_json::json!(name), serde_json::json!(entry));
        json.push_str(&format!(",{name}:{entry}"));
    }
    json.push('}');
    let total = (LENGTH_BYTES + json.len()).next_multiple_of(PAGE_BYTES);
    let mut header = ((total - LENGTH_BYTES) as u64).to_le_bytes().to_vec();
    header.extend(json.into_bytes());
    header.resize(total, b' ');
    header
}

/// Offset of the data in a file whose first 8 bytes are `length`; the `Err` says what is wrong.
pub(crate) fn data_start(length: &[u8; LENGTH_BYTES], file_bytes: u64) -> Result<u64, String> {
    let header_bytes = u64::from_le_bytes(*length);
    if header_bytes > HEADER_BYTES_MAX || header_bytes > file_bytes {
        return Err(format!("its header claims {header_bytes} bytes"));
    }
    let start = header_bytes + LENGTH_BYTES as u64;
    if !start.is_multiple_of(PAGE_BYTES as u64) {
        return Err(format!("its data starts at {start}, not at a multiple of {PAGE_BYTES}"));
    }
    Ok(start)
}

/// Checks the JSON of a header against the layer it must describe.
pub(crate) fn check(json: &[u8], layer: &LayerSpec, plane: &PlaneSpec) -> Result<(), String> {
    let mut found: BTreeMap<String, serde_json::Value> =
        serde_json::from_slice(json).map_err(|e| format!("its header is not JSON: {e}"))?;
    found.remove("__metadata__");
    for (name, expected) in entries(layer, plane) {
        let entry = found.remove(name).ok_or_else(|| format!("its header lacks `{name}`"))?;
        let entry: Entry = serde_json::from_value(entry)
            .map_err(|e| format!("its header describes `{name}` wrongly: {e}"))?;
        if entry != expected {
            return Err(format!("its header has `{name}` as {entry:?}, expected {expected:?}"));
        }
    }
    match found.keys().next() {
        Some(extra) => Err(format!("its header has an unexpected tensor `{extra}`")),
        None => Ok(()),
    }
}

/// Name of the one tensor of a plane whose values stand for blocks of the layer's parameters.
const BLOCKS: &str = "blocks";

fn entries<'l>(layer: &'l LayerSpec, plane: &PlaneSpec) -> Vec<(&'l str, Entry)> {
    let entry = |shape: Vec<usize>, start: usize, end: usize| {
        let data_offsets = [start as u64, end as u64];
        Entry { dtype: plane.dtype.name().to_owned(), shape, data_offsets }
    };
    if plane.block > 1 {
        let elements = layer.elements();
        let shape = vec![elements.div_ceil(plane.block)];
        return vec![(BLOCKS, entry(shape, 0, plane.bytes(elements)))];
    }
    let of_tensor = |tensor: &'l model::TensorSpec| {
        let bytes = plane.range(tensor.range());
        (tensor.name.as_str(), entry(tensor.shape.clone(), bytes.start, bytes.end))
    };
    layer.tensors.iter().map(of_tensor).collect()
}

#[cfg(test)]
mod tests;
