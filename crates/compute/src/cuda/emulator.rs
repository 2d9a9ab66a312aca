//! A [`Driver`] without a card: every stream is a thread that takes its time, kernels run on the host.
//!
//! What a card would let pass, or answer with wrong numbers some day, is an error here every time:
//! - two accesses to the same bytes, one of them a write, that no event orders, whenever they happen to run;
//! - memory that is freed before an event behind its last use was seen by the host, or used after that;
//! - a write beyond a block, seen in the margins around it when the block is freed;
//! - memory that nobody wrote, which is NaN.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::ffi::CStr;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use model::HostBytes;

use super::driver::{
    Arg, Driver, DriverError, Element, Event, Form, Grid, Memory, Product, Span, Stream,
};
use super::host::{self, Turns};
use crate::product::{Accum, ComputeDtype, Values};

const STREAMS: usize = Stream::ALL.len();
/// The host's place among the clocks.
const HOST: usize = STREAMS;
/// Poisoned bytes before and behind every block.
const MARGIN: usize = 256;
/// Two of them are a NaN in bfloat16, four in float32.
const POISON: u8 = 0xff;

/// How far each stream, and the host, has come as far as somebody knows: a vector clock.
type Clock = [u64; STREAMS + 1];

/// The emulated device.
#[derive(Debug)]
pub(super) struct Emulator {
    shared: Arc<Mutex<Shared>>,
    queues: Vec<Sender<Work>>,
    threads: Vec<JoinHandle<()>>,
    seed: u64,
}

type Work = Box<dyn FnOnce() -> Result<(), String> + Send>;

#[derive(Debug)]
struct Shared {
    free_bytes: usize,
    next: u64,
    blocks: BTreeMap<u64, Block>,
    clocks: [Clock; STREAMS + 1],
    failure: Option<DriverError>,
}

#[derive(Debug)]
struct Block {
    bytes: Vec<u8>,
    accesses: Vec<Access>,
}

/// A use of some bytes by what one stream did at a moment of its clock.
#[derive(Clone, Debug)]
struct Access {
    bytes: Range<usize>,
    writes: bool,
    stream: usize,
    at: u64,
}

/// What an event is: what its stream knew then, and whether it has come so far.
#[derive(Debug)]
struct Reached {
    clock: Clock,
    done: AtomicBool,
}

impl Reached {
    fn of(event: &Event) -> Result<Arc<Reached>, String> {
        Arc::clone(&event.0).downcast().map_err(|_| "an event is of another driver".to_owned())
    }
}

/// A range of device memory that one piece of work uses.
#[derive(Clone, Copy)]
struct Place {
    start: *mut u8,
    len: usize,
}

// SAFETY: a place points into a block that lives until an event behind its uses was seen; that uses do not
// overlap in time was checked when they were enqueued, or the work is not done.
unsafe impl Send for Place {}

impl Place {
    /// # Safety
    /// Nobody writes to the place until the slice is gone.
    unsafe fn read<'a>(self) -> &'a [u8] {
        // SAFETY: the caller's promise; the range is inside its block.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }

    /// # Safety
    /// Nobody else uses the place until the slice is gone.
    unsafe fn write<'a>(self) -> &'a mut [u8] {
        // SAFETY: the caller's promise; the range is inside its block.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.len) }
    }
}

impl Emulator {
    /// A device with so much memory; `seed` decides how streams and threads take their time.
    pub(super) fn new(memory_bytes: usize, seed: u64) -> Emulator {
        let shared = Shared {
            free_bytes: memory_bytes,
            next: 1,
            blocks: BTreeMap::new(),
            clocks: [[0; STREAMS + 1]; STREAMS + 1],
            failure: None,
        };
        let shared = Arc::new(Mutex::new(shared));
        let start = |stream: Stream| {
            let (sender, work) = channel::<Work>();
            let (shared, mut random) = (Arc::clone(&shared), seed ^ (stream.index() as u64) << 32);
            let run = move || {
                for work in work {
                    linger(&mut random);
                    // A card's error is sticky, too: nothing is done behind it.
                    if held(&shared).failure.is_some() {
                        continue;
                    }
                    if let Err(what) = work() {
                        held(&shared).fail(what);
                    }
                }
            };
            (sender, std::thread::spawn(run))
        };
        let (queues, threads) = Stream::ALL.map(start).into_iter().unzip();
        Emulator { shared, queues, threads, seed }
    }

