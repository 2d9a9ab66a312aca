//! [`Target`]: where a read lands, cut into parts that several operations fill at once.

use std::fmt;

use model::HostBytes;

use super::os::{Piece, Whole, cut};

/// A block of host memory waiting to be read into.
#[derive(Debug)]
pub struct Target {
    block: HostBytes,
    in_place: bool,
}

impl Target {
    /// A writable block that reads are copied into.
    pub fn heap(block: HostBytes) -> Target {
        assert!(block.is_writable(), "a read needs a writable block");
        Target { block, in_place: false }
    }

    /// A map of the file itself: a read only brings its pages in.
    pub fn in_place(block: HostBytes) -> Target {
        Target { block, in_place: true }
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.block.len()
    }

    /// Whether there is nothing to read.
    pub fn is_empty(&self) -> bool {
        self.block.is_empty()
    }

    /// Cuts the block into consecutive parts; the lengths must add up to its own.
    pub(crate) fn split(self, lengths: &[usize]) -> (Whole, Vec<Part>) {
        let in_place = self.in_place;
        let (whole, pieces) = cut(self.block, lengths);
        (whole, pieces.into_iter().map(|piece| Part { piece, in_place }).collect())
    }
}

/// One operation's share of a [`Target`].
pub struct Part {
    piece: Piece,
    in_place: bool,
}

impl Part {
    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.bytes().len()
    }

    /// Whether there is nothing to read.
    pub fn is_empty(&self) -> bool {
        self.bytes().is_empty()
    }

    /// Whether the part is a map of the file and must not be written.
    pub fn is_in_place(&self) -> bool {
        self.in_place
    }

    /// The part's bytes.
    pub fn bytes(&self) -> &[u8] {
        self.piece.bytes()
    }

    /// The part's bytes, writable.
    ///
    /// # Panics
    /// On a part that is in place.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        assert!(!self.in_place, "write to a map");
        self.piece.bytes_mut()
    }
}

impl fmt::Debug for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Part").field("len", &self.len()).field("in_place", &self.in_place).finish()
    }
}
