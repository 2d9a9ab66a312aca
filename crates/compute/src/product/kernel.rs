//! The inner loops of a product: a block of C from rows of A and packed columns of B.
//!
//! Invariants:
//! - an element of C is one chain of fused multiply-adds per [`DEPTH`] steps of k, from zero, in
//!   order, and the chains' sums added in order: the same for every instruction set and block
//!   shape, so that bits depend on neither (payloads of NaNs excepted);
//! - a wider build is entered only after its instruction set was detected.
//!
//! Scheme: Goto and van de Geijn 2008, with the vectors along C's rows.
#![allow(unsafe_code)]

use std::cell::RefCell;
use std::ops::Range;

use super::lane::{Lane, Plain};
use super::matrix::{MatMut, MatRef};
use super::{Accum, equal_parts};

/// Steps of k between two visits to C: `DEPTH` packed rows of B stay in the first-level cache.
pub(crate) const DEPTH: usize = 256;
/// Rows of A that are packed together: with C's part they stay in the second-level cache.
const PACKED_ROWS: usize = 192;
/// Elements of the largest micro tile of all instruction sets.
const LARGEST_TILE: usize = 12 * 32;

/// An instruction set of this processor, and its micro tile: only [`Isa::available`] makes one, so
/// that having one proves that its instructions are there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Isa(Set);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Set {
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    Portable,
}

/// The parts of k that are summed on their own.
fn depths(k: usize) -> impl Iterator<Item = Range<usize>> {
    equal_parts(k, DEPTH, 1)
}

/// A panel of one part of k: what is packed on its own.
pub(super) struct Piece<'p> {
    depth: Range<usize>,
    panel: usize,
    to: &'p mut [f32],
}

/// All pieces of a `B [k, n]`, `to` having room for n filled up to whole panels of `width`: parts of
/// k, in them panels, in them rows.
pub(super) fn pieces(to: &mut [f32], k: usize, width: usize) -> impl Iterator<Item = Piece<'_>> {
    let columns = to.len() / k.max(1);
    let mut rest = to;
    depths(k).flat_map(move |depth| {
        let (part, others) = std::mem::take(&mut rest).split_at_mut(columns * depth.len());
        rest = others;
        let panels = part.chunks_exact_mut(width * depth.len()).enumerate();
        panels.map(move |(panel, to)| Piece { depth: depth.clone(), panel, to })
    })
}

impl Piece<'_> {
    /// Copies the piece out of `b`; missing columns are zero.
    pub(super) fn pack(self, b: MatRef<'_>) {
        let width = self.to.len() / self.depth.len();
        let columns = self.panel * width..(self.panel * width + width).min(b.cols());
        pack_panel(b.subrows(self.depth).subcols(columns), width, self.to);
    }
}

impl Isa {
    /// The widest of this processor.
    pub(super) fn detect() -> Isa {
        Isa::available().next().unwrap_or(Isa(Set::Portable))
    }

    /// All sets of this processor, the widest first; detection is cached by the standard library.
    pub(super) fn available() -> impl Iterator<Item = Isa> {
        #[cfg(target_arch = "x86_64")]
        let wide = [
            is_x86_feature_detected!("avx512f").then_some(Set::Avx512),
            (is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"))
                .then_some(Set::Avx2),
        ];
        #[cfg(not(target_arch = "x86_64"))]
        let wide: [Option<Set>; 0] = [];
        wide.into_iter().flatten().chain([Set::Portable]).map(Isa)
    }

    /// Columns of a packed panel of B.
    pub(super) fn panel(self) -> usize {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Set::Avx512 => 2 * std::arch::x86_64::__m512::WIDTH,
            #[cfg(target_arch = "x86_64")]
            Set::Avx2 => 2 * std::arch::x86_64::__m256::WIDTH,
            Set::Portable => 2 * Plain::WIDTH,
        }
    }

