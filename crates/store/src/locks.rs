//! Locking layers of a store in which no step is in flight.
//!
//! Invariants:
//! - one record locks or unlocks, in force from the next step on; a crash leaves one or the other;
//! - an unlocked layer has room for its next version before the record says so;
//! - at least one layer stays unlocked;
//! - the optimizer never reads a locked layer, and so never finds its damage: it is compared with its
//!   hashes when it is locked, at every opening, and its weights' whole chunks whenever they are read.

use std::sync::Arc;

use model::{CHUNK_BYTES, HostBytes, LayerId, Plane, Slot};

use crate::error::Done;
use crate::hashes;
use crate::layout::plane_bytes;
use crate::record::{RecordKind, State};
use crate::slots::slot_bytes;
use crate::training::{Room, TrainingStore};
use crate::{StoreError, show_bytes};

impl TrainingStore {
    /// Locks `layers`: they are read, never trained. What they do not need any more goes after the
    /// next commit. Blocks.
    ///
    /// # Errors
    /// `Invalid` if no layer would be left to train; `Damaged` if one is not what was committed.
    pub fn lock(&self, layers: &[LayerId]) -> Result<(), StoreError> {
        let state = self.with_locks(layers, true);
        if state.layers.iter().all(|layer| layer.locked) {
            return Err(StoreError::Invalid("that would leave no layer to train".into()));
        }
        let now = self.state();
        for (spec, layer) in self.table().layers().iter().zip(&now.layers) {
            let files = self.inner.files_if_any(spec.id, layer.slot);
            if let Some(files) = files.filter(|_| !layer.locked && layers.contains(&spec.id)) {
                files.check(&*self.inner.io, layer, |_| ())?;
            }
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
            let (other, known) =
                (state.slot.other(), homeless.contains(&(layer, state.slot.other())));
            if state.locked && !known && !self.inner.is_own(layer, other)? {
                homeless.push((layer, other));
            }
        }
        self.check_room_for(&homeless)?;
        self.make_slots(&homeless)?;
        self.commit_if_new(RecordKind::Unlocked, self.with_locks(layers, false))
    }

    /// # Errors
    /// `NoSpace` with the bytes of all these slots.
    pub(crate) fn check_room_for(&self, slots: &[(LayerId, Slot)]) -> Result<(), StoreError> {
        let needed = slots.iter().map(|(layer, _)| slot_bytes(self.table().layer(*layer))).sum();
        let available = self.inner.io.free_bytes(self.dir())?;
        if available < needed {
            return Err(StoreError::NoSpace { path: self.dir().to_owned(), needed, available });
        }
        Ok(())
    }

    /// Gives inactive slots fresh files.
    pub(crate) fn make_slots(&self, slots: &[(LayerId, Slot)]) -> Result<(), StoreError> {
        slots.iter().try_for_each(|&(layer, slot)| self.inner.remake(layer, slot))
    }

    /// Compares the weights of locked layers with their hashes; `progress` gets bytes done and in all.
    /// Blocks.
    pub fn check_locked(&self, mut progress: impl FnMut(u64, u64)) -> Result<(), StoreError> {
        let (io, state) = (&*self.inner.io, self.state());
        let locked = || self.table().layers().iter().filter(|l| state.layers[l.id.index()].locked);
        let total = locked().map(plane_bytes).sum();
        let mut done = 0;
        for spec in locked() {
            let slot = state.layers[spec.id.index()].slot;
            let Some(files) = self.inner.files_if_any(spec.id, slot) else { continue };
            for chunk in 0..files.chunks() {
                let found = files.hash_chunk(io, Plane::Weight, chunk)?;
                self.check_weights_chunk(spec.id, slot, chunk, found)?;
                done += files.chunk_range(chunk).1 as u64;
                progress(done, total);
            }
        }
        Ok(())
    }

    /// Bytes that locked layers occupy and need no more: the next commits give them back.
    pub fn idle_bytes(&self) -> u64 {
        let (state, layers) = (self.state(), self.table().layers().iter());
        let idle = layers.zip(&state.layers).filter(|(spec, layer)| {
            layer.locked && self.inner.files_if_any(spec.id, layer.slot.other()).is_some()
        });
        idle.map(|(spec, _)| slot_bytes(spec)).sum()
    }

    /// `done`, with the whole chunks of a locked layer compared first; its block starts at byte
    /// `start` of the weights.
    pub(crate) fn guarding_locked(
        &self,
        layer: LayerId,
        slot: Slot,
        start: usize,
        done: Done<HostBytes>,
    ) -> Done<HostBytes> {
        if !self.inner.is_locked(layer) {
            return done;
        }
        let shared = TrainingStore { inner: Arc::clone(&self.inner) };
        Box::new(move |block| {
            done(block.and_then(|block| {
                shared.compare_chunks(layer, slot, start, &block)?;
                Ok(block)
            }));
        })
    }

    fn compare_chunks(
        &self,
        layer: LayerId,
        slot: Slot,
        start: usize,
        block: &HostBytes,
    ) -> Result<(), StoreError> {
        let data_bytes = plane_bytes(self.table().layer(layer));
        for chunk in start.div_ceil(CHUNK_BYTES)..self.chunks(layer) {
            let (first, len) = hashes::chunk_range(data_bytes, chunk);
            let within = first as usize - start;
            let Some(bytes) = block.bytes().get(within..within + len) else { break };
            self.check_weights_chunk(layer, slot, chunk, hashes::hash(bytes))?;
        }
        Ok(())
    }

    fn check_weights_chunk(
        &self,
        layer: LayerId,
        slot: Slot,
        chunk: usize,
        found: u64,
    ) -> Result<(), StoreError> {
        let mut hashes = self.chunk_hashes(layer, slot, chunk);
        hashes[Plane::Weight as usize] = found;
        self.check_chunk(layer, slot, chunk, hashes)
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
