//! Matrix products of row-major matrices, in float32 or of operands rounded to bfloat16.
//!
//! Invariants:
//! - in float32 an element's arithmetic depends on k alone (see [`kernel`]), never on block shapes, threads or
//!   the instruction set;
//! - B's columns are packed once per product and shared by all threads, in pieces of at most
//!   [`PACKED_BYTES`].
//!
//! Why not a library: none gives equal bits on every instruction set, and the one measured (faer)
//! packs both operands again for every block it is given. `tests/peers/faer` has its rate.

use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use model::{HostBytes, Precision};
use rayon::prelude::*;

mod bf16;
mod kernel;
mod lane;
mod matrix;
mod pairs;

pub(crate) use kernel::{DEPTH, Packed};
use kernel::{Isa, Left};
pub(crate) use matrix::{MatMut, MatRef, grid};

/// What a product does with what C holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Accum {
    Replace,
    Add,
}

/// Packed columns of B, at least one panel of them: outside the budget, once.
const PACKED_BYTES: usize = 8 << 20;
/// Rows and columns of C of a task: C's part and A's packed rows stay in the second-level cache.
/// With fewer tasks than [`TASKS_PER_THREAD`] their rows are halved.
const TASK_ROWS: usize = 192;
const TASK_COLUMNS: usize = 640;
const TASKS_PER_THREAD: usize = 4;

/// What a device multiplies with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ComputeDtype {
    /// float32 throughout: the same bits on every processor.
    #[default]
    F32,
    /// Operands of products with weights are rounded to bfloat16 and summed in float32; all else is
    /// float32. Bits depend on the processor's instructions.
    Bf16,
}

/// A matrix as it lies in memory.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Values<'a> {
    F32(&'a [f32]),
    Bf16(&'a [u16]),
}

impl Values<'_> {
    fn len(self) -> usize {
        match self {
            Values::F32(values) => values.len(),
            Values::Bf16(values) => values.len(),
        }
    }
}

impl ComputeDtype {
    /// How exactly weights are wanted.
    pub fn precision(self) -> Precision {
        match self {
            ComputeDtype::F32 => Precision::Exact,
            ComputeDtype::Bf16 => Precision::Bf16,
        }
    }

    /// `C [m, n] (+)= A [m, k] * B [n, k]^T`
    pub(crate) fn nt(self, c: &mut [f32], accum: Accum, a: &[f32], b: Values<'_>, k: usize) {
        let (m, n) = (a.len() / k, b.len() / k);
        let (c, a) = (MatMut::new(c, m, n), MatRef::new(a, m, k));
        match b {
            Values::F32(b) => self.run(c, accum, a, MatRef::new(b, n, k).transpose()),
            Values::Bf16(b) => self.run_halves(c, accum, a, MatRef::new(b, n, k).transpose()),
        }
    }

    /// `C [m, n] (+)= A [m, k] * B [k, n]`
    pub(crate) fn nn(self, c: &mut [f32], accum: Accum, a: &[f32], b: Values<'_>, k: usize) {
        let (m, n) = (a.len() / k, b.len() / k);
        let (c, a) = (MatMut::new(c, m, n), MatRef::new(a, m, k));
        match b {
            Values::F32(b) => self.run(c, accum, a, MatRef::new(b, k, n)),
            Values::Bf16(b) => self.run_halves(c, accum, a, MatRef::new(b, k, n)),
        }
    }

    /// `C [m, n] (+)= A [k, m]^T * B [k, n]`
    pub(crate) fn tn(self, c: &mut [f32], accum: Accum, a: &[f32], b: &[f32], k: usize) {
        let (m, n) = (a.len() / k, b.len() / k);
        let (a, b) = (MatRef::new(a, k, m).transpose(), MatRef::new(b, k, n));
        self.run(MatMut::new(c, m, n), accum, a, b);
    }

    fn run(self, c: MatMut<'_>, accum: Accum, a: MatRef<'_>, b: MatRef<'_>) {
        match self {
            ComputeDtype::F32 => parallel(c, accum, a, b),
            ComputeDtype::Bf16 => bf16::parallel(c, accum, a, b),
        }
    }

