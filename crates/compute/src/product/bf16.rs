//! Matrix products of operands rounded to bfloat16, summed in float32: packing, and who computes what.
//!
//! Invariant: values are rounded to the nearest bfloat16, ties away from zero, wherever they come from:
//! weights that a store keeps as bfloat16 give the same bits as their float32.

use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use model::{HostBytes, to_bf16};
use rayon::prelude::*;

use super::matrix::{MatMut, MatRef, grid};
use super::pairs::{PAIRS, Way};
use super::{Accum, TASK_COLUMNS, TASK_ROWS, TASKS_PER_THREAD, equal_parts};
use crate::simd::{self, Kernel};

/// Packed rows of A, and packed columns of B: outside the budget, once each.
const PACKED_BYTES: usize = 8 << 20;
/// Rows of A that any way's groups divide.
const ROWS_UNIT: usize = 96;

/// What a pair is made of.
pub(super) trait Half: Copy + Send + Sync {
    /// The bits of the nearest bfloat16.
    fn bits(self) -> u32;
}

impl Half for f32 {
    #[inline(always)]
    fn bits(self) -> u32 {
        u32::from(to_bf16(self))
    }
}

impl Half for u16 {
    #[inline(always)]
    fn bits(self) -> u32 {
        u32::from(self)
    }
}

/// Room for packed operands, taken while in use; a device computes one product at a time.
static ROOM: Mutex<Option<[HostBytes; 2]>> = Mutex::new(None);

fn spare() -> MutexGuard<'static, Option<[HostBytes; 2]>> {
    // Only whole blocks are moved under the lock.
    ROOM.lock().unwrap_or_else(PoisonError::into_inner)
}

/// `c (+)= a * b`
pub(super) fn parallel<T: Half>(c: MatMut<'_>, accum: Accum, a: MatRef<'_>, b: MatRef<'_, T>) {
    product(Way::detect(), c, accum, a, b);
}

fn product<T: Half>(way: Way, mut c: MatMut<'_>, accum: Accum, a: MatRef<'_>, b: MatRef<'_, T>) {
    let pairs = a.cols().div_ceil(2).next_multiple_of(PAIRS);
    if a.cols() == 0 {
        if accum == Accum::Replace {
            c.fill(0.0);
        }
        return;
    }
    let most = |unit: usize| (PACKED_BYTES / 4 / pairs).max(unit);
    let rows: Vec<_> = equal_parts(a.rows(), most(ROWS_UNIT), ROWS_UNIT).collect();
    let columns: Vec<_> = equal_parts(b.cols(), most(way.panel()), way.panel()).collect();
    let words = |parts: &[Range<usize>], unit: usize| {
        let longest = parts.iter().map(|part| part.len().next_multiple_of(unit)).max();
        longest.unwrap_or(0) * pairs
    };
    let wanted = [words(&rows, way.group()) * 4, words(&columns, way.panel()) * 4];
    let fits = |blocks: &[HostBytes; 2]| blocks.iter().zip(wanted).all(|(b, w)| b.len() >= w);
    let spare_blocks = spare().take().filter(fits);
    let [mut room_a, mut room_b] = spare_blocks
        .unwrap_or_else(|| wanted.map(|bytes| HostBytes::zeroed(bytes.max(PACKED_BYTES))));
    let mut right = c;
    for (j, columns) in columns.into_iter().enumerate() {
        let (mut below, rest) = right.split_at_col(columns.len());
        right = rest;
        let b = b.subcols(columns);
        let packed_b = &mut room_b.u32s_mut()[..b.cols().next_multiple_of(way.panel()) * pairs];
        pack_columns(b, packed_b, way.panel(), pairs);
        for rows in &rows {
            let (c, rest) = below.split_at_row(rows.len());
            below = rest;
            let packed_a = &mut room_a.u32s_mut()[..];
            let packed_a = &mut packed_a[..rows.len().next_multiple_of(way.group()) * pairs];
            // With one part of rows they stay packed for the next columns.
            if j == 0 || rows.len() < a.rows() {
                pack_rows(a.subrows(rows.clone()), packed_a, way.group(), pairs);
            }
            compute(way, c, accum, packed_a, packed_b, pairs);
        }
    }
    *spare() = Some([room_a, room_b]);
}

