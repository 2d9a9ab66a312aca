//! The whole-disk counters of the block device that a path lies on.
//!
//! Invariants:
//! - a partition is counted as its disk: the disk's queue is what everybody on it waits for;
//! - a device-mapper or loop device is counted as itself;
//! - a file system without a block device (overlay, tmpfs, network) is an [`Unavailable`] with
//!   the reason, never a series of zeros.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use thiserror::Error;

use crate::mounts::{Mount, mount_holding};
use crate::os::{self, DeviceNumber};

/// The unit of the kernel's sector counts, whatever the device's own sectors are.
const SECTOR_BYTES: u64 = 512;
/// Fields that every kernel since 2.6 writes; later ones add discards and flushes.
const MIN_FIELDS: usize = 11;

/// Why the disk behind a path cannot be watched: a sentence for the user, not a fault.
#[derive(Debug, Error)]
pub enum Unavailable {
    /// The path cannot be looked at.
    #[error("cannot find the disk behind {}: {source}", path.display())]
    Path {
        /// The path as given.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
    /// The file system has no block device.
    #[error(
        "{} is on a {filesystem} file system, which has no block device: its disk metrics are \
         left out",
        path.display()
    )]
    NoDevice {
        /// The path as given.
        path: PathBuf,
        /// The file system's type, such as `overlay`.
        filesystem: String,
    },
    /// The kernel does not show the device.
    #[error("{} is not listed as a block device: {source}; its metrics are left out", sysfs.display())]
    NotListed {
        /// The device's directory below `/sys`.
        sysfs: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
    /// The device has no readable counters.
    #[error("the disk metrics are left out: {0}")]
    Counters(#[from] SampleError),
    /// There is no `/sys` on this operating system.
    #[error("disk metrics need Linux's /sys: they are left out")]
    Unsupported,
}

/// Why the counters of a device could not be read.
#[derive(Debug, Error)]
pub enum SampleError {
    /// The file cannot be read, for instance because the device was unplugged.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The counters' file.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
    /// The file does not hold the counters that the kernel documents.
    #[error("{} does not hold block-device counters: `{text}`", path.display())]
    Malformed {
        /// The counters' file.
        path: PathBuf,
        /// Its first characters.
        text: String,
    },
}

/// A block device whose counters can be read.
#[derive(Debug, Clone)]
pub struct BlockDevice {
    name: String,
    stat: PathBuf,
}

/// The counters of a device at one moment, since boot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceSample {
    /// When they were read.
    pub taken_at: Instant,
    /// Bytes read from the device.
    pub read_bytes: u64,
    /// Bytes written to the device.
    pub written_bytes: u64,
    /// Milliseconds with at least one request in flight, modulo 2^32 as the kernel prints them.
    pub busy_millis: u32,
}

/// What a device did between two samples.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DeviceRates {
    /// Bytes read per second.
    pub read_bytes_per_second: f64,
    /// Bytes written per second.
    pub written_bytes_per_second: f64,
    /// Share of the time with at least one request in flight, 0 to 1. A drive that serves many
    /// requests at once can be busy all the time and still have room.
    pub busy_ratio: f64,
}

impl BlockDevice {
    /// The device behind the existing file or directory `path`: the disk of a partition; the first
    /// device of a btrfs; for device-mapper and loop devices the device itself.
    ///
    /// # Errors
    /// [`Unavailable`], whose text is the reason to show.
    pub fn behind(path: &Path) -> Result<BlockDevice, Unavailable> {
        let number = device_number(path)?;
        BlockDevice::numbered(Path::new(os::BLOCK_DEVICES), number)
    }

    /// The device of a directory such as `/sys/block/nvme0n1`.
    ///
    /// # Errors
    /// [`Unavailable`], whose text is the reason to show.
    pub fn from_sysfs(directory: &Path) -> Result<BlockDevice, Unavailable> {
        let not_listed = |source| Unavailable::NotListed { sysfs: directory.to_owned(), source };
        let mut real = std::fs::canonicalize(directory).map_err(not_listed)?;
        if real.join("partition").exists() {
            real.pop();
        }
        let name = real.file_name().map(|name| name.to_string_lossy().into_owned());
        let device = BlockDevice { name: name.unwrap_or_default(), stat: real.join("stat") };
        device.sample()?;
        Ok(device)
    }

