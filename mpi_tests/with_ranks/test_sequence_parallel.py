"""Sequence parallelism compared with the plain GPT: loss and every gradient; also with tensor and data parallelism."""

import pytest
import torch

from models.config import ModelConfig
from mpi_tests.helpers.models import close, part, random_tokens, randomized
from parallelism import Mesh, SequenceAttention, SequenceParallel, parallelize
from parallelism.numerics.dropout import BatchPosition
from training.parallel.decoder import plan_of

BATCH = 2
LENGTHS = pytest.mark.sizes(1, 2, 4, proof=(3, 8))
LENGTH = 48  # a multiple of 2 p for each p
MODES = {
    "ring": {"mode": "ring"},
    "striped": {"mode": "ring", "order": "striped"},
    "contiguous": {"mode": "ring", "order": "contiguous"},
    "ulysses": {"mode": "ulysses"},
    "hybrid": {"mode": "hybrid"},
}
each_mode = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
SHAPE = {"vocab_size": 29, "block_size": LENGTH, "n_layer": 2, "n_head": 24, "n_embd": 48}
CONFIGS = {"plain": ModelConfig(**SHAPE), "grouped heads": ModelConfig(**SHAPE, n_kv_head=1)}


def documents_of(batch, length):
    """Return documents that end at chunk boundaries, and elsewhere."""
    ends = torch.tensor([[5, 6, 24], [1, 30, 47]])[:batch]
    return (torch.arange(length) >= ends[:, :, None]).sum(1)


