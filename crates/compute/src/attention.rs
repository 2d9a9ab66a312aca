//! Causal grouped-query attention in tiles: memory linear in S, no `[S, S]` matrix anywhere.
//!
//! Invariants:
//! - a task is a (row, head), in backward a (row, key head) that takes its query heads in order, so
//!   that bits do not depend on threads;
//! - blocks of keys are the outer loop: each is packed once and meets all its queries;
//! - the forward leaves one logsumexp per (row, head, query), from which the backward computes the
//!   probabilities again.
//!
//! Scheme: FlashAttention-2 (Dao 2023); softmax with a running maximum (Milakov and Gimelshein
//! 2018).

use std::cell::RefCell;
use std::ops::Range;

use rayon::prelude::*;

use crate::MicroShape;
use crate::product::{Accum, DEPTH, MatMut, MatRef, Packed, grid, pack, tile};
use crate::simd::{self, Kernel};

/// Queries of a tile.
const QUERIES: usize = 64;
/// Keys of a tile, one part of a product: queries that see fewer use what is packed for all. Tiles
/// and operands stay in the second-level cache.
const KEYS: usize = DEPTH;
/// Elements between the rows of a tile: rows of a power of two would share few sets of the
/// first-level cache.
const TILE_STRIDE: usize = KEYS + 16;

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
    /// Tiles of one thread: outside the budget, 600 KiB for heads of 128 and 8 bytes a position.
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

#[derive(Default)]
struct Scratch {
    tiles: Tiles,
    /// A block of keys and values as the product's kernel wants them.
    packed: [Vec<f32>; 3],
    /// `[S]` each.
    tops: Vec<f32>,
    sums: Vec<f32>,
}

/// What one tile of queries works on.
#[derive(Default)]
struct Tiles {
    /// `[QUERIES, TILE_STRIDE]`
    scores: Vec<f32>,
    scores_gradient: Vec<f32>,
    /// Packed.
    queries: Vec<f32>,
    output_gradient: Vec<f32>,
    /// `[QUERIES]`
    deltas: Vec<f32>,
}

impl Scratch {
    fn size(&mut self, seq_len: usize) {
        self.tiles.scores.resize(QUERIES * TILE_STRIDE, 0.0);
        self.tiles.scores_gradient.resize(QUERIES * TILE_STRIDE, 0.0);
        self.tiles.deltas.resize(QUERIES, 0.0);
        self.tops.resize(seq_len, 0.0);
        self.sums.resize(seq_len, 0.0);
    }
}

/// A tile of queries, and of a block of keys how many its first query sees (each further one sees one
/// more) and how many any of them does.
struct Cut {
    queries: Range<usize>,
    visible: usize,
    keys: usize,
}

/// The tiles of queries that see any of `keys`.
fn cuts(keys: &Range<usize>, seq_len: usize) -> impl Iterator<Item = Cut> {
    let from = keys.clone();
    ranges(seq_len, QUERIES).filter(move |queries| queries.end > from.start).map(move |queries| {
        let keys = queries.end.min(from.end) - from.start;
        // Blocks of keys start where a tile of queries does.
        let visible = queries.start + 1 - from.start;
        Cut { queries, visible, keys }
    })
}

