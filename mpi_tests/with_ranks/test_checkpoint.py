"""Checkpoints of several ranks: a GPT saved in one layout and loaded in another; failures to write or read."""

import json
import math
import os
import signal
import threading
from pathlib import Path
from tempfile import TemporaryDirectory
from zlib import crc32

import pytest
import torch

import parallelism.checkpoint.checkpoints as module
from collectives import InputError
from models.config import ModelConfig
from mpi_tests.helpers.models import randomized
from parallelism.checkpoint import Checkpoints, Extent, Stop, TensorShard, make_states, model_parts, state_parts
from parallelism.mesh import Mesh
from parallelism.pipeline.pipeline_parallel import PipelineParallel
from parallelism.pipeline.schedule import registry
from parallelism.step.local_parameters import tied_names
from parallelism.tensor.sharding_plan import parallelize
from training.optim.optimizer import adamw
from training.parallel.decoder import layers_of, plan_of

CONFIG = ModelConfig(vocab_size=29, block_size=8, n_layer=3, n_head=8, n_embd=16, bias=True, n_kv_head=4)
LAYOUTS = {1: [(1, 1)], 2: [(1, 1), (2, 1), (1, 2)], 4: [(1, 1), (4, 1), (1, 4), (2, 2)]}  # pp, tp


@pytest.fixture
def folder(comm):
    """Yield a folder that only the first rank creates and removes, as concurrent removals of pytest's own conflict."""
    own = TemporaryDirectory() if comm.rank == 0 else None
    yield Path(comm.all_gather_object(own.name if own else "")[0]) / "checkpoints"
    comm.barrier()
    if own:
        own.cleanup()


@pytest.fixture
def checkpoints(comm, folder):
    manager = Checkpoints(folder, comm)
    yield manager
    manager.release()


class Held:
    """A rank's part of a GPT and of its AdamW states in a layout."""

    def __init__(self, comm, pp, tp):
        mesh = Mesh(comm, pp=pp, tp=tp)
        model = randomized(CONFIG)
        parallelize(model, plan_of(CONFIG), mesh.tp)
        tied = tied_names(model)
        if pp > 1:
            PipelineParallel(model, layers_of(model), registry.make_schedule("1f1b", pp, pp), mesh)
        optimizer = adamw(model.parameters(), 0.1, 0.1)
        make_states(optimizer)
        parts = model_parts(model, mesh, tied)
        self.parts = [*parts.values()]
        for name, p in model.named_parameters():
            states = optimizer.state[p]
            states["exp_avg"].copy_(3 * p.detach())  # values that differ between elements
            states["step"].fill_(len(parts[name].name))
            self.parts += state_parts(parts[name], states)
        self.expected = [part.tensor.clone() for part in self.parts]

    def clear(self):
        for part in self.parts:
            part.tensor.fill_(7)

    def check(self):
        for part, expected in zip(self.parts, self.expected, strict=True):
            assert torch.equal(part.tensor, expected), str(part)


@pytest.mark.sizes(1, 2, 4)
def test_a_gpt_is_loaded_into_any_layout(comm, checkpoints):
    every = {layout: Held(comm, *layout) for layout in LAYOUTS[comm.size]}
    for step, (layout, saved) in enumerate(every.items()):
        checkpoints.save(step, saved.parts, {"layout": layout})
        saved.clear()  # during the write
        checkpoints.wait()
        path = checkpoints.newest()
        for state in every.values():
            state.clear()
            loaded = checkpoints.load(state.parts, path)
            state.check()
            assert (loaded.step, loaded.whole) == (step, {"layout": [*layout]})


