//! What the rows of a step come to, whoever computes it and however often.

use super::*;

/// Faults that lie in the data: they come again with every attempt.
#[derive(Clone, Debug, Default)]
pub(crate) struct Data {
    pub(crate) seed: u64,
    /// Chance in a thousand that a step's loss, one layer's gradient, or one layer's update is not
    /// finite, and that its loss is a spike.
    pub(crate) faults_per_thousand: u64,
    /// From which step on each layer hardly has a gradient; 0: never.
    pub(crate) quiet_from: Vec<u64>,
    /// Some gradients are too long.
    pub(crate) clips: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    Loss,
    Gradient(usize),
    Update(usize),
    Spike,
}

impl Data {
    fn fault(&self, step: Step) -> Option<Fault> {
        let draw = mix(self.seed, step.0);
        if draw % 1000 >= self.faults_per_thousand {
            return None;
        }
        let layer = (draw >> 20) as usize % self.quiet_from.len().max(1);
        Some(match (draw >> 10) % 4 {
            0 => Fault::Loss,
            1 => Fault::Gradient(layer),
            2 => Fault::Update(layer),
            _ => Fault::Spike,
        })
    }

    /// Mean over the targets.
    pub(crate) fn loss(&self, step: Step) -> f64 {
        let noise = (mix(self.seed, step.0) % 100) as f64 / 1000.0;
        match self.fault(step) {
            Some(Fault::Loss) => f64::NAN,
            Some(Fault::Spike) => 50.0 + noise,
            _ => 3.0 + noise,
        }
    }

    /// Whether the step's gradient has to be clipped.
    pub(crate) fn clipped(&self, step: Step) -> bool {
        self.clips && mix(self.seed ^ 0xc11b, step.0).is_multiple_of(2)
    }

    /// Square sum of a layer's gradient.
    pub(crate) fn gradient(&self, step: Step, layer: LayerId) -> f64 {
        if self.fault(step) == Some(Fault::Gradient(layer.index())) {
            return f64::INFINITY;
        }
        let quiet = self.quiet_from.get(layer.index()).is_some_and(|&q| q > 0 && step.0 >= q);
        let size = 1.0 + (mix(step.0, u64::from(layer.0)) % 100) as f64 / 100.0;
        if quiet { size * 1e-4 } else { size }
    }

    pub(crate) fn update_is_finite(&self, step: Step, layer: LayerId) -> bool {
        let fault = self.fault(step);
        let own = [Fault::Gradient(layer.index()), Fault::Update(layer.index())];
        !own.iter().any(|own| fault == Some(*own))
    }
}
