//! A whole model's forward and hand-written backward in float64: loops, no cleverness.
//!
//! Invariants:
//! - nothing is shared with the fast code, so that agreement of the two means something;
//! - every formula is written out once, in the order of the mathematics.
//!
//! Formulas: RMSNorm (Zhang and Sennrich 2019), RoPE in Hugging Face's half-rotation layout (Su et
//! al. 2021), grouped-query attention (Ainslie et al. 2023), SwiGLU (Shazeer 2020).

use model::{LayerSpec, LayerTable, ModelConfig, Role};

use crate::{MicroShape, NO_TARGET};

/// Sum of the losses of all labelled positions, in nats, and the gradient of `scale` times it.
///
/// `weights`: one block per layer in the order of [`LayerTable`]; the gradients have the same form.
/// `tokens`, `labels`: `[B * S]`; the label of a position is what it predicts, or [`NO_TARGET`].
///
/// # Panics
/// On blocks, tokens or labels that do not fit `config` and `shape`.
pub fn loss_and_gradients(
    config: &ModelConfig,
    weights: &[Vec<f64>],
    tokens: &[u32],
    labels: &[u32],
    shape: MicroShape,
    scale: f64,
) -> (f64, Vec<Vec<f64>>) {
    let table = LayerTable::new(config);
    let mut gradients: Vec<Vec<f64>> = weights.iter().map(|w| vec![0.0; w.len()]).collect();
    let d = config.hidden_size;
    let last = table.len() - 1;

    let mut inputs = vec![embed(&weights[0], tokens, d)];
    for (spec, w) in table.layers()[1..last].iter().zip(&weights[1..last]) {
        let y = Decoder { config, spec, w, shape }.forward(&inputs[inputs.len() - 1]).y;
        inputs.push(y);
    }

    let x = inputs.pop().expect("the embedding's output");
    let projection = if config.tied { &weights[0][..] } else { &weights[last][d..] };
    let h = norm(&x, &weights[last][..d], config.norm_eps);
    let (loss, dlogits) = cross_entropy(&product(&h, projection, d), labels, scale);
    let dprojection = if config.tied { &mut gradients[0][..] } else { &mut gradients[last][d..] };
    let dh = product_backward(&dlogits, &h, projection, d, dprojection);
    let mut dx =
        norm_backward(&dh, &x, &weights[last][..d], config.norm_eps, &mut gradients[last][..d]);

    for index in (1..last).rev() {
        let spec = &table.layers()[index];
        let x = inputs.pop().expect("one input per layer");
        let layer = Decoder { config, spec, w: &weights[index], shape };
        dx = layer.backward(&x, &dx, &mut gradients[index]);
    }
    for (t, &token) in tokens.iter().enumerate() {
        for j in 0..d {
            gradients[0][token as usize * d + j] += dx[t * d + j];
        }
    }
    (loss, gradients)
}

/// A decoder layer's forward: input and result `[T, D]`.
pub fn decoder_forward(
    config: &ModelConfig,
    spec: &LayerSpec,
    w: &[f64],
    shape: MicroShape,
    x: &[f64],
) -> Vec<f64> {
    Decoder { config, spec, w, shape }.forward(x).y
}

/// A decoder layer's backward: returns `dx` `[T, D]` and adds to `gradient`.
pub fn decoder_backward(
    config: &ModelConfig,
    spec: &LayerSpec,
    w: &[f64],
    shape: MicroShape,
    x: &[f64],
    dy: &[f64],
    gradient: &mut [f64],
) -> Vec<f64> {
    Decoder { config, spec, w, shape }.backward(x, dy, gradient)
}

struct Decoder<'a> {
    config: &'a ModelConfig,
    spec: &'a LayerSpec,
    w: &'a [f64],
    shape: MicroShape,
}

/// Everything a decoder layer computes on its way up; `[T, ...]`.
struct Trace {
    h1: Vec<f64>,
    q_raw: Vec<f64>,
    k_raw: Vec<f64>,
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
    o: Vec<f64>,
    x2: Vec<f64>,
    h2: Vec<f64>,
    gate: Vec<f64>,
    up: Vec<f64>,
    a: Vec<f64>,
    y: Vec<f64>,
}

