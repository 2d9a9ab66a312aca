//! [`Gate`]: counts what is in flight on threads that outlive an actor.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::reply::Reply;

/// Shared by all incarnations of an actor.
#[derive(Clone, Debug, Default)]
pub(crate) struct Gate {
    inside: Arc<Mutex<Inside>>,
}

#[derive(Debug, Default)]
struct Inside {
    count: usize,
    waiting: Vec<Reply<()>>,
}

/// Being in flight; dropping it leaves the gate.
#[derive(Debug)]
pub(crate) struct Passage {
    gate: Gate,
}

impl Gate {
    pub(crate) fn enter(&self) -> Passage {
        self.lock().count += 1;
        Passage { gate: self.clone() }
    }

    /// Answers when nothing is in flight: at once, or by whoever leaves last.
    pub(crate) fn when_empty(&self, reply: Reply<()>) {
        let mut inside = self.lock();
        if inside.count > 0 {
            inside.waiting.push(reply);
            return;
        }
        drop(inside);
        reply.send(Ok(()));
    }

    fn lock(&self) -> MutexGuard<'_, Inside> {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Passage {
    fn drop(&mut self) {
        let mut inside = self.gate.lock();
        inside.count -= 1;
        let empty = inside.count == 0;
        let waiting = if empty { std::mem::take(&mut inside.waiting) } else { Vec::new() };
        drop(inside);
        waiting.into_iter().for_each(|reply| reply.send(Ok(())));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};

    #[test]
    fn a_drain_is_answered_by_whoever_leaves_last() {
        let gate = Gate::default();
        let (first, second) = (gate.enter(), gate.enter());
        let answered = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&answered);
        gate.when_empty(Reply::new(move |r| seen.store(r.is_ok(), Ordering::SeqCst)));
        drop(second);
        assert!(!answered.load(Ordering::SeqCst));
        drop(first);
        assert!(answered.load(Ordering::SeqCst));
    }
}
