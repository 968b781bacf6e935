"""Stages simulated in one process with every schedule, compared with the plain model: loss and every gradient."""

from dataclasses import replace

import pytest

from mpi_tests.helpers.models import close, each_mode, randomized
from mpi_tests.helpers.played import (
    CONFIG,
    Players,
    batch_of,
    micro_batches,
    model_of,
    whole_batch,
)
from parallelism.numerics.dropout import BatchPosition
from parallelism.pipeline.schedule import registry
from parallelism.pipeline.stage import Batch
from parallelism.placement import shard_of
from parallelism.sequence.sequence_parallel import SequenceParallel


@pytest.mark.sizes(2, 4)
@each_mode
@pytest.mark.parametrize("name", ["interleaved", "zb_h1", "zb_v"])
def test_split_layers(comm, sequence, name):
    """Ranks that split the same layers run the same actions in the same order."""

    def make():
        return model_of(config, BatchPosition(), comm, sequence=sequence)

    config, batch = replace(CONFIG, n_layer=4, n_kv_head=4), batch_of(6, seq=8)
    players = Players(make, registry.make_schedule(name, 2, 3))
    loss, gradients = players.play(micro_batches(batch, 3)), players.gradients()
    expected, whole = whole_batch(randomized(config), batch)
    assert loss == pytest.approx(expected, rel=1e-10)
    shards = {name: shard_of(p, "tp") for name, p in make().named_parameters()}
    for name, gradient in whole.items():
        own = shards[name].local(gradient, comm.rank, comm.size) if shards[name] else gradient
        close(gradients[name], own, 1e-10)


@pytest.mark.sizes(2)
def test_split_sequences(comm):
    """Each rank's part of a sequence has different ignored targets."""
    sp, batch = SequenceParallel(comm), batch_of(6, seq=8)
    own = [
        Batch(sp.own(one.tokens), sp.own(one.targets), sp.positions(8), sp.own(one.documents))
        for one in micro_batches(batch, 3)
    ]
    schedule = registry.make_schedule("zb_v", 2, 3)
    players = Players(lambda: model_of(CONFIG, BatchPosition(), comm.split(comm.rank), sp), schedule)
    loss, gradients = players.play(own, sp.all.all_reduce), players.gradients()
    expected, whole = whole_batch(randomized(CONFIG), batch)
    assert loss == pytest.approx(expected, rel=1e-10)
    for name, gradient in whole.items():
        close(comm.all_reduce(gradients[name], op="avg"), gradient, 1e-10)
