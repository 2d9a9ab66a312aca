//! Parsers against generated input, and the pieces that only this crate sees.

use std::path::{Path, PathBuf};

use proptest::collection::vec;
use proptest::prelude::*;

use crate::bits::Bits;
use crate::header::{HEADER_BYTES, RowsHeader};
use crate::jsonl::parse_line;
use crate::npy::{IdType, NpyHeader, Shape, header_span, parse_header};
use crate::tokenizer::Tokenizer;
use crate::writer::RowsWriter;
use crate::{BYTES_EOS, byte_level, text};

const PARSER_CASES: u32 = 20_000;

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

fn header() -> RowsHeader {
    RowsHeader {
        seq_len: 100,
        vocab_size: 259,
        rows: 7,
        documents: 3,
        targets: 7 * 99,
        dropped_tokens: 5,
        max_id: 257,
        source_digest: 11,
        data_hash: 12,
    }
}

/// Tokens that a header is made of, so that generated headers come close to real ones.
fn npy_text() -> impl Strategy<Value = String> {
    let part = prop_oneof![
        prop::sample::select(vec![
            "{",
            "}",
            "(",
            ")",
            ",",
            ":",
            " ",
            "'descr'",
            "'<u2'",
            "'<i8'",
            "'>u4'",
            "True",
            "False",
            "'fortran_order'",
            "'shape'",
            "\"",
            "'",
            "\n",
            "3",
            "18446744073709551616",
            "é",
            "{'descr': '<u4', 'fortran_order': False, 'shape': (3,), }",
        ])
        .prop_map(str::to_owned),
        any::<u64>().prop_map(|number| number.to_string()),
    ];
    vec(part, 0..14).prop_map(|parts| parts.concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(PARSER_CASES))]

    #[test]
    fn npy_headers_never_panic_and_account_for_every_byte(
        text in npy_text(),
        data_bytes in prop_oneof![0_u64..64, any::<u64>()],
    ) {
        if let Ok(header) = parse_header(text.as_bytes(), data_bytes) {
            let ids = match header.shape {
                Shape::Stream { tokens } => tokens,
                Shape::Rows { rows, width } => rows * width,
            };
            prop_assert_eq!(ids * header.id_type.bytes() as u64, data_bytes);
        }
    }

    #[test]
    fn npy_headers_made_by_rule_are_read_back(
        rows in 0_u64..1 << 40,
        width in proptest::option::of(0_u64..1 << 20),
        kind in 0_usize..3,
        spaces in 0_usize..9,
    ) {
        let (descr, id_type) =
            [("<u2", IdType::U16), ("<u4", IdType::U32), ("<i8", IdType::I64)][kind];
        let shape = width.map_or(format!("({rows},)"), |width| format!("({rows}, {width})"));
        let space = " ".repeat(spaces);
        let order = "'fortran_order': False";
        let text =
            format!("{{'descr': '{descr}',{space}'shape':{space}{shape}, {order}}}{space}\n");
        let bytes = rows * width.unwrap_or(1) * id_type.bytes() as u64;
        let shape = match width {
            Some(width) => Shape::Rows { rows, width },
            None => Shape::Stream { tokens: rows },
        };
        prop_assert_eq!(parse_header(text.as_bytes(), bytes), Ok(NpyHeader { id_type, shape }));
        prop_assert!(parse_header(text.as_bytes(), bytes + 1).is_err());
    }

    #[test]
    fn npy_fronts_never_panic(mut front in vec(any::<u8>(), 0..20), magic in any::<bool>()) {
        if magic && front.len() >= 8 {
            front[..6].copy_from_slice(b"\x93NUMPY");
            front[6] %= 4;
        }
        front.truncate(12);
        if let Ok((start, end)) = header_span(&front) {
            prop_assert!(start >= 10 && (12..=10_012).contains(&end));
        }
    }

    #[test]
    fn lines_never_panic(line in vec(any::<u8>(), 0..60)) {
        // A random line is hardly ever JSON; if it is, then an object with a text.
        let has_text = matches!(parse_line(&line), Ok(Some(_)));
        prop_assert!(!has_text || line.contains(&b'{'), "{:?}", line);
    }

    #[test]
    fn cut_and_changed_lines_never_panic(
        cut in 0_usize..80,
        at in 0_usize..80,
        byte in any::<u8>(),
    ) {
        let line = br#"{"id": [1, {"a": null}], "text": "a\u00e9\n\ud83d\ude42b", "messages": 1}"#;
        let mut line = line.to_vec();
        line.truncate(cut);
        if let Some(old) = line.get_mut(at) {
            *old = byte;
        }
        if let Err(reason) = parse_line(&line) {
            prop_assert!(!reason.is_empty() && !reason.contains("at line"), "{}", reason);
        }
    }

    #[test]
    fn every_text_survives_a_line(text in any::<String>(), key in "[a-z]{1,4}") {
        prop_assume!(key != "text");
        let line = serde_json::json!({ "text": text, key: [1, 2] }).to_string() + "\r\n";
        prop_assert_eq!(parse_line(line.as_bytes()), Ok(Some(text)));
    }

    #[test]
    fn row_headers_never_panic(
        changes in vec((0_usize..HEADER_BYTES as usize, any::<u8>()), 0..6),
        wide in vec(
            (prop::sample::select(vec![8_usize, 12, 16, 20, 24, 32, 40, 48, 56]), any::<u32>()),
            0..3,
        ),
        sealed in any::<bool>(),
    ) {
        let mut page = header().encode();
        for (at, byte) in changes {
            page[at] = byte;
        }
        for (at, value) in wide {
            page[at..at + 4].copy_from_slice(&value.to_le_bytes());
        }
        if sealed {
            let checksum = twox_hash::XxHash3_64::oneshot(&page[..4088]);
            page[4088..].copy_from_slice(&checksum.to_le_bytes());
        }
        if let Ok(parsed) = RowsHeader::parse(&page) {
            prop_assert!(parsed.seq_len >= 2 && parsed.rows > 0);
            prop_assert!(parsed.max_id < parsed.vocab_size);
            prop_assert!(parsed.targets <= parsed.rows * u64::from(parsed.seq_len - 1));
            prop_assert_eq!(parsed.encode(), page);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn bits_are_a_list_of_booleans(list in vec(any::<bool>(), 1..200)) {
        let mut bits = Bits::zeros(list.len());
        list.iter().enumerate().filter(|(_, set)| **set).for_each(|(index, _)| bits.set(index));
        prop_assert!(bits.iter().eq(list.iter().copied()));
        prop_assert_eq!(bits.count_ones() as usize, list.iter().filter(|set| **set).count());
        let mut disk = Vec::new();
        bits.append_to(&mut disk);
        prop_assert_eq!(disk.len() as u64, Bits::disk_bytes(list.len() as u32));
        prop_assert_eq!(Bits::parse(&disk, list.len()), Some(bits));
        let all = Bits::all_but_first(list.len());
        prop_assert!(all.iter().enumerate().all(|(index, set)| set == (index > 0)));
        if !list.len().is_multiple_of(64) {
            *disk.last_mut().unwrap() |= 0x80;
            prop_assert_eq!(Bits::parse(&disk, list.len()), None);
        }
    }

    #[test]
    fn the_fast_byte_tokenizer_is_the_hugging_face_one(
        parts in vec(prop_oneof![
            any::<String>(),
            prop::sample::select(vec!["<|eos|>", "<|bos|>", "<|pad|>", "<|", "|>", "<|eos"])
                .prop_map(str::to_owned),
        ], 0..6),
    ) {
        let text = parts.concat();
        let hub = tokenizers::Tokenizer::from_bytes(byte_level::json()).unwrap();
        let ours = Tokenizer::bytes();
        let ids = ours.encode(&text).unwrap();
        let encoding = hub.encode(text.as_str(), false).unwrap();
        prop_assert_eq!(&ids, encoding.get_ids());
        prop_assert_eq!(ours.decode(&ids).unwrap(), text);
        for keep in [false, true] {
            let with = if keep { ours.decode(&ids) } else { ours.decode_text(&ids) };
            prop_assert_eq!(with.unwrap(), hub.decode(&ids, !keep).unwrap());
        }
    }

    #[test]
    fn pieces_have_the_ids_of_the_whole(
        parts in vec(prop::sample::select(vec![
            "a", "word", " ", "\n", "\n\n", "\r\n", "é", "e\u{301}", "'s", "'", "12", "3.5", ".",
            "<|end|>", "<|eos|>", "\t", "\u{a0}", "\u{2028}", "東", "ﬁ", "Z\n", "x\n\n", "q\n ",
            "\u{301}",
        ]), 0..40),
        piece_bytes in 1_usize..12,
    ) {
        let text = parts.concat();
        for name in ["bytes.json", "gpt2_style.json", "smollm_style.json", "llama3_style.json"] {
            let whole = Tokenizer::from_file(golden(name)).unwrap().with_piece_bytes(None);
            let ids = whole.encode(&text).unwrap();
            let pieces = Tokenizer::from_file(golden(name)).unwrap().with_piece_bytes(Some(piece_bytes));
            prop_assert_eq!(ids, pieces.encode(&text).unwrap(), "{}", name);
        }
    }
}

#[test]
fn a_sentencepiece_tokenizer_allows_no_cuts() {
    let tokenizer = Tokenizer::from_file(golden("llama2_style.json")).unwrap();
    assert_eq!(tokenizer.last_cut("a\nb\n"), None);
    let tokenizer = Tokenizer::from_file(golden("llama3_style.json")).unwrap();
    assert_eq!(tokenizer.last_cut("a\nb\n"), Some(3));
    assert_eq!(tokenizer.last_cut("\n1\n é\n"), None);
}

/// A tokenizer with one thing changed that makes cuts unsafe.
#[test]
fn cuts_are_given_up_when_any_premise_falls() {
    let json = std::fs::read_to_string(golden("llama3_style.json")).unwrap();
    let changes = [
        (r#""lstrip":false"#, r#""lstrip":true"#),
        (r#""single_word":false"#, r#""single_word":true"#),
        (r#""content":"<|end|>""#, r#""content":"<\nend|>""#),
        (r#""type":"NFC""#, r#""type":"NFKC""#),
        (r#""add_prefix_space":false"#, r#""add_prefix_space":true"#),
        (r#""behavior":"Isolated""#, r#""behavior":"MergedWithNext""#),
        (r#"'ll|'d)"#, r#"'ll)"#),
    ];
    for (old, new) in changes {
        assert!(json.contains(old), "{old}");
        let shape: crate::cuts::Shape = serde_json::from_str(&json.replacen(old, new, 1)).unwrap();
        assert!(!shape.allows_cuts(), "{new}");
    }
    let shape: crate::cuts::Shape = serde_json::from_str(&json).unwrap();
    assert!(shape.allows_cuts());
}

#[test]
fn the_byte_tokenizer_is_saved_as_hugging_face_saves_it() {
    let saved = std::fs::read_to_string(golden("bytes.json")).unwrap();
    assert_eq!(byte_level::json(), saved);
    let tokenizer = Tokenizer::from_file(golden("bytes.json")).unwrap();
    assert!(tokenizer.is_bytes());
    assert_eq!((tokenizer.eos(), tokenizer.vocab_size()), (Some(BYTES_EOS), 259));
}

#[test]
fn refused_npy_headers_say_why() {
    let cases = [
        ("{'descr': '>u4', 'fortran_order': False, 'shape': (1,)}", "little-endian"),
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (1,)}", "<f4"),
        ("{'descr': '<u4', 'fortran_order': True, 'shape': (1, 1)}", "C order"),
        ("{'descr': '<u4', 'fortran_order': False, 'shape': ()}", "0 dimensions"),
        ("{'descr': '<u4', 'fortran_order': False, 'shape': (1, 1, 1)}", "3 dimensions"),
        ("{'descr': '<u4', 'fortran_order': False, 'shape': (2,)}", "needs 8 bytes"),
        ("{'descr': '<u4', 'fortran_order': False}", "no shape"),
        ("{'descr': '<u4', 'fortran_order': False, 'shape': (1,)} x", "not understood"),
        ("{'descr': '<u4', 'fortran_order': False, 'shape': (1 1)}", "not understood"),
        ("{'descr': [('a', '<u4')], 'fortran_order': False, 'shape': (1,)}", "not understood"),
    ];
    for (text, expected) in cases {
        let reason = parse_header(text.as_bytes(), 4).unwrap_err();
        assert!(reason.contains(expected), "{text}: {reason}");
    }
}

#[test]
fn refused_lines_say_why() {
    let cases = [
        (r#"{"messages": []}"#, "messages"),
        (r#"{"prompt": "a", "completion": "b"}"#, "prompt"),
        (r#"{"body": "a"}"#, "no \"text\""),
        (r#"{"text": null}"#, "no \"text\""),
        (r#"{"text": 5}"#, "invalid type"),
        (r#"["a"]"#, "not a JSON object"),
        (r#"{"text": "a""#, "EOF"),
    ];
    for (line, expected) in cases {
        let reason = parse_line(line.as_bytes()).unwrap_err();
        assert!(reason.contains(expected), "{line}: {reason}");
    }
    assert_eq!(parse_line(b" \r\n"), Ok(None));
    let marked = format!("{}{{\"text\": \"a\"}}\n", text::BYTE_ORDER_MARK);
    assert_eq!(parse_line(marked.as_bytes()), Ok(Some("a".to_owned())));
}

/// What a killed process with our id left is stepped over: neither taken nor a failure.
#[test]
fn a_process_id_that_recurs_takes_no_file_of_another() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("rows.bin");
    let name = |number| format!("rows.bin.{}-{number}.tmp", std::process::id());
    // No other test of this binary writes rows: the numbers that come next are these.
    let left: Vec<_> = (0..50).map(|number| directory.path().join(name(number))).collect();
    left.iter().for_each(|path| std::fs::write(path, b"old").unwrap());
    let writer = RowsWriter::create(&path, 4).unwrap();
    assert!(directory.path().join(name(50)).exists());
    drop(writer);
    assert!(left.iter().all(|path| std::fs::read(path).unwrap() == b"old"));
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), left.len());
}
