//! [`StateChunk`]: the unit in which the optimizer reads and writes a layer's state.

use std::hash::Hasher;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use model::{HostBytes, Plane};
use twox_hash::XxHash3_64;

use crate::error::{Done, StoreError};
use crate::hashes::{PlaneHashes, hash};

/// One chunk of a layer's state: the same elements of its three planes.
#[derive(Debug)]
pub struct StateChunk {
    pub weight: HostBytes,
    pub exp_avg: HostBytes,
    pub exp_avg_sq: HostBytes,
}

impl StateChunk {
    /// The chunk's hash per plane.
    pub fn hashes(&self) -> PlaneHashes {
        [&self.weight, &self.exp_avg, &self.exp_avg_sq].map(|block| hash(block.bytes()))
    }
}

/// The hashes of a chunk that is gone through piece by piece, each while it is in cache.
#[derive(Default)]
#[allow(missing_debug_implementations)]
pub struct ChunkHasher {
    planes: [XxHash3_64; 3],
}

impl ChunkHasher {
    /// Takes the next bytes of each plane in.
    pub fn feed(&mut self, chunk: &StateChunk, bytes: Range<usize>) {
        let blocks = [&chunk.weight, &chunk.exp_avg, &chunk.exp_avg_sq];
        for (plane, block) in self.planes.iter_mut().zip(blocks) {
            plane.write(&block.bytes()[bytes.clone()]);
        }
    }

    /// Equal to [`StateChunk::hashes`] once all bytes were fed.
    pub fn finish(&self) -> PlaneHashes {
        [0, 1, 2].map(|plane| self.planes[plane].finish())
    }
}

/// The three reads of a chunk.
pub(crate) struct ChunkReads {
    blocks: [Option<Result<HostBytes, StoreError>>; 3],
    done: Option<Done<StateChunk>>,
}

impl ChunkReads {
    pub(crate) fn new(done: Done<StateChunk>) -> ChunkReads {
        ChunkReads { blocks: [None, None, None], done: Some(done) }
    }

    pub(crate) fn land(
        shared: &Mutex<ChunkReads>,
        plane: Plane,
        block: Result<HostBytes, StoreError>,
    ) {
        let finished = {
            // Nothing below the lock panics.
            let mut reads = shared.lock().unwrap_or_else(PoisonError::into_inner);
            reads.blocks[plane as usize] = Some(block);
            reads.take_finished()
        };
        if let Some((done, blocks)) = finished {
            done(blocks);
        }
    }

    fn take_finished(&mut self) -> Option<(Done<StateChunk>, Result<StateChunk, StoreError>)> {
        if self.blocks.iter().any(Option::is_none) {
            return None;
        }
        let done = self.done.take()?;
        let [weight, exp_avg, exp_avg_sq] = self.blocks.each_mut().map(Option::take);
        Some((done, whole_chunk(weight?, exp_avg?, exp_avg_sq?)))
    }
}

fn whole_chunk(
    weight: Result<HostBytes, StoreError>,
    exp_avg: Result<HostBytes, StoreError>,
    exp_avg_sq: Result<HostBytes, StoreError>,
) -> Result<StateChunk, StoreError> {
    Ok(StateChunk { weight: weight?, exp_avg: exp_avg?, exp_avg_sq: exp_avg_sq? })
}
