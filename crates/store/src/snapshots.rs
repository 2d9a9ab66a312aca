//! Snapshots: second names for the live slots' files, and the record that they belong to.
//!
//! Invariants:
//! - a snapshot is there once its `record` has its name, which comes last; a directory with the mark
//!   instead is one that is being made or removed, and the next opening for training removes it;
//! - what has neither, and all that a symbolic link leads to, is somebody else's and stays;
//! - what it keeps of a layer on another drive is in the layer's directory there, and in its own a
//!   symbolic link to that;
//! - nothing is copied: a file that a snapshot has a name for is replaced, not written, when its slot
//!   is the next to be written;
//! - the directory is a Hugging Face checkpoint of its own.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use model::{LayerSpec, LayerTable, Plane, StateLayout};

use crate::StoreError;
use crate::drives::is_away;
use crate::files;
use crate::io::{Access, Io, IoError};
use crate::layout::{
    CONFIG_FILE, INDEX_FILE, LAYERS_DIR, RESERVED, RUN_FILE, SNAPSHOTS_DIR, STORE_FILE, plane_file,
};
use crate::reading::index;
use crate::record::{self, RecordKind, State};
use crate::slots::{SlotFiles, slot_files};
use crate::training::{TrainingStore, read_run};

/// What makes a directory a snapshot.
const RECORD_FILE: &str = "record";
/// What marks a directory whose files may go: an unfinished snapshot's, or one that is being removed.
const MARK: &str = "unfinished";
/// What the commit before the last is called, and no snapshot may be.
pub const PREVIOUS: &str = "previous";

/// A snapshot as a store lists it.
#[derive(Clone, Debug)]
pub struct Snapshot {
    pub name: String,
    /// By layer: the directory of the files, and what their names begin with.
    places: Vec<(PathBuf, String)>,
    layout: StateLayout,
    /// What was true when it was taken.
    pub state: State,
}

impl Snapshot {
    /// Path of a file of a layer by its name in a slot.
    pub(crate) fn path(&self, layer: &LayerSpec, name: &str) -> PathBuf {
        let (dir, prefix) = &self.places[layer.id.index()];
        dir.join(format!("{prefix}{name}"))
    }

