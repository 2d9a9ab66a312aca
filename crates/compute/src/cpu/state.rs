//! What is on the device, and how each command changes it.
//!
//! Invariants:
//! - operands are looked up and their sizes checked before anything is consumed or computed;
//! - a consumed tensor is gone even if the command fails after its checks; `Clear` always restores
//!   a usable device.

use std::collections::HashMap;
use std::ops::Range;

use model::{
    Budget, HostBytes, LayerId, LayerKind, LayerTable, ModelConfig, TileId, TileSpec, Weights,
    from_bf16, to_bf16,
};

use super::bound::Ready;
use super::decoder::{Decoder, Inner, Sink};
use super::gradients::{Dense, RowGradient};
use super::head::{self, STATS};
use crate::product::{Accum, ComputeDtype, Values};
use crate::rows::{self, Angles, partial_count};
use crate::{Command, DeviceError, Gradient, MicroShape, NO_TARGET, Outcome, TensorId, WeightsId};

pub(super) struct State {
    config: ModelConfig,
    dtype: ComputeDtype,
    table: LayerTable,
    budget: Budget,
    weights: HashMap<WeightsId, Bound>,
    tensors: HashMap<TensorId, HostBytes>,
    /// By the layer's input.
    kept: HashMap<TensorId, ((LayerId, TileId), Inner)>,
    /// Kept logits of vocabulary tiles, by the head's statistics.
    logits: HashMap<(TensorId, TileId), HostBytes>,
    /// By layer and first element.
    dense: HashMap<(LayerId, usize), Dense>,
    rows: Option<RowGradient>,
    angles: Angles,
}

struct Bound {
    layer: LayerId,
    tile: TileSpec,
    /// Until the first command that computes with them: tiles are bound before their turn.
    unused: Option<Weights>,
    /// From then on.
    ready: Option<Ready>,
}

impl Bound {
    /// Every command that computes prepares its weights first.
    fn ready(&self) -> &Ready {
        let Some(ready) = &self.ready else { panic!("weights that nobody prepared") };
        ready
    }

    /// A vocabulary tile.
    fn matrix(&self) -> Values<'_> {
        self.ready().whole()
    }

    /// The final norm.
    fn norm(&self) -> &[f32] {
        self.ready().vector(0..self.tile.elements.len())
    }
}

/// The operands of a head command over one vocabulary tile.
struct HeadOperands {
    weights: WeightsId,
    h: TensorId,
    stats: TensorId,
}

impl State {
    pub(super) fn new(config: &ModelConfig, dtype: ComputeDtype, budget: Budget) -> State {
        State {
            config: config.clone(),
            dtype,
            table: LayerTable::new(config),
            budget,
            weights: HashMap::new(),
            tensors: HashMap::new(),
            kept: HashMap::new(),
            logits: HashMap::new(),
            dense: HashMap::new(),
            rows: None,
            angles: Angles::new(&[], 0),
        }
    }

    pub(super) fn execute(&mut self, command: Command) -> Result<Outcome, DeviceError> {
        command.weights().map_or(Ok(()), |id| self.prepare(id))?;
        match command {
            Command::Bind { id, layer, tile, weights } => self.bind(id, layer, tile, weights)?,
            Command::Unbind { id } => {
                self.weights.remove(&id).ok_or(unknown("weights", id.0))?;
            }
            Command::Put { id, bytes } => self.put(id, bytes)?,
            Command::Get { id } => return Ok(Outcome::Bytes(self.take(id)?)),
            Command::Free { id } => {
                self.kept.remove(&id);
                self.logits.retain(|(stats, _), _| *stats != id);
                self.take(id)?;
            }
            Command::Embed { rows, index, y } => self.embed(&rows, &index, y)?,
            Command::Forward { weights, shape, x, y, keep } => {
                self.forward(weights, shape, x, y, keep)?;
            }
            Command::Backward { weights, shape, x, dy, dx, gradient } => {
                self.backward(weights, shape, (x, dy, dx), gradient)?;
            }
            Command::HeadNorm { weights, x, h } => self.head_norm(weights, x, h)?,
            Command::HeadScore { weights, h, labels, stats, keep } => {
                self.head_score(&HeadOperands { weights, h, stats }, &labels, keep)?;
            }
            Command::HeadLoss { stats, labels } => return self.head_loss(stats, &labels),
            Command::HeadBackward { weights, h, stats, labels, dh, scale, gradient } => {
                let operands = HeadOperands { weights, h, stats };
                self.head_backward(&operands, &labels, dh, scale, gradient)?;
            }
            Command::HeadNormBackward { weights, x, dh, dx, gradient } => {
                self.head_norm_backward(weights, (x, dh, dx), gradient)?;
            }
            Command::HeadLogits { weights, h, token } => return self.logits(weights, h, token),
            Command::EmbedBackward { tokens, dy } => self.embed_backward(&tokens, dy)?,
            Command::TakeGradient { layer, elements } => {
                return Ok(Outcome::Gradient(self.take_gradient(layer, &elements)?));
            }
            Command::TakeRows => {
                let rows = self.rows.take().ok_or(unknown("rows of the gradient of layer", 0))?;
                return Ok(Outcome::Gradient(rows.take(&self.budget)?));
            }
            Command::Clear => self.clear(),
        }
        Ok(Outcome::Done)
    }

