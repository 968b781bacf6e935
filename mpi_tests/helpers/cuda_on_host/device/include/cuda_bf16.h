// The part of CUDA's bfloat16 that CuPy's kernels use.
#pragma once

struct __nv_bfloat16_raw {
    unsigned short x;
};
struct __nv_bfloat16 {
    unsigned short bits;

    __nv_bfloat16() = default;
    __nv_bfloat16(const __nv_bfloat16_raw& raw) : bits(raw.x) {}
    __nv_bfloat16(float x) {  // round to nearest, ties to even
        unsigned all = same_bits<unsigned>(x);
        bits = x != x ? 0x7fff : (all + 0x7fff + (all >> 16 & 1)) >> 16;
    }
    operator float() const { return same_bits<float>(static_cast<unsigned>(bits) << 16); }
    operator __nv_bfloat16_raw() const { return {bits}; }
};

static inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) { return x.bits; }
static inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) { return __nv_bfloat16_raw{bits}; }
