//! Single layers on odd shapes against the float64 reference.

use compute::{Command, MicroShape, TensorId, reference};
use model::{LayerId, ModelConfig};
use proptest::prelude::*;

use crate::harness::{self, Bench, distance, uniform, wide};

/// Forward, dx and gradient of layer 0 of `config` as distances from the reference.
fn check(config: &ModelConfig, shape: MicroShape) -> Result<(), TestCaseError> {
    let mut bench = Bench::new(config, 2);
    let layer = LayerId(1);
    let elements = shape.tokens() * config.hidden_size;
    let values = |stream| (0..elements).map(|i| 4.0 * uniform(stream, i)).collect::<Vec<f32>>();
    let (input, output_gradient) = (values(50), values(51));

    let weights = bench.bind(layer, 0);
    let x = bench.put(1, &input);
    let (y, dy, dx) = (TensorId(2), bench.put(3, &output_gradient), TensorId(4));
    bench.run(Command::Forward { weights, shape, x, y, keep: true });
    bench.run(Command::Backward { weights, shape, x, dy, dx: Some(dx), gradient: true });
    let (y, dx, gradient) =
        (bench.get(y), bench.get(dx), bench.gradient(layer, model::Tiling::Whole));

    let (w, spec) = (wide(&bench.weights[1]), bench.table.layer(layer));
    let (input, output_gradient) = (wide(&input), wide(&output_gradient));
    let want_y = reference::decoder_forward(config, spec, &w, shape, &input);
    let mut want = vec![0.0; w.len()];
    let want_dx =
        reference::decoder_backward(config, spec, &w, shape, &input, &output_gradient, &mut want);
    // A norm of few elements cancels most of its gradient.
    let head = if config.qk_norm { config.head_dim } else { usize::MAX };
    let tolerance = if config.hidden_size.min(head) < 8 { 1e-4 } else { 5e-6 };
    for (what, got, want) in [("y", y, want_y), ("dx", dx, want_dx), ("gradient", gradient, want)] {
        let distance = distance(&wide(&got), &want);
        prop_assert!(distance < tolerance, "{what} is off by {distance} in {config:?} {shape:?}");
    }
    Ok(())
}

fn config(family: &str, sizes: (usize, usize, usize, usize, usize), bias: bool) -> ModelConfig {
    let (hidden, ffn, groups, members, half) = sizes;
    harness::config(&format!(
        r#"{{"model_type":"{family}","vocab_size":64,"hidden_size":{hidden},
            "intermediate_size":{ffn},"num_hidden_layers":1,"num_attention_heads":{},
            "num_key_value_heads":{groups},"head_dim":{},"attention_bias":{bias},
            "mlp_bias":{bias}}}"#,
        groups * members,
        2 * half,
    ))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn odd_shapes_agree_with_the_reference(
        family in prop::sample::select(vec!["llama", "qwen2", "qwen3"]),
        sizes in (1usize..50, 1usize..70, 1usize..4, 1usize..4, 1usize..20),
        rows in 1usize..4,
        seq_len in 1usize..90,
        bias: bool,
    ) {
        check(&config(family, sizes, bias), MicroShape { rows, seq_len })?;
    }
}

#[test]
fn several_key_blocks_agree_with_the_reference() {
    for seq_len in [513, 1100] {
        let config = config("llama", (16, 16, 1, 2, 4), false);
        check(&config, MicroShape { rows: 1, seq_len }).unwrap();
    }
}

#[test]
fn not_a_number_reaches_every_result_that_depends_on_it() {
    let config = config("llama", (16, 16, 1, 2, 4), false);
    let mut bench = Bench::new(&config, 2);
    let weights = bench.bind(LayerId(1), 0);
    let shape = MicroShape { rows: 1, seq_len: 3 };
    let mut input = vec![0.5; 48];
    input[20] = f32::NAN;
    let (x, y) = (bench.put(1, &input), TensorId(2));
    bench.run(Command::Forward { weights, shape, x, y, keep: false });
    let y = bench.get(y);
    assert!(y[16..].iter().all(|y| y.is_nan()), "{y:?}");
}
