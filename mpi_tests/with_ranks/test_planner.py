"""The planner: memory against real models and what autograd saves, times against sums by hand and schedules' prices."""

import numpy as np
import pytest

from collectives import InputError
from models.config import GPTConfig
from parallelism.planner import TrainingJob
from parallelism.planner.ranks import best_layout

SMALL = GPTConfig(vocab_size=101, block_size=32, n_layer=5, n_head=4, n_embd=64, n_kv_head=2, bias=True)


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
    with pytest.raises(InputError, match="no layout of 2 ranks: global_batch_size=3 can't be shared by dp=2"):
        best_layout(comm, TrainingJob(SMALL, 3), {"dp": 2})
