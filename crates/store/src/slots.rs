//! Open slot files and what is known of their contents.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use model::{Budget, HostBytes, LayerSpec, Plane, Slot};

use crate::files;
use crate::hashes::{self, PlaneHashes, chunk_count, hash, plane_hashes};
use crate::header;
use crate::io::{Access, AfterUse, FileId, Guard, Handle, Io, IoError, read_now, read_target};
use crate::layout::{DTYPE, ELEMENT_BYTES, plane_bytes, plane_file, slot_path};
use crate::record::LayerState;
use crate::{StoreError, blocking};

/// Name of the file with a slot's chunk hashes.
pub(crate) const HASHES_FILE: &str = "hashes";

/// One open state file.
#[derive(Debug)]
pub(crate) struct PlaneFile {
    pub(crate) path: PathBuf,
    pub(crate) file: Handle,
    pub(crate) data_start: u64,
}

/// The open files of one slot.
#[derive(Debug)]
pub(crate) struct SlotFiles {
    /// In the order of [`Plane::ALL`].
    pub(crate) planes: [PlaneFile; 3],
    pub(crate) hashes: Handle,
    pub(crate) hashes_path: PathBuf,
    /// Bytes of one plane's data.
    pub(crate) data_bytes: u64,
}

impl SlotFiles {
    /// Opens a slot and checks lengths and headers against `layer`.
    pub(crate) fn open(
        io: &Arc<dyn Io>,
        dir: &Path,
        layer: &LayerSpec,
        slot: Slot,
        access: Access,
    ) -> Result<SlotFiles, StoreError> {
        let dir = dir.join(slot_path(layer, slot));
        SlotFiles::open_at(io, layer, access, |name| dir.join(name))
    }

    /// Opens the files of a version of `layer`, whose paths `path` gives by their names in a slot.
    pub(crate) fn open_at(
        io: &Arc<dyn Io>,
        layer: &LayerSpec,
        access: Access,
        path: impl Fn(&str) -> PathBuf,
    ) -> Result<SlotFiles, StoreError> {
        let open = |plane| open_plane(io, path(&plane_file(plane)), layer, access);
        let planes = [open(Plane::Weight)?, open(Plane::ExpAvg)?, open(Plane::ExpAvgSq)?];
        let hashes_path = path(HASHES_FILE);
        let hashes = open_existing(io, &hashes_path, access)?;
        Ok(SlotFiles { planes, hashes, hashes_path, data_bytes: plane_bytes(layer) })
    }

    /// All files of the slot.
    pub(crate) fn files(&self) -> [FileId; 4] {
        let [a, b, c] = &self.planes;
        [a.file.id(), b.file.id(), c.file.id(), self.hashes.id()]
    }

    /// Chunks of each plane.
    pub(crate) fn chunks(&self) -> usize {
        chunk_count(self.data_bytes)
    }

    /// Offset inside the data, and length, of a chunk.
    pub(crate) fn chunk_range(&self, chunk: usize) -> (u64, usize) {
        hashes::chunk_range(self.data_bytes, chunk)
    }

    /// The chunk hashes of a live slot, as its `hashes` file has them and `state` confirms.
    pub(crate) fn read_hashes(
        &self,
        io: &dyn Io,
        state: &LayerState,
    ) -> Result<Vec<PlaneHashes>, StoreError> {
        let damaged = |what: String| StoreError::damaged(&self.hashes_path, what);
        let expected = hashes::file_bytes(self.chunks());
        let len = io.len(self.hashes.id())?;
        if len != expected as u64 {
            return Err(damaged(format!("{len} bytes instead of {expected}")));
        }
        let bytes = read_now(io, self.hashes.id(), 0, expected)?;
        let checked = !io.is_off(Guard::HashesChecksum);
        let chunks = hashes::decode(bytes.bytes(), self.chunks(), checked).map_err(damaged)?;
        if plane_hashes(&chunks) != state.hashes && !io.is_off(Guard::HashesOfRecord) {
            return Err(damaged("it does not belong to the last commit".into()));
        }
        Ok(chunks)
    }

