//! A decoder layer, or one of its two residual blocks: forward, and the backward written out by hand.
//!
//! Invariants:
//! - `backward` reads [`Inner`] only, so kept and recomputed activations give the same bits;
//! - a layer computes what its blocks compute one after the other: however it is tiled, the bits
//!   are the same;
//! - query, key and value (and gate and up) lie back to back in the layer's block and are one
//!   product each, in both directions.
//!
//! Letters: Q = (H + 2G) * K, the width of `qkv`.

use std::ops::Range;

use model::{Budget, HostBytes, LayerSpec, ModelConfig, Role, TileSpec, Tiling};

use super::bound::Ready;
use crate::attention::Attention;
use crate::product::{Accum, ComputeDtype, Values};
use crate::rows::{self, Angles, HeadNorms, Heads, partial_count};
use crate::{DeviceError, MicroShape};

/// Elements of a decoder layer's activations.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    tokens: usize,
    hidden: usize,
    ffn: usize,
    query: usize,
    qkv: usize,
    /// (H + G) * K if the model has head norms
    raw: usize,
    heads: usize,
    head_dim: usize,
}

impl Sizes {
    pub(super) fn new(config: &ModelConfig, shape: MicroShape) -> Sizes {
        let (query, kv) = (config.query_width(), config.kv_width());
        Sizes {
            tokens: shape.tokens(),
            hidden: config.hidden_size,
            ffn: config.intermediate_size,
            query,
            qkv: query + 2 * kv,
            raw: if config.qk_norm { query + kv } else { 0 },
            heads: config.heads,
            head_dim: config.head_dim,
        }
    }

    /// Most elements of an [`Inner`].
    pub(super) fn kept(&self, tiling: Tiling) -> usize {
        match tiling {
            Tiling::Whole => {
                self.attention_inner() + self.tokens * self.hidden + self.feed_forward_inner()
            }
            Tiling::Blocks => self.attention_inner().max(self.feed_forward_inner()),
        }
    }

    fn attention_inner(&self) -> usize {
        self.tokens * (self.qkv + self.raw + self.query + self.heads + 1)
    }

    fn feed_forward_inner(&self) -> usize {
        self.tokens * (2 * self.ffn + 1)
    }

    /// Most elements that a forward allocates beside its result.
    pub(super) fn forward(&self, tiling: Tiling) -> usize {
        let feed_forward = self.tokens * self.hidden.max(self.ffn);
        match tiling {
            Tiling::Whole => self.kept(tiling) + feed_forward,
            Tiling::Blocks => {
                let attention = self.attention_inner() + self.tokens * self.hidden;
                attention.max(self.feed_forward_inner() + feed_forward)
            }
        }
    }

    /// Most elements that a backward allocates beside gradients and its result, kept or not.
    pub(super) fn backward(&self, tiling: Tiling) -> usize {
        // What attention keeps stays while the feed-forward block has its turn.
        let below = match tiling {
            Tiling::Whole => self.attention_inner() + self.tokens * self.hidden,
            Tiling::Blocks => 0,
        };
        let feed_forward =
            below + self.feed_forward_inner() + self.tokens * self.ffn.max(self.hidden);
        let attention = self.attention_inner() + self.tokens * (self.query + self.qkv);
        let projections = self.tokens * (self.raw + 2 + self.qkv + self.hidden);
        feed_forward.max(attention).max(projections) + self.partials()
    }

    fn partials(&self) -> usize {
        let width = self.qkv.max(2 * self.ffn).max(self.hidden).max(2 * self.head_dim);
        partial_count(self.tokens) * width
    }
}

/// Activations inside what is bound that its backward reads.
#[derive(Debug)]
pub(super) enum Inner {
    /// `middle [T, D]`: after attention
    Whole {
        attention: AttentionInner,
        middle: HostBytes,
        feed_forward: FeedForwardInner,
    },
    Attention(AttentionInner),
    FeedForward(FeedForwardInner),
}

