// Causal grouped-query attention, forward and backward, with memory linear in S: one logsumexp per query is
// kept, probabilities are computed again in tiles. Buffers: qkv [B * S, (H + 2G) * K], rotated; o
// [B * S, H * K]; lse and delta [B, H, S].
//
// Tiles are R x R; four threads share a row and take every fourth column. K is head_dim at most; what is
// beyond head_dim is zero in shared memory.
//
// Scheme: Dao 2023 (FlashAttention-2), with one pass for dq and one for dk and dv, so that no sum depends on the
// order of blocks.
#include "target.h"

#define PARTS 4

struct Shape {
    int seq_len, heads, key_heads, head_dim;
    DEVICE i64 row_width() const { return (i64)(heads + 2 * key_heads) * head_dim; }
    DEVICE float scale() const { return 1.0f / sqrtf((float)head_dim); }
    DEVICE int key_head(int head) const { return head / (heads / key_heads); }
};

// A tile of R rows in shared memory, one value apart so that columns lie in different banks.
template <int K> struct Rows {
    float *at;
    DEVICE float &operator()(int row, int column) { return at[row * (K + 1) + column]; }
};

template <int K, int R> DEVICE Rows<K> rows_at(int index) { return Rows<K>{shared() + index * R * (K + 1)}; }

// Rows first.. of a head's [S, head_dim], `stride` apart from one position to the next.
template <class E, int K, int R>
DEVICE void fetch(Rows<K> to, const E *head, i64 stride, int first, int seq_len, int head_dim) {
    ROLLED for (int i = threadIdx.x; i < R * K; i += R * PARTS) {
        int row = i / K, column = i % K;
        int is_there = first + row < seq_len && column < head_dim;
        to(row, column) = is_there ? get(head, (i64)(first + row) * stride + column) : 0.0f;
    }
}

// products[n] = row `row` of a times row part + n * PARTS of b.
template <int K, int R> DEVICE void multiply(Rows<K> a, int row, Rows<K> b, int part, float *products) {
    UNROLL for (int n = 0; n < R / PARTS; n++) products[n] = 0.0f;
    ROLLED for (int c = 0; c < K; c++) {
        float value = a(row, c);
        UNROLL for (int n = 0; n < R / PARTS; n++) products[n] += value * b(part + n * PARTS, c);
    }
}

// sums[n] += row `row` of a times column part + n * PARTS of b.
template <int K, int R> DEVICE void add_products(Rows<R> a, int row, Rows<K> b, int part, float *sums) {
    ROLLED for (int j = 0; j < R; j++) {
        float value = a(row, j);
        UNROLL for (int n = 0; n < K / PARTS; n++) sums[n] += value * b(j, part + n * PARTS);
    }
}

// Joined over the threads of a row.
template <class Join> DEVICE float row_all(float value) {
    for (int lanes = PARTS / 2; lanes > 0; lanes /= 2) value = Join::of(value, shuffle_xor(value, lanes));
    return value;
}

// Grid: tiles of queries, heads, rows of the batch.
template <class E, int K, int R> DEVICE void forward(const E *qkv, Shape shape, E *o, float *lse) {
    int row = threadIdx.x / PARTS, part = threadIdx.x % PARTS, first = blockIdx.x * R, head = blockIdx.y;
    int query = first + row, d = shape.head_dim, s = shape.seq_len;
    const E *base = qkv + (i64)blockIdx.z * s * shape.row_width();
    const E *keys = base + (i64)(shape.heads + shape.key_head(head)) * d, *values = keys + (i64)shape.key_heads * d;
    Rows<K> q = rows_at<K, R>(0), k = rows_at<K, R>(1), v = rows_at<K, R>(2);
    Rows<R> p = Rows<R>{rows_at<K, R>(3).at};
    fetch<E, K, R>(q, base + (i64)head * d, shape.row_width(), first, s, d);
    float sums[K / PARTS] = {}, top = minus_infinity(), total = 0.0f;
    for (int from = 0; from < first + R && from < s; from += R) {
        block_barrier();
        fetch<E, K, R>(k, keys, shape.row_width(), from, s, d);
        fetch<E, K, R>(v, values, shape.row_width(), from, s, d);
        block_barrier();
        float scores[R / PARTS], here = minus_infinity();
        multiply<K, R>(q, row, k, part, scores);
        UNROLL for (int n = 0; n < R / PARTS; n++) {
            int key = from + part + n * PARTS;
            scores[n] = key <= query && key < s ? scores[n] * shape.scale() : minus_infinity();
            here = Max::of(here, scores[n]);
        }
        // Key 0 is everybody's, so that the maximum is finite from the first tile on.
        float next = Max::of(top, row_all<Max>(here)), again = expf(top - next), sum = 0.0f;
        UNROLL for (int n = 0; n < R / PARTS; n++) sum += scores[n] = expf(scores[n] - next);
        total = total * again + row_all<Sum>(sum);
        top = next;
        // A row's threads are in one warp.
        UNROLL for (int n = 0; n < R / PARTS; n++) p(row, part + n * PARTS) = scores[n];
        warp_barrier();
        UNROLL for (int n = 0; n < K / PARTS; n++) sums[n] *= again;
        add_products<K, R>(p, row, v, part, sums);
    }
    if (query >= s) return;
    E *to = o + ((i64)blockIdx.z * s + query) * shape.heads * d + (i64)head * d;
    UNROLL for (int n = 0; n < K / PARTS; n++) {
        int column = part + n * PARTS;
        if (column < d) put(to, column, sums[n] / total);
    }
    if (part == 0) lse[((i64)blockIdx.z * shape.heads + head) * s + query] = top + logf(total);
}

