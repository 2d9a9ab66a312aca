//! [`StallClock`]: what the pipeline waited for; [`DeviceClock`]: what the device worked on.

use std::time::Instant;

use model::Attempt;

use crate::StallSeconds;

/// What is in flight.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Load {
    pub(super) reads: usize,
    pub(super) computing: usize,
    pub(super) optimizing: usize,
    pub(super) syncing: usize,
    /// What is prepared and not known to be durable.
    pub(super) recording: Option<Attempt>,
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
        } else if load.syncing > 0 || load.recording.is_some() {
            self.stall.storage += seconds;
            self.stall.commit += seconds;
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// What a second is booked to while `load` is in flight: storage, commit, compute, optimizer.
    fn booked(load: Load) -> [f64; 4] {
        let start = Instant::now();
        let mut clock = StallClock::new(start);
        clock.tick(start + Duration::from_secs(1), &load);
        let StallSeconds { storage, commit, compute, optimizer, .. } = clock.take();
        [storage, commit, compute, optimizer]
    }

    #[test]
    fn a_device_waits_for_a_commit_only_when_nothing_else_is_in_flight() {
        let recording = Load { recording: Some(Attempt(1)), ..Load::default() };
        assert_eq!(booked(Load::default()), [0.0; 4]);
        assert_eq!(booked(recording), [1.0, 1.0, 0.0, 0.0]);
        assert_eq!(booked(Load { syncing: 1, ..Load::default() }), [1.0, 1.0, 0.0, 0.0]);
        assert_eq!(booked(Load { reads: 1, ..recording }), [1.0, 0.0, 0.0, 0.0]);
        assert_eq!(booked(Load { optimizing: 1, ..recording }), [0.0, 0.0, 0.0, 1.0]);
        assert_eq!(booked(Load { computing: 1, ..recording }), [0.0, 0.0, 1.0, 0.0]);
        assert_eq!(booked(Load { computing: 1, reads: 1, ..recording }), [0.0; 4]);
    }
}
