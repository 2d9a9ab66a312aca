//! NumPy's `.npy` files of token ids: the header, and ids from little-endian bytes.
//!
//! Invariants:
//! - nothing is allocated by a length that the file only claims to have;
//! - a header is accepted only when its shape and type account for every byte of the file.
//!
//! Source of the format: NumPy enhancement proposal 1, `numpy.lib.format`.

use crate::error::DataError;
use crate::sources::SourceReader;

const MAGIC: &[u8; 6] = b"\x93NUMPY";
/// Enough to know how long the header is.
const FRONT_BYTES: usize = 12;
/// NumPy itself writes some hundred bytes and reads at most 10,000 unless told otherwise.
const HEADER_LENGTHS: std::ops::RangeInclusive<u32> = 2..=10_000;

/// Type of one id in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum IdType {
    U16,
    U32,
    I64,
}

/// What the file holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shape {
    Stream { tokens: u64 },
    Rows { rows: u64, width: u64 },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NpyHeader {
    pub(crate) id_type: IdType,
    pub(crate) shape: Shape,
}

impl IdType {
    pub(crate) fn bytes(self) -> usize {
        match self {
            IdType::U16 => 2,
            IdType::U32 => 4,
            IdType::I64 => 8,
        }
    }

    /// Appends the ids in `bytes`, whose length is a multiple of [`IdType::bytes`].
    pub(crate) fn decode(self, bytes: &[u8], ids: &mut Vec<i64>) {
        match self {
            IdType::U16 => ids.extend(chunks(bytes).map(|b| i64::from(u16::from_le_bytes(b)))),
            IdType::U32 => ids.extend(chunks(bytes).map(|b| i64::from(u32::from_le_bytes(b)))),
            IdType::I64 => ids.extend(chunks(bytes).map(i64::from_le_bytes)),
        }
    }

    fn parse(descr: &str) -> Result<IdType, String> {
        match descr {
            "<u2" => Ok(IdType::U16),
            "<u4" => Ok(IdType::U32),
            "<i8" => Ok(IdType::I64),
            _ => Err(format!("type {descr:?}; token ids must be u16, u32 or i64, little-endian")),
        }
    }
}

impl NpyHeader {
    /// Reads the header from the front of `source`; the ids follow at once.
    pub(crate) fn read(source: &mut SourceReader) -> Result<NpyHeader, DataError> {
        let path = source.path().to_path_buf();
        let error = |reason| DataError::Npy { path: path.clone(), reason };
        let mut front = Vec::new();
        source.append(&mut front, FRONT_BYTES)?;
        let (start, end) = header_span(&front).map_err(error)?;
        source.append(&mut front, end - FRONT_BYTES)?;
        let text = front.get(start..end).ok_or("the file ends inside its header".to_owned());
        let data_bytes = source.file_bytes().saturating_sub(end as u64);
        text.and_then(|text| parse_header(text, data_bytes)).map_err(error)
    }
}

/// Where the header text starts and ends, from the first [`FRONT_BYTES`] of a file; it ends behind
/// them.
pub(crate) fn header_span(front: &[u8]) -> Result<(usize, usize), String> {
    let version = match front {
        [magic @ .., major, _, _, _, _, _] if magic == MAGIC => *major,
        _ => return Err("not a .npy file".to_owned()),
    };
    let (start, length) = match version {
        1 => (10, u32::from(u16::from_le_bytes([front[8], front[9]]))),
        2 | 3 => (12, u32::from_le_bytes([front[8], front[9], front[10], front[11]])),
        _ => return Err(format!("unknown .npy version {version}")),
    };
    if !HEADER_LENGTHS.contains(&length) {
        return Err(format!("a header of {length} bytes"));
    }
    Ok((start, start + length as usize))
}

