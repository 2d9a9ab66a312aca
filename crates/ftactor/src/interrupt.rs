//! [`Interrupt`]: Ctrl-C and SIGTERM, for as long as a session lasts.
//!
//! The first one ends the run cleanly, whatever the session is doing at that moment; the second one
//! ends the process at once.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

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
            errln!(
                "stopping after the next commit; once more stops at once, without what is not committed"
            );
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
    // A closed terminal, but for who asked with nohup to outlive it.
    let mut hangup = if ignored_hangup() { None } else { signal(SignalKind::hangup()).ok() };
    let hung_up = async {
        match &mut hangup {
            Some(hangup) => hangup.recv().await,
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        _ = tokio::signal::ctrl_c() => {}
        _ = terminate.recv() => {}
        _ = hung_up => {}
    }
}

/// Whether this process was started so that hang-ups are ignored; asked before anybody listens.
fn ignored_hangup() -> bool {
    static IGNORED: OnceLock<bool> = OnceLock::new();
    *IGNORED.get_or_init(|| {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
        mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0) & 1 == 1
    })
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
