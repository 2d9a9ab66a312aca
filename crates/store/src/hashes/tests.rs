//! The `hashes` file: golden bytes, round trips, 20,000 broken ones.

use proptest::prelude::*;

use super::*;

const F32: StateLayout = StateLayout::F32;

#[test]
fn the_format_is_frozen() {
    let file = encode(F32, &[[1, 0, 2, 0, 3, 0], [4, 0, 5, 0, 6, 0]]);
    let mut expected =
        b"FTHASH\r\n\x01\0\0\0\x03\0\0\0\0\0\x40\0\0\0\0\0\x02\0\0\0\0\0\0\0".to_vec();
    for hash in [1u64, 4, 2, 5, 3, 6] {
        expected.extend(hash.to_le_bytes());
    }
    assert_eq!(file[..file.len() - 8], expected);
    assert_eq!(file[file.len() - 8..], hash(&expected).to_le_bytes());
    assert_eq!(file.len(), file_bytes(F32, 2));
}

#[test]
fn the_hash_is_xxh3() {
    // Reference values of the xxHash specification's own test suite (empty input, seed 0).
    assert_eq!(hash(b""), 0x2d06_8005_38d3_94c2);
}

#[test]
fn hashes_of_w_m_v_depend_on_every_chunk_of_their_planes_only() {
    let chunks = [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12]];
    for layout in StateLayout::ALL {
        let base = layer_hashes(layout, &chunks);
        for spec in layout.planes() {
            let mut changed = chunks;
            changed[1][spec.plane as usize] += 1;
            let other = layer_hashes(layout, &changed);
            let differ = [0, 1, 2].map(|state| base[state] != other[state]);
            assert_eq!(differ, [0, 1, 2].map(|state| state == spec.plane.state()));
        }
    }
    // What records of the first stores carry.
    let base = layer_hashes(F32, &[[1, 0, 2, 0, 3, 0], [4, 0, 5, 0, 6, 0]]);
    let other = layer_hashes(F32, &[[1, 0, 2, 0, 3, 0], [4, 0, 7, 0, 6, 0]]);
    let bytes = [1u64.to_le_bytes(), 4u64.to_le_bytes()].concat();
    assert_eq!(base[0], hash(&bytes));
    assert_eq!((base[0], base[2]), (other[0], other[2]));
    assert_ne!(base[1], other[1]);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 20_000, failure_persistence: None, ..<_>::default() })]

    #[test]
    fn broken_files_are_refused_and_whole_ones_read(
        layout in prop::sample::select(&StateLayout::ALL[..]),
        words in prop::collection::vec(any::<[u64; PLANES]>(), 0..6),
        cut in any::<prop::sample::Index>(),
        flips in prop::collection::vec((any::<prop::sample::Index>(), 1u8..), 0..3),
        noise in prop::collection::vec(any::<u8>(), 0..200),
        claimed in 0usize..8,
    ) {
        let mut chunks = words;
        for plane in 0..PLANES {
            if !layout.planes().iter().any(|spec| spec.plane as usize == plane) {
                chunks.iter_mut().for_each(|chunk| chunk[plane] = 0);
            }
        }
        let whole = encode(layout, &chunks);
        prop_assert_eq!(decode(layout, &whole, chunks.len(), true), Ok(chunks.clone()));
        let mut broken = whole.clone();
        for (at, flip) in flips {
            let at = at.index(broken.len());
            broken[at] ^= flip;
        }
        prop_assert_eq!(decode(layout, &broken, chunks.len(), true).is_ok(), broken == whole);
        prop_assert_eq!(decode(layout, &whole, claimed, true).is_ok(), claimed == chunks.len());
        broken.truncate(cut.index(broken.len()));
        prop_assert!(decode(layout, &broken, chunks.len(), true).is_err());
        prop_assert!(decode(layout, &noise, claimed, true).is_err());
    }
}
