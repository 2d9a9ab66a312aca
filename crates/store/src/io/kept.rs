//! [`Kept`]: parts of a file that are still in memory because nobody needed their room.
//!
//! Invariants:
//! - a part that is written is forgotten before the write begins;
//! - contents are handed on whole, or copied for reads of a part.

use std::ops::Range;
use std::sync::{Arc, Mutex};

use model::{Budget, HostBytes, Spare};

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
    /// Keeps what was read from `range`.
    pub(super) fn keep(&self, range: Range<u64>, block: HostBytes, budget: &Budget) {
        let spare = budget.spare(block);
        let mut parts = held(&self.parts);
        parts.retain(|part| part.range != range);
        parts.push(KeptPart { range, spare });
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

    /// A part that holds all of `range`; what ends with it is not kept for longer.
    pub(super) fn find(&self, range: &Range<u64>) -> Option<KeptCopy> {
        let mut parts = held(&self.parts);
        let holds = |p: &KeptPart| p.range.start <= range.start && range.end <= p.range.end;
        let at = parts.iter().position(holds)?;
        let start = (range.start - parts[at].range.start) as usize;
        let last = parts[at].range.end == range.end;
        let spare = match last {
            true => parts.swap_remove(at).spare,
            false => Arc::clone(&parts[at].spare),
        };
        Some(KeptCopy { spare, start, last })
    }

    /// Forgets whatever overlaps `range`.
    pub(super) fn forget(&self, range: &Range<u64>) {
        let apart = |p: &KeptPart| p.range.end <= range.start || range.end <= p.range.start;
        held(&self.parts).retain(apart);
    }
}

/// A read that memory may serve.
pub(super) struct KeptCopy {
    spare: Arc<Spare>,
    start: usize,
    last: bool,
}

impl KeptCopy {
    /// False if the contents went meanwhile.
    pub(super) fn fill(&self, part: &mut Part) -> bool {
        let filled = self.spare.copy(self.start, part.bytes_mut());
        if self.last {
            drop(self.spare.take());
        }
        filled
    }
}