/// The header text, a Python dictionary of three known keys, checked against the bytes behind it.
pub(crate) fn parse_header(text: &[u8], data_bytes: u64) -> Result<NpyHeader, String> {
    let text = std::str::from_utf8(text).map_err(|_| "the header is not text".to_owned())?;
    let fields = Fields::parse(text)?;
    let id_type = IdType::parse(&fields.descr.ok_or("no descr in the header")?)?;
    let shape = match *fields.shape.ok_or("no shape in the header")? {
        [tokens] => Shape::Stream { tokens },
        [rows, width] => Shape::Rows { rows, width },
        ref other => return Err(format!("{} dimensions; 1 or 2 are read", other.len())),
    };
    if fields.fortran_order.ok_or("no fortran_order in the header")? {
        return Err("columns first (fortran_order); save it in C order".to_owned());
    }
    let tokens = match shape {
        Shape::Stream { tokens } => Some(tokens),
        Shape::Rows { rows, width } => rows.checked_mul(width),
    };
    match tokens.and_then(|tokens| tokens.checked_mul(id_type.bytes() as u64)) {
        Some(bytes) if bytes == data_bytes => Ok(NpyHeader { id_type, shape }),
        Some(bytes) => Err(format!("the shape needs {bytes} bytes, the file has {data_bytes}")),
        None => Err("a shape larger than any file".to_owned()),
    }
}

#[derive(Default)]
struct Fields {
    descr: Option<String>,
    fortran_order: Option<bool>,
    shape: Option<Vec<u64>>,
}

impl Fields {
    fn parse(text: &str) -> Result<Fields, String> {
        let mut fields = Fields::default();
        let mut scan = Scan { rest: text };
        scan.expect('{')?;
        while !scan.eat('}') {
            let key = scan.string()?;
            scan.expect(':')?;
            match key {
                "descr" => fields.descr = Some(scan.string()?.to_owned()),
                "fortran_order" => fields.fortran_order = Some(scan.boolean()?),
                "shape" => fields.shape = Some(scan.tuple()?),
                _ => return Err(format!("unknown key {key:?} in the header")),
            }
            if !scan.eat(',') {
                scan.expect('}')?;
                break;
            }
        }
        if scan.rest.trim().is_empty() { Ok(fields) } else { Err(scan.error()) }
    }
}

/// A reader of the few Python literals that a header is made of.
struct Scan<'a> {
    rest: &'a str,
}

impl<'a> Scan<'a> {
    fn eat(&mut self, c: char) -> bool {
        self.rest = self.rest.trim_start();
        match self.rest.strip_prefix(c) {
            Some(rest) => {
                self.rest = rest;
                true
            }
            None => false,
        }
    }

    fn expect(&mut self, c: char) -> Result<(), String> {
        if self.eat(c) { Ok(()) } else { Err(self.error()) }
    }

    fn string(&mut self) -> Result<&'a str, String> {
        let quote = if self.eat('\'') {
            '\''
        } else {
            self.expect('"')?;
            '"'
        };
        let (text, rest) = self.rest.split_once(quote).ok_or_else(|| self.error())?;
        if text.contains('\\') {
            return Err(self.error());
        }
        self.rest = rest;
        Ok(text)
    }

    fn boolean(&mut self) -> Result<bool, String> {
        self.rest = self.rest.trim_start();
        for (word, value) in [("True", true), ("False", false)] {
            if let Some(rest) = self.rest.strip_prefix(word) {
                self.rest = rest;
                return Ok(value);
            }
        }
        Err(self.error())
    }

    fn tuple(&mut self) -> Result<Vec<u64>, String> {
        let mut numbers = Vec::new();
        self.expect('(')?;
        while !self.eat(')') {
            numbers.push(self.number()?);
            if !self.eat(',') {
                self.expect(')')?;
                break;
            }
        }
        Ok(numbers)
    }

    fn number(&mut self) -> Result<u64, String> {
        self.rest = self.rest.trim_start();
        let end = self.rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(self.rest.len());
        let (digits, rest) = self.rest.split_at(end);
        let number = digits.parse().map_err(|_| self.error())?;
        self.rest = rest;
        Ok(number)
    }

    fn error(&self) -> String {
        let near: String = self.rest.trim_start().chars().take(16).collect();
        format!("header not understood at {near:?}")
    }
}

fn chunks<const N: usize>(bytes: &[u8]) -> impl Iterator<Item = [u8; N]> + '_ {
    let (chunks, rest) = bytes.as_chunks::<N>();
    assert!(rest.is_empty(), "{} bytes are not whole ids of {N}", bytes.len());
    chunks.iter().copied()
}
