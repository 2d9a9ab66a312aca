//! [`Ledger`]: what a record keeps for the decisions about later steps.
//!
//! Invariants:
//! - everything that an automatic decision depends on is in the record of the step before, so that
//!   a run that was killed decides as one that was not;
//! - counters of others are carried along unchanged; those of a rule that is off are dropped.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::auto_lock::{AutoLock, Quiet};
use crate::guard::{Guard, Losses, Reason, SKIPS_IN_A_ROW, Trip, judge};

/// Steps passed over since the run began, and in a row.
const SKIPPED: &str = "skipped";
const SKIPPED_IN_A_ROW: &str = "skipped_in_a_row";

/// What holds after a step.
#[derive(Clone, Debug, PartialEq)]
pub struct Ledger {
    /// By layer: not trained from the next step on.
    pub locked: Arc<[bool]>,
    /// Numbers behind automatic decisions, by name; floats as their bits.
    pub counters: BTreeMap<String, u64>,
}

/// What is asked for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Rules {
    pub(crate) guard: Guard,
    pub(crate) auto_lock: Option<AutoLock>,
}

/// What both sweeps of a step came to.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Swept {
    /// Mean over the targets; zero without any.
    pub(crate) loss: f64,
    /// Square sums of the gradient by layer.
    pub(crate) sums: Arc<[f64]>,
    pub(crate) targets: u64,
}

impl Ledger {
    /// Why a step must not follow, if so.
    pub(crate) fn judge(&self, rules: &Rules, swept: &Swept) -> Option<Reason> {
        let guard =
            if swept.targets > 0 { rules.guard } else { Guard { spike: None, ..rules.guard } };
        judge(guard, &Losses::read(&self.counters), swept.loss, &swept.sums)
    }

    /// Whether a step that is refused here is passed over; otherwise the run ends.
    pub(crate) fn skips(&self, rules: &Rules) -> bool {
        rules.guard.on_trip == Trip::Skip && self.number(SKIPPED_IN_A_ROW) < SKIPS_IN_A_ROW
    }

    /// What holds after a step is skipped.
    pub(crate) fn after_skip(&self) -> Ledger {
        let mut next = self.clone();
        next.counters.insert(SKIPPED.into(), self.number(SKIPPED) + 1);
        next.counters.insert(SKIPPED_IN_A_ROW.into(), self.number(SKIPPED_IN_A_ROW) + 1);
        next
    }

    /// What holds after a step is committed, but for the weights it writes.
    pub(crate) fn after(&self, rules: &Rules, swept: &Swept) -> Ledger {
        let mut next = self.clone();
        next.counters.remove(SKIPPED_IN_A_ROW);
        match rules.guard.spike {
            Some(_) if swept.targets == 0 => {}
            Some(_) => Losses::read(&self.counters).with(swept.loss).write(&mut next.counters),
            None => Losses::forget(&mut next.counters),
        }
        match rules.auto_lock {
            Some(rule) => {
                let mut quiet = Quiet::read(&self.counters, self.locked.len());
                next.locked = quiet.decide(rule, &swept.sums, &self.locked).into();
                quiet.write(&mut next.counters);
            }
            None => Quiet::forget(&mut next.counters),
        }
        next
    }

    /// Adds the square sums of the weights that the step wrote; `before`: what held for it.
    pub(crate) fn weigh(&mut self, rules: &Rules, weights: &[f64], before: &Ledger) {
        if rules.auto_lock.is_some() {
            let mut quiet = Quiet::read(&self.counters, self.locked.len());
            quiet.weigh(weights, &before.locked);
            quiet.write(&mut self.counters);
        }
    }

    fn number(&self, name: &str) -> u64 {
        self.counters.get(name).copied().unwrap_or(0)
    }
}