impl Decoder<'_> {
    fn weight(&self, role: Role) -> &[f64] {
        self.spec.slice(self.w, role).expect("a tensor of every decoder layer")
    }

    /// `x W^T + b`
    fn project(&self, x: &[f64], role: Role, bias: Role, inner: usize) -> Vec<f64> {
        let mut y = product(x, self.weight(role), inner);
        if let Some(b) = self.spec.slice(self.w, bias) {
            for row in y.chunks_mut(b.len()) {
                row.iter_mut().zip(b).for_each(|(y, b)| *y += b);
            }
        }
        y
    }

    fn project_backward(
        &self,
        dy: &[f64],
        x: &[f64],
        role: Role,
        bias: Role,
        gradient: &mut [f64],
    ) -> Vec<f64> {
        let spec = self.spec.tensor(role).expect("a tensor of every decoder layer");
        if let Some(b) = self.spec.tensor(bias) {
            for row in dy.chunks(b.elements()) {
                gradient[b.range()].iter_mut().zip(row).for_each(|(g, dy)| *g += dy);
            }
        }
        let inner = spec.shape[1];
        product_backward(dy, x, &self.w[spec.range()], inner, &mut gradient[spec.range()])
    }

    /// Norm of every head (if the model has one), then rotation.
    fn rotate(&self, raw: &[f64], norm_role: Role) -> Vec<f64> {
        let mut y = match self.spec.slice(self.w, norm_role) {
            Some(w) => norm(raw, w, self.config.norm_eps),
            None => raw.to_vec(),
        };
        self.turn(&mut y, 1.0);
        y
    }

    fn rotate_backward(
        &self,
        mut dy: Vec<f64>,
        raw: &[f64],
        norm_role: Role,
        gradient: &mut [f64],
    ) -> Vec<f64> {
        self.turn(&mut dy, -1.0);
        match self.spec.tensor(norm_role) {
            Some(t) => {
                let w = &self.w[t.range()];
                norm_backward(&dy, raw, w, self.config.norm_eps, &mut gradient[t.range()])
            }
            None => dy,
        }
    }

    /// Rotates the pairs `(i, i + K/2)` of every head by position times frequency.
    fn turn(&self, x: &mut [f64], direction: f64) {
        let frequencies = self.config.rope_frequencies();
        let half = frequencies.len();
        let width = x.len() / self.shape.tokens();
        for (t, row) in x.chunks_mut(width).enumerate() {
            let position = (t % self.shape.seq_len) as f64;
            for head in row.chunks_mut(2 * half) {
                for (i, frequency) in frequencies.iter().enumerate() {
                    let (sin, cos) = (position * frequency * direction).sin_cos();
                    let (a, b) = (head[i], head[i + half]);
                    head[i] = a * cos - b * sin;
                    head[i + half] = b * cos + a * sin;
                }
            }
        }
    }

    fn forward(&self, x: &[f64]) -> Trace {
        let c = self.config;
        let (d, f) = (c.hidden_size, c.intermediate_size);
        let h1 = norm(x, self.weight(Role::AttentionNorm), c.norm_eps);
        let q_raw = self.project(&h1, Role::Query, Role::QueryBias, d);
        let k_raw = self.project(&h1, Role::Key, Role::KeyBias, d);
        let v = self.project(&h1, Role::Value, Role::ValueBias, d);
        let q = self.rotate(&q_raw, Role::QueryNorm);
        let k = self.rotate(&k_raw, Role::KeyNorm);
        let o = self.attention(&q, &k, &v);
        let x2 = sum(x, &self.project(&o, Role::Output, Role::OutputBias, c.query_width()));
        let h2 = norm(&x2, self.weight(Role::FeedForwardNorm), c.norm_eps);
        let gate = self.project(&h2, Role::Gate, Role::GateBias, d);
        let up = self.project(&h2, Role::Up, Role::UpBias, d);
        let a: Vec<f64> = gate.iter().zip(&up).map(|(g, u)| g * sigmoid(*g) * u).collect();
        let y = sum(&x2, &self.project(&a, Role::Down, Role::DownBias, f));
        Trace { h1, q_raw, k_raw, q, k, v, o, x2, h2, gate, up, a, y }
    }

    fn backward(&self, x: &[f64], dy: &[f64], gradient: &mut [f64]) -> Vec<f64> {
        let t = self.forward(x);
        let eps = self.config.norm_eps;
        let da = self.project_backward(dy, &t.a, Role::Down, Role::DownBias, gradient);
        let mut dgate = da.clone();
        let mut dup = da;
        for i in 0..dup.len() {
            let (g, u, s) = (t.gate[i], t.up[i], sigmoid(t.gate[i]));
            dgate[i] *= u * s * (1.0 + g * (1.0 - s));
            dup[i] *= g * s;
        }
        let dh2 = sum(
            &self.project_backward(&dgate, &t.h2, Role::Gate, Role::GateBias, gradient),
            &self.project_backward(&dup, &t.h2, Role::Up, Role::UpBias, gradient),
        );
        let w = self.spec.tensor(Role::FeedForwardNorm).expect("a norm").range();
        let dx2 = sum(dy, &norm_backward(&dh2, &t.x2, &self.w[w.clone()], eps, &mut gradient[w]));

        let d_o = self.project_backward(&dx2, &t.o, Role::Output, Role::OutputBias, gradient);
        let (dq, dk, dv) = self.attention_backward(&t.q, &t.k, &t.v, &d_o);
        let dq = self.rotate_backward(dq, &t.q_raw, Role::QueryNorm, gradient);
        let dk = self.rotate_backward(dk, &t.k_raw, Role::KeyNorm, gradient);
        let dh1 = sum(
            &sum(
                &self.project_backward(&dq, &t.h1, Role::Query, Role::QueryBias, gradient),
                &self.project_backward(&dk, &t.h1, Role::Key, Role::KeyBias, gradient),
            ),
            &self.project_backward(&dv, &t.h1, Role::Value, Role::ValueBias, gradient),
        );
        let w = self.spec.tensor(Role::AttentionNorm).expect("a norm").range();
        sum(&dx2, &norm_backward(&dh1, x, &self.w[w.clone()], eps, &mut gradient[w]))
    }

    /// Calls `visit(q, k, p)` with the offsets of a query head's and its key head's row, and the
    /// query's probabilities over the keys 0..=position, whose rows follow each other by G*K.
    fn attend(&self, q: &[f64], k: &[f64], mut visit: impl FnMut(usize, usize, &[f64])) {
        let (c, n) = (self.config, self.config.head_dim);
        let (q_width, kv_width) = (c.query_width(), c.kv_width());
        for row in 0..self.shape.rows {
            for head in 0..c.heads {
                let k0 = row * self.shape.seq_len * kv_width + head / (c.heads / c.kv_heads) * n;
                for s in 0..self.shape.seq_len {
                    let q0 = (row * self.shape.seq_len + s) * q_width + head * n;
                    let scores: Vec<f64> = (0..=s)
                        .map(|j| {
                            let key = &k[k0 + j * kv_width..][..n];
                            dot(&q[q0..q0 + n], key) / (n as f64).sqrt()
                        })
                        .collect();
                    visit(q0, k0, &softmax(&scores));
                }
            }
        }
    }

    fn attention(&self, q: &[f64], k: &[f64], v: &[f64]) -> Vec<f64> {
        let (n, kv_width) = (self.config.head_dim, self.config.kv_width());
        let mut o = vec![0.0; q.len()];
        self.attend(q, k, |q0, k0, p| {
            for (j, p) in p.iter().enumerate() {
                for i in 0..n {
                    o[q0 + i] += p * v[k0 + j * kv_width + i];
                }
            }
        });
        o
    }

    fn attention_backward(
        &self,
        q: &[f64],
        k: &[f64],
        v: &[f64],
        d_o: &[f64],
    ) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
        let (n, kv_width) = (self.config.head_dim, self.config.kv_width());
        let (mut dq, mut dk, mut dv) = (vec![0.0; q.len()], vec![0.0; k.len()], vec![0.0; v.len()]);
        self.attend(q, k, |q0, k0, p| {
            let d_o = &d_o[q0..q0 + n];
            let dp: Vec<f64> =
                (0..p.len()).map(|j| dot(d_o, &v[k0 + j * kv_width..][..n])).collect();
            let delta = dot(p, &dp);
            for j in 0..p.len() {
                let ds = p[j] * (dp[j] - delta) / (n as f64).sqrt();
                let kv = k0 + j * kv_width;
                for i in 0..n {
                    dv[kv + i] += p[j] * d_o[i];
                    dq[q0 + i] += ds * k[kv + i];
                    dk[kv + i] += ds * q[q0 + i];
                }
            }
        });
        (dq, dk, dv)
    }
}

