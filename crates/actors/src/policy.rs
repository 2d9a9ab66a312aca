//! What is done about a failure: the only place that decides.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use compute::DeviceError;
use store::StoreError;

use crate::Failure;

/// What a failure leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Drop the attempt and run the step again from the disk.
    Retry,
    /// The same, with a new incarnation of the actor that failed: what it owns is of no use.
    RestartActor,
    /// End the run: trying again is pointless or unsafe.
    StopNode,
}

/// Restarts of one actor within [`WINDOW`] that are too many.
const RESTARTS: usize = 5;
const WINDOW: Duration = Duration::from_secs(60);
const BACK_OFF_MIN: Duration = Duration::from_millis(20);

/// The verdict on a failed request.
pub(crate) fn judge(failure: &Failure) -> Verdict {
    match failure {
        Failure::Lost => Verdict::Retry,
        Failure::Device(DeviceError::Token { .. } | DeviceError::Shape { .. }) => Verdict::StopNode,
        Failure::Device(DeviceError::Gone | DeviceError::Panicked(_)) => Verdict::RestartActor,
        Failure::Device(_) | Failure::Memory(_) => Verdict::Retry,
        Failure::Data(_)
        | Failure::Logits
        | Failure::AllLocked
        | Failure::Dead { .. }
        | Failure::Stuck { .. }
        | Failure::NotFinite { .. }
        | Failure::Spike { .. }
        | Failure::Update { .. } => Verdict::StopNode,
        Failure::Store(StoreError::Io { .. } | StoreError::Memory(_)) => Verdict::Retry,
        Failure::Store(_) => Verdict::StopNode,
    }
}

/// Restart times of one actor in a sliding window.
#[derive(Debug, Default)]
pub(crate) struct RestartWindow {
    recent: VecDeque<Instant>,
}

impl RestartWindow {
    /// How long to wait before the actor is started anew; `None`: it has died too often.
    pub(crate) fn died(&mut self, now: Instant) -> Option<Duration> {
        self.recent.retain(|&then| now.duration_since(then) < WINDOW);
        if self.recent.len() >= RESTARTS {
            return None;
        }
        let wait = BACK_OFF_MIN * (1 << self.recent.len());
        self.recent.push_back(now);
        Some(wait)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_of_failure_has_its_verdict() {
        use std::io::{Error, ErrorKind};
        let io = |kind: ErrorKind| StoreError::Io {
            context: "read",
            path: "f".into(),
            source: Error::from(kind),
        };
        let damaged = StoreError::Damaged { file: "f".into(), what: "rot".into() };
        let poisoned = StoreError::Poisoned { cause: "sync".into(), damaged: false };
        let full = StoreError::NoSpace { path: "f".into(), needed: 1, available: 0 };
        let panicked = DeviceError::Panicked("x".into());
        let unknown = DeviceError::Unknown { what: "tensor", id: 1 };
        for (failure, verdict) in [
            (Failure::Lost, Verdict::Retry),
            (Failure::Store(io(ErrorKind::Other)), Verdict::Retry),
            (Failure::Store(damaged), Verdict::StopNode),
            (Failure::Store(poisoned), Verdict::StopNode),
            (Failure::Store(full), Verdict::StopNode),
            (Failure::Device(DeviceError::Gone), Verdict::RestartActor),
            (Failure::Device(panicked), Verdict::RestartActor),
            (Failure::Device(unknown), Verdict::Retry),
            (Failure::Device(DeviceError::Token { token: 9, vocab_size: 8 }), Verdict::StopNode),
            (Failure::Logits, Verdict::StopNode),
        ] {
            assert_eq!(judge(&failure), verdict, "{failure}");
        }
    }

    #[test]
    fn restarts_back_off_and_end_unless_the_window_has_passed() {
        let start = Instant::now();
        let mut window = RestartWindow::default();
        let waits: Vec<_> = (0..6).map(|_| window.died(start)).collect();
        assert_eq!(waits[0], Some(BACK_OFF_MIN));
        assert_eq!(waits[4], Some(BACK_OFF_MIN * 16));
        assert_eq!(waits[5], None);
        assert_eq!(window.died(start + WINDOW), Some(BACK_OFF_MIN));
    }
}
