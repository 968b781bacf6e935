"""The stand-in for CUDA is as asynchronous, strict and exact as tests need."""

import subprocess
import sys
import threading

import numpy as np
import pytest

from mpi_tests.helpers.cuda_on_host import load as loading
from mpi_tests.helpers.cuda_on_host.load import SITE
from mpi_tests.helpers.launch import ROOT, environment

LATE_US = 50_000


@pytest.fixture
def runtime(cuda):
    return cuda.cupy.cuda.runtime


def refusals(cuda):
    """Return the error types of CUDA's runtime and of its driver."""
    return cuda.cupy.cuda.runtime.CUDARuntimeError, cuda.cupy.cuda.driver.CUDADriverError


def new_stream(cuda, **options):
    return cuda.cupy.cuda.Stream(non_blocking=True, **options)


def fill_late(cuda, x, value, stream):
    """Let a stream fill an array after a lag, which ends when a caller waits for it."""
    cuda.lag(LATE_US)
    x.set(np.full(x.shape, value, x.dtype), stream)


def test_reductions_wait_for_all_threads_of_a_block(cuda):
    x = np.random.default_rng(0).integers(0, 100, (30, 700))
    y = cuda.put(x)
    assert int(y.sum()) == x.sum()
    assert (y.max(axis=1).get() == x.max(axis=1)).all()


def test_who_does_not_wait_is_too_early(cuda):
    x, first, second = cuda.put(np.zeros(1000)), new_stream(cuda), new_stream(cuda)
    cuda.stream.synchronize()
    right = []
    for value in range(1, 9):
        fill_late(cuda, x, value, first)
        right.append((x.get(second) == value).all())
    assert not all(right)


def test_an_event_is_what_it_was_when_the_wait_was_called(cuda):
    x, first, second = cuda.put(np.zeros(1000)), new_stream(cuda), new_stream(cuda)
    cuda.stream.synchronize()
    event = cuda.cupy.cuda.Event(disable_timing=True)
    second.wait_event(event)  # never recorded: there is nothing to wait for
    second.synchronize()
    gate = threading.Event()
    event.record(first)
    second.wait_event(event)
    first.launch_host_func(lambda _: gate.wait(60), None)
    event.record(first)
    second.synchronize()  # not for the work before the second recording
    assert not event.done
    gate.set()
    for value in range(1, 5):
        fill_late(cuda, x, value, first)
        event.record(first)
        second.wait_event(event)
        assert (x.get(second) == value).all()


def test_the_default_stream_waits_for_blocking_ones_and_they_for_it(cuda):
    x, blocking = cuda.put(np.zeros(1000)), cuda.cupy.cuda.Stream()
    cuda.stream.synchronize()
    for value in range(1, 5):
        fill_late(cuda, x, value, blocking)
        assert (x.get(cuda.cupy.cuda.Stream.null) == value).all()
        fill_late(cuda, x, -value, cuda.cupy.cuda.Stream.null)
        assert (x.get(blocking) == -value).all()


def test_a_graph_does_what_was_captured_each_time(cuda):
    x, stream, other = cuda.put(np.zeros(100)), new_stream(cuda), new_stream(cuda)
    cuda.stream.synchronize()
    with stream:
        x += 0  # compiled before the capture
        stream.synchronize()
        stream.begin_capture()
        x += 1
        other.wait_event(stream.record())
        with other:
            x *= 2
        stream.wait_event(other.record())
        graph = stream.end_capture()
        assert (x.get() == 0).all()
        for _ in range(3):
            graph.launch()
        assert (x.get() == 14).all()


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (lambda cuda, stream, other: stream.synchronize(), "CaptureUnsupported"),
        (lambda cuda, stream, other: cuda.cupy.cuda.Memory(1 << 21), "CaptureUnsupported"),
        (lambda cuda, stream, other: stream.wait_event(other.record()), "CaptureIsolation"),
    ],
)
def test_what_a_capture_refuses(cuda, work, message):
    stream, other = new_stream(cuda), new_stream(cuda)
    stream.begin_capture(cuda.cupy.cuda.runtime.streamCaptureModeGlobal)
    with pytest.raises(refusals(cuda), match=message):
        work(cuda, stream, other)
    with pytest.raises(refusals(cuda), match="CaptureInvalidated"):
        stream.end_capture()


def test_a_capture_that_is_not_joined(cuda):
    stream, other = new_stream(cuda), new_stream(cuda)
    x = cuda.put(np.zeros(3))
    stream.begin_capture()
    other.wait_event(stream.record())
    cuda.cupy.cuda.runtime.memsetAsync(x.data.ptr, 0, 24, other.ptr)
    with pytest.raises(refusals(cuda), match="CaptureUnjoined"):
        stream.end_capture()


def test_priorities(cuda):
    assert [new_stream(cuda, priority=number).priority for number in (0, -3, -9)] == [0, -3, -5]


def elsewhere(cuda):
    """Return a stream of a device other than the current one."""
    return cuda.streams[1]


