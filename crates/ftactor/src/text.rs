//! Losses and samples of a model that is only run forward.

use std::path::{Path, PathBuf};

use actors::{Failure, Forward};
use data::{Plan, Rows, Tokenizer};
use model::ModelConfig;
use twox_hash::XxHash3_64;

use crate::progress::ByteBar;
use crate::run_record::DataFile;

/// Rows that are evaluated together.
const EVAL_TOKENS: usize = 2048;

/// A summed loss.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Evaluation {
    /// In nats.
    pub(crate) sum: f64,
    pub(crate) targets: u64,
    pub(crate) rows: u64,
}

impl Evaluation {
    /// Mean over targets, in nats.
    pub(crate) fn loss(&self) -> f64 {
        self.sum / self.targets.max(1) as f64
    }
}

/// Token rows of data, opened.
pub(crate) fn eval_rows(
    store_dir: &Path,
    config: &ModelConfig,
    paths: &[PathBuf],
    seq_len: usize,
) -> anyhow::Result<Rows> {
    Ok(prepare_rows(store_dir, config, paths, seq_len)?.rows)
}

/// Data as token rows of the store.
pub(crate) struct PreparedRows {
    /// Inside the store; follows from the contents of the data, the tokenizer and the row length.
    pub(crate) name: String,
    /// Every byte of them was compared with its hash.
    pub(crate) rows: Rows,
    /// What they were made of.
    pub(crate) files: Vec<DataFile>,
}

/// Tokenises data into the store's `tokens/` unless that was done before.
pub(crate) fn prepare_rows(
    store_dir: &Path,
    config: &ModelConfig,
    paths: &[PathBuf],
    seq_len: usize,
) -> anyhow::Result<PreparedRows> {
    let tokenizer = Tokenizer::load(store_dir)?;
    let mut key = format!("{seq_len} {} {:?}", tokenizer.digest(), config.eos_token);
    let mut files = Vec::new();
    for source in data::list_sources(paths)? {
        let (bytes, hash) = data::hash_file(&source)?;
        key.push_str(&format!(" {} {bytes} {hash}", extension(&source)));
        let path = source.display().to_string();
        files.push(DataFile { path, bytes, hash: model::hex(hash) });
    }
    let name = format!("tokens/rows-{}.bin", model::hex(XxHash3_64::oneshot(key.as_bytes())));
    let file = store_dir.join(&name);
    // A file that does not hold what it says is made again.
    if let Ok(rows) = Rows::open_verified(&file) {
        return Ok(PreparedRows { name, rows, files });
    }
    let plan = Plan {
        paths,
        tokenizer: Some(&tokenizer),
        eos: config.eos_token,
        seq_len: seq_len as u32,
        vocab_size: config.vocab_size as u32,
    };
    let bar = ByteBar::new("tokenise");
    data::prepare(&plan, &file, &mut |p| bar.at(p.read_bytes, p.total_bytes))?;
    Ok(PreparedRows { rows: Rows::open_verified(&file)?, name, files })
}

fn extension(path: &Path) -> String {
    path.extension().map(|e| e.to_string_lossy().into_owned()).unwrap_or_default()
}

/// Loss over the first `max_rows` rows; `None` if `stop` says so meanwhile.
pub(crate) fn evaluate(
    forward: &mut Forward<'_>,
    rows: &Rows,
    max_rows: Option<u64>,
    stop: &dyn Fn() -> bool,
) -> anyhow::Result<Option<Evaluation>> {
    let seq_len = rows.seq_len() as usize;
    let count = rows.rows().min(max_rows.unwrap_or(u64::MAX));
    let at_once = (EVAL_TOKENS / seq_len).max(1) as u64;
    let mut total = Evaluation { rows: count, ..Evaluation::default() };
    let (mut tokens, mut targets) = (Vec::new(), Vec::new());
    for first in (0..count).step_by(at_once as usize) {
        if stop() {
            return Ok(None);
        }
        let ids: Vec<u64> = (first..(first + at_once).min(count)).collect();
        rows.read(&ids, &mut tokens, &mut targets)?;
        let (sum, number) = forward.loss(&tokens, &targets, seq_len)?;
        total.sum += sum;
        total.targets += number;
    }
    Ok(Some(total))
}

/// How a text is continued.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sampling {
    pub(crate) max_tokens: usize,
    /// 0 takes the most likely token.
    pub(crate) temperature: f64,
    pub(crate) seed: u64,
    /// The model's maximum: older tokens are forgotten beyond it.
    pub(crate) max_positions: usize,
}

/// What the model writes after `prompt`, up to its end-of-sequence token or until `stop` says so.
pub(crate) fn generate(
    forward: &mut Forward<'_>,
    tokenizer: &Tokenizer,
    prompt: &str,
    sampling: &Sampling,
    stop: &dyn Fn() -> bool,
) -> anyhow::Result<String> {
    let mut ids = tokenizer.encode(prompt)?;
    if ids.is_empty() {
        ids.extend(tokenizer.eos());
    }
    if ids.is_empty() {
        return crate::exit::refuse(
            "the prompt is empty and the tokenizer names no end-of-sequence token",
        );
    }
    let start = ids.len();
    let mut random = Random(sampling.seed);
    for _ in 0..sampling.max_tokens {
        if stop() {
            break;
        }
        let window = &ids[ids.len().saturating_sub(sampling.max_positions)..];
        let logits = forward.next_logits(window)?;
        let next = choose(&logits, sampling.temperature, &mut random)?;
        if Some(next) == tokenizer.eos() {
            break;
        }
        ids.push(next);
    }
    Ok(tokenizer.decode_text(&ids[start..])?)
}

/// Samples from softmax(logits / temperature); at 0 the first of the largest.
fn choose(logits: &[f32], temperature: f64, random: &mut Random) -> Result<u32, Failure> {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if !largest.is_finite() {
        return Err(Failure::Logits);
    }
    if temperature <= 0.0 {
        return Ok(logits.iter().position(|&l| l == largest).map_or(0, |i| i as u32));
    }
    let weight = |l: &f32| (f64::from(l - largest) / temperature).exp();
    let mut left = random.unit() * logits.iter().map(weight).sum::<f64>();
    for (id, logit) in logits.iter().enumerate() {
        left -= weight(logit);
        if left < 0.0 {
            return Ok(id as u32);
        }
    }
    Ok(logits.len() as u32 - 1)
}

/// splitmix64 (Steele, Lea and Flood 2014).
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in `[0, 1)`.
    pub(crate) fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// One of `choices`.
    pub(crate) fn pick<'c, T>(&mut self, choices: &'c [T]) -> &'c T {
        &choices[(self.next() % choices.len() as u64) as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn temperature_zero_is_greedy_and_sampling_follows_the_weights() {
        let logits = [0.0, 3f32.ln(), f32::NEG_INFINITY];
        assert_eq!(choose(&logits, 0.0, &mut Random(1)).unwrap(), 1);
        let mut random = Random(7);
        let ones = (0..4000).filter(|_| choose(&logits, 1.0, &mut random).unwrap() == 1).count();
        assert!((2900..3100).contains(&ones), "{ones} of 4000, expected 3000");
        assert!(choose(&[f32::NAN], 1.0, &mut random).is_err());
    }
}
