//! Block-wise 8-bit moments: codes of values relative to the largest one of their block.
//!
//! A code stands for one of 256 numbers between -1 and 1 (0 and 1 for squares), seven decades of
//! which each has twice as many as the one below, evenly spaced: the dynamic code of Dettmers,
//! Lewis, Shleifer and Zettlemoyer, "8-bit Optimizers via Block-wise Quantization"
//! (arXiv:2110.02861), with their block of 256.
//!
//! Invariants:
//! - a value gets the nearest code, the upper one from the middle on; but a square that is not zero
//!   never becomes zero, which would let a moment beside it divide by nothing but epsilon;
//! - blocks are independent, and a block of zeros comes back as zeros whatever its codes say.

use std::sync::LazyLock;

use crate::simd::{InstructionSet, Kernel};

/// Values that share a scale.
pub const CODE_BLOCK: usize = 256;

const CODES: usize = 256;
const DECADES: i32 = 7;
/// Positive numbers fall into cells by exponent and leading 7 bits of mantissa, from 2^-24 up to
/// 1; what is smaller falls into the first. No cell has more than one boundary between codes.
const FIRST_CELL: u32 = 0x3380;
const LAST_CELL: u32 = 0x3f80 - FIRST_CELL;
const NEGATIVE_CELLS: usize = 4096;

/// A set of 256 numbers that codes stand for.
pub struct Code {
    /// By code, ascending.
    numbers: [f32; CODES],
    /// By code, the least number that the next code is nearer to; no number for the last one.
    upper: [f32; CODES],
    /// By cell, the code of its lowest number.
    cells: [u8; 2 * NEGATIVE_CELLS],
    /// The least code of a number that is not zero.
    least: u8,
}

impl std::fmt::Debug for Code {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Code").finish_non_exhaustive()
    }
}

/// For `exp_avg`: numbers of both signs.
pub static SIGNED: LazyLock<Code> = LazyLock::new(|| Code::new(true));
/// For `exp_avg_sq`: no number is negative.
pub static UNSIGNED: LazyLock<Code> = LazyLock::new(|| Code::new(false));

impl Code {
    fn new(signed: bool) -> Code {
        let mut numbers = vec![0.0, 1.0];
        for decade in 0..DECADES {
            let top = 10f64.powi(decade - DECADES + 1);
            let count = 1 << (decade + i32::from(!signed));
            let width = 0.9 / f64::from(count);
            for i in 0..count {
                let number = top * (0.1 + width * (f64::from(i) + 0.5));
                numbers.push(number);
                if signed {
                    numbers.push(-number);
                }
            }
        }
        numbers.sort_by(f64::total_cmp);
        assert_eq!(numbers.len(), CODES, "numbers of a code");
        let mut code = Code {
            numbers: [0.0; CODES],
            upper: [f32::INFINITY; CODES],
            cells: [0; 2 * NEGATIVE_CELLS],
            least: u8::from(!signed),
        };
        for (to, number) in code.numbers.iter_mut().zip(&numbers) {
            *to = *number as f32;
        }
        for (to, pair) in code.upper.iter_mut().zip(numbers.windows(2)) {
            *to = ((pair[0] + pair[1]) / 2.0) as f32;
        }
        for cell in 0..=LAST_CELL {
            let low = if cell == 0 { 0.0 } else { f32::from_bits((cell + FIRST_CELL) << 16) };
            let high = f32::from_bits(((cell + FIRST_CELL + 1) << 16) - 1);
            code.cells[cell as usize] = code.search(low);
            code.cells[cell as usize + NEGATIVE_CELLS] = code.search(-high);
        }
        code
    }

    /// The nearest code, by looking at all of them.
    fn search(&self, number: f32) -> u8 {
        self.upper.iter().take_while(|upper| number >= **upper).count().min(CODES - 1) as u8
    }

    /// The numbers that codes stand for, ascending.
    pub fn numbers(&self) -> &[f32; CODES] {
        &self.numbers
    }

    /// Codes of `values`, and the largest magnitude of each block of [`CODE_BLOCK`], of which the
    /// last may be short.
    ///
    /// # Panics
    /// When `codes` has another length than `values`, or `scales` one that does not fit.
    pub fn encode(&self, values: &[f32], codes: &mut [u8], scales: &mut [f32]) {
        InstructionSet::best().encode(self, values, codes, scales);
    }

    /// The values that codes and scales stand for.
    ///
    /// # Panics
    /// As [`Code::encode`].
    pub fn decode(&self, codes: &[u8], scales: &[f32], values: &mut [f32]) {
        InstructionSet::best().decode(self, codes, scales, values);
    }
}

impl InstructionSet {
    /// [`Code::encode`] on this set.
    pub fn encode(self, code: &Code, values: &[f32], codes: &mut [u8], scales: &mut [f32]) {
        check_lengths(values.len(), codes.len(), scales.len());
        self.run(Encode { code, values, codes, scales });
    }

    /// [`Code::decode`] on this set.
    pub fn decode(self, code: &Code, codes: &[u8], scales: &[f32], values: &mut [f32]) {
        check_lengths(values.len(), codes.len(), scales.len());
        self.run(Decode { code, codes, scales, values });
    }
}