fn compute(way: Way, c: MatMut<'_>, accum: Accum, a: &[u32], b: &[u32], pairs: usize) {
    let width = equal_parts(c.cols(), TASK_COLUMNS, way.panel()).next().map_or(1, |p| p.len());
    let wanted = TASKS_PER_THREAD * rayon::current_num_threads();
    let mut rows = TASK_ROWS;
    let count = |rows: usize| c.rows().div_ceil(rows) * c.cols().div_ceil(width);
    while (rows / 2).is_multiple_of(way.group()) && count(rows) < wanted {
        rows /= 2;
    }
    let mut tasks = grid(c, (rows, width));
    tasks.sort_by_key(|&(row, column, _)| (column, row));
    tasks.into_par_iter().with_max_len(1).for_each(|(row, column, c)| {
        way.block(c, accum, &a[row * pairs..], &b[column * pairs..], pairs);
    });
}

/// Rows of `a` as `[rows, pairs]`, filled up with zeros to whole groups.
fn pack_rows(a: MatRef<'_>, to: &mut [u32], group: usize, pairs: usize) {
    to.par_chunks_mut(group * pairs).enumerate().for_each(|(i, to)| {
        let rows = i * group..(i * group + group).min(a.rows());
        let from = a.subrows(rows);
        if a.col_stride() == 1 {
            simd::run(Along { from, to, pairs });
        } else {
            simd::run(Across { from: from.transpose(), to, width: pairs, transposed: true });
        }
    });
}

/// Columns of `b` as panels `[pairs, panel]`, filled up with zeros.
fn pack_columns<T: Half>(b: MatRef<'_, T>, to: &mut [u32], panel: usize, pairs: usize) {
    to.par_chunks_mut(panel * pairs).enumerate().for_each(|(j, to)| {
        let columns = j * panel..(j * panel + panel).min(b.cols());
        let from = b.subcols(columns);
        if b.col_stride() == 1 {
            simd::run(Across { from, to, width: panel, transposed: false });
        } else {
            simd::run(Turned { from: from.transpose(), to, panel });
        }
    });
}

/// The pair of two values, the first one in the lower half.
#[inline(always)]
fn pair<T: Half>(first: T, second: T) -> u32 {
    first.bits() | second.bits() << 16
}

/// Pairs of neighbours in `row`, zeros behind.
#[inline(always)]
fn pairs_of<T: Half>(row: &[T], to: &mut [u32]) {
    let (whole, rest) = row.as_chunks::<2>();
    to.iter_mut().zip(whole).for_each(|(to, [first, second])| *to = pair(*first, *second));
    if let [last] = rest {
        to[whole.len()] = last.bits();
    }
    to[row.len().div_ceil(2)..].fill(0);
}

/// Rows whose neighbours are pairs: `to [rows, pairs]`.
struct Along<'a> {
    from: MatRef<'a>,
    to: &'a mut [u32],
    pairs: usize,
}

impl Kernel for Along<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Along { from, to, pairs } = self;
        let (rows, rest) = to.split_at_mut(from.rows() * pairs);
        for (i, to) in rows.chunks_exact_mut(pairs).enumerate() {
            pairs_of(&from.data()[i * from.row_stride()..][..from.cols()], to);
        }
        rest.fill(0);
    }
}

/// Pairs that are turned at a time: what they are read into stays in the first-level cache.
const TURNED: usize = 16;
/// Rows or columns of the largest group or panel.
const WIDEST: usize = 32;

/// Rows whose neighbours are pairs, turned: `to [pairs, panel]`.
struct Turned<'a, T> {
    from: MatRef<'a, T>,
    to: &'a mut [u32],
    panel: usize,
}

