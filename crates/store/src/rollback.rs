//! Going back: to a snapshot, or to the commit before the last; all layers or some.
//!
//! Invariants:
//! - what becomes live is compared with its hashes before anything is changed;
//! - one record makes it true: a crash leaves the old state or the new one;
//! - attempts never go back.

use model::{LayerId, Slot};

use crate::StoreError;
use crate::files;
use crate::hashes::ChunkHashes;
use crate::io::Access;
use crate::layout::slot_path;
use crate::opening::SlotTable;
use crate::record::{LayerState, RecordKind, State};
use crate::slots::{SlotFiles, slot_files};
use crate::snapshots::{self, Snapshot};
use crate::training::TrainingStore;

/// Where to go back to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RollBack<'n> {
    Snapshot(&'n str),
    /// The commit before the last one.
    Previous,
}

/// How a layer gets to its wanted version.
#[derive(Debug)]
enum Way {
    /// It is live already.
    Stay,
    /// The inactive slot has it, with these chunk hashes.
    Flip(Vec<ChunkHashes>),
    /// The inactive slot gets names for the snapshot's files, which have these chunk hashes.
    Link(Vec<ChunkHashes>),
}

/// A rollback whose versions have been found intact; nothing has changed yet.
#[derive(Debug)]
pub struct PreparedRollback<'s> {
    store: &'s TrainingStore,
    target: State,
    snapshot: Option<Snapshot>,
    ways: Vec<(LayerId, Way)>,
    /// Slots that a layer which gets unlocked lacks for its next version.
    homeless: Vec<(LayerId, Slot)>,
    /// Step, data cursor and locks go back as well.
    whole: bool,
}

impl PreparedRollback<'_> {
    /// What was true at the place to go back to.
    pub fn target(&self) -> &State {
        &self.target
    }

    /// Makes it true. Blocks; no step may be in flight.
    pub fn carry_out(self) -> Result<(), StoreError> {
        let PreparedRollback { store, target, snapshot, ways, homeless, whole } = self;
        store.make_slots(&homeless)?;
        let mut state = if whole { target.clone() } else { store.state() };
        state.attempt = store.state().attempt.max(target.attempt);
        for (layer, way) in ways {
            let slot = store.go(layer, way, snapshot.as_ref())?;
            let (was, now) = (&target.layers[layer.index()], &mut state.layers[layer.index()]);
            let locked = if whole { was.locked } else { now.locked };
            *now = LayerState { slot, locked, ..was.clone() };
        }
        store.commit_now(RecordKind::RolledBack, state)
    }
}

impl TrainingStore {
    /// Makes an earlier version of `layers` live, or of the whole model with its step, data cursor
    /// and locks. Of single layers only contents and Adam steps go back. `progress` gets bytes
    /// compared and in all. Blocks; no step may be in flight.
    ///
    /// # Errors
    /// `Invalid` if there is no such snapshot, or if the previous version is gone; `Damaged` if the
    /// snapshot does not match its hashes, or another layer stays damaged; `NoSpace` for the next
    /// versions of layers that get unlocked. Nothing has changed then.
    pub fn rollback(
        &self,
        to: RollBack<'_>,
        layers: Option<&[LayerId]>,
        progress: impl FnMut(u64, u64),
    ) -> Result<(), StoreError> {
        self.prepare_rollback(to, layers, progress)?.carry_out()
    }

