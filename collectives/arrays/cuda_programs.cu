// A direct schedule as one kernel: its phases, and barriers of all ranks between them, without the host.
//
// It follows cuda_kernels.cu.  Ranks count barriers, from the first run to the last.  A rank's blocks count in its own
// memory how many have arrived; the last one writes the barrier's number into each rank's memory, where the blocks of
// that rank wait for it.  All blocks must be on the device at once: there are few of them.
//
// Source: NVIDIA, Parallel Thread Execution ISA, "Memory Consistency Model"; vLLM, csrc/custom_all_reduce.cuh.

enum StepKind { BARRIER, COPY, FOLD };

struct Step {  // as collectives/arrays/cuda_programs.py lays it out
    Task task;
    unsigned long long kind;
};

struct Program {
    const Step* steps;                // of both turns, one after the other
    unsigned long long num_steps;     // of a turn
    unsigned long long num_turns;     // 1 where both are the same
    unsigned long long num_barriers;  // of a turn
    unsigned* counters;               // blocks that have arrived, and runs that are over, from the first run on
    unsigned long long num_ranks;
    const unsigned* arrivals;  // the last barrier of each rank, in this rank's memory
    unsigned* signals[64];     // where this rank's stands, in the memory of each
};

#ifdef __CUDACC__
__device__ void store_release(unsigned* to, unsigned value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" : : "l"(to), "r"(value) : "memory");
}
__device__ unsigned load_acquire(const unsigned* from) {
    unsigned value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}
#endif

// Wait until all blocks of all ranks have come to the barrier of that number.  The last block counts the run, if `is_last`.
__device__ void barrier(const Program& program, unsigned number, bool is_last) {
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence_system();
        if (atomicAdd(program.counters, 1u) + 1 == number * gridDim.x) {
            __threadfence_system();
            if (is_last) program.counters[1]++;
            for (int rank = 0; rank < program.num_ranks; rank++) store_release(program.signals[rank], number);
        }
    }
    for (int rank = threadIdx.x; rank < program.num_ranks; rank += blockDim.x)
        while (static_cast<int>(load_acquire(program.arrivals + rank) - number) < 0) __nanosleep(20);
    __syncthreads();
}

template <typename Op, typename T, int SOURCES> __global__ void run(const Program program) {
    const unsigned runs = load_acquire(program.counters + 1);
    unsigned number = runs * program.num_barriers;
    const Step* step = program.steps + runs % program.num_turns * program.num_steps;
    for (int i = 0; i < program.num_steps; i++, step++) {
        if (step->kind == BARRIER) {
            number++;
            barrier(program, number, number == (runs + 1) * static_cast<unsigned>(program.num_barriers));
        } else if (step->kind == COPY) {
            fold_part<Sum, unsigned char, unsigned char, 1>(step->task, this_thread(), num_threads());
        } else {
            fold_part<Op, T, T, SOURCES>(step->task, this_thread(), num_threads());
        }
    }
}
