//! Every kernel against the CPU's loops, in many orders of threads, and with each barrier left out.

#![allow(unsafe_code)]

use std::collections::BTreeSet;
use std::ffi::CStr;

use model::{from_bf16, split, to_bf16};

use super::driver::Element::{Bf16, F32};
use super::driver::{Element, Grid};
use super::host::{LaunchError, Turns, launch};
use crate::attention::Attention;
use crate::product::Accum;
use crate::rows::{self, Angles, HeadNorms, Heads, partial_count};
use crate::{MicroShape, NO_TARGET};

/// An argument of a kernel, with its buffer.
#[derive(Debug)]
enum Arg<'a> {
    Int(i32),
    Long(i64),
    Word(u32),
    Float(f32),
    F32(&'a [f32]),
    Bf16(&'a [u16]),
    U32(&'a [u32]),
    F32Out(&'a mut [f32]),
    Bf16Out(&'a mut [u16]),
    /// A buffer that is not there.
    Absent,
}

impl Arg<'_> {
    fn bits(&mut self) -> u64 {
        match self {
            Arg::Int(value) => u64::from(value.cast_unsigned()),
            Arg::Long(value) => value.cast_unsigned(),
            Arg::Word(value) => u64::from(*value),
            Arg::Float(value) => u64::from(value.to_bits()),
            Arg::F32(values) => values.as_ptr() as u64,
            Arg::Bf16(values) => values.as_ptr() as u64,
            Arg::U32(values) => values.as_ptr() as u64,
            Arg::F32Out(values) => values.as_mut_ptr() as u64,
            Arg::Bf16Out(values) => values.as_mut_ptr() as u64,
            Arg::Absent => 0,
        }
    }
}

/// Relative norm within which a result is right.
fn tolerance(element: Element) -> f64 {
    match element {
        F32 => 1e-5,
        Bf16 => 1e-2,
    }
}

/// The kernel's name for an element.
fn pick(element: Element, f32: &'static CStr, bf16: &'static CStr) -> &'static CStr {
    match element {
        F32 => f32,
        Bf16 => bf16,
    }
}

/// A buffer of either element.
#[derive(Clone, Debug)]
enum Buffer {
    F32(Vec<f32>),
    Bf16(Vec<u16>),
}

impl Buffer {
    fn of(element: Element, values: &[f32]) -> Buffer {
        match element {
            F32 => Buffer::F32(values.to_vec()),
            Bf16 => Buffer::Bf16(values.iter().map(|value| to_bf16(*value)).collect()),
        }
    }

    /// What nobody has written: NaNs.
    fn unwritten(element: Element, len: usize) -> Buffer {
        Buffer::of(element, &vec![f32::NAN; len])
    }

    fn read(&self) -> Arg<'_> {
        match self {
            Buffer::F32(values) => Arg::F32(values),
            Buffer::Bf16(values) => Arg::Bf16(values),
        }
    }

    fn write(&mut self) -> Arg<'_> {
        match self {
            Buffer::F32(values) => Arg::F32Out(values),
            Buffer::Bf16(values) => Arg::Bf16Out(values),
        }
    }

    fn wide(&self) -> Vec<f32> {
        match self {
            Buffer::F32(values) => values.clone(),
            Buffer::Bf16(values) => values.iter().map(|value| from_bf16(*value)).collect(),
        }
    }
}

/// Values in [-1, 1).
fn values(len: usize, stream: u64) -> Vec<f32> {
    let mut state = stream + 1;
    let next = |_| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..len).map(next).collect()
}

/// Values that `element` has exactly.
fn operand(element: Element, len: usize, stream: u64) -> Vec<f32> {
    Buffer::of(element, &values(len, stream)).wide()
}

fn around_one(len: usize, stream: u64) -> Vec<f32> {
    values(len, stream).iter().map(|value| 1.0 + value / 4.0).collect()
}

/// One result of a kernel, and what it should be.
struct Checked {
    name: &'static str,
    got: Vec<f32>,
    want: Vec<f32>,
}

