//! GB/s of the optimizer's traffic - every chunk of W, M and V read from one slot and written to the
//! other, then synced - through each engine, against the best that `fio` gets out of the same file
//! system with as much reading as writing in direct requests of 1 and 4 MiB, 8 to 64 at a time.
//!
//! Engines and fio take turns in every round; without fio on the path there is no bound. Prints a
//! table and one JSON line. `cargo bench -p store --bench engines -- --dir DIR --rounds N` (default:
//! a temporary directory, 3); needs 7 GB of disk.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use model::{Budget, LayerId, LayerTable, ModelConfig, PLANES, Slot, StateLayout};
use serde_json::{Map, Value, json};
use store::{
    Io, NewStore, Spread, StateChunk, StoreError, TrainingStore, blocking, create, direct_engine,
    mmap_engine,
};

/// An embedding of 65 million parameters: 0.79 GB of W, M and V to read and as much to write.
const CONFIG: &str = r#"{"model_type":"llama","vocab_size":32000,"hidden_size":2048,
    "intermediate_size":8,"num_hidden_layers":1,"num_attention_heads":8,
    "num_key_value_heads":1,"tie_word_embeddings":true,"max_position_embeddings":32}"#;
const LAYER: LayerId = LayerId(0);
/// Chunks under way at once, as the trainer's `Limits` has them with memory to spare.
const CHUNKS: usize = 6;

