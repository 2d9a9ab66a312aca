//! Sources to a row file: tokenise, pack, record what was read.
//!
//! Packing: text documents (each with the end-of-sequence token behind it) and 1-D token files (as
//! they are) form one stream in the order given, cut into rows; what is left of it at the end is
//! dropped. The ready rows of 2-D files follow behind all packed rows, in the order given.
//!
//! Document starts: the first token of a text document, of a 1-D file and of a ready row. Targets:
//! every token of a row but the first.

use std::path::{Path, PathBuf};

use twox_hash::XxHash3_64;

use crate::error::{DataError, Place};
use crate::header::RowsHeader;
use crate::jsonl;
use crate::npy::{NpyHeader, Shape};
use crate::sources::{Format, READ_BYTES, SourceReader, list_sources};
use crate::text::read_text;
use crate::tokenizer::Tokenizer;
use crate::writer::{RowsWriter, Totals};

/// What rows are made of and how.
#[derive(Clone, Copy, Debug)]
pub struct Plan<'a> {
    /// Files and directories; see [`list_sources`].
    pub paths: &'a [PathBuf],
    /// May be missing when all sources are `.npy`.
    pub tokenizer: Option<&'a Tokenizer>,
    /// Ends a document instead of the tokenizer's own token.
    pub eos: Option<u32>,
    /// S: tokens of a row, at least 2.
    pub seq_len: u32,
    /// The model's vocabulary: every id must be below it.
    pub vocab_size: u32,
}

/// A source as it was read; sizes and hashes belong into the run's record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceFile {
    pub path: PathBuf,
    pub bytes: u64,
    /// xxh3-64 of the content.
    pub hash: u64,
    /// Text documents, 1 for a 1-D file, ready rows.
    pub documents: u64,
    /// Tokens with end-of-sequence tokens, before anything is dropped.
    pub tokens: u64,
}

/// What [`prepare`] wrote.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prepared {
    pub header: RowsHeader,
    /// Sources in the order of [`list_sources`].
    pub sources: Vec<SourceFile>,
    /// Tokens of all sources, those dropped included.
    pub tokens: u64,
}

/// How far [`prepare`] is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    pub read_bytes: u64,
    pub total_bytes: u64,
    pub tokens: u64,
}

/// Writes the rows of `plan` to `out_file`, which appears complete and synced or not at all. Others
/// may write the same file meanwhile; what a killed process leaves, [`crate::remove_temporaries`]
/// removes.
///
/// Memory: one document and its ids, or one piece where the tokenizer's texts can be cut.
/// `progress` is called after about every MiB that was read, and after every file.
pub fn prepare(
    plan: &Plan<'_>,
    out_file: &Path,
    progress: &mut dyn FnMut(Progress),
) -> Result<Prepared, DataError> {
    if plan.seq_len < 2 {
        return Err(DataError::SeqLen { seq_len: plan.seq_len });
    }
    let inputs = plan.inputs()?;
    let mut work = Work {
        plan,
        writer: RowsWriter::create(out_file, plan.seq_len)?,
        progress,
        done_bytes: 0,
        total_bytes: inputs.iter().map(|input| input.bytes).sum(),
        tokens: 0,
        reported_bytes: 0,
    };
    let sources = work.read_all(&inputs)?;
    let (rows, dropped) = (work.writer.rows(), work.writer.dropped_tokens());
    if rows == 0 {
        return Err(plan.too_short(&sources, dropped));
    }
    let tokens = work.tokens;
    let header = work.writer.finish(&plan.totals(&sources))?;
    Ok(Prepared { header, sources, tokens })
}

impl Plan<'_> {
    /// Opens every source, so that what cannot be read is refused before anything is written.
    fn inputs(&self) -> Result<Vec<Input>, DataError> {
        let inputs: Vec<Input> =
            list_sources(self.paths)?.into_iter().map(Input::open).collect::<Result<_, _>>()?;
        if let Some(text) = inputs.iter().find(|input| input.format != Format::Npy) {
            self.eos_of(&text.path)?;
        }
        for input in &inputs {
            input.check_width(self.seq_len)?;
        }
        Ok(inputs)
    }

    fn tokenizer_for(&self, path: &Path) -> Result<&Tokenizer, DataError> {
        self.tokenizer.ok_or_else(|| DataError::NoTokenizer { path: path.to_path_buf() })
    }

    fn eos_of(&self, path: &Path) -> Result<u32, DataError> {
        let named = self.tokenizer_for(path)?.eos();
        let missing = || DataError::NoEos { path: path.to_path_buf() };
        let eos = self.eos.or(named).ok_or_else(missing)?;
        let vocab_size = self.vocab_size;
        if eos < vocab_size {
            Ok(eos)
        } else {
            Err(DataError::EosBeyondVocabulary { eos, vocab_size })
        }
    }

    fn too_short(&self, sources: &[SourceFile], tokens: u64) -> DataError {
        DataError::TooShort {
            path: sources.first().map(|source| source.path.clone()).unwrap_or_default(),
            files: sources.len(),
            empty: sources.iter().filter(|source| source.bytes == 0).count(),
            tokens,
            seq_len: self.seq_len,
        }
    }

    fn totals(&self, sources: &[SourceFile]) -> Totals {
        Totals {
            vocab_size: self.vocab_size,
            documents: sources.iter().map(|source| source.documents).sum(),
            source_digest: self.digest(sources),
        }
    }

    /// All that decides about ids and rows: equal digests mean equal row files.
    fn digest(&self, sources: &[SourceFile]) -> u64 {
        let eos = self.eos.or_else(|| self.tokenizer.and_then(Tokenizer::eos));
        let mut words = vec![
            u64::from(self.seq_len),
            u64::from(self.vocab_size),
            eos.map_or(u64::MAX, u64::from),
            self.tokenizer.map_or(0, Tokenizer::digest),
        ];
        for source in sources {
            let format = Format::of(&source.path).map_or(0, |format| format as u64 + 1);
            words.extend([format, source.bytes, source.hash]);
        }
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        XxHash3_64::oneshot(&bytes)
    }
}

