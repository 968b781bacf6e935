"""Training in each precision compared with float32, and the handling of gradients that overflow."""

import pytest
import torch

from parallelism.numerics.non_finite import LossScale
from parallelism.numerics.precision import Precision


def test_the_loss_scale_grows_after_good_steps_and_falls_at_once():
    scale, values = LossScale(4.0, growth_interval=3), []
    for finite in (True, True, False, True, True, True, True, True, True, False, False, False, False):
        scale.update(torch.tensor(finite))
        values.append(scale.state()[0])
    assert values == [4, 4, 2, 2, 2, 4, 4, 4, 8, 4, 2, 1, 1]
    scale.load(2.0**23, 0)
    for _ in range(6):
        scale.update(torch.tensor(True))
    assert scale.state() == (2.0**24, 0)
    fixed = LossScale(1.0, growth_interval=None)
    fixed.update(torch.tensor(False))
    fixed.load(2.0, 3)
    assert fixed.state() == (1, 0)
    assert fixed.inverse is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("int8",), "dtype=int8 is unknown: use float32, float64, bfloat16, float16"),
        (("float32", True), "master_weights are kept beside 16-bit parameters, but dtype=float32: use bfloat16 or"),
        (("float64", False, "float32"), "grad_dtype=float32 beside dtype=float64, master_weights=False: use float64"),
        (("float16", False, "float16"), "beside dtype=float16, master_weights=False: use float32 or bfloat16"),
        (("float16", True, "bfloat16"), "beside dtype=float16, master_weights=True: use float32 or float16"),
    ],
)
def test_precisions_that_do_not_go_together(settings, message):
    with pytest.raises(ValueError, match=message):
        Precision(*settings)
