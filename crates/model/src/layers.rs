//! From an architecture to layers, tensors and tiles.
//!
//! Invariants:
//! - layers are numbered in forward order: embedding, decoder layers, head;
//! - tensors of a layer lie back to back in float32 elements, in the order listed here;
//! - tiles of a head are slices of whole vocabulary rows whose number depends on the model only;
//! - how decoder layers are tiled never changes what is computed, only what is in memory at once.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::{LayerId, ModelConfig, PieceId, TileId};

/// Upper bound of the vocabulary rows of one head tile.
pub const VOCAB_TILE_ROWS: usize = 8192;
const VOCAB_TILE_ELEMENTS: usize = 8 << 20;

/// What a layer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum LayerKind {
    /// Token embedding, `[V, D]`.
    Embedding,
    /// Attention and feed-forward.
    Decoder,
    /// Final norm and, when untied, the output projection `[V, D]`.
    Head,
}

/// What a tensor does inside its layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Role {
    /// `[V, D]`
    Embedding,
    /// `[D]`
    AttentionNorm,
    /// `[H*K, D]`
    Query,
    /// `[G*K, D]`, G key-value heads
    Key,
    /// `[G*K, D]`
    Value,
    /// `[H*K]`
    QueryBias,
    /// `[G*K]`
    KeyBias,
    /// `[G*K]`
    ValueBias,
    /// `[K]`, shared by all heads
    QueryNorm,
    /// `[K]`
    KeyNorm,
    /// `[D, H*K]`
    Output,
    /// `[D]`
    OutputBias,
    /// `[D]`
    FeedForwardNorm,
    /// `[F, D]`
    Gate,
    /// `[F, D]`
    Up,
    /// `[D, F]`
    Down,
    /// `[F]`
    GateBias,
    /// `[F]`
    UpBias,
    /// `[D]`
    DownBias,
    /// `[D]`
    FinalNorm,
    /// `[V, D]`, row-major, untied only
    Projection,
}

/// A tensor and its place inside its layer's block.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorSpec {
    /// Name in a Hugging Face checkpoint.
    pub name: String,
    pub role: Role,
    /// Row-major shape: `[out, in]` for projections.
    pub shape: Vec<usize>,
    /// First element inside the layer's block.
    pub offset: usize,
}

impl TensorSpec {
    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// The tensor's elements inside its layer's block.
    pub fn range(&self) -> Range<usize> {
        self.offset..self.offset + self.elements()
    }

    /// Whether weight decay applies: tensors of two or more dimensions only.
    pub fn decays(&self) -> bool {
        self.shape.len() >= 2
    }
}

/// How decoder layers are streamed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tiling {
    /// One tile each.
    Whole,
    /// A tile for each of its two residual blocks, attention and feed-forward: half the memory and
    /// less, for one more input that waits for the way back.
    Blocks,
}

/// A contiguous part of a layer's weight block: the unit that is streamed and computed on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TileSpec {
    /// In its layer. Of a decoder layer, 0 is the whole of it, 1 its attention and 2 its
    /// feed-forward.
    pub id: TileId,
    /// Layer whose files hold the tile's weights: the embedding's for a tied head's tiles.
    pub source: LayerId,
    /// Elements inside the source layer's block.
    pub elements: Range<usize>,
    /// Vocabulary rows of a head tile; empty for a layer that is one tile.
    pub vocabulary: Range<usize>,
}

impl TileSpec {
    /// Size of the tile in float32 bytes.
    pub fn f32_bytes(&self) -> usize {
        self.elements.len() * 4
    }
}

/// A layer: the unit that is locked and committed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerSpec {
    pub id: LayerId,
    pub kind: LayerKind,
    /// `embed`, `0`, `1`, ..., `head`: the name users write and the layer's directory.
    pub name: String,
    pub tensors: Vec<TensorSpec>,
}

impl LayerSpec {
    /// Number of parameters.
    pub fn elements(&self) -> usize {
        self.tensors.iter().map(TensorSpec::elements).sum()
    }

