//! [`HostBytes`]: one aligned block of host memory with a boxed owner.
//!
//! Invariants:
//! - the block stays at its address and valid until the owner is dropped, which happens exactly
//!   once, when the `HostBytes` is dropped;
//! - a writable block is referenced by nobody else; a read-only block is never written through.
#![allow(unsafe_code)]

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::any::Any;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::os::{MAPPED_BYTES, Pages};

/// Alignment of every block and unit of the on-disk layout.
pub const PAGE_BYTES: usize = 4096;

/// A page-aligned block of host memory: heap, pinned, mapped or registered, as its owner decides.
pub struct HostBytes {
    start: NonNull<u8>,
    len: usize,
    writable: bool,
    _owner: Box<dyn Any + Send + Sync>,
}

// SAFETY: the block is plain memory owned (through `_owner`, itself Send + Sync) by this value
// alone; shared access only reads, exclusive access needs `&mut self`.
unsafe impl Send for HostBytes {}
// SAFETY: as above.
unsafe impl Sync for HostBytes {}

impl HostBytes {
    /// A zeroed, page-aligned, writable block of `len` bytes; a large one is on huge pages where the
    /// system has them.
    pub fn zeroed(len: usize) -> HostBytes {
        HostBytes::zeroed_with(len, ())
    }

    /// [`HostBytes::zeroed`], keeping `lease` alive as long as the block: its drop returns the
    /// block's share to whoever counts it.
    pub fn zeroed_with<L: Any + Send + Sync>(len: usize, lease: L) -> HostBytes {
        let fresh = Fresh::zeroed(len);
        let start = fresh.start();
        HostBytes { start, len, writable: true, _owner: Box::new((fresh, lease)) }
    }

    /// A page-aligned, writable block of `len` bytes whose contents are unspecified (but initialised),
    /// of `scraps` as far as those reach.
    pub(crate) fn of_scraps(len: usize, scraps: &mut Vec<Pages>) -> HostBytes {
        if len < MAPPED_BYTES {
            return HostBytes::zeroed(len);
        }
        let fresh = match Pages::of_scraps(len, scraps) {
            Ok(pages) => Fresh::Large(pages),
            Err(_) => Fresh::zeroed(len),
        };
        let start = fresh.start();
        HostBytes { start, len, writable: true, _owner: Box::new((fresh, ())) }
    }

    /// The pages of a large block that [`HostBytes::zeroed`] or [`HostBytes::of_scraps`] made.
    pub(crate) fn into_pages(self) -> Option<Pages> {
        match self._owner.downcast::<(Fresh, ())>().map(|owner| owner.0) {
            Ok(Fresh::Large(pages)) => Some(pages),
            _ => None,
        }
    }

    /// A block that starts at `start`, valid as long as `owner` lives.
    ///
    /// # Safety
    /// `start..start + len` must be one allocation or mapping that `owner` keeps alive and
    /// unmoved, aligned for what it is read as, initialised, and neither written nor (if `writable`)
    /// read by anybody else while the block lives.
    pub unsafe fn from_owner<O: Any + Send + Sync>(
        start: NonNull<u8>,
        len: usize,
        writable: bool,
        owner: O,
    ) -> HostBytes {
        HostBytes { start, len, writable, _owner: Box::new(owner) }
    }

    /// A read-only block of what several read.
    pub fn view(block: &Arc<HostBytes>) -> HostBytes {
        let (start, len, owner) = (block.start, block.len, Arc::clone(block));
        HostBytes { start, len, writable: false, _owner: Box::new(owner) }
    }

