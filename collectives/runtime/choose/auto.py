"""The choice of `algorithm="auto"`: the fastest algorithm by measurement, else by the cost model; never "mpi".

Measurements are in the tuning file, with the machine's speeds for the cost model:
`python -m collectives.bench --tune FILE` writes it, COLLECTIVES_TUNING=FILE makes `algorithm="auto"` follow it.  It is
JSON, or a network in TOML (network_file.py), which has speeds only; a row of `fastest` gives, for a collective, a kind
of memory, a number of ranks and a number of nodes, the best algorithms, each up to a number of bytes of the vector:

    {"collective": "all_reduce", "memory": "ordinary", "ranks": 4, "nodes": 1,
     "up_to_bytes": [[16384, "recursive_doubling"], [134217728, "ring"]]}

A size counts as the nearest that was measured, on a logarithmic scale; the cost model decides for sizes larger than
twice the largest, and without a row.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from collectives import algorithms
from collectives.algorithms import Access, Algorithm, variants
from collectives.algorithms.own import is_own
from collectives.schedule.cost import predict
from collectives.schedule.network import NETWORK, Link, Network, Nodes, Tier, check_tiers

VERSION = 1
SHORT_BYTES = 16 << 10  # a vector below which latency decides
MOST_TIMES = 10  # what an algorithm may cost by default speeds, as a multiple of the least, to be chosen by others
MEMORIES = ("symmetric", "ordinary")  # arrays from `comm.empty`, and all others


class Case(NamedTuple):
    """The case that a row of the file is for."""

    collective: str
    memory: str
    ranks: int
    nodes: int


Limits = tuple[tuple[int, str], ...]  # ascending pairs of a limit in bytes and the algorithm up to there


@dataclass(frozen=True, eq=False)
class Tuning:
    """The measurements of a machine, by default none."""

    network: Network = NETWORK
    source: str = ""  # the file's path
    fastest: Mapping[Case, Limits] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)  # of the measurement
    measured: str = ""  # when the network's speeds were measured, if they were, without a file
    defaults: Network = NETWORK  # the speeds by which `network`, where it differs, must be plausible

    def find(self, case: Case, nbytes: int) -> str | None:
        """Return the algorithm that was the fastest there, if that was measured."""
        return next((name for limit, name in self.fastest.get(case, ()) if nbytes <= limit), None)


UNTUNED = Tuning()
Candidates = tuple[Algorithm, ...]  # rows of one collective that can be run


def usable(rows: Sequence[Algorithm], access: Access) -> Candidates:
    """Return the rows that ranks with this access can run."""
    return tuple(row for row in rows if row.access <= access)


class Question(NamedTuple):
    """A choice to be made: a vector of `nbytes`, in one kind of memory, and the candidates for it."""

    collective: str
    nbytes: int
    candidates: Candidates
    nodes: Nodes
    tuning: Tuning = UNTUNED
    memory: str = "ordinary"

    @property
    def case(self) -> Case:
        return Case(self.collective, self.memory, sum(map(len, self.nodes)), len(self.nodes))

    @property
    def measured(self) -> str | None:
        """The candidate that was measured to be the fastest, if one was."""
        return self.tuning.find(self.case, self.nbytes)

    def ranking(self) -> list[tuple[str, float]]:
        network = self.tuning.network
        defaults = self.tuning.defaults._replace(cores=network.cores)
        return ranking(self.nbytes, self.candidates, self.nodes, network, self.memory, defaults)


@lru_cache(maxsize=4096)
def choose(question: Question) -> str:
    """Choose a candidate: the fastest by measurement, else by the cost model."""
    measured = question.measured
    usable_names = [each.name for row in question.candidates for each in (row, *algorithms.variants_of(row))]
    is_usable = measured is not None and (measured in usable_names or measured.rpartition("/")[0] in usable_names)
    return measured if measured and is_usable else question.ranking()[0][0]


def ranking(
    nbytes: int,
    candidates: Candidates,
    nodes: Nodes,
    network: Network = NETWORK,
    memory: str = "symmetric",
    defaults: Network | None = None,
) -> list[tuple[str, float]]:
    """Return the candidates' names and predicted seconds, best first; of equal ones, the registry's first.

    Last come those of which the measured speeds are not to be believed:

    - messages for all but short vectors, where ranks can read each other's arrays: the speeds of long vectors price
      them too low for those that caches hold, where they take 2 to 6 times as long (benchmarks/results/README.md);
    - by the speeds `defaults`, what costs more than `MOST_TIMES` the least, and for short vectors in a node messages,
      unless they cost the least: speeds that were measured on a busy machine are wrong by a factor of 50.

    >>> from collectives.algorithms import find
    >>> rows = find("all_reduce", "ring"), find("all_reduce", "recursive_doubling")
    >>> [name for name, _ in ranking(1024, rows, nodes=(tuple(range(8)),))]
    ['recursive_doubling', 'ring']
    >>> [name for name, _ in ranking(1 << 20, rows, nodes=(tuple(range(8)),))]
    ['ring', 'recursive_doubling']
    """
    size = sum(map(len, nodes))
    reads_arrays = size > 1 and nbytes >= SHORT_BYTES and any(row.access == Access.DIRECT for row in candidates)
    is_short_in_node = len(nodes) == 1 and nbytes < SHORT_BYTES and any(row.access for row in candidates)

    def priced(row: Algorithm, speeds: Network) -> tuple[str, float]:
        if reads_arrays and row.access < Access.STAGED:  # it comes last: which of its variants, does not matter
            some = row.cut_into(1) if is_own(row) and variants.is_open(row) else row
            return row.name, predicted_s(some, nbytes, nodes, speeds, memory)
        best, seconds = best_variant(row, nbytes, nodes, speeds, memory)
        return best.name, seconds

    usual = {row: priced(row, defaults)[1] for row in candidates} if defaults else {}
    least = min(usual.values(), default=0.0)

    def is_last(row: Algorithm) -> bool:
        most_times = 1 if is_short_in_node and row.access == Access.MESSAGES else MOST_TIMES
        return (reads_arrays and row.access < Access.STAGED) or usual.get(row, 0.0) > most_times * least

    predicted = [(row, is_last(row), *priced(row, network)) for row in candidates]
    best_s = min((seconds for _, last, _, seconds in predicted if not last), default=0.0)

    def key(each: tuple[Algorithm, bool, str, float]) -> tuple[bool, float]:
        row, last, _, seconds = each
        return last, best_s if row.over_nodes and seconds <= variants.margin(nbytes) * best_s else seconds

    return [(name, seconds) for _, _, name, seconds in sorted(predicted, key=key)]


@lru_cache(maxsize=4096)
def best_variant(
    row: Algorithm, nbytes: int, nodes: Nodes, network: Network, memory: str = "ordinary"
) -> tuple[Algorithm, float]:
    """Return the variant of an algorithm that takes the least time by the cost model, and its seconds."""
    num_nodes = [tier.nodes for tier in network.tiers]
    return variants.best(row, nbytes, nodes, lambda each: predicted_s(each, nbytes, nodes, network, memory), num_nodes)


def predicted_s(row: Algorithm, nbytes: int, nodes: Nodes, network: Network, memory: str) -> float:
    """Predict an algorithm's seconds, with the copy to a working vector that may come before the rounds."""
    size = sum(map(len, nodes))
    seconds = predict(row, nbytes, size, nodes, network=speeds_of(row, network, memory))
    if row.access < Access.STAGED:
        fraction = {"all_gather": 1 / size, "reduce_scatter": 1.0}.get(row.collective, 0.0)
        seconds += nbytes * fraction * network.copy_s_per_byte
    return round(seconds, 12)


