//! Fused loops over token rows: RMSNorm, rotary embedding, SwiGLU, bias, and their gradients.
//!
//! Invariants:
//! - work is cut into blocks of [`ROW_BLOCK`] rows; a sum over tokens is one partial sum per block,
//!   then the partial sums in order: a fixed tree;
//! - buffers are `[T, width]`, row-major, without gaps.
//!
//! Formulas: RMSNorm (Zhang and Sennrich 2019), RoPE in Hugging Face's half-rotation layout (Su et
//! al. 2021), SwiGLU (Shazeer 2020).

use rayon::prelude::*;

use crate::product::Accum;
use crate::simd::{self, Kernel};

/// Rows that one task works on.
pub(crate) const ROW_BLOCK: usize = 32;

/// `y = x * rstd * w`, and `rstd = 1 / sqrt(mean(x^2) + eps)` into `rstd [T]`.
pub(crate) fn norm(x: &[f32], w: &[f32], eps: f32, y: &mut [f32], rstd: &mut [f32]) {
    let block = ROW_BLOCK * w.len();
    let tasks = y.par_chunks_mut(block).zip(rstd.par_chunks_mut(ROW_BLOCK));
    tasks.zip(x.par_chunks(block)).for_each(|((y, rstd), x)| {
        simd::run(RootMean { x, eps, rstd });
        simd::run(Scale { x, w, rstd, y });
    });
}

/// `y = x * rstd * w` with the `rstd` of an earlier [`norm`]: the same bits.
pub(crate) fn norm_again(x: &[f32], w: &[f32], rstd: &[f32], y: &mut [f32]) {
    let block = ROW_BLOCK * w.len();
    let tasks = y.par_chunks_mut(block).zip(rstd.par_chunks(ROW_BLOCK));
    tasks.zip(x.par_chunks(block)).for_each(|((y, rstd), x)| {
        simd::run(Scale { x, w, rstd, y });
    });
}

/// Backward of [`norm`]: `dx (+)= ...`, and one partial sum of dw per row block into `partials`.
pub(crate) fn norm_backward(
    dy: &[f32],
    x: &[f32],
    w: &[f32],
    rstd: &[f32],
    dx: (&mut [f32], Accum),
    partials: &mut [f32],
) {
    let block = ROW_BLOCK * w.len();
    let (dx, accum) = dx;
    let tasks = dx.par_chunks_mut(block).zip(partials.par_chunks_mut(w.len()));
    let operands = dy.par_chunks(block).zip(x.par_chunks(block)).zip(rstd.par_chunks(ROW_BLOCK));
    tasks.zip(operands).for_each(|((dx, dw), ((dy, x), rstd))| {
        dw.fill(0.0);
        let add = matches!(accum, Accum::Add);
        simd::run(NormBackward { dy, x, w, rstd, dx, add, dw });
    });
}

/// One partial column sum of `x [T, width]` per row block.
pub(crate) fn column_partials(x: &[f32], width: usize, partials: &mut [f32]) {
    let tasks = partials.par_chunks_mut(width).zip(x.par_chunks(ROW_BLOCK * width));
    tasks.for_each(|(sum, x)| {
        sum.fill(0.0);
        simd::run(ColumnSums { x, sum });
    });
}

/// Number of partial sums for `tokens` rows.
pub(crate) fn partial_count(tokens: usize) -> usize {
    tokens.div_ceil(ROW_BLOCK)
}

/// Adds partial sums up, in order, into a gradient.
pub(crate) fn fold_partials(partials: &[f32], accum: Accum, gradient: &mut [f32]) {
    let mut rows = partials.chunks_exact(gradient.len());
    if matches!(accum, Accum::Replace) {
        match rows.next() {
            Some(first) => gradient.copy_from_slice(first),
            None => gradient.fill(0.0),
        }
    }
    rows.for_each(|row| simd::run(AddTo { y: gradient, x: row }));
}

