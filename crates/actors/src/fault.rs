//! Injected failures, for tests: an actor panics at its n-th message.

use std::collections::BTreeMap;
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::ACTOR_NAMES;

/// `ACTOR:panic:N`: the actor panics when its N-th message (counted over restarts) arrives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    pub actor: &'static str,
    pub message: u64,
}

impl FromStr for Fault {
    type Err = String;

    fn from_str(text: &str) -> Result<Fault, String> {
        let wrong = || {
            let names = ACTOR_NAMES.join("|");
            format!("`{text}` is not a fault: expected {names}:panic:N, e.g. compute:panic:7")
        };
        let mut parts = text.split(':');
        let (Some(actor), Some("panic"), Some(message), None) =
            (parts.next(), parts.next(), parts.next(), parts.next())
        else {
            return Err(wrong());
        };
        let actor = ACTOR_NAMES.into_iter().find(|a| *a == actor).ok_or_else(wrong)?;
        Ok(Fault { actor, message: message.parse().map_err(|_| wrong())? })
    }
}

/// The faults of a run and how many messages each actor has had.
#[derive(Clone, Debug, Default)]
pub struct FaultPlan {
    faults: Arc<Vec<Fault>>,
    counts: Arc<Mutex<BTreeMap<&'static str, Arc<AtomicU64>>>>,
}

impl FaultPlan {
    /// A plan of these faults.
    pub fn new(faults: Vec<Fault>) -> FaultPlan {
        FaultPlan { faults: Arc::new(faults), counts: Arc::default() }
    }

    /// Counts a message to `actor`.
    ///
    /// # Panics
    /// If the plan says so: that is what it is for.
    pub(crate) fn message(&self, actor: &'static str) {
        if self.faults.is_empty() {
            return;
        }
        let counter = {
            let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
            Arc::clone(counts.entry(actor).or_default())
        };
        let message = counter.fetch_add(1, Ordering::Relaxed) + 1;
        let hit = self.faults.iter().any(|f| f.actor == actor && f.message == message);
        assert!(!hit, "injected fault: {actor} at message {message}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_parsed_or_refused_with_an_example() {
        let fault = "store:panic:12".parse::<Fault>().unwrap();
        assert_eq!(fault, Fault { actor: "store", message: 12 });
        for wrong in ["", "store", "store:panic", "store:panic:x", "cat:panic:1", "store:panic:1:2"]
        {
            assert!(wrong.parse::<Fault>().unwrap_err().contains("compute:panic:7"), "{wrong}");
        }
    }
}
