"""Real CuPy on a machine without a GPU: a CUDA whose devices are this machine's memory and threads.

The wheel of CuPy is unchanged.  It has CUDA's runtime linked in, whose functions are overwritten by jumps to ours
(`patch`); it looks up the driver and NVRTC by their names, under which ours are loaded before (`load`).  These are in
C++ (runtime/, nvrtc.cc), compiled once (`build`).  Kernels, CuPy's and ours, are compiled as C++, too, with device/ in
place of CUDA's headers.

What it is made for is to show what no reading does: each stream is a thread that lags behind by times drawn at random,
but not behind who waits for it; events wait for what was recorded when the wait was called; memory and events go from
process to process by handles; new and freed memory holds numbers that can't be right; what CUDA refuses is refused, and
what it leaves undefined, as memory freed that others have open, is said and counted.

`python -m mpi_tests.helpers.cuda_on_host collectives.doctor` runs a module with it, and what that starts.  Environment
variables, each CUDA_ON_HOST_ and: DEVICES, their number (1); DELAY_US, the longest lag (1000); SEED of these (0);
MEMORY_MB of a process (2048).

Not there: asynchronous memory pools, managed memory, textures, CUB, Thrust, cuBLAS and the like, cooperative groups,
warps' own functions.  The order of a graph's work is that of its capture.
"""
