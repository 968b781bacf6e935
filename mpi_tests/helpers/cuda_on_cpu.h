// What kernels take from CUDA, for a C++ compiler: threads run one after the other, so they may not wait for each other.

#include <cstring>

#define __global__
#define __device__

struct alignas(16) uint4 { unsigned x, y, z, w; };
struct Place { unsigned x; };
static thread_local Place blockIdx, threadIdx, gridDim, blockDim;

// A GPU fails at addresses that 16 doesn't divide: here they are counted.
static long num_misaligned;
extern "C" long misaligned() { return num_misaligned; }
static uint4 __ldcs(const uint4* address) {
    uint4 value;
    num_misaligned += reinterpret_cast<size_t>(address) % sizeof value != 0;
    std::memcpy(&value, address, sizeof value);
    return value;
}
static void __stcs(uint4* address, uint4 value) {
    num_misaligned += reinterpret_cast<size_t>(address) % sizeof value != 0;
    std::memcpy(address, &value, sizeof value);
}

template <typename To, typename From> static To same_bits(From x) {
    static_assert(sizeof(To) == sizeof(From), "of one size");
    To y;
    std::memcpy(&y, &x, sizeof y);
    return y;
}
static float __uint_as_float(unsigned bits) { return same_bits<float>(bits); }
static unsigned __float_as_uint(float x) { return same_bits<unsigned>(x); }
static double float_to_double(float x) { return x; }
static float double_to_float(double x) { return static_cast<float>(x); }
static float half_to_float(unsigned short bits) { return same_bits<_Float16>(bits); }
static unsigned short float_to_half(float x) { return same_bits<unsigned short>(static_cast<_Float16>(x)); }
static unsigned short double_to_half(double x) { return same_bits<unsigned short>(static_cast<_Float16>(x)); }

template <typename Kernel, typename Task> static void launch(Kernel kernel, const Task* task, unsigned grid, unsigned block) {
    gridDim.x = grid;
    blockDim.x = block;
    for (blockIdx.x = 0; blockIdx.x < grid; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < block; threadIdx.x++) kernel(*task);
}
