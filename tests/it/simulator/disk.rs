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
    /// The slots of the newest versions.
    pub(crate) live: Vec<Slot>,
    digests: Vec<u64>,
    t: Vec<u64>,
    /// By layer: the steps that changed it.
    pub(crate) applied: Vec<Vec<u64>>,
    pub(crate) skipped: Vec<u64>,
    pub(crate) ledger: Ledger,
}

impl Record {
    /// Whether both say the same, whatever it took to get there.
    pub(crate) fn agrees(&self, other: &Record) -> bool {
        *self == Record { attempt: self.attempt, live: self.live.clone(), ..other.clone() }
    }
}

pub(crate) struct Disk {
    /// `None`: garbage, or being written.
    slots: Vec<[Option<Version>; 2]>,
    pub(crate) record: Record,
    /// What the last settled step made of it.
    pub(crate) settled: Record,
    /// The record that is on its way.
    committing: Option<Record>,
    /// The attempt that may write.
    writing: Option<Attempt>,
}

impl Disk {
    pub(crate) fn new(ledger: Ledger) -> Disk {
        let layers = ledger.locked.len();
        let fresh = |layer| Version { step: Step(0), digest: layer as u64, synced: true };
        let record = Record {
            step: Step(0),
            attempt: Attempt(0),
            live: vec![Slot::A; layers],
            digests: (0..layers).map(|layer| fresh(layer).digest).collect(),
            t: vec![0; layers],
            applied: vec![Vec::new(); layers],
            skipped: Vec::new(),
            ledger,
        };
        Disk {
            slots: (0..layers).map(|layer| [Some(fresh(layer)), None]).collect(),
            settled: record.clone(),
            record,
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
        assert_eq!(from, self.settled.live[at], "layer {layer}: reads an old slot");
        assert_ne!(to, self.record.live[at], "layer {layer}: writes a live slot");
        assert_eq!(step, self.settled.step.next(), "writes ahead of what is settled");
        assert!(!self.settled.ledger.locked[at], "layer {layer} is locked and written");
        assert!(self.committing.is_none(), "writes while a record is on its way");
        assert_eq!(*self.writing.get_or_insert(attempt), attempt, "two attempts write");
        let before = self.slots[at][from as usize].expect("the newest version");
        if from != to {
            self.slots[at][to as usize] = None;
        }
        updated(before.digest, step, factor)
    }

    pub(crate) fn finish_update(&mut self, step: Step, layer: LayerId, slot: Slot, digest: u64) {
        let version = Version { step, digest, synced: false };
        self.slots[layer.index()][slot as usize] = Some(version);
    }

    /// What is settled, and nothing else, reaches the disk.
    pub(crate) fn sync(&mut self, slots: &[(LayerId, Slot)]) {
        let pairs = self.settled.live.iter().zip(&self.record.live).enumerate();
        let ahead = pairs.filter(|(_, (settled, live))| settled != live);
        let ahead: Vec<_> = ahead.map(|(at, (slot, _))| (LayerId(at as u32), *slot)).collect();
        assert_eq!(slots, ahead, "step {}", self.settled.step);
        for (layer, slot) in slots {
            let version = &mut self.slots[layer.index()][*slot as usize];
            version.as_mut().expect("sync of a slot that is not written").synced = true;
        }
    }

    /// A read for `step`: the version that the step before left, or leaves.
    pub(crate) fn check_read(&self, step: Step, layer: LayerId, slot: Slot) {
        let at = layer.index();
        let before = Step(step.0 - 1);
        let ahead = before != self.settled.step;
        if ahead {
            assert_eq!(before, self.settled.step.next(), "read two steps ahead");
        }
        let written = ahead && !self.settled.ledger.locked[at];
        let (other, settled) = (self.record.live[at].other(), self.settled.live[at]);
        assert_eq!(slot, if written { other } else { settled }, "layer {layer} for step {step}");
        let version = self.slots[at][slot as usize];
        let version = version.unwrap_or_else(|| panic!("layer {layer} is being written and read"));
        assert!(!written || version.step == before, "layer {layer} is old for step {step}");
    }

    /// A step counts; `locked`: what its attempt left out; `clipped`: its updates must have been made
    /// with the factor.
    pub(crate) fn settle(
        &mut self,
        (step, attempt): (Step, Attempt),
        ledger: Ledger,
        locked: &[bool],
        clipped: bool,
    ) {
        assert_eq!(step, self.settled.step.next(), "settled out of order");
        assert!(attempt > self.settled.attempt, "an attempt twice");
        assert_eq!(locked, &*self.settled.ledger.locked, "step {step} had other locks");
        for (at, locked) in locked.iter().enumerate() {
            let next = &mut self.settled;
            if *locked {
                assert!(ledger.locked[at], "layer {at} is unlocked by itself");
                continue;
            }
            next.live[at] = self.record.live[at].other();
            next.digests[at] = updated(next.digests[at], step, clipped);
            let new = Version { step, digest: next.digests[at], synced: false };
            assert_eq!(self.slots[at][next.live[at] as usize], Some(new), "layer {at}");
            next.t[at] += 1;
            next.applied[at].push(step.0);
        }
        (self.settled.step, self.settled.attempt, self.settled.ledger) = (step, attempt, ledger);
        self.writing = None;
    }

    /// A record goes on its way.
    pub(crate) fn start_record(&mut self, command: &RunCommand) {
        assert!(self.committing.is_none(), "two records at once");
        let mut next = self.settled.clone();
        match command {
            RunCommand::Commit { step, attempt } => {
                assert_eq!((*step, *attempt), (next.step, next.attempt), "not what is settled");
                let newest = next.live.iter().zip(&self.slots);
                let synced = |(live, slots): (&Slot, &[Option<Version>; 2])| {
                    slots[*live as usize].is_some_and(|version| version.synced)
                };
                assert!(newest.into_iter().all(synced), "step {step} is not synced");
            }
            RunCommand::Skip { step, attempt, ledger } => {
                assert_eq!(next.step, self.record.step, "skipped before the one before is durable");
                assert_eq!(ledger.locked, next.ledger.locked, "a skip locks");
                assert_eq!(*step, next.step.next(), "skipped out of order");
                (next.step, next.attempt, next.ledger) = (*step, *attempt, ledger.clone());
                next.skipped.push(step.0);
            }
            other => panic!("{other:?} is no record"),
        }
        assert!(next.step > self.record.step, "records out of order");
        assert!(next.attempt > self.record.attempt, "an attempt twice");
        self.committing = Some(next);
    }

    pub(crate) fn finish_record(&mut self, step: Step) {
        self.record = self.committing.take().expect("a record on its way");
        self.settled = self.record.clone();
        assert_eq!(self.record.step, step, "another step became durable");
        self.writing = None;
        self.check();
    }

    /// Settled steps go with a dropped attempt, unless their record is on its way; how many.
    pub(crate) fn rewind(&mut self) -> u64 {
        if self.committing.is_some() {
            return 0;
        }
        let settled = std::mem::replace(&mut self.settled, self.record.clone());
        settled.step.0 - self.record.step.0
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
        self.settled = self.record.clone();
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
