//! Hashes of state: one xxh3-64 per chunk of each plane, and the `hashes` file of a slot.
//!
//! Invariants:
//! - chunks count from the first byte of a plane's data, so headers never enter a hash;
//! - a `hashes` file is believed only if its own checksum holds and its counts are the expected
//!   ones; nothing is allocated by a length found in it.

use model::{CHUNK_BYTES, Plane};
use twox_hash::XxHash3_64;

/// One hash per plane, in the order of [`Plane::ALL`].
pub type PlaneHashes = [u64; 3];

const MAGIC: [u8; 8] = *b"FTHASH\r\n";
const VERSION: u32 = 1;
/// Magic, version, planes, chunk bytes, chunks.
const HEAD_BYTES: usize = 8 + 4 + 4 + 8 + 8;
const CHECKSUM_BYTES: usize = 8;

/// The hash of all contents: XXH3, 64 bits, seed 0.
pub fn hash(bytes: &[u8]) -> u64 {
    XxHash3_64::oneshot(bytes)
}

/// Number of chunks of a plane of `bytes`.
pub(crate) fn chunk_count(bytes: u64) -> usize {
    bytes.div_ceil(CHUNK_BYTES as u64) as usize
}

/// Offset inside a plane of `bytes`, and length, of a chunk.
pub(crate) fn chunk_range(bytes: u64, chunk: usize) -> (u64, usize) {
    let start = chunk as u64 * CHUNK_BYTES as u64;
    assert!(start < bytes, "chunk {chunk} of {}", chunk_count(bytes));
    (start, (bytes - start).min(CHUNK_BYTES as u64) as usize)
}

/// Per plane, the hash of its chunk hashes as little-endian bytes: what a record carries.
pub(crate) fn plane_hashes(chunks: &[PlaneHashes]) -> PlaneHashes {
    Plane::ALL.map(|plane| {
        let bytes: Vec<u8> =
            chunks.iter().flat_map(|hashes| hashes[plane as usize].to_le_bytes()).collect();
        hash(&bytes)
    })
}

/// Length of the `hashes` file of a slot with this many chunks per plane.
pub(crate) fn file_bytes(chunks: usize) -> usize {
    HEAD_BYTES + chunks * Plane::ALL.len() * 8 + CHECKSUM_BYTES
}

/// The `hashes` file: head, then plane by plane one hash per chunk, then a checksum.
pub(crate) fn encode(chunks: &[PlaneHashes]) -> Vec<u8> {
    let mut file = Vec::with_capacity(file_bytes(chunks.len()));
    file.extend(head(chunks.len()));
    for plane in Plane::ALL {
        file.extend(chunks.iter().flat_map(|hashes| hashes[plane as usize].to_le_bytes()));
    }
    file.extend(hash(&file).to_le_bytes());
    file
}

/// The inverse of [`encode`] for a slot known to have `chunks` chunks per plane; the `Err` says
/// what is wrong.
/// `checked`: true but for tests.
pub(crate) fn decode(
    file: &[u8],
    chunks: usize,
    checked: bool,
) -> Result<Vec<PlaneHashes>, String> {
    if file.len() != file_bytes(chunks) {
        return Err(format!("{} bytes instead of {}", file.len(), file_bytes(chunks)));
    }
    let (body, checksum) = file.split_at(file.len() - CHECKSUM_BYTES);
    if checked && hash(body).to_le_bytes() != checksum {
        return Err("its checksum does not match".into());
    }
    let (found, hashes) = body.split_at(HEAD_BYTES);
    if found != head(chunks) {
        return Err("its format, version or counts are not the expected ones".into());
    }
    let word = |plane: Plane, chunk: usize| {
        let mut bytes = [0; 8];
        let at = (plane as usize * chunks + chunk) * 8;
        bytes.copy_from_slice(&hashes[at..at + 8]);
        u64::from_le_bytes(bytes)
    };
    Ok((0..chunks).map(|chunk| Plane::ALL.map(|plane| word(plane, chunk))).collect())
}

fn head(chunks: usize) -> Vec<u8> {
    let mut head = MAGIC.to_vec();
    head.extend(VERSION.to_le_bytes());
    head.extend((Plane::ALL.len() as u32).to_le_bytes());
    head.extend((CHUNK_BYTES as u64).to_le_bytes());
    head.extend((chunks as u64).to_le_bytes());
    head
}

#[cfg(test)]
mod tests;
