//! The gradient norm in float64 over a fixed tree, and the clip factor that follows from it.
//!
//! The tree: a tensor is cut into blocks of [`BLOCK_ELEMENTS`], the last one may be shorter. In a
//! block, element `i` is squared (exact: a float32 has 24 significant bits, a float64 53) and added
//! to accumulator `i % 16`, in order; the 16 accumulators are folded in halves (0 + 8 ... 7 + 15,
//! then 0 + 4 ..., 0 + 2 ..., 0 + 1). Block sums are added pairwise: blocks 2k and 2k+1, then pairs
//! 2k and 2k+1, and so on; what is left over at the end is added from the smallest subtree to the
//! largest.
//!
//! Invariants:
//! - the sum depends on the values and their order alone;
//! - only the last block of a tree is short.

use crate::simd::{InstructionSet, Kernel};

/// Elements of one leaf of the tree.
pub const BLOCK_ELEMENTS: usize = 4096;

/// Accumulators of one block: two AVX-512 registers, so that additions overlap.
const LANES: usize = 16;

/// What PyTorch adds to the norm before it divides.
const CLIP_EPS: f64 = 1e-6;

/// The sum of squares of one tensor that is in memory as a whole. It is finite exactly when all
/// elements are, because float64 has room for any number of squared float32.
pub fn sum_of_squares(grad: &[f32]) -> f64 {
    let mut tree = NormTree::new();
    tree.feed(grad);
    tree.sum()
}

/// The factor for gradients of norm `norm`, as `torch.nn.utils.clip_grad_norm_`:
/// `min(1, max_norm / (norm + 1e-6))`. A NaN stays one.
pub fn clip_factor(max_norm: f64, norm: f64) -> f32 {
    let factor = max_norm / (norm + CLIP_EPS);
    // Not `min`, which would turn a NaN into 1.
    if factor > 1.0 { 1.0 } else { factor as f32 }
}

/// The sum of squares of a tensor that arrives in pieces; 528 bytes, no allocation.
#[derive(Debug, Clone)]
pub struct NormTree {
    /// Sum of a complete subtree of 2^k blocks, there when bit k of `blocks` is set.
    subtrees: [f64; u64::BITS as usize],
    blocks: u64,
    closed: bool,
}

impl NormTree {
    pub fn new() -> Self {
        Self { subtrees: [0.0; u64::BITS as usize], blocks: 0, closed: false }
    }

    /// Adds the tensor's next elements: a multiple of [`BLOCK_ELEMENTS`], except for the last
    /// piece.
    ///
    /// # Panics
    /// When a piece follows one that ended inside a block.
    pub fn feed(&mut self, grad: &[f32]) {
        self.feed_on(InstructionSet::best(), grad);
    }

    /// [`NormTree::feed`] on a given instruction set.
    pub fn feed_on(&mut self, set: InstructionSet, grad: &[f32]) {
        for block in grad.chunks(BLOCK_ELEMENTS) {
            self.assert_open();
            self.closed = block.len() < BLOCK_ELEMENTS;
            self.push(0, set.run(BlockSum(block)));
        }
    }

    /// Adds the tree of the elements that follow, summed elsewhere (by another thread).
    ///
    /// # Panics
    /// When a tree follows one that ended inside a block, or when `next` does not align: the
    /// blocks so far must be a multiple of the number of its blocks rounded down to a power of
    /// two. Pieces of one power-of-two number of blocks, all equal but a shorter last, always do.
    pub fn append(&mut self, next: &Self) {
        let Some(top) = next.blocks.checked_ilog2() else { return };
        self.assert_open();
        assert!(
            self.blocks.trailing_zeros() >= top,
            "a tree of {} blocks does not align after {} blocks",
            next.blocks,
            self.blocks
        );
        for level in (0..=top).rev().filter(|level| next.has(*level)) {
            self.push(level, next.subtrees[level as usize]);
        }
        self.closed = next.closed;
    }

    /// The sum of squares so far.
    pub fn sum(&self) -> f64 {
        let levels = (0..u64::BITS).filter(|level| self.has(*level));
        levels
            .map(|level| self.subtrees[level as usize])
            .reduce(|low, high| high + low)
            .unwrap_or(0.0)
    }

    fn has(&self, level: u32) -> bool {
        self.blocks >> level & 1 == 1
    }

    fn assert_open(&self) {
        assert!(!self.closed, "only the last piece of a tensor may end inside a block");
    }

    /// Binary addition of 2^level blocks: equal subtrees join and carry.
    fn push(&mut self, level: u32, sum: f64) {
        let (mut sum, mut free) = (sum, level);
        while self.has(free) {
            sum += self.subtrees[free as usize];
            free += 1;
        }
        self.subtrees[free as usize] = sum;
        self.blocks += 1 << level;
    }
}

impl Default for NormTree {
    fn default() -> Self {
        Self::new()
    }
}

struct BlockSum<'a>(&'a [f32]);

impl Kernel for BlockSum<'_> {
    type Output = f64;

    #[inline(always)]
    fn run(self) -> f64 {
        let mut sums = [0.0_f64; LANES];
        let (vectors, tail) = self.0.as_chunks::<LANES>();
        for vector in vectors {
            for l in 0..LANES {
                sums[l] += f64::from(vector[l]) * f64::from(vector[l]);
            }
        }
        for (sum, value) in sums.iter_mut().zip(tail) {
            *sum += f64::from(*value) * f64::from(*value);
        }
        fold_halves(sums)
    }
}

#[inline(always)]
fn fold_halves(mut sums: [f64; LANES]) -> f64 {
    let mut half = LANES / 2;
    while half > 0 {
        for l in 0..half {
            sums[l] += sums[l + half];
        }
        half /= 2;
    }
    sums[0]
}
