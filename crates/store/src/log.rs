//! The commit log: parsing one copy, choosing between two, starting a new one.
//!
//! Invariants:
//! - a log gets its name only after everything up to its OPEN record is synced, so a named log without
//!   a valid OPEN is damaged, never merely unfinished;
//! - an invalid tail with nothing valid behind it is a torn append; an invalid record with a valid
//!   one behind it is damage;
//! - both copies carry the same bytes; a copy that lags or is damaged is outvoted by an intact one
//!   unless it holds a record that the intact one lacks. One that cannot be read counts as missing.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use model::HostBytes;

use crate::files;
use crate::hashes::hash;
use crate::io::{FileId, Handle, Io, IoError};
use crate::layout::COMMIT_DIR;
use crate::record::{self, RECORD_MAGIC, RawRecord, RecordKind, State};

const MAGIC: [u8; 8] = *b"FTLOG\r\n\0";
const VERSION: u32 = 1;
/// Magic, version, zero, log number, checksum.
const HEAD_BYTES: usize = 8 + 4 + 4 + 8 + 8;
/// Extensions of the two copies.
pub(crate) const COPIES: [&str; 2] = ["log", "mirror"];

/// How a copy ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Tail {
    Clean,
    /// Invalid bytes from `at` on with nothing valid behind them; `rotten`: a record that was
    /// written throughout, so that no crash explains them.
    Torn {
        at: u64,
        rotten: bool,
    },
    /// Invalid bytes at `at` with a valid record behind; `sequence` is the highest of those.
    Damaged {
        at: u64,
        sequence: u64,
    },
}

/// How a record is read off the start of bytes.
pub(crate) type Decode = for<'b> fn(u64, &'b [u8]) -> Option<RawRecord<'b>>;

/// What one copy says.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Parsed {
    /// The last valid record's state and sequence, if the copy has an OPEN record.
    pub(crate) last: Option<(u64, State)>,
    /// The state of the record before that one.
    pub(crate) before: Option<State>,
    pub(crate) tail: Tail,
}

/// Reads one copy of log `number`. The `Err` names something valid that this version cannot use.
/// `decode` is [`record::decode`], but for tests that turn its check off.
pub(crate) fn parse(number: u64, bytes: &[u8], decode: Decode) -> Result<Parsed, String> {
    let mut parsed = Parsed { last: None, before: None, tail: Tail::Clean };
    if bytes.get(..HEAD_BYTES) != Some(&head(number)) {
        refuse_newer(bytes)?;
        parsed.tail = classify(number, bytes, 0);
        return Ok(parsed);
    }
    let (mut at, mut next) = (HEAD_BYTES, None);
    while at < bytes.len() {
        let Some(raw) = decode(number, &bytes[at..]) else { break };
        if next.is_some_and(|next| next != raw.sequence) {
            break;
        }
        let kind = checked_kind(raw.kind, next.is_none(), parsed.last.is_none())?;
        let Ok(state) = record::decode_state(raw.body) else { break };
        if kind == RecordKind::Before {
            parsed.before = Some(state);
        } else if let Some((_, before)) = parsed.last.replace((raw.sequence, state)) {
            parsed.before = Some(before);
        }
        next = Some(raw.sequence.saturating_add(1));
        at += raw.bytes;
    }
    if at < bytes.len() || parsed.last.is_none() {
        parsed.tail = classify(number, bytes, at);
    }
    Ok(parsed)
}

/// A valid header of another version.
fn refuse_newer(bytes: &[u8]) -> Result<(), String> {
    let Some(head) = bytes.get(..HEAD_BYTES) else { return Ok(()) };
    let (body, checksum) = head.split_at(HEAD_BYTES - 8);
    let version = u32::from_le_bytes([head[8], head[9], head[10], head[11]]);
    if head[..8] == MAGIC && hash(body).to_le_bytes() == checksum && version != VERSION {
        return Err(format!("commit log version {version} is unknown here"));
    }
    Ok(())
}

