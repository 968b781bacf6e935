"""CUDA devices, CUDA IPC, and whether MPI reads device memory: what a child has shown, not what a library says."""

from collections.abc import Iterator
from importlib.util import find_spec

from collectives import environment
from collectives.doctor import child
from collectives.doctor.child import Ended
from collectives.doctor.finding import Finding, Setting, note, ok, one_line, problem
from collectives.doctor.launch import find_mpirun
from collectives.doctor.memory import show_bytes

INSTALL = "pip install '.[cuda12]' or '.[cuda13]'"
MODES = {1: "exclusive", 2: "prohibited", 3: "exclusive to a process"}


def has_gpu(setting: Setting) -> bool:
    """Whether there is hardware, by the system's own files."""
    return any((setting.root / "dev").glob("nvidia[0-9]*")) or any((setting.root / "proc/driver/nvidia").glob("gpus/*"))


def cuda(setting: Setting) -> Iterator[Finding]:
    """The devices; and, where there are some, what processes and MPI do with their memory."""
    if find_spec("cupy") is None:
        if has_gpu(setting):
            yield note("there is an NVIDIA device, but no CuPy", f"to use it, {INSTALL}")
        else:
            yield ok("no NVIDIA device, no CuPy")
        return
    ended = child.run(child.probe("cuda_devices"), setting.limit_s, child.fresh_environment())
    yield from devices(ended, has_gpu(setting))
    if any("device" in message for message in ended.messages()):
        yield ipc(child.run(child.probe("cuda_ipc"), setting.limit_s, child.fresh_environment()))
        yield aware(ping(setting), environment.mpi_reads_device_memory())


def devices(ended: Ended, hardware: bool) -> Iterator[Finding]:
    """What the child has found, one finding a device."""
    if ended.how and not hardware:
        yield ok(f"no NVIDIA device (CuPy: {one_line(ended.errors) or ended.how})")
        return
    messages = ended.messages()
    found = [message for message in messages if "device" in message]
    for message in found:
        words = f"device {message['device']}: {message['name']}, {show_bytes(message['memory'])}"
        if message["mode"] in MODES:
            remedy = "nvidia-smi -c DEFAULT as root, so that ranks can share it"
            yield note(f"{words}, its compute mode is {MODES[message['mode']]}", remedy)
        else:
            yield ok(words)
    if ended.how or not all(message["adds"] for message in messages if "adds" in message):
        remedy = "see that nvidia-smi works, that the driver is new enough for CuPy, and CUDA's headers are installed"
        yield problem(f"CuPy does not work on a device: {ended if ended.how else 'wrong sums'}", remedy)
    elif not found:
        yield note("no device is visible", "see CUDA_VISIBLE_DEVICES, and what the scheduler was asked for")


def ipc(ended: Ended) -> Finding:
    """What the child has shown of CUDA IPC."""
    if not ended.how and any(message.get("read") for message in ended.messages()):
        return ok("a process reads another's device memory (CUDA IPC)")
    words = f"no process reads another's device memory (CUDA IPC): {ended if ended.how else 'wrong numbers'}"
    return note(words, "in a container, share the host's IPC and PID namespaces; MIG devices have none")


def ping(setting: Setting) -> Ended:
    """Of two ranks of this host, in a job of their own."""
    path = find_mpirun()
    if path is None:
        return Ended("not tried, without an mpirun", "", "")
    return child.run([path, "-n", "2", *child.probe("cuda_ping")], setting.limit_s, child.fresh_environment())


def aware(ended: Ended, asked: bool) -> Finding:
    """Whether MPI may be given device memory, from how the ping went, and whether it is asked to be."""
    pings = [message["right"] for message in ended.messages() if "ping" in message]
    if not ended.how and pings and all(pings):
        if asked:
            return ok("MPI is CUDA-aware (a ping of device memory came back), and COLLECTIVES_CUDA_AWARE=1 uses that")
        words = "MPI is CUDA-aware (a ping of device memory came back), but is given pinned host memory"
        return note(words, "COLLECTIVES_CUDA_AWARE=1 gives it device memory")
    why = ended.how or ("wrong numbers came back" if pings else "none came back")
    words = f"MPI is not CUDA-aware: a ping of device memory: {why}"
    if asked:
        return problem(f"{words}; COLLECTIVES_CUDA_AWARE=1 would end jobs so", "unset COLLECTIVES_CUDA_AWARE")
    remedy = "nothing to do; with a CUDA-aware MPI, COLLECTIVES_CUDA_AWARE=1 saves that"
    return note(f"{words}; arrays go by way of pinned host memory", remedy)
