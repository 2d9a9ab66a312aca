//! [`Reply`]: an address for one answer, which is given exactly once.

use std::sync::{Arc, Mutex, PoisonError};

use compute::DeviceError;
use store::StoreError;

/// Why a request was not answered with what it asked for.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error(transparent)]
    Data(#[from] data::RowsError),
    /// The model's output for the next token has no largest element.
    #[error("the model's logits are not finite")]
    Logits,
    #[error(
        "step {step} is not finite (loss {loss}, gradient norm {grad_norm}); nothing was committed"
    )]
    NotFinite { step: u64, loss: f64, grad_norm: f64 },
    #[error(
        "step {step}: the loss {loss} is a spike (above {bound}); nothing of the step was committed"
    )]
    Spike { step: u64, loss: f64, bound: f64 },
    #[error(
        "step {step}: the update of layer {layer} is not finite; nothing of the step was committed"
    )]
    Update { step: u64, layer: String },
    #[error("every layer is locked, so that nothing would train; unlock one first")]
    AllLocked,
    #[error("out of memory budget: {0}")]
    Memory(#[from] model::BudgetError),
    /// The actor that had the request died, or the request could not be delivered.
    #[error("the actor died with the request")]
    Lost,
    #[error("actor {actor} died: {reason}")]
    Dead { actor: &'static str, reason: String },
    /// A thread that cannot be ended from inside the process holds the actor up.
    #[error(
        "actor {actor} is stuck: no {what} was answered for {waited:.1} s (usual: {usual:.3} s); \
         the process must be started again"
    )]
    Stuck { actor: &'static str, what: &'static str, waited: f64, usual: f64 },
}

type Answer<T> = Box<dyn FnOnce(Result<T, Failure>) + Send>;

/// Where an answer goes. Dropped unanswered, it answers [`Failure::Lost`], so that a request can
/// never be waited for in vain.
pub struct Reply<T> {
    answer: Option<Answer<T>>,
}

impl<T> Reply<T> {
    /// A reply that calls `answer` once, on whatever thread answers.
    pub fn new(answer: impl FnOnce(Result<T, Failure>) + Send + 'static) -> Reply<T> {
        Reply { answer: Some(Box::new(answer)) }
    }

    /// Answers.
    pub fn send(mut self, result: Result<T, Failure>) {
        if let Some(answer) = self.answer.take() {
            answer(result);
        }
    }
}

impl<T: Send + 'static> Reply<T> {
    /// So many replies, with the last of which `value` is answered, or the first failure; at once
    /// where there are none.
    pub(crate) fn after(self, count: usize, value: T) -> Vec<Reply<()>> {
        if count == 0 {
            self.send(Ok(value));
            return Vec::new();
        }
        let waiting = Arc::new(Mutex::new((count, Some((self, value)))));
        let part = || {
            let waiting = Arc::clone(&waiting);
            Reply::new(move |result: Result<(), Failure>| {
                // What is changed under the lock is changed whole.
                let mut waiting = waiting.lock().unwrap_or_else(PoisonError::into_inner);
                waiting.0 -= 1;
                if waiting.0 > 0 && result.is_ok() {
                    return;
                }
                if let Some((reply, value)) = waiting.1.take() {
                    reply.send(result.map(|()| value));
                }
            })
        };
        (0..count).map(|_| part()).collect()
    }
}

impl<T> Drop for Reply<T> {
    fn drop(&mut self) {
        if let Some(answer) = self.answer.take() {
            answer(Err(Failure::Lost));
        }
    }
}

impl<T> std::fmt::Debug for Reply<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reply").field("answered", &self.answer.is_none()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    #[test]
    fn a_reply_answers_once_even_when_dropped() {
        let (tx, rx) = channel();
        let other = tx.clone();
        Reply::new(move |r: Result<u8, Failure>| tx.send(r.is_ok()).unwrap()).send(Ok(1));
        drop(Reply::new(move |r: Result<u8, Failure>| other.send(r.is_ok()).unwrap()));
        assert_eq!(rx.iter().collect::<Vec<_>>(), [true, false]);
    }

    #[test]
    fn a_reply_after_others_waits_for_all_of_them_or_the_first_that_fails() {
        let ask = |count| {
            let (tx, rx) = channel();
            let reply = Reply::new(move |r: Result<u8, Failure>| tx.send(r.ok()).unwrap());
            (reply.after(count, 7), rx)
        };
        assert_eq!(ask(0).1.recv(), Ok(Some(7)));
        let (mut parts, rx) = ask(3);
        for _ in 0..2 {
            parts.pop().unwrap().send(Ok(()));
            assert!(rx.try_recv().is_err(), "too early");
        }
        parts.pop().unwrap().send(Ok(()));
        assert_eq!(rx.recv(), Ok(Some(7)));
        let (mut parts, rx) = ask(2);
        drop(parts.pop());
        assert_eq!(rx.recv(), Ok(None));
        parts.pop().unwrap().send(Ok(()));
        assert!(rx.recv().is_err(), "answered twice");
    }
}