impl Checked {
    fn distance(&self) -> f64 {
        assert_eq!(self.got.len(), self.want.len(), "{}", self.name);
        let square = |value: f64| value * value;
        let pairs = self.got.iter().zip(&self.want);
        let apart: f64 = pairs.map(|(a, b)| square(f64::from(*a) - f64::from(*b))).sum();
        let length: f64 = self.want.iter().map(|b| square(f64::from(*b))).sum();
        apart.sqrt() / length.sqrt().max(1e-30)
    }
}

type Results = Result<Vec<Checked>, LaunchError>;

fn checked(name: &'static str, got: Vec<f32>, want: Vec<f32>) -> Checked {
    Checked { name, got, want }
}

fn a_block_each(blocks: usize, threads: u32) -> Grid {
    Grid { blocks: [blocks as u32, 1, 1], threads, shared_bytes: 32 * 4 }
}

fn a_thread_each(elements: usize) -> Grid {
    let threads = 64;
    Grid {
        blocks: [elements.div_ceil(threads) as u32, 1, 1],
        threads: threads as u32,
        shared_bytes: 0,
    }
}

/// # Panics
/// Never: the name and the arguments of all calls below are those of the kernels.
fn call(
    kernel: &'static CStr,
    grid: Grid,
    turns: Turns,
    mut arguments: Vec<Arg<'_>>,
) -> Result<(), LaunchError> {
    // SAFETY: the calls below keep what it asks for; tests that would not are tests of the refusal.
    unsafe { launch(kernel, grid, turns, arguments.iter_mut().map(Arg::bits).collect()) }
}

fn norms(e: Element, turns: Turns) -> Results {
    let (tokens, width, eps) = (5, 70, 1e-5);
    let (x, w) = (values(tokens * width, 1), around_one(width, 2));
    let (mut h, mut rstd) = (Buffer::unwritten(e, tokens * width), vec![f32::NAN; tokens]);
    let ints = || Arg::Int(width as i32);
    let args = vec![
        Arg::F32(&x),
        Arg::F32(&w),
        Arg::Float(eps),
        ints(),
        h.write(),
        Arg::F32Out(&mut rstd),
    ];
    call(pick(e, c"norm_f32", c"norm_bf16"), a_block_each(tokens, 96), turns, args)?;
    let (mut want, mut want_rstd) = (vec![0.0; tokens * width], vec![0.0; tokens]);
    rows::norm(&x, &w, eps, &mut want, &mut want_rstd);
    let mut again = Buffer::unwritten(e, tokens * width);
    let args = vec![Arg::F32(&x), Arg::F32(&w), Arg::F32(&want_rstd), ints(), again.write()];
    call(pick(e, c"norm_again_f32", c"norm_again_bf16"), a_block_each(tokens, 32), turns, args)?;

    let (dh, start) = (values(tokens * width, 3), values(tokens * width, 4));
    let mut results = vec![
        checked("h", h.wide(), want.clone()),
        checked("rstd", rstd, want_rstd.clone()),
        checked("h again", again.wide(), want),
    ];
    for (add, accum) in [(0, Accum::Replace), (1, Accum::Add)] {
        let (mut dx, mut want_dx) = (start.clone(), start.clone());
        let args = vec![
            Arg::F32(&dh),
            Arg::F32(&x),
            Arg::F32(&w),
            Arg::F32(&want_rstd),
            ints(),
            Arg::Int(add),
            Arg::F32Out(&mut dx),
        ];
        call(c"norm_backward", a_block_each(tokens, 96), turns, args)?;
        let mut partials = vec![0.0; partial_count(tokens) * width];
        rows::norm_backward(&dh, &x, &w, &want_rstd, (&mut want_dx, accum), &mut partials);
        results.push(checked("dx", dx, want_dx));
    }
    Ok(results)
}

