//! What must not change a single bit: threads, whether activations were kept, how layers are tiled.

use compute::{Command, ComputeDtype, MicroShape, TensorId};
use model::{LayerId, StateLayout, Tiling};

use crate::harness::{self, Bench, Options, PLAIN, uniform};

/// Larger than one block in every dimension: products, rows, queries and keys.
const MODEL: &str = r#"{"model_type":"qwen3","vocab_size":700,"hidden_size":320,
    "intermediate_size":544,"num_hidden_layers":2,"num_attention_heads":4,
    "num_key_value_heads":2,"head_dim":32,"attention_bias":true,"tie_word_embeddings":true}"#;
const SHAPE: MicroShape = MicroShape { rows: 2, seq_len: 530 };

fn bits(options: Options) -> (u64, Vec<Vec<u32>>) {
    let (loss, gradients) = harness::step(&harness::config(MODEL), SHAPE, 1e-3, options);
    let bits = |g: &Vec<f32>| g.iter().map(|g| g.to_bits()).collect();
    (loss.to_bits(), gradients.iter().map(bits).collect())
}

#[test]
fn threads_and_keeping_change_no_bit() {
    let want = bits(Options { micros: 2, ..PLAIN });
    for (threads, keep) in [(1, false), (3, false), (2, true)] {
        assert!(
            bits(Options { threads, keep, micros: 2, ..PLAIN }) == want,
            "{threads} threads, {keep}"
        );
    }
}

#[test]
fn in_bf16_threads_keeping_and_the_planes_of_weights_change_no_bit() {
    let bf16 = Options { micros: 2, dtype: ComputeDtype::Bf16, ..PLAIN };
    let want = bits(bf16);
    for (threads, keep, layout) in [
        (1, false, StateLayout::F32),
        (3, true, StateLayout::Split),
        (2, false, StateLayout::Bf16Sr8),
    ] {
        assert!(
            bits(Options { threads, keep, layout, ..bf16 }) == want,
            "{threads} {keep} {layout}"
        );
    }
    assert!(bits(Options { micros: 2, ..PLAIN }) != want);
}

#[test]
fn split_weights_give_the_bits_of_whole_ones() {
    assert!(bits(Options { layout: StateLayout::Split, ..PLAIN }) == bits(PLAIN));
}

#[test]
fn blocks_give_the_bits_of_whole_layers() {
    for dtype in [ComputeDtype::F32, ComputeDtype::Bf16] {
        let whole = Options { micros: 2, dtype, ..PLAIN };
        let want = bits(whole);
        for keep in [false, true] {
            assert!(bits(Options { tiling: Tiling::Blocks, keep, ..whole }) == want, "{keep}");
        }
    }
}

#[test]
fn leaving_results_out_changes_no_bit_of_the_others() {
    let config = harness::config(MODEL);
    let shape = MicroShape { rows: 1, seq_len: 40 };
    let values: Vec<f32> =
        (0..shape.tokens() * config.hidden_size).map(|i| uniform(60, i)).collect();
    let run = |want_dx: bool, gradient: bool| {
        let mut bench = Bench::new(&config, 2);
        let weights = bench.bind(LayerId(1), 0);
        let (x, dy) = (bench.put(1, &values), bench.put(2, &values));
        let dx = want_dx.then_some(TensorId(3));
        bench.run(Command::Backward { weights, shape, x, dy, dx, gradient });
        (dx.map(|dx| bench.get(dx)), gradient.then(|| bench.gradient(LayerId(1), Tiling::Whole)))
    };
    let (dx, gradient) = run(true, true);
    assert!(run(true, false) == (dx, None), "dx without gradient");
    assert!(run(false, true) == (None, gradient), "gradient without dx");
}
