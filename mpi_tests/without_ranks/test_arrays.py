import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from collectives.arrays import addresses, views
from collectives.arrays.memory import Window, Windows
from collectives.arrays.ops import Op
from collectives.arrays.packing import Packing, pack_tensors
from collectives.runtime.backends import kernels
from collectives.schedule.spec import OPS
from mpi_tests.helpers.reference import COMPLEX, DTYPES, HALVES, INTEGERS, UFUNCS, draw, ops_of


def test_a_flat_view_shares_the_memory():
    for shape in ((), (5,), (2, 3), (0, 4), (1, 1, 2)):
        x = np.zeros(shape)
        device, view = views.flat(x)
        view[:] = 7
        assert device is views.host()
        assert view.shape == (x.size,)
        assert (x == 7).all()
    assert views.flat(np.zeros((4, 2))[1:3])[1].shape == (4,)


def test_the_device_of_an_array_is_its_own(cuda):
    x = cuda.use(1).put(np.ones((2, 3)))
    device, view = views.flat(x)
    assert device.device_name == "cuda:1"
    assert (view.shape, view.data.ptr) == ((6,), x.data.ptr)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        ([1.0], "list is not an array: pass a NumPy or CuPy array or a torch tensor"),
        (np.float32(1), "float32 is not an array: pass "),
        (np.zeros((3, 4))[:, 1:], r"shape \(3, 3\) and strides \(32, 8\) is not C-contiguous: pass a copy of it"),
        (np.zeros((3, 4), order="F"), r"shape \(3, 4\) and strides \(8, 24\) is not C-contiguous"),
        (np.zeros(3, ">i4"), r"dtype >i4 has another machine's byte order: pass x\.astype\(\"int32\"\)"),
        (np.array(["a"]), "dtype <U1 cannot be sent; use one of bfloat16, bool, complex128, .*, uint8$"),
        (np.zeros(2, "f4,f4"), "cannot be sent"),
        (np.zeros(2, "f4,i4,i4"), "cannot be sent"),
    ],
)
def test_what_is_no_array_that_can_be_sent(x, message):
    with pytest.raises(ValueError, match=message):
        views.flat(x)


def test_dtypes():
    assert {str(dtype) for dtype in views.DTYPES} == set(DTYPES)
    for name in DTYPES:
        assert str(views.dtype_of(name)) == name
        assert views.dtype_of(views.dtype_of(name)) == views.dtype_of(name)
    for name, message in (("float8", "dtype 'float8' is unknown; use one of "), ("S3", "dtype |S3 cannot be sent")):
        with pytest.raises(ValueError, match=message):
            views.dtype_of(name)


