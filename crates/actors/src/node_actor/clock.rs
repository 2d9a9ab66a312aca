//! [`StallClock`]: what the pipeline waited for; [`DeviceClock`]: what the device worked on.

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

/// Times a device that does one thing after another, by when it finishes them.
#[derive(Debug)]
pub(super) struct DeviceClock {
    since: Instant,
}

impl DeviceClock {
    pub(super) fn new(now: Instant) -> DeviceClock {
        DeviceClock { since: now }
    }

    /// Work reaches the device; it matters when if the device was idle.
    pub(super) fn enqueued(&mut self, now: Instant, idle: bool) {
        if idle {
            self.since = now;
        }
    }

    /// Seconds that the work which is finished now has taken.
    pub(super) fn finished(&mut self, now: Instant) -> f64 {
        let seconds = now.duration_since(self.since).as_secs_f64();
        self.since = now;
        seconds
    }
}