def speeds_of(row: Algorithm, network: Network, memory: str) -> Network:
    """Return the speeds at which an algorithm reads others' memory: staging buffers, or arrays, through the system."""
    if row.access == Access.STAGED:
        return network._replace(pull_s_per_byte=network.staged_s_per_byte)
    if row.access < Access.DIRECT or memory != "ordinary":
        return network
    alpha, beta = network.system
    return network._replace(meet_s=network.meet_s + alpha, pull_s_per_byte=beta)


def explain(question: Question) -> str:
    """Report the choice, its reason, and the model's prediction for each candidate, in a few lines."""
    choice, (collective, _, size, nodes) = choose(question), question.case
    where = f"{size} rank{'s' * (size != 1)} of {nodes} node{'s' * (nodes != 1)}"
    lines = [f"{collective} of {question.nbytes} bytes on {where}: {choice}", reason(question, choice)]
    for name, seconds in question.ranking():
        lines.append(f"{seconds * 1e6:14.1f} us  {name}{' <' * (name == choice)}")
    return "\n".join(lines)


def reason(question: Question, choice: str) -> str:
    tuning = question.tuning
    if choice == question.measured:
        return f"measured to be the fastest ({tuning.source}); the cost model, with the speeds measured, says:"
    if tuning.source:
        return f"not measured ({tuning.source}); by the cost model, with the speeds of that file:"
    speeds = f"the speeds measured on these hosts {tuning.measured}" if tuning.measured else "default speeds"
    usual = choose(question._replace(tuning=Tuning(tuning.defaults._replace(cores=tuning.network.cores))))
    if usual != choice:
        speeds += f", where default speeds choose {usual} (see python -m collectives.bench --links)"
    return f"not measured (COLLECTIVES_TUNING names no file); by the cost model, with {speeds}:"


def limits(winners: Sequence[tuple[int, str]]) -> Limits:
    """Derive limits from the fastest algorithm of each measured size, ascending.

    >>> limits([(8, "bruck"), (32, "bruck"), (128, "ring")])
    ((64, 'bruck'), (256, 'ring'))
    """
    ends = [math.isqrt(a * b) for (a, _), (b, _) in pairwise(winners)] + [2 * winners[-1][0]]
    following = [name for _, name in winners[1:]] + [""]
    return tuple((end, name) for end, (_, name), after in zip(ends, winners, following, strict=True) if name != after)


