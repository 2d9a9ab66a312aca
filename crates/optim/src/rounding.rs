//! Stochastic rounding to bfloat16: up or down with probabilities that keep the mean.
//!
//! Invariant: the direction follows from a key and the element's number alone, so that bits do
//! not depend on how work is cut up, or how often it is tried.

use crate::simd::{InstructionSet, Kernel};

/// A key for the `t`-th update of a layer in a run with this seed.
pub fn rounding_key(seed: u64, layer: u64, t: u64) -> u64 {
    [layer, t].into_iter().fold(spread(seed), |key, word| spread(key ^ word))
}

/// SplitMix64's next number after `state` (Steele, Lea and Flood 2014).
fn spread(state: u64) -> u64 {
    let mut bits = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ bits >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ bits >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ bits >> 31
}

/// Rounds `values` to bfloat16, the first one being element `first`. Of one key and one element
/// there is one random number: a key belongs to one tensor and one step.
///
/// # Panics
/// When the lengths differ.
pub fn round_stochastically(key: u64, first: u64, values: &[f32], rounded: &mut [u16]) {
    InstructionSet::best().round_stochastically(key, first, values, rounded);
}

impl InstructionSet {
    /// [`round_stochastically`] on this set.
    pub fn round_stochastically(self, key: u64, first: u64, values: &[f32], rounded: &mut [u16]) {
        assert_eq!(rounded.len(), values.len(), "length of the rounded values");
        self.run(Round { key, first, values, rounded });
    }
}

struct Round<'a> {
    key: u64,
    first: u64,
    values: &'a [f32],
    rounded: &'a mut [u16],
}

impl Kernel for Round<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Round { key, mut first, mut values, mut rounded } = self;
        while !values.is_empty() {
            // Up to the next multiple of 2^32, so that the loop below counts in 32 bits.
            let room = (1u64 << 32) - (first & 0xffff_ffff);
            let count = values.len().min(usize::try_from(room).unwrap_or(usize::MAX));
            let here;
            (here, values) = values.split_at(count);
            let to;
            (to, rounded) = rounded.split_at_mut(count);
            let (low, high) = (key as u32, (key >> 32) as u32 ^ mix((first >> 32) as u32));
            let start = first as u32;
            for (i, (to, value)) in to.iter_mut().zip(here).enumerate() {
                let random = mix(mix(start.wrapping_add(i as u32) ^ low).wrapping_add(high));
                // The 16 bits that are cut off decide, against 16 random ones, on the carry.
                *to = (value.to_bits().wrapping_add(random >> 16) >> 16) as u16;
            }
            first += count as u64;
        }
    }
}

/// Spreads every bit over all: a bijection by shifts and odd multipliers.
#[inline(always)]
fn mix(mut bits: u32) -> u32 {
    bits ^= bits >> 16;
    bits = bits.wrapping_mul(0x7feb_352d);
    bits ^= bits >> 15;
    bits = bits.wrapping_mul(0x846c_a68b);
    bits ^ bits >> 16
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rounded(key: u64, first: u64, values: &[f32]) -> Vec<f32> {
        let mut words = vec![0; values.len()];
        round_stochastically(key, first, values, &mut words);
        words.iter().map(|word| f32::from_bits(u32::from(*word) << 16)).collect()
    }

    #[test]
    fn the_mean_is_the_value_and_representable_values_stay() {
        for value in [1.0f32 + 1e-3, -3.0e-5, 7.77e9, 1.0 + 1.0 / 256.0] {
            let many = vec![value; 200_000];
            let mean = rounded(7, 0, &many).iter().map(|v| f64::from(*v)).sum::<f64>() / 2e5;
            let spacing = f64::from(value.abs()) / 128.0;
            // Three standard deviations of the mean of 200,000 coin tosses.
            let bound = 3.0 * spacing * 0.5 / 2e5f64.sqrt();
            assert!((mean - f64::from(value)).abs() < bound, "{value}: {mean}");
        }
        let exact = [0.0, -0.0, 1.0, -1.5, f32::from_bits(0x7f7f_0000)];
        assert_eq!(rounded(9, 3, &exact), exact);
    }

    #[test]
    fn keys_differ() {
        let all: std::collections::BTreeSet<u64> = (0..20)
            .flat_map(|seed| (0..20).flat_map(move |layer| (0..20).map(move |t| (seed, layer, t))))
            .map(|(seed, layer, t)| rounding_key(seed, layer, t))
            .collect();
        assert_eq!(all.len(), 8000);
    }

    #[test]
    fn bits_do_not_depend_on_cuts_or_sets_but_on_key_and_place() {
        let values: Vec<f32> = (0..1000).map(|i| i as f32 * 0.37 - 100.0).collect();
        let start = (1u64 << 32) - 300;
        let whole = rounded(5, start, &values);
        let cut: Vec<f32> = values
            .chunks(77)
            .enumerate()
            .flat_map(|(i, part)| rounded(5, start + 77 * i as u64, part))
            .collect();
        assert_eq!(whole, cut);
        for set in InstructionSet::available() {
            let mut words = vec![0; values.len()];
            set.round_stochastically(5, start, &values, &mut words);
            let found = words.iter().map(|word| f32::from_bits(u32::from(*word) << 16));
            assert!(found.eq(whole.iter().copied()), "{set}");
        }
        let differing = |other: Vec<f32>| other.iter().zip(&whole).filter(|(a, b)| a != b).count();
        assert!(differing(rounded(6, start, &values)) > 200);
        assert!(differing(rounded(5 | 1 << 40, start, &values)) > 200);
        assert!(differing(rounded(5, start + 1, &values)) > 200);
    }
}
