"""A benchmark's results as one JSON document, and as CSV."""

import csv
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from io import StringIO
from pathlib import Path
from typing import Any

from mpi4py import MPI

from collectives import arrays, environment
from collectives.algorithms import ROOTED
from collectives.arguments import REDUCTIONS
from collectives.bench.document import SCHEMA
from collectives.bench.measure import Result
from collectives.bench.report import average_gbps
from collectives.communicator import Communicator
from collectives.cost import Network
from collectives.job import library_name
from collectives.tuning import network_to_json

CUPY = ("cupy", "cupy-cuda12x", "cupy-cuda13x")  # what the package is called
DIGITS = 6


def document(comm: Communicator, started: str, network: Network, rows: Sequence[Result], device: str) -> dict[str, Any]:
    """Everything about a run.  Collective; every rank gets the same."""
    return {
        "schema": SCHEMA,
        "command": sys.orig_argv,
        "started": started,
        "environment": surroundings(comm, device),
        "ranks": comm.size,
        "nodes": [len(node) for node in comm.topology.nodes],
        "links": network_to_json(network),
        "results": [result(row) for row in rows],
        "average_busbw_gbps": average_gbps(rows),
    }


def surroundings(comm: Communicator, device: str) -> dict[str, Any]:
    """What a run depends on.  Collective."""
    here = sorted(os.sched_getaffinity(0)), environment.cores(), device_name(device)
    binding, cores, devices = zip(*comm.mpi.allgather(here), strict=True)
    return {
        "mpi": library_name(MPI),
        "python": sys.version.split()[0],
        **{name: installed(name) for name in ("numpy", "mpi4py", "torch")},
        "cupy": next(filter(None, map(installed, CUPY)), None),
        "hosts": comm.host_names(),
        "binding": binding,
        "cores": [cores[node[0]] for node in comm.topology.nodes],
        "devices": [name for name in devices if name],
        "env": environment.variables(),
        "git": commit(),
    }


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def device_name(device: str) -> str | None:
    if device == "cpu":
        return None
    runtime = arrays.device(device).xp.cuda.runtime
    return runtime.getDeviceProperties(runtime.getDevice())["name"].decode()


def commit() -> str | None:
    """The commit of this project that runs, where it runs from a checkout."""
    words = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        asked = subprocess.run(words, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return asked.stdout.strip() or None


def result(row: Result) -> dict[str, Any]:
    setting = row.setting
    return {
        "collective": setting.collective,
        "name": row.name,
        "algorithm": row.algorithm,
        "memory": setting.memory,
        "device": setting.device,
        "dtype": str(setting.dtype),
        "op": setting.op if setting.collective in REDUCTIONS else None,
        "root": setting.root if setting.collective in ROOTED else None,
        "bytes": row.nbytes,
        "count": row.count,
        "in_place": row.in_place,
        "samples_us": [micro(seconds) for seconds in row.samples_s.tolist()],
        "min_us": micro(row.samples_s.min()),
        "median_us": micro(row.median_s),
        "p99_us": micro(row.p99_s),
        "cv_percent": round(row.cv_percent, DIGITS),
        "algbw_gbps": round(row.algbw_gbps, DIGITS),
        "busbw_gbps": round(row.busbw_gbps, DIGITS),
        "model_us": None if row.model_s is None else micro(row.model_s),
        "bound_percent": None if row.bound_percent is None else round(row.bound_percent, DIGITS),
        "wrong": row.wrong,
    }


def micro(seconds: float) -> float:
    return round(float(seconds) * 1e6, 3)


def to_json(data: dict[str, Any]) -> str:
    """The document's text, with a line for each result."""
    rows = ",\n".join(f"  {json.dumps(row)}" for row in data["results"])
    values = {key: json.dumps(value) for key, value in data.items()} | {"results": f"[\n{rows}\n ]"}
    return "{\n" + ",\n".join(f' "{key}": {value}' for key, value in values.items()) + "\n}\n"


def to_csv(rows: Sequence[Result]) -> str:
    """The results without their samples."""
    table = [{key: value for key, value in result(row).items() if key != "samples_us"} for row in rows]
    text = StringIO()
    writer = csv.DictWriter(text, list(table[0]) if table else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    return text.getvalue()
