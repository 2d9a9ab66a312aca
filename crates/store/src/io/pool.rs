//! A few threads that run jobs in the order they came.

use std::collections::VecDeque;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

type Job = Box<dyn FnOnce() + Send>;

/// The threads end when the pool is dropped and its queue is empty.
pub(crate) struct Pool {
    queue: Arc<Queue>,
}

#[derive(Default)]
struct Queue {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    closed: bool,
}

impl Pool {
    /// A pool of `threads` threads (at least one) called `name`.
    pub(crate) fn new(name: &str, threads: usize) -> Pool {
        let queue = Arc::new(Queue::default());
        for _ in 0..threads.max(1) {
            let queue = Arc::clone(&queue);
            let started = thread::Builder::new().name(name.into()).spawn(move || queue.work());
            assert!(started.is_ok(), "the system refuses to start a thread: {started:?}");
        }
        Pool { queue }
    }

    pub(crate) fn run(&self, job: impl FnOnce() + Send + 'static) {
        self.queue.lock().jobs.push_back(Box::new(job));
        self.queue.changed.notify_one();
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Pool")
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.queue.lock().closed = true;
        self.queue.changed.notify_all();
    }
}

impl Queue {
    fn work(&self) {
        while let Some(job) = self.next() {
            // A panic in somebody's completion is theirs; this thread serves everybody else.
            let _ = catch_unwind(AssertUnwindSafe(job));
        }
    }

    fn next(&self) -> Option<Job> {
        let mut state = self.lock();
        loop {
            if let Some(job) = state.jobs.pop_front() {
                return Some(job);
            }
            if state.closed {
                return None;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Jobs run outside the lock, so no panic leaves the queue half changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