    fn shared(&self) -> MutexGuard<'_, Shared> {
        held(&self.shared)
    }

    /// Checks what `work` uses, and enqueues it with its places if that is in order.
    fn enqueue(
        &self,
        on: Stream,
        uses: &[(&Span, bool)],
        work: impl FnOnce(&[Place]) -> Result<(), String> + Send + 'static,
    ) {
        let mut shared = self.shared();
        match shared.begin(on, uses) {
            Ok(places) => self.send(on, Box::new(move || work(&places))),
            Err(what) => shared.fail(what),
        }
    }

    fn send(&self, on: Stream, work: Work) {
        // A stream's thread ends with the emulator only.
        let _ = self.queues[on.index()].send(work);
    }
}

impl Drop for Emulator {
    fn drop(&mut self) {
        self.queues.clear();
        for thread in self.threads.drain(..) {
            // What it panicked about was said.
            let _ = thread.join();
        }
    }
}

fn held(shared: &Mutex<Shared>) -> MutexGuard<'_, Shared> {
    // Every change is complete before anything that may panic.
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Mostly not at all, sometimes long enough for the other streams to get far ahead.
fn linger(random: &mut u64) {
    *random =
        random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    match *random >> 60 {
        0 => std::thread::sleep(Duration::from_micros(200)),
        1..4 => std::thread::yield_now(),
        _ => {}
    }
}

impl Shared {
    fn fail(&mut self, what: String) {
        self.failure.get_or_insert(DriverError::Misuse(what));
    }

    /// One more piece of work on a stream, which uses these bytes.
    fn begin(&mut self, on: Stream, uses: &[(&Span, bool)]) -> Result<Vec<Place>, String> {
        let stream = on.index();
        // What the host has seen happened before whatever it asks for now.
        let seen = self.clocks[HOST];
        learn(&mut self.clocks[stream], &seen);
        self.clocks[stream][stream] += 1;
        let (clock, at) = (self.clocks[stream], self.clocks[stream][stream]);
        let each = |&(span, writes): &(&Span, bool)| {
            let block = self.blocks.get_mut(&span.id);
            let block = block.ok_or_else(|| format!("{on:?} uses memory that was freed"))?;
            let access = Access { bytes: span.bytes.clone(), writes, stream, at };
            if let Some(other) = block.accesses.iter().find(|other| other.races(&access, &clock)) {
                let how = |access: &Access| if access.writes { "writes" } else { "reads" };
                return Err(format!(
                    "{on:?} {} bytes {:?} that {:?} {} with no event in between",
                    how(&access),
                    access.bytes,
                    Stream::ALL[other.stream],
                    how(other),
                ));
            }
            block.accesses.retain(|other| !other.is_behind(&access));
            block.accesses.push(access);
            let start = block.bytes[MARGIN + span.bytes.start..].as_mut_ptr();
            Ok(Place { start, len: span.bytes.len() })
        };
        uses.iter().map(each).collect()
    }
}

/// Whose clock it is knows from now on what `from` knows.
fn learn(clock: &mut Clock, from: &Clock) {
    clock.iter_mut().zip(from).for_each(|(mine, theirs)| *mine = (*mine).max(*theirs));
}

impl Access {
    fn meets(&self, other: &Access) -> bool {
        self.bytes.start < other.bytes.end && other.bytes.start < self.bytes.end
    }

    /// Whether `later`, whose stream knows `clock`, may run beside this one, which matters to it.
    fn races(&self, later: &Access, clock: &Clock) -> bool {
        self.meets(later) && (self.writes || later.writes) && clock[self.stream] < self.at
    }