/// Adds `bias` to every row.
pub(crate) fn add_bias(y: &mut [f32], bias: &[f32]) {
    y.par_chunks_mut(ROW_BLOCK * bias.len()).for_each(|block| {
        block.chunks_exact_mut(bias.len()).for_each(|y| simd::run(AddTo { y, x: bias }));
    });
}

/// `y = x`, in parallel.
pub(crate) fn copy(x: &[f32], y: &mut [f32]) {
    const CHUNK: usize = 1 << 16;
    y.par_chunks_mut(CHUNK).zip(x.par_chunks(CHUNK)).for_each(|(y, x)| y.copy_from_slice(x));
}

/// `a [T, F] = silu(gate) * up` with `gate_up [T, 2F]`.
pub(crate) fn swiglu(gate_up: &[f32], a: &mut [f32], width: usize) {
    let tasks = a.par_chunks_mut(width).zip(gate_up.par_chunks(2 * width)).with_min_len(8);
    tasks.for_each(|(a, gate_up)| {
        let (gate, up) = gate_up.split_at(width);
        simd::run(SwiGlu { gate, up, a });
    });
}

/// In place: `gate_up` becomes its gradient, `da` becomes `a`.
pub(crate) fn swiglu_backward(gate_up: &mut [f32], da: &mut [f32], width: usize) {
    let tasks = da.par_chunks_mut(width).zip(gate_up.par_chunks_mut(2 * width)).with_min_len(8);
    tasks.for_each(|(a, gate_up)| {
        let (gate, up) = gate_up.split_at_mut(width);
        simd::run(SwiGluBackward { gate, up, a });
    });
}

/// Cosines and sines `[S, K/2]`, rounded to float32 from float64 angles.
#[derive(Debug)]
pub(crate) struct Angles {
    pub(crate) seq_len: usize,
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl Angles {
    /// Angles of positions `0..seq_len`; `frequencies [K/2]` as of `ModelConfig`.
    pub(crate) fn new(frequencies: &[f64], seq_len: usize) -> Angles {
        let angle = |position: usize| frequencies.iter().map(move |f| position as f64 * f);
        let all = || (0..seq_len).flat_map(angle);
        Angles {
            seq_len,
            cos: all().map(|a| a.cos() as f32).collect(),
            sin: all().map(|a| a.sin() as f32).collect(),
        }
    }

    fn row(&self, token: usize, half: usize) -> (&[f32], &[f32]) {
        let at = token % self.seq_len * half;
        (&self.cos[at..at + half], &self.sin[at..at + half])
    }
}

/// Where the query and key heads are in a row of `qkv [T, width]`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Heads<'w> {
    pub(crate) width: usize,
    /// H and G
    pub(crate) queries: usize,
    pub(crate) keys: usize,
    /// K
    pub(crate) head_dim: usize,
    pub(crate) norms: Option<HeadNorms<'w>>,
}

/// Weights `[K]` of the norms of query and key heads.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeadNorms<'w> {
    pub(crate) query: &'w [f32],
    pub(crate) key: &'w [f32],
    pub(crate) eps: f32,
}

impl Heads<'_> {
    /// (H + G) * K: width of a row's query and key part.
    pub(crate) fn rotated_width(&self) -> usize {
        (self.queries + self.keys) * self.head_dim
    }
}

/// Norm of every query and key head (if the model has one), then rotation, in place.
pub(crate) fn rotate(qkv: &mut [f32], heads: Heads<'_>, angles: &Angles) {
    qkv.par_chunks_mut(ROW_BLOCK * heads.width).enumerate().for_each(|(block, rows)| {
        for (i, row) in rows.chunks_exact_mut(heads.width).enumerate() {
            let (cos, sin) = angles.row(block * ROW_BLOCK + i, heads.head_dim / 2);
            simd::run(Rotate { row, heads, cos, sin });
        }
    });
}

