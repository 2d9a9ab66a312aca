//! Import of GGUF files: weights dequantised, config and tokenizer rebuilt from the metadata.
//!
//! Invariants:
//! - the whole list of tensors is checked against the architecture before the store is created;
//! - a value becomes exactly the float32 that the Python package `gguf` makes of it;
//! - the file's order of query and key rows (architecture `llama` only) is undone, so that the
//!   result is what transformers computes with.

mod alphabet;
mod config;
mod parse;
mod quants;
mod tokenizer;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};

use model::{LayerSpec, LayerTable, ModelConfig, Role, TensorSpec};

use crate::error::FETCH_AGAIN;
use crate::source::{SOURCES, Source, look_up};
use crate::weights::{
    Checkpoint, Destination, IMPORTED_LEARNING_RATE, WeightSource, layer_table, write_store,
};
use crate::{ConvertError, Progress, Report};
use parse::{Header, TensorInfo};
use quants::GgmlType;

/// Remedy where a file may be damaged or merely not supported.
const FETCH_OR_ORIGINAL: &str =
    "fetch the file again if it is incomplete, or import the original model instead";
const ROPE_FACTORS: &str = "rope_freqs.weight";

/// Makes a store at `dest` from the GGUF file `file`.
///
/// Architectures: llama (Mistral's files say llama too), qwen2, qwen3. Tensor types: F32, F16,
/// BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K. `progress` gets the bytes done and in all,
/// counted as float32.
pub fn import_gguf(
    file: &Path,
    to: &Destination<'_>,
    progress: &mut Progress<'_>,
) -> Result<Report, ConvertError> {
    if !look_up(file)?.is_file() {
        return Err(ConvertError::invalid(file, "is not a regular file", SOURCES));
    }
    let mut source = Source::open(file)?;
    let header = read_header(file, source.len_bytes())?;
    let factors = rope_factors(&header, &mut source)?;
    let unsupported = |what| ConvertError::invalid(file, what, "import the original model instead");
    let config_json = config::build(&header, factors.as_deref()).map_err(unsupported)?;
    let config = ModelConfig::from_json(&config_json)
        .map_err(|what| ConvertError::Config { path: file.to_path_buf(), what })?;
    let table = layer_table(&config, header.tensors.len(), file)?;
    let tokenizer = tokenizer::build(&header.metadata).map_err(unsupported)?;
    let permuted = config::architecture(&header.metadata).is_ok_and(|a| a == "llama");
    let mut weights =
        GgufWeights::new(source, &header, &table, permuted.then_some(config.head_dim))?;
    let checkpoint = Checkpoint {
        config_path: file.to_path_buf(),
        config_json,
        table,
        files: tokenizer.files,
        learning_rate: IMPORTED_LEARNING_RATE,
    };
    let mut report = write_store(to, &checkpoint, &mut weights, progress)?;
    report.warnings.extend(tokenizer.warnings);
    Ok(report)
}

fn read_header(path: &Path, file_bytes: u64) -> Result<Header, ConvertError> {
    let file = File::open(path).map_err(ConvertError::io("open", path))?;
    parse::parse(BufReader::new(file), file_bytes)
        .map_err(|what| ConvertError::invalid(path, what, FETCH_OR_ORIGINAL))
}

/// What the file divides the rotary frequencies by, if it does.
fn rope_factors(header: &Header, source: &mut Source) -> Result<Option<Vec<f32>>, ConvertError> {
    let Some(info) = header.tensors.get(ROPE_FACTORS) else { return Ok(None) };
    if info.kind != GgmlType::F32 || info.shape.len() != 1 || info.len_bytes > 1 << 16 {
        return Err(ConvertError::invalid(
            source.path(),
            format!("has `{ROPE_FACTORS}` of shape {:?} and type {}", info.shape, info.kind.name()),
            FETCH_AGAIN,
        ));
    }
    let mut raw = vec![0; info.len_bytes as usize];
    source.read_at(info.start, &mut raw)?;
    let mut factors = vec![0.0; info.shape[0]];
    info.kind.decode(&raw, &mut factors);
    Ok(Some(factors))
}

/// The file's name for a tensor of the layer table.
fn gguf_name(layer: &LayerSpec, role: Role) -> String {
    let suffix = match role {
        Role::Embedding => return "token_embd.weight".into(),
        Role::FinalNorm => return "output_norm.weight".into(),
        Role::Projection => return "output.weight".into(),
        Role::AttentionNorm => "attn_norm.weight",
        Role::Query => "attn_q.weight",
        Role::Key => "attn_k.weight",
        Role::Value => "attn_v.weight",
        Role::QueryBias => "attn_q.bias",
        Role::KeyBias => "attn_k.bias",
        Role::ValueBias => "attn_v.bias",
        Role::QueryNorm => "attn_q_norm.weight",
        Role::KeyNorm => "attn_k_norm.weight",
        Role::Output => "attn_output.weight",
        Role::OutputBias => "attn_output.bias",
        Role::FeedForwardNorm => "ffn_norm.weight",
        Role::Gate => "ffn_gate.weight",
        Role::Up => "ffn_up.weight",
        Role::Down => "ffn_down.weight",
        Role::GateBias => "ffn_gate.bias",
        Role::UpBias => "ffn_up.bias",
        Role::DownBias => "ffn_down.bias",
    };
    format!("blk.{}.{suffix}", layer.name)
}

