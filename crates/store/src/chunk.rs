//! [`StateChunk`]: the unit in which the optimizer reads and writes a layer's state.

use std::hash::Hasher;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use model::{Budget, BudgetError, HostBytes, PLANES, Plane, PlaneSpec, StateLayout};
use twox_hash::XxHash3_64;

use crate::error::{Done, StoreError};
use crate::hashes::{ChunkHashes, hash};

/// One chunk of a layer's state: the same parameters in each plane of the layout.
#[derive(Debug)]
pub struct StateChunk {
    layout: StateLayout,
    /// In the order of the layout's planes.
    planes: Vec<HostBytes>,
}

impl StateChunk {
    /// A chunk of `elements` parameters whose contents are to be written.
    pub fn unwritten(
        layout: StateLayout,
        elements: usize,
        budget: &Budget,
    ) -> Result<StateChunk, BudgetError> {
        let block = |spec: &PlaneSpec| budget.block(spec.bytes(elements));
        let planes = layout.planes().iter().map(block).collect::<Result<_, _>>()?;
        Ok(StateChunk { layout, planes })
    }

    /// How the chunk is laid out.
    pub fn layout(&self) -> StateLayout {
        self.layout
    }

    /// A plane's bytes, if the layout has the plane.
    pub fn get(&self, plane: Plane) -> Option<&HostBytes> {
        let at = self.layout.planes().iter().position(|spec| spec.plane == plane)?;
        self.planes.get(at)
    }

    /// A plane's bytes.
    ///
    /// # Panics
    /// If the layout lacks the plane: a programmer's error.
    pub fn plane(&self, plane: Plane) -> &HostBytes {
        let Some(bytes) = self.get(plane) else { panic!("{} in a {}", plane.name(), self.layout) };
        bytes
    }

    /// All planes' bytes, writable, in the layout's order.
    pub fn planes_mut(&mut self) -> &mut [HostBytes] {
        &mut self.planes
    }

    /// The chunk's hash per plane.
    pub fn hashes(&self) -> ChunkHashes {
        let mut hashes = [0; PLANES];
        for (spec, block) in self.layout.planes().iter().zip(&self.planes) {
            hashes[spec.plane as usize] = hash(block.bytes());
        }
        hashes
    }

    pub(crate) fn from_planes(layout: StateLayout, planes: Vec<HostBytes>) -> StateChunk {
        StateChunk { layout, planes }
    }

    pub(crate) fn into_planes(self) -> Vec<HostBytes> {
        self.planes
    }
}

/// The hashes of a chunk that is gone through piece by piece, each while it is in cache.
#[derive(Default)]
#[allow(missing_debug_implementations)]
pub struct ChunkHasher {
    planes: [XxHash3_64; PLANES],
}

impl ChunkHasher {
    /// Takes the next parameters in, counted inside the chunk; pieces start with a block.
    pub fn feed(&mut self, chunk: &StateChunk, elements: Range<usize>) {
        for (spec, block) in chunk.layout.planes().iter().zip(&chunk.planes) {
            let bytes = &block.bytes()[spec.range(elements.clone())];
            self.planes[spec.plane as usize].write(bytes);
        }
    }

    /// Equal to [`StateChunk::hashes`] once all of a chunk of `layout` was fed.
    pub fn finish(&self, layout: StateLayout) -> ChunkHashes {
        let mut hashes = [0; PLANES];
        for spec in layout.planes() {
            hashes[spec.plane as usize] = self.planes[spec.plane as usize].finish();
        }
        hashes
    }
}

/// `count` completions, the last of which to come passes all blocks to `done`, in their order.
pub(crate) fn gather(count: usize, done: Done<Vec<HostBytes>>) -> Vec<Done<HostBytes>> {
    let blocks = (0..count).map(|_| None).collect();
    let shared = Arc::new(Mutex::new(Gathering { blocks, done: Some(done) }));
    let landed = |at: usize| -> Done<HostBytes> {
        let shared = Arc::clone(&shared);
        Box::new(move |block| {
            let finished = {
                // Nothing below the lock panics.
                let mut gathering = shared.lock().unwrap_or_else(PoisonError::into_inner);
                gathering.blocks[at] = Some(block);
                gathering.take_finished()
            };
            if let Some((done, blocks)) = finished {
                done(blocks.into_iter().collect());
            }
        })
    };
    (0..count).map(landed).collect()
}

struct Gathering {
    blocks: Vec<Option<Result<HostBytes, StoreError>>>,
    done: Option<Done<Vec<HostBytes>>>,
}

type Gathered = (Done<Vec<HostBytes>>, Vec<Result<HostBytes, StoreError>>);

impl Gathering {
    fn take_finished(&mut self) -> Option<Gathered> {
        if self.blocks.iter().any(Option::is_none) {
            return None;
        }
        let done = self.done.take()?;
        Some((done, self.blocks.drain(..).flatten().collect()))
    }
}
