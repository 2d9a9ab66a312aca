//! The first page of a row file.
//!
//! Layout, little-endian, checksum = xxh3-64 of the bytes before it:
//! `0 magic[8] | 8 version u32 | 12 header bytes u32 | 16 seq_len u32 | 20 vocab_size u32 |
//! 24 rows u64 | 32 documents u64 | 40 targets u64 | 48 dropped_tokens u64 | 56 max_id u32 |
//! 60 zero u32 | 64 source_digest u64 | 72 data_hash u64 | 80 zeros | 4088 checksum u64`.
//! Behind it, row i is at `4096 + i * row_bytes`: S ids (u32), S target bits, S document-start
//! bits, each kind of bits rounded up to 8 bytes.

use twox_hash::XxHash3_64;

use crate::bits::Bits;

/// Bytes of the header page.
pub const HEADER_BYTES: u64 = 4096;
const PAGE: usize = HEADER_BYTES as usize;
const CHECKSUM_AT: usize = PAGE - 8;
const USED: usize = 80;
const MAGIC: &[u8; 8] = b"FTROWS\0\x01";
const VERSION: u32 = 1;

/// What a row file says about itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowsHeader {
    /// S: tokens of a row.
    pub seq_len: u32,
    /// Every id is below it.
    pub vocab_size: u32,
    pub rows: u64,
    /// Documents that were packed: text documents, 1-D files, ready rows.
    pub documents: u64,
    /// Tokens of all rows that are predicted.
    pub targets: u64,
    /// Tokens of the last, partial row, which is not in the file.
    pub dropped_tokens: u64,
    /// The highest id in the file.
    pub max_id: u32,
    /// xxh3-64 over the sources' sizes and hashes and all that decides about ids and rows.
    pub source_digest: u64,
    /// xxh3-64 of everything behind the header.
    pub data_hash: u64,
}

impl RowsHeader {
    /// Bytes of one row in the file.
    pub fn row_bytes(&self) -> u64 {
        u64::from(self.seq_len) * 4 + 2 * Bits::disk_bytes(self.seq_len)
    }

    /// Length of the file; `None` where it does not fit 64 bits.
    pub(crate) fn file_bytes(&self) -> Option<u64> {
        self.rows.checked_mul(self.row_bytes())?.checked_add(HEADER_BYTES)
    }

    pub(crate) fn encode(&self) -> [u8; PAGE] {
        let mut page = [0; PAGE];
        page[..8].copy_from_slice(MAGIC);
        for (at, value) in [
            (8, VERSION),
            (12, HEADER_BYTES as u32),
            (16, self.seq_len),
            (20, self.vocab_size),
            (56, self.max_id),
        ] {
            page[at..at + 4].copy_from_slice(&value.to_le_bytes());
        }
        for (at, value) in [
            (24, self.rows),
            (32, self.documents),
            (40, self.targets),
            (48, self.dropped_tokens),
            (64, self.source_digest),
            (72, self.data_hash),
        ] {
            page[at..at + 8].copy_from_slice(&value.to_le_bytes());
        }
        let checksum = XxHash3_64::oneshot(&page[..CHECKSUM_AT]);
        page[CHECKSUM_AT..].copy_from_slice(&checksum.to_le_bytes());
        page
    }

    /// The header in `page`, or why there is none that can be used.
    pub(crate) fn parse(page: &[u8; PAGE]) -> Result<RowsHeader, String> {
        if &page[..8] != MAGIC {
            return Err("not a row file".to_owned());
        }
        let version = u32_at(page, 8);
        if version != VERSION {
            return Err(format!("row file version {version}; this program reads {VERSION}"));
        }
        if u64_at(page, CHECKSUM_AT) != XxHash3_64::oneshot(&page[..CHECKSUM_AT]) {
            return Err("the header's checksum does not fit".to_owned());
        }
        let header = RowsHeader {
            seq_len: u32_at(page, 16),
            vocab_size: u32_at(page, 20),
            rows: u64_at(page, 24),
            documents: u64_at(page, 32),
            targets: u64_at(page, 40),
            dropped_tokens: u64_at(page, 48),
            max_id: u32_at(page, 56),
            source_digest: u64_at(page, 64),
            data_hash: u64_at(page, 72),
        };
        let zeros = u32_at(page, 60) == 0 && page[USED..CHECKSUM_AT].iter().all(|&byte| byte == 0);
        if u64::from(u32_at(page, 12)) == HEADER_BYTES && zeros && header.is_sound() {
            Ok(header)
        } else {
            Err("the header contradicts itself".to_owned())
        }
    }

    fn is_sound(&self) -> bool {
        let predictable = self.rows.checked_mul(u64::from(self.seq_len.saturating_sub(1)));
        self.seq_len >= 2
            && self.rows >= 1
            && self.max_id < self.vocab_size
            && predictable.is_some_and(|most| self.targets <= most)
            && self.file_bytes().is_some()
    }
}

fn u32_at(page: &[u8; PAGE], at: usize) -> u32 {
    u32::from_le_bytes(std::array::from_fn(|i| page[at + i]))
}

fn u64_at(page: &[u8; PAGE], at: usize) -> u64 {
    u64::from_le_bytes(std::array::from_fn(|i| page[at + i]))
}