@pytest.mark.parametrize(
    "work",
    [
        lambda cuda: cuda.cupy.cuda.Event().record(elsewhere(cuda)),
        lambda cuda: launch_elsewhere(cuda),
        lambda cuda: destroyed_event(cuda),
        lambda cuda: destroyed_stream(cuda),
        lambda cuda: cuda.cupy.cuda.runtime.ipcCloseMemHandle(cuda.put(np.zeros(3)).data.ptr),
        lambda cuda: cuda.cupy.cuda.runtime.ipcGetEventHandle(cuda.cupy.cuda.Event(disable_timing=True).ptr),
        lambda cuda: cuda.cupy.cuda.runtime.ipcOpenMemHandle(b"1 /nowhere".ljust(64, b"\0")),
        lambda cuda: cuda.cupy.cuda.Device(99).use(),
    ],
)
def test_what_cuda_refuses(cuda, work):
    with pytest.raises(refusals(cuda)):
        work(cuda)


def launch_elsewhere(cuda):
    kernel = cuda.cupy.RawKernel('extern "C" __global__ void nothing() {}', "nothing").kernel
    kernel((1,), (1,), ())
    kernel((1,), (1,), (), stream=elsewhere(cuda))


def destroyed_event(cuda):
    runtime = cuda.cupy.cuda.runtime
    event = runtime.eventCreate()
    runtime.eventDestroy(event)
    runtime.streamWaitEvent(cuda.stream.ptr, event)


def destroyed_stream(cuda):
    runtime = cuda.cupy.cuda.runtime
    stream = runtime.streamCreate()
    runtime.streamDestroy(stream)
    runtime.streamSynchronize(stream)


def test_new_and_freed_memory_holds_no_number(cuda, runtime):
    for _ in range(2):
        memory = cuda.cupy.cuda.Memory(4000)
        x = cuda.cupy.ndarray(1000, np.float32, cuda.cupy.cuda.MemoryPointer(memory, 0))
        assert (x.get() > 1e38).all()
        x[:] = 1
        address = memory.ptr
        del x, memory
    assert cuda.cupy.cuda.Memory(4000).ptr == address  # and reused at once


def run(program, **more):
    """Run a program in a new process with the stand-in."""
    paths = {"PYTHONPATH": f"{SITE}:{ROOT}"}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=environment() | paths | more, capture_output=True, text=True, timeout=120)


OPEN = """
import sys, cupy, numpy
address = cupy.cuda.runtime.ipcOpenMemHandle(bytes.fromhex(sys.stdin.readline()))
memory = cupy.cuda.UnownedMemory(address, 12, None)
x = cupy.ndarray(3, numpy.float32, cupy.cuda.MemoryPointer(memory, 0))
print(x.get().tolist(), flush=True)
sys.stdin.readline()
cupy.cuda.runtime.ipcCloseMemHandle(address)
print("closed", flush=True)
sys.stdin.readline()
"""


def test_memory_of_another_process(cuda, runtime, capfd):
    """The memory has the owner's contents; the owner gets a report if it frees memory that others have open."""
    paths = {"PYTHONPATH": f"{SITE}:{ROOT}"}
    for closes in (True, False):
        address = runtime.malloc(1 << 21)
        runtime.memcpy(address, np.arange(3, dtype=np.float32).ctypes.data, 12, runtime.memcpyDefault)
        command = [sys.executable, "-c", OPEN]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, env=environment() | paths, **pipes) as other:
            print(runtime.ipcGetMemHandle(address).hex(), file=other.stdin, flush=True)
            assert other.stdout.readline() == "[0.0, 1.0, 2.0]\n"
            if closes:
                print(file=other.stdin, flush=True)
                assert other.stdout.readline() == "closed\n"
                runtime.free(address)
            else:
                with pytest.raises(refusals(cuda), match="IllegalState"):
                    runtime.free(address)
            other.stdin.close()
    assert cuda.library.standin_num_misuses() == 1
    assert "are freed that other processes have opened 1 times" in capfd.readouterr().err


ILLEGAL = """
import cupy, numpy
x = cupy.zeros(4)
cupy.cuda.runtime.memsetAsync(WHERE, 0, 8, 0)
for work in (cupy.cuda.Device().synchronize, lambda: cupy.cuda.runtime.malloc(8), x.get):
    try:
        work()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        print(str(error).split(":")[0])
"""


def test_an_illegal_address_is_an_error_that_stays(cuda):
    assert run(ILLEGAL.replace("WHERE", "64")).stdout.split() == ["cudaErrorIllegalAddress"] * 3
    assert run(ILLEGAL.replace("WHERE", "x.data.ptr")).stdout == ""


def test_memory_has_an_end(cuda):
    program = "import cupy; cupy.zeros(3 << 20, 'uint8')"
    assert run(program, CUDA_ON_HOST_MEMORY_MB="4").returncode == 0
    assert "OutOfMemoryError" in run(program, CUDA_ON_HOST_MEMORY_MB="2").stderr


def test_a_wheel_that_is_not_known_is_refused(cuda):
    program = (
        "from mpi_tests.helpers.cuda_on_host import load\n"
        "load.FUNCTION_COUNTS = {7: 'CUDA 7'}\n"
        "try: load.load()\n"
        "except load.CannotLoadError as error: print(error)"
    )
    assert run(program).stdout.endswith("has 421 functions of CUDA's runtime; known: 7 of CUDA 7\n")


def test_what_cannot_be_had_is_said(monkeypatch):
    monkeypatch.setattr(loading.platform, "machine", lambda: "aarch64")
    with pytest.raises(loading.CannotLoadError, match="it is for Linux on x86-64"):
        loading.check_machine()
