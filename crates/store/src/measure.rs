//! What a disk moves through an engine, without a store.

use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Instant;

use model::{CHUNK_BYTES, HostBytes};

use crate::StoreError;
use crate::io::{FileId, Io, IoError, Op, Target, read_target, wait, write_block};

/// Bytes per second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DiskRates {
    pub read: f64,
    /// Synced at the end.
    pub write: f64,
    /// Read and written at once, added up.
    pub both: f64,
}

/// What the optimizer keeps on its way.
const IN_FLIGHT: usize = 16;

/// Writes a file of `bytes` in `dir`, reads it, and does both at once with its halves; the file goes.
///
/// # Errors
/// `NoSpace`; else as the disk fails.
pub fn measure_disk(io: &Arc<dyn Io>, dir: &Path, bytes: u64) -> Result<DiskRates, StoreError> {
    let available = io.free_bytes(dir)?;
    if available < bytes {
        return Err(StoreError::NoSpace { path: dir.to_owned(), needed: bytes, available });
    }
    let path = dir.join(format!("ftactor-bench-{}.tmp", std::process::id()));
    let file = io.create(&path, bytes)?;
    // Without a name it goes with the process, whatever ends that.
    let unnamed = io.unlink(&path);
    let measured = measure(io, file, (bytes as usize / CHUNK_BYTES).max(4));
    io.close(file);
    unnamed?;
    Ok(measured?)
}

fn measure(io: &Arc<dyn Io>, file: FileId, chunks: usize) -> Result<DiskRates, IoError> {
    let all: Vec<(usize, Way)> = (0..chunks).map(|chunk| (chunk, Way::Write)).collect();
    let write = rate(io, file, &all)?;
    let read: Vec<_> = all.iter().map(|(chunk, _)| (*chunk, Way::Read)).collect();
    let read = rate(io, file, &read)?;
    let half = chunks / 2;
    let both: Vec<_> = (0..half).flat_map(|i| [(i, Way::Read), (half + i, Way::Write)]).collect();
    Ok(DiskRates { read, write, both: rate(io, file, &both)? })
}

#[derive(Clone, Copy, PartialEq)]
enum Way {
    Read,
    Write,
}

/// Bytes per second of moving these chunks, some at a time, and of a sync where any is written.
fn rate(io: &Arc<dyn Io>, file: FileId, work: &[(usize, Way)]) -> Result<f64, IoError> {
    let mut block = HostBytes::zeroed(CHUNK_BYTES);
    let words = block.f32s_mut().iter_mut().enumerate();
    // Nothing that a drive could compress.
    words.for_each(|(i, word)| *word = f32::from_bits((i as u32).wrapping_mul(0x9e37_79b9) >> 2));
    let block = Arc::new(block);
    let (sender, done) = channel();
    let start = Instant::now();
    let begin = |(chunk, way): (usize, Way)| {
        let (sender, offset) = (sender.clone(), (chunk * CHUNK_BYTES) as u64);
        // The receiver below lives until all have answered.
        let tell = move |result: Result<(), IoError>| drop(sender.send(result));
        match way {
            Way::Write => write_block(&**io, file, offset, &block, Box::new(tell)),
            Way::Read => {
                let target = Target::heap(HostBytes::zeroed(CHUNK_BYTES));
                let tell = move |read: Result<HostBytes, IoError>| tell(read.map(drop));
                read_target(&**io, file, offset, target, Box::new(tell));
            }
        }
    };
    let mut waiting = work.iter().copied();
    waiting.by_ref().take(IN_FLIGHT).for_each(begin);
    let mut failed = Ok(());
    for _ in work {
        if let Ok(Err(error)) = done.recv() {
            failed = Err(error);
        }
        waiting.next().into_iter().for_each(begin);
    }
    failed?;
    if work.iter().any(|(_, way)| *way == Way::Write) {
        wait(|done| io.submit(Op::Sync { file }, done))?;
    }
    Ok((work.len() * CHUNK_BYTES) as f64 / start.elapsed().as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::{direct_engine, mmap_engine};

    #[test]
    fn a_disk_is_measured_and_nothing_stays() {
        let temporary = tempfile::tempdir().unwrap();
        for io in [direct_engine(8), mmap_engine(2, false)] {
            let rates = measure_disk(&io, temporary.path(), 32 << 20).unwrap();
            assert!(rates.read > 0.0 && rates.write > 0.0 && rates.both > 0.0, "{rates:?}");
            assert_eq!(std::fs::read_dir(temporary.path()).unwrap().count(), 0);
        }
        let refused = measure_disk(&mmap_engine(1, false), temporary.path(), u64::MAX / 2);
        assert!(matches!(refused, Err(StoreError::NoSpace { .. })), "{refused:?}");
    }
}
