// The sum of the squares of several arrays, each square rounded to an integer, as exact_kernels.squares computes it.
// It is compiled after collectives/arrays/cuda_kernels.cu, and on the same conditions.

struct Array {  // as parallelism/numerics/device_squares.py lays it out
    unsigned long long address;
    long long count;
};

__device__ double widened(float x) { return float_to_double(x); }
__device__ double widened(double x) { return x; }

// Block (x, y) adds some of the elements of array y.
template <typename T>
__global__ void squares(const Array* arrays, const double* scale, int limb, unsigned long long* sums) {
    __shared__ unsigned long long of_block[2];
    if (threadIdx.x == 0) of_block[0] = of_block[1] = 0;
    __syncthreads();
    const Array array = arrays[blockIdx.y];
    const T* x = reinterpret_cast<const T*>(array.address);
    const long long step = static_cast<long long>(gridDim.x) * blockDim.x;
    const double factor = *scale;
    unsigned long long high = 0, low = 0;
#pragma unroll 8
    for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < array.count; i += step) {
        double y = widened(x[i]) * factor;
        long long square = __double2ll_rn(y * y);
        high += static_cast<unsigned long long>(square >> limb);
        low += square & ((1LL << limb) - 1);
    }
    if (high) atomicAdd(&of_block[0], high);
    if (low) atomicAdd(&of_block[1], low);
    __syncthreads();
    if (threadIdx.x < 2 && of_block[threadIdx.x]) atomicAdd(&sums[threadIdx.x], of_block[threadIdx.x]);
}
