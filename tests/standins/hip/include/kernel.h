// The language of kernels, for a C++ compiler of the host: places, atomics, warps, and half floats.
#pragma once
#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <initializer_list>
#include <tuple>
#include <type_traits>
#include <unistd.h>
#include <utility>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __constant__ static
#define __launch_bounds__(...)
// The threads of a block share one thread of the host, so its memory is the block's.
#define __shared__ static thread_local

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct uint4 { unsigned x, y, z, w; };

// Of blocks.c.
struct standin_index { unsigned x, y, z; };
extern "C" {
extern thread_local struct {
    standin_index thread, block, block_size, grid_size;
    char *shared;
} standin_place;
void standin_wait_for_block();
void standin_wait_for_warp();
uint64_t standin_exchange(uint64_t value, unsigned from);
unsigned standin_lane();
}
#define threadIdx (standin_place.thread)
#define blockIdx (standin_place.block)
#define blockDim (standin_place.block_size)
#define gridDim (standin_place.grid_size)
static constexpr int warpSize = 64;

static inline void __syncthreads() { standin_wait_for_block(); }
static inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
// The lanes of a warp run in step, and kernels count on that between fences. Here, they wait.
static inline void __threadfence_block() { standin_wait_for_warp(); }
static inline void __syncwarp(uint64_t = 0) { standin_wait_for_warp(); }

// A clock of 100 MHz, as that of AMD's data center GPUs.
static inline long long wall_clock64() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 100000000LL + now.tv_nsec / 10;
}
static inline long long clock64() { return wall_clock64(); }
// A kernel that waits for the host leaves it the processor.
static inline void __builtin_amdgcn_s_sleep(int) { usleep(100); }

// ------------------------------------------------------------------ warps

template <class T> static inline T standin_from_lane(T value, unsigned from) {
    static_assert(sizeof(T) <= 8);
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof value);
    bits = standin_exchange(bits, from);
    memcpy(&value, &bits, sizeof value);
    return value;
}
template <class T> static inline T __shfl(T value, int lane, int width = warpSize) {
    return standin_from_lane(value, standin_lane() / width * width + lane % width);
}
template <class T> static inline T __shfl_up(T value, unsigned by, int width = warpSize) {
    unsigned lane = standin_lane();
    return standin_from_lane(value, lane % width < by ? lane : lane - by);
}
template <class T> static inline T __shfl_down(T value, unsigned by, int width = warpSize) {
    unsigned lane = standin_lane();
    return standin_from_lane(value, lane % width + by < unsigned(width) ? lane + by : lane);
}
template <class T> static inline T __shfl_xor(T value, int mask, int width = warpSize) {
    unsigned lane = standin_lane(), to = lane ^ mask;
    return standin_from_lane(value, to / width == lane / width ? to : lane);
}
// All lanes of a warp must take part here, whatever the mask.
#define STANDIN_SYNC(name)                                                            \
    template <class T, class... A>                                                     \
    static inline T name##_sync(uint64_t, T value, A... rest) {                        \
        return name(value, rest...);                                                   \
    }
STANDIN_SYNC(__shfl)
STANDIN_SYNC(__shfl_up)
STANDIN_SYNC(__shfl_down)
STANDIN_SYNC(__shfl_xor)

// ------------------------------------------------------------------ atomics

template <class T> using standin_bits = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;

template <class T, class F> static inline T standin_atomic(T *at, F changed) {
    using Bits = standin_bits<T>;
    static_assert(sizeof(T) == sizeof(Bits));
    Bits old = __atomic_load_n((Bits *)at, __ATOMIC_RELAXED), wanted;
    T value;
    do {
        memcpy(&value, &old, sizeof value);
        T next = changed(value);
        memcpy(&wanted, &next, sizeof wanted);
    } while (!__atomic_compare_exchange_n((Bits *)at, &old, wanted, false, __ATOMIC_SEQ_CST,
                                          __ATOMIC_RELAXED));
    return value;
}
#define STANDIN_ATOMIC(name, expression)                                                        \
    template <class T, class U, class = std::enable_if_t<std::is_arithmetic_v<T>>>               \
    static inline T name(T *at, U operand) {                                                     \
        T by = (T)operand;                                                                       \
        return standin_atomic(at, [by](T old) { return (T)(expression); });                      \
    }
STANDIN_ATOMIC(atomicAdd, old + by)
STANDIN_ATOMIC(atomicSub, old - by)
STANDIN_ATOMIC(atomicMax, old < by ? by : old)
STANDIN_ATOMIC(atomicMin, by < old ? by : old)
STANDIN_ATOMIC(atomicExch, by)
STANDIN_ATOMIC(atomicAnd, old & by)
STANDIN_ATOMIC(atomicOr, old | by)
STANDIN_ATOMIC(atomicXor, old ^ by)
template <class T> static inline T atomicCAS(T *at, T expected, T wanted) {
    return standin_atomic(at, [=](T old) { return old == expected ? wanted : old; });
}

// ------------------------------------------------------------------ numbers

using std::isfinite;
using std::isinf;
using std::isnan;
using std::max;
using std::min;
using std::signbit;
static inline int __popc(unsigned v) { return __builtin_popcount(v); }
static inline int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
static inline int __clz(int v) { return v ? __builtin_clz(v) : 32; }
static inline int __clzll(long long v) { return v ? __builtin_clzll(v) : 64; }
static inline double rsqrt(double x) { return 1 / std::sqrt(x); }
template <class To, class From> static inline To standin_cast(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
static inline long long __double_as_longlong(double v) { return standin_cast<long long>(v); }
static inline double __longlong_as_double(long long v) { return standin_cast<double>(v); }
static inline int __float_as_int(float v) { return standin_cast<int>(v); }
static inline float __int_as_float(int v) { return standin_cast<float>(v); }

struct __half_raw { uint16_t x; };
struct __half {
    uint16_t x;
    __half() = default;
    __half(float v) : x(standin_cast<uint16_t>((_Float16)v)) {}
    explicit __half(__half_raw raw) : x(raw.x) {}
    operator float() const { return (float)standin_cast<_Float16>(x); }
    operator __half_raw() const { return {x}; }
};
typedef __half half;
static inline float __half2float(__half h) { return h; }
static inline __half __float2half(float f) { return __half(f); }
static inline uint16_t __half_as_ushort(__half h) { return h.x; }
static inline __half __ushort_as_half(uint16_t bits) { return __half(__half_raw{bits}); }

#include "launch.h"
