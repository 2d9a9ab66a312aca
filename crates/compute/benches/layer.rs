//! Seconds of a layer's forward and backward and of the head, against what the processor can do.
//!
//! Two microbatch rows of 512 tokens, two threads. The bound is fused multiply-adds in registers, on
//! every thread at once, in the same run; in float32, also for products of bfloat16 operands. Prints a table and one JSON line. How fast a library's
//! product is here says `tests/peers/faer`.
//! `cargo bench -p compute --bench layer`
#![allow(unsafe_code)]

use std::sync::Arc;
use std::time::Instant;

use compute::{Command, ComputeDtype, CpuDevice, Device, MicroShape, Outcome, TensorId, WeightsId};
use model::{Budget, HostBytes, LayerId, LayerTable, ModelConfig, TileId, Tiling, Weights};

const SHAPE: MicroShape = MicroShape { rows: 2, seq_len: 512 };
const THREADS: usize = 2;
const ROUNDS: usize = 7;
const MODELS: [(&str, &str); 2] = [
    (
        "SmolLM2-135M",
        r#"{"model_type":"llama","vocab_size":49152,"hidden_size":576,"intermediate_size":1536,
            "num_hidden_layers":1,"num_attention_heads":9,"num_key_value_heads":3}"#,
    ),
    (
        "TinyLlama-1.1B",
        r#"{"model_type":"llama","vocab_size":32000,"hidden_size":2048,"intermediate_size":5632,
            "num_hidden_layers":1,"num_attention_heads":32,"num_key_value_heads":4}"#,
    ),
];

struct Row {
    name: String,
    seconds: f64,
    product_gflops: f64,
    /// Measured right before and after.
    bound_gflops: f64,
}

struct Bench {
    device: CpuDevice,
    config: ModelConfig,
    table: LayerTable,
}

fn main() {
    // `cargo test --benches` runs this binary too, without the flag and with a slow profile.
    if !std::env::args().any(|argument| argument == "--bench") {
        return;
    }
    let pool = rayon::ThreadPoolBuilder::new().num_threads(THREADS).build();
    let pool = Arc::new(pool.expect("a pool of threads"));
    let dtypes = [("f32", ComputeDtype::F32), ("bf16", ComputeDtype::Bf16)];
    let rows: Vec<Row> = MODELS
        .iter()
        .flat_map(|model| dtypes.map(|dtype| (model, dtype)))
        .flat_map(|((name, config), (dtype_name, dtype))| {
            let config = ModelConfig::from_json(config).expect("a valid config");
            let name = &format!("{name} {dtype_name}");
            let device = CpuDevice::new(&config, dtype, Budget::new(8 << 30), Arc::clone(&pool));
            let mut bench = Bench { device, table: LayerTable::new(&config), config };
            let before = bound(&pool);
            let mut rows = bench.layer(name);
            let between = bound(&pool);
            rows.extend(bench.head(name));
            let after = bound(&pool);
            for (i, row) in rows.iter_mut().enumerate() {
                row.bound_gflops = between.max(if i < 3 { before } else { after });
            }
            rows
        })
        .collect();
    report(&rows);
}

/// GFLOP/s of fused multiply-adds that stay in registers, on all threads at once.
fn bound(pool: &rayon::ThreadPool) -> f64 {
    const REPEATS: usize = 1 << 22;
    let seconds = best(|| {
        let sums = pool.broadcast(|_| multiply_adds(REPEATS));
        std::hint::black_box(sums);
    });
    let each = 2 * REPEATS * SUMS * LANES;
    (THREADS * each) as f64 / seconds / 1e9
}

/// Independent chains: more than latency times units of any processor so far.
const SUMS: usize = 24;
/// Elements of the widest register.
const LANES: usize = 16;

/// On the widest instruction set of this processor.
fn multiply_adds(repeats: usize) -> f32 {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx512f")]
        fn avx512(repeats: usize) -> f32 {
            chains::<LANES, SUMS>(repeats)
        }
        #[target_feature(enable = "avx2,fma")]
        fn avx2(repeats: usize) -> f32 {
            // Half as wide, and half as many of them fit the registers.
            (0..4).map(|_| chains::<{ LANES / 2 }, { SUMS / 2 }>(repeats)).sum()
        }
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: detected.
            return unsafe { avx512(repeats) };
        }
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            // SAFETY: detected.
            return unsafe { avx2(repeats) };
        }
    }
    chains::<LANES, SUMS>(repeats)
}

#[inline(always)]
fn chains<const WIDTH: usize, const COUNT: usize>(repeats: usize) -> f32 {
    let (x, y) = (std::hint::black_box(0.5f32), std::hint::black_box(0.25f32));
    let mut sums = [[1.0f32; WIDTH]; COUNT];
    for _ in 0..repeats {
        // No closure in here: it would be compiled for the portable set.
        for sum in sums.as_flattened_mut() {
            *sum = sum.mul_add(x, y);
        }
    }
    sums.as_flattened().iter().sum()
}

impl Bench {
    fn call(&mut self, command: Command) -> Outcome {
        self.device.run(command).expect("a valid command")
    }

