//! GB/s of the optimizer's loops against a plain copy, per instruction set, on one and two threads.
//!
//! Rates count bytes read plus bytes written, whatever the caches add: 28 per element for the
//! update (16 + 12), 24 for the copy of the three state slices, 4 for the norm and the search for
//! infinities, 5 to and from 8-bit codes. All work is done in pieces of 4 MiB per slice, as the trainer does it. Prints a
//! table and one JSON line. `cargo bench -p optim --bench adamw -- --elements N` sets the size
//! (default 32 Mi).

use std::cell::RefCell;
use std::hint::black_box;
use std::num::NonZero;
use std::sync::LazyLock;
use std::thread;
use std::time::Instant;

use optim::{AdamW, CODE_BLOCK, Input, InstructionSet, NormTree, Output, Prepared, SIGNED};

const DEFAULT_ELEMENTS: usize = 32 << 20;
const PIECE_ELEMENTS: usize = 1 << 20;
const PAGE_BYTES: usize = 4096;
const ROUNDS: usize = 9;

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    // `cargo test --benches` runs this binary too, without the flag and with a slow profile.
    if !arguments.iter().any(|argument| argument == "--bench") {
        return;
    }
    let mut arena = Arena::new(elements(&arguments));
    let mut results = Vec::new();
    for threads in [1, 2] {
        results.extend(measure(&mut arena, threads));
    }
    print_table(&results);
    print_json(&results, arena.elements());
}

fn elements(arguments: &[String]) -> usize {
    let at = arguments.iter().position(|argument| argument == "--elements");
    let given = at.and_then(|at| arguments.get(at + 1)).map(|text| text.parse::<NonZero<usize>>());
    match given {
        None => DEFAULT_ELEMENTS,
        Some(Ok(elements)) => elements.get(),
        Some(Err(error)) => panic!("--elements: {error}"),
    }
}

struct Measured {
    what: String,
    threads: usize,
    gb_per_second: f64,
    of_copy: f64,
}

/// All loops take turns in every round, so that a disturbance hits them alike.
fn measure(arena: &mut Arena, threads: usize) -> Vec<Measured> {
    let works = works();
    let mut rates = vec![Vec::new(); works.len()];
    for _ in 0..ROUNDS {
        for (work, rates) in works.iter().zip(&mut rates) {
            rates.push(arena.rate(work, threads));
        }
    }
    let medians: Vec<f64> = rates.into_iter().map(median).collect();
    let row = |(work, rate): (&Work, &f64)| Measured {
        what: work.to_string(),
        threads,
        gb_per_second: *rate,
        of_copy: rate / medians[0],
    };
    works.iter().zip(&medians).map(row).collect()
}

/// The copy, which all are compared with, comes first.
fn works() -> Vec<Work> {
    let mut works = vec![Work::Copy];
    for set in InstructionSet::available() {
        works.extend([Work::Update(set), Work::ZeroGrad(set), Work::Norm(set), Work::Finite(set)]);
        works.extend([Work::Encode(set), Work::Decode(set), Work::Round(set)]);
    }
    works
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

#[derive(Clone, Copy)]
enum Work {
    Copy,
    Update(InstructionSet),
    ZeroGrad(InstructionSet),
    Norm(InstructionSet),
    Finite(InstructionSet),
    Encode(InstructionSet),
    Decode(InstructionSet),
    Round(InstructionSet),
}

impl Work {
    fn bytes_per_element(self) -> usize {
        match self {
            Self::Copy | Self::ZeroGrad(_) => 24,
            Self::Update(_) => 28,
            Self::Norm(_) | Self::Finite(_) => 4,
            Self::Encode(_) | Self::Decode(_) => 5,
            Self::Round(_) => 6,
        }
    }

    fn run(self, prepared: &Prepared, input: Input<'_>, mut output: Output<'_>) {
        match self {
            Self::Copy => copy(input, &mut output),
            Self::Update(set) => set.update(prepared, true, input, output),
            Self::ZeroGrad(set) => set.update_zero_grad(prepared, true, input, output),
            Self::Norm(set) => norm(set, input.grad),
            Self::Finite(set) => assert!(black_box(set.is_finite(input.grad))),
            Self::Encode(set) => encode(set, input.grad),
            Self::Decode(set) => decode(set, output.weight),
            Self::Round(set) => round(set, input.grad),
        }
    }
}

impl std::fmt::Display for Work {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Copy => write!(out, "copy"),
            Self::Update(set) => write!(out, "update {set}"),
            Self::ZeroGrad(set) => write!(out, "update_zero_grad {set}"),
            Self::Norm(set) => write!(out, "sum_of_squares {set}"),
            Self::Finite(set) => write!(out, "is_finite {set}"),
            Self::Encode(set) => write!(out, "encode {set}"),
            Self::Decode(set) => write!(out, "decode {set}"),
            Self::Round(set) => write!(out, "round_stochastically {set}"),
        }
    }
}

