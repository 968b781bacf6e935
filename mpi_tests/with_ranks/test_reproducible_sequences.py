"""With sequence_parts, sp ranks train the same weights bit for bit, whatever their number and mode, and other axes."""

import pytest

from mpi_tests.helpers.trained import alone, check_bits, on

SAME = {"reproducible": True, "sequence_parts": 8, "n_head": 4, "n_embd": 48, "block_size": 24, "max_iters": 2}
SAME |= {"eval_iters": 1, "global_batch_size": 4, "micro_batch_size": 1, "grad_clip": 0.5, "dropout": 0.2}
LLAMA = {"model": "llama-tiny", "n_kv_head": 1, "dropout": 0.0}
KINDS = {
    "gpt": {},
    "documents": {"document_end": 32},
    "few columns": {"n_embd": 8, "block_size": 8, "sequence_parts": 4, "global_batch_size": 8, "micro_batch_size": 8},
    "llama": LLAMA,
    "llama in bfloat16": {**LLAMA, "dtype": "bfloat16", "master_weights": True},
}
each_kind = pytest.mark.parametrize("kind", [*KINDS][1:])


def check(comm, kind="gpt", **layout):
    outcome, expected = on(comm, **{**SAME, **KINDS[kind], **layout}), alone(comm, **{**SAME, **KINDS[kind]})
    check_bits(outcome.weights, expected.weights)
    for key in ("loss", "grad_norm"):
        assert [record.get(key) for record in outcome.records] == [record.get(key) for record in expected.records]
    assert [*outcome.validations.values()] == pytest.approx([*expected.validations.values()], rel=1e-12)


@pytest.mark.sizes(1)
def test_recomputation(comm):
    check(comm, recompute="full")


@pytest.mark.parametrize("mode", ["ring", "ulysses"])
@pytest.mark.sizes(2, 4)
def test_modes(comm, mode):
    check(comm, sp=comm.size, sp_mode=mode, recompute="selective")


@pytest.mark.sizes(4)
def test_hybrid(comm):
    check(comm, sp=4, sp_mode="hybrid")


@pytest.mark.parametrize("zero_stage", [1, 3])
@pytest.mark.sizes(4)
def test_beside_data_parallelism(comm, zero_stage):
    check(comm, sp=2, sp_order="contiguous", zero_stage=zero_stage)


@pytest.mark.parametrize("sp", [1, 2])
@pytest.mark.sizes(4)
def test_beside_pipelines(comm, sp):
    check(comm, sp=sp, pp=2, schedule="zb_h1", zero_stage=2)


@each_kind
@pytest.mark.sizes(2)
def test_kinds_in_a_ring(comm, kind):
    check(comm, kind, sp=2)


@each_kind
@pytest.mark.sizes(4)
def test_kinds_with_heads_exchanged(comm, kind):
    """Each rank has one head, which it shares with another rank if queries' heads are grouped."""
    check(comm, kind, sp=4, sp_mode="ulysses")
