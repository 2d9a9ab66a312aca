//! Everything that needs the operating system's own calls or raw memory, behind safe functions.
//!
//! Invariants:
//! - a map is read-only; nobody in this process writes its range while it exists (the mmap engine
//!   refuses such writes), and the store's lock keeps other processes from it;
//! - the pieces of a cut block never overlap, and the block is given back only when none is left.
#![allow(unsafe_code)]

use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::Arc;

use memmap2::{Mmap, MmapOptions};
use model::{HostBytes, PAGE_BYTES};

#[cfg(target_os = "linux")]
pub(crate) mod ring;

/// Opens what is there for reading, or for both. A pipe in a file's place is an error at once, where
/// the operating system would wait for its other end, and so is whatever else is no regular file.
pub(crate) fn open(path: &Path, write: bool) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(write);
    #[cfg(unix)]
    {
        use std::os::unix::fs::OpenOptionsExt;
        // Means nothing for a regular file.
        options.custom_flags(libc::O_NONBLOCK);
    }
    let file = options.open(path)?;
    let kind = file.metadata()?.file_type();
    if kind.is_file() {
        Ok(file)
    } else if kind.is_dir() {
        Err(io::ErrorKind::IsADirectory.into())
    } else {
        Err(io::ErrorKind::NotSeekable.into())
    }
}

/// A read-only map of `len > 0` bytes of `file` at `offset`; `released` runs after its unmapping.
pub(crate) fn map(
    file: &File,
    offset: u64,
    len: usize,
    released: impl FnOnce() + Send + Sync + 'static,
) -> io::Result<HostBytes> {
    assert!(offset.is_multiple_of(4), "a map must be 4-byte aligned");
    // SAFETY: the range is not written while the map lives (see the file's first invariant).
    let map = unsafe { MmapOptions::new().offset(offset).len(len).map(file)? };
    let start = NonNull::from(&map[..]).cast::<u8>();
    let owner = Mapping { map: Some(map), released: Some(Box::new(released)) };
    // SAFETY: `owner` keeps the mapping at its address until the block drops, file pages are
    // initialised, and the alignment is checked above.
    Ok(unsafe { HostBytes::from_owner(start, len, false, owner) })
}

struct Mapping {
    map: Option<Mmap>,
    released: Option<Box<dyn FnOnce() + Send + Sync>>,
}

impl Drop for Mapping {
    fn drop(&mut self) {
        drop(self.map.take());
        if let Some(released) = self.released.take() {
            released();
        }
    }
}

/// Cuts a block into consecutive pieces that may be filled from several threads.
pub(crate) fn cut(mut block: HostBytes, lengths: &[usize]) -> (Whole, Vec<Piece>) {
    assert_eq!(lengths.iter().sum::<usize>(), block.len(), "pieces must cover the block");
    let writable = block.is_writable();
    let start = if writable {
        NonNull::from(block.bytes_mut()).cast::<u8>()
    } else {
        NonNull::from(block.bytes()).cast::<u8>()
    };
    let shared = Arc::new(Shared { start, writable, block });
    let mut end = 0;
    let pieces = lengths.iter().map(|&len| {
        end += len;
        Piece { shared: Arc::clone(&shared), range: end - len..end }
    });
    let pieces = pieces.collect();
    (Whole { shared }, pieces)
}

struct Shared {
    start: NonNull<u8>,
    writable: bool,
    block: HostBytes,
}

// SAFETY: memory is reached only through `Piece`s, whose ranges are disjoint, and through the
// block itself only after the last of them is gone (`Whole::join`).
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

/// The block behind the pieces.
pub(crate) struct Whole {
    shared: Arc<Shared>,
}

impl Whole {
    /// The block.
    ///
    /// # Panics
    /// While a piece exists: engines drop theirs before they report.
    pub(crate) fn join(self) -> HostBytes {
        match Arc::into_inner(self.shared) {
            Some(shared) => shared.block,
            None => panic!("a block was joined while a read was in flight"),
        }
    }
}

/// One exclusive part of a block.
pub(crate) struct Piece {
    shared: Arc<Shared>,
    range: Range<usize>,
}

impl Piece {
    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: `cut` keeps ranges inside the block and disjoint; writing needs `&mut self`.
        unsafe {
            let start = self.shared.start.as_ptr().add(self.range.start);
            std::slice::from_raw_parts(start, self.range.len())
        }
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        assert!(self.shared.writable, "write to a read-only block");
        // SAFETY: as in `bytes`; the piece is exclusively borrowed and its block writable.
        unsafe {
            let start = self.shared.start.as_ptr().add(self.range.start);
            std::slice::from_raw_parts_mut(start, self.range.len())
        }
    }
}