    fn clear(&mut self) {
        self.weights.clear();
        self.tensors.clear();
        self.kept.clear();
        self.logits.clear();
        self.dense.clear();
        self.rows = None;
    }

    fn bind(
        &mut self,
        id: WeightsId,
        layer: LayerId,
        tile: TileId,
        weights: Weights,
    ) -> Result<(), DeviceError> {
        if layer.index() >= self.table.len() {
            return Err(unknown("layer", u64::from(layer.0)));
        }
        let tile =
            self.table.tile(layer, tile).ok_or(unknown("tile of the layer", u64::from(layer.0)))?;
        check_bytes("a tile of weights", weights.len() * 4, tile.f32_bytes())?;
        let (unused, ready) = (Some(weights), None);
        self.weights.insert(id, Bound { layer, tile, unused, ready });
        Ok(())
    }

    /// Brings weights into the form that the loops want.
    fn prepare(&mut self, id: WeightsId) -> Result<(), DeviceError> {
        let Some(bound) = self.weights.get_mut(&id) else { return Ok(()) };
        let Some(weights) = bound.unused.take() else { return Ok(()) };
        let source = self.table.layer(bound.tile.source);
        let ready = Ready::new(self.dtype, weights, &bound.tile, source, &self.budget)?;
        bound.ready = Some(ready);
        Ok(())
    }

    fn put(&mut self, id: TensorId, bytes: HostBytes) -> Result<(), DeviceError> {
        check_bytes("a tensor", bytes.len(), bytes.len() / 4 * 4)?;
        self.kept.remove(&id);
        self.tensors.insert(id, bytes);
        Ok(())
    }

    fn embed(&mut self, rows: &Weights, index: &[u32], y: TensorId) -> Result<(), DeviceError> {
        let width = self.config.hidden_size;
        let count = rows.len() / width;
        check_bytes("embedding rows", rows.len() * 4, count * width * 4)?;
        check_tokens(index.iter().copied(), count)?;
        let mut block = self.tensor(index.len())?;
        for (to, &i) in block.f32s_mut().chunks_exact_mut(width).zip(index) {
            rows.copy_f32(i as usize * width, to);
        }
        if self.dtype == ComputeDtype::Bf16 {
            let round = |value: &mut f32| *value = from_bf16(to_bf16(*value));
            block.f32s_mut().iter_mut().for_each(round);
        }
        self.tensors.insert(y, block);
        Ok(())
    }

    fn forward(
        &mut self,
        weights: WeightsId,
        shape: MicroShape,
        x: TensorId,
        y: TensorId,
        keep: bool,
    ) -> Result<(), DeviceError> {
        check_rows(shape)?;
        self.check_tensor("input of a layer", x, shape.tokens())?;
        self.set_angles(shape);
        let bound = self.decoder_weights(weights)?;
        let mut output = self.tensor(shape.tokens())?;
        let layer = self.decoder(bound, shape);
        let inner = layer.forward(self.tensors[&x].f32s(), output.f32s_mut())?;
        let kept = ((bound.layer, bound.tile.id), inner);
        if keep {
            self.kept.insert(x, kept);
        }
        self.tensors.insert(y, output);
        Ok(())
    }

    fn backward(
        &mut self,
        weights: WeightsId,
        shape: MicroShape,
        (x, dy, dx): (TensorId, TensorId, Option<TensorId>),
        gradient: bool,
    ) -> Result<(), DeviceError> {
        check_rows(shape)?;
        self.check_tensor("input of a layer", x, shape.tokens())?;
        self.check_tensor("gradient of a layer's output", dy, shape.tokens())?;
        self.set_angles(shape);
        let tile = self.decoder_weights(weights)?.tile.clone();
        let mut sink = if gradient { Some(self.dense_gradient(&tile)?) } else { None };
        let result = self.backward_into(weights, shape, (x, dy, dx), sink.as_mut());
        if let Some(dense) = sink {
            self.keep_gradient(&tile, dense);
        }
        result
    }

