//! [`Updates`]: when the optimizer runs, as the run decides it attempt by attempt.
//!
//! No choice changes bits: what is decided here need not survive.

use model::Wait;

use crate::Policy;

/// Steps that are remembered, and the fewest that say anything.
const REMEMBERED: u32 = 16;
const FEWEST: u32 = 3;

/// What is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Updates {
    Always(Policy),
    /// Fused as if nothing had to be clipped. If the norm says otherwise, nothing has been
    /// overwritten: the attempt is dropped and made again with the factor known.
    Speculative,
    /// Deferred, but speculative once at most a third of the recent steps had to be clipped.
    Auto,
}

impl From<Policy> for Updates {
    fn from(policy: Policy) -> Updates {
        Updates::Always(policy)
    }
}

impl Updates {
    /// What gradients may have to wait for; `fused`: what they wait for where the optimizer runs
    /// inside the sweep.
    pub fn wait(self, fused: Wait) -> Wait {
        match self {
            Updates::Always(Policy::Deferred) | Updates::Auto => Wait::Model,
            Updates::Always(Policy::Fused) | Updates::Speculative => fused,
        }
    }

    /// What it comes to in a run that commits every so many steps: speculation that fails costs all of
    /// those, so nobody chooses it unasked.
    pub fn with_commits_every(self, steps: u64) -> Updates {
        match self {
            Updates::Auto if steps > 1 => Policy::Deferred.into(),
            other => other,
        }
    }

    /// What the next attempt does.
    pub(crate) fn policy(self, recent: Recent) -> Policy {
        match self {
            Updates::Always(policy) => policy,
            Updates::Auto if !recent.are_seldom_clipped() => Policy::Deferred,
            Updates::Speculative | Updates::Auto => Policy::Fused,
        }
    }
}

/// Which of the last steps had to be clipped: a bit each, below a bit that marks their number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Recent(u32);

impl Default for Recent {
    fn default() -> Recent {
        Recent(1)
    }
}

impl Recent {
    pub(crate) fn with(self, clipped: bool) -> Recent {
        let all = self.0 << 1 | u32::from(clipped);
        let full = all >> (REMEMBERED + 1) > 0;
        let kept = all & ((1 << REMEMBERED) - 1);
        Recent(if full { kept | 1 << REMEMBERED } else { all })
    }

    fn are_seldom_clipped(self) -> bool {
        let steps = self.0.ilog2();
        let clipped = self.0.count_ones() - 1;
        steps >= FEWEST && clipped * 3 <= steps
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(steps: &str) -> Policy {
        let recent = steps.chars().fold(Recent::default(), |recent, c| recent.with(c == 'x'));
        Updates::Auto.policy(recent)
    }

    #[test]
    fn auto_speculates_once_at_most_a_third_is_clipped() {
        for steps in ["...", "x..", "xx....", "x.x....", "................"] {
            assert_eq!(after(steps), Policy::Fused, "{steps}");
        }
        for steps in [
            "",
            ".",
            "..",
            "x.",
            "xxx",
            ".xx",
            "xx.",
            "xx...",
            "xxxxxx..........",
            "xxxxxxxxxxxxxxxxxxxxx",
        ] {
            assert_eq!(after(steps), Policy::Deferred, "{steps}");
        }
        // Only the last sixteen count.
        assert_eq!(after("xxxxxxxxxx.............xxx"), Policy::Fused);
        assert_eq!(after("xxxxxxx........xxx.."), Policy::Deferred);
    }
}
