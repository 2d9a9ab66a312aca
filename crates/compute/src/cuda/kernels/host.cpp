// The emulator's kernels, all of them, and the coroutines that run them; see host.h.
#define FTACTOR_HOST
#define FTACTOR_FILE 1
#include "target.h"
#undef FTACTOR_FILE
#define FTACTOR_FILE 2
#include "rows.cu"
#undef FTACTOR_FILE
#define FTACTOR_FILE 3
#include "head.cu"
#undef FTACTOR_FILE
#define FTACTOR_FILE 4
#include "attention.cu"
#undef block_barrier
#undef warp_barrier
#undef threadIdx
#undef blockIdx
#undef gridDim
#undef blockDim

#include <cstdlib>
#include <cstring>
#include <vector>

namespace ftactor {

thread_local Place place;
thread_local float *shared_memory;

// Zero before any constructor runs.
static const Exported *known;

Exported::Exported(const char *name, size_t count, void (*body)(void *))
    : name(name), count(count), body(body), next(known) {
    known = this;
}

namespace {

const size_t STACK_BYTES = 64 << 10;
const u32 LANES = 32, MOST_THREADS = 1024;

enum class Waits { Nothing, Block, Warp, Ended };

// A stack, and where it was left.
struct Thread {
    void *left;
    Waits waits;
    Place place;
};

#if defined(__x86_64__)
// Saves what the calling convention says a function keeps, and goes on where `to` was left.
asm(R"(
.text
.type ftactor_switch, @function
ftactor_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size ftactor_switch, .-ftactor_switch
)");
extern "C" void ftactor_switch(void **from, void *to);

void *begin(char *stack, void (*entry)()) {
    // As if `entry` had been called: a return address lies on a stack that is aligned to 16 bytes.
    void **top = reinterpret_cast<void **>(stack + STACK_BYTES) - 1;
    *top = nullptr;
    *--top = reinterpret_cast<void *>(entry);
    for (int i = 0; i < 6; i++) *--top = nullptr;
    return top;
}
#elif defined(__aarch64__)
asm(R"(
.text
.type ftactor_switch, %function
ftactor_switch:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x2, sp
    str x2, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
.size ftactor_switch, .-ftactor_switch
)");
extern "C" void ftactor_switch(void **from, void *to);

void *begin(char *stack, void (*entry)()) {
    void **top = reinterpret_cast<void **>(stack + STACK_BYTES - 160);
    memset(top, 0, 160);
    top[11] = reinterpret_cast<void *>(entry);
    return top;
}
#else
#error "the emulator knows x86-64 and aarch64"
#endif

// splitmix64 (Steele, Lea and Flood 2014)
uint64_t next(uint64_t &seed) {
    uint64_t z = seed += 0x9e3779b97f4a7c15;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
}

// One system thread's blocks.
struct Scheduler {
    std::vector<Thread> threads;
    std::vector<u32> order;
    std::vector<float> exchanged;
    char *stacks = nullptr;
    void *left = nullptr;
    u32 running = 0, skipped = 0;
    void (*body)(void *) = nullptr;
    void *arguments = nullptr;

    ~Scheduler() { free(stacks); }

    bool has_stacks() {
        if (!stacks) stacks = static_cast<char *>(aligned_alloc(64, STACK_BYTES * MOST_THREADS));
        return stacks;
    }

    void wait(Waits what) {
        threads[running].waits = what;
        ftactor_switch(&threads[running].left, left);
    }

    void go_on(u32 thread) {
        running = thread;
        place = threads[thread].place;
        threads[thread].waits = Waits::Nothing;
        ftactor_switch(&left, threads[thread].left);
    }

