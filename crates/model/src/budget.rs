//! [`Budget`]: the hard cap on host memory that blocks are leased from.
//!
//! Invariants:
//! - the bytes of living, spare and cached blocks never exceed the budget;
//! - a spare block goes whenever somebody needs its room: it is never in the way.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::HostBytes;

/// Why memory was refused.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum BudgetError {
    #[error(
        "the memory budget of {given_bytes} bytes is too small: this run needs at least \
         {needed_bytes} bytes ({parts}); raise --ram{remedy}"
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

#[derive(Debug)]
struct Account {
    total_bytes: usize,
    /// Living and cached blocks.
    held_bytes: usize,
    living_bytes: usize,
    peak_bytes: usize,
    cached: BTreeMap<usize, Vec<HostBytes>>,
    /// Blocks whose contents may be of use, the longest kept first.
    spares: VecDeque<Arc<Spare>>,
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
            spares: VecDeque::new(),
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
            let oldest = self.account().spares.pop_front();
            // Dropped outside the account's lock, which its lease takes.
            drop(oldest.ok_or(refused)?.take());
        }
    }

    /// Keeps a block that was leased here for as long as nobody needs its room. The longest kept go
    /// first: what was read last is what the way back needs first.
    pub fn spare(&self, block: HostBytes) -> Arc<Spare> {
        let spare = Arc::new(Spare { block: Mutex::new(Some(block)) });
        let mut account = self.account();
        account.spares.retain(|spare| spare.is_there());
        account.spares.push_back(Arc::clone(&spare));
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
                self.held_bytes += len;
                HostBytes::zeroed(len)
            }
        };
        self.living_bytes += len;
        self.peak_bytes = self.peak_bytes.max(self.living_bytes);
        assert!(self.living_bytes <= self.held_bytes && self.held_bytes <= self.total_bytes);
        Ok(block)
    }

    fn give_back(&mut self, block: HostBytes) {
        self.living_bytes -= block.len();
        self.cached.entry(block.len()).or_default().push(block);
    }

    fn make_room(&mut self, len: usize) -> Result<(), BudgetError> {
        while self.held_bytes + len > self.total_bytes {
            let Some(mut entry) = self.cached.last_entry() else {
                return Err(BudgetError::Exhausted {
                    wanted_bytes: len,
                    used_bytes: self.living_bytes,
                    total_bytes: self.total_bytes,
                });
            };
            match entry.get_mut().pop() {
                Some(block) => self.held_bytes -= block.len(),
                None => {
                    entry.remove();
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
