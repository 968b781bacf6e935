"""The planner on ranks: all choose the same layout, and its predictions hold for the memory of runs."""

from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
import torch

from collectives import InputError
from collectives.job import system
from models.config import ModelConfig
from mpi_tests.helpers.trained import config
from parallelism.planner import Machine, ParallelLayout, TrainingJob, best, counts
from parallelism.planner.cluster import read
from parallelism.planner.presets import shape_of
from parallelism.planner.ranks import best_layout, measured_cluster
from training.loop import step
from training.parallel.run import TrainingRun
from training.settings.layout import job_of, planned_for_most

SMALL = ModelConfig(vocab_size=101, block_size=32, n_layer=5, n_head=4, n_embd=64, n_kv_head=2, bias=True)


@pytest.mark.sizes(2, 4)
def test_ranks_get_the_same_layout(comm):
    planned = best_layout(comm, TrainingJob(SMALL, 8), {"zero_stage": 1})
    layout = planned.layout
    assert layout.dp * layout.pp * layout.sp * layout.tp == comm.size
    assert layout.zero_stage == 1
    numbers = np.array([planned.time.total, planned.memory.total, layout.dp, layout.pp, layout.micro_batch_size])
    assert comm.all_reduce(numbers.copy(), op="max").tolist() == comm.all_reduce(numbers, op="min").tolist()
    assert min(numbers) > 0


@pytest.mark.sizes(2)
def test_ranks_that_no_layout_fits(comm):
    with pytest.raises(InputError, match="no layout of 2 ranks: global_batch_size=3 is not divisible by dp=2"):
        best_layout(comm, TrainingJob(SMALL, 3), {"dp": 2})


@pytest.mark.sizes(3)
def test_as_many_of_the_ranks_left_train_as_have_a_layout(comm):
    settings, trains = planned_for_most(config(1, tp=2, layout="auto", global_batch_size=6), comm)
    assert (trains, settings.layout) == (2, "given" if comm.rank < 2 else "auto")
    assert (settings.tp, settings.global_batch_size) == (2, 6)
    assert planned_for_most(config(1, tp=5, layout="auto", global_batch_size=6), comm) is None


@pytest.mark.sizes(1, 2, 4)
def test_a_cluster_is_measured_by_all_ranks(comm, tmp_path):
    """These ranks are on one host, which has no link to measure; the file that describes it can be read."""
    cluster = measured_cluster(comm, TrainingJob(SMALL, 8))
    assert comm.all_gather_object(cluster) == [cluster] * comm.size
    (host,) = cluster.hosts
    assert (host.name, host.ranks, host.gbit) == (comm.host_names()[0], comm.size, None)
    assert 0 < host.tflops < 100
    assert host.memory * comm.size * 1e9 < 1.5 * system.total_memory_bytes()
    (tmp_path / "cluster.toml").write_text(str(cluster))
    assert read(tmp_path / "cluster.toml").nodes == (tuple(range(comm.size)),)


