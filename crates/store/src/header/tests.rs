//! Headers: valid for the safetensors crate, 20,000 broken ones refused without a panic.

use model::{LayerTable, ModelConfig, StateLayout};
use proptest::prelude::*;
use safetensors::SafeTensors;

use super::*;

const F32: &PlaneSpec = &StateLayout::F32.planes()[0];

fn layer() -> LayerSpec {
    let config = ModelConfig::from_json(
        r#"{"model_type":"llama","vocab_size":40,"hidden_size":8,"intermediate_size":16,
        "num_hidden_layers":1,"num_attention_heads":2,"num_key_value_heads":1}"#,
    );
    LayerTable::new(&config.unwrap()).layers()[1].clone()
}

fn json(file: &[u8]) -> &[u8] {
    &file[8..]
}

#[test]
fn the_safetensors_crate_reads_it_and_data_starts_on_a_page() {
    let layer = layer();
    for plane in StateLayout::ALL.iter().flat_map(|layout| layout.planes()) {
        let mut file = encode(&layer, plane);
        assert_eq!(file.len(), 4096);
        assert_eq!(data_start(file[..8].try_into().unwrap(), 1 << 20), Ok(4096));
        assert_eq!(check(json(&file), &layer, plane), Ok(()));
        file.resize(file.len() + plane.bytes(layer.elements()), 0);
        let read = SafeTensors::deserialize(&file).unwrap();
        let tensors = if plane.block == 1 { layer.tensors.len() } else { 1 };
        assert_eq!(read.len(), tensors, "{plane:?}");
    }
}

#[test]
fn another_layer_dtype_or_extra_tensor_is_refused_by_name() {
    let layer = layer();
    let file = encode(&layer, F32);
    assert!(
        check(json(&file), &layer, &StateLayout::Split.planes()[0])
            .unwrap_err()
            .contains("input_layernorm")
    );
    let mut fewer = layer.clone();
    let last = fewer.tensors.pop().unwrap();
    assert!(check(json(&file), &fewer, F32).unwrap_err().contains(&last.name));
    let shorter = encode(&fewer, F32);
    assert!(check(json(&shorter), &layer, F32).unwrap_err().contains(&last.name));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 20_000, failure_persistence: None, ..<_>::default() })]

    #[test]
    fn broken_headers_never_pass_as_another_layout(
        edits in prop::collection::vec((any::<prop::sample::Index>(), 0x20u8..0x7f), 1..4),
        cut in any::<prop::sample::Index>(),
        length in any::<[u8; 8]>(),
        file_bytes in any::<u64>(),
        noise in prop::collection::vec(any::<u8>(), 0..64),
    ) {
        let layer = layer();
        let whole = encode(&layer, F32);
        let text = json(&whole).trim_ascii_end();
        let mut edited = text.to_vec();
        for (at, byte) in edits {
            let at = at.index(edited.len());
            edited[at] = byte;
        }
        if check(&edited, &layer, F32).is_ok() {
            // Only what the check ignores by design may differ: metadata and spacing.
            let same = |a: &[u8]| serde_json::from_slice::<serde_json::Value>(a).map(|mut v| {
                v.as_object_mut().unwrap().remove("__metadata__");
                v
            });
            prop_assert!(
                same(&edited).unwrap() == same(text).unwrap()
            );
        }
        prop_assert!(check(&text[..cut.index(text.len())], &layer, F32).is_err());
        prop_assert!(check(&noise, &layer, F32).is_err());
        if let Ok(start) = data_start(&length, file_bytes) {
            prop_assert!(start <= file_bytes.saturating_add(8) && start % 4096 == 0);
        }
    }
}
