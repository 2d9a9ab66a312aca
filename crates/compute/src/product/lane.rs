//! Vector registers of each instruction set, as the product's kernel uses them.
//!
//! Invariant: all of them round once per multiply-add, so that they give the same bits.
#![allow(unsafe_code)]

/// A vector register of float32 values.
pub(super) trait Lane: Copy {
    const WIDTH: usize;

    /// # Safety
    /// As for all of these: the lane's instruction set was detected.
    unsafe fn zero() -> Self;
    /// # Safety
    /// `WIDTH` elements from `from` on can be read.
    unsafe fn load(from: *const f32) -> Self;
    /// # Safety
    /// `from` can be read.
    unsafe fn splat(from: *const f32) -> Self;
    /// # Safety
    /// `WIDTH` elements from `to` on can be written.
    unsafe fn store(self, to: *mut f32);
    /// # Safety
    /// As for [`Lane::zero`].
    unsafe fn fma(self, by: Self, plus: Self) -> Self;
    /// The upper and the lower halves of words, as the bfloat16 values that they are.
    ///
    /// # Safety
    /// As for [`Lane::load`].
    unsafe fn halves(from: *const u32) -> [Self; 2];
    /// The same of one word, in every element.
    ///
    /// # Safety
    /// As for [`Lane::splat`].
    unsafe fn splat_halves(from: *const u32) -> [Self; 2];
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::Lane;

    const UPPER: i32 = 0xffff_0000u32 as i32;

    #[inline(always)]
    unsafe fn halves512(words: __m512i) -> [__m512; 2] {
        // SAFETY: the caller vouches for the instruction set.
        unsafe {
            let upper = _mm512_and_si512(words, _mm512_set1_epi32(UPPER));
            [_mm512_castsi512_ps(upper), _mm512_castsi512_ps(_mm512_slli_epi32::<16>(words))]
        }
    }

    impl Lane for __m512 {
        const WIDTH: usize = 16;

        #[inline(always)]
        unsafe fn zero() -> Self {
            // SAFETY: the caller vouches for the instruction set.
            unsafe { _mm512_setzero_ps() }
        }

        #[inline(always)]
        unsafe fn load(from: *const f32) -> Self {
            // SAFETY: as in `zero`; the caller vouches for the elements.
            unsafe { _mm512_loadu_ps(from) }
        }

        #[inline(always)]
        unsafe fn splat(from: *const f32) -> Self {
            // SAFETY: as in `load`.
            unsafe { _mm512_set1_ps(*from) }
        }

        #[inline(always)]
        unsafe fn store(self, to: *mut f32) {
            // SAFETY: as in `load`.
            unsafe { _mm512_storeu_ps(to, self) }
        }

        #[inline(always)]
        unsafe fn fma(self, by: Self, plus: Self) -> Self {
            // SAFETY: as in `zero`.
            unsafe { _mm512_fmadd_ps(self, by, plus) }
        }

        #[inline(always)]
        unsafe fn halves(from: *const u32) -> [Self; 2] {
            // SAFETY: as in `load`.
            unsafe { halves512(_mm512_loadu_si512(from.cast())) }
        }

        #[inline(always)]
        unsafe fn splat_halves(from: *const u32) -> [Self; 2] {
            // SAFETY: as in `splat`.
            unsafe { halves512(_mm512_set1_epi32(*from as i32)) }
        }
    }

    #[inline(always)]
    unsafe fn halves256(words: __m256i) -> [__m256; 2] {
        // SAFETY: the caller vouches for the instruction set.
        unsafe {
            let upper = _mm256_and_si256(words, _mm256_set1_epi32(UPPER));
            [_mm256_castsi256_ps(upper), _mm256_castsi256_ps(_mm256_slli_epi32::<16>(words))]
        }
    }

    impl Lane for __m256 {
        const WIDTH: usize = 8;

        #[inline(always)]
        unsafe fn zero() -> Self {
            // SAFETY: the caller vouches for the instruction set.
            unsafe { _mm256_setzero_ps() }
        }

        #[inline(always)]
        unsafe fn load(from: *const f32) -> Self {
            // SAFETY: as in `zero`; the caller vouches for the elements.
            unsafe { _mm256_loadu_ps(from) }
        }

        #[inline(always)]
        unsafe fn splat(from: *const f32) -> Self {
            // SAFETY: as in `load`.
            unsafe { _mm256_set1_ps(*from) }
        }

        #[inline(always)]
        unsafe fn store(self, to: *mut f32) {
            // SAFETY: as in `load`.
            unsafe { _mm256_storeu_ps(to, self) }
        }

        #[inline(always)]
        unsafe fn fma(self, by: Self, plus: Self) -> Self {
            // SAFETY: as in `zero`.
            unsafe { _mm256_fmadd_ps(self, by, plus) }
        }

        #[inline(always)]
        unsafe fn halves(from: *const u32) -> [Self; 2] {
            // SAFETY: as in `load`.
            unsafe { halves256(_mm256_loadu_si256(from.cast())) }
        }

        #[inline(always)]
        unsafe fn splat_halves(from: *const u32) -> [Self; 2] {
            // SAFETY: as in `splat`.
            unsafe { halves256(_mm256_set1_epi32(*from as i32)) }
        }
    }
}

/// The portable register. `mul_add` rounds once, as the instructions do.
#[derive(Clone, Copy)]
pub(super) struct Plain([f32; 8]);

impl Plain {
    fn halves_of(words: [u32; 8]) -> [Plain; 2] {
        [words.map(|word| word & 0xffff_0000), words.map(|word| word << 16)]
            .map(|words| Plain(words.map(f32::from_bits)))
    }
}

impl Lane for Plain {
    const WIDTH: usize = 8;

    #[inline(always)]
    unsafe fn zero() -> Self {
        Plain([0.0; 8])
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the caller vouches for the elements; float32 arrays have float32's alignment.
        Plain(unsafe { *from.cast() })
    }

    #[inline(always)]
    unsafe fn splat(from: *const f32) -> Self {
        // SAFETY: the caller vouches for the element.
        Plain([unsafe { *from }; 8])
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: as in `load`.
        unsafe { *to.cast() = self.0 }
    }

    #[inline(always)]
    unsafe fn fma(self, by: Self, plus: Self) -> Self {
        Plain(std::array::from_fn(|i| self.0[i].mul_add(by.0[i], plus.0[i])))
    }

    #[inline(always)]
    unsafe fn halves(from: *const u32) -> [Self; 2] {
        // SAFETY: as in `load`.
        Plain::halves_of(unsafe { *from.cast() })
    }

    #[inline(always)]
    unsafe fn splat_halves(from: *const u32) -> [Self; 2] {
        // SAFETY: as in `splat`.
        Plain::halves_of([unsafe { *from }; 8])
    }
}
