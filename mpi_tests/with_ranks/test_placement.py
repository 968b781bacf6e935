"""train.py with the model on an emulated device: no operation may mix device and host tensors."""

from dataclasses import replace

import pytest
import torch

from mpi_tests.helpers.placement import pretending
from training.loop import train
from training.settings.config import Config

pytestmark = [
    pytest.mark.sizes(1),
    pytest.mark.filterwarnings("ignore:.*CUDA is not available.*:UserWarning"),
]

SMALL = Config(
    n_layer=2, n_head=2, n_embd=16, block_size=8, max_iters=2, warmup_iters=1, eval_interval=2, sample_tokens=2,
    val_fraction=0.001, bucket_mb=0.005, out_dir="",
)  # fmt: skip
ALONE = [
    {}, {"zero_stage": 3}, {"dropout": 0.1}, {"dtype": "bfloat16", "master_weights": True}, {"reproducible": True},
    {"num_experts": 2}, {"num_experts": 2, "zero_stage": 2, "dropout": 0.1}, {"optimizer": "muon"},
    {"document_end": 10}, {"optimizer": "sgd"},
]  # fmt: skip


def test_memories_do_not_meet(comm, monkeypatch):
    with pretending(monkeypatch) as placement:
        there, here = torch.ones(3, device="cuda"), torch.ones(3)
        assert (there.device.type, here.device.type) == ("cuda", "cpu")
        assert placement.has((there + 1).view(3, 1)[1:])
        assert there.sum() * here[0] == 3
        assert not placement.has(there.cpu())
        assert placement.has(here.to("cuda"))
        for mix in (lambda: there + here, lambda: there @ here, lambda: torch.cat([there, here])):
            with pytest.raises(AssertionError, match="on cuda:0 and on the host"):
                mix()
        with pytest.raises(TypeError, match="numpy of a tensor on cuda:0"):
            there.numpy()


@pytest.mark.parametrize("changes", ALONE, ids=str)
def test_training(comm, monkeypatch, changes):
    config = replace(SMALL, **changes)
    monkeypatch.setattr("training.parallel.staged.fuse", lambda model: None)  # the host's kernels
    want = weights(train(config, comm).model)
    with pretending(monkeypatch) as placement:
        gpt = train(replace(config, device="cuda"), comm).model
        assert all(placement.has(p) for p in gpt.parameters())
        actual = [p.cpu() for p in gpt.parameters()]
    for a, b in zip(actual, want, strict=True):  # attention with dropout has a kernel only on the host
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5 if config.dropout else 0)


def weights(gpt):
    return [p.detach().clone() for p in gpt.parameters()]
