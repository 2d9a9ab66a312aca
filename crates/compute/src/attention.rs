//! Causal grouped-query attention in tiles: memory linear in S, no `[S, S]` matrix anywhere.
//!
//! Invariants:
//! - a task is a (row, head), in backward a (row, key head) that takes its query heads in order, so
//!   that bits do not depend on threads;
//! - the forward leaves one logsumexp per (row, head, query), from which the backward computes the
//!   probabilities again.
//!
//! Scheme: FlashAttention-2 (Dao 2023); softmax with a running maximum (Milakov and Gimelshein
//! 2018).

use std::cell::RefCell;
use std::ops::Range;

use rayon::prelude::*;

use crate::MicroShape;
use crate::product::{Accum, MatMut, MatRef, grid, tile};
use crate::simd::{self, Kernel};

/// Queries of a tile.
const QUERIES: usize = 64;
/// Keys of a tile: tile and operands stay in the second-level cache.
const KEYS: usize = 512;

/// Sizes of one attention call. A row of `qkv` is H query heads, G key heads, G value heads.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Attention {
    pub(crate) shape: MicroShape,
    /// H
    pub(crate) heads: usize,
    /// G
    pub(crate) kv_heads: usize,
    /// K
    pub(crate) head_dim: usize,
}

thread_local! {
    /// Tiles of one thread: outside the budget, at most 850 KiB.
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

#[derive(Default)]
struct Scratch {
    scores: Vec<f32>,
    other: Vec<f32>,
    output: Vec<f32>,
    /// Operands as the product's kernel wants them.
    packed: Vec<f32>,
    rows: [Vec<f32>; 2],
}

impl Scratch {
    fn size(&mut self, head_dim: usize) {
        self.scores.resize(QUERIES * KEYS, 0.0);
        self.other.resize(QUERIES * KEYS, 0.0);
        self.output.resize(QUERIES * head_dim, 0.0);
        self.rows.iter_mut().for_each(|rows| rows.resize(QUERIES, 0.0));
    }
}

impl Attention {
    /// `o [T, H*K]` and `lse [B, H, S]` from `qkv [T, (H+2G)*K]`.
    pub(crate) fn forward(&self, qkv: &[f32], o: &mut [f32], lse: &mut [f32]) {
        let (s, n) = (self.shape.seq_len, self.head_dim);
        let o = MatMut::new(o, self.shape.tokens(), self.heads * n);
        let tasks = grid(o, (s, n)).into_par_iter().zip(lse.par_chunks_mut(s)).with_max_len(1);
        tasks.for_each(|((first, column, o), lse)| {
            SCRATCH.with_borrow_mut(|scratch| {
                scratch.size(n);
                self.forward_head(self.row(qkv, first / s), column / n, o, lse, scratch);
            });
        });
    }

    /// `dqkv` from `d_o [T, H*K]` and what [`Attention::forward`] read and wrote.
    pub(crate) fn backward(
        &self,
        qkv: &[f32],
        o: &[f32],
        lse: &[f32],
        d_o: &[f32],
        dqkv: &mut [f32],
    ) {
        let s = self.shape.seq_len;
        let tasks: Vec<_> = dqkv
            .chunks_exact_mut(s * self.width())
            .enumerate()
            .flat_map(|(row, dqkv)| {
                self.split(dqkv).into_iter().enumerate().map(move |(group, d)| (row, group, d))
            })
            .collect();
        tasks.into_par_iter().with_max_len(1).for_each(|(row, group, d)| {
            let outputs = s * self.heads * self.head_dim;
            let operands = Operands {
                qkv: self.row(qkv, row),
                o: &o[row * outputs..][..outputs],
                d_o: &d_o[row * outputs..][..outputs],
                lse: &lse[row * s * self.heads..][..s * self.heads],
            };
            SCRATCH.with_borrow_mut(|scratch| {
                scratch.size(self.head_dim);
                self.backward_group(operands, group, d, scratch);
            });
        });
    }

    /// (H + 2G) * K
    pub(crate) fn width(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    fn row<'a>(&self, qkv: &'a [f32], row: usize) -> MatRef<'a> {
        let (s, width) = (self.shape.seq_len, self.width());
        MatRef::new(&qkv[row * s * width..][..s * width], s, width)
    }

    /// The gradients of one row's key heads and their query heads.
    fn split<'a>(&self, dqkv: &'a mut [f32]) -> Vec<GroupGradient<'a>> {
        let (g, n) = (self.kv_heads, self.head_dim);
        let all = MatMut::new(dqkv, self.shape.seq_len, self.width());
        let (q, kv) = all.split_at_col(self.heads * n);
        let (k, v) = kv.split_at_col(g * n);
        let whole = self.shape.seq_len;
        let q = grid(q, (whole, self.heads / g * n));
        let kv = grid(k, (whole, n)).into_iter().zip(grid(v, (whole, n)));
        q.into_iter()
            .zip(kv)
            .map(|((_, _, dq), ((_, _, dk), (_, _, dv)))| GroupGradient { dq, dk, dv })
            .collect()
    }

    fn key(&self, head: usize) -> usize {
        (self.heads + head / (self.heads / self.kv_heads)) * self.head_dim
    }

    fn value(&self, head: usize) -> usize {
        self.key(head) + self.kv_heads * self.head_dim
    }

    /// Some positions of the head whose first column is `column`.
    fn head<'a>(&self, qkv: MatRef<'a>, column: usize, rows: &Range<usize>) -> MatRef<'a> {
        qkv.subrows(rows.clone()).subcols(column..column + self.head_dim)
    }

    fn scale(&self) -> f32 {
        1.0 / (self.head_dim as f32).sqrt()
    }

    fn forward_head(
        &self,
        qkv: MatRef<'_>,
        head: usize,
        mut o: MatMut<'_>,
        lse: &mut [f32],
        scratch: &mut Scratch,
    ) {
        let n = self.head_dim;
        let (key, value) = (self.key(head), self.value(head));
        let Scratch { packed, rows: [tops, sums], .. } = scratch;
        for queries in ranges(lse.len(), QUERIES) {
            let count = queries.len();
            let q = self.head(qkv, head * n, &queries);
            let output = &mut scratch.output[..count * n];
            for keys in ranges(queries.end, KEYS) {
                let scores = &mut scratch.scores[..count * keys.len()];
                let (k, v) = (self.head(qkv, key, &keys), self.head(qkv, value, &keys));
                let (replace, scale) = (Accum::Replace, self.scale());
                tile(square(scores, count), replace, q, k.transpose(), scale, packed);
                let first = keys.start == 0;
                let visible = queries.start + 1 - keys.start;
                let (tops, sums) = (&mut tops[..count], &mut sums[..count]);
                simd::run(Softmax { scores, visible, first, tops, sums, output });
                let accum = if first { Accum::Replace } else { Accum::Add };
                let scores = MatRef::new(scores, count, keys.len());
                tile(square(output, count), accum, scores, v, 1.0, packed);
            }
            for (i, row) in output.chunks_exact(n).enumerate() {
                let to = o.row(queries.start + i);
                simd::run(Divide { x: row, by: sums[i], y: to });
                lse[queries.start + i] = tops[i] + sums[i].ln();
            }
        }
    }

    fn backward_group(
        &self,
        operands: Operands<'_>,
        group: usize,
        mut d: GroupGradient<'_>,
        scratch: &mut Scratch,
    ) {
        d.dk.fill(0.0);
        d.dv.fill(0.0);
        let members = self.heads / self.kv_heads;
        for member in 0..members {
            let columns = member * self.head_dim..(member + 1) * self.head_dim;
            let dq = d.dq.reborrow().subcols(columns);
            let head = group * members + member;
            let (dk, dv) = (d.dk.reborrow(), d.dv.reborrow());
            self.backward_head(operands, head, dq, (dk, dv), scratch);
        }
    }

    fn backward_head(
        &self,
        operands: Operands<'_>,
        head: usize,
        mut dq: MatMut<'_>,
        (mut dk, mut dv): (MatMut<'_>, MatMut<'_>),
        scratch: &mut Scratch,
    ) {
        let (s, n) = (self.shape.seq_len, self.head_dim);
        let (columns, width) = (head * n..head * n + n, self.heads * n);
        let lse = &operands.lse[head * s..][..s];
        let (key, value) = (self.key(head), self.value(head));
        let Scratch { scores, other, packed, rows: [deltas, _], .. } = scratch;
        for queries in ranges(s, QUERIES) {
            let (start, count) = (queries.start, queries.len());
            let q = self.head(operands.qkv, columns.start, &queries);
            let rows = start * width..queries.end * width;
            let (o, d_o) = (&operands.o[rows.clone()], &operands.d_o[rows]);
            let deltas = &mut deltas[..count];
            simd::run(RowDots { a: o, b: d_o, width, columns: columns.clone(), out: deltas });
            let d_o = MatRef::new(d_o, count, width).subcols(columns.clone());
            for keys in ranges(queries.end, KEYS) {
                let (from, len) = (keys.start, keys.len());
                let k = self.head(operands.qkv, key, &keys);
                let v = self.head(operands.qkv, value, &keys);
                let p = &mut scores[..count * len];
                let ds = &mut other[..count * len];
                let replace = Accum::Replace;
                tile(square(p, count), replace, q, k.transpose(), self.scale(), packed);
                tile(square(ds, count), replace, d_o, v.transpose(), 1.0, packed);
                let (visible, scale) = (start + 1 - from, self.scale());
                simd::run(SoftmaxBackward {
                    p,
                    ds,
                    visible,
                    lse: &lse[queries.clone()],
                    deltas,
                    scale,
                });
                let p = MatRef::new(p, count, len).transpose();
                let ds = MatRef::new(ds, count, len);
                let (dk, dv) = (dk.reborrow(), dv.reborrow());
                tile(dv.subrows(keys.clone()), Accum::Add, p, d_o, 1.0, packed);
                tile(dk.subrows(keys), Accum::Add, ds.transpose(), q, 1.0, packed);
                let accum = if from == 0 { Accum::Replace } else { Accum::Add };
                tile(dq.reborrow().subrows(queries.clone()), accum, ds, k, 1.0, packed);
            }
        }
    }
}