/// Backward of [`rotate`] on `dqkv`, in place. With head norms, `raw [T, (H+G)*K]` is what
/// [`rotate`] was given and `partials [.., 2K]` gets sums of the two norms' weight gradients.
pub(crate) fn rotate_backward(
    dqkv: &mut [f32],
    raw: &[f32],
    heads: Heads<'_>,
    angles: &Angles,
    partials: &mut [f32],
) {
    let (n, rotated) = (heads.head_dim, heads.rotated_width());
    // Without norms nothing is summed: the blocks then get empty slices.
    let count = partial_count(dqkv.len() / heads.width);
    let mut sums: Vec<&mut [f32]> = partials.chunks_exact_mut(2 * n).collect();
    let mut raws: Vec<&[f32]> = raw.chunks(ROW_BLOCK * rotated).collect();
    sums.resize_with(count, || &mut []);
    raws.resize(count, &[]);
    let tasks = dqkv.par_chunks_mut(ROW_BLOCK * heads.width).zip(sums).zip(raws);
    tasks.enumerate().for_each(|(block, ((rows, dw), raw))| {
        dw.fill(0.0);
        for (i, row) in rows.chunks_exact_mut(heads.width).enumerate() {
            let (cos, sin) = angles.row(block * ROW_BLOCK + i, n / 2);
            let raw = if raw.is_empty() { raw } else { &raw[i * rotated..][..rotated] };
            simd::run(RotateBackward { row, raw, heads, cos, sin, dw });
        }
    });
}

struct RootMean<'a> {
    x: &'a [f32],
    eps: f32,
    rstd: &'a mut [f32],
}

impl Kernel for RootMean<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let n = self.x.len() / self.rstd.len();
        for (rstd, x) in self.rstd.iter_mut().zip(self.x.chunks_exact(n)) {
            *rstd = reciprocal_root_mean(x, self.eps);
        }
    }
}

#[inline(always)]
fn reciprocal_root_mean(x: &[f32], eps: f32) -> f32 {
    let squares = simd::sum([x], |[x]| x * x);
    1.0 / (squares / x.len() as f32 + eps).sqrt()
}

struct Scale<'a> {
    x: &'a [f32],
    w: &'a [f32],
    rstd: &'a [f32],
    y: &'a mut [f32],
}

impl Kernel for Scale<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let n = self.w.len();
        let rows = self.y.chunks_exact_mut(n).zip(self.x.chunks_exact(n));
        for ((y, x), &rstd) in rows.zip(self.rstd) {
            for ((y, x), w) in y.iter_mut().zip(x).zip(self.w) {
                *y = x * rstd * w;
            }
        }
    }
}

struct NormBackward<'a> {
    dy: &'a [f32],
    x: &'a [f32],
    w: &'a [f32],
    rstd: &'a [f32],
    dx: &'a mut [f32],
    add: bool,
    dw: &'a mut [f32],
}

impl Kernel for NormBackward<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let n = self.w.len();
        let rows = self.dx.chunks_exact_mut(n).zip(self.x.chunks_exact(n));
        for (((dx, x), dy), &rstd) in rows.zip(self.dy.chunks_exact(n)).zip(self.rstd) {
            let (dy, x, w) = (&dy[..n], &x[..n], &self.w[..n]);
            let inner = simd::sum([dy, w, x], |[dy, w, x]| dy * w * x) / n as f32;
            let pull = rstd * rstd * inner;
            for ((dw, dy), x) in self.dw.iter_mut().zip(dy).zip(x) {
                *dw += dy * x * rstd;
            }
            if self.add {
                for (((dx, dy), x), w) in dx.iter_mut().zip(dy).zip(x).zip(w) {
                    *dx += rstd * (dy * w - x * pull);
                }
            } else {
                for (((dx, dy), x), w) in dx.iter_mut().zip(dy).zip(x).zip(w) {
                    *dx = rstd * (dy * w - x * pull);
                }
            }
        }
    }
}

struct ColumnSums<'a> {
    x: &'a [f32],
    sum: &'a mut [f32],
}