fn embed(rows: &[f64], tokens: &[u32], d: usize) -> Vec<f64> {
    tokens.iter().flat_map(|&t| rows[t as usize * d..][..d].iter().copied()).collect()
}

fn sum(a: &[f64], b: &[f64]) -> Vec<f64> {
    a.iter().zip(b).map(|(a, b)| a + b).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn softmax(scores: &[f64]) -> Vec<f64> {
    let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let e: Vec<f64> = scores.iter().map(|s| (s - top).exp()).collect();
    let total: f64 = e.iter().sum();
    e.iter().map(|e| e / total).collect()
}

/// `x W^T`: x `[T, inner]`, W `[out, inner]`
fn product(x: &[f64], w: &[f64], inner: usize) -> Vec<f64> {
    x.chunks(inner).flat_map(|x| w.chunks(inner).map(|w| dot(x, w))).collect()
}

/// dx = dy W; adds dy^T x to `dw`
fn product_backward(dy: &[f64], x: &[f64], w: &[f64], inner: usize, dw: &mut [f64]) -> Vec<f64> {
    let out = w.len() / inner;
    let mut dx = vec![0.0; x.len()];
    for t in 0..x.len() / inner {
        for o in 0..out {
            for i in 0..inner {
                dx[t * inner + i] += dy[t * out + o] * w[o * inner + i];
                dw[o * inner + i] += dy[t * out + o] * x[t * inner + i];
            }
        }
    }
    dx
}

/// RMSNorm of every group of `w.len()` elements.
fn norm(x: &[f64], w: &[f64], eps: f64) -> Vec<f64> {
    x.chunks(w.len())
        .flat_map(|x| {
            let rstd = 1.0 / (dot(x, x) / x.len() as f64 + eps).sqrt();
            x.iter().zip(w).map(move |(x, w)| x * rstd * w)
        })
        .collect()
}

fn norm_backward(dy: &[f64], x: &[f64], w: &[f64], eps: f64, dw: &mut [f64]) -> Vec<f64> {
    let n = w.len();
    let mut dx = Vec::with_capacity(x.len());
    for (x, dy) in x.chunks(n).zip(dy.chunks(n)) {
        let rstd = 1.0 / (dot(x, x) / n as f64 + eps).sqrt();
        let inner: f64 = (0..n).map(|i| dy[i] * w[i] * x[i]).sum::<f64>() / n as f64;
        for i in 0..n {
            dw[i] += dy[i] * x[i] * rstd;
            dx.push(rstd * (dy[i] * w[i] - x[i] * rstd * rstd * inner));
        }
    }
    dx
}

/// Sum of `logsumexp - logit of the label`, and `scale` times its gradient by the logits.
fn cross_entropy(logits: &[f64], labels: &[u32], scale: f64) -> (f64, Vec<f64>) {
    let vocab = logits.len() / labels.len();
    let mut loss = 0.0;
    let mut gradient = vec![0.0; logits.len()];
    for (t, &label) in labels.iter().enumerate().filter(|(_, label)| **label != NO_TARGET) {
        let p = softmax(&logits[t * vocab..][..vocab]);
        loss -= p[label as usize].ln();
        for (v, p) in p.iter().enumerate() {
            let target = if v == label as usize { 1.0 } else { 0.0 };
            gradient[t * vocab + v] = scale * (p - target);
        }
    }
    (loss, gradient)
}
