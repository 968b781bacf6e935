// The parts of CUDA that all kernels use, for a C++ compiler.
#pragma once

#include <cmath>
#include <cstring>
#include <functional>
#include <tuple>

#include "../runtime/blocks.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static thread_local

#define threadIdx standin_thread
#define blockIdx standin_block
#define blockDim standin_block_size
#define gridDim standin_grid_size
#define __syncthreads standin_syncthreads

extern "C" void standin_trap(int error);
#define __trap() standin_trap(719)

template <typename To, typename From>
static To same_bits(From x) {
    static_assert(sizeof(To) == sizeof(From), "of one size");
    To y;
    std::memcpy(&y, &x, sizeof y);
    return y;
}
static inline float __int_as_float(int x) { return same_bits<float>(x); }
static inline int __float_as_int(float x) { return same_bits<int>(x); }
static inline float __uint_as_float(unsigned x) { return same_bits<float>(x); }
static inline unsigned __float_as_uint(float x) { return same_bits<unsigned>(x); }
static inline double __longlong_as_double(long long x) { return same_bits<double>(x); }
static inline long long __double_as_longlong(double x) { return same_bits<long long>(x); }
static inline double __hiloint2double(int high, int low) {
    return same_bits<double>(static_cast<long long>(high) << 32 | static_cast<unsigned>(low));
}
static inline int __double2hiint(double x) { return static_cast<int>(same_bits<long long>(x) >> 32); }
static inline int __double2loint(double x) { return static_cast<int>(same_bits<long long>(x)); }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
static inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
static inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned long long>(a) * b >> 32; }

template <typename T>
static T standin_add(T* address, T value) {
    T before = *address;
    *address += value;
    return before;
}
template <typename T>
static T standin_swap(T* address, T expected, T value) {
    T before = *address;
    if (before == expected) *address = value;
    return before;
}