/// One row's share of the backward's inputs.
#[derive(Clone, Copy)]
struct Operands<'a> {
    qkv: MatRef<'a>,
    o: &'a [f32],
    d_o: &'a [f32],
    lse: &'a [f32],
}

/// `[S, K]` blocks of `dqkv`; `dq` has all query heads of the group.
struct GroupGradient<'a> {
    dq: MatMut<'a>,
    dk: MatMut<'a>,
    dv: MatMut<'a>,
}

/// `0..len` in pieces of `step`.
fn ranges(len: usize, step: usize) -> impl Iterator<Item = Range<usize>> {
    (0..len).step_by(step).map(move |start| start..(start + step).min(len))
}

fn square(values: &mut [f32], rows: usize) -> MatMut<'_> {
    let columns = values.len() / rows;
    MatMut::new(values, rows, columns)
}

/// Scores `[rows, keys]` to exponentials; row i sees its first `visible + i` keys, the others
/// become 0. Running maximum and sum per row; earlier `output [rows, K]` is rescaled.
struct Softmax<'a> {
    scores: &'a mut [f32],
    visible: usize,
    first: bool,
    tops: &'a mut [f32],
    sums: &'a mut [f32],
    output: &'a mut [f32],
}

impl Kernel for Softmax<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let keys = self.scores.len() / self.tops.len();
        let n = self.output.len() / self.tops.len();
        let rows = self.scores.chunks_exact_mut(keys).zip(self.output.chunks_exact_mut(n));
        for (i, (scores, output)) in rows.enumerate() {
            let (seen, hidden) = scores.split_at_mut((self.visible + i).min(keys));
            hidden.fill(0.0);
            let before = if self.first { f32::NEG_INFINITY } else { self.tops[i] };
            let here = simd::max(seen);
            let top = if here > before { here } else { before };
            seen.iter_mut().for_each(|s| *s = simd::exp(*s - top));
            let total = simd::sum([seen], |[p]| p);
            self.tops[i] = top;
            if self.first {
                self.sums[i] = total;
            } else {
                let factor = simd::exp(before - top);
                self.sums[i] = self.sums[i] * factor + total;
                output.iter_mut().for_each(|o| *o *= factor);
            }
        }
    }
}

