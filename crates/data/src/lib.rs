//! Text, JSONL and token files as rows of tokens: tokenised once, then read in an order that is
//! computed, so that a position in the data is two numbers.
//!
//! Invariants:
//! - nothing here knows models, devices, actors or the store's other files;
//! - token ids equal those of the Hugging Face library on the whole text, whatever the piece size;
//! - memory is bounded besides one document (and besides one piece, where a document can be cut);
//! - a row file appears under its name complete and synced, or not at all, whoever else writes it;
//! - nothing read from a file is trusted: lengths are checked against the file, ids against the
//!   vocabulary.
//!
//! The way of the bytes: [`list_sources`] -> [`prepare`] (tokenise, pack) -> `rows.bin` ->
//! [`Rows`], read at the row ids that [`Sampler`] computes from a [`Cursor`].

mod bits;
mod byte_level;
mod cuts;
mod describe;
mod error;
mod header;
mod jsonl;
mod npy;
mod order;
mod os;
mod prepare;
mod rows;
mod sampler;
mod sources;
mod text;
mod tokenizer;
mod writer;

pub use bits::Bits;
pub use byte_level::{BYTES_BOS, BYTES_EOS, BYTES_PAD, BYTES_VOCAB_SIZE};
pub use describe::{DescribeError, RowSummary, Summary, describe};
pub use error::{DataError, ErrorKind, Place};
pub use header::{HEADER_BYTES, RowsHeader};
pub use order::Order;
pub use prepare::{Plan, Prepared, Progress, SourceFile, prepare};
pub use rows::{Row, Rows, RowsError};
pub use sampler::{Cursor, CursorError, Sampler};
pub use sources::{hash_file, list_sources};
pub use tokenizer::{Tokenizer, TokenizerError};
pub use writer::remove_temporaries;

#[cfg(test)]
mod tests;
