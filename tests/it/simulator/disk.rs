//! What survives the process: slots, and the record of the last durable step.

use schedule::{Ledger, RunCommand};

use super::*;

/// What a slot holds.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Version {
    step: Step,
    /// Of all steps that made it.
    digest: u64,
    synced: bool,
}

/// What a record makes true.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Record {
    pub(crate) step: Step,
    pub(crate) attempt: Attempt,
    pub(crate) live: Vec<Slot>,
    t: Vec<u64>,
    /// By layer: the steps that changed it.
    pub(crate) applied: Vec<Vec<u64>>,
    pub(crate) skipped: Vec<u64>,
    pub(crate) ledger: Ledger,
}

impl Record {
    /// Whether both say the same, whatever it took to get there.
    pub(crate) fn agrees(&self, other: &Record) -> bool {
        *self == Record { attempt: self.attempt, ..other.clone() }
    }
}

pub(crate) struct Disk {
    /// `None`: garbage, or being written.
    slots: Vec<[Option<Version>; 2]>,
    pub(crate) record: Record,
    /// The record that is on its way.
    committing: Option<Record>,
    /// The attempt that may write.
    writing: Option<Attempt>,
}

impl Disk {
    pub(crate) fn new(ledger: Ledger) -> Disk {
        let layers = ledger.locked.len();
        let fresh = |layer| Version { step: Step(0), digest: layer as u64, synced: true };
        Disk {
            slots: (0..layers).map(|layer| [Some(fresh(layer)), None]).collect(),
            record: Record {
                step: Step(0),
                attempt: Attempt(0),
                live: vec![Slot::A; layers],
                t: vec![0; layers],
                applied: vec![Vec::new(); layers],
                skipped: Vec::new(),
                ledger,
            },
            committing: None,
            writing: None,
        }
    }

    /// An update begins; the digest of what it will have written.
    pub(crate) fn start_update(
        &mut self,
        (step, attempt): (Step, Attempt),
        layer: LayerId,
        (from, to): (Slot, Slot),
        factor: bool,
    ) -> u64 {
        let at = layer.index();
        assert_eq!(from, self.record.live[at], "layer {layer}: reads a dead slot");
        assert_ne!(to, self.record.live[at], "layer {layer}: writes a live slot");
        assert_eq!(step, self.record.step.next(), "writes ahead of the disk");
        assert!(!self.record.ledger.locked[at], "layer {layer} is locked and written");
        assert!(self.committing.is_none(), "writes while a record is on its way");
        assert_eq!(*self.writing.get_or_insert(attempt), attempt, "two attempts write");
        self.slots[at][to as usize] = None;
        let before = self.slots[at][from as usize].expect("a live slot");
        updated(before.digest, step, factor)
    }

    pub(crate) fn finish_update(&mut self, step: Step, layer: LayerId, slot: Slot, digest: u64) {
        let version = Version { step, digest, synced: false };
        self.slots[layer.index()][slot as usize] = Some(version);
    }

    pub(crate) fn sync(&mut self, slots: &[(LayerId, Slot)]) {
        for (layer, slot) in slots {
            assert!(
                !self.record.ledger.locked[layer.index()],
                "layer {layer} is locked and synced"
            );
            let version = &mut self.slots[layer.index()][*slot as usize];
            version.as_mut().expect("sync of a slot that is not written").synced = true;
        }
    }

    /// A read for `step`: the version that the step before left, or will have made live.
    pub(crate) fn check_read(&self, step: Step, layer: LayerId, slot: Slot) {
        let at = layer.index();
        let before = Step(step.0 - 1);
        let ahead = before != self.record.step;
        let live = self.record.live[at];
        if ahead {
            assert_eq!(before, self.record.step.next(), "read two steps ahead of the disk");
        }
        let written = ahead && !self.record.ledger.locked[at];
        assert_eq!(
            slot,
            if written { live.other() } else { live },
            "layer {layer} for step {step}"
        );
        let version = self.slots[at][slot as usize];
        let version = version.unwrap_or_else(|| panic!("layer {layer} is being written and read"));
        assert!(!written || version.step == before, "layer {layer} is old for step {step}");
    }