def bytes_in_step(run, batches):
    """Return a rank's bytes in a step: parameters, gradients, optimizer states, activations, expert rows."""
    own = {p.untyped_storage().data_ptr() for p in run.model.parameters()}
    saved = {}

    def keep(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        step(run, 1, batches).metrics()
    states = [x for state in run.optimizer.state.values() for kind, x in state.items() if kind != "step"]
    return np.array([
        *(array.nbytes for array in run.replica.arrays),
        sum(state.nbytes for state in states),
        sum(storage.nbytes() for pointer, storage in saved.items() if pointer not in own),
        sum(buffer.nbytes for buffer in run.exchange.buffers) if run.exchange else 0,
    ], float)  # fmt: skip


@pytest.mark.sizes(4)
@pytest.mark.parametrize("axes", [
    {"ep": 2}, {"ep": 4}, {"ep": 2, "zero_stage": 1}, {"ep": 2, "tp": 2}, {"ep": 2, "experts_per_token": 1},
], ids=str)  # fmt: skip
def test_memory_with_experts_is_what_a_run_holds(comm, monkeypatch, axes):
    """The mean over ranks is within a tenth of what is predicted for experts with equal numbers of tokens."""
    monkeypatch.setattr(counts, "FULLEST", 1.0)
    model = {"num_experts": 8, "experts_per_token": axes.get("experts_per_token", 2), "n_embd": 64, "block_size": 64}
    tp, ep = axes.get("tp", 1), axes["ep"]
    settings = config(comm.size // tp, **{**model, **axes, "micro_batch_size": 6})
    with TrainingRun(settings, comm) as run, closing(run.inputs()) as inputs:
        job = TrainingJob(shape_of(settings, run.tokens.vocab_size), run.sampler.batch_size)
        measured = comm.all_reduce(bytes_in_step(run, next(inputs)), op="avg")
    layout = ParallelLayout(comm.size // tp, tp=tp, ep=ep, zero_stage=axes.get("zero_stage", 0), micro_batch_size=6)
    machine = Machine(comm.topology.nodes, comm.network, 1e10, float("inf"))
    predicted = best(job, machine, layout._asdict()).memory
    assert sum(measured) == pytest.approx(predicted.total - predicted.working, rel=0.1)
    assert measured[3] == pytest.approx(predicted.activations, rel=0.1)


def predict(comm, settings, run):
    """Return the memory that the planner predicts for a run's layout."""
    layout = {name: getattr(settings, name) for name in ParallelLayout._fields if name not in ("dp", "virtual_stages")}
    layout |= {"dp": run.mesh.dp.size, "virtual_stages": 1}
    machine = Machine(comm.topology.nodes, comm.network, 1e10, float("inf"))
    return best(job_of(replace(settings, **layout), comm.size), machine, layout).memory


@pytest.mark.sizes(4)
@pytest.mark.parametrize(("model", "axes"), [
    ({"model": "gpt2-tiny"}, {"tp": 2}),
    ({"model": "llama-tiny", "n_kv_head": 2}, {"tp": 2, "sequence_parallel": True, "zero_stage": 1}),
    ({"model": "llama-tiny", "n_kv_head": 1}, {"recompute": "selective"}),
    ({"model": "llama-tiny", "tied": True}, {"sp": 2, "zero_stage": 2}),
], ids=str)  # fmt: skip
def test_memory_of_each_family_is_what_a_run_holds(comm, model, axes):
    """Parameters are exact, activations within a tenth."""
    shape = {"n_layer": 3, "n_head": 4, "n_kv_head": None, "n_embd": 64, "n_hidden": None, "block_size": 64}
    settings = config(comm.size // axes.get("tp", 1) // axes.get("sp", 1), **{**shape, **model, **axes})
    with TrainingRun(settings, comm) as run, closing(run.inputs()) as inputs:
        measured = bytes_in_step(run, next(inputs))
        params = sum(p.nbytes for p in run.model.parameters())
        predicted = predict(comm, settings, run)
    assert predicted.parameters == params
    assert measured[3] == pytest.approx(predicted.activations, rel=0.1)


@pytest.mark.sizes(4)
@pytest.mark.parametrize(("optimizer", "axes"), [
    ("adamw", {"zero_stage": 1}), ("sgd", {"tp": 2}), ("muon", {}), ("muon", {"ep": 2}),
    ("muon", {"zero_stage": 3, "tp": 2}),
], ids=str)  # fmt: skip
def test_states_are_what_the_optimizer_keeps(comm, optimizer, axes):
    """States are exact if each rank has all of them, otherwise in the mean over ranks, as is Muon's communication."""
    experts = {"num_experts": 4} if "ep" in axes else {}
    settings = config(comm.size // axes.get("tp", 1), optimizer=optimizer, **experts, **axes)
    with TrainingRun(settings, comm) as run, closing(run.inputs()) as inputs:
        step(run, 1, next(inputs)).metrics()
        states = [x for state in run.optimizer.state.values() for kind, x in state.items() if kind != "step"]
        owners = run.optimizer.optimizers[0].apply if optimizer == "muon" else None
        exchanges = [owners.collecting, owners.returning] if owners else []
        buffers = sum(each.sent.nbytes + each.received.nbytes for each in exchanges)
        own = np.array([sum(x.nbytes for x in states), buffers], float)
        state_bytes, exchanged = comm.all_reduce(own.copy(), op="avg").tolist()
        predicted = predict(comm, settings, run)
        plain = predict(comm, replace(settings, optimizer="sgd"), run)
    assert state_bytes == pytest.approx(predicted.optimizer, rel=0.02)
    assert axes.get("zero_stage") or own[0] == predicted.optimizer
    assert exchanged == pytest.approx(predicted.buffers - plain.buffers, rel=0.02)