/// Of the attention block.
#[derive(Debug)]
pub(super) struct AttentionInner {
    /// `[T]`
    rstd: HostBytes,
    /// `[T, (H+G)*K]`: queries and keys before their norm, only if the model has one.
    raw: HostBytes,
    /// `[T, Q]`, rotated
    qkv: HostBytes,
    /// `[T, H*K]`
    o: HostBytes,
    /// `[B, H, S]`
    lse: HostBytes,
}

/// Of the feed-forward block.
#[derive(Debug)]
pub(super) struct FeedForwardInner {
    /// `[T]`
    rstd: HostBytes,
    /// `[T, 2F]`
    gate_up: HostBytes,
}

/// Which of a layer's blocks are bound.
#[derive(Clone, Copy)]
enum Blocks {
    Both,
    Attention,
    FeedForward,
}

/// A decoder layer, or a block of it, bound to its weights for one command.
#[derive(Clone, Copy)]
pub(super) struct Decoder<'a> {
    pub(super) config: &'a ModelConfig,
    pub(super) spec: &'a LayerSpec,
    /// What of the layer is bound.
    pub(super) tile: &'a TileSpec,
    pub(super) w: &'a Ready,
    pub(super) dtype: ComputeDtype,
    pub(super) shape: MicroShape,
    pub(super) angles: &'a Angles,
    pub(super) budget: &'a Budget,
}

/// Where the gradient of what is bound goes.
pub(super) struct Sink<'g> {
    pub(super) values: &'g mut [f32],
    pub(super) accum: Accum,
}

