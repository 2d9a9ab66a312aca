//! GGML's block formats, dequantised to float32.
//!
//! Formulas: `gguf.quants` of the Python package `gguf`, whose results these equal bit for bit:
//! products and sums are separate float32 operations, in its order.

use half::{bf16, f16};

/// Element type of a GGUF tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GgmlType {
    F32,
    F16,
    BF16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q4K,
    Q5K,
    Q6K,
}

const SMALL_BLOCK: usize = 32;
const LARGE_BLOCK: usize = 256;

impl GgmlType {
    /// The type with this number; the `Err` is the name of one that is not converted.
    pub(crate) fn from_code(code: u32) -> Result<GgmlType, String> {
        Ok(match code {
            0 => GgmlType::F32,
            1 => GgmlType::F16,
            2 => GgmlType::Q4_0,
            3 => GgmlType::Q4_1,
            6 => GgmlType::Q5_0,
            7 => GgmlType::Q5_1,
            8 => GgmlType::Q8_0,
            12 => GgmlType::Q4K,
            13 => GgmlType::Q5K,
            14 => GgmlType::Q6K,
            30 => GgmlType::BF16,
            _ => return Err(refused_name(code)),
        })
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            GgmlType::F32 => "F32",
            GgmlType::F16 => "F16",
            GgmlType::BF16 => "BF16",
            GgmlType::Q4_0 => "Q4_0",
            GgmlType::Q4_1 => "Q4_1",
            GgmlType::Q5_0 => "Q5_0",
            GgmlType::Q5_1 => "Q5_1",
            GgmlType::Q8_0 => "Q8_0",
            GgmlType::Q4K => "Q4_K",
            GgmlType::Q5K => "Q5_K",
            GgmlType::Q6K => "Q6_K",
        }
    }

    /// Elements of one block.
    pub(crate) fn block_elements(self) -> usize {
        match self {
            GgmlType::F32 | GgmlType::F16 | GgmlType::BF16 => 1,
            GgmlType::Q4K | GgmlType::Q5K | GgmlType::Q6K => LARGE_BLOCK,
            _ => SMALL_BLOCK,
        }
    }

    /// Bytes of one block.
    pub(crate) fn block_bytes(self) -> usize {
        match self {
            GgmlType::F32 => 4,
            GgmlType::F16 | GgmlType::BF16 => 2,
            GgmlType::Q4_0 => 2 + 16,
            GgmlType::Q4_1 => 4 + 16,
            GgmlType::Q5_0 => 2 + 4 + 16,
            GgmlType::Q5_1 => 4 + 4 + 16,
            GgmlType::Q8_0 => 2 + 32,
            GgmlType::Q4K => 4 + 12 + 128,
            GgmlType::Q5K => 4 + 12 + 32 + 128,
            GgmlType::Q6K => 128 + 64 + 16 + 2,
        }
    }

    /// Dequantises whole blocks: `bytes` holds exactly `out.len()` elements.
    pub(crate) fn decode(self, bytes: &[u8], out: &mut [f32]) {
        let (elements, size) = (self.block_elements(), self.block_bytes());
        assert!(out.len().is_multiple_of(elements) && bytes.len() == out.len() / elements * size);
        let block = match self {
            GgmlType::F32 => f32_block,
            GgmlType::F16 => f16_block,
            GgmlType::BF16 => bf16_block,
            GgmlType::Q4_0 => q4_0,
            GgmlType::Q4_1 => q4_1,
            GgmlType::Q5_0 => q5_0,
            GgmlType::Q5_1 => q5_1,
            GgmlType::Q8_0 => q8_0,
            GgmlType::Q4K => q4_k,
            GgmlType::Q5K => q5_k,
            GgmlType::Q6K => q6_k,
        };
        for (bytes, out) in bytes.chunks_exact(size).zip(out.chunks_exact_mut(elements)) {
            block(bytes, out);
        }
    }
}

