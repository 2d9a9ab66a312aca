//! [`Dtype`]: the element types that weights are exchanged in.

use half::{bf16, f16};

/// Element type of an exported or imported tensor. Bytes are little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dtype {
    F32,
    BF16,
    F16,
}

impl Dtype {
    /// The type that users and safetensors headers call `name` (`f32`, `BF16`, ...).
    pub fn from_name(name: &str) -> Option<Dtype> {
        [Dtype::F32, Dtype::BF16, Dtype::F16]
            .into_iter()
            .find(|d| d.name().eq_ignore_ascii_case(name))
    }

    /// Name in a safetensors header.
    pub fn name(self) -> &'static str {
        match self {
            Dtype::F32 => "F32",
            Dtype::BF16 => "BF16",
            Dtype::F16 => "F16",
        }
    }

    /// Name in a `config.json`.
    pub fn config_name(self) -> &'static str {
        match self {
            Dtype::F32 => "float32",
            Dtype::BF16 => "bfloat16",
            Dtype::F16 => "float16",
        }
    }

    /// Bytes of one element.
    pub fn element_bytes(self) -> usize {
        match self {
            Dtype::F32 => 4,
            Dtype::BF16 | Dtype::F16 => 2,
        }
    }

    /// `bytes` as float32, exactly. `bytes` holds exactly `out.len()` elements.
    pub(crate) fn decode(self, bytes: &[u8], out: &mut [f32]) {
        assert_eq!(bytes.len(), out.len() * self.element_bytes());
        match self {
            Dtype::F32 => {
                for (value, b) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
                    *value = f32::from_le_bytes(*b);
                }
            }
            Dtype::BF16 => {
                for (value, b) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                    *value = bf16::from_le_bytes(*b).to_f32();
                }
            }
            Dtype::F16 => {
                for (value, b) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                    *value = f16::from_le_bytes(*b).to_f32();
                }
            }
        }
    }

    /// `values` rounded to nearest, ties to even, replacing the contents of `out`. The `Err` is
    /// the index of the first finite value that the type cannot hold.
    pub(crate) fn encode(self, values: &[f32], out: &mut Vec<u8>) -> Result<(), usize> {
        out.clear();
        for (i, &value) in values.iter().enumerate() {
            let finite = match self {
                Dtype::F32 => {
                    out.extend_from_slice(&value.to_le_bytes());
                    true
                }
                Dtype::BF16 => {
                    let rounded = bf16::from_f32(value);
                    out.extend_from_slice(&rounded.to_le_bytes());
                    rounded.is_finite()
                }
                Dtype::F16 => {
                    let rounded = f16::from_f32(value);
                    out.extend_from_slice(&rounded.to_le_bytes());
                    rounded.is_finite()
                }
            };
            if !finite && value.is_finite() {
                return Err(i);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_half_precision_value_survives_a_round_trip() {
        for dtype in [Dtype::BF16, Dtype::F16] {
            for bits in 0..=u16::MAX {
                let bytes = bits.to_le_bytes();
                let mut value = [0f32];
                dtype.decode(&bytes, &mut value);
                if value[0].is_nan() {
                    continue;
                }
                let mut back = Vec::new();
                dtype.encode(&value, &mut back).unwrap();
                assert_eq!(back, bytes, "{dtype:?} {bits:#x}");
            }
        }
    }

    #[test]
    fn rounding_goes_to_the_nearest_even() {
        let mut out = Vec::new();
        let tie_down = f32::from_bits(0x3f80_8000);
        let tie_up = f32::from_bits(0x3f81_8000);
        let above = f32::from_bits(0x3f80_8001);
        Dtype::BF16.encode(&[tie_down, tie_up, above], &mut out).unwrap();
        assert_eq!(out, [0x80, 0x3f, 0x82, 0x3f, 0x81, 0x3f]);
    }

    #[test]
    fn values_beyond_the_type_are_named() {
        let mut out = Vec::new();
        assert_eq!(Dtype::F16.encode(&[1.0, 65519.0, -65520.0], &mut out), Err(2));
        assert_eq!(Dtype::BF16.encode(&[f32::MAX], &mut out), Err(0));
        assert_eq!(Dtype::F32.encode(&[f32::MAX], &mut out), Ok(()));
    }

    #[test]
    fn names_are_found_in_any_case() {
        assert_eq!(Dtype::from_name("bf16"), Some(Dtype::BF16));
        assert_eq!(Dtype::from_name("F8_E4M3"), None);
    }
}