impl Attention {
    /// `o [T, H*K]` and `lse [B, H, S]` from `qkv [T, (H+2G)*K]`.
    pub(crate) fn forward(&self, qkv: &[f32], o: &mut [f32], lse: &mut [f32]) {
        let (s, n) = (self.shape.seq_len, self.head_dim);
        let o = MatMut::new(o, self.shape.tokens(), self.heads * n);
        let tasks = grid(o, (s, n)).into_par_iter().zip(lse.par_chunks_mut(s)).with_max_len(1);
        tasks.for_each(|((first, column, o), lse)| {
            SCRATCH.with_borrow_mut(|scratch| {
                scratch.size(s);
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
                scratch.size(s);
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
        let (s, n) = (self.shape.seq_len, self.head_dim);
        let (key, value) = (self.key(head), self.value(head));
        let Scratch { tiles: Tiles { scores, .. }, packed: [k, v, _], tops, sums } = scratch;
        for keys in ranges(s, KEYS) {
            let k = pack(self.head(qkv, key, &keys).transpose(), k);
            let v = pack(self.head(qkv, value, &keys), v);
            let first = keys.start == 0;
            for Cut { queries, visible, keys } in cuts(&keys, s) {
                let (count, accum) = (queries.len(), Accum::Replace);
                let q = self.head(qkv, head * n, &queries);
                tile(square(scores, count, keys), accum, q, k, self.scale());
                let (tops, sums) = (&mut tops[queries.clone()], &mut sums[queries.clone()]);
                let mut output = o.reborrow().subrows(queries);
                let earlier = (!first).then(|| output.reborrow());
                simd::run(Softmax { scores, keys, visible, tops, sums, earlier });
                let accum = if first { Accum::Replace } else { Accum::Add };
                tile(output, accum, tile_of(scores, count, keys), v, 1.0);
            }
        }
        for (i, (lse, (top, sum))) in lse.iter_mut().zip(tops.iter().zip(&*sums)).enumerate() {
            simd::run(Scale { x: o.row(i), by: 1.0 / sum });
            *lse = top + sum.ln();
        }
    }

    fn backward_group(
        &self,
        operands: Operands<'_>,
        group: usize,
        mut d: GroupGradient<'_>,
        scratch: &mut Scratch,
    ) {
        let (s, n) = (self.shape.seq_len, self.head_dim);
        let members = self.heads / self.kv_heads;
        let (key, value) = (self.key(group * members), self.value(group * members));
        let Scratch { tiles, packed: [k_columns, v_columns, k_rows], .. } = scratch;
        d.dk.fill(0.0);
        d.dv.fill(0.0);
        for keys in ranges(s, KEYS) {
            let (k, v) =
                (self.head(operands.qkv, key, &keys), self.head(operands.qkv, value, &keys));
            let block = Block {
                keys: keys.clone(),
                k_columns: pack(k.transpose(), k_columns),
                v_columns: pack(v.transpose(), v_columns),
                k_rows: pack(k, k_rows),
            };
            for member in 0..members {
                let mut part = GroupGradient {
                    dq: d.dq.reborrow().subcols(member * n..(member + 1) * n),
                    dk: d.dk.reborrow().subrows(keys.clone()),
                    dv: d.dv.reborrow().subrows(keys.clone()),
                };
                let head = group * members + member;
                self.backward_block(operands, head, &block, &mut part, tiles);
            }
        }
    }

    /// What a block of keys adds to the gradients of one query head and of itself.
    fn backward_block(
        &self,
        operands: Operands<'_>,
        head: usize,
        block: &Block<'_>,
        d: &mut GroupGradient<'_>,
        tiles: &mut Tiles,
    ) {
        let Tiles { scores, scores_gradient, queries: packed_q, output_gradient, deltas } = tiles;
        let (s, n) = (self.shape.seq_len, self.head_dim);
        let (columns, width) = (head * n..head * n + n, self.heads * n);
        let lse = &operands.lse[head * s..][..s];
        let accum = if block.keys.start == 0 { Accum::Replace } else { Accum::Add };
        for Cut { queries, visible, keys } in cuts(&block.keys, s) {
            let count = queries.len();
            let q = self.head(operands.qkv, columns.start, &queries);
            let rows = queries.start * width..queries.end * width;
            let (o, d_o) = (&operands.o[rows.clone()], &operands.d_o[rows]);
            let deltas = &mut deltas[..count];
            simd::run(RowDots { a: o, b: d_o, width, columns: columns.clone(), out: deltas });
            let d_o = MatRef::new(d_o, count, width).subcols(columns.clone());
            let (replace, scale) = (Accum::Replace, self.scale());
            tile(square(scores, count, keys), replace, q, block.k_columns, scale);
            tile(square(scores_gradient, count, keys), replace, d_o, block.v_columns, 1.0);
            let (p, ds, lse) = (&mut scores[..], &mut scores_gradient[..], &lse[queries.clone()]);
            simd::run(SoftmaxBackward { p, ds, keys, visible, lse, deltas, scale });
            let (p, ds) = (tile_of(scores, count, keys), tile_of(scores_gradient, count, keys));
            let (dk, dv) = (d.dk.reborrow().subrows(0..keys), d.dv.reborrow().subrows(0..keys));
            tile(dv, Accum::Add, p.transpose(), pack(d_o, output_gradient), 1.0);
            tile(dk, Accum::Add, ds.transpose(), pack(q, packed_q), 1.0);
            tile(d.dq.reborrow().subrows(queries), accum, ds, block.k_rows, 1.0);
        }
    }
}

/// A block of keys and values of one key head, packed for its three products.
struct Block<'a> {
    keys: Range<usize>,
    /// `[K, keys]`
    k_columns: Packed<'a>,
    v_columns: Packed<'a>,
    /// `[keys, K]`
    k_rows: Packed<'a>,
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

/// The first columns of a tile.
fn square(tile: &mut [f32], rows: usize, columns: usize) -> MatMut<'_> {
    MatMut::new(&mut tile[..rows * TILE_STRIDE], rows, TILE_STRIDE).subcols(0..columns)
}

fn tile_of(tile: &[f32], rows: usize, columns: usize) -> MatRef<'_> {
    MatRef::new(&tile[..rows * TILE_STRIDE], rows, TILE_STRIDE).subcols(0..columns)
}

/// Scores to exponentials, a row of the tile for each of `tops`; row i sees its first `visible + i`
/// keys, the others become 0. Running maximum and sum per row, which are new without `earlier`
/// output; that is rescaled.
struct Softmax<'a> {
    scores: &'a mut [f32],
    keys: usize,
    visible: usize,
    tops: &'a mut [f32],
    sums: &'a mut [f32],
    earlier: Option<MatMut<'a>>,
}

impl Kernel for Softmax<'_> {
    type Output = ();

