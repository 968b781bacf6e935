// A direct schedule as one kernel: its phases, separated by barriers of all ranks, without the host.
//
// It follows cuda_kernels.cu.  Ranks count a channel's barriers, from the first run to the last.  A rank's blocks count
// their arrivals in its own memory; the last one writes the barrier's number to each rank's memory, where the blocks of
// that rank wait for it.  All blocks must be resident on the device at the same time: there are few of them.
//
// The number comes with the key of the run: if ranks reach a run's first barrier from different ones, all of them end
// there, and so do a rank's later runs on the channel, until its host resets the mismatch.
//
// Source: NVIDIA, Parallel Thread Execution ISA, "Memory Consistency Model"; vLLM, csrc/custom_all_reduce.cuh.

enum StepKind { BARRIER, COPY, REDUCE };

struct Step {  // as collectives/arrays/cuda_programs.py lays it out
    Task task;
    unsigned long long kind;
};

struct Flag {
    unsigned long long key;  // of the run, 0 if the rank runs no call
    unsigned number, unused;
};

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
__device__ void store_release(unsigned* to, unsigned value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" : : "l"(to), "r"(value) : "memory");
}
__device__ unsigned load_acquire(const unsigned* from) {
    unsigned value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
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
    const unsigned long long first = number % 2 * channel.num_ranks;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence_system();
        if (atomicAdd(channel.state + BLOCKS, 1u) + 1 == gridDim.x) {
            __threadfence_system();
            channel.state[BLOCKS] = 0;
            channel.state[BARRIERS] = number;
            for (int rank = 0; rank < channel.num_ranks; rank++) {
                store_relaxed(&channel.signals[rank][first].key, key);
                store_release(&channel.signals[rank][first].number, number);
            }
        }
    }
    for (int rank = threadIdx.x; rank < channel.num_ranks; rank += blockDim.x)
        while (static_cast<int>(load_acquire(&channel.arrivals[first + rank].number) - number) < 0) __nanosleep(20);
    __syncthreads();
}

// Return whether all ranks have reached the barrier of that number from the same run.
__device__ bool agree(const Channel& channel, unsigned number, unsigned long long key) {
    bool same = true;
    for (int rank = 0; rank < channel.num_ranks; rank++)
        same &= load_relaxed(&channel.arrivals[number % 2 * channel.num_ranks + rank].key) == key;
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
