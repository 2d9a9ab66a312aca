//! The inner loops of a bfloat16 product: a block of C from packed pairs.
//!
//! A pair is two bfloat16 values of neighbouring k in one word, the first in its lower half. A is packed
//! as `[rows, pairs]`, B as panels `[pairs, panel]`.
//!
//! Invariants:
//! - an element of C starts from what C holds, or from zero, and goes once through all of k in order, so
//!   that its bits depend on neither block shapes nor threads. How the products of a pair are added
//!   depends on the way: [`Way`] says how;
//! - a way is used only where its instructions were detected.
#![allow(unsafe_code)]

use std::sync::OnceLock;

use super::Accum;
use super::lane::{Lane, Plain};
use super::matrix::MatMut;

/// Pairs that the widest way takes at once: k is filled up with zeros to a multiple.
pub(super) const PAIRS: usize = 16;
/// Elements of the largest micro tile of all ways.
const LARGEST_TILE: usize = 32 * 32;

/// Instructions of this processor that multiply pairs: only [`Way::available`] makes one, so that having
/// one proves that they are there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Way(Set);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Set {
    /// Tiles of 16 x 16: of 16 pairs, the sums of the first and of the second products are added up
    /// each from zero, then together, then to the element.
    #[cfg(target_arch = "x86_64")]
    Amx,
    /// `vdpbf16ps`: the second product of each pair is added to the element, then the first; subnormal
    /// numbers count as zero.
    #[cfg(target_arch = "x86_64")]
    Avx512Bf16,
    /// As `Avx512Bf16`, with float32 multiply-adds and subnormal numbers as they are.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    Portable,
}

impl Way {
    /// The fastest of this processor.
    pub(super) fn detect() -> Way {
        static BEST: OnceLock<Way> = OnceLock::new();
        *BEST.get_or_init(|| Way::available().next().unwrap_or(Way(Set::Portable)))
    }

    /// All ways of this processor, the fastest first.
    pub(super) fn available() -> impl Iterator<Item = Way> {
        #[cfg(target_arch = "x86_64")]
        let wide = [
            amx::is_there().then_some(Set::Amx),
            (is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bf16"))
                .then_some(Set::Avx512Bf16),
            is_x86_feature_detected!("avx512f").then_some(Set::Avx512),
            (is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"))
                .then_some(Set::Avx2),
        ];
        #[cfg(not(target_arch = "x86_64"))]
        let wide: [Option<Set>; 0] = [];
        wide.into_iter().flatten().chain([Set::Portable]).map(Way)
    }

    /// Columns of a packed panel of B.
    pub(super) fn panel(self) -> usize {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Set::Amx => amx::COLUMNS,
            #[cfg(target_arch = "x86_64")]
            Set::Avx512Bf16 | Set::Avx512 => 32,
            #[cfg(target_arch = "x86_64")]
            Set::Avx2 => 16,
            Set::Portable => 2 * Plain::WIDTH,
        }
    }

    /// Rows of packed A that are read at once: A is filled up to a multiple.
    pub(super) fn group(self) -> usize {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Set::Amx => amx::ROWS,
            #[cfg(target_arch = "x86_64")]
            Set::Avx512Bf16 => 12,
            #[cfg(target_arch = "x86_64")]
            Set::Avx512 => 8,
            #[cfg(target_arch = "x86_64")]
            Set::Avx2 => 4,
            Set::Portable => 4,
        }
    }