fn copy(input: Input<'_>, output: &mut Output<'_>) {
    output.weight.copy_from_slice(input.weight);
    output.exp_avg.copy_from_slice(input.exp_avg);
    output.exp_avg_sq.copy_from_slice(input.exp_avg_sq);
}

fn norm(set: InstructionSet, grad: &[f32]) {
    let mut tree = NormTree::new();
    tree.feed_on(set, grad);
    black_box(tree.sum());
}

thread_local! {
    /// Codes and scales, and bfloat16 values, of a piece.
    static NARROW: RefCell<(Vec<u8>, Vec<f32>, Vec<u16>)> = const {
        RefCell::new((Vec::new(), Vec::new(), Vec::new()))
    };
}

/// Any codes of a piece.
static CODES: LazyLock<Vec<u8>> =
    LazyLock::new(|| (0..PIECE_ELEMENTS).map(|i| (i % 251) as u8).collect());
static SCALES: LazyLock<Vec<f32>> = LazyLock::new(|| vec![1e-3; PIECE_ELEMENTS / CODE_BLOCK]);

fn encode(set: InstructionSet, values: &[f32]) {
    NARROW.with_borrow_mut(|(codes, scales, _)| {
        codes.resize(values.len(), 0);
        scales.resize(values.len().div_ceil(CODE_BLOCK), 0.0);
        set.encode(&SIGNED, values, codes, scales);
        black_box(codes);
    });
}

fn decode(set: InstructionSet, values: &mut [f32]) {
    let scales = &SCALES[..values.len().div_ceil(CODE_BLOCK)];
    set.decode(&SIGNED, &CODES[..values.len()], scales, values);
}

fn round(set: InstructionSet, values: &[f32]) {
    NARROW.with_borrow_mut(|(_, _, rounded)| {
        rounded.resize(values.len(), 0);
        set.round_stochastically(1, 0, values, rounded);
        black_box(rounded);
    });
}

/// Four slices to read and three to write, aligned as the trainer's buffers are.
struct Arena {
    inputs: [Aligned; 4],
    outputs: [Aligned; 3],
    prepared: Prepared,
}

impl Arena {
    fn new(elements: usize) -> Self {
        let fill = |scale: f32| Aligned::new(elements, |i| scale * ((i % 251) as f32 + 1.0));
        let adamw = AdamW { lr: 1e-4, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.1 };
        Self {
            inputs: [fill(1e-3), fill(1e-5), fill(1e-8), fill(1e-4)],
            outputs: [fill(0.0), fill(0.0), fill(0.0)],
            prepared: adamw.prepare(10, 0.5),
        }
    }

    fn elements(&self) -> usize {
        self.inputs[0].elements
    }

