//! Views of matrices: shared with any strides, exclusive ones row-major.
//!
//! Invariant: a [`MatMut`] is the only way to its elements while it lives; its parts are disjoint.
#![allow(unsafe_code)]

use std::marker::PhantomData;
use std::ops::Range;
use std::ptr::NonNull;

/// A matrix that is read; element (i, j) is `data[i * row_stride + j * col_stride]`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MatRef<'a, T = f32> {
    data: &'a [T],
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
}

impl<'a, T: Copy> MatRef<'a, T> {
    /// `data [rows, cols]`, row-major.
    pub(crate) fn new(data: &'a [T], rows: usize, cols: usize) -> MatRef<'a, T> {
        assert_eq!(data.len(), rows * cols, "a matrix has rows x columns elements");
        MatRef { data, rows, cols, row_stride: cols, col_stride: 1 }
    }

    pub(crate) fn transpose(self) -> MatRef<'a, T> {
        let MatRef { data, rows, cols, row_stride, col_stride } = self;
        MatRef { data, rows: cols, cols: rows, row_stride: col_stride, col_stride: row_stride }
    }

    pub(crate) fn subrows(self, range: Range<usize>) -> MatRef<'a, T> {
        assert!(range.start < range.end && range.end <= self.rows, "{range:?} of {}", self.rows);
        MatRef { data: &self.data[range.start * self.row_stride..], rows: range.len(), ..self }
    }

    pub(crate) fn subcols(self, range: Range<usize>) -> MatRef<'a, T> {
        self.transpose().subrows(range).transpose()
    }

    pub(crate) fn rows(self) -> usize {
        self.rows
    }

    pub(crate) fn cols(self) -> usize {
        self.cols
    }

    pub(super) fn row_stride(self) -> usize {
        self.row_stride
    }

    pub(super) fn col_stride(self) -> usize {
        self.col_stride
    }

    /// The elements from (0, 0) on; at least up to the last one of the matrix.
    pub(super) fn data(self) -> &'a [T] {
        self.data
    }
}

/// A row-major matrix that is written, possibly a part of a wider one.
#[derive(Debug)]
pub(crate) struct MatMut<'a> {
    start: NonNull<f32>,
    rows: usize,
    cols: usize,
    stride: usize,
    exclusive: PhantomData<&'a mut [f32]>,
}

// SAFETY: a `MatMut` is an exclusive borrow of its elements, like `&mut [f32]`.
unsafe impl Send for MatMut<'_> {}

impl<'a> MatMut<'a> {
    /// `data [rows, cols]`, row-major.
    pub(crate) fn new(data: &'a mut [f32], rows: usize, cols: usize) -> MatMut<'a> {
        assert_eq!(data.len(), rows * cols, "a matrix has rows x columns elements");
        MatMut {
            start: NonNull::from(data).cast(),
            rows,
            cols,
            stride: cols,
            exclusive: PhantomData,
        }
    }

    /// The same elements for a shorter time.
    pub(crate) fn reborrow(&mut self) -> MatMut<'_> {
        MatMut { exclusive: PhantomData, ..*self }
    }

    /// The rows before `at` and the others.
    pub(crate) fn split_at_row(self, at: usize) -> (MatMut<'a>, MatMut<'a>) {
        assert!(at <= self.rows, "row {at} of {}", self.rows);
        let below = if at < self.rows { self.offset(at * self.stride) } else { self.start };
        let rest = MatMut { start: below, rows: self.rows - at, ..self };
        (MatMut { rows: at, ..self }, rest)
    }

    /// The columns before `at` and the others.
    pub(crate) fn split_at_col(self, at: usize) -> (MatMut<'a>, MatMut<'a>) {
        assert!(at <= self.cols, "column {at} of {}", self.cols);
        let right = if at < self.cols && self.rows > 0 { self.offset(at) } else { self.start };
        let rest = MatMut { start: right, cols: self.cols - at, ..self };
        (MatMut { cols: at, ..self }, rest)
    }

    pub(crate) fn subrows(self, range: Range<usize>) -> MatMut<'a> {
        self.split_at_row(range.end).0.split_at_row(range.start).1
    }

    pub(crate) fn subcols(self, range: Range<usize>) -> MatMut<'a> {
        self.split_at_col(range.end).0.split_at_col(range.start).1
    }

    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    pub(crate) fn cols(&self) -> usize {
        self.cols
    }

    pub(super) fn stride(&self) -> usize {
        self.stride
    }

    /// The first element; row i starts `i * stride` further, and only its `cols` elements are ours.
    pub(super) fn start(&mut self) -> *mut f32 {
        self.start.as_ptr()
    }

    pub(crate) fn row(&mut self, i: usize) -> &mut [f32] {
        assert!(i < self.rows, "row {i} of {}", self.rows);
        // SAFETY: the row lies inside the matrix, which is borrowed exclusively.
        unsafe {
            std::slice::from_raw_parts_mut(self.start.as_ptr().add(i * self.stride), self.cols)
        }
    }

    pub(crate) fn fill(&mut self, value: f32) {
        (0..self.rows).for_each(|i| self.row(i).fill(value));
    }

    /// `elements` must lead to an element of the matrix.
    fn offset(&self, elements: usize) -> NonNull<f32> {
        // SAFETY: callers pass the position of one of the matrix's own elements.
        unsafe { self.start.add(elements) }
    }
}

/// The blocks of `c` with the row and column they start at.
pub(crate) fn grid(c: MatMut<'_>, block: (usize, usize)) -> Vec<(usize, usize, MatMut<'_>)> {
    let (m, n) = (c.rows(), c.cols());
    let mut blocks = Vec::new();
    let mut below = c;
    for i in (0..m).step_by(block.0.min(m).max(1)) {
        let (mut right, rest) = below.split_at_row(block.0.min(m - i));
        below = rest;
        for j in (0..n).step_by(block.1.min(n).max(1)) {
            let (c, rest) = right.split_at_col(block.1.min(n - j));
            right = rest;
            blocks.push((i, j, c));
        }
    }
    blocks
}
