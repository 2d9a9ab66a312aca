//! A fixed number of bits, one per token of a row.
//!
//! Invariant: bits at and beyond `len` are zero, in memory and on disk.

/// Bit j belongs to token j; bit j lies in word j / 64 at position j % 64.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bits {
    words: Vec<u64>,
    len: usize,
}

impl Bits {
    /// `len` bits, all zero.
    pub fn zeros(len: usize) -> Bits {
        Bits { words: vec![0; len.div_ceil(64)], len }
    }

    /// Bits 1..len set, bit 0 clear: every token of a row but the first is predicted.
    pub fn all_but_first(len: usize) -> Bits {
        let mut bits = Bits::zeros(len);
        bits.words.fill(u64::MAX);
        if let Some(last) = bits.words.last_mut() {
            *last >>= (64 - len % 64) % 64;
        }
        if len > 0 {
            bits.words[0] &= !1;
        }
        bits
    }

    /// Number of bits.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no bits at all.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bit `index`; panics at or beyond `len`.
    pub fn get(&self, index: usize) -> bool {
        assert!(index < self.len, "bit {index} of {}", self.len);
        self.words[index / 64] >> (index % 64) & 1 == 1
    }

    /// Sets bit `index`; panics at or beyond `len`.
    pub fn set(&mut self, index: usize) {
        assert!(index < self.len, "bit {index} of {}", self.len);
        self.words[index / 64] |= 1 << (index % 64);
    }

    /// How many bits are set.
    pub fn count_ones(&self) -> u64 {
        self.words.iter().map(|word| u64::from(word.count_ones())).sum()
    }

    /// The bits in order.
    pub fn iter(&self) -> impl Iterator<Item = bool> + '_ {
        (0..self.len).map(|index| self.get(index))
    }

    /// The indices of the set bits, ascending.
    pub fn ones(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.len).filter(|&index| self.get(index))
    }

    /// Bytes that `len` bits take on disk: rounded up to 8.
    pub(crate) fn disk_bytes(len: u32) -> u64 {
        u64::from(len).div_ceil(64) * 8
    }

    pub(crate) fn clear(&mut self) {
        self.words.fill(0);
    }

    pub(crate) fn append_to(&self, out: &mut Vec<u8>) {
        for word in &self.words {
            out.extend_from_slice(&word.to_le_bytes());
        }
    }

    /// `None` unless `bytes` is exactly the disk form of `len` bits.
    pub(crate) fn parse(bytes: &[u8], len: usize) -> Option<Bits> {
        let (words, rest) = bytes.as_chunks::<8>();
        let words: Vec<u64> = words.iter().map(|word| u64::from_le_bytes(*word)).collect();
        let used = len % 64;
        let clean = used == 0 || words.last().is_some_and(|last| last >> used == 0);
        (rest.is_empty() && words.len() == len.div_ceil(64) && clean).then_some(Bits { words, len })
    }
}
