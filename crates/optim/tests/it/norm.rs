//! The norm tree against a recursive twin, in pieces, in subtrees, on every instruction set.

use optim::{BLOCK_ELEMENTS, InstructionSet, NormTree, clip_factor, sum_of_squares};
use proptest::prelude::*;

const CASES: u32 = 200;
const LANES: usize = 16;

/// The documented tree, written down the other way round: from the root.
fn twin(blocks: &[&[f32]]) -> f64 {
    match blocks {
        [] => 0.0,
        [block] => block_twin(block),
        _ => {
            let left = 1 << (blocks.len() - 1).ilog2();
            twin(&blocks[..left]) + twin(&blocks[left..])
        }
    }
}

fn block_twin(block: &[f32]) -> f64 {
    let mut sums = [0.0; LANES];
    for (i, value) in block.iter().enumerate() {
        sums[i % LANES] += f64::from(*value).powi(2);
    }
    fold_halves(&sums)
}

fn fold_halves(sums: &[f64]) -> f64 {
    if let [sum] = sums {
        return *sum;
    }
    let (low, high) = sums.split_at(sums.len() / 2);
    fold_halves(&low.iter().zip(high).map(|(a, b)| a + b).collect::<Vec<_>>())
}

fn tree_of(set: InstructionSet, pieces: &[&[f32]]) -> NormTree {
    let mut tree = NormTree::new();
    for piece in pieces {
        tree.feed_on(set, piece);
    }
    tree
}

/// Values over six orders of magnitude, so that their sum depends on the order of additions.
fn values(len: usize, seed: u32) -> Vec<f32> {
    let value = |i: u32| {
        let mixed = (i ^ seed).wrapping_mul(0x9e37_79b9).rotate_left(13).wrapping_mul(0x85eb_ca6b);
        (mixed as f32 / 2.0_f32.powi(31) - 1.0) * 10.0_f32.powi((mixed % 7) as i32 - 3)
    };
    (0..len as u32).map(value).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(CASES))]

    #[test]
    fn sum_follows_the_documented_tree(
        len in 0_usize..20 * BLOCK_ELEMENTS,
        seed in any::<u32>(),
        piece_blocks in 1_usize..6,
    ) {
        let values = values(len, seed);
        let blocks: Vec<&[f32]> = values.chunks(BLOCK_ELEMENTS).collect();
        let expected = twin(&blocks).to_bits();
        prop_assert_eq!(sum_of_squares(&values).to_bits(), expected);
        let pieces: Vec<&[f32]> = values.chunks(piece_blocks * BLOCK_ELEMENTS).collect();
        for set in InstructionSet::available() {
            prop_assert_eq!(tree_of(set, &pieces).sum().to_bits(), expected, "on {}", set);
        }
    }

    #[test]
    fn subtrees_join_to_the_same_sum(
        len in 0_usize..20 * BLOCK_ELEMENTS,
        seed in any::<u32>(),
        level in 0_u32..4,
    ) {
        let values = values(len, seed);
        let mut joined = NormTree::new();
        for piece in values.chunks(BLOCK_ELEMENTS << level) {
            joined.append(&tree_of(InstructionSet::best(), &[piece]));
        }
        prop_assert_eq!(joined.sum().to_bits(), sum_of_squares(&values).to_bits());
    }

    #[test]
    fn sum_is_accurate(len in 0_usize..5 * BLOCK_ELEMENTS, seed in any::<u32>()) {
        let values = values(len, seed);
        let plain: f64 = values.iter().map(|v| f64::from(*v).powi(2)).sum();
        prop_assert!((sum_of_squares(&values) - plain).abs() <= 1e-12 * plain);
    }

    #[test]
    fn sum_is_finite_exactly_when_the_gradient_is(
        at in any::<prop::sample::Index>(),
        bits in any::<u32>(),
        forced in any::<bool>(),
    ) {
        let mut values = vec![f32::MAX; BLOCK_ELEMENTS + 3];
        let index = at.index(values.len());
        values[index] = f32::from_bits(if forced { bits | f32::INFINITY.to_bits() } else { bits });
        prop_assert_eq!(sum_of_squares(&values).is_finite(), optim::is_finite(&values));
    }
}

#[test]
fn order_of_additions_matters_to_these_values() {
    let values = values(8 * BLOCK_ELEMENTS, 1);
    let plain: f64 = values.iter().map(|v| f64::from(*v).powi(2)).sum();
    assert_ne!(sum_of_squares(&values).to_bits(), plain.to_bits());
}

#[test]
#[should_panic(expected = "only the last piece")]
fn nothing_follows_a_short_block() {
    let mut tree = NormTree::new();
    tree.feed(&[1.0; 10]);
    tree.feed(&[1.0; BLOCK_ELEMENTS]);
}

#[test]
#[should_panic(expected = "only the last piece")]
fn no_tree_follows_a_short_block() {
    let mut tree = NormTree::new();
    tree.append(&tree_of(InstructionSet::best(), &[&[1.0; 10]]));
    tree.append(&tree_of(InstructionSet::best(), &[&[1.0; BLOCK_ELEMENTS]]));
}

#[test]
#[should_panic(expected = "does not align")]
fn subtrees_must_align() {
    let mut tree = tree_of(InstructionSet::best(), &[&[1.0; BLOCK_ELEMENTS]]);
    tree.append(&tree_of(InstructionSet::best(), &[&[1.0; 2 * BLOCK_ELEMENTS]]));
}

#[test]
fn clip_factor_is_pytorchs() {
    let cases = [
        (1.0, 0.0, 1.0),
        (1.0, 0.5, 1.0),
        (1.0, 2.0, (1.0 / 2.000_001) as f32),
        (0.25, 100.0, (0.25 / 100.000_001) as f32),
        (0.0, 1.0, 0.0),
        (1.0, f64::INFINITY, 0.0),
        (f64::INFINITY, 5.0, 1.0),
    ];
    for (max_norm, norm, expected) in cases {
        assert_eq!(clip_factor(max_norm, norm), expected, "max {max_norm}, norm {norm}");
    }
    assert!(clip_factor(1.0, f64::NAN).is_nan());
}
