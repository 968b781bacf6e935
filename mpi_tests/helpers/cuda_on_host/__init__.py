"""Real CuPy on a machine without a GPU: a stand-in for CUDA whose devices are this machine's memory and threads.

CuPy's wheel is unchanged.  `patch` overwrites the functions of the CUDA runtime that is linked into it by jumps to the
stand-in's; `load` loads the stand-in's driver and NVRTC under the names that CuPy looks up.  They are written in C++
(runtime/, nvrtc.cc) and compiled once (`build`).  Kernels, CuPy's and ours, are compiled as C++, too, with device/ in
place of CUDA's headers.

The stand-in exposes errors that a review of the code misses.  Each stream is a thread with random lags, which end when
a caller waits for it; an event's wait covers the work recorded when the wait was called; memory and events are shared
between processes by handles; new and freed memory holds implausible numbers.  Calls that CUDA refuses are refused;
undefined behaviour, such as freeing memory that other processes have open, is reported and counted.

`python -m mpi_tests.helpers.cuda_on_host collectives.doctor` runs a module, and the processes that it starts, with the
stand-in.  Environment variables, with their defaults: CUDA_ON_HOST_DEVICES, the number of devices (1);
CUDA_ON_HOST_DELAY_US, the longest lag (1000); CUDA_ON_HOST_SEED of the lags (0); CUDA_ON_HOST_MEMORY_MB of a process
(2048).

Not implemented: asynchronous memory pools, managed memory, textures, CUB, Thrust, cuBLAS and similar libraries,
cooperative groups, warp-level functions.  The operations of a graph run in the order of their capture.
"""
