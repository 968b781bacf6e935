"""The learning rate over time with each schedule, compared with NumPy's interpolation."""

import math

import numpy as np
import pytest

from training.optim.learning_rate import learning_rate


@pytest.mark.parametrize(("warmup", "last"), [(10, 100), (0, 7), (5, 5), (1, 2)])
def test_warm_up_is_a_line_and_the_rest_a_cosine_to_a_tenth(warmup, last):
    rates = [learning_rate(i, 2.0, warmup, last) for i in range(1, last + 1)]
    np.testing.assert_allclose(rates[:warmup], [2.0 * i / warmup for i in range(1, warmup + 1)])
    turn = np.arange(1, last - warmup + 1) / max(1, last - warmup)  # fraction of half a period, 0 to 1
    np.testing.assert_allclose(rates[warmup:], [1.1 + 0.9 * math.cos(math.pi * t) for t in turn])
    assert max(rates) <= 2.0
    assert rates[-1] == pytest.approx(0.2 if warmup < last else 2.0)


# The rate at some of 100 steps, 10 of them warm-up; it is linear in between.
LINES = {
    "linear": ({}, {10: 2.0, 100: 0.2}),
    "linear to 0.5 at 60": ({"min_lr": 0.5, "decay_iters": 60}, {10: 2.0, 60: 0.5, 100: 0.5}),
    "linear, never down": ({"min_lr": 0.0, "decay_iters": 190}, {10: 2.0, 100: 1.0}),
    "constant": ({}, {10: 2.0, 100: 2.0}),
    "wsd": ({}, {10: 2.0, 80: 2.0, 100: 0.2}),
    "wsd, the last 30": ({"min_lr": 0.0, "decay_iters": 30}, {10: 2.0, 70: 2.0, 100: 0.0}),
    "wsd, none stable": ({"decay_iters": 100}, {10: 2.0, 100: 0.2}),
}


@pytest.mark.parametrize(("name", "settings", "points"), [(name, *each) for name, each in LINES.items()], ids=LINES)
def test_lines(name, settings, points):
    schedule, steps = name.split()[0].rstrip(","), range(1, 101)
    rates = [learning_rate(i, 2.0, 10, 100, schedule, **settings) for i in steps]
    np.testing.assert_allclose(rates, np.interp(steps, [0, *points], [0.0, *points.values()]), atol=1e-12)


def test_a_cosine_may_end_before_the_run_and_elsewhere_than_at_a_tenth():
    rates = [learning_rate(i, 2.0, 0, 100, "cosine", min_lr=1.0, decay_iters=40) for i in (10, 20, 40, 99)]
    np.testing.assert_allclose(rates, [1.5 + 0.5 * math.cos(math.pi / 4), 1.5, 1.0, 1.0])
