//! `store.json` and where everything lies in a store's directory.
//!
//! Invariants:
//! - a format version, dtype, plane or block size this version does not know is refused by name;
//! - a table that comes out of [`Layout::from_json`] is consistent: ids, kinds, shapes, offsets
//!   and names are checked, no product overflows, no name leaves the store's directory.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use model::{
    CHUNK_BYTES, LayerKind, LayerSpec, LayerTable, ModelConfig, Plane, PlaneSpec, Slot, StateLayout,
};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::StoreError;
use crate::hashes::hash;

pub(crate) const STORE_FILE: &str = "store.json";
pub(crate) const RUN_FILE: &str = "run.json";
pub(crate) const CONFIG_FILE: &str = "config.json";
pub(crate) const INDEX_FILE: &str = "model.safetensors.index.json";
pub(crate) const COMMIT_DIR: &str = "commit";
pub(crate) const LAYERS_DIR: &str = "layers";
pub(crate) const SCRATCH_DIR: &str = "scratch";
pub(crate) const TOKENS_DIR: &str = "tokens";
pub(crate) const SNAPSHOTS_DIR: &str = "snapshots";
/// Names a model's own files must not have.
pub(crate) const RESERVED: [&str; 9] = [
    STORE_FILE,
    RUN_FILE,
    CONFIG_FILE,
    INDEX_FILE,
    COMMIT_DIR,
    LAYERS_DIR,
    SCRATCH_DIR,
    TOKENS_DIR,
    SNAPSHOTS_DIR,
];

const FORMAT_VERSION: u64 = 1;
const HASH_NAME: &str = "xxh3-64";
/// Beyond any disk; keeps every later product of sizes far from overflow.
const ELEMENTS_MAX: usize = 1 << 48;

/// How the bytes of one plane are stored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct PlaneLayout {
    plane: String,
    file: String,
    dtype: String,
    /// Elements that share a scale; 1 for plain values.
    block: u64,
}

/// The contents of `store.json`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Layout {
    format_version: u64,
    hash: String,
    chunk_bytes: u64,
    planes: Vec<PlaneLayout>,
    /// Hash of `config.json`'s text, 16 hex digits; absent in stores of the first versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    config_hash: Option<String>,
    /// Options a run starts with unless told otherwise; opaque here.
    pub(crate) defaults: Map<String, Value>,
    pub(crate) table: LayerTable,
}

impl Layout {
    /// The layout this version writes.
    pub(crate) fn new(
        table: &LayerTable,
        state: StateLayout,
        config_json: &str,
        defaults: Map<String, Value>,
    ) -> Result<Layout, StoreError> {
        let layout = Layout {
            format_version: FORMAT_VERSION,
            hash: HASH_NAME.into(),
            chunk_bytes: CHUNK_BYTES as u64,
            planes: planes(state),
            config_hash: Some(config_hash(config_json)),
            defaults,
            table: table.clone(),
        };
        check_table(&layout.table).map_err(|e| StoreError::Invalid(format!("layer table: {e}")))?;
        layout
            .check_config(config_json, true)
            .map_err(|e| StoreError::Invalid(format!("config: {e}")))?;
        Ok(layout)
    }

    /// The text of `store.json`.
    pub(crate) fn to_json(&self) -> String {
        serde_json::json!(self).to_string() + "\n"
    }

    /// Reads `store.json`; the `Err` says what is wrong with it.
    pub(crate) fn from_json(text: &[u8]) -> Result<Layout, Unusable> {
        let root: Value = serde_json::from_slice(text).map_err(|e| format!("not JSON: {e}"))?;
        let version = root.get("format_version").and_then(Value::as_u64);
        match version {
            Some(FORMAT_VERSION) => {}
            Some(other) => {
                return Err(Unusable::Unknown(format!("format version {other} is unknown here")));
            }
            None => return Err("it lacks `format_version`".to_owned().into()),
        }
        check_sizes(&root)?;
        let layout: Layout = serde_json::from_value(root).map_err(|e| e.to_string())?;
        layout.check_known().map_err(Unusable::Unknown)?;
        check_table(&layout.table)?;
        Ok(layout)
    }