    /// `c (+)= alpha * a * B`, with as many of B's columns and rows as `c` and `a` have.
    pub(super) fn block(
        self,
        c: MatMut<'_>,
        accum: Accum,
        a: Left<'_>,
        packed: Packed<'_>,
        alpha: f32,
    ) {
        assert_eq!(a.matrix.rows(), c.rows(), "a product's rows");
        packed.check(self.panel(), c.cols(), a.matrix.cols());
        PACKED_A.with_borrow_mut(|packed_a| {
            let block = Block { c, accum, a, packed, packed_a, alpha };
            match self.0 {
                // SAFETY: the value was made after its instruction set was detected.
                #[cfg(target_arch = "x86_64")]
                Set::Avx512 => unsafe { block_avx512(block) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                Set::Avx2 => unsafe { block_avx2(block) },
                Set::Portable => block.run::<Plain, 2, 4>(),
            }
        });
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn block_avx512(block: Block<'_>) {
    block.run::<std::arch::x86_64::__m512, 2, 12>();
}

// Twelve sums leave four registers for B and A. With three registers of B (4 x 24) one sum went through
// the stack in every step: half the speed.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn block_avx2(block: Block<'_>) {
    block.run::<std::arch::x86_64::__m256, 2, 6>();
}

/// Rows that are fetched before they are copied: few lines each, far apart, which no hardware
/// prefetcher foresees.
const ROWS_AHEAD: usize = 12;

/// Writes the columns of `b [k, ..]`, at most `width`, as `[k, width]`; missing columns are zero.
fn pack_panel(b: MatRef<'_>, width: usize, to: &mut [f32]) {
    if b.cols() < width {
        to.fill(0.0);
    }
    if b.col_stride() != 1 {
        return transpose(b.transpose(), width, to);
    }
    for (p, to) in to.chunks_exact_mut(width).enumerate() {
        let from = &b.data()[p * b.row_stride()..][..b.cols()];
        let ahead = from.as_ptr().wrapping_add(ROWS_AHEAD * b.row_stride());
        (0..b.cols()).step_by(16).for_each(|line| prefetch::<FIRST>(ahead.wrapping_add(line)));
        // Pieces of a fixed length are copied without a call.
        let (from, rest) = from.as_chunks::<8>();
        let (to, tail) = to.as_chunks_mut::<8>();
        to.iter_mut().zip(from).for_each(|(to, from)| *to = *from);
        to[from.len()..]
            .as_flattened_mut()
            .iter_mut()
            .chain(tail)
            .zip(rest)
            .for_each(|(t, f)| *t = *f);
    }
}

/// Hints of `prefetch`: into the first- or only the second-level cache.
const FIRST: i32 = 3;
const SECOND: i32 = 2;

/// Asks for the cache line at `address`; any address will do.
#[inline(always)]
fn prefetch<const LEVEL: i32>(address: *const f32) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch touches nothing that a program can see, and every x86-64 has it.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<LEVEL>(address.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

/// B as [`pieces`] and [`Piece::pack`] laid it out, seen from one of its columns.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Packed<'a> {
    values: &'a [f32],
    k: usize,
    /// All columns, filled up to whole panels.
    width: usize,
    first: usize,
}

impl<'a> Packed<'a> {
    /// All of `values`, whose pieces are packed, for a B of `k` rows.
    pub(super) fn new(values: &'a [f32], k: usize) -> Packed<'a> {
        Packed { values, k, width: values.len() / k.max(1), first: 0 }
    }

    /// Without the columns before `first`, a multiple of a panel.
    pub(super) fn skip_columns(self, first: usize) -> Packed<'a> {
        Packed { first: self.first + first, ..self }
    }

    /// A product may use fewer rows than were packed only if they are one part.
    fn check(self, panel: usize, columns: usize, k: usize) {
        assert!(self.first.is_multiple_of(panel), "a panel's first column");
        assert!(self.first + columns <= self.width, "a product's packed columns");
        assert!(k == self.k || (k < self.k && self.k <= DEPTH), "a product's packed rows");
    }

    /// The panels of the next `count` columns in one part of k.
    fn columns(self, depth: &Range<usize>, count: usize) -> &'a [f32] {
        let start = depth.start * self.width + self.first * depth.len();
        &self.values[start..start + count * depth.len()]
    }
}

/// A, and how it is read.
#[derive(Clone, Copy, Debug)]
pub(super) struct Left<'a> {
    pub(super) matrix: MatRef<'a>,
    /// Where its columns lie along memory they are read where they are: right for a matrix that is
    /// near in the caches and not wide.
    pub(super) in_place: bool,
}

