//! Run-time choice of the instruction set: one source per kernel, compiled once per set.
//!
//! Invariants:
//! - a kernel is plain Rust in an `#[inline(always)]` body; its portable build is the twin that the
//!   others are tested against;
//! - Rust neither contracts nor reorders float arithmetic, so all builds of a kernel give equal
//!   bits (payloads of NaNs excepted);
//! - a wider build is entered only after its instruction set was detected.
#![allow(unsafe_code)]

/// A loop over slices that is compiled once per instruction set.
pub(crate) trait Kernel {
    type Output;

    /// Must be `#[inline(always)]`, as must what it calls in its loops: code that stays a function
    /// of its own is compiled for the portable set.
    fn run(self) -> Self::Output;
}

/// Runs `kernel` as compiled for the widest set of this processor. Detection is cached by the
/// standard library.
#[cfg(target_arch = "x86_64")]
pub(crate) fn run<K: Kernel>(kernel: K) -> K::Output {
    if is_x86_feature_detected!("avx512f") {
        // SAFETY: `avx512f` was detected on the line above.
        unsafe { run_avx512(kernel) }
    } else if is_x86_feature_detected!("avx2") {
        // SAFETY: `avx2` was detected on the line above.
        unsafe { run_avx2(kernel) }
    } else {
        kernel.run()
    }
}

/// Runs `kernel`.
#[cfg(not(target_arch = "x86_64"))]
pub(crate) fn run<K: Kernel>(kernel: K) -> K::Output {
    kernel.run()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn run_avx2<K: Kernel>(kernel: K) -> K::Output {
    kernel.run()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn run_avx512<K: Kernel>(kernel: K) -> K::Output {
    kernel.run()
}

/// Elements that a reduction adds side by side: part of the result's definition.
pub(crate) const LANES: usize = 32;

/// e^x to about 2 units in the last place; 0 below -87.33 (no subnormal results), infinity above
/// 88.37 (float32 ends at 88.72), NaN for NaN.
///
/// Range reduction and polynomial: Cephes `expf` (Moshier).
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    // Adding 1.5 * 2^23 rounds to a whole number, which is then in the low bits.
    const ROUND: f32 = 12_582_912.0;
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (x - n * (355.0 / 512.0)) + n * 2.121_944_4e-4;
    let mut p = 1.987_569_2e-4;
    p = p * r + 1.398_2e-3;
    p = p * r + 8.333_452e-3;
    p = p * r + 4.166_579_6e-2;
    p = p * r + 1.666_666_5e-1;
    p = p * r + 0.5;
    let value = p * (r * r) + r + 1.0;
    let scale = f32::from_bits((shifted.to_bits() << 23).wrapping_add(127 << 23));
    let value = if x < -87.33 { 0.0 } else { value * scale };
    if x > 88.37 { f32::INFINITY } else { value }
}

/// 1 / (1 + e^-x)
#[inline(always)]
pub(crate) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// Sum of `term` over the elements of equally long slices: [`LANES`] running sums side by side,
/// then pairwise over the lanes.
#[inline(always)]
pub(crate) fn sum<const N: usize>(x: [&[f32]; N], term: impl Fn([f32; N]) -> f32) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let parts = x.map(|x| x.as_chunks::<LANES>());
    for chunk in 0..parts[0].0.len() {
        let chunks = parts.map(|(chunks, _)| &chunks[chunk]);
        for (i, lane) in lanes.iter_mut().enumerate() {
            *lane += term(chunks.map(|c| c[i]));
        }
    }
    for i in 0..parts[0].1.len() {
        lanes[i] += term(parts.map(|(_, tail)| tail[i]));
    }
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
        width /= 2;
    }
    lanes[0]
}

/// Largest element; NaN elements are passed over, the caller's sum carries them.
#[inline(always)]
pub(crate) fn max(x: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let mut chunks = x.chunks_exact(LANES);
    for chunk in &mut chunks {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane = if x > *lane { x } else { *lane };
        }
    }
    let tail = chunks.remainder().iter();
    lanes.iter().chain(tail).fold(f32::NEG_INFINITY, |a, &b| if b > a { b } else { a })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    struct Exponentials<'a>(&'a mut [f32]);

    impl Kernel for Exponentials<'_> {
        type Output = (f32, f32);

        #[inline(always)]
        fn run(self) -> (f32, f32) {
            let x = self.0;
            x.iter_mut().for_each(|x| *x = exp(*x));
            (sum([x], |[x]| x), max(x))
        }
    }

    #[test]
    fn exp_is_within_two_units_of_the_last_place() {
        let mut x = -87.3f32;
        while x < 88.36 {
            let want = f64::from(x).exp();
            let unit = f64::from(f32::EPSILON) * 2f64.powi(want.log2().floor() as i32);
            let error = (f64::from(exp(x)) - want).abs() / unit;
            assert!(error <= 2.0, "exp({x}) is {error} units off");
            x += 0.000_731;
        }
    }

    #[test]
    fn exp_has_limits_and_carries_nan() {
        assert_eq!((exp(0.0), exp(f32::NEG_INFINITY), exp(-200.0)), (1.0, 0.0, 0.0));
        assert_eq!((exp(f32::INFINITY), exp(500.0)), (f32::INFINITY, f32::INFINITY));
        assert!(exp(f32::NAN).is_nan());
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]

        #[test]
        fn every_build_gives_the_portable_bits(x in prop::collection::vec(-100f32..100.0, 0..200)) {
            let (mut wide, mut portable) = (x.clone(), x);
            let sums = (run(Exponentials(&mut wide)), Exponentials(&mut portable).run());
            let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            prop_assert_eq!(bits(&wide), bits(&portable));
            prop_assert_eq!(sums.0, sums.1);
        }
    }
}
