// Further parts of CUDA that CuPy's kernels use.
#pragma once

#include "kernel.h"

#include <math.h>
#include <stddef.h>

// CUDA's overloads for operands of one type.
#define STANDIN_MIN_MAX(T)                                  \
    static inline T min(T a, T b) { return b < a ? b : a; } \
    static inline T max(T a, T b) { return a < b ? b : a; }
STANDIN_MIN_MAX(int)
STANDIN_MIN_MAX(unsigned)
STANDIN_MIN_MAX(long)
STANDIN_MIN_MAX(unsigned long)
STANDIN_MIN_MAX(long long)
STANDIN_MIN_MAX(unsigned long long)
STANDIN_MIN_MAX(float)
STANDIN_MIN_MAX(double)

#define __CUDACC_VER_MAJOR__ 12  // so that CuPy takes the headers in include/
#include <cuda_bf16.h>
#include <cuda_fp16.h>

using std::isfinite;
using std::isinf;
using std::isnan;
using std::signbit;

#define atomicAdd standin_add
#define atomicCAS standin_swap
