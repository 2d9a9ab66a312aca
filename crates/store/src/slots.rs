//! Open slot files and what is known of their contents.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use model::{Budget, HostBytes, LayerSpec, PlaneSpec, Slot, StateLayout};

use crate::files;
use crate::hashes::{self, ChunkHashes, chunk_count, hash, layer_hashes};
use crate::header;
use crate::io::{Access, AfterUse, FileId, Guard, Handle, Io, IoError, read_now, read_target};
use crate::layout::{plane_file, slot_path, state_bytes};
use crate::record::LayerState;
use crate::unsaved::Unsaved;
use crate::{StoreError, blocking};

/// Name of the file with a slot's chunk hashes.
pub(crate) const HASHES_FILE: &str = "hashes";

/// One open state file.
#[derive(Debug)]
pub(crate) struct PlaneFile {
    pub(crate) spec: &'static PlaneSpec,
    pub(crate) path: PathBuf,
    pub(crate) file: Handle,
    pub(crate) data_start: u64,
    /// Chunks that are newer in memory.
    pub(crate) unsaved: Unsaved,
}

impl PlaneFile {
    /// Where the values of some parameters lie in the file.
    pub(crate) fn range(&self, elements: Range<usize>) -> Range<u64> {
        let bytes = self.spec.range(elements);
        self.data_start + bytes.start as u64..self.data_start + bytes.end as u64
    }
}

/// The open files of one slot.
#[derive(Debug)]
pub(crate) struct SlotFiles {
    pub(crate) layout: StateLayout,
    /// In the order of the layout.
    pub(crate) planes: Vec<PlaneFile>,
    pub(crate) hashes: Handle,
    pub(crate) hashes_path: PathBuf,
    /// Parameters of the layer.
    pub(crate) elements: usize,
}

impl SlotFiles {
    /// Opens a slot and checks lengths and headers against `layer`.
    pub(crate) fn open(
        io: &Arc<dyn Io>,
        dir: &Path,
        layout: StateLayout,
        layer: &LayerSpec,
        slot: Slot,
        access: Access,
    ) -> Result<SlotFiles, StoreError> {
        let dir = dir.join(slot_path(layer, slot));
        SlotFiles::open_at(io, layout, layer, access, |name| dir.join(name))
    }

