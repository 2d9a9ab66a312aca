//! [`Inner`]: what a [`TrainingStore`](super::TrainingStore) and its operations in flight share.
//!
//! Invariants:
//! - slots get and lose files only under `readying`, or while no step is in flight;
//! - the first failure that poisons is the one that is told.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock};

use model::{Budget, LayerId, Slot};

use crate::drives::Drives;
use crate::error::{Done, StoreError};
use crate::hashes::layer_hashes;
use crate::io::{Access, Guard, Handle, Io, IoDone, IoError, Lock, Pool};
use crate::layout::{INDEX_FILE, Layout, STORE_FILE};
use crate::log::{self, Log};
use crate::opening::{Broken, Pair, SlotTable};
use crate::record::State;
use crate::slots::{SlotFiles, remake_slot, remove_slot};
use crate::unsaved::Allowance;

pub(crate) struct Inner {
    pub(crate) io: Arc<dyn Io>,
    pub(crate) dir: PathBuf,
    /// Where the layers are.
    pub(crate) drives: Drives,
    pub(super) budget: Budget,
    /// For chunks that wait to be saved.
    pub(super) allowance: Allowance,
    /// Copy what waits to its readers, from the first time on.
    pub(super) copiers: OnceLock<Pool>,
    pub(crate) layout: Layout,
    pub(super) config_json: String,
    pub(super) slots: RwLock<Vec<Pair>>,
    pub(super) tables: Mutex<Vec<[SlotTable; 2]>>,
    /// Layers whose live slot could not be used at the opening.
    pub(super) broken: Vec<Broken>,
    pub(super) chain: Mutex<Chain>,
    /// Held while files of slots are made, replaced or removed.
    pub(super) readying: Mutex<()>,
    /// Locked layers may still have an inactive slot that nobody needs any more.
    pub(super) may_have_idle: AtomicBool,
    /// Whether an index may be there that points into slots about to be written. Held while it is
    /// removed: nobody writes before that is durable.
    pub(super) may_have_index: Mutex<bool>,
    /// The first failure that poisoned the store, and whether it was damage.
    pub(super) poison: Mutex<Option<(String, bool)>>,
    /// `store.json`, to see whether the directory is still where it was.
    pub(super) home: Handle,
    /// Declared last: given up after everything else.
    pub(super) _lock: Lock,
}

impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inner").field("dir", &self.dir).finish_non_exhaustive()
    }
}

pub(super) struct Chain {
    pub(super) state: State,
    /// What was true before the last record, if that is known.
    pub(super) before: Option<State>,
    pub(super) log: Log,
    /// The slots of the commit in flight.
    pub(super) committing: Option<Vec<Slot>>,
}

impl Inner {
    /// # Panics
    /// For an inactive slot without files: a programmer's error.
    pub(super) fn files(&self, layer: LayerId, slot: Slot) -> Arc<SlotFiles> {
        let Some(files) = self.files_if_any(layer, slot) else {
            panic!("slot {} of layer {layer} has no files", slot.name())
        };
        files
    }

    pub(crate) fn files_if_any(&self, layer: LayerId, slot: Slot) -> Option<Arc<SlotFiles>> {
        let slots = self.slots.read().unwrap_or_else(PoisonError::into_inner);
        slots[layer.index()][slot as usize].clone()
    }

    pub(crate) fn set_files(&self, layer: LayerId, slot: Slot, files: Option<SlotFiles>) {
        let mut slots = self.slots.write().unwrap_or_else(PoisonError::into_inner);
        slots[layer.index()][slot as usize] = files.map(Arc::new);
    }

    pub(crate) fn is_locked(&self, layer: LayerId) -> bool {
        self.chain().state.layers[layer.index()].locked
    }

    /// The files of an inactive slot that may be written: those that are there, or fresh ones.
    pub(super) fn ready_slot(
        &self,
        layer: LayerId,
        slot: Slot,
    ) -> Result<Arc<SlotFiles>, StoreError> {
        let _one = held(&self.readying);
        if !self.tables()[layer.index()][slot as usize].writable {
            self.check_place()?;
            self.remove_idle_now()?;
            if !self.is_own(layer, slot)? {
                self.remake(layer, slot)?;
            }
            self.tables()[layer.index()][slot as usize].writable = true;
        }
        Ok(self.files(layer, slot))
    }

    /// Fails if the directory or its log is not where it was: what is looked up by name would be made
    /// anew there, beside the files that are open. One copy of the log is enough.
    pub(super) fn check_place(&self) -> Result<(), StoreError> {
        let (number, copies) = {
            let chain = self.chain();
            (chain.log.number, chain.log.file_ids())
        };
        let is_there = |(copy, file)| self.io.is_at(file, &log::path(&self.dir, number, copy));
        let mut logs = log::COPIES.into_iter().zip(copies).map(is_there);
        let home = self.io.is_at(self.home.id(), &self.dir.join(STORE_FILE))?;
        if home && logs.try_fold(false, |any, there| Ok::<_, IoError>(any | there?))? {
            return Ok(());
        }
        let what = if home { "its commit log was removed" } else { "it was moved or removed" };
        let cause = format!("{}: {what} while it was open for training", self.dir.display());
        self.poison(cause, false);
        self.check_poison()
    }

