//! GFLOP/s of faer's sequential float32 product of 2048^3, on two threads at once.
//!
//! A yardstick for `cargo bench -p compute --bench layer`.

use std::time::Instant;

use faer::linalg::matmul::matmul;
use faer::{Accum, Mat, Par};

const N: usize = 2048;
const THREADS: usize = 2;
const ROUNDS: usize = 7;

fn main() {
    let best = (0..ROUNDS).map(|_| round()).fold(0.0, f64::max);
    println!("{best:.0} GFLOP/s, best of {ROUNDS}");
}

fn round() -> f64 {
    let square = Mat::<f32>::ones;
    let operands = [(); THREADS].map(|()| (square(N, N), square(N, N), square(N, N)));
    let start = Instant::now();
    std::thread::scope(|scope| {
        for (mut c, a, b) in operands {
            scope.spawn(move || {
                matmul(c.as_mut(), Accum::Replace, a.as_ref(), b.as_ref(), 1.0_f32, Par::Seq);
            });
        }
    });
    THREADS as f64 * 2.0 * (N as f64).powi(3) / start.elapsed().as_secs_f64() / 1e9
}