impl Decoder<'_> {
    /// Reads `x [T, D]`, writes `y [T, D]`.
    pub(super) fn forward(&self, x: &[f32], y: &mut [f32]) -> Result<Inner, DeviceError> {
        let inner = self.inner(x)?;
        match &inner {
            Inner::Whole { middle, feed_forward, .. } => {
                self.project_down(feed_forward, middle.f32s(), y)?;
            }
            Inner::Attention(attention) => self.project_out(attention, x, y),
            Inner::FeedForward(feed_forward) => self.project_down(feed_forward, x, y)?,
        }
        Ok(inner)
    }

    /// Everything that backward reads, of `x [T, D]`.
    pub(super) fn inner(&self, x: &[f32]) -> Result<Inner, DeviceError> {
        match self.blocks() {
            Blocks::Attention => Ok(Inner::Attention(self.attend(x)?)),
            Blocks::FeedForward => Ok(Inner::FeedForward(self.gate(x)?)),
            Blocks::Both => {
                let attention = self.attend(x)?;
                let mut middle = self.block(self.sizes().hidden)?;
                self.project_out(&attention, x, middle.f32s_mut());
                let feed_forward = self.gate(middle.f32s())?;
                Ok(Inner::Whole { attention, middle, feed_forward })
            }
        }
    }

    /// Turns `dy [T, D]` into dx in place; without `want_dx` its contents are of no use afterwards.
    pub(super) fn backward(
        &self,
        x: &[f32],
        inner: Inner,
        dy: &mut [f32],
        mut sink: Option<Sink<'_>>,
        want_dx: bool,
    ) -> Result<(), DeviceError> {
        match inner {
            Inner::Whole { attention, middle, feed_forward } => {
                self.feed_forward_backward(middle.f32s(), feed_forward, dy, sink.as_mut())?;
                drop(middle);
                self.attention_backward(x, attention, dy, sink, want_dx)
            }
            Inner::Attention(attention) => self.attention_backward(x, attention, dy, sink, want_dx),
            Inner::FeedForward(feed_forward) => {
                self.feed_forward_backward(x, feed_forward, dy, sink.as_mut())
            }
        }
    }

    /// The attention block up to its output projection.
    fn attend(&self, x: &[f32]) -> Result<AttentionInner, DeviceError> {
        let s = self.sizes();
        let mut h = self.block(s.hidden)?;
        let mut rstd = self.block(1)?;
        rows::norm(x, self.vector(Role::AttentionNorm), self.eps(), h.f32s_mut(), rstd.f32s_mut());
        let mut qkv = self.block(s.qkv)?;
        let w = self.weights(Role::Query, Role::Value);
        self.dtype.nt(qkv.f32s_mut(), Accum::Replace, h.f32s(), w, s.hidden);
        drop(h);
        self.bias(qkv.f32s_mut(), Role::QueryBias, Role::ValueBias);
        let mut raw = self.block(s.raw)?;
        if s.raw > 0 {
            copy_columns(qkv.f32s(), s.qkv, raw.f32s_mut(), s.raw);
        }
        rows::rotate(qkv.f32s_mut(), self.heads(), self.angles);
        let mut o = self.block(s.query)?;
        let mut lse = self.block(s.heads)?;
        self.attention().forward(qkv.f32s(), o.f32s_mut(), lse.f32s_mut());
        Ok(AttentionInner { rstd, raw, qkv, o, lse })
    }

    /// `y = x + o Wo^T`
    fn project_out(&self, inner: &AttentionInner, x: &[f32], y: &mut [f32]) {
        rows::copy(x, y);
        let (o, w) = (inner.o.f32s(), self.weight(Role::Output));
        self.dtype.nt(y, Accum::Add, o, w, self.sizes().query);
        self.bias(y, Role::OutputBias, Role::OutputBias);
    }

    /// The feed-forward block up to gate and up.
    fn gate(&self, x: &[f32]) -> Result<FeedForwardInner, DeviceError> {
        let s = self.sizes();
        let mut h = self.block(s.hidden)?;
        let mut rstd = self.block(1)?;
        let w = self.vector(Role::FeedForwardNorm);
        rows::norm(x, w, self.eps(), h.f32s_mut(), rstd.f32s_mut());
        let mut gate_up = self.block(2 * s.ffn)?;
        let w = self.weights(Role::Gate, Role::Up);
        self.dtype.nt(gate_up.f32s_mut(), Accum::Replace, h.f32s(), w, s.hidden);
        self.bias(gate_up.f32s_mut(), Role::GateBias, Role::UpBias);
        Ok(FeedForwardInner { rstd, gate_up })
    }

    /// `y = x + swiglu(gate, up) Wd^T`
    fn project_down(
        &self,
        inner: &FeedForwardInner,
        x: &[f32],
        y: &mut [f32],
    ) -> Result<(), DeviceError> {
        let ffn = self.sizes().ffn;
        let mut a = self.block(ffn)?;
        rows::swiglu(inner.gate_up.f32s(), a.f32s_mut(), ffn);
        rows::copy(x, y);
        self.dtype.nt(y, Accum::Add, a.f32s(), self.weight(Role::Down), ffn);
        self.bias(y, Role::DownBias, Role::DownBias);
        Ok(())
    }

    fn attention_backward(
        &self,
        x: &[f32],
        inner: AttentionInner,
        dy: &mut [f32],
        mut sink: Option<Sink<'_>>,
        want_dx: bool,
    ) -> Result<(), DeviceError> {
        let AttentionInner { rstd, raw, qkv, o, lse } = inner;
        let s = self.sizes();
        let mut d_o = self.block(s.query)?;
        self.dtype.nn(d_o.f32s_mut(), Accum::Replace, dy, self.weight(Role::Output), s.hidden);
        self.weight_gradient(sink.as_mut(), Role::Output, Role::Output, dy, o.f32s());
        self.bias_gradient(sink.as_mut(), Role::OutputBias, Role::OutputBias, dy)?;

        let mut dqkv = self.block(s.qkv)?;
        let attention = self.attention();
        attention.backward(qkv.f32s(), o.f32s(), lse.f32s(), d_o.f32s(), dqkv.f32s_mut());
        drop((qkv, o, lse, d_o));
        self.rotation_backward(dqkv.f32s_mut(), raw.f32s(), sink.as_mut())?;
        if sink.is_none() && !want_dx {
            return Ok(());
        }

        let mut h = self.block(s.hidden)?;
        let w = self.vector(Role::AttentionNorm);
        rows::norm_again(x, w, rstd.f32s(), h.f32s_mut());
        self.weight_gradient(sink.as_mut(), Role::Query, Role::Value, dqkv.f32s(), h.f32s());
        self.bias_gradient(sink.as_mut(), Role::QueryBias, Role::ValueBias, dqkv.f32s())?;
        // `h` is free now: it becomes its own gradient.
        let mut dh = h;
        let w = self.weights(Role::Query, Role::Value);
        self.dtype.nn(dh.f32s_mut(), Accum::Replace, dqkv.f32s(), w, s.qkv);
        self.norm_backward(sink.as_mut(), Role::AttentionNorm, dh.f32s(), x, rstd.f32s(), dy)
    }

    fn feed_forward_backward(
        &self,
        x: &[f32],
        inner: FeedForwardInner,
        dy: &mut [f32],
        mut sink: Option<&mut Sink<'_>>,
    ) -> Result<(), DeviceError> {
        let FeedForwardInner { rstd, mut gate_up } = inner;
        let s = self.sizes();
        let mut a = self.block(s.ffn)?;
        self.dtype.nn(a.f32s_mut(), Accum::Replace, dy, self.weight(Role::Down), s.hidden);
        rows::swiglu_backward(gate_up.f32s_mut(), a.f32s_mut(), s.ffn);
        self.weight_gradient(sink.as_deref_mut(), Role::Down, Role::Down, dy, a.f32s());
        self.bias_gradient(sink.as_deref_mut(), Role::DownBias, Role::DownBias, dy)?;
        drop(a);

        let dgate_up = gate_up.f32s();
        let mut h = self.block(s.hidden)?;
        let w = self.vector(Role::FeedForwardNorm);
        rows::norm_again(x, w, rstd.f32s(), h.f32s_mut());
        self.weight_gradient(sink.as_deref_mut(), Role::Gate, Role::Up, dgate_up, h.f32s());
        self.bias_gradient(sink.as_deref_mut(), Role::GateBias, Role::UpBias, dgate_up)?;
        let mut dh = h;
        let w = self.weights(Role::Gate, Role::Up);
        self.dtype.nn(dh.f32s_mut(), Accum::Replace, dgate_up, w, 2 * s.ffn);
        self.norm_backward(sink, Role::FeedForwardNorm, dh.f32s(), x, rstd.f32s(), dy)
    }

    fn rotation_backward(
        &self,
        dqkv: &mut [f32],
        raw: &[f32],
        sink: Option<&mut Sink<'_>>,
    ) -> Result<(), DeviceError> {
        let width = if self.config.qk_norm { 2 * self.config.head_dim } else { 0 };
        let mut partials = self.partials(width)?;
        rows::rotate_backward(dqkv, raw, self.heads(), self.angles, partials.f32s_mut());
        let Some(sink) = sink.filter(|_| width > 0) else { return Ok(()) };
        let range = self.range(Role::QueryNorm, Role::KeyNorm);
        rows::fold_partials(partials.f32s(), sink.accum, &mut sink.values[range]);
        Ok(())
    }

    /// Adds the norm's backward to `dx` and its weight's gradient to the sink.
    fn norm_backward(
        &self,
        sink: Option<&mut Sink<'_>>,
        role: Role,
        dh: &[f32],
        x: &[f32],
        rstd: &[f32],
        dx: &mut [f32],
    ) -> Result<(), DeviceError> {
        let mut partials = self.partials(self.config.hidden_size)?;
        let w = self.vector(role);
        rows::norm_backward(dh, x, w, rstd, (dx, Accum::Add), partials.f32s_mut());
        if let Some(sink) = sink {
            let range = self.range(role, role);
            rows::fold_partials(partials.f32s(), sink.accum, &mut sink.values[range]);
        }
        Ok(())
    }

    /// Gradient `dy^T x` of the tensors from `first` to `last`.
    fn weight_gradient(
        &self,
        sink: Option<&mut Sink<'_>>,
        first: Role,
        last: Role,
        dy: &[f32],
        x: &[f32],
    ) {
        let Some(sink) = sink else { return };
        let gradient = &mut sink.values[self.range(first, last)];
        self.dtype.tn(gradient, sink.accum, dy, x, self.shape.tokens());
    }

    fn bias_gradient(
        &self,
        sink: Option<&mut Sink<'_>>,
        first: Role,
        last: Role,
        dy: &[f32],
    ) -> Result<(), DeviceError> {
        let range = self.range(first, last);
        let Some(sink) = sink.filter(|_| !range.is_empty()) else { return Ok(()) };
        let mut partials = self.partials(range.len())?;
        rows::column_partials(dy, range.len(), partials.f32s_mut());
        rows::fold_partials(partials.f32s(), sink.accum, &mut sink.values[range]);
        Ok(())
    }

    fn bias(&self, y: &mut [f32], first: Role, last: Role) {
        let range = self.range(first, last);
        if !range.is_empty() {
            rows::add_bias(y, self.w.vector(range));
        }
    }

    fn vector(&self, role: Role) -> &[f32] {
        self.w.vector(self.range(role, role))
    }

    fn weight(&self, role: Role) -> Values<'_> {
        self.weights(role, role)
    }

    fn weights(&self, first: Role, last: Role) -> Values<'_> {
        self.w.matrix(self.range(first, last))
    }

    /// Elements of the tensors from `first` to `last` in what is bound; empty if the layer lacks
    /// them.
    fn range(&self, first: Role, last: Role) -> Range<usize> {
        let start = self.tile.elements.start;
        match (self.spec.tensor(first), self.spec.tensor(last)) {
            (Some(first), Some(last)) => first.range().start - start..last.range().end - start,
            _ => 0..0,
        }
    }

    fn blocks(&self) -> Blocks {
        let bound = |role| {
            let tensor = self.spec.tensor(role);
            tensor.is_some_and(|tensor| self.tile.elements.contains(&tensor.offset))
        };
        match (bound(Role::AttentionNorm), bound(Role::FeedForwardNorm)) {
            (true, false) => Blocks::Attention,
            (false, true) => Blocks::FeedForward,
            _ => Blocks::Both,
        }
    }

    fn sizes(&self) -> Sizes {
        Sizes::new(self.config, self.shape)
    }

    fn eps(&self) -> f32 {
        self.config.norm_eps as f32
    }

    fn heads(&self) -> Heads<'_> {
        let norms = self.config.qk_norm.then(|| HeadNorms {
            query: self.vector(Role::QueryNorm),
            key: self.vector(Role::KeyNorm),
            eps: self.eps(),
        });
        Heads {
            width: self.sizes().qkv,
            queries: self.config.heads,
            keys: self.config.kv_heads,
            head_dim: self.config.head_dim,
            norms,
        }
    }

    fn attention(&self) -> Attention {
        Attention {
            shape: self.shape,
            heads: self.config.heads,
            kv_heads: self.config.kv_heads,
            head_dim: self.config.head_dim,
        }
    }

    /// `[T, width]`
    fn block(&self, width: usize) -> Result<HostBytes, DeviceError> {
        Ok(self.budget.block(self.shape.tokens() * width * 4)?)
    }

    fn partials(&self, width: usize) -> Result<HostBytes, DeviceError> {
        Ok(self.budget.block(partial_count(self.shape.tokens()) * width * 4)?)
    }
}

/// The first `to_width` columns of `from [T, from_width]`.
fn copy_columns(from: &[f32], from_width: usize, to: &mut [f32], to_width: usize) {
    for (to, from) in to.chunks_exact_mut(to_width).zip(from.chunks_exact(from_width)) {
        to.copy_from_slice(&from[..to_width]);
    }
}