    /// A failure in the store's directory; of one that is gone it is told that it is.
    pub(super) fn explained(&self, error: IoError) -> StoreError {
        if error.source.kind() == io::ErrorKind::NotFound
            && let Err(moved) = self.check_place()
        {
            return moved;
        }
        self.poison_if_lost(&error);
        error.into()
    }

    /// Passes the last commit to `act`, while which no slot gets other files, nor its first write.
    pub(crate) fn while_slots_stay<T>(&self, act: impl FnOnce(State) -> T) -> T {
        let _one = held(&self.readying);
        let state = self.chain().state.clone();
        act(state)
    }

    /// What is wrong with the live slot of a layer, if it cannot be used.
    pub(crate) fn damage(&self, layer: LayerId) -> Option<StoreError> {
        let live = self.chain().state.layers[layer.index()].slot;
        self.broken.iter().find(|broken| self.stays_broken(broken, layer, live)).map(Broken::error)
    }

    /// Refuses a state in which a broken slot would be live.
    pub(super) fn check_whole(&self, state: &State) -> Result<(), StoreError> {
        let live = |layer: LayerId| state.layers[layer.index()].slot;
        let is_live = |b: &&Broken| self.stays_broken(b, b.layer, live(b.layer));
        self.broken.iter().find(is_live).map_or(Ok(()), |broken| Err(broken.error()))
    }

    /// Whether `broken` is of this layer, and the slot has got no files since.
    fn stays_broken(&self, broken: &Broken, layer: LayerId, slot: Slot) -> bool {
        broken.layer == layer && self.files_if_any(layer, slot).is_none()
    }

