//! How data was understood, for a user to look at.

use serde::Serialize;

use crate::error::ErrorKind;
use crate::rows::{Row, Rows, RowsError};
use crate::tokenizer::{Tokenizer, TokenizerError};

/// A row file in numbers, and its first rows as text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Summary {
    pub documents: u64,
    pub rows: u64,
    pub seq_len: u32,
    /// Tokens in rows.
    pub tokens: u64,
    /// Tokens that are predicted.
    pub targets: u64,
    /// Tokens left out with the last, partial row.
    pub dropped_tokens: u64,
    pub vocab_size: u32,
    pub max_id: u32,
    pub first_rows: Vec<RowSummary>,
}

/// One row as a user sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RowSummary {
    pub row: u64,
    pub targets: u64,
    /// Where documents start.
    pub document_starts: Vec<usize>,
    /// The decoded tokens, special ones spelled out; without a tokenizer the ids themselves.
    pub text: String,
}

/// Why data could not be described.
#[derive(Debug, thiserror::Error)]
pub enum DescribeError {
    #[error(transparent)]
    Rows(#[from] RowsError),
    #[error("decode row {row}")]
    Decode { row: u64, source: TokenizerError },
}

impl DescribeError {
    /// As of the error inside.
    pub fn kind(&self) -> ErrorKind {
        match self {
            DescribeError::Rows(error) => error.kind(),
            DescribeError::Decode { source, .. } => source.kind(),
        }
    }
}

/// Numbers of all rows and the text of the first `first_rows`.
pub fn describe(
    rows: &Rows,
    tokenizer: Option<&Tokenizer>,
    first_rows: u64,
) -> Result<Summary, DescribeError> {
    let header = rows.header();
    let first_rows = (0..first_rows.min(header.rows))
        .map(|row| describe_row(row, &rows.row(row)?, tokenizer))
        .collect::<Result<_, DescribeError>>()?;
    Ok(Summary {
        documents: header.documents,
        rows: header.rows,
        seq_len: header.seq_len,
        tokens: header.rows * u64::from(header.seq_len),
        targets: header.targets,
        dropped_tokens: header.dropped_tokens,
        vocab_size: header.vocab_size,
        max_id: header.max_id,
        first_rows,
    })
}

fn describe_row(
    row: u64,
    content: &Row,
    tokenizer: Option<&Tokenizer>,
) -> Result<RowSummary, DescribeError> {
    let text = match tokenizer {
        Some(tokenizer) => tokenizer
            .decode(&content.tokens)
            .map_err(|source| DescribeError::Decode { row, source })?,
        None => format!("{:?}", content.tokens),
    };
    Ok(RowSummary {
        row,
        targets: content.targets.count_ones(),
        document_starts: content.starts.ones().collect(),
        text,
    })
}