/// Operands of [`Isa::block`], whose shapes were checked there.
struct Block<'a> {
    c: MatMut<'a>,
    accum: Accum,
    a: Left<'a>,
    packed: Packed<'a>,
    /// Room for packed rows of A.
    packed_a: &'a mut Vec<f32>,
    alpha: f32,
}

thread_local! {
    /// `[PACKED_ROWS, DEPTH]` of A: outside the budget, 192 KiB a thread.
    static PACKED_A: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

impl Block<'_> {
    #[inline(always)]
    fn run<V: Lane, const N: usize, const R: usize>(mut self) {
        let a = self.a.matrix;
        if a.cols() == 0 && self.accum == Accum::Replace {
            self.c.fill(0.0);
        }
        for part in depths(self.packed.k) {
            // One part may be longer than what A has of it.
            let depth = part.start..part.end.min(a.cols());
            if depth.is_empty() {
                return;
            }
            let add = depth.start > 0 || self.accum == Accum::Add;
            let whole = if self.a.in_place && a.row_stride() == 1 { a.rows() / R * R } else { 0 };
            if whole > 0 {
                let rows = a.subcols(depth.clone()).subrows(0..whole);
                let rows = Rows { start: rows.data().as_ptr(), step: a.col_stride(), group: R };
                self.rows::<V, N, R>(0..whole, rows, (&part, depth.len()), add);
            }
            for rows in equal_parts(a.rows() - whole, PACKED_ROWS, R) {
                let rows = whole + rows.start..whole + rows.end;
                let a = a.subcols(depth.clone()).subrows(rows.clone());
                self.packed_a.resize(rows.len().next_multiple_of(R) * depth.len(), 0.0);
                pack_rows::<R>(a, self.packed_a);
                let start = self.packed_a.as_ptr();
                let packed = Rows { start, step: R, group: R * depth.len() };
                self.rows::<V, N, R>(rows, packed, (&part, depth.len()), add);
            }
        }
    }

    /// The product of `rows` of A, with `steps` rows of one part of B.
    #[inline(always)]
    fn rows<V: Lane, const N: usize, const R: usize>(
        &mut self,
        rows: Range<usize>,
        a: Rows,
        (part, steps): (&Range<usize>, usize),
        add: bool,
    ) {
        let width = N * V::WIDTH;
        let stride = self.c.stride();
        let tiles = rows.len().div_ceil(R);
        let panels = self.packed.columns(part, self.c.cols().next_multiple_of(width));
        for (j, b) in panels.chunks_exact(width * part.len()).enumerate() {
            // While a panel is computed with, the next one comes nearer, a share per tile.
            let next = b.as_ptr().wrapping_add(b.len());
            let share = b.len() / tiles;
            for i in 0..tiles {
                let (row, col) = (rows.start + i * R, j * width);
                let tile = Tile {
                    a: a.start.wrapping_add(i * a.group),
                    a_step: a.step,
                    b,
                    steps,
                    next: next.wrapping_add(i * share),
                    next_step: share.div_ceil(steps),
                    // SAFETY: `row` and `col` are inside C.
                    c: unsafe { self.c.start().add(row * stride + col) },
                    stride,
                    rows: (rows.end - row).min(R),
                    cols: (self.c.cols() - col).min(width),
                    add,
                    alpha: self.alpha,
                };
                // SAFETY: the tile's rows and columns are inside C, which is borrowed exclusively;
                // A has R values for each of its steps, packed or in place.
                unsafe { tile.run::<V, N, R>() };
            }
        }
    }
}

/// Where the R values of A lie that a step of a micro tile takes.
#[derive(Clone, Copy)]
struct Rows {
    start: *const f32,
    /// Elements from one step to the next.
    step: usize,
    /// Elements from one micro tile's to the next one's.
    group: usize,
}

