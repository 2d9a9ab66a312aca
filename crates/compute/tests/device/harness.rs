//! One training step's commands, as the trainer gives them, on a model made by a formula.

use std::ops::Range;
use std::sync::Arc;

use compute::{
    Command, ComputeDtype, CpuDevice, Device, DeviceError, Gradient, MicroShape, NO_TARGET,
    Outcome, TensorId, WeightsId,
};
use model::{
    Budget, HostBytes, LayerId, LayerTable, ModelConfig, Role, StateLayout, TileId, Tiling, Weights,
};

pub(crate) fn splitmix64(x: u64) -> u64 {
    let mut z = x.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// Multiples of 2^-17 in [-1/4, 1/4): `uniform` of `golden/families.py`.
pub(crate) fn uniform(stream: u64, index: usize) -> f32 {
    (splitmix64((stream << 40) + index as u64) >> 48) as f32 / 131_072.0 - 0.25
}

pub(crate) fn config(text: &str) -> ModelConfig {
    ModelConfig::from_json(text).unwrap()
}

/// One block per layer; norms are around 1.
pub(crate) fn weights(config: &ModelConfig) -> Vec<Vec<f32>> {
    let table = LayerTable::new(config);
    let norms = [
        Role::AttentionNorm,
        Role::FeedForwardNorm,
        Role::QueryNorm,
        Role::KeyNorm,
        Role::FinalNorm,
    ];
    let layers = table.layers().iter().map(|layer| {
        let mut block: Vec<f32> =
            (0..layer.elements()).map(|i| uniform(u64::from(layer.id.0), i)).collect();
        for tensor in layer.tensors.iter().filter(|t| norms.contains(&t.role)) {
            block[tensor.range()].iter_mut().for_each(|w| *w += 1.0);
        }
        block
    });
    layers.collect()
}

/// `[B * S]` tokens, the same as the golden files' for the same size.
pub(crate) fn tokens(config: &ModelConfig, count: usize) -> Vec<u32> {
    let token = |i| (splitmix64((1 << 63) + i) % config.vocab_size as u64) as u32;
    (0..count as u64).map(token).collect()
}

/// Every position's label is the next token of its row.
pub(crate) fn labels(tokens: &[u32], seq_len: usize) -> Vec<u32> {
    let next = |row: &[u32]| row[1..].iter().copied().chain([NO_TARGET]).collect::<Vec<_>>();
    tokens.chunks(seq_len).flat_map(next).collect()
}

pub(crate) fn bytes(values: &[f32]) -> HostBytes {
    let mut block = HostBytes::zeroed(values.len() * 4);
    block.f32s_mut().copy_from_slice(values);
    block
}

pub(crate) struct Bench {
    pub(crate) device: CpuDevice,
    pub(crate) table: LayerTable,
    pub(crate) weights: Vec<Vec<f32>>,
    pub(crate) budget: Budget,
    pub(crate) layout: StateLayout,
}

#[derive(Clone, Copy)]
pub(crate) struct Options {
    pub(crate) threads: usize,
    pub(crate) keep: bool,
    pub(crate) micros: usize,
    /// That weights are bound in.
    pub(crate) layout: StateLayout,
    pub(crate) dtype: ComputeDtype,
    pub(crate) tiling: Tiling,
}

pub(crate) const PLAIN: Options = Options {
    threads: 2,
    keep: false,
    micros: 1,
    layout: StateLayout::F32,
    dtype: ComputeDtype::F32,
    tiling: Tiling::Whole,
};

impl Bench {
    pub(crate) fn new(config: &ModelConfig, threads: usize) -> Bench {
        Bench::in_dtype(config, threads, ComputeDtype::F32)
    }

    pub(crate) fn in_dtype(config: &ModelConfig, threads: usize, dtype: ComputeDtype) -> Bench {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let budget = Budget::new(1 << 30);
        Bench {
            device: CpuDevice::new(config, dtype, budget.clone(), Arc::new(pool)),
            table: LayerTable::new(config),
            weights: weights(config),
            budget,
            layout: StateLayout::F32,
        }
    }

    pub(crate) fn call(&mut self, command: Command) -> Result<Outcome, DeviceError> {
        self.device.run(command)
    }

    pub(crate) fn run(&mut self, command: Command) {
        let name = format!("{command:?}");
        assert!(matches!(self.call(command), Ok(Outcome::Done)), "{name}");
    }

    pub(crate) fn bind(&mut self, layer: LayerId, tile: u32) -> WeightsId {
        let spec = self.table.tile(layer, TileId(tile)).unwrap();
        let values = &self.weights[spec.source.index()][spec.elements];
        let weights = Weights::from_f32(self.layout, values);
        let id = WeightsId(u64::from(layer.0) << 32 | u64::from(tile));
        self.run(Command::Bind { id, layer, tile: TileId(tile), weights });
        id
    }

    pub(crate) fn put(&mut self, id: u64, values: &[f32]) -> TensorId {
        self.run(Command::Put { id: TensorId(id), bytes: bytes(values) });
        TensorId(id)
    }

    pub(crate) fn get(&mut self, id: TensorId) -> Vec<f32> {
        match self.call(Command::Get { id }) {
            Ok(Outcome::Bytes(bytes)) => bytes.f32s().to_vec(),
            other => panic!("{other:?}"),
        }
    }

    /// The gradient of a layer, pieces put together and rows added.
    pub(crate) fn gradient(&mut self, layer: LayerId, tiling: Tiling) -> Vec<f32> {
        let mut all = vec![0.0; self.weights[layer.index()].len()];
        for (elements, take) in self.takes(layer, tiling) {
            match self.call(take) {
                Ok(Outcome::Gradient(Gradient::Dense { first, values })) => {
                    let piece = &values.f32s()[elements.start - first..];
                    all[elements].copy_from_slice(piece);
                }
                Ok(Outcome::Gradient(Gradient::Rows { ids, width, values })) => {
                    assert!(ids.windows(2).all(|w| w[0] < w[1]), "{ids:?}");
                    for (id, row) in ids.iter().zip(values.f32s().chunks_exact(width)) {
                        let all = &mut all[*id as usize * width..][..width];
                        all.iter_mut().zip(row).for_each(|(all, row)| *all += row);
                    }
                }
                other => panic!("{other:?}"),
            }
        }
        all
    }

    /// Whether a layer has a gradient.
    pub(crate) fn has_gradient(&mut self, layer: LayerId, tiling: Tiling) -> bool {
        self.takes(layer, tiling).into_iter().any(|(_, take)| {
            let taken = self.call(take);
            assert!(matches!(taken, Ok(_) | Err(DeviceError::Unknown { .. })), "{taken:?}");
            taken.is_ok()
        })
    }

    /// The commands that take a layer's pieces.
    fn takes(&self, layer: LayerId, tiling: Tiling) -> Vec<(Range<usize>, Command)> {
        let rows = self.table.rows_piece(tiling);
        let take = |(part, elements): (usize, Range<usize>)| {
            let whole = elements.clone();
            if (layer, part) == (rows.layer, rows.part as usize) {
                return (elements, Command::TakeRows);
            }
            (elements, Command::TakeGradient { layer, elements: whole })
        };
        self.table.pieces(layer, tiling).into_iter().enumerate().map(take).collect()
    }
}

/// A whole step on a fresh device: sum of losses and the gradients of all layers.
pub(crate) fn step(
    config: &ModelConfig,
    shape: MicroShape,
    scale: f32,
    options: Options,
) -> (f64, Vec<Vec<f32>>) {
    let layers = LayerTable::new(config).len();
    let (loss, gradients) = step_locked(config, shape, scale, options, &vec![false; layers]);
    (loss, gradients.into_iter().flatten().collect())
}

/// The same where some layers are locked: they have no gradient, and backward ends at the lowest
/// one that is not.
pub(crate) fn step_locked(
    config: &ModelConfig,
    shape: MicroShape,
    scale: f32,
    options: Options,
    locked: &[bool],
) -> (f64, Vec<Option<Vec<f32>>>) {
    let lowest = locked.iter().position(|locked| !locked).unwrap();
    let mut bench = Bench::in_dtype(config, options.threads, options.dtype);
    bench.layout = options.layout;
    let rows = shape.rows / options.micros;
    let micro = MicroShape { rows, seq_len: shape.seq_len };
    let all = tokens(config, shape.tokens());
    let ids: Vec<Arc<[u32]>> = all.chunks(micro.tokens()).map(Arc::from).collect();
    let targets: Vec<Arc<[u32]>> = ids.iter().map(|t| labels(t, shape.seq_len).into()).collect();
    let last = bench.table.head().index();
    let boundary = |layer: usize, m: usize| TensorId((layer * 100 + m) as u64);
    let middle = |layer: usize, m: usize| TensorId((100_000 + layer * 100 + m) as u64);

    for (m, ids) in ids.iter().enumerate() {
        let rows = Weights::from_f32(options.layout, &bench.weights[0]);
        bench.run(Command::Embed { rows, index: Arc::clone(ids), y: boundary(1, m) });
    }
    for layer in 1..last {
        let tiles = bench.table.tiles(LayerId(layer as u32), options.tiling);
        for (at, tile) in tiles.iter().enumerate() {
            let weights = bench.bind(LayerId(layer as u32), tile.id.0);
            let last = at + 1 == tiles.len();
            for m in 0..ids.len() {
                let x = if at == 0 { boundary(layer, m) } else { middle(layer, m) };
                let y = if last { boundary(layer + 1, m) } else { middle(layer, m) };
                bench.run(Command::Forward { weights, shape: micro, x, y, keep: options.keep });
            }
        }
    }
    let projection = if bench.table.tied() { 0 } else { last };
    let asks = HeadAsks {
        scale,
        keep: options.keep,
        projection: !locked[projection],
        norm: !locked[last],
        dx: last > lowest,
    };
    let loss = head(&mut bench, &targets, boundary(last, 0).0, asks);
    for layer in (lowest.max(1)..last).rev() {
        let tiles = bench.table.tiles(LayerId(layer as u32), options.tiling);
        for (at, tile) in tiles.iter().enumerate().rev() {
            let weights = WeightsId((layer as u64) << 32 | u64::from(tile.id.0));
            for m in 0..ids.len() {
                let x = if at == 0 { boundary(layer, m) } else { middle(layer, m) };
                let d = boundary(90, m);
                bench.run(Command::Backward {
                    weights,
                    shape: micro,
                    x,
                    dy: d,
                    dx: (layer > lowest || at > 0).then_some(d),
                    gradient: !locked[layer],
                });
            }
            bench.run(Command::Unbind { id: weights });
        }
    }
    for (m, ids) in ids.iter().enumerate().filter(|_| !locked[0]) {
        bench.run(Command::EmbedBackward { tokens: Arc::clone(ids), dy: boundary(90, m) });
    }
    for layer in (0..=last).filter(|&layer| locked[layer]) {
        assert!(!bench.has_gradient(LayerId(layer as u32), options.tiling), "layer {layer}");
    }
    if lowest > 0 {
        let left = bench.call(Command::Get { id: boundary(90, 0) });
        assert!(matches!(left, Err(DeviceError::Unknown { .. })), "nothing goes down: {left:?}");
    }
    let tiling = options.tiling;
    let of = |layer: usize| (!locked[layer]).then(|| bench.gradient(LayerId(layer as u32), tiling));
    let gradients = (0..=last).map(of).collect();
    (loss, gradients)
}

/// What the head's backward is asked for.
#[derive(Clone, Copy)]
struct HeadAsks {
    scale: f32,
    keep: bool,
    projection: bool,
    norm: bool,
    dx: bool,
}

/// Score, loss and backward of the head; gradients arrive in tensors 9000 + m.
fn head(bench: &mut Bench, targets: &[Arc<[u32]>], first_x: u64, asks: HeadAsks) -> f64 {
    let HeadAsks { scale, keep, .. } = asks;
    let head = bench.table.head();
    let micros = 0..targets.len() as u64;
    let norm = bench.bind(head, 0);
    let (h, stats, dh) = (|m| TensorId(8000 + m), |m| TensorId(8100 + m), |m| TensorId(8200 + m));
    for m in micros.clone() {
        bench.run(Command::HeadNorm { weights: norm, x: TensorId(first_x + m), h: h(m) });
    }
    let tiles = 1..bench.table.tiles(head, Tiling::Whole).len() as u32;
    for tile in tiles.clone() {
        let weights = bench.bind(head, tile);
        for m in micros.clone() {
            let labels = Arc::clone(&targets[m as usize]);
            bench.run(Command::HeadScore { weights, h: h(m), labels, stats: stats(m), keep });
        }
    }
    let mut loss = 0.0;
    for m in micros.clone() {
        let labels = Arc::clone(&targets[m as usize]);
        match bench.call(Command::HeadLoss { stats: stats(m), labels }) {
            Ok(Outcome::Loss(part)) => loss += part,
            other => panic!("{other:?}"),
        }
    }
    for tile in tiles {
        let weights = WeightsId(u64::from(head.0) << 32 | u64::from(tile));
        for m in micros.clone() {
            let labels = Arc::clone(&targets[m as usize]);
            let (h, stats, dh) = (h(m), stats(m), dh(m));
            bench.run(Command::HeadBackward {
                weights,
                h,
                stats,
                labels,
                dh,
                scale,
                gradient: asks.projection,
            });
        }
    }
    for m in micros {
        bench.run(Command::Free { id: h(m) });
        bench.run(Command::Free { id: stats(m) });
        let (x, dx) = (TensorId(first_x + m), asks.dx.then_some(TensorId(9000 + m)));
        let gradient = asks.norm;
        bench.run(Command::HeadNormBackward { weights: norm, x, dh: dh(m), dx, gradient });
    }
    loss
}

/// ||a - b|| / ||b||
pub(crate) fn distance(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    let square = |x: f64| x * x;
    let difference: f64 = a.iter().zip(b).map(|(a, b)| square(a - b)).sum();
    let length: f64 = b.iter().copied().map(square).sum();
    difference.sqrt() / length.sqrt().max(1e-30)
}

pub(crate) fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().copied().map(f64::from).collect()
}
