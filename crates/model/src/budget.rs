//! [`Budget`]: the hard cap on host memory that blocks are leased from.
//!
//! Invariants:
//! - the bytes of living, spare and cached blocks and of scraps never exceed the budget;
//! - a spare block goes whenever somebody needs its room: it is never in the way;
//! - of spare blocks the one goes first whose contents are needed last.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::HostBytes;
use crate::os::{LARGE_BYTES, Pages};

/// Why memory was refused.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum BudgetError {
    #[error(
        "the memory budget of {given_bytes} bytes is too small: this run needs at least \
         {needed_bytes} bytes ({parts}); raise --ram to {}M{remedy}",
        needed_bytes.div_ceil(1 << 20)
    )]
    TooSmall { given_bytes: u64, needed_bytes: u64, parts: String, remedy: String },
    #[error(
        "a block of {wanted_bytes} bytes does not fit: {used_bytes} of {total_bytes} bytes are in use"
    )]
    Exhausted { wanted_bytes: usize, used_bytes: usize, total_bytes: usize },
}

/// A hard cap on host memory. Dropped blocks stay cached by length, because fresh pages cost
/// more than the arithmetic done on them; cached blocks make room when another length is needed.
#[derive(Clone, Debug)]
pub struct Budget {
    shared: Arc<Mutex<Account>>,
}

/// Fewest entries of spare blocks after which those that are gone are cleared away.
const SPARES_MIN: usize = 64;

#[derive(Debug)]
struct Account {
    total_bytes: usize,
    /// Living and cached blocks, and scraps.
    held_bytes: usize,
    living_bytes: usize,
    peak_bytes: usize,
    cached: BTreeMap<usize, Vec<HostBytes>>,
    /// Pages of cached blocks that made room, for blocks of other lengths.
    scraps: Vec<Pages>,
    /// Blocks whose contents may be of use, by when, and in the order of their coming.
    spares: BTreeMap<(NextUse, u64), Arc<Spare>>,
    /// Spare blocks so far, and how many there may be before those that were taken are cleared away.
    spare_count: u64,
    spares_most: usize,
    /// The step that is known to have begun.
    step: u64,
}

/// When contents are needed next, on whatever clock their user has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct NextUse {
    pub step: u64,
    pub turn: u32,
}

/// A block whose contents may be of use again, until its room is needed.
#[derive(Debug)]
pub struct Spare {
    block: Mutex<Option<HostBytes>>,
}

impl Spare {
    /// The block itself, if it is still there.
    pub fn take(&self) -> Option<HostBytes> {
        self.lock().take()
    }

    /// Copies the bytes from `start` on, as many as `to` has room for; false if they are gone.
    ///
    /// # Panics
    /// Beyond the block's end: a programmer's error.
    pub fn copy(&self, start: usize, to: &mut [u8]) -> bool {
        let block = self.lock();
        let Some(block) = &*block else { return false };
        to.copy_from_slice(&block.bytes()[start..start + to.len()]);
        true
    }

    /// Whether the block is still there; whoever copies from it proves that.
    fn is_there(&self) -> bool {
        self.block.try_lock().map_or(true, |block| block.is_some())
    }

