//! Sources in a directory of their own, and the row file made of them.

use std::fs;
use std::path::PathBuf;

use data::{DataError, Plan, Prepared, Row, Rows, Tokenizer, prepare};
use tempfile::TempDir;

pub(crate) const EOS: u32 = 257;

/// A directory with sources in it, and the row file made of them.
pub(crate) struct Case {
    pub(crate) directory: TempDir,
    pub(crate) paths: Vec<PathBuf>,
    pub(crate) tokenizer: Tokenizer,
}

impl Case {
    pub(crate) fn new(files: &[(&str, &[u8])]) -> Case {
        let directory = tempfile::tempdir().unwrap();
        let paths = files.iter().map(|(name, content)| {
            let path = directory.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, content).unwrap();
            path
        });
        Case { paths: paths.collect(), directory, tokenizer: Tokenizer::bytes() }
    }

    pub(crate) fn plan(&self, seq_len: u32) -> Plan<'_> {
        let tokenizer = Some(&self.tokenizer);
        Plan { paths: &self.paths, tokenizer, eos: None, seq_len, vocab_size: 259 }
    }

    pub(crate) fn out(&self) -> PathBuf {
        self.directory.path().join("tokens/rows.bin")
    }

    pub(crate) fn prepare(&self, seq_len: u32) -> Result<Prepared, DataError> {
        prepare(&self.plan(seq_len), &self.out(), &mut |_| ())
    }

    pub(crate) fn all_rows(&self) -> Vec<Row> {
        let rows = Rows::open(self.out()).unwrap();
        (0..rows.rows()).map(|row| rows.row(row).unwrap()).collect()
    }
}

pub(crate) fn bytes_and_eos(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).chain([EOS]).collect()
}

pub(crate) fn npy(descr: &str, shape: &str, data: &[u8]) -> Vec<u8> {
    let header = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}\n");
    let length = u16::try_from(header.len()).unwrap().to_le_bytes();
    [b"\x93NUMPY\x01\x00", &length[..], header.as_bytes(), data].concat()
}

pub(crate) fn u16s(ids: &[u16]) -> Vec<u8> {
    ids.iter().flat_map(|id| id.to_le_bytes()).collect()
}