impl Kernel for ColumnSums<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for row in self.x.chunks_exact(self.sum.len()) {
            self.sum.iter_mut().zip(row).for_each(|(s, x)| *s += x);
        }
    }
}

struct AddTo<'a> {
    y: &'a mut [f32],
    x: &'a [f32],
}

impl Kernel for AddTo<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        self.y.iter_mut().zip(self.x).for_each(|(y, x)| *y += x);
    }
}

struct SwiGlu<'a> {
    gate: &'a [f32],
    up: &'a [f32],
    a: &'a mut [f32],
}

impl Kernel for SwiGlu<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for ((a, &g), u) in self.a.iter_mut().zip(self.gate).zip(self.up) {
            *a = g * simd::sigmoid(g) * u;
        }
    }
}

struct SwiGluBackward<'a> {
    gate: &'a mut [f32],
    up: &'a mut [f32],
    a: &'a mut [f32],
}

impl Kernel for SwiGluBackward<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for ((a, gate), up) in self.a.iter_mut().zip(self.gate).zip(self.up) {
            let (da, g, u) = (*a, *gate, *up);
            let s = simd::sigmoid(g);
            let silu = g * s;
            *a = silu * u;
            *up = da * silu;
            *gate = da * u * s * (1.0 + g * (1.0 - s));
        }
    }
}

struct Rotate<'a> {
    row: &'a mut [f32],
    heads: Heads<'a>,
    cos: &'a [f32],
    sin: &'a [f32],
}

impl Kernel for Rotate<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let rotated = &mut self.row[..self.heads.rotated_width()];
        for (h, head) in rotated.chunks_exact_mut(self.heads.head_dim).enumerate() {
            if let Some(norms) = self.heads.norms {
                let w = if h < self.heads.queries { norms.query } else { norms.key };
                let rstd = reciprocal_root_mean(head, norms.eps);
                head.iter_mut().zip(w).for_each(|(x, w)| *x = *x * rstd * w);
            }
            let (a, b) = head.split_at_mut(self.cos.len());
            for (((a, b), cos), sin) in a.iter_mut().zip(b).zip(self.cos).zip(self.sin) {
                let (x, y) = (*a, *b);
                *a = x * cos - y * sin;
                *b = y * cos + x * sin;
            }
        }
    }
}

struct RotateBackward<'a> {
    row: &'a mut [f32],
    raw: &'a [f32],
    heads: Heads<'a>,
    cos: &'a [f32],
    sin: &'a [f32],
    dw: &'a mut [f32],
}

impl Kernel for RotateBackward<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let n = self.heads.head_dim;
        let rotated = &mut self.row[..self.heads.rotated_width()];
        for (h, head) in rotated.chunks_exact_mut(n).enumerate() {
            let (a, b) = head.split_at_mut(self.cos.len());
            for (((a, b), cos), sin) in a.iter_mut().zip(b).zip(self.cos).zip(self.sin) {
                let (x, y) = (*a, *b);
                *a = x * cos + y * sin;
                *b = y * cos - x * sin;
            }
            let Some(norms) = self.heads.norms else { continue };
            let (dq, dk) = self.dw.split_at_mut(n);
            let (w, dw) = if h < self.heads.queries { (norms.query, dq) } else { (norms.key, dk) };
            head_norm_backward(head, &self.raw[h * n..][..n], w, norms.eps, dw);
        }
    }
}

/// `dy` becomes `dx`.
#[inline(always)]
fn head_norm_backward(dy: &mut [f32], x: &[f32], w: &[f32], eps: f32, dw: &mut [f32]) {
    let n = w.len();
    let rstd = reciprocal_root_mean(x, eps);
    let inner = simd::sum([dy, w, x], |[dy, w, x]| dy * w * x) / n as f32;
    let pull = rstd * rstd * inner;
    for (((dy, x), w), dw) in dy.iter_mut().zip(x).zip(w).zip(dw) {
        *dw += *dy * x * rstd;
        *dy = rstd * (*dy * w - x * pull);
    }
}
