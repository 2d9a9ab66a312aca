//! Layers on other drives: `layers/NAME` is a symbolic link to their directory there, and whoever
//! follows names notices nothing.
//!
//! Invariants:
//! - a layer's slots, and what snapshots keep of it, lie on one drive;
//! - a drive that is not there is named before anything is read as missing;
//! - beside a store's layers a mark says where the store is: a copy of the store, which has links to the
//!   very same layers, never trains on them.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use model::{LayerId, LayerTable};

use crate::StoreError;
use crate::files;
use crate::io::{Io, IoError};
use crate::layout::{LAYERS_DIR, STORE_FILE};
use crate::training::Room;

/// Directories that the layers of a new store are spread over, and how fast each is beside the others.
#[derive(Clone, Debug, PartialEq)]
pub struct Spread {
    /// Of the store's own directory.
    pub home: f64,
    /// Empty or not there yet, each on a drive of its own.
    pub others: Vec<(PathBuf, f64)>,
}

impl Default for Spread {
    /// All layers stay at home.
    fn default() -> Spread {
        Spread { home: 1.0, others: Vec::new() }
    }
}

impl Spread {
    /// The place of each layer, 0 for home, then the others in their order: in the order in which a
    /// sweep comes to them, so that drives take turns, each with a share of the bytes like its rate.
    /// `free`: bytes of each place, which may share a drive (`drives`).
    ///
    /// # Errors
    /// The bytes that are lacking.
    pub(crate) fn places(
        &self,
        layer_bytes: &[u64],
        drives: &[u64],
        free: &[u64],
    ) -> Result<Vec<usize>, u64> {
        let rates: Vec<f64> =
            [self.home].into_iter().chain(self.others.iter().map(|(_, rate)| *rate)).collect();
        let (mut seconds, mut taken) = (vec![0.0; rates.len()], vec![0; rates.len()]);
        let mut lacking = 0;
        let mut places = Vec::with_capacity(layer_bytes.len());
        for &bytes in layer_bytes {
            let left = |place: usize, taken: &[u64]| {
                let same = |other: &usize| drives[*other] == drives[place];
                let used: u64 = (0..rates.len()).filter(same).map(|other| taken[other]).sum();
                free[place].saturating_sub(used)
            };
            let fits = (0..rates.len()).filter(|&place| left(place, &taken) >= bytes);
            let after = |place: usize| seconds[place] + bytes as f64 / rates[place];
            match fits.min_by(|&a, &b| after(a).total_cmp(&after(b))) {
                Some(place) => {
                    seconds[place] = after(place);
                    taken[place] += bytes;
                    places.push(place);
                }
                None => lacking += bytes,
            }
        }
        if lacking > 0 { Err(lacking) } else { Ok(places) }
    }
}

/// Says beside layers on another drive where their store is.
pub const MARK_FILE: &str = "ftactor-store";

fn mark_beside(link: &Path) -> PathBuf {
    // Through the link, then up: where it leads to.
    link.join("..").join(MARK_FILE)
}

/// Writes a mark.
pub(crate) fn mark_as(io: &dyn Io, mark: &Path, store: &Path) -> Result<(), IoError> {
    let store = std::path::absolute(store).unwrap_or_else(|_| store.to_owned());
    files::replace(io, mark, format!("{}\n", store.display()).as_bytes())
}

/// Where a store's layers are.
#[derive(Clone, Debug)]
pub(crate) struct Drives {
    /// A directory on each: first the store's own.
    paths: Vec<PathBuf>,
    /// By layer.
    of_layer: Vec<usize>,
    /// By layer: its directory is a link.
    away: Vec<bool>,
}

/// Whether a layer's directory is a link to another drive.
pub(crate) fn is_away(io: &dyn Io, store: &Path, layer: &str) -> Result<bool, IoError> {
    let path = store.join(LAYERS_DIR).join(layer);
    match io.is_link(&path) {
        // What is missing is told by whoever opens it.
        Err(error) if error.source.kind() == ErrorKind::NotFound => Ok(false),
        found => found,
    }
}

impl Drives {
    /// # Errors
    /// `Io` with the name of a drive that is not there.
    pub(crate) fn find(
        io: &dyn Io,
        store: &Path,
        table: &LayerTable,
    ) -> Result<Drives, StoreError> {
        let mut drives =
            Drives { paths: vec![store.to_owned()], of_layer: Vec::new(), away: Vec::new() };
        let mut ids = Vec::new();
        for layer in table.layers() {
            let away = is_away(io, store, &layer.name)?;
            drives.away.push(away);
            if !away {
                drives.of_layer.push(0);
                continue;
            }
            let path = store.join(LAYERS_DIR).join(&layer.name);
            if !io.exists(&path)? {
                let target = io.link_target(&path).unwrap_or_default();
                let what = format!(
                    "{} is not there: is that drive mounted? If it was moved, make the links in \
                     layers/ lead to where it is now",
                    target.display()
                );
                let source = std::io::Error::new(ErrorKind::NotFound, what);
                return Err(
                    IoError::new("reach a layer on another drive through", &path, source).into()
                );
            }
            if ids.is_empty() {
                ids.push(io.drive(store)?);
            }
            let id = io.drive(&path)?;
            let known = ids.iter().position(|known| *known == id);
            drives.of_layer.push(known.unwrap_or(ids.len()));
            if known.is_none() {
                ids.push(id);
                drives.paths.push(path);
            }
        }
        Ok(drives)
    }

