//! Recovery: from the bytes of a directory to the state of its last commit, changing nothing.

use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use crate::StoreError;
use crate::files;
use crate::io::{Guard, Io, Lock, LockKind};
use crate::layout::{COMMIT_DIR, CONFIG_FILE, Layout, RUN_FILE, STORE_FILE, Unusable};
use crate::log::{self, COPIES, Parsed};
use crate::record::{self, State};

/// What opening a store found and did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recovery {
    /// An append that never finished, and was left behind.
    pub cut: Option<Cut>,
    /// Whether every live slot was read and compared with its hashes.
    pub checked: bool,
    /// Sentences for the user.
    pub warnings: Vec<String>,
}

/// The tail of a log that holds no valid record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cut {
    pub file: PathBuf,
    pub offset: u64,
    /// It is a record that was written throughout, in this copy or the other: damage, not an append
    /// that a crash tore. The step that it committed may have been durable.
    pub rotten: bool,
}

/// A store read from disk, not yet opened for anything.
#[derive(Debug)]
pub(crate) struct Recovered {
    pub(crate) layout: Layout,
    pub(crate) config_json: String,
    pub(crate) state: State,
    /// The state before the last record, if the log still tells.
    pub(crate) before: Option<State>,
    pub(crate) sequence: u64,
    /// Highest log number seen.
    pub(crate) number: u64,
    pub(crate) recovery: Recovery,
}

/// Reads `store.json`, `config.json` and the commit log of `dir`.
pub(crate) fn recover(io: &dyn Io, dir: &Path) -> Result<Recovered, StoreError> {
    let layout = read_layout(io, dir)?;
    let (number, chosen) = read_log(io, dir)?;
    let config_json = read_config(io, dir, &layout)?;
    if chosen.state.layers.len() != layout.table.len() {
        let what = format!("its record has {} layers", chosen.state.layers.len());
        return Err(StoreError::damaged(log::path(dir, number, COPIES[chosen.copy]), what));
    }
    let cut = chosen.torn_at.map(|offset| Cut {
        file: log::path(dir, number, COPIES[chosen.copy]),
        offset,
        rotten: chosen.rotten,
    });
    let mut warnings = io.disk_warnings(dir);
    warnings.extend(chosen.warnings);
    Ok(Recovered {
        layout,
        config_json,
        before: chosen.before.filter(|before| before.layers.len() == chosen.state.layers.len()),
        state: chosen.state,
        sequence: chosen.sequence,
        number,
        recovery: Recovery { cut, checked: false, warnings },
    })
}

/// Locks `store.json`, waiting at most `wait` for whoever has it.
pub(crate) fn lock(
    io: &dyn Io,
    dir: &Path,
    kind: LockKind,
    wait: Duration,
) -> Result<Lock, StoreError> {
    const POLL: Duration = Duration::from_millis(20);
    let path = dir.join(STORE_FILE);
    if !io.exists(&path)? {
        let what = format!("{} is not a store: it has no {STORE_FILE}", dir.display());
        return Err(StoreError::Invalid(what));
    }
    let deadline = Instant::now() + wait;
    loop {
        if let Some(lock) = io.lock(&path, kind)? {
            return Ok(lock);
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(StoreError::InUse { dir: dir.to_owned() });
        }
        thread::sleep(left.min(POLL));
    }
}

fn read_layout(io: &dyn Io, dir: &Path) -> Result<Layout, StoreError> {
    let path = dir.join(STORE_FILE);
    let text = files::read(io, &path)?;
    match Layout::from_json(&text) {
        Ok(layout) => Ok(layout),
        Err(Unusable::Unknown(what)) => {
            Err(StoreError::Invalid(format!("{}: {what}", path.display())))
        }
        Err(Unusable::Damaged(what)) => {
            // The first file of a creation may be the one that it was interrupted in.
            newest_log(io, dir)?;
            Err(StoreError::damaged(path, what))
        }
    }
}

/// Text of `config.json`, which decides how the layers of `layout` are computed.
fn read_config(io: &dyn Io, dir: &Path, layout: &Layout) -> Result<String, StoreError> {
    let path = dir.join(CONFIG_FILE);
    if !io.exists(&path)? {
        return Err(StoreError::damaged(path, "the file is missing; restore it"));
    }
    let text = files::read_text(io, &path)?;
    match layout.check_config(&text, !io.is_off(Guard::ConfigHash)) {
        Ok(()) => Ok(text),
        Err(what) => Err(StoreError::damaged(path, format!("{what}; restore it"))),
    }
}

/// The newest log's number and what its copies say. Older logs are leftovers: the newest got its
/// name only after it restated what they say.
fn read_log(io: &dyn Io, dir: &Path) -> Result<(u64, log::Chosen), StoreError> {
    let number = newest_log(io, dir)?;
    let mut unreadable = None;
    let mut read = |copy| {
        let path = log::path(dir, number, copy);
        read_copy(io, &path, number, &mut unreadable)
    };
    let copies = [read(COPIES[0])?, read(COPIES[1])?];
    if let (true, Some(error)) = (copies.iter().all(Result::is_err), unreadable) {
        return Err(error);
    }
    let name = format!("{number:08}");
    let chosen = log::choose(&name, copies)
        .map_err(|what| StoreError::damaged(log::path(dir, number, COPIES[0]), what))?;
    Ok((number, chosen))
}

/// What a copy says, or why it says nothing and the other one has to do; the first failure to read
/// stays in `unreadable`.
fn read_copy(
    io: &dyn Io,
    path: &Path,
    number: u64,
    unreadable: &mut Option<StoreError>,
) -> Result<Result<Parsed, String>, StoreError> {
    let bytes = match read_if_there(io, path) {
        Ok(Some(bytes)) => bytes,
        Ok(None) => return Ok(Err("is missing".into())),
        Err(error) => {
            let why = format!("cannot be read ({error})");
            unreadable.get_or_insert(error);
            return Ok(Err(why));
        }
    };
    let unknown = |what| StoreError::Invalid(format!("{}: {what}", path.display()));
    let unchecked = io.is_off(Guard::RecordChecksum);
    let decode = if unchecked { record::decode_unchecked } else { record::decode };
    log::parse(number, &bytes, decode).map(Ok).map_err(unknown)
}

fn read_if_there(io: &dyn Io, path: &Path) -> Result<Option<Vec<u8>>, StoreError> {
    if io.exists(path)? { files::read(io, path).map(Some) } else { Ok(None) }
}

fn newest_log(io: &dyn Io, dir: &Path) -> Result<u64, StoreError> {
    let commit = dir.join(COMMIT_DIR);
    let names = if io.exists(&commit)? { io.list(&commit)? } else { Vec::new() };
    if let Some(number) = names.iter().filter_map(|name| log::number_of(name)).max() {
        return Ok(number);
    }
    // Only a store that was finished can have had a run.
    if io.exists(&dir.join(RUN_FILE))? {
        let what = "it holds no commit log although the store was trained; restore it from a copy \
                    (the weights in layers/ are untouched)";
        return Err(StoreError::damaged(commit, what));
    }
    Err(StoreError::Invalid(format!(
        "{} is an unfinished store: its creation was interrupted; remove it and create it again",
        dir.display()
    )))
}
