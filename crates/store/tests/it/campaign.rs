//! The freeze campaign: everything that power failures, rot, a lost write or a careless caller may do
//! to a store, and what must be left of it. It can be run with one guard, or one kind of sync, off.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use model::{Budget, LayerId, Slot};
use store::{
    Fault, Faulty, Guard, Image, Io, OpKind, ReadingStore, RollBack, State, StoreError,
    TrainingStore, blocking,
};

use crate::support::{DIR, HeldSyncs, LOCK_WAIT, fresh_image, train_step, value, write_layer};

/// What is broken on purpose.
#[derive(Clone, Copy, Default)]
pub(crate) struct Rig {
    pub(crate) off: Option<Guard>,
    /// Syncs of which files and directories do nothing.
    pub(crate) lies: Option<fn(&Path) -> bool>,
}

/// A threat, and what looks whether a store stands it.
type Part = (&'static str, fn(&Rig) -> Result<(), String>);

const PARTS: [Part; 8] = [
    ("rot", rot),
    ("a rotten record", rotten_record),
    ("careless callers", careless_callers),
    ("lost writes", lost_writes),
    ("a torn record", torn_record),
    ("power failures while training", |rig| freeze(rig, &train)),
    ("power failures around snapshots", |rig| freeze(rig, &go_through_history)),
    ("power failures around locks", |rig| freeze(rig, &lock_and_unlock)),
];

/// Runs the campaign; the `Err` says what was noticed.
pub(crate) fn run(rig: &Rig) -> Result<(), String> {
    for (name, part) in PARTS {
        let told = catch_unwind(AssertUnwindSafe(|| part(rig)));
        told.unwrap_or_else(|panic| Err(message(&*panic))).map_err(|e| format!("{name}: {e}"))?;
    }
    Ok(())
}

fn message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_owned())).unwrap_or_default()
}

impl Rig {
    fn disk(&self, image: Image) -> Arc<Faulty> {
        let faulty = Arc::new(Faulty::over_memory(image));
        self.off.into_iter().for_each(|guard| faulty.turn_off(guard));
        self.lies.into_iter().for_each(|about| faulty.lie(about));
        faulty
    }
}

fn open(disk: &Arc<Faulty>) -> Result<TrainingStore, StoreError> {
    let io: Arc<dyn Io> = disk.clone();
    TrainingStore::open(io, Path::new(DIR), Budget::new(64 << 20), Duration::ZERO).map(|o| o.0)
}

fn read(disk: &Arc<Faulty>) -> Result<ReadingStore, StoreError> {
    let io: Arc<dyn Io> = disk.clone();
    ReadingStore::open(io, Path::new(DIR), LOCK_WAIT)
}

/// A store at step `steps`, after `more`.
fn stored(steps: u64, more: impl FnOnce(&TrainingStore)) -> Image {
    let disk = Arc::new(Faulty::over_memory(fresh_image()));
    let store = open(&disk).unwrap();
    (0..steps).for_each(|_| train_step(&store).unwrap());
    more(&store);
    store.close().unwrap();
    // Nothing is pending: everything was synced.
    disk.image_after_crash(0)
}

/// Something done to an open store, step by step: after each one its state is noted.
type Deed = dyn Fn(&TrainingStore, &mut Vec<State>) -> Result<(), StoreError>;

fn train(store: &TrainingStore, seen: &mut Vec<State>) -> Result<(), StoreError> {
    for step in 0..3 {
        train_step(store)?;
        seen.push(store.state());
        store.write_run(&format!("{{\"step\": {step}, \"filler\": \"{}\"}}", "x".repeat(700)))?;
    }
    Ok(())
}

fn go_through_history(store: &TrainingStore, seen: &mut Vec<State>) -> Result<(), StoreError> {
    store.snapshot("new")?;
    for _ in 0..2 {
        train_step(store)?;
        seen.push(store.state());
    }
    store.rollback(RollBack::Snapshot("new"), None, |_, _| {})?;
    seen.push(store.state());
    train_step(store)?;
    seen.push(store.state());
    Ok(())
}

fn lock_and_unlock(store: &TrainingStore, seen: &mut Vec<State>) -> Result<(), StoreError> {
    store.lock(&[LayerId(0), LayerId(2)])?;
    seen.push(store.state());
    for _ in 0..2 {
        train_step(store)?;
        seen.push(store.state());
    }
    store.unlock(&[LayerId(0)])?;
    seen.push(store.state());
    train_step(store)?;
    seen.push(store.state());
    Ok(())
}

