//! `store.json`: round trips, and 20,000 edited ones that are refused or harmless.

use model::ModelConfig;
use proptest::prelude::*;

use super::*;

fn config(tied: bool) -> String {
    format!(
        r#"{{"model_type":"llama","vocab_size":40,"hidden_size":8,"intermediate_size":16,
        "num_hidden_layers":2,"num_attention_heads":2,"num_key_value_heads":1,
        "tie_word_embeddings":{tied}}}"#
    )
}

fn table(tied: bool) -> LayerTable {
    LayerTable::new(&ModelConfig::from_json(&config(tied)).unwrap())
}

fn text(tied: bool) -> String {
    text_of(StateLayout::F32, tied)
}

fn text_of(state: StateLayout, tied: bool) -> String {
    Layout::new(&table(tied), state, &config(tied), Map::new()).unwrap().to_json()
}

#[test]
fn layouts_survive_a_round_trip() {
    for tied in [true, false] {
        let read = Layout::from_json(text(tied).as_bytes()).unwrap();
        assert_eq!(read.table, table(tied));
    }
    for state in StateLayout::ALL {
        let read = Layout::from_json(text_of(state, true).as_bytes()).unwrap();
        assert_eq!(read.state(), state);
    }
}

#[test]
fn known_planes_in_an_unknown_order_or_number_are_refused() {
    let whole = text_of(StateLayout::Split8, true);
    let root: Value = serde_json::from_str(&whole).unwrap();
    for planes in [vec![1, 0, 2, 3, 4, 5], vec![0, 2, 3, 4], vec![0, 1, 2, 3, 4, 5, 5], vec![]] {
        let mut edited = root.clone();
        edited["planes"] = planes.iter().map(|&i| root["planes"][i].clone()).collect();
        let refused = Layout::from_json(edited.to_string().as_bytes());
        assert!(matches!(refused, Err(Unusable::Unknown(_))), "{planes:?}");
    }
}

#[test]
fn impossible_tables_are_refused() {
    for (from, to) in [
        (r#""vocab_size":40"#, r#""vocab_size":0"#),
        (r#""hidden_size":8"#, r#""hidden_size":4"#),
        (r#""shape":[16,8]"#, r#""shape":[18446744073709551615,8]"#),
        (r#""shape":[16,8]"#, r#""shape":[0,8]"#),
        (r#""name":"1""#, r#""name":"0""#),
        (r#""name":"1""#, r#""name":"..""#),
        (r#""name":"1""#, r#""name":"a/b""#),
        (r#""offset":8"#, r#""offset":12"#),
        (r#""kind":"Head""#, r#""kind":"Decoder""#),
        (r#""id":2"#, r#""id":3"#),
        (r#""chunk_bytes":4194304"#, r#""chunk_bytes":4096"#),
    ] {
        let whole = text(false);
        let edited = whole.replacen(from, to, 1);
        assert_ne!(edited, whole, "{from}");
        assert!(Layout::from_json(edited.as_bytes()).is_err(), "{to}");
    }
}

#[test]
fn plain_names_are_one_component() {
    for name in ["embed", "0", "tokenizer.json", "a b"] {
        assert!(is_plain_name(name), "{name}");
    }
    for name in ["", ".", "..", "/", "a/", "a/b", "/a", "./a", "a\\b", "a\0"] {
        assert!(!is_plain_name(name), "{name}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 20_000, failure_persistence: None, ..<_>::default() })]

    #[test]
    fn edited_layouts_are_refused_or_usable(
        tied in any::<bool>(),
        numbers in prop::collection::vec((any::<prop::sample::Index>(), any::<u64>(), 0u32..64), 0..3),
        edits in prop::collection::vec((any::<prop::sample::Index>(), 0x20u8..0x7f), 0..2),
        noise in prop::collection::vec(any::<u8>(), 0..64),
    ) {
        let mut text = text(tied);
        for (which, value, shift) in numbers {
            text = with_number(&text, which, value >> shift);
        }
        let mut bytes = text.into_bytes();
        for (at, byte) in edits {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        if let Ok(layout) = Layout::from_json(&bytes) {
            // Everything later code computes from a table must work.
            for layer in layout.table.layers() {
                prop_assert!(state_bytes(layer, layout.state()) > 0);
                prop_assert!(is_plain_name(&layer.name));
                if layout.table.elements() < 1 << 20 {
                    layout.table.tiles(layer.id, model::Tiling::Blocks);
                }
            }
        }
        prop_assert!(Layout::from_json(&noise).is_err());
    }
}

/// The text with one of its numbers replaced.
fn with_number(text: &str, which: prop::sample::Index, value: u64) -> String {
    let digit = |i: usize| text.as_bytes()[i].is_ascii_digit();
    let starts: Vec<_> = (1..text.len()).filter(|&i| digit(i) && !digit(i - 1)).collect();
    let start = starts[which.index(starts.len())];
    let end = (start..text.len()).find(|&i| !digit(i)).unwrap_or(text.len());
    format!("{}{value}{}", &text[..start], &text[end..])
}
