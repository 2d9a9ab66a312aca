//! Where a long text may be cut so that its pieces have the token ids of the whole.
//!
//! The only cut made is between an ASCII letter and the newline after it, and only for tokenizers
//! for which that is provably a border of its own:
//! - the normaliser is absent or NFC, which never composes across a newline;
//! - no added token contains a newline, strips what is around it, or asks for word borders;
//! - the text is split by one of the patterns below. In each, a match that has a letter ends where
//!   the letters end or before, no alternative looks behind, and only whitespace looks ahead, so
//!   the piece before sees the same matches, and the piece after starts where a match starts;
//! - the model is BPE, which works inside one split, without dropout.

use serde::Deserialize;
use serde_json::Value;

/// Llama 3's split pattern.
const LLAMA3: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
);
/// Qwen 2's and 3's split pattern.
const QWEN2: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
);

/// The parts of a `tokenizer.json` that decide about cuts, and about being deterministic.
#[derive(Debug, Deserialize)]
pub(crate) struct Shape {
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    #[serde(default)]
    added_tokens: Vec<Added>,
    model: ModelShape,
}

#[derive(Debug, Deserialize)]
struct Added {
    content: String,
    #[serde(default)]
    single_word: bool,
    #[serde(default)]
    lstrip: bool,
    #[serde(default)]
    rstrip: bool,
}

#[derive(Debug, Deserialize)]
struct ModelShape {
    #[serde(rename = "type")]
    kind: Option<String>,
    dropout: Option<f64>,
}

impl Shape {
    /// Whether encoding the same text twice may give different ids.
    pub(crate) fn is_random(&self) -> bool {
        self.model.dropout.is_some_and(|dropout| dropout != 0.0)
    }

    /// Whether [`last_cut`] and [`first_cut`] keep this tokenizer's ids.
    pub(crate) fn allows_cuts(&self) -> bool {
        self.model.kind.as_deref() == Some("BPE")
            && !self.is_random()
            && (self.normalizer.is_null() || self.normalizer["type"] == "NFC")
            && self.added_tokens.iter().all(Added::allows_cuts)
            && splits_after_letters(&self.pre_tokenizer)
    }
}

impl Added {
    fn allows_cuts(&self) -> bool {
        !self.content.contains('\n') && !self.single_word && !self.lstrip && !self.rstrip
    }
}

/// The last place in `text` to cut at, as a byte offset greater than 0.
pub(crate) fn last_cut(text: &str) -> Option<usize> {
    text.as_bytes().windows(2).rposition(is_cut).map(|before| before + 1)
}

/// The first place at or after `from` to cut at.
pub(crate) fn first_cut(text: &str, from: usize) -> Option<usize> {
    let start = from.saturating_sub(1);
    let found = text.as_bytes().get(start..)?.windows(2).position(is_cut)?;
    Some(start + found + 1)
}

fn is_cut(pair: &[u8]) -> bool {
    pair[0].is_ascii_alphabetic() && pair[1] == b'\n'
}

/// A sequence must have one step that splits, and else only steps that split further.
fn splits_after_letters(pre_tokenizer: &Value) -> bool {
    match pre_tokenizer["type"].as_str() {
        Some("Sequence") => match pre_tokenizer["pretokenizers"].as_array() {
            Some(steps) => steps.iter().all(is_harmless) && steps.iter().any(splits_after_letters),
            None => false,
        },
        Some("ByteLevel") => is_harmless(pre_tokenizer) && pre_tokenizer["use_regex"] != false,
        Some("Split") => is_harmless(pre_tokenizer),
        _ => false,
    }
}

fn is_harmless(step: &Value) -> bool {
    match step["type"].as_str() {
        Some("Digits") => true,
        Some("ByteLevel") => step["add_prefix_space"] == false,
        Some("Split") => is_known_split(step),
        _ => false,
    }
}

fn is_known_split(step: &Value) -> bool {
    let pattern = step["pattern"]["Regex"].as_str();
    let known = pattern.is_some_and(|pattern| [LLAMA3, QWEN2].contains(&pattern));
    known && step["behavior"] == "Isolated" && step["invert"] != true
}