    /// A record goes on its way; `locked`: what its attempt left out; `clipped`: its updates must
    /// have been made with the factor.
    pub(crate) fn start_record(&mut self, command: &RunCommand, locked: &[bool], clipped: bool) {
        assert!(self.committing.is_none(), "two records at once");
        let mut next = self.record.clone();
        match command {
            RunCommand::Commit { step, attempt, ledger } => {
                assert_eq!(locked, &*self.record.ledger.locked, "step {step} had other locks");
                (next.step, next.attempt, next.ledger) = (*step, *attempt, ledger.clone());
                self.flip(&mut next, clipped);
            }
            RunCommand::Skip { step, attempt, ledger } => {
                assert_eq!(ledger.locked, next.ledger.locked, "a skip locks");
                (next.step, next.attempt, next.ledger) = (*step, *attempt, ledger.clone());
                next.skipped.push(step.0);
            }
            other => panic!("{other:?} is no record"),
        }
        assert_eq!(next.step, self.record.step.next(), "records out of order");
        assert!(next.attempt > self.record.attempt, "an attempt twice");
        self.committing = Some(next);
    }

    /// What the step wrote becomes live: of the layers that were not locked in it.
    fn flip(&self, next: &mut Record, clipped: bool) {
        for (at, locked) in self.record.ledger.locked.iter().enumerate() {
            if *locked {
                assert!(next.ledger.locked[at], "layer {at} is unlocked by itself");
                continue;
            }
            let old = self.slots[at][next.live[at] as usize].expect("a live slot");
            next.live[at] = next.live[at].other();
            let digest = updated(old.digest, next.step, clipped);
            let new = Version { step: next.step, digest, synced: true };
            assert_eq!(self.slots[at][next.live[at] as usize], Some(new), "layer {at}");
            next.t[at] += 1;
            next.applied[at].push(next.step.0);
        }
    }

    pub(crate) fn finish_record(&mut self, step: Step) {
        self.record = self.committing.take().expect("a record on its way");
        assert_eq!(self.record.step, step, "another step became durable");
        self.writing = None;
        self.check();
    }

    /// Nothing of a dropped attempt is written any more.
    pub(crate) fn drained(&mut self) {
        self.writing = None;
    }

    /// The process dies. What was not synced is lost; a record on its way is there or not.
    pub(crate) fn die(&mut self, record_arrives: bool) {
        for (at, slots) in self.slots.iter_mut().enumerate() {
            for version in slots.iter_mut() {
                version.take_if(|version| !version.synced);
            }
            assert!(slots[self.record.live[at] as usize].is_some(), "layer {at} is lost");
        }
        self.writing = None;
        match self.committing.take() {
            Some(record) if record_arrives => self.record = record,
            _ => {}
        }
        self.check();
    }

    fn check(&self) {
        for (at, slots) in self.slots.iter().enumerate() {
            let live = slots[self.record.live[at] as usize];
            let last = self.record.applied[at].last().copied().unwrap_or(0);
            let live = live.map(|version| (version.step.0, version.synced));
            assert_eq!(live, Some((last, true)), "layer {at} after step {}", self.record.step);
            assert_eq!(self.record.t[at], self.record.applied[at].len() as u64);
        }
        let Record { step, skipped, ledger, .. } = &self.record;
        let in_a_row = (1..=step.0).rev().take_while(|step| skipped.contains(step)).count();
        let counter = |name: &str| ledger.counters.get(name).copied().unwrap_or(0);
        assert_eq!(counter("skipped"), skipped.len() as u64);
        assert_eq!(counter("skipped_in_a_row"), in_a_row as u64);
        assert!(ledger.locked.contains(&false), "nothing is left to train");
    }

    /// Square sum of the weights that a digest stands for.
    pub(crate) fn weights(digest: u64) -> f64 {
        1.0 + (digest % 1024) as f64 / 1024.0
    }
}

pub(crate) fn mix(a: u64, b: u64) -> u64 {
    let mut x = a.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ b.wrapping_add(0xD1B5_4A32_D192_ED03);
    x = (x ^ (x >> 29)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x ^ (x >> 32)
}

/// A version's digest after a step's update.
fn updated(before: u64, step: Step, factor: bool) -> u64 {
    mix(before, 2 * step.0 + u64::from(factor))
}