def to_json(tuning: Tuning) -> str:
    """Format a tuning file."""
    head = {"version": VERSION, "environment": tuning.environment, "network": network_to_json(tuning.network)}
    lines = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
    rows = [f"  {json.dumps(case._asdict() | {'up_to_bytes': limits})}" for case, limits in tuning.fastest.items()]
    return "{\n" + ",\n".join([*lines, ' "fastest": [\n' + ",\n".join(rows)]) + "\n ]\n}\n"


def network_to_json(network: Network) -> dict[str, Any]:
    """Return the speeds, without tiers if there are none, as files have them that were written before there were."""
    values = network._asdict()
    tiers = [{name: link_to_json(value) for name, value in tier._asdict().items()} for tier in values.pop("tiers")]
    return {name: link_to_json(value) for name, value in values.items()} | ({"tiers": tiers} if tiers else {})


def link_to_json(value: Any) -> Any:
    return value._asdict() if isinstance(value, Link) else value


def read_tuning(path: Path) -> str:
    """Read a tuning file.

    Raises: ValueError with the remedy.
    """
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ValueError(
            f"COLLECTIVES_TUNING={path}: can't be read ({error.strerror}): check the path, or unset it"
        ) from None


def parse_tuning(text: str, source: str) -> Tuning:
    """Parse a tuning file that was read from `source`.

    Raises: ValueError with the fault and the remedy.
    """
    try:
        data = json.loads(text)
        if take(data, "version", int) != VERSION:
            raise ValueError(f"version is {data['version']}, but must be {VERSION}")
        network, environment = parse_network(take(data, "network", dict)), take(data, "environment", dict)
        return Tuning(network, source, dict(map(parse_row, take(data, "fastest", list))), environment)
    except ValueError as error:
        reason = f"not JSON ({error})" if isinstance(error, json.JSONDecodeError) else error
        raise ValueError(
            f"COLLECTIVES_TUNING={source}: {reason}: make it anew by python -m collectives.bench --tune {source}, "
            "or unset it"
        ) from None


def take(data: Any, name: str, kind: type) -> Any:
    """Return a field of a JSON object, which must be there and of that type."""
    if not isinstance(data, dict) or name not in data:
        raise ValueError(f"{name!r} is missing")
    if not isinstance(data[name], kind) or isinstance(data[name], bool):
        raise ValueError(f"{name!r} is {json.dumps(data[name])}, but must be of type {kind.__name__}")
    return data[name]


def parse_network(data: dict[str, Any]) -> Network:
    within, between = (Link(*numbers(take(data, name, dict), *Link._fields)) for name in ("within", "between"))
    nic = parse_port(data, "nic")
    system = Link(*numbers(take(data, "system", dict), *Link._fields)) if "system" in data else NETWORK.system
    gamma, copy, barrier, cores = numbers(data, "gamma_s_per_byte", "copy_s_per_byte", "meet_s", "cores")
    (staged,) = numbers({"staged_s_per_byte": NETWORK.staged_s_per_byte} | data, "staged_s_per_byte")
    tiers = tuple(map(parse_tier, take({"tiers": []} | data, "tiers", list)))
    check_tiers(tiers)
    return Network(
        within, between, gamma, copy, barrier, system, staged, cores=int(cores), nic=nic, tiers=tiers
    )  # fmt: skip


def parse_tier(data: Any) -> Tier:
    link = Link(*numbers(take(data, "link", dict), *Link._fields))
    return Tier(take(data, "nodes", int), link, parse_port(data, "port"))


def parse_port(data: dict[str, Any], name: str) -> Link | None:
    """Return the link that messages occupy, maybe for their bytes only; None for none."""
    return Link(*numbers(take(data, name, dict), *Link._fields, or_zero="alpha_s")) if data.get(name) else None


def numbers(data: dict[str, Any], *names: str, or_zero: str = "") -> list[float]:
    """Return fields that must be positive numbers, but for the one that may be 0."""
    for name in names:
        number, words = data.get(name), "of at least 0" if name == or_zero else "above 0"
        is_number = isinstance(number, int | float) and 0 <= number < math.inf
        if not is_number or (number == 0 and name != or_zero):
            raise ValueError(f"{name!r} is {json.dumps(number)}, but must be a number {words}")
    return [data[name] for name in names]


def parse_row(data: Any) -> tuple[Case, Limits]:
    case = Case(*(take(data, name, kind) for name, kind in Case.__annotations__.items()))
    names = algorithms.names(case.collective)
    bounds = [-1]
    for entry in take(data, "up_to_bytes", list):
        if not (isinstance(entry, list) and list(map(type, entry)) == [int, str]):
            raise ValueError(f"'up_to_bytes' has {json.dumps(entry)}, but must have pairs of bytes and a name")
        try:
            algorithms.find(case.collective, entry[1])
        except ValueError:
            words = f"{case.collective} has no algorithm {entry[1]!r}: it has {', '.join(names) or 'none'}"
            raise ValueError(words) from None
        bounds.append(entry[0])
    if any(a >= b for a, b in pairwise(bounds)):
        raise ValueError(f"'up_to_bytes' of {case.collective} does not ascend")
    return case, tuple((end, name) for end, name in data["up_to_bytes"])
