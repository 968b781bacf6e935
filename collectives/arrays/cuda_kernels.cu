// out = sources[0] op sources[1] op ..., elementwise: also a cast, with one source of another dtype.
//
// NVRTC compiles it without any header, and the tests as C++ for the CPU.  Each operation is rounded as on the host: none
// are contracted (--fmad=false), and those of float are in PTX, because CuPy appends -ftz=true, by which all others
// flush subnormal numbers to zero.  16-bit floats are computed in float32, and rounded once.

struct Task {  // as collectives/arrays/cuda_kernels.py lays it out
    unsigned long long sources[64];
    unsigned long long outs[64];
    unsigned long long num_sources, num_outs;
    unsigned long long head, blocks, tail;  // elements before the blocks, blocks, and elements after them
    double divisor;
};

struct Float16 { unsigned short bits; };
struct Bfloat16 { unsigned short bits; };
template <typename T> struct Complex { T real, imag; };

// The host's operators as functions.

template <typename T> __device__ T add(T a, T b) { return a + b; }
template <typename T> __device__ T subtract(T a, T b) { return a - b; }
template <typename T> __device__ T multiply(T a, T b) { return a * b; }
template <typename T> __device__ T divide(T a, T b) { return a / b; }
template <typename T> __device__ bool is_less(T a, T b) { return a < b; }
template <typename T> __device__ bool is_nan(T x) { return x != x; }