/// A tensor in the file.
#[derive(Clone, Debug)]
struct Place {
    info: TensorInfo,
    /// Rows of a head whose two halves the file interleaves.
    interleaved_rows: Option<usize>,
}

struct GgufWeights {
    path: PathBuf,
    source: Source,
    /// By the name in the layer table.
    places: BTreeMap<String, Place>,
    raw: Vec<u8>,
}

impl GgufWeights {
    fn new(
        source: Source,
        header: &Header,
        table: &LayerTable,
        interleaved_rows: Option<usize>,
    ) -> Result<GgufWeights, ConvertError> {
        let path = source.path().to_path_buf();
        let invalid = |what: String| ConvertError::invalid(&path, what, FETCH_AGAIN);
        let mut extra: BTreeSet<&str> = header.tensors.keys().map(String::as_str).collect();
        extra.remove(ROPE_FACTORS);
        let mut places = BTreeMap::new();
        for layer in table.layers() {
            for spec in &layer.tensors {
                let name = gguf_name(layer, spec.role);
                let info = header
                    .tensors
                    .get(&name)
                    .ok_or_else(|| invalid(format!("lacks tensor `{name}` {:?}", spec.shape)))?;
                extra.remove(name.as_str());
                let place = place(info, spec, interleaved_rows)
                    .map_err(|what| invalid(format!("has tensor `{name}` {what}")))?;
                places.insert(spec.name.clone(), place);
            }
        }
        if let Some(name) = extra.first() {
            return Err(ConvertError::invalid(
                &path,
                format!("has tensor `{name}`, which its architecture does not have"),
                "import the original model instead",
            ));
        }
        Ok(GgufWeights { path, source, places, raw: Vec::new() })
    }

    /// Reads elements that lie behind each other in the file, from `start` on.
    fn decode(
        &mut self,
        info: &TensorInfo,
        start: usize,
        out: &mut [f32],
    ) -> Result<(), ConvertError> {
        let blocks =
            |elements: usize| elements / info.kind.block_elements() * info.kind.block_bytes();
        self.raw.resize(blocks(out.len()), 0);
        self.source.read_at(info.start + blocks(start) as u64, &mut self.raw)?;
        info.kind.decode(&self.raw, out);
        Ok(())
    }
}

fn place(
    info: &TensorInfo,
    spec: &TensorSpec,
    interleaved_rows: Option<usize>,
) -> Result<Place, String> {
    if info.shape != spec.shape {
        return Err(format!("of shape {:?}, its metadata asks for {:?}", info.shape, spec.shape));
    }
    let rotary = matches!(spec.role, Role::Query | Role::Key | Role::QueryBias | Role::KeyBias);
    let interleaved_rows = interleaved_rows.filter(|_| rotary);
    let row = row_elements(spec);
    if interleaved_rows.is_some() && !row.is_multiple_of(info.kind.block_elements()) {
        return Err(format!("of type {}, whose rows cannot be reordered", info.kind.name()));
    }
    Ok(Place { info: info.clone(), interleaved_rows })
}

fn row_elements(spec: &TensorSpec) -> usize {
    if spec.shape.len() > 1 { spec.shape[spec.shape.len() - 1] } else { 1 }
}

/// The file's row of row `row`: the file has the two rotary halves of a head row by row in turn.
fn interleaved(row: usize, head_rows: usize) -> usize {
    let (head, at) = (row / head_rows, row % head_rows);
    let half = head_rows / 2;
    head * head_rows + 2 * (at % half) + at / half
}

impl WeightSource for GgufWeights {
    fn path(&self, _spec: &TensorSpec) -> &Path {
        &self.path
    }

    fn read(
        &mut self,
        spec: &TensorSpec,
        start: usize,
        out: &mut [f32],
    ) -> Result<(), ConvertError> {
        let Place { info, interleaved_rows } = self.places[&spec.name].clone();
        let Some(head_rows) = interleaved_rows else { return self.decode(&info, start, out) };
        let row = row_elements(spec);
        for (i, out) in out.chunks_exact_mut(row).enumerate() {
            let from = interleaved(start / row + i, head_rows);
            self.decode(&info, from * row, out)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