/// Reads the pages of `bytes` in: reports a failing disk as an error instead of a signal.
pub(crate) fn populate(bytes: &[u8]) -> io::Result<()> {
    #[cfg(target_os = "linux")]
    match populate_linux(bytes) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
        done => return done,
    }
    touch(bytes);
    Ok(())
}

/// The plain twin of [`populate`] for kernels before 5.14 and other systems.
fn touch(bytes: &[u8]) {
    let sum: u64 = bytes.iter().step_by(PAGE_BYTES).map(|&b| u64::from(b)).sum();
    std::hint::black_box((sum, bytes.last()));
}

#[cfg(target_os = "linux")]
fn populate_linux(bytes: &[u8]) -> io::Result<()> {
    let address = bytes.as_ptr() as usize;
    let first = address / PAGE_BYTES * PAGE_BYTES;
    let len = address + bytes.len() - first;
    // SAFETY: populating for reading changes no byte; the range consists of whole pages of which
    // the slice holds a part of each, so all are mapped.
    check(unsafe { libc::madvise(first as *mut libc::c_void, len, libc::MADV_POPULATE_READ) })
}

/// Allocates the blocks of `0..len` and sets the file's length; zeroes are written where the
/// file system cannot.
pub(crate) fn preallocate(file: &File, len: u64) -> io::Result<()> {
    if len == 0 {
        return Ok(());
    }
    #[cfg(target_os = "linux")]
    {
        let signed = libc::off_t::try_from(len).map_err(io::Error::other)?;
        // SAFETY: plain call on a descriptor that `file` keeps open.
        let done = check(unsafe { libc::fallocate(fd(file), 0, 0, signed) });
        match done {
            Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {}
            done => return done,
        }
    }
    write_zeroes(file, len)
}

/// The plain twin of [`preallocate`].
fn write_zeroes(file: &File, len: u64) -> io::Result<()> {
    let zeroes = vec![0; 1 << 20];
    let mut at = 0;
    while at < len {
        let piece = (len - at).min(zeroes.len() as u64);
        write_at(file, &zeroes[..piece as usize], at)?;
        at += piece;
    }
    Ok(())
}

/// What a file system cannot do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Lacks {
    pub(crate) direct: bool,
    pub(crate) allocation: bool,
}

