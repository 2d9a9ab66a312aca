//! Import and export of models: Hugging Face directories, GGUF files, fresh initialisation.
//!
//! Invariants:
//! - the only room that knows the names and layouts of Hugging Face checkpoints and GGUF files;
//! - weights enter a store exactly, but for a layout that keeps bfloat16 ones, which rounds them to
//!   the nearest; what cannot be read exactly is refused by name before anything is written;
//! - weights pass in pieces: memory does not grow with the model, nor with any number that a file
//!   claims;
//! - a tensor's number of bytes, shape and place come from a file and are compared with the file's
//!   length and the layer table before they are used.

mod dtype;
mod error;
mod export;
mod gguf;
mod hf;
mod init;
mod json;
mod source;
mod weights;

pub use dtype::Dtype;
pub use error::{ConvertError, ErrorKind};
pub use export::{Exported, export_hf};
pub use gguf::import_gguf;
pub use hf::import_hf;
pub use init::{Init, InitTokenizer, init};
pub use weights::{Destination, config_in};

/// Called with the bytes done and the bytes in all.
pub type Progress<'a> = dyn FnMut(u64, u64) + 'a;

/// What an import did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Layers of the store, embedding and head included.
    pub layers: usize,
    /// Parameters of the store.
    pub parameters: u64,
    /// Tensors of the source that are redundant and were left out.
    pub ignored: Vec<String>,
    /// What the user should know about the result.
    pub warnings: Vec<String>,
}