@pytest.mark.sizes(4)
def test_another_number_of_ranks_goes_on(comm, folder):
    """The run continues on 4, then 3, then 4 ranks."""
    for number, size in enumerate((4, 3, 4)):
        ranks = comm.split(0 if comm.rank < size else None)
        if ranks:
            checkpoints, state = Checkpoints(folder, ranks), Held(ranks, 1, 1)
            if number:
                state.clear()
                loaded = checkpoints.load(state.parts, checkpoints.newest())
                state.check()
                assert loaded.step == number - 1
            checkpoints.save(number, state.parts, {})
            checkpoints.close()
            ranks.free()
        comm.barrier()


@pytest.mark.sizes(4)
def test_a_rank_with_nothing_to_write_writes_no_file(comm, checkpoints, folder):
    checkpoints.save(1, [TensorShard("x", "parameter", Extent((3,), 0, 3), torch.ones(3))], {})  # on all ranks
    checkpoints.close()
    comm.barrier()
    assert len([*(folder / "00001-step-1").iterdir()]) == 2


def ramp(comm, length=12, name="x"):
    """Return this rank's range of a parameter."""
    extent = Extent((comm.size * length,), comm.rank * length, length)
    return TensorShard(
        name, "parameter", extent, torch.arange(float(comm.size * length))[extent.begin : extent.end].clone()
    )


@pytest.mark.sizes(1, 2, 4)
def test_training_goes_on_while_a_checkpoint_is_written(comm, checkpoints, monkeypatch):
    """The last rank's write is delayed: the steps continue, and the previous checkpoint is the newest."""
    part = ramp(comm)
    checkpoints.save(1, [part], {})
    checkpoints.wait()
    first = checkpoints.newest()
    go, write = threading.Event(), module.write_shard
    if comm.rank < comm.size - 1:
        go.set()
    monkeypatch.setattr(module, "write_shard", lambda *arguments: go.wait() and write(*arguments))
    checkpoints.save(2, [part], {})
    try:
        for _ in range(3):
            part.tensor.add_(1)  # after the snapshot
            assert not checkpoints.poll()
            assert checkpoints.newest() == first
    finally:
        go.set()
    while not checkpoints.poll():
        pass
    loaded = checkpoints.load([part], checkpoints.newest())
    assert loaded.step == 2
    assert torch.equal(part.tensor, ramp(comm).tensor)


@pytest.mark.sizes(2)
def test_the_last_ones_are_kept(comm, checkpoints, folder):
    for step in range(5):
        checkpoints.save(step, [ramp(comm)], {})
    checkpoints.close()
    comm.barrier()
    assert sorted(path.name for path in folder.iterdir()) == ["00003-step-2", "00004-step-3", "00005-step-4", "lock"]
    assert (folder / "lock").read_text() == ""


def refusal(action, *arguments):
    with pytest.raises(InputError) as raised:
        action(*arguments)
    return str(raised.value)


def full(path, *_):
    raise OSError(f"{path}: No space left on device")


@pytest.mark.sizes(2, 4)
def test_a_shard_that_cannot_be_written_is_named_by_all(comm, checkpoints, folder, monkeypatch):
    checkpoints.save(1, [ramp(comm)], {})
    with monkeypatch.context() as patch:
        checkpoints.wait()
        if comm.rank == 1:
            patch.setattr(module, "write_shard", full)
        checkpoints.save(2, [ramp(comm)], {})
        file = folder / "00002-step-2.unfinished" / "rank-1.safetensors"
        assert refusal(checkpoints.wait) == f"rank 1: {file}: No space left on device"
    comm.barrier()  # the first rank has removed the old folder
    assert [path.name for path in folder.iterdir() if path.is_dir()] == ["00001-step-1"]
    comm.barrier()
    checkpoints.save(3, [ramp(comm)], {})
    checkpoints.wait()
    assert checkpoints.newest().name == "00003-step-3"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.sizes(1, 2, 4)
