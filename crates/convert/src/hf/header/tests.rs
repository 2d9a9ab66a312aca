//! Headers and indexes, right, wrong, and arbitrary.

use proptest::prelude::*;

use super::*;

const TWO: &str = r#"{"__metadata__":{"format":"pt"},
    "a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},
    "b":{"dtype":"BF16","shape":[],"data_offsets":[24,26]}}"#;

#[test]
fn a_header_gives_types_shapes_and_ranges() {
    let entries = parse_header(TWO.as_bytes(), 26).unwrap();
    assert_eq!(entries.len(), 2);
    assert_eq!(
        (entries["a"].shape.as_slice(), entries["a"].bytes.clone()),
        ([2, 3].as_slice(), 0..24)
    );
    assert_eq!((entries["b"].dtype.as_str(), entries["b"].bytes.clone()), ("BF16", 24..26));
}

#[test]
fn impossible_headers_are_refused_by_name() {
    for (from, to, named) in [
        ("[24,26]", "[23,25]", "overlaps"),
        ("[24,26]", "[25,27]", "hole"),
        ("[24,26]", "[26,24]", "do not match"),
        ("[2,3]", "[2,4]", "do not match"),
        ("[2,3]", "[4294967296,4294967296]", "do not match"),
        ("F32", "F33", "F33"),
        ("\"b\"", "\"a\"", "twice"),
        ("[0,24]", "[0]", "malformed"),
        ("{\"__", "[\"__", "JSON"),
    ] {
        let error = parse_header(TWO.replace(from, to).as_bytes(), 26).unwrap_err();
        assert!(error.contains(named), "{to}: {error}");
    }
    assert!(parse_header(TWO.as_bytes(), 25).unwrap_err().contains("26 bytes"));
}

#[test]
fn header_lengths_are_compared_with_the_file() {
    assert_eq!(header_bytes(10u64.to_le_bytes(), 18), Ok(10));
    assert!(header_bytes(10u64.to_le_bytes(), 17).is_err());
    assert!(header_bytes(u64::MAX.to_le_bytes(), 17).is_err());
}

#[test]
fn an_index_never_leaves_its_directory() {
    let index = |file: &str| parse_index(&format!(r#"{{"weight_map":{{"a":"{file}"}}}}"#));
    assert_eq!(
        index("layers/0/a/weight.safetensors").unwrap()["a"],
        "layers/0/a/weight.safetensors"
    );
    for file in ["", "/etc/passwd", "../x", "a/../../x"] {
        assert!(index(file).is_err(), "{file}");
    }
    assert!(parse_index("{}").is_err());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(20_000))]

    #[test]
    fn any_header_is_answered(
        cut in 0usize..TWO.len(),
        at in 0usize..TWO.len(),
        byte in any::<u8>(),
        data_bytes in 0u64..64,
    ) {
        let mut text = TWO.as_bytes().to_vec();
        text[at] = byte;
        if let Ok(entries) = parse_header(&text, data_bytes) {
            let sum: u64 = entries.values().map(|e| e.bytes.end - e.bytes.start).sum();
            prop_assert_eq!(sum, data_bytes);
        }
        prop_assert!(parse_header(&TWO.as_bytes()[..cut], 26).is_err());
    }

    #[test]
    fn any_numbers_are_answered(a in any::<u64>(), b in any::<u64>(), c in any::<u64>(), d in any::<u64>()) {
        let text = format!(
            r#"{{"a":{{"dtype":"F16","shape":[{a},{b}],"data_offsets":[{c},{d}]}}}}"#
        );
        if let Ok(entries) = parse_header(text.as_bytes(), 1 << 20) {
            prop_assert_eq!(entries["a"].bytes.clone(), 0..1 << 20);
        }
    }

    #[test]
    fn any_index_is_answered(text in "\\PC{0,48}", file in "[a-z./]{0,12}") {
        prop_assert!(parse_index(&text).is_err() || text.contains("weight_map"));
        if let Ok(map) = parse_index(&format!(r#"{{"weight_map":{{"a":"{file}"}}}}"#)) {
            prop_assert!(!map["a"].contains("..") || map["a"].split('/').all(|p| p != ".."));
        }
    }
}
