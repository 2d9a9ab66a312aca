//! A vectorised search for infinities and NaNs.

use crate::simd::{InstructionSet, Kernel};

/// Everything but the sign.
const MAGNITUDE_BITS: u32 = 0x7fff_ffff;

/// One in the exponent: carries into the sign bit exactly from the exponent of infinities and
/// NaNs, which is all ones.
const EXPONENT_ONE: u32 = 0x0080_0000;

/// The elements looked at between two chances to stop.
const STRIDE: usize = 4096;

/// Whether `slice` has neither an infinity nor a NaN.
pub fn is_finite(slice: &[f32]) -> bool {
    InstructionSet::best().is_finite(slice)
}

impl InstructionSet {
    /// [`is_finite`] on this set.
    pub fn is_finite(self, slice: &[f32]) -> bool {
        self.run(IsFinite(slice))
    }
}

struct IsFinite<'a>(&'a [f32]);

impl Kernel for IsFinite<'_> {
    type Output = bool;

    #[inline(always)]
    fn run(self) -> bool {
        for piece in self.0.chunks(STRIDE) {
            let mut carried = 0;
            for value in piece {
                carried |= (value.to_bits() & MAGNITUDE_BITS) + EXPONENT_ONE;
            }
            if carried > MAGNITUDE_BITS {
                return false;
            }
        }
        true
    }
}
