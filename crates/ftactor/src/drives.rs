//! `--spread`: other drives that layers of a new store go to, each with a share like its rate.

use std::path::{Path, PathBuf};

use store::{Spread, measure_disk, show_bytes};

use crate::exit::refuse;
use crate::machine;
use crate::options::IoChoice;
use crate::out::errln;

/// Moved on each drive to see how fast it is.
const SAMPLE_BYTES: u64 = 128 << 20;

/// The rates of a store's directory and of `others`.
pub(crate) fn measured(store: &Path, others: &[PathBuf]) -> anyhow::Result<Spread> {
    if others.is_empty() {
        return Ok(Spread::default());
    }
    let io = machine::training_engine(Some(IoChoice::Direct), u64::MAX);
    let home = std::path::absolute(store)?;
    let mut known = vec![(io.drive(existing(&home))?, home.clone())];
    let rate = |dir: &Path| -> anyhow::Result<f64> {
        let rate = measure_disk(&io, existing(dir), SAMPLE_BYTES)?.both;
        errln!("{}: {}/s read and written at once", dir.display(), show_bytes(rate as u64));
        Ok(rate)
    };
    let mut spread = Spread { home: rate(&home)?, others: Vec::new() };
    for other in others {
        let dir = std::path::absolute(other)?;
        let inside =
            |(_, known): &(u64, PathBuf)| dir.starts_with(known) || known.starts_with(&dir);
        if known.iter().any(inside) {
            return refuse(format!(
                "--spread {}: give a directory of its own, outside the store and the others",
                other.display()
            ));
        }
        let drive = io.drive(existing(&dir))?;
        if let Some((_, twin)) = known.iter().find(|(known, _)| *known == drive) {
            let (dir, twin) = (dir.display(), twin.display());
            errln!("warning: {dir} and {twin} are on one file system: nothing is gained by both");
        }
        known.push((drive, dir.clone()));
        spread.others.push((dir.clone(), rate(&dir)?));
    }
    Ok(spread)
}

/// The directory itself, or what is there of the way to it.
fn existing(dir: &Path) -> &Path {
    dir.ancestors().find(|dir| dir.is_dir()).unwrap_or(dir)
}