/// The kind with this number, if it may stand where it does: `first` of all, before or after OPEN.
fn checked_kind(number: u16, first: bool, unopened: bool) -> Result<RecordKind, String> {
    let Some(kind) = RecordKind::from_number(number) else {
        return Err(format!("records of kind {number} are unknown here"));
    };
    let fits = match kind {
        RecordKind::Before => first,
        RecordKind::Open => unopened,
        RecordKind::Prepared => false,
        _ => !unopened,
    };
    if fits {
        Ok(kind)
    } else {
        Err(format!("a {} record is beyond this version here", kind.name()))
    }
}

/// Looks behind the invalid bytes at `at` for a valid record.
fn classify(number: u64, bytes: &[u8], at: usize) -> Tail {
    let tail = &bytes[at..];
    let starts = tail.windows(RECORD_MAGIC.len()).enumerate();
    let behind = starts
        .filter(|(_, window)| *window == RECORD_MAGIC)
        .filter_map(|(start, _)| record::decode(number, &tail[start..]))
        .map(|raw| raw.sequence)
        .max();
    match behind {
        Some(sequence) => Tail::Damaged { at: at as u64, sequence },
        None => Tail::Torn { at: at as u64, rotten: record::is_rotten(tail, at) },
    }
}

/// What both copies together say.
#[derive(Debug)]
pub(crate) struct Chosen {
    pub(crate) sequence: u64,
    pub(crate) state: State,
    pub(crate) before: Option<State>,
    /// Where the invalid tail of the chosen copy starts.
    pub(crate) torn_at: Option<u64>,
    /// A copy's last record is damaged, not torn.
    pub(crate) rotten: bool,
    /// Index into [`COPIES`].
    pub(crate) copy: usize,
    pub(crate) warnings: Vec<String>,
}

/// Chooses between the copies (or why one is not to be had) of the log `name`; the `Err` says what
/// is damaged.
pub(crate) fn choose(name: &str, copies: [Result<Parsed, String>; 2]) -> Result<Chosen, String> {
    let mut warnings = Vec::new();
    for (extension, parsed) in COPIES.iter().zip(&copies) {
        warnings.extend(complaint(parsed).map(|c| format!("{name}.{extension} {c}")));
    }
    let rotten = copies.iter().flatten().any(Parsed::is_rotten);
    let highest = copies.iter().flatten().filter_map(Parsed::highest_sequence).max();
    let [first_before, second_before] =
        copies.each_ref().map(|copy| copy.as_ref().ok().and_then(|parsed| parsed.before.clone()));
    let [first, second] = copies.map(|copy| copy.ok().and_then(Parsed::intact));
    if let (Some((a, x)), Some((b, y))) = (&first, &second)
        && a.0 == b.0
        && format!("{:?}", a.1) != format!("{:?}", b.1)
    {
        return Err(format!("its copies disagree ({x:?}, {y:?})"));
    }
    let second_wins = match (&first, &second) {
        (Some((a, x)), Some((b, y))) => (b.0, y == &Tail::Clean) > (a.0, x == &Tail::Clean),
        (first, _) => first.is_none(),
    };
    let chosen = if second_wins { second } else { first };
    let Some(((sequence, state), tail)) = chosen else {
        return Err(format!("no copy is intact ({})", warnings.join("; ")));
    };
    if highest.is_some_and(|highest| highest > sequence) {
        return Err(format!("a later record lies behind damage ({})", warnings.join("; ")));
    }
    let torn_at = match tail {
        Tail::Torn { at, .. } => Some(at),
        Tail::Clean | Tail::Damaged { .. } => None,
    };
    let copy = usize::from(second_wins);
    let before = if second_wins { second_before } else { first_before };
    Ok(Chosen { sequence, state, before, torn_at, rotten, copy, warnings })
}