def batch_of(length=LENGTH):
    tokens, targets = random_tokens(BATCH, length), random_tokens(BATCH, length, seed=1)
    targets[0, : length // 3] = -100  # ranks have different numbers of tokens with a target
    return tokens, targets


def plain_results(config, documents=None, dtype=torch.float64):
    plain = randomized(config).to(dtype)
    _, loss = plain(*batch_of(), documents=documents)
    loss.backward()
    return loss, {name: p.grad for name, p in plain.named_parameters()}


def split_results(config, tp, sp, sequence=False, documents=None, position=None, dtype=torch.float64):
    """Return the loss and the gradients averaged over the ranks that split the sequence."""
    model = randomized(config).to(dtype)
    parallelize(model, plan_of(config), tp, sp, sequence, position)
    tokens, targets = (sp.own(x) for x in batch_of())
    positions = sp.positions(LENGTH)
    if position:
        position.positions = positions
    own = None if documents is None else sp.own(documents)
    _, loss = model(tokens, targets, positions, own)
    loss.backward()
    for p in model.parameters():
        sp.all.comm.all_reduce(p.grad, op="avg")
    return loss, dict(model.named_parameters())


@LENGTHS
@each_mode
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("with_documents", [False, True], ids=["", "documents"])
def test_loss_and_every_gradient_are_the_plain_models(comm, mode, config, with_documents):
    documents = documents_of(BATCH, LENGTH) if with_documents else None
    expected, gradients = plain_results(config, documents)
    loss, params = split_results(config, comm.split(comm.rank), SequenceParallel(comm, **mode), documents=documents)
    close(loss, expected)
    for name, p in params.items():
        close(p.grad, gradients[name])


@pytest.mark.sizes(8)
@pytest.mark.parametrize(
    ("shape", "mode", "sequence"),
    [
        ({"dp": 2, "sp": 2, "tp": 2}, "ring", True),
        ({"dp": 1, "sp": 4, "tp": 2}, "hybrid", False),
        ({"dp": 1, "sp": 2, "tp": 4}, "ulysses", True),
        ({"dp": 4, "sp": 2, "tp": 1}, "ring", False),
        ({"dp": 4, "sp": 1, "tp": 2}, "ring", True),
    ],
)
def test_mixes(comm, shape, mode, sequence):
    mesh = Mesh(comm, **shape)
    config = CONFIGS["plain"]
    expected, gradients = plain_results(config)
    loss, params = split_results(config, mesh.tp, SequenceParallel(mesh.sp, mode), sequence)
    close(loss, expected)
    for name, p in params.items():
        close(p.grad, part(p, gradients[name], mesh.tp))


@pytest.mark.sizes(4)
@pytest.mark.parametrize("mode", ["ring", "ulysses", "hybrid"])
@pytest.mark.parametrize("sequence", [False, True], ids=["", "sequence-parallel"])
def test_float32_and_bfloat16(comm, mode, sequence):
    """The error against float64 is about that of the plain model in the same dtype."""
    mesh = Mesh(comm, sp=2, tp=2)
    config = CONFIGS["plain"]
    exact, exact_gradients = plain_results(config)
    for dtype, rtol in ((torch.float32, 1e-5), (torch.bfloat16, None)):
        plain, gradients = plain_results(config, dtype=dtype)
        sp = SequenceParallel(mesh.sp, mode)
        loss, params = split_results(config, mesh.tp, sp, sequence, dtype=dtype)
        if rtol:
            close(loss.double(), exact, rtol)
        assert abs(loss - exact) <= 2 * abs(plain - exact) + 1e-3 * exact
        for name, p in params.items():
            expected = part(p, exact_gradients[name], mesh.tp)
            if rtol:
                close(p.grad.double(), expected, rtol)
            own_error = (part(p, gradients[name], mesh.tp).double() - expected).norm()
            assert (p.grad.double() - expected).norm() <= 2 * own_error + rtol_of(dtype) * expected.norm()


def rtol_of(dtype):
    return float(torch.finfo(dtype).eps)


@pytest.mark.sizes(2, 4, proof=(8,))
@pytest.mark.parametrize("mode", ["ring", "ulysses", "hybrid"])
def test_dropout_is_the_same_on_any_layout(comm, mode):
    """Results equal one rank's with tensor parallelism, in its sequence-parallel mode, and with split sequences."""
    config = ModelConfig(**SHAPE, dropout=0.3)
    alone = comm.split(comm.rank)

    def results(tp, sp, sequence=False, samples=(7, 8)):
        position = BatchPosition(seed=3, samples=torch.tensor(samples))
        return split_results(config, tp, SequenceParallel(sp, mode), sequence, position=position)

    expected, whole = results(alone, alone)
    assert results(alone, alone, samples=(7, 9))[0] != expected
    layouts = [(comm, alone, False), (comm, alone, True), (alone, comm, False)]
    for tp, sp, sequence in layouts:
        loss, params = results(tp, sp, sequence)
        close(loss, expected)
        for name, p in params.items():
            close(p.grad, part(p, whole[name].grad, tp))


@pytest.mark.sizes(4)
def test_what_cannot_be_shared(comm):
    from collectives import InputError

    with pytest.raises(InputError, match="sp_mode 'rings' is unknown: use ring, ulysses, hybrid"):
        SequenceParallel(comm, "rings")
    with pytest.raises(InputError, match="order 'zag' is unknown: use zigzag, striped, contiguous"):
        SequenceParallel(comm, order="zag")
    with pytest.raises(InputError, match="sp=4 ranks can't be divided in groups of 3 that exchange heads: use 1, 2, 4"):
        SequenceParallel(comm, "hybrid", head_ranks=3)
    with pytest.raises(ValueError, match=r"a sequence of 44 tokens .* sp=4 ranks in zigzag order: use a multiple of 8"):
        SequenceParallel(comm).positions(44)
    heads = torch.zeros(1, 6, 4, 2), torch.zeros(1, 6, 4, 2), torch.zeros(1, 6, 4, 2)
    with pytest.raises(ValueError, match=r"6 query heads can't be exchanged by 4 ranks: use 8 heads, .* sp_mode ring"):
        SequenceAttention(SequenceParallel(comm, "ulysses"))(*heads)
