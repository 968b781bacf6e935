"""Validation losses and perplexities of several files, beside the plain model's."""

import math
from pathlib import Path

import numpy as np
import pytest

from mpi_tests.helpers.trained import TEXT, config, validation
from training.loop import train

FILES = [str(TEXT.with_name("README.md")), str(TEXT.with_name("Makefile"))]


@pytest.mark.parametrize("layout", [{}, {"zero_stage": 3}], ids=["dp", "ZeRO 3"])
@pytest.mark.sizes(1, 2)
def test_each_file_s_perplexity_is_that_of_the_plain_model(comm, capsys, layout):
    check_files(comm, config(comm.size, val_data=FILES, max_iters=1, **layout), capsys)


@pytest.mark.sizes(2)
def test_stages_validate_files(comm, capsys):
    check_files(comm, config(1, val_data=FILES, max_iters=1, pp=2, num_micro_batches=2), capsys)


def check_files(comm, settings, capsys):
    """Check the losses and perplexities after a step, of each file and of all of them."""
    model, records = train(settings, comm)
    (record,) = [record for record in records if "val_loss" in record]
    texts = [np.frombuffer(Path(path).read_bytes(), np.uint8) for path in FILES]
    expected = [validation(model.eval(), ids) for ids in (*texts, np.concatenate(texts))]
    names = [*(f"/{path}" for path in FILES), ""]
    assert [record[f"val_loss{name}"] for name in names] == pytest.approx(expected, rel=1e-5)
    assert [record[f"val_perplexity{name}"] for name in names] == pytest.approx([*map(math.exp, expected)], rel=1e-4)
    printed = capsys.readouterr().out
    for path, loss in zip(FILES, expected, strict=False):
        assert f"iter 1/1 | val loss of {path} {loss:.4f} | perplexity {math.exp(loss):.2f}\n" in printed
