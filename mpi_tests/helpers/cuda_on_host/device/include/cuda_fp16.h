// The part of CUDA's float16 that CuPy's kernels use.
#pragma once

struct __half_raw {
    unsigned short x;
};
struct __half {
    unsigned short bits;

    __half() = default;
    __half(const __half_raw& raw) : bits(raw.x) {}
    template <typename T>
    explicit __half(T x) : bits(same_bits<unsigned short>(static_cast<_Float16>(x))) {}
    __half(float x) : bits(same_bits<unsigned short>(static_cast<_Float16>(x))) {}
    operator float() const { return same_bits<_Float16>(bits); }
    operator __half_raw() const { return {bits}; }
};
using half = __half;

static inline unsigned short __half_as_ushort(__half x) { return x.bits; }
static inline __half __ushort_as_half(unsigned short bits) { return __half_raw{bits}; }