/// What the file system of `dir` lacks, by a file that never gets a name; an error where that tells
/// nothing.
#[cfg(target_os = "linux")]
pub(crate) fn lacks(dir: &Path) -> io::Result<Lacks> {
    use std::os::unix::fs::OpenOptionsExt;
    let nameless = |flags| {
        let mut options = OpenOptions::new();
        options.read(true).write(true).mode(0o600).custom_flags(libc::O_TMPFILE | flags).open(dir)
    };
    let file = nameless(0)?;
    // SAFETY: plain call on a descriptor that `file` keeps open.
    let allocated = check(unsafe { libc::fallocate(fd(&file), 0, 0, PAGE_BYTES as libc::off_t) });
    let is = |error: io::Error, number| error.raw_os_error() == Some(number);
    Ok(Lacks {
        direct: nameless(libc::O_DIRECT).is_err_and(|error| is(error, libc::EINVAL)),
        allocation: allocated.is_err_and(|error| is(error, libc::EOPNOTSUPP)),
    })
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn lacks(_: &Path) -> io::Result<Lacks> {
    Err(io::ErrorKind::Unsupported.into())
}

/// The same file past the page cache; `None` where the file system cannot.
pub(crate) fn open_direct(file: &File) -> Option<File> {
    #[cfg(target_os = "linux")]
    {
        use std::os::fd::AsRawFd;
        use std::os::unix::fs::OpenOptionsExt;
        // By its descriptor: the name may be somebody else's by now.
        let same = format!("/proc/self/fd/{}", file.as_raw_fd());
        let open = |write| {
            let mut options = OpenOptions::new();
            options.read(true).write(write).custom_flags(libc::O_DIRECT).open(&same).ok()
        };
        open(is_writable(file)).or_else(|| open(false))
    }
    #[cfg(not(target_os = "linux"))]
    {
        let _ = file;
        None
    }
}

#[cfg(target_os = "linux")]
fn is_writable(file: &File) -> bool {
    // SAFETY: plain call on a descriptor that `file` keeps open.
    let flags = unsafe { libc::fcntl(fd(file), libc::F_GETFL) };
    flags >= 0 && flags & libc::O_ACCMODE != libc::O_RDONLY
}

/// Tells that small reads of `file` follow no order, so that nothing is read ahead for them.
pub(crate) fn expect_no_order(file: &File) {
    advise(file, &(0..0), Advice::Random);
}

/// Lets reads of `file` pass the page cache; false where the file system cannot.
pub(crate) fn pass_cache(file: &File) -> bool {
    #[cfg(target_os = "linux")]
    {
        // SAFETY: plain calls on a descriptor that `file` keeps open.
        let flags = unsafe { libc::fcntl(fd(file), libc::F_GETFL) };
        // SAFETY: as above.
        flags >= 0 && unsafe { libc::fcntl(fd(file), libc::F_SETFL, flags | libc::O_DIRECT) } == 0
    }
    #[cfg(not(target_os = "linux"))]
    {
        let _ = file;
        false
    }
}

/// [`read_at`] for a file of which [`pass_cache`] was true: through a block of whole pages, which is
/// what such reads need.
pub(crate) fn read_pages_at(file: &File, bytes: &mut [u8], offset: u64) -> io::Result<()> {
    let page = PAGE_BYTES as u64;
    let first = offset / page * page;
    let skipped = (offset - first) as usize;
    let mut block = HostBytes::zeroed((skipped + bytes.len()).next_multiple_of(PAGE_BYTES));
    let mut done = 0;
    while done < skipped + bytes.len() {
        // A file may end inside its last page, but no read ends inside another one.
        let got = read_some_at(file, &mut block.bytes_mut()[done..], first + done as u64)?;
        if got == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        done += got;
    }
    bytes.copy_from_slice(&block.bytes()[skipped..skipped + bytes.len()]);
    Ok(())
}

/// Reads at most all of `bytes` from `offset`; how many.
pub(crate) fn read_some_at(file: &File, bytes: &mut [u8], offset: u64) -> io::Result<usize> {
    #[cfg(unix)]
    return std::os::unix::fs::FileExt::read_at(file, bytes, offset);
    #[cfg(windows)]
    return std::os::windows::fs::FileExt::seek_read(file, bytes, offset);
}

/// Writes at most all of `bytes` at `offset`; how many.
pub(crate) fn write_some_at(file: &File, bytes: &[u8], offset: u64) -> io::Result<usize> {
    #[cfg(unix)]
    return std::os::unix::fs::FileExt::write_at(file, bytes, offset);
    #[cfg(windows)]
    return std::os::windows::fs::FileExt::seek_write(file, bytes, offset);
}

/// Fills `bytes` from `offset`.
pub(crate) fn read_at(file: &File, bytes: &mut [u8], offset: u64) -> io::Result<()> {
    #[cfg(unix)]
    return std::os::unix::fs::FileExt::read_exact_at(file, bytes, offset);
    #[cfg(windows)]
    {
        let mut done = 0;
        while done < bytes.len() {
            let at = offset + done as u64;
            match std::os::windows::fs::FileExt::seek_read(file, &mut bytes[done..], at)? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                count => done += count,
            }
        }
        Ok(())
    }
}

/// Writes all of `bytes` at `offset`.
pub(crate) fn write_at(file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
    #[cfg(unix)]
    return std::os::unix::fs::FileExt::write_all_at(file, bytes, offset);
    #[cfg(windows)]
    {
        let mut done = 0;
        while done < bytes.len() {
            let at = offset + done as u64;
            done += std::os::windows::fs::FileExt::seek_write(file, &bytes[done..], at)?;
        }
        Ok(())
    }
}

/// Asks for the range to be read ahead. Linux caps each request at the device's read-ahead, so
/// the range goes in requests of the default size.
pub(crate) fn prefetch(file: &File, range: &Range<u64>) {
    const REQUEST_BYTES: usize = 128 << 10;
    for start in range.clone().step_by(REQUEST_BYTES) {
        let end = (start + REQUEST_BYTES as u64).min(range.end);
        advise(file, &(start..end), Advice::WillNeed);
    }
}

