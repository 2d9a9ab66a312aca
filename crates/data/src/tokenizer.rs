//! Text to token ids and back: a Hugging Face `tokenizer.json`, or the bytes of the text.
//!
//! Invariants:
//! - no special tokens are added, nothing is truncated or padded, whatever the file asks for;
//! - ids are those of the whole text: it is cut only where [`crate::cuts`] allows it.

use std::error::Error;
use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde_json::Value;
use twox_hash::XxHash3_64;

use crate::byte_level;
use crate::cuts::{self, Shape};
use crate::error::ErrorKind;

/// Encoding takes about 130 times its text in memory (measured with SmolLM2's tokenizer): some
/// 40 MB for a piece of this size, into which a text is cut where it may be.
pub(crate) const PIECE_BYTES: usize = 1 << 18;

/// A tokenizer; cheap to share by reference between threads.
pub struct Tokenizer {
    engine: Engine,
    eos: Option<u32>,
    vocab_size: u32,
    digest: u64,
    piece_bytes: Option<usize>,
}

enum Engine {
    Bytes,
    Hub(Box<tokenizers::Tokenizer>),
}

/// Why a tokenizer could not be loaded or used.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    #[error("read tokenizer file {}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("{} is not a regular file", path.display())]
    NotRegular { path: PathBuf },
    #[error("{}: not JSON", path.display())]
    Config { path: PathBuf, source: serde_json::Error },
    #[error("{}: not a tokenizer", path.display())]
    Parse { path: PathBuf, source: Box<dyn Error + Send + Sync> },
    #[error("{}: a model with dropout gives random tokens", path.display())]
    Dropout { path: PathBuf },
    #[error("{}: the end-of-sequence token {token:?} is not in the vocabulary", path.display())]
    UnknownEos { path: PathBuf, token: String },
    #[error("encode text")]
    Encode(#[source] Box<dyn Error + Send + Sync>),
    #[error("decode tokens")]
    Decode(#[source] Box<dyn Error + Send + Sync>),
}

impl TokenizerError {
    /// Everything is `Invalid` but a failed read of a file that is there.
    pub fn kind(&self) -> ErrorKind {
        match self {
            TokenizerError::Read { source, .. } => ErrorKind::of(source),
            _ => ErrorKind::Invalid,
        }
    }
}

impl Tokenizer {
    /// The byte tokenizer: ids 0-255, 256 BOS, 257 EOS, 258 PAD.
    pub fn bytes() -> Tokenizer {
        Tokenizer {
            engine: Engine::Bytes,
            eos: Some(byte_level::BYTES_EOS),
            vocab_size: byte_level::BYTES_VOCAB_SIZE,
            digest: XxHash3_64::oneshot(byte_level::json().as_bytes()),
            piece_bytes: Some(PIECE_BYTES),
        }
    }

    /// The byte tokenizer as a `tokenizer.json` that Hugging Face's libraries load with the same
    /// ids; [`Tokenizer::from_file`] knows it again.
    pub fn bytes_json() -> String {
        byte_level::json()
    }

    /// The `tokenizer_config.json` that belongs beside [`Tokenizer::bytes_json`].
    pub fn bytes_config_json() -> String {
        byte_level::config_json()
    }

    /// A `tokenizer.json` alone; it names no end-of-sequence token unless it is the byte tokenizer.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Tokenizer, TokenizerError> {
        let path = path.as_ref();
        let json = read(path)?;
        if is_byte_tokenizer(&json) {
            return Ok(Tokenizer { digest: XxHash3_64::oneshot(&json), ..Tokenizer::bytes() });
        }
        let parse = |source| TokenizerError::Parse { path: path.to_path_buf(), source };
        let shape: Shape = serde_json::from_slice(&json).map_err(|e| parse(Box::new(e)))?;
        if shape.is_random() {
            return Err(TokenizerError::Dropout { path: path.to_path_buf() });
        }
        let mut hub = tokenizers::Tokenizer::from_bytes(&json).map_err(parse)?;
        hub.with_truncation(None).map_err(parse)?.with_padding(None);
        Ok(Tokenizer {
            vocab_size: highest_id(&hub).map_or(0, |id| id.saturating_add(1)),
            engine: Engine::Hub(Box::new(hub)),
            eos: None,
            digest: XxHash3_64::oneshot(&json),
            piece_bytes: shape.allows_cuts().then_some(PIECE_BYTES),
        })
    }

    /// The tokenizer of a model directory: its `tokenizer.json`, with the end-of-sequence token
    /// that `tokenizer_config.json`, `special_tokens_map.json` or else `config.json` names.
    pub fn load(directory: impl AsRef<Path>) -> Result<Tokenizer, TokenizerError> {
        let directory = directory.as_ref();
        let mut tokenizer = Tokenizer::from_file(directory.join("tokenizer.json"))?;
        for name in ["tokenizer_config.json", "special_tokens_map.json"] {
            if let Some(eos) = tokenizer.named_eos(&directory.join(name))? {
                tokenizer.eos = Some(eos);
                return Ok(tokenizer);
            }
        }
        if let Some(eos) = numbered_eos(&directory.join("config.json"))? {
            tokenizer.eos = Some(eos);
        }
        Ok(tokenizer)
    }

    /// The ids of `text`. Memory: about 130 bytes per byte of text for a tokenizer whose texts
    /// cannot be cut, else the ids and one piece.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        let mut ids = Vec::new();
        self.encode_into(text, &mut ids)?;
        Ok(ids)
    }

    /// Appends the ids of `text` to `ids`.
    pub fn encode_into(&self, text: &str, ids: &mut Vec<u32>) -> Result<(), TokenizerError> {
        let mut rest = text;
        while let Some(cut) = self.piece_bytes.and_then(|bytes| cuts::first_cut(rest, bytes)) {
            let (piece, behind) = rest.split_at(cut);
            self.encode_piece(piece, ids)?;
            rest = behind;
        }
        self.encode_piece(rest, ids)
    }

    /// The text of `ids`, special tokens spelled out. Byte sequences that are not UTF-8 become
    /// U+FFFD; ids beyond the vocabulary are skipped.
    pub fn decode(&self, ids: &[u32]) -> Result<String, TokenizerError> {
        self.decode_with(ids, true)
    }

    /// As [`Tokenizer::decode`], without the special tokens.
    pub fn decode_text(&self, ids: &[u32]) -> Result<String, TokenizerError> {
        self.decode_with(ids, false)
    }

    /// The id that ends a document, if the tokenizer names one.
    pub fn eos(&self) -> Option<u32> {
        self.eos
    }

    /// The highest id plus 1.
    pub fn vocab_size(&self) -> u32 {
        self.vocab_size
    }

    /// xxh3-64 of the `tokenizer.json`.
    pub fn digest(&self) -> u64 {
        self.digest
    }

    /// Whether this is the byte tokenizer.
    pub fn is_bytes(&self) -> bool {
        matches!(self.engine, Engine::Bytes)
    }

    /// The last place where `text` may be cut: the pieces' ids are the whole's.
    pub(crate) fn last_cut(&self, text: &str) -> Option<usize> {
        self.piece_bytes.and_then(|_| cuts::last_cut(text))
    }

    #[cfg(test)]
    pub(crate) fn with_piece_bytes(self, piece_bytes: Option<usize>) -> Tokenizer {
        assert!(self.piece_bytes.is_some() || piece_bytes.is_none(), "its texts cannot be cut");
        Tokenizer { piece_bytes, ..self }
    }

    fn encode_piece(&self, text: &str, ids: &mut Vec<u32>) -> Result<(), TokenizerError> {
        match &self.engine {
            Engine::Bytes => byte_level::encode(text, ids),
            Engine::Hub(hub) => {
                let encoding = hub.encode_fast(text, false).map_err(TokenizerError::Encode)?;
                ids.extend_from_slice(encoding.get_ids());
            }
        }
        Ok(())
    }

    fn decode_with(&self, ids: &[u32], keep_special: bool) -> Result<String, TokenizerError> {
        match &self.engine {
            Engine::Bytes => Ok(byte_level::decode(ids, keep_special)),
            Engine::Hub(hub) => hub.decode(ids, !keep_special).map_err(TokenizerError::Decode),
        }
    }

    fn token_id(&self, token: &str) -> Option<u32> {
        match &self.engine {
            Engine::Bytes => {
                let mut ids = Vec::new();
                byte_level::encode(token, &mut ids);
                <[u32; 1]>::try_from(ids).ok().map(|[id]| id)
            }
            Engine::Hub(hub) => hub.token_to_id(token),
        }
    }

    /// `eos_token` is a string, or an object with the string as `content`, or null.
    fn named_eos(&self, path: &Path) -> Result<Option<u32>, TokenizerError> {
        let Some(config) = read_config(path)? else { return Ok(None) };
        let eos = &config["eos_token"];
        let Some(token) = eos.as_str().or_else(|| eos["content"].as_str()) else {
            return Ok(None);
        };
        self.token_id(token).map(Some).ok_or_else(|| TokenizerError::UnknownEos {
            path: path.to_path_buf(),
            token: token.to_owned(),
        })
    }
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokenizer")
            .field("is_bytes", &self.is_bytes())
            .field("eos", &self.eos)
            .field("vocab_size", &self.vocab_size)
            .field("digest", &self.digest)
            .finish_non_exhaustive()
    }
}

