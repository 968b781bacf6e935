"""Documents as a benchmark writes them, made up."""

from functools import cache
from itertools import product
from statistics import median

import numpy as np

SIZES = tuple(8 << 2 * step for step in range(10))  # 8 B to 2 MiB
NAMES = ("ring", "binomial", "rabenseifner", "chain", "mpi")


def row(name="ring", nbytes=1024, samples=(10.0, 11.0, 12.0), **fields):
    """A result; `fields` over what is usual."""
    middle = median(samples)
    usual = {
        "collective": "all_reduce",
        "name": name,
        "memory": "ordinary",
        "device": "cpu",
        "dtype": "float32",
        "op": "sum",
        "root": None,
        "bytes": nbytes,
        "count": nbytes // 4,
        "in_place": True,
        "samples_us": list(samples),
        "min_us": min(samples),
        "median_us": middle,
        "p99_us": max(samples),
        "cv_percent": 1.0,
        "algbw_gbps": nbytes / middle / 1e3,
        "busbw_gbps": 1.5 * nbytes / middle / 1e3,
        "model_us": None if name == "mpi" else 0.9 * middle,
        "bound_percent": None,
        "wrong": 0,
    }
    return usual | fields


def document(results, ranks=4, **fields):
    usual = {
        "schema": 1,
        "command": ["python", "-m", "collectives.bench"],
        "started": "2026-01-01T00:00:00",
        "environment": {"mpi": "MPICH 5.0.2"},
        "ranks": ranks,
        "nodes": [ranks],
        "links": {},
        "results": list(results),
        "average_busbw_gbps": 1.0,
    }
    return usual | fields


def noisy(
    seed,
    scale=0.1,
    slowed=lambda result: 1.0,
    memories=("ordinary", "symmetric"),
    names=NAMES,
    collectives=("all_reduce",),
):
    """A run as on a busy machine, whose times are `slowed` by a factor.

    Rows differ from run to run by `scale`, one in twenty by tens of percent more; all at one size by a quarter of it;
    samples follow each other's ups and downs, and one in ten takes far longer.
    """
    results = []
    for fields, samples in measured(seed, scale, memories, names, collectives):
        results.append(row(samples=(samples * slowed(fields)).tolist(), nbytes=fields["bytes"], **fields))
    return document(results)


@cache
def measured(seed, scale, memories, names, collectives):
    """What `noisy` slows down: names of rows, and samples."""
    random = np.random.default_rng(seed)
    shared = {nbytes: random.normal(0, scale / 4) for nbytes in SIZES}
    rows = []
    for collective, memory, name, nbytes in product(collectives, memories, names, SIZES):
        level = shared[nbytes] + random.normal(0, scale) + (random.random() < 0.05) * np.log1p(random.exponential(0.3))
        wander = np.convolve(random.normal(0, 0.05, 27), np.ones(8) / 8**0.5, mode="valid")
        spikes = 1 + (random.random(20) < 0.1) * random.pareto(2, 20)
        samples = (5 + nbytes / 1000) * np.exp(level + wander) * spikes
        fields = {"collective": collective, "memory": memory, "name": name, "bytes": nbytes}
        rows.append((fields, samples))
    return rows
