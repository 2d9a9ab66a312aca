// Loops over token rows: RMSNorm, rotary embedding, SwiGLU, bias, gathering and scattering, and their
// gradients. Buffers are [T, width], row-major. E is the element of what products read: float or bf16.
//
// Formulas: RMSNorm (Zhang and Sennrich 2019), RoPE in Hugging Face's half-rotation layout (Su et al. 2021),
// SwiGLU (Shazeer 2020).
#include "target.h"

// h = x * rstd * w, rstd = 1 / sqrt(mean(x^2) + eps). A block a row.
template <class E> DEVICE void norm(const float *x, const float *w, float eps, int width, E *h, float *rstd) {
    i64 row = blockIdx.x, start = row * width;
    float squares = 0.0f;
    for (int i = threadIdx.x; i < width; i += blockDim.x) squares += x[start + i] * x[start + i];
    float r = 1.0f / sqrtf(block_all<Sum>(squares) / width + eps);
    for (int i = threadIdx.x; i < width; i += blockDim.x) put(h, start + i, x[start + i] * r * w[i]);
    if (threadIdx.x == 0) rstd[row] = r;
}

// The same with the rstd of an earlier norm.
template <class E> DEVICE void norm_again(const float *x, const float *w, const float *rstd, int width, E *h) {
    i64 row = blockIdx.x, start = row * width;
    for (int i = threadIdx.x; i < width; i += blockDim.x) put(h, start + i, x[start + i] * rstd[row] * w[i]);
}

// dx (+)= rstd * (dh * w - x * rstd^2 * mean(dh * w * x)). A block a row.
KERNEL(norm_backward)(const float *dh, const float *x, const float *w, const float *rstd, int width, int add,
                      float *dx) {
    i64 row = blockIdx.x, start = row * width;
    float inner = 0.0f;
    for (int i = threadIdx.x; i < width; i += blockDim.x) inner += dh[start + i] * w[i] * x[start + i];
    float r = rstd[row], mean = block_all<Sum>(inner) / width;
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        float d = r * (dh[start + i] * w[i] - x[start + i] * r * r * mean);
        dx[start + i] = add ? dx[start + i] + d : d;
    }
}

// Rows that one block of a column sum adds up.
#define COLUMN_ROWS 256
// Threads that share a column there.
#define COLUMN_PARTS 8

// partials[block, c] = sum over the block's rows of dy[t, c], or of dy[t, c] * x[t, c] * rstd[t]. A block for
// 32 columns and COLUMN_ROWS rows, of WARP * COLUMN_PARTS threads.
template <class E>
DEVICE void column_sums(const E *dy, const float *x, const float *rstd, i64 rows, int width, float *partials) {
    int lane = threadIdx.x % WARP, part = threadIdx.x / WARP, column = blockIdx.x * WARP + lane;
    i64 first = (i64)blockIdx.y * COLUMN_ROWS, end = first + COLUMN_ROWS < rows ? first + COLUMN_ROWS : rows;
    float sum = 0.0f;
    if (column < width)
        for (i64 t = first + part; t < end; t += COLUMN_PARTS) {
            float value = get(dy, t * width + column);
            sum += x ? value * x[t * width + column] * rstd[t] : value;
        }
    shared()[part * WARP + lane] = sum;
    block_barrier();
    if (part > 0 || column >= width) return;
    for (int other = 1; other < COLUMN_PARTS; other++) sum += shared()[other * WARP + lane];
    partials[(i64)blockIdx.y * width + column] = sum;
}

// to[c] (+)= the sum of count partials[., c], in order. A thread a column.
KERNEL(fold_columns)(const float *partials, int count, int width, int add, float *to) {
    i64 column = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= width) return;
    float sum = 0.0f;
    for (int i = 0; i < count; i++) sum += partials[(i64)i * width + column];
    to[column] = add ? to[column] + sum : sum;
}

// What a head is rotated by: cosines and sines [S, K / 2], and the norms of query and key heads, or null.
struct Turn {
    const float *cosines, *sines, *query_norm, *key_norm;
    float eps;
    int seq_len, query_heads, key_heads, head_dim;
};

// Norm of a head, if there is one, then rotation of its pairs (i, i + K/2), in place. A block a head of a row,
// query heads first; rows have key heads' values behind them. A thread a pair.
template <class E> DEVICE void rotate(E *qkv, Turn turn) {
    int heads = turn.query_heads + turn.key_heads, half = turn.head_dim / 2, i = threadIdx.x;
    i64 row = blockIdx.x / heads;
    int head = blockIdx.x % heads;
    i64 at = (row * (heads + turn.key_heads) + head) * turn.head_dim;
    const float *w = head < turn.query_heads ? turn.query_norm : turn.key_norm;
    float a = i < half ? get(qkv, at + i) : 0.0f, b = i < half ? get(qkv, at + half + i) : 0.0f;
    if (w) {
        float r = 1.0f / sqrtf(block_all<Sum>(a * a + b * b) / turn.head_dim + turn.eps);
        if (i < half) a *= r * w[i], b *= r * w[half + i];
    }
    if (i >= half) return;
    i64 angle = row % turn.seq_len * half + i;
    float c = turn.cosines[angle], s = turn.sines[angle];
    put(qkv, at + i, a * c - b * s);
    put(qkv, at + half + i, b * c + a * s);
}