    /// Checks that `config_json` describes the layers and is what the store was created with; the
    /// `Err` says in which way it does not.
    /// `hashed`: true but for tests.
    pub(crate) fn check_config(&self, config_json: &str, hashed: bool) -> Result<(), String> {
        const OTHER: &str = "it does not describe the layers in store.json";
        let config = ModelConfig::from_json(config_json).map_err(|e| format!("{OTHER} ({e})"))?;
        // Sizes first: a table takes as much memory as a wrong config claims.
        let same = config.layers.checked_add(2) == Some(self.table.len())
            && fits(&config)
            && LayerTable::new(&config) == self.table;
        if !same {
            return Err(OTHER.into());
        }
        match &self.config_hash {
            Some(hash) if hashed && *hash != config_hash(config_json) => {
                Err("it is not the text that the store was created with".into())
            }
            _ => Ok(()),
        }
    }

    fn check_known(&self) -> Result<(), String> {
        if self.hash != HASH_NAME {
            return Err(format!("hash `{}` is unknown here", self.hash));
        }
        if self.chunk_bytes != CHUNK_BYTES as u64 {
            return Err(format!("chunks of {} bytes are unknown here", self.chunk_bytes));
        }
        self.known_state().map(|_| ())
    }

    /// How W, M and V are kept.
    pub(crate) fn state(&self) -> StateLayout {
        // Every layout is made from a known one, or checked.
        self.known_state().unwrap_or_default()
    }

    fn known_state(&self) -> Result<StateLayout, String> {
        if let Some(state) = StateLayout::ALL.into_iter().find(|s| planes(*s) == self.planes) {
            return Ok(state);
        }
        let known: Vec<PlaneLayout> = StateLayout::ALL.into_iter().flat_map(planes).collect();
        for plane in &self.planes {
            let same: Vec<_> = known
                .iter()
                .filter(|k| (&k.plane, &k.file) == (&plane.plane, &plane.file))
                .collect();
            if same.is_empty() {
                return Err(format!("plane `{}` in `{}` is unknown here", plane.plane, plane.file));
            }
            if same.iter().all(|known| known.dtype != plane.dtype) {
                return Err(format!("{} has unknown dtype `{}`", plane.file, plane.dtype));
            }
            if same.iter().all(|known| known.block != plane.block) {
                return Err(format!("{} has unknown block size {}", plane.file, plane.block));
            }
        }
        let names: Vec<&str> = self.planes.iter().map(|plane| plane.plane.as_str()).collect();
        Err(format!("its planes ({}) are together none of the known layouts", names.join(", ")))
    }
}

/// Why a `store.json` cannot be used.
#[derive(Debug)]
pub(crate) enum Unusable {
    /// No version wrote this.
    Damaged(String),
    /// Another version may have written this.
    Unknown(String),
}

impl From<String> for Unusable {
    fn from(what: String) -> Unusable {
        Unusable::Damaged(what)
    }
}

fn config_hash(config_json: &str) -> String {
    format!("{:016x}", hash(config_json.as_bytes()))
}

/// Whether the sums of sizes in a table of `config` are far from overflow.
fn fits(config: &ModelConfig) -> bool {
    let wide = |n: usize| n as u128;
    let heads = wide(config.heads).saturating_mul(wide(config.head_dim));
    let widest = wide(config.vocab_size).max(wide(config.intermediate_size)).max(heads);
    widest.saturating_mul(wide(config.hidden_size)) <= ELEMENTS_MAX as u128
}

fn planes(state: StateLayout) -> Vec<PlaneLayout> {
    let layout = |spec: &PlaneSpec| PlaneLayout {
        plane: spec.plane.name().into(),
        file: plane_file(spec.plane),
        dtype: spec.dtype.name().into(),
        block: spec.block as u64,
    };
    state.planes().iter().map(layout).collect()
}

/// Bytes of a layer's planes, headers excluded.
pub(crate) fn state_bytes(layer: &LayerSpec, state: StateLayout) -> u64 {
    state.bytes(layer.elements()) as u64
}