// delta = sum(o * d_o) of a head's row. Grid: rows and heads; a block is a warp.
template <class E> DEVICE void inner_products(const E *o, const E *d_o, Shape shape, float *delta) {
    i64 row = blockIdx.x, at = (row * shape.heads + blockIdx.y) * shape.head_dim;
    float sum = 0.0f;
    for (int i = threadIdx.x; i < shape.head_dim; i += WARP) sum += get(o, at + i) * get(d_o, at + i);
    sum = warp_all<Sum>(sum);
    i64 to = (row / shape.seq_len * shape.heads + blockIdx.y) * shape.seq_len + row % shape.seq_len;
    if (threadIdx.x == 0) delta[to] = sum;
}

// Grid: tiles of queries, heads, rows of the batch.
template <class E, int K, int R>
DEVICE void query_gradient(const E *qkv, const E *d_o, const float *lse, const float *delta, Shape shape, E *dqkv) {
    int row = threadIdx.x / PARTS, part = threadIdx.x % PARTS, first = blockIdx.x * R, head = blockIdx.y;
    int query = first + row, d = shape.head_dim, s = shape.seq_len;
    i64 start = (i64)blockIdx.z * s, of_query = ((i64)blockIdx.z * shape.heads + head) * s + query;
    const E *base = qkv + start * shape.row_width();
    const E *keys = base + (i64)(shape.heads + shape.key_head(head)) * d, *values = keys + (i64)shape.key_heads * d;
    Rows<K> q = rows_at<K, R>(0), g = rows_at<K, R>(1), k = rows_at<K, R>(2), v = rows_at<K, R>(3);
    Rows<R> ds = Rows<R>{rows_at<K, R>(4).at};
    fetch<E, K, R>(q, base + (i64)head * d, shape.row_width(), first, s, d);
    fetch<E, K, R>(g, d_o + (start * shape.heads + head) * d, (i64)shape.heads * d, first, s, d);
    float known = query < s ? lse[of_query] : 0.0f, inner = query < s ? delta[of_query] : 0.0f;
    float sums[K / PARTS] = {};
    for (int from = 0; from < first + R && from < s; from += R) {
        block_barrier();
        fetch<E, K, R>(k, keys, shape.row_width(), from, s, d);
        fetch<E, K, R>(v, values, shape.row_width(), from, s, d);
        block_barrier();
        float scores[R / PARTS], dp[R / PARTS];
        multiply<K, R>(q, row, k, part, scores);
        multiply<K, R>(g, row, v, part, dp);
        UNROLL for (int n = 0; n < R / PARTS; n++) {
            int j = part + n * PARTS, sees = from + j <= query && from + j < s && query < s;
            float p = sees ? expf(scores[n] * shape.scale() - known) : 0.0f;
            ds(row, j) = sees ? p * (dp[n] - inner) * shape.scale() : 0.0f;
        }
        warp_barrier();
        add_products<K, R>(ds, row, k, part, sums);
    }
    if (query >= s) return;
    E *to = dqkv + (start + query) * shape.row_width() + (i64)head * d;
    UNROLL for (int n = 0; n < K / PARTS; n++) {
        int column = part + n * PARTS;
        if (column < d) put(to, column, sums[n]);
    }
}

