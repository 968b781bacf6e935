"""Activation recomputation: fewer activations, blocks run twice, equal gradients; combined with all other features."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from models.config import ModelConfig
from models.decoder import Decoder
from mpi_tests.helpers.models import close, random_tokens, randomized
from mpi_tests.helpers.played import (
    ALONE,
    CONFIG,
    DROPPING,
    Players,
    batch_of,
    check_results,
    dropping_results,
    micro_batches,
    model_of,
)
from parallelism.numerics.dropout import BatchPosition
from parallelism.pipeline.schedule import registry
from parallelism.step.deferred import WeightGradients, deferring
from parallelism.tensor.sharding_plan import parallelize
from training.parallel.decoder import MODES, plan_of, recompute_model

TOKENS, TARGETS = random_tokens(2, 8), random_tokens(2, 8, seed=1)
each_kind = pytest.mark.parametrize("mode", MODES)


def recomputing(model, position=None, mode="full"):
    recompute_model(model, mode, position)
    return model


def gradients(model):
    model(TOKENS, TARGETS)[1].backward()
    return {name: p.grad for name, p in model.named_parameters()}


def test_blocks_run_again_and_gradients_stay_the_same():
    model, runs = randomized(CONFIG), []
    for number, block in enumerate(model.transformer.h):
        block.attn.register_forward_hook(lambda *_, number=number: runs.append(number))
    actual, expected = gradients(recomputing(model)), gradients(randomized(CONFIG))
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.equal(actual[name], gradient)
    assert runs == [*range(CONFIG.n_layer), *reversed(range(CONFIG.n_layer))]
    with torch.no_grad():
        model(TOKENS)
    assert runs[2 * CONFIG.n_layer :] == [*range(CONFIG.n_layer)]


def num_saved(model):
    """Count the tensors that a forward pass keeps for the backward pass, without parameters."""
    saved = []

    def pack(x):
        saved.append(x)
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        x = torch.randn(2, 8, CONFIG.n_embd, dtype=torch.float64, requires_grad=True)
        for block in model.transformer.h:
            x = block(x)
    parameters = {p.data_ptr() for p in model.parameters()}
    return len({x.data_ptr() for x in saved} - parameters)


def test_nothing_within_a_block_is_kept():
    assert num_saved(randomized(CONFIG)) > 10 * CONFIG.n_layer
    assert num_saved(recomputing(randomized(CONFIG))) <= CONFIG.n_layer


class Storages(TorchDispatchMode):
    """Recorder of storages created in this context, except parameters; `kept_bytes` counts those still alive."""

    def __init__(self, model):
        super().__init__()
        self.tensors, self.parameters = {}, {p.untyped_storage()._cdata for p in model.parameters()}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage and storage._cdata not in self.parameters:
                self.tensors[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return result

    def kept_bytes(self):
        return sum(nbytes for storage, nbytes in self.tensors.values() if not storage.expired())


def cost(mode, dropout):
    """Return the memory that a block's forward pass keeps, in units of its input, and the backward pass's FLOPs."""
    position, shape = BatchPosition(samples=torch.arange(2)), (2, 64, 64)
    model = Decoder(ModelConfig(vocab_size=8, block_size=64, n_layer=1, n_head=4, n_embd=64, dropout=dropout))
    parallelize(model, plan_of(model.config), ALONE, place=position)
    if mode:
        recompute_model(model, mode, position)
    x = torch.randn(shape, requires_grad=True)
    with Storages(model) as storages:
        y = model.transformer.h[0](x)
    num_buffers = storages.kept_bytes() / x.nbytes
    with FlopCounterMode(display=False) as flops:
        y.sum().backward()
    return num_buffers, flops.get_total_flops()


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_bytes_kept_and_work_done_again(dropout):
    """Attention keeps no scores, with or without dropout, so the GELU is worth recomputing."""
    (plain, flops), (selective, selective_flops), (full, full_flops) = (
        cost(mode, dropout) for mode in (None, *MODES[::-1])
    )
    assert selective == pytest.approx(plain - 4, abs=0.1)
    assert 15 < plain < 18
    assert full < 1.01  # the result, and the dropout keys
    assert selective_flops == flops
    assert full_flops == pytest.approx(flops * 3 / 2, rel=0.15)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@each_kind
def test_torchs_own_dropout_draws_the_same_again(mode, dropout):
    config = ModelConfig(**{**vars(CONFIG), "dropout": dropout})
    torch.manual_seed(0)
    expected = gradients(randomized(config))
    torch.manual_seed(0)
    for name, gradient in gradients(recomputing(randomized(config), mode=mode)).items():
        close(gradient, expected[name])


def test_an_unknown_mode():
    with pytest.raises(ValueError, match="recompute mode 'some' is unknown: use full or selective"):
        recompute_model(Decoder(CONFIG), "some")


@each_kind
@pytest.mark.parametrize("name", ["gpipe", "interleaved", "zb_h1", "zb_v"])
def test_pipelines_with_dropout(name, mode):
    """Forward passes of other micro-batches come before a backward pass, which must use the original dropout state."""
    position = BatchPosition(seed=3)
    players = Players(
        lambda: recomputing(model_of(DROPPING, position), position, mode), registry.make_schedule(name, 2, 3), position
    )
    batch = batch_of(6)
    check_results(players, micro_batches(batch, 3), dropping_results(DROPPING, 6), 1e-10)
    assert torch.equal(position.samples, batch.samples[-2:])


@each_kind
def test_bfloat16_and_putting_off(mode):
    results = []
    for make in (Decoder, lambda config: recomputing(Decoder(config), mode=mode)):
        model, deferred = make(CONFIG), WeightGradients()
        with torch.autocast("cpu", torch.bfloat16), deferring(deferred):
            _, loss = model(TOKENS, TARGETS)
        loss.backward()
        deferred.flush()
        results.append([p.grad for p in model.parameters()])
    for expected, actual in zip(*results, strict=True):
        assert torch.equal(actual, expected)
