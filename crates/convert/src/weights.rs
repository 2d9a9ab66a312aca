//! The one way from a source of weights into a new store.
//!
//! Invariants:
//! - weights pass in pieces of whole rows, at most [`PIECE_ELEMENTS`] or one row;
//! - no value that is not finite gets into a store;
//! - a failed conversion leaves nothing behind.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use model::{LayerTable, ModelConfig, PlaneType, StateLayout, TensorSpec};
use serde_json::{Map, json};
use store::{Io, NewStore, Spread};

use crate::json::with_dtype;
use crate::{ConvertError, Dtype, Progress, Report};

/// Elements of one piece: 4 MiB of float32.
pub(crate) const PIECE_ELEMENTS: usize = 1 << 20;
/// More decoder layers than any model has: bounds what a config can make us allocate.
const LAYER_LIMIT: usize = 16_384;
const ELEMENT_LIMIT: u128 = 1 << 46;

/// Where a store is made.
#[derive(Clone, Debug)]
pub struct Destination<'a> {
    pub io: Arc<dyn Io>,
    pub dir: &'a Path,
    /// How it keeps W, M and V.
    pub layout: StateLayout,
    /// Drives that layers go to.
    pub spread: Spread,
}

impl<'a> Destination<'a> {
    /// In `dir`, everything in float32.
    pub fn new(io: Arc<dyn Io>, dir: &'a Path) -> Destination<'a> {
        Destination { io, dir, layout: StateLayout::F32, spread: Spread::default() }
    }
}

/// Whatever can give the weights of a layer table's tensors.
pub(crate) trait WeightSource {
    /// The file that a tensor comes from.
    fn path(&self, spec: &TensorSpec) -> &Path;

    /// Fills `out` with the tensor's elements from `start` on. Ranges are whole rows.
    fn read(
        &mut self,
        spec: &TensorSpec,
        start: usize,
        out: &mut [f32],
    ) -> Result<(), ConvertError>;
}

/// Everything about a checkpoint but its weights.
pub(crate) struct Checkpoint {
    /// Where the config came from, for errors.
    pub(crate) config_path: PathBuf,
    pub(crate) config_json: String,
    pub(crate) table: LayerTable,
    pub(crate) files: Vec<(String, Vec<u8>)>,
    /// Learning rate that a run of this model starts with unless told otherwise.
    pub(crate) learning_rate: f64,
}

/// Learning rate of a model that is trained already.
pub(crate) const IMPORTED_LEARNING_RATE: f64 = 1e-5;
/// Learning rate of a model that is not.
pub(crate) const INITIAL_LEARNING_RATE: f64 = 3e-4;

/// The layers of `config`, refused when they cannot be those of a checkpoint with `tensors`
/// tensors.
pub(crate) fn layer_table(
    config: &ModelConfig,
    tensors: usize,
    config_path: &Path,
) -> Result<LayerTable, ConvertError> {
    let refuse = |what: String| Err(ConvertError::invalid(config_path, what, "correct the config"));
    if config.layers > LAYER_LIMIT.min(tensors) {
        return refuse(format!(
            "asks for {} layers, but there are only {tensors} tensors",
            config.layers
        ));
    }
    if elements(config) > ELEMENT_LIMIT {
        return refuse("asks for a model beyond any disk".into());
    }
    Ok(LayerTable::new(config))
}

/// An upper bound of the number of parameters, in a type that cannot overflow.
fn elements(c: &ModelConfig) -> u128 {
    let wide = |n: usize| n as u128;
    let d = wide(c.hidden_size);
    let heads = wide(c.heads) * wide(c.head_dim);
    let layer = 4 * heads * (d + 1) + 3 * wide(c.intermediate_size) * (d + 1) + 8 * d;
    2 * wide(c.vocab_size) * d + wide(c.layers) * layer
}

/// Creates a store and fills it from `source`.
pub(crate) fn write_store(
    to: &Destination<'_>,
    checkpoint: &Checkpoint,
    source: &mut dyn WeightSource,
    progress: &mut Progress<'_>,
) -> Result<Report, ConvertError> {
    let table = &checkpoint.table;
    let config_json = config_in(to.layout, &checkpoint.config_json).map_err(|e| {
        ConvertError::invalid(&checkpoint.config_path, e.to_string(), "correct the config")
    })?;
    let defaults = Map::from_iter([("lr".to_string(), json!(checkpoint.learning_rate))]);
    let files = checkpoint.files.clone();
    let (layout, spread) = (to.layout, to.spread.clone());
    let new = NewStore { config_json: &config_json, table, layout, files, defaults, spread };
    let mut writer = store::create(Arc::clone(&to.io), to.dir, &new)?;
    let warnings = to.io.disk_warnings(to.dir);
    let total_bytes = table.elements() as u64 * 4;
    let mut done_bytes = 0;
    progress(0, total_bytes);
    let mut block = Vec::new();
    for layer in table.layers() {
        for spec in &layer.tensors {
            let step = piece_elements(spec);
            for start in (0..spec.elements()).step_by(step) {
                block.resize(step.min(spec.elements() - start), 0.0);
                source.read(spec, start, &mut block)?;
                check_finite(source.path(spec), spec, start, &block)?;
                writer.write_weights(layer.id, spec.offset + start, &block)?;
                done_bytes += block.len() as u64 * 4;
                progress(done_bytes, total_bytes);
            }
        }
    }
    writer.finish()?;
    let parameters = table.elements() as u64;
    Ok(Report { layers: table.len(), parameters, ignored: Vec::new(), warnings })
}

/// The text of a store's `config.json` as it is for a store in `layout`.
///
/// # Errors
/// For a text that is no JSON object.
pub fn config_in(layout: StateLayout, config_json: &str) -> Result<String, serde_json::Error> {
    with_dtype(config_json, weight_dtype(layout).config_name())
}

/// What other software finds in the weight files of a layout.
fn weight_dtype(layout: StateLayout) -> Dtype {
    match layout.planes()[0].dtype {
        PlaneType::Bf16 => Dtype::BF16,
        PlaneType::F32 | PlaneType::I16 | PlaneType::U8 => Dtype::F32,
    }
}

/// Elements of a tensor's pieces: whole rows.
fn piece_elements(spec: &TensorSpec) -> usize {
    let row = spec.shape.last().copied().unwrap_or(1);
    (PIECE_ELEMENTS / row).max(1) * row
}

fn check_finite(
    path: &Path,
    spec: &TensorSpec,
    start: usize,
    values: &[f32],
) -> Result<(), ConvertError> {
    match values.iter().position(|v| !v.is_finite()) {
        None => Ok(()),
        Some(i) => Err(ConvertError::invalid(
            path,
            format!(
                "has {} in tensor `{}` {:?} at element {}",
                values[i],
                spec.name,
                spec.shape,
                start + i
            ),
            "such a model cannot be trained, fetch an intact one",
        )),
    }
}
