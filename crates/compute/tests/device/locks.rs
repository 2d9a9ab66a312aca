//! What is locked changes no bit of the other layers' gradients.

use compute::MicroShape;
use model::LayerTable;

use crate::harness::{self, Options, PLAIN, step, step_locked};

#[test]
fn every_set_of_locks_leaves_the_other_gradients_bit_for_bit() {
    for (tied, keep, micros) in [(true, false, 1), (true, true, 2), (false, false, 2)] {
        let config = harness::config(&format!(
            r#"{{"model_type":"llama","vocab_size":150,"hidden_size":16,"intermediate_size":24,
                "num_hidden_layers":3,"num_attention_heads":4,"num_key_value_heads":2,
                "tie_word_embeddings":{tied}}}"#
        ));
        let layers = LayerTable::new(&config).len();
        let shape = MicroShape { rows: 2, seq_len: 9 };
        let options = Options { keep, micros, ..PLAIN };
        let (loss, all) = step(&config, shape, 0.125, options);
        for bits in 0..(1u32 << layers) - 1 {
            let locked: Vec<bool> = (0..layers).map(|l| bits >> l & 1 == 1).collect();
            let (same_loss, some) = step_locked(&config, shape, 0.125, options, &locked);
            assert_eq!(same_loss.to_bits(), loss.to_bits());
            for (layer, (got, want)) in some.iter().zip(&all).enumerate() {
                assert_eq!(got.is_none(), locked[layer]);
                // A tied embedding's rows are summed with the projection's, in the same order.
                let same =
                    |got: &Vec<f32>| got.iter().zip(want).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(got.as_ref().is_none_or(same), "layer {layer} of {locked:?}");
            }
        }
    }
}
