//! Locking layers of a store in which no step is in flight.
//!
//! Invariants:
//! - one record locks or unlocks, in force from the next step on; a crash leaves one or the other;
//! - an unlocked layer has room for its next version before the record says so;
//! - at least one layer stays unlocked.

use model::LayerId;

use crate::record::{RecordKind, State};
use crate::slots::slot_bytes;
use crate::training::{Room, TrainingStore};
use crate::{StoreError, show_bytes};

impl TrainingStore {
    /// Locks `layers`: they are read, never trained. What they do not need any more goes after the
    /// next commit. Blocks.
    ///
    /// # Errors
    /// `Invalid` if no layer would be left to train.
    pub fn lock(&self, layers: &[LayerId]) -> Result<(), StoreError> {
        let state = self.with_locks(layers, true);
        if state.layers.iter().all(|layer| layer.locked) {
            return Err(StoreError::Invalid("that would leave no layer to train".into()));
        }
        self.commit_if_new(RecordKind::Locked, state)
    }

    /// Unlocks `layers`, whose next versions get their place first. Blocks.
    ///
    /// # Errors
    /// `NoSpace` with the bytes of all of them; nothing has changed then.
    pub fn unlock(&self, layers: &[LayerId]) -> Result<(), StoreError> {
        self.inner.check_poison()?;
        let now = self.state();
        let mut homeless = Vec::new();
        for &layer in layers {
            let state = &now.layers[layer.index()];
            let known = homeless.contains(&layer);
            if state.locked && !known && !self.inner.is_own(layer, state.slot.other())? {
                homeless.push(layer);
            }
        }
        let needed = homeless.iter().map(|layer| slot_bytes(self.table().layer(*layer))).sum();
        let available = self.inner.io.free_bytes(self.dir())?;
        if available < needed {
            return Err(StoreError::NoSpace { path: self.dir().to_owned(), needed, available });
        }
        for layer in homeless {
            self.inner.remake(layer, now.layers[layer.index()].slot.other())?;
        }
        self.commit_if_new(RecordKind::Unlocked, self.with_locks(layers, false))
    }

    fn with_locks(&self, layers: &[LayerId], locked: bool) -> State {
        let mut state = self.state();
        for layer in layers {
            state.layers[layer.index()].locked = locked;
        }
        state
    }

    fn commit_if_new(&self, kind: RecordKind, state: State) -> Result<(), StoreError> {
        let now = self.state();
        let same = now.layers.iter().zip(&state.layers).all(|(a, b)| a.locked == b.locked);
        if same { Ok(()) } else { self.commit_now(kind, state) }
    }
}

impl Room {
    /// Whether a step may begin.
    pub fn is_enough(&self) -> bool {
        self.available >= self.needed
    }
}

impl std::fmt::Display for Room {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (needed, available) = (show_bytes(self.needed), show_bytes(self.available));
        write!(f, "{needed} needed, {available} available")
    }
}