// Grid: tiles of keys, key heads, rows of the batch.
template <class E, int K, int R>
DEVICE void key_gradient(const E *qkv, const E *d_o, const float *lse, const float *delta, Shape shape, E *dqkv) {
    int row = threadIdx.x / PARTS, part = threadIdx.x % PARTS, first = blockIdx.x * R, key_head = blockIdx.y;
    int key = first + row, d = shape.head_dim, s = shape.seq_len, group = shape.heads / shape.key_heads;
    i64 start = (i64)blockIdx.z * s;
    const E *base = qkv + start * shape.row_width();
    i64 of_key = (i64)(shape.heads + key_head) * d, of_value = of_key + (i64)shape.key_heads * d;
    Rows<K> q = rows_at<K, R>(0), g = rows_at<K, R>(1), k = rows_at<K, R>(2), v = rows_at<K, R>(3);
    // [key, query]
    Rows<R> p = Rows<R>{rows_at<K, R>(4).at}, ds = Rows<R>{p.at + R * (R + 1)};
    fetch<E, K, R>(k, base + of_key, shape.row_width(), first, s, d);
    fetch<E, K, R>(v, base + of_value, shape.row_width(), first, s, d);
    float dk[K / PARTS] = {}, dv[K / PARTS] = {};
    for (int head = key_head * group; head < (key_head + 1) * group; head++) {
        i64 of_head = ((i64)blockIdx.z * shape.heads + head) * s;
        for (int from = first; from < s; from += R) {
            block_barrier();
            fetch<E, K, R>(q, base + (i64)head * d, shape.row_width(), from, s, d);
            fetch<E, K, R>(g, d_o + (start * shape.heads + head) * d, (i64)shape.heads * d, from, s, d);
            block_barrier();
            float scores[R / PARTS], dp[R / PARTS];
            multiply<K, R>(k, row, q, part, scores);
            multiply<K, R>(v, row, g, part, dp);
            UNROLL for (int n = 0; n < R / PARTS; n++) {
                int i = part + n * PARTS, query = from + i, sees = key <= query && query < s;
                float probability = sees ? expf(scores[n] * shape.scale() - lse[of_head + query]) : 0.0f;
                p(row, i) = probability;
                ds(row, i) = sees ? probability * (dp[n] - delta[of_head + query]) * shape.scale() : 0.0f;
            }
            warp_barrier();
            add_products<K, R>(p, row, g, part, dv);
            add_products<K, R>(ds, row, q, part, dk);
        }
    }
    if (key >= s) return;
    E *to = dqkv + (start + key) * shape.row_width();
    UNROLL for (int n = 0; n < K / PARTS; n++) {
        int column = part + n * PARTS;
        if (column < d) {
            put(to, of_key + column, dk[n]);
            put(to, of_value + column, dv[n]);
        }
    }
}

// For elements E, heads of at most K, tiles of R rows.
#define ATTENTION(E, name, K, R)                                                                                      \
    KERNEL(attention_##name##_##K)                                                                                    \
    (const E *qkv, int seq_len, int heads, int key_heads, int head_dim, E *o, float *lse) {                           \
        forward<E, K, R>(qkv, Shape{seq_len, heads, key_heads, head_dim}, o, lse);                                    \
    }                                                                                                                 \
    KERNEL(attention_query_##name##_##K)                                                                              \
    (const E *qkv, const E *d_o, const float *lse, const float *delta, int seq_len, int heads, int key_heads,         \
     int head_dim, E *dqkv) {                                                                                         \
        query_gradient<E, K, R>(qkv, d_o, lse, delta, Shape{seq_len, heads, key_heads, head_dim}, dqkv);              \
    }                                                                                                                 \
    KERNEL(attention_key_##name##_##K)                                                                                \
    (const E *qkv, const E *d_o, const float *lse, const float *delta, int seq_len, int heads, int key_heads,         \
     int head_dim, E *dqkv) {                                                                                         \
        key_gradient<E, K, R>(qkv, d_o, lse, delta, Shape{seq_len, heads, key_heads, head_dim}, dqkv);                \
    }                                                                                                                 \
    EXPORT(attention_##name##_##K) EXPORT(attention_query_##name##_##K) EXPORT(attention_key_##name##_##K)

ATTENTION(float, f32, 64, 32)
ATTENTION(float, f32, 128, 32)
ATTENTION(float, f32, 256, 16)
ATTENTION(bf16, bf16, 64, 32)
ATTENTION(bf16, bf16, 128, 32)
ATTENTION(bf16, bf16, 256, 16)

KERNEL(attention_delta_f32)(const float *o, const float *d_o, int seq_len, int heads, int head_dim, float *delta) {
    inner_products(o, d_o, Shape{seq_len, heads, heads, head_dim}, delta);
}
KERNEL(attention_delta_bf16)(const bf16 *o, const bf16 *d_o, int seq_len, int heads, int head_dim, float *delta) {
    inner_products(o, d_o, Shape{seq_len, heads, heads, head_dim}, delta);
}
EXPORT(attention_delta_f32) EXPORT(attention_delta_bf16)
