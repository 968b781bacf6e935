// Threads of a kernel: the threads of a block take turns on one host thread, and yield when they wait.
#pragma once

#include <functional>

struct Dim3 {
    unsigned x, y, z;
};
extern "C" {
extern __thread Dim3 standin_thread, standin_block, standin_block_size, standin_grid_size;
void standin_syncthreads();
void standin_sleep();
}

void run_grid(Dim3 grid, Dim3 block, const std::function<void()>& body);