    // False if threads wait for some that never come.
    bool block(Three at, const Launch &launch, uint64_t &seed);
    bool release();
};

thread_local Scheduler *scheduler;

void enter() {
    scheduler->body(scheduler->arguments);
    scheduler->wait(Waits::Ended);
    abort();
}

bool Scheduler::block(Three at, const Launch &launch, uint64_t &seed) {
    u32 count = launch.threads;
    // NaNs: whoever reads what nobody wrote has them in its result.
    memset(shared_memory, 0xff, launch.shared_bytes);
    for (u32 i = 0; i < count; i++) {
        threads[i].left = begin(stacks + i * STACK_BYTES, enter);
        threads[i].waits = Waits::Nothing;
        threads[i].place = Place{{i, 0, 0}, at, launch.blocks, {count, 1, 1}};
    }
    // Some warps run ahead of the others, as they do on a card: mostly until they have to wait for them.
    uint64_t ahead = 0;
    bool any = false;
    for (;;) {
        for (u32 i = count; i > 1; i--) std::swap(order[i - 1], order[next(seed) % i]);
        if (!any || next(seed) % 64 == 0) ahead = next(seed);
        any = false;
        for (u32 i = 0; i < count; i++)
            if (threads[order[i]].waits == Waits::Nothing && (ahead >> (order[i] / LANES) & 1)) {
                go_on(order[i]);
                any = true;
            }
        u32 ended = 0, runnable = 0;
        for (u32 i = 0; i < count; i++) {
            ended += threads[i].waits == Waits::Ended;
            runnable += threads[i].waits == Waits::Nothing;
        }
        if (ended == count) return true;
        if (!release() && !any && runnable == 0) return false;
    }
}

// Lets those go on that are complete: all living threads of the block, or all of a warp.
bool Scheduler::release() {
    u32 count = threads.size(), living = 0, at_block = 0;
    bool any = false;
    for (u32 first = 0; first < count; first += LANES) {
        u32 end = first + LANES < count ? first + LANES : count, in_warp = 0, at_warp = 0;
        for (u32 i = first; i < end; i++) {
            in_warp += threads[i].waits != Waits::Ended;
            at_warp += threads[i].waits == Waits::Warp;
            at_block += threads[i].waits == Waits::Block;
        }
        living += in_warp;
        // A shuffle names all lanes: one that has ended would be waited for.
        if (at_warp > 0 && at_warp == end - first) {
            for (u32 i = first; i < end; i++) threads[i].waits = Waits::Nothing;
            any = true;
        }
    }
    if (at_block > 0 && at_block == living) {
        for (Thread &thread : threads)
            if (thread.waits == Waits::Block) thread.waits = Waits::Nothing;
        any = true;
    }
    return any;
}

} // namespace

void block_barrier(u32 site) {
    if (site != scheduler->skipped) scheduler->wait(Waits::Block);
}

void warp_barrier(u32 site) {
    if (site != scheduler->skipped) scheduler->wait(Waits::Warp);
}

float shuffle(float value, int lanes, u32 site) {
    if (site == scheduler->skipped) return value;
    u32 thread = scheduler->running;
    scheduler->exchanged[thread] = value;
    scheduler->wait(Waits::Warp);
    float other = scheduler->exchanged[thread ^ static_cast<u32>(lanes)];
    // Nobody offers the next value before all have this one.
    scheduler->wait(Waits::Warp);
    return other;
}

static u32 run(const Launch &launch, void (*body)(void *), void *arguments) {
    static thread_local Scheduler of_this_thread;
    scheduler = &of_this_thread;
    if (launch.threads == 0 || launch.threads > MOST_THREADS || launch.threads % LANES != 0) return APART;
    if (!scheduler->has_stacks()) return NO_MEMORY;
    std::vector<float> room(launch.shared_bytes / 4 + 1);
    shared_memory = room.data();
    scheduler->threads.resize(launch.threads);
    scheduler->exchanged.resize(launch.threads);
    scheduler->order.resize(launch.threads);
    for (u32 i = 0; i < launch.threads; i++) scheduler->order[i] = i;
    scheduler->body = body;
    scheduler->arguments = arguments;
    scheduler->skipped = launch.skipped;
    uint64_t seed = launch.seed;
    for (u32 z = 0; z < launch.blocks.z; z++)
        for (u32 y = 0; y < launch.blocks.y; y++)
            for (u32 x = 0; x < launch.blocks.x; x++)
                if (!scheduler->block({x, y, z}, launch, seed)) return APART;
    return DONE;
}

} // namespace ftactor

// Launches the kernel of this name with pointers to its arguments.
extern "C" u32 ftactor_launch(const char *name, const ftactor::Launch *launch, void **arguments, size_t count) {
    for (const ftactor::Exported *kernel = ftactor::known; kernel; kernel = kernel->next)
        if (strcmp(kernel->name, name) == 0)
            return kernel->count == count ? ftactor::run(*launch, kernel->body, arguments) : u32(ftactor::ARGUMENTS);
    return ftactor::UNKNOWN;
}
