//! Small whole files: read, replaced atomically, wrapped as I/O blocks.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use model::HostBytes;

use crate::StoreError;
use crate::io::{Access, FileId, Io, IoError, Op, read_now, wait, write_block};

/// Suffix of a file that has not got its name yet; leftovers are removed at the next open.
pub(crate) const TEMPORARY: &str = "tmp";
/// Longest file that is read whole; a log is not let grow beyond it.
pub(crate) const SMALL_BYTES_MAX: u64 = 1 << 30;

/// A copy of `bytes` that can be written.
pub(crate) fn block(bytes: &[u8]) -> HostBytes {
    let mut block = HostBytes::zeroed(bytes.len());
    block.bytes_mut().copy_from_slice(bytes);
    block
}

/// All bytes of a small file.
pub(crate) fn read(io: &dyn Io, path: &Path) -> Result<Vec<u8>, StoreError> {
    let file = io.open(path, Access::Read)?;
    let bytes = read_open(io, path, file);
    io.close(file);
    bytes
}

fn read_open(io: &dyn Io, path: &Path, file: FileId) -> Result<Vec<u8>, StoreError> {
    let len = io.len(file)?;
    if len > SMALL_BYTES_MAX {
        return Err(StoreError::damaged(path, format!("it has {len} bytes")));
    }
    Ok(read_now(io, file, 0, len as usize)?.bytes().to_vec())
}

/// [`read`], as text.
pub(crate) fn read_text(io: &dyn Io, path: &Path) -> Result<String, StoreError> {
    let bytes = read(io, path)?;
    String::from_utf8(bytes).map_err(|_| StoreError::damaged(path, "it is not UTF-8"))
}

/// Writes and syncs `bytes` under a temporary name and then renames: whoever sees the name sees
/// all of the bytes. The name is durable after the next sync of the directory.
pub(crate) fn place(io: &dyn Io, path: &Path, bytes: &[u8]) -> Result<FileId, IoError> {
    let temporary = temporary(path);
    if io.exists(&temporary)? {
        io.unlink(&temporary)?;
    }
    let file = io.create(&temporary, 0)?;
    let placed = fill(io, file, bytes).and_then(|()| io.rename(&temporary, path));
    if let Err(error) = placed {
        io.close(file);
        // The first error is the one to report; the next open removes what is left.
        let _ = io.unlink(&temporary);
        return Err(error);
    }
    Ok(file)
}

/// [`place`], made durable.
pub(crate) fn replace(io: &dyn Io, path: &Path, bytes: &[u8]) -> Result<(), IoError> {
    let file = place(io, path, bytes)?;
    io.close(file);
    path.parent().map_or(Ok(()), |dir| io.sync_dir(dir))
}

/// Writes and syncs `bytes` at the start of an open file.
pub(crate) fn fill(io: &dyn Io, file: FileId, bytes: &[u8]) -> Result<(), IoError> {
    write(io, file, 0, &Arc::new(block(bytes)))?;
    wait(|done| io.submit(Op::Sync { file }, done))
}

/// Writes a block at `offset`, waiting for it.
pub(crate) fn write(
    io: &dyn Io,
    file: FileId,
    offset: u64,
    bytes: &Arc<HostBytes>,
) -> Result<(), IoError> {
    wait(|done| write_block(io, file, offset, bytes, done))
}

/// The name of a file that has not got `path` yet.
pub(crate) fn temporary(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".");
    name.push(TEMPORARY);
    PathBuf::from(name)
}

/// Removes a file that need not be there.
pub(crate) fn remove_if_there(io: &dyn Io, path: &Path) -> Result<(), IoError> {
    match io.unlink(path) {
        Err(error) if error.source.kind() == ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

/// Removes the files of `dir` whose names are `ours`: all that any opening removes. Whatever else is
/// there is somebody else's and stays, and so does all that a symbolic link leads to.
pub(crate) fn remove_ours(
    io: &dyn Io,
    dir: &Path,
    ours: impl Fn(&str) -> bool,
) -> Result<(), IoError> {
    if io.is_link(dir)? {
        return Ok(());
    }
    for name in io.list(dir)?.iter().filter(|name| ours(name)) {
        match io.unlink(&dir.join(name)) {
            Err(error) if error.source.kind() == ErrorKind::IsADirectory => {}
            removed => removed?,
        }
    }
    Ok(())
}

/// The name that a temporary file was to get.
pub(crate) fn name_of_temporary(name: &str) -> Option<&str> {
    name.strip_suffix(TEMPORARY)?.strip_suffix('.')
}
