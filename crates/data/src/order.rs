//! The order of the rows in an epoch: a permutation that is computed, not stored.
//!
//! A Feistel network permutes the smallest power of 4 that is not below the number of rows, and
//! cycle walking brings what falls outside back in (Black and Rogaway, "Ciphers with arbitrary
//! finite domains", 2002). The domain is less than 4 times the rows, so a value is found in less
//! than 4 tries on average, whatever the number of rows. The round function is the finaliser of
//! SplitMix64 (Steele, Lea and Flood, 2014).
//!
//! Runs are resumed with it: what it computes for given numbers never changes.

use serde::{Deserialize, Serialize};

/// Few domains are so small that 8 rounds leave a pattern in them; two more cost nothing here.
const ROUNDS: u64 = 10;
const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

/// Which row comes when.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Order {
    pub seed: u64,
    /// Number of rows.
    pub rows: u64,
    /// Whether there is an order other than the file's.
    pub shuffle: bool,
}

impl Order {
    /// The row at `index` of `epoch`; over all indices below `rows`, each row once.
    /// Panics unless `index < rows`.
    pub fn row(&self, epoch: u64, index: u64) -> u64 {
        assert!(index < self.rows, "index {index} of {} rows", self.rows);
        if !self.shuffle {
            return index;
        }
        let half_bits = half_bits(self.rows);
        let key = mix(mix(self.seed ^ GOLDEN).wrapping_add(epoch));
        let mut row = permute(index, half_bits, key);
        while row >= self.rows {
            row = permute(row, half_bits, key);
        }
        row
    }
}

/// The smallest h >= 1 with 4^h >= rows.
fn half_bits(rows: u64) -> u32 {
    let bits = 64 - rows.saturating_sub(1).leading_zeros();
    bits.div_ceil(2).max(1)
}

/// A bijection of 0..4^half_bits.
fn permute(value: u64, half_bits: u32, key: u64) -> u64 {
    let mask = (1 << half_bits) - 1;
    let (mut left, mut right) = (value >> half_bits, value & mask);
    for round in 0..ROUNDS {
        let round_key = mix(key.wrapping_add(round.wrapping_mul(GOLDEN)));
        let scrambled = mix(right ^ round_key) >> (64 - half_bits);
        (left, right) = (right, left ^ scrambled);
    }
    left << half_bits | right
}

fn mix(mut z: u64) -> u64 {
    z = (z ^ z >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ z >> 31
}