type Way = (&'static str, fn() -> Arc<dyn Io>);

const WAYS: [Way; 5] = [
    ("mmap, pages dropped", || mmap_engine(4, false)),
    ("direct, depth 8", || direct_engine(8)),
    ("direct, depth 16", || direct_engine(16)),
    ("direct, depth 32", || direct_engine(32)),
    ("direct, depth 64", || direct_engine(64)),
];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().collect();
    // `cargo test --benches` runs this binary too, without the flag and with a slow profile.
    if !arguments.iter().any(|argument| argument == "--bench") {
        return Ok(());
    }
    let value = |name: &str| {
        let at = arguments.iter().position(|argument| argument == name);
        at.and_then(|at| arguments.get(at + 1))
    };
    let rounds: usize = value("--rounds").map_or(Ok(3), |text| text.parse())?;
    let home = match value("--dir") {
        Some(dir) => tempfile::tempdir_in(dir)?,
        None => tempfile::tempdir()?,
    };
    let dir = home.path().join("store");
    make_store(&dir)?;
    let mut rates = vec![Vec::new(); WAYS.len()];
    let mut bounds = Vec::new();
    for _ in 0..rounds {
        for ((_, engine), rates) in WAYS.iter().zip(&mut rates) {
            rates.push(sweep(engine(), &dir)?);
        }
        bounds.extend(fio(home.path()));
    }
    let bound = (!bounds.is_empty()).then(|| median(&mut bounds));
    let mut all = Vec::new();
    for ((name, _), rates) in WAYS.iter().zip(&mut rates) {
        let rate = median(rates);
        let of_bound = bound.map(|bound| rate / bound);
        let shown = of_bound.map_or(String::from("-"), |share| format!("{share:.2}"));
        println!("{name:<24} {rate:>6.2} GB/s read and written   {shown} of fio");
        all.push(json!({"engine": name, "gb_per_second": rate, "of_fio": of_bound}));
    }
    println!("{}", json!({"bench": "engines", "fio_gb_per_second": bound, "engines": all}));
    Ok(())
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn make_store(dir: &Path) -> Result<(), Box<dyn std::error::Error>> {
    let table = LayerTable::new(&ModelConfig::from_json(CONFIG)?);
    let layout = StateLayout::F32;
    let (files, defaults) = (Vec::new(), Map::new());
    let new = NewStore {
        config_json: CONFIG,
        table: &table,
        layout,
        files,
        defaults,
        spread: Spread::default(),
    };
    let mut writer = create(direct_engine(16), dir, &new)?;
    for layer in table.layers() {
        let piece: Vec<f32> = (0..1 << 20).map(|i| i as f32 * 1e-7).collect();
        for start in (0..layer.elements()).step_by(piece.len()) {
            let end = (start + piece.len()).min(layer.elements());
            writer.write_weights(layer.id, start, &piece[..end - start])?;
        }
    }
    Ok(writer.finish()?)
}

enum Event {
    Read(usize, Result<StateChunk, StoreError>),
    Written(Result<(), StoreError>),
}

/// One layer's chunks through the engine; GB/s, reading and writing counted.
fn sweep(io: Arc<dyn Io>, dir: &Path) -> Result<f64, StoreError> {
    let budget = Budget::new(CHUNKS * 3 * (4 << 20) + (64 << 20));
    let (store, _) = TrainingStore::open(io, dir, budget, Duration::from_secs(1))?;
    let from = store.state().layers[LAYER.index()].slot;
    let to = from.other();
    let chunks = store.chunks(LAYER);
    let (events, inbox): (Sender<Event>, Receiver<Event>) = channel();
    let bytes = 2 * 12 * store.table().layer(LAYER).elements() as u64;
    let start = Instant::now();
    let mut next = 0;
    let mut written = 0;
    while next < chunks.min(CHUNKS) {
        read(&store, from, next, &events);
        next += 1;
    }
    while written < chunks {
        match inbox.recv().map_err(|_| StoreError::Invalid("an operation was lost".into()))? {
            Event::Read(chunk, state) => {
                let events = events.clone();
                let done = Box::new(move |result| drop(events.send(Event::Written(result))));
                // Nobody compares them: only the way matters here.
                store.write_chunk((LAYER, to, chunk), (state?, [0; PLANES]), None, done);
            }
            Event::Written(result) => {
                result?;
                written += 1;
                if next < chunks {
                    read(&store, from, next, &events);
                    next += 1;
                }
            }
        }
    }
    blocking(|done| store.save_slots(&[(LAYER, to)], done))?;
    Ok(bytes as f64 / start.elapsed().as_secs_f64() / 1e9)
}

fn read(store: &TrainingStore, slot: Slot, chunk: usize, events: &Sender<Event>) {
    let events = events.clone();
    let done = Box::new(move |state| drop(events.send(Event::Read(chunk, state))));
    store.read_chunk(LAYER, slot, chunk, done);
}

/// The best of fio's rates over request sizes and depths, GB/s; `None` without fio.
fn fio(dir: &Path) -> Option<f64> {
    let rates = [("1M", 8), ("1M", 32), ("4M", 8), ("4M", 16), ("4M", 32), ("4M", 64)];
    rates.iter().filter_map(|(size, depth)| fio_once(dir, size, *depth)).reduce(f64::max)
}

fn fio_once(dir: &Path, size: &str, depth: u32) -> Option<f64> {
    let common = [
        "--ioengine=io_uring".into(),
        "--direct=1".into(),
        "--size=786M".into(),
        "--fallocate=posix".into(),
        // Both jobs go round until the time is over, so that none has the disk for itself.
        "--time_based".into(),
        "--runtime=3".into(),
        "--end_fsync=1".into(),
        "--output-format=json".into(),
        format!("--directory={}", dir.display()),
        format!("--bs={size}"),
        format!("--iodepth={depth}"),
    ];
    let jobs = ["--name=read", "--rw=read", "--name=write", "--rw=write", "--overwrite=1"];
    let output = Command::new("fio").args(common).args(jobs).output().ok()?;
    let report: Value = serde_json::from_slice(&output.stdout).ok()?;
    let jobs = report["jobs"].as_array()?;
    let bytes = |job: &Value, way: &str| job[way]["io_bytes"].as_f64().unwrap_or(0.0);
    let moved: f64 = jobs.iter().map(|job| bytes(job, "read") + bytes(job, "write")).sum();
    let longest = jobs.iter().filter_map(|job| job["job_runtime"].as_f64()).reduce(f64::max)?;
    Some(moved / (longest / 1e3) / 1e9)
}
