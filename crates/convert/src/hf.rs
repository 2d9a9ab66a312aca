//! Import of a Hugging Face directory: safetensors (F32, BF16, F16) become a store's float32.
//!
//! Invariants:
//! - config, headers, names, shapes and types of the whole checkpoint are checked before the
//!   store is created;
//! - a tensor that the architecture does not have is refused by name, never dropped silently.

mod header;
mod shards;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use model::{LayerTable, ModelConfig, TensorSpec};

use crate::source::{SOURCES, look_up, read_small, read_text};
use crate::weights::{
    Checkpoint, Destination, IMPORTED_LEARNING_RATE, PIECE_ELEMENTS, WeightSource, layer_table,
    write_store,
};
use crate::{ConvertError, Dtype, Progress, Report};
use shards::{Place, Shards};

pub(crate) use shards::{INDEX, SINGLE};

/// The files that a model has beside its weights, as far as they are there.
pub(crate) const MODEL_FILES: [&str; 8] = [
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
];

const PROJECTION: &str = "lm_head.weight";
const EMBEDDING: &str = "model.embed_tokens.weight";

/// Makes a store at `dest` from the Hugging Face directory `src`.
///
/// Weights are read in pieces of at most 4 MiB. `progress` gets the bytes done and in all, counted
/// as float32.
pub fn import_hf(
    src: &Path,
    to: &Destination<'_>,
    progress: &mut Progress<'_>,
) -> Result<Report, ConvertError> {
    if !look_up(src)?.is_dir() {
        return Err(ConvertError::invalid(src, "is neither a directory nor a .gguf file", SOURCES));
    }
    let config_path = src.join("config.json");
    let config_json = read_text(&config_path)?.ok_or_else(|| {
        ConvertError::invalid(
            src,
            "has no config.json",
            "name a directory that transformers' from_pretrained can load",
        )
    })?;
    let config = ModelConfig::from_json(&config_json)
        .map_err(|what| ConvertError::Config { path: config_path.clone(), what })?;
    let files = model_files(src)?;
    let shards = Shards::open(src)?;
    let table = layer_table(&config, shards.tensors().len(), &config_path)?;
    let mut source = HfWeights::new(src, shards, &table)?;
    let mut ignored = source.ignored.clone();
    ignored.sort();
    let checkpoint = Checkpoint {
        config_path,
        config_json,
        table,
        files,
        learning_rate: IMPORTED_LEARNING_RATE,
    };
    let report = write_store(to, &checkpoint, &mut source, progress)?;
    Ok(Report { ignored, ..report })
}

fn model_files(src: &Path) -> Result<Vec<(String, Vec<u8>)>, ConvertError> {
    let mut files = Vec::new();
    for name in MODEL_FILES {
        if let Some(bytes) = read_small(&src.join(name))? {
            files.push((name.to_string(), bytes));
        }
    }
    let tokenizer = files.iter().find(|(name, _)| name == "tokenizer.json").ok_or_else(|| {
        ConvertError::invalid(
            src,
            "has no tokenizer.json",
            "save it with transformers: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)",
        )
    })?;
    match serde_json::from_slice::<BTreeMap<String, serde::de::IgnoredAny>>(&tokenizer.1) {
        Ok(_) => Ok(files),
        Err(error) => Err(ConvertError::invalid(
            src.join("tokenizer.json"),
            format!("is not a JSON object: {error}"),
            crate::error::FETCH_AGAIN,
        )),
    }
}

struct HfWeights {
    src: PathBuf,
    shards: Shards,
    /// By the name in the layer table.
    places: BTreeMap<String, (Place, Dtype)>,
    ignored: Vec<String>,
    raw: Vec<u8>,
}

impl HfWeights {
    fn new(src: &Path, shards: Shards, table: &LayerTable) -> Result<HfWeights, ConvertError> {
        let mut weights = HfWeights {
            src: src.to_path_buf(),
            shards,
            places: BTreeMap::new(),
            ignored: Vec::new(),
            raw: Vec::new(),
        };
        let mut extra: BTreeSet<String> = weights.shards.tensors().keys().cloned().collect();
        for spec in table.layers().iter().flat_map(|layer| &layer.tensors) {
            let name = weights.find(spec)?;
            extra.remove(&name);
            let place = weights.shards.tensors()[&name].clone();
            let dtype = weights.check(&name, &place, &spec.shape)?;
            weights.places.insert(spec.name.clone(), (place, dtype));
        }
        weights.account_for(extra, table)?;
        Ok(weights)
    }