/// Pages of a map that the page cache holds.
#[cfg(all(test, target_os = "linux"))]
pub(crate) fn cached_pages(map: &[u8]) -> usize {
    let mut pages = vec![0u8; map.len().div_ceil(PAGE_BYTES)];
    let start = map.as_ptr().cast_mut().cast();
    // SAFETY: the slice starts at a page, and `pages` has a byte for each of its pages.
    check(unsafe { libc::mincore(start, map.len(), pages.as_mut_ptr()) }).expect("a map");
    pages.iter().filter(|page| **page & 1 == 1).count()
}

/// Drops the clean cached pages that lie wholly in the range.
pub(crate) fn drop_cached(file: &File, range: &Range<u64>) {
    advise(file, range, Advice::DontNeed);
}

#[derive(Clone, Copy)]
enum Advice {
    WillNeed,
    DontNeed,
    Random,
}

/// Advice is a hint: what the system makes of it, errors included, changes no result.
#[cfg(target_os = "linux")]
fn advise(file: &File, range: &Range<u64>, advice: Advice) {
    let advice = match advice {
        Advice::WillNeed => libc::POSIX_FADV_WILLNEED,
        Advice::DontNeed => libc::POSIX_FADV_DONTNEED,
        Advice::Random => libc::POSIX_FADV_RANDOM,
    };
    let (start, len) = (range.start as libc::off_t, (range.end - range.start) as libc::off_t);
    // SAFETY: plain call on a descriptor that `file` keeps open.
    unsafe { libc::posix_fadvise(fd(file), start, len, advice) };
}

#[cfg(not(target_os = "linux"))]
fn advise(_: &File, _: &Range<u64>, _: Advice) {}

/// Starts writing the range's dirty pages to the disk.
pub(crate) fn start_writeback(file: &File, range: &Range<u64>) -> io::Result<()> {
    sync_range(file, range, false)
}

/// Writes the range's dirty pages to the disk and waits. This does not make them durable, but an
/// error here means that bytes are lost, and the system tells it only once.
pub(crate) fn finish_writeback(file: &File, range: &Range<u64>) -> io::Result<()> {
    sync_range(file, range, true)
}

#[cfg(target_os = "linux")]
fn sync_range(file: &File, range: &Range<u64>, wait: bool) -> io::Result<()> {
    let waits = libc::SYNC_FILE_RANGE_WAIT_BEFORE | libc::SYNC_FILE_RANGE_WAIT_AFTER;
    let flags = libc::SYNC_FILE_RANGE_WRITE | if wait { waits } else { 0 };
    let (start, len) = (range.start as libc::off_t, (range.end - range.start) as libc::off_t);
    // SAFETY: plain call on a descriptor that `file` keeps open.
    match check(unsafe { libc::sync_file_range(fd(file), start, len, flags) }) {
        // Network and overlay file systems lack it; the later sync does the work.
        Err(e) if matches!(e.raw_os_error(), Some(libc::ENOSYS | libc::EINVAL | libc::ESPIPE)) => {
            Ok(())
        }
        done => done,
    }
}

#[cfg(not(target_os = "linux"))]
fn sync_range(_: &File, _: &Range<u64>, _: bool) -> io::Result<()> {
    Ok(())
}

/// Makes names in a directory durable.
pub(crate) fn sync_dir(dir: &Path) -> io::Result<()> {
    if cfg!(windows) {
        return Ok(());
    }
    File::open(dir)?.sync_all()
}

/// Makes `path` a symbolic link to the directory `target`.
pub(crate) fn symlink(target: &Path, path: &Path) -> io::Result<()> {
    #[cfg(unix)]
    return std::os::unix::fs::symlink(target, path);
    #[cfg(not(unix))]
    {
        let _ = (target, path);
        Err(io::ErrorKind::Unsupported.into())
    }
}

/// The number of the file system that `path` leads to; where the system does not tell, all are one.
pub(crate) fn drive(path: &Path) -> io::Result<u64> {
    let data = std::fs::metadata(path)?;
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        Ok(data.dev())
    }
    #[cfg(not(unix))]
    {
        let _ = data;
        Ok(0)
    }
}

/// Whether two names are of one file. Where the system does not tell, they count as two.
pub(crate) fn is_same(one: &Path, other: &Path) -> io::Result<bool> {
    let (one, other) = (std::fs::metadata(one)?, std::fs::metadata(other)?);
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        Ok((one.dev(), one.ino()) == (other.dev(), other.ino()))
    }
    #[cfg(not(unix))]
    {
        let _ = (one, other);
        Ok(false)
    }
}

