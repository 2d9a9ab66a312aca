//! What opening for training does between recovery and the first step.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use model::{LayerId, LayerSpec, LayerTable, Slot, StateLayout};

use crate::StoreError;
use crate::hashes::{ChunkHashes, chunk_count};
use crate::io::{Access, Io, IoError};
use crate::layout::{COMMIT_DIR, INDEX_FILE, Layout, RUN_FILE, SCRATCH_DIR, slot_path};
use crate::log;
use crate::record::{LayerState, State};
use crate::slots::{SlotFiles, slot_files};
use crate::snapshots;
use crate::{files, scratch};

/// What is known of a slot's contents.
#[derive(Clone, Debug)]
pub(crate) struct SlotTable {
    /// Per chunk, its hashes once they are on their way to the disk's cache.
    pub(crate) chunks: Vec<Option<ChunkHashes>>,
    /// Written since the last sync.
    pub(crate) unsynced: bool,
    /// The `hashes` file says what `chunks` says.
    pub(crate) hashes_written: bool,
    /// Nobody else has a name for the files: they may be written until the slot is live again.
    pub(crate) writable: bool,
}

impl SlotTable {
    pub(crate) fn live(chunks: Vec<ChunkHashes>) -> SlotTable {
        let chunks = chunks.into_iter().map(Some).collect();
        SlotTable { chunks, unsynced: false, hashes_written: true, writable: false }
    }

    pub(crate) fn inactive(chunks: usize) -> SlotTable {
        let chunks = vec![None; chunks];
        SlotTable { chunks, unsynced: true, hashes_written: false, writable: false }
    }

    pub(crate) fn start_write(&mut self, chunk: usize) {
        self.chunks[chunk] = None;
        self.unsynced = true;
        self.hashes_written = false;
    }

    pub(crate) fn complete(&self) -> Option<Vec<ChunkHashes>> {
        self.chunks.iter().copied().collect()
    }
}

/// The files of a layer's two slots, in the order of [`Slot`]; an inactive one may have none.
pub(crate) type Pair = [Option<Arc<SlotFiles>>; 2];

/// What an opening does about a live slot that cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OnDamage {
    Refuse,
    /// Whoever opens wants to know about it or to make good for it.
    Note,
}

/// A layer whose live slot cannot be used.
#[derive(Clone, Debug)]
pub(crate) struct Broken {
    pub(crate) layer: LayerId,
    file: PathBuf,
    what: String,
}

impl Broken {
    pub(crate) fn error(&self) -> StoreError {
        StoreError::damaged(&self.file, &self.what)
    }

    /// # Errors
    /// What is no damage, and damage that is refused.
    pub(crate) fn note(
        layer: LayerId,
        error: StoreError,
        on_damage: OnDamage,
    ) -> Result<Broken, StoreError> {
        match error {
            StoreError::Damaged { file, what } if on_damage == OnDamage::Note => {
                Ok(Broken { layer, file, what })
            }
            error => Err(error),
        }
    }
}

/// What opening finds in `layers/`.
pub(crate) struct OpenSlots {
    pub(crate) slots: Vec<Pair>,
    pub(crate) tables: Vec<[SlotTable; 2]>,
    /// Live slots that cannot be used, and so have no files.
    pub(crate) broken: Vec<Broken>,
    /// Sentences about inactive slots that have to be made anew.
    pub(crate) warnings: Vec<String>,
}

