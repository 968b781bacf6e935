"""What a benchmark has measured, read back from its JSON document and checked."""

import json
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from collectives.tuning import take

SCHEMA = 1
PEERS = frozenset({"mpi", "gloo", "nccl"})  # names in an algorithm's place: others' collectives


class Group(NamedTuple):
    """A line of a picture or a table: what is measured at several sizes."""

    collective: str
    name: str  # of the algorithm, or one of `PEERS`
    memory: str
    device: str
    dtype: str
    op: str | None
    root: int | None
    in_place: bool


class Row(NamedTuple):
    """A group at one size, in microseconds and 10^9 bytes a second."""

    group: Group
    nbytes: int
    samples_us: tuple[float, ...]  # in the order in which they were taken
    median_us: float
    busbw_gbps: float | None
    model_us: float | None

    @property
    def key(self) -> tuple[Group, int]:
        return self.group, self.nbytes


class Document(NamedTuple):
    path: str
    ranks: int
    nodes: tuple[int, ...]  # ranks of each
    environment: Mapping[str, Any]
    rows: tuple[Row, ...]


def read(path: str | Path) -> Document:
    """Read a document.

    Raises: ValueError with the file's name, what is wrong with it, and the remedy.
    """
    from collectives.bench import peer_runs  # which makes documents of this module

    try:
        data = json.loads(Path(path).read_text())
    except OSError as error:
        raise ValueError(f"{path}: can't be read ({error.strerror}): check the path") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON ({error}): measure it anew by python -m collectives.bench") from None
    is_peer_run = peer_runs.is_peer_run(data)
    if not is_peer_run and (what := other_kind(data)):
        raise ValueError(f"{path}: {what}")
    try:
        return (peer_runs.parse_peer_run if is_peer_run else parse)(data, str(path))
    except ValueError as error:
        raise ValueError(f"{path}: {error}: measure it anew by python -m collectives.bench") from None


def other_kind(data: Any) -> str:
    """What a file of ours holds, if that is no collectives' times, and what takes it; empty for others."""
    if not isinstance(data, dict) or "schema" in data:
        return ""
    if "fastest" in data:
        return "a tuning file, which has no times: it is for COLLECTIVES_TUNING, or for --from with --tune-openmpi"
    if "results" in data:
        program = next((word for word in str(data.get("command", "")).split() if word.endswith(".py")), "a program")
        return (
            f"results of {program}, which are no times of collectives by size: --plots and --compare take those alone"
        )
    return ""


def parse(data: Any, path: str) -> Document:
    if take(data, "schema", int) != SCHEMA:
        raise ValueError(f"schema is {data['schema']}, but this build reads {SCHEMA}")
    ranks, nodes = take(data, "ranks", int), take(data, "nodes", list)
    if not all(type(node) is int for node in nodes) or sum(nodes) != ranks:
        raise ValueError(f"'nodes' is {json.dumps(nodes)}, but must have the ranks of each node, {ranks} in all")
    rows = tuple(numbered(number, row) for number, row in enumerate(take(data, "results", list)))
    twice = [key for key, times in Counter(row.key for row in rows).items() if times > 1]
    if twice:
        group, nbytes = twice[0]
        raise ValueError(f"two results are of {group.collective} {group.name}, {nbytes} bytes")
    return Document(path, ranks, tuple(nodes), take(data, "environment", dict), rows)


def numbered(number: int, data: Any) -> Row:
    try:
        return parse_row(data)
    except ValueError as error:
        raise ValueError(f"results[{number}]: {error}") from None


def parse_row(data: Any) -> Row:
    fields = [take(data, name, str) for name in ("collective", "name", "memory", "device", "dtype")]
    fields += [optional(data, "op", str), optional(data, "root", int), bool(data.get("in_place"))]
    samples = tuple(positive(sample, "samples_us") for sample in take(data, "samples_us", list))
    if not samples:
        raise ValueError("'samples_us' is empty")
    nbytes = take(data, "bytes", int)
    if nbytes < 0:
        raise ValueError(f"'bytes' is {nbytes}, but must not be below 0")
    median = positive(data.get("median_us"), "median_us")
    model = None if data.get("model_us") is None else positive(data["model_us"], "model_us")
    return Row(Group(*fields), nbytes, samples, median, bandwidth(data.get("busbw_gbps")), model)


def optional(data: dict[str, Any], name: str, kind: type) -> Any:
    return None if data.get(name) is None else take(data, name, kind)


def bandwidth(number: Any) -> float | None:
    """Above 0; None where there is none, as for a barrier."""
    return None if number in (None, 0) else positive(number, "busbw_gbps")


def positive(number: Any, name: str) -> float:
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number < math.inf:
        raise ValueError(f"{name!r} has {json.dumps(number)}, but must be above 0")
    return float(number)