    /// Whether a slot has files and nobody else a name for them.
    pub(crate) fn is_own(&self, layer: LayerId, slot: Slot) -> Result<bool, StoreError> {
        let Some(files) = self.files_if_any(layer, slot) else { return Ok(false) };
        if self.io.is_off(Guard::SecondName) {
            return Ok(true);
        }
        let planes = files.planes.iter().map(|plane| &plane.path);
        for path in planes.chain([&files.hashes_path]) {
            match self.io.link_count(path) {
                Ok(1) => {}
                Ok(_) => return Ok(false),
                Err(error) if error.source.kind() == io::ErrorKind::NotFound => return Ok(false),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(true)
    }

    /// Gives an inactive slot fresh files, whose names are durable.
    pub(crate) fn remake(&self, layer: LayerId, slot: Slot) -> Result<(), StoreError> {
        let spec = self.layout.table.layer(layer);
        let layout = self.layout.state();
        let dir = remake_slot(&*self.io, &self.dir, layout, spec, slot)?;
        self.sync_slot_dir(&dir)?;
        let files = SlotFiles::open(&self.io, &self.dir, layout, spec, slot, Access::ReadWrite)?;
        self.tables()[layer.index()][slot as usize] = SlotTable::inactive(files.chunks());
        self.set_files(layer, slot, Some(files));
        Ok(())
    }

    /// Makes the names in a slot durable, and the slot's own, which may be as new.
    pub(crate) fn sync_slot_dir(&self, dir: &Path) -> Result<(), StoreError> {
        for dir in [Some(dir), dir.parent()].into_iter().flatten() {
            self.io.sync_dir(dir).inspect_err(|error| self.poison_if_lost(error))?;
        }
        Ok(())
    }

    /// Removes what locked layers need no more, once a commit has passed since the lock.
    pub(super) fn remove_idle(&self) -> Result<(), StoreError> {
        let _one = held(&self.readying);
        self.remove_idle_now()
    }

    pub(super) fn remove_idle_now(&self) -> Result<(), StoreError> {
        if !self.may_have_idle.swap(false, Ordering::Relaxed) {
            return Ok(());
        }
        let (state, before) = {
            let chain = self.chain();
            (chain.state.clone(), chain.before.clone())
        };
        let Some(before) = before else { return Ok(()) };
        for (spec, (now, then)) in
            self.layout.table.layers().iter().zip(state.layers.iter().zip(&before.layers))
        {
            let idle = now.slot.other();
            if now.locked && then.locked && self.files_if_any(spec.id, idle).is_some() {
                self.set_files(spec.id, idle, None);
                remove_slot(&*self.io, &self.dir, self.layout.state(), spec, idle)?;
            }
        }
        Ok(())
    }

    /// A log that has become long gives way to one that restates the state.
    pub(super) fn begin_log_if_long(&self) -> Result<(), StoreError> {
        let (number, sequence, before, state) = {
            let chain = self.chain();
            if !chain.log.is_long() {
                return Ok(());
            }
            let (before, state) = (chain.before.clone(), chain.state.clone());
            (chain.log.number, chain.log.next_sequence, before, state)
        };
        // Half of a new log outranks this one, so that a failure is the end of this opening.
        let log = log::start(&self.io, &self.dir, number + 1, sequence, before.as_ref(), &state)
            .map_err(IoError::losing_writes)
            .inspect_err(|error| self.poison_if_lost(error))?;
        self.chain().log = log;
        for copy in log::COPIES {
            // What stays is removed by the next opening.
            let _ = self.io.unlink(&log::path(&self.dir, number, copy));
        }
        Ok(())
    }

    /// A record of `record_bytes` that says `state` is durable.
    pub(super) fn now_true(&self, state: State, record_bytes: u64) {
        let mut tables = self.tables();
        for (layer, slots) in state.layers.iter().zip(tables.iter_mut()) {
            // A snapshot may have got a name for it while it was live.
            slots[layer.slot.other() as usize].writable = false;
        }
        drop(tables);
        let mut chain = self.chain();
        chain.before = Some(std::mem::replace(&mut chain.state, state));
        chain.log.end += record_bytes;
        chain.log.next_sequence += 1;
        chain.committing = None;
        self.may_have_idle.store(true, Ordering::Relaxed);
    }

    pub(super) fn assert_inactive(&self, layer: LayerId, slot: Slot) {
        let (live, pending) = {
            let chain = self.chain();
            let pending = chain.committing.as_ref().map(|slots| slots[layer.index()]);
            let state = &chain.state.layers[layer.index()];
            assert!(!state.locked, "layer {layer} is locked");
            (state.slot, pending)
        };
        let is_off = |guard| self.io.is_off(guard);
        assert!(
            slot != live || is_off(Guard::LiveSlot),
            "layer {layer}: a live slot is never written"
        );
        assert!(
            Some(slot) != pending || is_off(Guard::PendingSlot),
            "layer {layer}: the slot of a commit in flight is live"
        );
    }

    pub(super) fn assert_committable(&self, state: &State) {
        if self.io.is_off(Guard::FinishedSlots) {
            return;
        }
        let tables = self.tables();
        assert_eq!(state.layers.len(), tables.len(), "a state names every layer");
        for (index, (layer, slots)) in state.layers.iter().zip(tables.iter()).enumerate() {
            let table = &slots[layer.slot as usize];
            assert!(table.hashes_written && !table.unsynced, "layer {index} is not synced");
            let layout = self.layout.state();
            let hashes = table.complete().map(|chunks| layer_hashes(layout, &chunks));
            assert_eq!(Some(layer.hashes), hashes, "layer {index} has other hashes");
        }
    }

    /// Other software must not follow an old index into a slot that changes; until the first write
    /// it is right.
    pub(super) fn remove_index(&self) -> Result<(), StoreError> {
        let mut may_have_index = held(&self.may_have_index);
        if !*may_have_index {
            return Ok(());
        }
        let unlinked = match self.io.unlink(&self.dir.join(INDEX_FILE)) {
            Err(error) if error.source.kind() == io::ErrorKind::NotFound => Ok(()),
            done => done,
        };
        // An earlier removal may not be durable yet, so an absent index is synced as well.
        let removed = unlinked.and_then(|()| self.io.sync_dir(&self.dir));
        removed.map_err(|error| self.explained(error))?;
        *may_have_index = false;
        Ok(())
    }

    pub(crate) fn check_poison(&self) -> Result<(), StoreError> {
        match &*held(&self.poison) {
            Some((cause, damaged)) if !self.io.is_off(Guard::Poison) => {
                Err(StoreError::Poisoned { cause: cause.clone(), damaged: *damaged })
            }
            Some(_) | None => Ok(()),
        }
    }

    pub(super) fn poison(&self, cause: String, damaged: bool) {
        held(&self.poison).get_or_insert((cause, damaged));
    }

    pub(crate) fn poison_if_lost(&self, error: &IoError) {
        if error.lost_writes {
            self.poison(error.to_string(), false);
        }
    }

    /// Reports to `done`, after `succeeded`, and poisons the store when writes were lost.
    pub(super) fn finish(
        self: &Arc<Inner>,
        done: Done<()>,
        succeeded: impl FnOnce() + Send + 'static,
    ) -> IoDone {
        let inner = Arc::clone(self);
        Box::new(move |result| {
            match &result {
                Ok(()) => succeeded(),
                Err(error) => inner.poison_if_lost(error),
            }
            done(result.map_err(Into::into));
        })
    }

    /// [`Inner::finish`] where every error means that nobody knows what is on the disk.
    pub(super) fn finish_or_poison(
        self: &Arc<Inner>,
        done: Done<()>,
        succeeded: impl FnOnce() + Send + 'static,
    ) -> IoDone {
        let finished = self.finish(done, succeeded);
        Box::new(move |result| finished(result.map_err(IoError::losing_writes)))
    }

    /// What was true before the last record, if that is known.
    pub(crate) fn before(&self) -> Option<State> {
        self.chain().before.clone()
    }

    pub(super) fn chain(&self) -> MutexGuard<'_, Chain> {
        held(&self.chain)
    }

    pub(crate) fn tables(&self) -> MutexGuard<'_, Vec<[SlotTable; 2]>> {
        held(&self.tables)
    }
}

fn held<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Every change under these locks is complete or followed by a panic that ends the step.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