    #[inline(always)]
    fn run(mut self) {
        for (i, (last_top, sum)) in self.tops.iter_mut().zip(self.sums).enumerate() {
            let scores = &mut self.scores[i * TILE_STRIDE..][..self.keys];
            let (seen, hidden) = scores.split_at_mut((self.visible + i).min(self.keys));
            hidden.fill(0.0);
            let here = simd::max(seen);
            let before = if self.earlier.is_some() { *last_top } else { f32::NEG_INFINITY };
            let top = if here > before { here } else { before };
            seen.iter_mut().for_each(|s| *s = simd::exp(*s - top));
            let total = simd::sum([seen], |[p]| p);
            *last_top = top;
            *sum = match &mut self.earlier {
                Some(output) => {
                    let factor = simd::exp(before - top);
                    output.row(i).iter_mut().for_each(|o| *o *= factor);
                    *sum * factor + total
                }
                None => total,
            };
        }
    }
}

/// `p`: scores to probabilities; `ds`: their gradient to the gradient of the unscaled scores. Both
/// are tiles with a row for each of `lse`.
struct SoftmaxBackward<'a> {
    p: &'a mut [f32],
    ds: &'a mut [f32],
    keys: usize,
    visible: usize,
    lse: &'a [f32],
    deltas: &'a [f32],
    scale: f32,
}

impl Kernel for SoftmaxBackward<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for (i, (lse, delta)) in self.lse.iter().zip(self.deltas).enumerate() {
            let visible = (self.visible + i).min(self.keys);
            let row = i * TILE_STRIDE..i * TILE_STRIDE + self.keys;
            let (p, hidden_p) = self.p[row.clone()].split_at_mut(visible);
            let (ds, hidden_ds) = self.ds[row].split_at_mut(visible);
            hidden_p.fill(0.0);
            hidden_ds.fill(0.0);
            for (p, ds) in p.iter_mut().zip(ds) {
                *p = simd::exp(*p - lse);
                *ds = *p * (*ds - delta) * self.scale;
            }
        }
    }
}

struct Scale<'a> {
    x: &'a mut [f32],
    by: f32,
}

impl Kernel for Scale<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        self.x.iter_mut().for_each(|x| *x *= self.by);
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
