//! The parser of GGUF files, versions 2 and 3.
//!
//! Invariants:
//! - no count or length of the file is trusted: each is compared with the bytes that are left
//!   before anything is allocated, and everything before the tensors' data is limited to
//!   [`HEADER_LIMIT_BYTES`];
//! - every tensor's bytes lie inside the file and overlap no other's.
//!
//! Format: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;

use super::quants::GgmlType;

/// Most bytes of metadata and tensor list together; the largest models' are below 32 MiB.
pub(crate) const HEADER_LIMIT_BYTES: u64 = 128 << 20;
/// Most elements of an array: sixteen times the largest vocabulary.
const ARRAY_LIMIT: u64 = 1 << 22;
const TENSOR_LIMIT: u64 = 1 << 18;
const DEFAULT_ALIGNMENT: u64 = 32;
const ALIGNMENT_LIMIT: u64 = 1 << 20;

/// A metadata value.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Value {
    Unsigned(u64),
    Signed(i64),
    Float(f64),
    Bool(bool),
    Text(String),
    Texts(Vec<String>),
    Floats(Vec<f64>),
    Integers(Vec<i64>),
}

/// A tensor as the file lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TensorInfo {
    pub(crate) kind: GgmlType,
    /// Row-major shape: the file's dimensions reversed.
    pub(crate) shape: Vec<usize>,
    /// First byte in the file.
    pub(crate) start: u64,
    pub(crate) len_bytes: u64,
}

/// Everything in front of the tensors' data.
#[derive(Clone, Debug)]
pub(crate) struct Header {
    pub(crate) metadata: BTreeMap<String, Value>,
    pub(crate) tensors: BTreeMap<String, TensorInfo>,
}

/// Parses the start of a file of `file_bytes` bytes. The `Err` says what is wrong with it.
pub(crate) fn parse(reader: impl Read, file_bytes: u64) -> Result<Header, String> {
    let mut input =
        Input { reader, read_bytes: 0, limit_bytes: file_bytes.min(HEADER_LIMIT_BYTES) };
    if input.array::<4>()? != *b"GGUF" {
        return Err("does not start with GGUF".into());
    }
    match u32::from_le_bytes(input.array()?) {
        2 | 3 => {}
        version if version.swap_bytes() <= 3 => return Err("is big-endian".into()),
        version => return Err(format!("is of the unknown version {version}")),
    }
    let tensors = input.count("tensors", 24, TENSOR_LIMIT)?;
    let pairs = input.count("metadata entries", 13, ARRAY_LIMIT)?;
    let metadata = metadata(&mut input, pairs)?;
    let alignment = alignment(&metadata)?;
    let infos = tensor_infos(&mut input, tensors)?;
    let data_start = input.read_bytes.next_multiple_of(alignment);
    Ok(Header { metadata, tensors: place(infos, data_start, alignment, file_bytes)? })
}

fn metadata<R: Read>(input: &mut Input<R>, pairs: u64) -> Result<BTreeMap<String, Value>, String> {
    let mut metadata = BTreeMap::new();
    for _ in 0..pairs {
        let key = input.text()?;
        let value = value(input).map_err(|what| format!("{what} (metadata `{key}`)"))?;
        if let Some(value) = value
            && metadata.insert(key.clone(), value).is_some()
        {
            return Err(format!("has metadata `{key}` twice"));
        }
    }
    Ok(metadata)
}

fn alignment(metadata: &BTreeMap<String, Value>) -> Result<u64, String> {
    match metadata.get("general.alignment") {
        None => Ok(DEFAULT_ALIGNMENT),
        Some(Value::Unsigned(a)) if a.is_power_of_two() && *a <= ALIGNMENT_LIMIT => Ok(*a),
        Some(other) => Err(format!("has the impossible alignment {other:?}")),
    }
}

/// Reads a typed value; `None` for an array of arrays, which no supported key has.
fn value<R: Read>(input: &mut Input<R>) -> Result<Option<Value>, String> {
    let kind = u32::from_le_bytes(input.array()?);
    if kind == ARRAY {
        return array(input, 0);
    }
    scalar(input, kind).map(Some)
}