/// Rows of `a`, R at a time (a multiple of 4), as `[k, R]` matrices; missing rows are zero.
#[inline(always)]
fn pack_rows<const R: usize>(a: MatRef<'_>, to: &mut [f32]) {
    let (k, m) = (a.cols(), a.rows());
    if !m.is_multiple_of(R) {
        to[m / R * R * k..].fill(0.0);
    }
    if a.col_stride() != 1 {
        assert_eq!(a.row_stride(), 1, "columns that lie along memory");
        for (p, from) in a.data().chunks(a.col_stride()).take(k).enumerate() {
            let (whole, rest) = from[..m].as_chunks::<R>();
            let to = &mut to.as_chunks_mut::<R>().0[p..];
            to.iter_mut().step_by(k).zip(whole).for_each(|(to, from)| *to = *from);
            if !rest.is_empty() {
                to[whole.len() * k][..rest.len()].copy_from_slice(rest);
            }
        }
        return;
    }
    for (g, to) in to.chunks_exact_mut(k * R).enumerate() {
        transpose(a.subrows(g * R..(g * R + R).min(m)), R, to);
    }
}

/// `to [cols, width]` gets the columns of a row-major matrix of at most `width` rows as its rows.
#[inline(always)]
fn transpose(from: MatRef<'_>, width: usize, to: &mut [f32]) {
    assert!(from.col_stride() == 1, "rows that lie along memory");
    let row = |i: usize| &from.data()[i * from.row_stride()..][..from.cols()];
    let (whole, stride) = (from.rows() / 4 * 4, from.row_stride());
    for i in (0..whole).step_by(4) {
        let (from, rest) = ([row(i), row(i + 1), row(i + 2), row(i + 3)], from.cols() / 4 * 4);
        let squares = from.map(|row| row.as_chunks::<4>().0);
        for (p, to) in to.chunks_exact_mut(4 * width).enumerate() {
            if p % 4 == 0 {
                // The next four rows, a cache line each.
                let next =
                    |r: usize| squares[r].as_ptr().cast::<f32>().wrapping_add(4 * stride + 4 * p);
                (0..4).for_each(|r| prefetch::<FIRST>(next(r)));
            }
            let square = transpose_square(squares.map(|row| row[p]));
            for (to, values) in to.chunks_exact_mut(width).zip(square) {
                to[i..i + 4].copy_from_slice(&values);
            }
        }
        for p in rest..from[0].len() {
            from.iter().enumerate().for_each(|(r, row)| to[p * width + i + r] = row[p]);
        }
    }
    let mut rest = whole;
    if rest + 2 <= from.rows() {
        let values = row(rest).iter().zip(row(rest + 1));
        let pairs = to.chunks_exact_mut(width).zip(values);
        pairs.for_each(|(to, (a, b))| to[rest..rest + 2].copy_from_slice(&[*a, *b]));
        rest += 2;
    }
    if rest < from.rows() {
        to.chunks_exact_mut(width).zip(row(rest)).for_each(|(to, value)| to[rest] = *value);
    }
}

/// The transpose of a square.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn transpose_square(rows: [[f32; 4]; 4]) -> [[f32; 4]; 4] {
    use std::arch::x86_64::*;
    // SAFETY: every x86-64 has these instructions; loads and stores are of whole arrays.
    unsafe {
        let [a, b, c, d] = rows.map(|row| _mm_loadu_ps(row.as_ptr()));
        let (ab, cd) = (_mm_unpacklo_ps(a, b), _mm_unpacklo_ps(c, d));
        let (ab_high, cd_high) = (_mm_unpackhi_ps(a, b), _mm_unpackhi_ps(c, d));
        let columns = [
            _mm_movelh_ps(ab, cd),
            _mm_movehl_ps(cd, ab),
            _mm_movelh_ps(ab_high, cd_high),
            _mm_movehl_ps(cd_high, ab_high),
        ];
        columns.map(|column| {
            let mut to = [0.0; 4];
            _mm_storeu_ps(to.as_mut_ptr(), column);
            to
        })
    }
}

