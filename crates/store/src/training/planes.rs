//! Reads and writes of planes, whose chunks are in their file or wait in memory.

use std::ops::Range;
use std::sync::Arc;

use model::{CHUNK_BYTES, CHUNK_ELEMENTS, HostBytes, LayerId, Slot};

use super::WrittenAgain;
use super::inner::Inner;
use crate::error::Done;
use crate::files;
use crate::hashes::{self, ChunkHashes};
use crate::io::{AfterUse, IoDone, IoError, Op, Part, Pool, Target, fan_in, write_block};
use crate::slots::PlaneFile;

/// Threads that copy chunks that wait.
const COPIERS: usize = 2;

/// Where bytes come from.
enum Source {
    /// At an offset of the plane's file.
    File(u64),
    /// From a byte on of a chunk that waits.
    Memory(Arc<HostBytes>, usize),
}

impl PlaneFile {
    /// Chunks with some of these parameters that wait, each with its place in the file.
    fn waiting(&self, elements: &Range<usize>) -> Vec<(Range<u64>, Arc<HostBytes>)> {
        let chunks = elements.start / CHUNK_ELEMENTS..elements.end.div_ceil(CHUNK_ELEMENTS);
        let place = |(chunk, block): (usize, Arc<HostBytes>)| {
            let start = self.range(chunk * CHUNK_ELEMENTS..chunk * CHUNK_ELEMENTS).start;
            (start..start + block.len() as u64, block)
        };
        self.unsaved.of(chunks).into_iter().map(place).collect()
    }

    /// Where the values of some parameters come from, in order, with the length of each part.
    fn sources(&self, elements: &Range<usize>) -> Vec<(Source, usize)> {
        let Range { start: mut at, end } = self.range(elements.clone());
        let mut sources = Vec::new();
        let from_file = |range: Range<u64>, sources: &mut Vec<(Source, usize)>| {
            let parts = range.clone().step_by(CHUNK_BYTES);
            let part = |at| (Source::File(at), (range.end - at).min(CHUNK_BYTES as u64) as usize);
            sources.extend(parts.map(part));
        };
        for (place, block) in self.waiting(elements) {
            from_file(at..place.start.max(at), &mut sources);
            at = at.max(place.start);
            let len = (place.end.min(end) - at) as usize;
            sources.push((Source::Memory(block, (at - place.start) as usize), len));
            at += len as u64;
        }
        from_file(at..end, &mut sources);
        sources
    }
}

impl Inner {
    /// Reads the values of some parameters from a plane.
    pub(super) fn read_plane(
        &self,
        plane: &PlaneFile,
        elements: Range<usize>,
        after: AfterUse,
        done: Done<HostBytes>,
    ) {
        if let Err(error) = self.check_poison() {
            return done(Err(error));
        }
        let (file, range) = (plane.file.id(), plane.range(elements.clone()));
        let waiting = plane.waiting(&elements);
        if let [(place, block)] = &waiting[..]
            && *place == range
        {
            return done(Ok(HostBytes::view(block)));
        }
        let len = (range.end - range.start) as usize;
        let all_in_file = waiting.is_empty();
        let target = match all_in_file {
            true => self.io.target(file, range.start, len, &self.budget, after),
            false => self.budget.block(len).map(Target::heap).map_err(Into::into),
        };
        let target = match target {
            Ok(target) => target,
            Err(error) => return done(Err(error)),
        };
        let (io, budget) = (Arc::clone(&self.io), self.budget.clone());
        let keep = move |block| match all_in_file {
            true => io.keeping(file, range.start, block, &budget, after),
            // What waits is there already.
            false => block,
        };
        let read = move |block: Result<_, IoError>| done(block.map(keep).map_err(Into::into));
        self.fill(plane, &[elements], target, read);
    }

    /// Fills `target` with the values of some parameters after others.
    pub(super) fn fill(
        &self,
        plane: &PlaneFile,
        reads: &[Range<usize>],
        target: Target,
        done: impl FnOnce(Result<HostBytes, IoError>) + Send + 'static,
    ) {
        let sources = reads.iter().flat_map(|elements| plane.sources(elements));
        let (sources, lengths): (Vec<_>, Vec<_>) = sources.unzip();
        let (landing, parts) = target.split(&lengths);
        let done = Box::new(move |result: Result<(), _>| done(result.map(|()| landing.join())));
        let fan = fan_in(parts.len(), done);
        let mut copies = Vec::new();
        for (source, part) in sources.into_iter().zip(parts) {
            let file = plane.file.id();
            match source {
                Source::File(offset) => {
                    self.io.submit(Op::Read { file, offset, part }, fan.branch());
                }
                Source::Memory(block, start) => copies.push((block, start, part, fan.branch())),
            }
        }
        if !copies.is_empty() {
            let copiers = self.copiers.get_or_init(|| Pool::new("store-wait", COPIERS));
            copiers.run(move || copies.into_iter().for_each(copy));
        }
    }