/// Sums over tokens: a bias's gradient, and a norm's, whose blocks are folded.
fn column_sums(e: Element, turns: Turns) -> Results {
    let (tokens, width) = (600, 40);
    let (dy, x) = (operand(e, tokens * width, 1), values(tokens * width, 2));
    let rstd = around_one(tokens, 3);
    let blocks = tokens.div_ceil(256);
    let grid = Grid { blocks: [2, blocks as u32, 1], threads: 256, shared_bytes: 256 * 4 };
    let mut results = Vec::new();
    for norm in [false, true] {
        let given = Buffer::of(e, &dy);
        let (mut partials, mut sums) = (vec![f32::NAN; blocks * width], vec![f32::NAN; width]);
        let (x_arg, rstd_arg) = match norm {
            true => (Arg::F32(&x), Arg::F32(&rstd)),
            false => (Arg::Absent, Arg::Absent),
        };
        let args = vec![
            given.read(),
            x_arg,
            rstd_arg,
            Arg::Long(tokens as i64),
            Arg::Int(width as i32),
            Arg::F32Out(&mut partials),
        ];
        call(pick(e, c"column_sums_f32", c"column_sums_bf16"), grid, turns, args)?;
        let args = vec![
            Arg::F32(&partials),
            Arg::Int(blocks as i32),
            Arg::Int(width as i32),
            Arg::Int(0),
            Arg::F32Out(&mut sums),
        ];
        call(c"fold_columns", a_thread_each(width), turns, args)?;
        let term = |t: usize, c: usize| {
            let value = f64::from(dy[t * width + c]);
            if norm { value * f64::from(x[t * width + c]) * f64::from(rstd[t]) } else { value }
        };
        let want =
            (0..width).map(|c| (0..tokens).map(|t| term(t, c)).sum::<f64>() as f32).collect();
        results.push(checked(if norm { "dw" } else { "db" }, sums, want));
    }
    Ok(results)
}

/// With and without norms of heads, of which only some pairs have a thread of the last warp.
fn rotations(e: Element, turns: Turns) -> Results {
    let (seq_len, queries, keys, n, eps) = (5, 4, 2, 80, 1e-6f32);
    let tokens = 2 * seq_len;
    let width = (queries + 2 * keys) * n;
    let frequencies: Vec<f64> = (0..n / 2).map(|i| 1.0 / (1.0 + i as f64)).collect();
    let angles = Angles::new(&frequencies, seq_len);
    let all = || (0..seq_len).flat_map(|p| frequencies.iter().map(move |f| p as f64 * f));
    let cosines: Vec<f32> = all().map(|a| a.cos() as f32).collect();
    let sines: Vec<f32> = all().map(|a| a.sin() as f32).collect();
    let (query, key) = (around_one(n, 1), around_one(n, 2));
    let grid = a_block_each(tokens * (queries + keys), 64);
    let mut results = Vec::new();
    for has_norms in [false, true] {
        let norms = has_norms.then_some(HeadNorms { query: &query, key: &key, eps });
        let heads = Heads { width, queries, keys, head_dim: n, norms };
        let turn = || {
            let of = |w| if has_norms { Arg::F32(w) } else { Arg::Absent };
            let ints = [seq_len, queries, keys, n].map(|value| Arg::Int(value as i32));
            let floats =
                [Arg::F32(&cosines), Arg::F32(&sines), of(&query), of(&key), Arg::Float(eps)];
            floats.into_iter().chain(ints)
        };
        let qkv = operand(e, tokens * width, 3);
        let mut turned = Buffer::of(e, &qkv);
        let args = [turned.write()].into_iter().chain(turn()).collect();
        call(pick(e, c"rotate_f32", c"rotate_bf16"), grid, turns, args)?;
        let mut want = qkv.clone();
        rows::rotate(&mut want, heads, &angles);
        results.push(checked("qkv", turned.wide(), want));

        let rotated = heads.rotated_width();
        let raw: Vec<f32> = qkv.chunks(width).flat_map(|row| row[..rotated].to_vec()).collect();
        let given = Buffer::of(e, &qkv);
        let mut copied = Buffer::unwritten(e, raw.len());
        let args = vec![
            given.read(),
            Arg::Int(width as i32),
            Arg::Long(raw.len() as i64),
            Arg::Int(rotated as i32),
            copied.write(),
        ];
        call(
            pick(e, c"copy_columns_f32", c"copy_columns_bf16"),
            a_thread_each(raw.len()),
            turns,
            args,
        )?;
        let dqkv = operand(e, tokens * width, 4);
        let (mut back, mut terms) = (Buffer::of(e, &dqkv), vec![f32::NAN; tokens * rotated]);
        let args = [back.write(), copied.read(), Arg::F32Out(&mut terms)].into_iter().chain(turn());
        let name = pick(e, c"rotate_backward_f32", c"rotate_backward_bf16");
        call(name, grid, turns, args.collect())?;
        let (mut want, mut partials) = (dqkv, vec![0.0; partial_count(tokens) * 2 * n]);
        let kept = if has_norms { &raw[..] } else { &[] };
        let sums = if has_norms { &mut partials[..] } else { &mut [] };
        rows::rotate_backward(&mut want, kept, heads, &angles, sums);
        results.push(checked("dqkv", back.wide(), want));
        results.push(checked("raw", copied.wide(), raw));
        if has_norms {
            let mut dw = vec![0.0; 2 * n];
            for (at, term) in terms.iter().enumerate() {
                let head = at % rotated / n;
                dw[usize::from(head >= queries) * n + at % n] += term;
            }
            results.push(checked("dw", dw, partials));
        }
    }
    Ok(results)
}

