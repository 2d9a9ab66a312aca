//! [`StallClock`]: what the pipeline waited for, from one message to the next.

use std::time::Instant;

use crate::StallSeconds;

/// What is in flight.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Load {
    pub(super) reads: usize,
    pub(super) computing: usize,
    pub(super) optimizing: usize,
    pub(super) syncing: usize,
}

#[derive(Debug)]
pub(super) struct StallClock {
    since: Instant,
    stall: StallSeconds,
}

impl StallClock {
    pub(super) fn new(now: Instant) -> StallClock {
        StallClock { since: now, stall: StallSeconds::default() }
    }

    /// Books the time since the last call to what was awaited during it.
    pub(super) fn tick(&mut self, now: Instant, load: &Load) {
        let seconds = now.duration_since(self.since).as_secs_f64();
        self.since = now;
        let others = load.reads + load.optimizing + load.syncing;
        if load.computing > 0 {
            if others == 0 {
                self.stall.compute += seconds;
            }
        } else if load.reads > 0 {
            self.stall.storage += seconds;
        } else if load.optimizing > 0 {
            self.stall.optimizer += seconds;
        } else if load.syncing > 0 {
            self.stall.storage += seconds;
        }
    }

    /// What was booked since the last call.
    pub(super) fn take(&mut self) -> StallSeconds {
        std::mem::take(&mut self.stall)
    }
}
