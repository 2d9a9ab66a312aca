//! Hashes of state: one xxh3-64 per chunk of each plane, and the `hashes` file of a slot.
//!
//! Invariants:
//! - a chunk's hash in a plane is of the bytes in which its parameters lie there, so headers never
//!   enter a hash;
//! - a `hashes` file is believed only if its own checksum holds and its counts are the expected
//!   ones; nothing is allocated by a length found in it.

use model::{CHUNK_BYTES, PLANES, StateLayout};
pub(crate) use model::{chunk_count, chunk_elements};
use twox_hash::XxHash3_64;

/// The hashes of one chunk, by [`Plane`](model::Plane); zero for planes that the layout lacks.
pub type ChunkHashes = [u64; PLANES];
/// Hashes of a layer's W, M and V.
pub type LayerHashes = [u64; 3];

const MAGIC: [u8; 8] = *b"FTHASH\r\n";
const VERSION: u32 = 1;
/// Magic, version, planes, chunk bytes, chunks.
const HEAD_BYTES: usize = 8 + 4 + 4 + 8 + 8;
const CHECKSUM_BYTES: usize = 8;

/// The hash of all contents: XXH3, 64 bits, seed 0.
pub fn hash(bytes: &[u8]) -> u64 {
    XxHash3_64::oneshot(bytes)
}

/// What a record carries: of each of W, M and V, the hash of its planes' chunk hashes, plane after
/// plane, as little-endian bytes.
pub(crate) fn layer_hashes(layout: StateLayout, chunks: &[ChunkHashes]) -> LayerHashes {
    [0, 1, 2].map(|state| {
        let planes = layout.planes().iter().filter(|spec| spec.plane.state() == state);
        let bytes: Vec<u8> =
            planes.flat_map(|spec| plane_words(chunks, spec.plane as usize)).collect();
        hash(&bytes)
    })
}

fn plane_words(chunks: &[ChunkHashes], plane: usize) -> impl Iterator<Item = u8> {
    chunks.iter().flat_map(move |hashes| hashes[plane].to_le_bytes())
}

/// Length of the `hashes` file of a slot with this many chunks per plane.
pub(crate) fn file_bytes(layout: StateLayout, chunks: usize) -> usize {
    HEAD_BYTES + chunks * layout.planes().len() * 8 + CHECKSUM_BYTES
}

/// The `hashes` file: head, then plane by plane one hash per chunk, then a checksum.
pub(crate) fn encode(layout: StateLayout, chunks: &[ChunkHashes]) -> Vec<u8> {
    let mut file = Vec::with_capacity(file_bytes(layout, chunks.len()));
    file.extend(head(layout, chunks.len()));
    for spec in layout.planes() {
        file.extend(plane_words(chunks, spec.plane as usize));
    }
    file.extend(hash(&file).to_le_bytes());
    file
}

/// The inverse of [`encode`] for a slot known to have `chunks` chunks per plane; the `Err` says
/// what is wrong.
/// `checked`: true but for tests.
pub(crate) fn decode(
    layout: StateLayout,
    file: &[u8],
    chunks: usize,
    checked: bool,
) -> Result<Vec<ChunkHashes>, String> {
    let expected = file_bytes(layout, chunks);
    if file.len() != expected {
        return Err(format!("{} bytes instead of {expected}", file.len()));
    }
    let (body, checksum) = file.split_at(file.len() - CHECKSUM_BYTES);
    if checked && hash(body).to_le_bytes() != checksum {
        return Err("its checksum does not match".into());
    }
    let (found, hashes) = body.split_at(HEAD_BYTES);
    if found != head(layout, chunks) {
        return Err("its format, version or counts are not the expected ones".into());
    }
    let mut all = vec![[0; PLANES]; chunks];
    let mut words = hashes.as_chunks::<8>().0.iter();
    for spec in layout.planes() {
        for (chunk, word) in all.iter_mut().zip(&mut words) {
            chunk[spec.plane as usize] = u64::from_le_bytes(*word);
        }
    }
    Ok(all)
}

fn head(layout: StateLayout, chunks: usize) -> Vec<u8> {
    let mut head = MAGIC.to_vec();
    head.extend(VERSION.to_le_bytes());
    head.extend((layout.planes().len() as u32).to_le_bytes());
    head.extend((CHUNK_BYTES as u64).to_le_bytes());
    head.extend((chunks as u64).to_le_bytes());
    head
}

#[cfg(test)]
mod tests;