    /// Whether who comes after `later` comes after this one as well, wherever they meet.
    fn is_behind(&self, later: &Access) -> bool {
        let inside = later.bytes.start <= self.bytes.start && self.bytes.end <= later.bytes.end;
        inside && self.stream == later.stream && (later.writes || !self.writes)
    }
}

impl Driver for Emulator {
    fn allocate(&self, bytes: usize) -> Result<Memory, DriverError> {
        let mut shared = self.shared();
        let free_bytes = shared.free_bytes;
        shared.free_bytes = free_bytes
            .checked_sub(bytes)
            .ok_or(DriverError::Memory { wanted_bytes: bytes, free_bytes })?;
        let id = shared.next;
        shared.next += 1;
        let block = Block { bytes: vec![POISON; bytes + 2 * MARGIN], accesses: Vec::new() };
        shared.blocks.insert(id, block);
        Ok(Memory { id, bytes })
    }

    fn free(&self, memory: Memory) {
        let mut shared = self.shared();
        let Some(block) = shared.blocks.remove(&memory.id) else {
            return shared.fail("memory is freed that is not there".into());
        };
        shared.free_bytes += memory.bytes;
        let seen = shared.clocks[HOST];
        let is_poisoned = |margin: &[u8]| margin.iter().all(|byte| *byte == POISON);
        if let Some(access) = block.accesses.iter().find(|access| seen[access.stream] < access.at) {
            let stream = Stream::ALL[access.stream];
            shared.fail(format!("memory is freed that {stream:?} may still use"));
            // It does, maybe: the block stays.
            std::mem::forget(block);
        } else if !is_poisoned(&block.bytes[..MARGIN])
            || !is_poisoned(&block.bytes[MARGIN + memory.bytes..])
        {
            shared.fail(format!("something was written beyond a block of {} bytes", memory.bytes));
        }
    }

    fn copy_in(&self, on: Stream, from: Arc<HostBytes>, bytes: Range<usize>, to: Span) {
        self.enqueue(on, &[(&to, true)], move |places| {
            // SAFETY: only this work uses the place.
            let to = unsafe { places[0].write() };
            to.copy_from_slice(&from.bytes()[bytes]);
            Ok(())
        });
    }

    fn copy_out(
        &self,
        on: Stream,
        from: Span,
        mut to: HostBytes,
        done: Box<dyn FnOnce(HostBytes) + Send>,
    ) {
        self.enqueue(on, &[(&from, false)], move |places| {
            // SAFETY: only reads use the place.
            let from = unsafe { places[0].read() };
            to.bytes_mut()[..from.len()].copy_from_slice(from);
            done(to);
            Ok(())
        });
    }

    fn fill(&self, on: Stream, to: Span, byte: u8) {
        self.enqueue(on, &[(&to, true)], move |places| {
            // SAFETY: only this work uses the place.
            unsafe { places[0].write() }.fill(byte);
            Ok(())
        });
    }

    fn launch(&self, on: Stream, kernel: &'static CStr, grid: Grid, arguments: Vec<Arg>) {
        let (seed, uses) = (self.seed, arguments.clone());
        let uses: Vec<_> = uses.iter().filter_map(Arg::used).collect();
        self.enqueue(on, &uses, move |places| {
            let mut places = places.iter();
            let mut next = || places.next().map_or(0, |place| place.start as u64);
            let values: Vec<u64> = arguments.iter().map(|a| a.value(&mut next)).collect();
            // SAFETY: the device gives each kernel arguments of its types; that buffers are long enough
            // shows in their margins.
            let done = unsafe { host::launch(kernel, grid, Turns { seed, skipped: 0 }, values) };
            done.map_err(|error| format!("{kernel:?}: {error}"))
        });
    }

