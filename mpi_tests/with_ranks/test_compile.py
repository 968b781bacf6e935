"""torch.compile of a parallelized model's blocks, without code generation, which systems/test_compile.py has.

The compiler must accept the blocks, and their results must not change.
"""

import sys

import pytest

from collectives import InputError
from mpi_tests.helpers.ranks import IS_PROOF
from mpi_tests.helpers.trained import by_torch, check_same, config, on
from training.loop import train
from training.parallel import compiling

LAYOUTS = {"stage 3": {"zero_stage": 3}}
if IS_PROOF:
    LAYOUTS["tp 2, recomputed"] = {"tp": 2, "sequence_parallel": True, "recompute": "full"}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.filterwarnings("default")  # the compiler reads gradients that tensors lack
@pytest.mark.sizes(2)
def test_blocks_are_compiled_in_every_layout(comm, monkeypatch, layout):
    from torch._dynamo.utils import counters

    monkeypatch.setattr(compiling, "BACKEND", "eager")
    before = counters["stats"]["unique_graphs"]
    check_same(on(comm, compile=True, **layout), by_torch(comm))
    assert counters["stats"]["unique_graphs"] > before


@pytest.mark.filterwarnings("default")
@pytest.mark.sizes(1)
def test_a_whole_model_is_one_graph(comm, monkeypatch):
    """Without dropout nothing in it is left out of the graph, as our dropout would be."""
    from torch._dynamo.utils import counters

    monkeypatch.setattr(compiling, "BACKEND", "eager")
    counters.clear()
    train(config(1, compile=True, max_iters=2), comm)
    assert counters["stats"]["unique_graphs"] > 0
    assert not counters["graph_break"]


@pytest.mark.sizes(2)
def test_a_missing_compiler_is_one_line(comm, monkeypatch):
    monkeypatch.setenv("PATH", "")
    words = "compile starts .* which is not installed: install it, or omit compile"
    with pytest.raises(InputError, match=words):
        train(config(2, compile=True), comm)
    assert "torch._inductor" in sys.modules