    fn run_halves(self, c: MatMut<'_>, accum: Accum, a: MatRef<'_>, b: MatRef<'_, u16>) {
        assert_eq!(self, ComputeDtype::Bf16, "float32 products are of float32 values");
        bf16::parallel(c, accum, a, b);
    }
}

/// Taken while in use; a device computes one product at a time.
static PACKED: Mutex<Option<HostBytes>> = Mutex::new(None);

fn parallel(c: MatMut<'_>, accum: Accum, a: MatRef<'_>, b: MatRef<'_>) {
    let isa = Isa::detect();
    let (k, panel) = (a.cols(), isa.panel());
    let most = PACKED_BYTES / 4 / k.max(1);
    let bytes = PACKED_BYTES.max(panel * k * 4);
    let spare_block = spare().take().filter(|block| block.len() >= bytes);
    let mut room = spare_block.unwrap_or_else(|| HostBytes::zeroed(bytes));
    let mut right = c;
    for columns in equal_parts(b.cols(), most, panel) {
        let (c, rest) = right.split_at_col(columns.len());
        right = rest;
        let b = b.subcols(columns);
        let packed = &mut room.f32s_mut()[..b.cols().next_multiple_of(panel) * k];
        let pieces: Vec<_> = kernel::pieces(packed, k, panel).collect();
        pieces.into_par_iter().for_each(|piece| piece.pack(b));
        let packed = Packed::new(packed, k);
        tasks(c, panel).into_par_iter().with_max_len(1).for_each(|(i, j, c)| {
            let a = Left { matrix: a.subrows(i..i + c.rows()), in_place: false };
            isa.block(c, accum, a, packed.skip_columns(j), 1.0);
        });
    }
    *spare() = Some(room);
}

fn spare() -> MutexGuard<'static, Option<HostBytes>> {
    // Only whole blocks are moved under the lock.
    PACKED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// `len` elements of a buffer that only grows: what it held before is overwritten by the caller.
fn room(buffer: &mut Vec<f32>, len: usize) -> &mut [f32] {
    if buffer.len() < len {
        buffer.resize(len, 0.0);
    }
    &mut buffer[..len]
}

/// `B [k, n]` as [`tile`] wants it, in a buffer that only grows.
pub(crate) fn pack<'p>(b: MatRef<'_>, room: &'p mut Vec<f32>) -> Packed<'p> {
    pack_for(Isa::detect(), b, room)
}

fn pack_for<'p>(isa: Isa, b: MatRef<'_>, buffer: &'p mut Vec<f32>) -> Packed<'p> {
    let (k, panel) = (b.rows(), isa.panel());
    let packed = room(buffer, b.cols().next_multiple_of(panel) * k);
    kernel::pieces(packed, k, panel).for_each(|piece| piece.pack(b));
    Packed::new(packed, k)
}

/// `C (+)= alpha * A * B` on the calling thread, with the first columns of B, as many as C has, and,
/// if B has at most [`DEPTH`] rows, with as many of them as A has columns. A is in the caches.
pub(crate) fn tile(c: MatMut<'_>, accum: Accum, a: MatRef<'_>, b: Packed<'_>, alpha: f32) {
    Isa::detect().block(c, accum, Left { matrix: a, in_place: true }, b, alpha);
}

/// The parts of `c` that are computed on their own, with the row and column they start at.
fn tasks(c: MatMut<'_>, panel: usize) -> Vec<(usize, usize, MatMut<'_>)> {
    let width = equal_parts(c.cols(), TASK_COLUMNS, panel).next().map_or(1, |part| part.len());
    let wanted = TASKS_PER_THREAD * rayon::current_num_threads();
    let mut rows = TASK_ROWS;
    while rows > TASK_ROWS / 8 && c.rows().div_ceil(rows) * c.cols().div_ceil(width) < wanted {
        rows /= 2;
    }
    // Column by column: what a thread has packed, it mostly uses itself.
    let mut tasks = grid(c, (rows, width));
    tasks.sort_by_key(|&(row, column, _)| (column, row));
    tasks
}