fn read(path: &Path) -> Result<Vec<u8>, TokenizerError> {
    let failed = |source| TokenizerError::Read { path: path.to_path_buf(), source };
    // A pipe would be waited for.
    if !fs::metadata(path).map_err(failed)?.is_file() {
        return Err(TokenizerError::NotRegular { path: path.to_path_buf() });
    }
    fs::read(path).map_err(failed)
}

fn is_byte_tokenizer(json: &[u8]) -> bool {
    let ours = byte_level::json();
    // Parsing a large vocabulary only to see that it differs would cost seconds.
    json.len() <= 4 * ours.len()
        && encoding_parts(json).is_some_and(|parts| Some(parts) == encoding_parts(ours.as_bytes()))
}

/// A `tokenizer.json` without what never changes our ids; transformers rewrites these on saving.
fn encoding_parts(json: &[u8]) -> Option<Value> {
    let mut parts: Value = serde_json::from_slice(json).ok()?;
    for name in ["post_processor", "truncation", "padding"] {
        parts.as_object_mut()?.remove(name);
    }
    Some(parts)
}

fn highest_id(hub: &tokenizers::Tokenizer) -> Option<u32> {
    hub.get_vocab(true).into_values().max()
}

/// `eos_token_id` is a number or a list of numbers, of which the first counts.
fn numbered_eos(path: &Path) -> Result<Option<u32>, TokenizerError> {
    let Some(config) = read_config(path)? else { return Ok(None) };
    let eos = &config["eos_token_id"];
    let id = eos.as_u64().or_else(|| eos[0].as_u64());
    Ok(id.and_then(|id| u32::try_from(id).ok()))
}

/// `None` when there is no such file.
fn read_config(path: &Path) -> Result<Option<Value>, TokenizerError> {
    let json = match read(path) {
        Err(TokenizerError::Read { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
            return Ok(None);
        }
        json => json?,
    };
    let invalid = |source| TokenizerError::Config { path: path.to_path_buf(), source };
    serde_json::from_slice(&json).map(Some).map_err(invalid)
}
