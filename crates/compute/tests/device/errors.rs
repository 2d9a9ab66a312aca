//! Every way in which a command is refused, and that the device goes on afterwards.

use std::sync::Arc;

use compute::{
    Command, ComputeDtype, CpuDevice, DeviceError, MicroShape, NO_TARGET, Outcome, TensorId,
    WeightsId,
};
use model::{Budget, BudgetError, HostBytes, LayerId, ModelConfig, TileId, Weights};

use crate::harness::{self, Bench};

const SHAPE: MicroShape = MicroShape { rows: 1, seq_len: 2 };
const NOWHERE: TensorId = TensorId(404);

fn config() -> ModelConfig {
    harness::config(
        r#"{"model_type":"llama","vocab_size":64,"hidden_size":8,"intermediate_size":8,
            "num_hidden_layers":1,"num_attention_heads":2}"#,
    )
}

fn labels(values: &[u32]) -> Arc<[u32]> {
    values.into()
}

fn unknown(what: &str) -> impl Fn(&DeviceError) -> bool + '_ {
    move |e| matches!(e, DeviceError::Unknown { what: w, .. } if *w == what)
}

fn shape(expected_bytes: usize) -> impl Fn(&DeviceError) -> bool {
    move |e| matches!(e, DeviceError::Shape { expected, .. } if *expected == expected_bytes)
}

fn token(beyond: u32) -> impl Fn(&DeviceError) -> bool {
    move |e| matches!(e, DeviceError::Token { token, .. } if *token == beyond)
}

/// A device with x = tensor 1 `[2, 8]`, h = tensor 2, the decoder's and the head's weights bound.
fn device() -> (Bench, [WeightsId; 3]) {
    let mut bench = Bench::new(&config(), 1);
    let head = bench.table.head();
    let ids = [bench.bind(LayerId(1), 0), bench.bind(head, 0), bench.bind(head, 1)];
    bench.put(1, &[0.5; 16]);
    bench.put(2, &[0.5; 16]);
    bench.put(3, &[0.5; 6]);
    (bench, ids)
}

fn refuse(bench: &mut Bench, command: Command, expected: impl Fn(&DeviceError) -> bool) {
    let name = format!("{command:?}");
    match bench.call(command) {
        Err(error) => assert!(expected(&error), "{name}: {error}"),
        Ok(outcome) => panic!("{name}: {outcome:?}"),
    }
}

#[test]
fn names_that_are_not_on_the_device() {
    let (mut bench, [decoder, norm, tile]) = device();
    let (x, y, h, stats, dh) = (TensorId(1), TensorId(9), TensorId(2), TensorId(5), TensorId(6));
    let l = || labels(&[1, 2]);
    let gone = WeightsId(404);
    let b = &mut bench;
    refuse(b, Command::Unbind { id: gone }, unknown("weights"));
    refuse(b, Command::Get { id: NOWHERE }, unknown("tensor"));
    refuse(b, Command::Free { id: NOWHERE }, unknown("tensor"));
    let forward = |weights, x| Command::Forward { weights, shape: SHAPE, x, y, keep: false };
    refuse(b, forward(gone, x), unknown("weights"));
    refuse(b, forward(tile, x), unknown("decoder weights"));
    refuse(b, forward(decoder, NOWHERE), unknown("tensor"));
    let backward = |weights, x, dy| Command::Backward {
        weights,
        shape: SHAPE,
        x,
        dy,
        dx: None,
        gradient: true,
    };
    refuse(b, backward(gone, x, h), unknown("weights"));
    refuse(b, backward(decoder, NOWHERE, h), unknown("tensor"));
    refuse(b, backward(decoder, x, NOWHERE), unknown("tensor"));
    refuse(b, Command::HeadNorm { weights: tile, x, h: y }, unknown("final norm weights"));
    refuse(b, Command::HeadNorm { weights: norm, x: NOWHERE, h: y }, unknown("tensor"));
    let score = |weights, h| Command::HeadScore { weights, h, labels: l(), stats, keep: false };
    refuse(b, score(norm, h), unknown("vocabulary tile"));
    refuse(b, score(tile, NOWHERE), unknown("tensor"));
    refuse(b, Command::HeadLoss { stats, labels: l() }, unknown("head statistics"));
    let head_backward = |weights, stats| Command::HeadBackward {
        weights,
        h,
        stats,
        labels: l(),
        dh,
        scale: 1.0,
        gradient: true,
    };
    refuse(b, head_backward(tile, stats), unknown("head statistics"));
    refuse(b, head_backward(gone, stats), unknown("weights"));
    let norm_backward =
        |x, dh| Command::HeadNormBackward { weights: norm, x, dh, dx: None, gradient: true };
    refuse(b, norm_backward(NOWHERE, h), unknown("tensor"));
    refuse(b, norm_backward(x, NOWHERE), unknown("tensor"));
    refuse(b, Command::HeadLogits { weights: tile, h, token: 2 }, unknown("position"));
    refuse(b, Command::EmbedBackward { tokens: l(), dy: NOWHERE }, unknown("tensor"));
    for layer in 0..3 {
        let missing = unknown("gradient of layer");
        refuse(b, Command::TakeGradient { layer: LayerId(layer), elements: 0..64 }, missing);
    }
}

