//! The crate as its callers see it.

// Clippy allows it in test functions only, not in what they share.
#![allow(clippy::unwrap_used)]

mod order;
mod prepare;
mod row_files;
mod sources;
mod support;
mod tokenizer;
