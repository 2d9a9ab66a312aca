//! [`AutoLock`]: layers that hardly learn any more are locked.
//!
//! Invariants:
//! - decided from the gradient of a step and the weights before it, both in the record, so that an
//!   interrupted run decides alike;
//! - never fewer unlocked layers than the floor, and nothing is ever unlocked.

use std::collections::BTreeMap;

/// When a layer is locked: its gradient's RMS has been below `threshold` times its weights' RMS for
/// `steps` committed steps in a row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AutoLock {
    pub threshold: f64,
    pub steps: u64,
    /// Fewest layers that stay unlocked; at least one does.
    pub floor: usize,
}

/// What is known of a layer.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Layer {
    /// Steps below the threshold, in a row.
    quiet: u64,
    /// Square sum of the weights; `None` before the first update.
    weights: Option<f64>,
}

/// What is known of all layers.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Quiet {
    layers: Vec<Layer>,
}

const PREFIXES: [&str; 2] = ["quiet_steps_", "weight_squares_bits_"];

fn name(prefix: &str, layer: usize) -> String {
    format!("{prefix}{layer}")
}

impl Quiet {
    pub(crate) fn read(counters: &BTreeMap<String, u64>, layers: usize) -> Quiet {
        let number = |prefix, layer| counters.get(&name(prefix, layer)).copied();
        let layer = |layer| Layer {
            quiet: number(PREFIXES[0], layer).unwrap_or(0),
            weights: number(PREFIXES[1], layer).map(f64::from_bits),
        };
        Quiet { layers: (0..layers).map(layer).collect() }
    }

    pub(crate) fn write(&self, counters: &mut BTreeMap<String, u64>) {
        Quiet::forget(counters);
        for (at, layer) in self.layers.iter().enumerate() {
            counters.insert(name(PREFIXES[0], at), layer.quiet);
            if let Some(weights) = layer.weights {
                counters.insert(name(PREFIXES[1], at), weights.to_bits());
            }
        }
    }

    pub(crate) fn forget(counters: &mut BTreeMap<String, u64>) {
        counters.retain(|name, _| !PREFIXES.iter().any(|prefix| name.starts_with(prefix)));
    }

    /// Takes the gradients of a step in (square sums by layer); returns what is locked from the
    /// next step on.
    pub(crate) fn decide(&mut self, rule: AutoLock, sums: &[f64], locked: &[bool]) -> Vec<bool> {
        let mut next = locked.to_vec();
        let mut candidates = Vec::new();
        for (at, layer) in self.layers.iter_mut().enumerate().filter(|(at, _)| !locked[*at]) {
            let Some(weights) = layer.weights else { continue };
            // As many gradients as weights: the ratio of the sums is that of the mean squares.
            let below = sums[at] < rule.threshold * rule.threshold * weights;
            layer.quiet = if below { layer.quiet + 1 } else { 0 };
            if layer.quiet >= rule.steps.max(1) {
                candidates.push((sums[at] / weights, at));
            }
        }
        candidates.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        let unlocked = locked.iter().filter(|locked| !**locked).count();
        let room = unlocked.saturating_sub(rule.floor.max(1));
        candidates.iter().take(room).for_each(|&(_, at)| next[at] = true);
        next
    }

    /// Square sums of the weights that a step wrote; those of locked layers stay.
    pub(crate) fn weigh(&mut self, weights: &[f64], locked: &[bool]) {
        for ((layer, &sum), locked) in self.layers.iter_mut().zip(weights).zip(locked) {
            if !locked {
                layer.weights = Some(sum);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RULE: AutoLock = AutoLock { threshold: 0.5, steps: 2, floor: 1 };

    fn fresh(weights: &[f64]) -> Quiet {
        let mut quiet = Quiet::read(&BTreeMap::new(), weights.len());
        quiet.weigh(weights, &vec![false; weights.len()]);
        quiet
    }

    #[test]
    fn a_layer_is_locked_after_enough_quiet_steps_in_a_row() {
        let mut quiet = fresh(&[4.0, 4.0]);
        let none = [false; 2];
        // 0.5 squared times 4: the bound is 1, and not below it is not quiet.
        for (sums, want) in [
            ([0.9, 1.0], [false, false]),
            ([1.0, 9.0], [false, false]),
            ([0.9, 9.0], [false, false]),
            ([0.9, 9.0], [true, false]),
        ] {
            assert_eq!(quiet.decide(RULE, &sums, &none), want, "{sums:?}");
        }
    }

    #[test]
    fn nothing_is_decided_before_weights_are_known() {
        let mut quiet = Quiet::read(&BTreeMap::new(), 2);
        for _ in 0..5 {
            assert_eq!(quiet.decide(RULE, &[0.0; 2], &[false; 2]), [false; 2]);
        }
    }

    #[test]
    fn the_lowest_ratios_go_first_down_to_the_floor_and_nothing_is_unlocked() {
        let weights = [1.0, 1.0, 2.0, 1.0];
        let sums = [0.05, 0.1, 0.08, 0.2];
        for (floor, want) in [
            (0, [true, true, true, false]),
            (1, [true, true, true, false]),
            (2, [true, false, true, false]),
            (3, [false, false, true, false]),
            (4, [false; 4]),
            (9, [false; 4]),
        ] {
            let mut quiet = fresh(&weights);
            let rule = AutoLock { floor, steps: 1, ..RULE };
            assert_eq!(quiet.decide(rule, &sums, &[false; 4]), want, "{floor}");
        }
        let mut quiet = fresh(&weights);
        let loud = [9.0; 4];
        assert_eq!(
            quiet.decide(RULE, &loud, &[true, false, false, true])[..],
            [true, false, false, true]
        );
    }

    #[test]
    fn counts_and_weights_survive_in_counters_bit_for_bit() {
        let mut counters = BTreeMap::from([("other".to_owned(), 7)]);
        let mut quiet = fresh(&[0.1, 1.0 / 3.0]);
        quiet.decide(RULE, &[0.0, 5.0], &[false; 2]);
        quiet.write(&mut counters);
        assert_eq!(Quiet::read(&counters, 2), quiet);
        Quiet::forget(&mut counters);
        assert_eq!(counters, BTreeMap::from([("other".to_owned(), 7)]));
    }
}