const STRING: u32 = 8;
const ARRAY: u32 = 9;
const NESTING_LIMIT: usize = 3;

fn scalar<R: Read>(input: &mut Input<R>, kind: u32) -> Result<Value, String> {
    Ok(match kind {
        0 => Value::Unsigned(u8::from_le_bytes(input.array()?).into()),
        1 => Value::Signed(i8::from_le_bytes(input.array()?).into()),
        2 => Value::Unsigned(u16::from_le_bytes(input.array()?).into()),
        3 => Value::Signed(i16::from_le_bytes(input.array()?).into()),
        4 => Value::Unsigned(u32::from_le_bytes(input.array()?).into()),
        5 => Value::Signed(i32::from_le_bytes(input.array()?).into()),
        6 => Value::Float(f32::from_le_bytes(input.array()?).into()),
        7 => Value::Bool(u8::from_le_bytes(input.array()?) != 0),
        STRING => Value::Text(input.text()?),
        10 => Value::Unsigned(u64::from_le_bytes(input.array()?)),
        11 => Value::Signed(i64::from_le_bytes(input.array()?)),
        12 => Value::Float(f64::from_le_bytes(input.array()?)),
        _ => return Err(format!("has a value of the unknown type {kind}")),
    })
}

fn array<R: Read>(input: &mut Input<R>, depth: usize) -> Result<Option<Value>, String> {
    let kind = u32::from_le_bytes(input.array()?);
    let element_bytes = match kind {
        0 | 1 | 7 => 1,
        2 | 3 => 2,
        4..=6 => 4,
        STRING | 10..=12 => 8,
        ARRAY if depth < NESTING_LIMIT => 12,
        _ => return Err(format!("has an array of the unknown type {kind}")),
    };
    let count = input.count("array elements", element_bytes, ARRAY_LIMIT)?;
    match kind {
        ARRAY => {
            for _ in 0..count {
                array(input, depth + 1)?;
            }
            Ok(None)
        }
        STRING => {
            let texts = (0..count).map(|_| input.text()).collect::<Result<_, _>>()?;
            Ok(Some(Value::Texts(texts)))
        }
        6 | 12 => {
            let floats = (0..count).map(|_| Ok(scalar(input, kind)?.float().unwrap_or_default()));
            Ok(Some(Value::Floats(floats.collect::<Result<_, String>>()?)))
        }
        _ => {
            let integers =
                (0..count).map(|_| Ok(scalar(input, kind)?.integer().unwrap_or_default()));
            Ok(Some(Value::Integers(integers.collect::<Result<_, String>>()?)))
        }
    }
}

impl Value {
    /// The value as a number, if it is one.
    pub(crate) fn float(&self) -> Option<f64> {
        match self {
            Value::Float(f) => Some(*f),
            Value::Unsigned(n) => Some(*n as f64),
            Value::Signed(n) => Some(*n as f64),
            _ => None,
        }
    }

    /// The value as a whole number, if it is one and fits (a truth value counts as 0 or 1).
    pub(crate) fn integer(&self) -> Option<i64> {
        match self {
            Value::Unsigned(n) => i64::try_from(*n).ok(),
            Value::Signed(n) => Some(*n),
            Value::Bool(b) => Some((*b).into()),
            _ => None,
        }
    }
}

struct RawInfo {
    name: String,
    kind: GgmlType,
    shape: Vec<usize>,
    offset: u64,
    len_bytes: u64,
}

fn tensor_infos<R: Read>(input: &mut Input<R>, tensors: u64) -> Result<Vec<RawInfo>, String> {
    let mut infos = Vec::new();
    for _ in 0..tensors {
        let name = input.text()?;
        let info = tensor_info(input).map_err(|what| format!("has tensor `{name}` {what}"))?;
        let (kind, shape, offset, len_bytes) = info;
        infos.push(RawInfo { name, kind, shape, offset, len_bytes });
    }
    Ok(infos)
}

type Info = (GgmlType, Vec<usize>, u64, u64);