fn check_lengths(values: usize, codes: usize, scales: usize) {
    assert_eq!(codes, values, "length of the codes");
    assert_eq!(scales, values.div_ceil(CODE_BLOCK), "length of the scales");
}

struct Encode<'a> {
    code: &'a Code,
    values: &'a [f32],
    codes: &'a mut [u8],
    scales: &'a mut [f32],
}

impl Kernel for Encode<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Encode { code, values, codes, scales } = self;
        let (whole, rest) = values.as_chunks::<CODE_BLOCK>();
        let (whole_codes, rest_codes) = codes.as_chunks_mut::<CODE_BLOCK>();
        for ((values, codes), scale) in whole.iter().zip(whole_codes).zip(&mut *scales) {
            *scale = encode_block(code, values, codes);
        }
        if let Some(scale) = scales.last_mut().filter(|_| !rest.is_empty()) {
            let (mut values, mut codes) = ([0.0; CODE_BLOCK], [0; CODE_BLOCK]);
            values[..rest.len()].copy_from_slice(rest);
            *scale = encode_block(code, &values, &mut codes);
            rest_codes.copy_from_slice(&codes[..rest.len()]);
        }
    }
}

#[inline(always)]
fn encode_block(code: &Code, values: &[f32; CODE_BLOCK], codes: &mut [u8; CODE_BLOCK]) -> f32 {
    let mut tops = [0.0f32; 16];
    for values in values.as_chunks::<16>().0 {
        for (top, value) in tops.iter_mut().zip(values) {
            let value = value.abs();
            *top = if value > *top { value } else { *top };
        }
    }
    let scale = tops.iter().fold(0.0, |top: f32, value| if *value > top { *value } else { top });
    let divisor = if scale > 0.0 { scale } else { 1.0 };
    let mut numbers = [0.0f32; CODE_BLOCK];
    let mut cells = [0u16; CODE_BLOCK];
    for i in 0..CODE_BLOCK {
        let number = values[i] / divisor;
        let bits = number.to_bits();
        let cell = ((bits & 0x7fff_ffff) >> 16).clamp(FIRST_CELL, FIRST_CELL + LAST_CELL);
        numbers[i] = number;
        cells[i] = (cell - FIRST_CELL + (bits >> 31) * NEGATIVE_CELLS as u32) as u16;
    }
    for i in 0..CODE_BLOCK {
        let low = code.cells[usize::from(cells[i]) % (2 * NEGATIVE_CELLS)];
        let nearest = low + u8::from(numbers[i] >= code.upper[usize::from(low)]);
        codes[i] = if values[i] == 0.0 { nearest } else { nearest.max(code.least) };
    }
    scale
}

struct Decode<'a> {
    code: &'a Code,
    codes: &'a [u8],
    scales: &'a [f32],
    values: &'a mut [f32],
}

impl Kernel for Decode<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let blocks = self.values.chunks_mut(CODE_BLOCK).zip(self.codes.chunks(CODE_BLOCK));
        for ((values, codes), scale) in blocks.zip(self.scales) {
            for (value, code) in values.iter_mut().zip(codes) {
                *value = self.code.numbers[usize::from(*code)] * scale;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cell_has_one_boundary_at_most() {
        for code in [&*SIGNED, &*UNSIGNED] {
            for cell in 1..LAST_CELL {
                let low = f32::from_bits((cell + FIRST_CELL) << 16);
                let high = f32::from_bits(((cell + FIRST_CELL + 1) << 16) - 1);
                assert!(code.search(high) - code.search(low) <= 1, "{low:e}");
                assert!(code.search(-low) - code.search(-high) <= 1, "{low:e}");
            }
            let least = f32::from_bits(((FIRST_CELL + 1) << 16) - 1);
            assert_eq!(code.search(least), code.search(0.0));
            assert_eq!(code.search(-least), code.search(0.0));
        }
    }

    #[test]
    fn every_set_finds_the_nearest_code_around_every_boundary() {
        for code in [&*SIGNED, &*UNSIGNED] {
            let mut numbers = vec![1.0, 0.0, -0.0, -1.0, 1e-7, -1e-7, f32::MIN_POSITIVE, 1e-40];
            for upper in &code.upper[..CODES - 1] {
                let bits = upper.to_bits();
                numbers.extend([bits - 1, bits, bits + 1].map(f32::from_bits));
            }
            numbers.extend((0..CODES).map(|i| code.numbers[i]));
            // A short last block, whose largest value is 1 like that of the others.
            for block in numbers.chunks_mut(CODE_BLOCK) {
                block[0] = 1.0;
            }
            let want = |number: &f32| match code.search(*number) {
                0 if *number != 0.0 => code.least,
                nearest => nearest,
            };
            let want: Vec<u8> = numbers.iter().map(want).collect();
            for set in InstructionSet::available() {
                let mut codes = vec![0; numbers.len()];
                let mut scales = vec![0.0; numbers.len().div_ceil(CODE_BLOCK)];
                set.encode(code, &numbers, &mut codes, &mut scales);
                assert_eq!(codes, want, "{set}");
                assert!(scales.iter().all(|scale| *scale == 1.0));
            }
        }
    }
}