fn feed_forward(e: Element, turns: Turns) -> Results {
    let (tokens, width) = (5, 48);
    let elements = tokens * width;
    let grid = a_thread_each(elements);
    let (gate_up, da) = (operand(e, 2 * elements, 1), operand(e, elements, 2));
    let ints = || [Arg::Long(elements as i64), Arg::Int(width as i32)];
    let (mut given, mut a) = (Buffer::of(e, &gate_up), Buffer::unwritten(e, elements));
    let args = [given.read()].into_iter().chain(ints()).chain([a.write()]).collect();
    call(pick(e, c"swiglu_f32", c"swiglu_bf16"), grid, turns, args)?;
    let mut want = vec![0.0; elements];
    rows::swiglu(&gate_up, &mut want, width);
    let mut results = vec![checked("a", a.wide(), want)];

    let mut back = Buffer::of(e, &da);
    let args = [given.write(), back.write()].into_iter().chain(ints()).collect();
    call(pick(e, c"swiglu_backward_f32", c"swiglu_backward_bf16"), grid, turns, args)?;
    let (mut want, mut want_a) = (gate_up, da);
    rows::swiglu_backward(&mut want, &mut want_a, width);
    results.push(checked("dgate_up", given.wide(), want));
    results.push(checked("a again", back.wide(), want_a));

    let (y, bias) = (operand(e, elements, 3), values(width, 4));
    let mut biased = Buffer::of(e, &y);
    let args = [biased.write(), Arg::F32(&bias)].into_iter().chain(ints()).collect();
    call(pick(e, c"add_bias_f32", c"add_bias_bf16"), grid, turns, args)?;
    let mut want = y;
    rows::add_bias(&mut want, &bias);
    results.push(checked("y + b", biased.wide(), want));
    Ok(results)
}