    /// `c (+)= a * b`: `a` has the rows of `c`, filled up to whole groups, `b` its columns, filled up to
    /// whole panels, both `pairs` pairs.
    pub(super) fn block(self, c: MatMut<'_>, accum: Accum, a: &[u32], b: &[u32], pairs: usize) {
        let (rows, columns) = (c.rows(), c.cols());
        assert!(pairs > 0 && pairs.is_multiple_of(PAIRS), "{pairs} pairs");
        assert!(rows.next_multiple_of(self.group()) * pairs <= a.len(), "a product's packed rows");
        assert!(columns.next_multiple_of(self.panel()) * pairs <= b.len(), "packed columns");
        let block = Block { c, add: accum == Accum::Add, a, b, pairs };
        match self.0 {
            // SAFETY: the value was made after its instructions were detected.
            #[cfg(target_arch = "x86_64")]
            Set::Amx => unsafe { amx::run(block) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Set::Avx512Bf16 => unsafe { x86::native(block) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Set::Avx512 => unsafe { x86::avx512(block) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Set::Avx2 => unsafe { x86::avx2(block) },
            Set::Portable => block.run::<Widened<Plain>, 2, 4>(),
        }
    }
}

/// Operands of [`Way::block`], whose shapes were checked there.
struct Block<'a> {
    c: MatMut<'a>,
    add: bool,
    a: &'a [u32],
    b: &'a [u32],
    pairs: usize,
}

/// Float32 sums and the pairs whose products go into them.
trait Dot: Copy {
    const WIDTH: usize;
    type Sums: Lane;
    type Pairs: Copy;

    /// # Safety
    /// As for all of these: the instructions were detected, `WIDTH` words at `from` can be read.
    unsafe fn load(from: *const u32) -> Self::Pairs;
    /// # Safety
    /// The word at `from` can be read.
    unsafe fn splat(from: *const u32) -> Self::Pairs;
    /// # Safety
    /// As for [`Dot::load`].
    unsafe fn add(a: Self::Pairs, b: Self::Pairs, sums: Self::Sums) -> Self::Sums;
}

/// Pairs as two float32 registers, with one multiply-add each.
#[derive(Clone, Copy)]
struct Widened<V>(V);

impl<V: Lane> Dot for Widened<V> {
    const WIDTH: usize = V::WIDTH;
    type Sums = V;
    /// The second values, the first ones.
    type Pairs = [V; 2];

    #[inline(always)]
    unsafe fn load(from: *const u32) -> [V; 2] {
        // SAFETY: the caller's promise.
        unsafe { V::halves(from) }
    }

    #[inline(always)]
    unsafe fn splat(from: *const u32) -> [V; 2] {
        // SAFETY: the caller's promise.
        unsafe { V::splat_halves(from) }
    }

    #[inline(always)]
    unsafe fn add(a: [V; 2], b: [V; 2], sums: V) -> V {
        // SAFETY: the caller's promise.
        unsafe { a[1].fma(b[1], a[0].fma(b[0], sums)) }
    }
}

impl Block<'_> {
    #[inline(always)]
    fn run<D: Dot, const N: usize, const R: usize>(mut self) {
        const { assert!(R * N * D::WIDTH <= LARGEST_TILE) };
        let width = N * D::WIDTH;
        let stride = self.c.stride();
        for (j, b) in self.b.chunks_exact(width * self.pairs).enumerate() {
            let columns = self.c.cols().saturating_sub(j * width).min(width);
            if columns == 0 {
                return;
            }
            for (i, a) in self.a.chunks_exact(R * self.pairs).enumerate() {
                let rows = self.c.rows().saturating_sub(i * R).min(R);
                if rows == 0 {
                    break;
                }
                // SAFETY: `rows` rows and `columns` columns from here on are inside C.
                let c = unsafe { self.c.start().add(i * R * stride + j * width) };
                if rows == R && columns == width {
                    // SAFETY: the tile is inside C, which is borrowed exclusively; the operands
                    // have R rows and a panel's columns.
                    unsafe { tile::<D, N, R>(a, b, self.pairs, c, stride, self.add) };
                    continue;
                }
                let mut whole = [0.0f32; LARGEST_TILE];
                // SAFETY: as above; `whole` has room for every micro tile.
                unsafe {
                    copy(c, stride, whole.as_mut_ptr(), width, (rows, columns));
                    tile::<D, N, R>(a, b, self.pairs, whole.as_mut_ptr(), width, self.add);
                    copy(whole.as_ptr(), width, c, stride, (rows, columns));
                }
            }
        }
    }
}

/// # Safety
/// So many rows and columns can be read at `from` and written at `to`.
unsafe fn copy(
    from: *const f32,
    from_stride: usize,
    to: *mut f32,
    to_stride: usize,
    (rows, columns): (usize, usize),
) {
    for r in 0..rows {
        // SAFETY: the caller's promise; one of the two is a local of its.
        unsafe {
            let row = from.add(r * from_stride);
            std::ptr::copy_nonoverlapping(row, to.add(r * to_stride), columns);
        }
    }
}

/// One micro tile: R rows and a panel's columns of C.
///
/// # Safety
/// R rows of `N * WIDTH` elements at `c`, `stride` apart, can be read and written; `a` has R rows, `b` the
/// columns, of `pairs` pairs; the instructions were detected.
#[inline(always)]
unsafe fn tile<D: Dot, const N: usize, const R: usize>(
    a: &[u32],
    b: &[u32],
    pairs: usize,
    c: *mut f32,
    stride: usize,
    add: bool,
) {
    // SAFETY: the caller's promise covers every element below.
    unsafe {
        let at = |r: usize, n: usize| c.add(r * stride + n * D::WIDTH);
        let mut sums = [[D::Sums::zero(); N]; R];
        if add {
            for (r, sums) in sums.iter_mut().enumerate() {
                *sums = std::array::from_fn(|n| D::Sums::load(at(r, n)));
            }
        }
        let (mut a, mut b) = (a.as_ptr(), b.as_ptr());
        for _ in 0..pairs {
            let columns: [D::Pairs; N] = std::array::from_fn(|n| D::load(b.add(n * D::WIDTH)));
            for (r, sums) in sums.iter_mut().enumerate() {
                let x = D::splat(a.add(r * pairs));
                *sums = std::array::from_fn(|n| D::add(x, columns[n], sums[n]));
            }
            (a, b) = (a.wrapping_add(1), b.wrapping_add(N * D::WIDTH));
        }
        for (r, sums) in sums.iter().enumerate() {
            for (n, sum) in sums.iter().enumerate() {
                sum.store(at(r, n));
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{Block, Dot, Widened};

    /// `vdpbf16ps`
    #[derive(Clone, Copy)]
    struct Native;

    impl Dot for Native {
        const WIDTH: usize = 16;
        type Sums = __m512;
        type Pairs = __m512bh;

        #[inline(always)]
        unsafe fn load(from: *const u32) -> __m512bh {
            // SAFETY: the caller's promise; both types are 64 bytes of anything.
            unsafe { std::mem::transmute(_mm512_loadu_si512(from.cast())) }
        }

        #[inline(always)]
        unsafe fn splat(from: *const u32) -> __m512bh {
            // SAFETY: as in `load`.
            unsafe { std::mem::transmute(_mm512_set1_epi32(*from as i32)) }
        }

        #[inline(always)]
        unsafe fn add(a: __m512bh, b: __m512bh, sums: __m512) -> __m512 {
            // SAFETY: the caller's promise.
            unsafe { _mm512_dpbf16_ps(sums, a, b) }
        }
    }

    #[target_feature(enable = "avx512f,avx512bf16")]
    pub(super) fn native(block: Block<'_>) {
        block.run::<Native, 2, 12>();
    }

    #[target_feature(enable = "avx512f")]
    pub(super) fn avx512(block: Block<'_>) {
        block.run::<Widened<__m512>, 2, 8>();
    }

    #[target_feature(enable = "avx2,fma")]
    pub(super) fn avx2(block: Block<'_>) {
        block.run::<Widened<__m256>, 2, 4>();
    }
}

/// Tile registers (AMX). Their instructions have no stable intrinsics, so they are written out.
#[cfg(target_arch = "x86_64")]
mod amx {
    use std::arch::asm;
    use std::sync::OnceLock;

    use super::{Block, LARGEST_TILE, PAIRS, copy};
    use crate::os;

    /// Two by two tiles of 16 by 16.
    pub(super) const ROWS: usize = 32;
    pub(super) const COLUMNS: usize = 32;

    /// Whether the processor has them and the system saves them for us.
    pub(super) fn is_there() -> bool {
        static THERE: OnceLock<bool> = OnceLock::new();
        *THERE.get_or_init(|| {
            const AMX_BF16: u32 = 1 << 22;
            const AMX_TILE: u32 = 1 << 24;
            // The leaf exists wherever AVX2 does.
            let wide = is_x86_feature_detected!("avx2");
            let has = || std::arch::x86_64::__cpuid_count(7, 0).edx & (AMX_BF16 | AMX_TILE);
            wide && has() == AMX_BF16 | AMX_TILE && os::may_use_tiles()
        })
    }

    /// Shapes of the eight tiles: 16 rows of 64 bytes each.
    #[repr(C, align(64))]
    struct Shapes {
        palette: u8,
        start_row: u8,
        reserved: [u8; 14],
        row_bytes: [u16; 16],
        rows: [u8; 16],
    }

    static SHAPES: Shapes = Shapes {
        palette: 1,
        start_row: 0,
        reserved: [0; 14],
        row_bytes: [64, 64, 64, 64, 64, 64, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0],
        rows: [16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0],
    };

    /// # Safety
    /// [`is_there`]
    pub(super) unsafe fn run(mut block: Block<'_>) {
        // SAFETY: the instruction is there; it reads 64 bytes.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const SHAPES, options(nostack, readonly)) };
        let stride = block.c.stride();
        let panels = block.c.cols().div_ceil(COLUMNS);
        for (j, b) in block.b.chunks_exact(COLUMNS * block.pairs).take(panels).enumerate() {
            let columns = (block.c.cols() - j * COLUMNS).min(COLUMNS);
            let groups = block.c.rows().div_ceil(ROWS);
            for (i, a) in block.a.chunks_exact(ROWS * block.pairs).take(groups).enumerate() {
                let rows = (block.c.rows() - i * ROWS).min(ROWS);
                // SAFETY: `rows` rows and `columns` columns from here on are inside C, which is
                // borrowed exclusively; `whole` has room for the tile; shapes are configured.
                unsafe {
                    let c = block.c.start().add(i * ROWS * stride + j * COLUMNS);
                    if rows == ROWS && columns == COLUMNS {
                        tile(a, b, block.pairs, c, stride, block.add);
                        continue;
                    }
                    let mut whole = [0.0f32; LARGEST_TILE];
                    copy(c, stride, whole.as_mut_ptr(), COLUMNS, (rows, columns));
                    tile(a, b, block.pairs, whole.as_mut_ptr(), COLUMNS, block.add);
                    copy(whole.as_ptr(), COLUMNS, c, stride, (rows, columns));
                }
            }
        }
        // SAFETY: as above. Nobody else in the process uses tiles.
        unsafe { asm!("tilerelease", options(nomem, nostack)) };
    }

    /// # Safety
    /// 32 rows of 32 elements at `c`, `stride` apart, can be read and written; `a` has 32 rows, `b` 32
    /// columns, of `pairs` pairs, a multiple of 16; shapes are configured.
    #[inline]
    unsafe fn tile(a: &[u32], b: &[u32], pairs: usize, c: *mut f32, stride: usize, add: bool) {
        // SAFETY: the caller's promise. Tile registers are nobody's but these instructions'.
        unsafe {
            let (c_row, below) = (stride * 4, c.wrapping_add(16 * stride));
            if add {
                asm!(
                    "tileloadd tmm0, [{c} + {s}*1]",
                    "tileloadd tmm1, [{c} + {s}*1 + 64]",
                    "tileloadd tmm2, [{d} + {s}*1]",
                    "tileloadd tmm3, [{d} + {s}*1 + 64]",
                    c = in(reg) c, d = in(reg) below, s = in(reg) c_row,
                    options(nostack, readonly),
                );
            } else {
                asm!(
                    "tilezero tmm0",
                    "tilezero tmm1",
                    "tilezero tmm2",
                    "tilezero tmm3",
                    options(nomem, nostack),
                );
            }
            asm!(
                "2:",
                "tileloadd tmm6, [{b} + {bs}*1]",
                "tileloadd tmm4, [{a} + {s}*1]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm7, [{b} + {bs}*1 + 64]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tileloadd tmm5, [{d} + {s}*1]",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "add {a}, 64",
                "add {d}, 64",
                "add {b}, 2048",
                "dec {n}",
                "jnz 2b",
                a = inout(reg) a.as_ptr() => _,
                d = inout(reg) a.as_ptr().wrapping_add(16 * pairs) => _,
                b = inout(reg) b.as_ptr() => _,
                n = inout(reg) pairs / PAIRS => _,
                s = in(reg) pairs * 4,
                bs = in(reg) COLUMNS * 4,
                options(nostack, readonly),
            );
            asm!(
                "tilestored [{c} + {s}*1], tmm0",
                "tilestored [{c} + {s}*1 + 64], tmm1",
                "tilestored [{d} + {s}*1], tmm2",
                "tilestored [{d} + {s}*1 + 64], tmm3",
                c = in(reg) c, d = in(reg) below, s = in(reg) c_row,
                options(nostack),
            );
        }
    }
}