    /// Reads `bytes` of a plane's data, waiting for them; in place if the engine can.
    pub(crate) fn read_now(
        &self,
        io: &dyn Io,
        plane: Plane,
        offset: u64,
        len: usize,
    ) -> Result<HostBytes, StoreError> {
        let file = &self.planes[plane as usize];
        let offset = file.data_start + offset;
        // A budget of its own: the block is not cached for anybody.
        let target = io.target(file.file.id(), offset, len, &Budget::new(len), AfterUse::Forget)?;
        blocking(|done| {
            let done = Box::new(move |block: Result<_, IoError>| done(block.map_err(Into::into)));
            read_target(io, file.file.id(), offset, target, done);
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
    ) -> Result<Vec<PlaneHashes>, StoreError> {
        let chunks = self.read_hashes(io, state)?;
        for plane in Plane::ALL {
            for (chunk, expected) in chunks.iter().enumerate() {
                if self.hash_chunk(io, plane, chunk)? != expected[plane as usize] {
                    return Err(self.mismatch(plane, chunk));
                }
                progress(self.chunk_range(chunk).1 as u64);
            }
        }
        Ok(chunks)
    }

    /// The error of a chunk whose contents contradict its hash.
    pub(crate) fn mismatch(&self, plane: Plane, chunk: usize) -> StoreError {
        let file = &self.planes[plane as usize];
        let offset = file.data_start + self.chunk_range(chunk).0;
        let what = format!("the chunk at byte {offset} does not match its hash");
        StoreError::damaged(&file.path, what)
    }

    /// Hash of a chunk as it is on disk now.
    pub(crate) fn hash_chunk(
        &self,
        io: &dyn Io,
        plane: Plane,
        chunk: usize,
    ) -> Result<u64, StoreError> {
        let (start, len) = self.chunk_range(chunk);
        Ok(hash(self.read_now(io, plane, start, len)?.bytes()))
    }
}

fn open_plane(
    io: &Arc<dyn Io>,
    path: PathBuf,
    layer: &LayerSpec,
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
    let expected = data_start + plane_bytes(layer);
    if len != expected {
        return Err(damaged(format!("{len} bytes instead of {expected}")));
    }
    let json = read_now(&**io, file.id(), 8, data_start as usize - 8)?;
    header::check(json.bytes(), layer, DTYPE, ELEMENT_BYTES).map_err(damaged)?;
    Ok(PlaneFile { path, file, data_start })
}

fn open_existing(io: &Arc<dyn Io>, path: &Path, access: Access) -> Result<Handle, StoreError> {
    if !io.exists(path)? {
        return Err(StoreError::damaged(path, "the file is missing"));
    }
    Ok(Handle::new(io, io.open(path, access)?))
}

/// Names of a slot's files, the one with the hashes last.
pub(crate) fn slot_files() -> [String; 4] {
    let [a, b, c] = Plane::ALL.map(plane_file);
    [a, b, c, HASHES_FILE.to_owned()]
}

/// Creates the files of a slot under the paths that `path` gives their names: preallocated, headers
/// written, data zero, nothing synced.
pub(crate) fn create_slot(
    io: &dyn Io,
    layer: &LayerSpec,
    path: impl Fn(&str) -> PathBuf,
    mut created: impl FnMut(PathBuf),
) -> Result<(), StoreError> {
    let header = Arc::new(files::block(&header::encode(layer, DTYPE, ELEMENT_BYTES)));
    for plane in Plane::ALL {
        let path = path(&plane_file(plane));
        let file = io.create(&path, header.len() as u64 + plane_bytes(layer))?;
        created(path);
        let written = files::write(io, file, 0, &header);
        io.close(file);
        written?;
    }
    let path = path(HASHES_FILE);
    let file = io.create(&path, hashes::file_bytes(chunk_count(plane_bytes(layer))) as u64)?;
    io.close(file);
    created(path);
    Ok(())
}

/// Puts fresh files in the place of whatever a slot has. What is in them is the caller's to write and
/// to sync, and so is the returned directory, in which their names are.
pub(crate) fn remake_slot(
    io: &dyn Io,
    dir: &Path,
    layer: &LayerSpec,
    slot: Slot,
) -> Result<PathBuf, StoreError> {
    let dir = dir.join(slot_path(layer, slot));
    io.create_dir(&dir)?;
    let remove_temporaries = || {
        files::remove_ours(io, &dir, |name| {
            let name = files::name_of_temporary(name);
            name.is_some_and(|name| slot_files().iter().any(|own| own == name))
        })
    };
    remove_temporaries()?;
    let temporary = |name: &str| files::temporary(&dir.join(name));
    if let Err(error) = create_slot(io, layer, temporary, |_| ()) {
        // The first error is the one to report; the next try removes what is left.
        let _ = remove_temporaries();
        return Err(error);
    }
    for name in slot_files() {
        io.rename(&temporary(&name), &dir.join(&name))?;
    }
    Ok(dir)
}

/// Removes the files of a slot, as far as they are there.
pub(crate) fn remove_slot(
    io: &dyn Io,
    dir: &Path,
    layer: &LayerSpec,
    slot: Slot,
) -> Result<(), StoreError> {
    let dir = dir.join(slot_path(layer, slot));
    for name in slot_files() {
        files::remove_if_there(io, &dir.join(name))?;
    }
    Ok(())
}

/// Bytes of all files of a slot.
pub(crate) fn slot_bytes(layer: &LayerSpec) -> u64 {
    let header = header::encode(layer, DTYPE, ELEMENT_BYTES).len() as u64;
    let planes = Plane::ALL.len() as u64 * (header + plane_bytes(layer));
    planes + hashes::file_bytes(chunk_count(plane_bytes(layer))) as u64
}
