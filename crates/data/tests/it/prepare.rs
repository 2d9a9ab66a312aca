//! Sources to rows, against a plain model in memory, and what is refused.

use std::fs;

use data::{DataError, ErrorKind, Place, Plan, Rows, Tokenizer, describe, hash_file, prepare};
use proptest::collection::vec;
use proptest::prelude::*;

use crate::support::{Case, EOS, bytes_and_eos, npy, u16s};
use crate::tokenizer::golden;

#[derive(Clone, Debug)]
enum Source {
    Text(String),
    Jsonl(Vec<String>),
    Stream(Vec<u16>),
    Ready(Vec<u16>),
}

fn source(seq_len: usize) -> impl Strategy<Value = Source> {
    let text = "[a-z\n\u{e9}]{0,40}";
    prop_oneof![
        text.prop_map(Source::Text),
        vec(text, 0..5).prop_map(Source::Jsonl),
        vec(0_u16..259, 0..50).prop_map(Source::Stream),
        vec(0_u16..259, 0..4 * seq_len).prop_map(move |mut ids| {
            ids.truncate(ids.len() / seq_len * seq_len);
            Source::Ready(ids)
        }),
    ]
}

/// Name and content of a source's file.
fn file_of(index: usize, source: &Source, seq_len: usize) -> (String, Vec<u8>) {
    match source {
        Source::Text(text) => (format!("{index}.txt"), text.clone().into_bytes()),
        Source::Jsonl(texts) => {
            let line =
                |text: &String| serde_json::json!({ "text": text, "n": 1 }).to_string() + "\n";
            (format!("{index}.jsonl"), texts.iter().map(line).collect::<String>().into_bytes())
        }
        Source::Stream(ids) => {
            (format!("{index}.npy"), npy("<u2", &format!("({},)", ids.len()), &u16s(ids)))
        }
        Source::Ready(ids) => {
            let shape = format!("({}, {seq_len})", ids.len() / seq_len);
            (format!("{index}.npy"), npy("<u2", &shape, &u16s(ids)))
        }
    }
}

/// The stream and the ready rows as (token, starts a document).
type Marked = Vec<(u32, bool)>;

fn expected_of(sources: &[Source], seq_len: usize) -> (Marked, Marked) {
    let mark = |ids: Vec<u32>| ids.into_iter().enumerate().map(|(i, id)| (id, i == 0));
    let wide = |ids: &[u16]| ids.iter().map(|id| u32::from(*id)).collect::<Vec<_>>();
    let (mut stream, mut ready) = (Vec::new(), Vec::new());
    for source in sources {
        match source {
            Source::Text(text) => stream.extend(mark(bytes_and_eos(text))),
            Source::Jsonl(texts) => {
                texts.iter().for_each(|text| stream.extend(mark(bytes_and_eos(text))));
            }
            Source::Stream(ids) => stream.extend(mark(wide(ids))),
            Source::Ready(ids) => ids.chunks(seq_len).for_each(|row| ready.extend(mark(wide(row)))),
        }
    }
    (stream, ready)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn rows_are_what_a_plain_model_says(
        (seq_len, sources) in (2_usize..80).prop_flat_map(|s| (Just(s), vec(source(s), 1..6))),
    ) {
        let numbered = sources.iter().enumerate();
        let files: Vec<_> = numbered.map(|(i, source)| file_of(i, source, seq_len)).collect();
        let borrowed: Vec<_> =
            files.iter().map(|(name, bytes)| (name.as_str(), &bytes[..])).collect();
        let case = Case::new(&borrowed);
        let (stream, ready) = expected_of(&sources, seq_len);
        let kept = stream.len() / seq_len * seq_len;
        let expected: Vec<_> = stream[..kept].iter().chain(&ready).copied().collect();
        let result = case.prepare(seq_len as u32);
        if expected.is_empty() {
            let short = match result {
                Err(DataError::TooShort { tokens, .. }) => tokens,
                other => panic!("{other:?}"),
            };
            prop_assert_eq!(short as usize, stream.len());
            prop_assert!(!case.out().exists());
            return Ok(());
        }
        let prepared = result.unwrap();
        prop_assert_eq!(prepared.tokens as usize, stream.len() + ready.len());
        prop_assert_eq!(prepared.header.dropped_tokens as usize, stream.len() - kept);
        let starts = stream.iter().chain(&ready).filter(|token| token.1).count();
        let empty_streams =
            sources.iter().filter(|s| matches!(s, Source::Stream(ids) if ids.is_empty())).count();
        prop_assert_eq!(prepared.header.documents as usize, starts + empty_streams);
        let rows = case.all_rows();
        let found: Vec<_> =
            rows.iter().flat_map(|row| row.tokens.iter().copied().zip(row.starts.iter())).collect();
        prop_assert_eq!(found, expected);
        for row in &rows {
            prop_assert!(row.targets.iter().enumerate().all(|(j, target)| target == (j > 0)));
        }
        prop_assert_eq!(Rows::open_verified(case.out()).unwrap().rows(), prepared.header.rows);
    }
}