    /// The same block, which is passed to `release` instead of being dropped.
    pub fn released_to<R>(self, release: R) -> HostBytes
    where
        R: FnOnce(HostBytes) + Send + Sync + 'static,
    {
        let (start, len, writable) = (self.start, self.len, self.writable);
        let owner = Released { block: Some(self), release: Some(release) };
        HostBytes { start, len, writable, _owner: Box::new(owner) }
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the block has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether [`HostBytes::bytes_mut`] is allowed.
    pub fn is_writable(&self) -> bool {
        self.writable
    }

    /// The block's bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: `from_owner`'s contract and `Fresh` keep `start..start + len` valid and
        // initialised while `self` lives; writing needs `&mut self`.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }

    /// The block's bytes, writable.
    ///
    /// # Panics
    /// On a read-only block: that is a programmer's error.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        assert!(self.writable, "write to a read-only block");
        // SAFETY: as in `bytes`; the block is writable and exclusively borrowed.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }

    /// The block as little-endian float32 values (`len / 4` of them).
    pub fn f32s(&self) -> &[f32] {
        // SAFETY: every bit pattern is an f32; alignment and length are checked by `align_to`.
        let (head, body, tail) = unsafe { self.bytes().align_to::<f32>() };
        assert!(head.is_empty() && tail.is_empty(), "block is not a float32 array");
        body
    }

    /// The block as little-endian 16-bit words (`len / 2` of them).
    pub fn u16s(&self) -> &[u16] {
        // SAFETY: every bit pattern is a u16; alignment and length are checked by `align_to`.
        let (head, body, tail) = unsafe { self.bytes().align_to::<u16>() };
        assert!(head.is_empty() && tail.is_empty(), "block is not an array of 16-bit words");
        body
    }

    /// The block as 16-bit words, writable. Panics as [`HostBytes::bytes_mut`].
    pub fn u16s_mut(&mut self) -> &mut [u16] {
        // SAFETY: as in `u16s`.
        let (head, body, tail) = unsafe { self.bytes_mut().align_to_mut::<u16>() };
        assert!(head.is_empty() && tail.is_empty(), "block is not an array of 16-bit words");
        body
    }

    /// The block as 32-bit words, writable. Panics as [`HostBytes::bytes_mut`].
    pub fn u32s_mut(&mut self) -> &mut [u32] {
        // SAFETY: every bit pattern is a u32; alignment and length are checked by `align_to`.
        let (head, body, tail) = unsafe { self.bytes_mut().align_to_mut::<u32>() };
        assert!(head.is_empty() && tail.is_empty(), "block is not an array of 32-bit words");
        body
    }

    /// The block as float32 values, writable. Panics as [`HostBytes::bytes_mut`].
    pub fn f32s_mut(&mut self) -> &mut [f32] {
        // SAFETY: as in `f32s`.
        let (head, body, tail) = unsafe { self.bytes_mut().align_to_mut::<f32>() };
        assert!(head.is_empty() && tail.is_empty(), "block is not a float32 array");
        body
    }
}

impl fmt::Debug for HostBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostBytes")
            .field("len", &self.len)
            .field("writable", &self.writable)
            .finish()
    }
}

/// Owns a block that does not move, and hands it on when the block around it is dropped.
struct Released<R: FnOnce(HostBytes)> {
    block: Option<HostBytes>,
    release: Option<R>,
}

impl<R: FnOnce(HostBytes)> Drop for Released<R> {
    fn drop(&mut self) {
        if let (Some(block), Some(release)) = (self.block.take(), self.release.take()) {
            release(block);
        }
    }
}

/// Fresh memory: large blocks are maps of their own.
enum Fresh {
    Heap(Heap),
    Large(Pages),
}

impl Fresh {
    fn zeroed(len: usize) -> Fresh {
        let layout = Layout::from_size_align(len.max(1), PAGE_BYTES)
            .unwrap_or_else(|_| panic!("block of {len} bytes is beyond the address space"));
        if len < MAPPED_BYTES {
            return Fresh::Heap(Heap::zeroed(layout));
        }
        let pages = Pages::zeroed(len);
        Fresh::Large(pages.unwrap_or_else(|_| handle_alloc_error(layout)))
    }

    fn start(&self) -> NonNull<u8> {
        match self {
            Fresh::Heap(heap) => heap.start,
            Fresh::Large(pages) => pages.start(),
        }
    }
}

