//! The search for infinities and NaNs against the standard library's, on every instruction set.

use optim::{InstructionSet, is_finite};
use proptest::prelude::*;

const CASES: u32 = 500;

#[test]
fn border_values_are_told_apart() {
    let infinity = f32::INFINITY.to_bits();
    for bits in [infinity, infinity + 1, 0x7fff_ffff, 0xff80_0000, 0xffff_ffff] {
        check(&[f32::from_bits(bits)], false);
    }
    for bits in [0, 1, infinity - 1, 0x8000_0000, 0xff7f_ffff] {
        check(&[f32::from_bits(bits)], true);
    }
    check(&[], true);
}

fn check(values: &[f32], expected: bool) {
    assert_eq!(is_finite(values), expected, "{values:?}");
    for set in InstructionSet::available() {
        assert_eq!(set.is_finite(values), expected, "{values:?} on {set}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(CASES))]

    #[test]
    fn one_bad_element_is_found_wherever_it_is(
        len in 1_usize..10_000,
        at in any::<prop::sample::Index>(),
        bits in any::<u32>(),
    ) {
        let mut values = vec![f32::MAX; len];
        values[at.index(len)] = f32::from_bits(bits);
        check(&values, f32::from_bits(bits).is_finite());
        values[at.index(len)] = f32::from_bits(bits | f32::INFINITY.to_bits());
        check(&values, false);
    }
}