fn tensor_info<R: Read>(input: &mut Input<R>) -> Result<Info, String> {
    let dimensions = u32::from_le_bytes(input.array()?);
    if !(1..=4).contains(&dimensions) {
        return Err(format!("of {dimensions} dimensions"));
    }
    let mut dims = Vec::with_capacity(4);
    for _ in 0..dimensions {
        dims.push(u64::from_le_bytes(input.array()?));
    }
    let code = u32::from_le_bytes(input.array()?);
    let offset = u64::from_le_bytes(input.array()?);
    let kind = GgmlType::from_code(code)
        .map_err(|name| format!("of type {name}, which is not converted"))?;
    let elements = dims.iter().try_fold(1u64, |n, &d| n.checked_mul(d)).filter(|&n| n > 0);
    let shape: Result<Vec<usize>, _> = dims.iter().rev().map(|&d| usize::try_from(d)).collect();
    let (Some(elements), Ok(shape)) = (elements, shape) else {
        return Err(format!("of the impossible shape {dims:?}"));
    };
    if !dims[0].is_multiple_of(kind.block_elements() as u64) {
        return Err(format!(
            "whose rows of {} elements are no whole {} blocks",
            dims[0],
            kind.name()
        ));
    }
    let blocks = elements / kind.block_elements() as u64;
    let len_bytes = blocks
        .checked_mul(kind.block_bytes() as u64)
        .ok_or_else(|| format!("of the impossible shape {dims:?}"))?;
    Ok((kind, shape, offset, len_bytes))
}

fn place(
    mut infos: Vec<RawInfo>,
    data_start: u64,
    alignment: u64,
    file_bytes: u64,
) -> Result<BTreeMap<String, TensorInfo>, String> {
    infos.sort_by_key(|info| info.offset);
    let mut end = 0;
    let mut names = BTreeSet::new();
    let mut tensors = BTreeMap::new();
    for info in infos {
        let name = info.name;
        if !names.insert(name.clone()) {
            return Err(format!("has tensor `{name}` twice"));
        }
        if info.offset < end || !info.offset.is_multiple_of(alignment) {
            return Err(format!("has tensor `{name}` at an impossible offset {}", info.offset));
        }
        let start = data_start.checked_add(info.offset);
        let fits = |s: u64| s.checked_add(info.len_bytes).is_some_and(|e| e <= file_bytes);
        let Some(start) = start.filter(|&s| fits(s)) else {
            return Err(format!("ends inside tensor `{name}`: it has only {file_bytes} bytes"));
        };
        end = info.offset + info.len_bytes;
        let (kind, shape, len_bytes) = (info.kind, info.shape, info.len_bytes);
        tensors.insert(name, TensorInfo { kind, shape, start, len_bytes });
    }
    Ok(tensors)
}

/// A reader that knows how much it may still read.
struct Input<R> {
    reader: R,
    read_bytes: u64,
    limit_bytes: u64,
}

impl<R: Read> Input<R> {
    fn left(&self) -> u64 {
        self.limit_bytes - self.read_bytes
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], String> {
        let mut bytes = [0; N];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    fn fill(&mut self, bytes: &mut [u8]) -> Result<(), String> {
        if bytes.len() as u64 > self.left() {
            return Err("ends inside its header".into());
        }
        self.reader.read_exact(bytes).map_err(|e| format!("cannot be read: {e}"))?;
        self.read_bytes += bytes.len() as u64;
        Ok(())
    }

    fn text(&mut self) -> Result<String, String> {
        let len = u64::from_le_bytes(self.array()?);
        if len > self.left() {
            return Err(format!("has a text of {len} bytes, beyond its end"));
        }
        let mut bytes = vec![0; len as usize];
        self.fill(&mut bytes)?;
        String::from_utf8(bytes).map_err(|_| "has a text that is not UTF-8".into())
    }

    /// A number of things of at least `least_bytes` each, at most `limit`.
    fn count(&mut self, what: &str, least_bytes: u64, limit: u64) -> Result<u64, String> {
        let count = u64::from_le_bytes(self.array()?);
        if count > limit || count.saturating_mul(least_bytes) > self.left() {
            return Err(format!("claims {count} {what}, more than it can hold"));
        }
        Ok(count)
    }
}

#[cfg(test)]
mod tests;
