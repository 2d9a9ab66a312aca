//! The order of query and key rows.

use super::*;

#[test]
fn interleaved_rows_are_those_of_the_reference() {
    // transformers' `_reverse_permute_weights`: reshape (heads, K/2, 2), swap the last two axes.
    let (heads, head_rows) = (3, 8);
    let mut expected = Vec::new();
    for head in 0..heads {
        for half in 0..2 {
            expected.extend((0..head_rows / 2).map(|i| head * head_rows + 2 * i + half));
        }
    }
    let rows: Vec<usize> = (0..heads * head_rows).map(|row| interleaved(row, head_rows)).collect();
    assert_eq!(rows, expected);
}