    fn numbered(root: &Path, number: DeviceNumber) -> Result<BlockDevice, Unavailable> {
        BlockDevice::from_sysfs(&root.join(format!("{}:{}", number.major, number.minor)))
    }

    /// The kernel's name, such as `nvme0n1`: the value of the label `device`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Reads the counters now.
    ///
    /// # Errors
    /// [`SampleError`] when the device is gone or its counters are not understood.
    pub fn sample(&self) -> Result<DeviceSample, SampleError> {
        let taken_at = Instant::now();
        let text = std::fs::read_to_string(&self.stat)
            .map_err(|source| SampleError::Read { path: self.stat.clone(), source })?;
        parse_stat(&text, taken_at).ok_or_else(|| SampleError::Malformed {
            path: self.stat.clone(),
            text: text.trim().chars().take(80).collect(),
        })
    }
}

impl DeviceSample {
    /// What happened since `earlier`; `None` when no time passed or the counters went back, as
    /// they do when another device takes the name.
    pub fn rates_since(&self, earlier: &DeviceSample) -> Option<DeviceRates> {
        let elapsed = self.taken_at.checked_duration_since(earlier.taken_at)?;
        let seconds = elapsed.as_secs_f64();
        let read_bytes = self.read_bytes.checked_sub(earlier.read_bytes)?;
        let written_bytes = self.written_bytes.checked_sub(earlier.written_bytes)?;
        let busy_millis = self.busy_millis.wrapping_sub(earlier.busy_millis);
        let busy_seconds = Duration::from_millis(u64::from(busy_millis)).as_secs_f64();
        (seconds > 0.0).then(|| DeviceRates {
            read_bytes_per_second: read_bytes as f64 / seconds,
            written_bytes_per_second: written_bytes as f64 / seconds,
            busy_ratio: (busy_seconds / seconds).min(1.0),
        })
    }
}

/// The counters in the kernel's `Documentation/block/stat.rst` order: reads, reads merged, sectors
/// read, read ticks, the same four for writes, requests in flight, busy ticks, weighted ticks, ...
fn parse_stat(text: &str, taken_at: Instant) -> Option<DeviceSample> {
    let fields: Vec<&str> = text.split_ascii_whitespace().collect();
    if fields.len() < MIN_FIELDS {
        return None;
    }
    let number = |at: usize| fields[at].parse::<u64>().ok();
    Some(DeviceSample {
        taken_at,
        read_bytes: number(2)?.checked_mul(SECTOR_BYTES)?,
        written_bytes: number(6)?.checked_mul(SECTOR_BYTES)?,
        busy_millis: number(9)? as u32,
    })
}

/// File systems with device numbers of their own (major 0) are followed to what they were mounted
/// from.
fn device_number(path: &Path) -> Result<DeviceNumber, Unavailable> {
    let failed = |source| Unavailable::Path { path: path.to_owned(), source };
    let number = os::device_holding(path).map_err(failed)?.ok_or(Unavailable::Unsupported)?;
    if number.major != 0 {
        return Ok(number);
    }
    let real = std::fs::canonicalize(path).map_err(failed)?;
    let mount = os::mount_table().and_then(|table| mount_holding(&table, &real));
    source_number(mount.as_ref()).ok_or_else(|| Unavailable::NoDevice {
        path: path.to_owned(),
        filesystem: mount.map_or_else(|| "unknown".to_owned(), |mount| mount.filesystem),
    })
}

/// The device a file system was mounted from, as far as it was one.
fn source_number(mount: Option<&Mount>) -> Option<DeviceNumber> {
    let source = &mount?.source;
    if !source.starts_with("/dev") {
        return None;
    }
    os::device_named(source).ok().flatten().filter(|number| number.major != 0)
}

#[cfg(test)]
mod tests;