/// A source that was looked at but not read.
struct Input {
    path: PathBuf,
    format: Format,
    bytes: u64,
    /// Of a `.npy` file.
    shape: Option<Shape>,
}

impl Input {
    fn open(path: PathBuf) -> Result<Input, DataError> {
        let format =
            Format::of(&path).ok_or_else(|| DataError::UnknownFormat { path: path.clone() })?;
        let mut reader = SourceReader::open(&path)?;
        let shape = match format {
            Format::Npy => Some(NpyHeader::read(&mut reader)?.shape),
            Format::Text | Format::Jsonl => None,
        };
        Ok(Input { bytes: reader.file_bytes(), path, format, shape })
    }

    fn has_ready_rows(&self) -> bool {
        matches!(self.shape, Some(Shape::Rows { .. }))
    }

    fn check_width(&self, seq_len: u32) -> Result<(), DataError> {
        match self.shape {
            Some(Shape::Rows { width, .. }) if width != u64::from(seq_len) => {
                Err(DataError::RowWidth { path: self.path.clone(), width, seq_len })
            }
            _ => Ok(()),
        }
    }
}

/// The reading of all sources into one writer.
struct Work<'a, 'p> {
    plan: &'a Plan<'a>,
    writer: RowsWriter,
    progress: &'p mut dyn FnMut(Progress),
    /// Bytes of the sources that were read to their end.
    done_bytes: u64,
    total_bytes: u64,
    tokens: u64,
    reported_bytes: u64,
}

/// What one source gave so far.
#[derive(Default)]
struct Count {
    documents: u64,
    tokens: u64,
}

impl Work<'_, '_> {
    fn read_all(&mut self, inputs: &[Input]) -> Result<Vec<SourceFile>, DataError> {
        let mut sources: Vec<Option<SourceFile>> = inputs.iter().map(|_| None).collect();
        for ready_rows in [false, true] {
            for (input, source) in inputs.iter().zip(&mut sources) {
                if input.has_ready_rows() == ready_rows {
                    *source = Some(self.read_source(input)?);
                }
            }
            self.writer.end_stream();
        }
        Ok(sources.into_iter().flatten().collect())
    }

    fn read_source(&mut self, input: &Input) -> Result<SourceFile, DataError> {
        let mut reader = SourceReader::open(&input.path)?;
        let mut count = Count::default();
        match input.format {
            Format::Text => self.read_text(&mut reader, &mut count)?,
            Format::Jsonl => self.read_jsonl(&mut reader, &mut count)?,
            Format::Npy => self.read_npy(&mut reader, input, &mut count)?,
        }
        let (bytes, hash) = reader.finish()?;
        self.done_bytes += bytes;
        self.report(0, true);
        let Count { documents, tokens } = count;
        Ok(SourceFile { path: input.path.clone(), bytes, hash, documents, tokens })
    }

    fn read_text(&mut self, reader: &mut SourceReader, count: &mut Count) -> Result<(), DataError> {
        let tokenizer = self.plan.tokenizer_for(reader.path())?;
        let mut starts = true;
        read_text(reader, tokenizer, |reader, piece| {
            let place = Place::Token(count.tokens);
            let ids = encode(tokenizer, piece, reader.path(), place)?;
            let token = count.tokens;
            self.check(&ids, reader.path(), |index| Place::Token(token + index as u64))?;
            self.push(&ids, starts, count)?;
            starts &= ids.is_empty();
            self.report(reader.read_bytes(), false);
            Ok(())
        })?;
        self.end_document(reader.path(), starts, count)
    }

