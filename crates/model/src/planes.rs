//! [`StateLayout`]: how a layer's W, M and V become bytes - which planes there are, of which type.
//!
//! Invariants:
//! - a plane holds one value for every `block` parameters, in the order of the layer's block;
//! - [`join`] undoes [`split`] bit for bit, whatever the value;
//! - a chunk of the state is the same parameters in every plane.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

/// Parameters of one unit of the optimizer's reading, writing and hashing.
pub const CHUNK_ELEMENTS: usize = 1 << 20;

/// Number of chunks of a layer of so many parameters.
pub fn chunk_count(elements: usize) -> usize {
    elements.div_ceil(CHUNK_ELEMENTS)
}

/// Parameters of a chunk of a layer of so many.
///
/// # Panics
/// If the layer has no such chunk: a programmer's error.
pub fn chunk_elements(elements: usize, chunk: usize) -> Range<usize> {
    let start = chunk * CHUNK_ELEMENTS;
    assert!(start < elements, "chunk {chunk} of {}", chunk_count(elements));
    start..(start + CHUNK_ELEMENTS).min(elements)
}

/// Parameters that share a scale where moments have 8 bits.
pub const MOMENT_BLOCK: usize = 256;

/// One file of a slot: a part of W, M or V.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Plane {
    Weight,
    /// What the bfloat16 weights lack of the float32 ones.
    WeightLow,
    ExpAvg,
    /// What the codes of a block of `exp_avg` are multiplied by.
    ExpAvgScale,
    ExpAvgSq,
    ExpAvgSqScale,
}

/// Number of different planes: an upper bound for any layout.
pub const PLANES: usize = 6;

impl Plane {
    /// The plane's name: also the stem of its file.
    pub fn name(self) -> &'static str {
        match self {
            Plane::Weight => "weight",
            Plane::WeightLow => "weight_low",
            Plane::ExpAvg => "exp_avg",
            Plane::ExpAvgScale => "exp_avg_scale",
            Plane::ExpAvgSq => "exp_avg_sq",
            Plane::ExpAvgSqScale => "exp_avg_sq_scale",
        }
    }

    /// Which of W, M, V (0, 1, 2) it is a part of.
    pub fn state(self) -> usize {
        match self {
            Plane::Weight | Plane::WeightLow => 0,
            Plane::ExpAvg | Plane::ExpAvgScale => 1,
            Plane::ExpAvgSq | Plane::ExpAvgSqScale => 2,
        }
    }
}

/// Type of a plane's values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlaneType {
    F32,
    Bf16,
    I16,
    U8,
}

impl PlaneType {
    /// Its name in a safetensors header.
    pub fn name(self) -> &'static str {
        match self {
            PlaneType::F32 => "F32",
            PlaneType::Bf16 => "BF16",
            PlaneType::I16 => "I16",
            PlaneType::U8 => "U8",
        }
    }

    /// Bytes of a value.
    pub fn bytes(self) -> usize {
        match self {
            PlaneType::F32 => 4,
            PlaneType::Bf16 | PlaneType::I16 => 2,
            PlaneType::U8 => 1,
        }
    }
}

/// How a layout stores a plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlaneSpec {
    pub plane: Plane,
    pub dtype: PlaneType,
    /// Parameters that a value stands for.
    pub block: usize,
}

impl PlaneSpec {
    const fn plain(plane: Plane, dtype: PlaneType) -> PlaneSpec {
        PlaneSpec { plane, dtype, block: 1 }
    }

    const fn scale(plane: Plane) -> PlaneSpec {
        PlaneSpec { plane, dtype: PlaneType::F32, block: MOMENT_BLOCK }
    }

    /// Bytes of the plane of so many parameters.
    pub fn bytes(&self, elements: usize) -> usize {
        elements.div_ceil(self.block) * self.dtype.bytes()
    }

    /// Bytes in which the values of some parameters lie.
    ///
    /// # Panics
    /// If they do not start with a block: a programmer's error.
    pub fn range(&self, elements: Range<usize>) -> Range<usize> {
        assert!(elements.start.is_multiple_of(self.block), "parameters that cut a block");
        self.bytes(elements.start)..self.bytes(elements.end)
    }
}

