//! The head's loops over one vocabulary tile and its logits `[T, Vtile]`.
//!
//! Formula: softmax with a running maximum (Milakov and Gimelshein 2018).

use std::ops::Range;

use rayon::prelude::*;

use crate::NO_TARGET;
use crate::simd::{self, Kernel};

/// Per token: running maximum, running sum of exponentials, logit of the label.
pub(super) const STATS: usize = 3;

/// Statistics of tokens that have seen no tile.
pub(super) fn clear_stats(stats: &mut [f32]) {
    stats.chunks_exact_mut(STATS).for_each(|s| s.copy_from_slice(&[f32::NEG_INFINITY, 0.0, 0.0]));
}

/// Folds a tile's logits into `stats [T, 3]`.
pub(super) fn score(logits: &[f32], labels: &[u32], tile: &Range<usize>, stats: &mut [f32]) {
    let rows = stats.par_chunks_mut(STATS).zip(logits.par_chunks(tile.len())).zip(labels);
    rows.for_each(|((stats, logits), &label)| {
        if let Some(column) = column(label, tile) {
            stats[2] = logits[column];
        }
        simd::run(Fold { logits, stats });
    });
}

/// Sum over labelled tokens of `logsumexp - logit of the label`, in nats.
pub(super) fn loss(stats: &[f32], labels: &[u32]) -> f64 {
    let labelled = stats.chunks_exact(STATS).zip(labels).filter(|(_, label)| **label != NO_TARGET);
    labelled.map(|(s, _)| f64::from(s[1]).ln() + f64::from(s[0]) - f64::from(s[2])).sum()
}

/// Turns a tile's logits into the gradient of `scale` times the loss by them.
pub(super) fn gradient(
    logits: &mut [f32],
    labels: &[u32],
    tile: &Range<usize>,
    stats: &[f32],
    scale: f32,
) {
    let rows = logits.par_chunks_mut(tile.len()).zip(stats.par_chunks(STATS)).zip(labels);
    rows.for_each(|((logits, stats), &label)| {
        if label == NO_TARGET {
            return logits.fill(0.0);
        }
        simd::run(Probabilities { top: stats[0], factor: scale / stats[1], logits });
        if let Some(column) = column(label, tile) {
            logits[column] -= scale;
        }
    });
}

fn column(label: u32, tile: &Range<usize>) -> Option<usize> {
    let label = label as usize;
    tile.contains(&label).then(|| label - tile.start)
}

struct Fold<'a> {
    logits: &'a [f32],
    stats: &'a mut [f32],
}

impl Kernel for Fold<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let here = simd::max(self.logits);
        let before = self.stats[0];
        let top = if here > before { here } else { before };
        let total = simd::sum([self.logits], |[l]| simd::exp(l - top));
        self.stats[0] = top;
        // The first tile's sum stands alone: its maximum may be minus infinity only if all are.
        let earlier =
            if self.stats[1] == 0.0 { 0.0 } else { self.stats[1] * simd::exp(before - top) };
        self.stats[1] = earlier + total;
    }
}

struct Probabilities<'a> {
    top: f32,
    factor: f32,
    logits: &'a mut [f32],
}

impl Kernel for Probabilities<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for l in self.logits {
            *l = simd::exp(*l - self.top) * self.factor;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_of_any_width_give_the_plain_loss_and_gradient() {
        let vocab = 11;
        let logits: Vec<f32> = (0..2 * vocab).map(|i| ((i * 7) % 13) as f32 - 4.0).collect();
        let labels = [9, NO_TARGET];
        let total: f64 = logits[..vocab].iter().map(|l| f64::from(*l).exp()).sum();
        let want = total.ln() - f64::from(logits[9]);
        for width in [1, 3, 11] {
            let mut stats = [0.0; 2 * STATS];
            clear_stats(&mut stats);
            let tiles: Vec<_> =
                (0..vocab).step_by(width).map(|s| s..(s + width).min(vocab)).collect();
            let part = |tile: &Range<usize>| -> Vec<f32> {
                logits.chunks(vocab).flat_map(|row| row[tile.clone()].to_vec()).collect()
            };
            tiles.iter().for_each(|t| score(&part(t), &labels, t, &mut stats));
            assert!((loss(&stats, &labels) - want).abs() < 1e-6);
            for tile in &tiles {
                let mut g = part(tile);
                gradient(&mut g, &labels, tile, &stats, 2.0);
                for (v, g) in tile.clone().zip(&g) {
                    let p = f64::from(logits[v]).exp() / total;
                    let want = 2.0 * (p - f64::from(u8::from(v == 9)));
                    assert!((f64::from(*g) - want).abs() < 1e-6);
                }
                assert!(g[tile.len()..].iter().all(|g| *g == 0.0));
            }
        }
    }
}