#[test]
fn blocks_of_a_wrong_size() {
    let (mut bench, [decoder, norm, tile]) = device();
    let b = &mut bench;
    let (x, h, odd, y) = (TensorId(1), TensorId(2), TensorId(3), TensorId(9));
    let bind = |layer, tile, len| Command::Bind {
        id: WeightsId(7),
        layer: LayerId(layer),
        tile: TileId(tile),
        weights: Weights::F32(HostBytes::zeroed(len)),
    };
    refuse(b, bind(9, 0, 4), unknown("layer"));
    refuse(b, bind(1, 3, 4), unknown("tile of the layer"));
    refuse(b, bind(2, 0, 4), shape(32));
    refuse(b, Command::Put { id: y, bytes: HostBytes::zeroed(7) }, shape(4));
    let embed = |len, index: &[u32]| Command::Embed {
        rows: Weights::F32(HostBytes::zeroed(len)),
        index: index.into(),
        y,
    };
    refuse(b, embed(40, &[0]), shape(32));
    refuse(b, embed(64, &[2]), token(2));
    let forward = |x, shape| Command::Forward { weights: decoder, shape, x, y, keep: false };
    refuse(b, forward(odd, SHAPE), shape(64));
    refuse(b, forward(x, MicroShape { rows: 0, seq_len: 2 }), shape(1));
    let backward =
        |dy| Command::Backward { weights: decoder, shape: SHAPE, x, dy, dx: None, gradient: false };
    refuse(b, backward(odd), shape(64));
    refuse(b, Command::HeadNorm { weights: norm, x: odd, h: y }, shape(0));
    let score = |labels, stats| Command::HeadScore { weights: tile, h, labels, stats, keep: false };
    refuse(b, score(labels(&[1, 2, 3]), y), shape(96));
    refuse(b, Command::HeadLoss { stats: x, labels: labels(&[1, 2]) }, shape(24));
    refuse(b, Command::EmbedBackward { tokens: labels(&[1]), dy: x }, shape(32));
}

#[test]
fn tokens_beyond_the_vocabulary() {
    let (mut bench, [_, _, tile]) = device();
    let b = &mut bench;
    let (x, h, stats, dh) = (TensorId(1), TensorId(2), TensorId(5), TensorId(6));
    let bad = || labels(&[NO_TARGET, 64]);
    refuse(b, Command::EmbedBackward { tokens: bad(), dy: x }, token(NO_TARGET));
    refuse(
        b,
        Command::HeadScore { weights: tile, h, labels: bad(), stats, keep: false },
        token(64),
    );
    refuse(b, Command::HeadLoss { stats, labels: bad() }, token(64));
    let backward = Command::HeadBackward {
        weights: tile,
        h,
        stats,
        labels: bad(),
        dh,
        scale: 1.0,
        gradient: true,
    };
    refuse(b, backward, token(64));
}

#[test]
fn a_refused_command_consumes_nothing_and_clear_forgets_everything() {
    let (mut bench, [decoder, _, _]) = device();
    let (x, h) = (TensorId(1), TensorId(2));
    let backward =
        |dy| Command::Backward { weights: decoder, shape: SHAPE, x, dy, dx: None, gradient: true };
    refuse(&mut bench, backward(NOWHERE), unknown("tensor"));
    bench.run(backward(h));
    refuse(&mut bench, Command::Get { id: x }, unknown("tensor"));
    bench.run(Command::Clear);
    refuse(&mut bench, Command::Unbind { id: decoder }, unknown("weights"));
    let missing = unknown("gradient of layer");
    refuse(&mut bench, Command::TakeGradient { layer: LayerId(1), elements: 0..64 }, missing);
}

#[test]
fn a_budget_that_is_used_up_is_an_error() {
    let (mut bench, [decoder, _, _]) = device();
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    bench.device = CpuDevice::new(&config(), ComputeDtype::F32, Budget::new(100), Arc::new(pool));
    bench.bind(LayerId(1), 0);
    bench.put(1, &[0.5; 16]);
    let (x, y) = (TensorId(1), TensorId(9));
    let forward = Command::Forward { weights: decoder, shape: SHAPE, x, y, keep: false };
    let exhausted =
        |e: &DeviceError| matches!(e, DeviceError::Memory(BudgetError::Exhausted { .. }));
    refuse(&mut bench, forward, exhausted);
}

#[test]
fn logits_of_a_position_are_the_products_of_its_row() {
    let (mut bench, [_, _, tile]) = device();
    let h = bench.put(2, &(0..16).map(|i| i as f32).collect::<Vec<_>>());
    match bench.call(Command::HeadLogits { weights: tile, h, token: 1 }) {
        Ok(Outcome::Logits(logits)) => {
            let w = &bench.weights[2][8 + 5 * 8..][..8];
            let want: f32 = w.iter().zip(8..16).map(|(w, h)| w * h as f32).sum();
            assert_eq!(logits.len(), 64);
            assert!((logits[5] - want).abs() < 1e-4);
        }
        other => panic!("{other:?}"),
    }
}