    fn lock(&self) -> MutexGuard<'_, Option<HostBytes>> {
        // A block is moved in or out whole.
        self.block.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Budget {
    /// A budget of `total_bytes`.
    pub fn new(total_bytes: usize) -> Budget {
        let account = Account {
            total_bytes,
            held_bytes: 0,
            living_bytes: 0,
            peak_bytes: 0,
            cached: BTreeMap::new(),
            scraps: Vec::new(),
            spares: BTreeMap::new(),
            spare_count: 0,
            spares_most: SPARES_MIN,
            step: 0,
        };
        Budget { shared: Arc::new(Mutex::new(account)) }
    }

    /// A writable block of `len` bytes whose contents are unspecified (but initialised).
    pub fn block(&self, len: usize) -> Result<HostBytes, BudgetError> {
        loop {
            let refused = match self.account().take(len) {
                Ok(inner) => return Ok(self.lease(inner)),
                Err(refused) => refused,
            };
            let last = self.account().pop_spare();
            // Dropped outside the account's lock, which its lease takes.
            drop(last.ok_or(refused)?.take());
        }
    }

    /// Keeps a block that was leased here for as long as nobody needs its room.
    pub fn spare(&self, block: HostBytes, next_use: NextUse) -> Arc<Spare> {
        let spare = Arc::new(Spare { block: Mutex::new(Some(block)) });
        self.account().push_spare(next_use, Arc::clone(&spare));
        spare
    }

    /// A block that is all zero.
    pub fn zeroed(&self, len: usize) -> Result<HostBytes, BudgetError> {
        let mut block = self.block(len)?;
        block.bytes_mut().fill(0);
        Ok(block)
    }

    /// The cap in bytes.
    pub fn total_bytes(&self) -> usize {
        self.account().total_bytes
    }

    /// Bytes of living blocks.
    pub fn used_bytes(&self) -> usize {
        self.account().living_bytes
    }

    /// Highest [`Budget::used_bytes`] so far.
    pub fn peak_bytes(&self) -> usize {
        self.account().peak_bytes
    }

    fn account(&self) -> MutexGuard<'_, Account> {
        // Every change of the account is a complete one, so a panic elsewhere leaves it valid.
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lease(&self, inner: HostBytes) -> HostBytes {
        let budget = self.clone();
        inner.released_to(move |block| budget.account().give_back(block))
    }
}

impl Account {
    fn take(&mut self, len: usize) -> Result<HostBytes, BudgetError> {
        let cached = self.cached.get_mut(&len).and_then(Vec::pop);
        let block = match cached {
            Some(block) => block,
            None => {
                self.make_room(len)?;
                let scraps = self.scrap_bytes();
                let block = HostBytes::of_scraps(len, &mut self.scraps);
                self.held_bytes += len + self.scrap_bytes();
                self.held_bytes -= scraps;
                block
            }
        };
        self.living_bytes += len;
        self.peak_bytes = self.peak_bytes.max(self.living_bytes);
        assert!(self.living_bytes <= self.held_bytes && self.held_bytes <= self.total_bytes);
        Ok(block)
    }

    fn push_spare(&mut self, next_use: NextUse, spare: Arc<Spare>) {
        if self.spares.len() >= self.spares_most {
            self.spares.retain(|_, spare| spare.is_there());
            self.spares_most = SPARES_MIN.max(2 * self.spares.len());
        }
        // Whatever is kept now is kept for this step or the next one.
        self.step = self.step.max(next_use.step.saturating_sub(1));
        self.spare_count += 1;
        self.spares.insert((next_use, self.spare_count), spare);
    }

    /// The spare block that is needed last; before it one whose step is over: nobody came for it.
    fn pop_spare(&mut self) -> Option<Arc<Spare>> {
        let first = self.spares.first_entry()?;
        if first.key().0.step < self.step {
            return Some(first.remove());
        }
        self.spares.pop_last().map(|(_, spare)| spare)
    }

    fn give_back(&mut self, block: HostBytes) {
        self.living_bytes -= block.len();
        self.cached.entry(block.len()).or_default().push(block);
    }

    /// Makes room for a block of `len`, which takes over what it can of the scraps.
    fn make_room(&mut self, len: usize) -> Result<(), BudgetError> {
        loop {
            let reused = self.scrap_bytes().min(len / LARGE_BYTES * LARGE_BYTES);
            if self.held_bytes + len <= self.total_bytes + reused {
                return Ok(());
            }
            if let Some(block) = self.pop_cached() {
                self.held_bytes -= block.len();
                if let Some(pages) = block.into_pages().filter(|pages| pages.huge_bytes() > 0) {
                    self.held_bytes += pages.huge_bytes();
                    self.scraps.push(pages);
                }
            } else if self.scrap_bytes() > reused {
                let scrap = self.scraps.swap_remove(0);
                self.held_bytes -= scrap.huge_bytes();
            } else {
                return Err(BudgetError::Exhausted {
                    wanted_bytes: len,
                    used_bytes: self.living_bytes,
                    total_bytes: self.total_bytes,
                });
            }
        }
    }

    fn pop_cached(&mut self) -> Option<HostBytes> {
        loop {
            let mut entry = self.cached.last_entry()?;
            match entry.get_mut().pop() {
                Some(block) => return Some(block),
                None => entry.remove(),
            };
        }
    }

    fn scrap_bytes(&self) -> usize {
        self.scraps.iter().map(Pages::huge_bytes).sum()
    }
}

#[cfg(test)]
mod tests;