    /// Writes a chunk of a plane, or lets it wait.
    pub(super) fn write_plane(
        &self,
        plane: &PlaneFile,
        (chunk, elements): (usize, Range<usize>),
        block: HostBytes,
        again: Option<WrittenAgain>,
        done: IoDone,
    ) {
        let range = plane.range(elements);
        assert_eq!(block.len() as u64, range.end - range.start, "bytes of a chunk");
        let block = match again {
            Some(WrittenAgain { waits: true, .. }) => {
                match plane.unsaved.put(chunk, block, plane.spec.plane.state(), &self.allowance) {
                    Ok(()) => return done(Ok(())),
                    Err(block) => block,
                }
            }
            _ => {
                plane.unsaved.forget(chunk..chunk + 1);
                block
            }
        };
        let after =
            again.map_or(AfterUse::Forget, |again| again.of(self.layout.state(), *plane.spec));
        let file = plane.file.id();
        let block = self.io.keeping(file, range.start, block, &self.budget, after);
        write_block(&*self.io, file, range.start, &Arc::new(block), done);
    }

    /// Hashes of all chunks of a slot.
    pub(super) fn written_chunks(&self, layer: LayerId, slot: Slot) -> Vec<ChunkHashes> {
        let chunks = self.tables()[layer.index()][slot as usize].complete();
        let Some(chunks) = chunks else {
            panic!("layer {layer} has unwritten chunks in slot {}", slot.name())
        };
        chunks
    }

    /// Writes the `hashes` file of a slot.
    pub(super) fn write_hashes(self: &Arc<Inner>, layer: LayerId, slot: Slot, done: IoDone) {
        let files = self.files(layer, slot);
        let chunks = self.written_chunks(layer, slot);
        let block = Arc::new(files::block(&hashes::encode(files.layout, &chunks)));
        let shared = Arc::clone(self);
        let written: IoDone = Box::new(move |result| {
            if result.is_ok() {
                shared.tables()[layer.index()][slot as usize].hashes_written = true;
            }
            done(result);
        });
        write_block(&*self.io, files.hashes.id(), 0, &block, written);
    }

    /// Brings what waits of these slots to their files.
    pub(super) fn write_waiting(self: &Arc<Inner>, slots: &[(LayerId, Slot)], done: IoDone) {
        let mut chunks = Vec::new();
        let mut tables = Vec::new();
        for &(layer, slot) in slots {
            self.assert_inactive(layer, slot);
            let files = self.files(layer, slot);
            for (at, plane) in files.planes.iter().enumerate() {
                let waiting = plane.unsaved.of(0..files.chunks());
                let chunk = |(chunk, block)| (Arc::clone(&files), at, chunk, block);
                chunks.extend(waiting.into_iter().map(chunk));
            }
            if !self.tables()[layer.index()][slot as usize].hashes_written {
                tables.push((layer, slot));
            }
        }
        let fan = fan_in(chunks.len() + tables.len(), done);
        for (files, at, chunk, block) in chunks {
            let plane = &files.planes[at];
            let (file, start) = (plane.file.id(), plane.range(files.chunk_elements(chunk)).start);
            let done = fan.branch();
            let saved = Arc::clone(&files);
            let written: IoDone = Box::new(move |result| {
                if result.is_ok() {
                    saved.planes[at].unsaved.forget(chunk..chunk + 1);
                }
                done(result);
            });
            write_block(&*self.io, file, start, &block, written);
        }
        for (layer, slot) in tables {
            self.write_hashes(layer, slot, fan.branch());
        }
    }

    /// Forgets what waits: nobody wants to save it.
    pub(super) fn forget_waiting(&self) {
        for layer in self.layout.table.layers() {
            let files = [Slot::A, Slot::B].map(|slot| self.files_if_any(layer.id, slot));
            for files in files.iter().flatten() {
                let chunks = 0..files.chunks();
                files.planes.iter().for_each(|plane| plane.unsaved.forget(chunks.clone()));
            }
        }
    }

    /// Syncs every file of these slots.
    pub(super) fn sync_slots(self: &Arc<Inner>, slots: Vec<(LayerId, Slot)>, done: Done<()>) {
        let files: Vec<_> = slots.iter().flat_map(|&(l, s)| self.files(l, s).files()).collect();
        let shared = Arc::clone(self);
        let finished = self.finish(done, move || {
            let mut tables = shared.tables();
            for (layer, slot) in slots {
                tables[layer.index()][slot as usize].unsynced = false;
            }
        });
        let fan = fan_in(files.len(), finished);
        for file in files {
            self.io.submit(Op::Sync { file }, fan.branch());
        }
    }
}

fn copy((block, start, mut part, done): (Arc<HostBytes>, usize, Part, IoDone)) {
    let bytes = &block.bytes()[start..start + part.len()];
    part.bytes_mut().copy_from_slice(bytes);
    drop((part, block));
    done(Ok(()));
}