/// Whether `path` is a name of an open file. Where the system does not tell, whatever is there counts.
pub(crate) fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    let (open, found) = (file.metadata()?, std::fs::metadata(path)?);
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        Ok((open.dev(), open.ino()) == (found.dev(), found.ino()))
    }
    #[cfg(not(unix))]
    {
        let _ = (open, found);
        Ok(true)
    }
}

/// Number of names of a file.
pub(crate) fn link_count(path: &Path) -> io::Result<u64> {
    let data = std::fs::metadata(path)?;
    #[cfg(unix)]
    return Ok(std::os::unix::fs::MetadataExt::nlink(&data));
    #[cfg(not(unix))]
    {
        let _ = data;
        Ok(1)
    }
}

/// A file system, as far as a store cares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FileSystem {
    Ordinary,
    Btrfs,
    Tmpfs,
    Nfs,
    Plan9,
}

/// The file system that holds `path`.
#[cfg(target_os = "linux")]
pub(crate) fn file_system(path: &Path) -> io::Result<FileSystem> {
    // The magic numbers of statfs(2), which differ in integer type between architectures.
    Ok(match statfs(path)?.f_type as i64 {
        0x9123_683e => FileSystem::Btrfs,
        0x0102_1994 | 0x8584_58f6 => FileSystem::Tmpfs,
        0x6969 => FileSystem::Nfs,
        0x0102_1997 => FileSystem::Plan9,
        _ => FileSystem::Ordinary,
    })
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn file_system(_: &Path) -> io::Result<FileSystem> {
    Ok(FileSystem::Ordinary)
}

/// Bytes an unprivileged process may still allocate; unknown is unlimited.
pub(crate) fn free_bytes(path: &Path) -> io::Result<u64> {
    #[cfg(target_os = "linux")]
    {
        let data = statfs(path)?;
        // A file system of no size does not tell.
        let available = data.f_bavail.saturating_mul(data.f_bsize as u64);
        Ok(if data.f_blocks == 0 { u64::MAX } else { available })
    }
    #[cfg(not(target_os = "linux"))]
    {
        let _ = path;
        Ok(u64::MAX)
    }
}

#[cfg(target_os = "linux")]
fn statfs(path: &Path) -> io::Result<libc::statfs> {
    use std::os::unix::ffi::OsStrExt;
    let path = std::ffi::CString::new(path.as_os_str().as_bytes())?;
    let mut data = std::mem::MaybeUninit::<libc::statfs>::uninit();
    // SAFETY: the path is a C string and `data` has room for the answer.
    check(unsafe { libc::statfs(path.as_ptr(), data.as_mut_ptr()) })?;
    // SAFETY: the call succeeded and filled it.
    Ok(unsafe { data.assume_init() })
}

/// Makes new files of a btrfs directory be overwritten in place.
pub(crate) fn disable_copy_on_write(dir: &Path) -> io::Result<()> {
    #[cfg(target_os = "linux")]
    {
        const NO_COPY_ON_WRITE: libc::c_long = 0x0080_0000;
        let dir = File::open(dir)?;
        let mut flags: libc::c_long = 0;
        // SAFETY: the call writes one long, to which `flags` gives room.
        check(unsafe { libc::ioctl(fd(&dir), libc::FS_IOC_GETFLAGS, &mut flags) })?;
        flags |= NO_COPY_ON_WRITE;
        // SAFETY: the call reads one long.
        check(unsafe { libc::ioctl(fd(&dir), libc::FS_IOC_SETFLAGS, &flags) })?;
    }
    #[cfg(not(target_os = "linux"))]
    let _ = dir;
    Ok(())
}

/// Lets the process open as many files as its hard limit allows: a store keeps every slot file
/// open, and common soft limits (1024) are below what 130 layers need.
pub(crate) fn raise_open_file_limit() {
    #[cfg(target_os = "linux")]
    {
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: both calls only use the struct; a failure leaves the limit as it is.
        unsafe {
            if libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) == 0 {
                limit.rlim_cur = limit.rlim_max;
                libc::setrlimit(libc::RLIMIT_NOFILE, &limit);
            }
        }
    }
}

#[cfg(target_os = "linux")]
fn fd(file: &File) -> libc::c_int {
    std::os::fd::AsRawFd::as_raw_fd(file)
}

#[cfg(target_os = "linux")]
fn check(result: libc::c_int) -> io::Result<()> {
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests;
