"""Arrays of several dimensions, whose results have the same row shape; strided arrays are packed and written back."""

from functools import partial

import numpy as np
import pytest
import torch

from collectives import InputError
from collectives.arrays.views import to_torch
from mpi_tests.helpers.reference import COLLECTIVES, IN_PLACE, expected, inputs, same

pytestmark = pytest.mark.sizes(2, 3, proof=(1, 5, 8))
GAP = -77
LAYOUTS = {  # views of a multiple of 4 elements, and the arrays that contain them
    "every second": lambda count, dtype: (lambda base: (base, base[1::2]))(np.full(2 * count, GAP, dtype)),
    "columns": lambda count, dtype: (lambda base: (base, base[:, 1:3]))(np.full((count // 2, 4), GAP, dtype)),
    "transposed": lambda count, dtype: (lambda base: (base, base.T))(np.full((count // 4, 4), GAP, dtype)),
    "backwards": lambda count, dtype: (lambda base: (base, base[::-1]))(np.full(count, GAP, dtype)),
    "three axes": lambda count, dtype: (lambda base: (base, base[:, :, ::2]))(np.full((2, 2, count // 2), GAP, dtype)),
}


def filled(layout, values):
    """Return an array of this layout with these values, and the array that contains it."""
    base, view = LAYOUTS[layout](len(values), values.dtype)
    view[...] = values.reshape(view.shape)
    return base, view


def run(comm, collective, x, how, **arguments):
    if how == "call":
        return getattr(comm, collective)(x, **arguments)
    return getattr(comm, collective)(x, blocking=False, **arguments).wait()


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("how", ["call", "started"])
def test_a_view_with_gaps_is_as_good_as_its_copy(comm, collective, layout, how):
    for turn in range(2):
        xs = [values + np.float32(turn) for values in inputs(comm.size, 4 * comm.size)]
        want = expected(collective, xs, comm.rank)
        base, x = filled(layout, xs[comm.rank])
        actual = run(comm, collective, x, how)
        assert (actual is x) == (collective in IN_PLACE)
        same(None if actual is None else np.ravel(actual), want, turn)
        same(base, filled(layout, want if actual is x else xs[comm.rank])[0], "between the elements")


@pytest.mark.parametrize("collective", [each for each in COLLECTIVES if each != "broadcast"])
@pytest.mark.parametrize("how", ["call", "started"])
def test_results_go_into_a_view_with_gaps(comm, collective, how):
    xs = inputs(comm.size, 4 * comm.size)
    want = expected(collective, xs, comm.rank)
    has_result = (collective, comm.rank > 0) not in (("reduce", True), ("gather", True), ("exscan", False))
    out = None
    for layout in LAYOUTS:
        x = xs[comm.rank].copy()
        if has_result:
            base, out = filled(layout, np.zeros_like(want))
        actual = run(comm, collective, x, how, out=out)
        if has_result:
            assert actual is out
            same(base, filled(layout, want)[0], layout)
        same(x, xs[comm.rank], layout)


@pytest.mark.parametrize("how", ["call", "started"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tensors_with_gaps(comm, dtype, how):
    xs = inputs(comm.size, 24, dtype)
    x, out = (to_torch(xs[comm.rank].copy()).view(4, 6).T for _ in range(2))
    gathered = run(comm, "all_gather", x[:, :2], how, axis=0)
    assert isinstance(gathered, torch.Tensor)
    assert gathered.shape == (6 * comm.size, 2)
    every = np.concatenate([values.reshape(4, 6).T[:, :2] for values in xs])
    same(gathered.float().numpy(), every.astype("float32"))
    assert run(comm, "all_reduce", x, how) is x
    want = expected("all_reduce", xs, comm.rank).reshape(4, 6).T
    same(x.float().numpy(), want.astype("float32"))
    assert run(comm, "all_reduce", out, how, out=out[:, :]) is not None
    same(out.float().numpy(), want.astype("float32"))


def test_a_matrix_of_fortran_and_its_rows(comm):
    x = np.asfortranarray(np.arange(6).reshape(2, 3) + 10 * comm.rank)
    every = [np.arange(6).reshape(2, 3) + 10 * rank for rank in range(comm.size)]
    same(comm.all_gather(x), np.stack(every))
    same(comm.all_gather(x, axis=0), np.concatenate(every))


@pytest.mark.sizes(2, 3)
def test_messages_of_views_with_gaps(comm):
    for count in (8, 40_000):
        _, x = filled("columns", np.arange(count, dtype="float32"))
        base, out = filled("every second", np.zeros(count, "float32"))
        if comm.rank == 0:
            comm.send(x, 1)
        elif comm.rank == 1:
            assert comm.recv(out, 0) is out
            same(base, filled("every second", np.arange(count, dtype="float32"))[0])


SHAPES = {  # shapes of each rank's x and of the result on p ranks
    "all_gather": [((), "p"), ((3,), "3 p"), ((2, 3), "p, 2, 3"), ((1, 2, 3), "p, 1, 2, 3")],
    "gather": [((2, 3), "p, 2, 3"), ((1, 2), "p, 1, 2")],
    "reduce_scatter": [(("2 p", 3), "2, 3"), (("p", 2, 2), "1, 2, 2"), (("4 p",), "4"), ((1, "2 p"), "2")],
    "scatter": [(("2 p", 3), "2, 3"), (("4 p",), "4")],
    "all_to_all": [(("2 p", 3), "2 p, 3"), (("4 p",), "4 p"), ((1, "2 p"), "2 p")],
}
WITHOUT_ELEMENTS = {
    "all_gather": [((0, 3), "p, 0, 3"), ((2, 0), "p, 2, 0"), ((0,), "0")],
    "gather": [((0, 3), "p, 0, 3"), ((2, 0), "p, 2, 0")],
    "reduce_scatter": [(("2 p", 0), "2, 0"), ((0, 3), "0, 3")],
    "scatter": [(("2 p", 0), "2, 0"), ((0, 3), "0, 3")],
    "all_to_all": [(("2 p", 0), "2 p, 0"), ((0, 3), "0, 3")],
}


def lengths(shape, size):
    parts = [str(length) for length in shape] if isinstance(shape, tuple) else shape.split(", ")
    return tuple(size * int(part.rstrip("p") or 1) if part.endswith("p") else int(part) for part in parts)


@pytest.mark.parametrize("collective", SHAPES)
@pytest.mark.parametrize("make", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
def test_results_have_rows_like_those_given(comm, collective, make):
    for source, actual in SHAPES[collective] + WITHOUT_ELEMENTS[collective]:
        shape = lengths(source, comm.size)
        xs = [values.reshape(shape) for values in inputs(comm.size, int(np.prod(shape)))]
        want = expected(collective, [x.ravel() for x in xs], comm.rank)
        if (collective, comm.size) in (("reduce_scatter", 1), ("all_to_all", 1)) and shape[0] == 1 and len(shape) == 2:
            actual = "1, 2"  # all elements, in complete rows
        for how in ("call", "call", "started"):
            result = run(comm, collective, make(xs[comm.rank].copy()), how)
            assert (result is None) == (want is None)
            if want is not None:
                same(np.asarray(result), want.reshape(lengths(actual, comm.size)), (source, how))


@pytest.mark.sizes(2, 3)
@pytest.mark.parametrize("how", ["call", "started"])
def test_rows_without_elements_gather_what_other_ranks_have(comm, how):
    counts = [int(rank == 1) for rank in range(comm.size)]
    x = np.full((1, counts[comm.rank]), 7.0)
    for _ in range(3):
        result = run(comm, "all_gather", x, how, counts=counts)
        assert np.array_equal(result.ravel(), [7.0])


@pytest.mark.parametrize("collective", ["all_gather", "gather"])
@pytest.mark.parametrize("how", ["call", "started", "plan"])
def test_gathered_arrays_are_stacked_or_one_after_the_other(comm, collective, how):
    def gathered(**arguments):
        if how != "plan":
            return run(comm, collective, x, how, **arguments)
        plan = comm.plan(collective, x, **arguments)
        return plan()

    xs = [values.reshape(2, 3) for values in inputs(comm.size, 6)]
    x, rows = xs[comm.rank], np.concatenate(xs)
    cases = [({}, np.stack(xs)), ({"axis": 0}, rows), ({"counts": [6] * comm.size}, rows)]
    for arguments, want in cases:
        result = gathered(**arguments)
        assert (result is None) == (collective == "gather" and comm.rank > 0)
        if result is not None:
            same(result, want, arguments)
            same(gathered(**arguments, out=np.zeros_like(rows)), rows, arguments)
        else:
            gathered(**arguments)


def test_chunks_of_several_rows(comm):
    counts = [4 * rank for rank in range(comm.size)]
    x = np.full((comm.rank, 4), comm.rank)
    assert comm.all_gather(x, counts=counts).shape == (sum(range(comm.size)), 4)
    counts = [2 * (rank + 1) for rank in range(comm.size)]  # incomplete rows
    assert comm.reduce_scatter(np.ones((sum(counts) // 2, 2)), counts=counts).shape == (comm.rank + 1, 2)
    if comm.size > 1:
        assert comm.reduce_scatter(np.ones((1, sum(counts))), counts=counts).shape == (counts[comm.rank],)


def all_reduced(comm, blocking, x):
    """Run an all-reduce to its end: a started call may raise in its wait."""
    return comm.all_reduce(x) if blocking else comm.all_reduce(x, blocking=False).wait()


@pytest.mark.sizes(2, 3)
def test_one_rank_with_a_view_that_cannot_be_written(comm):
    fixed = np.ones(12)
    fixed.flags.writeable = False
    for make, words in (
        (lambda: fixed[::2], "x is read-only"),
        (lambda: torch.ones(1).expand(6), r"x has several elements in one place \(strides \(0,\)\): pass a copy"),
        (lambda: np.lib.stride_tricks.as_strided(np.ones(8), (3, 2), (8, 16)), r"several elements in one place \(str"),
        (lambda: torch.ones(6, 2, dtype=torch.complex64).conj()[:, 0], "resolve_conj"),
    ):
        for blocking in (True, False):
            run = partial(all_reduced, comm, blocking)
            run(np.ones(6))  # the other ranks' next call is again one without agreement
            x = make() if comm.rank == comm.size - 1 else np.ones(6)
            with pytest.raises(InputError, match=words):
                run(x)
    with pytest.raises(InputError, match="is not C-contiguous: pass a copy of it"):
        comm.plan("all_reduce", np.ones(12)[::2])
    with pytest.raises(InputError, match="out has 5 elements of float64 on cpu: pass one of 6"):
        comm.all_reduce(np.ones(6), out=np.ones(10)[::2])