/// How a store keeps W, M and V.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum StateLayout {
    /// Everything in float32: 12 bytes a parameter.
    #[default]
    F32,
    /// float32 weights as a bfloat16 plane and the rest, float32 moments: 12 bytes.
    Split,
    /// The same weights, block-wise 8-bit moments: 6 bytes.
    Split8,
    /// bfloat16 weights, rounded stochastically, and 8-bit moments: 4 bytes.
    Bf16Sr8,
}

use Plane::{ExpAvg, ExpAvgScale, ExpAvgSq, ExpAvgSqScale, Weight, WeightLow};

const F32: [PlaneSpec; 3] = [
    PlaneSpec::plain(Weight, PlaneType::F32),
    PlaneSpec::plain(ExpAvg, PlaneType::F32),
    PlaneSpec::plain(ExpAvgSq, PlaneType::F32),
];
const SPLIT: [PlaneSpec; 4] = [
    PlaneSpec::plain(Weight, PlaneType::Bf16),
    PlaneSpec::plain(WeightLow, PlaneType::I16),
    PlaneSpec::plain(ExpAvg, PlaneType::F32),
    PlaneSpec::plain(ExpAvgSq, PlaneType::F32),
];
const SPLIT8: [PlaneSpec; 6] = [
    PlaneSpec::plain(Weight, PlaneType::Bf16),
    PlaneSpec::plain(WeightLow, PlaneType::I16),
    PlaneSpec::plain(ExpAvg, PlaneType::U8),
    PlaneSpec::scale(ExpAvgScale),
    PlaneSpec::plain(ExpAvgSq, PlaneType::U8),
    PlaneSpec::scale(ExpAvgSqScale),
];
const BF16_SR8: [PlaneSpec; 5] = [
    PlaneSpec::plain(Weight, PlaneType::Bf16),
    PlaneSpec::plain(ExpAvg, PlaneType::U8),
    PlaneSpec::scale(ExpAvgScale),
    PlaneSpec::plain(ExpAvgSq, PlaneType::U8),
    PlaneSpec::scale(ExpAvgSqScale),
];

impl StateLayout {
    /// All of them, the largest first.
    pub const ALL: [StateLayout; 4] =
        [StateLayout::F32, StateLayout::Split, StateLayout::Split8, StateLayout::Bf16Sr8];

    /// The name that users write.
    pub fn name(self) -> &'static str {
        match self {
            StateLayout::F32 => "f32",
            StateLayout::Split => "split",
            StateLayout::Split8 => "split8",
            StateLayout::Bf16Sr8 => "bf16sr8",
        }
    }

    /// The files of a slot, in their order: those of W, of M, of V.
    pub const fn planes(self) -> &'static [PlaneSpec] {
        match self {
            StateLayout::F32 => &F32,
            StateLayout::Split => &SPLIT,
            StateLayout::Split8 => &SPLIT8,
            StateLayout::Bf16Sr8 => &BF16_SR8,
        }
    }

    /// The planes that weights are read from.
    pub fn weight_planes(self, precision: Precision) -> &'static [PlaneSpec] {
        let all = match precision {
            Precision::Exact => self.planes(),
            Precision::Bf16 => &self.planes()[..1],
        };
        let count = all.iter().take_while(|spec| spec.plane.state() == 0).count();
        &all[..count]
    }

    /// Bytes of all planes of so many parameters.
    pub fn bytes(self, elements: usize) -> usize {
        self.planes().iter().map(|spec| spec.bytes(elements)).sum()
    }

    /// Whether moments are kept in 8 bits.
    pub fn has_codes(self) -> bool {
        matches!(self, StateLayout::Split8 | StateLayout::Bf16Sr8)
    }
}

impl fmt::Display for StateLayout {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.name())
    }
}

impl FromStr for StateLayout {
    type Err = String;

    fn from_str(text: &str) -> Result<StateLayout, String> {
        let found = StateLayout::ALL.into_iter().find(|layout| layout.name() == text);
        found.ok_or_else(|| format!("`{text}` is none of f32, split, split8, bf16sr8"))
    }
}

/// How exactly weights are wanted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Precision {
    /// As the optimizer has them.
    #[default]
    Exact,
    /// Their nearest bfloat16 will do: whoever gets more rounds it with [`to_bf16`].
    Bf16,
}

