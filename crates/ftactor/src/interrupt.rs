//! [`Interrupt`]: Ctrl-C and SIGTERM, for as long as a session lasts.
//!
//! The first one ends the run cleanly, whatever the session is doing at that moment; the second one
//! ends the process at once.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::exit;
use crate::out::errln;

type Stop = Box<dyn Fn() + Send + Sync>;

/// Whether the user wants the session to end, and how to tell the run of the moment.
#[derive(Clone, Default)]
pub(crate) struct Interrupt {
    requested: Arc<AtomicBool>,
    stop: Arc<Mutex<Option<Stop>>>,
}

impl Interrupt {
    /// Listens to signals from now on. Must be called inside a tokio runtime.
    pub(crate) fn listen() -> Interrupt {
        let interrupt = Interrupt::default();
        let asked = interrupt.clone();
        tokio::spawn(async move {
            signal().await;
            if !asked.has_run() {
                errln!("stopped before the first step");
                std::process::exit(i32::from(exit::INTERRUPTED));
            }
            errln!("stopping after the next commit; once more stops at once");
            asked.request();
            signal().await;
            std::process::exit(i32::from(exit::INTERRUPTED));
        });
        interrupt
    }

    fn has_run(&self) -> bool {
        self.stop.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    /// Has `stop` called when the user asks, now if that was before.
    pub(crate) fn stops(&self, stop: impl Fn() + Send + Sync + 'static) {
        let mut current = self.stop.lock().unwrap_or_else(PoisonError::into_inner);
        if self.requested.load(Ordering::SeqCst) {
            stop();
        }
        *current = Some(Box::new(stop));
    }

    /// Whether the user wants the session to end.
    pub(crate) fn is_requested(&self) -> bool {
        self.requested.load(Ordering::SeqCst)
    }

    fn request(&self) {
        let current = self.stop.lock().unwrap_or_else(PoisonError::into_inner);
        self.requested.store(true, Ordering::SeqCst);
        if let Some(stop) = &*current {
            stop();
        }
    }
}

async fn signal() {
    use tokio::signal::unix::{SignalKind, signal};
    let Ok(mut terminate) = signal(SignalKind::terminate()) else {
        return std::future::pending().await;
    };
    tokio::select! {
        _ = tokio::signal::ctrl_c() => {}
        _ = terminate.recv() => {}
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    #[test]
    fn a_request_reaches_the_run_of_the_moment_and_every_later_one() {
        let interrupt = Interrupt::default();
        let calls: [Arc<AtomicUsize>; 3] = Default::default();
        let counts = || calls.each_ref().map(|c| c.load(Ordering::SeqCst));
        let stop = |i: usize| {
            let count = Arc::clone(&calls[i]);
            move || {
                count.fetch_add(1, Ordering::SeqCst);
            }
        };
        interrupt.stops(stop(0));
        interrupt.stops(stop(1));
        assert_eq!(counts(), [0, 0, 0]);
        interrupt.request();
        assert_eq!(counts(), [0, 1, 0]);
        interrupt.stops(stop(2));
        assert_eq!(counts(), [0, 1, 1]);
    }
}
