//! [`Guard`]: what keeps a step that went wrong away from the weights.
//!
//! Invariants:
//! - a step is judged by its own numbers and by those of the committed steps before it, so that an
//!   interrupted run judges alike;
//! - the losses of skipped steps enter no average.

use std::collections::BTreeMap;

/// What happens to a step that a guard refuses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Trip {
    /// The run ends before it.
    #[default]
    Stop,
    /// Its rows are passed over.
    Skip,
}

/// How steps are guarded. Numbers that are not finite are always refused.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Guard {
    pub on_trip: Trip,
    /// A loss is refused that exceeds the average by this many average deviations.
    pub spike: Option<f64>,
}

/// Why a step was refused.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Reason {
    /// Loss (mean over targets) or norm of the gradient.
    NotFinite {
        loss: f64,
        grad_norm: f64,
    },
    Spike {
        loss: f64,
        bound: f64,
    },
    /// A layer's new weights or moments are not finite.
    Update,
}

/// Losses before spikes are looked for.
const SEEN_MIN: u64 = 20;
/// Plain averages of up to this many losses, exponential ones from there on: a decay of 0.98.
const AVERAGED: u64 = 50;

/// Skipped steps in a row after which the next refused one ends the run.
pub const SKIPS_IN_A_ROW: u64 = 5;

const SEEN: &str = "losses_seen";
const MEAN: &str = "loss_mean_bits";
const DEVIATION: &str = "loss_deviation_bits";

/// Averages over the losses of committed steps.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Losses {
    seen: u64,
    mean: f64,
    /// Of a loss from the average before it.
    deviation: f64,
}

impl Losses {
    pub(crate) fn read(counters: &BTreeMap<String, u64>) -> Losses {
        let number = |name: &str| counters.get(name).copied().unwrap_or(0);
        Losses {
            seen: number(SEEN),
            mean: f64::from_bits(number(MEAN)),
            deviation: f64::from_bits(number(DEVIATION)),
        }
    }

    pub(crate) fn write(&self, counters: &mut BTreeMap<String, u64>) {
        counters.insert(SEEN.into(), self.seen);
        counters.insert(MEAN.into(), self.mean.to_bits());
        counters.insert(DEVIATION.into(), self.deviation.to_bits());
    }

    pub(crate) fn forget(counters: &mut BTreeMap<String, u64>) {
        counters.retain(|name, _| ![SEEN, MEAN, DEVIATION].contains(&name.as_str()));
    }

    /// The averages after one more committed step.
    pub(crate) fn with(mut self, loss: f64) -> Losses {
        let weight = |count: u64| 1.0 / count.clamp(1, AVERAGED) as f64;
        if self.seen > 0 {
            let deviation = (loss - self.mean).abs();
            self.deviation += (deviation - self.deviation) * weight(self.seen);
        }
        self.seen += 1;
        self.mean += (loss - self.mean) * weight(self.seen);
        self
    }

    /// The largest loss that is no spike at `deviations`.
    fn bound(&self, deviations: f64) -> f64 {
        let looks = self.seen >= SEEN_MIN;
        if looks { self.mean + deviations * self.deviation } else { f64::INFINITY }
    }
}

/// Why a swept step must not be applied, if so.
pub(crate) fn judge(guard: Guard, losses: &Losses, loss: f64, sums: &[f64]) -> Option<Reason> {
    let sum: f64 = sums.iter().sum();
    if !(loss.is_finite() && sum.is_finite()) {
        return Some(Reason::NotFinite { loss, grad_norm: sum.sqrt() });
    }
    let bound = losses.bound(guard.spike?);
    (loss > bound).then_some(Reason::Spike { loss, bound })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPIKES: Guard = Guard { on_trip: Trip::Skip, spike: Some(4.0) };

    fn seen(losses: impl IntoIterator<Item = f64>) -> Losses {
        losses.into_iter().fold(Losses::default(), Losses::with)
    }

    fn wavy(count: usize) -> impl Iterator<Item = f64> {
        (0..count).map(|i| 3.0 + if i % 2 == 0 { 0.1 } else { -0.1 })
    }

    #[test]
    fn what_is_not_finite_is_refused_whatever_is_asked_for() {
        for (loss, sums) in
            [(f64::NAN, [1.0, 1.0]), (f64::INFINITY, [1.0, 1.0]), (1.0, [1.0, f64::NAN])]
        {
            let reason = judge(Guard::default(), &Losses::default(), loss, &sums);
            assert!(matches!(reason, Some(Reason::NotFinite { .. })));
        }
        assert_eq!(judge(Guard::default(), &Losses::default(), 1e30, &[1e300]), None);
    }

    #[test]
    fn a_spike_is_far_above_the_average_and_only_after_twenty_steps() {
        assert_eq!(judge(SPIKES, &seen(wavy(19)), 100.0, &[]), None);
        let losses = seen(wavy(20));
        assert_eq!(judge(SPIKES, &losses, 3.3, &[]), None);
        assert!(matches!(judge(SPIKES, &losses, 4.2, &[]), Some(Reason::Spike { .. })));
        assert_eq!(judge(SPIKES, &losses, -100.0, &[]), None);
        assert_eq!(judge(Guard { spike: None, ..SPIKES }, &losses, 4.2, &[]), None);
    }

    #[test]
    fn old_losses_fade() {
        let losses = seen(wavy(500).map(|x| x + 7.0).chain(wavy(500)));
        assert!((losses.mean - 3.0).abs() < 0.1, "{losses:?}");
        assert!((losses.deviation - 0.1).abs() < 0.1, "{losses:?}");
    }

    #[test]
    fn averages_survive_in_counters_bit_for_bit() {
        let mut counters = BTreeMap::from([("other".to_owned(), 7)]);
        let losses = seen(wavy(33).map(|x| x / 3.0));
        losses.write(&mut counters);
        assert_eq!(Losses::read(&counters), losses);
        Losses::forget(&mut counters);
        assert_eq!(counters, BTreeMap::from([("other".to_owned(), 7)]));
    }
}
