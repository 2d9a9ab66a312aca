//! Which rows a step takes, from a cursor of two numbers.
//!
//! Rules:
//! - a step takes `batch_rows` rows that follow each other in the order of one epoch;
//! - an epoch has rows / batch_rows steps, rounded down; the rest of its rows is left out, another
//!   rest in every epoch when shuffled, and a batch never straddles epochs;
//! - with fewer rows than `batch_rows`, a step is an epoch, and its batch goes through the epoch's
//!   order again and again until it is full.

use serde::{Deserialize, Serialize};

use crate::order::Order;

/// A position in the data: the next row to take.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct Cursor {
    pub epoch: u64,
    /// Rows of the epoch that were taken.
    pub index: u64,
}

impl Cursor {
    /// The position behind a step of `batch_rows`: in this epoch while it has another whole batch.
    pub fn advance(self, batch_rows: u64, rows_per_epoch: u64) -> Cursor {
        let index = self.index.saturating_add(batch_rows);
        if index.saturating_add(batch_rows) > rows_per_epoch {
            return Cursor { epoch: self.epoch.saturating_add(1), index: 0 };
        }
        Cursor { epoch: self.epoch, index }
    }
}

/// Why a cursor cannot be gone on from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no batch of {batch_rows} rows at row {index} of an epoch of {rows} rows")]
pub struct CursorError {
    pub index: u64,
    pub batch_rows: u64,
    pub rows: u64,
}

/// Batches in order; pure, so that a resumed run takes the rows that it would have taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sampler {
    order: Order,
    batch_rows: u64,
}

impl Sampler {
    /// Panics when there are no rows or batches are empty.
    pub fn new(order: Order, batch_rows: u64) -> Sampler {
        assert!(order.rows > 0 && batch_rows > 0, "{batch_rows} of {} rows", order.rows);
        Sampler { order, batch_rows }
    }

    /// Row ids of the step at `cursor`, (batch_rows), and the next step's cursor.
    /// Panics on a cursor that [`Sampler::check`] refuses.
    pub fn batch(&self, cursor: Cursor) -> (Vec<u64>, Cursor) {
        if let Err(error) = self.check(cursor) {
            panic!("{error}");
        }
        let rows = self.order.rows;
        let ids = (cursor.index..cursor.index + self.batch_rows)
            .map(|index| self.order.row(cursor.epoch, index % rows))
            .collect();
        (ids, cursor.advance(self.batch_rows, rows))
    }

    /// Whether a step can be taken at a cursor that was read from somewhere.
    pub fn check(&self, cursor: Cursor) -> Result<(), CursorError> {
        let (batch_rows, rows, index) = (self.batch_rows, self.order.rows, cursor.index);
        let whole = index.checked_add(batch_rows).is_some_and(|end| end <= rows);
        if index == 0 || whole { Ok(()) } else { Err(CursorError { index, batch_rows, rows }) }
    }

    /// Steps of an epoch, at least 1.
    pub fn steps_per_epoch(&self) -> u64 {
        (self.order.rows / self.batch_rows).max(1)
    }

    /// The cursor of a run's step, the first being 0.
    pub fn cursor_at(&self, step: u64) -> Cursor {
        let steps = self.steps_per_epoch();
        Cursor { epoch: step / steps, index: step % steps * self.batch_rows }
    }

    pub fn order(&self) -> &Order {
        &self.order
    }

    pub fn batch_rows(&self) -> u64 {
        self.batch_rows
    }
}