// Backward of `rotate`, in place; `raw` [T, (H + G) * K] are the heads before their norm, `terms` of the same
// shape gets what sums up to the gradient of the norms' weights.
template <class E> DEVICE void rotate_gradient(E *dqkv, const E *raw, Turn turn, float *terms) {
    int heads = turn.query_heads + turn.key_heads, half = turn.head_dim / 2, i = threadIdx.x;
    i64 row = blockIdx.x / heads;
    int head = blockIdx.x % heads, is_pair = i < half;
    i64 at = (row * (heads + turn.key_heads) + head) * turn.head_dim;
    const float *w = head < turn.query_heads ? turn.query_norm : turn.key_norm;
    float da = 0.0f, db = 0.0f;
    if (is_pair) {
        i64 angle = row % turn.seq_len * half + i;
        float c = turn.cosines[angle], s = turn.sines[angle];
        float a = get(dqkv, at + i), b = get(dqkv, at + half + i);
        da = a * c + b * s;
        db = b * c - a * s;
    }
    if (w) {
        i64 before = (row * heads + head) * turn.head_dim;
        float a = is_pair ? get(raw, before + i) : 0.0f, b = is_pair ? get(raw, before + half + i) : 0.0f;
        float wa = is_pair ? w[i] : 0.0f, wb = is_pair ? w[half + i] : 0.0f;
        float r = 1.0f / sqrtf(block_all<Sum>(a * a + b * b) / turn.head_dim + turn.eps);
        float mean = block_all<Sum>(da * wa * a + db * wb * b) / turn.head_dim;
        if (is_pair) {
            terms[before + i] = da * a * r;
            terms[before + half + i] = db * b * r;
        }
        da = r * (da * wa - a * r * r * mean);
        db = r * (db * wb - b * r * r * mean);
    }
    if (!is_pair) return;
    put(dqkv, at + i, da);
    put(dqkv, at + half + i, db);
}

DEVICE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

DEVICE i64 element() { return (i64)blockIdx.x * blockDim.x + threadIdx.x; }

// a [T, F] = silu(gate) * up of gate_up [T, 2F]. A thread an element.
template <class E> DEVICE void swiglu(const E *gate_up, i64 elements, int width, E *a) {
    i64 at = element();
    if (at >= elements) return;
    i64 gate = at / width * 2 * width + at % width;
    float g = get(gate_up, gate);
    put(a, at, g * sigmoid(g) * get(gate_up, gate + width));
}

// Turns gate_up into its gradient, and da into a.
template <class E> DEVICE void swiglu_gradient(E *gate_up, E *da, i64 elements, int width) {
    i64 at = element();
    if (at >= elements) return;
    i64 gate = at / width * 2 * width + at % width;
    float g = get(gate_up, gate), u = get(gate_up, gate + width), d = get(da, at), s = sigmoid(g);
    put(gate_up, gate, d * u * s * (1.0f + g * (1.0f - s)));
    put(gate_up, gate + width, d * g * s);
    put(da, at, g * s * u);
}

// y [T, width] += b
template <class E> DEVICE void add_bias(E *y, const float *b, i64 elements, int width) {
    i64 at = element();
    if (at < elements) put(y, at, get(y, at) + b[at % width]);
}

// to [T, width] = the first columns of from [T, from_width]
template <class E> DEVICE void copy_columns(const E *from, int from_width, i64 elements, int width, E *to) {
    i64 at = element();
    if (at < elements) put(to, at, get(from, at / width * from_width + at % width));
}

