//! AdamW as `torch.optim.AdamW` computes it, on one contiguous piece of a tensor.
//!
//! Invariants:
//! - elements are independent: cutting a tensor into pieces never changes bits;
//! - every element, in vectors or in the tail, goes through [`Prepared::element`].

use crate::error::{HyperparameterError, at_least_zero, below_one};
use crate::simd::{InstructionSet, Kernel};

/// The elements computed at once: one AVX-512 register, two of AVX2, four of SSE2 or NEON.
const LANES: usize = 16;

type Lanes = [f32; LANES];

/// Hyperparameters of one step (Loshchilov and Hutter, arXiv:1711.05101).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamW {
    /// Learning rate of this step.
    pub lr: f64,
    /// Decay of the gradient's running mean.
    pub beta1: f64,
    /// Decay of the squared gradient's running mean.
    pub beta2: f64,
    /// Added to the denominator, outside the root.
    pub eps: f64,
    /// Decoupled decay: weights shrink by `lr * weight_decay` a step.
    pub weight_decay: f64,
}

impl AdamW {
    /// Accepts the ranges that `torch.optim.AdamW` accepts, finite numbers only.
    pub fn check(&self) -> Result<(), HyperparameterError> {
        at_least_zero("lr", self.lr)?;
        below_one("beta1", self.beta1)?;
        below_one("beta2", self.beta2)?;
        at_least_zero("eps", self.eps)?;
        at_least_zero("weight-decay", self.weight_decay)
    }

    /// The scalars of the layer's `t`-th update (first: 1), computed in float64, rounded once.
    /// Gradients are multiplied by `grad_factor` (clipping) before anything else.
    ///
    /// As in PyTorch, decay multiplies by the float32 nearest to `1 - lr * weight_decay`, so a
    /// product below 3e-8 decays nothing.
    ///
    /// # Panics
    /// When `t` is 0: bias correction would divide by zero.
    pub fn prepare(&self, t: u64, grad_factor: f32) -> Prepared {
        assert!(t >= 1, "the first update of AdamW has t = 1");
        let (lerp_from_grad, lerp_weight) = lerp(self.beta1);
        Prepared {
            first: t == 1,
            grad_factor,
            keep: (1.0 - self.lr * self.weight_decay) as f32,
            lerp_from_grad,
            lerp_weight,
            beta2: self.beta2 as f32,
            one_minus_beta2: (1.0 - self.beta2) as f32,
            correction2_root: (1.0 - power(self.beta2, t)).sqrt() as f32,
            eps: self.eps as f32,
            step_size: (self.lr / (1.0 - power(self.beta1, t))) as f32,
        }
    }
}

/// The float32 scalars of one step of one layer, shared by all its pieces.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Prepared {
    first: bool,
    grad_factor: f32,
    keep: f32,
    lerp_from_grad: bool,
    lerp_weight: f32,
    beta2: f32,
    one_minus_beta2: f32,
    correction2_root: f32,
    eps: f32,
    step_size: f32,
}

impl Prepared {
    /// Whether it is a layer's first update, for which the caller passes zero moments.
    pub fn is_first(&self) -> bool {
        self.first
    }
}

/// What an update reads; all slices have the same length.
#[derive(Debug, Clone, Copy)]
pub struct Input<'a> {
    pub weight: &'a [f32],
    pub exp_avg: &'a [f32],
    pub exp_avg_sq: &'a [f32],
    /// Not read by [`update_zero_grad`], where it may be empty.
    pub grad: &'a [f32],
}

/// What an update writes; all slices have the length of the input's.
#[derive(Debug)]
pub struct Output<'a> {
    pub weight: &'a mut [f32],
    pub exp_avg: &'a mut [f32],
    pub exp_avg_sq: &'a mut [f32],
}

/// One AdamW update of a piece, 16 bytes read and 12 written per element; `decay` says whether
/// weight decay applies to this piece's tensor.
///
/// # Panics
/// When the slices' lengths differ.
pub fn update(prepared: &Prepared, decay: bool, input: Input<'_>, output: Output<'_>) {
    InstructionSet::best().update(prepared, decay, input, output);
}

/// [`update`] where every gradient is zero (embedding rows that no token touched): the same bits
/// as with a slice of zeros, without reading one. `input.grad` is not read.
///
/// # Panics
/// When the lengths of the other slices differ.
pub fn update_zero_grad(prepared: &Prepared, decay: bool, input: Input<'_>, output: Output<'_>) {
    InstructionSet::best().update_zero_grad(prepared, decay, input, output);
}

impl InstructionSet {
    /// [`update`] on this set.
    pub fn update(self, prepared: &Prepared, decay: bool, input: Input<'_>, output: Output<'_>) {
        assert_eq!(input.grad.len(), input.weight.len(), "length of the gradient");
        check_lengths(&input, &output);
        let prepared = prepared.with_decay(decay);
        self.run(Update::<true> { prepared, input, output });
    }

