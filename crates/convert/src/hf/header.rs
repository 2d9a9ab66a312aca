//! The header of a safetensors file, and the index of a sharded checkpoint.
//!
//! Invariants:
//! - every returned range lies inside the file, overlaps no other, and is exactly as long as its
//!   shape and element type say; together they leave no hole;
//! - nothing is allocated by a number from the file before it was compared with what is there.
//!
//! Format: <https://github.com/huggingface/safetensors>, "Format".

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Component, Path};

use serde::Deserialize;
use serde_json::value::RawValue;

use crate::json::Object;

/// Most bytes of a header; the largest models' are below 12 MiB.
pub(crate) const HEADER_LIMIT_BYTES: u64 = 32 << 20;

/// A tensor of a safetensors file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    /// Element type as the header spells it.
    pub(crate) dtype: String,
    pub(crate) shape: Vec<usize>,
    /// Bytes of the tensor, counted from the first byte behind the header.
    pub(crate) bytes: Range<u64>,
}

#[derive(Deserialize)]
struct RawEntry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

#[derive(Deserialize)]
struct RawIndex {
    weight_map: Object<String>,
}

/// Length of the header from a file's first 8 bytes; the `Err` says what is wrong.
pub(crate) fn header_bytes(prefix: [u8; 8], file_bytes: u64) -> Result<u64, String> {
    let header = u64::from_le_bytes(prefix);
    if header > HEADER_LIMIT_BYTES {
        return Err(format!("claims a header of {header} bytes, so it is no safetensors file"));
    }
    if header + 8 > file_bytes {
        return Err(format!("ends inside its header: {file_bytes} bytes, header {header}"));
    }
    Ok(header)
}

/// The tensors of a header in front of `data_bytes` bytes of data.
pub(crate) fn parse_header(
    header: &[u8],
    data_bytes: u64,
) -> Result<BTreeMap<String, Entry>, String> {
    let Object(members) = serde_json::from_slice::<Object<&RawValue>>(header)
        .map_err(|e| format!("has a header that is not valid JSON: {e}"))?;
    let mut entries = BTreeMap::new();
    for (name, raw) in members {
        if name != "__metadata__" {
            let entry = entry(raw.get()).map_err(|what| format!("has tensor `{name}` {what}"))?;
            entries.insert(name, entry);
        }
    }
    check_layout(&entries, data_bytes)?;
    Ok(entries)
}

/// The file of every tensor, from the text of a `model.safetensors.index.json`.
pub(crate) fn parse_index(text: &str) -> Result<BTreeMap<String, String>, String> {
    let index: RawIndex = serde_json::from_str(text).map_err(|e| format!("is not valid: {e}"))?;
    let map: BTreeMap<String, String> = index.weight_map.0.into_iter().collect();
    match map.values().find(|file| !stays_inside(file)) {
        Some(file) => Err(format!("points to `{file}`, outside of its own directory")),
        None => Ok(map),
    }
}

fn stays_inside(file: &str) -> bool {
    let path = Path::new(file);
    !file.is_empty() && path.components().all(|part| matches!(part, Component::Normal(_)))
}

fn entry(text: &str) -> Result<Entry, String> {
    let raw: RawEntry = serde_json::from_str(text).map_err(|e| format!("malformed: {e}"))?;
    let (start, end) = raw.data_offsets;
    let bits = dtype_bits(&raw.dtype)
        .ok_or_else(|| format!("of the unknown element type `{}`", raw.dtype))?;
    let elements = raw.shape.iter().try_fold(1u64, |n, &d| n.checked_mul(d));
    let bytes = elements.and_then(|n| n.checked_mul(bits)).filter(|b| b.is_multiple_of(8));
    if bytes.is_none() || end.checked_sub(start) != bytes.map(|b| b / 8) {
        return Err(format!(
            "of shape {:?} and type {} in bytes {start}..{end}, which do not match",
            raw.shape, raw.dtype
        ));
    }
    let shape = raw.shape.iter().map(|&d| usize::try_from(d)).collect::<Result<_, _>>();
    let shape = shape.map_err(|_| "of a shape beyond the address space".to_string())?;
    Ok(Entry { dtype: raw.dtype, shape, bytes: start..end })
}

fn check_layout(entries: &BTreeMap<String, Entry>, data_bytes: u64) -> Result<(), String> {
    let mut ordered: Vec<_> = entries.iter().collect();
    ordered.sort_by_key(|(_, entry)| (entry.bytes.start, entry.bytes.end));
    let mut end = 0;
    for (name, entry) in ordered {
        if entry.bytes.start != end {
            let kind = if entry.bytes.start < end { "overlaps" } else { "leaves a hole behind" };
            return Err(format!("has tensor `{name}`, which {kind} the tensor before it"));
        }
        end = entry.bytes.end;
    }
    if end != data_bytes {
        return Err(format!("should have {end} bytes of data but has {data_bytes}"));
    }
    Ok(())
}

fn dtype_bits(name: &str) -> Option<u64> {
    Some(match name {
        "BOOL" | "U8" | "I8" | "F8_E5M2" | "F8_E4M3" | "F8_E8M0" | "F8_E4M3FNUZ"
        | "F8_E5M2FNUZ" => 8,
        "I16" | "U16" | "F16" | "BF16" => 16,
        "I32" | "U32" | "F32" => 32,
        "I64" | "U64" | "F64" | "C64" => 64,
        "F4" => 4,
        "F6_E2M3" | "F6_E3M2" => 6,
        _ => return None,
    })
}

#[cfg(test)]
mod tests;