#[test]
fn numpy_files_of_all_versions_are_read() {
    let names = ["rows_u32.npy", "stream_u16.npy", "rows_v2.npy", "stream_i64.npy", "rows_v3.npy"];
    let mut case = Case::new(&[]);
    case.paths = names.iter().map(|name| golden(name)).collect();
    let plan = Plan { tokenizer: None, ..case.plan(8) };
    let prepared = prepare(&plan, &case.out(), &mut |_| ()).unwrap();
    let tokens: Vec<u32> = case.all_rows().into_iter().flat_map(|row| row.tokens).collect();
    assert_eq!(tokens, (0..80).collect::<Vec<_>>());
    assert_eq!((prepared.header.max_id, prepared.header.documents), (79, 2 + 3 + 1 + 1));
    let listed: Vec<_> = prepared.sources.iter().map(|source| source.path.clone()).collect();
    assert_eq!(listed, case.paths);
}

#[test]
fn a_long_text_is_one_document() {
    let text = "some \u{1f642}\u{1f642}\u{1f642}\u{1f642} line\n".repeat(110_000);
    let case = Case::new(&[("a.txt", text.as_bytes())]);
    let mut seen = Vec::new();
    let prepared = prepare(&case.plan(1000), &case.out(), &mut |p| seen.push(p)).unwrap();
    assert_eq!(prepared.header.documents, 1);
    assert_eq!(prepared.tokens, text.len() as u64 + 1);
    let rows = case.all_rows();
    let tokens = rows.iter().flat_map(|row| &row.tokens);
    assert!(tokens.zip(text.bytes()).all(|(id, byte)| *id == u32::from(byte)));
    assert_eq!(rows.iter().map(|row| row.starts.count_ones()).sum::<u64>(), 1);
    assert!(seen.len() >= 3 && seen.is_sorted_by_key(|p| (p.read_bytes, p.tokens)));
    assert_eq!(
        seen.last().map(|p| (p.read_bytes, p.total_bytes)),
        Some((text.len() as u64, text.len() as u64))
    );
}