/// The nearest bfloat16 of a finite value, ties away from zero.
#[inline(always)]
pub fn to_bf16(value: f32) -> u16 {
    (value.to_bits().wrapping_add(0x8000) >> 16) as u16
}

/// The value of a bfloat16.
#[inline(always)]
pub fn from_bf16(value: u16) -> f32 {
    f32::from_bits(u32::from(value) << 16)
}

/// The nearest bfloat16, and the difference of the two bit patterns, which fits because ties are
/// rounded away from zero.
#[inline(always)]
pub fn split(value: f32) -> (u16, i16) {
    let high = to_bf16(value);
    (high, value.to_bits().wrapping_sub(u32::from(high) << 16) as i16)
}

/// The value that [`split`] took apart.
#[inline(always)]
pub fn join(high: u16, low: i16) -> f32 {
    f32::from_bits((u32::from(high) << 16).wrapping_add_signed(i32::from(low)))
}

/// [`split`] of every value.
///
/// # Panics
/// As all of these: when lengths differ.
pub fn split_into(values: &[f32], high: &mut [u16], low: &mut [u16]) {
    assert!(high.len() == values.len() && low.len() == values.len(), "lengths of planes");
    for ((high, low), value) in high.iter_mut().zip(low).zip(values) {
        let (rounded, rest) = split(*value);
        (*high, *low) = (rounded, rest as u16);
    }
}

/// [`join`] of every pair.
pub fn join_into(high: &[u16], low: &[u16], values: &mut [f32]) {
    assert!(high.len() == values.len() && low.len() == values.len(), "lengths of planes");
    for (value, (high, low)) in values.iter_mut().zip(high.iter().zip(low)) {
        *value = join(*high, *low as i16);
    }
}

/// [`from_bf16`] of every value.
pub fn from_bf16_into(rounded: &[u16], values: &mut [f32]) {
    assert_eq!(rounded.len(), values.len(), "length of a plane");
    values.iter_mut().zip(rounded).for_each(|(value, rounded)| *value = from_bf16(*rounded));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splitting_loses_nothing_and_the_high_plane_is_the_nearest_bf16() {
        // Every high half beside the low halves where rounding turns.
        for high in 0..=u16::MAX {
            for low in [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let value = f32::from_bits(u32::from(high) << 16 | low);
                let (rounded, rest) = split(value);
                assert_eq!(join(rounded, rest).to_bits(), value.to_bits());
                if value.is_finite() && from_bf16(rounded).is_finite() {
                    let toward_zero = from_bf16(high);
                    let away = from_bf16(high + 1);
                    let (near, far) = ((value - toward_zero).abs(), (away - value).abs());
                    let want = if near < far { toward_zero } else { away };
                    assert_eq!(from_bf16(rounded), want, "{value:e}");
                }
            }
        }
    }

    #[test]
    fn layouts_have_the_documented_bytes() {
        let bytes =
            StateLayout::ALL.map(|layout| layout.bytes(1 << 20) as f64 / f64::from(1 << 20));
        assert_eq!(bytes, [12.0, 12.0, 6.03125, 4.03125]);
        let read = |layout: StateLayout, precision| -> usize {
            layout.weight_planes(precision).iter().map(|spec| spec.bytes(1)).sum()
        };
        assert_eq!(StateLayout::ALL.map(|layout| read(layout, Precision::Exact)), [4, 4, 4, 2]);
        assert_eq!(StateLayout::ALL.map(|layout| read(layout, Precision::Bf16)), [4, 2, 2, 2]);
        for layout in StateLayout::ALL {
            assert_eq!(layout.name().parse(), Ok(layout));
            let states: Vec<usize> = layout.planes().iter().map(|s| s.plane.state()).collect();
            assert!(states.is_sorted() && layout.planes()[0].plane == Plane::Weight);
        }
        assert!("f16".parse::<StateLayout>().is_err());
    }

    #[test]
    fn a_last_short_block_has_a_value_of_its_own() {
        let scale = PlaneSpec::scale(Plane::ExpAvgScale);
        assert_eq!((scale.bytes(256), scale.bytes(257)), (4, 8));
        assert_eq!(scale.range(512..600), 8..12);
    }
}
