//! The update against a plain twin, in pieces, without gradient, and on every instruction set.

use optim::{AdamW, HyperparameterError, Input, InstructionSet, Output, Prepared, update};
use proptest::prelude::*;

const CASES: u32 = 500;

/// Old W, M, V, g of a piece.
type Slices = [Vec<f32>; 4];

fn input(slices: &Slices) -> Input<'_> {
    let [weight, exp_avg, exp_avg_sq, grad] = slices;
    Input { weight, exp_avg, exp_avg_sq, grad }
}

/// New W, M, V as `run` writes them over buffers that held something else.
fn written(elements: usize, run: impl FnOnce(Output<'_>)) -> [Vec<f32>; 3] {
    let mut new = [const { Vec::new() }; 3].map(|_: Vec<f32>| vec![f32::NAN; elements]);
    let [weight, exp_avg, exp_avg_sq] = &mut new;
    run(Output { weight, exp_avg, exp_avg_sq });
    new
}

/// Bits, with one value for all NaNs: their payloads are not promised.
fn bits(new: &[Vec<f32>; 3]) -> Vec<u32> {
    let all = new.iter().flatten();
    all.map(|v| if v.is_nan() { u32::MAX } else { v.to_bits() }).collect()
}

/// AdamW from the paper's formulas and PyTorch's order, element by element, nothing prepared.
fn twin(adamw: &AdamW, t: u64, factor: f32, decay: bool, old: &Slices) -> [Vec<f32>; 3] {
    let (beta1, beta2) = (adamw.beta1, adamw.beta2);
    let root = (1.0 - power(beta2, t)).sqrt() as f32;
    let step_size = (adamw.lr / (1.0 - power(beta1, t))) as f32;
    written(old[0].len(), |new| {
        for (i, grad) in old[3].iter().enumerate() {
            let g = grad * factor;
            let w =
                old[0][i] * if decay { (1.0 - adamw.lr * adamw.weight_decay) as f32 } else { 1.0 };
            let m = lerp(old[1][i], g, (1.0 - beta1) as f32);
            let v = beta2 as f32 * old[2][i] + (1.0 - beta2) as f32 * g * g;
            new.weight[i] = w - step_size * m / (v.sqrt() / root + adamw.eps as f32);
            (new.exp_avg[i], new.exp_avg_sq[i]) = (m, v);
        }
    })
}

/// As the vectorised `torch.lerp` has it for float32.
fn lerp(start: f32, end: f32, weight: f32) -> f32 {
    if weight < 0.5 { start + weight * (end - start) } else { end + (weight - 1.0) * (end - start) }
}

/// The product of the squarings that `exponent` selects, lowest first.
fn power(base: f64, exponent: u64) -> f64 {
    let squarings = std::iter::successors(Some(base), |power| Some(power * power)).take(64);
    let selected = squarings.enumerate().filter(|(bit, _)| exponent >> bit & 1 == 1);
    selected.map(|(_, power)| power).product()
}

/// The update of one element in float64, from the paper; returns the new weight.
fn float64_weight(adamw: &AdamW, t: u64, old: [f64; 4]) -> f64 {
    let [w, m, v, g] = old;
    let m = adamw.beta1 * m + (1.0 - adamw.beta1) * g;
    let v = adamw.beta2 * v + (1.0 - adamw.beta2) * g * g;
    let m_hat = m / (1.0 - adamw.beta1.powf(t as f64));
    let v_hat = v / (1.0 - adamw.beta2.powf(t as f64));
    w * (1.0 - adamw.lr * adamw.weight_decay) - adamw.lr * m_hat / (v_hat.sqrt() + adamw.eps)
}

fn adamw() -> impl Strategy<Value = AdamW> {
    let beta = prop_oneof![Just(0.0), Just(0.5), Just(0.9), Just(0.999), 0.0..0.9999];
    (1e-6..1.0, beta.clone(), beta, prop_oneof![Just(0.0), 1e-10..1e-2], 0.0..0.5).prop_map(
        |(lr, beta1, beta2, eps, weight_decay)| AdamW { lr, beta1, beta2, eps, weight_decay },
    )
}

/// Any bits at all, numbers of a training run, and both zeros.
fn value() -> impl Strategy<Value = f32> {
    prop_oneof![any::<u32>().prop_map(f32::from_bits), -2.0_f32..2.0, Just(0.0), Just(-0.0)]
}

fn slices() -> impl Strategy<Value = Slices> {
    prop::collection::vec((value(), value(), value(), value()), 0..100).prop_map(|rows| {
        let column = |pick: fn(&(f32, f32, f32, f32)) -> f32| rows.iter().map(pick).collect();
        [column(|row| row.0), column(|row| row.1), column(|row| row.2.abs()), column(|row| row.3)]
    })
}

/// Updates `[from..to]` of the slices into the same part of the output.
fn update_part(prepared: &Prepared, old: &Slices, new: &mut Output<'_>, from: usize, to: usize) {
    let [weight, exp_avg, exp_avg_sq, grad] = old.each_ref().map(|slice| &slice[from..to]);
    let output = Output {
        weight: &mut new.weight[from..to],
        exp_avg: &mut new.exp_avg[from..to],
        exp_avg_sq: &mut new.exp_avg_sq[from..to],
    };
    update(prepared, true, Input { weight, exp_avg, exp_avg_sq, grad }, output);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(CASES))]

    #[test]
    fn every_instruction_set_agrees_with_the_twin_to_the_bit(
        adamw in adamw(),
        t in 1_u64..100_000,
        factor in prop_oneof![Just(1.0_f32), 0.0_f32..1.0],
        decay in any::<bool>(),
        old in slices(),
    ) {
        let prepared = adamw.prepare(t, factor);
        let expected = bits(&twin(&adamw, t, factor, decay, &old));
        let best = written(old[0].len(), |new| update(&prepared, decay, input(&old), new));
        prop_assert_eq!(bits(&best), expected.clone());
        for set in InstructionSet::available() {
            let run = |new: Output<'_>| set.update(&prepared, decay, input(&old), new);
            prop_assert_eq!(bits(&written(old[0].len(), run)), expected.clone(), "on {}", set);
        }
    }

    #[test]
    fn no_gradient_is_a_gradient_of_zeros(
        adamw in adamw(),
        t in 1_u64..100_000,
        factor in 0.0_f32..=1.0,
        decay in any::<bool>(),
        old in slices(),
    ) {
        let elements = old[0].len();
        let prepared = adamw.prepare(t, factor);
        let zeros = [old[0].clone(), old[1].clone(), old[2].clone(), vec![0.0; elements]];
        let expected = written(elements, |new| update(&prepared, decay, input(&zeros), new));
        let without = Input { grad: &[], ..input(&old) };
        for set in InstructionSet::available() {
            let run = |new: Output<'_>| set.update_zero_grad(&prepared, decay, without, new);
            prop_assert_eq!(bits(&written(elements, run)), bits(&expected), "on {}", set);
        }
        let best = written(elements, |new| {
            optim::update_zero_grad(&prepared, decay, without, new);
        });
        prop_assert_eq!(bits(&best), bits(&expected));
    }

    #[test]
    fn pieces_do_not_change_bits(
        adamw in adamw(),
        old in slices(),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..5),
    ) {
        let elements = old[0].len();
        let prepared = adamw.prepare(3, 0.5);
        let whole = written(elements, |new| update(&prepared, true, input(&old), new));
        let mut ends: Vec<usize> = cuts.iter().map(|cut| cut.index(elements + 1)).collect();
        ends.extend([0, elements]);
        ends.sort_unstable();
        let pieces = written(elements, |mut new| {
            for cut in ends.windows(2) {
                update_part(&prepared, &old, &mut new, cut[0], cut[1]);
            }
        });
        prop_assert_eq!(bits(&pieces), bits(&whole));
    }

    #[test]
    fn weight_is_near_the_formula_in_float64(
        adamw in adamw(),
        t in prop_oneof![1_u64..100, 1_u64..10_000_000],
        w in -2.0_f32..2.0,
        m in 0.01_f32..1.0,
        v in 1e-4_f32..1.0,
        g in 0.01_f32..1.0,
    ) {
        let old = [vec![w], vec![m], vec![v], vec![g]];
        let new = written(1, |new| update(&adamw.prepare(t, 1.0), true, input(&old), new));
        let exact = float64_weight(&adamw, t, [w, m, v, g].map(f64::from));
        let moved = (exact - f64::from(w)).abs() + f64::from(w.abs());
        let error = (f64::from(new[0][0]) - exact).abs();
        prop_assert!(error <= 1e-6 * moved, "{} instead of {exact}", new[0][0]);
    }
}