    /// The tensor with this role, if the layer has one.
    pub fn tensor(&self, role: Role) -> Option<&TensorSpec> {
        self.tensors.iter().find(|t| t.role == role)
    }

    /// The part of `block` that is the tensor with this role; `None` if the layer has none.
    pub fn slice<'b, T>(&self, block: &'b [T], role: Role) -> Option<&'b [T]> {
        self.tensor(role).map(|t| &block[t.range()])
    }
}

/// All layers of a model, in forward order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerTable {
    layers: Vec<LayerSpec>,
    vocab_size: usize,
    hidden_size: usize,
    tied: bool,
}

impl LayerTable {
    /// The layers of `config`.
    pub fn new(config: &ModelConfig) -> LayerTable {
        let mut layers = Vec::with_capacity(config.layers + 2);
        layers.push(layer(0, LayerKind::Embedding, "embed".into(), embedding_tensors(config)));
        for i in 0..config.layers {
            layers.push(layer(
                i + 1,
                LayerKind::Decoder,
                i.to_string(),
                decoder_tensors(config, i),
            ));
        }
        layers.push(layer(layers.len(), LayerKind::Head, "head".into(), head_tensors(config)));
        LayerTable {
            layers,
            vocab_size: config.vocab_size,
            hidden_size: config.hidden_size,
            tied: config.tied,
        }
    }

    /// The layers in forward order.
    pub fn layers(&self) -> &[LayerSpec] {
        &self.layers
    }

    /// Number of layers, embedding and head included.
    pub fn len(&self) -> usize {
        self.layers.len()
    }

    /// Never: a model has an embedding and a head.
    pub fn is_empty(&self) -> bool {
        self.layers.is_empty()
    }

    /// The layer with this id.
    pub fn layer(&self, id: LayerId) -> &LayerSpec {
        &self.layers[id.index()]
    }

    /// The layer with this name.
    pub fn named(&self, name: &str) -> Option<&LayerSpec> {
        self.layers.iter().find(|l| l.name == name)
    }

    /// Id of the embedding.
    pub fn embedding(&self) -> LayerId {
        LayerId(0)
    }

    /// Id of the head.
    pub fn head(&self) -> LayerId {
        LayerId(self.layers.len() as u32 - 1)
    }

    /// Whether the head projects with the embedding's weights.
    pub fn tied(&self) -> bool {
        self.tied
    }

    /// Number of parameters of the model; tied weights count once.
    pub fn elements(&self) -> usize {
        self.layers.iter().map(LayerSpec::elements).sum()
    }

    /// The tiles of a layer in forward order. Tile 0 of a head holds its final norm, the others
    /// vocabulary rows of the projection.
    pub fn tiles(&self, id: LayerId, tiling: Tiling) -> Vec<TileSpec> {
        let spec = self.layer(id);
        match (spec.kind, tiling) {
            (LayerKind::Head, _) => self.head_tiles(spec),
            (LayerKind::Decoder, Tiling::Blocks) => {
                let Some(middle) = spec.tensor(Role::FeedForwardNorm).map(|norm| norm.offset)
                else {
                    return Vec::new();
                };
                vec![
                    own_tile(spec, TileId(1), 0..middle),
                    own_tile(spec, TileId(2), middle..spec.elements()),
                ]
            }
            (LayerKind::Embedding | LayerKind::Decoder, _) => {
                vec![own_tile(spec, TileId(0), 0..spec.elements())]
            }
        }
    }

    /// The tile of a layer with this id, however layers are streamed.
    pub fn tile(&self, layer: LayerId, id: TileId) -> Option<TileSpec> {
        let all = [Tiling::Whole, Tiling::Blocks];
        all.into_iter().flat_map(|t| self.tiles(layer, t)).find(|tile| tile.id == id)
    }

