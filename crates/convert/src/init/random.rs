//! A counter-based generator of normally distributed numbers.
//!
//! Definition. `mix` is SplitMix64's finaliser (Steele, Lea, Flood 2014); words of a stream are
//! `word(k) = mix(key + (k + 1) * 0x9e3779b97f4a7c15)`, i.e. SplitMix64 from the state `key`, which
//! is `mix(mix(seed) ^ fnv1a64(name))`. Elements `2p` and `2p + 1` are the cosine and the sine
//! branch of one Box-Muller transform (1958), in float64, of `u1 = ((word(2p) >> 11) + 1) / 2^53`
//! in (0, 1] and `u2 = (word(2p + 1) >> 11) / 2^53` in [0, 1), times the standard deviation,
//! rounded to float32.

use std::f64::consts::TAU;
use std::num::NonZero;
use std::thread;

const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;
const UNIT: f64 = 1.0 / (1u64 << 53) as f64;
/// Below this many elements a second thread costs more than it saves.
const THREAD_ELEMENTS: usize = 1 << 16;

/// The numbers of one tensor.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stream {
    key: u64,
}

impl Stream {
    pub(crate) fn new(seed: u64, name: &str) -> Stream {
        Stream { key: mix(mix(seed) ^ fnv1a64(name.as_bytes())) }
    }

    /// Fills `out` with the elements from number `start` on.
    pub(crate) fn fill_normal(self, start: u64, deviation: f64, out: &mut [f32]) {
        let threads = thread::available_parallelism().map_or(1, NonZero::get);
        let share = out.len().div_ceil(threads).max(THREAD_ELEMENTS).next_multiple_of(2);
        thread::scope(|scope| {
            let mut first = start;
            for part in out.chunks_mut(share) {
                let from = first;
                first += part.len() as u64;
                if part.len() < share && from == start {
                    self.fill(from, deviation, part);
                } else {
                    scope.spawn(move || self.fill(from, deviation, part));
                }
            }
        });
    }

    fn fill(self, start: u64, deviation: f64, out: &mut [f32]) {
        let mut index = start;
        let mut rest = out;
        while let Some((first, tail)) = rest.split_first_mut() {
            let (cosine, sine) = self.pair(index / 2);
            rest = tail;
            if index % 2 == 1 {
                *first = (sine * deviation) as f32;
                index += 1;
                continue;
            }
            *first = (cosine * deviation) as f32;
            index += 1;
            if let Some((second, tail)) = std::mem::take(&mut rest).split_first_mut() {
                *second = (sine * deviation) as f32;
                rest = tail;
                index += 1;
            }
        }
    }

    fn pair(self, p: u64) -> (f64, f64) {
        let u1 = ((self.word(2 * p) >> 11) + 1) as f64 * UNIT;
        let u2 = (self.word(2 * p + 1) >> 11) as f64 * UNIT;
        let radius = (-2.0 * u1.ln()).sqrt();
        let (sine, cosine) = (TAU * u2).sin_cos();
        (radius * cosine, radius * sine)
    }

    fn word(self, k: u64) -> u64 {
        mix(self.key.wrapping_add(k.wrapping_add(1).wrapping_mul(GOLDEN)))
    }
}

fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

fn fnv1a64(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(seed: u64, name: &str, start: u64, len: usize) -> Vec<f32> {
        let mut out = vec![0.0; len];
        Stream::new(seed, name).fill_normal(start, 1.0, &mut out);
        out
    }

    #[test]
    fn an_element_does_not_depend_on_how_it_is_asked_for() {
        let all = numbers(7, "a", 0, 300_001);
        for (start, len) in [(0, 1), (1, 2), (131_071, 140_000), (299_999, 2)] {
            assert_eq!(numbers(7, "a", start as u64, len), all[start..start + len]);
        }
    }

    #[test]
    fn seeds_and_names_give_other_numbers() {
        let a = numbers(7, "a", 0, 64);
        assert_ne!(a, numbers(8, "a", 0, 64));
        assert_ne!(a, numbers(7, "b", 0, 64));
    }

    #[test]
    fn the_words_are_splitmix64() {
        // First outputs of the published generator from the state 1234567.
        let stream = Stream { key: 1_234_567 };
        assert_eq!(stream.word(0), 6_457_827_717_110_365_317);
        assert_eq!(stream.word(1), 3_203_168_211_198_807_973);
    }

    #[test]
    fn moments_are_those_of_a_normal_distribution() {
        let n = 1_000_000;
        let x = numbers(0, "moments", 0, n);
        let mean =
            |f: &dyn Fn(f64) -> f64| x.iter().map(|&v| f(f64::from(v))).sum::<f64>() / n as f64;
        assert!(mean(&|v| v).abs() < 0.004);
        assert!((mean(&|v| v * v) - 1.0).abs() < 0.006);
        assert!((mean(&|v| v.powi(4)) - 3.0).abs() < 0.05);
        let beyond_two = mean(&|v| f64::from(v.abs() > 2.0));
        assert!((beyond_two - 0.0455).abs() < 0.001, "{beyond_two}");
        let pairs = x.chunks_exact(2).map(|p| f64::from(p[0] * p[1])).sum::<f64>() / (n / 2) as f64;
        assert!(pairs.abs() < 0.006);
    }
}