    /// Opens the files of a version of `layer`, whose paths `path` gives by their names in a slot.
    pub(crate) fn open_at(
        io: &Arc<dyn Io>,
        layout: StateLayout,
        layer: &LayerSpec,
        access: Access,
        path: impl Fn(&str) -> PathBuf,
    ) -> Result<SlotFiles, StoreError> {
        let open = |spec: &'static PlaneSpec| {
            open_plane(io, path(&plane_file(spec.plane)), layer, spec, access)
        };
        let planes = layout.planes().iter().map(open).collect::<Result<_, _>>()?;
        let hashes_path = path(HASHES_FILE);
        let hashes = open_existing(io, &hashes_path, access)?;
        Ok(SlotFiles { layout, planes, hashes, hashes_path, elements: layer.elements() })
    }

    /// All files of the slot.
    pub(crate) fn files(&self) -> Vec<FileId> {
        let planes = self.planes.iter().map(|plane| plane.file.id());
        planes.chain([self.hashes.id()]).collect()
    }

    /// Number of chunks.
    pub(crate) fn chunks(&self) -> usize {
        chunk_count(self.elements)
    }

    /// The layer's parameters in a chunk.
    pub(crate) fn chunk_elements(&self, chunk: usize) -> Range<usize> {
        hashes::chunk_elements(self.elements, chunk)
    }

    /// Planes that weights lie in.
    pub(crate) fn weight_planes(&self) -> impl Iterator<Item = &PlaneFile> {
        self.planes.iter().filter(|plane| plane.spec.plane.state() == 0)
    }

    /// The chunk hashes of a live slot, as its `hashes` file has them and `state` confirms.
    pub(crate) fn read_hashes(
        &self,
        io: &dyn Io,
        state: &LayerState,
    ) -> Result<Vec<ChunkHashes>, StoreError> {
        let damaged = |what: String| StoreError::damaged(&self.hashes_path, what);
        let expected = hashes::file_bytes(self.layout, self.chunks());
        let len = io.len(self.hashes.id())?;
        if len != expected as u64 {
            return Err(damaged(format!("{len} bytes instead of {expected}")));
        }
        let bytes = read_now(io, self.hashes.id(), 0, expected)?;
        let checked = !io.is_off(Guard::HashesChecksum);
        let chunks =
            hashes::decode(self.layout, bytes.bytes(), self.chunks(), checked).map_err(damaged)?;
        if layer_hashes(self.layout, &chunks) != state.hashes && !io.is_off(Guard::HashesOfRecord) {
            return Err(damaged("it does not belong to the last commit".into()));
        }
        Ok(chunks)
    }

    /// Reads the values of some parameters from a plane, waiting for them; in place if the engine can.
    pub(crate) fn read_now(
        &self,
        io: &dyn Io,
        plane: &PlaneFile,
        elements: Range<usize>,
    ) -> Result<HostBytes, StoreError> {
        let Range { start, end } = plane.range(elements);
        let (file, len) = (plane.file.id(), (end - start) as usize);
        // A budget of its own: the block is not cached for anybody.
        let target = io.target(file, start, len, &Budget::new(len), AfterUse::Forget)?;
        blocking(|done| {
            let done = Box::new(move |block: Result<_, IoError>| done(block.map_err(Into::into)));
            read_target(io, file, start, target, done);
        })
    }

    /// Compares every chunk with the hashes that `state` has for this version; they are returned.
    ///
    /// # Errors
    /// `Damaged` for the first one that differs.
    pub(crate) fn check(
        &self,
        io: &dyn Io,
        state: &LayerState,
        mut progress: impl FnMut(u64),
    ) -> Result<Vec<ChunkHashes>, StoreError> {
        let chunks = self.read_hashes(io, state)?;
        for plane in &self.planes {
            for (chunk, expected) in chunks.iter().enumerate() {
                let (found, bytes) = self.hash_chunk(io, plane, chunk)?;
                if found != expected[plane.spec.plane as usize] {
                    return Err(self.mismatch(plane, chunk));
                }
                progress(bytes);
            }
        }
        Ok(chunks)
    }

    /// The error of a chunk whose contents contradict its hash.
    pub(crate) fn mismatch(&self, plane: &PlaneFile, chunk: usize) -> StoreError {
        let offset = plane.range(self.chunk_elements(chunk)).start;
        let what = format!("the chunk at byte {offset} does not match its hash");
        StoreError::damaged(&plane.path, what)
    }

    /// Hash of a chunk as it is on disk now, and its bytes.
    pub(crate) fn hash_chunk(
        &self,
        io: &dyn Io,
        plane: &PlaneFile,
        chunk: usize,
    ) -> Result<(u64, u64), StoreError> {
        let block = self.read_now(io, plane, self.chunk_elements(chunk))?;
        Ok((hash(block.bytes()), block.len() as u64))
    }
}

fn open_plane(
    io: &Arc<dyn Io>,
    path: PathBuf,
    layer: &LayerSpec,
    spec: &'static PlaneSpec,
    access: Access,
) -> Result<PlaneFile, StoreError> {
    let file = open_existing(io, &path, access)?;
    let damaged = |what: String| StoreError::damaged(&path, what);
    let len = io.len(file.id())?;
    if len < 8 {
        return Err(damaged(format!("it has {len} bytes")));
    }
    let mut length = [0; 8];
    length.copy_from_slice(read_now(&**io, file.id(), 0, 8)?.bytes());
    let data_start = header::data_start(&length, len).map_err(damaged)?;
    let expected = data_start + spec.bytes(layer.elements()) as u64;
    if len != expected {
        return Err(damaged(format!("{len} bytes instead of {expected}")));
    }
    let json = read_now(&**io, file.id(), 8, data_start as usize - 8)?;
    header::check(json.bytes(), layer, spec).map_err(damaged)?;
    Ok(PlaneFile { spec, path, file, data_start, unsaved: Unsaved::default() })
}