    fn backward_into(
        &mut self,
        weights: WeightsId,
        shape: MicroShape,
        (x, dy, dx): (TensorId, TensorId, Option<TensorId>),
        dense: Option<&mut Dense>,
    ) -> Result<(), DeviceError> {
        let kept = self.kept.remove(&x);
        let x = self.take(x)?;
        let dy = self.take(dy)?;
        let mut dy = self.writable(dy)?;
        let bound = self.decoder_weights(weights)?;
        let layer = self.decoder(bound, shape);
        let inner = match kept {
            Some((kept, inner)) if kept == (bound.layer, bound.tile.id) => inner,
            _ => layer.inner(x.f32s())?,
        };
        let sink = dense.map(|dense| {
            let (values, accum) = dense.contribute();
            Sink { values, accum }
        });
        layer.backward(x.f32s(), inner, dy.f32s_mut(), sink, dx.is_some())?;
        if let Some(dx) = dx {
            self.tensors.insert(dx, dy);
        }
        Ok(())
    }

    fn head_norm(
        &mut self,
        weights: WeightsId,
        x: TensorId,
        h: TensorId,
    ) -> Result<(), DeviceError> {
        let w = self.final_norm(weights)?;
        let tokens = self.tokens_of(x)?;
        let mut output = self.tensor(tokens)?;
        let mut rstd = self.budget.block(tokens * 4)?;
        let (x, eps) = (&self.tensors[&x], self.config.norm_eps as f32);
        rows::norm(x.f32s(), w.norm(), eps, output.f32s_mut(), rstd.f32s_mut());
        self.tensors.insert(h, output);
        Ok(())
    }

    fn head_score(
        &mut self,
        o: &HeadOperands,
        labels: &[u32],
        keep: bool,
    ) -> Result<(), DeviceError> {
        let TileSpec { id, vocabulary: tile, .. } = self.vocabulary_tile(o.weights)?.tile.clone();
        self.check_labels(labels)?;
        self.check_tensor("input of the head", o.h, labels.len())?;
        let mut stats = if tile.start == 0 {
            self.logits.retain(|(stats, _), _| *stats != o.stats);
            let mut stats = HostBytes::zeroed(labels.len() * STATS * 4);
            head::clear_stats(stats.f32s_mut());
            stats
        } else {
            self.check_stats(o.stats, labels)?;
            self.take(o.stats)?
        };
        let logits = self.tile_logits(o)?;
        head::score(logits.f32s(), labels, &tile, stats.f32s_mut());
        if keep {
            self.logits.insert((o.stats, id), logits);
        } else {
            self.logits.remove(&(o.stats, id));
        }
        self.tensors.insert(o.stats, stats);
        Ok(())
    }

    fn head_loss(&self, stats: TensorId, labels: &[u32]) -> Result<Outcome, DeviceError> {
        self.check_labels(labels)?;
        self.check_stats(stats, labels)?;
        Ok(Outcome::Loss(head::loss(self.tensors[&stats].f32s(), labels)))
    }

    fn head_backward(
        &mut self,
        o: &HeadOperands,
        labels: &[u32],
        dh: TensorId,
        scale: f32,
        gradient: bool,
    ) -> Result<(), DeviceError> {
        let tile = self.vocabulary_tile(o.weights)?.tile.clone();
        let tokens = labels.len();
        self.check_labels(labels)?;
        self.check_tensor("input of the head", o.h, tokens)?;
        self.check_stats(o.stats, labels)?;
        let (dh_block, accum) = if self.tensors.contains_key(&dh) {
            self.check_tensor("gradient of the head's input", dh, tokens)?;
            let block = self.take(dh)?;
            (self.writable(block)?, Accum::Add)
        } else {
            (self.tensor(tokens)?, Accum::Replace)
        };
        let mut dh_block = dh_block;
        let mut dlogits = match self.logits.remove(&(o.stats, tile.id)) {
            Some(logits) => logits,
            None => self.tile_logits(o)?,
        };
        let stats = self.tensors[&o.stats].f32s();
        head::gradient(dlogits.f32s_mut(), labels, &tile.vocabulary, stats, scale);
        let w = self.vocabulary_tile(o.weights)?.matrix();
        let (to, columns) = (dh_block.f32s_mut(), tile.vocabulary.len());
        self.dtype.nn(to, accum, dlogits.f32s(), w, columns);
        self.tensors.insert(dh, dh_block);
        if gradient {
            let mut dense = self.dense_gradient(&tile)?;
            let (values, accum) = dense.contribute();
            let h = self.tensors[&o.h].f32s();
            self.dtype.tn(values, accum, dlogits.f32s(), h, tokens);
            self.keep_gradient(&tile, dense);
        }
        Ok(())
    }