def test_no_checkpoint_has_values_that_are_not_finite(comm, checkpoints, folder, value):
    """Neither weights nor states; the previous checkpoint remains the newest."""
    weight, last = ramp(comm), comm.size - 1
    state = weight._replace(kind="exp_avg", tensor=weight.tensor.clone())
    count = TensorShard("x", "step", Extent((), 0, 1), torch.tensor(3))  # an integer
    checkpoints.save(1, [weight, state, count], {})
    for part in (weight, state):
        before = part.tensor.clone()
        part.tensor[2] = value if comm.rank == last else 0.0
        checkpoints.save(2, [weight, state, count], {})
        line = f"{part.kind} of x is not finite, and no checkpoint was written: resume from an earlier one"
        assert refusal(checkpoints.wait) == (f"rank {last}: {line}" if last else line)
        part.tensor.copy_(before)
        comm.barrier()  # the first rank has removed the folder
        assert checkpoints.newest() == folder / "00001-step-1"


@pytest.mark.sizes(2, 4)
def test_replicas_that_differ_are_not_saved(comm, checkpoints, folder):
    """One flipped bit is found, also beyond a part's first block; the odd rank is told from the others."""
    extent, last = Extent((8,), 0, 8), comm.size - 1
    weight = TensorShard("x", "parameter", extent, torch.arange(8.0))
    state = weight._replace(kind="exp_avg", tensor=torch.arange(8.0, dtype=torch.bfloat16))
    long = TensorShard("y", "parameter", Extent((3 << 20,), 0, 3 << 20), torch.ones(3 << 20))
    own = ramp(comm, name="z")  # another part on each rank
    checkpoints.save(1, [weight, state, long, own], {})
    checkpoints.wait()
    for part, name, block in (
        (weight, "parameter of x", slice(0, 8)),
        (state, "exp_avg of x", slice(0, 8)),
        (long, "parameter of y", slice(2 << 20, 3 << 20)),
    ):
        bits = part.tensor.view(torch.int16)
        right = crc_of(part.tensor[block])
        if comm.rank == last:
            bits[-3] ^= 1 << 9
        wrong = comm.all_gather_object(crc_of(part.tensor[block]))[last]
        others = ", ".join(map(str, range(last)))
        words = f"{name} should be the same on all ranks that hold it, but its CRC-32 is {right} on rank {others} and "
        words += f"{wrong} on rank {last}: no checkpoint was written; resume from an earlier one"
        assert refusal(checkpoints.save, 2, [weight, state, long, own], {}) == words
        if comm.rank == last:
            bits[-3] ^= 1 << 9
    weight.tensor[0], state.tensor[0] = comm.rank, comm.rank
    message = refusal(checkpoints.save, 2, [weight, state, long, own], {})
    assert message.startswith("parameter of x should be")
    assert " (2 tensors differ): no checkpoint" in message
    assert checkpoints.newest() == folder / "00001-step-1"


def crc_of(x):
    return f"{crc32(x.view(torch.int16).numpy().tobytes()):08x}"


@pytest.mark.sizes(2)
def test_a_broken_one_is_passed_over_with_a_line(comm, folder):
    lines = []
    checkpoints = Checkpoints(folder, comm, say=lines.append)
    assert checkpoints.newest() is None
    for step in (1, 2):
        checkpoints.save(step, [ramp(comm)], {})
    checkpoints.wait()
    file = folder / "00002-step-2" / "rank-1.safetensors"
    comm.barrier()
    if comm.rank == 0:
        os.truncate(file, 99)
    comm.barrier()
    assert checkpoints.newest() == folder / "00001-step-1"
    assert len(lines) == 1
    assert f"rank 1: {file}: of 99 bytes" in lines[0]
    assert f"{file}: of 99 bytes" in refusal(checkpoints.load, [ramp(comm)], folder / "00002-step-2")
    checkpoints.release()


