"""A training step reads no number from its device: the host would wait for all work queued there."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from collectives import InputError
from mpi_tests.helpers.trained import config
from parallelism.buffers.transfer import Moment
from parallelism.checkpoint import Checkpoints
from training.loop import step, train
from training.parallel.run import TrainingRun
from training.reports.log import RunLog
from training.reports.pending import LateReport

READING = ("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2", "item")

LAYOUTS = {
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16", "master_weights": True, "num_micro_batches": 2, "dropout": 0.1},
    "recomputed, documents": {"recompute": "full", "document_end": 10, "non_finite": "skip", "optimizer": "sgd"},
    "unclipped": {"grad_clip": 0.0, "non_finite": "ignore"},
}
SPLIT = {
    "ZeRO 1": {"zero_stage": 1, "dtype": "float16"},
    "ZeRO 3, Muon": {"zero_stage": 3, "dtype": "bfloat16", "master_weights": True, "optimizer": "muon"},
    "tp, sp": {"tp": 2, "sp": 2, "sequence_parallel": True},
    "pp, tp": {"pp": 2, "tp": 2, "num_micro_batches": 2, "schedule": "zb_h1", "dtype": "float16"},
    "pp, ZeRO 2": {"pp": 2, "zero_stage": 2, "num_micro_batches": 2, "dtype": "float16", "master_weights": True},
    "pp, ZeRO 3": {"pp": 2, "zero_stage": 3, "num_micro_batches": 2},
}


class Reads(TorchDispatchMode):
    """Records this thread's reads of tensors."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        name = operator.overloadpacket.__name__
        self.names += [name] * (name in READING)
        return operator(*args, **(kwargs or {}))


@pytest.fixture
def reads(monkeypatch):
    """Record reads of tensors, including conversions to lists."""
    reads, tolist = Reads(), torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: reads.names.append("tolist") or tolist(tensor))
    return reads


def check_reads(comm, reads, changes):
    sizes = [changes.get(axis, 1) for axis in ("pp", "tp", "sp")]
    with TrainingRun(config(comm.size // math.prod(sizes), **changes), comm) as run:
        inputs = run.inputs()
        for iteration in (1, 2):
            batches = next(inputs)
            reads.names.clear()
            with reads:
                pending = step(run, iteration, batches)
            assert reads.names == []
            assert math.isfinite(pending.metrics().loss)
            assert reads.names == ["tolist"]


@pytest.mark.parametrize("changes", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.sizes(1)
def test_nothing_is_read_in_a_step(comm, reads, changes):
    check_reads(comm, reads, changes)


@pytest.mark.parametrize("changes", SPLIT.values(), ids=SPLIT)
@pytest.mark.sizes(4)
def test_nothing_is_read_in_a_step_of_any_layout(comm, reads, changes):
    check_reads(comm, reads, changes)


class LateReadback:
    """A readback of a device that records its actions in order."""

    is_late = True

    def __init__(self, x, events):
        self.x, self.events = x, events
        events.append("begin to copy")

    def read(self):
        self.events.append("read")
        self.ended = Moment("cpu")
        return self.x


@pytest.fixture
def events(monkeypatch):
    """Record the actions of a run's readback on a device in order."""
    events = []
    monkeypatch.setattr("training.loop.Readback", lambda x: LateReadback(x, events))
    return events


@pytest.mark.sizes(1, 2)
def test_numbers_of_a_step_are_read_when_the_next_one_has_been_begun(comm, events, monkeypatch):
    reported = []
    with TrainingRun(config(comm.size), comm) as run:
        steps = LateReport(reported.append)
        for iteration, batches in zip((1, 2, 3), run.inputs(), strict=False):
            steps.add(step(run, iteration, batches))
            assert [metrics.iter for metrics in reported] == list(range(1, iteration))
        steps.flush()
        steps.flush()
    assert events == ["begin to copy", "begin to copy", "read", "begin to copy", "read", "read"]
    assert [metrics.iter for metrics in reported] == [1, 2, 3]
    with TrainingRun(config(comm.size), comm) as run:
        monkeypatch.undo()
        expected = []
        steps = LateReport(expected.append)
        for iteration, batches in zip((1, 2, 3), run.inputs(), strict=False):
            steps.add(step(run, iteration, batches))
            assert len(expected) == iteration  # of the host, at once
    assert [(m.loss, m.grad_norm) for m in reported] == [(m.loss, m.grad_norm) for m in expected]


@pytest.mark.sizes(1)
def test_steps_are_reported_before_what_comes_after_them(comm, events, monkeypatch, tmp_path):
    """Later events are a validation, a checkpoint, and the end of the run."""

    def note(owner, name):
        method = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **kwargs: events.append(name) or method(*args, **kwargs))

    note(RunLog, "step")
    note(RunLog, "validation")
    note(Checkpoints, "save")
    changes = {"eval_interval": 3, "max_iters": 4, "checkpoint_interval": 2, "checkpoint_dir": str(tmp_path)}
    train(config(1, **changes), comm)
    late = ["begin to copy", "begin to copy", "read", "step", "read", "step", "save"]
    at_once = ["begin to copy", "read", "step", "validation"]
    assert events == [*late, *at_once, *at_once, "save"]


@pytest.mark.sizes(1, 2)
def test_a_run_stops_for_a_step_that_is_read_late(comm, events):
    """The weights are those before the step, and all ranks raise the same error.

    A rank whose gradients are its own checks them by the blocks of their norm.
    """
    last = comm.size - 1
    with TrainingRun(config(comm.size, lr=1.0), comm) as run:
        assert (run.guard.monitor is run.clip) == (comm.size == 1)
        inputs, steps = run.inputs(), LateReport(lambda metrics: None)
        steps.add(step(run, 1, next(inputs)))
        weights = list(run.masters.pieces.values())
        before = [piece.clone() for piece in weights]
        weights[0].register_hook(lambda gradient: gradient * (math.nan if comm.rank == last else 1))
        steps.add(step(run, 2, next(inputs)))
        assert all(torch.equal(piece, old) for piece, old in zip(weights, before, strict=True))
        with pytest.raises(InputError, match=rf"step 2: rank {last} has a gradient of transformer\.wte\.weight"):
            steps.flush()