/// Freezes at every write, sync and name change of a deed; the store must be in the last state that was
/// acknowledged, or in the next one.
fn freeze(rig: &Rig, deed: &Deed) -> Result<(), String> {
    let image = stored(1, |store| store.snapshot("old").unwrap());
    let perform = |disk: &Arc<Faulty>| {
        let mut seen = Vec::new();
        let Ok(store) = open(disk) else { return seen };
        seen.push(store.state());
        // What fails is told by what was seen until then.
        if deed(&store, &mut seen).is_ok() {
            let _ = store.close();
        }
        seen
    };
    let whole = rig.disk(image.clone());
    let mut all = vec![read(&whole).map_err(|e| e.to_string())?.state().clone()];
    all.extend(perform(&whole));
    for kind in [OpKind::Write, OpKind::Sync, OpKind::Namespace] {
        for nth in 1..=whole.count(kind) {
            let disk = rig.disk(image.clone());
            disk.freeze_at(kind, nth);
            let reached = perform(&disk).len();
            let allowed = &all[reached..all.len().min(reached + 2)];
            for seed in 0..3 {
                let crashed = disk.image_after_crash(seed * 7919 + nth);
                let place = |e: String| format!("{kind:?} {nth} seed {seed}: {e}");
                recover(rig, &crashed, allowed).map_err(place)?;
            }
        }
    }
    Ok(())
}

/// The image itself, and what is left of it without one of the log's copies.
fn recover(rig: &Rig, crashed: &Image, allowed: &[State]) -> Result<(), String> {
    recovered(rig, crashed, allowed)?;
    for copy in ["log", "mirror"] {
        let mut one = crashed.clone();
        one.files.retain(|path, _| path.extension().is_none_or(|e| e != copy));
        recovered(rig, &one, allowed).map_err(|e| format!("without .{copy}: {e}"))?;
    }
    Ok(())
}

fn recovered(rig: &Rig, image: &Image, allowed: &[State]) -> Result<(), String> {
    let told = |e: StoreError| e.to_string();
    let disk = rig.disk(image.clone());
    let seen = read(&disk).map_err(told)?;
    let is = |state: &State| {
        let (a, b) = (seen.state(), state);
        let same = a
            .layers
            .iter()
            .zip(&b.layers)
            .all(|(a, b)| (a.hashes, a.t, a.locked) == (b.hashes, b.t, b.locked));
        (a.step, a.index) == (b.step, b.index) && same
    };
    if !allowed.iter().any(is) {
        return Err(format!("step {} is neither the last nor the next", seen.state().step));
    }
    let damage = seen.verify(|_, _| {}).map_err(told)?;
    if !damage.is_empty() {
        return Err(format!("{} is damaged", damage[0].file.display()));
    }
    let (snapshots, unusable) = seen.snapshots().map_err(told)?;
    if !unusable.is_empty() || !snapshots.iter().any(|s| s.name == "old") {
        return Err(format!("snapshots: {unusable:?}"));
    }
    if let Some(run) = seen.read_run().map_err(told)? {
        serde_json::from_str::<serde_json::Value>(&run).map_err(|e| format!("run.json: {e}"))?;
    }
    index_is_right(image, seen.state())?;
    drop(seen);
    let store = open(&disk).map_err(told)?;
    contents_are_right(&store)?;
    train_step(&store).map_err(told)?;
    store.rollback(RollBack::Snapshot("old"), None, |_, _| {}).map_err(told)?;
    contents_are_right(&store)
}

/// Where there is an index, it is whole and points into live slots.
fn index_is_right(image: &Image, state: &State) -> Result<(), String> {
    let path = Path::new(DIR).join("model.safetensors.index.json");
    let Some(text) = image.files.get(&path) else { return Ok(()) };
    let index: serde_json::Value =
        serde_json::from_slice(text).map_err(|e| format!("the index: {e}"))?;
    for (layer, state) in crate::support::table().layers().iter().zip(&state.layers) {
        let file = format!("layers/{}/{}/weight.safetensors", layer.name, state.slot.name());
        if index["weight_map"][&layer.tensors[0].name] != file {
            return Err(format!("the index does not point to {file}"));
        }
    }
    Ok(())
}