#[test]
fn the_place_of_bad_utf8_is_the_files() {
    let mut content = ["\u{feff}", &"weights\n".repeat(100_000)].concat().into_bytes();
    let offset = content.len() - 3;
    content[offset] = 0x80;
    let case = Case::new(&[("a.txt", &content)]);
    match case.prepare(100) {
        Err(DataError::Utf8 { offset: found, .. }) => assert_eq!(found, offset as u64),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_byte_order_mark_in_front_is_no_text() {
    let marked = "\u{feff}a\u{feff}".as_bytes();
    let case = Case::new(&[("a.txt", marked), ("b.txt", "\u{feff}".as_bytes())]);
    case.prepare(6).unwrap();
    assert_eq!(case.all_rows()[0].tokens, [97, 0xef, 0xbb, 0xbf, EOS, EOS]);
}

/// No cut is allowed here: the whole is encoded at once, across the reads that bring it.
#[test]
fn a_long_text_without_cuts_is_encoded_whole() {
    let text = "weights on the disk\n".repeat(60_000);
    let mut case = Case::new(&[("a.txt", text.as_bytes())]);
    case.tokenizer = Tokenizer::from_file(golden("llama2_style.json")).unwrap();
    let plan = Plan { eos: Some(2), vocab_size: 560, ..case.plan(64) };
    prepare(&plan, &case.out(), &mut |_| ()).unwrap();
    let tokens: Vec<u32> = case.all_rows().into_iter().flat_map(|row| row.tokens).collect();
    let whole = case.tokenizer.encode(&text).unwrap();
    assert!(tokens[..] == whole[..tokens.len()]);
}

#[test]
fn sources_are_recorded_with_size_and_hash() {
    let case =
        Case::new(&[("b.txt", b"hello"), ("a.jsonl", b"{\"text\": \"x\"}\n\n{\"text\": \"\"}")]);
    let prepared = case.prepare(3).unwrap();
    for source in &prepared.sources {
        assert_eq!((source.bytes, source.hash), hash_file(&source.path).unwrap());
    }
    let counts: Vec<_> = prepared.sources.iter().map(|s| (s.documents, s.tokens)).collect();
    assert_eq!(counts, [(1, 6), (2, 3)]);
    let digest = prepared.header.source_digest;
    assert_eq!(case.prepare(3).unwrap().header.source_digest, digest);
    assert_ne!(case.prepare(2).unwrap().header.source_digest, digest);
    fs::write(&case.paths[0], b"hellO").unwrap();
    assert_ne!(case.prepare(3).unwrap().header.source_digest, digest);
}

#[test]
fn data_is_described() {
    let case = Case::new(&[("a.txt", b"hello"), ("b.txt", b"world, and more")]);
    case.prepare(8).unwrap();
    let rows = Rows::open(case.out()).unwrap();
    let summary = describe(&rows, Some(&case.tokenizer), 1).unwrap();
    assert_eq!((summary.documents, summary.rows, summary.tokens), (2, 2, 16));
    assert_eq!((summary.targets, summary.dropped_tokens), (14, 6));
    let [row] = &summary.first_rows[..] else { panic!("{summary:?}") };
    assert_eq!((row.text.as_str(), row.targets), ("hello<|eos|>wo", 7));
    assert_eq!(row.document_starts, [0, 6]);
    let summary = describe(&rows, None, 9).unwrap();
    assert_eq!(summary.first_rows.len(), 2);
    assert!(serde_json::to_string(&summary).unwrap().contains("dropped_tokens"));
}

fn refused(name: &str, content: &[u8], seq_len: u32) -> String {
    let case = Case::new(&[(name, content)]);
    let error = case.prepare(seq_len).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    let left = fs::read_dir(case.directory.path().join("tokens")).map_or(0, Iterator::count);
    assert_eq!(left, 0, "{error}");
    error.to_string()
}

#[test]
fn bad_data_is_refused_by_name_and_place() {
    let wide = |ids: &[i64]| ids.iter().flat_map(|id| id.to_le_bytes()).collect::<Vec<u8>>();
    let cases: &[(&str, Vec<u8>, &str)] = &[
        ("a.txt", b"ab".to_vec(), "a.txt: 3 tokens, end-of-sequence"),
        ("a.txt", b"ab".to_vec(), "needs 4: give more data or a smaller --seq-len (at most 3)"),
        ("a.txt", vec![], "a.txt, an empty file: 1 token, end-of-sequence"),
        ("a.jsonl", vec![], "a.jsonl, an empty file: 0 tokens, end-of-sequence"),
        ("a.txt", b"abcdefg\xffh".to_vec(), "a.txt: not valid UTF-8 at byte 7"),
        ("a.txt", b"abcdefg\xc3".to_vec(), "a.txt: not valid UTF-8 at byte 7"),
        ("a.csv", b"abc".to_vec(), "a.csv: not a .txt"),
        (
            "a.jsonl",
            b"{\"text\": \"abcd\"}\n{\"prompt\": 1}\n".to_vec(),
            "a.jsonl, line 2: \"prompt\"",
        ),
        (
            "a.jsonl",
            b"{\"text\": \"abcd\"}\n\n{\"messages\": []}".to_vec(),
            "a.jsonl, line 3: \"messages\"",
        ),
        (
            "a.jsonl",
            b"{\"text\": \"abcd\"}\n{\"txt\": \"\"}".to_vec(),
            "a.jsonl, line 2: no \"text\"",
        ),
        ("a.npy", b"hello world".to_vec(), "a.npy: not a .npy file"),
        ("a.npy", b"\x93NUMPY\x09\x00\x10\x00{}{}{}".to_vec(), "unknown .npy version 9"),
        ("a.npy", b"\x93NUMPY\x01\x00\x76\x00{'descr': '<u2'".to_vec(), "ends inside its header"),
        ("a.npy", b"\x93NUMPY\x02\x00\xff\xff\xff\xff{'descr'".to_vec(), "a header of 4294967295"),
        (
            "a.npy",
            npy("<u2", "(1, 3)", &u16s(&[1; 3])),
            "rows of 3 tokens, but the sequence length is 4",
        ),
        ("a.npy", npy("<u2", "(5,)", &u16s(&[1, 2, 3, 4, 259])), "a.npy, token 4: token id 259"),
        ("a.npy", npy("<i8", "(5,)", &wide(&[1, -2, 3, 4, 5])), "a.npy, token 1: token id -2"),
        ("a.npy", npy("<i8", "(2, 4)", &wide(&[0, 0, 0, 0, 0, 0, 1 << 40, 0])), "row 1, column 2"),
        ("a.npy", npy("<u2", "(5,)", &u16s(&[1; 4])), "the shape needs 10 bytes"),
        ("a.npy", npy("<u2", "(0,)", &[]), "a.npy: 0 tokens"),
    ];
    for (name, content, expected) in cases {
        let error = refused(name, content, 4);
        assert!(error.contains(expected), "{error}, not {expected}");
    }
    assert!(refused("a.txt", b"abc", 1).contains("the smallest is 2"));
}

#[test]
fn data_too_short_names_files_tokens_and_remedies() {
    let text = |files: &[(&str, &[u8])]| {
        let case = Case::new(files);
        let error = case.prepare(9).unwrap_err().to_string();
        error.strip_prefix(case.paths[0].to_str().unwrap()).unwrap().to_owned()
    };
    let found = "tokens, end-of-sequence tokens included; one row needs 9: give more data";
    assert_eq!(
        text(&[("a.txt", b"ab"), ("b.txt", b"c")]),
        format!(", the first of 2 files: 5 {found} or a smaller --seq-len (at most 5)")
    );
    assert_eq!(
        text(&[("a.txt", b"ab"), ("b.jsonl", b""), ("c.txt", b"")]),
        format!(
            ", the first of 3 files (2 of them empty): 4 {found} or a smaller --seq-len (at most 4)"
        )
    );
    // No row length would do here.
    assert_eq!(text(&[("a.jsonl", b"")]), format!(", an empty file: 0 {found}"));
}

#[test]
fn bad_plans_are_refused_before_anything_is_written() {
    let case = Case::new(&[("a.txt", b"hello")]);
    let check = |plan: Plan<'_>, expected: &str| {
        let error = prepare(&plan, &case.out(), &mut |_| ()).unwrap_err();
        assert!(error.to_string().contains(expected), "{error}, not {expected}");
        assert!(!case.out().parent().unwrap().exists());
    };
    let plan = case.plan(2);
    check(Plan { tokenizer: None, ..plan }, "a.txt: text needs a tokenizer");
    check(Plan { eos: Some(259), ..plan }, "id 259 is beyond");
    check(Plan { paths: &[], ..plan }, "no data files");
    check(Plan { paths: &[case.directory.path().join("none.txt")], ..plan }, "none.txt");
    let nameless = Tokenizer::from_file(golden("gpt2_style.json")).unwrap();
    check(Plan { tokenizer: Some(&nameless), ..plan }, "names none");
    let empty = case.directory.path().join("empty");
    fs::create_dir(&empty).unwrap();
    check(Plan { paths: &[empty], ..plan }, "no .txt or .jsonl");
}

#[test]
fn text_beyond_a_small_vocabulary_is_refused_at_its_token() {
    let case =
        Case::new(&[("a.txt", b"ab\nz"), ("b.jsonl", b"{\"text\": \"a\"}\n{\"text\": \"az\"}")]);
    for (paths, place) in [(&case.paths[..1], Place::Token(3)), (&case.paths[1..], Place::Line(2))]
    {
        let plan = Plan { paths, vocab_size: 122, eos: Some(0), ..case.plan(2) };
        match prepare(&plan, &case.out(), &mut |_| ()) {
            Err(DataError::IdBeyondVocabulary { place: found, id: 122, .. }) => {
                assert_eq!(found, place);
            }
            other => panic!("{other:?}"),
        }
    }
}
