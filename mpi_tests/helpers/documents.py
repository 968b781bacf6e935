"""Documents as a benchmark writes them, made up."""

from statistics import median


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
