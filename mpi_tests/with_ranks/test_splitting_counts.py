"""Communication of a transformer layer, forward and backward, as published: collectives, messages and bytes.

Each rank simulates a node of its own, so that all data travel in messages; the tests count the executor's requests.

Source: Shoeybi et al., "Megatron-LM", 2019, section 3; Korthikanti et al., "Reducing Activation Recomputation in Large
Transformer Models", 2022, section 4.2; Jacobs et al., "DeepSpeed Ulysses", 2023, section 3.2; Liu et al., "Ring
Attention", 2023, section 3.
"""

from collections import Counter
from typing import NamedTuple

import pytest
import torch

from models.config import ModelConfig
from models.decoder import Decoder
from parallelism.buffers.tensor_collectives import TensorCollectives
from parallelism.sequence.sequence_parallel import SequenceParallel
from parallelism.tensor.sharding_plan import parallelize
from training.parallel.decoder import plan_of

BATCH, SEQ, N_EMBD, N_HEAD, N_KV_HEAD = 2, 768, 192, 24, 8
WIDTH_BYTES = 4 * N_EMBD
WHOLE = BATCH * SEQ * WIDTH_BYTES  # bytes of b s h activations: long enough to choose bandwidth-optimal algorithms
ONE_MESSAGE = 1 << 30  # no move is longer than a segment


class Done(NamedTuple):
    """A started collective: its number of ranks, and the bytes of each rank's array."""

    collective: str
    size: int
    nbytes: int


class Traffic:
    """Counts of the collectives that this rank starts through exchanges, and of the executor's messages."""

    def __init__(self, monkeypatch):
        from collectives.runtime.backends import messages
        from collectives.schedule.moves import Send

        self.forget()
        bind, run = messages.RequestBinder.request, messages.BoundRound.run
        lengths = {}  # by id, the bytes of each send request, and the request itself, so that its id stays unique

        def counted_bind(binder, move, tag, wire):
            request = bind(binder, move, tag, wire)
            lengths[id(request)] = request, wire.nbytes if isinstance(move, Send) else None
            return request

        def counted_run(bound, device):
            nbytes = [lengths[id(request)][1] for request in bound.requests()]
            self.messages += [n for n in nbytes if n is not None]
            yield from run(bound, device)

        monkeypatch.setattr(messages.RequestBinder, "request", counted_bind)
        monkeypatch.setattr(messages.BoundRound, "run", counted_run)
        for name in ("run", "start"):
            monkeypatch.setattr(TensorCollectives, name, self.counted(getattr(TensorCollectives, name)))

    def counted(self, begin):
        def count(exchange, collective, x, **arguments):
            if exchange.size > 1:
                name = "shift" if "send_counts" in arguments else collective
                self.collectives[Done(name, exchange.size, x.nbytes)] += 1
            return begin(exchange, collective, x, **arguments)

        return count

    def forget(self):
        self.collectives: Counter[Done] = Counter()
        self.messages: list[int] = []


@pytest.fixture
def traffic(monkeypatch):
    return Traffic(monkeypatch)


@pytest.fixture
def far_comm(mpi_comm, monkeypatch, traffic):
    """Yield a communicator with each rank on a node of its own, which sends each move as one message."""
    from collectives import Communicator

    monkeypatch.setenv("COLLECTIVES_FAKE_NODES", f"{mpi_comm.size}x1")
    communicator = Communicator(mpi_comm, segment_bytes=ONE_MESSAGE)
    yield communicator
    communicator.free()


def layer(tp, sp=None, sequence=False, n_kv_head=None):
    """Make one parallelized transformer layer."""
    config = ModelConfig(vocab_size=8, block_size=SEQ, n_layer=1, n_head=N_HEAD, n_embd=N_EMBD, n_kv_head=n_kv_head)
    model = Decoder(config)
    parallelize(model, plan_of(config), tp, sp, sequence)
    return model.transformer.h[0]


def passes(traffic, block, seq):
    """Return the traffic of a forward and a backward pass through a layer on `seq` tokens."""
    x = torch.randn(BATCH, seq, N_EMBD, requires_grad=True)
    block(x).sum().backward()  # binds the plans, which also takes messages
    traffic.forget()
    y = block(x)
    forward = traffic.collectives, traffic.messages
    traffic.forget()
    y.sum().backward()
    return forward, (traffic.collectives, traffic.messages)