    /// Elements of a layer whose gradients are complete at once, in the order in which backward
    /// completes them: one for each tile, from the layer's end down. The last one of an embedding
    /// is the rows that tokens touched; where it is tied, they add to what the head's tiles gave.
    pub fn pieces(&self, id: LayerId, tiling: Tiling) -> Vec<Range<usize>> {
        let spec = self.layer(id);
        let tiles = match spec.kind {
            LayerKind::Embedding => self.tiles(self.head(), tiling),
            LayerKind::Decoder | LayerKind::Head => self.tiles(id, tiling),
        };
        let of_tiles = tiles.into_iter().rev().filter(|tile| tile.source == id);
        let rows = (spec.kind == LayerKind::Embedding).then_some(0..spec.elements());
        of_tiles.map(|tile| tile.elements).chain(rows).collect()
    }

    /// The layer that is visited for a tile: the head for those of the vocabulary, whoever holds their
    /// weights.
    pub fn layer_of(&self, tile: &TileSpec) -> LayerId {
        if tile.vocabulary.is_empty() { tile.source } else { self.head() }
    }

    /// Elements of a piece.
    ///
    /// # Panics
    /// If the layer has no such piece: a programmer's error.
    pub fn piece(&self, piece: PieceId, tiling: Tiling) -> Range<usize> {
        self.pieces(piece.layer, tiling).swap_remove(piece.part as usize)
    }

    /// The piece that is a tile's gradient.
    pub fn piece_of(&self, tile: &TileSpec, tiling: Tiling) -> PieceId {
        let pieces = self.pieces(tile.source, tiling);
        let part = pieces.iter().position(|piece| *piece == tile.elements);
        PieceId { layer: tile.source, part: part.unwrap_or(0) as u32 }
    }

    /// The piece that is the rows of the embedding that tokens touched.
    pub fn rows_piece(&self, tiling: Tiling) -> PieceId {
        let layer = self.embedding();
        PieceId { layer, part: self.pieces(layer, tiling).len() as u32 - 1 }
    }

    /// Number of stages of the forward sweep, embedding and head included.
    pub fn stages(&self, tiling: Tiling) -> usize {
        2 + self.decoder_tiles(tiling).count()
    }

    /// The tiles of the decoder in forward order: those of the stages between embedding and head.
    pub fn decoder_tiles(&self, tiling: Tiling) -> impl Iterator<Item = TileSpec> {
        let decoders = self.layers.iter().filter(|layer| layer.kind == LayerKind::Decoder);
        decoders.flat_map(move |layer| self.tiles(layer.id, tiling))
    }

    fn head_tiles(&self, head: &LayerSpec) -> Vec<TileSpec> {
        let norm = own_tile(head, TileId(0), 0..self.hidden_size);
        let (source, start) =
            if self.tied { (self.embedding(), 0) } else { (head.id, self.hidden_size) };
        let rows = vocab_tile_rows(self.hidden_size);
        let projection = (0..self.vocab_size).step_by(rows).enumerate().map(|(i, first)| {
            let vocabulary = first..(first + rows).min(self.vocab_size);
            let at = |row: usize| start + row * self.hidden_size;
            let elements = at(vocabulary.start)..at(vocabulary.end);
            TileSpec { id: TileId(i as u32 + 1), source, elements, vocabulary }
        });
        std::iter::once(norm).chain(projection).collect()
    }

    /// Weights of the largest tile that is streamed.
    pub fn largest_tile(&self, tiling: Tiling) -> usize {
        self.streamed(tiling).map(|tile| tile.elements.len()).max().unwrap_or(0)
    }

    /// All tiles that are bound, in forward order.
    pub fn streamed(&self, tiling: Tiling) -> impl Iterator<Item = TileSpec> {
        self.decoder_tiles(tiling).chain(self.tiles(self.head(), tiling))
    }

    /// The layers that `text` names, e.g. `embed,0-11,head`; the `Err` says what is wrong.
    pub fn parse_selection(&self, text: &str) -> Result<Vec<LayerId>, String> {
        let mut chosen = Vec::new();
        for part in text.split(',').map(str::trim) {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let find = |name: &str| {
                self.named(name.trim()).map(|l| l.id).ok_or_else(|| {
                    format!("no layer `{name}` (layers: embed, 0-{}, head)", self.len() - 3)
                })
            };
            let (first, last) = (find(first)?, find(last)?);
            if first > last {
                return Err(format!("`{part}` runs backwards"));
            }
            chosen.extend((first.0..=last.0).map(LayerId));
        }
        chosen.sort_unstable();
        chosen.dedup();
        Ok(chosen)
    }
}