/// Bytes of the plane that other software takes for a layer's weights.
pub(crate) fn weight_bytes(layer: &LayerSpec, state: StateLayout) -> u64 {
    state.planes()[0].bytes(layer.elements()) as u64
}

/// `weight.safetensors` and its like.
pub(crate) fn plane_file(plane: Plane) -> String {
    format!("{}.safetensors", plane.name())
}

/// Path of a slot below the store's directory.
pub(crate) fn slot_path(layer: &LayerSpec, slot: Slot) -> PathBuf {
    Path::new(LAYERS_DIR).join(&layer.name).join(slot.name())
}

/// The sizes that [`LayerTable`] keeps to itself but divides and multiplies by.
fn check_sizes(root: &Value) -> Result<(), String> {
    let table = root.get("table").ok_or("it lacks `table`")?;
    for key in ["vocab_size", "hidden_size"] {
        let size = table.get(key).and_then(Value::as_u64).unwrap_or(0);
        if size == 0 || size > ELEMENTS_MAX as u64 {
            return Err(format!("its table has an impossible {key}"));
        }
    }
    let shape = |layer: Option<&Value>, tensor: usize| {
        let shape = layer?.get("tensors")?.get(tensor)?.get("shape")?.as_array()?.clone();
        Some(shape)
    };
    let layers = table.get("layers").and_then(Value::as_array).ok_or("its table lacks layers")?;
    let (vocab, hidden) = (table["vocab_size"].clone(), table["hidden_size"].clone());
    let matrix = Some(vec![vocab, hidden.clone()]);
    let tied = table.get("tied").and_then(Value::as_bool).unwrap_or(false);
    let fits = shape(layers.first(), 0) == matrix
        && shape(layers.last(), 0) == Some(vec![hidden])
        && (tied || shape(layers.last(), 1) == matrix);
    if fits { Ok(()) } else { Err("its embedding or head contradicts its sizes".into()) }
}

fn check_table(table: &LayerTable) -> Result<(), String> {
    let layers = table.layers();
    if layers.len() < 2 {
        return Err("fewer than two layers".into());
    }
    let mut names = BTreeSet::new();
    let mut total = 0usize;
    for (index, layer) in layers.iter().enumerate() {
        let kind = match index {
            0 => LayerKind::Embedding,
            i if i + 1 == layers.len() => LayerKind::Head,
            _ => LayerKind::Decoder,
        };
        if layer.id.index() != index || layer.kind != kind {
            return Err(format!("layer {index} has the wrong id or kind"));
        }
        if !is_plain_name(&layer.name) || !names.insert(&layer.name) {
            return Err(format!("layer {index} has the unusable name `{}`", layer.name));
        }
        total = total.checked_add(check_tensors(layer)?).ok_or("too many elements")?;
    }
    if total > ELEMENTS_MAX { Err("too many elements".into()) } else { Ok(()) }
}

/// Number of elements of a layer whose tensors lie back to back.
fn check_tensors(layer: &LayerSpec) -> Result<usize, String> {
    let mut names = BTreeSet::new();
    let mut end = 0usize;
    for tensor in &layer.tensors {
        let elements = tensor.shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d));
        let elements = elements.filter(|&n| n > 0 && n <= ELEMENTS_MAX);
        let elements = elements.ok_or_else(|| format!("`{}` has no usable shape", tensor.name))?;
        if tensor.offset != end || !names.insert(&tensor.name) || tensor.name == "__metadata__" {
            return Err(format!("`{}` is not where it belongs", tensor.name));
        }
        end = end.checked_add(elements).ok_or("too many elements")?;
    }
    if end == 0 { Err(format!("layer `{}` is empty", layer.name)) } else { Ok(end) }
}

/// Whether `name` is one ordinary path component.
pub(crate) fn is_plain_name(name: &str) -> bool {
    let mut components = Path::new(name).components();
    let first = components.next();
    matches!(first, Some(std::path::Component::Normal(part)) if part == name)
        && components.next().is_none()
        && !name.contains(['\\', '\0'])
}

#[cfg(test)]
mod tests;