    /// Whether the snapshot's files of a layer are those whose paths `path` gives. Equal contents do
    /// not say so: a run that went back comes to the same bits in other files.
    pub(crate) fn shares(
        &self,
        io: &dyn Io,
        layer: &LayerSpec,
        path: impl Fn(&str) -> PathBuf,
    ) -> Result<bool, StoreError> {
        for name in slot_files(self.layout) {
            if !io.is_same(&self.path(layer, &name), &path(&name))? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    pub(crate) fn open(
        &self,
        io: &Arc<dyn Io>,
        layer: &LayerSpec,
        access: Access,
    ) -> Result<SlotFiles, StoreError> {
        SlotFiles::open_at(io, self.layout, layer, access, |name| self.path(layer, name))
    }
}

fn file_name(layer: &LayerSpec, name: &str) -> String {
    format!("{}{name}", prefix(layer))
}

fn prefix(layer: &LayerSpec) -> String {
    format!("{}.", layer.name)
}

/// Where a layer's files are kept that is on another drive, below the store's directory.
fn away_dir(layer: &str, snapshot: &str) -> PathBuf {
    Path::new(LAYERS_DIR).join(layer).join(SNAPSHOTS_DIR).join(snapshot)
}

impl TrainingStore {
    /// Gives the last commit a name under which it stays, whatever is trained afterwards or
    /// meanwhile: the first write to a slot waits until the files of all have their names. Blocks.
    ///
    /// # Errors
    /// `Invalid` for an unusable name or one that is taken; `Io` where files cannot have two names.
    pub fn snapshot(&self, name: &str) -> Result<(), StoreError> {
        self.inner.check_poison()?;
        check_name(name)?;
        let (io, dir) = (&*self.inner.io, snapshot_dir(self.dir(), name));
        if io.exists(&dir.join(RECORD_FILE))? {
            let what = format!("there is a snapshot `{name}` already; choose another name");
            return Err(StoreError::Invalid(what));
        }
        refuse_links(io, self.dir(), &dir)?;
        remove(io, &dir)?;
        if io.exists(&dir)? {
            let what = format!("{} is there and no snapshot; choose another name", dir.display());
            return Err(StoreError::Invalid(what));
        }
        io.create_dir(&dir)?;
        files::replace(io, &dir.join(MARK), &[])?;
        // What is live now may be written two commits later: by then it must have its second name.
        let linked =
            self.inner.while_slots_stay(|state| self.link_all(&dir, &state).map(|()| state));
        let made = linked.and_then(|state| self.seal(&dir, &state));
        if made.is_err() {
            // The first error is the one to report; the next opening removes what is left.
            let _ = remove(io, &dir);
        }
        made
    }

    /// Removes a snapshot; its space is free once no slot shares its files.
    pub fn remove_snapshot(&self, name: &str) -> Result<(), StoreError> {
        let dir = snapshot_dir(self.dir(), name);
        check_name(name)?;
        if !self.inner.io.exists(&dir)? {
            return Err(StoreError::Invalid(format!("there is no snapshot `{name}`")));
        }
        refuse_links(&*self.inner.io, self.dir(), &dir)?;
        remove(&*self.inner.io, &dir)
    }

    /// The store's snapshots, oldest step first, and why others cannot be used.
    pub fn snapshots(&self) -> Result<(Vec<Snapshot>, Vec<String>), StoreError> {
        list(&*self.inner.io, self.dir(), self.layout(), self.table())
    }

    /// Text of the `run.json` of a snapshot's time, if there was one.
    pub fn run_of_snapshot(&self, name: &str) -> Result<Option<String>, StoreError> {
        check_name(name)?;
        read_run(&*self.inner.io, &snapshot_dir(self.dir(), name))
    }

    fn link_all(&self, dir: &Path, state: &State) -> Result<(), StoreError> {
        let io = &*self.inner.io;
        for (spec, layer) in self.table().layers().iter().zip(&state.layers) {
            let Some(files) = self.inner.files_if_any(spec.id, layer.slot) else { continue };
            let paths = files.planes.iter().map(|plane| &plane.path).chain([&files.hashes_path]);
            let away = self.away_dir(spec, dir)?;
            for (path, name) in paths.zip(slot_files(files.layout)) {
                let here = dir.join(file_name(spec, &name));
                let Some(away) = &away else {
                    io.link(path, &here)?;
                    continue;
                };
                io.link(path, &self.dir().join(away).join(&name))?;
                io.symlink(&Path::new("../..").join(away).join(&name), &here)?;
            }
            if let Some(away) = &away {
                let away = self.dir().join(away);
                away.ancestors().take(3).try_for_each(|dir| io.sync_dir(dir))?;
            }
        }
        for name in own_files(io, self.dir())? {
            io.link(&self.dir().join(&name), &dir.join(&name))?;
        }
        Ok(files::replace(
            io,
            &dir.join(INDEX_FILE),
            index(self.layout(), self.table(), in_snapshot).as_bytes(),
        )?)
    }

    /// The directory that a layer's files go to if it is on another drive, made.
    fn away_dir(&self, layer: &LayerSpec, dir: &Path) -> Result<Option<PathBuf>, StoreError> {
        let Some(name) = dir.file_name().filter(|_| self.inner.drives.is_away(layer.id)) else {
            return Ok(None);
        };
        let away = away_dir(&layer.name, &name.to_string_lossy());
        self.inner.io.create_dir(&self.dir().join(&away))?;
        Ok(Some(away))
    }

    /// Everything else is durable before the record has its name, and that before anybody is told.
    fn seal(&self, dir: &Path, state: &State) -> Result<(), StoreError> {
        let sealed = seal(&*self.inner.io, dir, self.dir(), state);
        Ok(sealed.inspect_err(|error| self.inner.poison_if_lost(error))?)
    }
}

fn seal(io: &dyn Io, dir: &Path, store: &Path, state: &State) -> Result<(), IoError> {
    io.sync_dir(dir)?;
    io.sync_dir(&store.join(SNAPSHOTS_DIR))?;
    io.sync_dir(store)?;
    let record = record::encode(0, 0, RecordKind::Snapshot, state);
    files::replace(io, &dir.join(RECORD_FILE), &record)?;
    // With a record the mark says nothing, so that nobody waits for its removal.
    io.unlink(&dir.join(MARK))
}

/// Refuses to write or to remove anything where a symbolic link leads.
fn refuse_links(io: &dyn Io, store: &Path, dir: &Path) -> Result<(), StoreError> {
    for path in [store.join(SNAPSHOTS_DIR).as_path(), dir] {
        if io.exists(path)? && io.is_link(path)? {
            let what =
                format!("{} is a symbolic link; what it leads to is not touched", path.display());
            return Err(StoreError::Invalid(what));
        }
    }
    Ok(())
}

/// The model's own files and the run's record.
pub(crate) fn own_files(io: &dyn Io, store: &Path) -> Result<Vec<String>, StoreError> {
    let mut own = Vec::new();
    for name in io.list(store)? {
        let is_own = [CONFIG_FILE, RUN_FILE].contains(&name.as_str())
            || !(RESERVED.contains(&name.as_str()) || name.ends_with(files::TEMPORARY));
        if is_own
            && ![STORE_FILE, MARK, RECORD_FILE].contains(&name.as_str())
            && is_file(io, &store.join(&name))?
        {
            own.push(name);
        }
    }
    Ok(own)
}

fn is_file(io: &dyn Io, path: &Path) -> Result<bool, StoreError> {
    match io.open(path, Access::Read) {
        Ok(file) => {
            io.close(file);
            Ok(true)
        }
        Err(error) => match error.source.kind() {
            // The last: a symbolic link that leads nowhere.
            ErrorKind::IsADirectory | ErrorKind::NotSeekable | ErrorKind::NotFound => Ok(false),
            _ => Err(error.into()),
        },
    }
}

/// Where the index of a snapshot finds a layer's weights.
fn in_snapshot(layer: &LayerSpec, _: usize) -> String {
    file_name(layer, &plane_file(Plane::Weight))
}

fn check_name(name: &str) -> Result<(), StoreError> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    let usable = !name.is_empty() && name.len() <= 100 && name.chars().all(plain);
    if !usable || name.starts_with(['.', '-']) || name == PREVIOUS {
        let what = format!(
            "`{name}` cannot name a snapshot: letters, digits, `-`, `_` and `.` can, but not \
             `{PREVIOUS}` nor with a dot or a dash in front"
        );
        return Err(StoreError::Invalid(what));
    }
    Ok(())
}

fn snapshot_dir(store: &Path, name: &str) -> PathBuf {
    store.join(SNAPSHOTS_DIR).join(name)
}

/// All snapshots of the store in `dir`, and sentences about those that cannot be used.
pub(crate) fn list(
    io: &dyn Io,
    dir: &Path,
    layout: StateLayout,
    table: &LayerTable,
) -> Result<(Vec<Snapshot>, Vec<String>), StoreError> {
    let all = dir.join(SNAPSHOTS_DIR);
    let names = if io.exists(&all)? { io.list(&all)? } else { Vec::new() };
    let (mut snapshots, mut unusable) = (Vec::new(), Vec::new());
    for name in names {
        match read(io, dir, &name, layout, table) {
            Ok(Some(snapshot)) => snapshots.push(snapshot),
            Ok(None) => {}
            Err(error) => unusable.push(format!("snapshot `{name}` cannot be used: {error}")),
        }
    }
    snapshots.sort_by(|a, b| (a.state.step, &a.name).cmp(&(b.state.step, &b.name)));
    Ok((snapshots, unusable))
}

/// The snapshot of this name; `None` without a record.
pub(crate) fn read(
    io: &dyn Io,
    store: &Path,
    name: &str,
    layout: StateLayout,
    table: &LayerTable,
) -> Result<Option<Snapshot>, StoreError> {
    check_name(name)?;
    let dir = snapshot_dir(store, name);
    let path = dir.join(RECORD_FILE);
    if !io.exists(&path)? {
        return Ok(None);
    }
    let bytes = files::read(io, &path)?;
    let damaged = |what: &str| StoreError::damaged(&path, what);
    let raw = record::decode(0, &bytes).ok_or_else(|| damaged("it is no valid record"))?;
    if raw.kind != RecordKind::Snapshot as u16 || raw.bytes != bytes.len() {
        return Err(damaged("it is not the record of a snapshot"));
    }
    let state = record::decode_state(raw.body).map_err(|what| damaged(&what))?;
    if state.layers.len() != table.len() {
        return Err(damaged("it belongs to another model"));
    }
    let mut places = Vec::with_capacity(table.len());
    for layer in table.layers() {
        places.push(match is_away(io, store, &layer.name)? {
            true => (store.join(away_dir(&layer.name, name)), String::new()),
            false => (dir.clone(), prefix(layer)),
        });
    }
    Ok(Some(Snapshot { name: name.to_owned(), places, layout, state }))
}

/// Removes snapshots that were never finished, or never removed to the end.
pub(crate) fn remove_unfinished(io: &dyn Io, store: &Path) -> Result<(), StoreError> {
    let all = store.join(SNAPSHOTS_DIR);
    if !io.exists(&all)? || io.is_link(&all)? {
        return Ok(());
    }
    let names = match io.list(&all) {
        Err(error) if error.source.kind() == ErrorKind::NotADirectory => return Ok(()),
        names => names?,
    };
    for name in names {
        let dir = all.join(name);
        if !io.is_link(&dir)? && !io.exists(&dir.join(RECORD_FILE))? {
            remove(io, &dir)?;
        }
    }
    Ok(())
}

/// Removes the directory of a snapshot, its record first, or of half of one; any other stays, unless
/// it is empty.
fn remove(io: &dyn Io, dir: &Path) -> Result<(), StoreError> {
    if !io.exists(dir)? {
        return Ok(());
    }
    let names = match io.list(dir) {
        Err(error) if error.source.kind() == ErrorKind::NotADirectory => return Ok(()),
        names => names?,
    };
    let has = |name: &str| names.iter().any(|known| known == name);
    let marked = has(MARK) || has(&format!("{MARK}.{}", files::TEMPORARY));
    if !(names.is_empty() || marked || has(RECORD_FILE)) {
        return Ok(());
    }
    if has(RECORD_FILE) && !has(MARK) {
        // On a full disk it may fail; then a kill in here leaves files that somebody has to remove.
        let _ = files::replace(io, &dir.join(MARK), &[]);
    }
    files::remove_if_there(io, &dir.join(RECORD_FILE))?;
    remove_away(io, dir)?;
    files::remove_ours(io, dir, |name| name != MARK)?;
    files::remove_if_there(io, &dir.join(MARK))?;
    match io.remove_dir(dir) {
        // A directory inside is nobody's of ours.
        Err(error) if error.source.kind() == ErrorKind::DirectoryNotEmpty => Ok(()),
        removed => Ok(removed?),
    }
}

/// Removes what the snapshot in `dir` keeps on other drives.
fn remove_away(io: &dyn Io, dir: &Path) -> Result<(), StoreError> {
    let store = dir.parent().and_then(Path::parent);
    let Some((store, name)) = store.zip(dir.file_name()) else { return Ok(()) };
    for layer in io.list(&store.join(LAYERS_DIR))? {
        if !is_away(io, store, &layer)? {
            continue;
        }
        let away = store.join(away_dir(&layer, &name.to_string_lossy()));
        if io.exists(&away)? {
            files::remove_ours(io, &away, |_| true)?;
            for dir in away.ancestors().take(2) {
                match io.remove_dir(dir) {
                    Err(error) if error.source.kind() == ErrorKind::DirectoryNotEmpty => break,
                    removed => removed?,
                }
            }
        }
    }
    Ok(())
}