    /// What [`TrainingStore::rollback`] does before it changes anything.
    pub fn prepare_rollback(
        &self,
        to: RollBack<'_>,
        layers: Option<&[LayerId]>,
        mut progress: impl FnMut(u64, u64),
    ) -> Result<PreparedRollback<'_>, StoreError> {
        self.inner.check_poison()?;
        let (target, snapshot) = self.target(to)?;
        let all: Vec<LayerId> = self.table().layers().iter().map(|layer| layer.id).collect();
        let chosen = layers.unwrap_or(&all);
        for damage in all.iter().filter(|id| !chosen.contains(id)).map(|&id| self.inner.damage(id))
        {
            damage.map_or(Ok(()), Err)?;
        }
        let (mut done, mut total) = (0, 0);
        for &layer in chosen {
            if !self.stays(layer, &target, snapshot.as_ref())? {
                total += 12 * self.table().layer(layer).elements() as u64;
            }
        }
        let mut ways = Vec::new();
        for &layer in chosen {
            let mut passed = |bytes| {
                done += bytes;
                progress(done, total);
            };
            ways.push((layer, self.way(layer, &target, snapshot.as_ref(), &mut passed)?));
        }
        let whole = layers.is_none();
        let homeless = if whole { self.homeless(&target, &ways) } else { Vec::new() };
        self.check_room_for(&homeless)?;
        Ok(PreparedRollback { store: self, target, snapshot, ways, homeless, whole })
    }

    /// Inactive slots that layers which `target` trains do not have.
    fn homeless(&self, target: &State, ways: &[(LayerId, Way)]) -> Vec<(LayerId, Slot)> {
        let now = self.state();
        let lacks = |(layer, way): &(LayerId, Way)| {
            let idle = now.layers[layer.index()].slot.other();
            let unlocked = !target.layers[layer.index()].locked;
            let lacks = matches!(way, Way::Stay) && self.inner.files_if_any(*layer, idle).is_none();
            (unlocked && lacks).then_some((*layer, idle))
        };
        ways.iter().filter_map(lacks).collect()
    }

    fn target(&self, to: RollBack<'_>) -> Result<(State, Option<Snapshot>), StoreError> {
        match to {
            RollBack::Snapshot(name) => {
                let io = &*self.inner.io;
                let found = snapshots::read(io, self.dir(), name, self.layout(), self.table())?;
                let snapshot = found.ok_or_else(|| self.no_snapshot(name))?;
                Ok((snapshot.state.clone(), Some(snapshot)))
            }
            RollBack::Previous => {
                let none = || StoreError::Invalid(gone("there was none"));
                Ok((self.inner.before().ok_or_else(none)?, None))
            }
        }
    }

    fn no_snapshot(&self, name: &str) -> StoreError {
        let known = self.snapshots().map(|(all, _)| all).unwrap_or_default();
        let names: Vec<&str> = known.iter().map(|snapshot| snapshot.name.as_str()).collect();
        let there = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
        StoreError::Invalid(format!("there is no snapshot `{name}`; there are: {there}"))
    }

    /// Whether the wanted version is live. A snapshot's is only if its own files are: equal contents
    /// elsewhere may have been damaged since, and going back is how that is healed.
    fn stays(
        &self,
        layer: LayerId,
        target: &State,
        snapshot: Option<&Snapshot>,
    ) -> Result<bool, StoreError> {
        let now = &self.state().layers[layer.index()];
        let equal = now.hashes == target.layers[layer.index()].hashes;
        if !equal || self.inner.damage(layer).is_some() {
            return Ok(false);
        }
        let Some(snapshot) = snapshot else { return Ok(true) };
        let spec = self.table().layer(layer);
        let dir = self.dir().join(slot_path(spec, now.slot));
        snapshot.shares(&*self.inner.io, spec, |name| dir.join(name))
    }

    fn way(
        &self,
        layer: LayerId,
        target: &State,
        snapshot: Option<&Snapshot>,
        passed: &mut dyn FnMut(u64),
    ) -> Result<Way, StoreError> {
        let (now, wanted) = (self.state(), &target.layers[layer.index()]);
        let now = &now.layers[layer.index()];
        if self.stays(layer, target, snapshot)? {
            return Ok(Way::Stay);
        }
        let (io, spec) = (&self.inner.io, self.table().layer(layer));
        if let Some(snapshot) = snapshot {
            let files = snapshot.open(io, spec, Access::Read)?;
            return Ok(Way::Link(files.check(&**io, wanted, passed)?));
        }
        let overwritten = || {
            let what = format!("layer {} was written again since then", spec.name);
            self.inner.damage(layer).unwrap_or_else(|| StoreError::Invalid(gone(&what)))
        };
        let inactive = now.slot.other();
        let files = self.inner.files_if_any(layer, inactive).filter(|_| wanted.slot == inactive);
        match files.ok_or_else(overwritten)?.check(&**io, wanted, passed) {
            Ok(chunks) => Ok(Way::Flip(chunks)),
            Err(StoreError::Damaged { .. }) => Err(overwritten()),
            Err(error) => Err(error),
        }
    }

    /// Prepares the slot that will be live; which one that is.
    fn go(
        &self,
        layer: LayerId,
        way: Way,
        snapshot: Option<&Snapshot>,
    ) -> Result<Slot, StoreError> {
        let live = self.state().layers[layer.index()].slot;
        let chunks = match (way, snapshot) {
            (Way::Link(chunks), Some(snapshot)) => {
                self.link(layer, live.other(), snapshot)?;
                chunks
            }
            (Way::Flip(chunks), _) => chunks,
            (Way::Stay | Way::Link(_), _) => return Ok(live),
        };
        self.inner.tables()[layer.index()][live.other() as usize] = SlotTable::live(chunks);
        Ok(live.other())
    }

    fn link(&self, layer: LayerId, slot: Slot, snapshot: &Snapshot) -> Result<(), StoreError> {
        let (io, spec) = (&self.inner.io, self.table().layer(layer));
        let layout = self.layout();
        let dir = self.dir().join(slot_path(spec, slot));
        io.create_dir(&dir)?;
        // Its files change under it.
        self.inner.set_files(layer, slot, None);
        for name in slot_files(layout) {
            files::remove_if_there(&**io, &dir.join(&name))?;
            io.link(&snapshot.path(spec, &name), &dir.join(&name))?;
        }
        self.inner.sync_slot_dir(&dir)?;
        let files = SlotFiles::open(io, self.dir(), layout, spec, slot, Access::ReadWrite)?;
        self.inner.set_files(layer, slot, Some(files));
        Ok(())
    }
}

fn gone(why: &str) -> String {
    format!("the commit before the last one is gone: {why}; snapshots stay")
}
