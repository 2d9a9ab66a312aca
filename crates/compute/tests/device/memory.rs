//! Real peaks of the budget against the bounds that the device states.

use std::sync::Arc;

use compute::{Command, ComputeDtype, MicroShape, NO_TARGET, TensorId, workspace};
use model::{LayerId, ModelConfig, StateLayout, Tiling};

use crate::harness::{self, Bench};

const SHAPE: MicroShape = MicroShape { rows: 2, seq_len: 70 };

/// Bytes that the command held at most, beside what was there before and what it left.
fn transient(bench: &mut Bench, command: Command) -> usize {
    // A fresh device knows no earlier peak; what lives is the tensors put by the test, on the heap.
    let before = bench.budget.used_bytes();
    bench.run(command);
    let left = bench.budget.used_bytes().saturating_sub(before);
    bench.budget.peak_bytes() - before - left
}

fn models() -> Vec<ModelConfig> {
    let text = |family: &str, hidden: usize, ffn: usize, head_dim: usize, vocab: usize| {
        harness::config(&format!(
            r#"{{"model_type":"{family}","vocab_size":{vocab},"hidden_size":{hidden},
                "intermediate_size":{ffn},"num_hidden_layers":1,"num_attention_heads":4,
                "num_key_value_heads":2,"head_dim":{head_dim},"attention_bias":true}}"#
        ))
    };
    vec![
        text("llama", 64, 160, 16, 100),
        text("qwen3", 64, 16, 32, 100),
        text("llama", 96, 8, 2, 5000),
    ]
}

#[test]
fn no_command_needs_more_than_its_bound() {
    for (config, tiling) in models()
        .iter()
        .flat_map(|config| [Tiling::Whole, Tiling::Blocks].map(|tiling| (config, tiling)))
    {
        let bound = workspace(config, ComputeDtype::F32, StateLayout::F32, SHAPE, tiling);
        assert_eq!(bound.bound_bytes, 0);
        let input = vec![0.25; SHAPE.tokens() * config.hidden_size];
        let labels: Arc<[u32]> = vec![3; SHAPE.tokens()].into();
        let (mut tightest, mut most_kept) = (0, 0);
        let tiles = Bench::new(config, 2).table.tiles(LayerId(1), tiling);
        for (tile, keep) in tiles.iter().flat_map(|t| [(t.id.0, false), (t.id.0, true)]) {
            let mut bench = Bench::new(config, 2);
            let weights = bench.bind(LayerId(1), tile);
            let (x, y) = (bench.put(1, &input), TensorId(2));
            let used =
                transient(&mut bench, Command::Forward { weights, shape: SHAPE, x, y, keep });
            let kept = bench.budget.used_bytes() - input.len() * 4;
            assert_eq!(kept > 0, keep);
            most_kept = most_kept.max(kept);
            assert!(used + kept <= bound.command_bytes, "forward {used} {bound:?}");
            tightest = tightest.max(used + kept);
        }
        assert_eq!(most_kept, bound.kept_bytes);
        for tile in tiles {
            let mut bench = Bench::new(config, 2);
            let weights = bench.bind(LayerId(1), tile.id.0);
            let (x, dy) = (bench.put(1, &input), bench.put(2, &input));
            let dx = Some(TensorId(3));
            let backward = Command::Backward { weights, shape: SHAPE, x, dy, dx, gradient: true };
            tightest = tightest.max(transient(&mut bench, backward));
        }

        let mut bench = Bench::new(config, 2);
        let weights = bench.bind(bench.table.head(), 1);
        let (h, stats, dh) = (bench.put(1, &input), TensorId(2), TensorId(3));
        let l = Arc::clone(&labels);
        let score = Command::HeadScore { weights, h, labels: l, stats, keep: false };
        tightest = tightest.max(transient(&mut bench, score));
        let l = Arc::clone(&labels);
        let scale = 1.0;
        let backward =
            Command::HeadBackward { weights, h, stats, labels: l, dh, scale, gradient: true };
        tightest = tightest.max(transient(&mut bench, backward));
        assert!(tightest <= bound.command_bytes, "{tightest} {bound:?}");
        assert!(tightest * 10 >= bound.command_bytes * 9, "loose: {tightest} {bound:?}");
    }
}

#[test]
fn unlabelled_tokens_have_no_gradient_and_clear_frees_everything() {
    let config = &models()[0];
    let mut bench = Bench::new(config, 2);
    let input = vec![0.25; SHAPE.tokens() * config.hidden_size];
    let weights = bench.bind(bench.table.head(), 1);
    let (h, stats) = (bench.put(1, &input), TensorId(2));
    let labels: Arc<[u32]> = vec![NO_TARGET; SHAPE.tokens()].into();
    let l = Arc::clone(&labels);
    bench.run(Command::HeadScore { weights, h, labels: l, stats, keep: false });
    let backward = Command::HeadBackward {
        weights,
        h,
        stats,
        labels,
        dh: TensorId(3),
        scale: 1.0,
        gradient: true,
    };
    bench.run(backward);
    assert!(bench.get(TensorId(3)).iter().all(|g| *g == 0.0));
    bench.run(Command::Clear);
    assert_eq!(bench.budget.used_bytes(), 0);
}

#[test]
fn weights_in_another_form_are_widened_when_they_are_first_used_within_the_bound() {
    for config in models() {
        let bound =
            workspace(&config, ComputeDtype::F32, StateLayout::Split8, SHAPE, Tiling::Whole);
        let mut bench = Bench::new(&config, 2);
        bench.layout = StateLayout::Split8;
        let head = bench.table.head();
        let tiles = bench.table.tiles(head, Tiling::Whole).len() as u32;
        let bound_ids: Vec<_> = (0..tiles).map(|tile| bench.bind(head, tile)).collect();
        let layer = bench.bind(LayerId(1), 0);
        assert_eq!(bench.budget.used_bytes(), 0);
        let x = bench.put(1, &vec![0.25; SHAPE.tokens() * config.hidden_size]);
        let before = bench.budget.used_bytes();
        let (y, shape) = (TensorId(2), SHAPE);
        bench.run(Command::Forward { weights: layer, shape, x, y, keep: false });
        bench.run(Command::Free { id: y });
        let values = bench.table.layer(LayerId(1)).elements() * 4;
        assert_eq!(bench.budget.used_bytes() - before, values);
        assert!(values <= bound.bound_bytes);
        bench.run(Command::Unbind { id: layer });
        for id in bound_ids {
            bench.run(Command::Unbind { id });
        }
        assert_eq!(bench.budget.used_bytes(), before);
    }
}
