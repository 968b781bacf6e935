// A direct schedule as one kernel: its phases, separated by barriers of all ranks, without the host.
//
// It follows cuda_kernels.cu.  Ranks count a channel's barriers, from the first run to the last.  A rank's blocks count
// their arrivals in its own memory; the threads of the last one write the barrier's number to all ranks' memory at
// once, where the blocks of those ranks wait for it.  All blocks must be resident on the device at the same time: there
// are few of them.
//
// The number and the key of the run are one word: if ranks reach a run's first barrier from different ones, all of them
// end there, and so do a rank's later runs on the channel, until its host resets the mismatch.
//
// Source: NVIDIA, Parallel Thread Execution ISA, "Memory Consistency Model"; vLLM, csrc/custom_all_reduce.cuh.

enum StepKind { BARRIER, COPY, REDUCE };

struct Step {  // as collectives/arrays/cuda_programs.py lays it out
    Task task;
    unsigned long long kind;
};

// A rank's arrival: the key of its run, 0 if the rank runs no call, and in the lowest 16 bits the barrier's number.  A
// rank is at most one barrier ahead of another.
typedef unsigned long long Flag;
const int NUMBER_BITS = 16;

enum ChannelState { BLOCKS, BARRIERS, DIFFERED };  // at the current barrier; passed so far; 1 after a mismatch

struct Channel {
    unsigned* state;
    unsigned long long* failure;  // in the host's memory: the number of the run in which ranks have differed
    unsigned long long num_ranks;
    const Flag* arrivals;  // of each rank at the latest even barrier, then at the latest odd one
    Flag* signals[64];     // this rank's flags, in the memory of each rank
};

struct Program {
    const Step* steps;                // of both turns, one after the other
    unsigned long long num_steps;     // of a turn
    unsigned long long num_turns;     // 1 if both are the same
    unsigned long long num_barriers;  // of a turn
    unsigned* runs;                   // completed so far
    unsigned long long key, number;   // of this run
    Channel channel;
};

#ifdef __CUDACC__
__device__ void store_release(unsigned long long* to, unsigned long long value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" : : "l"(to), "l"(value) : "memory");
}
__device__ unsigned add_acquire_release(unsigned* to, unsigned value) {
    unsigned before;
    asm volatile("atom.acq_rel.sys.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(to), "r"(value) : "memory");
    return before;
}
__device__ unsigned load_acquire(const unsigned* from) {
    unsigned value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}
__device__ unsigned long long load_acquire(const unsigned long long* from) {
    unsigned long long value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
    return value;
}
__device__ void store_relaxed(unsigned long long* to, unsigned long long value) {
    asm volatile("st.relaxed.sys.u64 [%0], %1;" : : "l"(to), "l"(value) : "memory");
}
__device__ unsigned long long load_relaxed(const unsigned long long* from) {
    unsigned long long value;
    asm volatile("ld.relaxed.sys.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
    return value;
}
#endif

// Wait until all blocks of all ranks have reached the barrier of that number.
__device__ void barrier(const Channel& channel, unsigned number, unsigned long long key) {
    __shared__ bool is_last;  // of this rank's blocks
    const unsigned long long first = number % 2 * channel.num_ranks;
    const Flag flag = key << NUMBER_BITS | (number & ((1u << NUMBER_BITS) - 1));
    __syncthreads();
    if (threadIdx.x == 0) {
        is_last = add_acquire_release(channel.state + BLOCKS, 1) + 1 == gridDim.x;
        if (is_last) {
            channel.state[BLOCKS] = 0;
            channel.state[BARRIERS] = number;
        }
    }
    __syncthreads();
    if (is_last)
        for (int rank = threadIdx.x; rank < channel.num_ranks; rank += blockDim.x)
            store_release(channel.signals[rank] + first, flag);
    for (int rank = threadIdx.x; rank < channel.num_ranks; rank += blockDim.x)
        while (static_cast<short>(load_acquire(channel.arrivals + first + rank) - number) < 0) __nanosleep(20);
    __syncthreads();
}

// Return whether all ranks have reached the barrier of that number from the same run.
__device__ bool agree(const Channel& channel, unsigned number, unsigned long long key) {
    bool same = true;
    for (int rank = 0; rank < channel.num_ranks; rank++)
        same &= load_relaxed(channel.arrivals + number % 2 * channel.num_ranks + rank) >> NUMBER_BITS == key;
    return same;
}

template <typename Op, typename T, int SOURCES> __global__ void run(const Program program) {
    const Channel& channel = program.channel;
    if (load_acquire(channel.state + DIFFERED)) return;
    const unsigned runs = load_acquire(program.runs), before = load_acquire(channel.state + BARRIERS);
    unsigned number = before;
    const Step* step = program.steps + runs % program.num_turns * program.num_steps;
    for (int i = 0; i < program.num_steps; i++, step++) {
        if (step->kind == BARRIER) {
            number++;
            barrier(channel, number, program.key);
            if (number == before + 1 && !agree(channel, number, program.key)) {
                if (this_thread() == 0 && program.key) {
                    channel.state[DIFFERED] = 1;
                    store_relaxed(channel.failure, program.number);
                }
                return;
            }
            if (number == before + program.num_barriers && this_thread() == 0) *program.runs = runs + 1;
        } else if (step->kind == COPY) {
            reduce_part<Sum, unsigned char, unsigned char, 1>(step->task, this_thread(), num_threads());
        } else {
            reduce_part<Op, T, T, SOURCES>(step->task, this_thread(), num_threads());
        }
    }
}
