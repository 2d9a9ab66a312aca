//! GGUF files: right, truncated everywhere, and arbitrary.

use proptest::prelude::*;

use super::*;

fn text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

/// A file with values of several types and two tensors; `numbers` replace its counts.
fn file(version: u32, alignment: u32) -> Vec<u8> {
    let mut out = b"GGUF".to_vec();
    out.extend(version.to_le_bytes());
    out.extend(2u64.to_le_bytes());
    out.extend(5u64.to_le_bytes());
    text(&mut out, "general.alignment");
    out.extend(4u32.to_le_bytes());
    out.extend(alignment.to_le_bytes());
    text(&mut out, "name");
    out.extend(8u32.to_le_bytes());
    text(&mut out, "tiny");
    text(&mut out, "tokens");
    out.extend([9u32, 8].map(u32::to_le_bytes).concat());
    out.extend(2u64.to_le_bytes());
    text(&mut out, "a");
    text(&mut out, "b");
    text(&mut out, "scores");
    out.extend([9u32, 6].map(u32::to_le_bytes).concat());
    out.extend(1u64.to_le_bytes());
    out.extend(0.5f32.to_le_bytes());
    text(&mut out, "nested");
    out.extend([9u32, 9].map(u32::to_le_bytes).concat());
    out.extend(1u64.to_le_bytes());
    out.extend(0u32.to_le_bytes());
    out.extend(1u64.to_le_bytes());
    out.push(7);
    for (name, dims, kind, offset) in [("x", [32u64, 3], 8u32, 0u64), ("y", [4, 2], 0, 128)] {
        text(&mut out, name);
        out.extend(2u32.to_le_bytes());
        out.extend(dims.map(u64::to_le_bytes).concat());
        out.extend(kind.to_le_bytes());
        out.extend(offset.to_le_bytes());
    }
    out.resize(out.len().next_multiple_of(32) + 128 + 32, 0);
    out
}

fn parsed(bytes: &[u8]) -> Result<Header, String> {
    parse(bytes, bytes.len() as u64)
}

#[test]
fn values_and_tensors_are_read() {
    for version in [2, 3] {
        let bytes = file(version, 32);
        let header = parsed(&bytes).unwrap();
        assert_eq!(header.metadata["name"], Value::Text("tiny".into()));
        assert_eq!(header.metadata["tokens"], Value::Texts(vec!["a".into(), "b".into()]));
        assert_eq!(header.metadata["scores"], Value::Floats(vec![0.5]));
        assert!(!header.metadata.contains_key("nested"));
        let (x, y) = (&header.tensors["x"], &header.tensors["y"]);
        assert_eq!((x.shape.as_slice(), x.len_bytes), ([3, 32].as_slice(), 102));
        assert_eq!((y.start - x.start, y.len_bytes), (128, 32));
        assert_eq!(y.start + y.len_bytes, bytes.len() as u64);
    }
}

#[test]
fn other_versions_are_named() {
    assert!(parsed(&file(1, 32)).unwrap_err().contains("version 1"));
    assert!(parsed(&file(3u32.swap_bytes(), 32)).unwrap_err().contains("big-endian"));
    assert!(parsed(&file(3, 0)).unwrap_err().contains("alignment"));
    assert!(parsed(b"GGML").unwrap_err().contains("GGUF"));
}

#[test]
fn a_file_cut_anywhere_is_refused() {
    let bytes = file(3, 32);
    for len in 0..bytes.len() {
        let error = parsed(&bytes[..len]).unwrap_err();
        assert!(error.contains("end") || error.contains("claims"), "{len}: {error}");
    }
}

#[test]
fn tensors_that_overlap_or_repeat_are_refused() {
    let bytes = file(3, 32);
    let at = |needle: &[u8]| bytes.windows(needle.len()).position(|w| w == needle).unwrap();
    let second = at(b"\x01\0\0\0\0\0\0\0y");
    let mut overlapping = bytes.clone();
    let offset = second + 9 + 4 + 16 + 4;
    overlapping[offset] = 96;
    assert!(parsed(&overlapping).unwrap_err().contains("offset 96"));
    let mut twice = bytes.clone();
    twice[second + 8] = b'x';
    assert!(parsed(&twice).unwrap_err().contains("twice"));
    let mut kind = bytes.clone();
    kind[second + 9 + 4 + 16] = 10;
    assert!(parsed(&kind).unwrap_err().contains("Q2_K"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(20_000))]

    #[test]
    fn any_change_is_answered(
        changes in prop::collection::vec((0usize..400, any::<u8>()), 1..4),
        cut in 0usize..500,
    ) {
        let mut bytes = file(3, 32);
        for (at, byte) in changes {
            let len = bytes.len();
            bytes[at % len] = byte;
        }
        let len = bytes.len().saturating_sub(cut.saturating_sub(100));
        if let Ok(header) = parsed(&bytes[..len]) {
            for info in header.tensors.values() {
                prop_assert!(info.start + info.len_bytes <= len as u64);
            }
        }
    }

    #[test]
    fn any_number_in_place_of_a_count_is_answered(at in 0usize..390, number in any::<u64>()) {
        let mut bytes = file(3, 32);
        bytes[at..at + 8].copy_from_slice(&number.to_le_bytes());
        let _ = parsed(&bytes);
    }
}
