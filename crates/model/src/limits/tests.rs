//! The budget against a plain count, and the limits' sums.

use proptest::prelude::*;

use super::*;
use crate::ModelConfig;

fn table(layers: usize, tied: bool) -> LayerTable {
    let config = ModelConfig::from_json(&format!(
        r#"{{"model_type":"llama","vocab_size":256,"hidden_size":64,"intermediate_size":128,
            "num_hidden_layers":{layers},"num_attention_heads":4,"tie_word_embeddings":{tied}}}"#
    ));
    LayerTable::new(&config.unwrap())
}

const SHAPE: RunShape = RunShape { batch_rows: 4, micro_rows: 2, seq_len: 32 };
const WORKSPACE: Workspace = Workspace { command_bytes: 1 << 20, kept_bytes: 1 << 16 };

#[test]
fn a_budget_too_small_names_what_is_needed_and_that_suffices() {
    let table = table(4, true);
    let Err(BudgetError::TooSmall { needed_bytes, .. }) =
        Limits::new(&table, SHAPE, WORKSPACE, true, 1000)
    else {
        panic!("1000 bytes accepted")
    };
    let limits = Limits::new(&table, SHAPE, WORKSPACE, true, needed_bytes as usize).unwrap();
    assert_eq!((limits.weight_buffers, limits.kept), (2, 0));
    assert!(Limits::new(&table, SHAPE, WORKSPACE, true, needed_bytes as usize - 1).is_err());
}

#[test]
fn spare_memory_goes_to_gradients_then_to_kept_activations() {
    let table = table(4, false);
    let limits = Limits::new(&table, SHAPE, WORKSPACE, true, 1 << 30).unwrap();
    let all: usize = table.layers()[1..].iter().map(|l| l.elements() * 4).sum();
    assert!(limits.gradient_bytes >= all);
    assert_eq!(limits.kept, 4 * SHAPE.micros());
    assert_eq!(limits.weight_buffers, WEIGHT_BUFFERS_MAX);
}

#[test]
fn dropped_blocks_are_reused_and_make_room_for_other_lengths() {
    let budget = Budget::new(10_000);
    let address = budget.block(8_000).unwrap().bytes().as_ptr();
    assert_eq!(budget.block(8_000).unwrap().bytes().as_ptr(), address);
    assert_eq!(budget.block(9_000).unwrap().len(), 9_000);
    assert_eq!((budget.used_bytes(), budget.peak_bytes()), (0, 9_000));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn a_budget_never_exceeds_its_total(lengths in prop::collection::vec(1usize..5_000, 1..40)) {
        let budget = Budget::new(10_000);
        let mut living: Vec<HostBytes> = Vec::new();
        for len in lengths {
            let sum: usize = living.iter().map(HostBytes::len).sum();
            match budget.block(len) {
                Ok(block) => {
                    prop_assert!(sum + len <= 10_000);
                    living.push(block);
                }
                Err(BudgetError::Exhausted { used_bytes, .. }) => {
                    prop_assert!(sum + len > 10_000);
                    prop_assert_eq!(used_bytes, sum);
                    living.remove(0);
                }
                Err(other) => prop_assert!(false, "{other}"),
            }
        }
    }
}
