//! Matrix products: the only file that knows faer.
//!
//! Invariants:
//! - the result is cut into blocks by its shape alone and each block is one sequential product, so
//!   that bits do not depend on the number of threads;
//! - all matrices are row-major.

use std::cell::RefCell;

pub(crate) use faer::{Accum, MatMut, MatRef};
use faer::{Par, linalg::matmul::matmul};
use rayon::prelude::*;

/// Rows and columns of a block. Measured with AVX-512 at widths from 576 to 11264: the best of a dozen
/// shapes or within 5 % of it; a thread reaches 80 to 98 % of its rate on one large product.
const BLOCK_NT: (usize, usize) = (256, 512);
const BLOCK_NN: (usize, usize) = (256, 256);
const BLOCK_TN: (usize, usize) = (256, 576);
/// Keeps the rows of a copied panel off the same cache sets.
const PANEL_PADDING: usize = 16;

/// `C [m, n] (+)= A [m, k] * B [n, k]^T`
pub(crate) fn nt(c: &mut [f32], accum: Accum, a: &[f32], b: &[f32], k: usize) {
    let (m, n) = (a.len() / k, b.len() / k);
    let (a, b) = (matrix(a, m, k), matrix(b, n, k).transpose());
    grid(MatMut::from_row_major_slice_mut(c, m, n), BLOCK_NT)
        .into_par_iter()
        .with_max_len(1)
        .for_each(|(i, j, c)| {
            let (a, b) = (a.subrows(i, c.nrows()), b.subcols(j, c.ncols()));
            tile(c, accum, a, b, 1.0);
        });
}

/// `C [m, n] (+)= A [m, k] * B [k, n]`
pub(crate) fn nn(c: &mut [f32], accum: Accum, a: &[f32], b: &[f32], k: usize) {
    let (m, n) = (a.len() / k, b.len() / k);
    let (a, b) = (matrix(a, m, k), matrix(b, k, n));
    grid(MatMut::from_row_major_slice_mut(c, m, n), BLOCK_NN)
        .into_par_iter()
        .with_max_len(1)
        .for_each(|(i, j, c)| {
            let (a, b) = (a.subrows(i, c.nrows()), b.subcols(j, c.ncols()));
            tile(c, accum, a, b, 1.0);
        });
}

/// `C [m, n] (+)= A [k, m]^T * B [k, n]`
pub(crate) fn tn(c: &mut [f32], accum: Accum, a: &[f32], b: &[f32], k: usize) {
    let (m, n) = (a.len() / k, b.len() / k);
    let b = matrix(b, k, n);
    let bands = grid(MatMut::from_row_major_slice_mut(c, m, n), (BLOCK_TN.0, n));
    bands.into_par_iter().with_max_len(1).for_each(|(i, _, band)| {
        PANEL.with_borrow_mut(|panel| {
            let a = copy_panel(panel, a, m, i, band.nrows()).transpose();
            for (_, j, c) in grid(band, (usize::MAX, BLOCK_TN.1)) {
                let b = b.subcols(j, c.ncols());
                tile(c, accum, a, b, 1.0);
            }
        });
    });
}

/// `C (+)= alpha * A * B` on the calling thread.
pub(crate) fn tile(
    c: MatMut<'_, f32>,
    accum: Accum,
    a: MatRef<'_, f32>,
    b: MatRef<'_, f32>,
    alpha: f32,
) {
    matmul(c, accum, a, b, alpha, Par::Seq);
}

/// The blocks of `c` with the row and column they start at.
pub(crate) fn grid(
    c: MatMut<'_, f32>,
    block: (usize, usize),
) -> Vec<(usize, usize, MatMut<'_, f32>)> {
    let (m, n) = (c.nrows(), c.ncols());
    let mut blocks = Vec::new();
    let mut below = c;
    for i in (0..m).step_by(block.0.min(m).max(1)) {
        let (mut right, rest) = below.split_at_row_mut(block.0.min(m - i));
        below = rest;
        for j in (0..n).step_by(block.1.min(n).max(1)) {
            let (c, rest) = right.split_at_col_mut(block.1.min(n - j));
            right = rest;
            blocks.push((i, j, c));
        }
    }
    blocks
}

fn matrix(values: &[f32], rows: usize, columns: usize) -> MatRef<'_, f32> {
    MatRef::from_row_major_slice(values, rows, columns)
}

thread_local! {
    /// A panel `[k, 256]` per thread: outside the budget, 1 MiB per 1024 tokens.
    static PANEL: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Columns `first..first + width` of `a [k, m]`: strides of several KiB would put all rows of a
/// block on few cache sets and halve the product's rate.
fn copy_panel<'p>(
    panel: &'p mut Vec<f32>,
    a: &[f32],
    m: usize,
    first: usize,
    width: usize,
) -> MatRef<'p, f32> {
    let (k, stride) = (a.len() / m, width + PANEL_PADDING);
    if panel.len() < k * stride {
        panel.resize(k * stride, 0.0);
    }
    for (to, from) in panel.chunks_exact_mut(stride).zip(a.chunks_exact(m)) {
        to[..width].copy_from_slice(&from[first..first + width]);
    }
    MatRef::from_row_major_slice_with_stride(&panel[..k * stride], k, width, stride)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn values(n: usize, seed: usize) -> Vec<f32> {
        (0..n).map(|i| ((i * 37 + seed * 11) % 23) as f32 - 11.0).collect()
    }

    /// Whole numbers: every order of additions gives the same float32.
    fn plain(m: usize, n: usize, k: usize, at: impl Fn(usize, usize, usize) -> f32) -> Vec<f32> {
        (0..m * n).map(|e| (0..k).map(|l| at(e / n, e % n, l)).sum()).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(60))]

        #[test]
        fn products_equal_plain_loops_and_replace_reads_nothing(
            m in 1usize..70, n in 1usize..600, k in 1usize..40, swap: bool,
        ) {
            let (m, n) = if swap { (n, m) } else { (m, n) };
            let (a, b) = (values(m * k, 1), values(n * k, 2));
            type Product = fn(&mut [f32], Accum, &[f32], &[f32], usize);
            let cases: [(Product, Vec<f32>); 3] = [
                (nt, plain(m, n, k, |i, j, l| a[i * k + l] * b[j * k + l])),
                (nn, plain(m, n, k, |i, j, l| a[i * k + l] * b[l * n + j])),
                (tn, plain(m, n, k, |i, j, l| a[l * m + i] * b[l * n + j])),
            ];
            for (product, want) in cases {
                let mut c = vec![f32::NAN; m * n];
                product(&mut c, Accum::Replace, &a, &b, k);
                prop_assert_eq!(&c, &want);
                product(&mut c, Accum::Add, &a, &b, k);
                prop_assert!(c.iter().zip(&want).all(|(c, w)| *c == 2.0 * w));
            }
        }
    }
}
