"""Tensor parallelism compared with the plain GPT: loss, logits and every gradient."""

import pytest
import torch

from models.config import ModelConfig
from models.decoder import Decoder
from mpi_tests.helpers.models import close, each_mode, part, random_tokens, randomized
from parallelism import ColumnParallel, RowParallel, parallelize
from parallelism.placement import shard_of
from training.parallel.decoder import plan_of

BATCH, SEQ = 2, 8
WIDTHS = pytest.mark.sizes(1, 2, 4, proof=(8,))
CONFIGS = {
    "plain": ModelConfig(vocab_size=29, block_size=12, n_layer=2, n_head=8, n_embd=32),
    "biases, grouped heads, odd vocabulary, narrow MLP": ModelConfig(
        vocab_size=37, block_size=SEQ, n_layer=2, n_head=16, n_embd=64, bias=True, n_kv_head=8, n_hidden=48
    ),
}
each_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def models(config, comm, sequence, seed_targets=1):
    """Make a plain model and a parallelized one with the same weights."""
    plain, split = randomized(config), randomized(config)
    plan = plan_of(config)
    parallelize(split, plan, comm, sequence=sequence)
    return plain, split


@WIDTHS
@each_mode
@each_config
def test_loss_and_every_gradient_are_the_plain_models(comm, config, sequence):
    plain, split = models(config, comm, sequence)
    tokens, targets = random_tokens(BATCH, SEQ), random_tokens(BATCH, SEQ, seed=1)
    targets[0, 3:5] = -100
    _, expected = plain(tokens, targets)
    logits, loss = split(tokens, targets)
    assert logits.shape[-1] == -(-config.vocab_size // comm.size)
    close(loss, expected)
    expected.backward()
    loss.backward()
    gradients = {name: p.grad for name, p in plain.named_parameters()}
    assert dict(split.named_parameters()).keys() == gradients.keys()
    for name, p in split.named_parameters():
        close(p.grad, part(p, gradients[name], comm))


@WIDTHS
@each_mode
@each_config
def test_evaluation_and_generation(comm, config, sequence):
    plain, split = models(config, comm, sequence)
    plain.eval(), split.eval()
    tokens = random_tokens(BATCH, SEQ)
    for actual, expected in zip(split(tokens, tokens), plain(tokens, tokens), strict=True):
        close(actual, expected)


@WIDTHS
@each_mode
@each_config
def test_parts_make_the_whole(comm, config, sequence):
    plain, split = models(config, comm, sequence)
    wholes = dict(plain.named_parameters())
    for name, p in split.named_parameters():
        if shard := shard_of(p, "tp"):
            parts = [shard.local(wholes[name], rank, comm.size) for rank in range(comm.size)]
            assert torch.equal(parts[comm.rank], p)
            assert torch.equal(shard.whole(parts), wholes[name])


@WIDTHS
def test_linear_layers_by_themselves(comm):
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3)).double()
    split = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3)).double()
    split.load_state_dict(plain.state_dict())
    parallelize(split, {"0": ColumnParallel(), "2": RowParallel()}, comm)
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    close(split(x), plain(x))


@pytest.mark.sizes(4)
def test_what_cannot_be_split(comm):
    from collectives import InputError

    def check_refusal(match, plan=None, **changes):
        model = Decoder(
            ModelConfig(**({"vocab_size": 29, "block_size": 8, "n_layer": 1, "n_head": 6, "n_embd": 24} | changes))
        )
        config = model.config
        with pytest.raises(InputError, match=match):
            parallelize(model, plan or plan_of(config), comm)

    check_refusal(r"^n_head=6 is not divisible by tp=4: use a tp of 1, 2, 3, 6, or n_head=8$")
    check_refusal(r"^n_kv_head=2 is not divisible by tp=4: use a tp of 1, 2, or n_kv_head=4$", n_head=8, n_kv_head=2)
    own = {"lm_head": ColumnParallel(pieces=(6,))}
    check_refusal(r"^lm_head: out_features=6 is not divisible by tp=4: use a tp of 1, 2, 3, 6, or out_features=8$", own)
    check_refusal(r"transformer\.wte: 3 tokens can't be split over tp=4: use fewer ranks", n_head=8, vocab_size=3)
    check_refusal(
        r"the plan names 'h\.\*\.mlp', but the model has transformer, transformer\.wte", {"h.*.mlp": ColumnParallel()}
    )


@pytest.mark.sizes(2)
def test_modules_without_a_plan_are_named(comm, capsys):
    models(CONFIGS["plain"], comm, sequence=False)
    assert capsys.readouterr().out == ""  # that plan covers all modules
    model = Decoder(CONFIGS["plain"])
    parallelize(
        model, {"transformer.h.*.mlp.c_fc": ColumnParallel(), "transformer.h.*.mlp.c_proj": RowParallel()}, comm
    )
    line = capsys.readouterr().out
    assert line.startswith(
        "replicated on every rank, as the plan does not name them: transformer.wte, " * (comm.rank == 0)
    )
    assert ("transformer.h.0.attn.c_attn" in line) == (comm.rank == 0)
    assert "mlp" not in line
