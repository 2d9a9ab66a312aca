//! AdamW against `torch.optim.AdamW`; tests/golden/adamw.py wrote the numbers and lists the cases.
//!
//! Equality is to a few units in the last place of each quantity's scale, not to the bit: the
//! order of operations is PyTorch's, but its kernels fuse some of the multiplications and
//! additions into one rounding, depending on compiler and processor, and ours never do. The scale
//! of a running mean is the largest gradient that went into it, because gradients of both signs
//! cancel; that of a weight is the largest it had, or the learning rate, whichever is greater.

use optim::{AdamW, Input, Output, clip_factor, sum_of_squares, update};

const ELEMENTS: usize = 1000;
const STEPS: usize = 10;
const STORED_STEPS: [usize; 3] = [1, 2, 10];
const CASES: usize = 4;
const CLAMP: f32 = 4.0;

/// Units in the last place for W, M, V: about twice the largest seen (3.7, 0.8, 2.9).
const TOLERANCES: [f32; 3] = [8.0, 2.0, 6.0];

#[test]
fn ten_steps_agree_with_pytorch() {
    let mut golden = Golden(include_bytes!("../golden/adamw.bin"));
    let weight = golden.floats();
    let grads: Vec<Vec<f32>> = (0..STEPS).map(|_| golden.floats()).collect();
    for case in 0..CASES {
        run_case(case, &mut golden, &weight, &grads);
    }
    assert!(golden.0.is_empty(), "{} bytes left", golden.0.len());
}

fn run_case(case: usize, golden: &mut Golden, weight: &[f32], grads: &[Vec<f32>]) {
    let [lr, beta1, beta2, eps, weight_decay, max_norm] = golden.doubles();
    let adamw = AdamW { lr, beta1, beta2, eps, weight_decay };
    assert_eq!(adamw.check(), Ok(()));
    let mut state = State::new(weight);
    for (step, grad) in (1..).zip(grads) {
        let stored = STORED_STEPS.contains(&step).then(|| golden.stored());
        let clips = max_norm.is_finite();
        let grad = if clips { clamped(grad) } else { grad.clone() };
        let factor = if clips { clip_factor(max_norm, norm(&grad)) } else { 1.0 };
        state.update(&adamw, step as u64, factor, &grad);
        if let Some(stored) = stored {
            assert!(!clips || relative(norm(&grad), stored.norm.into()) < 1e-6, "norm {step}");
            state.compare(&stored, lr as f32, &format!("case {case}, step {step}"));
        }
    }
}

fn clamped(grad: &[f32]) -> Vec<f32> {
    grad.iter().map(|g| g.clamp(-CLAMP, CLAMP)).collect()
}

fn norm(grad: &[f32]) -> f64 {
    sum_of_squares(grad).sqrt()
}

fn relative(a: f64, b: f64) -> f64 {
    (a - b).abs() / b
}

/// W, M, V and the scale that each element's W and M are measured by.
struct State {
    weight: Vec<f32>,
    exp_avg: Vec<f32>,
    exp_avg_sq: Vec<f32>,
    largest_weight: Vec<f32>,
    largest_grad: Vec<f32>,
}

impl State {
    fn new(weight: &[f32]) -> Self {
        let zeros = vec![0.0; weight.len()];
        Self {
            weight: weight.to_vec(),
            exp_avg: zeros.clone(),
            exp_avg_sq: zeros.clone(),
            largest_weight: weight.iter().map(|w| w.abs()).collect(),
            largest_grad: zeros,
        }
    }

    fn update(&mut self, adamw: &AdamW, t: u64, factor: f32, grad: &[f32]) {
        let mut new = [const { Vec::new() }; 3].map(|_: Vec<f32>| vec![0.0; grad.len()]);
        let [weight, exp_avg, exp_avg_sq] = &mut new;
        let input = Input {
            weight: &self.weight,
            exp_avg: &self.exp_avg,
            exp_avg_sq: &self.exp_avg_sq,
            grad,
        };
        update(&adamw.prepare(t, factor), true, input, Output { weight, exp_avg, exp_avg_sq });
        [self.weight, self.exp_avg, self.exp_avg_sq] = new;
        raise(&mut self.largest_weight, self.weight.iter().copied());
        raise(&mut self.largest_grad, grad.iter().map(|g| g * factor));
    }

    fn compare(&self, stored: &Stored, lr: f32, what: &str) {
        for i in 0..ELEMENTS {
            let weight_scale = self.largest_weight[i].max(lr);
            let errors = [
                units(self.weight[i], stored.weight[i], weight_scale),
                units(self.exp_avg[i], stored.exp_avg[i], self.largest_grad[i]),
                units(self.exp_avg_sq[i], stored.exp_avg_sq[i], stored.exp_avg_sq[i]),
            ];
            let close = errors.iter().zip(TOLERANCES).all(|(error, tolerance)| *error <= tolerance);
            assert!(close, "{what}, element {i}: W, M, V are {errors:?} units off");
        }
    }
}

/// Keeps the largest magnitude of each element.
fn raise(largest: &mut [f32], values: impl Iterator<Item = f32>) {
    for (largest, value) in largest.iter_mut().zip(values) {
        *largest = largest.max(value.abs());
    }
}

/// The distance in units in the last place of `scale`.
fn units(ours: f32, theirs: f32, scale: f32) -> f32 {
    // Infinities that agree have no difference to measure.
    if ours == theirs {
        return 0.0;
    }
    (ours - theirs).abs() / (scale * f32::EPSILON).max(f32::from_bits(1))
}

struct Stored {
    norm: f32,
    weight: Vec<f32>,
    exp_avg: Vec<f32>,
    exp_avg_sq: Vec<f32>,
}

/// The bytes of the golden file that have not been read.
struct Golden(&'static [u8]);

impl Golden {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let (head, rest) = self.0.split_first_chunk().expect("golden file is too short");
        self.0 = rest;
        *head
    }

    fn doubles<const N: usize>(&mut self) -> [f64; N] {
        std::array::from_fn(|_| f64::from_le_bytes(self.take()))
    }

    fn float(&mut self) -> f32 {
        f32::from_le_bytes(self.take())
    }

    fn floats(&mut self) -> Vec<f32> {
        (0..ELEMENTS).map(|_| self.float()).collect()
    }

    fn stored(&mut self) -> Stored {
        Stored {
            norm: self.float(),
            weight: self.floats(),
            exp_avg: self.floats(),
            exp_avg_sq: self.floats(),
        }
    }
}
