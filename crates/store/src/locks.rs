//! Locking layers of a store in which no step is in flight.
//!
//! Invariants:
//! - one record locks or unlocks, in force from the next step on; a crash leaves one or the other;
//! - an unlocked layer has room for its next version before the record says so;
//! - at least one layer stays unlocked;
//! - the optimizer never reads a locked layer, and so never finds its damage: it is compared with its
//!   hashes when it is locked, at every opening, and its weights' whole chunks whenever they are read.

use std::sync::Arc;

use model::{CHUNK_ELEMENTS, LayerId, LayerSpec, Plane, Precision, Slot, Weights};

use crate::error::Done;
use crate::hashes;
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
        let bytes = |layer: LayerId| slot_bytes(self.layout(), self.table().layer(layer));
        let needed: Vec<_> = slots.iter().map(|(l, _)| (l.index(), bytes(*l))).collect();
        let room = self.inner.drives.room(&*self.inner.io, &needed, 0)?;
        if room.is_enough() {
            return Ok(());
        }
        let Room { path, needed, available } = room;
        Err(StoreError::NoSpace { path, needed, available })
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
        let planes = self.layout().weight_planes(Precision::Exact);
        let bytes = |spec: &LayerSpec| {
            planes.iter().map(|plane| plane.bytes(spec.elements()) as u64).sum::<u64>()
        };
        let (mut done, total) = (0, locked().map(bytes).sum());
        for spec in locked() {
            let slot = state.layers[spec.id.index()].slot;
            let Some(files) = self.inner.files_if_any(spec.id, slot) else { continue };
            for (plane, chunk) in
                files.weight_planes().flat_map(|p| (0..files.chunks()).map(move |c| (p, c)))
            {
                let (found, bytes) = files.hash_chunk(io, plane, chunk)?;
                self.check_plane((spec.id, slot), plane.spec.plane, chunk, found)?;
                done += bytes;
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
        idle.map(|(spec, _)| slot_bytes(self.layout(), spec)).sum()
    }

    /// `done`, with the whole chunks of a locked layer compared first; the weights start at its
    /// parameter `start`.
    pub(crate) fn guarding_locked(
        &self,
        layer: LayerId,
        slot: Slot,
        start: usize,
        done: Done<Weights>,
    ) -> Done<Weights> {
        if !self.inner.is_locked(layer) {
            return done;
        }
        let shared = TrainingStore { inner: Arc::clone(&self.inner) };
        Box::new(move |weights| {
            done(weights.and_then(|weights| {
                shared.compare_chunks((layer, slot), start, &weights)?;
                Ok(weights)
            }));
        })
    }

    fn compare_chunks(
        &self,
        (layer, slot): (LayerId, Slot),
        start: usize,
        weights: &Weights,
    ) -> Result<(), StoreError> {
        let end = start + weights.len();
        for chunk in start.div_ceil(CHUNK_ELEMENTS)..self.chunks(layer) {
            let elements = self.chunk_elements(layer, chunk);
            if elements.end > end {
                break;
            }
            for (spec, block) in self.layout().planes().iter().zip(weights.blocks()) {
                let within = spec.range(elements.start - start..elements.end - start);
                let found = hashes::hash(&block.bytes()[within]);
                self.check_plane((layer, slot), spec.plane, chunk, found)?;
            }
        }
        Ok(())
    }

    fn check_plane(
        &self,
        (layer, slot): (LayerId, Slot),
        plane: Plane,
        chunk: usize,
        found: u64,
    ) -> Result<(), StoreError> {
        let mut hashes = self.chunk_hashes(layer, slot, chunk);
        hashes[plane as usize] = found;
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
        self.lacking() == 0
    }

    pub(crate) fn lacking(&self) -> u64 {
        self.needed.saturating_sub(self.available)
    }
}

impl std::fmt::Display for Room {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (needed, available) = (show_bytes(self.needed), show_bytes(self.available));
        let path = self.path.display();
        write!(f, "{needed} needed, {available} available at {path}")
    }
}
