//! The `hashes` file: golden bytes, round trips, 20,000 broken ones.

use proptest::prelude::*;

use super::*;

#[test]
fn the_format_is_frozen() {
    let file = encode(&[[1, 2, 3], [4, 5, 6]]);
    let mut expected =
        b"FTHASH\r\n\x01\0\0\0\x03\0\0\0\0\0\x40\0\0\0\0\0\x02\0\0\0\0\0\0\0".to_vec();
    for hash in [1u64, 4, 2, 5, 3, 6] {
        expected.extend(hash.to_le_bytes());
    }
    assert_eq!(file[..file.len() - 8], expected);
    assert_eq!(file[file.len() - 8..], hash(&expected).to_le_bytes());
    assert_eq!(file.len(), file_bytes(2));
}

#[test]
fn the_hash_is_xxh3() {
    // Reference values of the xxHash specification's own test suite (empty input, seed 0).
    assert_eq!(hash(b""), 0x2d06_8005_38d3_94c2);
}

#[test]
fn plane_hashes_depend_on_every_chunk_of_their_plane_only() {
    let base = plane_hashes(&[[1, 2, 3], [4, 5, 6]]);
    let other = plane_hashes(&[[1, 2, 3], [4, 7, 6]]);
    assert_eq!((base[0], base[2]), (other[0], other[2]));
    assert_ne!(base[1], other[1]);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 20_000, failure_persistence: None, ..<_>::default() })]

    #[test]
    fn broken_files_are_refused_and_whole_ones_read(
        chunks in prop::collection::vec(any::<[u64; 3]>(), 0..6),
        cut in any::<prop::sample::Index>(),
        flips in prop::collection::vec((any::<prop::sample::Index>(), 1u8..), 0..3),
        noise in prop::collection::vec(any::<u8>(), 0..200),
        claimed in 0usize..8,
    ) {
        let whole = encode(&chunks);
        prop_assert_eq!(decode(&whole, chunks.len(), true), Ok(chunks.clone()));
        let mut broken = whole.clone();
        for (at, flip) in flips {
            let at = at.index(broken.len());
            broken[at] ^= flip;
        }
        prop_assert_eq!(decode(&broken, chunks.len(), true).is_ok(), broken == whole);
        prop_assert_eq!(decode(&whole, claimed, true).is_ok(), claimed == chunks.len());
        broken.truncate(cut.index(broken.len()));
        prop_assert!(decode(&broken, chunks.len(), true).is_err());
        prop_assert!(decode(&noise, claimed, true).is_err());
    }
}