    fn seconds(&mut self, command: Command) -> f64 {
        let start = Instant::now();
        self.call(command);
        start.elapsed().as_secs_f64()
    }

    fn bind(&mut self, layer: LayerId, tile: u32) -> WeightsId {
        let spec = self.table.tile(layer, TileId(tile)).expect("a tile of the layer");
        let values = random(spec.elements.len());
        let weights = Weights::F32(values);
        let id = WeightsId(u64::from(layer.0 * 1000 + tile));
        self.call(Command::Bind { id, layer, tile: TileId(tile), weights });
        id
    }

    fn put(&mut self, id: u64) -> TensorId {
        let bytes = random(SHAPE.tokens() * self.config.hidden_size);
        self.call(Command::Put { id: TensorId(id), bytes });
        TensorId(id)
    }

    fn layer(&mut self, name: &str) -> Vec<Row> {
        let weights = self.bind(LayerId(1), 0);
        let parameters = self.table.layer(LayerId(1)).elements() as f64;
        let (y, dx) = (TensorId(2), TensorId(4));
        let mut seconds = [f64::MAX; 3];
        for round in 0..2 * ROUNDS {
            let keep = round % 2 == 0;
            let (x, dy) = (self.put(1), self.put(3));
            let forward = Command::Forward { weights, shape: SHAPE, x, y, keep };
            seconds[0] = seconds[0].min(self.seconds(forward));
            let backward =
                Command::Backward { weights, shape: SHAPE, x, dy, dx: Some(dx), gradient: true };
            let at = if keep { 1 } else { 2 };
            seconds[at] = seconds[at].min(self.seconds(backward));
        }
        self.call(Command::Clear);
        let product = 2.0 * SHAPE.tokens() as f64 * parameters;
        let names = ["forward", "backward, kept", "backward, recomputed"];
        let products = [product, 2.0 * product, 3.0 * product];
        rows(name, &names, &seconds, &products)
    }

    fn head(&mut self, name: &str) -> Vec<Row> {
        let weights = self.bind(self.table.head(), 1);
        let labels: Arc<[u32]> = (0..SHAPE.tokens() as u32).collect();
        let (h, stats, dh) = (self.put(1), TensorId(5), TensorId(6));
        let mut seconds = [f64::MAX; 3];
        for round in 0..2 * ROUNDS {
            let keep = round % 2 == 0;
            let l = Arc::clone(&labels);
            let score = Command::HeadScore { weights, h, labels: l, stats, keep };
            seconds[0] = seconds[0].min(self.seconds(score));
            let (labels, scale) = (Arc::clone(&labels), 1e-3);
            let backward =
                Command::HeadBackward { weights, h, stats, labels, dh, scale, gradient: true };
            let at = if keep { 1 } else { 2 };
            seconds[at] = seconds[at].min(self.seconds(backward));
        }
        self.call(Command::Clear);
        let elements = self.table.tiles(self.table.head(), Tiling::Whole)[1].elements.len();
        let product = 2.0 * SHAPE.tokens() as f64 * elements as f64;
        rows(
            name,
            &["head tile, score", "head tile, backward, kept", "head tile, backward, recomputed"],
            &seconds,
            &[product, 2.0 * product, 3.0 * product],
        )
    }
}

fn rows(model: &str, names: &[&str], seconds: &[f64], products: &[f64]) -> Vec<Row> {
    let all = names.iter().zip(seconds).zip(products);
    all.map(|((name, &seconds), product)| Row {
        name: format!("{model}: {name}"),
        seconds,
        product_gflops: product / seconds / 1e9,
        bound_gflops: 0.0,
    })
    .collect()
}

fn best(mut run: impl FnMut()) -> f64 {
    let time = |_| {
        let start = Instant::now();
        run();
        start.elapsed().as_secs_f64()
    };
    (0..ROUNDS).map(time).fold(f64::MAX, f64::min)
}

/// Values in [-1/16, 1/16) by a linear congruential generator.
fn random(elements: usize) -> HostBytes {
    let mut block = HostBytes::zeroed(elements * 4);
    let mut state = 1u32;
    for value in block.f32s_mut() {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        *value = (state >> 8) as f32 / 134_217_728.0 - 0.0625;
    }
    block
}

fn report(rows: &[Row]) {
    println!("{THREADS} threads, {} tokens; bound: GFLOP/s of fused multiply-adds", SHAPE.tokens());
    println!("{:48} {:>9} {:>9} {:>6} {:>6}", "command", "ms", "GFLOP/s", "bound", "share");
    for row in rows {
        let (name, ms, rate) = (&row.name, row.seconds * 1e3, row.product_gflops);
        let (bound, share) = (row.bound_gflops, rate / row.bound_gflops);
        println!("{name:48} {ms:>9.2} {rate:>9.0} {bound:>6.0} {share:>6.2}");
    }
    let commands: Vec<_> = rows
        .iter()
        .map(|r| {
            serde_json::json!({
                "command": r.name, "seconds": r.seconds, "product_gflops": r.product_gflops,
                "bound_gflops": r.bound_gflops,
            })
        })
        .collect();
    println!("{}", serde_json::json!({ "commands": commands }));
}