#ifdef __CUDACC__  // without it, the tests define the conversions
__device__ float add(float a, float b) {
    float c;
    asm("add.rn.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}
__device__ float subtract(float a, float b) {
    float c;
    asm("sub.rn.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}
__device__ float multiply(float a, float b) {
    float c;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}
__device__ float divide(float a, float b) {
    float c;
    asm("div.rn.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}
__device__ bool is_less(float a, float b) {
    int is;
    asm("{ .reg .pred p; setp.lt.f32 p, %1, %2; selp.s32 %0, 1, 0, p; }" : "=r"(is) : "f"(a), "f"(b));
    return is;
}
__device__ bool is_nan(float x) { return (__float_as_uint(x) & 0x7fffffff) > 0x7f800000; }
__device__ double float_to_double(float x) {
    double y;
    asm("cvt.f64.f32 %0, %1;" : "=d"(y) : "f"(x));
    return y;
}
__device__ float double_to_float(double x) {
    float y;
    asm("cvt.rn.f32.f64 %0, %1;" : "=f"(y) : "d"(x));
    return y;
}
__device__ float half_to_float(unsigned short bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}
__device__ unsigned short float_to_half(float x) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}
__device__ unsigned short double_to_half(double x) {
    unsigned short bits;
    asm("cvt.rn.f16.f64 %0, %1;" : "=h"(bits) : "d"(x));
    return bits;
}
#endif

// The type to compute in: integers of at least 32 bits, which wrap when they are narrowed again.

template <typename T> __device__ T wide(T x) { return x; }
__device__ float wide(Float16 x) { return half_to_float(x.bits); }
__device__ float wide(Bfloat16 x) { return __uint_as_float(static_cast<unsigned>(x.bits) << 16); }
__device__ unsigned wide(unsigned char x) { return x; }
__device__ unsigned wide(unsigned short x) { return x; }

template <typename T> struct To {
    template <typename Wide> static __device__ T of(Wide x) { return static_cast<T>(x); }
};
template <> struct To<float> {
    static __device__ float of(float x) { return x; }
    static __device__ float of(double x) { return double_to_float(x); }
};
template <> struct To<double> {
    static __device__ double of(float x) { return float_to_double(x); }
    static __device__ double of(double x) { return x; }
};
template <> struct To<Float16> {
    static __device__ Float16 of(float x) { return {float_to_half(x)}; }
    static __device__ Float16 of(double x) { return {double_to_half(x)}; }
};
template <> struct To<Bfloat16> {
    static __device__ Bfloat16 of(float x) {  // to nearest, ties to even
        unsigned bits = __float_as_uint(x);
        if (is_nan(x)) return {static_cast<unsigned short>(bits >> 16 | 0x40)};  // stays a NaN
        return {static_cast<unsigned short>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
    }
    static __device__ Bfloat16 of(double x) { return of(double_to_float(x)); }  // as ml_dtypes does
};

struct Plain {
    template <typename Out, typename T> static __device__ T end(T x, double) { return x; }
};
struct Sum : Plain {
    template <typename T> static __device__ T of(T a, T b) { return add(a, b); }
};
struct Avg : Sum {
    template <typename Out> static __device__ float end(float x, double divisor) {
        return divide(x, To<float>::of(divisor));
    }
    template <typename Out> static __device__ double end(double x, double divisor) { return divide(x, divisor); }
    template <typename Out, typename T> static __device__ Out end(T x, double divisor) {  // integers: toward zero
        Out sum = static_cast<Out>(x);
        if (static_cast<Out>(-1) < static_cast<Out>(0))
            return static_cast<Out>(static_cast<long long>(sum) / static_cast<long long>(divisor));
        return static_cast<Out>(static_cast<unsigned long long>(sum) / static_cast<unsigned long long>(divisor));
    }
};
struct Prod : Plain {
    template <typename T> static __device__ T of(T a, T b) { return multiply(a, b); }
    template <typename T> static __device__ Complex<T> of(Complex<T> a, Complex<T> b) {
        return {
            subtract(multiply(a.real, b.real), multiply(a.imag, b.imag)),
            add(multiply(a.real, b.imag), multiply(a.imag, b.real)),
        };
    }
};
struct Min : Plain {  // a NaN wins over a number
    template <typename T> static __device__ T of(T a, T b) { return is_less(a, b) || is_nan(a) ? a : b; }
};
struct Max : Plain {
    template <typename T> static __device__ T of(T a, T b) { return is_less(b, a) || is_nan(a) ? a : b; }
};
struct Band : Plain {
    template <typename T> static __device__ T of(T a, T b) { return a & b; }
};
struct Bor : Plain {
    template <typename T> static __device__ T of(T a, T b) { return a | b; }
};
struct Bxor : Plain {
    template <typename T> static __device__ T of(T a, T b) { return a ^ b; }
};
struct Land : Plain {
    template <typename T> static __device__ T of(T a, T b) { return (a != 0) & (b != 0); }
};
struct Lor : Plain {
    template <typename T> static __device__ T of(T a, T b) { return (a != 0) | (b != 0); }
};
struct Lxor : Plain {
    template <typename T> static __device__ T of(T a, T b) { return (a != 0) ^ (b != 0); }
};

// Adjacent elements, loaded and stored by 16 bytes, without keeping them in a cache: each is used once.

template <typename T, int N> union Block {
    uint4 quads[N * sizeof(T) / sizeof(uint4)];
    T at[N];

    __device__ void load(const T* source) {
#pragma unroll
        for (int i = 0; i < N * sizeof(T) / sizeof(uint4); i++)
            quads[i] = __ldcs(reinterpret_cast<const uint4*>(source) + i);
    }
    __device__ void store(T* out) const {
#pragma unroll
        for (int i = 0; i < N * sizeof(T) / sizeof(uint4); i++) __stcs(reinterpret_cast<uint4*>(out) + i, quads[i]);
    }
};
template <typename T> union Block<T, 1> {
    T at[1];

    __device__ void load(const T* source) { at[0] = *source; }
    __device__ void store(T* out) const { *out = at[0]; }
};

template <typename Op, typename In, typename Out, int SOURCES> struct Reduction {
    using Wide = decltype(wide(In()));

    // Reduce SOURCES sources, and `sums` unless FIRST, into `sums`.  All are loaded before any is used.
    template <int N, int BLOCKS, bool FIRST>
    static __device__ void take(
        Wide (&sums)[BLOCKS][N], const Task& task, int first, unsigned long long at, unsigned long long step
    ) {
        Block<In, N> loaded[SOURCES][BLOCKS];
#pragma unroll
        for (int s = 0; s < SOURCES; s++) {
            const In* source = reinterpret_cast<const In*>(task.sources[first + s]);
#pragma unroll
            for (int b = 0; b < BLOCKS; b++) loaded[s][b].load(source + at + b * step);
        }
#pragma unroll
        for (int s = 0; s < SOURCES; s++)
#pragma unroll
            for (int b = 0; b < BLOCKS; b++)
#pragma unroll
                for (int i = 0; i < N; i++) {
                    Wide x = wide(loaded[s][b].at[i]);
                    sums[b][i] = FIRST && s == 0 ? x : Op::of(sums[b][i], x);
                }
    }

    // Reduce BLOCKS blocks of N elements, the first at element `at`, `step` elements apart.
    template <int N, int BLOCKS>
    static __device__ void reduce(const Task& task, unsigned long long at, unsigned long long step) {
        Wide sums[BLOCKS][N];
        take<N, BLOCKS, true>(sums, task, 0, at, step);
#pragma unroll 1
        for (int first = SOURCES; first < task.num_sources; first += SOURCES)
            take<N, BLOCKS, false>(sums, task, first, at, step);
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) {
            Block<Out, N> result;
#pragma unroll
            for (int i = 0; i < N; i++) result.at[i] = To<Out>::of(Op::template end<Out>(sums[b][i], task.divisor));
#pragma unroll 1
            for (int out = 0; out < task.num_outs; out++)
                result.store(reinterpret_cast<Out*>(task.outs[out]) + at + b * step);
        }
    }
};

// A thread's part of a task, one of `threads`.  The number of sources is a multiple of SOURCES.
template <typename Op, typename In, typename Out, int SOURCES>
__device__ void reduce_part(const Task& task, unsigned long long thread, unsigned long long threads) {
    using Each = Reduction<Op, In, Out, SOURCES>;
    const int N = sizeof(uint4) / (sizeof(In) < sizeof(Out) ? sizeof(In) : sizeof(Out));
    const int BLOCKS = SOURCES <= 2 ? 4 : SOURCES <= 4 ? 2 : 1;  // about 8 loads in flight
    unsigned long long block = thread;
#pragma unroll 1
    for (; block + (BLOCKS - 1) * threads < task.blocks; block += BLOCKS * threads)
        Each::template reduce<N, BLOCKS>(task, task.head + block * N, threads * N);
#pragma unroll 1
    for (; block < task.blocks; block += threads) Each::template reduce<N, 1>(task, task.head + block * N, 0);
#pragma unroll 1
    for (unsigned long long i = thread; i < task.head + task.tail; i += threads)
        Each::template reduce<1, 1>(task, i < task.head ? i : i + task.blocks * N, 0);
}

__device__ unsigned long long this_thread() {
    return blockIdx.x * static_cast<unsigned long long>(blockDim.x) + threadIdx.x;
}
__device__ unsigned long long num_threads() { return gridDim.x * static_cast<unsigned long long>(blockDim.x); }

template <typename Op, typename In, typename Out, int SOURCES> __global__ void reduce(const Task task) {
    reduce_part<Op, In, Out, SOURCES>(task, this_thread(), num_threads());
}