impl<T: Half> Kernel for Turned<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Turned { from, to, panel } = self;
        let mut rows = [[0u32; TURNED]; WIDEST];
        for (p, to) in to.chunks_mut(TURNED * panel).enumerate() {
            let start = (2 * TURNED * p).min(from.cols());
            let end = (start + 2 * TURNED).min(from.cols());
            for (i, row) in rows[..from.rows()].iter_mut().enumerate() {
                pairs_of(&from.data()[i * from.row_stride()..][start..end], row);
            }
            for (p, to) in to.chunks_exact_mut(panel).enumerate() {
                to.iter_mut().zip(&rows).for_each(|(to, row)| *to = row[p]);
            }
        }
    }
}

/// Pairs of neighbouring rows: `to [pairs, width]`, or if `transposed` `[columns, width]` of so many
/// pairs.
struct Across<'a, T> {
    from: MatRef<'a, T>,
    to: &'a mut [u32],
    width: usize,
    transposed: bool,
}

impl<T: Half> Kernel for Across<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Across { from, to, width, transposed } = self;
        let row = |k: usize| {
            let there = k < from.rows();
            there.then(|| &from.data()[k * from.row_stride()..][..from.cols()])
        };
        if !transposed {
            for (p, to) in to.chunks_exact_mut(width).enumerate() {
                neighbours(row(2 * p), row(2 * p + 1), to);
            }
            return;
        }
        let mut turned = [[0u32; WIDEST]; TURNED];
        for start in (0..width).step_by(TURNED) {
            for (p, to) in turned.iter_mut().enumerate() {
                let k = 2 * (start + p);
                neighbours(row(k), row(k + 1), to);
            }
            for (i, to) in to.chunks_exact_mut(width).enumerate() {
                let to = &mut to[start..start + TURNED];
                to.iter_mut().zip(&turned).for_each(|(to, pairs)| *to = pairs[i]);
            }
        }
    }
}

/// Pairs of two rows, zeros behind and for rows that are not there.
#[inline(always)]
fn neighbours<T: Half>(first: Option<&[T]>, second: Option<&[T]>, to: &mut [u32]) {
    match (first, second) {
        (Some(first), Some(second)) => {
            let both = first.iter().zip(second);
            to.iter_mut().zip(both).for_each(|(to, (a, b))| *to = pair(*a, *b));
            to[first.len()..].fill(0);
        }
        (Some(first), None) => {
            to.iter_mut().zip(first).for_each(|(to, a)| *to = a.bits());
            to[first.len()..].fill(0);
        }
        (None, _) => to.fill(0),
    }
}

#[cfg(test)]
mod tests {
    use model::from_bf16;
    use proptest::prelude::*;

    use super::*;

    fn values(n: usize, seed: usize) -> Vec<f32> {
        (0..n).map(|i| ((i * 37 + seed * 11) % 23) as f32 / 8.0 - 1.4).collect()
    }

    fn rounded(values: &[f32]) -> Vec<f32> {
        values.iter().map(|v| from_bf16(to_bf16(*v))).collect()
    }

    /// `[m, n]` in float64 of the rounded operands.
    fn plain(m: usize, n: usize, k: usize, at: impl Fn(usize, usize, usize) -> f64) -> Vec<f64> {
        (0..m * n).map(|e| (0..k).map(|l| at(e / n, e % n, l)).sum()).collect()
    }