    /// Refuses a copy of the store that the layers on other drives belong to, and takes them over from
    /// one that is not where it was.
    pub(crate) fn claim(
        &self,
        io: &dyn Io,
        store: &Path,
        table: &LayerTable,
    ) -> Result<(), StoreError> {
        let away = table.layers().iter().filter(|layer| self.is_away(layer.id));
        let mut claimed = Vec::new();
        for layer in away {
            let link = store.join(LAYERS_DIR).join(&layer.name);
            let beside = io.link_target(&link).and_then(|target| Some(target.parent()?.to_owned()));
            let Some(beside) = beside.filter(|dir| !claimed.contains(dir)) else { continue };
            let mark = mark_beside(&link);
            let owner =
                if io.exists(&mark)? { files::read_text(io, &mark)? } else { String::new() };
            let owner = PathBuf::from(owner.trim_end());
            let (own, other) = (store.join(STORE_FILE), owner.join(STORE_FILE));
            let elsewhere = !owner.as_os_str().is_empty() && io.exists(&other)?;
            if elsewhere && !io.is_same(&own, &other)? {
                let what = format!(
                    "the layers in {} belong to the store {}, of which {} is a copy: copy a store \
                     with `ftactor convert`. If that is wrong, remove {}",
                    beside.display(),
                    owner.display(),
                    store.display(),
                    beside.join(MARK_FILE).display()
                );
                return Err(StoreError::Invalid(what));
            }
            if !elsewhere {
                mark_as(io, &mark, store)?;
            }
            claimed.push(beside);
        }
        Ok(())
    }

    pub(crate) fn is_away(&self, layer: LayerId) -> bool {
        self.away[layer.index()]
    }

    /// A directory on each drive, the store's own first.
    pub(crate) fn paths(&self) -> &[PathBuf] {
        &self.paths
    }

    /// The room of the drive that lacks most, or of the one at home. `needed`: layers, by number, and
    /// bytes; `at_home`: bytes that the store itself needs beside them.
    pub(crate) fn room(
        &self,
        io: &dyn Io,
        needed: &[(usize, u64)],
        at_home: u64,
    ) -> Result<Room, StoreError> {
        let mut all = vec![0; self.paths.len()];
        all[0] = at_home;
        needed.iter().for_each(|(layer, bytes)| all[self.of_layer[*layer]] += bytes);
        let mut tightest: Option<Room> = None;
        for (path, needed) in self.paths.iter().zip(all) {
            let room = Room { path: path.clone(), needed, available: io.free_bytes(path)? };
            if tightest.as_ref().is_none_or(|tightest| tightest.lacking() < room.lacking()) {
                tightest = Some(room);
            }
        }
        tightest.ok_or_else(|| StoreError::Invalid("a store without a drive".into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spread(others: &[f64]) -> Spread {
        let other = |(i, rate): (usize, &f64)| (PathBuf::from(format!("/{i}")), *rate);
        Spread { home: 1.0, others: others.iter().enumerate().map(other).collect() }
    }

    #[test]
    fn layers_take_turns_by_rate() {
        const MUCH: [u64; 3] = [u64::MAX; 3];
        let all = vec![10; 12];
        assert_eq!(spread(&[]).places(&all, &[0], &MUCH[..1]), Ok(vec![0; 12]));
        let two = spread(&[1.0]).places(&all, &[0, 1], &MUCH[..2]).unwrap();
        assert!(two.chunks(2).all(|pair| pair == [0, 1]), "{two:?}");
        let fast = spread(&[3.0]).places(&all, &[0, 1], &MUCH[..2]).unwrap();
        assert_eq!(fast.iter().filter(|place| **place == 1).count(), 9);
        assert!(fast.chunks(4).all(|four| four.contains(&0)), "{fast:?}");
        let three = spread(&[1.0, 2.0]).places(&all, &[0, 1, 2], &MUCH).unwrap();
        let count = |place| three.iter().filter(|p| **p == place).count();
        assert_eq!((count(0), count(1), count(2)), (3, 3, 6));
        // A large layer counts for what it is.
        let places = spread(&[1.0]).places(&[60, 10, 10, 10, 10, 10, 10], &[0, 1], &MUCH[..2]);
        assert_eq!(places, Ok(vec![0, 1, 1, 1, 1, 1, 1]));
    }

    #[test]
    fn a_drive_takes_what_it_has_room_for() {
        let all = vec![10; 6];
        let places = spread(&[1.0]).places(&all, &[0, 1], &[100, 15]);
        assert_eq!(places, Ok(vec![0, 1, 0, 0, 0, 0]));
        assert_eq!(spread(&[1.0]).places(&all, &[0, 1], &[25, 15]), Err(30));
        // Two directories of one drive share its room.
        assert_eq!(spread(&[1.0]).places(&all, &[7, 7], &[25, 25]), Err(40));
    }
}