    /// GB/s of one pass over everything, each thread taking one contiguous part.
    fn rate(&mut self, work: &Work, threads: usize) -> f64 {
        let (elements, prepared, work) = (self.elements(), self.prepared, *work);
        let part = elements.div_ceil(threads);
        let start = Instant::now();
        thread::scope(|scope| {
            let [weight, exp_avg, exp_avg_sq, grad] = self.inputs.each_ref().map(Aligned::slice);
            let inputs = weight.chunks(part).zip(exp_avg.chunks(part));
            let inputs = inputs.zip(exp_avg_sq.chunks(part)).zip(grad.chunks(part));
            let [weight, exp_avg, exp_avg_sq] = self.outputs.each_mut().map(Aligned::slice_mut);
            let outputs = weight.chunks_mut(part).zip(exp_avg.chunks_mut(part));
            let outputs = outputs.zip(exp_avg_sq.chunks_mut(part));
            for ((((weight, exp_avg), exp_avg_sq), grad), new) in inputs.zip(outputs) {
                let input = Input { weight, exp_avg, exp_avg_sq, grad };
                let ((weight, exp_avg), exp_avg_sq) = new;
                let output = Output { weight, exp_avg, exp_avg_sq };
                scope.spawn(move || in_pieces(work, &prepared, input, output));
            }
        });
        (elements * work.bytes_per_element()) as f64 / 1e9 / start.elapsed().as_secs_f64()
    }
}

/// A slice that starts at a page.
struct Aligned {
    memory: Vec<f32>,
    start: usize,
    elements: usize,
}

impl Aligned {
    fn new(elements: usize, value: impl Fn(usize) -> f32) -> Self {
        let mut memory = vec![0.0; elements + PAGE_BYTES / size_of::<f32>()];
        let start = memory.as_ptr().align_offset(PAGE_BYTES);
        for (i, element) in memory[start..start + elements].iter_mut().enumerate() {
            *element = value(i);
        }
        Self { memory, start, elements }
    }

    fn slice(&self) -> &[f32] {
        &self.memory[self.start..self.start + self.elements]
    }

    fn slice_mut(&mut self) -> &mut [f32] {
        &mut self.memory[self.start..self.start + self.elements]
    }
}

fn in_pieces(work: Work, prepared: &Prepared, input: Input<'_>, output: Output<'_>) {
    let Output { weight, exp_avg, exp_avg_sq } = output;
    let weights = weight.chunks_mut(PIECE_ELEMENTS);
    let exp_avgs = exp_avg.chunks_mut(PIECE_ELEMENTS);
    let exp_avg_sqs = exp_avg_sq.chunks_mut(PIECE_ELEMENTS);
    for (piece, ((weight, exp_avg), exp_avg_sq)) in
        weights.zip(exp_avgs).zip(exp_avg_sqs).enumerate()
    {
        let start = piece * PIECE_ELEMENTS;
        let range = start..start + weight.len();
        let input = Input {
            weight: &input.weight[range.clone()],
            exp_avg: &input.exp_avg[range.clone()],
            exp_avg_sq: &input.exp_avg_sq[range.clone()],
            grad: &input.grad[range],
        };
        work.run(prepared, input, Output { weight, exp_avg, exp_avg_sq });
    }
}

fn print_table(results: &[Measured]) {
    println!("{:<28} {:>7} {:>7} {:>8}", "loop", "threads", "GB/s", "of copy");
    for Measured { what, threads, gb_per_second, of_copy } in results {
        println!("{what:<28} {threads:>7} {gb_per_second:>7.1} {of_copy:>8.2}");
    }
}

fn print_json(results: &[Measured], elements: usize) {
    let row = |Measured { what, threads, gb_per_second, of_copy }: &Measured| {
        format!(
            "{{\"loop\":\"{what}\",\"threads\":{threads},\
             \"gb_per_second\":{gb_per_second:.3},\"of_copy\":{of_copy:.3}}}"
        )
    };
    let rows: Vec<String> = results.iter().map(row).collect();
    println!(r#"{{"bench":"adamw","elements":{elements},"rows":[{}]}}"#, rows.join(","));
}
