//! [`Kept`]: parts of a file that are still in memory because nobody needed their room.
//!
//! Invariants:
//! - a part that is written is forgotten before the write begins;
//! - contents are handed on whole, or copied for reads of a part.

use std::ops::Range;
use std::sync::{Arc, Mutex};

use model::{Budget, HostBytes, NextUse, Spare};

use super::Part;
use super::local::held;

/// Of one open file.
#[derive(Debug, Default)]
pub(super) struct Kept {
    parts: Mutex<Vec<KeptPart>>,
}

#[derive(Debug)]
struct KeptPart {
    range: Range<u64>,
    spare: Arc<Spare>,
}

impl Kept {
    /// Keeps what was read from or written to `range`, in the place of parts of it.
    pub(super) fn keep(
        &self,
        range: Range<u64>,
        block: HostBytes,
        (budget, next_use): (&Budget, NextUse),
    ) {
        let spare = budget.spare(block, next_use);
        let mut parts = held(&self.parts);
        let covers = |p: &KeptPart| range.start <= p.range.start && p.range.end <= range.end;
        let covered: Vec<_> = parts.extract_if(.., |part| covers(part)).collect();
        parts.push(KeptPart { range, spare });
        drop(parts);
        covered.iter().for_each(|part| drop(part.spare.take()));
    }

    /// The very block that was read from `range`.
    pub(super) fn take(&self, range: &Range<u64>) -> Option<HostBytes> {
        let spare = {
            let mut parts = held(&self.parts);
            let at = parts.iter().position(|part| part.range == *range)?;
            parts.swap_remove(at).spare
        };
        spare.take()
    }

    /// Parts that hold all of `range` together; what ends in it is not kept for longer.
    pub(super) fn find(&self, range: &Range<u64>) -> Option<KeptCopy> {
        let mut parts = held(&self.parts);
        let mut chosen: Vec<usize> = Vec::new();
        let mut at = range.start;
        while at < range.end {
            let holds = |p: &KeptPart| p.range.start <= at && at < p.range.end;
            chosen.push(parts.iter().position(holds)?);
            at = parts[chosen[chosen.len() - 1]].range.end;
        }
        let piece = |&i: &usize| {
            let KeptPart { range: part, spare } = &parts[i];
            let (start, end) = (part.start.max(range.start), part.end.min(range.end));
            let from = (start - part.start) as usize;
            let to = (start - range.start) as usize..(end - range.start) as usize;
            KeptPiece { spare: Arc::clone(spare), from, to, last: part.end <= range.end }
        };
        let pieces = chosen.iter().map(piece).collect();
        parts.retain(|part| part.range.end <= range.start || part.range.end > range.end);
        Some(KeptCopy { pieces })
    }

    /// Forgets whatever overlaps `range`.
    pub(super) fn forget(&self, range: &Range<u64>) {
        let apart = |p: &KeptPart| p.range.end <= range.start || range.end <= p.range.start;
        held(&self.parts).retain(apart);
    }
}

/// A read that memory may serve.
pub(super) struct KeptCopy {
    pieces: Vec<KeptPiece>,
}

struct KeptPiece {
    spare: Arc<Spare>,
    /// Its first byte in the spare block, and its place in the read.
    from: usize,
    to: Range<usize>,
    /// Nobody else reads the block.
    last: bool,
}

impl KeptCopy {
    /// False if contents went meanwhile.
    pub(super) fn fill(&self, part: &mut Part) -> bool {
        let mut filled = true;
        for KeptPiece { spare, from, to, last } in &self.pieces {
            filled &= spare.copy(*from, &mut part.bytes_mut()[to.clone()]);
            if *last {
                drop(spare.take());
            }
        }
        filled
    }
}
