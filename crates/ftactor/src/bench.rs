//! `bench`: what this machine's disk, processor and memory can do, for `plan`.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use actors::optimizer_rate;
use compute::{Command, ComputeDtype, MicroShape, TensorId, WeightsId};
use model::{Budget, HostBytes, LayerId, LayerTable, StateLayout, TileId, Weights};
use rayon::ThreadPool;
use serde_json::json;
use store::{measure_disk, show_bytes};

use crate::cli::BenchArgs;
use crate::exit::Refused;
use crate::machine;
use crate::options::{IoChoice, parse_size};
use crate::out::{errln, outln};
use crate::profile::{Compute, Disk, Optimizer, Profile, dtype_name};
use crate::shapes::Shape;

/// One layer each, of a small model's width to a large one's, behind a vocabulary that does not count.
const SHAPES: [Shape; 3] = [
    Shape::new((576, 1536), 1, (9, 3), 256, false),
    Shape::new((2048, 5632), 1, (32, 4), 256, false),
    Shape::new((4096, 11_008), 1, (32, 8), 256, false),
];
const ROUNDS: usize = 2;

pub(crate) fn bench(args: &BenchArgs) -> anyhow::Result<ExitCode> {
    let dir = args.store.clone().unwrap_or_else(|| PathBuf::from("."));
    if !dir.is_dir() {
        return Err(Refused(format!("--store {}: no such directory", dir.display())).into());
    }
    let bytes = parse_size(&args.disk_bytes)? as u64;
    let say = |what: &str| {
        if !args.json {
            errln!("{what} ...");
        }
    };
    say(&format!("disk behind {}, {}", dir.display(), show_bytes(bytes)));
    let io = machine::training_engine(Some(IoChoice::Direct), u64::MAX);
    let rates = measure_disk(&io, &dir, bytes)?;
    let path = dir.canonicalize().unwrap_or(dir).display().to_string();
    let disk = Disk { path, read: rates.read, write: rates.write, both: rates.both };
    let threads = machine::threads(None)?;
    let micro = MicroShape { rows: 2, seq_len: args.row_tokens as usize };
    let mut compute = Vec::new();
    for dtype in [ComputeDtype::F32, ComputeDtype::Bf16] {
        for shape in SHAPES {
            say(&format!("a layer of width {} in {}", shape.hidden, dtype_name(dtype)));
            let flops = layer_flops(shape, dtype, micro, &threads)?;
            compute.push(Compute { dtype: dtype_name(dtype).into(), hidden: shape.hidden, flops });
        }
    }
    let mut optimizer = Vec::new();
    for layout in StateLayout::ALL {
        say(&format!("the optimizer in {layout}"));
        let (table, budget) = (LayerTable::new(&SHAPES[1].config()?), Budget::new(4 << 30));
        let parameters = threads.install(|| optimizer_rate(&table, layout, &budget))?;
        optimizer.push(Optimizer { layout: layout.name().into(), parameters });
    }
    let profile = Profile::new(disk, compute, optimizer);
    profile.write(&args.out)?;
    if args.json {
        outln!("{}", json!({"profile": args.out, "rates": profile}));
    } else {
        show(&profile);
        outln!("wrote {}: ftactor plan --hardware {}", args.out.display(), args.out.display());
    }
    Ok(ExitCode::SUCCESS)
}

fn show(profile: &Profile) {
    let gb = |rate: f64| rate / 1e9;
    let Disk { read, write, both, .. } = &profile.disk;
    outln!(
        "disk       {:.2} GB/s read, {:.2} written, {:.2} both at once",
        gb(*read),
        gb(*write),
        gb(*both)
    );
    for Compute { dtype, hidden, flops } in &profile.compute {
        outln!("compute    {:>6.0} GFLOP/s in {dtype}, layers {hidden} wide", gb(*flops));
    }
    for Optimizer { layout, parameters } in &profile.optimizer {
        outln!("optimizer  {:>6.3} G parameters/s in {layout}", gb(*parameters));
    }
}

/// Products of a forward and a recomputing backward of one layer, by their time.
fn layer_flops(
    layer: Shape,
    dtype: ComputeDtype,
    shape: MicroShape,
    threads: &Arc<ThreadPool>,
) -> anyhow::Result<f64> {
    let config = layer.config()?;
    let elements = LayerTable::new(&config).layer(LayerId(1)).elements();
    let mut device = machine::cpu(&config, dtype, &Budget::new(8 << 30), threads);
    let (weights, x, y, dy, dx) =
        (WeightsId(1), TensorId(1), TensorId(2), TensorId(3), TensorId(4));
    let bind = |layer| Command::Bind {
        id: weights,
        layer,
        tile: TileId(0),
        weights: Weights::F32(noise(elements)),
    };
    device.run(bind(LayerId(1)))?;
    let mut best = f64::MAX;
    for _ in 0..ROUNDS {
        for id in [x, dy] {
            let bytes = noise(shape.tokens() * config.hidden_size);
            device.run(Command::Put { id, bytes })?;
        }
        let start = Instant::now();
        let forward = Command::Forward { weights, shape, x, y, keep: false };
        device.run(forward)?;
        let backward = Command::Backward { weights, shape, x, dy, dx: Some(dx), gradient: true };
        device.run(backward)?;
        best = best.min(start.elapsed().as_secs_f64());
    }
    Ok(2.0 * 4.0 * shape.tokens() as f64 * elements as f64 / best)
}

/// Small numbers, none of them like its neighbour.
fn noise(elements: usize) -> HostBytes {
    let mut block = HostBytes::zeroed(elements * 4);
    let mut state = 1u32;
    for value in block.f32s_mut() {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        *value = (state >> 8) as f32 / 134_217_728.0 - 0.0625;
    }
    block
}