    /// The three products of [`super::super::Numbers`], B given as float32 or bfloat16.
    fn all_ways(m: usize, n: usize, k: usize) {
        let (a, b) = (values(m * k, 1), values(n * k, 2));
        let (ra, rb) = (rounded(&a), rounded(&b));
        let halves: Vec<u16> = b.iter().map(|v| to_bf16(*v)).collect();
        type Views = [(bool, bool); 3];
        const VIEWS: Views = [(false, true), (false, false), (true, false)];
        for (a_turned, b_turned) in VIEWS {
            let at_a = |i: usize, l: usize| if a_turned { l * m + i } else { i * k + l };
            let at_b = |l: usize, j: usize| if b_turned { j * k + l } else { l * n + j };
            let want =
                plain(m, n, k, |i, j, l| f64::from(ra[at_a(i, l)]) * f64::from(rb[at_b(l, j)]));
            fn view<T: Copy>(x: &[T], r: usize, c: usize, turned: bool) -> MatRef<'_, T> {
                if turned { MatRef::new(x, c, r).transpose() } else { MatRef::new(x, r, c) }
            }
            let va = view(&a, m, k, a_turned);
            for way in Way::available() {
                let run = |accum, start: f32| {
                    let mut from_f32 = vec![start; m * n];
                    let mut from_bf16 = from_f32.clone();
                    let c = MatMut::new(&mut from_f32, m, n);
                    product(way, c, accum, va, view(&b, k, n, b_turned));
                    let c = MatMut::new(&mut from_bf16, m, n);
                    product(way, c, accum, va, view(&halves, k, n, b_turned));
                    assert!(from_f32 == from_bf16, "{way:?}");
                    from_f32
                };
                for (found, plus) in
                    [(run(Accum::Replace, f32::NAN), 0.0), (run(Accum::Add, 3.0), 3.0)]
                {
                    for (found, want) in found.iter().zip(&want) {
                        let error = (f64::from(*found) - want - plus).abs();
                        assert!(error <= 3e-6 * k as f64 + 1e-5, "{way:?} {m} {n} {k}: {error}");
                    }
                }
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(40))]

        #[test]
        fn every_way_multiplies(m in 1usize..80, n in 1usize..90, k in 1usize..70) {
            all_ways(m, n, k);
        }
    }

    #[test]
    fn parts_of_rows_and_columns_are_put_together() {
        // Enough of k that neither operand is packed at once.
        let k = 8 << 10;
        let (m, n) = (530, 525);
        let (a, b) = (values(m * k, 1), values(n * k, 2));
        let mut whole = vec![0.0; m * n];
        let (va, vb) = (MatRef::new(&a, m, k), MatRef::new(&b, n, k).transpose());
        parallel(MatMut::new(&mut whole, m, n), Accum::Replace, va, vb);
        for (i, j) in [(0, 0), (529, 524), (300, 260), (511, 512)] {
            let mut one = [0.0];
            let (va, vb) = (va.subrows(i..i + 1), vb.subcols(j..j + 1));
            parallel(MatMut::new(&mut one, 1, 1), Accum::Replace, va, vb);
            assert_eq!(one[0].to_bits(), whole[i * n + j].to_bits());
        }
    }

    #[test]
    fn one_thread_or_several_give_the_same_bits() {
        let (m, n, k) = (200, 330, 450);
        let (a, b) = (values(m * k, 3), values(n * k, 4));
        let run = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let mut c = vec![0.5; m * n];
            pool.install(|| {
                let b = MatRef::new(&b, n, k).transpose();
                parallel(MatMut::new(&mut c, m, n), Accum::Add, MatRef::new(&a, m, k), b);
            });
            c.iter().map(|c| c.to_bits()).collect::<Vec<_>>()
        };
        assert!(run(1) == run(3));
    }

    #[test]
    fn the_instruction_for_pairs_adds_as_two_multiply_adds_do() {
        let mut ways = Way::available().filter(|way| !format!("{way:?}").contains("Amx"));
        let (m, n, k) = (24, 64, 96);
        let (a, b) = (values(m * k, 5), values(n * k, 6));
        let run = |way| {
            let mut c = vec![0.1; m * n];
            let b = MatRef::new(&b, k, n);
            product(way, MatMut::new(&mut c, m, n), Accum::Add, MatRef::new(&a, m, k), b);
            c.iter().map(|c| c.to_bits()).collect::<Vec<_>>()
        };
        let want = run(ways.next().unwrap());
        assert!(ways.all(|way| run(way) == want));
    }
}
