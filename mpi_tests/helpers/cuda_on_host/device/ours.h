// Further parts of CUDA that our own kernels use.  As on a GPU, vector accesses fail at addresses that are not multiples
// of 16.
#pragma once

#include "kernel.h"

#define atomicAdd standin_add

struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
static const int MISALIGNED_ADDRESS = 716;

static inline uint4 __ldcs(const uint4* address) {
    if (reinterpret_cast<size_t>(address) % sizeof(uint4)) standin_trap(MISALIGNED_ADDRESS);
    uint4 value;
    std::memcpy(&value, address, sizeof value);
    return value;
}
static inline void __stcs(uint4* address, uint4 value) {
    if (reinterpret_cast<size_t>(address) % sizeof value) standin_trap(MISALIGNED_ADDRESS);
    std::memcpy(address, &value, sizeof value);
}
static inline long long __double2ll_rn(double x) { return std::llrint(x); }
static inline double float_to_double(float x) { return x; }
static inline float double_to_float(double x) { return static_cast<float>(x); }
static inline float half_to_float(unsigned short bits) { return same_bits<_Float16>(bits); }
static inline unsigned short float_to_half(float x) { return same_bits<unsigned short>(static_cast<_Float16>(x)); }
static inline unsigned short double_to_half(double x) { return same_bits<unsigned short>(static_cast<_Float16>(x)); }

static inline void __nanosleep(unsigned) { standin_sleep(); }
static inline unsigned add_acquire_release(unsigned* to, unsigned value) {
    return __atomic_fetch_add(to, value, __ATOMIC_ACQ_REL);
}
static inline void store_release(unsigned long long* to, unsigned long long value) {
    __atomic_store_n(to, value, __ATOMIC_RELEASE);
}
template <typename T>
static T load_acquire(const T* from) {
    return __atomic_load_n(from, __ATOMIC_ACQUIRE);
}
static inline void store_relaxed(unsigned long long* to, unsigned long long value) {
    __atomic_store_n(to, value, __ATOMIC_RELAXED);
}
static inline unsigned long long load_relaxed(const unsigned long long* from) {
    return __atomic_load_n(from, __ATOMIC_RELAXED);
}