    fn multiply(&self, on: Stream, product: Product) {
        let Product { form, sizes: [m, n, k], a, b, c, operands, result, add } = product;
        self.enqueue(on, &[(&a, false), (&b, false), (&c, true)], move |places| {
            for (place, bytes) in places.iter().zip([
                m * k * operands.bytes(),
                n * k * operands.bytes(),
                m * n * result.bytes(),
            ]) {
                if place.len != bytes {
                    return Err(format!("a matrix of {bytes} bytes lies in {}", place.len));
                }
            }
            // SAFETY: nobody else writes the operands, which may be one, and they are copied before the
            // result is written, which only this work uses.
            let [a, b] = [0, 1].map(|i| wide(operands, unsafe { places[i].read() }));
            // SAFETY: as above.
            let c = unsafe { places[2].write() };
            let mut sums = if add { wide(result, c) } else { vec![0.0; m * n] };
            let accum = if add { Accum::Add } else { Accum::Replace };
            let dtype = ComputeDtype::F32;
            match form {
                Form::Nt => dtype.nt(&mut sums, accum, &a, Values::F32(&b), k),
                Form::Nn => dtype.nn(&mut sums, accum, &a, Values::F32(&b), k),
                Form::Tn => dtype.tn(&mut sums, accum, &a, &b, k),
            }
            narrow(result, &sums, c);
            Ok(())
        });
    }

    fn record(&self, on: Stream) -> Event {
        // Held until the work is in its queue: the queue's order is the clocks'.
        let shared = self.shared();
        let clock = shared.clocks[on.index()];
        let reached = Arc::new(Reached { clock, done: AtomicBool::new(false) });
        let event = Event(reached.clone());
        self.send(
            on,
            Box::new(move || {
                reached.done.store(true, Ordering::Release);
                Ok(())
            }),
        );
        event
    }

    fn wait(&self, on: Stream, event: &Event) {
        let reached = match Reached::of(event) {
            Ok(reached) => reached,
            Err(what) => return self.shared().fail(what),
        };
        let mut shared = self.shared();
        learn(&mut shared.clocks[on.index()], &reached.clock);
        let waiting = Arc::clone(&self.shared);
        self.send(
            on,
            Box::new(move || {
                while !reached.done.load(Ordering::Acquire) && held(&waiting).failure.is_none() {
                    std::thread::yield_now();
                }
                Ok(())
            }),
        );
    }

    fn query(&self, event: &Event) -> Result<bool, DriverError> {
        let reached = Reached::of(event).map_err(DriverError::Misuse)?;
        let mut shared = self.shared();
        if let Some(failure) = &shared.failure {
            return Err(failure.clone());
        }
        let done = reached.done.load(Ordering::Acquire);
        if done {
            learn(&mut shared.clocks[HOST], &reached.clock);
        }
        Ok(done)
    }
}

impl Arg {
    fn used(&self) -> Option<(&Span, bool)> {
        match self {
            Arg::Read(span) => Some((span, false)),
            Arg::Write(span) => Some((span, true)),
            Arg::Int(_) | Arg::Long(_) | Arg::Word(_) | Arg::Float(_) | Arg::Absent => None,
        }
    }

    /// In eight bytes; `next` has the buffers' addresses.
    fn value(&self, next: &mut impl FnMut() -> u64) -> u64 {
        match self {
            Arg::Int(value) => u64::from(value.cast_unsigned()),
            Arg::Long(value) => value.cast_unsigned(),
            Arg::Word(value) => u64::from(*value),
            Arg::Float(value) => u64::from(value.to_bits()),
            Arg::Read(_) | Arg::Write(_) => next(),
            Arg::Absent => 0,
        }
    }
}

fn wide(element: Element, bytes: &[u8]) -> Vec<f32> {
    let half = |b: &[u8; 2]| model::from_bf16(u16::from_le_bytes(*b));
    match element {
        Element::F32 => bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
        Element::Bf16 => bytes.as_chunks().0.iter().map(half).collect(),
    }
}

fn narrow(element: Element, values: &[f32], to: &mut [u8]) {
    match element {
        Element::F32 => {
            let to = to.as_chunks_mut().0.iter_mut();
            to.zip(values).for_each(|(to, value)| *to = value.to_le_bytes());
        }
        Element::Bf16 => {
            let to = to.as_chunks_mut().0.iter_mut();
            to.zip(values).for_each(|(to, value)| *to = model::to_bf16(*value).to_le_bytes());
        }
    }
}

#[cfg(test)]
mod tests;