/// Rows of a head tile: at most [`VOCAB_TILE_ROWS`] and 32 MiB of float32, a multiple of 64.
fn vocab_tile_rows(hidden_size: usize) -> usize {
    (VOCAB_TILE_ELEMENTS / hidden_size / 64 * 64).clamp(64, VOCAB_TILE_ROWS)
}

fn own_tile(layer: &LayerSpec, id: TileId, elements: Range<usize>) -> TileSpec {
    TileSpec { id, source: layer.id, elements, vocabulary: 0..0 }
}

fn layer(id: usize, kind: LayerKind, name: String, tensors: Tensors) -> LayerSpec {
    LayerSpec { id: LayerId(id as u32), kind, name, tensors: tensors.0 }
}

#[derive(Default)]
struct Tensors(Vec<TensorSpec>);

impl Tensors {
    fn add(&mut self, name: String, role: Role, shape: &[usize]) {
        let offset = self.0.last().map_or(0, |t| t.range().end);
        self.0.push(TensorSpec { name, role, shape: shape.to_vec(), offset });
    }
}

fn embedding_tensors(c: &ModelConfig) -> Tensors {
    let mut t = Tensors::default();
    t.add("model.embed_tokens.weight".into(), Role::Embedding, &[c.vocab_size, c.hidden_size]);
    t
}

fn decoder_tensors(c: &ModelConfig, index: usize) -> Tensors {
    let d = c.hidden_size;
    let f = c.intermediate_size;
    let q = c.heads * c.head_dim;
    let kv = c.kv_heads * c.head_dim;
    let mut t = Tensors::default();
    let mut add = |name: &str, role, shape: &[usize]| {
        t.add(format!("model.layers.{index}.{name}"), role, shape);
    };
    add("input_layernorm.weight", Role::AttentionNorm, &[d]);
    add("self_attn.q_proj.weight", Role::Query, &[q, d]);
    add("self_attn.k_proj.weight", Role::Key, &[kv, d]);
    add("self_attn.v_proj.weight", Role::Value, &[kv, d]);
    if c.qkv_bias {
        add("self_attn.q_proj.bias", Role::QueryBias, &[q]);
        add("self_attn.k_proj.bias", Role::KeyBias, &[kv]);
        add("self_attn.v_proj.bias", Role::ValueBias, &[kv]);
    }
    if c.qk_norm {
        add("self_attn.q_norm.weight", Role::QueryNorm, &[c.head_dim]);
        add("self_attn.k_norm.weight", Role::KeyNorm, &[c.head_dim]);
    }
    add("self_attn.o_proj.weight", Role::Output, &[d, q]);
    if c.output_bias {
        add("self_attn.o_proj.bias", Role::OutputBias, &[d]);
    }
    add("post_attention_layernorm.weight", Role::FeedForwardNorm, &[d]);
    add("mlp.gate_proj.weight", Role::Gate, &[f, d]);
    add("mlp.up_proj.weight", Role::Up, &[f, d]);
    add("mlp.down_proj.weight", Role::Down, &[d, f]);
    if c.mlp_bias {
        add("mlp.gate_proj.bias", Role::GateBias, &[f]);
        add("mlp.up_proj.bias", Role::UpBias, &[f]);
        add("mlp.down_proj.bias", Role::DownBias, &[d]);
    }
    t
}

fn head_tensors(c: &ModelConfig) -> Tensors {
    let mut t = Tensors::default();
    t.add("model.norm.weight".into(), Role::FinalNorm, &[c.hidden_size]);
    if !c.tied {
        t.add("lm_head.weight".into(), Role::Projection, &[c.vocab_size, c.hidden_size]);
    }
    t
}

#[cfg(test)]
mod tests;
