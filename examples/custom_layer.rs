//! Drives a compute device by hand: one decoder layer forward and backward, and a gradient checked.
//!
//! `cargo run --release --example custom_layer`

use std::sync::Arc;

use anyhow::{Context, bail, ensure};
use compute::{
    Command, ComputeDtype, CpuDevice, Device, Gradient, MicroShape, Outcome, TensorId, WeightsId,
    reference,
};
use model::{Budget, HostBytes, LayerSpec, LayerTable, ModelConfig, Role, TileId, Weights};

const CONFIG: &str = r#"{
  "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 80,
  "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2
}"#;
const SHAPE: MicroShape = MicroShape { rows: 2, seq_len: 8 };
const WEIGHTS: WeightsId = WeightsId(0);
const X: TensorId = TensorId(0);
const Y: TensorId = TensorId(1);
const DY: TensorId = TensorId(2);
const DX: TensorId = TensorId(3);

fn main() -> anyhow::Result<()> {
    let config = ModelConfig::from_json(CONFIG)?;
    let table = LayerTable::new(&config);
    let layer = &table.layers()[1];
    let width = SHAPE.tokens() * config.hidden_size;
    let (w, x, dy) = (noise(1, layer.elements()), noise(2, width), noise(3, width));

    let threads = Arc::new(rayon::ThreadPoolBuilder::new().build()?);
    let mut device = CpuDevice::new(&config, ComputeDtype::F32, Budget::new(64 << 20), threads);
    let (y, gradient) = forward_and_backward(&mut device, layer, &w, &x, &dy)?;

    let exact = reference::decoder_forward(&config, layer, &w, SHAPE, &x);
    let largest = y.iter().zip(&exact).map(|(y, e)| (f64::from(*y) - e).abs()).fold(0.0, f64::max);
    println!("forward: {} values, largest difference from float64 {largest:.1e}", y.len());
    ensure!(largest < 1e-4, "the forward is off by {largest}");

    let query = layer.tensor(Role::Query).context("a decoder layer has queries")?;
    let at = query.offset + 5;
    let expected = finite_difference(&config, layer, &w, &x, &dy, at);
    let got = f64::from(gradient[at]);
    println!("d loss / d {}[5]: device {got:.6e}, finite difference {expected:.6e}", query.name);
    ensure!((got - expected).abs() < 1e-3 * expected.abs(), "the gradient is wrong");
    Ok(())
}

/// `y [T, D]`, and the layer's gradient of `sum(dy * y)`.
fn forward_and_backward(
    device: &mut dyn Device,
    layer: &LayerSpec,
    w: &[f64],
    x: &[f64],
    dy: &[f64],
) -> anyhow::Result<(Vec<f32>, Vec<f32>)> {
    let weights = Weights::F32(block(w));
    device.run(Command::Bind { id: WEIGHTS, layer: layer.id, tile: TileId(0), weights })?;
    device.run(Command::Put { id: X, bytes: block(x) })?;
    device.run(Command::Forward { weights: WEIGHTS, shape: SHAPE, x: X, y: Y, keep: false })?;
    let Outcome::Bytes(y) = device.run(Command::Get { id: Y })? else { bail!("no output") };
    device.run(Command::Put { id: DY, bytes: block(dy) })?;
    let backward = Command::Backward {
        weights: WEIGHTS,
        shape: SHAPE,
        x: X,
        dy: DY,
        dx: Some(DX),
        gradient: true,
    };
    device.run(backward)?;
    device.run(Command::Unbind { id: WEIGHTS })?;
    let elements = 0..layer.elements();
    match device.run(Command::TakeGradient { layer: layer.id, elements })? {
        Outcome::Gradient(Gradient::Dense { values, .. }) => {
            Ok((y.f32s().to_vec(), values.f32s().to_vec()))
        }
        other => bail!("expected a dense gradient, got {other:?}"),
    }
}

/// Central difference of `sum(dy * y)` by one weight, in float64.
fn finite_difference(
    config: &ModelConfig,
    layer: &LayerSpec,
    w: &[f64],
    x: &[f64],
    dy: &[f64],
    at: usize,
) -> f64 {
    const STEP: f64 = 1e-5;
    let loss = |change: f64| -> f64 {
        let mut w = w.to_vec();
        w[at] += change;
        let y = reference::decoder_forward(config, layer, &w, SHAPE, x);
        y.iter().zip(dy).map(|(y, dy)| y * dy).sum()
    };
    (loss(STEP) - loss(-STEP)) / (2.0 * STEP)
}

/// Values that look random and are exact in float32.
fn noise(seed: usize, len: usize) -> Vec<f64> {
    (0..len).map(|i| f64::from((((seed * 7919 + i) as f64 * 12.9898).sin() * 0.5) as f32)).collect()
}

fn block(values: &[f64]) -> HostBytes {
    let mut bytes = HostBytes::zeroed(values.len() * 4);
    for (to, from) in bytes.f32s_mut().iter_mut().zip(values) {
        *to = *from as f32;
    }
    bytes
}