fn rows_of_tables(_: Element, turns: Turns) -> Results {
    let (tokens, width, distinct) = (9, 10, 4);
    let elements = tokens * width;
    let table = values(distinct * width, 1);
    let index: Vec<u32> = vec![3, 0, 3, 1, 1, 3, 2, 0, 3];
    let mut y = vec![f32::NAN; elements];
    let ints = |n: usize| [Arg::Long(n as i64), Arg::Int(width as i32)];
    let args = [Arg::F32(&table), Arg::U32(&index)].into_iter().chain(ints(elements));
    let args = args.chain([Arg::F32Out(&mut y)]).collect();
    call(c"gather_rows", a_thread_each(elements), turns, args)?;
    let want =
        index.iter().flat_map(|row| table[*row as usize * width..][..width].to_vec()).collect();
    let mut results = vec![checked("y", y, want)];

    let of_row = |row: u32| {
        (0..tokens as u32).filter(move |t| [3, 0, 3, 1, 1, 3, 2, 0, 3][*t as usize] == row)
    };
    let order: Vec<u32> = (0..distinct as u32).flat_map(of_row).collect();
    let starts = [0, 2, 4, 5, 9];
    for add in [0, 1] {
        let mut sums = table.clone();
        let dy = values(elements, 2);
        let args = [Arg::F32(&dy), Arg::U32(&order), Arg::U32(&starts)].into_iter();
        let args = args.chain(ints(sums.len())).chain([Arg::Int(add), Arg::F32Out(&mut sums)]);
        call(c"scatter_rows", a_thread_each(distinct * width), turns, args.collect())?;
        let mut want = if add == 1 { table.clone() } else { vec![0.0; distinct * width] };
        for (t, row) in index.iter().enumerate() {
            (0..width).for_each(|c| want[*row as usize * width + c] += dy[t * width + c]);
        }
        results.push(checked("rows", sums, want));
    }

    let numbers = values(elements, 5);
    let mut rounded = Buffer::unwritten(Bf16, elements);
    let args = vec![Arg::F32(&numbers), Arg::Long(elements as i64), rounded.write()];
    call(c"round_bf16", a_thread_each(elements), turns, args)?;
    results.push(checked("rounded", rounded.wide(), operand(Bf16, elements, 5)));
    let (high, low): (Vec<u16>, Vec<u16>) = numbers
        .iter()
        .map(|value| split(*value))
        .map(|(high, low)| (high, low.cast_unsigned()))
        .unzip();
    let mut joined = vec![f32::NAN; elements];
    let args = vec![
        Arg::Bf16(&high),
        Arg::Bf16(&low),
        Arg::Long(elements as i64),
        Arg::F32Out(&mut joined),
    ];
    call(c"join_planes", a_thread_each(elements), turns, args)?;
    assert!(turns.skipped > 0 || joined == numbers, "planes are joined to the bit");
    Ok(results)
}

fn head(e: Element, turns: Turns) -> Results {
    let vocabulary = 100;
    let labels = [9, NO_TARGET, 99, 0, 64];
    let tokens = labels.len();
    let logits: Vec<f32> = values(tokens * vocabulary, 1).iter().map(|l| 9.0 * l).collect();
    let tiles = [0..64, 64..100];
    let part = |tile: &std::ops::Range<usize>| -> Vec<f32> {
        logits.chunks(vocabulary).flat_map(|row| row[tile.clone()].to_vec()).collect()
    };
    let mut stats = vec![f32::NAN; tokens * 3];
    let args = vec![Arg::F32Out(&mut stats), Arg::Long(tokens as i64)];
    call(c"clear_stats", a_thread_each(tokens), turns, args)?;
    for tile in &tiles {
        let (here, first, width) = (part(tile), tile.start as u32, tile.len() as i32);
        let args = vec![
            Arg::F32(&here),
            Arg::U32(&labels),
            Arg::Word(first),
            Arg::Int(width),
            Arg::F32Out(&mut stats),
        ];
        call(c"head_score", a_block_each(tokens, 64), turns, args)?;
    }
    let row = |t: usize| &logits[t * vocabulary..][..vocabulary];
    let want: Vec<f32> = (0..tokens)
        .flat_map(|t| {
            let top = row(t).iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let sum: f64 = row(t).iter().map(|l| f64::from(l - top).exp()).sum();
            let label = if labels[t] == NO_TARGET { 0.0 } else { row(t)[labels[t] as usize] };
            [top, sum as f32, label]
        })
        .collect();
    let mut results = vec![checked("stats", stats, want.clone())];
    for tile in &tiles {
        let (here, first, width) = (part(tile), tile.start as u32, tile.len() as i32);
        let mut gradient = Buffer::unwritten(e, here.len());
        let args = vec![
            Arg::F32(&here),
            Arg::U32(&labels),
            Arg::Word(first),
            Arg::Int(width),
            Arg::F32(&want),
            Arg::Float(0.5),
            gradient.write(),
        ];
        call(
            pick(e, c"head_gradient_f32", c"head_gradient_bf16"),
            a_block_each(tokens, 32),
            turns,
            args,
        )?;
        let expected = (0..tokens).flat_map(|t| {
            let (want, labels) = (&want, &labels);
            tile.clone().map(move |v| {
                if labels[t] == NO_TARGET {
                    return 0.0;
                }
                let p = f64::from(row(t)[v] - want[3 * t]).exp() / f64::from(want[3 * t + 1]);
                (0.5 * (p - f64::from(u8::from(v == labels[t] as usize)))) as f32
            })
        });
        results.push(checked("dlogits", gradient.wide(), expected.collect()));
    }
    Ok(results)
}