    fn read_jsonl(
        &mut self,
        reader: &mut SourceReader,
        count: &mut Count,
    ) -> Result<(), DataError> {
        let tokenizer = self.plan.tokenizer_for(reader.path())?;
        let mut bytes = Vec::new();
        let mut line = 0;
        while reader.append_line(&mut bytes)? > 0 {
            line += 1;
            let text = jsonl::parse_line(&bytes).map_err(|reason| {
                let path = reader.path().to_path_buf();
                DataError::Jsonl { path, line, reason }
            })?;
            bytes.clear();
            let Some(text) = text else { continue };
            let ids = encode(tokenizer, &text, reader.path(), Place::Line(line))?;
            self.check(&ids, reader.path(), |_| Place::Line(line))?;
            self.push(&ids, true, count)?;
            self.end_document(reader.path(), ids.is_empty(), count)?;
            self.report(reader.read_bytes(), false);
        }
        Ok(())
    }

    /// `starts`: the document has no token before its end-of-sequence token.
    fn end_document(
        &mut self,
        path: &Path,
        starts: bool,
        count: &mut Count,
    ) -> Result<(), DataError> {
        let eos = self.plan.eos_of(path)?;
        count.documents += 1;
        self.push(&[eos], starts, count)
    }

    fn read_npy(
        &mut self,
        reader: &mut SourceReader,
        input: &Input,
        count: &mut Count,
    ) -> Result<(), DataError> {
        let header = NpyHeader::read(reader)?;
        if Some(header.shape) != input.shape {
            return Err(DataError::Changed { path: input.path.clone() });
        }
        // A ready row is pushed as a document of its own, which then fills a row exactly.
        let (documents, length) = match header.shape {
            Shape::Stream { tokens } => (1, tokens),
            Shape::Rows { rows, width } => (rows, width),
        };
        for _ in 0..documents {
            self.read_sequence(reader, header, length, count)?;
        }
        count.documents = documents;
        Ok(())
    }

    fn read_sequence(
        &mut self,
        reader: &mut SourceReader,
        header: NpyHeader,
        length: u64,
        count: &mut Count,
    ) -> Result<(), DataError> {
        let id_bytes = header.id_type.bytes();
        let (mut bytes, mut wide) = (Vec::new(), Vec::new());
        let mut done = 0;
        while done < length {
            let ids = (length - done).min((READ_BYTES / id_bytes) as u64) as usize;
            bytes.resize(ids * id_bytes, 0);
            reader.fill(&mut bytes)?;
            wide.clear();
            header.id_type.decode(&bytes, &mut wide);
            let narrow = self.narrow(&wide, reader.path(), header.shape, count.tokens)?;
            self.push(&narrow, done == 0, count)?;
            done += ids as u64;
            self.report(reader.read_bytes(), false);
        }
        Ok(())
    }

    /// Ids from a file as ids of the vocabulary; `first` is the place of the first in the file.
    fn narrow(
        &self,
        ids: &[i64],
        path: &Path,
        shape: Shape,
        first: u64,
    ) -> Result<Vec<u32>, DataError> {
        let vocab_size = self.plan.vocab_size;
        let mut narrow = Vec::with_capacity(ids.len());
        for (index, &id) in (first..).zip(ids) {
            match u32::try_from(id) {
                Ok(id) if id < vocab_size => narrow.push(id),
                _ => {
                    let (path, place) = (path.to_path_buf(), place_in(shape, index));
                    return Err(DataError::IdBeyondVocabulary { path, place, id, vocab_size });
                }
            }
        }
        Ok(narrow)
    }

    fn check(
        &self,
        ids: &[u32],
        path: &Path,
        place: impl Fn(usize) -> Place,
    ) -> Result<(), DataError> {
        let vocab_size = self.plan.vocab_size;
        match ids.iter().position(|&id| id >= vocab_size) {
            None => Ok(()),
            Some(index) => Err(DataError::IdBeyondVocabulary {
                path: path.to_path_buf(),
                place: place(index),
                id: i64::from(ids[index]),
                vocab_size,
            }),
        }
    }

    fn push(&mut self, ids: &[u32], starts: bool, count: &mut Count) -> Result<(), DataError> {
        count.tokens += ids.len() as u64;
        self.tokens += ids.len() as u64;
        self.writer.push(ids, starts)
    }

    fn report(&mut self, source_bytes: u64, always: bool) {
        let read_bytes = self.done_bytes + source_bytes;
        if always || read_bytes >= self.reported_bytes + READ_BYTES as u64 {
            self.reported_bytes = read_bytes;
            let (total_bytes, tokens) = (self.total_bytes, self.tokens);
            (self.progress)(Progress { read_bytes, total_bytes, tokens });
        }
    }
}

fn encode(
    tokenizer: &Tokenizer,
    text: &str,
    path: &Path,
    place: Place,
) -> Result<Vec<u32>, DataError> {
    let path = path.to_path_buf();
    tokenizer.encode(text).map_err(|source| DataError::Encode { path, place, source })
}

fn place_in(shape: Shape, index: u64) -> Place {
    match shape {
        Shape::Stream { .. } => Place::Token(index),
        Shape::Rows { width, .. } => Place::Row { row: index / width, column: index % width },
    }
}
