// The emulator's side of `target.h`: a block's threads are coroutines of one system thread, which meet at
// barriers and shuffles in an order that a seed decides. Shared memory is poisoned before every block; threads
// that do not meet are reported, not waited for.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <tuple>
#include <utility>

typedef uint32_t u32;
typedef uint16_t u16;
typedef long long i64;

namespace ftactor {

struct Three {
    u32 x, y, z;
};

// Where the running thread is.
struct Place {
    Three thread, block, blocks, threads;
};

extern thread_local Place place;
extern thread_local float *shared_memory;

void block_barrier(u32 site);
void warp_barrier(u32 site);
float shuffle(float value, int lanes, u32 site);

// What a launch asks for; the same fields in `host.rs`.
struct Launch {
    Three blocks;
    u32 threads, shared_bytes;
    uint64_t seed;
    // Line of a barrier or shuffle that does nothing, with its file's number above: tests see that it is
    // missed. 0: none.
    u32 skipped;
};

// What came of a launch; the same numbers in `host.rs`.
enum Outcome { DONE = 0, APART = 1, NO_MEMORY = 2, UNKNOWN = 3, ARGUMENTS = 4 };

// A kernel that can be launched by its name. Static ones only: each makes itself known.
struct Exported {
    const char *name;
    size_t count;
    void (*body)(void *);
    const Exported *next;
    Exported(const char *name, size_t count, void (*body)(void *));
};

template <class... A, size_t... I>
void call(void (*kernel)(A...), void **arguments, std::index_sequence<I...>) {
    kernel(*static_cast<A *>(arguments[I])...);
}

template <class F> struct Arguments;
template <class... A> struct Arguments<void (*)(A...)> {
    static constexpr size_t count = sizeof...(A);
    static void call(void (*kernel)(A...), void **arguments) {
        ftactor::call(kernel, arguments, std::index_sequence_for<A...>{});
    }
};

} // namespace ftactor

#define KERNEL(name) static void name
#define EXPORT(name)                                                                                                  \
    static const ftactor::Exported exported_##name{                                                                   \
        #name, ftactor::Arguments<decltype(&name)>::count,                                                            \
        [](void *a) { ftactor::Arguments<decltype(&name)>::call(&name, static_cast<void **>(a)); }};
#define DEVICE inline
#define UNROLL
#define ROLLED
#define threadIdx ftactor::place.thread
#define blockIdx ftactor::place.block
#define gridDim ftactor::place.blocks
#define blockDim ftactor::place.threads
// Every file has a number of its own.
#define FTACTOR_SITE ((FTACTOR_FILE << 16) + __LINE__)
#define block_barrier() ftactor::block_barrier(FTACTOR_SITE)
#define warp_barrier() ftactor::warp_barrier(FTACTOR_SITE)
#define shuffle_xor(value, lanes) ftactor::shuffle(value, lanes, FTACTOR_SITE)

DEVICE float *shared() { return ftactor::shared_memory; }
DEVICE u32 bits_of(float value) {
    u32 bits;
    __builtin_memcpy(&bits, &value, 4);
    return bits;
}
DEVICE float of_bits(u32 bits) {
    float value;
    __builtin_memcpy(&value, &bits, 4);
    return value;
}