struct Heap {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: `Heap` owns its allocation and gives no access to it.
unsafe impl Send for Heap {}
// SAFETY: as above.
unsafe impl Sync for Heap {}

impl Heap {
    fn zeroed(layout: Layout) -> Heap {
        // SAFETY: the layout's size is at least 1.
        let start = unsafe { alloc_zeroed(layout) };
        let Some(start) = NonNull::new(start) else { handle_alloc_error(layout) };
        Heap { start, layout }
    }
}

impl Drop for Heap {
    fn drop(&mut self) {
        // SAFETY: allocated in `zeroed` with this very layout, freed only here.
        unsafe { dealloc(self.start.as_ptr(), self.layout) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::os::LARGE_BYTES;

    #[test]
    fn heap_blocks_are_zeroed_aligned_and_writable() {
        let mut block = HostBytes::zeroed(4096 + 4);
        assert_eq!(block.bytes().as_ptr() as usize % PAGE_BYTES, 0);
        assert!(block.bytes().iter().all(|&b| b == 0));
        block.f32s_mut()[1024] = 1.5;
        assert_eq!(block.bytes()[4096..], 1.5f32.to_le_bytes());
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn pages_serve_in_another_shape() {
        let block = |pages: usize, byte: u8| {
            let mut block = HostBytes::zeroed(pages * LARGE_BYTES + 100);
            block.bytes_mut().fill(byte);
            block.into_pages().unwrap()
        };
        let mut scraps = vec![block(3, 1), block(1, 2)];
        let mut whole = HostBytes::of_scraps(3 * LARGE_BYTES + 70_000, &mut scraps);
        let pages: Vec<u8> = whole.bytes().chunks(LARGE_BYTES).map(|page| page[0]).collect();
        assert_eq!(pages, [2, 1, 1, 0], "the rest is fresh");
        let count = |byte: u8| whole.bytes().iter().filter(|b| **b == byte).count();
        assert_eq!((count(1), count(2)), (2 * LARGE_BYTES, LARGE_BYTES));
        assert_eq!(scraps.iter().map(Pages::huge_bytes).sum::<usize>(), LARGE_BYTES);
        whole.bytes_mut().fill(7);
        // A map that was put together of several comes apart again.
        scraps.push(whole.into_pages().unwrap());
        let small: Vec<HostBytes> =
            (0..4).map(|_| HostBytes::of_scraps(LARGE_BYTES, &mut scraps)).collect();
        let first: Vec<u8> = small.iter().map(|block| block.bytes()[LARGE_BYTES - 1]).collect();
        assert_eq!(first, [7, 7, 7, 1]);
        assert!(
            small.iter().all(|block| (block.bytes().as_ptr() as usize).is_multiple_of(LARGE_BYTES))
        );
        assert_eq!(HostBytes::of_scraps(LARGE_BYTES, &mut scraps).bytes()[0], 0);
        assert!(HostBytes::zeroed(100).into_pages().is_none());
    }

    #[test]
    fn large_blocks_are_zeroed_aligned_writable_and_given_back() {
        for len in [LARGE_BYTES, LARGE_BYTES + 4, 3 * LARGE_BYTES + 70_000] {
            let mut block = HostBytes::zeroed(len);
            assert!((block.bytes().as_ptr() as usize).is_multiple_of(LARGE_BYTES));
            assert!(block.bytes().iter().all(|byte| *byte == 0));
            block.bytes_mut()[len - 1] = 1;
        }
        // All of them together are beyond the address space.
        (0..200_000).for_each(|_| drop(HostBytes::zeroed(1 << 30)));
    }

    #[test]
    fn dropping_a_block_drops_its_lease() {
        let lease = Arc::new(());
        let block = HostBytes::zeroed_with(8, Arc::clone(&lease));
        assert_eq!(Arc::strong_count(&lease), 2);
        drop(block);
        assert_eq!(Arc::strong_count(&lease), 1);
    }

    #[test]
    fn a_released_block_comes_back_whole() {
        let back = Arc::new(std::sync::Mutex::new(None));
        let mut block = HostBytes::zeroed(8);
        block.f32s_mut()[1] = 2.5;
        let here = Arc::clone(&back);
        let lent = block.released_to(move |block| *here.lock().unwrap() = Some(block));
        assert_eq!((lent.f32s(), lent.is_writable()), (&[0.0, 2.5][..], true));
        assert!(back.lock().unwrap().is_none());
        drop(lent);
        assert_eq!(back.lock().unwrap().take().unwrap().f32s(), [0.0, 2.5]);
    }

    #[test]
    fn a_view_outlives_other_holders() {
        let mut block = HostBytes::zeroed(8);
        block.f32s_mut()[1] = 2.5;
        let shared = Arc::new(block);
        let view = HostBytes::view(&shared);
        assert_eq!(view.bytes().as_ptr(), shared.bytes().as_ptr());
        drop(shared);
        assert_eq!((view.f32s(), view.is_writable()), (&[0.0, 2.5][..], false));
    }

    #[test]
    #[should_panic(expected = "read-only")]
    fn read_only_blocks_refuse_writes() {
        static WORDS: [u32; 1] = [7];
        // SAFETY: a static is never moved, freed or written.
        let mut block =
            unsafe { HostBytes::from_owner(NonNull::from(&WORDS).cast(), 4, false, ()) };
        block.bytes_mut();
    }
}
