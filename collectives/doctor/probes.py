"""What the doctor has a child do, since it could crash or hang; `python -m collectives.doctor.probes NAME`."""

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from collectives import job
from collectives.doctor import child

PING_BYTES = (4, 1 << 22)  # sent at once, and by arrangement
IPC_BYTES, IPC_BYTE = 1 << 20, 0x5A


def say(**message: Any) -> None:
    """A line for the parent, in one piece, though other ranks write, too."""
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def library() -> None:
    """Which MPI mpi4py loads; it is not started."""
    import mpi4py

    mpi4py.rc.initialize = False
    from mpi4py import MPI

    say(library=job.library_name(MPI))


def numba() -> None:
    """Compile something, and say where the kernels are kept."""
    from collectives import kernels

    kernels.njit(lambda x: x + 1)(1)
    say(cache=str(kernels.run.stats.cache_path))


def cuda_devices() -> None:
    """Which CUDA devices there are; each adds up a few numbers, which takes a compiled kernel."""
    import cupy

    runtime = cupy.cuda.runtime
    say(driver=runtime.driverGetVersion(), runtime=runtime.runtimeGetVersion())
    for index in range(runtime.getDeviceCount()):
        with cupy.cuda.Device(index) as device:
            name, memory = runtime.getDeviceProperties(index)["name"].decode(), device.mem_info[1]
            say(device=index, name=name, memory=memory, mode=device.attributes.get("ComputeMode", 0))
            say(adds=int(cupy.arange(5).sum()) == 10)


def cuda_ipc() -> None:
    """Whether another process, which uses the next device if there is one, reads memory of this one."""
    import cupy

    memory = cupy.cuda.MemoryPointer(cupy.cuda.Memory(IPC_BYTES), 0)  # of no pool: it begins an allocation
    memory.memset(IPC_BYTE, IPC_BYTES)
    cupy.cuda.Device().synchronize()
    handle = cupy.cuda.runtime.ipcGetMemHandle(memory.ptr).hex()
    subprocess.run(child.probe("cuda_ipc_reader", handle), check=True)


def cuda_ipc_reader(handle: str) -> None:
    import cupy

    runtime = cupy.cuda.runtime
    runtime.setDevice(1 % runtime.getDeviceCount())
    pointer = runtime.ipcOpenMemHandle(bytes.fromhex(handle))
    memory = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(pointer, IPC_BYTES, None), 0)
    found = cupy.ndarray(IPC_BYTES, "uint8", memory).get()
    runtime.ipcCloseMemHandle(pointer)
    say(read=bool((found == IPC_BYTE).all()))


def cuda_ping() -> None:
    """Send device memory to the other rank and back; where MPI cannot, it may well end this process."""
    import cupy

    mpi = job.start_mpi()
    comm = mpi.COMM_WORLD
    assert comm.size == 2, f"{comm.size} ranks instead of 2"
    cupy.cuda.runtime.setDevice(comm.rank % cupy.cuda.runtime.getDeviceCount())
    for nbytes in PING_BYTES:
        numbers = cupy.arange(nbytes // 4, dtype="int32")
        x = numbers + 1 if comm.rank == 0 else cupy.zeros_like(numbers)
        cupy.cuda.Device().synchronize()
        if comm.rank == 0:
            comm.Send(x, 1)
            comm.Recv(x, 1)
            say(ping=nbytes, right=bool((x == numbers + 2).all()))
        else:
            comm.Recv(x, 0)
            x += 1
            cupy.cuda.Device().synchronize()
            comm.Send(x, 0)


PROBES: dict[str, Callable[..., None]] = {
    probe.__name__: probe for probe in (library, numba, cuda_devices, cuda_ipc, cuda_ipc_reader, cuda_ping)
}

if __name__ == "__main__":
    PROBES[sys.argv[1]](*sys.argv[2:])
