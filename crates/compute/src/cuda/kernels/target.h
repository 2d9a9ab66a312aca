// What kernels are written in: CUDA C++ for a card, or, with FTACTOR_HOST, the emulator's threads.
//
// Rules for kernels, which both sides rely on:
// - shared memory is `shared()`, sized by the launch; nothing else is shared inside a block;
// - every thread of a block reaches the same `block_barrier()`, every lane of a warp the same
//   `warp_barrier()` or `shuffle_xor()`, which orders no memory;
// - blocks never talk to each other and nothing is added atomically, so that one card gives one result;
// - rows are counted in 64 bits: a step's activations have more elements than 32 bits count.
#pragma once

#ifdef FTACTOR_HOST
#include "host.h"
#else
#define KERNEL(name) extern "C" __global__ void name
#define EXPORT(name)
#define DEVICE __device__ __forceinline__
#define UNROLL _Pragma("unroll")
#define ROLLED _Pragma("unroll 1")
typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;
extern __shared__ float ftactor_shared[];
DEVICE float *shared() { return ftactor_shared; }
#define block_barrier() __syncthreads()
#define warp_barrier() __syncwarp()
DEVICE float shuffle_xor(float value, int lanes) { return __shfl_xor_sync(0xffffffffu, value, lanes); }
DEVICE u32 bits_of(float value) { return __float_as_uint(value); }
DEVICE float of_bits(u32 bits) { return __uint_as_float(bits); }
#endif

DEVICE float minus_infinity() { return of_bits(0xff800000u); }

// float32 of which the upper half is kept, rounded to the nearest, ties away from zero.
struct bf16 {
    u16 bits;
};

DEVICE float get(const float *from, i64 at) { return from[at]; }
DEVICE float get(const bf16 *from, i64 at) { return of_bits((u32)from[at].bits << 16); }
DEVICE void put(float *to, i64 at, float value) { to[at] = value; }
DEVICE void put(bf16 *to, i64 at, float value) { to[at].bits = (u16)((bits_of(value) + 0x8000u) >> 16); }

// Threads of a warp.
#define WARP 32

struct Sum {
    static DEVICE float of(float a, float b) { return a + b; }
    static DEVICE float none() { return 0.0f; }
};

struct Max {
    static DEVICE float of(float a, float b) { return a > b ? a : b; }
    static DEVICE float none() { return minus_infinity(); }
};

template <class Join> DEVICE float warp_all(float value) {
    for (int lanes = WARP / 2; lanes > 0; lanes /= 2) value = Join::of(value, shuffle_xor(value, lanes));
    return value;
}

// Joins `value` of all threads in a fixed tree and gives it to all. Uses the first 32 floats of shared
// memory; blocks are whole warps.
template <class Join> DEVICE float block_all(float value) {
    int thread = threadIdx.x, warps = blockDim.x / WARP;
    value = warp_all<Join>(value);
    block_barrier();
    if (thread % WARP == 0) shared()[thread / WARP] = value;
    block_barrier();
    int lane = thread % WARP;
    return warp_all<Join>(lane < warps ? shared()[lane] : Join::none());
}