/// Every live chunk matches its hash and is what that layer was trained to.
fn contents_are_right(store: &TrainingStore) -> Result<(), String> {
    for (index, layer) in store.state().layers.iter().enumerate() {
        let id = LayerId(index as u32);
        for chunk in 0..store.chunks(id) {
            let read = blocking(|done| store.read_chunk(id, layer.slot, chunk, done));
            let read = read.map_err(|e| e.to_string())?;
            store.check_chunk(id, layer.slot, chunk, read.hashes()).map_err(|e| e.to_string())?;
            let first = store.chunk_elements(id, chunk).start;
            let known = (0..=store.state().step.0 + 4).any(|step| {
                value(id, model::Plane::Weight, step, first)
                    == read.plane(model::Plane::Weight).f32s()[0]
            });
            if !known {
                return Err(format!("layer {index} holds what nobody wrote"));
            }
        }
    }
    Ok(())
}

/// A flipped bit anywhere that counts is told or healed, and never trained on.
fn rot(rig: &Rig) -> Result<(), String> {
    let image = stored(2, |store| store.snapshot("old").unwrap());
    let state = read(&Arc::new(Faulty::over_memory(image.clone()))).unwrap().state().clone();
    let slot = |layer: &str, index: usize| {
        Path::new(DIR).join("layers").join(layer).join(state.layers[index].slot.name())
    };
    let other = |layer: &str, index: usize| {
        Path::new(DIR).join("layers").join(layer).join(state.layers[index].slot.other().name())
    };
    type Change = Box<dyn Fn(&mut Image)>;
    let flip = |path: std::path::PathBuf, from_end: usize| -> Change {
        Box::new(move |image: &mut Image| {
            let file = image.files.get_mut(&path).unwrap();
            let at = file.len() - from_end;
            file[at] ^= 4;
        })
    };
    let (live, stale) = (slot("1", 2), other("1", 2));
    let config = Path::new(DIR).join("config.json");
    let changes: Vec<(&str, Change)> = vec![
        ("a weight", flip(slot("0", 1).join("weight.safetensors"), 5)),
        ("a moment", flip(slot("embed", 0).join("exp_avg_sq.safetensors"), 9)),
        ("the checksum of a hashes file", flip(slot("0", 1).join("hashes"), 3)),
        (
            "another version of a layer",
            Box::new(move |image| {
                let planes =
                    ["weight", "exp_avg", "exp_avg_sq"].map(|p| format!("{p}.safetensors"));
                for name in planes.into_iter().chain(["hashes".to_owned()]) {
                    let file = image.files[&stale.join(&name)].clone();
                    image.files.insert(live.join(name), file);
                }
            }),
        ),
        (
            "a config of the same shape",
            Box::new(move |image| {
                let text = String::from_utf8(image.files[&config].clone()).unwrap();
                let text = text.replacen('{', "{\"rope_theta\":20000,", 1);
                image.files.insert(config.clone(), text.into_bytes());
            }),
        ),
    ];
    for (what, change) in changes {
        let mut hurt = image.clone();
        change(&mut hurt);
        let disk = rig.disk(hurt);
        let told = match open(&disk) {
            Err(StoreError::Damaged { .. }) => true,
            Err(error) => return Err(format!("{what}: {error}")),
            Ok(store) => contents_are_right(&store).is_err_and(|e| e.contains("is damaged")),
        };
        if !told {
            return Err(format!("{what} is not noticed"));
        }
    }
    Ok(())
}

/// A flipped bit in both copies of the last record: whatever it said is not believed.
fn rotten_record(rig: &Rig) -> Result<(), String> {
    let mut image = stored(2, |_| ());
    for (path, bytes) in &mut image.files {
        if path.parent() == Some(&Path::new(DIR).join("commit")) {
            let last = bytes.windows(4).rposition(|window| window == b"FTRC").unwrap();
            // The first byte of its body: the step.
            bytes[last + 20] ^= 1;
        }
    }
    match open(&rig.disk(image)) {
        Err(StoreError::Damaged { .. }) => Ok(()),
        Err(error) => Err(error.to_string()),
        Ok(store) if store.state().step.0 == 1 => contents_are_right(&store),
        Ok(store) => Err(format!("a record that says step {} is believed", store.state().step)),
    }
}