KERNEL(norm_f32)(const float *x, const float *w, float eps, int width, float *h, float *rstd) {
    norm(x, w, eps, width, h, rstd);
}
KERNEL(norm_bf16)(const float *x, const float *w, float eps, int width, bf16 *h, float *rstd) {
    norm(x, w, eps, width, h, rstd);
}
KERNEL(norm_again_f32)(const float *x, const float *w, const float *rstd, int width, float *h) {
    norm_again(x, w, rstd, width, h);
}
KERNEL(norm_again_bf16)(const float *x, const float *w, const float *rstd, int width, bf16 *h) {
    norm_again(x, w, rstd, width, h);
}
KERNEL(column_sums_f32)(const float *dy, const float *x, const float *rstd, i64 rows, int width, float *partials) {
    column_sums(dy, x, rstd, rows, width, partials);
}
KERNEL(column_sums_bf16)(const bf16 *dy, const float *x, const float *rstd, i64 rows, int width, float *partials) {
    column_sums(dy, x, rstd, rows, width, partials);
}
KERNEL(rotate_f32)(float *qkv, const float *cosines, const float *sines, const float *query_norm,
                   const float *key_norm, float eps, int seq_len, int query_heads, int key_heads, int head_dim) {
    rotate(qkv, Turn{cosines, sines, query_norm, key_norm, eps, seq_len, query_heads, key_heads, head_dim});
}
KERNEL(rotate_bf16)(bf16 *qkv, const float *cosines, const float *sines, const float *query_norm,
                    const float *key_norm, float eps, int seq_len, int query_heads, int key_heads, int head_dim) {
    rotate(qkv, Turn{cosines, sines, query_norm, key_norm, eps, seq_len, query_heads, key_heads, head_dim});
}
KERNEL(rotate_backward_f32)(float *dqkv, const float *raw, float *terms, const float *cosines, const float *sines,
                            const float *query_norm, const float *key_norm, float eps, int seq_len,
                            int query_heads, int key_heads, int head_dim) {
    Turn turn{cosines, sines, query_norm, key_norm, eps, seq_len, query_heads, key_heads, head_dim};
    rotate_gradient(dqkv, raw, turn, terms);
}
KERNEL(rotate_backward_bf16)(bf16 *dqkv, const bf16 *raw, float *terms, const float *cosines, const float *sines,
                             const float *query_norm, const float *key_norm, float eps, int seq_len,
                             int query_heads, int key_heads, int head_dim) {
    Turn turn{cosines, sines, query_norm, key_norm, eps, seq_len, query_heads, key_heads, head_dim};
    rotate_gradient(dqkv, raw, turn, terms);
}
KERNEL(swiglu_f32)(const float *gate_up, i64 elements, int width, float *a) { swiglu(gate_up, elements, width, a); }
KERNEL(swiglu_bf16)(const bf16 *gate_up, i64 elements, int width, bf16 *a) { swiglu(gate_up, elements, width, a); }
KERNEL(swiglu_backward_f32)(float *gate_up, float *da, i64 elements, int width) {
    swiglu_gradient(gate_up, da, elements, width);
}
KERNEL(swiglu_backward_bf16)(bf16 *gate_up, bf16 *da, i64 elements, int width) {
    swiglu_gradient(gate_up, da, elements, width);
}
KERNEL(add_bias_f32)(float *y, const float *b, i64 elements, int width) { add_bias(y, b, elements, width); }
KERNEL(add_bias_bf16)(bf16 *y, const float *b, i64 elements, int width) { add_bias(y, b, elements, width); }
KERNEL(copy_columns_f32)(const float *from, int from_width, i64 elements, int width, float *to) {
    copy_columns(from, from_width, elements, width, to);
}
KERNEL(copy_columns_bf16)(const bf16 *from, int from_width, i64 elements, int width, bf16 *to) {
    copy_columns(from, from_width, elements, width, to);
}
// Operands of products: rounded.
KERNEL(round_bf16)(const float *from, i64 elements, bf16 *to) {
    i64 at = element();
    if (at < elements) put(to, at, from[at]);
}
// Weights that lie as a bfloat16 plane and the difference of the two bit patterns.
KERNEL(join_planes)(const u16 *high, const short *low, i64 elements, float *to) {
    i64 at = element();
    if (at < elements) to[at] = of_bits(((u32)high[at] << 16) + (u32)(int)low[at]);
}
// y[t] = rows[index[t]]
KERNEL(gather_rows)(const float *rows, const u32 *index, i64 elements, int width, float *y) {
    i64 at = element();
    if (at < elements) y[at] = rows[(i64)index[at / width] * width + at % width];
}
// rows[u] (+)= the sum of dy[t] over the tokens t of row u, in order; `order` has tokens row by row, `starts`
// where each row's begin. A thread an element of rows.
KERNEL(scatter_rows)(const float *dy, const u32 *order, const u32 *starts, i64 elements, int width, int add,
                     float *rows) {
    i64 at = element();
    if (at >= elements) return;
    i64 row = at / width;
    float sum = add ? rows[at] : 0.0f;
    for (u32 i = starts[row]; i < starts[row + 1]; i++) sum += dy[(i64)order[i] * width + at % width];
    rows[at] = sum;
}

EXPORT(norm_f32) EXPORT(norm_bf16) EXPORT(norm_again_f32) EXPORT(norm_again_bf16) EXPORT(norm_backward)
EXPORT(column_sums_f32) EXPORT(column_sums_bf16) EXPORT(fold_columns) EXPORT(rotate_f32) EXPORT(rotate_bf16)
EXPORT(rotate_backward_f32) EXPORT(rotate_backward_bf16) EXPORT(swiglu_f32) EXPORT(swiglu_bf16)
EXPORT(swiglu_backward_f32) EXPORT(swiglu_backward_bf16) EXPORT(add_bias_f32) EXPORT(add_bias_bf16)
EXPORT(copy_columns_f32) EXPORT(copy_columns_bf16) EXPORT(round_bf16) EXPORT(join_planes) EXPORT(gather_rows)
EXPORT(scatter_rows)