    /// [`update_zero_grad`] on this set.
    pub fn update_zero_grad(
        self,
        prepared: &Prepared,
        decay: bool,
        input: Input<'_>,
        output: Output<'_>,
    ) {
        check_lengths(&input, &output);
        let prepared = prepared.with_decay(decay);
        self.run(Update::<false> { prepared, input, output });
    }
}

impl Prepared {
    /// Multiplying by one is exact, so pieces without decay need no code of their own.
    fn with_decay(self, decay: bool) -> Self {
        Self { keep: if decay { self.keep } else { 1.0 }, ..self }
    }

    /// The new (weight, exp_avg, exp_avg_sq) of one element, in PyTorch's order of operations,
    /// each of them rounded.
    #[inline(always)]
    fn element(&self, weight: f32, exp_avg: f32, exp_avg_sq: f32, grad: f32) -> (f32, f32, f32) {
        let grad = grad * self.grad_factor;
        let from = if self.lerp_from_grad { grad } else { exp_avg };
        let exp_avg = from + self.lerp_weight * (grad - exp_avg);
        let exp_avg_sq = exp_avg_sq * self.beta2 + self.one_minus_beta2 * grad * grad;
        let denominator = exp_avg_sq.sqrt() / self.correction2_root + self.eps;
        let weight = weight * self.keep - self.step_size * exp_avg / denominator;
        (weight, exp_avg, exp_avg_sq)
    }
}

/// The update's loop; without `GRAD` every gradient is zero.
struct Update<'a, const GRAD: bool> {
    prepared: Prepared,
    input: Input<'a>,
    output: Output<'a>,
}

impl<const GRAD: bool> Kernel for Update<'_, GRAD> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Self { prepared, input, output } = self;
        let (weight, weight_tail) = input.weight.as_chunks::<LANES>();
        let (exp_avg, exp_avg_tail) = input.exp_avg.as_chunks::<LANES>();
        let (exp_avg_sq, exp_avg_sq_tail) = input.exp_avg_sq.as_chunks::<LANES>();
        let (grad, grad_tail) = input.grad.as_chunks::<LANES>();
        let (new_weight, new_weight_tail) = output.weight.as_chunks_mut::<LANES>();
        let (new_exp_avg, new_exp_avg_tail) = output.exp_avg.as_chunks_mut::<LANES>();
        let (new_exp_avg_sq, new_exp_avg_sq_tail) = output.exp_avg_sq.as_chunks_mut::<LANES>();
        for i in 0..weight.len() {
            let g = if GRAD { grad[i] } else { [0.0; LANES] };
            let new = lanes(&prepared, weight[i], exp_avg[i], exp_avg_sq[i], g);
            (new_weight[i], new_exp_avg[i], new_exp_avg_sq[i]) = new;
        }
        for i in 0..weight_tail.len() {
            let g = if GRAD { grad_tail[i] } else { 0.0 };
            let new = prepared.element(weight_tail[i], exp_avg_tail[i], exp_avg_sq_tail[i], g);
            (new_weight_tail[i], new_exp_avg_tail[i], new_exp_avg_sq_tail[i]) = new;
        }
    }
}

/// Values in, values out: with no memory between them the compiler keeps lanes in registers.
#[inline(always)]
fn lanes(
    prepared: &Prepared,
    mut weight: Lanes,
    mut exp_avg: Lanes,
    mut exp_avg_sq: Lanes,
    grad: Lanes,
) -> (Lanes, Lanes, Lanes) {
    for l in 0..LANES {
        (weight[l], exp_avg[l], exp_avg_sq[l]) =
            prepared.element(weight[l], exp_avg[l], exp_avg_sq[l], grad[l]);
    }
    (weight, exp_avg, exp_avg_sq)
}

fn check_lengths(input: &Input<'_>, output: &Output<'_>) {
    let elements = input.weight.len();
    assert_eq!(input.exp_avg.len(), elements, "length of exp_avg");
    assert_eq!(input.exp_avg_sq.len(), elements, "length of exp_avg_sq");
    assert_eq!(output.weight.len(), elements, "length of the new weight");
    assert_eq!(output.exp_avg.len(), elements, "length of the new exp_avg");
    assert_eq!(output.exp_avg_sq.len(), elements, "length of the new exp_avg_sq");
}

/// Whether `torch.lerp` starts from the gradient, and by which float32 it multiplies the
/// difference: it starts from the nearer end, so that `beta1 = 0` gives the gradient itself.
fn lerp(beta1: f64) -> (bool, f32) {
    let weight = (1.0 - beta1) as f32;
    if weight < 0.5 { (false, weight) } else { (true, weight - 1.0) }
}

/// `base` to the power `exponent` by squaring: unlike `powf` the same bits on every platform.
fn power(base: f64, exponent: u64) -> f64 {
    let (mut result, mut square, mut left) = (1.0, base, exponent);
    while left > 0 {
        if left & 1 == 1 {
            result *= square;
        }
        square *= square;
        left >>= 1;
    }
    result
}