fn half_at(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

fn f32_block(b: &[u8], out: &mut [f32]) {
    out[0] = f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
}

fn f16_block(b: &[u8], out: &mut [f32]) {
    out[0] = half_at(b, 0);
}

fn bf16_block(b: &[u8], out: &mut [f32]) {
    out[0] = bf16::from_le_bytes([b[0], b[1]]).to_f32();
}

/// The 32 four-bit numbers of 16 bytes: the low halves, then the high ones.
fn nibble(quants: &[u8], i: usize) -> u8 {
    if i < 16 { quants[i] & 0xf } else { quants[i - 16] >> 4 }
}

/// The five-bit number `i`: a nibble and its fifth bit from `high`.
fn five_bits(quants: &[u8], high: &[u8], i: usize) -> u8 {
    nibble(quants, i) | (((high[i / 8] >> (i % 8)) & 1) << 4)
}

fn q4_0(b: &[u8], out: &mut [f32]) {
    let d = half_at(b, 0);
    for (i, value) in out.iter_mut().enumerate() {
        *value = d * f32::from(nibble(&b[2..], i) as i8 - 8);
    }
}

fn q4_1(b: &[u8], out: &mut [f32]) {
    let (d, m) = (half_at(b, 0), half_at(b, 2));
    for (i, value) in out.iter_mut().enumerate() {
        *value = d * f32::from(nibble(&b[4..], i)) + m;
    }
}

fn q5_0(b: &[u8], out: &mut [f32]) {
    let d = half_at(b, 0);
    for (i, value) in out.iter_mut().enumerate() {
        *value = d * f32::from(five_bits(&b[6..], &b[2..6], i) as i8 - 16);
    }
}

fn q5_1(b: &[u8], out: &mut [f32]) {
    let (d, m) = (half_at(b, 0), half_at(b, 2));
    for (i, value) in out.iter_mut().enumerate() {
        *value = d * f32::from(five_bits(&b[8..], &b[4..8], i)) + m;
    }
}

fn q8_0(b: &[u8], out: &mut [f32]) {
    let d = half_at(b, 0);
    for (value, &q) in out.iter_mut().zip(&b[2..]) {
        *value = f32::from(q as i8) * d;
    }
}

/// The six-bit scale and minimum number `i` of the 12 bytes that hold eight of each.
fn scale_min(scales: &[u8], i: usize) -> (u8, u8) {
    if i < 4 {
        return (scales[i] & 0x3f, scales[i + 4] & 0x3f);
    }
    let (low, d, m) = (scales[i + 4], scales[i - 4], scales[i]);
    ((low & 0xf) | ((d >> 2) & 0x30), (low >> 4) | ((m >> 2) & 0x30))
}

/// The four-bit number `i` of a large block: 64 numbers in 32 bytes, low halves first.
fn large_nibble(quants: &[u8], i: usize) -> u8 {
    (quants[i / 64 * 32 + i % 32] >> (i / 32 % 2 * 4)) & 0xf
}

/// Q4_K and Q5_K: eight groups of 32 with scale and minimum; `quant` gives number `i`.
fn scaled_groups(b: &[u8], out: &mut [f32], quant: impl Fn(usize) -> u8) {
    let (d, dmin) = (half_at(b, 0), half_at(b, 2));
    for (group, values) in out.chunks_exact_mut(32).enumerate() {
        let (scale, min) = scale_min(&b[4..16], group);
        let (scale, min) = (d * f32::from(scale), dmin * f32::from(min));
        for (j, value) in values.iter_mut().enumerate() {
            *value = scale * f32::from(quant(group * 32 + j)) - min;
        }
    }
}

fn q4_k(b: &[u8], out: &mut [f32]) {
    scaled_groups(b, out, |i| large_nibble(&b[16..], i));
}

fn q5_k(b: &[u8], out: &mut [f32]) {
    scaled_groups(b, out, |i| {
        large_nibble(&b[48..], i) | (((b[16 + i % 32] >> (i / 32)) & 1) << 4)
    });
}

fn q6_k(b: &[u8], out: &mut [f32]) {
    let (low, high, scales) = (&b[..128], &b[128..192], &b[192..208]);
    let d = half_at(b, 208);
    for (i, value) in out.iter_mut().enumerate() {
        // 128 numbers in 64 bytes of low halves and 32 bytes of high quarters.
        let (part, j) = (i / 128, i % 128);
        let four = (low[part * 64 + j % 64] >> (j / 64 * 4)) & 0xf;
        let two = (high[part * 32 + j % 32] >> (j / 32 * 2)) & 3;
        let q = (four | (two << 4)) as i8 - 32;
        *value = d * f32::from(scales[i / 16] as i8) * f32::from(q);
    }
}

fn refused_name(code: u32) -> String {
    let name = match code {
        9 => "Q8_1",
        10 => "Q2_K",
        11 => "Q3_K",
        15 => "Q8_K",
        16 => "IQ2_XXS",
        17 => "IQ2_XS",
        18 => "IQ3_XXS",
        19 => "IQ1_S",
        20 => "IQ4_NL",
        21 => "IQ3_S",
        22 => "IQ2_S",
        23 => "IQ4_XS",
        24 => "I8",
        25 => "I16",
        26 => "I32",
        27 => "I64",
        28 => "F64",
        29 => "IQ1_M",
        34 => "TQ1_0",
        35 => "TQ2_0",
        39 => "MXFP4",
        40 => "NVFP4",
        _ => return format!("number {code}"),
    };
    name.into()
}

#[cfg(test)]
mod tests;