@pytest.mark.sizes(2)
def test_another_model_is_refused_by_all(comm, checkpoints, folder):
    checkpoints.save(1, [ramp(comm), ramp(comm, name="y")], {})
    checkpoints.wait()
    path = folder / "00001-step-1"
    assert "has parameter of y, which this model lacks" in refusal(checkpoints.load, [ramp(comm)], path)
    parts = [ramp(comm), ramp(comm, name="z" if comm.rank else "y")]
    assert "rank 1: " in refusal(checkpoints.load, parts, path)
    assert "has no parameter of z" in refusal(checkpoints.load, parts, path)
    own = ramp(comm, length=6 if comm.rank else 12)
    assert "parameter of x is (24,) of torch.float32, but here (12,)" in refusal(checkpoints.load, [own], path)
    assert "none/index.json: missing" in refusal(checkpoints.load, [own], folder / "none")


@pytest.mark.sizes(2)
def test_what_cannot_be_saved(comm, checkpoints, folder):
    assert "metadata must be JSON-serializable" in refusal(checkpoints.save, 1, [ramp(comm)], {"x": torch.zeros(2)})
    words = "metadata must be JSON-serializable: Out of range float values are not JSON compliant"
    assert words in refusal(checkpoints.save, 1, [ramp(comm)], {"x": math.nan})
    half = [ramp(comm)] if comm.rank else []
    checkpoints.save(2, half, {})
    assert "parameter of x: all ranks' parts have 12 of 24 elements" in refusal(checkpoints.wait)
    assert checkpoints.newest() is None
    assert "keep=0 checkpoints must be at least 1" in refusal(Checkpoints, folder, comm, 0)
    message = refusal(Checkpoints, Path(__file__), comm)
    assert message == f"rank 0: folder {__file__} can't be created (File exists): pass another"


@pytest.mark.sizes(2)
def test_two_runs_write_to_one_directory(comm, checkpoints, folder):
    message = refusal(Checkpoints, folder, comm)
    pid = comm.all_gather_object(str(os.getpid()))[0]
    assert f"rank 0: {folder}: another run writes there, process {pid} on " in message
    checkpoints.close()
    lines = []
    Checkpoints(folder, comm, say=lines.append).close()
    assert lines == []
    for text in ("", "[1]", "{}", "{"):  # of a lock that no run of ours has written
        if comm.rank == 0:
            (folder / "lock").write_text(text)
        Checkpoints(folder, comm, say=lines.append).close()
    assert lines == []


@pytest.mark.sizes(2)
def test_what_a_dead_run_left_is_removed(comm, folder):
    lines = []
    if comm.rank == 0:
        (folder / "00007-step-3.unfinished").mkdir(parents=True)
        (folder / "lock").write_text(json.dumps({"pid": 12, "host": "node9", "since": "2026-01-01"}))
    comm.barrier()
    checkpoints = Checkpoints(folder, comm, say=lines.append)
    message = "a run that wrote there has died, process 12 on node9, since 2026-01-01"
    assert [message in line for line in lines] == [True] * (comm.rank == 0)
    comm.barrier()
    assert [path.name for path in folder.iterdir()] == ["lock"]
    comm.barrier()
    checkpoints.save(4, [ramp(comm)], {})
    checkpoints.close()
    comm.barrier()
    assert (folder / "00008-step-4").is_dir()  # a late rank of the dead run finds no folder to write to


@pytest.mark.sizes(2)
def test_ranks_must_share_the_directory(comm, folder):
    message = f"rank 1: {folder / '1'} is not the first rank's: choose a folder that all hosts share"
    assert refusal(Checkpoints, folder / str(comm.rank), comm) == message
    folder = comm.all_gather_object(str(folder / "0"))[0]
    Checkpoints(folder, comm).close()


@pytest.mark.sizes(1, 2, 4)
def test_a_signal_on_any_rank_is_heard_by_all(comm):
    before = signal.getsignal(signal.SIGUSR1)
    stop = Stop(comm)
    assert stop.received() == ""
    for number in (signal.SIGUSR1, signal.SIGTERM):
        if comm.rank == comm.size - 1:
            os.kill(os.getpid(), number)
        assert stop.received() == number.name
    stop.close()
    assert signal.getsignal(signal.SIGUSR1) is before