/// The transpose of a square.
#[cfg(not(target_arch = "x86_64"))]
#[inline(always)]
fn transpose_square(rows: [[f32; 4]; 4]) -> [[f32; 4]; 4] {
    std::array::from_fn(|i| std::array::from_fn(|j| rows[j][i]))
}

/// One micro tile: R rows and one panel's columns of C.
struct Tile<'a> {
    /// R values for each step, `a_step` apart.
    a: *const f32,
    a_step: usize,
    /// `[steps, N * WIDTH]`, maybe with further steps behind.
    b: &'a [f32],
    steps: usize,
    /// What to fetch meanwhile, and elements of it per step.
    next: *const f32,
    next_step: usize,
    c: *mut f32,
    stride: usize,
    /// Rows and columns that C has.
    rows: usize,
    cols: usize,
    add: bool,
    alpha: f32,
}

impl Tile<'_> {
    /// # Safety
    /// `rows` rows of `cols` elements at `c`, `stride` apart, are there, and nobody else uses them;
    /// `a` has R values for each step.
    #[inline(always)]
    unsafe fn run<V: Lane, const N: usize, const R: usize>(&self) {
        const { assert!(R * N * V::WIDTH <= LARGEST_TILE) };
        // SAFETY: lanes run only in builds for their own set, which `Isa` vouches for.
        let mut sums = [[unsafe { V::zero() }; N]; R];
        let mut next = self.next;
        for r in 0..self.rows {
            for n in 0..N {
                prefetch::<FIRST>(self.c.wrapping_add(r * self.stride + n * V::WIDTH));
            }
        }
        assert!(self.steps * N * V::WIDTH <= self.b.len(), "a panel's steps");
        let (mut a, mut b) = (self.a, self.b.as_ptr());
        // Counted, with plain pointers: bounds of slices would be worked out in every step.
        for _ in 0..self.steps {
            // SAFETY: `b` has N registers and `a` R values.
            unsafe {
                let columns: [V; N] = std::array::from_fn(|n| V::load(b.add(n * V::WIDTH)));
                for (r, sums) in sums.iter_mut().enumerate() {
                    let x = V::splat(a.add(r));
                    *sums = std::array::from_fn(|n| x.fma(columns[n], sums[n]));
                }
            }
            (a, b) = (a.wrapping_add(self.a_step), b.wrapping_add(N * V::WIDTH));
            prefetch::<SECOND>(next);
            next = next.wrapping_add(self.next_step);
        }
        if self.rows == R && self.cols == N * V::WIDTH {
            // SAFETY: the tile's rows and columns of C are all there.
            unsafe { self.finish::<V, N, R>(&sums, self.c, self.stride, self.add) };
            return;
        }
        let mut whole = [0.0f32; LARGEST_TILE];
        // SAFETY: `whole` has room for every micro tile.
        unsafe { self.finish::<V, N, R>(&sums, whole.as_mut_ptr(), N * V::WIDTH, false) };
        for (r, from) in whole.chunks_exact(N * V::WIDTH).take(self.rows).enumerate() {
            // SAFETY: row `r` of C has `cols` elements from here on.
            let to =
                unsafe { std::slice::from_raw_parts_mut(self.c.add(r * self.stride), self.cols) };
            for (to, from) in to.iter_mut().zip(from) {
                *to = if self.add { *to + from } else { *from };
            }
        }
    }

    /// # Safety
    /// R rows of `N * WIDTH` elements at `c`, `stride` apart, can be read and written.
    #[inline(always)]
    unsafe fn finish<V: Lane, const N: usize, const R: usize>(
        &self,
        sums: &[[V; N]; R],
        c: *mut f32,
        stride: usize,
        add: bool,
    ) {
        // SAFETY: the caller's promise covers every element below.
        unsafe {
            let (alpha, one) = (V::splat(&self.alpha), V::splat(&1.0));
            for (r, sums) in sums.iter().enumerate() {
                for (n, &sum) in sums.iter().enumerate() {
                    let to = c.add(r * stride + n * V::WIDTH);
                    let sum = sum.fma(alpha, V::zero());
                    (if add { sum.fma(one, V::load(to)) } else { sum }).store(to);
                }
            }
        }
    }
}
