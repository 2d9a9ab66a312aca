// The head's loops over one vocabulary tile and its logits [T, tile].
//
// Formula: softmax with a running maximum (Milakov and Gimelshein 2018).
#include "target.h"

#define NO_TARGET 0xffffffffu
// Of a token: running maximum, running sum of exponentials, logit of the label.
#define STATS 3

KERNEL(clear_stats)(float *stats, i64 tokens) {
    i64 token = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (token >= tokens) return;
    stats[token * STATS] = minus_infinity();
    stats[token * STATS + 1] = stats[token * STATS + 2] = 0.0f;
}

// Folds a tile that begins at vocabulary row `first` into stats. A block a token.
KERNEL(head_score)(const float *logits, const u32 *labels, u32 first, int width, float *stats) {
    i64 token = blockIdx.x, start = token * width;
    float here = minus_infinity();
    for (int v = threadIdx.x; v < width; v += blockDim.x) here = Max::of(here, logits[start + v]);
    float *known = stats + token * STATS, before = known[0], earlier = known[1];
    float top = Max::of(block_all<Max>(here), before), sum = 0.0f;
    for (int v = threadIdx.x; v < width; v += blockDim.x) sum += expf(logits[start + v] - top);
    sum = block_all<Sum>(sum);
    if (threadIdx.x > 0) return;
    known[0] = top;
    // The first tile's sum stands alone: the maximum before it is minus infinity.
    known[1] = sum + (earlier == 0.0f ? 0.0f : earlier * expf(before - top));
    u32 label = labels[token];
    if (label != NO_TARGET && label >= first && label - first < (u32)width) known[2] = logits[start + label - first];
}

// The gradient of scale times the loss by a tile's logits. A block a token.
template <class E>
DEVICE void logits_gradient(const float *logits, const u32 *labels, u32 first, int width, const float *stats,
                            float scale, E *to) {
    i64 token = blockIdx.x, start = token * width;
    u32 label = labels[token];
    float top = stats[token * STATS], factor = scale / stats[token * STATS + 1];
    for (int v = threadIdx.x; v < width; v += blockDim.x) {
        float d = 0.0f;
        if (label != NO_TARGET) {
            d = expf(logits[start + v] - top) * factor;
            if (label >= first && label - first == (u32)v) d -= scale;
        }
        put(to, start + v, d);
    }
}

KERNEL(head_gradient_f32)(const float *logits, const u32 *labels, u32 first, int width, const float *stats,
                          float scale, float *to) {
    logits_gradient(logits, labels, first, width, stats, scale, to);
}
KERNEL(head_gradient_bf16)(const float *logits, const u32 *labels, u32 first, int width, const float *stats,
                           float scale, bf16 *to) {
    logits_gradient(logits, labels, first, width, stats, scale, to);
}

EXPORT(clear_stats) EXPORT(head_score) EXPORT(head_gradient_f32) EXPORT(head_gradient_bf16)
