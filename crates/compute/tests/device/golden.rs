//! Gradients of every family against PyTorch's, from the files that `golden/families.py` wrote.

use compute::{ComputeDtype, MicroShape, reference};
use model::{LayerTable, ModelConfig};

use crate::harness::{self, Options, PLAIN, distance, wide};

const SHAPE: MicroShape = MicroShape { rows: 2, seq_len: 13 };

struct Golden {
    config: ModelConfig,
    loss: f64,
    gradients: Vec<f64>,
    float32: Vec<f64>,
}

macro_rules! golden {
    ($name:literal) => {
        read(
            include_str!(concat!("../golden/", $name, ".json")),
            include_bytes!(concat!("../golden/", $name, ".bin")),
        )
    };
}

fn read(config: &str, file: &[u8]) -> Golden {
    let config = harness::config(config);
    let n = LayerTable::new(&config).elements();
    assert_eq!(file.len(), 16 + 12 * n);
    let f64s = |bytes: &[u8]| -> Vec<f64> {
        bytes.chunks_exact(8).map(|b| f64::from_le_bytes(b.try_into().unwrap())).collect()
    };
    let exact = f64s(&file[..8 + 8 * n]);
    let float32 = file[16 + 8 * n..].chunks_exact(4);
    Golden {
        config,
        loss: exact[0],
        gradients: exact[1..].to_vec(),
        float32: float32.map(|b| f32::from_le_bytes(b.try_into().unwrap()).into()).collect(),
    }
}

fn check(golden: &Golden) {
    let config = &golden.config;
    let scale = 1.0 / 24.0;
    let weights: Vec<Vec<f64>> = harness::weights(config).iter().map(|w| wide(w)).collect();
    let tokens = harness::tokens(config, SHAPE.tokens());
    let labels = harness::labels(&tokens, SHAPE.seq_len);
    let (loss, gradients) =
        reference::loss_and_gradients(config, &weights, &tokens, &labels, SHAPE, scale);
    assert!((loss / golden.loss - 1.0).abs() < 1e-12, "{loss} {}", golden.loss);
    let (fast_loss, fast) = harness::step(config, SHAPE, scale as f32, PLAIN);
    assert!((fast_loss / golden.loss - 1.0).abs() < 1e-6, "{fast_loss} {}", golden.loss);

    let mut start = 0;
    for (layer, spec) in LayerTable::new(config).layers().iter().enumerate() {
        for tensor in &spec.tensors {
            let at = start + tensor.range().start..start + tensor.range().end;
            let exact = &golden.gradients[at.clone()];
            let ours = distance(&gradients[layer][tensor.range()], exact);
            assert!(ours < 1e-10, "{}: {ours}", tensor.name);
            let torch = distance(&golden.float32[at], exact);
            let device = distance(&wide(&fast[layer][tensor.range()]), exact);
            assert!(device <= (2.0 * torch).max(1e-6), "{}: {device}, torch {torch}", tensor.name);
        }
        start += spec.elements();
    }
}

#[test]
fn llama_tied_with_grouped_queries() {
    check(&golden!("llama_tied"));
}

#[test]
fn llama_untied_with_scaled_rotation() {
    check(&golden!("llama_untied"));
}

#[test]
fn llama_with_all_biases() {
    check(&golden!("llama_bias"));
}

#[test]
fn mistral() {
    check(&golden!("mistral"));
}

#[test]
fn qwen2_with_qkv_bias() {
    check(&golden!("qwen2"));
}

#[test]
fn qwen3_with_head_norms_and_explicit_head_dim() {
    check(&golden!("qwen3"));
}

#[test]
fn bf16_products_stay_near_the_exact_step() {
    for golden in [golden!("llama_tied"), golden!("qwen3")] {
        let scale = 1.0 / 24.0;
        let (loss, exact) = harness::step(&golden.config, SHAPE, scale, PLAIN);
        let options = Options { dtype: ComputeDtype::Bf16, ..PLAIN };
        let (rounded_loss, rounded) = harness::step(&golden.config, SHAPE, scale, options);
        assert!((rounded_loss / loss - 1.0).abs() < 1e-2, "{rounded_loss} {loss}");
        assert!(rounded_loss != loss);
        for (exact, rounded) in exact.iter().zip(&rounded) {
            // 8 bits of mantissa; seen: 0.057 where contributions of few tokens cancel.
            let off = distance(&wide(rounded), &wide(exact));
            assert!(off < 0.1, "{off}");
        }
    }
}

#[test]
fn microbatches_change_only_rounding() {
    let golden = golden!("llama_untied");
    let scale = 1.0 / 24.0;
    let (one_loss, one) = harness::step(&golden.config, SHAPE, scale, PLAIN);
    let options = Options { micros: 2, ..PLAIN };
    let (two_loss, two) = harness::step(&golden.config, SHAPE, scale, options);
    assert!((one_loss / two_loss - 1.0).abs() < 1e-6);
    for (one, two) in one.iter().zip(&two) {
        assert!(distance(&wide(one), &wide(two)) < 1e-6);
    }
}
