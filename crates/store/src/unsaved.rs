//! [`Unsaved`]: new chunks that wait in memory until somebody saves them.
//!
//! Invariants:
//! - of a chunk that waits, the file holds something else: every read of it goes here;
//! - what waits never exceeds the room that was granted. Weights have theirs first: a step reads
//!   them most often.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use model::HostBytes;

/// How much may wait, over all files.
#[derive(Clone, Debug, Default)]
pub(crate) struct Allowance {
    /// Bytes left: for weights, and for the other planes.
    left: Arc<Mutex<[usize; 2]>>,
}

impl Allowance {
    /// Grants `bytes` in all while nothing waits; to weights as far as there are `weight_bytes` of them.
    pub(crate) fn grant(&self, bytes: usize, weight_bytes: usize) {
        let weights = bytes.min(weight_bytes);
        *held(&self.left) = [weights, bytes - weights];
    }

    /// Takes a block of W, M or V (`state`) in, whose room is free again when it drops; it comes back
    /// if there is no room.
    fn admit(&self, block: HostBytes, state: usize) -> Result<HostBytes, HostBytes> {
        let kind = usize::from(state > 0);
        let mut left = held(&self.left);
        let Some(rest) = left[kind].checked_sub(block.len()) else { return Err(block) };
        left[kind] = rest;
        let allowance = self.clone();
        Ok(block.released_to(move |block| held(&allowance.left)[kind] += block.len()))
    }
}

/// What waits of one file, by chunk.
#[derive(Debug, Default)]
pub(crate) struct Unsaved {
    chunks: Mutex<BTreeMap<usize, Arc<HostBytes>>>,
}

impl Unsaved {
    /// Takes the place of what waits of a chunk; the block comes back if there is no room.
    pub(crate) fn put(
        &self,
        chunk: usize,
        block: HostBytes,
        state: usize,
        allowance: &Allowance,
    ) -> Result<(), HostBytes> {
        // Its room may be what the new one needs.
        self.forget(chunk..chunk + 1);
        let block = allowance.admit(block, state)?;
        held(&self.chunks).insert(chunk, Arc::new(block));
        Ok(())
    }

    pub(crate) fn forget(&self, chunks: Range<usize>) {
        let mut all = held(&self.chunks);
        let numbers: Vec<usize> = all.range(chunks).map(|(&chunk, _)| chunk).collect();
        let forgotten: Vec<_> = numbers.iter().filter_map(|chunk| all.remove(chunk)).collect();
        drop(all);
        drop(forgotten);
    }

    /// What waits of some chunks, in order.
    pub(crate) fn of(&self, chunks: Range<usize>) -> Vec<(usize, Arc<HostBytes>)> {
        let all = held(&self.chunks);
        all.range(chunks).map(|(&chunk, block)| (chunk, Arc::clone(block))).collect()
    }
}

fn held<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Every change under these locks is a single complete one.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_have_room_first_and_give_it_back() {
        let (allowance, file) = (Allowance::default(), Unsaved::default());
        let block = |len| HostBytes::zeroed(len);
        let put = |chunk, len, state| file.put(chunk, block(len), state, &allowance).is_ok();
        assert!(!put(0, 1, 0), "nothing was granted");
        allowance.grant(100, 60);
        assert!(put(0, 50, 0) && !put(1, 20, 0) && put(2, 40, 1) && !put(3, 1, 2));
        assert!(put(0, 60, 0), "in the place of the 50");
        let waiting = file.of(0..3);
        assert_eq!(
            waiting.iter().map(|(at, b)| (*at, b.len())).collect::<Vec<_>>(),
            [(0, 60), (2, 40)]
        );
        file.forget(2..3);
        assert!(!put(3, 40, 1), "somebody still reads it");
        drop(waiting);
        assert!(put(3, 40, 1));
        assert!(!put(3, 41, 1) && file.of(3..4).is_empty(), "the old one is gone as well");
    }
}