const DEFAULT: AdamW = AdamW { lr: 1e-3, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.1 };

#[test]
fn decay_is_per_piece() {
    let old = [vec![1.0; 3], vec![0.0; 3], vec![0.0; 3], vec![0.0; 3]];
    let prepared = DEFAULT.prepare(1, 1.0);
    let [kept, ..] = written(3, |new| update(&prepared, false, input(&old), new));
    let [decayed, ..] = written(3, |new| update(&prepared, true, input(&old), new));
    assert_eq!((kept, decayed), (vec![1.0; 3], vec![0.9999; 3]));
}

#[test]
fn infinities_come_out_as_not_finite() {
    let old = [vec![1.0; 3], vec![0.0; 3], vec![0.0; 3], vec![f32::INFINITY, f32::NAN, 1.0]];
    let [weight, ..] = written(3, |new| update(&DEFAULT.prepare(1, 1.0), true, input(&old), new));
    assert_eq!(weight.iter().map(|w| w.is_finite()).collect::<Vec<_>>(), [false, false, true]);
}

#[test]
#[should_panic(expected = "t = 1")]
fn update_zero_does_not_exist() {
    DEFAULT.prepare(0, 1.0);
}

#[test]
#[should_panic(expected = "length of the gradient")]
fn missing_gradient_is_not_zero() {
    let old = [vec![1.0; 3], vec![0.0; 3], vec![0.0; 3], vec![]];
    written(3, |new| update(&DEFAULT.prepare(1, 1.0), true, input(&old), new));
}

#[test]
#[should_panic(expected = "length of the new weight")]
fn lengths_must_agree() {
    let old = [vec![1.0; 3], vec![0.0; 3], vec![0.0; 3], vec![1.0; 3]];
    written(2, |new| update(&DEFAULT.prepare(1, 1.0), true, input(&old), new));
}

#[test]
fn impossible_hyperparameters_are_refused_by_name() {
    assert_eq!(DEFAULT.check(), Ok(()));
    let refused = [
        (AdamW { lr: -1.0, ..DEFAULT }, "lr is -1, but must be finite and at least 0"),
        (AdamW { beta1: 1.0, ..DEFAULT }, "beta1 is 1, but must be at least 0 and below 1"),
        (AdamW { beta2: -0.1, ..DEFAULT }, "beta2 is -0.1, but must be at least 0 and below 1"),
        (AdamW { eps: f64::NAN, ..DEFAULT }, "eps is NaN, but must be finite and at least 0"),
        (
            AdamW { weight_decay: f64::INFINITY, ..DEFAULT },
            "weight-decay is inf, but must be finite and at least 0",
        ),
    ];
    for (adamw, text) in refused {
        let error: HyperparameterError = adamw.check().unwrap_err();
        assert_eq!(error.to_string(), text);
    }
}