    /// The checkpoint's name of a tensor: with or without the base model's prefix.
    fn find(&self, spec: &TensorSpec) -> Result<String, ConvertError> {
        let bare = spec.name.strip_prefix("model.").unwrap_or(&spec.name);
        [spec.name.as_str(), bare]
            .into_iter()
            .find(|name| self.shards.tensors().contains_key(*name))
            .map(str::to_string)
            .ok_or_else(|| {
                ConvertError::invalid(
                    &self.src,
                    format!(
                        "lacks tensor `{}` {:?}, which its config asks for",
                        spec.name, spec.shape
                    ),
                    "fetch the missing files, or correct config.json",
                )
            })
    }

    fn check(&self, name: &str, place: &Place, shape: &[usize]) -> Result<Dtype, ConvertError> {
        let path = self.shards.path(place);
        if place.entry.shape != shape {
            return Err(ConvertError::invalid(
                path,
                format!(
                    "has tensor `{name}` of shape {:?}, but its config asks for {shape:?}",
                    place.entry.shape
                ),
                "use the config.json that belongs to these weights",
            ));
        }
        Dtype::from_name(&place.entry.dtype).ok_or_else(|| {
            ConvertError::invalid(
                path,
                format!("has tensor `{name}` of element type {}", place.entry.dtype),
                "only F32, BF16 and F16 can be trained; save the model in one of them",
            )
        })
    }

    /// Ignores what is known to be redundant; refuses everything else by name.
    fn account_for(
        &mut self,
        extra: BTreeSet<String>,
        table: &LayerTable,
    ) -> Result<(), ConvertError> {
        for name in extra {
            let place = self.shards.tensors()[&name].clone();
            if name == PROJECTION && table.tied() {
                self.compare_with_embedding(&place, table)?;
            } else if !name.ends_with(".rotary_emb.inv_freq") {
                return Err(ConvertError::invalid(
                    self.shards.path(&place),
                    format!("has tensor `{name}`, which its config does not ask for"),
                    "correct config.json, or remove the tensor if the model does not need it",
                ));
            }
            self.ignored.push(name);
        }
        Ok(())
    }

    /// A tied model's projection may be stored as well, but then as the same bits.
    fn compare_with_embedding(
        &mut self,
        projection: &Place,
        table: &LayerTable,
    ) -> Result<(), ConvertError> {
        let spec = &table.layer(table.embedding()).tensors[0];
        let dtype = self.check(PROJECTION, projection, &spec.shape)?;
        let (mut ours, mut theirs) = (vec![0.0; PIECE_ELEMENTS], vec![0.0; PIECE_ELEMENTS]);
        let place = (projection.clone(), dtype);
        let embedding = self.places[EMBEDDING].clone();
        for start in (0..spec.elements()).step_by(PIECE_ELEMENTS) {
            let len = PIECE_ELEMENTS.min(spec.elements() - start);
            self.decode(&embedding, start, &mut ours[..len])?;
            self.decode(&place, start, &mut theirs[..len])?;
            let differs = |i: &usize| ours[*i].to_bits() != theirs[*i].to_bits();
            if let Some(i) = (0..len).find(differs) {
                return Err(ConvertError::invalid(
                    self.shards.path(projection),
                    format!(
                        "has `{PROJECTION}`, which differs from the embedding at element {} \
                         although config.json ties them",
                        start + i
                    ),
                    "set \"tie_word_embeddings\": false in config.json to keep both",
                ));
            }
        }
        Ok(())
    }

    fn decode(
        &mut self,
        (place, dtype): &(Place, Dtype),
        start: usize,
        out: &mut [f32],
    ) -> Result<(), ConvertError> {
        let size = dtype.element_bytes();
        self.raw.resize(out.len() * size, 0);
        self.shards.read(place, (start * size) as u64, &mut self.raw)?;
        dtype.decode(&self.raw, out);
        Ok(())
    }
}

impl WeightSource for HfWeights {
    fn path(&self, spec: &TensorSpec) -> &Path {
        self.shards.path(&self.places[&spec.name].0)
    }

    fn read(
        &mut self,
        spec: &TensorSpec,
        start: usize,
        out: &mut [f32],
    ) -> Result<(), ConvertError> {
        let place = self.places[&spec.name].clone();
        self.decode(&place, start, out)
    }
}