/// `0..len` in as few parts as `most` allows, about equally long and multiples of `unit` but for
/// the last.
fn equal_parts(len: usize, most: usize, unit: usize) -> impl Iterator<Item = Range<usize>> {
    let most = (most / unit * unit).max(unit);
    let step = len.div_ceil(len.div_ceil(most).max(1)).next_multiple_of(unit).max(1);
    (0..len).step_by(step).map(move |start| start..(start + step).min(len))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::ComputeDtype::F32;
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
            m in 1usize..70, n in 1usize..700, k in 1usize..40, long in 0usize..8, swap: bool,
        ) {
            let (m, n) = if swap { (n, m) } else { (m, n) };
            let k = if long == 0 { 250 + 7 * k } else { k };
            let (a, b) = (values(m * k, 1), values(n * k, 2));
            type Product = fn(&mut [f32], Accum, &[f32], &[f32], usize);
            let nt: Product = |c, accum, a, b, k| F32.nt(c, accum, a, Values::F32(b), k);
            let nn: Product = |c, accum, a, b, k| F32.nn(c, accum, a, Values::F32(b), k);
            let tn: Product = |c, accum, a, b, k| F32.tn(c, accum, a, b, k);
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

    fn fractions(n: usize, seed: usize) -> Vec<f32> {
        values(n, seed).iter().map(|v| v / 7.0).collect()
    }

    fn bits(c: &[f32]) -> Vec<u32> {
        c.iter().map(|c| c.to_bits()).collect()
    }

    #[test]
    fn every_set_block_and_reading_of_a_gives_the_same_bits() {
        let (m, n, k) = (31, 83, 300);
        let (a, b) = (fractions(m * k, 1), fractions(k * n, 2));
        let along: Vec<f32> = (0..m * k).map(|e| a[e % m * k + e / m]).collect();
        let mut whole = vec![0.0; m * n];
        F32.nn(&mut whole, Accum::Replace, &a, Values::F32(&b), k);
        let ways = [
            (MatRef::new(&a, m, k), false),
            (MatRef::new(&along, k, m).transpose(), false),
            (MatRef::new(&along, k, m).transpose(), true),
        ];
        for isa in Isa::available() {
            for ((rows, cols), (a, in_place)) in
                [(m, n), (1, n), (7, 11)].into_iter().flat_map(|s| ways.map(|way| (s, way)))
            {
                let mut c = vec![0.0; m * n];
                for (i, j, part) in grid(MatMut::new(&mut c, m, n), (rows, cols)) {
                    let b = MatRef::new(&b, k, n).subcols(j..j + part.cols());
                    let mut room = Vec::new();
                    let b = pack_for(isa, b, &mut room);
                    let a = Left { matrix: a.subrows(i..i + part.rows()), in_place };
                    isa.block(part, Accum::Replace, a, b, 1.0);
                }
                assert_eq!(bits(&c), bits(&whole), "{isa:?}, {rows} x {cols}, {in_place}");
            }
        }
    }

    #[test]
    fn a_packed_matrix_serves_products_with_fewer_of_its_rows_and_columns() {
        let (m, n, k) = (31, 83, DEPTH);
        let (less_n, less_k) = (40, 100);
        let (a, b) = (fractions(m * less_k, 1), fractions(k * n, 2));
        let a = MatRef::new(&a, m, less_k);
        let b = MatRef::new(&b, k, n);
        let (mut c, mut want) = (vec![0.0; m * less_n], vec![0.0; m * less_n]);
        for (c, b) in [(&mut c, b), (&mut want, b.subrows(0..less_k).subcols(0..less_n))] {
            let mut room = Vec::new();
            tile(MatMut::new(c, m, less_n), Accum::Replace, a, pack(b, &mut room), 0.5);
        }
        assert_eq!(bits(&c), bits(&want));
    }
}
