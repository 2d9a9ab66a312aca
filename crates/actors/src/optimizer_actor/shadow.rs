//! [`Shadow`]: a few parameters of each layer, trained beside the rounded ones in float32, to tell
//! how far rounding leads away.
//!
//! Invariants:
//! - it changes nothing: it only reads state and gradients;
//! - a step that is tried again advances it once: an update starts from the version before it, or
//!   anew from what the store holds.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use model::{CHUNK_ELEMENTS, LayerId, StateLayout};

/// Parameters of each layer that have a shadow; 32 KiB a layer, beside the budget.
const SAMPLE: usize = 1024;

/// What the store's state would be without rounding.
#[derive(Debug, Default)]
pub struct Shadow {
    layers: Mutex<BTreeMap<LayerId, Versions>>,
}

/// After the last two updates, since the last one may be tried again.
#[derive(Debug, Default)]
struct Versions {
    last: Option<Version>,
    before: Option<Version>,
}

/// The sample after a layer's `t`-th update.
#[derive(Clone, Debug)]
pub(super) struct Version {
    t: u64,
    /// Weights when the shadow began.
    origin: Vec<f32>,
    /// W, M, V
    pub(super) state: [Vec<f32>; 3],
    drift: f64,
}

/// The parameters of a layer of so many that have a shadow: in the middle, where its matrices are.
pub(super) fn sample(elements: usize) -> Range<usize> {
    let chunk = elements / CHUNK_ELEMENTS / 2;
    let start = chunk * CHUNK_ELEMENTS;
    start..(start + SAMPLE).min(elements)
}

impl Shadow {
    /// Whether a layout rounds anything.
    pub(super) fn is_wanted(layout: StateLayout) -> bool {
        layout.has_codes()
    }

    /// The sample before the layer's `t`-th update, `stored` being what the store holds of it.
    pub(super) fn before(&self, layer: LayerId, t: u64, stored: [&[f32]; 3]) -> Version {
        let layers = self.layers();
        let versions = layers.get(&layer).into_iter();
        let mut known = versions.flat_map(|v| [&v.last, &v.before]).flatten();
        match known.find(|version| version.t + 1 == t) {
            Some(version) => version.clone(),
            None => Version {
                t: t - 1,
                origin: stored[0].to_vec(),
                state: stored.map(<[f32]>::to_vec),
                drift: 0.0,
            },
        }
    }

    /// Keeps the updated sample; `rounded`: the weights that the store has got instead.
    pub(super) fn after(&self, layer: LayerId, mut version: Version, rounded: &[f32]) {
        version.t += 1;
        version.drift = drift(&version.origin, &version.state[0], rounded);
        let mut layers = self.layers();
        let versions = layers.entry(layer).or_default();
        let again = versions.last.as_ref().is_some_and(|last| last.t >= version.t);
        let replaced = versions.last.replace(version);
        if !again {
            versions.before = replaced;
        }
    }

    /// How far the layer's rounded weights are from the shadow's, as a share of the way that these
    /// have gone; `None` where nothing is rounded.
    pub(super) fn drift(&self, layer: LayerId) -> Option<f64> {
        Some(self.layers().get(&layer)?.last.as_ref()?.drift)
    }

    fn layers(&self) -> MutexGuard<'_, BTreeMap<LayerId, Versions>> {
        // A version is inserted whole.
        self.layers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn drift(origin: &[f32], exact: &[f32], rounded: &[f32]) -> f64 {
    let distance = |from: &[f32]| -> f64 {
        let squares = from.iter().zip(exact).map(|(a, b)| (f64::from(*a) - f64::from(*b)).powi(2));
        squares.sum::<f64>().sqrt()
    };
    let (off, way) = (distance(rounded), distance(origin));
    if off == 0.0 { 0.0 } else { off / way }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAYER: LayerId = LayerId(3);

    fn update(shadow: &Shadow, t: u64, stored: f32, rounded: f32) -> f64 {
        let stored = [stored; 2];
        let mut version = shadow.before(LAYER, t, [&stored, &stored, &stored]);
        version.state[0].iter_mut().for_each(|weight| *weight += 1.0);
        shadow.after(LAYER, version, &[rounded; 2]);
        shadow.drift(LAYER).unwrap()
    }

    #[test]
    fn drift_is_the_distance_as_a_share_of_the_way() {
        let shadow = Shadow::default();
        assert_eq!(shadow.drift(LAYER), None);
        // From 5 the shadow goes on to 6 and 7; the store is at 6.5, then at 8.
        assert_eq!(update(&shadow, 9, 5.0, 6.5), 0.5);
        assert_eq!(update(&shadow, 10, 6.5, 8.0), 0.5);
    }

    #[test]
    fn an_update_that_is_tried_again_starts_from_the_same_version() {
        let shadow = Shadow::default();
        update(&shadow, 1, 5.0, 6.0);
        let once = update(&shadow, 2, 6.0, 7.5);
        assert_eq!(update(&shadow, 2, 6.0, 7.5), once);
        assert_eq!(update(&shadow, 2, 6.0, 7.5), once);
        // And one that nothing is known of from what the store holds.
        assert_eq!(update(&shadow, 40, 100.0, 101.0), 0.0);
    }

    #[test]
    fn samples_lie_in_one_piece_of_one_chunk() {
        for elements in [100, 1024, CHUNK_ELEMENTS, 3 * CHUNK_ELEMENTS + 5, 40 * CHUNK_ELEMENTS] {
            let sample = sample(elements);
            assert!(!sample.is_empty() && sample.end <= elements);
            assert_eq!(sample.start / CHUNK_ELEMENTS, (sample.end - 1) / CHUNK_ELEMENTS);
        }
    }
}