    fn head_norm_backward(
        &mut self,
        weights: WeightsId,
        (x, dh, dx): (TensorId, TensorId, Option<TensorId>),
        gradient: bool,
    ) -> Result<(), DeviceError> {
        let tile = self.final_norm(weights)?.tile.clone();
        let tokens = self.tokens_of(x)?;
        self.check_tensor("gradient of the head's input", dh, tokens)?;
        let (x, dh) = (self.take(x)?, self.take(dh)?);
        let hidden = self.config.hidden_size;
        let mut output = self.tensor(tokens)?;
        let mut rstd = self.budget.block(tokens * 4)?;
        let mut partials = self.budget.block(partial_count(tokens) * hidden * 4)?;
        let w = self.final_norm(weights)?.norm();
        let (eps, x, dh) = (self.config.norm_eps as f32, x.f32s(), dh.f32s());
        rows::norm(x, w, eps, output.f32s_mut(), rstd.f32s_mut());
        let to = (output.f32s_mut(), Accum::Replace);
        rows::norm_backward(dh, x, w, rstd.f32s(), to, partials.f32s_mut());
        if gradient {
            let mut dense = self.dense_gradient(&tile)?;
            let (values, accum) = dense.contribute();
            rows::fold_partials(partials.f32s(), accum, values);
            self.keep_gradient(&tile, dense);
        }
        if let Some(dx) = dx {
            self.tensors.insert(dx, output);
        }
        Ok(())
    }

    fn logits(
        &self,
        weights: WeightsId,
        h: TensorId,
        token: usize,
    ) -> Result<Outcome, DeviceError> {
        let bound = self.vocabulary_tile(weights)?;
        let hidden = self.config.hidden_size;
        if token >= self.tokens_of(h)? {
            return Err(unknown("position", token as u64));
        }
        let h = &self.tensors[&h].f32s()[token * hidden..][..hidden];
        let mut logits = vec![0.0; bound.tile.vocabulary.len()];
        self.dtype.nt(&mut logits, Accum::Replace, h, bound.matrix(), hidden);
        Ok(Outcome::Logits(logits))
    }

    fn embed_backward(&mut self, tokens: &[u32], dy: TensorId) -> Result<(), DeviceError> {
        self.check_tensor("gradient of the embedding's output", dy, tokens.len())?;
        check_tokens(tokens.iter().copied(), self.config.vocab_size)?;
        let dy = self.take(dy)?;
        let width = self.config.hidden_size;
        let rows = self.rows.get_or_insert_with(|| RowGradient::new(width));
        rows.add(&self.budget, tokens, dy.f32s())
    }

    fn take_gradient(
        &mut self,
        layer: LayerId,
        elements: &Range<usize>,
    ) -> Result<Gradient, DeviceError> {
        let missing = unknown("gradient of layer", u64::from(layer.0));
        let known = self.dense.get(&(layer, elements.start));
        if known.is_some_and(|dense| dense.elements() != elements) {
            return Err(missing);
        }
        Ok(self.dense.remove(&(layer, elements.start)).ok_or(missing)?.take())
    }

    /// Removes the gradient that the tile adds to, or starts one; the caller puts it back.
    fn dense_gradient(&mut self, tile: &TileSpec) -> Result<Dense, DeviceError> {
        match self.dense.remove(&(tile.source, tile.elements.start)) {
            Some(dense) => Ok(dense),
            None => Dense::new(&self.budget, tile.elements.clone()),
        }
    }

    fn keep_gradient(&mut self, tile: &TileSpec, dense: Dense) {
        self.dense.insert((tile.source, tile.elements.start), dense);
    }

    fn decoder<'a>(&'a self, bound: &'a Bound, shape: MicroShape) -> Decoder<'a> {
        Decoder {
            config: &self.config,
            spec: self.table.layer(bound.layer),
            tile: &bound.tile,
            w: bound.ready(),
            dtype: self.dtype,
            shape,
            angles: &self.angles,
            budget: &self.budget,
        }
    }

