//! Every type against the Python package `gguf`, bit for bit.

use super::*;

const GOLDEN: &[u8] = include_bytes!("../../../tests/golden/quants.bin");

fn number(bytes: &mut &[u8]) -> u32 {
    let (head, tail) = bytes.split_first_chunk::<4>().unwrap();
    *bytes = tail;
    u32::from_le_bytes(*head)
}

#[test]
fn values_equal_the_reference_bit_for_bit() {
    let mut rest = GOLDEN;
    let mut seen = Vec::new();
    while !rest.is_empty() {
        let kind = GgmlType::from_code(number(&mut rest)).unwrap();
        let blocks = number(&mut rest) as usize;
        let (raw, tail) = rest.split_at(blocks * kind.block_bytes());
        let (expected, tail) = tail.split_at(blocks * kind.block_elements() * 4);
        rest = tail;
        let mut values = vec![f32::NAN; blocks * kind.block_elements()];
        kind.decode(raw, &mut values);
        for (i, (value, b)) in values.iter().zip(expected.as_chunks::<4>().0).enumerate() {
            let expected = f32::from_le_bytes(*b);
            let bits = (value.to_bits(), expected.to_bits());
            assert_eq!(bits.0, bits.1, "{} {i}: {value} {expected}", kind.name());
        }
        seen.push(kind);
    }
    assert_eq!(seen.len(), 11);
}

#[test]
fn types_that_are_not_converted_have_names() {
    assert_eq!(GgmlType::from_code(10), Err("Q2_K".into()));
    assert_eq!(GgmlType::from_code(4), Err("number 4".into()));
}