fn complaint(copy: &Result<Parsed, String>) -> Option<String> {
    match copy.as_ref().map(|parsed| &parsed.tail) {
        Err(why) => Some(why.clone()),
        Ok(Tail::Damaged { at, .. }) => Some(format!("is damaged at byte {at}")),
        Ok(Tail::Torn { at, rotten: false }) => {
            Some(format!("has an incomplete record at byte {at}"))
        }
        Ok(Tail::Torn { at, rotten: true }) => Some(format!("has a damaged record at byte {at}")),
        Ok(Tail::Clean) => None,
    }
}

impl Parsed {
    fn highest_sequence(&self) -> Option<u64> {
        match self.tail {
            Tail::Damaged { sequence, .. } => Some(sequence),
            Tail::Clean | Tail::Torn { .. } => self.last.as_ref().map(|(sequence, _)| *sequence),
        }
    }

    fn is_rotten(&self) -> bool {
        matches!(self.tail, Tail::Torn { rotten: true, .. })
    }

    fn intact(self) -> Option<((u64, State), Tail)> {
        match self.tail {
            Tail::Damaged { .. } => None,
            Tail::Clean | Tail::Torn { .. } => self.last.map(|last| (last, self.tail)),
        }
    }
}

/// A log open for appending.
#[derive(Debug)]
pub(crate) struct Log {
    pub(crate) number: u64,
    files: [Handle; 2],
    /// Where the next record goes.
    pub(crate) end: u64,
    pub(crate) next_sequence: u64,
}

/// Starts log `number` with `state`, and what was true before it if that is known, durably, in both
/// copies.
pub(crate) fn start(
    io: &Arc<dyn Io>,
    dir: &Path,
    number: u64,
    sequence: u64,
    before: Option<&State>,
    state: &State,
) -> Result<Log, IoError> {
    let mut bytes = head(number).to_vec();
    let restated = before.map(|before| (RecordKind::Before, before));
    let mut next_sequence = sequence;
    for (kind, state) in restated.into_iter().chain([(RecordKind::Open, state)]) {
        bytes.extend(record::encode(number, next_sequence, kind, state));
        next_sequence += 1;
    }
    let place = |copy| {
        let file = files::place(&**io, &path(dir, number, copy), &bytes)?;
        Ok::<_, IoError>(Handle::new(io, file))
    };
    let files = [place(COPIES[0])?, place(COPIES[1])?];
    io.sync_dir(&dir.join(COMMIT_DIR))?;
    Ok(Log { number, files, end: bytes.len() as u64, next_sequence })
}

impl Log {
    /// The two copies.
    pub(crate) fn file_ids(&self) -> [FileId; 2] {
        self.files.each_ref().map(Handle::id)
    }

    /// Whether the next record belongs into a new log: the time to open a store must not grow with
    /// the steps behind it.
    pub(crate) fn is_long(&self) -> bool {
        const LONG_BYTES: u64 = 4 << 20;
        self.end > LONG_BYTES
    }

    /// The bytes of the next record, as an I/O block.
    pub(crate) fn next_record(&self, kind: RecordKind, state: &State) -> HostBytes {
        files::block(&record::encode(self.number, self.next_sequence, kind, state))
    }
}

/// Path of a copy of log `number`.
pub(crate) fn path(dir: &Path, number: u64, copy: &str) -> PathBuf {
    dir.join(COMMIT_DIR).join(format!("{number:08}.{copy}"))
}

/// Number of the log a file name belongs to.
pub(crate) fn number_of(name: &str) -> Option<u64> {
    let (stem, extension) = name.split_once('.')?;
    let number = stem.parse().ok().filter(|number| format!("{number:08}") == stem)?;
    COPIES.contains(&extension).then_some(number)
}

fn head(number: u64) -> [u8; HEAD_BYTES] {
    let mut head = [0; HEAD_BYTES];
    head[..8].copy_from_slice(&MAGIC);
    head[8..12].copy_from_slice(&VERSION.to_le_bytes());
    head[16..24].copy_from_slice(&number.to_le_bytes());
    let checksum = hash(&head[..24]);
    head[24..].copy_from_slice(&checksum.to_le_bytes());
    head
}

#[cfg(test)]
mod tests;
