//! The learning rate of a step: linear warmup, then one of four shapes.

use std::f64::consts::PI;
use std::fmt;
use std::str::FromStr;

use crate::error::{HyperparameterError, at_least_zero, ratio};

/// [`Schedule::Wsd`] decays over the last `1 / WSD_DECAY_DIVISOR` of all steps.
pub const WSD_DECAY_DIVISOR: u64 = 5;

/// What follows the warmup.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Schedule {
    /// The peak, forever.
    Constant,
    /// Half a cosine down to the minimum (Loshchilov and Hutter, arXiv:1608.03983, one cycle).
    Cosine,
    /// A straight line down to the minimum.
    Linear,
    /// Warmup, stable, decay: the peak, then a straight line down to the minimum over the last
    /// fifth of all steps, rounded up (Hu et al., arXiv:2404.06395; the fifth is Hägele et al.'s,
    /// arXiv:2405.18392).
    Wsd,
}

/// A schedule with its numbers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LrSchedule {
    pub kind: Schedule,
    /// The highest learning rate.
    pub peak: f64,
    /// Steps of the linear warmup; step `s` of `w` has `peak * s / w`, so the last has the peak.
    pub warmup_steps: u64,
    /// Steps of the whole run, warmup included.
    pub total_steps: u64,
    /// The minimum as a part of the peak, reached at the last step. Constant ignores it.
    pub min_ratio: f64,
}

impl LrSchedule {
    /// Accepts a finite peak of at least 0 and a minimum between none and all of it.
    pub fn check(&self) -> Result<(), HyperparameterError> {
        at_least_zero("lr", self.peak)?;
        ratio("min-lr-ratio", self.min_ratio)
    }

    /// The learning rate of a step; the first is 1, and 0 counts as it. Steps past the last keep
    /// the last one's rate. A run that ends within its warmup has no decay: later steps keep the
    /// peak.
    pub fn at(&self, step: u64) -> f64 {
        let step = step.max(1);
        if step <= self.warmup_steps {
            return self.peak * (step as f64 / self.warmup_steps as f64);
        }
        let height = self.height(self.progress(step));
        // Both ends exactly, whatever the rounding in between.
        self.peak * height + self.peak * self.min_ratio * (1.0 - height)
    }

    /// How far decay has come at a step after the warmup: 0 before it, 1 at the last step.
    fn progress(&self, step: u64) -> f64 {
        let decay_steps = self.decay_steps();
        let decayed = step.saturating_sub(self.total_steps - decay_steps).min(decay_steps);
        if decay_steps == 0 { 0.0 } else { decayed as f64 / decay_steps as f64 }
    }

    fn decay_steps(&self) -> u64 {
        let after_warmup = self.total_steps.saturating_sub(self.warmup_steps);
        match self.kind {
            Schedule::Constant => 0,
            Schedule::Cosine | Schedule::Linear => after_warmup,
            Schedule::Wsd => self.total_steps.div_ceil(WSD_DECAY_DIVISOR).min(after_warmup),
        }
    }

    /// The part of the way from minimum to peak that is left.
    fn height(&self, progress: f64) -> f64 {
        match self.kind {
            Schedule::Cosine => 0.5 * (1.0 + (PI * progress).cos()),
            Schedule::Constant | Schedule::Linear | Schedule::Wsd => 1.0 - progress,
        }
    }
}

impl fmt::Display for Schedule {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Constant => "constant",
            Self::Cosine => "cosine",
            Self::Linear => "linear",
            Self::Wsd => "wsd",
        })
    }
}

impl FromStr for Schedule {
    type Err = HyperparameterError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "constant" => Ok(Self::Constant),
            "cosine" => Ok(Self::Cosine),
            "linear" => Ok(Self::Linear),
            "wsd" => Ok(Self::Wsd),
            _ => Err(HyperparameterError::UnknownSchedule { given: text.to_owned() }),
        }
    }
}
