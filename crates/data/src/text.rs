//! A `.txt` file as pieces of text, cut where the tokenizer allows it.
//!
//! Memory: one piece, or the whole file for a tokenizer that allows no cuts.

use std::str;

use crate::error::DataError;
use crate::sources::SourceReader;
use crate::tokenizer::{PIECE_BYTES, Tokenizer};

/// The UTF-8 byte order mark, which says nothing about the text.
pub(crate) const BYTE_ORDER_MARK: char = '\u{feff}';

/// Calls `piece` with the pieces of a document in order; an empty file has none.
pub(crate) fn read_text(
    source: &mut SourceReader,
    tokenizer: &Tokenizer,
    mut piece: impl FnMut(&SourceReader, &str) -> Result<(), DataError>,
) -> Result<(), DataError> {
    let mut buffer = Vec::new();
    let mut done_bytes = 0_u64;
    loop {
        // The next look at a text without cuts comes when it has doubled: time stays linear.
        let more = buffer.len().max(PIECE_BYTES);
        let ended = source.append(&mut buffer, more)? == 0;
        let text = valid_text(source, &buffer, done_bytes, ended)?;
        let cut = if ended { Some(text.len()) } else { tokenizer.last_cut(text) };
        let Some(cut) = cut else { continue };
        let head = &text[..cut];
        let head = if done_bytes == 0 { strip_mark(head) } else { head };
        if !head.is_empty() {
            piece(source, head)?;
        }
        buffer.drain(..cut);
        done_bytes += cut as u64;
        if ended {
            return Ok(());
        }
    }
}

/// `text` without the byte order mark that some editors put in front.
pub(crate) fn strip_mark(text: &str) -> &str {
    text.strip_prefix(BYTE_ORDER_MARK).unwrap_or(text)
}

/// The text in `bytes`, without a character that the next read may complete.
fn valid_text<'a>(
    source: &SourceReader,
    bytes: &'a [u8],
    before: u64,
    ended: bool,
) -> Result<&'a str, DataError> {
    let error = match str::from_utf8(bytes) {
        Ok(text) => return Ok(text),
        Err(error) => error,
    };
    let (valid, _) = bytes.split_at(error.valid_up_to());
    if ended || error.error_len().is_some() {
        let offset = before + error.valid_up_to() as u64;
        return Err(DataError::Utf8 { path: source.path().to_path_buf(), offset });
    }
    // Checked a moment ago; the empty text stands in for what cannot be.
    Ok(str::from_utf8(valid).unwrap_or_default())
}
