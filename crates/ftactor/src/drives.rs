//! `--spread`: other drives that layers of a new store go to, each with a share like its rate.

use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use store::{Io, MARK_FILE, Spread, measure_disk, show_bytes};

use crate::exit::{Refused, refuse};
use crate::machine;
use crate::options::IoChoice;
use crate::out::errln;

/// Moved on each drive to see how fast it is, and the least that says anything.
const SAMPLE_BYTES: u64 = 128 << 20;
const LEAST_BYTES: u64 = 16 << 20;

/// The rates of a new store's directory and of `others`; `source`: a store that is read meanwhile.
pub(crate) fn measured(
    store: &Path,
    others: &[PathBuf],
    source: Option<&Path>,
) -> anyhow::Result<Spread> {
    let home = resolved(store, "the store")?;
    refuse_inside_layers(&home)?;
    if others.is_empty() {
        return Ok(Spread::default());
    }
    let io = machine::training_engine(Some(IoChoice::Direct), u64::MAX);
    let mut known = vec![(io.drive(existing(&home))?, home.clone())];
    if let Some(source) = source {
        let source = resolved(source, "the store")?;
        known.push((io.drive(&source)?, source));
    }
    let mut dirs = Vec::new();
    for other in others {
        let dir = resolved(other, "--spread")?;
        check_place(&dir, &known)?;
        let drive = io.drive(existing(&dir))?;
        if let Some((_, twin)) = known.iter().find(|(known, _)| *known == drive) {
            let (dir, twin) = (dir.display(), twin.display());
            errln!("warning: {dir} and {twin} are on one file system: nothing is gained by both");
        }
        known.push((drive, dir.clone()));
        dirs.push(dir);
    }
    let home = rate(&io, &home)?;
    let others = dirs.into_iter().map(|dir| Ok((dir.clone(), rate(&io, &dir)?)));
    Ok(Spread { home, others: others.collect::<anyhow::Result<_>>()? })
}

/// Without symbolic links and dots, as far as it is there.
fn resolved(path: &Path, what: &str) -> anyhow::Result<PathBuf> {
    let fail = |why: &dyn std::fmt::Display| {
        Refused(format!("{what} {}: {why}; give another directory", path.display()))
    };
    let whole = std::path::absolute(path)?;
    if whole.is_symlink() && !whole.exists() {
        return Err(fail(&"a symbolic link that leads nowhere").into());
    }
    let there = existing(&whole);
    let rest = whole.strip_prefix(there).unwrap_or(Path::new(""));
    if rest.components().any(|part| part == Component::ParentDir) {
        return Err(fail(&"it leads through a directory that is not there").into());
    }
    let there = there.canonicalize().map_err(|error| fail(&error))?;
    Ok(if rest.as_os_str().is_empty() { there } else { there.join(rest) })
}

/// Refuses what is not an empty or new directory of its own.
fn check_place(dir: &Path, known: &[(u64, PathBuf)]) -> anyhow::Result<()> {
    let no = |why: &str| refuse(format!("--spread {}: {why}", dir.display()));
    if known.iter().any(|(_, known)| dir.starts_with(known) || known.starts_with(dir)) {
        return no("give a directory of its own, outside the store and the others");
    }
    refuse_inside_layers(dir)?;
    if dir.exists() && !dir.is_dir() {
        return no("it is a file; choose another directory");
    }
    match std::fs::read_dir(dir).map(|mut entries| entries.next().is_some()) {
        Ok(true) => no("it is not empty (what is left of a store that is gone can be removed); \
                        choose another directory"),
        _ => Ok(()),
    }
}

/// Refuses a directory among the layers of a store.
fn refuse_inside_layers(dir: &Path) -> anyhow::Result<()> {
    match dir.ancestors().skip(1).find(|dir| dir.join(MARK_FILE).exists()) {
        Some(layers) => {
            let (dir, layers) = (dir.display(), layers.display());
            refuse(format!("{dir}: {layers} has the layers of a store; choose another directory"))
        }
        None => Ok(()),
    }
}

/// Bytes per second, read and written at once; the least where there is no room to see.
fn rate(io: &Arc<dyn Io>, dir: &Path) -> anyhow::Result<f64> {
    let there = existing(dir);
    let fail = |error: &dyn std::fmt::Display| {
        Refused(format!("{}: {error}; give a directory that can be written", dir.display()))
    };
    let free = io.free_bytes(there).map_err(|error| fail(&error))?;
    let sample = SAMPLE_BYTES.min(free / 4);
    if sample < LEAST_BYTES {
        // Whether it is enough is for the store to say.
        return Ok(1.0);
    }
    let rate = measure_disk(io, there, sample).map_err(|error| fail(&error))?.both;
    errln!("{}: {}/s read and written at once", dir.display(), show_bytes(rate as u64));
    Ok(rate)
}

/// The directory itself, or what is there of the way to it.
fn existing(dir: &Path) -> &Path {
    dir.ancestors().find(|dir| dir.is_dir()).unwrap_or(dir)
}