@pytest.mark.parametrize("dtype", DTYPES)
def test_ops_that_make_sense(dtype):
    for op in OPS:
        if op in ops_of(dtype):
            views.check_op(op, views.dtype_of(dtype))
        else:
            with pytest.raises(ValueError, match=f"op '{op}' of {dtype}.*(use|cast)"):
                views.check_op(op, views.dtype_of(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_reduce_and_divide(dtype):
    low, high = (draw(np.random.default_rng(seed), 50, dtype, 15) for seed in range(2))
    device = views.host()
    for op in ops_of(dtype):
        out = device.empty(50, low.dtype)
        device.reduce(op, low, high, out)
        assert np.array_equal(out, UFUNCS[op](low, high))
    if "avg" in ops_of(dtype):
        out = low.copy()
        device.divide(out, 3)
        wide = low.astype(np.complex128 if dtype in COMPLEX else np.float64) / 3
        wide = np.trunc(wide) if dtype in INTEGERS else wide
        np.testing.assert_allclose(out.astype(wide.dtype), wide, rtol=2.0**-8 if dtype in HALVES else 1e-6)


def test_an_op_that_is_no_function():
    with pytest.raises(ValueError, match=r"^Op\(None\) is not callable: pass a function of two NumPy arrays$"):
        Op(None)


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("divisor", [2, 3, 7, 200])
def test_integers_are_divided_toward_zero(dtype, divisor):
    """The host's and the compiled programs' quotients equal those of Python's unbounded integers."""
    limits = np.iinfo(dtype)
    numbers = [limits.min, limits.min + 1, -8 % 256 if limits.min == 0 else -8, 0, 1, 100, limits.max - 1, limits.max]
    want = [abs(x) // divisor * (1 if x >= 0 else -1) for x in numbers]
    for divide in (views.host().divide, kernels.divide):
        x = np.array(numbers, dtype)
        divide(x, divisor)
        assert x.tolist() == want


def test_reductions_of_infinity_warn_of_nothing():
    x = np.array([np.inf, 6e4, np.nan], np.float16)
    views.host().reduce("sum", x, -x, x)
    assert np.isnan(x).tolist() == [True, False, True]
    huge = np.full(2, 3e38, np.float32)
    views.host().reduce("sum", huge, huge, huge)
    views.host().divide(huge, 2)
    assert np.isinf(huge).all()


def test_same_memory(cuda):
    x = np.zeros(6)
    assert addresses.same_memory(x[2:4], x[2:4])
    assert not addresses.same_memory(x[2:4], x[2:5])
    assert not addresses.same_memory(x[2:4], x[1:3])
    there = cuda.put(x)
    assert addresses.same_memory(there[:3], there[:3])
    assert not addresses.same_memory(there[:3], there[3:])


def test_overlap(cuda):
    x = np.zeros(6)
    for a, b in ((x[:3], x[2:]), (x, x[3:4]), (x[2:3], x), (x, x)):
        assert addresses.overlap(a, b)
    for a, b in ((x[:3], x[3:]), (x[4:], x[:4]), (x, x.copy()), (x, x[3:3]), (x[3:3], x)):
        assert not addresses.overlap(a, b)
    there = cuda.put(x)
    assert addresses.overlap(there[:3], there[2:])
    assert not addresses.overlap(there[:3], there[3:])


def test_devices():
    assert views.device("cpu") is views.host()
    for name in ("tpu", "cuda:x", "cpu:0", "CUDA", ""):
        with pytest.raises(ValueError, match=f"device '{name}' is unknown: use 'cpu', 'cuda' or 'cuda:<index>'"):
            views.device(name)


@pytest.mark.parametrize("name", ["cuda", "cuda:1"])
def test_cuda_where_there_is_none(monkeypatch, name):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ValueError, match=f"device '{name}' needs CuPy: pip install .*cuda12.*or use 'cpu'"):
        views.device(name)
    absent = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: False))
    monkeypatch.setitem(sys.modules, "cupy", absent)
    with pytest.raises(ValueError, match=f"device '{name}': this machine has no CUDA device or driver; use 'cpu'"):
        views.device(name)


def test_cupy_and_torch_are_imported_only_when_asked_for():
    code = (
        "import sys, mpi4py; mpi4py.rc.initialize = False; import numpy, collectives.arrays.views as v; "
        "v.flat(numpy.zeros(3)); print({'cupy', 'torch'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "set()\n"


def test_a_function_is_no_op_until_it_is_wrapped():
    with pytest.raises(ValueError, match=r"op hypot is a function: wrap it, as collectives.Op\(hypot\)"):
        views.check_op(np.hypot, np.dtype("float32"))


def test_windows_that_threads_add_and_remove():
    """One thread looks up a window that stays, while two others add and remove theirs below it."""
    interval_s, windows, is_over = sys.getswitchinterval(), Windows(), threading.Event()
    windows.add(Window(9, 9 << 20, 100, {}, None))

    def change(key):
        for _ in range(2000):
            windows.add(window := Window(key, key << 20, 100, {}, None))
            assert windows.key_at((key << 20) + 99) == key
            windows.remove([window])

    def look():
        while not is_over.is_set():
            assert windows.key_at((9 << 20) + 50) == 9

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(3) as pool:
            looking = pool.submit(look)
            changing = [pool.submit(change, key) for key in (1, 2)]
            errors = [future.exception() for future in changing]
            is_over.set()
            assert [*errors, looking.exception()] == [None] * 3
    finally:
        sys.setswitchinterval(interval_s)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e5m2", "bool"])
def test_pieces_of_memory_are_gathered_and_written_back(dtype):
    whole = torch.arange(24).view(4, 6).to(getattr(torch, dtype))
    pieces = [whole[:, ::2].t(), whole[1, 1::2], whole[3, 5]]
    packing = pack_tensors(pieces)
    packing.load()
    assert packing.array.is_contiguous()
    assert torch.equal(packing.array.float(), torch.cat([piece.float().reshape(-1) for piece in pieces]))
    before = whole.float()
    packing.array.zero_()
    assert torch.equal(whole.float(), before)
    packing.store()
    assert all(not piece.float().any() for piece in pieces)
    assert torch.equal(whole.float()[0, 1::2], before[0, 1::2])


def test_one_contiguous_tensor_is_its_own_packing():
    x = torch.zeros(2, 3)
    assert pack_tensors([x]) == Packing(x)
    assert pack_tensors([x.t()]).array.shape == (3, 2)