/// `p`: scores to probabilities; `ds`: their gradient to the gradient of the unscaled scores.
struct SoftmaxBackward<'a> {
    p: &'a mut [f32],
    ds: &'a mut [f32],
    visible: usize,
    lse: &'a [f32],
    deltas: &'a [f32],
    scale: f32,
}

impl Kernel for SoftmaxBackward<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let keys = self.p.len() / self.lse.len();
        let rows = self.p.chunks_exact_mut(keys).zip(self.ds.chunks_exact_mut(keys));
        for (i, (p, ds)) in rows.enumerate() {
            let visible = (self.visible + i).min(keys);
            let (lse, delta) = (self.lse[i], self.deltas[i]);
            p[visible..].fill(0.0);
            ds[visible..].fill(0.0);
            for (p, ds) in p[..visible].iter_mut().zip(&mut ds[..visible]) {
                *p = simd::exp(*p - lse);
                *ds = *p * (*ds - delta) * self.scale;
            }
        }
    }
}

struct Divide<'a> {
    x: &'a [f32],
    by: f32,
    y: &'a mut [f32],
}

impl Kernel for Divide<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let factor = 1.0 / self.by;
        self.y.iter_mut().zip(self.x).for_each(|(y, x)| *y = x * factor);
    }
}

/// Dot products of the `columns` of each row of `a` and `b`, both `[rows, width]`.
struct RowDots<'a> {
    a: &'a [f32],
    b: &'a [f32],
    width: usize,
    columns: Range<usize>,
    out: &'a mut [f32],
}

impl Kernel for RowDots<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let rows = self.a.chunks_exact(self.width).zip(self.b.chunks_exact(self.width));
        for (out, (a, b)) in self.out.iter_mut().zip(rows) {
            let (a, b) = (&a[self.columns.clone()], &b[self.columns.clone()]);
            *out = simd::sum([a, b], |[a, b]| a * b);
        }
    }
}
