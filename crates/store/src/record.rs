//! [`State`]: everything a commit makes true, and how a log record carries it.
//!
//! Invariants:
//! - kind numbers never change their meaning; a kind this version does not write is refused by
//!   name, never skipped;
//! - a record is believed only if its checksum, which also covers the number of its log, holds.

use std::collections::BTreeMap;

use model::{Attempt, Slot, Step};
use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_64;

use crate::hashes::LayerHashes;

/// A layer inside a [`State`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LayerState {
    /// The live slot.
    pub slot: Slot,
    /// Adam's step count of this layer.
    pub t: u64,
    /// Its weights are not trained.
    pub locked: bool,
    /// Of W, M and V, the hash over the live slot's chunk hashes.
    pub hashes: LayerHashes,
    /// Norm of the layer's gradient in the last step, before clipping.
    pub grad_norm: f64,
}

/// Everything that is true after a commit, restated whole by every record.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct State {
    pub step: Step,
    pub attempt: Attempt,
    /// In the order of the layer table.
    pub layers: Vec<LayerState>,
    /// Data cursor: epoch, and index inside it.
    pub epoch: u64,
    pub index: u64,
    /// Tokens trained on since the run began.
    pub tokens_total: u64,
    pub loss: f64,
    /// Global gradient norm before clipping.
    pub grad_norm: f64,
    pub clip_factor: f32,
    pub learning_rate: f64,
    /// Counters of automatic decisions, by name.
    pub counters: BTreeMap<String, u64>,
}

/// What a record does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum RecordKind {
    /// The state a log starts from.
    Open = 1,
    /// A pool member wrote its slots and waits for the commit.
    Prepared = 2,
    /// A step became durable.
    Committed = 3,
    /// A step was left out by a guard.
    Skipped = 4,
    Locked = 5,
    Unlocked = 6,
    RolledBack = 7,
    Snapshot = 8,
    /// In front of OPEN: what was true before the record that OPEN restates.
    Before = 9,
}

impl RecordKind {
    /// The kind's name as messages give it.
    pub fn name(self) -> &'static str {
        match self {
            RecordKind::Open => "OPEN",
            RecordKind::Prepared => "PREPARED",
            RecordKind::Committed => "COMMITTED",
            RecordKind::Skipped => "SKIPPED",
            RecordKind::Locked => "LOCKED",
            RecordKind::Unlocked => "UNLOCKED",
            RecordKind::RolledBack => "ROLLED_BACK",
            RecordKind::Snapshot => "SNAPSHOT",
            RecordKind::Before => "BEFORE",
        }
    }

    /// The kind with this number.
    pub fn from_number(number: u16) -> Option<RecordKind> {
        use RecordKind::*;
        [Open, Prepared, Committed, Skipped, Locked, Unlocked, RolledBack, Snapshot, Before]
            .into_iter()
            .find(|&kind| kind as u16 == number)
    }
}

/// Marks the start of a record, so that one can be found behind damage.
pub(crate) const RECORD_MAGIC: [u8; 4] = *b"FTRC";
/// Magic, body length, sequence, kind, zero.
const RECORD_HEAD_BYTES: usize = 4 + 4 + 8 + 2 + 2;
const CHECKSUM_BYTES: usize = 8;

/// A record whose checksum holds.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct RawRecord<'b> {
    pub(crate) sequence: u64,
    pub(crate) kind: u16,
    pub(crate) body: &'b [u8],
    /// Bytes of the whole record.
    pub(crate) bytes: usize,
}

/// The bytes of a record of log number `log`.
pub(crate) fn encode(log: u64, sequence: u64, kind: RecordKind, state: &State) -> Vec<u8> {
    let Ok(body) = postcard::to_stdvec(state) else {
        unreachable!("a state of plain values always serialises into memory")
    };
    let Ok(body_bytes) = u32::try_from(body.len()) else {
        panic!("a state of {} bytes is beyond a record", body.len())
    };
    let mut record = RECORD_MAGIC.to_vec();
    record.extend(body_bytes.to_le_bytes());
    record.extend(sequence.to_le_bytes());
    record.extend((kind as u16).to_le_bytes());
    record.extend([0, 0]);
    record.extend(body);
    record.extend(XxHash3_64::oneshot_with_seed(log, &record).to_le_bytes());
    record
}

/// The record at the start of `bytes`, if there is a whole and valid one.
pub(crate) fn decode(log: u64, bytes: &[u8]) -> Option<RawRecord<'_>> {
    let raw = decode_unchecked(log, bytes)?;
    let (checked, checksum) = bytes[..raw.bytes].split_at(raw.bytes - CHECKSUM_BYTES);
    let valid = XxHash3_64::oneshot_with_seed(log, checked).to_le_bytes() == checksum;
    valid.then_some(raw)
}

/// What [`decode`] checks: a record of full length, by its head. The log's number is for the sake of
/// [`decode`]'s signature.
pub(crate) fn decode_unchecked(_log: u64, bytes: &[u8]) -> Option<RawRecord<'_>> {
    let head = bytes.get(..RECORD_HEAD_BYTES)?;
    let body_bytes = u32::from_le_bytes(head[4..8].try_into().ok()?) as usize;
    let checked = RECORD_HEAD_BYTES.checked_add(body_bytes)?;
    let total = checked.checked_add(CHECKSUM_BYTES)?;
    if head[..4] != RECORD_MAGIC || bytes.len() < total {
        return None;
    }
    Some(RawRecord {
        sequence: u64::from_le_bytes(head[8..16].try_into().ok()?),
        kind: u16::from_le_bytes(head[16..18].try_into().ok()?),
        body: &bytes[RECORD_HEAD_BYTES..checked],
        bytes: total,
    })
}

/// Whether the invalid record that fills `bytes`, which lie at `offset` of their file, was written
/// throughout: of its full length, with no unwritten sector. A crash leaves no such record, since
/// what is torn is missing or zero from one sector's edge to another.
pub(crate) fn is_rotten(bytes: &[u8], offset: usize) -> bool {
    const SECTOR_BYTES: usize = 512;
    let Some(head) = bytes.get(..RECORD_HEAD_BYTES) else { return false };
    let body_bytes = u32::from_le_bytes([head[4], head[5], head[6], head[7]]) as usize;
    let full = bytes.len().checked_sub(RECORD_HEAD_BYTES + CHECKSUM_BYTES) == Some(body_bytes);
    let first = (SECTOR_BYTES - offset % SECTOR_BYTES).min(bytes.len());
    let (first, rest) = bytes.split_at(first);
    let mut sectors = std::iter::once(first).chain(rest.chunks(SECTOR_BYTES));
    full && head[..4] == RECORD_MAGIC && sectors.all(|sector| sector.iter().any(|byte| *byte != 0))
}

/// The state in a record's body; the `Err` says what is wrong.
pub(crate) fn decode_state(body: &[u8]) -> Result<State, String> {
    match postcard::take_from_bytes::<State>(body) {
        Ok((state, [])) => Ok(state),
        Ok((_, rest)) => Err(format!("{} bytes follow the state in a record", rest.len())),
        Err(error) => Err(format!("a record's state cannot be read: {error}")),
    }
}

#[cfg(test)]
pub(crate) mod tests;