fn open_existing(io: &Arc<dyn Io>, path: &Path, access: Access) -> Result<Handle, StoreError> {
    if !io.exists(path)? {
        return Err(StoreError::damaged(path, "the file is missing"));
    }
    Ok(Handle::new(io, io.open(path, access)?))
}

/// Names of a slot's files, the one with the hashes last.
pub(crate) fn slot_files(layout: StateLayout) -> Vec<String> {
    let planes = layout.planes().iter().map(|spec| plane_file(spec.plane));
    planes.chain([HASHES_FILE.to_owned()]).collect()
}

/// Creates the files of a slot under the paths that `path` gives their names: preallocated, headers
/// written, data zero, nothing synced.
pub(crate) fn create_slot(
    io: &dyn Io,
    layout: StateLayout,
    layer: &LayerSpec,
    path: impl Fn(&str) -> PathBuf,
    mut created: impl FnMut(PathBuf),
) -> Result<(), StoreError> {
    let elements = layer.elements();
    for spec in layout.planes() {
        let header = Arc::new(files::block(&header::encode(layer, spec)));
        let path = path(&plane_file(spec.plane));
        let file = io.create(&path, (header.len() + spec.bytes(elements)) as u64)?;
        created(path);
        let written = files::write(io, file, 0, &header);
        io.close(file);
        written?;
    }
    let path = path(HASHES_FILE);
    let file = io.create(&path, hashes::file_bytes(layout, chunk_count(elements)) as u64)?;
    io.close(file);
    created(path);
    Ok(())
}

/// Puts fresh files in the place of whatever a slot has. What is in them is the caller's to write and
/// to sync, and so is the returned directory, in which their names are.
pub(crate) fn remake_slot(
    io: &dyn Io,
    dir: &Path,
    layout: StateLayout,
    layer: &LayerSpec,
    slot: Slot,
) -> Result<PathBuf, StoreError> {
    let dir = dir.join(slot_path(layer, slot));
    io.create_dir(&dir)?;
    let remove_temporaries = || {
        files::remove_ours(io, &dir, |name| {
            let name = files::name_of_temporary(name);
            name.is_some_and(|name| slot_files(layout).iter().any(|own| own == name))
        })
    };
    remove_temporaries()?;
    let temporary = |name: &str| files::temporary(&dir.join(name));
    if let Err(error) = create_slot(io, layout, layer, temporary, |_| ()) {
        // The first error is the one to report; the next try removes what is left.
        let _ = remove_temporaries();
        return Err(error);
    }
    for name in slot_files(layout) {
        io.rename(&temporary(&name), &dir.join(&name))?;
    }
    Ok(dir)
}

/// Removes the files of a slot, as far as they are there.
pub(crate) fn remove_slot(
    io: &dyn Io,
    dir: &Path,
    layout: StateLayout,
    layer: &LayerSpec,
    slot: Slot,
) -> Result<(), StoreError> {
    let dir = dir.join(slot_path(layer, slot));
    for name in slot_files(layout) {
        files::remove_if_there(io, &dir.join(name))?;
    }
    Ok(())
}

/// Bytes of all files of a slot.
pub(crate) fn slot_bytes(layout: StateLayout, layer: &LayerSpec) -> u64 {
    let header = |spec: &PlaneSpec| header::encode(layer, spec).len() as u64;
    let headers: u64 = layout.planes().iter().map(header).sum();
    let hashes = hashes::file_bytes(layout, chunk_count(layer.elements())) as u64;
    headers + state_bytes(layer, layout) + hashes
}