/// Calls that no correct trainer makes are refused.
fn careless_callers(rig: &Rig) -> Result<(), String> {
    let refused = |what: &str, call: &dyn Fn(&TrainingStore)| {
        let store = open(&rig.disk(stored(1, |_| ()))).unwrap();
        match catch_unwind(AssertUnwindSafe(|| call(&store))) {
            Ok(()) => Err(format!("{what} is not refused")),
            Err(_) => Ok(()),
        }
    };
    refused("a write into a live slot", &|store| {
        let live = store.state().layers[0].slot;
        let _ = write_layer(store, LayerId(0), live, 9);
    })?;
    refused("a commit of slots that are not synced", &|store| {
        let mut state = store.state();
        let layer = &mut state.layers[0];
        layer.slot = layer.slot.other();
        layer.hashes = write_layer(store, LayerId(0), layer.slot, 2).unwrap();
        let _ = blocking(|done| store.commit(store::RecordKind::Committed, state, done));
    })?;
    pending_slot(rig)
}

/// After a sync that failed nothing is believed until the store is opened again.
fn lost_writes(rig: &Rig) -> Result<(), String> {
    let image = stored(1, |store| store.snapshot("old").unwrap());
    let clean = rig.disk(image.clone());
    let mut store = open(&clean).unwrap();
    let before = clean.count(OpKind::Sync);
    train_step(&store).unwrap();
    let syncs = clean.count(OpKind::Sync) - before;
    for nth in 1..=syncs {
        let disk = rig.disk(image.clone());
        store = open(&disk).unwrap();
        let first = store.state();
        disk.fail(OpKind::Sync, before + nth, Fault::Eio);
        let mut allowed = vec![first];
        // The caller tries again, as if nothing had happened.
        for _ in 0..3 {
            if train_step(&store).is_ok() {
                allowed = vec![store.state()];
            }
        }
        if allowed[0].step.0 > 1 {
            let crashed = disk.image_after_crash(nth);
            return recovered(rig, &crashed, &allowed)
                .and(Err(format!("a step was committed after sync {nth} had failed")));
        }
    }
    drop(store);
    Ok(())
}

/// Behind a record that was torn nothing is taken for granted.
fn torn_record(rig: &Rig) -> Result<(), String> {
    let mut image = stored(2, |_| ());
    let disk = Arc::new(Faulty::over_memory(image.clone()));
    let state = read(&disk).unwrap().state().clone();
    for (path, bytes) in &mut image.files {
        if path.parent() == Some(&Path::new(DIR).join("commit")) {
            bytes.extend([0x46; 40]);
        }
        let live = Path::new(DIR).join("layers/0").join(state.layers[1].slot.name());
        if path.parent() == Some(&live) && path.ends_with("exp_avg.safetensors") {
            *bytes.last_mut().unwrap() ^= 1;
        }
    }
    match open(&rig.disk(image)) {
        Err(StoreError::Damaged { .. }) => Ok(()),
        Ok(_) => Err("damage in a live slot is not looked for".into()),
        Err(error) => Err(error.to_string()),
    }
}

/// A slot that a commit in flight makes live is as good as live.
fn pending_slot(rig: &Rig) -> Result<(), String> {
    let io: Arc<dyn Io> = rig.disk(stored(1, |_| ()));
    let held = Arc::new(HeldSyncs::new(io));
    let io: Arc<dyn Io> = held.clone();
    let (store, _) = crate::support::open(&io, Path::new(DIR)).unwrap();
    let mut state = store.state();
    let layer = &mut state.layers[0];
    layer.slot = layer.slot.other();
    let slot: Slot = layer.slot;
    layer.hashes = write_layer(&store, LayerId(0), slot, 2).unwrap();
    blocking(|done| store.save_slots(&[(LayerId(0), slot)], done)).unwrap();
    held.hold();
    store.commit(store::RecordKind::Committed, state, Box::new(|_| ()));
    let write = || drop(write_layer(&store, LayerId(0), slot, 3));
    match catch_unwind(AssertUnwindSafe(write)) {
        Ok(()) => Err("a write into the slot of a commit in flight is not refused".into()),
        Err(_) => Ok(()),
    }
}