/// Opens live slots, which must be as the record says, and inactive ones if they are usable: nothing
/// in them is ever needed.
pub(crate) fn open_slots(
    io: &Arc<dyn Io>,
    dir: &Path,
    layout: &Layout,
    state: &State,
    on_damage: OnDamage,
) -> Result<OpenSlots, StoreError> {
    let (table, layout) = (&layout.table, layout.state());
    let mut open = OpenSlots {
        slots: Vec::new(),
        tables: Vec::new(),
        broken: Vec::new(),
        warnings: Vec::new(),
    };
    for (layer, live) in table.layers().iter().zip(&state.layers) {
        for slot in [Slot::A, Slot::B] {
            refuse_links(&**io, dir, layout, layer, slot)?;
        }
        let chunks = chunk_count(layer.elements());
        let mut tables = [SlotTable::inactive(chunks), SlotTable::inactive(chunks)];
        let mut pair = [None, None];
        match open_live(io, dir, layout, layer, live) {
            Ok((files, known)) => {
                tables[live.slot as usize] = SlotTable::live(known);
                pair[live.slot as usize] = Some(Arc::new(files));
            }
            Err(error) => open.broken.push(Broken::note(layer.id, error, on_damage)?),
        }
        let other = live.slot.other();
        pair[other as usize] =
            match SlotFiles::open(io, dir, layout, layer, other, Access::ReadWrite) {
                Ok(files) => Some(Arc::new(files)),
                // A locked layer needs none.
                Err(StoreError::Damaged { .. }) if live.locked => None,
                Err(error @ StoreError::Damaged { .. }) => {
                    open.warnings
                        .push(format!("{error}; it is no part of the commit and made anew"));
                    None
                }
                Err(error) => return Err(error),
            };
        open.slots.push(pair);
        open.tables.push(tables);
    }
    Ok(open)
}

/// The files of a live slot and its chunks' hashes.
fn open_live(
    io: &Arc<dyn Io>,
    dir: &Path,
    layout: StateLayout,
    layer: &LayerSpec,
    live: &LayerState,
) -> Result<(SlotFiles, Vec<ChunkHashes>), StoreError> {
    let files = SlotFiles::open(io, dir, layout, layer, live.slot, Access::ReadWrite)?;
    let known = files.read_hashes(&**io, live)?;
    Ok((files, known))
}

/// Refuses a slot with symbolic links: what is written to an inactive slot could land in a live one.
fn refuse_links(
    io: &dyn Io,
    dir: &Path,
    layout: StateLayout,
    layer: &LayerSpec,
    slot: Slot,
) -> Result<(), StoreError> {
    let dir = dir.join(slot_path(layer, slot));
    let files: Vec<_> = slot_files(layout).iter().map(|name| dir.join(name)).collect();
    for path in files.iter().chain([&dir]) {
        // What is missing is reported by whoever opens it.
        if io.is_link(path).or_else(absent_is_none)? {
            let path = path.display();
            let what = format!("{path} is a symbolic link; put the file itself in its place");
            return Err(StoreError::Invalid(what));
        }
    }
    Ok(())
}

fn absent_is_none(error: IoError) -> Result<bool, IoError> {
    match error.source.kind() {
        ErrorKind::NotFound | ErrorKind::NotADirectory => Ok(false),
        _ => Err(error),
    }
}

/// Reads every live slot and compares it with its hashes.
pub(crate) fn check_live(
    io: &dyn Io,
    table: &LayerTable,
    open: &mut OpenSlots,
    state: &State,
    on_damage: OnDamage,
) -> Result<(), StoreError> {
    for (spec, (pair, live)) in table.layers().iter().zip(open.slots.iter_mut().zip(&state.layers))
    {
        let Some(files) = &pair[live.slot as usize] else { continue };
        if let Err(error) = files.check(io, live, |_| ()) {
            open.broken.push(Broken::note(spec.id, error, on_damage)?);
            let chunks = files.chunks();
            open.tables[spec.id.index()][live.slot as usize] = SlotTable::inactive(chunks);
            pair[live.slot as usize] = None;
        }
    }
    Ok(())
}

/// Removes what the new log makes stale: older logs, temporary and scratch files, unfinished
/// snapshots.
pub(crate) fn remove_leftovers(io: &dyn Io, dir: &Path, log: u64) -> Result<(), StoreError> {
    let is_log = |name: &str| log::number_of(name).is_some();
    files::remove_ours(io, &dir.join(COMMIT_DIR), |name| {
        log::number_of(name).is_some_and(|number| number < log)
            || files::name_of_temporary(name).is_some_and(is_log)
    })?;
    files::remove_ours(io, dir, |name| {
        files::name_of_temporary(name).is_some_and(|name| [RUN_FILE, INDEX_FILE].contains(&name))
    })?;
    let scratch = dir.join(SCRATCH_DIR);
    io.create_dir(&scratch)?;
    files::remove_ours(io, &scratch, scratch::is_scratch)?;
    snapshots::remove_unfinished(io, dir)
}