/// Heads narrower than the kernel's width, grouped, rows that end inside a tile.
fn attention(e: Element, turns: Turns) -> Results {
    let mut results = Vec::new();
    for (n, k, seq_len, names) in [
        (16, 64, 45, [c"attention_f32_64", c"attention_query_f32_64", c"attention_key_f32_64"]),
        (80, 128, 37, [c"attention_f32_128", c"attention_query_f32_128", c"attention_key_f32_128"]),
        (
            256,
            256,
            19,
            [c"attention_f32_256", c"attention_query_f32_256", c"attention_key_f32_256"],
        ),
    ] {
        let names = match (e, k) {
            (F32, _) => names,
            (Bf16, 64) => {
                [c"attention_bf16_64", c"attention_query_bf16_64", c"attention_key_bf16_64"]
            }
            (Bf16, 128) => {
                [c"attention_bf16_128", c"attention_query_bf16_128", c"attention_key_bf16_128"]
            }
            (Bf16, _) => {
                [c"attention_bf16_256", c"attention_query_bf16_256", c"attention_key_bf16_256"]
            }
        };
        let tile = if k == 256 { 16 } else { 32 };
        let (rows, heads, kv_heads) = (2, 4, 2);
        let (shape, tokens) = (MicroShape { rows, seq_len }, rows * seq_len);
        let (width, of_o) = ((heads + 2 * kv_heads) * n, heads * n);
        let on = |heads: usize| {
            let blocks = [seq_len.div_ceil(tile) as u32, heads as u32, rows as u32];
            let shared_bytes = ((4 * (k + 1) + 2 * (tile + 1)) * tile * 4) as u32;
            Grid { blocks, threads: 4 * tile as u32, shared_bytes }
        };
        let ints = || [seq_len, heads, kv_heads, n].map(|value| Arg::Int(value as i32));
        let qkv = operand(e, tokens * width, 1);
        let given = Buffer::of(e, &qkv);
        let (mut o, mut lse) =
            (Buffer::unwritten(e, tokens * of_o), vec![f32::NAN; tokens * heads]);
        let args = [given.read()].into_iter().chain(ints());
        let args = args.chain([o.write(), Arg::F32Out(&mut lse)]).collect();
        call(names[0], on(heads), turns, args)?;
        let cpu = Attention { shape, heads, kv_heads, head_dim: n };
        let (mut want_o, mut want_lse) = (vec![0.0; tokens * of_o], vec![0.0; tokens * heads]);
        cpu.forward(&qkv, &mut want_o, &mut want_lse);

        // From what the kernel has just made.
        let d_o = operand(e, tokens * of_o, 2);
        let (d_given, mut delta) = (Buffer::of(e, &d_o), vec![f32::NAN; tokens * heads]);
        let args = [o.read(), d_given.read()].into_iter();
        let args = args.chain([seq_len, heads, n].map(|value| Arg::Int(value as i32)));
        let args = args.chain([Arg::F32Out(&mut delta)]).collect();
        let name = pick(e, c"attention_delta_f32", c"attention_delta_bf16");
        let grid = Grid { blocks: [tokens as u32, heads as u32, 1], threads: 32, shared_bytes: 0 };
        call(name, grid, turns, args)?;
        let mut dqkv = Buffer::unwritten(e, tokens * width);
        for (name, grid) in [(names[1], on(heads)), (names[2], on(kv_heads))] {
            let args = [given.read(), d_given.read(), Arg::F32(&lse), Arg::F32(&delta)].into_iter();
            call(name, grid, turns, args.chain(ints()).chain([dqkv.write()]).collect())?;
        }
        let mut want = vec![0.0; tokens * width];
        cpu.backward(&qkv, &want_o, &want_lse, &d_o, &mut want);
        results.push(checked("o", o.wide(), want_o));
        results.push(checked("lse", lse, want_lse));
        results.push(checked("dqkv", dqkv.wide(), want));
    }
    Ok(results)
}