def least_bytes(call):
    """Return the minimum of bytes that a rank must send if all send equally many."""
    others = call.size - 1
    match call.collective:
        case "shift":
            return call.nbytes
        case "all_gather":
            return others * call.nbytes
        case "all_reduce":
            return 2 * others * call.nbytes / call.size
        case _:
            return others * call.nbytes / call.size


def check(traffic, expected):
    """Check that the collectives are the expected ones, and that messages carry the minimum of bytes."""
    collectives, messages = traffic
    assert collectives == expected
    assert sum(messages) == sum(number * least_bytes(call) for call, number in expected.items())


each_size = pytest.mark.sizes(2, 3, proof=(8,))


@each_size
def test_tensor_parallelism(far_comm, traffic):
    """A layer makes two all-reduces of b s h forward, and two backward."""
    p = far_comm.size
    forward, backward = passes(traffic, layer(far_comm), SEQ)
    for each in (forward, backward):
        check(each, {Done("all_reduce", p, WHOLE): 2})
        assert sum(each[1]) == 2 * 2 * (p - 1) / p * WHOLE


@each_size
def test_sequence_parallel_mode(far_comm, traffic):
    """All-gathers and reduce-scatters replace them; x is gathered again for the gradient of a column-split weight.

    As norms process a part of the tokens, the gradients of their h weights are summed over ranks.
    """
    p = far_comm.size
    gathering, scattering = Done("all_gather", p, WHOLE // p), Done("reduce_scatter", p, WHOLE)
    forward, backward = passes(traffic, layer(far_comm, sequence=True), SEQ // p)
    check(forward, {gathering: 2, scattering: 2})
    assert sum(forward[1]) == 2 * 2 * (p - 1) / p * WHOLE
    norms = Done("all_reduce", p, WIDTH_BYTES)
    assert backward[0] == {gathering: 4, scattering: 2, norms: 2}
    of_norms = [nbytes for nbytes in backward[1] if nbytes <= WIDTH_BYTES]
    assert sum(backward[1]) - sum(of_norms) == 6 * (p - 1) / p * WHOLE


@each_size
def test_head_exchange(far_comm, traffic):
    """Four all-to-alls forward, of q, k, v and the result, and four backward: 4 b s h / p, less a rank's own chunk."""
    p = far_comm.size
    block = layer(far_comm.split(far_comm.rank), SequenceParallel(far_comm, "ulysses", "contiguous"))
    for each in passes(traffic, block, SEQ // p):
        check(each, {Done("all_to_all", p, WHOLE // p): 4})
        assert len(each[1]) == 4 * (p - 1)
        assert sum(each[1]) == 4 * WHOLE / p * (p - 1) / p


@each_size
@pytest.mark.parametrize("n_kv_head", [N_HEAD, N_KV_HEAD], ids=["", "grouped heads"])
def test_ring(far_comm, traffic, n_kv_head):
    """Keys and values travel p - 1 steps, backward again, and their gradients p steps, back to their rank."""
    p = far_comm.size
    block = layer(far_comm.split(far_comm.rank), SequenceParallel(far_comm, "ring"), n_kv_head=n_kv_head)
    forward, backward = passes(traffic, block, SEQ // p)
    kv_bytes = 2 * WHOLE // p * n_kv_head // N_HEAD
    check(forward, {Done("shift", p, kv_bytes): p - 1})
    assert forward[1] == [kv_bytes] * (p - 1)
    check(backward, {Done("shift", p, kv_bytes): 2 * p - 1})
    assert backward[1] == [kv_bytes] * (2 * p - 1)


@pytest.mark.sizes(4, 8)
def test_hybrid(far_comm, traffic):
    """Pairs of ranks exchange heads, and rings of p / 2 ranks pass on the keys and values of half the heads."""
    p = far_comm.size
    ring, kv_bytes = p // 2, 2 * WHOLE // p
    block = layer(far_comm.split(far_comm.rank), SequenceParallel(far_comm, "hybrid"))
    forward, backward = passes(traffic, block, SEQ // p)
    exchanges = {Done("all_to_all", 2, WHOLE // p): 4}
    check(forward, exchanges | {Done("shift", ring, kv_bytes): ring - 1})
    check(backward, exchanges | {Done("shift", ring, kv_bytes): 2 * ring - 1})
