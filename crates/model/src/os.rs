//! Large blocks of memory from the operating system, on huge pages where it has them.
//!
//! Why: a product walks rows that lie far apart. With small pages nearly every row is another entry
//! of the address translation's cache, which holds few megabytes; inside a virtual machine each miss
//! costs two walks. Layers became a fifth faster.
//!
//! Pages that are given back in one shape serve in another: the system would clear every fresh page,
//! which took a tenth of a step's time.
#![allow(unsafe_code)]

use std::io;
use std::ptr::NonNull;

/// From this length on a block is a map of its own, which goes back to the system when it is
/// dropped: the heap would keep what it cannot put together.
pub(crate) const MAPPED_BYTES: usize = 256 << 10;

/// One huge page of x86-64: what maps are aligned to, and what serves in another shape.
pub(crate) const LARGE_BYTES: usize = 2 << 20;

/// Of all systems: a multiple of it is a whole number of pages.
const LARGEST_PAGE_BYTES: usize = 64 << 10;

/// An anonymous private map aligned to [`LARGE_BYTES`].
#[derive(Debug)]
pub(crate) struct Pages {
    start: NonNull<u8>,
    /// Bytes that were asked for, and those that are mapped.
    len: usize,
    whole: usize,
}

// SAFETY: a `Pages` owns its map and gives no access to it.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

impl Pages {
    /// `len` bytes, at least 1.
    pub(crate) fn zeroed(len: usize) -> io::Result<Pages> {
        let beyond = || io::Error::from(io::ErrorKind::OutOfMemory);
        let whole = len.checked_next_multiple_of(LARGEST_PAGE_BYTES).ok_or_else(beyond)?;
        let wide = whole.checked_add(LARGE_BYTES).ok_or_else(beyond)?;
        let (protection, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new map anywhere touches nothing that exists.
        let map = unsafe { libc::mmap(std::ptr::null_mut(), wide, protection, flags, -1, 0) };
        if map == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let map = NonNull::new(map.cast::<u8>()).ok_or_else(beyond)?;
        let before = map.as_ptr().align_offset(LARGE_BYTES);
        // SAFETY: the map is longer than `before`, which is below `LARGE_BYTES`, by `whole`.
        let start = unsafe { map.add(before) };
        let pages = Pages { start, len, whole };
        // SAFETY: both are whole pages of the new map, before and behind what is kept.
        unsafe {
            unmap(map, before);
            unmap(start.add(whole), wide - before - whole);
        }
        #[cfg(target_os = "linux")]
        // SAFETY: advice about pages of ours. If it is refused pages stay small.
        unsafe {
            libc::madvise(start.as_ptr().cast(), whole, libc::MADV_HUGEPAGE);
        }
        Ok(pages)
    }

    /// `len` bytes with the contents of whatever they were before: of `scraps`, as far as those
    /// reach, whose last ones go first.
    pub(crate) fn of_scraps(len: usize, scraps: &mut Vec<Pages>) -> io::Result<Pages> {
        let pages = Pages::zeroed(len)?;
        let mut done = 0;
        while done + LARGE_BYTES <= len
            && let Some(scrap) = scraps.last_mut()
        {
            // One large page at a time: a map that was put together is many to the system.
            if scrap.huge_bytes() > 0 && pages.move_in(done, scrap)? {
                done += LARGE_BYTES;
            } else {
                scraps.pop();
            }
        }
        Ok(pages)
    }

    /// Bytes of its large pages: what [`Pages::of_scraps`] can use.
    pub(crate) fn huge_bytes(&self) -> usize {
        self.len / LARGE_BYTES * LARGE_BYTES
    }

    /// Moves the last large page of `scrap` to `at`; false if the system refuses, and what is there
    /// then is zero.
    #[cfg(target_os = "linux")]
    fn move_in(&self, at: usize, scrap: &mut Pages) -> io::Result<bool> {
        let from = scrap.huge_bytes() - LARGE_BYTES;
        assert!(at + LARGE_BYTES <= self.len && at.is_multiple_of(LARGE_BYTES), "a page of ours");
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        // SAFETY: both are large pages of maps that nobody else uses; what lay at `at` goes.
        let moved = unsafe {
            let (from, to) = (scrap.start.add(from), self.start.add(at));
            let (from, to) = (from.as_ptr().cast(), to.as_ptr().cast::<libc::c_void>());
            libc::mremap(from, LARGE_BYTES, LARGE_BYTES, flags, to)
        };
        if moved == libc::MAP_FAILED {
            // It may have unmapped what lay at `at` before it gave up.
            self.map_again(at)?;
            return Ok(false);
        }
        // SAFETY: what is behind the page that went is still ours, and nobody uses it.
        unsafe { unmap(scrap.start.add(from + LARGE_BYTES), scrap.whole - from - LARGE_BYTES) };
        (scrap.len, scrap.whole) = (from, from);
        Ok(true)
    }

    #[cfg(not(target_os = "linux"))]
    fn move_in(&self, _: usize, _: &mut Pages) -> io::Result<bool> {
        Ok(false)
    }

    /// A fresh large page at `at`, in the place of whatever is there.
    #[cfg(target_os = "linux")]
    fn map_again(&self, at: usize) -> io::Result<()> {
        assert!(at + LARGE_BYTES <= self.len && at.is_multiple_of(LARGE_BYTES), "a page of ours");
        let (protection, flags) = (
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED,
        );
        // SAFETY: the range is inside a map of ours that nobody uses yet.
        let map = unsafe {
            let place = self.start.add(at).as_ptr().cast();
            libc::mmap(place, LARGE_BYTES, protection, flags, -1, 0)
        };
        if map == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: the map is ours, and nobody uses it after its owner.
        unsafe { unmap(self.start, self.whole) };
    }
}

/// # Safety
/// `len` bytes from `start` on, a page's start, are mapped by us and not used any more.
unsafe fn unmap(start: NonNull<u8>, len: usize) {
    if len > 0 {
        // SAFETY: the caller's promise. Unmapping whole maps of ours cannot fail.
        unsafe { libc::munmap(start.as_ptr().cast(), len) };
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn a_page_that_is_mapped_again_is_zero_and_ours() {
        let pages = Pages::zeroed(3 * LARGE_BYTES).unwrap();
        // SAFETY: the test alone uses the map, inside its length.
        let bytes = unsafe { std::slice::from_raw_parts_mut(pages.start().as_ptr(), pages.len) };
        bytes.fill(5);
        // SAFETY: as a refused move leaves it.
        unsafe { unmap(pages.start().add(LARGE_BYTES), LARGE_BYTES) };
        pages.map_again(LARGE_BYTES).unwrap();
        let firsts: Vec<u8> = bytes.chunks(LARGE_BYTES).map(|page| page[9]).collect();
        assert_eq!(firsts, [5, 0, 5]);
        bytes[LARGE_BYTES] = 1;
    }
}