type Case = fn(Element, Turns) -> Results;
const CASES: [(&str, Case); 7] = [
    ("norms", norms),
    ("column sums", column_sums),
    ("rotations", rotations),
    ("feed forward", feed_forward),
    ("rows of tables", rows_of_tables),
    ("head", head),
    ("attention", attention),
];

fn bits(results: &[Checked]) -> Vec<Vec<u32>> {
    results.iter().map(|r| r.got.iter().map(|value| value.to_bits()).collect()).collect()
}

#[test]
fn kernels_compute_what_the_cpu_does_whatever_the_order_of_threads() {
    for ((name, case), element) in CASES.into_iter().flat_map(|case| [(case, F32), (case, Bf16)]) {
        let mut first = None;
        for seed in 0..4 {
            let results = case(element, Turns { seed, skipped: 0 }).unwrap();
            for result in &results {
                let apart = result.distance();
                assert!(
                    apart < tolerance(element),
                    "{name} {element:?}, {}: {apart:e}",
                    result.name
                );
            }
            assert_eq!(first.get_or_insert(bits(&results)), &bits(&results), "{name}, seed {seed}");
        }
    }
}

/// Where threads meet, as the emulator numbers it: a file's number and a line.
fn meetings() -> BTreeSet<u32> {
    let files = [
        (1, include_str!("kernels/target.h")),
        (2, include_str!("kernels/rows.cu")),
        (3, include_str!("kernels/head.cu")),
        (4, include_str!("kernels/attention.cu")),
    ];
    let lines = files.into_iter().flat_map(|(file, text)| {
        let lines = text.lines().enumerate();
        let meets = |line: &str| {
            let is_defined = line.starts_with('#')
                || line.starts_with("//")
                || line.starts_with("DEVICE float shuffle");
            !is_defined && (line.contains("_barrier();") || line.contains("shuffle_xor(value"))
        };
        lines.filter(move |(_, line)| meets(line)).map(move |(at, _)| (file << 16) + at as u32 + 1)
    });
    lines.collect()
}

/// A barrier or a shuffle that is left out changes a result, or threads wait for each other for ever.
#[test]
fn no_meeting_of_threads_can_be_left_out() {
    let sound: Vec<_> = CASES.map(|(_, case)| bits(&case(F32, Turns::default()).unwrap())).into();
    let meetings = meetings();
    assert!(meetings.len() > 12, "{meetings:?}");
    for skipped in meetings {
        let notices = |seed| {
            CASES.iter().zip(&sound).any(|((_, case), sound)| {
                case(F32, Turns { seed, skipped }).map_or(true, |results| bits(&results) != *sound)
            })
        };
        assert!((0..4).any(notices), "file {}, line {}", skipped >> 16, skipped & 0xffff);
    }
}

#[test]
fn launches_that_make_no_sense_are_refused() {
    let grid = a_block_each(1, 32);
    let turns = Turns::default();
    assert_eq!(call(c"norm", grid, turns, vec![]), Err(LaunchError::Unknown(c"norm")));
    assert_eq!(
        call(c"clear_stats", grid, turns, vec![]),
        Err(LaunchError::Arguments(c"clear_stats"))
    );
    let half_a_warp = Grid { threads: 16, ..grid };
    let arguments = vec![Arg::Absent, Arg::Long(0)];
    assert_eq!(call(c"clear_stats", half_a_warp, turns, arguments), Err(LaunchError::Apart));
}