    /// Logits `[T, Vtile]`.
    fn tile_logits(&self, o: &HeadOperands) -> Result<HostBytes, DeviceError> {
        let bound = self.vocabulary_tile(o.weights)?;
        let h = self.tensors.get(&o.h).ok_or(unknown("tensor", o.h.0))?.f32s();
        let hidden = self.config.hidden_size;
        let mut logits = self.budget.block(h.len() / hidden * bound.tile.vocabulary.len() * 4)?;
        self.dtype.nt(logits.f32s_mut(), Accum::Replace, h, bound.matrix(), hidden);
        Ok(logits)
    }

    fn set_angles(&mut self, shape: MicroShape) {
        if self.angles.seq_len != shape.seq_len {
            self.angles = Angles::new(&self.config.rope_frequencies(), shape.seq_len);
        }
    }

    /// An uninitialised `[tokens, D]`.
    fn tensor(&self, tokens: usize) -> Result<HostBytes, DeviceError> {
        Ok(self.budget.block(tokens * self.config.hidden_size * 4)?)
    }

    fn writable(&self, bytes: HostBytes) -> Result<HostBytes, DeviceError> {
        if bytes.is_writable() {
            return Ok(bytes);
        }
        let mut copy = self.budget.block(bytes.len())?;
        rows::copy(bytes.f32s(), copy.f32s_mut());
        Ok(copy)
    }

    fn take(&mut self, id: TensorId) -> Result<HostBytes, DeviceError> {
        self.tensors.remove(&id).ok_or(unknown("tensor", id.0))
    }

    fn bound(&self, id: WeightsId) -> Result<&Bound, DeviceError> {
        self.weights.get(&id).ok_or(unknown("weights", id.0))
    }

    fn decoder_weights(&self, id: WeightsId) -> Result<&Bound, DeviceError> {
        let bound = self.bound(id)?;
        let kind = self.table.layer(bound.layer).kind;
        if kind == LayerKind::Decoder { Ok(bound) } else { Err(unknown("decoder weights", id.0)) }
    }

    fn final_norm(&self, id: WeightsId) -> Result<&Bound, DeviceError> {
        let bound = self.bound(id)?;
        let fits = bound.layer == self.table.head() && bound.tile.id == TileId(0);
        if fits { Ok(bound) } else { Err(unknown("final norm weights", id.0)) }
    }

    fn vocabulary_tile(&self, id: WeightsId) -> Result<&Bound, DeviceError> {
        let bound = self.bound(id)?;
        let fits = bound.layer == self.table.head() && bound.tile.id != TileId(0);
        if fits { Ok(bound) } else { Err(unknown("vocabulary tile", id.0)) }
    }

    /// T of a tensor `[T, D]`.
    fn tokens_of(&self, id: TensorId) -> Result<usize, DeviceError> {
        let len = self.tensors.get(&id).ok_or(unknown("tensor", id.0))?.len();
        let row = self.config.hidden_size * 4;
        check_bytes("a tensor", len, len / row * row)?;
        Ok(len / row)
    }

    fn check_tensor(
        &self,
        what: &'static str,
        id: TensorId,
        tokens: usize,
    ) -> Result<(), DeviceError> {
        let len = self.tensors.get(&id).ok_or(unknown("tensor", id.0))?.len();
        check_bytes(what, len, tokens * self.config.hidden_size * 4)
    }

    fn check_stats(&self, id: TensorId, labels: &[u32]) -> Result<(), DeviceError> {
        let len = self.tensors.get(&id).ok_or(unknown("head statistics", id.0))?.len();
        check_bytes("head statistics", len, labels.len() * STATS * 4)
    }

    fn check_labels(&self, labels: &[u32]) -> Result<(), DeviceError> {
        check_bytes("labels of a microbatch", labels.len(), labels.len().max(1))?;
        check_tokens(labels.iter().copied().filter(|l| *l != NO_TARGET), self.config.vocab_size)
    }
}

fn unknown(what: &'static str, id: u64) -> DeviceError {
    DeviceError::Unknown { what, id }
}

fn check_bytes(what: &'static str, got: usize, expected: usize) -> Result<(), DeviceError> {
    if got == expected { Ok(()) } else { Err(DeviceError::Shape { what, got, expected }) }
}

/// A microbatch has at least one token.
fn check_rows(shape: MicroShape) -> Result<(), DeviceError> {
    let got = shape.tokens();
    check_bytes("tokens of a microbatch", got, got.max(1))
}

fn check_tokens(
    mut tokens: impl Iterator<Item = u32>,
    vocab_size: usize,
) -> Result<(), DeviceError> {
    match tokens.find(|token| *token as usize >= vocab_size) {
        Some(token) => Err(DeviceError::Token { token, vocab_size }),
        None => Ok(()),
    }
}
